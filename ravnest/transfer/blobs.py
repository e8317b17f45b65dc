"""What hub and peers do alike: address parcels, prove who was invited, pass blobs by their hash.

A blob is asked for piece by piece from one node and believed only if its hash is right. A link is timed by
asking for ever larger pieces of a blob that everybody has. Pure: parcels come out, who drives it sends them.
"""

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b, sha256, shake_128
from math import inf
from typing import Protocol, runtime_checkable

from ravnest.ids import NodeId
from ravnest.net.identity import Token
from ravnest.net.transport import PublicKey, Service
from ravnest.protocol.averaging import AnchorPart, RingPart
from ravnest.protocol.blobs import BlobPart, BlobRef, BlobRequest
from ravnest.protocol.membership import Refused
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.tensors import Buffer
from ravnest.protocol.tied import TiedGradient, TiedStep
from ravnest.protocol.training import Activation, FieldParts, Gradient

PROTOCOL_VERSION = "0.1"  # of what programs say to each other
_PIECE_BYTES = 1 << 20
_HASH_BYTES = 32
# Pieces by which a link is timed: round trips, then more until it takes its time; twice, for TCP speeds up.
_TIMED_BYTES = (1, 1, 1, 1 << 15, 1 << 18, 1 << 20, 1 << 20)
_ENOUGH_SECONDS, _ENOUGH_ROUND_TRIPS = 0.1, 4
_LEAST_SECONDS = 1e-3  # what took less could not be timed: the link is at least so fast


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for another program, with the tensors beside it."""

    to: NodeId
    message: Message
    buffers: tuple[memoryview, ...] = ()

    @property
    def service(self) -> Service:
        """How urgent it is."""
        match self.message:
            case Gradient():
                return Service.GRADIENT
            case Activation() | FieldParts():
                return Service.ACTIVATION
            case RingPart() | AnchorPart() | TiedGradient() | TiedStep():  # no microbatch waits for them
                return Service.AVERAGING
            case BlobPart():
                return Service.BLOB
            case _:
                return Service.CONTROL


def prove(token: Token, key: PublicKey) -> bytes:
    """Return what shows that the owner of a key knows the token's secret."""
    return hmac.digest(token.secret, b"ravnest join" + token.hub_key + key, sha256)


Done = Callable[[bytes | Refusal], None]


@dataclass(slots=True)
class _Coming:
    ref: BlobRef
    source: NodeId
    content: bytearray
    waiting: list[Done]
    is_kept: bool


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """How far away a node is, one way, and how fast it sends."""

    latency_seconds: float
    bytes_per_second: float


@dataclass(slots=True)
class _Timing:
    clock: Callable[[], float]
    done: Callable[[LinkTimes], None]
    turn: int = 0
    asked_at: float = 0.0
    round_trip: float = inf
    rate: float = 0.0

    @property
    def size(self) -> int:
        return _TIMED_BYTES[self.turn]

    def ask(self, source: NodeId) -> Outgoing:
        self.asked_at = self.clock()
        return Outgoing(source, BlobRequest(name_ballast().blob, 0, self.size))

    def take(self) -> bool:
        """Take note of the piece asked for; return whether enough is known."""
        seconds = self.clock() - self.asked_at
        if self.size == 1:
            self.round_trip = min(self.round_trip, seconds)
        else:
            rate = self.size / max(seconds - self.round_trip, _LEAST_SECONDS)
            is_repeated = self.size == _TIMED_BYTES[self.turn - 1]
            self.rate = max(rate, self.rate) if is_repeated else rate
        is_enough = seconds > max(_ENOUGH_SECONDS, _ENOUGH_ROUND_TRIPS * self.round_trip)
        self.turn += 1
        return self.turn == len(_TIMED_BYTES) or (self.rate > 0 and is_enough)


@cache
def ballast() -> bytes:
    """Return the blob that everybody has, of bytes that no link can make fewer of."""
    return shake_128(b"ballast").digest(_TIMED_BYTES[-1])


class BlobStorage(Protocol):
    """Where blobs are kept, by their hash; a dict is one."""

    def get(self, blob: str, /) -> Buffer | None:
        """Return a blob that is here."""

    def __setitem__(self, blob: str, content: bytes, /) -> None: ...

    def __contains__(self, blob: object, /) -> bool: ...


@runtime_checkable
class PieceStorage(BlobStorage, Protocol):
    """One that need not have a blob in memory to keep it."""

    def put_pieces(self, make: Callable[[], Iterable[Buffer]], /) -> BlobRef:
        """Keep a blob; return its name."""


class Blobs:
    """The blobs one program keeps, in memory or on its shelf, and those on their way to it."""

    def __init__(self, shelf: BlobStorage | None = None) -> None:
        memory: dict[str, Buffer] = {}
        self._kept: BlobStorage = memory if shelf is None else shelf
        self._coming: dict[str, _Coming] = {}
        self._timings: dict[NodeId, _Timing] = {}

    def keep(self, content: bytes) -> BlobRef:
        """Keep a blob for whoever asks; return its name."""
        ref = name_blob(content)
        self._kept[ref.blob] = content
        return ref

    def keep_pieces(self, make: Callable[[], Iterable[Buffer]]) -> BlobRef:
        """Keep a blob that is made piece by piece; a shelf that can writes each down at once."""
        if isinstance(self._kept, PieceStorage):
            return self._kept.put_pieces(make)
        return self.keep(b"".join(make()))

    def __contains__(self, ref: BlobRef) -> bool:
        return ref.blob in self._kept

    def kept(self, ref: BlobRef) -> bytes:
        """Return a blob that is here."""
        content = self._kept.get(ref.blob)
        if content is None:
            raise KeyError(ref.blob)
        return bytes(content)

    def drop(self, ref: BlobRef) -> None:
        """Keep a blob in memory no longer; pieces of it on their way stay as they are."""
        if isinstance(self._kept, dict):
            self._kept.pop(ref.blob, None)

    def serve(self, sender: NodeId, request: BlobRequest) -> Outgoing:
        """Answer a request with a piece, or with a refusal."""
        is_ballast = request.blob == name_ballast().blob
        content = ballast() if is_ballast else self._kept.get(request.blob)
        if content is None or request.offset >= len(content):
            reason = f"blob {request.blob[:12]} has no byte {request.offset} here"
            return Outgoing(sender, Refused(reason, request.blob))
        piece = memoryview(content)[request.offset : request.offset + request.size_bytes]
        return Outgoing(sender, BlobPart(request.blob, request.offset, len(piece)), (piece,))

    def want(self, ref: BlobRef, source: NodeId, done: Done, *, keep: bool = True) -> list[Outgoing]:
        """Ask a node for a blob; `done` gets it, now if it is here already, or why it never came."""
        if ref.blob in self._kept:
            done(self.kept(ref))
            return []
        before = self._coming.get(ref.blob)
        if before is not None and before.source == source:
            before.waiting.append(done)
            before.is_kept |= keep
            return []
        waiting = [] if before is None else before.waiting  # on another source, who may be gone
        coming = _Coming(ref, source, bytearray(), [*waiting, done], keep)
        self._coming[ref.blob] = coming
        return [_next_request(coming)]

    def num_come(self, ref: BlobRef) -> int:
        """Return how many bytes of a blob have come so far."""
        coming = self._coming.get(ref.blob)
        return 0 if coming is None else len(coming.content)

    def forget(self, ref: BlobRef, done: Done) -> None:
        """Tell `done` nothing more; what nobody waits for is not fetched any further."""
        coming = self._coming.get(ref.blob)
        if coming is None or done not in coming.waiting:
            return
        coming.waiting.remove(done)
        if not coming.waiting:
            del self._coming[ref.blob]

    def take(self, sender: NodeId, piece: BlobPart, buffer: Buffer) -> list[Outgoing] | Refusal:
        """Take a piece; return the request for the next one."""
        timing = self._timings.get(sender)
        if timing is not None and (piece.blob, piece.size_bytes) == (name_ballast().blob, timing.size):
            if not timing.take():
                return [timing.ask(sender)]
            del self._timings[sender]
            timing.done(LinkTimes(timing.round_trip / 2, timing.rate))
            return []
        coming = self._coming.get(piece.blob)
        if coming is None or sender != coming.source or piece.offset != len(coming.content):
            return Refusal(f"a piece of blob {piece.blob[:12]} that was not asked for")
        is_short = piece.size_bytes < min(_PIECE_BYTES, coming.ref.size_bytes - piece.offset)
        coming.content += buffer
        if len(coming.content) < coming.ref.size_bytes and not is_short:  # who sends crumbs never ends
            return [_next_request(coming)]
        del self._coming[piece.blob]
        content = bytes(coming.content)
        is_right = name_blob(content) == coming.ref
        if is_right and coming.is_kept:
            self._kept[piece.blob] = content
        _tell(coming, content if is_right else Refusal(f"blob {piece.blob[:12]} of {sender} is damaged"))
        return []

    def time(self, source: NodeId, clock: Callable[[], float], done: Callable[[LinkTimes], None]) -> Outgoing:
        """Find out how fast a node sends; `done` gets it, if the node answers."""
        self._timings[source] = timing = _Timing(clock, done)
        return timing.ask(source)

    def refuse(self, sender: NodeId, reason: str, blob: str = "") -> None:
        """Give up a blob that was asked of a node that does not have it, or all that were."""
        asked = [coming for coming in self._coming.values() if coming.source == sender]
        for coming in [coming for coming in asked if blob in ("", coming.ref.blob)]:
            del self._coming[coming.ref.blob]
            _tell(coming, Refusal(f"{sender} says: {reason}"))


def name_blob(content: Buffer) -> BlobRef:
    """Return the name a blob has everywhere: the hash of its content, and its size."""
    return BlobRef(blake2b(content, digest_size=_HASH_BYTES).hexdigest(), len(content))


def name_pieces(pieces: Iterable[Buffer], write: Callable[[Buffer], object]) -> BlobRef:
    """Return the name of a blob that passes by, piece by piece; somebody may be changing them meanwhile."""
    digest, num_bytes = blake2b(digest_size=_HASH_BYTES), 0
    for piece in (memoryview(each) for each in pieces):
        for start in range(0, len(piece), _PIECE_BYTES):
            settled = bytes(piece[start : start + _PIECE_BYTES])  # or other bytes are named than written
            digest.update(settled)
            write(settled)
        num_bytes += len(piece)
    return BlobRef(digest.hexdigest(), num_bytes)


@cache
def name_ballast() -> BlobRef:
    """Return the name of that blob."""
    return name_blob(ballast())


def _tell(coming: _Coming, found: bytes | Refusal) -> None:
    for done in coming.waiting:
        done(found)


def _next_request(coming: _Coming) -> Outgoing:
    offset = len(coming.content)
    size = min(_PIECE_BYTES, coming.ref.size_bytes - offset)
    return Outgoing(coming.source, BlobRequest(coming.ref.blob, offset, size))
