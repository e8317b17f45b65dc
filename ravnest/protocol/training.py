"""Messages about training: leases, fields, activations, gradients, reports, pace and rate."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ravnest.ids import LeaseId, MicrobatchId, NodeId, RoundId
from ravnest.protocol.tensors import TensorSpec

Metrics = tuple[tuple[str, float | None], ...]  # None where a metric was no finite number
Count = Annotated[int, Meta(ge=1, le=2**20)]
NormSquare = Annotated[float, Meta(ge=0.0, le=1e60)]  # NaN is not within any bounds


@dataclass(frozen=True, slots=True)
class Recheck:
    """A microbatch is run as in training, on the average of a round, with the randomness of another one."""

    anchor_round: RoundId
    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A cluster may train or evaluate microbatches from `first_microbatch` on, with so many samples each."""

    build_id: int
    lease: LeaseId
    is_evaluation: bool
    first_microbatch: MicrobatchId
    num_samples: tuple[int, ...]
    recheck: Recheck | None = None  # its one microbatch is what another cluster has trained
    is_ahead: bool = False  # the root begins it when the hub says so, or when the hub is lost


@dataclass(frozen=True, slots=True)
class LeaseBegin:
    """The root begins a lease that it got ahead."""

    build_id: int
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class LeaseDone:
    """The root reports a lease as trained; samples of dropped microbatches do not count."""

    build_id: int
    lease: LeaseId
    num_samples: int


@dataclass(frozen=True, slots=True)
class FieldParts:
    """The fields of a microbatch that the receiving stage consumes."""

    build_id: int
    microbatch: MicrobatchId
    fields: tuple[tuple[str, TensorSpec], ...]


@dataclass(frozen=True, slots=True)
class Activation:
    """The values that cross from a stage to the next, by their number in the program."""

    build_id: int
    microbatch: MicrobatchId
    is_evaluation: bool
    num_samples: Count
    values: tuple[tuple[int, TensorSpec], ...]
    after: tuple[tuple[NodeId, int], ...] = ()  # steps of tied weights, by home, that it must see
    norm_square: NormSquare = 0.0  # of the last gradients of the stages before, where their norm is limited


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradients of those values, on their way back."""

    build_id: int
    microbatch: MicrobatchId
    values: tuple[tuple[int, TensorSpec], ...]
    norm_square: NormSquare = 0.0  # of the last gradients of the stages after


@dataclass(frozen=True, slots=True)
class DroppedMicrobatch:
    """A microbatch is lost: every stage of the cluster forgets it, the hub counts it as not trained."""

    build_id: int
    microbatch: MicrobatchId
    reason: str
    is_evaluation: bool = False


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """The variance of one sample's gradient and the square of the mean gradient, of a stage's own weights."""

    variance: float
    signal: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a microbatch did in one stage, for the root's pace and for telemetry; the leaf has the loss."""

    build_id: int
    microbatch: MicrobatchId
    version: int
    lag: int
    num_samples: int
    forward_seconds: float
    backward_seconds: float
    link_seconds: float
    idle_share: float
    loss: float | None
    metrics: Metrics
    noise: GradientNoise | None = None  # with an update, once enough of them were measured
    anchor_round: RoundId | None = None  # its forward saw the average of this round, and nothing newer


@dataclass(frozen=True, slots=True)
class Pace:
    """The root's decision for its cluster, from this update on."""

    build_id: int
    update: int
    window: Count
    accumulate: Count
    is_synchronous: bool


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The rate from this update on."""

    build_id: int
    update: int
    rate: float


TrainingMessage = (
    LeaseGrant | LeaseBegin | LeaseDone | FieldParts | Activation | Gradient | DroppedMicrobatch | StepReport
)
