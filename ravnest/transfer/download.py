"""One blob on its way from several nodes: which piece is asked of whom, and how far it is, as people read it.

Each node has a few pieces to send at a time, so the next ones are on their way while one arrives. A node that
has sent all it was asked for takes over what others still owe. Pieces stay when nodes go, so a download goes
on where it was cut. Pure: the caller sends the requests, and says which pieces are right.
"""

from collections import Counter, deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from ravnest.ids import NodeId
from ravnest.protocol.blobs import PIECE_BYTES, BlobPart, BlobRef, BlobRequest
from ravnest.transfer.blobs import HASH_BYTES
from ravnest.transfer.outbox import Outgoing
from ravnest.units import show_bytes, show_seconds

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
    """Feed it what arrives and who is gone; send what `next_requests` returns."""

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

    def take(self, sender: NodeId, part: BlobPart, now: float) -> bool | None:
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
        self.lose(sender)

    def lose(self, node: NodeId) -> bool:
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

    def lose_all(self) -> None:
        """Ask nobody any more; what is here stays."""
        for node in self.nodes:
            self.lose(node)
        unchecked = self._come - self._here
        self._come -= unchecked
        if self.hashes:
            self._unasked.extendleft(sorted(unchecked, reverse=True))

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
