"""The congestion window of a link: how many bytes may be on the wire, and how soon the next may follow.

Each link keeps about as many of its own bytes queued as any other, so links that share a line share it
fairly. A link whose waiting bytes would take longer may queue more, so that none is last by far. Only the
queue on the way there counts; the time that confirmations wait behind the other side's bytes is added on
top. Chunks are spread over a journey, or both ways of a link would take turns to be idle.
"""

from collections import deque
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from math import inf

SMALLEST_WINDOW_BYTES = 32 * 1024
FIRST_WINDOW_BYTES = 64 * 1024
SMALLEST_CHUNK_BYTES = 16 * 1024
CHUNKS_PER_WINDOW = 8
QUEUE_BYTES = 64 * 1024  # of ours that may queue, when what waits would take a second
QUEUE_SHARES = (0.5, 2.0)  # of that at least and at most, when it would take less or more
QUEUE_SECONDS = 0.01  # of our rate that may queue besides: two event loops are not exact
LONGEST_QUEUE_SECONDS = 0.1  # in front of an urgent message
GAIN = 0.25  # of what the queue is off, per journey: confirmations are old news, so gently
GROWTH = 0.5  # of it per journey, until there is a queue for the first time
LATER_GROWTH = 0.05  # when there is hardly any
PACE = 1.25  # times as fast as the window allows: late ones catch up
BURST_SECONDS = 0.005  # what is late may follow at once, so that timers need not be exact
WHILE_SECONDS = 60.0  # in which two clocks hardly drift apart
_SHORTEST_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class Departure:
    """When a chunk left, and how many bytes were on the wire with it."""

    at: float
    in_flight_bytes: int


class Window:
    """Ask it before a chunk leaves, tell it when one has left and when one was confirmed."""

    def __init__(self, largest_bytes: int) -> None:
        self._largest = largest_bytes
        self.size_bytes = min(FIRST_WINDOW_BYTES, largest_bytes)
        self.free_at = -inf  # when the next chunk may leave
        self._there_bytes = float(self.size_bytes)  # without what waits to be confirmed
        self._there, self._back = _Excess(), _Excess()
        self._recent: deque[tuple[float, float]] = deque()  # of the way there: when, seconds in a queue
        self._journey = 0.0
        self._is_growing = True

    @property
    def chunk_bytes(self) -> int:
        """How large a chunk may be: one that passes slowly would look like a queue."""
        share = min(1 / CHUNKS_PER_WINDOW, QUEUE_SECONDS / max(self._journey, _SHORTEST_SECONDS))
        return max(
            1, min(SMALLEST_CHUNK_BYTES, self.size_bytes // CHUNKS_PER_WINDOW), int(share * self.size_bytes)
        )

    def pace(self, chunk_bytes: int, now: float) -> None:
        """Record that a chunk leaves."""
        seconds = chunk_bytes * self._journey / (PACE * self.size_bytes)
        self.free_at = max(self.free_at, now - BURST_SECONDS) + seconds

    def adjust(
        self, departure: Departure, behind: float, arrived_bytes: int, waiting_bytes: int, now: float
    ) -> None:
        """Record that bytes are confirmed, the last of them `behind` seconds late by two clocks."""
        journey = max(now - departure.at, _SHORTEST_SECONDS)
        in_flight = max(departure.in_flight_bytes, arrived_bytes)
        passed = min(1.0, arrived_bytes / in_flight)  # of a journey
        self._journey += (passed if self._journey else 1.0) * (journey - self._journey)
        rate = in_flight / journey
        queued = rate * self._queue_seconds(behind, journey, now)
        share = min(QUEUE_SHARES[1], max(QUEUE_SHARES[0], waiting_bytes / rate))
        extra = min(share * QUEUE_BYTES, rate * (LONGEST_QUEUE_SECONDS - QUEUE_SECONDS))
        room = rate * QUEUE_SECONDS + extra - queued
        self._is_growing = self._is_growing and room > queued
        if room < 0 or 2 * in_flight >= self.size_bytes:  # it grows only while it is in use
            growth = GROWTH if self._is_growing else LATER_GROWTH
            change = max(GAIN * room, growth * in_flight) if room > queued else GAIN * room
            self._there_bytes += max(change, -self._there_bytes / 2) * passed
            self._there_bytes = min(self._largest, max(SMALLEST_WINDOW_BYTES, self._there_bytes))
        waits = min(LONGEST_QUEUE_SECONDS, self._back.of(journey - behind, now))
        self.size_bytes = min(self._largest, int(self._there_bytes + rate * waits))

    def _queue_seconds(self, behind: float, journey: float, now: float) -> float:
        """Return how long bytes queue on the way there; a busy event loop alone is no queue."""
        self._recent.append((now, self._there.of(behind, now)))
        while self._recent[0][0] < now - min(journey, LONGEST_QUEUE_SECONDS):
            self._recent.popleft()
        return min(seconds for _, seconds in self._recent)


class _Excess:
    """How much longer something takes than when it is quickest, by two clocks that may drift apart."""

    def __init__(self) -> None:
        self._quickest = (inf, inf)  # of this while and of the one before
        self._while_ends = -inf

    def of(self, seconds: float, now: float) -> float:
        if now > self._while_ends:
            self._quickest, self._while_ends = (seconds, self._quickest[0]), now + WHILE_SECONDS
        self._quickest = (min(self._quickest[0], seconds), self._quickest[1])
        return seconds - min(self._quickest)


UPLOAD_BURST_SECONDS = (
    0.1  # of sending that may be saved up, and that one chunk takes: what is urgent waits no longer
)
_SMALLEST_LIMITED_CHUNK_BYTES = 1024


def affordable_chunk_bytes(bytes_per_second: float) -> float:
    """Return the largest chunk that does not hold up the others for long at this rate."""
    return max(_SMALLEST_LIMITED_CHUNK_BYTES, UPLOAD_BURST_SECONDS * bytes_per_second)


class Upload:
    """The upload limit of a program: pay for what is sent, ask how long to wait. inf is no limit."""

    def __init__(self, bytes_per_second: float = inf) -> None:
        assert bytes_per_second > 0
        self._rate = bytes_per_second
        self._saved_bytes = UPLOAD_BURST_SECONDS * bytes_per_second  # below zero: owed
        self._now = -inf

    def wait_seconds(self, now: float) -> float:
        """Return how long what is not urgent has to wait."""
        if self._rate == inf:
            return 0.0
        saved = self._saved_at(now)
        return 0.0 if saved > -1.0 else -saved / self._rate  # a rounded byte is no reason to wait

    def pay(self, frames: Sequence[Sized], now: float) -> None:
        """Record that this left."""
        if self._rate < inf:
            self._saved_bytes, self._now = self._saved_at(now) - sum(map(len, frames)), now

    def _saved_at(self, now: float) -> float:
        if self._now == -inf:
            return self._saved_bytes
        return min(UPLOAD_BURST_SECONDS * self._rate, self._saved_bytes + (now - self._now) * self._rate)
