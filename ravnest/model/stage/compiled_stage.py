"""A stage compiled in three parts: forward, gradients of its inputs, gradients of its weights.

Forward and backward are written down as one graph, which torch's partitioner cuts where least must be kept.
The backward is cut again, so that gradients of inputs leave before those of weights are computed. Parts are
compiled beside the training, one size of microbatch at a time; until they are ready, and wherever
compiling fails, the stage runs uncompiled. Random operations draw from a generator seeded per microbatch.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

CompiledPart = Callable[..., Sequence[Tensor]]
Compiler = Callable[[fx.GraphModule, list[Any]], CompiledPart]
Background = Callable[[Callable[[], None]], None]

_Kind = tuple[int, tuple[torch.dtype, ...]]  # samples, and the types of all arguments: weights may be narrow
_LOSS = "tangents_loss"
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
class CompiledParts:
    """The three parts for one size of microbatch; a part that has nothing to do is None."""

    forward: CompiledPart
    inputs: CompiledPart | None
    weights: CompiledPart | None
    num_shown: int  # outputs, results and buffers of the forward; what backward needs comes after them
    tangents: tuple[int, ...]  # values whose gradients the backward takes
    found: tuple[int, ...]  # values of which there are gradients
    names: tuple[str, ...]  # weights of which there are gradients
    takes_loss: bool = False  # the last tangent is that of the loss


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
        self._outputs = {value: outputs[value] for value in parts.tangents}
        self._loss = loss if parts.takes_loss else None
        self._give_up = give_up

    def backward_inputs(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Take gradients of what was sent on; return those of inputs; both by value."""
        parts, kept = self._parts, self._kept
        tangents = [
            gradients[value].to(output.dtype) if value in gradients else torch.zeros_like(output)
            for value, output in self._outputs.items()
        ]
        tangents += [] if self._loss is None else [torch.ones_like(self._loss)]
        self._kept, self._outputs = [*kept, *tangents], {}
        del kept, tangents
        if parts.inputs is None:
            return {}
        found = self._run(parts.inputs, self._kept)
        self._kept = found[len(parts.found) :]
        return dict(zip(parts.found, found, strict=False))

    def backward_weights(self) -> dict[str, Tensor]:
        """Return the gradients of weights; what was kept is used up."""
        kept, self._kept = self._kept, []
        if self._parts.weights is None:
            return {}
        return dict(zip(self._parts.names, self._run(self._parts.weights, kept), strict=True))

    def _run(self, part: CompiledPart, given: Sequence[Tensor]) -> list[Tensor]:
        try:
            with torch.no_grad():
                return list(part(*given))
        except Exception as error:
            self._give_up(error)  # the microbatches to come run uncompiled
            raise


def compile_with_inductor(graph: fx.GraphModule, examples: list[Any]) -> CompiledPart:
    """Compile one part with torch's own compiler."""
    from torch._inductor import compile as compile_graph

    compiled: CompiledPart = compile_graph(graph, examples)
    return compiled


class StageCompiler:
    """Compiles a stage for the sizes of microbatches that come; says once if that is impossible.

    `in_background` runs a piece of work beside the training; `warn` gets the sentence.
    """

    def __init__(
        self,
        stage: TracedStage,
        in_background: Background,
        warn: Callable[[str], object],
        compile_part: Compiler = compile_with_inductor,
    ) -> None:
        self._stage = stage
        self._compile_part, self._in_background, self._warn = compile_part, in_background, warn
        self._seen: Counter[_Kind] = Counter()
        self._parts: dict[_Kind, CompiledParts | None] = {}  # None while they are compiled
        self._has_failed = False

    def find(self, num_samples: int, arguments: Sequence[Tensor]) -> CompiledParts | None:
        """Return the parts for this size; without them, begin to compile if it comes often."""
        if self._has_failed:
            return None
        kind = (num_samples, tuple(tensor.dtype for tensor in arguments))
        if kind in self._parts:
            return self._parts[kind]
        self._seen[kind] += 1
        is_usual = not self._parts or self._seen[kind] >= _OFTEN
        if not is_usual or len(self._parts) >= _MOST_SIZES or None in self._parts.values():
            return None
        self._parts[kind] = None
        mode = FakeTensorMode()
        examples = [mode.from_tensor(tensor) for tensor in arguments]
        self._in_background(lambda: self._compile(kind, mode, examples))
        return self._parts[kind]

    def give_up(self, error: Exception) -> None:
        """Run uncompiled from now on, and say why."""
        if not self._has_failed:
            told = (str(error).strip().splitlines() or [""])[0]
            self._warn(
                "the stage cannot be compiled here, so it runs uncompiled: as exact, but slower "
                f"({type(error).__name__}: {told:.200})"
            )
        self._has_failed = True

    def _compile(self, kind: "_Kind", mode: FakeTensorMode, examples: list[Any]) -> None:
        try:
            self._parts[kind] = _compile_parts(self._stage, mode, examples, self._compile_part)
        except Exception as error:  # a compiler may raise anything, and training goes on
            self.give_up(error)


def _compile_parts(
    stage: TracedStage, mode: FakeTensorMode, examples: list[Any], compile_part: Compiler
) -> CompiledParts:
    def compiled(part: fx.GraphModule) -> CompiledPart:
        given = [node.meta["val"] for node in _given(part)]
        with torch.no_grad():
            return compile_part(part, given)

    joint, outputs, found, names = _trace(stage, mode, examples)
    num_shown, given = len(outputs), _given(joint)
    if not found and not names:  # all is frozen, up to here
        forward = _extract(joint, given[: len(examples)], _ends(joint))
        return CompiledParts(compiled(forward), None, None, num_shown, (), (), ())
    forward, backward = min_cut_rematerialization_partition(
        joint, [node.meta["val"] for node in given], num_fwd_outputs=num_shown
    )
    named = {node.name: node for node in _given(backward)}
    kept = [node.name for node in _ends(forward)[num_shown:]]
    taken = tuple(value for value in stage.outputs if f"tangents_{value}" in named)
    wanted = [*kept, *(f"tangents_{value}" for value in taken), *([_LOSS] if _LOSS in named else [])]
    order = [named[name] for name in wanted]
    assert len(order) == len(named), "the partitioner has an input of its own"
    ends, run_forward = _ends(backward), compiled(forward)
    first, between = None, order
    if found:
        between = _needed_after(backward, ends[: len(found)], ends[len(found) :])
        first = compiled(_extract(backward, order, [*ends[: len(found)], *between]))
    last = compiled(_extract(backward, between, ends[len(found) :])) if names else None
    return CompiledParts(run_forward, first, last, num_shown, taken, found, names, _LOSS in named)


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
