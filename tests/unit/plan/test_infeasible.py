"""What is short is said; spares are counted by what keeps them from hosting a stage."""

from dataclasses import replace

import pytest
from support.plan_world import SIMPLE, even_model, node, swarm_of

from ravnest.config import PlanConfig
from ravnest.errors import PlanError
from ravnest.plan.assembly import assemble_plan
from ravnest.plan.forecast import forecast
from ravnest.plan.formation import cut_clusters, form_plan
from ravnest.plan.infeasible import LeftOut, count_left_out
from ravnest.plan.profiles import builtin_profile
from ravnest.plan.types import Swarm

MODEL = even_model(num_positions=4, parameter_mb=100, crossing_mb=1)
ABLE = {"memory_mb": 3000, "gflops": 100}


def reasons_for(*spares, config=SIMPLE, **options):
    """Two pairs of able nodes train; what is said of the others?"""
    swarm = swarm_of(*(node(name, **ABLE) for name in "abcd"), *spares)
    clusters = cut_clusters(MODEL, swarm, config, ((0, 1), (2, 3)), is_averaged=True)
    plan = assemble_plan(clusters, MODEL, swarm, config, seed=0, plan_id=1)
    return count_left_out(plan, MODEL, swarm, config, **options)


def test_without_spares_nobody_is_left_out():
    assert reasons_for() == {}


def test_each_spare_has_one_reason():
    small = node("small", 90)
    lame = node("lame", 3000, upload_bytes_per_second=1e6)
    slow = node("slow", 3000, gflops=1)
    able = node("able", **ABLE)
    assert reasons_for(small, small, lame, slow, able) == {
        LeftOut.MEMORY: 2,
        LeftOut.LINK: 1,
        LeftOut.COMPUTE: 1,
        LeftOut.REST: 1,
    }


def test_a_link_too_slow_to_average_one_position_in_time():
    lame = node("lame", 3000, upload_bytes_per_second=1e4)
    assert reasons_for(lame, config=replace(SIMPLE, max_round_seconds=100)) == {LeftOut.ROUND: 1}


def test_able_nodes_that_nobody_can_dial_need_others_between_them():
    hidden = [node(f"hidden-{k}", is_reachable=False, **ABLE) for k in range(3)]
    slow_relay = replace(SIMPLE, relay_bytes_per_second=1e5)
    assert reasons_for(*hidden, node("seen", **ABLE), config=slow_relay) == {
        LeftOut.HIDDEN: 2,
        LeftOut.REST: 2,
    }
    assert reasons_for(*hidden, config=replace(SIMPLE, relay_bytes_per_second=1e9)) == {LeftOut.REST: 3}


def test_able_nodes_of_a_limited_plan_would_cost_quality():
    assert reasons_for(node("able", **ABLE), is_limited=True) == {LeftOut.QUALITY: 1}


def test_able_nodes_beside_a_hub_whose_line_is_full():
    full = replace(SIMPLE, hub_bytes_per_second=1e6)
    assert reasons_for(node("able", **ABLE), config=full) == {LeftOut.HUB: 1}
    wide = replace(SIMPLE, hub_bytes_per_second=1e12)
    assert reasons_for(node("able", **ABLE), config=wide) == {LeftOut.REST: 1}


def test_an_empty_swarm_is_a_plan_error():
    with pytest.raises(PlanError, match="no nodes have joined"):
        form_plan(even_model(), Swarm(()), SIMPLE)


def test_a_shortage_counts_only_nodes_that_could_help():
    tiny = [node(f"tiny-{k}", memory_mb=400) for k in range(60)]
    with pytest.raises(PlanError) as few:
        form_plan(builtin_profile("gpt2-xl"), swarm_of(*tiny[:10]), PlanConfig())
    with pytest.raises(PlanError) as many:
        form_plan(builtin_profile("gpt2-xl"), swarm_of(*tiny), PlanConfig())
    assert str(few.value).split(";")[0] == str(many.value).split(";")[0]


@pytest.mark.parametrize(("most_seconds", "reason"), [(1e9, LeftOut.REST), (100.0, LeftOut.RELAYED)])
def test_spares_whose_cluster_would_make_rounds_too_long_are_told_so(most_seconds, reason):
    model = even_model(num_positions=4, parameter_mb=100, crossing_mb=1e-5)  # samples take next to nothing
    config = replace(SIMPLE, hub_bytes_per_second=1e8, max_relayed_round_seconds=most_seconds)
    swarm = swarm_of(*(node(name, **ABLE, is_reachable=False) for name in "abcd"), node("e", **ABLE))
    clusters = cut_clusters(model, swarm, config, ((0, 1), (2, 3)), is_averaged=True)
    plan = assemble_plan(clusters, model, swarm, config, seed=0, plan_id=1)
    told = forecast(plan, model, swarm, config)
    assert told.hub.round_bytes > 0
    slow = replace(config, hub_bytes_per_second=told.hub.round_bytes / 90.0)  # a round takes 90 s on it
    assert count_left_out(plan, model, swarm, slow) == {reason: 1}
