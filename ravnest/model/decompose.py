"""Operators that are not on the list, written with those that are, by torch's own rules.

Many are composed of others (`concatenate` is `cat`), or torch has a decomposition for them. So the list stays
short, and providers meet nothing new. What a rule gives is compared with the module like all of a capture.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


def without_write(target: OpOverload) -> str | None:
    """Return the name of the operator that gives what this one writes, if it changes its first argument."""
    packet, overload = str(target).removeprefix("aten.").split(".")
    is_writing = bool(target._schema.arguments) and target._schema.arguments[0].name == "self"
    return f"aten.{packet[:-1]}.{overload}" if is_writing and packet.endswith("_") else None


def decompose(node: fx.Node) -> tuple[fx.GraphModule, list[fx.Node]] | None:
    """Return a call as a graph of other calls, and the tensors it is given; None if torch has no rule."""
    assert isinstance(node.target, OpOverload)
    is_composite = node.target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    rule: Callable[..., Any] | None = decomposition_table.get(node.target)
    rule = node.target.decompose if is_composite else rule
    if rule is None:
        return None
    leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    values = [leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]

    def run(*given: torch.Tensor) -> Any:
        filled = list(values)
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor
        arguments, keywords = pytree.tree_unflatten(filled, spec)
        return rule(*arguments, **keywords)

    tensors = [values[place] for place in places]
    modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
    with modes[0] if modes else contextlib.nullcontext():
        # A composed operator would be recorded as itself before its dispatch.
        graph = make_fx(run, pre_dispatch=not is_composite)(*tensors)
    for inner in graph.graph.nodes:
        inner.meta["stack_trace"] = node.meta.get("stack_trace")
    return graph, [leaves[place] for place in places]
