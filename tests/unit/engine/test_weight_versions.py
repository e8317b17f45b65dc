"""Weight versions share what they can; a split backward gives the same bits and does nothing twice."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ravnest.engine.weight_versions import Graph, Versions

# --- versions


def weights_of(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2,), value), "b": torch.full((3,), value)}


def test_weights_are_free_until_a_batch_holds_them():
    versions = Versions(weights_of(0.0))
    assert not versions.find_held(["a", "b"])
    versions.hold()
    assert versions.find_held(["a"]) == {"a"}
    versions.hold()
    versions.release(1)
    assert versions.find_held(["b"]) == {"b"}
    versions.release(2)
    versions.release(2)
    assert not versions.find_held(["a", "b"])
    assert versions.num_live == 1


def test_what_an_update_left_alone_is_still_held():
    """Only `a` got a new tensor, so a later update of `b` must not write over what batch 1 saw."""
    versions = Versions(weights_of(0.0))
    versions.hold()
    versions.replace({**versions.weights, "a": torch.ones(2)}, {**versions.weights, "a": torch.ones(2)})
    assert not versions.find_held(["a"])
    assert versions.find_held(["a", "b"]) == {"b"}


def test_predicted_weights_leave_the_current_ones_free():
    versions = Versions(weights_of(0.0))
    versions.replace(weights_of(1.0), weights_of(1.5))
    versions.hold()
    assert not versions.find_held(["a", "b"])
    assert versions.num_live == 2
    assert versions.seen["a"].tolist() == [1.5, 1.5]
    assert versions.seen["a"].requires_grad
    assert versions.weights["a"].requires_grad


def test_old_versions_are_counted_and_freed():
    versions = Versions(weights_of(0.0))
    references = [weakref.ref(versions.weights["a"])]
    for number in range(1, 4):
        assert versions.hold() == number
        new = weights_of(float(number))
        versions.replace(new, new)
        references.append(weakref.ref(new["a"]))
        del new
    assert versions.num_live == 4
    gc.disable()  # freed by the last reference, without waiting for the collector
    try:
        versions.release(2)
        assert [reference() is not None for reference in references] == [True, False, True, True]
        assert versions.num_live == 3
    finally:
        gc.enable()


def test_adding_changes_what_forwards_see_but_not_what_batches_hold():
    versions = Versions(weights_of(1.0))
    versions.replace(weights_of(1.0), {**versions.weights, **weights_of(2.0)})
    versions.hold()
    held = versions.seen
    versions.add({"a": torch.full((2,), 10.0)})
    assert versions.weights["a"].tolist() == [11.0, 11.0]
    assert versions.seen["a"].tolist() == [12.0, 12.0]
    assert versions.seen["b"].tolist() == [2.0] * 3
    assert held["a"].tolist() == [2.0, 2.0]
    versions = Versions(weights_of(1.0))
    versions.add({"a": torch.ones(2)})
    assert versions.seen["a"] is versions.weights["a"]


def test_forwards_see_bf16_of_narrow_weights_and_all_bits_are_trained():
    versions = Versions({"a": torch.tensor([1.0, 1.001]), "b": torch.tensor([1.001])}, narrow=["a"])
    assert versions.seen["a"].tolist() == [1.0, 1.0]
    assert versions.seen["b"] is versions.weights["b"]
    assert versions.seen["a"].requires_grad
    versions.hold()
    held = versions.seen["a"]
    assert versions.find_held(["a", "b"]) == {"b"}  # so the trained tensor may change in place
    before = versions.weights["a"]
    versions.add({"a": torch.full((2,), 0.5)})
    assert versions.weights["a"] is before
    assert before.tolist() == pytest.approx([1.5, 1.501])
    assert versions.seen["a"].dtype is held.dtype is torch.bfloat16
    assert held.tolist() == [1.0, 1.0]
    versions.see_exactly(())
    assert versions.seen["a"] is versions.weights["a"]


# --- the backward in two parts


def layers(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)
        )
    return {name: tensor.detach().requires_grad_() for name, tensor in model.named_parameters()}, model


def chain(weights, inputs):
    _, model = layers()
    return [torch.func.functional_call(model, weights, (inputs[0],))]


def tied(weights, inputs):
    """One matrix is used twice, with others between."""
    x = torch.tanh(inputs[0] @ weights["0.weight"])
    return [(x @ weights["3.weight"]) @ weights["0.weight"] + weights["0.bias"]]


def two_outputs(weights, inputs):
    """The second output comes from weights alone, one of which is used on the way to the inputs, too."""
    scale = torch.exp(weights["1.weight"]) * weights["1.bias"]
    return [torch.relu(inputs[0] * scale) @ weights["0.weight"], weights["1.weight"] * weights["0.bias"]]


def two_inputs(weights, inputs):
    """One input is not used, and a weight reaches its operation over a way of its own."""
    normal = weights["0.weight"] / weights["0.weight"].norm() * weights["0.bias"]
    return [inputs[1] + torch.relu(inputs[1]) @ normal, (inputs[1] * weights["3.bias"]).sum(0)]


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("program", [chain, tied, two_outputs, two_inputs])
def test_gradients_are_those_of_one_backward(program, is_split):
    weights, _ = layers()
    generator = torch.Generator().manual_seed(1)
    inputs = {value: torch.randn(5, 6, generator=generator).requires_grad_() for value in (0, 1)}
    roots = program(weights, inputs)
    gradients = [torch.randn(root.shape, generator=generator) for root in roots]
    wanted = [*inputs.values(), *weights.values()]
    truth = torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
    expected = {k: v for k, v in zip([*inputs, *weights], truth, strict=True) if v is not None}

    graph = Graph(inputs, weights, is_split)
    found = {**graph.backward_inputs(roots, gradients), **graph.backward_weights()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("is_split", [True, False])
def test_a_stage_without_inputs_has_gradients_of_weights_only(is_split):
    weights, _ = layers()
    inputs = {0: torch.ones(2, 6)}
    roots = chain(weights, inputs)
    graph = Graph({}, weights, is_split)
    assert graph.backward_inputs(roots, [torch.ones(2, 6)]) == {}
    truth = torch.autograd.grad(chain(weights, inputs), list(weights.values()), [torch.ones(2, 6)])
    found = graph.backward_weights()
    assert all(torch.equal(found[name], other) for name, other in zip(weights, truth, strict=True))


def test_nothing_to_differentiate_gives_no_gradients():
    weights, _ = layers()
    graph = Graph({0: torch.ones(1).requires_grad_()}, weights, True)
    assert graph.backward_inputs([], []) == {}
    assert graph.backward_weights() == {}


class MatrixProducts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def _ready():
    """The first dispatch mode of a process makes torch import its compiler."""
    with MatrixProducts():
        torch.ones(1) + 1


@pytest.mark.usefixtures("_ready")
def test_no_product_is_computed_twice():
    weights, _ = layers()
    inputs = {0: torch.ones(4, 6).requires_grad_()}
    roots = chain(weights, inputs)
    graph = Graph(inputs, weights, True)
    with MatrixProducts() as first:
        graph.backward_inputs(roots, [torch.ones(4, 6)])
    with MatrixProducts() as second:
        graph.backward_weights()
    assert (first.count, second.count) == (3, 3)


def test_the_graph_frees_what_it_saved():
    weights, _ = layers()
    inputs = {0: torch.ones(4, 6).requires_grad_()}
    middle = torch.relu(inputs[0] @ weights["0.weight"])
    reference = weakref.ref(middle)
    roots = [middle @ weights["3.weight"]]
    del middle
    graph = Graph(inputs, weights, True)
    gc.disable()
    try:
        graph.backward_inputs(roots, [torch.ones(4, 6)])
        graph.backward_weights()
        del roots, graph
        assert reference() is None
    finally:
        gc.enable()
