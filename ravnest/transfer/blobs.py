"""Content by hash: blobs that one program keeps, and blobs on their way to it.

A blob is asked for piece by piece from one node, and believed only if its hash is right. It is hashed as the
pieces come and never copied whole, so that no piece delays the event loop. Messages come out, and the caller
sends them. `transfer.exchange` does so for the hub and for peers. Large content may lie in files (BlobFiles).
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from blake3 import blake3

from ravnest.disk import release_pages, reserve, write_nameless
from ravnest.ids import NodeId
from ravnest.protocol.blobs import BlobPart, BlobRef, BlobRequest
from ravnest.protocol.membership import Refused
from ravnest.protocol.messages import Refusal
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.outbox import Outgoing

logger = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20
_FILE_BYTES = 16 << 20  # from this size on content lies in a file, where files are used
_RELEASE_BYTES = 64 << 20  # of a file may be in memory at once

Done = Callable[[Buffer | Refusal], None]


class BlobStorage(Protocol):
    """Where blobs are kept, by their hash; a dict is one."""

    def get(self, blob: str, /) -> Buffer | None:
        """Return a blob that is here."""

    def __setitem__(self, blob: str, content: Buffer, /) -> None: ...

    def __contains__(self, blob: object, /) -> bool: ...


@runtime_checkable
class PieceStorage(BlobStorage, Protocol):
    """A storage that keeps a blob without having all of it in memory."""

    def put_pieces(self, make: Callable[[], Iterable[Buffer]], /) -> BlobRef:
        """Keep a blob; return its name."""


class BlobFiles(dict[str, Buffer]):
    """Blobs by hash: small ones in memory, large ones in files without a name in `folder`.

    Where the disk takes none, they are in memory after all.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self._folder = folder

    def put_pieces(self, make: Callable[[], Iterable[Buffer]]) -> BlobRef:
        """Keep a blob that is made piece by piece, hashed as it is written; return its name."""
        named, first, num_bytes = _Naming(), [], 0
        pieces = named.pass_on(make())
        for piece in pieces:
            first.append(piece)
            num_bytes += len(piece)
            if num_bytes >= _FILE_BYTES:
                break
        content: Buffer
        if num_bytes < _FILE_BYTES:
            content = b"".join(first)
        else:
            try:
                content = write_nameless(_chain(first, pieces), self._folder)
            except OSError as error:
                self._warn(error)
                named = _Naming()
                content = b"".join(named.pass_on(make()))
        self[named.ref.blob] = content
        return named.ref

    def make_room(self, size_bytes: int) -> memoryview:
        """Return room for a blob that will come."""
        if size_bytes >= _FILE_BYTES:
            try:
                return reserve(size_bytes, self._folder)
            except OSError as error:
                self._warn(error)
        return _room_in_memory(size_bytes)

    def _warn(self, error: OSError) -> None:
        logger.warning("weights stay in memory, for the disk does not take them: %s", error)


class Blobs:
    """The blobs of one program, in memory or in its storage, and those that it has asked others for."""

    def __init__(self, storage: BlobStorage | None = None) -> None:
        memory: dict[str, Buffer] = {}
        self._kept: BlobStorage = memory if storage is None else storage
        self._make_room = storage.make_room if isinstance(storage, BlobFiles) else _room_in_memory
        self._arriving: dict[str, _Arriving] = {}
        self._num_served = 0  # bytes since pages were released

    def keep(self, content: Buffer) -> BlobRef:
        """Keep a blob for all that ask; return its name."""
        ref = name_blob(content)
        self._kept[ref.blob] = content
        return ref

    def keep_pieces(self, make: Callable[[], Iterable[Buffer]]) -> BlobRef:
        """Keep a blob that is made piece by piece; a storage that can writes each down at once."""
        if isinstance(self._kept, PieceStorage):
            return self._kept.put_pieces(make)
        return self.keep(b"".join(make()))

    def __contains__(self, ref: BlobRef) -> bool:
        return ref.blob in self._kept

    def kept(self, ref: BlobRef) -> Buffer:
        """Return a blob that is here."""
        content = self._kept.get(ref.blob)
        if content is None:
            raise KeyError(ref.blob)
        return content

    def drop(self, ref: BlobRef) -> None:
        """Keep a blob in memory no longer; pieces of it on their way stay as they are."""
        if isinstance(self._kept, dict):
            self._kept.pop(ref.blob, None)

    def serve(self, sender: NodeId, request: BlobRequest) -> Outgoing:
        """Answer a request with a piece, or with a refusal."""
        content = self._kept.get(request.blob)
        self._num_served += request.size_bytes
        if content is not None and self._num_served > _RELEASE_BYTES:
            self._num_served = 0
            release_pages(content)
        return serve_piece(sender, request, content)

    def want(self, ref: BlobRef, source: NodeId, done: Done, *, keep: bool = True) -> list[Outgoing]:
        """Ask a node for a blob; `done` gets it, now if it is here already, or why it never came."""
        if ref.blob in self._kept:
            done(self.kept(ref))
            return []
        before = self._arriving.get(ref.blob)
        if before is not None and before.source == source:
            before.waiting.append(done)
            before.is_kept |= keep
            return []
        waiting = [] if before is None else before.waiting  # for another source, which may be gone
        try:
            arriving = _Arriving(ref, source, [*waiting, done], keep, self._make_room)
        except (MemoryError, ValueError, OverflowError):
            done(Refusal(f"blob {ref.blob[:12]} of {ref.size_bytes} bytes finds no memory here"))
            return []
        self._arriving[ref.blob] = arriving
        return [arriving.next_request()]

    def num_come(self, ref: BlobRef) -> int:
        """Return how many bytes of a blob have come so far."""
        arriving = self._arriving.get(ref.blob)
        return 0 if arriving is None else arriving.num_bytes

    def forget(self, ref: BlobRef, done: Done) -> None:
        """Tell `done` nothing more; without another one that waits, the blob is not fetched any further."""
        arriving = self._arriving.get(ref.blob)
        if arriving is None or done not in arriving.waiting:
            return
        arriving.waiting.remove(done)
        if not arriving.waiting:
            del self._arriving[ref.blob]

    def take(self, sender: NodeId, piece: BlobPart, buffer: Buffer) -> list[Outgoing] | Refusal:
        """Add a piece to the blob it is of; return the request for the next one."""
        arriving = self._arriving.get(piece.blob)
        if arriving is None or sender != arriving.source or piece.offset != arriving.num_bytes:
            return Refusal(f"a piece of blob {piece.blob[:12]} that was not asked for")
        if arriving.add(buffer) and arriving.num_bytes < arriving.ref.size_bytes:
            return [arriving.next_request()]
        del self._arriving[piece.blob]
        if not arriving.is_right:
            arriving.tell(Refusal(f"blob {piece.blob[:12]} of {sender} is damaged"))
            return []
        content = arriving.content.toreadonly()
        if arriving.is_kept:
            self._kept[piece.blob] = content
        arriving.tell(content)
        return []

    def refuse(self, sender: NodeId, reason: str, blob: str = "") -> None:
        """Give up a blob that was asked of a node that does not have it, or all that were."""
        asked = [each for each in self._arriving.values() if each.source == sender]
        for arriving in [each for each in asked if blob in ("", each.ref.blob)]:
            del self._arriving[arriving.ref.blob]
            arriving.tell(Refusal(f"{sender} says: {reason}"))


class _Arriving:
    """A blob on its way from one node; `waiting` are told when it is here, or why it is not."""

    def __init__(
        self,
        ref: BlobRef,
        source: NodeId,
        waiting: list[Done],
        is_kept: bool,
        make_room: Callable[[int], memoryview],
    ) -> None:
        if ref.size_bytes < 1:
            raise ValueError("no piece of it can be asked for")
        self.ref = ref
        self.source = source
        self.waiting = waiting
        self.is_kept = is_kept
        # Reserved at once and used as pieces come: to grow it could copy all that is there.
        self.content = make_room(ref.size_bytes)
        self.num_bytes = 0
        self._hash = blake3()

    @property
    def is_right(self) -> bool:
        """Whether all has come, and is what the hash says."""
        return self.num_bytes == self.ref.size_bytes and self._hash.hexdigest() == self.ref.blob

    def next_request(self) -> Outgoing:
        """Return the request for the piece that is due."""
        return Outgoing(self.source, BlobRequest(self.ref.blob, self.num_bytes, self._due_bytes))

    def add(self, buffer: Buffer) -> bool:
        """Add the piece that is due; return whether it was as long as asked for."""
        if len(buffer) != self._due_bytes:  # a sender of crumbs would never end
            return False
        self.content[self.num_bytes : self.num_bytes + len(buffer)] = buffer
        self._hash.update(buffer)
        before, self.num_bytes = self.num_bytes, self.num_bytes + len(buffer)
        if before // _RELEASE_BYTES != self.num_bytes // _RELEASE_BYTES:
            release_pages(self.content)
        return True

    def tell(self, found: Buffer | Refusal) -> None:
        """Tell all that wait what became of it."""
        for done in self.waiting:
            done(found)

    @property
    def _due_bytes(self) -> int:
        return min(_PIECE_BYTES, self.ref.size_bytes - self.num_bytes)


def serve_piece(sender: NodeId, request: BlobRequest, content: Buffer | None) -> Outgoing:
    """Answer a request with a piece of a blob, or with a refusal where there is none."""
    if content is None or not 0 <= request.offset < len(content):
        reason = f"blob {request.blob[:12]} has no byte {request.offset} here"
        return Outgoing(sender, Refused(reason, request.blob))
    piece = memoryview(content)[request.offset : request.offset + request.size_bytes]
    return Outgoing(sender, BlobPart(request.blob, request.offset, len(piece)), (piece,))


def name_blob(content: Buffer) -> BlobRef:
    """Return the name that a blob has everywhere: the hash of its content, and its size."""
    digest, whole = blake3(), memoryview(content)
    for start in range(0, len(whole), _RELEASE_BYTES):
        digest.update(whole[start : start + _RELEASE_BYTES])
        release_pages(whole)
    return BlobRef(digest.hexdigest(), len(content))


class _Naming:
    """Hashes pieces as they pass. Somebody may be changing them meanwhile, so copies are passed on."""

    def __init__(self) -> None:
        self._hash, self._num_bytes = blake3(), 0

    @property
    def ref(self) -> BlobRef:
        """The name of what has passed."""
        return BlobRef(self._hash.hexdigest(), self._num_bytes)

    def pass_on(self, pieces: Iterable[Buffer]) -> Iterator[bytes]:
        """Yield the same bytes in small pieces."""
        for piece in (memoryview(each) for each in pieces):
            for start in range(0, len(piece), _PIECE_BYTES):
                settled = bytes(
                    piece[start : start + _PIECE_BYTES]
                )  # else other bytes are named than written
                self._hash.update(settled)
                self._num_bytes += len(settled)
                yield settled


def name_pieces(pieces: Iterable[Buffer], write: Callable[[Buffer], object]) -> BlobRef:
    """Write a blob piece by piece and return its name. Somebody may be changing the pieces meanwhile."""
    named = _Naming()
    for piece in named.pass_on(pieces):
        write(piece)
    return named.ref


def _room_in_memory(size_bytes: int) -> memoryview:
    return np.empty(size_bytes, np.uint8).data


def _chain(first: list[bytes], rest: Iterator[bytes]) -> Iterator[bytes]:
    yield from first
    first.clear()
    yield from rest
