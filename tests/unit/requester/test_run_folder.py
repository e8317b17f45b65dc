"""The folder of a run: the same invitation again, for nobody else to read, and no two hubs in one."""

import os
import stat
from datetime import date
from pathlib import Path

import msgspec
import psutil
import pytest

from ravnest.errors import ConfigError
from ravnest.requester.run_folder import (
    MODEL,
    check_unfinished,
    find_run,
    free_run,
    fresh_run,
    new_hub_file,
    open_run,
    read_hub_file,
    set_aside,
    write_hub_file,
)


def alive(**changes: object):
    """The file of a hub that a process runs which is there: this test's parent."""
    parent = psutil.Process(os.getppid())
    return msgspec.structs.replace(
        new_hub_file(), addresses=("tcp://127.0.0.1:7700",), pid=parent.pid, **changes
    ), parent.create_time()


def test_a_new_folder_is_for_nobody_else_to_look_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    open_run(tmp_path / "gpt")
    for folder in (tmp_path / "gpt", fresh_run("bert", date(2026, 1, 1))):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_opened_again_invites_with_the_same_token(tmp_path: Path) -> None:
    first = open_run(tmp_path / "runs/gpt")
    again = open_run(tmp_path / "runs/gpt")
    assert (again.secret, again.secret_key) == (first.secret, first.secret_key)
    assert open_run(tmp_path / "other").secret != first.secret


def test_only_its_user_may_read_what_invites(tmp_path: Path) -> None:
    open_run(tmp_path)
    assert stat.S_IMODE((tmp_path / "hub.json").stat().st_mode) == 0o600


def test_what_is_printed_of_it_holds_no_secret(tmp_path: Path) -> None:
    file = open_run(tmp_path)
    assert file.secret.hex() not in repr(file)
    assert file.secret_key.decode() not in repr(file)


def test_a_process_is_the_hub_only_if_it_started_then(tmp_path: Path) -> None:
    file, started_at = alive()
    assert msgspec.structs.replace(file, started_at=started_at).process.pid == os.getppid()
    assert msgspec.structs.replace(file, started_at=started_at - 60).process is None
    assert new_hub_file().process is None


def test_a_folder_whose_hub_runs_is_refused(tmp_path: Path) -> None:
    file, started_at = alive()
    write_hub_file(tmp_path, msgspec.structs.replace(file, started_at=started_at))
    with pytest.raises(ConfigError, match=r"a hub that runs now .*ravnest stop"):
        open_run(tmp_path)


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}.index.json"])
def test_a_finished_run_is_not_overwritten(tmp_path: Path, name: str) -> None:
    open_run(tmp_path)
    check_unfinished(tmp_path)
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(ConfigError, match=r"holds a finished run; .* go on with it: --resume"):
        check_unfinished(tmp_path)


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file cannot be written: Not a directory; give .* has room"):
        write_hub_file(tmp_path / "file", new_hub_file())
    with pytest.raises(ConfigError, match="cannot be written"):
        open_run(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_run(tmp_path / "file" / "below")


def test_junk_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        read_hub_file(tmp_path)
    (tmp_path / "hub.json").write_bytes(b"\xff{")
    with pytest.raises(ConfigError, match="damaged"):
        read_hub_file(tmp_path)


def test_new_runs_take_a_free_name_and_an_unfinished_one_is_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert free_run("my job/2") == Path("runs/my-job-2")
    open_run(free_run("gpt"))
    assert free_run("gpt") == Path("runs/gpt")
    Path("runs/gpt", MODEL).write_bytes(b"")
    assert free_run("gpt") == Path("runs/gpt-2")
    file, started_at = alive()
    Path("runs/gpt-2").mkdir()
    write_hub_file(Path("runs/gpt-2"), msgspec.structs.replace(file, started_at=started_at))
    assert free_run("gpt") == Path("runs/gpt-3")


def test_every_training_without_a_folder_gets_one_that_was_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = [fresh_run("my job", date(2026, 11, 16)) for _ in range(3)]
    assert [str(each) for each in made] == [f"runs/my-job-2026-11-16{end}" for end in ("", "-2", "-3")]
    assert all(each.is_dir() for each in made)
    Path("elsewhere").mkdir()
    Path("elsewhere/runs").write_text("no folder")
    monkeypatch.chdir("elsewhere")
    with pytest.raises(ConfigError, match=r"cannot be made: .*give --folder or --out"):
        fresh_run("gpt", date(2026, 11, 16))


def test_the_newest_run_is_meant_if_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run under runs/"):
        find_run(None)
    for age, name in enumerate(("new", "old")):
        open_run(Path("runs", name))
        os.utime(Path("runs", name, "hub.json"), (1000 - age, 1000 - age))
    assert find_run(None) == Path("runs/new")
    assert find_run("elsewhere") == Path("elsewhere")


def test_the_log_of_an_earlier_training_is_kept_aside_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    set_aside(tmp_path)
    assert not caplog.records
    for content in ("first", "second"):
        (tmp_path / "hub.sqlite").write_text(content)
        set_aside(tmp_path)
    assert not (tmp_path / "hub.sqlite").exists()
    kept = [(tmp_path / f"earlier-{number}/hub.sqlite").read_text() for number in (1, 2)]
    assert kept == ["first", "second"]
    assert "it is kept in earlier-2, and a new one begins; --resume" in caplog.text
