"""The optimal split against brute force over all cuts, relay, memory and rounds included."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_world import SIMPLE, configs, even_model, node, profiles, swarm_of, swarms

from ravnest.plan.cost import LineCost, NodeTable, Rows, timing
from ravnest.plan.split import Splitter


def brute_force(line, nodes, order):
    """Return the slowest stage of the best cuts, and all cuts that reach it, by trying every one."""
    length, answers = line.num_positions, {}
    for inner in combinations(range(1, length), len(order) - 1):
        cuts = np.array([[length, *reversed(inner), 0]])
        times = timing(line, nodes, Rows(np.array([order]), np.array([len(order)]), cuts))
        start, stop = cuts[:, 1:], cuts[:, :-1]
        volume = line.round_bytes(start, stop) / line.round_rate(nodes)[np.array([order])]
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
