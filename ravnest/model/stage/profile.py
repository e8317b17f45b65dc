"""Fills the ModelProfile of a captured model: the training program runs once, on tensors without memory.

Each operation goes forward and backward alone, while torch's kernels are counted and autograd tells what it
saves. What is saved is kept as references to memory: then what two operations both save is counted once.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Self

from torch._subclasses.fake_tensor import FakeTensorMode

from ravnest.config import FrozenFormat
from ravnest.model.blueprint.program import FLOATING, PARAMETER, Blueprint, Op, TensorType, ValueId, refs_of
from ravnest.model.blueprint.slicing import crossings
from ravnest.model.stage.frozen_values import FrozenValues
from ravnest.model.stage.narrow_weights import find_castable
from ravnest.model.stage.op_costs import Cost, Flight, Form, Trial, recurrent_bytes, recurrent_flops
from ravnest.plan.types import ModelProfile
from ravnest.protocol.tensors import FLOAT_BYTES, ITEM_BYTES, find_channels


def measure(
    blueprint: Blueprint,
    batch_size: int,
    make_trial: Callable[..., Trial] = Trial,
    *,
    is_cast: bool = False,
) -> ModelProfile:
    """Return the line of a whole model in numbers, for batches of this size; `is_cast`: computed in bf16."""
    assert (blueprint.start, blueprint.stop) == (0, blueprint.num_positions), "measure the whole line"
    trainable = {entry.name for entry in blueprint.state if entry.is_trainable}
    work = [_Work.total(part) for part in _measure_parts(blueprint, batch_size, trainable, make_trial)]
    parameters = {entry.name for entry in blueprint.state if entry.kind == PARAMETER}
    buffers = {entry.name for entry in blueprint.state} - parameters
    return ModelProfile(
        name=blueprint.name,
        samples_per_batch=batch_size,
        parameter_bytes=_state_bytes(blueprint, parameters),
        matrix_bytes=_state_bytes(blueprint, find_matrices(blueprint)),
        forward_flops=tuple(float(part.forward_flops) for part in work),
        backward_flops=tuple(float(part.backward_flops) for part in work),
        saved_bytes=tuple(float(part.saved_bytes) for part in work),
        crossing_bytes=_crossing_bytes(blueprint, batch_size),
        frozen_bytes=_state_bytes(blueprint, parameters - trainable) if parameters - trainable else (),
        buffer_bytes=_state_bytes(blueprint, buffers) if buffers else (),
        restored_bytes=_restored_bytes(blueprint, is_cast=is_cast),
    )


def count_flops(stage: Blueprint, batch_size: int) -> tuple[float, float, float]:
    """Return the FLOPs of a stage's forward, and of its backward towards inputs and towards weights."""
    trainable = {entry.name for entry in stage.state if entry.is_trainable}
    parts = [_measure_parts(stage, batch_size, names) for names in (trainable, set())]
    whole, inputs = (_Work.total(work for part in found for work in part) for found in parts)
    has_gradients = any(stage.train.values[value].has_gradient for value in stage.train.inputs)
    # Without a gradient to send, all of the backward is on the way to the weights.
    towards_inputs = inputs.backward_flops if has_gradients else 0
    return float(whole.forward_flops), float(towards_inputs), float(whole.backward_flops - towards_inputs)


def find_matrices(blueprint: Blueprint) -> frozenset[str]:
    """Return the parameters that Muon trains as matrices: not embeddings, not the output head.

    A head with one output is no matrix, but it is the head: the layer before it is none.
    """
    names = dict(blueprint.train.state)
    wide = {x.name: x.shape for x in blueprint.state if x.is_trainable and len(x.shape) > 1}
    matrices = {name for name, shape in wide.items() if 1 < shape[0] < prod(shape)}
    may_be_head = matrices | {name for name, shape in wide.items() if len(shape) == 2 and shape[0] == 1}
    embeddings = {
        names[value]
        for op in blueprint.train.ops
        if op.name.startswith(_EMBEDDING)
        for value in op.refs()
        if value in names
    }
    used = [
        {names[value] for value in op.refs() if value in names} & may_be_head for op in blueprint.train.ops
    ]
    heads = next((found for found in reversed(used) if found), set()) if blueprint.is_last else set()
    return frozenset(matrices - embeddings - heads)


_EMBEDDING = "aten.embedding"
_LENGTH_LAST = ("aten.conv1d", "aten.conv_transpose1d")
_RECURRENT = ("aten.lstm.", "aten.gru.", "aten.rnn_")
_FLOAT_BYTES = 4  # the profile counts what crosses as float32; the planner knows the wire format


def has_channels(blueprint: Blueprint, batch_size: int) -> bool:
    """Whether int4-channels finds the channels of most of what crosses cuts.

    A shape does not tell (batch, channels, length) from (batch, tokens, channels), but its operators do.
    """
    if any(op.name.startswith(_LENGTH_LAST) for op in blueprint.train.ops):
        return False
    crossing = [blueprint.train.values[value] for values in crossings(blueprint)[1:-1] for value in values]
    sizes = [(_sent_bytes(value, batch_size), value.shape_at(batch_size)) for value in crossing]
    found = sum(size for size, shape in sizes if find_channels(shape) is not None)
    return 2 * found >= sum(size for size, _ in sizes)


def _state_bytes(blueprint: Blueprint, names: Iterable[str]) -> tuple[float, ...]:
    """Return the bytes of this state at each position; a tied weight counts wherever it is used.

    What is trained counts as float32 at least: sums of its gradients and its moments are that wide.
    """
    totals = [0.0] * blueprint.num_positions
    chosen = set(names)
    for entry in blueprint.state:
        if entry.name in chosen:
            is_narrow = entry.is_trainable and FLOAT_BYTES.get(entry.dtype) == 2
            for position in entry.positions:
                totals[position] += entry.size_bytes * (2 if is_narrow else 1)
    return tuple(totals)


def _restored_bytes(blueprint: Blueprint, *, is_cast: bool) -> tuple[float, ...]:
    """Return the most that one operation at each position has in full of what is stored in fewer bits."""
    entries = {entry.name: entry for entry in blueprint.state if entry.storage is not FrozenFormat.FP32}
    stored = {value: entries[name] for value, name in blueprint.train.state if name in entries}
    castable = find_castable(blueprint.train) if is_cast else frozenset[ValueId]()
    if not stored:
        return ()

    def find_size(op: Op, value: ValueId) -> int:
        entry = stored[value]
        dtype = "bfloat16" if value in castable else entry.dtype
        is_used_so = entry.storage is FrozenFormat.BF16 and dtype == "bfloat16"
        if is_used_so or (entry.storage is FrozenFormat.BF16 and op.name == f"{_EMBEDDING}.default"):
            return 0
        return prod(entry.shape) * ITEM_BYTES[dtype]

    return tuple(
        float(max((sum(find_size(op, x) for x in op.refs() if x in stored) for op in part), default=0))
        for part in _parts(blueprint)
    )


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


def _measure_parts(
    blueprint: Blueprint, batch_size: int, trainable: set[str], make_trial: Callable[..., Trial] = Trial
) -> list[list[_Work]]:
    meter = _Meter(blueprint, batch_size, trainable, make_trial)
    with FakeTensorMode():
        return [[meter.measure(op) for op in part] for part in _parts(blueprint)]


class _Meter:
    """Follows the program and counts of all that is saved each memory once."""

    def __init__(
        self, blueprint: Blueprint, batch_size: int, trainable: set[str], make_trial: Callable[..., Trial]
    ) -> None:
        program = blueprint.train
        self._remade = FrozenValues(program, {entry.name: entry for entry in blueprint.state}).large
        self._batch_size, self._make_trial = batch_size, make_trial
        self._flight = Flight(program, batch_size, self._try, {})
        for value, name in program.state:
            self._flight.give(value, name in trainable)
        self._kept = set(range(len(program.state)))  # state is there anyway; of the rest, each once
        for value in (*program.inputs, *(value for value, _ in program.fields)):
            self._flight.give(value, program.values[value].has_gradient)

    def measure(self, op: Op) -> _Work:
        """Return what the operation costs, and take note of its results."""
        cost, memory = self._flight.fly(op)
        outs = (out for value, out in zip(op.outs, cost.outs, strict=True) if value in self._remade)
        self._kept |= {memory[out[1]] for out in outs if out is not None}
        saved = {memory[number] for number in cost.saved} - self._kept
        self._kept |= saved
        saved_bytes = sum(self._flight.memory_bytes[number] for number in saved)
        return _Work(cost.forward_flops, cost.backward_flops, saved_bytes)

    def _try(self, op: Op, forms: tuple[Form, ...], gradients: tuple[bool, ...]) -> Cost:
        trial = self._make_trial(op, forms, self._batch_size)
        forward_flops = trial.forward()
        backward_flops = trial.backward(gradients)
        if op.name.startswith(_RECURRENT) and not forward_flops:  # a fused kernel shows nothing
            weights = [trial.leaves[value] for value in refs_of(dict(op.arguments)["params"])]
            forward_flops = recurrent_flops(weights, trial.leaves[0])
            if any(gradients):
                backward_flops = 2 * forward_flops
                trial.saved.append(trial.create(recurrent_bytes(weights, trial.leaves[0])))
        return trial.cost(forward_flops, backward_flops, gradients)
