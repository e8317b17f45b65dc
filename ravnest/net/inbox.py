"""What arrives from one neighbour, as a state machine that does no I/O.

Drops what it already has, refuses what cannot be, and puts messages together: a buffer that came in one
piece is passed on as it is, a cut one is gathered in memory set aside once. Driven by link.
"""

from collections import deque
from collections.abc import Sequence

from ravnest.errors import ProtocolError
from ravnest.net.frames import Chunk, Position
from ravnest.net.outbox import OVERHEAD_BYTES
from ravnest.net.transport import Limits, Service

Message = tuple[Service, bytes, tuple[memoryview, ...]]


class Inbox:
    """Feed it chunks; it returns a message when one is whole. Say when the program has taken it."""

    def __init__(self, limits: Limits) -> None:
        self._lanes = tuple(_Lane(service, limits) for service in Service)
        self._told: dict[Service, Position] = {}

    def accept(self, chunk: Chunk, pieces: Sequence[memoryview]) -> Message | None:
        """Take a chunk; raises ProtocolError when no honest neighbour can have sent it."""
        return self._lanes[chunk.service].accept(chunk, pieces)

    def take(self, service: Service) -> int:
        """Note that the program took the oldest message of a service; return its bytes."""
        return self._lanes[service].take()

    def positions(self) -> tuple[Position, ...]:
        """Return how far every service has come."""
        return tuple(lane.position for lane in self._lanes)

    def news(self) -> tuple[Position, ...]:
        """Return the positions that changed since this was last asked."""
        news = tuple(lane.position for lane in self._lanes if self._told.get(lane.service) != lane.position)
        self._told.update((position.service, position) for position in news)
        return news

    def repeat(self) -> None:
        """Tell all positions again: what was told may not have arrived."""
        self._told.clear()


class _Lane:
    def __init__(self, service: Service, limits: Limits) -> None:
        self.service = service
        self._limits = limits
        self._credit = limits.credit_bytes[service]
        self._sequence = 0
        self._assembly: _Assembly | None = None
        self._costs: deque[int] = deque()  # of the messages begun and not yet taken
        self._held = 0
        self._consumed = 0

    @property
    def position(self) -> Position:
        offset = self._assembly.offset if self._assembly else 0
        return Position(self.service, self._sequence, offset, self._consumed)

    def accept(self, chunk: Chunk, pieces: Sequence[memoryview]) -> Message | None:
        if chunk.sequence < self._sequence:
            return None
        offset = self._assembly.offset if self._assembly else 0
        if chunk.sequence > self._sequence or chunk.offset > offset:
            raise ProtocolError(
                f"{self.service.name} {chunk.sequence}: bytes before {chunk.offset} are missing"
            )
        if len(pieces) > self._limits.num_buffers + 1 or sum(map(len, pieces)) > self._limits.chunk_bytes:
            raise ProtocolError(
                f"{self.service.name} {chunk.sequence}: a chunk over {self._limits.chunk_bytes} bytes"
            )
        if self._assembly is None:
            self._assembly = self._begin(chunk.sizes)
        self._assembly.add(pieces, skip=offset - chunk.offset)
        if not self._assembly.is_whole:
            return None
        message = self.service, *self._assembly.content()
        self._assembly = None
        self._sequence += 1
        return message

    def take(self) -> int:
        assert self._consumed < self._sequence, f"{self.service.name} has nothing to take"
        cost = self._costs.popleft()
        self._held -= cost
        self._consumed += 1
        return cost

    def _begin(self, sizes: tuple[int, ...]) -> "_Assembly":
        limits, size = self._limits, sum(sizes)
        if not 1 <= len(sizes) <= limits.num_buffers + 1 or sizes[0] > limits.header_bytes:
            raise ProtocolError(
                f"{self.service.name}: a message of {len(sizes)} parts, header {sizes[:1]}, is refused"
            )
        most = min(limits.message_bytes, limits.incoming_bytes)
        if size > most:
            raise ProtocolError(f"{self.service.name}: a message of {size} bytes is over {most}")
        if self._held and self._held + size + OVERHEAD_BYTES > self._credit:
            raise ProtocolError(f"{self.service.name}: {size} bytes more than the credit of {self._credit}")
        self._costs.append(size + OVERHEAD_BYTES)
        self._held += size + OVERHEAD_BYTES
        return _Assembly(sizes)


class _Assembly:
    """A message on its way in."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.offset = 0
        self._size = sum(sizes)
        self._sizes = sizes
        self._parts: list[memoryview] = []
        self._filled = 0  # of the last part, while that one is cut
        self._skip_empty()

    @property
    def is_whole(self) -> bool:
        return self.offset == self._size

    def add(self, pieces: Sequence[memoryview], skip: int) -> None:
        for piece in pieces:
            if skip >= piece.nbytes:
                skip -= piece.nbytes
                continue
            self._add(piece[skip:])
            skip = 0

    def content(self) -> tuple[bytes, tuple[memoryview, ...]]:
        return bytes(self._parts[0]), tuple(self._parts[1:])

    def _add(self, piece: memoryview) -> None:
        if self.offset + piece.nbytes > self._size:
            raise ProtocolError(f"{piece.nbytes} bytes too many for a message of {self._size}")
        if self._filled == 0:
            size = self._sizes[len(self._parts)]
            whole = piece.nbytes == size
            self._parts.append(piece if whole else memoryview(bytearray(size)))
            if whole:
                self._close(piece.nbytes)
                return
        part = self._parts[-1]
        end = self._filled + piece.nbytes
        if end > part.nbytes:
            raise ProtocolError(f"a piece of {piece.nbytes} bytes reaches over the end of its buffer")
        part[self._filled : end] = piece
        self._filled = end
        self.offset += piece.nbytes
        if end == part.nbytes:
            self._close(0)

    def _close(self, size_bytes: int) -> None:
        self.offset += size_bytes
        self._filled = 0
        self._skip_empty()

    def _skip_empty(self) -> None:
        while len(self._parts) < len(self._sizes) and self._sizes[len(self._parts)] == 0:
            self._parts.append(memoryview(bytearray()))
