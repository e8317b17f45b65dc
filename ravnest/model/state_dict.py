"""A stage's named tensors as one vector, for averaging, and as a safetensors file, for keeping and sending.

The vector is ordered by home: the first position that uses a tensor. So a segment is one interval of it, and
the vectors of a cluster's stages, joined, are the vector of the model, wherever the cluster cuts. A tied
weight belongs to its home alone; stages that use it elsewhere follow. Peers average and keep; no file I/O.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Self

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor

from ravnest.errors import WeightsError
from ravnest.model.blueprint import BUFFER, CONSTANT, FLOATING, PARAMETER, Blueprint, StateEntry

LOSS_PREFIX = "job_loss."  # of state that is the loss's, not the model's
OPTIMIZER_PREFIX = "optimizer/"  # in a snapshot, before "SLOT/NAME"


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """Where a tensor lies in the vector: `size` items from `offset`. `position` is its home."""

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

    In it are trained parameters and the floating-point buffers that training writes; all as float32, which
    is exact for every smaller type and rounds float64.
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


def to_safetensors(state: Mapping[str, Tensor], blueprint: Blueprint) -> bytes:
    """Return the tensors that the blueprint names as a safetensors file; others are left out."""
    tensors = {}
    for entry in blueprint.state:
        _check(entry, state)
        tensor = state[entry.name].detach().cpu()
        # The file format refuses tensors that share memory; only buffers and constants may.
        is_alone = entry.kind == PARAMETER and tensor.is_contiguous()
        tensors[entry.name] = tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)
    return save(tensors)


def to_snapshot(state: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> bytes:
    """Return a stage's tensors and its optimizer's, by "SLOT/NAME", as a safetensors file."""
    return b"".join(snapshot_pieces(state, optimizer))


def snapshot_pieces(
    state: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
) -> Iterator[bytes | memoryview]:
    """Yield that file piece by piece, so that nobody needs memory for another copy of a stage.

    Of tensors that training changes meanwhile, a piece may be before an update and the next one after it.
    """
    moments = {OPTIMIZER_PREFIX + key: tensor for key, tensor in optimizer.items()}
    tensors = {**state, **moments}
    names = {dtype: name for name, dtype in _DTYPES.items()}
    places, start = {}, 0
    for name, tensor in tensors.items():
        stop = start + tensor.numel() * tensor.element_size()
        dtype = names[str(tensor.dtype).removeprefix("torch.")]
        places[name] = _Place(dtype, list(tensor.shape), (start, stop))
        start = stop
    header = msgspec.json.encode(places)
    header += b" " * (-len(header) % _LENGTH_BYTES)
    yield len(header).to_bytes(_LENGTH_BYTES, "little") + header
    for tensor in tensors.values():
        if tensor.numel():
            flat = tensor.detach().reshape(-1).cpu().contiguous()
            yield memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_snapshot(
    data: bytes | bytearray | memoryview, entries: Iterable[StateEntry]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what a snapshot has of these tensors, and of their optimizer's state by "SLOT/NAME".

    It may be of another cut: what else is in it is not read. What is read must be as the entries say.
    """
    wanted = {entry.name: entry for entry in entries}
    state: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    header, content = _open(data)
    for key, raw in header.items():
        if key in wanted:
            state[key] = _read_one(raw, content, wanted[key])
        elif key.startswith(OPTIMIZER_PREFIX):
            slot, _, name = key.removeprefix(OPTIMIZER_PREFIX).partition("/")
            if name in wanted:
                dtype, shape = (
                    ("float32", ()) if slot in _SCALARS else (wanted[name].dtype, wanted[name].shape)
                )
                entry = StateEntry(key, PARAMETER, dtype, shape, wanted[name].positions)
                optimizer[f"{slot}/{name}"] = tensor = _read_one(raw, content, entry)
                if slot in _SCALARS and not 0 <= float(tensor) <= _MOST_STEPS:
                    raise WeightsError(f"{key!r} is {float(tensor)}, which no count is; {_WAY_OUT}")
    return state, optimizer


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
    unknown = found.keys() - {entry.name for entry in blueprint.state}
    if unknown:
        raise WeightsError(f"the stages hold {min(unknown)!r}, which the model does not have; {_WAY_OUT}")
    merged = {}
    for entry in blueprint.state:
        if entry.kind != CONSTANT:
            _check(entry, found)
            merged[entry.name] = found[entry.name].detach()
    merged.update((alias, merged[name]) for alias, name in blueprint.aliases if name in merged)
    return {name: tensor for name, tensor in merged.items() if not name.startswith(LOSS_PREFIX)}


_WAY_OUT = "use weights made from the same model and the same blueprint"
_DTYPES = {
    "F32": "float32",
    "F64": "float64",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_SCALARS = ("step", "mu_product")
_MOST_STEPS = 2.0**53
_SNAPSHOT_HEADER_BYTES = 8 << 20  # of some 10,000 parameters with their optimizer's state
_LENGTH_BYTES = 8  # a file begins with the length of its header


def _is_averaged(entry: StateEntry) -> bool:
    is_changing = entry.is_trainable or (entry.kind == BUFFER and entry.is_written)
    return is_changing and entry.dtype in FLOATING


class _Place(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _open(data: bytes | bytearray | memoryview) -> tuple[dict[str, msgspec.Raw], memoryview]:
    """Return the header of a snapshot, each entry unread, and what is behind it."""
    whole = memoryview(data)
    length = int.from_bytes(whole[:_LENGTH_BYTES], "little")
    stop = _LENGTH_BYTES + length
    if length > _SNAPSHOT_HEADER_BYTES or whole.nbytes < max(stop, _LENGTH_BYTES):
        raise WeightsError(f"a snapshot of {whole.nbytes} bytes is no safetensors file; {_WAY_OUT}")
    try:
        header = msgspec.json.decode(whole[_LENGTH_BYTES:stop], type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        raise WeightsError(f"a snapshot is damaged: {problem!s:.200}; fetch it again") from None
    return header, whole[stop:]


def _read_one(raw: msgspec.Raw, content: memoryview, entry: StateEntry) -> Tensor:
    try:
        place = msgspec.json.decode(raw, type=_Place)
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        raise WeightsError(f"{entry.name!r} of a snapshot is damaged: {problem!s:.200}") from None
    found = _describe(_DTYPES.get(place.dtype, place.dtype[:20]), place.shape)
    if found != _describe(entry.dtype, entry.shape):
        raise WeightsError(_mismatch(entry, found))
    dtype = getattr(torch, entry.dtype)
    start, stop = place.data_offsets
    if not 0 <= start <= stop <= content.nbytes or stop - start != prod(entry.shape) * dtype.itemsize:
        raise WeightsError(f"{entry.name!r} of a snapshot lies at bytes {start} to {stop}; fetch it again")
    if start == stop:
        return torch.empty(entry.shape, dtype=dtype)
    data = bytearray(content[start:stop])
    if dtype is torch.bool:  # torch's kernels trust that there are only two
        return torch.frombuffer(data, dtype=torch.uint8).ne(0).reshape(entry.shape)
    return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)


def _check(entry: StateEntry, state: Mapping[str, Tensor]) -> None:
    tensor = state.get(entry.name)
    if tensor is None:
        wanted = _describe(entry.dtype, entry.shape)
        raise WeightsError(f"the weights lack {entry.name!r}, {wanted}; {_WAY_OUT}")
    found = _describe(str(tensor.dtype).removeprefix("torch."), tensor.shape)
    if found != _describe(entry.dtype, entry.shape):
        raise WeightsError(_mismatch(entry, found))


def _mismatch(entry: StateEntry, found: str) -> str:
    return f"weight {entry.name!r} should be {_describe(entry.dtype, entry.shape)}, is {found}; {_WAY_OUT}"


def _describe(dtype: str, shape: Iterable[int]) -> str:
    return f"{dtype} [{', '.join(str(size) for size in shape)}]"
