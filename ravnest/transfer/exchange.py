"""The exchange of content between programs, alike in the hub and a peer: blobs are fetched and served.

A blob is fetched from several nodes at once, piece by piece. Pieces are hashed and written in a thread as
they arrive, so no piece delays the event loop, and memory holds a few pieces for each node. What has arrived
of a blob stays when its fetch ends early. Others get its pieces from here while it is still arriving.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from ravnest.disk import release_pages
from ravnest.ids import HUB, NodeId
from ravnest.protocol.membership import Refused
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import PIECE_BYTES, BlobPart, BlobRef, BlobRequest
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.blobs import (
    HASH_BYTES,
    MOST_SPOOL_BYTES,
    Blob,
    Blobs,
    Spool,
    name_hashes,
    serve_piece,
)
from ravnest.transfer.link_probe import LinkProbe, LinkTimes, ballast, name_ballast
from ravnest.transfer.outbox import Outgoing
from ravnest.units import show_bytes, show_seconds

logger = logging.getLogger(__name__)

PIECES_UNDER_WAY = 4  # from one node: 4 MiB for each round trip, as much as a link takes at once


@dataclass(slots=True)
class _Giver:
    """A node that is asked; a reserve is asked only while there is no other."""

    is_reserve: bool
    can_wait: bool
    heard_at: float = 0.0
    num_sent: int = 0
    owes: dict[int, None] = field(default_factory=dict)  # offsets, the oldest first


class Download:
    """One blob on its way from several nodes: which piece is asked of which node. Pure.

    Feed it what arrives and which nodes are gone; send what `next_requests` returns. Each node has a few
    pieces to send at a time. A node that has sent all it was asked for takes over what others still owe.
    """

    def __init__(self, ref: BlobRef) -> None:
        self.ref = ref
        self.num_bytes = 0  # of content that is here and right
        self.hashes = b""  # of all pieces, once they are here
        self.num_hash_bytes = HASH_BYTES * -(-ref.size_bytes // PIECE_BYTES)
        self._some_hashes: dict[int, bytes] = {}  # by offset, all of one node
        self._givers: dict[NodeId, _Giver] = {}
        self._here: set[int] = set()  # offsets of content that is right
        self._come: set[int] = set()  # that has come, and may be wrong
        self._unasked: deque[int] = deque()
        if ref.size_bytes <= PIECE_BYTES:
            self._follow(bytes.fromhex(ref.blob))
        else:
            self._restart_hashes()

    @property
    def is_done(self) -> bool:
        """Whether all is here."""
        return self.num_bytes == self.ref.size_bytes

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes that are left to ask."""
        return tuple(self._givers)

    def add(self, nodes: Iterable[NodeId], *, is_reserve: bool = False, can_wait: bool = False) -> None:
        """Ask these nodes, too; with `can_wait` they may not have the blob yet."""
        for node in nodes:
            self._givers.setdefault(node, _Giver(is_reserve, can_wait))

    def next_requests(self, now: float) -> list[Outgoing]:
        """Return what to ask now, of all nodes in turn."""
        found: list[Outgoing] = []
        is_last_resort = all(giver.is_reserve for giver in self._givers.values())
        asked = [(node, each) for node, each in self._givers.items() if is_last_resort or not each.is_reserve]
        if not self.hashes:
            asked = asked[:1]  # or nobody could tell whose hashes are wrong
        while asked:
            left = []
            for node, giver in asked:
                offset = self._choose(giver) if len(giver.owes) < PIECES_UNDER_WAY else None
                if offset is not None:
                    giver.heard_at = giver.heard_at if giver.owes else now
                    giver.owes[offset] = None
                    request = BlobRequest(self.ref.blob, offset, self.size_at(offset), giver.can_wait)
                    found.append(Outgoing(node, request))
                    left.append((node, giver))
            asked = left
        return found

    def _choose(self, giver: _Giver) -> int | None:
        """Return a piece that nobody was asked for, or for an idle node one that another owes."""
        if self._unasked:
            return self._unasked.popleft()
        if giver.owes or not giver.num_sent or not self.hashes:
            return None
        owed = Counter(offset for other in self._givers.values() for offset in other.owes)
        return next(
            (offset for offset, times in owed.items() if times == 1 and offset not in self._come), None
        )

    def accept(self, sender: NodeId, part: BlobPart, now: float) -> bool | None:
        """Record that a piece has come; return whether it is needed, or None if nobody asked for it."""
        giver = self._givers.get(sender)
        if giver is None or part.offset not in giver.owes:
            return None
        del giver.owes[part.offset]
        giver.heard_at, giver.num_sent = now, giver.num_sent + 1
        is_needed = part.offset not in self._come
        self._come.add(part.offset)
        return is_needed

    def has(self, offset: int) -> bool:
        """Return whether what begins here can be passed on."""
        return offset in self._here if offset < self.ref.size_bytes else bool(self.hashes)

    def hash_at(self, offset: int) -> bytes:
        """Return what the hash of a piece must be."""
        start = offset // PIECE_BYTES * HASH_BYTES
        return self.hashes[start : start + HASH_BYTES]

    def size_at(self, offset: int) -> int:
        """Return how long the piece is that begins here."""
        end = self.ref.size_bytes + (self.num_hash_bytes if offset >= self.ref.size_bytes else 0)
        return min(PIECE_BYTES, end - offset)

    def record_right(self, offset: int) -> None:
        """Record a piece of content that is right."""
        if offset not in self._here:
            self._here.add(offset)
            self.num_bytes += self.size_at(offset)

    def skip(self, offsets: Container[int]) -> None:
        """Ask nobody for these pieces: they were here already, in another blob."""
        found = [offset for offset in self._unasked if offset in offsets]
        self._unasked = deque(offset for offset in self._unasked if offset not in offsets)
        self._come.update(found)
        for offset in found:
            self.record_right(offset)

    def record_hashes(self, offset: int, hashes: bytes) -> bytes | None:
        """Record some of the hashes; return all of them once they are here, to be checked."""
        self._some_hashes[offset] = hashes
        found = b"".join(self._some_hashes[each] for each in sorted(self._some_hashes))
        return found if len(found) == self.num_hash_bytes else None

    def follow_hashes(self, hashes: bytes) -> None:
        """Ask for content whose pieces have these hashes: they are right."""
        self._some_hashes = {}
        self._follow(hashes)

    def reject(self, sender: NodeId, offset: int) -> None:
        """Ask a node no more that sent a wrong piece; others get it."""
        self._come.discard(offset)
        if self.hashes:
            self._unasked.appendleft(offset)
        self.drop(sender)

    def drop(self, node: NodeId) -> bool:
        """Ask a node no more; others get what it owes. Return whether it was asked."""
        giver = self._givers.pop(node, None)
        if giver is None:
            return False
        if not self.hashes:
            self._restart_hashes()
        else:
            owed = {offset for other in self._givers.values() for offset in other.owes}
            lost = [offset for offset in giver.owes if offset not in owed | self._come]
            self._unasked.extendleft(reversed(lost))
        return True

    def retain(self, nodes: Container[NodeId]) -> None:
        """Ask only these nodes from now on; what is right stays, and what was not checked is asked again."""
        for node in self.nodes:
            if node not in nodes:
                self.drop(node)
        unchecked = self._come - (self._here if self.hashes else self._some_hashes.keys())
        self._come -= unchecked
        self._unasked.extendleft(sorted(unchecked.difference(self._unasked), reverse=True))

    def find_quiet(self, quiet_seconds: float, now: float) -> list[NodeId]:
        """Return the nodes that owe something and have sent nothing for so long."""
        late = now - quiet_seconds
        return [node for node, giver in self._givers.items() if giver.owes and giver.heard_at <= late]

    def next_quiet_at(self, quiet_seconds: float) -> float | None:
        """Return when the next node has been quiet for so long, if nothing comes."""
        times = (giver.heard_at + quiet_seconds for giver in self._givers.values() if giver.owes)
        return min(times, default=None)

    def _follow(self, hashes: bytes) -> None:
        self.hashes, self._come = hashes, set()
        self._unasked.extend(range(0, self.ref.size_bytes, PIECE_BYTES))

    def _restart_hashes(self) -> None:
        start = self.ref.size_bytes
        self._some_hashes, self._come = {}, set()
        self._unasked = deque(range(start, start + self.num_hash_bytes, PIECE_BYTES))


_MARKS = 6  # the rate is that of the time since the oldest of the last so many reports


class TransferProgress:
    """Tell it how many bytes are there; it says how long the rest will take."""

    def __init__(self, what: str, size_bytes: int) -> None:
        self._what, self.size_bytes = what, size_bytes
        self.told = ""  # last
        self._marks: deque[tuple[float, int]] = deque(maxlen=_MARKS)

    def describe(self, num_bytes: int, now: float) -> str:
        """Return the sentence for this moment."""
        self._marks.append((now, num_bytes))
        since, before = self._marks[0]
        rate = (num_bytes - before) / (now - since) if now > since else 0.0
        told = f"{self._what}: {show_bytes(num_bytes)} of {show_bytes(self.size_bytes)}"
        if rate > 0:
            told += f", {show_bytes(rate)}/s, {show_seconds((self.size_bytes - num_bytes) / rate)} left"
        self.told = told
        return told


ContentMessage = BlobRequest | BlobPart | Refused
InThread = Callable[..., Awaitable[Any]]  # runs a function where it delays no message
_SAME_TIME = 0.9  # of what a timer waited has passed by a clock that went on meanwhile
_SMALL_BYTES = 1 << 16  # to hash and copy less takes less than a thread does
_MOST_CUT = 64  # downloads that ended early, and whose pieces stay: those of a stage
_MOST_WAITING = 64  # requests of one node for what is not here yet


@dataclass(slots=True, eq=False)
class _Arriving:
    """A blob that is fetched: its pieces so far, and what has come since."""

    download: Download
    clock: Callable[[], float]
    spool: Spool | None = None
    come: asyncio.Queue[tuple[NodeId, BlobPart, Buffer] | None] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_running: bool = False
    num_joined: int = 0  # fetches that wait for the one that runs
    joined: set[NodeId] = field(default_factory=set)  # the nodes that these ask
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
            case BlobPart() if message.blob == name_ballast().blob:
                return self._time_piece(sender, message)
            case BlobPart():
                return self._accept_piece(sender, message, buffers[0])
            case Refused():
                self.refuse(sender, message.reason, message.blob)
        return None

    def refuse(self, sender: NodeId, reason: str, blob: str = "") -> None:
        """Ask a node no more for a blob that it does not have, or for any; it gets nothing more either."""
        for arriving in [each for name, each in self._arriving.items() if blob in ("", name)]:
            if arriving.download.drop(sender):
                arriving.fault = f"{sender} says: {reason}"
                arriving.come.put_nowait(None)
        if not blob:
            left = {name: [x for x in them if x[0] != sender] for name, them in self._waiting.items()}
            self._waiting = {name: them for name, them in left.items() if them}

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

    def _time_piece(self, sender: NodeId, piece: BlobPart) -> Refusal | None:
        requests = self._probe.receive(sender, piece)
        if requests is None:
            return _refuse_piece(piece)
        for request in requests:
            self.post(request)
        return None

    def _accept_piece(self, sender: NodeId, piece: BlobPart, buffer: Buffer) -> Refusal | None:
        arriving = self._arriving.get(piece.blob)
        is_needed = None if arriving is None else arriving.download.accept(sender, piece, arriving.clock())
        if arriving is None or is_needed is None:
            return _refuse_piece(piece)
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
            if arriving is None:
                arriving = self._cut.pop(ref.blob, None) or _Arriving(
                    Download(ref), asyncio.get_running_loop().time
                )
                self._arriving[ref.blob] = arriving
            arriving.clock = clock or asyncio.get_running_loop().time
            arriving.download.add(sources, can_wait=can_wait)
            arriving.download.add(reserve, is_reserve=True)
            if not arriving.is_running:
                return await self._run(arriving, quiet_seconds, passes_on)
            arriving.joined.update((*sources, *reserve))
            self._ask(arriving)
            if await self._join(arriving):
                assert arriving.result is not None
                return arriving.result

    async def _join(self, arriving: _Arriving) -> bool:
        """Wait for a fetch that runs; return whether it came to its end, and was not cancelled."""
        arriving.num_joined += 1
        try:
            await arriving.ended.wait()
        finally:
            arriving.num_joined -= 1
            left = self._arriving.get(arriving.download.ref.blob)
            if arriving.ended.is_set() and not arriving.num_joined and left is not None:
                asyncio.get_running_loop().call_soon(self._drop_unclaimed, left)
        return arriving.result is not None

    def _drop_unclaimed(self, arriving: _Arriving) -> None:
        """Set aside what nobody goes on to fetch, because all were cancelled at once."""
        if self._arriving.get(arriving.download.ref.blob) is arriving and not arriving.is_running:
            self._set_aside(arriving)

    async def _run(
        self, arriving: _Arriving, quiet_seconds: float | None, passes_on: bool
    ) -> Buffer | Refusal:
        """Fetch a blob for all that wait for it.

        When that ends early, one of those that wait goes on; without one, what has come is kept for a while.
        """
        download, ref = arriving.download, arriving.download.ref
        arriving.is_running = True
        try:
            arriving.result = result = await self._collect(arriving, quiet_seconds)
            if passes_on and not isinstance(result, Refusal):
                self.blobs.pass_on(ref, Blob(result, download.hashes))
            return result
        finally:
            arriving.ended.set()
            if arriving.result is None and arriving.num_joined:
                download.retain(arriving.joined)
                self._arriving[ref.blob] = _Arriving(download, arriving.clock, arriving.spool)
            else:
                self._set_aside(arriving)

    def _set_aside(self, arriving: _Arriving) -> None:
        """End a fetch; what has come of a blob that is not whole stays."""
        download, ref = arriving.download, arriving.download.ref
        del self._arriving[ref.blob]
        if download.num_bytes and not download.is_done:
            download.retain(())
            self._cut[ref.blob] = _Arriving(download, arriving.clock, arriving.spool)
            for old in [*self._cut][:-_MOST_CUT]:
                del self._cut[old]
        self._serve_waiting(ref.blob, is_over=True)

    def forget_cut(self, but: Container[str]) -> None:
        """Keep of the blobs whose fetches ended early only these."""
        self._cut = {blob: arriving for blob, arriving in self._cut.items() if blob in but}

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
                    download.drop(node)
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


def _refuse_piece(piece: BlobPart) -> Refusal:
    return Refusal(f"a piece of blob {piece.blob[:12]} that was not asked for")


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
