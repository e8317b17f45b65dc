"""Norms of gradients: how long and how noisy they are, and whether numbers are finite.

The mean gradient of n samples has the expected square G^2 + V / n: G is the gradient of all data, V the
variance of one sample's. Microbatches and the batch they make up are two such means, so they give both. V and
G^2 add up over the stages of a cluster; V / G^2 is the noise scale, in samples (McCandlish et al., 2018).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import TypeVar

import torch
from torch import Tensor

from ravnest.protocol.training import GradientNoise

Key = TypeVar("Key")

_LEAST_UPDATES = 20  # measured, before the mean is told
_MEMORY = 0.97  # of the running mean: about the last 30 measured updates
_ALL_UPDATES = 64  # are measured at first; later
_EVERY = 8  # one of so many is


class NoiseMeter:
    """Running means of V and G^2 of one stage. Feed it every microbatch, then the mean gradient."""

    def __init__(self) -> None:
        self._num_updates = 0
        self._weight = self._variance = self._signal = 0.0
        self.forget()

    def forget(self) -> None:
        """Begin a new update."""
        self._squares = self._inverses = 0.0  # sums over its microbatches
        self._num_microbatches = self._num_samples = 0
        self._is_plain = True

    @property
    def wants_batch(self) -> bool:
        """Whether the update under way is to be measured: its mean gradient is worth a look."""
        is_turn = self._num_updates < _ALL_UPDATES or self._num_updates % _EVERY == 0
        return is_turn and self._is_plain and self._num_microbatches > 1

    def add_microbatch(self, norms: Iterable[float], num_samples: int, weight: float) -> None:
        """Take the norms of a microbatch's gradient; one that weighs less makes the mean no plain one."""
        self._squares += sum(norm * norm for norm in norms)
        self._inverses += 1 / num_samples
        self._num_microbatches += 1
        self._num_samples += num_samples
        self._is_plain &= weight == 1.0

    def end_update(self, norms: Iterable[float] | None) -> None:
        """Take the norms of the mean gradient, if it was wanted."""
        if norms is not None:
            square = sum(norm * norm for norm in norms)
            part, whole = self._inverses / self._num_microbatches, 1 / self._num_samples
            variance = (self._squares / self._num_microbatches - square) / (part - whole)
            signal = square - variance * whole
            if isfinite(variance) and isfinite(signal):
                self._weight = _MEMORY * self._weight + 1
                self._variance = _MEMORY * self._variance + variance
                self._signal = _MEMORY * self._signal + signal
        self._num_updates += 1
        self.forget()

    @property
    def noise(self) -> GradientNoise | None:
        """What was measured; None before there is enough of it."""
        if self._weight < _LEAST * (1 - 1e-9):
            return None
        return GradientNoise(self._variance / self._weight, self._signal / self._weight)


_LEAST = (1 - _MEMORY**_LEAST_UPDATES) / (1 - _MEMORY)


def find_not_finite(tensors: Mapping[Key, Tensor], norms: list[float] | None = None) -> Key | None:
    """Return the first key whose tensor holds an infinity or no number at all; their norms may be known."""
    # The norm is twenty times faster than a look at each number, but may overflow without an infinity.
    pairs = zip(tensors.items(), norms or find_norms(list(tensors.values())), strict=True)
    suspects = (pair for pair, norm in pairs if not math.isfinite(norm))
    return next((key for key, tensor in suspects if not tensor.isfinite().all()), None)


def cast_together(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors in this type, those that are not yet in one launch."""
    places = [place for place, tensor in enumerate(tensors) if tensor.dtype is not dtype]
    if not places or tensors[0].device.type != "cuda":
        return [tensor.to(dtype) for tensor in tensors]
    wide = [torch.empty_like(tensors[place], dtype=dtype) for place in places]
    torch._foreach_copy_(wide, [tensors[place] for place in places])
    found = dict(zip(places, wide, strict=True))
    return [found.get(place, tensor) for place, tensor in enumerate(tensors)]


def find_norms(tensors: list[Tensor]) -> list[float]:
    """Return how long each tensor is."""
    return [float(norm) for norm in torch.stack(measure_norms(tensors)).tolist()] if tensors else []


def measure_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return how long each tensor is, still on its device."""
    if not tensors:
        return []
    found: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:  # in one launch, if they are of one type
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype is dtype]
        some = [tensors[place] for place in places]
        is_narrow = dtype is torch.bfloat16
        norms = torch._foreach_norm(some, dtype=torch.float32) if is_narrow else torch._foreach_norm(some)
        found.update(zip(places, norms, strict=True))
    return [found[place] for place in range(len(tensors))]


@dataclass(slots=True)
class ForwardChecks:
    """Numbers that tell whether a forward went well; each look at them waits for the device."""

    largest: dict[int, Tensor] = field(default_factory=dict)  # by value
    loss: Tensor | None = None

    @classmethod
    def of(cls, outputs: Mapping[int, Tensor], loss: Tensor | None) -> "ForwardChecks":
        """Begin to measure what a forward made."""
        values = outputs.items()
        large = {value: each for value, each in values if each.is_floating_point() and each.numel()}
        largest = {value: each.detach().max() for value, each in large.items()}
        return cls(largest, None if loss is None else loss.detach().reshape(()))

    def gather(self, more: Sequence[Tensor]) -> Tensor | None:
        """Return all numbers to be read, still on the device."""
        every = [*self.largest.values(), *(() if self.loss is None else (self.loss,)), *more]
        return torch.stack(every) if every else None

    def read_with(self, more: Sequence[Tensor] = ()) -> tuple[str | None, list[float]]:
        """Return the fault there is, and more numbers, with a single wait; the checks are done then."""
        return self.read(self.gather(more))

    def read_with_buffers(self, buffers: Mapping[str, Tensor]) -> str | None:
        """Return the fault there is; a buffer that is written now and not finite would stay so for good."""
        floating = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        fault, norms = self.read_with(measure_norms(list(floating.values())))
        if fault is not None or (name := find_not_finite(floating, norms)) is None:
            return fault
        hint = "; a batch norm needs two values or more per channel" if name.endswith("running_var") else ""
        return f"buffer {name!r} would not be finite{hint}"

    def read(self, gathered: Tensor | None) -> tuple[str | None, list[float]]:
        """Return what `read_with` does, of numbers that were gathered before."""
        numbers = [] if gathered is None else gathered.tolist()
        num_own = len(self.largest) + (self.loss is not None)
        told, rest = numbers[:num_own], numbers[num_own:]
        # Not below: minus infinity is how masks say "never".
        faults = [
            f"value {value} is not finite"
            for value, largest in zip(self.largest, told, strict=False)
            if not largest < inf
        ]
        if self.loss is not None and not isfinite(told[-1]):
            faults.append(f"the loss is {told[-1]}")
        self.largest, self.loss = {}, None
        return next(iter(faults), None), rest
