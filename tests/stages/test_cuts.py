"""Cuts in awkward places: strides, early results, values made again, stages of stages, changed weights."""

import logging

import pytest
import torch
import torch.nn.functional as F
from support.stage_runner import subject
from torch import nn

from ravnest.model.blueprint.program import Blueprint
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import Captured, capture, empty_weights
from ravnest.model.stage.dry_run import dry_run
from ravnest.model.stage.stage_program import build_stage_program
from tests.support.model_zoo import FAMILIES


class Layers(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, width)


def captured(model: nn.Module, *shape: int, **metrics: object) -> Captured:
    batch = {"x": torch.randn(4, *shape), "y": torch.randn(4, *shape)}
    return capture(model, batch, lambda out, batch: F.mse_loss(out, batch["y"]), metrics)


def stages(blueprint: Blueprint) -> list[Blueprint]:
    return [slice_blueprint(blueprint, place, place + 1) for place in range(blueprint.num_positions)]


def test_a_view_works_on_what_arrives_without_its_strides() -> None:
    class Turned(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned = self.first(x).transpose(1, 2) * self.middle.weight[0]
            return self.last(turned.transpose(1, 2).contiguous().view(-1, 8).view(x.shape))

    found = captured(Turned(), 8, 8)
    assert "aten.view.default" not in {op.name for op in found.blueprint.train.ops}
    for stage in stages(found.blueprint):
        dry_run(stage, 4, max_bytes=1e8, max_flops=1e9)


def test_a_result_made_early_from_the_batch_alone_reaches_the_last_stage() -> None:
    class Early(Layers):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            share = (x > 0).float().mean()
            return self.last(self.middle(self.first(x))), share

    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    found = capture(
        Early(),
        batch,
        lambda out, batch: F.mse_loss(out[0], batch["y"]),
        {"share": lambda out, batch: out[1]},
    )
    last = stages(found.blueprint)[-1]
    given = torch.zeros(4, 8)
    inputs = {value: given for value in last.train.inputs if last.train.values[value].shape}
    inputs |= {value: torch.tensor(0.5) for value in last.train.inputs if not last.train.values[value].shape}
    assert "share" in build_stage_program(last).forward(found.state, inputs, batch).results


class Meaning(Layers):
    """A small value of the batch that crosses, and a large one that follows from it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=(1, 2), keepdim=True)
        wide = torch.exp(mean.expand(x.shape))
        h = self.first(x) * wide
        h = self.middle(h) * wide + mean
        return self.last(h * wide)


@pytest.mark.parametrize("family", ["own_gpt", "llama", "bert", "t5", "unet", "meaning"])
def test_a_stage_of_a_stage_is_the_stage_of_the_whole(family: str) -> None:
    if family == "meaning":
        blueprint = captured(Meaning(64), 64, 64).blueprint
    else:
        blueprint = subject(family).captured.blueprint
    end = blueprint.num_positions
    for start, stop in ((0, end - 1), (1, end), (end // 3, end - 1)):
        outer = slice_blueprint(blueprint, start, stop)
        for inner in range(start, stop):
            one, other = (
                slice_blueprint(outer, inner, inner + 1),
                slice_blueprint(blueprint, inner, inner + 1),
            )
            assert (one.train, one.evaluate, one.cuts) == (other.train, other.evaluate, other.cuts)


def test_a_mask_is_made_again_in_each_stage_instead_of_crossing() -> None:
    tokens = torch.ones(4, 128, dtype=torch.int64)  # so many that none of the fields is small
    batch = {"input_ids": tokens, "attention_mask": tokens.clone(), "labels": tokens.clone()}
    blueprint = capture(FAMILIES["llama"].model(), batch, self_test=False).blueprint
    middle = slice_blueprint(blueprint, 6, 18)
    assert "attention_mask" in {name for _, name in middle.train.fields}
    assert all(middle.train.values[value].dtype == "float32" for value in middle.train.inputs)


def test_recompute_notices_weights_changed_before_the_backward() -> None:
    class Straight(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    found = captured(Straight(), 8)
    state = {name: tensor.detach().clone().requires_grad_() for name, tensor in found.state.items()}
    fields = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    loss = build_stage_program(found.blueprint, recompute=True).forward(state, {}, fields).results["loss"]
    with torch.no_grad():
        state["last.weight"].mul_(2.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_a_sliding_window_keeps_its_mask() -> None:
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = transformers.MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=4,
        use_cache=False,
    )
    ids = torch.randint(0, 64, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    found = capture(transformers.MistralForCausalLM(config), batch)  # the self-test compares
    with empty_weights():
        model = transformers.MistralForCausalLM(config)
    empty = capture(model, batch).blueprint
    for blueprint in (found.blueprint, empty):
        calls = [dict(op.arguments) for op in blueprint.train.ops if "scaled_dot" in op.name]
        assert all(call.get("attn_mask") is not None for call in calls)
