"""The result: one cluster's state, asked of its nodes, and of another cluster's when that one dies.

Driven by hub.state.
"""

from ravnest.hub.events import Collect, KeptPart, Send
from ravnest.hub.members import ClusterState
from ravnest.plan.types import NodeId
from ravnest.protocol import SnapshotOrder, StageParts


class Keeping:
    """Numbered attempts to have one cluster's state kept."""

    def __init__(self) -> None:
        self._keeper: ClusterState | None = None
        self._kept: dict[NodeId, StageParts] = {}
        self._number = 0

    @property
    def is_under_way(self) -> bool:
        """Whether a cluster was asked and has not died since."""
        return self._keeper is not None

    @property
    def parts(self) -> tuple[KeptPart, ...]:
        """What all nodes of the cluster answered, in the order of the line."""
        assert self._keeper is not None
        stages = self._keeper.cluster.stages
        return tuple(KeptPart(each.start, each.stop, each.node, self._kept[each.node]) for each in stages)

    def start(self, cluster: ClusterState) -> list[Send]:
        """Ask every node of a cluster for its state."""
        self._keeper, self._kept = cluster, {}
        self._number += 1
        return [Send(name, SnapshotOrder(cluster.epoch, self._number)) for name in cluster.nodes]

    def lose(self, cluster: ClusterState) -> None:
        """Note that a cluster is no more."""
        if self._keeper is cluster:
            self._keeper = None

    def awaits(self, sender: NodeId, cluster: ClusterState) -> bool:
        """Return whether this node of this cluster is still to answer."""
        return self._keeper is cluster and sender not in self._kept

    def take(self, sender: NodeId, parts: StageParts) -> list[Collect]:
        """Take a node's answer; with the last one, order all of them fetched."""
        self._kept[sender] = parts
        return [Collect(self._number, self.parts)] if self._is_complete else []

    def has_asked_for(self, number: int) -> bool:
        """Return whether this is the Collect whose end is awaited."""
        return self._is_complete and number == self._number

    @property
    def _is_complete(self) -> bool:
        return self._keeper is not None and len(self._kept) == len(self._keeper.nodes)
