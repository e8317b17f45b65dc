"""Peers that join are dialled back: only who answers with its own key can be dialled by others."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random

import pytest
from support.hub_world import job
from support.memory_store import MemoryStore
from support.plan_world import node

from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import PeerJoined
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import NotDialled, Notice
from ravnest.hub.service.server import Server
from ravnest.net.identity import KeyPair, Token, greet, new_keys
from ravnest.net.memory import MemoryNetwork, MemoryTransport, Wire, run_virtual
from ravnest.net.transport import Delivery, LinkUp, PublicKey, Service
from ravnest.protocol import messages
from ravnest.protocol.membership import PROTOCOL_VERSION, Hello, Welcome


class Scene:
    """A hub on virtual time, and what it logs and tells."""

    def __init__(self, kind: type[MemoryTransport] = MemoryTransport) -> None:
        self._kind = kind  # what the hub dials with
        self.network, self.keys, self.given = MemoryNetwork(), new_keys(), job(settle_seconds=100.0)
        self.token = Token((), self.keys.public, b"s" * 16)
        self.store, self.told = MemoryStore(lambda event: None), list[Notice]()
        self.server = Server(self.token, self.told.append, store=self.store, hub=Coordinator(self.given))

    def visitor(self, keys: KeyPair, listen: str | None, seed: int = 2) -> MemoryTransport:
        transport = MemoryTransport(self.network, keys, Random(seed), listen)
        transport.allow([self.keys.public])
        return transport

    async def say_hello(self, visitor: MemoryTransport, keys: KeyPair, *addresses: str) -> None:
        visitor.dial(self.keys.peer, ["hub"], greet(self.token, keys.public))
        hello = Hello(PROTOCOL_VERSION, node("n", 150.0), addresses=addresses)
        await visitor.send(self.keys.peer, Service.CONTROL, messages.pack(hello))

    @property
    def joined(self) -> list[tuple[str, bool]]:
        events = (event for event in self.store.kept if isinstance(event, PeerJoined))
        return [(event.node.name, event.node.is_reachable) for event in events]

    def play(self, main: Callable[[], object]) -> None:
        async def play() -> None:
            hub = self._kind(self.network, self.keys, Random(1), "hub", admit=self.server.admit)
            async with hub as transport:
                running = asyncio.create_task(self.server.run(transport, None, self.given))
                await main()  # type: ignore[misc]
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running

        run_virtual(play())


async def welcome_to(visitor: MemoryTransport) -> Welcome:
    while True:
        event = await visitor.receive()
        if isinstance(event, Delivery):
            message = messages.unpack(event.header, event.buffers)
            if isinstance(message, Welcome):
                return message


@pytest.mark.parametrize(
    ("listens_at", "claimed", "is_reachable"),
    [
        ("here", ("here",), True),
        ("here", ("gone", "here"), True),  # one of its addresses is enough
        ("here", ("gone",), False),
        (None, ("another",), False),  # somebody else listens there, as at many a private address
        (None, (), False),
    ],
)
def test_who_answers_at_its_address_can_be_dialled_and_nobody_else(
    listens_at: str | None, claimed: tuple[str, ...], is_reachable: bool
) -> None:
    scene = Scene()

    async def main() -> None:
        keys = new_keys()
        async with (
            MemoryTransport(scene.network, new_keys(), Random(3), "another", admit=lambda *_: None),
            scene.visitor(keys, listens_at) as visitor,
        ):
            await scene.say_hello(visitor, keys, *claimed)
            assert (await welcome_to(visitor)).is_reachable == is_reachable

    scene.play(main)
    assert scene.joined == [("n", is_reachable)]
    said = [show_notice(notice) for notice in scene.told if isinstance(notice, NotDialled)]
    assert len(said) == (not is_reachable)
    assert all("n cannot be dialled" in each for each in said)


class Unanswered(MemoryTransport):
    """Dials into a network that drops what it does not let in, as most routers do."""

    async def answers(self, key: PublicKey, address: str) -> bool:
        del key, address
        return await asyncio.get_running_loop().create_future()


def test_who_does_not_answer_in_time_joins_as_one_that_cannot_be_dialled() -> None:
    scene = Scene(Unanswered)

    async def main() -> None:
        keys = new_keys()
        async with scene.visitor(keys, "here") as visitor:
            await scene.say_hello(visitor, keys, "here")
            assert not (await welcome_to(visitor)).is_reachable

    scene.play(main)
    assert scene.joined == [("n", False)]


def test_a_closed_port_takes_as_long_as_silence() -> None:
    """Else a peer could find out by the clock which ports of the hub's own network are open."""
    took = []
    for kind in (MemoryTransport, Unanswered):
        scene = Scene(kind)

        async def main(scene: Scene = scene) -> None:
            keys, loop = new_keys(), asyncio.get_running_loop()
            async with scene.visitor(keys, None) as visitor:
                began_at = loop.time()
                await scene.say_hello(visitor, keys, "closed")
                await welcome_to(visitor)
                took.append(loop.time() - began_at)

        scene.play(main)
    assert took[0] == pytest.approx(took[1])


def test_who_leaves_before_it_was_dialled_back_never_joins() -> None:
    scene = Scene()

    async def main() -> None:
        keys = new_keys()
        scene.network.set_wire(keys.peer, scene.keys.peer, Wire(delay_seconds=0.5))
        async with scene.visitor(keys, "here") as visitor:
            await scene.say_hello(visitor, keys, "here")
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=10.0)

    scene.play(main)
    assert scene.joined == []


class Counting(Unanswered):
    """Dials in vain, and counts how often."""

    dialled: list[str]
    num_open = most_open = 0

    async def answers(self, key: PublicKey, address: str) -> bool:
        self.dialled.append(address)
        self.num_open += 1
        Counting.most_open = max(Counting.most_open, self.num_open)
        try:
            return await super().answers(key, address)
        finally:
            self.num_open -= 1


async def insist(scene: Scene, visitor: MemoryTransport, keys: KeyPair, address: str) -> None:
    """Say hello over each new link, as a provider's program does, until it is a member."""
    await scene.say_hello(visitor, keys, address)
    while True:
        match await visitor.receive():
            case LinkUp(is_new=True):
                await scene.say_hello(visitor, keys, address)
            case Delivery(header=header) if isinstance(messages.unpack(header), Welcome):
                return


def test_who_comes_and_goes_has_the_hub_dial_one_address_at_a_time() -> None:
    """Else one peer has it dial others' addresses as fast as it can come, and newcomers find no room."""
    Counting.dialled, scene = [], Scene(Counting)

    async def main() -> None:
        keys = new_keys()
        for number in range(5):
            async with scene.visitor(keys, None, seed=number) as visitor:  # each time another program
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await insist(scene, visitor, keys, f"victim {number}")
        async with scene.visitor(keys, None, seed=5) as visitor:
            await insist(scene, visitor, keys, "own")

    scene.play(main)
    assert Counting.dialled == ["victim 0", "own"]
    assert Counting.most_open == 1
    assert scene.joined == [("n", False)]
