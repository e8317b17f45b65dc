"""Why a model has no plan, and why a node has no place in one.

A model that does not fit: what is short, by how much, and what would help; each advice was tried out. A spare
is judged by the smallest part of the model it could host beside the clusters of the plan. The first thing
that rules it out is its reason.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum

import numpy as np

from ravnest.config import OptimizerKind, PlanConfig, Recompute
from ravnest.errors import PlanError
from ravnest.ids import NodeId
from ravnest.plan.cost import NodeTable
from ravnest.plan.forecast import Forecast, forecast
from ravnest.plan.hub_line import HubLine
from ravnest.plan.line import Bools, LineCost
from ravnest.plan.split import Splitter, shorten_line
from ravnest.plan.types import ModelProfile, Node, Plan, Swarm
from ravnest.units import show_bytes

_AT_ONCE = 4096  # nodes
_LONG_ROUND = 0.7  # of the time a round may take through the hub: one cluster more and it takes longer
_FULL = 0.95  # of the hub's line: one cluster more would have too little of it


def explain_shortage(profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> PlanError:
    """Return the error for a swarm that cannot hold one copy of the model."""
    offered = sum(node.memory_bytes for node in swarm.nodes)
    useful = sorted(
        (n.memory_bytes for n in swarm.nodes if n.memory_bytes > config.overhead_bytes), reverse=True
    )
    missing = _missing_bytes(profile, swarm, config)
    remedies = list(_remedies(profile, swarm, config))
    count = len(swarm.nodes)
    verb = "node offers" if count == 1 else "nodes offer"
    nodes = f"{count} {verb} {show_bytes(offered)}" if count else "no nodes have joined"
    if missing is None:
        needs = f"{profile.name} does not fit, and no one node more would help; {nodes}"
        remedies = remedies or ["use a smaller batch"]
    else:
        whole = sum(useful[: config.max_stages - 1]) + missing
        limit = f" of at most {config.max_stages} nodes" if len(useful) >= config.max_stages else ""
        needs = f"{profile.name} needs {show_bytes(whole)} in one cluster{limit}; {nodes}"
        remedies.insert(0, f"add 1 node with >= {show_bytes(missing)}")
    return PlanError(needs + ("; " + " or ".join(remedies) if remedies else ""))


def holding_order(profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> tuple[tuple[int, ...], ...]:
    """Return the fastest single cluster among a few orders by memory, if any of them holds the model."""
    if not swarm.nodes:
        return ()
    line = LineCost(shorten_line(profile), config, is_averaged=False)
    table = NodeTable.of(swarm, config)
    largest = np.argsort(table.memory, kind="stable")[-min(config.max_stages, line.num_positions) :]
    orders = [tuple(largest[k:].tolist()) for k in range(len(largest))]
    orders += [order[::-1] for order in orders]
    seconds = Splitter(line, table, keep=False).solve(orders).seconds
    return (orders[int(seconds.argmin())],) if np.isfinite(seconds).any() else ()


def _missing_bytes(profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> float | None:
    """Return the memory one more node would have to bring, to 1 %; None if no single node helps."""
    high = 1e15

    def enough(memory: float) -> bool:
        guest = Node(NodeId("one more"), memory, 1e12, 1e7, 1e7)
        return bool(holding_order(profile, replace(swarm, nodes=(*swarm.nodes, guest)), config))

    if not enough(high):
        return None
    low = high / 1e9
    while high / low > 1.01:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if enough(middle) else (middle, high)
    step = 10.0 ** (np.floor(np.log10(high)) - 2)
    return float(np.ceil(high / step) * step)  # upwards to the three digits that are shown


def _remedies(profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> Iterator[str]:
    changes: tuple[dict[str, object], ...] = (
        {"recompute": Recompute.AUTO},
        {"max_lag": 1},
        {"predict_weights": False},
        {"optimizer": OptimizerKind.MOMENTUM},
        {"optimizer": OptimizerKind.SGD},
    )
    for change in changes:
        changed = replace(config, **change)  # type: ignore[arg-type]
        if changed != config and holding_order(profile, swarm, changed):
            key, value = next(iter(change.items()))
            yield f"set {key}={str(value).lower()}"
            return


class LeftOut(StrEnum):
    """What keeps a node from hosting a stage."""

    MEMORY = "too little memory"  # not even one position fits
    ROUND = "too slow for a round"  # its link cannot average one position in the time allowed
    LINK = "link too slow"  # it would be slower than the slowest cluster
    COMPUTE = "computes too slowly"
    HIDDEN = "behind NAT"  # it could, but nobody is left that it can reach without the hub
    HUB = "hub's line is full"  # it could, but the hub cannot send samples to more clusters
    RELAYED = "rounds through the hub would take too long"  # its cluster would make rings with hidden pairs
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
    rest = LeftOut.HUB if is_full else LeftOut.RELAYED if _has_long_rounds(told, config) else LeftOut.REST
    rest = LeftOut.QUALITY if is_limited else rest
    is_relay_slow = not HubLine.of(line).most_relays(slowest, _unused(told))
    num_hidden = max(0, able.count(False) - able.count(True)) if is_relay_slow and not is_limited else 0
    counted[LeftOut.HIDDEN], counted[rest] = num_hidden, len(able) - num_hidden
    return {reason.value: counted[reason] for reason in LeftOut if counted[reason]}


def _has_long_rounds(told: Forecast, config: PlanConfig) -> bool:
    """Say whether the hub is so busy with a round that more clusters would make it too long."""
    if told.hub is None:
        return False
    seconds = told.hub.round_bytes / told.hub.upload_bytes_per_second
    return seconds > _LONG_ROUND * config.max_relayed_round_seconds


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
    round_seconds = line.round_bytes(start, stop).min() / (line.round_share * nodes.both_ways)
    tests: list[tuple[LeftOut, Bools]] = [
        (LeftOut.MEMORY, np.asarray(~fits.any(axis=1))),
        (LeftOut.ROUND, np.asarray(round_seconds > line.config.max_round_seconds)),
        (LeftOut.LINK, np.asarray(~in_link.any(axis=1))),
        (LeftOut.COMPUTE, np.asarray(~in_time.any(axis=1))),
    ]
    return [next((reason for reason, is_so in tests if is_so[k]), None) for k in range(len(nodes))]
