"""What an endpoint knows of one peer, and what it needs of a connection. Records only."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from ravnest.net.frames import Frames
from ravnest.net.inbox import Inbox
from ravnest.net.link import Link
from ravnest.net.transport import Event, PeerId, PublicKey, Service


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


@dataclass(slots=True, eq=False)
class Neighbour:
    """All there is about one peer."""

    peer: PeerId
    link: Link
    connection: Connection | None = None
    dial: Dial | None = None
    timer: asyncio.TimerHandle | None = None
    ack_timer: asyncio.TimerHandle | None = None
    up_since: float | None = None
    is_awake: bool = False
    unsent: tuple[deque[Unsent], ...] = field(default_factory=lambda: tuple(deque() for _ in Service))
