"""The transport without a network: the same links over connections that exist in memory and virtual time.

A MemoryNetwork carries frames between the transports of one event loop with each pair's delay and
bandwidth, cuts connections and partitions on demand. On a VirtualLoop time stands still while anything
can run and then jumps to the next timer: a run takes no real time and is the same each time.
"""

import asyncio
import selectors
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any, Self, TypeVar

from ravnest.errors import ConfigError, LinkError
from ravnest.net.endpoint import Admit, Endpoint
from ravnest.net.identity import KeyPair, peer_of
from ravnest.net.streams import Frames
from ravnest.net.transport import PeerId, PublicKey, TransportLimits

_T = TypeVar("_T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps. Threads and real sockets have no place on it."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._now

    def _jump(self, seconds: float) -> None:
        self._now += seconds


def run_virtual(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("everything waits, and no timer is set that could end it")
        self._jump(timeout)
        return []


@dataclass(frozen=True, slots=True)
class Wire:
    """What lies between two peers, each way."""

    delay_seconds: float = 0.01
    bytes_per_second: float = 100e6


class MemoryNetwork:
    """Which transports can be reached at which address, over what wires."""

    def __init__(self, wire: Wire | None = None) -> None:
        self._default = wire or Wire()
        self._wires: dict[frozenset[PeerId], Wire] = {}
        self._listeners: dict[str, MemoryTransport] = {}
        self._connections: dict[_Connection, None] = {}  # a set in order
        self._groups: tuple[frozenset[PeerId], ...] = ()
        self._waiting_dials: list[tuple[MemoryTransport, _Connection, str]] = []  # at one that is cut off
        self._dead: set[PeerId] = set()

    @property
    def num_sides(self) -> int:
        """How many sides of connections are open: two for each."""
        return len(self._connections)

    def set_wire(self, one: PeerId, other: PeerId, wire: Wire) -> None:
        """Change what lies between two peers, from the next frame on."""
        self._wires[frozenset((one, other))] = wire

    def cut(self, one: PeerId, other: PeerId, reason: str = "the connection was reset") -> None:
        """End the connections between two peers; what was on its way is lost, they may connect again."""
        self._end({one, other}.issuperset, reason)

    def partition(self, *groups: Collection[PeerId]) -> None:
        """Let nothing pass between these groups; what is sent waits, as with TCP, until there is no group."""
        self._groups = tuple(frozenset(group) for group in groups)
        for connection in tuple(self._connections):
            connection.go_on()
        waiting, self._waiting_dials = self._waiting_dials, []
        for one, near, address in waiting:
            one._meet(near, address)

    def kill(self, peer: PeerId, *, is_silent: bool = False) -> None:
        """Take a process from the network: others see resets (kill -9), or nothing at all (power cut)."""
        self._dead.add(peer)
        self._listeners = {where: one for where, one in self._listeners.items() if one.peer != peer}
        if not is_silent:
            self._end(lambda ends: peer in ends, "the connection was reset")

    def revive(self, peer: PeerId) -> None:
        """Let a new process with a dead one's key come."""
        self._dead.discard(peer)

    def carries(self, one: PeerId, other: PeerId) -> bool:
        """Whether anything passes between two peers now."""
        return not self.is_dead(one, other) and not any((one in g) != (other in g) for g in self._groups)

    def is_dead(self, one: PeerId, other: PeerId) -> bool:
        """Whether nothing will ever pass between two peers."""
        return bool(self._dead & {one, other})

    def wire(self, one: PeerId, other: PeerId) -> Wire:
        """Return what lies between two peers."""
        return self._wires.get(frozenset((one, other)), self._default)

    def _end(self, concerns: Callable[[set[PeerId]], bool], reason: str) -> None:
        for connection in tuple(self._connections):
            if concerns({connection.owner.peer, connection.peer}):
                connection.end(reason)


class MemoryTransport(Endpoint):
    """See transport.Transport. `listen` is any word, or None to only dial."""

    def __init__(
        self,
        network: MemoryNetwork,
        keys: KeyPair,
        random: Random,
        listen: str | None = None,
        limits: TransportLimits | None = None,
        admit: Admit | None = None,
    ) -> None:
        super().__init__(keys, random, limits, admit)
        self.network = network
        self.address = listen

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        if self.address in self.network._listeners:
            raise ConfigError(f"cannot listen at {self.address}: it is taken, choose another")
        if self.address is not None:
            self.network._listeners[self.address] = self
        return self

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        if self.network._listeners.get(self.address or "") is self:
            del self.network._listeners[self.address or ""]

    async def answers(self, key: PublicKey, address: str) -> bool:
        peer = peer_of(key)
        answered: asyncio.Future[None] = self._loop.create_future()
        delay_seconds = 2 * self.network.wire(self.peer, peer).delay_seconds
        timer = self._loop.call_later(delay_seconds, answered.set_result, None)
        try:
            await answered
        finally:
            timer.cancel()
        there = self.network._listeners.get(address)
        return there is not None and there.peer == peer and there._may_connect(self.peer)

    def _open(self, peer: PeerId, key: PublicKey, address: str) -> "_Connection":
        near = _Connection(self, peer, is_dialled=True)
        self._loop.call_later(2 * self.network.wire(self.peer, peer).delay_seconds, self._meet, near, address)
        return near

    def _meet(self, near: "_Connection", address: str) -> None:
        """Finish the handshake, a round trip after it began."""
        there = self.network._listeners.get(address)
        if near.is_closed or self.network.is_dead(self.peer, near.peer):
            return
        if not self.network.carries(self.peer, near.peer):
            self.network._waiting_dials.append((self, near, address))
            return
        if there is None or there.peer != near.peer:
            self._lost(near, "nobody answers at this address" if there is None else "it has another key")
        elif not there._may_connect(self.peer):
            self._lost(near, "refused at the handshake: this key is not allowed there")
        else:
            near.join(_Connection(there, self.peer, is_dialled=False))


class _Connection:
    """One side of a connection; frames sent before the other side is there wait for it."""

    def __init__(self, owner: MemoryTransport, peer: PeerId, *, is_dialled: bool) -> None:
        self.owner = owner
        self.peer = peer
        self.is_dialled = is_dialled
        self.is_closed = False
        self._far: _Connection | None = None
        self._early: list[Frames] = []
        self._unsent: list[Frames] = []  # while the network is parted
        self._untaken: list[list[memoryview]] = []
        self._is_ending = False
        self._free_at = 0.0  # when the wire has taken what was sent before
        self._arrives_at = 0.0

    def join(self, far: "_Connection") -> None:
        self._far, far._far = far, self
        self.owner.network._connections |= {self: None, far: None}
        for frames in self._early:
            self.send(frames)

    def send(self, frames: Frames) -> None:
        if self.is_closed:
            raise LinkError("the connection is closed")
        if self._far is None:
            self._early.append(frames)
            return
        loop, network = self.owner._loop, self.owner.network
        if not network.carries(self.owner.peer, self.peer):
            if not network.is_dead(self.owner.peer, self.peer):
                self._unsent.append([bytes(frame) for frame in frames])
            return
        wire = network.wire(self.owner.peer, self.peer)
        copies = [memoryview(bytearray(frame)) for frame in frames]
        size = sum(copy.nbytes for copy in copies)
        self._free_at = max(self._free_at, loop.time()) + size / wire.bytes_per_second
        self._arrives_at = max(self._arrives_at, self._free_at + wire.delay_seconds)
        loop.call_at(self._arrives_at, self._far.accept, copies)

    def accept(self, frames: list[memoryview]) -> None:
        if self.is_closed:
            return
        if self.owner.network.carries(self.owner.peer, self.peer):
            self.owner._arrived(self, frames)
        elif not self.owner.network.is_dead(self.owner.peer, self.peer):
            self._untaken.append(frames)

    def go_on(self) -> None:
        """Let pass what was held, in its order."""
        if self.is_closed or not self.owner.network.carries(self.owner.peer, self.peer):
            return
        untaken, self._untaken = self._untaken, []
        for frames in untaken:
            self.owner._loop.call_soon(self.accept, frames)
        unsent, self._unsent = self._unsent, []
        for held in unsent:
            self.send(held)
        if self._is_ending:
            self.owner._loop.call_soon(self.notice_end)

    def end(self, reason: str) -> None:
        if not self.is_closed:
            self.owner._lost(self, reason)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.owner.network._connections.pop(self, None)
        if self._far is not None:
            # Like a socket's end: seen by the other side after all that was sent.
            delay = self.owner.network.wire(self.owner.peer, self.peer).delay_seconds
            when = max(self._arrives_at, self.owner._loop.time() + delay)
            self.owner._loop.call_at(when, self._far.notice_end)

    def notice_end(self) -> None:
        self._is_ending = not self.owner.network.carries(self.owner.peer, self.peer)
        if not self._is_ending:
            self.end("the connection was closed")
