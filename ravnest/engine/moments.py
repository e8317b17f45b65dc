"""The moments of an optimizer, kept narrow: in bf16, or as int8 blocks with a power of two for each.

An update works on float32 and rounds at random: means stay right, where rounding to nearest would lose small
changes. The random bits follow from the number and the count of updates, so equal copies stay equal. Small
tensors stay in float32. Blocks are bf16 numbers too, so what is saved is all that there is.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ravnest.config import StateFormat

SMALL_ITEMS = 1 << 12  # tensors with fewer stay as they are: norms and biases, hardly any memory
SQUARES = "exp_avg_sq"
_SQUARES = (SQUARES, "square_avg", "sum", "row_var", "col_var", "variance")
_BLOCK_ITEMS = 256
_LARGEST_CODE = 127
_SLAB_ITEMS, _DEVICE_SLAB_ITEMS = 1 << 18, 1 << 25  # that are widened at once
_LOW_BITS = (1 << 16) - 1  # of a float32, those that bf16 has not
_FACTORS = (-1640531535, -2048144777)  # odd, and without a pattern in their bits
_UPDATE_FACTOR = 40503


def round_to_bf16(items: Tensor, update: int) -> Tensor:
    """Return float32 numbers as bf16, up or down at random, right on average."""
    bits = items.view(torch.int32)
    return (bits + _draw(bits, update)).bitwise_and_(~_LOW_BITS).view(torch.float32).to(torch.bfloat16)


def _draw(bits: Tensor, update: int) -> Tensor:
    """Return whole numbers below 2^16 that look random."""
    mixed = (bits + (update * _UPDATE_FACTOR) % (1 << 31)).mul_(_FACTORS[0])
    mixed.bitwise_xor_(mixed >> 15).mul_(_FACTORS[1])
    return mixed.bitwise_right_shift_(16).bitwise_and_(_LOW_BITS)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A tensor as int8: 256 codes share a power of two."""

    codes: Tensor  # of the tensor's shape
    exponents: Tensor

    @classmethod
    def of(cls, items: Tensor, update: int | None = None) -> "Blocks":
        """Round float32 numbers at random; to the nearest without an update."""
        flat = items.reshape(-1)
        rows = functional.pad(flat, (0, -len(flat) % _BLOCK_ITEMS)).view(-1, _BLOCK_ITEMS)
        mantissas, exponents = torch.frexp(rows.abs().amax(1) / _LARGEST_CODE)
        exponents = (exponents - (mantissas == 0.5).int()).clamp_(-126, 127)  # a power of two needs no more
        rows = torch.ldexp(rows, -exponents.unsqueeze(1))
        drawn = _draw(rows.view(torch.int32), update) / (1 << 16) if update is not None else 0.5
        codes = rows.add_(drawn).floor_().clamp_(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8)
        return cls(codes.view(-1)[: len(flat)].view(items.shape).clone(), exponents.to(torch.int8))

    def restore(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the numbers, exactly."""
        found = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        row, slab = found.view(-1), _SLAB_ITEMS if found.device.type == "cpu" else _DEVICE_SLAB_ITEMS
        for start in range(0, len(row), slab):  # no wide copy of all of a large one
            piece = self.piece(slice(start, min(start + slab, len(row))))
            flat = piece.codes
            rows = functional.pad(flat, (0, -len(flat) % _BLOCK_ITEMS)).view(-1, _BLOCK_ITEMS).float()
            rows = torch.ldexp(rows, piece.exponents.int().unsqueeze(1))
            row[start : start + len(flat)] = rows.view(-1)[: len(flat)]
        return found

    def piece(self, where: slice) -> "Blocks":
        """Return some of them, counted as in one row, in the same memory; they begin where a block does."""
        blocks = slice(where.start // _BLOCK_ITEMS, -(-where.stop // _BLOCK_ITEMS))
        return Blocks(self.codes.view(-1)[where], self.exponents[blocks])

    def empty_like(self) -> "Blocks":
        """Return as many, still to be filled."""
        return Blocks(torch.empty_like(self.codes), torch.empty_like(self.exponents))

    def copy_(self, other: "Blocks") -> None:
        """Take over the numbers of others."""
        self.codes.copy_(other.codes)
        self.exponents.copy_(other.exponents)


class _Live(Mapping[str, Tensor]):
    """The moments of now, and more: no old ones are kept for it, and blocks are restored one at a time."""

    def __init__(self, kept: Mapping[str, Tensor | Blocks], more: Mapping[str, Tensor]) -> None:
        self._kept, self._more = kept, more
        self._keys = (*kept, *more)

    def __getitem__(self, key: str) -> Tensor:
        kept = self._kept[key] if key in self._kept else self._more[key]
        return kept.restore(torch.bfloat16) if isinstance(kept, Blocks) else kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class Moments:
    """What an optimizer remembers of its parameters, by "SLOT/NAME"; opened and closed for an update."""

    def __init__(self, form: StateFormat) -> None:
        self._form = form
        self._kept: dict[str, Tensor | Blocks] = {}
        self._opened: dict[str, Tensor] = {}
        self._piece: slice | None = None  # what of the opened one, if not all
        self._fresh: dict[str, Tensor | Blocks] = {}  # whose pieces are closed one after the other

    def open(self, slot: str, names: Sequence[str], like: Iterable[Tensor]) -> list[Tensor]:
        """Return moments to change in place, as wide as their parameters; new ones are zero."""
        found = []
        for name, parameter in zip(names, like, strict=True):
            key = f"{slot}/{name}"
            kept = self._kept.get(key)
            if kept is None:
                wide = torch.zeros_like(parameter)
            elif isinstance(kept, Blocks):
                wide = kept.restore()
            else:
                wide = kept.to(parameter.dtype)  # itself, if it is as wide
            if wide is not kept:
                self._opened[key] = wide
            found.append(wide)
        return found

    def open_piece(self, slot: str, name: str, like: Tensor, shape: tuple[int, ...], where: slice) -> Tensor:
        """Return a piece of a moment to change in place; pieces are opened and closed from first to last.

        They are counted as in one row, and begin where blocks do.
        """
        key = f"{slot}/{name}"
        if key not in self._kept:
            self._kept[key] = self._narrow(key, torch.zeros(shape, dtype=like.dtype), None)
        kept = self._kept[key]
        row = kept.piece(where).restore() if isinstance(kept, Blocks) else kept.view(-1)[where]
        if row.dtype is like.dtype and not isinstance(kept, Blocks):
            return row
        self._piece = where
        self._opened[key] = row.to(like.dtype)
        return self._opened[key]

    def close(self, updates: Mapping[str, int]) -> None:
        """Round what was opened; `updates` counts those of each parameter."""
        for key, wide in self._opened.items():
            narrow = self._narrow(key, wide, updates[key.partition("/")[2]])
            self._kept[key] = narrow if self._piece is None else self._add_piece(key, narrow, self._piece)
        self._opened.clear()
        self._piece = None

    def _add_piece(self, key: str, narrow: Tensor | Blocks, where: slice) -> Tensor | Blocks:
        """Return what is kept now: when all pieces are there the new one. Somebody may be saving it."""
        kept = self._kept[key]
        if key not in self._fresh:
            self._fresh[key] = kept.empty_like() if isinstance(kept, Blocks) else torch.empty_like(kept)
        fresh = self._fresh[key]
        if isinstance(fresh, Blocks) and isinstance(narrow, Blocks):
            fresh.piece(where).copy_(narrow)
            is_done = where.stop == fresh.codes.numel()
        else:
            assert isinstance(fresh, Tensor)
            assert isinstance(narrow, Tensor)
            fresh.view(-1)[where] = narrow
            is_done = where.stop == fresh.numel()
        return self._fresh.pop(key) if is_done else kept

    def live(self, slot: str, names: Sequence[str], like: Iterable[Tensor]) -> list[Tensor]:
        """Return moments as they are kept; of blocks, a copy."""
        found = []
        for name, parameter in zip(names, like, strict=True):
            key = f"{slot}/{name}"
            if key not in self._kept:
                self._kept[key] = self._narrow(key, torch.zeros_like(parameter), None)
            kept = self._kept[key]
            found.append(kept.restore() if isinstance(kept, Blocks) else kept)
        return found

    def export(self, more: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return all of them as they are when they are looked at, blocks as bf16; and some more."""
        return _Live(self._kept, more)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a copy of what others exported."""
        self._opened.clear()
        self._fresh.clear()
        self._piece = None
        self._kept = {key: self._narrow(key, tensor.clone(), None) for key, tensor in state.items()}

    def _narrow(self, key: str, wide: Tensor, update: int | None) -> Tensor | Blocks:
        form = self._form
        if form is StateFormat.FP32 or wide.numel() < SMALL_ITEMS:
            return wide.float() if wide.dtype is torch.bfloat16 else wide
        is_square = key.partition("/")[0] in _SQUARES
        if form is StateFormat.BF16 and is_square:
            return wide.float()
        if form is StateFormat.BF16 or is_square:
            return wide.to(torch.bfloat16) if update is None else round_to_bf16(wide, update)
        return Blocks.of(wide.float(), update)
