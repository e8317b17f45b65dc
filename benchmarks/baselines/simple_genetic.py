"""The genetic algorithm of the reference implementation, written from its description, as a peer.

One gene per node: the number of its cluster (at most five). Fitness looks at memory and bandwidth only: how
much memory the clusters lack, and how unequal their sums of memory over bandwidth are. Inside a cluster every
node gets an equal number of positions, in the order of the list. Compute speed plays no part.
"""

from dataclasses import dataclass

import numpy as np

from ravnest.config import PlanConfig
from ravnest.plan.cost import NodeTable, Rows, timing
from ravnest.plan.line import Floats, LineCost
from ravnest.plan.types import ModelProfile

_MOST_CLUSTERS = 5
_POPULATION = 100
_GENERATIONS = 100
_CROSSOVER, _MUTATION = 0.5, 0.05


@dataclass(frozen=True)
class SimplePlan:
    """Node places by cluster, and the batches per second they make under our cost model."""

    clusters: tuple[tuple[int, ...], ...]
    rate: float


def form(profile: ModelProfile, nodes: NodeTable, config: PlanConfig, seed: int) -> SimplePlan:
    """Return the best of the cluster counts the memory allows, each evolved on its own."""
    whole = LineCost(profile, config, is_averaged=True)
    need = float(whole.memory(*_scalars(0, profile.num_positions, 1, 0), recompute=False))
    most = int(np.clip(nodes.memory.sum() // need, 1, _MOST_CLUSTERS))
    plans = []
    for count in range(1, most + 1):
        genes = _evolve(nodes, need, count, np.random.default_rng([seed, count]))
        clusters = tuple(tuple(np.flatnonzero(genes == k).tolist()) for k in range(count))
        plans.append(SimplePlan(clusters, _rate(profile, nodes, config, clusters)))
    return max(plans, key=lambda plan: plan.rate)


def _evolve(nodes: NodeTable, need: float, count: int, rng: np.random.Generator) -> np.ndarray:
    population = rng.integers(count, size=(_POPULATION, len(nodes)))
    for _ in range(_GENERATIONS):
        cost = _cost(population, nodes, need, count)
        population = population[np.argsort(cost, kind="stable")]
        parents = population[: _POPULATION // 2]
        pairs = rng.integers(len(parents), size=(2, _POPULATION - len(parents)))
        mask = rng.random((pairs.shape[1], len(nodes))) < _CROSSOVER
        children = np.where(mask, parents[pairs[0]], parents[pairs[1]])
        mutates = rng.random(children.shape) < _MUTATION
        children = np.where(mutates, rng.integers(count, size=children.shape), children)
        population = np.concatenate([parents, children])
    return population[int(_cost(population, nodes, need, count).argmin())]


def _cost(population: np.ndarray, nodes: NodeTable, need: float, count: int) -> Floats:
    member = population[:, :, None] == np.arange(count)
    memory = (member * nodes.memory[None, :, None]).sum(axis=1)
    load = (member * (nodes.memory / np.minimum(nodes.upload, nodes.download))[None, :, None]).sum(axis=1)
    shortfall = np.maximum(0.0, need - memory).sum(axis=1) / need
    spread = load.std(axis=1) / load.mean(axis=1)
    return shortfall + spread


def _rate(
    profile: ModelProfile, nodes: NodeTable, config: PlanConfig, clusters: tuple[tuple[int, ...], ...]
) -> float:
    """Return batches per second with equal cuts; a cluster with a node out of memory makes none."""
    line = LineCost(profile, config, is_averaged=len(clusters) > 1)
    periods = []
    for cluster in clusters:
        order = np.array(cluster[: profile.num_positions][::-1], np.int64)
        if not len(order):
            continue
        cuts = np.linspace(profile.num_positions, 0, len(order) + 1).round().astype(np.int64)
        times = timing(line, nodes, Rows(order[None], np.array([len(order)]), cuts[None]))
        if (times.memory[0] <= nodes.memory[order]).all():
            periods.append(float(times.seconds[0]))
    if not periods:
        return 0.0
    slowest = max(periods)
    return float(sum(min(1.0 / period, config.speed_ratio / slowest) for period in periods))


def _scalars(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array(value) for value in values)
