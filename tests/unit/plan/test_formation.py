"""Cluster formation on swarms with a known answer."""

from dataclasses import replace

import pytest
from support.plan_world import even_model, node, swarm_of

from ravnest.config import Averaging, PlanConfig, WireChoice
from ravnest.plan.forecast import forecast
from ravnest.plan.formation import form_plan
from ravnest.plan.populations import population
from ravnest.plan.profiles import builtin_profile

CONFIG = PlanConfig(overhead_bytes=0)


def nodes_by_cluster(plan):
    return sorted(sorted(stage.node for stage in cluster.stages) for cluster in plan.clusters)


@pytest.mark.parametrize("num_positions", [1, 2, 3])
def test_a_short_line_can_be_planned(num_positions):
    plan = form_plan(even_model(num_positions), swarm_of(node("a"), node("b")), CONFIG)
    assert plan.clusters


def test_nodes_with_fast_links_are_not_mixed_with_slow_ones():
    model = even_model(num_positions=8, parameter_mb=20, crossing_mb=1)
    fast = [node(f"fast-{k}", memory_mb=900) for k in range(2)]
    slow = [node(f"slow-{k}", memory_mb=900, upload_bytes_per_second=2e6) for k in range(2)]
    config = replace(CONFIG, activations=WireChoice.BF16, gradients=WireChoice.BF16)
    plan = form_plan(model, swarm_of(fast[0], slow[0], fast[1], slow[1]), config)
    assert nodes_by_cluster(plan) == [["fast-0", "fast-1"], ["slow-0", "slow-1"]]


def test_a_node_that_would_slow_its_cluster_down_stays_a_spare():
    model = even_model(num_positions=8, parameter_mb=20)
    lame = node("lame", memory_mb=1200, gflops=1, upload_bytes_per_second=1e3)
    plan = form_plan(model, swarm_of(node("a", memory_mb=3000), node("b", memory_mb=3000), lame), CONFIG)
    assert plan.spares == ("lame",)


def test_a_cluster_that_holds_the_others_back_is_not_formed():
    model = even_model(num_positions=4, parameter_mb=10)
    fast = [node(f"fast-{k}", memory_mb=2000, gflops=1000) for k in range(3)]
    swarm = swarm_of(*fast, node("snail", memory_mb=2000, gflops=1))
    assert form_plan(model, swarm, CONFIG).spares == ("snail",)


def test_blocking_averaging_is_charged_before_one_cluster_is_compared_with_several():
    model = even_model(num_positions=4, parameter_mb=10)
    config = replace(CONFIG, averaging=Averaging.BLOCKING, averaging_share=0.7, max_round_seconds=1e9)
    slow_links = [node(name, upload_bytes_per_second=1e3) for name in "ab"]
    plan = form_plan(model, swarm_of(*slow_links), config)
    assert len(plan.clusters) == 1


@pytest.mark.parametrize("kind", ["home:60", "fibre:25", "campus:12"])
def test_the_same_seed_gives_the_same_plan_and_another_one_a_valid_plan(kind):
    profile, swarm = builtin_profile("gpt2"), population(kind, 3)
    once, again = (form_plan(profile, swarm, PlanConfig(), seed=5) for _ in range(2))
    assert once == again
    other = forecast(form_plan(profile, swarm, PlanConfig(), seed=6), profile, swarm, PlanConfig())
    assert other.samples_per_second > 0.8 * forecast(once, profile, swarm, PlanConfig()).samples_per_second


def test_large_swarms_are_searched_by_neighbourhood_and_use_every_region():
    profile, swarm = builtin_profile("gpt2-xl"), population("home:2500", 1)
    plan = form_plan(profile, swarm, PlanConfig())
    region = {each.name: each.region for each in swarm.nodes}
    assert {region[stage.node] for cluster in plan.clusters for stage in cluster.stages} == set(
        region.values()
    )


def test_the_forecast_says_what_deaths_cost():
    model = even_model(num_positions=4, parameter_mb=10)
    config = replace(CONFIG, recover_seconds=60)
    swarm = swarm_of(node("a", uptime_seconds=600))
    predicted = forecast(form_plan(model, swarm, config), model, swarm, config)
    assert predicted.lost_share == pytest.approx(1 - 1 / 1.1)


def test_a_node_too_slow_to_average_may_still_win_alone():
    model = builtin_profile("gpt2")
    workstation = node(
        "workstation", 22e3, 50e3, upload_bytes_per_second=1.25e6, download_bytes_per_second=2e6
    )
    weak = [
        node(f"weak-{k}", 12e3, 1e3, upload_bytes_per_second=12.5e6, download_bytes_per_second=12.5e6)
        for k in range(4)
    ]
    plan = form_plan(model, swarm_of(workstation, *weak), PlanConfig())
    assert nodes_by_cluster(plan) == [["workstation"]]


def test_a_cheap_position_in_the_middle_does_not_mislead_the_search():
    wide = even_model(num_positions=9, parameter_mb=300, crossing_mb=1)
    thin = replace(
        wide,
        parameter_bytes=(*wide.parameter_bytes[:4], 1e3, *wide.parameter_bytes[5:]),
        forward_flops=(*wide.forward_flops[:4], 1e6, *wide.forward_flops[5:]),
        backward_flops=(*wide.backward_flops[:4], 2e6, *wide.backward_flops[5:]),
        crossing_bytes=(*wide.crossing_bytes[:4], 100.0, 100.0, *wide.crossing_bytes[6:]),
    )
    swarm = population("lan:30", 1)
    rates = [
        forecast(form_plan(model, swarm, CONFIG), model, swarm, CONFIG).samples_per_second
        for model in (wide, thin)
    ]
    assert rates[1] > 0.9 * rates[0]


@pytest.mark.parametrize("max_stages", [1, 2])
def test_no_cluster_has_more_stages_than_allowed(max_stages):
    profile, swarm = builtin_profile("gpt2"), population("lan:12", 0)
    plan = form_plan(profile, swarm, PlanConfig(max_stages=max_stages))
    assert max(len(cluster.stages) for cluster in plan.clusters) <= max_stages


def test_identical_nodes_that_can_each_hold_the_model_train_apart():
    model = builtin_profile("gpt2")
    swarm = swarm_of(*[node(f"cpu-{k}", 30e3, 400, upload_bytes_per_second=12.5e6) for k in range(6)])
    assert len(form_plan(model, swarm, PlanConfig()).clusters) == 6
