"""Peers of another version, peers that send garbage, that lie or that vanish: they go, the others stay."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from random import Random, SystemRandom
from typing import Any

import msgspec
import pytest
from support.hub_world import job
from support.memory_store import MemoryStore
from support.small_swarm import JOIN, MEMORY_BYTES, PLAN, ROOT, check_books, joining, make_job
from support.stranger import stranger

import ravnest as rv
from ravnest.config import WireFormat
from ravnest.errors import ConfigError, LinkError
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Event, PeerJoined, Received
from ravnest.hub.coordinator.notices import Joined, Left, Notice, PlanFormed
from ravnest.hub.service.admission import ALLOWANCES, Admission, Spending
from ravnest.hub.service.data_service import Parts
from ravnest.hub.service.guests import GuestsInMemory
from ravnest.hub.service.server import HUB_LIMITS, HubParts, Server
from ravnest.ids import LeaseId, MicrobatchId
from ravnest.net.identity import SECRET_BYTES, Token, derive_secret, new_keys, peer_of, write_token
from ravnest.net.relay import Relay
from ravnest.net.transport import DialFailed, LinkDown, LinkUp, PublicKey
from ravnest.net.zeromq import ZeroMqTransport
from ravnest.protocol import messages
from ravnest.protocol.membership import PROTOCOL_VERSION, Complaint, Leave, Refused, Stop, Welcome
from ravnest.protocol.placement import BlobRequest, PlanOrder
from ravnest.protocol.tensors import TensorSpec
from ravnest.protocol.training import Activation, Gradient, LeaseDone
from ravnest.transfer.link_probe import name_ballast

HERE = "tcp://127.0.0.1:*"
GUEST = b"a guest."  # the number of an invitation


class World:
    """A hub whose job never gets as far as training."""

    server: Server
    token: Token
    guests_token: Token  # of one guest

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.guests = GuestsInMemory()
        self.told: list[Notice] = []
        self.logged: list[Event] = []
        self.watched: list[Event] = []
        self.has_watched = asyncio.Event()  # once more; cleared by whoever waits

    async def wait_for(self, kind: type) -> None:
        """Wait until the hub was sent such a message."""
        while not any(isinstance(each, Received) and isinstance(each.message, kind) for each in self.watched):
            self.has_watched.clear()
            await self.has_watched.wait()

    def watch(self, event: Event, _: object) -> None:
        self.watched.append(event)
        self.has_watched.set()

    def make_parts(self, start: int, stop: int) -> Parts:
        return Parts(b"blueprint", lambda: [b"weights"], (), ())

    def left(self) -> list[tuple[str, str]]:
        return [(news.node, news.reason) for news in self.told if isinstance(news, Left)]


@asynccontextmanager
async def hub(expected_nodes: int = 9, **parts: Any) -> AsyncIterator[World]:
    keys, secret, relay = new_keys(), os.urandom(SECRET_BYTES), Relay()
    world, store = World(relay), MemoryStore()
    world.logged = store.kept
    given = job(expected_nodes=expected_nodes, settle_seconds=1e6)
    given_parts = HubParts(watch=world.watch, **parts)
    world.guests.change(lambda known: known.invite(GUEST.hex(), "anna", 0.0, None, None))
    token = Token((), keys.public, secret)
    facts = {"hub_secret": keys.secret, "guests": world.guests}
    server = Server(
        token,
        world.told.append,
        relay=relay,
        store=store,
        hub=Coordinator(given),
        parts=given_parts,
        admission=Admission(token, relay, given_parts.version, **facts),
    )
    async with ZeroMqTransport(keys, SystemRandom(), HERE, HUB_LIMITS, admit=server.admit) as transport:
        world.server, world.token = server, Token((transport.address,), keys.public, secret)
        own = derive_secret(keys.secret, GUEST)
        world.guests_token = msgspec.structs.replace(world.token, secret=own, invitation=GUEST)
        async with relay.listen(transport.address):
            running = asyncio.create_task(server.run(transport, world, given))
            try:
                yield world
                assert not running.done(), "nobody may end the job of the others"
            finally:
                running.cancel()
                await asyncio.wait([running])


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def timed() -> None:
        async with asyncio.timeout(300):
            await main()

    asyncio.run(timed())


SPEC = TensorSpec("float32", (4,), WireFormat.FP32)
GRADIENT = Gradient(1, MicrobatchId(1), ((0, SPEC),))


@pytest.mark.parametrize(
    ("header", "buffers", "reason"),
    [
        (Random(1).randbytes(64), (), "wire version"),
        (bytes([messages.WIRE_VERSION]) + Random(2).randbytes(200), (), "no message"),
        (bytes([messages.WIRE_VERSION]) + b"\xdd\xff\xff\xff\xff", (), "no message"),
        (messages.pack(GRADIENT, [bytes(16)]), [bytes(15)], "15 bytes instead of 16"),
        (messages.pack(GRADIENT, [bytes(16)]), (), "announces 1 buffers"),
        (
            messages.pack(GRADIENT, [bytes(16)]).replace(
                b"\x91\x04", b"\x91\xcf" + (2**62).to_bytes(8, "big")
            ),
            [bytes(16)],
            "no shape of at most",
        ),
        (messages.pack(Leave(0, "xxxx")).replace(b"xxxx", b"\x1b[2J"), (), "no message"),
    ],
    ids=[
        "noise",
        "noise of this version",
        "endless",
        "short buffer",
        "no buffer",
        "huge announcement",
        "words for a terminal",
    ],
)
def test_who_sends_garbage_is_sent_away_for_good_and_the_others_stay(header, buffers, reason) -> None:
    async def main() -> None:
        async with hub() as world, stranger(world.token) as liar, stranger(world.token) as other:
            await liar.join("liar")
            await other.join("other")
            await liar.hear(Welcome)
            await other.hear(Welcome)
            await liar.send_raw(header, buffers)
            await liar.next_event(LinkDown)
            refused = await liar.next_event(DialFailed)
            assert refused.is_refusal
            assert "it was sent away" in refused.reason
            await other.send_raw(messages.pack(Complaint(0, "nobody", "nothing")))
            assert other.hub in other.transport.connected()
            ((name, told),) = world.left()
            assert name == "liar"
            assert reason in told

    run(main)


def test_who_keeps_sending_what_nobody_awaits_is_sent_away_and_the_others_stay() -> None:
    async def main() -> None:
        async with hub() as world, stranger(world.token) as liar, stranger(world.token) as other:
            await liar.join("liar")
            await other.join("other")
            await liar.hear(Welcome)
            await other.hear(Welcome)
            allowance = ALLOWANCES[Spending.IN_VAIN]
            with suppress(LinkError):  # it may have gone before the last of them
                for number in range(2 * int(allowance.burst)):
                    await liar.send(LeaseDone(1, LeaseId(number), 1))
            await liar.next_event(LinkDown)
            assert world.left() == [("liar", "it keeps sending what nobody awaits")]
            assert other.hub in other.transport.connected()

    run(main)


def test_another_version_is_refused_even_if_it_does_not_wait_for_the_answer() -> None:
    async def main() -> None:
        async with hub() as world:
            async with stranger(world.token) as old:
                await old.join("old", version="0.0")
                assert "speaks version 0.0" in (await old.hear(Refused)).reason
            for _ in range(3):
                async with stranger(world.token) as hasty:
                    await hasty.join("hasty", version="0.0")
            async with stranger(world.token) as good:
                await good.join("good")
                await good.hear(Welcome)
            assert Joined("good") in world.told
            await world.server._refuse(new_keys().peer, "gone before it could be told")
            assert not any(
                isinstance(event, PeerJoined) and event.node.name != "good" for event in world.logged
            )

    run(main)


def test_the_command_says_what_to_do_about_another_version() -> None:
    command = [*JOIN, "--memory", "1 GB", "--quiet"]

    async def main() -> None:
        async with hub(version="9.9") as world:
            environment = {**os.environ, "RAVNEST_TOKEN": write_token(world.token)}
            ended = await asyncio.to_thread(
                subprocess.run,
                command,
                env=environment,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=250,
            )
            assert ended.returncode == 5, ended.stderr
            assert f"speaks version {PROTOCOL_VERSION} of ravnest, this hub 9.9" in ended.stderr
            assert "update the older one" in ended.stderr
            assert "Traceback" not in ended.stderr

    run(main)


def test_who_speaks_another_wire_version_is_told_to_update_and_its_guest_is_not_blamed() -> None:
    older = bytes([messages.WIRE_VERSION - 1])

    async def main() -> None:
        async with (
            hub() as world,
            stranger(world.guests_token) as guest,
            stranger(world.guests_token) as liar,
        ):
            guest.dial()
            await guest.next_event(LinkUp)
            await guest.send_raw(older + messages.pack(Leave(0, "hello"))[1:])
            refused = await guest.next_event(DialFailed)
            assert refused.is_refusal
            assert "update the older program" in refused.reason
            assert f"where {messages.WIRE_VERSION} is spoken" in refused.reason
            assert world.guests.read().named("anna").strikes == ()
            await liar.join("liar")
            await liar.hear(Welcome)
            await liar.send_raw(older + b"garbage")
            await liar.next_event(LinkDown)
            (strike,) = world.guests.read().named("anna").strikes
            assert "wire version" in strike, "who has joined knows the version"

    run(main)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("hub", "hub-"), ("x" * 300, "x" * 40), ("", "peer")],
)
def test_nobody_gets_a_name_that_misleads_or_names_more_places_than_others_can_be_told(name, shown) -> None:
    places = ["x" * 290] * 100 + [f"tcp://192.0.2.7:{port}" for port in range(1000, 1020)]

    async def main() -> None:
        async with hub() as world, stranger(world.token) as odd:
            await odd.join(name, addresses=places)
            welcome = await odd.hear(Welcome)
            assert welcome.node.startswith(shown)
            assert len(welcome.node) <= 45
            joined = next(event for event in world.logged if isinstance(event, PeerJoined))
            assert joined.addresses == tuple(places[100:106])
            assert joined.node.name == welcome.node

    run(main)


def test_a_machine_that_cannot_be_is_refused() -> None:
    async def main() -> None:
        async with hub() as world, stranger(world.token) as odd:
            await odd.join("odd", flops_per_second=0.0)
            assert "no machine is like" in (await odd.hear(Refused)).reason
            assert world.told == []

    run(main)


def test_what_is_of_another_plan_or_only_the_hub_says_changes_nothing() -> None:
    async def main() -> None:
        async with hub() as world, stranger(world.token) as liar:
            await liar.join("liar")
            await liar.hear(Welcome)
            for message in (
                Stop("all go home"),
                LeaseDone(77, LeaseId(3), 10**6),
                Welcome("hub"),
            ):
                await liar.send(message)
            activation = Activation(99, MicrobatchId(7), False, 1, ((0, SPEC),))
            await liar.send(activation, [bytes(16)])
            await world.wait_for(Activation)
            async with stranger(world.token) as good:
                await good.join("good")
                await good.hear(Welcome)
            assert [type(event.message) for event in world.watched if isinstance(event, Received)][:4] == [
                Stop,
                LeaseDone,
                Welcome,
                Activation,
            ]
            assert ("liar", "all go home") not in world.left()
            assert liar.hub in liar.transport.connected()

    run(main)


def test_two_neighbours_have_one_ticket_and_a_stranger_to_the_plan_none() -> None:
    async def main() -> None:
        async with hub(expected_nodes=2) as world, stranger(world.token) as one, stranger(world.token) as two:
            for number, each in enumerate((one, two)):
                await each.join(f"node{number}", memory_bytes=110e6, flops_per_second=1e11)
            assert (await one.hear(Welcome)).relay_port == world.relay.port
            orders = [await each.hear(PlanOrder) for each in (one, two)]
            tickets = [contact.ticket for order in orders for contact in order.contacts]
            assert len(tickets) == 2
            assert len(set(tickets)) == 1
            assert len(tickets[0]) == 16
            assert world.relay.tickets == (tickets[0],)
            # A complaint parts them, and their ticket is void.
            await one.send(Complaint(orders[0].build_id, orders[0].contacts[0].node, "it sends nonsense"))
            await two.next_event(LinkDown)
            assert world.left()[0] == (orders[0].contacts[0].node, "node0 says: it sends nonsense")
            assert world.relay.tickets == ()
            await two.next_event(LinkUp)
            await two.say_hello("node1", memory_bytes=110e6, flops_per_second=1e11)  # it may come again
            again = await two.hear(PlanOrder)
            while again.stage is None:  # a spare, until the plan is mended
                again = await two.hear(PlanOrder)
            assert again.contacts[0].ticket == tickets[0]

    run(main)


def test_a_neighbour_that_sends_garbage_is_dropped_and_the_honest_train_on() -> None:
    told: list[Notice] = []
    order: list[PlanOrder] = []

    async def be_hostile(token: Token) -> None:
        async with stranger(token, HERE) as liar:
            door = liar.transport.address
            await liar.join("liar", addresses=[door], memory_bytes=float(MEMORY_BYTES))
            plan = await liar.hear(PlanOrder)
            order.append(plan)
            keys = [PublicKey(contact.key.encode()) for contact in plan.contacts]
            liar.transport.allow([PublicKey(token.hub_key), *keys])
            for contact, key in zip(plan.contacts, keys, strict=True):
                mate = peer_of(key)
                liar.transport.dial(mate, contact.addresses)
                await liar.send(Stop("all go home"), to=mate)
                await liar.send(replace(plan, build_id=plan.build_id + 7, contacts=()), to=mate)
                await liar.send(replace(GRADIENT, build_id=plan.build_id + 7), [bytes(16)], to=mate)
                await liar.send_raw(bytes([messages.WIRE_VERSION]) + Random(3).randbytes(100), to=mate)
            await liar.next_event(LinkDown)
            await asyncio.Event().wait()

    with ExitStack() as stack:
        opened = stack.enter_context(rv.Hub("127.0.0.1:0", plan=PLAN, tell=lambda news: hear(news)))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        loops: list[asyncio.Task[None]] = []

        def hear(news: Notice) -> None:
            told.append(news)
            # The first plan can only have the liar and one other; a third comes to take its place.
            name = {Joined: "honest", PlanFormed: "third"}.get(type(news))
            if name is not None and [type(each) for each in told].count(type(news)) == 1:
                stack.enter_context(joining(opened.token, ["--name", name]))

        async def live() -> None:
            loops.append(asyncio.current_task())
            with suppress(asyncio.CancelledError):
                await be_hostile(opened.token)

        hostile = pool.submit(asyncio.run, live())
        opened.fit(make_job(), nodes=2)
        loops[0].get_loop().call_soon_threadsafe(loops[0].cancel)
        hostile.result(timeout=120)
    left = [(news.node, news.reason) for news in told if isinstance(news, Left)]
    ((name, reason),) = [each for each in left if " says: " in each[1]]
    assert name == "liar"
    assert " says: a header that is no message" in reason
    check_books(told)


def test_a_taken_port_is_a_wrong_value_that_names_it() -> None:
    async def main() -> None:
        async with hub() as world:
            address = world.token.addresses[0]
            with pytest.raises(ConfigError, match=f"{address}: the port is taken, choose another") as refused:
                async with ZeroMqTransport(new_keys(), SystemRandom(), address):
                    pass
            assert refused.value.exit_code == 3

    run(main)


def test_who_sends_a_hub_a_tensor_has_its_link_ended() -> None:
    async def main() -> None:
        async with hub() as world, stranger(world.token) as liar:
            await liar.join("liar")
            await liar.hear(Welcome)
            spec = TensorSpec("uint8", (3 << 20,), WireFormat.FP32)
            content = [bytes(3 << 20)]
            await liar.send(Gradient(1, MicrobatchId(1), ((0, spec),)), content)
            lost = await liar.next_event(LinkDown)
            assert "is over 2097152" in lost.reason

    run(main)


def test_who_asks_for_more_than_it_takes_is_sent_away() -> None:
    async def main() -> None:
        async with hub(max_waiting=3) as world, stranger(world.token) as liar:
            await liar.join("liar")
            await liar.hear(Welcome)
            ref = name_ballast()
            for _ in range(200):  # nothing of it is ever taken
                await liar.send(BlobRequest(ref.blob, 0, ref.size_bytes))
            await liar.next_event(LinkDown)
            assert world.left() == [("liar", "it asks for more than it takes")]

    run(main)
