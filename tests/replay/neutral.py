"""Records as neutral data and back: `{"type": class, field: value, ...}` in the words of the recordings.

Tuples and lists become lists, enums their values, bytes `{"bytes": hex}`, numpy's numbers plain ones. Floats
are exact. The way back follows the type hints of the records.
"""

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from types import GenericAlias, NoneType, UnionType
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
from replay.names import Names

_PLAIN = (bool, int, float, NoneType)
_Write = Callable[[Any], Any]
_Read = Callable[[Any], Any]


def canonical(data: Any) -> str:
    """Return neutral data as the one text that stands for it."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def find_records(*hints: Any) -> dict[str, type]:
    """Return all records and enums that can be reached from these types, by name."""
    found: dict[str, type] = {}
    seen: set[Any] = set()
    waiting = list(hints)
    while waiting:
        hint = _plain_hint(waiting.pop())
        if hint in seen:
            continue
        seen.add(hint)
        waiting += get_args(hint)
        kind = get_origin(hint) or hint
        if _is_record(kind):
            waiting += get_type_hints(kind).values()
        if _is_record(kind) or _is_enum(kind):
            assert found.setdefault(kind.__name__, kind) is kind, f"two records are called {kind.__name__}"
    return found


def _plain_hint(hint: Any) -> Any:
    while isinstance(hint, NewType):
        hint = hint.__supertype__
    return hint


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or is_typeddict(kind))


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and not isinstance(kind, GenericAlias) and issubclass(kind, Enum)


class Codec:
    """Writes and reads the records that can be reached from some types."""

    def __init__(self, names: Names, *roots: Any) -> None:
        self._names = names
        self._kinds = find_records(*roots)
        self._writers: dict[type, _Write] = {}
        self._readers: dict[str, _Read] = {}

    def write(self, value: Any) -> Any:
        """Return a value of the code as neutral data."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is str:
            return self._names.recorded_text(value)
        if kind is tuple or kind is list:
            return [self.write(each) for each in value]
        if kind not in self._writers:
            self._writers[kind] = self._find_writer(kind)
        return self._writers[kind](value)

    def read(self, data: Any) -> Any:
        """Return the record that neutral data stands for."""
        recorded = data["type"]
        if recorded not in self._readers:
            self._readers[recorded] = self._record_reader(recorded)
        return self._readers[recorded](data)

    def _find_writer(self, kind: type) -> _Write:
        if is_dataclass(kind):
            return self._record_writer(kind, getattr)
        if issubclass(kind, Enum):
            owner = self._names.recorded_class(kind.__name__)
            return lambda member: self._names.recorded_value(owner, member.value)
        if issubclass(kind, bytes):
            return lambda content: {"bytes": content.hex()}
        if issubclass(kind, np.generic):
            return lambda number: number.item()
        if issubclass(kind, set | frozenset):
            return self._write_unordered
        if issubclass(kind, dict):
            return lambda pairs: [[self.write(key), self.write(value)] for key, value in pairs.items()]
        raise TypeError(f"{kind} cannot be neutral data")

    def _record_writer(self, kind: type, get: Callable[[Any, str], Any]) -> _Write:
        owner = self._names.recorded_class(kind.__name__)
        rows, added = [], []
        for present, hint in self._hints(kind).items():
            if (owner, present) in self._names.added:
                added.append((present, self._names.added[owner, present]))
                continue
            recorded = self._names.recorded_field(owner, present)
            assert recorded != "type", f"{owner} has a field that is called as all records' type"
            write_field = self._hinted_writer(hint)
            if (owner, recorded) in self._names.unordered:
                write_field = self._write_unordered
            rows.append((recorded, present, write_field))

        def write(record: Any) -> Any:
            data = {recorded: write_field(get(record, present)) for recorded, present, write_field in rows}
            other = {
                present: get(record, present) for present, usual in added if get(record, present) != usual
            }
            return {"type": owner, **data, **{present: self.write(value) for present, value in other.items()}}

        return write

    def _write_unordered(self, values: Any) -> Any:
        return sorted(map(self.write, values), key=canonical)

    def _hinted_writer(self, hint: Any) -> _Write:
        """Return what writes a field: a dict with names for keys is a record like any other."""
        options = [_plain_hint(each) for each in (hint, *get_args(hint))]
        kind = next((each for each in options if is_typeddict(each)), None)
        if kind is None:
            return self.write
        write = self._record_writer(kind, dict.__getitem__)
        return lambda value: None if value is None else write(value)

    @staticmethod
    def _hints(kind: type) -> dict[str, Any]:
        hints = get_type_hints(kind)
        return {each.name: hints[each.name] for each in fields(kind)} if is_dataclass(kind) else hints

    def _record_reader(self, recorded: str) -> _Read:
        present = self._names.present_class(recorded)
        assert present in self._kinds, f"no record is called {present}; name the one that was {recorded}"
        kind, names = self._kinds[present], self._names
        readers = {each: self._find_reader(hint) for each, hint in self._hints(kind).items()}
        usual = {each: value for (owner, each), value in names.added.items() if owner == recorded}

        def read(data: Any) -> Any:
            values = dict(usual)
            for each, value in data.items():
                if each != "type":
                    name = names.present_field(recorded, each)
                    assert name in readers, f"{present} has no field {name}; name the one that was {each}"
                    values[name] = readers[name](value)
            return kind(**values)

        return read

    def _find_reader(self, hint: Any) -> _Read:
        hint = _plain_hint(hint)
        kind = get_origin(hint) or hint
        if kind in (Union, UnionType):
            return self._union_reader([_plain_hint(each) for each in get_args(hint)])
        if _is_record(kind):
            return self.read
        if kind in (tuple, list, set, frozenset, dict):
            return self._collection_reader(kind, get_args(hint))
        if _is_enum(kind):
            owner = self._names.recorded_class(kind.__name__)
            return lambda value: kind(self._names.present_value(owner, value))
        if kind is bytes:
            return lambda data: bytes.fromhex(data["bytes"])
        if kind is float:
            return float
        if isinstance(kind, TypeVar) or kind in (int, str, bool, NoneType):
            return lambda value: self.read(value) if isinstance(value, dict) else value
        raise TypeError(f"{hint} cannot be read from neutral data")

    def _union_reader(self, hints: list[Any]) -> _Read:
        """Return what reads records by their type, and whatever else there is in one way."""
        others = [x for x in hints if x is not NoneType and not _is_record(get_origin(x) or x)]
        assert len(others) <= 1, f"which of {others} is meant cannot be seen from neutral data"
        read_other = self._find_reader(others[0]) if others else None

        def read(value: Any) -> Any:
            if value is None:
                return None
            is_record = isinstance(value, dict) and "type" in value
            return self.read(value) if is_record or read_other is None else read_other(value)

        return read

    def _collection_reader(self, kind: type, hints: tuple[Any, ...]) -> _Read:
        if kind is dict:
            read_key, read_value = map(self._find_reader, hints)
            return lambda pairs: {read_key(key): read_value(value) for key, value in pairs}
        if kind is tuple and not (len(hints) == 2 and hints[1] is ...):
            readers = [self._find_reader(each) for each in hints]
            return lambda row: tuple(read(each) for read, each in zip(readers, row, strict=True))
        read_each = self._find_reader(hints[0])
        return lambda values: kind(read_each(each) for each in values)
