"""A simulated cluster that trains alone, without a hub: how fast it is, and how stale."""

from dataclasses import dataclass

from ravnest.config import PeerTimeouts
from ravnest.ids import LeaseId, MicrobatchId
from ravnest.protocol.training import LeaseGrant, StepReport
from ravnest.sim.lines import Lines
from ravnest.sim.pipeline import ClusterBuild, ClusterPipeline
from ravnest.sim.timeline import Timeline

EVERY_REPORT = PeerTimeouts(report_every_seconds=0.0)


@dataclass(frozen=True)
class TrainedAlone:
    period_seconds: float  # between two batches in the second half of the run
    most_lag: int


def train_alone(cluster, line, swarm, num_batches):
    """Train so many full microbatches as one lease."""
    timeline, root, leaf = Timeline(), cluster.stages[0].node, cluster.stages[-1].node
    lines = Lines(timeline, swarm, line.config)
    lines.link_share = line.link_share
    ended, lags = [], []

    def tell(node, message):
        if isinstance(message, StepReport):
            lags.append(message.lag)
            if node == root:
                ended.append(timeline.now)

    pipeline = ClusterPipeline(timeline, lines, ClusterBuild(cluster), line, tell, EVERY_REPORT)
    sizes = (line.profile.samples_per_batch,) * num_batches
    pipeline.grant(LeaseGrant(1, LeaseId(0), False, MicrobatchId(0), sizes))
    while timeline.next_at is not None:
        timeline.advance(timeline.next_at)
    assert len(ended) == num_batches, (root, leaf)
    half = num_batches // 2
    return TrainedAlone((ended[-1] - ended[half]) / (num_batches - 1 - half), max(lags))
