"""A model, or an interval of it, as data: operations by name, wiring, shapes. Never code.

A program is a list of operations on numbered values; every value is a tensor whose sizes are fixed or grow
with the batch. A blueprint is the training and the evaluation program of one interval of the line, and the
state they work on. `slicing` cuts blueprints, `blueprint_json` stores them, `stage.stage_program` runs them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NewType

from ravnest.config import FrozenFormat
from ravnest.protocol.tensors import FLOAT_BYTES, ITEM_BYTES, StoredType

ValueId = NewType("ValueId", int)

FLOATING = frozenset(FLOAT_BYTES)
LOGITS_DIMENSIONS = 3  # rows, places, words


@dataclass(frozen=True, slots=True)
class Size:
    """A whole number that grows with the batch: `per_sample` x batch size + `fixed`."""

    per_sample: int
    fixed: int = 0

    def at(self, batch_size: int) -> int:
        """Return the number for a batch of this size."""
        return self.per_sample * batch_size + self.fixed


@dataclass(frozen=True, slots=True)
class Ratio:
    """A fraction of two numbers that may grow with the batch, like one over the batch size."""

    over: Size
    under: Size

    def at(self, batch_size: int) -> float:
        """Return the fraction for a batch of this size."""
        return self.over.at(batch_size) / self.under.at(batch_size)


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is another value of the program."""

    value: ValueId


Argument = None | bool | int | float | str | Size | Ratio | Ref | tuple["Argument", ...]


@dataclass(frozen=True, slots=True)
class TensorType:
    """What is known of a value before it exists; `has_gradient` when training needs its gradient."""

    dtype: str
    shape: tuple[int | Size, ...]
    has_gradient: bool = False

    def shape_at(self, batch_size: int) -> tuple[int, ...]:
        """Return the shape for a batch of this size."""
        return tuple(size.at(batch_size) if isinstance(size, Size) else size for size in self.shape)

    def bytes_at(self, batch_size: int) -> int:
        """Return the bytes of the tensor for a batch of this size."""
        num_items = 1
        for size in self.shape_at(batch_size):
            num_items *= size
        return num_items * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `number` is its place in the whole program: with the batch, it seeds its randomness.

    `precision` is "" for the stage's own, "full" outside any autocast, or the dtype of a user's autocast.
    """

    name: str
    arguments: tuple[tuple[str, Argument], ...]
    outs: tuple[ValueId | None, ...]
    number: int
    precision: str = ""

    def refs(self) -> Iterator[ValueId]:
        """Yield the values it reads, in order, repeats included."""
        for _, argument in self.arguments:
            yield from refs_of(argument)

    @property
    def needs_batch_size(self) -> bool:
        """Whether an argument of it grows with the batch."""
        return any(_is_sized(argument) for _, argument in self.arguments)


def _is_sized(argument: Argument) -> bool:
    if isinstance(argument, tuple):
        return any(_is_sized(part) for part in argument)
    return isinstance(argument, Size | Ratio)


def refs_of(argument: Argument) -> Iterator[ValueId]:
    """Yield the values an argument names."""
    if isinstance(argument, Ref):
        yield argument.value
    elif isinstance(argument, tuple):
        for part in argument:
            yield from refs_of(part)


@dataclass(frozen=True, slots=True)
class Program:
    """Operations in order. `inputs` come from the stage before, `outputs` go to the next one.

    `fields` are parts of the batch, `state` parameters and buffers, both by name; `results` are the loss and
    the metrics, present in the last stage only. `logits` is a value there too: what a model says of each
    place of its rows, in evaluation, if it is one that does. Value ids are those of the whole program.
    """

    values: Mapping[ValueId, TensorType]
    inputs: tuple[ValueId, ...]
    fields: tuple[tuple[ValueId, str], ...]
    state: tuple[tuple[ValueId, str], ...]
    ops: tuple[Op, ...]
    outputs: tuple[ValueId, ...]
    results: tuple[tuple[str, ValueId], ...]
    logits: ValueId | None = None

    @property
    def ends(self) -> tuple[ValueId, ...]:
        """Values that the program is run for."""
        logits = () if self.logits is None else (self.logits,)
        return (*self.outputs, *(value for _, value in self.results), *logits)


PARAMETER, BUFFER, CONSTANT = "parameter", "buffer", "constant"


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A named tensor a stage keeps: a parameter, a buffer of the state_dict, or a constant outside it.

    `positions` are all places of the whole line that use it: the first is its home, and more than one holder
    means that it is shared (a tied weight). `is_written` when running the program changes it. `storage` says
    how it is sent and held; fp32: as it is.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    positions: tuple[int, ...]
    is_trainable: bool = False
    is_written: bool = False
    storage: FrozenFormat = FrozenFormat.FP32

    @property
    def is_frozen(self) -> bool:
        """Whether it is a parameter that nothing changes."""
        return self.kind == PARAMETER and not self.is_trainable and not self.is_written

    @property
    def stored(self) -> StoredType:
        """What is sent and held of it: the tensor itself, or blocks of bytes (see `state.quantisation`)."""
        return stored_type(StoredType(self.dtype, self.shape), self.storage)

    @property
    def size_bytes(self) -> int:
        """Bytes of what is sent and held."""
        return self.stored.size_bytes


FROZEN_BLOCK_ITEMS = 64  # numbers of a quantised matrix that share a scale
FROZEN_SCALE_BYTES = 2  # a bf16 number behind the block's codes
_CODE_BITS = {FrozenFormat.INT8: 8, FrozenFormat.INT4: 4}


def stored_type(given: StoredType, storage: FrozenFormat) -> StoredType:
    """Return what a tensor is stored as; a quantised one has a row of bytes for each block of its numbers."""
    if storage is FrozenFormat.FP32:
        return given
    if storage is FrozenFormat.BF16:
        return StoredType("bfloat16", given.shape)
    num_blocks = -(-prod(given.shape) // FROZEN_BLOCK_ITEMS)
    return StoredType(
        "uint8", (num_blocks, FROZEN_BLOCK_ITEMS * _CODE_BITS[storage] // 8 + FROZEN_SCALE_BYTES)
    )


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The interval [start, stop) of a line of `num_positions` positions.

    `cuts[k]` says where position `start + k` begins, as an index into the operations of the training and of
    the evaluation program; the last entry is their ends. `aliases` maps other names of tied weights.
    """

    name: str
    num_positions: int
    start: int
    stop: int
    cuts: tuple[tuple[int, int], ...]
    state: tuple[StateEntry, ...]
    aliases: tuple[tuple[str, str], ...]
    train: Program
    evaluate: Program

    @property
    def is_first(self) -> bool:
        """Whether it begins the line."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends the line and returns loss and metrics."""
        return self.stop == self.num_positions

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of trained or written state that other stages hold too and that must stay equal there."""
        return tuple(
            entry.name
            for entry in self.state
            if (entry.is_trainable or entry.is_written)
            and any(not self.start <= position < self.stop for position in entry.positions)
        )

    def program(self, is_evaluation: bool) -> Program:
        """Return the program of one kind of batches."""
        return self.evaluate if is_evaluation else self.train
