"""Virtual time: what is to happen, in order; at one moment, what was planned first comes first."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

PlannedAction = Callable[..., object]


class Timeline:
    """Plan what happens with `at` and `after`; `advance` lets it happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, PlannedAction, tuple[Any, ...]]] = []
        self._numbers = count()

    @property
    def next_at(self) -> float | None:
        """When the next thing happens, if anything is planned."""
        return self._planned[0][0] if self._planned else None

    def at(self, time: float, action: PlannedAction, *facts: Any) -> None:
        """Plan an action; what is over already happens now."""
        heapq.heappush(self._planned, (max(time, self.now), next(self._numbers), action, facts))

    def after(self, seconds: float, action: PlannedAction, *facts: Any) -> None:
        """Plan an action so many seconds from now."""
        heapq.heappush(self._planned, (self.now + seconds, next(self._numbers), action, facts))

    def advance(self, until: float) -> bool:
        """Let the next thing happen; return whether there was one until then."""
        if not self._planned or self._planned[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, action, facts = heapq.heappop(self._planned)
        action(*facts)
        return True
