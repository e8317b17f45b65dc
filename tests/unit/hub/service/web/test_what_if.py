"""What one more PC would bring: as much as the hub then plans when that PC comes."""

from dataclasses import replace

import pytest
from support.hub_world import job
from support.watched_world import WatchedWorld

from ravnest.hub.coordinator.planner import SEARCH_PLANNER
from ravnest.hub.service.web.recorder import RunRecorder
from ravnest.hub.service.web.what_if import GUEST, answer_what_if, make_guest, pose_what_if
from ravnest.ids import NodeId


def make_world(names="abc", memory_mb=250.0):
    world = WatchedWorld(job(epochs=8))
    world.join(*names, memory_mb=memory_mb)
    world.run_until(lambda: world.hub.clusters and world.hub.ledger.num_counted > 0)
    return world


def test_the_answer_is_what_the_hub_then_plans():
    world = make_world("abcd")
    known = world.hub.membership.find("a").node
    question = pose_what_if(world.recorder, replace(known, name=GUEST))
    found = answer_what_if(question, SEARCH_PLANNER)
    assert found.now_samples_per_second == world.hub.placement.outlook.samples_per_second
    plan_id = world.hub.placement.rings and max(each.build_id for each in world.hub.clusters)
    before = world.document().plan
    world.join("newcomer", memory_mb=250.0)
    world.run_until(lambda: world.document().plan != before or world.is_finished)
    assert not world.is_finished, f"a plan with the newcomer follows plan {plan_id}"
    outlook = world.hub.placement.outlook
    assert found.then_samples_per_second == pytest.approx(outlook.samples_per_second)
    assert found.num_clusters == len(world.hub.clusters)


def test_asking_changes_nothing():
    world, untouched = make_world(), make_world()
    for _ in range(3):
        question = pose_what_if(world.recorder, make_guest(2.5e8, 1e12, 1e7))
        answer_what_if(question, SEARCH_PLANNER)
    assert world.document() == untouched.document()
    assert world.run().answers == untouched.run().answers


def test_before_there_is_a_plan_it_says_whether_the_model_would_fit():
    world = WatchedWorld(job(epochs=8, expected_nodes=9))
    world.join("a", memory_mb=10.0)
    world.run_until(lambda: "a" in world.hub.membership)
    small = answer_what_if(pose_what_if(world.recorder, make_guest(1e7, 1e12, 1e7)), SEARCH_PLANNER)
    assert (small.then_samples_per_second, small.place) == (None, "nobody trains")
    assert small.reason
    large = answer_what_if(pose_what_if(world.recorder, make_guest(1e11, 1e12, 1e7)), SEARCH_PLANNER)
    assert large.then_samples_per_second > 0


def test_without_a_job_or_with_a_pc_that_cannot_be_there_is_no_question():
    assert pose_what_if(RunRecorder(), make_guest(1e9, 1e12, 1e7)) is None
    for facts in ((1e9, 0.0, 1e7), (1e9, float("nan"), 1e7), (1e9, 1e12, float("inf")), (-1.0, 1e12, 1e7)):
        assert make_guest(*facts) is None
    assert make_guest(1e9, 1e12, 1e7).name == NodeId("one more PC")
