"""What the hub and a peer do alike with content: fetch it, serve it, and time links with it.

Pieces are hashed and written in a thread as they arrive, so no piece delays the event loop, and what is in
memory at a time is a few pieces for each node. What has arrived of a blob stays when its fetch ends early.
Others get a blob's pieces from here while it is still arriving.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any

from blake3 import blake3

from ravnest.disk import release_pages
from ravnest.ids import HUB, NodeId
from ravnest.protocol.blobs import PIECE_BYTES, BlobPart, BlobRef, BlobRequest
from ravnest.protocol.membership import Refused
from ravnest.protocol.messages import Refusal
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.blobs import HASH_BYTES, Blob, Blobs, name_blob, name_hashes, serve_piece
from ravnest.transfer.download import Download
from ravnest.transfer.outbox import Outgoing
from ravnest.transfer.spool import MOST_SPOOL_BYTES, Spool

# Single bytes for the round trip, then larger pieces; the last one twice, for TCP speeds up.
_PIECES = (1, 1, 1, 1 << 15, 1 << 18, 1 << 20, 1 << 20)
_ENOUGH_SECONDS, _ENOUGH_ROUND_TRIPS = 0.1, 4
_LEAST_SECONDS = 1e-3  # what took less could not be timed: the link is at least so fast


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """How far away a node is, one way, and how fast it sends."""

    latency_seconds: float
    bytes_per_second: float


@cache
def ballast() -> bytes:
    """Return the blob that every program has. Its bytes are random, so that no link can compress them."""
    return blake3(b"ballast").digest(length=_PIECES[-1])


@cache
def name_ballast() -> BlobRef:
    """Return the name of that blob."""
    return name_blob(ballast())


class LinkProbe:
    """Times the links from other nodes, one piece at a time for each.

    Every program has the same blob of ballast. A node is asked for ever larger pieces of it until the link
    takes its time. Pure: requests come out, and the caller sends them.
    """

    def __init__(self) -> None:
        self._timings: dict[NodeId, _Timing] = {}

    def start(
        self, source: NodeId, clock: Callable[[], float], done: Callable[[LinkTimes], None]
    ) -> Outgoing:
        """Return the first request to a node; `done` gets the times if the node answers them all."""
        self._timings[source] = timing = _Timing(clock, done)
        return timing.ask(source)

    def receive(self, sender: NodeId, piece: BlobPart) -> list[Outgoing] | None:
        """Time a piece and return the next request; None if it is not the piece that was asked for."""
        timing = self._timings.get(sender)
        if timing is None or (piece.blob, piece.size_bytes) != (name_ballast().blob, timing.size):
            return None
        if not timing.record():
            return [timing.ask(sender)]
        del self._timings[sender]
        timing.done(LinkTimes(timing.round_trip / 2, timing.rate))
        return []


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
        return _PIECES[self.turn]

    def ask(self, source: NodeId) -> Outgoing:
        self.asked_at = self.clock()
        return Outgoing(source, BlobRequest(name_ballast().blob, 0, self.size))

    def record(self) -> bool:
        """Record that the piece asked for is here; return whether enough is known."""
        seconds = self.clock() - self.asked_at
        if self.size == 1:
            self.round_trip = min(self.round_trip, seconds)
        else:
            rate = self.size / max(seconds - self.round_trip, _LEAST_SECONDS)
            is_repeated = self.size == _PIECES[self.turn - 1]
            self.rate = max(rate, self.rate) if is_repeated else rate
        is_enough = seconds > max(_ENOUGH_SECONDS, _ENOUGH_ROUND_TRIPS * self.round_trip)
        self.turn += 1
        return self.turn == len(_PIECES) or (self.rate > 0 and is_enough)


logger = logging.getLogger(__name__)

ContentMessage = BlobRequest | BlobPart | Refused
InThread = Callable[..., Awaitable[Any]]  # runs a function where it delays no message
_SAME_TIME = 0.9  # of what a timer waited has passed by a clock that went on meanwhile
_SMALL_BYTES = 1 << 16  # to hash and copy less takes less than a thread does
_MOST_CUT = 4  # downloads that ended early, and whose pieces stay
_MOST_WAITING = 64  # requests of one node for what is not here yet


@dataclass(slots=True, eq=False)
class _Arriving:
    """A blob that is fetched: its pieces so far, and what has come since."""

    download: Download
    clock: Callable[[], float]
    spool: Spool | None = None
    come: asyncio.Queue[tuple[NodeId, BlobPart, Buffer] | None] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    result: Buffer | Refusal | None = None  # None: its fetch was cancelled
    fault: str = "nobody is left to ask for it"  # of the last node that was given up


class Exchange:
    """Passes the blobs of one program on and gets it others; `post` sends a message.

    `blame` is told of a node that sent wrong content while others went on.
    """

    def __init__(
        self,
        blobs: Blobs,
        post: Callable[[Outgoing], None],
        work: InThread = asyncio.to_thread,
        blame: Callable[[NodeId, str], None] | None = None,
    ) -> None:
        self.blobs = blobs
        self.post = post
        self._work, self._blame = work, blame
        self._probe = LinkProbe()
        self._arriving: dict[str, _Arriving] = {}
        self._cut: dict[str, _Arriving] = {}  # the oldest first
        self._waiting: dict[str, list[tuple[NodeId, BlobRequest]]] = {}  # for what is not here yet

    def receive(self, sender: NodeId, message: ContentMessage, buffers: Sequence[Buffer]) -> Refusal | None:
        """Answer a message about content, or return why it is not for this program."""
        match message:
            case BlobRequest() if message.blob == name_ballast().blob:
                self.post(serve_piece(sender, message, Blob(ballast(), b"")))
            case BlobRequest():
                self._serve(sender, message)
            case BlobPart():
                return self._take_piece(sender, message, buffers[0])
            case Refused():
                self.refuse(sender, message.reason, message.blob)
        return None

    def refuse(self, sender: NodeId, reason: str, blob: str = "") -> None:
        """Ask a node no more for a blob that it does not have, or for any; it gets nothing more either."""
        for arriving in [each for name, each in self._arriving.items() if blob in ("", name)]:
            if arriving.download.lose(sender):
                arriving.fault = f"{sender} says: {reason}"
                arriving.come.put_nowait(None)
        if not blob:
            for name, waiting in self._waiting.items():
                self._waiting[name] = [each for each in waiting if each[0] != sender]

    def _serve(self, sender: NodeId, request: BlobRequest) -> None:
        found = self._find(request)
        if found is None and request.can_wait and self._num_waiting(sender) < _MOST_WAITING:
            self._waiting.setdefault(request.blob, []).append((sender, request))
        else:
            self.post(self.blobs.serve_piece(sender, request, found))

    def _find(self, request: BlobRequest) -> Blob | None:
        """Return the blob, which may have only the piece that is asked for."""
        arriving = self._arriving.get(request.blob) or self._cut.get(request.blob)
        if arriving is not None and arriving.spool is not None and arriving.download.has(request.offset):
            return Blob(arriving.spool.content, arriving.download.hashes)
        return self.blobs.get(request.blob)

    def _num_waiting(self, sender: NodeId) -> int:
        return sum(node == sender for waiting in self._waiting.values() for node, _ in waiting)

    def _serve_waiting(self, blob: str, *, is_over: bool = False) -> None:
        """Answer those that waited for what is here now; when all is over, refuse the rest."""
        waiting = self._waiting.pop(blob, [])
        left = []
        for sender, request in waiting:
            found = self._find(request)
            if found is not None or is_over:
                self.post(self.blobs.serve_piece(sender, request, found))
            else:
                left.append((sender, request))
        if left:
            self._waiting[blob] = left

    def forget_waiting(self) -> None:
        """Refuse those that wait for what will not come."""
        for blob in tuple(self._waiting):
            if blob not in self._arriving:
                self._serve_waiting(blob, is_over=True)

    def _take_piece(self, sender: NodeId, piece: BlobPart, buffer: Buffer) -> Refusal | None:
        requests = self._probe.receive(sender, piece)
        if requests is not None:
            for request in requests:
                self.post(request)
            return None
        arriving = self._arriving.get(piece.blob)
        is_needed = None if arriving is None else arriving.download.take(sender, piece, arriving.clock())
        if arriving is None or is_needed is None:
            return Refusal(f"a piece of blob {piece.blob[:12]} that was not asked for")
        arriving.come.put_nowait((sender, piece, buffer) if is_needed else None)
        return None

    def num_come(self, ref: BlobRef) -> int:
        """Return how many bytes of a blob have come so far."""
        arriving = self._arriving.get(ref.blob) or self._cut.get(ref.blob)
        return 0 if arriving is None else arriving.download.num_bytes

    async def fetch(
        self,
        ref: BlobRef,
        sources: Sequence[NodeId],
        *,
        quiet_seconds: float | None,
        clock: Callable[[], float] | None = None,
        reserve: Sequence[NodeId] = (),
        can_wait: bool = False,
        passes_on: bool = False,
    ) -> Buffer | Refusal:
        """Return a blob that nodes are asked for, or why it never came.

        The reserve is asked when no source is left; with `can_wait` sources may get the blob only now. Others
        get it from here if it `passes_on`. A node that sends nothing of it for `quiet_seconds` is given up;
        None waits for as long as it takes, and so does a fetch from the hub, whose loss is noticed elsewhere.
        By a `clock` that stands still nobody is quiet.
        """
        if not 1 <= ref.size_bytes <= MOST_SPOOL_BYTES:
            return _refuse_size(ref)
        while True:
            found = self.blobs.get(ref.blob)
            if found is not None:
                return found.content
            arriving = self._arriving.get(ref.blob)
            is_first = arriving is None
            if arriving is None:
                arriving = self._cut.pop(ref.blob, None) or _Arriving(
                    Download(ref), asyncio.get_running_loop().time
                )
                self._arriving[ref.blob] = arriving
            arriving.clock = clock or asyncio.get_running_loop().time
            arriving.download.add(sources, can_wait=can_wait)
            arriving.download.add(reserve, is_reserve=True)
            if is_first:
                return await self._run(arriving, quiet_seconds, passes_on)
            self._ask(arriving)
            await arriving.ended.wait()
            if arriving.result is not None:
                return arriving.result

    async def _run(
        self, arriving: _Arriving, quiet_seconds: float | None, passes_on: bool
    ) -> Buffer | Refusal:
        """Fetch a blob for all who wait for it; when that ends early, what has come is kept for a while."""
        download, ref = arriving.download, arriving.download.ref
        try:
            arriving.result = result = await self._collect(arriving, quiet_seconds)
            if passes_on and not isinstance(result, Refusal):
                self.blobs.pass_on(ref, Blob(result, download.hashes))
            return result
        finally:
            del self._arriving[ref.blob]
            arriving.ended.set()
            if download.num_bytes and not download.is_done:
                download.lose_all()
                self._cut[ref.blob] = _Arriving(download, arriving.clock, arriving.spool)
                for old in [*self._cut][:-_MOST_CUT]:
                    del self._cut[old]
            self._serve_waiting(ref.blob, is_over=True)

    async def _collect(self, arriving: _Arriving, quiet_seconds: float | None) -> Buffer | Refusal:
        download, ref = arriving.download, arriving.download.ref
        if arriving.spool is None:
            try:
                arriving.spool = await self._work(Spool, ref.size_bytes, self.blobs.folder)
            except (MemoryError, OSError):
                return _refuse_size(ref)
        while not download.is_done:
            self._ask(arriving)
            if not download.nodes:
                return Refusal(arriving.fault)
            come = await self._next(arriving, quiet_seconds)
            if come is not None:
                fault = await self._check(arriving, *come)
                if fault:
                    return Refusal(fault)
        return arriving.spool.content

    def _ask(self, arriving: _Arriving) -> None:
        for request in arriving.download.next_requests(arriving.clock()):
            self.post(request)

    async def _next(
        self, arriving: _Arriving, quiet_seconds: float | None
    ) -> tuple[NodeId, BlobPart, Buffer] | None:
        """Return what comes next, or None when a node is gone or was quiet for too long."""
        download, clock = arriving.download, arriving.clock
        is_hubs = set(download.nodes) <= {HUB}
        quiet_at = None if quiet_seconds is None or is_hubs else download.next_quiet_at(quiet_seconds)
        if quiet_seconds is None or quiet_at is None:
            return await arriving.come.get()
        try:
            async with asyncio.timeout(max(quiet_at - clock(), (1 - _SAME_TIME) * quiet_seconds)):
                return await arriving.come.get()
        except TimeoutError:
            for node in download.find_quiet(_SAME_TIME * quiet_seconds, clock()):
                if node != HUB:
                    download.lose(node)
                    arriving.fault = f"{node} has sent nothing of it for {quiet_seconds:.0f} s"
            return None

    async def _check(self, arriving: _Arriving, sender: NodeId, part: BlobPart, piece: Buffer) -> str | None:
        """Add a piece if it is right; return why nothing more can be added, if so."""
        download, offset, spool = arriving.download, part.offset, arriving.spool
        assert spool is not None
        if len(piece) != download.size_at(offset):  # a sender of crumbs would never end
            is_right = False
        elif offset >= download.ref.size_bytes:
            is_right = self._check_hashes(download, offset, bytes(piece))
            if download.hashes:
                download.skip(await self._work(_reuse, spool, download, self.blobs.all))
        else:
            is_small = len(piece) <= _SMALL_BYTES
            given = (spool, offset, piece, download.hash_at(offset))
            try:
                is_right = _store(*given) if is_small else await self._work(_store, *given)
            except OSError as error:
                return f"blob {part.blob[:12]} cannot be written down here: {error}"
            if is_right:
                download.record_right(offset)
        if is_right:
            self._serve_waiting(part.blob)
        else:
            download.reject(sender, offset)
            arriving.fault = f"blob {part.blob[:12]} of {sender} is damaged"
            if download.nodes:
                logger.warning("%s; it is asked of others", arriving.fault)
                if self._blame is not None:
                    self._blame(sender, arriving.fault)
        return None

    def _check_hashes(self, download: Download, offset: int, some: bytes) -> bool:
        hashes = download.record_hashes(offset, some)
        if hashes is not None:
            if name_hashes(hashes, download.ref.size_bytes) != download.ref:
                return False
            download.follow_hashes(hashes)
        return True

    def time_link(
        self, source: NodeId, clock: Callable[[], float], done: Callable[[LinkTimes], None]
    ) -> None:
        """Find out how fast a node sends; `done` gets it, if the node answers."""
        self.post(self._probe.start(source, clock, done))


def _refuse_size(ref: BlobRef) -> Refusal:
    return Refusal(f"blob {ref.blob[:12]} of {ref.size_bytes} bytes finds no memory here")


def _reuse(spool: Spool, download: Download, known: Iterable[Blob]) -> set[int]:
    """Copy the pieces that other blobs have too, such as weights that nothing changes; return which."""
    wanted: dict[bytes, list[int]] = {}
    for offset in range(0, download.ref.size_bytes, PIECE_BYTES):
        wanted.setdefault(download.hash_at(offset), []).append(offset)
    found: set[int] = set()
    for blob in known:
        for number in range(len(blob.hashes) // HASH_BYTES):
            expected = blob.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]
            offsets = wanted.pop(expected, ())
            piece = memoryview(blob.content)[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
            try:
                found.update(offset for offset in offsets if _store(spool, offset, piece, expected))
            except OSError:  # the disk takes no more: the pieces that come will tell
                return found
        release_pages(blob.content)
    return found


def _store(spool: Spool, offset: int, piece: Buffer, expected: bytes) -> bool:
    """Write a piece where it belongs; return whether it is the right one."""
    if blake3(piece).digest() != expected:
        return False
    spool.write(offset, piece)
    return True
