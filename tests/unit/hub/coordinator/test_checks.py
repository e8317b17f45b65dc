"""Lots from a seed, sketches that are compared, and who is unlike most."""

import struct
from collections import Counter

from ravnest.hub.coordinator.checks import Draws, NodeSketch, is_alike, is_far_above, judge_sketches

TRUE, NEAR, OTHER = (
    struct.pack("<8f", *values)
    for values in (
        (1.0, 0.5, -0.5, 0.1, 2.0, 1.0, 1.0, 1.0),
        (1.004, 0.505, -0.497, 0.104, 2.01, 1.0, 0.99, 1.0),
        (1.0, 0.5, -0.5, 0.1, 2.0, 1.0, 1.1, 1.0),
    )
)


def said(**values):
    return [NodeSketch(node, ((0, 4, value),)) for node, value in values.items()]


def test_the_same_seed_draws_the_same_and_all_are_drawn():
    draws, again, other = Draws(7), Draws(7), Draws(8)
    found = [draws.choose("abcd") for _ in range(400)]
    assert found == [again.choose("abcd") for _ in range(400)]
    assert found != [other.choose("abcd") for _ in range(400)]
    assert min(Counter(found).values()) > 60
    assert sorted(draws.shuffle("abcd")) == [*"abcd"]
    assert draws.choose("a") == "a"


def test_rounding_is_alike_and_other_weights_are_not():
    assert is_alike(TRUE, TRUE)
    assert is_alike(TRUE, NEAR)
    assert not is_alike(TRUE, OTHER)
    assert not is_alike(TRUE, TRUE[:16])
    assert not is_alike(b"123", b"123")
    nan = struct.pack("<4f", float("nan"), 0, 0, 0)
    assert not is_alike(nan, nan)
    nothing = struct.pack("<4f", 0, 0, 0, 0)
    assert is_alike(nothing, nothing)


def test_most_are_right():
    (a,) = said(a=TRUE)
    assert judge_sketches([a], said(b=NEAR, c=TRUE)).num_agreeing == 2
    unlike = judge_sketches([a], said(b=OTHER, c=TRUE))
    assert (unlike.unlike, unlike.disputed, unlike.num_agreeing) == (("b",), (), 1)
    giver = judge_sketches(said(a=OTHER), said(b=TRUE, c=TRUE))
    assert (giver.unlike, giver.num_agreeing) == (("a",), 0)
    assert "a hold other weights" in giver.describe()


def test_without_a_majority_nobody_is_named_a_liar():
    disputed = judge_sketches(said(a=TRUE), said(b=OTHER))
    assert (disputed.unlike, disputed.disputed) == ((), ("a", "b"))
    assert "contradict each other" in disputed.describe()
    assert judge_sketches(said(a=TRUE), []).num_agreeing == 0
    assert judge_sketches(said(a=TRUE), []).describe() == ""


def test_parts_of_several_nodes_are_compared_segment_by_segment():
    given = [NodeSketch("a", ((0, 2, TRUE),)), NodeSketch("b", ((2, 4, TRUE),))]
    other = [NodeSketch("c", ((0, 2, TRUE), (2, 4, OTHER))), NodeSketch("d", ((0, 2, TRUE), (2, 4, TRUE)))]
    verdict = judge_sketches(given, other)
    assert verdict.unlike == ("c",)
    assert verdict.num_agreeing == 1


def test_a_loss_is_far_above_another_beyond_twice_it():
    assert is_far_above(2.1, 1.0)
    assert not is_far_above(1.9, 1.0)
    assert not is_far_above(0.1, 1.0)
    assert is_far_above(0.5, -0.2)
    assert not is_far_above(0.0, 0.0)
