"""What passes between the requester and the swarm: parts of stages, fields of microbatches, kept state.

Its work takes a while and runs beside the messages.
"""

import asyncio
from collections.abc import Callable
from typing import Any, assert_never

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.events import (
    CheckpointPart,
    Collect,
    Collected,
    Event,
    MakeParts,
    PartsMade,
    SendFields,
)
from ravnest.hub.service.owner import Owner
from ravnest.ids import MicrobatchId, NodeId
from ravnest.protocol.blobs import BlobRef
from ravnest.protocol.messages import Refusal
from ravnest.protocol.training import FieldParts
from ravnest.transfer.blobs import Blobs, Outgoing


class DataService:
    """Carries out orders that concern the owner; `in_background` runs a function where it delays nobody."""

    def __init__(  # noqa: PLR0913 - what a hub can do is passed piece by piece
        self,
        owner: Owner,
        blobs: Blobs,
        post: Callable[[Outgoing], None],
        apply: Callable[[Event], None],
        in_background: Callable[..., Any],
        lose: Callable[[NodeId, str], None],
        time: Callable[[], float],
        is_needed: Callable[[tuple[int, int]], bool],
        timeouts: HubTimeouts = TIMEOUTS.hub,
    ) -> None:
        self._quiet_seconds = timeouts.quiet_upload_seconds
        self._owner, self._blobs = owner, blobs
        self._post, self._apply, self._in_background = post, apply, in_background
        self._lose, self._time, self._is_needed = lose, time, is_needed
        self._made: dict[tuple[int, int], list[BlobRef]] = {}  # weights by interval, the oldest first
        self._loop = asyncio.get_running_loop()

    async def carry_out(self, order: MakeParts | SendFields | Collect) -> None:
        """Do what is ordered, and say when it is done."""
        match order:
            case MakeParts():
                await self._make_parts(order)
            case SendFields():
                await self._send_fields(order)
            case Collect():
                await self._collect(order)
            case _:
                assert_never(order)

    async def _make_parts(self, order: MakeParts) -> None:
        parts = await self._in_background(self._owner.make_parts, order.start, order.stop)
        blueprint = self._blobs.keep(parts.blueprint)
        weights = await self._in_background(self._blobs.keep, parts.weights)  # to hash them takes a while
        fields = (parts.train_fields, parts.evaluation_fields)
        self._made.setdefault((order.start, order.stop), []).append(weights)
        self._apply(PartsMade(order.start, order.stop, blueprint, weights, *fields, self._time()))
        self._forget_old()

    def _forget_old(self) -> None:
        """Keep the weights of stages that are, and the ones before: perhaps they are on their way."""
        before = {ref for made in self._made.values() for ref in made}
        found = {interval: made[-2:] for interval, made in self._made.items() if self._is_needed(interval)}
        self._made = found
        for ref in before.difference(*found.values()):
            self._blobs.drop(ref)

    async def _send_fields(self, order: SendFields) -> None:
        for number, samples in enumerate(order.samples, order.first_microbatch):
            for node, names in order.consumers:
                read = self._owner.read_fields
                specs, buffers = await self._in_background(read, order.is_evaluation, samples, names)
                self._post(Outgoing(node, FieldParts(order.build_id, MicrobatchId(number), specs), buffers))

    async def _collect(self, order: Collect) -> None:
        """Fetch the state of a cluster; a checkpoint may fail, of a result others have copies."""
        contents, books = [], order.books
        for part in order.parts:
            found = await self._fetch(part, is_kept=books is None)
            if isinstance(found, Refusal):
                self._fail(order, part, found.reason)
                return
            # What is kept once is gone on from, so nobody's word is taken for what it is.
            if fault := await self._in_background(self._owner.find_fault, part.start, part.stop, found):
                self._fail(order, part, fault)
                return
            contents.append(found)
        fault = ""
        if books is not None:
            parts = [(x.start, x.stop, content) for x, content in zip(order.parts, contents, strict=True)]
            fault = await self._in_background(self._owner.keep, order.number, parts, books)
        self._apply(Collected(order.number, self._time(), fault))

    def _fail(self, order: Collect, part: CheckpointPart, reason: str) -> None:
        if order.books is not None:
            self._apply(Collected(order.number, self._time(), f"{part.node}: {reason}"))
        else:
            self._lose(part.node, f"its weights cannot be had: {reason}")

    async def _fetch(self, part: CheckpointPart, is_kept: bool) -> bytes | Refusal:
        arrived: asyncio.Future[bytes | Refusal] = self._loop.create_future()
        for parcel in self._blobs.want(part.weights, part.node, arrived.set_result, keep=is_kept):
            self._post(parcel)
        num_come = 0
        while not (await asyncio.wait([arrived], timeout=self._quiet_seconds))[0]:
            if self._blobs.num_come(part.weights) == num_come:
                self._blobs.forget(part.weights, arrived.set_result)
                return Refusal(f"it has sent nothing of it for {self._quiet_seconds:.0f} s")
            num_come = self._blobs.num_come(part.weights)
        return arrived.result()
