"""The weighted mean over one ring, as a state machine that does no I/O.

The vector is cut into parts, at most one per member, and parts into chunks. Parts start at different members.
Each chunk travels alone: for n-1 hops each member adds its weighted share, the last one divides by the total
weight, and those bits go round to all. Any delivery order is correct. A Reducer says what a chunk is.
"""

import math
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from blake3 import blake3

from ravnest.config import WireFormat
from ravnest.ids import RoundId, SegmentId
from ravnest.protocol.averaging import RingPart
from ravnest.protocol.messages import Refusal
from ravnest.protocol.tensors import FLOAT_BYTES

_DIGEST_BYTES = 16  # of 32: a collision with an average that all others hold gains nothing
_LEAST_CHUNK, _MOST_CHUNK = 1 << 14, 1 << 18  # items: at most a megabyte of float32
_CHUNKS_PER_PART = 4  # so that they follow each other around the ring
_CHUNK_SECONDS = 0.02  # that a chunk may take on a link without holding up the next hop
_BLOCK = 256  # items with one scale: none is cut without need

_V = TypeVar("_V", bound=Sized)
_Key = tuple[int, int]  # part, chunk


class Reducer(Protocol[_V]):
    """What one member does to the chunks that pass it; what it returns is what all receivers will see."""

    @property
    def edges(self) -> tuple[int, ...]:
        """Where no chunk may reach across, in rising order; the last is the length of the vector."""

    def fault(self, where: slice, value: _V, weight: float, num_shares: int) -> str | None:
        """Say why no honest member sends this, if so: the sum of so many shares, or of 0 the mean."""

    def begin(self, where: slice, weight: float) -> _V:
        """Return this member's share, by its weight."""

    def add(self, where: slice, value: _V, weight: float) -> _V:
        """Return the sum of what came, whose memory it may use, and this member's share."""

    def finish(self, where: slice, value: _V, weight: float, total: float) -> _V:
        """Return the mean, from the sum without this member's share and the weight of all."""

    def keep(self, value: _V) -> _V:
        """Return a mean as it is kept until the round ends."""

    def content(self, value: _V) -> Any:
        """Return the bytes of a kept mean: the same in every member."""


@dataclass(frozen=True, slots=True)
class RingPosition:
    """A member's place in one ring of one round."""

    round_id: RoundId
    segment: SegmentId
    position: int
    num_members: int


class RingReduce(Generic[_V]):
    """One member's side of one ring. Feed it what arrives; send its successor what it returns."""

    def __init__(self, seat: RingPosition, passing: Reducer[_V], weight: float, chunk_size: int) -> None:
        assert 0 <= seat.position < seat.num_members, f"no such place: {seat}"
        assert math.isfinite(weight), f"weight {weight} is no number of samples"
        assert weight >= 0, f"weight {weight} is no number of samples"
        assert chunk_size >= 1
        self._seat = seat
        self._passing = passing
        self._weight = weight
        self._num_parts = max(1, min(seat.num_members, -(-passing.edges[-1] // chunk_size)))
        self._slices = cut_parts(passing.edges, self._num_parts, chunk_size)
        self._awaited = {key: self._first_hops(key[0]) for key in self._slices}
        self._own = [key for key in self._slices if self._origin(key[0]) == seat.position]
        self._finished: dict[_Key, _V] = {}
        self._digests: dict[_Key, bytes] = {}
        self._failure: str | None = None
        self._is_misled = False

    @property
    def done(self) -> bool:
        """Whether every chunk holds the mean over all members."""
        return len(self._finished) == len(self._slices)

    @property
    def first_missing(self) -> tuple[int, int] | None:
        """After how many hops the first chunk that is missing should have come, and less how many are.

        A member behind others waits for a later hop: the first of them knows which member stopped.
        """
        hops = min(self._awaited.values(), default=None)
        return None if hops is None else (hops, -sum(each == hops for each in self._awaited.values()))

    @property
    def num_own(self) -> int:
        """Chunks that start their journey here."""
        return len(self._own)

    @property
    def failure(self) -> str | None:
        """Why this ring can never be done, if so."""
        return self._failure

    @property
    def is_misled(self) -> bool:
        """Whether it failed by what its predecessor sent."""
        return self._is_misled

    @property
    def pieces(self) -> tuple[_V, ...]:
        """The mean, cut in consecutive pieces; only when done."""
        assert self.done, "the mean was asked for before the ring was done"
        return tuple(self._finished[key] for key in self._slices)

    @property
    def digest(self) -> bytes:
        """A hash of the mean, in the order of the vector; only when done."""
        assert self.done, "the mean was asked for before the ring was done"
        return blake3(b"".join(self._digests[key] for key in self._slices)).digest(_DIGEST_BYTES)

    def start(self) -> Iterator[RingPart[_V]]:
        """Return the chunks that start their journey here, each made when it is asked for."""
        for key in self._own:
            if self._seat.num_members == 1:
                self._finish(key, None, 0.0)
            else:
                value = self._passing.begin(self._slices[key], self._weight)
                yield self._message(key, 1, self._weight, value)

    def receive(self, part: RingPart[_V]) -> RingPart[_V] | Refusal | None:
        """Accept a chunk from the predecessor; return what goes on to the successor, if anything."""
        reason = self._reason_against(part)
        if reason is not None:
            return Refusal(reason)
        key, num_members = (part.part, part.chunk), self._seat.num_members
        where, is_sum = self._slices[key], part.hops < num_members
        fault = self._passing.fault(where, part.value, part.weight, part.hops if is_sum else 0)
        if fault is not None:
            self._failure, self._is_misled = f"segment {part.segment}: {fault}", True
            return None
        if is_sum:
            return self._add(key, part)
        self._keep(key, part.value)
        if part.hops == 2 * num_members - 2:  # the successor is where the mean came from
            return None
        return self._message(key, part.hops + 1, part.weight, part.value)

    def _add(self, key: _Key, part: RingPart[_V]) -> RingPart[_V] | None:
        if part.hops == self._seat.num_members - 1:
            return self._finish(key, part.value, part.weight)
        value = self._passing.add(self._slices[key], part.value, self._weight)
        self._awaited[key] = part.hops + self._seat.num_members
        return self._message(key, part.hops + 1, part.weight + self._weight, value)

    def _finish(self, key: _Key, value: _V | None, weight: float) -> RingPart[_V] | None:
        total, where = weight + self._weight, self._slices[key]
        if not 0 < total < math.inf:
            self._failure = f"segment {self._seat.segment}: no mean exists for a total weight of {total}"
            return None
        if value is None:
            mean = self._passing.begin(where, 1.0)
        else:
            mean = self._passing.finish(where, value, self._weight, total)
        self._keep(key, mean)
        return self._message(key, self._seat.num_members, total, mean)

    def _keep(self, key: _Key, mean: _V) -> None:
        del self._awaited[key]
        kept = self._finished[key] = self._passing.keep(mean)
        self._digests[key] = blake3(self._passing.content(kept)).digest()  # now: it is in the cache still

    def _reason_against(self, part: RingPart[_V]) -> str | None:
        name = f"segment {part.segment} part {part.part} chunk {part.chunk} hop {part.hops}"
        if (part.round_id, part.segment) != (self._seat.round_id, self._seat.segment):
            return f"{name} of round {part.round_id} belongs to another ring"
        awaited = self._awaited.get((part.part, part.chunk))
        if awaited is None or awaited != part.hops:
            return f"{name} is not awaited: a second copy, or not from the predecessor"
        where = self._slices[part.part, part.chunk]
        size = where.stop - where.start
        if len(part.value) != size:
            return f"{name} has {len(part.value)} elements instead of {size}"
        if not 0 <= part.weight < math.inf:
            return f"{name} has weight {part.weight}, which is no number of samples"
        return None

    def _origin(self, part: int) -> int:
        """Return where a part starts: short vectors of different segments start at different members."""
        step = part * self._seat.num_members // self._num_parts
        return (self._seat.segment + step) % self._seat.num_members

    def _first_hops(self, part: int) -> int:
        """Return the hops after which a chunk first arrives here; its origin sees only the mean."""
        return (self._seat.position - self._origin(part)) % self._seat.num_members or self._seat.num_members

    def _message(self, key: _Key, hops: int, weight: float, value: _V) -> RingPart[_V]:
        return RingPart(self._seat.round_id, self._seat.segment, *key, hops, weight, value)


def choose_least_chunk(bytes_per_second: float, wire_format: WireFormat) -> int:
    """Return how many items pass the slowest link in next to no time: fewer at once are only more work."""
    items = _CHUNK_SECONDS * bytes_per_second / (FLOAT_BYTES["float32"] * wire_format.ratio)
    return int(min(items, _MOST_CHUNK))


def choose_chunk_size(length: int, num_members: int, least: int = 0) -> int:
    """Return how many items travel at once: alike in all members, several chunks to a part if it is long."""
    wanted = max(-(-length // (num_members * _CHUNKS_PER_PART)), least)
    return min(max(-(-wanted // _BLOCK) * _BLOCK, _LEAST_CHUNK), _MOST_CHUNK)


def cut_parts(edges: tuple[int, ...], num_parts: int, chunk_size: int) -> dict[_Key, slice]:
    """Cut [0, length) in near-equal parts and these in chunks, in the order of the vector."""
    slices: dict[_Key, slice] = {}
    length = edges[-1]
    for part in range(num_parts):
        low, stop, chunk = part * length // num_parts, (part + 1) * length // num_parts, 0
        while low < stop:
            high = min(low + chunk_size, stop, *(edge for edge in edges if edge > low))
            slices[part, chunk] = slice(low, high)
            low, chunk = high, chunk + 1
    return slices
