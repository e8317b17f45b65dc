"""Compute as a process of its own: the agent starts it, passes frames, and ends it at any moment.

The process has no key, no token and none of the agent's environment but what torch needs. It may crash or
hang, and may say anything: what is no frame ends it. Its end is told as ComputeLost, once; the next `run`
starts another. A stage on which it crashes again and again is given up, with a sentence.
"""

import asyncio
import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Protocol, TypeVar

from ravnest.config import TIMEOUTS, CompileMode, PeerTimeouts
from ravnest.errors import ComputeLost, GuardError, RavnestError
from ravnest.peer.compute_channel import FrameChannel
from ravnest.peer.compute_frames import (
    Alive,
    BorderItem,
    ControlReport,
    FencesClosed,
    Frame,
    Remark,
    StartOrder,
    StatusQuery,
    Surveyed,
    SurveyOrder,
    pack_item,
    unpack_report,
)
from ravnest.peer.compute_protocol import (
    Build,
    ComputeFailed,
    ComputeSetup,
    FromCompute,
    ProviderLimits,
    ToCompute,
)
from ravnest.peer.fences import FenceWishes
from ravnest.peer.machine import JOIN_SPLINTERS
from ravnest.units import show_plainly

logger = logging.getLogger(__name__)

_START = """
import sys
sys.path.append(sys.argv[1])
from ravnest.peer.compute_program import run_compute
run_compute(int(sys.argv[2]), sys.argv[3])
"""
_PACKAGE = Path(__file__).resolve().parents[1]
_MOST_CRASHES = 3  # on one stage
_LEAST_FRAME_BYTES = 1 << 28  # so much may cross at once however little is lent
_NUM_KEPT_LINES, _LONGEST_LINE = 20, 400
_OWN_ROOM = 1.1  # times what is lent: large stages keep to their plans within a tenth
# What a process needs of its environment to find Python, torch and a GPU, and names that begin so.
_VARIABLES = (
    *("PATH", "LANG", "LANGUAGE", "TZ", "VIRTUAL_ENV", "CONDA_PREFIX", "SYSTEMROOT", "WINDIR", "PATHEXT"),
    *("COMSPEC", "CC", "CXX", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
)
_FAMILIES = (
    *("LC_", "LD_", "DYLD_", "PYTHON", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "ONEDNN_", "DNNL_"),
    *("ATEN_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_", "CUDA_", "CUBLAS_"),
    *("CUDNN_", "HIP_", "ROCR_", "HSA_", "MALLOC_", "GLIBC_", "NUMEXPR_", "VECLIB_"),
)
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL")  # a name with one of them does not cross
_GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")


class ChildProcess(Protocol):
    """A process as `subprocess.Popen` shows it."""

    pid: int
    stderr: IO[bytes] | None

    def kill(self) -> None:
        """End it at once."""

    def wait(self) -> int:
        """Return its exit code, after its end."""


StartChild = Callable[[Sequence[str], socket.socket, Mapping[str, str]], ChildProcess]


def start_child(
    words: Sequence[str], end_of_pair: socket.socket, environment: Mapping[str, str]
) -> ChildProcess:
    """Start Python with these words and one end of the pair."""
    is_posix = os.name == "posix"
    end_of_pair.set_inheritable(True)
    return subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-P", "-c", _START, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=dict(environment),
        pass_fds=(end_of_pair.fileno(),) if is_posix else (),
        close_fds=is_posix,
        start_new_session=is_posix,  # Ctrl-C is for the agent
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )


def may_use_gpu(device: str) -> bool:
    """Return whether torch may find a GPU here, as far as can be told without it."""
    return device != "cpu" and any(map(os.path.exists, _GPU_FILES))


def choose_environment(given: Mapping[str, str], scratch: str | None, compiled: str = "") -> dict[str, str]:
    """Return the variables of compute: none that may be somebody's secret; its home is its own folder."""
    kept = {
        name: value
        for name, value in given.items()
        if (name.upper() in _VARIABLES or name.upper().startswith(_FAMILIES))
        and not any(word in name.upper() for word in _SECRETS)
    }
    own = {"HOME": os.sep if scratch is None else scratch, "OPENBLAS_NUM_THREADS": "1"}
    own |= {name: value for name, value in JOIN_SPLINTERS.items() if name not in kept}
    if scratch is not None:
        own |= {"TMPDIR": scratch}
        own |= {} if compiled else {"TORCHINDUCTOR_CACHE_DIR": scratch, "TRITON_CACHE_DIR": scratch}
    return kept | own


def explain_exit(code: int, last_line: str) -> str:
    """Return in words how a process ended."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hints = {
            "SIGKILL": "it was killed: by somebody, or because the PC has no memory left",
            "SIGSEGV": "an operation crashed",
            "SIGBUS": "an operation crashed",
            "SIGILL": "this CPU does not know an operation",
            "SIGABRT": "a library gave up",
        }
        told = f"{hints.get(name, 'it was ended')} ({name})"
    else:
        told = f"it ended with code {code}"
    return f"{told}: {last_line}" if last_line else told


@dataclass(slots=True)
class CrashBook:
    """Counts crashes by stage; those of long ago are forgotten."""

    window_seconds: float
    crashes: dict[str, list[float]] = field(default_factory=dict)

    def record(self, stage: str, now: float) -> bool:
        """Record a crash; return whether this stage is to be tried again."""
        recent = [at for at in self.crashes.get(stage, []) if now - at < self.window_seconds]
        self.crashes[stage] = [*recent, now]
        return len(self.crashes[stage]) < _MOST_CRASHES


_Answer = TypeVar("_Answer", Surveyed, FencesClosed)
_Listener = Callable[[FromCompute | ControlReport | str], None]


class _Child:
    """One process, with its end of the border; a listener gets what it says in a thread, and how it ends."""

    def __init__(self, process: ChildProcess, here: socket.socket, end_seconds: float) -> None:
        self.process = process
        self._end_seconds = end_seconds
        self._listen: _Listener = lambda _: None
        self._ended: str | None = None
        self._lines: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self._code: int | None = None  # once it has ended
        self._reading = threading.Thread(target=self._read_lines, name="compute says", daemon=True)
        self._waiting = threading.Thread(target=self._await_end, name="compute ends", daemon=True)
        self._reading.start()
        self._waiting.start()
        self.channel = FrameChannel(
            here, self._receive, self._end, most_bytes=_LEAST_FRAME_BYTES, takes_files=False
        )

    def attach(self, listen: "_Listener") -> None:
        """Have another listener from now on; it may hear of the end twice."""
        self._listen = listen
        if self._ended is not None:
            listen(self._ended)

    def send(self, item: BorderItem) -> None:
        self.channel.send(pack_item(item))

    def _receive(self, frame: Frame) -> None:
        self._listen(unpack_report(frame))

    def _end(self, reason: str) -> None:
        self._ended = reason
        self._listen(reason)

    def _read_lines(self) -> None:
        """Keep the last lines that libraries print: they may say why it ends."""
        if self.process.stderr is None:
            return
        with contextlib.suppress(OSError), self.process.stderr as said:
            while line := said.readline(_LONGEST_LINE):
                told = show_plainly(line.decode(errors="replace").strip())
                if told:
                    self._lines.append(told)
                    logger.debug("compute prints: %s", told)

    def _await_end(self) -> None:
        """Note its exit code, and end what it left behind: that may have its stderr and its border open."""
        code = self.process.wait()
        self._kill_session()
        self._code = code

    def _kill_session(self) -> None:
        if hasattr(os, "killpg"):
            with contextlib.suppress(OSError):  # nobody is left
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process at once, with all that it has started in its session."""
        if self._code is None:
            self._kill_session()
            with contextlib.suppress(OSError):
                self.process.kill()

    def stop(self, *, has_ended: bool = False) -> tuple[int, str]:
        """End the process, after a moment if it does so itself; return its exit code and its last line.

        One that a driver holds in the kernel is not waited for without end.
        """
        if has_ended:
            self._waiting.join(self._end_seconds)
        self.kill()
        for thread in (self._waiting, self._reading):
            thread.join(self._end_seconds)
        self.channel.close()
        code = -signal.SIGKILL if self._code is None else self._code
        return code, self._lines[-1] if self._lines else ""


class ComputeProcess:
    """The agent's end; `scratch` is the folder that compute may write to, beside that of compiled code."""

    def __init__(
        self,
        scratch: str | None,
        timeouts: PeerTimeouts = TIMEOUTS.peer,
        *,
        device: str = "cpu",
        compile_mode: CompileMode = CompileMode.OFF,
        start: StartChild = start_child,
    ) -> None:
        self._scratch = scratch
        self._timeouts = timeouts
        self._uses_gpu = may_use_gpu(device)
        self._compiles = compile_mode.applies_to("cuda" if self._uses_gpu else "cpu")
        self._start = start
        self._book = CrashBook(timeouts.crash_window_seconds)
        self._ready: _Child | None = None  # started, and at work for no run yet
        self._child: _Child | None = None
        self._early: list[ToCompute] = []  # before there is a process
        self._is_new = True  # it has had no run
        self._stage = ""  # the hash of the blueprint it was given last
        self._num_runs = self._num_closed = 0  # there is one close for each run, before or after its end
        self._survey: SurveyOrder | None = None
        self.fences: FencesClosed | None = None

    @property
    def process_id(self) -> int | None:
        """The process at work, if there is one."""
        child = self._child or self._ready
        return None if child is None else child.process.pid

    def survey(self, order: SurveyOrder) -> Surveyed:
        """Start the process, and wait for what it says of this PC; or raise why it cannot be lent."""
        self._survey = order
        return self._ask(order, Surveyed)

    def try_fences(self) -> FencesClosed:
        """Start a process for nothing else than to see which fences hold on this PC."""
        order = StartOrder(ComputeSetup(ProviderLimits(_LEAST_FRAME_BYTES)), self._timeouts)
        try:
            return self._ask(order, FencesClosed)
        finally:
            self.stop()

    def _ask(self, order: SurveyOrder | StartOrder, kind: type[_Answer]) -> _Answer:
        """Start a process and wait for its answer; without one, end it."""
        try:
            self._ready = child = self._launch()
        except OSError as error:
            raise ComputeLost(f"compute cannot start: {error.strerror}") from None
        said: queue.SimpleQueue[FromCompute | ControlReport | str] = queue.SimpleQueue()
        child.attach(said.put)
        child.channel.start()
        try:
            child.send(order)
            return self._await(child, said, kind)
        except BaseException:
            self.stop()
            raise

    def _await(
        self,
        child: _Child,
        said: "queue.SimpleQueue[FromCompute | ControlReport | str]",
        kind: type[_Answer],
    ) -> _Answer:
        while True:
            try:
                match said.get(timeout=self._timeouts.compute_start_seconds):
                    case kind() as found:
                        return found
                    case ComputeFailed() as failed:
                        raise failed.error
                    case str(reason):
                        self._ready = None
                        code, line = child.stop(has_ended=not reason)
                        raise ComputeLost(f"compute cannot start: {reason or explain_exit(code, line)}")
                    case Remark() as remark:
                        _log(remark)
            except queue.Empty:
                seconds = self._timeouts.compute_start_seconds
                raise ComputeLost(f"compute has not loaded torch after {seconds:.0f} s") from None

    def stop(self) -> None:
        """End a process that is at work for no run."""
        if self._ready is not None:
            self._ready.stop()
            self._ready = None

    def put(self, item: ToCompute) -> None:
        """Pass an item to the process."""
        if isinstance(item, Build):
            self._stage = item.parts.blueprint.blob
        if self._child is not None:
            self._child.send(item)
        elif self._is_new:
            self._early.append(item)

    def close(self) -> None:
        """End the process at once, whatever it does."""
        self._num_closed += 1
        if self._child is not None:
            self._child.kill()

    @property
    def _is_closing(self) -> bool:
        return self._num_closed >= self._num_runs

    async def run(self, setup: ComputeSetup, deliver: Callable[[FromCompute], None]) -> None:
        """Have a process compute until it is closed, or ends by itself."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()
        self._has_failed = False
        self._num_runs += 1
        try:
            child, self._ready = self._ready or self._launch(), None
        except OSError as error:
            lost = self._judge(f"it cannot be started: {error.strerror}", loop.time())
            deliver(ComputeFailed.of(lost))
            return
        child.channel.bound(max(_LEAST_FRAME_BYTES, int(_OWN_ROOM * setup.limits.memory_bytes)))

        def hear(item: FromCompute | ControlReport | str) -> None:
            loop.call_soon_threadsafe(self._hear, item, deliver, ended)

        child.attach(hear)
        if not child.channel.is_running:
            child.channel.start()
            if self._survey is not None:
                child.send(replace(self._survey, measures_speed=False))
        child.send(StartOrder(setup, self._timeouts, logging.getLogger("ravnest").getEffectiveLevel()))
        self._child = child
        for item in self._early:
            child.send(item)
        self._early = []
        self._answered_at, self._num_queries = loop.time(), 0
        try:
            while not ended.done() and not self._is_closing:
                await asyncio.wait([ended], timeout=self._timeouts.compute_query_seconds)
                self._query(ended)
        finally:
            self._child, self._is_new = None, False
            has_ended = not self._is_closing and ended.done() and not ended.result()
            code, line = await asyncio.to_thread(child.stop, has_ended=has_ended)
        if not self._is_closing and not self._has_failed:
            reason = ended.result() or explain_exit(code, line)
            deliver(ComputeFailed.of(self._judge(reason, loop.time())))

    def _query(self, ended: "asyncio.Future[str]") -> None:
        """Ask for a sign of life; end a process that gave none for long."""
        assert self._child is not None
        silent = asyncio.get_running_loop().time() - self._answered_at
        if ended.done() or self._is_closing:
            return
        if silent > self._timeouts.compute_silence_seconds:
            ended.set_result(f"it came to no end with one piece of work for {silent:.0f} s")
            return
        self._num_queries += 1
        self._child.send(StatusQuery(self._num_queries))

    def _hear(
        self,
        item: FromCompute | ControlReport | str,
        deliver: Callable[[FromCompute], None],
        ended: "asyncio.Future[str]",
    ) -> None:
        if ended.done():
            return
        match item:
            case _ if self._is_closing and not isinstance(item, str):
                pass  # nobody listens any more
            case str(reason):
                ended.set_result(f"the border to it is broken: {reason}" if reason else "")
            case ComputeFailed("ComputeLost", reason):  # whether it is lost, the agent says, and counts
                ended.set_result(show_plainly(reason))
            case ComputeFailed(_, reason):
                self._has_failed = True
                deliver(replace(item, reason=show_plainly(reason)))
            case Alive(number):
                if number == self._num_queries:
                    self._answered_at = asyncio.get_running_loop().time()
            case Remark() | FencesClosed() | Surveyed():
                self._record(item)
            case _:
                deliver(item)

    def _record(self, said: Remark | FencesClosed | Surveyed) -> None:
        """Log what it says of itself; what the PC has, the first process has said."""
        if isinstance(said, Remark):
            _log(said)
        elif isinstance(said, FencesClosed):
            self.fences = said
            if said.missing:
                logger.info("not fenced in: %s", "; ".join(map(show_plainly, said.missing)))

    def _judge(self, reason: str, now: float) -> RavnestError:
        """Return what its end means."""
        if self._book.record(self._stage, now):
            return ComputeLost(f"the process that computes is lost: {reason}")
        return GuardError(
            f"the process that computes has ended {_MOST_CRASHES} times with the same stage, "
            f"so this PC does not try again: {reason}"
        )

    def _launch(self) -> _Child:
        """Start a process, or raise OSError."""
        here, there = socket.socketpair()
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "") if self._compiles else ""
        writes = tuple(filter(None, (self._scratch, compiled)))
        wishes = FenceWishes(os.getpid(), str(Path.home()), writes, self._compiles, self._uses_gpu)
        words = (str(_PACKAGE.parent), str(there.fileno()), json.dumps(asdict(wishes)))
        try:
            process = self._start(words, there, choose_environment(os.environ, self._scratch, compiled))
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
        return _Child(process, here, self._timeouts.compute_end_seconds)


def _log(remark: Remark) -> None:
    logger.log(remark.level, "%s", show_plainly(remark.text))
