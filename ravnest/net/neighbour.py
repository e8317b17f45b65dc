"""What an endpoint knows of one peer, and what it needs of a connection. It does no I/O."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from ravnest.errors import LinkError
from ravnest.net.frames import Frames
from ravnest.net.inbox import Inbox
from ravnest.net.link import Link
from ravnest.net.transport import Event, PeerId, PublicKey, Service

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
_SERVICES = tuple(Service)  # to go through an enumeration costs more


class Connection(Protocol):
    """One ordered way to a peer whose key was proven. Carries nothing once closed."""

    peer: PeerId
    is_dialled: bool

    def send(self, frames: Frames) -> None:
        """Pass on without waiting; LinkError when the connection is gone."""

    def close(self) -> None:
        """Let go of it; safe to call twice."""


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """An event the program has not taken yet, and who wants to know when it does."""

    priority: int
    number: int
    event: Event = field(compare=False)
    inbox: Inbox | None = field(compare=False)


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

    def fail(self, *, was_up: bool) -> float:
        """Turn to the next address; return the pause before, which after the last of them doubles."""
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self.num_passes, 10))
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
        """Tell those who wait for credit that there will be none."""
        for unsent in (entry for queue in self.unsent for entry in queue):
            if not unsent.accepted.done():
                unsent.accepted.set_exception(error)
