"""The life of `ravnest join` on virtual time: hours, battery, memory, what its provider says; its limits."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner

from ravnest.cli.common import CommandParts
from ravnest.cli.join import _Listening, _make_offer, _make_terms, _show_limits, _Stated
from ravnest.cli.lending_loop import (
    PAUSE,
    RESUME,
    Hours,
    Lending,
    Terms,
    find_running,
    read_hours,
    registered,
)
from ravnest.cli.main import program
from ravnest.config import ProgramTimeouts
from ravnest.errors import ConfigError, LinkError
from ravnest.net.identity import Token, new_keys, write_token
from ravnest.net.memory import run_virtual
from ravnest.net.transport import TransportLimits
from ravnest.peer.capabilities import check_gpu_memory, limit_gpu_memory
from ravnest.peer.compute_frames import Surveyed
from ravnest.peer.machine import Machine, MemoryWatch, read_cores

pytestmark = pytest.mark.skipif(PAUSE is None, reason="this system has no such signals")
DAY = 86_400.0
NIGHT = Hours(22 * 60, 7 * 60)
IN_THREAD = ("--compute", "thread", "--device", "cpu")  # these tests start no process
TAKEN_BACK = "its provider takes it back"
TOKEN = write_token(Token(("tcp://127.0.0.1:9",), new_keys().public, bytes(16)))


class Visit:
    """Stands for an agent: takes part until it leaves, or its job is done."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    async def run(self) -> str:
        self.ended = asyncio.get_running_loop().create_future()
        return await self.ended

    def leave(self, reason: str) -> None:
        self.reasons.append(reason)
        self.left_at = asyncio.get_running_loop().time()
        asyncio.get_running_loop().call_later(5.0, self.end, reason)  # to hand over takes a while

    def end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)


@dataclass
class Facts:
    """What a PC is like; they may change."""

    is_on_battery: bool = False
    memory_bytes: float = 0.0

    def change(self, **facts: object) -> None:
        """Let the PC be another."""
        vars(self).update(facts)

    @property
    def machine(self) -> Machine:
        """The PC of these facts."""
        return Machine(is_on_battery=lambda: self.is_on_battery, taken_memory_bytes=lambda: self.memory_bytes)


def minute_of_loop() -> int:
    """The minute of the day, which begins at noon."""
    return int(asyncio.get_running_loop().time() / 60 + 12 * 60) % (24 * 60)


class Scene:
    """A provider's PC whose clock begins at noon; `at` says what happens when."""

    def __init__(self, pc: Facts | None = None, **terms: object) -> None:
        defaults = {"name": "pc", "hours": (), "runs_on_battery": False, "memory": None}
        timeouts = ProgramTimeouts(lending_look_seconds=20.0)
        machine = (pc or Facts()).machine
        self.lending = Lending(Terms(**{**defaults, **terms}), machine, minute_of_loop, timeouts)
        self.visits: list[Visit] = []
        self.times: list[tuple[float, float]] = []  # of joining and leaving, in hours
        self.events: list[tuple[float, object]] = []

    def at(self, seconds: float, work: object) -> None:
        self.events.append((seconds, work))

    def run(self) -> tuple[int, str]:
        async def main() -> tuple[int, str]:
            for seconds, work in self.events:
                asyncio.get_running_loop().call_later(seconds, work)
            return await self.lending.run(self._take_part)

        return run_virtual(main())

    async def _take_part(self) -> str:
        loop = asyncio.get_running_loop()
        self.visits.append(Visit())
        came = loop.time()
        try:
            return await self.lending.attend(self.visits[-1])
        finally:
            self.times.append((round(came / 3600, 1), round(loop.time() / 3600, 1)))

    def finish(self) -> None:
        self.visits[-1].end("the job is done")


def raise_signal(number: int) -> object:
    return lambda: signal.raise_signal(number)


@pytest.fixture(autouse=True)
def _folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_without_terms_it_takes_part_until_the_job_is_done() -> None:
    scene = Scene()
    scene.at(100.0, scene.finish)
    assert scene.run() == (0, "the job is done")
    assert [visit.reasons for visit in scene.visits] == [[]]


def test_a_page_pauses_resumes_and_finishes_it_and_knows_where_it_is() -> None:
    scene, seen = Scene(), []

    def look() -> None:
        facts = scene.lending.facts
        seen.append((facts.is_paused, facts.leaving, facts.waits_for, facts.is_ending))

    for seconds, work in ((100.0, "pause"), (200.0, "resume"), (300.0, "finish")):
        scene.at(seconds, getattr(scene.lending, work))
        scene.at(seconds + 1.0, look)
    scene.at(150.0, look)
    assert scene.run() == (143, TAKEN_BACK)
    why = "its provider paused it"
    assert sorted(seen) == sorted(
        [
            (True, why, "", False),
            (True, "", why, False),
            (False, "", "", False),
            (False, TAKEN_BACK, "", True),
        ]
    )
    assert [visit.reasons for visit in scene.visits] == [[why], [TAKEN_BACK]]


def test_it_joins_at_its_hours_leaves_after_them_and_comes_back_the_next_day(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene(hours=(NIGHT,))
    scene.at(1.5 * DAY, scene.finish)
    assert scene.run() == (0, "the job is done")
    assert scene.times == [(10.0, 19.0), (34.0, 36.0)]
    assert scene.visits[0].reasons == ["it is only lent from 22:00 to 07:00"]
    waits = [line for line in caplog.messages if line.startswith("waits: ")]
    assert waits[0] == "waits: it is only lent from 22:00 to 07:00; it joins at 22:00, Ctrl-C ends it"
    assert len(waits) == 2


@pytest.mark.parametrize("runs_on_battery", [False, True])
def test_on_battery_it_stops_unless_told_to_go_on(runs_on_battery: bool) -> None:
    pc = Facts()
    scene = Scene(pc, runs_on_battery=runs_on_battery)
    scene.at(3600.0, partial(pc.change, is_on_battery=True))
    scene.at(7200.0, partial(pc.change, is_on_battery=False))
    scene.at(10_800.0, scene.finish)
    assert scene.run() == (0, "the job is done")
    assert scene.times == ([(0.0, 3.0)] if runs_on_battery else [(0.0, 1.0), (2.0, 3.0)])


def test_paused_it_leaves_once_and_joins_again_when_resumed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene()
    for seconds in (3600.0, 3601.0, 3700.0):
        scene.at(seconds, raise_signal(PAUSE))
    scene.at(7200.0, raise_signal(RESUME))
    scene.at(7300.0, raise_signal(RESUME))
    scene.at(10_800.0, scene.finish)
    assert scene.run() == (0, "the job is done")
    assert scene.times == [(0.0, 1.0), (2.0, 3.0)]
    assert [visit.reasons for visit in scene.visits] == [["its provider paused it"], []]
    assert (
        "waits: its provider paused it; it joins after: ravnest resume pc, Ctrl-C ends it" in caplog.messages
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_taken_back_it_leaves_politely_and_ends(number: int, code: int) -> None:
    scene = Scene()
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, PAUSE, RESUME)]
    scene.at(105.0, raise_signal(number))
    assert scene.run() == (code, TAKEN_BACK)
    assert (scene.visits[0].reasons, scene.visits[0].left_at) == ([TAKEN_BACK], 105.0)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, PAUSE, RESUME)] == before


def test_taken_back_twice_it_ends_at_once() -> None:
    scene = Scene()
    scene.at(100.0, raise_signal(signal.SIGINT))
    scene.at(101.0, raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        scene.run()
    assert scene.visits[0].reasons == [TAKEN_BACK]


def test_taken_back_while_it_leaves_for_a_pause_it_ends_and_hands_over_in_peace() -> None:
    scene = Scene()
    scene.at(100.0, raise_signal(PAUSE))
    scene.at(101.0, raise_signal(signal.SIGTERM))
    assert scene.run() == (143, "its provider paused it")
    assert len(scene.visits[0].reasons) == 1  # a second time would end it at once


def test_taken_back_while_it_waits_it_ends_without_joining() -> None:
    scene = Scene(hours=(NIGHT,))
    scene.at(100.0, raise_signal(signal.SIGINT))
    assert scene.run() == (130, TAKEN_BACK)
    assert not scene.visits


def test_what_grows_beyond_what_it_lends_is_warned_of_and_then_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pc = Facts()
    scene = Scene(pc, memory=MemoryWatch(2e9, 5e8))
    scene.at(50.0, partial(pc.change, memory_bytes=2.6e9))  # a moment too much
    scene.at(90.0, partial(pc.change, memory_bytes=2.4e9))
    scene.at(150.0, partial(pc.change, memory_bytes=3e9))
    code, reason = scene.run()
    allowed = "more than the 2 GB it lends and 500 MB for the program"
    assert (code, reason) == (7, f"it takes 3 GB of memory, {allowed}")
    assert scene.visits[0].reasons == [reason]
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [
        f"it takes {size} of memory, {allowed}; it leaves if that stays so" for size in ("2.6 GB", "3 GB")
    ]


def test_memory_that_is_freed_while_it_leaves_was_still_too_much() -> None:
    watch = MemoryWatch(2e9, 5e8)
    for taken in (3e9, 3e9, 3e9, 1e9):
        watch.look(taken)
    assert watch.must_leave


def test_what_ends_the_agent_ends_the_command() -> None:
    scene = Scene()
    scene.at(10.0, lambda: scene.visits[0].ended.set_exception(LinkError("the hub cannot be reached")))
    with pytest.raises(LinkError):
        scene.run()
    assert not find_running()


def test_a_peer_of_a_hub_on_this_pc_waits_for_it_and_ends_with_its_process() -> None:
    hub = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    scene = Scene(hub=psutil.Process(hub.pid))
    scene.at(100.0, lambda: scene.visits[0].reasons.append("still here"))
    scene.at(101.0, lambda: (hub.kill(), os.waitid(os.P_PID, hub.pid, os.WEXITED | os.WNOWAIT)))
    try:
        assert scene.run() == (4, "the hub that started it has ended")
    finally:
        hub.communicate()
    assert scene.visits[0].reasons == ["still here", "the hub that started it has ended"]


def test_a_running_one_is_found_and_the_dead_are_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "ravnest" / "peers"
    assert find_running() == []
    with registered("pc"):
        ((name, process),) = find_running()
        assert (name, process.pid) == ("pc", os.getpid())
        mine = folder / f"{os.getpid()}.json"
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        told = json.loads(mine.read_text())
        (folder / f"{child.pid}.json").write_text(mine.read_text())
        (folder / "junk.json").write_text("[")
        (folder / f"{os.getppid()}.json").write_text(json.dumps({**told, "started_at": 1.0}))  # another since
        assert [process.pid for _, process in find_running()] == [os.getpid()]
        assert [file.name for file in folder.iterdir()] == [mine.name]
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_and_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with registered("pc"):
        assert "ravnest pause will not find it" in caplog.text


def test_commands_tell_the_one_that_is_named_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(psutil.Process, "send_signal", lambda _, number: sent.append(number))
    with registered("pc"):
        for word, *name in (("pause",), ("resume", "pc"), ("finish",)):
            done = CliRunner().invoke(program, [word, *name])
            assert (done.exit_code, done.stdout) == (0, "")
            assert done.stderr == f"pc (process {os.getpid()}) was told to {word}\n"
        done = CliRunner().invoke(program, ["pause", "--json"])
        assert json.loads(done.stdout) == {
            "schema": "ravnest.lending/1",
            "told": "pause",
            "peers": [{"name": "pc", "process": os.getpid()}],
        }
        assert sent == [PAUSE, RESUME, signal.SIGTERM, PAUSE]
        done = CliRunner().invoke(program, ["pause", "laptop"])
        assert done.exit_code == 1
        assert "nothing is lent from this PC as laptop; it is lent as pc" in done.stderr
    done = CliRunner().invoke(program, ["finish"])
    assert (done.exit_code, "see that `ravnest join` runs" in done.stderr) == (1, True)


def test_of_several_lent_programs_none_is_told_without_a_name_or_a_question(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(psutil.Process, "send_signal", lambda each, _: sent.append(each.pid))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    parent = psutil.Process(os.getppid())
    with registered("pc"):
        other = {"name": "another run", "started_at": parent.create_time()}
        (tmp_path / f"ravnest/peers/{parent.pid}.json").write_text(json.dumps(other))
        both = {os.getpid(), parent.pid}
        for word in ("pause", "resume", "finish"):
            done = CliRunner().invoke(program, [word])
            assert (done.exit_code, sent) == (3, [])
            assert "2 programs lend from this PC: " in done.stderr
            assert f"another run (process {parent.pid})" in done.stderr
            assert f"ravnest {word} NAME, or all: ravnest {word} --all" in done.stderr
            assert CliRunner().invoke(program, [word, "--all"]).exit_code == 0
            assert set(sent) == both
            sent.clear()
        assert CliRunner().invoke(program, ["finish", "pc"]).exit_code == 0
        assert sent == [os.getpid()]


@pytest.mark.parametrize(
    ("text", "num_cores", "found"),
    [
        ("50 %", 8, 4),
        ("50%", 1, 1),
        ("25 %", 6, 2),
        ("100 %", 3, 3),
        ("2", 8, 2),
        ("1.5", 8, 2),
        ("0.1 %", 8, 1),
    ],
)
def test_cores_are_a_share_or_a_number(text: str, num_cores: int, found: int) -> None:
    assert read_cores(text, num_cores) == found


@pytest.mark.parametrize(
    "text", ["", "0", "0 %", "101 %", "9", "-1", "half", "1e9", "50 % of it", "nan", "٣"]
)
def test_what_is_no_part_of_the_cores_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="no part of this PC's 8 cores; give a share like '50 %'"):
        read_cores(text, 8)


@pytest.mark.parametrize(
    "text", ["", "22:00", "22-7", "24:00-07:00", "22:60-07:00", "22:00-24:01", "7:00-7:00", "٢:00-7:00"]
)
def test_what_is_no_span_of_the_day_is_told(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--hours .* (write it like 22:00-07:00|for the whole day leave it out)"
    ):
        read_hours(text)


def stated(**more: object) -> _Stated:
    return _Stated(
        **{
            "device": "cpu",
            "memory_bytes": 1e9,
            "flops_per_second": 1e9,
            "emulated_flops_per_second": None,
            "bytes_per_second": 5e6,
            "latency_seconds": 0.01,
            **more,
        }
    )


def offer(said: _Stated) -> object:
    surveyed = Surveyed(said.device, 1e9, 1e9)
    return _make_offer("pc", said, _Listening("", (), True), 60.0, surveyed)


def test_a_limited_upload_is_what_the_planner_hears() -> None:
    node = offer(stated(upload_bytes_per_second=1e6)).node
    assert (node.upload_bytes_per_second, node.download_bytes_per_second) == (1e6, 5e6)
    assert offer(stated(upload_bytes_per_second=9e6)).node.upload_bytes_per_second == 5e6


def test_what_is_lent_of_a_gpu_is_held_by_torch_and_of_the_pc_by_a_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = []
    small, large = (Machine(taken_memory_bytes=lambda x=x: x) for x in (0.0, 8e8))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6e9, 8e9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: shares.append(given))
    said = stated(device="cuda:0", memory_bytes=3e9, gpu_memory_bytes=2e9)
    made = offer(said)
    assert made.node.memory_bytes == made.limits.memory_bytes == 2e9
    assert _make_terms(made, said, small).memory == MemoryWatch(3e9, 5e8)
    alone = stated(device="cuda:0", memory_bytes=4e9)
    assert _make_terms(offer(alone), alone, small).memory is None
    limit_gpu_memory("cuda:0", 2e9)
    assert shares == [(0.25, "cuda:0")]
    on_cpu = stated()
    assert _make_terms(offer(on_cpu), on_cpu, small).memory == MemoryWatch(1e9, 5e8)
    # A large program is no stage that grows.
    assert _make_terms(offer(on_cpu), on_cpu, large).memory == MemoryWatch(1e9, 1e9)
    for device, lent in (("cpu", 1e9), ("cuda:0", 9e9)):
        with pytest.raises(ConfigError, match=r"--gpu-memory .* give"):
            check_gpu_memory(device, lent)


def test_the_links_of_a_real_join_are_held_to_the_upload() -> None:
    found: list[TransportLimits] = []

    def make_transport(*given: object) -> object:
        found.extend(each for each in given if isinstance(each, TransportLimits))
        raise LinkError("far enough")

    machine = Machine(return_freed_memory=lambda lent_bytes: None)
    parts = CommandParts(machine=machine, make_transport=make_transport)
    more = ["--memory", "1 GB", "--flops", "1 GFLOP/s", "--upload", "20 Mbit/s", "--quiet"]
    done = CliRunner().invoke(program, ["join", TOKEN, *IN_THREAD, *more], obj=parts)
    assert (done.exit_code, done.stderr) == (4, "error: far enough\n")
    assert [each.upload_bytes_per_second for each in found] == [2.5e6]


def test_what_is_held_to_is_shown() -> None:
    laptop, tower = Machine(has_battery=lambda: True), Machine(has_battery=lambda: False)
    said = stated(upload_bytes_per_second=2.5e6, hours=(NIGHT, Hours(720, 780)))
    expected = (
        "1 of 2 cores, 20 Mbit/s of upload, from 22:00 to 07:00 and from 12:00 to 13:00, not on battery"
    )
    assert _show_limits(said, "1 of 2 cores", laptop) == expected
    assert _show_limits(stated(), "", tower) == ""


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--memory", "lots", "write it like '8 GB'"),
        ("--memory", "0 GB", "is too little; give something like '8 GB'"),
        ("--gpu-memory", "-1 GB", "is too little; give something like '8 GB'"),
        ("--gpu-memory", "1 GB", "has no meaning on cpu"),
        ("--cpu", "all", "give a share like '50 %'"),
        ("--upload", "fast", "write it like '50 Mbit/s'"),
        ("--upload", "1 kbit/s", "give 100 kbit/s or more"),
        ("--hours", "at night", "write it like 22:00-07:00"),
        ("--on-battery", "maybe", "give stop or go"),
        ("--compile", "maybe", "give auto, on, off"),
    ],
)
def test_garbage_is_a_sentence_that_says_what_to_give(option: str, value: str, reason: str) -> None:
    done = CliRunner().invoke(program, ["join", TOKEN, *IN_THREAD, "--flops", "1 GFLOP/s", option, value])
    assert (done.exit_code, reason in done.stderr) == (3, True), done.output
    assert done.stderr.startswith("error: ")
