"""Laws of averaging changes: the weighted mean within rounding, the same bits everywhere, nothing lost."""

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ring_world import run_ring

from ravnest.averaging.ring import RingPosition, RingReduce
from ravnest.codec import decode_tensor
from ravnest.config import WireFormat
from ravnest.engine.optimizers import OptimizerSettings
from ravnest.engine.train_config import AveragingRule, TrainConfig
from ravnest.ids import RoundId, SegmentId
from ravnest.model.state.state_dict import FlatEntry, Layout
from ravnest.peer.segments import SegmentState

# What one encoding may lose, as a part of the largest number: half a step.
ROUNDING = {
    WireFormat.FP32: 2.0**-22,
    WireFormat.BF16: 2.0**-8,
    WireFormat.INT8: 1.01 / 254,
    WireFormat.INT4: 1.01 / 14,
}
formats = st.sampled_from(list(ROUNDING))
sizes = st.integers(2, 5)
lengths = st.integers(0, 700)
seeds = st.integers(0, 2**32)


class Owners:
    """The owners of one segment: weights "w", and statistics "s" that a forward writes."""

    def __init__(self, wire_format: WireFormat, size: int, length: int, seed: int, **rule) -> None:
        self.random = Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.length = length
        statistics = FlatEntry("s", (7,), "float32", 0, 0)  # before the weights, in the order of the line
        layout = Layout(0, 1, (statistics, FlatEntry("w", (length,), "float32", 7, 0)))
        training = TrainConfig(
            OptimizerSettings((), 0.1), 1, deltas=wire_format, averaging=AveragingRule(**rule)
        )
        start = {"w": self.draw(), "s": torch.ones(7)}
        self.members = [SegmentState(layout, {"s"}, training, "cpu", start) for _ in range(size)]
        self.live = [{name: tensor.clone() for name, tensor in start.items()} for _ in range(size)]
        self.moments = [{"w": self.draw()} for _ in range(size)]

    def draw(self, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(self.length, generator=self.generator) * scale

    def train(self, scale: float = 0.1) -> None:
        for state in self.live:
            state["w"] = state["w"] + self.draw(scale)
            state["s"] = state["s"] * torch.rand(7, generator=self.generator)

    def average(self, weights: list[float], chunk_size: int = 100, members: list[int] | None = None):
        """Run a ring; return its members."""
        chosen = list(range(len(self.members))) if members is None else members
        rings = []
        for place, number in enumerate(chosen):
            anchored = self.members[number]
            assert (
                anchored.open(self.live[number], self.moments[number], weights[number], len(chosen)) is None
            )
            seat = RingPosition(RoundId(1), SegmentId(0), place, len(chosen))
            rings.append(RingReduce(seat, anchored, weights[number], chunk_size))
        run_ring(rings, self.random)
        assert all(ring.done for ring in rings)
        assert len({ring.digest for ring in rings}) == 1
        return rings

    def commit(
        self, rings, strength: float = 1.0, is_blocking: bool = True, members: list[int] | None = None
    ):
        chosen = list(range(len(self.members))) if members is None else members
        for number, ring in zip(chosen, rings, strict=True):
            state = self.live[number]
            changes = self.members[number].commit(
                ring.pieces, strength, state, self.moments[number], is_blocking
            )
            for name, change in changes.items():
                state[name] = state[name] + change

    def anchor(self, number: int = 0) -> torch.Tensor:
        return self.members[number]._anchor.clone()

    def weights_of(self, number: int = 0) -> torch.Tensor:
        return self.anchor(number)[: self.length]


def mean_of(tensors, weights) -> torch.Tensor:
    total = sum(tensor.double() * weight for tensor, weight in zip(tensors, weights, strict=True))
    return total / sum(weights)


def draw_weights(random: Random, size: int) -> list[float]:
    return [float(random.randint(1, 9)) for _ in range(size)]


@given(formats, sizes, lengths, seeds)
def test_every_owner_moves_to_the_weighted_mean_in_the_same_bits(wire_format, size, length, seed):
    owners = Owners(wire_format, size, length, seed)
    weights = draw_weights(owners.random, size)
    before = owners.weights_of()
    owners.train()
    changes = [state["w"] - before for state in owners.live]
    statistics = mean_of([state["s"] for state in owners.live], weights)
    owners.commit(owners.average(weights))
    largest = max((float(change.abs().max()) for change in changes if length), default=0.0)
    off = owners.weights_of().double() - before.double() - mean_of(changes, weights)
    bound = size * ROUNDING[wire_format] * largest + 1e-6
    assert not length or float(off.abs().max()) <= bound
    torch.testing.assert_close(owners.anchor()[length:].double(), statistics, rtol=1e-5, atol=1e-6)
    bits = {owners.anchor(number).numpy().tobytes() for number in range(size)}
    assert len(bits) == 1
    for state in owners.live:
        torch.testing.assert_close(state["w"], owners.weights_of(), rtol=1e-6, atol=1e-6)
        assert (state["s"] >= 0).all()


@settings(max_examples=30)
@given(formats, sizes, st.integers(1, 300), st.integers(1, 25), seeds, st.booleans())
def test_what_was_delivered_is_what_was_owed_but_for_one_residual(
    wire_format, size, length, num_rounds, seed, is_blocking
):
    owners = Owners(wire_format, size, length, seed)
    weights = draw_weights(owners.random, size)
    total = sum(weights)
    delivered, owed, largest = torch.zeros(length).double(), torch.zeros(length).double(), 0.0
    for _ in range(num_rounds):
        owners.train()
        before = owners.weights_of()
        changes = [state["w"] - before for state in owners.live]
        largest = max(largest, *(float(change.abs().max()) for change in changes))
        rings = owners.average(weights)
        if owners.random.random() < 0.3:  # it never happened: nothing moves, nothing is owed twice
            for member in owners.members:
                member.abort()
            assert owners.weights_of().equal(before)
            rings = owners.average(weights)
        owners.commit(rings, 1.0 if is_blocking else 0.5, is_blocking)
        owed += mean_of(changes, weights) * total
        delivered += (owners.weights_of().double() - before.double()) * total
    # Each member owes what its last encoding lost of a sum that had its own debt in it, kept in bf16.
    rounding = ROUNDING[wire_format]
    debt = size * rounding * total * largest / max(1 - size * rounding, 0.3)
    noise = num_rounds * total * (2.0**-8 * rounding * largest * size + 1e-6)
    assert float((owed - delivered).abs().max()) <= debt + noise


@settings(max_examples=60)
@given(formats, sizes, seeds)
def test_after_an_abort_the_next_round_is_as_if_it_had_not_been(wire_format, size, seed):
    results = []
    for is_aborted in (False, True):
        owners = Owners(wire_format, size, 300, seed)
        weights = [2.0] * size
        for _ in range(2):
            owners.train()
            owners.commit(owners.average(weights))
        owners.train()
        if is_aborted:
            owners.average(weights)
            for member in owners.members:
                member.abort()
        owners.commit(owners.average(weights))
        results.append(owners.anchor())
    assert results[0].equal(results[1])


@given(formats, sizes, seeds, st.floats(0.5, 1.0), st.floats(0.1, 0.9))
def test_outer_descent_moves_anchors_and_live_weights_alike(wire_format, size, seed, rate, momentum):
    owners = Owners(wire_format, size, 50, seed, outer_rate=rate, outer_momentum=momentum)
    plain = Owners(wire_format, size, 50, seed)
    speed = torch.zeros(50)
    for _ in range(3):
        before = owners.weights_of()
        for each in (owners, plain):
            each.train()
        drift = [state["w"].clone() for state in owners.live]
        change = [state["w"] - before for state in owners.live]
        rings = owners.average([1.0] * size)
        mean = torch.cat([_read(piece) for piece in rings[0].pieces])[:50]
        owners.commit(rings, 0.5, is_blocking=False)
        speed = momentum * speed + mean
        after = before + rate * (mean + momentum * speed)
        torch.testing.assert_close(owners.weights_of(), after, rtol=1e-5, atol=1e-6)
        for number in range(size):
            expected = drift[number] + 0.5 * (mean - change[number]) + (after - before - mean)
            torch.testing.assert_close(owners.live[number]["w"], expected, rtol=1e-4, atol=1e-5)
        assert len({owners.anchor(number).numpy().tobytes() for number in range(size)}) == 1


def _read(piece) -> torch.Tensor:
    return decode_tensor(piece.buffer, piece.spec)


@given(formats, sizes, seeds)
def test_an_owner_that_missed_a_round_takes_part_again_with_the_anchor_of_another(wire_format, size, seed):
    owners = Owners(wire_format, size + 1, 60, seed, outer_momentum=0.5)
    rest = list(range(size))
    for _ in range(2):
        owners.train()
        owners.commit(owners.average([1.0] * size, members=rest), members=rest)
    late = owners.members[size]
    assert not late.is_complete
    for offset, items in owners.members[0].pieces():
        late.receive(offset, items)
    assert late.is_complete
    late.adopt()
    assert late._anchor.equal(owners.anchor())
    owners.train()
    owners.commit(owners.average([1.0] * size + [3.0]))
    assert len({owners.anchor(number).numpy().tobytes() for number in range(size + 1)}) == 1


@given(formats, sizes, seeds)
def test_momenta_are_averaged_and_owe_nothing(wire_format, size, seed):
    owners = Owners(wire_format, size, 200, seed)
    for _ in range(2):
        for number in range(size):
            owners.moments[number] = {"w": owners.draw()}
        found = [moments["w"].clone() for moments in owners.moments]
        owners.train()
        owners.commit(owners.average([1.0] * size))
        largest = max(float(each.abs().max()) for each in found)
        off = owners.moments[0]["w"] - mean_of(found, [1.0] * size).float()
        assert float(off.abs().max()) <= size * ROUNDING[wire_format] * largest + 1e-5


@given(st.integers(3, 6), st.integers(1, 300), seeds, st.booleans())
def test_a_trimmed_mean_leaves_out_the_smallest_and_the_largest_of_four_or_more(size, length, seed, lies):
    owners = Owners(WireFormat.FP32, size, length, seed, is_trimmed=True)
    weights = draw_weights(owners.random, size)
    before = owners.weights_of()
    owners.train()
    if lies and size > 3:  # within range, so that nobody is named
        liar = owners.random.randrange(size)
        owners.live[liar]["w"] = owners.live[liar]["w"] + 500.0
    changes = torch.stack([state["w"] - before for state in owners.live]).double()
    owners.commit(owners.average(weights))
    order = changes.argsort(0)
    kept = torch.tensor(weights).double().unsqueeze(1).repeat(1, length)
    if size > 3:
        kept.scatter_(0, order[:1], 0.0).scatter_(0, order[-1:], 0.0)
    expected = (changes * kept).sum(0) / kept.sum(0)
    torch.testing.assert_close(owners.weights_of().double() - before, expected, rtol=1e-4, atol=1e-4)
    assert len({owners.anchor(number).numpy().tobytes() for number in range(size)}) == 1


@settings(max_examples=30)
@given(formats, seeds)
def test_what_rounding_loses_of_a_trimmed_mean_comes_with_the_next(wire_format, seed):
    owners = Owners(wire_format, 4, 200, seed, is_trimmed=True)
    start, steps = owners.weights_of(), owners.draw(0.1)
    for _ in range(8):
        for state in owners.live:  # all alike: the mean is what each has trained
            state["w"] = state["w"] + steps
        owners.commit(owners.average([2.0] * 4))
    off = owners.weights_of() - start - 8 * steps
    largest = float(steps.abs().max())
    assert float(off.abs().max()) <= 1.2 * ROUNDING[wire_format] * largest + 8 * 2.0**-9 * largest + 1e-5
