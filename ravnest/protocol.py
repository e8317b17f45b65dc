"""All messages between programs, as data.

A message names the facts it belongs to by number (plan epoch, round, lease, batch), so a late one is dropped
by number. Tensors travel beside it: one buffer for each TensorSpec in it, in order. The state machines take
and return these; wire turns them into frames and proves what the types here say, with its own bounds where
they say nothing; who sent one is known to net. Times are spans: no two programs share a clock.
"""

from dataclasses import dataclass
from math import prod
from typing import Annotated, Generic, NewType

from msgspec import Meta

from ravnest.blobs import BlobPart, BlobRequest, Fact, ProbeOrder, ProbeReport
from ravnest.config import WireFormat
from ravnest.plan.types import Node, NodeId
from ravnest.staging import FIRST_WEIGHTS, Staging
from ravnest.staging import RoundId as RoundId
from ravnest.staging import SegmentId as SegmentId
from ravnest.tying import Tying, Value

BatchId = NewType("BatchId", int)
LeaseId = NewType("LeaseId", int)

Metrics = tuple[tuple[str, float | None], ...]  # None where a metric was no finite number
Count = Annotated[int, Meta(ge=1, le=2**20)]
Proof = Annotated[bytes, Meta(min_length=32, max_length=32)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]

FLOAT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
ITEM_BYTES = FLOAT_BYTES | {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
BLOCK_ITEMS, SCALE_BYTES = 256, 4  # int8 and int4: one scale for so many numbers
MOST_ITEMS = 2**40


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that travels in the buffer beside a message."""

    dtype: str
    shape: Annotated[tuple[int, ...], Meta(max_length=8)]
    wire_format: WireFormat

    @property
    def num_bytes(self) -> int:
        """Length of the buffer. FP32 sends a tensor as it is; so do all formats for what is no fraction."""
        num_items = prod(self.shape)
        if self.wire_format is WireFormat.FP32 or self.dtype not in FLOAT_BYTES:
            return num_items * ITEM_BYTES[self.dtype]
        if self.wire_format in (WireFormat.BF16, WireFormat.FP16):
            return num_items * 2
        num_codes = num_items if self.wire_format is WireFormat.INT8 else -(-num_items // 2)
        return num_codes + SCALE_BYTES * -(-num_items // BLOCK_ITEMS)

    @property
    def fault(self) -> str | None:
        """Why no tensor is like this, if so."""
        if self.dtype not in ITEM_BYTES:
            return f"dtype {self.dtype[:20]!r} is none of {', '.join(ITEM_BYTES)}"
        if any(size < 0 for size in self.shape) or prod(max(size, 1) for size in self.shape) > MOST_ITEMS:
            return f"shape {self.shape} is no shape of at most {MOST_ITEMS} items"
        return None


@dataclass(frozen=True, slots=True)
class Hello:
    """A peer asks to join; the proof is keyed by the token's secret and covers both public keys."""

    version: str
    proof: Proof
    node: Node
    addresses: tuple[str, ...] = ()  # where others can dial it
    guessed: tuple[Fact, ...] = ()  # what of the node nobody has stated, so that it is measured
    epoch: int = 0  # of the stage that it holds, if the hub has met it before


@dataclass(frozen=True, slots=True)
class Welcome:
    """The hub takes a peer in, under this name; it relays at this port of its host, or not at all."""

    node: NodeId
    heartbeat_seconds: float
    relay_port: Port = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """What was asked for is not given: a peer cannot join, a blob is not here."""

    reason: str
    blob: str = ""  # which


@dataclass(frozen=True, slots=True)
class Leave:
    """A peer goes: its provider wishes so, or it will not run what it was given."""

    epoch: int
    reason: str
    can_hand_over: bool = False  # it stays until the hub says Stop, so that nothing is lost


@dataclass(frozen=True, slots=True)
class Complaint:
    """A neighbour sends what fits nothing: nobody can train beside it."""

    epoch: int
    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The hub ends the job, and says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A cluster may train, or evaluate, batches numbered from `first_batch`, with so many samples each."""

    epoch: int
    lease: LeaseId
    is_evaluation: bool
    first_batch: BatchId
    num_samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeaseDone:
    """Trained, says the root; samples of dropped batches do not count."""

    epoch: int
    lease: LeaseId
    num_samples: int


@dataclass(frozen=True, slots=True)
class FieldParts:
    """The fields of a batch that the receiving stage consumes."""

    epoch: int
    batch: BatchId
    fields: tuple[tuple[str, TensorSpec], ...]


@dataclass(frozen=True, slots=True)
class Activation:
    """The values that cross from a stage to the next, by their number in the program."""

    epoch: int
    batch: BatchId
    is_evaluation: bool
    num_samples: int
    values: tuple[tuple[int, TensorSpec], ...]
    after: tuple[tuple[NodeId, int], ...] = ()  # steps of tied weights, by home, that it must see


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradients of those values, on their way back."""

    epoch: int
    batch: BatchId
    values: tuple[tuple[int, TensorSpec], ...]


@dataclass(frozen=True, slots=True)
class DroppedBatch:
    """A batch is lost: every stage of the cluster forgets it, the hub counts it as not trained."""

    epoch: int
    batch: BatchId
    reason: str


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a batch did in one stage, for the root's staleness and for telemetry; the leaf has the loss."""

    epoch: int
    batch: BatchId
    version: int
    lag: int
    num_samples: int
    forward_seconds: float
    backward_seconds: float
    link_seconds: float
    idle_share: float
    loss: float | None
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Pace:
    """The root's decision for its cluster, from this update on."""

    epoch: int
    update: int
    window: Count
    accumulate: Count
    is_synchronous: bool


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The rate from this update on."""

    epoch: int
    update: int
    rate: float


@dataclass(frozen=True, slots=True)
class RoundOpen:
    """The hub orders a round; the clusters of `left_out` owners wait for the next one."""

    epoch: int
    round_id: RoundId
    deadline_seconds: float
    is_blocking: bool
    is_final: bool
    left_out: tuple[NodeId, ...]
    base: RoundId = FIRST_WEIGHTS  # changes since its average go around; 0: since training began
    is_anchor: bool = False  # no cluster has such an average: the receiver's weights now are it
    least_chunk: int = 0  # items that go around at once, at least: fewer would only be more work


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
    """A member's vote: it holds every average of its rings and will not give up by itself."""

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
    hops: Count = 1  # after which it was to come from the suspect: who waits behind another waits for more


@dataclass(frozen=True, slots=True)
class RoundQuery:
    """A member that voted asks the coordinator or another member what became of the round."""

    round_id: RoundId
    member: NodeId


@dataclass(frozen=True, slots=True)
class AnchorQuery:
    """A member that missed rounds asks a neighbour in a ring for the average of round `base`."""

    plan: int
    segment: SegmentId
    base: RoundId


@dataclass(frozen=True, slots=True)
class AnchorPart(Generic[Value]):
    """A piece of that average, from item `offset` on, as it is."""

    plan: int
    segment: SegmentId
    base: RoundId
    offset: int
    value: Value


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a state machine did not take a message; logged and shown, never sent."""

    reason: str


Joining = Hello | Welcome | Refused | Leave | Complaint | Stop
Planning = Staging | BlobRequest | BlobPart | ProbeOrder | ProbeReport
Training = LeaseGrant | LeaseDone | FieldParts | Activation | Gradient | DroppedBatch | StepReport
RoundOutcome = RoundCommit | RoundAbort
Voting = RoundOpen | RoundReady | RoundOutcome | RoundQuery | AnchorQuery
Moving = RingPart[TensorSpec] | AnchorPart[TensorSpec] | Tying[TensorSpec]
Message = Joining | Planning | Training | Pace | LearningRate | Voting | Moving
