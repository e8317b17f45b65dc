"""A cluster at work on virtual time: real schedules and timekeepers, one device and one link per node.

A stage takes what its work costs on its node. It sends activations when the forward is done, and gradients
when those of its inputs are; its reports and its pace are those of a real peer. Nothing is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ravnest.config import TIMEOUTS, PeerTimeouts
from ravnest.engine.schedule import StageSchedule, Task, Work
from ravnest.engine.staleness import StalenessPolicy
from ravnest.ids import HUB, LeaseId, MicrobatchId, NodeId
from ravnest.peer.pacing import Timekeeper
from ravnest.plan.line import LineCost
from ravnest.plan.types import Cluster, Stage
from ravnest.protocol.messages import Message
from ravnest.protocol.placement import StagePosition
from ravnest.protocol.training import LeaseDone, LeaseGrant, Pace, StepReport
from ravnest.sim.lines import Lines
from ravnest.sim.timeline import Timeline

_INPUTS_SHARE = 0.5  # of a backward: until the gradient of the inputs can leave
Tell = Callable[[NodeId, Message], object]


@dataclass(frozen=True, slots=True)
class StageWork:
    """What one full microbatch costs a stage: seconds, and bytes that it sends each way."""

    forward_seconds: float
    backward_seconds: float
    sent_forward: float
    sent_back: float

    @classmethod
    def of(cls, stage: Stage, line: LineCost, flops_per_second: float) -> "StageWork":
        """Return the costs of a stage on a node of this speed."""
        forward = float(line.forward_flops[stage.stop] - line.forward_flops[stage.start])
        both = float(line.flops[stage.stop] - line.flops[stage.start]) + stage.recompute * forward
        least = line.config.microbatch_seconds
        times = max(1.0, least * flops_per_second / both) if both else 1.0
        return cls(
            times * forward / flops_per_second,
            times * (both - forward) / flops_per_second if both else least,
            stage.activations.ratio * float(line.inner[stage.stop]),
            stage.gradients.ratio * float(line.inner[stage.start]),
        )


class _SimStage:
    """One stage: what it is to do and what its work costs."""

    __slots__ = ("forwards", "index", "is_busy", "node", "schedule", "timekeeper", "work")

    def __init__(self, index: int, node: NodeId, schedule: StageSchedule, keeper: Timekeeper) -> None:
        self.index, self.node, self.schedule, self.timekeeper = index, node, schedule, keeper
        self.work = StageWork(0.0, 0.0, 0.0, 0.0)
        self.is_busy = False
        self.forwards: dict[MicrobatchId, float] = {}  # seconds, of those in flight


@dataclass(slots=True)
class _OpenLease:
    number: LeaseId
    num_left: int
    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class ClusterBuild:
    """A cluster as it was built: its stages, its number, and the updates that its weights have seen."""

    cluster: Cluster
    build_id: int = 1
    version: int = 0
    seed: int = 0
    policies: tuple[StalenessPolicy, ...] = ()  # of each stage; none: each works as it was built
    is_exact: bool = False


class ClusterPipeline:
    """Grant it leases; `tell` gets what its stages say to the hub."""

    def __init__(
        self,
        timeline: Timeline,
        lines: Lines,
        build: ClusterBuild,
        line: LineCost,
        tell: Tell,
        timeouts: PeerTimeouts = TIMEOUTS.peer,
    ) -> None:
        self._timeline, self._lines, self._line, self._tell = timeline, lines, line, tell
        self.build, self._full = build, line.profile.samples_per_batch
        self.is_over = False
        self.watch_complete: Callable[[NodeId], object] = lambda _: None  # a stage's exact update waits
        self.watch_dry: Callable[[], object] = lambda: None  # the root has nothing to begin
        self._is_paused = False
        self._sizes: dict[MicrobatchId, int] = {}
        self._leases: dict[MicrobatchId, _OpenLease] = {}
        nodes = tuple(stage.node for stage in build.cluster.stages)
        self._stages = tuple(
            self._make_stage(index, stage, nodes, timeouts)
            for index, stage in enumerate(build.cluster.stages)
        )
        self.measure()

    def _make_stage(
        self, index: int, stage: Stage, nodes: tuple[NodeId, ...], timeouts: PeerTimeouts
    ) -> _SimStage:
        build = self.build
        schedule = StageSchedule(
            stage.window, build.cluster.accumulate, version=build.version, is_exact=build.is_exact
        )
        position = StagePosition(build.build_id, build.seed, stage, nodes)
        policy = build.policies[index] if build.policies else None
        keeper = Timekeeper(position, schedule, lambda: self._timeline.now, policy, timeouts)
        return _SimStage(index, stage.node, schedule, keeper)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Its nodes from root to leaf."""
        return tuple(stage.node for stage in self._stages)

    @property
    def version(self) -> int:
        """Updates that its root has made."""
        return self._stages[0].schedule.version

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way."""
        return all(stage.schedule.is_empty and not stage.is_busy for stage in self._stages)

    def measure(self) -> None:
        """Learn what work costs on the nodes as they are now."""
        for stage, planned in zip(self._stages, self.build.cluster.stages, strict=True):
            speed = self._lines.node(stage.node).flops_per_second
            stage.work = StageWork.of(planned, self._line, speed)

    def grant(self, grant: LeaseGrant) -> None:
        """Train the microbatches of a lease; their samples are here."""
        lease = _OpenLease(grant.lease, len(grant.num_samples))
        root = self._stages[0]
        for index, num_samples in enumerate(grant.num_samples):
            microbatch = MicrobatchId(grant.first_microbatch + index)
            self._sizes[microbatch], self._leases[microbatch] = num_samples, lease
            root.schedule.offer_input(microbatch)
        self._start(root)

    def evaluate(self, grant: LeaseGrant) -> None:
        """Evaluate the microbatches of a lease: they only go forward, and the leaf reports each."""
        way, longest, leaf = 0.0, 0.0, self._stages[-1]
        for stage in self._stages:
            way += stage.work.forward_seconds
            longest = max(longest, stage.work.forward_seconds)
            if stage is not leaf:
                ends = stage.node, self._stages[stage.index + 1].node
                upload = self._lines.node(stage.node).upload_bytes_per_second
                crossing = stage.work.sent_forward / upload
                way, longest = way + crossing + self._lines.latency(*ends), max(longest, crossing)
        for index, num_samples in enumerate(grant.num_samples):
            size = num_samples / self._full
            microbatch = MicrobatchId(grant.first_microbatch + index)
            seconds = size * (way + index * longest)
            self._timeline.after(seconds, self._report_evaluated, microbatch, num_samples)

    def _report_evaluated(self, microbatch: MicrobatchId, num_samples: int) -> None:
        if self.is_over:
            return
        version, loss = self._stages[-1].schedule.version, self._loss(self._stages[-1].schedule.version)
        report = StepReport(
            self.build.build_id, microbatch, version, 0, num_samples, 0.0, 0.0, 0.0, 0.0, loss, ()
        )
        self._tell(self._stages[-1].node, report)

    def pause(self) -> None:
        """Begin no more work: a round holds all stages."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on after a round."""
        self._is_paused = False
        for stage in self._stages:
            self._start(stage)

    def end(self) -> None:
        """Stop for good: a node is gone, or has another stage."""
        self.is_over = True

    # Gradient rounds.

    def expect(self, num_microbatches: int | None) -> None:
        """Let the exact update under way have so many microbatches in every stage."""
        for stage in self._stages:
            stage.schedule.expect(num_microbatches)

    def is_complete(self, node: NodeId) -> bool:
        """Return whether a stage has all gradients of its exact update."""
        return next(stage.schedule.is_complete for stage in self._stages if stage.node == node)

    def make_update(self, node: NodeId) -> None:
        """Make the exact update of a stage, which waited for a gradient round."""
        stage = next(stage for stage in self._stages if stage.node == node)
        stage.schedule.end_exact()
        self._start(stage)

    # Work.

    def _start(self, stage: _SimStage) -> None:
        if not stage.index and stage.schedule.next_input is None:
            self.watch_dry()
        if stage.is_busy or self.is_over or self._is_paused:
            return
        task = stage.schedule.next()
        stage.timekeeper.record_idle(task is None)
        if task is None:
            return
        stage.is_busy = True
        num_samples = self._sizes[task.microbatch]
        size = num_samples / self._full
        if task.work is Work.FORWARD:
            seconds = size * stage.work.forward_seconds
            stage.forwards[task.microbatch] = seconds
            self._timeline.after(seconds, self._end_forward, stage, task.microbatch, size)
            return
        seconds = size * stage.work.backward_seconds
        if stage.index:
            self._timeline.after(_INPUTS_SHARE * seconds, self._send_back, stage, task.microbatch, size)
        self._timeline.after(seconds, self._end_backward, stage, task, seconds, num_samples)

    def _end_forward(self, stage: _SimStage, microbatch: MicrobatchId, size: float) -> None:
        if self.is_over:
            return
        stage.is_busy = False
        if stage.index + 1 == len(self._stages):
            stage.schedule.offer_gradient(microbatch)
        else:
            stage.timekeeper.record_sent(microbatch)
            after = self._stages[stage.index + 1]
            sent = size * stage.work.sent_forward
            self._lines.send(stage.node, after.node, sent, self._take_input, after, microbatch)
        self._start(stage)

    def _take_input(self, stage: _SimStage, microbatch: MicrobatchId) -> None:
        stage.schedule.offer_input(microbatch)
        self._start(stage)

    def _send_back(self, stage: _SimStage, microbatch: MicrobatchId, size: float) -> None:
        if self.is_over:
            return
        before, sent = self._stages[stage.index - 1], size * stage.work.sent_back
        self._lines.send(stage.node, before.node, sent, self._take_gradient, before, microbatch)

    def _take_gradient(self, stage: _SimStage, microbatch: MicrobatchId) -> None:
        if self.is_over:
            return
        stage.schedule.offer_gradient(microbatch)
        stage.timekeeper.record_return(microbatch, self._sizes[microbatch])
        self._start(stage)

    def _end_backward(self, stage: _SimStage, task: Task, seconds: float, num_samples: int) -> None:
        if self.is_over:
            return
        stage.is_busy, version = False, stage.schedule.version
        is_leaf = stage.index + 1 == len(self._stages)
        report = StepReport(
            self.build.build_id,
            task.microbatch,
            version,
            task.lag,
            num_samples,
            stage.forwards.pop(task.microbatch),
            seconds,
            0.0,
            0.0,
            self._loss(version) if is_leaf else None,
            (),
        )
        for outgoing in stage.timekeeper.send(report):
            self._post(stage.node, outgoing.to, outgoing.message)
        if stage.index == 0:
            self._finish(task.microbatch)
        if task.is_update:
            for outgoing in stage.timekeeper.end_update():
                self._post(stage.node, outgoing.to, outgoing.message)
        if stage.schedule.is_complete:
            self.watch_complete(stage.node)
        self._start(stage)

    def _finish(self, microbatch: MicrobatchId) -> None:
        lease, num_samples = self._leases.pop(microbatch), self._sizes.pop(microbatch)
        lease.num_left, lease.num_samples = lease.num_left - 1, lease.num_samples + num_samples
        if not lease.num_left:
            done = LeaseDone(self.build.build_id, lease.number, lease.num_samples)
            self._tell(self._stages[0].node, done)

    def _post(self, sender: NodeId, to: NodeId, message: Message) -> None:
        if to == HUB:
            self._tell(sender, message)
        else:
            self._timeline.after(self._lines.latency(sender, to), self._hear, sender, to, message)

    def _hear(self, sender: NodeId, to: NodeId, message: Message) -> None:
        stage = next(each for each in self._stages if each.node == to)
        if isinstance(message, StepReport):
            stage.timekeeper.record_report(message, sender)
        elif isinstance(message, Pace):
            stage.timekeeper.follow_pace(message, sender)
            self._start(stage)

    @staticmethod
    def _loss(version: int) -> float:
        """Return a loss that falls as a usual one does: nothing is learned here."""
        return 2.0 + 8.0 / (1.0 + 0.01 * version)
