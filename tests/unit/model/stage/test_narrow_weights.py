"""Weights in bf16: a stage computes as with wide numbers, and keeps nothing wide for its backward."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ravnest.model.capture.capture import Captured, capture
from ravnest.model.stage.stage_program import StageProgram, build_stage_program

WIDTH = 32


class Mixed(nn.Module):
    """Uses weights in products, through views, as they are, and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.table(x) * self.scale))
        hidden = self.norm(hidden @ self.second.weight.t()) @ self.second.weight
        return torch.relu(hidden).square().mean()


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return capture(Mixed(), {"x": torch.randint(50, (8, 4))}, lambda out, batch: out)


def narrow(captured: Captured) -> dict[str, Tensor]:
    return {
        name: tensor.detach().bfloat16() if tensor.dim() == 2 else tensor.detach()
        for name, tensor in captured.state.items()
    }


def run(program: StageProgram, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {
        name: tensor.clone().requires_grad_(tensor.is_floating_point()) for name, tensor in state.items()
    }
    batch = {"x": torch.arange(32).view(8, 4)}
    loss = program.forward(leaves, {}, batch, training=True, key=(1, 2)).results["loss"]
    wanted = [name for name, leaf in leaves.items() if leaf.requires_grad]
    found = torch.autograd.grad(loss, [leaves[name] for name in wanted])
    return loss.detach(), dict(zip(wanted, found, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_results_are_those_of_the_wide_numbers(captured: Captured, recompute: bool) -> None:
    program = build_stage_program(captured.blueprint, recompute=recompute)
    given = narrow(captured)
    loss, gradients = run(program, given)
    wanted, exact = run(program, {name: tensor.float() for name, tensor in given.items()})
    assert torch.equal(loss, wanted)
    for name, gradient in gradients.items():
        assert gradient.dtype is given[name].dtype
        torch.testing.assert_close(gradient.float(), exact[name], rtol=2**-7, atol=1e-6)


class Widened(TorchDispatchMode):
    """Remembers the memory of all that was made from bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        found = function(*arguments, **(options or {}))
        if function is torch.ops.aten._to_copy.default and arguments[0].dtype is torch.bfloat16:
            self.storages.append(StorageWeakRef(found.untyped_storage()))
        return found


def test_nothing_wide_is_kept_for_the_backward(captured: Captured) -> None:
    program = build_stage_program(captured.blueprint)
    leaves = {name: tensor.requires_grad_() for name, tensor in narrow(captured).items()}
    with Widened() as widened:
        loss = program.forward(leaves, {}, {"x": torch.arange(32).view(8, 4)}).results["loss"]
    assert loss.requires_grad
    assert len(widened.storages) == 4  # the table, the scale and two matrices: each once
    assert all(storage.expired() for storage in widened.storages)


def test_mixed_precision_uses_a_cast_of_products_alone(captured: Captured) -> None:
    assert build_stage_program(captured.blueprint).castable == frozenset()
    program = build_stage_program(captured.blueprint, autocast=torch.bfloat16)
    assert program.castable == {"first.weight", "first.bias", "second.weight"}
    state = {name: tensor.detach() for name, tensor in captured.state.items()}
    cast = {name: tensor.bfloat16() if name in program.castable else tensor for name, tensor in state.items()}
    (wanted, exact), (loss, gradients) = run(program, state), run(program, cast)
    assert torch.equal(loss, wanted)
    for name, gradient in gradients.items():  # the second matrix is used twice: its sum is rounded once more
        tolerance = 2**-7 if name == "second.weight" else 0.0
        torch.testing.assert_close(gradient.float(), exact[name], rtol=tolerance, atol=0.0)


class Made(TorchDispatchMode):
    """Remembers the memory of all that was made, but for views of what is given."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.storages: list[Any] = []
        self._given = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        found = function(*arguments, **(options or {}))
        if isinstance(found, Tensor) and found.untyped_storage()._cdata not in self._given:
            self.storages.append(StorageWeakRef(found.untyped_storage()))
        return found


def test_a_graph_that_was_not_used_up_is_freed_with_its_microbatch(captured: Captured) -> None:
    """A backward in two parts leaves most of its graph as it was; what autograd saved must not keep it."""
    program = build_stage_program(captured.blueprint)
    leaves = {name: tensor.requires_grad_() for name, tensor in narrow(captured).items()}
    x = torch.arange(32).view(8, 4)
    with Made([x, *leaves.values()]) as made:
        outcome = program.forward(leaves, {}, {"x": x})
    torch.autograd.grad(outcome.results["loss"], [leaves["second.weight"]], retain_graph=True)
    assert not all(storage.expired() for storage in made.storages)
    del outcome
    assert all(storage.expired() for storage in made.storages)
