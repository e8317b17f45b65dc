"""Values that depend on frozen state alone: made where they are used, made again in a backward, never saved.

A stored matrix is dequantised for each operation that uses it. Autograd would keep the result until the
backward; here it keeps how to make it. The same holds for large values that programs compute from frozen
state and constants, such as masks. What is saved is recognised by its memory, so views of it count too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ravnest.config import FrozenFormat
from ravnest.model.blueprint.aliasing import Storages, has_effect
from ravnest.model.blueprint.operators import draws
from ravnest.model.blueprint.program import Argument, Op, Program, Ratio, Size, StateEntry, ValueId
from ravnest.model.stage.narrow_weights import pack_narrow, unpack_narrow, widen
from ravnest.model.state.quantisation import dequantise

_LARGE_BYTES = 64 << 10  # what is smaller is saved: it costs less than it would to make it again

Make = Callable[[], Tensor]


class FrozenValues:
    """What a program has of them: stored state, and large results that depend on frozen state alone."""

    def __init__(self, program: Program, entries: Mapping[str, StateEntry]) -> None:
        self.program, self.entries = program, entries
        known = [(value, entries[name]) for value, name in program.state if name in entries]
        self.stored = {value: x for value, x in known if x.storage is not FrozenFormat.FP32}
        still = {value for value, x in known if not x.is_trainable and not x.is_written}
        self._makers, self.large = _find_constant(program, still)

    def cut_out(self, value: ValueId) -> Program:
        """Return the program that makes one of the large values."""
        program, needed, wanted = self.program, list[Op](), [value]
        seen: set[int] = set()
        while wanted:
            op = self._makers.get(wanted.pop())
            if op is not None and op.number not in seen:
                seen.add(op.number)
                needed.append(op)
                wanted += op.refs()
        used = {each for op in needed for each in op.refs()}
        return Program(
            values=program.values,
            inputs=(),
            fields=(),
            state=tuple(pair for pair in program.state if pair[0] in used),
            ops=tuple(op for op in program.ops if op.number in seen),
            outputs=(value,),
            results=(),
        )


def _find_constant(program: Program, still: set[ValueId]) -> tuple[dict[ValueId, Op], set[ValueId]]:
    """Return which operation makes each constant value, and which of these are large."""
    storages, constant = Storages(program), set(still)
    makers: dict[ValueId, Op] = {}
    for op in program.ops:
        if has_effect(op) or draws(op.name, dict(op.arguments)) or not constant.issuperset(op.refs()):
            continue
        if any(_grows(argument) for _, argument in op.arguments):
            continue
        made = [out for out in op.outs if out is not None]
        if not any(storages.is_written(out) for out in made):
            constant |= set(made)
            makers |= dict.fromkeys(made, op)
    large = {value for value in makers if program.values[value].bytes_at(1) >= _LARGE_BYTES}
    return makers, large


def _grows(argument: Argument) -> bool:
    """Return whether an argument depends on the batch."""
    if isinstance(argument, tuple):
        return any(_grows(part) for part in argument)
    return isinstance(argument, Size | Ratio)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A tensor that a backward needs, or a view of it, as what it is made of."""

    make: Make
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class FrozenMemory:
    """Knows the tensors of one run that can be made again; `remake` makes a large value of the program."""

    def __init__(self, state: Mapping[ValueId, Tensor], remake: Callable[[ValueId], Tensor]) -> None:
        self._remake = remake
        self._held = {tensor.untyped_storage()._cdata for tensor in state.values()}
        # With the reference, memory that is freed meanwhile does not come back under the same number.
        self._known: dict[int, tuple[StorageWeakRef, torch.dtype, Make]] = {}

    def add(self, tensor: Tensor, make: Make) -> None:
        """Take note of a tensor that `make` makes again."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._held and storage._cdata not in self._known:
            alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._known[storage._cdata] = (alive, tensor.dtype, make)

    def add_value(self, tensor: Tensor, value: ValueId) -> None:
        """Take note of a large value of the program."""
        self.add(tensor, lambda: self._remake(value))

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd is to keep of a tensor."""
        found = self._known.get(tensor.untyped_storage()._cdata)
        if found is None or found[1] is not tensor.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        return _Recipe(found[2], tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def restore(
    memory: FrozenMemory | None, tensor: Tensor, form: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return stored state as an operation uses it. It may also come as it is."""

    def make() -> Tensor:
        if tensor.dtype is torch.uint8:
            return dequantise(tensor, FrozenFormat(form), tuple(shape), dtype)
        return widen(tensor, dtype)

    found = make()
    if memory is not None and found is not tensor:
        memory.add(found, make)
    return found


def note_value(memory: FrozenMemory | None, tensor: Tensor, value: int) -> None:
    """Take note of a large value that can be made again."""
    if memory is not None:
        memory.add_value(tensor, ValueId(value))


@contextmanager
def saves_recipes(memory: FrozenMemory | None, *, is_narrow: bool) -> Iterator[None]:
    """Let autograd keep recipes of frozen values, narrow weights for wide ones, and the rest as before.

    Within a checkpoint the rest is what the checkpoint makes of it.
    """
    # Hooks do not chain by themselves: those pushed last see all.
    outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    save, load = outer or (Tensor.detach, _same)  # the tensor itself would keep its graph, which keeps it

    def pack(tensor: Tensor) -> Any:
        found = None if memory is None else memory.pack(tensor)
        if found is None and is_narrow:
            found = pack_narrow(tensor)
        return save(tensor) if found is None else found

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _Recipe):
            with torch.no_grad():
                return packed.make().as_strided(packed.shape, packed.strides, packed.offset)
        found = unpack_narrow(packed)
        return load(packed) if found is None else found

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _same(tensor: Any) -> Any:
    return tensor
