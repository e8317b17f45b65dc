"""Moments that are kept narrow: right on average, the same in equal copies, and saved without a loss."""

import pytest
import torch

from ravnest.config import StateFormat
from ravnest.engine.moments import SMALL_ITEMS, Blocks, Moments, round_to_bf16
from ravnest.engine.optimizers import Adam, Group, Lion, Muon, NAdam, Optimizer, OptimizerSettings, Sgd

SHAPE = (80, 70)
NUM_UPDATES = 20


def draw(seed, scale=1.0):
    return scale * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def test_rounding_to_bf16_is_right_on_average_and_to_a_neighbour():
    items = draw(0)
    rounded = torch.stack([round_to_bf16(items, update).float() for update in range(512)])
    step = items.abs() * 2.0**-7
    assert ((rounded - items).abs() <= step).all()
    assert (rounded.mean(0) - items).abs().div(step).mean() < 0.02
    assert torch.equal(round_to_bf16(items, 3), round_to_bf16(items.clone(), 3))
    exact = items.bfloat16()
    assert torch.equal(round_to_bf16(exact.float(), 5), exact)


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5600])
def test_blocks_are_right_on_average_and_bf16_holds_them(numel):
    items = draw(1).flatten()[:numel]
    found = [Blocks.of(items, update) for update in range(256)]
    rounded = torch.stack([each.restore() for each in found])
    assert (rounded - items).abs().max() <= items.abs().max() / 63
    assert (rounded.mean(0) - items).abs().mean() < items.abs().max() / 63 / 20
    assert found[0].codes.dtype is torch.int8
    saved = found[0].restore(torch.bfloat16)
    assert torch.equal(saved.float(), rounded[0])
    assert torch.equal(Blocks.of(saved.float()).restore(), rounded[0])


def test_blocks_hold_zeros_and_what_is_very_small_or_large():
    for value in (0.0, 1e-30, 1e30, -127.0):
        items = torch.full((300,), value)
        assert torch.allclose(Blocks.of(items).restore(), items, rtol=0.01, atol=0.0)


def settings(rule, states):
    return OptimizerSettings((Group(("w",), rule),), 1e-2, states=StateFormat(states))


def train(ours, weights, first=0):
    for update in range(first, first + NUM_UPDATES):
        weights = ours.step(weights, {"w": draw(100 + update) + 0.5 * draw(99)}, 1e-2)
    return weights["w"]


RULES = [Sgd(momentum=0.9), Sgd(0.9, nesterov=True), Adam(), NAdam(), Muon(precision="float32")]


@pytest.mark.parametrize("states", ["bf16", "int8"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_narrow_moments_train_almost_as_wide_ones(rule, states):
    start = draw(7)
    wide, narrow = (
        train(Optimizer(settings(rule, each), {"w": start}), {"w": start.clone()})
        for each in ("fp32", states)
    )
    moved = (wide - start).norm()
    assert 0 < (narrow - wide).norm() < (0.01 if states == "bf16" else 0.06) * moved


@pytest.mark.parametrize("states", ["bf16", "int8"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_what_is_saved_goes_on_with_the_same_bits(rule, states):
    one = Optimizer(settings(rule, states), {"w": draw(7)})
    weights = {"w": draw(7)}
    train(one, weights)
    other = Optimizer(settings(rule, states), weights)
    other.load(one.state())
    saved = {"w": weights["w"].clone()}
    assert torch.equal(train(one, weights, NUM_UPDATES), train(other, saved, NUM_UPDATES))


@pytest.mark.parametrize(
    ("states", "first", "square"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("int8", torch.int8, torch.bfloat16),
    ],
)
def test_how_wide_moments_are(states, first, square):
    ours = Optimizer(settings(Adam(), states), {"w": draw(7)})
    train(ours, {"w": draw(7)})
    saved = ours.state()
    assert saved["exp_avg/w"].dtype is (torch.bfloat16 if first is torch.int8 else first)
    assert saved["exp_avg_sq/w"].dtype is square


def test_a_stage_goes_on_with_states_of_another_width():
    one = Optimizer(settings(Adam(), "fp32"), {"w": draw(7)})
    weights = {"w": draw(7)}
    train(one, weights)
    for states in ("bf16", "int8"):
        other = Optimizer(settings(Adam(), states), weights)
        other.load(one.state())
        back = Optimizer(settings(Adam(), "fp32"), weights)
        back.load(other.state())
        found, wanted = back.state()["exp_avg/w"], one.state()["exp_avg/w"]
        assert found.dtype is torch.float32
        assert torch.allclose(found, wanted, atol=float(wanted.abs().max()) / 60)


def test_small_tensors_stay_wide():
    kept = Moments(StateFormat.INT8)
    small = [torch.zeros(SMALL_ITEMS - 1)]
    (opened,) = kept.open("exp_avg", ["w"], small)
    opened.fill_(1 / 3)
    kept.close({"w": 1})
    assert kept.export({})["exp_avg/w"].dtype is torch.float32
    assert kept.open("exp_avg", ["w"], small)[0] is kept.live("exp_avg", ["w"], small)[0]


def test_what_is_exported_is_read_when_it_is_looked_at():
    """A snapshot that is being written keeps no old moments, nor wide ones of all blocks."""
    kept, weights = Moments(StateFormat.INT8), [torch.zeros(SMALL_ITEMS)]

    def update(value: float) -> None:
        kept.open("exp_avg", ["w"], weights)[0].fill_(value)
        kept.close({"w": 1})

    update(1.0)
    exported = kept.export({"step/w": torch.tensor(1.0)})
    update(2.0)
    assert [*exported] == ["exp_avg/w", "step/w"]
    assert len(exported) == 2
    assert exported["exp_avg/w"].unique().tolist() == [2.0]
    assert exported["exp_avg/w"] is not exported["exp_avg/w"]  # blocks are restored each time


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(
    "rule", [Adam(), NAdam(), Sgd(0.9, nesterov=True), Lion()], ids=lambda rule: type(rule).__name__
)
def test_a_large_tensor_is_changed_piece_by_piece_with_the_same_bits(rule, states):
    num_items = 3 * SMALL_ITEMS + 700
    weights = {"w": torch.linspace(-1, 1, num_items).reshape(-1, 4), "small": torch.ones(7)}
    given = OptimizerSettings(
        (Group(("w", "small"), rule, 0.1, True),), 1e-2, has_prediction=True, states=StateFormat(states)
    )
    outcomes = []
    for chunk_items in (1 << 18, SMALL_ITEMS):
        optimizer = Optimizer(given, weights, chunk_items, narrow=["w"])
        now = {name: tensor.clone() for name, tensor in weights.items()}
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            drawn = {name: torch.randn(each.shape, generator=generator) for name, each in now.items()}
            drawn["w"] = drawn["w"].to(torch.bfloat16)
            now = optimizer.step(now, drawn, 1e-2, lag=2.0, held=["w"])
        outcomes.append(
            {
                **now,
                **{f"next {k}": v for k, v in optimizer.take_predicted().items()},
                **{k: v.float() for k, v in optimizer.state().items()},
            }
        )
    whole, cut = outcomes
    assert whole.keys() == cut.keys()
    assert [name for name in whole if not torch.equal(whole[name], cut[name])] == []
