"""Leases ahead: how far, in which order they are begun; what is trained without a hub counts once."""

from dataclasses import replace

import pytest
from support.hub_world import HubWorld, Trouble, check_replay, job

from ravnest.config import RESERVE
from ravnest.hub.coordinator.events import PauseAsked, Send
from ravnest.hub.coordinator.lease_reserve import find_room
from ravnest.hub.coordinator.leases import OpenLease
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    ClusterStarted,
    Evaluated,
    Resumed,
    Returned,
)
from ravnest.ids import LeaseId, MicrobatchId
from ravnest.plan.assembly import stage_bytes
from ravnest.plan.line import LineCost
from ravnest.protocol.training import LeaseBegin, LeaseGrant

LONG = {"num_samples": 1600, "num_validation": 0, "epochs": 1, "reserve_seconds": 0.6}


def world_of(names="abcd", trouble=None, **changes):
    world = HubWorld(job(**(LONG | changes)), trouble)
    world.join(*names, memory_mb=150.0)
    return world


def held(world, cluster):
    ahead = world.hub.ledger.leases_ahead
    return sum(sum(each.num_samples) for each in ahead if each.cluster_id == cluster.cluster_id)


def sent(world, kind):
    orders = (order for orders in world.answers for order in orders)
    return [each.message for each in orders if isinstance(each, Send) and isinstance(each.message, kind)]


def finishes(world):
    world.run()
    assert world.is_finished
    assert set(world.ledger.values()) == {1}
    assert world.hub.ledger.leases_ahead == ()
    check_replay(world)


def lease_of(*sizes):
    return OpenLease(LeaseId(0), "A", None, MicrobatchId(0), sizes)


def test_a_reserve_is_bounded_by_time_by_bytes_by_microbatches_and_by_what_is_left_for_others():
    settings = job(reserve_seconds=10.0, reserve_samples=70).settings
    assert find_room(settings, 5.0, (), 0, 10**6, 10**6) == 50
    assert find_room(settings, 50.0, (), 0, 10**6, 10**6) == 70
    assert find_room(settings, 5.0, (lease_of(8, 8), lease_of(8)), 24, 10**6, 10**6) == 26
    assert find_room(settings, 5.0, (lease_of(*[0] * RESERVE.most_microbatches),), 0, 10**6, 10**6) == 0
    assert find_room(settings, 5.0, (), 40, 60, 10**6) == 10, "with it, half of what is left is ahead"
    assert find_room(settings, 5.0, (), 70, 60, 10**6) == 0
    assert find_room(settings, 5.0, (lease_of(8),), 8, 10**6, 20) == 12, "memory for 20"
    assert find_room(settings, 5.0, (), 0, 10**6, -3) == 0


def test_leases_ahead_grow_with_training_up_to_the_seconds_asked_for_and_are_begun_in_order():
    world = world_of()
    world.run_until(lambda: world.hub.ledger.num_counted > 800)
    clusters = world.hub.clusters
    for cluster in clusters:
        rate, size = cluster.samples_per_second, 8
        assert 0.6 * rate - 2 * size <= held(world, cluster) <= 0.6 * rate
    begun = [each.lease for each in sent(world, LeaseBegin)]
    ahead = [each.lease for each in sent(world, LeaseGrant) if each.is_ahead]
    assert len(begun) > 20
    assert begun == ahead[: len(begun)] or set(begun) <= set(ahead)
    for cluster in clusters:
        mine = [number for number in begun if world.leases[number].cluster_id == cluster.cluster_id]
        assert mine == sorted(mine), "the samples of the first are there first"
    finishes(world)


def line_of(world):
    profile, config = world.hub.placement.costs
    return LineCost(profile, config, is_averaged=len(world.hub.clusters) > 1)


def find_waiting(world):
    """Return the bytes that each node with leases ahead may wait with, and what its plan leaves for them."""
    line, memory = line_of(world), {name: peer.node.memory_bytes for name, peer in world.peers.items()}
    for cluster in (each for each in world.hub.clusters if held(world, each)):
        begun = sum(sum(x.num_samples) for x in world.open_leases if x.cluster_id == cluster.cluster_id)
        takers = dict(world.hub.placement.fields(cluster, is_evaluation=False))
        for stage in (each for each in cluster.cluster.stages if each.node in takers):
            left = memory[stage.node] - stage_bytes(line, stage, cluster.cluster)
            left += line.leased_bytes(stage.window) if stage.start == 0 else 0.0
            size = 1e6 * (
                1 + (stage.start > 0 or stage.stop == line.num_positions)
            )  # others have labels, too
            yield size * (begun + held(world, cluster)), left


@pytest.mark.parametrize("lent_mb", [115.0, 130.0, 400.0])
def test_samples_of_a_megabyte_wait_within_what_pcs_lend(lent_mb):
    facts = {"chunk_batches": 1, "reserve_seconds": 60.0, "reserve_samples": 32}
    given = job(**(LONG | {"num_samples": 400} | facts))
    ends, inner = 10e6, given.profile.crossing_bytes[1:-1]  # of ten samples
    given = replace(given, profile=replace(given.profile, crossing_bytes=(ends, *inner, ends)))
    world, most = HubWorld(given), [0.0]
    world.join(*"abcd", memory_mb=lent_mb)

    def look():
        for waiting, left in find_waiting(world):
            assert waiting <= left
            most.append(waiting)
        assert all(held(world, each) <= 32 for each in world.hub.clusters)
        return world.is_finished

    world.run_until(look)
    assert (max(most) > 0) == (lent_mb > 120), "where stages fill what is lent, there is no reserve"
    finishes(world)


def test_without_a_reserve_nothing_is_sent_ahead():
    world = world_of(reserve_seconds=0.0)
    finishes(world)
    assert not sent(world, LeaseBegin)
    assert not any(each.is_ahead for each in sent(world, LeaseGrant))


def test_what_clusters_trained_while_the_hub_was_away_counts_before_the_next_plan():
    world = world_of()
    world.run_until(lambda: world.hub.ledger.num_counted > 800)
    before, ahead = world.hub.ledger.num_counted, sum(held(world, each) for each in world.hub.clusters)
    world.random.choice = lambda _: 15.0  # seconds until they find the hub again
    world.restart()
    world.run_until(lambda: world.told(Resumed))
    num_started = len(world.told(ClusterStarted))
    world.run_until(lambda: len(world.told(Returned)) == 4)
    assert len(world.told(ClusterStarted)) == num_started
    assert world.hub.ledger.num_counted > before + ahead / 2
    finishes(world)


def test_what_nobody_trained_while_the_hub_was_away_is_granted_again():
    world = world_of()
    world.run_until(lambda: world.hub.ledger.num_counted > 800)
    world.work = lambda *_: None  # they wait for the hub
    world.random.choice = lambda _: 1.0
    world.restart()
    world.run_until(lambda: world.told(Resumed))
    before = world.hub.ledger.num_counted
    num_started = len(world.told(ClusterStarted))
    del world.work
    world.run_until(lambda: len(world.told(ClusterStarted)) > num_started)
    assert world.hub.ledger.num_counted <= before + 32, "but for what was under way"
    finishes(world)


def test_a_cluster_that_breaks_trains_only_again_what_it_had_begun():
    world = world_of()
    world.run_until(lambda: world.hub.ledger.num_counted > 800)
    cluster = world.hub.clusters[0]
    mine = [each for each in world.open_leases if each.cluster_id == cluster.cluster_id]
    num_begun, num_ahead = sum(sum(each.num_samples) for each in mine), held(world, cluster)
    assert num_begun > 0
    assert num_ahead > 0
    world.kill(cluster.leaf)
    world.run_until(lambda: world.told(ClusterBroken))
    assert world.told(ClusterBroken)[0].num_given_back <= num_begun
    assert held(world, cluster) == 0, "but what it had ahead is given back, too"
    finishes(world)


@pytest.mark.parametrize("changes", [{"evaluate_every": 1, "epochs": 3}, {"evaluate_updates": 30}])
def test_evaluations_come_where_they_belong_and_nothing_of_later_is_ahead_of_them(changes):
    world = world_of(num_samples=400, num_validation=23, **changes)
    finishes(world)
    assert len(world.told(Evaluated)) >= 3
    assert sent(world, LeaseBegin)


def test_a_pause_begins_nothing_that_is_ahead():
    world = world_of()
    world.run_until(lambda: world.hub.ledger.num_counted > 500)
    world.feed(PauseAsked(True, world.now))
    world.run_until(lambda: not world.open_leases)
    ahead, counted = world.hub.ledger.leases_ahead, world.hub.ledger.num_counted
    assert ahead
    world.run(until=world.now + 100.0)
    assert (world.hub.ledger.leases_ahead, world.hub.ledger.num_counted) == (ahead, counted)
    world.feed(PauseAsked(False, world.now))
    finishes(world)


def test_a_stop_waits_for_nothing_that_is_ahead():
    world = world_of()
    world.run_until(lambda: world.hub.ledger.num_counted > 500)
    assert world.hub.ledger.leases_ahead
    world.stop()
    assert world.hub.ledger.leases_ahead == ()
    world.run()
    assert world.is_finished
    assert world.finish is not None
    check_replay(world)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_each_sample_counts_once(seed):
    trouble = Trouble(seed, latency=0.5, twice=0.1, dropped=0.05, detect_seconds=1.0)
    world = world_of("abcdef", trouble, num_samples=400, num_validation=7, epochs=2)
    world.kill("b", at=20.0 + 7 * seed)
    world.leave("c", at=60.0)
    for moment in (30.0, 90.0):
        world.restart(at=moment + 11 * seed)
    world.join("x", "y", at=200.0)
    finishes(world)
