"""Segments and rings: the finest intervals that every cluster agrees on.

Clusters cut the model in different places. Take every cut of every cluster: between two neighbouring cuts
each cluster has exactly one owner. That interval is a segment and its owners form a ring.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise

from ravnest.plan.types import Cluster, Node, NodeId, Ring


def form_rings(clusters: tuple[Cluster, ...], nodes: Mapping[NodeId, Node]) -> tuple[Ring, ...]:
    """Return one ring per segment, in model order; a single cluster has nobody to average with."""
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
    """Order a ring: neighbours from one region, and nodes nobody can dial apart from each other.

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
