"""How far a transfer is, as people read it: how much has come, how fast, how long the rest takes. Pure."""

from collections import deque

from ravnest.units import show_bytes, show_seconds

_MARKS = 6  # the rate is that of the time since the oldest of the last so many reports


class TransferProgress:
    """Tell it how many bytes are there; it says how long the rest will take."""

    def __init__(self, what: str, size_bytes: int) -> None:
        self._what, self.size_bytes = what, size_bytes
        self.told = ""  # last
        self._marks: deque[tuple[float, int]] = deque(maxlen=_MARKS)

    def describe(self, num_bytes: int, now: float) -> str:
        """Return the sentence for this moment."""
        self._marks.append((now, num_bytes))
        since, before = self._marks[0]
        rate = (num_bytes - before) / (now - since) if now > since else 0.0
        told = f"{self._what}: {show_bytes(num_bytes)} of {show_bytes(self.size_bytes)}"
        if rate > 0:
            told += f", {show_bytes(rate)}/s, {show_seconds((self.size_bytes - num_bytes) / rate)} left"
        self.told = told
        return told
