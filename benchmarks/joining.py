"""Peers that are started and hit one by one: `ravnest join`, forked from a process that has torch loaded.

To start one so costs a tenth of a second where a fresh interpreter needs seconds of a core. They emulate
their device, so that many have room on one PC.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO

PRELOADED = [
    "torch",
    "torch._dynamo",
    "ravnest.cli.main",
    "ravnest.net.zeromq",
    "ravnest.peer.agent",
    "ravnest.peer.compute_process",
    "ravnest.peer.compute",
]
_HUB_SECONDS = 600.0  # until the hub answers: a busy PC captures a model for minutes
_END_SECONDS = 120.0  # only one that hangs needs so long


class Peers:
    """Emulated PCs that join one hub; what they say lies in a folder."""

    def __init__(
        self, invitation: str, folder: Path, *, flops_per_second: float, memory_bytes: float
    ) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._invitation = invitation
        self._folder = folder
        self._device = ["--emulate", f"{flops_per_second} FLOP/s", "--memory", f"{memory_bytes} B"]
        self._processes: dict[str, ForkServerProcess] = {}

    @property
    def alive(self) -> Mapping[str, int]:
        """The process ids of those that run, by name."""
        return {name: each.pid for name, each in self._processes.items() if each.pid and each.is_alive()}

    def start(
        self, name: str, *, space: str = "", door: str = "127.0.0.1:0", options: Sequence[str] = ()
    ) -> None:
        """Start one, in a network namespace if one is named; its own options are stronger."""
        link = ["--bandwidth", "1 GB/s", "--latency", "100 us", "--listen", door]
        patience = ["--patience", f"{_HUB_SECONDS} s"]
        words = ["join", "--name", name, *self._device, *link, *patience, *options]
        given = (words, self._invitation, str(self._folder / f"{name}.txt"), space)
        process = self._context.Process(target=_join, args=given, daemon=True)
        process.start()
        self._processes[name] = process

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one."""
        pid = self._processes[name].pid
        assert pid is not None
        os.kill(pid, number)

    def said(self, name: str) -> str:
        """Return what one wrote to stderr."""
        return (self._folder / f"{name}.txt").read_text()

    def end(self, name: str) -> int | None:
        """Wait for the end of one; return its exit code."""
        self._processes[name].join(_END_SECONDS)
        return self._processes[name].exitcode

    def close(self) -> None:
        """End those that are left."""
        for process in self._processes.values():
            process.kill()
            process.join()


class ForkedCompute:
    """The process that computes, forked from one that has torch loaded, as `subprocess.Popen` shows it."""

    def __init__(
        self, words: Sequence[str], end_of_pair: socket.socket, environment: Mapping[str, str]
    ) -> None:
        come, gone = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _compute(words, end_of_pair, environment, gone)
        os.close(gone)
        self.stderr: IO[bytes] | None = open(come, "rb")  # noqa: SIM115 - whoever waits closes it
        self._code: int | None = None

    def kill(self) -> None:
        """End it at once."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Return its exit code, after its end."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _compute(
    words: Sequence[str], end_of_pair: socket.socket, environment: Mapping[str, str], said: int
) -> None:
    """Be the process that computes; nothing else of this process goes on."""
    try:
        os.setsid()
        os.dup2(said, 2)
        keep = {0, 1, 2, end_of_pair.fileno()}
        for each in map(int, os.listdir("/proc/self/fd")):
            if each not in keep:
                with contextlib.suppress(OSError):
                    os.close(each)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        from ravnest.peer.compute_program import run_compute

        run_compute(end_of_pair.detach(), words[2])
    finally:
        os._exit(70)


def _join(words: Sequence[str], token: str, path: str, space: str) -> None:
    with open(path, "w") as file:
        os.dup2(file.fileno(), 2)
    if space:
        from benchmarks.namespaces import enter

        enter(space)
    os.environ["RAVNEST_TOKEN"] = token
    import torch

    from ravnest.cli.common import CommandParts
    from ravnest.cli.main import program

    torch.set_num_threads(1)
    program(words, prog_name="ravnest", obj=CommandParts(start_compute=ForkedCompute))
