"""Tables of TOML and JSON files that know their place, for readers of what people write.

The one idea: a `Table` carries the file name and the entry it came from, so that every refusal names
the file, the entry, the key, the value and the way out. Pure; driven by plan/reading.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, Self

from ravnest.errors import ConfigError
from ravnest.units import Dimension, parse_quantity, show_value

_LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class Rule:
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

    def number(self, key: str, rule: Rule, default: float | None = None) -> float:
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

    def _quantity(self, key: str, value: object, rule: Rule) -> float:
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
