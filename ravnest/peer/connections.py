"""Links to the other peers of a plan: direct where possible, through the hub's relay where not.

Each side dials where the other listens. If there is no link after a moment, or none listens, both go to the
relay with the ticket of the hub: the smaller id waits there, the other dials it as its last address. From
then on both look for the straight way now and then. If nothing leads to a neighbour that work waits for, one
of the two gives up, so that there is another plan.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from ravnest.config import TIMEOUTS, Timeouts
from ravnest.net.relay import RelayAddress, await_through, dial_through
from ravnest.net.transport import PeerId, Transport

logger = logging.getLogger(__name__)

Start = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(frozen=True, slots=True)
class PlannedPeer:
    """A peer to have a link to; without a ticket there is no way through the relay."""

    peer: PeerId
    addresses: tuple[str, ...]
    ticket: bytes = b""
    name: str = ""


class Connections:
    """The links one peer is to have; `listens_at` is its own address, seen from this PC.

    `give_up` is called with the reason when a needed peer has no link, and again while it has none.
    """

    def __init__(
        self,
        transport: Transport,
        listens_at: RelayAddress | None,
        *,
        is_reachable: bool,
        start: Start,
        give_up: Callable[[str], None],
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        self._timeouts, self._net = timeouts.peer, timeouts.net
        self._transport = transport
        self._listens_at = listens_at
        self._is_reachable = is_reachable  # others know where it listens
        self._start = start
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._relay: RelayAddress | None = None
        self._planned: dict[PeerId, PlannedPeer] = {}
        self._timers: dict[PeerId, asyncio.TimerHandle] = {}
        self._deadlines: dict[PeerId, asyncio.TimerHandle] = {}
        self._tried: dict[PeerId, dict[str, str]] = {}  # addresses, and why there is no link
        self._needed: Collection[str] = ()
        self._relayed: dict[PeerId, asyncio.Task[None]] = {}
        self._straight: set[PeerId] = set()  # those that were dialled at an address of theirs
        self._looks: dict[PeerId, asyncio.TimerHandle] = {}

    def connect(
        self, peers: Iterable[PlannedPeer], relay: RelayAddress | None, needed: Collection[str] = ()
    ) -> None:
        """Get links to these peers, and to no others; links that exist stay.

        Work waits for the peers whose names are in `needed`.
        """
        before, self._planned = self._planned, {each.peer: each for each in peers}
        if relay != self._relay:
            self._relay, before = relay, {}
        for peer in tuple(self._relayed):
            if peer not in self._planned or before.get(peer) != self._planned[peer]:
                self._relayed.pop(peer).cancel()
        self.close()
        self._tried, self._needed = {}, needed
        for planned in self._planned.values():
            self._start_deadline(planned)
            if planned.addresses and planned.peer not in self._relayed:
                self._transport.dial(planned.peer, planned.addresses)
            self._relay_later(planned)
            self._look_later(planned.peer)

    def record_link(self, peer: PeerId, address: str | None) -> None:
        """Look for a straight way to a peer if its link may lead through the relay."""
        if peer in self._planned and address in self._planned[peer].addresses:
            if peer in self._relayed and peer not in self._straight:
                logger.info("%s is reached directly again", self._planned[peer].name)
            self._straight.add(peer)
        self._look_later(peer)

    def record_loss(self, peer: PeerId) -> None:
        """Go through the relay if a link that was lost does not come back by itself."""
        self._straight.discard(peer)
        if peer in self._planned:
            self._relay_later(self._planned[peer])
            self._start_deadline(self._planned[peer])

    def record_failure(self, peer: PeerId, address: str, reason: str) -> None:
        """Record what was tried."""
        self._tried.setdefault(peer, {})[address] = reason

    def close(self) -> None:
        """Stop all timers; the owner of `start` ends what was started."""
        for timer in (*self._timers.values(), *self._deadlines.values(), *self._looks.values()):
            timer.cancel()
        self._timers, self._deadlines, self._looks = {}, {}, {}

    def _look_later(self, peer: PeerId, seconds: float | None = None) -> None:
        """Look for a straight way to a peer that was met at the relay, after a while."""
        if peer in self._looks:
            self._looks.pop(peer).cancel()
        if peer in self._relayed and peer in self._planned and peer not in self._straight:
            pause = self._timeouts.look_seconds if seconds is None else seconds
            self._looks[peer] = self._loop.call_later(pause, self._look, self._planned[peer], pause)

    def _look(self, planned: PlannedPeer, pause: float) -> None:
        if planned.addresses:
            self._transport.redial(planned.peer, planned.addresses)
        self._look_later(planned.peer, min(2 * pause, self._timeouts.look_later_seconds))

    def _start_deadline(self, planned: PlannedPeer) -> None:
        """Give up after a while; of two that can be reached alike, the smaller id first."""
        if planned.name not in self._needed:
            return
        is_first = (self._is_reachable, self._transport.peer) < (bool(planned.addresses), planned.peer)
        timeouts = self._timeouts  # by then another plan has reached the second to give up
        seconds = timeouts.give_up_seconds + (0.0 if is_first else timeouts.give_up_later_seconds)
        if planned.peer in self._deadlines:
            self._deadlines[planned.peer].cancel()
        self._deadlines[planned.peer] = self._loop.call_later(seconds, self._report_missing, planned, seconds)

    def _report_missing(self, planned: PlannedPeer, seconds: float) -> None:
        if planned.peer in self._transport.connected():
            return
        self._start_deadline(planned)
        failed = self._tried.get(planned.peer, {})
        tried = [f"{each} ({failed.get(each, 'no answer')})" for each in planned.addresses]
        tried += ["the hub's relay"] if planned.peer in self._relayed else []
        told = ", ".join(tried) if tried else "nothing, for it told no address and there is no relay"
        self._give_up(
            f"no link to {planned.name} for {seconds:.0f} s, "
            f"so the two cannot train side by side; tried {told}"
        )

    def _relay_later(self, planned: PlannedPeer) -> None:
        can_be_direct = planned.addresses or self._is_reachable
        seconds = self._timeouts.relay_after_seconds if can_be_direct else 0.0
        if planned.peer in self._timers:
            self._timers[planned.peer].cancel()
        self._timers[planned.peer] = self._loop.call_later(seconds, self._use_relay, planned)

    def _use_relay(self, planned: PlannedPeer) -> None:
        if planned.peer in self._relayed or planned.peer in self._transport.connected():
            return
        if self._relay is None or not planned.ticket:
            return
        logger.info("%s is not reached directly: what goes there goes through the hub now", planned.name)
        if planned.peer > self._transport.peer:
            if self._listens_at is not None:
                work = await_through(self._relay, planned.ticket, self._listens_at, self._net)
                self._relayed[planned.peer] = self._start(work)
            return
        self._relayed[planned.peer] = self._start(self._dial_through(planned, self._relay))

    async def _dial_through(self, planned: PlannedPeer, relay: RelayAddress) -> None:
        async with dial_through(relay, planned.ticket, self._net) as address:
            self._transport.dial(planned.peer, (*planned.addresses, address))
            await self._loop.create_future()
