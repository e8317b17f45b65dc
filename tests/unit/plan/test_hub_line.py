"""The hub's line: which clusters are worth what they ask of it, and orders that spare it."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from support.plan_world import SIMPLE, even_model, node, swarm_of

from ravnest.config import Mean, SearchBudget, WireChoice, WireFormat
from ravnest.plan.forecast import forecast
from ravnest.plan.formation import form_plan
from ravnest.plan.hub_line import (
    HubLine,
    RelayedRounds,
    alternate,
    choose_clusters,
    other_orders,
    relayed_places,
)
from ravnest.plan.line import LineCost

UNCOUNTED = HubLine(np.inf, 1.0, 1.0, 0.0)


def test_chosen_clusters_against_a_plain_loop():
    rng = np.random.default_rng(0)
    for _ in range(200):
        periods = rng.lognormal(0, 1.5, size=rng.integers(1, 9))
        ratio = float(rng.choice([1.0, 2.0, 4.0, 100.0]))
        totals = {
            slowest: sum(min(1 / period, ratio / slowest) for period in periods if period <= slowest)
            for slowest in periods
        }
        rate, kept = choose_clusters(periods, np.ones(len(periods)), ratio, UNCOUNTED)
        assert rate == pytest.approx(max(totals.values()))
        assert totals[periods[kept].max()] == pytest.approx(rate)


def test_clusters_that_ask_too_much_of_the_line_are_left_out():
    rng = np.random.default_rng(1)
    for _ in range(100):
        count = int(rng.integers(1, 7))
        periods = rng.lognormal(0, 0.3, size=count)
        asked = 1.0 + rng.integers(0, 4, size=count) * 10.0
        hub = HubLine(float(rng.choice([1.0, 5.0, 20.0])), 1.0, 10.0, 0.0)
        rate, kept = choose_clusters(periods, asked, 100.0, hub)
        assert kept.any()
        assert rate == pytest.approx(_rate_of(periods[kept], asked[kept], hub))
        sets = (list(each) for size in range(1, count + 1) for each in combinations(range(count), size))
        best = max(_rate_of(periods[each], asked[each], hub) for each in sets)
        assert rate >= 0.9 * best  # they are chosen one after another


def _rate_of(periods, asked, hub):
    return (1 / periods).sum() / max(1.0, (asked / periods).sum() / hub.upload)


@pytest.mark.parametrize("seed", range(20))
def test_alternating_puts_as_few_hidden_nodes_side_by_side_as_can_be(seed):
    rng = np.random.default_rng(seed)
    hidden = (rng.random(9) < 0.6).tolist()
    order = tuple(rng.permutation(9)[: int(rng.integers(1, 10))].tolist())
    made = alternate(order, hidden)
    assert sorted(made) == sorted(order)
    num_hidden = sum(hidden[each] for each in order)
    fewest = max(0, num_hidden - 1 - (len(order) - num_hidden))
    assert len(relayed_places(made, hidden)) == fewest
    for kind in (True, False):
        same = [each for each in order if hidden[each] == kind]
        assert [each for each in made if hidden[each] == kind] == same


def test_relays_are_as_many_as_the_line_carries():
    model = even_model(crossing_mb=1.0)
    config = replace(SIMPLE, hub_bytes_per_second=12e6, relay_bytes_per_second=1e6)
    hub = HubLine.of(LineCost(model, config, is_averaged=False))
    assert hub.sample_bytes == 2e6
    assert hub.relay_bytes == 1e6  # 0.5 MB each way in bf16
    assert hub.most_relays(0.4, hub.upload) == 0  # a pair alone needs longer
    assert hub.most_relays(0.5, hub.upload) == 4  # 6 MB, less the samples
    assert hub.most_relays(0.5, 3e6) == 0
    assert hub.asked_by(4, 0.5) == 12e6
    assert UNCOUNTED.most_relays(1.0, np.inf) == np.inf


def test_a_plan_spares_a_slow_hub():
    """Six PCs are needed, three of them hidden: with a slow hub no two of those are neighbours."""
    model = even_model(num_positions=12, parameter_mb=40, crossing_mb=1.0)
    hidden = [node(f"h{k}", 500, is_reachable=False) for k in range(6)]
    visible = [node(f"v{k}", 500, gflops=50) for k in range(3)]
    swarm = swarm_of(*hidden, *visible)
    config = replace(SIMPLE, activations=WireChoice.BF16, relay_bytes_per_second=1e9)
    free, counted = (replace(config, hub_bytes_per_second=upload) for upload in (0.0, 3e7))
    blind, aware = (form_plan(model, swarm, each, budget=SearchBudget(200)) for each in (free, counted))
    assert _num_relays(aware, swarm) < _num_relays(blind, swarm)
    then, now = (forecast(each, model, swarm, counted).samples_per_second for each in (blind, aware))
    assert now > then


def _num_relays(plan, swarm):
    hidden = {each.name for each in swarm.nodes if not each.is_reachable}
    return sum(
        one.node in hidden and other.node in hidden
        for cluster in plan.clusters
        for one, other in pairwise(cluster.stages)
    )


def rounds_of(most_seconds):
    """Four positions of a megabyte, a hub of a megabyte per second: a pair takes 2 s for each position."""
    config = replace(
        SIMPLE, hub_bytes_per_second=1e6, max_relayed_round_seconds=most_seconds / 0.9, deltas=WireFormat.FP32
    )
    return RelayedRounds(LineCost(even_model(4, parameter_mb=1), config, is_averaged=True))


def test_a_round_passes_the_hub_where_more_owners_are_hidden_than_not():
    rounds = rounds_of(10.0)
    cuts = np.array([[4, 2, 0], [4, 3, 0]])
    sides = rounds.sides([(0, 1), (2, 3)], cuts, np.array([True, False, True, True]))
    assert sides.tolist() == [[-1, -1, 1, 1], [1, 1, 1, 1]]
    assert rounds.seconds(sides) == pytest.approx(2 * (2 + 2) / 2)  # two pairs at each of two positions


def test_a_robust_round_passes_the_hub_where_all_owners_are_hidden():
    rounds = rounds_of(10.0)
    sides = np.ones((4, 4), np.int64)
    assert rounds.seconds(sides) == pytest.approx(2 * 3 * 4)  # at each position three times two seconds
    sides[0, 1:] = -1
    assert rounds.seconds(sides) == pytest.approx(2 * 3)


NOBODY = np.zeros((3, 1, 4), np.int64), np.zeros((3, 1))


def test_rounds_in_time_change_nothing():
    kept, chosen = rounds_of(100.0).shorten(np.ones((3, 4), np.int64), np.ones(3), *NOBODY)
    assert kept.tolist() == [0, 1, 2]
    assert chosen.tolist() == [-1, -1, -1]


def test_the_cluster_that_is_worth_least_is_left_out_first():
    sides = np.ones((3, 4), np.int64)
    rates = np.array([3.0, 1.0, 2.0])
    rounds = rounds_of(8.0)
    assert rounds.is_too_long(sides)
    kept, _ = rounds.shorten(sides, rates, *NOBODY)
    assert kept.tolist() == [0, 2]
    assert not rounds.is_too_long(sides[kept])


def test_another_order_is_taken_where_that_costs_less_than_a_cluster():
    sides = np.array([[1, 1, -1, -1]] * 3)
    others, slower = -sides[:, None], np.array([[0.9], [0.2], [0.0]])
    rounds = rounds_of(3.0)
    assert rounds.is_too_long(sides)
    kept, chosen = rounds.shorten(sides, np.ones(3), others, slower)
    assert kept.tolist() == [0, 1, 2]
    assert chosen.tolist() == [0, -1, -1]


def test_a_hub_of_unknown_upload_has_time_for_any_round():
    line = LineCost(even_model(4), SIMPLE, is_averaged=True)
    assert not RelayedRounds(line).is_too_long(np.ones((30, 4), np.int64))


@pytest.mark.parametrize("length", [1, 2, 7, 20])
def test_other_orders_have_the_same_nodes(length):
    order = tuple(range(length))
    found = other_orders(order, 6, np.random.default_rng(0))
    assert len(found) == 6
    assert all(sorted(each) == list(order) for each in found)


def test_no_plan_has_rounds_that_take_longer_than_they_may():
    model = even_model(num_positions=8, parameter_mb=40, crossing_mb=0.1)
    hidden = [node(f"h{k}", 4000, is_reachable=False) for k in range(16)]
    swarm = swarm_of(*hidden, *[node(f"v{k}", 4000) for k in range(4)])
    config = replace(SIMPLE, hub_bytes_per_second=2e7, averaging_share=0.5, clusters=14, mean=Mean.PLAIN)
    plans = [
        form_plan(model, swarm, replace(config, max_relayed_round_seconds=most), budget=SearchBudget(200))
        for most in (1e9, 20.0)
    ]
    free, kept = (forecast(plan, model, swarm, config) for plan in plans)
    assert free.round_seconds > 20.0
    assert kept.round_seconds <= 20.0
    assert kept.samples_per_second > 0.0
