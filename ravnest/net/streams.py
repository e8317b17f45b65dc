"""The streams of messages to and from one neighbour, and their frames, as state machines that do no I/O.

Each service is a stream of messages cut in chunks; the most urgent service goes first. A window limits what
is on the wire, so that an urgent message never waits long behind a big one, even on a slow link. Chunks are
views of the caller's buffers. Only a chunk carries frames beside its first: pieces of the message, none of
which reaches over the end of a buffer.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from ravnest.errors import ProtocolError
from ravnest.net.congestion import Departure, Window, affordable_chunk_bytes
from ravnest.net.transport import Service, TransportLimits
from ravnest.protocol.tensors import Buffer

FRAME_VERSION = 2
GREETING_BYTES = 4096

Natural = Annotated[int, Meta(ge=0, lt=2**62)]
Moment = Annotated[int, Meta(gt=-(2**62), lt=2**62)]  # microseconds of a clock that only its owner knows
Frames = list[Buffer]


class StreamPosition(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How far a service's stream has come: whole messages, bytes of the next, messages the program took."""

    service: Service
    sequence: Natural
    offset: Natural
    consumed: Natural


StreamPositions = Annotated[tuple[StreamPosition, ...], Meta(max_length=len(Service))]


class Greeting(msgspec.Struct, array_like=True, tag=0, frozen=True, forbid_unknown_fields=True):
    """The first frame each way. A `session` ends when its owner forgets all; `known` is the receiver's."""

    version: int
    session: Natural
    known: Natural
    positions: StreamPositions
    greeting: Annotated[bytes, Meta(max_length=GREETING_BYTES)]


class Chunk(msgspec.Struct, array_like=True, tag=1, frozen=True, forbid_unknown_fields=True):
    """A piece of a message; at offset 0 `sizes` says what is to come: the header, then each buffer.

    `positions` and `behind` are an Ack that goes along.
    """

    service: Service
    sequence: Natural
    offset: Natural
    sizes: tuple[Natural, ...]
    sent_at: Moment = 0
    positions: StreamPositions = ()
    behind: Moment = 0


class Ack(msgspec.Struct, array_like=True, tag=2, frozen=True, forbid_unknown_fields=True):
    """What arrived and what was taken since the last one; how long the newest chunk took, by two clocks."""

    positions: StreamPositions
    behind: Moment = 0


class Ping(msgspec.Struct, array_like=True, tag=3, frozen=True, forbid_unknown_fields=True):
    """Still here."""


class Bye(msgspec.Struct, array_like=True, tag=4, frozen=True, forbid_unknown_fields=True):
    """The sender ends this connection."""

    reason: Annotated[str, Meta(max_length=500)]


Head = Greeting | Chunk | Ack | Ping | Bye

encode_frame = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Head)


def decode_frame(frames: Sequence[memoryview]) -> Head:
    """Read the first frame; only a chunk may have more."""
    try:
        head: Head = _decoder.decode(frames[0])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ProtocolError(f"unreadable frame: {error}") from None
    if len(frames) > 1 and not isinstance(head, Chunk):
        raise ProtocolError(f"{type(head).__name__} came with {len(frames) - 1} frames it should not have")
    return head


OVERHEAD_BYTES = 1024  # what a message costs beside its bytes, so that empty ones are bounded too


class SendStream:
    """Put messages in, take chunks out, tell it what arrived."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        affordable = affordable_chunk_bytes(limits.upload_bytes_per_second)
        self._chunk_bytes = int(min(limits.chunk_bytes, affordable))
        self._lanes = tuple(_SendLane(service) for service in Service)
        self._window = Window(limits.window_bytes)
        self.ready_at = inf  # when a chunk that may not go yet may go

    def has_room(self, service: Service, size_bytes: int) -> bool:
        """Whether the service has credit for a message; one message of any size always fits alone."""
        held = self._lanes[service].held_bytes
        return held == 0 or held + size_bytes + OVERHEAD_BYTES <= self._limits.credit_bytes[service]

    def put(self, service: Service, header: bytes, buffers: Sequence[memoryview]) -> None:
        """Queue a message that fits the limits and has room."""
        pieces = (memoryview(header), *buffers)
        message = _QueuedMessage(pieces, sum(piece.nbytes for piece in pieces))
        assert self.has_room(service, message.size), f"no credit for {message.size} bytes of {service.name}"
        self._lanes[service].put(message)

    @property
    def urgency(self) -> int:
        """The service whose turn it is; after the last of them if nothing waits."""
        return next((lane.service for lane in self._lanes if not lane.is_idle), len(self._lanes))

    def next_chunk(self, now: float, *, is_held: bool = False) -> tuple[Chunk, list[memoryview]] | None:
        """Return the next piece to send, the most urgent first; None when nothing may go now.

        What is held may send control messages only.
        """
        in_flight, self.ready_at = 0, inf
        for lane in self._lanes:
            in_flight += lane.in_flight_bytes
            if lane.is_idle:
                continue
            # Less urgent bytes do not hold back more urgent ones.
            if in_flight >= self._window.size_bytes or (is_held and lane.service is not Service.CONTROL):
                return None
            if in_flight and now < self._window.free_at:
                self.ready_at = self._window.free_at
                return None
            chunk = lane.next_chunk(min(self._chunk_bytes, self._window.chunk_bytes))
            lane.departures.append(Departure(now, sum(each.in_flight_bytes for each in self._lanes)))
            self._window.pace(sum(view.nbytes for view in chunk[1]), now)
            return chunk
        return None

    def acknowledge(self, positions: Iterable[StreamPosition], behind: float, now: float) -> None:
        """Release what arrived, the last of it `behind` seconds after it left; give back credit."""
        arrivals = [self._lanes[position.service].acknowledge(position) for position in positions]
        arrived = sum(size for size, _ in arrivals)
        if arrived:
            newest = max((each for _, each in arrivals if each is not None), key=lambda each: each.at)
            waiting = sum(lane.held_bytes for lane in self._lanes)
            self._window.adjust(newest, behind, arrived, waiting, now)

    def resume(self, positions: Iterable[StreamPosition]) -> None:
        """After a reconnect: go on from where the other side says it is."""
        known = {position.service: position for position in positions}
        for lane in self._lanes:
            lane.resume(known.get(lane.service, StreamPosition(lane.service, 0, 0, 0)))
        self._window = Window(self._limits.window_bytes)

    def reset(self) -> None:
        """Forget everything: the other side is a new program."""
        self._lanes = tuple(_SendLane(service) for service in Service)
        self._window = Window(self._limits.window_bytes)


@dataclass(slots=True)
class _QueuedMessage:
    pieces: tuple[memoryview, ...]
    size: int

    def cut(self, offset: int, size_bytes: int) -> list[memoryview]:
        """Return views of the bytes from offset on, none over the end of a buffer."""
        views = []
        for piece in self.pieces:
            if offset < piece.nbytes and size_bytes > 0:
                views.append(piece[offset : offset + size_bytes])
                size_bytes -= views[-1].nbytes
            offset = max(0, offset - piece.nbytes)
        return views


@dataclass(slots=True)
class _Sent:
    """A chunk on the wire: where the stream stands when it has arrived."""

    sequence: int
    offset: int
    size: int


class _SendLane:
    """One service's stream; keeps messages until they arrived and their credit until they are taken."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.held_bytes = 0
        self.in_flight_bytes = 0
        self._first = 0
        self._messages: deque[_QueuedMessage] = deque()
        self._consumed = 0
        self._costs: deque[int] = deque()  # of the messages not yet taken
        self._next = (0, 0)  # sequence and offset of the next chunk
        self._furthest = (0, 0)  # sent over any connection; more may have arrived than a hello said
        self._arrived = (0, 0)
        self._sent: deque[_Sent] = deque()
        self.departures: deque[Departure] = deque()  # of these

    @property
    def is_idle(self) -> bool:
        return self._next[0] == self._first + len(self._messages)

    def put(self, message: _QueuedMessage) -> None:
        self._messages.append(message)
        self._costs.append(message.size + OVERHEAD_BYTES)
        self.held_bytes += self._costs[-1]

    def next_chunk(self, size_bytes: int) -> tuple[Chunk, list[memoryview]]:
        sequence, offset = self._next
        message = self._messages[sequence - self._first]
        views = message.cut(offset, size_bytes)
        sizes = tuple(piece.nbytes for piece in message.pieces) if offset == 0 else ()
        size = sum(view.nbytes for view in views)
        end = offset + size
        self._next = (sequence + 1, 0) if end == message.size else (sequence, end)
        self._furthest = max(self._furthest, self._next)
        self._sent.append(_Sent(*self._next, size))
        self.in_flight_bytes += size
        return Chunk(self.service, sequence, offset, sizes), views

    def acknowledge(self, position: StreamPosition) -> tuple[int, Departure | None]:
        """Return the bytes of the chunks that arrived, and when the last of them left."""
        self._check(position)
        arrived = (position.sequence, position.offset)
        before, departure = self.in_flight_bytes, None
        while self._sent and (self._sent[0].sequence, self._sent[0].offset) <= arrived:
            self.in_flight_bytes -= self._sent.popleft().size
            departure = self.departures.popleft()
        self._release(position)
        self._next = max(self._next, self._arrived)
        return before - self.in_flight_bytes, departure

    def resume(self, position: StreamPosition) -> None:
        self._check(position)
        self._release(position)
        self._next = self._arrived
        self._sent.clear()
        self.departures.clear()
        self.in_flight_bytes = 0

    def _check(self, position: StreamPosition) -> None:
        arrived = (position.sequence, position.offset)
        index = position.sequence - self._first
        is_cut = position.offset > 0 and index >= 0
        if (
            arrived > self._furthest
            or position.consumed > position.sequence
            or (is_cut and position.offset >= self._messages[index].size)
        ):
            raise ProtocolError(
                f"{self.service.name}: {position} is confirmed, but {self._furthest} was sent"
            )

    def _release(self, position: StreamPosition) -> None:
        self._arrived = max((position.sequence, position.offset), self._arrived)
        while self._first < self._arrived[0]:
            self._messages.popleft()
            self._first += 1
        while self._consumed < position.consumed:
            self.held_bytes -= self._costs.popleft()
            self._consumed += 1


InboundMessage = tuple[Service, bytes, tuple[memoryview, ...]]


class ReceiveStream:
    """Feed it chunks; it returns a message when one is whole. Say when the program has taken it."""

    def __init__(self, limits: TransportLimits) -> None:
        self._lanes = tuple(_ReceiveLane(service, limits) for service in Service)
        self._told: dict[Service, StreamPosition] = {}

    def accept(self, chunk: Chunk, pieces: Sequence[memoryview]) -> InboundMessage | None:
        """Accept a chunk; raises ProtocolError when no honest neighbour can have sent it."""
        return self._lanes[chunk.service].accept(chunk, pieces)

    def consume(self, service: Service) -> int:
        """Record that the program has the oldest message of a service; return its bytes."""
        return self._lanes[service].consume()

    def positions(self) -> tuple[StreamPosition, ...]:
        """Return how far every service has come."""
        return tuple(lane.position for lane in self._lanes)

    def news(self) -> tuple[StreamPosition, ...]:
        """Return the positions that changed since this was last asked."""
        news = tuple(lane.position for lane in self._lanes if self._told.get(lane.service) != lane.position)
        self._told.update((position.service, position) for position in news)
        return news

    def repeat(self) -> None:
        """Tell all positions again: what was told may not have arrived."""
        self._told.clear()


class _ReceiveLane:
    def __init__(self, service: Service, limits: TransportLimits) -> None:
        self.service = service
        self._limits = limits
        self._credit = limits.credit_bytes[service]
        self._sequence = 0
        self._assembly: _Assembly | None = None
        self._costs: deque[int] = deque()  # of the messages begun and not yet taken
        self._held = 0
        self._consumed = 0

    @property
    def position(self) -> StreamPosition:
        offset = self._assembly.offset if self._assembly else 0
        return StreamPosition(self.service, self._sequence, offset, self._consumed)

    def accept(self, chunk: Chunk, pieces: Sequence[memoryview]) -> InboundMessage | None:
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

    def consume(self) -> int:
        assert self._consumed < self._sequence, f"{self.service.name} has nothing to consume"
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
            self._parts.append(piece if whole else np.empty(size, np.uint8).data)  # zeros take time
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
