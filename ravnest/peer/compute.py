"""Compute at work: it looks at this PC, closes the fences, and does one piece of work after the other.

`work_through` is the loop of the compute process, and of ComputeThread, which runs it in the agent's own
process. In the process a thread takes frames as they come; the first thread handles them in order, and does
the stage's work between them. Nothing that others sent comes before the fences are closed: the agent's
StartOrder is in front of it. A second thread writes snapshots, so that training goes on.
"""

import asyncio
import logging
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ravnest.config import TIMEOUTS, PeerTimeouts
from ravnest.errors import RavnestError
from ravnest.peer.capabilities import (
    can_run_bf16,
    can_run_bf16_forked,
    check_gpu_memory,
    choose_device,
    lent_memory_bytes,
    limit_gpu_memory,
    measure_flops_per_second,
    warm_up,
)
from ravnest.peer.compile_process import load_compiler
from ravnest.peer.compute_channel import FrameChannel
from ravnest.peer.compute_frames import (
    Alive,
    BorderItem,
    ControlOrder,
    FencesClosed,
    Frame,
    Remark,
    StartOrder,
    StatusQuery,
    Surveyed,
    SurveyOrder,
    pack_item,
    unpack_order,
)
from ravnest.peer.compute_protocol import (
    Build,
    ComputeFailed,
    ComputeSetup,
    FromCompute,
    SnapshotWritten,
    ToCompute,
)
from ravnest.peer.fences import PROGRAMS, Fence, FenceWishes, close_late, describe_fences
from ravnest.peer.machine import (
    HoleWatch,
    keep_few_arenas,
    own_memory_bytes,
    return_freed_memory,
    trim_freed_memory,
)
from ravnest.peer.stage_builder import StageBuilder
from ravnest.peer.stage_host import SavedStage, StageHost, write_snapshot


def work_through(
    items: "queue.SimpleQueue[Any]",
    host: StageHost,
    handle: Callable[[Any], Iterable[Any]],
    clock: Callable[[], float],
    send: Callable[[Iterable[Any]], None],
    after_work: Callable[[], None] = lambda: None,
) -> None:
    """Handle items as they come, and do the host's work between them; None ends it."""
    is_idle = False
    while True:
        deadline = host.deadline
        wait = None if deadline is None else max(0.0, deadline - clock())
        try:
            item = items.get(block=is_idle, timeout=wait)
        except queue.Empty:
            send(host.tick(clock()))
            work = host.next_work()
            is_idle = work is None
            send(work or ())
            after_work()
            continue
        if item is None:
            return
        is_idle = False
        send(handle(item))
        if isinstance(item, Build):
            trim_freed_memory()  # of what was read


def begin_loading_compiler(setup: ComputeSetup) -> None:
    """Load what compiled code needs, if there will be some.

    Beside the training it would hold up every operation; before it there is none yet.
    """
    if setup.limits.compile_mode.applies_to(setup.limits.device):
        threading.Thread(target=load_compiler, name="compiler", daemon=True).start()


def write_saved(folder: str | None, saved: SavedStage) -> SnapshotWritten:
    """Write a snapshot down, and keep no memory of that."""
    written = write_snapshot(folder, saved)
    trim_freed_memory()
    return written


def survey(order: SurveyOrder) -> Surveyed:
    """Look at what this PC has, and have torch use so many threads."""
    if order.num_threads:
        torch.set_num_threads(order.num_threads)
    device = choose_device(order.device)
    if order.gpu_memory_bytes is not None:
        check_gpu_memory(device, order.gpu_memory_bytes)
    speed = measure_flops_per_second(device) if order.measures_speed else None
    return Surveyed(device, lent_memory_bytes(device), speed)


class ComputeThread:
    """Compute as a thread of the agent's process: no fence, for tests and comparisons."""

    def __init__(self, timeouts: PeerTimeouts = TIMEOUTS.peer) -> None:
        self._timeouts = timeouts
        self._items: queue.SimpleQueue[ToCompute | None] = queue.SimpleQueue()  # None ends the thread

    @property
    def process_id(self) -> int | None:
        """It has no process of its own."""
        return None

    def survey(self, order: SurveyOrder) -> Surveyed:
        """Return what this PC has."""
        return survey(order)

    def stop(self) -> None:
        """It has nothing that waits for work."""

    def put(self, item: ToCompute) -> None:
        """Pass an item to the thread."""
        self._items.put(item)

    def close(self) -> None:
        """End the thread."""
        self._items.put(None)

    async def run(self, setup: ComputeSetup, deliver: Callable[[FromCompute], None]) -> None:
        """Work in a thread until closed."""
        loop = asyncio.get_running_loop()

        async def write(saved: SavedStage) -> None:
            deliver(await loop.run_in_executor(writer, write_saved, setup.folder, saved))

        def start_writing(saved: SavedStage) -> None:
            writing.create_task(write(saved))

        def send(found: Iterable[FromCompute | SavedStage]) -> None:
            for each in found:
                if isinstance(each, SavedStage):
                    loop.call_soon_threadsafe(start_writing, each)
                else:
                    loop.call_soon_threadsafe(deliver, each)

        def work() -> None:
            warm_up()
            if setup.limits.device.startswith("cuda"):
                limit_gpu_memory(setup.limits.device, setup.limits.memory_bytes)
            begin_loading_compiler(setup)
            try:
                host = StageHost(StageBuilder(setup.limits, loop.time, timeouts=self._timeouts), loop.time)
                work_through(self._items, host, host.handle, loop.time, send)
            except RavnestError as error:
                loop.call_soon_threadsafe(deliver, ComputeFailed.of(error))

        with ThreadPoolExecutor(1) as writer:  # one: snapshots are written in the order they were made
            async with asyncio.TaskGroup() as writing:
                await asyncio.to_thread(work)


logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 46  # the agent has bounded what it takes from others
# Large stages keep to plans within a tenth; small ones miss by tens of MB, and libraries grow, too.
_ROOM, _OWN_BYTES, _THREAD_BYTES = 1.1, 256 << 20, 16 << 20


class _RemarkHandler(logging.Handler):
    """Passes what is logged on to the agent's log."""

    def __init__(self, channel: FrameChannel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send(pack_item(Remark(min(record.levelno, 100), record.getMessage())))
        except Exception:  # as all handlers do: what logs goes on
            self.handleError(record)


class _Service:
    """One end of the border, with a stage behind it."""

    def __init__(self, end_of_pair: socket.socket, wishes: FenceWishes, fences: Sequence[Fence]) -> None:
        self._wishes, self._fences = wishes, fences
        self._items: queue.SimpleQueue[ToCompute | ControlOrder | None] = queue.SimpleQueue()
        self._channel = FrameChannel(
            end_of_pair, self._receive, self._end, most_bytes=_MOST_BYTES, takes_files=True
        )
        self._clock = time.monotonic  # noqa: TID251 - the program's own clock

    def run(self) -> int:
        """Follow the agent's orders; return the exit code."""
        keep_few_arenas()  # before there is a second thread
        self._channel.start()
        logging.getLogger().addHandler(_RemarkHandler(self._channel))
        logging.captureWarnings(True)
        try:
            warm_up()
            self._work(self._prepare())
            return 0
        except RavnestError as error:
            self._send([ComputeFailed.of(error)])
            return 0
        except Exception as error:  # an operation may raise anything; the agent reads the last line
            traceback.print_exc()
            told = (str(error).strip().splitlines() or [""])[0]
            os.write(2, f"{type(error).__name__}: {told:.300}\n".encode())
            return 1
        finally:
            self._channel.finish()

    def _receive(self, frame: Frame) -> None:
        self._items.put(unpack_order(frame))

    def _end(self, reason: str) -> None:
        """End with the agent, also in the middle of an operation."""
        if reason:
            os.write(2, f"the border to the agent is broken: {reason}\n".encode(errors="replace"))
        os._exit(1 if reason else 0)

    def _send(self, items: Iterable[BorderItem]) -> None:
        for item in items:
            self._channel.send(pack_item(item))

    def _prepare(self) -> StartOrder:
        """Answer what is asked of this PC, until there is a start."""
        while True:
            match self._items.get():
                case SurveyOrder() as order:
                    self._send([survey(order)])
                case StartOrder() as order:
                    return order
                case StatusQuery(number):
                    self._send([Alive(number)])
                case _:
                    raise RavnestError("what others sent came before the start")

    def _work(self, order: StartOrder) -> None:
        limits = order.setup.limits
        logging.getLogger("ravnest").setLevel(order.log_level)
        return_freed_memory(limits.memory_bytes)
        if limits.device.startswith("cuda"):
            limit_gpu_memory(limits.device, limits.memory_bytes)
        begin_loading_compiler(order.setup)
        own = _OWN_BYTES + torch.get_num_threads() * _THREAD_BYTES
        late = close_late(self._wishes, _ROOM * limits.memory_bytes + own)
        self._send([FencesClosed(*describe_fences([*self._fences, *late]))])
        is_closed = any(each.holds for each in late if each.name == PROGRAMS)
        probe = can_run_bf16_forked if is_closed else can_run_bf16
        builder = StageBuilder(limits, self._clock, probe=probe, timeouts=order.timeouts)
        host = StageHost(builder, self._clock)
        with ThreadPoolExecutor(1) as writer:  # one: snapshots are written in the order they were made

            def send(found: Iterable[Any]) -> None:
                for each in found:
                    if isinstance(each, SavedStage):
                        writer.submit(write, each)
                    else:
                        self._channel.send(pack_item(each))

            def write(saved: SavedStage) -> None:
                try:
                    self._send([write_saved(order.setup.folder, saved)])
                except Exception as error:  # the hub asks others when it does not come
                    told = "the snapshot %d cannot be written: %s: %s"
                    logger.warning(told, saved.order.number, type(error).__name__, error)

            def handle(item: ToCompute | ControlOrder) -> Iterable[Any]:
                match item:
                    case StatusQuery(number):
                        return [Alive(number)]
                    case SurveyOrder() | StartOrder():
                        raise RavnestError("compute has started already")
                    case _:
                        return host.handle(item)

            work_through(self._items, host, handle, self._clock, send, _fill_holes(limits.memory_bytes))


def _fill_holes(lent_bytes: float) -> Callable[[], None]:
    """Return what gives the system back freed memory between tensors, once there is much of it."""
    watch = HoleWatch(lent_bytes, own_memory_bytes())

    def look() -> None:
        if watch.look(own_memory_bytes()):
            trim_freed_memory()
            watch.record(own_memory_bytes())

    return look


def serve_agent(end_of_pair: socket.socket, wishes: FenceWishes, fences: Sequence[Fence]) -> int:
    """Compute for an agent until it ends; return the exit code."""
    return _Service(end_of_pair, wishes, fences).run()
