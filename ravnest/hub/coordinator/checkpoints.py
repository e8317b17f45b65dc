"""Checkpoints and the result: one cluster's state is collected, now and then and at the end.

The collector carries out. If its cluster breaks, another one is asked, or the checkpoint waits for the next
time. The policy says which cluster: it is drawn among those that share the newest average. It gives that
average, and other clusters say which weights they have. An evaluation is one cluster's word: it counts as the
best only when another cluster has come near it. A last evaluation that is far worse than the best is repeated
by others; if most of them agree, the best checkpoint is the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.checks import NodeSketch, is_far_above
from ravnest.hub.coordinator.events import CheckpointPart, Collect, Send, WithdrawCollect
from ravnest.hub.coordinator.leases import LedgerState
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.notices import Evaluated
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.hub.coordinator.snapshots import PAUSE_TIMES, SnapshotDesk, SnapshotPurpose
from ravnest.ids import NodeId, RoundId
from ravnest.protocol.placement import SketchMade, SketchOrder, SketchRow, SnapshotMade

_MOST_POSTPONED = 3  # checkpoints, until clusters have an average that others can confirm
_MOST_OVERTAKEN = 3  # checkpoints by the next average: where rounds come so quickly, one is kept unconfirmed
_MOST_COMPARED = 8  # clusters


@dataclass(frozen=True, slots=True)
class Comparison:
    """Clusters that hold the same weights as the one that gives them: they are asked for sketches."""

    key: bytes
    clusters: tuple[ClusterState, ...]
    anchor_round: RoundId | None  # whose average it is; None: their live weights are the same


@dataclass(frozen=True, slots=True)
class _Ordered:
    """What the requester's side was told to fetch and write; its cluster may be gone before that is done."""

    collect: Collect
    started_at: float


class CheckpointCollector:
    """Numbered attempts to collect one cluster's state, with what others say of theirs."""

    def __init__(self, desk: SnapshotDesk, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._desk, self._timeouts = desk, timeouts
        self._keeper: ClusterState | None = None
        self._kept: dict[NodeId, SnapshotMade] = {}
        self._books: LedgerState | None = None  # of what is under way
        self._is_result = False  # that, and no checkpoint
        self._evaluated: Evaluated | None = None  # its state, if it was just evaluated
        self._ordered: dict[int, _Ordered] = {}  # and not answered yet, by attempt
        self._outdated: set[int] = set()  # of those, begun before training began again
        self._comparison: Comparison | None = None
        self._sketches: dict[str, dict[NodeId, tuple[SketchRow, ...] | None]] = {}  # by cluster_id
        self._is_ordered = False  # all that is to be collected is known
        self.num_overtaken = 0  # in a row, by the next average
        self._every = 0.0
        self._started_at = 0.0
        self._next_at: float | None = None
        self._attempt = 0

    @property
    def silence(self) -> str:
        """What is wrong with a node that did not answer in time."""
        return f"did not answer within {self._timeouts.snapshot_seconds:.0f} s"

    @property
    def is_under_way(self) -> bool:
        """Whether a cluster was asked and has not died since."""
        return self._keeper is not None

    @property
    def has_result_under_way(self) -> bool:
        """Whether that is for the result."""
        return self.is_under_way and self._is_result

    @property
    def parts(self) -> tuple[CheckpointPart, ...]:
        """The answers of all nodes of the cluster, in the order of the line."""
        assert self._keeper is not None
        stages = self._keeper.cluster.stages
        refs = (self._kept[stage.node].weights for stage in stages)
        return tuple(
            CheckpointPart(x.start, x.stop, x.node, ref) for x, ref in zip(stages, refs, strict=True)
        )

    @property
    def answer_by(self) -> float | None:
        """When nodes that have not answered are waited for no longer, if there are any."""
        if self._keeper is None or self._is_ordered:
            return None
        seconds = self._timeouts.sketch_seconds if self._is_complete else self._timeouts.snapshot_seconds
        return self._started_at + seconds

    def find_silent(self, now: float) -> tuple[NodeId, ...]:
        """Return the nodes that have not answered in time."""
        if self._keeper is None or self._is_complete or self.answer_by is None or now < self.answer_by:
            return ()
        return tuple(name for name in self._keeper.nodes if name not in self._kept)

    def due(self, every: float | None) -> float | None:
        """Return when the next checkpoint is to be made, or the one under way given up, if there are any."""
        return self.answer_by if every is None or self.is_under_way else self._next_at

    def is_time(self, every: float | None, now: float) -> bool:
        """Return whether to make one; the first comes a whole period after training began."""
        if every is None or self.is_under_way:
            return False
        self._every = every
        if self._next_at is None:
            self._next_at = now + every
        return now >= self._next_at

    def expire(self, now: float) -> str | None:
        """Give up a checkpoint that cannot be kept; return why, or an empty text if that was told before."""
        if self.is_under_way and self._has_moved_on:
            self.end(now)
            self.num_overtaken += 1
            is_first = self.num_overtaken == 1
            return "the next average came before it could be compared; it is tried again" if is_first else ""
        silent = self.find_silent(now)
        if not silent or self._is_result:
            return None
        self.end(now)
        return f"{' and '.join(silent)} {self.silence}"

    def refuse(self, is_training: bool, has_clusters: bool, is_calm: bool) -> str:
        """Return why no checkpoint can be made now, though somebody asks for one."""
        if not is_training:
            return "nothing is trained now that will not be kept anyway"
        if not has_clusters:
            return "no cluster trains at this moment; ask again when one does"
        if self.is_under_way:
            return "one is under way already"
        return "" if is_calm else "the loss went wrong lately: the last good checkpoint is kept"

    def postpone(self, now: float) -> None:
        """Make no checkpoint this time."""
        self._next_at = now + self._every

    @property
    def held(self) -> str:
        """The id of the cluster that is to train nothing until its state, which was evaluated, is written."""
        is_live = self._evaluated is not None and self._comparison is None
        is_held = self._keeper is not None and is_live and not self._is_complete
        return self._keeper.cluster_id if self._keeper is not None and is_held else ""

    def start(
        self,
        cluster: ClusterState,
        now: float,
        books: LedgerState,
        *,
        is_result: bool = False,
        evaluated: Evaluated | None = None,
        comparison: Comparison | None = None,
    ) -> list[Send]:
        """Ask every node of a cluster for its state, and those of others for sketches of theirs."""
        self._keeper, self._kept, self._books, self._is_result = cluster, {}, books, is_result
        self._evaluated, self._comparison, self._is_ordered = evaluated, comparison, False
        self._desk.withdraw(SnapshotPurpose.CHECKPOINT)
        self._started_at, self._attempt = now, self._desk.new_number()
        facts = (SnapshotPurpose.CHECKPOINT, self._attempt)
        anchor_round = None if comparison is None else comparison.anchor_round
        sends = [
            self._desk.ask(*facts, name, cluster.build_id, is_result, anchor_round) for name in cluster.nodes
        ]
        others = () if comparison is None else comparison.clusters
        self._sketches = {other.cluster_id: dict.fromkeys(other.nodes) for other in others}
        if comparison is not None:
            asked = [(name, other.build_id) for other in others for name in other.nodes]
            sends += [
                Send(name, SketchOrder(build_id, self._attempt, comparison.key, anchor_round))
                for name, build_id in asked
            ]
        return sends

    def drop(self, cluster: ClusterState) -> None:
        """Collect no longer from a cluster that changes."""
        if self._keeper is cluster:
            self._keeper = None
            self._desk.withdraw(SnapshotPurpose.CHECKPOINT)
        self._sketches.pop(cluster.cluster_id, None)

    def add_snapshot(self, sender: NodeId, made: SnapshotMade, now: float) -> list[Collect | WithdrawCollect]:
        """Record a node's answer."""
        self._kept[sender] = made
        return self.order(now)

    def add_sketch(
        self, sender: NodeId, made: SketchMade, now: float
    ) -> list[Collect | WithdrawCollect] | str:
        """Record a sketch; return why not, if nobody asked for it."""
        awaited = next((each for each in self._sketches.values() if each.get(sender, ()) is None), None)
        if made.number != self._attempt or awaited is None:
            return f"nobody asked {sender} for sketch {made.number}"
        awaited[sender] = made.rows
        return self.order(now)

    def order(self, now: float) -> list[Collect | WithdrawCollect]:
        """Have all parts fetched, once they are here, and others have said what they hold or had time to.

        An older one that is still fetched is not kept: what is written last counts.
        """
        if self._is_ordered or not self._is_complete or self._has_moved_on:
            return []
        sketches = [pair for each in self._sketches.values() for pair in each.items()]
        is_awaited = any(rows is None for _, rows in sketches)
        if is_awaited and now < self._started_at + self._timeouts.sketch_seconds:
            return []
        self._is_ordered, self.num_overtaken = True, 0
        assert self._books is not None
        order = Collect(self._attempt, self.parts, self._books, self._is_result, self._evaluated)
        if self._comparison is not None:
            said = tuple(NodeSketch(name, rows) for name, rows in sketches if rows)
            order = replace(order, key=self._comparison.key, others=said)
        older = self._withdraw()
        self._ordered[self._attempt] = _Ordered(order, self._started_at)
        return [*older, order]

    @property
    def _has_moved_on(self) -> bool:
        """Whether the next average came before the parts were written; not at the end, where none comes."""
        if self._comparison is None or self._is_result:
            return False
        return any(made.anchor_round != self._comparison.anchor_round for made in self._kept.values())

    def find_ordered(self, number: int) -> Collect | None:
        """Return the order of this number whose end is awaited, also if its cluster is gone by now."""
        found = self._ordered.get(number)
        return None if found is None else found.collect

    def begin_again(self, *, has_gone_wrong: bool) -> list[WithdrawCollect]:
        """Record that training begins again; what is still fetched then may be of what went wrong."""
        self._outdated |= self._ordered.keys()
        return self._withdraw() if has_gone_wrong else []

    def _withdraw(self) -> list[WithdrawCollect]:
        """Return the orders that end all checkpoints which are still fetched."""
        return [WithdrawCollect(number) for number, x in self._ordered.items() if not x.collect.is_result]

    def is_outdated(self, number: int) -> bool:
        """Return whether a checkpoint is on disk from which training did not begin again."""
        return number in self._outdated

    def forget_ordered(self) -> None:
        """Wait for no answer: the program that was to write has ended."""
        self._ordered, self._outdated = {}, set()

    def withdraw_result(self, number: int) -> None:
        """Begin again with the result: what was collected is not what others hold."""
        del self._ordered[number]
        self._keeper = None

    def end(self, now: float) -> None:
        """End the checkpoint that is under way, kept or not."""
        seconds = now - self._started_at
        self._keeper, self._next_at = None, now + max(self._every, PAUSE_TIMES * seconds)
        self._desk.withdraw(SnapshotPurpose.CHECKPOINT)

    def end_ordered(self, number: int, now: float) -> tuple[LedgerState, float]:
        """End one that was written, or failed; return what was trained then, and the seconds it took."""
        ended = self._ordered.pop(number)
        self._outdated.discard(number)
        if number == self._attempt:
            self.end(now)
        return ended.collect.books, now - ended.started_at

    @property
    def _is_complete(self) -> bool:
        return self._keeper is not None and len(self._kept) == len(self._keeper.nodes)


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

    def begin_checkpoint(self, now: float, *, can_wait: bool = False) -> list[Send]:
        """Begin a checkpoint that others can confirm; without any, if it cannot wait, one that nobody can."""
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
        if can_wait and len(self._placement.running) > 1 and self._num_postponed < _MOST_POSTPONED:
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

    def start_last_evaluation(self) -> None:
        """Have the last weights evaluated; what was said of others, before a restart, counts no more."""
        self._last_losses = {}
        self._ledger.start_evaluation()

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
