"""What describes a tensor that travels in a buffer beside a message."""

from dataclasses import dataclass
from math import prod
from typing import Annotated

from msgspec import Meta

from ravnest.config import WireFormat

Buffer = bytes | bytearray | memoryview

FLOAT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
INTEGER_BYTES = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1}
ITEM_BYTES = FLOAT_BYTES | INTEGER_BYTES | {"bool": 1}
WIRE_BYTES = ITEM_BYTES | {"uint16": 2}  # for token ids on their way; models have no such numbers
BLOCK_ITEMS, SCALE_BYTES = 256, 4  # int8 and int4: one scale for so many numbers
SHORT_BLOCK_ITEMS, SHORT_SCALE_BYTES = 32, 2  # int4-stochastic, and int4-channels along positions
MEAN_BYTES = 4  # int4-channels: one mean of each channel
LEAST_POSITIONS = 64  # of each channel: the means of fewer would be more than half a bit a value
MOST_TENSOR_ITEMS = 2**40
SCALAR_SLOTS = ("step", "mu_product")  # of an optimizer's state: one number per parameter
EMA_SLOT = "ema"  # of an optimizer's state: the mean of a weight over time


def slot_shape(slot: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of what an optimizer keeps under this name of a parameter of this shape."""
    if slot in SCALAR_SLOTS:
        return ()
    if slot == "row_var":
        return (*shape[:-1], 1)
    return (*shape[:-2], 1, *shape[-1:]) if slot == "col_var" else shape


def find_channels(shape: tuple[int, ...]) -> int | None:
    """Return the axis of the channels, as far as a shape tells: planner, sender and receiver ask here.

    (batch, tokens, channels) and square images, channels first or last, have one; other shapes and those
    with few positions do not.
    """
    match shape:
        case (_, _, _):
            axis = 2
        case (_, _, height, width) if height == width:
            axis = 1
        case (_, height, width, _) if height == width:
            axis = 3
        case _:
            return None
    num_positions = prod(size for place, size in enumerate(shape) if place != axis)
    return axis if num_positions >= LEAST_POSITIONS else None


@dataclass(frozen=True, slots=True)
class StoredType:
    """What a tensor is but for its values."""

    dtype: str  # as torch and numpy name it
    shape: tuple[int, ...]

    @property
    def num_items(self) -> int:
        """Number of its values."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return self.num_items * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(str(size) for size in self.shape)}]"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that travels in the buffer beside a message."""

    dtype: str
    shape: Annotated[tuple[int, ...], Meta(max_length=8)]
    wire_format: WireFormat

    @property
    def packing(self) -> WireFormat:
        """How the numbers lie in the buffer: int8 where int4-channels knows no channels."""
        is_lost = self.wire_format is WireFormat.INT4_CHANNELS and find_channels(self.shape) is None
        return WireFormat.INT8 if is_lost else self.wire_format

    @property
    def num_bytes(self) -> int:
        """Length of the buffer. FP32 sends a tensor as it is; so do all formats for what is no fraction."""
        num_items, packing = prod(self.shape), self.packing
        if packing is WireFormat.FP32 or self.dtype not in FLOAT_BYTES:
            return num_items * WIRE_BYTES[self.dtype]
        if packing in (WireFormat.BF16, WireFormat.FP16):
            return num_items * 2
        if packing is WireFormat.INT8:
            return num_items + SCALE_BYTES * -(-num_items // BLOCK_ITEMS)
        if packing is WireFormat.INT4:
            return -(-num_items // 2) + SCALE_BYTES * -(-num_items // BLOCK_ITEMS)
        axis = find_channels(self.shape) if packing is WireFormat.INT4_CHANNELS else None
        num_channels = 1 if axis is None else self.shape[axis]
        num_positions = num_items // max(num_channels, 1)
        scale_bytes = SHORT_SCALE_BYTES * -(-num_positions // SHORT_BLOCK_ITEMS)
        mean_bytes = 0 if axis is None else MEAN_BYTES
        # Blocks are even, so only the last one may have a code without a second one above it.
        return num_channels * (mean_bytes + scale_bytes + -(-num_positions // 2))

    @property
    def fault(self) -> str | None:
        """Why no tensor is like this, if so."""
        if self.dtype not in WIRE_BYTES:
            return f"dtype {self.dtype[:20]!r} is none of {', '.join(WIRE_BYTES)}"
        if (
            any(size < 0 for size in self.shape)
            or prod(max(size, 1) for size in self.shape) > MOST_TENSOR_ITEMS
        ):
            return f"shape {self.shape} is no shape of at most {MOST_TENSOR_ITEMS} items"
        return None
