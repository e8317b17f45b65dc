"""What goes out with a lease: the grant to the root, the fields to who consumes them, the rates to all.

Driven by hub.training.
"""

from collections.abc import Sequence
from itertools import accumulate

from ravnest.hub.events import JobSettings, Send, SendFields
from ravnest.hub.members import ClusterState, Members
from ravnest.hub.progress import OpenLease, Progress
from ravnest.protocol import LearningRate, LeaseGrant


def grant(
    cluster: ClusterState, lease: OpenLease, samples: Sequence[int], members: Members
) -> list[Send | SendFields]:
    """Return the orders for a cluster's lease on these samples."""
    is_evaluation, stops = lease.lease is None, accumulate(lease.num_samples)
    batches = tuple(
        tuple(samples[stop - size : stop]) for stop, size in zip(stops, lease.num_samples, strict=True)
    )
    consumers = members.fields(cluster, is_evaluation)
    granted = LeaseGrant(cluster.epoch, lease.number, is_evaluation, lease.first_batch, lease.num_samples)
    fields = SendFields(cluster.epoch, lease.number, is_evaluation, lease.first_batch, batches, consumers)
    return [Send(cluster.root, granted), fields]


def tell_rates(
    settings: JobSettings, cluster: ClusterState, progress: Progress, num_updates: int, num_clusters: int
) -> list[Send]:
    """Return the rates of so many updates from now on, where the cluster has others."""
    latest = max((update for update in progress.rates if update <= progress.version), default=0)
    progress.rates = {update: rate for update, rate in progress.rates.items() if update >= latest}
    told = progress.rates.get(latest)
    sends = []
    for ahead in range(num_updates):
        update = progress.version + ahead
        rate = settings.rate(progress.position + ahead * num_clusters)
        if progress.rates.get(update, told) != rate:
            progress.rates[update] = rate
            sends += [Send(node, LearningRate(cluster.epoch, update, rate)) for node in cluster.nodes]
        told = rate
    return sends
