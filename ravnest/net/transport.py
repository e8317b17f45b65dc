"""The transport: all that the rest of Ravnest sees of the network, and the records that cross that line.

A message is a small header and raw buffers. It goes to a peer with a class of service and arrives once, in
order within its service. There are two: zeromq (real sockets) and memory (virtual time).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import NewType, Protocol

from ravnest.config import TIMEOUTS, NetTimeouts
from ravnest.errors import LinkError
from ravnest.protocol.tensors import Buffer

PeerId = NewType("PeerId", str)  # a short hash of the public key: identity.peer_of
PublicKey = NewType("PublicKey", bytes)

MIB = 1024 * 1024


class Service(IntEnum):
    """Classes of service, the most urgent first."""

    CONTROL = 0
    GRADIENT = 1
    ACTIVATION = 2
    AVERAGING = 3
    BLOB = 4


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """What a message may measure, how much of each service may be on its way or unread there, how fast."""

    header_bytes: int = 64 * 1024
    num_buffers: int = 256
    message_bytes: int = 2048 * MIB
    incoming_bytes: int = 2048 * MIB  # of a message that is taken, where less is sent than may be
    chunk_bytes: int = MIB
    window_bytes: int = (
        4 * MIB
    )  # handed to the wire and not yet confirmed; what an urgent message waits behind
    credit_bytes: tuple[int, ...] = (4 * MIB, 64 * MIB, 64 * MIB, 64 * MIB, 32 * MIB)  # by Service
    upload_bytes_per_second: float = inf  # over all links together
    timeouts: NetTimeouts = TIMEOUTS.net


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message that arrived; the buffers may be kept and written to."""

    sender: PeerId
    service: Service
    header: bytes
    buffers: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A neighbour is connected; if `is_new`, it remembers nothing and what it had not confirmed is lost."""

    peer: PeerId
    is_new: bool
    address: str | None = None  # where we dialled it, if it was us


@dataclass(frozen=True, slots=True)
class LinkDown:
    """A neighbour that was connected no longer is."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class DialFailed:
    """An attempt to connect failed; the next one follows by itself."""

    peer: PeerId
    reason: str
    is_refusal: bool = False  # it is there, and said so
    address: str = ""  # where


TransportEvent = Delivery | LinkUp | LinkDown | DialFailed


class Transport(Protocol):
    """The links of one program to others. It is an async context manager; leaving it closes every link."""

    @property
    def peer(self) -> PeerId:
        """The id of this program."""

    async def send(self, to: PeerId, service: Service, header: bytes, buffers: Sequence[Buffer] = ()) -> None:
        """Hand over a message; return when there is credit for it.

        A peer that is allowed but not connected gets it once it is. The buffers belong to the transport
        from here on: they are sent without a copy, so they must not change any more. Raises LinkError for a
        peer that is not allowed, a message over the limits, or no credit before the deadline.
        """

    async def receive(self) -> TransportEvent:
        """Return what happened next: link events first, then the most urgent message. Gives credit back."""

    def allow(self, keys: Iterable[PublicKey]) -> None:
        """Accept these keys and no others; links to others (but for those admitted) are dropped."""

    def dial(self, peer: PeerId, addresses: Sequence[str], greeting: bytes = b"") -> None:
        """Connect to an allowed peer where it answers first, and again whenever the link is lost."""

    def redial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Look once for another way to a connected peer; the first that answers takes over, with a LinkUp."""

    def drop(self, peer: PeerId, reason: str) -> None:
        """End the link to a peer, stop dialling it and forget what was to be sent."""

    def connected(self) -> frozenset[PeerId]:
        """Return the peers whose link is up."""

    async def answers(self, key: PublicKey, address: str) -> bool:
        """Return whether the owner of a key listens at an address, and would let this program in."""


def as_views(buffers: Sequence[Buffer]) -> tuple[memoryview, ...]:
    """Return the buffers as plain bytes, without a copy."""
    views = (memoryview(buffer) for buffer in buffers)
    return tuple(view.cast("B") if view.nbytes else memoryview(b"") for view in views)


def check_limits(header: bytes, buffers: Sequence[memoryview], limits: TransportLimits) -> int:
    """Return the message's size in bytes, or raise LinkError with the limit it breaks."""
    size = len(header) + sum(buffer.nbytes for buffer in buffers)
    if len(header) > limits.header_bytes:
        raise LinkError(
            f"a header of {len(header)} bytes is over the limit of {limits.header_bytes}: use a buffer"
        )
    if len(buffers) > limits.num_buffers:
        raise LinkError(
            f"a message of {len(buffers)} buffers is over the limit of {limits.num_buffers}: join some"
        )
    if size > limits.message_bytes:
        raise LinkError(f"a message of {size} bytes is over the limit of {limits.message_bytes}: cut it")
    return size
