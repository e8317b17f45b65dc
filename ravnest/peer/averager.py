"""One stage's part in the rounds: copies its vectors, runs all its rings at once, merges what was agreed.

A round works on copies taken between two pieces of work; training may go on meanwhile, and what it changed
survives, because a commit adds (average - copy). Owned by the compute thread beside the worker. Driven by
peer.host.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ravnest.averaging.ring import RingReduce
from ravnest.averaging.round import Phase, Round
from ravnest.codec import decode, describe, encode
from ravnest.config import WireFormat
from ravnest.engine.stage import Stage
from ravnest.errors import ProtocolError
from ravnest.exchange import HUB, Parcel
from ravnest.model.flat import Layout
from ravnest.net.transport import Buffer
from ravnest.peer.place import Place
from ravnest.peer.tied import TiedWeights
from ravnest.plan.types import NodeId, Ring
from ravnest.protocol import (
    Refusal,
    RingPart,
    RoundAbort,
    RoundCommit,
    RoundId,
    RoundOpen,
    RoundQuery,
    RoundReady,
    SegmentId,
    TensorSpec,
)

_CHUNK_ITEMS = 1 << 18  # of float32: one megabyte, so that chunks follow each other around the ring
_LATE_STRENGTH = 0.5  # of an average that arrives while training went on: full strength is unstable
_ASK_SECONDS = 1.0


Value = TypeVar("Value")


def _with_value(part: RingPart[TensorSpec] | RingPart[Tensor], value: Value) -> RingPart[Value]:
    return RingPart(part.round_id, part.segment, part.part, part.chunk, part.hops, part.weight, value)


class Averager:
    """Takes part in one round at a time; `clock` tells seconds."""

    def __init__(
        self,
        place: Place,
        rings: Sequence[tuple[SegmentId, Ring]],
        layout: Layout,
        stage: Stage,
        tied: TiedWeights,
        clock: Callable[[], float],
    ) -> None:
        self._node, self._device = place.node, place.device
        self._rings = dict(rings)
        self._layout = layout
        self._stage = stage
        self._tied = tied
        self._clock = clock
        self._round: Round[Tensor] | None = None
        self._round_id = RoundId(0)
        self._copies: dict[SegmentId, Tensor] = {}
        self._successors: dict[SegmentId, NodeId] = {}
        self._is_blocking = False
        self._early: list[tuple[RingPart[TensorSpec], Sequence[Buffer]]] = []

    @property
    def is_blocking(self) -> bool:
        """Whether a round is open during which nothing may be trained."""
        return self._is_blocking and self._round is not None

    @property
    def deadline(self) -> float | None:
        """When `tick` is due next."""
        return self._due if self._round is not None else None

    def open(self, order: RoundOpen, weight: float) -> list[Parcel]:
        """Start a round with this many samples as the weight of what this stage has."""
        state = self._stage.state
        members: dict[SegmentId, RingReduce[Tensor]] = {}
        self._copies, self._successors = {}, {}
        for segment, ring in self._rings.items():
            owners = [owner for owner in ring.owners if owner not in order.left_out]
            place = owners.index(self._node)
            copy = self._layout.segment(ring.start, ring.stop).gather(state)
            self._copies[segment] = copy
            self._successors[segment] = owners[(place + 1) % len(owners)]
            members[segment] = RingReduce(
                order.round_id, segment, place, len(owners), copy, weight, _CHUNK_ITEMS
            )
        self._is_blocking = order.is_blocking
        self._due = self._clock() + order.deadline_seconds
        self._round_id = order.round_id
        self._round = Round(order.round_id, self._node, members, self._due)
        parcels = self._address(self._round.start())
        early, self._early = self._early, []
        for part, buffers in early:
            found = self.receive(part, buffers)
            parcels += [] if isinstance(found, Refusal) else found
        return parcels

    def receive(
        self, message: RingPart[TensorSpec] | RoundCommit | RoundAbort, buffers: Sequence[Buffer] = ()
    ) -> list[Parcel] | Refusal:
        """Take a part of a ring or the decision; return what to send."""
        if isinstance(message, RingPart) and message.round_id > self._round_id:
            self._early.append((message, buffers))  # a neighbour heard of the round first
            return []
        if self._round is None:
            return Refusal(f"{type(message).__name__} of round {message.round_id}, which is not open here")
        if isinstance(message, RingPart):
            if message.value.dtype != "float32" or len(message.value.shape) != 1:
                raise ProtocolError(f"a ring part of {message.value.dtype} {message.value.shape}")
            found = self._round.receive(_with_value(message, decode(buffers[0], message.value, self._device)))
        else:
            found = self._round.receive(message)
        if isinstance(found, Refusal):
            return found
        return [*self._address(found), *self._settle()]

    def tick(self, now: float) -> list[Parcel]:
        """Give up at the deadline, or ask what became of the round."""
        if self._round is None or now < self._due:
            return []
        said = self._round.expire(now)
        self._due = now + _ASK_SECONDS
        return [*self._settle(), *([] if said is None else [Parcel(HUB, said)])]

    def _settle(self) -> list[Parcel]:
        """End a round that is decided; merge what a commit agreed on, and tell who shares a weight of it."""
        assert self._round is not None
        if self._round.phase not in (Phase.COMMITTED, Phase.ABORTED):
            return []
        averages = self._round.take_averages() or {}
        strength = 1.0 if self._is_blocking else _LATE_STRENGTH
        changes: dict[str, Tensor] = {}
        for segment, pieces in averages.items():
            ring = self._rings[segment]
            change = (
                (torch.cat(pieces) - self._copies[segment]).mul_(strength)
                if pieces
                else torch.empty(0, device=self._device)
            )
            changes |= self._layout.segment(ring.start, ring.stop).views(change)
        self._round, self._copies = None, {}
        own, parcels = self._tied.commit(changes)
        self._stage.add(own)
        return parcels

    def _address(
        self, messages: Sequence[RingPart[Tensor] | RoundReady | RoundAbort | RoundQuery]
    ) -> list[Parcel]:
        parcels = []
        for message in messages:
            if isinstance(message, RingPart):
                spec = describe(message.value, WireFormat.FP32)
                buffer = encode(message.value, WireFormat.FP32)
                part = _with_value(message, spec)
                parcels.append(Parcel(self._successors[message.segment], part, (buffer,)))
            else:
                parcels.append(Parcel(HUB, message))
        return parcels
