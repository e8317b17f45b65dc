"""Messages about averaging: rounds, their parts, pledges, votes, checks, outcomes, anchors; tied weights.

A plain round sums along rings. In a robust one each member first pledges what it will bring, by a hash for
each owner of a part. When all have pledged the hub calls; contributions then go straight to the owners, and
finished parts from them to all. Before it commits, the hub has some chunks made again by others.

Stages of a cluster that hold one weight together keep their copies equal. The first of them in the line is
the weight's home. It decides every change, and the order of changes.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Generic, TypeVar

from msgspec import Meta

from ravnest.ids import NodeId, RoundId, SegmentId
from ravnest.protocol.training import Count

Value = TypeVar("Value")
FIRST_WEIGHTS = RoundId(0)  # what all clusters have before the first round
ShareCount = Annotated[int, Meta(ge=0, le=2**20)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
Weight = Annotated[float, Meta(gt=0.0, le=1e15)]
Length = Annotated[float, Meta(ge=0.0, le=1e30)]  # of a vector
Sum = Annotated[float, Meta(ge=-1e60, le=1e60)]
Factor = Annotated[float, Meta(ge=0.0, le=1.0)]


@dataclass(frozen=True, slots=True)
class RoundOpen:
    """The hub orders a round; the clusters of `left_out` owners wait for the next one.

    It names nodes of the receiver's own rings only: a message has no room for all of a large swarm.
    A gradient round makes one exact update. It begins when the receiver has trained its share of the batch.
    """

    build_id: int
    round_id: RoundId
    deadline_seconds: float
    is_blocking: bool
    is_final: bool
    left_out: tuple[NodeId, ...]
    anchor_round: RoundId = FIRST_WEIGHTS  # changes since its average go around; 0: since training began
    is_anchor: bool = False  # no cluster has such an average: the receiver's weights now are it
    least_chunk: int = 0  # items that go around at once, at least: fewer would only be more work
    sums_gradients: bool = False  # of the shares of a batch; anchors and weights do not go around
    rate: float = 0.0  # of the update that a gradient round makes
    num_microbatches: ShareCount | None = None  # in the receiver's share; None: as many as in any update
    # Of a robust round: how much each owner in the receiver's rings counts, by the hub's books.
    weights: tuple[tuple[NodeId, Weight], ...] = ()
    resting: tuple[NodeId, ...] = ()  # those that own no part of it
    hidden: tuple[NodeId, ...] = ()  # nobody can dial them: they own parts where no other does


@dataclass(frozen=True, slots=True)
class RingPart(Generic[Value]):
    """One chunk of one part of a segment on its way around the ring.

    For n-1 hops `value` is a weighted sum, `weight` what went into it; then the mean and the total weight.
    """

    round_id: RoundId
    segment: SegmentId
    part: int
    chunk: int
    hops: int
    weight: float
    value: Value


@dataclass(frozen=True, slots=True)
class Pledge:
    """What a member will send to one owner: a hash over all of it, and how long its change of weights is."""

    owner: NodeId
    root: Digest
    norm: Length


@dataclass(frozen=True, slots=True)
class RoundPledge:
    """A member binds itself to its contribution, before it has seen another."""

    round_id: RoundId
    member: NodeId
    pledges: tuple[Pledge, ...]


@dataclass(frozen=True, slots=True)
class PledgeTerms:
    """By what an owner or a checker goes with a member: its pledge, and how much of it counts.

    A pledge covers the segments that member and owner share: so many, and this one of them.
    """

    member: NodeId
    root: Digest
    norm: Length
    factor: Factor  # below 1: it is longer than those of the others, and is made shorter; 0: it is left out
    place: ShareCount = 0
    count: ShareCount = 1


@dataclass(frozen=True, slots=True)
class RoundCall:
    """All have pledged: the receiver sends its contributions. These are the terms for the parts it owns.

    What an owner finishes is no longer than its limit.
    """

    round_id: RoundId
    terms: tuple[PledgeTerms, ...]
    limits: tuple[tuple[NodeId, Length], ...]


class PartStep(StrEnum):
    """What a direct part is."""

    CONTRIBUTION = "contribution"  # for the owner of the part
    FINISHED = "finished"  # from the owner, for all
    CHECK = "check"  # a contribution again, for who makes the chunk again


@dataclass(frozen=True, slots=True)
class DirectPart(Generic[Value]):
    """One chunk of one part of a segment; `path` proves that a contribution is what was pledged."""

    round_id: RoundId
    segment: SegmentId
    part: int
    chunk: int
    step: PartStep
    path: Annotated[tuple[Digest, ...], Meta(max_length=64)]
    value: Value


@dataclass(frozen=True, slots=True)
class RoundCheck:
    """All have voted: members send one chunk of an owner's part to the checker, who makes it again.

    The ticket chooses the chunk. Only the checker gets the terms.
    """

    round_id: RoundId
    segment: SegmentId
    owner: NodeId
    ticket: ShareCount
    checker: NodeId
    terms: tuple[PledgeTerms, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundChecked:
    """What the checker found; it has a suspect if one did not send it what was pledged."""

    round_id: RoundId
    member: NodeId
    segment: SegmentId
    owner: NodeId
    is_same: bool
    suspect: NodeId | None = None


@dataclass(frozen=True, slots=True)
class Sight:
    """What an owner saw of a member's change in its parts, for each sample, beside the mean of the others."""

    member: NodeId
    distance: Sum  # squared
    along: Sum  # its product with that mean
    square: Sum
    num_items: int  # that were compared


@dataclass(frozen=True, slots=True)
class RoundReady:
    """A member's vote: it has every average of its rings and will not give up by itself."""

    round_id: RoundId
    member: NodeId
    hashes: tuple[tuple[SegmentId, Digest], ...] = ()  # of the averages: alike in every owner
    # Of a robust round: hashes of the parts of each segment, and what this owner saw of each contribution.
    parts: tuple[tuple[SegmentId, tuple[Digest, ...]], ...] = ()
    sights: tuple["Sight", ...] = ()


@dataclass(frozen=True, slots=True)
class RoundCommit:
    """The round happened: merge the averages."""

    round_id: RoundId


@dataclass(frozen=True, slots=True)
class RoundAbort:
    """The round never happened: drop everything. Without the `suspect`'s cluster it might have."""

    round_id: RoundId
    reason: str
    suspect: NodeId | None = None
    hops: Count = 1  # after which the chunk was due; a member further behind waits for more hops
    is_lie: bool = False  # of a robust round: what came is not what was pledged, or cannot be


@dataclass(frozen=True, slots=True)
class RoundQuery:
    """A member that voted asks the hub what became of the round."""

    round_id: RoundId
    member: NodeId


@dataclass(frozen=True, slots=True)
class AnchorQuery:
    """A member that missed rounds asks a neighbour in a ring for the average of round `anchor_round`."""

    plan_id: int
    segment: SegmentId
    anchor_round: RoundId


@dataclass(frozen=True, slots=True)
class AnchorPart(Generic[Value]):
    """A piece of that average, from item `offset` on, as it is."""

    plan_id: int
    segment: SegmentId
    anchor_round: RoundId
    offset: int
    value: Value


RoundOutcome = RoundCommit | RoundAbort
RobustMessage = RoundPledge | RoundCall | RoundCheck | RoundChecked
RoundMessage = RoundOpen | RoundReady | RoundOutcome | RoundQuery | AnchorQuery | RobustMessage


@dataclass(frozen=True, slots=True)
class TiedHolder:
    """A stage that holds tied weights is ready; other holders that were ready before answer."""

    build_id: int
    start: int
    stop: int
    is_answer: bool


@dataclass(frozen=True, slots=True)
class TiedCall:
    """A home asks for the gradients of these weights since it called last.

    With `is_closing` it closes an update that no microbatch completed. The receiver does the same.
    """

    build_id: int
    number: int
    names: tuple[str, ...]
    is_closing: bool


@dataclass(frozen=True, slots=True)
class TiedGradient(Generic[Value]):
    """The answer: means over the updates since then; a weight without a gradient is not in it."""

    build_id: int
    number: int
    values: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class TiedStep(Generic[Value]):
    """What a home did next to its weights: an update with these sums; without a rate, a round's change."""

    build_id: int
    number: int
    rate: float | None
    values: tuple[tuple[str, Value], ...]


TiedMessage = TiedHolder | TiedCall | TiedGradient[Value] | TiedStep[Value]
