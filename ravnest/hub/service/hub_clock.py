"""The hub's own time: it goes on after a restart, never back, and stands while nothing may become late."""

import asyncio
from collections.abc import Callable


class Timer:
    """Calls `ring` once, at the time of the event loop that was set last."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float | None) -> None:
        """Ring at this time, and no longer at the one before; None: not at all."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if at is None else asyncio.get_running_loop().call_at(at, self._ring)


class HubClock:
    """Counts from `least` on; `ring` is called when it is the time that was set last."""

    def __init__(self, least: float, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ahead = max(0.0, least - self._loop.time())
        self._stands_at: float | None = None
        self._due: float | None = None
        self._timer = Timer(ring)

    def now(self) -> float:
        """Return the hub's time."""
        return self._loop.time() + self._ahead if self._stands_at is None else self._stands_at

    def set(self, due: float | None) -> None:
        """Ring at this time, and no longer at the one before; None: not at all."""
        self._due = due
        is_off = due is None or self._stands_at is not None
        self._timer.set(None if due is None or is_off else due - self._ahead)

    def stand(self, *, still: bool) -> None:
        """Stand still, or go on from there."""
        if still and self._stands_at is None:
            self._stands_at = self.now()
        elif not still and self._stands_at is not None:
            self._ahead = self._stands_at - self._loop.time()
            self._stands_at = None
        else:
            return
        self.set(self._due)

    def close(self) -> None:
        """Ring no more."""
        self.set(None)
