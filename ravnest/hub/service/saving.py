"""What a hub remembers as plain data, so that one that goes on need not replay all that ever happened.

Objects go one by one into a table; what refers to one has its number, so what is shared stays shared. Only
classes of this package are made again, and no code of theirs runs. The log stays the truth: a state is of
this very code and of one place in the log, and without one that fits all of it is replayed. Driven by
hub.store.
"""

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from enum import Enum
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import MethodType
from typing import Any

import msgspec

_PACKAGE = __name__.partition(".")[0]
_SCALARS = (type(None), bool, int, float, str, bytes)
_PLAIN = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_MAPS = (dict, Counter, defaultdict)


@cache
def code_hash() -> str:
    """Return the hash of this package's code: a state means something to the code that saved it."""
    digest = blake2b(digest_size=16)
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def save_state(thing: object) -> bytes:
    """Return an object and all it refers to as msgpack; TypeError if that cannot be."""
    saver = _Saver()
    return msgspec.msgpack.encode((saver.save(thing), saver.table))


def load_state(content: bytes) -> Any:
    """Return the object again that this very code has saved."""
    root, table = msgspec.msgpack.decode(content)
    return _Loader(table).load(root)


class _Saver:
    def __init__(self) -> None:
        self.table: list[tuple[str, Any]] = []
        self._numbers: dict[int, int] = {}
        self._seen: list[object] = []  # so that no id is used twice

    def save(self, thing: Any) -> Any:
        """Return a scalar as it is, of all else the number in the table, in a list of its own."""
        if type(thing) in _SCALARS:
            return thing
        if isinstance(thing, float):  # numpy's
            return float(thing)
        if id(thing) not in self._numbers:
            number = self._numbers[id(thing)] = len(self.table)
            self._seen.append(thing)
            self.table.append(("", None))
            self.table[number] = self._describe(thing)
        return [self._numbers[id(thing)]]

    def _describe(self, thing: Any) -> tuple[str, Any]:
        kind = type(thing)
        if kind.__name__ in _PLAIN and kind.__module__ == "builtins":
            return kind.__name__, [self.save(each) for each in thing]
        if kind is deque:
            return "deque", [thing.maxlen, *map(self.save, thing)]
        if kind in _MAPS:
            factory = _name(thing.default_factory) if kind is defaultdict else None
            return kind.__name__, [factory, *([self.save(key), self.save(x)] for key, x in thing.items())]
        if kind is MethodType:
            return "method", [self.save(thing.__self__), thing.__name__]
        if isinstance(thing, Enum):
            return "enum", [_name(kind), thing.value]
        names: Iterable[str] = vars(thing) if hasattr(thing, "__dict__") else kind.__slots__
        return "object", [_name(kind), *([name, self.save(getattr(thing, name))] for name in names)]


class _Loader:
    def __init__(self, table: list[tuple[str, list[Any]]]) -> None:
        self._table = table
        self._made: dict[int, Any] = {}

    def load(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        (number,) = value
        if number not in self._made:
            self._make(number, *self._table[number])
        return self._made[number]

    def _make(self, number: int, kind: str, said: list[Any]) -> None:
        """Make an object; what may refer to itself is known before what is in it is made."""
        if kind in _PLAIN:
            self._made[number] = _PLAIN[kind](map(self.load, said))
        elif kind == "deque":
            self._made[number] = deque(map(self.load, said[1:]), said[0])
        elif kind == "method":
            self._made[number] = getattr(self.load(said[0]), said[1])
        elif kind == "enum":
            self._made[number] = _find(said[0])(said[1])
        elif kind == "object":
            made = self._made[number] = object.__new__(_find(said[0]))
            for name, value in said[1:]:
                object.__setattr__(made, name, self.load(value))
        else:
            empty: Any = (
                defaultdict(_find(said[0])) if said[0] else {"dict": dict, "Counter": Counter}[kind]()
            )
            filled = self._made[number] = empty
            for key, value in said[1:]:
                filled[self.load(key)] = self.load(value)


def _name(kind: Any) -> str:
    if kind.__module__.partition(".")[0] != _PACKAGE:
        raise TypeError(f"{kind} is no class of this package")
    return f"{kind.__module__}:{kind.__qualname__}"


def _find(name: str) -> Any:
    module, _, kind = name.partition(":")
    found = getattr(sys.modules[module], kind) if module.partition(".")[0] == _PACKAGE else None
    if not isinstance(found, type):
        raise ValueError(f"{name!r:.100} is no class of this package")
    return found
