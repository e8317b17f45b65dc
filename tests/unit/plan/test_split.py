"""The optimal split against brute force over all cuts, relay, memory and rounds included."""

from dataclasses import replace
from itertools import accumulate, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_world import MB, SIMPLE, configs, even_model, node, profiles, swarm_of, swarms

from ravnest.plan.cost import NodeTable, Rows, timing
from ravnest.plan.line import LineCost
from ravnest.plan.split import FINE_POSITIONS, Splitter, choose_cuts, coarsen, coarsen_to, shorten_line

SUMS = ("parameter_bytes", "matrix_bytes", "forward_flops", "backward_flops", "saved_bytes")


def brute_force(line, nodes, order):
    """Return the slowest stage of the best cuts, and all cuts that reach it, by trying every one."""
    length, answers = line.num_positions, {}
    for inner in combinations(range(1, length), len(order) - 1):
        cuts = np.array([[length, *reversed(inner), 0]])
        times = timing(line, nodes, Rows(np.array([order]), np.array([len(order)]), cuts))
        start, stop = cuts[:, 1:], cuts[:, :-1]
        volume = line.round_bytes(start, stop) / (line.round_share * nodes.both_ways)[np.array([order])]
        fits = (times.memory <= nodes.memory[np.array([order])]) & (volume <= line.config.max_round_seconds)
        answers[tuple(cuts[0])] = float(times.stage.max()) if fits.all() else np.inf
    best = min(answers.values(), default=np.inf)
    return best, answers


@given(profiles(), swarms(most=5), configs, st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_split_equals_brute_force(profile, swarm, config, is_averaged, random):
    line, nodes = LineCost(profile, config, is_averaged), NodeTable.of(swarm, config)
    everyone = list(range(len(swarm.nodes)))
    random.shuffle(everyone)
    orders = [tuple(everyone[:k]) for k in range(1, len(everyone) + 1)]
    splits = Splitter(line, nodes).solve(orders)
    for order, seconds, cuts in zip(orders, splits.seconds, splits.cuts, strict=True):
        best, answers = brute_force(line, nodes, order)
        if not np.isfinite(best):
            assert not np.isfinite(seconds)
            continue
        chosen = tuple(cuts[: len(order) + 1])
        if answers[chosen] > best * (1 + 1e-5):  # the programme reckons in 32 bits
            fastest = min(answers, key=lambda each: answers[each])
            rows = Rows(np.array([order]), np.array([len(order)]), np.array([fastest]))
            assert seconds < timing(line, nodes, rows).seconds[0]  # its windows were too narrow
        assert (cuts[len(order) :] == 0).all()
        times = timing(line, nodes, Rows(np.array([order]), np.array([len(order)]), np.array([chosen])))
        assert seconds == pytest.approx(times.seconds[0], rel=1e-9)


@given(profiles(), swarms(most=5), configs)
@settings(max_examples=20)
def test_an_answer_does_not_depend_on_its_batch(profile, swarm, config):
    line, nodes = LineCost(profile, config, is_averaged=True), NodeTable.of(swarm, config)
    count = len(swarm.nodes)
    orders = [
        tuple((first + k) % count for k in range(size)) for first in range(count) for size in (count, 1)
    ]
    together = Splitter(line, nodes).solve(orders)
    for k, order in enumerate(orders):
        alone = Splitter(line, nodes, keep=False).solve([order])
        assert alone.seconds[0] == together.seconds[k]
        assert (alone.cuts[0] == together.cuts[k][: len(order) + 1]).all()


def split(profile, nodes, config=SIMPLE):
    order = tuple(reversed(range(len(nodes))))  # nodes are given in pipeline order
    splits = Splitter(LineCost(profile, config, False), NodeTable.of(swarm_of(*nodes), config)).solve([order])
    return splits.cuts[0][::-1].tolist(), splits


def test_work_is_shared_by_speed():
    cuts, splits = split(even_model(9), [node("a", gflops=200), node("b", gflops=100)])
    assert cuts == [0, 6, 9]
    assert splits.seconds[0] == pytest.approx(6 * 3e9 / 200e9)


def test_memory_comes_before_speed():
    cuts, _ = split(even_model(9), [node("a", 130, gflops=200), node("b", gflops=100)])
    assert cuts == [0, 3, 9]  # weights, gradient and two old versions of 10 MB each


def test_two_hidden_neighbours_are_cut_where_little_crosses():
    profile = even_model(6, crossing_mb=10)
    thin = (*profile.crossing_bytes[:2], 1e3, *profile.crossing_bytes[3:])
    profile = type(profile)(**{**{f: getattr(profile, f) for f in profile.__slots__}, "crossing_bytes": thin})
    assert split(profile, [node("a"), node("b")])[0] == [0, 3, 6]
    assert split(profile, [node("a", is_reachable=False), node("b")])[0] == [0, 3, 6]
    cuts, _ = split(profile, [node("a", is_reachable=False), node("b", is_reachable=False)])
    assert cuts == [0, 2, 6]


def test_too_little_memory_has_no_split():
    _, splits = split(even_model(6), [node("a", 30), node("b", 30)])
    assert not np.isfinite(splits.seconds[0])


def test_more_nodes_than_positions_have_no_split():
    _, splits = split(even_model(3), [node(name) for name in "abcd"])
    assert not np.isfinite(splits.seconds[0])


def test_a_short_line_keeps_every_cut():
    assert choose_cuts(even_model(6), 6) == (0, 1, 2, 3, 4, 5, 6)
    assert coarsen_to(even_model(6), 100) == even_model(6)


def test_equal_positions_are_merged_evenly():
    assert choose_cuts(even_model(12), 4) == (0, 3, 6, 9, 12)
    assert choose_cuts(even_model(70), 7) == tuple(range(0, 71, 10))
    assert choose_cuts(even_model(12), 1) == (0, 12)


def test_the_cheapest_cut_of_each_stretch_is_kept():
    crossing = [1.0] * 21
    for cheap in (3, 8, 10, 13):
        crossing[cheap] = 0.1
    profile = replace(even_model(20), crossing_bytes=tuple(crossing))
    assert choose_cuts(profile, 5) == (0, 3, 8, 10, 13, 20)


def test_stretches_follow_work_and_parameters_not_the_number_of_positions():
    sizes = (*[1.0] * 20, *[10.0] * 20)
    profile = replace(even_model(40), parameter_bytes=sizes, forward_flops=sizes, backward_flops=sizes)
    cuts = choose_cuts(profile, 11)
    assert len([cut for cut in cuts if 0 < cut <= 20]) == 1
    assert len(cuts) == 12


def test_a_heavy_end_leaves_cuts_on_the_other_side():
    sizes = (1e9, *[1.0] * 30)
    for heavy in (sizes, sizes[::-1]):
        profile = replace(even_model(31), parameter_bytes=heavy, forward_flops=heavy, backward_flops=heavy)
        assert len(choose_cuts(profile, 4)) == 3


def test_merging_keeps_sums_and_the_crossings_of_the_cuts():
    profile = replace(even_model(6), crossing_bytes=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    short = coarsen(profile, (0, 1, 4, 6))
    assert short.num_positions == 3
    assert short.crossing_bytes == (0.0, 1.0, 4.0, 6.0)
    assert short.parameter_bytes == (10 * MB, 30 * MB, 20 * MB)
    for name in SUMS:
        assert sum(getattr(short, name)) == pytest.approx(sum(getattr(profile, name)))


@pytest.mark.parametrize("length", [40, 300, 1000])
def test_cuts_to_search_on_are_fine_cuts(length):
    random = np.random.default_rng(length)
    weights, crossing = random.integers(1, 1000, length), random.integers(1, 1000, length + 1)
    profile = replace(
        even_model(length),
        parameter_bytes=tuple(map(float, weights)),
        crossing_bytes=tuple(map(float, crossing)),
    )
    # Parameters before a cut name the cut, as every weight is a positive whole number.
    short, fine = shorten_line(profile, 50), coarsen_to(profile, FINE_POSITIONS)
    assert short.num_positions <= 50
    assert shorten_line(profile).num_positions <= 32
    assert set(accumulate(short.parameter_bytes)) <= set(accumulate(fine.parameter_bytes))
