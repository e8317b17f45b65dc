"""Where the tensors of a model come from, by name, without having all of them in memory.

A state source knows names, dtypes and shapes, and reads one tensor or a part of its bytes. Kinds: tensors in
memory, mapped safetensors files (`shards`), an initialiser (`initialiser`), a mirror
(`transfer.mirror`), and several of them as layers. What an optimizer keeps is there as "optimizer/SLOT/NAME".
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from torch import Tensor

from ravnest.disk import release_pages
from ravnest.model.state.safetensors_header import FileTensor, write_header
from ravnest.model.state.state_dict import OPTIMIZER_PREFIX, from_bytes, to_bytes, type_of
from ravnest.protocol.tensors import Buffer, StoredType

_PIECE_BYTES = 16 << 20  # of a tensor are in memory at once when it is passed on


class StateSource(Protocol):
    """Tensors by name. Reading may fail with WeightsError, and may be called from several threads."""

    @property
    def types(self) -> Mapping[str, StoredType]:
        """What it has."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes of a tensor, or a range of them; they may be those of a mapped file."""


class MemorySource:
    """Tensors in memory; those without values (empty_weights) are left out."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
        self.types: Mapping[str, StoredType] = {name: type_of(x) for name, x in self._tensors.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes of a tensor, or a range of them."""
        flat, width = self._tensors[name].detach().reshape(-1), self._tensors[name].itemsize
        stop = flat.numel() * width if stop is None else stop
        first = start // width
        part = flat[first : -(-stop // width)]  # of a GPU's tensor only this is copied
        return to_bytes(part)[start - first * width : stop - first * width]


class FileSource:
    """Tensors of files that are mapped; of those with one name the first counts."""

    def __init__(self, tensors: Iterable[FileTensor]) -> None:
        self._tensors: dict[str, FileTensor] = {}
        for tensor in tensors:
            self._tensors.setdefault(tensor.name, tensor)
        self.types: Mapping[str, StoredType] = {name: x.type for name, x in self._tensors.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes of a tensor, or a range of them."""
        return self._tensors[name].buffer[start:stop]


class LayeredSource:
    """Several sources as one; each tensor is that of the first source that has it."""

    def __init__(self, *sources: StateSource) -> None:
        self._owners: dict[str, StateSource] = {}
        for source in sources:
            for name in source.types:
                self._owners.setdefault(name, source)
        self.types: Mapping[str, StoredType] = {name: x.types[name] for name, x in self._owners.items()}

    def is_of(self, name: str, source: StateSource) -> bool:
        """Return whether a tensor is read from this one of the sources."""
        return self._owners.get(name) is source

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes of a tensor, or a range of them."""
        return self._owners[name].read(name, start, stop)


class SourceTensors(Mapping[str, Tensor]):
    """The tensors of a source, without the optimizer's; each is read anew whenever it is asked for."""

    def __init__(self, source: StateSource) -> None:
        self.source = source
        self._names = [name for name in source.types if not name.startswith(OPTIMIZER_PREFIX)]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.source.types:
            raise KeyError(name)
        return read_tensor(self.source, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self.source.types


def read_tensor(source: StateSource, name: str) -> Tensor:
    """Return one tensor, in memory of its own."""
    content = source.read(name)
    tensor = from_bytes(source.types[name], content)
    release_pages(content)
    return tensor


def read_pieces(source: StateSource, name: str) -> Iterator[Buffer]:
    """Yield the bytes of one tensor piece by piece."""
    for start in range(0, source.types[name].size_bytes, _PIECE_BYTES):
        content = source.read(name, start, start + _PIECE_BYTES)
        yield content
        release_pages(content)


def is_same(source: StateSource, tensor: FileTensor) -> bool:
    """Return whether a source has the same tensor, to the bit."""
    if source.types.get(tensor.name) != tensor.type:
        return False
    start = 0
    for piece in read_pieces(source, tensor.name):
        if tensor.buffer[start : start + len(piece)] != piece:
            return False
        start += len(piece)
    release_pages(tensor.buffer)
    return True


def write_pieces(source: StateSource, names: Iterable[str]) -> Iterator[Buffer]:
    """Yield a safetensors file with these tensors of a source, piece by piece."""
    chosen = {name: source.types[name] for name in names}
    yield write_header(chosen)
    for name in chosen:
        yield from read_pieces(source, name)


def state_type(state: Mapping[str, Tensor], name: str) -> StoredType | None:
    """Return what a tensor of a state is but for its values; a source is not read for it."""
    if isinstance(state, SourceTensors):
        return state.source.types.get(name)
    return type_of(state[name]) if name in state else None
