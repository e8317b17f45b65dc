"""The reserve: leases that a cluster gets ahead of its work, with their samples, for a hub that is away.

The hub says when the next of them is begun, so a pause, an evaluation or another plan wait for no more than
what is begun. A root that has lost the hub begins them itself. Near an evaluation or the end no cluster
gets more ahead than is left for the others: whoever is faster than foreseen takes from that. And none gets
more than its PCs have memory for beside their stages: where stages fill what is lent, there is no reserve.
"""

from collections.abc import Sequence

from ravnest.config import RESERVE
from ravnest.hub.coordinator.events import JobSettings
from ravnest.hub.coordinator.leases import OpenLease
from ravnest.hub.coordinator.placement import ClusterState, Placement

LEASES_AHEAD = 2  # for each that is begun: the reserve grows no faster than its cluster trains


def count_places(cluster: ClusterState, placement: Placement, begun: Sequence[OpenLease]) -> int:
    """Return for how many samples ahead a cluster has memory, beside the leases that it has begun."""
    takers = {node for node, _ in placement.fields(cluster, is_evaluation=False)}
    rooms = zip(cluster.nodes, cluster.sample_rooms, strict=True)
    most = min(room for node, room in rooms if node in takers or node == cluster.root)
    return most - sum(sum(each.num_samples) for each in begun)


def find_room(
    settings: JobSettings,
    samples_per_second: float,
    ahead: Sequence[OpenLease],
    num_ahead: int,
    num_left: int,
    most: int,
) -> int:
    """Return how many samples more a cluster may have ahead that has these leases, and memory for `most`.

    All clusters have `num_ahead` samples ahead, and `num_left` are not leased before all wait for each other.
    """
    if sum(len(each.num_samples) for each in ahead) >= RESERVE.most_microbatches:
        return 0
    wanted = min(settings.reserve_seconds * samples_per_second, settings.reserve_samples, most)
    held = sum(sum(each.num_samples) for each in ahead)
    return max(0, min(int(wanted) - held, (num_left - num_ahead) // 2))
