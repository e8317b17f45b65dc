"""Nodes files and profile files as text, and back; docs/files.md shows the schema to people.

The one idea: one function per kind of entry says which keys it has and which numbers are believable.
A number without a unit is in bytes, bytes/s, FLOP, FLOP/s or seconds; the bounds are narrow enough
to notice a forgotten unit. Driven by the cli, which does the file I/O.
"""

from ravnest.errors import ConfigError
from ravnest.plan.tables import Rule, Table, parse_table
from ravnest.plan.types import ModelProfile, Node, NodeId, Swarm
from ravnest.units import Dimension, show_value

_MOST_NODES = 1_000_000
_MOST_POSITIONS = 20_000

_MEMORY = Rule.between("1 MB", "1 PB", Dimension.BYTES)
_COMPUTE = Rule.between("1 MFLOP/s", "1000 PFLOP/s", Dimension.FLOPS_PER_SECOND)
_RATE = Rule.between("8 kbit/s", "8 Tbit/s", Dimension.BYTES_PER_SECOND)
_LATENCY = Rule.between("0 s", "10 s", Dimension.SECONDS)
_UPTIME = Rule.between("1 min", "100000 days", Dimension.SECONDS, "2 days")
_SIZE = Rule.between("0 B", "1000 PB", Dimension.BYTES)
_CROSSING = Rule.between("1 B", "1000 PB", Dimension.BYTES)
_WORK = Rule.between("0 FLOP", "1000000 PFLOP", Dimension.FLOPS)
_SAMPLES = Rule.between("1", "1000000", None)

_DEFAULTS = Node(NodeId(""), 0, 0, 0, 0)


def read_swarm(text: str, where: str) -> Swarm:
    """Return the swarm of a nodes file; `where` is its name (JSON if it ends so, else TOML)."""
    top = parse_table(text, where)
    top.check_keys("node", "latency")
    entries = top.entries("node", _MOST_NODES)
    if not entries:
        top.refuse("node", "is missing or empty; write one [[node]] table per machine")
    nodes = tuple(_read_node(entry) for entry in entries)
    _check_unique(nodes, where)
    regions = {node.region for node in nodes}
    latency: dict[frozenset[str], tuple[str, str, float]] = {}
    for entry in top.entries("latency", _MOST_NODES):
        one, other = _read_pair(entry, regions)
        if frozenset((one, other)) in latency:
            entry.refuse("between", f"= {[one, other]} appears twice; keep one of the two")
        latency[frozenset((one, other))] = (one, other, entry.number("seconds", _LATENCY))
    return Swarm(nodes, tuple(latency.values()))


def read_profile(text: str, where: str) -> ModelProfile:
    """Return the profile of a profile file; `where` is its name (JSON if it ends so, else TOML)."""
    top = parse_table(text, where)
    top.check_keys("name", "samples_per_batch", "input", "labels", "position")
    entries = top.entries("position", _MOST_POSITIONS)
    if not entries:
        top.refuse("position", "is missing or empty; write one [[position]] table per position")
    rows = [_read_position(entry, is_last=entry is entries[-1]) for entry in entries]
    parameters, matrices, forward, backward, saved, crossing = zip(*rows, strict=True)
    if sum(parameters) == 0:
        top.refuse("position", "has no entry with parameters above 0; set them where there are any")
    if sum(forward) == 0:
        top.refuse("position", "has no entry with forward above 0; a model without work needs no plan")
    ends = top.number("input", _SIZE), top.number("labels", _SIZE)
    return ModelProfile(
        name=top.name("name"),
        samples_per_batch=int(top.number("samples_per_batch", _SAMPLES)),
        parameter_bytes=parameters,
        matrix_bytes=matrices,
        forward_flops=forward,
        backward_flops=backward,
        saved_bytes=saved,
        crossing_bytes=(ends[0], *crossing[:-1], ends[1]),
    )


def swarm_to_dict(swarm: Swarm) -> dict[str, object]:
    """Return what, written as JSON or TOML, `read_swarm` reads back unchanged."""
    nodes = [
        {
            "name": node.name,
            "memory": node.memory_bytes,
            "compute": node.flops_per_second,
            "up": node.upload_bytes_per_second,
            "down": node.download_bytes_per_second,
            "latency": node.latency_seconds,
            "region": node.region,
            "reachable": node.is_reachable,
            "uptime": node.uptime_seconds,
        }
        for node in swarm.nodes
    ]
    latency = [{"between": [one, other], "seconds": seconds} for one, other, seconds in swarm.region_latency]
    return {"node": nodes, "latency": latency}


def profile_to_dict(profile: ModelProfile) -> dict[str, object]:
    """Return what, written as JSON or TOML, `read_profile` reads back unchanged."""
    columns = {
        "parameters": profile.parameter_bytes,
        "matrices": profile.matrix_bytes,
        "forward": profile.forward_flops,
        "backward": profile.backward_flops,
        "saved": profile.saved_bytes,
        "crossing": profile.crossing_bytes[1:],
    }
    positions = [
        {key: column[index] for key, column in columns.items()} for index in range(profile.num_positions)
    ]
    del positions[-1]["crossing"]
    return {
        "name": profile.name,
        "samples_per_batch": profile.samples_per_batch,
        "input": profile.crossing_bytes[0],
        "labels": profile.crossing_bytes[-1],
        "position": positions,
    }


def _read_node(entry: Table) -> Node:
    optional = ("latency", "region", "reachable", "uptime")
    entry.check_keys("name", "memory", "compute", "up", "down", *optional)
    return Node(
        name=NodeId(entry.name("name")),
        memory_bytes=entry.number("memory", _MEMORY),
        flops_per_second=entry.number("compute", _COMPUTE),
        upload_bytes_per_second=entry.number("up", _RATE),
        download_bytes_per_second=entry.number("down", _RATE),
        latency_seconds=entry.number("latency", _LATENCY, _DEFAULTS.latency_seconds),
        region=entry.name("region", _DEFAULTS.region),
        is_reachable=entry.flag("reachable", _DEFAULTS.is_reachable),
        uptime_seconds=entry.number("uptime", _UPTIME, _DEFAULTS.uptime_seconds),
    )


def _check_unique(nodes: tuple[Node, ...], where: str) -> None:
    first: dict[NodeId, int] = {}
    for number, node in enumerate(nodes, 1):
        if first.setdefault(node.name, number) != number:
            taken = f"key 'name' is {node.name!r} as in node {first[node.name]}"
            raise ConfigError(f"{where}: node {number}: {taken}; choose another name")


def _read_pair(entry: Table, regions: set[str]) -> tuple[str, str]:
    entry.check_keys("between", "seconds")
    pair = entry.values.get("between")
    if not isinstance(pair, list) or len(pair) != 2 or pair[0] == pair[1]:
        entry.refuse("between", f'is {show_value(pair)}; write two regions like ["eu", "us"]')
    for region in pair:
        if not isinstance(region, str) or region not in regions:
            known = ", ".join(repr(name) for name in sorted(regions)[:8])
            shown = f"names {show_value(region)}, a region of no node"
            entry.refuse("between", f"{shown}; the nodes have {known}: set 'region' there")
    return pair[0], pair[1]


def _read_position(entry: Table, is_last: bool) -> tuple[float, ...]:
    required = ("parameters", "forward", "saved", "crossing")
    entry.check_keys("name", "matrices", "backward", *required)
    entry.name("name", default="")
    if is_last and "crossing" in entry.values:
        shown = show_value(entry.values["crossing"])
        entry.refuse("crossing", f"is {shown}, but nothing follows; use 'labels' at the top")
    parameters = entry.number("parameters", _SIZE)
    matrices = entry.number("matrices", _SIZE, default=0.0)
    if matrices > parameters:
        shown = show_value(entry.values["matrices"])
        entry.refuse("matrices", f"is {shown}, more than 'parameters'; it counts a part of them")
    forward = entry.number("forward", _WORK)
    return (
        parameters,
        matrices,
        forward,
        entry.number("backward", _WORK, default=2 * forward),
        entry.number("saved", _SIZE),
        0.0 if is_last else entry.number("crossing", _CROSSING),
    )
