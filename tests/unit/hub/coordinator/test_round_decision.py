"""How the hub counts the votes of a round, and what it decides."""

import pytest

from ravnest.hub.coordinator.rounds import RoundDecision
from ravnest.protocol.averaging import RoundAbort, RoundCommit, RoundReady

COMMIT = RoundCommit(3)


def votes(decision: RoundDecision, *members: str, digest: bytes = b"0" * 16) -> None:
    for member in members:
        decision.vote(RoundReady(3, member, ((8, digest),)))


def test_decision_commits_with_the_last_vote():
    decision = RoundDecision(3, ("a", "b"))
    votes(decision, "a", "a")  # a second copy counts once
    assert (decision.outcome, decision.missing) == (None, {"b"})
    votes(decision, "b")
    assert (decision.outcome, decision.missing, decision.suspects) == (COMMIT, set(), ())


def test_decision_aborts_at_the_deadline_or_by_a_death():
    decision = RoundDecision(3, ("a", "b", "c"))
    votes(decision, "b")
    decision.expire()
    assert decision.outcome == RoundAbort(3, "no vote before the deadline from a, c")
    assert decision.suspects == ("a", "c")
    decision = RoundDecision(3, ("a", "b"))
    decision.give_up("b", "died", "a")
    assert decision.outcome == RoundAbort(3, "b: died", "a")


def test_a_decision_is_final():
    decision = RoundDecision(3, ("a",))
    votes(decision, "a")
    for change in (decision.expire, lambda: decision.give_up("a", "died")):
        with pytest.raises(AssertionError, match="decided already"):
            change()
    assert decision.outcome == COMMIT


def test_averages_that_differ_are_refused_and_the_fewer_suspected():
    decision = RoundDecision(3, ("a", "b", "c"))
    votes(decision, "a", "c")
    votes(decision, "b", digest=b"1" * 16)
    assert "the owners of segment 8 hold different averages" in decision.outcome.reason
    assert decision.suspects == ("b",)
    decision = RoundDecision(3, ("a", "b"))
    votes(decision, "a")
    votes(decision, "b", digest=b"1" * 16)
    assert isinstance(decision.outcome, RoundAbort)
    assert decision.suspects == ("a", "b"), "of two nobody knows which"
