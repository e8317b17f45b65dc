"""Compute as a real process: it crashes, hangs, bombs and lies, and the agent survives; its fences hold."""

import asyncio
import contextlib
import errno
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ravnest.config import PeerTimeouts
from ravnest.errors import ComputeLost, GuardError, RavnestError
from ravnest.net.identity import Token, new_keys, write_token
from ravnest.peer.compute_channel import FrameChannel
from ravnest.peer.compute_frames import MOST_HEAD_BYTES, Frame, SurveyOrder, write_prefix
from ravnest.peer.compute_process import ComputeProcess
from ravnest.peer.compute_protocol import ComputeFailed, ComputeSetup, FromCompute, ProviderLimits
from tests.support.hostile_compute import ROOM_BYTES, ROOT, start_hostile

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the fences are Linux's"),
    pytest.mark.timeout(300),
]
SETUP = ProviderLimits(1e9)


def run(compute: ComputeProcess, folder: Path, act=None) -> RavnestError | None:
    """Have it compute until it fails, or is closed; return the failure."""

    async def main() -> RavnestError | None:
        found: list[FromCompute] = []
        running = asyncio.create_task(compute.run(ComputeSetup(SETUP, str(folder)), found.append))
        if act is not None:
            while compute.fences is None and not running.done():
                await asyncio.wait([running], timeout=0.02)
            act()
        await running
        compute.close()  # as an agent does in the end
        failures = [each.error for each in found if isinstance(each, ComputeFailed)]
        assert len(found) == len(failures) <= 1
        return failures[0] if failures else None

    return asyncio.run(main())


def hostile(action: str, folder: Path, **timeouts: float) -> ComputeProcess:
    return ComputeProcess(str(folder), PeerTimeouts(**timeouts), start=start_hostile(action))


def test_a_real_process_looks_at_the_pc_holds_no_secret_and_survives_its_own_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAVNEST_TOKEN", "rvn1_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    compute = ComputeProcess(str(tmp_path))
    surveyed = compute.survey(SurveyOrder("cpu", 1, None, False))
    assert (surveyed.device, surveyed.flops_per_second) == ("cpu", None)
    assert surveyed.memory_bytes > 0
    pid = compute.process_id
    assert "secret" not in Path(f"/proc/{pid}/environ").read_text()

    def kill() -> None:
        status = Path(f"/proc/{pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status
        os.kill(pid, signal.SIGKILL)

    lost = run(compute, tmp_path, kill)
    assert isinstance(lost, ComputeLost)
    assert "SIGKILL" in str(lost)
    assert compute.fences is not None
    assert len(compute.fences.held) == 8
    assert compute.fences.missing == ()
    assert not psutil.pid_exists(pid)


def test_nothing_leads_out_of_the_fences(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path_factory.mktemp("script"))
    monkeypatch.setenv("RAVNEST_TOKEN", "rvn1_secret")
    monkeypatch.setenv("TORCH_SECRET", "secret")
    found = json.loads(str(run(hostile("escape", tmp_path), tmp_path)))
    assert found.pop("secrets") == ""
    assert found.pop("its own folder") == "done"
    assert set(found.values()) == {"PermissionError"}, found


@pytest.mark.needs_root
def test_it_reads_what_it_may_also_when_the_kernel_has_forgotten_the_files() -> None:
    """A PC that is short of memory drops entries of /proc, and a fence may hang on them."""
    read = "[open(path).read(1) for path in ('/proc/meminfo', '/proc/self/status', '/proc/stat')]"
    code = f"""
import os
from ravnest.peer.fences import FenceWishes, close_early

assert all(each.holds for each in close_early(FenceWishes(os.getppid())))
{read}
print("fenced", flush=True)
input()
{read}
"""
    fenced = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert fenced.stdout is not None
    assert fenced.stdout.readline() == "fenced\n"
    Path("/proc/sys/vm/drop_caches").write_text("2")  # entries of folders, as a kernel short of memory does
    fenced.communicate("\n", timeout=60)
    assert fenced.returncode == 0


def test_a_memory_bomb_gets_what_is_lent_and_its_crash_is_told(tmp_path: Path) -> None:
    taken = json.loads(str(run(hostile("bomb", tmp_path), tmp_path)))["taken"]
    assert 0.5 * ROOM_BYTES < taken <= ROOM_BYTES
    lost = run(hostile("explode", tmp_path), tmp_path)
    assert isinstance(lost, ComputeLost)
    assert "MemoryError" in str(lost)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("nonsense", "the border to it is broken: a frame with a head of"),
        ("impostor", "the border to it is broken: a Leave does not cross this way"),
        ("cut", "the border to it is broken: it ends in the middle of a frame"),
        ("crash", "an operation crashed (SIGSEGV)"),
    ],
)
def test_what_is_no_frame_or_no_life_ends_it_with_a_sentence(
    tmp_path: Path, action: str, reason: str
) -> None:
    lost = run(hostile(action, tmp_path), tmp_path)
    assert isinstance(lost, ComputeLost)
    assert reason in str(lost)


def test_what_it_leaves_behind_ends_with_it_and_holds_nobody_up(tmp_path: Path) -> None:
    lost = run(hostile("copy", tmp_path, compute_end_seconds=60.0), tmp_path)
    assert isinstance(lost, ComputeLost)
    assert "SIGSEGV" in str(lost)
    with contextlib.suppress(ProcessLookupError):  # it has ended, and its exit code was asked for
        copy = os.pidfd_open(int((tmp_path / "copy").read_text()))
        try:
            assert select.select([copy], [], [], 60.0)[0], "the copy lives on"
        finally:
            os.close(copy)


def test_one_that_cannot_be_started_is_lost_and_one_that_never_answers_is_ended(tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "too many processes")

    lost = run(ComputeProcess(str(tmp_path), start=refuse), tmp_path)
    assert isinstance(lost, ComputeLost)
    assert "too many processes" in str(lost)
    started, held = [], []

    def start(words, end_of_pair, environment):
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        held.append(end_of_pair.dup())  # so the border stays open, and nothing comes
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True))
        return started[0]

    compute = ComputeProcess(str(tmp_path), PeerTimeouts(compute_start_seconds=0.05), start=start)
    with pytest.raises(ComputeLost, match="has not loaded torch"):
        compute.survey(SurveyOrder("cpu"))
    assert started[0].returncode == -signal.SIGKILL
    assert compute.process_id is None
    held[0].close()


@pytest.mark.parametrize("frame", [Frame(b"x" * MOST_HEAD_BYTES + b"x"), None])
def test_a_border_that_breaks_on_either_side_is_told_with_a_reason(frame: Frame | None) -> None:
    """Of a frame that cannot be sent, and of one that its receiver cannot bear."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    here, there = socket.socketpair()

    def receive(_: Frame) -> None:
        raise MemoryError("no room")

    channel = FrameChannel(here, receive, told.put, most_bytes=100, takes_files=False)
    channel.start()
    if frame is not None:
        channel.send(frame)
        assert "too large to cross" in told.get()
    else:
        there.sendall(write_prefix(Frame(b"x")) + b"x")
        assert told.get() == "MemoryError: no room"
    channel.close()
    there.close()


@pytest.mark.parametrize("action", ["crash", "claim"])
def test_the_third_crash_with_one_stage_is_the_last(tmp_path: Path, action: str) -> None:
    """A process that calls itself lost counts as one that has crashed."""
    compute = hostile(action, tmp_path)
    assert isinstance(run(compute, tmp_path), ComputeLost)
    assert isinstance(run(compute, tmp_path), ComputeLost)
    last = run(compute, tmp_path)
    assert isinstance(last, GuardError)
    assert "3 times with the same stage" in str(last)
    assert "\x1b" not in str(last)


def test_one_that_hangs_is_ended_by_the_agent(tmp_path: Path) -> None:
    compute = hostile("hang", tmp_path, compute_query_seconds=0.05, compute_silence_seconds=0.5)
    lost = run(compute, tmp_path)
    assert isinstance(lost, ComputeLost)
    assert "came to no end with one piece of work" in str(lost)


def test_one_that_hangs_is_closed_at_once(tmp_path: Path) -> None:
    """The time is the process's own: nothing is waited for but its end."""
    compute = hostile("hang", tmp_path)
    closed = []

    def close() -> None:
        closed.append(psutil.Process(compute.process_id))
        compute.close()

    assert run(compute, tmp_path, close) is None
    assert not closed[0].is_running()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_provider_gets_the_pc_back_in_the_middle_of_an_operation(tmp_path: Path, number: int) -> None:
    token = write_token(Token(("tcp://127.0.0.1:9",), new_keys().public, bytes(16)))
    code = f"""
from ravnest.cli.common import CommandParts
from ravnest.cli.main import program
from tests.support.hostile_compute import start_hostile

program(["join", {token!r}], obj=CommandParts(start_compute=start_hostile("hang")))
"""
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    pipes = {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, **pipes) as peer:
        try:
            assert peer.stderr is not None
            said = iter(peer.stderr)
            assert any("no way to the hub" in line for line in said)
            (compute,) = psutil.Process(peer.pid).children()
            os.kill(peer.pid, number)
            assert any("ended: its provider takes it back" in line for line in said)
            assert peer.wait(60) == 128 + number
            assert not compute.is_running()
        finally:
            peer.kill()


def test_it_ends_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio
from ravnest.peer.compute_process import ComputeProcess
from ravnest.peer.compute_protocol import ComputeSetup, ProviderLimits
from tests.support.hostile_compute import start_hostile

async def main():
    compute = ComputeProcess({str(tmp_path)!r}, start=start_hostile("hang"))
    running = asyncio.create_task(compute.run(ComputeSetup(ProviderLimits(1e9)), print))
    while compute.fences is None:
        await asyncio.wait([running], timeout=0.02)
    print(compute.process_id, flush=True)
    await running

asyncio.run(main())
"""
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert agent.stdout is not None
    with agent.stdout:
        pid = int(agent.stdout.readline())
        handle = os.pidfd_open(pid)
        agent.kill()
        agent.wait()
    ended, _, _ = select.select([handle], [], [], 60)
    os.close(handle)
    assert ended, "compute outlives its agent"


def test_the_program_with_the_keys_loads_no_torch() -> None:
    """It goes as far as a link; what computes has said by then what this PC has."""
    token = write_token(Token(("tcp://127.0.0.1:9",), new_keys().public, bytes(16)))
    code = f"""
import sys
from click.testing import CliRunner
from ravnest.cli.common import CommandParts
from ravnest.cli.main import program
from ravnest.errors import LinkError

def make_transport(*_):
    raise LinkError("far enough")

done = CliRunner().invoke(program, ["join", {token!r}], obj=CommandParts(make_transport=make_transport))
assert done.exit_code == 4, done.output
assert "lends" in done.stderr
assert "ravnest.peer.agent" in sys.modules
assert "torch" not in sys.modules
with open("/proc/self/maps") as maps:
    assert "libtorch" not in maps.read()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_program_that_cannot_start_is_a_sentence(tmp_path: Path) -> None:
    def start(words, end_of_pair, environment):
        return subprocess.Popen(
            [sys.executable, "-c", "raise SystemExit('no torch here')"], stderr=subprocess.PIPE
        )

    compute = ComputeProcess(str(tmp_path), start=start)
    with pytest.raises(ComputeLost, match="compute cannot start: it ended with code 1: no torch here"):
        compute.survey(SurveyOrder("cpu"))


def test_what_was_started_for_nothing_ends_with_stop(tmp_path: Path) -> None:
    compute = hostile("hang", tmp_path)
    began = time.monotonic()
    compute.stop()
    assert compute.process_id is None
    assert time.monotonic() - began < 60
