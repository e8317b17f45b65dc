"""The hub's program on virtual time: a log that fails, and those that come and do not join."""

import asyncio
from random import Random

import pytest
from support.hub_world import job
from support.memory_store import MemoryStore
from support.plan_world import node

from ravnest.errors import ConfigError, LinkError
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Event, PeerJoined, Tick
from ravnest.hub.service.server import Server
from ravnest.net.identity import Token, greet, new_keys
from ravnest.net.memory import MemoryNetwork, MemoryTransport, run_virtual
from ravnest.net.transport import LinkUp, Service


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
