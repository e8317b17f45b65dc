"""Checkpoints and the result: when a cluster is asked for its state, whose answers count, when it ends."""

import pytest
from support.hub_scene import HALVES, HubScene
from support.hub_world import blob

from ravnest.hub.coordinator.checkpoints import CheckpointCollector
from ravnest.hub.coordinator.leases import LeaseBook, LedgerState
from ravnest.hub.coordinator.snapshots import SnapshotDesk
from ravnest.protocol.placement import SnapshotMade

BOOKS = LedgerState(8, 8, 2, 0, LeaseBook(50, 1, 0).state())


@pytest.fixture
def clusters():
    return HubScene("abcd", ("ab", HALVES), ("cd", HALVES)).placement.clusters


@pytest.fixture
def desk():
    return SnapshotDesk()


@pytest.fixture
def keeping(desk):
    """The first period of a minute began at 100 s."""
    keeping = CheckpointCollector(desk)
    assert not keeping.is_time(60.0, 100.0)
    return keeping


def asked(sends):
    (number,) = {send.message.number for send in sends}
    return number, "".join(send.to for send in sends), {send.message.is_final for send in sends}


@pytest.fixture
def answer(keeping, desk):
    def make(name, number):
        made = SnapshotMade(1, number, 5, blob(name, number))
        return keeping.add_snapshot(name, made, 160.0) if desk.answer(name, made) else None

    return make


def test_the_first_comes_a_whole_period_after_training_began(keeping):
    assert keeping.due(60.0) == 160.0
    assert not keeping.is_time(60.0, 159.9)
    assert keeping.is_time(60.0, 160.0)
    assert keeping.due(None) is None
    assert not keeping.is_time(None, 160.0), "nobody wants any"


def test_with_the_last_answer_all_are_fetched_in_the_order_of_the_line(keeping, clusters, answer):
    number, names, is_final = asked(keeping.start(clusters[0], 160.0, BOOKS))
    assert (names, is_final) == ("ab", {False})
    assert not keeping.is_time(60.0, 500.0), "one at a time"
    assert answer("b", number) == []
    assert keeping.find_ordered(number) is None
    (collect,) = answer("a", number)
    assert (collect.number, collect.books) == (number, BOOKS)
    assert [(part.start, part.stop, part.node) for part in collect.parts] == [(0, 3, "a"), (3, 6, "b")]
    assert keeping.find_ordered(number) is collect
    assert keeping.find_ordered(number + 1) is None


def test_only_what_was_asked_of_whom_it_was_asked_and_once(keeping, clusters, answer):
    number, _, _ = asked(keeping.start(clusters[0], 160.0, BOOKS))
    assert answer("a", number - 1) is None
    assert answer("c", number) is None
    assert answer("a", number) == []
    assert answer("a", number) is None
    keeping.drop(clusters[1])
    assert keeping.is_under_way, "another cluster broke"
    keeping.drop(clusters[0])
    assert not keeping.is_under_way
    assert answer("b", number) is None
    assert keeping.is_time(60.0, 160.0), "it comes as soon as another cluster can be asked"


@pytest.mark.parametrize(("seconds", "pause"), [(2.0, 60.0), (6.0, 60.0), (7.0, 70.0)])
def test_between_two_lies_a_period_or_ten_times_what_one_takes(keeping, clusters, answer, seconds, pause):
    keeping.is_time(60.0, 160.0)
    number, _, _ = asked(keeping.start(clusters[0], 160.0, BOOKS))
    for name in "ab":
        answer(name, number)
    assert keeping.end_ordered(number, 160.0 + seconds) == (BOOKS, seconds)
    assert keeping.find_ordered(number) is None
    assert not keeping.is_under_way
    assert keeping.due(60.0) == 160.0 + seconds + pause


def test_one_that_is_written_counts_although_its_cluster_has_gone_and_ends_no_other(
    keeping, clusters, answer
):
    first, _, _ = asked(keeping.start(clusters[0], 160.0, BOOKS))
    for name in "ab":
        answer(name, first)
    keeping.drop(clusters[0])
    keeping.start(clusters[1], 170.0, BOOKS)
    assert keeping.end_ordered(first, 175.0) == (BOOKS, 15.0)
    assert keeping.is_under_way
    assert not keeping.is_outdated(first)


def test_one_that_is_not_worth_it_is_put_off_by_a_period(keeping):
    assert keeping.is_time(60.0, 165.0)
    keeping.postpone(165.0)
    assert keeping.due(60.0) == 225.0
    assert not keeping.is_time(60.0, 224.9)


def test_who_does_not_answer_is_named_and_who_only_is_fetched_slowly_is_not(keeping, clusters, answer):
    number, _, _ = asked(keeping.start(clusters[0], 160.0, BOOKS))
    assert answer("b", number) == []
    assert keeping.due(60.0) == 280.0
    assert keeping.expire(279.9) is None
    assert keeping.expire(280.0) == "a did not answer within 120 s"
    assert not keeping.is_under_way
    number, _, _ = asked(keeping.start(clusters[0], 2000.0, BOOKS))
    for name in "ab":
        answer(name, number)
    assert keeping.due(60.0) is None
    assert keeping.expire(9999.0) is None
    assert keeping.find_ordered(number) is not None


def test_the_result_takes_the_place_of_a_checkpoint_and_is_not_given_up(keeping, clusters, answer):
    first, _, _ = asked(keeping.start(clusters[0], 160.0, BOOKS))
    assert not keeping.has_result_under_way
    number, names, is_final = asked(keeping.start(clusters[1], 170.0, BOOKS, is_result=True))
    assert (names, is_final) == ("cd", {True})
    assert number > first
    assert keeping.has_result_under_way
    assert keeping.expire(9999.0) is None, "its silent ones are"
    assert keeping.find_silent(9999.0) == ("c", "d")
    assert answer("a", first) is None


def test_numbers_are_used_once(keeping, clusters, desk):
    assert [desk.new_number() for _ in range(3)] == [1, 2, 3]
    assert asked(keeping.start(clusters[0], 160.0, BOOKS, is_result=True))[0] == 4
