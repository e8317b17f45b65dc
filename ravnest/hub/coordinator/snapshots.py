"""One desk for snapshot requests: every request has a number, a node and a purpose.

Checkpoints, stages to be built, backups and liveness checks all ask nodes for snapshots. The desk numbers
the requests and says what an answer is for; an answer that nobody waits for has no purpose.
"""

from collections.abc import Collection
from enum import StrEnum

from ravnest.hub.coordinator.events import Send
from ravnest.ids import NodeId
from ravnest.protocol.placement import SnapshotMade, SnapshotOrder


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
        self, purpose: SnapshotPurpose, number: int, node: NodeId, build_id: int, is_final: bool = False
    ) -> Send:
        """Return the order for one node; nodes asked together may share a number."""
        self._open[number, node] = purpose
        return Send(node, SnapshotOrder(build_id, number, is_final=is_final))

    def answer(self, sender: NodeId, made: SnapshotMade) -> SnapshotPurpose | None:
        """Return what a snapshot was asked for, and wait for it no longer; None if nobody asked."""
        return self._open.pop((made.number, sender), None)

    def withdraw(self, purpose: SnapshotPurpose, but: Collection[int] = ()) -> None:
        """Wait no longer for answers of a purpose, but for those of these numbers."""
        left = {key: kept for key, kept in self._open.items() if kept is not purpose or key[0] in but}
        self._open = left
