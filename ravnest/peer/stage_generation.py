"""A stage's part in generation: the next token of a few rows, between two pieces of training.

The rows of a step come from the hub, the values of the stage before from that stage. Only places that are
new cross to the next stage: it holds those before from the steps before. Only these are computed, too, where
the stage can keep keys and values (`model.stage.stage_texts`), else whole rows. What a stage holds is
bounded, and forgotten at the end.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ravnest.codec import check_buffer, decode_tensor, describe, encode_tensor, widen_integers
from ravnest.engine.stage import DroppedWork, RunBeside, StageEngine
from ravnest.errors import ProtocolError, RavnestError
from ravnest.ids import HUB, NodeId
from ravnest.model.blueprint.place_axes import find_axis
from ravnest.model.blueprint.program import Blueprint, Program, ValueId
from ravnest.model.stage.stage_program import StageProgram
from ravnest.model.stage.stage_texts import NewPlaces, StageTexts, TextCache
from ravnest.model.stage.text_model import LOGITS_RESULT, make_generation_program
from ravnest.peer.pacing import Device
from ravnest.protocol.generation import (
    GenerationAnswer,
    GenerationEnd,
    GenerationFault,
    GenerationStep,
    GenerationValues,
    TokenChoices,
)
from ravnest.protocol.membership import Complaint
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import StagePosition
from ravnest.protocol.tensors import FLOAT_BYTES, Buffer
from ravnest.transfer.outbox import Outgoing

logger = logging.getLogger(__name__)

_MOST_GENERATIONS = 16  # that a stage remembers; the hub has fewer at a time
MOST_CACHE_BYTES = 256 << 20  # of keys and values, of all texts; those that do not fit take whole rows


@dataclass(slots=True)
class _Generation:
    """One generation here: its last step, and what the stage before has sent so far."""

    order: GenerationStep | None = None
    fields: dict[str, Tensor] = field(default_factory=dict)
    held: dict[ValueId, Tensor] = field(default_factory=dict)  # inputs, whole rows
    arrived: tuple[GenerationValues, Sequence[Buffer]] | None = None
    cache: TextCache | None = None
    cache_bytes: int = 0  # when its rows are full


class StageGeneration:
    """The generations that pass through one stage."""

    def __init__(
        self,
        position: StagePosition,
        blueprint: Blueprint,
        stage: StageEngine,
        device: Device,
        most_cache_bytes: int = MOST_CACHE_BYTES,
    ) -> None:
        self._position, self._stage, self._device = position, stage, device
        self._most_cache_bytes = most_cache_bytes
        self._is_leaf = position.after is None
        self._evaluate = blueprint.evaluate
        self._found: Program | None = None  # made when the first generation comes
        self._texts: StageTexts | None = None  # made when the first step is run
        self._has_told_way = False
        self._generations: dict[int, _Generation] = {}  # the oldest first
        self._ready: dict[int, None] = {}

    def receive_step(
        self, message: GenerationStep, buffers: Sequence[Buffer]
    ) -> Refusal | list[Outgoing] | None:
        """Take the fields of a step; tell the hub if they are not enough."""
        if self._is_leaf and self._evaluate.logits is None:
            return Refusal("the model of this stage gives no logits")
        found = self._find(message.generation)
        if found.order is not None and message.step <= found.order.step:
            return Refusal(f"step {message.step} of generation {message.generation} was here before")
        program = self._program
        wanted = {name: program.values[value] for value, name in program.fields}
        fields = {}
        for (name, spec), buffer in zip(message.fields, buffers, strict=True):
            if name in wanted:
                fields[name] = widen_integers(decode_tensor(buffer, spec), wanted[name].dtype)
        lacks = min(wanted.keys() - fields.keys(), default="")
        if lacks or not message.first < max(message.ends) <= message.length:
            told = f"a stage lacks the field {lacks!r}" if lacks else "a step has no place in its rows"
            about = (self._position.build_id, message.generation, message.step)
            return [Outgoing(HUB, GenerationFault(*about, told))]
        found.order, found.fields = message, fields
        try:
            return self._admit(message.generation)
        except ProtocolError as error:  # not of the hub, but of values that came before its step
            assert self._position.before is not None
            about = (self._position.build_id, message.generation, message.step)
            complaint = Complaint(self._position.build_id, self._position.before, str(error))
            return [Outgoing(HUB, complaint), Outgoing(HUB, GenerationFault(*about, str(error)))]

    def receive_values(
        self, message: GenerationValues, buffers: Sequence[Buffer], sender: NodeId
    ) -> Refusal | None:
        """Take what the stage before sends; it may come before the step itself."""
        if sender != self._position.before:
            return Refusal(f"values of a generation from {sender}, who is not the stage before")
        for (_, spec), buffer in zip(message.values, buffers, strict=True):
            check_buffer(buffer, spec)
        self._find(message.generation).arrived = (message, buffers)
        return self._admit(message.generation)

    def end(self, message: GenerationEnd) -> None:
        """Forget a generation."""
        self._generations.pop(message.generation, None)
        self._ready.pop(message.generation, None)

    def next_work(self) -> Iterator[Outgoing] | None:
        """Return the next step that can be done, done as it is iterated over."""
        if not self._ready:
            return None
        number = next(iter(self._ready))
        del self._ready[number]
        return self._run(self._generations[number])

    @property
    def num_held(self) -> int:
        """Generations that it remembers."""
        return len(self._generations)

    @property
    def num_cached(self) -> int:
        """Generations whose keys and values it has."""
        return sum(each.cache is not None for each in self._generations.values())

    @property
    def _program(self) -> Program:
        if self._found is None:
            self._found = make_generation_program(self._evaluate)
        return self._found

    def _find(self, number: int) -> _Generation:
        found = self._generations.setdefault(number, _Generation())
        while len(self._generations) > _MOST_GENERATIONS:
            oldest = next(iter(self._generations))
            self.end(GenerationEnd(self._position.build_id, oldest))
        return found

    def _admit(self, number: int) -> Refusal | None:
        """Let a step begin when all of it is here."""
        found = self._generations.get(number)
        if found is None or found.order is None:
            return None
        if self._position.before is not None:
            if found.arrived is None or found.arrived[0].step < found.order.step:
                return None
            message, buffers = found.arrived
            if message.step > found.order.step:
                return None  # its step is on the way
            found.arrived = None
            self._hold(found, found.order, message, buffers)
        self._ready[number] = None
        return None

    def _hold(
        self, found: _Generation, order: GenerationStep, message: GenerationValues, buffers: Sequence[Buffer]
    ) -> None:
        """Put what is new into the rows that are held."""
        program, num_rows, places = self._program, len(order.ends), _find_places(order)
        if [value for value, _ in message.values] != list(program.inputs):
            raise ProtocolError("a step of a generation came with other values than those awaited")
        for (number, spec), buffer in zip(message.values, buffers, strict=True):
            value, kind = ValueId(number), program.values[ValueId(number)]
            whole, axis = kind.shape_at(num_rows), find_axis(kind, order.length)
            wanted = whole if axis is None else places.shape(kind, axis)
            if spec.shape != wanted or spec.dtype != kind.dtype:
                raise ProtocolError(f"value {number} of a generation has shape {spec.shape}, not its own")
            device = self._device.name if spec.dtype in FLOAT_BYTES else "cpu"
            part = decode_tensor(buffer, spec, device)
            if axis is None:
                found.held[value] = part
                continue
            if value not in found.held or tuple(found.held[value].shape) != whole:
                if order.first:
                    raise ProtocolError("a step of a generation came without those before it")
                found.held[value] = torch.zeros(whole, dtype=part.dtype, device=part.device)
            places.take(found.held[value], axis).copy_(part)

    def _run(self, found: _Generation) -> Iterator[Outgoing]:
        order = found.order
        assert order is not None
        started, places = self._device.clock(), _find_places(order)
        about = (self._position.build_id, order.generation, order.step)
        run = self._choose_way(found, order, places)
        passed = self._stage.generate(order.generation, found.held, found.fields, run)
        is_short = self._has_caches() and found.cache is not None
        share = places.count / order.length if is_short else 1.0
        self._device.stretch(started, self._device.forward_seconds * len(order.ends) * share)
        if isinstance(passed, DroppedWork):
            yield Outgoing(HUB, GenerationFault(*about, passed.reason))
            if passed.has_lost_device:
                raise RavnestError(
                    f"the device of this PC has stopped working ({passed.reason}); start ravnest join again"
                )
        elif self._position.after is not None:
            yield self._pass_on(order, {ValueId(value): each for value, each in passed.outputs.items()})
        else:
            # A row that is done has no new place: what is said of it does not matter.
            ends = [max(1, end - order.first) if end else 0 for end in order.ends]
            rows = choose_words(passed.results[LOGITS_RESULT], ends, order.num_choices)
            if isinstance(rows, str):
                yield Outgoing(HUB, GenerationFault(*about, rows))
            else:
                yield Outgoing(HUB, GenerationAnswer(*about, rows))

    def _choose_way(self, found: _Generation, order: GenerationStep, places: NewPlaces) -> RunBeside | None:
        """Return how a step is run: with a cache if the stage can have one and it has room."""
        program = self._stage.program
        assert isinstance(program, StageProgram)
        if self._texts is None:
            self._texts = StageTexts(program, order.length)
        if found.cache is None and order.first == 0:
            wanted = self._texts.cache_bytes(places.num_rows)
            taken = sum(each.cache_bytes for each in self._generations.values())
            if 0 < wanted <= self._most_cache_bytes - taken:
                found.cache, found.cache_bytes = TextCache(), wanted
        return partial(self._texts.run, places=places, cache=found.cache)

    def _has_caches(self) -> bool:
        """Return whether the stage writes with caches, and tell it once it is known."""
        texts = self._texts
        assert texts is not None
        if texts.reason and not self._has_told_way:
            logger.warning("texts are written without caches, more slowly: %s", texts.reason)
        elif texts.is_tried and not self._has_told_way:
            logger.info("texts are written with caches: new places alone give what whole rows give")
        self._has_told_way = self._has_told_way or texts.is_tried or bool(texts.reason)
        return not texts.reason

    def _pass_on(self, order: GenerationStep, outputs: dict[ValueId, Tensor]) -> Outgoing:
        """Return the new places of what crosses, in the format that activations have on this link."""
        assert self._position.after is not None
        specs, buffers = [], []
        for value in self._program.outputs:
            sent = outputs[value].contiguous()
            key = (self._position.seed, order.generation, order.step, int(value))
            specs.append((int(value), describe(sent, self._position.stage.activations)))
            buffers.append(encode_tensor(sent, self._position.stage.activations, key))
        message = GenerationValues(self._position.build_id, order.generation, order.step, tuple(specs))
        return Outgoing(self._position.after, message, tuple(buffers))


def _find_places(order: GenerationStep) -> NewPlaces:
    return NewPlaces(len(order.ends), order.first, max(order.ends))


def choose_words(logits: Tensor, ends: Sequence[int], num_choices: int) -> tuple[TokenChoices, ...] | str:
    """Return the likeliest words after the last place of each row, equal ones by number; or what is wrong."""
    rows = []
    for row, end in enumerate(ends):
        if end == 0:
            return "a row has no token"
        said = logits[row, end - 1].float().cpu()
        if not bool(torch.isfinite(said).all()):
            return "what the model says of the next word is no finite number"
        words = said.topk(min(num_choices, said.numel())).indices.sort().values
        words = words[said[words].sort(descending=True, stable=True).indices]
        numbers = tuple(said[words].tolist())
        rows.append(TokenChoices(tuple(words.tolist()), numbers))
    return tuple(rows)
