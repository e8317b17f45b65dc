"""Parcels know how urgent they are; blobs arrive piece by piece and are believed by their hash alone."""

import pytest

from ravnest.config import WireFormat
from ravnest.ids import HUB, MicrobatchId, NodeId, RoundId, SegmentId
from ravnest.net.identity import Token, new_keys
from ravnest.net.transport import Service
from ravnest.protocol.averaging import RingPart
from ravnest.protocol.blobs import BlobPart, BlobRef, BlobRequest
from ravnest.protocol.membership import Refused, Stop
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.tensors import Buffer, TensorSpec
from ravnest.protocol.training import Activation, Gradient
from ravnest.transfer.blobs import Blobs, Outgoing, name_blob, name_pieces, prove

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


def test_a_proof_is_of_one_secret_one_hub_and_one_key() -> None:
    keys, hub = new_keys(), new_keys()
    token = Token((), hub.public, b"s" * 16)
    others = [
        prove(Token((), hub.public, b"t" * 16), keys.public),
        prove(Token((), new_keys().public, b"s" * 16), keys.public),
        prove(token, new_keys().public),
    ]
    assert prove(token, keys.public) == prove(Token(("anywhere",), hub.public, b"s" * 16), keys.public)
    assert prove(token, keys.public) not in others


def fetch(content: bytes, served: bytes | None = None) -> tuple[list[bytes | Refusal], int]:
    """Pass a blob from a hub to a peer; return what came of it and how many pieces it took."""
    here, there, found = Blobs(), Blobs(), []
    ref = here.keep(content)
    parcels, num_pieces = there.want(ref, HUB, found.append), 0
    while parcels:
        (request,) = parcels
        assert request.to == HUB
        answer = here.serve(PEER, request.message)
        buffer = answer.buffers[0] if served is None else memoryview(served)
        parcels = there.take(HUB, answer.message, buffer)
        assert isinstance(parcels, list)
        num_pieces += 1
    return found, num_pieces


@pytest.mark.parametrize(("size", "num_pieces"), [(1, 1), (1 << 20, 1), ((1 << 20) + 1, 2), (5 << 19, 3)])
def test_a_blob_arrives_whole(size: int, num_pieces: int) -> None:
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert fetch(content) == ([content], num_pieces)


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


def test_who_sends_less_than_was_asked_for_is_asked_no_more() -> None:
    blobs, found = Blobs(), []
    blobs.want(BlobRef(HASH, 2**60), PEER, found.append)
    assert blobs.take(PEER, BlobPart(HASH, 0, 1), b"x") == []
    assert "damaged" in found[0].reason


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
