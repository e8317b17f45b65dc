"""Laws of robust rounds: the same bits everywhere, near the mean if all are honest, bounded if one is not;
whoever falls silent, the round ends; and nobody honest is ever blamed for a lie or called unlike the others.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.averaging.round import RoundPhase
from ravnest.config import WireFormat
from ravnest.peer.robust_mean import count_trimmed, dither, find_mean, judge_rows
from ravnest.protocol.averaging import (
    DirectPart,
    PartStep,
    RoundChecked,
    RoundPledge,
    RoundReady,
)
from tests.support.direct_world import DirectWorld

layouts = st.lists(
    st.lists(st.integers(1, 3), unique=True, max_size=2).map(lambda cuts: tuple(sorted(cuts))),
    min_size=3,
    max_size=6,
)
seeds = st.integers(0, 2**32)
formats = st.sampled_from([WireFormat.FP32, WireFormat.BF16, WireFormat.INT8, WireFormat.INT4])
ALONE = ((), (), (), ())
UNLIKE = ((2,), (1, 3), (3,), ())


@settings(max_examples=40)
@given(layouts, seeds, formats, st.integers(1, 200), st.data())
def test_all_owners_have_the_same_bits_near_the_weighted_mean(cuts, seed, wire_format, length, data):
    world = DirectWorld(cuts, seed, wire_format, length)
    world.weights = {key: data.draw(st.floats(20.0, 80.0), key) for key in world.clusters}
    nodes = sorted(name for each in world.clusters.values() for name in each)
    world.hidden = data.draw(st.frozensets(st.sampled_from(nodes)), "hidden")
    world.train(signal=0.05, noise=0.01)
    wanted = {segment: mean_change(world, segment) for segment in world.rings}
    told = world.run()
    assert told.is_committed, told.reason
    for sender, to, segment, step in told.sent:  # what passes between hidden members passes the hub's line
        num_visible = len([x for x in world.rings[segment].owners if x not in world.hidden])
        is_needed = num_visible == 0 or (step is PartStep.CHECK and num_visible == 1)
        assert is_needed or not {sender, to} <= world.hidden
    assert not told.disputes
    assert not told.liars
    assert not told.outliers
    for segment, mean in wanted.items():
        assert len(world.anchors(segment)) == 1
        if length >= 20:
            off = (world.anchor(segment) - world.start[segment] - mean).norm()
            assert off <= 0.35 * mean.norm()


def mean_change(world: DirectWorld, segment: int) -> torch.Tensor:
    owners = world.rings[segment].owners
    weights = [world.weights[world.cluster_of(x)] for x in owners]
    changes = [world.live[x, segment] - world.start[segment] for x in owners]
    return sum(weight * change for weight, change in zip(weights, changes, strict=True)) / sum(weights)


@settings(max_examples=60)
@given(st.integers(3, 12), seeds, st.floats(-1e3, 1e3), st.floats(0.1, 4.0))
def test_one_row_of_many_moves_no_number_far_beyond_the_others(num_rows, seed, scale, weight):
    generator = torch.Generator().manual_seed(seed)
    honest = [torch.randn(500, generator=generator) for _ in range(num_rows - 1)]
    liar = scale * torch.randn(500, generator=generator)
    weights = [1.0] * (num_rows - 1) + [weight]
    found = find_mean([*honest, liar], weights, [1.0] * num_rows)
    shares = torch.tensor(weights) / (sum(weights) / num_rows)
    stacked = torch.stack(honest) / shares[:-1, None]
    spread = 4.0 * (stacked.amax(0) - stacked.amin(0)).square().mean().sqrt()
    bound = (shares.square().sum() / num_rows) * (stacked.abs().amax(0) + spread)
    assert bool((found.abs() <= bound + 1e-5).all())


@given(st.integers(1, 40), seeds)
def test_the_fast_way_to_bounds_is_the_sorted_one(num_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(50, generator=generator) for _ in range(num_rows)]
    found = find_mean(rows, [1.0] * num_rows, [1.0] * num_rows)
    if num_rows <= 2:
        torch.testing.assert_close(found, torch.stack(rows).mean(0))
        return
    ordered, trimmed = torch.stack(rows).sort(0).values, count_trimmed(num_rows)
    low, high = ordered[trimmed], ordered[num_rows - 1 - trimmed]
    middle = torch.stack(rows).clamp(low, high).mean(0)
    slack = (found - middle).abs()
    assert bool((slack <= 6.0).all())
    assert bool((found <= ordered[-1] + 1e-5).all())
    assert bool((found >= ordered[0] - 1e-5).all())


@given(st.permutations(range(5)), seeds)
def test_the_order_of_equal_weights_changes_no_more_than_rounding(order, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(200, generator=generator) for _ in range(5)]
    found = find_mean(rows, [1.0] * 5, [1.0] * 5)
    again = find_mean([rows[k] for k in order], [1.0] * 5, [1.0] * 5)
    torch.testing.assert_close(found, again)


@given(seeds)
def test_a_left_out_row_changes_nothing(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(200, generator=generator) for _ in range(4)]
    found = find_mean([*rows, 1e9 * rows[0]], [1.0, 2.0, 3.0, 4.0, 9.0], [1.0, 1.0, 1.0, 1.0, 0.0])
    torch.testing.assert_close(found, find_mean(rows, [1.0, 2.0, 3.0, 4.0], [1.0] * 4))


@given(st.integers(1, 700), seeds)
def test_dither_is_right_on_average_and_keeps_the_largest(length, seed):
    items = torch.randn(length, generator=torch.Generator().manual_seed(seed))
    keys = [bytes([k]) for k in range(64)]
    mean = torch.stack([dither(items, key) for key in keys]).mean(0)
    step = float(items.abs().max()) / 7.0
    assert bool(((mean - items).abs() <= 0.5 * step).all())
    assert float(dither(items, b"x").abs().max()) == float(items.abs().max())
    assert torch.equal(dither(items, b"x"), dither(items, b"x"))


STEPS = {
    "its pledge": lambda message: isinstance(message, RoundPledge),
    "its first contribution": lambda message: is_part(message, PartStep.CONTRIBUTION),
    "its first finished part": lambda message: is_part(message, PartStep.FINISHED),
    "its vote": lambda message: isinstance(message, RoundReady),
    "what a checker waits for": lambda message: is_part(message, PartStep.CHECK),
    "what it checked": lambda message: isinstance(message, RoundChecked),
}


def is_part(message, step: PartStep) -> bool:
    return isinstance(message, DirectPart) and message.step is step


@settings(max_examples=60)
@given(st.sampled_from([ALONE, UNLIKE]), seeds, st.sampled_from(sorted(STEPS)), st.integers(0, 3))
def test_a_member_that_falls_silent_at_any_step_is_named_and_the_others_go_on(cuts, seed, step, victim):
    world = DirectWorld(cuts, seed)
    world.train()
    name = world.clusters[f"c{victim}"][-1]
    struck = []

    def dies(sender, message) -> bool:
        is_now = sender == name and STEPS[step](message)
        struck.extend([True] if is_now else [])
        return is_now

    told = world.run(dies=dies)
    before = {segment: world.start[segment].numpy().tobytes() for segment in world.rings}
    if told.is_committed:
        assert not struck  # it owns no part, or nobody asked it for a check
    else:
        assert all(world.anchors(segment) == {before[segment]} for segment in world.rings)
        waited = {world.cluster_of(x) for x in told.silent}
        assert f"c{victim}" in waited
        assert waited == {f"c{victim}"} or step != "what a checker waits for", "no checker is blamed"
    assert not told.liars
    world.left_out = {f"c{victim}"}
    world.train()
    again = world.run()
    assert again.is_committed
    assert not again.liars | again.outliers


@settings(max_examples=25)
@given(seeds, st.floats(0.0, 0.1), st.floats(0.01, 0.1), st.data())
def test_honest_clusters_of_any_speed_are_never_blamed(seed, signal, noise, data):
    world = DirectWorld(data.draw(st.sampled_from([ALONE, UNLIKE, ((),) * 8])), seed, WireFormat.INT4, 200)
    for _ in range(6):
        world.weights = {key: data.draw(st.floats(16.0, 256.0), key) for key in world.clusters}
        world.train(signal, noise)
        told = world.run()
        assert told.is_committed, told.reason
        assert not told.liars
        assert not told.outliers


@given(st.integers(4, 10), seeds, st.floats(0.2, 2.0))
def test_what_is_seen_of_rows_is_what_a_plain_count_sees(num_rows, seed, signal):
    generator = torch.Generator().manual_seed(seed)
    common = signal * torch.randn(400, generator=generator)
    rows = [common + 0.1 * torch.randn(400, generator=generator) for _ in range(num_rows)]
    rows[0] = -rows[0]
    seen = judge_rows(rows, [1.0] * num_rows, [1.0] * num_rows)
    assert seen[0].along < 0 < min(each.along for each in seen[1:])
    assert seen[0].distance > max(each.distance for each in seen[1:])


def test_a_part_that_comes_twice_late_or_from_a_stranger_is_refused():
    world = DirectWorld(ALONE, seed=1)
    world.train()
    refused = []

    def twice(sender, to, message):
        return [message, message] if isinstance(message, DirectPart) else [message]

    told = world.run(lie=twice)
    assert told.is_committed, told.reason
    member = world.open(world.clusters["c0"][0], world.roster())
    list(member.start())
    part = DirectPart(world.number, 0, 9, 9, PartStep.CONTRIBUTION, (), b"")
    for other in (part, DirectPart(99, 0, 0, 0, PartStep.FINISHED, (), b"")):
        refused.append(member.receive(world.clusters["c1"][0], other).reason)
    assert "no part of this round" in refused[0]
    assert "is of round 99" in refused[1]
    assert member.phase is RoundPhase.RUNNING
