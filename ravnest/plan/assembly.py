"""Segments and rings: the finest intervals that every cluster agrees on.

Clusters cut the model in different places. Take every cut of every cluster: between two neighbouring cuts
each cluster has exactly one owner. That interval is a segment and its owners form a ring.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ravnest.config import PlanConfig
from ravnest.ids import NodeId
from ravnest.plan.cost import Ints, LineCost, NodeTable, Rows, timing
from ravnest.plan.types import Backup, Cluster, ModelProfile, Node, Plan, Ring, Stage, Swarm


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


_QUEUES = 1.75  # batches in flight over those under way; less starves clusters in simulation


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

    A window holds the batches that are under way when nothing waits, and three quarters more: where several
    stages are almost equally slow, batches queue before each of them.
    """
    lengths = np.array([len(order) for order in orders], np.int64)
    table = np.zeros((len(orders), cuts.shape[1] - 1), np.int64)
    for row, order in enumerate(orders):
        table[row, : len(order)] = order
    times = timing(line, nodes, Rows(table, lengths, cuts))
    enough = np.ceil(_QUEUES * times.cycle / times.seconds[:, None]).astype(np.int64) + 2
    window = np.where(np.arange(table.shape[1]) > 0, np.minimum(times.window, enough), 1)
    root_window = window[np.arange(len(orders)), lengths - 1]
    accumulate = np.maximum(1, -(-(root_window - 1) // line.config.max_lag))
    # Narrower windows and fewer versions may free the memory that makes recomputing unnecessary.
    recompute = timing(line, nodes, Rows(table, lengths, cuts, window, accumulate=accumulate)).recompute
    clusters = []
    for row, order in enumerate(orders):
        stages = [
            Stage(
                node=swarm.nodes[node].name,
                start=int(cuts[row, depth + 1]),
                stop=int(cuts[row, depth]),
                window=int(window[row, depth]),
                recompute=bool(recompute[row, depth]),
                activations=line.config.activations,
                gradients=line.config.gradients,
            )
            for depth, node in enumerate(order)
        ]
        clusters.append(Cluster(tuple(reversed(stages)), int(accumulate[row])))
    return clusters


def stage_bytes(line: LineCost, stage: Stage, cluster: Cluster) -> float:
    """Return the memory a stage needs, wherever it runs."""
    start, stop, window = (np.array(value) for value in (stage.start, stage.stop, stage.window))
    versions = line.versions(window, np.array(cluster.accumulate))
    return float(line.memory(start, stop, window, versions, stage.recompute))


def _choose_backups(
    line: LineCost,
    used: dict[NodeId, tuple[Stage, Cluster]],
    spares: list[Node],
    nodes: dict[NodeId, Node],
    current: tuple[Backup, ...],
) -> tuple[Backup, ...]:
    """Give each of the least reliable nodes the smallest spare that could take over its stage."""
    free = {node.name: node.memory_bytes for node in spares}
    need = {name: stage_bytes(line, *place) for name, place in used.items()}
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
