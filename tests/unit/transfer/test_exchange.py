"""Messages know how urgent they are; blobs arrive piece by piece and are believed by their hash alone."""

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from blake3 import blake3

from ravnest.config import WireFormat
from ravnest.disk import FileMap
from ravnest.ids import HUB, MicrobatchId, NodeId, RoundId, SegmentId
from ravnest.net.memory import run_virtual
from ravnest.net.transport import Service
from ravnest.protocol.averaging import RingPart
from ravnest.protocol.membership import Refused, Stop
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.placement import BlobPart, BlobRef, BlobRequest
from ravnest.protocol.tensors import Buffer, TensorSpec
from ravnest.protocol.training import Activation, Gradient
from ravnest.transfer.blobs import Blob, Blobs, Spool, hash_pieces, name_blob, name_hashes, name_pieces
from ravnest.transfer.exchange import Download, Exchange
from ravnest.transfer.outbox import Outgoing

PEER, OTHER, LAST = NodeId("peer"), NodeId("other"), NodeId("last")
HASH = "0" * 64
CONTENT = bytes(range(256)) * (3 << 12)  # three pieces
NUMBERS = TensorSpec("float32", (2,), WireFormat.FP32)


@pytest.mark.parametrize(
    ("message", "service"),
    [
        (Stop("done"), Service.CONTROL),
        (BlobRequest(HASH, 0, 1), Service.CONTROL),
        (Gradient(1, MicrobatchId(0), ()), Service.GRADIENT),
        (Activation(1, MicrobatchId(0), False, 4, ()), Service.ACTIVATION),
        (RingPart(RoundId(1), SegmentId(0), 0, 0, 1, 1.0, NUMBERS), Service.AVERAGING),
        (BlobPart(HASH, 0, 1), Service.BLOB),
    ],
)
def test_what_is_urgent_goes_first(message: Message, service: Service) -> None:
    assert Outgoing(PEER, message).service is service


async def at_once(work: Callable[..., Any], *given: Any) -> Any:
    """Do what the program gives to a thread."""
    return work(*given)


class World:
    """Exchanges by name; a message arrives after the seconds of its sender's line, or never."""

    def __init__(self, *names: NodeId, seconds: dict[NodeId, float | None] | None = None) -> None:
        self.seconds = seconds or {}
        self.sent: list[tuple[NodeId, Outgoing]] = []
        self.blamed: list[NodeId] = []
        self.nodes = {name: self._make(name) for name in names}

    def _make(self, name: NodeId) -> Exchange:
        def blame(node: NodeId, reason: str) -> None:
            assert "is damaged" in reason
            self.blamed.append(node)

        return Exchange(Blobs(), lambda outgoing: self.post(name, outgoing), at_once, blame)

    def post(self, sender: NodeId, outgoing: Outgoing) -> None:
        self.sent.append((sender, outgoing))
        seconds = self.seconds.get(sender, 0.0)
        if seconds is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(seconds, self.deliver, sender, outgoing)

    def deliver(self, sender: NodeId, outgoing: Outgoing) -> None:
        self.nodes[outgoing.to].receive(sender, outgoing.message, outgoing.buffers)

    def num_pieces(self, sender: NodeId) -> int:
        """Return how many pieces of content a node has sent."""
        return sum(name == sender and isinstance(each.message, BlobPart) for name, each in self.sent)

    async def fetch(self, ref: BlobRef, *sources: NodeId, by: NodeId = PEER, **how: Any) -> Buffer | Refusal:
        return await self.nodes[by].fetch(ref, sources, **{"quiet_seconds": 30.0, **how})


def in_world(script: Callable[[World], Awaitable[None]], *names: NodeId, **lines: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(10_000):
            await script(World(PEER, HUB, *names, **lines))

    run_virtual(main())


@pytest.mark.parametrize(("size", "num_pieces"), [(1, 1), (1 << 20, 1), ((1 << 20) + 1, 3), (5 << 19, 4)])
def test_a_blob_arrives_whole(size: int, num_pieces: int) -> None:
    """A blob of more than one piece is one message more: the hashes of its pieces."""
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)

    async def script(world: World) -> None:
        ref = world.nodes[HUB].blobs.keep(content)
        found = await world.fetch(ref, HUB)
        assert found == content
        assert world.num_pieces(HUB) == num_pieces
        assert ref not in world.nodes[PEER].blobs
        with pytest.raises(TypeError):
            found[0] = 0

    in_world(script)


def test_little_of_many_blobs_is_in_memory_when_they_are_served_in_turn(tmp_path: Path) -> None:
    blobs, piece = Blobs(folder=tmp_path), bytes(1 << 20)
    refs = [
        blobs.keep_pieces(lambda number=number: (bytes([number]) * len(piece) for _ in range(65)))
        for number in range(4)
    ]
    process = psutil.Process()
    before = most = process.memory_info().rss
    for offset in range(0, 65 << 20, 1 << 20):
        for ref in refs:
            (served,) = blobs.serve(PEER, BlobRequest(ref.blob, offset, len(piece))).buffers
            assert served[-1] == served[0]
            sum(served[::4096])  # as one who sends it: every page of it is read
        most = max(most, process.memory_info().rss)
    assert most - before < 120e6  # 64 MiB of all, not of each


def test_what_is_larger_than_memory_may_be_goes_through_files(tmp_path: Path) -> None:
    piece, num_pieces = bytes(range(256)) * 4096, 200  # 210 MB
    process = psutil.Process()
    before = most = process.memory_info().rss

    async def watch(work: Callable[..., Any], *given: Any) -> Any:
        nonlocal most
        most = max(most, process.memory_info().rss)
        return work(*given)

    async def main() -> None:
        nonlocal before
        there = Exchange(Blobs(folder=tmp_path), lambda sent: here.receive(HUB, sent.message, sent.buffers))
        here = Exchange(
            Blobs(folder=tmp_path), lambda sent: there.receive(PEER, sent.message, sent.buffers), watch
        )
        ref = there.blobs.keep_pieces(lambda: (piece for _ in range(num_pieces)))
        before = min(before, process.memory_info().rss)
        found = await here.fetch(ref, [HUB], quiet_seconds=None)
        assert most - before < 180e6  # twice 64 MiB, and what Python had before
        assert name_blob(found) == ref
        assert not os.listdir(tmp_path)  # they have no name

    run_virtual(main())


def test_small_blobs_and_those_that_no_disk_takes_are_in_memory(tmp_path: Path) -> None:
    blobs = Blobs(folder=tmp_path / "gone")
    for num_pieces in (0, 1, 17):
        pieces = [b"x" * (1 << 20)] * num_pieces
        ref, content = blobs.keep_pieces(pieces.copy), b"".join(pieces)
        assert ref == name_blob(content)
        assert blobs.kept(ref) == content
        blobs.drop(ref)
        assert ref not in blobs
    assert not isinstance(Spool(17 << 20, tmp_path / "gone").content.obj, mmap.mmap)


@pytest.mark.parametrize("size", [3, (1 << 20) + 3])
def test_pieces_that_are_changed_while_they_pass_are_named_as_they_are_written(size: int) -> None:
    weights, written = bytearray(size), bytearray()

    def write(piece: Buffer) -> None:
        weights[:] = bytes([weights[0] + 1]) * size  # an update of what is trained
        written.extend(piece)

    ref, hashes = name_pieces([b"header", memoryview(weights)], write)
    assert ref == name_blob(bytes(written))
    assert hashes == hash_pieces(bytes(written))
    assert len(written) == size + 6


def test_a_damaged_blob_is_told() -> None:
    async def script(world: World) -> None:
        ref = name_blob(b"good")
        task = asyncio.create_task(world.fetch(ref, HUB))
        await asyncio.sleep(0.1)
        world.deliver(HUB, Outgoing(PEER, BlobPart(ref.blob, 0, 4), (memoryview(b"evil"),)))
        assert await task == Refusal(f"blob {ref.blob[:12]} of hub is damaged")
        assert not world.blamed, "whoever fetched it is told"

    in_world(script, seconds={HUB: None, PEER: None})


def test_a_blob_that_is_here_is_not_fetched() -> None:
    async def script(world: World) -> None:
        ref = world.nodes[PEER].blobs.keep(b"mine")
        assert await world.fetch(ref, HUB) == b"mine" == world.nodes[PEER].blobs.kept(ref)
        assert not world.sent

    in_world(script)


def test_pieces_that_nobody_asked_for_are_refused() -> None:
    async def script(world: World) -> None:
        ref = name_blob(b"abcd")
        task = asyncio.create_task(world.fetch(ref, HUB))
        await asyncio.sleep(0.1)
        stray = [
            (HUB, BlobPart(HASH, 0, 4)),
            (OTHER, BlobPart(ref.blob, 0, 4)),
            (HUB, BlobPart(ref.blob, 2, 2)),
        ]
        refused = [world.nodes[PEER].receive(sender, piece, (b"abcd",)) for sender, piece in stray]
        assert all(isinstance(each, Refusal) for each in refused)
        assert world.nodes[PEER].receive(HUB, BlobPart(ref.blob, 0, 4), (b"abcd",)) is None
        assert isinstance(world.nodes[PEER].receive(HUB, BlobPart(ref.blob, 0, 4), (b"abcd",)), Refusal)
        assert await task == b"abcd"

    in_world(script, seconds={PEER: None})


@pytest.mark.parametrize("size", [1, (1 << 20) - 1, (1 << 20) + 1])
def test_a_node_that_sends_less_or_more_than_it_was_asked_for_is_asked_no_more(size: int) -> None:
    async def script(world: World) -> None:
        ref = world.nodes[OTHER].blobs.keep(CONTENT)
        task = asyncio.create_task(world.fetch(ref, OTHER))
        await asyncio.sleep(1.5)  # the hashes are here
        world.nodes[PEER].receive(OTHER, BlobPart(ref.blob, 0, size), (bytes(size),))
        assert "damaged" in (await task).reason

    in_world(script, OTHER, seconds={OTHER: 1.0})


@pytest.mark.parametrize("size", [-1, 0, 2**60, 2**70])
def test_a_blob_of_a_size_that_cannot_be_is_asked_of_nobody(size: int) -> None:
    async def script(world: World) -> None:
        found = await world.fetch(BlobRef(HASH, size), HUB)
        assert f"of {size} bytes finds no memory here" in found.reason
        assert not world.sent

    in_world(script)


def test_the_name_of_a_blob_is_its_blake3_hash() -> None:
    assert name_blob(b"") == BlobRef("af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262", 0)
    assert name_blob(memoryview(b"abc")) == name_blob(b"abc") == BlobRef(blake3(b"abc").hexdigest(), 3)


def test_content_that_looks_like_hashes_has_another_name_than_they_give() -> None:
    hashes = hash_pieces(CONTENT)
    assert name_blob(CONTENT) == name_hashes(hashes, len(CONTENT))
    assert name_blob(hashes).blob != name_blob(CONTENT).blob


def test_what_is_not_here_is_refused_and_whoever_waits_is_told() -> None:
    async def script(world: World) -> None:
        ref = BlobRef("1" * 64, 4)
        task = asyncio.create_task(world.fetch(ref, HUB))
        await asyncio.sleep(0)
        world.nodes[PEER].refuse(OTHER, "not mine to say", ref.blob)
        world.nodes[PEER].refuse(HUB, "of something else", "2" * 64)
        found = await task
        assert found == Refusal(f"hub says: blob {ref.blob[:12]} has no byte 0 here")

    in_world(script)


def test_two_who_want_the_same_blob_both_get_it_from_one_request() -> None:
    async def script(world: World) -> None:
        ref = world.nodes[HUB].blobs.keep(b"content")
        assert await asyncio.gather(world.fetch(ref, HUB), world.fetch(ref, HUB)) == [b"content"] * 2
        assert world.num_pieces(HUB) == 1

    in_world(script)


def test_who_waits_for_a_fetch_that_is_cancelled_goes_on_with_it() -> None:
    async def script(world: World) -> None:
        ref = world.nodes[HUB].blobs.keep(CONTENT)
        first, second = (asyncio.create_task(world.fetch(ref, HUB)) for _ in range(2))
        await asyncio.sleep(2.5)
        first.cancel()
        assert await second == CONTENT

    in_world(script, seconds={HUB: 1.0})


def test_pieces_come_from_all_nodes_at_once_and_a_faster_one_sends_more() -> None:
    content = bytes(20 << 20)

    async def script(world: World) -> None:
        for name in (HUB, OTHER):
            ref = world.nodes[name].blobs.keep(content)
        assert await world.fetch(ref, OTHER, HUB) == content
        slow, fast = world.num_pieces(OTHER), world.num_pieces(HUB)
        assert 3 <= slow < fast
        assert slow + fast <= 21 + 4, "only the last pieces are asked twice"

    in_world(script, OTHER, seconds={OTHER: 3.0, HUB: 1.0})


def test_a_node_that_falls_silent_loses_its_pieces_to_others() -> None:
    async def script(world: World) -> None:
        for name in (HUB, OTHER):
            ref = world.nodes[name].blobs.keep(CONTENT * 4)
        task = asyncio.create_task(world.fetch(ref, HUB, OTHER))
        await asyncio.sleep(1.5)  # the hashes came
        world.seconds[OTHER] = None
        assert await task == CONTENT * 4
        assert asyncio.get_running_loop().time() < 30, "nobody waits for it"

    in_world(script, OTHER, seconds={OTHER: 1.0, HUB: 1.0})


def test_a_reserve_is_asked_only_when_nobody_else_is_left() -> None:
    async def script(world: World) -> None:
        ref = world.nodes[HUB].blobs.keep(CONTENT)
        world.nodes[OTHER].blobs.keep(CONTENT)
        assert await world.fetch(ref, OTHER, reserve=(HUB,)) == CONTENT
        assert world.num_pieces(HUB) == 0
        again = world.nodes[HUB].blobs.keep(CONTENT[1:])
        assert await world.fetch(again, OTHER, reserve=(HUB,)) == CONTENT[1:]
        assert world.num_pieces(HUB) == 4

    in_world(script, OTHER)


@pytest.mark.parametrize("lies_about", ["content", "hashes"])
def test_a_node_that_sends_a_wrong_piece_is_named_and_only_that_piece_is_fetched_again(
    lies_about: str,
) -> None:
    async def script(world: World) -> None:
        ref = world.nodes[HUB].blobs.keep(CONTENT)
        hashes = bytearray(hash_pieces(CONTENT))
        content = bytearray(CONTENT)
        (hashes if lies_about == "hashes" else content)[-1] ^= 1
        world.nodes[OTHER].blobs.pass_on(ref, Blob(bytes(content), bytes(hashes)))
        assert await world.fetch(ref, OTHER, reserve=(HUB,)) == CONTENT
        assert world.blamed == [OTHER]
        assert world.num_pieces(HUB) == (1 if lies_about == "content" else 4)

    in_world(script, OTHER)


def test_a_fetch_that_was_cut_goes_on_where_it_was() -> None:
    async def script(world: World) -> None:
        ref = world.nodes[HUB].blobs.keep(CONTENT * 3)
        world.nodes[OTHER].blobs.keep(CONTENT * 3)
        task = asyncio.create_task(world.fetch(ref, HUB))
        await asyncio.sleep(2.5)  # one answer with hashes, four with pieces
        task.cancel()
        await asyncio.wait([task])
        assert world.nodes[PEER].num_come(ref) == 4 << 20
        assert await world.fetch(ref, OTHER) == CONTENT * 3
        assert world.num_pieces(OTHER) == 9 - 4
        assert world.nodes[PEER].num_come(ref) == 0, "nothing is left of it"

    in_world(script, OTHER, seconds={HUB: 1.0})


def test_what_came_before_a_cut_and_was_not_checked_is_fetched_again() -> None:
    download = Download(name_blob(CONTENT))
    download.add([HUB])
    download.next_requests(0.0)
    download.accept(HUB, BlobPart(download.ref.blob, len(CONTENT), 96), 0.0)
    download.follow_hashes(hash_pieces(CONTENT))
    asked = [request.message for request in download.next_requests(0.0)]
    assert [message.offset >> 20 for message in asked] == [0, 1, 2]
    assert [download.accept(HUB, BlobPart(x.blob, x.offset, x.size_bytes), 0.0) for x in asked] == [True] * 3
    download.record_right(1 << 20)
    download.retain(())
    download.add([OTHER])
    assert [request.message.offset >> 20 for request in download.next_requests(0.0)] == [0, 2]


def test_what_arrives_is_passed_on_while_it_arrives() -> None:
    """Of a chain of nodes that fetch the same, the first one alone asks the hub."""
    content = CONTENT * 10

    async def script(world: World) -> None:
        ref = world.nodes[HUB].blobs.keep(content)
        chain = [
            world.fetch(ref, OTHER, by=LAST, reserve=(HUB,), can_wait=True, passes_on=True),
            world.fetch(ref, PEER, by=OTHER, reserve=(HUB,), can_wait=True, passes_on=True),
            world.fetch(ref, HUB, passes_on=True),
        ]
        assert await asyncio.gather(*chain) == [content] * 3
        assert world.num_pieces(HUB) == world.num_pieces(PEER) == world.num_pieces(OTHER) == 31
        took = asyncio.get_running_loop().time()
        assert took < 1.3 * (31 / 4 + 1), "all at the same time, not one after the other"
        assert ref in world.nodes[PEER].blobs
        world.nodes[PEER].blobs.drop(ref)
        assert ref not in world.nodes[PEER].blobs

    in_world(script, OTHER, LAST, seconds={HUB: 1.0})


def test_who_waits_for_what_will_not_come_is_told() -> None:
    async def script(world: World) -> None:
        ref = world.nodes[HUB].blobs.keep(CONTENT)
        waiting = asyncio.create_task(world.fetch(ref, PEER, by=OTHER, can_wait=True))
        task = asyncio.create_task(world.fetch(ref, HUB))
        await asyncio.sleep(0.5)
        task.cancel()
        found = await waiting
        assert found == Refusal(f"peer says: blob {ref.blob[:12]} has no byte {len(CONTENT)} here")

    in_world(script, OTHER, seconds={HUB: 1.0})


def test_a_node_waits_for_a_bounded_number_of_pieces() -> None:
    async def script(world: World) -> None:
        for offset in range(100):
            world.nodes[PEER].receive(OTHER, BlobRequest(HASH, offset, 1, can_wait=True), ())
        assert 0 < len(world.sent) < 100
        refused = len(world.sent)
        world.nodes[PEER].refuse(OTHER, "it is gone")  # nothing more waits, so there is room again
        world.nodes[PEER].receive(OTHER, BlobRequest(HASH, 0, 1, can_wait=True), ())
        assert len(world.sent) == refused

    in_world(script, OTHER)


def test_what_is_large_is_put_on_disk_and_not_in_memory() -> None:
    spools: list[Spool] = []

    async def watch(work: Callable[..., Any], *given: Any) -> Any:
        result = work(*given)
        spools.extend([result] if isinstance(result, Spool) else [])
        return result

    async def main() -> None:
        there = Exchange(Blobs(), lambda sent: here.receive(HUB, sent.message, sent.buffers))
        here = Exchange(Blobs(), lambda sent: there.receive(PEER, sent.message, sent.buffers), watch)
        ref = there.blobs.keep_pieces(lambda: [CONTENT[:7], CONTENT[7:]])
        assert ref == name_blob(CONTENT)
        assert await here.fetch(ref, [HUB], quiet_seconds=None) == CONTENT

    run_virtual(main())
    assert [type(spool.content.obj) for spool in spools] == [FileMap]


def test_the_event_loop_hashes_and_writes_nothing() -> None:
    """All of it goes to a thread, and in pieces: so many bytes are the most that one turn of it takes."""
    in_thread: list[int] = []

    async def count(work: Callable[..., Any], *given: Any) -> Any:
        in_thread.extend(len(each) for each in given if isinstance(each, memoryview))
        return await asyncio.to_thread(work, *given)

    async def main() -> None:
        there = Exchange(Blobs(), lambda sent: here.receive(HUB, sent.message, sent.buffers))
        here = Exchange(Blobs(), lambda sent: there.receive(PEER, sent.message, sent.buffers), count)
        ref = there.blobs.keep(CONTENT + b"end")
        assert await here.fetch(ref, [HUB], quiet_seconds=None) == CONTENT + b"end"

    asyncio.run(main())
    assert sum(in_thread) == len(CONTENT)
    assert max(in_thread) == 1 << 20


async def play_fetch(
    seconds_per_piece: float | None,
    quiet_seconds: float | None,
    num_pieces: int = 4,  # the hashes are one
    clock: Callable[[], float] | None = None,
) -> tuple[Buffer | Refusal, float, Blobs]:
    """Fetch a blob from a node that takes its time and sends so many pieces; return it, and when it came."""
    loop = asyncio.get_running_loop()
    served = 0

    def serve(request: Outgoing) -> None:
        nonlocal served
        served += 1
        if seconds_per_piece is not None and served <= num_pieces:
            loop.call_later(seconds_per_piece, there.receive, HUB, request.message, ())

    here = Exchange(Blobs(), serve, at_once)
    there = Exchange(Blobs(), lambda sent: here.receive(PEER, sent.message, sent.buffers))
    ref = there.blobs.keep(CONTENT)
    found = await here.fetch(ref, [PEER], quiet_seconds=quiet_seconds, clock=clock)
    late = loop.time()
    assert isinstance(here.receive(PEER, BlobPart(ref.blob, 0, 4), (b"late",)), Refusal)
    return found, late, here.blobs


def test_a_slow_node_is_waited_for_while_it_sends() -> None:
    found, seconds, blobs = run_virtual(play_fetch(25.0, quiet_seconds=30.0))
    assert (found, seconds) == (CONTENT, 50.0), "first the hashes, then all pieces at once"
    assert name_blob(CONTENT) not in blobs


@pytest.mark.parametrize(("num_pieces", "seconds"), [(0, 30.0), (2, 80.0)])
def test_a_node_that_falls_silent_is_given_up(num_pieces: int, seconds: float) -> None:
    found, late, _ = run_virtual(play_fetch(25.0, 30.0, num_pieces))
    assert found == Refusal("peer has sent nothing of it for 30 s")
    assert late == seconds


def test_by_a_clock_that_stands_still_nobody_is_silent() -> None:
    found, seconds, _ = run_virtual(play_fetch(200.0, 30.0, clock=lambda: 7.0))
    assert (found, seconds) == (CONTENT, 400.0)


def test_without_a_limit_a_silent_node_is_waited_for() -> None:
    found, seconds, _ = run_virtual(play_fetch(5000.0, quiet_seconds=None))
    assert (found, seconds) == (CONTENT, 10_000.0)


def test_a_fetch_that_is_cancelled_asks_for_nothing_more() -> None:
    async def main() -> None:
        posted: list[Outgoing] = []
        exchange, ref = Exchange(Blobs(), posted.append, at_once), name_blob(CONTENT)
        task = asyncio.create_task(exchange.fetch(ref, [PEER], quiet_seconds=None))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        piece = BlobPart(ref.blob, 0, 1 << 20)
        assert isinstance(exchange.receive(PEER, piece, (CONTENT[: 1 << 20],)), Refusal)
        assert len(posted) == 1

    run_virtual(main())


def test_an_exchange_answers_what_it_is_asked_and_told() -> None:
    posted: list[Outgoing] = []
    exchange = Exchange(Blobs(), posted.append)
    ref = exchange.blobs.keep(b"content")
    assert exchange.receive(PEER, BlobRequest(ref.blob, 3, 2), ()) is None
    assert (posted[0].to, posted[0].message, bytes(posted[0].buffers[0])) == (
        PEER,
        BlobPart(ref.blob, 3, 2),
        b"te",
    )
    assert exchange.receive(PEER, BlobRequest(HASH, 0, 1), ()) is None
    assert isinstance(posted[1].message, Refused)


def test_pieces_that_another_blob_here_has_are_not_fetched() -> None:
    async def run() -> None:
        world = World(PEER, OTHER)
        old = b"".join(bytes([number]) * (1 << 20) for number in range(5))
        new = old[: 4 << 20] + b"changed" * 1000
        world.nodes[PEER].blobs.keep(old)
        ref = world.nodes[OTHER].blobs.keep(new)
        found = await world.nodes[PEER].fetch(ref, [OTHER], quiet_seconds=None)
        assert found == new
        sent = [outgoing.message for sender, outgoing in world.sent if sender == OTHER]
        pieces = [message for message in sent if isinstance(message, BlobPart)]
        assert [message.offset for message in pieces] == [len(new), 4 << 20]  # the hashes, and what is new

    run_virtual(run())


def test_a_piece_that_is_not_what_its_blob_says_is_fetched() -> None:
    async def run() -> None:
        world = World(PEER, OTHER)
        new = b"".join(bytes([number]) * (1 << 20) for number in range(3))
        damaged = bytearray(new + b"more")
        hashes = hash_pieces(damaged)
        damaged[5] ^= 1
        world.nodes[PEER].blobs.pass_on(name_hashes(hashes, len(damaged)), Blob(damaged, hashes))
        ref = world.nodes[OTHER].blobs.keep(new)
        assert await world.nodes[PEER].fetch(ref, [OTHER], quiet_seconds=None) == new

    run_virtual(run())
