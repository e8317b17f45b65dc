"""The ledger: leases granted and counted, progress of each cluster, learning rates, evaluations.

Samples count when the root of a cluster says that a lease is done. Losses, versions and the position in the
schedule of rates come from leaves: monitors sum their reports, and the ledger records the sums.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ravnest.hub.coordinator.events import (
    EvaluationReported,
    JobSettings,
    MetricSum,
    Send,
    SendFields,
    TrainingReported,
)
from ravnest.hub.coordinator.leases import Lease, LeaseBook, LedgerState
from ravnest.hub.coordinator.notices import EpochDone, Evaluated, Trained
from ravnest.hub.coordinator.phases import ClusterPhase
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.hub.coordinator.planner import cut_batches
from ravnest.ids import LeaseId, MicrobatchId, RoundId
from ravnest.protocol.training import (
    DroppedMicrobatch,
    LearningRate,
    LeaseDone,
    LeaseGrant,
    Metrics,
)

_NONE = RoundId(0)  # before the first round
MOST_METRICS = 256  # no job has more; a peer may make up names


@dataclass(frozen=True, slots=True)
class OpenLease:
    """Microbatches that a cluster trains; without a lease of the book it evaluates them."""

    number: LeaseId
    cluster_id: str
    lease: Lease | None
    first_microbatch: MicrobatchId
    num_samples: tuple[int, ...]
    dropped: set[MicrobatchId] = field(default_factory=set)

    @property
    def microbatches(self) -> range:
        """The numbers of its microbatches."""
        return range(self.first_microbatch, self.first_microbatch + len(self.num_samples))


@dataclass(slots=True)
class Means:
    """Means weighted by samples; values that are no finite numbers do not count."""

    sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, added: MetricSum) -> None:
        """Add a sum over samples."""
        name, more, num_samples = added
        if name in self.sums or len(self.sums) <= MOST_METRICS:
            total, weight = self.sums.get(name, (0.0, 0))
            self.sums[name] = (total + more, weight + num_samples)

    def read(self) -> tuple[float | None, Metrics]:
        """Return the mean loss, and the means of the metrics."""
        means = {name: total / weight if weight else None for name, (total, weight) in self.sums.items()}
        return means.pop("loss", None), tuple(means.items())


@dataclass(slots=True)
class Evaluation:
    """One pass over the validation samples, by one cluster."""

    epoch: int  # passes over the training samples before it
    is_last: bool = False
    cluster_id: str = ""
    next_sample: int = 0
    num_samples: int = 0
    means: Means = field(default_factory=Means)


@dataclass(slots=True)
class Progress:
    """How far a cluster is, so that rates are sent ahead of its updates."""

    version: int
    position: int = 0  # batches that all clusters had trained when it came to that version
    rates: dict[int, float] = field(default_factory=dict)  # sent, by the update they hold from
    num_trained: int = 0  # samples
    num_alone: int = 0  # of them since the last round
    num_samples_seen: int = 0  # samples of all clusters that its weights have learned from
    anchor_round: RoundId | None = _NONE  # the round whose average it began from; None: it has none


def grant_lease(
    cluster: ClusterState, lease: OpenLease, samples: Sequence[int], placement: Placement
) -> list[Send | SendFields]:
    """Return the actions that grant a cluster a lease on these samples."""
    is_evaluation, stops = lease.lease is None, accumulate(lease.num_samples)
    batches = tuple(
        tuple(samples[stop - size : stop]) for stop, size in zip(stops, lease.num_samples, strict=True)
    )
    consumers = placement.fields(cluster, is_evaluation)
    granted = LeaseGrant(
        cluster.build_id, lease.number, is_evaluation, lease.first_microbatch, lease.num_samples
    )
    fields = SendFields(
        cluster.build_id, lease.number, is_evaluation, lease.first_microbatch, batches, consumers
    )
    return [Send(cluster.root, granted), fields]


def send_rates(
    settings: JobSettings, cluster: ClusterState, progress: Progress, num_updates: int, num_clusters: int
) -> list[Send]:
    """Return the rates of the next so many updates, where they are not what the cluster was sent."""
    latest = max((update for update in progress.rates if update <= progress.version), default=0)
    progress.rates = {update: rate for update, rate in progress.rates.items() if update >= latest}
    told = progress.rates.get(latest)
    sends = []
    for ahead in range(num_updates):
        update = progress.version + ahead
        rate = settings.rate(progress.position + ahead * num_clusters)
        if progress.rates.get(update, told) != rate:
            progress.rates[update] = rate
            sends += [Send(node, LearningRate(cluster.build_id, update, rate)) for node in cluster.nodes]
        told = rate
    return sends


_OPEN_LEASES = 2  # per cluster: one that is trained, one that waits


class Ledger:
    """Grants leases, counts those that are done, evaluates between epochs and at the end."""

    def __init__(self, settings: JobSettings) -> None:
        self.settings = self._settings = settings
        self.num_counted = 0  # samples trained so far, over all epochs
        self._next_lease = self._next_microbatch = 0
        self.num_starts = 0
        self.restart()

    def restart(self, books: LedgerState | None = None) -> int:
        """Begin from the first weights, or from a checkpoint; return how many samples lose their training."""
        settings = self._settings
        chunk = settings.chunk_batches * settings.batch_size
        self.num_starts += 1
        lost, self.num_counted = self.num_counted, books.num_counted if books else 0
        self._microbatches, self._chunk_batches = 1, settings.chunk_batches
        if books is None:
            self._book = LeaseBook(settings.num_samples, chunk, settings.epochs, settings.seed)
        else:
            self._book = LeaseBook.restore(books.leases)
            self._chunk_batches = books.leases["chunk_size"] // settings.batch_size
        self._open: dict[LeaseId, OpenLease] = {}
        self._open_by_cluster: dict[str, dict[LeaseId, OpenLease]] = {}
        self._progress: dict[str, Progress] = {}
        self._awaited: list[OpenLease] = []  # granted, and their epochs are under way; by microbatch
        self._means: defaultdict[int, Means] = defaultdict(Means)
        self._dropped: Counter[int] = Counter()
        self._evaluation: Evaluation | None = None
        self._evaluated = books.num_evaluated if books else 0
        self.num_reported = books.num_reported if books else 0  # samples whose loss is known
        self.num_updates = books.num_updates if books else 0  # of all clusters together
        self._loss: float | None = None
        self._is_stopped = False
        self.history: list[EpochDone | Evaluated] = []
        return lost - self.num_counted

    def cut(self, microbatches: int, chunk_batches: int) -> None:
        """Follow a first plan: a batch travels as so many microbatches, and a lease has so many batches."""
        self._microbatches = microbatches
        if not self.num_counted:
            self._chunk_batches = chunk_batches
            chunk, settings = chunk_batches * self._settings.batch_size, self._settings
            self._book = LeaseBook(settings.num_samples, chunk, settings.epochs, settings.seed)

    @property
    def books(self) -> LedgerState:
        """The state of the books, for a checkpoint."""
        leases = self._book.state()
        again = sorted([*((epoch, chunk) for _, epoch, chunk, _ in leases["open"]), *leases["requeued"]])
        leases["open"], leases["requeued"] = [], again
        # A stopped job was evaluated within an epoch: that one is evaluated again when it is over.
        evaluated = min(self._evaluated, self.num_counted // self._settings.num_samples)
        return LedgerState(self.num_counted, self.num_reported, self.num_updates, evaluated, leases)

    @property
    def is_finished(self) -> bool:
        """Whether all samples are counted, or no more will be, and no evaluation is under way."""
        return self._evaluation is None and (
            self._book.is_finished or (self._is_stopped and not self._book.open_leases)
        )

    @property
    def trained(self) -> Trained:
        """How far the job is."""
        size, epochs = self._settings.num_samples, self._settings.epochs
        epoch = min(self.num_counted // size + 1, epochs)
        return Trained(self.num_counted, epochs * size, epoch, self._loss)

    @property
    def open_leases(self) -> tuple[OpenLease, ...]:
        """Leases under way, oldest first."""
        return tuple(self._open.values())

    def knows(self, cluster: ClusterState) -> bool:
        """Return whether a cluster's weights have learned anything."""
        progress = self._progress.get(cluster.cluster_id)
        return progress is not None and bool(progress.anchor_round or progress.num_trained > 0)

    def samples_seen(self, cluster: ClusterState) -> int:
        """Return how many samples, of all clusters, one's weights have learned from."""
        return self._of(cluster).num_samples_seen

    def most_trained(self, clusters: Iterable[ClusterState]) -> ClusterState:
        """Return the cluster whose weights saw most samples; of equals, the one that trained most."""
        return max(clusters, key=lambda each: (self.samples_seen(each), self._of(each).num_trained))

    def anchor_round(self, clusters: Iterable[ClusterState]) -> RoundId | None:
        """Return the newest round whose average one of these clusters has, if any; 0: the first weights."""
        anchor_rounds = (self._of(cluster).anchor_round for cluster in clusters)
        return max((anchor_round for anchor_round in anchor_rounds if anchor_round is not None), default=None)

    def forget_averages(self, clusters: Iterable[ClusterState]) -> None:
        """Record that neither these clusters nor those before them keep the average of a round any more."""
        for progress in (*map(self._of, clusters), *self._progress.values()):
            progress.anchor_round = None

    def stand_still(self, clusters: Iterable[ClusterState]) -> None:
        """Record that the hub was away: no average is known to be anywhere, and no evaluation goes on."""
        self._evaluation = None
        self.forget_averages(clusters)

    def inherit(self, cluster: ClusterState, cluster_id: str, is_whole: bool) -> None:
        """Let a cluster go on from another; it has the average of that one if it has its whole state."""
        before = self._progress.get(cluster_id) or Progress(0, self._position, anchor_round=None)
        version = max(1, before.version)  # 0 is for what the hub gave, the same in all stages
        after = Progress(version, self._position, num_trained=before.num_trained)
        after.anchor_round, after.num_samples_seen = (
            before.anchor_round if is_whole else None,
            before.num_samples_seen,
        )
        after.num_alone = before.num_alone if is_whole else 0
        cluster.version, self._progress[cluster.cluster_id] = version, after

    def note_averaged(self, clusters: Iterable[ClusterState], round_id: RoundId) -> None:
        """Record that a round averaged the weights of these clusters."""
        shared = [self._of(cluster) for cluster in clusters]
        seen = max((each.num_samples_seen - each.num_alone for each in shared), default=0)
        seen += sum(each.num_alone for each in shared)
        for each in shared:
            each.anchor_round, each.num_alone, each.num_samples_seen = round_id, 0, seen

    def release(self, cluster: ClusterState) -> tuple[int, int]:
        """Take back the leases of a cluster that ends; return their samples, and those it alone has seen."""
        given_back, progress = self.give_back(cluster), self._of(cluster)
        progress.anchor_round = None  # its nodes may get other weights before a cluster goes on from it
        return given_back, progress.num_alone

    def forget_others(self, cluster_ids: Collection[str]) -> None:
        """Forget the progress of all clusters but these."""
        self._progress = {each: far for each, far in self._progress.items() if each in cluster_ids}

    def give_back(self, cluster: ClusterState) -> int:
        """Take back the leases of a cluster that stands still; return their samples."""
        self._book.release(cluster.cluster_id)
        given_back = [*self._open_of(cluster)]
        for lease in given_back:
            self._close(lease)
        self._awaited = [lease for lease in self._awaited if lease.cluster_id != cluster.cluster_id]
        if self._evaluation and self._evaluation.cluster_id == cluster.cluster_id:
            again = Evaluation(self._evaluation.epoch, self._evaluation.is_last)
            self._evaluation = None if self._is_stopped and not again.is_last else again
        return sum(sum(lease.num_samples) for lease in given_back if lease.lease)

    @property
    def means(self) -> dict[int, Means]:
        """What was reported of the epochs that are under way, from 0."""
        return dict(self._means)

    @property
    def num_granted(self) -> int:
        """How many microbatches were granted so far."""
        return self._next_microbatch

    def version(self, cluster: ClusterState) -> int:
        """Return how many updates a cluster has made, as far as the books know."""
        progress = self._progress.get(cluster.cluster_id)
        return cluster.version if progress is None else progress.version

    @property
    def awaited_leases(self) -> set[LeaseId]:
        """Leases of which reports count: open ones, and all of epochs that are under way."""
        return {lease.number for lease in self._awaited} | self._open.keys()

    def find_training(self, microbatch: MicrobatchId) -> OpenLease | None:
        """Return the lease under which a microbatch is or was trained, in an epoch that is under way."""
        number = bisect_right(self._awaited, microbatch, key=lambda lease: lease.first_microbatch)
        lease = self._awaited[number - 1] if number else None
        return lease if lease is not None and microbatch in lease.microbatches else None

    def find_evaluation(self, cluster: ClusterState, microbatch: MicrobatchId) -> OpenLease | None:
        """Return the open lease under which a cluster evaluates a microbatch."""
        lease = self._find(cluster, microbatch)
        return lease if lease is not None and lease.lease is None and self._evaluation is not None else None

    @property
    def epochs_under_way(self) -> set[int]:
        """The epochs, from 0, that are begun and not counted whole."""
        return {epoch for epoch, _ in self._book.state()["counted"]}

    @property
    def num_begun(self) -> int:
        """How many epochs are leased to their end, or begun."""
        leases = self._book.state()
        return leases["next_epoch"] + (leases["next_chunk"] > 0)

    def is_under_way(self, epoch: int) -> bool:
        """Return whether an epoch, from 0, is begun and not over."""
        return 0 < self._book.num_counted(epoch) < self._settings.num_samples or any(
            lease.lease is not None and lease.lease.epoch == epoch for lease in self._awaited
        )

    def ends_epoch(self, number: LeaseId) -> bool:
        """Return whether an epoch is over when this lease is done."""
        opened = self._open.get(number)
        if opened is None or opened.lease is None:
            return False
        num_counted = self._book.num_counted(opened.lease.epoch) + sum(opened.num_samples)
        return num_counted == self._settings.num_samples

    def is_busy(self, cluster: ClusterState) -> bool:
        """Return whether a cluster has a lease under way."""
        return self._num_open(cluster) > 0

    def stop(self) -> None:
        """Grant no more leases; those under way go on."""
        self._is_stopped = True
        if self._evaluation and not self._evaluation.is_last and not self._evaluation.next_sample:
            self._evaluation = None

    def give_up_leases(self) -> None:
        """Wait no longer for leases under way."""
        assert self._is_stopped
        for lease in self.open_leases:
            self._book.release(lease.cluster_id)
            self._close(lease)
        self._evaluation = None

    def start_evaluation(self) -> None:
        """Evaluate the last weights, if there are validation samples."""
        assert self.is_finished, "the last evaluation comes when all is trained"
        if self._settings.num_validation:
            passes = -(-self.num_counted // self._settings.num_samples)
            self._evaluation = Evaluation(passes, is_last=True)

    def fill(self, placement: Placement, held: str = "") -> list[Send | SendFields]:
        """Grant leases until every running cluster has two, but for those that drain or are held."""
        orders: list[Send | SendFields] = []
        for cluster in placement.running:
            if cluster.phase is ClusterPhase.DRAINING or cluster.cluster_id == held:
                continue
            while self._num_open(cluster) < _OPEN_LEASES:
                granted = self._grant(cluster, placement)
                if not granted:
                    break
                orders += granted
        return orders

    def take_done(self, cluster: ClusterState, done: LeaseDone) -> list[EpochDone] | str:
        """Count a lease that its root reports; return the epoch that it ends, or why it does not count."""
        open_lease = self._open.get(done.lease)
        if open_lease is None or open_lease.cluster_id != cluster.cluster_id or open_lease.lease is None:
            return f"lease {done.lease} is not open for cluster {cluster.name}"
        num_samples, lease = sum(open_lease.num_samples), open_lease.lease
        if done.num_samples > num_samples:
            return f"lease {done.lease} has {num_samples} samples, not {done.num_samples}"
        reason = self._book.complete(lease.number, cluster.cluster_id)
        assert reason is None, reason
        self._close(open_lease)
        self.num_counted += num_samples
        progress = self._of(cluster)
        progress.num_trained += done.num_samples
        progress.num_alone += done.num_samples
        progress.num_samples_seen += done.num_samples
        self._dropped[lease.epoch] += num_samples - done.num_samples
        is_epoch = self._book.num_counted(lease.epoch) == self._settings.num_samples
        return [self._end_epoch(lease.epoch)] if is_epoch else []

    def record(self, reported: TrainingReported) -> None:
        """Record what clusters have reported; one that is no more has no version any longer."""
        self.num_reported, self._loss = reported.num_reported, reported.loss
        means: defaultdict[int, Means] = defaultdict(Means)
        for epoch, added in reported.sums:
            means[epoch].add(added)
        self._means |= means
        for found in reported.versions:
            progress = self._progress.get(found.cluster_id)
            if progress is not None and found.version > progress.version:
                self.num_updates += found.version - progress.version
                progress.version = found.version
                progress.position = self._settings.position(found.num_reported)

    def record_evaluation(self, cluster: ClusterState, reported: EvaluationReported) -> list[Evaluated] | str:
        """Record an evaluation lease that is over; return what is to be told, or why not."""
        lease, evaluation = self._open.get(reported.lease), self._evaluation
        if lease is None or lease.lease or lease.cluster_id != cluster.cluster_id or evaluation is None:
            return f"lease {reported.lease} is not open for cluster {cluster.name}"
        self._close(lease)
        for added in reported.sums:
            evaluation.means.add(added)
        evaluation.num_samples += reported.num_samples
        is_last = evaluation.next_sample == self._settings.num_validation
        if not is_last or any(other.lease is None for other in self._open.values()):
            return []
        self._evaluation, self._evaluated = None, evaluation.epoch
        loss, metrics = evaluation.means.read()
        return [Evaluated(evaluation.epoch, cluster.name, evaluation.num_samples, loss, metrics)]

    def record_dropped(self, cluster: ClusterState, dropped: DroppedMicrobatch) -> str | None:
        """Record that a microbatch under way is lost; return why not, if it is not under way."""
        lease = self._find(cluster, dropped.microbatch)
        if lease is None or dropped.microbatch in lease.dropped:
            return f"microbatch {dropped.microbatch} of cluster {cluster.name} is not under way"
        lease.dropped.add(dropped.microbatch)
        return None

    @property
    def _position(self) -> int:
        return self._settings.position(self.num_reported)

    def _of(self, cluster: ClusterState) -> Progress:
        return self._progress.setdefault(cluster.cluster_id, Progress(cluster.version, self._position))

    def _find(self, cluster: ClusterState, microbatch: MicrobatchId) -> OpenLease | None:
        held = self._open_of(cluster)
        return next((lease for lease in held if microbatch in lease.microbatches), None)

    def _end_epoch(self, epoch: int) -> EpochDone:
        loss, _ = self._means.pop(epoch, Means()).read()
        self._awaited = [each for each in self._awaited if each.lease and each.lease.epoch != epoch]
        return EpochDone(epoch + 1, self._settings.num_samples, self._dropped.pop(epoch), loss)

    def _grant(self, cluster: ClusterState, placement: Placement) -> list[Send | SendFields]:
        evaluation = self._due_evaluation(placement.running)
        if evaluation and evaluation.cluster_id == cluster.cluster_id and self._is_time_for(evaluation):
            return self._grant_evaluation(evaluation, cluster, placement)
        lease = None if self._is_stopped else self._book.lease(cluster.cluster_id)
        if lease is None:
            return []
        samples = [int(index) for index in self._book.samples(lease)]
        opened = self._open_lease(cluster, lease, len(samples))
        self._awaited.append(opened)
        return [
            *self._set_rates(cluster, len(placement.running)),
            *grant_lease(cluster, opened, samples, placement),
        ]

    def _grant_evaluation(
        self, evaluation: Evaluation, cluster: ClusterState, placement: Placement
    ) -> list[Send | SendFields]:
        num_counted = self._book.num_counted(evaluation.epoch - 1)
        is_trained = evaluation.is_last or num_counted == self._settings.num_samples
        is_busy = any(lease.lease for lease in self._open_of(cluster))
        num_left = self._settings.num_validation - evaluation.next_sample
        if is_busy or not is_trained or not num_left:
            return []
        num_samples = min(num_left, self._chunk_batches * self._settings.batch_size)
        samples = range(evaluation.next_sample, evaluation.next_sample + num_samples)
        evaluation.next_sample += num_samples
        return grant_lease(cluster, self._open_lease(cluster, None, num_samples), samples, placement)

    def _is_time_for(self, evaluation: Evaluation) -> bool:
        return evaluation.is_last or self._upcoming_epoch >= evaluation.epoch

    def _due_evaluation(self, running: Sequence[ClusterState]) -> Evaluation | None:
        epoch = self._evaluated + self._settings.evaluate_every
        is_due = self._settings.evaluate_every > 0 and self._upcoming_epoch >= epoch < self._settings.epochs
        if (
            self._evaluation is None
            and is_due
            and self._settings.num_validation
            and not self._book.is_finished
            and not self._is_stopped
        ):
            self._evaluation = Evaluation(epoch)
        if self._evaluation and not self._evaluation.cluster_id:
            self._evaluation.cluster_id = self.most_trained(running).cluster_id
        return self._evaluation

    @property
    def _upcoming_epoch(self) -> int:
        """The epoch of the chunk that would be leased next."""
        state = self._book.state()
        return state["requeued"][0][0] if state["requeued"] else state["next_epoch"]

    def _open_lease(self, cluster: ClusterState, lease: Lease | None, num_samples: int) -> OpenLease:
        sizes = cut_batches(num_samples, self._settings.batch_size, self._microbatches)
        first, number = MicrobatchId(self._next_microbatch), LeaseId(self._next_lease)
        self._next_microbatch += len(sizes)
        self._next_lease += 1
        opened = self._open[number] = OpenLease(number, cluster.cluster_id, lease, first, sizes)
        self._open_by_cluster.setdefault(cluster.cluster_id, {})[number] = opened
        return opened

    def _num_open(self, cluster: ClusterState) -> int:
        return len(self._open_by_cluster.get(cluster.cluster_id, ()))

    def _open_of(self, cluster: ClusterState) -> tuple[OpenLease, ...]:
        return tuple(self._open_by_cluster.get(cluster.cluster_id, {}).values())

    def _close(self, lease: OpenLease) -> None:
        del self._open[lease.number]
        of_cluster = self._open_by_cluster[lease.cluster_id]
        del of_cluster[lease.number]
        if not of_cluster:
            del self._open_by_cluster[lease.cluster_id]

    def _set_rates(self, cluster: ClusterState, num_clusters: int) -> list[Send]:
        num_updates = _OPEN_LEASES * self._chunk_batches
        return send_rates(self._settings, cluster, self._of(cluster), num_updates, num_clusters)
