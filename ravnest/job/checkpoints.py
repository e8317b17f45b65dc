"""Checkpoints of a run: a folder each, with one safetensors file per stage and a manifest for all of them.

A checkpoint is whole or not there: it is written under a hidden name and gets its own by one rename. Reading
trusts nothing: sizes, hashes, headers and books are checked, and a damaged one gives way to the one before.
They are ordered by number, never by a clock. Driven by the requester's side; no torch in here.
"""

import contextlib
import errno
import logging
import math
import mmap
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from ravnest.errors import RavnestError
from ravnest.exchange import name_blob
from ravnest.job.manifest import MANIFEST, Books, Count, Manifest, PartEntry, parse_manifest, seal_manifest
from ravnest.protocol import ITEM_BYTES
from ravnest.units import show_bytes

CHECKPOINTS = "checkpoints"
_NUMBER = re.compile(r"[0-9]{6}|[1-9][0-9]{6,17}")
_HIDDEN = re.compile(rf"\.({_NUMBER.pattern})\.unfinished")
_OURS = re.compile(rf"part-[0-9]+\.safetensors|{re.escape(MANIFEST)}")
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
_MOST_JSON_BYTES = 64_000_000  # of such a header, and of a manifest
_DTYPES = {
    name.upper().replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I"): name for name in ITEM_BYTES
}
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_log = logging.getLogger(__name__)

Part = tuple[int, int, bytes | memoryview]  # a stage's interval [start, stop), its state as safetensors


class CheckpointError(RavnestError):
    """A checkpoint cannot be written, or none can be looked for. The hub shows it and trains on."""

    exit_code = 3


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint; the buffer is the file itself, mapped into memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: memoryview


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint that was found sound. It stays readable when its files are removed."""

    number: int
    books: Books
    score: float | None
    parts: tuple[tuple[SavedTensor, ...], ...] = field(repr=False)

    def read(self) -> Iterator[SavedTensor]:
        """Yield each tensor once: a tied weight is its home's, optimizer state "optimizer/SLOT/NAME"."""
        seen: set[str] = set()
        for tensor in (tensor for part in self.parts for tensor in part):
            if tensor.name not in seen:
                seen.add(tensor.name)
                yield tensor


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**48)], ...], Meta(max_length=64)]
    data_offsets: tuple[Count, Count]


class Checkpoints:
    """The checkpoints in a run's folder: the newest `keep`, and the one with the lowest score."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        assert keep >= 1, keep
        self._place = folder / CHECKPOINTS
        self._keep = keep
        self.faults: list[str] = []  # what the last `find` passed over, and why

    @property
    def next_number(self) -> int:
        """A number above all that are here, damaged ones included."""
        return max(self._numbers(), default=-1) + 1

    def write(self, number: int, parts: Sequence[Part], books: Books, score: float | None = None) -> Path:
        """Write a checkpoint, then remove those no longer kept; if it fails, all is as it was before."""
        refused = f"checkpoint {number:06d} was not written"
        if number < self.next_number:
            raise CheckpointError(f"{refused}: {self.next_number - 1:06d} is there, and numbers only grow")
        contents = [memoryview(content).cast("B") for _, _, content in parts]
        entries = []
        try:
            for (start, stop, _), content in zip(parts, contents, strict=True):
                _read_part(content, f"the state of stage [{start}, {stop})")
                entries.append(PartEntry(start, stop, name_blob(content)))
            sealed = seal_manifest(number, Manifest(books, score, tuple(entries)))
        except ValueError as error:
            raise CheckpointError(f"{refused}: {error}") from None
        place = self._place / f".{number:06d}.unfinished"
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            _sync(self._place.parent)
            for name in filter(_HIDDEN.fullmatch, os.listdir(self._place)):
                _remove_quietly(self._place / name)
            place.mkdir()
            for index, content in enumerate(contents):
                _write_file(place / _part_name(index), content)
            _write_file(place / MANIFEST, sealed)
            _sync(place)
            place = place.replace(self._place / f"{number:06d}")
            _sync(self._place)
        except OSError as error:
            with contextlib.suppress(OSError):
                _remove(place)
            needed = len(sealed) + sum(map(len, contents))
            reason = _explain(error, self._place, needed)
            raise CheckpointError(f"{refused}: {reason}; older checkpoints are as they were") from error
        self._prune()
        return place

    def find(self) -> Checkpoint | None:
        """Return the newest checkpoint that is sound; `faults` says what was wrong with newer ones."""
        found, problems = None, []
        for number in reversed(self._numbers()):
            try:
                found = _open(self._place / f"{number:06d}", number)
                break
            except OSError as error:
                problems.append(f"checkpoint {number:06d} cannot be read: {error.strerror or error}")
            except ValueError as error:
                problems.append(f"checkpoint {number:06d} is damaged: {error}")
        ending = f"using {found.number:06d}" if found else "there is no sound one before it"
        self.faults = [f"{problem}; {ending}" for problem in problems]
        return found

    def _numbers(self) -> list[int]:
        try:
            return sorted(int(name) for name in os.listdir(self._place) if _NUMBER.fullmatch(name))
        except FileNotFoundError:
            return []
        except OSError as error:
            problem = f"{self._place} cannot be read: {error.strerror or error}"
            raise CheckpointError(f"{problem}; make it a folder that is yours, or move it away") from error

    def _prune(self) -> None:
        made: dict[int, Path] = {}
        whole: dict[int, float | None] = {}
        for number in self._numbers():
            folder = self._place / f"{number:06d}"
            with contextlib.suppress(ValueError, OSError):
                manifest = _read_manifest(folder, number)
                made[number] = folder  # by us, for its manifest is sealed
                _check_files(folder, manifest)
                whole[number] = manifest.score
        scores = [(score, -number) for number, score in whole.items() if score is not None]
        kept = {*sorted(whole)[-self._keep :], *(-number for _, number in sorted(scores)[:1])}
        for number in made.keys() - kept:
            _remove_quietly(made[number])


@contextlib.contextmanager
def open_checkpoints(place: Path | None) -> Iterator[Checkpoints]:
    """Give the checkpoints of a run; where it has no folder, in one that goes with it."""
    if place is not None and not place.suffix:
        yield Checkpoints(place)
        return
    with tempfile.TemporaryDirectory(prefix="ravnest-", ignore_cleanup_errors=True) as folder:
        yield Checkpoints(Path(folder))


def _part_name(index: int) -> str:
    return f"part-{index}.safetensors"


def _open(folder: Path, number: int) -> Checkpoint:
    manifest = _read_manifest(folder, number)
    _check_files(folder, manifest)
    parts = []
    for index, entry in enumerate(manifest.parts):
        content = _map(folder / _part_name(index))  # hashed and later read by the same mapping
        if name_blob(content) != entry.content:
            raise ValueError(f"{_part_name(index)} has another hash than its manifest says")
        parts.append(_read_part(content, _part_name(index)))
    return Checkpoint(number, manifest.books, manifest.score, tuple(parts))


def _read_manifest(folder: Path, number: int) -> Manifest:
    file = folder / MANIFEST
    if folder.is_dir() and not file.is_file():
        raise ValueError(f"{MANIFEST} is missing")
    if file.stat().st_size > _MOST_JSON_BYTES:
        raise ValueError(f"{MANIFEST} has more than {show_bytes(_MOST_JSON_BYTES)}")
    return parse_manifest(file.read_bytes(), number)


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Compare names and sizes, which is quick; hashes are for who reads."""
    with os.scandir(folder) as listing:
        found = {entry.name: entry for entry in listing if entry.name != MANIFEST}
    for index, entry in enumerate(manifest.parts):
        file = found.pop(_part_name(index), None)
        if file is None or not file.is_file(follow_symlinks=False):
            raise ValueError(f"{_part_name(index)} is {'no plain file' if file else 'missing'}")
        excess = file.stat(follow_symlinks=False).st_size - entry.content.size_bytes
        if excess:
            amount = f"{abs(excess)} bytes {'more' if excess > 0 else 'fewer'}"
            raise ValueError(f"{_part_name(index)} has {amount} than its manifest says")
    if found:
        raise ValueError(f"it holds {min(found)!r}, which its manifest does not name")


def _read_part(content: memoryview, what: str) -> tuple[SavedTensor, ...]:
    """Return the tensors of a safetensors file as views; the library's own reader would copy them."""
    try:
        start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        if start > min(len(content), _LENGTH_BYTES + _MOST_JSON_BYTES):
            raise ValueError("its header does not fit")
        header = msgspec.json.decode(bytes(content[_LENGTH_BYTES:start]), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = [(name, msgspec.json.decode(raw, type=_Header)) for name, raw in header.items()]
        tensors, end = [], start
        for name, entry in sorted(entries, key=lambda item: item[1].data_offsets):
            begin, stop = (start + offset for offset in entry.data_offsets)
            dtype = _DTYPES.get(entry.dtype)
            if dtype is None or begin != end or stop - begin != math.prod(entry.shape) * ITEM_BYTES[dtype]:
                raise ValueError(f"{name!r:.100} has a place, dtype or shape that cannot be")
            tensors.append(SavedTensor(name, dtype, entry.shape, content[begin:stop]))
            end = stop
        if end != len(content):
            raise ValueError("its tensors do not fill it")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no safetensors file: {error!s:.200}") from None
    return tuple(tensors)


def _map(file: Path) -> memoryview:
    with open(file, "rb") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))


def _write_file(file: Path, content: bytes | memoryview) -> None:
    with open(file, "xb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _sync(folder: Path) -> None:
    """Have a folder's names outlive a power cut; elsewhere than on POSIX folders cannot be opened."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of file systems that cannot do this to folders
            raise
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Take a folder away, unless it holds what is not ours; a crash in between leaves only a leftover."""
    if folder.is_symlink() or not all(map(_OURS.fullmatch, os.listdir(folder))):
        return
    if not _HIDDEN.fullmatch(folder.name):
        folder = folder.replace(folder.with_name(f".{folder.name}.unfinished"))
    for name in os.listdir(folder):
        os.unlink(folder / name)
    os.rmdir(folder)


def _remove_quietly(folder: Path) -> None:
    try:
        _remove(folder)
    except OSError as error:
        _log.warning("%s, no longer needed, cannot be removed: %s", folder, error.strerror or error)


def _explain(error: OSError, place: Path, size_bytes: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {place} is full; make room for {show_bytes(size_bytes)}"
    if error.errno in _CLOSED:
        return f"{place} cannot be written ({error.strerror}); let whoever runs the hub write there"
    return f"{place}: {error.strerror or error}"
