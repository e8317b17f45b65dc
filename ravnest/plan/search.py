"""The genetic algorithm that groups nodes into clusters.

A genome is a grouping: disjoint clusters, each an order of nodes, and the period no cluster may exceed.
Greedy coverings seed the population; children inherit whole clusters from two parents and cover the rest
anew; all genomes then try local moves at once, because thousands of clusters are split in one batch. The
budget is counted in clusters evaluated, never in seconds, so the same seed gives the same answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ravnest.config import SEARCH_BUDGET
from ravnest.plan.cost import NodeTable
from ravnest.plan.hub_line import HubLine, choose_clusters, relayed_places
from ravnest.plan.line import Bools, Ints, LineCost
from ravnest.plan.moves import Proposal, neighbours, pair_neighbours, propose, second_neighbours
from ravnest.plan.seeds import Covering, Seeds, Taste
from ravnest.plan.small_swarms import Candidates, best_packing, candidate_orders
from ravnest.plan.split import NodeOrder, Splitter

_POPULATION = (2, 8)  # fewest, most genomes: a large grouping has its variety inside
_VARIANTS = 4  # of each genome in a generation
_ROUNDS = 8  # of local moves between two generations
_BETTER = 1e-3  # a generation that gains less found nothing, but in the smallest swarms
_SMALLEST = 16  # nodes
_FEW = 128  # nodes: so few that all single changes of the best grouping are tried in the end
_POLISH = 4_000  # clusters evaluated for that, at most
_BUSY = 0.9  # of the hub's line: from here on, moves spare it
_UNBALANCED = 0.25  # of its worth, for a cluster with more hidden nodes than others
_GENERATIONS = (24, 48)  # fewest for large swarms, most for small ones, where they are cheap


@dataclass(slots=True)
class Genome:
    """One grouping of the nodes; its ceiling is a level of the seeds, its rate in batches per second."""

    clusters: list[NodeOrder]
    ceiling: int
    rate: float = 0.0


class _Answer(NamedTuple):
    """What is known of a cluster; a tuple, because there are many."""

    period: float
    slowest: int  # depth of the stage that limits it
    hub_bytes: float  # of a batch


class Search:
    """Searches groupings of nodes for the most batches per second; `most_clusters` limits their number.

    The clusters may use `hub_share` of the hub's line. Balanced ones have no more hidden nodes than others.
    Of up to `complete_nodes` nodes, all subsets are tried.
    """

    def __init__(
        self,
        line: LineCost,
        nodes: NodeTable,
        rng: np.random.Generator,
        most_clusters: int | None = None,
        hub_share: float = 1.0,
        is_balanced: bool = False,
        complete_nodes: int = SEARCH_BUDGET.complete_nodes,
    ) -> None:
        self.splitter = Splitter(line, nodes)
        self._is_complete = len(nodes) <= complete_nodes
        self.seeds = Seeds(self.splitter, HubLine.of(line, hub_share), most_clusters == 1, is_balanced)
        self._is_balanced = is_balanced
        self._hub = self.seeds.hub
        self.num_evaluated = 0
        self._rng = rng
        self._most = len(nodes) if most_clusters is None else most_clusters
        self._num_generations = int(np.clip(1500 // len(nodes), *_GENERATIONS))
        self._least_gain = _BETTER
        if len(nodes) <= _SMALLEST:  # each cluster is cheap there, and there are few of them
            self._num_generations, self._least_gain = 2 * _GENERATIONS[1], 1e-9
        self._num_genomes = int(np.clip(1000 // len(nodes), *_POPULATION))
        self._ratio = line.config.speed_ratio
        self._known: dict[NodeOrder, _Answer] = {}

    def run(self, budget: int, ceilings: Sequence[int]) -> Genome | None:
        """Return the best genome found after evaluating about `budget` clusters, if any cluster works."""
        if self._is_complete and budget > 0:
            return self._try_subsets(budget)
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
            population = self._select([*population, *self._breed(population)])
            is_exhausted = self.num_evaluated == known  # tiny swarms: nothing new is left to try
            stale = (
                0
                if population[0].rate > best * (1.0 + self._least_gain)
                else stale + (10 if is_exhausted else 1)
            )
        if not population:
            return None
        if len(self.splitter.nodes) <= _FEW:
            self._polish(population[0], min(_POLISH, budget))
        return self._trim(population[0])

    def _try_subsets(self, budget: int) -> Genome | None:
        """Return the best grouping of a few nodes: of all their subsets, improved where latency matters."""
        orders = candidate_orders(self.splitter, self.seeds.max_stages)
        known = self._evaluate(orders)
        periods, hub_bytes = (np.array([each[k] for each in known], float) for k in (0, 2))
        packed = best_packing(Candidates(orders, periods, hub_bytes), self._hub, self._ratio, self._most)
        if not packed:
            return None
        slowest = max(self.seconds(packed))
        first = self._trim(Genome(packed, self.seeds.level(slowest) + 1))
        better = Genome(list(first.clusters), first.ceiling)
        self._polish(better, min(_POLISH, budget))
        return max(first, self._trim(better), key=lambda genome: genome.rate)

    def seconds(self, orders: Sequence[NodeOrder]) -> list[float]:
        """Return the seconds per batch of each cluster."""
        return [answer.period for answer in self._evaluate(orders)]

    def asked_by(self, genome: Genome) -> float:
        """Return the bytes per second that the clusters of a genome ask of the hub's line."""
        known = self._evaluate(genome.clusters)
        slowest = max(each.period for each in known)
        return sum(each.hub_bytes * min(1.0 / each.period, self._ratio / slowest) for each in known)

    def _evaluate(self, orders: Sequence[NodeOrder]) -> "list[_Answer]":
        unknown = [order for order in dict.fromkeys(orders) if order not in self._known]
        if unknown:
            splits = self.splitter.solve(unknown)
            self.num_evaluated += len(unknown)
            columns = (splits.seconds.tolist(), splits.slowest.tolist(), splits.hub_bytes.tolist())
            self._known.update(zip(unknown, map(_Answer, *columns), strict=True))
        return [self._known[order] for order in orders]

    def _seed(self, ceilings: Sequence[int]) -> list[Genome]:
        everyone = np.arange(len(self.splitter.nodes))
        wishes = [(ceiling, Taste(hidden_first)) for ceiling in ceilings for hidden_first in (False, True)]
        made = self._finish([self._cover(everyone, ceiling, taste) for ceiling, taste in wishes])
        return self._select([Genome(made[k], ceiling) for k, (ceiling, _) in enumerate(wishes)])

    def _cover(
        self, free: Ints, ceiling: int, taste: Taste, beside: Sequence[NodeOrder] = (), fastest: float = 0.0
    ) -> Covering:
        """Cover free nodes, beside clusters, at the levels of this ceiling not faster than `fastest`."""
        asked = sum(each.hub_bytes / each.period for each in self._evaluate(beside))
        levels = self.seeds.levels(ceiling)
        if fastest > 0.0:
            levels = range(max(levels.start, self.seeds.level(fastest)), levels.stop)
        return self.seeds.cover(free, levels, self._rng, taste, asked)

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
            genome.rate, _ = self._choose(genome.clusters)
            if genome.rate > 0.0:
                distinct.setdefault(genome.rate, genome)
        return sorted(distinct.values(), key=lambda genome: -genome.rate)[: self._num_genomes]

    def _trim(self, genome: Genome) -> Genome:
        """Leave out the clusters that are too slow, or ask too much of the hub, to be worth it."""
        rate, is_kept = self._choose(genome.clusters)
        kept = [order for order, keep in zip(genome.clusters, is_kept, strict=True) if keep]
        return Genome(kept, genome.ceiling, rate)

    def _choose(self, clusters: Sequence[NodeOrder]) -> tuple[float, Bools]:
        """Return the batches per second of the clusters that are worth it, and which those are."""
        known = self._evaluate(clusters)
        periods, hub_bytes = (np.array([each[k] for each in known], float) for k in (0, 2))
        return choose_clusters(periods, hub_bytes, self._ratio, self._hub)

    def _breed(self, population: list[Genome]) -> list[Genome]:
        """Return variants of each genome and a child of two, their coverings worked out side by side."""
        drafts = [draft for genome in population for draft in self._recreate(genome)]
        drafts.append(self._cross(population))
        made = self._finish([draft.covering for draft in drafts])
        return [Genome(draft.kept + more, draft.ceiling) for draft, more in zip(drafts, made, strict=True)]

    def _recreate(self, genome: Genome) -> "Iterator[_Draft]":
        """Dissolve clusters of similar speed and cover their nodes anew, in several ways."""
        periods = np.array(self.seconds(genome.clusters))
        finite = periods[np.isfinite(periods)]
        for _ in range(_VARIANTS):
            middle, width = self._rng.choice(finite), self._rng.choice([1.1, 1.3, 1.8])
            falls = (periods >= middle / width) & (periods <= middle * width)
            falls &= self._rng.random(len(periods)) < self._rng.choice([0.3, 0.6, 0.9])
            kept = [order for order, fall in zip(genome.clusters, falls, strict=True) if not fall]
            fastest = float(middle / width) / 1.2  # the nodes may do a little better together
            yield self._draft(kept, self._near(genome.ceiling), fastest)

    def _draft(self, kept: list[NodeOrder], ceiling: int, fastest: float = 0.0) -> "_Draft":
        return _Draft(kept, ceiling, self._cover(self._free(kept), ceiling, self._taste(), kept, fastest))

    def _near(self, ceiling: int) -> int:
        """Shift a ceiling now and then; far only where coverings are cheap."""
        return ceiling + int(
            self._rng.choice([0, 0, -1, 1] if self._num_genomes <= 2 else [0, 0, 0, -1, 1, 4])
        )

    def _free(self, clusters: Sequence[NodeOrder]) -> Ints:
        is_free = np.ones(len(self.splitter.nodes), bool)
        is_free[[node for order in clusters for node in order]] = False
        return np.flatnonzero(is_free)

    def _cross(self, population: list[Genome]) -> "_Draft":
        """Inherit whole clusters from two parents; cover the nodes that are left anew."""
        first, second = (self._tournament(population) for _ in range(2))
        taken: set[int] = set()
        clusters = []
        heritage = [order for order in first.clusters if self._rng.random() < 0.5] + second.clusters
        for order in heritage:
            if taken.isdisjoint(order):
                clusters.append(order)
                taken.update(order)
        return self._draft(clusters, self._near(first.ceiling))

    def _tournament(self, population: list[Genome]) -> Genome:
        rivals = self._rng.integers(len(population), size=2)
        return population[int(rivals.min())]

    def _improve(self, genomes: Sequence[Genome]) -> None:
        """One round of local moves in all genomes, judged in one batch."""
        asked: list[tuple[Genome, list[list[Proposal]]]] = []
        for genome in genomes:
            asked.append((genome, self._propose(genome, self._spares(genome))))
        self._evaluate(
            [order for _, moves in asked for choices in moves for move in choices for order in move.orders]
        )
        for genome, moves in asked:
            total = self._worth(genome.clusters, self.seeds.period(genome.ceiling))
            for choices in moves:
                total = self._accept_best(genome, choices, total)

    def _polish(self, genome: Genome, budget: int) -> None:
        """Try all single changes of each cluster, then pairs of clusters, then some double changes.

        Whatever gains begins this anew, until nothing does or the budget is spent.
        """
        stop, is_better = self.num_evaluated + budget, True
        while is_better and self.num_evaluated < stop:
            is_better = any(
                self.num_evaluated < stop and self._try_all(genome, moves)
                for moves in self._all_moves(genome, stop)
            )

    def _try_all(self, genome: Genome, moves: Sequence[Proposal]) -> bool:
        """Accept the best of these moves, if it gains."""
        before = list(genome.clusters)
        self._evaluate([order for move in moves for order in move.orders])
        ceiling = self.seeds.period(genome.ceiling)
        self._accept_best(genome, moves, self._worth(genome.clusters, ceiling))
        return genome.clusters != before

    def _all_moves(self, genome: Genome, stop: int) -> Iterator[list[Proposal]]:
        clusters, spares, most = genome.clusters, self._spares(genome), self.seeds.max_stages
        for place, order in enumerate(clusters):
            yield neighbours(order, place, spares, most)
        for one, other in combinations(range(len(clusters)), 2):
            yield pair_neighbours(clusters, one, other, most)
        for place, order in enumerate(clusters):
            left = max(0, stop - self.num_evaluated) // len(clusters)
            yield second_neighbours(order, place, spares, most, left, self._rng)

    def _spares(self, genome: Genome) -> list[int]:
        """Return the nodes that no cluster has and that could host something in time."""
        free = self._free(genome.clusters)
        spares: list[int] = free[self.seeds.is_useful(genome.ceiling)[free]].tolist()
        return spares

    def _propose(self, genome: Genome, spares: list[int]) -> list[list[Proposal]]:
        slowest = [answer.slowest for answer in self._evaluate(genome.clusters)]
        hidden = None
        worth = self._worth(genome.clusters, self.seeds.period(genome.ceiling))
        if self._hub.busy_share(worth.asked) > _BUSY:  # relays are what limits them
            hidden = self.seeds.hidden
            for place, order in enumerate(genome.clusters):
                if relayed := relayed_places(order, hidden):
                    slowest[place] = relayed[int(self._rng.integers(len(relayed)))]
        return propose(genome.clusters, slowest, spares, self.seeds.max_stages, self._rng, hidden)

    def _accept_best(self, genome: Genome, choices: Sequence[Proposal], total: "_Worth") -> "_Worth":
        best, best_total, ceiling = None, total, self.seeds.period(genome.ceiling)
        gain = 0.0
        for move in choices:
            num_more = len(move.orders) - len(move.places)
            if num_more > 0 and len(genome.clusters) + num_more > self._most:
                continue
            old = self._worth([genome.clusters[place] for place in move.places], ceiling)
            new = self._worth(move.orders, ceiling)
            change, then = new.rate - old.rate, total.changed(old, new)
            if max(total.asked, then.asked) > self._hub.upload:
                change = self._hub.hold_back(*then) - self._hub.hold_back(*total)
            if change > gain:
                best, best_total, gain = move, then, change
        if best is not None:
            for place, order in zip(best.places, best.orders, strict=False):
                genome.clusters[place] = order
            genome.clusters += best.orders[len(best.places) :]
        return best_total

    def _worth(self, orders: Sequence[NodeOrder], ceiling: float) -> "_Worth":
        """Batches per second under the ceiling; above it a steep slope leads back, not a cliff."""
        worth = asked = 0.0
        for order in orders:
            period, _, hub_bytes = self._known[order]
            if self._most == 1:
                rate = 1.0 / period
            elif period <= ceiling:
                rate = min(1.0 / period, self._ratio / ceiling)
            else:
                rate = ceiling**3 / period**4
            if self._is_balanced and 2 * sum(self.seeds.hidden[node] for node in order) > len(order):
                rate *= _UNBALANCED
            # Of equals, the one that leaves more spares.
            worth += rate - 1e-9 * len(order) / ceiling
            asked += rate * hub_bytes
        return _Worth(worth, asked)


class _Draft(NamedTuple):
    """A genome in the making: clusters it has, and a covering of the nodes that are left."""

    kept: list[NodeOrder]
    ceiling: int
    covering: Covering


class _Worth(NamedTuple):
    """Batches per second of clusters, and the bytes per second they ask of the hub's line."""

    rate: float
    asked: float

    def changed(self, old: "_Worth", new: "_Worth") -> "_Worth":
        """Return it with some clusters replaced."""
        return _Worth(self.rate - old.rate + new.rate, self.asked - old.asked + new.asked)
