"""Messages about who hosts what, and what it is made of: plans, stages, snapshots.

They belong to protocol, which says how messages are made and who reads them. A plan has one number, `plan`;
a cluster that is made or changed by it gets that number as its `epoch`, and one that is not trains on under
the epoch it has. What a stage lacks it gets from sources: snapshots, by name of their parameters.
"""

from dataclasses import dataclass
from typing import Annotated, NewType

from msgspec import Meta

from ravnest.blobs import BlobRef
from ravnest.plan.types import NodeId, Ring, Stage

RoundId = NewType("RoundId", int)
SegmentId = NewType("SegmentId", int)
FIRST_WEIGHTS = RoundId(0)  # what all clusters have before the first round
Ticket = Annotated[bytes, Meta(max_length=16)]
Rings = tuple[tuple[SegmentId, Ring], ...]


@dataclass(frozen=True, slots=True)
class Contact:
    """How to reach a peer; without an address it dials, or the hub relays for the ticket's two holders."""

    node: NodeId
    key: str
    addresses: tuple[str, ...]
    ticket: Ticket = b""


@dataclass(frozen=True, slots=True)
class PlanOrder:
    """One peer's new part of a plan: its stage, its cluster in order, its rings. A spare has none of them.

    Whoever had a stage stops training it and holds its state, until the next one is built or it is a spare.
    """

    epoch: int
    plan: int
    seed: int
    stage: Stage | None
    pipeline: tuple[NodeId, ...]
    rings: Rings
    contacts: tuple[Contact, ...]
    accumulate: int = 1  # batches per update


@dataclass(frozen=True, slots=True)
class RingOrder:
    """A newer plan leaves a peer's cluster as it is: it trains on, in these rings and with these contacts."""

    epoch: int
    plan: int
    rings: Rings
    contacts: tuple[Contact, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A snapshot, and who serves it: a peer, the hub, or the receiver itself."""

    node: NodeId
    weights: BlobRef


@dataclass(frozen=True, slots=True)
class StageParts:
    """The hub orders a stage built, which then counts `version` updates.

    What the peer holds of it stays, if it `keeps`; the sources say the rest, the first that has a name.
    """

    epoch: int
    version: int
    blueprint: BlobRef
    sources: tuple[Source, ...]
    keeps: bool = False
    base: RoundId | None = FIRST_WEIGHTS  # the round these weights are the average of; None: of none


@dataclass(frozen=True, slots=True)
class StageReady:
    """The stage is built and can train."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StageMissing:
    """A stage cannot be built, for this source does not give what it has."""

    epoch: int
    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotOrder:
    """The hub wants a stage's state, as it is now; training goes on."""

    epoch: int
    number: int
    is_final: bool = True  # training does not go on: what an update lacks only batches for is applied first


@dataclass(frozen=True, slots=True)
class SnapshotMade:
    """The state is kept here for whoever asks, until some newer ones are."""

    epoch: int
    number: int
    version: int
    weights: BlobRef


@dataclass(frozen=True, slots=True)
class BackupOrder:
    """A spare shall fetch this snapshot and keep it until the next."""

    plan: int
    number: int
    source: Source


@dataclass(frozen=True, slots=True)
class BackupKept:
    """The spare has it."""

    plan: int
    number: int


Staging = (
    PlanOrder
    | RingOrder
    | StageParts
    | StageReady
    | StageMissing
    | SnapshotOrder
    | SnapshotMade
    | BackupOrder
    | BackupKept
)
