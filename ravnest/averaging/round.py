"""One attempt to average all segments: it commits on every surviving member, or it never happened.

A member runs all its rings at once and votes when they are done; the coordinator (the hub or an
appointed peer) commits when all have voted. Whoever has voted may no longer give up by itself: it asks
until somebody knows. The decision is logged before anyone hears it, and a coordinator that restarts
without a logged decision aborts: nobody can have heard of a commit.
Driven by peer.averager, hub.server and sim.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, Self, TypeVar, assert_never

from ravnest.averaging.ring import RingReduce, Vector
from ravnest.plan.types import NodeId
from ravnest.protocol import (
    Refusal,
    RingPart,
    RoundAbort,
    RoundCommit,
    RoundId,
    RoundOutcome,
    RoundQuery,
    RoundReady,
    SegmentId,
)

V = TypeVar("V", bound=Vector)


class Phase(StrEnum):
    """Where a member stands in a round."""

    RUNNING = "running"
    READY = "ready"  # voted: uncertain until it hears the decision
    COMMITTED = "committed"
    ABORTED = "aborted"


class Round(Generic[V]):
    """A member's side. Parts go to each ring's successor, votes and aborts to the coordinator."""

    def __init__(
        self,
        round_id: RoundId,
        member: NodeId,
        rings: Mapping[SegmentId, RingReduce[V]],
        deadline: float,
    ) -> None:
        self._round_id = round_id
        self._member = member
        self._rings = dict(rings)
        self._deadline = deadline
        self._phase = Phase.RUNNING
        self._outcome: RoundOutcome | None = None
        self._averages: dict[SegmentId, tuple[V, ...]] | None = None

    @property
    def phase(self) -> Phase:
        """Where this member stands; committed and aborted are final."""
        return self._phase

    @property
    def outcome(self) -> RoundOutcome | None:
        """The decision, once this member knows it."""
        return self._outcome

    def start(self) -> tuple[RingPart[V] | RoundReady | RoundAbort, ...]:
        """Start every ring at once; return the first messages."""
        if self._phase is not Phase.RUNNING:  # gave up before it began
            return ()
        parts = [part for ring in self._rings.values() for part in ring.start()]
        return (*parts, *self._settle())

    def receive(
        self, message: RingPart[V] | RoundOutcome
    ) -> tuple[RingPart[V] | RoundReady | RoundAbort, ...] | Refusal:
        """Take a part or the decision; return what to send."""
        if message.round_id != self._round_id:
            return Refusal(f"round {message.round_id} is not round {self._round_id}, which runs here")
        match message:
            case RingPart():
                return self._take_part(message)
            case RoundCommit() | RoundAbort():
                return self._take_outcome(message)
            case _:
                assert_never(message)

    def expire(self, now: float) -> RoundAbort | RoundQuery | None:
        """Give up at the deadline, or ask what became of the round if this member has voted."""
        if now < self._deadline:
            return None
        if self._phase is Phase.RUNNING:
            return self.give_up(f"{self._member} had not finished its rings at the deadline")
        if self._phase is Phase.READY:
            return RoundQuery(self._round_id, self._member)
        return None

    def give_up(self, reason: str) -> RoundAbort | None:
        """Abort by itself, to be told to the coordinator; None when it may not or need not."""
        if self._phase is not Phase.RUNNING:
            return None
        abort = RoundAbort(self._round_id, reason)
        self._end(Phase.ABORTED, abort)
        return abort

    def answer(self, query: RoundQuery) -> RoundOutcome | Refusal:
        """Tell a member that asks what became of the round, if this one knows."""
        if query.round_id != self._round_id:
            return Refusal(f"round {query.round_id} is not known here")
        if self._outcome is None:
            return Refusal(f"round {query.round_id} is undecided as far as {self._member} knows")
        return self._outcome

    def take_averages(self) -> dict[SegmentId, tuple[V, ...]] | None:
        """Give out the averages of a committed round, once; each is cut in consecutive pieces."""
        averages, self._averages = self._averages, None
        return averages

    def _take_part(self, part: RingPart[V]) -> tuple[RingPart[V] | RoundReady | RoundAbort, ...] | Refusal:
        if self._phase is not Phase.RUNNING:
            return Refusal(f"round {part.round_id} is {self._phase} here: it takes no more parts")
        ring = self._rings.get(part.segment)
        if ring is None:
            return Refusal(f"{self._member} has no segment {part.segment} to average")
        passed_on = ring.receive(part)
        if isinstance(passed_on, Refusal):
            return passed_on
        sent = () if passed_on is None else (passed_on,)
        return (*sent, *self._settle())

    def _settle(self) -> tuple[RoundReady | RoundAbort, ...]:
        """Vote when all rings are done, give up when one never can be."""
        for ring in self._rings.values():
            if ring.failure is not None:
                abort = self.give_up(ring.failure)
                return () if abort is None else (abort,)
        if not all(ring.done for ring in self._rings.values()):
            return ()
        self._phase = Phase.READY
        return (RoundReady(self._round_id, self._member),)

    def _take_outcome(self, outcome: RoundOutcome) -> tuple[()] | Refusal:
        match outcome, self._phase:
            case RoundCommit(), Phase.READY:
                self._averages = {segment: ring.pieces for segment, ring in self._rings.items()}
                self._end(Phase.COMMITTED, outcome)
            case RoundAbort(), Phase.RUNNING | Phase.READY:
                self._end(Phase.ABORTED, outcome)
            case (RoundCommit(), Phase.COMMITTED) | (RoundAbort(), Phase.ABORTED):
                pass  # heard before
            case _:
                told = type(outcome).__name__
                return Refusal(f"{told} of round {outcome.round_id}, which is {self._phase} here")
        return ()

    def _end(self, phase: Phase, outcome: RoundOutcome) -> None:
        self._phase = phase
        self._outcome = outcome
        self._rings.clear()


class RoundDecision:
    """The coordinator's side: what it returns is written to the log, then `logged` lets it out."""

    def __init__(self, round_id: RoundId, members: tuple[NodeId, ...], deadline: float) -> None:
        assert members, "a round needs members"
        self._round_id = round_id
        self._missing = dict.fromkeys(members)  # in the order of the plan, for stable reasons
        self._members = frozenset(members)
        self._deadline = deadline
        self._pending: RoundOutcome | None = None
        self._outcome: RoundOutcome | None = None

    @classmethod
    def recover(cls, round_id: RoundId, members: tuple[NodeId, ...], logged: RoundOutcome | None) -> Self:
        """Return the coordinator after a restart; without a logged decision `pending` is an abort."""
        decision = cls(round_id, members, deadline=0.0)
        decision._pending = logged
        if logged is None:
            decision._decide(RoundAbort(round_id, "the coordinator restarted before it decided"))
        else:
            decision.logged()
        return decision

    @property
    def pending(self) -> RoundOutcome | None:
        """The decision that is not in the log yet; nobody may hear of it."""
        return self._pending

    @property
    def outcome(self) -> RoundOutcome | None:
        """The logged decision, final."""
        return self._outcome

    def vote(self, ready: RoundReady) -> RoundOutcome | Refusal | None:
        """Count a vote; return the commit to log when it was the last one missing."""
        if ready.round_id != self._round_id:
            return Refusal(f"round {ready.round_id} is not round {self._round_id}")
        if ready.member not in self._members:
            return Refusal(f"{ready.member} is no member of round {self._round_id}")
        if self._is_decided:
            return Refusal(f"{ready.member} votes after round {self._round_id} was decided")
        self._missing.pop(ready.member, None)
        return None if self._missing else self._decide(RoundCommit(self._round_id))

    def give_up(self, member: NodeId, reason: str) -> RoundOutcome | Refusal | None:
        """Abort because a member died or gave up; return the abort to log, None once decided."""
        if member not in self._members:
            return Refusal(f"{member} is no member of round {self._round_id}")
        if self._is_decided:
            return None
        return self._decide(RoundAbort(self._round_id, f"{member}: {reason}"))

    def expire(self, now: float) -> RoundOutcome | None:
        """Return the abort to log when the deadline has passed without all votes."""
        if self._is_decided or now < self._deadline:
            return None
        silent = ", ".join(self._missing)
        return self._decide(RoundAbort(self._round_id, f"no vote before the deadline from {silent}"))

    def logged(self) -> RoundOutcome:
        """Note that the pending decision is on disk; return it, to be sent to every member."""
        assert self._pending is not None, f"round {self._round_id}: nothing was to be logged"
        self._outcome, self._pending = self._pending, None
        return self._outcome

    def answer(self, query: RoundQuery) -> RoundOutcome | Refusal:
        """Tell a member that asks what became of the round, once that is logged."""
        if query.round_id != self._round_id:
            return Refusal(f"round {query.round_id} is not round {self._round_id}")
        if self._outcome is None:
            return Refusal(f"round {self._round_id} is not decided yet")
        return self._outcome

    @property
    def _is_decided(self) -> bool:
        return self._pending is not None or self._outcome is not None

    def _decide(self, outcome: RoundOutcome) -> RoundOutcome:
        self._pending = outcome
        return outcome
