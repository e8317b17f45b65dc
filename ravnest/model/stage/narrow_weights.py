"""Weights that come in bf16: an operation widens them where it uses them, and again in its backward.

So a stage keeps one narrow tensor for each version of a weight, and a wide one only while an operation runs.
Under mixed precision some weights are only ever used in bf16: those are not widened at all.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ravnest.model.blueprint.frozen_storage import PRODUCTS, find_operands
from ravnest.model.blueprint.program import Program, ValueId

_VIEW_NODES = frozenset(
    ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0")
)
_WIDEN_NODE = "ToCopyBackward0"


def find_castable(program: Program) -> frozenset[ValueId]:
    """Return the state that mixed precision uses in bf16 alone: in products, directly or through views."""
    return find_operands(program, lambda op: op.name in PRODUCTS and not op.precision)


def widen(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight as wide as its program was written for."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


@dataclass(frozen=True, slots=True)
class _Narrow:
    """A wide weight that a backward needs, or a view of it."""

    weight: Tensor
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


def pack_narrow(tensor: Tensor) -> Any:
    """Return the narrow weight that autograd is to save in place of what `widen` made of it; None if none."""
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEW_NODES:
        node = node.next_functions[0][0]
    if node is None or node.name() != _WIDEN_NODE:
        return None
    weight = getattr(node.next_functions[0][0], "variable", None)  # of a tensor that is no result
    if weight is None or weight.dtype is not torch.bfloat16:
        return None
    return _Narrow(weight, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def unpack_narrow(packed: Any) -> Tensor | None:
    """Return the wide weight that was packed; None if it was something else."""
    if not isinstance(packed, _Narrow):
        return None
    wide: Tensor = packed.weight.detach().to(packed.dtype)
    return wide.as_strided(packed.shape, packed.strides, packed.offset)
