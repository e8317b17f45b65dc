"""A real hub and many light peers over real CURVE links: no torch, many links in each of a few processes.

The hub is the program that ships: server, coordinator, monitors, log on disk, ZeroMQ. Its peers join, say
that their stages are ready, report every microbatch and vote in rounds; they compute nothing. Each process
has one event loop and one ZeroMQ context for all its peers.
"""

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import zmq

from benchmarks.hub_load import CONFIG, GroupPlanner, make_node, make_profile
from benchmarks.measure import memory_of
from ravnest.errors import ProtocolError
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import JobGiven, JobSettings
from ravnest.hub.coordinator.notices import (
    ClusterStarted,
    Joined,
    Left,
    Missing,
    Notice,
    PlanFormed,
    RoundEnded,
)
from ravnest.hub.service.data_service import Parts
from ravnest.hub.service.event_log import EventLog
from ravnest.hub.service.server import HUB_LIMITS, HubParts, Server
from ravnest.ids import NodeId
from ravnest.net.identity import SECRET_BYTES, Token, greet, new_keys, peer_of
from ravnest.net.transport import Delivery, LinkDown, LinkUp, PublicKey, Service, TransportLimits
from ravnest.net.zeromq import ZeroMqTransport, allow_many_files, open_context
from ravnest.protocol import messages
from ravnest.protocol.averaging import RoundOpen, RoundReady
from ravnest.protocol.membership import PROTOCOL_VERSION, Hello, Welcome
from ravnest.protocol.placement import PlanOrder, RingOrder, StageParts, StageReady
from ravnest.protocol.training import LeaseDone, LeaseGrant, StepReport

HERE = "tcp://127.0.0.1:*"
_LOOK_SECONDS = 0.01  # between two looks at how late the hub's event loop is
_END_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """How many peers there are, how they are grouped, and how long the hub is watched while they train."""

    num_peers: int
    num_processes: int
    microbatch_seconds: float
    train_seconds: float
    join_per_second: float = 0.0  # 0: all at once
    limit_seconds: float = 300.0


# The hub's process.


@dataclass
class _Seen:
    """What the hub told people, with times."""

    joined: list[float] = field(default_factory=list)
    num_missing: int = 0
    num_left: int = 0
    num_started: int = 0
    num_rounds: int = 0
    num_aborted: int = 0
    planned_at: float = 0.0
    started_at: float = 0.0

    def record(self, notice: Notice) -> None:
        now = time.monotonic()
        match notice:
            case Joined():
                self.joined.append(now)
            case Missing():
                self.num_missing += 1
            case Left():
                self.num_left += 1
            case PlanFormed():
                self.planned_at = now
            case ClusterStarted():
                self.num_started += 1
                self.started_at = now
            case RoundEnded(is_committed=is_committed):
                self.num_rounds += is_committed
                self.num_aborted += not is_committed


class _NoOwner:
    """A requester's side without a model: stages of a few bytes, and no fields."""

    def make_parts(self, start: int, stop: int) -> Parts:
        return Parts(b"blueprint %d %d" % (start, stop), lambda: [b"weights"], (), ())

    def read_fields(
        self, is_evaluation: bool, microbatches: Sequence[Sequence[int]], names: Sequence[str]
    ) -> Iterator[Any]:
        while True:
            yield (), ()

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"nobody asks for {name}")


async def _look(late: list[tuple[float, float]]) -> None:
    """Record how late the event loop is, and what it took of a core meanwhile, again and again."""
    loop = asyncio.get_running_loop()
    while True:
        due, used = loop.time() + _LOOK_SECONDS, time.thread_time()
        await asyncio.sleep(_LOOK_SECONDS)
        late.append((loop.time() - due, time.thread_time() - used))


def _run_hub(load: LinkLoad, control: Connection, folder: str) -> None:
    asyncio.run(_serve(load, control, Path(folder)))


async def _serve(load: LinkLoad, control: Connection, folder: Path) -> None:
    allow_many_files()
    settings = JobSettings(
        num_samples=10**8,
        num_validation=0,
        batch_size=64,
        epochs=1,
        rates=(1.0,),
        is_whole_batch=True,
        settle_seconds=1e6,
        average_every=4,
        expected_nodes=load.num_peers,
    )
    profile = make_profile()
    job = JobGiven(profile, CONFIG, settings, 0.0)
    keys, secret, seen, late = new_keys(), os.urandom(SECRET_BYTES), _Seen(), list[tuple[float, float]]()
    parts = HubParts(planner=GroupPlanner(cluster_size=1, spare_share=0.0))
    with EventLog(folder) as store:
        server = Server(
            Token((), keys.public, secret), seen.record, store=store, hub=Coordinator(job), parts=parts
        )
        async with ZeroMqTransport(keys, SystemRandom(), HERE, HUB_LIMITS, admit=server.admit) as transport:
            control.send((transport.address, keys.public, secret))
            running = asyncio.create_task(server.run(transport, _NoOwner(), job))  # type: ignore[arg-type]
            looking = asyncio.create_task(_look(late))
            try:
                await _answer(control, server, seen, late, folder)
            finally:
                for task in (running, looking):
                    task.cancel()
                await asyncio.wait([running, looking])


async def _answer(
    control: Connection, server: Server, seen: _Seen, late: list[tuple[float, float]], folder: Path
) -> None:
    """Answer the parent's questions until it has no more."""
    while await asyncio.to_thread(control.recv) == "look":
        memory, usage = memory_of("self")["VmRSS"], os.times()
        log_bytes = sum(each.stat().st_size for each in os.scandir(folder))
        figures = {
            "now": time.monotonic(),
            "cpu_seconds": usage.user + usage.system,
            "rss_bytes": memory,
            "files": len(os.listdir("/proc/self/fd")),
            "members": len(server.hub.membership),
            "clusters": len(server.hub.clusters),
            "running": len(server.hub.placement.running),
            "log_bytes": log_bytes,
            "samples": server.hub.ledger.num_counted,
            "late": late.copy(),
            "seen": replace(seen, joined=seen.joined.copy()),
        }
        late.clear()
        control.send(figures)


# A process of peers.


class _LightPeer:
    """One link to the hub, and what a peer says over it."""

    def __init__(self, number: int, token: Token, load: LinkLoad, totals: dict[str, int]) -> None:
        self._number, self._token, self._load, self._totals = number, token, load, totals
        self._keys = new_keys()
        self._name = NodeId("")
        self._hub = peer_of(PublicKey(token.hub_key))
        self._leases: asyncio.Queue[LeaseGrant] = asyncio.Queue()
        self._version = 0

    async def run(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        limits = TransportLimits()
        async with ZeroMqTransport(
            self._keys, SystemRandom(), None, limits, context=context
        ) as self._transport:
            if self._load.join_per_second:
                await asyncio.sleep(self._number / self._load.join_per_second)
            self._transport.allow([PublicKey(self._token.hub_key)])
            self._transport.dial(self._hub, self._token.addresses, greet(self._token, self._keys.public))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._train())
                while True:
                    await self._follow(await self._transport.receive())

    async def _follow(self, event: object) -> None:
        match event:
            case LinkUp(is_new=True):
                node = make_node(self._number)
                address = f"tcp://10.{self._number >> 8}.{self._number & 255}.1:7700"
                await self._say(Hello(PROTOCOL_VERSION, node, (address,)))
            case LinkDown(_, reason):
                self._totals["lost"] += 1
                self._totals["silent"] += reason.startswith("nothing heard")
            case Delivery(header=header, buffers=buffers):
                try:
                    message = messages.unpack(header, buffers)
                except ProtocolError:
                    self._totals["damaged"] += 1
                    return
                await self._heed(message, len(header))

    async def _heed(self, message: object, num_bytes: int) -> None:
        match message:
            case Welcome(name):
                self._name = name
                self._totals["joined"] += 1
            case PlanOrder() | RingOrder():
                self._totals["orders"] += 1
                self._totals["order_bytes"] += num_bytes
                self._totals["largest_order"] = max(self._totals["largest_order"], num_bytes)
            case StageParts(build_id):
                await self._say(StageReady(build_id))
            case LeaseGrant():
                self._leases.put_nowait(message)
            case RoundOpen(round_id=round_id):
                await self._say(RoundReady(round_id, self._name))

    async def _train(self) -> None:
        random = Random(self._number)
        await asyncio.sleep(random.uniform(0.0, self._load.microbatch_seconds))
        while True:
            grant = await self._leases.get()
            for index, num_samples in enumerate(grant.num_samples):
                await asyncio.sleep(self._load.microbatch_seconds)
                self._version += 1
                number = grant.first_microbatch + index
                facts = (grant.build_id, number, self._version, 0, num_samples)
                seconds = self._load.microbatch_seconds / 2
                await self._say(StepReport(*facts, seconds, seconds, 0.0, 0.0, 1.0, ()))
            await self._say(LeaseDone(grant.build_id, grant.lease, sum(grant.num_samples)))

    async def _say(self, message: Any) -> None:
        self._totals["said"] += 1
        await self._transport.send(self._hub, Service.CONTROL, messages.pack(message))


def _run_peers(
    numbers: range, load: LinkLoad, invitation: tuple[str, bytes, bytes], control: Connection
) -> None:
    asyncio.run(_take_part(numbers, load, Token((invitation[0],), *invitation[1:]), control))


async def _take_part(numbers: range, load: LinkLoad, token: Token, control: Connection) -> None:
    allow_many_files()
    totals = dict.fromkeys(
        ("joined", "orders", "order_bytes", "largest_order", "lost", "silent", "damaged", "said"), 0
    )
    context = open_context()
    peers = [_LightPeer(number, token, load, totals) for number in numbers]
    control.send("ready")
    await asyncio.to_thread(control.recv)
    tasks = [asyncio.create_task(peer.run(context)) for peer in peers]
    while await asyncio.to_thread(control.recv) == "look":
        ended = next((each for each in tasks if each.done()), None)
        control.send(totals if ended is None else repr(ended.exception()))
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await asyncio.to_thread(context.term)


# The parent.


class Swarm:
    """A hub and processes of peers, which the parent asks how they are."""

    def __init__(self, load: LinkLoad) -> None:
        self._load, self._context = load, multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ravnest-hub-")
        self._processes: list[Any] = []
        self.hub = self._start(_run_hub, load, folder=self._folder.name)
        invitation = self._receive(self.hub)
        share = -(-load.num_peers // load.num_processes)
        parts = [range(k, min(k + share, load.num_peers)) for k in range(0, load.num_peers, share)]
        self.peers = [self._start(_run_peers, each, load, invitation) for each in parts]
        for each in self.peers:
            self._receive(each)

    def _start(self, work: Any, *facts: Any, folder: str | None = None) -> Connection:
        own, other = self._context.Pipe()
        given = (facts[0], other, folder) if folder is not None else (*facts, other)
        process = self._context.Process(target=work, args=given, daemon=True)
        process.start()
        self._processes.append(process)
        return own

    def _receive(self, control: Connection) -> Any:
        if not control.poll(self._load.limit_seconds):
            raise TimeoutError(f"a process says nothing for {self._load.limit_seconds:.0f} s")
        return control.recv()

    def begin(self) -> float:
        """Let all peers dial; return when that was."""
        for each in self.peers:
            each.send("go")
        return time.monotonic()

    def look_at_hub(self) -> dict[str, Any]:
        """Return what the hub shows."""
        self.hub.send("look")
        shown: dict[str, Any] = self._receive(self.hub)
        return shown

    def look(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Return what the hub shows, and the totals of all peers."""
        for each in self.peers:
            each.send("look")
        figures, found = self.look_at_hub(), [self._receive(each) for each in self.peers]
        for each in found:
            assert isinstance(each, dict), f"a peer ended: {each}"
        totals = {key: sum(each[key] for each in found) for key in found[0]}
        totals["largest_order"] = max(each["largest_order"] for each in found)
        return figures, totals

    def close(self) -> None:
        """End all processes."""
        for each in (*self.peers, self.hub):
            each.send("end")
        for process in self._processes:
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def measure_links(load: LinkLoad) -> dict[str, Any]:
    """Let all peers join, follow a plan of one-node clusters and train; return what that took."""
    swarm = Swarm(load)
    try:
        idle = swarm.look_at_hub()
        began = swarm.begin()
        joining = _wait(swarm, began + load.limit_seconds, lambda hub, _: hub["members"] == load.num_peers)
        planning = _wait(
            swarm,
            began + load.limit_seconds,
            lambda hub, told: told["orders"] >= load.num_peers == hub["running"],
        )
        swarm.look()
        until = time.monotonic() + load.train_seconds
        training = _wait(swarm, until, lambda *_: time.monotonic() >= until, needs_it=False)
    finally:
        swarm.close()
    return _summarise(load, began, idle, joining, planning, training)


@dataclass(frozen=True, slots=True)
class _Phase:
    first: dict[str, Any]
    last: dict[str, Any]
    totals: dict[str, int]
    late: list[tuple[float, float]]


def _wait(swarm: Swarm, until: float, is_over: Any, *, needs_it: bool = True) -> _Phase:
    """Look every half second until something is so."""
    first, late = None, list[tuple[float, float]]()
    while True:
        hub, totals = swarm.look()
        first = first or hub
        late += hub["late"]
        if is_over(hub, totals):
            return _Phase(first, hub, totals, late)
        if time.monotonic() >= until and needs_it:
            shown = {key: value for key, value in hub.items() if key != "late"}
            shown["seen"].joined.clear()
            raise TimeoutError(f"it did not come to it: {shown}, {totals}")
        time.sleep(0.5)


def _summarise(load: LinkLoad, began: float, idle: dict[str, Any], *phases: _Phase) -> dict[str, Any]:
    joining, planning, training = phases
    seen = training.last["seen"]
    join_seconds = seen.joined[load.num_peers - 1] - began
    seconds = training.last["now"] - training.first["now"]
    figures: dict[str, Any] = {
        "peers": load.num_peers,
        "joined_in_seconds": round(join_seconds, 2),
        "joins_per_second": round(load.num_peers / join_seconds, 1),
        "plan_seconds": round(seen.started_at - seen.planned_at, 2),
        "clusters": training.last["clusters"],
        "largest_order_bytes": training.totals["largest_order"],
        "messages_per_second": round((training.totals["said"] - planning.totals["said"]) / seconds, 1),
        "samples_per_second": round((training.last["samples"] - training.first["samples"]) / seconds, 1),
        "rounds": seen.num_rounds,
        "rounds_aborted": seen.num_aborted,
        "hub_cores": round((training.last["cpu_seconds"] - training.first["cpu_seconds"]) / seconds, 3),
        "hub_mb": round(training.last["rss_bytes"] / 1e6, 1),
        "kb_per_peer": round((joining.last["rss_bytes"] - idle["rss_bytes"]) / 1e3 / load.num_peers, 1),
        "files": training.last["files"],
        "links_lost": training.totals["lost"],
        "nodes_lost": seen.num_left,
        "log_bytes_per_second": round((training.last["log_bytes"] - training.first["log_bytes"]) / seconds),
        "load_average": round(os.getloadavg()[0], 1),
    }
    for name, phase in zip(("joining", "planning", "training"), phases, strict=True):
        for index, what in enumerate(("late", "busy")):
            found = sorted(each[index] for each in phase.late) or [0.0]  # it was over at the first look
            figures[f"{name}_{what}_ms"] = {
                "p50": _milli(found[len(found) // 2]),
                "p99": _milli(found[int(0.99 * len(found))]),
                "max": _milli(found[-1]),
            }
    return figures


def _milli(seconds: float) -> float:
    return round(1e3 * seconds, 1)
