"""One round: a member's phases and refusals; the laws have the hub around them."""

import numpy as np
import pytest
from blake3 import blake3
from support.ring_world import Plain

from ravnest.averaging.ring import RingPosition, RingReduce
from ravnest.averaging.round import Round, RoundPhase
from ravnest.protocol.averaging import RingPart, RoundAbort, RoundCommit, RoundQuery, RoundReady
from ravnest.protocol.messages import Refusal

COMMIT, ABORT = RoundCommit(3), RoundAbort(3, "c died")


def lone_round(weight: float = 1.0) -> Round:
    """A member whose only ring has one member: ready as soon as it starts."""
    return Round(
        3, "a", {8: RingReduce(RingPosition(3, 8, 0, 1), Plain(np.arange(3.0)), weight, 2)}, deadline=10.0
    )


def pair_round() -> Round:
    return Round(
        3, "a", {8: RingReduce(RingPosition(3, 8, 0, 2), Plain(np.arange(4.0)), 1.0, 2)}, deadline=10.0
    )


def ready_round() -> Round:
    member = lone_round()
    (vote,) = member.start()
    assert vote == RoundReady(3, "a", ((8, vote.hashes[0][1]),))
    return member


def test_commit_gives_the_averages_out_once():
    member = ready_round()
    assert member.phase is RoundPhase.READY
    assert member.pop_averages() is None
    assert member.conclude(COMMIT) is None
    averages = member.pop_averages()
    assert [piece.tolist() for piece in averages[8]] == [[0.0, 1.0], [2.0]]
    assert member.conclude(COMMIT) is None  # heard before
    assert member.pop_averages() is None


def test_abort_drops_everything():
    member = ready_round()
    assert member.conclude(ABORT) is None
    assert member.phase is RoundPhase.ABORTED
    assert member.pop_averages() is None
    assert member.conclude(ABORT) is None


def test_a_ring_passes_its_parts_and_votes_when_done():
    member = pair_round()
    (out,) = member.start()
    assert (out.segment, out.part, out.hops) == (8, 0, 1)
    (mean,) = member.receive(RingPart(3, 8, 1, 0, 1, 1.0, np.array([4.0, 5.0])))
    assert mean.value.tolist() == [3.0, 4.0]
    (vote,) = member.receive(RingPart(3, 8, 0, 0, 2, 2.0, np.ones(2)))
    chunks = b"".join(blake3(np.array(each).tobytes()).digest() for each in ([1.0, 1.0], [3.0, 4.0]))
    assert vote == RoundReady(3, "a", ((8, blake3(chunks).digest()[:16]),))


def test_rings_start_in_turn_by_their_sizes():
    rings = {
        x: RingReduce(RingPosition(3, x, 0, 2), Plain(np.ones(size)), 1.0, 1)
        for x, size in enumerate([12, 4, 0])
    }
    starts = Round(3, "a", rings, deadline=10.0).start()
    assert [part.segment for part in starts] == [0, 0, 1, 0, 0, 0, 1, 0]


def test_a_chunk_is_made_when_it_is_asked_for_and_none_after_an_abort():
    member = Round(
        3, "a", {8: RingReduce(RingPosition(3, 8, 0, 2), Plain(np.ones(8)), 1.0, 1)}, deadline=10.0
    )
    starts = member.start()
    next(starts)
    member.conclude(ABORT)
    assert list(starts) == []


def test_a_part_that_is_not_finite_names_who_sent_it():
    ring = RingReduce(RingPosition(3, 8, 0, 2), Plain(np.ones(2)), 1.0, 1)
    member = Round(3, "a", {8: ring}, deadline=10.0, before={8: "z"})
    list(member.start())
    assert member.receive(RingPart(3, 8, 1, 0, 1, 1.0, np.full(1, np.inf))) == (
        RoundAbort(3, "segment 8: what came is not finite", "z"),
    )
    assert member.phase is RoundPhase.ABORTED


def test_at_the_deadline_it_names_whom_it_waits_for_most():
    rings = {x: RingReduce(RingPosition(3, x, 0, 2), Plain(np.ones(2 + 2 * x)), 1.0, 1) for x in range(2)}
    member = Round(3, "a", rings, deadline=10.0, before={0: "y", 1: "z"})
    list(member.start())
    assert member.expire(10.0).suspect == "z"


def test_at_the_deadline_it_names_who_should_have_sent_the_first_that_is_missing():
    rings = {x: RingReduce(RingPosition(3, x, 2, 3), Plain(np.ones(9)), 1.0, 9) for x in (0, 1, 2)}
    member = Round(3, "a", rings, deadline=10.0, before={0: "x", 1: "y", 2: "z"})
    list(
        member.start()
    )  # the chunk of segment 0 comes second to this member, that of 1 first, that of 2 starts here
    assert member.expire(10.0) == RoundAbort(
        3, "a had not finished its rings at the deadline; it waits for y most", "y", hops=1
    )
    member = Round(3, "a", {0: rings[0]}, deadline=10.0, before={0: "x"})
    assert member.expire(10.0).hops == 2


def test_all_rings_must_be_done():
    rings = {x: RingReduce(RingPosition(3, x, 0, 1 + x), Plain(np.ones(2)), 1.0, 1) for x in range(2)}
    member = Round(3, "a", rings, deadline=10.0)
    assert [type(message) for message in member.start()] == [RingPart]
    assert member.phase is RoundPhase.RUNNING


def test_before_voting_it_may_give_up():
    member = pair_round()
    list(member.start())
    assert member.expire(9.9) is None
    abort = member.expire(10.0)
    assert abort.reason == "a had not finished its rings at the deadline"
    assert member.phase is RoundPhase.ABORTED
    assert member.expire(11.0) is None
    assert list(member.start()) == []


def test_after_voting_it_may_only_ask():
    member = ready_round()
    assert member.give_up("tired") is None
    assert member.expire(9.9) is None
    assert member.expire(10.0) == member.expire(11.0) == RoundQuery(3, "a")
    assert member.phase is RoundPhase.READY


def test_a_ring_that_can_never_be_done_gives_up_at_once():
    member = lone_round(weight=0.0)
    (abort,) = member.start()
    assert "total weight of 0.0" in abort.reason
    assert member.phase is RoundPhase.ABORTED


@pytest.mark.parametrize(
    ("make", "message", "reason"),
    [
        (ready_round, RoundCommit(4), "round 4 is not round 3"),
        (ready_round, RoundAbort(2, "old"), "round 2 is not round 3"),
        (pair_round, RingPart(2, 8, 1, 0, 1, 1.0, np.ones(2)), "round 2 is not round 3"),
        (pair_round, RingPart(3, 9, 1, 0, 1, 1.0, np.ones(2)), "a has no segment 9"),
        (pair_round, RingPart(3, 8, 1, 0, 9, 1.0, np.ones(2)), "not awaited"),
        (pair_round, COMMIT, "RoundCommit of round 3, which is running here"),
    ],
)
def test_refusals(make, message, reason):
    member = make()
    phase = member.phase
    refusal = (member.receive if isinstance(message, RingPart) else member.conclude)(message)
    assert isinstance(refusal, Refusal)
    assert reason in refusal.reason
    assert member.phase is phase


def test_contradictions_are_refused():
    committed, aborted = ready_round(), ready_round()
    committed.conclude(COMMIT)
    aborted.conclude(ABORT)
    assert "which is committed here" in committed.conclude(ABORT).reason
    assert "which is aborted here" in aborted.conclude(COMMIT).reason
    assert aborted.pop_averages() is None
    part = RingPart(3, 8, 1, 0, 1, 1.0, np.ones(2))
    assert "round 3 is aborted here" in aborted.receive(part).reason
