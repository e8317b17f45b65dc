"""What a provider's page is made of: records that become JSON as they are (version 1).

A record of this version may get more fields, but none of them goes or changes its meaning. Seconds are of the
program's own clock; `wall_offset` turns them into those of the world. What is unknown is None.
"""

from dataclasses import dataclass
from enum import StrEnum

from ravnest.ids import NodeId
from ravnest.web.updates import PageUpdate

LENDING_SCHEMA = "ravnest.lending-page/1"


class LendingPhase(StrEnum):
    """Where a lent PC is in its day."""

    WAITING = "waiting"  # it is not lent now: paused, out of hours, or on battery
    JOINING = "joining"  # it dials the hub, is measured, or waits for a plan
    SPARE = "spare"  # it is in the swarm and has no stage
    BUILDING = "building"  # it fetches and builds its stage
    HOSTING = "hosting"  # it trains
    LEAVING = "leaving"  # it hands over what it has
    ENDED = "ended"  # the program ends


@dataclass(frozen=True, slots=True)
class LendingFacts:
    """What the program knows of being lent, apart from the swarm."""

    is_paused: bool = False
    waits_for: str = ""  # why it is not lent now
    goes_on: str = ""  # when it is lent again
    leaving: str = ""  # why it hands over
    is_ending: bool = False  # for good


@dataclass(frozen=True, slots=True)
class LentTerms:
    """What is lent and to whom, as it was stated at the start; amounts that are None are not limited."""

    name: str
    hub: str  # the id of its key
    addresses: tuple[str, ...]
    is_personal: bool  # the invitation is for one guest
    device: str
    memory_bytes: float
    flops_per_second: float
    upload_bytes_per_second: float | None
    cores: str
    hours: tuple[str, ...]
    on_battery: str  # "stop", "go", or nothing where there is no battery


@dataclass(frozen=True, slots=True)
class OperatorCount:
    """A known operation, and how often a stage does it for one microbatch."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class HostedProgram:
    """What a stage is made of, as its blueprint says."""

    model: str
    num_positions: int  # of the whole line
    num_operations: int
    operators: tuple[OperatorCount, ...]  # the most frequent first
    num_tensors: int
    trained_bytes: float
    frozen_bytes: float


@dataclass(frozen=True, slots=True)
class HostedStage:
    """The part of the model that is here; `program` is None until somebody looked at it."""

    start: int
    stop: int
    pipeline: tuple[NodeId, ...]  # its cluster, in order
    place: int  # of this PC in it
    window: int
    activations: str  # wire format
    gradients: str
    is_built: bool
    weights_bytes: float | None  # that were fetched
    program: HostedProgram | None
    fault: str = ""  # why its program cannot be shown


@dataclass(frozen=True, slots=True)
class HostedWork:
    """What was trained here since the program began."""

    num_microbatches: int
    num_samples: int
    busy: float | None  # share of the time, lately
    lag: float | None  # updates, lately
    forward_seconds: float | None  # of the last microbatch
    backward_seconds: float | None


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What a GPU does at this moment, for all programs."""

    name: str
    share: float | None
    used_bytes: float
    total_bytes: float
    celsius: float | None


@dataclass(frozen=True, slots=True)
class MachineUse:
    """What this program and its children take of the PC."""

    memory_bytes: float
    pc_memory_bytes: float  # all there is
    cores: float | None  # that are busy with it
    num_cores: int
    pc_share: float | None  # of all cores, by all programs
    gpu: GpuUse | None = None


@dataclass(frozen=True, slots=True)
class TrafficDocument:
    """What went over the network."""

    sent_bytes_per_second: float
    received_bytes_per_second: float
    sent_bytes: float  # since the program began
    received_bytes: float


@dataclass(frozen=True, slots=True)
class LentDay:
    """A day of this PC, by its own calendar, since the program began."""

    day: str  # 2026-11-17
    sent_bytes: float
    received_bytes: float
    lent_seconds: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class LendingDocument:
    """How this PC is lent, at this moment."""

    schema: str
    number: int
    phase: LendingPhase
    reason: str
    goes_on: str
    is_live: bool
    is_connected: bool  # to the hub
    can_pause: bool
    can_resume: bool
    can_finish: bool
    now: float
    started_at: float
    wall_offset: float
    terms: LentTerms
    stage: HostedStage | None
    work: HostedWork
    use: MachineUse | None
    traffic: TrafficDocument
    days: tuple[LentDay, ...]  # the last one is today


LendingUpdate = PageUpdate[LendingDocument]
