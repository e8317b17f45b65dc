"""What capture promises beside equality: it leaves the module alone, and it says what it found."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ravnest
from ravnest.errors import CaptureError
from ravnest.model.blueprint import Blueprint
from ravnest.model.capture import Captured, capture
from ravnest.model.flat import Layout
from ravnest.model.reading import read_blueprint, write_blueprint
from ravnest.model.rebuild import rebuild
from tests.support.model_zoo import FAMILIES


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x))))


def captured(model: nn.Module, **options: object) -> Captured:
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    return capture(model, batch, lambda out, batch: F.mse_loss(out, batch["y"]), **options)


def uses(blueprint: Blueprint, name: str) -> list[dict[str, object]]:
    return [dict(op.arguments) for op in blueprint.train.ops if op.name == name]


def test_the_module_and_the_generators_are_left_as_they_were() -> None:
    model = Layers()
    model.norm.eval()
    model.last.weight.grad = torch.ones(8, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    random.seed(5)
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    copies = {name: field.clone() for name, field in batch.items()}
    states = torch.get_rng_state(), random.getstate()
    capture(model, batch, lambda out, batch: F.mse_loss(out, batch["y"]))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model.last.weight.grad, torch.ones(8, 8))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(torch.equal(copies[name], field) for name, field in batch.items())


def test_the_state_is_the_models_own_by_its_own_names() -> None:
    model = Layers()
    found = captured(model)
    assert {entry.name for entry in found.blueprint.state} == set(model.state_dict())
    assert found.state["first.weight"].data_ptr() == model.first.weight.data_ptr()
    written = {entry.name for entry in found.blueprint.state if entry.is_written}
    assert written == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_two_fields_that_are_one_tensor_stay_two_fields() -> None:
    x = torch.randn(4, 8)
    fields = capture(nn.Linear(8, 8), (x, x), F.mse_loss).blueprint.train.fields
    assert [name for _, name in fields] == ["x", "y"]


def test_a_random_operation_nobody_reads_keeps_its_place() -> None:
    class Wasteful(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            F.dropout(x, 0.5, self.training)
            return self.last(self.drop(self.first(x)))

    assert len(uses(captured(Wasteful()).blueprint, "aten.dropout.default")) == 2


def test_frozen_parameters_are_kept_but_not_averaged() -> None:
    model = Layers()
    model.first.requires_grad_(False)
    blueprint = captured(model).blueprint
    averaged = {entry.name for entry in Layout.of(blueprint).entries}
    assert "first.weight" in {entry.name for entry in blueprint.state}
    assert averaged == {
        "last.weight",
        "last.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    }


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda out, batch: batch["x"].mean(), "does not depend on any parameter"),
        (lambda out, batch: torch.tensor(1.0), "does not depend on any parameter"),
        (lambda out, batch: (out - batch["y"]) ** 2, "a tensor of batch x 8"),
        (
            lambda out, batch: F.mse_loss(out, batch["z"]),
            r"test_capture\.py:\d+ cannot be captured: KeyError",
        ),
        (None, "returned a tensor without a loss"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused(loss: object, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        capture(Layers(), {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}, loss)


def test_a_causal_model_without_padding_builds_no_mask() -> None:
    entry = FAMILIES["gpt2"]
    batch = dict(entry.batch())
    assert "attention_mask" not in batch
    calls = uses(capture(entry.model(), batch).blueprint, "aten.scaled_dot_product_attention.default")
    assert all(call.get("is_causal") is True and call.get("attn_mask") is None for call in calls)


def test_is_padded_false_drops_the_mask() -> None:
    entry = FAMILIES["llama"]
    batch = dict(entry.batch())
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    found = capture(entry.model(), batch, is_padded=False)
    assert "attention_mask" not in {name for _, name in found.blueprint.train.fields}
    calls = uses(found.blueprint, "aten.scaled_dot_product_attention.default")
    assert all(call.get("is_causal") is True for call in calls)


def test_a_batch_of_one_is_enough() -> None:
    batch = {"x": torch.randn(1, 8), "y": torch.randn(1, 8)}
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    found = capture(model, batch, lambda out, batch: F.mse_loss(out, batch["y"]))
    wide = {"x": torch.randn(5, 8), "y": torch.randn(5, 8)}
    loss = rebuild(found.blueprint).forward(found.state, {}, wide).results["loss"]
    assert torch.allclose(loss, F.mse_loss(model(wide["x"]), wide["y"]))


def test_the_package_offers_capture_without_importing_torch_first() -> None:
    assert ravnest.capture is capture
    blueprint = captured(Layers(), name="layers").blueprint
    assert read_blueprint(write_blueprint(blueprint)) == blueprint
    assert blueprint.name == "layers"
