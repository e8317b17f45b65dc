"""A member's side of one attempt to average all segments: it commits on all survivors, or never happened.

A member runs all its rings at once and votes when they are done. A member that has voted may not give up by
itself: it asks for the outcome. The hub counts the votes and decides (`hub.coordinator.rounds`).
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from enum import StrEnum
from typing import Generic, TypeVar

from ravnest.averaging.ring import RingReduce
from ravnest.ids import NodeId, RoundId, SegmentId
from ravnest.protocol.averaging import RingPart, RoundAbort, RoundCommit, RoundOutcome, RoundQuery, RoundReady
from ravnest.protocol.messages import Refusal

_V = TypeVar("_V", bound=Sized)


class RoundPhase(StrEnum):
    """Where a member stands in a round."""

    RUNNING = "running"
    READY = "ready"  # voted: uncertain until it hears the decision
    COMMITTED = "committed"
    ABORTED = "aborted"


ROUND_TRANSITIONS: Mapping[RoundPhase, frozenset[RoundPhase]] = {
    RoundPhase.RUNNING: frozenset({RoundPhase.READY, RoundPhase.ABORTED}),
    RoundPhase.READY: frozenset({RoundPhase.COMMITTED, RoundPhase.ABORTED}),
    RoundPhase.COMMITTED: frozenset(),
    RoundPhase.ABORTED: frozenset(),
}


class MemberRound(ABC, Generic[_V]):
    """What a member's side of any kind of round is: where it stands, and how it ends."""

    def __init__(self, round_id: RoundId, member: NodeId, deadline: float) -> None:
        self._round_id, self._member, self._deadline = round_id, member, deadline
        self._phase = RoundPhase.RUNNING
        self._averages: dict[SegmentId, tuple[_V, ...]] | None = None

    @property
    def phase(self) -> RoundPhase:
        """Where this member stands; committed and aborted are final."""
        return self._phase

    def conclude(self, outcome: RoundOutcome) -> Refusal | None:
        """End with the decision of the hub; a repeated one changes nothing."""
        if outcome.round_id != self._round_id:
            return Refusal(f"round {outcome.round_id} is not round {self._round_id}, which runs here")
        match outcome, self._phase:
            case RoundCommit(), RoundPhase.READY:
                self._averages = self._collect()
                self._enter(RoundPhase.COMMITTED)
            case RoundAbort(), RoundPhase.RUNNING | RoundPhase.READY:
                self._enter(RoundPhase.ABORTED)
            case (RoundCommit(), RoundPhase.COMMITTED) | (RoundAbort(), RoundPhase.ABORTED):
                pass
            case _:
                kind = type(outcome).__name__
                return Refusal(f"{kind} of round {outcome.round_id}, which is {self._phase} here")
        return None

    def expire(self, now: float) -> RoundAbort | RoundQuery | None:
        """Give up at the deadline, or ask what became of the round if this member has voted."""
        if now < self._deadline or self._phase in (RoundPhase.COMMITTED, RoundPhase.ABORTED):
            return None
        if self._phase is RoundPhase.READY:
            return RoundQuery(self._round_id, self._member)
        return self.give_up(*self._find_late())

    def give_up(
        self, reason: str, suspect: NodeId | None = None, hops: int = 1, *, is_lie: bool = False
    ) -> RoundAbort | None:
        """Abort by itself, to be told to the hub; None when it may not or need not."""
        if self._phase is not RoundPhase.RUNNING:
            return None
        self._enter(RoundPhase.ABORTED)
        return RoundAbort(self._round_id, reason, suspect, hops, is_lie)

    def pop_averages(self) -> dict[SegmentId, tuple[_V, ...]] | None:
        """Give out the averages of a committed round, once; each is cut in consecutive pieces."""
        averages, self._averages = self._averages, None
        return averages

    @abstractmethod
    def _collect(self) -> dict[SegmentId, tuple[_V, ...]]:
        """Return the averages, all of which are here."""

    @abstractmethod
    def _find_late(self) -> tuple[str, NodeId | None, int]:
        """Return why this member is not ready, whom it waits for most, and after how many hops."""

    def _enter(self, phase: RoundPhase) -> None:
        assert phase in ROUND_TRANSITIONS[self._phase], f"{self._phase} is never followed by {phase}"
        self._phase = phase
        if not ROUND_TRANSITIONS[phase]:
            self._free()

    @abstractmethod
    def _free(self) -> None:
        """Free what the round has taken: it is over."""


class Round(MemberRound[_V]):
    """Parts go to each ring's successor, votes and aborts to the coordinator.

    `before` names each ring's predecessor, which is suspected when a ring fails or is late.
    """

    def __init__(
        self,
        round_id: RoundId,
        member: NodeId,
        rings: Mapping[SegmentId, RingReduce[_V]],
        deadline: float,
        before: Mapping[SegmentId, NodeId] | None = None,
    ) -> None:
        super().__init__(round_id, member, deadline)
        self._rings = dict(rings)
        self._before = before or {}

    def start(self) -> Iterator[RingPart[_V] | RoundReady | RoundAbort]:
        """Start every ring at once, their chunks in turn by size, each made when it is asked for."""
        rings = [(ring.num_own, number, ring.start()) for number, ring in enumerate(self._rings.values())]
        turns = sorted(((k + 0.5) / num, number) for num, number, _ in rings for k in range(num))
        for _, number in turns:
            if self._phase is not RoundPhase.RUNNING:  # it gave up, or was told to
                return
            yield from itertools.islice(rings[number][2], 1)
        yield from self._settle()

    def receive(self, part: RingPart[_V]) -> tuple[RingPart[_V] | RoundReady | RoundAbort, ...] | Refusal:
        """Pass a part to its ring; return what to send."""
        if part.round_id != self._round_id:
            return Refusal(f"round {part.round_id} is not round {self._round_id}, which runs here")
        if self._phase is not RoundPhase.RUNNING:
            return Refusal(f"round {part.round_id} is {self._phase} here: it takes no more parts")
        ring = self._rings.get(part.segment)
        if ring is None:
            return Refusal(f"{self._member} has no segment {part.segment} to average")
        passed_on = ring.receive(part)
        if isinstance(passed_on, Refusal):
            return passed_on
        sent = () if passed_on is None else (passed_on,)
        return (*sent, *self._settle())

    def _collect(self) -> dict[SegmentId, tuple[_V, ...]]:
        return {segment: ring.pieces for segment, ring in self._rings.items()}

    def _find_late(self) -> tuple[str, NodeId | None, int]:
        missing = ((ring.first_missing, segment) for segment, ring in self._rings.items())
        (hops, _), segment = min((first, segment) for first, segment in missing if first is not None)
        suspect = self._before.get(segment)
        waits = "" if suspect is None else f"; it waits for {suspect} most"
        return f"{self._member} had not finished its rings at the deadline{waits}", suspect, hops

    def _settle(self) -> tuple[RoundReady | RoundAbort, ...]:
        """Vote when all rings are done, give up when one never can be."""
        if self._phase is not RoundPhase.RUNNING:
            return ()
        for segment, ring in self._rings.items():
            if ring.failure is not None:
                suspect = self._before.get(segment) if ring.is_misled else None
                abort = self.give_up(ring.failure, suspect)
                return () if abort is None else (abort,)
        if not all(ring.done for ring in self._rings.values()):
            return ()
        self._enter(RoundPhase.READY)
        hashes = tuple((segment, ring.digest) for segment, ring in self._rings.items())
        return (RoundReady(self._round_id, self._member, hashes),)

    def _free(self) -> None:
        self._rings.clear()
