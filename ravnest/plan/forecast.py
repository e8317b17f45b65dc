"""What a plan will do: samples per second, memory, staleness, round time, and what limits it.

Reads the same cost model as the search, for any plan and any facts, so that a plan can be judged again when
the facts change. Tests check it against real schedules on a virtual clock.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ravnest.config import Averaging, PlanConfig
from ravnest.ids import NodeId
from ravnest.plan.cost import NodeTable, Rows, Timing, timing
from ravnest.plan.hub_line import HubLine
from ravnest.plan.line import Floats, LineCost
from ravnest.plan.types import Cluster, ModelProfile, Plan, Stage, Swarm

BOTTLENECKS = ("compute", "send", "receive", "relay", "latency", "memory")


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage in steady state; times are per batch."""

    stage: Stage
    memory_bytes: float
    available_bytes: float
    compute_seconds: float
    send_seconds: float
    receive_seconds: float
    busy_share: float  # of the time its device computes
    limited_by: str  # the resource nearest to its limit, one of LIMITS


@dataclass(frozen=True, slots=True)
class ClusterForecast:
    """One cluster in steady state."""

    stages: tuple[StageForecast, ...]
    period_seconds: float  # between two batches, deaths and holding back included
    samples_per_second: float
    lag: int  # updates between a batch's forward and backward at the root


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The stage whose limit costs the swarm most, and what the swarm would gain if it were twice as wide.

    `is_least`: it computes no longer than any stage must (`microbatch_seconds`); the rate is an upper bound.
    """

    cluster: int
    node: NodeId
    limited_by: str
    gain_samples_per_second: float
    is_least: bool = False


@dataclass(frozen=True, slots=True)
class HubForecast:
    """What the hub's line carries: all samples, and what passes between neighbours nobody can dial."""

    upload_bytes_per_second: float
    sample_bytes_per_second: float  # of a swarm that the hub does not hold back
    relay_bytes_per_second: float
    first_weights_seconds: float  # until every byte of the model was sent once
    round_bytes: float = 0.0  # of a round, that pass between owners nobody can dial
    num_relayed: int = 0  # pairs of neighbours in a pipeline that only the hub connects

    @property
    def busy_share(self) -> float:
        """What the swarm asks of the line, in what it carries; above one, the hub sets the pace."""
        return (self.sample_bytes_per_second + self.relay_bytes_per_second) / self.upload_bytes_per_second


@dataclass(frozen=True, slots=True)
class Forecast:
    """The whole plan in steady state."""

    clusters: tuple[ClusterForecast, ...]
    samples_per_second: float
    round_seconds: float
    staleness: int
    lost_share: float  # of the work, to nodes that die
    bottleneck: Bottleneck | None
    hub: HubForecast | None = None  # if its upload is known


@dataclass(frozen=True, slots=True)
class Outline:
    """How fast a plan is: what decisions need of a forecast, at a fraction of its cost in large swarms."""

    cluster_rates: tuple[float, ...]  # samples per second, by cluster
    samples_per_second: float
    round_seconds: float


class _Facts(NamedTuple):
    """What both know of a plan."""

    line: LineCost
    nodes: NodeTable
    rows: Rows
    times: Timing
    periods: Floats
    rates: Floats
    hub: HubForecast | None
    round_seconds: float


def outline(plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> Outline:
    """Return how fast a plan is with these nodes."""
    if not plan.clusters:
        return Outline((), 0.0, 0.0)
    facts = _find_facts(plan, profile, swarm, config)
    return Outline(tuple(facts.rates.tolist()), float(facts.rates.sum()), facts.round_seconds)


def forecast(plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> Forecast:
    """Return what the plan will do with these nodes, stage by stage."""
    if not plan.clusters:
        return Forecast((), 0.0, 0.0, 0, 0.0, None)
    line, nodes, rows, times, periods, rates, hub, round_seconds = _find_facts(plan, profile, swarm, config)
    held, lasting = (hold_back(line, x)[1] for x in (times.seconds, times.seconds / (1.0 + times.deaths)))
    usage, memory = _usage(line, times, nodes, rows), nodes.memory[rows.nodes]
    samples = profile.samples_per_batch
    clusters = tuple(
        _cluster_forecast(cluster, k, times, usage, memory[k], (float(periods[k]), float(rates[k]), samples))
        for k, cluster in enumerate(plan.clusters)
    )
    return Forecast(
        clusters=clusters,
        samples_per_second=float(rates.sum()),
        round_seconds=round_seconds,
        staleness=max(cluster.lag for cluster in clusters),
        lost_share=1.0 - float(held.sum() / lasting.sum()),
        bottleneck=_bottleneck(plan, line, usage, times),
        hub=hub,
    )


def _find_facts(plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> _Facts:
    line = LineCost(profile, config, is_averaged=len(plan.clusters) > 1)
    nodes = NodeTable.of(swarm, config)
    index = {node.name: k for k, node in enumerate(swarm.nodes)}
    rows = cluster_rows(plan.clusters, index)
    times = timing(line, nodes, rows)
    periods, rates = hold_back(line, times.seconds)
    traffic = _round_traffic(plan, line, swarm, index)
    hub = _hub_forecast(line, times, rates, traffic)
    if hub is not None and hub.busy_share > 1.0:
        periods, rates = periods * hub.busy_share, rates / hub.busy_share
    round_seconds = 0.0
    if len(plan.clusters) > 1:
        moving = _round_seconds(line, nodes, rows, times, periods, traffic)
        round_seconds = moving + _lap_latency(plan, index, nodes)
    return _Facts(line, nodes, rows, times, periods, rates, hub, round_seconds)


def _hub_forecast(
    line: LineCost, times: Timing, rates: Floats, traffic: "_RoundTraffic"
) -> HubForecast | None:
    """Return what the hub's line carries while clusters train at these samples per second."""
    upload = line.config.hub_bytes_per_second
    if not upload:
        return None
    batches = rates / line.profile.samples_per_batch
    return HubForecast(
        upload_bytes_per_second=upload,
        sample_bytes_per_second=float(batches.sum() * line.sample_bytes),
        relay_bytes_per_second=float((batches * (times.hub_bytes - line.sample_bytes)).sum()),
        first_weights_seconds=float(line.parameters[-1] / upload),
        round_bytes=traffic.relayed,
        num_relayed=int((times.relay > 0.0).sum()),
    )


def hold_back(line: LineCost, seconds: Floats) -> tuple[Floats, Floats]:
    """Return the periods clusters train at beside each other, and their samples per second."""
    config = line.config
    periods = np.maximum(seconds, seconds.max(initial=0.0) / config.speed_ratio)
    is_blocking = line.is_averaged and config.averaging is Averaging.BLOCKING
    rates = line.profile.samples_per_batch / periods
    return periods, rates * (1.0 - config.averaging_share if is_blocking else 1.0)


def shared_rate(line: LineCost, seconds: Floats, hub_bytes: Floats) -> float:
    """Return the samples per second of clusters beside each other, with one hub for all of them."""
    rates = hold_back(line, seconds)[1]
    asked = float((rates * hub_bytes).sum()) / line.profile.samples_per_batch
    return HubLine.of(line).hold_back(float(rates.sum()), asked)


def cluster_rows(clusters: tuple[Cluster, ...], index: dict[NodeId, int]) -> Rows:
    """Return clusters as arrays; `index` gives each node its place in the node table."""
    lengths = np.array([len(cluster.stages) for cluster in clusters], np.int64)
    width = int(lengths.max(initial=1))
    shape = (len(clusters), width)
    nodes, cuts = np.zeros(shape, np.int64), np.zeros((shape[0], width + 1), np.int64)
    window, recompute = np.ones(shape, np.int64), np.zeros(shape, bool)
    forward, backward, predicts = np.ones(shape), np.ones(shape), np.zeros(shape, bool)
    stages = [stage for cluster in clusters for stage in reversed(cluster.stages)]
    # All at once: to set one item of an array costs more than to compute it.
    places = np.arange(width) < lengths[:, None]
    nodes[places] = [index[stage.node] for stage in stages]
    cuts[:, :-1][places] = [stage.stop for stage in stages]
    window[places] = [stage.window for stage in stages]
    recompute[places] = [stage.recompute for stage in stages]
    ratios = {each: each.ratio for each in {x for s in stages for x in (s.activations, s.gradients)}}
    forward[places] = [ratios[stage.activations] for stage in stages]
    backward[places] = [ratios[stage.gradients] for stage in stages]
    predicts[places] = [stage.predicts for stage in stages]
    accumulate = np.array([cluster.accumulate for cluster in clusters], np.int64)
    return Rows(nodes, lengths, cuts, window, recompute, accumulate, forward, backward, predicts)


def _usage(line: LineCost, times: Timing, nodes: NodeTable, rows: Rows) -> Floats:
    """Return how near each resource of each stage is to its limit, [cluster, depth, limit]; 1 is at it."""
    # A planned window is as narrow as it may be; it limits only when it really sets the pace.
    widest, actual = times.cycle / line.window(np.arange(rows.nodes.shape[1])), times.cycle / times.window
    latency = np.where(actual > times.stage.max(axis=1)[:, None], actual, widest)
    latency[:, 0] = 0.0  # the last stage waits for no other: its cycle is its own compute
    needs = np.stack([times.compute, times.send, times.receive, times.relay, latency])
    exists = np.arange(rows.nodes.shape[1]) < rows.lengths[:, None]
    pace = np.where(exists, needs, 0.0).max(axis=(0, 2))[:, None]
    memory = times.memory / nodes.memory[rows.nodes]
    return np.where(exists, np.concatenate([needs / pace, memory[None]]), 0.0).transpose(1, 2, 0)


def _cluster_forecast(
    cluster: Cluster, k: int, times: Timing, usage: Floats, memory: Floats, pace: tuple[float, float, int]
) -> ClusterForecast:
    period, rate, samples_per_batch = pace
    stages = []
    for depth, stage in enumerate(reversed(cluster.stages)):
        stages.append(
            StageForecast(
                stage=stage,
                memory_bytes=float(times.memory[k, depth]),
                available_bytes=float(memory[depth]),
                compute_seconds=float(times.compute[k, depth]),
                send_seconds=float(times.send[k, depth]),
                receive_seconds=float(times.receive[k, depth]),
                busy_share=float(times.compute[k, depth]) * rate / samples_per_batch,
                limited_by=BOTTLENECKS[int(usage[k, depth].argmax())],
            )
        )
    lag = -(-(cluster.stages[0].window - 1) // cluster.accumulate)
    return ClusterForecast(tuple(reversed(stages)), period, rate, lag)


def _bottleneck(plan: Plan, line: LineCost, usage: Floats, times: Timing) -> Bottleneck:
    """Find the one stage and resource that, twice as wide, would speed the swarm up most."""
    seconds = times.seconds
    total = shared_rate(line, seconds, times.hub_bytes)
    best = None
    for k, cluster in enumerate(plan.clusters):
        pace = usage[k, : len(cluster.stages), :-1]
        depth, limit = np.unravel_index(int(pace.argmax()), pace.shape)
        others = np.delete(pace.ravel(), int(pace.argmax())).max()
        is_least = BOTTLENECKS[int(limit)] == "compute" and bool(
            times.compute[k, depth] <= line.config.microbatch_seconds
        )
        faster = seconds.copy()
        faster[k] *= 1.0 if is_least else max(others, 0.5)
        gain = shared_rate(line, faster, times.hub_bytes) - total
        if best is None or gain > best.gain_samples_per_second:
            node = cluster.stages[len(cluster.stages) - 1 - int(depth)].node
            best = Bottleneck(k, node, BOTTLENECKS[int(limit)], gain, is_least)
    assert best is not None
    return best


def _round_seconds(
    line: LineCost, nodes: NodeTable, rows: Rows, times: Timing, periods: Floats, traffic: "_RoundTraffic"
) -> float:
    """Return how long data moves on what training leaves of the links (all of them when it blocks)."""
    exists = np.arange(rows.nodes.shape[1]) < rows.lengths[:, None]
    upload, download = nodes.upload[rows.nodes], nodes.download[rows.nodes]
    if line.config.averaging.overlaps:
        pace = periods[:, None]
        upload = upload * (1.0 - line.link_share * times.send / pace)
        download = download * (1.0 - line.link_share * times.receive / pace)
    moving = np.where(exists, traffic.volume[rows.nodes] / np.minimum(upload, download), 0.0).max()
    through_hub = traffic.longest_relayed / line.config.relay_bytes_per_second
    if line.config.hub_bytes_per_second:  # all of it goes through one line
        through_hub = max(through_hub, traffic.relayed / line.config.hub_bytes_per_second)
    return float(max(moving, through_hub))


class _RoundTraffic(NamedTuple):
    """What a round moves, in bytes."""

    volume: Floats  # what each node of the swarm sends, and receives
    longest_relayed: float  # what one pair of owners sends through the hub
    relayed: float  # all of them together


def _round_traffic(plan: Plan, line: LineCost, swarm: Swarm, index: dict[NodeId, int]) -> _RoundTraffic:
    """Count the bytes of a round: along rings, or in a robust one straight to those who own parts."""
    hidden = np.array([not node.is_reachable for node in swarm.nodes], bool)
    volume, longest, total, count = np.zeros(len(hidden)), 0.0, 0.0, len(plan.clusters)
    is_robust = line.config.averaging is not Averaging.EXACT and line.config.mean.is_robust(count, count)
    for ring in plan.rings:
        owners = np.array([index[owner] for owner in ring.owners], np.int64)
        size = float(line.round_bytes(np.array(ring.start), np.array(ring.stop)))
        is_hidden = hidden[owners]
        num_visible = count - int(is_hidden.sum())
        if is_robust and 0 < num_visible < count:  # those that can be dialled own all parts
            share = (count + num_visible - 2) / num_visible
            volume[owners] += 0.5 * size * np.where(is_hidden, 1.0, share)
            continue
        each = (count - 1) / count * size
        volume[owners] += each
        num_relayed = int((is_hidden & np.roll(is_hidden, -1)).sum())
        if num_relayed:
            longest = max(longest, 2.0 * size / count if is_robust else each)
            total += num_relayed * each
    return _RoundTraffic(volume, longest, total)


def _lap_latency(plan: Plan, index: dict[NodeId, int], nodes: NodeTable) -> float:
    """Return the latency a part collects on its way around the slowest ring, summing and then sharing."""
    longest = 0.0
    for ring in plan.rings:
        owners = np.array([index[owner] for owner in ring.owners], np.int64)
        longest = max(longest, float(nodes.hop_seconds(owners, np.roll(owners, -1)).sum()))
    return 2.0 * longest * (len(plan.clusters) - 1) / len(plan.clusters)
