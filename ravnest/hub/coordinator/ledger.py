"""The ledger: leases granted and counted, and evaluations.

Samples count when the root of a cluster says that a lease is done. Losses and versions come from leaves:
monitors sum their reports, and the ledger records the sums.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile

from ravnest.hub.coordinator.checks import Draws
from ravnest.hub.coordinator.evaluations import Evaluation, EvaluationSchedule, Means
from ravnest.hub.coordinator.events import (
    EvaluationReported,
    JobSettings,
    Send,
    SendFields,
    TrainingReported,
)
from ravnest.hub.coordinator.lease_queries import LeaseQueries
from ravnest.hub.coordinator.lease_reserve import LEASES_AHEAD, count_places, find_room
from ravnest.hub.coordinator.leases import (
    LeaseBook,
    LedgerState,
    OpenLease,
    OpenLeases,
    cut_batches,
    join_intervals,
)
from ravnest.hub.coordinator.notices import EpochDone, Evaluated
from ravnest.hub.coordinator.phases import ClusterPhase
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.hub.coordinator.progress import (
    BatchShares,
    ClusterProgress,
    ExactBatch,
    ExactBatches,
    divide_batch,
)
from ravnest.ids import LeaseId, MicrobatchId, NodeId
from ravnest.protocol.training import (
    DroppedMicrobatch,
    LeaseBegin,
    LeaseDone,
    LeaseGrant,
)


def grant_lease(
    cluster: ClusterState,
    lease: OpenLease,
    samples: Sequence[int],
    placement: Placement,
    *,
    is_ahead: bool = False,
) -> list[Send | SendFields]:
    """Return the actions that grant a cluster a lease on these samples, to be begun later if it is ahead."""
    is_evaluation, stops = lease.lease is None, accumulate(lease.num_samples)
    batches = tuple(
        tuple(samples[stop - size : stop]) for stop, size in zip(stops, lease.num_samples, strict=True)
    )
    consumers = placement.fields(cluster, is_evaluation)
    facts = (cluster.build_id, lease.number, is_evaluation, lease.first_microbatch)
    granted = LeaseGrant(*facts, lease.num_samples, is_ahead=is_ahead)
    return [Send(cluster.root, granted), SendFields(*facts, batches, consumers)]


_MOST_UNCONFIRMED = 10_000  # leases of a root that nobody has checked; older ones count for good
_OPEN_LEASES = 2  # per cluster at least: one that is trained, one that waits
_MOST_LEASED = 2.0  # seconds of work in a lease, or one update: a fault costs what is leased


class Ledger(LeaseQueries):
    """Grants leases, counts those that are done, evaluates between epochs and at the end."""

    def __init__(self, settings: JobSettings) -> None:
        self.settings = self._settings = settings
        self.draws = Draws(settings.draw_seed)
        self.num_counted = 0  # samples trained so far, over all epochs
        self._open, self._shares = OpenLeases(), BatchShares()
        self.num_starts = 0
        self.is_paused = False  # also while training begins again
        self.restart()

    def restart(self, books: LedgerState | None = None) -> int:
        """Begin from the first weights, or from a checkpoint; return how many samples lose their training."""
        settings = self._settings
        self.num_starts += 1
        lost, self.num_counted = self.num_counted, books.num_counted if books else 0
        self._microbatches, self._chunk_batches = 1, settings.chunk_batches
        ends = (settings.num_total, settings.shuffle_window)
        fresh = LeaseBook(settings.num_samples, settings.epochs, settings.seed, *ends)
        self._book = fresh if books is None else LeaseBook.restore(books.leases, *ends)
        self._open.clear()
        self.exact = ExactBatches()
        self._awaited = []  # granted, and their epochs are under way; by microbatch
        self._means: defaultdict[int, Means] = defaultdict(Means)
        self._dropped: Counter[int] = Counter()
        self._evaluation = None
        self._schedule = EvaluationSchedule(settings)
        self._evaluated = self._schedule.last_mark(books.num_evaluated, books.num_counted) if books else 0
        self.num_reported = books.num_reported if books else 0  # samples whose loss is known
        self.num_updates = books.num_updates if books else 0  # of all clusters together
        self.progress = ClusterProgress(settings, self.num_reported)
        self._loss: float | None = None
        self._is_stopped = False
        self._asked: frozenset[str] = frozenset()  # clusters that evaluated the last weights before
        self.has_undone = False  # since training began, or went back
        self._unconfirmed: dict[NodeId, deque[OpenLease]] = {}  # counted, by the root that said so
        self._reopened: set[int] = set()  # epochs that were over, of which something was undone
        self.average_books: LedgerState | None = None  # when the last round committed
        self.history: list[EpochDone | Evaluated] = []
        return lost - self.num_counted

    def cut(self, microbatches: int, chunk_batches: int) -> None:
        """Follow a first plan: so many microbatches per batch, so many batches per lease at most."""
        self._microbatches, self._chunk_batches = microbatches, chunk_batches

    @property
    def books(self) -> LedgerState:
        """The state of the books, for a checkpoint."""
        leases = self._book.state()
        opened = [(epoch, start, stop) for _, epoch, start, stop, _ in leases["open"]]
        leases["open"], leases["requeued"] = [], join_intervals([*opened, *leases["requeued"]])
        evaluated = self._schedule.last_mark(self._evaluated, self.num_counted)
        return LedgerState(self.num_counted, self.num_reported, self.num_updates, evaluated, leases)

    @property
    def is_finished(self) -> bool:
        """Whether all samples are counted, or no more will be, and no evaluation is under way."""
        return self._evaluation is None and (
            self._book.is_finished or (self._is_stopped and not self._book.open_leases)
        )

    def stand_still(self, clusters: Iterable[ClusterState]) -> None:
        """Record that the hub was away: no average is known to be anywhere, and no evaluation goes on.

        Leases stay open, because clusters have trained meanwhile; shares of exact updates wait for rounds.
        """
        self._evaluation = None
        self._close(lease for lease in self._open.all if lease.lease is None)
        for cluster in clusters if self.exact else ():
            self.give_back(cluster)
        self.progress.forget_averages(clusters)

    def release(self, cluster: ClusterState) -> tuple[int, int]:
        """Give back the leases of a cluster that ends; return their samples, and those it alone has seen."""
        return self.give_back(cluster), self.progress.end(cluster)

    def give_back(self, cluster: ClusterState) -> int:
        """Give back the leases of a cluster that stands still; return the samples of those it has begun."""
        given_back = self._book.release(cluster.cluster_id)
        ahead = self._open.ahead_of(cluster.cluster_id)
        num_ahead = sum(sum(lease.num_samples) for lease in ahead)
        self._close((*self._open.of(cluster.cluster_id), *ahead))
        self.exact.release(cluster)
        self._awaited = [lease for lease in self._awaited if lease.cluster_id != cluster.cluster_id]
        if self._evaluation and self._evaluation.cluster_id == cluster.cluster_id:
            again = self._evaluation.begin_again()
            self._evaluation = None if self._is_stopped and not again.is_last else again
        return sum(lease.num_samples for lease in given_back) - num_ahead

    def _close(self, leases: Iterable[OpenLease]) -> None:
        for lease in leases:
            self._open.close(lease)

    def _withdraw_ahead(self) -> None:
        """Let no cluster begin what it has ahead."""
        ahead = self.leases_ahead if self._open.num_ahead else ()
        self._book.put_back(lease.lease for lease in ahead if lease.lease is not None)
        self._close(ahead)
        gone = {lease.number for lease in ahead}
        self._awaited = [lease for lease in self._awaited if lease.number not in gone]

    def stop(self) -> None:
        """Grant no more leases; those under way go on."""
        self._is_stopped = True
        self._withdraw_ahead()
        if self._evaluation and not self._evaluation.is_last and not self._evaluation.next_sample:
            self._evaluation = None

    def give_up_leases(self) -> None:
        """Wait no longer for leases under way."""
        assert self._is_stopped
        for leased in self._book.open_leases:
            self._book.release(leased.cluster_id)
        self.exact.pop()
        self.skip_evaluation()

    def skip_evaluation(self) -> None:
        """Wait no longer for the last evaluation."""
        self._close(self._open.all)
        self._evaluation = None

    def start_evaluation(self, but: frozenset[str] = frozenset()) -> None:
        """Evaluate the last weights, if there are validation samples, by another cluster than these."""
        assert self.is_finished, "the last evaluation comes when all is trained"
        self._asked = but
        self._evaluation = self._schedule.make_last(self.num_counted)

    def fill(self, placement: Placement, held: str = "") -> list[Send | SendFields]:
        """Grant leases until every running cluster has enough, but for those that drain or are held."""
        if placement.is_exact:
            self._withdraw_ahead()
            return [] if held else self._fill_exact(placement)
        orders: list[Send | SendFields] = []
        for cluster in placement.running:
            is_sated = cluster.cluster_id in self._open.sated  # as most of them are after most events
            if is_sated or cluster.cluster_id == held or cluster.phase is ClusterPhase.DRAINING:
                continue
            while not self._has_enough(cluster):
                granted = self._grant(
                    cluster, placement, self._shares.find(cluster, placement, self._settings.batch_size)
                )
                if not granted:
                    break
                orders += granted
        return orders

    def record_summed(self, clusters: Sequence[ClusterState]) -> list[EpochDone]:
        """Record that a gradient round made the same update in these clusters: now their shares count."""
        done = self._count_exact(self.exact.pop(1), clusters)
        self.progress.record_agreement(clusters)
        self.num_updates += self.progress.record_update(clusters, self.num_counted)
        return done

    def end_exact(self, clusters: Sequence[ClusterState]) -> list[EpochDone]:
        """Count what is done of batches that will not be summed: clusters make their updates alone now."""
        return self._count_exact(self.exact.pop(), clusters)

    def _count_exact(self, batches: list[ExactBatch], clusters: Sequence[ClusterState]) -> list[EpochDone]:
        """Count the shares that are done; the root of another one has yet to say so."""
        done = [
            (cluster, batch.leases[cluster.cluster_id], batch.num_trained[cluster.cluster_id])
            for batch in batches
            for cluster in clusters
            if cluster.cluster_id in batch.num_trained
        ]
        return [ended for share in done for ended in self._count(*share)]

    def _fill_exact(self, placement: Placement) -> list[Send | SendFields]:
        """Grant the shares of whole batches, to all clusters at once; evaluate between two batches."""
        orders: list[Send | SendFields] = []
        evaluation = self._due_evaluation(placement.running) if placement.running else None
        if evaluation is not None and self._is_time_for(evaluation):
            cluster = placement.find_cluster(evaluation.cluster_id)
            while cluster is not None and not self.exact and not self._has_enough(cluster):
                granted = self._grant_evaluation(evaluation, cluster, placement)
                if not granted:
                    break
                orders += granted
            return orders
        while not self._is_stopped and not self.is_paused and self.exact.may_add(placement):
            if self._schedule.is_at_mark(self._book.num_before, self._evaluated):
                break
            granted = self._grant_batch(placement)
            if not granted:
                break
            orders += granted
        return orders

    def _grant_batch(self, placement: Placement) -> list[Send | SendFields]:
        """Grant every running cluster its share of the next batch."""
        upcoming = self._book.upcoming
        takers = [each for each in placement.running if each.phase is not ClusterPhase.DRAINING]
        if upcoming is None or not takers:
            return []
        epoch, num_left = upcoming
        size = min(self._settings.batch_size, num_left)
        size = num_left if num_left - size < len(takers) else size  # no batch of fewer samples than clusters
        takers = takers[:size]
        if len(takers) < len(placement.running) and self.exact:
            return []  # it has to wait until all batches before are summed
        shares = divide_batch(size, [each.samples_per_second for each in takers])
        leases: dict[str, OpenLease] = {}
        orders: list[Send | SendFields] = []
        num_before = epoch * self._settings.num_samples
        for cluster, share in zip(takers, shares, strict=True):
            lease = self._book.lease(cluster.cluster_id, share)
            assert lease is not None
            num_before += lease.start if not leases else 0
            sizes = cut_batches(lease.num_samples, lease.num_samples, self._microbatches)
            opened = self._open.open(cluster.cluster_id, lease, sizes)
            self._awaited.append(opened)
            leases[cluster.cluster_id] = opened
            samples = [int(index) for index in self._book.samples(lease)]
            orders += grant_lease(cluster, opened, samples, placement)
        rate = self._settings.rate(self._settings.position(num_before))
        self.exact.add(ExactBatch(rate, leases))
        return orders

    def _has_enough(self, cluster: ClusterState) -> bool:
        """Return whether a cluster has leases for twice what is in flight."""
        held = self._open.of(cluster.cluster_id)
        num_microbatches = sum(len(lease.num_samples) for lease in held)
        is_enough = len(held) >= _OPEN_LEASES and num_microbatches >= 2 * cluster.cluster.stages[0].window
        self._open.sated |= {cluster.cluster_id} if is_enough else set()
        return is_enough

    def record_done(self, cluster: ClusterState, done: LeaseDone) -> list[EpochDone] | str:
        """Count a lease that its root reports; return the epoch that it ends, or why it does not count."""
        open_lease = self._open.find(done.lease)
        if open_lease is None or open_lease.cluster_id != cluster.cluster_id or open_lease.lease is None:
            return f"lease {done.lease} is not open for cluster {cluster.name}"
        num_samples = sum(open_lease.num_samples)
        if done.num_samples > num_samples:
            return f"lease {done.lease} has {num_samples} samples, not {done.num_samples}"
        self._open.close(open_lease)
        batch = self.exact.find(open_lease)
        if batch is None:
            return self._count(cluster, open_lease, done.num_samples)
        batch.num_trained[cluster.cluster_id] = done.num_samples  # they count when they are in the weights
        return []

    def _count(self, cluster: ClusterState, open_lease: OpenLease, num_trained: int) -> list[EpochDone]:
        """Count a lease whose samples are trained, or dropped; return the epoch that it ends."""
        num_samples, lease = sum(open_lease.num_samples), open_lease.lease
        assert lease is not None
        reason = self._book.complete(lease.number, cluster.cluster_id)
        assert reason is None, reason
        self.num_counted += num_samples
        self._awaited = self._open.drop_closed(self._awaited)
        self._unconfirmed.setdefault(cluster.root, deque(maxlen=_MOST_UNCONFIRMED)).append(open_lease)
        self.progress.record_trained(cluster, num_trained)
        self._dropped[lease.epoch] += num_samples - num_trained
        size = self._settings.epoch_size(lease.epoch)
        if self._book.num_counted(lease.epoch) < size:
            return []
        loss, _ = self._means.pop(lease.epoch, Means()).read()
        self._awaited = [each for each in self._awaited if each.lease and each.lease.epoch != lease.epoch]
        num_dropped = self._dropped.pop(lease.epoch)
        if lease.epoch in self._reopened:  # people were told
            self._reopened.discard(lease.epoch)
            return []
        return [EpochDone(lease.epoch + 1, size, num_dropped, loss)]

    def record(self, reported: TrainingReported) -> None:
        """Record what clusters have reported; one that is no more has no version any longer."""
        self.num_reported, self._loss = reported.num_reported, reported.loss
        means: defaultdict[int, Means] = defaultdict(Means)
        for epoch, added in reported.sums:
            means[epoch].add(added)
        self._means |= means
        self.num_updates += self.progress.record_versions(reported.versions, reported.num_reported)

    def record_evaluation(self, cluster: ClusterState, reported: EvaluationReported) -> list[Evaluated] | str:
        """Record an evaluation lease that is over; return what is to be told, or why not."""
        lease, evaluation = self._open.find(reported.lease), self._evaluation
        if lease is None or lease.lease or lease.cluster_id != cluster.cluster_id or evaluation is None:
            return f"lease {reported.lease} is not open for cluster {cluster.name}"
        self._open.close(lease)
        for added in reported.sums:
            evaluation.means.add(added)
        evaluation.num_samples += reported.num_samples
        is_last = evaluation.next_sample == self._settings.num_validation
        if not is_last or any(other.lease is None for other in self._open.all):
            return []
        self._evaluation, self._evaluated = None, evaluation.mark
        numbers = (evaluation.num_samples, *evaluation.means.read(), evaluation.num_updates)
        return [Evaluated(evaluation.epoch, cluster.name, *numbers)]

    def record_dropped(self, cluster: ClusterState, dropped: DroppedMicrobatch) -> OpenLease | str:
        """Record that a microbatch under way is lost; return its lease, or why it is not under way."""
        lease = self._find(cluster, dropped.microbatch)
        if lease is None or dropped.microbatch in lease.dropped:
            return f"microbatch {dropped.microbatch} of cluster {cluster.name} is not under way"
        lease.dropped.add(dropped.microbatch)
        return lease

    def reserve_numbers(self) -> tuple[LeaseId, MicrobatchId]:
        """Return the numbers of a lease whose one microbatch is neither trained nor evaluated."""
        return self._open.reserve()

    def confirm(self, node: NodeId) -> None:
        """Record that a check has shown this root to train: what it has counted is counted for good."""
        self._unconfirmed.pop(node, None)

    def undo(self, node: NodeId) -> int:
        """Have samples trained again that count on this root's word alone, of epochs that are over too."""
        undone = [each.lease for each in self._unconfirmed.pop(node, ()) if each.lease is not None]
        self._reopened |= {each.epoch for each in undone} - self._book.under_way
        num_samples = self._book.uncount(undone)
        if num_samples:
            self.num_counted -= num_samples
            self.num_reported = max(0, self.num_reported - num_samples)  # so the rates go back, too
            self.progress.record_versions((), self.num_reported)
            self.has_undone, self.average_books = True, None
            if self._evaluation and not self._evaluation.is_last:  # it comes when that is trained
                self._close(x for x in self._open.of(self._evaluation.cluster_id) if x.lease is None)
                self._evaluation = self._evaluation.begin_again()
        return num_samples

    def _grant(self, cluster: ClusterState, placement: Placement, share: int) -> list[Send | SendFields]:
        may_train = not self._is_stopped and not self.is_paused
        begun = self._open.begin_next(cluster.cluster_id) if may_train else None
        evaluation = self._due_evaluation(placement.running) if begun is None else None
        if evaluation and evaluation.cluster_id == cluster.cluster_id and self._is_time_for(evaluation):
            return self._grant_evaluation(evaluation, cluster, placement)
        orders: list[Send | SendFields] = []
        if begun is not None:
            orders = [Send(cluster.root, LeaseBegin(cluster.build_id, begun.number))]
        elif may_train:
            orders = self._lease(cluster, placement, share)
        if not orders:
            return []
        batches = len(placement.running) * share / self._settings.batch_size
        ahead = _OPEN_LEASES * self._chunk_batches + cluster.updates_in_flight
        rates = self.progress.send_rates(cluster, ahead, batches, placement.rate_times)
        return [*rates, *orders, *self._extend_reserve(cluster, placement, share)]

    def _lease(
        self, cluster: ClusterState, placement: Placement, share: int, *, is_ahead: bool = False
    ) -> list[Send | SendFields]:
        """Lease a cluster the next samples, if there are some."""
        lease = self._book.lease(cluster.cluster_id, self._lease_size(cluster, share))
        if lease is None:
            return []
        samples = [int(index) for index in self._book.samples(lease)]
        sizes = cut_batches(len(samples), share, self._microbatches)
        opened = self._open.open(cluster.cluster_id, lease, sizes, is_ahead=is_ahead)
        self._awaited.append(opened)
        return grant_lease(cluster, opened, samples, placement, is_ahead=is_ahead)

    def _lease_size(self, cluster: ClusterState, share: int) -> int:
        updates = min(self._chunk_batches, max(1, int(_MOST_LEASED * cluster.samples_per_second / share)))
        return self._schedule.limit(updates * share, self._book.num_before)

    def _extend_reserve(
        self, cluster: ClusterState, placement: Placement, share: int
    ) -> list[Send | SendFields]:
        """Lease a cluster samples ahead, as far as there is room."""
        orders: list[Send | SendFields] = []
        for _ in range(LEASES_AHEAD if self._settings.reserve_seconds else 0):
            if self._evaluation is not None or not self._book.has_fresh_next:
                break
            before, ahead = self._book.num_before, self._open.ahead_of(cluster.cluster_id)
            num_left = self._schedule.next_place(self._evaluated, before) - before
            most = count_places(cluster, placement, self._open.of(cluster.cluster_id))
            facts = (cluster.samples_per_second, ahead, self._open.num_ahead, num_left, most)
            if find_room(self._settings, *facts) < self._lease_size(cluster, share):
                break
            orders += self._lease(cluster, placement, share, is_ahead=True)
        return orders

    def _grant_evaluation(
        self, evaluation: Evaluation, cluster: ClusterState, placement: Placement
    ) -> list[Send | SendFields]:
        num_of_epoch = self._book.num_counted(evaluation.epoch - 1)
        is_trained = self._schedule.is_trained(evaluation, num_of_epoch, self.num_counted)
        is_busy = any(lease.lease for lease in self._open.of(cluster.cluster_id))
        num_left = self._settings.num_validation - evaluation.next_sample
        if is_busy or not is_trained or not num_left:
            return []
        num_samples = min(num_left, self._chunk_batches * self._settings.batch_size)
        samples = range(evaluation.next_sample, evaluation.next_sample + num_samples)
        evaluation.next_sample += num_samples
        sizes = cut_batches(num_samples, self._settings.batch_size, self._microbatches)
        opened = self._open.open(cluster.cluster_id, None, sizes, samples.start)
        return grant_lease(cluster, opened, samples, placement)

    def _is_time_for(self, evaluation: Evaluation) -> bool:
        return self._schedule.is_time_for(evaluation, self._upcoming_epoch, self._book.num_before)

    def _due_evaluation(self, running: Sequence[ClusterState]) -> Evaluation | None:
        if self._evaluation is None and not self._book.is_finished and not self._is_stopped:
            places = (self._upcoming_epoch, self._book.num_before)
            self._evaluation = self._schedule.find_due(self._evaluated, *places)
        if self._evaluation and not self._evaluation.cluster_id:
            fellows = self.progress.find_fellows(running)
            fellows = tuple(each for each in fellows if each.cluster_id not in self._asked) or fellows
            self._evaluation.cluster_id = self.draws.choose(fellows).cluster_id
        return self._evaluation


def weigh_cluster(ledger: Ledger, cluster: ClusterState, samples_per_update: float) -> float:
    """Return how much a cluster counts in a robust round: the samples since its last one, and one.

    Its leaf reports updates; more than was granted to it does not count.
    """
    num_updates, num_counted = ledger.progress.count_alone(cluster)
    leases = (lease for lease in ledger.open_leases if lease.cluster_id == cluster.cluster_id)
    granted = num_counted + sum(sum(lease.num_samples) for lease in leases)
    return 1.0 + min(max(num_updates * samples_per_update, num_counted), float(granted))


class EpochReports:
    """Lets reports out in the order of epochs: clusters may end a later one first, and its report waits."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.restart()

    def restart(self) -> None:
        """Begin from the books; of an epoch that was over there before an earlier one no loss is known."""
        ledger, under_way = self._ledger, self._ledger.epochs_under_way
        later = range(min(under_way, default=ledger.num_begun), ledger.num_begun)
        over = [
            EpochDone(epoch + 1, ledger.settings.epoch_size(epoch), 0, None)
            for epoch in later
            if epoch not in under_way
        ]
        self._waiting: list[EpochDone | Evaluated] = [*over]

    def add(self, reports: Sequence[EpochDone | Evaluated], is_end: bool) -> list[EpochDone | Evaluated]:
        """Return the reports whose turn it is; at the end, when no more epochs are over, all."""
        given = sorted([*self._waiting, *reports], key=_order)
        ready = given if is_end else [*takewhile(self._is_next, given)]
        self._waiting = given[len(ready) :]
        return ready

    def _is_next(self, report: EpochDone | Evaluated) -> bool:
        num_before = report.epoch - isinstance(report, EpochDone)
        return min(self._ledger.epochs_under_way, default=num_before) >= num_before


def _order(report: EpochDone | Evaluated) -> tuple[int, int]:
    """Return where a report belongs: evaluations after an epoch come when that is told."""
    return report.epoch, 1 + report.num_updates if isinstance(report, Evaluated) else 0
