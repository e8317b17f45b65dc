"""A dry run of a blueprint: its memory, its work and its shapes, before anything real runs.

Both programs run once on tensors without memory, training with its backward. A blueprint that would take more
than the provider allows, that lies about a shape, or that torch itself would reject is refused here. The
cost of the dry run is bounded too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ravnest.config import FrozenFormat
from ravnest.errors import UnsafeBlueprint
from ravnest.model.blueprint.aliasing import writes
from ravnest.model.blueprint.program import Argument, Blueprint, Op, Program, Ref, Size, TensorType, ValueId
from ravnest.model.stage.op_costs import (
    GATES,
    KERNEL_LIMITS,
    MOST_DIMENSIONS,
    Cost,
    Flight,
    Form,
    KernelLimits,
    KernelWatch,
    Recurrence,
    Seen,
    Trial,
    recurrent_bytes,
    recurrent_flops,
    too_many_elements,
)
from ravnest.units import show_bytes, show_value

_MOST_ELEMENTS = 2**59  # torch counts them, and their bytes, in 64 bits
_BACKWARD_TIMES = 3  # backward takes about twice the FLOPs of forward


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one batch needs at most: state, all activations and gradients together, FLOPs of a forward."""

    state_bytes: int
    activation_bytes: int
    forward_flops: int


def dry_run(
    blueprint: Blueprint,
    batch_size: int,
    *,
    max_bytes: float,
    max_flops: float,
    kernels: KernelLimits = KERNEL_LIMITS,
) -> Footprint:
    """Return what the blueprint needs for a batch of this size, or refuse it."""
    state_bytes = sum(entry.size_bytes for entry in blueprint.state)
    # What is stored in fewer bits is there in full while an operation uses it.
    stored = (entry for entry in blueprint.state if entry.storage is not FrozenFormat.FP32)
    state_bytes += max((TensorType(entry.dtype, entry.shape).bytes_at(0) for entry in stored), default=0)
    if state_bytes > max_bytes:
        raise UnsafeBlueprint(
            f"the state takes {show_bytes(state_bytes)}, over {show_bytes(max_bytes)} allowed"
        )
    inspection = _Inspection(batch_size, max_bytes - state_bytes, max_flops, kernels)
    trained = {entry.name for entry in blueprint.state if entry.is_trainable}
    with FakeTensorMode():
        found = [
            _Passage(blueprint.train, inspection, trained).run(),
            _Passage(blueprint.evaluate, inspection, None).run(),
        ]
    return Footprint(state_bytes, max(size for size, _ in found), max(flops for _, flops in found))


@dataclass(frozen=True, slots=True)
class _Taken(Cost):
    """What an operation takes, and what its kernels were seen to take forward and backward."""

    forward: Seen
    backward: Seen


class _Passage:
    """One program on tensors without memory; `trained` names state with a gradient, or none is followed."""

    def __init__(self, program: Program, inspection: "_Inspection", trained: set[str] | None) -> None:
        self._program = program
        self._inspection = inspection
        self._trained = trained
        self._flight = Flight(program, inspection.batch_size, inspection.try_op, inspection.costs)
        self._made_bytes = 0

    def run(self) -> tuple[int, int]:
        """Return the bytes of everything made and the FLOPs of forward."""
        program, inspection = self._program, self._inspection
        self._give()
        sent = [*program.outputs, *(value for _, value in program.results)]
        self._made_bytes += sum(self._dense_bytes(value) for value in sent)
        taken, forward_flops, backward_flops, num_elements, num_kernels = [], 0, 0, 0, 0
        for index, op in enumerate(program.ops):
            try:
                found = self._run_op(op)
                forward_flops += found.forward_flops
                backward_flops += found.backward_flops
                num_elements += found.forward.num_elements + found.backward.num_elements
                num_kernels += found.forward.num_kernels + found.backward.num_kernels
                self._made_bytes += found.forward.made_bytes
                inspection.check_bytes(self._made_bytes)
                inspection.check_work(forward_flops, backward_flops, num_elements, num_kernels)
            except UnsafeBlueprint as problem:
                raise UnsafeBlueprint(f"operation {index} '{op.name}': {problem}") from None
            except Exception as error:  # whatever torch says to arguments that do not fit
                reason = f"torch refuses it: {show_value(str(error).strip())}"
                raise UnsafeBlueprint(f"operation {index} '{op.name}': {reason}") from None
            taken.append(found)
        total_bytes = self._made_bytes + self._gradient_bytes(sent, taken)
        inspection.check_bytes(total_bytes)
        return total_bytes, forward_flops

    def _give(self) -> None:
        program, batch_size = self._program, self._inspection.batch_size
        arriving = {value: program.values[value].has_gradient for value in program.inputs}
        arriving |= {value: False for value, _ in program.fields}
        for value in (*arriving, *(value for value, _ in program.state)):
            shape = program.values[value].shape_at(batch_size)
            if any(size < 0 for size in shape) or prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:
                raise UnsafeBlueprint(f"value {value} of shape {shape} does not fit into any memory")
        self._made_bytes = sum(self._dense_bytes(value) for value in arriving)
        self._inspection.check_bytes(self._made_bytes)
        trained = self._trained
        for value, name in program.state:
            is_floating = getattr(torch, program.values[value].dtype).is_floating_point
            self._flight.give(value, trained is not None and name in trained and is_floating)
        for value, has_gradient in arriving.items():
            self._flight.give(value, has_gradient and trained is not None)

    def _run_op(self, op: Op) -> _Taken:
        forms = {value: self._flight.form(value) for value in op.refs()}
        _check_lists(op)
        _check_number_of_outs(op, forms, self._inspection.batch_size)
        _check_division(op, forms)
        found, memory = self._flight.fly(op)
        for value, out in zip(op.outs, found.outs, strict=True):
            if value is not None and out is not None:
                self._check_type(value, out[0])
                self._follow_write(op, forms, out, memory)
        return found

    def _follow_write(
        self, op: Op, forms: Mapping[ValueId, Form], out: tuple[Form, int], memory: list[int]
    ) -> None:
        """Take note when something trained is written into memory that was not."""
        form, number = out
        if form.has_gradient and number < len(forms):
            argument = list(forms)[number]
            if not forms[argument].has_gradient and argument in writes(op):
                self._flight.add_gradient(memory[number])

    def _check_type(self, value: ValueId, form: Form) -> None:
        kind = self._program.values[value]
        shape = kind.shape_at(self._inspection.batch_size)
        dtype = str(form.dtype).removeprefix("torch.")
        if (dtype, form.shape) != (kind.dtype, shape):
            raise UnsafeBlueprint(
                f"value {value} is {dtype} {form.shape}, though it is said to be {kind.dtype} {shape}"
            )

    def _gradient_bytes(self, sent: list[ValueId], taken: list[_Taken]) -> int:
        """Return what backward has at most: the gradients that wait, and what one operation makes."""
        if self._trained is None:
            return 0
        waiting = {value: self._dense_bytes(value) for value in sent if self._flight.form(value).has_gradient}
        waiting_bytes = most_bytes = sum(waiting.values())
        for op, found in zip(reversed(self._program.ops), reversed(taken), strict=True):
            most_bytes = max(most_bytes, waiting_bytes + found.backward.made_bytes)
            waiting_bytes -= sum(waiting.pop(out, 0) for out in op.outs if out is not None)
            for value in op.refs():
                if value not in waiting and self._flight.form(value).has_gradient:
                    waiting[value] = self._dense_bytes(value)
                    waiting_bytes += waiting[value]
        return max(most_bytes, waiting_bytes)

    def _dense_bytes(self, value: ValueId) -> int:
        return self._program.values[value].bytes_at(self._inspection.batch_size)


class _Inspection:
    """Tries operations under a watch; what was found out about one holds for both programs."""

    def __init__(self, batch_size: int, max_bytes: float, max_flops: float, kernels: KernelLimits) -> None:
        self.batch_size = batch_size
        self._kernels = kernels
        self.costs: dict[object, _Taken] = {}
        self._max_bytes = max_bytes
        self._max_flops = max_flops
        self._watch = KernelWatch(max_bytes, max_flops, kernels)

    def check_bytes(self, size_bytes: int) -> None:
        """Refuse more memory than allowed."""
        if size_bytes > self._max_bytes:
            raise UnsafeBlueprint(f"tensors would take over {show_bytes(self._max_bytes)} of memory")

    def check_work(
        self, forward_flops: int, backward_flops: int, num_elements: int, num_kernels: int
    ) -> None:
        """Refuse more work than allowed; an element that is read or written counts as one FLOP."""
        for flops, times in ((forward_flops, 1), (backward_flops, _BACKWARD_TIMES)):
            if flops > times * self._max_flops:
                raise UnsafeBlueprint(f"{flops:.1e} FLOPs, over {times * self._max_flops:.1e}")
        if num_elements > self._max_flops:
            raise UnsafeBlueprint(too_many_elements(num_elements, self._max_flops))
        if num_kernels > self._kernels.per_batch:
            raise UnsafeBlueprint(f"the program takes more than {self._kernels.per_batch} kernels")

    def try_op(self, op: Op, forms: tuple[Form, ...], gradients: tuple[bool, ...]) -> _Taken:
        """Run an operation forward and backward; autograd says what has a gradient, not the file."""
        if op.name in GATES:
            return self._try_recurrent(op, forms)
        return self._try(op, forms)

    def _try(self, op: Op, forms: tuple[Form, ...]) -> _Taken:
        self._watch.begin_trial(len(forms))
        trial = Trial(op, forms, self.batch_size, self._watch)
        forward_flops, forward = trial.forward(), self._watch.take()
        gradients = trial.gradients
        backward_flops, backward = _fly_back(trial, gradients), self._watch.take()
        cost = trial.cost(forward_flops, backward_flops, gradients)
        return _Taken(cost.forward_flops, cost.backward_flops, cost.created, cost.outs, (), forward, backward)

    def _try_recurrent(self, op: Op, forms: tuple[Form, ...]) -> _Taken:
        """Run two steps of it: every further one is the same, and a long sequence would take long here."""
        recurrence = Recurrence(op, forms)
        recurrence.check()
        time, num_steps = recurrence.time, recurrence.sequence.shape[recurrence.time]
        number = recurrence.number
        short = (*forms[:number], forms[number].with_size(time, min(num_steps, 2)), *forms[number + 1 :])
        found = self._try(op, short)
        out = found.outs[0] and (found.outs[0][0].with_size(time, num_steps), found.outs[0][1])
        outs = (out, *found.outs[1:])
        made_bytes = sum(form.size_bytes for form, _ in (place for place in outs if place))
        weights, sequence = [form.make() for form in recurrence.weights], recurrence.sequence.make()
        flops, kept_bytes = recurrent_flops(weights, sequence), recurrent_bytes(weights, sequence)
        has_backward = any(form.has_gradient for form in forms)
        return replace(
            found,
            outs=outs,
            forward_flops=flops,
            backward_flops=2 * flops * has_backward,
            forward=_grown(found.forward, num_steps, made_bytes + kept_bytes),
            backward=_grown(
                found.backward, num_steps, has_backward * (2 * kept_bytes + recurrence.size_bytes)
            ),
        )


def _fly_back(trial: Trial, gradients: tuple[bool, ...]) -> int:
    try:
        return trial.backward(gradients)
    except RuntimeError as error:
        if not str(error).startswith("derivative for"):
            raise
        return 0  # a real backward stops in the same way, if it comes here at all


def _grown(seen: Seen, num_steps: int, made_bytes: int) -> Seen:
    times = ceil(num_steps / 2)
    return Seen(made_bytes, seen.num_elements * times, seen.num_kernels * times)


def _check_lists(op: Op) -> None:
    """Refuse tensors of very many dimensions, which take torch long whatever their size."""
    for name, argument in op.arguments:
        if not isinstance(argument, tuple) or len(argument) <= MOST_DIMENSIONS or name == "split_sizes":
            continue
        if op.name.startswith("aten.meshgrid.") or not any(isinstance(part, Ref) for part in argument):
            raise UnsafeBlueprint(
                f"{name!r} has {len(argument)} items; at most {MOST_DIMENSIONS} are allowed"
            )


def _check_number_of_outs(op: Op, forms: Mapping[ValueId, Form], batch_size: int) -> None:
    """Refuse to cut a tensor into more parts than are declared: each part costs memory of its own."""
    given = dict(op.arguments)
    tensors, sizes, whole = given.get("tensors"), given.get("split_sizes"), given.get("self")
    if op.name.startswith(("aten.meshgrid.", "aten.broadcast_tensors.")) and isinstance(tensors, tuple):
        num_outs = len(tensors)
    elif op.name == "aten.split_with_sizes.default" and isinstance(sizes, tuple):
        num_outs = len(sizes)
    elif op.name in ("aten.split.Tensor", "aten.unbind.int", "aten.chunk.default"):
        dim, size = given.get("dim", 0), given.get("split_size", given.get("chunks", 1))
        shape = forms[whole.value].shape if isinstance(whole, Ref) else ()
        length = size.at(batch_size) if isinstance(size, Size) else size
        if (
            type(dim) is not int
            or type(length) is not int
            or length < 1
            or not -len(shape) <= dim < len(shape)
        ):
            raise UnsafeBlueprint(f"it cannot cut {shape} along {show_value(dim)} by {show_value(length)}")
        if op.name == "aten.chunk.default":
            num_chunks, length = length, max(ceil(shape[dim] / length), 1)
            num_outs = ceil(shape[dim] / length) or num_chunks
        else:
            num_outs = max(ceil(shape[dim] / length), 1)
    else:
        return
    if num_outs != len(op.outs):
        raise UnsafeBlueprint(f"it makes {num_outs} results, not {len(op.outs)}")


_DIVISIONS = (
    "aten.floor_divide.",
    "aten.remainder.",
    "aten.fmod.",
    "aten.div.Tensor_mode",
    "aten.div.Scalar_mode",
)


def _check_division(op: Op, forms: Mapping[ValueId, Form]) -> None:
    """Refuse whole numbers divided by what may be -1 or 0: the smallest one by -1 kills the process."""
    given = dict(op.arguments)
    if not op.name.startswith(_DIVISIONS) or given.get("rounding_mode", "") is None:
        return
    over, under = given["self"], given["other"]
    if any(_is_real(argument, forms) for argument in (over, under)):
        return
    is_safe = type(under) is int and under not in (0, -1)
    if isinstance(under, Size):
        is_safe = under.per_sample >= 0 and under.at(1) > 0
    if not is_safe:
        raise UnsafeBlueprint("whole numbers are divided by something else than a number apart from 0 and -1")


def _is_real(argument: Argument, forms: Mapping[ValueId, Form]) -> bool:
    if isinstance(argument, Ref):
        return forms[argument.value].dtype.is_floating_point
    return not isinstance(argument, bool | int | Size)
