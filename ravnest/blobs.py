"""Messages about content by its hash: how a blob is fetched, and how a peer is measured by fetching.

They belong to protocol, which says how messages are made and who reads them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

BlobHash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # BLAKE2b-256 of the content
PieceBytes = Annotated[int, Meta(ge=1, le=2**20)]
Rate = Annotated[float, Meta(gt=0, le=1e30)]
Span = Annotated[float, Meta(ge=0, le=1e6)]


class Fact(StrEnum):
    """What of a machine can be measured."""

    SPEED = "speed"
    BANDWIDTH = "bandwidth"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Content by hash; knowing its size bounds what is fetched."""

    blob: BlobHash
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BlobRequest:
    """Asks for a piece of a blob."""

    blob: BlobHash
    offset: int
    size_bytes: PieceBytes


@dataclass(frozen=True, slots=True)
class BlobPart:
    """That piece, in the buffer beside it; shorter at the end of the blob."""

    blob: BlobHash
    offset: int
    size_bytes: PieceBytes


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """The hub has a peer measured: by running this little stage, by timing what it fetches, or both."""

    blueprint: BlobRef | None
    times_link: bool


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a peer found; None is what it was not asked, or could not find out."""

    flops_per_second: Rate | None = None
    download_bytes_per_second: Rate | None = None
    latency_seconds: Span | None = None
