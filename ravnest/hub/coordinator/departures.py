"""Departures: a node leaves because it wants to, is lost, or does nothing.

The cluster of a node that has gone stands still until it is repaired. Near the end of a job nothing is
repaired any more; then the cluster ends.
"""

from collections.abc import Iterable

from ravnest.hub.coordinator.checkpoints import CheckpointCollector
from ravnest.hub.coordinator.events import Action, Evict, Notify
from ravnest.hub.coordinator.inquiries import IDLE
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.lifecycle import Lifecycle
from ravnest.hub.coordinator.notices import ClusterDissolved, Left, NotEvaluated
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.hub.coordinator.plan_trigger import PlanTrigger
from ravnest.hub.coordinator.recovery import Recovery
from ravnest.hub.coordinator.rounds import Rounds
from ravnest.ids import NodeId
from ravnest.protocol.membership import Leave

_Result = list[Action] | str  # actions, or why the event is refused


class Departures:
    """Removes nodes, and gives their clusters up or has them repaired."""

    def __init__(
        self,
        placement: Placement,
        ledger: Ledger,
        checkpoints: CheckpointCollector,
        recovery: Recovery,
        rounds: Rounds,
        plan_trigger: PlanTrigger,
        life: Lifecycle,
    ) -> None:
        self._placement, self._membership = placement, placement.membership
        self._ledger, self._checkpoints, self._recovery = ledger, checkpoints, recovery
        self._rounds, self._plan_trigger, self._life = rounds, plan_trigger, life

    def leave(self, name: NodeId, leave: Leave, now: float) -> _Result:
        """Let a node go: at once, or when others have what it has."""
        if leave.can_hand_over and self._life.can_repair and self._recovery.needs(name):
            self._plan_trigger.reset(now)
            return self._recovery.begin_leave(name, leave.reason, now)
        gone = self.remove(name, leave.reason, now)
        return gone if isinstance(gone, str) else [*gone, Evict(name, "goodbye")]

    def remove(self, name: NodeId, reason: str, now: float, since: float | None = None) -> _Result:
        """Forget a node; its cluster stands still, or ends where nothing is repaired any more."""
        if name not in self._membership:
            return f"{name} is no member, so it cannot leave"
        self._membership.remove(name)
        cluster, ended = self._placement.cluster_of(name), self._rounds.leave(name, reason, now)
        self._recovery.forget(name)
        self._plan_trigger.reset(now)
        actions: list[Action] = [Notify(Left(name, reason))]
        if self._life.phase is JobPhase.FINISHED:
            return actions
        actions += self._life.end_round(ended)
        if cluster is not None:
            actions += self._lose_stage(cluster, f"{name}: {reason}", now, now if since is None else since)
        is_collecting = self._life.has_begun and self._life.phase is JobPhase.COLLECTING
        is_empty = is_collecting and not len(self._membership)
        return [*actions, *(self._plan_trigger.notify_shortage() if is_empty else [])]

    def evict(self, gone: Iterable[tuple[NodeId, str, str]], now: float) -> list[Action]:
        """Remove nodes: each with the reason that others read, and what itself is told."""
        actions: list[Action] = []
        for name, reason, told in gone:
            left = self.remove(name, reason, now)
            if not isinstance(left, str):  # else it went by itself, before it was found idle
                actions += [*left, Evict(name, told)]
        return actions

    def evict_idle(self, names: Iterable[NodeId], now: float) -> list[Action]:
        """Remove nodes that do no work; a provider may start them again."""
        return self.evict(((name, IDLE, f"{IDLE}; start it again") for name in names), now)

    def evict_gone(self, now: float) -> list[Action]:
        """Remove nodes that nobody needs any more, that did not come back or that do not answer."""
        is_keeping = self._life.phase is JobPhase.KEEPING
        silent = self._checkpoints.find_silent(now) if is_keeping else ()
        gone = [(name, reason, "goodbye") for name, reason in self._recovery.find_gone(now)]
        gone += [(name, f"it {self._checkpoints.silence}", "goodbye") for name in silent]
        return self.evict(gone, now)

    def rebuild(self, stuck: Iterable[ClusterState], now: float) -> list[Action]:
        """Build clusters anew in which all nodes answer and nothing moves.

        In the last evaluation nothing is built: the cluster whose weights are to be kept leaves it out.
        """
        actions: list[Action] = []
        for cluster in (each for each in stuck if each in self._placement.running):
            is_last = not any(
                x is not cluster and self._ledger.progress.knows(x) for x in self._placement.running
            )
            if self._life.phase is JobPhase.EVALUATING and is_last:
                self._ledger.skip_evaluation()
                actions.append(Notify(NotEvaluated(cluster.name)))
                continue
            self._plan_trigger.reset(now)
            actions += self._lose_stage(cluster, "it has work, and nothing moves", now, now)
        return actions

    def _lose_stage(self, cluster: ClusterState, reason: str, now: float, since: float) -> list[Action]:
        if self._life.can_repair:
            return self._recovery.mark_broken(cluster, reason, since)
        given_back, lost = self._ledger.release(cluster)
        actions: list[Action] = [*self._placement.dissolve([cluster])]
        actions.append(Notify(ClusterDissolved(cluster.name, reason, given_back, lost)))
        self._checkpoints.drop(cluster)
        is_new = not self._ledger.num_counted
        if any(is_new or self._ledger.progress.knows(each) for each in self._placement.running):
            return actions
        return actions + self._life.start_over(now)
