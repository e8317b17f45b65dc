"""Arguments of operations, to JSON and back, by the type the operator's schema gives each slot.

The same text means different things in different slots: 7 is a value of the program where a tensor is wanted
(a number in its place is {"number": 7}) and a number elsewhere. So nothing in a file can choose its own
meaning. Driven by `reading`.
"""

import math
import re
from collections.abc import Callable, Container, Mapping
from functools import cache

from ravnest.errors import UnsafeBlueprint
from ravnest.model.blueprint import Argument, Op, Ratio, Ref, Size, ValueId
from ravnest.model.operators import Operator, Parameter, operators
from ravnest.model.parsing import flag, refuse, row, rows, show, whole, word
from ravnest.protocol import ITEM_BYTES

MOST_ITEMS = 4_096
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
            read.append((name, _read(parameters[name], value, defined)))
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


def _read(parameter: Parameter, value: object, defined: Container[ValueId]) -> Argument:
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
    if len(items) > MOST_ITEMS or (parameter.length and len(items) not in (0, 1, parameter.length)):
        refuse(f"there are {len(items)} items; it takes {parameter.length or f'at most {MOST_ITEMS}'}")
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
