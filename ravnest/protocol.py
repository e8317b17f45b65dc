"""All messages between programs, as data.

A message names the fact it belongs to by number (here the round), so a late one is dropped by number.
The state machines take and return these; wire turns them into frames; who sent one is known to net.
"""

from dataclasses import dataclass
from typing import Generic, NewType, TypeVar

from ravnest.plan.types import NodeId

BatchId = NewType("BatchId", int)
LeaseId = NewType("LeaseId", int)
RoundId = NewType("RoundId", int)
SegmentId = NewType("SegmentId", int)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class RingPart(Generic[Value]):
    """One chunk of one part of a segment on its way around the ring.

    For the first n-1 hops `value` is a weighted sum and `weight` what went into it; from hop n on it is
    the finished mean and the total weight.
    """

    round_id: RoundId
    segment: SegmentId
    part: int
    chunk: int
    hops: int
    weight: float
    value: Value


@dataclass(frozen=True, slots=True)
class RoundReady:
    """A member's vote: it holds every average of its rings and will not give up by itself."""

    round_id: RoundId
    member: NodeId


@dataclass(frozen=True, slots=True)
class RoundCommit:
    """The round happened: merge the averages."""

    round_id: RoundId


@dataclass(frozen=True, slots=True)
class RoundAbort:
    """The round never happened: drop everything."""

    round_id: RoundId
    reason: str


@dataclass(frozen=True, slots=True)
class RoundQuery:
    """A member that voted asks the coordinator or another member what became of the round."""

    round_id: RoundId
    member: NodeId


RoundOutcome = RoundCommit | RoundAbort


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a state machine did not take a message; logged and shown, never sent."""

    reason: str
