"""Where the state of a stage comes from that is built: its node, others who hold it, a backup, the hub.

What a node holds it keeps. The rest it gets from snapshots, asked of those who have it: of who is or was in
the same cluster; else of another one that trains or stands still, of a backup, or from the hub, which has
the last checkpoint, whichever is not far behind the best of them. Driven by hub.mending.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.events import MakeParts, PartsMade, Send
from ravnest.hub.coordinator.membership import ClusterState, HeldState, Member, Membership, PlanChange
from ravnest.ids import HUB, NodeId, RoundId
from ravnest.plan.types import Stage
from ravnest.protocol.blobs import BlobRef
from ravnest.protocol.placement import (
    BackupKept,
    BackupOrder,
    SnapshotMade,
    SnapshotOrder,
    Source,
    StageParts,
)

_ENOUGH = 0.9  # of what the best source has learned from


@dataclass(slots=True)
class _Need:
    """A stage that is to be built, and whose snapshots it needs; HUB is the hub itself."""

    cluster: ClusterState
    stage: Stage
    is_kept: bool
    nodes: tuple[NodeId, ...]
    is_ordered: bool = False


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
    """Finds the ways of state for every plan anew, asks for snapshots, and orders stages built."""

    def __init__(self) -> None:
        self._needs: dict[NodeId, _Need] = {}
        self._anchor_round: RoundId | None = None
        self._asked: dict[int, NodeId] = {}
        self._snapshots: dict[NodeId, BlobRef] = {}
        self._backups: dict[NodeId, _Backup] = {}
        self._best: ClusterState | None = None  # of those that train, the one that knows most
        self._samples_seen: dict[
            str, int
        ] = {}  # samples, by cluster_id: those that train, and that stood still
        self._kept = -1  # samples; -1: the hub has nothing
        self._useless: dict[
            tuple[NodeId, HeldState], NodeId
        ] = {}  # who does not give what it holds, says whom

    @property
    def needs_hub(self) -> bool:
        """Whether nobody but the hub has some of what is to be built."""
        return any(HUB in need.nodes for need in self._needs.values())

    def begin_first(self, change: PlanChange) -> None:
        """Build stages of what the hub has, alike in all clusters."""
        stages = [(cluster, stage) for cluster in change.built for stage in cluster.cluster.stages]
        self._start({stage.node: _Need(cluster, stage, False, (HUB,)) for cluster, stage in stages})
        self._anchor_round = RoundId(0)

    def begin(
        self, change: PlanChange, members: Membership, samples_seen: Callable[[ClusterState], int], kept: int
    ) -> tuple[Origin, ...]:
        """Find sources for the stages to be built, by what clusters know and what the hub has kept."""
        self._anchor_round, self._kept = None, kept
        origins: list[Origin] = []
        needs: dict[NodeId, _Need] = {}
        self._best = best = max(members.running, key=samples_seen, default=None)
        self._samples_seen |= {
            each.cluster_id: samples_seen(each) for each in (*members.running, *change.ended)
        }
        self._samples_seen = {
            each: self._samples_seen[each] for each in self._samples_seen.keys() & members.cluster_ids
        }
        for cluster in change.built:
            cluster_id = find_cluster_of_state(cluster, members)
            found = [self._find(cluster, stage, members, cluster_id) for stage in cluster.cluster.stages]
            needs |= {need.stage.node: need for need in found}
            is_whole = not any(need.nodes for need in found)
            origins.append(Origin(cluster, cluster_id or (best.cluster_id if best else ""), is_whole))
        self._start(needs)
        return tuple(origins)

    def _start(self, needs: dict[NodeId, _Need]) -> None:
        self._needs, self._asked, self._snapshots = needs, {}, {}

    def _find(self, cluster: ClusterState, stage: Stage, members: Membership, cluster_id: str) -> _Need:
        found: dict[NodeId, None] = {}
        own = self._usable(members.find(stage.node))
        for position in range(stage.start, stage.stop):
            if own is None or not own.start <= position < own.stop:
                found[self._find_node(position, members, cluster_id)] = None
        return _Need(cluster, stage, own is not None, tuple(found))

    def _find_node(self, position: int, members: Membership, cluster_id: str) -> NodeId:
        """Return who has the state of a position, and is to give it: who is not far behind, peers first."""
        holding = {}
        for name in members:
            held = self._usable(members.find(name))
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
            if name in members and backup.held.start <= position < backup.held.stop
        ]
        found += [(self._kept, HUB)] if self._kept >= 0 else [(0, name) for name in holding]
        enough = _ENOUGH * max((samples_seen for samples_seen, _ in found), default=0)
        # Who is said not to give what it trains with is asked again, before all that was trained is lost.
        last = self._best.cluster.owner(position) if self._best is not None and self._kept < 0 else HUB
        return next((name for samples_seen, name in found if samples_seen >= enough), last)

    def _usable(self, member: Member | None) -> HeldState | None:
        held = member.held if member else None
        return None if member is None or held is None or (member.node.name, held) in self._useless else held

    @property
    def pairs(self) -> dict[NodeId, set[NodeId]]:
        """Who meets whom to give and take."""
        found = defaultdict(set)
        for need in self._needs.values():
            for node in need.nodes:
                if node != HUB:
                    found[node].add(need.stage.node)
                    found[need.stage.node].add(node)
        return dict(found)

    def ask(self, members: Membership, number: Callable[[], int]) -> list[Send]:
        """Ask all who have something for a snapshot, each by a number of its own."""
        nodes = dict.fromkeys(node for need in self._needs.values() for node in need.nodes if node != HUB)
        given = [node for node in nodes if self._keeps_backup(node, members)]
        self._snapshots = {node: self._backups[node].weights for node in given}
        self._asked = {number(): node for node in nodes if node not in given}
        return [
            Send(x, SnapshotOrder(members.build_id(x), n, is_final=False)) for n, x in self._asked.items()
        ]

    def _keeps_backup(self, node: NodeId, members: Membership) -> bool:
        """Return whether a source is one for its backup: it holds nothing of its own."""
        return node in self._backups and self._usable(members.find(node)) is None

    def take(self, sender: NodeId, made: SnapshotMade) -> str | None:
        """Take a snapshot; return why not, if nobody asked."""
        if self._asked.get(made.number) != sender:
            return f"nobody asked {sender} for snapshot {made.number}"
        del self._asked[made.number]
        self._snapshots[sender] = made.weights
        return None

    def forget(self, name: NodeId) -> None:
        """Note that somebody has gone, with what it kept and what it said of others."""
        self._backups.pop(name, None)
        left = {key: accuser for key, accuser in self._useless.items() if name not in (key[0], accuser)}
        self._useless = left

    def fail(self, name: NodeId, accuser: NodeId, members: Membership) -> None:
        """Note that somebody does not give what it holds, or does not hold it."""
        held = self._usable(members.find(name))
        if held is not None:
            self._useless[name, held] = accuser
        self._backups.pop(name, None)

    def note_backup(self, spare: NodeId, held: HeldState, weights: BlobRef, samples_seen: int) -> None:
        """A spare keeps a snapshot, of weights that had learned from so many samples."""
        self._backups[spare] = _Backup(held, weights, samples_seen)

    def order(self, members: Membership) -> list[Send | MakeParts]:
        """Order every stage built whose parts and snapshots are all there."""
        orders: list[Send | MakeParts] = []
        for need in self._needs.values():
            if need.is_ordered or need.cluster.is_broken:
                continue
            stage, is_hubs = need.stage, HUB in need.nodes
            made = members.find_parts(stage.start, stage.stop, is_newest=is_hubs)
            if not isinstance(made, PartsMade):
                orders += made
            elif all(node in self._snapshots for node in need.nodes if node != HUB):
                need.is_ordered = True
                self._shrink(members, need)
                orders.append(self._deliver(need, made))
        return orders

    def _deliver(self, need: _Need, made: PartsMade) -> Send:
        refs = {**self._snapshots, HUB: made.weights}
        sources = tuple(Source(node, refs[node]) for node in need.nodes)
        build_id, version = need.cluster.build_id, need.cluster.version
        parts = StageParts(build_id, version, made.blueprint, sources, need.is_kept, self._anchor_round)
        return Send(need.stage.node, parts)

    def _shrink(self, members: Membership, need: _Need) -> None:
        """From now on a node holds what both its last stage and the new one have."""
        member = members.find(need.stage.node)
        if member is None or member.held is None:
            return
        start, stop = max(member.held.start, need.stage.start), min(member.held.stop, need.stage.stop)
        held = replace(member.held, start=start, stop=stop) if start < stop else None
        members.replace(replace(member, held=held))

    @property
    def unanswered(self) -> list[NodeId]:
        """Who was asked for a snapshot and has not made it."""
        return [*self._asked.values()]

    def has_ordered(self, name: NodeId) -> bool:
        """Return whether a node was told to build its stage."""
        return name in self._needs and self._needs[name].is_ordered

    def is_source(self, name: NodeId) -> bool:
        """Return whether somebody still needs what a node has."""
        return any(
            name in need.nodes and need.stage.node in need.cluster.unready for need in self._needs.values()
        )

    def givers(self, cluster: ClusterState) -> tuple[NodeId, ...]:
        """Return who gave what a cluster lacked."""
        needs = (need for need in self._needs.values() if need.cluster is cluster)
        return tuple(dict.fromkeys(node for need in needs for node in need.nodes))


def find_cluster_of_state(cluster: ClusterState, members: Membership) -> str:
    """Return the name of the cluster whose state most of this one's nodes hold; none if they hold nothing."""
    counts: Counter[str] = Counter()
    for stage in cluster.cluster.stages:
        member = members.find(stage.node)
        if member is not None and member.held is not None:
            held = member.held
            counts[held.cluster_id] += max(0, min(held.stop, stage.stop) - max(held.start, stage.start))
    return max(counts, key=lambda cluster_id: counts[cluster_id], default="") if counts.total() else ""


_PAUSE = 10  # times what backups take lies between two, so that no link is busy with them


@dataclass(frozen=True, slots=True)
class _BackupInTransit:
    """A snapshot on its way from a node to its spare."""

    node: NodeId
    spare: NodeId
    held: HeldState
    samples_seen: int  # samples it had learned from
    weights: BlobRef | None = None


class BackupPolicy:
    """One snapshot per node at a time; what does not arrive is asked for again."""

    def __init__(
        self,
        members: Membership,
        sourcing: StateSources,
        number: Callable[[], int],
        timeouts: HubTimeouts = TIMEOUTS.hub,
    ) -> None:
        self._timeouts = timeouts
        self._members, self._sourcing, self._number = members, sourcing, number
        self._ways: dict[int, _BackupInTransit] = {}
        self._asked_at, self._next_at = 0.0, -1.0

    @property
    def due(self) -> float | None:
        """When the next snapshots are to be asked for, if anybody has a backup."""
        return self._next_at if self._members.backups and self._next_at >= 0 else None

    def order(self, samples_seen: Callable[[ClusterState], int], now: float) -> list[Send]:
        """Ask for the snapshots that are due."""
        if self._next_at < 0 or not self._members.backups:
            self._next_at = now + self._timeouts.backup_every_seconds
        if now < self._next_at:
            return []
        self._asked_at, self._next_at, self._ways = now, now + self._timeouts.backup_every_seconds, {}
        for backup in self._members.backups:
            node, cluster = self._members.find(backup.node), self._members.cluster_of(backup.node)
            if cluster is None or not cluster.is_running or backup.spare not in self._members:
                continue
            if node is not None and node.held is not None:
                self._ways[self._number()] = _BackupInTransit(
                    backup.node, backup.spare, node.held, samples_seen(cluster)
                )
        ways, build_id = self._ways.items(), self._members.build_id
        return [Send(way.node, SnapshotOrder(build_id(way.node), n, is_final=False)) for n, way in ways]

    def take(self, sender: NodeId, made: SnapshotMade) -> list[Send] | None:
        """Have a spare fetch a snapshot that was asked for; None if it was not."""
        way = self._ways.get(made.number)
        if way is None or way.node != sender or way.weights is not None:
            return None
        self._ways[made.number] = replace(way, weights=made.weights)
        return [Send(way.spare, BackupOrder(0, made.number, Source(sender, made.weights)))]

    def note_kept(self, sender: NodeId, kept: BackupKept, now: float) -> str | None:
        """Know who has a snapshot now; return why not, if it was not to."""
        way = self._ways.get(kept.number)
        if way is None or way.spare != sender or way.weights is None:
            return f"nobody asked {sender} to keep snapshot {kept.number}"
        del self._ways[kept.number]
        self._next_at = max(self._next_at, now + _PAUSE * (now - self._asked_at))
        self._sourcing.note_backup(sender, way.held, way.weights, way.samples_seen)
        return None
