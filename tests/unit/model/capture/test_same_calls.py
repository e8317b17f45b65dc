"""One export serves training and evaluation where they differ in dropout alone, and nowhere else."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.model.capture.capture import capture
from ravnest.model.capture.model_with_loss import ModelWithLoss
from ravnest.model.capture.same_calls import Dropout, find_dropout

BATCH = {"x": torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))}
Change = Callable[[nn.Module, Tensor], Tensor]


class Body(nn.Module):
    """A small model; `change` is what a user may have put in its middle."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.25), nn.BatchNorm1d(3)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, torch.tanh(self.first(x))).mean()


def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return out + batch["x"].mean()


def find(change: Change) -> tuple[Dropout, ...] | None:
    model = Body(change)
    return find_dropout(ModelWithLoss(model, BATCH, loss, {}, is_tuple=False, inputs=None), BATCH)


def attend(model: nn.Module, x: Tensor) -> Tensor:
    attended = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if model.training else 0.0)
    return attended.transpose(1, 2).contiguous()


def double(model: nn.Module, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(model.training):
        return x * 2


DROPPING = Dropout("aten.dropout.default", (0.25, True), (0.25, False))
ATTENDING = Dropout("aten.scaled_dot_product_attention.default", (0.5,), (0.0,))
SAME: dict[str, tuple[Change, tuple[Dropout, ...]]] = {
    "nothing": (lambda _, x: x, ()),
    "dropout": (lambda model, x: model.drop(x), (DROPPING,)),
    "dropout of what is used again": (lambda model, x: x + model.drop(x), (DROPPING,)),
    "dropout that is never off": (
        lambda _, x: F.dropout(x, 0.25),
        (Dropout("aten.dropout.default", (0.25, True), (0.25, True)),),
    ),
    "dropout in attention": (attend, (ATTENDING,)),
    "both": (lambda model, x: attend(model, model.drop(x)), (DROPPING, ATTENDING)),
    "a write in place": (lambda model, x: model.drop(x).mul_(2.0), (DROPPING,)),
}
OTHER: dict[str, Change] = {
    "an operation less": lambda model, x: x * 2 if model.training else x,
    "a limit that nothing meets": lambda model, x: x if model.training else x.clamp(max=100.0),
    "another number": lambda model, x: x * (2.0 if model.training else 3.0),
    "the same with other values": lambda model, x: x + (model.first.bias if model.training else x),
    "no gradient": lambda model, x: x if model.training else x.detach(),
    "no gradient there": double,
    "batch norm": lambda model, x: model.norm(x),
    "other memory": lambda model, x: model.drop(y := x * 1) + y.mul_(2) if model.training else x * 3,
}


@pytest.mark.parametrize("name", SAME)
def test_what_differs_in_dropout_is_found(name: str) -> None:
    change, expected = SAME[name]
    assert find(change) == expected


@pytest.mark.parametrize("name", OTHER)
def test_what_differs_otherwise_is_not_taken_for_the_same(name: str) -> None:
    assert find(OTHER[name]) is None


def test_the_module_is_left_as_it_was() -> None:
    model = Body(SAME["dropout"][0]).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state()
    find_dropout(ModelWithLoss(model, BATCH, loss, {}, is_tuple=False, inputs=None), BATCH)
    assert not model.training
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["dropout", "dropout in attention", "both"])
def test_evaluation_is_the_program_of_training_without_dropout(name: str) -> None:
    blueprint = capture(Body(SAME[name][0]), BATCH, loss).blueprint
    kinds = [[op.name for op in program.ops] for program in (blueprint.train, blueprint.evaluate)]
    assert kinds[0] == kinds[1]
    settings = {key: value for op in blueprint.evaluate.ops for key, value in op.arguments}
    assert settings.get("train", False) is False
    assert settings.get("dropout_p", 0.0) == 0.0


def test_a_limit_in_evaluation_alone_is_captured_though_no_number_of_the_batch_meets_it() -> None:
    blueprint = capture(Body(OTHER["a limit that nothing meets"]), BATCH, loss).blueprint
    names = [
        {op.name.split(".")[1] for op in program.ops} for program in (blueprint.train, blueprint.evaluate)
    ]
    assert "clamp" not in names[0]
    assert "clamp" in names[1]
