"""Sketches: the same for the same weights, whatever their format, and others for others."""

import torch

from ravnest.hub.coordinator.checks import is_alike
from ravnest.model.state.sketch import sketch_tensors
from ravnest.protocol.placement import SKETCH_VALUES

KEY, OTHER_KEY = b"k" * 16, b"q" * 16


def make_weights():
    generator = torch.Generator().manual_seed(3)
    large = torch.randn(70, 101, generator=generator)
    return {"a": large, "b": 0.01 * torch.randn(7, generator=generator), "c": torch.zeros(3)}


def sketch(weights, key=KEY):
    return sketch_tensors(weights, weights, key)


def test_a_sketch_has_four_numbers_for_each_tensor_and_depends_on_its_key():
    weights = make_weights()
    assert len(sketch(weights)) == 4 * SKETCH_VALUES * 3
    assert sketch(weights) == sketch(make_weights())
    assert not is_alike(sketch(weights), sketch(weights, OTHER_KEY))
    assert sketch_tensors({}, [], KEY) == b""


def test_rounding_to_sixteen_bits_and_another_order_change_nothing():
    weights = make_weights()
    for dtype in (torch.bfloat16, torch.float16):
        assert is_alike(sketch(weights), sketch({name: x.to(dtype) for name, x in weights.items()}))
    assert sketch(weights) == sketch(dict(reversed(weights.items())))


def test_every_tensor_counts_however_small_it_is():
    weights = make_weights()
    for name, changed in (
        ("b", 1.1 * weights["b"]),
        ("b", weights["b"].flip(0)),
        ("c", torch.full((3,), 0.1234)),
        ("a", weights["a"] * torch.linspace(0.9, 1.1, 101)),
        ("a", torch.full_like(weights["a"], 0.1234)),
    ):
        assert not is_alike(sketch(weights), sketch(weights | {name: changed})), name
