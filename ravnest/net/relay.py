"""A relay between two peers that cannot reach each other: both dial the hub, which joins the two streams.

What passes is the byte stream of the peers' own CURVE connection: its handshake proves each peer's key to
the other, and the relay sees ciphertext. It can delay or cut; it can not read, change, forge or replay. The
ticket, which the hub hands to both over their links, only keeps strangers from using the relay. One peer
awaits streams for its listening port, the other dials a local address as if it were the peer's.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from ravnest.config import TIMEOUTS, NetTimeouts
from ravnest.errors import ConfigError
from ravnest.net.identity import is_everywhere, split_address

TICKET_BYTES = 16
MAX_STREAMS = 1024  # with those that have not shown their ticket yet
MAX_STREAMS_OF_ONE = 4  # a new one may come before the end of an old one is noticed
_PIECE_BYTES = 256 * 1024
_AWAITS = b"A"
_DIALS = b"D"

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
RelayAddress = tuple[str, int]  # host and port


class Relay:
    """The hub's side: joins the two holders of a ticket, again and again until it is taken back."""

    port = 0  # where it listens; 0 while it does not

    def __init__(self, timeouts: NetTimeouts = TIMEOUTS.net, most_streams: int = MAX_STREAMS) -> None:
        self._timeouts, self._most_streams = timeouts, most_streams
        self.num_joined = 0  # pairs of streams so far
        self._awaiting: dict[bytes, Stream | None] = {}  # by ticket
        self._writers: set[asyncio.StreamWriter] = set()
        self._unproven: dict[
            asyncio.StreamWriter, None
        ] = {}  # those without a ticket so far, the oldest first

    @property
    def tickets(self) -> tuple[bytes, ...]:
        """The tickets whose holders may meet."""
        return tuple(self._awaiting)

    def add(self, ticket: bytes) -> None:
        """Add a ticket: its two holders may meet."""
        assert len(ticket) == TICKET_BYTES
        self._awaiting.setdefault(ticket, None)

    def remove(self, ticket: bytes) -> None:
        """Remove a ticket; streams already joined go on until a side ends them."""
        self._end(self._awaiting.pop(ticket, None))

    @asynccontextmanager
    async def listen(self, beside: str) -> AsyncIterator[int]:
        """Serve while the context is open, on the port after that of this address if it is free; gives it."""
        host, port = split_address(beside)
        server = await self._bind(None if is_everywhere(host) else host, (port + 1) % 65536 if port else 0)
        self.port = int(server.sockets[0].getsockname()[1])
        try:
            yield self.port
        finally:
            self.port = 0
            server.close()
            for writer in self._writers:
                writer.close()

    async def _bind(self, host: str | None, port: int) -> asyncio.Server:
        try:
            return await asyncio.start_server(self._serve, host, port, limit=_PIECE_BYTES)
        except OSError as error:
            if port and error.errno == errno.EADDRINUSE:
                return await self._bind(host, 0)
            raise ConfigError(f"cannot relay at {host}: {error.strerror}; listen elsewhere") from None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = (reader, writer)
        _keep_alive(writer, self._timeouts)
        self._writers.add(writer)
        self._unproven[writer] = None
        if len(self._writers) > self._most_streams:
            self._end_oldest_unproven()
        opening = await _read_opening(reader, self._timeouts)
        self._unproven.pop(writer, None)
        ticket, role = opening[:TICKET_BYTES], opening[TICKET_BYTES:]
        if ticket not in self._awaiting or role not in (_AWAITS, _DIALS):
            self._end(stream)
            return
        other = self._awaiting[ticket]
        if role == _AWAITS:
            self._awaiting[ticket] = stream  # its bytes are read when the other side comes
            self._end(other)
            return
        self._awaiting[ticket] = None
        if other is not None:
            self.num_joined += 1
            await _join(stream, other)
        self._end(other)
        self._end(stream)

    def _end_oldest_unproven(self) -> None:
        """Make room: who has a ticket shows it at once, and silent strangers would shut the others out."""
        oldest = next(iter(self._unproven))
        del self._unproven[oldest]
        self._writers.discard(oldest)
        oldest.close()

    def _end(self, stream: Stream | None) -> None:
        if stream is not None:
            self._writers.discard(stream[1])
            stream[1].close()


async def await_through(
    relay: RelayAddress, ticket: bytes, listener: RelayAddress, timeouts: NetTimeouts = TIMEOUTS.net
) -> None:
    """Lead every stream of the ticket's other holder to where we listen, for as long as this runs."""
    room = asyncio.Semaphore(MAX_STREAMS_OF_ONE)
    async with asyncio.TaskGroup() as streams:
        while True:
            await room.acquire()
            far = await _await_one(relay, ticket, timeouts)
            if far is None:
                room.release()
                await asyncio.sleep(timeouts.relay_pause_seconds)  # noqa: TID251 - nothing tells that it is back
                continue
            streams.create_task(_lead_in(*far, listener, timeouts)).add_done_callback(
                lambda _: room.release()
            )


@asynccontextmanager
async def dial_through(
    relay: RelayAddress, ticket: bytes, timeouts: NetTimeouts = TIMEOUTS.net
) -> AsyncIterator[str]:
    """Give an address to dial that leads to the ticket's other holder."""

    async def lead_out(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError):
            far = await _open(relay, ticket + _DIALS, timeouts)
            await _join((reader, writer), far)
        writer.close()

    server = await asyncio.start_server(lead_out, "127.0.0.1", 0, limit=_PIECE_BYTES)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _await_one(
    relay: RelayAddress, ticket: bytes, timeouts: NetTimeouts
) -> tuple[Stream, bytes] | None:
    """Return the next stream of the other holder with its first bytes; None if the relay ended it."""
    with suppress(OSError, TimeoutError):
        far = await _open(relay, ticket + _AWAITS, timeouts)
        first = b""
        try:
            first = await far[0].read(_PIECE_BYTES)
            return (far, first) if first else None
        finally:
            if not first:
                far[1].close()
    return None


async def _lead_in(far: Stream, first: bytes, listener: RelayAddress, timeouts: NetTimeouts) -> None:
    try:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(timeouts.relay_opening_seconds):
                near = await asyncio.open_connection(*listener, limit=_PIECE_BYTES)
            near[1].write(first)
            await _join(near, far)
    finally:
        far[1].close()


async def _open(relay: RelayAddress, opening: bytes, timeouts: NetTimeouts) -> Stream:
    async with asyncio.timeout(timeouts.relay_opening_seconds):
        stream = await asyncio.open_connection(*relay, limit=_PIECE_BYTES)
        _keep_alive(stream[1], timeouts)
        stream[1].write(opening)
        await stream[1].drain()
    return stream


def _keep_alive(writer: asyncio.StreamWriter, timeouts: NetTimeouts) -> None:
    end: socket.socket = writer.get_extra_info("socket")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, name):  # not on every system
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), timeouts.relay_keepalive_seconds)


async def _read_opening(reader: asyncio.StreamReader, timeouts: NetTimeouts) -> bytes:
    with suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
        async with asyncio.timeout(timeouts.relay_opening_seconds):
            return await reader.readexactly(TICKET_BYTES + len(_DIALS))
    return b""


async def _join(one: Stream, other: Stream) -> None:
    """Carry bytes both ways until one side ends, then end both."""
    async with asyncio.TaskGroup() as pumps:
        pumps.create_task(_pump(one, other))
        pumps.create_task(_pump(other, one))


async def _pump(source: Stream, sink: Stream) -> None:
    try:
        while piece := await source[0].read(_PIECE_BYTES):
            sink[1].write(piece)
            await sink[1].drain()
    except OSError:
        pass  # an end like any other
    finally:
        source[1].close()
        sink[1].close()
