"""Programs that only move content: the transport, outbox and exchange of a hub or a peer, without the rest.

Each runs in a process of its own. It says what it sent, what CPU time it took, how long its event loop was
busy with one thing, and how much memory it had at most.
"""

import asyncio
import multiprocessing
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from random import Random
from typing import Any

from ravnest.ids import NodeId
from ravnest.net.identity import KeyPair, new_keys
from ravnest.net.transport import Delivery, PeerId, TransportLimits
from ravnest.net.zeromq import ZeroMqTransport
from ravnest.protocol import messages
from ravnest.protocol.placement import BlobPart, BlobRef
from ravnest.transfer.blobs import Blobs
from ravnest.transfer.exchange import Exchange
from ravnest.transfer.outbox import Outbox, Outgoing

_BEAT_SECONDS = 0.005
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Fetch:
    """What a node is to fetch: from these nodes, and from the reserve if they do not give it."""

    ref: BlobRef
    sources: tuple[NodeId, ...]
    reserve: tuple[NodeId, ...] = ()
    seed: int | None = None  # it makes the blob itself


@dataclass(slots=True)
class Measured:
    """What a node did; of a node that fetched, also how long that took."""

    seconds: float
    cpu_seconds: float
    loop_cpu_seconds: float
    longest_stall_seconds: float
    longest_held_seconds: float  # less the time in which others had the cores
    sent_bytes: int
    peak_bytes: float


class Nodes:
    """Processes by name, all of which know each other; use it as a context manager."""

    def __init__(self, names: Sequence[str], upload_bytes_per_second: float = float("inf")) -> None:
        self._keys = {NodeId(name): new_keys() for name in names}
        self._limit = upload_bytes_per_second
        self._pipes: dict[NodeId, Connection] = {}
        self._processes: list[Any] = []
        self.addresses: dict[NodeId, str] = {}

    def __enter__(self) -> "Nodes":
        context = multiprocessing.get_context("spawn")
        for name in self._keys:
            here, there = context.Pipe()
            process = context.Process(target=_run, args=(name, self._keys, self._limit, there), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes[name] = here
        self.addresses = {name: pipe.recv() for name, pipe in self._pipes.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def make(self, name: NodeId, size_bytes: int, seed: int) -> BlobRef:
        """Let a node keep content that depends on the seed alone."""
        self._pipes[name].send(("make", size_bytes, seed))
        return self._pipes[name].recv()

    def connect(self, name: NodeId, others: dict[NodeId, str]) -> None:
        """Let a node dial others."""
        self._pipes[name].send(("dial", others))
        self._pipes[name].recv()

    def fetch(self, orders: dict[NodeId, Fetch]) -> dict[NodeId, Measured]:
        """Let nodes fetch at the same time; return what all nodes did meanwhile."""
        for pipe in self._pipes.values():
            pipe.send(("start",))
            pipe.recv()
        for name, order in orders.items():
            self._pipes[name].send(("fetch", order))
        for name in orders:
            self._pipes[name].recv()
        found = {}
        for name, pipe in self._pipes.items():
            pipe.send(("measure",))
            found[name] = pipe.recv()
        return found


def _run(name: NodeId, keys: dict[NodeId, KeyPair], limit: float, pipe: Connection) -> None:
    asyncio.run(_Node(name, keys, pipe).run(limit))
    os._exit(0)  # the thread that reads the pipe may wait


class _Node:
    def __init__(self, name: NodeId, keys: dict[NodeId, KeyPair], pipe: Connection) -> None:
        self._name, self._keys, self._pipe = name, keys, pipe
        self._peers: dict[NodeId, PeerId] = {node: pair.peer for node, pair in keys.items()}
        self._names = {peer: node for node, peer in self._peers.items()}
        self._sent = 0
        self._stall = self._held = self._seconds = 0.0

    async def run(self, limit: float) -> None:
        limits = TransportLimits(upload_bytes_per_second=limit)
        listen = "tcp://127.0.0.1:0"
        keys = self._keys[self._name]
        async with ZeroMqTransport(keys, Random(), listen, limits) as transport, asyncio.TaskGroup() as group:
            transport.allow([pair.public for pair in self._keys.values()])
            outbox = Outbox(transport, group.create_task, self._peers.get, lambda *_: None)

            def post(outgoing: Outgoing) -> None:
                if isinstance(outgoing.message, BlobPart):
                    self._sent += outgoing.message.size_bytes
                outbox.post(outgoing)

            self._exchange = Exchange(Blobs(), post)
            tasks = [group.create_task(self._listen(transport)), group.create_task(self._beat())]
            self._pipe.send(transport.address)
            while (order := await asyncio.to_thread(self._pipe.recv)) is not None:
                self._pipe.send(await self._follow(transport, order))
            for task in tasks:
                task.cancel()
            os._exit(0)

    async def _listen(self, transport: ZeroMqTransport) -> None:
        while True:
            event = await transport.receive()
            if isinstance(event, Delivery):
                message: Any = messages.unpack(event.header, event.buffers)
                self._exchange.receive(self._names[event.sender], message, event.buffers)

    async def _beat(self) -> None:
        """Measure how late a timer is, and how much of that is not a wait for a core."""
        loop = asyncio.get_running_loop()
        while True:
            before, waited = loop.time(), _read_wait_seconds()
            await asyncio.sleep(_BEAT_SECONDS)
            late = loop.time() - before - _BEAT_SECONDS
            self._stall = max(self._stall, late)
            self._held = max(self._held, late - (_read_wait_seconds() - waited))

    async def _follow(self, transport: ZeroMqTransport, order: tuple[Any, ...]) -> Any:
        match order:
            case ("make", size_bytes, seed):
                pieces = lambda: _make_up(size_bytes, seed)  # noqa: E731
                return await asyncio.to_thread(self._exchange.blobs.keep_pieces, pieces)
            case ("dial", others):
                for node, address in others.items():
                    transport.dial(self._peers[node], [address])
                while not {self._peers[node] for node in others} <= transport.connected():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            case ("start",):
                self._stall, self._held, self._sent = 0.0, 0.0, 0
                self._began = time.process_time(), time.thread_time()
            case ("fetch", Fetch() as fetch):
                started = time.perf_counter()
                found = await self._exchange.fetch(
                    fetch.ref,
                    fetch.sources,
                    quiet_seconds=60.0,
                    reserve=fetch.reserve,
                    can_wait=bool(fetch.reserve),
                    passes_on=True,
                )
                assert len(found) == fetch.ref.size_bytes, found  # type: ignore[arg-type]
                self._seconds = time.perf_counter() - started
            case ("measure",):
                cpu, loop_cpu = time.process_time() - self._began[0], time.thread_time() - self._began[1]
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
                return Measured(self._seconds, cpu, loop_cpu, self._stall, self._held, self._sent, peak)
        return None


def _read_wait_seconds() -> float:
    """Return how long this thread could run and no core was free; 0 where the system does not say."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _make_up(size_bytes: int, seed: int) -> Any:
    random = Random(seed)
    piece = bytearray(random.randbytes(_PIECE))
    for start in range(0, size_bytes, _PIECE):
        piece[:8] = start.to_bytes(8, "little")  # no two pieces are alike
        yield bytes(piece[: size_bytes - start])
