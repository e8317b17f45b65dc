"""What may leave a PC: the bucket by itself, and a transport on virtual time whose sending is counted."""

import asyncio
from contextlib import AsyncExitStack
from random import Random

import pytest

from ravnest.net.congestion import UPLOAD_BURST_SECONDS, Upload, affordable_chunk_bytes
from ravnest.net.identity import new_keys
from ravnest.net.memory import MemoryNetwork, MemoryTransport, Wire, run_virtual
from ravnest.net.transport import Delivery, LinkUp, Service, TransportLimits

RATE = 100_000.0
KEYS = [new_keys() for _ in range(3)]


def test_what_is_saved_up_goes_at_once_and_the_rest_at_the_rate() -> None:
    upload = Upload(RATE)
    assert upload.wait_seconds(5.0) == 0
    upload.pay([bytes(int(UPLOAD_BURST_SECONDS * RATE))], 5.0)
    assert upload.wait_seconds(5.0) == 0  # nothing is owed yet
    upload.pay([bytes(40_000), bytes(10_000)], 5.0)
    assert upload.wait_seconds(5.0) == pytest.approx(0.5)
    assert upload.wait_seconds(5.3) == pytest.approx(0.2)
    assert upload.wait_seconds(5.5) == 0


def test_an_idle_hour_saves_no_more_than_a_moment() -> None:
    upload = Upload(RATE)
    upload.pay([b""], 0.0)
    upload.pay([bytes(int(UPLOAD_BURST_SECONDS * RATE) + 100_000)], 3600.0)
    assert upload.wait_seconds(3600.0) == pytest.approx(1.0)


def test_without_a_rate_nobody_waits() -> None:
    upload = Upload()
    upload.pay([bytes(10**6)], 0.0)
    assert upload.wait_seconds(0.0) == 0


class Counting(MemoryTransport):
    """Notes when it sent how much to whom."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.sent: list[tuple[float, int, str]] = []

    def _try_send(self, connection, frames) -> bool:
        self.sent.append((self._loop.time(), sum(map(len, frames)), connection.peer))
        return super()._try_send(connection, frames)

    def sent_to(self, peer: str) -> int:
        return sum(size for _, size, to in self.sent if to == peer)


class Town:
    """One node that may not send as much as it could, and others it sends to."""

    def __init__(self, rate: float = RATE) -> None:
        network = MemoryNetwork(Wire(0.01, 100e6))
        limits = TransportLimits(upload_bytes_per_second=rate)
        self.sender = Counting(network, KEYS[0], Random(0), "sender", limits)
        self.others = [
            Counting(network, keys, Random(number), f"other{number}") for number, keys in enumerate(KEYS[1:])
        ]
        self.stack = AsyncExitStack()

    async def __aenter__(self) -> "Town":
        for node in (self.sender, *self.others):
            node.allow(keys.public for keys in KEYS)
            await self.stack.enter_async_context(node)
        for number, other in enumerate(self.others):
            self.sender.dial(other.peer, [f"other{number}"])
            while not isinstance(await self.sender.receive(), LinkUp):
                pass
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()


async def delivered(node: MemoryTransport) -> bytes:
    async with asyncio.timeout(600):
        while not isinstance(event := await node.receive(), Delivery):
            pass
    return event.header


def test_all_links_together_send_at_the_rate_and_not_slower() -> None:
    async def main() -> None:
        async with Town() as town:
            for other in town.others:
                await town.sender.send(other.peer, Service.BLOB, b"blob", [bytes(1_000_000)])
            for other in town.others:
                assert await delivered(other) == b"blob"
            most = affordable_chunk_bytes(RATE)
            spans = [(start, stop) for start in range(0, 20, 3) for stop in range(start + 1, 22)]
            for start, stop in spans:
                sent = sum(size for at, size, _ in town.sender.sent if start <= at < stop)
                assert sent <= RATE * (stop - start + UPLOAD_BURST_SECONDS) + 2 * most
            assert max(size for _, size, _ in town.sender.sent) < most + 200  # with its head
            seconds = asyncio.get_running_loop().time()
            assert sum(size for _, size, _ in town.sender.sent) > 0.95 * RATE * seconds

    run_virtual(main())


def test_links_take_turns() -> None:
    async def main() -> None:
        async with Town() as town:
            for other in town.others:
                await town.sender.send(other.peer, Service.BLOB, b"blob", [bytes(1_000_000)])
            await asyncio.sleep(5)
            one, two = (town.sender.sent_to(other.peer) for other in town.others)
            assert min(one, two) > 0.4 * (one + two)

    run_virtual(main())


def test_a_gradient_to_one_goes_before_a_blob_to_another_and_control_before_both() -> None:
    async def main() -> None:
        async with Town() as town:
            one, two = town.others
            await town.sender.send(one.peer, Service.BLOB, b"blob", [bytes(2_000_000)])
            await asyncio.sleep(3)
            before = town.sender.sent_to(one.peer)
            await town.sender.send(two.peer, Service.GRADIENT, b"gradient", [bytes(200_000)])
            assert await delivered(two) == b"gradient"
            assert town.sender.sent_to(one.peer) - before < 3 * affordable_chunk_bytes(RATE)
            began = asyncio.get_running_loop().time()
            await town.sender.send(one.peer, Service.CONTROL, b"control")
            assert await delivered(one) == b"control"
            assert asyncio.get_running_loop().time() - began < UPLOAD_BURST_SECONDS

    run_virtual(main())


def test_what_is_urgent_is_paid_for_too() -> None:
    async def main() -> None:
        async with Town() as town:
            one = town.others[0]
            for _ in range(50):
                await town.sender.send(one.peer, Service.CONTROL, b"control", [bytes(20_000)])
            await town.sender.send(one.peer, Service.BLOB, b"blob", [bytes(1000)])
            while await delivered(one) != b"blob":
                pass
            assert asyncio.get_running_loop().time() > 0.9 * 50 * 20_000 / RATE

    run_virtual(main())


def test_links_live_on_at_the_slowest_rate() -> None:
    async def main() -> None:
        async with Town(100e3 / 8) as town:
            for other in town.others:
                await town.sender.send(other.peer, Service.BLOB, b"blob", [bytes(500_000)])
            await asyncio.sleep(30)
            assert town.sender.connected() == {other.peer for other in town.others}
            assert all(town.sender.peer in other.connected() for other in town.others)

    run_virtual(main())
