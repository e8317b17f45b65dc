"""Laws of checkpoints: damage to the newest is noticed and the one before is used; no crash does damage."""

import builtins
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.numpy import save

from ravnest.hub.coordinator.leases import LeaseBook
from ravnest.model.state.safetensors_header import read_tensors
from ravnest.requester.checkpoint_store import (
    MANIFEST,
    CheckpointError,
    Checkpoints,
    Manifest,
    PartEntry,
    parse_manifest,
    seal_manifest,
)
from ravnest.transfer.blobs import name_blob
from tests.support.saved_run import JOB, books_of, check_content, parts_of

FILES = [MANIFEST, "part-0.safetensors", "part-1.safetensors"]


def write(kept: Checkpoints, number: int) -> None:
    kept.write(number, parts_of(number), books_of(number))


@pytest.fixture(scope="module", autouse=True)
def hasty() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda number: None)  # hundreds of real ones take long on some disks
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for number in (1, 2):
        write(Checkpoints(folder), number)
    return folder


def check_noticed(folder: Path) -> None:
    kept = Checkpoints(folder)
    check_content(kept.find(), 1)
    (fault,) = kept.faults
    assert fault.startswith("checkpoint 000002 is damaged: ")
    assert fault.endswith("; using 000001")


Damage = Callable[[Path], None]


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    name = draw(st.sampled_from(FILES))
    share = draw(st.floats(0, 1, exclude_max=True))
    kind = draw(st.sampled_from(["cut", "flip", "lengthen", "swap", "remove", "add"]))
    flip = draw(st.integers(1, 255))
    extra = draw(
        st.sampled_from(["part-2.safetensors", "notes.txt", ".hidden", f"{MANIFEST}.part", "folder/"])
    )
    tail = draw(st.binary(min_size=1, max_size=20))

    def damage(folder: Path) -> None:
        file = folder / name
        content = bytearray(file.read_bytes())
        place = int(share * len(content))
        if kind == "remove":
            file.unlink()
        elif kind == "add" and extra.endswith("/"):
            (folder / extra).mkdir()
        elif kind == "add":
            (folder / extra).write_bytes(tail)
        elif kind == "swap":  # a part for the other, or a part for the manifest
            others = [other for other in FILES if other != name]
            shutil.copy(folder / others[flip % 2], file)
        elif kind == "lengthen":
            file.write_bytes(content[:place] + tail + content[place:])
        else:
            content[place] ^= flip
            file.write_bytes(content[:place] if kind == "cut" else content)

    return damage


@settings(max_examples=200)
@given(damage=damages())
def test_any_damage_of_the_newest_is_noticed(run: Path, damage: Damage) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        shutil.copytree(run, folder)
        damage(folder / "checkpoints/000002")
        check_noticed(folder)


def test_a_flip_of_any_bit_of_a_manifest_is_noticed(run: Path) -> None:
    sound = (run / "checkpoints/000002" / MANIFEST).read_bytes()
    assert parse_manifest(sound, 2).books == books_of(2)
    for place in range(8 * len(sound)):
        content = bytearray(sound)
        content[place // 8] ^= 1 << place % 8
        with pytest.raises(ValueError, match=re.escape(MANIFEST)):
            parse_manifest(bytes(content), 2)


class Killed(BaseException):
    """The process is no more; nothing it would have done afterwards happens."""


class Disk:
    """Counts what is done to a disk. It fails at one step, or does nothing from there on, as if killed."""

    def __init__(self, fails_at: int, is_killed: bool) -> None:
        self._fails_at = fails_at
        self._is_killed = is_killed
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        if self._is_killed and self.num_steps > self._fails_at:
            raise Killed
        if self.num_steps == self._fails_at + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("mkdir", "replace", "fsync", "unlink", "rmdir"):
            patch.setattr(os, name, self._guard(getattr(os, name)))
        patch.setattr(builtins, "open", partial(self._open, open))

    def _guard(self, act: Callable[..., object]) -> Callable[..., object]:
        def guarded(*arguments: object, **options: object) -> object:
            self.step()
            return act(*arguments, **options)

        return guarded

    def _open(
        self, plain: Callable[..., object], file: Path, mode: str = "r", *more: object, **options: object
    ) -> object:
        if mode != "xb":
            return plain(file, mode, *more, **options)
        self.step()
        return _File(self, file)


class _File:
    def __init__(self, disk: Disk, file: Path) -> None:
        self._disk = disk
        self._number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._number)

    def write(self, content: bytes) -> None:
        os.write(self._number, content[: len(content) // 2])
        self._disk.step()
        os.write(self._number, content[len(content) // 2 :])

    def flush(self) -> None:
        self._disk.step()

    def fileno(self) -> int:
        return self._number


def prepare(folder: Path) -> Checkpoints:
    """Make a run whose next write has a leftover and an old checkpoint to remove."""
    kept = Checkpoints(folder, keep=2)
    for number in (1, 2):
        write(kept, number)
    leftover = folder / "checkpoints/.000009.unfinished"
    leftover.mkdir()
    (leftover / FILES[1]).write_bytes(b"half")
    return kept


def count_steps(folder: Path) -> int:
    kept, disk = prepare(folder), Disk(10_000, is_killed=False)
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        write(kept, 3)
    return disk.num_steps


def attempts(folder: Path, is_killed: bool) -> Iterator[tuple[Path, BaseException | None]]:
    num_steps = count_steps(folder / "whole")
    assert num_steps > 20
    for fails_at in range(num_steps):
        place = folder / f"at-{fails_at}"
        kept, ended = prepare(place), None
        with pytest.MonkeyPatch.context() as patch:
            Disk(fails_at, is_killed).install(patch)
            try:
                write(kept, 3)
            except (CheckpointError, Killed) as error:
                ended = error
        yield place, ended


def check_goes_on(folder: Path) -> None:
    kept = Checkpoints(folder, keep=2)
    number = kept.next_number
    write(kept, number)
    check_content(kept.find(), number)
    names = sorted(os.listdir(folder / "checkpoints"))
    assert len(names) == 2
    assert names[-1] == f"{number:06d}"
    assert not any(name.startswith(".") for name in names)


def test_killed_at_any_step_no_damaged_checkpoint_is_left(tmp_path: Path) -> None:
    found_numbers = []
    for folder, ended in attempts(tmp_path, is_killed=True):
        assert isinstance(ended, Killed)
        kept = Checkpoints(folder)
        found = kept.find()
        assert found is not None
        assert kept.faults == []
        check_content(found, found.number)
        found_numbers.append(found.number)
        check_goes_on(folder)
    assert found_numbers == sorted(found_numbers), "once it is there, it stays"
    assert set(found_numbers) == {2, 3}


def test_a_disk_that_fails_at_any_step_leaves_all_or_nothing(tmp_path: Path) -> None:
    ends = []
    for folder, ended in attempts(tmp_path, is_killed=False):
        kept = Checkpoints(folder)
        check_content(kept.find(), 2 if ended else 3)
        assert kept.faults == []
        if ended:
            assert "the disk of" in str(ended)
            names = {name for name in os.listdir(folder / "checkpoints") if name != ".000009.unfinished"}
            assert names == {"000001", "000002"}
        ends.append(ended is not None)
        check_goes_on(folder)
    assert set(ends) == {True, False}, "an old one that cannot be removed is no reason to fail"


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
TENSORS = st.dictionaries(
    NAMES.filter(lambda name: name != "__metadata__"),
    st.tuples(
        st.sampled_from(["float32", "float16", "float64", "int8", "uint8", "int64", "bool"]),
        st.lists(st.integers(0, 3), max_size=3),
    ),
    max_size=4,
)


def arrays(kinds: dict[str, tuple[str, list[int]]], fill: int) -> dict[str, np.ndarray]:
    return {name: np.full(shape, fill % 2, dtype) for name, (dtype, shape) in kinds.items()}


@given(st.lists(TENSORS, min_size=1, max_size=3))
def test_every_tensor_comes_back_once_as_its_first_part_has_it(
    stages: list[dict[str, tuple[str, list[int]]]],
) -> None:
    parts = [(place, place + 1, save(arrays(kinds, place))) for place, kinds in enumerate(stages)]
    with tempfile.TemporaryDirectory() as folder:
        kept = Checkpoints(Path(folder))
        kept.write(1, parts, books_of(1))
        found = [(x.name, x.dtype, x.shape, bytes(x.buffer)) for x in kept.find().read()]
    expected = {}
    for place, kinds in reversed(list(enumerate(stages))):
        for name, array in arrays(kinds, place).items():
            expected[name] = (name, array.dtype.name, array.shape, array.tobytes())
    assert sorted(found) == sorted(expected.values())


SOUND = save({"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.int16), "e": np.ones(0)})


@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), max_size=3),
    st.integers(0, len(SOUND)),
)
def test_what_is_accepted_is_what_the_library_reads(changes: list[tuple[int, int]], length: int) -> None:
    data = bytearray(SOUND if length % 2 else SOUND[:length])
    for place, value in changes:
        if place < len(data):
            data[place] = value
    try:
        found = read_tensors(bytes(data))
    except ValueError:
        return
    truth = {
        name: (content["shape"], content["data"]) for name, content in safetensors.deserialize(bytes(data))
    }
    assert {tensor.name: (list(tensor.shape), tensor.buffer) for tensor in found} == truth


@given(st.binary(max_size=100))
def test_junk_is_neither_part_nor_manifest(junk: bytes) -> None:
    with pytest.raises(ValueError, match=r"manifest\.json cannot be used"):
        parse_manifest(junk, 1)
    with pytest.raises(ValueError, match=r"header|tensors"):
        read_tensors(junk)


@given(st.lists(st.sampled_from(["lease", "complete", "release"]), max_size=40), st.integers(1, 25))
def test_books_of_any_history_are_kept_and_a_wrong_count_is_not(steps: list[str], most: int) -> None:
    book = LeaseBook(JOB.num_samples, JOB.epochs, JOB.seed)
    for number, step in enumerate(steps):
        if step == "lease":
            book.lease(f"c{number % 2}", 1 + number % most)
        elif step == "release":
            book.release(f"c{number % 2}")
        elif book.open_leases:
            lease = book.open_leases[number % len(book.open_leases)]
            book.complete(lease.number, lease.cluster_id)
    for holder in ("c0", "c1"):
        book.release(holder)
    counted = sum(book.num_counted(epoch) for epoch in range(JOB.epochs))
    books = books_of(1, leases=book.state(), num_counted=counted)
    parts = (PartEntry(0, 1, name_blob(b"")),)
    found = parse_manifest(seal_manifest(1, Manifest(books, None, parts)), 1).books
    assert LeaseBook.restore(found.leases).state() == book.state()
    for wrong in (counted - 1, counted + 1):
        with pytest.raises(ValueError, match="contradict" if wrong >= 0 else "Expected"):
            seal_manifest(1, Manifest(replace(books, num_counted=wrong), None, parts))
