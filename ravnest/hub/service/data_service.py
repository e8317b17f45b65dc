"""Data between the requester and the swarm: parts of stages, fields of microbatches, state to be kept.

`Owner` is what the hub asks of the requester's side, where model and data are; requester.owner answers. That
takes a while, so it runs beside the messages of the hub.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

from ravnest.config import RESERVE, TIMEOUTS, HubTimeouts
from ravnest.errors import GuardError
from ravnest.hub.coordinator.checks import NodeSketch, judge_sketches
from ravnest.hub.coordinator.events import (
    CheckpointPart,
    Collect,
    Collected,
    Event,
    InspectSamples,
    LossRechecked,
    MakeParts,
    PartsMade,
    SamplesInspected,
    SendFields,
    WithdrawCollect,
)
from ravnest.hub.coordinator.leases import LedgerState
from ravnest.hub.coordinator.notices import Evaluated
from ravnest.ids import MicrobatchId, NodeId
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import BlobRef, SketchRow
from ravnest.protocol.tensors import Buffer, TensorSpec
from ravnest.protocol.training import FieldParts
from ravnest.transfer.exchange import Exchange
from ravnest.transfer.outbox import Outgoing

_MOST_REMEMBERED = 32 * RESERVE.most_microbatches  # microbatches: those that are ahead may be checked
_MOST_REFUSED = 3  # results of one node for one reason: it may be no fault of the node
_NOT_WANTED = "training went back meanwhile, or a newer one is fetched"

DataOrder = MakeParts | SendFields | InspectSamples | Collect | WithdrawCollect
StagePart = tuple[int, int, Buffer]  # a stage's interval [start, stop), and its state
Fields = tuple[tuple[tuple[str, TensorSpec], ...], tuple[memoryview, ...]]


@dataclass(frozen=True, slots=True)
class Parts:
    """A stage as bytes: how it is trained and its blueprint, its weights, the fields it consumes.

    Weights are made piece by piece, because a stage may be larger than this PC's memory.
    """

    blueprint: bytes
    weights: Callable[[], Iterable[Buffer]]
    train_fields: tuple[str, ...]
    evaluation_fields: tuple[str, ...]


class Owner(Protocol):
    """The requester's side."""

    def make_parts(self, start: int, stop: int) -> Parts:
        """Cut the stage [start, stop) of the line."""

    def find_fault(self, start: int, stop: int, content: Buffer) -> str:
        """Return why this is not the state of the stage [start, stop), if so."""

    def sketch(
        self, content: Buffer, key: bytes, segments: Sequence[tuple[int, int]]
    ) -> tuple[SketchRow, ...]:
        """Return the sketch of each of these intervals of the line, as the state of a stage has it."""

    def keep(self, parts: Sequence[StagePart], books: LedgerState, evaluated: Evaluated | None) -> str:
        """Write a checkpoint, the state of each interval of the line; return why not, if it cannot be."""

    def find_faulty(self, is_evaluation: bool, samples: Sequence[int]) -> tuple[tuple[int, str], ...]:
        """Return which of these samples fail alone, each with the reason, as far as it can be known."""

    def keep_result(self, parts: Sequence[StagePart], books: LedgerState) -> None:
        """Write the result, or raise RavnestError: the job has failed then."""

    def read_fields(
        self, is_evaluation: bool, microbatches: Sequence[Sequence[int]], names: Sequence[str]
    ) -> Iterator[Fields]:
        """Yield these fields of each microbatch, in order, as they travel."""


class DataService:
    """Carries out orders that concern the owner.

    `in_background` runs a function where it delays no message. `lose` gives up a peer, with the reason.
    `quiet_seconds` is how long a peer may send nothing of what it is asked for.
    """

    def __init__(
        self,
        owner: Owner,
        exchange: Exchange,
        apply: Callable[[Event], None],
        in_background: Callable[..., Any],
        lose: Callable[[NodeId, str], None],
        time: Callable[[], float],
        is_needed: Callable[[tuple[int, int]], bool],
        timeouts: HubTimeouts = TIMEOUTS.hub,
    ) -> None:
        self._owner, self._exchange, self._blobs = owner, exchange, exchange.blobs
        self._apply, self._in_background, self._lose = apply, in_background, lose
        self._time, self._is_needed = time, is_needed
        self._quiet_seconds = timeouts.quiet_upload_seconds
        self._sent: dict[MicrobatchId, bytes] = {}  # hashes of fields, of the last microbatches
        self._remembering = threading.Lock()
        self._refused: Counter[tuple[NodeId, str]] = Counter()  # results, by their fault
        self._withdrawn: set[int] = set()  # numbers of checkpoints that are not to be kept
        self._made: dict[tuple[int, int], list[BlobRef]] = {}  # weights by interval, the oldest first

    async def carry_out(self, order: DataOrder) -> None:
        """Do what is ordered, and say when it is done."""
        match order:
            case MakeParts():
                await self._make_parts(order)
            case SendFields():
                await self._send_fields(order)
            case InspectSamples():
                await self._inspect_samples(order)
            case Collect():
                await self._collect(order)
            case WithdrawCollect(number):  # unless it is being written already
                self._withdrawn.add(number)
            case _:
                assert_never(order)

    async def _make_parts(self, order: MakeParts) -> None:
        parts = await self._in_background(self._owner.make_parts, order.start, order.stop)
        blueprint = await self._in_background(self._blobs.keep, parts.blueprint)  # to hash takes a while
        weights = None
        if order.has_weights:
            weights = await self._in_background(self._blobs.keep_pieces, parts.weights)
            self._made.setdefault((order.start, order.stop), []).append(weights)
        fields = (parts.train_fields, parts.evaluation_fields)
        self._apply(PartsMade(order.start, order.stop, blueprint, weights, *fields, self._time()))
        self._forget_old()

    def _forget_old(self) -> None:
        """Drop weights of stages that are no more, but not the last ones: they may be on their way."""
        before = {ref for made in self._made.values() for ref in made}
        found = {interval: made[-2:] for interval, made in self._made.items() if self._is_needed(interval)}
        self._made = found
        for ref in before.difference(*found.values()):
            self._blobs.drop(ref)

    async def _send_fields(self, order: SendFields) -> None:
        wanted = tuple(dict.fromkeys(name for _, names in order.consumers for name in names))
        # Once for all stages: a dataset may mask at random, and inputs and labels belong together.
        reading = self._owner.read_fields(order.is_evaluation, order.samples, wanted)
        for number, _ in enumerate(order.samples, order.first_microbatch):
            read = await self._in_background(self._read_next, reading, order, MicrobatchId(number))
            if read is None:
                self._apply(LossRechecked("", MicrobatchId(number), None, self._time()))
                return
            specs, buffers = read
            found = {spec[0]: (spec, buffer) for spec, buffer in zip(specs, buffers, strict=True)}
            for node, names in order.consumers:
                chosen = [found[name] for name in names]
                fields, contents = tuple(spec for spec, _ in chosen), tuple(each for _, each in chosen)
                parts = FieldParts(order.build_id, MicrobatchId(number), fields)
                self._exchange.post(Outgoing(node, parts, contents))

    def _read_next(
        self, reading: Iterator[Fields], order: SendFields, microbatch: MicrobatchId
    ) -> Fields | None:
        """Return the fields of the next microbatch; None if they are to check one and are not its own."""
        specs, buffers = next(reading)
        named = sorted(zip((name for name, _ in specs), buffers, strict=True), key=lambda each: each[0])
        digest = hashlib.blake2b(b"".join(name.encode() for name, _ in named), digest_size=16)
        for _, buffer in named:
            digest.update(buffer)
        if order.checks is not None:
            return (specs, buffers) if self._sent.get(order.checks) == digest.digest() else None
        if not order.is_evaluation:
            with self._remembering:  # several leases are read at once
                self._sent[microbatch] = digest.digest()
                while len(self._sent) > _MOST_REMEMBERED:
                    del self._sent[next(iter(self._sent))]
        return specs, buffers

    async def _inspect_samples(self, order: InspectSamples) -> None:
        asked = (order.is_evaluation, order.samples)
        faulty = await self._in_background(self._owner.find_faulty, *asked)
        self._apply(SamplesInspected(*asked, faulty, self._time()))

    async def _collect(self, order: Collect) -> None:
        """Fetch the state of a cluster. A checkpoint may fail; of a result other clusters have copies."""
        parts, given = [], []
        segments = {(start, stop) for other in order.others for start, stop, _ in other.rows}
        for part in order.parts:
            found = await self._exchange.fetch(
                part.weights, [part.node], quiet_seconds=self._quiet_seconds, clock=self._time
            )
            if isinstance(found, Refusal):
                self._fail(order, part, found.reason)
                return
            # Training goes on from what is kept, so no peer's word is taken for what it is.
            if fault := await self._in_background(self._owner.find_fault, part.start, part.stop, found):
                if order.is_result:
                    self._count_refused(part.node, fault)
                self._fail(order, part, f"{part.node}: {fault}")
                return
            parts.append((part.start, part.stop, found))
            inside = sorted(each for each in segments if part.start <= each[0] and each[1] <= part.stop)
            rows = await self._in_background(self._owner.sketch, found, order.key, inside) if inside else ()
            given.append(NodeSketch(part.node, rows))
        verdict = judge_sketches(given, order.others)
        givers = {part.node for part in order.parts}
        fault = verdict.describe() if verdict.disputed or givers & set(verdict.unlike) else ""
        if not fault and order.is_result:
            await self._in_background(self._owner.keep_result, parts, order.books)
        elif not fault and order.number in self._withdrawn:
            fault = _NOT_WANTED
        elif not fault:
            fault = await self._in_background(self._owner.keep, parts, order.books, order.evaluated)
        self._apply(Collected(order.number, self._time(), fault, verdict))

    def _count_refused(self, node: NodeId, fault: str) -> None:
        """End a job whose result is refused again and again: to train it once more would not help."""
        self._refused[node, fault] += 1
        if self._refused[node, fault] == _MOST_REFUSED:
            problem = f"there is no result: {node}: {fault}, {_MOST_REFUSED} times"
            raise GuardError(f"{problem}; look at the model and the data, or lower the learning rate")

    def _fail(self, order: Collect, part: CheckpointPart, reason: str) -> None:
        if not order.is_result:
            self._apply(Collected(order.number, self._time(), reason))
        else:
            self._lose(part.node, f"its weights cannot be had: {reason}")
