"""Messages on their way out of a program: one queue for each receiver, so that a slow one delays no other.

So many leave in one turn of the event loop, however many receivers there are: heartbeats are in time.
Messages for a paused receiver wait until it is back. A receiver that comes back as another program knows
nothing of what they are about, so they are dropped. So are messages for a receiver that is not known.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from ravnest.config import RESERVE
from ravnest.errors import LinkError, ProtocolError
from ravnest.ids import HUB, NodeId
from ravnest.net.transport import PeerId, Service, Transport
from ravnest.protocol import messages
from ravnest.protocol.averaging import (
    AnchorPart,
    DirectPart,
    RingPart,
    RoundCall,
    RoundOpen,
    TiedGradient,
    TiedStep,
)
from ravnest.protocol.generation import GenerationStep, GenerationValues
from ravnest.protocol.messages import Message
from ravnest.protocol.placement import BlobPart, PlanOrder, RingOrder
from ravnest.protocol.training import (
    Activation,
    DroppedMicrobatch,
    FieldParts,
    Gradient,
    LeaseDone,
    StepReport,
)

logger = logging.getLogger(__name__)

_MOST_REPORTS = 3 * RESERVE.most_microbatches  # that wait for one receiver: no cluster trains more alone
_TURN_COST = 32  # of the messages that leave in one turn of the event loop
_MOST_RECENT = 512  # that a peer says again: of open leases, 100 microbatches a second for 5 s
_ORDER_COST = 8  # of a message that may name all clusters; of others it is 1


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for another program, with the tensors beside it."""

    to: NodeId
    message: Message
    buffers: tuple[memoryview, ...] = ()

    @property
    def service(self) -> Service:
        """How urgent it is."""
        match self.message:
            case Gradient():
                return Service.GRADIENT
            case Activation() | FieldParts() | GenerationStep() | GenerationValues():
                return Service.ACTIVATION
            # No microbatch waits for these.
            case RingPart() | DirectPart() | AnchorPart() | TiedGradient() | TiedStep():
                return Service.AVERAGING
            case BlobPart():
                return Service.BLOB
            case _:
                return Service.CONTROL


class _Turns:
    """Lets so much begin in each turn of the event loop, first come, first served."""

    def __init__(self) -> None:
        self._left = _TURN_COST
        self._is_due = False
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, cost: int) -> None:
        """Return as soon as there is a turn for it."""
        loop = asyncio.get_running_loop()
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._renew)
        if self._left > 0 and not self._waiting:
            self._left -= cost
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append((cost, turn))
        await turn

    def _renew(self) -> None:
        self._left, self._is_due = _TURN_COST, bool(self._waiting)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._renew)
        while self._waiting and self._left > 0:
            cost, turn = self._waiting.popleft()
            if not turn.done():  # else who waited was cancelled
                self._left -= cost
                turn.set_result(None)


class _Receiver:
    """What waits for one receiver; None in the queue only wakes the task that sends."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[tuple[int, Outgoing] | None] = asyncio.Queue()
        self.is_there = asyncio.Event()
        self.is_there.set()
        self.session = 0  # of its program; what was posted in an earlier one is dropped
        self.has_task = False


class Outbox:
    """Sends what is posted. `find_peer` knows the receivers; `fail` is told which peer cannot be sent to."""

    def __init__(
        self,
        transport: Transport,
        start: Callable[[Coroutine[Any, Any, None]], object],
        find_peer: Callable[[NodeId], PeerId | None],
        fail: Callable[[PeerId, LinkError], None],
    ) -> None:
        self._transport = transport
        self._start = start
        self._find_peer = find_peer
        self._fail = fail
        self._receivers: dict[NodeId, _Receiver] = {}
        self._turns = _Turns()

    @property
    def receivers(self) -> Collection[NodeId]:
        """The receivers that anything is kept for."""
        return self._receivers.keys()

    def num_waiting(self, to: NodeId) -> int:
        """Return how many messages for a receiver are not sent yet."""
        return self._receivers[to].waiting.qsize() if to in self._receivers else 0

    def post(self, outgoing: Outgoing) -> None:
        """Queue a message for its receiver, if that is known."""
        if self._find_peer(outgoing.to) is None:
            return
        receiver = self._open(outgoing.to)
        if not receiver.has_task:
            receiver.has_task = True
            self._start(self._send_all(outgoing.to, receiver))
        if not isinstance(outgoing.message, StepReport) or receiver.waiting.qsize() < _MOST_REPORTS:
            receiver.waiting.put_nowait((receiver.session, outgoing))

    def pause(self, to: NodeId) -> None:
        """Pause a receiver: what is for it waits."""
        self._open(to).is_there.clear()

    def resume(self, to: NodeId, *, is_new: bool) -> None:
        """Send what waits for a receiver, unless another program has taken its place."""
        receiver = self._open(to)
        receiver.session += is_new
        receiver.is_there.set()

    def forget(self, to: NodeId) -> None:
        """Drop what waits for a receiver that is gone, and end the task that sends to it."""
        if receiver := self._receivers.pop(to, None):
            receiver.session += 1
            receiver.is_there.set()
            receiver.waiting.put_nowait(None)

    def _open(self, to: NodeId) -> _Receiver:
        return self._receivers.setdefault(to, _Receiver())

    async def _send_all(self, to: NodeId, receiver: _Receiver) -> None:
        while self._receivers.get(to) is receiver:
            posted = await receiver.waiting.get()
            while posted is not None and not await self._is_done(receiver, *posted):
                pass

    async def _is_done(self, receiver: _Receiver, session: int, outgoing: Outgoing) -> bool:
        """Send a message or drop it; return whether that is done, or is to be tried again."""
        await receiver.is_there.wait()
        is_order = isinstance(outgoing.message, PlanOrder | RingOrder | RoundOpen | RoundCall)
        await self._turns.take(_ORDER_COST if is_order else 1)
        peer = self._find_peer(outgoing.to)
        if session != receiver.session or peer is None:
            return True
        try:
            header = messages.pack(outgoing.message, outgoing.buffers)
        except ProtocolError as error:  # too large for a message: that ends this receiver, not the program
            self._fail(peer, LinkError(str(error)))
            return True
        try:
            await self._transport.send(peer, outgoing.service, header, outgoing.buffers)
        except LinkError as error:
            if not receiver.is_there.is_set():
                return False
            logger.debug("a %s is lost: %s", type(outgoing.message).__name__, error)
            self._fail(peer, error)
        return True


class SaidToHub:
    """What a peer has said of its work: the last of it, or all since the hub was lost.

    It is said again to a hub that was started anew, which may not have heard it, and knows what it counts by
    its numbers.
    """

    def __init__(self) -> None:
        self._said = deque[Outgoing](maxlen=RESERVE.most_repeated)
        self._keeps_all = False

    def record(self, outgoing: Outgoing) -> None:
        """Remember a message, if it is one that counts."""
        counts = isinstance(outgoing.message, LeaseDone | StepReport | DroppedMicrobatch)
        if outgoing.to != HUB or not counts:
            return
        self._said.append(outgoing)
        self._trim()

    def lose_hub(self) -> None:
        """Remember all from now on."""
        self._keeps_all = True

    def find_hub(self) -> None:
        """The same hub is back, and gets everything."""
        self._keeps_all = False
        self._trim()

    def say_again(self, build_id: int) -> list[Outgoing]:
        """Return what another hub may not have heard of a build."""
        return [each for each in self._said if getattr(each.message, "build_id", None) == build_id]

    def _trim(self) -> None:
        while not self._keeps_all and len(self._said) > _MOST_RECENT:
            self._said.popleft()
