"""Clusters that lose, gain and hand over nodes while they train: who gives what to whom, and what is lost."""

from functools import partial

import pytest
from support.hub_world import HubWorld, Trouble, blob, check_replay, job
from support.plan_world import node

from ravnest.hub.coordinator.events import Collect, Evict, MakePlan, PeerLeft, Received, Send
from ravnest.hub.coordinator.notices import (
    Checkpointed,
    ClusterBroken,
    ClusterDissolved,
    ClusterStarted,
    Joined,
    Leaving,
    Left,
    Measured,
    NotCheckpointed,
    PlanFormed,
    Recovered,
    Repaired,
    Resumed,
    Returned,
    RoundEnded,
    SpeedChanged,
    WorkLost,
)
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.ids import HUB
from ravnest.protocol.averaging import RoundOpen
from ravnest.protocol.membership import Leave, ProbeOrder
from ravnest.protocol.placement import (
    BackupOrder,
    PlanOrder,
    RingOrder,
    SnapshotMade,
    SnapshotOrder,
    StageMissing,
    StageParts,
    StageReady,
)


def world_of(names, memory_mb=150.0, trouble=None, make_node=node, **changes):
    given = job(**({"epochs": 4, "num_validation": 0} | changes))
    world = HubWorld(given, trouble, make_node=make_node)
    world.join(*names, memory_mb=memory_mb)
    world.run_until(lambda: len(world.ledger) > 20)
    return world


def sent(world, kind, to=None):
    orders = [order for orders in world.answers for order in orders if isinstance(order, Send)]
    return [x.message for x in orders if isinstance(x.message, kind) and to in (None, x.to)]


def orders_of(world, kind):
    return [order for orders in world.answers for order in orders if isinstance(order, kind)]


def finishes(world):
    world.run()
    assert world.is_finished
    assert set(world.ledger.values()) == {1}
    check_replay(world)
    return world


def test_who_leaves_politely_hands_over_and_nothing_is_lost_or_done_twice():
    world = world_of("abcd")
    root = world.hub.clusters[0].root
    (spare,) = set("abcd") - set(world.hub.clusters[0].nodes)
    num_granted, asked_at = len(world.batches), world.now
    world.leave(root)
    world.run_until(lambda: world.told(Left))
    assert world.now < asked_at + 4.0, "it is let go as soon as others have what it has"
    assert [news.node for news in world.told(Leaving)] == [root]
    assert world.told(ClusterBroken) == world.told(ClusterDissolved) == world.told(Recovered) == []
    assert Evict(root, "goodbye") in [order for orders in world.answers for order in orders]
    parts = sent(world, StageParts, spare)[-1]
    assert [source.node for source in parts.sources] == [root]
    assert not parts.is_kept
    others = [name for name in world.hub.clusters[0].nodes if name != spare]
    assert all(sent(world, StageParts, name)[-1].is_kept for name in others)
    assert all(not sent(world, StageParts, name)[-1].sources for name in others)
    finishes(world)
    batches = world.given.settings.epochs * world.given.settings.batches_per_epoch
    assert len(world.batches) == batches, "no batch was handed out twice"
    assert num_granted < batches


def test_what_all_take_with_them_who_leave_is_kept_first():
    """Nobody is there to take it over: what was trained since the last checkpoint was lost."""
    world = world_of("ab", checkpoint_every=1000.0, keeps_last=True)
    asked_at = world.now
    for name in "ab":
        world.leave(name)
    world.run_until(lambda: len(world.told(Left)) == 2)
    assert world.now < asked_at + 4.0
    assert len(world.told(Checkpointed)) == 1
    assert world.told(WorkLost) == []
    world.join("c", "d")
    finishes(world)


def test_who_leaves_is_waited_for_no_longer_than_it_waits_itself():
    world = world_of("abcd")
    root = world.hub.clusters[0].root
    world.leave(root)
    world.run_until(lambda: world.told(Leaving))
    asked_at = world.now
    world.muted = {*"abcd"}  # nobody says that a lease is done
    world.run(until=asked_at + 4.9)
    assert not world.told(Repaired)
    world.run(until=asked_at + 5.1)
    assert world.told(Repaired), "what is under way is given up after five seconds"
    world.run_until(lambda: any(news.node == root for news in world.told(Left)))
    assert world.now < 60
    world.muted = set()
    finishes(world)


def test_who_asks_to_leave_twice_is_not_waited_for_longer():
    world = world_of("abcd")
    root, asked_at = world.hub.clusters[0].root, world.now
    world.muted = {*"abcd"} - {root}  # nobody takes over
    for seconds in (0.0, 3.0, 6.0):
        leave = Leave(world.told_epoch[root], "Ctrl-C", can_hand_over=True)
        world.at(asked_at + seconds, world.feed, Received(root, leave, asked_at + seconds))
    world.run_until(lambda: world.told(Left))
    assert world.now == pytest.approx(asked_at + 10.0)
    assert len(world.told(Leaving)) == 1
    assert not world.told(WorkLost)


def test_who_only_is_a_spare_leaves_at_once():
    world = world_of("abcd")
    (spare,) = set("abcd") - set(world.hub.clusters[0].nodes)
    world.leave(spare)
    world.run_until(lambda: world.told(Left))
    assert world.told(Leaving) == []
    finishes(world)


def test_a_lone_cluster_without_a_checkpoint_begins_again_and_with_one_goes_on():
    world = world_of("abcd")
    world.kill(world.hub.clusters[0].leaf)
    finishes(world)
    assert len(world.told(WorkLost)) == 1
    world = world_of("abcd", checkpoint_every=1.0)
    world.run_until(lambda: world.told(Checkpointed))
    assert not any(order.is_final for order in sent(world, SnapshotOrder)), "training goes on"
    leaf = world.hub.clusters[0].leaf
    world.kill(leaf)
    finishes(world)
    assert world.told(WorkLost) == []
    (recovered,) = world.told(Recovered)
    assert recovered.sources == (HUB,)
    given = [source.weights for parts in sent(world, StageParts) for source in parts.sources]
    assert given[-1] not in given[:-1], "the checkpoint, not the first weights of that stage again"
    assert sent(world, SnapshotOrder)[-1].is_final
    assert 1.0 <= recovered.seconds < 5.0


def test_a_backup_needs_nothing_of_anybody():
    world = world_of("abcd", num_samples=2000, epochs=1)
    world.run_until(lambda: sent(world, BackupOrder))
    world.run(until=world.now + 1.0)
    (backup,) = world.hub.placement.backups
    assert [x.source.node for x in sent(world, BackupOrder, backup.spare)] == [backup.node]
    world.kill(backup.node)
    world.run_until(lambda: world.told(Recovered))
    assert world.told(Recovered)[0].sources == (backup.spare,)
    finishes(world)
    assert world.told(WorkLost) == []


def test_a_spare_and_the_node_it_keeps_a_backup_of_know_each_other():
    world = world_of("abcd")
    (backup,) = world.hub.placement.backups
    for name, other in ((backup.spare, backup.node), (backup.node, backup.spare)):
        contacts = {contact.node: contact for contact in sent(world, PlanOrder, name)[-1].contacts}
        assert contacts[other].addresses == (f"tcp://{other}",)


@pytest.mark.parametrize("is_polite", [True, False])
def test_another_plan_while_a_cluster_is_built_loses_nothing(is_polite):
    world = world_of("abcd", checkpoint_every=1.0)
    world.run_until(lambda: world.told(Checkpointed))
    build, counted = world.build_stage, world.hub.ledger.num_counted
    before = world.hub.clusters[0].nodes
    world.build_stage = lambda *facts: world.after(5.0, build, *facts)  # what is to be fetched is large
    (world.leave if is_polite else world.kill)(world.hub.clusters[0].root)
    world.run_until(lambda: world.told(Repaired))
    first, version = world.hub.clusters[0], world.hub.clusters[0].version
    world.join("z")
    world.run_until(lambda: len(world.told(Repaired)) == 2)
    assert world.hub.clusters[0] is first, "it goes on being built"
    assert first.version == version > 1, "it counts on from what its nodes hold"
    world.run_until(lambda: world.hub.clusters[0].is_running)
    assert world.told(WorkLost) == world.told(ClusterDissolved) == []
    assert [len(sent(world, StageParts, name)) for name in first.nodes] == [
        1 + (name in before) for name in first.nodes
    ], "each was told once to build its stage anew"
    assert world.hub.ledger.progress.samples_seen(world.hub.clusters[0]) >= counted
    finishes(world)


def test_who_comes_while_a_cluster_is_built_takes_a_place_in_it_once_it_trains():
    world = HubWorld(job(num_samples=2000))
    build = world.build_stage
    world.build_stage = lambda *facts: world.after(20.0, build, *facts)
    world.join(*"ab", memory_mb=200.0)
    world.join("c", memory_mb=150.0, at=15.0)
    world.run_until(lambda: world.told(ClusterStarted))
    assert len(world.hub.clusters[0].nodes) == 2
    assert world.now < 45.0, "it was built once"
    world.run_until(lambda: len(world.hub.clusters[0].nodes) == 3)
    finishes(world)


def test_how_long_a_cluster_stood_still_is_counted_anew_each_time():
    world = world_of("abcde", checkpoint_every=1.0, epochs=12)
    for number in (1, 2):
        world.run_until(lambda: world.told(Checkpointed) and world.hub.clusters[0].is_running)
        world.run(until=world.now + 5.0)
        world.kill(world.hub.clusters[0].leaf)
        world.run_until(lambda number=number: len(world.told(Recovered)) == number)
        assert 1.0 <= world.told(Recovered)[-1].seconds < 5.0
    assert len(world.hub.ledger.progress) == 2, "of a cluster and the one it goes on from, no others"


def test_who_has_not_what_it_is_to_keep_says_so_and_others_give_it():
    world = world_of("abcde", memory_mb=250.0, trouble=Trouble(detect_seconds=0.1))
    broken, other = world.hub.clusters
    world.feed(PeerLeft(broken.leaf, "gone", world.now))
    world.run_until(lambda: sent(world, StageParts, broken.root)[-1].build_id > broken.build_id)
    parts = sent(world, StageParts, broken.root)[-1]
    assert (parts.is_kept, parts.sources) == (True, ())
    world.feed(Received(broken.root, StageMissing(parts.build_id, broken.root, "it is gone"), world.now))
    world.run_until(lambda: sent(world, StageParts, broken.root)[-1].build_id > parts.build_id)
    parts = sent(world, StageParts, broken.root)[-1]
    assert not parts.is_kept
    assert {source.node for source in parts.sources} <= {*other.nodes}
    finishes(world)


def test_other_clusters_train_on_in_new_rings():
    world = world_of("abcde", memory_mb=250.0, trouble=Trouble(detect_seconds=0.1))
    broken, other = world.hub.clusters
    epoch = other.build_id
    world.feed(PeerLeft(broken.nodes[1], "gone", world.now))
    world.run_until(lambda: world.told(Recovered))
    assert other in world.hub.clusters
    assert other.build_id == epoch
    assert not world.told(ClusterDissolved)
    assert [order.build_id for order in sent(world, PlanOrder, other.root)] == [epoch]
    assert sent(world, RingOrder, other.root)[-1].plan_id == world.told(Repaired)[0].plan.plan_id
    finishes(world)


def test_who_is_ready_before_it_was_told_to_build_is_refused():
    world = HubWorld(job(num_validation=0))
    world.join("a", memory_mb=1000.0)
    world.run_until(lambda: world.told(PlanFormed))
    (refusal,) = world.feed(Received("a", StageReady(1), world.now))
    assert refusal.reason == "a is ready with a stage that nobody told it to build"
    assert not world.told(ClusterStarted)
    finishes(world)


def test_no_round_is_opened_while_somebody_waits_to_leave():
    world = world_of("abcde", memory_mb=250.0, epochs=40, average_every=1)
    world.leave(world.hub.clusters[0].root)
    world.run_until(lambda: world.told(Leaving))
    num_rounds, num_plans = len(sent(world, RoundOpen)), len(world.told(Repaired))
    world.run_until(lambda: len(world.told(Repaired)) > num_plans)
    assert len(sent(world, RoundOpen)) == num_rounds, "its rings are soon others"
    world.run_until(lambda: len(sent(world, RoundOpen)) > num_rounds)


def test_a_stage_that_is_mended_counts_updates_on_and_never_from_none():
    world = HubWorld(job(epochs=4, num_validation=0), Trouble(detect_seconds=0.1))
    world.join(*"abcde", memory_mb=250.0)
    world.run_until(lambda: world.told(ClusterStarted))
    assert {parts.version for parts in sent(world, StageParts)} == {0}
    world.kill(world.hub.clusters[0].nodes[1])
    world.run_until(lambda: world.told(Repaired))
    mended = world.hub.clusters[0]
    world.run_until(lambda: mended.is_running)
    parts = [sent(world, StageParts, name)[-1] for name in mended.nodes]
    assert {(each.build_id, each.version) for each in parts} == {(mended.build_id, 1)}, (
        "0 is for first weights"
    )
    finishes(world)


def test_clusters_that_break_at_once_give_each_other_what_the_checkpoint_has_not():
    world = world_of("abcdef", memory_mb=250.0, num_samples=400, checkpoint_every=2.0)
    world.run_until(lambda: world.told(Checkpointed))
    saved = world.told(Checkpointed)[-1].num_samples
    world.run_until(lambda: world.hub.ledger.num_counted > 1.5 * saved + 20)
    assert world.told(Checkpointed)[-1].num_samples == saved, "the next checkpoint is not there yet"
    one, other = world.hub.clusters
    for name in (one.root, other.leaf):
        world.kill(name)
    finishes(world)
    assert len(world.told(ClusterBroken)) >= 2
    assert all(HUB not in news.sources for news in world.told(Recovered))
    assert world.told(WorkLost) == []


def test_who_does_not_give_is_asked_no_more():
    world = world_of("abcde", memory_mb=250.0, trouble=Trouble(misses=1.0), checkpoint_every=1.0)
    world.run_until(lambda: world.told(Checkpointed))
    world.kill(world.hub.clusters[0].nodes[1])
    finishes(world)
    assert HUB in world.told(Recovered)[-1].sources, "in the end the hub has it"


def test_a_disk_that_is_full_costs_a_checkpoint_and_no_more():
    world = world_of("abc", trouble=Trouble(no_room=1.0), checkpoint_every=1.0)
    finishes(world)
    assert not world.told(Checkpointed)
    assert {news.reason for news in world.told(NotCheckpointed)} == {"the disk is full"}


def test_a_checkpoint_that_nobody_answers_for_is_given_up_and_the_next_one_comes():
    world = world_of("abc", checkpoint_every=1.0, num_samples=4000, epochs=1)
    leaf, speak = world.hub.clusters[0].leaf, world.speak
    world.speak = lambda name, peer, message: (
        None if name == leaf and isinstance(message, SnapshotMade) else speak(name, peer, message)
    )
    world.run_until(lambda: world.told(NotCheckpointed))
    (told,) = world.told(NotCheckpointed)
    assert told.reason == f"{leaf} did not answer within 120 s"
    world.speak = speak
    world.run_until(lambda: world.told(Checkpointed))
    finishes(world)


def test_a_checkpoint_is_dropped_when_its_cluster_breaks_and_the_next_one_comes():
    world = world_of("abcd", checkpoint_every=1.0)
    num_asked = len(sent(world, SnapshotOrder))
    world.run_until(lambda: len(sent(world, SnapshotOrder)) > num_asked)
    cluster, asked = world.hub.clusters[0], sent(world, SnapshotOrder)[-1]
    world.feed(PeerLeft(cluster.leaf, "gone", world.now))
    made = SnapshotMade(asked.build_id, asked.number, 1, blob("late"))
    (refusal,) = world.feed(Received(cluster.root, made, world.now))
    assert refusal.reason == f"nobody asked {cluster.root} for snapshot {asked.number}"
    finishes(world)
    collected = [order for orders in world.answers for order in orders if isinstance(order, Collect)]
    assert len([order for order in collected if not order.is_result]) == len(world.told(Checkpointed))
    assert len(world.told(Checkpointed)) > 1


def test_a_hub_that_was_away_meets_all_again_and_nobody_fetches_anything():
    world = world_of("abcde", memory_mb=250.0)
    world.random.choice = lambda _: 0.5  # all come back soon
    before, counted = world.hub.clusters, sum(world.ledger.values())
    world.restart()
    world.run_until(lambda: len(world.told(ClusterStarted)) == 4)
    (resumed,) = world.told(Resumed)
    assert resumed.num_peers == 5
    assert resumed.num_samples >= counted
    assert {news.node for news in world.told(Returned)} == {*"abcde"}
    assert [each.nodes for each in world.hub.clusters] == [each.nodes for each in before]
    assert all(parts.is_kept and not parts.sources for parts in sent(world, StageParts)[5:])
    assert world.told(WorkLost) == world.told(Left) == []
    finishes(world)


def test_who_does_not_find_the_hub_again_is_replaced():
    world = world_of("abcd", checkpoint_every=1.0)
    world.run_until(lambda: world.told(Checkpointed))
    leaf = world.hub.clusters[0].leaf
    world.kill(leaf)
    world.random.choice = lambda _: 0.5
    world.restart()
    world.run_until(lambda: world.told(Recovered))
    (left,) = [news for news in world.told(Left) if news.node == leaf]
    assert left.reason in ("it did not come back to the hub", "silent")
    finishes(world)


def test_a_hub_that_was_away_before_there_was_a_plan_waits_for_those_it_knows():
    world = HubWorld(job(expected_nodes=4, settle_seconds=1e6))
    world.join("a", "b")
    world.run_until(lambda: len(world.told(Joined)) == 2)
    world.random.choice = lambda _: 3.0  # after the others have come
    world.restart()
    world.join("c", "d", at=world.now + 1.0)
    world.run_until(lambda: world.told(PlanFormed))
    assert {news.node for news in world.told(Returned)} == {"a", "b"}
    finishes(world)


def test_people_are_not_told_that_a_cluster_ends_when_another_dies_while_it_is_mended():
    world = world_of("abcdefg", memory_mb=250.0)
    world.kill(world.hub.clusters[0].root)
    world.run_until(lambda: world.told(Repaired))
    mended = world.hub.clusters[0]
    assert not mended.is_running
    world.feed(PeerLeft(mended.root, "gone too", world.now))
    world.run_until(lambda: world.told(Recovered))
    assert world.told(ClusterDissolved) == []
    finishes(world)


def test_a_hub_that_was_away_in_the_end_ends_the_job():
    world = world_of("abcde", memory_mb=250.0, epochs=1, num_validation=23)
    world.random.choice = lambda _: 0.5
    world.run_until(lambda: world.hub.phase is JobPhase.EVALUATING)
    world.restart()
    finishes(world)
    assert world.finish is not None


def test_a_node_that_has_become_slow_gives_work_to_the_others_and_nothing_is_done_twice():
    world = world_of("abc", memory_mb=250.0, num_samples=300)
    world.run(until=world.now + 30.0)  # so that what is usual is known
    slow = world.hub.clusters[0].nodes[1]
    before = {stage.node: stage.stop - stage.start for stage in world.hub.clusters[0].cluster.stages}
    world.slow(slow, 4.0)
    world.run_until(lambda: world.told(Repaired))
    (changed,) = world.told(SpeedChanged)
    assert (changed.node, changed.times) == (slow, pytest.approx(0.25))
    assert f"{slow} slowed down: " in world.told(Repaired)[0].reason
    after = {stage.node: stage.stop - stage.start for stage in world.hub.clusters[0].cluster.stages}
    assert after.get(slow, 0) < before[slow]
    assert world.open_leases == (), "it has finished what it was at"
    finishes(world)
    assert world.told(ClusterBroken) == []
    assert len(world.told(Repaired)) == 1, "plans do not flap"


def test_a_link_that_has_become_slow_is_measured_and_planned_with():
    world = world_of("abc", memory_mb=250.0, num_samples=300)
    world.run(until=world.now + 40.0)  # so that what is usual is known
    slow = world.hub.clusters[0].nodes[1]
    world.slow_link(slow, 4.0)
    world.run_until(lambda: world.told(Measured))
    (measured,) = world.told(Measured)
    assert (measured.node.name, measured.fault) == (slow, "has a slower link than before")
    assert measured.node.upload_bytes_per_second == 5e8 / 4
    assert measured.node.download_bytes_per_second == 1e9, "a little slower is nothing"
    assert world.told(SpeedChanged) == []
    assert {order.times_link for order in sent(world, ProbeOrder)} == {True}
    plans = len(orders_of(world, MakePlan))
    world.run_until(lambda: len(orders_of(world, MakePlan)) > plans)
    assert [node.name for node in orders_of(world, MakePlan)[-1].changed] == [slow]
    finishes(world)


def test_links_that_are_all_slow_are_rather_the_hubs_and_a_node_alone_needs_none():
    for names, memory_mb in (("abc", 250.0), ("a", 1000.0)):
        world = world_of(names, memory_mb=memory_mb, num_samples=300)
        world.run(until=world.now + 40.0)
        for name in names:
            world.slow_link(name, 4.0)
        world.run(until=world.now + 60.0)
        assert len(sent(world, ProbeOrder)) == (len(world.hub.clusters[0].nodes) if len(names) > 1 else 0)
        assert world.told(Measured) == world.told(Repaired) == []
        finishes(world)


def test_what_a_cluster_is_at_for_long_is_not_waited_for():
    world = world_of("abc", memory_mb=250.0, num_samples=300, chunk_batches=40)
    world.run(until=world.now + 30.0)  # so that what is usual is known
    world.slow(world.hub.clusters[0].nodes[1], 8.0)
    world.run_until(lambda: world.told(SpeedChanged))
    since = world.now
    world.run_until(lambda: world.told(Repaired))
    assert world.now - since < 8.0
    assert world.open_leases == (), "others do it again"
    finishes(world)


def test_a_cluster_that_is_to_be_cut_anew_goes_on_when_the_plan_is_another_by_then():
    world = world_of("abc", memory_mb=250.0, num_samples=300, chunk_batches=40)
    world.run(until=world.now + 30.0)  # so that what is usual is known
    slow, other = world.hub.clusters[0].nodes[1], world.hub.clusters[0].nodes[0]
    world.slow(slow, 8.0)
    world.run_until(lambda: world.told(SpeedChanged))
    world.run(until=world.now + 3.0)  # the plan is made, and held
    assert not world.told(Repaired)
    world.kill(other)
    world.run_until(lambda: world.told(Repaired))
    assert f"{other} left" in world.told(Repaired)[0].reason
    finishes(world)


def test_clusters_that_stand_still_when_all_is_trained_take_part_in_the_last_round():
    world = HubWorld(job(num_validation=0, average_every=1000))
    world.join(*"abcde", memory_mb=250.0)
    world.run_until(lambda: world.hub.phase is JobPhase.AVERAGING)
    world.restart()
    finishes(world)
    last = world.told(RoundEnded)[-1]
    assert (last.is_committed, last.is_final, last.left_out) == (True, True, ())
    assert {world.hub.ledger.progress.samples_seen(each) for each in world.hub.clusters} == {100}


def test_who_never_gets_ready_in_the_end_is_not_waited_for_for_ever():
    world = HubWorld(job(num_validation=0, average_every=1000))
    world.join(*"abcde", memory_mb=250.0)
    world.run_until(lambda: world.hub.phase is JobPhase.AVERAGING)
    world.muted.add(world.hub.clusters[0].leaf)
    world.restart()
    world.run()
    assert world.finish is not None


def test_nobody_is_believed_to_be_faster_than_any_machine():
    fast = partial(node, gflops=1e9)  # a thousand times as fast as that would be too much
    world = world_of("abc", memory_mb=250.0, make_node=fast, num_samples=300)
    world.run(until=world.now + 30.0)
    liar = world.hub.clusters[0].nodes[1]
    before = world.hub.membership.find(liar).node
    world.slow(liar, 1e-5)
    finishes(world)
    assert world.told(SpeedChanged) == []
    assert world.hub.membership.find(liar).node == before


def test_each_recovery_is_made_of_what_its_source_has_then():
    world = world_of("abcdefgh", num_samples=4000, epochs=1)
    for times in (1, 2):
        world.kill(world.hub.clusters[0].nodes[1])
        world.run_until(lambda least=times: len(world.told(Recovered)) == least)
        world.run_until(lambda least=world.hub.ledger.num_counted + 200: world.hub.ledger.num_counted > least)
    (first, *_), (second, *_) = (recovered.sources for recovered in world.told(Recovered))
    assert first == second, "else each has a snapshot of its own in any case"
    made = [order for name in "abcdefgh" for order in sent(world, StageParts, to=name)]
    given = [source.weights for parts in made for source in parts.sources if source.node == first]
    assert len(set(given)) == len(given) == 2
