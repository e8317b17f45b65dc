"""Where a stage stands in its cluster, and how its numbers travel."""

from dataclasses import dataclass

from ravnest.config import WireFormat
from ravnest.ids import NodeId


@dataclass(frozen=True, slots=True)
class StagePosition:
    """The build of a stage, its cluster from root to leaf, its wire formats and its device."""

    build_id: int
    seed: int
    node: NodeId
    pipeline: tuple[NodeId, ...]
    activations: WireFormat = WireFormat.FP32
    gradients: WireFormat = WireFormat.FP32
    device: str = "cpu"

    @property
    def index(self) -> int:
        """Its number in the cluster; the root has 0."""
        return self.pipeline.index(self.node)

    @property
    def before(self) -> NodeId | None:
        """The neighbour towards the root."""
        return self.pipeline[self.index - 1] if self.index else None

    @property
    def after(self) -> NodeId | None:
        """The neighbour towards the leaf."""
        return self.pipeline[self.index + 1] if self.index + 1 < len(self.pipeline) else None
