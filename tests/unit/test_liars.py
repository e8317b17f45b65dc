"""Members that lie to the hub: what they say is refused, or harms nobody but themselves."""

from dataclasses import replace

import pytest
from support.hub_world import HubWorld, check_replay, job, quick_plans
from support.plan_world import node

from ravnest.hub.events import PeerJoined, Received
from ravnest.staging import StageReady


@pytest.fixture(autouse=True)
def _quick_plans():
    with quick_plans():
        yield


def world_of(names, **changes):
    world = HubWorld(job(**({"num_validation": 0} | changes)))
    world.join(*names)
    return world


def lie(world, name, message):
    """Let a member say something; return why that is refused, if it is."""
    orders = world.feed(Received(name, message, world.now))
    return getattr(orders[0], "reason", None) if orders else None


def test_a_stage_that_nobody_was_given_is_not_ready():
    world = world_of("abc")
    world.run_until(lambda: world.hub.clusters)
    (cluster,) = world.hub.clusters
    for name in cluster.nodes:
        assert "was not given yet" in lie(world, name, StageReady(cluster.epoch))
    world.run()
    assert world.is_finished
    check_replay(world)


@pytest.mark.parametrize(
    "fact",
    [
        {"latency_seconds": 1e300},
        {"uptime_seconds": 1e-300},
        {"flops_per_second": 5e-324},
        {"upload_bytes_per_second": 1.7e308},
        {"memory_bytes": 1e300},
    ],
)
def test_a_machine_whose_numbers_no_plan_can_be_made_with_does_not_join(fact):
    world = world_of("abc")
    world.run_until(lambda: len(world.known) == 3)
    (refused,) = world.feed(PeerJoined(replace(node("liar", 150.0), **fact), "key", (), world.now))
    assert "no machine is like" in refused.reason
    world.run()
    assert world.is_finished
