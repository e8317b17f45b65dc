"""What torch's kernels take: FLOPs its own counter does not know, and a watch over every kernel that runs.

The watch counts by shapes alone, a tensor always as if it were dense: an expanded view has no memory of its
own, but whoever reads it works through all of it. Driven by `measure` and `preflight`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ravnest.errors import UnsafeBlueprint
from ravnest.units import show_bytes

MOST_DIMENSIONS = 64
MOST_KERNELS_PER_OP = 2_048
MOST_KERNELS_FLOWN = 20_000  # 0.2 to 0.7 ms each; a model of 350 operations takes 2,500
MOST_KERNELS = 1_000_000  # of one batch, repeats included: about 10 s of nothing but starting them
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


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what kernels take, those inside an operation included, and stops above a bound."""

    def __init__(self, max_bytes: float, max_elements: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        if self._num_kernels > MOST_KERNELS_PER_OP:
            raise UnsafeBlueprint(f"it takes more than {MOST_KERNELS_PER_OP} kernels")
        if self._num_flown > MOST_KERNELS_FLOWN:
            raise UnsafeBlueprint("there are too many different operations to look through")
        result = function(*arguments, **(keywords or {}))
        read = list(_tensors((arguments, (keywords or {}).values())))
        self._count(function, arguments, read, list(_tensors(result)))
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


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif not isinstance(values, str | int | float | None):
        for value in values if isinstance(values, Iterable) else ():
            yield from _tensors(value)


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
