"""A plan in words and as JSON: the object "ravnest.plan/2", the bottleneck sentence, and advice.

Advice is computed, never guessed. Each what-if searches again with one setting changed and asks the forecast;
only gains are reported. docs/plan.md explains every key.
"""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ravnest.config import (
    SEARCH_BUDGET,
    Averaging,
    PlanConfig,
    Recompute,
    SearchBudget,
    StateFormat,
    WeightFormat,
    WireChoice,
)
from ravnest.errors import PlanError
from ravnest.ids import NodeId
from ravnest.plan.assembly import form_rings
from ravnest.plan.forecast import (
    Bottleneck,
    ClusterForecast,
    Forecast,
    StageForecast,
    forecast,
)
from ravnest.plan.formation import cut_clusters, form_plan
from ravnest.plan.infeasible import LeftOut, count_left_out, holding_order
from ravnest.plan.types import Cluster, ModelProfile, Plan, Swarm, cluster_name
from ravnest.units import show_bytes, show_count, show_rate, show_seconds

PLAN_SCHEMA = "ravnest.plan/2"

_LEAST_GAIN = 1.05  # a smaller one is within the error of the measurements
_MOST_EXPLAINED_SPARES = 24
_SHORT_SEARCH = SearchBudget(clusters=-1, quick_clusters=-1)  # its first answers
_SMALLER_WIRE = {
    WireChoice.FP32: WireChoice.BF16,
    WireChoice.BF16: WireChoice.INT8,
    WireChoice.FP16: WireChoice.INT8,
    WireChoice.INT8: WireChoice.INT4,
    WireChoice.AUTO: WireChoice.INT4,
}
_LIMIT_NAMES = {  # what holds a stage up, and what twice as wide means
    "compute": ("its compute speed", "twice as much"),
    "send": ("its upload", "twice as much"),
    "receive": ("its download", "twice as much"),
    "relay": ("the hub's relay", "a relay twice as fast"),
    "latency": ("the wait for the stages behind it", "half the wait"),
}


_HUB_LIMITS, _HUB_NEARLY_FULL = 1.01, 0.9  # of its line
_LEFT_OUT: Mapping[str, str] = {
    LeftOut.MEMORY: "with too little memory for any part of the model",
    LeftOut.ROUND: "with links too slow to average one part in time",
    LeftOut.LINK: "with links slower than the slowest cluster",
    LeftOut.COMPUTE: "that compute more slowly than the slowest cluster",
    LeftOut.HIDDEN: "behind NAT, with nobody left that they could reach without the hub",
    LeftOut.HUB: "that could train, but the hub's line is full",
    LeftOut.RELAYED: "that could train, but a round would take too long through the hub's line",
    LeftOut.QUALITY: "that could train, but another cluster would cost more quality than it gains",
    LeftOut.REST: "that could train, but no faster plan with them was found",
}


def plan_to_dict(
    plan: Plan,
    predicted: Forecast,
    profile: ModelProfile,
    swarm: Swarm,
    config: PlanConfig,
    advice: tuple[str, ...] | None = None,
    left_out: Mapping[str, int] | None = None,
) -> dict[str, object]:
    """Return the plan as plain values for JSON; advice and reasons are worked out unless they are given."""
    if advice is None:
        advice = advise(plan, profile, swarm, config)
    if left_out is None:
        left_out = count_left_out(plan, profile, swarm, config)
    return {
        "schema": PLAN_SCHEMA,
        "seed": plan.seed,
        "plan_id": plan.plan_id,
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
        "hub": None
        if predicted.hub is None
        else {**asdict(predicted.hub), "busy_share": predicted.hub.busy_share},
        "bottleneck": _bottleneck_to_dict(predicted),
        "spares": list(plan.spares),
        "left_out": dict(left_out),
        "backups": [{"spare": backup.spare, "node": backup.node} for backup in plan.backups],
        "advice": list(advice),
    }


@dataclass(frozen=True, slots=True)
class AdviceLimits:
    """How much advice is looked for."""

    changes: int = 2  # of the settings, the best ones
    recut_nodes: int = 300  # in larger plans no cluster is cut again: that takes too long
    search_nodes: int = 100  # in larger swarms changes are tried on the same clusters alone


ADVICE_LIMITS = AdviceLimits()


def advise(
    plan: Plan,
    profile: ModelProfile,
    swarm: Swarm,
    config: PlanConfig,
    limits: AdviceLimits = ADVICE_LIMITS,
) -> tuple[str, ...]:
    """Return what would help and what to know, one sentence each, the best first."""
    if not plan.clusters:
        return ()
    used = sum(len(cluster.stages) for cluster in plan.clusters)
    sentences: list[str] = []
    if used <= limits.recut_nodes:
        sentences += _what_ifs(plan, profile, swarm, config, limits)
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
    if predicted.hub is not None and predicted.hub.busy_share > _HUB_LIMITS:
        return "the hub's line, see above; no faster PC would help"
    if found.is_least:
        return "the programs themselves, with a model this small; no faster PC would help"
    limit, twice = _LIMIT_NAMES[found.limited_by]
    where = f"{found.node} in cluster {cluster_name(found.cluster)} is held up by {limit}"
    faster = predicted.samples_per_second + found.gain_samples_per_second
    if faster < 1.01 * predicted.samples_per_second:
        return f"{where}, but others are as near to their limits; no single one stands out"
    return f"{where}; {twice} would give {_instead(faster, predicted.samples_per_second)}"


def describe_rate(predicted: Forecast) -> str:
    """Return the speed of the swarm, and whether it is no more than a bound."""
    found, rate = predicted.bottleneck, show_samples(predicted.samples_per_second)
    if found is None or not found.is_least:
        return rate
    return f"{rate} at most: with a model this small, the programs themselves set the pace"


def describe_round(predicted: Forecast) -> str:
    """Return how long averaging takes."""
    if len(predicted.clusters) < 2:
        return "none, one cluster has nobody to average with"
    return f"{show_seconds(predicted.round_seconds)} to average all segments once"


def describe_formats(plan: Plan) -> str:
    """Return how activations and gradients travel, and on how many links each way."""
    links = [pair for cluster in plan.clusters for pair in pairwise(cluster.stages)]
    if not links:
        return "nothing crosses: every cluster is one PC"
    forward = Counter(one.activations.value for one, _ in links)
    back = Counter(other.gradients.value for _, other in links)
    ways = ("forward", forward), ("back", back)
    return "; ".join(
        f"{way} " + ", ".join(f"{name} on {count:,}" for name, count in sorted(found.items()))
        for way, found in ways
    )


def describe_hub(predicted: Forecast) -> str:
    """Return what the hub's line carries, and what it limits, in sentences."""
    hub = predicted.hub
    assert hub is not None
    samples, relay = show_rate(hub.sample_bytes_per_second), show_rate(hub.relay_bytes_per_second)
    line = f"of its {show_rate(hub.upload_bytes_per_second)}, samples take {samples}"
    if hub.num_relayed:
        pairs = show_count(hub.num_relayed, "pair")
        line += f" and {pairs} of neighbours that nobody can dial take {relay}"
    sentences = [f"{line}."]
    if hub.busy_share > _HUB_LIMITS:
        needed = show_rate(hub.busy_share * hub.upload_bytes_per_second)
        faster = show_samples(predicted.samples_per_second * hub.busy_share)
        sentences.append(f"That is more than it has, so it sets the pace: {needed} would give {faster}.")
    elif hub.busy_share > _HUB_NEARLY_FULL:
        sentences.append("It is nearly full: more PCs would not help.")
    if hub.round_bytes:
        through = show_seconds(hub.round_bytes / hub.upload_bytes_per_second)
        sentences.append(f"A round sends {show_bytes(hub.round_bytes)} through it, in {through} at best.")
    sentences.append(f"It sends the model once in {show_seconds(hub.first_weights_seconds)}.")
    return " ".join(sentences)


def describe_left_out(left_out: Mapping[str, int], num_nodes: int) -> str:
    """Return how many PCs have no stage, and why, in sentences; nothing if all of them have one."""
    if not left_out:
        return ""
    total = sum(left_out.values())
    verb = "has" if total == 1 else "have"
    reasons = (f"{count:,} {_LEFT_OUT[reason]}" for reason, count in left_out.items())
    return f"{total:,} of {show_count(num_nodes, 'PC')} {verb} no stage: {'; '.join(reasons)}."


def show_samples(samples_per_second: float) -> str:
    """Return a training speed with three digits: 5.72 samples/s."""
    return f"{_three_digits(samples_per_second)} samples/s"


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
        "activations": stage.activations.value,
        "gradients": stage.gradients.value,
        "predicts": stage.predicts,
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


def _what_ifs(
    plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig, limits: AdviceLimits
) -> list[str]:
    """Return what a change would give, against the same clusters cut anew: a repaired plan may be behind."""
    ways = (_forecast_again, _search_again)[: 2 if len(swarm.nodes) <= limits.search_nodes else 1]
    planned = forecast(plan, profile, swarm, config)

    def try_out(changed: PlanConfig) -> Forecast:
        found = (way(plan, profile, swarm, changed) for way in ways)
        return max([planned, *filter(None, found)], key=lambda each: each.samples_per_second)

    now = try_out(config)
    sentences: list[str] = []
    if now.samples_per_second >= _LEAST_GAIN * planned.samples_per_second:
        gain = _instead(now.samples_per_second, planned.samples_per_second)
        sentences.append(f"plan anew: the same PCs would give {gain}")
    found: list[tuple[float, str]] = []
    for change, price in _changes(plan, now, config):
        then = try_out(replace(config, **change))  # type: ignore[arg-type]
        if then.samples_per_second < _LEAST_GAIN * now.samples_per_second:
            continue
        settings = " ".join(f"{key}={str(value).lower()}" for key, value in change.items())
        gain = _instead(then.samples_per_second, now.samples_per_second)
        rounds = f"{show_seconds(then.round_seconds)} instead of {show_seconds(now.round_seconds)}"
        found.append((then.samples_per_second, f"set {settings}: {gain}; {price.format(rounds=rounds)}"))
    found.sort(key=lambda one: -one[0])
    return sentences + [sentence for _, sentence in found[: limits.changes]]


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
    if not config.saves_memory:
        yield {"saves_memory": True}, "stages without room for it do not predict weights, and lag less"
    if config.versions is WeightFormat.FP32:
        yield {"versions": WeightFormat.BF16}, "late gradients are those of weights in 16 bits"
    if config.states is StateFormat.FP32:
        yield {"states": StateFormat.BF16}, "the optimizer keeps its momenta in 16 bits"
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
    widens = len(swarm.nodes) <= SEARCH_BUDGET.complete_nodes  # as the planner does
    clusters = cut_clusters(profile, swarm, config, orders, is_averaged=len(orders) > 1, widens=widens)
    if len(clusters) != len(orders):
        return None
    again = replace(plan, clusters=clusters, rings=form_rings(clusters, nodes))
    return forecast(again, profile, swarm, config)


def _search_again(plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> Forecast | None:
    """Return the forecast of the plan that a short search finds under other settings, if there is one."""
    try:
        found = form_plan(profile, swarm, config, plan.seed, budget=_SHORT_SEARCH)
    except PlanError:
        return None
    return forecast(found, profile, swarm, config)


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


_MOST_CLUSTERS = 12  # shown stage by stage; of more, as many lines
_MOST_NAMES = 8  # of spares and backups
_LABEL_WIDTH = 12
_ROOMY_WIDTH = 100
_LEAST_NAME = 6
_NAMES = ("node", "slowest node")
_WORDS = (*_NAMES, "cluster", "limit")


def show_plan(
    plan: Plan,
    predicted: Forecast,
    profile: ModelProfile,
    advice: tuple[str, ...],
    width: int,
    left_out: Mapping[str, int] | None = None,
) -> Iterator[RenderableType]:
    """Yield what to print, from the model down to the advice, for a terminal of `width` columns."""
    nodes = sum(len(cluster.stages) for cluster in plan.clusters) + len(plan.spares)
    size = show_bytes(sum(profile.parameter_bytes))
    batch = show_count(profile.samples_per_batch, "sample")
    yield Text(f"{profile.name} on {show_count(nodes, 'node')}", style="bold")
    yield Text(f"{show_count(profile.num_positions, 'position')}, {size} of parameters, {batch} per batch\n")
    if len(plan.clusters) > _MOST_CLUSTERS:
        yield from _show_summary(predicted, width)
    else:
        for k, cluster in enumerate(predicted.clusters):
            yield from _show_cluster(k, cluster, plan.clusters[k].accumulate, width)
    for label, text in _findings(plan, predicted, advice, left_out or {}):
        margin = " " * (_LABEL_WIDTH + (2 if text.startswith("- ") else 0))
        lines = textwrap.wrap(text, max(width - len(margin), 20), break_on_hyphens=False)
        yield Text.assemble((label.ljust(_LABEL_WIDTH), "bold"), f"\n{margin}".join(lines))


def _show_cluster(
    index: int, cluster: ClusterForecast, accumulate: int, width: int
) -> Iterator[RenderableType]:
    updates = "every batch" if accumulate == 1 else f"every {accumulate} batches"
    pace = f"a batch each {show_seconds(cluster.period_seconds)}, an update {updates}, lag {cluster.lag}"
    title = (f"Cluster {cluster_name(index)}", "bold")
    yield Text.assemble(title, f"  {show_samples(cluster.samples_per_second)}, {pace}")
    headers = ("#", "node", "positions", "memory", "compute", "send", "receive", "busy", "limit")
    rows = [(str(number), *_terminal_stage_row(stage)) for number, stage in enumerate(cluster.stages, 1)]
    yield _rich_table(width, headers, rows)
    yield ""


def _terminal_stage_row(stage: StageForecast) -> tuple[str, ...]:
    start, last = stage.stage.start, stage.stage.stop - 1
    return (
        stage.stage.node,
        f"{start}-{last}" if last > start else str(start),
        f"{stage.memory_bytes / 1e9:.1f}/{stage.available_bytes / 1e9:.1f} GB",
        show_seconds(stage.compute_seconds),
        show_seconds(stage.send_seconds),
        show_seconds(stage.receive_seconds),
        f"{100 * stage.busy_share:.0f} %",
        stage.limited_by,
    )


def _show_summary(predicted: Forecast, width: int) -> Iterator[RenderableType]:
    """Yield one line per cluster, for swarms whose stages would fill pages."""
    headers = ("cluster", "stages", "samples/s", "batch each", "lag", "slowest node", "limit")
    rows = []
    for k, cluster in enumerate(predicted.clusters[:_MOST_CLUSTERS]):
        slowest = max(cluster.stages, key=lambda s: max(s.compute_seconds, s.send_seconds, s.receive_seconds))
        pace = f"{cluster.samples_per_second:.3g}", show_seconds(cluster.period_seconds), str(cluster.lag)
        count = str(len(cluster.stages))
        rows.append((cluster_name(k), count, *pace, slowest.stage.node, slowest.limited_by))
    yield _rich_table(width, headers, rows)
    rest = [cluster.samples_per_second for cluster in predicted.clusters[_MOST_CLUSTERS:]]
    speed = (
        f"{min(rest):.3g} to {max(rest):.3g} samples/s" if min(rest) < max(rest) else show_samples(rest[0])
    )
    yield Text(f"and {show_count(len(rest), 'more cluster')} of {speed}; --json lists every stage\n")


def _rich_table(width: int, headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    """Return a table in which names, and nothing else, are cut short when the terminal is narrow."""
    gap = 2 if width >= _ROOMY_WIDTH else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    needed = [max(map(cell_len, column)) for column in zip(headers, *rows, strict=True)]
    for header, size in zip(headers, needed, strict=True):
        is_name = header in _NAMES
        room = width - sum(needed) + size - gap * (len(headers) - 1) if is_name else size
        table.add_column(
            Text(header, style="dim"),
            justify="left" if header in _WORDS else "right",
            no_wrap=True,
            overflow="ellipsis",
            width=max(min(size, _LEAST_NAME), min(size, room)),
        )
    for row in rows:
        table.add_row(*row)
    return table


def _findings(
    plan: Plan, predicted: Forecast, advice: tuple[str, ...], left_out: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    yield "predicted", describe_rate(predicted)
    yield "wire", describe_formats(plan)
    if predicted.hub is not None:
        yield "hub", describe_hub(predicted)
    yield "staleness", f"{show_count(predicted.staleness, 'update')} at most"
    yield "round", describe_round(predicted)
    yield "deaths", f"cost about {100 * predicted.lost_share:.2g} % of the work"
    yield "bottleneck", describe_bottleneck(predicted)
    yield "spares", _some(plan.spares)
    if left_out:
        num_nodes = sum(len(cluster.stages) for cluster in plan.clusters) + len(plan.spares)
        yield "left out", describe_left_out(left_out, num_nodes)
    yield "backups", _some([f"{backup.spare} for {backup.node}" for backup in plan.backups])
    for number, sentence in enumerate(advice):
        yield ("" if number else "advice"), f"- {sentence}"


def _some(names: Sequence[str]) -> str:
    """Return a list as people read one: the first few, and how many more."""
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more or "none"
