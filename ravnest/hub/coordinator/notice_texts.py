"""The sentences that people read of notices, one for each kind."""

from typing import assert_never

from ravnest.config import PlanConfig
from ravnest.hub.coordinator.notices import (
    BestIsResult,
    CaptureStep,
    Checkpointed,
    CheckpointIsResult,
    ClusterBroken,
    ClusterDissolved,
    ClusterStarted,
    ClusterSuspected,
    Contradicted,
    CutOff,
    DashboardOpened,
    EpochDone,
    Evaluated,
    FromCheckpoint,
    HubListens,
    Joined,
    Leaving,
    Left,
    LogGoesOn,
    LogWaits,
    Measured,
    MicrobatchDropped,
    Missing,
    ModelCaptured,
    NoiseFound,
    NotCheckpointed,
    NotDialled,
    NotEvaluated,
    Notice,
    PauseChanged,
    PlanFormed,
    RateChanged,
    Recovered,
    Repaired,
    ResultKept,
    ResultRefused,
    Resumed,
    Returned,
    RoundEnded,
    SampledText,
    SamplesDropped,
    SpeedChanged,
    Stopping,
    Trained,
    Waiting,
    WentWrong,
    WorkLost,
    WorkUndone,
)
from ravnest.ids import HUB, NodeId
from ravnest.plan.sharing import show_sharing
from ravnest.plan.types import Node, cluster_name
from ravnest.units import show_count, show_flops, show_rate, show_seconds

_MOST_SHOWN = 8  # samples
_MOST_LETTERS = 200  # of a text
_GOES_BACK = "it goes back to the last checkpoint"


def show_notice(notice: Notice) -> str:  # noqa: C901, PLR0912, PLR0915 - one short case for each
    """Return a notice as a sentence."""
    match notice:
        case HubListens(address):
            return f"the hub listens at {address}"
        case DashboardOpened(link, is_for_others):
            trust = "; it is plain HTTP: open it only in networks that you trust" if is_for_others else ""
            return f"watch it at {link}{trust}"
        case CaptureStep(job, step):
            return f"capturing {job}: {step}"
        case ModelCaptured(job, seconds, num_parameters, num_positions):
            size = f"{_show_size(num_parameters)} parameters, {show_count(num_positions, 'position')}"
            return f"captured {job} in {seconds:.1f} s: {size}"
        case Joined(node):
            return f"{node} joined"
        case NotDialled(node):
            return (
                f"{node} cannot be dialled: a router or firewall there lets nobody in. It dials the others; "
                "two that cannot be dialled meet through the hub, which is slower"
            )
        case Measured(node, fault):
            return f"{node.name} {fault or 'was measured'}: {_show_facts(node)}"
        case Resumed(num_samples, num_peers):
            return _show_resumed(num_samples, num_peers)
        case FromCheckpoint(num_samples):
            return f"training goes on from the checkpoint of {num_samples} samples, with the nodes that join"
        case Returned(node):
            return f"{node} is back, with what it had"
        case Missing(node, reason, seconds):
            return f"{node} is missing: {reason}; it has {show_seconds(seconds)} to come back"
        case CutOff(num_peers, seconds):
            return _show_cut_off(num_peers, seconds)
        case LogWaits(reason, seconds):
            return (
                f"the log cannot be written: {reason}; the hub waits for it, {show_seconds(seconds)} at most"
            )
        case LogGoesOn(seconds):
            return f"the log is written again, after {show_seconds(seconds)}; training goes on"
        case Left(node, reason):
            return f"{node} left: {reason}"
        case Waiting(reason):
            return f"no plan yet: {reason}"
        case PlanFormed(plan, samples_per_second, _, batch_size, microbatches, sharing, reason):
            shown = [
                f"{cluster_name(index)} = {' > '.join(stage.node for stage in cluster.stages)}"
                for index, cluster in enumerate(plan.clusters)
            ]
            pieces = f" in {microbatches} microbatches" if microbatches > 1 else ""
            shown += [
                f"{batch_size} samples per update{pieces}",
                _show_predicted(samples_per_second, len(plan.clusters) * batch_size / microbatches),
                *([show_sharing(sharing, batch_size)] if sharing.num_clusters > 1 else []),
                *([reason] if reason else []),
            ]
            return f"plan {plan.plan_id}: {'; '.join(shown)}"
        case ClusterStarted(cluster):
            return f"cluster {cluster} trains"
        case ClusterDissolved(cluster, reason, num_given_back, num_lost):
            return f"cluster {cluster} ends ({reason}); {num_given_back} samples given back, {num_lost} lost"
        case ClusterBroken(cluster, reason, num_given_back):
            return f"cluster {cluster} stands still ({reason}); {num_given_back} samples are trained again"
        case Leaving(node, reason):
            return f"{node} leaves: {reason}; what it has is handed over"
        case SpeedChanged(node, times):
            return f"{node} is {_show_times(times)} as before, for a while now"
        case NoiseFound(noise, may_add_clusters):
            then = ": more clusters may pay now" if may_add_clusters else ""
            return f"the noise scale of the gradients is {_show_rate(noise)} samples{then}"
        case RateChanged(times, num_clusters):
            if times == 1.0:
                return "your Adam has the learning rate that you gave again"
            why = f"{num_clusters} clusters share each batch, and a share is noisier than its batch"
            return f"the learning rate of your Adam is {times:.2f} times the one you gave: {why}"
        case NotEvaluated(cluster):
            return f"the last weights are kept as they are, not evaluated: in cluster {cluster} nothing moves"
        case Repaired(plan, reason):
            return f"plan {plan.plan_id}: {reason}"
        case Recovered(cluster, seconds, sources):
            return f"cluster {cluster} trains again after {show_seconds(seconds)}{_show_sources(sources)}"
        case Checkpointed(num_samples, seconds):
            return f"checkpoint kept in {show_seconds(seconds)}: {num_samples} samples trained"
        case NotCheckpointed(reason):
            return f"no checkpoint was kept, training goes on: {reason}"
        case CheckpointIsResult(num_samples, num_total):
            return _show_end(num_samples, num_total)
        case ResultKept(num_agreeing):
            return _show_result(num_agreeing)
        case Contradicted(cluster, other):
            found = f"clusters {cluster} and {other} contradict each other"
            return f"{found}: one of them reports false losses, and there is no third to tell which"
        case WorkUndone(node, num_samples):
            return f"{num_samples} samples that {node} says it trained are trained again"
        case BestIsResult():
            return "the last weights are far worse than the best ones: the best checkpoint is the result"
        case ResultRefused(reason):
            return f"what a cluster gave as the result is not kept: {reason}"
        case WorkLost(num_samples):
            return f"training goes back: nobody has what the last {num_samples} samples taught"
        case MicrobatchDropped() | SamplesDropped():
            return _show_dropped(notice)
        case Trained(num_samples, num_total, epoch, loss):
            return f"{num_samples / num_total:.0%} of the training, epoch {epoch}, loss {_show(loss)}"
        case EpochDone(epoch, num_samples, num_dropped, loss):
            dropped = f", {num_dropped} dropped" if num_dropped else ""
            return f"epoch {epoch}: {num_samples} samples{dropped}, loss {_show(loss)}"
        case Evaluated(epoch, _, num_samples, loss, metrics, num_updates):
            shown = [f", {name} {_show(value)}" for name, value in metrics]
            place = f"{num_updates} updates" if num_updates else f"epoch {epoch}"
            return f"after {place}: {num_samples} samples, loss {_show(loss)}{''.join(shown)}"
        case SampledText(epoch, prompt, text):
            return f"after epoch {epoch}, to {_show_text(prompt)}: {_show_text(text)}"
        case ClusterSuspected(cluster, reason, num_rounds):
            return f"cluster {cluster} is unlike all others: {reason}; it is left out of {num_rounds} rounds"
        case RoundEnded(round_id, is_committed, _, reason, seconds, left_out, blamed, unlike):
            without = f" without {', '.join(left_out)}" if left_out else ""
            outcome = f"committed in {show_seconds(seconds)}" if is_committed else f"aborted: {reason}"
            next_ones = [f"; {cluster}: {seen}" for cluster, seen in unlike]
            next_ones += [f"; {cluster} is left out of the next {number}" for cluster, number in blamed]
            return f"round {round_id}{without} {outcome}{''.join(next_ones)}"
        case WentWrong(reason, suspect, goes_back):
            ending = _GOES_BACK if goes_back else "there is no checkpoint to go back to"
            return f"training went wrong, {suspect} was seen first: {reason}; {ending}"
        case PauseChanged(is_paused):
            return (
                "training is paused; nodes finish what they have and wait"
                if is_paused
                else "training goes on"
            )
        case Stopping(reason):
            return f"the job is stopped ({reason}); what was trained is kept"
        case _:
            assert_never(notice)


def _show_predicted(samples_per_second: float, num_samples: float) -> str:
    """Return a rate that is foreseen; `num_samples` are those of a microbatch in every cluster."""
    # A forecast stays below the bound by what deaths and rounds cost; so near, the bound alone made it.
    is_bound = samples_per_second >= 0.8 * num_samples / PlanConfig().microbatch_seconds
    at_most = "at most " if is_bound else ""
    return f"{at_most}{_show_rate(samples_per_second)} samples/s predicted"


def _show_rate(samples: float) -> str:
    return f"{samples:,.0f}" if samples >= 1000.0 else f"{samples:.3g}"


def _show_size(num_parameters: float) -> str:
    return f"{num_parameters / 1e6:.3g} M" if num_parameters >= 1e6 else f"{num_parameters:,.0f}"


def _show_text(text: str) -> str:
    """Return text that may hold anything as a terminal may show it."""
    return repr(text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}...")


def _show_resumed(num_samples: int, num_peers: int) -> str:
    met = f"; waiting for {num_peers} peers to come back" if num_peers else ""
    return f"the hub goes on: {num_samples} samples are trained{met}"


def _show_cut_off(num_peers: int, seconds: float) -> str:
    peers = "the only peer" if num_peers == 1 else f"all {num_peers} peers"
    cause = f"nothing is heard of {peers}: the line of this PC is probably down"
    waits = f"nobody is given up for {show_seconds(seconds)}"
    return f"{cause}; {waits}, and training goes on when they are back; others may join too"


def _show_facts(node: Node) -> str:
    links = f"{show_rate(node.upload_bytes_per_second)} up, {show_rate(node.download_bytes_per_second)} down"
    return f"{show_flops(node.flops_per_second)}, {links}, {show_seconds(node.latency_seconds)} away"


def _show_dropped(notice: MicrobatchDropped | SamplesDropped) -> str:
    data = "validation data" if notice.is_evaluation else "train data"
    if isinstance(notice, SamplesDropped):
        were = "was" if len(notice.samples) == 1 else "were"
        return f"{_show_samples(notice.samples)} of the {data} {were} dropped: {notice.reason}"
    shown = f" ({_show_samples(notice.samples)} of the {data})" if notice.samples else ""
    if notice.faulty:
        shown = f" (with {_show_samples(notice.faulty)} of the {data} again)"
    return f"microbatch {notice.microbatch}{shown} dropped by {notice.node}: {notice.reason}"


def _show_samples(samples: tuple[int, ...]) -> str:
    if len(samples) == 1:
        return f"sample {samples[0]}"
    shown = ", ".join(str(sample) for sample in samples[:_MOST_SHOWN])
    more = f" and {len(samples) - _MOST_SHOWN} more" if len(samples) > _MOST_SHOWN else ""
    return f"samples {shown}{more}"


def _show_end(num_samples: int, num_total: int) -> str:
    if num_samples == num_total:
        return f"the run is finished: all {num_total} samples are trained; it goes on with more epochs"
    trained = f"{num_samples} of {num_total} samples are trained"
    return f"nobody is left to ask: the last checkpoint is the result, {trained}"


def _show_result(num_agreeing: int) -> str:
    if num_agreeing:
        clusters = "one other cluster holds" if num_agreeing == 1 else f"{num_agreeing} other clusters hold"
        return f"the result is confirmed: {clusters} the same weights"
    return "the result comes from one cluster: no other has the same weights to compare it with"


def _show_sources(sources: tuple[NodeId, ...]) -> str:
    names = ["the last checkpoint" if name == HUB else name for name in sources]
    return f", with what {' and '.join(names)} had" if names else ""


def _show_times(times: float) -> str:
    return f"{1 / times:.1f} times as slow" if times < 1 else f"{times:.1f} times as fast"


def _show(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
