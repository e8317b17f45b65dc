"""Cluster formation: from nodes and a model to a plan.

The search works on a shortened line and, in large swarms, on one neighbourhood of nodes after another; the
clusters it finds are then cut again on the full line. One cluster alone needs no averaging, so it is searched
for separately and wins when the swarm holds the model hardly once.
"""

from dataclasses import dataclass

import numpy as np

from ravnest.config import SEARCH_BUDGET, Averaging, PlanConfig, SearchBudget
from ravnest.plan.assembly import assemble_plan, build_clusters
from ravnest.plan.cost import NodeTable
from ravnest.plan.hub_line import HubLine, RelayedRounds, choose_clusters, other_orders
from ravnest.plan.infeasible import explain_shortage, holding_order
from ravnest.plan.line import Ints, LineCost
from ravnest.plan.search import Search
from ravnest.plan.seeds import typical_stages
from ravnest.plan.split import FINE_POSITIONS, NodeOrder, Splits, Splitter, choose_cuts, coarsen, shorten_line
from ravnest.plan.types import Cluster, ModelProfile, Plan, Swarm

_MOST_NODES = 1024  # of one neighbourhood; twice as many where links are alike
_LONG = 12  # stages of a typical cluster: fewer links of such length are equally fast in one region
_MANY_CLUSTERS = 32  # one alone is not faster than so many together
_PROMISING = 0.7  # of the rate of several clusters, after a short search for one alone
_OTHER_ORDERS = 16  # of each cluster, where rounds take too long
_AS_MUCH = 1.05  # another order of a cluster may ask this much more of the hub's line
_MOST_POSITIONS = 96  # of the line the search works on
_TABLE_BYTES = 250e6  # of stage costs held at once


@dataclass(frozen=True, slots=True)
class _Found:
    """Clusters by place in the node table, and the batches per second they make together."""

    orders: tuple[NodeOrder, ...] = ()
    rate: float = 0.0
    is_cut_short: bool = False  # clusters were left out because rounds would take too long


def form_plan(
    profile: ModelProfile,
    swarm: Swarm,
    config: PlanConfig,
    seed: int = 0,
    plan_id: int = 1,
    budget: SearchBudget = SEARCH_BUDGET,
) -> Plan:
    """Return the plan with the most samples per second the search finds, or raise PlanError.

    It has at most `config.clusters` clusters, if that says so.
    """
    if not swarm.nodes:
        raise explain_shortage(profile, swarm, config)
    nodes = NodeTable.of(swarm, config)
    short = _short_profile(profile, nodes, config)
    several = LineCost(short, config, is_averaged=True)
    found = _Found() if config.clusters == 1 else _search_several(several, nodes, seed, budget)
    if len(found.orders) < _MANY_CLUSTERS:  # those who are too slow to average with others may be fast alone
        line = LineCost(short, config, is_averaged=False)
        alone = _search_one(line, nodes, seed, budget, budget.quick_clusters // 4)
        is_final = len(nodes) <= budget.complete_nodes  # of so few, a short search has seen everything
        if not is_final and (alone.rate > _PROMISING * found.rate or not found.orders):
            alone = _search_one(line, nodes, seed, budget, _fit_budget(line, nodes, budget))
        found = max(found, alone, key=lambda each: each.rate)
    orders = found.orders or holding_order(profile, swarm, config)
    if not orders:
        raise explain_shortage(profile, swarm, config)
    clusters = cut_clusters(profile, swarm, config, orders, is_averaged=len(orders) > 1)
    assert len(clusters) == len(orders), "a cluster that fits the short line fits the long one"
    return assemble_plan(clusters, profile, swarm, config, seed, plan_id)


def form_cluster(
    profile: ModelProfile,
    swarm: Swarm,
    config: PlanConfig,
    seed: int,
    is_averaged: bool,
    budget: SearchBudget = SEARCH_BUDGET,
) -> Cluster | None:
    """Return the fastest cluster the search finds among these nodes, with room for averaging if asked."""
    if not swarm.nodes:
        return None
    nodes = NodeTable.of(swarm, config)
    line = LineCost(_short_profile(profile, nodes, config), config, is_averaged)
    orders = _search_one(line, nodes, seed, budget, budget.quick_clusters).orders
    return next(iter(cut_clusters(profile, swarm, config, orders, is_averaged)), None) if orders else None


def cut_clusters(
    profile: ModelProfile, swarm: Swarm, config: PlanConfig, orders: tuple[NodeOrder, ...], is_averaged: bool
) -> tuple[Cluster, ...]:
    """Cut each cluster on the full line and leave out those that cannot hold it.

    Orders name nodes by place, from the end of the line to its front.
    """
    cuts = choose_cuts(profile, FINE_POSITIONS)
    nodes = NodeTable.of(swarm, config)
    splitter = Splitter(LineCost(coarsen(profile, cuts), config, is_averaged), nodes, keep=False)
    line = LineCost(profile, config, is_averaged)
    per_chunk = max(1, int(_TABLE_BYTES / (4 * len(cuts) ** 2 * max(map(len, orders)))))
    clusters: list[Cluster] = []
    for first in range(0, len(orders), per_chunk):
        chunk = orders[first : first + per_chunk]
        splits = splitter.solve(chunk)
        fitting = np.flatnonzero(np.isfinite(splits.seconds))
        places = np.array(cuts, np.int64)[splits.cuts[fitting]]
        clusters += build_clusters(line, nodes, swarm, [chunk[k] for k in fitting], places)
    return tuple(clusters)


def _short_profile(profile: ModelProfile, nodes: NodeTable, config: PlanConfig) -> ModelProfile:
    """Return the line the search works on: a few positions for each stage a typical cluster will have."""
    stages = typical_stages(LineCost(profile, config, is_averaged=True), nodes)
    return shorten_line(profile, min(_MOST_POSITIONS, 3 * stages))


def _search_several(line: LineCost, nodes: NodeTable, seed: int, budget: SearchBudget) -> _Found:
    """Search for clusters that average; again for balanced ones if too much of a round would pass the hub."""
    found = _worthwhile(line, nodes, _group(line, nodes, seed, budget))
    if not found.is_cut_short:
        return found
    balanced = _worthwhile(line, nodes, _group(line, nodes, seed, budget, is_balanced=True))
    return max(found, balanced, key=lambda each: each.rate)


def _group(
    line: LineCost, nodes: NodeTable, seed: int, budget: SearchBudget, is_balanced: bool = False
) -> list[NodeOrder]:
    """Search neighbourhood by neighbourhood; the first one decides how slow a cluster may be.

    Long clusters need many nodes with links alike, and one region has few of them: then neighbourhoods are
    those of equally fast links, and a sample of all nodes decides.
    """
    orders: list[NodeOrder] = []
    ceilings: list[int] = []
    is_long = typical_stages(line, nodes) >= _LONG
    parts = _neighbourhoods(line, nodes, is_long)
    if is_long and len(parts) > 1:
        sample = np.arange(0, len(nodes), len(parts))
        rng = np.random.default_rng([seed, 1 << 21])
        search = Search(line, nodes.take(sample), rng, is_balanced=is_balanced)
        first = search.run(0, search.seeds.promising_ceilings())
        ceilings = [first.ceiling] if first is not None else []
    asked, upload = 0.0, line.config.hub_bytes_per_second
    for number, members in enumerate(parts):
        rng = np.random.default_rng([seed, number])
        most = line.config.clusters or None
        left = max(0.0, 1.0 - asked / upload) if upload else 1.0  # of the hub's line
        share = left if is_long else left / (len(parts) - number)
        search = Search(line, nodes.take(members), rng, most, share, is_balanced, budget.complete_nodes)
        tried = search.seeds.all_ceilings() if most else search.seeds.promising_ceilings()
        genome = search.run(_fit_budget(line, nodes, budget), ceilings or tried)
        if genome is not None:
            asked += search.asked_by(genome)
            ceilings = ceilings or [genome.ceiling]
            orders += [tuple(int(members[node]) for node in order) for order in genome.clusters]
    return orders


def _worthwhile(line: LineCost, nodes: NodeTable, orders: list[NodeOrder]) -> _Found:
    """Leave out the clusters that hold the others back more than they add, or make rounds too long."""
    if not orders:
        return _Found()
    splitter = Splitter(line, nodes, keep=False)
    splits = _solve_in_parts(splitter, orders)
    limit = line.config.clusters
    slow = np.sort(splits.seconds)[limit - 1 :] if limit else splits.seconds[:0]
    periods = np.where(splits.seconds > slow[0], np.inf, splits.seconds) if len(slow) else splits.seconds
    hub = HubLine.of(line)
    _, is_kept = choose_clusters(periods, splits.hub_bytes, line.config.speed_ratio, hub)
    places = np.flatnonzero(is_kept)[: limit or None]
    kept, splits = _shorten_rounds(splitter, [orders[k] for k in places], splits.take(places))
    rate, is_kept = choose_clusters(splits.seconds, splits.hub_bytes, line.config.speed_ratio, hub)
    rate *= 1.0 - line.config.averaging_share if line.config.averaging is Averaging.BLOCKING else 1.0
    chosen = tuple(order for order, keep in zip(kept, is_kept, strict=True) if keep)
    return _Found(chosen, rate, len(kept) < len(places))


def _solve_in_parts(splitter: Splitter, orders: list[NodeOrder]) -> Splits:
    return Splits.join([splitter.solve(orders[k : k + 64]) for k in range(0, len(orders), 64)])


def _shorten_rounds(
    splitter: Splitter, orders: list[NodeOrder], splits: Splits
) -> tuple[list[NodeOrder], Splits]:
    """Let a round pass the hub in time: other orders of nodes, or fewer clusters, whatever costs less."""
    rounds, hidden = RelayedRounds(splitter.line), ~splitter.nodes.reachable
    sides = rounds.sides(orders, splits.cuts, hidden)
    if not rounds.is_too_long(sides):
        return orders, splits
    rng = np.random.default_rng(len(orders))
    others = [other for order in orders for other in other_orders(order, _OTHER_ORDERS, rng)]
    other_splits = _solve_in_parts(splitter, others)
    shape = (len(orders), _OTHER_ORDERS)
    other_sides = rounds.sides(others, other_splits.cuts, hidden).reshape(*shape, -1)
    rates = 1.0 / other_splits.seconds  # zero where the order does not fit
    rates[other_splits.hub_bytes > _AS_MUCH * splits.hub_bytes.repeat(_OTHER_ORDERS)] = 0.0
    kept, chosen = rounds.shorten(sides, 1.0 / splits.seconds, other_sides, rates.reshape(shape))
    orders, splits = [orders[k] for k in kept], splits.take(kept)
    for place in np.flatnonzero(chosen >= 0):
        number = int(kept[place] * _OTHER_ORDERS + chosen[place])
        orders[place] = others[number]
        splits.put(int(place), other_splits, number)
    return orders, splits


def _search_one(
    line: LineCost, nodes: NodeTable, seed: int, budget: SearchBudget, num_clusters: int
) -> _Found:
    members = np.argsort(-nodes.memory, kind="stable")[:_MOST_NODES]
    search = Search(
        line,
        nodes.take(members),
        np.random.default_rng([seed, 1 << 20]),
        1,
        complete_nodes=budget.complete_nodes,
    )
    genome = search.run(num_clusters, search.seeds.all_ceilings())
    if genome is None:
        return _Found()
    order = tuple(int(members[node]) for node in genome.clusters[0])
    return _Found((order,), genome.rate)


def _fit_budget(line: LineCost, nodes: NodeTable, budget: SearchBudget) -> int:
    """Return how many clusters to evaluate: fewer where each one takes longer."""
    effort = typical_stages(line, nodes) * line.num_positions**2
    # Greedy coverings of a large swarm are hardly improved upon.
    most = budget.clusters // 3 if len(nodes) > _MOST_NODES // 2 else 2 * budget.clusters
    return max(budget.clusters // 4, min(most, most * 8 * 32**2 // effort))


def _neighbourhoods(line: LineCost, nodes: NodeTable, by_speed: bool) -> list[Ints]:
    """Divide the nodes, by region or by the speed of their links, into groups to be searched at once."""
    stages = min(line.config.max_stages, line.num_positions)
    per_node = 4.0 * stages * (line.num_positions + 1) ** 2 / 8
    most = max(64, min((1 + by_speed) * _MOST_NODES, int(_TABLE_BYTES / per_node)))
    speed = -nodes.both_ways
    order = np.argsort(speed if by_speed else nodes.region, kind="stable")
    return [np.sort(part) for part in np.array_split(order, -(-len(nodes) // most))]
