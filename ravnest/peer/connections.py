"""How a peer gets links to the others of its plan: straight where it can, through the hub's relay where not.

Each side dials where the other listens. If there is no link after a moment, or nobody listens, both go to the
relay with the ticket the hub gave them: the smaller id awaits there, the other dials it as its last address.
If nothing leads to a neighbour that work waits for, one of the two gives up, so that there is another plan.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from ravnest.config import TIMEOUTS, Timeouts
from ravnest.net.relay import RelayAddress, await_through, dial_through
from ravnest.net.transport import PeerId, Transport

Start = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(frozen=True, slots=True)
class Acquaintance:
    """Somebody to have a link to; without a ticket there is no way through the relay."""

    peer: PeerId
    addresses: tuple[str, ...]
    ticket: bytes = b""
    name: str = ""


class Connections:
    """The links one peer is to have. `door` is where it listens itself, seen from this PC.

    `give_up` is told why, when there is no link to somebody who is needed; and again, while there is none.
    """

    def __init__(
        self,
        transport: Transport,
        door: RelayAddress | None,
        *,
        is_reachable: bool,
        start: Start,
        give_up: Callable[[str], None],
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        self._timeouts, self._net = timeouts.peer, timeouts.net
        self._transport = transport
        self._door = door
        self._is_reachable = is_reachable  # others know where it listens
        self._start = start
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._relay: RelayAddress | None = None
        self._mates: dict[PeerId, Acquaintance] = {}
        self._timers: dict[PeerId, asyncio.TimerHandle] = {}
        self._deadlines: dict[PeerId, asyncio.TimerHandle] = {}
        self._tried: dict[PeerId, dict[str, str]] = {}  # addresses, and why there is no link
        self._needed: Collection[str] = ()
        self._ways: dict[PeerId, asyncio.Task[None]] = {}  # through the relay

    def meet(
        self, mates: Iterable[Acquaintance], relay: RelayAddress | None, needed: Collection[str] = ()
    ) -> None:
        """Get links to these, and no longer to others; ways that lead to them already stay.

        Work waits for those whose names are needed.
        """
        before, self._mates = self._mates, {mate.peer: mate for mate in mates}
        if relay != self._relay:
            self._relay, before = relay, {}
        for peer in tuple(self._ways):
            if peer not in self._mates or before.get(peer) != self._mates[peer]:
                self._ways.pop(peer).cancel()
        self.close()
        self._tried, self._needed = {}, needed
        for mate in self._mates.values():
            self._miss(mate)
            if mate.addresses and mate.peer not in self._ways:
                self._transport.dial(mate.peer, mate.addresses)
            self._look_later(mate)

    def notice_loss(self, peer: PeerId) -> None:
        """Go through the relay if a link that was lost does not come back by itself."""
        if peer in self._mates:
            self._look_later(self._mates[peer])
            self._miss(self._mates[peer])

    def notice_failure(self, peer: PeerId, address: str, reason: str) -> None:
        """Remember what was tried."""
        self._tried.setdefault(peer, {})[address] = reason

    def close(self) -> None:
        """Wait for nothing any more; whoever gave `start` ends what was started."""
        for timer in (*self._timers.values(), *self._deadlines.values()):
            timer.cancel()
        self._timers, self._deadlines = {}, {}

    def _miss(self, mate: Acquaintance) -> None:
        """Give up after a while; of two that can be reached alike, the smaller id first."""
        if mate.name not in self._needed:
            return
        is_first = (self._is_reachable, self._transport.peer) < (bool(mate.addresses), mate.peer)
        timeouts = self._timeouts  # the second to give up has heard of another plan before
        seconds = timeouts.give_up_seconds + (0.0 if is_first else timeouts.give_up_later_seconds)
        if mate.peer in self._deadlines:
            self._deadlines[mate.peer].cancel()
        self._deadlines[mate.peer] = self._loop.call_later(seconds, self._say_missing, mate, seconds)

    def _say_missing(self, mate: Acquaintance, seconds: float) -> None:
        if mate.peer in self._transport.connected():
            return
        self._miss(mate)
        failed = self._tried.get(mate.peer, {})
        tried = [f"{each} ({failed.get(each, 'no answer')})" for each in mate.addresses]
        tried += ["the hub's relay"] if mate.peer in self._ways else []
        told = ", ".join(tried) if tried else "nothing, for it told no address and there is no relay"
        self._give_up(
            f"no link to {mate.name} for {seconds:.0f} s, so the two cannot train side by side; tried {told}"
        )

    def _look_later(self, mate: Acquaintance) -> None:
        can_be_direct = mate.addresses or self._is_reachable
        seconds = self._timeouts.relay_after_seconds if can_be_direct else 0.0
        if mate.peer in self._timers:
            self._timers[mate.peer].cancel()
        self._timers[mate.peer] = self._loop.call_later(seconds, self._look, mate)

    def _look(self, mate: Acquaintance) -> None:
        if mate.peer in self._ways or mate.peer in self._transport.connected():
            return
        if self._relay is None or not mate.ticket:
            return
        if mate.peer > self._transport.peer:
            if self._door is not None:
                work = await_through(self._relay, mate.ticket, self._door, self._net)
                self._ways[mate.peer] = self._start(work)
            return
        self._ways[mate.peer] = self._start(self._dial_through(mate, self._relay))

    async def _dial_through(self, mate: Acquaintance, relay: RelayAddress) -> None:
        async with dial_through(relay, mate.ticket, self._net) as address:
            self._transport.dial(mate.peer, (*mate.addresses, address))
            await self._loop.create_future()
