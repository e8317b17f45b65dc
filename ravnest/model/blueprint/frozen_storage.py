"""Which parameters that are not trained are stored in fewer bits, and in which format.

Operands of matrix products are quantised: they are nearly all of a large model, and their rounding errors
average out in the products. Embeddings, output heads and what else is large become bf16: of a row that is
looked up no sum averages the errors. Vectors (norms, biases), small tensors and buffers stay as given.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from ravnest.config import FrozenFormat
from ravnest.model.blueprint.program import Blueprint, Op, Program, StateEntry, ValueId

# Of these every device casts all arguments to the type of mixed precision.
PRODUCTS = frozenset(
    f"aten.{name}.default"
    for name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d")
)
_VIEW_OPS = frozenset(
    f"aten.{name}"
    for name in ("t.default", "transpose.int", "permute.default", "view.default", "reshape.default")
)
_EMBEDDING = "aten.embedding.default"
_QUANTISED = (FrozenFormat.INT8, FrozenFormat.INT4)
_QUANTISABLE = ("float32", "bfloat16", "float16")
_SMALL_ITEMS = 4096  # below this a tensor stays as given, like those of an optimizer


def find_operands(program: Program, takes: Callable[[Op], bool]) -> frozenset[ValueId]:
    """Return the state that is used by operations which `takes` accepts alone, directly or through views."""
    users: dict[ValueId, list[Op]] = {}
    for op in program.ops:
        for value in op.refs():
            users.setdefault(value, []).append(op)
    sent = {*program.outputs, *(value for _, value in program.results)}

    def is_operand(value: ValueId) -> bool:
        if value in sent or value not in users:
            return False
        return all(
            takes(op) or (op.name in _VIEW_OPS and all(is_operand(out) for out in op.outs if out is not None))
            for op in users[value]
        )

    return frozenset(value for value, _ in program.state if is_operand(value))


def choose_storage(blueprint: Blueprint, chosen: FrozenFormat) -> Blueprint:
    """Return the blueprint of a whole model with its frozen parameters stored in this format."""
    if chosen is FrozenFormat.FP32:
        return blueprint
    programs = (blueprint.train, blueprint.evaluate)
    quantised = _find_quantised(blueprint) if chosen in _QUANTISED else frozenset()

    def store(entry: StateEntry) -> StateEntry:
        is_large = len(entry.shape) > 1 and prod(entry.shape) >= _SMALL_ITEMS
        if not entry.is_frozen or not is_large or not _is_plain(programs, entry.name):
            return entry
        if entry.name in quantised and entry.dtype in _QUANTISABLE:
            return replace(entry, storage=chosen)
        return replace(entry, storage=FrozenFormat.BF16) if entry.dtype == "float32" else entry

    return replace(blueprint, state=tuple(store(entry) for entry in blueprint.state))


def find_storage_fault(entry: StateEntry) -> str:
    """Return why a tensor cannot be stored as its entry says, if so."""
    if entry.storage is FrozenFormat.FP32:
        return ""
    known = _QUANTISABLE if entry.storage in _QUANTISED else ("float32",)
    if entry.dtype not in known:
        return f"is {entry.dtype}, which is not stored as {entry.storage}"
    if not entry.is_frozen:
        return f"is stored as {entry.storage}, but only parameters that nothing changes can be"
    return "" if prod(entry.shape) else f"is stored as {entry.storage}, but has no numbers"


def _is_plain(programs: tuple[Program, ...], name: str) -> bool:
    """Return whether state is only ever an argument: what a program passes on as it is must stay as given."""
    for program in programs:
        sent = {*program.outputs, *(value for _, value in program.results)}
        if any(value in sent for value, known in program.state if known == name):
            return False
    return True


def _find_quantised(blueprint: Blueprint) -> frozenset[str]:
    """Return the operands of products in all programs that use them, but for output heads."""
    others: set[str] = set()
    found: set[str] = set()
    heads: set[str] = set()
    frozen = {entry.name: entry for entry in blueprint.state if entry.is_frozen}
    for program in (blueprint.train, blueprint.evaluate):
        names = dict(program.state)
        operands = {names[value] for value in find_operands(program, lambda op: op.name in PRODUCTS)}
        found |= operands & frozen.keys()
        others |= set(names.values()) - operands
        heads |= _find_head(program, frozen)
    return frozenset(found - others - heads)


def _find_head(program: Program, frozen: Mapping[str, StateEntry]) -> set[str]:
    """Return the last frozen operand of the program, if it has a size in common with an embedding's rows."""
    origin = dict(program.state)
    num_rows, last = set[int](), ""
    for op in program.ops:
        used = [origin[value] for value in op.refs() if origin.get(value) in frozen]
        if op.name == _EMBEDDING:
            num_rows |= {frozen[name].shape[0] for name in used if frozen[name].shape}
        elif op.name in _VIEW_OPS and used:
            origin |= {out: used[0] for out in op.outs if out is not None}
        elif op.name in PRODUCTS and used:
            last = used[-1]
    return {last} if last and num_rows.intersection(frozen[last].shape) else set()
