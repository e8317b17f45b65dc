"""Parallel rings against servers, a hierarchy, a butterfly and one ring, by a fluid model of links."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.baselines.trees import SERVER, SYSTEMS, Tree
from benchmarks.measure import say, table
from benchmarks.shapes import Shape, make_shape
from ravnest.ids import NodeId
from ravnest.plan.assembly import travelling_order
from ravnest.plan.populations import population
from ravnest.plan.types import Node
from studies.study import Study, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MBIT, MB = 1e6 / 8, 1e6
OURS, SERVED, BY_HUB = "multi-ring", "parameter server", "server on the hub's line"
WAYS = (OURS, *SYSTEMS)
WITH_HUB = (*WAYS, BY_HUB)
HUB_UPLOAD = 40 * MBIT  # all pairs of nodes that nobody can dial share it
RATE, LATENCY = 50 * MBIT, 0.0
CUTS = (
    (50,),
    (40, 70),
    (25, 75),
    (55,),
    (33, 66),
    (50, 75),
    (45,),
    (20, 40, 70),
)  # of benchmarks.run allreduce
# Medians of benchmarks/reports/allreduce.md, equal links: clusters, megabytes, seconds by way.
MEASURED = (
    (2, 40, (3.24, 13.52, 16.64, 3.519, 3.196)),
    (3, 30, (3.365, 11.73, 22.0, 6.598, 3.398)),
    (5, 20, (2.842, 9.279, 24.36, 8.049, 3.014)),
    (8, 20, (3.359, 10.49, 42.17, 11.15, 3.913)),
)
SIZES = (0.1 * MB, 1 * MB, 10 * MB, 100 * MB, 1000 * MB)  # of a model as it travels
COUNTS = (2, 4, 8, 16, 32, 64)
KINDS = {  # a population, and whether every node can be dialled
    "lan": ("lan", True),
    "home-open": ("home", True),
    "home": ("home", False),
}
TITLES = {"lan": "LAN", "home-open": "Home PCs, all of whom can be dialled", "home": "Home PCs as they are"}
_UNIT = 4 * 100 * 1000  # bytes of a shape whose traffic is counted: it grows in proportion


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a way of averaging moves, in shares of the model's bytes, and how it hangs together."""

    sent: Mapping[NodeId, float]
    received: Mapping[NodeId, float]
    pairs: Mapping[tuple[NodeId, NodeId], float]  # from whom to whom
    laps: tuple[
        tuple[NodeId, ...], ...
    ]  # nodes that a chunk passes one after the other, on its way to a mean


def count_trees(trees: Sequence[Tree], num_items: int) -> Traffic:
    """Count what crosses when chunks add up along trees and the means go out along others."""
    pairs: Counter[tuple[NodeId, NodeId]] = Counter()
    laps = set()
    for tree in trees:
        share = (tree.stop - tree.start) / num_items
        for child, parent in tree.up.items():
            pairs[child, parent] += share  # type: ignore[assignment] # a Counter of shares
        for child, parent in tree.down.items():
            pairs[parent, child] += share  # type: ignore[assignment]
        longest = max((_way(child, tree.up) for child in tree.up), key=len)
        back = max((_way(child, tree.down) for child in tree.down), key=len)
        laps.add((*longest, *reversed(back[:-1])))
    return _traffic(pairs, laps)


def count_rings(shape: Shape, nodes: Mapping[NodeId, Node]) -> Traffic:
    """Count what crosses when the owners of each segment form a ring: every part goes around it twice."""
    pairs: Counter[tuple[NodeId, NodeId]] = Counter()
    laps = set()
    for start, stop, owners in shape.owned_within(0, shape.num_items):
        around = travelling_order(nodes[owner] for owner in owners)
        count, share = len(around), (stop - start) / shape.num_items
        for one, other in zip(around, around[1:] + around[:1], strict=True):
            pairs[one, other] += 2 * (count - 1) / count * share  # type: ignore[assignment]
        laps.add((*around, *around)[: 2 * count - 1])
    return _traffic(pairs, laps)


def _way(node: NodeId, parents: Mapping[NodeId, NodeId]) -> tuple[NodeId, ...]:
    way = [node]
    while way[-1] in parents:
        way.append(parents[way[-1]])
    return tuple(way)


def _traffic(pairs: Mapping[tuple[NodeId, NodeId], float], laps: set[tuple[NodeId, ...]]) -> Traffic:
    sent: Counter[NodeId] = Counter()
    received: Counter[NodeId] = Counter()
    for (one, other), share in pairs.items():
        sent[one] += share  # type: ignore[assignment]
        received[other] += share  # type: ignore[assignment]
    return Traffic(sent, received, pairs, tuple(sorted(laps)))


def round_seconds(traffic: Traffic, size: float, nodes: Mapping[NodeId, Node], hub_upload: float) -> float:
    """Return when the last node has its mean: the busiest end of a link, or the hub, and a lap's latency.

    A node sends and receives at its own rates, both at once. What crosses between nodes that nobody can dial
    shares the hub's upload.
    """
    moving = [share * size / nodes[name].upload_bytes_per_second for name, share in traffic.sent.items()]
    moving += [
        share * size / nodes[name].download_bytes_per_second for name, share in traffic.received.items()
    ]
    relayed = sum(share for pair, share in traffic.pairs.items() if is_relayed(*map(nodes.__getitem__, pair)))
    lap = max(sum(_hop(nodes[one], nodes[other]) for one, other in pairwise(each)) for each in traffic.laps)
    return max(*moving, relayed * size / hub_upload) + lap


def is_relayed(one: Node, other: Node) -> bool:
    """Return whether only the hub connects two nodes."""
    return not (one.is_reachable or other.is_reachable)


def _hop(one: Node, other: Node) -> float:
    return one.latency_seconds + other.latency_seconds


def plain_nodes(shape: Shape, rate: float = RATE, latency: float = LATENCY) -> dict[NodeId, Node]:
    """Return nodes with equal links, and a server with one like theirs."""
    names = (*shape.stages, SERVER)
    return {name: Node(name, 1.0, 1.0, rate, rate, latency) for name in names}


def drawn_nodes(shape: Shape, kind: str, seed: int) -> dict[NodeId, Node]:
    """Return nodes with the links of a population; the server has the best of all and can be dialled."""
    made = population(f"{kind}:{len(shape.stages)}", seed).nodes
    nodes = {name: _renamed(node, name) for name, node in zip(shape.stages, made, strict=True)}
    best = Node(
        SERVER,
        1.0,
        1.0,
        max(node.upload_bytes_per_second for node in made),
        max(node.download_bytes_per_second for node in made),
        min(node.latency_seconds for node in made),
    )
    return {**nodes, SERVER: best}


def _renamed(node: Node, name: NodeId) -> Node:
    return Node(
        name,
        1.0,
        1.0,
        node.upload_bytes_per_second,
        node.download_bytes_per_second,
        node.latency_seconds,
        is_reachable=node.is_reachable,
    )


def make_clusters(count: int) -> Shape:
    """Return so many clusters that are cut as those of the benchmark, again and again."""
    return make_shape([CUTS[k % len(CUTS)] for k in range(count)], _UNIT)


def count_all(shape: Shape, nodes: Mapping[NodeId, Node]) -> dict[str, Traffic]:
    """Count the traffic of every way."""
    others = {name: count_trees(make(shape), shape.num_items) for name, make in SYSTEMS.items()}
    return {OURS: count_rings(shape, nodes), **others}


def run(quick: bool, folder: Path) -> Study:
    checks = [_check_model(*each) for each in MEASURED]
    assert all(0.99 <= each[OURS] <= 1.15 for each in checks), checks
    counts, sizes, seeds = ((2, 8), SIZES[::2], 1) if quick else (COUNTS, SIZES, 3)
    found = {kind: _try_kind(kind, counts, sizes, seeds) for kind in KINDS}
    for name, rows in found.items():
        say(f"{name}: {rows}")
    assert all(
        each[OURS] <= 1.0001 * min(each["single ring"], each["parameter server"])
        for rows in found["lan"].values()
        for size, each in rows.items()
        if size >= 10 * MB
    ), found["lan"]
    if not quick:
        for kind in KINDS:
            draw(folder / f"rings-{kind}.svg", partial(_plot, found[kind], counts[2]))
    wins = {kind: _count_wins(rows) for kind, rows in found.items()}
    figures: dict[str, object] = {
        "measured over model": [{name: _short(value) for name, value in each.items()} for each in checks],
        "best": wins,
        "seconds": {
            kind: {
                f"{count} clusters, {size / MB:g} MB": each
                for count, row in rows.items()
                for size, each in row.items()
            }
            for kind, rows in found.items()
        },
    }
    return Study(_QUESTION, _answer(found), _METHOD, _body(checks, found, counts), figures, _LIMITS)


Seconds = dict[str, float]  # by way, medians
Grid = dict[int, dict[float, Seconds]]  # by number of clusters and bytes of the model


def _check_model(count: int, megabytes: int, seconds: Sequence[float]) -> Seconds:
    """Return measured seconds over those of the model, by way."""
    shape = make_clusters(count)
    nodes = plain_nodes(shape)
    traffic = count_all(shape, nodes)
    model = {name: round_seconds(traffic[name], megabytes * MB, nodes, HUB_UPLOAD) for name in WAYS}
    return {name: found / model[name] for name, found in zip(WAYS, seconds, strict=True)}


def _try_kind(kind: str, counts: Sequence[int], sizes: Sequence[float], num_seeds: int) -> Grid:
    grid: Grid = {}
    for count in counts:
        shape = make_clusters(count)
        found = [_try_swarm(shape, kind, seed, sizes) for seed in range(num_seeds)]
        grid[count] = {
            size: {name: _short(median(each[size][name] for each in found)) for name in WITH_HUB}
            for size in sizes
        }
    return grid


def _try_swarm(shape: Shape, kind: str, seed: int, sizes: Sequence[float]) -> dict[float, Seconds]:
    """Return the seconds of every way; a server on the hub's line sends no more than that carries."""
    name, is_open = KINDS[kind]
    nodes = drawn_nodes(shape, name, seed)
    if is_open:
        nodes = {each: replace(node, is_reachable=True) for each, node in nodes.items()}
    weaker = nodes | {SERVER: replace(nodes[SERVER], upload_bytes_per_second=HUB_UPLOAD)}
    traffic = count_all(shape, nodes)
    found = {}
    for size in sizes:
        found[size] = {way: round_seconds(traffic[way], size, nodes, HUB_UPLOAD) for way in WAYS}
        found[size][BY_HUB] = round_seconds(traffic[SERVED], size, weaker, HUB_UPLOAD)
    return found


def _count_wins(rows: Grid) -> dict[str, int]:
    """Return how often each way is the fastest, or within 1 % of it."""
    cells = [each for row in rows.values() for each in row.values()]
    return {name: sum(each[name] <= 1.01 * min(each.values()) for each in cells) for name in WITH_HUB}


def _best(each: Seconds) -> str:
    return min(WITH_HUB, key=lambda name: each[name])


def _plot(rows: Grid, count: int, axes: "Axes") -> None:
    for name in WITH_HUB:
        axes.plot(
            [size / MB for size in rows[count]],
            [row[name] for row in rows[count].values()],
            marker=".",
            label=name,
        )
    axes.set(
        xscale="log", yscale="log", xlabel=f"MB of a model, {count} clusters", ylabel="seconds of a round"
    )
    axes.legend(fontsize=7)


def _answer(found: Mapping[str, Grid]) -> str:
    def cells(kind: str, least: float) -> list[Seconds]:
        return [each for row in found[kind].values() for size, each in row.items() if size >= least]

    def count(kind: str, ways: Sequence[str]) -> str:
        rows = cells(kind, 10 * MB)
        wins = sum(each[OURS] <= 1.01 * min(each[way] for way in ways) for each in rows)
        return f"{wins} of {len(rows)} cases"

    worst = max(each[OURS] / min(each.values()) for each in cells("lan", 10 * MB))
    lost = sum(each[SERVED] < each[OURS] for each in cells("home", 10 * MB))
    no_server = [way for way in WAYS if way != SERVED]
    return (
        f"From 10 MB on, parallel rings are within {worst:.2f} times the fastest way on a LAN, and among "
        f"home PCs they beat a server on the hub's own line in {count('home', [BY_HUB])} and every way "
        f"without a server in {count('home', no_server)}; but a server with the best link of the swarm "
        f"beats them in {lost}, as a node then sends its share once, not almost twice, and smaller models "
        "average faster by ways with fewer hops."
    )


def _body(checks: Sequence[Seconds], found: Mapping[str, Grid], counts: Sequence[int]) -> str:
    rows = [
        [count, megabytes, *(f"{each[name]:.2f}" for name in WAYS)]
        for (count, megabytes, _), each in zip(MEASURED, checks, strict=True)
    ]
    parts = [_CHECK + table(["clusters", "MB", *WAYS], rows)]
    for kind, grid in found.items():
        lines = [
            [
                f"{size / MB:g}",
                *(_cell(grid[count][size]) for count in counts),
            ]
            for size in next(iter(grid.values()))
        ]
        wins = ", ".join(f"{name} {number}" for name, number in _count_wins(grid).items())
        parts.append(
            f"### {TITLES[kind]}\n\nFastest way (its seconds; those of the rings where they are not):\n\n"
            + table(["MB", *(f"{count} clusters" for count in counts)], lines)
            + f"\n\nFastest, or within 1 %, in so many of {len(lines) * len(counts)}: {wins}.\n\n"
            + f"![Seconds of a round over the size of the model](rings-{kind}.svg)"
        )
    return "\n\n".join(parts)


def _cell(each: Seconds) -> str:
    best = _best(each)
    if each[OURS] <= 1.01 * each[best]:
        return f"rings {each[OURS]:g}"
    return f"{best} {each[best]:g} (rings {each[OURS]:g})"


def _short(value: float) -> float:
    return float(f"{value:.3g}")


_QUESTION = "Where do parallel rings win over other ways to average, and where not?"
_METHOD = """\
A fluid model: every node sends and receives at its own rates, all transfers overlap perfectly, and a round
takes as long as the busiest end of a link, plus the latency of the longest way that one part travels. What
two nodes that nobody can dial have for each other crosses the hub's upload of 40 Mbit/s, which all such
pairs share. Traffic is counted pair by pair from the same trees and rings that `benchmarks.run allreduce`
moves real bytes along, over clusters of two to four stages with different cuts. Nodes get links by
population (`lan` and `home` of [files](../files.md); three seeds, medians), at random, without a planner
that would leave slow ones out. The parameter server has the best link of them all and can be dialled; the
other server sends at the hub's 40 Mbit/s. Sizes are those of the model as it travels: with deltas in int4
an eighth of fp32."""
_CHECK = """\
**The model against measurements**, seconds of [allreduce](../../benchmarks/reports/allreduce.md) on equal
links of 50 Mbit/s over those of the model:

"""
_LIMITS = """\
Trees are flattered: sums and means share links in the model without waiting for each other, and measured
ones took up to 1.7 times as long as it says, rings 1.0 to 1.1 times. Latency between regions, loss of
packets, CPU, the overhead of many connections (a butterfly has one for each pair of owners, a ring two for
each owner), what a server costs its owner, members that die in a round and training beside it are not in
it. 1,000 MB in 64 clusters were computed, never moved."""
