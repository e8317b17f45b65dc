"""How stale training may get: the policy sets the window and the accumulation of a cluster.

Lag is counted in updates, so the cheap lever is more microbatches per update. The window shrinks only where
accumulation cannot rise. The bound T(k) = max(1, c*k^(1/4)) grows with the updates k; measured lag and idle
time trim the window beneath it. Early lag hurts most, hence a short synchronous start.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LONG_RUN_UPDATES = 5000
_ROUNDING = 1e-9  # keeps 0.1 * 8 / 0.1 and 1296 ** 0.25 on the whole number they stand for


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """What the user, the memory and the length of the run allow.

    0 planned updates are unknown: then training starts asynchronously and has the bound of a short run.
    """

    planned_updates: int
    accumulate_min: int = 1
    accumulate_max: int = 64
    window_max: int = 64  # what the memory of the stages holds
    max_lag: int | None = None  # the user's cap on the bound; 0 trains synchronously
    growth: float | None = None  # c of the bound; None: 0.5, and 1 for long runs
    synchronous_share: float = 0.05  # of the planned updates
    synchronous_max_updates: int = 200
    queues: float = 1.5  # microbatches in flight over those under way: almost equal stages let them queue
    spare_batches: int = 2  # and so many more
    idle_share_max: float = 0.05
    feedback_updates: int = 50

    @property
    def synchronous_updates(self) -> int:
        """Length of the synchronous start."""
        share = math.floor(self.synchronous_share * self.planned_updates + _ROUNDING)
        return min(share, self.synchronous_max_updates)

    def lag_bound(self, num_updates: int) -> int:
        """Return T(k), the lag allowed once k = `num_updates` updates were made."""
        growth = self.growth
        if growth is None:
            growth = 1.0 if self.planned_updates > LONG_RUN_UPDATES else 0.5
        bound = math.floor(growth * math.pow(num_updates, 0.25) + _ROUNDING)
        return max(1, bound if self.max_lag is None else min(bound, self.max_lag))

    def is_synchronous(self, num_updates: int) -> bool:
        """Return whether the update after `num_updates` is a synchronous one."""
        return self.max_lag == 0 or num_updates < self.synchronous_updates


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Measured seconds of one microbatch in a stage and on the links that leave it."""

    forward_seconds: float
    backward_seconds: float
    link_seconds: float = 0.0

    @property
    def compute_seconds(self) -> float:
        """How long a microbatch keeps the stage busy."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class Decision:
    """What the stages of the cluster are resized to."""

    window: int
    accumulate: int
    synchronous: bool


def window_needed(stages: Sequence[StageTimes], queues: float = 1.0, spare_batches: int = 0) -> int:
    """Return how many microbatches in flight keep the slowest stage busy; a single stage lets none queue."""
    slowest = max(stage.compute_seconds for stage in stages)
    if slowest <= 0:  # nothing measured yet
        return len(stages)
    around = sum(stage.compute_seconds + stage.link_seconds for stage in stages)
    if len(stages) == 1:
        queues, spare_batches = 1.0, 0
    return max(1, math.ceil(queues * around / slowest - _ROUNDING) + spare_batches)


def gradient_weight(lag: int, bound: int) -> float:
    """Return the weight of a gradient: 1, and less for a straggler beyond twice the bound."""
    return bound / lag if lag > 2 * bound else 1.0


class StalenessController:
    """Decides window and accumulation from the clock of updates, stage times and measured lag."""

    def __init__(self, policy: StalenessPolicy) -> None:
        assert 1 <= policy.accumulate_min <= policy.accumulate_max
        assert policy.window_max >= 1
        self._policy = policy
        self._lags: Counter[int] = Counter()
        self._trim = 0  # what feedback added to the window that is needed by calculation
        self._last_feedback = 0

    def observe(self, lag: int) -> None:
        """Record the measured lag of one backward."""
        self._lags[lag] += 1

    def decide(self, num_updates: int, stages: Sequence[StageTimes], idle_share: float = 0.0) -> Decision:
        """Return the bounds to train with from now on; `idle_share` is the slowest stage's.

        Without stage times it is the widest window that the lag and the memory allow.
        """
        policy = self._policy
        bound = policy.lag_bound(num_updates)
        needed = policy.window_max
        if stages:
            needed = window_needed(stages, policy.queues, policy.spare_batches)
        useful = min(needed, policy.window_max)
        accumulate = max(policy.accumulate_min, math.ceil((useful - 1) / bound))
        accumulate = min(accumulate, policy.accumulate_max)
        if policy.is_synchronous(num_updates):
            self._restart_feedback(num_updates)
            return Decision(min(accumulate, policy.window_max), accumulate, True)
        limit = min(accumulate * bound + 1, policy.window_max)
        window = min(max(needed + self._trim, min(needed, 2)), limit)
        if num_updates - self._last_feedback >= policy.feedback_updates and self._lags:
            lag = _percentile_99(self._lags)
            self._restart_feedback(num_updates)
            target = self._target(window, limit, lag - bound, idle_share)
            if target != window:
                self._trim = target - needed
                window = target
        return Decision(window, accumulate, False)

    def _target(self, window: int, limit: int, excess_lag: int, idle_share: float) -> int:
        if excess_lag > 0:
            return min(window, max(2, window - 1))
        if idle_share > self._policy.idle_share_max:  # the limit holds the lag within the bound
            return min(window + 1, limit)
        return window

    def _restart_feedback(self, num_updates: int) -> None:
        self._lags.clear()
        self._last_feedback = num_updates


def _percentile_99(lags: Counter[int]) -> int:
    left = math.floor(lags.total() * 0.01)  # observations that may lie above
    for lag in sorted(lags, reverse=True):
        left -= lags[lag]
        if left < 0:
            return lag
    raise AssertionError("no lag was observed")
