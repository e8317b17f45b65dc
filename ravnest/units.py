"""Quantities as people write them: "8 GB", "50 Mbit/s", "20 TFLOP/s", "12 ms", "3 days".

Decimal prefixes are powers of 1000, Ki/Mi/Gi powers of 1024; `bit` is an eighth of a byte. Every
file and flag reads its numbers here, so that one spelling works everywhere.
"""

import math
import re
import reprlib
from enum import StrEnum

from ravnest.errors import ConfigError

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PREFIX |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_TIME = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME |= {"hour": 3600.0, "hours": 3600.0, "day": 86400.0, "days": 86400.0}
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S.*)?")
_LONGEST_TEXT = 60


class Dimension(StrEnum):
    """What a quantity measures; the value is an example of how to write it."""

    BYTES = "8 GB"
    BYTES_PER_SECOND = "50 Mbit/s"
    FLOPS_PER_SECOND = "20 TFLOP/s"
    FLOPS = "3 GFLOP"
    SECONDS = "12 ms"


_SUFFIXES: dict[Dimension, dict[str, float]] = {
    Dimension.BYTES: {"B": 1.0, "bit": 0.125, "": 1.0},
    Dimension.BYTES_PER_SECOND: {"B/s": 1.0, "bit/s": 0.125, "bps": 0.125},
    Dimension.FLOPS_PER_SECOND: {"FLOP/s": 1.0, "FLOPS": 1.0, "FLOP": 1.0},
    Dimension.FLOPS: {"FLOP": 1.0},
}


def parse_quantity(text: str, dimension: Dimension) -> float:
    """Return the quantity in its base unit (bytes, bytes/s, FLOP/s, FLOP, seconds)."""
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= _LONGEST_TEXT else None
    if match is None:
        raise _wrong(f"{show_value(text)} is not a number with a unit", dimension)
    number, unit = float(match[1]), match[2] or ""
    quantity = number * _unit_size(unit, text, dimension)
    if not math.isfinite(quantity):
        raise _wrong(f"{text!r} is not a finite number", dimension)
    return quantity


def _unit_size(unit: str, text: str, dimension: Dimension) -> float:
    if dimension is Dimension.SECONDS:
        if unit in _TIME:
            return _TIME[unit]
    else:
        for suffix, size in _SUFFIXES[dimension].items():
            prefix = unit.removesuffix(suffix)
            if unit.endswith(suffix) and prefix in _PREFIX:
                return size * _PREFIX[prefix]
    raise _wrong(f"unknown unit {unit!r} in {text!r}" if unit else f"{text!r} has no unit", dimension)


def _wrong(problem: str, dimension: Dimension) -> ConfigError:
    return ConfigError(f"{problem}; write it like {dimension.value!r}")


class _ShortRepr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # CPython refuses to write integers of thousands of digits, and a file may hold one.
        return repr(x) if x.bit_length() <= 200 else f"an integer of {x.bit_length()} bits"


_SHORT_REPR = _ShortRepr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = _LONGEST_TEXT


def show_value(value: object) -> str:
    """Return a value as an error quotes it: its repr, cut short whatever a file held."""
    return _SHORT_REPR.repr(value)


def show_bytes(size_bytes: float) -> str:
    """Return bytes as a person reads them: 512 MB, 14.2 GB."""
    return f"{_scaled(size_bytes)}B"


def show_rate(bytes_per_second: float) -> str:
    """Return a link speed in bits, as providers of links do: 44 Mbit/s."""
    return f"{_scaled(bytes_per_second * 8)}bit/s"


def show_flops(flops_per_second: float) -> str:
    """Return a compute speed: 16 TFLOP/s."""
    return f"{_scaled(flops_per_second)}FLOP/s"


def show_seconds(seconds: float) -> str:
    """Return a duration with three significant digits: 12 ms, 1.84 s, 6.5 min."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds)} s"


def _scaled(value: float) -> str:
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{_three_digits(value / size)} {prefix}"
    return f"{_three_digits(value)} "


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


# Control characters, those that turn the direction of a line, and those that cannot be seen.
UNPLAIN_LETTERS = r"\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"


def show_plainly(text: str) -> str:
    """Return text of others as one line that a terminal shows and does not obey."""
    line = re.sub(r"\s*[\r\n\t\v\f]\s*", " ", text)
    return re.sub(f"[{UNPLAIN_LETTERS}]", lambda found: found[0].encode("unicode_escape").decode(), line)


def show_count(count: int, noun: str) -> str:
    """Return a count with its noun: 1 node, 2 nodes."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
