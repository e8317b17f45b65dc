"""The weighted mean over one ring, as a state machine that does no I/O.

The vector is cut in as many parts as the ring has members, each part in chunks. The chunks of part i
start at member i and travel on their own: for n-1 hops each member adds its weighted share, the last of
them divides by the total weight once, and those same bits go round to all. Any delivery order between
chunks is correct. Driven by averaging.round; the caller leaves `vector` unchanged until the round ends.
"""

import math
from typing import Generic, Protocol, Self, TypeVar

from ravnest.protocol import Refusal, RingPart, RoundId, SegmentId


class Vector(Protocol):
    """What can be averaged: an array or tensor of one dimension."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> Self: ...
    def __add__(self, other: Self, /) -> Self: ...
    def __mul__(self, factor: float, /) -> Self: ...
    def __truediv__(self, divisor: float, /) -> Self: ...


V = TypeVar("V", bound=Vector)

_Key = tuple[int, int]  # part, chunk


class RingReduce(Generic[V]):
    """One member's side of one ring. Feed it what arrives; send its successor what it returns."""

    def __init__(
        self,
        round_id: RoundId,
        segment: SegmentId,
        position: int,
        num_members: int,
        vector: V,
        weight: float,
        chunk_size: int,
    ) -> None:
        assert 0 <= position < num_members, f"no place {position} in a ring of {num_members}"
        assert math.isfinite(weight), f"weight {weight} is no number of samples"
        assert weight >= 0, f"weight {weight} is no number of samples"
        assert chunk_size >= 1
        self._round_id = round_id
        self._segment = segment
        self._position = position
        self._num_members = num_members
        self._vector = vector
        self._weight = weight
        self._slices = _cut(len(vector), num_members, chunk_size)
        self._awaited = {key: self._first_hops(key[0]) for key in self._slices}
        self._finished: dict[_Key, V] = {}
        self._failure: str | None = None

    @property
    def done(self) -> bool:
        """Whether every chunk holds the mean over all members."""
        return len(self._finished) == len(self._slices)

    @property
    def failure(self) -> str | None:
        """Why this ring can never be done, if so."""
        return self._failure

    @property
    def pieces(self) -> tuple[V, ...]:
        """The mean, cut in consecutive pieces; only when done."""
        assert self.done, "the mean was asked for before the ring was done"
        return tuple(self._finished[key] for key in self._slices)

    def start(self) -> tuple[RingPart[V], ...]:
        """Return the chunks that start their journey here."""
        own = [key for key in self._slices if key[0] == self._position]
        if self._num_members == 1:
            self._finish_alone(own)
            return ()
        return tuple(self._message(key, 1, self._weight, self._share(key)) for key in own)

    def receive(self, part: RingPart[V]) -> RingPart[V] | Refusal | None:
        """Take a chunk from the predecessor; return what goes on to the successor, if anything."""
        reason = self._reason_against(part)
        if reason is not None:
            return Refusal(reason)
        key = (part.part, part.chunk)
        if part.hops < self._num_members:
            return self._add(key, part)
        del self._awaited[key]
        self._finished[key] = part.value
        if part.hops == 2 * self._num_members - 2:  # the successor is where the mean came from
            return None
        return self._message(key, part.hops + 1, part.weight, part.value)

    def _add(self, key: _Key, part: RingPart[V]) -> RingPart[V] | None:
        value = part.value + self._share(key)
        weight = part.weight + self._weight
        if part.hops < self._num_members - 1:
            self._awaited[key] = part.hops + self._num_members
            return self._message(key, part.hops + 1, weight, value)
        del self._awaited[key]
        if not 0 < weight < math.inf:
            self._fail(weight)
            return None
        mean = value / weight
        self._finished[key] = mean
        return self._message(key, part.hops + 1, weight, mean)

    def _finish_alone(self, own: list[_Key]) -> None:
        if self._weight == 0 and own:
            self._fail(self._weight)
            return
        for key in own:
            del self._awaited[key]
            self._finished[key] = self._vector[self._slices[key]] * 1.0  # a copy

    def _fail(self, weight: float) -> None:
        self._failure = f"segment {self._segment}: no mean exists for a total weight of {weight}"

    def _reason_against(self, part: RingPart[V]) -> str | None:
        name = f"segment {part.segment} part {part.part} chunk {part.chunk} hop {part.hops}"
        if (part.round_id, part.segment) != (self._round_id, self._segment):
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

    def _first_hops(self, part: int) -> int:
        """Return the hops after which a chunk first arrives here; its origin sees only the mean."""
        return (self._position - part) % self._num_members or self._num_members

    def _share(self, key: _Key) -> V:
        return self._vector[self._slices[key]] * self._weight

    def _message(self, key: _Key, hops: int, weight: float, value: V) -> RingPart[V]:
        return RingPart(self._round_id, self._segment, *key, hops, weight, value)


def _cut(length: int, num_parts: int, chunk_size: int) -> dict[_Key, slice]:
    """Cut [0, length) in near-equal parts and these in chunks, in the order of the vector."""
    slices: dict[_Key, slice] = {}
    for part in range(num_parts):
        start, stop = part * length // num_parts, (part + 1) * length // num_parts
        for chunk, low in enumerate(range(start, stop, chunk_size)):
            slices[part, chunk] = slice(low, min(low + chunk_size, stop))
    return slices
