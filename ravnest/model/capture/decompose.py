"""Operators that are not on the list, written with those that are, by torch's own rules.

Many are composed of others (`concatenate` is `cat`), or torch has a decomposition for them. So the list stays
short, and providers meet nothing new. What a rule gives is compared with the module like all of a capture.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


class _NoRuleError(Exception):
    """A rule of ours does not fit this call; the operator is refused as one without a rule."""


def without_write(target: OpOverload) -> str | None:
    """Return the name of the operator that gives what this one writes, if it changes its first argument."""
    packet, overload = str(target).removeprefix("aten.").split(".")
    is_writing = bool(target._schema.arguments) and target._schema.arguments[0].name == "self"
    return f"aten.{packet[:-1]}.{overload}" if is_writing and packet.endswith("_") else None


def _gather_strided(
    given: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Return what as_strided shows, as a copy: nobody else says how numbers lie in memory."""
    in_memory = given.permute(sorted(range(given.ndim), key=lambda dim: -given.stride()[dim]))
    if storage_offset or not in_memory.is_contiguous():
        raise _NoRuleError("a view of a tensor that is no whole")
    places = torch.zeros([1] * len(size), dtype=torch.int64, device=given.device)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        steps = torch.arange(length, device=given.device) * step
        places = places + steps.reshape([-1 if each == dim else 1 for each in range(len(size))])
    return in_memory.reshape(-1)[places]


def _fill_masked(
    given: torch.Tensor, indices: Sequence[torch.Tensor], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """Return what a write of the same to all of x[mask] leaves, without asking how many places that are."""
    (mask,) = indices
    if values.ndim > given.ndim - mask.ndim or accumulate:
        raise _NoRuleError("a write of rows to x[mask]")
    mask = mask.reshape(*mask.shape, *[1] * (given.ndim - mask.ndim))
    return torch.where(mask, values.to(given.dtype), given)


def _fill_masked_(
    given: torch.Tensor, indices: Sequence[torch.Tensor], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    return given.copy_(_fill_masked(given, indices, values, accumulate))


_OURS: dict[object, Callable[..., Any]] = {
    torch.ops.aten.as_strided.default: _gather_strided,
    torch.ops.aten.index_put.default: _fill_masked,
    torch.ops.aten.index_put_.default: _fill_masked_,
}


def writes_by_mask(node: fx.Node) -> bool:
    """Return whether a call writes to x[mask]: a provider's dry run cannot say to how many places."""
    if node.target not in (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default):
        return False
    indices = node.args[1]
    assert isinstance(indices, list | tuple)
    found = [each.meta["val"] for each in indices if isinstance(each, fx.Node)]
    return any(isinstance(each, torch.Tensor) and each.dtype is torch.bool for each in found)


def decompose(node: fx.Node) -> tuple[fx.GraphModule, list[fx.Node]] | None:
    """Return a call as a graph of other calls, and what it is given; None if torch has no rule."""
    assert isinstance(node.target, OpOverload)
    is_composite = node.target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    rule: Callable[..., Any] | None = _OURS.get(node.target) or decomposition_table.get(node.target)
    rule = node.target.decompose if is_composite else rule
    if rule is None:
        return None
    leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    values = [leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    places = [place for place, each in enumerate(values) if isinstance(each, torch.Tensor | torch.SymInt)]

    def run(*given: torch.Tensor | torch.SymInt) -> Any:
        filled = list(values)
        for place, value in zip(places, given, strict=True):
            filled[place] = value
        arguments, keywords = pytree.tree_unflatten(filled, spec)
        return rule(*arguments, **keywords)

    inputs = [values[place] for place in places]
    modes = [value.fake_mode for value in inputs if isinstance(value, FakeTensor)]
    with modes[0] if modes else contextlib.nullcontext():
        # A composed operator would be recorded as itself before its dispatch.
        graph = make_fx(run, pre_dispatch=not is_composite)(*inputs)
    for inner in graph.graph.nodes:
        inner.meta["stack_trace"] = node.meta.get("stack_trace")
    return graph, [leaves[place] for place in places]
