"""The records hub.members keeps: a peer that has joined, a cluster of the plan, what a new plan changes."""

from dataclasses import dataclass

from ravnest.blobs import Fact
from ravnest.plan.types import Cluster, Node, NodeId

# Wider than any machine is; the planner divides and multiplies these, and what overflows ends the hub.
_FACTS = {
    "memory_bytes": (0.0, 1e18),
    "flops_per_second": (1.0, 1e21),
    "upload_bytes_per_second": (1.0, 1e15),
    "download_bytes_per_second": (1.0, 1e15),
    "latency_seconds": (0.0, 1e3),
    "uptime_seconds": (1.0, 1e12),
}


@dataclass(frozen=True, slots=True)
class Held:
    """State that a node has: of these positions, as a cluster had them."""

    start: int
    stop: int
    holder: str


@dataclass(frozen=True, slots=True)
class Member:
    """A peer that has joined, and the plan it was told to follow."""

    node: Node
    key: str
    addresses: tuple[str, ...]
    epoch: int = 0
    guessed: tuple[Fact, ...] = ()  # what of the node is still to be measured
    probe_by: float | None = None  # until when that is waited for, once it is ordered
    held: Held | None = None
    leaves_by: float | None = None  # once it wants to
    leaves_for: str = ""
    back_by: float | None = None  # while the hub, which was away, waits for it


@dataclass(slots=True, eq=False)
class ClusterState:
    """A cluster of the current plan: it gets ready, then it trains, until somebody of it is missing."""

    name: str
    epoch: int
    cluster: Cluster
    unready: set[NodeId]
    holder: str  # its name in the lease book, never used again
    version: int = 0
    broken_at: float | None = None  # since when it stands still; until it trains, for one that is mended
    is_broken: bool = False

    @property
    def is_running(self) -> bool:
        """Whether all its stages are built and there."""
        return not self.unready and not self.is_broken

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Its nodes in pipeline order."""
        return tuple(stage.node for stage in self.cluster.stages)

    @property
    def root(self) -> NodeId:
        """Where batches enter."""
        return self.cluster.stages[0].node

    @property
    def leaf(self) -> NodeId:
        """Where the loss is."""
        return self.cluster.stages[-1].node


@dataclass(frozen=True, slots=True)
class Change:
    """What a new plan does: clusters to be built, those they take the place of, whether rings are others."""

    built: tuple[ClusterState, ...]
    ended: tuple[ClusterState, ...]
    has_new_rings: bool


def is_sensible(node: Node) -> bool:
    """Return whether a plan can be made with what a peer says of its machine."""
    return all(least <= getattr(node, fact) <= most for fact, (least, most) in _FACTS.items())
