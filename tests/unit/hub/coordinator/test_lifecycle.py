"""Who comes, goes and comes back while others train, and when another plan is asked for because of it."""

from dataclasses import replace

import pytest
from support.attack_world import AttackWorld
from support.hub_world import HubWorld, Trouble, check_replay, job
from support.plan_world import node

from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import (
    CheckpointAsked,
    MakePlan,
    Notify,
    PauseAsked,
    PeerJoined,
    PeerLeft,
    PeerReturned,
    PlanMade,
    Received,
    Restarted,
    Send,
)
from ravnest.hub.coordinator.membership import Membership
from ravnest.hub.coordinator.notices import (
    Checkpointed,
    ClusterStarted,
    FromCheckpoint,
    Joined,
    Left,
    NotCheckpointed,
    PlanFormed,
    Recovered,
    Repaired,
    Waiting,
    WorkLost,
    WorkUndone,
)
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.hub.coordinator.placement import Placement
from ravnest.hub.coordinator.planner import PlanTrigger
from ravnest.protocol.membership import Fact, Leave
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import PlanOrder


def trained(names, memory_mb=150.0, **changes):
    world = HubWorld(job(**({"epochs": 8, "num_validation": 0} | changes)), Trouble(detect_seconds=0.1))
    world.join(*names, memory_mb=memory_mb)
    world.run_until(lambda: world.told(ClusterStarted))
    return world


def asked(world):
    """When plans were asked for."""
    answers = zip(world.log, world.answers, strict=True)
    return [event.now for event, orders in answers for each in orders if isinstance(each, MakePlan)]


def test_a_job_is_the_same_whoever_is_expected_to_do_it():
    world, given = trained("abc"), job(epochs=8, num_validation=0)
    more = replace(given.settings, expected_nodes=7, settle_seconds=99.0, reserve_samples=3)
    assert world.hub.is_at(replace(given, settings=more))
    known = replace(given.settings, metrics=("accuracy",))
    assert world.hub.is_at(replace(given, settings=known)), "its log was begun before a hub knew them"
    assert not known.are_of_the_job_of(replace(known, metrics=()))
    assert not world.hub.is_at(replace(given, settings=replace(given.settings, epochs=9)))
    assert not world.hub.is_at(replace(given, profile=replace(given.profile, name="another")))
    assert not Coordinator(given).is_at(given), "it has not begun"
    world.stop()
    assert not world.hub.is_at(given), "it ends"


def test_who_joins_under_a_name_that_is_here_takes_its_place_and_is_told_only_as_new():
    world = trained("abcd")
    root = world.hub.clusters[0].root
    orders = world.hub.apply(PeerJoined(node(root, 150.0), "another key", ("tcp://new",), world.now))
    told = [order.notice for order in orders if hasattr(order, "notice")]
    assert [news for news in told if isinstance(news, Left | Joined)] == [
        Left(root, "it came back as new"),
        Joined(root),
    ]
    (sent,) = [order.message for order in orders if isinstance(order, Send) and order.to == root]
    assert isinstance(sent, PlanOrder)
    assert sent.stage is None


def test_a_break_is_counted_from_when_the_peer_was_last_heard():
    world = trained("abcd", checkpoint_every=1.0)
    world.run_until(lambda: world.checkpoint)
    world.run(until=world.now + 3.0)
    since = world.now - 2.5
    world.feed(PeerLeft(world.hub.clusters[0].leaf, "silent", world.now, since))
    world.run_until(lambda: world.told(Recovered))
    assert world.told(Recovered)[0].seconds == pytest.approx(world.now - since)


def test_who_comes_back_to_a_hub_that_was_away_may_have_another_address():
    world = trained("abc")
    world.feed(Restarted(None, world.now))
    for name in "abc":
        world.feed(PeerReturned(name, (f"tcp://{name}/moved",), world.now))
    world.run_until(lambda: world.told(Repaired) or len(asked(world)) > 1)
    world.run(until=world.now + 0.1)
    root, second, _ = world.hub.clusters[0].nodes
    orders = [order for orders in world.answers for order in orders if isinstance(order, Send)]
    last = [x.message for x in orders if x.to == root and isinstance(x.message, PlanOrder)][-1]
    assert {contact.addresses for contact in last.contacts if contact.node == second} == {
        (f"tcp://{second}/moved",)
    }


def test_who_comes_is_used_after_two_quiet_seconds_and_who_dies_is_replaced_at_once():
    world = trained("abc")
    joined_at = world.now
    world.join("d")
    world.join("e", at=joined_at + 1.5)
    world.run_until(lambda: len(asked(world)) == 2)
    assert world.now == pytest.approx(joined_at + 3.5)
    world.feed(PeerLeft(world.hub.clusters[0].root, "gone", world.now))
    assert asked(world)[2:] == [world.now]


def test_nobody_is_measured_before_a_cluster_that_stands_still_is_mended():
    world = trained("abcd")
    world.trouble.guessed, world.trouble.silent = (Fact.SPEED,), 1.0
    world.join_now("z", 150.0)
    world.run(until=world.now + 3.0)
    assert len(asked(world)) == 1, "who is new is measured first"
    world.feed(PeerLeft(world.hub.clusters[0].root, "gone", world.now))
    assert asked(world)[1:] == [world.now]


def test_a_plan_of_others_than_are_here_comes_too_late():
    world = trained("abc")
    world.join_now("d", 150.0)
    plan = world.told(PlanFormed)[0].plan
    (refusal,) = world.feed(PlanMade(1, plan, 1, "", world.now))
    assert isinstance(refusal, Refusal)
    world.run_until(lambda: len(asked(world)) == 2)
    (refusal,) = world.feed(PlanMade(1, plan, 1, "", world.now))
    assert refusal.reason == "plan 1 comes too late: others are here now"


def test_what_is_short_is_said_once():
    forming = PlanTrigger(job(), Placement(job(), Membership()))
    assert forming.notify_shortage("12 MB are short") == [Notify(Waiting("12 MB are short"))]
    assert forming.notify_shortage("12 MB are short") == []
    assert forming.notify_shortage("9 MB are short") == [Notify(Waiting("9 MB are short"))]
    assert forming.notify_shortage("") == []
    assert forming.notify_shortage("9 MB are short") == [Notify(Waiting("9 MB are short"))]


def test_who_begins_again_does_not_wait_for_as_many_as_were_expected_first():
    world = trained("abc", expected_nodes=3, settle_seconds=60.0)
    for name in "abc":
        world.feed(PeerLeft(name, "gone", world.now))
    world.run_until(lambda: not world.hub.clusters)
    begun_at = world.now
    world.join("x", "y", "z")
    world.run_until(lambda: len(world.told(PlanFormed)) == 2)
    assert world.now == pytest.approx(begun_at + 5.0), "when it was quiet for a while"


def test_a_pause_lasts_while_training_begins_again():
    world = trained("a", 250.0, checkpoint_every=2.0)
    world.run_until(lambda: world.told(Checkpointed))
    world.feed(PauseAsked(True, world.now))
    world.kill("a")
    world.join("b", memory_mb=250.0, at=world.now + 5.0)
    num_before = len(world.told(ClusterStarted))
    world.run_until(lambda: len(world.told(ClusterStarted)) > num_before)
    world.run(until=world.now + 100.0)
    assert not world.open_leases
    assert world.hub.ledger.is_paused
    world.feed(PauseAsked(False, world.now))
    world.run()
    assert world.is_finished
    check_replay(world)


def test_what_is_trained_again_after_the_wait_for_the_last_round_is_waited_for_quietly():
    world = AttackWorld(0, num_validation=0, checkpoint_every=None, average_every=100)
    world.liar_again = lambda microbatch: 1000.0 + microbatch
    world.run_until(lambda: len(world.ledger) > 900)
    world.kill("a")
    build = world.build_stage
    world.build_stage = lambda *given: world.after(25.0, build, *given)
    world.join("e", memory_mb=900.0)  # the others wait for it, then the liar is found
    world.run_until(lambda: world.told(WorkUndone))
    for name in world.peers:
        world.slow(name, 6.0)
    world.run()  # the world checks that no Tick comes again for ever
    assert world.is_finished
    assert set(world.ledger.values()) == {1}


def test_who_comes_back_as_new_and_leaves_before_it_is_measured_goes_at_once():
    world = trained("abc", 250.0)
    root = world.hub.clusters[0].root
    world.trouble.guessed = tuple(Fact)
    world.join_now(root, 250.0)
    assert world.hub.clusters[0].is_broken, "the plan has it still"
    world.feed(Received(root, Leave(0, "Ctrl-C", can_hand_over=True), world.now))
    assert world.told(Left)[-1] == Left(root, "Ctrl-C")
    world.trouble.guessed = ()
    world.join("d", memory_mb=250.0)
    world.run()
    assert world.is_finished
    check_replay(world)


def test_who_came_while_the_result_was_awaited_is_measured_when_training_begins_again():
    world = trained("ab", 150.0, epochs=1)
    world.run_until(lambda: world.hub.phase is JobPhase.KEEPING)
    world.muted = {world.hub.clusters[0].root}
    world.trouble.guessed = tuple(Fact)
    world.join("c", memory_mb=250.0)
    world.run()
    assert world.told(WorkLost)
    assert world.is_finished, "nothing else happens that would wake the hub"


@pytest.mark.parametrize(("seconds", "is_first"), [(5.0, True), (30.0, False)])
def test_a_checkpoint_that_is_written_after_its_cluster_has_gone_is_gone_on_from(seconds, is_first):
    """Unless another one is fetched by then: training has gone on without it."""
    world = trained("a", 250.0, checkpoint_every=2.0)
    keep, written = world.keep_checkpoint, []

    def write_slowly(order):
        written.append(order.books.num_counted)
        world.keep_checkpoint = keep
        world.after(seconds, keep, order)

    world.keep_checkpoint = write_slowly
    world.run_until(lambda: written)
    world.kill("a")
    world.join("b", memory_mb=250.0, at=world.now + 10.0)
    world.run_until(lambda: world.told(FromCheckpoint if is_first else NotCheckpointed))
    assert world.told(WorkLost)
    assert (world.hub.ledger.num_counted == written[0]) is is_first
    world.run()
    assert world.is_finished
    assert set(world.ledger.values()) == {1}
    check_replay(world)


def test_a_checkpoint_that_comes_late_does_not_take_the_place_of_a_newer_one():
    world = HubWorld(job(num_samples=400, num_validation=0, epochs=20, average_every=1000))
    world.join(*"abcdef")
    keep, orders = world.keep_checkpoint, []
    world.keep_checkpoint = orders.append
    world.run_until(lambda: world.hub.ledger.num_counted > 40 and len(world.hub.clusters) > 1)
    for num_counted in (40, 300):  # a giver of the first one goes, so another begins
        world.run_until(lambda least=num_counted: world.hub.ledger.num_counted > least)
        world.feed(CheckpointAsked(world.now))
        world.run_until(lambda: orders and orders[-1].books.num_counted > num_counted)  # noqa: B023
        world.kill(orders[-1].parts[0].node, at=world.now + 1)
    first, second = orders[0], orders[-1]
    assert first.number in world.withdrawn
    keep(second)
    keep(first)
    assert world.books == second.books
    assert [each.num_samples for each in world.told(Checkpointed)][-1] >= 300
    world.keep_checkpoint = keep
    world.run()
    assert world.is_finished
