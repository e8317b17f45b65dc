"""News as one line each, for people without a dashboard."""

from typing import assert_never

from ravnest.hub.events import (
    BatchDropped,
    ClusterDissolved,
    ClusterStarted,
    EpochDone,
    Evaluated,
    Joined,
    Left,
    News,
    PlanFormed,
    RoundEnded,
    Stopping,
    Trained,
    Waiting,
    WorkLost,
)
from ravnest.hub.planning import Measured
from ravnest.plan.types import Node, cluster_name
from ravnest.units import show_flops, show_rate, show_seconds


def show_news(news: News) -> str:  # noqa: C901, PLR0912 - one short case for each
    """Return what happened as a sentence."""
    match news:
        case Joined(node):
            return f"{node} joined"
        case Measured(node, fault):
            return f"{node.name} {fault or 'was measured'}: {_show_facts(node)}"
        case Left(node, reason):
            return f"{node} left: {reason}"
        case Waiting(reason):
            return f"no plan yet: {reason}"
        case PlanFormed(plan, samples_per_second, _, batch_size, microbatches):
            shown = [
                f"{cluster_name(index)} = {' > '.join(stage.node for stage in cluster.stages)}"
                for index, cluster in enumerate(plan.clusters)
            ]
            pieces = f" in {microbatches} microbatches" if microbatches > 1 else ""
            shown += [
                f"{batch_size} samples per update{pieces}",
                f"{samples_per_second:.3g} samples/s foreseen",
            ]
            return f"plan {plan.epoch}: {'; '.join(shown)}"
        case ClusterStarted(cluster):
            return f"cluster {cluster} trains"
        case ClusterDissolved(cluster, reason, num_given_back, num_lost):
            return f"cluster {cluster} ends ({reason}); {num_given_back} samples given back, {num_lost} lost"
        case WorkLost(num_samples):
            return f"training begins again: nobody has what {num_samples} samples taught"
        case BatchDropped(batch, node, reason):
            return f"batch {batch} dropped by {node}: {reason}"
        case Trained(num_samples, num_total, epoch, loss):
            return f"{num_samples / num_total:.0%} of the training, epoch {epoch}, loss {_show(loss)}"
        case EpochDone(epoch, num_samples, num_dropped, loss):
            dropped = f", {num_dropped} dropped" if num_dropped else ""
            return f"epoch {epoch}: {num_samples} samples{dropped}, loss {_show(loss)}"
        case Evaluated(epoch, _, num_samples, loss, metrics):
            shown = [f", {name} {_show(value)}" for name, value in metrics]
            return f"after epoch {epoch}: {num_samples} samples, loss {_show(loss)}{''.join(shown)}"
        case RoundEnded(round_id, is_committed, _, reason, seconds, left_out, blamed):
            without = f" without {', '.join(left_out)}" if left_out else ""
            outcome = f"committed in {show_seconds(seconds)}" if is_committed else f"aborted: {reason}"
            next_ones = [f"; {cluster} is left out of the next {number}" for cluster, number in blamed]
            return f"round {round_id}{without} {outcome}{''.join(next_ones)}"
        case Stopping(reason):
            return f"the job is stopped ({reason}); what was trained is kept"
        case _:
            assert_never(news)


def _show_facts(node: Node) -> str:
    links = f"{show_rate(node.upload_bytes_per_second)} up, {show_rate(node.download_bytes_per_second)} down"
    return f"{show_flops(node.flops_per_second)}, {links}, {show_seconds(node.latency_seconds)} away"


def _show(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
