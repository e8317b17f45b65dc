"""Content on virtual time: blobs go from node to node piece by piece, while they still arrive there.

Who fetches asks first those that get the same, then the node that has it; a node sends one piece after the
other. A piece that was on its way from a node that dies is asked for again, elsewhere. If nobody else has it,
the fetch ends with the name of that node. What has come stays for the next stage of its receiver.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ravnest.config import TIMEOUTS
from ravnest.ids import HUB, NodeId
from ravnest.protocol.placement import Source
from ravnest.sim.lines import Lines
from ravnest.sim.timeline import Timeline

_MOST_PIECES = 8
_PIECE_BYTES = 1 << 20
_NOTICED_AFTER = TIMEOUTS.net.dial_seconds  # a receiver looks elsewhere


@dataclass(slots=True, eq=False)
class Fetch:
    """What one node gets: `done` is called when all is there, `missed` with a node that does not give."""

    receiver: NodeId
    done: Callable[[], object]
    missed: Callable[[NodeId], object]
    num_bytes: float = 0.0
    size_bytes: float = 0.0
    num_open: int = 0
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Blob:
    """One blob on its way to one node."""

    fetch: Fetch
    source: Source
    num_pieces: int
    num_here: int = 0
    giver: NodeId | None = None  # of the piece that is on its way
    number: int = 0  # of the request: an answer to an older one is dropped
    waiting: list["_Blob"] = field(default_factory=list)  # for the next piece to be here

    @property
    def is_whole(self) -> bool:
        """Whether all of it is here."""
        return self.num_here == self.num_pieces


def num_pieces(size_bytes: float) -> int:
    """Return in how many pieces a blob of this size goes."""
    return max(1, min(_MOST_PIECES, int(size_bytes // _PIECE_BYTES)))


class Transfers:
    """All fetches of a swarm."""

    def __init__(self, timeline: Timeline, lines: Lines, is_alive: Callable[[NodeId], bool]) -> None:
        self._timeline, self._lines, self._is_alive = timeline, lines, is_alive
        self._coming: dict[NodeId, dict[str, _Blob]] = {}  # by receiver and content
        self.num_bytes = 0.0  # that have come, to anybody
        self._by_giver: dict[NodeId, dict[_Blob, None]] = {}
        self._queues: dict[NodeId, deque[tuple[_Blob, int]]] = {}  # pieces to be sent, of those who send

    def fetch(
        self,
        receiver: NodeId,
        sources: Sequence[Source],
        done: Callable[[], object],
        missed: Callable[[NodeId], object] = lambda _: None,
    ) -> Fetch:
        """Get all of these; a source that is the receiver itself costs nothing."""
        blobs = {source.weights.blob for source in sources}
        coming = self._coming.setdefault(receiver, {})
        for name in [name for name in coming if name not in blobs]:
            self._drop(coming.pop(name), 0.0)
        wanted = [x for x in sources if x.node != receiver and not self._has(receiver, x)]
        made = Fetch(receiver, done, missed, size_bytes=float(sum(x.weights.size_bytes for x in wanted)))
        made.num_open = len(wanted)
        if not wanted:
            self._timeline.after(0.0, self._end, made)
        for source in wanted:
            name, size = source.weights.blob, source.weights.size_bytes
            blob = coming.setdefault(name, _Blob(made, source, num_pieces(size)))
            blob.fetch, blob.source = made, source
            made.num_bytes += size * blob.num_here / blob.num_pieces
            self._ask(blob)
        return made

    def cancel(self, fetch: Fetch) -> None:
        """Get no more of it; what has come stays, and who waited for the rest looks elsewhere."""
        fetch.is_over = True
        for blob in [
            x for x in self._coming.get(fetch.receiver, {}).values() if x.fetch is fetch and not x.is_whole
        ]:
            blob.number += 1
            self._release(blob)
            waiting, blob.waiting = blob.waiting, []
            for other in waiting:
                self._timeline.after(0.0, self._ask, other)

    def forget(self, node: NodeId) -> None:
        """A node is gone: what it was giving comes from elsewhere after a while, or not at all."""
        for blob in self._coming.pop(node, {}).values():
            blob.fetch.is_over = True
            self._drop(blob, _NOTICED_AFTER)
        self._queues.pop(node, None)
        for blob in tuple(self._by_giver.pop(node, {})):
            blob.number += 1
            blob.giver = None
            self._timeline.after(_NOTICED_AFTER, self._ask, blob)

    def _has(self, receiver: NodeId, source: Source) -> bool:
        found = self._coming.get(receiver, {}).get(source.weights.blob)
        return found is not None and found.is_whole

    def _drop(self, blob: _Blob, seconds: float) -> None:
        """Forget a copy; those that wait for it look elsewhere after some seconds."""
        blob.number += 1
        self._release(blob)
        for other in blob.waiting:
            self._timeline.after(seconds, self._ask, other)

    def _ask(self, blob: _Blob) -> None:
        """Ask for the next piece."""
        if blob.fetch.is_over or blob.giver is not None or blob.is_whole:
            return
        giver = self._find_giver(blob)
        if isinstance(giver, _Blob):
            giver.waiting.append(blob)
            return
        if giver != HUB and not self._is_alive(giver):
            blob.fetch.is_over = True
            blob.fetch.missed(giver)
            return
        blob.giver, blob.number = giver, blob.number + 1
        self._by_giver.setdefault(giver, {})[blob] = None
        queue = self._queues.get(giver)
        if queue is None:
            queue = self._queues[giver] = deque()
            queue.append((blob, blob.number))
            self._send_next(giver, queue)
        else:
            queue.append((blob, blob.number))

    def _send_next(self, giver: NodeId, queue: deque[tuple[_Blob, int]]) -> None:
        """Send the next piece that is still wanted, and the one after it when this one has left."""
        if self._queues.get(giver) is not queue:
            return
        while queue:
            blob, number = queue.popleft()
            if number == blob.number and not blob.fetch.is_over:
                size = blob.source.weights.size_bytes / blob.num_pieces
                facts = (blob, number, size)
                left = self._lines.send(giver, blob.fetch.receiver, size, self._take, *facts, is_bulk=True)
                self._timeline.at(left, self._send_next, giver, queue)
                return
        del self._queues[giver]

    def _find_giver(self, blob: _Blob) -> "NodeId | _Blob":
        """Return who gives the next piece, or the copy on its way to another node that will have it first."""
        for other in blob.source.others:
            copy = self._coming.get(other, {}).get(blob.source.weights.blob)
            if copy is not None and (copy.is_whole or not copy.fetch.is_over) and self._is_alive(other):
                return other if copy.num_here > blob.num_here else copy
        return blob.source.node

    def _take(self, blob: _Blob, number: int, size: float) -> None:
        if number != blob.number or blob.fetch.is_over:
            return
        self._release(blob)
        blob.num_here += 1
        blob.fetch.num_bytes += size
        self.num_bytes += size
        waiting, blob.waiting = blob.waiting, []
        for other in waiting:
            self._ask(other)
        if blob.num_here < blob.num_pieces:
            self._ask(blob)
            return
        blob.fetch.num_open -= 1
        if not blob.fetch.num_open:
            self._end(blob.fetch)

    def _end(self, fetch: Fetch) -> None:
        if not fetch.is_over:
            fetch.done()

    def _release(self, blob: _Blob) -> None:
        if blob.giver is not None:
            self._by_giver.get(blob.giver, {}).pop(blob, None)
            blob.giver = None
