"""The genetic algorithm that groups nodes into clusters.

A genome is a grouping: disjoint clusters, each an order of nodes, and the period no cluster may exceed.
Greedy coverings seed the population; children inherit whole clusters from two parents and cover the rest
anew; all genomes then try local moves at once, because thousands of clusters are split in one batch. The
budget is counted in clusters evaluated, never in seconds, so the same seed gives the same answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ravnest.plan.cost import Floats, Ints, LineCost, NodeTable
from ravnest.plan.moves import Proposal, propose
from ravnest.plan.seeds import Covering, NodeOrder, Seeds, Taste
from ravnest.plan.split import Splitter

_POPULATION = (2, 8)  # fewest, most genomes: a large grouping has its variety inside
_VARIANTS = 4  # of each genome in a generation
_ROUNDS = 8  # of local moves between two generations
_BETTER = 1e-3  # a generation that gains less found nothing, but in the smallest swarms
_SMALLEST = 16  # nodes
_GENERATIONS = (24, 48)  # fewest for large swarms, most for small ones, where they are cheap


@dataclass(slots=True)
class Genome:
    """One grouping of the nodes; its ceiling is a level of the seeds, its rate in batches per second."""

    clusters: list[NodeOrder]
    ceiling: int
    rate: float = 0.0


def best_rate(periods: Floats, speed_ratio: float) -> tuple[float, float]:
    """Return the most batches per second, and the slowest period worth keeping for it.

    A cluster more than `speed_ratio` faster than the slowest one is held back to that ratio, so leaving out
    a slow cluster can pay.
    """
    periods = np.sort(periods[np.isfinite(periods)])
    if not len(periods):
        return 0.0, 0.0
    rates = np.concatenate([[0.0], np.cumsum(1.0 / periods)])
    num_held = np.searchsorted(periods, periods / speed_ratio)
    totals = num_held * speed_ratio / periods + rates[1:] - rates[num_held]
    best = int(totals.argmax())
    return float(totals[best]), float(periods[best])


class Search:
    """Searches groupings of nodes for the most batches per second; `most_clusters` limits their number."""

    def __init__(
        self, line: LineCost, nodes: NodeTable, rng: np.random.Generator, most_clusters: int | None = None
    ) -> None:
        self.splitter = Splitter(line, nodes)
        self.seeds = Seeds(self.splitter)
        self.num_evaluated = 0
        self._rng = rng
        self._most = len(nodes) if most_clusters is None else most_clusters
        self._num_generations = int(np.clip(1500 // len(nodes), *_GENERATIONS))
        self._least_gain = _BETTER
        if len(nodes) <= _SMALLEST:  # each cluster is cheap there, and there are few of them
            self._num_generations, self._least_gain = 2 * _GENERATIONS[1], 1e-9
        self._num_genomes = int(np.clip(1000 // len(nodes), *_POPULATION))
        self._ratio = line.config.speed_ratio
        self._known: dict[NodeOrder, tuple[float, int]] = {}

    def run(self, budget: int, ceilings: Sequence[int]) -> Genome | None:
        """Return the best genome found after evaluating about `budget` clusters, if any cluster works."""
        population = self._seed(ceilings)
        stop = self.num_evaluated + budget
        stale = 0
        for _ in range(
            min(self._num_generations, max(8, budget // 50))
        ):  # a small budget is for a first look
            if not population or self.num_evaluated > stop or stale >= self._num_generations // 4:
                break
            best, known = population[0].rate, self.num_evaluated
            for _ in range(_ROUNDS):
                self._improve(population)
            variants = [each for genome in population for each in self._recreate(genome)]
            population = self._select([*population, *variants, self._cross(population)])
            is_exhausted = self.num_evaluated == known  # tiny swarms: nothing new is left to try
            stale = (
                0
                if population[0].rate > best * (1.0 + self._least_gain)
                else stale + (10 if is_exhausted else 1)
            )
        return self._trim(population[0]) if population else None

    def seconds(self, orders: Sequence[NodeOrder]) -> list[float]:
        """Return the seconds per batch of each cluster."""
        return [period for period, _ in self._evaluate(orders)]

    def _evaluate(self, orders: Sequence[NodeOrder]) -> list[tuple[float, int]]:
        unknown = [order for order in dict.fromkeys(orders) if order not in self._known]
        if unknown:
            splits = self.splitter.solve(unknown)
            self.num_evaluated += len(unknown)
            answers = zip(splits.seconds.tolist(), splits.slowest.tolist(), strict=True)
            self._known.update(zip(unknown, answers, strict=True))
        return [self._known[order] for order in orders]

    def _seed(self, ceilings: Sequence[int]) -> list[Genome]:
        everyone = np.arange(len(self.splitter.nodes))
        wishes = [(ceiling, Taste(hidden_first)) for ceiling in ceilings for hidden_first in (False, True)]
        made = self._finish([self._cover(everyone, ceiling, taste) for ceiling, taste in wishes])
        return self._select([Genome(made[k], ceiling) for k, (ceiling, _) in enumerate(wishes)])

    def _cover(self, free: Ints, ceiling: int, taste: Taste, fastest: float = 0.0) -> Covering:
        """Cover free nodes at the levels of this ceiling that are not faster than `fastest`."""
        levels = self.seeds.levels(ceiling)
        if fastest > 0.0:
            levels = range(max(levels.start, self.seeds.level(fastest)), levels.stop)
        return self.seeds.cover(free, levels, self._rng, taste)

    def _taste(self) -> Taste:
        return Taste(bool(self._rng.random() < 0.5), jitter=float(self._rng.choice([0.0, 0.05, 0.1, 0.2])))

    def _finish(self, coverings: Sequence[Covering]) -> list[list[NodeOrder]]:
        """Run coverings to their end, side by side: one large batch is much cheaper than many small ones."""
        made: list[list[NodeOrder]] = [[] for _ in coverings]
        answers: dict[int, list[float]] = {k: [] for k in range(len(coverings))}
        while answers:
            asked: dict[int, list[NodeOrder]] = {}
            for k, answer in answers.items():
                try:
                    asked[k] = coverings[k].send(answer) if answer else next(coverings[k])
                except StopIteration as finished:
                    made[k] = finished.value
            self._evaluate([order for orders in asked.values() for order in orders])
            answers = {k: self.seconds(orders) for k, orders in asked.items()}
        return made

    def _select(self, genomes: list[Genome]) -> list[Genome]:
        """Keep the best genomes, one per rate (equal rates are almost surely the same grouping)."""
        distinct: dict[float, Genome] = {}
        for genome in genomes:
            periods = np.array(self.seconds(genome.clusters))
            if len(periods) > self._most:
                fastest = np.argsort(periods, kind="stable")[: self._most]
                genome.clusters = [genome.clusters[int(place)] for place in fastest]
                periods = periods[fastest]
            genome.rate, _ = best_rate(periods, self._ratio)
            if genome.rate > 0.0:
                distinct.setdefault(genome.rate, genome)
        return sorted(distinct.values(), key=lambda genome: -genome.rate)[: self._num_genomes]

    def _trim(self, genome: Genome) -> Genome:
        """Leave out the clusters that are too slow to be worth it."""
        periods = self.seconds(genome.clusters)
        rate, slowest = best_rate(np.array(periods), self._ratio)
        kept = [order for order, period in zip(genome.clusters, periods, strict=True) if period <= slowest]
        return Genome(kept, genome.ceiling, rate)

    def _recreate(self, genome: Genome) -> list[Genome]:
        """Return variants of a genome: clusters of similar speed dissolved, their nodes covered anew."""
        periods = np.array(self.seconds(genome.clusters))
        finite = periods[np.isfinite(periods)]
        kept, ceilings, coverings = [], [], []
        for _ in range(_VARIANTS):
            middle, width = self._rng.choice(finite), self._rng.choice([1.1, 1.3, 1.8])
            falls = (periods >= middle / width) & (periods <= middle * width)
            falls &= self._rng.random(len(periods)) < self._rng.choice([0.3, 0.6, 0.9])
            clusters = [order for order, fall in zip(genome.clusters, falls, strict=True) if not fall]
            kept.append(clusters)
            fastest = float(middle / width) / 1.2  # the nodes may do a little better together
            ceilings.append(self._near(genome.ceiling))
            coverings.append(self._cover(self._free(clusters), ceilings[-1], self._taste(), fastest))
        made = self._finish(coverings)
        return [Genome(kept[k] + made[k], ceilings[k]) for k in range(_VARIANTS)]

    def _near(self, ceiling: int) -> int:
        """Shift a ceiling now and then; far only where coverings are cheap."""
        return ceiling + int(
            self._rng.choice([0, 0, -1, 1] if self._num_genomes <= 2 else [0, 0, 0, -1, 1, 4])
        )

    def _free(self, clusters: Sequence[NodeOrder]) -> Ints:
        is_free = np.ones(len(self.splitter.nodes), bool)
        is_free[[node for order in clusters for node in order]] = False
        return np.flatnonzero(is_free)

    def _cross(self, population: list[Genome]) -> Genome:
        """Inherit whole clusters from two parents; cover the nodes that are left anew."""
        first, second = (self._tournament(population) for _ in range(2))
        taken: set[int] = set()
        clusters = []
        heritage = [order for order in first.clusters if self._rng.random() < 0.5] + second.clusters
        for order in heritage:
            if taken.isdisjoint(order):
                clusters.append(order)
                taken.update(order)
        ceiling = self._near(first.ceiling)
        (made,) = self._finish([self._cover(self._free(clusters), ceiling, self._taste())])
        return Genome(clusters + made, ceiling)

    def _tournament(self, population: list[Genome]) -> Genome:
        rivals = self._rng.integers(len(population), size=2)
        return population[int(rivals.min())]

    def _improve(self, genomes: Sequence[Genome]) -> None:
        """One round of local moves in all genomes, judged in one batch."""
        asked: list[tuple[Genome, list[list[Proposal]]]] = []
        for genome in genomes:
            slowest = [stage for _, stage in self._evaluate(genome.clusters)]
            free = self._free(genome.clusters)
            spares = free[self.seeds.is_useful(genome.ceiling)[free]].tolist()
            moves = propose(genome.clusters, slowest, spares, self.seeds.max_stages, self._rng)
            asked.append((genome, moves))
        self._evaluate(
            [order for _, moves in asked for choices in moves for move in choices for order in move.orders]
        )
        for genome, moves in asked:
            for choices in moves:
                self._accept_best(genome, choices)

    def _accept_best(self, genome: Genome, choices: Sequence[Proposal]) -> None:
        best, gain, ceiling = None, 0.0, self.seeds.period(genome.ceiling)
        for move in choices:
            num_more = len(move.orders) - len(move.places)
            if num_more > 0 and len(genome.clusters) + num_more > self._most:
                continue
            old = [genome.clusters[place] for place in move.places]
            change = self._worth(move.orders, ceiling) - self._worth(old, ceiling)
            if change > gain:
                best, gain = move, change
        if best is not None:
            for place, order in zip(best.places, best.orders, strict=False):
                genome.clusters[place] = order
            genome.clusters += best.orders[len(best.places) :]

    def _worth(self, orders: Sequence[NodeOrder], ceiling: float) -> float:
        """Batches per second under the ceiling; above it a steep slope leads back, not a cliff."""
        worth = 0.0
        for order in orders:
            period = self._known[order][0]
            if self._most == 1:
                worth += 1.0 / period
            elif period <= ceiling:
                worth += min(1.0 / period, self._ratio / ceiling)
            else:
                worth += ceiling**3 / period**4
            worth -= 1e-9 * len(order) / ceiling  # of equals, the one that leaves more spares
        return worth
