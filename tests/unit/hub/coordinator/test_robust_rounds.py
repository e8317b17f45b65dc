"""The hub's side of robust rounds: what it refuses, whom it blames, what is in its log."""

import pytest

from ravnest.config import Mean
from ravnest.hub.coordinator.events import ClusterUnlike, Received
from ravnest.hub.coordinator.robust_rounds import (
    Dispute,
    Likeness,
    RobustDecision,
    RobustRoster,
    Suspicions,
    compare_clusters,
)
from ravnest.hub.service.event_log import read_event, write_event
from ravnest.protocol import messages
from ravnest.protocol.averaging import (
    Pledge,
    RoundCall,
    RoundCheck,
    RoundChecked,
    RoundCommit,
    RoundPledge,
    RoundReady,
    Sight,
)

NAMES = ("a", "b", "c", "d")
ROSTER = RobustRoster({name: (name,) for name in NAMES}, {0: NAMES}, dict.fromkeys(NAMES, 10.0))


def pledge(name, norms=None, owners=NAMES):
    given = norms or {}
    return RoundPledge(1, name, tuple(Pledge(owner, bytes(16), given.get(name, 1.0)) for owner in owners))


def ready(name, part=b"x", sights=()):
    parts = ((0, tuple(bytes(15) + (part if k == 1 else b"x") for k in range(4))),)
    return RoundReady(1, name, ((0, bytes(15) + part),), parts, sights)


def called(norms=None):
    hub = RobustDecision(1, ROSTER)
    sends = [hub.receive(pledge(name, norms)) for name in NAMES]
    assert sends[:3] == [[], [], []]
    return hub, {each.to: each.message for each in sends[3]}


def voted():
    hub, _ = called()
    sends = [hub.receive(ready(name)) for name in NAMES]
    return hub, sends[-1]


def test_nobody_is_called_before_all_have_pledged():
    hub, calls = called()
    assert set(calls) == set(NAMES)
    assert all(isinstance(call, RoundCall) for call in calls.values())
    assert {each.member for each in calls["a"].terms} == set(NAMES)
    assert hub.missing == set(NAMES), "now all are to vote"


def test_a_pledge_is_for_each_owner_and_once():
    hub = RobustDecision(1, ROSTER)
    assert "does not pledge what it owes" in hub.receive(pledge("a", owners=("a", "b")))
    assert hub.receive(pledge("a")) == []
    assert "has pledged" in hub.receive(pledge("a"))
    assert "is not to" in hub.receive(ready("a"))


def test_long_contributions_are_made_shorter_and_far_too_long_ones_left_out():
    _, calls = called({"b": 6.0, "c": 100.0})
    factors = {each.member: each.factor for each in calls["a"].terms}
    assert factors["a"] == factors["d"] == 1.0
    assert 0.5 < factors["b"] <= 1.0
    assert factors["c"] < 0.2
    hub, calls = called({"c": 1000.0})
    assert {each.member: each.factor for each in calls["a"].terms}["c"] == 0.0
    assert hub.too_long == {"c"}


def test_lengths_are_compared_by_sample():
    roster = RobustRoster(ROSTER.clusters, ROSTER.rings, {"a": 40.0, "b": 10.0, "c": 10.0, "d": 10.0})
    hub = RobustDecision(1, roster)
    sends = [hub.receive(pledge(name, {"a": 4.0})) for name in NAMES][-1]
    assert {each.factor for each in sends[0].message.terms} == {1.0}


def test_a_length_beyond_reason_leaves_the_call_of_all_others_one_that_can_be_sent():
    """The others may have changed nothing: then theirs is no measure."""
    _, calls = called(dict.fromkeys("bcd", 0.0) | {"a": 1e30})
    for call in calls.values():
        messages.pack(call)


def test_votes_that_differ_abort_and_name_who_contradicts_the_owner():
    hub, _ = called()
    for name in NAMES:
        hub.receive(ready(name, b"y" if name == "d" else b"x"))
    assert hub.outcome.reason.startswith("the owners of segment 0 hold different averages")
    assert [(each.owner, each.other) for each in hub.disputes] == [("c", "d")]  # part 1 in round 1


def test_every_owner_is_checked_by_another_and_then_it_commits():
    hub, sends = voted()
    checks = {(each.message.owner, each.message.checker) for each in sends}
    assert {owner for owner, _ in checks} == set(NAMES)
    assert all(owner != checker for owner, checker in checks)
    assert all(isinstance(each.message, RoundCheck) for each in sends)
    assert all(bool(each.message.terms) == (each.to == each.message.checker) for each in sends)
    for owner, checker in sorted(checks):
        assert hub.outcome is None
        assert hub.receive(RoundChecked(1, checker, 0, owner, True)) == []
    assert hub.outcome == RoundCommit(1)


def test_the_draw_is_the_same_again_and_another_with_other_pledges():
    first, again = (
        [(x.message.owner, x.message.checker, x.message.ticket) for x in voted()[1]] for _ in range(2)
    )
    assert first == again


@pytest.mark.parametrize("is_right", [True, False])
def test_a_third_decides_between_owner_and_checker(is_right):
    hub, sends = voted()
    first = sends[0].message
    more = hub.receive(RoundChecked(1, first.checker, 0, first.owner, False))
    (second,) = {each.message.checker for each in more}
    assert second not in (first.owner, first.checker)
    hub.receive(RoundChecked(1, second, 0, first.owner, is_right))
    assert list(hub.liars) == [first.checker if is_right else first.owner]
    assert (hub.outcome is None) == is_right


def test_who_was_not_asked_checks_nothing():
    hub, sends = voted()
    owner, checker = sends[0].message.owner, sends[0].message.checker
    other = next(x for x in NAMES if x not in (owner, checker))
    assert "is not to check" in hub.receive(RoundChecked(1, other, 0, owner, False))


def test_silence_is_named_at_each_step():
    hub = RobustDecision(1, ROSTER)
    hub.receive(pledge("a"))
    hub.expire()
    assert hub.suspects == ("b", "c", "d")
    assert "no pledge before the deadline" in hub.outcome.reason


def test_who_contradicts_two_is_the_liar_and_until_then_the_owner_rests():
    suspicions = Suspicions()
    assert suspicions.record_disputes([Dispute("a", "b", "")], ROSTER) == {}
    assert suspicions.resting == {"a"}
    assert list(suspicions.record_disputes([Dispute("c", "b", "")], ROSTER)) == ["b"]


def test_an_owner_that_accuses_two_is_the_liar():
    suspicions = Suspicions()
    found = suspicions.record_disputes([Dispute("a", "b", ""), Dispute("a", "c", "")], ROSTER)
    assert list(found) == ["a"]


def test_among_ten_two_may_lie_so_three_must_be_contradicted():
    names = tuple("abcdefghij")
    roster = RobustRoster({name: (name,) for name in names}, {0: names}, dict.fromkeys(names, 1.0))
    suspicions = Suspicions()
    both = [Dispute("a", "b", ""), Dispute("c", "b", "")]
    assert suspicions.record_disputes(both, roster) == {}
    assert list(suspicions.record_disputes([Dispute("d", "b", "")], roster)) == ["b"]


def sight(member, distance=1.0, along=0.5, square=1.0):
    return Sight(member, distance, along, square, 1000)


def test_no_owner_alone_makes_another_unlike():
    honest = [sight(name) for name in NAMES]
    slander = [sight(name, 1e9 if name == "b" else 1.0, -1e4 if name == "b" else 0.5) for name in NAMES]
    found = compare_clusters({"a": slander, "b": honest, "c": honest, "d": honest}, ROSTER)
    assert found["b"].distance < 2.0
    assert found["b"].cosine > 0.0


def test_one_round_is_no_proof_and_five_are():
    suspicions = Suspicions()
    odd = {"a": Likeness(1.0, 0.5, 0.0), "b": Likeness(50.0, 0.5, 0.0)}
    told = [suspicions.record_likeness(odd) for _ in range(5)]
    assert told[:4] == [{}, {}, {}, {}]
    assert list(told[4]) == ["b"]
    assert [suspicions.mark("b") for _ in range(3)] == [False, False, True]


def test_what_members_say_and_monitors_conclude_is_in_the_log_as_it_was():
    said = [pledge("a"), ready("a", sights=(sight("b"),)), RoundChecked(1, "a", 0, "b", True, "c")]
    events = [*(Received("a", each, 1.0) for each in said), ClusterUnlike("A1", "it leaps", 2.0)]
    for event in events:
        assert read_event(*write_event(event)) == event


def test_four_clusters_are_robust_by_themselves_and_three_if_asked():
    assert Mean.AUTO.is_robust(4, 4)
    assert Mean.AUTO.is_robust(4, 3), "one of the four is left out"
    assert not Mean.AUTO.is_robust(4, 2)
    assert not Mean.AUTO.is_robust(3, 3)
    assert Mean.ROBUST.is_robust(3, 3)
    assert not Mean.PLAIN.is_robust(9, 9)
