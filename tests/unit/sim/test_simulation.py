"""A whole swarm on virtual time: it trains as foreseen, survives deaths and restarts, and repeats itself."""

import json
import random
from dataclasses import replace

import pytest
from support.sim_world import joins, play, small_job, small_swarm

from ravnest.hub.coordinator.notices import WorkLost
from ravnest.plan.types import Plan
from ravnest.sim.churn import Change, ChangeKind, LinkChange, made_up_changes
from ravnest.sim.laws import CountedSamples, check_plan
from ravnest.sim.run import SimulationSettings, simulation_report


def report_of(world, swarm):
    return simulation_report(world, swarm, SimulationSettings(hours=0.1))


def test_a_quiet_swarm_trains_at_the_rate_that_its_plan_foresees():
    swarm = small_swarm()
    world = play(swarm, joins(swarm))
    totals = report_of(world, swarm)["totals"]
    assert len(world.hub.clusters) == 2
    last = [
        span.samples_per_second for span in world.recorder.spans[-3:]
    ]  # the first updates wait for each other
    assert sum(last) / 3 == pytest.approx(totals["foreseen_samples_per_second"], rel=0.1)
    assert totals["rounds_committed"] > 2
    assert totals["rounds_lost"] == totals["samples_lost"] == totals["recoveries"] == 0
    assert totals["events"] > 10
    assert totals["largest_plan_order_bytes"] < 64 * 1024
    assert world.laws.num_checks > totals["events"]


def test_a_cluster_that_loses_a_node_recovers_and_only_open_leases_are_trained_again():
    swarm = small_swarm()
    world = play(swarm, joins(swarm), hours=0.05)
    victim = world.hub.clusters[0].nodes[-1]
    world = play(swarm, (*joins(swarm), Change(100.0, victim, ChangeKind.KILL)))
    report = report_of(world, swarm)
    (recovered,) = report["recovered"]
    assert 3.0 < recovered["seconds"] < 20.0, "grace, plan, state"
    assert report["totals"]["samples_trained_again"] > 0
    assert report["totals"]["samples_lost"] == 0
    assert "WorkLost" not in report["notices"]


def test_a_polite_node_costs_nothing_that_was_trained():
    swarm = small_swarm()
    victim = play(swarm, joins(swarm), hours=0.05).hub.clusters[0].nodes[0]
    world = play(swarm, (*joins(swarm), Change(100.0, victim, ChangeKind.LEAVE)))
    totals = report_of(world, swarm)["totals"]
    assert victim not in world.hub.membership
    assert totals["samples_trained_again"] == totals["samples_lost"] == 0


def test_a_link_that_falls_while_it_trains_is_measured_and_planned_around():
    swarm = small_swarm(upload_bytes_per_second=4e6, download_bytes_per_second=4e6)
    victim = play(swarm, joins(swarm), hours=0.05).hub.clusters[0].nodes[-1]
    world = play(swarm, (*joins(swarm), LinkChange(100.0, victim, 1e-3)), hours=0.07)
    assert world.recorder.notices["Repaired"] == 1
    assert victim not in {name for cluster in world.hub.clusters for name in cluster.nodes}
    assert world.hub.membership[victim].node.upload_bytes_per_second == 4e3


def test_a_hub_that_restarts_goes_on_with_what_its_nodes_have():
    swarm = small_swarm()
    world = play(swarm, joins(swarm), restarts=(150.0,), hours=0.08)
    before = sum(span.samples for span in world.recorder.spans[:2])
    assert world.recorder.notices["Resumed"] == 1
    assert world.recorder.num_samples > before
    assert not world.recorder.notices[WorkLost.__name__]
    assert world.recorder.spans[-1].samples > 0


def test_a_hub_that_is_away_for_two_minutes_stops_nobody():
    swarm = small_swarm()
    trained = []
    for reserve in (0.0, 120.0):
        job = small_job(reserve_seconds=reserve)
        world = play(swarm, joins(swarm), restarts=(200.0,), away_seconds=120.0, hours=0.1, job=job)
        assert not world.recorder.notices[WorkLost.__name__]
        trained.append(world.hub.ledger.num_counted)
    rate = report_of(world, swarm)["totals"]["foreseen_samples_per_second"]
    assert trained[1] - trained[0] > 0.8 * 120.0 * rate


def test_evaluations_and_checkpoints_happen_while_it_trains():
    swarm = small_swarm()
    job = small_job(num_validation=80, evaluate_updates=40, checkpoint_every=60.0)
    world = play(swarm, joins(swarm), job=job)
    assert world.recorder.notices["Evaluated"] > 0
    assert world.recorder.notices["Checkpointed"] > 0


def test_the_same_seed_gives_the_same_bytes_whatever_python_hashes():
    swarm = small_swarm(uptime_seconds=600.0)
    changes = made_up_changes(swarm, 3, hours=0.1, times=1.0)
    found = [json.dumps(report_of(play(swarm, changes), swarm)) for _ in range(2)]
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(4))
def test_no_law_is_broken_in_a_swarm_whose_nodes_come_and_go(seed):
    count = 6 + 2 * seed
    swarm = small_swarm(count, uptime_seconds=200.0)
    changes = made_up_changes(swarm, seed, hours=0.1, times=1.0)
    restarts = (200.0,) if seed % 2 else ()
    world = play(swarm, changes, hours=0.1, restarts=restarts, seed=seed)
    assert world.laws.num_checks > 100


def test_counted_places_are_disjoint_and_joined():
    counted, order = CountedSamples(), [(k, k + 1) for k in range(50)]
    random.Random(0).shuffle(order)
    for start, stop in order:
        counted.add(0, 10 * start, 10 * stop)
    assert counted.total == 500
    for start, stop in ((0, 1), (499, 500), (5, 700), (90, 110)):
        with pytest.raises(AssertionError, match="count twice"):
            counted.add(0, start, stop)
    counted.add(1, 0, 10)


def test_a_plan_with_a_node_in_two_places_breaks_the_law():
    swarm = small_swarm()
    world = play(swarm, joins(swarm), hours=0.01)
    clusters = tuple(each.cluster for each in world.hub.clusters)
    check_plan(Plan(1, 0, clusters, (), ()), 6)
    twice = replace(clusters[0], stages=clusters[1].stages)
    with pytest.raises(AssertionError, match="two places"):
        check_plan(Plan(1, 0, (twice, *clusters[1:]), (), ()), 6)


@pytest.mark.parametrize("victim", [0, 1])
def test_in_a_first_delivery_a_newcomer_costs_nothing_and_a_death_what_the_dead_node_had(victim):
    """Six nodes get first weights for a minute, by the hub's slow line; one dies meanwhile, one comes."""
    job = small_job()
    job = replace(job, config=replace(job.config, hub_bytes_per_second=1e6, clusters=2, max_stages=3))
    swarm, hours = small_swarm(9), 75 / 3600
    early, late = joins(swarm)[:8], Change(20.0, swarm.nodes[8].name, ChangeKind.JOIN)
    quiet = play(swarm, early, hours=hours, job=job)
    before = quiet.hub.clusters
    assert [len(each.nodes) for each in before] == [3, 3]
    dies = Change(30.0, before[victim].nodes[1], ChangeKind.KILL)
    world = play(swarm, (*early, late, dies), hours=hours, job=job)
    after = world.hub.clusters
    assert after[1 - victim].build_id == before[1 - victim].build_id == 1, "it goes on being built"
    assert after[victim].build_id > 1
    assert len(set(after[victim].nodes) - set(before[victim].nodes)) == 1, "a spare takes the place"
    assert late.node not in (*after[0].nodes, *after[1].nodes)
    assert len(world.hub.placement.running) == 2
    assert world.recorder.first_trained_at < 1.05 * quiet.recorder.first_trained_at
    stage_bytes = 20e6
    assert 0 < world.transfers.num_bytes - quiet.transfers.num_bytes < stage_bytes, "what is lost comes again"
    assert world.lines.hub_bulk.num_bytes <= quiet.lines.hub_bulk.num_bytes
