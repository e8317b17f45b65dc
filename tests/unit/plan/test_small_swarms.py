"""Of a few nodes the best grouping is found, not only a good one."""

from itertools import combinations, permutations

import numpy as np
import pytest
from support.plan_world import SIMPLE, even_model, node, swarm_of

from ravnest.plan.cost import NodeTable
from ravnest.plan.hub_line import HubLine
from ravnest.plan.line import LineCost
from ravnest.plan.small_swarms import Candidates, best_packing, candidate_orders
from ravnest.plan.split import Splitter

FREE = HubLine(np.inf, 0.0, np.inf, np.inf)
RATIO = 4.0


def candidates(orders, periods, hub_bytes=None):
    return Candidates(orders, np.array(periods, float), np.array(hub_bytes or [0.0] * len(orders)))


def rate_of(periods, ratio=RATIO):
    return sum(min(1 / period, ratio / max(periods)) for period in periods) if periods else 0.0


def every_packing(orders):
    for size in range(1, len(orders) + 1):
        for some in combinations(range(len(orders)), size):
            nodes = [node for k in some for node in orders[k]]
            if len(nodes) == len(set(nodes)):
                yield some


@pytest.mark.parametrize("most", [1, 2, 9])
@pytest.mark.parametrize("seed", range(12))
def test_a_packing_is_the_best_of_all(seed, most):
    random = np.random.default_rng(seed)
    subsets = [each for size in (1, 2, 3) for each in combinations(range(5), size)]
    orders = [subsets[k] for k in random.permutation(len(subsets))[:12]]
    periods = random.choice([1.0, 1.5, 2.0, 5.0, 9.0, np.inf], len(orders)) * random.choice([1.0, 1.1], 12)
    got = best_packing(candidates(orders, periods), FREE, RATIO, most)
    best = max(
        (rate_of([periods[k] for k in some]) for some in every_packing(orders) if len(some) <= most),
        default=0,
    )
    assert len(got) <= most
    assert rate_of([periods[orders.index(order)] for order in got]) == pytest.approx(best)


def test_where_the_hub_is_the_limit_clusters_that_spare_it_are_chosen():
    orders = [(0, 1), (2, 3), (0, 2), (1, 3)]
    found = candidates(orders, [1.0, 1.0, 1.1, 1.1], [100.0, 100.0, 10.0, 10.0])
    assert best_packing(found, FREE, RATIO, 9) == [(0, 1), (2, 3)]
    narrow = HubLine(20.0, 10.0, 90.0, 0.0)
    assert sorted(best_packing(found, narrow, RATIO, 9)) == [(0, 2), (1, 3)]


def test_nothing_that_works_is_no_packing():
    assert best_packing(candidates([(0,), (1,)], [np.inf, np.inf]), FREE, RATIO, 9) == []


def unequal(count, seed):
    random = np.random.default_rng(seed)
    return swarm_of(
        *(
            node(
                f"n{k}",
                memory_mb=float(random.choice([300, 500, 900])),
                gflops=float(random.choice([50, 100, 300])),
                upload_bytes_per_second=float(random.choice([2e6, 1e7, 5e7])),
                is_reachable=bool(random.random() < 0.5),
            )
            for k in range(count)
        )
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_best_order_of_each_subset_is_among_the_candidates(seed):
    nodes = NodeTable.of(unequal(7, seed), SIMPLE)
    line = LineCost(even_model(num_positions=6, parameter_mb=20, crossing_mb=1), SIMPLE, is_averaged=False)
    splitter = Splitter(line, nodes)
    found = candidate_orders(splitter, 4)
    fastest = {}
    for order, stage in zip(found, splitter.solve(found).seconds, strict=True):
        subset = frozenset(order)
        fastest[subset] = min(stage, fastest.get(subset, np.inf))
    every = [order for size in (1, 2, 3, 4) for order in permutations(range(7), size)]
    seconds = splitter.solve(every).seconds
    best = {}
    for order, stage in zip(every, seconds, strict=True):
        best[frozenset(order)] = min(stage, best.get(frozenset(order), np.inf))
    for subset, stage in best.items():
        if np.isfinite(stage):
            assert fastest[subset] <= stage * 1.1, sorted(subset)  # windows and latency are not its business


def test_a_handful_is_tried_in_every_order():
    line = LineCost(even_model(num_positions=6), SIMPLE, is_averaged=False)
    found = candidate_orders(Splitter(line, NodeTable.of(unequal(4, 0), SIMPLE)), 4)
    assert sorted(found) == sorted(order for size in (1, 2, 3, 4) for order in permutations(range(4), size))
