"""What can be asked of the books of a job: which leases are open, which epochs are under way, who is busy."""

from bisect import bisect_right
from collections import defaultdict, deque

from ravnest.hub.coordinator.evaluations import Evaluation, Means
from ravnest.hub.coordinator.events import JobSettings
from ravnest.hub.coordinator.leases import LeaseBook, OpenLease, OpenLeases
from ravnest.hub.coordinator.notices import Trained
from ravnest.hub.coordinator.placement import ClusterState
from ravnest.hub.coordinator.progress import ExactBatches
from ravnest.ids import LeaseId, MicrobatchId, NodeId


class LeaseQueries:
    """What can be asked of a ledger, and changes nothing."""

    _settings: JobSettings
    _open: OpenLeases
    _book: LeaseBook
    _awaited: list[OpenLease]
    _evaluation: Evaluation | None
    _means: defaultdict[int, Means]
    _unconfirmed: dict[NodeId, deque[OpenLease]]
    _loss: float | None
    exact: ExactBatches
    num_counted: int

    def find_open(self, number: LeaseId) -> OpenLease | None:
        """Return the lease of this number, if it is under way and of samples to be trained."""
        found = self._open.find(number)
        return found if found is not None and found.lease is not None else None

    def find_training(self, microbatch: MicrobatchId) -> OpenLease | None:
        """Return the lease under which a microbatch is or was lately trained, in an epoch under way."""
        number = bisect_right(self._awaited, microbatch, key=lambda lease: lease.first_microbatch)
        lease = self._awaited[number - 1] if number else None
        return lease if lease is not None and microbatch in lease.microbatches else None

    def find_awaited(self, microbatch: MicrobatchId) -> OpenLease | None:
        """Return the open lease under which a microbatch is trained."""
        lease = self.find_training(microbatch)
        return None if lease is None else self.find_open(lease.number)

    def find_evaluation(self, cluster: ClusterState, microbatch: MicrobatchId) -> OpenLease | None:
        """Return the open lease under which a cluster evaluates a microbatch."""
        lease = self._find(cluster, microbatch)
        return lease if lease is not None and lease.lease is None and self._evaluation is not None else None

    @property
    def epochs_under_way(self) -> set[int]:
        """The epochs, from 0, that are begun and not counted whole."""
        return self._book.under_way

    @property
    def num_begun(self) -> int:
        """How many epochs are leased to their end, or begun."""
        return self._book.num_begun

    def is_under_way(self, epoch: int) -> bool:
        """Return whether an epoch, from 0, is begun and not over."""
        return 0 < self._book.num_counted(epoch) < self._settings.epoch_size(epoch) or any(
            lease.lease is not None and lease.lease.epoch == epoch for lease in self._awaited
        )

    def ends_epoch(self, number: LeaseId) -> bool:
        """Return whether an epoch is over when this lease is done."""
        opened = self._open.find(number)
        if opened is None or opened.lease is None:
            return False
        num_counted = self._book.num_counted(opened.lease.epoch) + sum(opened.num_samples)
        return num_counted == self._settings.epoch_size(opened.lease.epoch)

    def is_busy(self, cluster: ClusterState) -> bool:
        """Return whether a cluster has work: one that has done its share of a batch waits for the others."""
        return self._open.has(cluster.cluster_id) and not self.exact.is_waiting(cluster)

    def is_training(self, cluster: ClusterState) -> bool:
        """Return whether a cluster has begun samples that are to be trained."""
        return any(lease.lease is not None for lease in self._open.of(cluster.cluster_id))

    def is_unfinished(self, cluster: ClusterState) -> bool:
        """Return whether a cluster has a lease under way, or a share that is in no weights yet."""
        return self._open.has(cluster.cluster_id) or self.exact.has_share(cluster)

    def _find(self, cluster: ClusterState, microbatch: MicrobatchId) -> OpenLease | None:
        held = (*self._open.of(cluster.cluster_id), *self._open.ahead_of(cluster.cluster_id))
        return next((lease for lease in held if microbatch in lease.microbatches), None)

    @property
    def open_leases(self) -> tuple[OpenLease, ...]:
        """Leases that are begun and not done, as far as is known; oldest first."""
        return self._open.begun

    @property
    def leases_ahead(self) -> tuple[OpenLease, ...]:
        """Leases that clusters have and do not begin yet."""
        begun = {lease.number for lease in self._open.begun}
        return tuple(lease for lease in self._open.all if lease.number not in begun)

    @property
    def trained(self) -> Trained:
        """How far the job is."""
        epoch = min(self.num_counted // self._settings.num_samples + 1, self._settings.epochs)
        return Trained(self.num_counted, self._settings.num_total, epoch, self._loss)

    @property
    def means(self) -> dict[int, Means]:
        """What was reported of the epochs that are under way, from 0."""
        return dict(self._means)

    @property
    def num_granted(self) -> int:
        """How many microbatches were granted so far."""
        return self._open.num_microbatches

    @property
    def awaited_leases(self) -> set[LeaseId]:
        """Leases of which reports count: open ones, and all of epochs that are under way."""
        return {lease.number for lease in (*self._awaited, *self._open.all)}

    def num_unconfirmed(self, node: NodeId) -> int:
        """Return how many samples count on the word of this root alone."""
        return sum(sum(each.num_samples) for each in self._unconfirmed.get(node, ()))

    def last_counted(self, node: NodeId) -> OpenLease | None:
        """Return the last lease that counts on the word of this root alone."""
        counted = self._unconfirmed.get(node)
        return counted[-1] if counted else None

    def samples_of(self, lease: OpenLease, microbatch: MicrobatchId) -> tuple[int, ...]:
        """Return the samples of a microbatch of an open lease."""
        index = microbatch - lease.first_microbatch
        start, size = sum(lease.num_samples[:index]), lease.num_samples[index]
        if lease.lease is None:
            return tuple(range(lease.first_sample + start, lease.first_sample + start + size))
        return tuple(int(sample) for sample in self._book.samples(lease.lease)[start : start + size])

    @property
    def _upcoming_epoch(self) -> int:
        """The epoch of the samples that would be leased next."""
        upcoming = self._book.upcoming
        return self._settings.epochs if upcoming is None else upcoming[0]
