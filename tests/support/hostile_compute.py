"""A compute process that somebody has taken over: it has the fences of the real one, and does something else.

`start_hostile("network")` is what a ComputeProcess starts instead of its program. It answers the start like
the real one, then does what its first word says; what it finds out it tells as the reason of a failure.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ravnest.peer.compute_frames import (
    FencesClosed,
    Frame,
    FrameReader,
    StartOrder,
    Surveyed,
    SurveyOrder,
    pack_item,
    unpack_order,
    write_prefix,
)
from ravnest.peer.compute_protocol import ComputeFailed
from ravnest.peer.fences import FenceWishes, close_early, close_late, describe_fences

ROOT = Path(__file__).resolve().parents[2]
ROOM_BYTES = 200e6  # that the memory bomb may take
_STEP = 1 << 24


def start_hostile(action: str) -> Callable[[Sequence[str], socket.socket, Mapping[str, str]], object]:
    """Return what starts a process that does this."""

    def start(words: Sequence[str], end_of_pair: socket.socket, environment: Mapping[str, str]) -> object:
        code = "from tests.support.hostile_compute import run; import sys; run(*sys.argv[1:])"
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code, action, *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={
                **environment,
                "PYTHONPATH": str(ROOT),
                "TEST_HOME": str(Path.home()),
                "TEST_SCRIPT": sys.path[0],
            },
            pass_fds=(end_of_pair.fileno(),),
            start_new_session=True,
        )

    return start


def run(action: str, descriptor: str, wishes: str) -> None:
    """Be that process."""
    border = socket.socket(fileno=int(descriptor))
    given = json.loads(wishes)
    known = FenceWishes(**{key: tuple(x) if isinstance(x, list) else x for key, x in given.items()})
    early = close_early(known)
    while not isinstance(order := unpack_order(_read(border)), StartOrder):
        if isinstance(order, SurveyOrder):
            _send(border, Surveyed("cpu", 1e9, 1e9))
    late = close_late(known, ROOM_BYTES)
    _send(border, FencesClosed(*describe_fences([*early, *late])))
    found = ACTIONS[action](border, known)
    _send(border, ComputeFailed("RavnestError", json.dumps(found)))
    border.recv(1)  # until the agent ends it


def _read(border: socket.socket) -> Frame:
    reader = FrameReader(1 << 20)
    while True:
        count = border.recv_into(reader.room)
        if not count:
            os._exit(1)
        found = reader.receive(count)
        if found is not None:
            return found.with_files(())


def _send(border: socket.socket, item: object) -> None:
    frame = pack_item(item)
    border.sendall(write_prefix(frame) + frame.head + b"".join(frame.buffers))


def _try(act: Callable[[], object]) -> str:
    try:
        act()
    except OSError as error:
        return type(error).__name__
    return "done"


def _try_in_copy(act: Callable[[], object]) -> str:
    """Try something in a copy of this process, which leads no session."""
    if not (copy := os.fork()):
        os._exit(_try(act) == "done")
    return "done" if os.waitpid(copy, 0)[1] else "PermissionError"


def _escape(_: socket.socket, wishes: FenceWishes) -> dict[str, str]:
    """Try what the fences are against."""
    agent, home = wishes.agent, os.environ["TEST_HOME"]
    own = Path(wishes.write[0])
    return {
        "tcp": _try(lambda: socket.create_connection(("127.0.0.1", 9), timeout=1)),
        "udp": _try(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
        "unix": _try(lambda: socket.socket(socket.AF_UNIX)),
        "home": _try(lambda: os.listdir(home)),
        "folder of the agent's script": _try(lambda: os.listdir(os.environ["TEST_SCRIPT"])),
        "parent of its folder": _try(lambda: os.listdir(own.parent)),
        "memory of the agent": _try(lambda: open(f"/proc/{agent}/mem", "rb").close()),
        "environment of the agent": _try(lambda: open(f"/proc/{agent}/environ", "rb").close()),
        "signal to the agent": _try(lambda: os.kill(agent, signal.SIGURG)),
        "program": _try(lambda: subprocess.run(["/bin/true"], check=False)),
        "session of its own": _try_in_copy(os.setsid),
        "group of its own": _try_in_copy(lambda: os.setpgid(0, 0)),
        "write elsewhere": _try(lambda: open("/var/tmp/ravnest-escape", "w").close()),
        "link to a secret": _try(lambda: os.symlink("/etc/shadow", own / "link")),
        "its own folder": _try(lambda: (own / "file").write_bytes(b"x")),
        "secrets": " ".join(sorted(name for name in os.environ if "TOKEN" in name or "SECRET" in name)),
    }


def _bomb(_: socket.socket, __: FenceWishes) -> dict[str, int]:
    taken: list[bytearray] = []
    try:
        while True:
            taken.append(bytearray(b"x") * _STEP)
    except MemoryError:
        count = len(taken)
        taken.clear()
    return {"taken": count * _STEP}


def _explode(_: socket.socket, __: FenceWishes) -> None:
    taken = []
    while True:
        taken.append(bytearray(b"x") * _STEP)


def _talk_nonsense(border: socket.socket, _: FenceWishes) -> None:
    border.sendall(b"\x00" * 64)


def _speak_for_the_agent(border: socket.socket, _: FenceWishes) -> None:
    from ravnest.ids import HUB
    from ravnest.protocol.membership import Leave
    from ravnest.transfer.outbox import Outgoing

    _send(border, Outgoing(HUB, Leave(1, "I am the agent")))


def _end_in_a_frame(border: socket.socket, _: FenceWishes) -> None:
    border.sendall(b"\x09\x00\x00\x00\x00")
    os._exit(0)


def _crash(_: socket.socket, __: FenceWishes) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _leave_behind(_: socket.socket, wishes: FenceWishes) -> None:
    """Crash, and leave a copy behind that has all that this process has open."""
    copy = os.fork()
    if not copy:
        while True:
            signal.pause()
    Path(wishes.write[0], "copy").write_text(str(copy))
    os.kill(os.getpid(), signal.SIGSEGV)


def _claim_to_be_lost(border: socket.socket, _: FenceWishes) -> None:
    _send(border, ComputeFailed("ComputeLost", "it is \x1b[31mlost"))


def _hang(_: socket.socket, __: FenceWishes) -> None:
    """Spend time in one operation that nothing interrupts."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sum(range(10**15))


ACTIONS: dict[str, Callable[[socket.socket, FenceWishes], object]] = {
    "escape": _escape,
    "bomb": _bomb,
    "explode": _explode,
    "nonsense": _talk_nonsense,
    "impostor": _speak_for_the_agent,
    "cut": _end_in_a_frame,
    "crash": _crash,
    "hang": _hang,
    "copy": _leave_behind,
    "claim": _claim_to_be_lost,
}
