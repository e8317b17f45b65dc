"""A provider's peer from joining to leaving: the event loop that talks to the hub and to other peers.

It joins the hub, follows the plan it is given, fetches its stage, and passes messages between the network and
compute. `refuse_message` is the one place that refuses late and foreign messages; `_dispatch` finds the
handler of each other one. Messages for the stage cross to compute, as peer.compute_protocol says.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, assert_never

from ravnest.config import TIMEOUTS, Timeouts
from ravnest.errors import LinkError, NotAdmitted, ProtocolError, RavnestError
from ravnest.ids import HUB, NodeId
from ravnest.net.identity import KeyPair, Token, dialled_from_here, greet, is_loopback, peer_of, split_address
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
from ravnest.peer.compute_protocol import (
    Compute,
    ComputeFailed,
    ComputeSetup,
    Delivered,
    FromCompute,
    HubLink,
    ProviderLimits,
    SnapshotWritten,
    StageBuilt,
)
from ravnest.peer.connections import Connections, PlannedPeer
from ravnest.peer.content import Fetcher
from ravnest.plan.types import Node
from ravnest.protocol import messages
from ravnest.protocol.averaging import (
    RoundAbort,
    RoundCall,
    RoundCheck,
    RoundCommit,
    RoundOpen,
    TiedCall,
    TiedGradient,
    TiedHolder,
    TiedStep,
)
from ravnest.protocol.generation import GenerationEnd, GenerationStep, GenerationValues
from ravnest.protocol.membership import (
    PROTOCOL_VERSION,
    Complaint,
    Fact,
    Hello,
    Leave,
    ProbeOrder,
    Recounted,
    Refused,
    Stop,
    Welcome,
)
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.placement import (
    BackupOrder,
    BlobPart,
    BlobRequest,
    PlanOrder,
    RingOrder,
    SketchOrder,
    SnapshotMade,
    SnapshotOrder,
    StageParts,
    StageReady,
)
from ravnest.protocol.tensors import Buffer
from ravnest.protocol.training import (
    Activation,
    DroppedMicrobatch,
    FieldParts,
    Gradient,
    LearningRate,
    LeaseBegin,
    LeaseGrant,
    Pace,
    StepReport,
)
from ravnest.transfer.outbox import Outbox, Outgoing, SaidToHub

logger = logging.getLogger(__name__)

# Messages by the sender that may send them; any peer in the plan may send content and parts of rings.
_OfHub = (
    Welcome
    | Stop
    | ProbeOrder
    | PlanOrder
    | RingOrder
    | StageParts
    | SnapshotOrder
    | SketchOrder
    | BackupOrder
    | LeaseGrant
    | LeaseBegin
    | FieldParts
    | LearningRate
    | RoundOpen
    | RoundCall
    | RoundCheck
    | RoundCommit
    | RoundAbort
    | GenerationStep
    | GenerationEnd
)
_OfCluster = (
    Activation
    | Gradient
    | DroppedMicrobatch
    | Pace
    | StepReport
    | GenerationValues
    | TiedHolder
    | TiedCall
    | TiedGradient  # type: ignore[type-arg]
    | TiedStep  # type: ignore[type-arg]
)


def refuse_message(
    message: Message, sender: NodeId | None, build_id: int, cluster: Sequence[NodeId]
) -> Refusal | None:
    """Return why a message is not admitted: it is late, foreign, or not for its sender to say.

    Rounds are not known here: peer.averager refuses parts and outcomes of a round that is not open.
    """
    kind = type(message).__name__
    if sender is None:
        return Refusal(f"a {kind} came from a peer that is not in the plan")
    if isinstance(message, _OfHub) and sender != HUB:
        return Refusal(f"a {kind} came from {sender}; only the hub sends it")
    if isinstance(message, _OfCluster) and sender not in cluster:
        return Refusal(f"a {kind} came from {sender}, which is not in this cluster")
    named = getattr(message, "build_id", build_id)
    if named != build_id and not isinstance(message, PlanOrder):
        return Refusal(f"a {kind} is of build {named}; build {build_id} is here")
    return None


@dataclass(frozen=True, slots=True)
class Offer:
    """What a provider brings: facts for the planner, limits, where others dial it, how long it waits."""

    node: Node
    limits: ProviderLimits
    addresses: tuple[str, ...]
    patience_seconds: float = 600.0  # without the hub, before it gives up
    listens_at: str | None = None  # others may not know
    guessed: tuple[Fact, ...] = ()  # facts that the hub shall have measured
    folder: str | None = None  # in which its own is made; None: the system's


class Agent:
    """One provider's PC in one swarm; it is made on the event loop that runs it.

    `writer` has one thread, for files.
    """

    def __init__(
        self,
        token: Token,
        keys: KeyPair,
        offer: Offer,
        compute: Compute,
        transport: Transport,
        writer: Executor | None = None,
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        self._token = token
        self._keys = keys
        self._offer = offer
        self._compute = compute
        self._transport = transport
        self._writer = writer or ThreadPoolExecutor(1)
        self._timeouts = timeouts.peer
        self._loop = asyncio.get_running_loop()
        self._tasks = asyncio.TaskGroup()
        self._ended: asyncio.Future[str | RavnestError] = self._loop.create_future()
        self._background: set[asyncio.Task[None]] = set()
        self._hub = peer_of(PublicKey(token.hub_key))
        self._hub_address = ""  # the one that answered
        self._tried: dict[str, str] = {}  # the hub's addresses, and why there is no link
        self._relay: RelayAddress | None = None
        self._patience: asyncio.TimerHandle | None = None  # for a hub that is away
        self._leaving: str | RavnestError | None = None  # why, once it wants to
        self._order: PlanOrder | None = None
        self._held_build_id = 0  # of the stage that is built, or held
        self._peers: dict[NodeId, PeerId] = {HUB: self._hub}
        self._said = SaidToHub()
        around = (self._start, lambda: self._peers, self._send, compute.put, self._fail)
        self._fetcher = Fetcher(*around, self._writer, timeouts.peer, offer.folder)
        self._outbox = Outbox(transport, self._start, lambda node: self._peers.get(node), self._drop_link)
        self._outbox.pause(HUB)  # until there is a link
        address = None if offer.listens_at is None else split_address(dialled_from_here(offer.listens_at))
        self._connections = Connections(
            transport,
            address,
            is_reachable=bool(offer.addresses),
            start=self._start,
            give_up=self._give_up_neighbour,
            timeouts=timeouts,
        )

    async def run(self) -> str:
        """Take part until the hub ends the job, and return why it did; or raise what ended it here."""
        greeting = greet(self._token, self._keys.public)
        self._transport.allow([PublicKey(self._token.hub_key)])
        self._transport.dial(self._hub, self._token.addresses, greeting)
        self._start_patience()
        with self._fetcher.store as store, self._writer:
            async with self._tasks:
                self._start(self._listen())
                setup = ComputeSetup(self._offer.limits, store.folder)
                computing = self._tasks.create_task(self._compute.run(setup, self._receive_from_compute))
                try:
                    ended = await self._ended
                finally:
                    self._compute.close()
                    await computing
                    self._stop_patience()
                    self._connections.close()
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
        """Go on as before until the hub has found another peer, but not for long."""
        self._leaving = reason
        self._send(Outgoing(HUB, Leave(self._build_id, reason, can_hand_over=True)))
        await asyncio.wait([self._ended], timeout=self._timeouts.handover.total_seconds)
        self._end(reason)

    async def _leave(self, why: str | RavnestError) -> None:
        """Tell the hub why this peer leaves, and end when it has answered."""
        self._leaving = why
        message = messages.pack(Leave(self._build_id, str(why)))
        try:
            await self._transport.send(self._hub, Service.CONTROL, message)
        except LinkError as lost:
            logger.debug("the hub is not told: %s", lost)
        if self._hub in self._transport.connected():
            await asyncio.wait([self._ended], timeout=self._timeouts.parting_seconds)
        self._end(why)

    @property
    def _build_id(self) -> int:
        return self._order.build_id if self._order is not None else 0

    @property
    def _cluster(self) -> tuple[NodeId, ...]:
        return self._order.pipeline if self._order is not None else ()

    async def _listen(self) -> None:
        while True:
            match event := await self._transport.receive():
                case Delivery():
                    self._receive(event)
                case LinkUp(self._hub, is_new, address):
                    self._hub_address = address or self._hub_address
                    self._stop_patience()
                    self._outbox.resume(HUB, is_new=is_new)
                    self._find_hub(is_new=is_new)
                case LinkUp(peer, _, address):
                    self._connections.record_link(peer, address)
                case DialFailed():
                    self._record_failure(event)
                case LinkDown(self._hub, reason):
                    logger.warning("the hub is lost: %s; dialling it again", reason)
                    self._tried = {self._hub_address: reason}
                    self._outbox.pause(HUB)
                    self._start_patience()
                    self._said.lose_hub()
                    self._compute.put(HubLink(is_up=False))
                case LinkDown(peer, reason):
                    logger.info("a neighbour is lost: %s; dialling it again", reason)
                    self._connections.record_loss(peer)

    def _record_failure(self, failed: DialFailed) -> None:
        if failed.peer != self._hub:
            self._connections.record_failure(failed.peer, failed.address, failed.reason)
        elif failed.is_refusal:
            self._end(NotAdmitted(f"the hub does not let this peer in: {failed.reason}"))
        elif self._tried.get(failed.address) != failed.reason:
            self._tried[failed.address] = failed.reason
            logger.info("no way to the hub at %s yet: %s", failed.address, failed.reason)

    def _find_hub(self, *, is_new: bool) -> None:
        """Go on with the hub; to one that was started anew say who is here and what was trained.

        That one makes another plan. Until it is here, the stage goes on as without a hub.
        """
        if is_new:
            self._say_hello()
            for outgoing in self._said.say_again(self._build_id):
                self._outbox.post(outgoing)
            self._outbox.post(Outgoing(HUB, Recounted(self._build_id)))
            return
        self._said.find_hub()
        self._compute.put(HubLink(is_up=True))

    def _say_hello(self) -> None:
        """Ask to join; loopback addresses are told only if the hub is on the same PC."""
        is_here = is_loopback(self._hub_address)
        known = (each for each in self._offer.addresses if is_here or not is_loopback(each))
        addresses = tuple(sorted(known, key=lambda each: not is_loopback(each)))
        hello = Hello(
            PROTOCOL_VERSION,
            self._offer.node,
            addresses,
            self._offer.guessed,
            build_id=self._held_build_id,
        )
        self._send(Outgoing(HUB, hello))

    def _start_patience(self) -> None:
        self._patience = self._loop.call_later(self._offer.patience_seconds, self._give_up_hub)

    def _stop_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()

    def _give_up_hub(self) -> None:
        tried = dict.fromkeys(self._token.addresses, "no answer") | self._tried
        if len(tried) == 1:
            ((where, reason),) = tried.items()
            told = f"the hub at {where} cannot be reached: {reason}"
        else:
            told = "the hub cannot be reached: " + ", ".join(
                f"at {where} {reason}" for where, reason in tried.items()
            )
        self._end(LinkError(f"{told}; is it running, and can this PC reach it there?"))

    def _receive(self, delivery: Delivery) -> None:
        """Read a message, admit it and pass it to its handler; a sender of nonsense is dropped."""
        try:
            message = messages.unpack(delivery.header, delivery.buffers)
            sender = self._find_node(delivery.sender)
            refusal = refuse_message(message, sender, self._build_id, self._cluster)
            if refusal is None and sender is not None:
                refusal = self._dispatch(sender, message, delivery.buffers)
        except ProtocolError as error:
            self._drop(delivery.sender, error)
            return
        if refusal is not None:
            logger.debug("not taken from %s: %s", delivery.sender, refusal.reason)

    def _drop(self, sender: PeerId, error: ProtocolError) -> None:
        logger.warning("dropping %s: %s", sender, error)
        if sender == self._hub:
            self._end(ProtocolError(f"the hub says what this version of ravnest does not know: {error}"))
            return
        self._transport.drop(sender, str(error))
        node = self._find_node(sender)
        if node is not None:
            self._send(Outgoing(HUB, Complaint(self._build_id, node, str(error))))

    def _find_node(self, sender: PeerId) -> NodeId | None:
        return next((node for node, peer in self._peers.items() if peer == sender), None)

    def _dispatch(self, sender: NodeId, message: Message, buffers: Sequence[Buffer]) -> Refusal | None:
        """Pass an admitted message to its handler: content and orders here, the rest in compute."""
        match message:
            case Refused(reason, "") if sender == HUB:
                self._end(NotAdmitted(f"the hub does not let this peer in: {reason}"))
            case BlobRequest() | BlobPart() | Refused():
                return self._fetcher.receive(sender, message, buffers)
            case Welcome():
                self._join(message)
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
            case _:
                self._compute.put(Delivered(message, buffers, sender))
        return None

    def _receive_from_compute(self, item: FromCompute) -> None:
        match item:
            case Outgoing():
                self._send(item)
            case StageBuilt(build_id):
                self._held_build_id = build_id
                self._send(Outgoing(HUB, StageReady(build_id)))
            case SnapshotWritten(order, version, blob, anchor_round):
                if self._fetcher.store.adopt(blob):
                    facts = (order.build_id, order.number, version, blob.ref, anchor_round)
                    self._send(Outgoing(HUB, SnapshotMade(*facts)))
            case ComputeFailed():
                self._fail(item.error)
            case _:
                assert_never(item)

    def _join(self, welcome: Welcome) -> None:
        if welcome.relay_port:
            self._relay = (split_address(self._hub_address)[0], welcome.relay_port)
        logger.info("joined as %s", welcome.node)
        if self._offer.addresses and not welcome.is_reachable:
            logger.info("others cannot dial this PC: it dials them, or meets them through the hub")

    def _follow_plan(self, order: PlanOrder) -> None:
        """Begin anew at another position; what is on its way for the one before may be of use there."""
        if order.stage is None:
            self._fetcher.forget(StageParts)
            self._held_build_id = 0
        self._connect(order)
        self._said.find_hub()
        stage = order.stage
        part = "spare" if stage is None else f"positions {stage.start} to {stage.stop}"
        logger.info("plan %d: %s", order.plan_id, part)
        self._compute.put(order)

    def _follow_rings(self, order: RingOrder) -> None:
        """Train on in the same cluster, with other contacts, and in other rings if they are newer."""
        if self._order is None:
            return
        is_new = order.plan_id > self._order.plan_id
        changed = {"plan_id": order.plan_id, "rings": order.rings, "is_exact": order.is_exact}
        rings = changed if is_new else {}  # a stage that is still being built begins with these
        self._connect(replace(self._order, contacts=order.contacts, **rings))  # type: ignore[arg-type]
        if is_new:
            self._compute.put(order)

    def _connect(self, order: PlanOrder) -> None:
        """Know the peers of a plan, and no others."""
        self._order = order
        keys = {contact.node: PublicKey(contact.key.encode()) for contact in order.contacts}
        self._peers = {**{node: peer_of(key) for node, key in keys.items()}, HUB: self._hub}
        self._transport.allow([PublicKey(self._token.hub_key), *keys.values()])
        planned = [PlannedPeer(peer_of(keys[x.node]), x.addresses, x.ticket, x.node) for x in order.contacts]
        self._connections.connect(planned, self._relay, order.pipeline)

    def _give_up_neighbour(self, reason: str) -> None:
        if self._hub in self._transport.connected():  # without the hub there is no other plan
            self._fail(LinkError(reason))

    def _drop_link(self, peer: PeerId, error: LinkError) -> None:
        """Leave if the hub takes no message; a neighbour that is away is noticed by the connections."""
        if peer == self._hub:
            self._fail(error)

    def _send(self, outgoing: Outgoing) -> None:
        self._said.record(outgoing)
        self._outbox.post(outgoing)
