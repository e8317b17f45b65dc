"""Batches that clusters train together, in exact mode: the leases of their shares, until they are summed."""

from collections import deque
from dataclasses import dataclass, field

from ravnest.hub.coordinator.leases import OpenLease
from ravnest.hub.coordinator.phases import ClusterPhase
from ravnest.hub.coordinator.placement import ClusterState, Placement

_MOST_BATCHES = 2  # one that is trained, one that waits


@dataclass(frozen=True, slots=True)
class ExactBatch:
    """A batch whose gradients clusters are to sum: the leases of those that train a share of it."""

    rate: float
    leases: dict[str, OpenLease]  # by cluster_id; without those given back
    num_trained: dict[str, int] = field(default_factory=dict)  # samples of leases that are done

    def num_microbatches(self, cluster: ClusterState) -> int:
        """Return how many microbatches the share of a cluster has; none, if it has no share."""
        lease = self.leases.get(cluster.cluster_id)
        return 0 if lease is None else len(lease.num_samples)


class ExactBatches:
    """Batches that are granted and not yet summed, oldest first."""

    def __init__(self) -> None:
        self._batches: deque[ExactBatch] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def first(self) -> ExactBatch | None:
        """The batch whose gradients are summed next."""
        return self._batches[0] if self._batches else None

    def may_add(self, placement: Placement) -> bool:
        """Return whether clusters may get another batch before the last ones are summed.

        A cluster without a share in a batch would begin the next one too early. None trains while another
        is being built, which begins with the weights the others have now.
        """
        running = {each.cluster_id for each in placement.running}
        is_building = any(each.phase is ClusterPhase.BUILDING for each in placement.clusters)
        is_shared_by_all = all(batch.leases.keys() == running for batch in self._batches)
        return bool(running) and not is_building and is_shared_by_all and len(self) < _MOST_BATCHES

    def add(self, batch: ExactBatch) -> None:
        """Add a batch that is granted."""
        self._batches.append(batch)

    def release(self, cluster: ClusterState) -> None:
        """Go on without the shares of a cluster that gives its leases back."""
        for batch in self._batches:
            batch.leases.pop(cluster.cluster_id, None)
        self._batches = deque(batch for batch in self._batches if batch.leases)

    def find(self, lease: OpenLease) -> ExactBatch | None:
        """Return the batch that a lease is a share of."""
        return next((each for each in self._batches if each.leases.get(lease.cluster_id) is lease), None)

    def is_waiting(self, cluster: ClusterState) -> bool:
        """Return whether a cluster has done its share of the first batch, and waits for the others."""
        return self.first is not None and cluster.cluster_id in self.first.num_trained

    def has_share(self, cluster: ClusterState) -> bool:
        """Return whether a cluster has a share that is in no weights yet."""
        return any(cluster.cluster_id in each.leases for each in self._batches)

    def take(self, count: int | None = None) -> list[ExactBatch]:
        """Take out so many of the oldest batches, or all."""
        taken = [*self._batches][:count]
        self._batches = deque([*self._batches][len(taken) :])
        return taken
