"""The manifest of a checkpoint: its parts by hash, the books of the training, and which job it is of.

It is believed only as it was written, and if its books balance: every sample handed out is counted, or waits
to be handed out again. Driven by job.checkpoints; no torch and no files in here.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from ravnest.blobs import BlobRef
from ravnest.engine.sampler import LeaseState
from ravnest.exchange import name_blob
from ravnest.model.blueprint import StateEntry

MANIFEST = "manifest.json"
FORMAT = 1  # of the manifest; it changes with whatever makes old checkpoints unreadable or differently meant
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which job a checkpoint is of; `state` is what `hash_state` says of its tensors."""

    model: str
    state: str
    num_samples: Count
    batch_size: Count
    epochs: Count
    seed: Count


class Books(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a training needs beside its weights; no lease is open. `written_at` is in seconds since 1970."""

    number: Count
    job: Fingerprint
    num_counted: Count
    num_reported: Count
    num_updates: Count
    num_evaluated: Count
    leases: LeaseState
    history: list[dict[str, float | int | None]]
    written_at: float


class PartEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of the stage [start, stop) by the hash of its file."""

    start: Count
    stop: Count
    content: BlobRef


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint but for the tensors; the score is the validation loss, if one is known."""

    books: Books
    score: float | None
    parts: tuple[PartEntry, ...]


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    number: int
    hash: str  # of the manifest's very bytes, so that a changed digit shows
    manifest: msgspec.Raw


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
    for name in ("num_samples", "batch_size", "epochs", "seed"):
        before, after = getattr(saved, name), getattr(now, name)
        if before != after:
            fix = f"give {before} training samples" if name == "num_samples" else f"set {name}={before}"
            return f"the checkpoint was written with {name}={before}, not {after}; {fix}, {otherwise}"
    return None


def seal_manifest(number: int, manifest: Manifest) -> bytes:
    """Return the content of a manifest's file, after making sure that it can be read again."""
    body = msgspec.json.encode(manifest)  # numbers that are not finite become null: a score, a loss
    content = msgspec.json.encode(_Sealed(FORMAT, number, name_blob(body).blob, msgspec.Raw(body)))
    parse_manifest(content, number)
    return content


def parse_manifest(content: bytes, number: int) -> Manifest:
    """Return what a manifest's file says, or raise ValueError with what is wrong."""
    try:
        sealed = msgspec.json.decode(content, type=_Sealed)
        if sealed.format != FORMAT:
            raise ValueError(f"it says format {sealed.format}, this ravnest reads format {FORMAT}")
        if name_blob(bytes(sealed.manifest)).blob != sealed.hash:
            raise ValueError("it is not as it was written")
        manifest = msgspec.json.decode(sealed.manifest, type=Manifest)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} cannot be used: {error!s:.200}") from None
    if not number == sealed.number == manifest.books.number:
        raise ValueError(f"{MANIFEST} is that of checkpoint {manifest.books.number:06d}")
    borders = [(0, 0), *((entry.start, entry.stop) for entry in manifest.parts)]
    if len(borders) < 2 or any(one[1] != two[0] or two[0] >= two[1] for one, two in pairwise(borders)):
        raise ValueError("its parts are not the stages of a line, in order")
    _check_books(manifest.books)
    return manifest


def _check_books(books: Books) -> None:
    """See to it that every sample handed out is counted or waits to be handed out again, and none twice."""
    leases, job = books.leases, books.job
    size, chunk_size, waiting = leases["num_samples"], leases["chunk_size"], leases["requeued"]
    if (size, leases["num_epochs"], leases["seed"]) != (job.num_samples, job.epochs, job.seed):
        raise ValueError("its leases are of another job")
    epoch, chunk = upcoming = leases["next_epoch"], leases["next_chunk"]
    num_chunks = -(-size // max(chunk_size, 1))
    is_inside = 0 <= epoch < job.epochs and 0 <= chunk < num_chunks
    is_valid = min(size, chunk_size) >= 1 and 0 <= leases["next_number"] < 2**63
    if not is_valid or not (is_inside or upcoming == (job.epochs, 0)):
        raise ValueError("its leases hold a number out of range")
    is_handed_out = all(one[0] >= 0 and 0 <= one[1] < num_chunks and one < upcoming for one in waiting)
    if leases["open"] or not is_handed_out or len(set(waiting)) < len(waiting):
        raise ValueError("its leases hold some that are open, twice there or never handed out")
    left: Counter[int] = Counter()
    for number, place in waiting:
        left[number] += min(chunk_size, size - place * chunk_size)
    begun = left.keys() | ({epoch} if chunk else set())
    counted = [(one, (chunk * chunk_size if one == epoch else size) - left[one]) for one in sorted(begun)]
    num_counted = epoch * size + chunk * chunk_size - left.total()
    if sorted(leases["counted"]) != counted or books.num_counted != num_counted:
        raise ValueError(f"its books count {books.num_counted} samples, which its leases contradict")
