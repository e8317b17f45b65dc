"""JSON from strangers: bytes to plain values, and the checks that every slot of a document goes through.

Whatever the bytes, nothing but UnsafeBlueprint leaves this module, and memory stays a small multiple of their
number. Each check returns its argument with the type it proved.
"""

import json
import re
from typing import NoReturn

from ravnest.errors import UnsafeBlueprint
from ravnest.units import show_value

MOST_BYTES = 16 * 2**20
_DEEPEST = 12
_MOST_BRACKETS = 2**21  # a list in memory is far larger than its two brackets in the file
_LONGEST_INTEGER = 20
_LONGEST_SHOWN = 60


def parse(data: bytes) -> object:
    """Return the JSON value in these bytes."""
    if len(data) > MOST_BYTES:
        refuse(f"the blueprint has {len(data)} bytes; at most {MOST_BYTES} are read")
    _check_nesting(data)
    try:
        return json.loads(
            data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_integer
        )
    except (ValueError, RecursionError, MemoryError) as problem:
        raise UnsafeBlueprint(f"the blueprint is not JSON ({type(problem).__name__})") from None


def table(value: object, keys: tuple[str, ...], what: str) -> dict[str, object]:
    """Return an object that has exactly these keys."""
    if not isinstance(value, dict):
        refuse(f"{what} is {show(value)}; it must be an object")
    for key in keys:
        if key not in value:
            refuse(f"{what} has no key {key!r}")
    for key in value:
        if key not in keys:
            refuse(f"{what} has an unknown key {show(key)}")
    return value


def rows(value: object, what: str) -> list[object]:
    """Return a list."""
    if not isinstance(value, list):
        refuse(f"{what} is {show(value)}; it must be a list")
    return value


def row(value: object, length: int, what: str) -> list[object]:
    """Return a list of this length."""
    if not isinstance(value, list) or len(value) != length:
        refuse(f"{what} has an entry {show(value)}; it must be a list of {length}")
    return value


def whole(value: object, low: int, high: int, what: str) -> int:
    """Return a whole number within these bounds, both included."""
    if type(value) is not int or not low <= value <= high:
        refuse(f"{what} is {show(value)}; it must be a whole number from {low} to {high}")
    return value


def flag(value: object, what: str) -> bool:
    """Return a truth value."""
    if not isinstance(value, bool):
        refuse(f"{what} is {show(value)}; it must be true or false")
    return value


def word(value: object, words: tuple[str, ...], what: str) -> str:
    """Return one of these words."""
    if not isinstance(value, str) or value not in words:
        refuse(f"{what} is {show(value)}; it must be one of {', '.join(map(repr, words))}")
    return value


def identifier(value: object, pattern: re.Pattern[str], what: str) -> str:
    """Return a name of this form."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        refuse(f"{what} is named {show(value)}; only letters, digits, _ and the like are allowed there")
    return value


def show(value: object) -> str:
    """Return a stranger's value as a message may quote it."""
    return show_value(value)[:_LONGEST_SHOWN]


def refuse(problem: str) -> NoReturn:
    """Raise the one error of this module."""
    raise UnsafeBlueprint(problem)


def _check_nesting(data: bytes) -> None:
    """Refuse deep or crowded brackets before the parser meets them; what strings hide, it will notice."""
    others = bytes(set(range(256)) - set(b"[]{}"))
    brackets = data.translate(bytes.maketrans(b"{}", b"[]"), others)
    if len(brackets) > _MOST_BRACKETS:
        refuse(f"the blueprint has {len(brackets)} brackets; at most {_MOST_BRACKETS} are read")
    for _ in range(_DEEPEST):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        refuse(f"the blueprint is nested more than {_DEEPEST} deep, or its brackets do not match")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        refuse(f"a key appears twice among {show([key for key, _ in pairs])}")
    return table


def _refuse_constant(text: str) -> NoReturn:
    refuse(f"the number {text} is not finite")


def _integer(text: str) -> int:
    if len(text) > _LONGEST_INTEGER:
        refuse(f"an integer has {len(text)} digits; at most {_LONGEST_INTEGER} are read")
    return int(text)
