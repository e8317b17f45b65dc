"""What one hub costs: its decisions alone with 100 to 5,000 peers, and the whole program with 1,000 links.

`--part decisions`: simulated peers in clusters of eight join, build, train and average; one dies. Their hub
is the production coordinator with its monitors. CPU is what it takes for each event; the peers' side is not
counted. `--part links`: the hub's program with a log on disk, and 1,000 light peers over real CURVE links
that all dial at once, follow a plan of 1,000 clusters, report and vote.
"""

import argparse
import gc
import statistics
import tracemalloc
from typing import Any

from benchmarks.hub_links import LinkLoad, measure_links
from benchmarks.hub_load import make_world, take_costs
from benchmarks.measure import say, table
from ravnest.errors import ProtocolError
from ravnest.protocol import messages
from ravnest.protocol.placement import PlanOrder
from ravnest.sim.world import World

Figures = dict[str, Any]

SIZES, QUICK_SIZES = (100, 1000, 5000), (40, 160)
FLAT = 2.0
MOST_EVENT_SECONDS = 0.05
_STEADY_SECONDS = {100: 120.0, 1000: 30.0, 5000: 10.0}


PARTS = ("decisions", "links", "all")
LINKS = LinkLoad(num_peers=1000, num_processes=3, microbatch_seconds=2.0, train_seconds=60.0)
QUICK_LINKS = LinkLoad(num_peers=20, num_processes=1, microbatch_seconds=0.2, train_seconds=1.0)
MOST_LATE_MS = 100.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=PARTS, default="all", help="what to measure")
    parser.add_argument("--repeats", type=int, default=3, help="times that all links are made")


def run(quick: bool, options: argparse.Namespace) -> tuple[Figures, str, list[str]]:
    decisions: Figures = {}
    for size in (QUICK_SIZES if quick else SIZES) if options.part != "links" else ():
        decisions[str(size)] = _measure(size, 20.0 if quick else _STEADY_SECONDS[size])
        say(f"{size} peers: {decisions[str(size)]}")
    links = []
    for _ in range(1 if quick else options.repeats) if options.part != "decisions" else ():
        links.append(measure_links(QUICK_LINKS if quick else LINKS))
        say(f"links: {links[-1]}")
    figures = {"decisions": decisions, "links": links}
    if quick:
        assert all(each["steady_us"] > 0 and each["clusters"] > 1 for each in decisions.values()), figures
        assert all(each["clusters"] == QUICK_LINKS.num_peers for each in links), figures
        return figures, "", []
    missed = [*(_missed(decisions) if decisions else ()), *_missed_links(links)]
    return figures, _report(decisions, links), missed


def _measure(num_peers: int, seconds: float) -> Figures:
    memory = _memory(num_peers)
    world = make_world(num_peers)
    # A pass of the collector goes over all simulated peers too; what it takes of a real hub, links show.
    gc.collect()
    gc.disable()
    try:
        return _measure_events(world, num_peers, seconds, memory) | {"probe_us": _measure_probes(num_peers)}
    finally:
        gc.enable()


def _measure_probes(num_peers: int) -> float:
    """Return what an event costs while all are measured as they join."""
    world = make_world(num_peers, is_measured=True)
    world.run(9.0)  # a probe takes 2 s
    joining = take_costs(world)
    assert joining["Probed"][0] == num_peers
    found = [joining[name] for name in ("PeerJoined", "Probed")]
    return _micro(sum(times * each for times, each in found) / sum(times for times, _ in found))


def _measure_events(world: World, num_peers: int, seconds: float, memory: int) -> Figures:
    world.run(12.0)
    while not world.hub.clusters:  # a plan for many takes longer
        world.run(world.timeline.now + 1.0)
    joining = take_costs(world)
    world.run(45.0)
    take_costs(world)
    largest, event = world.cost.longest, world.cost.longest_event
    world.cost.longest = 0.0
    world.run(45.0 + seconds)
    steady = take_costs(world)
    num_events = sum(times for times, _ in steady.values())
    mean = sum(times * each for times, each in steady.values()) / num_events
    steady_longest = world.cost.longest
    world.kill(world.hub.clusters[0].nodes[0])
    world.run(world.timeline.now + 20.0)
    repairing = take_costs(world)
    if world.cost.longest > largest:
        largest, event = world.cost.longest, world.cost.longest_event
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
        for key in ("join_us", "probe_us", "steady_us", "bytes_per_peer"):
            if each[key] > FLAT * small[key]:
                missed.append(f"{size} peers: {key} is {each[key]}, {small[key]} with {SIZES[0]}")
        for key in ("longest_ms", "longest_steady_ms"):
            if each[key] > 1e3 * MOST_EVENT_SECONDS:
                missed.append(f"{size} peers: {key} is {each[key]} ({each['longest']})")
        if not isinstance(each["largest_order_bytes"], int):
            missed.append(f"{size} peers: {each['largest_order_bytes']}")
    return missed


def _missed_links(links: list[Figures]) -> list[str]:
    missed = []
    for each in links:
        for key in ("joining_late_ms", "planning_late_ms", "training_late_ms"):
            if each[key]["p99"] > MOST_LATE_MS:
                missed.append(f"{each['peers']} links: {key} p99 is {each[key]['p99']}")
        if each["clusters"] != each["peers"]:
            missed.append(f"{each['clusters']} of {each['peers']} peers are in the plan at the end")
    return missed


def _report(decisions: Figures, links: list[Figures]) -> str:
    parts = []
    if decisions:
        keys = [*next(iter(decisions.values()))]
        rows = [[size, *(each[key] for key in keys)] for size, each in decisions.items()]
        parts.append(
            "## Decisions\n\n"
            "Equal peers in clusters of eight with a tenth of spares, 0.4 s per microbatch, on virtual\n"
            "time, with the production coordinator and its monitors; rounds are plain. Times are CPU per\n"
            "event, `probe` over the joins and probes of peers that are measured as they join, `steady`\n"
            "over all events of clusters that train and average, `longest` over the whole run, the repair\n"
            "too. Memory is that of the hub and its simulated peers when all have joined, by tracemalloc.\n"
            "Python's collector is off: it goes over the simulated peers too.\n\n"
            + table(["peers", *keys], rows)
        )
    if links:
        rows = [[key, *_spread([each[key] for each in links])] for key in links[0]]
        parts.append(
            "## Links\n\n"
            f"The hub's program with its log on disk, and {LINKS.num_peers} light peers in "
            f"{LINKS.num_processes} processes of the\nsame machine, over real CURVE links. All dial at "
            "once. Each is a cluster of its own in a plan of\nas many clusters, reports a microbatch every "
            f"{LINKS.microbatch_seconds:.0f} s and votes in plain rounds. `late` is\nhow late a timer of "
            "10 ms is on the hub's event loop, `busy` what its thread used of a core\nbetween two of these: "
            "p50, p99 and the longest of a phase. `load_average` is of the machine,\nwhich has others' work "
            f"on it. Smallest, median and largest of {len(links)} runs.\n\n"
            + table(["", "smallest", "median", "largest"], rows)
        )
    return "\n\n".join(parts)


def _spread(values: list[Any]) -> list[str]:
    if isinstance(values[0], dict):
        columns = [_spread([each[key] for each in values]) for key in values[0]]
        return [" / ".join(column[k] for column in columns) for k in range(3)]
    return [f"{x:g}" for x in (min(values), statistics.median(values), max(values))]
