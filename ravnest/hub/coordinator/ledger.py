"""How far things are: what a cluster is at work on, what it knows, what an evaluation has found.

The records that hub.training keeps its books in.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ravnest.hub.coordinator.events import JobSettings, Send, SendFields
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
    StepReport,
)

_NONE = RoundId(0)  # before the first round
_MOST_METRICS = 256  # more names than these are somebody's who makes them up


@dataclass(frozen=True, slots=True)
class OpenLease:
    """Microbatches a cluster is at work on; without a lease of the book it evaluates."""

    number: LeaseId
    cluster_id: str
    lease: Lease | None
    first_microbatch: MicrobatchId
    num_samples: tuple[int, ...]
    ended: set[MicrobatchId] = field(default_factory=set)  # dropped, or evaluated

    @property
    def microbatches(self) -> range:
        """The numbers of its microbatches."""
        return range(self.first_microbatch, self.first_microbatch + len(self.num_samples))


@dataclass(frozen=True, slots=True)
class Awaited:
    """A microbatch whose loss the leaf has not told yet."""

    cluster_id: str
    epoch: int
    num_samples: int


@dataclass(slots=True)
class Means:
    """Means weighted by samples; what was no number does not count."""

    sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, report: StepReport, num_samples: int) -> None:
        """Take what a leaf says of a microbatch of so many samples."""
        for name, value in (("loss", report.loss), *report.metrics[:_MOST_METRICS]):
            if name not in self.sums and len(self.sums) > _MOST_METRICS:
                continue
            total, weight = self.sums.get(name, (0.0, 0))
            if value is not None:
                total, weight = total + value * num_samples, weight + num_samples
            self.sums[name] = (total, weight)

    def read(self) -> tuple[float | None, Metrics]:
        """Return the mean loss, and the means of the metrics."""
        means = {name: total / weight if weight else None for name, (total, weight) in self.sums.items()}
        return means.pop("loss", None), tuple(means.items())


@dataclass(slots=True)
class Evaluation:
    """One way through the validation samples, by one cluster."""

    epoch: int  # passes done
    is_last: bool = False
    cluster_id: str = ""
    next_sample: int = 0
    num_samples: int = 0
    means: Means = field(default_factory=Means)


@dataclass(slots=True)
class Progress:
    """How far a cluster is, to tell it rates ahead of its updates."""

    version: int
    position: int = 0  # batches that all clusters had trained when it came to that version
    rates: dict[int, float] = field(default_factory=dict)  # by the update they hold from, as it was told
    num_trained: int = 0  # samples
    num_alone: int = 0  # of them since the last round
    num_samples_seen: int = 0  # samples of all clusters that its weights have learned from
    anchor_round: RoundId | None = (
        _NONE  # the round whose average it began from; None: it has no such average
    )


def grant_lease(
    cluster: ClusterState, lease: OpenLease, samples: Sequence[int], placement: Placement
) -> list[Send | SendFields]:
    """Return the orders for a cluster's lease on these samples."""
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
    """Return the rates of so many updates from now on, where the cluster has others."""
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


_OPEN_LEASES = 2  # per cluster: one under way, one ready behind it


class Ledger:
    """Hands out leases, counts what comes back, evaluates between epochs and at the end."""

    def __init__(self, settings: JobSettings) -> None:
        self.settings = self._settings = settings
        self.num_counted = 0  # samples trained so far, over all epochs
        self._next_lease = self._next_microbatch = 0
        self.restart()

    def restart(self, books: LedgerState | None = None) -> int:
        """Begin from the first weights, or from a checkpoint; return the samples whose training is lost."""
        settings = self._settings
        chunk = settings.chunk_batches * settings.batch_size
        lost, self.num_counted = self.num_counted, books.num_counted if books else 0
        self._microbatches, self._chunk_batches = 1, settings.chunk_batches
        if books is None:
            self._book = LeaseBook(settings.num_samples, chunk, settings.epochs, settings.seed)
        else:
            self._book = LeaseBook.restore(books.leases)
            self._chunk_batches = books.leases["chunk_size"] // settings.batch_size
        self._open: dict[LeaseId, OpenLease] = {}
        self._progress: dict[str, Progress] = {}
        self._awaited: dict[MicrobatchId, Awaited] = {}
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
        """Follow a first plan: batches travel in so many pieces, and so many of them are leased at once."""
        self._microbatches = microbatches
        if not self.num_counted:
            self._chunk_batches = chunk_batches
            chunk, settings = chunk_batches * self._settings.batch_size, self._settings
            self._book = LeaseBook(settings.num_samples, chunk, settings.epochs, settings.seed)

    @property
    def books(self) -> LedgerState:
        """What is trained, for a checkpoint."""
        leases = self._book.state()
        again = sorted([*((epoch, chunk) for _, epoch, chunk, _ in leases["open"]), *leases["requeued"]])
        leases["open"], leases["requeued"] = [], again
        return LedgerState(self.num_counted, self.num_reported, self.num_updates, self._evaluated, leases)

    @property
    def is_finished(self) -> bool:
        """Whether all is counted, or nothing more will be, and no evaluation is under way."""
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
        """What clusters are at work on, oldest first."""
        return tuple(self._open.values())

    def knows(self, cluster: ClusterState) -> bool:
        """Return whether a cluster's weights hold something of what was trained."""
        progress = self._progress.get(cluster.cluster_id)
        return progress is not None and bool(progress.anchor_round or progress.num_trained > 0)

    def samples_seen(self, cluster: ClusterState) -> int:
        """Return how many samples, of all clusters, one's weights have learned from."""
        return self._of(cluster).num_samples_seen

    def most_trained(self, clusters: Iterable[ClusterState]) -> ClusterState:
        """Return the cluster that knows most, and of equals the one that trained most itself."""
        return max(clusters, key=lambda each: (self.samples_seen(each), self._of(each).num_trained))

    def anchor_round(self, clusters: Iterable[ClusterState]) -> RoundId | None:
        """Return the newest round whose average one of these clusters has, if any; 0: the first weights."""
        anchor_rounds = (self._of(cluster).anchor_round for cluster in clusters)
        return max((anchor_round for anchor_round in anchor_rounds if anchor_round is not None), default=None)

    def forget_averages(self, clusters: Iterable[ClusterState]) -> None:
        """Note that none of these, nor those before them, keeps the average of a round any more."""
        for progress in (*map(self._of, clusters), *self._progress.values()):
            progress.anchor_round = None

    def stand_still(self, clusters: Iterable[ClusterState]) -> None:
        """Note that the hub was away: nobody knows which average who has, and nothing is evaluated."""
        self._evaluation = None
        self.forget_averages(clusters)

    def inherit(self, cluster: ClusterState, cluster_id: str, is_whole: bool) -> None:
        """Let a cluster go on from where another was; it has that one's average if it has all of it."""
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
        """Note that these clusters share what they know."""
        shared = [self._of(cluster) for cluster in clusters]
        seen = max((each.num_samples_seen - each.num_alone for each in shared), default=0)
        seen += sum(each.num_alone for each in shared)
        for each in shared:
            each.anchor_round, each.num_alone, each.num_samples_seen = round_id, 0, seen

    def release(self, cluster: ClusterState) -> tuple[int, int]:
        """Take back what a cluster that ends was at work on; return those samples, and what it alone knew."""
        given_back, progress = self.give_back(cluster), self._of(cluster)
        progress.anchor_round = None  # its nodes may be given other weights before somebody goes on from it
        return given_back, progress.num_alone

    def forget_others(self, cluster_ids: Collection[str]) -> None:
        """Forget how far clusters were that are no more, and whose state nobody holds."""
        self._progress = {each: far for each, far in self._progress.items() if each in cluster_ids}

    def give_back(self, cluster: ClusterState) -> int:
        """Take back what a cluster that stands still was at work on; return those samples."""
        self._book.release(cluster.cluster_id)
        given_back = [lease for lease in self._open.values() if lease.cluster_id == cluster.cluster_id]
        for lease in given_back:
            del self._open[lease.number]
        self._awaited = {key: of for key, of in self._awaited.items() if of.cluster_id != cluster.cluster_id}
        if self._evaluation and self._evaluation.cluster_id == cluster.cluster_id:
            again = Evaluation(self._evaluation.epoch, self._evaluation.is_last)
            self._evaluation = None if self._is_stopped and not again.is_last else again
        return sum(sum(lease.num_samples) for lease in given_back if lease.lease)

    def awaits(self, microbatch: MicrobatchId) -> bool:
        """Return whether a microbatch is trained whose loss was not told yet."""
        return microbatch in self._awaited

    def is_busy(self, cluster: ClusterState) -> bool:
        """Return whether a cluster is at work on something."""
        return any(lease.cluster_id == cluster.cluster_id for lease in self._open.values())

    def stop(self) -> None:
        """Lease nothing more; what is under way goes on."""
        self._is_stopped = True
        if self._evaluation and not self._evaluation.is_last and not self._evaluation.next_sample:
            self._evaluation = None

    def give_up_leases(self) -> None:
        """Wait no longer for what is under way."""
        assert self._is_stopped
        for lease in self.open_leases:
            self._book.release(lease.cluster_id)
            del self._open[lease.number]
        self._evaluation = None

    def start_evaluation(self) -> None:
        """Evaluate what all epochs made, if there is something to evaluate with."""
        assert self.is_finished, "the last evaluation comes when all is trained"
        if self._settings.num_validation:
            passes = -(-self.num_counted // self._settings.num_samples)
            self._evaluation = Evaluation(passes, is_last=True)

    def fill(self, placement: Placement) -> list[Send | SendFields]:
        """Grant leases until every cluster that may has two."""
        orders: list[Send | SendFields] = []
        for cluster in placement.running:
            if cluster.phase is ClusterPhase.DRAINING:
                continue
            while sum(lease.cluster_id == cluster.cluster_id for lease in self._open.values()) < _OPEN_LEASES:
                granted = self._grant(cluster, placement)
                if not granted:
                    break
                orders += granted
        return orders

    def take_done(self, cluster: ClusterState, done: LeaseDone) -> list[EpochDone] | str:
        """Count a lease that its root reports; return what is to be told, or why not."""
        open_lease = self._open.get(done.lease)
        if open_lease is None or open_lease.cluster_id != cluster.cluster_id or open_lease.lease is None:
            return f"lease {done.lease} is not open for cluster {cluster.name}"
        num_samples, lease = sum(open_lease.num_samples), open_lease.lease
        if done.num_samples > num_samples:
            return f"lease {done.lease} has {num_samples} samples, not {done.num_samples}"
        reason = self._book.complete(lease.number, cluster.cluster_id)
        assert reason is None, reason
        del self._open[open_lease.number]
        self.num_counted += num_samples
        progress = self._of(cluster)
        progress.num_trained += done.num_samples
        progress.num_alone += done.num_samples
        progress.num_samples_seen += done.num_samples
        self._dropped[lease.epoch] += num_samples - done.num_samples
        is_epoch = self._book.num_counted(lease.epoch) == self._settings.num_samples
        return [self._end_epoch(lease.epoch)] if is_epoch else []

    def take_report(self, cluster: ClusterState, report: StepReport) -> list[Evaluated] | str:
        """Take what the leaf says of a microbatch; return what is to be told, or why not."""
        if report.version > self._next_microbatch + 1:  # an update is of a microbatch at least
            return f"cluster {cluster.name} cannot have made {report.version} updates"
        awaited = self._awaited.get(report.microbatch)
        if awaited is not None and awaited.cluster_id == cluster.cluster_id:
            del self._awaited[report.microbatch]
            self.num_reported += awaited.num_samples
            self._loss = report.loss
            progress = self._of(cluster)
            if report.version > progress.version:
                self.num_updates += report.version - progress.version
                progress.version, progress.position = report.version, self._position
            self._means[awaited.epoch].add(report, awaited.num_samples)
            return []
        lease = self._find(cluster, report.microbatch)
        evaluation = self._evaluation
        if lease is None or lease.lease or report.microbatch in lease.ended or evaluation is None:
            return f"microbatch {report.microbatch} of cluster {cluster.name} is not awaited"
        num_samples = lease.num_samples[report.microbatch - lease.first_microbatch]
        evaluation.means.add(report, num_samples)
        evaluation.num_samples += num_samples
        return self._end_evaluation_microbatch(cluster, lease, report.microbatch)

    def take_dropped(self, cluster: ClusterState, dropped: DroppedMicrobatch) -> list[Evaluated] | str:
        """Note that a microbatch is lost; training counts it, evaluation goes on without it."""
        lease = self._find(cluster, dropped.microbatch)
        if lease is None or dropped.microbatch in lease.ended:
            return f"microbatch {dropped.microbatch} of cluster {cluster.name} is not under way"
        if lease.lease is None:
            return self._end_evaluation_microbatch(cluster, lease, dropped.microbatch)
        lease.ended.add(dropped.microbatch)
        self._awaited.pop(dropped.microbatch, None)
        return []

    @property
    def _position(self) -> int:
        return self._settings.position(self.num_reported)

    def _of(self, cluster: ClusterState) -> Progress:
        return self._progress.setdefault(cluster.cluster_id, Progress(cluster.version, self._position))

    def _find(self, cluster: ClusterState, microbatch: MicrobatchId) -> OpenLease | None:
        held = (lease for lease in self._open.values() if lease.cluster_id == cluster.cluster_id)
        return next((lease for lease in held if microbatch in lease.microbatches), None)

    def _end_epoch(self, epoch: int) -> EpochDone:
        loss, _ = self._means.pop(epoch, Means()).read()
        self._awaited = {key: of for key, of in self._awaited.items() if of.epoch != epoch}
        return EpochDone(epoch + 1, self._settings.num_samples, self._dropped.pop(epoch), loss)

    def _end_evaluation_microbatch(
        self, cluster: ClusterState, lease: OpenLease, microbatch: MicrobatchId
    ) -> list[Evaluated]:
        evaluation = self._evaluation
        assert evaluation is not None
        lease.ended.add(microbatch)
        if len(lease.ended) == len(lease.num_samples):
            del self._open[lease.number]
        is_last = evaluation.next_sample == self._settings.num_validation
        if not is_last or any(other.lease is None for other in self._open.values()):
            return []
        self._evaluation, self._evaluated = None, evaluation.epoch
        loss, metrics = evaluation.means.read()
        return [Evaluated(evaluation.epoch, cluster.name, evaluation.num_samples, loss, metrics)]

    def _grant(self, cluster: ClusterState, placement: Placement) -> list[Send | SendFields]:
        evaluation = self._due_evaluation(placement.running)
        if evaluation and evaluation.cluster_id == cluster.cluster_id and self._is_time_for(evaluation):
            return self._grant_evaluation(evaluation, cluster, placement)
        lease = None if self._is_stopped else self._book.lease(cluster.cluster_id)
        if lease is None:
            return []
        samples = [int(index) for index in self._book.samples(lease)]
        opened = self._open_lease(cluster, lease, len(samples))
        for microbatch, size in zip(opened.microbatches, opened.num_samples, strict=True):
            self._awaited[MicrobatchId(microbatch)] = Awaited(cluster.cluster_id, lease.epoch, size)
        return [
            *self._set_rates(cluster, len(placement.running)),
            *grant_lease(cluster, opened, samples, placement),
        ]

    def _grant_evaluation(
        self, evaluation: Evaluation, cluster: ClusterState, placement: Placement
    ) -> list[Send | SendFields]:
        num_counted = self._book.num_counted(evaluation.epoch - 1)
        is_trained = evaluation.is_last or num_counted == self._settings.num_samples
        is_busy = any(lease.cluster_id == cluster.cluster_id and lease.lease for lease in self._open.values())
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
        self._open[number] = OpenLease(number, cluster.cluster_id, lease, first, sizes)
        return self._open[number]

    def _set_rates(self, cluster: ClusterState, num_clusters: int) -> list[Send]:
        num_updates = _OPEN_LEASES * self._chunk_batches
        return send_rates(self._settings, cluster, self._of(cluster), num_updates, num_clusters)
