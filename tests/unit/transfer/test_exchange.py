"""Messages know how urgent they are; blobs arrive piece by piece and are believed by their hash alone."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from blake3 import blake3

from ravnest.config import WireFormat
from ravnest.ids import HUB, MicrobatchId, NodeId, RoundId, SegmentId
from ravnest.net.memory import run_virtual
from ravnest.net.transport import Service
from ravnest.protocol.averaging import RingPart
from ravnest.protocol.blobs import BlobPart, BlobRef, BlobRequest
from ravnest.protocol.membership import Refused, Stop
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.tensors import Buffer, TensorSpec
from ravnest.protocol.training import Activation, Gradient
from ravnest.transfer.blobs import BlobFiles, Blobs, name_blob, name_pieces
from ravnest.transfer.exchange import Exchange
from ravnest.transfer.outbox import Outgoing

PEER, OTHER = NodeId("peer"), NodeId("other")
HASH = "0" * 64
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


def fetch(content: bytes, served: bytes | None = None) -> tuple[list[bytes | Refusal], int]:
    """Pass a blob from a hub to a peer; return what came of it and how many pieces it took."""
    here, there, found = Blobs(), Blobs(), []
    ref = here.keep(content)
    requests, num_pieces = there.want(ref, HUB, found.append), 0
    while requests:
        (request,) = requests
        assert request.to == HUB
        answer = here.serve(PEER, request.message)
        buffer = answer.buffers[0] if served is None else memoryview(served)
        requests = there.take(HUB, answer.message, buffer)
        assert isinstance(requests, list)
        num_pieces += 1
    return found, num_pieces


@pytest.mark.parametrize(("size", "num_pieces"), [(1, 1), (1 << 20, 1), ((1 << 20) + 1, 2), (5 << 19, 3)])
def test_a_blob_arrives_whole(size: int, num_pieces: int) -> None:
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert fetch(content) == ([content], num_pieces)


def test_what_is_larger_than_memory_may_be_goes_through_files(tmp_path: Path) -> None:
    piece, num_pieces = bytes(range(256)) * 4096, 200  # 210 MB
    here, there, found = Blobs(BlobFiles(tmp_path)), Blobs(BlobFiles(tmp_path)), []
    process = psutil.Process()
    before = most = process.memory_info().rss
    ref = here.keep_pieces(lambda: (piece for _ in range(num_pieces)))
    assert ref == BlobRef(blake3(piece * num_pieces).hexdigest(), num_pieces * len(piece))
    before = min(before, process.memory_info().rss)
    requests = there.want(ref, HUB, found.append)
    while requests:
        answer = here.serve(PEER, requests[0].message)
        requests = there.take(HUB, answer.message, answer.buffers[0])
        most = max(most, process.memory_info().rss)
    assert most - before < 180e6  # twice 64 MiB, and what Python had before
    assert name_blob(found[0]) == ref
    assert not [*tmp_path.iterdir()]  # they have no name


def test_small_blobs_and_those_that_no_disk_takes_are_in_memory(tmp_path: Path) -> None:
    blobs = Blobs(BlobFiles(tmp_path / "gone"))
    for num_pieces in (0, 1, 17):
        pieces = [b"x" * (1 << 20)] * num_pieces
        ref, content = blobs.keep_pieces(pieces.copy), b"".join(pieces)
        assert ref == name_blob(content)
        assert blobs.kept(ref) == content
        blobs.drop(ref)
        assert ref not in blobs
    large = BlobRef("0" * 64, 17 << 20)
    assert len(blobs.want(large, HUB, lambda _: None)) == 1


@pytest.mark.parametrize("size", [3, (1 << 20) + 3])
def test_pieces_that_are_changed_while_they_pass_are_named_as_they_are_written(size: int) -> None:
    weights, written = bytearray(size), bytearray()

    def write(piece: Buffer) -> None:
        weights[:] = bytes([weights[0] + 1]) * size  # an update of what is trained
        written.extend(piece)

    ref = name_pieces([b"header", memoryview(weights)], write)
    assert ref == name_blob(bytes(written))
    assert len(written) == size + 6


def test_a_damaged_blob_is_told_and_not_kept() -> None:
    (found,), _ = fetch(b"good", served=b"evil")
    assert isinstance(found, Refusal)
    assert "damaged" in found.reason


def test_a_blob_that_is_here_is_not_fetched() -> None:
    blobs, found = Blobs(), []
    ref = blobs.keep(b"mine")
    assert blobs.want(ref, HUB, found.append) == []
    assert found == [b"mine"]
    assert blobs.kept(ref) == b"mine"


def test_pieces_that_nobody_asked_for_are_refused() -> None:
    blobs, found = Blobs(), []
    ref = BlobRef("1" * 64, 4)
    blobs.want(ref, HUB, found.append)
    stray = [(HUB, BlobPart(HASH, 0, 4)), (OTHER, BlobPart(ref.blob, 0, 4)), (HUB, BlobPart(ref.blob, 2, 2))]
    assert all(isinstance(blobs.take(sender, piece, b"abcd"), Refusal) for sender, piece in stray)
    assert found == []


@pytest.mark.parametrize("size", [1, (1 << 20) - 1, (1 << 20) + 1])
def test_a_node_that_sends_less_or_more_than_it_was_asked_for_is_asked_no_more(size: int) -> None:
    blobs, found = Blobs(), []
    blobs.want(BlobRef(HASH, 3 << 20), PEER, found.append)
    assert blobs.take(PEER, BlobPart(HASH, 0, size), bytes(size)) == []
    assert "damaged" in found[0].reason
    assert isinstance(blobs.take(PEER, BlobPart(HASH, size, 1), b"x"), Refusal)


@pytest.mark.parametrize("size", [-1, 0, 2**60, 2**70])
def test_a_blob_of_a_size_that_cannot_be_is_asked_of_nobody(size: int) -> None:
    blobs, found = Blobs(), []
    assert blobs.want(BlobRef(HASH, size), PEER, found.append) == []
    assert f"of {size} bytes finds no memory here" in found[0].reason


def test_the_name_of_a_blob_is_its_blake3_hash() -> None:
    assert name_blob(b"") == BlobRef("af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262", 0)
    assert name_blob(memoryview(b"abc")) == name_blob(b"abc") == BlobRef(blake3(b"abc").hexdigest(), 3)


def test_what_arrives_is_not_copied_and_cannot_be_changed() -> None:
    here, there, found = Blobs(), Blobs(), []
    ref = here.keep(b"content")
    (request,) = there.want(ref, PEER, found.append)
    answer = here.serve(PEER, request.message)
    there.take(PEER, answer.message, answer.buffers[0])
    assert there.kept(ref) is found[0]
    with pytest.raises(TypeError):
        found[0][0] = 0


def test_what_is_not_here_is_refused_and_whoever_waits_is_told() -> None:
    here, there, found = Blobs(), Blobs(), []
    (request,) = there.want(BlobRef("1" * 64, 4), HUB, found.append)
    answer = here.serve(PEER, request.message)
    assert isinstance(answer.message, Refused)
    there.refuse(OTHER, "not mine to say", answer.message.blob)
    there.refuse(HUB, "of something else", "2" * 64)
    assert found == []
    there.refuse(HUB, answer.message.reason, answer.message.blob)
    assert isinstance(found[0], Refusal)
    assert "no byte 0" in found[0].reason


def test_two_who_want_the_same_blob_both_get_it_from_one_request() -> None:
    here, there, found = Blobs(), Blobs(), []
    ref = here.keep(b"content")
    (request,) = there.want(ref, PEER, lambda got: found.append(("first", got)), keep=False)
    assert there.want(ref, PEER, lambda got: found.append(("second", got)), keep=False) == []
    answer = here.serve(PEER, request.message)
    assert there.take(PEER, answer.message, answer.buffers[0]) == []
    assert found == [("first", b"content"), ("second", b"content")]
    assert ref not in there


def test_a_blob_that_never_came_from_one_node_comes_from_another_for_all_who_wait() -> None:
    here, there, found = Blobs(), Blobs(), []
    ref = here.keep(b"content")
    there.want(ref, OTHER, found.append, keep=False)
    (request,) = there.want(ref, PEER, found.append)
    assert request.to == PEER
    answer = here.serve(PEER, request.message)
    assert isinstance(there.take(OTHER, answer.message, answer.buffers[0]), Refusal)
    there.refuse(OTHER, "gone", ref.blob)
    there.take(PEER, answer.message, answer.buffers[0])
    assert found == [b"content"] * 2
    assert ref in there


def test_what_is_forgotten_is_refused_when_it_comes_unless_another_waits() -> None:
    here, there, found, others = Blobs(), Blobs(), [], []
    ref = here.keep(b"content")
    (request,) = there.want(ref, PEER, found.append)
    there.want(ref, PEER, others.append)
    answer = here.serve(PEER, request.message)
    there.forget(ref, found.append)
    there.take(PEER, answer.message, answer.buffers[0])
    assert (found, others) == ([], [b"content"])
    there = Blobs()
    there.want(ref, PEER, found.append)
    there.forget(ref, found.append)
    there.forget(ref, found.append)
    assert isinstance(there.take(PEER, answer.message, answer.buffers[0]), Refusal)
    assert found == []


CONTENT = bytes(range(256)) * (3 << 12)  # three pieces


async def play_fetch(
    seconds_per_piece: float | None,
    quiet_seconds: float | None,
    num_pieces: int = 3,
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

    here = Exchange(Blobs(), serve)
    there = Exchange(Blobs(), lambda sent: here.receive(PEER, sent.message, sent.buffers))
    ref = there.blobs.keep(CONTENT)
    found = await here.fetch(ref, PEER, quiet_seconds=quiet_seconds, clock=clock)
    late = loop.time()
    assert here.blobs.num_come(ref) == 0, "nothing is left of it"
    assert isinstance(here.receive(PEER, BlobPart(ref.blob, 0, 4), (b"late",)), Refusal)
    return found, late, here.blobs


def test_a_slow_node_is_waited_for_while_it_sends() -> None:
    found, seconds, blobs = run_virtual(play_fetch(25.0, quiet_seconds=30.0))
    assert (found, seconds) == (CONTENT, 75.0)
    assert name_blob(CONTENT) not in blobs


@pytest.mark.parametrize(("num_pieces", "seconds"), [(0, 30.0), (2, 90.0)])
def test_a_node_that_falls_silent_is_given_up(num_pieces: int, seconds: float) -> None:
    found, late, _ = run_virtual(play_fetch(25.0, 30.0, num_pieces))
    assert found == Refusal("peer has sent nothing of it for 30 s")
    assert late == seconds


def test_by_a_clock_that_stands_still_nobody_is_silent() -> None:
    found, seconds, _ = run_virtual(play_fetch(200.0, 30.0, clock=lambda: 7.0))
    assert (found, seconds) == (CONTENT, 600.0)


def test_without_a_limit_a_silent_node_is_waited_for() -> None:
    found, seconds, _ = run_virtual(play_fetch(5000.0, quiet_seconds=None))
    assert (found, seconds) == (CONTENT, 15_000.0)


def test_a_fetch_that_is_cancelled_asks_for_nothing_more() -> None:
    async def main() -> None:
        posted: list[Outgoing] = []
        exchange, ref = Exchange(Blobs(), posted.append), name_blob(CONTENT)
        task = asyncio.create_task(exchange.fetch(ref, PEER, quiet_seconds=None))
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
    found: list[Buffer | Refusal] = []
    exchange.blobs.want(BlobRef(HASH, 9), PEER, found.append)
    assert exchange.receive(PEER, Refused("gone", HASH), ()) is None
    assert found == [Refusal("peer says: gone")]
