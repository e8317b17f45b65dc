"""A shelf keeps the newest snapshots in files that go with it, or in memory where there is no disk."""

import logging
import tempfile
from pathlib import Path

import pytest

from ravnest.ids import NodeId
from ravnest.peer.content import BlobStore
from ravnest.peer.stage_host import write_blob
from ravnest.protocol.placement import BlobRef, BlobRequest
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.blobs import Blobs, hash_pieces, name_blob

PEER = NodeId("peer")


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_keeps_the_newest_three_of_its_own_and_the_newest_backup(folder: Path) -> None:
    with BlobStore() as shelf:
        blobs = Blobs(shelf)
        refs = [blobs.keep(bytes([number]) * 1000) for number in range(5)]
        shelf.keep_backup(b"one")
        shelf.keep_backup(b"two")
        assert files(folder) == set(), "a peer that is killed leaves nothing"
        assert [ref in blobs for ref in refs] == [False, False, True, True, True]
        assert name_blob(b"one") not in blobs
        assert blobs.kept(refs[4]) == b"\4" * 1000
        blobs.keep(b"\2" * 1000)  # the same again is the newest
        blobs.keep(b"new")
        assert [ref in blobs for ref in refs] == [False, False, True, False, True]
        piece = blobs.serve(PEER, BlobRequest(refs[2].blob, 10, 5))
        for number in range(3):
            blobs.keep(b"newer %d" % number)
        assert bytes(piece.buffers[0]) == b"\2" * 5  # on its way, though its file is gone
    assert not any(folder.iterdir())


def test_a_backup_that_is_an_own_snapshot_outlives_it(folder: Path) -> None:
    with BlobStore() as shelf:
        blobs = Blobs(shelf)
        own = blobs.keep(b"own")
        shelf.keep_backup(b"own")
        for number in range(3):
            blobs.keep(b"newer %d" % number)
        assert blobs.kept(own) == b"own"
        shelf.keep_backup(b"another")
        assert own not in blobs


@pytest.mark.parametrize("fault", ["no folder", "full"])
def test_without_a_disk_it_keeps_them_in_memory_and_says_so_once(
    folder: Path, monkeypatch, caplog, fault: str
) -> None:
    def fail(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    if fault == "full":
        monkeypatch.setattr(Path, "write_bytes", fail)
    else:
        monkeypatch.setattr(
            tempfile, "TemporaryDirectory", lambda **_: (_ for _ in ()).throw(OSError("read-only"))
        )
    with caplog.at_level(logging.WARNING, "ravnest.peer.content"), BlobStore() as shelf:
        blobs = Blobs(shelf)
        refs = [blobs.keep(bytes([number]) * 10) for number in range(5)]
        shelf.keep_backup(b"backup")
        assert [ref in blobs for ref in refs] == [False, False, True, True, True]
        assert blobs.kept(refs[3]) == b"\3" * 10
        assert files(folder) == set()
    assert len(caplog.records) == 1
    assert "snapshots stay in memory" in caplog.text


def put_pieces(shelf: BlobStore, *pieces: Buffer) -> BlobRef:
    written = write_blob(shelf.folder, lambda: iter(pieces))
    assert shelf.adopt(written)
    return written.ref


def test_the_same_weights_twice_are_kept_though_their_one_file_was_taken_already(folder: Path) -> None:
    with BlobStore() as shelf:
        first = write_blob(shelf.folder, lambda: iter([b"weights"]))
        again = write_blob(shelf.folder, lambda: iter([b"weights"]))  # before the first was taken
        assert shelf.adopt(first)
        assert shelf.adopt(again)
        assert bytes(shelf.get(first.ref.blob).content) == b"weights"
        assert files(folder) == set()


def test_what_is_made_piece_by_piece_is_kept_like_what_is_whole(folder: Path) -> None:
    with BlobStore() as shelf:
        ref = put_pieces(shelf, b"abc", memoryview(b"defg"), b"")
        assert ref == name_blob(b"abcdefg")
        found = shelf.get(ref.blob)
        assert (bytes(found.content), found.hashes) == (b"abcdefg", hash_pieces(b"abcdefg"))
        assert files(folder) == set()
        again = put_pieces(shelf, b"abcdefg")
        assert again == ref
        others = [put_pieces(shelf, bytes([number])) for number in range(3)]
        assert ref.blob not in shelf
        assert all(each.blob in shelf for each in others)


def test_pieces_that_the_disk_does_not_take_stay_in_memory(folder: Path, caplog) -> None:
    with BlobStore() as shelf:
        (place,) = folder.iterdir()
        (place / "unfinished").symlink_to("/dev/full")
        ref = put_pieces(shelf, b"abc", b"d")
        assert shelf.get(ref.blob).content == b"abcd"
        assert files(folder) == set()
    assert "No space left on device" in caplog.text
