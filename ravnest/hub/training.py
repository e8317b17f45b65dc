"""What clusters train and evaluate: leases, learning rates, the loss of each epoch.

The book counts each sample once. Leases are of whole batches, which travel as microbatches; every update is
of one batch. One cluster, the one that knows most, evaluates: it finishes what it has of
the epoch and takes nothing of the next before, so its weights stand still meanwhile; the others train on.
Epochs here are passes over the data, counted from 1 when shown; those of plans are in ClusterState.
Driven by hub.state.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from ravnest.engine.sampler import Lease, LeaseBook
from ravnest.hub.events import JobSettings, Send, SendFields
from ravnest.hub.granting import grant, tell_rates
from ravnest.hub.members import ClusterState, Members
from ravnest.hub.microbatches import cut_batches
from ravnest.hub.news import EpochDone, Evaluated, Trained
from ravnest.hub.progress import Awaited, Books, Evaluation, Means, OpenLease, Progress
from ravnest.protocol import BatchId, DroppedBatch, LeaseDone, LeaseId, RoundId, StepReport

_OPEN_LEASES = 2  # per cluster: one under way, one ready behind it


class Training:
    """Hands out leases, counts what comes back, evaluates between epochs and at the end."""

    def __init__(self, settings: JobSettings) -> None:
        self.settings = self._settings = settings
        self.num_counted = 0  # samples trained so far, over all epochs
        self._next_lease = self._next_batch = 0
        self.restart()

    def restart(self, books: Books | None = None) -> int:
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
        self._awaited: dict[BatchId, Awaited] = {}
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
    def books(self) -> Books:
        """What is trained, for a checkpoint."""
        leases = self._book.state()
        again = sorted([*((epoch, chunk) for _, epoch, chunk, _ in leases["open"]), *leases["requeued"]])
        leases["open"], leases["requeued"] = [], again
        return Books(self.num_counted, self.num_reported, self.num_updates, self._evaluated, leases)

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
        progress = self._progress.get(cluster.holder)
        return progress is not None and bool(progress.base or progress.num_trained > 0)

    def known(self, cluster: ClusterState) -> int:
        """Return how many samples, of all clusters, one's weights have learned from."""
        return self._of(cluster).num_known

    def most_trained(self, clusters: Iterable[ClusterState]) -> ClusterState:
        """Return the cluster that knows most, and of equals the one that trained most itself."""
        return max(clusters, key=lambda each: (self.known(each), self._of(each).num_trained))

    def base(self, clusters: Iterable[ClusterState]) -> RoundId | None:
        """Return the newest round whose average one of these clusters has, if any; 0: the first weights."""
        bases = (self._of(cluster).base for cluster in clusters)
        return max((base for base in bases if base is not None), default=None)

    def forget_averages(self, clusters: Iterable[ClusterState]) -> None:
        """Note that none of these, nor those before them, keeps the average of a round any more."""
        for progress in (*map(self._of, clusters), *self._progress.values()):
            progress.base = None

    def stand_still(self, clusters: Iterable[ClusterState]) -> None:
        """Note that the hub was away: nobody knows which average who has, and nothing is evaluated."""
        self._evaluation = None
        self.forget_averages(clusters)

    def inherit(self, cluster: ClusterState, holder: str, is_whole: bool) -> None:
        """Let a cluster go on from where another was; it has that one's average if it has all of it."""
        before = self._progress.get(holder) or Progress(0, self._position, base=None)
        version = max(1, before.version)  # 0 is for what the hub gave, the same in all stages
        after = Progress(version, self._position, num_trained=before.num_trained)
        after.base, after.num_known = before.base if is_whole else None, before.num_known
        after.num_alone = before.num_alone if is_whole else 0
        cluster.version, self._progress[cluster.holder] = version, after

    def note_averaged(self, clusters: Iterable[ClusterState], round_id: RoundId) -> None:
        """Note that these clusters share what they know."""
        shared = [self._of(cluster) for cluster in clusters]
        known = max((each.num_known - each.num_alone for each in shared), default=0)
        known += sum(each.num_alone for each in shared)
        for each in shared:
            each.base, each.num_alone, each.num_known = round_id, 0, known

    def release(self, cluster: ClusterState) -> tuple[int, int]:
        """Take back what a cluster that ends was at work on; return those samples, and what it alone knew."""
        given_back, progress = self.give_back(cluster), self._of(cluster)
        progress.base = None  # its nodes may be given other weights before somebody goes on from it
        return given_back, progress.num_alone

    def forget_others(self, holders: Collection[str]) -> None:
        """Forget how far clusters were that are no more, and whose state nobody holds."""
        self._progress = {each: far for each, far in self._progress.items() if each in holders}

    def give_back(self, cluster: ClusterState) -> int:
        """Take back what a cluster that stands still was at work on; return those samples."""
        self._book.release(cluster.holder)
        given_back = [lease for lease in self._open.values() if lease.holder == cluster.holder]
        for lease in given_back:
            del self._open[lease.number]
        self._awaited = {key: of for key, of in self._awaited.items() if of.holder != cluster.holder}
        if self._evaluation and self._evaluation.holder == cluster.holder:
            again = Evaluation(self._evaluation.epoch, self._evaluation.is_last)
            self._evaluation = None if self._is_stopped and not again.is_last else again
        return sum(sum(lease.num_samples) for lease in given_back if lease.lease)

    def awaits(self, batch: BatchId) -> bool:
        """Return whether a batch is trained whose loss was not told yet."""
        return batch in self._awaited

    def is_busy(self, cluster: ClusterState) -> bool:
        """Return whether a cluster is at work on something."""
        return any(lease.holder == cluster.holder for lease in self._open.values())

    def stop(self) -> None:
        """Lease nothing more; what is under way goes on."""
        self._is_stopped = True
        if self._evaluation and not self._evaluation.is_last and not self._evaluation.next_sample:
            self._evaluation = None

    def give_up_leases(self) -> None:
        """Wait no longer for what is under way."""
        assert self._is_stopped
        for lease in self.open_leases:
            self._book.release(lease.holder)
            del self._open[lease.number]
        self._evaluation = None

    def start_evaluation(self) -> None:
        """Evaluate what all epochs made, if there is something to evaluate with."""
        assert self.is_finished, "the last evaluation comes when all is trained"
        if self._settings.num_validation:
            passes = -(-self.num_counted // self._settings.num_samples)
            self._evaluation = Evaluation(passes, is_last=True)

    def fill(self, members: Members) -> list[Send | SendFields]:
        """Grant leases until every cluster that may has two."""
        orders: list[Send | SendFields] = []
        for cluster in members.running:
            if members.is_draining(cluster):
                continue
            while sum(lease.holder == cluster.holder for lease in self._open.values()) < _OPEN_LEASES:
                granted = self._grant(cluster, members)
                if not granted:
                    break
                orders += granted
        return orders

    def take_done(self, cluster: ClusterState, done: LeaseDone) -> list[EpochDone] | str:
        """Count a lease that its root reports; return what is to be told, or why not."""
        open_lease = self._open.get(done.lease)
        if open_lease is None or open_lease.holder != cluster.holder or open_lease.lease is None:
            return f"lease {done.lease} is not open for cluster {cluster.name}"
        num_samples, lease = sum(open_lease.num_samples), open_lease.lease
        if done.num_samples > num_samples:
            return f"lease {done.lease} has {num_samples} samples, not {done.num_samples}"
        reason = self._book.complete(lease.number, cluster.holder)
        assert reason is None, reason
        del self._open[open_lease.number]
        self.num_counted += num_samples
        progress = self._of(cluster)
        progress.num_trained += done.num_samples
        progress.num_alone += done.num_samples
        progress.num_known += done.num_samples
        self._dropped[lease.epoch] += num_samples - done.num_samples
        is_epoch = self._book.num_counted(lease.epoch) == self._settings.num_samples
        return [self._end_epoch(lease.epoch)] if is_epoch else []

    def take_report(self, cluster: ClusterState, report: StepReport) -> list[Evaluated] | str:
        """Take what the leaf says of a batch; return what is to be told, or why not."""
        if report.version > self._next_batch + 1:  # an update is of a batch at least
            return f"cluster {cluster.name} cannot have made {report.version} updates"
        awaited = self._awaited.get(report.batch)
        if awaited is not None and awaited.holder == cluster.holder:
            del self._awaited[report.batch]
            self.num_reported += awaited.num_samples
            self._loss = report.loss
            progress = self._of(cluster)
            if report.version > progress.version:
                self.num_updates += report.version - progress.version
                progress.version, progress.position = report.version, self._position
            self._means[awaited.epoch].add(report, awaited.num_samples)
            return []
        lease = self._find(cluster, report.batch)
        evaluation = self._evaluation
        if lease is None or lease.lease or report.batch in lease.ended or evaluation is None:
            return f"batch {report.batch} of cluster {cluster.name} is not awaited"
        num_samples = lease.num_samples[report.batch - lease.first_batch]
        evaluation.means.add(report, num_samples)
        evaluation.num_samples += num_samples
        return self._end_evaluation_batch(cluster, lease, report.batch)

    def take_dropped(self, cluster: ClusterState, dropped: DroppedBatch) -> list[Evaluated] | str:
        """Note that a batch is lost; training counts it with its lease, evaluation goes on without it."""
        lease = self._find(cluster, dropped.batch)
        if lease is None or dropped.batch in lease.ended:
            return f"batch {dropped.batch} of cluster {cluster.name} is not under way"
        if lease.lease is None:
            return self._end_evaluation_batch(cluster, lease, dropped.batch)
        lease.ended.add(dropped.batch)
        self._awaited.pop(dropped.batch, None)
        return []

    @property
    def _position(self) -> int:
        return self._settings.position(self.num_reported)

    def _of(self, cluster: ClusterState) -> Progress:
        return self._progress.setdefault(cluster.holder, Progress(cluster.version, self._position))

    def _find(self, cluster: ClusterState, batch: BatchId) -> OpenLease | None:
        held = (lease for lease in self._open.values() if lease.holder == cluster.holder)
        return next((lease for lease in held if batch in lease.batches), None)

    def _end_epoch(self, epoch: int) -> EpochDone:
        loss, _ = self._means.pop(epoch, Means()).read()
        self._awaited = {key: of for key, of in self._awaited.items() if of.epoch != epoch}
        return EpochDone(epoch + 1, self._settings.num_samples, self._dropped.pop(epoch), loss)

    def _end_evaluation_batch(
        self, cluster: ClusterState, lease: OpenLease, batch: BatchId
    ) -> list[Evaluated]:
        evaluation = self._evaluation
        assert evaluation is not None
        lease.ended.add(batch)
        if len(lease.ended) == len(lease.num_samples):
            del self._open[lease.number]
        is_last = evaluation.next_sample == self._settings.num_validation
        if not is_last or any(other.lease is None for other in self._open.values()):
            return []
        self._evaluation, self._evaluated = None, evaluation.epoch
        loss, metrics = evaluation.means.read()
        return [Evaluated(evaluation.epoch, cluster.name, evaluation.num_samples, loss, metrics)]

    def _grant(self, cluster: ClusterState, members: Members) -> list[Send | SendFields]:
        evaluation = self._due_evaluation(members.running)
        if evaluation and evaluation.holder == cluster.holder and self._is_time_for(evaluation):
            return self._grant_evaluation(evaluation, cluster, members)
        lease = None if self._is_stopped else self._book.lease(cluster.holder)
        if lease is None:
            return []
        samples = [int(index) for index in self._book.samples(lease)]
        opened = self._open_lease(cluster, lease, len(samples))
        for batch, size in zip(opened.batches, opened.num_samples, strict=True):
            self._awaited[BatchId(batch)] = Awaited(cluster.holder, lease.epoch, size)
        return [*self._set_rates(cluster, len(members.running)), *grant(cluster, opened, samples, members)]

    def _grant_evaluation(
        self, evaluation: Evaluation, cluster: ClusterState, members: Members
    ) -> list[Send | SendFields]:
        num_counted = self._book.num_counted(evaluation.epoch - 1)
        is_trained = evaluation.is_last or num_counted == self._settings.num_samples
        is_busy = any(lease.holder == cluster.holder and lease.lease for lease in self._open.values())
        num_left = self._settings.num_validation - evaluation.next_sample
        if is_busy or not is_trained or not num_left:
            return []
        num_samples = min(num_left, self._chunk_batches * self._settings.batch_size)
        samples = range(evaluation.next_sample, evaluation.next_sample + num_samples)
        evaluation.next_sample += num_samples
        return grant(cluster, self._open_lease(cluster, None, num_samples), samples, members)

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
        if self._evaluation and not self._evaluation.holder:
            self._evaluation.holder = self.most_trained(running).holder
        return self._evaluation

    @property
    def _upcoming_epoch(self) -> int:
        """The epoch of the chunk that would be leased next."""
        state = self._book.state()
        return state["requeued"][0][0] if state["requeued"] else state["next_epoch"]

    def _open_lease(self, cluster: ClusterState, lease: Lease | None, num_samples: int) -> OpenLease:
        sizes = cut_batches(num_samples, self._settings.batch_size, self._microbatches)
        first, number = BatchId(self._next_batch), LeaseId(self._next_lease)
        self._next_batch += len(sizes)
        self._next_lease += 1
        self._open[number] = OpenLease(number, cluster.holder, lease, first, sizes)
        return self._open[number]

    def _set_rates(self, cluster: ClusterState, num_clusters: int) -> list[Send]:
        num_updates = _OPEN_LEASES * self._chunk_batches
        return tell_rates(self._settings, cluster, self._of(cluster), num_updates, num_clusters)
