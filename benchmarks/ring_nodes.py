"""Real processes that average with each other: ours, the baselines and gloo over the same links, in turn.

One process per node, forked with torch loaded, in its own network namespace where links are limited. Nodes
keep their connections between runs. A run starts when the parent says so and ends when the last node has
every mean it owns; all processes read the same clock.
"""

import asyncio
import itertools
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from random import Random
from typing import Any, Protocol, Self

import numpy as np
import torch

from benchmarks.baselines.gloo_allreduce import Gloo
from benchmarks.baselines.trees import SERVER, SYSTEMS, TreeReduce
from benchmarks.links import Links
from benchmarks.multi_ring import MultiRing
from benchmarks.namespaces import INTERFACE, Namespaces, Rate, enter
from benchmarks.shapes import Floats, Outgoing, Shape
from ravnest.config import WireFormat
from ravnest.ids import NodeId
from ravnest.net.identity import KeyPair, new_keys
from ravnest.net.transport import Delivery, PeerId, Service
from ravnest.net.zeromq import ZeroMqTransport
from ravnest.peer.machine import return_freed_memory

OURS, GLOO = "multi-ring", "gloo"
_FAILED = "failed:"
FORMATS = {f"{OURS}, {each}": each for each in (WireFormat.BF16, WireFormat.INT8, WireFormat.INT4)}
_TOLERANCES = {WireFormat.BF16: 0.02, WireFormat.INT8: 0.05, WireFormat.INT4: 0.5}  # of the largest value


class Machine(Protocol):
    """One node's side of an average."""

    @property
    def done(self) -> bool: ...
    @property
    def result(self) -> Floats: ...
    def start(self) -> Iterable[Outgoing]: ...
    def receive(self, header: bytes, buffer: memoryview) -> Iterable[Outgoing]: ...


@dataclass(frozen=True, slots=True)
class Seat:
    """What a process is told about itself."""

    node: NodeId
    shape: Shape
    keys: KeyPair
    host: str
    namespace: str | None
    meeting: str  # a file, for gloo
    slowest: float  # bytes per second of any link


@dataclass(frozen=True, slots=True)
class Turn:
    """One average, as seen from outside."""

    seconds: float
    cpu_seconds: float  # of all nodes together


class Nodes:
    """All processes of one shape on links of these rates (none: loopback). Use it as a context manager."""

    def __init__(
        self, shape: Shape, rates: Mapping[NodeId, Rate] | None = None, relay_rate: float = 0.0
    ) -> None:
        self._shape = shape
        self._rates = rates
        self._relay_rate = relay_rate
        both = [rate for each in (rates or {}).values() for rate in (each.upload, each.download)]
        self._slowest = min(both, default=relay_rate or math.inf)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._spaces = stack.enter_context(Namespaces(self._rates)) if self._rates else None  # type: ignore[arg-type]
            self._links = stack.enter_context(Links(self._relay_rate)) if self._relay_rate else None
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch.distributed", "benchmarks.ring_nodes"])
            self._pipes: dict[NodeId, Connection] = {}
            keys = {node: new_keys() for node in (*self._shape.stages, SERVER)}
            for node, pair in keys.items():
                here, there = context.Pipe()
                host = self._spaces.address(node) if self._spaces else "127.0.0.1"
                path = self._spaces.path(node) if self._spaces else None
                meeting = os.path.join(folder, "meeting")
                seat = Seat(node, self._shape, pair, host, path, meeting, self._slowest)
                process = context.Process(target=_serve, args=(there, seat), daemon=True)
                process.start()
                there.close()
                stack.callback(_end, process)
                stack.callback(here.close)
                self._pipes[node] = here
            self._meet(keys)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def average(self, system: str) -> Turn:
        """Let every node average once; raises if one does not end with the mean."""
        self._ask_all(("prepare", system))
        found = self._ask_all(("go",))
        self._ask_all(("check",))
        seconds = max(end for _, end, _ in found) - min(start for start, *_ in found)
        return Turn(seconds, sum(cpu for *_, cpu in found))

    def stream_rate(self, num_bytes: int) -> float:
        """Return what plain TCP brings per second, every node sending to the next and receiving."""
        nodes = list(self._shape.stages)
        places = dict(zip(self._pipes, self._ask_all(("listen",)), strict=True))
        for node, after in zip(nodes, nodes[1:] + nodes[:1], strict=True):
            self._pipes[node].send(("stream", places[after], num_bytes))
        return min(self._answers(nodes))

    def _meet(self, keys: Mapping[NodeId, KeyPair]) -> None:
        listening = dict(zip(self._pipes, self._ask_all(None), strict=True))
        if self._links is not None:
            listening = {node: self._links.through(address) for node, address in listening.items()}
        edges = _edges(self._shape)
        known = {node: (keys[node].public, address) for node, address in listening.items()}
        for node, pipe in self._pipes.items():
            neighbours = {other for edge in edges if node in edge for other in edge if other != node}
            pipe.send(("meet", known, sorted(neighbours)))
        self._answers(self._pipes)

    def _ask_all(self, command: Any) -> list[Any]:
        if command is not None:
            for pipe in self._pipes.values():
                pipe.send(command)
        return self._answers(self._pipes)

    def _answers(self, nodes: Iterable[NodeId]) -> list[Any]:
        """Return what each says, in this order; whoever fails first is heard first."""
        waiting = {self._pipes[node]: node for node in nodes}
        found: dict[NodeId, Any] = dict.fromkeys(waiting.values())
        while waiting:
            for pipe in wait(list(waiting)):
                assert isinstance(pipe, Connection)
                node = waiting.pop(pipe)
                found[node] = pipe.recv()
                if isinstance(found[node], str) and found[node].startswith(_FAILED):
                    raise RuntimeError(f"node {node} {found[node]}")
        return list(found.values())


def _edges(shape: Shape) -> set[frozenset[NodeId]]:
    """Return the pairs that talk to each other in any system."""
    edges = {
        frozenset(pair)
        for make in SYSTEMS.values()
        for tree in make(shape)
        for pair in (*tree.up.items(), *tree.down.items())
    }
    for ring in shape.rings:
        edges |= {
            frozenset(pair) for pair in zip(ring.owners, ring.owners[1:] + ring.owners[:1], strict=True)
        }
    return edges


def _end(process: Any) -> None:
    process.kill()  # there is nothing to keep, and gloo's threads wait for each other
    process.join()


def _serve(pipe: Connection, seat: Seat) -> None:
    if seat.namespace is not None:
        enter(seat.namespace)
    torch.set_num_threads(1)
    return_freed_memory(2.0**40)  # as a peer does
    try:
        asyncio.run(_Member(pipe, seat).serve())
    except (EOFError, ConnectionError):  # the parent has what it wanted
        pass
    except Exception as error:
        pipe.send(f"{_FAILED} {type(error).__name__} {error}")
        raise


class _Member:
    """A node's process."""

    def __init__(self, pipe: Connection, seat: Seat) -> None:
        self._pipe, self._seat = pipe, seat
        is_server = seat.node == SERVER
        self._vector = np.empty(0, np.float32) if is_server else seat.shape.vector(seat.node)
        self._peers: dict[NodeId, PeerId] = {}
        self._outboxes: dict[NodeId, asyncio.Queue[tuple[bytes, memoryview]]] = {}
        self._gloo: Gloo | None = None
        self._system = ""
        self._machine: Machine | None = None

    async def serve(self) -> None:
        seat, loop = self._seat, asyncio.get_running_loop()
        async with ZeroMqTransport(seat.keys, Random(), f"tcp://{seat.host}:*") as self._transport:
            self._pipe.send(self._transport.address)
            while True:
                command, *arguments = await loop.run_in_executor(None, self._pipe.recv)
                self._pipe.send(await getattr(self, f"_{command}")(*arguments))

    async def _meet(self, known: Mapping[NodeId, tuple[Any, str]], neighbours: Sequence[NodeId]) -> None:
        self._transport.allow(key for key, _ in known.values())
        self._peers = {node: KeyPair(key, b"").peer for node, (key, _) in known.items()}
        for node in neighbours:
            if self._seat.node < node:
                self._transport.dial(self._peers[node], [known[node][1]])
        wanted = {self._peers[node] for node in neighbours}
        while not wanted <= self._transport.connected():
            await self._transport.receive()
        self._tasks = [asyncio.create_task(self._send_all(node)) for node in neighbours]

    async def _prepare(self, system: str) -> None:
        node, shape = self._seat.node, self._seat.shape
        self._system, self._machine = system, None
        if system in SYSTEMS:
            first = shape.stages[node][1].start * shape.items_per_position if node != SERVER else 0
            self._machine = TreeReduce(node, SYSTEMS[system](shape), self._vector, first, shape.weights)
        elif node == SERVER:
            return
        elif system == OURS or system in FORMATS:
            wire_format = FORMATS.get(system, WireFormat.FP32)
            self._machine = MultiRing(node, shape, self._vector, wire_format, self._seat.slowest)
        elif self._gloo is None:
            interface = INTERFACE if self._seat.namespace else "lo"
            self._gloo = await asyncio.to_thread(Gloo.join, node, shape, self._seat.meeting, interface)

    async def _go(self) -> tuple[float, float, float]:
        started, cpu = time.monotonic(), time.process_time()
        if self._machine is not None:
            await self._exchange(self._machine)
        elif self._seat.node != SERVER:
            assert self._gloo is not None
            self._gloo_mean = await asyncio.to_thread(self._gloo.average, self._vector)
        ended, cpu = time.monotonic(), time.process_time() - cpu
        return started, ended if self._seat.node != SERVER else started, cpu

    async def _check(self) -> None:
        """Compare with the mean: when all are done, for a node that has all may still owe others much."""
        if self._seat.node != SERVER:
            found = self._machine.result if self._machine else self._gloo_mean
            tolerance = _TOLERANCES.get(FORMATS.get(self._system, WireFormat.FP32), 1e-4)
            off = self._seat.shape.fault(self._seat.node, found, tolerance)
            assert off is None, f"{self._system}: the mean of {self._seat.node} is {off:.2g} off"
        self._machine = None

    async def _exchange(self, machine: Machine) -> None:
        for first in machine.start():
            self._queue((first,))
            await asyncio.sleep(0)  # what is ready leaves while the rest is made
        while not machine.done:
            event = await self._transport.receive()
            if isinstance(event, Delivery):
                self._queue(machine.receive(event.header, event.buffers[0]))
            # A link that is lost comes back by itself, with all that was under way.

    def _queue(self, messages: Iterable[Outgoing]) -> None:
        for to, header, buffer in messages:
            self._outboxes.setdefault(to, asyncio.Queue()).put_nowait((header, buffer))

    async def _send_all(self, node: NodeId) -> None:
        """Send what is for one neighbour, as peer.agent does: a slow one delays no other."""
        queue = self._outboxes.setdefault(node, asyncio.Queue())
        while True:
            header, buffer = await queue.get()
            await self._transport.send(self._peers[node], Service.AVERAGING, header, (buffer,))

    async def _listen(self) -> tuple[str, int]:
        self._received: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            started, total = time.monotonic(), 0
            while data := await reader.read(1 << 20):
                total += len(data)
            self._received.set_result(total / (time.monotonic() - started))
            writer.close()

        self._server = await asyncio.start_server(read, self._seat.host, 0, limit=1 << 20)
        return self._seat.host, self._server.sockets[0].getsockname()[1]

    async def _stream(self, place: tuple[str, int], num_bytes: int) -> float:
        _, writer = await asyncio.open_connection(*place)
        for _ in itertools.repeat(None, num_bytes >> 16):
            writer.write(bytes(1 << 16))
            await writer.drain()
        writer.close()
        rate = await self._received
        self._server.close()
        return rate
