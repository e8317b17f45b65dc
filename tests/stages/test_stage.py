"""Stages of real models: alone one after the other, and with many batches in flight."""

import dataclasses
import functools
import gc
import math
import weakref

import pytest
import torch
from support.line_of_stages import Line, Traffic, make_stage, mean_loss, roles_of
from support.model_zoo import FAMILIES, NUM_TOKENS, VOCABULARY, OwnGPT, fields_of, token_loss
from support.stage_runner import subject
from torch import nn

from ravnest.config import OptimizerKind as OptimizerName
from ravnest.engine.optimizers import Group, OptimizerSettings, Sgd
from ravnest.engine.recipe import from_torch, make_settings
from ravnest.engine.stage import DroppedWork, PassedOn, Roles, StageEngine
from ravnest.engine.weight_versions import Snapshot
from ravnest.errors import ProtocolError, RavnestError
from ravnest.model.capture.capture import capture
from ravnest.model.stage.profile import find_matrices
from ravnest.model.stage.program_graph import Setting
from ravnest.model.stage.stage_program import StageProgram, build_stage_program

RATE = 1e-3


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tensors of a few hundred numbers: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def _captured():
    """A GPT of four blocks whose head is its own, so that no weight is tied."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OwnGPT(width=32, num_blocks=4, dropout=0.0)
        model.head = nn.Linear(32, VOCABULARY, bias=False)
    return capture(model, text_batch(0), token_loss, self_test=False)


@functools.cache
def transitions():
    generator = torch.Generator().manual_seed(1)
    return torch.softmax(3 * torch.randn(VOCABULARY, VOCABULARY, generator=generator), -1)


def text_batch(seed, num_samples=8):
    """Text of a language in which each letter depends on the one before."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (num_samples, 1), generator=generator)
    for _ in range(NUM_TOKENS):
        following = torch.multinomial(transitions()[tokens[:, -1]], 1, generator=generator)
        tokens = torch.cat([tokens, following], 1)
    return {"ids": tokens[:, :-1].clone(), "y": tokens[:, 1:].clone()}


def cuts_at_blocks(*blocks):
    state = _captured().blueprint.state
    return [
        min(entry.positions[0] for entry in state if entry.name.startswith(f"blocks.{block}."))
        for block in blocks
    ]


def settings_for(name, rate=RATE, planned_updates=0):
    blueprint = _captured().blueprint
    shapes = {entry.name: entry.shape for entry in blueprint.state if entry.is_trainable}
    return make_settings(name, rate, shapes, find_matrices(blueprint), planned_updates)


def plain_sgd(names):
    return OptimizerSettings((Group(tuple(names), Sgd()),), 0.1)


def make_line(name=OptimizerName.ADAMW, **options):
    return Line(_captured(), cuts_at_blocks(1, 2, 3), settings_for(name), **options)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- one batch after the other


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("family", ["own_gpt", "resnet"])
def test_window_one_equals_a_single_process_bit_for_bit(family, splits):
    """Dropout, tied weights and running statistics included."""
    model = subject(family)
    third = model.num_positions // 3
    alone = model.alone()
    optimizer = torch.optim.AdamW(alone.model.parameters(), lr=RATE)
    settings = from_torch(optimizer, dict(alone.parameters()))
    line = Line(model.captured, [third - 1, 2 * third], settings, splits=splits)
    for number in range(20):
        batch = FAMILIES[family].batch(seed=100 + number % 4)
        loss = alone.step(batch, seed=number).loss
        optimizer.step()
        torch.manual_seed(number)
        assert torch.equal(line.step(number, fields_of(batch), RATE), loss), number
    state = line.state()
    assert all(torch.equal(state[name], tensor) for name, tensor in alone.parameters())
    assert all(torch.equal(state[name], tensor) for name, tensor in alone.buffers().items() if name in state)
    assert all(stage.num_live_versions == 1 for stage in line.stages)
    fields = fields_of(FAMILIES[family].batch(seed=7))
    assert torch.equal(line.evaluate(fields), alone.evaluate(FAMILIES[family].batch(seed=7)).loss)


def test_recomputing_activations_gives_the_same_bits():
    kept, recomputed = make_line(), make_line(recompute=True, splits=False)
    for number in range(3):
        assert torch.equal(
            kept.step(number, text_batch(number), RATE), recomputed.step(number, text_batch(number), RATE)
        )
    assert same(kept.state(), recomputed.state())


def test_an_update_applies_the_mean_of_its_batches():
    names = [entry.name for entry in _captured().blueprint.state if entry.is_trainable]
    whole, parts = (Line(_captured(), cuts_at_blocks(2), plain_sgd(names)) for _ in range(2))
    halves = [{k: v[rows] for k, v in text_batch(3).items()} for rows in (slice(0, 4), slice(4, 8))]
    for number, half in enumerate(halves):
        parts.forward(number, half)
    for number in range(2):
        parts.backward(number)
    reports = [stage.update(0.1) for stage in parts.stages]
    assert [(report.version, report.refusal) for report in reports] == [(1, None)] * 2
    whole.step(0, text_batch(3), 0.1)
    one, other = whole.state(), parts.state()
    for name in names:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6)


def test_a_straggler_weighs_less():
    names = [entry.name for entry in _captured().blueprint.state if entry.is_trainable]
    moved = []
    for weight in (1.0, 0.5):
        stage = make_stage(_captured(), 0, _captured().blueprint.num_positions, plain_sgd(names))
        before = stage.snapshot().state
        assert isinstance(stage.forward(0, {}, text_batch(0)), PassedOn)
        assert stage.backward_inputs(0, {}) == {}
        assert stage.backward_weights(0, weight) is None
        stage.update(0.1)
        moved.append(stage.snapshot().state["head.weight"] - before["head.weight"])
    torch.testing.assert_close(moved[1], moved[0] / 2, rtol=1e-4, atol=1e-7)


def test_a_tied_weight_moves_only_when_the_sum_comes():
    model = subject("own_gpt")
    third = model.num_positions // 3
    names = [entry.name for entry in model.captured.blueprint.state if entry.is_trainable]
    line = Line(model.captured, [third - 1, 2 * third], plain_sgd(names))
    first = line.stages[0]
    line.forward(0, fields_of(model.sample.batch))
    line.backward(0)
    taken = first.take_shared_gradients()
    assert list(taken) == ["tokens.weight"]
    before = first.snapshot().state
    first.update(0.1)
    after = first.snapshot().state
    assert torch.equal(after["tokens.weight"], before["tokens.weight"])
    assert not torch.equal(after["places.weight"], before["places.weight"])
    line.forward(1, fields_of(model.sample.batch))  # it keeps the weights it saw
    assert first.step_shared("tokens.weight", taken["tokens.weight"].clone(), 0.1) is None
    assert torch.equal(first._versions.seen["tokens.weight"], first.snapshot().state["tokens.weight"])
    (held,) = first._versions._held.values()
    assert torch.equal(held["tokens.weight"], before["tokens.weight"])
    moved = before["tokens.weight"] - 0.1 * taken["tokens.weight"]
    torch.testing.assert_close(first.snapshot().state["tokens.weight"], moved)


# --- many batches in flight


@pytest.mark.parametrize(
    ("name", "accumulate", "recompute"),
    [
        (OptimizerName.ADAMW, 1, False),
        (OptimizerName.ADAMW, 2, False),
        (OptimizerName.ADAMW, 1, True),
        (OptimizerName.MUON, 1, False),
    ],
)
def test_each_gradient_is_that_of_the_weights_its_forward_saw(name, accumulate, recompute):
    captured = _captured()
    line = make_line(name, recompute=recompute, splits=not recompute)
    traffic = Traffic(line, window=4, accumulate=accumulate)
    batches = {number: text_batch(number) for number in range(16)}
    seen = {number: {} for number in batches}
    waiting = {place: [] for place in range(4)}
    updates = []

    def look(_place, batch, stage):
        seen[batch].update({k: v.detach().clone() for k, v in stage._versions.seen.items()})

    def take(place, _batch, stage):
        means = {name: total / stage._num_microbatches for name, total in stage._sums.items()}
        updates.append((tuple(waiting[place]), means))
        waiting[place].clear()

    traffic.before_forward, traffic.before_update = look, take
    backward = traffic.go_back
    traffic.go_back = lambda place, batch, values: (
        waiting[place].append(batch),
        backward(place, batch, values),
    )
    traffic.run(batches, lambda _: 4e-3)

    program = build_stage_program(captured.blueprint)
    alone = {}
    for number, fields in batches.items():
        state = {k: v.detach() for k, v in captured.state.items()} | seen[number]
        leaves = {k: v.clone().requires_grad_() for k, v in seen[number].items()}
        loss = program.forward({**state, **leaves}, {}, fields).results["loss"]
        assert loss.item() == traffic.losses[number]
        alone[number] = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert len(updates) == 4 * 16 // accumulate
    for members, gradients in updates:
        assert len(members) == accumulate
        for parameter, gradient in gradients.items():
            truth = sum(alone[number][parameter] for number in members) / accumulate
            torch.testing.assert_close(gradient, truth, rtol=1e-5, atol=1e-7)
    assert max(traffic.lags[0]) == (3 if accumulate == 1 else 2)


@pytest.mark.parametrize("name", [OptimizerName.ADAMW, OptimizerName.MUON])
def test_versions_are_bounded_by_lag_and_freed(name):
    line = make_line(name)
    traffic = Traffic(line, window=4)
    traffic.run({number: text_batch(number) for number in range(12)}, lambda _: RATE)
    is_predicted = name is OptimizerName.MUON
    for place, lags in enumerate(traffic.lags):
        # With prediction, forwards see copies of the current weights.
        extra = 1 if is_predicted and max(lags) else 0
        assert traffic.most_versions[place] <= 1 + max(lags) + extra, place
        assert line.stages[place].num_live_versions == 1 + extra
    assert traffic.most_versions[0] == 4 + is_predicted
    assert traffic.most_versions[-1] == 1


def test_without_batches_in_flight_weights_are_updated_in_place():
    stage = make_stage(_captured(), 0, _captured().blueprint.num_positions, settings_for(OptimizerName.ADAMW))
    places = {name: tensor.data_ptr() for name, tensor in stage._versions.weights.items()}
    run_alone(stage, 0)
    assert places == {name: tensor.data_ptr() for name, tensor in stage._versions.weights.items()}
    stage.forward(1, {}, text_batch(1))
    run_alone(stage, 2)
    moved = {name: tensor.data_ptr() for name, tensor in stage._versions.weights.items()}
    assert all(places[name] != moved[name] for name in places)
    (held,) = stage._versions._held.values()
    old = weakref.ref(held["head.weight"])
    del held
    gc.disable()
    try:
        stage.backward_inputs(1, {})
        stage.backward_weights(1)
        assert old() is None
    finally:
        gc.enable()


def run_alone(stage, number):
    assert isinstance(stage.forward(number, {}, text_batch(number)), PassedOn)
    assert stage.backward_inputs(number, {}) == {}
    assert stage.backward_weights(number) is None
    return stage.update(RATE)


def test_evaluation_uses_the_current_weights_not_the_predicted_ones():
    line = make_line(OptimizerName.MUON)
    Traffic(line, window=4).run({number: text_batch(number) for number in range(8)}, lambda _: 1e-2)
    truth = build_stage_program(_captured().blueprint).forward(
        line.state(), {}, text_batch(9), training=False
    )
    assert torch.equal(line.evaluate(text_batch(9)), truth.results["loss"])


def test_lag_is_measured_and_forgotten_with_the_window():
    line = make_line(OptimizerName.MUON)
    Traffic(line, window=4).run({number: text_batch(number) for number in range(40)}, lambda _: RATE)
    assert line.stages[0].lag == 3.0
    assert line.stages[-1].lag == 0.0
    assert (
        line.stages[0]._versions.seen["places.weight"]
        is not line.stages[0]._versions.weights["places.weight"]
    )
    for number in range(40, 80):
        line.step(number, text_batch(number), RATE)
    stage = line.stages[0]
    assert stage.lag == 0.0
    assert all(stage._versions.seen[name] is tensor for name, tensor in stage._versions.weights.items())


def narrow_stage(name=OptimizerName.MUON):
    """A stage that shows its forwards bf16 of the matrices."""
    stop = _captured().blueprint.num_positions
    wide = make_stage(_captured(), 0, stop, settings_for(name))
    matrices = frozenset(key for key, tensor in wide.state.items() if tensor.dim() == 2)
    roles = dataclasses.replace(roles_of(_captured().blueprint), narrow=matrices)
    program = build_stage_program(_captured().blueprint)
    return wide, StageEngine(program, wide.snapshot(), roles, settings_for(name)), matrices


def test_a_narrow_stage_sums_wide_and_trains_as_the_wide_one_does():
    wide, narrow, matrices = narrow_stage()
    for update in range(6):
        for stage in (wide, narrow):
            for part in range(2):
                number = 2 * update + part
                stage.forward(number, {}, text_batch(number))
                stage.backward_inputs(number, {})
                stage.backward_weights(number)
                widths = {stage.summed.sums[name].dtype for name in matrices}
                assert widths == {torch.float32 if stage is wide or part else torch.bfloat16}
            stage.update(RATE)
    start = make_stage(_captured(), 0, _captured().blueprint.num_positions, settings_for(OptimizerName.MUON))
    for name in matrices:
        moved = (wide.state[name] - start.state[name]).norm()
        assert 0 < (narrow.state[name] - wide.state[name]).norm() < 0.05 * moved, name


def test_a_narrow_stage_keeps_bf16_for_batches_in_flight_and_changes_its_weights_in_place():
    _, stage, matrices = narrow_stage()
    places = {name: stage.state[name].data_ptr() for name in matrices}
    for number in range(3):
        stage.forward(number, {}, text_batch(number))
    for number in range(3):
        stage.backward_inputs(number, {})
        stage.backward_weights(number)
        stage.update(RATE)
        stage.forward(number + 3, {}, text_batch(number + 3))
    assert places == {name: stage.state[name].data_ptr() for name in matrices}
    assert stage.num_live_versions == 1 + 3
    held = [version[name] for version in stage._versions._held.values() for name in matrices]
    assert {tensor.dtype for tensor in held} == {torch.bfloat16}
    stage.forget_prediction()
    assert all(stage._versions.seen[name] is stage._versions.weights[name] for name in matrices)


class Counting:
    """Multiplies by a buffer that every forward writes, so autograd saves the buffer."""

    def forward(self, state, inputs, fields, *, training, key):
        state["count"].add_(1)
        return PassedOn({}, {"loss": (fields["x"] * state["w"] * state["count"]).sum()})


def test_a_backward_finds_the_buffers_as_its_forward_left_them():
    roles = Roles(frozenset({"w"}), frozenset({"count"}))
    state = {"w": torch.tensor([2.0]), "count": torch.zeros(1)}
    stage = StageEngine(Counting(), Snapshot(0, state, {}), roles, plain_sgd(["w"]))
    for number in range(3):
        assert isinstance(stage.forward(number, {}, {"x": torch.ones(1)}), PassedOn)
    gradients = []
    for number in range(3):
        stage.backward_inputs(number, {})
        assert stage.backward_weights(number) is None
        gradients.append(stage._sums["w"].item())
    assert gradients == [1.0, 1.0 + 2.0, 1.0 + 2.0 + 3.0]
    assert stage.snapshot().state["count"].item() == 3


# --- staying whole


def test_a_stage_goes_on_from_its_snapshot():
    settings = settings_for(OptimizerName.MUON)
    stop = _captured().blueprint.num_positions
    one = make_stage(_captured(), 0, stop, settings)
    for number in range(3):
        run_alone(one, number)
    kept = one.snapshot()
    assert kept.version == 3
    again = {k: v.clone() for k, v in kept.state.items()}
    optimizer = {k: v.clone() for k, v in kept.optimizer.items()}
    other = StageEngine(
        build_stage_program(_captured().blueprint), Snapshot(3, again, kept.optimizer), one._roles, settings
    )
    for number in range(3, 6):
        run_alone(one, number)
        run_alone(other, number)
    assert other.version == one.version == 6
    assert same(one.snapshot().state, other.snapshot().state)
    assert same(one.snapshot().optimizer, other.snapshot().optimizer)
    assert not same(one.snapshot().state, kept.state)
    assert same(kept.optimizer, optimizer)


def test_adding_an_average_leaves_batches_in_flight_alone():
    stop = _captured().blueprint.num_positions
    one, other = (make_stage(_captured(), 0, stop, settings_for(OptimizerName.ADAMW)) for _ in range(2))
    for stage in (one, other):
        stage.forward(0, {}, text_batch(0))
    generator = torch.Generator().manual_seed(3)
    change = {"head.weight": torch.randn(VOCABULARY, 32, generator=generator)}
    before = one.evaluate(0, {}, text_batch(1)).results["loss"]
    one.add(change)
    assert one.evaluate(0, {}, text_batch(1)).results["loss"] != before
    for stage in (one, other):
        stage.backward_inputs(0, {})
        stage.backward_weights(0)
    assert same(one._sums, other._sums)
    moved = one.snapshot().state["head.weight"] - other.snapshot().state["head.weight"]
    torch.testing.assert_close(moved, change["head.weight"])


def test_frozen_parameters_and_those_in_no_group_stay():
    captured = _captured()
    stop = captured.blueprint.num_positions
    stage = make_stage(captured, 0, stop, plain_sgd(["head.weight"]))
    before = stage.snapshot().state
    run_alone(stage, 0)
    changed = [
        name for name, tensor in stage.snapshot().state.items() if not torch.equal(tensor, before[name])
    ]
    assert changed == ["head.weight"]


def test_evaluation_changes_nothing():
    model = subject("resnet")
    names = [entry.name for entry in model.captured.blueprint.state if entry.is_trainable]
    stage = make_stage(model.captured, 0, model.num_positions, plain_sgd(names))
    before = stage.snapshot()
    results = stage.evaluate(0, {}, fields_of(model.sample.batch)).results
    assert set(results) == {"loss", "accuracy"}
    assert not results["loss"].requires_grad
    assert same(stage.snapshot().state, before.state)


# --- how noisy gradients are


class _Lines:
    """A stage of three weights whose loss is the mean of w * x over samples: each x is a gradient."""

    def forward(self, state, inputs, fields, *, training, key):
        shared = state["tied"] * fields["x"][:, :1]
        return PassedOn({}, {"loss": (state["w"] * fields["x"]).sum(1).mean() + shared.mean()})


def test_the_noise_of_a_stage_is_that_of_its_samples_gradients():
    roles = Roles(frozenset({"w", "tied"}), shared=frozenset({"tied"}))
    state = {"w": torch.zeros(3), "tied": torch.zeros(1)}
    stage = StageEngine(_Lines(), Snapshot(0, state, {}), roles, plain_sgd(["w", "tied"]))
    x = 1.0 + 2.0 * torch.randn(400, 12, 3, generator=torch.Generator().manual_seed(0))
    for update, batch in enumerate(x):
        for part, samples in enumerate(batch.split(4)):
            stage.forward(3 * update + part, {}, {"x": samples})
            stage.backward_inputs(3 * update + part, {})
            stage.backward_weights(3 * update + part, 1.0, 4)
        stage.take_shared_gradients()
        stage.update(0.0)
    assert stage.noise.variance == pytest.approx(3 * 4.0, rel=0.2)
    assert stage.noise.signal == pytest.approx(3.0, rel=0.3)


# --- numbers that are not finite


class Toy:
    """A stage of one weight: passes x * w on, or ends with it as the loss."""

    def __init__(self, is_last=False):
        self.is_last = is_last

    def forward(self, state, inputs, fields, *, training, key):
        state["count"].add_(1)
        value = inputs[1] * state["w"]
        if self.is_last:
            return PassedOn({}, {"loss": torch.sqrt(value).sum()})
        return PassedOn({2: value}, {})


def toy_stage(is_last=False, weight=2.0):
    roles = Roles(frozenset({"w"}), frozenset({"count"}), inputs=frozenset({1}))
    state = {"w": torch.tensor([weight]), "count": torch.zeros(1)}
    return StageEngine(Toy(is_last), Snapshot(5, state, {}), roles, plain_sgd(["w"]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_forward_that_is_not_finite_is_dropped(bad):
    stage = toy_stage()
    before = stage.snapshot()
    dropped = stage.forward(3, {1: torch.tensor([1.0, bad])}, {})
    assert dropped == DroppedWork(3, "forward", "value 2 is not finite")
    assert same(stage.snapshot().state, before.state)
    assert isinstance(stage.forward(3, {1: torch.ones(2)}, {}), PassedOn)
    assert stage.snapshot().state["count"].item() == 1


def test_a_batch_norm_of_a_single_sample_is_dropped_before_its_variance_is_no_number():
    """Else the weights could not be kept in the end, and all would be trained again for ever."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    batch = (torch.randn(6, 3), torch.randn(6, 1))
    captured = capture(model, batch, nn.functional.mse_loss, self_test=False)
    names = [entry.name for entry in captured.blueprint.state if entry.is_trainable]
    stage = make_stage(captured, 0, captured.blueprint.num_positions, plain_sgd(names))
    before = stage.snapshot()
    whole = fields_of(batch)
    dropped = stage.forward(0, {}, {name: field[:1] for name, field in whole.items()})
    assert isinstance(dropped, DroppedWork)
    assert dropped.reason == (
        "buffer '1.running_var' would not be finite; a batch norm needs two values or more per channel"
    )
    assert same(stage.snapshot().state, before.state)
    assert isinstance(stage.forward(0, {}, whole), PassedOn)


def test_a_mask_may_be_minus_infinity():
    assert isinstance(toy_stage().forward(0, {1: torch.tensor([1.0, -math.inf])}, {}), PassedOn)


def test_a_loss_that_is_not_finite_is_dropped():
    dropped = toy_stage(is_last=True).forward(4, {1: torch.tensor([-1.0])}, {})
    assert dropped == DroppedWork(4, "forward", "the loss is nan")


@pytest.mark.parametrize(
    ("received", "gradient", "reason"),
    [
        (1.0, math.nan, "the gradient of value 1 is not finite"),
        (3e38, 5.0, "the gradient of 'w' is not finite"),
    ],
)
def test_a_backward_that_is_not_finite_is_dropped(received, gradient, reason):
    stage = toy_stage(weight=0.5)
    good, bad = torch.ones(2), torch.tensor([received, received])
    stage.forward(0, {1: good}, {})
    stage.forward(1, {1: bad}, {})
    stage.backward_inputs(0, {2: torch.ones(2)})
    stage.backward_weights(0)
    found = stage.backward_inputs(1, {2: torch.full((2,), gradient)})
    dropped = found if isinstance(found, DroppedWork) else stage.backward_weights(1)
    assert dropped == DroppedWork(1, "backward", reason)
    report = stage.update(0.1)
    assert (report.version, report.refusal) == (6, None)
    assert stage.snapshot().state["w"].item() == pytest.approx(0.5 - 0.1 * 2)


class Failing(torch.autograd.Function):
    """Fails in the backward."""

    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        raise ValueError("no such gradient\nand more about it")


class Fragile:
    """Fails for what a microbatch brings, as torch does."""

    def forward(self, state, inputs, fields, *, training, key):
        if "fails" in fields:
            raise fields["fails"]
        value = inputs[1] * state["w"]
        return PassedOn({2: Failing.apply(value) if "late" in fields else value}, {})


def fragile_stage(splits=True):
    roles = Roles(frozenset({"w"}), inputs=frozenset({1}))
    return StageEngine(
        Fragile(), Snapshot(0, {"w": torch.tensor([2.0])}, {}), roles, plain_sgd(["w"]), splits
    )


@pytest.mark.parametrize(
    "error",
    [IndexError("Target 5 is out of bounds."), RuntimeError("Target 5 is out of bounds\nmore"), ValueError()],
)
def test_a_microbatch_that_fails_is_dropped_with_the_reason(error):
    stage = fragile_stage()
    reason = f"{type(error).__name__}: {'Target 5 is out of bounds' if error.args else ''}"
    assert stage.forward(3, {1: torch.ones(2)}, {"fails": error}) == DroppedWork(3, "forward", reason)
    assert stage.evaluate(4, {1: torch.ones(2)}, {"fails": error}) == DroppedWork(4, "evaluation", reason)
    assert isinstance(stage.forward(3, {1: torch.ones(2)}, {}), PassedOn)


@pytest.mark.parametrize("splits", [True, False])
def test_a_backward_that_fails_is_dropped_and_leaves_nothing(splits):
    stage = fragile_stage(splits)
    stage.forward(0, {1: torch.ones(2)}, {"late": torch.ones(1)})
    found = stage.backward_inputs(0, {2: torch.ones(2)})
    assert found == DroppedWork(0, "backward", "ValueError: no such gradient")
    assert stage.num_live_versions == 1
    assert stage.update(0.1).refusal == "no microbatch was left to learn from"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("tried 8 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_too_little_memory_is_no_fault_of_the_samples(error):
    with pytest.raises(RavnestError, match="too little memory for its stage"):
        fragile_stage().forward(0, {1: torch.ones(2)}, {"fails": error})


def test_a_gpu_that_runs_nothing_more_is_told():
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    assert fragile_stage().forward(0, {1: torch.ones(2)}, {"fails": error}).has_lost_device


def test_a_stage_with_nothing_to_train_still_counts():
    roles = Roles(frozenset(), frozenset({"count"}), inputs=frozenset({1}))
    state = {"w": torch.tensor([2.0]), "count": torch.zeros(1)}
    stage = StageEngine(Toy(), Snapshot(0, state, {}), roles, plain_sgd(["other"]))
    for number in range(2):
        stage.forward(number, {1: torch.ones(2)}, {})
        found = stage.backward_inputs(number, {2: torch.ones(2)})
        assert found[1].tolist() == [2.0, 2.0]
        assert stage.backward_weights(number) is None
    report = stage.update(0.1)
    assert (report.version, report.refusal) == (1, None)


def test_an_update_without_batches_counts_and_changes_nothing():
    stage = toy_stage()
    before = stage.snapshot()
    report = stage.update(0.1)
    assert report.version == 6
    assert report.refusal == "no microbatch was left to learn from"
    assert same(stage.snapshot().state, before.state)


def test_a_sum_that_overflows_is_refused_by_the_update():
    stage = toy_stage()
    for number in range(2):
        stage.forward(number, {1: torch.ones(1)}, {})
    for number in range(2):
        stage.backward_inputs(number, {2: torch.tensor([1.6e38])})
        assert stage.backward_weights(number, 2.0) is None
    before = stage.snapshot()
    report = stage.update(0.1)
    assert "'w' is not finite" in report.refusal
    assert same(stage.snapshot().state, before.state)
    assert stage.version == 6


def test_a_poisoned_batch_is_dropped_and_training_goes_on():
    (first, *_) = cuts_at_blocks(1, 2, 3)

    class Poisoned(StageProgram):
        def forward(self, state, inputs, fields, **options):
            outcome = super().forward(state, inputs, fields, **options)
            if torch.equal(fields["ids"], text_batch(5)["ids"]):
                outcome.outputs.update({k: v * math.inf for k, v in outcome.outputs.items()})
            return outcome

    def build(blueprint, **options):
        return (Poisoned if blueprint.start == first else StageProgram)(blueprint, Setting(**options))

    line = make_line(build=build)
    traffic = Traffic(line, window=4)
    batches = {number: text_batch(number) for number in range(12)}
    traffic.run(batches, lambda _: RATE)
    assert [(place, dropped.microbatch, dropped.where) for place, dropped in traffic.dropped] == [
        (1, 5, "forward")
    ]
    assert sorted(traffic.losses) == [number for number in batches if number != 5]
    assert all(stage.version == 11 for stage in line.stages)
    assert all(math.isfinite(loss) for loss in traffic.losses.values())
    assert all(tensor.isfinite().all() for tensor in line.state().values())


class Sum:
    """Passes x + a + b on: one gradient belongs to the input and to both weights."""

    def forward(self, state, inputs, fields, *, training, key):
        return PassedOn({2: inputs[1] + (state["a"] + state["b"])}, {})


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(("weight", "clip", "moved"), [(1.0, None, [-3.0, -4.0]), (0.5, 1.0, [-0.6, -0.8])])
def test_weights_and_inputs_with_one_gradient_do_not_disturb_each_other(splits, weight, clip, moved):
    roles = Roles(frozenset({"a", "b"}), inputs=frozenset({1}))
    state = {"a": torch.zeros(2), "b": torch.zeros(2)}
    settings = OptimizerSettings((Group(("a", "b"), Sgd()),), 1.0, clip=clip)
    stage = StageEngine(Sum(), Snapshot(0, state, {}), roles, settings, splits)
    sent = []
    for number in range(2):
        stage.forward(number, {1: torch.zeros(2)}, {})
        sent.append(stage.backward_inputs(number, {2: torch.tensor([3.0, 4.0])})[1])
        stage.backward_weights(number, weight)
    stage.update(1.0)
    assert [gradient.tolist() for gradient in sent] == [[3.0, 4.0]] * 2
    after = stage.snapshot().state
    torch.testing.assert_close(after["a"], torch.tensor(moved))
    torch.testing.assert_close(after["b"], torch.tensor(moved))


def test_the_mean_of_many_batches_is_clipped_though_each_is_short():
    roles = Roles(frozenset({"a", "b"}), inputs=frozenset({1}))
    state = {"a": torch.zeros(2), "b": torch.zeros(2)}
    settings = OptimizerSettings((Group(("a", "b"), Sgd()),), 1.0, clip=0.5)
    stage = StageEngine(Sum(), Snapshot(0, state, {}), roles, settings)
    for number in range(3):
        stage.forward(number, {1: torch.zeros(2)}, {})
        stage.backward_inputs(number, {2: torch.tensor([0.24, 0.32])})
        stage.backward_weights(number, 2.0)
    stage.update(1.0)
    torch.testing.assert_close(stage.snapshot().state["a"], torch.tensor([-0.3, -0.4]))


def test_a_sum_that_is_not_finite_leaves_a_tied_weight_as_it_is():
    model = subject("own_gpt")
    names = [entry.name for entry in model.captured.blueprint.state if entry.is_trainable]
    first = Line(model.captured, [model.num_positions // 2], plain_sgd(names)).stages[0]
    before = first.snapshot().state["tokens.weight"]
    assert "not finite" in first.step_shared("tokens.weight", before / 0, 0.1).reason
    assert torch.equal(first.snapshot().state["tokens.weight"], before)


@pytest.mark.parametrize("shape", [(3,), (2, 1)])
def test_a_gradient_of_another_shape_is_not_taken(shape):
    stage = toy_stage()
    stage.forward(0, {1: torch.ones(2)}, {})
    with pytest.raises(ProtocolError, match=r"the gradient of value 2 is \(.*, but \(2,\) was sent on"):
        stage.backward_inputs(0, {2: torch.ones(shape)})
    stage.forget(0)
    stage.forget(0)
    assert stage.num_live_versions == 1


# --- learning in spite of lag


NUM_UPDATES = 150
BEST_RATE = 8e-3  # of both optimizers without lag


def rate_at(update):
    """Warm up, then fall along a cosine to a tenth."""
    warm = NUM_UPDATES // 20
    share = max(0.0, (update - warm) / (NUM_UPDATES - warm))
    return BEST_RATE * min(1.0, (update + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * share))


@functools.cache
def final_loss(name, window, predicts=True):
    """Return the loss at the end; a window of 4 gives the stages the lags 3, 3, 2 and 0."""
    settings = settings_for(name, BEST_RATE)
    settings = dataclasses.replace(settings, has_prediction=predicts and settings.has_prediction)
    traffic = Traffic(Line(_captured(), cuts_at_blocks(1, 2, 3), settings, splits=False), window)
    traffic.run({number: text_batch(10 + number) for number in range(NUM_UPDATES)}, rate_at)
    assert max(traffic.lags[0]) == window - 1
    return mean_loss(traffic, last=30)


def cost_of_lag(name):
    return final_loss(name, 4) - final_loss(name, 1)


def test_lag_costs_adamw_much():
    assert cost_of_lag(OptimizerName.ADAMW) > 0.25


def test_lag_costs_the_recipe_far_less():
    assert cost_of_lag(OptimizerName.MUON) < 0.4 * cost_of_lag(OptimizerName.ADAMW)


def test_prediction_wins_back_part_of_the_loss():
    assert final_loss(OptimizerName.MUON, 4) < final_loss(OptimizerName.MUON, 4, predicts=False) - 0.02


# --- where the loss is looked at after the backward


def deferring_stage(program, names=("w",), inputs=(1,)):
    state = {name: torch.tensor([2.0]) for name in names}
    roles = Roles(frozenset(names), inputs=frozenset(inputs))
    return StageEngine(program, Snapshot(0, state, {}), roles, plain_sgd(list(names)), defers=True)


class Root:
    """The root of x * w as the loss, of an input or of a field."""

    def forward(self, state, inputs, fields, *, training, key):
        value = inputs[1] if inputs else fields["x"]
        return PassedOn({}, {"loss": torch.sqrt(value * state["w"]).sum()})


@pytest.mark.parametrize("has_input", [True, False])
def test_a_loss_that_is_no_number_is_found_after_the_backward_and_named_as_before(has_input):
    stage = deferring_stage(Root(), inputs=(1,) if has_input else ())
    bad, good = torch.tensor([-1.0]), torch.tensor([2.0])
    given = ({1: bad}, {}) if has_input else ({}, {"x": bad})
    assert isinstance(stage.forward(0, *given), PassedOn)
    dropped = stage.backward_inputs(0, {})
    if not has_input:
        assert dropped == {}
        dropped = stage.backward_weights(0)
    assert (dropped.where, dropped.reason) == ("forward", "the loss is nan")
    assert stage.update(1.0).refusal == "no microbatch was left to learn from"
    given = ({1: good}, {}) if has_input else ({}, {"x": good})
    assert isinstance(stage.forward(1, *given), PassedOn)
    assert not isinstance(stage.backward_inputs(1, {}), DroppedWork)
    assert stage.backward_weights(1) is None
    assert stage.update(1.0).refusal is None


def test_a_value_that_is_sent_on_is_looked_at_before_it_leaves():
    dropped = deferring_stage(Sum(), ("a", "b")).forward(0, {1: torch.tensor([math.inf])}, {})
    assert (dropped.where, dropped.reason) == ("forward", "value 2 is not finite")


def test_what_a_forward_writes_waits_for_its_loss():
    roles = Roles(frozenset({"w"}), frozenset({"count"}), inputs=frozenset({1}))
    state = {"w": torch.tensor([2.0]), "count": torch.zeros(1)}
    stage = StageEngine(Toy(is_last=True), Snapshot(0, state, {}), roles, plain_sgd(["w"]), defers=True)
    dropped = stage.forward(0, {1: torch.tensor([-1.0])}, {})
    assert dropped.reason == "the loss is nan"
    assert stage.state["count"] == 0
