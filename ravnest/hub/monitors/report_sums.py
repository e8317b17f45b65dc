"""Report sums: adds up what leaves report of microbatches, until the ledger need it.

Every microbatch counts once, under the lease that granted it. The sums are soft: what a hub had not passed on
when it ended is missing in the mean loss of the epoch, and in nothing else.
"""

from dataclasses import dataclass, field

from ravnest.hub.coordinator.events import (
    ClusterVersion,
    EvaluationReported,
    TrainingReported,
)
from ravnest.hub.coordinator.leases import OpenLease
from ravnest.hub.coordinator.ledger import MOST_METRICS, Ledger, Means
from ravnest.hub.coordinator.placement import ClusterState
from ravnest.ids import LeaseId, MicrobatchId
from ravnest.protocol.training import StepReport

_NO_LOSS: float | None = None


@dataclass(slots=True)
class _ClusterSums:
    """What a cluster has reported since its version was last passed on."""

    version: int
    num_reported: int = 0  # of all clusters, when it came to that version
    num_updates: int = 0


@dataclass(slots=True)
class _EvaluationSums:
    num_samples: int = 0
    means: Means = field(default_factory=Means)


class ReportSums:
    """Sums for one ledger; they begin anew when training does."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._num_reported, self._loss = 0, _NO_LOSS
        self._means: dict[int, Means] = {}  # by epoch
        self.has_news = False  # since the last time they were passed on
        self.num_updates = 0  # of all clusters, since then
        self._clusters: dict[str, _ClusterSums] = {}
        self._evaluations: dict[LeaseId, _EvaluationSums] = {}
        self._reported: dict[LeaseId, set[MicrobatchId]] = {}

    def begin(self, ledger: Ledger) -> None:
        """Go on from the books, because a hub or its training begins anew."""
        self._reset()
        self._num_reported = ledger.num_reported
        self._means = {epoch: Means(dict(means.sums)) for epoch, means in ledger.means.items()}

    def record(self, ledger: Ledger, cluster: ClusterState, report: StepReport) -> bool | str:
        """Add a report of a leaf; return whether it is of training, or why it does not count."""
        microbatch = report.microbatch
        if report.version > ledger.num_granted + 1:  # an update is of a microbatch at least
            return f"cluster {cluster.name} cannot have made {report.version} updates"
        lease = ledger.find_training(microbatch)
        if lease is not None and self._is_awaited(lease, cluster, microbatch):
            self._add_training(ledger, cluster, lease, report)
            return True
        lease = ledger.find_evaluation(cluster, microbatch)
        if lease is None or not self._is_awaited(lease, cluster, microbatch):
            return f"microbatch {microbatch} of cluster {cluster.name} is not awaited"
        self._add_evaluation(lease, report)
        return False

    def _is_awaited(self, lease: OpenLease, cluster: ClusterState, microbatch: MicrobatchId) -> bool:
        is_new = microbatch not in lease.dropped and microbatch not in self._reported.get(lease.number, ())
        return is_new and lease.cluster_id == cluster.cluster_id

    def _add_training(
        self, ledger: Ledger, cluster: ClusterState, lease: OpenLease, report: StepReport
    ) -> None:
        assert lease.lease is not None
        num_samples = self._mark(lease, report.microbatch)
        self.has_news, self._loss = True, report.loss
        self._num_reported += num_samples
        sums = self._clusters.get(cluster.cluster_id)
        if sums is None:
            sums = self._clusters[cluster.cluster_id] = _ClusterSums(ledger.progress.version(cluster))
        if report.version > sums.version:
            num_updates = report.version - sums.version
            sums.num_updates, self.num_updates = (
                sums.num_updates + num_updates,
                self.num_updates + num_updates,
            )
            sums.version, sums.num_reported = report.version, self._num_reported
        _add(self._means.setdefault(lease.lease.epoch, Means()), report, num_samples)

    def _add_evaluation(self, lease: OpenLease, report: StepReport) -> None:
        num_samples = self._mark(lease, report.microbatch)
        sums = self._evaluations.setdefault(lease.number, _EvaluationSums())
        sums.num_samples += num_samples
        _add(sums.means, report, num_samples)

    def _mark(self, lease: OpenLease, microbatch: MicrobatchId) -> int:
        self._reported.setdefault(lease.number, set()).add(microbatch)
        return lease.num_samples[microbatch - lease.first_microbatch]

    def pass_on(self, now: float, cluster_id: str | None = None) -> TrainingReported:
        """Return the totals, with the new versions of all clusters or of one of them."""
        chosen = list(self._clusters) if cluster_id is None else [cluster_id]
        found = {each: self._clusters.pop(each) for each in chosen if each in self._clusters}
        self.num_updates -= sum(sums.num_updates for sums in found.values())
        self.has_news = bool(self._clusters)
        versions = (ClusterVersion(each, sums.version, sums.num_reported) for each, sums in found.items())
        totals = tuple(
            (epoch, (name, *total))
            for epoch, means in self._means.items()
            for name, total in means.sums.items()
        )
        return TrainingReported(self._num_reported, self._loss, totals, tuple(versions), now)

    def end_evaluation(self, lease: OpenLease, now: float) -> EvaluationReported | None:
        """Return the sums of an evaluation lease of which every microbatch is reported or dropped."""
        num_ended = len(self._reported.get(lease.number, set()) | lease.dropped)
        if num_ended < len(lease.num_samples):
            return None
        sums = self._evaluations.pop(lease.number, _EvaluationSums())
        self._reported.pop(lease.number, None)
        totals = tuple((name, *total) for name, total in sums.means.sums.items())
        return EvaluationReported(lease.cluster_id, lease.number, sums.num_samples, totals, now)

    def forget_epochs(self, ledger: Ledger) -> None:
        """Forget epochs that are over, and leases of which nothing is awaited any more."""
        self._means = {epoch: means for epoch, means in self._means.items() if ledger.is_under_way(epoch)}
        awaited = ledger.awaited_leases
        self._reported = {each: found for each, found in self._reported.items() if each in awaited}
        self._evaluations = {each: found for each, found in self._evaluations.items() if each in awaited}


def _add(means: Means, report: StepReport, num_samples: int) -> None:
    for name, value in (("loss", report.loss), *report.metrics[:MOST_METRICS]):
        means.add((name, 0.0, 0) if value is None else (name, value * num_samples, num_samples))
