"""A segment of an exact update on its ring: means by samples, no gradient, no number."""

import pytest
import torch
from torch import Tensor

from ravnest.averaging.ring import RingPosition, RingReduce
from ravnest.codec import describe, encode_tensor
from ravnest.config import WireFormat
from ravnest.engine.stage import SummedGradient
from ravnest.ids import RoundId, SegmentId
from ravnest.model.state.state_dict import FlatEntry, Layout
from ravnest.peer.segments import EncodedChunk, GradientSegment

LAYOUT = Layout(0, 2, (FlatEntry("a", (2, 3), "float32", 0, 0), FlatEntry("b", (4,), "float32", 6, 1)))


def segment_of(
    num_samples: int, wire_format: WireFormat = WireFormat.FP32, **sums: Tensor
) -> GradientSegment:
    """Return a share; its sums are over two microbatches."""
    return GradientSegment(LAYOUT, SummedGradient(sums, 2.0, num_samples), wire_format, "cpu")


def reduce(*segments: GradientSegment) -> list[dict[str, Tensor]]:
    """Let a ring run; return what each member would apply."""
    places = [RingPosition(RoundId(1), SegmentId(0), place, len(segments)) for place in range(len(segments))]
    rings = [
        RingReduce(place, each, each.weight, chunk_size=4)
        for place, each in zip(places, segments, strict=True)
    ]
    waiting = [(place, part) for place, ring in enumerate(rings) for part in ring.start()]
    while waiting:
        place, part = waiting.pop()
        successor = (place + 1) % len(rings)
        passed_on = rings[successor].receive(part)
        assert rings[successor].failure is None
        waiting += [] if passed_on is None else [(successor, passed_on)]
    assert len({ring.digest for ring in rings}) == 1
    return [each.read(ring.pieces) for each, ring in zip(segments, rings, strict=True)]


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(2, 3, generator=generator), "b": torch.randn(4, generator=generator)}


def assert_alike(found: list[dict[str, Tensor]]) -> None:
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        assert all(torch.equal(found[0][name], other[name]) for name in other)


@pytest.mark.parametrize(("wire_format", "tolerance"), [(WireFormat.FP32, 1e-6), (WireFormat.BF16, 2e-2)])
def test_the_mean_is_over_all_samples(wire_format: WireFormat, tolerance: float) -> None:
    sizes = (5, 7, 4)
    shares = [draw(seed) for seed in range(3)]
    pairs = zip(sizes, shares, strict=True)
    found = reduce(*(segment_of(size, wire_format, **share) for size, share in pairs))
    assert_alike(found)
    for name, mean in found[0].items():
        expected = sum(size * share[name] / 2 for size, share in zip(sizes, shares, strict=True)) / 16
        torch.testing.assert_close(mean, expected, rtol=tolerance, atol=tolerance)


def test_a_parameter_is_left_out_when_nobody_has_a_gradient_of_it() -> None:
    found = reduce(segment_of(3, a=draw(0)["a"]), segment_of(5, a=torch.zeros(2, 3)), segment_of(0))
    assert_alike(found)
    assert found[0].keys() == {"a"}
    torch.testing.assert_close(found[0]["a"], draw(0)["a"] / 2 * 3 / 8)


def test_a_gradient_of_zeros_is_a_gradient() -> None:
    (found,) = reduce(segment_of(3, a=torch.zeros(2, 3)))
    assert not found["a"].any()


def test_without_any_sample_nothing_is_applied() -> None:
    assert reduce(segment_of(0), segment_of(0)) == [{}, {}]
    assert reduce(segment_of(0)) == [{}]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1e37])
def test_a_share_that_is_not_finite_has_no_weight(value: float) -> None:
    spoiled = segment_of(100, a=torch.full((2, 3), value), b=draw(0)["b"])
    assert not spoiled.is_finite
    found = reduce(spoiled, segment_of(2, **draw(1)))
    assert_alike(found)
    for name, mean in found[0].items():
        torch.testing.assert_close(mean, draw(1)[name] / 2)


def test_a_parameter_whose_norm_is_not_finite_is_left_out_alone() -> None:
    (found,) = reduce(segment_of(1, a=torch.full((2, 3), 1e28), b=draw(0)["b"]))
    assert found.keys() == {"b"}


@pytest.mark.parametrize(
    ("items", "wire_format", "reason"),
    [
        (torch.ones(4), WireFormat.BF16, "came as bf16"),
        (torch.ones(3), WireFormat.FP32, "not as fp32"),
        (torch.tensor([1.0, float("nan"), 0.0, 0.0]), WireFormat.FP32, "not finite"),
    ],
)
def test_what_no_honest_member_sends_is_a_fault(items: Tensor, wire_format: WireFormat, reason: str) -> None:
    chunk = EncodedChunk(describe(items, wire_format), encode_tensor(items, wire_format), items)
    found = segment_of(2, **draw(0)).fault(slice(0, 4), chunk, 1.0, 1)
    assert found is not None
    assert reason in found
