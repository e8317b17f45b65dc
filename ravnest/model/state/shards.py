"""Safetensors files on disk, whole or as shards with an index, as Hugging Face writes them.

Files are read by name from mapped memory, and written one tensor after the other, so that no model needs to
be in memory. Nothing in a file is believed: sizes are bounded, and a sentence says what is wrong.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from ravnest.disk import map_file, read_bytes
from ravnest.errors import WeightsError
from ravnest.foreign import decode_json
from ravnest.model.state.safetensors_header import FileTensor, read_tensors, write_header
from ravnest.protocol.tensors import ITEM_BYTES, Buffer, StoredType

SHARD_BYTES = 2_000_000_000  # a file has no more tensors than fit into this, but always one
_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".index.json"
_MOST_INDEX_BYTES = 64 << 20
_SHARD_NAME = re.compile(r"[\w.()+@,-]{1,200}\.safetensors")
_MOST_SHARDS = 10_000
_FORMS = (
    f"a {_SUFFIX} file, a folder with model{_SUFFIX}, or with model{_SUFFIX}{_INDEX_SUFFIX} and its shards"
)


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    metadata: Any = None


def index_of(file: Path) -> Path:
    """Return where the index of a file's shards is, if it has shards."""
    return file.with_name(file.name + _INDEX_SUFFIX)


def has_weights(file: Path) -> bool:
    """Return whether weights of this name are there, as one file or as shards."""
    return file.exists() or index_of(file).exists()


def find_written(file: Path) -> Path:
    """Return what stands for weights of this name on disk: the file, or the index of its shards."""
    return index_of(file) if index_of(file).exists() and not file.exists() else file


def is_index(place: Path) -> bool:
    """Return whether this is an index of shards, by its name."""
    return place.name.endswith(_SUFFIX + _INDEX_SUFFIX)


def find_files(place: Path) -> list[Path]:
    """Return the safetensors files that a file, an index or a folder stands for; or raise WeightsError."""
    place = _find_in_folder(place) if place.is_dir() else place
    if is_index(place):
        return [place.with_name(shard) for shard in sorted(set(read_index(place).values()))]
    if place.suffix != _SUFFIX:
        raise WeightsError(f"{place} is no safetensors file by its name; give {_FORMS}")
    return [place]


def open_weights(place: Path) -> tuple[FileTensor, ...]:
    """Return the tensors of a file, an index or a folder, mapped; or raise WeightsError."""
    place = _find_in_folder(place) if place.is_dir() else place
    return _open_shards(place) if is_index(place) else _open_file(find_files(place)[0])


def _find_in_folder(folder: Path) -> Path:
    file = folder / f"model{_SUFFIX}"
    found = [each for each in (file, index_of(file)) if each.exists()]
    found = found or [each for each in sorted(folder.glob(f"*{_SUFFIX}")) if each.is_file()]
    if not found or (len(found) > 1 and file not in found):
        raise WeightsError(f"{folder} holds no weights that can be read; give {_FORMS}")
    return found[0]


def read_index(index: Path) -> dict[str, str]:
    """Return which file beside an index holds each tensor, or raise WeightsError."""
    try:
        content = read_bytes(index, _MOST_INDEX_BYTES)
    except OSError as error:
        raise WeightsError(f"{index} cannot be read: {error.strerror or error}; give {_FORMS}") from None
    found = decode_json(content, _Index, str(index), _MOST_INDEX_BYTES, WeightsError).weight_map
    files = set(found.values())
    foreign = next((name for name in files if not _SHARD_NAME.fullmatch(name)), None)
    if foreign is not None or not 0 < len(files) <= _MOST_SHARDS:
        named = f"{foreign[:60]!r}, which is no name of a shard" if foreign else f"{len(files)} shards"
        raise WeightsError(f"{index} names {named}; fetch it again")
    return found


def write_index(files: Mapping[str, str], size_bytes: int) -> bytes:
    """Return an index that says which file beside it holds each tensor."""
    content = {"metadata": {"total_size": size_bytes}, "weight_map": files}
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def _open_shards(index: Path) -> tuple[FileTensor, ...]:
    names = read_index(index)
    found = []
    for shard in sorted(set(names.values())):
        for tensor in _open_file(index.with_name(shard)):
            if names.get(tensor.name) == shard:
                found.append(tensor)
    missing = names.keys() - {tensor.name for tensor in found}
    if missing:
        name = min(missing)
        problem = f"{index.with_name(names[name])} lacks {name!r}, which {index.name} says is in it"
        raise WeightsError(f"{problem}; fetch the shards again")
    return tuple(found)


def _open_file(file: Path) -> tuple[FileTensor, ...]:
    try:
        return read_tensors(map_file(file))
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error.strerror or error}; give {_FORMS}") from None
    except ValueError as error:
        raise WeightsError(f"{file} is no sound safetensors file: {error}; fetch it again") from None


class ShardWriter:
    """Writes tensors to FILE.safetensors, or to shards beside it with an index if they are too many bytes.

    Tensors may come in any order. They get their names when `finish` has all of them on disk; what was there
    under the same name is replaced then. May raise OSError.
    """

    def __init__(self, file: Path, types: Mapping[str, StoredType], most_bytes: int = SHARD_BYTES) -> None:
        self._file, self._index = file, index_of(file)
        groups = group_by_size(types, most_bytes)
        self._names = [file.name] if len(groups) == 1 else name_shards(file.stem, len(groups))
        self._places: dict[str, tuple[int, int, int]] = {}  # by tensor: its shard, and its bytes there
        self._shard_of = {name: self._names[n] for n, group in enumerate(groups) for name in group}
        self.size_bytes = sum(kind.size_bytes for kind in types.values())
        self._headers, self._sizes = [], []
        for number, group in enumerate(groups):
            header = write_header(group, {"format": "pt"})
            start = len(header)
            for name, kind in group.items():
                self._places[name] = number, start, start + kind.size_bytes
                start += kind.size_bytes
            self._headers.append(header)
            self._sizes.append(start)
        self._opened: dict[int, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in self._opened.values():
            opened.close()
        for number in range(len(self._names)):
            with contextlib.suppress(OSError):
                self._unfinished(number).unlink()

    def write(self, name: str, pieces: Iterable[Buffer]) -> None:
        """Write one tensor."""
        number, start, stop = self._places.pop(name)
        opened = self._open(number)
        opened.seek(start)
        for piece in pieces:
            opened.write(piece)
        assert opened.tell() == stop, f"{name} has {opened.tell() - start} bytes, not {stop - start}"

    def finish(self) -> Path:
        """Give the files their names; return the file, or the index of its shards."""
        assert not self._places, f"{min(self._places)} was not written"
        before = self._find_before()
        for number in range(len(self._names)):
            opened = self._open(number)
            opened.flush()
            os.fsync(opened.fileno())
            opened.close()
        is_sharded = len(self._names) > 1
        if self._index.exists():
            self._index.unlink()  # of other shards
        for number, name in enumerate(self._names):
            self._unfinished(number).replace(self._file.with_name(name))
        if is_sharded:
            self._write_index()
        for old in before - {self._file.with_name(name) for name in self._names}:
            old.unlink(missing_ok=True)
        return self._index if is_sharded else self._file

    def _open(self, number: int) -> Any:
        if number not in self._opened:
            opened = self._unfinished(number).open("wb")
            self._opened[number] = opened
            opened.truncate(self._sizes[number])
            opened.write(self._headers[number])
        return self._opened[number]

    def _unfinished(self, number: int) -> Path:
        return self._file.with_name(f".{self._names[number]}.{os.getpid()}.unfinished")

    def _write_index(self) -> None:
        unfinished = self._index.with_name(f".{self._index.name}.{os.getpid()}.unfinished")
        with unfinished.open("wb") as opened:
            opened.write(write_index(self._shard_of, self.size_bytes))
            opened.flush()
            os.fsync(opened.fileno())
        unfinished.replace(self._index)

    def _find_before(self) -> set[Path]:
        """Return the files of the same name that are replaced."""
        found = {self._file}
        with contextlib.suppress(WeightsError):
            shards = re.compile(rf"{re.escape(self._file.stem)}-\d+-of-\d+{re.escape(_SUFFIX)}")
            named = set(read_index(self._index).values())
            found |= {self._file.with_name(name) for name in named if shards.fullmatch(name)}
        return found


def group_by_size(types: Mapping[str, StoredType], most_bytes: int) -> list[dict[str, StoredType]]:
    """Return the tensors of each shard, in the order of the model, those of wide types first in each."""
    groups: list[dict[str, StoredType]] = [{}]
    num_bytes = 0
    for name, kind in types.items():
        if groups[-1] and num_bytes + kind.size_bytes > most_bytes:
            groups.append({})
            num_bytes = 0
        groups[-1][name] = kind
        num_bytes += kind.size_bytes
    # Other readers want each tensor at a multiple of its item's size.
    by_width = [sorted(group, key=lambda name: -ITEM_BYTES[group[name].dtype]) for group in groups]
    return [{name: group[name] for name in names} for group, names in zip(groups, by_width, strict=True)]


def name_shards(stem: str, num_shards: int) -> list[str]:
    """Return the names of so many files, as Hugging Face gives them."""
    return [f"{stem}-{n + 1:05d}-of-{num_shards:05d}{_SUFFIX}" for n in range(num_shards)]
