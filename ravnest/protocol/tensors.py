"""What describes a tensor that travels in a buffer beside a message."""

from dataclasses import dataclass
from math import prod
from typing import Annotated

from msgspec import Meta

from ravnest.config import WireFormat

Buffer = bytes | bytearray | memoryview

FLOAT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
ITEM_BYTES = FLOAT_BYTES | {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
BLOCK_ITEMS, SCALE_BYTES = 256, 4  # int8 and int4: one scale for so many numbers
MOST_TENSOR_ITEMS = 2**40


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that travels in the buffer beside a message."""

    dtype: str
    shape: Annotated[tuple[int, ...], Meta(max_length=8)]
    wire_format: WireFormat

    @property
    def num_bytes(self) -> int:
        """Length of the buffer. FP32 sends a tensor as it is; so do all formats for what is no fraction."""
        num_items = prod(self.shape)
        if self.wire_format is WireFormat.FP32 or self.dtype not in FLOAT_BYTES:
            return num_items * ITEM_BYTES[self.dtype]
        if self.wire_format in (WireFormat.BF16, WireFormat.FP16):
            return num_items * 2
        num_codes = num_items if self.wire_format is WireFormat.INT8 else -(-num_items // 2)
        return num_codes + SCALE_BYTES * -(-num_items // BLOCK_ITEMS)

    @property
    def fault(self) -> str | None:
        """Why no tensor is like this, if so."""
        if self.dtype not in ITEM_BYTES:
            return f"dtype {self.dtype[:20]!r} is none of {', '.join(ITEM_BYTES)}"
        if (
            any(size < 0 for size in self.shape)
            or prod(max(size, 1) for size in self.shape) > MOST_TENSOR_ITEMS
        ):
            return f"shape {self.shape} is no shape of at most {MOST_TENSOR_ITEMS} items"
        return None
