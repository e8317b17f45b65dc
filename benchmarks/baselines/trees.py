"""Other ways to average over clusters that are cut differently, on the same transport as ours.

Each chunk is added up along a tree and the mean goes out along another: a path is a ring, a star is a server,
two levels are a hierarchy, a star of its own per part is a butterfly. Chunks are on their way independently
of each other, so nothing here waits for a phase to end; that is more than these schemes usually have.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np

from benchmarks.shapes import Floats, Outgoing, Shape, cut
from ravnest.ids import NodeId

SERVER = NodeId("server")


@dataclass(frozen=True, slots=True)
class Tree:
    """How one chunk travels: to whom each node passes the sum, and from whom it gets the mean."""

    start: int
    stop: int
    owners: tuple[NodeId, ...]  # by cluster
    up: Mapping[NodeId, NodeId]
    down: Mapping[NodeId, NodeId]  # child to parent


def single_ring(shape: Shape) -> list[Tree]:
    """Whole models go around one ring; in every cluster the node with most of it speaks for the others."""
    heads = [
        max(cluster.stages, key=lambda stage: stage.stop - stage.start).node for cluster in shape.clusters
    ]
    trees, count = [], len(heads)
    for start, stop, part in cut(0, shape.num_items, count):
        for low, high, owners in shape.owned_within(start, stop):
            path = [heads[(part + step) % count] for step in range(count)]
            up = dict(pairwise(path))
            around = [path[-1], *path[:-1]]
            down = dict(zip(around[1:], around, strict=False))
            for owner, head in zip(owners, heads, strict=True):
                if owner != head:
                    up[owner] = down[owner] = head
            trees.append(Tree(low, high, owners, up, down))
    return trees


def parameter_server(shape: Shape) -> list[Tree]:
    """Everything goes to one more node, and back."""
    return _per_segment(shape, 1, lambda owners, _: dict.fromkeys(owners, SERVER))


def hierarchical(shape: Shape) -> list[Tree]:
    """Clusters in groups: owners add up at the first of their group, those at the first of all."""

    def make(owners: tuple[NodeId, ...], _: int) -> dict[NodeId, NodeId]:
        size = math.isqrt(len(owners) - 1) + 1
        leaders = [owners[place // size * size] for place in range(len(owners))]
        parents = zip(owners, leaders, strict=True)
        up = {owner: owners[0] if owner == leader else leader for owner, leader in parents}
        del up[owners[0]]
        return up

    return _per_segment(shape, 1, make)


def butterfly(shape: Shape) -> list[Tree]:
    """All owners of a segment exchange directly: each adds up one part and sends the mean to all."""

    def make(owners: tuple[NodeId, ...], part: int) -> dict[NodeId, NodeId]:
        return {owner: owners[part] for owner in owners if owner != owners[part]}

    return _per_segment(shape, len(shape.clusters), make)


def _per_segment(
    shape: Shape, num_parts: int, make: Callable[[tuple[NodeId, ...], int], dict[NodeId, NodeId]]
) -> list[Tree]:
    trees = []
    for start, stop, owners in shape.owned_within(0, shape.num_items):
        for low, high, part in cut(start, stop, num_parts):
            up = make(owners, part)
            trees.append(Tree(low, high, owners, up, up))
    return trees


SYSTEMS: dict[str, Callable[[Shape], list[Tree]]] = {
    "single ring": single_ring,
    "parameter server": parameter_server,
    "hierarchical": hierarchical,
    "butterfly": butterfly,
}


@dataclass(slots=True)
class _Place:
    """What one node does for one chunk."""

    where: slice | None  # in its own vector, if it has a share
    parent: NodeId | None
    receivers: list[NodeId]
    num_awaited: int
    takes_mean: bool
    total: Floats | None = None


@dataclass(slots=True)
class TreeReduce:
    """One node's side of all trees: feed it what arrives; send what it returns."""

    node: NodeId
    trees: list[Tree]
    vector: Floats
    first_item: int
    weights: Mapping[NodeId, float]
    result: Floats = field(init=False)
    _places: dict[int, _Place] = field(init=False)
    _num_awaited: int = field(init=False)

    def __post_init__(self) -> None:
        self.result = np.empty_like(self.vector)
        self._places = {}
        for number, tree in enumerate(self.trees):
            nodes = {*tree.owners, *tree.up, *tree.up.values()}
            if self.node in nodes:
                self._places[number] = self._place(tree)
        places = self._places.values()
        self._num_awaited = sum(place.num_awaited + place.takes_mean for place in places)

    @property
    def done(self) -> bool:
        return self._num_awaited == 0

    def start(self) -> list[Outgoing]:
        sent = []
        for number, place in self._places.items():
            if place.where is not None:
                place.total = self.vector[place.where] * np.float32(self.weights[self.node])
                sent += self._pass_on(number, place) if place.num_awaited == 0 else []
        return sent

    def receive(self, header: bytes, buffer: memoryview) -> list[Outgoing]:
        number, is_mean = msgspec.msgpack.decode(header)
        place, value = self._places[number], np.frombuffer(buffer, np.float32)
        self._num_awaited -= 1
        if is_mean:
            return self._spread(number, place, value)
        place.total = value if place.total is None else place.total + value
        place.num_awaited -= 1
        return self._pass_on(number, place) if place.num_awaited == 0 else []

    def _pass_on(self, number: int, place: _Place) -> list[Outgoing]:
        assert place.total is not None
        total, place.total = place.total, None
        if place.parent is not None:
            return [(place.parent, msgspec.msgpack.encode((number, False)), total.data)]
        weight = sum(self.weights[owner] for owner in self.trees[number].owners)
        return self._spread(number, place, total / np.float32(weight))

    def _spread(self, number: int, place: _Place, mean: Floats) -> list[Outgoing]:
        if place.where is not None:
            self.result[place.where] = mean
        header = msgspec.msgpack.encode((number, True))
        return [(receiver, header, mean.data) for receiver in place.receivers]

    def _place(self, tree: Tree) -> _Place:
        first, is_owner = self.first_item, self.node in tree.owners
        return _Place(
            slice(tree.start - first, tree.stop - first) if is_owner else None,
            tree.up.get(self.node),
            [child for child, parent in tree.down.items() if parent == self.node],
            sum(parent == self.node for parent in tree.up.values()),
            self.node in tree.down,
        )
