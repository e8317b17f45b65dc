"""Tensors to bytes and back, as they travel: as they are, as bf16 or fp16, or as int8 or int4 blocks.

A block is 256 numbers with one scale; all scales come first, then all codes. The low bits of a scale are
zero, so code x scale is exact in float32. Encoding what was decoded gives the same bytes, so an average is
passed on without losing a bit. Nothing turns to zero in silence: a block with a NaN or an infinity in it
decodes to no finite number at all. Tensors may be on any device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ravnest.config import WireFormat
from ravnest.errors import ProtocolError
from ravnest.protocol.tensors import BLOCK_ITEMS, FLOAT_BYTES, ITEM_BYTES, SCALE_BYTES, TensorSpec

_LARGEST_CODE = {WireFormat.INT8: 127, WireFormat.INT4: 7}
_HALVES = {WireFormat.BF16: torch.bfloat16, WireFormat.FP16: torch.float16}
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: its reciprocal is finite
_LOW_BITS = -(2**8)  # 16 bits of a scale times 7 bits of a code fit in the 24 of a float32
_SLAB_BLOCKS = 2048  # two megabytes at a time stay in the cache, and no copy of the whole tensor is made


def describe(tensor: Tensor, wire_format: WireFormat) -> TensorSpec:
    """Return what the receiver must know of the buffer."""
    return TensorSpec(_NAMES[tensor.dtype], tuple(tensor.shape), wire_format)


def encoded_bytes(dtype: torch.dtype, shape: tuple[int, ...], wire_format: WireFormat) -> int:
    """Return the bytes of such a tensor on the wire."""
    return TensorSpec(_NAMES[dtype], shape, wire_format).num_bytes


def encode_tensor(tensor: Tensor, wire_format: WireFormat) -> memoryview:
    """Return the bytes to send: the tensor's own memory where possible, so leave it unchanged until sent."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    items = tensor.detach().reshape(-1)
    carrier = _carrier(_NAMES[tensor.dtype], wire_format)
    data = _pack(items, wire_format) if carrier is None else items.to(carrier).contiguous().view(torch.uint8)
    return data.cpu().numpy().data


def decode_tensor(buffer: memoryview | bytes | bytearray, spec: TensorSpec, device: str = "cpu") -> Tensor:
    """Return the tensor that a peer sent, as the receiver expects it.

    What needs no conversion is not copied: the tensor then is the buffer's memory, if that is writable.
    """
    if spec.fault is not None:
        raise ProtocolError(f"a tensor was announced that cannot be: {spec.fault}")
    data, carrier = memoryview(buffer), _carrier(spec.dtype, spec.wire_format)
    if data.nbytes != spec.num_bytes:
        raise ProtocolError(
            f"a {spec.dtype} tensor of shape {spec.shape} has {spec.num_bytes} bytes as {spec.wire_format}, "
            f"not {data.nbytes}"
        )
    received = _adopt(data, torch.float32 if carrier is None else carrier).to(device)
    if carrier is None:
        return _unpack(received, spec).reshape(spec.shape)
    if carrier is torch.bool and bool((received > 1).any()):  # torch's kernels trust that there are only two
        raise ProtocolError(f"a bool tensor of shape {spec.shape} has items that are neither 0 nor 1")
    return received.view(carrier).to(_DTYPES[spec.dtype]).reshape(spec.shape)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A buffer to send, and what all receivers will make of it."""

    buffer: memoryview
    decoded: Tensor


class ErrorFeedback:
    """Adds what rounding lost of a vector to what is sent of it next; a round at a time.

    A round encodes each item once, in whatever slices. What is owed is kept as bf16; fp32 owes nothing.
    """

    def __init__(self, wire_format: WireFormat, num_items: int, device: str = "cpu") -> None:
        self._wire_format = wire_format
        self._num_items = num_items if wire_format is not WireFormat.FP32 else 0
        self._device = device
        self._owed: Tensor | None = None
        self._pending: Tensor | None = None

    def add_owed(self, where: slice, items: Tensor, factor: float = 1.0) -> None:
        """Add what is owed of a slice to it, in place."""
        if self._owed is not None:
            owed = self._owed[where]  # of a slice that reaches beyond the vector, only so much
            items[: len(owed)].add_(owed, alpha=factor)

    def encode(self, where: slice, items: Tensor, unit: float = 1.0) -> Encoded:
        """Encode a slice; what that loses is owed, in units of the vector."""
        buffer = encode_tensor(items, self._wire_format)
        if self._wire_format is WireFormat.FP32:
            return Encoded(buffer, items)
        decoded = decode_tensor(buffer, describe(items, self._wire_format), self._device)
        if where.start < self._num_items:
            if self._pending is None:
                self._pending = torch.zeros(self._num_items, dtype=torch.bfloat16, device=self._device)
            pending = self._pending[where]
            torch.sub(items[: len(pending)], decoded[: len(pending)], out=items[: len(pending)])
            pending.copy_(items[: len(pending)].mul_(unit))
        return Encoded(buffer, decoded)

    def commit(self) -> None:
        """The round happened: what it did not deliver is owed in the next."""
        self._owed, self._pending = self._pending, None

    def abort(self) -> None:
        """The round never happened: what was owed before it is still owed."""
        self._pending = None


def _carrier(dtype: str, wire_format: WireFormat) -> torch.dtype | None:
    """Return the type whose plain bytes travel; None for blocks."""
    if wire_format is WireFormat.FP32 or dtype not in FLOAT_BYTES:
        return _DTYPES[dtype]
    return _HALVES.get(wire_format)


def _adopt(data: memoryview, carrier: torch.dtype) -> Tensor:
    """Return the bytes as a tensor, copied only if they may not be written or lie askew."""
    if data.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if data.readonly:
        data = memoryview(bytearray(data))
    tensor = torch.frombuffer(data, dtype=torch.uint8)
    return tensor.clone() if tensor.data_ptr() % carrier.itemsize else tensor


def _pack(items: Tensor, wire_format: WireFormat) -> Tensor:
    size = encoded_bytes(items.dtype, tuple(items.shape), wire_format)
    packed = torch.empty(size, dtype=torch.uint8, device=items.device)
    for rows, scales, codes in _slabs(items, packed, wire_format):
        _quantise(rows.float(), scales, codes, wire_format)
    return packed


def _unpack(packed: Tensor, spec: TensorSpec) -> Tensor:
    items = torch.empty(prod(spec.shape), dtype=_DTYPES[spec.dtype], device=packed.device)
    for rows, scales, codes in _slabs(items, packed, spec.wire_format):
        exact = rows if rows.dtype is torch.float32 else torch.empty_like(rows, dtype=torch.float32)
        _restore(exact, scales, codes, spec.wire_format)
        if exact is not rows:
            rows.copy_(exact)
    return items


def _slabs(items: Tensor, packed: Tensor, wire_format: WireFormat) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Walk items and their packed form side by side: slabs of whole blocks, a row each, then what is left."""
    num_whole, num_left = divmod(len(items), BLOCK_ITEMS)
    num_scales = num_whole + (num_left > 0)
    scales = packed[: num_scales * SCALE_BYTES].view(torch.float32).unsqueeze(1)
    codes = packed[num_scales * SCALE_BYTES :].view(torch.int8)
    row_codes = BLOCK_ITEMS if wire_format is WireFormat.INT8 else BLOCK_ITEMS // 2
    step = _SLAB_BLOCKS if items.device.type == "cpu" else max(1, num_whole)
    for low in range(0, num_whole, step):
        high = min(low + step, num_whole)
        yield (
            items[low * BLOCK_ITEMS : high * BLOCK_ITEMS].view(-1, BLOCK_ITEMS),
            scales[low:high],
            codes[low * row_codes : high * row_codes].view(-1, row_codes),
        )
    if num_left:
        yield (
            items[num_whole * BLOCK_ITEMS :].view(1, -1),
            scales[num_whole:],
            codes[num_whole * row_codes :].view(1, -1),
        )


def _quantise(rows: Tensor, scales: Tensor, codes: Tensor, wire_format: WireFormat) -> None:
    largest = torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))  # NaN is the largest
    # Divided by a tensor: CUDA multiplies by the reciprocal of a number, and the scale would not come back.
    torch.div(largest, torch.full_like(largest, _LARGEST_CODE[wire_format]), out=scales)
    scales.clamp_(min=_SMALLEST_SCALE).view(torch.int32).bitwise_and_(_LOW_BITS)
    whole = (rows * scales.reciprocal()).round_().to(torch.int8)
    if wire_format is WireFormat.INT8:
        codes.copy_(whole)
        return
    low, high = whole.tensor_split([codes.shape[1]], 1)
    torch.add(low, 8, out=codes)  # 1 to 15, and the other half of the row above it
    codes[:, : high.shape[1]].add_(high, alpha=16)


def _restore(rows: Tensor, scales: Tensor, codes: Tensor, wire_format: WireFormat) -> None:
    if wire_format is WireFormat.INT4:
        low, high = rows.tensor_split([codes.shape[1]], 1)
        low.copy_((codes & 15).sub_(8))
        high.copy_((codes >> 4)[:, : high.shape[1]])
    else:
        rows.copy_(codes)
    rows.mul_(scales)
