"""Why there is no plan: what is short, by how much, and what would help. Each advice was tried out."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ravnest.config import OptimizerKind, PlanConfig, Recompute
from ravnest.errors import PlanError
from ravnest.ids import NodeId
from ravnest.plan.coarsening import shorten_line
from ravnest.plan.cost import LineCost, NodeTable
from ravnest.plan.split import Splitter
from ravnest.plan.types import ModelProfile, Node, Swarm
from ravnest.units import show_bytes


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
