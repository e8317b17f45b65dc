"""Matrices in 8 or 4 bits: blocks of 64 numbers with one scale in bf16, as rows of bytes.

int8: the scale is the largest size over 127, codes are whole numbers. int4: the scale is the number of the
largest size with its sign, so that one of 16 levels, 1, is always met. The others give the least square error
of Gaussian numbers, and 0 is among them. Levels are bf16, so a number has the same bits whether it is
dequantised to bf16 or to fp32 and cast. Zeros fill the last block.
"""

from functools import cache
from math import prod

import torch
from torch import Tensor

from ravnest.config import FrozenFormat
from ravnest.errors import WeightsError
from ravnest.model.blueprint.program import FROZEN_BLOCK_ITEMS, FROZEN_SCALE_BYTES

LEVELS = (
    *(-0.86328125, -0.67578125, -0.53515625, -0.41015625, -0.298828125, -0.1962890625, -0.09716796875, 0.0),
    *(0.091796875, 0.185546875, 0.28125, 0.384765625, 0.498046875, 0.62890625, 0.78515625, 1.0),
)
_LARGEST_CODE = 127
_STEPS = 2048  # of the table from numbers to codes, for one scale
_MARGIN = 16  # steps beyond one scale: it is rounded, maybe to less than the number it is of
_CHUNK_BLOCKS = {"cpu": 1 << 12, "cuda": 1 << 18}  # at once: what is made on the way is small, or in a cache


def quantise(tensor: Tensor, form: FrozenFormat) -> Tensor:
    """Return the blocks of a tensor's numbers, in order; the last one may be filled with zeros."""
    flat = tensor.detach().reshape(-1)
    rest = -flat.numel() % FROZEN_BLOCK_ITEMS
    flat = torch.cat([flat, flat.new_zeros(rest)]) if rest else flat
    blocks = flat.view(-1, FROZEN_BLOCK_ITEMS)
    make = _quantise_int8 if form is FrozenFormat.INT8 else _quantise_int4
    most = _largest_scale(tensor.dtype, _LARGEST_CODE if form is FrozenFormat.INT8 else 1)
    return torch.cat([make(part.float(), most) for part in torch.split(blocks, _CHUNK_BLOCKS["cpu"])])


def dequantise(blocks: Tensor, form: FrozenFormat, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the tensor of this shape that the blocks are of; the result has no gradient."""
    found = torch.empty((len(blocks), FROZEN_BLOCK_ITEMS), dtype=dtype, device=blocks.device)
    scales = blocks[:, -FROZEN_SCALE_BYTES:].view(torch.bfloat16).to(dtype)
    codes = blocks[:, :-FROZEN_SCALE_BYTES]
    chunk = _CHUNK_BLOCKS.get(blocks.device.type, len(blocks) or 1)
    parts = [torch.split(each, chunk) for each in (codes, scales, found)]
    if form is FrozenFormat.INT8:
        for part, scale, out in zip(*parts, strict=True):
            out.copy_(part.view(torch.int8)).mul_(scale)
    else:
        pairs = _table_of_pairs(dtype, blocks.device)
        places = torch.empty_like(parts[0][0], dtype=torch.int32)  # one for all: new memory is slow
        for part, scale, out in zip(*parts, strict=True):
            index = places[: len(part)].copy_(part).view(-1)
            torch.index_select(pairs, 0, index, out=out.view(-1).view(pairs.dtype))
            out.mul_(scale)
    return found.view(-1)[: prod(shape)].view(shape)


def _quantise_int8(blocks: Tensor, most: float) -> Tensor:
    scales = _narrow_scales(blocks.abs().amax(1, keepdim=True) / _LARGEST_CODE, most)
    codes = (blocks / _divisors(scales)).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
    return torch.cat([codes.to(torch.int8).view(torch.uint8), scales.view(torch.uint8)], 1)


def _quantise_int4(blocks: Tensor, most: float) -> Tensor:
    high, low = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
    scales = _narrow_scales(torch.where(high >= -low, high, low), most)
    places = (blocks * (_STEPS / _divisors(scales))).add_(_STEPS + _MARGIN + 0.5)
    places = places.to(torch.int32).clamp_(0, 2 * (_STEPS + _MARGIN))
    codes = torch.index_select(_table_of_codes(), 0, places.view(-1)).view(-1, FROZEN_BLOCK_ITEMS // 2, 2)
    packed = codes[:, :, 0] | (codes[:, :, 1] << 4)
    return torch.cat([packed, scales.view(torch.uint8)], 1)


def _narrow_scales(scales: Tensor, most: float) -> Tensor:
    if not bool(scales.isfinite().all()):
        raise WeightsError("it is not finite")
    return scales.clamp(-most, most).to(torch.bfloat16)


def _divisors(scales: Tensor) -> Tensor:
    """Return the scales as they will be read; a block of zeros, or nearly, has zeros whatever it is."""
    wide = scales.float()
    return torch.where(wide.abs() < torch.finfo(torch.float32).tiny, 1.0, wide)


@cache
def _largest_scale(dtype: torch.dtype, largest_code: int) -> float:
    """Return the largest bf16 number whose product with every code the type can hold."""
    bits = torch.tensor(torch.finfo(dtype).max / largest_code, dtype=torch.float32).view(torch.int32)
    return float((bits & ~0xFFFF).view(torch.float32))


@cache
def _table_of_codes() -> Tensor:
    """Return the code of the level next to each place: numbers are rounded to places first."""
    levels = torch.tensor(LEVELS)
    places = torch.arange(-_STEPS - _MARGIN, _STEPS + _MARGIN + 1) / _STEPS
    return torch.bucketize(places, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)


@cache
def _table_of_pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two levels of each byte, as one number of twice the width: one look-up finds both."""
    levels, codes = torch.tensor(LEVELS, dtype=dtype), torch.arange(256)
    pairs = torch.stack([levels[codes & 15], levels[codes >> 4]], 1)
    wide = {2: torch.int32, 4: torch.int64}[pairs.itemsize]
    return pairs.view(wide).view(-1).to(device)
