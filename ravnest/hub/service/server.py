"""The hub's program: it admits peers, applies events to the coordinator, and carries out its actions.

Weights and data stay with the requester's side (an Owner); the hub cuts nothing and reads no tensor. Blobs go
out piece by piece on demand. It runs in the requester's process.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ravnest.config import TIMEOUTS, NetTimeouts, Timeouts
from ravnest.errors import (
    ConfigError,
    FencedOff,
    GuardError,
    LinkError,
    ProtocolError,
    RavnestError,
    StoreAway,
    WireVersionError,
)
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import (
    Abandon,
    Action,
    CheckpointAsked,
    Collect,
    Event,
    Evict,
    Finish,
    InspectSamples,
    JobGiven,
    MakeParts,
    MakePlan,
    Notify,
    PauseAsked,
    PeerJoined,
    PeerLeft,
    PeerReturned,
    Received,
    Restarted,
    Send,
    SendFields,
    Stopped,
    TextsSampled,
    Tick,
    WithdrawCollect,
)
from ravnest.hub.coordinator.generation import Generations
from ravnest.hub.coordinator.notices import (
    CutOff,
    LogGoesOn,
    LogWaits,
    Missing,
    Notice,
    Returned,
    SampledText,
    Waiting,
)
from ravnest.hub.coordinator.planner import SEARCH_PLANNER, Planner
from ravnest.hub.monitors.liveness import OutageMonitor
from ravnest.hub.monitors.monitors import MonitoredCoordinator, Watch
from ravnest.hub.service.admission import Admission, ProbeReports, Spending
from ravnest.hub.service.data_service import DataService, Owner
from ravnest.hub.service.event_log import EventStore
from ravnest.hub.service.generation_service import GenerationService
from ravnest.hub.service.hub_clock import HubClock, Timer
from ravnest.hub.service.newcomers import Newcomers
from ravnest.ids import NodeId
from ravnest.net.identity import Token
from ravnest.net.relay import Relay
from ravnest.net.transport import (
    MIB,
    Delivery,
    LinkDown,
    LinkUp,
    PeerId,
    Service,
    Transport,
    TransportLimits,
)
from ravnest.protocol import messages
from ravnest.protocol.generation import GenerationAnswer, GenerationFault
from ravnest.protocol.membership import (
    PROTOCOL_VERSION,
    Complaint,
    Hello,
    ProbeOrder,
    ProbeReport,
    Recounted,
    Refused,
    Stop,
)
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.placement import PlanOrder, RingOrder
from ravnest.protocol.tensors import Buffer
from ravnest.protocol.training import StepReport
from ravnest.transfer.blobs import Blobs
from ravnest.transfer.exchange import ContentMessage, Exchange
from ravnest.transfer.outbox import Outbox, Outgoing

logger = logging.getLogger(__name__)

HUB_LIMITS = TransportLimits(incoming_bytes=2 * MIB)  # peers send words and pieces of blobs, never a tensor


@dataclass(frozen=True, slots=True)
class HubParts:
    """What a hub is built of: how it plans, and what it is connected to."""

    planner: Planner = SEARCH_PLANNER
    timeouts: Timeouts = TIMEOUTS
    watch: Watch | None = None  # sees every event after it is applied, and every report of a stage
    make_relay: Callable[[NetTimeouts], Relay] = Relay
    map_addresses: Callable[[Sequence[str]], tuple[str, ...]] = tuple  # where others reach a peer's addresses
    version: str = PROTOCOL_VERSION  # that peers must speak
    folder: Path | None = (
        None  # for weights on their way that are too large for memory; None: the system's own
    )
    max_waiting: int = 10_000  # messages for one peer: a lease has hundreds, and pieces go one at a time


HUB_PARTS = HubParts()


class Server:
    """One job's hub. `admit` belongs to the transport it runs on; `token` needs no address here.

    `store` gets every event that changes the state; its actions are carried out when it is written. While
    that cannot be, the hub's time stands and it hears nobody. `admission` may let peers in before that.
    """

    def __init__(
        self,
        token: Token,
        tell: Callable[[Notice], None],
        in_background: Callable[..., Any] = asyncio.to_thread,
        *,
        relay: Relay | None = None,
        store: EventStore | None = None,
        hub: Coordinator,
        parts: HubParts = HUB_PARTS,
        admission: Admission | None = None,
    ) -> None:
        self._admission = Admission(token, relay, parts.version) if admission is None else admission
        self.admit = self._admission.admit
        self._tell, self._parts = tell, parts
        self._timeouts = parts.timeouts.hub
        self._in_background = in_background  # runs a function of the owner's where it delays no message
        self._store = store
        log = None if store is None else store.append
        self._after_written = None if store is None or store.writes_at_once else store.after_written
        self._monitored = MonitoredCoordinator(hub, log, parts.watch)
        self.hub = hub  # one with a past goes on
        self._exchange = Exchange(Blobs(folder=parts.folder), self._post, in_background)
        self._background: set[asyncio.Task[None]] = set()
        self._outages = OutageMonitor(self._timeouts)
        self._outage_timer = Timer(self._find_gone)
        self._is_log_late = False
        self._was_cut_off = False
        self._evicted: set[PeerId | None] = set()
        self._returning: dict[PeerId, PeerReturned] = {}  # known by a hub that was started anew
        self._reports = ProbeReports(self._exchange, self._apply)
        self._reminder = Timer(self._remind)
        self._has_lost_log = False
        self.generation = GenerationService(Generations(hub.placement), self._post, self._timeouts)

    async def run(self, transport: Transport, owner: Owner, job: JobGiven) -> Finish:
        """Train the job to its end; return what was kept, which the owner has by then."""
        self._transport = transport
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[Finish | RavnestError] = self._loop.create_future()
        self._parting: asyncio.Future[None] | None = None
        self._clock = HubClock(self.hub.now, lambda: self._apply(Tick(self._clock.now())))
        self._outbox = Outbox(
            transport, self._start, self._admission.find, lambda peer, error: self._forget(peer, str(error))
        )
        needs_parts = self.hub.placement.needs_parts
        around = (self._apply, self._in_background, self._drop_node, self._clock.now, needs_parts)
        self._newcomers = Newcomers(
            transport, self._admission.find, self._start, self._join, self._tell, self._parts.timeouts.net
        )
        self._data = DataService(owner, self._exchange, *around, self._timeouts)
        async with asyncio.TaskGroup() as self._tasks:
            now = self._clock.now()
            self._apply(Restarted(job.books, now) if self.hub.has_begun else replace(job, now=now))
            if not self._has_lost_log:  # else the group ends before it begins anything
                self._start(self._listen())
                self._start(self._write_log())
            try:
                outcome = await self._result
            finally:
                self.generation.close()
                await self._part()
                self._clock.close()
                self._outage_timer.set(None)
                self._reminder.set(None)
                for task in tuple(self._background):
                    task.cancel()
        if isinstance(outcome, RavnestError):  # not within the group, which would wrap it
            raise outcome
        return outcome

    def record_texts(self, texts: tuple[SampledText, ...]) -> None:
        """Record what the model writes after an evaluation, for people."""
        self._apply(TextsSampled(texts, self._clock.now()))

    def stop(self, reason: str) -> None:
        """End the job early; what was trained is kept."""
        self._outages.record_stop(self._loop.time())
        self._follow_outages()
        self._apply(Stopped(reason, self._clock.now()))

    def checkpoint(self) -> None:
        """Write what was trained down now; a notice says what came of it."""
        self._apply(CheckpointAsked(self._clock.now()))

    def pause(self, is_paused: bool) -> None:
        """Pause the training, or go on with it."""
        self._apply(PauseAsked(is_paused, self._clock.now()))

    def fail(self, error: RavnestError) -> None:
        """End the job with an error."""
        if not self._result.done():
            self._result.set_result(error)

    async def _part(self) -> None:
        """Tell all peers that it is over, and wait until they have left; but not after the log was lost."""
        if self._has_lost_log:
            return
        for peer in self._admission.names.keys() - self._transport.connected():
            self._admission.forget(peer)
            self._transport.drop(peer, "it is not here")
        self._parting = self._loop.create_future()
        is_done = self._result.done() and not self._result.cancelled()
        has_failed = not is_done or isinstance(self._result.result(), RavnestError)
        reason = "the job has failed" if has_failed else "the job is done"
        for name in self._admission.names.values():
            self._post(Outgoing(name, Stop(reason)))
        if self._admission.names:
            await asyncio.wait([self._parting], timeout=self._timeouts.parting_seconds)

    async def _write_log(self) -> None:
        try:
            await self._store.write(self._follow_log) if self._store is not None else None
        except RavnestError as error:
            self._end_without_log(error)

    def _follow_log(self, notice: LogWaits | LogGoesOn) -> None:
        self._is_log_late = isinstance(notice, LogWaits)
        self._tell(notice)
        self._follow_outages()

    def _end_without_log(self, error: RavnestError) -> None:
        """End: what would be done or logged after a gap could not be replayed."""
        self._has_lost_log = True
        self.fail(error)

    async def _listen(self) -> None:
        while True:
            if self._store is not None:
                await self._store.wait_for_room()
            match await self._transport.receive():
                case Delivery() as delivery:
                    self._receive(delivery)
                case LinkDown(peer, reason) if peer in self._admission.names:
                    self._record_loss(peer, reason)
                case LinkDown(peer, reason) if peer not in self._transport.connected():
                    self._forget(peer, reason)  # it never joined, and may never come again
                case LinkUp(peer, is_new) if self._admission.names.get(peer) in self._outages.absent:
                    self._record_return(peer, self._admission.names[peer], is_new)

    def _record_loss(self, peer: PeerId, reason: str) -> None:
        """Give a peer whose link is lost a moment to come back."""
        name = self._admission.names[peer]
        if self._parting is None:
            if peer not in self._evicted:
                self._tell(Missing(name, reason, self._timeouts.grace_seconds))
            self._outbox.pause(name)
            self._outages.record_loss(name, reason, self._loop.time())
            self._monitored.record_loss(name)
            self._follow_outages()
            return
        self._admission.forget(peer)
        self._outbox.forget(name)
        self._transport.drop(peer, reason)
        if not self._admission.names and not self._parting.done():
            self._parting.set_result(None)

    def _record_return(self, peer: PeerId, name: NodeId, is_new: bool) -> None:
        """Go on with a peer that was missing, unless its program is another one."""
        if is_new:
            self._forget(peer, "it started anew")
            return
        self._outbox.resume(name, is_new=False)
        self._monitored.record_return(name, self._outages.record_return(name, self._loop.time()))
        self._follow_outages()
        if peer not in self._evicted:
            self._tell(Returned(name))

    def _find_gone(self) -> None:
        """Forget peers that were waited for long enough."""
        names, connected = self._admission.names, self._transport.connected()
        here = {name for peer, name in names.items() if peer in connected}
        gone = self._outages.find_gone(here, self.hub.can_wait_for_all, self._loop.time())
        self._follow_outages()
        for name, absence in gone:
            if (peer := self._admission.find(name)) is not None:
                self._forget(peer, absence.reason, self._clock.now() - (self._loop.time() - absence.since))

    def _follow_outages(self) -> None:
        """Stop the hub's time while it is cut off or cannot log, and set the timer for the next look."""
        if self._outages.is_cut_off and not self._was_cut_off:
            self._tell(CutOff(len(self._outages.absent), self._timeouts.cut_off_seconds))
        self._was_cut_off = self._outages.is_cut_off
        self._clock.stand(still=self._was_cut_off or self._is_log_late)
        self._outage_timer.set(self._outages.due)

    def _receive(self, delivery: Delivery) -> None:
        if not self._afford(delivery.sender, Spending.ARRIVED):
            return
        try:
            message = messages.unpack(delivery.header, delivery.buffers)
        except ProtocolError as error:
            is_newcomer = delivery.sender not in self._admission.names
            is_fault = not (is_newcomer and isinstance(error, WireVersionError))  # a guest has to update
            self._ban(delivery.sender, str(error), is_fault=is_fault)
            return
        name = self._admission.names.get(delivery.sender)
        if isinstance(message, Hello):
            self._welcome(delivery.sender, message)
        elif isinstance(message, Complaint) and name is not None:
            self._judge_complaint(delivery.sender, name, message)
        elif isinstance(message, Recounted):
            if (back := self._returning.pop(delivery.sender, None)) is not None:
                self._apply(replace(back, now=self._clock.now()))
        elif name is None:
            logger.debug("%s from %s, which has not joined", type(message).__name__, delivery.sender)
        elif self._outbox.num_waiting(name) > self._parts.max_waiting:
            self._ban(delivery.sender, "it asks for more than it takes")
        else:
            self._dispatch(name, message, delivery.buffers)

    def _afford(self, peer: PeerId, spending: Spending) -> bool:
        """Return whether a peer may go on; one that floods the hub is sent away for good."""
        if (reason := self._admission.charge(peer, spending, self._loop.time())) is not None:
            self._ban(peer, reason)
        return reason is None

    def _welcome(self, peer: PeerId, hello: Hello) -> None:
        """Admit a peer under a name that no other has."""
        if peer in self._admission.names:
            return
        self._evicted.discard(peer)
        key = self._admission.key(peer)
        before = self.hub.find_missing(key, hello.build_id)
        hello = replace(hello, addresses=self._parts.map_addresses(hello.addresses))
        known = self._admission.introduce(peer, hello, before, self.hub.find_others(key))
        if isinstance(known, str):
            self._start(self._refuse(peer, known))
            return
        self._outages.record_arrival(self._loop.time())
        self._follow_outages()
        if before is not None:  # it is back when it has said what it did meanwhile
            self._returning[peer] = PeerReturned(known.node.name, known.addresses, self._clock.now())
            self._post(Outgoing(known.node.name, self._admission.welcome(known.node)))
        else:
            self._newcomers.dial_back(peer, known, key)

    def _join(self, hello: Hello, key: str) -> None:
        """Make a peer a member, of which is known now whether others can dial it."""
        self._post(Outgoing(hello.node.name, self._admission.welcome(hello.node)))
        self._apply(PeerJoined(hello.node, key, hello.addresses, self._clock.now(), hello.guessed))

    async def _refuse(self, peer: PeerId, reason: str) -> None:
        with suppress(LinkError):  # it has gone
            await self._transport.send(peer, Service.CONTROL, messages.pack(Refused(reason)))

    def _ban(self, peer: PeerId, reason: str, *, is_fault: bool = True) -> None:
        """Send a peer away for good that sends what no honest one would, or another version's words."""
        self._admission.ban(peer, reason, is_fault=is_fault)
        self._forget(peer, reason)

    def kick(self, name: NodeId, reason: str) -> None:
        """Send a node away for good, because the requester wants it."""
        if (peer := self._admission.find(name)) is not None:
            self._ban(peer, reason, is_fault=False)

    def send_guests_away(self, invitation: str, reason: str) -> None:
        """Forget all nodes that joined by an invitation, which is void by now."""
        for peer in self._admission.invited_by(invitation):
            self._forget(peer, reason)

    def _forget(self, peer: PeerId, reason: str, since: float | None = None) -> None:
        """Forget a peer; if it comes back it is a new one."""
        name = self._admission.forget(peer)
        self._returning.pop(peer, None)
        self._transport.drop(peer, reason)
        if name is not None:
            self._outages.forget(name)
            self._follow_outages()
            self._outbox.forget(name)
            self._exchange.refuse(name, reason)
            self._apply(PeerLeft(name, reason, self._clock.now(), since))

    def _drop_node(self, name: NodeId, reason: str) -> None:
        if (peer := self._admission.find(name)) is not None:
            self._forget(peer, reason)

    def _judge_complaint(self, sender: PeerId, name: NodeId, complaint: Complaint) -> None:
        guilty = self._admission.judge(sender, complaint)
        if guilty == sender:
            self._ban(sender, "it complains about everybody")
        elif guilty is not None:
            self._forget(guilty, f"{name} says: {complaint.reason}")

    def _dispatch(self, name: NodeId, message: Message, buffers: Sequence[Buffer]) -> None:
        if isinstance(message, ContentMessage):
            self._exchange.receive(name, message, buffers)
        elif isinstance(message, ProbeReport):
            self._reports.complete(name, message, self._clock.now)
        elif isinstance(message, GenerationAnswer | GenerationFault):
            self.generation.receive(name, message)
        else:
            self._apply(Received(name, message, self._clock.now()))

    def _apply(self, event: Event) -> None:
        """Let the coordinator decide, carry out its actions, and set the timer for what is due."""
        if self._has_lost_log:
            return
        try:
            actions = self._monitored.apply(event)
        except ConfigError as error:  # also from a timer, which nobody awaits
            self._end_without_log(error)
            return
        follow_up = partial(self._follow_up, event, actions)
        self._after_written(follow_up) if self._after_written is not None else follow_up()
        if not actions and isinstance(event, Received) and isinstance(event.message, StepReport):
            return  # a report can only put off what is due; the timer may come too early
        self._clock.set(self._monitored.due)

    def _follow_up(self, event: Event, actions: tuple[Action, ...]) -> None:
        """Do what follows from an event that is in the log."""
        for action in actions:
            self._carry_out(action)
        if isinstance(event, Received) and actions and isinstance(actions[0], Refusal):
            peer = self._admission.find(event.sender)
            if peer is not None:  # its message changed nothing: that is counted against it
                self._afford(peer, Spending.IN_VAIN)
        if self.generation.num_open:
            self.generation.follow()

    def _carry_out(self, action: Action) -> None:  # noqa: C901 - one short case for each
        match action:
            case Send(to, message):
                self._send(to, message)
            case Evict(to, reason, is_fault):
                peer = self._admission.find(to)
                self._evicted |= {peer}
                if is_fault and peer is not None:
                    self._admission.ban(peer, reason)
                self._post(Outgoing(to, Stop(reason)))
            case MakePlan():
                self._start(self._make_plan(action))
            case Collect(is_result=True):
                self._start(self._collect_result(action))
            case MakeParts() | SendFields() | InspectSamples() | Collect() | WithdrawCollect():
                self._start(self._data.carry_out(action))
            case Notify(notice):
                self._tell(notice)
                if isinstance(notice, Waiting):
                    self._remind_later()
            case Finish():
                if not self._result.done():
                    self._result.set_result(action)
            case Abandon(reason, is_guarded):
                self.fail(GuardError(reason) if is_guarded else RavnestError(reason))
            case Refusal(reason):
                logger.debug("refused: %s", reason)

    def _remind_later(self) -> None:
        self._reminder.set(self._loop.time() + self._timeouts.remind_every_seconds)

    def _remind(self) -> None:
        """Say again what training waits for."""
        if self.hub.shortage:
            self._tell(Waiting(self.hub.shortage))
            self._remind_later()

    def _send(self, to: NodeId, message: Message) -> None:
        peer = self._admission.find(to)
        if peer is not None and isinstance(message, PlanOrder | RingOrder):
            message = self._admission.give_tickets(peer, message)
        if isinstance(message, ProbeOrder):
            self._reports.await_from(to)
        self._post(Outgoing(to, message))

    def _start(self, work: Awaitable[None]) -> None:
        task = self._tasks.create_task(self._try(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _try(self, work: Awaitable[None]) -> None:
        try:
            await work
        except (FencedOff, StoreAway) as error:  # peers stay for the hub that goes on
            self._end_without_log(error)
        except RavnestError as error:
            self.fail(error)

    async def _collect_result(self, order: Collect) -> None:
        """Let texts end first: when the result is here, the clusters are told to leave."""
        await self.generation.drain(self._timeouts.end_seconds)
        await self._data.carry_out(order)

    async def _make_plan(self, order: MakePlan) -> None:
        made = await self._in_background(self._parts.planner.make_plan, self._job, order, 0.0)
        self._apply(replace(made, now=self._clock.now()))

    def _post(self, outgoing: Outgoing) -> None:
        self._outbox.post(outgoing)
