"""How fast given clusters run: what a batch costs in each stage, and what sets the pace.

A cluster's period is its slowest stage, its slowest relayed link, or its cycle over its window, whichever
is longest; deaths of its nodes stretch it. Used by the search, the forecast and repair alike.
"""

from dataclasses import dataclass

import numpy as np

from ravnest.config import Recompute
from ravnest.plan.cost import Bools, Floats, Ints, LineCost, NodeTable

_SHORTEST_PERIOD = 1e-9  # of a model that costs nothing


@dataclass(frozen=True, slots=True)
class Rows:
    """Clusters as arrays [cluster, depth]: depth 0 is the last stage, `cuts` has one column more.

    Where windows or recomputing are not given, windows are as wide as the depth asks for, and a stage
    recomputes when it does not fit otherwise.
    """

    nodes: Ints
    lengths: Ints
    cuts: Ints
    window: Ints | None = None
    recompute: Bools | None = None
    accumulate: Ints | None = None  # [cluster]


@dataclass(frozen=True, slots=True)
class Timing:
    """What a batch costs in each stage, [cluster, depth]; zero where a cluster has no such stage."""

    compute: Floats
    send: Floats
    receive: Floats
    relay: Floats  # through the hub, between this stage and the one after it
    cycle: Floats  # from this stage's forward to its backward, nothing waiting
    memory: Floats
    window: Ints
    recompute: Bools
    deaths: Floats  # [cluster] time lost to deaths, per time that is not
    seconds: Floats  # [cluster] between two batches, deaths included

    @property
    def stage(self) -> Floats:
        """Seconds per batch of each stage alone."""
        return np.asarray(np.maximum.reduce([self.compute, self.send, self.receive, self.relay]))


def timing(line: LineCost, nodes: NodeTable, rows: Rows) -> Timing:
    """Return what each stage of some clusters costs, and how fast each cluster runs."""
    table = rows.nodes
    exists = np.arange(table.shape[1]) < rows.lengths[:, None]
    start, stop = rows.cuts[:, 1:], rows.cuts[:, :-1]
    window, recompute, memory = _memory(line, nodes, rows)
    again = recompute * (line.forward_flops[stop] - line.forward_flops[start])
    compute = (line.flops[stop] - line.flops[start] + again) / nodes.flops[table]
    upload, download = line.link_share * nodes.upload[table], line.link_share * nodes.download[table]
    send = (line.send_before[start] + line.send_after[stop]) / upload
    receive = (line.receive_before[start] + line.receive_after[stop]) / download
    relay, travel = _links(line, nodes, rows, upload, download)
    for column in (compute, send, receive, relay, travel, memory):
        column[~exists] = 0.0
    cycle = np.cumsum(compute + travel, axis=1)
    slowest = np.maximum.reduce([compute, send, receive, relay, np.where(exists, cycle / window, 0.0)])
    deaths = np.where(exists, nodes.risk[table], 0.0).sum(axis=1)
    seconds = slowest.max(axis=1, initial=_SHORTEST_PERIOD) * (1.0 + deaths)
    return Timing(compute, send, receive, relay, cycle, memory, window, recompute, deaths, seconds)


def _memory(line: LineCost, nodes: NodeTable, rows: Rows) -> tuple[Ints, Bools, Floats]:
    """Return window, recompute and resident bytes of each stage."""
    start, stop = rows.cuts[:, 1:], rows.cuts[:, :-1]
    window = rows.window
    if window is None:
        window = np.broadcast_to(line.window(np.arange(rows.nodes.shape[1])), rows.nodes.shape)
    accumulate = None if rows.accumulate is None else rows.accumulate[:, None]
    versions = line.versions(window, accumulate)
    keep = line.memory(start, stop, window, versions, recompute=False)
    save = line.memory(start, stop, window, versions, recompute=True)
    recompute = rows.recompute
    if recompute is None:
        recompute = keep > nodes.memory[rows.nodes]
        if line.config.recompute is not Recompute.AUTO:
            recompute = np.full(keep.shape, line.config.recompute is Recompute.ALWAYS)
    return window, recompute, np.where(recompute, save, keep)


def _links(
    line: LineCost, nodes: NodeTable, rows: Rows, upload: Floats, download: Floats
) -> tuple[Floats, Floats]:
    """Return relay seconds and there-and-back seconds of the link from each stage to the one after it."""
    relay, travel = np.zeros(rows.nodes.shape), np.zeros(rows.nodes.shape)
    ahead, behind, cut = rows.nodes[:, :-1], rows.nodes[:, 1:], rows.cuts[:, 1:-1]
    forward, backward = line.send_after[cut], line.send_before[cut]
    hidden = ~(nodes.reachable[ahead] | nodes.reachable[behind])
    relay[:, 1:] = hidden * np.maximum(forward, backward) / line.config.relay_bytes_per_second
    there = np.minimum(upload[:, 1:], download[:, :-1])
    back = np.minimum(upload[:, :-1], download[:, 1:])
    relayed = hidden * (forward + backward) / line.config.relay_bytes_per_second
    direct = forward / there + backward / back
    travel[:, 1:] = np.maximum(direct, relayed) + 2.0 * nodes.hop_seconds(ahead, behind)
    return relay, travel
