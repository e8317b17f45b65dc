"""A lease counts when all of it is reported, and no sooner than it can be trained."""

import pytest
from support.attack_world import HONEST, LIAR, AttackWorld
from support.hub_world import HubWorld, check_replay, job

from ravnest.hub.coordinator.events import PauseAsked, Received
from ravnest.hub.coordinator.notices import ClusterBroken, EpochDone
from ravnest.protocol.training import DroppedMicrobatch, LeaseDone, StepReport


def one_cluster(**changes):
    world = HubWorld(job(**({"num_validation": 0, "num_samples": 40} | changes)))
    world.join("a", memory_mb=900.0)
    return world


def begun(world):
    """Run until a lease is open; return the cluster and the lease. The peer then keeps silent."""
    world.run_until(lambda: world.open_leases)
    world.muted = {"a"}
    return world.hub.clusters[0], world.open_leases[0]


def report(cluster, microbatch):
    return StepReport(cluster.build_id, microbatch, 0, 0, 4, 0.1, 0.1, 0.0, 0.0, 1.0, ())


def say(world, message):
    return world.feed(Received("a", message, world.now))


def test_a_lease_waits_for_the_reports_of_all_its_microbatches():
    world = one_cluster()
    cluster, lease = begun(world)
    done = LeaseDone(cluster.build_id, lease.number, sum(lease.num_samples))
    say(world, done)
    assert world.hub.ledger.num_counted == 0
    first, *rest = lease.microbatches
    for microbatch in rest:
        say(world, report(cluster, microbatch))
    assert world.hub.ledger.num_counted == 0, "one is missing"
    say(world, done)
    assert world.hub.ledger.num_counted == 0, "a second copy says nothing new"
    say(world, report(cluster, first))
    assert world.hub.ledger.num_counted == sum(lease.num_samples)
    check_replay(world)


def test_a_dropped_microbatch_needs_no_report():
    world = one_cluster()
    cluster, lease = begun(world)
    first, *rest = lease.microbatches
    for microbatch in rest:
        say(world, report(cluster, microbatch))
    say(world, LeaseDone(cluster.build_id, lease.number, sum(lease.num_samples[1:])))
    assert world.hub.ledger.num_counted == 0
    say(world, DroppedMicrobatch(cluster.build_id, first, "not a number"))
    assert world.hub.ledger.num_counted == sum(lease.num_samples)
    world.muted = set()


def test_a_cluster_that_is_too_fast_counts_no_more_than_some_times_what_others_do():
    world = AttackWorld(0, num_samples=2000, epochs=1, average_every=10**6, checkpoint_every=None)
    for name in (*HONEST, LIAR):
        world.slow(name, 1.0 if name != LIAR else 1e-4, at=0.0)
    world.run_until(lambda: world.told(EpochDone))
    counted = {name: len(world.counted_by.get(name, ())) for name in (*HONEST, LIAR)}
    assert counted[LIAR] < 8 * max(counted[name] for name in HONEST)
    assert counted[LIAR] > max(counted[name] for name in HONEST), "it may be faster than others"
    assert not world.evicted, "to be fast is no fault"


@pytest.mark.parametrize("reserve_seconds", [0.0, 120.0])
def test_a_long_pause_says_nothing_of_how_fast_clusters_are(reserve_seconds):
    def train(paused_seconds):
        facts = {"num_validation": 0, "checkpoint_every": None, "reserve_seconds": reserve_seconds}
        world = AttackWorld(0, **facts)
        world.run_until(lambda: len(world.ledger) > 200)
        world.feed(PauseAsked(True, world.now))
        world.run(until=world.now + 10.0)
        before = world.now = world.now + paused_seconds
        world.feed(PauseAsked(False, world.now))
        world.run()
        assert not world.told(ClusterBroken)
        return world.now - before

    assert train(8 * 3600.0) == pytest.approx(train(0.0), rel=0.2)
