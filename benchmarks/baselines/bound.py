"""An upper bound on any plan's batches per second, by linear programming.

Relax everything but capacity: a cluster of period T needs nodes whose shares of the line at T add up to
one, at most one of them last, one first and one at each depth, and no two neighbours that nobody can dial
while the hub's relay is slower than T. Latency, whole numbers of nodes and the fit of the pieces are ignored,
so no plan can do better. Periods are put in bins: rates are those of a bin's fast edge, capacities those of
its slow edge.
"""

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from ravnest.plan.cost import Floats, LineCost, NodeTable
from ravnest.plan.split import Splitter

_DEPTHS = 1  # deeper inner stages are counted as this depth, as many as one likes: no window is narrower
_COARSE_CELL = 1.25


@dataclass(frozen=True)
class _Capacities:
    """Share of the line per [node, bin, slot]: solo, last, first, inner of depth 1, 2, ..."""

    shares: Floats
    hidden: np.ndarray
    may_relay: np.ndarray  # per bin


class UpperBound:
    """Bounds for one line and swarm; the line must be the one the plan is cut on."""

    def __init__(self, line: LineCost, nodes: NodeTable, bin_ratio: float = 1.02) -> None:
        self._bin = bin_ratio  # of neighbouring periods; smaller is tighter and slower
        self._ratio = line.config.speed_ratio
        self._splitter = Splitter(line, nodes)
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
        return float(np.stack(best).max(axis=0).sum())

    def _solve(self, low: float, high: float) -> float:
        """Bound plans whose slowest period lies in (low, high]."""
        edges, rates = self._bins(low, high)
        shares = np.stack([self._capacity(edge) for edge in edges], axis=1)
        may_relay = np.array([self._bin**edge >= self._splitter.relay_floor for edge in edges])
        return _linear_programme(_Capacities(shares, ~self._splitter.nodes.reachable, may_relay), rates)


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
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    row = 0

    def add(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, size: int) -> None:
        nonlocal row
        entries.append((row + rows, columns, values))
        row += size

    add(node, use, np.ones(count), num_nodes)  # a node is used once
    add(edge, use, -shares[node, edge, slot], 0)  # clusters <= shares
    add(np.arange(num_bins), clusters, np.ones(num_bins), num_bins)
    limited = slot < num_slots - 1  # one node per cluster and slot, any number at the deepest
    add(edge[limited] * num_slots + slot[limited], use[limited], np.ones(limited.sum()), 0)
    bins = np.arange(num_bins * num_slots) // num_slots
    add(np.arange(num_bins * num_slots), count + bins, -np.ones(len(bins)), num_bins * num_slots)
    direct = ~capacities.may_relay[edge]  # between two hidden nodes stands an inner one that is not
    sign = np.where(capacities.hidden[node], 1.0, np.where(slot > 2, -1.0, 0.0))
    add(edge[direct], use[direct], sign[direct], 0)
    add(np.arange(num_bins), clusters, -np.ones(num_bins), num_bins)
    rows, columns, values = (np.concatenate(part) for part in zip(*entries, strict=True))
    matrix = coo_matrix((values, (rows, columns)), shape=(row, count + num_bins)).tocsr()
    limit = np.concatenate([np.ones(num_nodes), np.zeros(row - num_nodes)])
    answer = linprog(np.concatenate([np.zeros(count), -rates]), A_ub=matrix, b_ub=limit, method="highs")
    assert answer.status == 0, answer.message
    return float(-answer.fun)
