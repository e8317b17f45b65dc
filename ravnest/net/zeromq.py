"""The transport over real sockets: ZeroMQ with CURVE, whose I/O threads encrypt outside the GIL.

A node listens with one ROUTER and opens one DEALER per connection it dials; no socket reconnects by itself,
so a connection is one ordered stream with an end that is seen. The handshake proves both keys; the id of a
peer comes from its key and from nothing it says. Frames are never copied on the way out.
"""

import asyncio
import logging
import socket as sockets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from random import Random
from typing import Any, Self, cast

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from ravnest.errors import ConfigError, LinkError
from ravnest.net.addresses import split_address, write_address
from ravnest.net.endpoint import Admit, Endpoint
from ravnest.net.frames import Frames
from ravnest.net.identity import KeyPair, peer_of
from ravnest.net.transport import Limits, PeerId, PublicKey

logger = logging.getLogger(__name__)

FLUSH_MILLISECONDS = 250  # how long a goodbye may take
HANDSHAKE_MILLISECONDS = 5_000
FRAMES_PER_TURN = 16  # then others on the loop get theirs
_SLACK_BYTES = 1024  # a frame may be longer than a chunk by what the encryption adds
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ENDS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused at the handshake: this key is not allowed there",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed: it has another key, or is no ravnest",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed: it has another key, or is no ravnest",
    zmq.EVENT_DISCONNECTED: "the connection was closed",
    zmq.EVENT_CLOSED: "nobody answers at this address",
}
_WATCHED = sum(_ENDS)


class ZeroMqTransport(Endpoint):
    """See transport.Transport. `listen` is an address such as tcp://0.0.0.0:7700, or None to only dial."""

    def __init__(
        self,
        keys: KeyPair,
        random: Random,
        listen: str | None = None,
        limits: Limits | None = None,
        admit: Admit | None = None,
    ) -> None:
        super().__init__(keys, random, limits, admit)
        self._listen = listen
        self._accepted: dict[bytes, _Accepted] = {}
        self._listening: list[zmq.asyncio.Socket] = []
        self._lookups: dict[str, int] = {}

    @property
    def address(self) -> str:
        """Where it listens, with the port that was chosen if the address left it open."""
        return write_address(*split_address(self._router.get_string(zmq.LAST_ENDPOINT)))

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._context = zmq.asyncio.Context()
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._readers: set[asyncio.Task[None]] = set()
        try:
            if self._listen is not None:
                self._start_listening(self._listen)
        except BaseException:
            await self._shut()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        await self._shut()

    async def _shut(self) -> None:
        for reader in self._readers:
            reader.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            for socket in self._listening:
                socket.close()
            # Ends when the goodbyes have left, at the latest after FLUSH_MILLISECONDS.
            await asyncio.to_thread(self._context.term)

    def _start_listening(self, address: str) -> None:
        doorkeeper = self._context.socket(zmq.ROUTER)
        self._listening.append(doorkeeper)
        doorkeeper.bind(_ZAP_ADDRESS)
        self._router = self._make_socket(zmq.ROUTER)
        self._listening.append(self._router)
        self._router.curve_server = True
        self._router.zap_domain = b"ravnest"
        self._router.router_mandatory = True
        try:
            self._router.bind(write_address(*split_address(address)))
        except LinkError as error:
            raise ConfigError(f"cannot listen: {error}") from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                message = f"cannot listen at {address}: the port is taken, choose another or stop who has it"
            else:
                message = f"cannot listen at {address}: {error.strerror}"
            raise ConfigError(message) from None
        self._spawn(self._keep_door(doorkeeper))
        self._spawn(self._read(self._router, self._take_from_router))

    def _make_socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.curve_publickey = self._keys.public
        socket.curve_secretkey = self._keys.secret
        socket.linger = FLUSH_MILLISECONDS
        socket.reconnect_ivl = -1
        socket.sndhwm = 0  # the window of each link is the limit
        socket.maxmsgsize = self._limits.chunk_bytes + _SLACK_BYTES
        socket.handshake_ivl = HANDSHAKE_MILLISECONDS
        socket.heartbeat_ivl = HANDSHAKE_MILLISECONDS  # ends the sockets of the dead; links notice sooner
        socket.tcp_keepalive = 1
        socket.ipv6 = True
        return socket

    def _open(self, peer: PeerId, key: PublicKey, address: str) -> "_Dialled":
        host, port = split_address(address)
        socket = self._make_socket(zmq.DEALER)
        socket.curve_serverkey = key
        connection = _Dialled(peer, socket)
        connection.reader = self._spawn(self._connect(connection, host, port))
        return connection

    async def _connect(self, connection: "_Dialled", host: str, port: int) -> None:
        # ZeroMQ would look a name up in its I/O thread, and all other links would wait for that.
        try:
            found = await self._loop.getaddrinfo(host, port, type=sockets.SOCK_STREAM)
        except OSError as error:
            self._lost(connection, f"{host} cannot be found: {error.strerror}")
            return
        # A name may stand for several places, of which one answers: each attempt takes the next.
        turn = self._lookups[host] = self._lookups.get(host, -1) + 1
        place = str(found[turn % len(found)][4][0])

        def take(frames: list[zmq.Frame]) -> None:
            self._arrived(connection, [frame.buffer for frame in frames])

        connection.connect(write_address(place, port))
        async with asyncio.TaskGroup() as readers:
            readers.create_task(self._read(connection.socket, take))
            readers.create_task(self._watch_dealer(connection))

    async def _keep_door(self, doorkeeper: zmq.asyncio.Socket) -> None:
        """Answer ZeroMQ's question (ZAP 1.0) whether the owner of a key may connect."""
        while True:
            envelope, _, version, number, *_, key = await doorkeeper.recv_multipart()
            peer = peer_of(PublicKey(z85.encode(key)))
            verdict = (b"200", b"OK") if self._may_connect(peer) else (b"400", b"not allowed")
            answer = [envelope, b"", version, number, *verdict, peer.encode(), b""]
            await doorkeeper.send_multipart(answer)

    async def _read(self, socket: zmq.asyncio.Socket, take: Callable[[list[zmq.Frame]], None]) -> None:
        num_taken = 0
        while not socket.closed:
            take(await socket.recv_multipart(copy=False))
            num_taken += 1
            if num_taken % FRAMES_PER_TURN == 0:
                await self._next_turn()

    def _take_from_router(self, frames: list[zmq.Frame]) -> None:
        connection = self._accepted_from(frames[0].bytes, frames[1])
        self._arrived(connection, [frame.buffer for frame in frames[1:]])

    def _accepted_from(self, envelope: bytes, frame: zmq.Frame) -> "_Accepted":
        if envelope not in self._accepted:
            self._accepted[envelope] = _Accepted(PeerId(str(frame["User-Id"])), envelope, self)
        return self._accepted[envelope]

    async def _watch_dealer(self, connection: "_Dialled") -> None:
        if connection.monitor.closed:  # what came first of all may have ended it
            return
        event = parse_monitor_message(await connection.monitor.recv_multipart())
        self._lost(connection, _ENDS[zmq.Event(event["event"])])

    async def _next_turn(self) -> None:
        turn = self._loop.create_future()
        self._loop.call_soon(_end_turn, turn)
        await turn

    def _spawn(self, reader: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(reader)
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return task


class _Dialled:
    """A connection we opened: a socket of its own."""

    is_dialled = True

    def __init__(self, peer: PeerId, socket: zmq.asyncio.Socket) -> None:
        self.peer = peer
        self.socket = socket
        self.monitor = socket.get_monitor_socket(_WATCHED)
        self.reader: asyncio.Task[None] | None = None
        self._early: list[Frames] | None = []

    def connect(self, address: str) -> None:
        early, self._early = self._early or [], None
        self.socket.connect(address)
        with suppress(LinkError):  # if it ended at once, whoever watches it learns why
            for frames in early:
                self.send(frames)

    def send(self, frames: Frames) -> None:
        if self._early is not None:
            self._early.append(frames)
            return
        _send_now(self.socket, frames)

    def close(self) -> None:
        if self.reader is not None:
            self.reader.cancel()
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close()


class _Accepted:
    """A connection opened to us: an address within the listening socket."""

    is_dialled = False

    def __init__(self, peer: PeerId, envelope: bytes, owner: ZeroMqTransport) -> None:
        self.peer = peer
        self._envelope = envelope
        self._owner = owner

    def send(self, frames: Frames) -> None:
        _send_now(self._owner._router, [self._envelope, *frames])

    def close(self) -> None:
        # ZeroMQ cannot end one connection of a ROUTER: the other side does on our goodbye, or is ignored.
        self._owner._accepted.pop(self._envelope, None)


def _end_turn(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # its reader was cancelled meanwhile
        turn.set_result(None)


def _send_now(socket: zmq.asyncio.Socket, frames: Frames) -> None:
    if socket.closed:
        raise LinkError(_ENDS[zmq.EVENT_DISCONNECTED])
    done = cast("asyncio.Future[None]", socket.send_multipart(frames, zmq.NOBLOCK, copy=False))
    if done.exception() is not None:  # no host, or no room because there is none
        raise LinkError(_ENDS[zmq.EVENT_DISCONNECTED])
