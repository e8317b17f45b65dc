"""The compute thread: it owns the host, does one piece of work after the other, and waits when there is none.

What it is told goes in by a queue; parcels come out through `emit`, each as soon as it is ready. Of a
snapshot it only names the tensors: another thread writes them down. A test may put another Compute in its
place that works on virtual time.
"""

import asyncio
import logging
import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from ravnest.config import TIMEOUTS, PeerTimeouts
from ravnest.engine.weight_versions import Snapshot
from ravnest.errors import ProtocolError, RavnestError
from ravnest.ids import HUB, NodeId
from ravnest.model.state_dict import snapshot_pieces
from ravnest.peer.stage_host import ProviderLimits, StageHost
from ravnest.protocol.membership import Complaint, ProbeReport
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.placement import PlanOrder, RingOrder, SnapshotMade, SnapshotOrder, StageParts
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.blobs import Blobs
from ravnest.transfer.outbox import Outgoing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Build:
    """Make this stage."""

    order: PlanOrder
    parts: StageParts
    blueprint: bytes
    contents: tuple[Buffer, ...]  # of the sources


@dataclass(frozen=True, slots=True)
class Probe:
    """Run this little stage to see how fast this PC is, and send the report with that."""

    report: ProbeReport
    blueprint: bytes


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message for the stage, under this plan."""

    message: Message
    buffers: Sequence[Buffer]
    sender: NodeId
    build_id: int


Later = Callable[[], Outgoing]  # work for another thread, and what is then to be sent


@dataclass(frozen=True, slots=True)
class Aside:
    """Do this beside the stage's own work."""

    work: Later


Item = Delivered | Build | Probe | Aside | PlanOrder | RingOrder | SnapshotOrder


class Compute(Protocol):
    """Where the host of a peer lives."""

    def put(self, item: Item) -> None:
        """Tell the host something; never waits."""

    async def run(
        self,
        limits: ProviderLimits,
        blobs: Blobs,
        emit: Callable[[Outgoing], None],
        fail: Callable[[RavnestError], None],
    ) -> None:
        """Work until closed; `emit` and `fail` are called on the event loop."""

    def close(self) -> None:
        """Let `run` end after the piece of work under way."""


class ComputeLoop:
    """A host and what is done with it, one thing at a time; `start` has work done elsewhere."""

    def __init__(self, host: StageHost, blobs: Blobs, start: Callable[[Later], object] | None = None) -> None:
        self.host = host
        self._blobs = blobs
        self._start = start
        self._wanted: list[SnapshotOrder] = []  # until the stage can be saved

    def take(self, item: Item) -> Iterable[Outgoing]:
        """Do what an item asks for; return what is to be sent."""
        match item:
            case PlanOrder():
                self.host.follow(item)
                self._wanted = []
                return ()
            case RingOrder():
                return self.host.rearrange(item)
            case Build():
                built = self.host.build(item.order, item.parts, item.blueprint, item.contents)
                return [Outgoing(HUB, built)]
            case Probe():
                speed = self.host.measure_speed(item.blueprint)
                return [Outgoing(HUB, replace(item.report, flops_per_second=speed))]
            case Aside():
                return self._do_aside(item.work)
            case SnapshotOrder():
                self._wanted.append(item)
                return self._save()
            case Delivered():
                try:
                    found = self.host.receive(item.message, item.buffers, item.sender)
                except ProtocolError as error:
                    return [Outgoing(HUB, Complaint(item.build_id, item.sender, str(error)))]
                if isinstance(found, Refusal):
                    logger.debug("%s: %s", type(item.message).__name__, found.reason)
                    return ()
                return [*found, *self._save()]

    def _save(self) -> Iterable[Outgoing]:
        """Keep the stage if the hub has asked for it and other stages hold nothing of it back."""
        is_final = any(order.is_final for order in self._wanted)
        saved = self.host.save(is_final) if self._wanted else None
        if saved is None:
            return []
        orders, self._wanted = self._wanted, []
        return [
            parcel for order in orders for parcel in self._do_aside(partial(_keep, order, saved, self._blobs))
        ]

    def _do_aside(self, work: Later) -> Iterable[Outgoing]:
        if self._start is None:
            return [work()]
        self._start(work)
        return []


def _keep(order: SnapshotOrder, saved: Snapshot, blobs: Blobs) -> Outgoing:
    ref = blobs.keep_pieces(lambda: snapshot_pieces(saved.state, saved.optimizer))
    return Outgoing(HUB, SnapshotMade(order.build_id, order.number, saved.version, ref))


class ComputeThread:
    """A thread that sleeps while nothing is to be done."""

    def __init__(self, timeouts: PeerTimeouts = TIMEOUTS.peer) -> None:
        self._timeouts = timeouts
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()  # None ends the thread

    def put(self, item: Item) -> None:
        """Tell the host something."""
        self._items.put(item)

    def close(self) -> None:
        """Let the thread end."""
        self._items.put(None)

    async def run(
        self,
        limits: ProviderLimits,
        blobs: Blobs,
        emit: Callable[[Outgoing], None],
        fail: Callable[[RavnestError], None],
    ) -> None:
        """Work in a thread until closed."""
        loop = asyncio.get_running_loop()

        def send(parcels: Iterable[Outgoing]) -> None:
            for parcel in parcels:
                loop.call_soon_threadsafe(emit, parcel)

        async def keep(later: Later) -> None:
            emit(await loop.run_in_executor(writer, later))

        def start(later: Later) -> None:
            keeping.create_task(keep(later))

        def work() -> None:
            bench = ComputeLoop(
                StageHost(limits, loop.time, timeouts=self._timeouts),
                blobs,
                lambda later: loop.call_soon_threadsafe(start, later),
            )
            try:
                self._work(bench, loop.time, send)
            except RavnestError as error:
                loop.call_soon_threadsafe(fail, error)

        with ThreadPoolExecutor(1) as writer:  # one: snapshots are kept in the order they were made
            async with asyncio.TaskGroup() as keeping:
                await asyncio.to_thread(work)

    def _work(
        self, bench: ComputeLoop, clock: Callable[[], float], send: Callable[[Iterable[Outgoing]], None]
    ) -> None:
        host, is_idle = bench.host, False
        while True:
            wait = None if host.deadline is None else max(0.0, host.deadline - clock())
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
            send(bench.take(item))
