"""A provider's peer from joining to leaving: one event loop that talks; what computes is in peer.compute.

It joins the hub, follows the plan it is given, fetches its stage, and then moves parcels between its host and
its neighbours. It drops messages of another build_id or from nobody in the plan.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ravnest.config import TIMEOUTS, Timeouts
from ravnest.errors import LinkError, NotAdmitted, ProtocolError, RavnestError
from ravnest.ids import HUB, NodeId
from ravnest.net.identity import KeyPair, Token, dialled_from_here, is_loopback, peer_of, prove, split_address
from ravnest.net.relay import RelayAddress
from ravnest.net.transport import (
    Delivery,
    DialFailed,
    LinkDown,
    LinkUp,
    PeerId,
    PublicKey,
    Service,
    Transport,
)
from ravnest.peer.compute import Compute, ComputeThread, Delivered
from ravnest.peer.connections import Acquaintance, Connections
from ravnest.peer.fetcher import Fetcher
from ravnest.peer.stage_host import ProviderLimits
from ravnest.plan.types import Node
from ravnest.protocol import wire
from ravnest.protocol.averaging import RoundAbort, RoundCommit, RoundOpen
from ravnest.protocol.membership import (
    PROTOCOL_VERSION,
    Complaint,
    Fact,
    Hello,
    Leave,
    ProbeOrder,
    Refused,
    Stop,
    Welcome,
)
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.placement import (
    BackupOrder,
    PlanOrder,
    RingOrder,
    SnapshotOrder,
    StageParts,
    StageReady,
)
from ravnest.protocol.tensors import Buffer
from ravnest.protocol.training import FieldParts, LearningRate, LeaseGrant
from ravnest.transfer.exchange import ContentMessage
from ravnest.transfer.outbox import Outbox, Outgoing

logger = logging.getLogger(__name__)

_Order = Welcome | PlanOrder | RingOrder | StageParts | SnapshotOrder | BackupOrder | ProbeOrder | Stop
_OfHub = _Order | LeaseGrant | FieldParts | LearningRate | RoundOpen | RoundCommit | RoundAbort


@dataclass(frozen=True, slots=True)
class Offer:
    """What a provider brings: facts for the planner, limits, where others dial it, how long it waits."""

    node: Node
    limits: ProviderLimits
    addresses: tuple[str, ...]
    patience_seconds: float = 60.0  # without the hub, before it gives up
    door: str | None = None  # where it listens; others may not know
    guessed: tuple[Fact, ...] = ()  # facts that the hub shall have measured


class Agent:
    """One provider's PC in one swarm."""

    def __init__(
        self,
        token: Token,
        keys: KeyPair,
        offer: Offer,
        compute: Compute | None = None,
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        self._timeouts = timeouts
        self._token = token
        self._keys = keys
        self._offer = offer
        self._compute = compute or ComputeThread(timeouts.peer)
        self._hub = peer_of(PublicKey(token.hub_key))
        around = (self._start, lambda: self._peers, self._post, self._compute.put, self._fail)
        self._fetcher = Fetcher(*around, timeouts.peer)
        self._blobs = self._fetcher.blobs
        self._leaving: str | RavnestError | None = None  # why, once it wants to
        self._hub_address = ""  # the one that answered
        self._relay: RelayAddress | None = None
        self._tried: dict[str, str] = {}  # the hub's addresses, and why there is no link
        self._order: PlanOrder | None = None
        self._held_build_id = 0  # of the stage that is built, or held
        self._peers: dict[NodeId, PeerId] = {HUB: self._hub}
        self._background: set[asyncio.Task[None]] = set()
        self._patience: asyncio.TimerHandle | None = None

    async def run(self, transport: Transport) -> str:
        """Take part until the hub ends the job, and return why it did; or raise what ended it here."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str | RavnestError] = self._loop.create_future()
        greeting = self._keys.public + prove(self._token, self._keys.public)
        transport.allow([PublicKey(self._token.hub_key)])
        transport.dial(self._hub, self._token.addresses, greeting)
        self._miss_hub()
        door = None if self._offer.door is None else split_address(dialled_from_here(self._offer.door))
        is_reachable = bool(self._offer.addresses)
        self._meetings = Connections(
            transport,
            door,
            is_reachable=is_reachable,
            start=self._start,
            give_up=self._lose_mate,
            timeouts=self._timeouts,
        )
        self._outbox = Outbox(transport, self._start, lambda node: self._peers.get(node), self._lose_link)
        self._outbox.pause(HUB)  # until there is a link
        with self._fetcher.store:
            return await self._take_part()

    async def _take_part(self) -> str:
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
                self._meetings.close()
                for task in tuple(self._background):
                    task.cancel()
        if isinstance(ended, RavnestError):  # not within the group, which would wrap it
            raise ended
        return ended

    def leave(self, reason: str) -> None:
        """Tell the hub that the provider takes this PC back, and end when it has; a second time, at once."""
        if self._leaving is not None:
            self._end(reason)
        elif self._hub in self._transport.connected():
            self._start(self._hand_over(reason))
        else:
            self._start(self._leave(reason))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _end(self, why: str | RavnestError) -> None:
        if not self._ended.done():
            self._ended.set_result(why)

    def _fail(self, error: RavnestError) -> None:
        self._start(self._leave(error))

    async def _hand_over(self, reason: str) -> None:
        """Go on as before until the hub has found who takes over, but not for long."""
        self._leaving = reason
        self._post(Outgoing(HUB, Leave(self._build_id, reason, can_hand_over=True)))
        await asyncio.wait([self._ended], timeout=self._timeouts.peer.handover.total_seconds)
        self._end(reason)

    async def _leave(self, why: str | RavnestError) -> None:
        """Tell the hub why this peer goes, and go when it has heard."""
        self._leaving = why
        message = wire.pack(Leave(self._build_id, str(why)))
        try:
            await self._transport.send(self._hub, Service.CONTROL, message)
        except LinkError as lost:
            logger.debug("the hub is not told: %s", lost)
        if self._hub in self._transport.connected():
            await asyncio.wait([self._ended], timeout=self._timeouts.peer.parting_seconds)
        self._end(why)

    @property
    def _build_id(self) -> int:
        return self._order.build_id if self._order is not None else 0

    async def _listen(self) -> None:
        while True:
            match event := await self._transport.receive():
                case Delivery():
                    self._open(event)
                case LinkUp(self._hub, is_new, address):
                    self._hub_address = address or self._hub_address
                    self._find_hub()
                    self._outbox.resume(HUB, is_new=is_new)
                    if is_new:
                        self._say_hello()
                case DialFailed():
                    self._note_failure(event)
                case LinkDown(self._hub, reason):
                    logger.warning("the hub is lost: %s; dialling it again", reason)
                    self._tried = {self._hub_address: reason}
                    self._outbox.pause(HUB)
                    self._miss_hub()
                case LinkDown(peer, reason):
                    logger.info("a neighbour is lost: %s; dialling it again", reason)
                    self._meetings.notice_loss(peer)
                case _:
                    logger.debug("%s", event)

    def _note_failure(self, failed: DialFailed) -> None:
        if failed.peer != self._hub:
            self._meetings.notice_failure(failed.peer, failed.address, failed.reason)
        elif failed.is_refusal:
            self._end(NotAdmitted(f"the hub does not let this peer in: {failed.reason}"))
        elif self._tried.get(failed.address) != failed.reason:
            self._tried[failed.address] = failed.reason
            logger.info("no way to the hub at %s yet: %s", failed.address, failed.reason)

    def _say_hello(self) -> None:
        """Ask to join; who is on the hub's own PC can be dialled there by others who are, too."""
        is_here = is_loopback(self._hub_address)
        known = (each for each in self._offer.addresses if is_here or not is_loopback(each))
        addresses = tuple(sorted(known, key=lambda each: not is_loopback(each)))
        proof = prove(self._token, self._keys.public)
        hello = Hello(
            PROTOCOL_VERSION,
            proof,
            self._offer.node,
            addresses,
            self._offer.guessed,
            build_id=self._held_build_id,
        )
        self._post(Outgoing(HUB, hello))

    def _miss_hub(self) -> None:
        self._patience = self._loop.call_later(self._offer.patience_seconds, self._give_up)

    def _find_hub(self) -> None:
        if self._patience is not None:
            self._patience.cancel()

    def _give_up(self) -> None:
        tried = dict.fromkeys(self._token.addresses, "no answer") | self._tried
        if len(tried) == 1:
            ((where, reason),) = tried.items()
            told = f"the hub at {where} cannot be reached: {reason}"
        else:
            told = "the hub cannot be reached: " + ", ".join(
                f"at {where} {reason}" for where, reason in tried.items()
            )
        self._end(LinkError(f"{told}; is it running, and can this PC reach it there?"))

    def _open(self, delivery: Delivery) -> None:
        """Read a delivery; whoever sends nonsense is dropped."""
        try:
            message = wire.unpack(delivery.header, delivery.buffers)
            refusal = self._take(delivery.sender, message, delivery.buffers)
        except ProtocolError as error:
            self._drop(delivery.sender, error)
            return
        if refusal is not None:
            logger.debug("%s from %s: %s", type(message).__name__, delivery.sender, refusal.reason)

    def _drop(self, sender: PeerId, error: ProtocolError) -> None:
        logger.warning("dropping %s: %s", sender, error)
        if sender == self._hub:
            self._end(ProtocolError(f"the hub says what this version of ravnest does not know: {error}"))
            return
        self._transport.drop(sender, str(error))
        node = self._node(sender)
        if node is not None:
            self._post(Outgoing(HUB, Complaint(self._build_id, node, str(error))))

    def _node(self, sender: PeerId) -> NodeId | None:
        return next((node for node, peer in self._peers.items() if peer == sender), None)

    def _take(self, sender: PeerId, message: Message, buffers: Sequence[Buffer]) -> Refusal | None:
        node, build_id = self._node(sender), self._build_id
        if node is None:
            return Refusal("the sender is not in the plan")
        named = getattr(message, "build_id", build_id)
        if named != build_id and not isinstance(message, PlanOrder):
            return Refusal(f"it is of build_id {named}, here is {build_id}")
        if isinstance(message, _OfHub) and node != HUB:
            return Refusal(f"only the hub says that, not {node}")
        if isinstance(message, Refused) and node == HUB and not message.blob:
            self._end(NotAdmitted(f"the hub does not let this peer in: {message.reason}"))
        elif isinstance(message, ContentMessage):
            return self._fetcher.receive(node, message, buffers)
        elif isinstance(message, _Order):
            self._follow(message)
        else:
            self._compute.put(Delivered(message, buffers, node, build_id))
        return None

    def _follow(self, message: _Order) -> None:
        """Do what the hub says."""
        match message:
            case Welcome(node):
                if message.relay_port:
                    self._relay = (split_address(self._hub_address)[0], message.relay_port)
                logger.info("joined as %s", node)
            case PlanOrder():
                self._follow_plan(message)
            case RingOrder():
                self._follow_rings(message)
            case StageParts() | BackupOrder() | ProbeOrder():
                self._fetcher.follow(message, lambda: self._order)
            case SnapshotOrder():
                self._compute.put(message)
            case Stop(reason):
                self._end(self._leaving or reason)

    def _follow_plan(self, order: PlanOrder) -> None:
        """Begin anew in another place: nothing of the one before is fetched any more, or answered."""
        self._fetcher.forget(StageParts)
        if order.stage is None:
            self._held_build_id = 0
        self._meet(order)
        stage = order.stage
        part = "spare" if stage is None else f"positions {stage.start} to {stage.stop}"
        logger.info("plan %d: %s", order.plan_id, part)
        self._compute.put(order)

    def _follow_rings(self, order: RingOrder) -> None:
        """Train on among the same neighbours, with other contacts, and average in other rings if they are."""
        if self._order is None:
            return
        is_new = order.plan_id > self._order.plan_id
        rings = {"plan_id": order.plan_id, "rings": order.rings} if is_new else {}
        self._meet(replace(self._order, contacts=order.contacts, **rings))  # type: ignore[arg-type]
        if is_new:
            self._compute.put(order)

    def _meet(self, order: PlanOrder) -> None:
        """Know the neighbours of a plan, and no others."""
        self._order = order
        keys = {contact.node: PublicKey(contact.key.encode()) for contact in order.contacts}
        self._peers = {**{node: peer_of(key) for node, key in keys.items()}, HUB: self._hub}
        self._transport.allow([PublicKey(self._token.hub_key), *keys.values()])
        mates = [Acquaintance(peer_of(keys[x.node]), x.addresses, x.ticket, x.node) for x in order.contacts]
        self._meetings.meet(mates, self._relay, order.pipeline)

    def _lose_mate(self, reason: str) -> None:
        if self._hub in self._transport.connected():  # else nobody could plan anew
            self._fail(LinkError(reason))

    def _lose_link(self, peer: PeerId, error: LinkError) -> None:
        """Leave if the hub takes no message; a neighbour that is away is noticed by the connections."""
        if peer == self._hub:
            self._fail(error)

    def _post(self, outgoing: Outgoing) -> None:
        if isinstance(outgoing.message, StageReady):
            self._held_build_id = outgoing.message.build_id
        self._outbox.post(outgoing)
