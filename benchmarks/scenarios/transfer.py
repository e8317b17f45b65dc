"""Content by hash at size: CPU per GB, how long an event loop is held, several sources, first weights."""

from typing import Any

from benchmarks.links import Links
from benchmarks.measure import say, spread, table
from benchmarks.transfer_nodes import Fetch, Measured, Nodes
from ravnest.ids import NodeId

Figures = dict[str, Any]

STALL_SECONDS = 0.1  # heartbeats are answered within this while content moves
HUB_SHARE = 1.1  # of the model leaves the hub, however many clusters there are
_SOURCES = (1, 2, 4)
_CLUSTERS = (2, 4)
_LINK = (12.5e6, 0.05)  # 100 Mbit/s, 100 ms there and back
_BEFORE = 2  # nodes that pass first weights on to the same one, as hub.coordinator.sources has it
_GET = NodeId("receiver")


def run(quick: bool) -> tuple[Figures, str, list[str]]:
    turns = 1 if quick else 3
    fast, slow, model = (64e6, 4e6, 16e6) if quick else (256e6, 50e6, 100e6)
    found: Figures = {"loopback": {}, "100 Mbit/s": {}, "first weights": {}}
    for count in _SOURCES:
        for name, size, link in (("loopback", fast, None), ("100 Mbit/s", slow, _LINK)):
            each = [_fetch(int(size), count, link, turn) for turn in range(turns)]
            found[name][count] = _sum_up(each, size)
            say(f"{name}, {count} sources: {found[name][count]}")
    for count in _CLUSTERS:
        each = [_spread(int(model), count, turn) for turn in range(min(turns, 3))]
        found["first weights"][count] = {key: spread([turn[key] for turn in each]) for key in each[0]}
        say(f"first weights, {count} clusters: {found['first weights'][count]}")
    if quick:
        assert all(each["hub_share"]["max"] < HUB_SHARE for each in found["first weights"].values()), found
        return found, "", []
    return found, _report(found, fast, slow, model), _missed(found)


def _fetch(size: int, count: int, link: tuple[float, float] | None, seed: int) -> dict[NodeId, Measured]:
    """Fetch a blob from so many nodes at once."""
    sources = [NodeId(f"source {number}") for number in range(count)]
    with Nodes([*sources, _GET]) as nodes:
        refs = {nodes.make(source, size, seed) for source in sources}
        (ref,) = refs
        order = {_GET: Fetch(ref, tuple(sources))}
        if link is None:
            nodes.connect(_GET, {source: nodes.addresses[source] for source in sources})
            return nodes.fetch(order)
        with Links(*link) as links:
            nodes.connect(_GET, {source: links.through(nodes.addresses[source]) for source in sources})
            return nodes.fetch(order)


def _sum_up(turns: list[dict[NodeId, Measured]], size: float) -> Figures:
    got = [turn[_GET] for turn in turns]
    others = [max(x.longest_stall_seconds for name, x in turn.items() if name != _GET) for turn in turns]
    held = [max(each.longest_held_seconds for each in turn.values()) for turn in turns]
    return {
        "bytes_per_second": spread([size / each.seconds for each in got]),
        "cpu_seconds_per_gb": spread([1e9 * each.cpu_seconds / size for each in got]),
        "loop_cpu_seconds_per_gb": spread([1e9 * each.loop_cpu_seconds / size for each in got]),
        "stall_seconds": spread([each.longest_stall_seconds for each in got]),
        "stall_of_sources_seconds": spread(others),
        "held_seconds": spread(held),
        "peak_bytes": spread([each.peak_bytes for each in got]),
    }


def _spread(size: int, count: int, seed: int) -> Figures:
    """Let the owners of one segment in so many clusters get its first weights, as the coordinator orders."""
    hub, owners = NodeId("hub"), [NodeId(f"peer {number}") for number in range(count)]
    with Nodes([hub, *owners], upload_bytes_per_second=_LINK[0]) as nodes:
        ref = nodes.make(hub, size, seed)
        orders = {}
        for turn, owner in enumerate(owners):
            before = tuple(owners[:turn][-_BEFORE:])
            nodes.connect(owner, {node: nodes.addresses[node] for node in (hub, *before)})
            orders[owner] = Fetch(ref, before, (hub,)) if before else Fetch(ref, (hub,))
        found = nodes.fetch(orders)
    return {
        "hub_share": found[hub].sent_bytes / size,
        "seconds": max(found[owner].seconds for owner in owners),
        "seconds_once": size / _LINK[0],
        "stall_seconds": max(each.longest_stall_seconds for each in found.values()),
    }


def _missed(found: Figures) -> list[str]:
    missed = []
    for name in ("loopback", "100 Mbit/s"):
        for count, each in found[name].items():
            held = each["held_seconds"]["median"]
            if held > STALL_SECONDS:
                missed.append(f"{name}, {count} sources: an event loop was held for {held} s")
    for count, each in found["first weights"].items():
        if each["hub_share"]["max"] > HUB_SHARE:
            missed.append(f"{count} clusters: the hub sent {each['hub_share']['max']} times the model")
    return missed


def _report(found: Figures, fast: float, slow: float, model: float) -> str:
    head = [
        "sources",
        "MB/s",
        "CPU s per GB",
        "of them on the loop",
        "longest stall ms",
        "of sources ms",
        "held by any ms",
        "peak MB",
    ]
    tables = []
    for name in ("loopback", "100 Mbit/s"):
        rows = [
            [
                count,
                _range(each["bytes_per_second"], 1e-6),
                _range(each["cpu_seconds_per_gb"]),
                _range(each["loop_cpu_seconds_per_gb"]),
                _range(each["stall_seconds"], 1e3),
                _range(each["stall_of_sources_seconds"], 1e3),
                _range(each["held_seconds"], 1e3),
                _range(each["peak_bytes"], 1e-6),
            ]
            for count, each in found[name].items()
        ]
        tables.append(table(head, rows))
    rows = [
        [count, _range(each["hub_share"]), _range(each["seconds"]), each["seconds_once"]["median"]]
        for count, each in found["first weights"].items()
    ]
    chain = table(["clusters", "hub sent / model", "all have it after s", "once over the hub's line s"], rows)
    return _METHOD.format(
        fast=fast / 1e6, slow=slow / 1e6, model=model / 1e6, one=tables[0], two=tables[1], chain=chain
    )


def _range(found: dict[str, float], scale: float = 1.0) -> str:
    low, median, high = (f"{scale * found[key]:.3g}" for key in ("min", "median", "max"))
    return f"{median} ({low}-{high})"


_METHOD = """\
Every node is a process with the transport, outbox and exchange of a hub or a peer: encrypted, checked by
hashes, written to disk. A stall is how late a timer of 5 ms was on the node's event loop, at worst; other
work on the machine counts in it. "Held" is the worst without the time in which the loop could have run and
had no core: what the program itself is answerable for. The target is for that. Median and range.

## One receiver, {fast:g} MB over loopback

{one}

## One receiver, {slow:g} MB, 100 Mbit/s and 100 ms round trip from each source

{two}

## First weights, {model:g} MB, every node sends 100 Mbit/s at most

One owner of a segment asks the hub. Each other one asks the two that ask before it, and the hub only if
they fail. Without that the hub would send the model once for each cluster.

{chain}
"""
