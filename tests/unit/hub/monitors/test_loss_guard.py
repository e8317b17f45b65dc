"""The guard: what it calls wrong, what it leaves alone, and what the hub does about it."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hub_world import HubWorld, check_replay, job

from ravnest.hub.coordinator.events import Collected, LossAlarm, WithdrawCollect
from ravnest.hub.coordinator.notices import (
    Checkpointed,
    ClusterStarted,
    NotCheckpointed,
    PlanFormed,
    WentWrong,
    WorkLost,
)
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.hub.monitors.loss_guard import LossGuard


def fed(*losses):
    guard = LossGuard()
    for loss in losses:
        guard.record_loss("A1", "A", loss)
    return guard


def falling(count, first=2.3):
    return [first * 0.99**number for number in range(count)]


@given(st.lists(st.floats(0.0, 10.0), max_size=31), st.floats(10.0, 1e6))
def test_one_hard_batch_or_a_few_are_no_alarm(noise, peak):
    guard = fed(*falling(200), *noise[:8], peak, *falling(40, 0.3))
    assert guard.alarm is None


@given(st.floats(-5.0, 5.0), st.lists(st.floats(-0.1, 0.1), min_size=100, max_size=200))
def test_a_loss_that_wavers_is_no_alarm(level, noise):
    assert fed(*(level + each for each in noise)).alarm is None


def test_a_loss_that_leaps_and_stays_up_is_one_and_names_the_cluster():
    guard = fed(*falling(200))
    assert guard.is_calm
    for _ in range(31):
        guard.record_loss("B2", "B", 9.0)
    assert guard.alarm is None, "not before a whole window is high"
    guard.record_loss("B2", "B", 9.0)
    assert guard.alarm.suspect == "cluster B"
    assert guard.alarm.reason == "the loss of cluster B is 9, and was 0.364"


def test_a_leap_back_by_little_of_the_way_fallen_so_far_is_none():
    fallen = [10.0] * 32 + [1.01] * 64 + [1.0] * 64
    assert fed(*fallen, *[3.2] * 32).alarm is None
    assert fed(*fallen, *[3.3] * 32).alarm is not None, "more than a quarter of the way"


@pytest.mark.parametrize(
    ("losses", "highest"),
    [
        ([1.01] * 64 + [1.0] * 64, 1.5),  # half of the best
        ([0.5, 1.5] * 32, 6.0),  # ten times as far as they were from their mean
    ],
)
def test_a_leap_is_more_than_half_of_the_best_and_ten_deviations(losses, highest):
    assert fed(*losses, *[highest - 0.05] * 32).alarm is None
    assert fed(*losses, *[highest + 0.05] * 32).alarm is not None


def test_half_way_to_an_alarm_nothing_is_worth_keeping():
    guard = fed(*falling(200), *[0.65] * 20)
    assert guard.alarm is None
    assert not guard.is_calm


def test_a_cluster_that_is_no_more_does_not_keep_others_from_being_kept():
    guard = fed(*[2.0] * 40)
    for loss in falling(400):
        guard.record_loss("B2", "B", loss)
    assert not guard.is_calm, "cluster A stands where it stood"
    guard.forget_others(["B2"])
    assert guard.is_calm


def test_a_storm_of_dropped_batches_names_who_dropped_most():
    guard = fed(*falling(64))
    for number in range(17):
        assert guard.alarm is None
        guard.record_dropped("A1", "bob" if number % 3 else "ana", f"reason {number}")
    assert guard.alarm.suspect == "bob"
    assert guard.alarm.reason == "17 of the last 32 microbatches were dropped (last: reason 16)"


def test_half_way_to_a_storm_nothing_is_worth_keeping():
    guard = fed(*falling(64))
    for _ in range(7):
        guard.record_dropped("A1", "bob", "a reason")
    assert guard.is_calm
    guard.record_dropped("A1", "bob", "a reason")
    assert not guard.is_calm
    for loss in falling(24, 0.5):
        guard.record_loss("A1", "A", loss)
    assert not guard.is_calm
    guard.record_loss("A1", "A", 0.5)
    assert guard.is_calm, "the first of them is 32 batches ago"


def test_what_is_no_number_does_not_count():
    assert fed(*[None] * 100).alarm is None
    assert not math.isnan(fed(*falling(40))._best)


def fill(guard, cluster, losses):
    for loss in losses:
        guard.record_loss(f"{cluster}1", cluster, loss)


def many(*names, first=2.3):
    """A guard that has seen these clusters learn alike."""
    guard = LossGuard()
    for loss in falling(120, first):
        for name in names:
            guard.record_loss(f"{name}1", name, loss)
    return guard


def test_of_many_clusters_one_that_goes_wrong_is_unlike_and_nobody_else_goes_back():
    guard = many("A", "B", "C", "D")
    fill(guard, "B", [1e6] * 32)
    assert guard.alarm is None
    (unlike,) = guard.unlike
    assert unlike.cluster_id == "B1"
    assert unlike.reason.startswith("the loss of cluster B is 5e+05")
    assert guard.is_calm, "what it says keeps nobody from a checkpoint"


def test_where_most_go_wrong_it_is_an_alarm():
    guard = many("A", "B", "C", "D")
    for _ in range(32):
        for name in ("B", "C", "D"):
            guard.record_loss(f"{name}1", name, 9.0)
    assert guard.alarm is not None


def test_of_two_clusters_none_is_unlike():
    guard = many("A", "B")
    fill(guard, "B", [9.0] * 32)
    assert guard.alarm is not None
    assert not guard.unlike


def test_a_cluster_that_says_it_is_perfect_is_no_measure_for_the_others():
    guard = many("A", "B", "C", "D")
    fill(guard, "A", [1e-9] * 64)
    fill(guard, "B", [0.7] * 32)
    assert guard.alarm is None
    assert not guard.unlike
    assert guard.is_calm


def test_a_cluster_that_drops_everything_alone_is_unlike():
    guard = many("A", "B", "C")
    for _ in range(32):
        guard.record_dropped("B1", "bob", "a reason")
    assert guard.alarm is None
    assert [each.cluster_id for each in guard.unlike][:1] == ["B1"]


@settings(max_examples=10)
@given(st.lists(st.floats(0.9, 1.1), min_size=4, max_size=4), st.integers(0, 2**32))
def test_honest_clusters_of_different_levels_are_never_unlike(levels, seed):
    guard, random = LossGuard(), Random(seed)
    for step in range(80):
        for name, level in zip("ABCD", levels, strict=True):
            noise = random.uniform(0.8, 1.2)
            guard.record_loss(f"{name}1", name, level * noise * 2.0 * 0.99**step)
    assert not guard.unlike


@pytest.fixture
def world():
    world = HubWorld(job(num_samples=4000, epochs=1, num_validation=0, checkpoint_every=5.0))
    world.join("a", memory_mb=250.0)
    return world


def spoil(world, until):
    """Let leaves tell losses that nobody would doubt are wrong."""
    before, world.loss = world.loss, lambda _: 1e6
    world.run_until(until)
    world.loss = before


def test_it_goes_back_to_the_last_checkpoint_and_trains_on(world):
    world.run_until(lambda: world.told(Checkpointed))
    before = sum(world.ledger.values())
    world.run(until=world.now + 3.0)
    spoil(world, lambda: world.told(WentWrong))
    (wrong,) = world.told(WentWrong)
    assert wrong.suspect == "cluster A"
    assert wrong.goes_back
    assert world.told(WorkLost)
    assert sum(world.ledger.values()) >= before
    world.run_until(lambda: len(world.told(PlanFormed)) == 2)
    world.run()
    assert world.is_finished
    assert set(world.ledger.values()) == {1}
    check_replay(world)


def test_a_checkpoint_under_way_when_it_goes_wrong_is_not_kept(world):
    world.run_until(lambda: world.told(Checkpointed))
    keep, collects = world.keep_checkpoint, []
    world.keep_checkpoint = collects.append
    world.run_until(lambda: collects)
    before = world.checkpoint
    orders = world.feed(LossAlarm("the loss leaps", "cluster A", world.now))
    assert world.told(WentWrong)
    assert [each for each in orders if isinstance(each, WithdrawCollect)] == [
        WithdrawCollect(collects[0].number)
    ]
    world.keep_checkpoint = keep
    keep(collects[0])
    assert world.checkpoint == before
    assert world.told(NotCheckpointed)
    world.run()
    assert world.is_finished


def test_one_that_was_being_written_is_gone_on_from_for_stages_are_made_of_it(world):
    world.run_until(lambda: world.told(Checkpointed))
    collects = []
    world.keep_checkpoint = collects.append
    world.run_until(lambda: collects)
    world.feed(LossAlarm("the loss leaps", "cluster A", world.now))
    world.feed(Collected(collects[0].number, world.now))
    assert world.hub.ledger.num_counted == collects[0].books.num_counted


def test_without_a_checkpoint_it_says_so_and_trains_on():
    world = HubWorld(job(num_samples=4000, epochs=1, num_validation=0))
    world.join("a", memory_mb=250.0)
    world.run_until(lambda: world.told(ClusterStarted))
    world.run(until=world.now + 12.0)
    spoil(world, lambda: world.told(WentWrong))
    assert not world.told(WentWrong)[0].goes_back
    assert not world.told(WorkLost)
    world.run()
    assert world.is_finished


def alarm(world):
    """Let the loss go wrong; return how many samples were trained by then."""
    place = world.hub.ledger.num_counted
    world.feed(LossAlarm("the loss leaps", "cluster A", world.now))
    return place


def test_again_and_again_at_one_place_is_the_end_whatever_checkpoints_are_made_before_it(world):
    world.run_until(lambda: len(world.told(Checkpointed)) == 3)
    place = world.hub.ledger.num_counted + 100
    for _ in range(4):
        assert world.abandoned is None
        kept = len(world.told(Checkpointed))
        world.run_until(lambda kept=kept: len(world.told(Checkpointed)) > kept)
        world.run_until(lambda: world.hub.ledger.num_counted >= place)
        alarm(world)
    assert len(world.told(WentWrong)) == 4
    assert world.abandoned.is_guarded
    assert "lower the learning rate" in world.abandoned.reason
    assert world.hub.phase is JobPhase.FINISHED


def test_alarms_of_places_that_were_passed_do_not_count(world):
    world.run_until(lambda: world.told(Checkpointed))
    for _ in range(5):
        place = alarm(world)
        world.run_until(lambda place=place: world.told(Checkpointed)[-1].num_samples > place)
    world.run()
    assert world.is_finished
