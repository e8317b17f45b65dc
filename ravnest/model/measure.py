"""Fills the ModelProfile of a captured model: the training program runs once, on tensors without memory.

Each operation goes forward and backward alone, while torch's kernels are counted and autograd tells what it
saves. Deep models repeat their operations, so costs are kept by name, arguments and shapes, and what is saved
is kept as references to memory: then what two operations both save is counted once. Driven by the owner.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from ravnest.model.blueprint import (
    FLOATING,
    ITEM_BYTES,
    PARAMETER,
    Argument,
    Blueprint,
    Op,
    Program,
    Ratio,
    Ref,
    Size,
    TensorType,
    ValueId,
    refs_of,
)
from ravnest.model.kernels import UNCOUNTED_BY_TORCH, recurrent_flops
from ravnest.model.line import crossings
from ravnest.model.rebuild import bind, resolve
from ravnest.model.storage import writes
from ravnest.plan.types import ModelProfile


def measure(blueprint: Blueprint, batch_size: int) -> ModelProfile:
    """Return the line of a whole model in numbers, for batches of this size."""
    assert (blueprint.start, blueprint.stop) == (0, blueprint.num_positions), "measure the whole line"
    work = [_Work.total(part) for part in _measure_parts(blueprint, batch_size)]
    parameters = {entry.name for entry in blueprint.state if entry.kind == PARAMETER}
    return ModelProfile(
        name=blueprint.name,
        samples_per_batch=batch_size,
        parameter_bytes=_state_bytes(blueprint, parameters),
        matrix_bytes=_state_bytes(blueprint, find_matrices(blueprint)),
        forward_flops=tuple(float(part.forward_flops) for part in work),
        backward_flops=tuple(float(part.backward_flops) for part in work),
        saved_bytes=tuple(float(part.saved_bytes) for part in work),
        crossing_bytes=_crossing_bytes(blueprint, batch_size),
    )


def find_matrices(blueprint: Blueprint) -> frozenset[str]:
    """Return the parameters that Muon trains as matrices: not embeddings, not the output head."""
    names = dict(blueprint.train.state)
    matrices = {
        entry.name
        for entry in blueprint.state
        if entry.is_trainable and len(entry.shape) > 1 and 1 < entry.shape[0] < prod(entry.shape)
    }
    embeddings = {
        names[value]
        for op in blueprint.train.ops
        if op.name.startswith(_EMBEDDING)
        for value in op.refs()
        if value in names
    }
    used = [{names[value] for value in op.refs() if value in names} & matrices for op in blueprint.train.ops]
    heads = next((found for found in reversed(used) if found), set()) if blueprint.is_last else set()
    return frozenset(matrices - embeddings - heads)


_EMBEDDING = "aten.embedding"
_RECURRENT = ("aten.lstm.", "aten.gru.", "aten.rnn_")
_FLOAT_BYTES = 4  # the profile counts what crosses as float32; the planner knows the wire format


def _state_bytes(blueprint: Blueprint, names: Iterable[str]) -> tuple[float, ...]:
    """Return the bytes of this state at each position; a tied weight counts wherever it is used."""
    totals = [0.0] * blueprint.num_positions
    chosen = set(names)
    for entry in blueprint.state:
        if entry.name in chosen:
            for position in entry.positions:
                totals[position] += entry.size_bytes
    return tuple(totals)


def _crossing_bytes(blueprint: Blueprint, batch_size: int) -> tuple[float, ...]:
    values = blueprint.train.values
    inner = [
        sum(_sent_bytes(values[value], batch_size) for value in crossing)
        for crossing in crossings(blueprint)[1:-1]
    ]
    users = [{value for op in part for value in op.refs()} for part in _parts(blueprint)]
    batch = [value for value, _ in blueprint.train.fields if any(value in part for part in users)]
    labels = [value for value in batch if value in users[-1] and value not in users[0]]
    ends = [sum(_sent_bytes(values[value], batch_size) for value in part) for part in (batch, labels)]
    return tuple(float(size) for size in (ends[0] - ends[1], *inner, ends[1]))


def _sent_bytes(value: TensorType, batch_size: int) -> int:
    size = value.bytes_at(batch_size)
    return size // ITEM_BYTES[value.dtype] * _FLOAT_BYTES if value.dtype in FLOATING else size


def _parts(blueprint: Blueprint) -> Iterator[tuple[Op, ...]]:
    """Yield the operations of each position."""
    for (start, _), (stop, _) in pairwise(blueprint.cuts):
        yield blueprint.train.ops[start:stop]


@dataclass(frozen=True, slots=True)
class _Work:
    forward_flops: int
    backward_flops: int
    saved_bytes: int

    @classmethod
    def total(cls, works: Iterable[Self]) -> Self:
        rows = [(work.forward_flops, work.backward_flops, work.saved_bytes) for work in works]
        return cls(*(sum(column) for column in zip(*rows, strict=True))) if rows else cls(0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Form:
    """All that the cost of an operation depends on in one of its arguments."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    has_gradient: bool


@dataclass(frozen=True, slots=True)
class _Cost:
    """What an operation does. Memory is named by number: first that of its arguments, then `created`."""

    forward_flops: int
    backward_flops: int
    created: tuple[int, ...]
    outs: tuple[tuple[_Form, int] | None, ...]
    saved: tuple[int, ...]


def _measure_parts(blueprint: Blueprint, batch_size: int) -> list[list[_Work]]:
    trainable = {entry.name for entry in blueprint.state if entry.is_trainable}
    meter = _Meter(blueprint.train, batch_size, trainable)
    with FakeTensorMode():
        return [[meter.measure(op) for op in part] for part in _parts(blueprint)]


class _Meter:
    """Follows a program operation by operation, knowing of every value its form and its memory."""

    def __init__(self, program: Program, batch_size: int, trainable: set[str]) -> None:
        self._program = program
        self._batch_size = batch_size
        self._costs: dict[object, _Cost] = {}
        self._values: dict[ValueId, tuple[_Form, int]] = {}
        self._memory_bytes: list[int] = []
        for value, name in program.state:
            self._values[value] = self._given(value, name in trainable)
        self._kept = set(range(len(self._memory_bytes)))  # state is there anyway; of the rest, each once
        for value in (*program.inputs, *(value for value, _ in program.fields)):
            self._values[value] = self._given(value, program.values[value].has_gradient)

    def measure(self, op: Op) -> _Work:
        """Return what the operation costs, and take note of its results."""
        arguments = tuple(dict.fromkeys(op.refs()))
        forms = tuple(self._values[value][0] for value in arguments)
        cost = self._cost(op, arguments, forms)
        memory = [self._values[value][1] for value in arguments]
        memory += [self._create(size_bytes) for size_bytes in cost.created]
        for value, out in zip(op.outs, cost.outs, strict=True):
            if value is not None and out is not None:
                self._values[value] = (out[0], memory[out[1]])
        saved = {memory[number] for number in cost.saved} - self._kept
        self._kept |= saved
        saved_bytes = sum(self._memory_bytes[number] for number in saved)
        return _Work(cost.forward_flops, cost.backward_flops, saved_bytes)

    def _given(self, value: ValueId, has_gradient: bool) -> tuple[_Form, int]:
        kind = self._program.values[value]
        shape = kind.shape_at(self._batch_size)
        stride = torch.empty(shape, device="meta").stride()
        form = _Form(getattr(torch, kind.dtype), shape, stride, has_gradient)
        return form, self._create(kind.bytes_at(self._batch_size))

    def _create(self, size_bytes: int) -> int:
        self._memory_bytes.append(size_bytes)
        return len(self._memory_bytes) - 1

    def _cost(self, op: Op, arguments: tuple[ValueId, ...], forms: tuple[_Form, ...]) -> _Cost:
        numbers = {value: ValueId(number) for number, value in enumerate(arguments)}
        gradients = tuple(out is not None and self._program.values[out].has_gradient for out in op.outs)
        numbered = Op(
            op.name,
            tuple((name, _renumber(argument, numbers)) for name, argument in op.arguments),
            tuple(None if out is None else ValueId(index) for index, out in enumerate(op.outs)),
            0,
            op.precision,
        )
        key = (repr(numbered), gradients, forms)  # as text, for 1, 1.0 and True are equal but not the same
        if key not in self._costs:
            self._costs[key] = _Trial(numbered, forms, gradients, self._batch_size).cost()
        return self._costs[key]


def _renumber(argument: Argument, numbers: Mapping[ValueId, ValueId]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(numbers[argument.value])
    if isinstance(argument, tuple):
        return tuple(_renumber(part, numbers) for part in argument)
    return argument


class _Trial:
    """One operation on fake tensors, forward and backward."""

    def __init__(
        self, op: Op, forms: tuple[_Form, ...], gradients: tuple[bool, ...], batch_size: int
    ) -> None:
        self._op = op
        self._gradients = gradients
        self._batch_size = batch_size
        self._leaves = [_make(form) for form in forms]
        # A leaf that needs its gradient may not be changed in place, its copy may.
        changed = {int(value) for value in writes(op)}
        self._arguments = [
            leaf.clone() if number in changed and leaf.requires_grad else leaf
            for number, leaf in enumerate(self._leaves)
        ]
        self._memory = {_memory_of(tensor): number for number, tensor in enumerate(self._arguments)}
        self._created: list[int] = []
        self._alive: list[Tensor] = []  # memory of a dead tensor would get its name again

    def cost(self) -> _Cost:
        saved: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(self._number(tensor))
            return tensor

        hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.enable_grad(), hooks, _counter() as forward:
            outs = self._run()
        forward_flops, backward_flops = forward.get_total_flops(), self._backward_flops(outs)
        if self._op.name.startswith(_RECURRENT) and not forward_flops:
            forward_flops, kept_bytes = self._fused()
            if any(self._gradients):
                backward_flops = 2 * forward_flops
                saved.append(self._create(kept_bytes))
        places = tuple(
            None if out is None else (_form(out, has_gradient), self._number(out))
            for out, has_gradient in zip(outs, self._gradients, strict=True)
        )
        return _Cost(forward_flops, backward_flops, tuple(self._created), places, tuple(dict.fromkeys(saved)))

    def _run(self) -> list[Tensor | None]:
        positional, keywords = bind(self._op, torch.device("cpu"), self._convert_value)
        with _autocast(self._op.precision):
            result = resolve(self._op.name)(*positional, **keywords)
        outs = [result] if isinstance(result, Tensor) else list(result)
        return [out if kept is not None else None for out, kept in zip(outs, self._op.outs, strict=True)]

    def _convert_value(self, argument: Ref | Size | Ratio) -> Tensor | int | float:
        return self._arguments[argument.value] if isinstance(argument, Ref) else argument.at(self._batch_size)

    def _backward_flops(self, outs: list[Tensor | None]) -> int:
        leaves = [leaf for leaf in self._leaves if leaf.requires_grad]
        roots = [
            out
            for out, has_gradient in zip(outs, self._gradients, strict=True)
            if out is not None and has_gradient and out.requires_grad
        ]
        if not leaves or not roots:
            return 0
        with _counter() as counter:
            torch.autograd.grad(roots, leaves, [torch.empty_like(root) for root in roots], allow_unused=True)
        return int(counter.get_total_flops())

    def _fused(self) -> tuple[int, int]:
        """Return FLOPs and kept bytes of a recurrent kernel, which shows neither."""
        sequence = self._leaves[0]
        weights = [self._leaves[value] for value in refs_of(dict(self._op.arguments)["params"])]
        # About two numbers per row of each weight, sample and step: measured on oneDNN.
        num_rows = sum(weight.shape[0] for weight in weights if weight.dim() > 1)
        kept_bytes = 2 * num_rows * prod(sequence.shape[:-1]) * sequence.element_size()
        return recurrent_flops(weights, sequence), kept_bytes

    def _number(self, tensor: Tensor) -> int:
        memory = _memory_of(tensor)
        if memory not in self._memory:
            self._memory[memory] = self._create(tensor.untyped_storage().nbytes())
            self._alive.append(tensor)
        return self._memory[memory]

    def _create(self, size_bytes: int) -> int:
        self._created.append(size_bytes)
        return len(self._leaves) + len(self._created) - 1


def _make(form: _Form) -> Tensor:
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, requires_grad=form.has_gradient)


def _form(tensor: Tensor, has_gradient: bool) -> _Form:
    return _Form(tensor.dtype, tuple(tensor.shape), tensor.stride(), has_gradient)


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=UNCOUNTED_BY_TORCH)


def _autocast(precision: str) -> AbstractContextManager[object]:
    if precision in ("", "full"):
        return nullcontext()
    return torch.autocast("cpu", getattr(torch, precision), cache_enabled=False)
