"""Clusters that cut a model in different places, as the planner's records, and their nodes' vectors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ravnest.ids import NodeId
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Cluster, Node, Plan, Ring, Stage

Floats: TypeAlias = npt.NDArray[np.float32]
Outgoing = tuple[NodeId, bytes, memoryview]  # to whom, header, values

CHUNK_ITEMS = 1 << 18  # one megabyte
NUM_POSITIONS = 100  # of the line: cuts are percentages


@dataclass(frozen=True, slots=True)
class Shape:
    """Who holds what of how much."""

    clusters: tuple[Cluster, ...]
    rings: tuple[Ring, ...]
    items_per_position: int

    @property
    def num_items(self) -> int:
        return NUM_POSITIONS * self.items_per_position

    @property
    def plan(self) -> Plan:
        return Plan(1, 0, self.clusters, self.rings, ())

    @property
    def stages(self) -> dict[NodeId, tuple[int, Stage]]:
        """The nodes: number of the cluster, and stage."""
        return {
            stage.node: (number, stage)
            for number, cluster in enumerate(self.clusters)
            for stage in cluster.stages
        }

    @property
    def weights(self) -> dict[NodeId, float]:
        """How many samples each node's cluster has trained."""
        return {node: number + 1.0 for node, (number, _) in self.stages.items()}

    @property
    def largest_bytes(self) -> int:
        """The parameters of the largest stage."""
        return 4 * self.items_per_position * max(s.stop - s.start for _, s in self.stages.values())

    def owned_within(self, start: int, stop: int) -> Iterator[tuple[int, int, tuple[NodeId, ...]]]:
        """Cut an interval of items where any cluster does; yield the owners by cluster too."""
        for ring in self.rings:
            low = max(start, ring.start * self.items_per_position)
            high = min(stop, ring.stop * self.items_per_position)
            if low < high:
                yield low, high, tuple(cluster.owner(ring.start) for cluster in self.clusters)

    def vector(self, node: NodeId) -> Floats:
        """Return what a node starts with."""
        return _pattern(self, node) * np.float32(self.weights[node])

    def fault(self, node: NodeId, mean: Floats, tolerance: float = 1e-4) -> float | None:
        """Return how far the mean a node ended with is off, if it is."""
        weights = [number + 1.0 for number in range(len(self.clusters))]
        expected = _pattern(self, node) * np.float32(sum(w * w for w in weights) / sum(weights))
        off = float(np.abs(mean - expected).max() / expected.max())
        return None if off <= tolerance else off


def make_shape(cuts: Sequence[Sequence[int]], num_bytes: int) -> Shape:
    """Return clusters with these inner cuts, in percent of the parameters."""
    clusters = []
    for number, inner in enumerate(cuts):
        edges = [0, *inner, NUM_POSITIONS]
        names = [NodeId(f"{chr(ord('a') + number)}{place}") for place in range(len(edges) - 1)]
        stages = [Stage(name, *edge) for name, edge in zip(names, pairwise(edges), strict=True)]
        clusters.append(Cluster(tuple(stages)))
    nodes = {stage.node: Node(stage.node, 1.0, 1.0, 1.0, 1.0) for each in clusters for stage in each.stages}
    rings = form_rings(tuple(clusters), nodes)
    return Shape(tuple(clusters), rings, num_bytes // (4 * NUM_POSITIONS))


def cut(start: int, stop: int, num_parts: int) -> Iterator[tuple[int, int, int]]:
    """Cut an interval in near-equal parts and these in chunks; yield the number of the part too."""
    length = stop - start
    for part in range(num_parts):
        low, high = start + part * length // num_parts, start + (part + 1) * length // num_parts
        for begin in range(low, high, CHUNK_ITEMS):
            yield begin, min(begin + CHUNK_ITEMS, high), part


def _pattern(shape: Shape, node: NodeId) -> Floats:
    stage = shape.stages[node][1]
    items = np.arange(stage.start * shape.items_per_position, stage.stop * shape.items_per_position)
    return (items % 1000 + 1).astype(np.float32) / np.float32(1000)
