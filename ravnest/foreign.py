"""Foreign data: JSON and TOML from others become typed records, or one sentence that says what is wrong.

`parse_json` and `parse_table` bound size and depth, refuse repeated keys and return plain values. `read_as`
gives these their types by msgspec. A refusal names the file, the place, the value and the way out. No other
exception leaves this module. It is pure: `disk` reads the bytes.
"""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, NoReturn, Self, TypeVar, cast

import msgspec
from msgspec import inspect

from ravnest.errors import ConfigError
from ravnest.units import Dimension, parse_quantity, show_bytes, show_value

_LONGEST_NAME = 64
_LONGEST_QUOTE = 60
_DEEPEST = 12
_MOST_BRACKETS = 2**21  # a list in memory is far larger than its two brackets in the file
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_AS_SQUARE = bytes.maketrans(b"{}", b"[]")
_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(\d{1,12})\]")

_T = TypeVar("_T")
Place = tuple[str | int, ...]  # keys and indexes from the top of a document


class Quantity(float):
    """A number within bounds, with a unit or in its base unit. A subclass states the bounds."""

    dimension: ClassVar[Dimension | None]  # None: a number without a unit
    is_whole: ClassVar[bool]
    takes_text: ClassVar[bool]  # a number without its unit may be text, as on a command line
    low: ClassVar[float]
    high: ClassVar[float]
    bounds: ClassVar[str]
    example: ClassVar[str]

    def __init_subclass__(
        cls,
        low: str,
        high: str,
        dimension: Dimension | None = None,
        example: str = "",
        is_whole: bool = False,
        takes_text: bool = False,
    ) -> None:
        cls.dimension, cls.is_whole, cls.takes_text = dimension, is_whole, takes_text
        unit = None if takes_text else dimension
        ends = [parse_quantity(end, unit) if unit else float(end) for end in (low, high)]
        cls.low, cls.high, cls.bounds = *ends, f"{low} to {high}"
        cls.example = f'"{example or dimension}"' if dimension else example or low

    @classmethod
    def read(cls, value: object) -> Self:
        """Return the quantity in its base unit, or raise ValueError with what is wrong with the value."""
        number, shown = cls._find_number(value), quote(value)
        if not cls.low <= number <= cls.high:
            raise ValueError(
                f"is {shown}, outside {cls.bounds}; write a believable number like {cls.example}"
            )
        if cls.is_whole and number != int(number):
            raise ValueError(f"is {shown}; write a whole number")
        return cls(number)

    @classmethod
    def _find_number(cls, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and cls.takes_text and len(value) <= _LONGEST_NAME:
            try:
                return float(value)
            except ValueError:
                pass
        if not isinstance(value, str) or cls.dimension is None:
            raise ValueError(f"is {quote(value)}, not a number; write {cls.example}")
        try:
            return parse_quantity(value, cls.dimension)
        except ConfigError as error:
            raise ValueError(f"is not usable: {error}") from None


class Label(str):
    """A word that is safe to print, or no word."""

    __slots__ = ()
    example: ClassVar[str] = '"ana-rtx3060"'
    can_be_empty: ClassVar[bool] = True

    @classmethod
    def read(cls, value: object) -> Self:
        """Return the word, or raise ValueError with what is wrong with the value."""
        if isinstance(value, str) and is_printable_word(value) and (value or cls.can_be_empty):
            return cls(value)
        rule = f"1 to {_LONGEST_NAME} printable characters without space at its ends"
        raise ValueError(f"is {quote(value)}; write {rule}")


class Name(Label):
    """A word that is safe to print."""

    __slots__ = ()
    can_be_empty: ClassVar[bool] = False


def quote(value: object) -> str:
    """Return a foreign value as a message may quote it: printable and short."""
    shown = show_value(value)
    return shown if len(shown) <= _LONGEST_QUOTE else f"{shown[:_LONGEST_QUOTE]}..."


def is_printable_word(text: str) -> bool:
    """Return whether a name is short, without control characters and without space at its ends."""
    return len(text) <= _LONGEST_NAME and text.isprintable() and text == text.strip()


@dataclass(frozen=True, slots=True)
class Document:
    """Plain values of a foreign file. `where` names the file, `error` is what a refusal raises.

    People write tables, and read `node 2 "ana": key 'memory'` of one. Elsewhere that is `node[1].memory`.
    """

    values: Any
    where: str
    error: Callable[[str], Exception] = ConfigError
    is_table: bool = False

    def read_as(self, kind: type[_T]) -> _T:
        """Return the values as a record of this kind."""
        try:
            return msgspec.convert(self.values, kind, dec_hook=_read_scalar)
        except msgspec.ValidationError as error:
            reason, _, steps = str(error).rpartition(" - at `$")
            place = tuple(name or int(index) for name, index in _STEP.findall(steps)) if reason else ()
            problem = reason or str(error)
        except UnicodeError:
            raise self.error(f"{self.where} holds half a character; write its text as UTF-8") from None
        except RecursionError:
            raise self.error(f"{self.where} is nested too deeply; write flat tables") from None
        return self._explain(problem, place, _describe(cast(Hashable, kind)))

    def refuse(self, place: Place, problem: str) -> NoReturn:
        """Raise the sentence that says what is wrong at a place."""
        raise self.error(f"{self.where}: {self._show(place)} {problem}")

    def refuse_unknown(self, place: Place, known: Collection[str]) -> None:
        """Refuse the first key of the table at a place that is not known."""
        value = self.value_at(place)
        for key in value:
            if key not in known:
                close = difflib.get_close_matches(key[:_LONGEST_NAME], known, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}" if close else f"known are {', '.join(known)}"
                self.refuse((*place, key), f"= {quote(value[key])} is unknown; {hint}")

    def value_at(self, place: Place) -> Any:
        """Return the plain value at a place."""
        value = self.values
        for step in place:
            value = value[step]
        return value

    def _explain(self, problem: str, place: Place, kind: inspect.Type) -> NoReturn:
        """Make msgspec's report a sentence with the value and the way out."""
        try:
            value = self.value_at(place)
            kind, place = _follow(kind, place)
            fields = _fields_of(kind)
            if problem.startswith("Object contains unknown field"):
                self.refuse_unknown(place, fields)
                raise LookupError(place)
            if problem.startswith("Object missing required field"):
                key = next(key for key, is_required in fields.items() if is_required and key not in value)
                example = getattr(_bare(_follow(kind, (key,))[0]), "cls", None)
                written = f"; write {key} = {getattr(example, 'example', '...')}" if self.is_table else ""
                self.refuse((*place, key), f"is missing{written}")
        except (LookupError, TypeError, StopIteration):  # a key of the file imitates a place
            raise self.error(f"{self.where} is not usable: {problem[:120]!r}") from None
        self._explain_value(problem, place, value, kind)

    def _explain_value(self, problem: str, place: Place, value: object, kind: inspect.Type) -> NoReturn:
        if not place:
            expected = "an object; write {...}" if _fields_of(kind) else f"what it should: {problem}"
            raise self.error(f"{self.where} holds {quote(value)}, not {expected}")
        bare = _bare(kind)
        if isinstance(bare, inspect.CustomType):  # its own `read` said it all
            self.refuse(place, problem)
        if self.is_table and isinstance(bare, inspect.ListType) and not isinstance(value, list):
            shown = f"is {quote(value)}, not a list"
            self.refuse(place, f"{shown}; write [[{place[-1]}]] in TOML, a list in JSON")
        if isinstance(value, list) and " of length <= " in problem:
            self.refuse(place, f"has {len(value)} entries; at most {problem.rpartition(' ')[2]} are read")
        if self.is_table and isinstance(place[-1], int):
            way_out = "write a table of keys and values" if _fields_of(kind) else _way_out(problem, kind)
            self.refuse(place[:-1], f"has {quote(value)} as entry {place[-1] + 1}; {way_out}")
        self.refuse(place, f"is {quote(value)}; {_way_out(problem, kind)}")

    def _show(self, place: Place) -> str:
        if not self.is_table:
            steps = (f"[{step}]" if isinstance(step, int) else f".{_plain_key(step)}" for step in place)
            return "".join(steps).removeprefix(".")
        shown, value = "", self.values
        for step, following in pairwise(place):
            value = value[step]
            if isinstance(step, int):
                name = value.get("name") if isinstance(value, dict) else None
                is_shown = isinstance(name, str) and name and is_printable_word(name)
                shown += f' {step + 1} "{name}": ' if is_shown else f" {step + 1}: "
            else:
                shown += step if isinstance(following, int) else f"{step}: "
        return f"{shown}key {quote(place[-1])}"


def parse_json(
    data: bytes, where: str, most_bytes: int, error: Callable[[str], Exception] = ConfigError
) -> Document:
    """Return the JSON value in these bytes, which a program wrote."""
    if len(data) > most_bytes:
        raise error(f"{where} has {len(data)} bytes; at most {most_bytes} are read")
    _check_brackets(data, where, error)
    try:
        values = json.loads(
            data.decode(), object_pairs_hook=_without_repeats, parse_constant=_finite, parse_float=_finite
        )
    except (ValueError, RecursionError, MemoryError) as problem:
        reason = str(problem) if type(problem) is ValueError else type(problem).__name__
        raise error(f"{where} is not JSON ({reason})") from None
    return Document(values, where, error)


def decode_json(
    data: bytes | msgspec.Raw,
    kind: type[_T],
    where: str,
    most_bytes: int,
    error: Callable[[str], Exception] = ConfigError,
) -> _T:
    """Return the record in these bytes at once, for data too large for plain values in between."""
    if memoryview(data).nbytes > most_bytes:
        raise error(f"{where} has more than {show_bytes(most_bytes)}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as problem:  # ValueError: also text that is not UTF-8
        raise error(f"{where} cannot be used: {str(problem)[:200]!r}") from None


def suggest(name: str, known: Collection[str]) -> str:
    """Return what someone may have meant by a name that is not known."""
    close = difflib.get_close_matches(name[:_LONGEST_NAME], known, 1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def parse_table(text: str, where: str) -> Document:
    """Return the top table of a file that people write: JSON if its name ends so, else TOML."""
    text = text.removeprefix("\ufeff")  # some editors begin a file with a byte order mark
    language = "JSON" if where.lower().endswith(".json") else "TOML"
    if not text.strip():
        raise ConfigError(f"{where} is empty; docs/files.md shows what to write")
    try:
        if language == "JSON":
            top = json.loads(text, object_pairs_hook=_without_repeats)
        else:
            top = tomllib.loads(text)
    except ValueError as problem:
        reason = str(problem)[:200]
        raise ConfigError(f"{where} is not valid {language}: {reason}; correct it there") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply; write flat tables") from None
    if not isinstance(top, dict):
        raise ConfigError(f"{where} holds {quote(top)}, not an object; write {{...}}")
    return Document(top, where, is_table=True)


def _check_brackets(data: bytes, where: str, error: Callable[[str], Exception]) -> None:
    """Refuse deep or crowded brackets before the parser meets them."""
    if (num_brackets := len(data.translate(None, _NO_BRACKETS))) > _MOST_BRACKETS:
        raise error(f"{where} has {num_brackets} brackets; at most {_MOST_BRACKETS} are read")
    # Brackets within text could hide how deep the others lie.
    if _unmatched(_without_text(data).translate(_AS_SQUARE, _NO_BRACKETS)):
        raise error(f"{where} is nested more than {_DEEPEST} deep, or its brackets do not match")


def _without_text(data: bytes) -> bytes:
    """Return JSON without the content of its strings."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # then every quote begins or ends a string
    return b"".join(plain.split(b'"')[::2])


def _unmatched(brackets: bytes) -> bytes:
    for _ in range(_DEEPEST):
        brackets = brackets.replace(b"[]", b"")
    return brackets


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for key, value in pairs:
            if key in seen:
                raise ValueError(f"key {quote(key)} = {quote(value)} is set twice")
            seen.add(key)
    return values


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is not finite")
    return number


def _read_scalar(kind: type[Any], value: object) -> object:
    return kind.read(value)


def _plain_key(key: str) -> str:
    return key if is_printable_word(key) else quote(key)


@cache
def _describe(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _bare(kind: inspect.Type) -> inspect.Type:
    """Return the type without its notes and without None."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        others = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
        return _bare(others[0]) if len(others) == 1 else kind
    return kind


def _follow(kind: inspect.Type, place: Place) -> tuple[inspect.Type, Place]:
    """Return the type at a place, and the place with the names of fields for indexes into a row."""
    named: list[str | int] = []
    for step in place:
        kind = _bare(kind)
        match kind:
            case inspect.StructType() | inspect.DataclassType() | inspect.TypedDictType():
                rows = {field.encode_name: field for field in kind.fields}
                field = kind.fields[step] if isinstance(step, int) else rows[step]
                kind, step = field.type, field.encode_name
            case inspect.TupleType() if isinstance(step, int):
                kind = kind.item_types[step]
            case inspect.ListType() | inspect.VarTupleType():
                kind = kind.item_type
            case _:
                raise LookupError(step)
        named.append(step)
    return kind, tuple(named)


def _fields_of(kind: inspect.Type) -> dict[str, bool]:
    """Return the keys of a record, and whether each must be there."""
    kind = _bare(kind)
    if isinstance(kind, inspect.StructType | inspect.DataclassType | inspect.TypedDictType):
        return {field.encode_name: field.required for field in kind.fields}
    return {}


def _way_out(problem: str, kind: inspect.Type) -> str:
    if isinstance(kind, inspect.Metadata) and kind.extra_json_schema:
        return str(kind.extra_json_schema["description"])
    kind = _bare(kind)
    match kind:
        case inspect.BoolType():
            return "write true or false"
        case inspect.LiteralType():
            return f"choose one of {', '.join(map(str, kind.values))}"
        case inspect.EnumType():
            return f"choose one of {', '.join(str(each.value) for each in kind.cls)}"
        case inspect.UnionType(types=(inspect.BoolType(), inspect.LiteralType())):
            return "write true or false"
        case _:
            return problem[:1].lower() + problem[1:200].replace("`", "")
