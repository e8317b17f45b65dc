"""The page of a lent PC: recorded in the agent's event loop, shown by the web's thread.

Every two seconds a thread looks at what the PC does, whether a page is open or not: curves need it. All else
is a few additions per message.
"""

import asyncio
import contextlib
import logging
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

import psutil  # type: ignore[import-untyped]

from ravnest.config import TIMEOUTS, ProgramTimeouts
from ravnest.errors import RavnestError
from ravnest.model.blueprint.blueprint_json import read_blueprint
from ravnest.net.transport import PeerId, Transport
from ravnest.peer.compute_protocol import Compute
from ravnest.provider.lending_documents import GpuUse, HostedProgram, LentTerms, MachineUse, OperatorCount
from ravnest.provider.lending_recorder import LendingRecorder, MeteredTransport, WatchedCompute
from ravnest.provider.lending_site import LendingControl, LendingReplica, make_lending_site
from ravnest.web.pages import Pages
from ravnest.web.site import Site
from ravnest.web.updates import GrowthCutter
from ravnest.web.web_server import WebServer, bind_address, is_for_others, make_gate, show_link

_GPU_PROGRAM = "nvidia-smi"
_GPU_FIELDS = "name,utilization.gpu,memory.used,memory.total,temperature.gpu"
_MIB = 1 << 20


class UseReader:
    """Reads what this program takes of the PC, since the last time; one thread at a time.

    A GPU is asked for by NVIDIA's own program, since torch may run in another process than this one.
    """

    def __init__(self, device: str = "cpu", timeouts: ProgramTimeouts = TIMEOUTS.program) -> None:
        self._timeouts = timeouts
        self._gpu = device.partition(":")[2] or "0" if device.startswith("cuda") else None
        self._process = psutil.Process()
        self._known: dict[tuple[int, float], float] = {}  # CPU seconds by process
        self._read_at: float | None = None

    def read(self, now: float) -> MachineUse:
        """Return what is used now; shares are of the time since the last call."""
        memory, seconds = 0.0, 0.0
        found: dict[tuple[int, float], float] = {}
        for each in (self._process, *self._process.children(recursive=True)):
            try:
                with each.oneshot():
                    times, key = each.cpu_times(), (each.pid, each.create_time())
                    memory += each.memory_info().rss
            except psutil.Error:  # it has just ended
                continue
            found[key] = times.user + times.system
            seconds += found[key] - self._known.get(key, 0.0 if self._known else found[key])
        since = self._read_at
        cores = None if since is None else max(0.0, seconds) / max(1e-3, now - since)
        shares = psutil.cpu_percent(interval=None) / 100.0
        self._known, self._read_at = found, now
        total = float(psutil.virtual_memory().total)
        num_cores = psutil.cpu_count() or 1
        return MachineUse(
            memory, total, cores, num_cores, None if since is None else shares, self._read_gpu()
        )

    def _read_gpu(self) -> GpuUse | None:
        program = None if self._gpu is None else shutil.which(_GPU_PROGRAM)
        if program is None:
            return None
        command = [
            program,
            f"--id={self._gpu}",
            f"--query-gpu={_GPU_FIELDS}",
            "--format=csv,noheader,nounits",
        ]
        try:
            done = subprocess.run(  # noqa: S603 - a number and our own words
                command, capture_output=True, timeout=self._timeouts.gpu_answer_seconds, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return parse_gpu(done.stdout.decode(errors="replace")) if done.returncode == 0 else None


def parse_gpu(text: str) -> GpuUse | None:
    """Return what a line of NVIDIA's program says; what it does not know is None."""
    parts = [part.strip() for part in text.partition("\n")[0].rsplit(",", 4)]
    if len(parts) != 5:
        return None
    share, used, total, celsius = map(_number, parts[1:])
    if used is None or total is None:
        return None
    return GpuUse(parts[0], None if share is None else share / 100.0, used * _MIB, total * _MIB, celsius)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


LENDING_PORT = 7781
_MOST_OPERATORS = 40
_SOURCES = ("ravnest.peer", "ravnest.cli.lending_loop")  # whose lines are the history


class LendingPage:
    """Open it around the life of `ravnest join`, in its event loop."""

    def __init__(
        self,
        terms: LentTerms,
        control: LendingControl,
        address: str,
        timeouts: ProgramTimeouts = TIMEOUTS.program,
    ) -> None:
        self._address, self._control, self._timeouts = address, control, timeouts
        bound = bind_address(address, LENDING_PORT, "page", "")
        self._gate = make_gate(bound, address)
        self._web = WebServer(bound, self._make_site, timeouts)
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._recorder = LendingRecorder(terms, now, _wall_clock() - now)
        self._cutter, self._reader = GrowthCutter(), UseReader(terms.device, timeouts)
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._history = _HistoryHandler(self._say)

    @property
    def link(self) -> str:
        """What to open in a browser; whoever has it can see what runs and take the PC back."""
        return show_link(self._gate, self._address)

    @property
    def is_for_others(self) -> bool:
        """Whether other PCs can reach it."""
        return is_for_others(self._address)

    async def __aenter__(self) -> Self:
        self._web.start()
        for name in _SOURCES:
            logging.getLogger(name).addHandler(self._history)
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in _SOURCES:
            logging.getLogger(name).removeHandler(self._history)
        if self._timer is not None:
            self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
        await asyncio.to_thread(self._web.close)

    def watch(self, compute: Compute, transport: Transport, hub: PeerId) -> tuple[Compute, Transport]:
        """Return the borders of an agent that begins to take part, watched; call `leave` in the end."""
        self._recorder.begin_part()
        return WatchedCompute(compute, self._recorder), MeteredTransport(transport, hub, self._recorder)

    def leave(self) -> None:
        """Record that the agent has left."""
        self._recorder.end_part()

    def _say(self, tone: str, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._append, tone, text)

    def _append(self, tone: str, text: str) -> None:
        self._recorder.news.append("said", "lending", tone, text, self._loop.time())

    def _look(self) -> None:
        if (
            self._looking is None or self._looking.done()
        ):  # to ask a GPU may take longer than to the next look
            self._looking = self._loop.create_task(self._look_once())
        self._timer = self._loop.call_later(self._timeouts.lending_page_look_seconds, self._look)

    async def _look_once(self) -> None:
        blueprint = self._recorder.blueprint
        use, program, fault = await asyncio.to_thread(self._read, blueprint)
        if blueprint is not None:
            self._recorder.describe_stage(blueprint, program, fault)
        self._recorder.sample(use, self._loop.time(), _today())

    def _read(self, blueprint: bytes | None) -> tuple[MachineUse, HostedProgram | None, str]:
        use = self._reader.read(_clock())
        if blueprint is None:
            return use, None, ""
        try:
            return use, describe_blueprint(blueprint), ""
        except RavnestError as error:
            return use, None, str(error)

    def _make_site(self) -> Site:
        pages = Pages(LendingReplica(), self._ask, self._timeouts)
        return make_lending_site(self._gate, pages, self._control)

    async def _ask(self, _: bool) -> bool:
        """Ask the agent's loop for an update; called by the web's thread."""
        with contextlib.suppress(RuntimeError):  # its loop has just ended
            self._loop.call_soon_threadsafe(self._push)
            return True
        return False

    def _push(self) -> None:
        began_at = _clock()
        document = self._recorder.make_document(self._control.facts(), self._loop.time(), _today())
        update = self._cutter.cut(document, self._recorder.news, self._recorder.curves)
        seconds = _clock() - began_at
        self._web.call(lambda pages: pages.receive(update, seconds))


class _HistoryHandler(logging.Handler):
    """Passes on the lines that a terminal shows."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = say

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line."""
        tone = "plain" if record.levelno < logging.WARNING else "warning"
        self._tell("bad" if record.levelno >= logging.ERROR else tone, record.getMessage())


def describe_blueprint(data: bytes) -> HostedProgram:
    """Return in numbers what a stage is made of; the first line is how it is trained."""
    blueprint = read_blueprint(data.partition(b"\n")[2])
    counts = Counter(op.name for op in blueprint.train.ops)
    sizes = [(entry, float(entry.stored.size_bytes)) for entry in blueprint.state]
    trained = sum(size for entry, size in sizes if entry.is_trainable)
    return HostedProgram(
        model=blueprint.name,
        num_positions=blueprint.num_positions,
        num_operations=len(blueprint.train.ops),
        operators=tuple(OperatorCount(*each) for each in counts.most_common(_MOST_OPERATORS)),
        num_tensors=len(blueprint.state),
        trained_bytes=trained,
        frozen_bytes=sum(size for _, size in sizes) - trained,
    )


def _clock() -> float:
    return time.perf_counter()  # noqa: TID251 - shares of time, and what an update costs


def _wall_clock() -> float:
    return time.time()  # noqa: TID251 - people want to know when


def _today() -> str:
    return time.strftime("%Y-%m-%d")
