"""Weights that come in bf16: an operation widens them where it uses them, and again in its backward.

So a stage keeps one narrow tensor for each version of a weight, and a wide one only while an operation runs.
Under mixed precision some weights are only ever used in bf16: those are not widened at all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ravnest.model.blueprint import Op, Program, ValueId

_VIEW_OPS = frozenset(
    f"aten.{name}"
    for name in ("t.default", "transpose.int", "permute.default", "view.default", "reshape.default")
)
# Of these every device casts all arguments to the type of mixed precision.
_PRODUCTS = frozenset(
    f"aten.{name}"
    for name in (
        *(
            "linear.default",
            "matmul.default",
            "mm.default",
            "bmm.default",
            "addmm.default",
            "baddbmm.default",
        ),
        *("conv1d.default", "conv2d.default", "conv3d.default"),
    )
)
_VIEW_NODES = frozenset(
    ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0")
)
_WIDEN_NODE = "ToCopyBackward0"


def find_castable(program: Program) -> frozenset[ValueId]:
    """Return the state that mixed precision uses in bf16 alone: in products, directly or through views."""
    users: dict[ValueId, list[Op]] = {}
    for op in program.ops:
        for value in op.refs():
            users.setdefault(value, []).append(op)
    sent = {*program.outputs, *(value for _, value in program.results)}

    def is_castable(value: ValueId) -> bool:
        if value in sent or value not in users:
            return False
        return all(
            (op.name in _PRODUCTS and not op.precision)
            or (op.name in _VIEW_OPS and all(is_castable(out) for out in op.outs if out is not None))
            for op in users[value]
        )

    return frozenset(value for value, _ in program.state if is_castable(value))


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


@contextmanager
def saves_narrow() -> Iterator[None]:
    """Let autograd save the narrow weight in place of what `widen` made of it."""
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


def _pack(tensor: Tensor) -> Any:
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEW_NODES:
        node = node.next_functions[0][0]
    if node is None or node.name() != _WIDEN_NODE:
        return tensor
    weight = getattr(node.next_functions[0][0], "variable", None)  # of a tensor that is no result
    if weight is None or weight.dtype is not torch.bfloat16:
        return tensor
    return _Narrow(weight, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    wide: Tensor = packed.weight.detach().to(packed.dtype)
    return wide.as_strided(packed.shape, packed.strides, packed.offset)
