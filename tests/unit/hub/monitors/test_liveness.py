"""Peers whose links live and whose stages do nothing: they go, and the others train on."""

from dataclasses import replace

import pytest
from support.hub_world import HubWorld, check_replay, job

from ravnest.config import Averaging, HubTimeouts
from ravnest.hub.coordinator.events import Received
from ravnest.hub.coordinator.notices import Checkpointed, ClusterBroken, Left, Recovered
from ravnest.protocol.placement import FetchProgress, SnapshotOrder


def world_of(names, memory_mb=150.0, **changes):
    world = HubWorld(job(**({"num_validation": 0} | changes)))
    world.join(*names, memory_mb=memory_mb)
    world.run_until(lambda: len(world.ledger) > 20)
    return world


def finishes(world):
    world.run()
    assert world.finish is not None
    assert set(world.ledger.values()) == {1}
    check_replay(world)


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_stage_that_hangs_is_taken_over(place):
    world = world_of("abcd")
    idle, since = world.hub.clusters[0].nodes[place], world.now
    world.muted.add(idle)
    for node in world.hub.clusters[0].nodes:  # the others wait for it
        world.peers[node].busy_until = 1e9
    world.from_cluster = lambda *_: None
    world.run_until(lambda: world.told(Left))
    (left,) = world.told(Left)
    assert left.node == idle
    assert "it does no work" in left.reason
    assert 110 < world.now - since < 140
    del world.from_cluster
    finishes(world)


def test_a_cluster_in_which_all_answer_but_nothing_moves_is_built_anew():
    world = world_of("abcd")
    world.from_cluster = lambda *_: None
    world.run_until(lambda: world.told(ClusterBroken))
    assert "nothing moves" in world.told(ClusterBroken)[0].reason
    del world.from_cluster
    finishes(world)
    assert world.told(Left) == []
    assert len(world.told(Recovered)) == 1


def test_who_hangs_in_the_last_evaluation_is_not_waited_for_for_ever():
    world = HubWorld(job(num_validation=23))
    world.join(*"abcde", memory_mb=250.0)
    world.run_until(lambda: world.hub.phase.name == "EVALUATING")
    evaluating = next(each for each in world.hub.clusters if world.hub.ledger.is_busy(each))
    world.muted.add(evaluating.leaf)
    finishes(world)
    assert [news.node for news in world.told(Left)] == [evaluating.leaf]


def test_who_works_is_never_asked_however_long_it_takes():
    world = world_of("abc", num_samples=60, checkpoint_every=None)
    for name in "abc":
        world.slow(name, 100.0)  # half a minute for each batch
    finishes(world)
    orders = [order for orders in world.answers for order in orders]
    asked = [order for order in orders if isinstance(getattr(order, "message", None), SnapshotOrder)]
    assert all(order.message.is_final for order in asked)


def test_who_never_gets_ready_goes():
    world = world_of("abcd", checkpoint_every=3.0)
    world.run_until(lambda: world.told(Checkpointed))
    cluster, since = world.hub.clusters[0], world.now
    (spare,) = set("abcd") - set(cluster.nodes)
    world.muted.add(spare)
    world.kill(cluster.nodes[1])
    world.run_until(lambda: len(world.told(Left)) == 2)
    assert (world.told(Left)[1].node, "it does no work" in world.told(Left)[1].reason) == (spare, True)
    assert world.now - since > 300, "it may have been fetching something large"
    world.join("x")
    finishes(world)


def test_who_never_gives_what_others_need_goes():
    world = HubWorld(job(num_validation=0, average_every=1, epochs=6))
    world.join(*"abcdefg", memory_mb=150.0)
    world.run_until(lambda: world.hub.clusters and world.hub.ledger.progress.anchor_round(world.hub.clusters))
    first, second = world.hub.clusters
    world.kill(first.nodes[1])
    world.run_until(lambda: world.told(ClusterBroken))
    world.muted |= set(second.nodes)
    world.run_until(lambda: len(world.told(Left)) > 1)
    gone = {news.node for news in world.told(Left)} - {first.nodes[1]}
    assert gone <= set(second.nodes)
    world.muted.clear()
    finishes(world)


def test_who_waits_for_a_long_round_does_work():
    timeouts = HubTimeouts(round_seconds=300.0)  # as for a large model on slow links
    given = job(num_validation=0, average_every=2, num_samples=200)
    config = replace(given.config, averaging=Averaging.BLOCKING, max_round_seconds=1000.0)
    world = HubWorld(replace(given, config=config), timeouts=timeouts)
    world.join(*"abcd", memory_mb=650.0)
    world.vote = lambda name, opened: (400.0, world.ready(name, opened.round_id))
    world.run_until(lambda: world.open_round is not None)
    world.from_cluster = lambda *_: None
    opened_at = world.now
    world.run(until=opened_at + 390.0)
    assert world.told(Left) == []
    assert world.told(ClusterBroken) == []


@pytest.mark.parametrize("still_fetches", [False, True])
def test_who_still_fetches_its_stage_is_waited_for(still_fetches):
    """A hub with a slow line may need hours for first weights: what counts is that more of them arrive."""
    world = HubWorld(job(num_validation=0))
    world.muted.add("b")
    world.join(*"abc", memory_mb=250.0)
    world.run_until(lambda: world.hub.clusters and "b" in world.hub.clusters[0].unready)
    build_id = world.hub.clusters[0].build_id

    def fetch(num_bytes):
        is_building = world.hub.clusters and world.hub.clusters[0].build_id == build_id
        if is_building and num_bytes <= 20:
            world.feed(Received("b", FetchProgress(build_id, num_bytes, 1000), world.now))
            world.after(200.0, fetch, num_bytes + still_fetches)

    fetch(1)
    since = world.now
    world.run_until(lambda: world.told(Left))
    assert world.told(Left)[0].node == "b"
    seconds = world.now - since
    assert seconds > 19 * 200 + 300 if still_fetches else 300 < seconds < 1000
