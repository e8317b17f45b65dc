"""However a model is cut, its stages do exactly what the whole module does: loss, gradients, buffers."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.model_zoo import FAMILIES, PITFALLS
from support.stage_runner import Errors, Outcome, Subject, packed_stages, subject

from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
from ravnest.model.blueprint.slicing import slice_blueprint

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5
MAX_STAGE_BYTES = 64 * 1024
NUM_RANDOM_CUTS = 6
FRACTIONS = {2: (0.3,), 3: (0.2, 0.7), 5: (0.1, 0.25, 0.6, 0.8)}

# Tensors of a few hundred numbers: more threads would only wait for each other.
pytestmark = pytest.mark.usefixtures("one_thread")
families = pytest.mark.parametrize("family", FAMILIES)


def cuts_of(model: Subject, num_stages: int) -> list[int]:
    """Return unequal cuts into this many stages."""
    cuts: list[int] = []
    for done, fraction in enumerate(FRACTIONS[num_stages], 1):
        lowest = cuts[-1] + 1 if cuts else 1
        highest = model.num_positions - (num_stages - done)
        cuts.append(min(max(round(fraction * model.num_positions), lowest), highest))
    return cuts


def random_cuts(model: Subject, name: str) -> list[list[int]]:
    chance = random.Random(name)
    most = min(8, model.num_positions)
    sizes = [chance.randint(2, most) for _ in range(NUM_RANDOM_CUTS)]
    return [sorted(chance.sample(range(1, model.num_positions), size - 1)) for size in sizes]


def assert_close(errors: Errors) -> None:
    assert errors.loss <= LOSS_TOLERANCE, errors
    assert errors.gradient <= GRADIENT_TOLERANCE, errors
    assert errors.buffer == 0.0, errors


def assert_same_bits(one: Outcome, other: Outcome) -> None:
    assert torch.equal(one.loss, other.loss)
    for ours, theirs in ((one.gradients, other.gradients), (one.buffers, other.buffers)):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_same_results(one: Outcome, other: Outcome) -> None:
    """Compare evaluations: their loss to rounding, their metrics and buffers exactly."""
    torch.testing.assert_close(one.loss, other.loss, rtol=LOSS_TOLERANCE, atol=0.0)
    assert one.metrics.keys() == other.metrics.keys()
    for name, metric in one.metrics.items():
        assert torch.equal(metric, other.metrics[name]), name


@families
@pytest.mark.parametrize("num_stages", FRACTIONS)
def test_unequal_stages_train_as_the_whole(family, num_stages):
    model = subject(family)
    cuts = cuts_of(model, num_stages)
    assert len(set(cuts)) == num_stages - 1
    batch = model.sample.batch
    apart, alone = model.apart(cuts).step(batch), model.alone().step(batch)
    assert_close(model.compare(apart, alone))
    assert all(torch.equal(metric, alone.metrics[name]) for name, metric in apart.metrics.items())


@families
def test_random_cuts_train_as_the_whole(family):
    model = subject(family)
    alone = model.alone().step(model.sample.batch)
    for cuts in random_cuts(model, family):
        assert_close(model.compare(model.apart(cuts).step(model.sample.batch), alone))


@families
def test_stages_evaluate_as_the_whole(family):
    model = subject(family)
    alone = model.alone().evaluate(model.sample.batch)
    assert alone.metrics.keys() == model.sample.metrics.keys()
    for cuts in (cuts_of(model, 3), *random_cuts(model, family)[:2]):
        hosts = model.apart(cuts)
        before = hosts.buffers()
        assert_same_results(hosts.evaluate(model.sample.batch), alone)
        assert all(torch.equal(buffer, before[name]) for name, buffer in hosts.buffers().items())


@families
def test_evaluation_after_a_training_step_sees_its_buffers(family):
    model = subject(family)
    hosts, alone = model.apart(cuts_of(model, 3)), model.alone()
    hosts.step(model.sample.batch)
    alone.step(model.sample.batch)
    other = FAMILIES[family].batch(seed=1)
    assert_same_results(hosts.evaluate(other), alone.evaluate(other))


@families
def test_another_batch_size_than_captured(family):
    model = subject(family)
    batch = FAMILIES[family].batch(num_samples=3, seed=5)
    hosts, alone = model.apart(cuts_of(model, 3)), model.alone()
    assert_close(model.compare(hosts.step(batch), alone.step(batch)))
    assert_same_results(hosts.evaluate(batch), alone.evaluate(batch))


@pytest.mark.parametrize("family", ["own_gpt", "llama", "bert", "t5", "lstm"])
def test_a_batch_of_one(family):
    model = subject(family)
    batch = FAMILIES[family].batch(num_samples=1, seed=6)
    assert_close(model.compare(model.apart(cuts_of(model, 3)).step(batch), model.alone().step(batch)))


@families
def test_a_stage_travels_in_little_space(family):
    model = subject(family)
    assert max(map(len, packed_stages(model.captured, cuts_of(model, 3)))) < MAX_STAGE_BYTES


@families
def test_a_stage_can_be_cut_again(family):
    whole = subject(family).captured.blueprint
    assert read_blueprint(write_blueprint(whole)) == whole
    chance = random.Random(family)
    for _ in range(5):
        start = chance.randrange(whole.num_positions)
        stop = chance.randrange(start + 1, whole.num_positions + 1)
        inner = chance.randrange(start, stop)
        outer = slice_blueprint(whole, start, stop)
        assert slice_blueprint(outer, inner, stop) == slice_blueprint(whole, inner, stop)


@families
def test_parameters_are_those_of_the_module(family):
    model = subject(family)
    held = {entry.name: entry for entry in model.captured.blueprint.state if entry.kind == "parameter"}
    parameters = dict(model.alone().parameters())
    assert held.keys() == parameters.keys()
    for name, entry in held.items():
        assert entry.is_trainable == parameters[name].requires_grad
        assert entry.shape == tuple(parameters[name].shape)


# --- dropout by key

WITH_DROPOUT = ("own_gpt", "llama", "unet", "lstm")


@pytest.mark.parametrize("family", WITH_DROPOUT)
def test_keyed_dropout_does_not_depend_on_the_cut(family):
    model = subject(family)
    batch, key = model.sample.batch, (7, 41)
    whole = model.apart([]).step(batch, key=key)
    for num_stages in (3, 5):
        # Another seed of torch: it must not matter.
        apart = model.apart(cuts_of(model, num_stages)).step(batch, key=key, seed=num_stages)
        assert torch.equal(apart.loss, whole.loss)
        assert model.compare(apart, whole).gradient <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("family", WITH_DROPOUT)
def test_keyed_dropout_depends_on_seed_and_batch(family):
    model = subject(family)
    hosts = model.apart(cuts_of(model, 2))
    losses = [
        hosts.step(model.sample.batch, key=key).loss.item() for key in ((7, 41), (7, 42), (8, 41), (41, 7))
    ]
    assert len(set(losses)) == len(losses)


def test_keyed_dropout_differs_between_operations():
    model = subject("TwoMasks")
    hosts = model.apart([1])
    # With equal masks, as in evaluation, only the bias of the last layer would be left.
    nothing = hosts.evaluate(model.sample.batch).loss
    assert not torch.equal(hosts.step(model.sample.batch, key=(7, 41)).loss, nothing)


def test_evaluation_ignores_the_key():
    model = subject("own_gpt")
    hosts = model.apart(cuts_of(model, 3))
    without = hosts.evaluate(model.sample.batch)
    assert torch.equal(hosts.evaluate(model.sample.batch, key=(7, 41)).loss, without.loss)


# --- recomputing


@pytest.mark.parametrize("key", [None, (7, 41)], ids=["torch generator", "keyed"])
@pytest.mark.parametrize("family", [*WITH_DROPOUT, *PITFALLS])
def test_recomputing_changes_no_bit(family, key):
    model = subject(family)
    cuts = [model.num_positions // 2]
    batch = model.sample.batch
    assert_same_bits(
        model.apart(cuts, recompute=True).step(batch, key=key), model.apart(cuts).step(batch, key=key)
    )


@pytest.mark.parametrize("family", ["resnet", "inception", "unet", "SharedNorm"])
def test_recomputing_counts_a_batch_once(family):
    model = subject(family)
    hosts = model.apart([model.num_positions // 2], recompute=True)
    alone = model.alone().step(model.sample.batch)
    assert_close(model.compare(hosts.step(model.sample.batch), alone))
    counts = {
        name: int(count) for name, count in hosts.buffers().items() if name.endswith("num_batches_tracked")
    }
    assert set(counts.values()) == {2 if family == "SharedNorm" else 1}


# --- mixed precision

AUTOCAST_PROGRAM = """
import sys, warnings
import torch
from support.stage_runner import subject

warnings.simplefilter("error")
torch.set_num_threads(1)
for family in sys.argv[1:]:
    model = subject(family)
    batch = model.sample.batch
    truth = model.alone().step(batch, autocast=torch.bfloat16)
    for cuts in ([], [model.num_positions // 2], list(range(1, model.num_positions))):
        mixed = model.compare(model.apart(cuts, autocast=torch.bfloat16).step(batch), truth)
        plain = model.compare(model.apart(cuts).step(batch), truth)
        print(family, len(cuts), mixed.loss, mixed.gradient, mixed.buffer, plain.gradient)
"""


def run_autocast(*families: str) -> list[list[str]]:
    """Compare in a child process: oneDNN reads the instructions it may use once, before the first product."""
    environment = {
        **os.environ,
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "PYTHONPATH": os.pathsep.join(str(Path(__file__).parents[k]) for k in (1, 2)),
    }
    command = [sys.executable, "-c", AUTOCAST_PROGRAM, *families]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return [line.split() for line in child.stdout.splitlines()]


def test_autocast_is_that_of_the_whole_module():
    rows = run_autocast("llama", "own_gpt", "FullPrecisionRegion")
    assert len(rows) == 9
    for family, num_cuts, loss, gradient, buffer, plain_gradient in rows:
        # Across a cut gradients are summed in another order: two units in the last place of bfloat16.
        tolerance = 8e-3 if int(num_cuts) else GRADIENT_TOLERANCE
        assert float(loss) <= 1e-4, family
        assert float(gradient) <= tolerance, family
        assert float(buffer) == 0.0, family
        assert float(plain_gradient) > 4e-3, f"{family}: autocast did nothing"


# --- easy to cut wrongly


@pytest.mark.parametrize("name", PITFALLS)
def test_pitfalls_are_right_at_every_cut(name):
    model = subject(name)
    batch, odd_batch = model.sample.batch, PITFALLS[name].batch(num_samples=3, seed=2)
    alone = model.alone().step(batch)
    for cuts in ([], *([cut] for cut in range(1, model.num_positions))):
        hosts = model.apart(cuts)
        assert_close(model.compare(hosts.step(batch), alone))
        assert_same_results(model.apart(cuts).evaluate(odd_batch), model.alone().evaluate(odd_batch))


def test_pitfalls_can_be_cut():
    whole = [name for name in PITFALLS if subject(name).num_positions < 2]
    assert whole in ([], ["SharedNorm"])  # what writes the same buffer twice stays together
