"""All links of one program: dialling and accepting connections, messages in and out, heartbeats.

An endpoint does no I/O of its own. Subclasses open connections: over sockets (zeromq) or in memory.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, Protocol, Self

from ravnest.config import NetTimeouts
from ravnest.errors import LinkError, ProtocolError
from ravnest.net.congestion import Upload
from ravnest.net.identity import KeyPair, peer_of
from ravnest.net.link import Link
from ravnest.net.streams import (
    FRAME_VERSION,
    GREETING_BYTES,
    Bye,
    Frames,
    Greeting,
    ReceiveStream,
    decode_frame,
    encode_frame,
)
from ravnest.net.transport import (
    MIB,
    Delivery,
    DialFailed,
    LinkDown,
    LinkUp,
    PeerId,
    PublicKey,
    Service,
    TransportEvent,
    TransportLimits,
    as_views,
    check_limits,
)
from ravnest.protocol.tensors import Buffer
from ravnest.units import show_plainly

_SERVICES = tuple(Service)  # to go through an enumeration costs more
_TURN_BYTES = MIB  # of messages that a program takes before others on the loop get their turn


class Connection(Protocol):
    """One ordered way to a peer whose key was proven. Carries nothing once closed."""

    peer: PeerId
    is_dialled: bool

    def send(self, frames: Frames) -> None:
        """Pass on without waiting; LinkError when the connection is gone."""

    def close(self) -> None:
        """Close it; safe to call twice."""


@dataclass(frozen=True, slots=True, order=True)
class UnreadEvent:
    """An event that the program has not taken yet; `inbox` gives credit back when it does."""

    priority: int
    number: int
    event: TransportEvent = field(compare=False)
    inbox: ReceiveStream | None = field(compare=False)


@dataclass(slots=True, eq=False)
class Unsent:
    """A message that waits for credit."""

    header: bytes
    buffers: tuple[memoryview, ...]
    size_bytes: int
    accepted: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class Dial:
    """Where a neighbour is dialled, and how that goes."""

    key: PublicKey
    addresses: tuple[str, ...]
    greeting: bytes
    turn: int = 0  # of the addresses
    num_failures: int = 0
    attempt: Connection | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        """The one whose turn it is."""
        return self.addresses[self.turn]

    @property
    def num_passes(self) -> int:
        """How often all of them have failed."""
        return self.num_failures // len(self.addresses)

    def patience_seconds(self, timeouts: NetTimeouts) -> float:
        """How long the next attempt may take: longer with each pass, for many may dial the same."""
        return min(timeouts.longest_dial_seconds, timeouts.dial_seconds * 2.0 ** min(self.num_passes, 10))

    def turn_to(self, address: str) -> None:
        """Dial this one next, if it is one of them."""
        if address in self.addresses:
            self.turn = self.addresses.index(address)

    def fail(self, timeouts: NetTimeouts, *, was_up: bool) -> float:
        """Turn to the next address; return the pause before, which after the last of them doubles."""
        doubled = timeouts.first_pause_seconds * 2.0 ** min(self.num_passes, 10)
        pause = min(timeouts.longest_pause_seconds, doubled)
        self.num_failures += 1
        if was_up:
            return pause
        self.turn = (self.turn + 1) % len(self.addresses)
        return 0.0 if self.num_failures % len(self.addresses) else pause


@dataclass(slots=True, eq=False)
class Neighbour:
    """All there is about one peer."""

    peer: PeerId
    link: Link
    connection: Connection | None = None
    dial: Dial | None = None
    redial: Dial | None = None  # while another way is looked for
    timer: asyncio.TimerHandle | None = None
    pump_timer: asyncio.TimerHandle | None = None
    up_since: float | None = None
    fed_at: float = 0.0  # when what is not urgent last went to it
    is_awake: bool = False
    unsent: tuple[deque[Unsent], ...] = field(default_factory=lambda: tuple(deque() for _ in Service))

    def fill(self) -> None:
        """Move what waits for credit into the outbox as far as there is any."""
        outbox = self.link.outbox
        for service, queue in zip(_SERVICES, self.unsent, strict=True):
            while queue and (queue[0].accepted.done() or outbox.has_room(service, queue[0].size_bytes)):
                unsent = queue.popleft()
                if not unsent.accepted.done():
                    outbox.put(service, unsent.header, unsent.buffers)
                    unsent.accepted.set_result(None)

    def fail(self, error: LinkError) -> None:
        """Fail the messages that wait for credit."""
        for unsent in (entry for queue in self.unsent for entry in queue):
            if not unsent.accepted.done():
                unsent.accepted.set_exception(error)


logger = logging.getLogger(__name__)

Admit = Callable[[PeerId, bytes], str | None]  # a peer and its greeting -> why it may not connect


class Endpoint(ABC):
    """Links by peer, messages in and out. Subclasses say how to open a connection."""

    def __init__(
        self, keys: KeyPair, random: Random, limits: TransportLimits | None = None, admit: Admit | None = None
    ) -> None:
        self._keys = keys
        self._random = random
        self._limits = limits or TransportLimits()
        self._timeouts = self._limits.timeouts
        self._admit = admit
        self._allowed: dict[PeerId, PublicKey] = {}
        self._admitted: set[PeerId] = set()
        self._neighbours: dict[PeerId, Neighbour] = {}
        self._events: asyncio.PriorityQueue[UnreadEvent] = asyncio.PriorityQueue()
        self._num_events = 0
        self._taken_bytes = 0  # since others on the loop had their turn
        self._upload = Upload(self._limits.upload_bytes_per_second)
        self._more_timer: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> PeerId:
        return self._keys.peer

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        for peer in tuple(self._neighbours):
            self.drop(peer, "closed")

    async def send(self, to: PeerId, service: Service, header: bytes, buffers: Sequence[Buffer] = ()) -> None:
        views = as_views(buffers)
        size = check_limits(header, views, self._limits)
        neighbour = self._neighbour(to)
        unsent = Unsent(header, views, size, self._loop.create_future())
        neighbour.unsent[service].append(unsent)
        self._fill(neighbour)
        if unsent.accepted.done():
            return
        try:
            async with asyncio.timeout(self._timeouts.send_seconds):
                await unsent.accepted
        except TimeoutError:
            seconds = self._timeouts.send_seconds
            raise LinkError(f"{to} took no {service.name} message for {seconds:.0f} s") from None
        finally:
            if unsent in neighbour.unsent[service]:
                neighbour.unsent[service].remove(unsent)

    async def receive(self) -> TransportEvent:
        while True:
            if self._taken_bytes >= _TURN_BYTES:  # a full queue would be emptied without a turn for others
                self._taken_bytes = 0
                await asyncio.sleep(0)  # noqa: TID251 - a turn for others, not a wait
            waiting = await self._events.get()
            if not isinstance(waiting.event, Delivery):
                return waiting.event
            neighbour = self._neighbours.get(waiting.event.sender)
            if neighbour is not None and neighbour.link.inbox is waiting.inbox:  # else its sender is no more
                neighbour.link.consume(waiting.event.service, self._loop.time())
                self._wake(neighbour)
                self._taken_bytes += sum(buffer.nbytes for buffer in waiting.event.buffers)
                return waiting.event

    def allow(self, keys: Iterable[PublicKey]) -> None:
        self._allowed = {peer_of(key): key for key in keys}
        for peer in tuple(self._neighbours):
            if peer not in self._allowed and peer not in self._admitted:
                self.drop(peer, "no longer allowed")

    def dial(self, peer: PeerId, addresses: Sequence[str], greeting: bytes = b"") -> None:
        assert addresses, "nowhere to dial"
        assert not isinstance(addresses, str), "one address is a sequence of one"
        if peer not in self._allowed:
            raise LinkError(f"{peer} cannot be dialled: its key is not among the allowed ones")
        if len(greeting) > GREETING_BYTES:
            raise LinkError(f"a greeting of {len(greeting)} bytes is over the limit of {GREETING_BYTES}")
        neighbour = self._neighbour(peer)
        if neighbour.dial is not None:
            self._stop_dialling(neighbour.dial)
        neighbour.dial = Dial(self._allowed[peer], tuple(addresses), greeting)
        self._attempt(neighbour)

    def redial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        neighbour = self._neighbours.get(peer)
        if neighbour is None or neighbour.connection is None or neighbour.redial is not None:
            return  # it is dialled anyway, or looked for
        neighbour.redial = Dial(self._allowed[peer], tuple(addresses), b"")
        self._open_attempt(neighbour, neighbour.redial)

    def drop(self, peer: PeerId, reason: str) -> None:
        self._admitted.discard(peer)
        neighbour = self._neighbours.pop(peer, None)
        if neighbour is None:
            return
        for dial in (neighbour.dial, neighbour.redial):
            if dial is not None:
                self._stop_dialling(dial)
        neighbour.fail(LinkError(f"{peer} was dropped: {reason}"))
        if neighbour.connection is not None:
            self._say_bye(neighbour.connection, reason)
            self._put_down(neighbour, reason)

    def connected(self) -> frozenset[PeerId]:
        return frozenset(peer for peer, one in self._neighbours.items() if one.connection is not None)

    @abstractmethod
    async def answers(self, key: PublicKey, address: str) -> bool: ...

    @abstractmethod
    def _open(self, peer: PeerId, key: PublicKey, address: str) -> Connection:
        """Start connecting and return at once; LinkError when the address cannot be used."""

    def _is_behind(self, _connection: Connection | None) -> bool:
        """Whether something that came over this connection, or beside it, lies unread for a while."""
        return False

    def _may_connect(self, peer: PeerId) -> bool:
        """Whether this key may finish the handshake; with `admit` its greeting is still to be judged."""
        return self._admit is not None or peer in self._allowed

    def _arrived(self, connection: Connection, frames: Sequence[memoryview]) -> None:
        """Accept what came over a connection; a neighbour that talks nonsense is dropped with the reason."""
        neighbour = self._neighbours.get(connection.peer)
        try:
            head = decode_frame(frames)
            if isinstance(head, Bye):
                self._lost(
                    connection, f"{connection.peer} says: {show_plainly(head.reason)}", is_refusal=True
                )
            elif isinstance(head, Greeting):
                self._greeted(connection, head)
            elif neighbour is None or neighbour.connection is not connection:
                self._refuse(connection, "say hello first")
            else:
                message = neighbour.link.receive(head, frames[1:], self._loop.time())
                if message is not None:
                    self._emit(Delivery(connection.peer, *message), neighbour.link.inbox)
                self._fill(neighbour)
        except ProtocolError as error:
            self._refuse(connection, str(error))

    def _lost(self, connection: Connection, reason: str, is_refusal: bool = False) -> None:
        """Record that a connection has ended or never came to be."""
        connection.close()
        neighbour = self._neighbours.get(connection.peer)
        if neighbour is None:
            return
        if neighbour.connection is connection:
            self._put_down(neighbour, reason)
            self._pause(neighbour, was_up=True)
            return
        for dial in (neighbour.dial, neighbour.redial):
            if dial is not None and dial.attempt is connection:
                self._stop_dialling(dial)
                self._fail_attempt(neighbour, dial, reason, is_refusal)

    def _fail_attempt(self, neighbour: Neighbour, dial: Dial, reason: str, is_refusal: bool = False) -> None:
        """Dial again after a pause; a dial that only looks for another way tries each address once."""
        if dial is neighbour.redial:
            dial.turn += 1
            if dial.turn < len(dial.addresses):
                self._open_attempt(neighbour, dial)
            else:
                neighbour.redial = None
        elif neighbour.connection is None:
            self._emit(DialFailed(neighbour.peer, reason, is_refusal, dial.address))
            self._pause(neighbour)

    def _greeted(self, connection: Connection, hello: Greeting) -> None:
        reason = self._reason_against(connection, hello)
        if reason is not None:
            self._refuse(connection, reason)
            return
        neighbour = self._neighbour(connection.peer)
        replaced = neighbour.connection
        is_new = neighbour.link.connect(hello, self._loop.time())
        is_redial = neighbour.redial is not None and neighbour.redial.attempt is connection
        address = self._end_attempt(neighbour, connection)
        if replaced is not None and is_new:
            self._put_down(neighbour, "started anew")
        elif replaced is not None:
            replaced.close()
        neighbour.connection = connection
        neighbour.link.is_up = True
        if replaced is None or is_new or is_redial:
            self._emit(LinkUp(connection.peer, is_new, address))
        if replaced is None or is_new:
            neighbour.up_since = self._loop.time()
            neighbour.timer = self._loop.call_later(self._timeouts.tick_seconds, self._tick, neighbour)
        if not connection.is_dialled:
            self._try_send(connection, neighbour.link.hello())
        self._fill(neighbour)

    def _end_attempt(self, neighbour: Neighbour, connection: Connection) -> str | None:
        """Return where a connection was dialled, if it was here; dial there first when it is lost."""
        found = (dial for dial in (neighbour.dial, neighbour.redial) if dial and dial.attempt is connection)
        dial = next(found, None)
        if dial is None:
            return None
        dial.attempt = None
        self._stop_dialling(dial)
        if dial is neighbour.redial:
            neighbour.redial = None
            if neighbour.dial is not None:
                self._stop_dialling(neighbour.dial)
                neighbour.dial.turn_to(dial.address)
        return dial.address

    def _reason_against(self, connection: Connection, hello: Greeting) -> str | None:
        peer = connection.peer
        if hello.version != FRAME_VERSION:
            return f"it speaks protocol {hello.version}, this side {FRAME_VERSION}: update the older one"
        if peer not in self._allowed and peer not in self._admitted:
            reason = (
                self._admit(peer, hello.greeting) if self._admit else "its key is not among the allowed ones"
            )
            if reason is not None:
                return reason
            self._admitted.add(peer)
        neighbour = self._neighbours.get(peer)
        current = neighbour.connection if neighbour is not None else None
        if current is connection:
            raise ProtocolError("a second hello on one connection")
        # Both sides dialled at once: both keep what the smaller id dialled.
        is_twin = current is not None and connection.is_dialled != current.is_dialled
        return "already connected" if is_twin and connection.is_dialled != (self.peer < peer) else None

    def _tick(self, neighbour: Neighbour) -> None:
        reason = neighbour.link.tick(self._loop.time(), lambda: self._is_behind(neighbour.connection))
        if reason is not None and neighbour.connection is not None:
            self._refuse(neighbour.connection, reason)
            return
        neighbour.timer = self._loop.call_later(self._timeouts.tick_seconds, self._tick, neighbour)
        self._wake(neighbour)

    def _fill(self, neighbour: Neighbour) -> None:
        neighbour.fill()
        self._wake(neighbour)

    def _wake(self, neighbour: Neighbour) -> None:
        if not neighbour.is_awake:
            neighbour.is_awake = True
            self._loop.call_soon(self._pump, neighbour)

    def _pump(self, neighbour: Neighbour) -> None:
        neighbour.is_awake = False
        while neighbour.connection is not None:
            now = self._loop.time()
            wait = self._upload.wait_seconds(now)
            frames = neighbour.link.next_frames(now, is_held=wait > 0)
            if frames is None:
                self._plan_pump(neighbour)
                if wait > 0 and self._more_timer is None:
                    self._more_timer = self._loop.call_later(wait, self._send_more)
                return
            if wait == 0 and len(frames) > 1:
                neighbour.fed_at = now
            if not self._try_send(neighbour.connection, frames):
                return

    def _send_more(self) -> None:
        """Spend what may leave again: on the most urgent of all links, and on them in turn."""
        self._more_timer = None
        waiting = sorted(self._neighbours.values(), key=lambda each: (each.link.outbox.urgency, each.fed_at))
        for neighbour in waiting:
            self._pump(neighbour)

    def _plan_pump(self, neighbour: Neighbour) -> None:
        """Come back when what may not go yet may, or must be confirmed."""
        if neighbour.pump_timer is not None:
            neighbour.pump_timer.cancel()
        due = neighbour.link.due
        neighbour.pump_timer = self._loop.call_at(due, self._pump, neighbour) if due < inf else None

    def _try_send(self, connection: Connection, frames: Frames) -> bool:
        self._upload.pay(frames, self._loop.time())
        try:
            connection.send(frames)
        except LinkError as error:
            self._lost(connection, str(error))
            return False
        return True

    def _refuse(self, connection: Connection, reason: str) -> None:
        self._say_bye(connection, reason)
        self._lost(connection, reason)

    def _say_bye(self, connection: Connection, reason: str) -> None:
        try:
            connection.send([encode_frame(Bye(reason[:500]))])
        except LinkError:
            logger.debug("%s is gone already: %s", connection.peer, reason)

    def _put_down(self, neighbour: Neighbour, reason: str) -> None:
        assert neighbour.connection is not None
        neighbour.connection.close()
        neighbour.connection = None
        neighbour.link.disconnect()
        for timer in (neighbour.timer, neighbour.pump_timer):
            if timer is not None:
                timer.cancel()
        neighbour.pump_timer = None
        self._emit(LinkDown(neighbour.peer, reason))

    def _attempt(self, neighbour: Neighbour) -> None:
        if neighbour.dial is not None and neighbour.connection is None:
            self._open_attempt(neighbour, neighbour.dial)

    def _open_attempt(self, neighbour: Neighbour, dial: Dial) -> None:
        try:
            attempt = self._open(neighbour.peer, dial.key, dial.address)
        except LinkError as error:
            self._fail_attempt(neighbour, dial, str(error))
            return
        dial.attempt = attempt
        seconds = dial.patience_seconds(self._timeouts)
        dial.timer = self._loop.call_later(seconds, self._lost, attempt, f"no answer within {seconds:.0f} s")
        self._try_send(attempt, neighbour.link.hello(dial.greeting))

    def _pause(self, neighbour: Neighbour, *, was_up: bool = False) -> None:
        """Dial again after a pause, which doubles until a link has held."""
        dial = neighbour.dial
        if dial is None:
            return
        lived_since = self._loop.time() - self._timeouts.good_link_seconds
        if neighbour.up_since is not None and neighbour.up_since < lived_since:
            dial.num_failures = 0
        neighbour.up_since = None
        pause = dial.fail(self._timeouts, was_up=was_up)
        dial.timer = self._loop.call_later(pause * self._random.uniform(0.5, 1.0), self._attempt, neighbour)

    def _stop_dialling(self, dial: Dial) -> None:
        if dial.timer is not None:
            dial.timer.cancel()
        attempt, dial.attempt = dial.attempt, None
        if attempt is not None:
            attempt.close()

    def _neighbour(self, peer: PeerId) -> Neighbour:
        if peer not in self._allowed and peer not in self._admitted:
            raise LinkError(f"nothing can be sent to {peer}: its key is not among the allowed ones")
        if peer not in self._neighbours:
            self._neighbours[peer] = Neighbour(peer, Link(self._random.randrange(1, 2**62), self._limits))
        return self._neighbours[peer]

    def _emit(self, event: TransportEvent, inbox: ReceiveStream | None = None) -> None:
        if not isinstance(event, Delivery):
            logger.info("%s", event)
        self._num_events += 1
        priority = event.service if isinstance(event, Delivery) else -1
        self._events.put_nowait(UnreadEvent(priority, self._num_events, event, inbox))


async def any_answers(questions: Iterable[Coroutine[Any, Any, bool]]) -> bool:
    """Return whether one of these is answered with yes, as soon as one is."""
    asked = [asyncio.ensure_future(each) for each in questions]
    try:
        for each in asyncio.as_completed(asked):
            if await each:
                return True
    finally:
        for task in asked:
            task.cancel()
    return False
