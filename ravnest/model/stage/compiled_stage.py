"""A stage compiled in three parts: forward, gradients of its inputs, gradients of its weights.

Parts are compiled elsewhere, one size of microbatch at a time; until they are ready, and wherever compiling
fails, the stage runs uncompiled. The next microbatch then takes the parts over. Random operations draw from a
generator seeded per microbatch.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ravnest.model.blueprint.program import Blueprint

CompiledPart = Callable[
    [list[Tensor]], Sequence[Tensor]
]  # it empties the list, so that memory is freed early

_Kind = tuple[int, tuple[torch.dtype, ...]]  # samples, and the types of all arguments: weights may be narrow
_MOST_SIZES = 2  # of microbatches: the usual one, and one more where batches do not divide evenly
_OFTEN = 4  # a size that was seen so often comes again; the first one is compiled at once


@dataclass(frozen=True, slots=True)
class TracedStage:
    """A stage as a function of tensors, and what its arguments and outputs are.

    `run` takes the arguments in order; it returns outputs for the next stage, results, and changed buffers.
    """

    run: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]]
    outputs: tuple[int, ...]  # values
    loss: int | None  # its place among the results
    inputs: tuple[tuple[int, int], ...]  # places of arguments whose gradient the stage before wants, values
    weights: tuple[tuple[int, str], ...]  # places of trained arguments, names


@dataclass(frozen=True, slots=True)
class StageToCompile:
    """What is compiled: a blueprint's training program, on a device, in a precision.

    `trace` makes a function of it, for arguments like those given.
    """

    blueprint: Blueprint
    device: torch.device
    autocast: torch.dtype | None
    trace: Callable[[Sequence[Tensor]], TracedStage]


@dataclass(frozen=True, slots=True)
class PartsLayout:
    """What the parts take and give, in order."""

    num_shown: int  # outputs, results and buffers of the forward; what backward needs comes after them
    tangents: tuple[int, ...] = ()  # values whose gradients the backward takes
    found: tuple[int, ...] = ()  # values of which there are gradients
    names: tuple[str, ...] = ()  # weights of which there are gradients
    takes_loss: bool = False  # the last tangent is that of the loss


@dataclass(frozen=True, slots=True)
class CompiledParts:
    """The three parts for one size of microbatch; a part that has nothing to do is None."""

    forward: CompiledPart
    inputs: CompiledPart | None
    weights: CompiledPart | None
    layout: PartsLayout


PendingParts = Callable[[], CompiledParts | None]  # None: not yet; it raises what went wrong
CompileStage = Callable[[StageToCompile, Sequence[Tensor]], PendingParts]


class CompiledBackward:
    """The backward of one microbatch."""

    def __init__(
        self,
        parts: CompiledParts,
        kept: Sequence[Tensor],
        outputs: Mapping[int, Tensor],
        loss: Tensor | None,
        give_up: Callable[[Exception], None],
    ) -> None:
        self._parts, self._kept = parts, list(kept)
        self._outputs = {value: outputs[value] for value in parts.layout.tangents}
        self._loss = loss if parts.layout.takes_loss else None
        self._give_up = give_up

    def backward_inputs(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Take gradients of what was sent on; return those of inputs; both by value."""
        parts, layout = self._parts, self._parts.layout
        self._kept += [
            gradients[value].to(output.dtype) if value in gradients else torch.zeros_like(output)
            for value, output in self._outputs.items()
        ]
        self._kept += [] if self._loss is None else [torch.ones_like(self._loss)]
        self._outputs = {}
        if parts.inputs is None:
            return {}
        found = self._run(parts.inputs, self._kept)
        self._kept = found[len(layout.found) :]
        return dict(zip(layout.found, found, strict=False))

    def backward_weights(self) -> dict[str, Tensor]:
        """Return the gradients of weights; what was kept is used up."""
        kept, self._kept = self._kept, []
        if self._parts.weights is None:
            return {}
        return dict(zip(self._parts.layout.names, self._run(self._parts.weights, kept), strict=True))

    def _run(self, part: CompiledPart, given: list[Tensor]) -> list[Tensor]:
        try:
            with torch.no_grad():
                return list(part(given))
        except Exception as error:
            self._give_up(error)  # the microbatches to come run uncompiled
            raise


class StageCompiler:
    """Has a stage compiled for the sizes of microbatches that come; says once if that is impossible.

    `compile_stage` begins to compile and returns at once; `warn` gets that sentence, `tell` good news.
    """

    def __init__(
        self,
        stage: StageToCompile,
        compile_stage: CompileStage,
        warn: Callable[[str], object],
        tell: Callable[[str], object] = len,
    ) -> None:
        self._stage = stage
        self._compile_stage, self._warn, self._tell = compile_stage, warn, tell
        self._seen: Counter[_Kind] = Counter()
        self._pending: dict[_Kind, PendingParts] = {}
        self._parts: dict[_Kind, CompiledParts] = {}
        self._has_failed = False

    @property
    def is_settled(self) -> bool:
        """Whether what was begun has ended, well or not."""
        return self._has_failed or (bool(self._parts) and not self._pending)

    def find(self, num_samples: int, arguments: Sequence[Tensor]) -> CompiledParts | None:
        """Return the parts for this size; without them, begin to compile if it comes often."""
        if self._has_failed:
            return None
        kind = (num_samples, tuple(tensor.dtype for tensor in arguments))
        if kind in self._parts:
            return self._parts[kind]
        try:
            if kind not in self._pending and self._is_usual(kind):
                self._pending[kind] = self._compile_stage(self._stage, arguments)
            pending = self._pending.get(kind)
            found = None if pending is None else pending()
        except Exception as error:  # a compiler may raise anything, and training goes on
            self.give_up(error)
            return None
        if found is not None:
            self._parts[kind] = found
            del self._pending[kind]
            self._tell(f"the stage is compiled now, for microbatches of {num_samples} samples")
        return found

    def _is_usual(self, kind: _Kind) -> bool:
        self._seen[kind] += 1
        is_first = not self._parts and not self._pending
        has_room = not self._pending and len(self._parts) < _MOST_SIZES
        return is_first or (has_room and self._seen[kind] >= _OFTEN)

    def give_up(self, error: Exception) -> None:
        """Run uncompiled from now on, and say why."""
        if not self._has_failed:
            told = (str(error).strip().splitlines() or [""])[0]
            self._warn(
                "the stage cannot be compiled here, so it runs uncompiled: as exact, but slower "
                f"({type(error).__name__}: {told:.200})"
            )
        self._has_failed = True
        self._pending.clear()
