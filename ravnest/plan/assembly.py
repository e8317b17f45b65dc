"""From clusters to a whole plan: rings, spares, and which spare backs up whom.

Spares keep snapshots of the stages on the least reliable nodes, as far as their memory goes, so that the
likeliest deaths are the cheapest.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from ravnest.config import PlanConfig
from ravnest.plan.cost import Ints, LineCost, NodeTable
from ravnest.plan.rings import form_rings
from ravnest.plan.timing import Rows, timing
from ravnest.plan.types import Backup, Cluster, ModelProfile, Node, NodeId, Plan, Stage, Swarm

_QUEUES = 1.75  # batches in flight over those under way; less starves clusters in simulation


def assemble(
    clusters: tuple[Cluster, ...],
    profile: ModelProfile,
    swarm: Swarm,
    config: PlanConfig,
    seed: int,
    epoch: int,
    backups: tuple[Backup, ...] = (),
) -> Plan:
    """Return the plan of these clusters; backups that still hold are kept, because they hold snapshots."""
    nodes = {node.name: node for node in swarm.nodes}
    used = {stage.node: (stage, cluster) for cluster in clusters for stage in cluster.stages}
    spares = tuple(node.name for node in swarm.nodes if node.name not in used)
    line = LineCost(profile, config, is_averaged=len(clusters) > 1)
    return Plan(
        epoch=epoch,
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
