"""Tensors to bytes and back, as they travel: as they are, as bf16 or fp16, or as int8 or int4 blocks.

A block is 256 numbers with one scale, or 32: of int4-stochastic in a row, of int4-channels the positions of
one channel, less its mean. Means come first, then scales, then codes. The low bits of a scale are zero, so
code x scale is exact in float32. Of int8 and int4, what was decoded encodes to the same bytes, so an average
is passed on without losing a bit. Nothing turns to zero in silence: a block with a NaN or an infinity in it
decodes to no finite number at all. Tensors may be on any device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from ravnest.config import WireFormat
from ravnest.errors import ProtocolError
from ravnest.protocol.tensors import (
    BLOCK_ITEMS,
    FLOAT_BYTES,
    INTEGER_BYTES,
    MEAN_BYTES,
    SHORT_BLOCK_ITEMS,
    WIRE_BYTES,
    TensorSpec,
    find_channels,
)

DrawKey = tuple[int, ...]  # what the chance of a message depends on: the same key draws the same again


class _Layout(NamedTuple):
    """Blocks of a format: so many numbers with a scale of this type; codes go up to the largest."""

    num_items: int
    scale: torch.dtype
    largest_code: int


_LAYOUTS = {
    WireFormat.INT8: _Layout(BLOCK_ITEMS, torch.float32, 127),
    WireFormat.INT4: _Layout(BLOCK_ITEMS, torch.float32, 7),
    WireFormat.INT4_CHANNELS: _Layout(SHORT_BLOCK_ITEMS, torch.bfloat16, 7),
    WireFormat.INT4_STOCHASTIC: _Layout(SHORT_BLOCK_ITEMS, torch.bfloat16, 7),
}
_HALVES = {WireFormat.BF16: torch.bfloat16, WireFormat.FP16: torch.float16}
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in WIRE_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: its reciprocal is finite
_LOW_BITS = -(2**8)  # 16 bits of a scale times 7 bits of a code fit in the 24 of a float32
_BF16_BITS, _BF16_REST, _INFINITY = -(2**16), 2**16 - 1, 0x7F800000
_SLAB_ITEMS = 2**19  # two megabytes at a time stay in the cache, and no copy of the whole tensor is made
_DEVICE_SLAB_ITEMS = 2**24  # as much keeps a GPU busy, in 64 megabytes a copy
_ODD = 0x0001000100010001  # in each of four short numbers: they lie evenly around zero


def describe(tensor: Tensor, wire_format: WireFormat) -> TensorSpec:
    """Return what the receiver must know of the buffer."""
    return TensorSpec(_NAMES[tensor.dtype], tuple(tensor.shape), wire_format)


def narrow_integers(tensor: Tensor) -> Tensor:
    """Return the same whole numbers in the smallest type that holds them; `widen_integers` undoes it."""
    if _NAMES[tensor.dtype] not in INTEGER_BYTES or not tensor.numel():
        return tensor
    least, most = (int(each) for each in torch.aminmax(tensor))
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32):
        bounds = torch.iinfo(dtype)
        if dtype.itemsize < tensor.dtype.itemsize and bounds.min <= least and most <= bounds.max:
            return tensor.to(dtype)
    return tensor


def widen_integers(tensor: Tensor, dtype: str) -> Tensor:
    """Return whole numbers in the type that the program has them in; all else as it is."""
    wide = _DTYPES[dtype]
    is_narrow = not (tensor.is_floating_point() or tensor.dtype is torch.bool) and dtype in INTEGER_BYTES
    return tensor.to(wide) if is_narrow and tensor.dtype.itemsize < wide.itemsize else tensor


def encoded_bytes(dtype: torch.dtype, shape: tuple[int, ...], wire_format: WireFormat) -> int:
    """Return the bytes of such a tensor on the wire."""
    return TensorSpec(_NAMES[dtype], shape, wire_format).num_bytes


def encode_tensor(tensor: Tensor, wire_format: WireFormat, key: DrawKey | None = None) -> memoryview:
    """Return the bytes to send: the tensor's own memory where possible, so leave it unchanged until sent.

    int4-stochastic draws from `key`, which no two messages should share.
    """
    packed = pack_tensor(tensor, wire_format, key)
    if packed.device.type == "cuda":  # into pinned memory: ten times as fast
        packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed)
    data: memoryview = packed.cpu().numpy().data
    return data


def pack_tensor(tensor: Tensor, wire_format: WireFormat, key: DrawKey | None = None) -> Tensor:
    """Return what encode_tensor does, still on the tensor's device."""
    items, spec = tensor.detach(), describe(tensor, wire_format)
    carrier = _carrier(spec.dtype, spec.packing)
    if items.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    if carrier is None:
        return _pack(items, spec, key)
    return items.reshape(-1).to(carrier).contiguous().view(torch.uint8)


def check_buffer(buffer: memoryview | bytes | bytearray, spec: TensorSpec) -> memoryview:
    """Return a buffer that is as long as what was announced with it; else raise ProtocolError."""
    if spec.fault is not None:
        raise ProtocolError(f"a tensor was announced that cannot be: {spec.fault}")
    data = memoryview(buffer)
    if data.nbytes != spec.num_bytes:
        raise ProtocolError(
            f"a {spec.dtype} tensor of shape {spec.shape} has {spec.num_bytes} bytes as {spec.wire_format}, "
            f"not {data.nbytes}"
        )
    return data


def decode_tensor(buffer: memoryview | bytes | bytearray, spec: TensorSpec, device: str = "cpu") -> Tensor:
    """Return the tensor that a peer sent, as the receiver expects it.

    What needs no conversion is not copied: the tensor then is the buffer's memory, if that is writable.
    """
    data = check_buffer(buffer, spec)
    carrier = _carrier(spec.dtype, spec.packing) or torch.float32
    return unpack_tensor(_move(_adopt(data, carrier), torch.device(device)), spec)


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """Bring a tensor to a device; a GPU fetches it from pinned memory, while the program goes on."""
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor if device == tensor.device else tensor.to(device)


def unpack_tensor(packed: Tensor, spec: TensorSpec) -> Tensor:
    """Return the tensor of these bytes, of which there are as many as `spec` says, on their device."""
    carrier = _carrier(spec.dtype, spec.packing)
    if carrier is None:
        return _unpack(packed, spec)
    if carrier is torch.bool and bool((packed > 1).any()):  # torch's kernels trust that there are only two
        raise ProtocolError(f"a bool tensor of shape {spec.shape} has items that are neither 0 nor 1")
    return packed.view(carrier).to(_DTYPES[spec.dtype]).reshape(spec.shape)


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


class _Slab(NamedTuple):
    """Blocks in a row along axis 1, beside their scales and codes."""

    rows: Tensor
    scales: Tensor
    codes: Tensor


def _pack(tensor: Tensor, spec: TensorSpec, key: DrawKey | None) -> Tensor:
    packed = torch.empty(spec.num_bytes, dtype=torch.uint8, device=tensor.device)
    if spec.packing is WireFormat.INT4_CHANNELS:
        items = tensor.movedim(_axis(spec), -1).flatten(0, -2)
        means = torch.mean(items, 0, dtype=torch.float32)
        packed[: means.nbytes].view(torch.float32).copy_(means)
        for slab in _slabs(items, packed[means.nbytes :], spec.packing):
            _quantise(slab, slab.rows - means, spec.packing)
        return packed
    chance = _make_chance(key, tensor.device) if spec.packing is WireFormat.INT4_STOCHASTIC else None
    for slab in _slabs(tensor.reshape(-1), packed, spec.packing):
        _quantise(slab, slab.rows.float(), spec.packing, chance)
    return packed


def _unpack(packed: Tensor, spec: TensorSpec) -> Tensor:
    axis = _axis(spec) if spec.packing is WireFormat.INT4_CHANNELS else None
    shape = list(spec.shape)
    if axis is not None:
        shape.append(shape.pop(axis))
    whole = torch.empty(shape, dtype=_DTYPES[spec.dtype], device=packed.device)
    if whole.numel() == 0:
        return whole.view(spec.shape)
    items = whole.view(-1) if axis is None else whole.flatten(0, -2)
    num_means = 0 if axis is None else shape[-1]
    means = packed[: MEAN_BYTES * num_means].view(torch.float32)
    for slab in _slabs(items, packed[MEAN_BYTES * num_means :], spec.packing):
        rows = slab.rows
        exact = rows if rows.dtype is torch.float32 else torch.empty_like(rows, dtype=torch.float32)
        _restore(exact, slab, spec.packing)
        if num_means:
            exact.add_(means)
        if exact is not rows:
            rows.copy_(exact)
    return whole if axis is None else whole.movedim(-1, axis).contiguous()


def _axis(spec: TensorSpec) -> int:
    axis = find_channels(spec.shape)
    assert axis is not None  # or it would not be packed by channels
    return axis


def _slabs(items: Tensor, packed: Tensor, packing: WireFormat) -> Iterator[_Slab]:
    """Walk items and their packed form side by side: slabs of whole blocks, then what is left.

    Items are numbers, or rows of channels: then each channel has blocks of its own.
    """
    size, scale, _ = _LAYOUTS[packing]
    tail, (num_whole, num_left) = tuple(items.shape[1:]), divmod(len(items), size)
    num_scales, width = num_whole + (num_left > 0), items[0].numel()
    scale_bytes = num_scales * width * scale.itemsize
    scales = packed[:scale_bytes].view(scale).view(num_scales, 1, *tail)
    row_codes = size if packing is WireFormat.INT8 else size // 2
    codes = packed[scale_bytes:].view(torch.int8).view(-1, *tail)
    slab_items = _SLAB_ITEMS if items.device.type == "cpu" else _DEVICE_SLAB_ITEMS
    step = max(1, slab_items // (size * width))
    for low in range(0, num_whole, step):
        high = min(low + step, num_whole)
        yield _Slab(
            items[low * size : high * size].view(-1, size, *tail),
            scales[low:high],
            codes[low * row_codes : high * row_codes].view(-1, row_codes, *tail),
        )
    if num_left:
        yield _Slab(
            items[num_whole * size :].unsqueeze(0),
            scales[num_whole:],
            codes[num_whole * row_codes :].unsqueeze(0),
        )


def _quantise(slab: _Slab, rows: Tensor, packing: WireFormat, chance: torch.Generator | None = None) -> None:
    """Write the scales and codes of these rows."""
    codes = slab.codes
    scales = _find_scales(rows, packing)
    slab.scales.copy_(scales)
    fractions = rows * scales.reciprocal()
    if chance is not None:
        fractions += _draw(fractions, chance)
    whole = fractions.round_().to(torch.int8)
    if packing is WireFormat.INT8:
        codes.copy_(whole)
        return
    low, high = whole.tensor_split([codes.shape[1]], 1)
    torch.add(low, 8, out=codes)  # 1 to 15, and the other half of the row above it
    codes[:, : high.shape[1]].add_(high, alpha=16)


def _find_scales(rows: Tensor, packing: WireFormat) -> Tensor:
    """Return scales that are exact in their type; what is not finite makes them not finite either."""
    largest = torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))  # NaN is the largest
    # Divided by a tensor: CUDA multiplies by the reciprocal of a number, and the scale would not come back.
    scales = torch.div(largest, torch.full_like(largest, _LAYOUTS[packing].largest_code))
    bits = scales.clamp_(min=_SMALLEST_SCALE).view(torch.int32)
    if _LAYOUTS[packing].scale is torch.float32:
        bits.bitwise_and_(_LOW_BITS)
    else:  # rounded up: no number is beyond the largest code
        bits.bitwise_and_(2**31 - 1).clamp_(max=_INFINITY).add_(_BF16_REST).bitwise_and_(_BF16_BITS)
    return scales


def _make_chance(key: DrawKey | None, device: torch.device) -> torch.Generator:
    if key is None:
        raise ValueError(f"{WireFormat.INT4_STOCHASTIC} needs a key to draw from")
    seed = blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(seed) >> 1)


def _draw(like: Tensor, chance: torch.Generator) -> Tensor:
    """Return numbers between -1/2 and 1/2 that make rounding right on average; 15 bits are enough."""
    num_longs = -(-like.numel() // 4)
    drawn = torch.empty(num_longs, dtype=torch.int64, device=like.device)
    drawn.random_(-(2**63), None, generator=chance).bitwise_or_(_ODD)
    return drawn.view(torch.int16)[: like.numel()].view_as(like) * 2.0**-16


def _restore(rows: Tensor, slab: _Slab, packing: WireFormat) -> None:
    codes = slab.codes
    if packing is WireFormat.INT8:
        rows.copy_(codes)
    else:
        low, high = rows.tensor_split([codes.shape[1]], 1)
        low.copy_((codes & 15).sub_(8))
        high.copy_((codes >> 4)[:, : high.shape[1]])
    rows.mul_(slab.scales)
