"""How much may leave a PC over all its links: a bucket of bytes that fills with time. It does no I/O.

What goes is paid for afterwards, so that what is urgent can always go and is owed; everything else waits
until nothing is owed. Driven by endpoint.
"""

from collections.abc import Sequence, Sized
from math import inf

BURST_SECONDS = (
    0.1  # of sending that may be saved up, and that one chunk takes: what is urgent waits no longer
)
_SMALLEST_CHUNK_BYTES = 1024


def affordable_chunk_bytes(bytes_per_second: float) -> float:
    """Return the largest chunk that does not hold up the others for long at this rate."""
    return max(_SMALLEST_CHUNK_BYTES, BURST_SECONDS * bytes_per_second)


class Upload:
    """Pay for what is sent; ask how long to wait. Without a rate nobody waits."""

    def __init__(self, bytes_per_second: float = inf) -> None:
        assert bytes_per_second > 0
        self._rate = bytes_per_second
        self._saved_bytes = BURST_SECONDS * bytes_per_second  # below zero: owed
        self._now = -inf

    def wait_seconds(self, now: float) -> float:
        """Return how long what is not urgent has to wait."""
        if self._rate == inf:
            return 0.0
        saved = self._saved_at(now)
        return 0.0 if saved > -1.0 else -saved / self._rate  # a rounded byte is no reason to wait

    def pay(self, frames: Sequence[Sized], now: float) -> None:
        """Note that this left."""
        if self._rate < inf:
            self._saved_bytes, self._now = self._saved_at(now) - sum(map(len, frames)), now

    def _saved_at(self, now: float) -> float:
        if self._now == -inf:
            return self._saved_bytes
        return min(BURST_SECONDS * self._rate, self._saved_bytes + (now - self._now) * self._rate)
