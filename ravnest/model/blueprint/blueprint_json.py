"""Blueprints to JSON and back. The records below are the schema of a blueprint; nothing else is read.

The arguments of an operation are read by the type that the operator's schema gives each slot. The same text
means different things in different slots: 7 is a value of the program where a tensor is wanted (a number in
its place is {"number": 7}) and a number elsewhere. So nothing in a file can choose its own meaning.
"""

import json
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import astuple
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ravnest.config import FrozenFormat
from ravnest.errors import UnsafeBlueprint
from ravnest.foreign import parse_json, quote
from ravnest.model.blueprint.frozen_storage import find_storage_fault
from ravnest.model.blueprint.operators import Operator, Parameter, operators
from ravnest.model.blueprint.program import (
    FLOATING,
    LOGITS_DIMENSIONS,
    PARAMETER,
    Argument,
    Blueprint,
    Op,
    Program,
    Ratio,
    Ref,
    Size,
    StateEntry,
    TensorType,
    ValueId,
)
from ravnest.protocol.tensors import ITEM_BYTES

BLUEPRINT_FORMAT = "ravnest.blueprint/1"
MOST_OPS = 50_000
MOST_OUTS = 1_024
MOST_POSITIONS = 100_000
MOST_TENSOR_BYTES = 2**46
_MOST_DIMENSIONS = 16
_MOST_IDS = 2**31
MOST_BYTES = 16 * 2**20
MOST_LIST_ITEMS = 4_096
MOST_NUMBER = 2**48
_INT64_ENDS = (-(2**63), 2**63 - 1)  # what slicing writes for "to the end"
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_SET_BY_STAGE = ("Device", "Layout", "Generator")
_MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
_EQUATION = re.compile(r"(?=.{1,128}\Z)(?:[A-Za-z ,]|\.\.\.)+(?:->(?:[A-Za-z ]|\.\.\.)*)?")
_WORDS = {
    "approximate": ("none", "tanh"),
    "mode": ("constant", "reflect", "replicate", "circular"),
    "rounding_mode": ("trunc", "floor"),
    "padding": ("same", "valid"),
    "indexing": ("ij", "xy"),
}


def write_arguments(op: Op) -> dict[str, object]:
    """Return what an operation gives its operator, as JSON has it."""
    parameters = _parameters(op.name)
    written = {}
    for name, argument in op.arguments:
        is_number = isinstance(argument, bool | int | float | Size | Ratio)
        plain = write_argument(argument)
        written[name] = {"number": plain} if is_number and parameters[name].type == "Tensor" else plain
    return written


def write_argument(argument: Argument) -> object:
    """Return one argument, or a size of a shape, as JSON has it."""
    match argument:
        case Ref(value):
            return value
        case Size(per_sample, fixed):
            return {"batch": [per_sample, fixed]}
        case Ratio(over, under):
            return {"ratio": [over.per_sample, over.fixed, under.per_sample, under.fixed]}
        case tuple():
            return [write_argument(part) for part in argument]
        case float() if not math.isfinite(argument):
            return str(argument)
        case _:
            return argument


def read_arguments(
    operator: Operator, given: Mapping[str, object], defined: Container[ValueId]
) -> tuple[tuple[str, Argument], ...]:
    """Return what an operation gives its operator, in order; tensors must be among the `defined` values."""
    parameters = _parameters(operator.name)
    for name, parameter in parameters.items():
        if name not in given and not parameter.has_default and parameter.type not in _SET_BY_STAGE:
            _refuse(f"the argument {name!r} is missing")
    read = []
    for name, value in given.items():
        if name not in parameters:
            _refuse(f"it takes no argument {quote(name)}")
        try:
            read.append((name, _read_argument(parameters[name], value, defined)))
        except UnsafeBlueprint as problem:
            _refuse(f"argument {name!r}: {problem}")
    return tuple(read)


def read_size(value: object) -> int | Size:
    """Return a whole number that may grow with the batch."""
    if isinstance(value, dict):
        return Size(*_numbers(value, "batch", 2))
    return _whole(value, -MOST_NUMBER, MOST_NUMBER, "a size")


@cache
def _parameters(name: str) -> Mapping[str, Parameter]:
    return {parameter.name: parameter for parameter in operators()[name].parameters}


def _refuse(problem: str) -> NoReturn:
    raise UnsafeBlueprint(problem)


def _rows(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        _refuse(f"{what} is {quote(value)}; it must be a list")
    return value


def _whole(value: object, low: int, high: int, what: str) -> int:
    if type(value) is not int or not low <= value <= high:
        _refuse(f"{what} is {quote(value)}; it must be a whole number from {low} to {high}")
    return value


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        _refuse(f"{what} is {quote(value)}; it must be true or false")
    return value


def _word(value: object, words: tuple[str, ...], what: str) -> str:
    if not isinstance(value, str) or value not in words:
        _refuse(f"{what} is {quote(value)}; it must be one of {', '.join(map(repr, words))}")
    return value


def _read_argument(parameter: Parameter, value: object, defined: Container[ValueId]) -> Argument:
    if parameter.type in _SET_BY_STAGE or parameter.name == "pin_memory":
        if value is not None:
            _refuse(f"{quote(value)} must be left out; the stage sets it")
        return None
    if value is None and parameter.is_optional:
        return None
    if not parameter.is_list:
        return _read_one(parameter, value, defined)
    items = _rows(value, "the argument")
    # One item may stand for all, and none for the default: torch checks what each operator takes.
    if len(items) > MOST_LIST_ITEMS or (parameter.length and len(items) not in (0, 1, parameter.length)):
        _refuse(f"there are {len(items)} items; it takes {parameter.length or f'at most {MOST_LIST_ITEMS}'}")
    return tuple(
        None if item is None and parameter.is_item_optional else _read_one(parameter, item, defined)
        for item in items
    )


def _read_one(parameter: Parameter, value: object, defined: Container[ValueId]) -> Argument:
    if parameter.type == "Tensor":
        if isinstance(value, dict) and list(value) == ["number"] and _takes_number(parameter):
            return _read_scalar(value["number"])
        if type(value) is not int or value not in defined:
            _refuse(f"{quote(value)} is not the number of an earlier value")
        return Ref(ValueId(value))
    if parameter.type == "str":
        return _read_text(parameter.name, value)
    return _READERS[parameter.type](value)


def _takes_number(parameter: Parameter) -> bool:
    """Tell whether torch makes a tensor of a number there, as in `x * 2`."""
    return not (parameter.is_list or parameter.alias or parameter.is_written)


def _read_text(name: str, value: object) -> str:
    if name == "equation":
        if not isinstance(value, str) or not _EQUATION.fullmatch(value):
            _refuse(f"{quote(value)} is not an equation of letters, commas, dots and an arrow")
        return value
    return _word(value, _WORDS[name], "the word")


def _read_integer(value: object) -> int | Size:
    if type(value) is int and value in _INT64_ENDS:
        return value
    return read_size(value)


def _read_number(value: object) -> int | float | Size | Ratio:
    if isinstance(value, dict) and "ratio" in value:
        return _read_ratio(value)
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if isinstance(value, float):
        if not math.isfinite(value):
            _refuse("the number is not finite")
        return value
    return _read_integer(value)


def _read_scalar(value: object) -> bool | int | float | Size | Ratio:
    return value if isinstance(value, bool) else _read_number(value)


def _read_ratio(value: object) -> Ratio:
    over, more_over, under, more_under = _numbers(value, "ratio", 4)
    # At most a batch of one divides by zero, as the model itself then would.
    if under < 0 or under + more_under < 0 or (under, more_under) == (0, 0):
        _refuse(f"{quote(value)} divides by zero or less")
    return Ratio(Size(over, more_over), Size(under, more_under))


def _numbers(value: object, key: str, length: int) -> list[int]:
    if not isinstance(value, dict) or list(value) != [key]:
        _refuse(f"{quote(value)} is no number; one that grows with the batch has the key {key!r} alone")
    numbers = _rows(value[key], key)
    if len(numbers) != length:
        _refuse(f"{key} has {quote(numbers)}; it must be a list of {length}")
    return [_whole(number, -MOST_NUMBER, MOST_NUMBER, "a number") for number in numbers]


_READERS: Mapping[str, Callable[[object], Argument]] = {
    "int": _read_integer,
    "float": _read_number,
    "Scalar": _read_scalar,
    "bool": lambda value: _flag(value, "the flag"),
    "ScalarType": lambda value: _word(value, tuple(ITEM_BYTES), "the dtype"),
    "MemoryFormat": lambda value: _word(value, _MEMORY_FORMATS, "the memory format"),
}

if TYPE_CHECKING:
    _Dtype = str
else:
    _Dtype = Literal[tuple(ITEM_BYTES)]
_LETTERS = "only letters, digits, _ and the like are allowed there"
_BlueprintName = Annotated[str, Meta(pattern=r"\A[\w.:/+()@,' -]{0,128}\Z", description=_LETTERS)]
_StateName = Annotated[
    str,
    Meta(pattern=r"\A(?=.{1,256}\Z)(?!__)[A-Za-z0-9_]+(?:\.(?!__)[A-Za-z0-9_]+)*\Z", description=_LETTERS),
]
_ShortName = Annotated[str, Meta(pattern=r"\A(?!__)[A-Za-z0-9_]{1,64}\Z", description=_LETTERS)]
_Id = Annotated[int, Meta(ge=0, lt=_MOST_IDS)]
_Length = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
_Number = Annotated[int, Meta(ge=-MOST_NUMBER, le=MOST_NUMBER)]
_Position = Annotated[int, Meta(ge=0, le=MOST_POSITIONS)]
_Cut = Annotated[int, Meta(ge=0, le=MOST_OPS)]


class _SizeObject(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    batch: tuple[_Number, _Number]


class _StateRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    name: _StateName
    kind: Literal["parameter", "buffer", "constant"]
    dtype: _Dtype
    shape: tuple[_Length, ...]
    positions: tuple[_Position, ...]
    is_trainable: bool
    is_written: bool
    storage: Literal["bf16", "int8", "int4"] | UnsetType = UNSET


class _ValueRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    number: _Id
    dtype: _Dtype
    shape: list[_Length | _SizeObject]
    has_gradient: bool


class _OpRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    name: str
    arguments: dict[str, Any]  # the schema of its operator says what each must be
    outs: list[_Id | None]
    number: _Id
    precision: Literal["full", "bfloat16", "float16"] | UnsetType = UNSET


class _ProgramObject(msgspec.Struct, forbid_unknown_fields=True):
    values: list[_ValueRow]
    inputs: list[_Id]
    fields: list[tuple[_Id, _ShortName]]
    state: list[tuple[_Id, str]]
    ops: Annotated[list[_OpRow], Meta(max_length=MOST_OPS)]
    outputs: list[_Id]
    results: list[tuple[_ShortName, _Id]]
    logits: _Id | UnsetType = UNSET


class _BlueprintObject(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    name: _BlueprintName
    num_positions: Annotated[int, Meta(ge=1, le=MOST_POSITIONS)]
    start: _Position
    stop: _Position
    cuts: tuple[tuple[_Cut, _Cut], ...]
    state: list[_StateRow]
    aliases: tuple[tuple[_StateName, str], ...]
    train: _ProgramObject
    evaluate: _ProgramObject


def write_blueprint(blueprint: Blueprint) -> bytes:
    """Return the blueprint as JSON, the same bytes for equal blueprints."""
    document = {
        "format": BLUEPRINT_FORMAT,
        "name": blueprint.name,
        "num_positions": blueprint.num_positions,
        "start": blueprint.start,
        "stop": blueprint.stop,
        "cuts": blueprint.cuts,
        "state": [_write_state(entry) for entry in blueprint.state],
        "aliases": blueprint.aliases,
        "train": _write_program(blueprint.train),
        "evaluate": _write_program(blueprint.evaluate),
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _write_state(entry: StateEntry) -> tuple[object, ...]:
    """Return a row as _StateRow reads it."""
    row = astuple(entry)
    return row[:-1] if entry.storage is FrozenFormat.FP32 else row


def read_blueprint(data: bytes) -> Blueprint:
    """Return the blueprint that these bytes describe; raise UnsafeBlueprint, and nothing else, if none."""
    document = parse_json(data, "the blueprint", MOST_BYTES, UnsafeBlueprint)
    found = document.values.get("format") if isinstance(document.values, dict) else None
    if found not in (None, BLUEPRINT_FORMAT):  # one of another format has other keys
        _refuse(f"the format is {quote(found)}; this version of Ravnest reads {BLUEPRINT_FORMAT!r}")
    read = document.read_as(_BlueprintObject)
    stop = _whole(read.stop, 1, read.num_positions, "stop")
    state = tuple(_read_state(row, read.num_positions) for row in read.state)
    entries = {entry.name: entry for entry in state}
    _check_unique((entry.name for entry in state), "state")
    _check_aliases(read.aliases, entries)
    blueprint = Blueprint(
        name=read.name,
        num_positions=read.num_positions,
        start=_whole(read.start, 0, stop - 1, "start"),
        stop=stop,
        cuts=read.cuts,
        state=state,
        aliases=read.aliases,
        train=_read_program(read.train, entries, "train"),
        evaluate=_read_program(read.evaluate, entries, "evaluate"),
    )
    _check_cuts(blueprint)
    _check_ends(blueprint, blueprint.train, "train")
    _check_ends(blueprint, blueprint.evaluate, "evaluate")
    return blueprint


def _write_program(program: Program) -> dict[str, object]:
    return {
        "values": [
            [value, kind.dtype, [write_argument(size) for size in kind.shape], kind.has_gradient]
            for value, kind in sorted(program.values.items())
        ],
        "inputs": program.inputs,
        "fields": program.fields,
        "state": program.state,
        "ops": [_write_op(op) for op in program.ops],
        "outputs": program.outputs,
        "results": program.results,
        **({} if program.logits is None else {"logits": program.logits}),
    }


def _write_op(op: Op) -> list[object]:
    written: list[object] = [op.name, write_arguments(op), op.outs, op.number]
    return [*written, op.precision] if op.precision else written


def _read_state(row: _StateRow, num_positions: int) -> StateEntry:
    where = f"state {quote(row.name)}"
    plain = msgspec.structs.asdict(row)
    plain["storage"] = FrozenFormat.FP32 if row.storage is UNSET else FrozenFormat(row.storage)
    read = StateEntry(**plain)
    _check_size(TensorType(read.dtype, read.shape), where)
    if not read.positions or any(one >= other for one, other in pairwise(read.positions)):
        _refuse(f"{where} has positions {quote(read.positions)}; they must be ascending, one at least")
    _whole(read.positions[-1], 0, num_positions - 1, f"a position of {where}")
    if read.is_trainable and (read.kind != PARAMETER or read.dtype not in FLOATING):
        _refuse(f"{where} is a {read.kind} of {read.dtype}; only floating parameters are trainable")
    if fault := find_storage_fault(read):
        _refuse(f"{where} {fault}")
    return read


def _check_aliases(aliases: Iterable[tuple[str, str]], entries: Mapping[str, StateEntry]) -> None:
    for alias, name in aliases:
        if name not in entries or alias in entries:
            _refuse(f"alias {quote(alias)} of {quote(name)} does not lead from a new name to a state entry")
    _check_unique((alias for alias, _ in aliases), "aliases")


def _read_program(parts: _ProgramObject, entries: Mapping[str, StateEntry], which: str) -> Program:
    try:
        return _ProgramReader(entries).read(parts)
    except UnsafeBlueprint as problem:
        raise UnsafeBlueprint(f"{which}: {problem}") from None


class _ProgramReader:
    """Reads one program in order, so that every value exists before it is used."""

    def __init__(self, entries: Mapping[str, StateEntry]) -> None:
        self._entries = entries
        self._types: dict[ValueId, TensorType] = {}
        self._defined: set[ValueId] = set()

    def read(self, parts: _ProgramObject) -> Program:
        self._read_types(parts.values)
        program = Program(
            values=self._types,
            inputs=tuple(map(self._define, parts.inputs)),
            fields=tuple((self._define(value), name) for value, name in parts.fields),
            state=tuple(self._read_state(value, name) for value, name in parts.state),
            ops=self._read_ops(parts.ops),
            outputs=tuple(self._use(value, "outputs") for value in parts.outputs),
            results=tuple((name, self._use(value, "results")) for name, value in parts.results),
            logits=None if parts.logits is UNSET else self._read_logits(parts.logits),
        )
        _check_unique(program.outputs, "outputs")
        _check_unique((name for _, name in program.fields), "fields")
        _check_unique((name for name, _ in program.results), "results")
        for value in self._types:
            if value not in self._defined:
                _refuse(f"value {value} is described but nothing makes it")
        return program

    def _read_logits(self, value: int) -> ValueId:
        number = self._use(value, "logits")
        kind = self._types[number]
        if kind.dtype not in FLOATING or len(kind.shape) != LOGITS_DIMENSIONS:
            told = f"{kind.dtype} with {len(kind.shape)} sizes"
            _refuse(f"logits are {told}; they must be floating-point, of (rows, places, words)")
        return number

    def _read_types(self, rows: list[_ValueRow]) -> None:
        for row in rows:
            number = ValueId(row.number)
            if number in self._types:
                _refuse(f"value {number} is described twice")
            try:
                self._types[number] = _read_type(row)
            except UnsafeBlueprint as problem:
                _refuse(f"value {number}: {problem}")

    def _define(self, value: int) -> ValueId:
        number = ValueId(value)
        if number in self._defined:
            _refuse(f"value {number} is defined twice")
        if number not in self._types:
            _refuse(f"value {number} is not among 'values'")
        self._defined.add(number)
        return number

    def _use(self, value: int, where: str) -> ValueId:
        number = ValueId(value)
        if number not in self._defined:
            _refuse(f"value {number} in {where} is never defined")
        return number

    def _read_state(self, value: int, name: str) -> tuple[ValueId, str]:
        number, entry = self._define(value), self._entries.get(name)
        if entry is None:
            _refuse(f"value {number} stands for {quote(name)}, which is not in the state")
        kind = self._types[number]
        if (kind.dtype, kind.shape) != (entry.dtype, entry.shape):
            _refuse(f"value {number} differs in dtype or shape from {quote(entry.name)}, which it stands for")
        return number, entry.name

    def _read_ops(self, rows: list[_OpRow]) -> tuple[Op, ...]:
        ops = []
        for index, row in enumerate(rows):
            try:
                ops.append(self._read_op(row))
            except UnsafeBlueprint as problem:
                _refuse(f"operation {index} {problem}")
        return tuple(ops)

    def _read_op(self, row: _OpRow) -> Op:
        operator = operators().get(row.name)
        if operator is None:
            _refuse(f"{quote(row.name)} is not on the list of allowed operations")
        try:
            return Op(
                name=operator.name,
                arguments=read_arguments(operator, row.arguments, self._defined),
                outs=self._read_outs(operator, row.outs),
                number=row.number,
                precision="" if row.precision is UNSET else row.precision,
            )
        except UnsafeBlueprint as problem:
            _refuse(f"{operator.name!r}: {problem}")

    def _read_outs(self, operator: Operator, outs: list[int | None]) -> tuple[ValueId | None, ...]:
        low, high = (1, MOST_OUTS) if operator.num_returns is None else (operator.num_returns,) * 2
        if not low <= len(outs) <= high:
            expected = low if low == high else f"{low} to {high}"
            _refuse(f"there are {len(outs)} results; it must have {expected}")
        return tuple(None if out is None else self._define(out) for out in outs)


def _read_type(row: _ValueRow) -> TensorType:
    shape = tuple([size if isinstance(size, int) else Size(*size.batch) for size in row.shape])
    for size in shape:
        # One sample is the smallest batch, and more samples must not make a tensor smaller.
        if isinstance(size, Size) and (size.per_sample < 0 or size.at(1) < 0):
            _refuse(f"it has a size {quote(size)}; sizes are not negative")
    kind = TensorType(dtype=row.dtype, shape=shape, has_gradient=row.has_gradient)
    _check_size(kind, "it")
    if kind.has_gradient and kind.dtype not in FLOATING:
        _refuse(f"it is of {kind.dtype} and cannot have a gradient")
    return kind


def _check_size(kind: TensorType, where: str) -> None:
    if len(kind.shape) > _MOST_DIMENSIONS:
        _refuse(f"{where} has {len(kind.shape)} dimensions; at most {_MOST_DIMENSIONS} are allowed")
    if kind.bytes_at(1) > MOST_TENSOR_BYTES:
        _refuse(f"{where} has more than {MOST_TENSOR_BYTES} bytes per sample")


def _check_unique(names: Iterable[object], what: str) -> None:
    seen: set[object] = set()
    for name in names:
        if name in seen:
            _refuse(f"{what} has {quote(name)} twice")
        seen.add(name)


def _check_cuts(blueprint: Blueprint) -> None:
    cuts, ends = blueprint.cuts, (len(blueprint.train.ops), len(blueprint.evaluate.ops))
    if len(cuts) != blueprint.stop - blueprint.start + 1:
        _refuse(f"cuts has {len(cuts)} entries; one per position and one for the end are needed")
    if cuts[0] != (0, 0) or cuts[-1] != ends:
        _refuse(f"cuts go from {quote(cuts[0])} to {quote(cuts[-1])}; they must go from (0, 0) to {ends}")
    if any(one[0] > other[0] or one[1] > other[1] for one, other in pairwise(cuts)):
        _refuse("cuts go back; they must ascend")


def _check_ends(blueprint: Blueprint, program: Program, which: str) -> None:
    if blueprint.is_first and program.inputs:
        _refuse(f"{which}: the first stage has inputs {quote(program.inputs)}; only later stages receive any")
    if not blueprint.is_last:
        if program.results:
            _refuse(f"{which}: a stage before the last has results; only the last one has")
        return
    if program.outputs:
        _refuse(f"{which}: the last stage has outputs {quote(program.outputs)}; nothing follows it")
    losses = [program.values[value] for name, value in program.results if name == "loss"]
    if not losses:
        _refuse(f"{which}: the last stage has no result named 'loss'")
    if losses[0].shape or losses[0].dtype not in FLOATING:
        _refuse(
            f"{which}: the loss is a {losses[0].dtype} of {len(losses[0].shape)} dimensions, not one number"
        )
