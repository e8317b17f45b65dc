"""Why nodes are left out of a plan, counted by reason.

A spare is judged by the smallest part of the model it could host beside the clusters of the plan. The first
thing that rules it out is its reason.
"""

from collections import Counter
from enum import StrEnum

import numpy as np

from ravnest.config import PlanConfig
from ravnest.plan.coarsening import shorten_line
from ravnest.plan.cost import Bools, LineCost, NodeTable
from ravnest.plan.forecast import Forecast, forecast
from ravnest.plan.hub_line import HubLine
from ravnest.plan.types import ModelProfile, Plan, Swarm

_AT_ONCE = 4096  # nodes
_FULL = 0.95  # of the hub's line: one cluster more would have too little of it


class LeftOut(StrEnum):
    """What keeps a node from hosting a stage."""

    MEMORY = "too little memory"  # not even one position fits
    ROUND = "too slow for a round"  # its link cannot average one position in the time allowed
    LINK = "link too slow"  # it would be slower than the slowest cluster
    COMPUTE = "computes too slowly"
    HIDDEN = "behind NAT"  # it could, but nobody is left that it can reach without the hub
    HUB = "hub's line is full"  # it could, but the hub cannot send samples to more clusters
    QUALITY = "would cost quality"  # another cluster would teach less than it costs
    REST = "no faster plan uses it"


def count_left_out(
    plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig, is_limited: bool = False
) -> dict[str, int]:
    """Return how many spares there are for each reason; `is_limited`: more clusters would cost quality."""
    spares = set(plan.spares)
    places = np.array([k for k, node in enumerate(swarm.nodes) if node.name in spares], np.int64)
    counted: Counter[LeftOut] = Counter()
    if not len(places) or not plan.clusters:
        return {}
    line = LineCost(shorten_line(profile), config, is_averaged=len(plan.clusters) > 1)
    told = forecast(plan, profile, swarm, config)
    slowest = max(each.period_seconds for each in told.clusters)
    nodes, able = NodeTable.of(swarm, config), []
    for first in range(0, len(places), _AT_ONCE):
        part = nodes.take(places[first : first + _AT_ONCE])
        reasons = _judge(line, part, slowest)
        counted.update(reason for reason in reasons if reason is not None)
        able += [bool(part.reachable[k]) for k, reason in enumerate(reasons) if reason is None]
    is_full = told.hub is not None and told.hub.busy_share >= _FULL
    rest = LeftOut.QUALITY if is_limited else LeftOut.HUB if is_full else LeftOut.REST
    is_relay_slow = not HubLine.of(line).most_relays(slowest, _unused(told))
    num_hidden = max(0, able.count(False) - able.count(True)) if is_relay_slow and not is_limited else 0
    counted[LeftOut.HIDDEN], counted[rest] = num_hidden, len(able) - num_hidden
    return {reason.value: counted[reason] for reason in LeftOut if counted[reason]}


def _unused(told: Forecast) -> float:
    """Return the bytes per second that are left of the hub's line."""
    if told.hub is None:
        return float("inf")
    return max(0.0, 1.0 - told.hub.busy_share) * told.hub.upload_bytes_per_second


def _judge(line: LineCost, nodes: NodeTable, slowest: float) -> list[LeftOut | None]:
    """Return for each node what rules it out."""
    start = np.arange(line.num_positions)
    stop, one = start + 1, np.array(1)
    need = np.minimum(*(line.memory(start, stop, one, one, recompute=again) for again in (False, True)))
    fits: Bools = need[None] <= nodes.memory[:, None]
    send = line.send_before[start] + line.send_after[stop]
    receive = line.receive_before[start] + line.receive_after[stop]
    upload, download = (line.link_share * rate[:, None] for rate in (nodes.upload, nodes.download))
    link = np.maximum(send[None] / upload, receive[None] / download)
    compute = (line.flops[stop] - line.flops[start])[None] / nodes.flops[:, None]
    in_link, in_time = (fits & (seconds <= slowest) for seconds in (link, np.maximum(compute, link)))
    round_seconds = line.round_bytes(start, stop).min() / line.round_rate(nodes)
    tests: list[tuple[LeftOut, Bools]] = [
        (LeftOut.MEMORY, np.asarray(~fits.any(axis=1))),
        (LeftOut.ROUND, np.asarray(round_seconds > line.config.max_round_seconds)),
        (LeftOut.LINK, np.asarray(~in_link.any(axis=1))),
        (LeftOut.COMPUTE, np.asarray(~in_time.any(axis=1))),
    ]
    return [next((reason for reason, is_so in tests if is_so[k]), None) for k in range(len(nodes))]
