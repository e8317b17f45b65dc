"""Snapshots: nodes are asked for the state of their stages, and each answer finds what it was asked for.

One desk numbers all requests. An inquiry asks a cluster that has work and reports nothing: only a stage that
works can make a snapshot. Nodes that do not answer in time are evicted. A cluster in which all answer and
still nothing moves is built anew. A backup is kept by a spare.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.events import Send
from ravnest.hub.coordinator.membership import HeldState
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.ids import NodeId, RoundId
from ravnest.protocol.placement import (
    BackupKept,
    BackupOrder,
    BlobRef,
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


PAUSE_TIMES = 10  # what a checkpoint or backups take lies between two: no slow link is kept busy by them


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
        self._next_at = max(self._next_at, now + PAUSE_TIMES * (now - self._asked_at))
        self._add_source(sender, way.held, way.weights, way.samples_seen)
        return None
