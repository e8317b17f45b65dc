"""Members that lie to the hub: what they say is refused, or harms nobody but themselves."""

from dataclasses import replace

import pytest
from support.hub_world import HubWorld, check_replay, job
from support.plan_world import node

from ravnest.hub.coordinator.checks import Verdict
from ravnest.hub.coordinator.events import (
    CheckpointAsked,
    Collected,
    PeerJoined,
    PeerLeft,
    PlanMade,
    Received,
    Send,
)
from ravnest.hub.coordinator.notices import (
    ClusterStarted,
    EpochDone,
    Evaluated,
    Left,
    WorkLost,
    WorkUndone,
)
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.hub.monitors.loss_guard import LossGuard
from ravnest.hub.service.admission import Admission
from ravnest.ids import HUB
from ravnest.net.identity import Token, greet, new_keys
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Cluster, Plan, Stage
from ravnest.protocol.membership import PROTOCOL_VERSION, Hello
from ravnest.protocol.placement import BlobRef, SnapshotMade, SnapshotOrder, StageMissing, StageReady
from ravnest.protocol.training import StepReport


def world_of(names, **changes):
    world = HubWorld(job(**({"num_validation": 0} | changes)))
    world.join(*names)
    return world


def has_sent(world, kind):
    orders = [order for orders in world.answers for order in orders]
    return any(isinstance(each, Send) and isinstance(each.message, kind) for each in orders)


def lie(world, name, message):
    """Let a member say something; return why that is refused, if it is."""
    orders = world.feed(Received(name, message, world.now))
    return getattr(orders[0], "reason", None) if orders else None


def test_a_stage_that_nobody_was_given_is_not_ready():
    world = world_of("abc")
    world.run_until(lambda: world.hub.clusters)
    (cluster,) = world.hub.clusters
    for name in cluster.nodes:
        assert "nobody told it to build" in lie(world, name, StageReady(cluster.build_id))
    world.run()
    assert world.is_finished
    check_replay(world)


def test_who_comes_back_as_new_is_not_ready_with_the_stage_that_it_had():
    world = world_of("abc")
    build, world.build_stage = world.build_stage, lambda *_: None
    world.run_until(lambda: any(peer.order and peer.order.stage for peer in world.peers.values()))
    world.run(until=world.now + 2.0)
    world.build_stage, name = build, world.hub.clusters[0].root
    world.feed(PeerLeft(name, "its link broke", world.now))
    world.join_now(name, 150.0)
    assert "no stage to get ready" in lie(world, name, StageReady(world.hub.placement.build_id(name)))
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


def report(cluster, batch, **said):
    facts = {"version": 0, "num_samples": 4, "loss": 1.0, "metrics": ()} | said
    return StepReport(
        cluster.build_id,
        batch,
        facts["version"],
        0,
        facts["num_samples"],
        0.1,
        0.1,
        0.0,
        0.0,
        facts["loss"],
        facts["metrics"],
    )


def test_a_leaf_that_counts_more_updates_than_there_were_batches_is_refused():
    world = world_of("abc", rates=(0.1, 0.01))
    world.run_until(lambda: world.open_leases)
    (cluster,), batch = world.hub.clusters, world.open_leases[0].first_microbatch
    most = 2**63 - 1  # what comes after it cannot be told in any message
    assert "cannot have made" in lie(world, cluster.leaf, report(cluster, batch, version=most))
    assert lie(world, cluster.leaf, report(cluster, batch, version=1)) is None
    world.run()
    assert world.is_finished
    check_replay(world)


def test_a_leaf_neither_weighs_its_losses_nor_makes_up_metrics():
    world = world_of("abc", num_validation=4, epochs=1, metrics=("acc",))
    made_up = tuple((f"made up {number}", 1.0) for number in range(900))
    world.run_until(lambda: world.open_leases)
    (cluster,), batch = world.hub.clusters, world.open_leases[0].first_microbatch
    assert "no metric of the job" in lie(world, cluster.leaf, report(cluster, batch, metrics=made_up))
    told = (("acc", 0.5),)
    assert lie(world, cluster.leaf, report(cluster, batch, loss=1e6, num_samples=2**62, metrics=told)) is None
    world.run_until(lambda: any(lease.lease is None for lease in world.open_leases))
    batch = world.open_leases[0].first_microbatch
    assert "no metric of the job" in lie(world, cluster.leaf, report(cluster, batch, metrics=made_up))
    assert lie(world, cluster.leaf, report(cluster, batch, num_samples=2**62, metrics=told)) is None
    world.run()
    ((trained,), (evaluated,)) = world.told(EpochDone), world.told(Evaluated)
    assert trained.loss < 1e6
    assert evaluated.num_samples == 4
    assert evaluated.metrics == told


@pytest.mark.parametrize("names", [("acc",), ("acc", "f1"), None])
def test_a_metric_called_loss_does_not_own_the_loss_that_is_shown(names):
    """Spot checks find the loss of a report again, and would find it true."""
    world = world_of("abc", epochs=1, metrics=names)
    world.run_until(lambda: world.open_leases)
    (cluster,), batch = world.hub.clusters, world.open_leases[0].first_microbatch
    lies = [(("loss", 100.0),) * 256, (("loss", 100.0),), (("acc", 1.0),) * 2]
    for metrics in lies:
        refused = lie(world, cluster.leaf, report(cluster, batch, metrics=metrics))
        assert "no metric of the job" in refused or "twice" in refused
    world.loss = lambda _: 1.0
    world.run()
    (trained,) = world.told(EpochDone)
    assert trained.loss == 1.0
    check_replay(world)


def test_a_job_whose_metrics_are_not_known_has_so_many_at_most():
    """Those of a hub that goes on from an older log."""
    world = world_of("abc", epochs=1)
    world.run_until(lambda: world.open_leases)
    (cluster,), batch = world.hub.clusters, world.open_leases[0].first_microbatch
    many = tuple((f"made up {number}", 1.0) for number in range(900))
    assert "900 metrics" in lie(world, cluster.leaf, report(cluster, batch, metrics=many))
    assert lie(world, cluster.leaf, report(cluster, batch, metrics=many[:256])) is None


def test_losses_too_large_to_be_summed_up_are_an_alarm_and_no_crash():
    guard = LossGuard()
    for loss in [1.0] * 32 + [1.7e308] * 32:
        guard.record_loss("A1", "A", loss)
    assert guard.alarm is not None


def test_nobody_takes_the_name_of_somebody_a_hub_that_was_away_waits_for():
    world = world_of("abc", epochs=4)
    world.run_until(lambda: len(world.ledger) > 20)
    world.restart()
    world.run_until(lambda: world.hub.membership.missing)
    token, keys = Token((), new_keys().public, b"s" * 16), [new_keys(), new_keys()]
    door = Admission(token, None)
    assert [door.admit(each.peer, greet(token, each.public)) for each in keys] == [None, None]
    hello = Hello(PROTOCOL_VERSION, node("a", 150.0))
    newcomer = door.introduce(keys[0].peer, hello, None, world.hub.find_others("another key"))
    assert newcomer.node.name == f"a-{keys[0].peer[:4]}"
    forgetful = door.introduce(keys[1].peer, hello, None, world.hub.find_others("key of a"))
    assert forgetful.node.name == "a", "who has lost its state comes back as new, under its own name"


def test_who_claims_a_snapshot_larger_than_the_model_goes_and_nobody_fetches_it():
    world = world_of("abcd", checkpoint_every=2.0, most_snapshot_bytes=1000, epochs=4)
    world.run_until(lambda: has_sent(world, SnapshotOrder))
    liar = world.hub.clusters[0].root
    lie(world, liar, SnapshotMade(world.hub.clusters[0].build_id, 1, 1, BlobRef("0" * 64, 2**60)))
    assert [(news.node, news.reason) for news in world.told(Left)] == [
        (liar, "no stage has a snapshot of 1153 PB")
    ]
    world.kill(liar)
    world.run()
    assert world.is_finished


def test_who_keeps_silent_about_the_result_goes_and_another_cluster_has_it():
    world = world_of("abcdef")
    world.run_until(lambda: world.hub.phase is JobPhase.KEEPING)
    asked = [order for order in world.answers[-1] if isinstance(order, Send)]
    silent = world.muted = {order.to for order in asked if isinstance(order.message, SnapshotOrder)}
    world.run()
    assert world.is_finished
    assert {news.node for news in world.told(Left)} == silent
    assert {news.reason for news in world.told(Left)} == {"it did not answer within 120 s"}
    assert silent.isdisjoint(part.node for part in world.finish.parts)
    check_replay(world)


def find_fault(world, liar):
    """Let a peer name a source that it could not use, whenever it is to build a stage after the first."""
    build = world.build_stage

    def lie_or_build(name, peer, parts):
        others = [source.node for source in parts.sources if source.node != HUB]
        if name == liar and world.ledger:
            world.say(
                name, StageMissing(parts.build_id, others[0] if others else HUB, "damaged"), seconds=0.2
            )
        else:
            build(name, peer, parts)

    world.build_stage = lie_or_build


def test_who_finds_fault_with_every_source_goes_and_the_others_are_believed_again():
    world = world_of("abcdefg", epochs=6, checkpoint_every=None)
    world.run_until(lambda: len(world.ledger) > 60)
    (spare,) = set("abcdefg") - {name for cluster in world.hub.clusters for name in cluster.nodes}
    find_fault(world, spare)
    world.kill(world.hub.clusters[0].root)
    world.run()
    assert world.is_finished
    assert spare in [news.node for news in world.told(Left)]
    assert not world.told(WorkLost)
    assert not world.hub._recovery._sources._useless
    check_replay(world)


class Regrouping:
    """Plans a cluster for each node; from the second plan on d is behind a."""

    def make_plan(self, given, asked, now):
        shapes = [(Stage(each.name, 0, 6),) for each in asked.nodes]
        if asked.repairs is not None:
            others = [each for each in shapes if each[0].node not in ("a", "d")]
            shapes = [(Stage("a", 0, 3), Stage("d", 3, 6)), *others]
        clusters = tuple(map(Cluster, shapes))
        rings = form_rings(clusters, {each.name: each for each in asked.nodes})
        return PlanMade(asked.plan_id, Plan(asked.plan_id, 0, clusters, rings, ()), 1, "", now)


def test_what_a_liar_counted_as_the_root_of_another_cluster_is_trained_again_too():
    given = job(num_validation=0, epochs=20, average_every=1000)
    world = HubWorld(given, planner=Regrouping())
    world.join(*"abd", memory_mb=900.0)
    ledger = world.hub.ledger
    world.run_until(lambda: ledger.num_unconfirmed("d") > 20)
    world.join("e", memory_mb=900.0)
    world.run_until(lambda: len(world.told(ClusterStarted)) > 4)
    assert world.hub.placement.cluster_of("d").root == "a"
    orders = []
    world.keep_checkpoint = orders.append
    world.feed(CheckpointAsked(world.now))
    world.run_until(lambda: orders)
    assert ledger.num_unconfirmed("d") > 20, "since it had a cluster of its own"
    world.counted_by["d"] = [*world.counted_by["a"], *world.counted_by["d"]]  # it spoilt all of it
    world.feed(Collected(orders[0].number, world.now, "it is not what others hold", Verdict(1, ("d",))))
    assert [news.node for news in world.told(WorkUndone)] == ["d"]
    assert ledger.num_unconfirmed("d") == 0
    check_replay(world)
