"""Where the state of a new stage comes from, and when it is ordered built.

A node keeps what it holds. The rest comes from snapshots: of nodes of the same cluster; else of another
cluster, of a backup, or of the hub, which has the last checkpoint. A source may be a tenth behind the best.
Where clusters make exact updates, all of a stage comes from one that trains: so it is at the same update.
What the hub gives goes from node to node (Deliveries): it sends each byte about once. A cluster that is
repaired before anybody trained goes on with the weights that all clusters begin with.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from ravnest.hub.coordinator.events import MakeParts, PartsMade, Send
from ravnest.hub.coordinator.membership import HeldState, Membership
from ravnest.hub.coordinator.phases import NodePhase
from ravnest.hub.coordinator.placement import ClusterState, Placement, PlanChange
from ravnest.hub.coordinator.snapshots import SnapshotDesk, SnapshotPurpose
from ravnest.ids import HUB, NodeId
from ravnest.plan.types import Node, Ring, Stage
from ravnest.protocol.averaging import FIRST_WEIGHTS
from ravnest.protocol.placement import BlobRef, SnapshotMade, Source, StageParts

Interval = tuple[int, int]

_MOST_BEFORE = 2  # nodes that pass weights on to the same one: one may be slow


@dataclass(frozen=True, slots=True)
class Share:
    """An interval of a stage whose weights come from the hub, and the nodes that get them before."""

    start: int
    stop: int
    before: tuple[NodeId, ...] = ()


class Deliveries:
    """Which nodes get which intervals of the hub's weights, and who passes them on to whom.

    Each interval is content with a name of its own. A stage is made of those that its node has already, be it
    in part, then of those that others get, and of new ones only where there are none. So the hub sends each
    byte about once, also when the plan changes meanwhile. Nobody waits for a node that waits for it.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._before: dict[Interval, dict[NodeId, tuple[NodeId, ...]]] = {}  # by receiver
        self._had: dict[NodeId, set[Interval]] = {}  # by nodes whose stages are no more; it is still there
        self._num_after: Counter[NodeId] = Counter()  # that get something from a node

    @property
    def intervals(self) -> Collection[Interval]:
        """All intervals that somebody gets, or has."""
        return self._before.keys()

    def clear(self) -> None:
        """Begin with other weights: what nodes have is of no use any more."""
        self._before, self._had, self._num_after = {}, {}, Counter()

    def begin(self, rings: Iterable[Ring], stages: Iterable[Stage]) -> dict[NodeId, tuple[Share, ...]]:
        """Divide first weights among all owners of rings; each gets a segment from those before it.

        Nodes that all others can dial come first, then those that send fastest: the first of them gets it
        from the hub, and as few others as can be. A cluster that is alone has no rings, and gets its stages.
        """
        self.clear()
        found: dict[NodeId, tuple[Share, ...]] = {}
        for ring in rings:
            owners = [self._membership[name].node for name in ring.owners]
            turns = sorted(owners, key=_rank_sender)
            num_reachable = sum(node.is_reachable for node in turns)  # they come first, and meet all
            interval = ring.start, ring.stop
            receivers = self._before.setdefault(interval, {})
            num_after: Counter[NodeId] = Counter()
            for turn, node in enumerate(turns):
                last = turn if node.is_reachable else min(turn, num_reachable)
                before = tuple(x.name for x in turns[max(0, last - _MOST_BEFORE) : last])
                receivers[node.name] = before
                for name in before:
                    num_after[name] += 1
                found[node.name] = (*found.get(node.name, ()), Share(*interval, before))
            self._num_after.update(num_after)
        for stage in stages:
            if stage.node not in found:
                found[stage.node] = (self._add(stage.node, (stage.start, stage.stop), ()),)
        return found

    def withdraw(self, names: Collection[NodeId]) -> None:
        """Give these nodes nothing more; what they have got of it stays with them."""
        for interval, receivers in list(self._before.items()):
            for name in names & receivers.keys():
                self._num_after.subtract(receivers.pop(name))
                self._had.setdefault(name, set()).add(interval)
            if not receivers:
                del self._before[interval]

    def forget(self, name: NodeId) -> None:
        """Forget a node that has gone, and what it has."""
        self.withdraw({name})
        self._had.pop(name, None)

    def divide(self, name: NodeId, start: int, stop: int, cuts: Collection[int]) -> tuple[Share, ...]:
        """Return of which intervals a node gets these positions, and from whom; new ones end at the cuts."""
        had = {each for each in self._had.get(name, ()) if start <= each[0] and each[1] <= stop}
        known = had | {each for each in self._before if start <= each[0] and each[1] <= stop}
        shares, position = [], start
        while position < stop:
            here = [each for each in known if each[0] == position]
            if here:
                interval = max(here, key=lambda x: (x in had, len(self._before.get(x, ())), x[1]))
            else:
                edges = (*(each[0] for each in known), *cuts, stop)
                interval = (position, min(edge for edge in edges if edge > position))
            shares.append(self._add(name, interval, self._find_before(name, interval)))
            position = interval[1]
        return tuple(shares)

    def _add(self, name: NodeId, interval: Interval, before: tuple[NodeId, ...]) -> Share:
        self._before.setdefault(interval, {})[name] = before
        self._num_after.update(before)
        return Share(*interval, before)

    def _find_before(self, name: NodeId, interval: Interval) -> tuple[NodeId, ...]:
        """Return who passes an interval on: who has all of it, and passes it to few others."""
        receivers, node = self._before.get(interval, {}), self._membership[name].node
        able = [
            member
            for member in map(self._membership.find, receivers)
            if member is not None
            and _meet(member.node, node)
            and not _waits_for(receivers, member.node.name, name)
        ]
        able.sort(
            key=lambda x: (
                self._num_after[x.node.name],
                x.phase is not NodePhase.HOSTING,
                -x.node.upload_bytes_per_second,
            )
        )
        return tuple(member.node.name for member in able[:_MOST_BEFORE])


def _rank_sender(node: Node) -> tuple[bool, float, NodeId]:
    return not node.is_reachable, -node.upload_bytes_per_second, node.name


def _meet(one: Node, other: Node) -> bool:
    return one.is_reachable or other.is_reachable


def _waits_for(before: dict[NodeId, tuple[NodeId, ...]], name: NodeId, other: NodeId) -> bool:
    """Return whether a node gets something from another, be it through others."""
    seen, left = {name}, [name]
    while left:
        for each in before.get(left.pop(), ()):
            if each == other:
                return True
            if each not in seen:
                seen.add(each)
                left.append(each)
    return False


_ENOUGH = 0.9  # of what the best source has learned from


@dataclass(slots=True)
class _Need:
    """A stage to be built, and the nodes whose snapshots it needs; HUB is the hub itself."""

    cluster: ClusterState
    stage: Stage
    is_kept: bool
    nodes: tuple[NodeId, ...]
    is_first: bool = False  # what it gets is what all clusters begin with
    is_ordered: bool = False
    shares: tuple[Share, ...] = ()  # of what the hub gives; without one, it gives the stage as a whole

    @property
    def is_unready(self) -> bool:
        """Whether the stage is not built; what was given for one that is built is of the past."""
        return self.stage.node in self.cluster.unready

    @property
    def intervals(self) -> tuple[tuple[int, int], ...]:
        """The intervals of its shares."""
        return tuple((share.start, share.stop) for share in self.shares)


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
        self._deliveries = Deliveries(placement.membership)
        self._first: dict[str, ClusterState] = {}  # clusters of what all begin with, that never trained
        self._has_first = False  # that is still what the hub gives
        self._needs_hub = False
        self._asked: dict[int, NodeId] = {}
        self._snapshots: dict[NodeId, BlobRef] = {}
        self._backups: dict[NodeId, _Backup] = {}
        self._best: ClusterState | None = None  # of those that train, the one that knows most
        self._samples_seen: dict[str, int] = {}  # by cluster_id, of those that train or stood still
        self._kept = -1  # samples; -1: the hub has nothing
        self._useless: dict[tuple[NodeId, HeldState], NodeId] = {}  # sources that do not give: the accuser

    @property
    def needs_hub(self) -> bool:
        """Whether nobody but the hub has some of what the last plan began to build, and others trained."""
        return self._needs_hub

    def begin_first(self, change: PlanChange) -> None:
        """Build stages of what the hub has, alike in all clusters; they pass it on to each other."""
        self._first = {cluster.cluster_id: cluster for cluster in change.built}
        self._has_first = True
        stages = [(cluster, stage) for cluster in change.built for stage in cluster.cluster.stages]
        shares = self._deliveries.begin(self._placement.rings, (stage for _, stage in stages))
        self._needs = {
            stage.node: _Need(cluster, stage, False, (HUB,), True, shares=shares[stage.node])
            for cluster, stage in stages
        }
        self._asked, self._snapshots = {}, {}
        self._start(set())

    def begin(
        self, change: PlanChange, samples_seen: Callable[[ClusterState], int], kept: int
    ) -> tuple[Origin, ...]:
        """Find sources for the stages to be built, by what clusters know and what the hub has kept.

        Stages of clusters that go on being built are left as they are.
        """
        self._kept = kept
        origins: list[Origin] = []
        running = self._placement.running
        self._best = best = max(running, key=samples_seen, default=None)
        seen = self._samples_seen | {x.cluster_id: samples_seen(x) for x in (*running, *change.ended)}
        self._samples_seen = {each: seen[each] for each in seen.keys() & self._placement.cluster_ids}
        has_learned = best is not None and samples_seen(best) > max(0, kept)
        first = self._follow_first(change, has_learned)
        changed = {name for each in (*change.built, *change.ended) for name in each.nodes}
        self._deliveries.withdraw(changed)
        building = {x for need in self._needs.values() if need.is_unready for x in need.nodes} - changed
        needs = self._keep_needs(changed)
        for cluster in change.built:
            if cluster.cluster_id in first:
                needs |= {stage.node: self._find_first(cluster, stage) for stage in cluster.cluster.stages}
                continue
            cluster_id = "" if self._is_exact else find_cluster_of_state(cluster, self._placement)
            found = [self._find(cluster, stage, cluster_id) for stage in cluster.cluster.stages]
            needs |= {need.stage.node: need for need in found}
            is_whole = not any(need.nodes for need in found)
            self._needs_hub |= any(HUB in need.nodes for need in found)
            origins.append(Origin(cluster, cluster_id or (best.cluster_id if best else ""), is_whole))
        self._needs = needs
        if not any(need.is_first for need in needs.values()):
            self._deliveries.clear()
        self._start(building)
        return tuple(origins)

    def _start(self, building: set[NodeId]) -> None:
        """Wait for the snapshots that are needed; those made for builds that still go on are used again."""
        waiting = {node for need in self._needs.values() if not need.is_ordered for node in need.nodes}
        waiting &= building
        self._asked = {number: node for number, node in self._asked.items() if node in waiting}
        self._snapshots = {node: ref for node, ref in self._snapshots.items() if node in waiting}
        self._desk.withdraw(SnapshotPurpose.SOURCE, but=self._asked)
        stages = {(need.stage.start, need.stage.stop) for need in self._needs.values()}
        self._placement.retain_parts({*stages, *self._deliveries.intervals})

    def _keep_needs(self, changed: Collection[NodeId]) -> dict[NodeId, _Need]:
        """Return the needs of clusters that go on being built, with other sources where some have changed."""
        kept: dict[NodeId, _Need] = {}
        self._needs_hub = False
        for name, need in self._needs.items():
            if name in changed or not need.cluster.unready:
                continue
            gone = [x for x in need.nodes if x != HUB and (x in changed or x not in self._membership)]
            kept[name] = need
            if gone and not need.is_ordered:
                cluster_id = find_cluster_of_state(need.cluster, self._placement)
                kept[name] = self._find(need.cluster, need.stage, cluster_id)
                self._needs_hub |= HUB in kept[name].nodes
        return kept

    def continues(self, ended: ClusterState) -> bool:
        """Return whether a cluster that is built goes on with what one had got that never trained."""
        nodes = set(ended.nodes)
        return any(not nodes.isdisjoint(each.nodes) for each in self._first.values())

    def forget_first(self) -> None:
        """Record that the hub gives other weights from now on than those that all clusters began with."""
        self._has_first = False

    def _follow_first(self, change: PlanChange, has_learned: bool) -> Collection[str]:
        """Return the ids of clusters to be built of what all begin with, if no cluster has learned anything.

        They go on from one that got it and never trained; or nobody has a state that is built of it.
        """
        before = {x: each for x, each in self._first.items() if not each.has_trained}
        is_usual = self._has_first and not self._is_exact and not has_learned and self._kept >= 0
        ended = {name for each in change.ended if each.cluster_id in before for name in each.nodes}
        is_new = not self._placement.running
        held = (self._usable(name) for name in self._membership)
        is_new &= all(x is None or x.cluster_id in before for x in held)
        found = {
            each.cluster_id: each
            for each in change.built
            if is_usual and (is_new or not ended.isdisjoint(each.nodes)) and self._has_only(each, before)
        }
        here = {each.cluster_id for each in self._placement.clusters}
        self._first = {key: each for key, each in before.items() if key in here} | found
        return found.keys()

    def _has_only(self, cluster: ClusterState, before: Collection[str]) -> bool:
        """Return whether nodes of a cluster hold nothing, or only state of these clusters."""
        held = (self._usable(name) for name in cluster.nodes)
        return all(each is None or each.cluster_id in before for each in held)

    def _find_first(self, cluster: ClusterState, stage: Stage) -> _Need:
        """Return what a stage lacks of what all clusters begin with: it goes from node to node."""
        own, shares = self._usable(stage.node), list[Share]()
        gaps = [(stage.start, stage.stop)]
        if own is not None:
            gaps = [(stage.start, min(own.start, stage.stop)), (max(own.stop, stage.start), stage.stop)]
            gaps = [stage_gap for stage_gap in gaps if stage_gap[0] < stage_gap[1]]
        cuts = {edge for ring in self._placement.rings for edge in (ring.start, ring.stop)}
        for start, stop in gaps:
            shares += self._deliveries.divide(stage.node, start, stop, cuts)
        nodes = (HUB,) if shares else ()
        return _Need(cluster, stage, own is not None, nodes, True, shares=tuple(shares))

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
            for node in {node for share in need.shares for node in share.before}:
                if need.stage.node in need.cluster.unready and node in self._membership:
                    found[node].add(need.stage.node)
                    found[need.stage.node].add(node)
        return dict(found)

    def ask(self) -> list[Send]:
        """Ask all sources for a snapshot, each by a number of its own."""
        open_needs = (need for need in self._needs.values() if not need.is_ordered)
        nodes = dict.fromkeys(node for need in open_needs for node in need.nodes if node != HUB)
        given = [node for node in nodes if self._keeps_backup(node)]
        self._snapshots |= {node: self._backups[node].weights for node in given}
        known = {*self._snapshots, *self._asked.values()}
        asked = {self._desk.new_number(): node for node in nodes if node not in known}
        self._asked |= asked
        build_id, purpose = self._placement.build_id, SnapshotPurpose.SOURCE
        return [self._desk.ask(purpose, n, node, build_id(node)) for n, node in asked.items()]

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
        self._deliveries.forget(name)
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
        missing: set[tuple[object, ...]] = set()  # what stages are made of: many wait for the same
        for need in self._needs.values():
            if need.is_ordered or need.cluster.is_broken:
                continue
            kind = (need.stage.start, need.stage.stop, HUB in need.nodes, need.intervals)
            if kind in missing:
                continue
            made = self._find_parts(need, orders)
            if made is None:
                missing.add(kind)
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
        shares = need.shares or (Share(stage.start, stage.stop),) if is_hubs else ()
        intervals = tuple((share.start, share.stop) for share in shares)
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
        anchor_round = FIRST_WEIGHTS if need.is_first else None
        parts = StageParts(build_id, version, made.blueprint, sources, need.is_kept, anchor_round)
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
