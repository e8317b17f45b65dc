"""Liveness: finds clusters that have something to do and report nothing.

A cluster that trains may be silent for a minute, or for the time of twenty batches. A cluster that is built
gets the time of ten downloads of a stage. A running cluster counts as heard during a blocking round, in which
all clusters stand still. The monitor only concludes; the coordinator asks the nodes of a silent cluster.
"""

from collections.abc import Callable

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.events import ClusterSilent, JobSettings
from ravnest.hub.coordinator.placement import ClusterState, Placement

_BATCHES = 20.0  # a busy cluster may be silent for as long as these take
_FETCHES = 10.0  # downloads of a stage: so much more silence is allowed while it is built


class LivenessMonitor:
    """Knows when each cluster was last heard of."""

    def __init__(self, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._timeouts = timeouts
        self._heard_at: dict[str, float] = {}  # of clusters that have something to do, by cluster_id
        self._patience: dict[str, float] = {}  # seconds, of those that are not asked yet

    @property
    def due(self) -> float | None:
        """When the first cluster has been silent for too long, if nothing is heard of it."""
        return min((self._heard_at[each] + seconds for each, seconds in self._patience.items()), default=None)

    def hear(self, cluster_id: str, now: float) -> None:
        """Note that a cluster does something."""
        self._heard_at[cluster_id] = now

    def find_silent(
        self,
        placement: Placement,
        is_busy: Callable[[ClusterState], bool],
        has_asked: Callable[[str], bool],
        settings: JobSettings,
        now: float,
    ) -> ClusterSilent | None:
        """Return a cluster that is silent for too long; one that is built is given the time again."""
        rate = placement.outlook.samples_per_second / max(1, len(placement.clusters))
        batch_seconds = settings.batch_size / max(rate, 1e-9)
        training = {each.cluster_id: each for each in placement.running if is_busy(each)}
        building = {
            each.cluster_id: each for each in placement.clusters if each.unready and not each.is_broken
        }
        at_work = training | building
        self._heard_at = {cluster_id: self._heard_at.get(cluster_id, now) for cluster_id in at_work}
        self._patience = {
            cluster_id: self._find_patience(cluster, placement, settings.most_snapshot_bytes, batch_seconds)
            for cluster_id, cluster in at_work.items()
            if not has_asked(cluster_id)
        }
        patience = self._patience.items()
        silent = (cluster_id for cluster_id, most in patience if now >= self._heard_at[cluster_id] + most)
        cluster_id = next(silent, None)
        if cluster_id is None:
            return None
        found = ClusterSilent(cluster_id, self._heard_at[cluster_id], now)
        if cluster_id in building:
            self._heard_at[cluster_id] = now  # perhaps no node is to blame
        return found

    def _find_patience(
        self, cluster: ClusterState, placement: Placement, most_bytes: int, batch_seconds: float
    ) -> float:
        if not cluster.unready:
            return max(self._timeouts.silent_work_seconds, _BATCHES * batch_seconds)
        found = (placement.membership.find(name) for name in cluster.nodes)
        slowest = min((each.node.download_bytes_per_second for each in found if each), default=1.0)
        return self._timeouts.silent_build_seconds + _FETCHES * most_bytes / slowest
