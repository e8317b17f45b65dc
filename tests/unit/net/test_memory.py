"""The network in memory: the same links on virtual time, with delay, bandwidth, cuts and deaths."""

import asyncio
from contextlib import AsyncExitStack
from random import Random

import pytest

from ravnest.errors import ConfigError, LinkError
from ravnest.net.identity import KeyPair, new_keys
from ravnest.net.memory import MemoryNetwork, MemoryTransport, Wire, run_virtual
from ravnest.net.transport import MIB, Delivery, DialFailed, LinkDown, LinkUp, Service, TransportLimits

KEYS = sorted((new_keys() for _ in range(4)), key=lambda keys: keys.peer)
SMALL = TransportLimits(credit_bytes=(10_000,) * 5)


class Town:
    """Some transports on one network that all know each other; node 0 is dialled by the others."""

    def __init__(self, size: int, wire: Wire | None = None, limits: TransportLimits | None = None) -> None:
        self.network = MemoryNetwork(wire)
        self.nodes = [self.make(i, KEYS[i], limits) for i in range(size)]
        self.stack = AsyncExitStack()

    def make(self, number: int, keys: KeyPair, limits: TransportLimits | None = None) -> MemoryTransport:
        node = MemoryTransport(self.network, keys, Random(number), f"node{number}", limits)
        node.allow(keys.public for keys in KEYS)
        return node

    async def __aenter__(self) -> list[MemoryTransport]:
        for node in self.nodes:
            await self.stack.enter_async_context(node)
        for node in self.nodes[1:]:
            node.dial(self.nodes[0].peer, ["node0"])
        return self.nodes

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()


async def next_of(node, kind):
    async with asyncio.timeout(60):
        while True:
            event = await node.receive()
            if isinstance(event, kind):
                return event


def test_an_hour_passes_at_once_and_in_order():
    async def main():
        order = []
        loop = asyncio.get_running_loop()
        for delay in (3600.0, 0.5, 7.0):
            loop.call_later(delay, lambda delay=delay: order.append((delay, loop.time())))
        await asyncio.sleep(4000)
        return order, loop.time()

    order, now = run_virtual(main())  # in less than the time a test has
    assert order == [(0.5, 0.5), (7.0, 7.0), (3600.0, 3600.0)]
    assert now == 4000


def test_waiting_for_what_never_comes_is_an_error_and_not_a_hang():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="everything waits"):
        run_virtual(main())


def test_a_message_takes_the_delay_and_the_time_of_its_bytes():
    async def main():
        async with Town(2, Wire(delay_seconds=0.05, bytes_per_second=1e6)) as (hub, node):
            await next_of(node, LinkUp)
            began = asyncio.get_running_loop().time()
            await node.send(hub.peer, Service.ACTIVATION, b"small")
            await next_of(hub, Delivery)
            small = asyncio.get_running_loop().time() - began
            await node.send(hub.peer, Service.ACTIVATION, b"big", [bytes(10**7)])
            await next_of(hub, Delivery)
            return small, asyncio.get_running_loop().time() - began - small

    small, big = run_virtual(main())
    assert small == pytest.approx(0.05, abs=0.005)
    assert 10.0 < big < 11.0


def test_a_gradient_overtakes_a_blob():
    async def main():
        async with Town(2, Wire(0.01, 1e6)) as (hub, node):
            await next_of(node, LinkUp)
            await node.send(hub.peer, Service.BLOB, b"blob", [bytes(5 * 10**6)])
            await asyncio.sleep(1.0)
            began = asyncio.get_running_loop().time()
            await node.send(hub.peer, Service.GRADIENT, b"gradient", [bytes(1000)])
            first = await next_of(hub, Delivery)
            waited = asyncio.get_running_loop().time() - began
            return first.header, waited, (await next_of(hub, Delivery)).header

    first, waited, second = run_virtual(main())
    assert (first, second) == (b"gradient", b"blob")
    assert waited < 0.4


def test_without_credit_a_send_waits_until_the_other_program_has_read():
    async def main():
        async with Town(2, limits=SMALL) as (hub, node):
            await next_of(hub, LinkUp)
            await node.send(hub.peer, Service.AVERAGING, b"1", [bytes(9000)])
            second = asyncio.create_task(node.send(hub.peer, Service.AVERAGING, b"2", [bytes(9000)]))
            third = asyncio.create_task(node.send(hub.peer, Service.AVERAGING, b"3"))
            await node.send(hub.peer, Service.GRADIENT, b"other", [bytes(9000)])  # has its own credit
            await asyncio.sleep(5)
            states = [second.done(), third.done()]
            headers = [(await next_of(hub, Delivery)).header for _ in range(2)]
            await asyncio.sleep(1)
            states += [second.done()]
            headers += [(await next_of(hub, Delivery)).header for _ in range(2)]
            await third
            return states, headers

    states, headers = run_virtual(main())
    assert states == [False, False, True]
    assert headers == [b"other", b"1", b"2", b"3"]


def test_a_send_without_credit_ends_with_its_deadline_and_leaves_the_queue():
    async def main():
        async with Town(2, limits=SMALL) as (hub, node):
            await node.send(hub.peer, Service.BLOB, b"1", [bytes(9000)])
            with pytest.raises(LinkError, match="took no BLOB message"):
                await node.send(hub.peer, Service.BLOB, b"2", [bytes(9000)])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await node.send(hub.peer, Service.BLOB, b"3", [bytes(9000)])
            assert not any(node._neighbours[hub.peer].unsent)
            await next_of(hub, Delivery)
            await node.send(hub.peer, Service.BLOB, b"4", [bytes(9000)])
            return (await next_of(hub, Delivery)).header

    assert run_virtual(main()) == b"4"


def test_a_receiver_may_write_into_what_it_got():
    async def main():
        async with Town(2) as (hub, node):
            data = bytearray(100)
            await node.send(hub.peer, Service.BLOB, b"", [data])
            (buffer,) = (await next_of(hub, Delivery)).buffers
            buffer[0] = 1
            return data[0]

    assert run_virtual(main()) == 0


async def talk(one, other, num_messages):
    for number in range(num_messages):
        await one.send(other.peer, Service.ACTIVATION, bytes([number]), [bytes(50_000)])


async def listen(one, num_messages):
    return [(await next_of(one, Delivery)).header[0] for _ in range(num_messages)]


async def cut_often(one, other, random, num_cuts):
    for _ in range(num_cuts):
        await asyncio.sleep(random.uniform(0, 0.2))
        one.network.cut(one.peer, other.peer)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_or_doubled_over_many_cuts_even_when_both_dial(seed):
    async def main():
        async with Town(2, Wire(0.02, 5e6)) as (hub, node), asyncio.TaskGroup() as tasks:
            if seed % 2:
                hub.dial(node.peer, ["node1"])
            for one, other in ((hub, node), (node, hub)):
                tasks.create_task(talk(one, other, 60))
            tasks.create_task(cut_often(hub, node, Random(seed), 60))
            listeners = [tasks.create_task(listen(one, 60)) for one in (hub, node)]
            return [await listener for listener in listeners]

    assert run_virtual(main()) == [list(range(60))] * 2


async def redial_often(one, other, random, num_times):
    for _ in range(num_times):
        await asyncio.sleep(random.uniform(0, 0.2))
        one.redial(other.peer, ["nowhere", other.address])


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_or_doubled_when_either_or_both_look_for_another_way(seed):
    async def main():
        async with Town(2, Wire(0.02, 5e6)) as (hub, node), asyncio.TaskGroup() as tasks:
            if seed % 2:
                tasks.create_task(cut_often(hub, node, Random(seed), 20))
            for one, other in ((hub, node), (node, hub)):
                tasks.create_task(talk(one, other, 60))
                if one is hub or seed > 2:
                    tasks.create_task(redial_often(one, other, Random(seed), 30))
            listeners = [tasks.create_task(listen(one, 60)) for one in (hub, node)]
            found = [await listener for listener in listeners]
            await asyncio.sleep(10)
            assert hub.connected() == {node.peer}
            return found, hub.network.num_sides

    assert run_virtual(main()) == ([list(range(60))] * 2, 2)


def test_another_way_is_told_with_its_address_and_none_changes_nothing():
    async def main():
        async with Town(2) as (hub, node):
            assert not (await next_of(hub, LinkUp)).address
            await next_of(node, LinkUp)
            hub.redial(node.peer, ["nowhere", "node1"])
            up = await next_of(hub, LinkUp)
            assert (up.is_new, up.address) == (False, "node1")
            hub.redial(node.peer, ["nowhere"])
            await asyncio.sleep(10)
            await node.send(hub.peer, Service.CONTROL, b"x")
            return (await hub.receive()).header

    assert run_virtual(main()) == b"x"


def test_the_same_seed_gives_the_same_history():
    async def main():
        history = []
        async with Town(3, Wire(0.02, 5e6)) as (hub, *nodes), asyncio.TaskGroup() as tasks:
            for node in nodes:
                tasks.create_task(talk(node, hub, 20))
            tasks.create_task(cut_often(hub, nodes[0], Random(1), 5))
            while len(history) < 60:
                event = await hub.receive()
                if isinstance(event, Delivery):
                    await hub.send(event.sender, Service.CONTROL, b"thanks")
                    history.append((asyncio.get_running_loop().time(), event.sender, event.header))
                else:
                    history.append((asyncio.get_running_loop().time(), event))
                if sum(isinstance(entry[1], str) for entry in history) == 40:
                    break
        return history

    assert run_virtual(main()) == run_virtual(main())


def test_a_partition_is_noticed_in_two_seconds_by_both_and_heals():
    async def main():
        loop = asyncio.get_running_loop()
        async with Town(3) as (hub, near, far):
            await next_of(far, LinkUp)
            await asyncio.sleep(3)
            hub.network.partition([hub.peer, near.peer])
            began = loop.time()
            down = [await next_of(one, LinkDown) for one in (hub, far)]
            noticed = loop.time() - began
            await far.send(hub.peer, Service.CONTROL, b"kept")
            assert hub.connected() == {near.peer}
            await asyncio.sleep(20)
            hub.network.partition()
            assert not (await next_of(far, LinkUp)).is_new
            return noticed, down, (await next_of(hub, Delivery)).header

    noticed, down, header = run_virtual(main())
    assert noticed < 2.0
    assert all("nothing heard" in event.reason for event in down)
    assert header == b"kept"


def test_what_is_sent_in_a_short_partition_arrives_after_it_over_the_same_link():
    async def main():
        async with Town(2) as (hub, node):
            await next_of(node, LinkUp)
            await node.send(hub.peer, Service.CONTROL, b"under way")
            await asyncio.sleep(0.005)  # half of the way
            hub.network.partition([hub.peer])
            await node.send(hub.peer, Service.CONTROL, b"held")
            await asyncio.sleep(1.0)
            hub.network.partition()
            await node.send(hub.peer, Service.CONTROL, b"after")
            headers = [(await next_of(hub, Delivery)).header for _ in range(3)]
            await asyncio.sleep(5.0)
            return headers, hub.connected(), node.connected()

    headers, *connected = run_virtual(main())
    assert headers == [b"under way", b"held", b"after"]
    assert connected == [{KEYS[1].peer}, {KEYS[0].peer}]


def test_a_dial_that_meets_a_partition_succeeds_as_soon_as_it_ends():
    async def main():
        loop = asyncio.get_running_loop()
        town = Town(2)
        town.network.partition([KEYS[0].peer])
        async with town as (_, node):
            await asyncio.sleep(1.0)
            town.network.partition()
            await next_of(node, LinkUp)
            return loop.time()

    assert 1.0 < run_virtual(main()) < 1.1


def test_the_end_of_a_connection_is_seen_after_the_partition():
    async def main():
        async with Town(2) as (hub, node):
            await next_of(hub, LinkUp)
            await next_of(node, LinkUp)
            hub.network.partition([hub.peer])
            node.drop(hub.peer, "enough")
            await asyncio.sleep(1.0)
            assert hub.connected()
            hub.network.partition()
            return (await next_of(hub, LinkDown)).reason

    assert run_virtual(main()) == "the connection was closed"


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_death_is_noticed_and_the_next_incarnation_is_new(is_silent):
    async def main():
        loop = asyncio.get_running_loop()
        town = Town(2)
        async with town as (hub, node):
            await next_of(hub, LinkUp)
            await next_of(node, LinkUp)
            began = loop.time()
            hub.network.kill(node.peer, is_silent=is_silent)
            await next_of(hub, LinkDown)
            noticed = loop.time() - began
            await hub.send(node.peer, Service.CONTROL, b"to the dead")
            hub.network.revive(node.peer)
            node.drop(hub.peer, "dead")
            async with town.make(7, KEYS[1]) as reborn:
                reborn.dial(hub.peer, ["node0"])
                up = await next_of(hub, LinkUp)
                await hub.send(node.peer, Service.CONTROL, b"welcome")
                return noticed, up.is_new, (await next_of(reborn, Delivery)).header

    noticed, is_new, header = run_virtual(main())
    assert noticed < (2.0 if is_silent else 0.01)
    assert is_new
    assert header == b"welcome"


def test_what_a_dead_process_sent_and_nobody_read_does_not_come_after_its_successor():
    async def main():
        town = Town(2)
        async with town as (hub, node):
            await node.send(hub.peer, Service.CONTROL, b"from the dead")
            await asyncio.sleep(1)
            hub.network.kill(node.peer)
            hub.network.revive(node.peer)
            node.drop(hub.peer, "dead")
            async with town.make(7, KEYS[1]) as reborn:
                reborn.dial(hub.peer, ["node0"])
                await reborn.send(hub.peer, Service.CONTROL, b"new here")
                await asyncio.sleep(1)
                return [await hub.receive() for _ in range(4)]

    *events, delivery = run_virtual(main())
    assert [type(event) for event in events] == [LinkUp, LinkDown, LinkUp]
    assert delivery.header == b"new here"


def test_a_stranger_is_refused_and_so_is_a_wrong_key_at_the_right_address():
    async def main():
        async with Town(3) as (hub, node, stranger):
            hub.allow([node._keys.public])
            refused = await next_of(stranger, DialFailed)
            with pytest.raises(LinkError, match="not among the allowed"):
                await hub.send(stranger.peer, Service.CONTROL, b"")
            with pytest.raises(LinkError, match="not among the allowed"):
                hub.dial(stranger.peer, ["node2"])
            node.dial(stranger.peer, ["node0"])
            return refused, await next_of(node, DialFailed)

    refused, other = run_virtual(main())
    assert "refused at the handshake" in refused.reason
    assert "another key" in other.reason


def test_who_is_no_longer_allowed_is_dropped_and_waiting_senders_are_told():
    async def main():
        async with Town(3, limits=SMALL) as (hub, node, other):
            for _ in range(2):
                await next_of(hub, LinkUp)
            await hub.send(node.peer, Service.BLOB, b"", [bytes(9000)])
            waiting = asyncio.create_task(hub.send(node.peer, Service.BLOB, b"", [bytes(9000)]))
            await asyncio.sleep(1)
            hub.allow([other._keys.public])
            with pytest.raises(LinkError, match="no longer allowed"):
                await waiting
            down = await next_of(node, LinkDown)
            assert hub.connected() == {other.peer}
            return down.reason

    assert "no longer allowed" in run_virtual(main())


def test_a_hub_admits_by_greeting():
    async def main():
        network = MemoryNetwork()

        def admit(peer, greeting):
            return None if greeting == b"secret" else "the secret is wrong: ask for a new token"

        hub = MemoryTransport(network, KEYS[0], Random(0), "hub", admit=admit)
        async with hub, MemoryTransport(network, KEYS[1], Random(1)) as node:
            node.allow([KEYS[0].public])
            node.dial(hub.peer, ["hub"], b"guess")
            failed = await next_of(node, DialFailed)
            assert not hub.connected()
            node.dial(hub.peer, ["hub"], b"secret")
            await next_of(node, LinkUp)
            await hub.send(node.peer, Service.CONTROL, b"welcome")
            assert (await next_of(node, Delivery)).header == b"welcome"
            hub.allow([])  # does not concern who was admitted
            assert hub.connected() == {node.peer}
            hub.drop(node.peer, "leave")
            assert not hub.connected()
            return failed.reason

    assert "the secret is wrong" in run_virtual(main())


def test_a_message_over_the_limits_and_a_taken_address_are_refused():
    async def main():
        town = Town(2)
        async with town as (hub, node):
            with pytest.raises(LinkError, match="header of"):
                await node.send(hub.peer, Service.CONTROL, bytes(MIB))
            with pytest.raises(ConfigError, match="taken"):
                async with town.make(0, KEYS[3]):
                    pass
            with pytest.raises(LinkError, match="greeting of 5000 bytes"):
                node.dial(hub.peer, ["node0"], bytes(5000))

    run_virtual(main())


def test_two_that_dial_each_other_end_up_with_one_link():
    async def main():
        async with Town(2) as (hub, node):
            hub.dial(node.peer, ["node1"])
            await asyncio.sleep(10)
            events = [await one.receive() for one in (hub, node)]
            await hub.send(node.peer, Service.CONTROL, b"x")
            events.append((await node.receive()).header)
            return events, hub.network.num_sides

    events, num_sides = run_virtual(main())
    assert [type(event) for event in events[:2]] == [LinkUp, LinkUp]
    assert events[2] == b"x"
    assert num_sides == 2
