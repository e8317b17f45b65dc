"""How far away a node is and how fast it sends, measured with content that every program has.

A node is asked for ever larger pieces of that content until the link takes its time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf

from blake3 import blake3

from ravnest.ids import NodeId
from ravnest.protocol.placement import BlobPart, BlobRef, BlobRequest
from ravnest.transfer.blobs import name_blob
from ravnest.transfer.outbox import Outgoing

# Single bytes for the round trip, then larger pieces; the last one twice, for TCP speeds up.
_PIECES = (1, 1, 1, 1 << 15, 1 << 18, 1 << 20, 1 << 20)
_ENOUGH_SECONDS, _ENOUGH_ROUND_TRIPS = 0.1, 4
_LEAST_SECONDS = 1e-3  # what took less could not be timed: the link is at least so fast


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """How far away a node is, one way, and how fast it sends."""

    latency_seconds: float
    bytes_per_second: float


@cache
def ballast() -> bytes:
    """Return the blob that every program has. Its bytes are random, so that no link can compress them."""
    return blake3(b"ballast").digest(length=_PIECES[-1])


@cache
def name_ballast() -> BlobRef:
    """Return the name of that blob."""
    return name_blob(ballast())


class LinkProbe:
    """Times the links from other nodes, one piece at a time for each.

    Every program has the same blob of ballast. A node is asked for ever larger pieces of it until the link
    takes its time. Pure: requests come out, and the caller sends them.
    """

    def __init__(self) -> None:
        self._timings: dict[NodeId, _Timing] = {}

    def start(
        self, source: NodeId, clock: Callable[[], float], done: Callable[[LinkTimes], None]
    ) -> Outgoing:
        """Return the first request to a node; `done` gets the times if the node answers them all."""
        self._timings[source] = timing = _Timing(clock, done)
        return timing.ask(source)

    def receive(self, sender: NodeId, piece: BlobPart) -> list[Outgoing] | None:
        """Time a piece and return the next request; None if it is not the piece that was asked for."""
        timing = self._timings.get(sender)
        if timing is None or (piece.blob, piece.size_bytes) != (name_ballast().blob, timing.size):
            return None
        if not timing.record():
            return [timing.ask(sender)]
        del self._timings[sender]
        timing.done(LinkTimes(timing.round_trip / 2, timing.rate))
        return []


@dataclass(slots=True)
class _Timing:
    clock: Callable[[], float]
    done: Callable[[LinkTimes], None]
    turn: int = 0
    asked_at: float = 0.0
    round_trip: float = inf
    rate: float = 0.0

    @property
    def size(self) -> int:
        return _PIECES[self.turn]

    def ask(self, source: NodeId) -> Outgoing:
        self.asked_at = self.clock()
        return Outgoing(source, BlobRequest(name_ballast().blob, 0, self.size))

    def record(self) -> bool:
        """Record that the piece asked for is here; return whether enough is known."""
        seconds = self.clock() - self.asked_at
        if self.size == 1:
            self.round_trip = min(self.round_trip, seconds)
        else:
            rate = self.size / max(seconds - self.round_trip, _LEAST_SECONDS)
            is_repeated = self.size == _PIECES[self.turn - 1]
            self.rate = max(rate, self.rate) if is_repeated else rate
        is_enough = seconds > max(_ENOUGH_SECONDS, _ENOUGH_ROUND_TRIPS * self.round_trip)
        self.turn += 1
        return self.turn == len(_PIECES) or (self.rate > 0 and is_enough)
