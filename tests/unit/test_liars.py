"""Members that lie to the hub: what they say is refused, or harms nobody but themselves."""

import pytest
from support.hub_world import HubWorld, check_replay, job, quick_plans

from ravnest.hub.events import Received
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
