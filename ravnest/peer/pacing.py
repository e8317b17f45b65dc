"""How a stage keeps time: how long it works, how far ahead it may run.

Every stage of a cluster reports to the root now and then. The root measures how long a microbatch is away and
lets engine.staleness decide; every stage follows its Pace.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median

from ravnest.config import TIMEOUTS, PeerTimeouts
from ravnest.engine.schedule import StageSchedule
from ravnest.engine.staleness import (
    Decision,
    StageTimes,
    StalenessController,
    StalenessPolicy,
    gradient_weight,
)
from ravnest.ids import HUB, MicrobatchId, NodeId
from ravnest.plan.types import Stage
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import StagePosition
from ravnest.protocol.training import Pace, StepReport
from ravnest.transfer.outbox import Outgoing

_REPORT_BATCHES = 17  # between reports to the root, and its decisions; prime, to be in step with no update
_REMEMBERED = 5  # reports of a stage
_DAY = 86_400.0


def make_policy(planned_updates: int, max_lag: int | None, stage: Stage, accumulate: int) -> StalenessPolicy:
    """Return what bounds the staleness of one stage: accumulation is the plan's, the rest is measured.

    So many updates are planned for its cluster.
    """
    return StalenessPolicy(
        planned_updates=planned_updates,
        accumulate_min=accumulate,
        accumulate_max=accumulate,
        window_max=stage.window,
        max_lag=max_lag,
    )


@dataclass(slots=True)
class Device:
    """What a stage computes on. An emulated one is slower than this PC: it waits when work is done too soon.

    The seconds are what one sample takes; zero is as fast as it goes.
    """

    clock: Callable[[], float]
    wait: Callable[[float], object] = lambda _: None
    forward_seconds: float = 0.0
    inputs_seconds: float = 0.0
    weights_seconds: float = 0.0
    name: str = "cpu"  # as torch has it
    late_seconds: float = 0.0  # that the last wait ended too late: on the device the next work began before

    def stretch(self, started: float, seconds: float) -> None:
        """Wait until a piece of work that began at `started` has taken so long."""
        if not seconds:
            return
        due = started + seconds - self.late_seconds
        left, self.late_seconds = due - self.clock(), 0.0
        if left > 0:
            self.wait(left)
            self.late_seconds = max(0.0, self.clock() - due)


@dataclass(slots=True)
class IdleTime:
    """How long a stage had nothing to run, and which share that is of the time since the start."""

    start: float
    seconds: float = 0.0
    since: float | None = None

    def record(self, is_idle: bool, now: float) -> None:
        """Record whether there was something to run."""
        if is_idle and self.since is None:
            self.since = now
        elif not is_idle and self.since is not None:
            self.seconds += now - self.since
            self.since = None

    def share(self, now: float) -> float:
        """Return the share, at a time when there is something to run."""
        return min(1.0, self.seconds / (now - self.start)) if now > self.start else 0.0


@dataclass(slots=True)
class _StageSeen:
    """The last times that a stage reported; their medians soon forget a cold start."""

    forward: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    backward: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    times: StageTimes = field(default_factory=lambda: StageTimes(0.0, 0.0))
    idle_share: float = 0.0


class Timekeeper:
    """The times of one stage: it reports them and follows the pace, which the root sets.

    Without a policy no pace is set, and the stage works as it was built.
    """

    def __init__(
        self,
        position: StagePosition,
        schedule: StageSchedule,
        clock: Callable[[], float],
        policy: StalenessPolicy | None,
        timeouts: PeerTimeouts = TIMEOUTS.peer,
    ) -> None:
        self._timeouts = timeouts
        self._position = position
        self._is_leaf = position.after is None
        self._schedule = schedule
        self._clock = clock
        self._policy = policy
        self._idle = IdleTime(clock())
        self._num_reports = 0
        self._reported_at = clock()  # to the hub
        self._work = (0.0, 0.0, 0)  # since then: seconds forward and backward, samples
        self._sent_at: dict[MicrobatchId, float] = {}
        # Seconds a full microbatch was away; the least ever, so nothing queued then.
        self._shortest = math.inf
        self._num_samples = 0  # of a full microbatch
        self._seen: dict[int, _StageSeen] = {}  # by stage
        self._controller: StalenessController | None = None
        self._last: Decision | None = None
        self._num_unpaced = 0  # microbatches since the last decision
        if policy is not None and position.before is None:
            self._controller = StalenessController(policy)
            self._decide()

    @property
    def link_seconds(self) -> float:
        """How long a microbatch spends on the cluster's links when nothing queues; only the root knows."""
        if not self._is_measured or self._is_leaf:
            return 0.0
        later = sum(seen.times.compute_seconds for stage, seen in self._seen.items() if stage)
        return max(0.0, self._shortest - later)

    @property
    def _is_measured(self) -> bool:
        num_stages = len(self._position.pipeline)
        return len(self._seen) == num_stages and (self._shortest < math.inf or num_stages == 1)

    def follow_pace(self, pace: Pace, sender: NodeId) -> Refusal | None:
        """Work at the root's pace."""
        if sender != self._position.pipeline[0]:
            return Refusal(f"only the root sets the pace, not {sender}")
        self._resize(pace.window, pace.accumulate, pace.is_synchronous)
        return None

    def record_report(self, report: StepReport, sender: NodeId) -> Refusal | None:
        """As the root, learn from the report of a stage of the cluster."""
        if self._controller is None:
            return Refusal(f"the report of {sender} on microbatch {report.microbatch} is not for this stage")
        self._learn(self._position.pipeline.index(sender), report)
        return None

    def record_idle(self, is_idle: bool) -> None:
        """Record whether there was something to run."""
        self._idle.record(is_idle, self._clock())

    def record_sent(self, microbatch: MicrobatchId) -> None:
        """Record that a microbatch leaves for the next stage."""
        self._sent_at[microbatch] = self._clock()

    def record_return(self, microbatch: MicrobatchId, num_samples: int) -> None:
        """Record that its gradient is here; a smaller microbatch than others says nothing of them."""
        now = self._clock()
        seconds = now - self._sent_at.pop(microbatch, now)
        if num_samples > self._num_samples:
            self._num_samples, self._shortest = num_samples, math.inf
        if num_samples == self._num_samples:
            self._shortest = min(self._shortest, seconds)

    def forget(self, microbatch: MicrobatchId) -> None:
        """Expect nothing more of a microbatch."""
        self._sent_at.pop(microbatch, None)

    def weight(self, lag: int) -> float:
        """Return how much the gradient of a microbatch counts that is so late."""
        policy = self._policy
        return gradient_weight(lag, policy.lag_bound(self._schedule.version)) if policy is not None else 1.0

    def send(self, report: StepReport) -> Iterator[Outgoing]:
        """Report to hub and root now and then, often at first; the leaf reports every loss to the hub.

        The hub gets the mean seconds since the last report, so it sees what a busy PC takes away.
        """
        report = self._complete(report)
        self._num_reports += 1
        is_due = self._num_reports % _REPORT_BATCHES == 0 or self._num_reports in (1, 2, 4, 8)
        forward, backward, num_samples = self._work
        forward, backward = forward + report.forward_seconds, backward + report.backward_seconds
        self._work = (forward, backward, num_samples + report.num_samples)
        is_time = self._clock() >= self._reported_at + self._timeouts.report_every_seconds
        if is_due or is_time or self._is_leaf:
            share = report.num_samples / max(1, self._work[2])
            self._reported_at, self._work = self._clock(), (0.0, 0.0, 0)
            yield Outgoing(
                HUB, replace(report, forward_seconds=share * forward, backward_seconds=share * backward)
            )
        if is_due:
            self._idle = IdleTime(self._clock())
            if self._controller is not None:
                self._learn(0, report)
            elif self._policy is not None:
                yield Outgoing(self._position.pipeline[0], report)
        elif self._controller is not None:
            self._controller.observe(report.lag)

    def _complete(self, report: StepReport) -> StepReport:
        share = self._idle.share(self._clock())
        return replace(report, idle_share=share, link_seconds=self.link_seconds)

    def end_update(self) -> Iterator[Outgoing]:
        """As the root, set a new pace if it is time for one."""
        policy, last, num_updates = self._policy, self._last, self._schedule.version
        if policy is None or last is None:
            return
        self._num_unpaced += last.accumulate
        is_over = last.synchronous and not policy.is_synchronous(num_updates)
        if self._num_unpaced < _REPORT_BATCHES and not is_over:
            return
        found = self._decide()
        if (found.window, found.synchronous) != (last.window, last.synchronous):
            pace = Pace(
                self._position.build_id, num_updates, found.window, found.accumulate, found.synchronous
            )
            for node in self._position.pipeline[1:]:
                yield Outgoing(node, pace)

    def _decide(self) -> Decision:
        """Follow a new decision, and return it."""
        assert self._controller is not None
        stages: list[StageTimes] = []
        idle_share = 0.0
        if self._is_measured:
            stages = [self._seen[stage].times for stage in range(len(self._position.pipeline))]
            stages[0] = replace(stages[0], link_seconds=self.link_seconds)
            slowest = max(self._seen.values(), key=lambda seen: seen.times.compute_seconds)
            idle_share = slowest.idle_share
        found = self._controller.decide(self._schedule.version, stages, idle_share)
        self._last, self._num_unpaced = found, 0
        self._resize(found.window, found.accumulate, found.synchronous)
        return found

    def _resize(self, window: int, accumulate: int, is_synchronous: bool) -> None:
        """Work at this pace, within what the memory of this stage was planned for."""
        most = self._policy.window_max if self._policy is not None else window
        self._schedule.resize(min(window, most), accumulate, is_synchronous)

    def _learn(self, stage: int, report: StepReport) -> None:
        assert self._controller is not None
        self._controller.observe(report.lag)
        if len(self._position.pipeline) == 1:
            self._num_samples = max(self._num_samples, report.num_samples)
        seconds = report.forward_seconds + report.backward_seconds
        # What a short microbatch takes says little; what others say is believed only within reason.
        if not self._num_samples / 2 <= report.num_samples <= self._num_samples or not 0 <= seconds <= _DAY:
            return
        size = self._num_samples / max(report.num_samples, 1)
        seen = self._seen.setdefault(stage, _StageSeen())
        seen.forward.append(size * report.forward_seconds)
        seen.backward.append(size * report.backward_seconds)
        seen.times = StageTimes(median(seen.forward), median(seen.backward))
        seen.idle_share = report.idle_share
