"""Inputs of a microbatch that are freed between its forward and its backward, and made again from what came.

A stage that computes its activations again needs its inputs twice. They travelled narrow, so it keeps the
bytes that came and decodes them twice: the same bytes give the same numbers. Tensors stay, without memory.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

MakeAgain = Callable[[], Tensor]


class HeldInputs:
    """The inputs that can be made again; those that share memory with what is `passed` on stay."""

    def __init__(
        self, inputs: Mapping[Any, Tensor], again: Mapping[Any, MakeAgain], passed: Iterable[Tensor]
    ) -> None:
        kept = {tensor.untyped_storage().data_ptr() for tensor in passed}
        chosen = {value: tensor for value, tensor in inputs.items() if value in again}
        self._freed: list[tuple[Tensor, int, MakeAgain]] = []
        for value, tensor in chosen.items():
            storage = tensor.untyped_storage()
            if storage.data_ptr() in kept or not storage.resizable():
                continue
            self._freed.append((tensor, storage.nbytes(), again[value]))
        for tensor, _, _ in self._freed:
            tensor.untyped_storage().resize_(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Make the inputs again, as a backward needs them."""
        for tensor, size_bytes, make in self._freed:
            tensor.untyped_storage().resize_(size_bytes)
            tensor.data.copy_(make())  # not the tensor itself: autograd would take it for another one
        self._freed = []
