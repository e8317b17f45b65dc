"""What a blueprint would need, found out before anything runs: memory, FLOPs, whether its shapes are true.

Both programs run once on tensors without memory. A blueprint that would take more than the provider allows,
that lies about a shape, or that torch itself would reject is refused here. Driven by the peer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ravnest.errors import UnsafeBlueprint
from ravnest.model.blueprint import Blueprint, Op, Program, Ratio, Ref, Size, ValueId
from ravnest.model.kernels import UNCOUNTED_BY_TORCH, recurrent_flops
from ravnest.model.operators import operators
from ravnest.model.rebuild import bind, resolve
from ravnest.units import show_bytes, show_value

_GATES = {"aten.lstm.input": 4, "aten.gru.input": 3, "aten.rnn_tanh.input": 1, "aten.rnn_relu.input": 1}


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one batch needs at most: state, all activations together, FLOPs of a forward."""

    state_bytes: int
    activation_bytes: int
    forward_flops: int


def preflight(blueprint: Blueprint, batch_size: int, *, max_bytes: float, max_flops: float) -> Footprint:
    """Return what the blueprint needs for a batch of this size, or refuse it."""
    state_bytes = sum(entry.size_bytes for entry in blueprint.state)
    if state_bytes > max_bytes:
        raise UnsafeBlueprint(
            f"the state takes {show_bytes(state_bytes)}, over {show_bytes(max_bytes)} allowed"
        )
    found = [
        _Flight(program, batch_size, max_bytes - state_bytes, max_flops).run()
        for program in (blueprint.train, blueprint.evaluate)
    ]
    return Footprint(state_bytes, max(size for size, _ in found), max(flops for _, flops in found))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory that kernels make, those inside an operation included, and stops above a bound."""

    def __init__(self, max_bytes: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made_bytes = 0
        self._max_bytes = max_bytes

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        if not function.is_view:
            for made in result if isinstance(result, tuple | list) else [result]:
                if isinstance(made, Tensor):
                    self.made_bytes += made.numel() * made.element_size()
        if self.made_bytes > self._max_bytes:
            raise UnsafeBlueprint(f"tensors would take over {show_bytes(self._max_bytes)} of memory")
        return result


class _Flight:
    """One program on tensors without memory."""

    def __init__(self, program: Program, batch_size: int, max_bytes: float, max_flops: float) -> None:
        self._program = program
        self._batch_size = batch_size
        self._max_flops = max_flops
        self._watch = _Watch(max_bytes)
        self._values: dict[ValueId, Tensor] = {}

    def run(self) -> tuple[int, int]:
        """Return the bytes of everything made and the FLOPs."""
        program = self._program
        recurrent = 0
        given = [pair[0] for pair in (*program.state, *program.fields)] + list(program.inputs)
        counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED_BY_TORCH)
        with FakeTensorMode(), torch.no_grad(), self._watch:
            for value in given:
                kind = program.values[value]
                shape = kind.shape_at(self._batch_size)
                self._values[value] = torch.empty(shape, dtype=getattr(torch, kind.dtype))
            self._watch.made_bytes -= sum(self._values[value].nbytes for value, _ in program.state)
            with counter:
                for index, op in enumerate(program.ops):
                    try:
                        recurrent += self._run_op(op)
                    except UnsafeBlueprint as problem:
                        raise UnsafeBlueprint(f"operation {index} '{op.name}': {problem}") from None
                    flops = counter.get_total_flops() + recurrent
                    if flops > self._max_flops:
                        raise UnsafeBlueprint(
                            f"operation {index} '{op.name}': {flops:.1e} FLOPs, over {self._max_flops:.1e}"
                        )
        return self._watch.made_bytes, counter.get_total_flops() + recurrent

    def _run_op(self, op: Op) -> int:
        """Run one operation; return FLOPs that torch does not count."""
        self._check_number_of_outs(op)
        is_recurrent = op.name in _GATES
        if is_recurrent:
            self._check_recurrent(op)
        target = resolve(op.name)
        try:
            positional, keywords = bind(op, torch.device("cpu"), self._convert_value)
            result = target(*positional, **keywords)
        except UnsafeBlueprint:
            raise
        except Exception as error:  # whatever torch says to shapes that do not fit
            raise UnsafeBlueprint(f"torch refuses it: {show_value(str(error).strip())}") from None
        outs = list(result) if operators()[op.name].num_returns != 1 else [result]
        if len(outs) != len(op.outs):
            raise UnsafeBlueprint(f"it makes {len(outs)} results, not {len(op.outs)}")
        for out, made in zip(op.outs, outs, strict=True):
            if out is not None:
                self._keep(out, made)
        if not is_recurrent:
            return 0
        weights = [self._values[value] for value in op.refs() if self._values[value].dim() == 2]
        return recurrent_flops(weights, positional[0])

    def _keep(self, out: ValueId, made: Tensor) -> None:
        kind = self._program.values[out]
        shape = kind.shape_at(self._batch_size)
        dtype = str(made.dtype).removeprefix("torch.")
        if (dtype, tuple(made.shape)) != (kind.dtype, shape):
            raise UnsafeBlueprint(
                f"value {out} is {dtype} {tuple(made.shape)}, though it is said to be {kind.dtype} {shape}"
            )
        self._values[out] = made

    def _convert_value(self, argument: Ref | Size | Ratio) -> Tensor | int | float:
        if isinstance(argument, Ref):
            return self._values[argument.value]
        return argument.at(self._batch_size)

    def _check_number_of_outs(self, op: Op) -> None:
        """Refuse to cut a tensor into more parts than are declared: each part costs memory of its own."""
        given = dict(op.arguments)
        if op.name not in ("aten.split.Tensor", "aten.unbind.int"):
            return
        whole, dim, size = given["self"], given.get("dim", 0), given.get("split_size", 1)
        assert isinstance(whole, Ref)
        assert isinstance(dim, int)
        shape = self._values[whole.value].shape
        length = size.at(self._batch_size) if isinstance(size, Size) else size
        if not isinstance(length, int) or length < 1 or not -len(shape) <= dim < len(shape):
            raise UnsafeBlueprint(f"it cannot cut {tuple(shape)} along {dim} by {show_value(length)}")
        if ceil(shape[dim] / length) != len(op.outs):
            raise UnsafeBlueprint(f"it makes {ceil(shape[dim] / length)} results, not {len(op.outs)}")

    def _check_recurrent(self, op: Op) -> None:
        """Check every shape of a recurrent operation: its kernel does not, and crashes on wrong ones."""
        given = dict(op.arguments)
        hidden = given["hx"] if isinstance(given["hx"], tuple) else (given["hx"],)
        states, weights = self._tensors(hidden), self._tensors(given["params"])
        (sequence,) = self._tensors((given["input"],))
        layers, is_both = given["num_layers"], bool(given["bidirectional"])
        per_layer = 4 if given["has_biases"] else 2
        num_directions = 2 if is_both else 1
        if not isinstance(layers, int) or len(weights) != layers * num_directions * per_layer or layers < 1:
            raise UnsafeBlueprint(f"{len(weights)} weights do not make {show_value(layers)} layers")
        if sequence.dim() != 3 or any(state.dim() != 3 for state in states):
            raise UnsafeBlueprint("its input and its first state must have three dimensions")
        size, gates = states[0].shape[-1], _GATES[op.name] * states[0].shape[-1]
        num_samples = sequence.shape[0 if given["batch_first"] else 1]
        for state in states:
            if tuple(state.shape) != (layers * num_directions, num_samples, size):
                raise UnsafeBlueprint(f"its first state has the shape {tuple(state.shape)}")
        for index, weight in enumerate(weights):
            layer, part = divmod(index // per_layer, num_directions)[0], index % per_layer
            width = sequence.shape[-1] if layer == 0 else size * num_directions
            expected = ((gates, width), (gates, size), (gates,), (gates,))[part]
            if tuple(weight.shape) != expected or weight.dtype != sequence.dtype:
                raise UnsafeBlueprint(f"weight {index} is {tuple(weight.shape)}, though {expected} is needed")
        if (
            len(states) != (2 if op.name == "aten.lstm.input" else 1)
            or prod(sequence.shape) == 0
            or size == 0
        ):
            raise UnsafeBlueprint("its sizes are empty or its states too many")

    def _tensors(self, arguments: object) -> list[Tensor]:
        assert isinstance(arguments, tuple)
        return [self._values[argument.value] for argument in arguments if isinstance(argument, Ref)]
