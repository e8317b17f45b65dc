"""Messages about content by its hash: a blob is fetched piece by piece, and links are timed that way.

A blob is cut into pieces of PIECE_BYTES. Its name is the hash of its pieces' hashes, which follow its last
byte: whoever asks for bytes from there on gets them. So each piece is checked alone, whoever sends it.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

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
