"""The one reader and writer of safetensors headers. It needs no torch and copies no tensor.

A file begins with the length of its header. The header is JSON: a dtype, a shape and a place for each name.
Nothing in a file is believed: the header is bounded, and the tensors must tile the rest of the file exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated

import msgspec
from msgspec import Meta

from ravnest.protocol.placement import PIECE_BYTES
from ravnest.protocol.tensors import ITEM_BYTES, Buffer, StoredType

_MOST_HEADER_BYTES = 8 << 20  # some 10,000 parameters with the state of their optimizer
_LENGTH_BYTES = 8
_MOST_NAME_LETTERS = 1000
_LARGE_PIECES = 64
_METADATA = "__metadata__"  # notes of the writer; they are not read
_WRITTEN = {
    name: name.upper().replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I") for name in ITEM_BYTES
}
_DTYPES = {written: name for name, written in _WRITTEN.items()}
_Size = Annotated[int, Meta(ge=0, le=2**48)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=64)]
    data_offsets: tuple[_Size, _Size]  # from the end of the header


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file. The buffer is the file's own memory."""

    name: str
    dtype: str  # as torch and numpy name it
    shape: tuple[int, ...]
    buffer: memoryview

    @property
    def type(self) -> StoredType:
        """What it is but for its values."""
        return StoredType(self.dtype, self.shape)


def read_tensors(content: Buffer) -> tuple[FileTensor, ...]:
    """Return the tensors of a file in the order of their places, or raise ValueError with what is wrong."""
    whole = memoryview(content).cast("B")
    length = int.from_bytes(whole[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if end > whole.nbytes or length > _MOST_HEADER_BYTES:
        raise ValueError(f"the header of {length} bytes does not fit into its {whole.nbytes} bytes")
    tensors = []
    for name, entry in sorted(_decode(whole[_LENGTH_BYTES:end]), key=lambda item: item[1].data_offsets):
        start, stop = (_LENGTH_BYTES + length + offset for offset in entry.data_offsets)
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ValueError(f"{name!r:.100} has dtype {entry.dtype!r:.20}, none of {', '.join(_DTYPES)}")
        if start != end or stop - start != prod(entry.shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{name!r:.100} has a place, dtype or shape that cannot be")
        tensors.append(FileTensor(name, dtype, entry.shape, whole[start:stop]))
        end = stop
    if end != whole.nbytes:
        raise ValueError(f"the tensors end at byte {end} of {whole.nbytes}, so they do not fill the file")
    return tuple(tensors)


def write_header(tensors: Mapping[str, StoredType], notes: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a file whose tensors follow in this order; `notes` are for other readers."""
    entries: dict[str, _Entry | dict[str, str]] = {} if notes is None else {_METADATA: dict(notes)}
    start = 0
    for name, kind in tensors.items():
        stop = start + kind.size_bytes
        entries[name] = _Entry(_WRITTEN[kind.dtype], kind.shape, (start, stop))
        start = stop
    header = msgspec.json.encode(entries)
    # Tensors begin at a multiple of 8; in a large file where a piece does: so the first of them make the same
    # pieces whatever follows.
    unit = PIECE_BYTES if start >= _LARGE_PIECES * PIECE_BYTES else _LENGTH_BYTES
    header += b" " * (-(_LENGTH_BYTES + len(header)) % unit)
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header


def _decode(header: memoryview) -> list[tuple[str, _Entry]]:
    try:
        # Each entry is read by itself, so that no other structure is built in memory.
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop(_METADATA, None)
        if any(len(name) > _MOST_NAME_LETTERS for name in entries):
            raise ValueError(f"the name of a tensor has more than {_MOST_NAME_LETTERS} letters")
        return [(name, msgspec.json.decode(raw, type=_Entry)) for name, raw in entries.items()]
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise ValueError(f"the header is damaged: {error!s:.200}") from None
