"""What a peer compiles lies where only its provider can write: torch runs what it finds there."""

import os
from pathlib import Path

import pytest

from ravnest.peer.machine import keep_compiled, make_own_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes of files are those of POSIX")


def test_a_new_folder_is_for_its_user_alone(tmp_path):
    folder = make_own_folder(tmp_path / "ravnest" / "compiled")
    assert folder == tmp_path / "ravnest" / "compiled"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert make_own_folder(folder) == folder


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, mode):
    folder = tmp_path / "compiled"
    folder.mkdir()
    folder.chmod(mode)
    other = make_own_folder(folder)
    assert other != folder
    assert other.stat().st_mode & 0o777 == 0o700
    other.rmdir()


def test_no_folder_is_inherited_from_the_program_that_starts_a_peer(tmp_path):
    wrong = {"TORCHINDUCTOR_CACHE_DIR": "/tmp/shared", "TRITON_CACHE_DIR": "/tmp/shared"}
    environment = {**wrong, "XDG_CACHE_HOME": str(tmp_path)}
    keep_compiled(environment)
    for name in wrong:
        assert Path(environment[name]).is_relative_to(tmp_path / "ravnest" / "compiled")
    assert int(environment["TORCHINDUCTOR_COMPILE_THREADS"]) >= 1
