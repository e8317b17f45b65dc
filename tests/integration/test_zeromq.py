"""The transport over real TCP: what arrives, what is refused, what is noticed, what survives."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import numpy as np
import pytest
import zmq
import zmq.asyncio

from ravnest.config import NetTimeouts
from ravnest.errors import ConfigError, LinkError
from ravnest.net.congestion import CHUNKS_PER_WINDOW
from ravnest.net.endpoint import Endpoint
from ravnest.net.identity import KeyPair, load_keys, new_keys, split_address
from ravnest.net.relay import Relay, await_through, dial_through
from ravnest.net.streams import FRAME_VERSION, Chunk, Greeting, decode_frame, encode_frame
from ravnest.net.transport import MIB, Delivery, DialFailed, LinkDown, LinkUp, Service, TransportLimits
from ravnest.net.zeromq import MOST_STRANGE_NAMES, ZeroMqTransport, open_context

ANY_PORT = "tcp://127.0.0.1:*"
LONG_SECONDS = 100.0  # only what hangs needs them; what is noticed within 2 s is shown without a clock
KEYS = sorted((new_keys() for _ in range(4)), key=lambda keys: keys.peer)


class Recorder(ZeroMqTransport):
    """Remembers the heads of all that arrives, in order."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.heads = []
        self.on_head = lambda head: None

    def _arrived(self, connection, frames):
        super()._arrived(connection, frames)
        try:
            self.heads.append(decode_frame(frames))
        except Exception:
            self.heads.append(None)
        self.on_head(self.heads[-1])


def make(number: int, listen: str | None = None, known=KEYS, **options) -> Recorder:
    transport = Recorder(KEYS[number], Random(), listen, **options)
    transport.allow(keys.public for keys in known)
    return transport


@asynccontextmanager
async def pair(**options):
    async with make(0, ANY_PORT, **options) as hub, make(1, **options) as node:
        node.dial(hub.peer, [hub.address])
        yield hub, node


async def next_of(transport: Endpoint, kind):
    async with asyncio.timeout(LONG_SECONDS):
        while True:
            event = await transport.receive()
            if isinstance(event, kind):
                return event


def run(main):
    return asyncio.run(main())


def test_arrays_of_all_sizes_arrive_equal_both_ways():
    generator = np.random.default_rng(0)
    arrays = [generator.random(size, np.float32) for size in (0, 1, 33, 16_000, 262_144, 3_000_001)]

    async def main():
        async with pair() as ends:
            for one, other in (ends, ends[::-1]):
                await one.send(other.peer, Service.ACTIVATION, b"header", [array.data for array in arrays])
            for one, other in (ends, ends[::-1]):
                delivery = await next_of(one, Delivery)
                assert (delivery.sender, delivery.header) == (other.peer, b"header")
                for array, buffer in zip(arrays, delivery.buffers, strict=True):
                    np.testing.assert_array_equal(np.frombuffer(buffer, np.float32), array)
                    assert array.size == 0 or not buffer.readonly

    run(main)


def test_a_blob_of_50_mb_delays_a_gradient_by_a_few_chunks():
    async def main():
        async with pair() as (hub, node):
            half_way = asyncio.Event()
            hub.on_head = lambda head: len(hub.heads) == 40 and half_way.set()
            await node.send(hub.peer, Service.BLOB, b"blob", [bytes(50 * 10**6)])
            async with asyncio.timeout(LONG_SECONDS):
                await half_way.wait()
            began = len(hub.heads)
            await node.send(hub.peer, Service.GRADIENT, b"gradient", [bytes(100_000)])
            first, second = await next_of(hub, Delivery), await next_of(hub, Delivery)
            assert (first.header, second.header) == (b"gradient", b"blob")
            chunks = [head for head in hub.heads[began:] if isinstance(head, Chunk)]
            place = next(i for i, head in enumerate(chunks) if head.service is Service.GRADIENT)
            assert place <= 2 * CHUNKS_PER_WINDOW
            assert len(chunks) - place > 10  # the blob was far from done

    run(main)


def test_an_unknown_key_is_refused_and_the_known_go_on():
    async def main():
        async with make(0, ANY_PORT, known=KEYS[:2]) as hub, make(1) as node, make(2) as stranger:
            stranger.dial(hub.peer, [hub.address])
            node.dial(hub.peer, [hub.address])
            assert "refused at the handshake" in (await next_of(stranger, DialFailed)).reason
            assert (await next_of(hub, LinkUp)).peer == node.peer
            assert hub.connected() == {node.peer}
            hub.allow(keys.public for keys in KEYS)
            await next_of(stranger, LinkUp)

    run(main)


def test_another_key_at_the_address_is_not_believed():
    async def main():
        async with make(0, ANY_PORT) as hub, make(1) as node:
            node.dial(KEYS[2].peer, [hub.address])
            assert "handshake failed" in (await next_of(node, DialFailed)).reason
            assert not hub.connected()

    run(main)


def test_only_the_owner_of_a_key_that_lets_one_in_answers():
    async def main():
        async with make(0, ANY_PORT, known=KEYS[:2]) as hub, make(1) as node, make(2) as stranger:
            port = split_address(hub.address)[1]
            assert await node.answers(KEYS[0].public, hub.address)
            assert await node.answers(KEYS[0].public, f"tcp://localhost:{port}")
            assert not await node.answers(KEYS[3].public, hub.address), "another machine has this address"
            assert not await stranger.answers(KEYS[0].public, hub.address)
            assert not hub.connected(), "a question is no link"
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                assert not await node.answers(KEYS[0].public, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
            for nonsense in ("tcp://a..b:7700", "nowhere", "tcp://127.0.0.1:99999"):
                assert not await node.answers(KEYS[0].public, nonsense)
            with socket.create_server(("127.0.0.1", 0)) as silent:  # waited for as long as the caller likes
                asked = node.answers(KEYS[0].public, f"tcp://127.0.0.1:{silent.getsockname()[1]}")
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asked, 0.1)
            assert await node.answers(KEYS[0].public, hub.address)

    run(main)


@pytest.mark.parametrize("places", [("::1", "127.0.0.1"), ("127.0.0.1", "::1")])
@pytest.mark.parametrize("is_silent", [False, True])
def test_who_answers_at_one_kind_of_a_names_addresses_answers(places, is_silent, monkeypatch):
    """A router's name often has an address of either kind, of which it lets in one."""

    async def main():
        async with make(0, ANY_PORT) as hub, make(1) as node:
            name, found = f"tcp://home.example.org:{port_of(hub)}", [(0, 0, 0, "", (x, 0)) for x in places]
            with contextlib.ExitStack() as stack:
                if is_silent:
                    try:
                        silent = socket.create_server(("::1", port_of(hub)), family=socket.AF_INET6)
                    except OSError:
                        pytest.skip("this PC has no IPv6")
                    stack.enter_context(silent)
                monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
                assert await node.answers(KEYS[0].public, name)
            assert not await node.answers(KEYS[3].public, name)

    run(main)


def test_names_of_strangers_are_looked_up_a_few_at_once_and_numbers_not_at_all(monkeypatch):
    asked, some, answered = [], threading.Semaphore(0), threading.Event()

    def look_up_slowly(host, *_, **__):
        asked.append(host)
        some.release()
        answered.wait(LONG_SECONDS)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    async def main():
        async with make(0, ANY_PORT) as hub, make(1) as node:
            monkeypatch.setattr(socket, "getaddrinfo", look_up_slowly)
            hosts = [f"strange-{number}.example.org" for number in range(3 * MOST_STRANGE_NAMES)]
            asking = [asyncio.create_task(node.answers(KEYS[0].public, f"{each}:7700")) for each in hosts]
            await asyncio.to_thread(lambda: [some.acquire() for _ in range(MOST_STRANGE_NAMES)])
            assert await node.answers(KEYS[0].public, hub.address)
            for each in asking[:-1]:
                each.cancel()
            await asyncio.wait(asking[:-1])
            answered.set()
            assert not await asking[-1], "it had its turn when others gave up"
            assert sorted(asked) == sorted([*hosts[:MOST_STRANGE_NAMES], hosts[-1]])

    run(main)


def test_nobody_there_is_said_and_dialled_again_until_somebody_is():
    async def main():
        async with make(0, ANY_PORT) as hub:
            address = hub.address
        async with make(1) as node:
            node.dial(KEYS[0].peer, [address])
            await node.send(KEYS[0].peer, Service.CONTROL, b"early")
            assert "nobody answers" in (await next_of(node, DialFailed)).reason
            async with make(0, address) as hub:
                assert (await next_of(hub, Delivery)).header == b"early"

    run(main)


def test_who_dials_a_busy_hub_waits_as_long_as_it_may():
    async def main():
        limits = TransportLimits(timeouts=NetTimeouts(dial_seconds=0.5, handshake_seconds=0.1))
        async with make(1, limits=limits) as node:
            with socket.create_server(("127.0.0.1", 0)) as busy:  # it has accepted, and does nothing yet
                node.dial(KEYS[0].peer, [f"tcp://127.0.0.1:{busy.getsockname()[1]}"])
                assert "no answer within" in (await next_of(node, DialFailed)).reason

    run(main)


def test_addresses_are_tried_in_turn_and_the_one_that_worked_again_first():
    async def main():
        async with make(0, ANY_PORT) as hub:
            dead, alive = "127.0.0.1:9", hub.address.removeprefix("tcp://")
            async with make(1) as node:
                node.dial(hub.peer, [dead, "tcp://nonsense", alive])
                failed = [await next_of(node, DialFailed) for _ in range(2)]
                assert [event.address for event in failed] == [dead, "tcp://nonsense"]
                assert (await next_of(node, LinkUp)).address == alive
                assert (await next_of(hub, LinkUp)).address is None
                hub.drop(node.peer, "for a moment")
                event = await next_of(node, (DialFailed, LinkUp))
                assert (type(event), event.address) == (LinkUp, alive)

    run(main)


def test_a_name_may_stand_for_places_of_which_one_answers(monkeypatch):
    async def main():
        async with make(0, ANY_PORT) as hub, make(1) as node:
            places = [(0, 0, 0, "", (host, 0)) for host in ("::1", "127.0.0.1")]

            def look_up(host, port, **_):
                assert host == "hub.example.org"
                return places

            monkeypatch.setattr(socket, "getaddrinfo", look_up)
            node.dial(hub.peer, [f"tcp://hub.example.org:{port_of(hub)}"])
            await next_of(node, LinkUp)

    run(main)


def test_a_name_that_is_looked_up_for_ever_holds_up_neither_other_links_nor_the_end(monkeypatch):
    asked, answered, look_up = [], threading.Event(), socket.getaddrinfo

    def look_up_slowly(host, *given, **options):
        if host != "slow.example.org":
            return look_up(host, *given, **options)
        asked.append(host)
        answered.wait()
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    async def main():
        limits = TransportLimits(timeouts=NetTimeouts(dial_seconds=0.1))
        async with make(1, limits=limits) as node:
            node.dial(KEYS[2].peer, ["slow.example.org:7700"])
            for _ in range(3):
                assert "no answer" in (await next_of(node, DialFailed)).reason
            assert asked == ["slow.example.org"]
        async with make(1) as node, make(0, ANY_PORT) as hub:
            node.dial(hub.peer, [hub.address])
            await next_of(node, LinkUp)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_slowly)
    guard = threading.Timer(LONG_SECONDS, answered.set)  # for a program that waits
    guard.start()
    run(main)
    assert not answered.is_set()
    guard.cancel()
    answered.set()


@pytest.mark.parametrize("address", ["nonsense", "tcp://", "tcp://127.0.0.1:99999", "a..b:7700"])
def test_a_bad_address_is_named(address):
    async def main():
        async with make(1) as node:
            node.dial(KEYS[0].peer, [address])
            assert address.removesuffix(":7700") in (await next_of(node, DialFailed)).reason
        with pytest.raises(ConfigError, match="cannot listen"):
            async with make(1, address):
                pass

    run(main)


def test_a_taken_port_and_an_oversize_message_are_named():
    async def main():
        async with pair() as (hub, node):
            with pytest.raises(ConfigError, match="the port is taken"):
                async with make(2, hub.address):
                    pass
            with pytest.raises(LinkError, match="over the limit"):
                await node.send(hub.peer, Service.BLOB, bytes(65 * 1024))
            with pytest.raises(LinkError, match="257 buffers"):
                await node.send(hub.peer, Service.BLOB, b"", [b"x"] * 257)

    run(main)


def test_a_hub_admits_by_greeting():
    async def main():
        def admit(peer, greeting):
            return None if greeting == b"secret" else "the secret is wrong"

        async with make(0, ANY_PORT, known=(), admit=admit) as hub, make(1) as node:
            node.dial(hub.peer, [hub.address], b"guess")
            assert "the secret is wrong" in (await next_of(node, DialFailed)).reason
            node.dial(hub.peer, [hub.address], b"secret")
            await next_of(node, LinkUp)
            await hub.send(node.peer, Service.CONTROL, b"welcome")
            assert (await next_of(node, Delivery)).header == b"welcome"

    run(main)


@asynccontextmanager
async def raw_peer(keys: KeyPair, hub: ZeroMqTransport):
    """Somebody with a good key and bad manners."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = (
        keys.public,
        keys.secret,
        KEYS[0].public,
    )
    socket.connect(hub.address)
    await socket.send(encode_frame(Greeting(FRAME_VERSION, 5, 0, (), b"")))
    try:
        yield socket
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        ([b"\xc1 garbage"], "unreadable frame"),
        ([b""], "unreadable frame"),
        ([encode_frame(Chunk(Service.BLOB, 7, 0, (0,)))], "missing"),
        ([encode_frame(Chunk(Service.BLOB, 0, 0, (0, 2**40)))], "is over"),
        ([encode_frame(Greeting(FRAME_VERSION, 5, 0, (), b""))], "second hello"),
        ([encode_frame(Greeting(FRAME_VERSION, 5, 0, (), b"")), b"more"], "frames it should not have"),
        ([encode_frame(Chunk(Service.BLOB, 0, 0, (0, 3 * MIB))), bytes(2 * MIB)], "closed"),
    ],
)
def test_who_sends_garbage_is_dropped_with_a_reason_and_the_others_go_on(junk, reason):
    async def main():
        async with pair() as (hub, node), raw_peer(KEYS[2], hub) as liar:
            for _ in range(2):
                await next_of(hub, LinkUp)
            await liar.send_multipart(junk)
            down = await next_of(hub, LinkDown)
            assert down.peer == KEYS[2].peer
            assert reason in down.reason
            await node.send(hub.peer, Service.GRADIENT, b"still here")
            assert (await next_of(hub, Delivery)).header == b"still here"
            assert hub.connected() == {node.peer}

    run(main)


def test_a_hub_of_another_version_is_named():
    async def main():
        async with make(0, ANY_PORT) as hub, raw_peer(KEYS[2], hub) as other:
            await other.recv()
            await next_of(hub, LinkUp)
            hub.drop(KEYS[2].peer, "make room")
            await other.send(encode_frame(Greeting(FRAME_VERSION + 1, 6, 0, (), b"")))
            async with asyncio.timeout(LONG_SECONDS):
                while b"update the older one" not in await other.recv():
                    pass

    run(main)


class Cutter:
    """A TCP proxy whose connections can be cut, and which remembers what passed."""

    def __init__(self) -> None:
        self.writers: set[asyncio.StreamWriter] = set()
        self.seen = bytearray()

    @asynccontextmanager
    async def towards(self, host: str, port: int):
        async def serve(reader, writer):
            far_reader, far_writer = await asyncio.open_connection(host, port)
            self.writers |= {writer, far_writer}
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self.pump(reader, far_writer))
                pumps.create_task(self.pump(far_reader, writer))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            self.cut()

    async def pump(self, reader, writer):
        try:
            while piece := await reader.read(65536):
                self.seen += piece
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


def port_of(transport: ZeroMqTransport) -> int:
    return door_of(transport)[1]


def door_of(transport: ZeroMqTransport) -> tuple[str, int]:
    return split_address(transport.address)


def test_each_message_arrives_once_and_in_order_although_the_connection_is_cut_again_and_again():
    num_messages = 40

    async def talk(one, other):
        for number in range(num_messages):
            service = (Service.ACTIVATION, Service.BLOB)[number % 2]
            await one.send(other.peer, service, bytes([number]), [os.urandom(10), bytes(700_000)])

    async def listen(one, cut):
        numbers = {Service.ACTIVATION: [], Service.BLOB: []}
        for count in range(num_messages):
            delivery = await next_of(one, Delivery)
            numbers[delivery.service].append(delivery.header[0])
            assert [buffer.nbytes for buffer in delivery.buffers] == [10, 700_000]
            if count % 7 == 3:
                cut()
        return list(numbers.values())

    async def main():
        cutter = Cutter()
        async with (
            make(0, ANY_PORT) as hub,
            make(1) as node,
            cutter.towards("127.0.0.1", port_of(hub)) as port,
        ):
            node.dial(hub.peer, [f"tcp://127.0.0.1:{port}"])
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(talk(hub, node))
                tasks.create_task(talk(node, hub))
                listeners = [
                    tasks.create_task(listen(hub, cutter.cut)),
                    tasks.create_task(listen(node, lambda: None)),
                ]
            for listener in listeners:
                assert listener.result() == [list(range(0, num_messages, 2)), list(range(1, num_messages, 2))]

    run(main)


@asynccontextmanager
async def child(hub: ZeroMqTransport):
    """A peer in a process of its own, that echoes."""
    settings = {"hub": KEYS[0].public.decode(), "address": hub.address, "secret": KEYS[1].secret.decode()}
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, json.dumps(settings))
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_a_process_that_is_killed_is_noticed_and_its_successor_is_new():
    async def main():
        async with make(0, ANY_PORT) as hub:
            async with child(hub) as process:
                await next_of(hub, LinkUp)
                data = os.urandom(5_000_000)
                await hub.send(KEYS[1].peer, Service.ACTIVATION, b"echo", [data])
                assert bytes((await next_of(hub, Delivery)).buffers[0]) == data
                process.kill()
                assert "closed" in (await next_of(hub, LinkDown)).reason
            async with child(hub):
                assert (await next_of(hub, LinkUp)).is_new

    run(main)


def test_a_process_that_freezes_is_noticed_and_comes_back_with_all_it_had():
    async def main():
        async with make(0, ANY_PORT) as hub, child(hub) as process:
            await next_of(hub, LinkUp)
            process.send_signal(signal.SIGSTOP)
            assert "nothing heard" in (await next_of(hub, LinkDown)).reason
            await hub.send(KEYS[1].peer, Service.CONTROL, b"meanwhile")
            process.send_signal(signal.SIGCONT)
            assert not (await next_of(hub, LinkUp)).is_new
            assert (await next_of(hub, Delivery)).header == b"meanwhile"

    run(main)


async def echo(settings: dict[str, str]) -> None:
    keys = load_keys(settings["secret"].encode())
    async with ZeroMqTransport(keys, Random()) as transport:
        hub = settings["hub"].encode()
        transport.allow([hub])
        transport.dial(KeyPair(hub, b"").peer, [settings["address"]])
        while True:
            event = await transport.receive()
            if isinstance(event, Delivery):
                await transport.send(event.sender, event.service, event.header, event.buffers)


TICKET = b"sixteen byte tkt"


def test_two_unreachable_peers_meet_through_the_relay_which_sees_nothing():
    marker = b"a word that must not be seen " * 10

    async def main():
        relay, recorder = Relay(), Cutter()
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            relay_port = await enter(relay.listen(ANY_PORT))
            seen_port = await enter(recorder.towards("127.0.0.1", relay_port))
            one, other = await enter(make(0, ANY_PORT)), await enter(make(1))
            tasks = await enter(asyncio.TaskGroup())
            waiter = tasks.create_task(await_through(("127.0.0.1", relay_port), TICKET, door_of(one)))
            address = await enter(dial_through(("127.0.0.1", seen_port), TICKET))
            other.dial(one.peer, [address])
            for _ in range(2):
                await next_of(other, DialFailed)
            relay.add(TICKET)
            await other.send(one.peer, Service.GRADIENT, marker, [bytes(3 * MIB)])
            assert (await next_of(one, Delivery)).header == marker
            recorder.cut()
            await next_of(other, LinkDown)
            await one.send(other.peer, Service.GRADIENT, marker)
            assert (await next_of(other, Delivery)).header == marker
            assert len(recorder.seen) > 3 * MIB
            assert marker[:20] not in recorder.seen
            waiter.cancel()

    run(main)


def test_strangers_that_say_nothing_do_not_shut_the_holders_of_a_ticket_out():
    async def main():
        relay = Relay(NetTimeouts(relay_opening_seconds=1e6), most_streams=4)
        relay.add(TICKET)
        async with relay.listen(ANY_PORT) as port, asyncio.timeout(LONG_SECONDS):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
            waiting, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(TICKET + b"A")
            heard = asyncio.create_task(waiting.readexactly(5))
            while not heard.done():
                dialling, out = await asyncio.open_connection("127.0.0.1", port)
                out.write(TICKET + b"D" + b"hello")
                ended = asyncio.create_task(dialling.read())  # at once, if it came before the other
                await asyncio.wait([heard, ended], return_when=asyncio.FIRST_COMPLETED)
            assert await heard == b"hello"
            for each in (*(one for _, one in silent), writer, out):
                each.close()

    run(main)


def test_an_impostor_behind_the_relay_and_a_wrong_ticket_get_nowhere():
    async def main():
        relay = Relay()
        relay.add(TICKET)
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            place = "127.0.0.1", await enter(relay.listen(ANY_PORT))
            impostor, node = await enter(make(2, ANY_PORT)), await enter(make(1))
            tasks = await enter(asyncio.TaskGroup())
            waiter = tasks.create_task(await_through(place, TICKET, door_of(impostor)))
            node.dial(KEYS[0].peer, [await enter(dial_through(place, TICKET))])
            node.dial(KEYS[2].peer, [await enter(dial_through(place, bytes(16)))])
            failed = [await next_of(node, DialFailed) for _ in range(6)]
            assert {event.peer for event in failed} == {KEYS[0].peer, KEYS[2].peer}
            assert not node.connected()
            assert not impostor.connected()
            with pytest.raises(ConfigError, match="cannot relay"):
                await enter(Relay().listen("tcp://192.0.2.7:7700"))
            waiter.cancel()

    run(main)


if __name__ == "__main__":
    asyncio.run(echo(json.loads(sys.argv[1])))


def test_a_socket_that_cannot_be_opened_is_a_failed_dial_and_others_go_on():
    async def main():
        context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 4)  # one link has three
        async with make(0, ANY_PORT) as hub, make(1, context=context) as node:
            node.dial(hub.peer, [hub.address])
            await next_of(node, LinkUp)
            node.dial(KEYS[2].peer, [hub.address])
            failed = await next_of(node, DialFailed)
            assert failed.peer == KEYS[2].peer
            assert "no socket can be opened" in failed.reason
            assert node.connected() == {hub.peer}
        context.term()
        with open_context() as usual:
            assert usual.get(zmq.MAX_SOCKETS) > 3 * 1024

    asyncio.run(main())
