"""Forward and backward of a stage as one graph, cut in three parts: forward, gradients of inputs, of weights.

torch's partitioner cuts where least must be kept. Its backward is cut again, so that gradients of inputs
leave before those of weights are computed. Nothing here compiles or runs a part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from ravnest.model.stage.compiled_stage import PartsLayout, TracedStage

_LOSS = "tangents_loss"


@dataclass(frozen=True, slots=True)
class CutStage:
    """The three parts of a stage for one size of microbatch; a part that has nothing to do is None."""

    forward: fx.GraphModule
    inputs: fx.GraphModule | None
    weights: fx.GraphModule | None
    layout: PartsLayout


def cut_stage(stage: TracedStage, mode: FakeTensorMode, examples: list[Any]) -> CutStage:
    """Return the parts of a stage for arguments like the examples, which have no memory."""
    joint, outputs, found, names = _trace(stage, mode, examples)
    num_shown, given = len(outputs), _given(joint)
    if not found and not names:  # all is frozen, up to here
        forward = _extract(joint, given[: len(examples)], _ends(joint))
        return CutStage(forward, None, None, PartsLayout(num_shown))
    forward, backward = min_cut_rematerialization_partition(
        joint, [node.meta["val"] for node in given], num_fwd_outputs=num_shown
    )
    named = {node.name: node for node in _given(backward)}
    kept = [node.name for node in _ends(forward)[num_shown:]]
    taken = tuple(value for value in stage.outputs if f"tangents_{value}" in named)
    wanted = [*kept, *(f"tangents_{value}" for value in taken), *([_LOSS] if _LOSS in named else [])]
    order = [named[name] for name in wanted]
    assert len(order) == len(named), "the partitioner has an input of its own"
    ends = _ends(backward)
    first, between = None, order
    if found:
        between = _needed_after(backward, ends[: len(found)], ends[len(found) :])
        first = _extract(backward, order, [*ends[: len(found)], *between])
    last = _extract(backward, between, ends[len(found) :]) if names else None
    return CutStage(forward, first, last, PartsLayout(num_shown, taken, found, names, _LOSS in named))


def examples_of(graph: fx.GraphModule) -> list[Any]:
    """Return what a part is given, without memory."""
    return [node.meta["val"] for node in _given(graph)]


def _given(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _trace(
    stage: TracedStage, mode: FakeTensorMode, examples: list[Any]
) -> tuple[fx.GraphModule, list[Any], tuple[int, ...], tuple[str, ...]]:
    """Write forward and backward down as one graph; return what it shows first, and whose gradients then."""
    from torch._inductor.decomposition import select_decomp_table

    num_given = len(examples)
    wanted = [place for place, _ in stage.inputs] + [place for place, _ in stage.weights]
    shown: list[Any] = []
    has_gradient: list[bool] = []

    def run(primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
        leaves = [tensor.detach() for tensor in primals]
        for place in wanted:
            leaves[place].requires_grad_()
        with torch.enable_grad():
            outputs, results, buffers = stage.run(*leaves)
        # The loss has a tangent, too: what depends on none would become a part of the forward.
        losses = () if stage.loss is None else (results[stage.loss],)
        pairs_of_roots = zip((*outputs, *losses), tangents, strict=True)
        roots = [(root, tangent) for root, tangent in pairs_of_roots if root.requires_grad]
        ends = [root for root, _ in roots]
        pairs = [other for _, other in roots]
        leaf = [leaves[place] for place in wanted]
        gradients = torch.autograd.grad(ends, leaf, pairs, allow_unused=True) if ends and leaf else ()
        shown[:] = [*outputs, *results, *buffers]
        has_gradient[:] = [gradient is not None for gradient in gradients]
        return [
            *(tensor.detach() for tensor in shown),
            *(gradient for gradient in gradients if gradient is not None),
        ]

    with mode, torch.no_grad():
        outputs, results, _ = stage.run(*examples)
        losses = () if stage.loss is None else (results[stage.loss],)
        tangents = [torch.empty_like(root) for root in (*outputs, *losses)]
    names = [f"primals_{place}" for place in range(num_given)]
    names += [*(f"tangents_{value}" for value in stage.outputs), *(_LOSS for _ in losses)]

    def joint(*given: Tensor) -> list[Tensor]:
        return run(given[:num_given], given[num_given:])

    table, functional = select_decomp_table(), dispatch_functionalize(joint, FunctionalTensorMode())
    with mode:  # it is that of the examples: tensors that are made on the way are none either
        traced = make_fx(functional, decomposition_table=table)(*examples, *tangents)
    for node, name in zip(_given(traced), names, strict=True):
        node.name, node.target = name, name
    traced.graph.eliminate_dead_code()
    traced.recompile()
    flags = dict(zip(wanted, has_gradient, strict=False))
    found = tuple(value for place, value in stage.inputs if flags.get(place))
    trained = tuple(name for place, name in stage.weights if flags.get(place))
    return traced, shown, found, trained


def _ends(graph: fx.GraphModule) -> list[fx.Node]:
    (end,) = (node for node in graph.graph.nodes if node.op == "output")
    return list(end.args[0])


def _closure(ends: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that these are computed from, and themselves."""
    found: set[fx.Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _needed_after(
    graph: fx.GraphModule, first: Sequence[fx.Node], second: Sequence[fx.Node]
) -> list[fx.Node]:
    """Return what the second ends need of what is given or computed for the first."""
    early = _closure(first)
    late = _closure(second) - early
    return [
        node
        for node in graph.graph.nodes
        if (node in early and (node in second or any(user in late for user in node.users)))
        or (node in late and node.op == "placeholder")
    ]


def _extract(graph: fx.GraphModule, given: Sequence[fx.Node], ends: Sequence[fx.Node]) -> fx.GraphModule:
    """Return the part of a graph that computes the ends from what is given."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in given:
        copies[node] = part.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    stops = set(given)
    needed: set[fx.Node] = set()
    stack = [node for node in ends if node not in stops]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(other for other in node.all_input_nodes if other not in stops)
    for node in graph.graph.nodes:
        if node in needed:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in ends))
    return fx.GraphModule(graph, part)
