"""The best grouping of a few nodes: every subset of them, in its best order, packed in the best way.

A dozen nodes have 4,095 subsets. A dynamic programme over subsets finds the order of each in which its
slowest stage is fastest; six nodes or fewer are tried in every order. What the clusters really take is then
asked of the splitter, and a second programme packs disjoint ones, so that the sum of their rates is largest.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np

from ravnest.plan.cost import Floats32
from ravnest.plan.hub_line import HubLine, choose_clusters
from ravnest.plan.line import Bools, Floats, Ints
from ravnest.plan.split import NodeOrder, Splitter

_EVERY_ORDER = 6  # nodes: 1,956 orders
_CELL = 1.1  # between the first slowest periods that a packing is tried for
_PRICES = (0.5, 0.8, 0.95)  # of the hub's line, in what the cheapest cluster could pay


def candidate_orders(splitter: Splitter, max_stages: int) -> list[NodeOrder]:
    """Return the orders worth asking for: every one of a few nodes, or the best of each subset."""
    count = len(splitter.nodes)
    if count <= _EVERY_ORDER:
        sizes = range(1, min(count, max_stages) + 1)
        return [order for size in sizes for order in permutations(range(count), size)]
    found = _best_orders(splitter, max_stages, splitter.relay_seconds)
    if not splitter.nodes.reachable.all():  # and those that need no relay
        found += _best_orders(splitter, max_stages, np.full_like(splitter.relay_seconds, np.inf))
    return list(dict.fromkeys(found))


def _best_orders(splitter: Splitter, max_stages: int, relay: Floats32) -> list[NodeOrder]:
    """Return for each subset that holds the model the order whose slowest stage is fastest.

    best[subset, is the front hidden, cut] is the slowest stage when these nodes hold everything after it.
    """
    nodes, length = splitter.nodes, splitter.line.num_positions
    count = len(nodes)
    masks = np.arange(1 << count)
    sizes = np.bitwise_count(masks)
    best = np.full((len(masks), 2, length + 1), np.inf, np.float32)
    best[0, 0, -1] = 0.0
    steps = _Steps(best.shape)
    for depth in range(min(count, max_stages)):
        seconds = _by_stop(splitter.stage_seconds(depth))
        for node in range(count):
            before = masks[(sizes == depth) & (masks >> node & 1 == 0)]
            is_hidden = int(not nodes.reachable[node])
            behind = best[before]
            if is_hidden:
                np.maximum(behind[:, 1], relay, out=behind[:, 1])
            is_front_hidden = behind[:, 1] < behind[:, 0]
            reach = np.maximum(seconds[node], behind.min(axis=1)[:, None, :])
            stop = reach.argmin(axis=2)
            value = np.take_along_axis(reach, stop[:, :, None], axis=2)[:, :, 0]
            after = before | 1 << node
            is_better = value < best[after, is_hidden]
            best[after, is_hidden] = np.where(is_better, value, best[after, is_hidden])
            steps.set(after, is_hidden, is_better, node, stop, np.take_along_axis(is_front_hidden, stop, 1))
    holds = np.flatnonzero(np.isfinite(best[:, :, 0].min(axis=1)))
    return [steps.trace(int(mask), int(best[mask, :, 0].argmin())) for mask in holds if mask]


def _by_stop(seconds: Floats32) -> Floats32:
    """Return seconds [node, length - 1, start] as [node, start, stop], infinite where nothing fits."""
    count, longest, length = seconds.shape
    table = np.full((count, length + 1, length + 1), np.inf, np.float32)
    for number in range(min(longest, length)):
        start = np.arange(length - number)
        table[:, start, start + number + 1] = seconds[:, number, : len(start)]
    return table


class _Steps:
    """Which node a subset's front is, where its stage stops, and whether the one behind it is hidden."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._table = np.zeros((*shape, 3), np.int64)

    def set(self, masks: Ints, kind: int, is_better: Bools, node: int, stop: Ints, is_hidden: Bools) -> None:
        """Note how these subsets were reached, where that is better than before."""
        step = np.stack([np.full_like(stop, node), stop, is_hidden.astype(np.int64)], axis=-1)
        self._table[masks, kind] = np.where(is_better[..., None], step, self._table[masks, kind])

    def trace(self, mask: int, kind: int) -> NodeOrder:
        """Return the nodes of a subset, from the end of the line to its front."""
        order, cut = list[int](), 0
        while mask:
            node, cut, kind = (int(each) for each in self._table[mask, kind, cut])
            order.append(node)
            mask ^= 1 << node
        return tuple(reversed(order))


@dataclass(frozen=True, slots=True)
class Candidates:
    """Clusters that disjoint ones are chosen from."""

    orders: Sequence[NodeOrder]
    periods: Floats
    hub_bytes: Floats  # of a batch


def best_packing(found: Candidates, hub: HubLine, speed_ratio: float, most: int) -> list[NodeOrder]:
    """Return the disjoint clusters, at most so many, with the most batches per second together."""
    able = np.flatnonzero(np.isfinite(found.periods))
    if not len(able):
        return []
    cheapest = float(found.hub_bytes[able].min())
    prices = [0.0] + [share / max(cheapest, 1e-9) for share in _PRICES] * bool(np.isfinite(hub.upload))
    best, chosen = 0.0, list[int]()
    for price in prices:
        packed = _Packing(found, able, price, speed_ratio, most).solve()
        rate, is_kept = choose_clusters(found.periods[packed], found.hub_bytes[packed], speed_ratio, hub)
        if rate > best * (1 + 1e-9):
            best, chosen = rate, [k for k, keep in zip(packed, is_kept, strict=True) if keep]
        if price == 0.0 and hub.busy_share(_asked(found, packed, speed_ratio)) <= 1.0:
            break  # the line has room for all: nobody need be spared
    return [found.orders[k] for k in chosen]


def _asked(found: Candidates, packed: Sequence[int], speed_ratio: float) -> float:
    periods = found.periods[packed]
    return float((found.hub_bytes[packed] * np.minimum(1.0 / periods, speed_ratio / periods.max())).sum())


class _Packing:
    """Packs disjoint clusters, each a set of bits; a byte of the hub's line has a price in batches."""

    def __init__(self, found: Candidates, able: Ints, price: float, speed_ratio: float, most: int) -> None:
        self._ratio, self._most = speed_ratio, most
        self._count = max(max(found.orders[k]) for k in able) + 1
        self._is_limited = most < self._count
        masks = np.array([sum(1 << node for node in found.orders[k]) for k in able], np.int64)
        worth = np.maximum(0.0, 1.0 - price * found.hub_bytes[able])
        # The best order of each subset, and only subsets that are better than all they contain.
        value = worth / found.periods[able]
        first = np.lexsort((-value, masks))
        first = first[np.concatenate([[True], np.diff(masks[first]) > 0])]
        first = first[self._is_useful(masks[first], value[first])]
        first = first[np.argsort(found.periods[able[first]], kind="stable")]
        self._able, self._masks, self._worth = able[first], masks[first], worth[first]
        self._periods = found.periods[self._able]
        self._sizes = np.bitwise_count(self._masks).astype(float)
        self._pairs = [self._subsets(low) for low in range(self._count)]

    def solve(self) -> list[int]:
        """Return the best clusters, over every choice of the slowest one: the most promising first."""
        edges = [0]
        for k in range(1, len(self._periods)):
            if self._periods[k] > _CELL * self._periods[edges[-1]]:
                edges.append(k)
        cells = [(-self._bound(*cell), *cell) for cell in pairwise([*edges, len(self._periods)])]
        heapq.heapify(cells)
        while True:
            _, first, stop = heapq.heappop(cells)
            if self._periods[stop - 1] <= self._periods[first] * (1 + 1e-9):
                return self._trace(first, stop)
            middle = (first + stop + 1) // 2
            for cell in ((first, middle), (middle, stop)):
                heapq.heappush(cells, (-self._bound(*cell), *cell))

    def _is_useful(self, masks: Ints, value: Floats) -> Bools:
        """Say which subsets are worth more than every subset of theirs."""
        inside = np.zeros(1 << self._count)
        inside[masks] = value
        every = np.arange(1 << self._count)
        strictly = np.zeros(1 << self._count)
        for node in range(self._count):  # the largest worth of any subset of a set
            with_node = every[every >> node & 1 == 1]
            inside[with_node] = np.maximum(inside[with_node], inside[with_node ^ (1 << node)])
        for node in range(self._count):
            with_node = every[every >> node & 1 == 1]
            strictly[with_node] = np.maximum(strictly[with_node], inside[with_node ^ (1 << node)])
        return np.asarray(value > strictly[masks])

    def _subsets(self, low: int) -> tuple[Ints, Ints, Ints]:
        """Return sets whose lowest node this is, and pairs of a set and a cluster in it with that node."""
        sets = np.arange(1 << (self._count - 1 - low)) << (low + 1) | 1 << low
        clusters = np.flatnonzero(self._masks & -self._masks == 1 << low)
        row, column = np.nonzero((sets[:, None] & self._masks[clusters]) == self._masks[clusters])
        return sets, row, clusters[column]

    def _rates(self, first: int, stop: int) -> Floats:
        """Return what each cluster is worth at most when the slowest one is in [first, stop)."""
        rates = np.minimum(1.0 / self._periods, self._ratio / self._periods[first])
        # Of equals, the one that leaves more spares.
        rates = rates * self._worth - 1e-9 * self._sizes / self._periods[-1]
        rates[stop:] = -np.inf
        return np.asarray(rates)

    def _bound(self, first: int, stop: int) -> float:
        return float(self._totals(self._rates(first, stop))[-1].max())

    def _totals(self, rates: Floats) -> Floats:
        """Return the most that clusters inside each set are worth, [layer, set].

        Layer k has at most k + 1 clusters; there is one layer where their number is not limited.
        """
        totals = np.zeros((self._most if self._is_limited else 1, 1 << self._count))
        for sets, row, cluster in reversed(self._pairs):
            totals[:, sets] = totals[:, sets & (sets - 1)]  # without its lowest node
            if not len(row):
                continue
            left = sets[row] ^ self._masks[cluster]
            starts = np.flatnonzero(np.concatenate([[True], np.diff(row) > 0]))
            some = sets[row[starts]]
            for layer in range(len(totals)):
                best = np.maximum.reduceat(rates[cluster] + self._others(totals, layer, left), starts)
                totals[layer, some] = np.maximum(totals[layer, some], best)
        return totals

    def _others(self, totals: Floats, layer: int, left: Ints) -> Floats:
        """Return what clusters beside one more are worth, inside the nodes that it leaves."""
        if not self._is_limited:
            return np.asarray(totals[layer, left])
        return np.asarray(totals[layer - 1, left]) if layer else np.zeros(len(left))

    def _trace(self, first: int, stop: int) -> list[int]:
        """Return the clusters that make the most of all nodes."""
        rates = self._rates(first, stop)
        totals = self._totals(rates)
        layer, mask, chosen = len(totals) - 1, (1 << self._count) - 1, list[int]()
        while mask and layer >= 0:
            rest = mask & (mask - 1)
            if totals[layer, mask] <= totals[layer, rest] * (1 + 1e-12):
                mask = rest  # its lowest node stays a spare
                continue
            is_inside = (self._masks & -self._masks == mask ^ rest) & (self._masks & mask == self._masks)
            inside = np.flatnonzero(is_inside)
            others = self._others(totals, layer, mask ^ self._masks[inside])
            best = int(inside[(rates[inside] + others).argmax()])
            chosen.append(int(self._able[best]))
            mask ^= int(self._masks[best])
            layer -= self._is_limited
        return chosen
