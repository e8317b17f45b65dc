"""Tables of TOML and JSON files that know their place, for readers of what people write.

The one idea: a `Table` carries the file name and the entry it came from, so that every refusal names
the file, the entry, the key, the value and the way out. Pure.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, Self

from ravnest.errors import ConfigError
from ravnest.ids import NodeId
from ravnest.plan.types import ModelProfile, Node, Swarm
from ravnest.units import Dimension, parse_quantity, show_value

_LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class FieldRule:
    """How a number is written and between which bounds, in its base unit, it lies."""

    dimension: Dimension | None  # None: a whole number without a unit
    low: float
    high: float
    bounds: str
    example: str  # what to write, quoted as a file would

    @classmethod
    def between(cls, low: str, high: str, dimension: Dimension | None, example: str = "") -> Self:
        """Return the rule whose bounds are written as a person writes them."""
        ends = [parse_quantity(end, dimension) if dimension else float(end) for end in (low, high)]
        example = example or (dimension.value if dimension else "")
        return cls(dimension, ends[0], ends[1], f"{low} to {high}", f'"{example}"' if example else "8")


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a file; asking it for a key returns a usable value or raises ConfigError."""

    where: str
    values: Mapping[str, object]
    entry: str = ""  # 'node 3 "bob": ', or nothing for the top of the file

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raise the one sentence that says what is wrong with `key`."""
        raise ConfigError(f"{self.where}: {self.entry}key {show_value(key)} {problem}")

    def check_keys(self, *known: str) -> None:
        """Refuse the first key that is not known."""
        for key, value in self.values.items():
            if key not in known:
                close = difflib.get_close_matches(key[:_LONGEST_NAME], known, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}" if close else f"known are {', '.join(known)}"
                self.refuse(key, f"= {show_value(value)} is unknown; {hint}")

    def entries(self, key: str, most: int) -> list["Table"]:
        """Return the tables of the list `key`; none when it is missing."""
        items = self.values.get(key, [])
        if not isinstance(items, list):
            shown = show_value(items)
            self.refuse(key, f"is {shown}, not a list; write [[{key}]] in TOML, a list in JSON")
        if len(items) > most:
            self.refuse(key, f"has {len(items)} entries; split the file, the most is {most}")
        return [self._entry(key, number, item) for number, item in enumerate(items, 1)]

    def _entry(self, key: str, number: int, item: object) -> "Table":
        if not isinstance(item, dict):
            keys = "write its keys and values"
            self.refuse(key, f"has {show_value(item)} as entry {number}, not a table; {keys}")
        name = item.get("name")
        shown = f' "{name}"' if isinstance(name, str) and name and _is_plain(name) else ""
        return Table(self.where, item, f"{key} {number}{shown}: ")

    def name(self, key: str, default: str | None = None) -> str:
        """Return a name that is safe to print; only a default may be empty."""
        name = self._required(key, '"ana-rtx3060"') if default is None else self._get(key, default)
        if isinstance(name, str) and _is_plain(name) and (name or name == default):
            return name
        rule = f"1 to {_LONGEST_NAME} printable characters without space at its ends"
        return self.refuse(key, f"is {show_value(name)}; write {rule}")

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(key, default)
        if isinstance(value, bool):
            return value
        return self.refuse(key, f"is {show_value(value)}; write true or false")

    def number(self, key: str, rule: FieldRule, default: float | None = None) -> float:
        """Return a quantity in its base unit, within the bounds of `rule`."""
        if default is not None and key not in self.values:
            return default
        value = self._required(key, rule.example)
        number = self._quantity(key, value, rule)
        if not rule.low <= number <= rule.high:
            shown = f"is {show_value(value)}, outside {rule.bounds}"
            self.refuse(key, f"{shown}; write a believable number like {rule.example}")
        if rule.dimension is None and number != int(number):
            self.refuse(key, f"is {show_value(value)}; write a whole number")
        return float(number)

    def _quantity(self, key: str, value: object, rule: FieldRule) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if not isinstance(value, str) or rule.dimension is None:
            self.refuse(key, f"is {show_value(value)}, not a number; write {rule.example}")
        try:
            return parse_quantity(value, rule.dimension)
        except ConfigError as error:
            self.refuse(key, f"is not usable: {error}")

    def _get(self, key: str, default: object) -> object:
        return self.values.get(key, default)

    def _required(self, key: str, example: str) -> object:
        if key not in self.values:
            self.refuse(key, f"is missing; write {key} = {example}")
        return self.values[key]


def parse_table(text: str, where: str) -> Table:
    """Return the top table of a file: JSON if its name ends so, else TOML."""
    text = text.removeprefix("\ufeff")  # some editors begin a file with a byte order mark
    language = "JSON" if where.lower().endswith(".json") else "TOML"
    if not text.strip():
        raise ConfigError(f"{where} is empty; docs/files.md shows what to write")
    try:
        if language == "JSON":
            top = json.loads(text, object_pairs_hook=_without_repeats)
        else:
            top = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid {language}: {error}; correct it there") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply; write flat tables") from None
    if not isinstance(top, dict):
        raise ConfigError(f"{where} holds {show_value(top)}, not an object; write {{...}}")
    return Table(where, top)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {show_value(key)} = {show_value(value)} is set twice")
        values[key] = value
    return values


def _is_plain(name: str) -> bool:
    return len(name) <= _LONGEST_NAME and name.isprintable() and name == name.strip()


_MOST_NODES = 1_000_000
_MOST_POSITIONS = 20_000

_MEMORY = FieldRule.between("1 MB", "1 PB", Dimension.BYTES)
_COMPUTE = FieldRule.between("1 MFLOP/s", "1000 PFLOP/s", Dimension.FLOPS_PER_SECOND)
_RATE = FieldRule.between("8 kbit/s", "8 Tbit/s", Dimension.BYTES_PER_SECOND)
_LATENCY = FieldRule.between("0 s", "10 s", Dimension.SECONDS)
_UPTIME = FieldRule.between("1 min", "100000 days", Dimension.SECONDS, "2 days")
_SIZE = FieldRule.between("0 B", "1000 PB", Dimension.BYTES)
_CROSSING = FieldRule.between("1 B", "1000 PB", Dimension.BYTES)
_WORK = FieldRule.between("0 FLOP", "1000000 PFLOP", Dimension.FLOPS)
_SAMPLES = FieldRule.between("1", "1000000", None)

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
