"""What stages say, each under the plan it follows: ready, done, dropped, kept, missing.

Driven by hub.state.
"""

from dataclasses import replace
from typing import assert_never

from ravnest.hub.events import Order, Tell
from ravnest.hub.forming import Forming
from ravnest.hub.guarding import Guard
from ravnest.hub.keeping import Keeping
from ravnest.hub.members import ClusterState, Members, is_sensible
from ravnest.hub.mending import Mending
from ravnest.hub.news import BatchDropped, EpochDone, Evaluated, SpeedChanged
from ravnest.hub.speeds import Speeds
from ravnest.hub.stalls import Stalls
from ravnest.hub.training import Training
from ravnest.plan.types import NodeId
from ravnest.protocol import DroppedBatch, LeaseDone, StepReport
from ravnest.staging import SnapshotMade, StageMissing, StageReady

_OfCluster = StageReady | StageMissing | LeaseDone | StepReport | DroppedBatch
OfStages = _OfCluster | SnapshotMade
_Ordered = list[Order] | str  # orders, or why the message is refused


class Hearing:
    """Passes on what a stage says to who waits for it."""

    def __init__(
        self, members: Members, keeping: Keeping, mending: Mending, forming: Forming, guard: Guard
    ) -> None:
        self._members, self._keeping = members, keeping
        self._mending, self._forming, self._guard = mending, forming, guard
        self.speeds = Speeds()
        self.stalls = Stalls(members, keeping.number, mending.find_lazy)

    def hear(self, sender: NodeId, message: OfStages, training: Training, now: float) -> _Ordered:
        """Take what a member says of its stage, or of the one it had."""
        cluster, name = self._members.cluster_of(sender), type(message).__name__
        if message.epoch != self._members.epoch(sender):
            return f"{name} of plan {message.epoch} from {sender}, who follows {self._members.epoch(sender)}"
        if isinstance(message, SnapshotMade):
            if self.stalls.take(sender, message):
                return []
            if self._keeping.awaits(sender, message):
                return [*self._keeping.take(sender, message)]
            return self._mending.take_snapshot(sender, message)
        if cluster is None:
            return f"{name} from {sender}, who has no stage"
        ordered = self._take(sender, cluster, message, training, now)
        if not isinstance(ordered, str):
            self.stalls.hear(cluster, now)
        return ordered

    def _take(
        self, sender: NodeId, cluster: ClusterState, message: _OfCluster, training: Training, now: float
    ) -> _Ordered:
        match message:
            case StageReady():
                return self._mending.take_ready(sender, now)
            case StageMissing():
                return self._take_missing(sender, cluster, message, training, now)
            case LeaseDone():
                return self._take_done(sender, cluster, message, training)
            case StepReport():
                return self._take_report(sender, cluster, message, training, now)
            case DroppedBatch():
                return self._take_dropped(sender, cluster, message, training)
            case _:
                assert_never(message)

    def _take_report(
        self, sender: NodeId, cluster: ClusterState, report: StepReport, training: Training, now: float
    ) -> _Ordered:
        if sender != cluster.leaf:
            return self._note_speed(sender, report, now)
        is_training = training.awaits(report.batch)
        results = training.take_report(cluster, report)
        if isinstance(results, str):
            return results
        if is_training:
            self._guard.note_loss(cluster.holder, cluster.name, report.loss)
        return [*_tell(results, training), *self._note_speed(sender, report, now)]

    def _note_speed(self, name: NodeId, report: StepReport, now: float) -> list[Order]:
        """Plan with the speed that a node has by now, if that is another than it was."""
        times, member = self.speeds.note(name, report, now), self._members.find(name)
        if times is None or member is None:
            return []
        node = replace(member.node, flops_per_second=member.node.flops_per_second * times)
        if not is_sensible(node):  # who says so would overflow the planner
            return []
        self._members.replace(replace(member, node=node))
        self._forming.note_change(now)
        return [Tell(SpeedChanged(name, times))]

    def _take_dropped(
        self, sender: NodeId, cluster: ClusterState, dropped: DroppedBatch, training: Training
    ) -> _Ordered:
        results = training.take_dropped(cluster, dropped)
        if isinstance(results, str):
            return results
        self._guard.note_dropped(cluster.holder, sender)
        return [Tell(BatchDropped(dropped.batch, sender, dropped.reason)), *_tell(results, training)]

    def _take_done(
        self, sender: NodeId, cluster: ClusterState, done: LeaseDone, training: Training
    ) -> _Ordered:
        if sender != cluster.root:
            return f"lease {done.lease} is reported by {sender}, who is not the root"
        results = training.take_done(cluster, done)
        return results if isinstance(results, str) else [Tell(training.trained), *_tell(results, training)]

    def _take_missing(
        self, sender: NodeId, cluster: ClusterState, missing: StageMissing, training: Training, now: float
    ) -> _Ordered:
        """Look for somebody else who has what a stage lacks."""
        if sender not in cluster.unready:
            return f"{sender} has no stage to get ready"
        reason = self._mending.take_missing(sender, missing)
        if reason is not None:
            return reason
        self._forming.note_change(now)
        told = f"{sender} cannot get what {missing.node} has: {missing.reason}"
        return self._mending.lose(cluster, told, training, now)


def _tell(results: list[EpochDone] | list[Evaluated], training: Training) -> list[Order]:
    training.history += results
    return [Tell(result) for result in results]
