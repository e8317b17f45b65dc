"""Nodes files and profile files: what people write for the planner, with units and bounds.

The records below are the schema; `foreign` turns a wrong value into a sentence with its file and place.
"""

from collections.abc import Iterable
from typing import Annotated, Self

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ravnest.foreign import Document, Label, Name, Quantity, parse_table
from ravnest.ids import NodeId
from ravnest.plan.types import ModelProfile, Node, Swarm
from ravnest.units import Dimension, show_value

_MOST_NODES = 1_000_000
_MOST_POSITIONS = 20_000

_DEFAULTS = Node(NodeId(""), 0, 0, 0, 0)


class _Memory(Quantity, low="1 MB", high="1 PB", dimension=Dimension.BYTES): ...


class _Compute(Quantity, low="1 MFLOP/s", high="1000 PFLOP/s", dimension=Dimension.FLOPS_PER_SECOND): ...


class _Rate(Quantity, low="8 kbit/s", high="8 Tbit/s", dimension=Dimension.BYTES_PER_SECOND): ...


class _Latency(Quantity, low="0 s", high="10 s", dimension=Dimension.SECONDS): ...


class _Uptime(Quantity, low="1 min", high="100000 days", dimension=Dimension.SECONDS, example="2 days"): ...


class _Size(Quantity, low="0 B", high="1000 PB", dimension=Dimension.BYTES): ...


class _Crossing(Quantity, low="1 B", high="1000 PB", dimension=Dimension.BYTES): ...


class _Work(Quantity, low="0 FLOP", high="1000000 PFLOP", dimension=Dimension.FLOPS): ...


class _Samples(Quantity, low="1", high="1000000", example="8", is_whole=True): ...


class _NodeTable(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    memory: _Memory
    compute: _Compute
    up: _Rate
    down: _Rate
    latency: _Latency = _Latency(_DEFAULTS.latency_seconds)
    region: Label = Label(_DEFAULTS.region)
    reachable: bool = _DEFAULTS.is_reachable
    uptime: _Uptime = _Uptime(_DEFAULTS.uptime_seconds)

    def to_node(self) -> Node:
        return Node(
            name=NodeId(str(self.name)),
            memory_bytes=float(self.memory),
            flops_per_second=float(self.compute),
            upload_bytes_per_second=float(self.up),
            download_bytes_per_second=float(self.down),
            latency_seconds=float(self.latency),
            region=str(self.region),
            is_reachable=self.reachable,
            uptime_seconds=float(self.uptime),
        )


class _Pair(tuple[str, str]):
    __slots__ = ()
    example = '["eu", "us"]'

    @classmethod
    def read(cls, value: object) -> Self:
        match value:
            case [str(one), str(other)] if one != other:
                return cls((one, other))
        raise ValueError(f"is {show_value(value)}; write two regions like {cls.example}")


class _LatencyTable(msgspec.Struct, forbid_unknown_fields=True):
    between: _Pair
    seconds: _Latency


class _SwarmFile(msgspec.Struct, forbid_unknown_fields=True):
    node: Annotated[list[_NodeTable], Meta(max_length=_MOST_NODES)] = []
    latency: Annotated[list[_LatencyTable], Meta(max_length=_MOST_NODES)] = []


class _PositionTable(msgspec.Struct, forbid_unknown_fields=True):
    parameters: _Size
    forward: _Work
    saved: _Size
    name: Label = Label("")
    matrices: _Size = _Size(0)
    frozen: _Size = _Size(0)
    buffers: _Size = _Size(0)
    restored: _Size = _Size(0)
    backward: _Work | UnsetType = UNSET
    crossing: _Crossing | UnsetType = UNSET


class _ProfileFile(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    samples_per_batch: _Samples
    input: _Size
    labels: _Size
    position: Annotated[list[_PositionTable], Meta(max_length=_MOST_POSITIONS)] = []


def read_swarm(text: str, where: str) -> Swarm:
    """Return the swarm of a nodes file; `where` is its name (JSON if it ends so, else TOML)."""
    document = parse_table(text, where)
    file = document.read_as(_SwarmFile)
    if not file.node:
        document.refuse(("node",), "is missing or empty; write one [[node]] table per machine")
    first: dict[str, int] = {}
    for index, node in enumerate(file.node):
        if first.setdefault(node.name, index) != index:
            same = f"is {str(node.name)!r} as in node {first[node.name] + 1}"
            document.refuse(("node", index, "name"), f"{same}; choose another name")
    nodes = tuple(node.to_node() for node in file.node)
    return Swarm(nodes, _read_latencies(document, file.latency, {node.region for node in nodes}))


def _read_latencies(
    document: Document, entries: list[_LatencyTable], regions: set[str]
) -> tuple[tuple[str, str, float], ...]:
    latency: dict[frozenset[str], tuple[str, str, float]] = {}
    for index, entry in enumerate(entries):
        place = ("latency", index, "between")
        for region in entry.between:
            if region not in regions:
                known = ", ".join(repr(name) for name in sorted(regions)[:8])
                shown = f"names {show_value(region)}, a region of no node"
                document.refuse(place, f"{shown}; the nodes have {known}: set 'region' there")
        if frozenset(entry.between) in latency:
            document.refuse(place, f"= {list(entry.between)} appears twice; keep one of the two")
        latency[frozenset(entry.between)] = (*entry.between, float(entry.seconds))
    return tuple(latency.values())


def read_profile(text: str, where: str) -> ModelProfile:
    """Return the profile of a profile file; `where` is its name (JSON if it ends so, else TOML)."""
    document = parse_table(text, where)
    file = document.read_as(_ProfileFile)
    if not file.position:
        document.refuse(("position",), "is missing or empty; write one [[position]] table per position")
    for index, entry in enumerate(file.position):
        _check_position(document, index, entry, is_last=index == len(file.position) - 1)
    if not any(entry.parameters for entry in file.position):
        document.refuse(("position",), "has no entry with parameters above 0; set them where there are any")
    if not any(entry.forward for entry in file.position):
        document.refuse(
            ("position",), "has no entry with forward above 0; a model without work needs no plan"
        )
    crossings = [entry.crossing for entry in file.position if entry.crossing is not UNSET]
    return ModelProfile(
        name=str(file.name),
        samples_per_batch=int(file.samples_per_batch),
        parameter_bytes=tuple(float(entry.parameters) for entry in file.position),
        matrix_bytes=tuple(float(entry.matrices) for entry in file.position),
        forward_flops=tuple(float(entry.forward) for entry in file.position),
        backward_flops=tuple(
            2 * float(entry.forward) if entry.backward is UNSET else float(entry.backward)
            for entry in file.position
        ),
        saved_bytes=tuple(float(entry.saved) for entry in file.position),
        crossing_bytes=tuple(map(float, (file.input, *crossings, file.labels))),
        frozen_bytes=_column(float(entry.frozen) for entry in file.position),
        buffer_bytes=_column(float(entry.buffers) for entry in file.position),
        restored_bytes=_column(float(entry.restored) for entry in file.position),
    )


def _column(sizes: Iterable[float]) -> tuple[float, ...]:
    """Return what a profile says of something that most models do not have."""
    found = tuple(sizes)
    return found if any(found) else ()


def _check_position(document: Document, index: int, entry: _PositionTable, is_last: bool) -> None:
    place = ("position", index)
    if is_last and entry.crossing is not UNSET:
        shown = show_value(document.value_at((*place, "crossing")))
        document.refuse((*place, "crossing"), f"is {shown}, but nothing follows; use 'labels' at the top")
    if not is_last and entry.crossing is UNSET:
        document.refuse((*place, "crossing"), f"is missing; write crossing = {_Crossing.example}")
    if entry.matrices > entry.parameters:
        shown = show_value(document.value_at((*place, "matrices")))
        document.refuse((*place, "matrices"), f"is {shown}, more than 'parameters'; it counts a part of them")
    if entry.frozen > entry.parameters - entry.matrices:
        shown = show_value(document.value_at((*place, "frozen")))
        more = "'parameters'" if not entry.matrices else "what 'matrices' leave of 'parameters'"
        document.refuse((*place, "frozen"), f"is {shown}, more than {more}; it counts a part of them")


def profile_to_dict(profile: ModelProfile) -> dict[str, object]:
    """Return what, written as JSON or TOML, `read_profile` reads back unchanged."""
    columns = {
        "parameters": profile.parameter_bytes,
        "matrices": profile.matrix_bytes,
        "forward": profile.forward_flops,
        "backward": profile.backward_flops,
        "saved": profile.saved_bytes,
        "frozen": profile.frozen_bytes,
        "buffers": profile.buffer_bytes,
        "restored": profile.restored_bytes,
        "crossing": profile.crossing_bytes[1:],
    }
    positions = [
        {key: column[index] for key, column in columns.items() if column}
        for index in range(profile.num_positions)
    ]
    del positions[-1]["crossing"]
    return {
        "name": profile.name,
        "samples_per_batch": profile.samples_per_batch,
        "input": profile.crossing_bytes[0],
        "labels": profile.crossing_bytes[-1],
        "position": positions,
    }
