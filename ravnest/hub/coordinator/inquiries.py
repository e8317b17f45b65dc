"""Inquiries: a cluster that has work and reports nothing is asked what is wrong.

The link of a peer lives beside its work, so a stage that hangs would hold its cluster for ever. Each node of
a silent cluster is asked for a snapshot, which only a stage that works can make. Nodes that do not answer in
time are evicted. A cluster in which all nodes answer and still nothing moves is built anew.
"""

from collections.abc import Callable

from ravnest.hub.coordinator.events import Send
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.hub.coordinator.snapshots import SnapshotDesk, SnapshotPurpose
from ravnest.ids import NodeId

IDLE = "it does no work: nothing is heard of its stage, though its link lives"


class Inquiries:
    """At most one per cluster; its snapshots are requests of the one desk."""

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
