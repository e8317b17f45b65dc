"""Compute at work: one piece of work after the other on a StageHost, and waiting when there is none.

`work_through` is the loop of the compute process, and of ComputeThread, which runs it in the agent's own
process. A second thread writes snapshots, so that training goes on. Tests put another Compute in its place,
on virtual time.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ravnest.config import TIMEOUTS, PeerTimeouts
from ravnest.errors import RavnestError
from ravnest.peer.capabilities import (
    check_gpu_memory,
    choose_device,
    lent_memory_bytes,
    limit_gpu_memory,
    measure_flops_per_second,
    warm_up,
)
from ravnest.peer.compile_process import load_compiler
from ravnest.peer.compute_frames import Surveyed, SurveyOrder
from ravnest.peer.compute_protocol import (
    Build,
    ComputeFailed,
    ComputeSetup,
    FromCompute,
    SnapshotWritten,
    ToCompute,
)
from ravnest.peer.machine import trim_freed_memory
from ravnest.peer.stage_builder import StageBuilder
from ravnest.peer.stage_host import SavedStage, StageHost, write_snapshot


def work_through(
    items: "queue.SimpleQueue[Any]",
    host: StageHost,
    handle: Callable[[Any], Iterable[Any]],
    clock: Callable[[], float],
    send: Callable[[Iterable[Any]], None],
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
