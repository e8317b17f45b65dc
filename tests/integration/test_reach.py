"""How real programs find each other: several addresses, doors, no doors, and the hub's relay in between."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import msgspec
import pytest
from support.as_root import call, networks, unroutable
from support.small_swarm import (
    BARE_JOIN,
    END_SECONDS,
    ENDLESS,
    JOIN,
    PLAN,
    ROOT,
    check_books,
    joining,
    make_job,
    stop_run,
)

import ravnest as rv
from ravnest.config import NetTimeouts, PeerTimeouts, Timeouts
from ravnest.hub.coordinator.events import JobGiven, MakePlan, PlanMade
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import (
    ClusterStarted,
    EpochDone,
    Left,
    Measured,
    NotDialled,
    Notice,
    PlanFormed,
)
from ravnest.hub.coordinator.planner import SearchPlanner
from ravnest.hub.service.server import HubParts
from ravnest.net import relay
from ravnest.net.identity import Token, new_keys, split_address, write_token
from ravnest.net.transport import Delivery, LinkDown, LinkUp, Service
from ravnest.net.zeromq import ZeroMqTransport
from ravnest.peer.connections import Connections, PlannedPeer

HERE = "tcp://127.0.0.1:*"


class Relays:
    """The relays of hubs, by which one can tell what they have brought together."""

    def __init__(self) -> None:
        self.made: list[relay.Relay] = []

        def make(timeouts: NetTimeouts) -> relay.Relay:
            self.made.append(relay.Relay(timeouts))
            return self.made[-1]

        self.parts = HubParts(make_relay=make)

    @property
    def num_joined(self) -> int:
        """How many pairs of streams met."""
        return sum(each.num_joined for each in self.made)


def num_stages(told: list[Notice]) -> list[int]:
    plan = next(news.plan for news in told if isinstance(news, PlanFormed))
    return [len(cluster.stages) for cluster in plan.clusters]


def test_two_peers_that_only_dial_out_train_through_the_relay() -> None:
    told: list[Notice] = []
    relays = Relays()
    with rv.Hub("127.0.0.1:0", plan=PLAN, tell=told.append, parts=relays.parts) as hub:
        with joining(hub.token, ["--outbound-only"], ["--outbound-only", "--quiet"]) as peers:
            hub.fit(make_job(), nodes=2)
            said = peers[0].communicate(timeout=END_SECONDS)[1]
        lines = said.splitlines()
        assert lines[0] == "lends 1.5 MB of memory and 1 GFLOP/s (as claimed) as node0"
        assert hub.token.addresses[0] in lines[1]
        assert "runs no code from the job" in lines[2]
        assert "nowhere, it only dials out" in lines[3]
        assert lines[-1] == "ended: the job is done"
        assert write_token(hub.token) not in said
    assert num_stages(told) == [2]
    check_books(told)
    assert relays.num_joined


def test_peers_that_state_nothing_are_measured_and_planned_with_what_was_found() -> None:
    told: list[Notice] = []
    asked: list[MakePlan] = []

    class Noting(SearchPlanner):
        def make_plan(self, job: JobGiven, order: MakePlan, now: float) -> PlanMade:
            asked.append(order)
            return super().make_plan(job, order, now)

    options = ([], ["--flops", "3 GFLOP/s"])
    with (
        rv.Hub("127.0.0.1:0", plan=PLAN, tell=told.append, parts=HubParts(Noting())) as hub,
        joining(hub.token, *options, join=BARE_JOIN) as peers,
    ):
        hub.fit(make_job(), nodes=2)
        said = peers[0].communicate(timeout=END_SECONDS)[1]
    assert "the job's own work will tell" in said
    check_books(told)
    measured = {news.node.name: news for news in told if isinstance(news, Measured)}
    assert sorted(measured) == ["node0", "node1"]
    assert {news.fault for news in measured.values()} == {""}
    assert {node.name: node for node in asked[0].nodes} == {
        name: each.node for name, each in measured.items()
    }
    first, second = measured["node0"].node, measured["node1"].node
    assert second.flops_per_second == 3e9
    assert 1e6 < first.flops_per_second < 1e13
    for node in (first, second):
        assert 1e5 < node.upload_bytes_per_second < 2e9
        assert 1e5 < node.download_bytes_per_second < 2e9
        assert 0 < node.latency_seconds < 1
        assert (node.upload_bytes_per_second, node.latency_seconds) != (50e6 / 8, 0.01)
    assert show_notice(measured["node0"]).startswith("node0 was measured: ")


def test_dead_addresses_before_the_good_one_are_passed_over() -> None:
    told: list[Notice] = []
    relays = Relays()
    dead = "127.0.0.1:9"
    with rv.Hub("127.0.0.1:0", plan=PLAN, tell=told.append, parts=relays.parts) as hub:
        addresses = (f"tcp://{dead}", "tcp://no-such-host.invalid:7700", *hub.token.addresses)
        token = msgspec.structs.replace(hub.token, addresses=addresses)
        door = ["--listen", "127.0.0.1:0", "--public", dead]
        with joining(token, door, door):
            hub.fit(make_job(), nodes=2)
    assert num_stages(told) == [2]
    check_books(told)
    assert relays.num_joined == 0


@pytest.mark.needs_root
def test_peers_whose_networks_lead_only_to_the_hub_train_through_the_relay() -> None:
    told: list[Notice] = []
    relays = Relays()
    with networks(2) as made, rv.Hub("0.0.0.0:0", plan=PLAN, tell=told.append, parts=relays.parts) as hub:
        port = hub.token.addresses[0].rpartition(":")[2]
        token = msgspec.structs.replace(
            hub.token, addresses=tuple(f"tcp://{here}:{port}" for _, here in made)
        )
        inside = [("ip", "netns", "exec", name) for name, _ in made]
        with joining(token, (), (), prefix=inside) as peers:
            hub.fit(make_job(), nodes=2)
            said = peers[0].communicate(timeout=END_SECONDS)[1]
        assert f"listens at tcp://198.18.{os.getpid() % 250}.2:" in said
    assert num_stages(told) == [2]
    check_books(told)
    assert relays.num_joined


@pytest.mark.needs_root
def test_peers_that_wrongly_believe_they_can_be_dialled_are_found_out() -> None:
    """As behind a router that lets nobody in: they listen at an address that leads nowhere from outside."""
    told: list[Notice] = []
    relays = Relays()
    with networks(2) as made, rv.Hub("0.0.0.0:0", plan=PLAN, tell=told.append, parts=relays.parts) as hub:
        port = hub.token.addresses[0].rpartition(":")[2]
        addresses = tuple(f"tcp://{here}:{port}" for _, here in made)
        token = msgspec.structs.replace(hub.token, addresses=addresses)
        private = f"198.51.100.{os.getpid() % 250}"
        for name, _ in made:
            call(f"ip -netns {name} address add {private}/32 dev lo")
        inside = [("ip", "netns", "exec", name) for name, _ in made]
        door = ["--listen", f"{private}:0"]
        with unroutable(private), joining(token, door, door, prefix=inside) as peers:
            hub.fit(make_job(), nodes=2)
            said = peers[0].communicate(timeout=END_SECONDS)[1]
        assert f"listens at tcp://{private}:" in said
    assert {news.node for news in told if isinstance(news, NotDialled)} == {"node0", "node1"}
    assert num_stages(told) == [2]
    check_books(told)
    assert relays.num_joined


def test_a_peer_taken_back_tells_the_hub_and_the_job_goes_on() -> None:
    told: list[Notice] = []
    victims: list[int] = []

    def interrupt(news: Notice) -> None:
        told.append(news)
        if isinstance(news, ClusterStarted) and not victims:
            victims.append(int(news.nodes[-1].removeprefix("node")))
            peers[victims[0]].send_signal(signal.SIGINT)
        elif isinstance(news, Left) and victims and news.node == f"node{victims[0]}":
            has_left.append(news.reason)
        elif isinstance(news, EpochDone) and len(has_left) == 1:
            has_left.append("and the others went on")
            stop_run()

    has_left: list[str] = []
    with rv.Hub("127.0.0.1:0", plan=PLAN, tell=interrupt) as hub, joining(hub.token, *[[]] * 3) as peers:
        hub.fit(make_job(ENDLESS), nodes=2)
        victim = peers.pop(victims[0])
        said = victim.communicate(timeout=END_SECONDS)[1]
        assert victim.returncode == 130, said
        assert "leaving: the hub is told" in said
        assert "Traceback" not in said
    assert has_left == ["its provider takes it back", "and the others went on"]
    check_books(told, epochs=None)


@pytest.mark.parametrize(
    ("knows", "is_relayed"),
    [((True, True), False), ((True, False), False), ((False, True), False), ((False, False), True)],
)
def test_two_peers_meet_straight_if_either_knows_where_and_at_the_relay_if_not(
    knows: tuple[bool, bool], is_relayed: bool
) -> None:
    timeouts = Timeouts(peer=PeerTimeouts(relay_after_seconds=0.5))
    dead = ("tcp://127.0.0.1:9",)
    ticket = bytes(16)

    async def main() -> None:
        bridge = relay.Relay()
        bridge.add(ticket)
        keys = [new_keys() for _ in range(2)]
        async with AsyncExitStack() as stack:
            place = "127.0.0.1", await stack.enter_async_context(bridge.listen(HERE))
            ends = [
                await stack.enter_async_context(ZeroMqTransport(each, SystemRandom(), HERE)) for each in keys
            ]
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            started = []

            def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                started.append(tasks.create_task(work))
                return started[-1]

            connections = []
            for end, other, is_known in zip(ends, ends[::-1], knows, strict=True):
                end.allow(each.public for each in keys)
                address = split_address(end.address)
                connections.append(
                    Connections(
                        end, address, is_reachable=True, start=start, give_up=print, timeouts=timeouts
                    )
                )
                planned = PlannedPeer(other.peer, (other.address,) if is_known else dead, ticket)
                connections[-1].connect([planned], place)
            for end, other in zip(ends, ends[::-1], strict=True):
                await end.send(other.peer, Service.CONTROL, b"hello")
            async with asyncio.timeout(END_SECONDS):
                for end in ends:
                    while not isinstance(await end.receive(), Delivery):
                        pass
            assert bool(bridge.num_joined) == is_relayed
            for each in connections:
                each.close()
            for task in started:
                task.cancel()

    asyncio.run(main())


class Cable:
    """An address that leads to another one, until it is cut."""

    def __init__(self, far: str) -> None:
        self._far = split_address(far)
        self._writers: list[asyncio.StreamWriter] = []
        self._port = 0

    async def join(self) -> str:
        """Let streams pass; return the address."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return f"tcp://127.0.0.1:{self._port}"

    def cut(self) -> None:
        """End all streams, and let none pass."""
        self._server.close()
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await asyncio.open_connection(*self._far)
        self._writers += [writer, far[1]]
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(_pump(reader, far[1]))
            pumps.create_task(_pump(far[0], writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
    writer.close()


class Pair:
    """Two peers with a cable to each, at whose other end the other one dials, and a relay between them."""

    def __init__(self, knows: tuple[bool, bool]) -> None:
        self._knows = knows
        self._told, self.is_straight = asyncio.Event(), asyncio.Event()
        self.heard: list[bytes] = []
        self.bridge = relay.Relay()
        self.bridge.add(bytes(16))
        self._started: list[asyncio.Task[None]] = []

    async def open(self, stack: AsyncExitStack) -> None:
        """Let both get a link to each other."""
        keys = sorted((new_keys() for _ in range(2)), key=lambda each: each.peer)
        made = [ZeroMqTransport(each, SystemRandom(), HERE) for each in keys]
        self._ends = [await stack.enter_async_context(end) for end in made]
        self.cables = [Cable(end.address) for end in self._ends]
        self._ways = [await cable.join() for cable in self.cables][::-1]  # by who dials there
        place = "127.0.0.1", await stack.enter_async_context(self.bridge.listen(HERE))
        self._tasks = await stack.enter_async_context(asyncio.TaskGroup())
        peer = PeerTimeouts(relay_after_seconds=0.2, look_seconds=0.2, look_later_seconds=0.5)
        around = {
            "is_reachable": True,
            "start": self._start,
            "give_up": print,
            "timeouts": Timeouts(peer=peer),
        }
        for number, (end, other) in enumerate(zip(self._ends, self._ends[::-1], strict=True)):
            end.allow(each.public for each in keys)
            connections = Connections(end, split_address(end.address), **around)
            stack.callback(connections.close)
            self._start(self._follow(end, connections, self._ways[number]))
            way = (self._ways[number],) if self._knows[number] else ()
            connections.connect([PlannedPeer(other.peer, way, bytes(16))], place)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._started.append(self._tasks.create_task(work))
        return self._started[-1]

    async def _follow(self, end: ZeroMqTransport, connections: Connections, way: str) -> None:
        while True:
            match await end.receive():
                case LinkUp(other, _, address):
                    connections.record_link(other, address)
                    if address == way:
                        self.is_straight.set()
                case LinkDown(other):
                    connections.record_loss(other)
                case Delivery(header=header):
                    self.heard.append(header)
                    self._told.set()

    async def say(self, word: bytes) -> None:
        """Return when the other one has heard it."""
        self._told.clear()
        await self._ends[0].send(self._ends[1].peer, Service.CONTROL, word)
        await self._told.wait()

    def close(self) -> None:
        """End what was started."""
        for cable in self.cables:
            cable.cut()
        for task in self._started:
            task.cancel()


@pytest.mark.parametrize("knows", [(True, True), (True, False), (False, True)])
def test_two_peers_that_met_at_the_relay_find_the_straight_way_when_it_is_there_again(
    knows: tuple[bool, bool],
) -> None:
    async def main() -> list[bytes]:
        pair = Pair(knows)
        async with AsyncExitStack() as stack, asyncio.timeout(END_SECONDS):
            await pair.open(stack)
            await pair.say(b"straight")
            assert pair.bridge.num_joined == 0
            for cable in pair.cables:
                cable.cut()
            await pair.say(b"through the relay")
            assert pair.bridge.num_joined == 1
            pair.is_straight.clear()
            for cable in pair.cables:
                await cable.join()
            await pair.is_straight.wait()
            await pair.say(b"straight again")
            pair.close()
        return pair.heard

    assert asyncio.run(main()) == [b"straight", b"through the relay", b"straight again"]


def join(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*JOIN, "--memory", "1 GB", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, cwd=ROOT, input=stdin, capture_output=True, text=True)


def test_a_hub_that_answers_nowhere_is_told_with_every_address_and_its_reason(tmp_path: Path) -> None:
    addresses = ("tcp://127.0.0.1:9", "tcp://no-such-host.invalid:7700")
    file = tmp_path / "token"
    file.write_text(write_token(Token(addresses, new_keys().public, bytes(16))) + "\n")
    # It has tried both well before.
    ended = join("--token-file", str(file), "--emulate", "2 GFLOP/s", "--patience", "5 s")
    assert ended.returncode == 4, ended.stderr
    assert "(emulated)" in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert "at tcp://127.0.0.1:9 nobody answers at this address" in last
    assert "at tcp://no-such-host.invalid:7700 no-such-host.invalid cannot be found" in last
    assert "is it running" in last
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "no token: paste"),
        (("rvn1_a", "--token-file", "-"), "leave one out"),
        (("--token-file", "no/such/file"), "does not exist"),
        (("--token-file", "-"), "truncated"),
        (("@", "--listen", "here"), "'here' is no address"),
        (("@", "--public", "192.0.2.7:0"), "names no port"),
        (("@", "--public", "0.0.0.0:7700"), "names no host"),
        (("@", "--public", "192.0.2.7:99999"), "is no address"),
        (("@", "--outbound-only", "--listen", "127.0.0.1:0"), "opens no door"),
    ],
)
def test_a_wrong_option_is_a_sentence(arguments: tuple[str, ...], reason: str) -> None:
    token = write_token(Token(("tcp://127.0.0.1:9",), new_keys().public, bytes(16)))
    given = [token if each == "@" else each for each in arguments]
    ended = join(*given, stdin="rvn1_a\n", RAVNEST_TOKEN="")
    assert ended.returncode == 3, ended.stderr
    assert reason in ended.stderr
    assert "Traceback" not in ended.stderr
