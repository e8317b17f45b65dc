"""The hub's program on virtual time: a log that fails, and those that come and do not join."""

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from support.hub_world import job
from support.memory_store import MemoryStore
from support.plan_world import node

from ravnest.errors import ConfigError, FencedOff, LinkError, RavnestError, StoreAway
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Event, JobGiven, PeerJoined, PlanMade, TextsSampled, Tick
from ravnest.hub.coordinator.notices import LogGoesOn, LogWaits, SampledText
from ravnest.hub.service.server import HubParts, Server
from ravnest.hub.service.unwritten import Unwritten
from ravnest.net.identity import KeyPair, Token, greet, new_keys
from ravnest.net.memory import MemoryNetwork, MemoryTransport, run_virtual
from ravnest.net.transport import Delivery, LinkUp, Service
from ravnest.protocol import messages
from ravnest.protocol.membership import PROTOCOL_VERSION, Hello, Stop, Welcome


def test_a_log_that_fails_at_a_tick_ends_the_job_and_nothing_is_logged_after_the_gap() -> None:
    def check(event: Event) -> None:
        if isinstance(event, Tick):
            raise ConfigError("the disk is full")

    store = MemoryStore(check)

    async def main() -> None:
        keys = new_keys()
        given = job(settle_seconds=5.0)
        server = Server(Token((), keys.public, b"s" * 16), bool, store=store, hub=Coordinator(given))
        async with MemoryTransport(MemoryNetwork(), keys, Random(1), "hub", admit=server.admit) as transport:
            loop = asyncio.get_running_loop()
            for seconds in (1.0, 100.0):
                joined = PeerJoined(node(f"after {seconds}", 1.0), "key", (), seconds)
                loop.call_later(seconds, server._apply, joined)
            with pytest.raises(ConfigError, match="the disk is full"):
                await server.run(transport, None, given)
            await asyncio.wait([loop.create_future()], timeout=200.0)

    run_virtual(main())
    assert [event.node.name for event in store.kept[1:]] == ["after 1.0"]


def test_nothing_is_kept_of_who_was_let_in_and_left_without_joining() -> None:
    async def main() -> None:
        keys, given, network = new_keys(), job(settle_seconds=5.0), MemoryNetwork()
        token = Token((), keys.public, b"s" * 16)
        server = Server(token, bool, hub=Coordinator(given))
        async with MemoryTransport(network, keys, Random(1), "hub", admit=server.admit) as transport:
            running = asyncio.create_task(server.run(transport, None, given))
            for number in range(3):
                guest = new_keys()
                async with MemoryTransport(network, guest, Random(number)) as visitor:
                    visitor.allow([keys.public])
                    visitor.dial(keys.peer, ["hub"], greet(token, guest.public))
                    assert isinstance(await visitor.receive(), LinkUp)
                    assert transport.connected() == {guest.peer}
                while transport.connected():
                    await asyncio.wait([running], timeout=1.0)
                await asyncio.wait([running], timeout=1.0)
                with pytest.raises(LinkError, match="not among the allowed"):
                    await transport.send(guest.peer, Service.CONTROL, b"")
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    run_virtual(main())


async def greet_hub(visitor: MemoryTransport, keys: KeyPair, guest: KeyPair, token: Token) -> None:
    visitor.allow([keys.public])
    visitor.dial(keys.peer, ["hub"], greet(token, guest.public))
    await say_hello(visitor, keys)


async def say_hello(visitor: MemoryTransport, keys: KeyPair) -> None:
    hello = messages.pack(Hello(PROTOCOL_VERSION, node("n", 150.0)))
    await visitor.send(keys.peer, Service.CONTROL, hello)
    while not isinstance(await next_message(visitor), Welcome):
        pass


async def next_message(visitor: MemoryTransport) -> object:
    while not isinstance(event := await visitor.receive(), Delivery):
        pass
    return messages.unpack(event.header, event.buffers)


def test_a_peer_that_is_cut_off_while_the_hub_parts_may_come_again_and_ends_nothing() -> None:
    async def main() -> None:
        keys, given, network = new_keys(), job(settle_seconds=100.0), MemoryNetwork()
        token = Token((), keys.public, b"s" * 16)
        server = Server(token, bool, hub=Coordinator(given))

        async with MemoryTransport(network, keys, Random(1), "hub", admit=server.admit) as transport:
            running = asyncio.create_task(server.run(transport, None, given))
            one, other = new_keys(), new_keys()
            async with (
                MemoryTransport(network, one, Random(2)) as first,
                MemoryTransport(network, other, Random(3)) as second,
            ):
                await greet_hub(first, keys, one, token)
                await greet_hub(second, keys, other, token)
                server.fail(RavnestError("enough"))
                while not isinstance(await next_message(first), Stop):
                    pass
                network.cut(one.peer, keys.peer)
                while not isinstance(event := await first.receive(), LinkUp):
                    pass
                assert event.is_new
                await say_hello(first, keys)
            with pytest.raises(RavnestError, match="enough"):
                await running

    run_virtual(main())


class LateStore(MemoryStore):
    """A store that writes nothing until it is told to."""

    writes_at_once = False

    def __init__(self) -> None:
        super().__init__()
        self.waiting = Unwritten()
        self.error: asyncio.Future[None] | None = None

    def append(self, event: Event) -> None:
        super().append(event)
        self.waiting.append("event", b"")

    def after_written(self, act: Callable[[], None]) -> None:
        self.waiting.after(act)

    async def write(self, tell: Callable[[LogWaits | LogGoesOn], None]) -> None:
        self.tell = tell
        self.error = asyncio.get_running_loop().create_future()
        await self.error


def test_nobody_hears_of_an_event_before_it_is_written_and_no_time_passes_while_it_cannot_be() -> None:
    store, told = LateStore(), []

    async def main() -> None:
        keys = new_keys()
        given = job(settle_seconds=5.0)
        hub = Coordinator(given)
        server = Server(Token((), keys.public, b"s" * 16), told.append, store=store, hub=hub)
        async with MemoryTransport(MemoryNetwork(), keys, Random(1), "hub", admit=server.admit) as transport:
            loop = asyncio.get_running_loop()
            running = asyncio.create_task(server.run(transport, None, given))
            await asyncio.wait([running], timeout=1.0)
            server.record_texts((SampledText(1, "once", "upon a time"),))
            await asyncio.wait([running], timeout=1.0)
            assert [type(event) for event in store.kept] == [JobGiven, TextsSampled]
            assert told == [], "the store has none of it yet"
            store.tell(LogWaits("it is away", 600.0))
            num_logged = len(store.kept)
            await asyncio.wait([running], timeout=400.0)
            assert len(store.kept) == num_logged, "nothing becomes due"
            store.waiting.confirm(num_logged)
            store.tell(LogGoesOn(400.0))
            assert [type(notice) for notice in told] == [LogWaits, SampledText, LogGoesOn]
            server.record_texts((SampledText(1, "then", "they lived"),))
            assert store.kept[num_logged].now < 20.0
            store.error.set_exception(FencedOff("another hub has taken this run over"))
            with pytest.raises(FencedOff, match="taken this run over"):
                await running
            server.record_texts((SampledText(1, "after", "the end"),))
            assert len(store.kept) == num_logged + 1
            assert loop.time() > 400.0

    run_virtual(main())
    assert FencedOff.exit_code == 9


@pytest.mark.parametrize("kind", [FencedOff, StoreAway])
def test_a_hub_that_may_not_write_any_more_sends_no_peer_away(kind: type[RavnestError]) -> None:
    """Its peers are those of the hub that goes on: they have to look for it, not to leave."""

    class Refused:
        def make_plan(self, *_: object) -> PlanMade:
            raise kind("another hub has taken this run over, or nobody knows")

    async def in_loop(function: Callable[..., object], *given: object) -> object:
        return function(*given)

    async def main() -> None:
        keys, given, network = new_keys(), job(settle_seconds=5.0), MemoryNetwork()
        token = Token((), keys.public, b"s" * 16)
        hub, parts = Coordinator(given), HubParts(planner=Refused())
        server = Server(token, bool, in_loop, hub=hub, parts=parts)
        async with MemoryTransport(network, keys, Random(1), "hub", admit=server.admit) as transport:
            running = asyncio.create_task(server.run(transport, None, given))
            guest, heard = new_keys(), []
            async with MemoryTransport(network, guest, Random(2)) as visitor:
                await greet_hub(visitor, keys, guest, token)

                async def listen() -> None:
                    while True:
                        heard.append(await next_message(visitor))

                hearing = asyncio.create_task(listen())
                with pytest.raises(kind):
                    await running
                await asyncio.wait([hearing], timeout=60.0)
                hearing.cancel()
            assert not [each for each in heard if isinstance(each, Stop)]

    run_virtual(main())
