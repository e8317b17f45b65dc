"""Keeps clusters whole while they train: who is lost is replaced, who leaves hands over, who comes is used.

A cluster that somebody is missing in stands still, and what it was at is leased again; then a repaired plan
says who goes on, and hub.sourcing with what. Who leaves stays until nobody needs what it has, for a while.
Driven by hub.state.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.checkpoints import CheckpointCollector
from ravnest.hub.coordinator.events import Action, Collected, JobGiven, Notify, PartsMade, PlanMade
from ravnest.hub.coordinator.leases import LedgerState
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.membership import ClusterState, Membership
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
from ravnest.hub.coordinator.planner import lease_batches
from ravnest.hub.coordinator.sources import BackupPolicy, StateSources, find_cluster_of_state
from ravnest.ids import HUB, NodeId
from ravnest.protocol.placement import SnapshotMade, StageMissing

_MOST_MISSED = 3  # sources in a row, before who cannot use them is sent away


class Recovery:
    """Has stages built for every plan, the first one too."""

    def __init__(
        self, members: Membership, keeping: CheckpointCollector, timeouts: HubTimeouts = TIMEOUTS.hub
    ) -> None:
        self._timeouts = timeouts
        self._members = members
        self._keeping = keeping
        self._sourcing = StateSources()
        self.backing = BackupPolicy(members, self._sourcing, keeping.number, timeouts)
        self.saved: LedgerState | None = None  # of the last checkpoint
        self._held: PlanMade | None = None  # until the clusters that it changes have finished something
        self._held_until = 0.0
        self._num_missed: Counter[NodeId] = Counter()  # sources that a node could not use, in a row

    @property
    def is_urgent(self) -> bool:
        """Whether a plan is needed now: a cluster stands still, or somebody waits to leave."""
        hosts = {name for cluster in self._members.clusters for name in cluster.nodes}
        return any(each.is_broken for each in self._members.clusters) or any(
            member.node.name in hosts for member in self._members.leaving
        )

    def is_waiting(self, training: Ledger, now: float) -> bool:
        """Return whether a plan has time: somebody is to come back, or a cluster finishes what it is at."""
        return bool(self._members.missing) or any(
            each.leaves_by is not None
            and now < self._drained_by(each.leaves_by)
            and (cluster := self._members.cluster_of(each.node.name)) is not None
            and cluster.is_running
            and training.is_busy(cluster)
            for each in self._members.leaving
        )

    def _drained_by(self, leaves_by: float) -> float:
        handover = self._timeouts.handover
        return leaves_by - handover.total_seconds + handover.drain_seconds

    def due(self, now: float) -> float | None:
        """Return when somebody who leaves is no longer waited for."""
        times = [member.back_by for member in self._members.missing if member.back_by is not None]
        times += [self._held_until] if self._held is not None else []
        for member in self._members.leaving:
            assert member.leaves_by is not None
            if member.back_by is not None:
                continue
            drained_by = self._drained_by(member.leaves_by)
            times += [drained_by] if now < drained_by else [member.leaves_by]
        return min(times, default=None)

    def lose(self, cluster: ClusterState, reason: str, training: Ledger, now: float) -> list[Action]:
        """Let a cluster stand still that somebody is missing in."""
        if cluster.is_broken:
            return []
        was_running, cluster.is_broken = cluster.is_running, True
        if cluster.broken_at is None and was_running:
            cluster.broken_at = now
        self._keeping.lose(cluster)
        given_back = training.give_back(cluster)
        return [Notify(ClusterBroken(cluster.name, reason, given_back))] if was_running else []

    def restart(self, books: LedgerState | None, training: Ledger, now: float) -> list[Action]:
        """Go on after the hub was away: everything stands still until all are back, or long enough."""
        self.saved = books
        self._members.miss_all(now + self._timeouts.return_seconds)
        training.stand_still(self._members.clusters)
        lost = [self.lose(each, "the hub was away", training, now) for each in self._members.clusters]
        return [order for orders in lost for order in orders]

    def needs(self, name: NodeId) -> bool:
        """Return whether a node has a stage, or what others are still to get."""
        return self._members.cluster_of(name) is not None or self._sourcing.is_source(name)

    def part(self, name: NodeId, reason: str, now: float) -> list[Action]:
        """Let somebody go as soon as nothing is lost by it."""
        member = self._members.find(name)
        assert member is not None
        if member.leaves_by is not None:
            return []
        leaves_by = now + self._timeouts.handover.total_seconds
        self._members.replace(replace(member, leaves_by=leaves_by, leaves_for=reason))
        return [Notify(Leaving(name, reason))]

    def form(self, job: JobGiven, made: PlanMade, training: Ledger) -> list[Action]:
        """Follow a first plan: its stages are built of what the hub has."""
        assert made.plan is not None
        count, members = made.microbatches, self._members
        change = members.adopt(made.plan, count, job)
        training.cut(count, lease_batches(job, made.plan, count))
        outlook, size = members.outlook, job.settings.batch_size
        told = PlanFormed(made.plan, outlook.samples_per_second, outlook.round_seconds, size, count)
        self._sourcing.begin_first(change)
        return [Notify(told), *members.announce(change, self._meetings()), *self._sourcing.order(members)]

    def hold(self, made: PlanMade, training: Ledger, now: float) -> bool:
        """Keep a plan that has time until what its clusters are at is done; return whether that is so."""
        assert made.plan is not None
        changed = [each for each in self._members.running if each.cluster not in made.plan.clusters]
        if self.is_urgent or not any(map(training.is_busy, changed)):
            return False
        self._held, self._held_until = made, now + self._timeouts.handover.drain_seconds
        self._members.drain(changed)
        return True

    def let_follow(self, training: Ledger, fits: Callable[[PlanMade], bool], now: float) -> PlanMade | None:
        """Return the plan that was held, when it is time for it; forget it if others are here by now."""
        held = self._held
        if held is None:
            return None
        is_busy = any(
            training.is_busy(each) for each in self._members.running if self._members.is_draining(each)
        )
        if fits(held) and is_busy and now < self._held_until:
            return None
        self.forget_held()
        return held if fits(held) else None

    def forget_held(self) -> None:
        """Let clusters go on as they are."""
        self._held = None
        self._members.drain(())

    def _meetings(self) -> dict[NodeId, set[NodeId]]:
        """Return who meets whom beside its own cluster and rings: to give and take, and for backups."""
        found = self._sourcing.pairs
        for backup in self._members.backups:
            found.setdefault(backup.node, set()).add(backup.spare)
            found.setdefault(backup.spare, set()).add(backup.node)
        return found

    def repair(self, job: JobGiven, made: PlanMade, training: Ledger) -> list[Action] | None:
        """Follow a repaired plan: stages are built of what others have; None: nobody has all of it."""
        assert made.plan is not None
        members, had_rings = self._members, bool(self._members.rings)
        change = members.adopt(made.plan, made.microbatches, job)
        if not had_rings:  # who trains alone keeps no average
            training.forget_averages(members.clusters)
        kept = self.saved.num_counted if self.saved else -1 if training.num_counted else 0
        origins = self._sourcing.begin(change, members, training.samples_seen, kept)
        if self._sourcing.needs_hub and training.num_counted and self.saved is None:
            return None
        for origin in origins:
            training.inherit(origin.cluster, origin.cluster_id, origin.is_whole)
            times = (x.broken_at for x in change.ended if not set(x.nodes).isdisjoint(origin.cluster.nodes))
            origin.cluster.broken_at = min((each for each in times if each is not None), default=None)
        if training.num_counted and not any(map(training.knows, members.clusters)):
            return None
        orders: list[Action] = []
        followed = {origin.cluster_id for origin in origins} - {""}
        for cluster in change.ended:
            self._keeping.lose(cluster)
            given_back, lost = training.release(cluster)
            if find_cluster_of_state(cluster, members) not in followed:
                told = ClusterDissolved(cluster.name, "the plan goes on without it", given_back, lost)
                orders.append(Notify(told))
        training.forget_others(members.cluster_ids)
        orders += members.announce(change, self._meetings(), self._sourcing.is_source)
        asked = self._sourcing.ask(members, self._keeping.number)
        return [*orders, *asked, *self._sourcing.order(members)]

    def take_checkpoint(self, collected: Collected, now: float) -> list[Action]:
        """Go on from what is on disk now, if it comes to that."""
        books, seconds = self._keeping.end(now)
        if collected.fault:
            return [Notify(NotCheckpointed(collected.fault))]
        self.saved = books
        self._members.note_checkpoint()
        return [Notify(Checkpointed(books.num_counted, seconds))]

    def take_parts(self, made: PartsMade) -> list[Action] | str:
        """Take what the requester's side made of an interval."""
        reason = self._members.take_parts(made)
        return reason if reason is not None else [*self._sourcing.order(self._members)]

    def take_snapshot(self, sender: NodeId, made: SnapshotMade) -> list[Action] | str:
        """Take a snapshot that somebody waits for."""
        backed = self.backing.take(sender, made)
        if backed is not None:
            return [*backed]
        reason = self._sourcing.take(sender, made)
        return reason if reason is not None else [*self._sourcing.order(self._members)]

    def take_ready(self, sender: NodeId, now: float) -> list[Action] | str:
        """Take note of a stage that is built; with its last one a cluster trains."""
        if not self._sourcing.has_ordered(sender):
            return f"{sender} is ready with a stage that nobody told it to build"
        cluster = self._members.take_ready(sender)
        if isinstance(cluster, str):
            return cluster
        del self._num_missed[sender]
        orders: list[Action] = [*self._members.retire(self._sourcing.is_source)]
        if not cluster.is_running:
            return orders
        orders.append(Notify(ClusterStarted(cluster.name, cluster.nodes)))
        if cluster.broken_at is not None:
            givers = self._sourcing.givers(cluster)
            orders.append(Notify(Recovered(cluster.name, now - cluster.broken_at, givers)))
            cluster.broken_at = None
        return orders

    def take_missing(self, sender: NodeId, missing: StageMissing) -> str | None:
        """Use somebody's state no more who does not give it; return why that is not believed."""
        if missing.node == HUB or (missing.node != sender and not self._sourcing.is_source(missing.node)):
            return f"{sender} misses what {missing.node} was not to give"
        self._num_missed[sender] += 1
        self._sourcing.fail(missing.node, sender, self._members)
        return None

    def find_lazy(self, cluster: ClusterState) -> list[NodeId]:
        """Return who a cluster that gets ready waits for: who is told to build, or who is to give."""
        building = [name for name in cluster.unready if self._sourcing.has_ordered(name)]
        return sorted(building) or self._sourcing.unanswered

    def misses_all(self, sender: NodeId) -> bool:
        """Return whether the fault is rather a node's own than that of all who gave it something."""
        return self._num_missed[sender] >= _MOST_MISSED

    def forget(self, name: NodeId) -> None:
        """Note that somebody has gone."""
        self._sourcing.forget(name)
        del self._num_missed[name]

    def let_go(self, now: float) -> list[tuple[NodeId, str]]:
        """Return who leaves and is needed no longer, or was waited for long enough, and why it leaves."""
        gone = [
            (member.node.name, "it did not come back to the hub")
            for member in self._members.missing
            if member.back_by is not None and now >= member.back_by
        ]
        for member in self._members.leaving:
            assert member.leaves_by is not None
            name = member.node.name
            is_over = now >= member.leaves_by or not self.needs(name)
            if is_over and member.back_by is None:
                gone.append((name, member.leaves_for))
        return gone
