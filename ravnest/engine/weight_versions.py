"""Weight versions: each microbatch in flight keeps the weights of its forward and the graph of its backward.

An update makes new tensors only where a microbatch still needs the old ones, so autograd never meets a
changed tensor. A backward has two parts: gradients of the inputs, which the stage before needs, then those of
the weights.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A stage's parameters and buffers, and its optimizer's state, at one version."""

    version: int
    state: dict[str, Tensor]
    optimizer: Mapping[str, Tensor]

    def copy(self) -> "Snapshot":
        """Return one that nothing changes any more."""
        parts = ({k: v.clone() for k, v in part.items()} for part in (self.state, self.optimizer))
        return Snapshot(self.version, *parts)


class Versions:
    """The weights of a stage: the current ones, what forwards see of them, and older ones still in use.

    Of the `narrow` ones forwards see bf16: cast, prediction and old version are one tensor.
    """

    def __init__(self, weights: Weights, narrow: Collection[str] = ()) -> None:
        self._held: dict[int, Weights] = {}
        self._num_holds = 0
        self._narrow = frozenset(narrow)
        self.replace(weights, weights)

    @property
    def num_live(self) -> int:
        """Copies of the weights in memory: the current one, a predicted one, older ones in use."""
        kept = (self.weights, self.seen, *self._held.values())
        return max((len({id(weights[name]) for weights in kept}) for name in self.weights), default=0)

    def replace(self, weights: Weights, seen: Weights) -> None:
        """Make these the current weights, and those what forwards see from now on."""
        self.weights = {name: tensor.requires_grad_() for name, tensor in weights.items()}
        self.seen = {name: tensor.requires_grad_() for name, tensor in self._cast_all(seen).items()}

    def see_exactly(self, narrow: Collection[str]) -> None:
        """Let forwards see the current weights, and of these alone bf16."""
        self._narrow = frozenset(narrow)
        self.replace(self.weights, self.weights)

    def _cast_all(self, weights: Weights) -> Weights:
        """Cast those that forwards see narrow; on a GPU in one launch."""
        wide = [name for name, tensor in weights.items() if self._cast_is_due(name, tensor)]
        if not wide or weights[wide[0]].device.type != "cuda":
            return {name: self._cast(name, tensor) for name, tensor in weights.items()}
        narrow = [torch.empty_like(weights[name], dtype=torch.bfloat16) for name in wide]
        with torch.no_grad():
            torch._foreach_copy_(narrow, [weights[name] for name in wide])
        return {**weights, **dict(zip(wide, narrow, strict=True))}

    def _cast_is_due(self, name: str, tensor: Tensor) -> bool:
        return name in self._narrow and tensor.dtype is not torch.bfloat16

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        if not self._cast_is_due(name, tensor):
            return tensor
        return tensor.detach().to(torch.bfloat16)

    @torch.no_grad()
    def add(self, changes: Weights) -> None:
        """Change the current weights and what forwards see of them."""
        held, current, seen = self.find_held(changes), {}, {}
        for name, change in changes.items():
            before = self.weights[name]
            is_seen = self.seen[name] is before
            current[name] = before + change if name in held else before.add_(change)
            seen[name] = current[name] if is_seen else self._cast(name, self.seen[name] + change)
        self.replace(self.weights | current, self.seen | seen)

    def hold(self) -> int:
        """Keep what forwards see now, until it is released by this number."""
        self._num_holds += 1
        self._held[self._num_holds] = self.seen
        return self._num_holds

    def release(self, number: int) -> None:
        """Let go of what was kept under a number."""
        self._held.pop(number, None)

    def find_held(self, names: Collection[str]) -> set[str]:
        """Return those of which a microbatch needs the current tensor as it is."""
        # By tensor, not by version: what gets no gradient goes on into the next version.
        return {name for held in self._held.values() for name in names if held[name] is self.weights[name]}


class Graph:
    """The backward of one microbatch, in two parts; unsplit, the first part does all the work."""

    def __init__(self, inputs: Mapping[int, Tensor], weights: Weights, is_split: bool) -> None:
        self._inputs = inputs
        self._weights = weights
        self._is_split = is_split
        self._left: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ())
        self._branches: dict[Node, list[str]] = {}
        self._caught: dict[Node, tuple[Tensor | None, ...]] = {}
        self._found: dict[str, Tensor | None] = {}

    def backward_inputs(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> dict[int, Tensor]:
        """Take the gradients of the roots, return those of the inputs that have one."""
        if not self._inputs or not roots:
            self._left = (roots, gradients)
            return {}
        early = self._find_branches(roots) if self._is_split else list(self._weights)
        handles = [node.register_prehook(self._catch(node)) for node in self._branches]
        wanted = [*self._inputs.values(), *(self._weights[name] for name in early)]
        found = torch.autograd.grad(roots, wanted, gradients, self._is_split, allow_unused=True)
        for handle in handles:
            handle.remove()
        self._found = dict(zip(early, found[len(self._inputs) :], strict=True))
        pairs = zip(self._inputs, found, strict=False)
        return {value: gradient for value, gradient in pairs if gradient is not None}

    def backward_weights(self) -> Weights:
        """Return the gradients of the weights that have one; the graph is used up."""
        if self._left[0]:
            found = torch.autograd.grad(
                self._left[0], list(self._weights.values()), self._left[1], allow_unused=True
            )
            self._found = dict(zip(self._weights, found, strict=True))
        for node, caught in self._caught.items():
            names = self._branches[node]
            edges = [GradientEdge(node, index) for index, tensor in enumerate(caught) if tensor is not None]
            gradients = [tensor for tensor in caught if tensor is not None]
            weights = [self._weights[name] for name in names]
            found = torch.autograd.grad(edges, weights, gradients, allow_unused=True)
            self._found.update(zip(names, found, strict=True))
        return {name: tensor for name, tensor in self._found.items() if tensor is not None}

    def _catch(self, node: Node) -> Callable[[tuple[Tensor | None, ...]], None]:
        return lambda gradients: self._caught.update({node: gradients})

    def _find_branches(self, roots: Sequence[Tensor]) -> list[str]:
        """Find where weights branch off the way to the inputs; return those that must go along with it.

        These are used by several operations, or lie on a way of their own.
        """
        owners = {get_gradient_edge(tensor).node: name for name, tensor in self._weights.items()}
        leading = {get_gradient_edge(tensor).node for tensor in self._inputs.values()}
        starts = [get_gradient_edge(root).node for root in roots]
        order = _in_order(starts)
        aside: dict[Node, set[str]] = {}  # weights reached from here without the way to the inputs
        for node in order:
            nexts = [after for after, _ in node.next_functions if after is not None]
            if any(after in leading for after in nexts):
                leading.add(node)
            own = {owners[node]} if node in owners else set()
            aside[node] = own.union(*(aside[after] for after in nexts if after not in leading))
        uses = Counter(name for node in order if node in leading for name in aside[node])
        # A start that leads to no input counts twice, so its weights go along.
        uses.update(name for node in starts if node not in leading for name in [*aside[node]] * 2)
        for node in order:
            if node in leading and (names := [name for name in aside[node] if uses[name] == 1]):
                self._branches[node] = names
        return [name for name in self._weights if uses[name] > 1]


def _in_order(starts: Sequence[Node]) -> list[Node]:
    """Return the nodes of a graph, each after all that it leads to."""
    order: dict[Node, None] = {}
    seen: set[Node] = set()
    stack = list(starts)
    while stack:
        node = stack[-1]
        if node in seen:
            order[stack.pop()] = None
        else:
            seen.add(node)
            stack.extend(after for after, _ in node.next_functions if after and after not in seen)
    return list(order)


MakeAgain = Callable[[], Tensor]


class HeldInputs:
    """Inputs of a microbatch that are freed between its forward and its backward, and made again.

    A stage that recomputes needs its inputs twice. They travelled narrow, so it keeps the bytes that came and
    decodes them twice: the same bytes give the same numbers. Tensors stay, without memory. Inputs that share
    memory with what is `passed` on stay as they are.
    """

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
