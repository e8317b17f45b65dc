"""Texts in a stage: each step runs new places only, with keys and values of those before from a cache.

Where the stage cannot be written for new places (`blueprint.cached_program`), whole rows are run for each
token. What is written is tried before it is used: on a row made of the first text it must give what whole
rows give. Either way new places come out. A cache is of the weights that its places were run with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ravnest.errors import ProtocolError
from ravnest.model.blueprint.cached_program import CachedProgram, make_cached_program
from ravnest.model.blueprint.place_axes import PlaceAxis, find_axis
from ravnest.model.blueprint.program import PARAMETER, Blueprint, TensorType, ValueId
from ravnest.model.stage.frozen_values import FrozenValues
from ravnest.model.stage.program_graph import GraphBuilder, ProgramGraph, Setting, move_tensor
from ravnest.model.stage.stage_program import StageOutputs, StageProgram, State
from ravnest.model.stage.text_model import find_token_fields, make_generation_program

PlacedValues = Mapping[ValueId, Tensor]


@dataclass(slots=True)
class TextCache:
    """What a stage has of one text: tables, and keys and values of the places up to `covered`."""

    covered: int = 0
    tables: tuple[Tensor, ...] | None = None
    slots: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NewPlaces:
    """The places [first, end) of some rows."""

    num_rows: int
    first: int
    end: int

    @property
    def count(self) -> int:
        """How many there are."""
        return self.end - self.first

    def take(self, tensor: Tensor, axis: PlaceAxis) -> Tensor:
        """Return a view of these places; rows that lie end to end get a dimension of their own."""
        return _lay_apart(tensor, axis, self.num_rows).narrow(axis.own_dim, self.first, self.count)

    def shape(self, kind: TensorType, axis: PlaceAxis) -> tuple[int, ...]:
        """Return the sizes that `take` gives."""
        sizes = kind.shape_at(self.num_rows)
        own = (self.num_rows, self.count) if axis.is_merged else (self.count,)
        return (*sizes[: axis.dim], *own, *sizes[axis.dim + 1 :])


class CachedText:
    """A cached program that runs on this PC's device."""

    def __init__(self, blueprint: Blueprint, cached: CachedProgram, length: int, setting: Setting) -> None:
        entries = {entry.name: entry for entry in blueprint.state}
        self.cached, self._length, self._setting = cached, length, setting
        self._tables = ProgramGraph(FrozenValues(cached.tables, entries), setting)
        frozen = FrozenValues(cached.program, entries)
        self._step = ProgramGraph(frozen, setting)
        self._check = GraphBuilder(frozen, Setting()).build_checks() if setting.checks_indices else None

    def run(
        self, state: State, inputs: PlacedValues, fields: State, places: NewPlaces, cache: TextCache
    ) -> StageOutputs:
        """Return new places of what crosses, or of the logits, and extend the cache. Whole rows come."""
        if cache.covered < places.first:
            raise ProtocolError("a step of a text came without those before it")
        program = self.cached.program
        if cache.tables is None:
            self._begin(state, fields, places, cache)
        given = self._lay_out(inputs, fields, places, cache)
        if self._check is not None:
            whole = (given[value] for value in program.inputs if not given[value].is_floating_point())
            self._check(*(each.cpu() for each in (*(given[value] for value, _ in program.fields), *whole)))
        arrived = [given[value] for value, _ in program.fields] + [given[value] for value in program.inputs]
        kept = {value: state[name] for value, name in program.state}
        outputs, results = self._step.run(
            kept, [move_tensor(each, self._setting.device) for each in arrived], None
        )
        num_outputs = len(self.cached.outputs)
        cache.slots, cache.covered = list(outputs[num_outputs:]), places.end
        crossed = {}
        for name, value, output in zip(
            self.cached.names, self.cached.outputs, outputs[:num_outputs], strict=True
        ):
            axis = find_axis(program.values[value], self._length)
            output = output.to(getattr(torch, program.values[value].dtype))
            crossed[name] = output if axis is None else _lay_apart(output, axis, places.num_rows)
        return StageOutputs(crossed, dict(zip((name for name, _ in program.results), results, strict=True)))

    def _begin(self, state: State, fields: State, places: NewPlaces, cache: TextCache) -> None:
        """Make the tables of a text, and empty caches."""
        device, program = self._setting.device, self.cached.tables
        arrived = [fields[name] for _, name in program.fields]
        arrived += [torch.zeros(places.num_rows, dtype=torch.int64)]
        kept = {value: state[name] for value, name in program.state}
        cache.tables, _ = self._tables.run(kept, [move_tensor(each, device) for each in arrived], None)
        for slot in self.cached.slots:
            kind = self.cached.program.values[slot.before]
            sizes = [
                0 if dim == slot.dim else size for dim, size in enumerate(kind.shape_at(places.num_rows))
            ]
            # In mixed precision the first keys decide: joining takes the wider type.
            dtype = self._setting.autocast or getattr(torch, kind.dtype)
            cache.slots.append(torch.empty(sizes, dtype=dtype, device=device))

    def _lay_out(
        self, inputs: PlacedValues, fields: State, places: NewPlaces, cache: TextCache
    ) -> dict[ValueId, Tensor]:
        """Return everything that the program takes, by value."""
        cached, device = self.cached, self._setting.device
        new = torch.arange(places.first, places.end, device=device)
        keys = torch.arange(places.end, device=device)
        given = {
            cached.rows: torch.zeros(places.num_rows, dtype=torch.int64, device=device),
            cached.places: new,
            cached.keys: keys,
            cached.mask: keys <= new[:, None],
        }
        assert cache.tables is not None
        given.update(zip(cached.tables.outputs, cache.tables, strict=True))
        for slot, before in zip(cached.slots, cache.slots, strict=True):
            given[slot.before] = before.narrow(slot.dim, 0, places.first)
        for value, name in cached.program.fields:
            is_placed = name in cached.token_fields
            given[value] = places.take(fields[name], PlaceAxis(1)) if is_placed else fields[name]
        for value, tensor in inputs.items():
            axis = find_axis(cached.program.values[value], self._length)
            taken = tensor if axis is None else places.take(tensor, axis)
            given[value] = taken.flatten(0, 1) if axis is not None and axis.is_merged else taken
        return given


def _lay_apart(tensor: Tensor, axis: PlaceAxis, num_rows: int) -> Tensor:
    """Return a view in which rows that lie end to end have a dimension of their own."""
    if not axis.is_merged:
        return tensor
    return tensor.view(*tensor.shape[: axis.dim], num_rows, -1, *tensor.shape[axis.dim + 1 :])


_DIFFERENCE = 1e-3  # of two ways to the same numbers, by their size
_NARROW_DIFFERENCE = 5e-2  # in mixed precision
_TINY = 1e-30
_FAILURES = (RuntimeError, IndexError, ValueError, TypeError)


def write_for_new_places(blueprint: Blueprint, length: int) -> CachedProgram | str:
    """Return what a stage does for new places of rows of this length, or why it takes whole rows."""
    program = make_generation_program(blueprint.evaluate)
    constants = [x.name for x in blueprint.state if x.kind != PARAMETER and not x.is_written]
    return make_cached_program(program, length, find_token_fields(program), constants)


class StageTexts:
    """Runs texts of one stage, whose rows have `length` places."""

    def __init__(self, stage: StageProgram, length: int) -> None:
        self._stage, self._length = stage, length
        self._program = make_generation_program(stage.blueprint.evaluate)
        found = write_for_new_places(stage.blueprint, length)
        self.reason = found if isinstance(found, str) else ""  # why there are no caches
        self._cached: CachedText | None = None
        self.is_tried = False  # whether caches were compared with whole rows
        if not isinstance(found, str):
            self._cached = CachedText(stage.blueprint, found, length, stage.setting)

    def cache_bytes(self, num_rows: int) -> int:
        """Return what the cache of a text takes when its rows are full; 0: it has none."""
        return 0 if self._cached is None else self._cached.cached.cache_bytes(num_rows)

    def run(
        self,
        state: State,
        inputs: PlacedValues,
        fields: State,
        places: NewPlaces,
        cache: TextCache | None = None,
    ) -> StageOutputs:
        """Return new places of what crosses, or of the logits. What comes is whole rows."""
        if cache is not None and self._cached is not None and not self.is_tried:
            self.is_tried = True
            self._try(self._cached, state, inputs, fields, places)
        if cache is not None and self._cached is not None:
            return self._cached.run(state, inputs, fields, places, cache)
        passed = self._stage.forward_text(state, inputs, fields)
        outputs = {}
        for value, tensor in passed.outputs.items():
            axis = find_axis(self._program.values[value], self._length)
            outputs[value] = tensor if axis is None else places.take(tensor, axis)
        results = {name: places.take(each, PlaceAxis(1)) for name, each in passed.results.items()}
        return StageOutputs(outputs, results)

    def _try(
        self, cached: CachedText, state: State, inputs: PlacedValues, fields: State, places: NewPlaces
    ) -> None:
        """Compare both ways on one row; there are no caches from now on if they differ."""
        try:
            told = self._find_difference(cached, state, *self._make_row(inputs, fields, places))
        except _FAILURES as error:
            told = f"new places alone cannot be run ({error})"
        if told:
            self._cached, self.reason = None, told

    def _make_row(
        self, inputs: PlacedValues, fields: State, places: NewPlaces
    ) -> tuple[dict[ValueId, Tensor], dict[str, Tensor]]:
        """Return a full row made of the places of a text, in any order; what crosses gets noise too."""
        generator = torch.Generator().manual_seed(0)
        order = torch.randint(places.end, (self._length,), generator=generator)
        tokens, known = find_token_fields(self._program), NewPlaces(places.num_rows, 0, places.end)
        row = {
            name: field[:1].index_select(1, order.to(field.device)) if name in tokens else field[:1]
            for name, field in fields.items()
        }
        crossed = {}
        for value, tensor in inputs.items():
            axis = find_axis(self._program.values[value], self._length)
            if axis is None:
                crossed[value] = tensor[: tensor.shape[0] // places.num_rows]
                continue
            one = known.take(tensor, axis)[:1].index_select(axis.own_dim, order.to(tensor.device))
            if one.is_floating_point():
                noise = torch.randn(one.shape, generator=generator).to(one)
                one = one + noise * one.float().square().mean().sqrt().to(one)
            crossed[value] = one.flatten(0, 1) if axis.is_merged else one
        return crossed, row

    def _find_difference(self, cached: CachedText, state: State, inputs: PlacedValues, fields: State) -> str:
        """Run a row in three pieces; return what is not as in the whole row."""
        limit = _DIFFERENCE if self._stage.setting.autocast is None else _NARROW_DIFFERENCE
        half, cache, first = self._length // 2, TextCache(), 0
        for end in sorted({half, half + 1, min(half + 3, self._length)}):
            places = NewPlaces(1, first, end)
            found = cached.run(state, inputs, fields, places, cache)
            wanted = self.run(state, inputs, fields, places)
            pairs = [(each, wanted.outputs[value]) for value, each in found.outputs.items()]
            pairs += [(each, wanted.results[name]) for name, each in found.results.items()]
            for one, other in pairs:
                difference = float((one.double() - other.double()).norm()) / max(
                    float(other.double().norm()), _TINY
                )
                if one.shape != other.shape or not difference <= limit:
                    return f"new places alone give other numbers than whole rows (by {difference:.2g})"
            first = end
        return ""
