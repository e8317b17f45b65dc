"""Liveness: finds clusters that report nothing, and tells nodes that are gone from a hub that is cut off.

A cluster that trains may be silent for a minute, or for the time of twenty batches. A cluster that is built
gets the time of ten downloads of a stage. A running cluster counts as heard during a blocking round, in which
all clusters stand still. The monitors only conclude; the coordinator asks the nodes of a silent cluster.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.events import ClusterSilent, JobSettings
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.ids import NodeId

_BATCHES = 20.0  # a busy cluster may be silent for as long as these take
_FETCHES = 10.0  # downloads of a stage: so much more silence is allowed while it is built
_LEAST_TOGETHER, _TIMES_AS_MANY = 3, 3  # all but a few: so many, and so many times as many as the others


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


@dataclass(frozen=True, slots=True)
class Absence:
    """A node whose link is lost, and until when it is waited for."""

    reason: str
    since: float
    back_by: float
    has_more_time: bool = False  # than one that was lost alone


class OutageMonitor:
    """Feed it every link that is lost or comes back; ask it at `due` who is gone.

    A node whose link is lost has a moment to come back. If nobody at all is heard, the fault is probably the
    hub's: it is cut off, and waits long for all. If all but a few were lost together, they have as long as
    after a restart of the hub, also when some are back. Times are of the program's clock, which goes on while
    the hub is cut off.
    """

    def __init__(self, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._timeouts = timeouts
        self._absent: dict[NodeId, Absence] = {}
        self._lost_at: dict[NodeId, float] = {}  # the last time, of those that are back, too
        self.is_cut_off = False  # nobody is heard, and all are waited for
        self._settled_by = 0.0  # until then links that are lost again belong to the last outage

    @property
    def absent(self) -> Collection[NodeId]:
        """The nodes that are waited for."""
        return self._absent.keys()

    @property
    def due(self) -> float | None:
        """When to ask next who is gone, if nothing else happens."""
        return min((absence.back_by for absence in self._absent.values()), default=None)

    def record_loss(self, node: NodeId, reason: str, now: float) -> None:
        """Wait a moment for a node whose link is lost, or longer just after the hub was cut off."""
        back_by = max(now + self._timeouts.grace_seconds, self._settled_by)
        self._absent[node] = Absence(reason, now, back_by)
        self._lost_at[node] = now

    def record_return(self, node: NodeId, now: float) -> None:
        """Wait no longer for a node; its line is that of the others, who will find the hub soon."""
        self._absent.pop(node, None)
        self._end_cut_off(now, self._timeouts.return_seconds)

    def record_arrival(self, now: float) -> None:
        """Note that a newcomer is heard; if only one node is missing, it was probably not the hub's line."""
        is_one = len(self._absent) == 1
        self._end_cut_off(now, self._timeouts.grace_seconds if is_one else self._timeouts.return_seconds)

    def record_stop(self, now: float) -> None:
        """Note that the job is to end: whoever is missing is not waited for as long."""
        self._end_cut_off(now, self._timeouts.return_seconds)

    def forget(self, node: NodeId) -> None:
        """Wait no longer for a node that has gone."""
        self._absent.pop(node, None)
        self._lost_at.pop(node, None)
        self.is_cut_off &= bool(self._absent)

    def find_gone(self, here: Collection[NodeId], can_wait: bool, now: float) -> list[tuple[NodeId, Absence]]:
        """Return the nodes that are waited for no longer; `can_wait` says that they have what was trained."""
        late = [node for node, absence in self._absent.items() if now >= absence.back_by]
        if late and can_wait and not here and not self.is_cut_off:
            self._wait(self._absent, now + self._timeouts.cut_off_seconds)
            self.is_cut_off = True
            return []
        if can_wait:
            fallen = [node for node in late if self._fell_with_most(node, here)]
            for node in fallen:
                self._wait([node], self._absent[node].since + self._timeouts.return_seconds)
            late = [node for node in late if node not in fallen]
        gone = [(node, self._absent[node]) for node in late]
        for node in late:
            self.forget(node)
        return gone

    def _fell_with_most(self, node: NodeId, here: Collection[NodeId]) -> bool:
        """Return whether a node was lost together with all others, or all but a few; some may be back."""
        absence = self._absent[node]
        if absence.has_more_time:
            return False
        times = self._lost_at.items()
        together = {x for x, at in times if abs(at - absence.since) <= self._timeouts.together_seconds}
        others = [other for other in here if other not in together]
        return len(together) >= (max(_LEAST_TOGETHER, _TIMES_AS_MANY * len(others)) if others else 2)

    def _wait(self, nodes: Collection[NodeId], back_by: float) -> None:
        for node in tuple(nodes):
            self._absent[node] = replace(self._absent[node], back_by=back_by, has_more_time=True)

    def _end_cut_off(self, now: float, seconds: float) -> None:
        if self.is_cut_off:
            self._settled_by = now + seconds
            self._wait(self._absent, self._settled_by)
            self.is_cut_off = False
