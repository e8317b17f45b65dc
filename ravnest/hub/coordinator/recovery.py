"""Recovery: it keeps clusters whole while they train, and says where the state of a new stage comes from.

A cluster that lost a node stands still, and its leases are granted again. A repaired plan says which nodes go
on. A node keeps what it holds. The rest comes from snapshots: of nodes of the same cluster; else of another
cluster, of a backup, or of the hub, which has the last checkpoint. A source may be a tenth behind the best.
Where clusters make exact updates, all of a stage comes from one that trains: so it is at the same update. A
node that leaves stays until nobody needs what it has, for a while. Newcomers become part of the next plan.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.events import (
    Action,
    Collected,
    JobGiven,
    MakeParts,
    Notify,
    PartsMade,
    PlanMade,
    Send,
)
from ravnest.hub.coordinator.leases import LedgerState
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.membership import HeldState, Membership
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
from ravnest.hub.coordinator.phases import ClusterPhase
from ravnest.hub.coordinator.placement import ClusterState, Placement, PlanChange
from ravnest.hub.coordinator.planner import lease_batches
from ravnest.hub.coordinator.snapshots import BackupPolicy, CheckpointCollector, SnapshotDesk, SnapshotPurpose
from ravnest.ids import HUB, NodeId, RoundId
from ravnest.plan.types import Stage
from ravnest.protocol.placement import BlobRef, SnapshotMade, Source, StageMissing, StageParts

_ENOUGH = 0.9  # of what the best source has learned from
_MOST_BEFORE = 2  # nodes that pass first weights on to the same one: one may be slow


@dataclass(slots=True)
class _Need:
    """A stage to be built, and the nodes whose snapshots it needs; HUB is the hub itself."""

    cluster: ClusterState
    stage: Stage
    is_kept: bool
    nodes: tuple[NodeId, ...]
    is_ordered: bool = False
    shares: tuple["_Share", ...] = ()  # of what the hub gives; without one, it gives the stage as a whole


@dataclass(frozen=True, slots=True)
class _Share:
    """A segment of a stage whose weights come from the hub, and the nodes that get them before."""

    start: int
    stop: int
    before: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class _Backup:
    held: HeldState
    weights: BlobRef
    samples_seen: int


@dataclass(frozen=True, slots=True)
class Origin:
    """What a cluster goes on from: the one it was, or one that trains; and whether it keeps all of it."""

    cluster: ClusterState
    cluster_id: str
    is_whole: bool


class StateSources:
    """Finds sources for every plan anew, asks for snapshots, and orders stages built."""

    def __init__(self, placement: Placement, desk: SnapshotDesk) -> None:
        self._placement, self._desk = placement, desk
        self._needs: dict[NodeId, _Need] = {}
        self._anchor_round: RoundId | None = None
        self._asked: dict[int, NodeId] = {}
        self._snapshots: dict[NodeId, BlobRef] = {}
        self._backups: dict[NodeId, _Backup] = {}
        self._best: ClusterState | None = None  # of those that train, the one that knows most
        self._samples_seen: dict[str, int] = {}  # by cluster_id, of those that train or stood still
        self._kept = -1  # samples; -1: the hub has nothing
        self._useless: dict[tuple[NodeId, HeldState], NodeId] = {}  # sources that do not give: the accuser

    @property
    def needs_hub(self) -> bool:
        """Whether nobody but the hub has some of what is to be built."""
        return any(HUB in need.nodes for need in self._needs.values())

    def begin_first(self, change: PlanChange) -> None:
        """Build stages of what the hub has, alike in all clusters.

        The owners of a segment get its weights in turn, those that send fastest first: one from the hub, and
        each other from those before it, while they arrive there.
        """
        stages = [(cluster, stage) for cluster in change.built for stage in cluster.cluster.stages]
        needs = {stage.node: _Need(cluster, stage, False, (HUB,)) for cluster, stage in stages}
        for ring in self._placement.rings:
            owners = [self._membership[name].node for name in ring.owners]
            turns = sorted(owners, key=lambda node: (-node.upload_bytes_per_second, node.name))
            for turn, node in enumerate(turns):
                met = [x.name for x in turns[:turn] if x.is_reachable or node.is_reachable]
                share = _Share(ring.start, ring.stop, tuple(met[-_MOST_BEFORE:]))
                needs[node.name].shares += (share,)
        self._start(needs)
        self._anchor_round = RoundId(0)

    def begin(
        self, change: PlanChange, samples_seen: Callable[[ClusterState], int], kept: int
    ) -> tuple[Origin, ...]:
        """Find sources for the stages to be built, by what clusters know and what the hub has kept."""
        self._anchor_round, self._kept = None, kept
        origins: list[Origin] = []
        needs: dict[NodeId, _Need] = {}
        running = self._placement.running
        self._best = best = max(running, key=samples_seen, default=None)
        seen = self._samples_seen | {x.cluster_id: samples_seen(x) for x in (*running, *change.ended)}
        self._samples_seen = {each: seen[each] for each in seen.keys() & self._placement.cluster_ids}
        for cluster in change.built:
            cluster_id = "" if self._is_exact else find_cluster_of_state(cluster, self._placement)
            found = [self._find(cluster, stage, cluster_id) for stage in cluster.cluster.stages]
            needs |= {need.stage.node: need for need in found}
            is_whole = not any(need.nodes for need in found)
            origins.append(Origin(cluster, cluster_id or (best.cluster_id if best else ""), is_whole))
        self._start(needs)
        return tuple(origins)

    def _start(self, needs: dict[NodeId, _Need]) -> None:
        self._needs, self._asked, self._snapshots = needs, {}, {}
        self._desk.withdraw(SnapshotPurpose.SOURCE)

    def _find(self, cluster: ClusterState, stage: Stage, cluster_id: str) -> _Need:
        found: dict[NodeId, None] = {}
        own = None if self._is_exact else self._usable(stage.node)
        for position in range(stage.start, stage.stop):
            if own is None or not own.start <= position < own.stop:
                found[self._find_node(position, cluster_id)] = None
        return _Need(cluster, stage, own is not None, tuple(found))

    def _find_node(self, position: int, cluster_id: str) -> NodeId:
        """Return which node gives the state of a position: one that is not far behind, peers first."""
        if self._is_exact:
            owners = [each.cluster.owner(position) for each in self._placement.running]
            return next((name for name in owners if self._usable(name) is not None), owners[0])
        holding = {}
        for name in self._membership:
            held = self._usable(name)
            if held is not None and held.start <= position < held.stop:
                holding[name] = held
        same = [name for name, held in holding.items() if held.cluster_id == cluster_id]
        if same:
            return same[0]
        samples_seen = self._samples_seen
        found = [
            (samples_seen[held.cluster_id], name)
            for name, held in holding.items()
            if held.cluster_id in samples_seen
        ]
        found.sort(key=lambda each: -each[0])
        found += [
            (backup.samples_seen, name)
            for name, backup in self._backups.items()
            if self._keeps_backup(name) and backup.held.start <= position < backup.held.stop
        ]
        found += [(self._kept, HUB)] if self._kept >= 0 else [(0, name) for name in holding]
        enough = _ENOUGH * max((samples_seen for samples_seen, _ in found), default=0)
        # A source that is said not to give is asked again, before all that was trained is lost.
        last = self._best.cluster.owner(position) if self._best is not None and self._kept < 0 else HUB
        return next((name for samples_seen, name in found if samples_seen >= enough), last)

    @property
    def _is_exact(self) -> bool:
        """Whether what is built must be what clusters that train have; if none does, all have the same."""
        return self._placement.is_exact and bool(self._placement.running)

    @property
    def _membership(self) -> Membership:
        return self._placement.membership

    def _usable(self, name: NodeId) -> HeldState | None:
        member = self._membership.find(name)
        held = member.held if member else None
        return None if member is None or held is None or (member.node.name, held) in self._useless else held

    @property
    def pairs(self) -> dict[NodeId, set[NodeId]]:
        """The nodes that each node meets, to give state or to get it."""
        found = defaultdict(set)
        for need in self._needs.values():
            for node in need.nodes:
                if node != HUB:
                    found[node].add(need.stage.node)
                    found[need.stage.node].add(node)
        return dict(found)

    def ask(self) -> list[Send]:
        """Ask all sources for a snapshot, each by a number of its own."""
        nodes = dict.fromkeys(node for need in self._needs.values() for node in need.nodes if node != HUB)
        given = [node for node in nodes if self._keeps_backup(node)]
        self._snapshots = {node: self._backups[node].weights for node in given}
        self._asked = {self._desk.new_number(): node for node in nodes if node not in given}
        build_id, purpose = self._placement.build_id, SnapshotPurpose.SOURCE
        return [self._desk.ask(purpose, n, node, build_id(node)) for n, node in self._asked.items()]

    def _keeps_backup(self, node: NodeId) -> bool:
        """Return whether a node is a source for its backup: it is here, and holds nothing of its own."""
        return node in self._backups and node in self._membership and self._usable(node) is None

    def add_snapshot(self, sender: NodeId, made: SnapshotMade) -> None:
        """Record a snapshot that a source was asked for."""
        del self._asked[made.number]
        self._snapshots[sender] = made.weights

    def forget(self, name: NodeId) -> None:
        """Forget a node that has gone, its backup and its accusations."""
        self._backups.pop(name, None)
        left = {key: accuser for key, accuser in self._useless.items() if name not in (key[0], accuser)}
        self._useless = left

    def mark_useless(self, name: NodeId, accuser: NodeId) -> None:
        """Record that a source does not give what it holds, or does not hold it."""
        held = self._usable(name)
        if held is not None:
            self._useless[name, held] = accuser
        self._backups.pop(name, None)

    def add_backup(self, spare: NodeId, held: HeldState, weights: BlobRef, samples_seen: int) -> None:
        """A spare keeps a snapshot, of weights that had learned from so many samples."""
        self._backups[spare] = _Backup(held, weights, samples_seen)

    def order_builds(self) -> list[Send | MakeParts]:
        """Order the stages to be built whose parts and snapshots are all there."""
        orders: list[Send | MakeParts] = []
        for need in self._needs.values():
            if need.is_ordered or need.cluster.is_broken:
                continue
            made = self._find_parts(need, orders)
            if made is not None and all(node in self._snapshots for node in need.nodes if node != HUB):
                need.is_ordered = True
                self._shrink(need)
                orders.append(self._deliver(need, *made))
        return orders

    def _find_parts(
        self, need: _Need, orders: list[Send | MakeParts]
    ) -> tuple[PartsMade, list[Source]] | None:
        """Return what the requester's side makes of a stage, and what the hub gives; or order it made."""
        stage, is_hubs = need.stage, HUB in need.nodes
        shares = need.shares or (_Share(stage.start, stage.stop, ()),) if is_hubs else ()
        intervals = [(share.start, share.stop) for share in shares]
        wanted = dict.fromkeys([(stage.start, stage.stop), *intervals])
        given: list[Source] = []
        found: dict[tuple[int, int], PartsMade] = {}
        for interval in wanted:
            has_weights = interval in intervals
            made = self._placement.find_parts(*interval, is_newest=is_hubs, has_weights=has_weights)
            if isinstance(made, PartsMade):
                found[interval] = made
            else:
                orders += made
        if len(found) < len(wanted):
            return None
        for share in shares:
            weights = found[share.start, share.stop].weights
            assert weights is not None, "they were asked for"
            given.append(Source(HUB, weights, share.before))
        return found[stage.start, stage.stop], given

    def _deliver(self, need: _Need, made: PartsMade, given: list[Source]) -> Send:
        found = ([Source(node, self._snapshots[node])] if node != HUB else given for node in need.nodes)
        sources = tuple(source for each in found for source in each)
        build_id, version = need.cluster.build_id, need.cluster.version
        parts = StageParts(build_id, version, made.blueprint, sources, need.is_kept, self._anchor_round)
        return Send(need.stage.node, parts)

    def _shrink(self, need: _Need) -> None:
        """From now on a node holds what both its last stage and the new one have."""
        member = self._membership.find(need.stage.node)
        if member is None or member.held is None:
            return
        start, stop = max(member.held.start, need.stage.start), min(member.held.stop, need.stage.stop)
        held = replace(member.held, start=start, stop=stop) if start < stop else None
        self._membership.update(replace(member, held=held))

    @property
    def unanswered(self) -> list[NodeId]:
        """Nodes that were asked for a snapshot and have not made it."""
        return [*self._asked.values()]

    def has_ordered(self, name: NodeId) -> bool:
        """Return whether a node was told to build its stage."""
        return name in self._needs and self._needs[name].is_ordered

    def is_source(self, name: NodeId) -> bool:
        """Return whether a stage still needs what a node has."""
        return any(
            name in need.nodes and need.stage.node in need.cluster.unready for need in self._needs.values()
        )

    def givers(self, cluster: ClusterState) -> tuple[NodeId, ...]:
        """Return the nodes that gave what a cluster lacked."""
        needs = (need for need in self._needs.values() if need.cluster is cluster)
        return tuple(dict.fromkeys(node for need in needs for node in need.nodes))


def find_cluster_of_state(cluster: ClusterState, placement: Placement) -> str:
    """Return the id of the cluster whose state most of these nodes hold; none if they hold nothing."""
    counts: Counter[str] = Counter()
    for stage in cluster.cluster.stages:
        member = placement.membership.find(stage.node)
        if member is not None and member.held is not None:
            held = member.held
            counts[held.cluster_id] += max(0, min(held.stop, stage.stop) - max(held.start, stage.start))
    return max(counts, key=lambda cluster_id: counts[cluster_id], default="") if counts.total() else ""


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

    @property
    def is_urgent(self) -> bool:
        """Whether a plan is needed now: a cluster stands still, or a node with a stage wants to go."""
        return self._placement.has_broken or self._placement.has_leaving_host

    def can_wait(self, now: float) -> bool:
        """Return whether a plan has time: a node is to come back, or a cluster finishes what it has."""
        return bool(self._membership.missing) or any(
            member.leaves_by is not None
            and now < self._drained_by(member.leaves_by)
            and (cluster := self._placement.cluster_of(member.node.name)) is not None
            and cluster.is_running
            and self._ledger.is_unfinished(cluster)
            for member in self._membership.leaving
        )

    def _drained_by(self, leaves_by: float) -> float:
        handover = self._timeouts.handover
        return leaves_by - handover.total_seconds + handover.drain_seconds

    def due(self, now: float) -> float | None:
        """Return when a node that leaves or is missing is no longer waited for."""
        times = [member.back_by for member in self._membership.missing if member.back_by is not None]
        times += [self._held_until] if self._held is not None else []
        for member in self._membership.leaving:
            assert member.leaves_by is not None
            drained_by = self._drained_by(member.leaves_by)
            times += [drained_by] if now < drained_by else [member.leaves_by]
        return min(times, default=None)

    def mark_broken(self, cluster: ClusterState, reason: str, since: float) -> list[Action]:
        """Stop a cluster that lost a node, and give its leases back."""
        if cluster.is_broken:
            return []
        was_running = cluster.is_running
        self._placement.mark_broken(cluster)
        if cluster.stopped_at is None and was_running:
            cluster.stopped_at = since
        self._checkpoints.drop(cluster)
        given_back = self._ledger.give_back(cluster)
        return [Notify(ClusterBroken(cluster.name, reason, given_back))] if was_running else []

    def restart(self, books: LedgerState | None, now: float) -> list[Action]:
        """Go on after the hub was away: everything stands still until all are back, or long enough."""
        self.saved = books
        self._membership.mark_all_missing(now + self._timeouts.return_seconds)
        self._placement.forget_parts()
        self._ledger.stand_still(self._placement.clusters)
        broken = [self.mark_broken(each, "the hub was away", now) for each in self._placement.clusters]
        return [action for actions in broken for action in actions]

    def needs(self, name: NodeId) -> bool:
        """Return whether a node has a stage, or state that others are still to get."""
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
        outlook, size = placement.outlook, self._batch_size
        told = PlanFormed(
            made.plan,
            outlook.samples_per_second,
            outlook.round_seconds,
            size,
            count,
            made.sharing,
            made.reason,
        )
        self._sources.begin_first(change)
        announced = placement.announce(change, self._find_contacts())
        return [Notify(told), *announced, *self._sources.order_builds()]

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
            ledger.progress.forget_averages(placement.clusters)
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
            if find_cluster_of_state(cluster, placement) not in followed:
                told = ClusterDissolved(cluster.name, "the plan goes on without it", given_back, lost)
                actions.append(Notify(told))
        ledger.progress.forget_others(placement.cluster_ids)
        actions += placement.announce(change, self._find_contacts(), self._sources.is_source)
        return [*actions, *self._sources.ask(), *self._sources.order_builds()]

    def end_checkpoint(self, collected: Collected, now: float) -> list[Action]:
        """Go on from what is on disk now, if it comes to that."""
        books, seconds = self._checkpoints.end(now)
        if collected.fault:
            return [Notify(NotCheckpointed(collected.fault))]
        self.saved = books
        self._placement.mark_parts_stale()
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
