"""What the page, the API and the metrics are made of: records that become JSON as they are (version 1).

A record of this version may get more fields, but none of them goes or changes its meaning. Seconds are of the
hub's own time; `wall_offset` turns them into those of the world. What is unknown is None.
"""

from dataclasses import dataclass

from ravnest.hub.coordinator.phases import ClusterPhase, JobPhase, NodePhase
from ravnest.ids import NodeId
from ravnest.web.updates import CurvePart, PageUpdate

API_SCHEMA = "ravnest.dashboard/1"


@dataclass(frozen=True, slots=True)
class LinkDocument:
    """What crosses from a stage to the next, and back."""

    to: NodeId
    activations: str  # wire format
    gradients: str
    sample_bytes: float  # of one sample, there and back
    used_bytes_per_second: float
    possible_bytes_per_second: float  # of the narrower direction


@dataclass(frozen=True, slots=True)
class StageDocument:
    """An interval of the line on a node; `phase` is None when the node has gone."""

    node: NodeId
    phase: NodePhase | None
    start: int
    stop: int
    share: float  # of the model's parameters
    work_share: float  # of its operations
    is_missing: bool  # its link is lost at this moment
    fetching: str
    busy: float | None  # share of the time, lately
    lag: float | None  # updates, lately
    lag_bound: int
    window: int
    planned_bytes: float
    available_bytes: float
    limited_by: str
    link: LinkDocument | None
    foreseen_busy: float | None = None  # share of the time


@dataclass(frozen=True, slots=True)
class ClusterDocument:
    """One whole copy of the model."""

    name: str
    phase: ClusterPhase
    samples_per_second: float
    predicted_samples_per_second: float
    stages: tuple[StageDocument, ...]


@dataclass(frozen=True, slots=True)
class NodeDocument:
    """A member of the swarm: what it has, where it is in its life, how its work goes."""

    name: NodeId
    phase: NodePhase
    is_missing: bool
    cluster: str | None
    stage: int | None
    backs_up: tuple[NodeId, ...]
    memory_bytes: float
    planned_bytes: float | None
    flops_per_second: float
    upload_bytes_per_second: float
    download_bytes_per_second: float
    latency_seconds: float
    region: str
    is_reachable: bool
    busy: float | None
    lag: float | None
    forward_seconds: float | None  # of the last microbatch that it reported
    backward_seconds: float | None
    link_seconds: float | None
    joined_at: float | None


@dataclass(frozen=True, slots=True)
class DepartureDocument:
    """A node that has gone."""

    name: NodeId
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class RingDocument:
    """The owners of one segment of the line."""

    start: int
    stop: int
    owners: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """What the plan in force promises, and what limits it."""

    samples_per_second: float
    round_seconds: float
    staleness: int
    bottleneck: str  # a sentence, or nothing
    rings: tuple[RingDocument, ...]


@dataclass(frozen=True, slots=True)
class TrainingDocument:
    """How far the training is."""

    num_samples: int
    num_total: int
    epoch: int
    num_epochs: int
    num_updates: int
    batch_size: int
    samples_per_second: float
    eta_seconds: float | None
    loss: float | None
    learning_rate: float | None
    validation_epoch: int | None
    validation: dict[str, float | None]
    efficiency: float
    noise_scale: float | None
    samples_redone: int  # leases that were given back, and work that was lost
    microbatches_dropped: int


@dataclass(frozen=True, slots=True)
class RoundDocument:
    """A round of averaging, and how it ended."""

    round_id: int
    at: float
    is_committed: bool
    seconds: float
    reason: str
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundsDocument:
    """All rounds in numbers, and the last ones."""

    committed: int
    aborted: int
    last: tuple[RoundDocument, ...]


@dataclass(frozen=True, slots=True)
class TextDocument:
    """What the model wrote after a prompt of the job."""

    at: float
    epoch: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class GuestDocument:
    """An invitation; times are seconds of the world."""

    name: str
    invited_at: float
    ends_at: float | None  # None: never
    max_nodes: int | None  # None: any number
    is_revoked: bool
    strikes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunDocument:
    """Where a run stands: everything but news and curves, which grow."""

    schema: str
    number: int  # of the run, in this program
    job: str
    phase: JobPhase
    waits_for: str  # why nobody trains yet, or what is done meanwhile
    is_live: bool  # a hub is at work
    can_stop: bool
    can_invite: bool
    is_stopping: bool
    now: float
    started_at: float
    wall_offset: float | None
    clusters: tuple[ClusterDocument, ...]
    nodes: tuple[NodeDocument, ...]
    departures: tuple[DepartureDocument, ...]
    plan: PlanDocument | None
    training: TrainingDocument
    rounds: RoundsDocument
    texts: tuple[TextDocument, ...] = ()  # the last ones


@dataclass(frozen=True, slots=True)
class BesideDocument:
    """Another run, whose curves are shown beside those of the run."""

    name: str
    is_live: bool
    started_at: float
    curves: dict[str, CurvePart]


UpdateDocument = PageUpdate[RunDocument]
