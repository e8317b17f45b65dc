"""Which files a reader opens to follow one microbatch, one round and one death, by tracing a real run.

A hub and six peers train on virtual time. A call in the package is on a walk if the followed thing is in what
it takes or returns: its number or name, a record with it, bytes packed of such a record. So are its callers.
A file is passed if it has such a call, or the class of such a record. A reader of a walk stays outside net/
and plan/, which know no job: one file stands for each. Apart from that the script prints what is near: files
that calls on the walk lead to, one file further, and constructors that only keep the thing. Left out are
duties: what the same caller also calls when no such thing is about (ticks, heartbeats), unless it is handed
the same name. The transport is the one in memory.
"""

import argparse
import dataclasses
import json
import re
import sys
import typing
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import CO_VARARGS, CO_VARKEYWORDS
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# The most files that each walk passes, and with those that are near or inside net. A number may only go down:
# lower it as soon as the walk is shorter.
MOST_FILES = {"microbatch": (25, 44), "round": (19, 33), "death": (29, 59)}
# A reader of a walk stays outside these folders: what programs see of net, and of planning after a death.
DOORS = {"net": "ravnest/net/transport.py", "plan": "ravnest/plan/repair.py"}
# Folders that each walk passes through; without one of them the trace has lost its thing.
PASSES = {
    "microbatch": {"hub", "net", "peer", "engine"},
    "round": {"hub", "net", "peer", "averaging"},
    "death": {"net", "hub", "plan", "peer"},
}
# All that this script knows of the package by name. A thing has a number, in whatever parameter or field has
# one of these names or types; a dead node has its names. Samples and hashes in a record stand for it, too.
NUMBERS = {
    "microbatch": {"BatchId", "MicrobatchId"},
    "lease": {"LeaseId"},
    "round": {"RoundId"},
    "plan": {
        "PlanId",
        "BuildId",
        "plan_id",
        "build_id",
        "plan",
        "epoch",
    },  # an epoch of data is at most 1 here
    "snapshot": {"SnapshotId", "SnapshotOrder.number", "SnapshotMade.number"},
}
FOLLOWED = {
    "microbatch": {"microbatch", "lease"},
    "round": {"round"},
    "death": {"link", "node", "plan", "snapshot"},
}
STARTED, ROUND_ENDED, LEFT = "ClusterStarted", "RoundEnded", "Left"  # what people are told

PACKAGE = "ravnest"
MOST_ITEMS = 64  # of a container that are looked at
MOST_DEPTH = 4  # records within records
PACKED_BYTES = range(12, 1024)  # shorter ones are no record, longer ones are content
LEAST_SAMPLES = 8  # fewer numbers may be anything
CONTENT = re.compile("[0-9a-f]{64}")

Kinds = frozenset[str]
Pair = tuple[CodeType, CodeType]  # who calls whom
NONE: Kinds = frozenset()


@dataclass(eq=False, slots=True)
class Call:
    """A call in the package, with what passes through it and the calls that it makes."""

    number: int
    caller: "Call | None"
    code: CodeType
    module: str
    name: str
    seen: set[str] = field(default_factory=set)  # kinds of things
    carries: set[str] = field(default_factory=set)  # kinds of which it is the followed one
    records: dict[type, set[str]] = field(default_factory=dict)  # that hold it: the kinds they hold
    names: set[str] = field(default_factory=set)  # that it takes
    calls: "list[Call]" = field(default_factory=list)

    def below(self) -> Iterator["Call"]:
        """Return it and all that it led to."""
        yield self
        for call in self.calls:
            yield from call.below()


@dataclass(slots=True)
class Opened:
    """A file: its functions and records on a walk, and whether the followed thing passes or is only near."""

    names: dict[str, None] = field(default_factory=dict)
    is_passed: bool = False


@dataclass(slots=True)
class Walk:
    """The files of a walk, in the order they are met."""

    passed: dict[str, Opened]
    near: dict[str, Opened]
    inside: dict[str, Opened]  # folders that have a door

    @classmethod
    def through(cls, files: Mapping[str, Opened]) -> "Walk":
        """Sort files into those that are passed, those that are near, and those behind a door."""
        walk = cls({}, {}, {})
        for file, opened in files.items():
            door = DOORS.get(Path(file).parts[1])
            if door is None:
                (walk.passed if opened.is_passed else walk.near)[file] = opened
                continue
            walk.inside[file] = opened
            if opened.is_passed:
                walk.passed.setdefault(door, files.get(door, Opened()))
        for door in DOORS.values():
            if door in walk.passed:
                walk.inside.pop(door, None)
        return walk

    @property
    def num_files(self) -> int:
        """Return how many files there are of all kinds."""
        return len(self.passed) + len(self.near) + len(self.inside)

    def describe(self) -> dict[str, Any]:
        """Return it as people's scripts read it."""
        return {
            "files": [*self.passed],
            "count": len(self.passed),
            "near": [*self.near],
            "inside": [*self.inside],
            "total": self.num_files,
        }


class Spotter:
    """Knows the followed things, and finds them in what goes into calls and comes out of them."""

    def __init__(self) -> None:
        self.followed: dict[str, int] = {}  # numbers
        self._highest = dict.fromkeys(NUMBERS, -1)
        self._awaited: set[str] = set()
        self._stands_for: dict[object, set[str]] = {}  # names, and bytes packed of records
        self._parameters: dict[CodeType, dict[str, Kinds]] = {}
        self._fields: dict[type, tuple[tuple[str, Kinds], ...]] = {}
        for name, module in tuple(sys.modules.items()):
            for function in _functions(module) if _is_ours(name) else ():
                hints = function.__annotations__.items()
                self._parameters[function.__code__] = {each: _kinds(each, hint) for each, hint in hints}

    def await_next(self, *kinds: str) -> None:
        """Follow the next number of each kind that is higher than all before."""
        self._awaited.update(kinds)

    def follow(self, name: str, kind: str) -> None:
        """Follow a name that nothing else has."""
        self._stands_for[name] = {kind}

    def look_at_arguments(self, call: Call, frame: FrameType) -> None:
        """Find what goes into a call."""
        code, given = call.code, frame.f_locals
        has_rest = bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
        kinds = self._parameters.get(code, {})
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + has_rest]:
            if name != "self" or _is_generated(
                code
            ):  # an object holds much that a call has nothing to do with
                value = given.get(name)
                call.names |= {value} if isinstance(value, str) else set()
                self._look(call, value, kinds.get(name) or _kinds(name), MOST_DEPTH)

    def look_at_result(self, call: Call, frame: FrameType, result: object) -> None:
        """Find what comes out of a call: what is made or packed of a followed thing stands for it."""
        if _is_generated(call.code):
            result = frame.f_locals["self"]
        for each in (result if isinstance(result, tuple) else (result,)) if call.carries else ():
            if isinstance(each, bytes | memoryview) and len(each) in PACKED_BYTES:
                self._stands_for.setdefault(bytes(each), set()).update(call.carries)
        kinds = self._parameters.get(call.code, {}).get("return", NONE)
        self._look(call, result, kinds, MOST_DEPTH)

    def _look(self, call: Call, value: Any, kinds: Kinds, depth: int) -> set[str]:
        """Return the kinds of followed things that a value is or holds, noted as passing through a call."""
        found: set[str] = set()
        match value:
            case None | bool() | float():
                pass
            case int():
                found = {kind for kind in kinds if self._is_followed(call, kind, value)}
            case str():
                found = self._stands_for.get(value, found)
            case bytes() | memoryview():
                found = self._stands_for.get(bytes(value), found) if len(value) in PACKED_BYTES else found
            case tuple() if _is_samples(value):
                found = self._stands_for.get(value, found)
            case tuple() | list() | set() | frozenset() | deque() | dict():
                found = set().union(*(self._look(call, x, kinds, depth) for x in tuple(value)[:MOST_ITEMS]))
            case _:
                found = self._look_at_object(call, value, depth)
        call.seen |= found
        call.carries |= found
        return found

    def _look_at_object(self, call: Call, value: Any, depth: int) -> set[str]:
        found: set[str] = set()
        for name, kinds in self._fields_of(type(value)) if depth else ():
            found |= self._look(call, getattr(value, name, None), kinds, depth - 1)
        if found:
            call.records.setdefault(type(value), set()).update(found)
            for content in _contents(value, self._fields_of, depth):
                self._stands_for.setdefault(content, set()).update(found)
        return found

    def _is_followed(self, call: Call, kind: str, number: int) -> bool:
        call.seen.add(kind)
        if kind in self._awaited and number > self._highest[kind]:
            self._awaited.remove(kind)
            self.followed[kind] = number
        self._highest[kind] = max(number, self._highest[kind])
        return self.followed.get(kind) == number

    def _fields_of(self, kind: type) -> tuple[tuple[str, Kinds], ...]:
        """Return the fields of a record; what can change is no record, it belongs to somebody."""
        if kind not in self._fields:
            names: tuple[str, ...] = ()
            if _is_ours(kind.__module__) and dataclasses.is_dataclass(kind):
                is_record = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
                names = tuple(each.name for each in dataclasses.fields(kind)) if is_record else ()
            elif _is_ours(kind.__module__):
                names = getattr(kind, "__struct_fields__", ())
            hints = typing.get_type_hints(kind) if names else {}
            self._fields[kind] = tuple((x, _kinds(x, hints.get(x), kind.__name__)) for x in names)
        return self._fields[kind]


def _contents(value: Any, fields_of: Any, depth: int) -> Iterator[object]:
    """Return the samples and the hashes of contents that a record names."""
    if (isinstance(value, str) and CONTENT.fullmatch(value)) or _is_samples(value):
        yield value
    elif isinstance(value, tuple):
        for each in value[:MOST_ITEMS]:
            yield from _contents(each, fields_of, depth)
    elif depth:
        for name, _ in fields_of(type(value)):
            yield from _contents(getattr(value, name, None), fields_of, depth - 1)


def _is_samples(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) < LEAST_SAMPLES or not all(type(x) is int for x in value):
        return False
    return len(set(value)) == len(value)


def _kinds(name: str, hint: object = None, owner: str = "") -> Kinds:
    """Return the kinds of numbers that a parameter or field may have, by its name and its type."""
    words, hints = {name.lstrip("_"), f"{owner}.{name}"}, [hint]
    while hints:
        one = hints.pop()
        words.add(one if isinstance(one, str) else getattr(one, "__name__", ""))
        hints += typing.get_args(one)
    return frozenset(kind for kind, known in NUMBERS.items() if words & known)


def _is_generated(code: CodeType) -> bool:
    """Return whether code is a method that a dataclass has without anybody writing it."""
    return code.co_filename == "<string>"


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == PACKAGE


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    owners = [module, *(each for each in vars(module).values() if isinstance(each, type))]
    for value in [each for owner in owners for each in vars(owner).values()]:
        inner = (
            getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", None)
        )
        if isinstance(inner or value, FunctionType):
            yield inner or value


class Tracer:
    """Keeps the turns of the event loop in which something followed passes, and finds the walks in them."""

    def __init__(self, spotter: Spotter) -> None:
        self._spotter = spotter
        self._open: list[tuple[FrameType, Call]] = []
        self._num_calls = 0
        self._turns: dict[str, list[tuple[Call, set[str]]]] = {walk: [] for walk in FOLLOWED}
        self._duties: dict[str, set[Pair]] = {walk: set() for walk in FOLLOWED}
        self.is_dead = False  # the node whose death is followed
        self.has_left = False  # and the hub knows it; what was sent to it before is no part of its death
        self.fault: Exception | None = None

    def __call__(self, frame: FrameType, event: str, given: object) -> None:
        """See sys.setprofile."""
        try:
            if event == "call" and _is_ours(frame.f_globals.get("__name__", "")):
                self._enter(frame)
            elif event == "return" and self._open and self._open[-1][0] is frame:
                _, call = self._open.pop()
                self._spotter.look_at_result(call, frame, given)
                if call.caller is None:
                    self._end_turn(call)
        except Exception as error:  # which asyncio might only log
            self.fault = self.fault or error
            sys.setprofile(None)

    def _enter(self, frame: FrameType) -> None:
        code, name = frame.f_code, frame.f_code.co_qualname.replace(".<locals>", "")
        if _is_generated(code):
            if code.co_name != "__init__":
                return
            name = type(frame.f_locals["self"]).__qualname__
        self._num_calls += 1
        caller = self._open[-1][1] if self._open else None
        call = Call(self._num_calls, caller, code, frame.f_globals["__name__"], name)
        if caller is not None:
            caller.calls.append(call)
        self._open.append((frame, call))
        self._spotter.look_at_arguments(call, frame)

    def _end_turn(self, first: Call) -> None:
        calls = tuple(first.below())
        for walk, kinds in FOLLOWED.items():
            is_about = self.is_dead if walk == "death" else any(call.seen & kinds for call in calls)
            if not is_about:
                self._duties[walk].update((call.caller.code, call.code) for call in calls if call.caller)
            counted = kinds if self.has_left else kinds - {"node"}
            if self.has_left and walk != "death":
                continue  # their things have had their lives by then
            if not all(call.carries.isdisjoint(counted) for call in calls):
                self._turns[walk].append((first, counted))

    def find(self, walk: str) -> dict[str, Opened]:
        """Return the files of a walk, in the order they are met."""
        marked: dict[Call, bool] = {}
        for turn, kinds in self._turns[walk]:
            self._mark(turn, kinds, self._duties[walk], -1, marked)
        files: dict[str, Opened] = {}
        for call in sorted(marked, key=lambda call: call.number):
            opened = files.setdefault(_file(call.module), Opened())
            opened.names[call.name] = None
            opened.is_passed |= marked[call]
            for record, kinds in call.records.items():
                if not kinds & FOLLOWED[walk]:
                    continue
                opened = files.setdefault(_file(record.__module__), Opened())
                opened.names[record.__qualname__] = None
                opened.is_passed = True
        return files

    def _mark(
        self, call: Call, kinds: set[str], duties: set[Pair], further: int, marked: dict[Call, bool]
    ) -> None:
        """Mark the calls on a walk, true where its thing passes; `further`: files that may be opened yet."""
        is_kept = call.code.co_name == "__init__" and not _is_generated(call.code)  # by what it makes
        if call.carries & kinds and is_kept:
            marked.setdefault(call, False)
            further = 0
        elif call.carries & kinds:
            further = 1
            caller: Call | None = call
            while caller is not None and not marked.get(caller):
                marked[caller] = True
                caller = caller.caller
        elif further >= 0:
            marked.setdefault(call, False)
        for each in call.calls:
            left = further - (each.module != call.module)
            is_duty = (call.code, each.code) in duties and call.names.isdisjoint(each.names)
            is_apart = is_duty or each.code.co_name in ("__init__", "<module>")
            self._mark(each, kinds, duties, -1 if is_apart else left, marked)


def _file(module: str) -> str:
    return Path(sys.modules[module].__file__ or "").relative_to(ROOT).as_posix()


def trace() -> dict[str, Walk]:
    """Train until a cluster that lost a node trains again; return the walks of what was followed."""
    sys.path.insert(0, str(ROOT))
    import torch

    from tests.support.memory_store import MemoryStore
    from tests.support.system_world import Pc, World, make_job

    torch.set_num_threads(1)
    spotter = Spotter()
    tracer = Tracer(spotter)
    told = {STARTED: 0, ROUND_ENDED: 0, LEFT: 0}
    victims: list[Any] = []

    def hear(world: World, notice: Any) -> None:
        kind = type(notice).__name__
        told[kind] = told.get(kind, 0) + 1
        if kind == STARTED and not victims:
            victims.append(notice.nodes[0])
            sys.setprofile(tracer)
        elif kind == STARTED and tracer.has_left:
            sys.setprofile(None)
        elif kind == ROUND_ENDED and told[kind] == 1:
            spotter.await_next("microbatch", "lease", "round")
        elif kind == ROUND_ENDED and told[kind] == 3:
            world.kill(victims[0], is_silent=True)
            tracer.is_dead = True
            spotter.follow(world.peer(victims[0]), "link")
            spotter.follow(victims[0], "node")
            spotter.await_next("plan", "snapshot")
        elif kind == LEFT:
            tracer.has_left = True

    job = make_job("mlp", num_samples=1024, epochs=1, validates=False)
    # So slow that little else happens before the hub misses one. A cluster of three, one of two, and a spare.
    pcs = [*[Pc(100e3, 0.1)] * 3, *[Pc(150e3, 0.1)] * 2, Pc(5.8e3, 0.05)]
    World(job, pcs, hear=hear, store=MemoryStore()).run()
    sys.setprofile(None)
    if tracer.fault is not None:
        raise tracer.fault
    if unseen := NUMBERS.keys() - spotter.followed.keys():
        raise SystemExit(f"the run has shown no new {', '.join(sorted(unseen))}: see NUMBERS in {__file__}")
    return {walk: Walk.through(tracer.find(walk)) for walk in FOLLOWED}


def find_faults(walks: Mapping[str, Walk], most: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return what is wrong with walks."""
    faults = []
    for name, walk in walks.items():
        counts = (len(walk.passed), walk.num_files)
        for count, limit, what in zip(counts, most[name], ("passes", "has in all"), strict=True):
            if count > limit:
                faults.append(f"one {name} {what} {count} files, more than {limit}: which is one too many?")
        if missing := PASSES[name] - {Path(file).parts[1] for file in walk.passed}:
            faults.append(f"one {name} is not seen in {', '.join(sorted(missing))}: the trace has lost it")
    return faults


def show(name: str, walk: Walk) -> str:
    """Return a walk as text to read along."""
    lines = [
        f"One {name} passes {len(walk.passed)} files; {len(walk.near)} more are near it (+), "
        f"{len(walk.inside)} inside net or plan (.)"
    ]
    kinds = ((" ", walk.passed), ("+", walk.near), (".", walk.inside))
    opened = ((mark, file, each) for mark, files in kinds for file, each in files.items())
    for number, (mark, file, each) in enumerate(opened, 1):
        names = ", ".join(name for name in each.names if "<" not in name)
        lines.append(f"{number:3}{mark} {file}: {names}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print only the files of each walk, and how many")
    is_json = parser.parse_args().json
    walks = trace()
    if is_json:
        print(json.dumps({name: walk.describe() for name, walk in walks.items()}))
    else:
        print("\n\n".join(show(name, walk) for name, walk in walks.items()))
    faults = find_faults(walks, MOST_FILES)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
