"""What one hub costs: CPU per event and memory per peer with 100 to 5,000 peers, the coordinator alone.

Simulated peers in clusters of eight join, build, train and average; one dies. Their hub is the production
coordinator with its monitors. CPU is what it takes for each event; the peers' side is not counted.
"""

import gc
import tracemalloc
from typing import Any

from benchmarks.hub_load import make_world, take_costs
from benchmarks.measure import say, table
from ravnest.errors import ProtocolError
from ravnest.protocol import messages
from ravnest.protocol.placement import PlanOrder

Figures = dict[str, Any]

SIZES, QUICK_SIZES = (100, 1000, 5000), (40, 160)
FLAT = 2.0
MOST_EVENT_SECONDS = 0.05
_STEADY_SECONDS = {100: 120.0, 1000: 30.0, 5000: 10.0}


def run(quick: bool) -> tuple[Figures, str, list[str]]:
    figures: Figures = {}
    for size in QUICK_SIZES if quick else SIZES:
        figures[str(size)] = _measure(size, 20.0 if quick else _STEADY_SECONDS[size])
        say(f"{size} peers: {figures[str(size)]}")
    if quick:
        assert all(each["steady_us"] > 0 and each["clusters"] > 1 for each in figures.values()), figures
        return figures, "", []
    return figures, _report(figures), _missed(figures)


def _measure(num_peers: int, seconds: float) -> Figures:
    memory = _memory(num_peers)
    world = make_world(num_peers)
    world.run(12.0)
    while not world.hub.clusters:  # a plan for many takes longer
        world.run(world.timeline.now + 1.0)
    joining = take_costs(world)
    largest = max(world.cost.longest, 0.0)
    event = world.cost.longest_event
    world.run(45.0)
    take_costs(world)
    world.cost.longest = 0.0
    world.run(45.0 + seconds)
    steady = take_costs(world)
    num_events = sum(times for times, _ in steady.values())
    mean = sum(times * each for times, each in steady.values()) / num_events
    steady_longest = world.cost.longest
    world.kill(world.hub.clusters[0].nodes[0])
    world.run(world.timeline.now + 20.0)
    repairing = take_costs(world)
    return {
        "clusters": len(world.hub.clusters),
        "join_us": _micro(joining["PeerJoined"][1]),
        "steady_us": _micro(mean),
        "report_us": _micro(steady["StepReport"][1]),
        "lease_us": _micro(steady["LeaseDone"][1]),
        "plan_ms": round(1e3 * joining["PlanMade"][1], 1),
        "repair_ms": round(1e3 * repairing.get("PlanMade", (0, 0.0))[1], 1),
        "longest_ms": round(1e3 * largest, 1),
        "longest": event,
        "longest_steady_ms": round(1e3 * steady_longest, 1),
        "bytes_per_peer": round(memory / num_peers),
        "largest_order_bytes": _largest_order(world),
    }


def _memory(num_peers: int) -> int:
    """Return the bytes of the world of a hub whose peers have joined."""
    gc.collect()
    tracemalloc.start()
    world = make_world(num_peers)
    world.run(5.5)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(world.hub.membership) == num_peers
    return held


def _largest_order(world: Any) -> int | str:
    largest = 0
    for peer in world.peers.values():
        if isinstance(peer.order, PlanOrder):
            try:
                largest = max(largest, len(messages.pack(peer.order)))
            except ProtocolError as error:
                return str(error)
    return largest


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def _missed(figures: Figures) -> list[str]:
    small, missed = figures[str(SIZES[0])], []
    for size, each in figures.items():
        for key in ("join_us", "steady_us", "bytes_per_peer"):
            if each[key] > FLAT * small[key]:
                missed.append(f"{size} peers: {key} is {each[key]}, {small[key]} with {SIZES[0]}")
        for key in ("longest_ms", "longest_steady_ms"):
            if each[key] > 1e3 * MOST_EVENT_SECONDS:
                missed.append(f"{size} peers: {key} is {each[key]} ({each['longest']})")
        if not isinstance(each["largest_order_bytes"], int):
            missed.append(f"{size} peers: {each['largest_order_bytes']}")
    return missed


def _report(figures: Figures) -> str:
    keys = [*next(iter(figures.values()))]
    rows = [[size, *(each[key] for key in keys)] for size, each in figures.items()]
    return (
        "Equal peers in clusters of eight with a tenth of spares, 0.4 s per microbatch, on virtual time,\n"
        "with the production coordinator and its monitors. Times are CPU per event, `steady` over all\n"
        "events of clusters that train and average. Memory is that of the hub and of its simulated peers\n"
        "when all have joined, by tracemalloc.\n\n" + table(["peers", *keys], rows)
    )
