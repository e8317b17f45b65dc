"""Messages about content by its hash: a blob is fetched piece by piece, and links are timed that way."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

BlobHash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # BLAKE3 of the content
PieceBytes = Annotated[int, Meta(ge=1, le=2**20)]


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
