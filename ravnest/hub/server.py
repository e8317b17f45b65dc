"""The hub's program: it lets peers in, feeds what happens to hub.state, and carries out what that orders.

Weights and data stay with the requester's side (an Owner); the hub cuts nothing and reads no tensor. Blobs go
out piece by piece on demand. Driven by job.swarm, in the requester's process.
"""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ravnest import wire
from ravnest.errors import LinkError, ProtocolError, RavnestError
from ravnest.exchange import VERSION, Blobs, Parcel, prove
from ravnest.hub.events import (
    Collect,
    Collected,
    Event,
    Finish,
    JobGiven,
    MakeParts,
    News,
    Order,
    PartsMade,
    PeerJoined,
    PeerLeft,
    Received,
    Send,
    SendFields,
    Tell,
    Tick,
)
from ravnest.hub.state import Hub
from ravnest.net.identity import Token, peer_of
from ravnest.net.transport import (
    Buffer,
    Delivery,
    LinkDown,
    LinkUp,
    PeerId,
    PublicKey,
    Service,
    Transport,
)
from ravnest.plan.types import NodeId
from ravnest.protocol import (
    BatchId,
    BlobPart,
    BlobRequest,
    FieldParts,
    Hello,
    Message,
    Refusal,
    Refused,
    Stop,
    TensorSpec,
    Welcome,
)

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
GRACE_SECONDS = 5.0  # a peer whose link is lost may come back
PART_SECONDS = 5.0  # at the end, for all to leave
_KEY_BYTES = 40


@dataclass(frozen=True, slots=True)
class Parts:
    """A stage as bytes: how it is trained and its blueprint, its weights, the fields it consumes."""

    blueprint: bytes
    weights: bytes
    train_fields: tuple[str, ...]
    evaluation_fields: tuple[str, ...]


Fields = tuple[tuple[tuple[str, TensorSpec], ...], tuple[memoryview, ...]]


_Outcome = tuple[Finish, list[bytes]]


class Owner(Protocol):
    """The requester's side, where model and data are."""

    def make_parts(self, start: int, stop: int) -> Parts:
        """Cut the stage [start, stop) of the line."""

    def read_fields(self, is_evaluation: bool, samples: Sequence[int], names: Sequence[str]) -> Fields:
        """Return these fields of a batch as they travel."""


class Server:
    """One job's hub. `admit` belongs to the transport it runs on; `token` needs no address here."""

    def __init__(
        self,
        token: Token,
        tell: Callable[[News], None],
        in_background: Callable[..., Any] = asyncio.to_thread,
    ) -> None:
        self._token = token
        self._tell = tell
        self._in_background = in_background  # runs a function of the owner's where it delays no message
        self._hub = Hub()
        self._blobs = Blobs()
        self._keys: dict[PeerId, PublicKey] = {}
        self._names: dict[PeerId, NodeId] = {}
        self._outboxes: dict[NodeId, asyncio.Queue[Parcel]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._absent: dict[PeerId, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None

    def admit(self, peer: PeerId, greeting: bytes) -> str | None:
        """Return why a peer may not come in; None if it knows the token's secret."""
        key = PublicKey(bytes(greeting[:_KEY_BYTES]))
        if len(greeting) != _KEY_BYTES + 32 or peer_of(key) != peer:
            return "its greeting is not that of this version of ravnest"
        if not hmac.compare_digest(bytes(greeting[_KEY_BYTES:]), prove(self._token, key)):
            return "its token is not for this hub, or no longer: ask for a new one"
        self._keys[peer] = key
        return None

    async def run(self, transport: Transport, owner: Owner, job: JobGiven) -> _Outcome:
        """Train the job to its end; return what was kept and the weights of each part."""
        self._transport = transport
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[_Outcome | RavnestError] = self._loop.create_future()
        self._parting: asyncio.Future[None] | None = None
        async with asyncio.TaskGroup() as self._tasks:
            self._start(self._listen())
            self._apply(replace(job, now=self._loop.time()))
            try:
                outcome = await self._result
            finally:
                await self._part()
                for timer in (self._timer, *self._absent.values()):
                    if timer is not None:
                        timer.cancel()
                for task in tuple(self._background):
                    task.cancel()
        if isinstance(outcome, RavnestError):  # not within the group, which would wrap it
            raise outcome
        return outcome

    def fail(self, error: RavnestError) -> None:
        """End the job with an error."""
        if not self._result.done():
            self._result.set_result(error)

    async def _part(self) -> None:
        """Tell everyone that it is over, and wait until they have left."""
        present = self._transport.connected() & self._names.keys()
        self._names = {peer: name for peer, name in self._names.items() if peer in present}
        self._parting = self._loop.create_future()
        is_done = self._result.done() and not self._result.cancelled()
        has_failed = not is_done or isinstance(self._result.result(), RavnestError)
        reason = "the job has failed" if has_failed else "the job is done"
        for name in self._names.values():
            self._post(Parcel(name, Stop(reason)))
        if self._names:
            await asyncio.wait([self._parting], timeout=PART_SECONDS)

    async def _listen(self) -> None:
        while True:
            match await self._transport.receive():
                case Delivery() as delivery:
                    self._open(delivery)
                case LinkDown(peer, reason) if peer in self._names:
                    self._miss(peer, reason)
                case LinkUp(peer, is_new) if peer in self._absent:
                    self._absent.pop(peer).cancel()
                    if is_new:
                        self._forget(peer, "it started anew")

    def _miss(self, peer: PeerId, reason: str) -> None:
        """Give a peer whose link is lost a moment to come back."""
        if self._parting is None:
            self._absent[peer] = self._loop.call_later(GRACE_SECONDS, self._forget, peer, reason)
            return
        self._names.pop(peer, None)
        if not self._names and not self._parting.done():
            self._parting.set_result(None)

    def _open(self, delivery: Delivery) -> None:
        try:
            message = wire.unpack(delivery.header, delivery.buffers)
        except ProtocolError as error:
            self._forget(delivery.sender, str(error))
            return
        name = self._names.get(delivery.sender)
        if isinstance(message, Hello):
            self._welcome(delivery.sender, message)
        elif name is None:
            logger.debug("%s from %s, which has not joined", type(message).__name__, delivery.sender)
        else:
            self._take(name, message, delivery.buffers)

    def _welcome(self, peer: PeerId, hello: Hello) -> None:
        """Take a peer in under a name that nobody else has."""
        if peer in self._names:
            return
        if hello.version != VERSION:
            reason = f"it speaks version {hello.version} of ravnest, this hub {VERSION}: update the older one"
            header = wire.pack(Refused(reason))
            self._start(self._transport.send(peer, Service.CONTROL, header))
            return
        name = hello.node.name
        if name in self._names.values():
            name = NodeId(f"{name}-{peer[:4]}")
        self._names[peer] = name
        self._post(Parcel(name, Welcome(name, HEARTBEAT_SECONDS)))
        node = replace(hello.node, name=name)
        key = self._keys[peer].decode()
        self._apply(PeerJoined(node, key, hello.addresses, self._loop.time()))

    def _forget(self, peer: PeerId, reason: str) -> None:
        """Let a peer go; if it comes back it is a new one."""
        name = self._names.pop(peer, None)
        if peer in self._absent:
            self._absent.pop(peer).cancel()
        self._transport.drop(peer, reason)
        if name is not None:
            self._apply(PeerLeft(name, reason, self._loop.time()))

    def _take(self, name: NodeId, message: Message, buffers: Sequence[Buffer]) -> None:
        if isinstance(message, BlobRequest):
            self._post(self._blobs.serve(name, message))
        elif isinstance(message, BlobPart):
            for parcel in _or_none(self._blobs.take(name, message, buffers[0])):
                self._post(parcel)
        elif isinstance(message, Refused):
            self._blobs.refuse(name, message.reason)
        else:
            self._apply(Received(name, message, self._loop.time()))

    def _apply(self, event: Event) -> None:
        """Let the state decide, carry out its orders, and come back when it is due."""
        for order in self._hub.apply(event):
            self._carry_out(order)
        if self._timer is not None:
            self._timer.cancel()
        due = self._hub.due
        self._timer = None if due is None else self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._apply(Tick(self._loop.time()))

    def _carry_out(self, order: Order) -> None:
        match order:
            case Send(to, message):
                self._post(Parcel(to, message))
            case MakeParts():
                self._start(self._make_parts(order))
            case SendFields():
                self._start(self._send_fields(order))
            case Collect():
                self._start(self._collect(order))
            case Tell(news):
                self._tell(news)
            case Finish():
                self._finish(order)
            case Refusal(reason):
                logger.debug("refused: %s", reason)

    def _start(self, work: Awaitable[None]) -> None:
        task = self._tasks.create_task(self._try(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _try(self, work: Awaitable[None]) -> None:
        try:
            await work
        except RavnestError as error:
            self.fail(error)

    async def _make_parts(self, order: MakeParts) -> None:
        parts = await self._in_background(self._owner.make_parts, order.start, order.stop)
        blueprint, weights = self._blobs.keep(parts.blueprint), self._blobs.keep(parts.weights)
        made = PartsMade(
            order.start,
            order.stop,
            blueprint,
            weights,
            parts.train_fields,
            parts.evaluation_fields,
            self._loop.time(),
        )
        self._apply(made)

    async def _send_fields(self, order: SendFields) -> None:
        for number, samples in enumerate(order.samples, order.first_batch):
            for node, names in order.consumers:
                read = self._owner.read_fields
                specs, buffers = await self._in_background(read, order.is_evaluation, samples, names)
                self._post(Parcel(node, FieldParts(order.epoch, BatchId(number), specs), buffers))

    async def _collect(self, order: Collect) -> None:
        """Fetch the weights of the result from who has them."""
        for part in order.parts:
            arrived: asyncio.Future[bytes | Refusal] = self._loop.create_future()
            for parcel in self._blobs.want(part.parts.weights, part.node, arrived.set_result):
                self._post(parcel)
            found = await arrived
            if isinstance(found, Refusal):
                raise LinkError(f"the weights of {part.node} cannot be fetched: {found.reason}")
        self._apply(Collected(order.number, self._loop.time()))

    def _finish(self, order: Finish) -> None:
        if not self._result.done():
            contents = [self._blobs.kept(part.parts.weights) for part in order.parts]
            self._result.set_result((order, contents))

    def _post(self, parcel: Parcel) -> None:
        if parcel.to not in self._outboxes:
            self._outboxes[parcel.to] = asyncio.Queue()
            self._start(self._send_all(parcel.to))
        self._outboxes[parcel.to].put_nowait(parcel)

    async def _send_all(self, node: NodeId) -> None:
        while True:
            parcel = await self._outboxes[node].get()
            peer = next((peer for peer, name in self._names.items() if name == node), None)
            if peer is None:
                continue  # it has gone
            try:
                header = wire.pack(parcel.message, parcel.buffers)
                await self._transport.send(peer, parcel.service, header, parcel.buffers)
            except LinkError as error:
                self._forget(peer, str(error))


def _or_none(found: list[Parcel] | Refusal) -> list[Parcel]:
    if isinstance(found, Refusal):
        logger.debug("%s", found.reason)
        return []
    return found
