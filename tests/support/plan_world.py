"""Small models and nodes by hand, the laws of a plan, and the cost model once more in plain loops."""

import math
from itertools import pairwise

from hypothesis import strategies as st

from ravnest.config import (
    DELTA_FORMATS,
    Averaging,
    OptimizerKind,
    PlanConfig,
    Recompute,
    SearchBudget,
    StateFormat,
    WeightFormat,
    WireChoice,
)
from ravnest.ids import NodeId
from ravnest.plan.assembly import sample_rooms, stage_bytes
from ravnest.plan.forecast import forecast
from ravnest.plan.line import LineCost
from ravnest.plan.types import ModelProfile, Node, Plan, Swarm

MB = 1e6
# What stages of this hold and send is easily reckoned by hand.
TWO_POSITIONS = ModelProfile(
    name="two",
    samples_per_batch=4,
    parameter_bytes=(10 * MB, 20 * MB),
    matrix_bytes=(6 * MB, 0.0),
    forward_flops=(1e9, 2e9),
    backward_flops=(2e9, 4e9),
    saved_bytes=(3 * MB, 5 * MB),
    crossing_bytes=(1 * MB, 8 * MB, 2 * MB),
)
BY_HAND = PlanConfig(
    in_flight_per_hop=2,
    max_lag=2,
    averaging_share=0.2,
    overhead_bytes=7 * MB,
    recover_seconds=30.0,
    recompute=Recompute.NEVER,
    versions=WeightFormat.FP32,
    states=StateFormat.FP32,
    saves_memory=False,
    activations=WireChoice.BF16,
    gradients=WireChoice.BF16,
)
# A parameter byte costs two (weights and gradient), one per old version, and 2.5 when clusters average.
SIMPLE = PlanConfig(
    versions=WeightFormat.FP32,
    states=StateFormat.FP32,
    optimizer=OptimizerKind.SGD,
    predict_weights=False,
    saves_memory=False,
    recompute=Recompute.NEVER,
    activations=WireChoice.BF16,
    gradients=WireChoice.BF16,
    overhead_bytes=0.0,
    microbatch_seconds=0.0,
)


def even_model(num_positions=6, parameter_mb=10.0, crossing_mb=0.01, saved_mb=0.0):
    """A line of equal positions: 1 GFLOP forward, 2 GFLOP backward each."""
    return ModelProfile(
        name="even",
        samples_per_batch=10,
        parameter_bytes=(parameter_mb * MB,) * num_positions,
        matrix_bytes=(0.0,) * num_positions,
        forward_flops=(1e9,) * num_positions,
        backward_flops=(2e9,) * num_positions,
        saved_bytes=(saved_mb * MB,) * num_positions,
        crossing_bytes=(crossing_mb * MB,) * (num_positions + 1),
    )


def node(name, memory_mb=1000.0, gflops=100.0, **facts):
    """A node on a fast, close link."""
    links = {"upload_bytes_per_second": 1e9, "download_bytes_per_second": 1e9, "latency_seconds": 1e-6}
    return Node(NodeId(name), memory_mb * MB, gflops * 1e9, **(links | {"uptime_seconds": 1e12} | facts))


# The search stops after its greedy seeds: laws hold for whatever it finds, and this is quick.
FIRST_ANSWERS = SearchBudget(clusters=-1, quick_clusters=-1, complete_nodes=0)


def swarm_of(*nodes):
    return Swarm(tuple(nodes))


def _sizes(low, high):
    return st.floats(math.log(low), math.log(high)).map(lambda x: float(round(math.exp(x), 6)))


@st.composite
def profiles(draw, least_parameters=1e6):
    length = draw(st.integers(3, 12))

    def line(low, high, extra=0):
        return tuple(draw(st.lists(_sizes(low, high), min_size=length + extra, max_size=length + extra)))

    parameters = line(least_parameters, 1e8)
    matrices = tuple(size * draw(st.sampled_from([0.0, 0.5, 1.0])) for size in parameters)
    frozen = tuple(0.5 * (size - part) for size, part in zip(parameters, matrices, strict=True))
    return ModelProfile(
        name="m",
        samples_per_batch=draw(st.integers(1, 16)),
        parameter_bytes=parameters,
        matrix_bytes=matrices,
        forward_flops=line(1e8, 1e11),
        backward_flops=line(1e8, 1e11),
        saved_bytes=line(1e4, 1e7),
        crossing_bytes=line(1e3, 1e7, extra=1),
        frozen_bytes=draw(st.sampled_from([(), frozen])),
        buffer_bytes=draw(st.sampled_from([(), tuple(0.1 * size for size in parameters)])),
    )


configs = st.builds(
    PlanConfig,
    optimizer=st.sampled_from(OptimizerKind),
    keeps_ema=st.booleans(),
    predict_weights=st.booleans(),
    max_lag=st.integers(1, 4),
    saves_memory=st.booleans(),
    versions=st.sampled_from(WeightFormat),
    states=st.sampled_from(StateFormat),
    precision=st.sampled_from(WeightFormat),
    recompute=st.sampled_from(Recompute),
    activations=st.sampled_from(WireChoice),
    gradients=st.sampled_from(WireChoice),
    deltas=st.sampled_from(DELTA_FORMATS),
    averaging=st.sampled_from(Averaging),
    speed_ratio=st.sampled_from([1.0, 4.0, 1e6]),
    max_stages=st.sampled_from([1, 2, 3, 48]),
    max_window=st.sampled_from([2, 96]),
    in_flight_per_hop=st.integers(1, 3),
    overhead_bytes=st.sampled_from([0.0, 2e7]),
)


def nodes(name, memory=(5e7, 4e9)):
    return st.builds(
        Node,
        name=st.just(NodeId(name)),
        memory_bytes=_sizes(*memory),
        flops_per_second=_sizes(1e11, 1e13),
        upload_bytes_per_second=_sizes(1e6, 1e8),
        download_bytes_per_second=_sizes(1e6, 1e8),
        latency_seconds=_sizes(1e-3, 1e-1),
        region=st.sampled_from(["", "eu", "us"]),
        is_reachable=st.booleans(),
        uptime_seconds=_sizes(3e3, 1e7),
    )


@st.composite
def swarms(draw, most=10, memory=(5e7, 4e9)):
    count = draw(st.integers(1, most))
    return Swarm(tuple(draw(nodes(f"n{k}", memory)) for k in range(count)), (("eu", "us", 0.045),))


def check_laws(plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> None:
    """Assert everything that holds for every plan, whoever made it."""
    hosts = [stage.node for cluster in plan.clusters for stage in cluster.stages]
    names = [each.name for each in swarm.nodes]
    assert len(hosts) == len(set(hosts))
    assert list(plan.spares) == [name for name in names if name not in hosts]
    assert set(hosts) <= set(names)
    for cluster in plan.clusters:
        assert 1 <= len(cluster.stages) <= config.max_stages
        assert _tiles(cluster.stages, profile.num_positions)
        for depth, stage in enumerate(reversed(cluster.stages)):
            assert 1 <= stage.window <= min(config.max_window, config.in_flight_per_hop * depth + 1)
        lag = -(-(cluster.stages[0].window - 1) // cluster.accumulate)
        assert lag <= config.max_lag
    check_rings(plan, profile)
    check_memory(plan, profile, swarm, config)


def check_rings(plan, profile):
    """Segments tile the line and each has one owner per cluster, who hosts all of it."""
    if len(plan.clusters) < 2:
        assert plan.rings == ()
        return
    assert _tiles(plan.rings, profile.num_positions)
    for ring in plan.rings:
        owners = [
            stage.node
            for cluster in plan.clusters
            for stage in cluster.stages
            if stage.start <= ring.start and ring.stop <= stage.stop
        ]
        assert len(ring.owners) == len(plan.clusters)
        assert sorted(ring.owners) == sorted(owners)


def check_memory(plan, profile, swarm, config):
    """No stage exceeds its node's memory, and no backup would if it took over."""
    memory = {each.name: each.memory_bytes for each in swarm.nodes}
    for cluster in forecast(plan, profile, swarm, config).clusters:
        for each in cluster.stages:
            assert each.available_bytes == memory[each.stage.node]
            assert each.memory_bytes <= each.available_bytes
    line = LineCost(profile, config, is_averaged=len(plan.clusters) > 1)
    places = {stage.node: (stage, each) for each in plan.clusters for stage in each.stages}
    check_sample_rooms(plan, line, {each.name: each for each in swarm.nodes})
    assert len({backup.spare for backup in plan.backups}) == len(plan.backups)
    assert len({backup.node for backup in plan.backups}) == len(plan.backups)
    for backup in plan.backups:
        assert backup.spare in plan.spares
        assert stage_bytes(line, *places[backup.node]) <= memory[backup.spare]


def check_sample_rooms(plan, line, nodes):
    """What may wait in a node fits beside its stage; the stage's own leases are in the plan."""
    sizes = line.crossing / line.profile.samples_per_batch
    for cluster, rooms in zip(plan.clusters, sample_rooms(plan.clusters, line, nodes), strict=True):
        for stage, room in zip(cluster.stages, rooms, strict=True):
            is_first, is_last = stage.start == 0, stage.stop == line.num_positions
            size = sizes[0] + sizes[-1] * (is_last or not is_first)
            leased = 1.05 * line.leased_bytes(stage.window) if is_first else 0.0
            waiting = 0.0 if size == 0 else room * size
            assert room >= 0
            assert stage_bytes(line, stage, cluster) - leased + waiting <= nodes[stage.node].memory_bytes + 1


def _tiles(intervals, length):
    cuts = [each.start for each in intervals] + [intervals[-1].stop]
    stops = [each.stop for each in intervals]
    return cuts[0] == 0 and cuts[-1] == length and cuts[1:] == stops and cuts == sorted(set(cuts))


def slow_forecast(plan, profile, swarm, config):
    """Return stage times and the period of each cluster, held back included, and samples per second."""
    by_name = {each.name: each for each in swarm.nodes}
    is_averaged = len(plan.clusters) > 1
    overlaps = is_averaged and config.averaging.overlaps
    share = 1.0 - config.averaging_share if overlaps else 1.0
    slow = [_slow_cluster(cluster, profile, by_name, swarm, config, share) for cluster in plan.clusters]
    periods = [period for _, period in slow]
    held = [max(period, max(periods) / config.speed_ratio) for period in periods]
    rate = sum(profile.samples_per_batch / period for period in held)
    if is_averaged and config.averaging is Averaging.BLOCKING:
        rate *= 1.0 - config.averaging_share
    return [stages for stages, _ in slow], held, rate


def _slow_cluster(cluster, profile, by_name, swarm, config, share):
    stages = cluster.stages
    slowest, cycle, parts = 0.0, 0.0, []
    for k in range(len(stages) - 1, -1, -1):  # a batch's way back to stage k includes all stages after it
        stage, host = stages[k], by_name[stages[k].node]
        work = sum(profile.forward_flops[stage.start : stage.stop]) * (2 if stage.recompute else 1)
        work += sum(profile.backward_flops[stage.start : stage.stop])
        compute = max(work / host.flops_per_second, config.microbatch_seconds)
        before, after = profile.crossing_bytes[stage.start], profile.crossing_bytes[stage.stop]
        is_first, is_last = k == 0, k == len(stages) - 1
        sent = 0.0 if is_first else before * stage.gradients.ratio
        sent += 0.0 if is_last else after * stage.activations.ratio
        received = before * (1.0 if is_first else stages[k - 1].activations.ratio)
        received += after * (1.0 if is_last else stages[k + 1].gradients.ratio)
        times = [
            compute,
            sent / (share * host.upload_bytes_per_second),
            received / (share * host.download_bytes_per_second),
        ]
        parts.insert(0, tuple(times))
        cycle += compute
        if not is_last:
            sizes = after * stage.activations.ratio, after * stages[k + 1].gradients.ratio
            relay, travel = _slow_link(host, by_name[stages[k + 1].node], sizes, swarm, config, share)
            times.append(relay)
            cycle += travel
        slowest = max([slowest, *times, cycle / stage.window])
    deaths = sum(config.recover_seconds / by_name[stage.node].uptime_seconds for stage in stages)
    return parts, slowest * (1.0 + deaths)


def _slow_link(host, other, sizes, swarm, config, share):
    """Return the relay's seconds and the there-and-back seconds between a stage and the one after it."""
    forward, backward = sizes
    latency = host.latency_seconds + other.latency_seconds
    for one, two, seconds in swarm.region_latency:
        if {one, two} == {host.region, other.region}:
            latency += seconds
    up = share * min(host.upload_bytes_per_second, other.download_bytes_per_second)
    down = share * min(other.upload_bytes_per_second, host.download_bytes_per_second)
    travel = forward / up + backward / down
    if host.is_reachable or other.is_reachable:
        return 0.0, travel + 2 * latency
    relay = max(forward, backward) / config.relay_bytes_per_second
    return relay, max(travel, (forward + backward) / config.relay_bytes_per_second) + 2 * latency


# Copies that the first and the second moment take; what a job leaves open is planned in 16 bits.
STATES = {"fp32": (1, 1), "auto": (0.5, 1), "bf16": (0.5, 1), "int8": (257 / 1024, 0.5)}


def slow_memory(stage, cluster, profile, config, is_averaged):
    """Return the bytes a stage needs, counted copy by copy."""
    versions = math.ceil((stage.window - 1) / cluster.accumulate)
    is_predicted = config.optimizer is OptimizerKind.MUON and config.predict_weights and stage.predicts
    if "bf16" not in (config.versions, config.precision):
        copies = 2.0 + versions + (1 if is_predicted and versions else 0)  # weights, gradient
    else:  # narrow gradients of narrow weights
        copies = 1.0 + (0.5 + 0.5 * versions + 0.5 if versions else 1.0)
    copies += config.keeps_ema
    if is_averaged:
        copies += 2 + config.deltas.ratio + (0 if config.deltas == "fp32" else 1)
    total = 0.0
    for k in range(stage.start, stage.stop):
        frozen, buffers = (
            column[k] if column else 0.0 for column in (profile.frozen_bytes, profile.buffer_bytes)
        )
        trained = profile.parameter_bytes[k] - frozen
        first, square = STATES[config.states]
        state = 0.0 if config.optimizer in ("sgd", "rmsprop", "adagrad", "adafactor") else first * trained
        if config.optimizer not in ("sgd", "momentum", "lion", "adafactor"):
            is_muon = config.optimizer is OptimizerKind.MUON
            state += square * (trained - (profile.matrix_bytes[k] if is_muon else 0.0))
        held = 0.0 if stage.recompute else profile.saved_bytes[k] * stage.window
        total += copies * trained + frozen + buffers + state + held
    if stage.recompute:
        number = cluster.stages.index(stage)
        ratio = cluster.stages[number - 1].activations.ratio if number else 1.0  # as they travelled
        total += _slow_blocks(stage, profile) + stage.window * ratio * profile.crossing_bytes[stage.start]
    total += 0 if stage.start else 4 * stage.window * profile.crossing_bytes[0]
    return config.overhead_bytes + 1.05 * total


def _slow_blocks(stage, profile):
    """Return what a stage holds that recomputes: between blocks for each batch, and inside the largest."""
    length, crossing = profile.num_positions, profile.crossing_bytes
    ends = [k for k in range(1, length) if crossing[k] <= min(crossing[max(1, k - 4) : min(length, k + 5)])]
    inner = [k for k in ends if stage.start < k < stage.stop]
    saved = sum(profile.saved_bytes[stage.start : stage.stop])
    one = stage.window * sum(crossing[k] for k in inner) / max(1, len(inner))
    count = min(max(1, round(math.sqrt(saved / max(one, 1.0)))), len(inner) + 1)
    edges = [0, *ends, length]
    parts = [sum(profile.saved_bytes[a:b]) for a, b in pairwise(edges) if a < stage.stop and b > stage.start]
    return min(saved, one * (count - 1) + max(saved / count, min(saved, max(parts))))


def swarm_to_dict(swarm):
    """What, written as JSON or TOML, `read_swarm` reads back unchanged."""
    nodes = [
        {
            "name": each.name,
            "memory": each.memory_bytes,
            "compute": each.flops_per_second,
            "up": each.upload_bytes_per_second,
            "down": each.download_bytes_per_second,
            "latency": each.latency_seconds,
            "region": each.region,
            "reachable": each.is_reachable,
            "uptime": each.uptime_seconds,
        }
        for each in swarm.nodes
    ]
    latency = [{"between": [one, other], "seconds": seconds} for one, other, seconds in swarm.region_latency]
    return {"node": nodes, "latency": latency}
