"""Checkpoints on disk: a manifest with hashes and the ledger, and safetensors files, one or more per stage.

A manifest is used only if its hash fits and its ledger balances: every sample is counted, or waits to be
leased again. A checkpoint gets its name when all of it is on disk, so a crash leaves no half of one.
"""

import contextlib
import errno
import hmac
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from blake3 import blake3
from msgspec import Meta

from ravnest.disk import map_file, read_bytes, release_pages
from ravnest.errors import RavnestError
from ravnest.foreign import decode_json
from ravnest.hub.coordinator.leases import LeaseState
from ravnest.model.blueprint.program import StateEntry
from ravnest.model.state.safetensors_header import FileTensor, read_tensors, write_header
from ravnest.model.state.shards import SHARD_BYTES, group_by_size, name_shards, write_index
from ravnest.protocol.placement import BlobRef
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.blobs import name_blob, name_pieces
from ravnest.units import show_bytes

MANIFEST = "manifest.json"
# Another number for whatever makes older checkpoints unreadable or gives them another meaning; 2: BLAKE3;
# 3: leases are intervals; 4: hashes of pieces.
MANIFEST_FORMAT = 4
WholeNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which job a checkpoint is of; `state` is what `hash_state` says of its tensors.

    `frozen` tells the weights that no checkpoint holds; empty: it holds all. The samples of a stream are
    shuffled within a `window`, and their number may be another when training goes on.
    """

    model: str
    state: str
    num_samples: WholeNumber
    batch_size: WholeNumber
    epochs: WholeNumber
    seed: WholeNumber
    frozen: str = ""
    window: WholeNumber = 0


class SavedLedger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a training needs beside its weights; no lease is open. `written_at` is in seconds since 1970."""

    number: WholeNumber
    job: Fingerprint
    num_counted: WholeNumber
    num_reported: WholeNumber
    num_updates: WholeNumber
    num_evaluated: WholeNumber
    leases: LeaseState
    history: list[dict[str, float | int | None]]
    written_at: float


class PartEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The state of the stage [start, stop) by the hash of its file; of a large one there are more shards."""

    start: WholeNumber
    stop: WholeNumber
    content: BlobRef
    more: tuple[BlobRef, ...] = ()

    @property
    def shards(self) -> tuple[BlobRef, ...]:
        """All files of the part."""
        return (self.content, *self.more)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint but for the tensors; the score is the validation loss of this state, if known."""

    books: SavedLedger
    score: float | None
    parts: tuple[PartEntry, ...]


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    format: int
    number: int
    hash: str  # of the manifest's very bytes, so that a changed digit shows
    manifest: msgspec.Raw
    signature: str = ""  # by the key of the run, if it has one: of the same bytes


def hash_state(entries: Iterable[StateEntry]) -> str:
    """Return the hash of names, dtypes and shapes, in whatever order they come."""
    plain = sorted((entry.name, entry.dtype, entry.shape) for entry in entries)
    return name_blob(msgspec.json.encode(plain)).blob


def find_difference(saved: Fingerprint, now: Fingerprint) -> str | None:
    """Return why a checkpoint does not fit a job, with what to do; None if it does."""
    otherwise = "or begin a new run in another folder"
    if saved.model != now.model:
        difference = f"the checkpoint is of model {saved.model!r}, this job's is {now.model!r}"
        return f"{difference}; give the job that wrote it, {otherwise}"
    if saved.state != now.state:
        difference = f"the tensors of {now.model!r} have other names, dtypes or shapes than the checkpoint's"
        return f"{difference}; build the model as it was, {otherwise}"
    if saved.frozen and saved.frozen != now.frozen:
        difference = "the frozen weights are not those that the checkpoint was trained with"
        return f"{difference}; give the weights= it was begun with, {otherwise}"
    for name in ("window", "num_samples", "batch_size", "seed"):
        before, after = getattr(saved, name), getattr(now, name)
        is_free = name == "num_samples" and now.window  # the windows are the same, however many there are
        if before != after and not is_free:
            fix = f"give {before} training samples" if name == "num_samples" else f"set {name}={before}"
            fix = fix.replace("window=", "shuffle_window=")
            return f"the checkpoint was written with {name}={before}, not {after}; {fix}, {otherwise}"
    return None


def count_epochs(leases: LeaseState) -> int:
    """Return how many epochs were begun."""
    return leases["next_epoch"] + (leases["next_place"] > 0)


def seal_manifest(number: int, manifest: Manifest, key: bytes = b"") -> bytes:
    """Return the content of a manifest's file, after making sure that it can be read again."""
    body = msgspec.json.encode(manifest)  # numbers that are not finite become null: a score, a loss
    signed = _Sealed(MANIFEST_FORMAT, number, name_blob(body).blob, msgspec.Raw(body), _sign(body, key))
    content = msgspec.json.encode(signed)
    parse_manifest(content, number, key)
    return content


def _sign(body: bytes, key: bytes) -> str:
    return blake3(body, key=key).hexdigest() if key else ""


def parse_manifest(content: bytes, number: int, key: bytes = b"") -> Manifest:
    """Return what a manifest's file says, or raise ValueError with what is wrong.

    With a key, only what was signed with it is read: it names all files by their hashes.
    """
    sealed = decode_json(content, _Sealed, MANIFEST, MOST_MANIFEST_BYTES, ValueError)
    if sealed.format != MANIFEST_FORMAT:
        other = "an older" if sealed.format < MANIFEST_FORMAT else "a newer"
        formats = f"it says format {sealed.format}, this one reads format {MANIFEST_FORMAT}"
        raise ValueError(f"{MANIFEST} cannot be used: it is of {other} ravnest: {formats}")
    if name_blob(bytes(sealed.manifest)).blob != sealed.hash:
        raise ValueError(f"{MANIFEST} cannot be used: it is not as it was written")
    if key and not hmac.compare_digest(
        sealed.signature.encode(), _sign(bytes(sealed.manifest), key).encode()
    ):
        fix = "to begin with its weights all the same, give the Job weights= its folder"
        raise ValueError(f"{MANIFEST} was not signed with the key of this run's hub.json; {fix}")
    manifest = decode_json(sealed.manifest, Manifest, MANIFEST, MOST_MANIFEST_BYTES, ValueError)
    if not number == sealed.number == manifest.books.number:
        raise ValueError(f"{MANIFEST} is that of checkpoint {manifest.books.number:06d}")
    borders = [(0, 0), *((entry.start, entry.stop) for entry in manifest.parts)]
    if len(borders) < 2 or any(one[1] != two[0] or two[0] >= two[1] for one, two in pairwise(borders)):
        raise ValueError("its parts are not the stages of a line, in order")
    _check_books(manifest.books)
    return manifest


def _check_books(books: SavedLedger) -> None:
    """Raise ValueError unless every leased sample is counted, or waits to be leased again, exactly once."""
    leases, job = books.leases, books.job
    size, waiting = leases["num_samples"], leases["requeued"]
    if (size, leases["num_epochs"], leases["seed"]) != (job.num_samples, job.epochs, job.seed):
        raise ValueError("its leases are of another job")
    epoch, place = leases["next_epoch"], leases["next_place"]
    is_inside = 0 <= epoch < job.epochs and 0 <= place < size
    is_valid = size >= 1 and 0 <= leases["next_number"] < 2**63
    if not is_valid or not (is_inside or (epoch, place) == (job.epochs, 0)):
        raise ValueError("its leases hold a number out of range")
    is_handed_out = all(
        0 <= one <= epoch and 0 <= start < stop <= (place if one == epoch else size)
        for one, start, stop in waiting
    )
    is_disjoint = all((one[0], one[2]) < (two[0], two[1]) for one, two in pairwise(waiting))
    if leases["open"] or not is_handed_out or not is_disjoint:
        raise ValueError("its leases hold some that are open, twice there or never handed out")
    left: Counter[int] = Counter()
    for number, start, stop in waiting:
        left[number] += stop - start
    begun = left.keys() | ({epoch} if place else set())
    counted = [(one, (place if one == epoch else size) - left[one]) for one in sorted(begun)]
    num_counted = epoch * size + place - left.total()
    if sorted(leases["counted"]) != counted or books.num_counted != num_counted:
        raise ValueError(f"its books count {books.num_counted} samples, which its leases contradict")


CHECKPOINTS = "checkpoints"
_NUMBER = re.compile(r"[0-9]{6}|[1-9][0-9]{6,17}")
_HIDDEN = re.compile(rf"\.({_NUMBER.pattern})\.unfinished")
INDEX = "model.safetensors.index.json"  # which file has which weight, for other programs
_OURS = re.compile(rf"part-[0-9]+(-[0-9]+-of-[0-9]+)?\.safetensors|{re.escape(MANIFEST)}|{re.escape(INDEX)}")
MOST_MANIFEST_BYTES = 64_000_000
_PIECE_BYTES = 64 << 20  # at once, of content that may be a mapped file
_OPTIMIZER = "optimizer/"  # before the names of what an optimizer keeps
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_log = logging.getLogger(__name__)

Part = tuple[int, int, Buffer]  # a stage's interval [start, stop), its state as safetensors


class Mirror(Protocol):
    """Another place that has the checkpoints of a folder, too."""

    def send(self, number: int, place: Path, kept: Collection[int]) -> None:
        """Send one that was just written, and remove those that are not kept; or raise CheckpointError."""


class CheckpointError(RavnestError):
    """A checkpoint cannot be written, or none can be looked for. The hub shows it and trains on."""

    exit_code = 3


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint that was found sound. It stays readable when its files are removed."""

    number: int
    books: SavedLedger
    score: float | None
    parts: tuple[tuple[FileTensor, ...], ...] = field(repr=False)

    def read(self) -> Iterator[FileTensor]:
        """Yield each tensor once: a tied weight is its home's, optimizer state "optimizer/SLOT/NAME"."""
        seen: set[str] = set()
        for tensor in (tensor for part in self.parts for tensor in part):
            if tensor.name not in seen:
                seen.add(tensor.name)
                yield tensor


class Checkpoints:
    """The checkpoints in a run's folder: the newest `keep`, and the one with the lowest score."""

    def __init__(
        self,
        folder: Path,
        keep: int = 3,
        *,
        is_lasting: bool = True,
        max_shard_bytes: int = SHARD_BYTES,
        key: bytes = b"",
        mirror: Mirror | None = None,
    ) -> None:
        assert keep >= 1, keep
        self._mirror = mirror
        self._key = key  # what manifests are signed with; without one they are only sealed
        self._max_shard_bytes = max_shard_bytes
        self.is_lasting = is_lasting  # the folder stays when the run has ended
        self._place = folder / CHECKPOINTS
        self._keep = keep
        self.faults: list[str] = []  # what the last `find` passed over, and why

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._place.parent

    @property
    def next_number(self) -> int:
        """A number above all that are here, damaged ones included."""
        return max(self._numbers(), default=-1) + 1

    def write(
        self,
        number: int,
        parts: Sequence[Part],
        books: SavedLedger,
        score: float | None = None,
        left_out: Container[str] = (),
        added: Sequence[Sequence[FileTensor]] = (),
    ) -> Path:
        """Write a checkpoint, then remove those no longer kept; if it fails, all is as it was before.

        Tensors of the names in `left_out` are not written. `added` has more tensors for each part.
        """
        refused = f"checkpoint {number:06d} was not written"
        if number < self.next_number:
            raise CheckpointError(f"{refused}: {self.next_number - 1:06d} is there, and numbers only grow")
        entries: list[PartEntry] = []
        files: dict[str, _Shard] = {}
        try:
            for index, (start, stop, content) in enumerate(parts):
                whole = memoryview(content).cast("B")
                tensors = _read_part(whole, f"the state of stage [{start}, {stop})")
                more = added[index] if added else ()
                shards = _split(whole, tensors, self._max_shard_bytes, left_out, more)
                files |= dict(zip(_part_names(index, len(shards)), shards, strict=True))
                refs = [name_pieces(shard.pieces(), lambda _: None)[0] for shard in shards]
                entries.append(PartEntry(start, stop, refs[0], tuple(refs[1:])))
            sealed = seal_manifest(number, Manifest(books, score, tuple(entries)), self._key)
        except ValueError as error:
            raise CheckpointError(f"{refused}: {error}") from None
        place = self._place / f".{number:06d}.unfinished"
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            _sync(self._place.parent)
            for name in filter(_HIDDEN.fullmatch, os.listdir(self._place)):
                _remove_quietly(self._place / name)
            place.mkdir()
            for name, shard in files.items():
                _write_file(place / name, shard.pieces())
            _write_file(place / INDEX, [_index_weights(files)])
            _write_file(place / MANIFEST, [sealed])
            _sync(place)
            place = place.replace(self._place / f"{number:06d}")
            _sync(self._place)
        except OSError as error:
            with contextlib.suppress(OSError):
                _remove(place)
            needed = len(sealed) + sum(len(content) for _, _, content in parts)
            reason = _explain(error, self._place, needed)
            raise CheckpointError(f"{refused}: {reason}; older checkpoints are as they were") from error
        self._prune()
        if self._mirror is not None:
            self._mirror.send(number, place, self._numbers())
        return place

    def open(self, number: int) -> Checkpoint:
        """Return the checkpoint that was just written, or raise CheckpointError; hashes are not compared."""
        try:
            return _open(self._place / f"{number:06d}", number, self._key, is_fresh=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {number:06d} cannot be read again: {error}") from None

    def find(self) -> Checkpoint | None:
        """Return the newest checkpoint that is sound; `faults` says what was wrong with newer ones."""
        found, problems = None, []
        for number in reversed(self._numbers()):
            try:
                found = _open(self._place / f"{number:06d}", number, self._key)
                break
            except OSError as error:
                problems.append(f"checkpoint {number:06d} cannot be read: {error.strerror or error}")
            except ValueError as error:
                problems.append(f"checkpoint {number:06d} is damaged: {error}")
        ending = f"using {found.number:06d}" if found else "there is no sound one before it"
        self.faults = [f"{problem}; {ending}" for problem in problems]
        return found

    def find_best(self) -> Checkpoint | None:
        """Return the sound checkpoint with the lowest score, the newest of equals; None if none has one."""
        scores: list[tuple[float, int]] = []
        for number in self._numbers():
            with contextlib.suppress(ValueError, OSError):
                score = _read_manifest(self._place / f"{number:06d}", number, self._key).score
                scores += [] if score is None else [(score, -number)]
        for _, number in sorted(scores):
            with contextlib.suppress(ValueError, OSError):
                return _open(self._place / f"{-number:06d}", -number, self._key)
        return None

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
                manifest = _read_manifest(folder, number, self._key)
                made[number] = folder  # by us, for its manifest is sealed
                _check_files(folder, manifest)
                whole[number] = manifest.score
        scores = [(score, -number) for number, score in whole.items() if score is not None]
        kept = {*sorted(whole)[-self._keep :], *(-number for _, number in sorted(scores)[:1])}
        for number in made.keys() - kept:
            _remove_quietly(made[number])


@contextlib.contextmanager
def open_checkpoints(place: Path | None, key: bytes = b"") -> Iterator[Checkpoints]:
    """Give the checkpoints of a run, signed with its key; without a folder, in one that goes with it."""
    if place is not None and not place.suffix:
        yield Checkpoints(place, key=key)
        return
    with tempfile.TemporaryDirectory(prefix="ravnest-", ignore_cleanup_errors=True) as folder:
        yield Checkpoints(Path(folder), is_lasting=False)


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file of a part: the part's own bytes, or a file with some of its tensors."""

    content: memoryview | None
    tensors: tuple[FileTensor, ...]

    def pieces(self) -> Iterator[Buffer]:
        """Yield the file; what was read of a mapped file takes no memory any more."""
        if self.content is None:
            yield write_header({tensor.name: tensor.type for tensor in self.tensors}, {"format": "pt"})
        buffers = [tensor.buffer for tensor in self.tensors] if self.content is None else [self.content]
        for buffer in buffers:
            for start in range(0, len(buffer), _PIECE_BYTES):
                yield buffer[start : start + _PIECE_BYTES]
                release_pages(buffer)


def _split(
    whole: memoryview,
    tensors: tuple[FileTensor, ...],
    most_bytes: int,
    left_out: Container[str],
    added: Sequence[FileTensor],
) -> list[_Shard]:
    found = {tensor.name: tensor for tensor in (*added, *tensors) if tensor.name not in left_out}
    if not added and len(found) == len(tensors) and (len(whole) <= most_bytes or len(tensors) < 2):
        return [_Shard(whole, tensors)]
    groups = group_by_size({name: tensor.type for name, tensor in found.items()}, most_bytes)
    return [_Shard(None, tuple(found[name] for name in group)) for group in groups or [{}]]


def _index_weights(files: Mapping[str, _Shard]) -> bytes:
    """Return which file has which weight; of tied ones the first counts."""
    found: dict[str, str] = {}
    num_bytes = 0
    for name, shard in files.items():
        for tensor in shard.tensors:
            if tensor.name not in found and not tensor.name.startswith(_OPTIMIZER):
                found[tensor.name] = name
                num_bytes += len(tensor.buffer)
    return write_index(found, num_bytes)


def _part_names(index: int, num_shards: int) -> list[str]:
    return [f"part-{index}.safetensors"] if num_shards == 1 else name_shards(f"part-{index}", num_shards)


def list_files(manifest: Manifest) -> list[tuple[str, int]]:
    """Return the files with tensors, by name and size."""
    return [(name, ref.size_bytes) for _, name, ref in _name_files(manifest)]


def _name_files(manifest: Manifest) -> Iterator[tuple[int, str, BlobRef]]:
    """Yield every file with the number of its part and its hash."""
    for index, entry in enumerate(manifest.parts):
        for name, ref in zip(_part_names(index, len(entry.shards)), entry.shards, strict=True):
            yield index, name, ref


def _open(folder: Path, number: int, key: bytes, *, is_fresh: bool = False) -> Checkpoint:
    manifest = _read_manifest(folder, number, key)
    _check_files(folder, manifest)
    parts: list[tuple[FileTensor, ...]] = [() for _ in manifest.parts]
    for index, name, ref in _name_files(manifest):
        content = map_file(folder / name)  # hashed and later read by the same mapping
        if not is_fresh and name_blob(content) != ref:
            raise ValueError(f"{name} has another hash than its manifest says")
        parts[index] += _read_part(content, name)
    return Checkpoint(number, manifest.books, manifest.score, tuple(parts))


def _read_manifest(folder: Path, number: int, key: bytes) -> Manifest:
    file = folder / MANIFEST
    if folder.is_dir() and not file.is_file():
        raise ValueError(f"{MANIFEST} is missing")
    if file.stat().st_size > MOST_MANIFEST_BYTES:
        raise ValueError(f"{MANIFEST} has more than {show_bytes(MOST_MANIFEST_BYTES)}")
    return parse_manifest(read_bytes(file, MOST_MANIFEST_BYTES), number, key)


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Compare names and sizes, which is quick; hashes are compared when parts are read."""
    with os.scandir(folder) as listing:
        found = {entry.name: entry for entry in listing if entry.name not in (MANIFEST, INDEX)}
    for _, name, ref in _name_files(manifest):
        file = found.pop(name, None)
        if file is None or not file.is_file(follow_symlinks=False):
            raise ValueError(f"{name} is {'no plain file' if file else 'missing'}")
        excess = file.stat(follow_symlinks=False).st_size - ref.size_bytes
        if excess:
            amount = f"{abs(excess)} bytes {'more' if excess > 0 else 'fewer'}"
            raise ValueError(f"{name} has {amount} than its manifest says")
    if found:
        raise ValueError(f"it holds {min(found)!r}, which its manifest does not name")


def _read_part(content: memoryview, what: str) -> tuple[FileTensor, ...]:
    try:
        return read_tensors(content)
    except ValueError as error:
        raise ValueError(f"{what} is no safetensors file: {error}") from None


def _write_file(file: Path, pieces: Iterable[Buffer]) -> None:
    with open(file, "xb") as opened:
        for piece in pieces:
            opened.write(piece)
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
    """Remove a folder, unless it holds foreign files; a crash in between leaves only a leftover."""
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
