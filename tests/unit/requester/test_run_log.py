"""The log of a run: every notice on one plain line, files of bounded size, nothing lost on the terminal."""

import json
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner

from ravnest.cli.main import program
from ravnest.errors import ConfigError
from ravnest.hub.coordinator.notices import DashboardOpened, Joined, Left, Trained
from ravnest.requester.run_folder import open_run
from ravnest.requester.run_log import LOG_FILE, LogReader, RunLog


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def read(folder: Path) -> list[str]:
    return [line.split(": ", 1)[1] for line in LogReader(folder).read_all()]


def test_notices_are_written_progress_now_and_then_and_the_link_never(tmp_path: Path) -> None:
    clock = Clock()
    log = RunLog(clock=clock)
    log.observe_notice(Joined("early"))  # it is not open, and keeps nothing
    with log.writing(tmp_path):
        log.observe_notice(Joined("a"))
        log.observe_notice(DashboardOpened("http://127.0.0.1:7780/?token=secret", False))
        for number in range(5):
            log.observe_notice(Trained(64 * number, 256, 1, 2.5))
        clock.now = 60.0
        log.observe_notice(Trained(256, 256, 1, 1.5))
    log.observe_notice(Joined("late"))
    found = read(tmp_path)
    assert found[0] == "a joined"
    assert len(found) == 3
    assert "secret" not in (tmp_path / LOG_FILE).read_text()


def test_names_of_others_stay_on_one_line_and_say_nothing_to_a_terminal(tmp_path: Path) -> None:
    log = RunLog()
    with log.writing(tmp_path):
        log.observe_notice(Left("evil\nname\x1b[2J", "a reason\r\n2026-11-17 00:00:00,000 INFO forged: line"))
    (line,) = (tmp_path / LOG_FILE).read_text().splitlines()
    assert "\x1b" not in line
    assert "forged" in line


def test_what_the_program_says_is_written_and_warnings_are_still_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, logger = logging.getLogger(), logging.getLogger("ravnest.test")
    handlers, root.handlers = root.handlers, []  # as in a program that set nothing up
    try:
        with RunLog().writing(tmp_path):
            logger.warning("the disk is nearly full")
            logger.debug("not asked for")
    finally:
        root.handlers = handlers
    assert read(tmp_path) == ["the disk is nearly full"]
    assert capsys.readouterr().err.count("the disk is nearly full") == 1
    assert logging.getLogger("ravnest").handlers == []


def test_the_files_are_bounded_and_all_of_them_are_read(tmp_path: Path) -> None:
    log = RunLog()
    with log.writing(tmp_path):
        for number in range(7):
            log.observe_notice(Joined(f"{number:07}" + "x" * 2_000_000))
    sizes = [file.stat().st_size for file in tmp_path.glob(f"{LOG_FILE}*")]
    assert len(sizes) == 3
    assert sum(sizes) < 14e6
    found = read(tmp_path)
    numbers = [int(line[:7]) for line in found]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 6


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    log = RunLog()
    with log.writing(tmp_path / "missing"):
        log.observe_notice(Joined("a"))
    with pytest.raises(ConfigError, match=f"no {LOG_FILE}"):
        LogReader(tmp_path / "missing")


def test_a_reader_goes_on_where_it_was_and_takes_up_a_new_file(tmp_path: Path) -> None:
    file = tmp_path / LOG_FILE
    file.write_bytes(b"one\ntwo\nhal")
    reader = LogReader(tmp_path)
    assert reader.read_new() == ["one", "two"]
    with file.open("ab") as more:
        more.write(b"f\nthree\n")
    assert reader.read_new() == ["half", "three"]
    assert reader.read_new() == []
    file.replace(tmp_path / f"{LOG_FILE}.1")
    file.write_bytes(b"four\n")
    assert reader.read_new() == ["four"]


def test_the_command_prints_the_last_lines_with_the_words(tmp_path: Path) -> None:
    open_run(tmp_path)
    log = RunLog()
    with log.writing(tmp_path):
        for name in ("ana", "bob", "cem"):
            log.observe_notice(Joined(name))
            log.observe_notice(Left(name, "its provider takes it back"))
    runner = CliRunner()

    def run(*options: str) -> list[str]:
        done = runner.invoke(program, ["logs", str(tmp_path), *options])
        assert done.exit_code == 0, done.output
        return [line.split(": ", 1)[1] for line in done.output.splitlines()]

    assert len(run()) == 6
    assert run("--lines", "1") == ["cem left: its provider takes it back"]
    assert run("--find", "JOINED", "--lines", "2") == ["bob joined", "cem joined"]
    assert run("--follow", "--lines", "0") == [], "no hub is at work: there is nothing to follow"
    (shown,) = runner.invoke(program, ["logs", str(tmp_path), "--lines", "1", "--json"]).output.splitlines()
    known = json.loads(shown)
    assert (known["schema"], known["level"], known["source"]) == ("ravnest.logs/1", "INFO", "ravnest.notices")
    assert known["text"] == "cem left: its provider takes it back"
    assert runner.invoke(program, ["logs", str(tmp_path), "--lines", "-1"]).exit_code == 3
    assert runner.invoke(program, ["logs", str(tmp_path / "none")]).exit_code == 3
