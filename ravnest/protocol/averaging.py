"""Messages about averaging: rounds, their parts on the rings, votes, outcomes, anchors; tied weights.

Stages of a cluster that hold one weight together keep their copies equal. The first of them in the line is
the weight's home. It decides every change, and the order of changes.
"""

from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from msgspec import Meta

from ravnest.ids import NodeId, RoundId, SegmentId
from ravnest.protocol.training import Count

Value = TypeVar("Value")
FIRST_WEIGHTS = RoundId(0)  # what all clusters have before the first round
ShareCount = Annotated[int, Meta(ge=0, le=2**20)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]


@dataclass(frozen=True, slots=True)
class RoundOpen:
    """The hub orders a round; the clusters of `left_out` owners wait for the next one.

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
class RoundReady:
    """A member's vote: it has every average of its rings and will not give up by itself."""

    round_id: RoundId
    member: NodeId
    hashes: tuple[tuple[SegmentId, Digest], ...] = ()  # of the averages: alike in every owner


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
RoundMessage = RoundOpen | RoundReady | RoundOutcome | RoundQuery | AnchorQuery


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
