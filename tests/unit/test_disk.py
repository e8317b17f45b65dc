"""Reading a foreign file: bounded, never waiting, and a sentence for what is no file."""

import os

import pytest

from ravnest.disk import read_bounded, write_whole
from ravnest.errors import ConfigError


def test_a_file_of_exactly_the_most_bytes_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 8)
    assert read_bounded(tmp_path / "file", 8) == b"x" * 8
    with pytest.raises(ConfigError, match="cannot be read: it is larger than 7 B; give another file"):
        read_bounded(tmp_path / "file", 7)


def test_an_endless_file_is_not_read_to_its_end():
    with pytest.raises(ConfigError, match=r"/dev/zero cannot be read: it is larger than 1\.05 MB"):
        read_bounded("/dev/zero", 1 << 20, is_plain=False)
    with pytest.raises(ConfigError, match="/dev/zero cannot be read: it is no plain file"):
        read_bounded("/dev/zero", 1 << 20)


def test_nobody_waits_for_the_other_end_of_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe cannot be read: it is no plain file"):
        read_bounded(tmp_path / "pipe", 8)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda place: None, "does not exist"),
        (lambda place: place.mkdir(), "is a folder"),
        (lambda place: place.symlink_to(place), "cannot be read: Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_is_said_so(tmp_path, make, says):
    make(tmp_path / "place")
    with pytest.raises(ConfigError, match=says):
        read_bounded(tmp_path / "place", 8)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"before")
    write_whole(file, b"after", is_private=True)
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"after", 0o600)
    with pytest.raises(TypeError):
        write_whole(file, "no bytes")
    assert (file.read_bytes(), [each.name for each in tmp_path.iterdir()]) == (b"after", ["file"])
    write_whole(file, b"again")  # what was left unfinished is no obstacle
    assert (file.read_bytes(), [each.name for each in tmp_path.iterdir()]) == (b"again", ["file"])
