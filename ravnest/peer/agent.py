"""A provider's peer from joining to leaving: one event loop that talks; what computes is in peer.compute.

It joins the hub, follows the plan it is given, fetches its stage, and then moves parcels between its host and
its neighbours. It is the one gate that drops messages of another plan or from nobody in it. Driven by the
command `ravnest join`.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from ravnest import wire
from ravnest.errors import LinkError, NotAdmitted, ProtocolError, RavnestError
from ravnest.exchange import HUB, VERSION, Blobs, Parcel, prove
from ravnest.net.identity import KeyPair, Token, peer_of
from ravnest.net.transport import (
    Buffer,
    Delivery,
    DialFailed,
    LinkDown,
    LinkUp,
    PeerId,
    PublicKey,
    Service,
    Transport,
)
from ravnest.peer.compute import Build, Compute, ComputeThread, Delivered
from ravnest.peer.host import Limits
from ravnest.plan.types import Node, NodeId
from ravnest.protocol import (
    BlobPart,
    BlobRequest,
    FieldParts,
    Hello,
    LearningRate,
    LeaseGrant,
    Leave,
    Message,
    PlanOrder,
    Refusal,
    Refused,
    RoundAbort,
    RoundCommit,
    RoundOpen,
    SnapshotOrder,
    StageParts,
    Stop,
    Welcome,
)

logger = logging.getLogger(__name__)

_Order = Welcome | PlanOrder | StageParts | SnapshotOrder | Stop
_OfHub = _Order | LeaseGrant | FieldParts | LearningRate | RoundOpen | RoundCommit | RoundAbort


@dataclass(frozen=True, slots=True)
class Offer:
    """What a provider brings: facts for the planner, limits, where others dial it, how long it waits."""

    node: Node
    limits: Limits
    addresses: tuple[str, ...]
    patience_seconds: float = 60.0  # without the hub, before it gives up


class Agent:
    """One provider's PC in one swarm."""

    def __init__(self, token: Token, keys: KeyPair, offer: Offer, compute: Compute | None = None) -> None:
        self._token = token
        self._keys = keys
        self._offer = offer
        self._compute = compute or ComputeThread()
        self._hub = peer_of(PublicKey(token.hub_key))
        self._blobs = Blobs()
        self._is_joined = False
        self._order: PlanOrder | None = None
        self._peers: dict[NodeId, PeerId] = {HUB: self._hub}
        self._outboxes: dict[NodeId, asyncio.Queue[Parcel]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._patience: asyncio.TimerHandle | None = None

    async def run(self, transport: Transport) -> str:
        """Take part until the hub ends the job, and return why it did; or raise what ended it here."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str | RavnestError] = self._loop.create_future()
        greeting = self._keys.public + prove(self._token, self._keys.public)
        transport.allow([PublicKey(self._token.hub_key)])
        transport.dial(self._hub, self._token.addresses[0], greeting)
        self._miss_hub("no answer")
        async with asyncio.TaskGroup() as self._tasks:
            self._start(self._listen())
            run = self._compute.run(self._offer.limits, self._blobs, self._post, self._fail)
            computing = self._tasks.create_task(run)
            try:
                ended = await self._ended
            finally:
                self._compute.close()
                await computing
                self._find_hub()
                for task in tuple(self._background):
                    task.cancel()
        if isinstance(ended, RavnestError):  # not within the group, which would wrap it
            raise ended
        return ended

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _end(self, why: str | RavnestError) -> None:
        if not self._ended.done():
            self._ended.set_result(why)

    def _fail(self, error: RavnestError) -> None:
        self._start(self._leave(error))

    async def _leave(self, error: RavnestError) -> None:
        """Tell the hub why this peer goes, then go."""
        epoch = self._order.epoch if self._order is not None else 0
        message = wire.pack(Leave(epoch, str(error)))
        try:
            await self._transport.send(self._hub, Service.CONTROL, message)
        except LinkError as lost:
            logger.debug("the hub is not told: %s", lost)
        self._end(error)

    async def _listen(self) -> None:
        while True:
            match event := await self._transport.receive():
                case Delivery():
                    self._open(event)
                case LinkUp(self._hub, is_new):
                    self._find_hub()
                    if is_new:
                        proof = prove(self._token, self._keys.public)
                        hello = Hello(VERSION, proof, self._offer.node, self._offer.addresses)
                        self._post(Parcel(HUB, hello))
                case DialFailed(self._hub, reason, is_refusal):
                    self._last_reason = reason
                    if is_refusal:
                        self._end(NotAdmitted(f"the hub does not let this peer in: {reason}"))
                case LinkDown(self._hub, reason):
                    logger.warning("the hub is lost: %s", reason)
                    self._miss_hub(reason)
                case _:
                    logger.debug("%s", event)

    def _miss_hub(self, reason: str) -> None:
        self._last_reason = reason
        self._patience = self._loop.call_later(self._offer.patience_seconds, self._give_up)

    def _find_hub(self) -> None:
        if self._patience is not None:
            self._patience.cancel()

    def _give_up(self) -> None:
        where = self._token.addresses[0]
        fix = "is it running, and can this PC reach that address?"
        self._end(LinkError(f"the hub at {where} cannot be reached: {self._last_reason}; {fix}"))

    def _open(self, delivery: Delivery) -> None:
        """Read a delivery; whoever sends nonsense is dropped."""
        try:
            message = wire.unpack(delivery.header, delivery.buffers)
            refusal = self._take(delivery.sender, message, delivery.buffers)
        except ProtocolError as error:
            logger.warning("dropping %s: %s", delivery.sender, error)
            self._transport.drop(delivery.sender, str(error))
            return
        if refusal is not None:
            logger.debug("%s from %s: %s", type(message).__name__, delivery.sender, refusal.reason)

    def _take(self, sender: PeerId, message: Message, buffers: Sequence[Buffer]) -> Refusal | None:
        node = next((node for node, peer in self._peers.items() if peer == sender), None)
        if node is None:
            return Refusal("the sender is not in the plan")
        epoch = self._order.epoch if self._order is not None else 0
        named = getattr(message, "epoch", epoch)
        if named != epoch and not isinstance(message, PlanOrder):
            return Refusal(f"it is of plan {named}, here is plan {epoch}")
        if isinstance(message, _OfHub) and node != HUB:
            return Refusal(f"only the hub says that, not {node}")
        if isinstance(message, BlobRequest):
            self._post(self._blobs.serve(node, message))
        elif isinstance(message, BlobPart):
            return self._post_all(self._blobs.take(node, message, buffers[0]))
        elif isinstance(message, Refused) and not self._is_joined:
            self._end(NotAdmitted(f"the hub does not let this peer in: {message.reason}"))
        elif isinstance(message, Refused):
            self._blobs.refuse(node, message.reason)
        elif isinstance(message, _Order):
            self._follow(message)
        else:
            self._compute.put(Delivered(message, buffers))
        return None

    def _follow(self, message: _Order) -> None:
        """Do what the hub says."""
        match message:
            case Welcome(node):
                self._is_joined = True
                logger.info("joined as %s", node)
            case PlanOrder():
                self._meet(message)
            case StageParts():
                self._start(self._fetch_stage(message))
            case SnapshotOrder():
                self._compute.put(message)
            case Stop(reason):
                self._end(reason)

    def _meet(self, order: PlanOrder) -> None:
        """Know the neighbours of a new plan, and no others."""
        self._order = order
        keys = {contact.node: PublicKey(contact.key.encode()) for contact in order.contacts}
        self._peers = {HUB: self._hub, **{node: peer_of(key) for node, key in keys.items()}}
        self._transport.allow([PublicKey(self._token.hub_key), *keys.values()])
        for contact in order.contacts:
            if contact.addresses:
                self._transport.dial(self._peers[contact.node], contact.addresses[0])
        stage = order.stage
        part = "spare" if stage is None else f"positions {stage.start} to {stage.stop}"
        logger.info("plan %d: %s", order.epoch, part)
        self._compute.put(order)

    async def _fetch_stage(self, parts: StageParts) -> None:
        order = self._order
        assert order is not None
        contents = []
        for ref in (parts.blueprint, parts.weights):
            arrived: asyncio.Future[bytes | Refusal] = self._loop.create_future()
            self._post_all(self._blobs.want(ref, HUB, arrived.set_result))
            content = await arrived
            if isinstance(content, Refusal):
                await self._leave(LinkError(f"the stage cannot be fetched: {content.reason}"))
                return
            contents.append(content)
        if order is self._order:
            self._compute.put(Build(order, parts, *contents))

    def _post_all(self, parcels: list[Parcel] | Refusal) -> Refusal | None:
        if isinstance(parcels, Refusal):
            return parcels
        for parcel in parcels:
            self._post(parcel)
        return None

    def _post(self, parcel: Parcel) -> None:
        """Queue a parcel for its receiver; each has a queue of its own, so a slow one delays no other."""
        if parcel.to not in self._outboxes:
            self._outboxes[parcel.to] = asyncio.Queue()
            self._start(self._send_all(parcel.to))
        self._outboxes[parcel.to].put_nowait(parcel)

    async def _send_all(self, node: NodeId) -> None:
        while True:
            parcel = await self._outboxes[node].get()
            peer, order = self._peers.get(node), self._order
            if peer is None:
                continue  # of an older plan
            try:
                header = wire.pack(parcel.message, parcel.buffers)
                await self._transport.send(peer, parcel.service, header, parcel.buffers)
            except LinkError as error:
                if order is self._order:  # its batch is lost and nobody knows: the hub must plan anew
                    await self._leave(error)
