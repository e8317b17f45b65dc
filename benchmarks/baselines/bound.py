"""An upper bound on any plan's batches per second, by linear programming.

Relax everything but capacity: a cluster of period T needs nodes whose shares of the line at T add up to
one, at most one of them last and one first. Between two nodes that nobody can dial stands one that can be
dialled, or the hub; the hub's line carries samples and relays of all clusters. Latency, whole numbers of
nodes and the fit of the pieces are ignored, so no plan can do better. Periods are put in bins: rates are
those of a bin's fast edge, capacities and what is asked of the hub those of its slow edge. Nodes that are
almost alike may be counted as one kind, with the best facts of all: that keeps the programme small.
"""

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from ravnest.plan.cost import NodeTable
from ravnest.plan.hub_line import HubLine
from ravnest.plan.line import Floats, LineCost
from ravnest.plan.split import Splitter

_DEPTHS = 1  # deeper inner stages are counted as this depth, as many as one likes: no window is narrower
_COARSE_CELL = 1.25


@dataclass(frozen=True)
class _Capacities:
    """Share of the line per [node, bin, slot]: solo, last, first, inner of depth 1, 2, ..."""

    shares: Floats
    counts: np.ndarray  # of nodes alike
    hidden: np.ndarray
    may_relay: np.ndarray  # per bin
    periods: Floats  # slow edge of each bin
    hub: HubLine


class UpperBound:
    """Bounds for one line and swarm; the line must be the one the plan is cut on."""

    def __init__(self, line: LineCost, nodes: NodeTable, bin_ratio: float = 1.02, alike: float = 1.0) -> None:
        self._bin = bin_ratio  # of neighbouring periods; smaller is tighter and slower
        self._ratio = line.config.speed_ratio
        self._counts, nodes = merge_alike(nodes, alike)
        self._splitter = Splitter(line, nodes)
        self._hub = HubLine.of(line)
        weights = 0.5 * (line.parameters / line.parameters[-1] + line.flops / line.flops[-1])
        self._roles = [_role(self._splitter, weights, *role) for role in _role_intervals(line.num_positions)]
        self._cache: dict[int, Floats] = {}

    def batches_per_second(self) -> float:
        """Return the bound over all possible slowest periods: cells of periods, the most promising split."""
        low, high = self._range()
        edges = np.geomspace(low, high, int(np.log(high / low) / np.log(_COARSE_CELL)) + 2)
        cells = [(-self._rough(*cell), False, *cell) for cell in pairwise(edges)]
        heapq.heapify(cells)
        while True:
            value, is_solved, low, high = heapq.heappop(cells)
            if not is_solved:
                heapq.heappush(cells, (-self._solve(low, high), True, low, high))
            elif high / low <= 1.5 * self._bin - 0.5:
                return -value
            else:
                middle = float(np.sqrt(low * high))
                for cell in ((low, middle), (middle, high)):
                    heapq.heappush(cells, (max(value, -self._rough(*cell)), False, *cell))

    def _range(self) -> tuple[float, float]:
        fastest = min(float(seconds.min(initial=np.inf)) for seconds, _ in self._roles)
        slowest = max(float(seconds[np.isfinite(seconds)].max(initial=fastest)) for seconds, _ in self._roles)
        return fastest, slowest * 2.0  # risk and latency only slow down; slower plans are dominated

    def _capacity(self, edge: int) -> Floats:
        if edge not in self._cache:
            rows = []
            for seconds, shares in self._roles:
                if not len(shares):  # nobody can hold the whole line
                    rows.append(np.zeros(len(seconds)))
                    continue
                in_time = seconds <= self._bin**edge
                first = in_time.argmax(axis=1)
                rows.append(np.where(in_time[np.arange(len(in_time)), first], shares[first], 0.0))
            self._cache[edge] = np.array(rows).T
        return self._cache[edge]

    def _bins(self, low: float, high: float) -> tuple[range, Floats]:
        first, last = (int(np.floor(np.log(x) / np.log(self._bin))) for x in (low / self._ratio, high))
        edges = range(first + 1, last + 2)
        return edges, np.array([min(self._bin ** (1 - edge), self._ratio / low) for edge in edges])

    def _rough(self, low: float, high: float) -> float:
        """Bound as `_solve` does, but let every node take its best place and period."""
        edges, rates = self._bins(low, high)
        best = [self._capacity(edge).max(axis=1) * rate for edge, rate in zip(edges, rates, strict=True)]
        return float(np.stack(best).max(axis=0) @ self._counts)

    def _solve(self, low: float, high: float) -> float:
        """Bound plans whose slowest period lies in (low, high]."""
        edges, rates = self._bins(low, high)
        shares = np.stack([self._capacity(edge) for edge in edges], axis=1)
        periods = np.array([self._bin**edge for edge in edges])
        hidden = ~self._splitter.nodes.reachable
        may_relay = periods >= self._hub.slowest_relay
        return _linear_programme(
            _Capacities(shares, self._counts, hidden, may_relay, periods, self._hub), rates
        )


def merge_alike(nodes: NodeTable, alike: float) -> tuple[np.ndarray, NodeTable]:
    """Return kinds of nodes whose rates differ by less than this factor, and how many there are of each."""
    if alike <= 1.0:
        return np.ones(len(nodes)), nodes
    rates = [nodes.flops, nodes.upload, nodes.download]
    steps = [np.floor(np.log(rate) / np.log(alike)) for rate in rates]
    keys = np.stack([*steps, nodes.memory, nodes.reachable.astype(float)], axis=1)
    _, first, kind, counts = np.unique(
        keys, axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    best = [np.zeros(len(first)) for _ in rates]
    for rate, column in zip(rates, best, strict=True):
        np.maximum.at(column, kind.ravel(), rate)
    flops, upload, download = best
    merged = replace(nodes.take(first), flops=flops, upload=upload, download=download)
    return counts.astype(float), merged


def _role_intervals(length: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
    start, stop = np.triu_indices(length + 1, k=1)
    inner = (start > 0) & (stop < length)
    whole = (start == 0) & (stop == length)
    last, first = (stop == length) & ~whole, (start == 0) & ~whole
    roles = [(0, start[whole], stop[whole]), (0, start[last], stop[last]), (1, start[first], stop[first])]
    return roles + [(depth, start[inner], stop[inner]) for depth in range(1, _DEPTHS + 1)]


def _role(splitter: Splitter, weights: Floats, depth: int, start: np.ndarray, stop: np.ndarray):
    shares = weights[stop] - weights[start]
    descending = np.argsort(-shares, kind="stable")
    seconds = splitter.stage_seconds(depth)
    length = (stop - start)[descending]
    descending, length = descending[length <= seconds.shape[1]], length[length <= seconds.shape[1]]
    return seconds[:, length - 1, start[descending]], shares[descending]


def _linear_programme(capacities: _Capacities, rates: Floats) -> float:
    """Maximise sum(rate * clusters) over fractional clusters per bin and fractional nodes per slot."""
    shares = capacities.shares
    num_nodes, num_bins, num_slots = shares.shape
    node, edge, slot = np.nonzero(shares > 0)
    count = len(node)
    use, clusters = np.arange(count), count + np.arange(num_bins)
    relays = count + num_bins + np.arange(num_bins)  # pairs of each bin that use the hub
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    row = 0

    def add(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, size: int) -> None:
        nonlocal row
        entries.append((row + rows, columns, values))
        row += size

    bins = np.arange(num_bins)
    add(node, use, np.ones(count), num_nodes)  # a node is used once
    add(edge, use, -shares[node, edge, slot], 0)  # clusters <= shares
    add(bins, clusters, np.ones(num_bins), num_bins)
    limited = slot < num_slots - 1  # one node per cluster and slot, any number of inner ones
    add(edge[limited] * num_slots + slot[limited], use[limited], np.ones(limited.sum()), 0)
    slots = np.arange(num_bins * num_slots)
    add(slots, count + slots // num_slots, -np.ones(len(slots)), num_bins * num_slots)
    # Between two hidden nodes stands an inner one that is not, or the hub.
    sign = np.where(capacities.hidden[node], 1.0, np.where(slot > 2, -1.0, 0.0))
    add(edge, use, sign, 0)
    add(bins, clusters, -np.ones(num_bins), 0)
    add(bins, relays, -np.ones(num_bins), num_bins)
    limits = [capacities.counts, np.zeros(row - num_nodes)]
    hub, nowhere = capacities.hub, np.zeros(num_bins, np.int64)
    if np.isfinite(hub.upload):  # all of it goes through one line
        add(nowhere, clusters, hub.sample_bytes / capacities.periods, 0)
        add(nowhere, relays, hub.relay_bytes / capacities.periods, 1)
        limits.append(np.array([hub.upload]))
    rows, columns, values = (np.concatenate(part) for part in zip(*entries, strict=True))
    matrix = coo_matrix((values, (rows, columns)), shape=(row, count + 2 * num_bins)).tocsr()
    gain = np.concatenate([np.zeros(count), -rates, np.zeros(num_bins)])
    most = np.concatenate([np.full(count + num_bins, np.inf), np.where(capacities.may_relay, np.inf, 0.0)])
    answer = linprog(
        gain,
        A_ub=matrix,
        b_ub=np.concatenate(limits),
        bounds=np.stack([np.zeros(len(most)), most], axis=1),
        method="highs",
    )
    assert answer.status == 0, answer.message
    return float(-answer.fun)
