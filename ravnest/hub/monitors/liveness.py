"""Clusters that have work and say nothing: somebody is here, but does nothing.

A peer's link lives beside its work, so a stage that hangs would hold its cluster for ever. When nothing is
heard of one that trains for long, each of its nodes is asked for a snapshot, which only who works can make:
whoever does not answer goes, and a cluster in which all do is built anew. Who gets ready is given the time
that fetching a stage takes, ten times over.
"""

from collections.abc import Callable

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.events import JobSettings, Send
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.hub.coordinator.snapshots import SnapshotDesk, SnapshotPurpose
from ravnest.ids import NodeId

_BATCHES = 20.0  # a busy cluster may be silent for as long as these take
_FETCHES = 10.0  # downloads of a stage: so much more silence is allowed while it is built

IDLE = "it does no work: nothing is heard of its stage, though its link lives"


class LivenessMonitor:
    """Hears every word of a stage; what it asks for is numbered like all snapshots."""

    def __init__(
        self,
        placement: Placement,
        desk: SnapshotDesk,
        find_lazy: Callable[[ClusterState], list[NodeId]],
        timeouts: HubTimeouts = TIMEOUTS.hub,
    ) -> None:
        self._timeouts = timeouts
        self._placement, self._desk = placement, desk
        self._find_lazy = find_lazy  # who a cluster that gets ready waits for
        self._heard_at: dict[str, float] = {}  # of clusters at work, by cluster_id
        self._quiet_until: dict[str, float] = {}  # of those that are not asked yet
        self._answer_by: dict[str, float] = {}  # of those that are
        self._asked: dict[int, tuple[str, NodeId]] = {}  # who has not answered yet

    @property
    def due(self) -> float | None:
        """When somebody is to be asked, or has not answered."""
        return min((*self._quiet_until.values(), *self._answer_by.values()), default=None)

    def record(self, cluster: ClusterState, now: float) -> None:
        """Note that a cluster works."""
        self._heard_at[cluster.cluster_id] = now
        self._answer_by.pop(cluster.cluster_id, None)

    def record_answer(self, number: int) -> None:
        """Record that a node that was asked has made its snapshot."""
        del self._asked[number]

    def ask(
        self,
        is_busy: Callable[[ClusterState], bool],
        settings: JobSettings,
        samples_per_second: float,
        now: float,
    ) -> list[Send]:
        """Ask the nodes of clusters of which nothing was heard for long; the rate is that of one cluster."""
        batch_seconds = settings.batch_size / max(samples_per_second, 1e-9)
        training = {each.cluster_id: each for each in self._placement.running if is_busy(each)}
        building = {
            each.cluster_id: each for each in self._placement.clusters if each.unready and not each.is_broken
        }
        self._heard_at = {
            cluster_id: self._heard_at.get(cluster_id, now) for cluster_id in (*training, *building)
        }
        self._answer_by = {each: until for each, until in self._answer_by.items() if each in training}
        self._asked = {n: asked for n, asked in self._asked.items() if asked[0] in self._answer_by}
        self._desk.withdraw(SnapshotPurpose.LIVENESS, but=self._asked)
        self._quiet_until = {
            cluster_id: self._heard_at[cluster_id]
            + self._patience(cluster, settings.most_snapshot_bytes, batch_seconds)
            for cluster_id, cluster in (training | building).items()
            if cluster_id not in self._answer_by
        }
        quiet = [
            each for cluster_id, each in training.items() if now >= self._quiet_until.get(cluster_id, now + 1)
        ]
        return [send for cluster in quiet for send in self._ask(cluster, now)]

    def find_idle(self, now: float) -> tuple[list[NodeId], list[ClusterState]]:
        """Return who does nothing, and the clusters of which all answer, but nothing moves."""
        late = {cluster_id for cluster_id, until in self._answer_by.items() if now >= until}
        silent = {name: cluster_id for cluster_id, name in self._asked.values() if cluster_id in late}
        stuck = [each for each in self._placement.running if each.cluster_id in late - set(silent.values())]
        for cluster in self._placement.clusters:
            if cluster.unready and now >= self._quiet_until.get(cluster.cluster_id, now + 1):
                self._heard_at[cluster.cluster_id] = now  # if nobody is to blame
                silent |= dict.fromkeys(self._find_lazy(cluster), cluster.cluster_id)
        return list(silent), stuck

    def _patience(self, cluster: ClusterState, most_bytes: int, batch_seconds: float) -> float:
        if not cluster.unready:
            return max(self._timeouts.silent_work_seconds, _BATCHES * batch_seconds)
        found = (self._placement.membership.find(name) for name in cluster.nodes)
        slowest = min((each.node.download_bytes_per_second for each in found if each), default=1.0)
        return self._timeouts.silent_build_seconds + _FETCHES * most_bytes / slowest

    def _ask(self, cluster: ClusterState, now: float) -> list[Send]:
        self._answer_by[cluster.cluster_id] = 2 * now - self._heard_at[cluster.cluster_id]  # as long again
        del self._quiet_until[cluster.cluster_id]
        numbers = {self._desk.new_number(): name for name in cluster.nodes}
        self._asked |= {number: (cluster.cluster_id, name) for number, name in numbers.items()}
        purpose, build_id = SnapshotPurpose.LIVENESS, cluster.build_id
        return [self._desk.ask(purpose, number, name, build_id) for number, name in numbers.items()]
