"""Greedy first answers for the search: fill clusters with nodes until each can hold the model in time.

At a target period every node has a capacity: the share of the line it can host as an inner, last or first
stage. Covering takes nodes until the shares add up to one, keeps the clusters that really meet the target,
returns the nodes of the others and goes on with a slower target, so that fast nodes meet fast nodes.
"""

from bisect import bisect_right
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from ravnest.plan.cost import NodeTable
from ravnest.plan.hub_line import HubLine, relayed_places
from ravnest.plan.line import Bools, Floats, Ints, LineCost
from ravnest.plan.split import NodeOrder, Splitter

_LEVEL_RATIO = 1.1  # between the target periods of neighbouring levels
_LOG_RATIO = float(np.log(_LEVEL_RATIO))
_SLACKS = (0.0, 0.05, 0.12, 0.25)  # capacity is an estimate: ask for more when it was not enough
_WIDEST_RATIO = 32.0  # of target periods in one covering, when the speed ratio is not bounded
_MOST_CEILINGS = 8
_PROMISING = 0.8  # of the best estimate
_SAMPLE = 256  # nodes that decide which target periods are worth trying


@dataclass(frozen=True, slots=True)
class Taste:
    """How a covering chooses; the search varies it."""

    hidden_first: bool = False  # spend nodes that cannot be dialled while neighbours for them are left
    jitter: float = 0.0  # relative noise on the capacities


Covering = Generator[list[NodeOrder], list[float], list[NodeOrder]]


class Seeds:
    """Covers the nodes of a splitter at target periods; a lone cluster has the hub's line for itself.

    Balanced clusters have no more hidden nodes than others, so that rings have few hidden neighbours.
    """

    def __init__(
        self, splitter: Splitter, hub: HubLine, is_alone: bool = False, is_balanced: bool = False
    ) -> None:
        self.splitter = splitter
        self.hub = hub
        self._is_alone, self._is_balanced = is_alone, is_balanced
        line, nodes = splitter.line, splitter.nodes
        self._bandwidth = nodes.both_ways
        self.hidden: list[bool] = (~nodes.reachable).tolist()
        self._weights = sum(total / max(1.0, total[-1]) for total in (line.parameters, line.flops)) / 2.0
        self.typical_stages = typical_stages(line, nodes)
        self.max_stages = min(line.config.max_stages, line.num_positions)
        self._roles = _Roles(splitter, self._weights, self.typical_stages)
        self._capacities: dict[int, Floats] = {}

    def period(self, level: int) -> float:
        """Return the target period of a level."""
        return float(_LEVEL_RATIO**level)

    def level(self, period: float) -> int:
        """Return the slowest level at least as fast as a period."""
        return int(np.floor(np.log(period) / _LOG_RATIO))

    def levels(self, ceiling: int) -> range:
        """Return the levels from the fastest useful one up to the ceiling."""
        ratio = min(self.splitter.line.config.speed_ratio, _WIDEST_RATIO)
        return range(ceiling - int(np.log(ratio) / _LOG_RATIO), ceiling + 1)

    def is_useful(self, level: int) -> Bools:
        """Say which nodes can host anything within the period of this level."""
        return np.asarray(self._capacity(level).max(axis=0) > 0.0)

    def all_ceilings(self) -> list[int]:
        """Return every third level from the fastest stage to a line on the slowest node."""
        one = self.splitter.stage_seconds(1)[:, 0]
        one = np.where(np.isfinite(one), one, 0.0).max(axis=1)  # its hardest position, of those that fit
        one = one[one > 0.0]
        if not len(one):
            return []
        low, high = np.percentile(one, 1), np.percentile(one, 97) * self.splitter.line.num_positions
        return list(range(int(np.log(low) / _LOG_RATIO), int(np.log(high) / _LOG_RATIO) + 4, 3))

    def promising_ceilings(self) -> list[int]:
        """Return the ceilings around which the capacities promise the most batches per second."""
        grid = self.all_ceilings()
        if not grid:
            return []
        sample = np.unique(np.linspace(0, len(self._bandwidth) - 1, _SAMPLE).astype(np.int64))
        rates = np.array(
            [self._capacity_of(level, sample).max(axis=0) / self.period(level) for level in grid]
        )
        promise = []
        for level in grid:
            reach = [k for k, other in enumerate(grid) if other in self.levels(level)]
            promise.append(float(rates[reach].max(axis=0).sum()))
        good = np.flatnonzero(np.array(promise) >= _PROMISING * max(promise))
        # Real clusters fall short of the estimate, more so the faster they are: look above it too.
        tries = np.arange(max(0, good[0] - 1), min(len(grid), good[-1] + 5))
        chosen = np.unique(np.linspace(0, len(tries) - 1, min(len(tries), _MOST_CEILINGS)).astype(int))
        return [grid[k] for k in tries[chosen]]

    def cover(
        self, free: Ints, levels: range, rng: np.random.Generator, taste: Taste, asked: float = 0.0
    ) -> Covering:
        """Make disjoint clusters of free nodes, each as fast as one of the levels.

        Yields orders and is sent their seconds, so that several coverings can be evaluated together. Other
        clusters ask for so many bytes per second of the hub's line already.
        """
        is_free = np.zeros(len(self._bandwidth), bool)
        is_free[free] = True
        clusters: list[NodeOrder] = []
        for level in levels:
            target, capacity = self.period(level), self._capacity(level)
            if taste.jitter:
                capacity = capacity * (1.0 + taste.jitter * rng.standard_normal(capacity.shape[1]))
            for slack in _SLACKS:
                able = np.flatnonzero(is_free & (capacity.max(axis=0) > 0.0))
                left = self.hub.upload - asked
                filled = list(self._fill(able, capacity, target, 1.0 + slack, taste, left))
                if not filled:
                    break
                seconds = yield filled
                made = [order for order, period in zip(filled, seconds, strict=True) if period <= target]
                clusters += made
                is_free[[node for order in made for node in order]] = False
                if not self._is_alone:
                    asked += sum(self._asked_by(order, target) for order in made)
                if len(made) == len(filled):
                    break
        return clusters

    def _capacity(self, level: int) -> Floats:
        if level not in self._capacities:
            self._capacities[level] = self._capacity_of(level, slice(None))
        return self._capacities[level]

    def _capacity_of(self, level: int, chosen: Ints | slice) -> Floats:
        """Share of the line each chosen node can host in time, as [inner, last, first] stage."""
        return self._roles.shares(self.period(level), chosen)

    def _asked_by(self, order: NodeOrder, period: float) -> float:
        """Return the bytes per second that a cluster asks of the hub's line."""
        return self.hub.asked_by(len(relayed_places(order, self.hidden)), period)

    def _fill(
        self, able: Ints, capacity: Floats, target: float, goal: float, taste: Taste, left: float
    ) -> Iterator[NodeOrder]:
        """Fill one cluster after another until the nodes are used up; relays until the line is."""
        stock = _Stock(able, capacity[:, able], ~self.splitter.nodes.reachable[able], taste.hidden_first)
        stock.is_balanced = self._is_balanced
        stock.most_relays = self.hub.most_relays(target, left)
        while (taken := self._take(stock, goal)) is not None:
            order = self._arrange(*taken)
            yield order
            if not self._is_alone and np.isfinite(left):
                left -= self._asked_by(order, target)
                stock.most_relays = self.hub.most_relays(target, left)

    def _take(self, stock: "_Stock", goal: float) -> tuple[int, list[int], int | None] | None:
        stock.begin()
        last = stock.take_end(1)
        if last is None:
            return None
        need, inner, first = goal - stock.share(1, last), list[int](), None
        if need > 0:
            first = stock.take_end(2) if self.max_stages > 1 else None
            if first is None:
                return None
            need -= stock.share(2, first)
        while need > 1e-9:
            node = stock.take_inner(need)
            if node is None or len(inner) + 2 >= self.max_stages:
                return None
            inner.append(node)
            need -= stock.share(0, node)
        ids = stock.ids
        return ids[last], [ids[k] for k in inner], None if first is None else ids[first]

    def _arrange(self, last: int, inner: list[int], first: int | None) -> NodeOrder:
        """Order a cluster: small memories late in the line, nodes that cannot be dialled not side by side."""
        nodes = self.splitter.nodes
        inner = sorted(inner, key=lambda node: (nodes.memory[node], self._bandwidth[node], node))
        visible = [node for node in inner if nodes.reachable[node]]
        hidden = [node for node in inner if not nodes.reachable[node]]
        order = [last]
        while visible or hidden:
            wants_hidden = bool(nodes.reachable[order[-1]]) and len(hidden) >= len(visible)
            order.append((hidden if (wants_hidden and hidden) or not visible else visible).pop(0))
        return tuple(order) if first is None else (*order, first)


class _Roles:
    """What each node can host as an inner, last or first stage, in shares of the line."""

    def __init__(self, splitter: Splitter, weights: Floats, typical: int) -> None:
        length = splitter.line.num_positions
        inner, last = (splitter.stage_seconds(depth) for depth in (max(1, typical // 2), 0))
        first = splitter.stage_seconds(max(1, typical - 1))
        longest = inner.shape[1]
        start = np.arange(length)
        stop = start + np.arange(1, longest + 1)[:, None]
        # Longest first, so that the first interval in time is the largest share.
        self._inner = np.ascontiguousarray(inner[:, ::-1, 1:].transpose(0, 2, 1))
        is_inner = (stop[::-1, 1:] < length).T
        self._inner[:, ~is_inner] = np.inf
        self._inner_shares = np.where(
            is_inner, (weights[np.minimum(stop, length)] - weights[start])[::-1, 1:].T, 0
        )
        self._is_cut_short = (
            stop[::-1, 1:] == length - 1
        ).T  # the end of the line, not the node, is the limit
        starts = np.arange(max(0, length - longest), length)
        self._last = last[:, length - starts - 1, starts]
        self._last_shares = weights[-1] - weights[starts]
        self._first, self._first_shares = first[:, ::-1, 0], weights[1 : longest + 1][::-1]

    def shares(self, target: float, chosen: Ints | slice) -> Floats:
        """Share of the line each chosen node can host in time, as [inner, last, first] stage."""
        ends = [(self._last, self._last_shares), (self._first, self._first_shares)]
        rows = [self._mean_share(self._inner[chosen] <= target)]
        for seconds, shares in ends:
            in_time = seconds[chosen] <= target
            largest = in_time.argmax(axis=1)  # shares descend: the first that is in time
            rows.append(np.where(in_time[np.arange(len(in_time)), largest], shares[largest], 0.0))
        return np.array(rows)

    def _mean_share(self, in_time: Bools) -> Floats:
        """Return the share of an inner stage, in the mean over the places where it may start."""
        if not in_time.size:  # a line of two positions has no inner stage
            return np.zeros(len(in_time))
        places, largest = np.arange(in_time.shape[1]), in_time.argmax(axis=2)
        is_able = np.take_along_axis(in_time, largest[:, :, None], axis=2)[:, :, 0]
        shares = np.where(is_able, self._inner_shares[places, largest], 0.0)
        is_own = ~(is_able & self._is_cut_short[places, largest])
        total = np.where(is_own, shares, 0.0).sum(axis=1)
        mean = total / np.maximum(is_own.sum(axis=1), 1)
        return np.asarray(np.maximum(mean, np.where(is_own, 0.0, shares).max(axis=1, initial=0.0)))


def typical_stages(line: LineCost, nodes: NodeTable) -> int:
    """Estimate how many stages a cluster of these nodes will have."""
    window = np.array(line.config.in_flight_per_hop + 1)
    start, stop = np.array(0), np.array(line.num_positions)
    whole = float(line.memory(start, stop, window, line.versions(window), recompute=True))
    room = max(1.0, float(np.median(nodes.memory)) - line.config.overhead_bytes)
    return int(np.clip(np.ceil(whole / room), 1, min(line.config.max_stages, line.num_positions)))


class _Stock:
    """Free nodes sorted by what they can host; hands out the largest or the smallest that suffices."""

    def __init__(self, able: Ints, capacity: Floats, hidden: Bools, hidden_first: bool) -> None:
        self.ids: list[int] = able.tolist()
        self.most_relays: float = 0  # of the next cluster
        self.is_balanced = False
        self._hidden_first = hidden_first
        self._hidden: list[bool] = hidden.tolist()
        self._capacity: list[list[float]] = capacity.tolist()
        self._used = [False] * len(self.ids)
        self._room: float = 1  # for hidden nodes, in the cluster being filled
        descending = np.argsort(-capacity[0], kind="stable")
        descending = descending[capacity[0][descending] > 0.0]
        queues = [descending[hidden[descending] == kind] for kind in (False, True)]
        self._inner: list[list[int]] = [queue.tolist() for queue in queues]
        self._keys: list[list[float]] = [(-capacity[0][queue]).tolist() for queue in queues]
        self._heads = [0, 0]
        favour = 2.0 * (hidden & hidden_first) - capacity[0]
        ends = [np.argsort(end + favour, kind="stable") for end in capacity[1:]]
        self._ends: list[list[int]] = [
            order[end[order] > 0.0].tolist() for order, end in zip(ends, capacity[1:], strict=True)
        ]

    def begin(self) -> None:
        """Start the next cluster: one hidden node needs no one between, each more needs one that is not.

        Or it needs the hub, which can serve only so many.
        """
        self._room = 0 if self.is_balanced else 1 + self.most_relays

    def share(self, role: int, node: int) -> float:
        """Return what a node can host as inner (0), last (1) or first (2) stage."""
        return self._capacity[role][node]

    def take_end(self, role: int) -> int | None:
        """Take the node that gains most from standing at an end of the line."""
        queue = self._ends[role - 1]
        while queue and self._used[queue[-1]]:
            queue.pop()
        if not queue:
            return None
        node = queue.pop()
        self._used[node] = True
        self._room -= self._hidden[node]
        return node

    def take_inner(self, need: float) -> int | None:
        """Take the smallest node that covers the need, else the largest one."""
        kinds = [kind for kind in (1, 0) if self._head(kind) is not None and self._may_take(kind)]
        if not kinds:
            return None
        enough = [kind for kind in kinds if -self._keys[kind][self._heads[kind]] >= need]
        if enough:
            candidates = [self._smallest(kind, need) for kind in enough[: 1 if self._hidden_first else 2]]
            return self._use(min(candidates, key=lambda node: (self._capacity[0][node], node)))
        if not self._hidden_first:
            kinds.sort(key=lambda kind: self._keys[kind][self._heads[kind]])
        return self._use(self._inner[kinds[0]][self._heads[kinds[0]]])

    def _may_take(self, kind: int) -> bool:
        return kind == 0 or self._room > 0

    def _head(self, kind: int) -> int | None:
        queue = self._inner[kind]
        while self._heads[kind] < len(queue) and self._used[queue[self._heads[kind]]]:
            self._heads[kind] += 1
        return queue[self._heads[kind]] if self._heads[kind] < len(queue) else None

    def _smallest(self, kind: int, need: float) -> int:
        queue, keys = self._inner[kind], self._keys[kind]
        k = bisect_right(keys, -need, lo=self._heads[kind]) - 1
        while self._used[queue[k]]:
            k -= 1
        return queue[k]

    def _use(self, node: int) -> int:
        self._used[node] = True
        self._room += -1 if self._hidden[node] else 1
        return node
