"""Recovery: it keeps clusters whole, has their stages built, and follows each plan.

A cluster that lost a node stands still, and its leases are granted again. A repaired plan says which nodes go
on; `sources` says what their stages are built of. A node that leaves stays until nobody needs what it has,
for a while. Newcomers become part of the next plan.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.checkpoints import CheckpointCollector
from ravnest.hub.coordinator.events import (
    Action,
    Collected,
    JobGiven,
    Notify,
    PartsMade,
    PlanMade,
)
from ravnest.hub.coordinator.leases import LedgerState
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.notices import (
    Checkpointed,
    ClusterBroken,
    ClusterDissolved,
    ClusterStarted,
    Leaving,
    NotCheckpointed,
    PlanFormed,
    Recovered,
)
from ravnest.hub.coordinator.phases import ClusterPhase, NodePhase
from ravnest.hub.coordinator.placement import SLICE, ClusterState, Placement, PlanChange
from ravnest.hub.coordinator.planner import lease_batches
from ravnest.hub.coordinator.snapshots import BackupPolicy, SnapshotDesk
from ravnest.hub.coordinator.sources import StateSources, find_cluster_of_state
from ravnest.ids import HUB, NodeId
from ravnest.protocol.placement import SnapshotMade, StageMissing

_MOST_MISSED = 3  # sources in a row, before a node that cannot use them is sent away


class Recovery:
    """Repairs clusters: it follows each plan, the first one too, and has its stages built."""

    def __init__(
        self,
        job: JobGiven,
        placement: Placement,
        ledger: Ledger,
        checkpoints: CheckpointCollector,
        desk: SnapshotDesk,
        timeouts: HubTimeouts = TIMEOUTS.hub,
    ) -> None:
        self._timeouts = timeouts
        self._batch_size, self._job = job.settings.batch_size, job
        self._placement, self._membership = placement, placement.membership
        self._ledger, self._checkpoints = ledger, checkpoints
        self._sources = StateSources(placement, desk)
        self.backups = BackupPolicy(placement, desk, self._sources.add_backup, timeouts)
        self.saved = job.books  # the ledger of the last checkpoint
        self._held: PlanMade | None = None  # until the clusters that it changes have finished something
        self._held_until = 0.0
        self._num_missed: Counter[NodeId] = Counter()  # sources that a node could not use, in a row
        self._asked_last_at = -1  # samples that were trained when a checkpoint of all that leave was begun
        self._rollout: Iterator[list[Action]] | None = None  # what is left to tell of a large plan

    @property
    def is_rolling_out(self) -> bool:
        """Whether members are still being told of a plan; nobody may come or go meanwhile."""
        return self._rollout is not None

    def roll_out(self) -> list[Action]:
        """Do the next step of a large plan, if one is being told: none of them takes long."""
        step = None if self._rollout is None else next(self._rollout, None)
        self._rollout = None if step is None else self._rollout
        return step or []

    def _begin_rollout(self, steps: Iterator[list[Action]]) -> list[Action]:
        """Do all steps of a plan at once, or begin with them, if they are many."""
        if len(self._membership) <= SLICE:
            return [action for step in steps for action in step]
        self._rollout = steps
        return []

    @property
    def is_urgent(self) -> bool:
        """Whether a plan is needed now: a cluster stands still, or a node with a stage wants to go."""
        return self._placement.has_broken or self._placement.has_leaving_host

    def can_wait(self, now: float) -> bool:
        """Return whether a plan has time: a node is to come back, or a cluster finishes what it has.

        Where all leave, nobody is there to take it over: first it is kept.
        """
        is_kept_first = self._all_leave and self._checkpoints.is_under_way
        return (
            is_kept_first
            or bool(self._membership.missing)
            or any(
                member.leaves_by is not None
                and now < self._drained_by(member.leaves_by)
                and (cluster := self._placement.cluster_of(member.node.name)) is not None
                and cluster.is_running
                and self._ledger.is_unfinished(cluster)
                for member in self._membership.leaving
            )
        )

    @property
    def _all_leave(self) -> bool:
        """Whether nobody stays who could take over; what they have is kept then."""
        return self._job.settings.keeps_last and all(member.is_leaving for member in self._membership.members)

    def wants_last(self) -> bool:
        """Return whether to keep what all take away with them who leave now; it is asked once."""
        num_counted = self._ledger.num_counted
        is_known = self.saved is not None and self.saved.num_counted == num_counted
        clusters = self._placement.running
        is_busy = not clusters or any(map(self._ledger.is_unfinished, clusters))
        can_keep = self._all_leave and not self._checkpoints.is_under_way
        if not can_keep or is_busy or is_known or self._asked_last_at == num_counted:
            return False
        self._asked_last_at = num_counted
        return True

    def _drained_by(self, leaves_by: float) -> float:
        handover = self._timeouts.handover
        return leaves_by - handover.total_seconds + handover.drain_seconds

    def due(self, now: float) -> float | None:
        """Return when a node that leaves or is missing is no longer waited for, or the next step is due."""
        if self.is_rolling_out:
            return now
        times = [member.back_by for member in self._membership.missing if member.back_by is not None]
        times += [self._held_until] if self._held is not None else []
        for member in self._membership.leaving:
            assert member.leaves_by is not None
            drained_by = self._drained_by(member.leaves_by)
            times += [drained_by] if now < drained_by else [member.leaves_by]
        return min(times, default=None)

    def mark_broken(
        self, cluster: ClusterState, reason: str, since: float, *, keeps_leases: bool = False
    ) -> list[Action]:
        """Stop a cluster that lost a node, and give its leases back: at once, or with the next plan."""
        if cluster.is_broken:
            return []
        was_running = cluster.is_running
        self._placement.mark_broken(cluster)
        if cluster.stopped_at is None and was_running:
            cluster.stopped_at = since
        self._checkpoints.drop(cluster)
        given_back = 0 if keeps_leases else self._ledger.give_back(cluster)
        return [Notify(ClusterBroken(cluster.name, reason, given_back))] if was_running else []

    def restart(self, books: LedgerState | None, now: float) -> list[Action]:
        """Go on after the hub was away: all are built anew when they are back, or were waited for.

        Until then clusters train what they have, and what they have trained counts.
        """
        self.saved = books
        self._checkpoints.forget_ordered()
        self._membership.mark_all_missing(now + self._timeouts.return_seconds)
        self._placement.forget_parts()
        self._ledger.stand_still(self._placement.clusters)
        why, clusters = "the hub was away", self._placement.clusters
        broken = [self.mark_broken(each, why, now, keeps_leases=True) for each in clusters]
        return [action for actions in broken for action in actions]

    def needs(self, name: NodeId) -> bool:
        """Return whether a node has a stage, or state that others are still to get.

        One that is measured has come back as new: it has nothing, though its name is still in the plan.
        """
        if self._membership[name].present_phase is NodePhase.PROBING:
            return False
        return self._placement.cluster_of(name) is not None or self._sources.is_source(name)

    def begin_leave(self, name: NodeId, reason: str, now: float) -> list[Action]:
        """Begin the leave of a node: it goes as soon as nothing is lost by it."""
        if self._membership[name].is_leaving:
            return []
        self._membership.begin_leave(name, reason, now + self._timeouts.handover.total_seconds)
        self._placement.drain_host(name)
        return [Notify(Leaving(name, reason))]

    def form(self, made: PlanMade) -> list[Action]:
        """Follow a first plan: its stages are built of what the hub has."""
        assert made.plan is not None
        count, placement = made.microbatches, self._placement
        change = placement.adopt(made.plan, count, made.sharing)
        self._ledger.cut(count, lease_batches(self._job, made.plan, count))
        outline, size = placement.outline, self._batch_size
        told = PlanFormed(
            made.plan,
            outline.samples_per_second,
            outline.round_seconds,
            size,
            count,
            made.sharing,
            made.reason,
        )
        return [Notify(told), *self._begin_rollout(self._form_in_steps(change))]

    def _form_in_steps(self, change: PlanChange) -> Iterator[list[Action]]:
        yield []  # what follows is for the next events
        self._sources.begin_first(change)
        yield []
        for sends in self._placement.announce(change, self._find_contacts()):
            yield [*sends]
        yield [*self._sources.order_builds()]

    def hold(self, made: PlanMade, now: float) -> bool:
        """Hold a plan that has time until its clusters have finished their work; return whether it does."""
        assert made.plan is not None
        changed = [each for each in self._placement.running if each.cluster not in made.plan.clusters]
        if self.is_urgent or not any(map(self._ledger.is_unfinished, changed)):
            return False
        self._held, self._held_until = made, now + self._timeouts.handover.drain_seconds
        self._placement.drain(changed)
        return True

    def release_held(self, fits: Callable[[PlanMade], bool], now: float) -> PlanMade | None:
        """Return the plan that was held, when it is time; forget it if it does not fit any more."""
        held = self._held
        if held is None:
            return None
        draining = (each for each in self._placement.running if each.phase is ClusterPhase.DRAINING)
        is_busy = any(self._ledger.is_unfinished(each) for each in draining)
        if fits(held) and is_busy and now < self._held_until:
            return None
        self.forget_held()
        return held if fits(held) else None

    def forget_held(self) -> None:
        """Drop the plan that is held; clusters go on as they are."""
        self._held = None
        self._placement.drain(())

    def _find_contacts(self) -> dict[NodeId, set[NodeId]]:
        """Return the contacts of nodes beside their cluster and rings: sources, receivers, backups."""
        found = self._sources.pairs
        for backup in self._placement.backups:
            found.setdefault(backup.node, set()).add(backup.spare)
            found.setdefault(backup.spare, set()).add(backup.node)
        return found

    def repair(self, made: PlanMade) -> list[Action] | None:
        """Follow a repaired plan: stages are built of what others have; None: nobody has all of it."""
        assert made.plan is not None
        placement, ledger, had_rings = self._placement, self._ledger, bool(self._placement.rings)
        change = placement.adopt(made.plan, made.microbatches, made.sharing)
        if not had_rings:  # a lone cluster keeps no average
            ledger.progress.forget_averages(each for each in placement.clusters if each not in change.built)
        kept = self.saved.num_counted if self.saved else -1 if ledger.num_counted else 0
        origins = self._sources.begin(change, ledger.progress.samples_seen, kept)
        if self._sources.needs_hub and ledger.num_counted and self.saved is None:
            return None
        for origin in origins:
            ledger.progress.inherit(origin.cluster, origin.cluster_id, origin.is_whole)
            times = (x.stopped_at for x in change.ended if not set(x.nodes).isdisjoint(origin.cluster.nodes))
            origin.cluster.stopped_at = min((each for each in times if each is not None), default=None)
        if ledger.num_counted and not any(map(ledger.progress.knows, placement.clusters)):
            return None
        actions: list[Action] = []
        followed = {origin.cluster_id for origin in origins} - {""}
        for cluster in change.ended:
            self._checkpoints.drop(cluster)
            given_back, lost = ledger.release(cluster)
            is_followed = find_cluster_of_state(cluster, placement) in followed
            if not is_followed and not self._sources.continues(cluster):
                told = ClusterDissolved(cluster.name, "the plan goes on without it", given_back, lost)
                actions.append(Notify(told))
        ledger.progress.forget_others(placement.cluster_ids)
        return actions + self._begin_rollout(self._repair_in_steps(change))

    def _repair_in_steps(self, change: PlanChange) -> Iterator[list[Action]]:
        yield []  # what follows is for the next events
        is_source = self._sources.is_source
        for sends in self._placement.announce(change, self._find_contacts(), is_source):
            yield [*sends]
        yield [*self._sources.ask(), *self._sources.order_builds()]

    def end_checkpoint(self, collected: Collected, now: float) -> list[Action]:
        """Go on from what is on disk now, if it comes to that."""
        books, seconds = self._checkpoints.end_ordered(collected.number, now)
        if collected.fault:
            return [Notify(NotCheckpointed(collected.fault))]
        self.saved = books
        self._placement.mark_parts_stale()
        self._sources.forget_first()
        return [Notify(Checkpointed(books.num_counted, seconds))]

    def add_parts(self, made: PartsMade) -> list[Action] | str:
        """Use what the requester's side made of an interval."""
        reason = self._placement.add_parts(made)
        return reason if reason is not None else [*self._sources.order_builds()]

    def add_source(self, sender: NodeId, made: SnapshotMade) -> list[Action]:
        """Use a snapshot that a stage is built of."""
        self._sources.add_snapshot(sender, made)
        return [*self._sources.order_builds()]

    def mark_ready(self, sender: NodeId, now: float) -> list[Action] | str:
        """Record a stage that is built; with its last one a cluster trains."""
        if not self._sources.has_ordered(sender):
            return f"{sender} is ready with a stage that nobody told it to build"
        cluster = self._placement.mark_ready(sender)
        if isinstance(cluster, str):
            return cluster
        del self._num_missed[sender]
        actions: list[Action] = [*self._placement.retire(self._sources.is_source)]
        if not cluster.is_running:
            return actions
        actions.append(Notify(ClusterStarted(cluster.name, cluster.nodes)))
        if cluster.stopped_at is not None:
            givers = self._sources.givers(cluster)
            actions.append(Notify(Recovered(cluster.name, now - cluster.stopped_at, givers)))
            cluster.stopped_at = None
        return actions

    def drop_source(self, sender: NodeId, missing: StageMissing) -> str | None:
        """Use a source no more that gives nothing; return why the report is not believed."""
        if missing.node == HUB or (missing.node != sender and not self._sources.is_source(missing.node)):
            return f"{sender} misses what {missing.node} was not to give"
        self._num_missed[sender] += 1
        self._sources.mark_useless(missing.node, sender)
        return None

    def find_lazy(self, cluster: ClusterState) -> list[NodeId]:
        """Return the nodes a cluster waits for: those that are to build, or those that are to give."""
        building = [name for name in cluster.unready if self._sources.has_ordered(name)]
        return sorted(building) or self._sources.unanswered

    def misses_all(self, sender: NodeId) -> bool:
        """Return whether the fault is rather a node's own than that of all its sources."""
        return self._num_missed[sender] >= _MOST_MISSED

    def forget(self, name: NodeId) -> None:
        """Forget a node that has gone."""
        self._sources.forget(name)
        del self._num_missed[name]

    def find_gone(self, now: float) -> list[tuple[NodeId, str]]:
        """Return the nodes that go now, and why: nobody needs them, or they were waited for long enough."""
        gone = [
            (member.node.name, "it did not come back to the hub")
            for member in self._membership.missing
            if member.back_by is not None and now >= member.back_by
        ]
        for member in self._membership.leaving:
            assert member.leaves_by is not None
            if now >= member.leaves_by or not self.needs(member.node.name):
                gone.append((member.node.name, member.leaves_for))
        return gone
