"""The pure parts of studies against closed forms, and made-up things that are the same for the same seed."""

from dataclasses import replace
from math import log
from statistics import fmean, pstdev

import pytest
from support.plan_world import node, swarm_of

from benchmarks.baselines.trees import SERVER, SYSTEMS
from benchmarks.shapes import make_shape
from ravnest.hub.coordinator.events import JobGiven, MakePlan, PlanMade
from ravnest.ids import NodeId
from ravnest.sim.churn import ChangeKind, LinkChange, read_trace
from studies.formation import RememberingPlanner, WrongAtFirst, apply_changes, draw_errors, draw_fallen
from studies.homogeneity import Bounds, Found
from studies.real_swarm import LINKS, door_of, make_swarm, make_trace
from studies.rings import OURS, SERVED, count_all, is_relayed, plain_nodes, round_seconds
from studies.testbed import count_departures

MB = 1e6
HALVES = make_shape([(50,)] * 4, 4 * 100 * 1000)  # four clusters that cut in the middle


def seconds_of(way: str, **links: float) -> float:
    nodes = plain_nodes(HALVES, **links)
    return round_seconds(count_all(HALVES, nodes)[way], 100 * MB, nodes, hub_upload=1.0)


def test_what_each_way_moves_is_what_is_known_of_it() -> None:
    traffic = count_all(HALVES, plain_nodes(HALVES))
    for way in (OURS, "butterfly"):  # everybody sends and receives 2 (C-1)/C of what it has
        assert {*traffic[way].sent} == {*HALVES.stages}
        assert [*traffic[way].sent.values()] == pytest.approx([2 * 3 / 4 * 0.5] * 8)
        assert sum(traffic[way].received.values()) == pytest.approx(6.0)
    served = traffic[SERVED]
    assert served.sent[SERVER] == served.received[SERVER] == pytest.approx(4.0)
    assert all(served.sent[name] == pytest.approx(0.5) for name in HALVES.stages)
    assert all(
        sum(each.sent.values()) == pytest.approx(sum(each.received.values())) for each in traffic.values()
    )
    assert traffic.keys() == {OURS, *SYSTEMS}


def test_a_round_takes_as_long_as_the_busiest_link_and_a_lap() -> None:
    assert seconds_of(OURS, rate=10 * MB) == pytest.approx(7.5)
    assert seconds_of("butterfly", rate=10 * MB) == pytest.approx(7.5)
    assert seconds_of(SERVED, rate=10 * MB) == pytest.approx(40.0)
    hop = 2 * 0.5
    assert seconds_of(OURS, rate=10 * MB, latency=0.5) == pytest.approx(7.5 + 6 * hop)
    assert seconds_of("butterfly", rate=10 * MB, latency=0.5) == pytest.approx(7.5 + 2 * hop)
    assert seconds_of("hierarchical", rate=1e30, latency=0.5) == pytest.approx(4 * hop)


def test_two_that_nobody_can_dial_share_the_hub() -> None:
    nodes = plain_nodes(HALVES, rate=10 * MB)
    hidden = {name: replace(each, is_reachable=name == SERVER) for name, each in nodes.items()}
    traffic = count_all(HALVES, hidden)
    assert is_relayed(hidden[NodeId("a0")], hidden[NodeId("b0")])
    assert round_seconds(traffic[OURS], 100 * MB, hidden, hub_upload=10 * MB) == pytest.approx(60.0)
    assert round_seconds(traffic[SERVED], 100 * MB, hidden, hub_upload=1.0) == pytest.approx(40.0)


SWARM = swarm_of(*(node(f"n{k}") for k in range(200)))


def test_errors_of_measurements_are_those_of_the_seed_and_end_with_the_first() -> None:
    errors = draw_errors(SWARM, 0.3, seed=1)
    assert errors == draw_errors(SWARM, 0.3, seed=1) != draw_errors(SWARM, 0.3, seed=2)
    noise = [log(each) for pair in errors.values() for each in pair]
    assert fmean(noise) == pytest.approx(0.0, abs=0.05)
    assert pstdev(noise) == pytest.approx(0.3, rel=0.15)
    measure, one = WrongAtFirst(errors), SWARM.nodes[0]
    wrong = measure(one)
    assert wrong.upload_bytes_per_second == pytest.approx(errors[one.name][0] * one.upload_bytes_per_second)
    assert wrong.download_bytes_per_second == pytest.approx(
        errors[one.name][1] * one.download_bytes_per_second
    )
    assert measure(one) == one


def test_a_share_of_links_falls_and_a_swarm_is_as_changes_leave_it() -> None:
    fallen = draw_fallen(SWARM, 0.2, 0.1, 60.0, seed=0)
    assert len({change.node for change in fallen}) == 40
    after = apply_changes(SWARM, fallen)
    slow = {
        each.name
        for each in after.nodes
        if each.upload_bytes_per_second < 0.5 * SWARM.nodes[0].upload_bytes_per_second
    }
    assert slow == {change.node for change in fallen}
    assert apply_changes(SWARM, [*fallen, *(LinkChange(70.0, each.node, 1.0) for each in fallen)]) == SWARM


def test_a_planner_that_remembers_gives_the_same_answer_at_another_time() -> None:
    asked: list[int] = []

    class Counting:
        def make_plan(self, job: JobGiven, order: MakePlan, now: float) -> PlanMade:
            asked.append(order.plan_id)
            return PlanMade(order.plan_id, None, 1, "none", now)

    from support.sim_world import small_job

    planner, job = RememberingPlanner(Counting()), small_job()
    answers = [
        planner.make_plan(job, MakePlan(number, SWARM.nodes), float(now))
        for now, number in enumerate((1, 2, 1))
    ]
    assert asked == [1, 2]
    assert [(each.plan_id, each.now) for each in answers] == [(1, 0.0), (2, 1.0), (1, 2.0)]


def test_bounds_admit_what_reaches_them() -> None:
    one = replace(SWARM.nodes[0], memory_bytes=8e9, upload_bytes_per_second=40e6 / 8)
    assert Bounds(memory=8.0, upload=40.0).admits(one)
    assert not Bounds(memory=8.1).admits(one)
    assert not Bounds(upload=41.0).admits(one)
    assert Found(10.0, 0.5).goodput == 5.0


def test_in_a_trace_nobody_goes_who_is_away_and_everybody_is_back_soon() -> None:
    swarm = make_swarm(5)
    text = make_trace([each.name for each in swarm.nodes], 300.0, 6.0, seed=3)
    assert text == make_trace([each.name for each in swarm.nodes], 300.0, 6.0, seed=3)
    changes = read_trace(text, "it", swarm)
    for each in swarm.nodes:
        own = [change for change in changes if change.node == each.name]
        assert [change.kind is ChangeKind.JOIN for change in own] == [k % 2 == 0 for k in range(len(own))]
        assert all(
            after.seconds - before.seconds == 15.0
            for before, after in zip(own[1::2], own[2::2], strict=False)
        )
    assert count_departures(changes, 300.0) == 49
    assert count_departures(changes, 60.0) == 10
    assert make_trace([each.name for each in swarm.nodes], 0.0, 0.0, seed=3).count("\n") == 5


def test_devices_are_unequal_and_their_doors_tell_their_links() -> None:
    nodes = make_swarm(9).nodes
    assert len({(each.flops_per_second, each.upload_bytes_per_second) for each in nodes}) == 9
    assert len({each.memory_bytes for each in nodes}) == 3
    assert [door_of(k) for k in range(4)] == ["127.0.0.2:0", "127.0.0.3:0", "127.0.0.4:0", "127.0.0.2:0"]
    assert [each.upload_bytes_per_second for each in nodes[:3]] == [link.bytes_per_second for link in LINKS]
