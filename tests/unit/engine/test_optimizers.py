"""Optimizers against torch.optim, against the equations of the default recipe, and what they refuse."""

import math

import pytest
import torch

from ravnest.config import OptimizerKind as OptimizerName
from ravnest.engine.norms import find_not_finite
from ravnest.engine.optimizers import (
    Adam,
    FusedAdam,
    Group,
    Muon,
    NAdam,
    Optimizer,
    OptimizerSettings,
    Sgd,
)
from ravnest.engine.orthogonal import orthogonalise
from ravnest.engine.recipe import from_torch, make_settings
from ravnest.errors import ConfigError, WeightsError
from ravnest.protocol.messages import Refusal

SHAPES = {"tall": (12, 5), "wide": (4, 9), "square": (6, 6), "bias": (7,), "filter": (3, 2, 3, 3)}
NUM_STEPS = 20

KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adam decay": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}),
    "fused adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "fused adamw": (
        torch.optim.AdamW,
        {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "fused": True},
    ),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "nadam decay": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "momentum_decay": 0.01}),
    "nadamw": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "weight_decay": 0.1}),
    "rmsprop centered": (torch.optim.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}),
    "adafactor wide": (torch.optim.Adafactor, {"lr": 0.5, "eps": (1e-5, 0.1), "d": 2.0, "foreach": False}),
    "muon": (torch.optim.Muon, {"lr": 1e-2}),
    "muon like adam": (torch.optim.Muon, {"lr": 1e-2, "adjust_lr_fn": "match_rms_adamw"}),
    "muon plain": (torch.optim.Muon, {"lr": 1e-2, "nesterov": False, "weight_decay": 0.0, "eps": 1e-5}),
}


@pytest.fixture(scope="module", autouse=True)
def _ready():
    """One thread for small tensors; the first optimizer of a process makes torch import its compiler."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=1.0).step()
    yield
    torch.set_num_threads(before)


def draw(shapes=SHAPES, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def rate_at(step, base):
    return base * (1 - step / (2 * NUM_STEPS))


def copies(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def both(kind, options):
    """Return torch's optimizer, its parameters, our optimizer and our copies."""
    shapes = {k: v for k, v in SHAPES.items() if len(v) == 2} if kind is torch.optim.Muon else SHAPES
    truth = {name: tensor.requires_grad_() for name, tensor in draw(shapes).items()}
    reference = kind(truth.values(), **options)
    parameters = {name: tensor.detach().clone() for name, tensor in truth.items()}
    return reference, truth, Optimizer(from_torch(reference, truth), parameters), parameters


def torch_step(reference, truth, gradients, factor=1.0):
    for name, tensor in truth.items():
        tensor.grad = gradients[name].clone() if name in gradients else None
    rates = [group["lr"] for group in reference.param_groups]
    for group in reference.param_groups:
        group["lr"] *= factor
    reference.step()
    for group, rate in zip(reference.param_groups, rates, strict=True):
        group["lr"] = rate


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_equals_torch_bit_for_bit(name, in_place):
    kind, options = KINDS[name]
    reference, truth, ours, parameters = both(kind, options)
    for step in range(NUM_STEPS):
        gradients = draw({name: tensor.shape for name, tensor in truth.items()}, seed=1 + step, scale=0.1)
        rate = rate_at(step, options["lr"])
        torch_step(reference, truth, gradients, rate / options["lr"])
        # torch computes lr * factor; take exactly its number
        rate = options["lr"] * (rate / options["lr"])
        parameters = ours.step(parameters, gradients, rate, held=() if in_place else parameters.keys())
    for name, tensor in truth.items():
        assert torch.equal(parameters[name], tensor), name


@pytest.mark.parametrize("name", ["momentum", "adamw", "fused adamw", "nadam", "adagrad", "adafactor"])
def test_a_parameter_without_gradient_waits_with_its_own_step_count(name):
    kind, options = KINDS[name]
    reference, truth, ours, parameters = both(kind, options)
    for step in range(6):
        gradients = draw(seed=1 + step)
        if step % 2:
            del gradients["bias"]
        torch_step(reference, truth, gradients)
        parameters = ours.step(parameters, gradients, options["lr"])
    for name, tensor in truth.items():
        assert torch.equal(parameters[name], tensor), name


def test_the_fused_kernel_takes_gradients_that_lie_otherwise():
    straight, across = draw(), draw()
    settings = OptimizerSettings((Group(tuple(SHAPES), FusedAdam(), 0.1, is_decoupled=True),), 1e-2)
    one, other = Optimizer(settings, straight), Optimizer(settings, across)
    for step in range(2):
        gradients = draw(seed=1 + step)
        straight = one.step(straight, dict(gradients), 1e-2)
        turned = {
            name: tensor.transpose(0, -1).contiguous().transpose(0, -1) for name, tensor in gradients.items()
        }
        across = other.step(across, turned, 1e-2)
    assert all(torch.equal(straight[name], across[name]) for name in SHAPES)


def test_small_chunks_give_the_same_bits():
    settings = OptimizerSettings((Group(tuple(SHAPES), NAdam(), 0.1, is_decoupled=True),), 1e-2)
    results = []
    for size in (1, 40, 10_000):
        parameters = draw()
        ours = Optimizer(settings, parameters, size)
        for step in range(3):
            parameters = ours.step(parameters, draw(seed=1 + step), 1e-2)
        results.append(parameters)
    for name in SHAPES:
        assert torch.equal(results[0][name], results[1][name])
        assert torch.equal(results[0][name], results[2][name])


def test_parameters_of_two_dtypes_are_updated():
    parameters = {"half": torch.ones(4, dtype=torch.bfloat16), "full": torch.ones(4)}
    settings = OptimizerSettings((Group(("half", "full"), Sgd()),), 0.5)
    gradients = {name: torch.ones_like(tensor) for name, tensor in parameters.items()}
    after = Optimizer(settings, parameters).step(parameters, gradients, 0.5)
    assert after["half"].dtype is torch.bfloat16
    assert after["half"].tolist() == after["full"].tolist() == [0.5] * 4


def test_a_step_out_of_place_leaves_the_old_tensors():
    before = draw()
    kept = copies(before)
    ours = Optimizer(OptimizerSettings((Group(tuple(SHAPES), Adam(), 0.1, True),), 1e-2), before)
    after = ours.step(before, draw(seed=1), 1e-2, held=SHAPES)
    for name in SHAPES:
        assert torch.equal(before[name], kept[name])
        assert not torch.equal(after[name], kept[name])
    in_place = ours.step(before, draw(seed=2), 1e-2)
    assert all(in_place[name] is before[name] for name in SHAPES)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    parameters = draw()
    settings = OptimizerSettings((Group(tuple(SHAPES), NAdam()),), 1e-2, clip=0.1)
    ours = Optimizer(settings, parameters)
    ours.step(parameters, draw(seed=1), 1e-2)
    before, state, gradients = copies(parameters), copies(ours.state()), draw(seed=2)
    gradients["filter"][0, 0, 0, 0] = bad
    kept = copies(gradients)
    refused = ours.step(parameters, gradients, 1e-2)
    assert isinstance(refused, Refusal)
    assert "'filter'" in refused.reason
    assert all(torch.equal(parameters[name], before[name]) for name in SHAPES)
    assert all(torch.equal(tensor, state[key]) for key, tensor in ours.state().items())
    assert torch.equal(gradients["tall"], kept["tall"])


def test_find_not_finite_names_the_first():
    assert find_not_finite({}) is None
    assert find_not_finite({0: torch.ones(3), 1: torch.empty(0)}) is None
    assert find_not_finite({3: torch.ones(2), 0: torch.tensor([1.0, math.nan])}) == 0
    assert find_not_finite({"a": torch.tensor([-math.inf]), "b": torch.ones(1)}) == "a"
    # Large numbers are not infinite, although their sum of squares would be.
    assert find_not_finite({"a": torch.full((9,), 6e4, dtype=torch.float16)}) is None


def test_each_tensor_is_clipped_by_itself():
    parameters = {"long": torch.zeros(3), "short": torch.zeros(3)}
    gradients = {"long": torch.tensor([0.0, 3.0, 4.0]), "short": torch.tensor([0.6, 0.0, 0.0])}
    ours = Optimizer(OptimizerSettings((Group(("long", "short"), Sgd()),), 1.0, clip=1.0), parameters)
    kept = copies(gradients)
    after = ours.step(parameters, dict(gradients), 1.0)
    assert all(torch.equal(gradients[name], kept[name]) for name in kept)
    torch.testing.assert_close(after["long"], torch.tensor([0.0, -0.6, -0.8]))
    torch.testing.assert_close(after["short"], torch.tensor([-0.6, 0.0, 0.0]))


@pytest.mark.parametrize(("bound", "moved"), [(0.99, -2.0), (0.9999, -1.0), (math.nan, -1.0), (1e9, -1.0)])
def test_only_gradients_that_may_be_too_long_are_measured(bound, moved):
    ours = Optimizer(OptimizerSettings((Group(("w",), Sgd()),), 1.0, clip=1.0), {"w": torch.zeros(1)})
    # Two is over every bound, so what comes out tells who looked.
    after = ours.step({"w": torch.zeros(1)}, {"w": torch.full((1,), 2.0)}, 1.0, bounds={"w": bound})
    assert after["w"].item() == moved


def test_a_bound_that_half_precision_does_not_hold_is_no_bound():
    ours = Optimizer(OptimizerSettings((Group(("w",), Sgd()),), 1.0), {"w": torch.zeros(1)})
    bad = {"w": torch.tensor([math.inf])}
    assert isinstance(ours.step({"w": torch.zeros(1)}, bad, 1.0, bounds={"w": 7e4}), Refusal)


# --- prediction


def test_prediction_repeats_the_last_move_with_falling_strength():
    settings = OptimizerSettings((Group(("w",), Sgd(momentum=0.5)),), 0.1, has_prediction=True)
    parameters = {"w": torch.tensor([1.0, 2.0])}
    ours = Optimizer(settings, parameters)
    after = ours.step(parameters, {"w": torch.tensor([1.0, -1.0])}, 0.1, lag=2, held=["w"])
    predicted = ours.take_predicted()
    # One more update without a gradient moves by half, the next by a quarter of the last move.
    torch.testing.assert_close(predicted["w"], after["w"] - 0.75 * 0.1 * torch.tensor([1.0, -1.0]))
    assert predicted["w"] is not after["w"]
    assert not ours.take_predicted()


@pytest.mark.parametrize("rule", [Adam(), FusedAdam()])
@pytest.mark.parametrize("in_place", [True, False])
def test_decay_is_not_predicted(in_place, rule):
    settings = OptimizerSettings((Group(("w",), rule, 0.5, is_decoupled=True),), 0.1, has_prediction=True)
    parameters = {"w": torch.tensor([10.0])}
    ours = Optimizer(settings, parameters)
    after = ours.step(
        parameters, {"w": torch.zeros(1)}, 0.1, lag=3, held=() if in_place else parameters.keys()
    )
    torch.testing.assert_close(after["w"], torch.tensor([9.5]))
    torch.testing.assert_close(ours.take_predicted()["w"], after["w"])


@pytest.mark.parametrize(("predicts", "lag"), [(True, 0.0), (False, 2.0)])
def test_nothing_is_predicted_without_lag_or_without_being_asked(predicts, lag):
    parameters = draw()
    ours = Optimizer(
        OptimizerSettings((Group(tuple(SHAPES), Adam()),), 0.1, has_prediction=predicts), parameters
    )
    ours.step(parameters, draw(seed=1), 0.1, lag)
    assert not ours.take_predicted()


# --- state


def test_state_moves_to_other_stages_by_name():
    settings = make_settings(OptimizerName.MUON, 1e-2, SHAPES, {"tall", "wide", "filter"})
    whole = draw()
    one = Optimizer(settings, whole)
    for step in range(3):
        one.step(whole, draw(seed=1 + step), 1e-2)
    halves = [
        {name: whole[name].clone() for name in names} for names in (("tall", "bias"), ("wide", "square"))
    ]
    state = one.state()
    assert {"momentum_buffer/tall", "exp_avg/bias", "mu_product/bias", "step/bias"} <= state.keys()
    for part in halves:
        other = Optimizer(settings, part)
        other.load({key: tensor for key, tensor in state.items() if key.partition("/")[2] in part})
        for step in range(2):
            part.update(other.step(part, {k: v for k, v in draw(seed=9 + step).items() if k in part}, 1e-2))
    for step in range(2):
        one.step(whole, draw(seed=9 + step), 1e-2)
    for part in halves:
        for name, tensor in part.items():
            assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize("name", ["rmsprop centered", "adagrad", "adafactor"])
def test_what_other_rules_keep_moves_with_the_state(name):
    kind, options = KINDS[name]
    reference, truth, ours, parameters = both(kind, options)
    for step in range(6):
        gradients = draw(seed=1 + step)
        torch_step(reference, truth, gradients)
        parameters = ours.step(parameters, gradients, options["lr"])
        if step == 2:
            state = {key: tensor.clone() for key, tensor in ours.state().items()}
            ours = Optimizer(ours.settings, parameters)
            ours.load(state)
    for name, tensor in truth.items():
        assert torch.equal(parameters[name], tensor), name


def test_loading_copies():
    parameters = draw()
    settings = OptimizerSettings((Group(tuple(SHAPES), Adam()),), 1e-2)
    one, other = Optimizer(settings, parameters), Optimizer(settings, parameters)
    one.step(parameters, draw(seed=1), 1e-2)
    other.load(one.state())
    kept = copies(other.state())
    one.step(parameters, draw(seed=2), 1e-2)
    assert all(torch.equal(tensor, kept[key]) for key, tensor in other.state().items())
    assert other.state()["step/bias"] == 1.0


@pytest.mark.parametrize("key", ["exp_avg/other", "exp_avg/bias", "step", "", "exp_avg/"])
def test_state_that_does_not_fit_is_refused(key):
    ours = Optimizer(OptimizerSettings((Group(tuple(SHAPES), Adam()),), 1e-2), draw())
    with pytest.raises(WeightsError, match="does not fit this stage"):
        ours.load({key: torch.zeros(8)})


# --- the recipe


def newton_schulz(matrix):
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm()
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


def recipe_reference(gradients_by_step, rate):
    """The equations of the research notes, in double precision."""
    weights = {name: tensor.double() for name, tensor in draw().items()}
    first = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    second = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    product = 1.0
    for number, gradients in enumerate(gradients_by_step, 1):
        now, then = (0.95 * (1 - 0.5 * 0.96 ** (k * 0.004)) for k in (number, number + 1))
        product *= now
        for name, weight in weights.items():
            gradient = gradients[name].double()
            gradient = gradient * min(1.0, 1.0 / gradient.norm().item())
            first[name] = 0.95 * first[name] + 0.05 * gradient
            second[name] = 0.99 * second[name] + 0.01 * gradient**2
            if weight.dim() > 1:
                mixed = (0.95 * first[name] + 0.05 * gradient).flatten(1)
                update = 0.2 * math.sqrt(max(mixed.shape)) * newton_schulz(mixed).view_as(weight)
            else:
                looked = then * first[name] / (1 - product * then) + (1 - now) * gradient / (1 - product)
                update = looked / ((second[name] / (1 - 0.99**number)).sqrt() + 1e-8)
            decay = 0.1 if weight.dim() > 1 else 0.0
            weights[name] = weight - rate * (update + decay * weight)
    return weights


def test_the_default_recipe_follows_its_equations():
    settings = make_settings(OptimizerName.MUON, 1e-2, SHAPES, {"tall", "wide", "square", "filter"})
    assert (settings.clip, settings.has_prediction) == (1.0, True)
    parameters = draw()
    ours = Optimizer(settings, parameters)
    gradients = [draw(seed=1 + step) for step in range(5)]
    expected = recipe_reference(gradients, 1e-2)
    for given in gradients:
        parameters = ours.step(parameters, given, 1e-2)
    for name, tensor in parameters.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(OptimizerName))
def test_every_recipe_names_every_parameter_once_and_trains(name):
    settings = make_settings(name, 1e-2, SHAPES, {"tall", "wide"}, planned_updates=10)
    named = [parameter for group in settings.groups for parameter in group.names]
    assert sorted(named) == sorted(SHAPES)
    before = draw()
    after = Optimizer(settings, before).step(before, draw(seed=1), 1e-2, lag=2, held=SHAPES)
    assert all(not torch.equal(after[name], before[name]) for name in SHAPES)
    for group in settings.groups:
        if group.is_decoupled:
            assert all(len(SHAPES[parameter]) > 1 for parameter in group.names)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_matrices_go_together_as_each_would_alone(precision):
    shapes = [(12, 5), (4, 9), (12, 5), (6, 6), (4, 9), (12, 5)]
    generator = torch.Generator().manual_seed(3)
    matrices = [torch.randn(shape, generator=generator) * 10**place for place, shape in enumerate(shapes)]
    rule = Muon(precision=precision)
    together = orthogonalise(rule.precision, rule.epsilon, matrices)
    tolerance = 1e-5 if precision == "float32" else 3e-2
    for matrix, found in zip(matrices, together, strict=True):
        (alone,) = orthogonalise(rule.precision, rule.epsilon, [matrix])
        torch.testing.assert_close(found, alone, rtol=tolerance, atol=tolerance)
        truth = _plain_newton_schulz(matrix.double())
        torch.testing.assert_close(found.double(), truth, rtol=0.1, atol=10 * tolerance)


def _plain_newton_schulz(matrix):
    result = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    result = result / result.norm()
    for _ in range(5):
        square = result @ result.T
        result = 3.4445 * result + (-4.7750 * square + 2.0315 * square @ square) @ result
    return result.T if matrix.shape[0] > matrix.shape[1] else result


def test_muon_is_for_matrices_only():
    settings = make_settings(OptimizerName.MUON, 1e-2, SHAPES, {"tall", "filter"})
    by_rule = {type(group.rule): set() for group in settings.groups}
    for group in settings.groups:
        by_rule[type(group.rule)] |= set(group.names)
    assert by_rule == {Muon: {"tall", "filter"}, NAdam: {"wide", "square", "bias"}}


def test_lag_lowers_the_rate_early_on():
    """The fallback recipe: one over lag at first, all of it after half the run."""
    parameters = {"w": torch.zeros(1)}
    ours = Optimizer(OptimizerSettings((Group(("w",), Sgd()),), 1.0, lag_updates=4), parameters)
    moved = []
    for _ in range(6):
        before = parameters["w"].item()
        ours.step(parameters, {"w": torch.ones(1)}, 1.0, lag=4)
        moved.append(before - parameters["w"].item())
    assert moved == pytest.approx([4**-1, 4**-0.75, 4**-0.5, 4**-0.25, 1, 1])
    assert ours.step({"w": torch.zeros(1)}, {"w": torch.ones(1)}, 1.0, lag=0)["w"].item() == -1


# --- the user's own optimizer


def test_groups_keep_their_rates_and_decays():
    truth = {name: tensor.requires_grad_() for name, tensor in draw().items()}
    groups = [
        {"params": [truth["tall"], truth["bias"]], "lr": 0.01, "weight_decay": 0.2},
        {"params": [truth["wide"]], "lr": 0.02},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.0)
    settings = from_torch(reference, truth)
    assert settings.learning_rate == 0.01
    assert [(group.names, group.rate, group.weight_decay) for group in settings.groups] == [
        (("tall", "bias"), 1.0, 0.2),
        (("wide",), 2.0, 0.0),
    ]
    parameters = {name: tensor.detach().clone() for name, tensor in truth.items()}
    ours = Optimizer(settings, parameters)
    assert ours.names == {"tall", "bias", "wide"}
    for step in range(5):
        gradients = draw(seed=1 + step)
        torch_step(reference, truth, gradients)
        parameters = ours.step(parameters, gradients, 0.01)
    for name, tensor in truth.items():
        assert torch.equal(parameters[name], tensor), name


def test_two_optimizers_share_a_model():
    truth = {name: tensor.requires_grad_() for name, tensor in draw().items()}
    muon = torch.optim.Muon([truth["tall"], truth["wide"]], lr=0.02)
    adam = torch.optim.AdamW([truth["bias"]], lr=0.01)
    settings = from_torch([muon, adam], truth)
    assert [type(group.rule) for group in settings.groups] == [Muon, Adam]
    assert [group.rate for group in settings.groups] == [1.0, 0.5]


class MyAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda p: torch.optim.Rprop(p),
            "Rprop is not supported; choose one of torch.optim: SGD, Adam, ",
        ),
        (
            lambda p: torch.optim.LBFGS(p),  # its step calls the model again
            "optimizer LBFGS is not supported; choose one of torch.optim: SGD, Adam, ",
        ),
        (lambda p: MyAdam(p), "MyAdam is not supported"),
        (
            lambda p: type("Adam", (torch.optim.Adam,), {"__module__": "of.others"})(p),
            "of.others.Adam is not",
        ),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True of torch.optim.Adam"),
        (lambda p: torch.optim.SGD(p, lr=1.0, maximize=True), "maximize=True of torch.optim.SGD"),
        (
            lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, dampening=0.1),
            "dampening=0.1 of torch.optim.SGD",
        ),
        (lambda _: torch.optim.Muon([torch.zeros(2, 2)], ns_steps=3), "ns_steps=3 of torch.optim.Muon"),
        (lambda _: torch.optim.SGD([torch.zeros(1)], lr=1.0), "no parameter of this model"),
        (lambda _: [], "no parameter of this model"),
    ],
)
def test_what_is_not_supported_is_said(make, words):
    parameters = draw()
    with pytest.raises(ConfigError) as error:
        from_torch(make(list(parameters.values())), parameters)
    assert words in str(error.value)


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_all_gradients_are_shortened_together_as_torch_does(limit):
    truth, parameters = draw(), draw()
    for tensor in truth.values():
        tensor.grad = torch.ones_like(tensor)
    torch.nn.utils.clip_grad_norm_(truth.values(), limit)
    settings = OptimizerSettings((Group(tuple(SHAPES), Sgd()),), 1.0, clip_norm=limit)
    optimizer = Optimizer(settings, parameters)
    gradients = {name: torch.ones_like(tensor) for name, tensor in truth.items()}
    after = optimizer.step(parameters, gradients, 1.0)
    for name, tensor in truth.items():
        torch.testing.assert_close(after[name], tensor - tensor.grad)
    assert optimizer.norm_square == pytest.approx(sum(tensor.numel() for tensor in truth.values()))


def test_gradients_of_other_stages_count_for_the_norm():
    weights = {"w": torch.zeros(1)}
    optimizer = Optimizer(OptimizerSettings((Group(("w",), Sgd()),), 1.0, clip_norm=1.0), weights)
    after = optimizer.step(weights, {"w": torch.tensor([3.0])}, 1.0, other_square=16.0)
    assert float(after["w"]) == pytest.approx(-3 / 5)
    refused = optimizer.step(after, {"w": torch.tensor([math.inf])}, 1.0)
    assert isinstance(refused, Refusal)


def test_means_of_weights_over_time_are_those_of_torch_and_move_with_the_state():
    class Weights(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(5))

    truth = Weights()
    averaged = torch.optim.swa_utils.AveragedModel(
        truth, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    settings = OptimizerSettings((Group(("w",), Sgd()),), 0.1, ema=0.9)
    weights = {"w": torch.ones(5)}
    ours = Optimizer(settings, weights)
    for step in range(8):
        gradient = draw({"w": (5,)}, seed=step)["w"]
        with torch.no_grad():
            truth.w -= 0.1 * gradient
        averaged.update_parameters(truth)
        weights = ours.step(weights, {"w": gradient}, 0.1)
        if step == 4:  # another peer takes the stage over
            state = {name: tensor.clone() for name, tensor in ours.state().items()}
            ours = Optimizer(settings, weights)
            ours.load(state)
    torch.testing.assert_close(ours.state()["ema/w"], averaged.module.w.detach())
    assert "ema/w" not in Optimizer(OptimizerSettings(settings.groups, 0.1), weights).state()
