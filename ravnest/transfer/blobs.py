"""Content by hash: blobs that one program keeps, what they are called, and how they are served.

A blob has pieces of PIECE_BYTES. A blob of one piece is named by its BLAKE3 hash. The name of a larger one is
the hash of its pieces' hashes, one after the other. So a piece is checked by its own hash, and a node
that sends a wrong one is known at once (docs/decisions/020). Requests from `size_bytes` on are for
those hashes. `transfer.exchange` fetches blobs, into a Spool.
"""

import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from blake3 import blake3

from ravnest.disk import FileMap, release_pages, write_nameless
from ravnest.ids import NodeId
from ravnest.protocol.membership import Refused
from ravnest.protocol.placement import PIECE_BYTES, BlobPart, BlobRef, BlobRequest
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.outbox import Outgoing

logger = logging.getLogger(__name__)

HASH_BYTES = 32
_RELEASE_BYTES = 4 << 20  # of a file may be in memory at once
_CONTEXT = "ravnest 2026-11 hashes of the pieces of a blob"


@dataclass(frozen=True, slots=True)
class Blob:
    """Content, and the hashes of its pieces one after the other."""

    content: Buffer
    hashes: bytes


class BlobStorage(Protocol):
    """Where blobs are kept, by their hash; a dict is one."""

    def get(self, blob: str, /) -> Blob | None:
        """Return a blob that is here."""

    def __setitem__(self, blob: str, found: Blob, /) -> None: ...

    def __contains__(self, blob: object, /) -> bool: ...

    def values(self) -> Collection[Blob]:
        """Return all blobs that are here."""


class Blobs:
    """The blobs of one program: those in its storage, and those it passes on for a while."""

    def __init__(self, storage: BlobStorage | None = None, folder: str | Path | None = None) -> None:
        memory: dict[str, Blob] = {}
        self._kept: BlobStorage = memory if storage is None else storage
        self.folder = folder  # for files without a name; None: the system's own
        self._passed_on: dict[str, Blob] = {}
        self._served: dict[str, Buffer] = {}  # blobs since pages were released
        self._num_served = 0  # bytes of them

    def keep(self, content: Buffer) -> BlobRef:
        """Keep a blob for all that ask; return its name."""
        hashes = hash_pieces(content)
        ref = name_hashes(hashes, len(content))
        self._kept[ref.blob] = Blob(content, hashes)
        return ref

    def keep_pieces(self, make: Callable[[], Iterable[Buffer]]) -> BlobRef:
        """Keep a blob that is made part by part; a large one lies in a file, if the disk takes it."""
        named, first = _Naming(), []
        parts = named.pass_on(make())
        for part in parts:
            first.append(part)
            if named.num_bytes > PIECE_BYTES:
                break
        content: Buffer
        if named.num_bytes <= PIECE_BYTES:
            content = b"".join(first)
        else:
            try:
                content = write_nameless(_chain(first, parts), self.folder)
            except OSError as error:
                logger.warning("weights stay in memory, for the disk does not take them: %s", error)
                named = _Naming()
                content = b"".join(named.pass_on(make()))
        self._kept[named.ref.blob] = Blob(content, named.hashes)
        return named.ref

    def __contains__(self, ref: BlobRef) -> bool:
        return ref.blob in self._kept or ref.blob in self._passed_on

    def get(self, blob: str) -> Blob | None:
        """Return a blob that is here, by its hash."""
        return self._kept.get(blob) or self._passed_on.get(blob)

    @property
    def all(self) -> tuple[Blob, ...]:
        """All blobs that are here now."""
        return (*self._kept.values(), *self._passed_on.values())

    def kept(self, ref: BlobRef) -> Buffer:
        """Return the content of a blob that is here."""
        found = self.get(ref.blob)
        if found is None:
            raise KeyError(ref.blob)
        return found.content

    def pass_on(self, ref: BlobRef, found: Blob) -> None:
        """Keep a blob of others for those that ask, until it is dropped."""
        self._passed_on[ref.blob] = found

    def drop(self, ref: BlobRef) -> None:
        """Keep a blob in memory no longer; pieces of it on their way stay as they are."""
        self._passed_on.pop(ref.blob, None)
        if isinstance(self._kept, dict):
            self._kept.pop(ref.blob, None)

    def serve(self, sender: NodeId, request: BlobRequest) -> Outgoing:
        """Answer a request with a piece, or with a refusal."""
        return self.serve_piece(sender, request, self.get(request.blob))

    def serve_piece(self, sender: NodeId, request: BlobRequest, found: Blob | None) -> Outgoing:
        """Answer a request with a piece of this blob, and have little of it in memory."""
        if found is not None:
            self._served[request.blob] = found.content
            self._num_served += request.size_bytes
        if self._num_served > _RELEASE_BYTES:  # of all of them: many are served at once
            for content in self._served.values():
                release_pages(content)
            self._served, self._num_served = {}, 0
        return serve_piece(sender, request, found)


def serve_piece(sender: NodeId, request: BlobRequest, found: Blob | None) -> Outgoing:
    """Answer a request with a piece of a blob or of its hashes, or with a refusal where there is none."""
    offset, view = request.offset, memoryview(b"")
    if found is not None:
        size = len(found.content)
        view = memoryview(found.content) if offset < size else memoryview(found.hashes)
        offset -= 0 if request.offset < size else size
    piece = view[offset : offset + request.size_bytes] if offset >= 0 else view[:0]
    if not piece:
        reason = f"blob {request.blob[:12]} has no byte {request.offset} here"
        return Outgoing(sender, Refused(reason, request.blob))
    return Outgoing(sender, BlobPart(request.blob, request.offset, len(piece)), (piece,))


def cut(content: Buffer) -> Iterator[memoryview]:
    """Yield the pieces of a blob."""
    view = memoryview(content)
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def hash_pieces(content: Buffer) -> bytes:
    """Return the hashes of a blob's pieces, one after the other; of an empty blob that of nothing."""
    hashes = bytearray()
    for number, piece in enumerate(cut(content), 1):
        hashes += blake3(piece).digest()
        if number * PIECE_BYTES % _RELEASE_BYTES == 0:
            release_pages(content)
    return bytes(hashes) or blake3(b"").digest()


def name_hashes(hashes: bytes, size_bytes: int) -> BlobRef:
    """Return the name of a blob whose pieces have these hashes."""
    if len(hashes) == HASH_BYTES:
        return BlobRef(hashes.hex(), size_bytes)
    return BlobRef(blake3(hashes, derive_key_context=_CONTEXT).hexdigest(), size_bytes)


def name_blob(content: Buffer) -> BlobRef:
    """Return the name that a blob has everywhere, and its size."""
    return name_hashes(hash_pieces(content), len(content))


def name_pieces(parts: Iterable[Buffer], write: Callable[[Buffer], object]) -> tuple[BlobRef, bytes]:
    """Write a blob as it is made; return its name and its hashes."""
    named = _Naming()
    for part in named.pass_on(parts):
        write(part)
    return named.ref, named.hashes


class _Naming:
    """Hashes content as it passes. Somebody may be changing it meanwhile, so copies are passed on."""

    def __init__(self) -> None:
        self._hash, self._hashes, self.num_bytes = blake3(), bytearray(), 0

    @property
    def hashes(self) -> bytes:
        """The hashes of all pieces that have passed."""
        is_cut = self.num_bytes % PIECE_BYTES or not self.num_bytes
        return bytes(self._hashes) + (self._hash.digest() if is_cut else b"")

    @property
    def ref(self) -> BlobRef:
        """The name of what has passed."""
        return name_hashes(self.hashes, self.num_bytes)

    def pass_on(self, parts: Iterable[Buffer]) -> Iterator[bytes]:
        """Yield the same bytes, cut where pieces end."""
        for part in (memoryview(each) for each in parts):
            start = 0
            while start < len(part):
                room = PIECE_BYTES - self.num_bytes % PIECE_BYTES
                settled = bytes(part[start : start + room])  # else other bytes are named than written
                start, self.num_bytes = start + len(settled), self.num_bytes + len(settled)
                self._hash.update(settled)
                if self.num_bytes % PIECE_BYTES == 0:
                    self._hashes += self._hash.digest()
                    self._hash = blake3()
                yield settled


def _chain(first: list[bytes], rest: Iterator[bytes]) -> Iterator[bytes]:
    yield from first
    first.clear()
    yield from rest


MOST_SPOOL_BYTES = 2**44  # nobody has more room


class Spool:
    """Room for so many bytes, written in any order; MemoryError if there is none. `content` is read-only.

    A large one is a file without a name, which goes when nobody reads it any more, also if the program is
    killed. It is read without a copy. All of this may wait for the disk, so programs do it in a thread.
    """

    def __init__(self, size_bytes: int, folder: str | Path | None = None) -> None:
        if not 1 <= size_bytes <= MOST_SPOOL_BYTES:
            raise MemoryError(f"no room for {size_bytes} bytes")
        self._lock = threading.Lock()  # the file has one position
        self._file = _reserve(size_bytes, folder) if size_bytes > PIECE_BYTES else None
        if self._file is not None:
            weakref.finalize(self, self._file.close)  # what is mapped stays
            self.content = memoryview(FileMap.of(self._file.fileno(), size_bytes))
        else:
            self._memory = np.empty(size_bytes, np.uint8).data
            self.content = self._memory.toreadonly()

    def write(self, offset: int, piece: Buffer) -> None:
        """Put a piece where it belongs; OSError if the disk does not take it after all."""
        if self._file is None:
            self._memory[offset : offset + len(piece)] = piece
            return
        with self._lock:
            self._file.seek(offset)
            left = memoryview(piece)
            while left:
                left = left[self._file.write(left) :]


def _reserve(size_bytes: int, folder: str | Path | None) -> BinaryIO | None:
    """Return a file of this size, or None if the disk has no room for it."""
    file = None
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it is kept open
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        else:
            file.truncate(size_bytes)
    except OSError as error:
        logger.warning("%d bytes are kept in memory, for the disk does not take them: %s", size_bytes, error)
        if file is not None:
            file.close()
        return None
    return file
