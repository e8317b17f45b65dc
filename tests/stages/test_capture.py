"""What capture promises beside equality: it leaves the module alone, and it says what it found."""

import logging
import random
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ravnest
from ravnest.errors import CaptureError
from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
from ravnest.model.blueprint.program import Blueprint
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import Captured, capture
from ravnest.model.capture.model_with_loss import ModelWithLoss
from ravnest.model.capture.verify import compare
from ravnest.model.stage.program_graph import Setting
from ravnest.model.stage.stage_program import StageOutputs, StageProgram, build_stage_program
from ravnest.model.state.state_dict import Layout, merge_stages
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
            r"test_capture\.py:\d+: the model itself fails on the first batch: KeyError",
        ),
        (None, "returned a tensor without a loss"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused(loss: object, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        capture(Layers(), {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}, loss)


def test_a_column_label_is_told_to_be_renamed() -> None:
    class Classifier(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            out = super().forward(x)
            return {"logits": out} if labels is None else {"loss": F.cross_entropy(out, labels)}

    batch = {"x": torch.randn(4, 8), "label": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(CaptureError, match=r"the data has 'label', and the model wants 'labels'; rename the"):
        capture(Classifier(8, 4), batch)


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
    loss = build_stage_program(found.blueprint).forward(found.state, {}, wide).results["loss"]
    assert torch.allclose(loss, F.mse_loss(model(wide["x"]), wide["y"]))


def test_the_package_offers_capture_without_importing_torch_first() -> None:
    assert ravnest.capture is capture
    blueprint = captured(Layers(), name="layers").blueprint
    assert read_blueprint(write_blueprint(blueprint)) == blueprint
    assert blueprint.name == "layers"


def test_no_stage_needs_the_strides_that_a_value_had_before_it_travelled() -> None:
    class Turned(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8, 4))
            self.out = nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned = self.first(x).transpose(1, 2) * self.scale
            return self.out(turned.transpose(1, 2).view(x.shape[0], -1))

    batch = {"x": torch.randn(4, 4, 8), "y": torch.randn(4, 8)}
    try:
        found = capture(Turned(), batch, lambda out, batch: F.mse_loss(out, batch["y"]))
    except CaptureError as error:
        assert "it fails with RuntimeError" in str(error)  # noqa: PT017 - refused is right, too
        return
    last = found.blueprint.num_positions
    for cut in range(1, last):
        first, second = slice_blueprint(found.blueprint, 0, cut), slice_blueprint(found.blueprint, cut, last)
        sent = build_stage_program(first).forward(found.state, {}, batch).outputs
        received = {
            value: tensor.detach().clone(memory_format=torch.contiguous_format)
            for value, tensor in sent.items()
        }
        assert build_stage_program(second).forward(found.state, received, batch).results["loss"].isfinite()


def test_the_comparison_runs_on_tensors_as_they_arrive() -> None:
    seen: list[torch.Tensor] = []

    class Watched(StageProgram):
        def forward(self, state: dict, inputs: dict, *rest: object, **options: object) -> StageOutputs:
            seen.extend((*state.values(), *inputs.values()))
            return super().forward(state, inputs, *rest, **options)

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, padding=1)
            self.second = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu()).mean((2, 3))

    def loss(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(out, batch["y"])

    model = Images().to(memory_format=torch.channels_last)
    batch = {"x": torch.randn(4, 3, 8, 8), "y": torch.randn(4, 8)}
    found = capture(model, batch, loss, self_test=False)
    whole = ModelWithLoss(model, batch, loss, {}, is_tuple=False, inputs=None)
    compare(whole, found.blueprint, found.state, batch, lambda *given: Watched(given[0], Setting(given[1])))
    assert len(seen) > len(model.state_dict())
    assert all(tensor.is_contiguous() for tensor in seen)


class Weighted(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(out, batch["y"]) * torch.exp(-self.w) + self.w


def test_the_loss_keeps_its_state_apart_from_the_models() -> None:
    class Scaled(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.Module()
            self.loss.w = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.loss.w

    model = Scaled()
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    found = capture(model, batch, Weighted())
    assert {"loss.w", "job_loss.w"} <= found.state.keys()
    assert found.state["loss.w"] is model.loss.w
    model.load_state_dict(merge_stages([found.state], found.blueprint), strict=True)


def test_constants_of_other_types_stay_apart() -> None:
    class Doubled(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x * (torch.tensor([2.0]) if self.training else torch.tensor([2])))

    dtypes = {entry.dtype for entry in captured(Doubled()).blueprint.state if entry.kind == "constant"}
    assert dtypes == {"float32", "int64"}


def test_plain_attributes_are_left_as_they_were() -> None:
    class Lazy(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "mask"):
                self.mask = torch.ones(8)
            return self.last(x * self.mask)

    model = Lazy()
    captured(model)
    assert not hasattr(model, "mask")


def test_other_threads_draw_log_and_write_while_a_model_is_exported(caplog, capsys):
    begun, heard = threading.Event(), threading.Event()

    class Waiting(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begun.set()
            assert heard.wait(60)
            logging.getLogger("capture").warning("of the model")
            sys.stderr.write("of the model")
            return super().forward(x)

    def live() -> None:
        begun.wait()
        try:
            random.random()
            logging.getLogger("hub").warning("of the hub")
            sys.stderr.write("of the hub")
        finally:
            heard.set()

    hub = threading.Thread(target=live)
    hub.start()
    captured(Waiting(), self_test=False)
    hub.join()
    said = [record.getMessage() for record in caplog.records if record.name in ("hub", "capture")]
    assert said == ["of the hub"]
    assert capsys.readouterr().err == "of the hub"
