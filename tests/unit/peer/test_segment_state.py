"""One segment of one member, by hand: what is refused, clipped and owed, and how statistics merge."""

import math

import pytest
import torch

from ravnest.codec import decode_tensor, encode_tensor
from ravnest.config import WireFormat
from ravnest.engine.optimizers import OptimizerSettings
from ravnest.engine.train_config import AveragingRule, TrainConfig
from ravnest.errors import ProtocolError
from ravnest.model.state.state_dict import FlatEntry, Layout
from ravnest.peer.segments import EncodedChunk, SegmentState
from ravnest.protocol.tensors import TensorSpec

LAYOUT = Layout(0, 1, (FlatEntry("s", (1,), "float32", 0, 0), FlatEntry("w", (2,), "float32", 1, 0)))
WEIGHTS = slice(0, 2)


def make(wire_format: WireFormat = WireFormat.FP32, **rule) -> SegmentState:
    training = TrainConfig(OptimizerSettings((), 0.1), 1, deltas=wire_format, averaging=AveragingRule(**rule))
    return SegmentState(LAYOUT, {"s"}, training, "cpu", state_of(0.0, 0.0))


def state_of(first: float, second: float, statistic: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([first, second]), "s": torch.tensor([statistic])}


def chunk_of(*values: float, wire_format: WireFormat = WireFormat.FP32) -> EncodedChunk:
    items = torch.tensor(values)
    spec = TensorSpec("float32", (len(values),), wire_format)
    buffer = encode_tensor(items, wire_format)
    return EncodedChunk(spec, buffer, decode_tensor(buffer, spec))


def test_weights_come_first_then_statistics_then_momenta() -> None:
    member = make(WireFormat.INT8)
    member.open(state_of(1.0, 2.0, 4.0), {"w": torch.tensor([5.0, 6.0])}, 1.0)
    assert member.edges == (2, 3, 5)
    shares = [float(member.begin(slice(k, k + 1), 2.0).items) for k in (2, 3, 4)]
    assert shares == pytest.approx([6.0, 10.0, 12.0], rel=1e-4)
    formats = [member.begin(slice(k, k + 1), 1.0).spec.wire_format for k in (0, 2, 3)]
    assert formats == ["int8", "fp32", "int8"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_own_copy_that_is_not_finite_is_no_contribution(value: float) -> None:
    good, moments = state_of(1.0, 2.0), {"w": torch.zeros(2)}
    assert make().open(good, moments, 1.0) is None
    assert "not finite" in make().open(state_of(1.0, value), moments, 1.0)
    assert "not finite" in make().open(state_of(1.0, 2.0, value), moments, 1.0)
    assert "not finite" in make().open(good, {"w": torch.tensor([0.0, value])}, 1.0)


def test_what_no_honest_member_sends_is_told() -> None:
    member = make()
    member.open(state_of(1.0, -3.0), {"w": torch.zeros(2)}, 1.0)  # within 1000 times (1 + 3)
    assert member.fault(WEIGHTS, chunk_of(7000.0, -7999.0), weight=2.0, num_shares=1) is None
    assert "mean change of 4.01e+03" in member.fault(
        WEIGHTS, chunk_of(0.0, -8020.0), weight=2.0, num_shares=1
    )
    assert (
        member.fault(slice(3, 5), chunk_of(1e9, 1e9), weight=1.0, num_shares=1) is None
    )  # momenta know no bound
    for value in (math.nan, math.inf):
        for where in (WEIGHTS, slice(2, 3), slice(3, 5)):
            values = [value] * (where.stop - where.start)
            assert (
                member.fault(where, chunk_of(*values), weight=1.0, num_shares=1) == "what came is not finite"
            )
    assert "mean change" in member.fault(WEIGHTS, chunk_of(0.0, 5000.0), weight=9.0, num_shares=0)
    other = chunk_of(1.0, 2.0, wire_format=WireFormat.BF16)
    assert (
        member.fault(WEIGHTS, other, weight=1.0, num_shares=1) == "a part came as bf16 (2,), not as fp32 (2,)"
    )


def commit(member: SegmentState, mean: tuple[float, float], statistic: float, state, **how) -> dict:
    options = {"strength": 1.0, "is_blocking": True, **how}
    pieces = [chunk_of(*mean, wire_format=member._wire_format), chunk_of(statistic)]
    return member.commit(pieces, state=state, moments={}, **options)


@pytest.mark.parametrize(
    ("copied", "live", "change"),
    [
        (1.0, 0.25, 0.0),  # all agreed at the copy: what was learned since stays
        (2.0, 3.0, -0.5),  # half the way from the copy to the average
        (9.0, 2.0, -1.0),  # that were -4: no further than the average
        (10.0, 0.5, 0.0),  # that were -4.5, away from the average and below zero
    ],
)
def test_a_late_average_takes_nothing_from_statistics_that_they_learned_since(
    copied: float, live: float, change: float
) -> None:
    member = make()
    member.open(state_of(2.0, 2.0, copied), {}, 1.0)
    state = state_of(5.0, 2.0, live)
    changes = commit(member, (1.0, 1.0), 0.0, state, strength=0.5, is_blocking=False)  # the average is 1
    assert changes["w"].tolist() == [-0.5, -0.5]  # half the way from the copy to the mean
    assert changes["s"].tolist() == [change]


def test_in_a_blocking_round_the_state_becomes_the_average() -> None:
    member = make(WireFormat.INT4)
    state = state_of(0.3, 1.7, 5.0)
    member.open(state, {}, 1.0)
    changes = commit(member, (7.0, 1.0), 2.0, state)
    for name, expected in (("w", [7.0, 1.0]), ("s", [3.0])):
        assert (state[name] + changes[name]).tolist() == expected


def test_of_fewer_samples_less_is_owed() -> None:
    owed = {}
    for weight in (1.0, 4.0, 8.0):
        member = make(WireFormat.INT4)
        member.open(state_of(7.0, 0.25), {}, 4.0)
        assert member.begin(WEIGHTS, 4.0).items.tolist() == [28.0, 0.0]  # 1 of it is lost
        commit(member, (7.0, 0.0), 0.0, state_of(7.0, 0.25))
        member.open(state_of(7.0, 0.0), {}, weight)
        owed[weight] = float(member._add_share(WEIGHTS, None, weight)[1])
    assert owed == {1.0: 0.25, 4.0: 1.0, 8.0: 1.0}


def test_a_long_contribution_is_cut_to_the_length_of_the_last_mean() -> None:
    member = make(clip=2.0)
    member.open(state_of(30.0, 40.0), {}, 1.0)
    assert member.begin(WEIGHTS, 1.0).items.tolist() == [30.0, 40.0]  # nothing to measure it by
    commit(member, (3.0, 4.0), 0.0, state_of(30.0, 40.0))  # of length 5
    member.open(state_of(3.0 + 30.0, 4.0 + 40.0), {}, 1.0)
    torch.testing.assert_close(member.begin(WEIGHTS, 1.0).items, torch.tensor([6.0, 8.0]))
    assert member.begin(slice(2, 3), 1.0).items.tolist() == [0.0]
    member.abort()
    member.open(state_of(4.0, 5.0), {}, 1.0)
    torch.testing.assert_close(member.begin(WEIGHTS, 1.0).items, torch.tensor([1.0, 1.0]))


def test_an_anchor_comes_in_order_and_counts_when_it_is_whole() -> None:
    member = make(outer_momentum=0.5)
    before = member._anchor
    member.receive(0, torch.tensor([1.0, 2.0]))
    with pytest.raises(ProtocolError, match="not the next ones"):
        member.receive(1, torch.zeros(2))
    with pytest.raises(ProtocolError, match="not the next ones"):
        member.receive(2, torch.zeros(9))
    assert not member.is_complete
    member.abort()
    assert member._anchor is before
    member.receive(0, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert member.is_complete
    member.adopt()
    assert member._anchor.tolist() == [1.0, 2.0, 3.0]
    assert member._outer.tolist() == [4.0, 5.0]
    assert not member.is_complete


@pytest.mark.parametrize(
    "rule", [{"outer_rate": 0.0}, {"outer_rate": 11.0}, {"outer_momentum": 1.0}, {"clip": 0.0}]
)
def test_a_rule_out_of_range_is_refused(rule: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(rule))} is .*; give a number"):
        AveragingRule(**rule)


def test_contributions_side_by_side_are_as_many_as_hops_and_each_in_range() -> None:
    member = make(is_trimmed=True)
    member.open(state_of(1.0, 2.0), {}, 3.0, num_owners=4)
    own = member.begin(WEIGHTS, 3.0)
    assert own.items.tolist() == [[1.0, 2.0, 3.0]]
    both = member.add(WEIGHTS, own, 5.0)
    assert both.items.tolist() == [[1.0, 2.0, 3.0], [1.0, 2.0, 5.0]]
    assert len(own) == len(both) == 2
    assert member.fault(WEIGHTS, both, weight=8.0, num_shares=2) is None
    assert "fp32 (2, 3), not as fp32 (3, 3)" in member.fault(WEIGHTS, both, weight=8.0, num_shares=3)
    both.items[0, 1] = 1e6
    assert "mean change of 1e+06" in member.fault(WEIGHTS, both, weight=8.0, num_shares=2)
    member.open(state_of(1.0, 2.0), {}, 3.0, num_owners=3)  # too few to trim
    assert member.begin(WEIGHTS, 3.0).items.tolist() == [3.0, 6.0]


def test_an_anchor_is_carried_by_name_and_begun_anew() -> None:
    member = make(WireFormat.INT4, outer_momentum=0.5)
    member.open(state_of(7.0, 0.25), {}, 4.0)
    member.begin(WEIGHTS, 4.0)  # 1 of it is lost, and owed
    commit(member, (7.0, 0.0), 2.0, state_of(7.0, 0.25))
    assert {name: each.tolist() for name, each in member.outer.items()} == {"w": [7.0, 0.0]}
    assert member.anchors["w"].tolist() == [10.5, 0.0]
    training = TrainConfig(OptimizerSettings((), 0.1), 1, averaging=AveragingRule(outer_momentum=0.5))
    layout = Layout(0, 1, LAYOUT.entries[::-1])
    other = SegmentState(layout, {"s"}, training, "cpu", member.anchors, member.outer)
    assert {name: each.tolist() for name, each in other.anchors.items()} == {"w": [10.5, 0.0], "s": [3.0]}
    assert other.outer["w"].tolist() == [7.0, 0.0]
    member.reset(state_of(1.0, 2.0, 3.0))
    assert {name: each.tolist() for name, each in member.anchors.items()} == {"w": [1.0, 2.0], "s": [3.0]}
    assert not member.outer["w"].any()
    member.open(state_of(1.0, 2.0), {}, 4.0)
    assert not member._add_share(WEIGHTS, None, 4.0).any()  # nothing is owed
    assert make().outer == {}
