"""Checkpoints on disk: what is kept, what is refused, and what a person is told."""

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save
from safetensors.torch import save as save_torch

from ravnest.errors import RavnestError
from ravnest.model.blueprint.program import PARAMETER, StateEntry
from ravnest.model.state.shards import open_weights
from ravnest.protocol.tensors import ITEM_BYTES
from ravnest.requester.checkpoint_store import (
    MANIFEST,
    MANIFEST_FORMAT,
    CheckpointError,
    Checkpoints,
    find_difference,
    hash_state,
    parse_manifest,
    seal_manifest,
)
from ravnest.transfer.blobs import name_blob
from tests.support.as_root import let_write, small_disk
from tests.support.saved_run import JOB, books_of, check_content, parts_of


def write(kept: Checkpoints, *numbers: int, score: float | None = None) -> None:
    for number in numbers:
        kept.write(number, parts_of(number), books_of(number), score)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))


def test_a_checkpoint_reads_back_to_the_bit(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path / "run")
    assert kept.find() is None
    assert kept.write(123, parts_of(123), books_of(123)) == tmp_path / "run/checkpoints/000123"
    assert sorted(os.listdir(tmp_path / "run/checkpoints/000123")) == [
        "manifest.json",
        "model.safetensors.index.json",
        "part-0.safetensors",
        "part-1.safetensors",
    ]
    check_content(kept.find(), 123)
    assert kept.faults == []


def test_a_large_part_is_written_as_shards(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, max_shard_bytes=30)
    write(kept, 1, 2)
    place = tmp_path / "checkpoints/000002"
    shards = [f"part-{part}-0000{n}-of-00002.safetensors" for part in (0, 1) for n in (1, 2)]
    assert sorted(os.listdir(place)) == ["manifest.json", "model.safetensors.index.json", *shards]
    check_content(kept.find(), 2)
    check_content(kept.open(2), 2)
    assert kept.faults == []
    weights = {tensor.name: bytes(tensor.buffer) for tensor in open_weights(place)}  # as other programs do
    assert weights.keys() == {"tied", "bias", "seen"}
    assert weights["tied"] == np.full(6, 2, np.float32).tobytes()
    os.truncate(place / shards[1], 10)
    check_content(kept.find(), 1)
    assert "part-0-00002-of-00002.safetensors has" in kept.faults[0]
    (place / shards[2]).unlink()
    check_content(kept.find(), 1)
    for number in (3, 4, 5):
        write(kept, number)
    assert names(tmp_path) == ["000003", "000004", "000005"]


def test_tensors_of_every_dtype_and_shape_are_what_the_library_wrote(tmp_path: Path) -> None:
    tensors = {
        f"{name}{size}": torch.arange(size * 2).reshape(2, size).to(getattr(torch, name))
        for name in ITEM_BYTES
        for size in (0, 3)
    }
    tensors["scalar"] = torch.tensor(2.5)
    part = save_torch(tensors, metadata={"format": "pt"})
    kept = Checkpoints(tmp_path)
    kept.write(1, [(0, 1, memoryview(part))], books_of(1))
    found = {saved.name: saved for saved in kept.find().read()}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        saved = found[name]
        assert (saved.dtype, saved.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert bytes(saved.buffer) == tensor.flatten().view(torch.uint8).numpy().tobytes()


def test_it_stays_readable_when_it_is_removed(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    write(kept, 1)
    found = kept.find()
    write(kept, 2)
    assert names(tmp_path) == ["000002"]
    check_content(found, 1)


def test_the_newest_are_kept_and_the_best(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=2)
    for number, score in enumerate([None, 0.5, 0.2, float("nan"), 0.3, None, 0.2, float("-inf"), None, None]):
        write(kept, number, score=score)
        expected = {max(number - 1, 0), number}
        best = {0: None, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2}.get(number, 6)  # of equals the newer
        assert names(tmp_path) == [f"{each:06d}" for each in sorted(expected | {best} - {None})]
    best = Checkpoints(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints/000009")
    shutil.rmtree(tmp_path / "checkpoints/000008")
    assert best.find().score == 0.2
    assert best.find_best().score == 0.2
    assert Checkpoints(tmp_path / "elsewhere").find_best() is None


def test_order_is_by_number_whatever_the_clock_says(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=2)
    for number in (999_999, 1_000_000, 1_000_001):
        kept.write(number, parts_of(number), books_of(number, written_at=2e9 - number))
        for file in (tmp_path / "checkpoints").rglob("*"):
            os.utime(file, (2e9 - number, 2e9 - number))
    assert names(tmp_path) == ["1000000", "1000001"]
    assert kept.find().number == 1_000_001


def test_numbers_only_grow(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    assert kept.next_number == 0
    write(kept, 5)
    (tmp_path / "checkpoints/000007").mkdir()
    for number in (5, 6, 7):
        with pytest.raises(CheckpointError, match="000007 is there, and numbers only grow"):
            write(kept, number)
    assert kept.next_number == 8
    write(kept, 8)
    check_content(kept.find(), 8)


def test_a_damaged_one_is_passed_over_with_a_sentence(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    write(kept, 121, 122, 123)
    part = tmp_path / "checkpoints/000123/part-1.safetensors"
    part.write_bytes(part.read_bytes()[:-10])
    check_content(kept.find(), 122)
    problem = "part-1.safetensors has 10 bytes fewer than its manifest says"
    assert kept.faults == [f"checkpoint 000123 is damaged: {problem}; using 000122"]
    (tmp_path / "checkpoints/000122" / MANIFEST).unlink()
    check_content(kept.find(), 121)
    assert [fault.split("; ")[-1] for fault in kept.faults] == ["using 000121"] * 2
    assert "manifest.json is missing" in kept.faults[1]


def test_if_all_are_damaged_there_is_none(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    write(kept, 1, 2)
    for number in (1, 2):
        with open(tmp_path / f"checkpoints/00000{number}/part-0.safetensors", "ab") as file:
            file.write(b"more")
    assert kept.find() is None
    assert [
        fault.startswith(f"checkpoint 00000{n} is damaged")
        for n, fault in zip((2, 1), kept.faults, strict=True)
    ]
    assert all("has 4 bytes more" in fault and "no sound one before it" in fault for fault in kept.faults)


def test_what_is_no_checkpoint_at_all_is_passed_over(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    write(kept, 1, 6)
    place = tmp_path / "checkpoints"
    (place / "000002").write_text("a file")
    (place / "000003").symlink_to("nowhere")
    (place / "000004").mkdir()
    (place / "000004" / MANIFEST).mkdir()
    shutil.copytree(place / "000001", place / "000005")
    (place / "000006/part-0.safetensors").replace(tmp_path / "elsewhere")
    (place / "000006/part-0.safetensors").symlink_to(tmp_path / "elsewhere")
    for name in ("7", "0000001", "x", "notes.txt"):
        (place / name).mkdir()
    check_content(kept.find(), 1)
    problems = [fault.removesuffix("; using 000001").split(" ", 1)[1] for fault in kept.faults]
    assert problems == [
        "000006 is damaged: part-0.safetensors is no plain file",
        "000005 is damaged: manifest.json is that of checkpoint 000001",
        "000004 is damaged: manifest.json is missing",
        "000003 cannot be read: No such file or directory",
        "000002 cannot be read: Not a directory",
    ]


@pytest.mark.parametrize(
    ("number", "age"), [(MANIFEST_FORMAT - 1, "an older"), (MANIFEST_FORMAT + 1, "a newer")]
)
def test_one_of_another_ravnest_is_passed_over_and_left_alone(tmp_path: Path, number: int, age: str) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    write(kept, 1, 2)
    file = tmp_path / "checkpoints/000002" / MANIFEST
    was, other = b'"format":%d' % MANIFEST_FORMAT, b'"format":%d' % number
    file.write_bytes(file.read_bytes().replace(was, other))
    assert kept.find() is None
    sentence = f"it is of {age} ravnest: it says format {number}, this one reads format {MANIFEST_FORMAT}"
    assert sentence in kept.faults[0]
    write(kept, 3)
    assert names(tmp_path) == ["000002", "000003"]


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    write(kept, 1)
    os.truncate(tmp_path / "checkpoints/000001" / MANIFEST, 65_000_000)
    assert kept.find() is None
    assert "manifest.json has more than 64 MB" in kept.faults[0]


def test_what_others_made_is_never_removed(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    write(kept, 1, 2)
    place = tmp_path / "checkpoints"
    (place / "000002/notes.txt").write_text("the good one")
    (place / "000000").mkdir()
    (place / "000000/part-0.safetensors").write_text("no manifest, so not ours")
    (place / ".000000.unfinished").mkdir()
    (place / ".000000.unfinished/letter.txt").write_text("")
    (place / ".hidden").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/part-0.safetensors").write_text("")
    (place / ".000001.unfinished").symlink_to(tmp_path / "elsewhere")
    before = sorted(str(file) for file in tmp_path.rglob("*"))
    write(kept, 3)
    write(kept, 4)
    after = {str(file) for file in tmp_path.rglob("*") if "000004" not in str(file)}
    assert sorted(after) == before
    check_content(kept.find(), 4)


def test_damaged_ones_do_not_push_sound_ones_out(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=2)
    write(kept, 1, 2)
    os.truncate(tmp_path / "checkpoints/000002/part-0.safetensors", 5)
    write(kept, 3)
    assert names(tmp_path) == ["000001", "000003"]


def test_leftovers_of_crashed_writes_go_with_the_next(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    write(kept, 1)
    leftover = tmp_path / "checkpoints/.000009.unfinished"
    leftover.mkdir()
    (leftover / "part-0.safetensors").write_bytes(b"half")
    check_content(kept.find(), 1)
    assert kept.faults == []
    write(kept, 2)
    assert names(tmp_path) == ["000001", "000002"]


def test_an_old_one_that_cannot_be_removed_does_not_fail_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    write(kept, 1)
    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", failing(errno.EACCES))
        write(kept, 2)
    check_content(kept.find(), 2)
    assert "no longer needed, cannot be removed: Permission denied" in caplog.text
    write(kept, 3)
    assert names(tmp_path) == ["000003"]


def test_all_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync, replace = os.fsync, os.replace

    def note(number: int) -> None:
        fsync(number)
        synced.append(os.fstat(number).st_ino)

    def check(source: Path, target: Path) -> None:
        assert {file.stat().st_ino for file in [tmp_path, source, *source.iterdir()]} <= set(synced)
        assert len(list(source.iterdir())) == 4
        synced.clear()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", check)
    write(Checkpoints(tmp_path), 1)
    assert synced == [(tmp_path / "checkpoints").stat().st_ino]


JUNK_PARTS = {
    "the header of 0 bytes does not fit": b"",
    "the header of 64000001 bytes does not fit": (64_000_001).to_bytes(8, "little")
    + b"{}"
    + b" " * 64_000_000,
    "do not fill the file": save({"w": np.zeros(2, np.float32)}) + b"!",
    "Expected `object`": (2).to_bytes(8, "little") + b"[]",
    "recursion": (400_000).to_bytes(8, "little") + b'{"w":' + b"[" * 399_995,
}


def header(**tensors: dict[str, object]) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def tensor(
    dtype: str = "U8", shape: object = (4,), data_offsets: object = (0, 4), **more: object
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets, **more}


JUNK_HEADERS = {
    "outside": header(w=tensor(shape=[5], data_offsets=[0, 5])) + bytes(4),
    "overlap": header(v=tensor(), w=tensor(shape=[2], data_offsets=[2, 4])) + bytes(4),
    "same place": header(v=tensor(), w=tensor()) + bytes(4),
    "hole": header(v=tensor(shape=[1], data_offsets=[0, 1]), w=tensor(shape=[2], data_offsets=[2, 4]))
    + bytes(4),
    "backwards": header(w=tensor(shape=[0], data_offsets=[4, 0])) + bytes(4),
    "wrong size": header(w=tensor(shape=[3])) + bytes(4),
    "unknown dtype of nothing": header(w=tensor("F4", [0], [0, 0])),
    "unknown dtype": header(w=tensor("F4", [8])) + bytes(4),
    "negative": header(v=tensor(shape=[-2, -2])) + bytes(4),
    "fraction": header(v=tensor(shape=[4.5])) + bytes(4),
    "many dimensions": header(v=tensor(shape=[1] * 64 + [4])) + bytes(4),
    "unknown key": header(v=tensor(code="x")) + bytes(4),
}


@pytest.mark.parametrize("sign", JUNK_PARTS)
def test_junk_of_a_peer_is_not_kept(tmp_path: Path, sign: str) -> None:
    kept = Checkpoints(tmp_path)
    parts = [parts_of(2)[0], (2, 5, JUNK_PARTS[sign])]
    problem = r"000002 was not written: the state of stage \[2, 5\) is no safetensors file: "
    with pytest.raises(CheckpointError, match=f"{problem}.*{sign}"):
        kept.write(2, parts, books_of(2))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("what", JUNK_HEADERS)
def test_a_header_that_lies_is_refused(tmp_path: Path, what: str) -> None:
    with pytest.raises(CheckpointError, match="no safetensors file"):
        Checkpoints(tmp_path).write(1, [(0, 1, JUNK_HEADERS[what])], books_of(1))


def test_junk_under_the_right_hash_is_found_when_read(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    write(kept, 1, 2)
    place, junk = tmp_path / "checkpoints/000002", JUNK_HEADERS["hole"]
    (place / "part-0.safetensors").write_bytes(junk)
    manifest = parse_manifest((place / MANIFEST).read_bytes(), 2)
    first, *others = manifest.parts
    parts = (msgspec.structs.replace(first, content=name_blob(junk)), *others)
    sealed = seal_manifest(2, msgspec.structs.replace(manifest, parts=parts))
    (place / MANIFEST).write_bytes(sealed)
    check_content(kept.find(), 1)
    assert "part-0.safetensors is no safetensors file: 'w' has a place" in kept.faults[0]


@pytest.mark.parametrize("forger", [b"", b"f" * 32])
def test_a_run_with_a_key_reads_only_what_it_signed(tmp_path: Path, forger: bytes) -> None:
    kept = Checkpoints(tmp_path, key=b"k" * 32)
    write(kept, 1, 2)
    check_content(kept.find(), 2)
    place = tmp_path / "checkpoints/000002" / MANIFEST
    manifest = parse_manifest(place.read_bytes(), 2, b"k" * 32)
    place.write_bytes(seal_manifest(2, msgspec.structs.replace(manifest, score=0.0), forger))
    check_content(kept.find(), 1)
    assert "was not signed with the key of this run's hub.json" in kept.faults[0]
    assert kept.find_best() is None
    check_content(Checkpoints(tmp_path).find(), 2)  # who has no key can only see that it is whole


@pytest.mark.parametrize(
    "borders", [[], [(0, 0)], [(1, 2)], [(0, 2), (3, 4)], [(0, 2), (1, 4)], [(2, 4), (0, 2)]]
)
def test_parts_that_are_no_line_are_refused(tmp_path: Path, borders: list[tuple[int, int]]) -> None:
    part = parts_of(1)[0][2]
    with pytest.raises(CheckpointError, match="not the stages of a line"):
        Checkpoints(tmp_path).write(1, [(*border, part) for border in borders], books_of(1))


BAD_LEASES = {
    "of another job": [{"num_samples": 21}, {"num_epochs": 4}, {"seed": 8}],
    "out of range": [
        {"next_place": 20},
        {"next_place": -1},
        {"next_epoch": 3},
        {"next_epoch": -1},
        {"next_number": -1},
        {"next_number": 2**70},
    ],
    "open, twice there or never": [
        {"open": [(9, 0, 8, 16, "c0")]},
        {"requeued": [(0, 0, 8), (0, 0, 8)]},
        {"requeued": [(0, 0, 8), (0, 4, 12)]},
        {"requeued": [(0, 0, 4), (0, 4, 8)]},
        {"requeued": [(1, 0, 4), (0, 0, 4)]},
        {"requeued": [(0, 8, 8)]},
        {"requeued": [(0, 8, 0)]},
        {"requeued": [(0, 0, 21)]},
        {"requeued": [(0, -1, 8)]},
        {"requeued": [(-1, 0, 8)]},
        {"requeued": [(2, 8, 9)]},
        {"requeued": [(3, 0, 8)]},
    ],
    "contradict": [
        {"requeued": []},
        {"requeued": [(0, 16, 20)]},
        {"requeued": [(1, 0, 8)]},
        {"requeued": [(0, 0, 16)]},
        {"counted": []},
        {"counted": [(0, 11), (2, 8)]},
        {"counted": [(0, 12), (2, 9)]},
        {"counted": [(0, 12), (2, 8), (1, 20)]},
        {"counted": [(0, 12), (2, 8), (2, 8)]},
        {"next_place": 9},
        {"next_epoch": 1},
    ],
    "Expected": [
        {"next_place": "1"},
        {"next_place": 1.5},
        {"next_place": True},
        {"requeued": [(0,)]},
        {"counted": None},
        {"open": [1]},
    ],
}


@pytest.mark.parametrize(
    ("sign", "change"), [(sign, change) for sign in BAD_LEASES for change in BAD_LEASES[sign]]
)
def test_leases_that_do_not_balance_are_refused(tmp_path: Path, sign: str, change: dict[str, object]) -> None:
    books = books_of(1)
    assert (books.leases["next_epoch"], books.leases["next_place"]) == (2, 8)
    assert (books.leases["requeued"], books.leases["counted"]) == ([(0, 0, 8)], [(0, 12), (2, 8)])
    books = msgspec.structs.replace(books, leases=books.leases | change)
    with pytest.raises(CheckpointError, match=f"000001 was not written: .*{sign}"):
        Checkpoints(tmp_path).write(1, parts_of(1), books)


@pytest.mark.parametrize(
    ("sign", "change"),
    [
        ("contradict", {"num_counted": 39}),
        ("Expected `int` >= 0", {"num_counted": -1}),
        ("Expected `int` >= 0", {"num_updates": -1}),
        ("Expected `int` >= 0", {"num_evaluated": -1}),
        ("Expected `int` >= 0", {"num_reported": -1}),
        ("Expected `int`", {"num_reported": 1.5}),
        ("Expected `float`", {"written_at": float("nan")}),
        ("Expected `object`", {"history": [1]}),
        ("Expected", {"history": [{"loss": "low"}]}),
        ("is that of checkpoint 000002", {"number": 2}),
        ("of another job", {"job": msgspec.structs.replace(JOB, epochs=4)}),
    ],
)
def test_books_that_cannot_be_are_refused(tmp_path: Path, sign: str, change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=sign):
        Checkpoints(tmp_path).write(1, parts_of(1), msgspec.structs.replace(books_of(1), **change))


@pytest.mark.parametrize(("num_done", "num_back"), [(0, 0), (9, 0), (0, 9), (3, 0), (2, 1), (8, 1), (4, 5)])
def test_books_of_any_moment_are_kept(tmp_path: Path, num_done: int, num_back: int) -> None:
    kept = Checkpoints(tmp_path)
    books = books_of(1, num_done, num_back)
    kept.write(1, parts_of(1), books)
    assert kept.find().books == books


def test_a_number_that_is_none_is_read_as_unknown(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    kept.write(1, parts_of(1), books_of(1, history=[{"loss": float("nan"), "epoch": 1}]))
    assert kept.find().books.history == [{"loss": None, "epoch": 1}]


def test_junk_is_no_manifest() -> None:
    sealed = b'{"format":2,"number":1,"hash":"","manifest":'
    for junk in (b"", b"{}", b"\xff", sealed + b"[" * 100_000, sealed + b"[]}"):
        with pytest.raises(ValueError, match=r"manifest\.json cannot be used"):
            parse_manifest(junk, 1)


def test_tensors_that_are_left_out_are_not_written(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    kept.write(1, parts_of(1), books_of(1), left_out={"tied", "optimizer/momentum/tied", "bias"})
    assert [tensor.name for tensor in kept.find().read()] == ["seen"]


def test_the_same_job_fits_and_another_is_told_apart() -> None:
    def difference(**changes: object) -> str:
        return find_difference(JOB, msgspec.structs.replace(JOB, **changes)) or ""

    assert find_difference(JOB, msgspec.structs.replace(JOB)) is None
    assert "of model 'toy', this job's is 'gpt'" in difference(model="gpt", state="", epochs=9)
    assert "other names, dtypes or shapes" in difference(state="cd" * 32, epochs=9)
    assert "num_samples=20, not 21; give 20 training samples" in difference(num_samples=21, batch_size=1)
    assert "batch_size=4, not 8; set batch_size=4, or begin a new run" in difference(batch_size=8, epochs=1)
    assert difference(epochs=9) == ""  # it may go on for longer
    assert "seed=7, not 1; set seed=7" in difference(seed=1)
    lean = msgspec.structs.replace(JOB, frozen="ef" * 32)
    assert find_difference(lean, lean) is None
    assert find_difference(JOB, lean) is None  # it holds all weights itself
    assert "the frozen weights are not those" in (find_difference(lean, JOB) or "")


def test_the_hash_of_a_state_is_of_names_dtypes_and_shapes_in_any_order() -> None:
    weight = StateEntry("w", PARAMETER, "float32", (2, 3), (0,))
    bias = StateEntry("b", PARAMETER, "float32", (3,), (0,))
    assert hash_state([weight, bias]) == hash_state([bias, weight])
    others = [
        [weight],
        [weight, StateEntry("c", PARAMETER, "float32", (3,), (0,))],
        [weight, StateEntry("b", PARAMETER, "float16", (3,), (0,))],
        [weight, StateEntry("b", PARAMETER, "float32", (3, 1), (0,))],
    ]
    assert len({hash_state(entries) for entries in [*others, [weight, bias]]}) == 5


def failing(number: int):
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, r"the disk of \S+ is full; make room for \S+ kB; older checkpoints are as they were"),
        (errno.EDQUOT, "is full"),
        (
            errno.EROFS,
            r"cannot be written \(Read-only file system\); let whoever runs the hub write there; older",
        ),
        (errno.EACCES, r"cannot be written \(Permission denied\)"),
        (errno.EIO, r"checkpoints: Input/output error; older"),
    ],
)
def test_what_the_disk_refuses_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, sentence: str
) -> None:
    kept = Checkpoints(tmp_path)
    write(kept, 1)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", failing(number))
        with pytest.raises(CheckpointError, match=f"checkpoint 000002 was not written: .*{sentence}"):
            write(kept, 2)
    assert names(tmp_path) == ["000001"]
    check_content(kept.find(), 1)


def test_a_file_system_without_fsync_of_folders_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync_files(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", sync_files)
    kept = Checkpoints(tmp_path)
    write(kept, 1)
    check_content(kept.find(), 1)


def test_a_place_that_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    kept = Checkpoints(tmp_path)
    for attempt in (kept.find, lambda: write(kept, 1)):
        with pytest.raises(CheckpointError, match="cannot be read: Not a directory; make it a folder"):
            attempt()
    assert issubclass(CheckpointError, RavnestError)
    assert CheckpointError.exit_code == 3


def test_an_empty_file_is_damage(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    write(kept, 1)
    os.truncate(tmp_path / "checkpoints/000001/part-0.safetensors", 0)
    os.truncate(tmp_path / "checkpoints/000001" / MANIFEST, 0)
    assert kept.find() is None


def big_parts(size_bytes: int) -> list[tuple[int, int, bytes]]:
    return [(0, 2, save({"w": np.zeros(size_bytes, np.uint8)})), parts_of(0)[1]]


@pytest.mark.needs_root
def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        kept = Checkpoints(disk)
        write(kept, 1)
        with pytest.raises(
            CheckpointError, match=r"000002 was not written: the disk of .* is full; make room for 2"
        ):
            kept.write(2, big_parts(2_000_000), books_of(2))
        assert names(disk) == ["000001"]
        check_content(kept.find(), 1)
        kept.write(2, big_parts(700_000), books_of(2))
        with pytest.raises(CheckpointError, match="is full"):
            kept.write(3, big_parts(700_000), books_of(3))
        assert names(disk) == ["000001", "000002"]
        assert kept.find().number == 2


@pytest.mark.needs_root
def test_a_read_only_disk_is_told_and_can_be_read(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        kept = Checkpoints(disk, keep=1)
        write(kept, 1)
        let_write(disk, is_allowed=False)
        with pytest.raises(CheckpointError, match=r"000002 was not written: .*Read-only file system"):
            write(kept, 2)
        check_content(kept.find(), 1)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            write(Checkpoints(disk / "deeper"), 1)


@contextlib.contextmanager
def somebody_else() -> Iterator[None]:
    """Let root, to whom nothing is closed, be nobody for a while."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_folder_of_somebody_else_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the folders above are closed to others
    kept = Checkpoints(Path())
    write(kept, 1)
    tmp_path.chmod(0o755)
    Path("checkpoints").chmod(0o555)
    try:
        with (
            somebody_else(),
            pytest.raises(CheckpointError, match=r"cannot be written \(Permission denied\)"),
        ):
            write(kept, 2)
        check_content(kept.find(), 1)
    finally:
        Path("checkpoints").chmod(0o755)


def test_it_needs_no_torch() -> None:
    code = "import sys, ravnest.requester.checkpoint_store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
