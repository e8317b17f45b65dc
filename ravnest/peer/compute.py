"""The compute thread: it owns the StageHost, does one piece of work after the other, and waits when idle.

Items come in through a queue; results go out through the event loop, each as soon as it is ready. A second
thread writes snapshots, so that training goes on. Tests put another Compute in its place, on virtual time.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from ravnest.config import TIMEOUTS, PeerTimeouts
from ravnest.errors import RavnestError
from ravnest.peer.capabilities import trim_freed_memory
from ravnest.peer.compute_protocol import (
    Build,
    ComputeFailed,
    ComputeSetup,
    FromCompute,
    SnapshotWritten,
    ToCompute,
)
from ravnest.peer.part_code import load_compiler
from ravnest.peer.stage_builder import StageBuilder
from ravnest.peer.stage_host import SavedStage, StageHost, write_snapshot

Deliver = Callable[[Iterable[FromCompute | SavedStage]], None]


class ComputeThread:
    """A thread that sleeps while nothing is to be done."""

    def __init__(self, timeouts: PeerTimeouts = TIMEOUTS.peer) -> None:
        self._timeouts = timeouts
        self._items: queue.SimpleQueue[ToCompute | None] = queue.SimpleQueue()  # None ends the thread

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
            deliver(await loop.run_in_executor(writer, _write, setup.folder, saved))

        def start_writing(saved: SavedStage) -> None:
            writing.create_task(write(saved))

        def send(found: Iterable[FromCompute | SavedStage]) -> None:
            for each in found:
                if isinstance(each, SavedStage):
                    loop.call_soon_threadsafe(start_writing, each)
                else:
                    loop.call_soon_threadsafe(deliver, each)

        def work() -> None:
            if setup.limits.compile_mode.applies_to(setup.limits.device):
                # Beside the training it would hold up every operation; now there is none yet.
                threading.Thread(target=load_compiler, name="compiler", daemon=True).start()
            try:
                builder = StageBuilder(setup.limits, loop.time, timeouts=self._timeouts)
                self._work(StageHost(builder, loop.time), loop.time, send)
            except RavnestError as error:
                loop.call_soon_threadsafe(deliver, ComputeFailed.of(error))

        with ThreadPoolExecutor(1) as writer:  # one: snapshots are written in the order they were made
            async with asyncio.TaskGroup() as writing:
                await asyncio.to_thread(work)

    def _work(self, host: StageHost, clock: Callable[[], float], send: Deliver) -> None:
        is_idle = False
        while True:
            deadline = host.deadline
            wait = None if deadline is None else max(0.0, deadline - clock())
            try:
                item = self._items.get(block=is_idle, timeout=wait)
            except queue.Empty:
                send(host.tick(clock()))
                work = host.next_work()
                is_idle = work is None
                send(work or ())
                continue
            if item is None:
                return
            is_idle = False
            send(host.handle(item))
            if isinstance(item, Build):
                trim_freed_memory()  # of what was read


def _write(folder: str | None, saved: SavedStage) -> SnapshotWritten:
    written = write_snapshot(folder, saved)
    trim_freed_memory()
    return written
