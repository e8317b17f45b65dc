"""The generation program for new places only: keys and values of earlier places come from caches.

It is made from the program for whole rows, out of allowed operators alone, so a stage makes it for itself and
nothing more is sent or checked. What depends on no token (tables, masks) is a program of its own, run once
for a text. An attention joins the cache of its keys and values with the new ones and returns both as the next
cache. A reason is returned where an operation mixes places in a way that is not known here.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from ravnest.model.blueprint.aliasing import Storages, has_effect
from ravnest.model.blueprint.place_axes import (
    MixedPlacesError,
    PlaceAxis,
    PlacedOp,
    find_axis,
    replace_arguments,
    replace_values,
    write_op,
)
from ravnest.model.blueprint.program import Op, Program, Ref, Size, TensorType, ValueId
from ravnest.model.blueprint.slicing import keep_needed

_ATTENTION = "aten.scaled_dot_product_attention.default"
_FEWEST_PLACES = 2


@dataclass(frozen=True, slots=True)
class CacheSlot:
    """The keys, or the values, of one attention: the cache that comes in, and as it goes out."""

    before: ValueId
    after: ValueId
    dim: int  # of the places


@dataclass(frozen=True, slots=True)
class CachedProgram:
    """A program for new places, and the one that makes its tables.

    `rows` is a number for each row, `places` the new places, `keys` all places up to the last new one, and
    `mask` says which of these a new place sees. They come before the tables, the caches and what crosses.
    """

    tables: Program
    program: Program
    rows: ValueId
    places: ValueId
    keys: ValueId
    mask: ValueId
    slots: tuple[CacheSlot, ...]
    names: tuple[ValueId, ...]  # what crosses to the next stage
    outputs: tuple[ValueId, ...]  # new places of it; caches follow
    token_fields: frozenset[str]

    def cache_bytes(self, num_rows: int) -> int:
        """Return what caches take when rows are full."""
        return sum(self.program.values[slot.before].bytes_at(num_rows) for slot in self.slots)


def make_cached_program(
    program: Program, length: int, token_fields: Collection[str], constants: Collection[str]
) -> CachedProgram | str:
    """Return a generation program for new places of rows of `length`, or why there is none.

    `constants` are names of state that nothing changes and that is small: tables are made of them.
    """
    if length < _FEWEST_PLACES:
        return "rows have one place"
    try:
        return _Writer(program, length, frozenset(token_fields), frozenset(constants)).write()
    except MixedPlacesError as error:
        return str(error)


class _Writer:
    def __init__(
        self, program: Program, length: int, token_fields: frozenset[str], constants: frozenset[str]
    ) -> None:
        self._program, self._length = program, length
        self._token_fields, self._constants = token_fields, constants
        self._values = dict(program.values)
        self._next = max(self._values, default=0) + 1
        self._storages = Storages(program)
        self._ops: list[Op] = []
        self._axes: dict[ValueId, PlaceAxis] = {}
        self._taken: dict[tuple[ValueId, int, ValueId], ValueId] = {}
        self._slots: list[CacheSlot] = []
        self.rows = self._add_value(TensorType("int64", (Size(1),)))
        self.places = self._add_value(TensorType("int64", (length,)))
        self.keys = self._add_value(TensorType("int64", (length,)))
        self.mask = self._add_value(TensorType("bool", (length, length)))

    def write(self) -> CachedProgram:
        program = self._program
        self._mark_what_arrives()
        for op in program.ops:
            self._write_op(op)
        outputs = tuple(self._end(value) for value in program.outputs)
        for name, value in program.results:
            if self._axes.get(value) != PlaceAxis(1):
                raise MixedPlacesError(f"{name} has no place for each token")
        tables = self._find_tables()
        made = [op for op in self._ops if not tables.issuperset(out for out in op.outs if out is not None)]
        used = {value for op in made for value in op.refs()} | {*outputs, *(v for _, v in program.results)}
        given = tuple(sorted(used & tables))
        first = (self.rows, self.places, self.keys, self.mask)
        caches = tuple(slot.before for slot in self._slots)
        whole = replace(program, values=self._values, logits=None)
        step = replace(
            whole,
            inputs=(*first, *given, *caches, *program.inputs),
            ops=tuple(made),
            outputs=(*outputs, *(slot.after for slot in self._slots)),
        )
        start = replace(
            whole,
            inputs=(self.rows,),
            ops=tuple(op for op in self._ops if op not in set(made)),
            outputs=given,
            results=(),
        )
        return CachedProgram(
            tables=keep_needed(start, range(len(start.ops)))[0],
            program=keep_needed(step, range(len(step.ops)))[0],
            rows=self.rows,
            places=self.places,
            keys=self.keys,
            mask=self.mask,
            slots=tuple(self._slots),
            names=program.outputs,
            outputs=outputs,
            token_fields=self._token_fields,
        )

    def _mark_what_arrives(self) -> None:
        program = self._program
        for value, name in program.fields:
            if name in self._token_fields:
                if program.values[value].shape != (Size(1), self._length):
                    raise MixedPlacesError(f"field {name} has no place for each token")
                self._axes[value] = PlaceAxis(1)
        for value in program.inputs:
            axis = find_axis(program.values[value], self._length)
            if axis is not None:
                self._axes[value] = axis

    def _write_op(self, op: Op) -> None:
        if not any(value in self._axes for value in op.refs()):
            self._ops.append(op)
        elif op.name == _ATTENTION:
            self._write_attention(op)
        else:
            written, axis = write_op(PlacedOp(op, self._values, self._axes, self._length, self._take))
            self._ops.append(written)
            self._axes.update((out, axis) for out in op.outs if out is not None)

    def _write_attention(self, op: Op) -> None:
        placed = PlacedOp(op, self._values, self._axes, self._length, self._take)
        query, key, value = (placed.value(name) for name in ("query", "key", "value"))
        for each in (query, key, value):
            if self._axes.get(each) != PlaceAxis(len(placed.shape(each)) - 2):
                raise placed.refuse("attends to something else than the places")
        if has_effect(op) or (
            placed.argument("attn_mask") is None and not placed.argument("is_causal", False)
        ):
            raise placed.refuse("looks at places that come later")
        mask = self.mask
        if placed.argument("attn_mask") is not None:
            mask = self._take_mask(placed, placed.value("attn_mask"))
        joined = {each: self._join_cache(op, each) for each in dict.fromkeys((key, value))}
        written = replace_arguments(op, attn_mask=Ref(mask), is_causal=False)
        self._ops.append(replace_values(written, joined))
        self._axes.update((out, self._axes[query]) for out in op.outs if out is not None)

    def _take_mask(self, placed: PlacedOp, mask: ValueId) -> ValueId:
        """Return a whole mask for new places: its rows at these, its columns up to the last."""
        shape = placed.shape(mask)
        if mask in self._axes or len(shape) < 2 or shape[-1] != self._length:
            raise placed.refuse("has a mask that depends on tokens")
        rows = self._take(mask, len(shape) - 2) if shape[-2] == self._length else mask
        return self._take(rows, len(shape) - 1, self.keys)

    def _join_cache(self, op: Op, value: ValueId) -> ValueId:
        kind, dim = self._values[value], self._axes[value].dim
        slot = CacheSlot(self._add_value(kind), self._add_value(kind), dim)
        arguments = (("tensors", (Ref(slot.before), Ref(value))), ("dim", dim))
        self._ops.append(Op("aten.cat.default", arguments, (slot.after,), op.number))
        self._slots.append(slot)
        return slot.after

    def _take(self, value: ValueId, dim: int, index: ValueId | None = None) -> ValueId:
        """Return a whole value at the new places along a dimension."""
        if self._storages.is_written(value):
            raise MixedPlacesError("a table is changed in place")
        index = self.places if index is None else index
        key = (value, dim, index)
        if key not in self._taken:
            self._taken[key] = found = self._add_value(self._values[value])
            arguments = (("self", Ref(value)), ("dim", dim), ("index", Ref(index)))
            self._ops.append(Op("aten.index_select.default", arguments, (found,), 0))
        return self._taken[key]

    def _end(self, value: ValueId) -> ValueId:
        """Return what crosses of a value: new places where the next stage expects these, else all of it."""
        axis, found = find_axis(self._values[value], self._length), self._axes.get(value)
        if found is None and axis is not None and not axis.is_merged:
            return self._take(value, axis.dim)
        if found != axis:
            raise MixedPlacesError("what crosses to the next stage has its places elsewhere")
        return value

    def _find_tables(self) -> set[ValueId]:
        """Return values that stay the same for a text: made of constants and of fields without tokens."""
        program = self._program
        known = {value for value, name in program.state if name in self._constants}
        known |= {value for value, name in program.fields if name not in self._token_fields}
        made: set[ValueId] = set()
        for op in self._ops:
            outs = [out for out in op.outs if out is not None]
            is_still = not has_effect(op) and not any(self._storages.is_written(out) for out in outs)
            if is_still and (known | made).issuperset(op.refs()):
                made.update(outs)
        return made

    def _add_value(self, kind: TensorType) -> ValueId:
        value, self._next = ValueId(self._next), self._next + 1
        self._values[value] = kind
        return value
