"""Frozen parameters as they are stored: a source that quantises what another one has, range by range.

Nothing is kept: a range of blocks is made of the numbers it is of, so a model need not be in memory. The
error of every tensor is measured when it is first read, and told when all have been.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ravnest.config import FrozenFormat
from ravnest.disk import release_pages
from ravnest.errors import WeightsError
from ravnest.model.blueprint.program import FROZEN_BLOCK_ITEMS, StateEntry
from ravnest.model.state.quantisation import dequantise, quantise
from ravnest.model.state.state_dict import from_bytes, to_bytes
from ravnest.model.state.state_source import StateSource
from ravnest.protocol.tensors import ITEM_BYTES, Buffer, StoredType

_MEASURED_ITEMS = 1 << 18  # at once: what is made on the way stays in a cache


@dataclass(slots=True)
class _Measured:
    """Sums over the first numbers of a tensor."""

    num_items: int = 0
    error: float = 0.0  # squared
    total: float = 0.0  # squared

    @property
    def relative(self) -> float:
        return (self.error / self.total) ** 0.5 if self.total else 0.0


@dataclass(frozen=True, slots=True)
class StorageError:
    """What a format cost the tensors in it: root mean squares of the error over that of the numbers."""

    form: FrozenFormat
    num_tensors: int
    overall: float
    largest: float
    largest_name: str

    def __str__(self) -> str:
        largest = f"at most {self.largest:.2%} in {self.largest_name!r}"
        return (
            f"{self.num_tensors} frozen matrices as {self.form}: relative error {self.overall:.2%}, {largest}"
        )


class StoredSource:
    """The entries of `given` that are stored in fewer bits; `tell` hears the errors once all were read."""

    def __init__(
        self,
        given: StateSource,
        entries: Iterable[StateEntry],
        tell: Callable[[Sequence[StorageError]], object] = lambda _: None,
    ) -> None:
        self._given, self._tell = given, tell
        self._entries = {x.name: x for x in entries if x.storage is not FrozenFormat.FP32}
        self.types: Mapping[str, StoredType] = {name: x.stored for name, x in self._entries.items()}
        self._measured = {name: _Measured() for name in self._entries}
        self._lock = threading.Lock()
        self._has_told = False

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes of a stored tensor, or a range of them."""
        entry, kind = self._entries[name], self.types[name]
        stop = kind.size_bytes if stop is None else min(stop, kind.size_bytes)
        if entry.storage is FrozenFormat.BF16:
            row_bytes, row_items = ITEM_BYTES[kind.dtype], 1
        else:
            row_bytes, row_items = kind.shape[1], FROZEN_BLOCK_ITEMS
        first, last = start // row_bytes, -(-stop // row_bytes)
        stored = self._store(entry, first * row_items, last * row_items)
        return to_bytes(stored)[start - first * row_bytes : stop - first * row_bytes]

    def _store(self, entry: StateEntry, first: int, last: int) -> Tensor:
        """Return these numbers of a tensor as they are stored."""
        numbers = self._read_numbers(entry, first, last)
        try:
            if entry.storage is FrozenFormat.BF16:
                stored = numbers.to(torch.bfloat16)
                again = stored
            else:
                stored = quantise(numbers, entry.storage)
                again = dequantise(stored, entry.storage, tuple(numbers.shape), numbers.dtype)
        except WeightsError as error:
            problem = f"weight {entry.name!r} cannot be stored as {entry.storage}: {error}"
            raise WeightsError(f"{problem}; look at the weights, or set frozen=fp32") from None
        self._measure(entry.name, first, numbers, again)
        return stored

    def _read_numbers(self, entry: StateEntry, first: int, last: int) -> Tensor:
        width = ITEM_BYTES[entry.dtype]
        content = self._given.read(entry.name, first * width, last * width)
        numbers = from_bytes(StoredType(entry.dtype, (len(content) // width,)), content)
        release_pages(content)
        return numbers

    def _measure(self, name: str, first: int, numbers: Tensor, again: Tensor) -> None:
        measured = self._measured[name]
        if measured.num_items != first or self._has_told:
            return
        error = total = 0.0
        for wanted, found in zip(
            *(torch.split(each, _MEASURED_ITEMS) for each in (numbers, again)), strict=True
        ):
            wide = wanted.float()
            total += float(torch.linalg.vector_norm(wide)) ** 2
            error += float(torch.linalg.vector_norm(found.float().sub_(wide))) ** 2
        with self._lock:
            if measured.num_items == first:
                measured.num_items += numbers.numel()
                measured.error += error
                measured.total += total
        self._tell_if_done()

    def _tell_if_done(self) -> None:
        with self._lock:
            is_done = all(
                measured.num_items == StoredType(entry.dtype, entry.shape).num_items
                for entry, measured in zip(self._entries.values(), self._measured.values(), strict=True)
            )
            if not is_done or self._has_told:
                return
            self._has_told = True
        self._tell(self._sum_up())

    def _sum_up(self) -> tuple[StorageError, ...]:
        """Return the error of each format."""
        found: dict[FrozenFormat, dict[str, _Measured]] = {}
        for name, measured in self._measured.items():
            found.setdefault(self._entries[name].storage, {})[name] = measured
        return tuple(_sum_up(form, found[form]) for form in sorted(found))


def _sum_up(form: FrozenFormat, found: Mapping[str, _Measured]) -> StorageError:
    parts = found.values()
    overall = _Measured(0, sum(part.error for part in parts), sum(part.total for part in parts))
    name = max(found, key=lambda each: found[each].relative)
    return StorageError(form, len(found), overall.relative, found[name].relative, name)
