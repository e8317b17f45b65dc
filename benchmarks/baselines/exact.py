"""The exact optimum for small swarms: every subset in every order with every cut, then the best packing.

Dynamic programme over subsets: best[subset, last one hidden?, cut] is the smallest possible slowest stage
when exactly these nodes hold everything after `cut`. It ignores latency, so the optimum it returns is never
below the true one. Clusters are then packed optimally for every possible slowest period.
"""

import numpy as np

from ravnest.plan.cost import NodeTable
from ravnest.plan.line import Floats, LineCost
from ravnest.plan.split import Splitter


def best_rate(line: LineCost, alone: LineCost, nodes: NodeTable) -> float:
    """Return the most batches per second of one cluster without averaging or of several with it."""
    single = subset_periods(alone, nodes).min(initial=np.inf)
    several = pack(subset_periods(line, nodes), len(nodes), line.config.speed_ratio)
    return max(several, 1.0 / single)


def subset_periods(line: LineCost, nodes: NodeTable) -> Floats:
    """Return the smallest period of a cluster of exactly the nodes in each bit mask."""
    count, splitter = len(nodes), Splitter(line, nodes)
    masks = np.arange(1 << count)
    sizes = np.array([int(mask).bit_count() for mask in masks])
    best = np.full((len(masks), 2, line.num_positions + 1), np.inf, np.float32)
    best[0, 0, -1] = 0.0
    relay = np.maximum(line.send_after, line.send_before) / line.config.relay_bytes_per_second
    deepest = min(count, line.config.max_stages, line.num_positions)
    for depth in range(deepest):
        stage_seconds = dense(splitter.stage_seconds(depth))
        for node in range(count):
            from_masks = masks[(sizes == depth) & (masks >> node & 1 == 0)]
            is_hidden = int(not nodes.reachable[node])
            behind = best[from_masks]
            if is_hidden:
                behind[:, 1] = np.maximum(behind[:, 1], relay)
            reach = np.maximum(stage_seconds[node], behind.min(axis=1)[:, None, :]).min(axis=2)
            to_masks = from_masks | 1 << node
            best[to_masks, is_hidden] = np.minimum(best[to_masks, is_hidden], reach)
    bits = (masks[:, None] >> np.arange(count) & 1).astype(float)
    return best[:, :, 0].min(axis=1) * (1.0 + bits @ nodes.risk)


def dense(seconds: np.ndarray) -> np.ndarray:
    """Return seconds [node, length - 1, start] as [node, start, stop], infinite where nothing fits."""
    count, longest, length = seconds.shape
    table = np.full((count, length + 1, length + 1), np.inf, seconds.dtype)
    for number in range(min(longest, length)):
        start = np.arange(length - number)
        table[:, start, start + number + 1] = seconds[:, number, : len(start)]
    return table


def pack(periods: Floats, count: int, speed_ratio: float) -> float:
    """Return the most batches per second of disjoint clusters, over every choice of the slowest one."""
    useful = _useful(periods, count)
    order = np.argsort(periods[useful], kind="stable")
    useful = useful[order]
    best = 0.0
    for number, slowest in enumerate(periods[useful], start=1):
        rates = np.minimum(1.0 / periods[useful[:number]], speed_ratio / slowest)
        best = max(best, _pack_rates(useful[:number], rates, count))
    return best


def _useful(periods: Floats, count: int) -> np.ndarray:
    """Return the subsets that are strictly faster than all they contain."""
    fastest = periods.copy()
    for node in range(count):  # fastest[mask] = min over all subsets of mask
        with_node = np.flatnonzero(np.arange(1 << count) >> node & 1)
        fastest[with_node] = np.minimum(fastest[with_node], fastest[with_node ^ (1 << node)])
    inner = np.full(1 << count, np.inf)
    for node in range(count):
        with_node = np.flatnonzero(np.arange(1 << count) >> node & 1)
        inner[with_node] = np.minimum(inner[with_node], fastest[with_node ^ (1 << node)])
    return np.flatnonzero(np.isfinite(periods) & (periods < inner))


def _pack_rates(clusters: np.ndarray, rates: Floats, count: int) -> float:
    total = np.zeros(1 << count)
    for low in range(count - 1, -1, -1):  # sets whose lowest node is `low`
        sets = np.arange(1 << (count - 1 - low)) << (low + 1) | 1 << low
        value = total[sets ^ (1 << low)].copy()
        for cluster, rate in zip(clusters.tolist(), rates.tolist(), strict=True):
            if cluster & -cluster == 1 << low:
                holds = (sets & cluster) == cluster
                value[holds] = np.maximum(value[holds], rate + total[sets[holds] ^ cluster])
        total[sets] = value
    return float(total.max())
