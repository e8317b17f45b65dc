"""The tensors of a stage as one vector, for averaging, and as a safetensors file, for keeping and sending.

The vector is ordered by home: the first position that uses a tensor. So a segment is one interval of it. The
vectors of a cluster's stages, joined, are the vector of the model, wherever the cluster cuts. A tied weight
belongs to its home alone; stages that use it elsewhere follow. There is no file I/O in here.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, prod
from typing import Self

import torch
from torch import Tensor

from ravnest.errors import WeightsError
from ravnest.model.blueprint.program import BUFFER, CONSTANT, FLOATING, PARAMETER, Blueprint, StateEntry
from ravnest.model.state.safetensors_header import FileTensor, read_tensors, write_header
from ravnest.protocol.tensors import SCALAR_SLOTS, Buffer, StoredType, slot_shape

LOSS_PREFIX = "job_loss."  # of state that is the loss's, not the model's
OPTIMIZER_PREFIX = "optimizer/"  # in a snapshot, before "SLOT/NAME"


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """The place of a tensor in the vector: `size` items from `offset`. `position` is its home."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    position: int

    @property
    def size(self) -> int:
        """Items of the tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of the tensors in the vector of [start, stop).

    The vector holds trained parameters and the floating-point buffers that training writes. All are float32,
    which is exact for every smaller type and rounds float64.
    """

    start: int
    stop: int
    entries: tuple[FlatEntry, ...]

    @classmethod
    def of(cls, blueprint: Blueprint) -> Self:
        """Return the layout of a stage, or of the whole model."""
        start, stop = blueprint.start, blueprint.stop
        averaged = [entry for entry in blueprint.state if _is_averaged(entry)]
        hosted = [entry for entry in averaged if start <= entry.positions[0] < stop]
        hosted.sort(key=lambda entry: entry.positions[0])
        offsets = accumulate((prod(entry.shape) for entry in hosted), initial=0)
        entries = tuple(
            FlatEntry(entry.name, entry.shape, entry.dtype, offset, entry.positions[0])
            for entry, offset in zip(hosted, offsets, strict=False)
        )
        return cls(start, stop, entries)

    @property
    def size(self) -> int:
        """Items of the vector."""
        return sum(entry.size for entry in self.entries)

    def interval(self, start: int, stop: int) -> slice:
        """Return where the segment [start, stop) lies in the vector."""
        assert self.start <= start <= stop <= self.stop, f"[{start}, {stop}) of [{self.start}, {self.stop})"
        before = sum(entry.size for entry in self.entries if entry.position < start)
        inside = sum(entry.size for entry in self.entries if start <= entry.position < stop)
        return slice(before, before + inside)

    def segment(self, start: int, stop: int) -> "Layout":
        """Return the layout of the interval's own vector."""
        shift = self.interval(start, stop).start
        entries = tuple(
            FlatEntry(entry.name, entry.shape, entry.dtype, entry.offset - shift, entry.position)
            for entry in self.entries
            if start <= entry.position < stop
        )
        return Layout(start, stop, entries)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the parts of a vector under their names and in their shapes, without a copy."""
        assert vector.shape == (self.size,), f"a vector of {tuple(vector.shape)} for {self.size} items"
        return {
            entry.name: vector[entry.offset : entry.offset + entry.size].view(entry.shape)
            for entry in self.entries
        }

    @torch.no_grad()
    def gather(self, state: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """Copy the tensors into one float32 vector, a new one on their device or `out`."""
        if out is None:
            device = state[self.entries[0].name].device if self.entries else None
            out = torch.empty(self.size, dtype=torch.float32, device=device)
        assert out.dtype == torch.float32, out.dtype
        for name, view in self.views(out).items():
            assert view.shape == state[name].shape, f"{name} is {tuple(state[name].shape)}"
            view.copy_(state[name])
        return out


def order_entries(entries: Iterable[StateEntry]) -> list[StateEntry]:
    """Return what nothing changes first: so it makes the same pieces in every snapshot of a stage."""
    return sorted(entries, key=lambda entry: entry.is_trainable or entry.is_written)


def to_safetensors(state: Mapping[str, Tensor], blueprint: Blueprint) -> bytes:
    """Return the tensors that the blueprint names as a safetensors file; others are left out."""
    for entry in blueprint.state:
        check_stored(entry, type_of(state[entry.name]) if entry.name in state else None)
    return to_snapshot({entry.name: state[entry.name] for entry in blueprint.state}, {})


def to_snapshot(state: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> bytes:
    """Return a stage's tensors and its optimizer's, by "SLOT/NAME", as a safetensors file."""
    return b"".join(snapshot_pieces(state, optimizer))


def snapshot_pieces(
    state: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
) -> Iterator[bytes | memoryview]:
    """Yield that file piece by piece, so that no memory is needed for another copy of a stage.

    Training may change the tensors meanwhile: one piece may be before an update and the next one after it.
    """

    def look() -> Iterator[tuple[str, Tensor]]:  # one at a time: some are made when they are looked at
        yield from state.items()
        yield from ((OPTIMIZER_PREFIX + key, tensor) for key, tensor in optimizer.items())

    yield write_header({name: type_of(tensor) for name, tensor in look()})
    for _, tensor in look():
        if tensor.numel():
            yield to_bytes(tensor)


def to_bytes(tensor: Tensor) -> memoryview:
    """Return the values of a tensor as they are in a file; the tensor's own memory where it can be."""
    flat = tensor.detach().reshape(-1).cpu().contiguous()
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def from_bytes(kind: StoredType, data: Buffer) -> Tensor:
    """Return a tensor with these values, in memory of its own."""
    dtype = getattr(torch, kind.dtype)
    if not len(data):
        return torch.empty(kind.shape, dtype=dtype)
    own = bytearray(data)
    if dtype is torch.bool:  # torch's kernels trust that there are only two
        return torch.frombuffer(own, dtype=torch.uint8).ne(0).reshape(kind.shape)
    return torch.frombuffer(own, dtype=dtype).reshape(kind.shape)


def type_of(tensor: Tensor) -> StoredType:
    """Return what a tensor is but for its values."""
    return StoredType(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def read_snapshot(data: Buffer, entries: Iterable[StateEntry]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a snapshot that the entries name, and their optimizer's by "SLOT/NAME".

    The snapshot may be of another cut, so it may hold other tensors too. Those that are returned are as the
    entries say; else WeightsError.
    """
    state: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    for name, tensor in _walk(data, {entry.name: entry for entry in entries}):
        found = optimizer if name.startswith(OPTIMIZER_PREFIX) else state
        found[name.removeprefix(OPTIMIZER_PREFIX)] = tensor
    return state, optimizer


def check_snapshot(data: Buffer, entries: Iterable[StateEntry]) -> Iterator[str]:
    """Yield the name of each tensor of a snapshot that is as the entries say and finite; else WeightsError.

    Only one of them is in memory at a time.
    """
    wanted = {entry.name: entry for entry in entries}
    for name, tensor in _walk(data, wanted):
        entry = wanted.get(name)
        if entry is None or entry.is_trainable or entry.is_written:
            _check_finite(name.removeprefix(OPTIMIZER_PREFIX), tensor)
        yield name


def _walk(data: Buffer, wanted: Mapping[str, StateEntry]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a snapshot that are wanted, and what their optimizer keeps of them."""
    for found in _open(data):
        if found.name in wanted:
            yield found.name, _copy_tensor(found, wanted[found.name])
        elif found.name.startswith(OPTIMIZER_PREFIX):
            slot, _, name = found.name.removeprefix(OPTIMIZER_PREFIX).partition("/")
            if name in wanted:
                yield found.name, _copy_slot(found, slot, wanted[name])


def read_finite_snapshot(
    data: Buffer, entries: Iterable[StateEntry]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what `read_snapshot` does, if training can go on from it; else WeightsError.

    All that training changes must be finite. What it leaves as it is need not be, such as a mask.
    """
    entries = tuple(entries)
    state, slots = read_snapshot(data, entries)
    slots = {key: tensor for key, tensor in slots.items() if key.partition("/")[2] in state}
    changing = [entry.name for entry in entries if entry.is_trainable or entry.is_written]
    for key, tensor in ({name: state[name] for name in changing if name in state} | slots).items():
        _check_finite(key, tensor)
    return state, slots


def _check_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not _is_finite(tensor):
        raise WeightsError(f"{name!r} of a snapshot is not finite, so nothing could be trained on with it")


def merge_stages(parts: Iterable[Mapping[str, Tensor]], blueprint: Blueprint) -> dict[str, Tensor]:
    """Return the model's state_dict (not the loss's) from its stages in line order.

    A tied weight is its home's.
    """
    assert blueprint.is_first, "merging needs the blueprint of the whole model"
    assert blueprint.is_last, "merging needs the blueprint of the whole model"
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            found.setdefault(name, tensor)
    check_names(found, blueprint)
    merged = {}
    for entry in blueprint.state:
        if entry.kind != CONSTANT:
            check_type(entry, type_of(found[entry.name]) if entry.name in found else None)
            merged[entry.name] = found[entry.name].detach()
    merged.update((alias, merged[name]) for alias, name in blueprint.aliases if name in merged)
    return {name: tensor for name, tensor in merged.items() if not name.startswith(LOSS_PREFIX)}


def check_names(names: Iterable[str], blueprint: Blueprint) -> None:
    """Refuse tensors that the model does not have."""
    unknown = set(names) - {entry.name for entry in blueprint.state}
    if unknown:
        raise WeightsError(f"the stages hold {min(unknown)!r}, which the model does not have; {_WAY_OUT}")


_WAY_OUT = "use weights made from the same model and the same blueprint"
_MOST_STEPS = 2.0**53


def _is_averaged(entry: StateEntry) -> bool:
    is_changing = entry.is_trainable or (entry.kind == BUFFER and entry.is_written)
    return is_changing and entry.dtype in FLOATING


def _open(data: Buffer) -> tuple[FileTensor, ...]:
    try:
        return read_tensors(data)
    except ValueError as error:
        raise WeightsError(f"a snapshot is no safetensors file: {error}; fetch it again") from None


def _copy_tensor(found: FileTensor, entry: StateEntry) -> Tensor:
    """Return a tensor of a file in memory of its own, if it is as the entry says."""
    check_stored(entry, found.type)
    return from_bytes(found.type, found.buffer)


def _copy_slot(found: FileTensor, slot: str, of: StateEntry) -> Tensor:
    """Return what an optimizer keeps of a parameter: a tensor like it, narrower or wider, or a count."""
    dtype, shape = "float32" if slot in SCALAR_SLOTS else of.dtype, slot_shape(slot, of.shape)
    if slot not in SCALAR_SLOTS and {dtype, found.dtype} == {"float32", "bfloat16"}:
        dtype = found.dtype
    tensor = _copy_tensor(found, StateEntry(found.name, PARAMETER, dtype, shape, of.positions))
    if slot in SCALAR_SLOTS and not 0 <= float(tensor) <= _MOST_STEPS:
        raise WeightsError(f"{found.name!r} is {float(tensor)}, which no count is; {_WAY_OUT}")
    return tensor


def _is_finite(tensor: Tensor) -> bool:
    # The norm is twenty times faster than a look at each number, but may overflow without an infinity.
    return isfinite(float(torch.linalg.vector_norm(tensor))) or bool(tensor.isfinite().all())


def check_type(entry: StateEntry, found: StoredType | None) -> None:
    """Refuse a tensor that is missing or not as the model says."""
    _compare(entry, StoredType(entry.dtype, entry.shape), found)


def check_stored(entry: StateEntry, found: StoredType | None) -> None:
    """Refuse a tensor that is missing or not stored as the entry says: blocks of another number, say."""
    _compare(entry, entry.stored, found)


def _compare(entry: StateEntry, wanted: StoredType, found: StoredType | None) -> None:
    if found is None:
        raise WeightsError(f"the weights lack {entry.name!r}, {wanted}; {_WAY_OUT}")
    if found != wanted:
        raise WeightsError(f"weight {entry.name!r} should be {wanted}, is {found}; {_WAY_OUT}")
