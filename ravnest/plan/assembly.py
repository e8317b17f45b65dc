"""A plan from clusters: formats, lag, rings, spares and backups.

Clusters cut the model in different places. Take every cut of every cluster: between two neighbouring cuts
each cluster has exactly one owner. That interval is a segment and its owners form a ring. The search assumes
the leanest choice of everything; here stages get back what costs no time.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ravnest.config import PlanConfig, WireFormat
from ravnest.ids import NodeId
from ravnest.plan.cost import NodeTable, Rows, timing
from ravnest.plan.line import ALLOCATED, Floats, Ints, LineCost
from ravnest.plan.types import Backup, Cluster, ModelProfile, Node, Plan, Ring, Stage, Swarm

UNBOUNDED = 2**62  # samples
_MOST_USE = 0.5  # of the time, for a link that carries a wider format than it must


def form_rings(clusters: tuple[Cluster, ...], nodes: Mapping[NodeId, Node]) -> tuple[Ring, ...]:
    """Return one ring per segment, in model order; a single cluster has none, for it has no partner."""
    if len(clusters) < 2:
        return ()
    cuts = sorted(
        {cut for cluster in clusters for stage in cluster.stages for cut in (stage.start, stage.stop)}
    )
    walks = [iter(cluster.stages) for cluster in clusters]
    current = [next(walk) for walk in walks]
    rings = []
    for start, stop in pairwise(cuts):
        for k, walk in enumerate(walks):
            if current[k].stop <= start:
                current[k] = next(walk)
        owners = travelling_order(nodes[stage.node] for stage in current)
        rings.append(Ring(start, stop, owners))
    return tuple(rings)


def travelling_order(members: Iterable[Node]) -> tuple[NodeId, ...]:
    """Order a ring: neighbours from one region, and nodes that cannot be dialled apart from each other.

    Every member sends the same bytes wherever it stands, so bandwidth does not decide; latency adds up
    along the ring, and two neighbours that cannot be dialled need the hub between them.
    """
    ordered = sorted(members, key=lambda node: (node.region, node.name))
    visible = [node for node in ordered if node.is_reachable]
    hidden = [node for node in ordered if not node.is_reachable]
    if not visible:
        return tuple(node.name for node in hidden)
    around: list[NodeId] = []
    num_placed = 0
    for k, node in enumerate(visible, start=1):
        around.append(node.name)
        share = len(hidden) * k // len(visible)  # spread evenly: at most one between two others if it can be
        around.extend(other.name for other in hidden[num_placed:share])
        num_placed = share
    return tuple(around)


def assemble_plan(
    clusters: tuple[Cluster, ...],
    profile: ModelProfile,
    swarm: Swarm,
    config: PlanConfig,
    seed: int,
    plan_id: int,
    backups: tuple[Backup, ...] = (),
) -> Plan:
    """Return the plan of these clusters; backups that still hold are kept, because they hold snapshots."""
    nodes = {node.name: node for node in swarm.nodes}
    used = {stage.node: (stage, cluster) for cluster in clusters for stage in cluster.stages}
    spares = tuple(node.name for node in swarm.nodes if node.name not in used)
    line = LineCost(profile, config, is_averaged=len(clusters) > 1)
    return Plan(
        plan_id=plan_id,
        seed=seed,
        clusters=clusters,
        rings=form_rings(clusters, nodes),
        spares=spares,
        backups=_choose_backups(line, used, [nodes[name] for name in spares], nodes, backups),
    )


def build_clusters(
    line: LineCost, nodes: NodeTable, swarm: Swarm, orders: Sequence[Sequence[int]], cuts: Ints
) -> list[Cluster]:
    """Return clusters of these nodes (by place, from the end of the line) with these cuts [cluster, depth].

    The search assumes the leanest choice of everything. Here stages get back what costs no time: wider
    formats, predicted weights, more lag.
    """
    lengths = np.array([len(order) for order in orders], np.int64)
    table = np.zeros((len(orders), cuts.shape[1] - 1), np.int64)
    for row, order in enumerate(orders):
        table[row, : len(order)] = order
    rows = choose_formats(line, nodes, Rows(table, lengths, cuts))
    times = timing(line, nodes, rows)
    rows = replace(rows, window=times.window, recompute=times.recompute)
    rows = _choose_lag(line, nodes, rows)
    assert rows.accumulate is not None
    assert rows.predicts is not None
    forward, backward = format_names(line, rows)
    clusters = []
    for row, order in enumerate(orders):
        stages = [
            Stage(
                node=swarm.nodes[node].name,
                start=int(cuts[row, depth + 1]),
                stop=int(cuts[row, depth]),
                window=int(times.window[row, depth]),
                recompute=bool(times.recompute[row, depth]),
                activations=forward[row][depth],
                gradients=backward[row][depth],
                predicts=bool(rows.predicts[row, depth]),
            )
            for depth, node in enumerate(order)
        ]
        clusters.append(Cluster(tuple(reversed(stages)), int(rows.accumulate[row])))
    return clusters


def choose_formats(line: LineCost, nodes: NodeTable, rows: Rows) -> Rows:
    """Return the clusters with the widest format of each link and direction that does not slow them down.

    The search assumes the narrowest formats. Only links that set the pace need them: every other link gets
    the widest one that leaves at least half of it free, for rounds and for what was measured wrong.
    """
    shape = rows.nodes.shape
    narrow = replace(
        rows, forward=np.full(shape, line.forward_ratio), backward=np.full(shape, line.backward_ratio)
    )
    formats = _ratios(line.config.activation_formats), _ratios(line.config.gradient_formats)
    if all(len(each) == 1 for each in formats):
        return narrow
    before = timing(line, nodes, narrow)
    pace = before.stage.max(axis=1, initial=1e-9)[:, None]
    wide = narrow
    for forward in formats[0]:
        wide = _widen(line, nodes, wide, pace, "forward", forward)
    for backward in formats[1]:
        wide = _widen(line, nodes, wide, pace, "backward", backward)
    after = timing(line, nodes, wide)
    fits = (after.memory <= nodes.memory[rows.nodes]).all(axis=1)
    is_free = (fits & (after.seconds <= before.seconds * (1 + 1e-9)))[:, None]
    assert wide.forward is not None
    assert wide.backward is not None
    return replace(
        rows,
        forward=np.where(is_free, wide.forward, line.forward_ratio),
        backward=np.where(is_free, wide.backward, line.backward_ratio),
    )


def _ratios(formats: tuple[WireFormat, ...]) -> list[float]:
    """Return bytes on the wire per byte of fp32, the narrowest first."""
    return sorted({each.ratio for each in formats})


def _widen(line: LineCost, nodes: NodeTable, rows: Rows, pace: Floats, way: str, ratio: float) -> Rows:
    """Give links this format where the sender, the receiver and the hub between them stay half idle."""
    column = getattr(rows, way)
    wider = replace(rows, **{way: np.maximum(column, ratio)})
    times = timing(line, nodes, replace(wider, window=np.ones(rows.nodes.shape, np.int64)))
    sends, receives, relays = (each <= _MOST_USE * pace for each in (times.send, times.receive, times.relay))
    if line.config.hub_bytes_per_second:  # all relays share one line
        relays &= times.relay == 0.0
    is_free = np.zeros(column.shape, bool)
    if way == "forward":  # from each stage to the one after it, which has one depth less
        is_free[:, 1:] = sends[:, 1:] & receives[:, :-1] & relays[:, 1:]
    else:
        is_free[:, :-1] = sends[:, :-1] & receives[:, 1:] & relays[:, 1:]
    # Nobody gets what the last stage would send forward, or the first one back.
    is_free[np.arange(len(is_free)), 0 if way == "forward" else rows.lengths - 1] = True
    return replace(rows, **{way: np.where(is_free, np.maximum(column, ratio), column)})


def format_names(line: LineCost, rows: Rows) -> tuple[list[list[WireFormat]], list[list[WireFormat]]]:
    """Return the formats of each stage, [cluster][depth], for sending forward and back."""
    assert rows.forward is not None
    assert rows.backward is not None
    return (
        _names(rows.forward, line.config.activation_formats),
        _names(rows.backward, line.config.gradient_formats),
    )


def _names(ratios: Floats, formats: tuple[WireFormat, ...]) -> list[list[WireFormat]]:
    known = np.array([each.ratio for each in formats])
    nearest: Ints = np.abs(ratios[:, :, None] - known).argmin(axis=2)
    return [[formats[k] for k in row] for row in nearest.tolist()]


def _choose_lag(line: LineCost, nodes: NodeTable, rows: Rows) -> Rows:
    """Let stages predict weights where memory allows, and clusters lag as much as all stages can hold."""
    assert rows.window is not None
    config, room = line.config, nodes.memory[rows.nodes]
    root_window = rows.window[np.arange(len(rows.lengths)), rows.lengths - 1]
    lags = range(1 if config.saves_memory else config.max_lag, config.max_lag + 1)
    accumulate = _accumulate(root_window, lags[0])
    rows = replace(rows, accumulate=accumulate, predicts=np.ones(room.shape, bool))
    if config.saves_memory:
        rows = replace(rows, predicts=timing(line, nodes, rows).memory <= room)
    for lag in lags[1:]:
        fewer = _accumulate(root_window, lag)
        fits = (timing(line, nodes, replace(rows, accumulate=fewer)).memory <= room).all(axis=1)
        accumulate = np.where(fits, fewer, accumulate)
    return replace(rows, accumulate=accumulate)


def _accumulate(root_window: Ints, lag: int) -> Ints:
    return np.maximum(1, -(-(root_window - 1) // lag))


def stage_bytes(line: LineCost, stage: Stage, cluster: Cluster) -> float:
    """Return the memory a stage needs, wherever it runs."""
    start, stop, window = (np.array(value) for value in (stage.start, stage.stop, stage.window))
    versions = line.versions(window, np.array(cluster.accumulate))
    held = _input_ratio(stage, cluster) * line.inner[start] + line.data_before[start]
    predicts = np.array(stage.predicts)
    return float(line.memory(start, stop, window, versions, stage.recompute, predicts, held))


def _needed(line: LineCost, used: dict[NodeId, tuple[Stage, Cluster]]) -> dict[NodeId, float]:
    """Return the memory of all stages, as `stage_bytes` does for one; those that recompute apart."""
    found: dict[NodeId, float] = {}
    for recompute in (False, True):
        places = [each for each in used.values() if each[0].recompute == recompute]
        if not places:
            continue
        names = [stage.node for stage, _ in places]
        columns = [(s.start, s.stop, s.window, c.accumulate, s.predicts) for s, c in places]
        start, stop, window, accumulate, predicts = (np.array(each) for each in zip(*columns, strict=True))
        ratio = np.array([_input_ratio(stage, cluster) for stage, cluster in places])
        held = ratio * line.inner[start] + line.data_before[start]
        versions = line.versions(window, accumulate)
        memory = line.memory(start, stop, window, versions, recompute, predicts, held)
        found.update(zip(names, memory.tolist(), strict=True))
    return found


def sample_rooms(
    clusters: Sequence[Cluster], line: LineCost, nodes: Mapping[NodeId, Node]
) -> list[tuple[int, ...]]:
    """Return the samples that fit beside each stage of each cluster, those that are leased included.

    A root waits with the fields of a batch, any other stage that consumes some with labels, or with those
    that the root consumes, too. The line does not know which, so every one but the root counts all of them.
    """
    needed = _needed(line, {stage.node: (stage, each) for each in clusters for stage in each.stages})
    sizes = line.crossing / line.profile.samples_per_batch  # of a sample
    everything = float(sizes[0] + sizes[-1])
    found = []
    for cluster in clusters:
        free = [nodes[stage.node].memory_bytes - needed[stage.node] for stage in cluster.stages]
        free[0] += ALLOCATED * line.leased_bytes(cluster.stages[0].window)
        first = everything if len(free) == 1 else float(sizes[0])
        found.append(tuple(_count(room, everything if k else first) for k, room in enumerate(free)))
    return found


def _count(room_bytes: float, sample_bytes: float) -> int:
    return UNBOUNDED if sample_bytes <= 0 else max(0, int(room_bytes / (ALLOCATED * sample_bytes)))


def _input_ratio(stage: Stage, cluster: Cluster) -> float:
    """Return how the inputs of a stage travel, in bytes for each byte of fp32."""
    number = cluster.stages.index(stage)
    return cluster.stages[number - 1].activations.ratio if number else 0.0


def _choose_backups(
    line: LineCost,
    used: dict[NodeId, tuple[Stage, Cluster]],
    spares: list[Node],
    nodes: dict[NodeId, Node],
    current: tuple[Backup, ...],
) -> tuple[Backup, ...]:
    """Give each of the least reliable nodes the smallest spare that could take over its stage."""
    free = {node.name: node.memory_bytes for node in spares}
    need = _needed(line, used) if spares else {}
    kept = [b for b in current if b.spare in free and b.node in used and need[b.node] <= free[b.spare]]
    backups = {backup.node: backup.spare for backup in kept}
    busy = set(backups.values())
    sizes = sorted((memory, name) for name, memory in free.items() if name not in busy)
    for name in sorted(used, key=lambda name: (nodes[name].uptime_seconds, name)):
        if not sizes:
            break
        if name in backups:
            continue
        fitting = bisect_left(sizes, (need[name],))
        if fitting < len(sizes):
            backups[name] = sizes.pop(fitting)[1]
    return tuple(Backup(spare, node) for node, spare in sorted(backups.items()))
