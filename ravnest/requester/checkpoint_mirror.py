"""The checkpoints of a run's folder in a bucket too, so that a hub on another machine goes on from them.

The bucket's folder of a checkpoint is named by its number and the fence of the hub that wrote it. It counts
from the moment it is in the register, which takes nothing from a hub that was fenced off. What comes back is
what was registered, by the hash of its manifest; then it is checked like any checkpoint on disk.
"""

import contextlib
import logging
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from ravnest.disk import read_bytes
from ravnest.errors import BucketError, BucketLacks, ConfigError, RavnestError
from ravnest.requester.bucket import Bucket
from ravnest.requester.checkpoint_store import (
    CHECKPOINTS,
    INDEX,
    MANIFEST,
    MOST_MANIFEST_BYTES,
    CheckpointError,
    Checkpoints,
    Manifest,
    list_files,
    parse_manifest,
)
from ravnest.requester.run_folder import ADAPTER, BEST, BEST_ADAPTER, EMA, EMA_ADAPTER, MODEL, make_earlier

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"[0-9]{6}|[1-9][0-9]{6,17}")
_SUFFIX, _ADAPTER_CONFIG = ".safetensors", "adapter_config.json"
_ADAPTED = ("", f"{BEST_ADAPTER}/", f"{EMA_ADAPTER}/")  # where a folder's adapters lie
_FILE = re.compile(r"([0-9]{6,18})-([0-9]{1,18})/[^/]+")


class Registered(Protocol):
    """A checkpoint that counts, and the hash of its manifest's file."""

    @property
    def number(self) -> int:
        """The checkpoint's."""

    @property
    def fence(self) -> int:
        """That of the hub that wrote it."""

    @property
    def manifest(self) -> str:
        """BLAKE3 of the manifest's file."""


class Register(Protocol):
    """Says which checkpoints count. FencedOff: another hub has taken the run over."""

    fence: int

    def check(self) -> None:
        """Return if this hub may write."""

    def register(self, number: int, manifest: str) -> None:
        """Record that a checkpoint is whole."""

    def unregister(self, numbers: list[int]) -> None:
        """Forget checkpoints that are about to be removed."""

    def checkpoints(self) -> Sequence[Registered]:
        """Return what is recorded, the oldest first."""

    def earlier_checkpoints(self) -> Sequence[Registered]:
        """Return what is recorded of trainings before this one, which stays."""


class CheckpointMirror:
    """Keeps a bucket as the folder of a run is."""

    def __init__(self, bucket: Bucket, register: Register) -> None:
        self._bucket, self._register = bucket, register

    def send(self, number: int, place: Path, kept: Collection[int]) -> None:
        """Send a checkpoint that was just written, have it count, and remove what is no longer kept."""
        manifest = place / MANIFEST
        try:
            for file in sorted(place.iterdir(), key=lambda file: file == manifest):
                self._bucket.send(file, f"{_name(number, self._register.fence)}/{file.name}")
            self._register.register(number, _hash(manifest.read_bytes()))
            self._remove_old(kept)
        except (RavnestError, OSError) as error:
            problem = f"checkpoint {number:06d} is on this PC, but not in {self._bucket}"
            raise CheckpointError(f"{problem}: {error}") from None

    def bring_back(self, folder: Path, key: bytes) -> None:
        """Have a folder hold the newest sound checkpoint that counts, the best, and none that does not count.

        What does not count was written by a hub that had been fenced off; it is set aside. Those from before
        the first that counts stay: they were written when the run had no bucket. ConfigError: it is not known
        what the bucket has, and to go on from less could lose all that was trained.
        """
        try:
            self._bring_back(folder, key)
        except BucketError as error:
            fix = "see that it can be read, and start the hub again with --resume"
            raise ConfigError(f"checkpoints cannot be fetched: {error}; {fix}") from None

    def _bring_back(self, folder: Path, key: bytes) -> None:
        known = {each.number: each for each in self._register.checkpoints()}
        here = _find_here(folder)
        for number in [each for each in here if known and each >= min(known)]:
            if number not in known or here[number] != known[number].manifest:
                _set_aside(folder, number, "does not count any more")
                del here[number]
        found = self._read_manifests(folder, here.keys(), known.values(), key)
        scores = sorted((each.score, -number) for number, each in found.items() if each.score is not None)
        best = [-number for _, number in scores[:1]]
        for number in sorted(found, reverse=True):
            if number in here:
                if _is_sound(folder, number, key):
                    break
                _set_aside(folder, number, "is damaged")
            self._fetch(folder, known[number], found[number])
            if _is_sound(folder, number, key):
                break
            shutil.rmtree(folder / CHECKPOINTS / f"{number:06d}", ignore_errors=True)
        for number in best:
            self._fetch(folder, known[number], found[number])

    def _read_manifests(
        self, folder: Path, here: Collection[int], known: Iterable[Registered], key: bytes
    ) -> dict[int, Manifest]:
        found = {}
        for each in known:
            try:
                if each.number in here:
                    content = _read_here(folder / CHECKPOINTS / f"{each.number:06d}")
                else:
                    file = f"{_name(each.number, each.fence)}/{MANIFEST}"
                    content = self._bucket.read(file, MOST_MANIFEST_BYTES)
                if _hash(content) != each.manifest:
                    raise ValueError(f"{MANIFEST} is not what was registered")
                found[each.number] = parse_manifest(content, each.number, key)
            except (BucketLacks, ValueError) as error:
                logger.warning("checkpoint %06d in %s is passed over: %s", each.number, self._bucket, error)
        return found

    def _fetch(self, folder: Path, known: Registered, manifest: Manifest) -> None:
        """Fetch a checkpoint that is not here."""
        number = known.number
        place = folder / CHECKPOINTS / f"{number:06d}"
        if place.exists():
            return
        unfinished = place.with_name(f".{place.name}.unfinished")
        name = _name(number, known.fence)
        sizes = {**dict(list_files(manifest)), MANIFEST: MOST_MANIFEST_BYTES, INDEX: MOST_MANIFEST_BYTES}
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            for file, most_bytes in sizes.items():
                self._bucket.fetch(f"{name}/{file}", unfinished / file, most_bytes)
            unfinished.replace(place)
        except BucketLacks as error:
            logger.warning("checkpoint %06d cannot be fetched: %s", number, error)
            return
        except OSError as error:
            problem = f"checkpoint {number:06d} cannot be written to {folder}"
            fix = "make room, or give another folder"
            raise ConfigError(f"{problem}: {error.strerror or error}; {fix}") from None
        logger.info("checkpoint %06d was fetched from %s", number, self._bucket)

    def _remove_old(self, kept: Collection[int]) -> None:
        known = self._register.checkpoints()
        stay = [*self._register.earlier_checkpoints(), *(each for each in known if each.number in kept)]
        names = {(each.number, each.fence) for each in stay}
        # Also when it is none: whoever was fenced off since does not know what counts, and removes nothing.
        self._register.unregister([each.number for each in known if each.number not in kept])
        files = ((file, _FILE.fullmatch(file)) for file in self._bucket.find(CHECKPOINTS))
        facts = [(file, (int(match[1]), int(match[2]))) for file, match in files if match]
        gone = [
            f"{CHECKPOINTS}/{file}"
            for file, name in facts
            if name not in names and name[1] <= self._register.fence
        ]
        if gone:
            self._bucket.remove(gone)

    def send_result(self, file: Path) -> str:
        """Send the weights that a run has left beside this file; return where they are now."""
        self._register.check()
        place = f"result-{self._register.fence:06d}"
        for each in [file, *_beside(file)]:
            if each.is_file():
                self._bucket.send(each, f"{place}/{each.relative_to(file.parent).as_posix()}")
        return f"{self._bucket}/{place}"


def _beside(file: Path) -> list[Path]:
    """Return shards and index of the file, and what else a folder's result is; other files are not ours."""
    is_folder = file.name == MODEL
    adapters = tuple(f"{place}{ADAPTER}" for place in _ADAPTED)
    names = (MODEL, BEST, EMA, *adapters) if is_folder else (file.name,)
    patterns = [
        each
        for name in names
        for each in (name, f"{name.removesuffix(_SUFFIX)}-*-of-*{_SUFFIX}", f"{name}.index.json")
    ]
    if is_folder:
        patterns += ["config.json", "generation_config.json"]
        patterns += [f"{place}{_ADAPTER_CONFIG}" for place in _ADAPTED]
    return [each for pattern in patterns for each in sorted(file.parent.glob(pattern)) if each != file]


def _find_here(folder: Path) -> dict[int, str]:
    """Return the checkpoints of a folder by number, each with the hash of its manifest."""
    places = (folder / CHECKPOINTS).glob("[0-9]*")
    return {int(place.name): _hash(_read_here(place)) for place in places if _NUMBER.fullmatch(place.name)}


def _read_here(place: Path) -> bytes:
    """Return what a checkpoint's manifest holds; nothing if it cannot be read."""
    with contextlib.suppress(OSError):
        return read_bytes(place / MANIFEST, MOST_MANIFEST_BYTES)
    return b""


def _is_sound(folder: Path, number: int, key: bytes) -> bool:
    found = Checkpoints(folder, key=key).find()
    return found is not None and found.number == number


def _set_aside(folder: Path, number: int, reason: str) -> None:
    place = folder / CHECKPOINTS / f"{number:06d}"
    try:
        place.replace(make_earlier(folder) / place.name)
    except OSError as error:
        problem = f"checkpoint {number:06d} {reason}, but {place} cannot be moved"
        raise ConfigError(f"{problem}: {error.strerror or error}; move it away") from None
    logger.warning("checkpoint %06d of this PC %s; it is set aside", number, reason)


def _name(number: int, fence: int) -> str:
    return f"{CHECKPOINTS}/{number:06d}-{fence}"


def _hash(content: bytes) -> str:
    return blake3(content).hexdigest()
