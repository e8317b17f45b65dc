"""Averaging over clusters with different cuts: all rings at once, against other ways, limit and forecast."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import say, spread, table
from benchmarks.namespaces import Rate, may_be_used
from benchmarks.shapes import NUM_POSITIONS, Shape, make_shape
from ravnest.config import Averaging, PlanConfig, WireFormat
from ravnest.ids import NodeId
from ravnest.plan.forecast import forecast
from ravnest.plan.types import ModelProfile, Node, Swarm

Figures = dict[str, Any]

BOUND_TARGET = 0.95
SLOWER_LIMIT = 1.03  # of a baseline's median: what repeats of one system differ by
FORECAST_LIMIT = 0.1
TRAINING_TARGET = 0.95

MBIT = 1e6 / 8
MB = 10**6
CUTS = ((50,), (40, 70), (25, 75), (55,), (33, 66), (50, 75), (45,), (20, 40, 70))  # by cluster, in percent
EQUAL = {2: 40 * MB, 3: 30 * MB, 5: 20 * MB, 8: 20 * MB}  # clusters, and bytes of parameters
EQUAL_RATE = 50 * MBIT
UNEQUAL = {3: 30 * MB, 5: 20 * MB}
UPLOADS, DOWNLOADS = (40, 25, 80, 50, 30, 60, 100), (100, 50, 40, 80, 60)  # Mbit/s, dealt out in turn
LOOPBACK = {2: 400 * MB, 3: 100 * MB, 5: 40 * MB, 8: 10 * MB}
SLOW = ("single ring", "parameter server")  # run once: they take many times as long
ROBUST = {4: 20 * MB, 5: 20 * MB, 8: 20 * MB}
ROBUST_LIMIT = 1.3  # times the bytes of a plain round
NUM_TURNS = 3


def run(quick: bool) -> tuple[Figures, str, list[str]]:
    if quick:
        return _check(), "", []
    is_root = may_be_used()
    figures: Figures = {"links": "namespaces" if is_root else "relay"}
    figures["equal"] = {str(count): _on_equal_links(count, size, is_root) for count, size in EQUAL.items()}
    figures["unequal"] = (
        {str(k): _on_unequal_links(k, size) for k, size in UNEQUAL.items()} if is_root else {}
    )
    figures["loopback"] = {str(count): _on_loopback(count, size) for count, size in LOOPBACK.items()}
    figures["robust"] = {str(count): _robust_bytes(count, size) for count, size in ROBUST.items()}
    figures["training"] = _training()
    return figures, _report(figures), _missed(figures)


def _check() -> Figures:
    """Let every system average once, on links with a rate where that can be: all end with the mean."""
    from benchmarks.ring_nodes import FORMATS, Nodes

    shape = make_shape(((50,), (40,), (60,)), MB)
    rates = _rates(shape, lambda _: (400.0, 400.0)) if may_be_used() else None
    with Nodes(shape, rates) as nodes:
        seconds = {system: _short(nodes.average(system).seconds) for system in (*_systems(), *FORMATS)}
    assert _predict(shape, _rates(shape, lambda _: (50.0, 50.0))) > 0
    robust = _robust_bytes(4, 8 * MB)
    assert max(robust["int4"]["times"], robust["fp32"]["times"]) <= ROBUST_LIMIT, robust
    links = "loopback" if rates is None else "namespaces"
    return {"seconds": seconds, "links": links, "robust": robust}


def _systems() -> tuple[str, ...]:
    from benchmarks.baselines.trees import SYSTEMS
    from benchmarks.ring_nodes import GLOO, OURS

    return (OURS, *SYSTEMS, GLOO)


def _on_equal_links(count: int, size: int, is_root: bool) -> Figures:
    from benchmarks.ring_nodes import FORMATS, GLOO, Nodes

    shape, mbit = make_shape(CUTS[:count], size), EQUAL_RATE / MBIT
    rates = _rates(shape, lambda _: (mbit, mbit)) if is_root else None
    with Nodes(shape, rates, 0.0 if is_root else EQUAL_RATE) as nodes:
        systems = [system for system in _systems() if is_root or system != GLOO]  # gloo knows no relay
        found = _compare(nodes, systems, SLOW)
        if is_root:
            found["plain_tcp_bytes_per_second"] = _short(nodes.stream_rate(int(2 * EQUAL_RATE)))
            bound = _bound(shape, EQUAL_RATE)
            found["bound_seconds"] = _short(bound)
            found["share_of_bound"] = _inverse(found["multi-ring"], bound)
        found["formats"] = _compare(nodes, FORMATS, ())
    say(f"{count} clusters, equal links: {found}")
    return found


def _on_unequal_links(count: int, size: int) -> Figures:
    from benchmarks.ring_nodes import Nodes

    shape = make_shape(CUTS[:count], size)
    rates = _rates(shape, lambda k: (UPLOADS[k % len(UPLOADS)], DOWNLOADS[k % len(DOWNLOADS)]))
    with Nodes(shape, rates) as nodes:
        found = _compare(nodes, _systems(), SLOW)
    predicted = _predict(shape, rates)
    found["predicted_seconds"] = _short(predicted)
    found["over_predicted"] = _scale(found["multi-ring"], 1 / predicted)
    say(f"{count} clusters, unequal links: {found}")
    return found


def _on_loopback(count: int, size: int) -> Figures:
    from benchmarks.ring_nodes import Nodes

    with Nodes(make_shape(CUTS[:count], size)) as nodes:
        found = _compare(nodes, _systems(), ())
    say(f"{count} clusters, loopback: {found}")
    return found


def _robust_bytes(count: int, size: int) -> Figures:
    """Return the bytes of a robust and a plain round of the same clusters, by format."""
    from benchmarks.robust_bytes import compare_bytes

    shape = make_shape(CUTS[:count], size)
    formats = (WireFormat.FP32, WireFormat.INT4)
    found = {str(each): compare_bytes(shape, each, EQUAL_RATE) for each in formats}
    return {name: {key: _short(value) for key, value in each.items()} for name, each in found.items()}


def _compare(nodes: Any, systems: Sequence[str] | Mapping[str, Any], once: Sequence[str]) -> Figures:
    """Let the systems average in turn; the seconds of each, and how much of the CPUs the first one used."""
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    loads, order = [], list(systems)
    first = order[0]
    for turn in range(NUM_TURNS):
        for system in (each for each in order if turn == 0 or each not in once):
            if system not in once:
                nodes.average(system)  # links remember the traffic of whoever was before
            took = nodes.average(system)
            seconds[system].append(took.seconds)
            loads += [took.cpu_seconds / took.seconds] if system == first else []
        order.reverse()
    return {**{system: spread(each) for system, each in seconds.items()}, "busy_cores": _short(max(loads))}


def _rates(shape: Shape, choose: Any) -> dict[NodeId, Rate]:
    """Return the nodes' links, and that of the server, which has the best of all."""
    from benchmarks.baselines.trees import SERVER

    chosen = {node: Rate(*(MBIT * each for each in choose(k))) for k, node in enumerate(shape.stages)}
    best = Rate(max(rate.upload for rate in chosen.values()), max(rate.download for rate in chosen.values()))
    return {**chosen, SERVER: best}


def _bound(shape: Shape, bytes_per_second: float) -> float:
    """Return the seconds below which nobody can average: what the largest stage must send and receive."""
    count = len(shape.clusters)
    return 2 * (count - 1) / count * shape.largest_bytes / bytes_per_second


def _predict(shape: Shape, rates: Mapping[NodeId, Rate]) -> float:
    """Return what the planner says of this round."""
    zeros, size = (0.0,) * NUM_POSITIONS, 4.0 * shape.items_per_position
    profile = ModelProfile(
        "vector", 1, (size,) * NUM_POSITIONS, zeros, (1.0,) * NUM_POSITIONS, zeros, zeros, (*zeros, 0.0)
    )
    nodes = tuple(
        Node(node, 1e12, 1e12, rates[node].upload, rates[node].download, latency_seconds=0.0)
        for node in shape.stages
    )
    config = PlanConfig(deltas=WireFormat.FP32, averaging=Averaging.BLOCKING)
    return forecast(shape.plan, profile, Swarm(nodes), config).round_seconds


def _training() -> Figures:
    from benchmarks.beside_rounds import compare

    found = compare(NUM_TURNS)
    say(f"training: {found}")
    return found


def _baselines(found: Figures) -> dict[str, Figures]:
    return {name: found[name] for name in _systems()[1:] if name in found}


def _missed(figures: Figures) -> list[str]:
    missed = [] if figures["links"] == "namespaces" else ["limits were not measured: that needs root"]
    for count, found in figures["equal"].items():
        share = found.get("share_of_bound", {"median": 1.0})["median"]
        if share < BOUND_TARGET:
            missed.append(f"{count} clusters, equal links: {share:.1%} of the bound, not {BOUND_TARGET:.0%}")
    for count, found in figures["unequal"].items():
        ratio = found["over_predicted"]["median"]
        if abs(ratio - 1) > FORECAST_LIMIT:
            missed.append(f"{count} clusters, unequal links: {ratio} of the forecast's seconds")
    for links in ("equal", "unequal", "loopback"):
        for count, found in figures[links].items():
            for name, other in _baselines(found).items():
                ratio = found["multi-ring"]["median"] / other["median"]
                if ratio > SLOWER_LIMIT:
                    missed.append(f"{count} clusters, {links}: {ratio:.2f} times the seconds of {name}")
    missed += [
        f"{count} clusters, robust, {name}: {each['times']} times the bytes"
        for count, found in figures["robust"].items()
        for name, each in found.items()
        if each["times"] > ROBUST_LIMIT
    ]
    share = figures["training"]["share"]["median"]
    if share < TRAINING_TARGET:
        missed.append(f"training beside rounds: {share:.1%} of the rate without, not {TRAINING_TARGET:.0%}")
    return missed


def _report(figures: Figures) -> str:
    return _METHOD.format(
        rate=f"{EQUAL_RATE / MBIT:g}",
        num_turns=NUM_TURNS,
        slower=f"{SLOWER_LIMIT - 1:.0%}",
        equal=_table(figures["equal"], EQUAL, {"bound": "bound_seconds", "share": "share_of_bound"}),
        formats=_formats(figures["equal"]),
        unequal=_table(
            figures["unequal"],
            UNEQUAL,
            {"forecast": "predicted_seconds", "ours / forecast": "over_predicted"},
        ),
        loopback=_table(figures["loopback"], LOOPBACK, {}),
        robust=table(
            ["clusters", "MB", "format", "plain MB", "robust MB", "times"],
            [
                [count, ROBUST[int(count)] // MB, name, each["plain_mb"], each["robust_mb"], each["times"]]
                for count, found in figures["robust"].items()
                for name, each in found.items()
            ],
        ),
        training=table(
            ["what", "measured"], [[k.replace("_", " "), _show(v)] for k, v in figures["training"].items()]
        ),
    )


def _table(found: Figures, sizes: Mapping[int, int], more: Mapping[str, str]) -> str:
    head = ["clusters", "MB", *_systems(), *more, "busy cores"]
    rows = [
        [
            count,
            sizes[int(count)] // MB,
            *(_show(each.get(name, "-")) for name in (*_systems(), *more.values(), "busy_cores")),
        ]
        for count, each in found.items()
    ]
    return table(head, rows)


def _formats(found: Figures) -> str:
    names = [name for name in next(iter(found.values()))["formats"] if name != "busy_cores"]
    rows = [
        [count, _show(each["multi-ring"]), *(_show(each["formats"][name]) for name in names)]
        for count, each in found.items()
    ]
    return table(["clusters", "fp32", *(name.rpartition(" ")[2] for name in names)], rows)


def _scale(found: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: _short(factor * value) for name, value in found.items()}


def _inverse(found: Mapping[str, float], bound: float) -> dict[str, float]:
    return spread([bound / value for value in found.values()])


def _show(found: Any) -> str:
    if isinstance(found, dict):
        return f"{found['median']:g} ({found['min']:g}-{found['max']:g})"
    return f"{found:g}" if isinstance(found, float) else str(found)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


_METHOD = """\
Real processes, one per node, that average fp32 vectors by weight; when the last of them has its mean, each
checks what it has. Ours is what a peer runs: `averaging.round` and `averaging.ring` with `peer.anchored` over
ZeroMQ with CURVE, which also tests that everything that comes is in range, and hashes every mean. The
baselines use the same transport and chunks of one megabyte, each chunk on its way as soon as it can be: one
ring of whole models through one node per cluster, a parameter server on a machine of its own with the best
link of all, a hierarchy of two levels, and a butterfly (every owner of a segment adds up one part and sends
the mean to all). Hierarchy and butterfly are given our segments. gloo is torch's all_reduce, one group per
segment, all at once, over plain TCP. {num_turns} turns, the systems one after the other in each, every one
once before it is measured, as links adapt to the traffic of the last (ring of whole models and server, on
slow links, only once in all): seconds, median (smallest-largest). Another system counts as faster when it is
by more than {slower}.

## Equal links

Every node has a network namespace of its own and {rate} Mbit/s of TCP payload each way (`tc tbf`). The bound
is 2(C-1)/C times the bytes of the largest stage over that rate. Busy cores are those of our own processes.

{equal}

The same with changes encoded (what a swarm over the internet uses by default is int4):

{formats}

## Unequal links

Uploads of 25 to 100 Mbit/s, downloads of 40 to 100, dealt out in turn. The forecast is the planner's
`round_seconds` for these links.

{unequal}

## Loopback

No link limits; the cores do, which all nodes share: ours and the baselines encrypt, gloo does not; only ours
checks and hashes. More clusters have fewer parameters here, to keep within the time and memory of one PC.

{loopback}

## Robust rounds

What all members of a round send together, headers, pledges, votes and checks included: contributions that go
straight to the owners of parts, against sums along rings (`benchmarks/robust_bytes.py`, in one process).

{robust}

## Training beside rounds

Two clusters of two and three stages on emulated devices (100 ms per microbatch and stage, so that five of
them leave the CPU room), 25 MB of parameters as fp32, links of 50 Mbit/s and 5 ms: a round after every two
batches, which is nearly always, against none at all.

{training}
"""
