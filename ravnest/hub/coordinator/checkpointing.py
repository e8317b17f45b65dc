"""Checkpoints and the result: from which cluster they come, which others confirm them, and which is best.

The cluster is drawn among those that share the newest average. It gives that average, and other clusters say
which weights they have. An evaluation is one cluster's word: it counts as the best only when another cluster
has come near it. A last evaluation that is far worse than the best is repeated by others; if most of them
agree, the best checkpoint is the result.
"""

from collections.abc import Sequence

from ravnest.hub.coordinator.checks import is_far_above
from ravnest.hub.coordinator.events import Send
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.notices import Evaluated
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.hub.coordinator.snapshots import CheckpointCollector, Comparison

_MOST_POSTPONED = 3  # checkpoints, until clusters have an average that others can confirm
_MOST_OVERTAKEN = 3  # checkpoints by the next average: where rounds come so quickly, one is kept unconfirmed
_MOST_COMPARED = 8  # clusters


class CheckpointPolicy:
    """Begins checkpoints and the collection of the result; the collector carries them out."""

    def __init__(self, placement: Placement, ledger: Ledger, collector: CheckpointCollector) -> None:
        self._placement, self._ledger, self._collector = placement, ledger, collector
        self.is_calm = True  # whether the monitors find the weights worth keeping
        self._num_postponed = 0  # checkpoints, for there was no average
        self._losses: dict[str, float] = {}  # the lowest that each cluster has found, by cluster_id
        self._best_loss: float | None = None  # that is begun to be kept
        self.kept_loss: float | None = None  # of the best checkpoint on disk
        self._last_losses: dict[str, float] = {}  # of the last weights, by cluster_id

    def begin_checkpoint(self, now: float) -> list[Send]:
        """Begin a checkpoint that others can confirm; without any, after a while, one that nobody can."""
        if not self.is_calm:
            self._collector.postpone(now)
            return []
        keeper = self._ledger.draws.choose(self._fellows)
        comparison = self._compare(keeper)
        is_overtaken = self._collector.num_overtaken >= _MOST_OVERTAKEN
        if comparison is not None and not is_overtaken:
            return self._start_compared(keeper, comparison, now)
        if is_overtaken:
            return self._collector.start(keeper, now, self._ledger.books)
        if len(self._placement.running) > 1 and self._num_postponed < _MOST_POSTPONED:
            self._num_postponed += 1
            self._collector.postpone(now)
            return []
        return self._collector.start(keeper, now, self._ledger.books)

    def keep_best(self, cluster: ClusterState, results: Sequence[Evaluated], now: float) -> list[Send]:
        """Begin a checkpoint after an evaluation that is the best so far, if another cluster backs it.

        With others to confirm it, it is of the average that all of them have. A cluster alone gives what it
        has just evaluated, before it trains on; of several, none is believed to give what it has evaluated.
        """
        sends: list[Send] = []
        for result in results:
            if result.loss is None or not self._is_best(cluster, result.loss):
                continue
            others = [each for each in self._fellows if each is not cluster]
            keeper = self._ledger.draws.choose(others or [cluster])
            comparison = self._compare(keeper)
            if comparison is None and len(self._placement.running) > 1:
                continue
            self._best_loss = result.loss
            if comparison is None:
                sends += self._collector.start(cluster, now, self._ledger.books, evaluated=result)
            else:
                sends += self._start_compared(keeper, comparison, now, result)
        return sends

    def _is_best(self, cluster: ClusterState, loss: float) -> bool:
        """Return whether an evaluation is the best so far, and not far below all that others have found."""
        others = [found for each, found in self._losses.items() if each != cluster.cluster_id]
        before = self._losses.get(cluster.cluster_id, loss)
        self._losses[cluster.cluster_id] = min(before, loss)
        is_backed = any(not is_far_above(other, loss) for other in others)
        is_alone = len(self._placement.running) < 2
        return (self._best_loss is None or loss < self._best_loss) and (is_backed or is_alone)

    def collect_result(self, now: float) -> list[Send]:
        """Ask a cluster that is drawn for the result, and others for what they hold."""
        keeper, books = self._ledger.draws.choose(self._fellows), self._ledger.books
        return self._collector.start(keeper, now, books, is_result=True, comparison=self._compare(keeper))

    def record_last(self, cluster: ClusterState, results: Sequence[Evaluated]) -> None:
        """Record what a cluster found of the last weights."""
        for result in results:
            if result.loss is not None:
                self._last_losses[cluster.cluster_id] = result.loss

    @property
    def asked(self) -> frozenset[str]:
        """The clusters that have evaluated the last weights, by cluster_id."""
        return frozenset(self._last_losses)

    @property
    def wants_opinion(self) -> bool:
        """Whether another cluster is to evaluate the last weights: they seem far worse than the best."""
        is_worse = self._judge_last()
        left = [each for each in self._fellows if each.cluster_id not in self._last_losses]
        return bool(left) and any(is_worse) and abs(2 * sum(is_worse) - len(is_worse)) < 2

    @property
    def is_worse_than_best(self) -> bool:
        """Whether two clusters more say that the last weights are far worse than the best than deny it."""
        is_worse = self._judge_last()
        return 2 * sum(is_worse) - len(is_worse) >= 2

    def _judge_last(self) -> list[bool]:
        best = self.kept_loss
        return [] if best is None else [is_far_above(loss, best) for loss in self._last_losses.values()]

    @property
    def _fellows(self) -> tuple[ClusterState, ...]:
        return self._ledger.progress.find_fellows(self._placement.running)

    def _compare(self, keeper: ClusterState) -> Comparison | None:
        """Return which clusters hold the same weights as this one, and which those are; None: nobody does."""
        draws, progress = self._ledger.draws, self._ledger.progress
        others = [each for each in self._fellows if each is not keeper]
        anchor_round = None
        if not self._placement.is_exact:
            anchor_round = progress.anchor_round([keeper])
            if not anchor_round:
                return None
            others = [each for each in others if progress.holds(each, anchor_round)]
        if not others:
            return None
        return Comparison(draws.make_key(), draws.shuffle(others)[:_MOST_COMPARED], anchor_round)

    def _start_compared(
        self, keeper: ClusterState, comparison: Comparison, now: float, evaluated: Evaluated | None = None
    ) -> list[Send]:
        """Begin a checkpoint of what several clusters hold: of the last average, with its books."""
        self._num_postponed = 0
        is_average = comparison.anchor_round is not None
        books = (self._ledger.average_books if is_average else None) or self._ledger.books
        return self._collector.start(keeper, now, books, evaluated=evaluated, comparison=comparison)
