"""Messages about placement: which node hosts which stage, what a stage is built of, and how that is fetched.

A plan has a number, `plan_id`. A cluster that it builds or changes gets that number as its `build_id`; the
others train on under theirs. A stage gets what it lacks from sources: snapshots, by names of parameters.
Content is named by its hash and fetched piece by piece. The hashes of a blob's pieces follow its last byte,
so each piece is checked alone, whichever node sends it.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ravnest.ids import NodeId, RoundId, SegmentId
from ravnest.plan.types import Ring, Stage
from ravnest.protocol.averaging import FIRST_WEIGHTS

PIECE_BYTES = 2**20

BlobHash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # BLAKE3: transfer.blobs says of what
PieceBytes = Annotated[int, Meta(ge=1, le=PIECE_BYTES)]


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Content by hash; knowing its size bounds what is fetched."""

    blob: BlobHash
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BlobRequest:
    """Asks for a piece of a blob. With `can_wait` the answer may wait until the blob is there."""

    blob: BlobHash
    offset: int
    size_bytes: PieceBytes
    can_wait: bool = False


@dataclass(frozen=True, slots=True)
class BlobPart:
    """That piece, in the buffer beside it; shorter at the end of the blob."""

    blob: BlobHash
    offset: int
    size_bytes: PieceBytes


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
class StagePosition:
    """A stage, and where it stands in its cluster, from root to leaf; no message, but part of an order."""

    build_id: int
    seed: int
    stage: Stage
    pipeline: tuple[NodeId, ...]

    @property
    def node(self) -> NodeId:
        """Its own node."""
        return self.stage.node

    @property
    def index(self) -> int:
        """Its number in the cluster; the root has 0."""
        return self.pipeline.index(self.node)

    @property
    def before(self) -> NodeId | None:
        """The neighbour towards the root."""
        return self.pipeline[self.index - 1] if self.index else None

    @property
    def after(self) -> NodeId | None:
        """The neighbour towards the leaf."""
        return self.pipeline[self.index + 1] if self.index + 1 < len(self.pipeline) else None


@dataclass(frozen=True, slots=True)
class PlanOrder:
    """One peer's new part of a plan: its stage, its cluster in order, its rings. A spare has none of them.

    A peer that had a stage stops training it. It holds the state until its next stage is built.
    """

    build_id: int
    plan_id: int
    seed: int
    stage: Stage | None
    pipeline: tuple[NodeId, ...]
    rings: Rings
    contacts: tuple[Contact, ...]
    accumulate: int = 1  # microbatches per update
    is_exact: bool = False  # updates wait for gradient rounds

    @property
    def position(self) -> StagePosition:
        """Where the stage stands, if there is one."""
        assert self.stage is not None, "a spare has no stage"
        return StagePosition(self.build_id, self.seed, self.stage, self.pipeline)

    @property
    def num_clusters(self) -> int:
        """How many clusters average with this one, and itself."""
        return max((len(ring.owners) for _, ring in self.rings), default=1)


@dataclass(frozen=True, slots=True)
class RingOrder:
    """A newer plan leaves a peer's cluster as it is: it trains on, in these rings and with these contacts.

    Exact updates begin in a cluster that trains nothing at the time; they may end at any time.
    """

    build_id: int
    plan_id: int
    rings: Rings
    contacts: tuple[Contact, ...]
    is_exact: bool = False  # updates wait for gradient rounds


@dataclass(frozen=True, slots=True)
class Source:
    """A snapshot, and the node that serves it: a peer, the hub, or the receiver itself.

    The `others` get the same at this time, or have it: they are asked first, to spare the node.
    """

    node: NodeId
    weights: BlobRef
    others: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True)
class StageParts:
    """The hub orders a stage built, which then counts `version` updates.

    With `is_kept` the peer keeps what it holds of it. The first source that has a name gives the rest.
    """

    build_id: int
    version: int
    blueprint: BlobRef
    sources: tuple[Source, ...]
    is_kept: bool = False
    anchor_round: RoundId | None = FIRST_WEIGHTS  # the round these weights are the average of; None: of none


@dataclass(frozen=True, slots=True)
class StageReady:
    """The stage is built and can train."""

    build_id: int


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How much of its stage a peer has fetched; it is sent now and then until all is there."""

    build_id: int
    num_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StageMissing:
    """A stage cannot be built, because this source does not give what it has."""

    build_id: int
    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotOrder:
    """The hub wants a stage's state, as it is now; training goes on."""

    build_id: int
    number: int
    is_final: bool = True  # training does not go on: an update that is under way is applied first
    anchor_round: RoundId | None = None  # with the average of this round instead of the live weights


@dataclass(frozen=True, slots=True)
class SnapshotMade:
    """The state is served here until some newer snapshots are made."""

    build_id: int
    number: int
    version: int
    weights: BlobRef
    anchor_round: RoundId | None = None  # the round whose average it has; None: the live weights


SKETCH_VALUES = 4  # of each tensor: its norm, and sums with keyed signs
SketchKey = Annotated[bytes, Meta(min_length=16, max_length=16)]
SketchBytes = Annotated[bytes, Meta(max_length=60_000)]  # float32, SKETCH_VALUES for each tensor
SketchRow = tuple[int, int, SketchBytes]  # of the positions [start, stop) of the line


@dataclass(frozen=True, slots=True)
class SketchOrder:
    """The hub wants to know which weights a stage has, in few numbers that depend on a key.

    With a round, of the average that it made; else of the live weights.
    """

    build_id: int
    number: int
    key: SketchKey
    anchor_round: RoundId | None = None


@dataclass(frozen=True, slots=True)
class SketchMade:
    """The sketch of each segment of the stage; none, if the stage has that average no more."""

    build_id: int
    number: int
    rows: tuple[SketchRow, ...]


@dataclass(frozen=True, slots=True)
class BackupOrder:
    """The hub orders a spare to fetch this snapshot and keep it until the next."""

    plan_id: int
    number: int
    source: Source


@dataclass(frozen=True, slots=True)
class BackupKept:
    """The spare has it."""

    plan_id: int
    number: int


PlacementMessage = (
    PlanOrder
    | RingOrder
    | StageParts
    | StageReady
    | FetchProgress
    | StageMissing
    | SnapshotOrder
    | SnapshotMade
    | SketchOrder
    | SketchMade
    | BackupOrder
    | BackupKept
)
