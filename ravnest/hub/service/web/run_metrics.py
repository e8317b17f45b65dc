"""A RunDocument as metrics of Prometheus; names and labels are those of docs/dashboard.md."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ravnest.hub.coordinator.phases import ClusterPhase, JobPhase, NodePhase
from ravnest.hub.service.web.documents import RunDocument


def write_metrics(run: RunDocument | None) -> bytes:
    """Return the text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RunCollector(run))
    return generate_latest(registry)


class _RunCollector:
    """Yields the metrics of one document, once."""

    def __init__(self, run: RunDocument | None) -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        if self._run is not None:
            yield from _of_training(self._run)
            yield from _of_members(self._run)
            yield from _of_stages(self._run)


def _of_training(run: RunDocument) -> Iterator[Metric]:
    training = run.training
    gauges: dict[str, tuple[str, float | None]] = {
        "live": ("Whether a hub is at work", float(run.is_live)),
        "job_samples": ("Samples of the whole job", float(training.num_total)),
        "trained_samples": ("Samples trained for good", float(training.num_samples)),
        "epoch": ("The pass over the data that is under way", float(training.epoch)),
        "loss": ("The last loss of the training", training.loss),
        "learning_rate": ("The learning rate", training.learning_rate),
        "samples_per_second": ("Measured speed, over a minute", training.samples_per_second),
        "predicted_samples_per_second": (
            "Speed that the plan promises",
            None if run.plan is None else run.plan.samples_per_second,
        ),
        "eta_seconds": ("Seconds until all samples are trained", training.eta_seconds),
    }
    for name, (text, value) in gauges.items():
        if value is not None:
            yield GaugeMetricFamily(f"ravnest_{name}", text, value)
    yield _labelled("validation", "The last validation", ("metric",), _known(training.validation))
    counts = {
        "updates": ("Optimizer updates of all clusters", training.num_updates),
        "samples_redone": ("Samples that are trained again", training.samples_redone),
        "microbatches_dropped": ("Microbatches that could not be trained", training.microbatches_dropped),
        "rounds_committed": ("Rounds of averaging that were committed", run.rounds.committed),
        "rounds_aborted": ("Rounds of averaging that were aborted", run.rounds.aborted),
    }
    for name, (text, count) in counts.items():
        yield CounterMetricFamily(f"ravnest_{name}", text, float(count))
    if run.rounds.last:
        seconds = run.rounds.last[-1].seconds
        yield GaugeMetricFamily("ravnest_round_seconds", "Duration of the last round", seconds)


def _of_members(run: RunDocument) -> Iterator[Metric]:
    jobs = [((phase,), float(run.phase is phase)) for phase in JobPhase]
    yield _labelled("job_phase", "1 for the phase of the job", ("phase",), jobs)
    nodes = [((phase,), float(sum(node.phase is phase for node in run.nodes))) for phase in NodePhase]
    yield _labelled("nodes", "Nodes by phase", ("phase",), nodes)
    clusters = [
        ((phase,), float(sum(each.phase is phase for each in run.clusters))) for phase in ClusterPhase
    ]
    yield _labelled("clusters", "Clusters by phase", ("phase",), clusters)
    rates = [((each.name,), each.samples_per_second) for each in run.clusters]
    yield _labelled("cluster_samples_per_second", "Measured speed of a cluster", ("cluster",), rates)


def _of_stages(run: RunDocument) -> Iterator[Metric]:
    pairs = [((each.name, stage.node), stage) for each in run.clusters for stage in each.stages]
    label = ("cluster", "node")
    busy = [(key, stage.busy) for key, stage in pairs if stage.busy is not None]
    lag = [(key, stage.lag) for key, stage in pairs if stage.lag is not None]
    used = [(key, stage.link.used_bytes_per_second) for key, stage in pairs if stage.link is not None]
    planned = [(key, stage.planned_bytes) for key, stage in pairs]
    yield _labelled("stage_busy_ratio", "Share of the time that a stage computes", label, busy)
    yield _labelled("stage_lag_updates", "Updates between forward and backward", label, lag)
    yield _labelled("stage_planned_bytes", "Memory that the plan counts on", label, planned)
    yield _labelled("link_bytes_per_second", "What crosses to the next stage", label, used)


def _known(values: dict[str, float | None]) -> list[tuple[tuple[str, ...], float]]:
    return [((name,), value) for name, value in values.items() if value is not None]


def _labelled(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"ravnest_{name}", text, labels=labels)
    for given, value in values:
        family.add_metric([str(each) for each in given], value)
    return family
