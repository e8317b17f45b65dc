"""A plan in words and as JSON: the object "ravnest.plan/1", the bottleneck sentence, and advice.

The one idea: advice is computed, never guessed. Each what-if cuts the same clusters again with one setting
changed and asks the forecast; only what gains is said. docs/plan.md explains every key to people.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import pairwise

from ravnest.config import Averaging, Optimizer, PlanConfig, Recompute, WireFormat
from ravnest.plan.cluster import cut_clusters
from ravnest.plan.forecast import Bottleneck, ClusterForecast, Forecast, StageForecast, forecast
from ravnest.plan.rings import form_rings
from ravnest.plan.shortage import holding_order
from ravnest.plan.types import Cluster, ModelProfile, NodeId, Plan, Swarm, cluster_name
from ravnest.units import show_rate, show_seconds

SCHEMA = "ravnest.plan/1"

_LEAST_GAIN = 1.05  # a smaller one is within the error of the measurements
_MOST_WHAT_IFS = 2
_MOST_RECUT_NODES = 300
_MOST_EXPLAINED_SPARES = 24
_SMALLER_WIRE = {
    WireFormat.FP32: WireFormat.BF16,
    WireFormat.BF16: WireFormat.INT8,
    WireFormat.FP16: WireFormat.INT8,
    WireFormat.INT8: WireFormat.INT4,
}
_LIMIT_NAMES = {  # what holds a stage up, and what twice as wide means
    "compute": ("its compute speed", "twice as much"),
    "send": ("its upload", "twice as much"),
    "receive": ("its download", "twice as much"),
    "relay": ("the hub's relay", "a relay twice as fast"),
    "latency": ("the wait for the stages behind it", "half the wait"),
}


def plan_to_dict(
    plan: Plan,
    predicted: Forecast,
    profile: ModelProfile,
    swarm: Swarm,
    config: PlanConfig,
    advice: tuple[str, ...] | None = None,
) -> dict[str, object]:
    """Return the plan as plain values for JSON; advice is worked out unless it is given."""
    if advice is None:
        advice = advise(plan, profile, swarm, config)
    return {
        "schema": SCHEMA,
        "seed": plan.seed,
        "epoch": plan.epoch,
        "model": {
            "name": profile.name,
            "positions": profile.num_positions,
            "parameter_bytes": sum(profile.parameter_bytes),
            "samples_per_batch": profile.samples_per_batch,
        },
        "config": asdict(config),
        "clusters": [
            _cluster_to_dict(k, cluster, predicted.clusters[k]) for k, cluster in enumerate(plan.clusters)
        ],
        "rings": [{"segment": [r.start, r.stop], "owners": list(r.owners)} for r in plan.rings],
        "predicted": {
            "samples_per_second": predicted.samples_per_second,
            "round_seconds": predicted.round_seconds,
            "staleness": predicted.staleness,
            "lost_share": predicted.lost_share,
        },
        "bottleneck": _bottleneck_to_dict(predicted),
        "spares": list(plan.spares),
        "backups": [{"spare": backup.spare, "node": backup.node} for backup in plan.backups],
        "advice": list(advice),
    }


def advise(plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> tuple[str, ...]:
    """Return what would help and what to know, one sentence each, the best first."""
    if not plan.clusters:
        return ()
    used = sum(len(cluster.stages) for cluster in plan.clusters)
    sentences: list[str] = []
    if used <= _MOST_RECUT_NODES:
        sentences += _what_ifs(plan, profile, swarm, config)
        sentences += _relay_fact(plan, profile, swarm, config)
    sentences += _spares_fact(plan, profile, swarm, config)
    if len(plan.clusters) == 1:
        sentences.append("one cluster has nobody to average with: there are no rings and no rounds")
    return tuple(sentences)


def describe_bottleneck(predicted: Forecast) -> str:
    """Return what holds the swarm back, and what it would make if that were twice as wide."""
    found = predicted.bottleneck
    if found is None:
        return "none: nobody trains"
    limit, twice = _LIMIT_NAMES[found.limited_by]
    where = f"{found.node} in cluster {cluster_name(found.cluster)} is held up by {limit}"
    faster = predicted.samples_per_second + found.gain_samples_per_second
    if faster < 1.01 * predicted.samples_per_second:
        return f"{where}, but others are as near to their limits; no single one stands out"
    return f"{where}; {twice} would give {_instead(faster, predicted.samples_per_second)}"


def describe_round(predicted: Forecast) -> str:
    """Return how long averaging takes."""
    if len(predicted.clusters) < 2:
        return "none, one cluster has nobody to average with"
    return f"{show_seconds(predicted.round_seconds)} to average all segments once"


def show_samples(samples_per_second: float) -> str:
    """Return a training speed with three digits: 5.72 samples/s."""
    return f"{_three_digits(samples_per_second)} samples/s"


def show_count(count: int, noun: str) -> str:
    """Return a count with its noun: 1 node, 2 nodes."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _instead(then: float, now: float) -> str:
    return f"{show_samples(then)} instead of {_three_digits(now)}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _cluster_to_dict(index: int, cluster: Cluster, predicted: ClusterForecast) -> dict[str, object]:
    return {
        "name": cluster_name(index),
        "samples_per_second": predicted.samples_per_second,
        "period_seconds": predicted.period_seconds,
        "accumulate": cluster.accumulate,
        "lag": predicted.lag,
        "stages": [_stage_to_dict(stage) for stage in predicted.stages],
    }


def _stage_to_dict(predicted: StageForecast) -> dict[str, object]:
    stage = predicted.stage
    return {
        "node": stage.node,
        "start": stage.start,
        "stop": stage.stop,
        "window": stage.window,
        "recompute": stage.recompute,
        "memory_bytes": predicted.memory_bytes,
        "available_bytes": predicted.available_bytes,
        "compute_seconds": predicted.compute_seconds,
        "send_seconds": predicted.send_seconds,
        "receive_seconds": predicted.receive_seconds,
        "busy_share": predicted.busy_share,
        "limited_by": predicted.limited_by,
    }


def _bottleneck_to_dict(predicted: Forecast) -> dict[str, object] | None:
    found: Bottleneck | None = predicted.bottleneck
    if found is None:
        return None
    return {
        "cluster": found.cluster,
        "node": found.node,
        "limited_by": found.limited_by,
        "gain_samples_per_second": found.gain_samples_per_second,
        "sentence": describe_bottleneck(predicted),
    }


def _what_ifs(plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> list[str]:
    """Return what a change would give, against the same clusters cut anew: a repaired plan may be behind."""
    planned = forecast(plan, profile, swarm, config)
    now = _forecast_again(plan, profile, swarm, config)
    if now is None or now.samples_per_second < planned.samples_per_second:
        now = planned
    sentences: list[str] = []
    if now.samples_per_second >= _LEAST_GAIN * planned.samples_per_second:
        gain = _instead(now.samples_per_second, planned.samples_per_second)
        sentences.append(f"plan anew: the same clusters cut again would give {gain}")
    found: list[tuple[float, str]] = []
    for change, price in _changes(plan, now, config):
        changed = replace(config, **change)  # type: ignore[arg-type]
        then = _forecast_again(plan, profile, swarm, changed)
        if then is None or then.samples_per_second < _LEAST_GAIN * now.samples_per_second:
            continue
        settings = " ".join(f"{key}={str(value).lower()}" for key, value in change.items())
        gain = _instead(then.samples_per_second, now.samples_per_second)
        rounds = f"{show_seconds(then.round_seconds)} instead of {show_seconds(now.round_seconds)}"
        found.append((then.samples_per_second, f"set {settings}: {gain}; {price.format(rounds=rounds)}"))
    found.sort(key=lambda one: -one[0])
    return sentences + [sentence for _, sentence in found[:_MOST_WHAT_IFS]]


def _changes(plan: Plan, now: Forecast, config: PlanConfig) -> Iterator[tuple[Mapping[str, object], str]]:
    """Yield settings worth trying, each with its price."""
    smaller = {
        key: _SMALLER_WIRE[wire]
        for key, wire in (("activations", config.activations), ("gradients", config.gradients))
        if wire in _SMALLER_WIRE
    }
    if smaller:
        yield smaller, "what crosses between stages is rounded more"
    if config.recompute is not Recompute.AUTO:
        yield {"recompute": Recompute.AUTO}, "stages recompute only where memory is short"
    if config.optimizer is Optimizer.MUON and config.predict_weights:
        yield {"predict_weights": False}, "saves memory, learns less from late gradients"
    if len(plan.clusters) < 2:
        return
    if config.averaging is Averaging.BLOCKING:
        yield {"averaging": Averaging.OVERLAPPED}, "a round then takes {rounds}"
    elif config.averaging_share >= 0.002:
        yield {"averaging_share": config.averaging_share / 2}, "a round then takes {rounds}"
    periods = [cluster.period_seconds for cluster in now.clusters]
    if max(periods) >= 0.999 * config.speed_ratio * min(periods) and config.speed_ratio < 1e5:
        yield {"speed_ratio": 2 * config.speed_ratio}, "clusters then differ more in what they contribute"


def _forecast_again(plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> Forecast | None:
    """Return the forecast of the same clusters cut anew under other facts; None if one no longer fits."""
    nodes = {node.name: node for node in swarm.nodes}
    place = {name: k for k, name in enumerate(nodes)}
    orders = tuple(tuple(place[s.node] for s in reversed(cluster.stages)) for cluster in plan.clusters)
    clusters = cut_clusters(profile, swarm, config, orders, is_averaged=len(orders) > 1)
    if len(clusters) != len(orders):
        return None
    again = replace(plan, clusters=clusters, rings=form_rings(clusters, nodes))
    return forecast(again, profile, swarm, config)


def _relay_fact(plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> list[str]:
    pairs = relayed_pairs(plan, swarm)
    if not pairs:
        return []
    opened = {one for one, _ in pairs}
    nodes = tuple(replace(n, is_reachable=True) if n.name in opened else n for n in swarm.nodes)
    now = forecast(plan, profile, swarm, config)
    then = _forecast_again(plan, profile, replace(swarm, nodes=nodes), config)
    speed = show_rate(config.relay_bytes_per_second)
    count = show_count(len(pairs), "pair")
    first = f"{pairs[0][0]} and {pairs[0][1]}"
    fact = f"{count} of neighbours that nobody can dial ({first}{', ...' * (len(pairs) > 1)})"
    fact += f" must use the hub's relay ({speed})"
    if then is None or then.samples_per_second < _LEAST_GAIN * now.samples_per_second:
        return [fact]
    gain = _instead(then.samples_per_second, now.samples_per_second)
    return [f"{fact}; a port opened on one of each would give {gain}"]


def relayed_pairs(plan: Plan, swarm: Swarm) -> list[tuple[NodeId, NodeId]]:
    """Return the neighbours in a pipeline that only the hub can connect."""
    hidden = {node.name for node in swarm.nodes if not node.is_reachable}
    return [
        (one.node, other.node)
        for cluster in plan.clusters
        for one, other in pairwise(cluster.stages)
        if one.node in hidden and other.node in hidden
    ]


def _spares_fact(plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> Iterable[str]:
    if not plan.spares:
        yield "no spares: one more PC with as much memory as the largest stage would be a backup"
        return
    names = set(plan.spares)
    spare_swarm = replace(swarm, nodes=tuple(node for node in swarm.nodes if node.name in names))
    why = "the search found no faster plan that uses more PCs"
    if len(names) <= _MOST_EXPLAINED_SPARES and not holding_order(profile, spare_swarm, config):
        why = "together they cannot hold another copy of the model"
    count, pcs = len(plan.backups), show_count(len(names), "PC")
    doing = "stands by" if len(names) == 1 else "stand by"
    if count == len(names):
        doing += " as a backup" if count == 1 else " as backups"
    elif count:
        doing += ", 1 of them as a backup" if count == 1 else f", {count:,} of them as backups"
    yield f"{pcs} {doing}: {why}"
