"""How far each cluster is: updates made, samples learned from, rates sent, and the average it began from.

A cluster that is built anew goes on from another one. Rates are sent ahead of a cluster's updates.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ravnest.hub.coordinator.events import ClusterVersion, JobSettings, Send
from ravnest.hub.coordinator.placement import ClusterState
from ravnest.ids import RoundId
from ravnest.protocol.training import LearningRate

_NONE = RoundId(0)  # before the first round


@dataclass(slots=True)
class Progress:
    """How far one cluster is."""

    version: int
    position: int = 0  # batches that all clusters had trained when it came to that version
    rates: dict[int, float] = field(default_factory=dict)  # sent, by the update they hold from
    num_trained: int = 0  # samples
    num_alone: int = 0  # of them since the last round
    num_samples_seen: int = 0  # samples of all clusters that its weights have learned from
    anchor_round: RoundId | None = _NONE  # the round whose average it began from; None: it has none


class ClusterProgress:
    """Knows every cluster by its cluster_id, also those whose state a node still holds."""

    def __init__(self, settings: JobSettings, num_reported: int) -> None:
        self._settings = settings
        self._position = settings.position(num_reported)
        self._progress: dict[str, Progress] = {}

    def __len__(self) -> int:
        return len(self._progress)

    def version(self, cluster: ClusterState) -> int:
        """Return how many updates a cluster has made, as far as is known."""
        progress = self._progress.get(cluster.cluster_id)
        return cluster.version if progress is None else progress.version

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

    def forget_others(self, cluster_ids: Collection[str]) -> None:
        """Forget all clusters but these."""
        self._progress = {each: far for each, far in self._progress.items() if each in cluster_ids}

    def inherit(self, cluster: ClusterState, cluster_id: str, is_whole: bool) -> None:
        """Let a cluster go on from another; it has the average of that one if it has its whole state."""
        before = self._progress.get(cluster_id) or Progress(0, self._position, anchor_round=None)
        version = max(1, before.version)  # 0 is for what the hub gave, the same in all stages
        after = Progress(version, self._position, num_trained=before.num_trained)
        after.num_samples_seen = before.num_samples_seen
        after.anchor_round = before.anchor_round if is_whole else None
        after.num_alone = before.num_alone if is_whole else 0
        cluster.version, self._progress[cluster.cluster_id] = version, after

    def end(self, cluster: ClusterState) -> int:
        """Record that a cluster ends; return the samples that it alone has seen."""
        progress = self._of(cluster)
        progress.anchor_round = None  # its nodes may get other weights before a cluster goes on from it
        return progress.num_alone

    def record_trained(self, cluster: ClusterState, num_samples: int) -> None:
        """Record samples that a cluster has trained."""
        progress = self._of(cluster)
        progress.num_trained += num_samples
        progress.num_alone += num_samples
        progress.num_samples_seen += num_samples

    def record_versions(self, versions: Iterable[ClusterVersion], num_reported: int) -> int:
        """Record how far clusters are, and all of them together; return how many updates are new."""
        self._position = self._settings.position(num_reported)
        num_updates = 0
        for found in versions:
            progress = self._progress.get(found.cluster_id)
            if progress is not None and found.version > progress.version:
                num_updates += found.version - progress.version
                progress.version = found.version
                progress.position = self._settings.position(found.num_reported)
        return num_updates

    def record_update(self, clusters: Sequence[ClusterState], num_counted: int) -> int:
        """Record an update that these clusters made together; return how many updates are new."""
        for progress in map(self._of, clusters):
            progress.version, progress.position = progress.version + 1, self._settings.position(num_counted)
        return len(clusters)

    def record_agreement(self, clusters: Iterable[ClusterState], round_id: RoundId | None = None) -> None:
        """Record that these clusters have the same weights now; the round that made them is their anchor."""
        shared = [self._of(cluster) for cluster in clusters]
        seen = max((each.num_samples_seen - each.num_alone for each in shared), default=0)
        seen += sum(each.num_alone for each in shared)
        for each in shared:
            each.num_alone, each.num_samples_seen = 0, seen
            each.anchor_round = each.anchor_round if round_id is None else round_id

    def send_rates(
        self, cluster: ClusterState, num_updates: int, batches: float, times: float = 1.0
    ) -> list[Send]:
        """Return the rates of the next so many updates, where they are not what the cluster was sent.

        All clusters together train so many batches while this one makes an update. Rates are so many times
        those of the job.
        """
        progress = self._of(cluster)
        latest = max((update for update in progress.rates if update <= progress.version), default=0)
        progress.rates = {update: rate for update, rate in progress.rates.items() if update >= latest}
        told = progress.rates.get(latest)
        sends = []
        for ahead in range(num_updates):
            update = progress.version + ahead
            rate = times * self._settings.rate(progress.position + int(ahead * batches))
            if progress.rates.get(update, told) != rate:
                progress.rates[update] = rate
                sends += [Send(node, LearningRate(cluster.build_id, update, rate)) for node in cluster.nodes]
            told = rate
        return sends

    def _of(self, cluster: ClusterState) -> Progress:
        return self._progress.setdefault(cluster.cluster_id, Progress(cluster.version, self._position))
