"""`ravnest` with the words and the environment of a command, forked from a process that has torch loaded.

An interpreter of its own needs two seconds of a core to load torch, a fork a tenth of one. That a command
also starts afresh is shown where people start it: test_demo, test_hub_command, test_recovery.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.joining import PRELOADED, ForkedCompute


class Forked:
    """A process as `subprocess.Popen` shows it; stderr is kept in a file if one is given."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], said: Path | None = None
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        given = (list(words), dict(environment), said)
        self._said = said
        self._process = context.Process(target=_run, args=given, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Wait for the end; return what was said."""
        self._process.join(timeout)
        assert self.returncode is not None, f"it still runs after {timeout} s"
        return None, self._said.read_text() if self._said else ""

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)


class ForkedPeer(Forked):
    """A process as `asyncio.create_subprocess_exec` returns it."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(words, environment)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._process.sentinel, self._end)

    def _end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        self._ended.set_result(None)

    async def wait(self) -> None:
        await asyncio.shield(self._ended)


async def fork(
    executable: str, module: str, name: str, *words: str, env: Mapping[str, str], **_: Any
) -> ForkedPeer:
    """Stand in for `asyncio.create_subprocess_exec` where it starts `python -m ravnest`."""
    assert (module, name) == ("-m", "ravnest")
    return ForkedPeer(words, env)


def _run(words: Sequence[str], environment: Mapping[str, str], said: Path | None) -> None:
    if said is not None:
        with said.open("w") as file:
            os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    from ravnest.cli.common import CommandParts
    from ravnest.cli.main import program

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    program(words, prog_name="ravnest", obj=CommandParts(start_compute=ForkedCompute))
