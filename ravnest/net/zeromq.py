"""The transport over real sockets: ZeroMQ with CURVE, whose I/O threads encrypt outside the GIL.

A node listens with one ROUTER and opens one DEALER per connection it dials; no socket reconnects by itself,
so a connection is one ordered stream with an end that is seen. The handshake proves both keys; the id of a
peer comes from its key and from nothing it says. Large frames are never copied on the way out.
"""

import asyncio
import logging
import socket as sockets
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from random import Random
from typing import Self

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from ravnest.errors import ConfigError, LinkError
from ravnest.net.endpoint import Admit, Connection, Endpoint, any_answers
from ravnest.net.identity import (
    KeyPair,
    is_number,
    is_plausible_number,
    peer_of,
    split_address,
    write_address,
)
from ravnest.net.streams import Frames
from ravnest.net.transport import PeerId, PublicKey, TransportLimits

logger = logging.getLogger(__name__)

FRAMES_PER_TURN = 16  # with their chunks, then others on the loop get theirs
_SMALL_PER_TURN = 128  # without: a thousand links send that many heartbeats in a twentieth of a second
_SHARED_BYTES = 65_536  # a copy of less costs less than to learn when the memory is free again
_IO_THREADS = 3
_MOST_SOCKETS = 16_384  # of a context; where nobody says so it has room for 341 links
_MOST_WAITING = 4_096  # connections that nobody has accepted yet: a hub that starts is dialled by all at once
MOST_STRANGE_NAMES = (
    32  # of strangers that are looked up at once: each takes a thread, for half a minute at worst
)
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

OnFrames = Callable[[list[zmq.Frame]], None]
_MORE = zmq.NOBLOCK | zmq.SNDMORE
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)


def allow_many_files() -> None:
    """Let this process have as many open files and sockets as its system allows; many begin with 1,024.

    Strangers who connect and say nothing would else use them up, and a checkpoint could not be written.
    """
    if sys.platform == "win32":
        return  # it has no such limit
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the system may refuse what it says it allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """Return a context with room for the links of a large swarm: one that is dialled has three sockets."""
    # One thread encrypts about 0.5 GB/s: a stage in the middle has two neighbours, and the hub.
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(_IO_THREADS)
    context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
    return context


class ZeroMqTransport(Endpoint):
    """See transport.Transport. `listen` is an address such as tcp://0.0.0.0:7700, or None to only dial.

    Many transports of one process may share a `context`, which they leave open.
    """

    def __init__(
        self,
        keys: KeyPair,
        random: Random,
        listen: str | None = None,
        limits: TransportLimits | None = None,
        admit: Admit | None = None,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        super().__init__(keys, random, limits, admit)
        self._shared_context = context
        self._listen = listen
        self._accepted: dict[bytes, _Accepted] = {}
        self._open_ones: set[_Watched] = set()
        self._lookups: dict[str, _Lookup] = {}
        self._strange_names = _StrangeNames()

    @property
    def address(self) -> str:
        """Where it listens, with the port that was chosen if the address left it open."""
        return write_address(*split_address(self._router.socket.get_string(zmq.LAST_ENDPOINT)))

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._context = self._shared_context or open_context()
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._connecting: set[asyncio.Task[None]] = set()
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
        for task in self._connecting:
            task.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            for socket in tuple(self._open_ones):
                socket.close()
            if self._shared_context is None:
                # Ends when the goodbyes have left, at the latest after `flush_seconds`.
                await asyncio.to_thread(self._context.term)

    def _start_listening(self, address: str) -> None:
        authenticator = self._watch(self._context.socket(zmq.ROUTER))
        authenticator.socket.bind(_ZAP_ADDRESS)
        router = self._make_socket(zmq.ROUTER)
        self._router = self._watch(router)
        router.curve_server = True
        router.zap_domain = b"ravnest"
        router.router_mandatory = True
        router.backlog = _MOST_WAITING
        try:
            router.bind(write_address(*split_address(address)))
        except LinkError as error:
            raise ConfigError(f"cannot listen: {error}") from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                message = f"cannot listen at {address}: the port is taken, choose another or stop who has it"
            else:
                message = f"cannot listen at {address}: {error.strerror}"
            raise ConfigError(message) from None
        authenticator.start(lambda question: self._answer_zap(authenticator, question))
        self._router.start(self._accept_from_router)

    def _watch(self, socket: "zmq.Socket[bytes]") -> "_Watched":
        watched = _Watched(socket, self._loop, self._open_ones)
        self._open_ones.add(watched)
        return watched

    def _make_socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.curve_publickey = self._keys.public
        socket.curve_secretkey = self._keys.secret
        handshake_ms = round(1000 * self._timeouts.handshake_seconds)
        socket.linger = round(1000 * self._timeouts.flush_seconds)
        socket.reconnect_ivl = -1
        socket.sndhwm = 0  # the window of each link is the limit
        socket.maxmsgsize = self._limits.chunk_bytes + _SLACK_BYTES
        # Who dials gives up by itself, and waits longer with each pass.
        longest_ms = round(1000 * self._timeouts.longest_dial_seconds)
        socket.handshake_ivl = handshake_ms if kind == zmq.ROUTER else max(handshake_ms, longest_ms)
        socket.heartbeat_ivl = handshake_ms  # ends the sockets of the dead; links notice sooner
        socket.tcp_keepalive = 1
        socket.ipv6 = True
        return socket

    async def answers(self, key: PublicKey, address: str) -> bool:
        try:
            host, port = split_address(address)
            places = [host] if is_number(host) else await self._strange_names.find(host)
        except (LinkError, OSError, ValueError):
            return False
        # One of each kind: a name may stand for a router that lets only one of them in.
        one_of_each = {":" in x: x for x in reversed(places) if is_plausible_number(x)}.values()
        return await any_answers(self._answers_at(key, write_address(place, port)) for place in one_of_each)

    async def _answers_at(self, key: PublicKey, address: str) -> bool:
        try:
            socket = self._make_socket(zmq.DEALER)
        except zmq.ZMQError:
            return False
        with socket:
            socket.linger = 0
            found: asyncio.Future[bool] = self._loop.create_future()

            def end(frames: list[zmq.Frame]) -> None:
                event = parse_monitor_message([frame.bytes for frame in frames])["event"]
                if not found.done():
                    found.set_result(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)

            try:
                socket.curve_serverkey = key
                monitor = self._watch(socket.get_monitor_socket(_WATCHED | zmq.EVENT_HANDSHAKE_SUCCEEDED))
            except zmq.ZMQError:
                return False
            try:
                socket.connect(address)
                monitor.start(end)
                return await found
            except zmq.ZMQError:
                return False
            finally:
                socket.disable_monitor()
                monitor.close()

    def _open(self, peer: PeerId, key: PublicKey, address: str) -> "_Dialled":
        host, port = split_address(address)
        try:
            socket = self._make_socket(zmq.DEALER)
            try:
                socket.curve_serverkey = key
                monitor = socket.get_monitor_socket(_WATCHED)
            except zmq.ZMQError:
                socket.close()
                raise
        except zmq.ZMQError as error:  # too many files or sockets are open: others may close some
            raise LinkError(f"no socket can be opened for it: {error.strerror}") from None
        connection = _Dialled(peer, self._watch(socket), self._watch(monitor))
        task = connection.task = self._tasks.create_task(self._connect(connection, host, port))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return connection

    async def _connect(self, connection: "_Dialled", host: str, port: int) -> None:
        lookup = self._lookups.setdefault(host, _Lookup(host))
        try:
            place = await lookup.next_place()
        except (OSError, ValueError) as error:  # ValueError: it cannot be a name, such as a..b
            reason = error.strerror if isinstance(error, OSError) else "that is no name of a host"
            self._lost(connection, f"{host} cannot be found: {reason}")
            return

        if not is_plausible_number(place):
            self._lost(connection, f"{host} is at {place}, where no PC can be reached by others")
            return

        def accept(frames: list[zmq.Frame]) -> None:
            self._arrived(connection, [frame.buffer for frame in frames])

        def end(frames: list[zmq.Frame]) -> None:
            event = parse_monitor_message([frame.bytes for frame in frames])
            self._lost(connection, _ENDS[zmq.Event(event["event"])])

        try:
            connection.connect(write_address(place, port), accept, end)
        except zmq.ZMQError as error:
            self._lost(connection, f"{place} cannot be dialled: {error.strerror}")

    def _is_behind(self, connection: Connection | None) -> bool:
        watched = connection.watched if isinstance(connection, _Dialled | _Accepted) else None
        return watched is not None and watched.is_behind(self._timeouts.tick_seconds)

    def _answer_zap(self, authenticator: "_Watched", question: list[zmq.Frame]) -> None:
        """Answer ZeroMQ's question (ZAP 1.0) whether the owner of a key may connect."""
        envelope, _, version, number, *_, key = [frame.bytes for frame in question]
        peer = peer_of(PublicKey(z85.encode(key)))
        verdict = (b"200", b"OK") if self._may_connect(peer) else (b"400", b"not allowed")
        authenticator.send([envelope, b"", version, number, *verdict, peer.encode(), b""])

    def _accept_from_router(self, frames: list[zmq.Frame]) -> None:
        connection = self._accepted_from(frames[0].bytes, frames[1])
        self._arrived(connection, [frame.buffer for frame in frames[1:]])

    def _accepted_from(self, envelope: bytes, frame: zmq.Frame) -> "_Accepted":
        if envelope not in self._accepted:
            self._accepted[envelope] = _Accepted(PeerId(str(frame["User-Id"])), envelope, self)
        return self._accepted[envelope]


class _Lookup:
    """Looks a name up in a thread that nobody waits for, not even the end of the program.

    That may take half a minute, in which ZeroMQ's I/O thread would hold up all other links. A name may stand
    for several places, of which one answers: each attempt gets the next.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._turn = -1
        self._found: Future[list[str]] | None = None

    async def next_place(self) -> str:
        """Return an address; OSError or ValueError if there is none."""
        if self._found is None or self._found.done():
            self._found = Future()
            self._found.set_running_or_notify_cancel()  # who gives up cancels it for nobody else
            threading.Thread(target=self._look, args=[self._found], daemon=True).start()
        places = await asyncio.wrap_future(self._found)
        self._turn += 1
        return places[self._turn % len(places)]

    def _look(self, found: "Future[list[str]]") -> None:
        _look_up(self._host, found)


class _StrangeNames:
    """Looks up names that strangers chose: a few at once, however many they are and however slow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_threads = 0
        self._waiting: deque[tuple[str, Future[list[str]]]] = deque()

    async def find(self, host: str) -> list[str]:
        """Return its addresses; OSError or ValueError if there are none. Who gives up waits for no thread."""
        found: Future[list[str]] = Future()
        with self._lock:
            self._waiting.append((host, found))
            has_room = self._num_threads < MOST_STRANGE_NAMES
            self._num_threads += has_room
        if has_room:
            threading.Thread(target=self._work, daemon=True).start()
        return await asyncio.wrap_future(found)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                host, found = self._waiting.popleft()
            if found.set_running_or_notify_cancel():
                _look_up(host, found)


def _look_up(host: str, found: "Future[list[str]]") -> None:
    try:
        places = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
        found.set_result([str(place[4][0]) for place in places])
    except (OSError, ValueError) as error:
        found.set_exception(error)


class _Watched:
    """A socket whose messages are accepted as they come, some in a turn of the event loop."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", loop: asyncio.AbstractEventLoop, others: "set[_Watched]"
    ) -> None:
        self.socket = socket
        self._loop = loop
        self._others = others  # that are open
        self._accept: OnFrames | None = None
        self._is_due = False
        self._empty_at = loop.time()  # when all that came was read

    def is_behind(self, seconds: float) -> bool:
        """Return whether something has lain here unread for so long."""
        if self.socket.closed or self._loop.time() - self._empty_at < seconds:
            return False
        self._plan()  # the question may swallow what the descriptor would tell
        return bool(int(self.socket.getsockopt(_EVENTS)) & _READABLE)

    def start(self, accept: OnFrames) -> None:
        """Accept what has come, and all that comes."""
        self._accept = accept
        self._loop.add_reader(self.socket.FD, self._look)
        self._plan()

    def send(self, frames: Frames) -> None:
        """Send now; nothing waits here, for the window of each link is the limit."""
        if self.socket.closed:
            raise LinkError(_ENDS[zmq.EVENT_DISCONNECTED])
        last = len(frames) - 1
        try:
            for index, frame in enumerate(frames):
                flags = zmq.NOBLOCK if index == last else _MORE
                self.socket.send(frame, flags, copy=len(frame) < _SHARED_BYTES)
        except zmq.ZMQError:  # no host, or no room because there is none
            raise LinkError(_ENDS[zmq.EVENT_DISCONNECTED]) from None
        self._plan()

    def close(self) -> None:
        """Accept no more."""
        self._others.discard(self)
        if self.socket.closed:
            return
        if self._accept is not None:
            self._loop.remove_reader(self.socket.FD)
        self.socket.close()

    def _plan(self) -> None:
        # The descriptor tells of changes only, and a call to the socket may swallow one.
        if not self._is_due and self._accept is not None:
            self._is_due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_due = False
        num_large = 0
        for _ in range(_SMALL_PER_TURN):
            if num_large == FRAMES_PER_TURN:
                break
            if self.socket.closed or self._accept is None:
                return
            if not int(self.socket.getsockopt(_EVENTS)) & _READABLE:  # else an exception, at twice the cost
                self._empty_at = self._loop.time()
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            num_large += len(frames[-1]) >= _SHARED_BYTES
            self._accept(frames)
        self._plan()


class _Dialled:
    """A connection we opened: a socket of its own."""

    is_dialled = True

    def __init__(self, peer: PeerId, dealer: _Watched, monitor: _Watched) -> None:
        self.peer = peer
        self.task: asyncio.Task[None] | None = None
        self._dealer = self.watched = dealer
        self._monitor = monitor
        self._early: list[Frames] | None = []

    def connect(self, address: str, accept: OnFrames, end: OnFrames) -> None:
        early, self._early = self._early or [], None
        self._dealer.socket.connect(address)
        with suppress(LinkError):  # if it ended at once, its watcher learns why
            for frames in early:
                self.send(frames)
        self._dealer.start(accept)
        self._monitor.start(end)

    def send(self, frames: Frames) -> None:
        if self._early is not None:
            self._early.append(frames)
            return
        self._dealer.send(frames)

    def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
        if not self._dealer.socket.closed:
            self._dealer.socket.disable_monitor()
            self._monitor.close()
            self._dealer.close()


class _Accepted:
    """A connection opened to us: an address within the listening socket."""

    is_dialled = False

    def __init__(self, peer: PeerId, envelope: bytes, owner: ZeroMqTransport) -> None:
        self.peer = peer
        self._envelope = envelope
        self._owner, self.watched = owner, owner._router

    def send(self, frames: Frames) -> None:
        self._owner._router.send([self._envelope, *frames])

    def close(self) -> None:
        # ZeroMQ cannot end one connection of a ROUTER: the other side does on our goodbye, or is ignored.
        self._owner._accepted.pop(self._envelope, None)
