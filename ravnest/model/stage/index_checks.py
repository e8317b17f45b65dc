"""Index checks: numbers of the data that are used as an index are checked before a GPU meets them.

A CPU raises when a label or a token is out of range, and goes on. A GPU stops for good, and its peer with it.
Only what is computed from the batch alone is checked: no weights, so that nothing waits for a long queue.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ravnest.model.blueprint.program import FLOATING, Argument, Op, Program, Ref, ValueId

_IGNORED = -100  # as torch's losses have it if nothing else is said


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """An index must be in [first, stop), or be the number that a loss ignores."""

    index: ValueId
    first: int
    stop: int
    ignored: int | None
    what: str


def find_checks(program: Program) -> dict[int, list[IndexCheck]]:
    """Return what to check before operations, by their place in the program."""
    of_data = {value for value, _ in program.fields}
    of_data |= {value for value in program.inputs if program.values[value].dtype not in FLOATING}
    with_weights = {value for value, _ in program.state}
    with_weights |= set(program.inputs) - of_data
    found: dict[int, list[IndexCheck]] = {}
    for place, op in enumerate(program.ops):
        refs = set(op.refs())
        outs = {out for out in op.outs if out is not None}
        if refs & with_weights:
            with_weights |= outs
        elif refs & of_data:
            of_data |= outs
        checks = [check for check in _checks_of(op, program) if check.index in of_data - with_weights]
        if checks:
            found[place] = checks
    return found


def check_index(index: torch.Tensor, first: int, stop: int, ignored: int | None, what: str) -> None:
    """Raise IndexError as a CPU would."""
    if index.is_floating_point() or index.dtype is torch.bool:  # shares of classes; a mask
        return
    is_wrong = (index < first) | (index >= stop)
    if ignored is not None:
        is_wrong &= index != ignored
    if bool(is_wrong.any()):
        raise IndexError(f"{what} {int(index[is_wrong][0])} is out of bounds")


def _checks_of(op: Op, program: Program) -> Iterator[IndexCheck]:
    given, name = dict(op.arguments), op.name.split(".")[1]
    source = given.get("weight" if name == "embedding" else "self")
    if not isinstance(source, Ref):
        return
    shape = program.values[source.value].shape
    ignored: Argument = None
    is_signed, what = False, "Index"
    indices: list[tuple[Argument, Argument]]
    match name:
        case "embedding":
            indices = [(0, given.get("indices"))]
        case "cross_entropy_loss" | "nll_loss" | "nll_loss_nd":
            ignored = given.get("ignore_index", _IGNORED)
            what = "Target"
            indices = [(1 if len(shape) > 1 else 0, given.get("target"))]
        case "gather" | "index_select" | "scatter" | "scatter_add" | "take_along_dim":
            indices = [(given.get("dim"), given.get("index", given.get("indices")))]
        case "index" | "index_put" | "index_put_":
            is_signed = True
            listed = given.get("indices")
            indices = list(enumerate(listed if isinstance(listed, tuple) else ()))
        case _:
            return
    for at, index in indices:
        if not isinstance(index, Ref) or not isinstance(at, int) or not -len(shape) <= at < len(shape):
            continue
        size = shape[at]
        if isinstance(size, int) and isinstance(ignored, int | None):
            yield IndexCheck(index.value, -size if is_signed else 0, size, ignored, what)
