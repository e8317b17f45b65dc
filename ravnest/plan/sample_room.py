"""How many samples may wait in a cluster: those that its nodes have memory for beside their stages.

A root waits with the fields of a batch, any other stage that consumes some with labels, or with those that
it and the root both consume. The line does not know which, so every one but the root counts all of them.
"""

from collections.abc import Mapping, Sequence

from ravnest.ids import NodeId
from ravnest.plan.assembly import needed_bytes
from ravnest.plan.line import ALLOCATED, LineCost
from ravnest.plan.types import Cluster, Node

UNBOUNDED = 2**62


def sample_rooms(
    clusters: Sequence[Cluster], line: LineCost, nodes: Mapping[NodeId, Node]
) -> list[tuple[int, ...]]:
    """Return the samples that each stage of each cluster may wait with, those that are leased included."""
    needed = needed_bytes(line, {stage.node: (stage, each) for each in clusters for stage in each.stages})
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
