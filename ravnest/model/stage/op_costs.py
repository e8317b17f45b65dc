"""What torch's kernels take: FLOPs its own counter does not know, and a watch over every kernel that runs.

The watch counts by shapes alone, a tensor always as if it were dense: an expanded view has no memory of its
own, but a kernel that reads it works through all of it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ravnest.errors import UnsafeBlueprint
from ravnest.model.blueprint.aliasing import writes
from ravnest.model.blueprint.program import Argument, Op, Program, Ratio, Ref, Size, ValueId
from ravnest.model.stage.program_graph import bind, resolve
from ravnest.units import show_bytes, show_value

MOST_DIMENSIONS = 64
_KERNELS_PER_TRIAL = 8  # what it takes to begin a trial, in kernels


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward_flops(_: torch.Size, *shapes: torch.Size, **__: object) -> int:
    # Five products instead of two: the scores are computed again, as torch counts its other flash kernels.
    query, key, value = shapes[:3]
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


UNCOUNTED_BY_TORCH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def flop_counter() -> FlopCounterMode:
    """Return torch's counter, completed."""
    return FlopCounterMode(display=False, custom_mapping=UNCOUNTED_BY_TORCH)


def recurrent_flops(weights: Iterable[Tensor], sequence: Tensor) -> int:
    """Return the FLOPs of a fused recurrent kernel: each weight is used once per sample and step."""
    return 2 * prod(sequence.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() > 1)


def recurrent_bytes(weights: Iterable[Tensor], sequence: Tensor) -> int:
    """Return the bytes a recurrent kernel keeps: two numbers per weight row, sample and step (on oneDNN)."""
    num_rows = sum(weight.shape[0] for weight in weights if weight.dim() > 1)
    return 2 * num_rows * prod(sequence.shape[:-1]) * sequence.element_size()


@dataclass(frozen=True, slots=True)
class Seen:
    """What kernels took: bytes of the tensors they made, elements they read and wrote, their number."""

    made_bytes: int = 0
    num_elements: int = 0
    num_kernels: int = 0


@dataclass(frozen=True, slots=True)
class KernelLimits:
    """How many kernels a program may take."""

    per_op: int = 2_048
    tried: int = 20_000  # 0.2 to 0.7 ms each; a model of 350 operations takes 2,500
    per_batch: int = 1_000_000  # repeats included: about 10 s of nothing but starting them


KERNEL_LIMITS = KernelLimits()


class KernelWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what kernels take, those inside an operation included, and stops above a bound."""

    def __init__(self, max_bytes: float, max_elements: float, limits: KernelLimits = KERNEL_LIMITS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limits = limits
        self._max_bytes = max_bytes
        self._max_elements = max_elements
        self._num_flown = 0
        self._num_kernels = 0
        self._seen = Seen()

    def begin_trial(self, num_arguments: int) -> None:
        """Count from here for one operation, which takes this many tensors."""
        self._num_kernels = 0
        self._num_flown += num_arguments + _KERNELS_PER_TRIAL
        self._seen = Seen()

    def take(self) -> Seen:
        """Return what was counted since the last call."""
        seen, self._seen = self._seen, Seen()
        return seen

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        if not _makes_tensors(function):  # a question about a tensor; torch dies of an exception in it
            return function(*arguments, **(keywords or {}))
        self._num_flown += 1
        self._num_kernels += 1
        if self._num_kernels > self._limits.per_op:
            raise UnsafeBlueprint(f"it takes more than {self._limits.per_op} kernels")
        if self._num_flown > self._limits.tried:
            raise UnsafeBlueprint("there are too many different operations to look through")
        result = function(*arguments, **(keywords or {}))
        read = list(_tensors_in((arguments, (keywords or {}).values())))
        self._count(function, arguments, read, list(_tensors_in(result)))
        return result

    def _count(
        self, function: Any, arguments: Sequence[Any], read: list[Tensor], results: list[Tensor]
    ) -> None:
        if any(result.dim() > MOST_DIMENSIONS for result in results):
            raise UnsafeBlueprint(f"it makes a tensor of more than {MOST_DIMENSIONS} dimensions")
        made_bytes = num_elements = 0
        if not function.is_view:
            given = {id(tensor) for tensor in read}  # what a kernel changes in place, it does not make
            made = [result for result in results if id(result) not in given]
            made_bytes = sum(tensor.numel() * tensor.element_size() for tensor in made)
            num_elements = sum(tensor.numel() for tensor in (*read, *made))
            num_elements += _pooled_elements(function, arguments, made)
        seen = self._seen
        self._seen = Seen(
            seen.made_bytes + made_bytes, seen.num_elements + num_elements, seen.num_kernels + 1
        )
        if self._seen.made_bytes > self._max_bytes:
            raise UnsafeBlueprint(f"tensors would take over {show_bytes(self._max_bytes)} of memory")
        if self._seen.num_elements > self._max_elements:
            raise UnsafeBlueprint(too_many_elements(self._seen.num_elements, self._max_elements))


def too_many_elements(num_elements: int, max_elements: float) -> str:
    """Return why this much work is refused."""
    return f"its kernels read and write {num_elements:.1e} elements, over {max_elements:.1e}"


@cache
def _makes_tensors(function: Any) -> bool:
    return any("Tensor" in str(kind.type) for kind in function._schema.returns)


def _tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif not isinstance(values, str | int | float | None):
        for value in values if isinstance(values, Iterable) else ():
            yield from _tensors_in(value)


def _pooled_elements(function: Any, arguments: Sequence[Any], made: list[Tensor]) -> int:
    """Return what pooling reads: a whole window for every element on the pooled side."""
    found = _find_window(function)
    if found is None:
        return 0
    place, num_dimensions = found
    sizes = arguments[place]
    area = prod(sizes) if len(sizes) == num_dimensions else sizes[0] ** num_dimensions
    pooled = arguments[0] if "backward" in function._schema.name else made[0]
    return int(pooled.numel() * area)


@cache
def _find_window(function: Any) -> tuple[int, int] | None:
    """Return where a pooling kernel takes the size of its window, and the number of its dimensions."""
    names = [argument.name for argument in function._schema.arguments]
    numbers = [number for number in (1, 2, 3) if f"pool{number}d" in function._schema.name]
    return (names.index("kernel_size"), numbers[0]) if numbers and "kernel_size" in names else None


@dataclass(frozen=True, slots=True)
class Form:
    """All that the cost of an operation depends on in one of its arguments."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    has_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor, has_gradient: bool) -> "Form":
        """Return the form of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), has_gradient)

    @property
    def size_bytes(self) -> int:
        """Bytes of a dense tensor of this shape."""
        return prod(self.shape) * self.dtype.itemsize

    def with_size(self, dim: int, size: int) -> "Form":
        """Return the form with another size of one dimension, and the same order in memory."""
        shape = tuple(size if index == dim else old for index, old in enumerate(self.shape))
        stride, step = [0] * len(shape), 1
        for index in sorted(range(len(shape)), key=lambda index: (self.stride[index], -index)):
            if self.stride[index]:
                stride[index] = step
                step *= max(shape[index], 1)
        return replace(self, shape=shape, stride=tuple(stride))

    def make(self) -> Tensor:
        """Return a tensor of this form."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, requires_grad=self.has_gradient)


@dataclass(frozen=True, slots=True)
class Cost:
    """What an operation does. Memory is named by number: first that of its arguments, then `created`."""

    forward_flops: int
    backward_flops: int
    created: tuple[int, ...]
    outs: tuple[tuple[Form, int] | None, ...]
    saved: tuple[int, ...]


AnyCost = TypeVar("AnyCost", bound=Cost)
TryOp = Callable[
    [Op, tuple[Form, ...], tuple[bool, ...]], AnyCost
]  # forms of arguments, gradients of results


class Flight(Generic[AnyCost]):
    """Knows of every value its form and its memory; `costs` may be shared with another flight."""

    def __init__(
        self, program: Program, batch_size: int, try_op: TryOp[AnyCost], costs: dict[object, AnyCost]
    ) -> None:
        self.memory_bytes: list[int] = []
        self._program = program
        self._batch_size = batch_size
        self._try_op = try_op
        self._costs = costs
        self._values: dict[ValueId, tuple[Form, int]] = {}
        self._with_gradient: set[int] = set()

    def give(self, value: ValueId, has_gradient: bool) -> None:
        """Take note of a value that no operation makes."""
        kind = self._program.values[value]
        shape = kind.shape_at(self._batch_size)
        stride = torch.empty(shape, device="meta").stride()
        form = Form(getattr(torch, kind.dtype), shape, stride, has_gradient)
        self._values[value] = (form, self._create(kind.bytes_at(self._batch_size)))

    def form(self, value: ValueId) -> Form:
        """Return the form of a value; what shares memory with something trained is trained too."""
        form, memory = self._values[value]
        is_trained = memory in self._with_gradient and form.dtype.is_floating_point
        return replace(form, has_gradient=True) if is_trained else form

    def fly(self, op: Op) -> tuple[AnyCost, list[int]]:
        """Return what the operation costs and the memory it names, and take note of its results."""
        arguments = tuple(dict.fromkeys(op.refs()))
        cost = self._cost(op, arguments)
        memory = [self._values[value][1] for value in arguments]
        memory += [self._create(size_bytes) for size_bytes in cost.created]
        for value, out in zip(op.outs, cost.outs, strict=True):
            if value is not None and out is not None:
                self._values[value] = (out[0], memory[out[1]])
        return cost, memory

    def add_gradient(self, memory: int) -> None:
        """Take note that a write made something in this memory trained."""
        self._with_gradient.add(memory)

    def _create(self, size_bytes: int) -> int:
        self.memory_bytes.append(size_bytes)
        return len(self.memory_bytes) - 1

    def _cost(self, op: Op, arguments: tuple[ValueId, ...]) -> AnyCost:
        forms = tuple(self.form(value) for value in arguments)
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
            self._costs[key] = self._try_op(numbered, forms, gradients)
        return self._costs[key]


def _renumber(argument: Argument, numbers: Mapping[ValueId, ValueId]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(numbers[argument.value])
    if isinstance(argument, tuple):
        return tuple(_renumber(part, numbers) for part in argument)
    return argument


class Trial:
    """One operation on fake tensors, forward and backward; its kernels run under `watch`."""

    def __init__(
        self,
        op: Op,
        forms: tuple[Form, ...],
        batch_size: int,
        watch: AbstractContextManager[object] | None = None,
    ) -> None:
        self.leaves = [form.make() for form in forms]
        self.saved: list[int] = []
        self._op = op
        self._batch_size = batch_size
        self._watch = watch or nullcontext()
        # A leaf that needs its gradient may not be changed in place, its copy may.
        changed = {int(value) for value in writes(op)}
        self._arguments = [
            leaf.clone() if number in changed and leaf.requires_grad else leaf
            for number, leaf in enumerate(self.leaves)
        ]
        self._memory = {_memory_of(tensor): number for number, tensor in enumerate(self._arguments)}
        self._created: list[int] = []
        self._alive: list[Tensor] = []  # memory of a dead tensor would get its name again
        self._outs: list[Tensor | None] = []

    @property
    def gradients(self) -> tuple[bool, ...]:
        """Which results autograd follows, whatever is said of them."""
        return tuple(out is not None and out.requires_grad for out in self._outs)

    def forward(self) -> int:
        """Run it; return its FLOPs."""

        def pack(tensor: Tensor) -> Tensor:
            self.saved.append(self._number(tensor))
            return tensor

        hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        positional, keywords = bind(self._op, torch.device("cpu"), self._convert_value)
        target, precision = resolve(self._op.name), _autocast(self._op.precision)
        with torch.enable_grad(), hooks, self._watch, flop_counter() as counter, precision:
            result = target(*positional, **keywords)
        outs = [result] if isinstance(result, Tensor) else list(result)
        if len(outs) != len(self._op.outs):
            raise UnsafeBlueprint(f"it makes {len(outs)} results, not {len(self._op.outs)}")
        self._outs = [
            out if kept is not None else None for out, kept in zip(outs, self._op.outs, strict=True)
        ]
        return int(counter.get_total_flops())

    def backward(self, gradients: tuple[bool, ...]) -> int:
        """Run it back from the results that have a gradient; return its FLOPs."""
        leaves = [leaf for leaf in self.leaves if leaf.requires_grad]
        roots = [
            out
            for out, has_gradient in zip(self._outs, gradients, strict=True)
            if out is not None and has_gradient and out.requires_grad
        ]
        if not leaves or not roots:
            return 0
        arriving = [torch.empty_like(root) for root in roots]
        with self._watch, flop_counter() as counter:
            torch.autograd.grad(roots, leaves, arriving, allow_unused=True)
        return int(counter.get_total_flops())

    def cost(self, forward_flops: int, backward_flops: int, gradients: tuple[bool, ...]) -> Cost:
        """Return what was found."""
        places = tuple(
            None if out is None else (Form.of(out, has_gradient), self._number(out))
            for out, has_gradient in zip(self._outs, gradients, strict=True)
        )
        saved = tuple(dict.fromkeys(self.saved))
        return Cost(forward_flops, backward_flops, tuple(self._created), places, saved)

    def create(self, size_bytes: int) -> int:
        """Return the number of memory that shows in no tensor."""
        self._created.append(size_bytes)
        return len(self.leaves) + len(self._created) - 1

    def _convert_value(self, argument: Ref | Size | Ratio) -> Tensor | int | float:
        return self._arguments[argument.value] if isinstance(argument, Ref) else argument.at(self._batch_size)

    def _number(self, tensor: Tensor) -> int:
        memory = _memory_of(tensor)
        if memory not in self._memory:
            self._memory[memory] = self.create(tensor.untyped_storage().nbytes())
            self._alive.append(tensor)
        return self._memory[memory]


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _autocast(precision: str) -> AbstractContextManager[object]:
    if precision in ("", "full"):
        return nullcontext()
    return torch.autocast("cpu", getattr(torch, precision), cache_enabled=False)


GATES = {"aten.lstm.input": 4, "aten.gru.input": 3, "aten.rnn_tanh.input": 1, "aten.rnn_relu.input": 1}


class Recurrence:
    """A recurrent operation: its kernel does not check shapes, and crashes on wrong ones."""

    def __init__(self, op: Op, forms: tuple[Form, ...]) -> None:
        self._given = given = dict(op.arguments)
        hidden = given["hx"] if isinstance(given["hx"], tuple) else (given["hx"],)
        (self.number,) = _numbers((given["input"],))
        self.sequence = forms[self.number]
        self._states = [forms[number] for number in _numbers(hidden)]
        self.weights = [forms[number] for number in _numbers(given["params"])]
        self.time = 1 if given["batch_first"] else 0
        self.size_bytes = sum(form.size_bytes for form in forms)
        self._num_gates = GATES[op.name]
        self._num_states = 2 if op.name == "aten.lstm.input" else 1

    def check(self) -> None:
        """Refuse shapes and dtypes that do not fit each other."""
        given, states, sequence = self._given, self._states, self.sequence
        layers, num_directions = given["num_layers"], 2 if given["bidirectional"] else 1
        per_layer = 4 if given["has_biases"] else 2
        num_weights = len(self.weights)
        if type(layers) is not int or num_weights != layers * num_directions * per_layer or layers < 1:
            raise UnsafeBlueprint(f"{num_weights} weights do not make {show_value(layers)} layers")
        if len(states) != self._num_states or any(len(form.shape) != 3 for form in (sequence, *states)):
            raise UnsafeBlueprint("its input and its first states must be so many, of three dimensions")
        size, num_samples = states[0].shape[-1], sequence.shape[1 - self.time]
        for state in states:
            if state.shape != (layers * num_directions, num_samples, size) or state.dtype != sequence.dtype:
                raise UnsafeBlueprint(f"its first state is {state.dtype} {state.shape}")
        if prod(sequence.shape) == 0 or size == 0:
            raise UnsafeBlueprint("its sizes are empty")
        for index, (weight, shape) in enumerate(
            zip(self.weights, self._shapes(per_layer, size), strict=True)
        ):
            if weight.shape != shape or weight.dtype != sequence.dtype:
                raise UnsafeBlueprint(f"weight {index} is {weight.shape}, though {shape} is needed")

    def _shapes(self, per_layer: int, size: int) -> Iterator[tuple[int, ...]]:
        num_directions, num_rows = 2 if self._given["bidirectional"] else 1, self._num_gates * size
        for index in range(len(self.weights)):
            is_first = index < per_layer * num_directions
            width = self.sequence.shape[-1] if is_first else size * num_directions
            yield ((num_rows, width), (num_rows, size), (num_rows,), (num_rows,))[index % per_layer]


def _numbers(arguments: Argument) -> list[int]:
    if not isinstance(arguments, tuple) or not all(isinstance(argument, Ref) for argument in arguments):
        raise UnsafeBlueprint("its input, its first state and its weights must be values")
    return [int(argument.value) for argument in arguments if isinstance(argument, Ref)]
