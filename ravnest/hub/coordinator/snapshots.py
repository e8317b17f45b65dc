"""Snapshots: nodes are asked for the state of their stages, and each answer finds what it was asked for.

One desk numbers all requests. A checkpoint is one cluster's state, now and then, and at the end the result.
If that cluster breaks, another one is asked, or the checkpoint waits for the next time. An inquiry asks a
cluster that has work and reports nothing: only a stage that works can make a snapshot. Nodes that do not
answer in time are evicted. A cluster in which all answer and still nothing moves is built anew. A backup is
kept by a spare.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.checks import NodeSketch
from ravnest.hub.coordinator.events import CheckpointPart, Collect, Send
from ravnest.hub.coordinator.leases import LedgerState
from ravnest.hub.coordinator.membership import HeldState
from ravnest.hub.coordinator.notices import Evaluated
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.ids import NodeId, RoundId
from ravnest.protocol.placement import (
    BackupKept,
    BackupOrder,
    BlobRef,
    SketchMade,
    SketchOrder,
    SketchRow,
    SnapshotMade,
    SnapshotOrder,
    Source,
)


class SnapshotPurpose(StrEnum):
    """What a snapshot was asked for."""

    CHECKPOINT = "checkpoint"  # one cluster's state, as a checkpoint or as the result
    SOURCE = "source"  # a stage is built of it
    BACKUP = "backup"  # a spare keeps it
    LIVENESS = "liveness"  # only a node that works can make one


class SnapshotDesk:
    """Numbers requests and matches answers to them."""

    def __init__(self) -> None:
        self._last_number = 0
        self._open: dict[tuple[int, NodeId], SnapshotPurpose] = {}

    def new_number(self) -> int:
        """Return a number that no request has had."""
        self._last_number += 1
        return self._last_number

    def ask(
        self,
        purpose: SnapshotPurpose,
        number: int,
        node: NodeId,
        build_id: int,
        is_final: bool = False,
        anchor_round: RoundId | None = None,
    ) -> Send:
        """Return the order for one node; nodes asked together may share a number."""
        self._open[number, node] = purpose
        return Send(node, SnapshotOrder(build_id, number, is_final=is_final, anchor_round=anchor_round))

    def answer(self, sender: NodeId, made: SnapshotMade) -> SnapshotPurpose | None:
        """Return what a snapshot was asked for, and wait for it no longer; None if nobody asked."""
        return self._open.pop((made.number, sender), None)

    def withdraw(self, purpose: SnapshotPurpose, but: Collection[int] = ()) -> None:
        """Wait no longer for answers of a purpose, but for those of these numbers."""
        left = {key: kept for key, kept in self._open.items() if kept is not purpose or key[0] in but}
        self._open = left


IDLE = "it does no work: nothing is heard of its stage, though its link lives"


class Inquiries:
    """At most one per cluster; its snapshots are requests of the one desk.

    The link of a peer lives beside its work, so a stage that hangs would hold its cluster for ever.
    """

    def __init__(self, placement: Placement, desk: SnapshotDesk) -> None:
        self._placement, self._desk = placement, desk
        self._answer_by: dict[str, float] = {}  # by cluster_id
        self._unanswered: dict[int, tuple[str, NodeId]] = {}  # by the number of the snapshot

    @property
    def due(self) -> float | None:
        """When the first inquiry ends."""
        return min(self._answer_by.values(), default=None)

    def has_asked(self, cluster_id: str) -> bool:
        """Return whether a cluster is asked now."""
        return cluster_id in self._answer_by

    def ask(self, cluster: ClusterState, answer_by: float) -> list[Send]:
        """Ask every node of a cluster for a snapshot."""
        self._answer_by[cluster.cluster_id] = answer_by
        numbers = {self._desk.new_number(): name for name in cluster.nodes}
        self._unanswered |= {number: (cluster.cluster_id, name) for number, name in numbers.items()}
        purpose, build_id = SnapshotPurpose.LIVENESS, cluster.build_id
        return [self._desk.ask(purpose, number, name, build_id) for number, name in numbers.items()]

    def record_answer(self, number: int) -> None:
        """Record that a node that was asked has made its snapshot."""
        del self._unanswered[number]

    def cancel(self, cluster_id: str) -> None:
        """End the inquiry of a cluster that is heard of again."""
        self._answer_by.pop(cluster_id, None)

    def retain(self, is_busy: Callable[[ClusterState], bool]) -> None:
        """Forget the inquiries of clusters that have no work any more."""
        if self._answer_by:
            busy = {each.cluster_id for each in self._placement.running if is_busy(each)}
            self._answer_by = {each: until for each, until in self._answer_by.items() if each in busy}
        if self._unanswered:
            asked = self._unanswered.items()
            self._unanswered = {number: who for number, who in asked if who[0] in self._answer_by}
            self._desk.withdraw(SnapshotPurpose.LIVENESS, but=self._unanswered)

    def conclude(self, now: float) -> tuple[list[NodeId], list[ClusterState]]:
        """Return the nodes that did not answer in time, and the clusters in which all did."""
        late = {cluster_id for cluster_id, until in self._answer_by.items() if now >= until}
        if not late:
            return [], []
        silent = {name: cluster_id for cluster_id, name in self._unanswered.values() if cluster_id in late}
        others = late - set(silent.values())
        return list(silent), [each for each in self._placement.running if each.cluster_id in others]


_PAUSE = 10  # times what checkpoints or backups take lies between two: no slow link is kept busy by them


@dataclass(frozen=True, slots=True)
class Comparison:
    """Clusters that hold the same weights as the one that gives them: they are asked for sketches."""

    key: bytes
    clusters: tuple[ClusterState, ...]
    anchor_round: RoundId | None  # whose average it is; None: their live weights are the same


class CheckpointCollector:
    """Numbered attempts to collect one cluster's state, with what others say of theirs."""

    def __init__(self, desk: SnapshotDesk, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._desk, self._timeouts = desk, timeouts
        self._keeper: ClusterState | None = None
        self._kept: dict[NodeId, SnapshotMade] = {}
        self._books: LedgerState | None = None  # of what is under way
        self._is_result = False  # that, and no checkpoint
        self._evaluated: Evaluated | None = None  # its state, if it was just evaluated
        self._results: dict[int, Collect] = {}  # that were ordered, by attempt
        self._comparison: Comparison | None = None
        self._sketches: dict[NodeId, tuple[SketchRow, ...] | None] = {}  # None: not made yet
        self._is_ordered = False  # all that is to be collected is known
        self.num_overtaken = 0  # in a row, by the next average
        self._every = 0.0
        self._started_at = 0.0
        self._next_at: float | None = None
        self._attempt = 0

    @property
    def silence(self) -> str:
        """What is wrong with a node that did not answer in time."""
        return f"did not answer within {self._timeouts.snapshot_seconds:.0f} s"

    @property
    def is_under_way(self) -> bool:
        """Whether a cluster was asked and has not died since."""
        return self._keeper is not None

    @property
    def has_result_under_way(self) -> bool:
        """Whether that is for the result."""
        return self.is_under_way and self._is_result

    @property
    def parts(self) -> tuple[CheckpointPart, ...]:
        """The answers of all nodes of the cluster, in the order of the line."""
        assert self._keeper is not None
        stages = self._keeper.cluster.stages
        refs = (self._kept[stage.node].weights for stage in stages)
        return tuple(
            CheckpointPart(x.start, x.stop, x.node, ref) for x, ref in zip(stages, refs, strict=True)
        )

    @property
    def answer_by(self) -> float | None:
        """When nodes that have not answered are waited for no longer, if there are any."""
        if self._keeper is None or self._is_ordered:
            return None
        seconds = self._timeouts.sketch_seconds if self._is_complete else self._timeouts.snapshot_seconds
        return self._started_at + seconds

    def find_silent(self, now: float) -> tuple[NodeId, ...]:
        """Return the nodes that have not answered in time."""
        if self._keeper is None or self._is_complete or self.answer_by is None or now < self.answer_by:
            return ()
        return tuple(name for name in self._keeper.nodes if name not in self._kept)

    def due(self, every: float | None) -> float | None:
        """Return when the next checkpoint is to be made, or the one under way given up, if there are any."""
        return self.answer_by if every is None or self.is_under_way else self._next_at

    def is_time(self, every: float | None, now: float) -> bool:
        """Return whether to make one; the first comes a whole period after training began."""
        if every is None or self.is_under_way:
            return False
        self._every = every
        if self._next_at is None:
            self._next_at = now + every
        return now >= self._next_at

    def expire(self, now: float) -> str | None:
        """Give up a checkpoint that cannot be kept; return why, or an empty text if that was told before."""
        if self.is_under_way and self._has_moved_on:
            self.end(now)
            self.num_overtaken += 1
            is_first = self.num_overtaken == 1
            return "the next average came before it could be compared; it is tried again" if is_first else ""
        silent = self.find_silent(now)
        if not silent or self._is_result:
            return None
        self.end(now)
        return f"{' and '.join(silent)} {self.silence}"

    def refuse(self, is_training: bool, has_clusters: bool, is_calm: bool) -> str:
        """Return why no checkpoint can be made now, though somebody asks for one."""
        if not is_training:
            return "nothing is trained now that will not be kept anyway"
        if not has_clusters:
            return "no cluster trains at this moment; ask again when one does"
        if self.is_under_way:
            return "one is under way already"
        return "" if is_calm else "the loss went wrong lately: the last good checkpoint is kept"

    def postpone(self, now: float) -> None:
        """Make no checkpoint this time."""
        self._next_at = now + self._every

    @property
    def held(self) -> str:
        """The id of the cluster that is to train nothing until its state, which was evaluated, is written."""
        is_live = self._evaluated is not None and self._comparison is None
        is_held = self._keeper is not None and is_live and not self._is_complete
        return self._keeper.cluster_id if self._keeper is not None and is_held else ""

    def start(
        self,
        cluster: ClusterState,
        now: float,
        books: LedgerState,
        *,
        is_result: bool = False,
        evaluated: Evaluated | None = None,
        comparison: Comparison | None = None,
    ) -> list[Send]:
        """Ask every node of a cluster for its state, and those of others for sketches of theirs."""
        self._keeper, self._kept, self._books, self._is_result = cluster, {}, books, is_result
        self._evaluated, self._comparison, self._is_ordered = evaluated, comparison, False
        self._desk.withdraw(SnapshotPurpose.CHECKPOINT)
        self._started_at, self._attempt = now, self._desk.new_number()
        facts = (SnapshotPurpose.CHECKPOINT, self._attempt)
        anchor_round = None if comparison is None else comparison.anchor_round
        sends = [
            self._desk.ask(*facts, name, cluster.build_id, is_result, anchor_round) for name in cluster.nodes
        ]
        others = () if comparison is None else comparison.clusters
        self._sketches = {name: None for other in others for name in other.nodes}
        if comparison is not None:
            asked = [(name, other.build_id) for other in others for name in other.nodes]
            sends += [
                Send(name, SketchOrder(build_id, self._attempt, comparison.key, anchor_round))
                for name, build_id in asked
            ]
        return sends

    def drop(self, cluster: ClusterState) -> None:
        """Collect no longer from a cluster that changes."""
        if self._keeper is cluster:
            self._keeper = None
            self._desk.withdraw(SnapshotPurpose.CHECKPOINT)
        for name in cluster.nodes:
            self._sketches.pop(name, None)

    def add_snapshot(self, sender: NodeId, made: SnapshotMade, now: float) -> list[Collect]:
        """Record a node's answer."""
        self._kept[sender] = made
        return self.order(now)

    def add_sketch(self, sender: NodeId, made: SketchMade, now: float) -> list[Collect] | str:
        """Record a sketch; return why not, if nobody asked for it."""
        if made.number != self._attempt or self._sketches.get(sender, ()) is not None:
            return f"nobody asked {sender} for sketch {made.number}"
        self._sketches[sender] = made.rows
        return self.order(now)

    def order(self, now: float) -> list[Collect]:
        """Have all parts fetched, once they are here, and others have said what they hold or had time to."""
        if self._is_ordered or not self._is_complete or self._has_moved_on:
            return []
        is_awaited = any(rows is None for rows in self._sketches.values())
        if is_awaited and now < self._started_at + self._timeouts.sketch_seconds:
            return []
        self._is_ordered, self.num_overtaken = True, 0
        assert self._books is not None
        order = Collect(self._attempt, self.parts, self._books, self._is_result, self._evaluated)
        if self._comparison is not None:
            said = tuple(NodeSketch(name, rows) for name, rows in self._sketches.items() if rows)
            order = replace(order, key=self._comparison.key, others=said)
        if self._is_result:
            self._results[self._attempt] = order
        return [order]

    @property
    def _has_moved_on(self) -> bool:
        """Whether the next average came before the parts were written; not at the end, where none comes."""
        if self._comparison is None or self._is_result:
            return False
        return any(made.anchor_round != self._comparison.anchor_round for made in self._kept.values())

    def find_result(self, number: int) -> Collect | None:
        """Return the order that collected the result, also if its cluster is gone by now."""
        return self._results.get(number)

    def find_evaluated(self, number: int) -> Evaluated | None:
        """Return the evaluation of the checkpoint of this number, if it is the one under way."""
        return self._evaluated if number == self._attempt else None

    def has_asked_for(self, number: int) -> bool:
        """Return whether this is the Collect whose end is awaited."""
        return self._is_complete and self._is_ordered and number == self._attempt

    def withdraw_result(self, number: int) -> None:
        """Begin again with the result: what was collected is not what others hold."""
        del self._results[number]
        self._keeper = None

    def end(self, now: float) -> tuple[LedgerState, float]:
        """End a checkpoint, kept or not; return what was trained then, and the seconds it took."""
        assert self._books is not None
        seconds = now - self._started_at
        self._keeper, self._next_at = None, now + max(self._every, _PAUSE * seconds)
        self._desk.withdraw(SnapshotPurpose.CHECKPOINT)
        return self._books, seconds

    @property
    def _is_complete(self) -> bool:
        return self._keeper is not None and len(self._kept) == len(self._keeper.nodes)


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
        placement: Placement,
        desk: SnapshotDesk,
        add_source: Callable[[NodeId, HeldState, BlobRef, int], None],
        timeouts: HubTimeouts = TIMEOUTS.hub,
    ) -> None:
        self._timeouts = timeouts
        self._placement, self._desk, self._add_source = placement, desk, add_source
        self._in_transit: dict[int, _BackupInTransit] = {}
        self._asked_at, self._next_at = 0.0, -1.0

    @property
    def due(self) -> float | None:
        """When the next snapshots are to be asked for, if anybody can be backed up."""
        return self._next_at if self._next_at >= 0 and any(self._find_pairs()) else None

    def order(self, samples_seen: Callable[[ClusterState], int], now: float) -> list[Send]:
        """Ask for the snapshots that are due; a node that cannot be backed up now is asked later."""
        if self._next_at < 0:
            self._next_at = now + self._timeouts.backup_every_seconds
        if now < self._next_at or not (pairs := [*self._find_pairs()]):
            return []
        self._asked_at, self._next_at = now, now + self._timeouts.backup_every_seconds
        self._desk.withdraw(SnapshotPurpose.BACKUP)
        self._in_transit = {
            self._desk.new_number(): _BackupInTransit(node, spare, held, samples_seen(cluster))
            for node, spare, held, cluster in pairs
        }
        build_id, purpose = self._placement.build_id, SnapshotPurpose.BACKUP
        asked = [(number, way.node) for number, way in self._in_transit.items()]
        return [self._desk.ask(purpose, number, node, build_id(node)) for number, node in asked]

    def _find_pairs(self) -> Iterator[tuple[NodeId, NodeId, HeldState, ClusterState]]:
        """Return the nodes of clusters that train, and the spares that are here for them."""
        membership = self._placement.membership
        for backup in self._placement.backups:
            node, cluster = membership.find(backup.node), self._placement.cluster_of(backup.node)
            if cluster is None or not cluster.is_running or backup.spare not in membership:
                continue
            if node is not None and node.held is not None:
                yield backup.node, backup.spare, node.held, cluster

    def forward(self, sender: NodeId, made: SnapshotMade) -> list[Send]:
        """Order the spare to fetch a snapshot that its node made."""
        way = self._in_transit[made.number] = replace(self._in_transit[made.number], weights=made.weights)
        return [Send(way.spare, BackupOrder(0, made.number, Source(sender, made.weights)))]

    def record(self, sender: NodeId, kept: BackupKept, now: float) -> str | None:
        """Record that a spare has a snapshot; return why not, if it was not to keep it."""
        way = self._in_transit.get(kept.number)
        if way is None or way.spare != sender or way.weights is None:
            return f"nobody asked {sender} to keep snapshot {kept.number}"
        del self._in_transit[kept.number]
        self._next_at = max(self._next_at, now + _PAUSE * (now - self._asked_at))
        self._add_source(sender, way.held, way.weights, way.samples_seen)
        return None
