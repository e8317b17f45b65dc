"""Spares keep snapshots of the stages on the least reliable nodes, so that these are back soonest.

Now and then every node that has a backup is asked for a snapshot, and its spare fetches it when nothing else
is to be sent. Driven by hub.mending.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ravnest.blobs import BlobRef
from ravnest.hub.events import Send
from ravnest.hub.members import ClusterState, Held, Members
from ravnest.hub.sourcing import Sourcing
from ravnest.plan.types import NodeId
from ravnest.staging import BackupKept, BackupOrder, SnapshotMade, SnapshotOrder, Source

_EVERY_SECONDS, _PAUSE = 30.0, 10  # and that many times what they take, so that no link is busy with them


@dataclass(frozen=True, slots=True)
class _Way:
    """A snapshot on its way from a node to its spare."""

    node: NodeId
    spare: NodeId
    held: Held
    known: int  # samples it had learned from
    weights: BlobRef | None = None


class Backing:
    """One snapshot per node at a time; what does not arrive is asked for again."""

    def __init__(self, members: Members, sourcing: Sourcing, number: Callable[[], int]) -> None:
        self._members, self._sourcing, self._number = members, sourcing, number
        self._ways: dict[int, _Way] = {}
        self._asked_at, self._next_at = 0.0, -1.0

    @property
    def due(self) -> float | None:
        """When the next snapshots are to be asked for, if anybody has a backup."""
        return self._next_at if self._members.backups and self._next_at >= 0 else None

    def order(self, known: Callable[[ClusterState], int], now: float) -> list[Send]:
        """Ask for the snapshots that are due."""
        if self._next_at < 0 or not self._members.backups:
            self._next_at = now + _EVERY_SECONDS
        if now < self._next_at:
            return []
        self._asked_at, self._next_at, self._ways = now, now + _EVERY_SECONDS, {}
        for backup in self._members.backups:
            node, cluster = self._members.find(backup.node), self._members.cluster_of(backup.node)
            if cluster is None or not cluster.is_running or backup.spare not in self._members:
                continue
            if node is not None and node.held is not None:
                self._ways[self._number()] = _Way(backup.node, backup.spare, node.held, known(cluster))
        ways, epoch = self._ways.items(), self._members.epoch
        return [Send(way.node, SnapshotOrder(epoch(way.node), n, is_final=False)) for n, way in ways]

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
        self._sourcing.note_backup(sender, way.held, way.weights, way.known)
        return None
