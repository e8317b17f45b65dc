"""Arguments of operations, to JSON and back, by the type the operator's schema gives each slot.

The same text means different things in different slots: 7 is a value of the program where a tensor is wanted
(a number in its place is {"number": 7}) and a number elsewhere. So nothing in a file can choose its own
meaning.
"""

import json
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cache
from itertools import pairwise

from ravnest.errors import UnsafeBlueprint
from ravnest.model.blueprint import (
    BUFFER,
    CONSTANT,
    FLOATING,
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
from ravnest.model.operators import Operator, Parameter, operators
from ravnest.model.strict_json import flag, identifier, parse, refuse, row, rows, show, table, whole, word
from ravnest.protocol.tensors import ITEM_BYTES

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
    operator: Operator, given: object, defined: Container[ValueId]
) -> tuple[tuple[str, Argument], ...]:
    """Return what an operation gives its operator, in order; tensors must be among the `defined` values."""
    if not isinstance(given, dict):
        refuse(f"its arguments are {show(given)}; they must be an object")
    parameters = _parameters(operator.name)
    for name, parameter in parameters.items():
        if name not in given and not parameter.has_default and parameter.type not in _SET_BY_STAGE:
            refuse(f"the argument {name!r} is missing")
    read = []
    for name, value in given.items():
        if name not in parameters:
            refuse(f"it takes no argument {show(name)}")
        try:
            read.append((name, _read_argument(parameters[name], value, defined)))
        except UnsafeBlueprint as problem:
            refuse(f"argument {name!r}: {problem}")
    return tuple(read)


def read_size(value: object) -> int | Size:
    """Return a whole number that may grow with the batch."""
    if isinstance(value, dict):
        return Size(*_numbers(value, "batch", 2))
    return whole(value, -MOST_NUMBER, MOST_NUMBER, "a size")


@cache
def _parameters(name: str) -> Mapping[str, Parameter]:
    return {parameter.name: parameter for parameter in operators()[name].parameters}


def _read_argument(parameter: Parameter, value: object, defined: Container[ValueId]) -> Argument:
    if parameter.type in _SET_BY_STAGE or parameter.name == "pin_memory":
        if value is not None:
            refuse(f"{show(value)} must be left out; the stage sets it")
        return None
    if value is None and parameter.is_optional:
        return None
    if not parameter.is_list:
        return _read_one(parameter, value, defined)
    items = rows(value, "the argument")
    # One item may stand for all, and none for the default: torch checks what each operator takes.
    if len(items) > MOST_LIST_ITEMS or (parameter.length and len(items) not in (0, 1, parameter.length)):
        refuse(f"there are {len(items)} items; it takes {parameter.length or f'at most {MOST_LIST_ITEMS}'}")
    return tuple(
        None if item is None and parameter.is_item_optional else _read_one(parameter, item, defined)
        for item in items
    )


def _read_one(parameter: Parameter, value: object, defined: Container[ValueId]) -> Argument:
    if parameter.type == "Tensor":
        if isinstance(value, dict) and list(value) == ["number"] and _takes_number(parameter):
            return _read_scalar(value["number"])
        if type(value) is not int or value not in defined:
            refuse(f"{show(value)} is not the number of an earlier value")
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
            refuse(f"{show(value)} is not an equation of letters, commas, dots and an arrow")
        return value
    return word(value, _WORDS[name], "the word")


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
            refuse("the number is too large")
        return value
    return _read_integer(value)


def _read_scalar(value: object) -> bool | int | float | Size | Ratio:
    return value if isinstance(value, bool) else _read_number(value)


def _read_ratio(value: object) -> Ratio:
    over, more_over, under, more_under = _numbers(value, "ratio", 4)
    # At most a batch of one divides by zero, as the model itself then would.
    if under < 0 or under + more_under < 0 or (under, more_under) == (0, 0):
        refuse(f"{show(value)} divides by zero or less")
    return Ratio(Size(over, more_over), Size(under, more_under))


def _numbers(value: object, key: str, length: int) -> list[int]:
    if not isinstance(value, dict) or list(value) != [key]:
        refuse(f"{show(value)} is no number; one that grows with the batch has the key {key!r} alone")
    numbers = row(value[key], length, key)
    return [whole(number, -MOST_NUMBER, MOST_NUMBER, "a number") for number in numbers]


_READERS: Mapping[str, Callable[[object], Argument]] = {
    "int": _read_integer,
    "float": _read_number,
    "Scalar": _read_scalar,
    "bool": lambda value: flag(value, "the flag"),
    "ScalarType": lambda value: word(value, tuple(ITEM_BYTES), "the dtype"),
    "MemoryFormat": lambda value: word(value, _MEMORY_FORMATS, "the memory format"),
}

BLUEPRINT_FORMAT = "ravnest.blueprint/1"
MOST_OPS = 50_000
MOST_OUTS = 1_024
MOST_POSITIONS = 100_000
MOST_TENSOR_BYTES = 2**46
_MOST_DIMENSIONS = 16
_MOST_IDS = 2**31

_KEYS = ("format", "name", "num_positions", "start", "stop", "cuts", "state", "aliases", "train", "evaluate")
_PROGRAM_KEYS = ("values", "inputs", "fields", "state", "ops", "outputs", "results")
_BLUEPRINT_NAME = re.compile(r"[\w.:/+()@,' -]{0,128}")
_STATE_NAME = re.compile(r"(?=.{1,256}\Z)(?!__)[A-Za-z0-9_]+(?:\.(?!__)[A-Za-z0-9_]+)*")
_SHORT_NAME = re.compile(r"(?!__)[A-Za-z0-9_]{1,64}")
_DTYPES = tuple(ITEM_BYTES)
_PRECISIONS = ("full", "bfloat16", "float16")


def write_blueprint(blueprint: Blueprint) -> bytes:
    """Return the blueprint as JSON, the same bytes for equal blueprints."""
    state = [
        [
            entry.name,
            entry.kind,
            entry.dtype,
            entry.shape,
            entry.positions,
            entry.is_trainable,
            entry.is_written,
        ]
        for entry in blueprint.state
    ]
    document = {
        "format": BLUEPRINT_FORMAT,
        "name": blueprint.name,
        "num_positions": blueprint.num_positions,
        "start": blueprint.start,
        "stop": blueprint.stop,
        "cuts": blueprint.cuts,
        "state": state,
        "aliases": blueprint.aliases,
        "train": _write_program(blueprint.train),
        "evaluate": _write_program(blueprint.evaluate),
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def read_blueprint(data: bytes) -> Blueprint:
    """Return the blueprint that these bytes describe; raise UnsafeBlueprint, and nothing else, if none."""
    document = table(parse(data), _KEYS, "the blueprint")
    if document["format"] != BLUEPRINT_FORMAT:
        refuse(
            f"the format is {show(document['format'])}; this version of Ravnest reads {BLUEPRINT_FORMAT!r}"
        )
    num_positions = whole(document["num_positions"], 1, MOST_POSITIONS, "num_positions")
    stop = whole(document["stop"], 1, num_positions, "stop")
    state = tuple(_read_state(entry, num_positions) for entry in rows(document["state"], "state"))
    entries = {entry.name: entry for entry in state}
    _check_unique((entry.name for entry in state), "state")
    blueprint = Blueprint(
        name=identifier(document["name"], _BLUEPRINT_NAME, "the blueprint"),
        num_positions=num_positions,
        start=whole(document["start"], 0, stop - 1, "start"),
        stop=stop,
        cuts=tuple(_read_cut(cut) for cut in rows(document["cuts"], "cuts")),
        state=state,
        aliases=_read_aliases(document["aliases"], entries),
        train=_read_program(document["train"], entries, "train"),
        evaluate=_read_program(document["evaluate"], entries, "evaluate"),
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
    }


def _write_op(op: Op) -> list[object]:
    written: list[object] = [op.name, write_arguments(op), op.outs, op.number]
    return [*written, op.precision] if op.precision else written


def _read_state(entry: object, num_positions: int) -> StateEntry:
    name, kind, dtype, shape, positions, is_trainable, is_written = row(entry, 7, "state")
    called = identifier(name, _STATE_NAME, "a state entry")
    where = f"state {show(called)}"
    read = StateEntry(
        name=called,
        kind=word(kind, (PARAMETER, BUFFER, CONSTANT), f"the kind of {where}"),
        dtype=word(dtype, _DTYPES, f"the dtype of {where}"),
        shape=tuple(whole(size, 0, MOST_NUMBER, f"a size of {where}") for size in rows(shape, where)),
        positions=tuple(
            whole(position, 0, num_positions - 1, f"a position of {where}")
            for position in rows(positions, f"positions of {where}")
        ),
        is_trainable=flag(is_trainable, f"is_trainable of {where}"),
        is_written=flag(is_written, f"is_written of {where}"),
    )
    _check_size(TensorType(read.dtype, read.shape), where)
    if not read.positions or any(one >= other for one, other in pairwise(read.positions)):
        refuse(f"{where} has positions {show(positions)}; they must be ascending, one at least")
    if read.is_trainable and (read.kind != PARAMETER or read.dtype not in FLOATING):
        refuse(f"{where} is a {read.kind} of {read.dtype}; only floating parameters are trainable")
    return read


def _read_cut(cut: object) -> tuple[int, int]:
    train, evaluate = row(cut, 2, "cuts")
    return whole(train, 0, MOST_OPS, "a cut"), whole(evaluate, 0, MOST_OPS, "a cut")


def _read_aliases(listed: object, entries: Mapping[str, StateEntry]) -> tuple[tuple[str, str], ...]:
    aliases = []
    for pair in rows(listed, "aliases"):
        alias, name = row(pair, 2, "aliases")
        alias = identifier(alias, _STATE_NAME, "an alias")
        if not isinstance(name, str) or name not in entries or alias in entries:
            refuse(f"alias {show(alias)} of {show(name)} does not lead from a new name to a state entry")
        aliases.append((alias, name))
    _check_unique((alias for alias, _ in aliases), "aliases")
    return tuple(aliases)


def _read_program(document: object, entries: Mapping[str, StateEntry], which: str) -> Program:
    try:
        return _ProgramReader(entries).read(document)
    except UnsafeBlueprint as problem:
        raise UnsafeBlueprint(f"{which}: {problem}") from None


class _ProgramReader:
    """Reads one program in order, so that every value exists before it is used."""

    def __init__(self, entries: Mapping[str, StateEntry]) -> None:
        self._entries = entries
        self._types: dict[ValueId, TensorType] = {}
        self._defined: set[ValueId] = set()

    def read(self, document: object) -> Program:
        parts = table(document, _PROGRAM_KEYS, "the program")
        self._read_types(parts["values"])
        program = Program(
            values=self._types,
            inputs=tuple(self._define(value) for value in rows(parts["inputs"], "inputs")),
            fields=tuple(self._read_field(pair) for pair in rows(parts["fields"], "fields")),
            state=tuple(self._read_state(pair) for pair in rows(parts["state"], "state")),
            ops=self._read_ops(rows(parts["ops"], "ops")),
            outputs=tuple(self._use(value, "outputs") for value in rows(parts["outputs"], "outputs")),
            results=tuple(self._read_result(pair) for pair in rows(parts["results"], "results")),
        )
        _check_unique(program.outputs, "outputs")
        _check_unique((name for _, name in program.fields), "fields")
        _check_unique((name for name, _ in program.results), "results")
        for value in self._types:
            if value not in self._defined:
                refuse(f"value {value} is described but nothing makes it")
        return program

    def _read_types(self, listed: object) -> None:
        for entry in rows(listed, "values"):
            value, *kind = row(entry, 4, "values")
            number = ValueId(whole(value, 0, _MOST_IDS - 1, "the number of a value"))
            if number in self._types:
                refuse(f"value {number} is described twice")
            try:
                self._types[number] = _read_type(*kind)
            except UnsafeBlueprint as problem:
                refuse(f"value {number}: {problem}")

    def _define(self, value: object) -> ValueId:
        number = ValueId(whole(value, 0, _MOST_IDS - 1, "the number of a value"))
        if number in self._defined:
            refuse(f"value {number} is defined twice")
        if number not in self._types:
            refuse(f"value {number} is not among 'values'")
        self._defined.add(number)
        return number

    def _use(self, value: object, where: str) -> ValueId:
        number = ValueId(whole(value, 0, _MOST_IDS - 1, "the number of a value"))
        if number not in self._defined:
            refuse(f"value {number} in {where} is never defined")
        return number

    def _read_field(self, pair: object) -> tuple[ValueId, str]:
        value, name = row(pair, 2, "fields")
        return self._define(value), identifier(name, _SHORT_NAME, "a field")

    def _read_state(self, pair: object) -> tuple[ValueId, str]:
        value, name = row(pair, 2, "state")
        number = self._define(value)
        entry = self._entries.get(name) if isinstance(name, str) else None
        if entry is None:
            refuse(f"value {number} stands for {show(name)}, which is not in the state")
        kind = self._types[number]
        if (kind.dtype, kind.shape) != (entry.dtype, entry.shape):
            refuse(f"value {number} differs in dtype or shape from {show(entry.name)}, which it stands for")
        return number, entry.name

    def _read_result(self, pair: object) -> tuple[str, ValueId]:
        name, value = row(pair, 2, "results")
        return identifier(name, _SHORT_NAME, "a result"), self._use(value, "results")

    def _read_ops(self, listed: list[object]) -> tuple[Op, ...]:
        if len(listed) > MOST_OPS:
            refuse(f"the program has {len(listed)} operations; at most {MOST_OPS} are read")
        ops = []
        for index, entry in enumerate(listed):
            try:
                ops.append(self._read_op(entry))
            except UnsafeBlueprint as problem:
                refuse(f"operation {index} {problem}")
        return tuple(ops)

    def _read_op(self, entry: object) -> Op:
        if not isinstance(entry, list) or len(entry) not in (4, 5):
            refuse(f"is {show(entry)}; it must be a list of name, arguments, results and number")
        name, given, outs, number = entry[:4]
        operator = operators().get(name) if isinstance(name, str) else None
        if operator is None:
            refuse(f"{show(name)} is not on the list of allowed operations")
        try:
            return Op(
                name=operator.name,
                arguments=read_arguments(operator, given, self._defined),
                outs=self._read_outs(operator, outs),
                number=whole(number, 0, _MOST_IDS - 1, "its number"),
                precision=word(entry[4], _PRECISIONS, "its precision") if len(entry) == 5 else "",
            )
        except UnsafeBlueprint as problem:
            refuse(f"{operator.name!r}: {problem}")

    def _read_outs(self, operator: Operator, listed: object) -> tuple[ValueId | None, ...]:
        outs = rows(listed, "the list of results")
        low, high = (1, MOST_OUTS) if operator.num_returns is None else (operator.num_returns,) * 2
        if not low <= len(outs) <= high:
            expected = low if low == high else f"{low} to {high}"
            refuse(f"there are {len(outs)} results; it must have {expected}")
        return tuple(None if out is None else self._define(out) for out in outs)


def _read_type(dtype: object, shape: object, has_gradient: object) -> TensorType:
    kind = TensorType(
        dtype=word(dtype, _DTYPES, "its dtype"),
        shape=tuple([_read_dimension(size) for size in rows(shape, "its shape")]),
        has_gradient=flag(has_gradient, "has_gradient"),
    )
    _check_size(kind, "it")
    if kind.has_gradient and kind.dtype not in FLOATING:
        refuse(f"it is of {kind.dtype} and cannot have a gradient")
    return kind


def _read_dimension(size: object) -> int | Size:
    read = read_size(size)
    # One sample is the smallest batch, and more samples must not make a tensor smaller.
    smallest = read.at(1) if isinstance(read, Size) else read
    if smallest < 0 or (isinstance(read, Size) and read.per_sample < 0):
        refuse(f"it has a size {show(size)}; sizes are not negative")
    return read


def _check_size(kind: TensorType, where: str) -> None:
    if len(kind.shape) > _MOST_DIMENSIONS:
        refuse(f"{where} has {len(kind.shape)} dimensions; at most {_MOST_DIMENSIONS} are allowed")
    if kind.bytes_at(1) > MOST_TENSOR_BYTES:
        refuse(f"{where} has more than {MOST_TENSOR_BYTES} bytes per sample")


def _check_unique(names: Iterable[object], what: str) -> None:
    seen: set[object] = set()
    for name in names:
        if name in seen:
            refuse(f"{what} has {show(name)} twice")
        seen.add(name)


def _check_cuts(blueprint: Blueprint) -> None:
    cuts, ends = blueprint.cuts, (len(blueprint.train.ops), len(blueprint.evaluate.ops))
    if len(cuts) != blueprint.stop - blueprint.start + 1:
        refuse(f"cuts has {len(cuts)} entries; one per position and one for the end are needed")
    if cuts[0] != (0, 0) or cuts[-1] != ends:
        refuse(f"cuts go from {show(cuts[0])} to {show(cuts[-1])}; they must go from (0, 0) to {ends}")
    if any(one[0] > other[0] or one[1] > other[1] for one, other in pairwise(cuts)):
        refuse("cuts go back; they must ascend")


def _check_ends(blueprint: Blueprint, program: Program, which: str) -> None:
    if blueprint.is_first and program.inputs:
        refuse(f"{which}: the first stage has inputs {show(program.inputs)}; only later stages receive any")
    if not blueprint.is_last:
        if program.results:
            refuse(f"{which}: a stage before the last has results; only the last one has")
        return
    if program.outputs:
        refuse(f"{which}: the last stage has outputs {show(program.outputs)}; nothing follows it")
    losses = [program.values[value] for name, value in program.results if name == "loss"]
    if not losses:
        refuse(f"{which}: the last stage has no result named 'loss'")
    if losses[0].shape or losses[0].dtype not in FLOATING:
        refuse(
            f"{which}: the loss is a {losses[0].dtype} of {len(losses[0].shape)} dimensions, not one number"
        )
