"""A hub that comes back with only its log and its last checkpoint: whom it knows again, what it forgets."""

from dataclasses import replace

import pytest
from support.hub_world import HubWorld, check_replay, job

from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import MakeParts, Notify, PeerReturned, Send
from ravnest.hub.coordinator.notices import (
    Checkpointed,
    ClusterStarted,
    FromCheckpoint,
    Leaving,
    Left,
    Resumed,
    Returned,
    RoundEnded,
    WorkLost,
)
from ravnest.protocol.averaging import RoundOpen
from ravnest.protocol.membership import Leave


def world_of(names, memory_mb, **changes):
    world = HubWorld(job(**({"epochs": 4, "num_validation": 0} | changes)))
    world.join(*names, memory_mb=memory_mb)
    world.run_until(lambda: len(world.ledger) > 20)
    return world


def restart(world, seconds=0.5):
    """Kill the hub; all find it again after so many seconds."""
    world.random.choice = lambda _: seconds
    world.restart()
    world.run_until(lambda: world.told(Resumed))


def trains_again(world):
    num_before = len(world.told(ClusterStarted))
    world.run_until(lambda: len(world.told(ClusterStarted)) == num_before + len(world.hub.clusters))


def orders_of(world, kind):
    return [order for orders in world.answers for order in orders if isinstance(order, kind)]


def rounds(world):
    """The rounds that were opened: what each member was told, by its name."""
    found = {}
    for order in orders_of(world, Send):
        if isinstance(order.message, RoundOpen):
            found.setdefault(order.message.round_id, {})[order.to] = order.message
    return list(found.values())


def finishes(world):
    world.run()
    assert world.is_finished
    assert set(world.ledger.values()) == {1}
    check_replay(world)


def test_from_which_checkpoint_training_goes_on_is_said():
    world = world_of("ab", 100.0, checkpoint_every=1.0)
    world.run_until(lambda: world.told(Checkpointed))
    kept = world.told(Checkpointed)[-1].num_samples
    (told, *_) = Coordinator(replace(world.given, books=world.books)).apply(world.given)
    assert told == Notify(FromCheckpoint(kept))
    world.kill("a")
    world.run_until(lambda: world.told(WorkLost))
    assert world.told(FromCheckpoint) == [FromCheckpoint(world.told(Checkpointed)[-1].num_samples)]


def test_without_a_checkpoint_none_is_named():
    world = world_of("ab", 100.0)
    world.kill("a")
    world.run_until(lambda: world.told(WorkLost))
    assert not world.told(FromCheckpoint)


def test_what_was_made_for_stages_is_made_again():
    world = world_of("abcd", 150.0)
    made = [(each.start, each.stop) for each in orders_of(world, MakeParts)]
    restart(world)
    trains_again(world)
    again = [(each.start, each.stop) for each in orders_of(world, MakeParts)]
    assert again == made * 2, "the blobs were in the memory of a program that is gone"
    finishes(world)


def test_who_comes_back_is_known_by_its_key_and_the_plan_it_had():
    world = world_of("abcd", 150.0)
    root = world.hub.clusters[0].root
    (spare,) = set("abcd") - set(world.hub.clusters[0].nodes)
    restart(world)
    hub, epoch = world.hub, world.told_epoch[root]
    assert hub.find_missing(f"key of {root}", epoch) == root
    assert hub.find_missing(f"key of {root}", epoch + 1) is None, "it has other state than it is to have"
    assert hub.find_missing(f"key of {root}", 0) is None
    assert hub.find_missing("key of a stranger", epoch) is None
    assert hub.find_missing(f"key of {spare}", 0) == spare, "it is to have none"
    world.run_until(lambda: len(world.told(Returned)) == 4)
    assert hub.find_missing(f"key of {root}", epoch) is None, "it is back"
    (refusal,) = world.feed(PeerReturned(root, (), world.now))
    assert refusal.reason == f"nobody waits for {root}"
    finishes(world)


def test_who_wanted_to_leave_is_waited_for_like_all_others_and_leaves_once():
    world = world_of("abcd", 150.0)
    root = world.hub.clusters[0].root
    world.say(root, Leave(world.told_epoch[root], "Ctrl-C", can_hand_over=True))
    world.run_until(lambda: world.told(Leaving))
    restart(world, seconds=25.0)
    restarted_at = world.now
    world.run_until(lambda: world.told(Left))
    assert world.now == pytest.approx(restarted_at + 20.0)
    left = [(news.node, news.reason) for news in world.told(Left)]
    assert sorted(left) == [(name, "it did not come back to the hub") for name in "abcd"]


def test_who_wanted_to_leave_and_comes_back_hands_over():
    world = world_of("abcd", 150.0)
    root = world.hub.clusters[0].root
    world.leave(root)
    world.run_until(lambda: world.told(Leaving))
    restart(world)
    world.run_until(lambda: world.told(Left))
    assert [(news.node, news.reason) for news in world.told(Left)] == [(root, "Ctrl-C")]
    assert {news.node for news in world.told(Returned)} == {*"abcd"}
    finishes(world)


def test_the_first_round_begins_from_the_weights_of_the_cluster_that_knows_most():
    world = world_of("abcde", 250.0, epochs=40)
    world.run_until(lambda: world.told(RoundEnded))
    assert not any(told.is_anchor for told in rounds(world)[0].values())
    restart(world)
    num_before = len(rounds(world))
    world.run_until(lambda: len(rounds(world)) == num_before + 1)
    best = world.hub.ledger.progress.most_trained(world.hub.clusters)
    world.run_until(lambda: len(rounds(world)) == num_before + 2)
    first, second = rounds(world)[num_before:]
    assert {name for name, told in first.items() if told.is_anchor} == {*best.nodes}
    assert {told.anchor_round for told in first.values()} == {told.round_id for told in first.values()}
    assert not any(told.is_anchor for told in second.values())


def test_a_round_comes_as_soon_as_clusters_train_again_for_nobody_has_an_average_any_more():
    world = world_of("abcde", 250.0, epochs=40, average_every=10)
    world.run_until(lambda: world.told(RoundEnded))
    num_before = len(rounds(world))
    restart(world)
    trains_again(world)
    assert len(rounds(world)) == num_before + 1
