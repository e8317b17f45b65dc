"""Frames: how small headers are, and the reason with which each kind of wrong one is refused."""

import math
import resource
from dataclasses import fields
from typing import get_args, get_origin

import msgspec
import pytest

from ravnest.config import WireFormat
from ravnest.errors import ProtocolError
from ravnest.ids import LeaseId, MicrobatchId, NodeId, RoundId, SegmentId
from ravnest.plan.types import Node, Ring, Stage
from ravnest.protocol.averaging import RingPart, RoundAbort, RoundCommit, RoundReady
from ravnest.protocol.membership import Hello, Stop
from ravnest.protocol.messages import MOST_HEADER_BYTES, WIRE_VERSION, Message, announced, pack, unpack
from ravnest.protocol.placement import BlobPart, BlobRequest, Contact, PlanOrder
from ravnest.protocol.tensors import TensorSpec
from ravnest.protocol.training import Activation, DroppedMicrobatch, LeaseGrant, StepReport

HASH = "0123456789abcdef" * 4


def header(*items: object, version: int = WIRE_VERSION) -> bytes:
    return bytes([version]) + msgspec.msgpack.encode(items)


def activation(num_values: int, shape: tuple[int, ...]) -> Activation:
    spec = TensorSpec("bfloat16", shape, WireFormat.BF16)
    values = tuple((10_000 + value, spec) for value in range(num_values))
    return Activation(1000, MicrobatchId(10_000_000), False, shape[0], values)


@pytest.mark.parametrize("num_values", [1, 2, 4])
def test_the_header_of_an_activation_is_a_fraction_of_its_tensors(num_values: int) -> None:
    message = activation(num_values, (4, 64, 32))
    buffers = [bytes(spec.num_bytes) for spec in announced(message)]
    packed = pack(message, buffers)
    assert len(packed) <= 50 + 35 * num_values <= 200
    assert len(packed) <= 0.01 * sum(map(len, buffers))
    assert unpack(packed, buffers) == message


def test_a_step_report_and_a_ring_part_fit_in_a_packet() -> None:
    report = StepReport(7, MicrobatchId(10**6), 10**5, 3, 64, 0.1, 0.2, 0.3, 0.05, 2.5, (("acc", 0.9),))
    assert len(pack(report)) <= 100
    spec = TensorSpec("float32", (2**18,), WireFormat.INT4)
    part = RingPart(RoundId(10**4), SegmentId(9), 7, 300, 5, 12345.0, spec)
    assert len(pack(part, [bytes(spec.num_bytes)])) <= 64


@pytest.mark.parametrize(
    "nasty", ["\x1b[2J", "\x1b]0;", "a\x07b", "a\u202eb", "\u2066xx", "\x9b31m", "\u200b"]
)
def test_no_text_of_others_moves_a_cursor_or_hides(nasty: str) -> None:
    sent = pack(Stop(f"why not {nasty}\nmal joined"))
    received = unpack(sent)
    assert isinstance(received, Stop)
    assert received.reason.isprintable()
    raw = pack(Stop("#" * len(nasty.encode()))).replace(b"#" * len(nasty.encode()), nasty.encode())
    with pytest.raises(ProtocolError, match="no message"):
        unpack(raw)


def test_the_order_of_a_stage_in_a_hundred_clusters_fits_in_a_header() -> None:
    nodes = [NodeId(f"volunteer-{number:05}") for number in range(300)]
    order = PlanOrder(
        build_id=12,
        plan_id=13,
        seed=2**40,
        stage=Stage(nodes[0], 3, 9, window=5),
        pipeline=tuple(nodes[:12]),
        rings=tuple(
            (SegmentId(k), Ring(3 + 2 * k, 5 + 2 * k, tuple(nodes[k * 100 :][:100]))) for k in range(3)
        ),
        contacts=tuple(Contact(node, "k" * 40, ("tcp://203.0.113.255:65535",)) for node in nodes),
    )
    assert unpack(pack(order)) == order


def test_a_header_says_who_it_is_for_people_with_a_hex_dump() -> None:
    assert pack(RoundCommit(RoundId(3))) == bytes([WIRE_VERSION]) + b"\x92\xabRoundCommit\x03"


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"", "a header of 0 bytes"),
        (b"\x01", "a header of 1 bytes"),
        (b"\x01" + bytes(MOST_HEADER_BYTES), "a header of 65537 bytes"),
        (
            header("RoundCommit", 1, version=9),
            f"wire version 9 where {WIRE_VERSION} is spoken: update the older program",
        ),
        (header("Nonsense", 1), "Invalid value 'Nonsense'"),
        (header(), "at least length 1, got 0"),
        (header("RoundCommit"), "at least length 2, got 1"),
        (header("RoundCommit", 1, 2), "at most length"),
        (header("RoundCommit", "1"), "Expected `int`, got `str`"),
        (header("RoundCommit", True), "Expected `int`, got `bool`"),
        (header("RoundCommit", 1.0), "Expected `int`, got `float`"),
        (header("RoundCommit", None), "Expected `int`, got `None`"),
        (header("RoundCommit", -1), "Expected `int` >= 0"),
        (header("RoundCommit", 2**63), "Expected `int` <= 9223372036854775807"),
        (header("RoundAbort", 1, "x" * 301, None, 1, False), "length <= 300"),
        (header("RoundAbort", 1, b"why", None, 1, False), "Expected `str`, got `bytes`"),
        (header("RoundAbort", 1, "why", None, 0, False), ">= 1"),
        (header("Pace", 1, 1, 0, 1, False), "Expected `int` >= 1"),
        (header("LearningRate", 1, 1, math.nan), "Expected `float`"),
        (header("LearningRate", 1, 1, -math.inf), "Expected `float`"),
        (header("LeaseGrant", 1, 1, False, 1, [1] * 1025, None, False), "length <= 1024"),
        (header("BlobRequest", HASH + "\n", 0, 1, False), "matching regex"),
        (header("BlobRequest", "../" + HASH[3:], 0, 1, False), "matching regex"),
        (header("BlobRequest", HASH, 0, 2**20 + 1, False), "Expected `int` <= 1048576"),
        (header("Gradient", 1, 1, [[0, ["float32", [1] * 9, "fp32"]]], 0.0), "length <= 8"),
        (header("Gradient", 1, 1, [[0, ["float32", [1], "fp31"]]], 0.0), "Invalid enum value 'fp31'"),
        (header("Gradient", 1, 1, [[0, ["float32", [1], "fp32"], 5]], 0.0), "of length 2"),
        (header("RoundCommit", 1) + b"\x00", "trailing characters"),
        (header("RoundCommit", 1)[:-1], "truncated"),
        (bytes([WIRE_VERSION]) + b"\x92\xa2\xff\xfe\x01", "utf-8"),
    ],
)
def test_a_wrong_header_is_refused_with_a_reason(packed: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        unpack(packed)


def test_a_list_announced_as_huge_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    announced_huge = header("LeaseGrant", 1, 1, False, 1)[:-1] + b"\x01\xdd\xff\xff\xff\xff"
    with pytest.raises(ProtocolError):
        unpack(announced_huge.replace(b"\x95", b"\x96", 1))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@pytest.mark.parametrize(
    ("buffers", "reason"),
    [
        ([], "Activation announces 2 buffers and comes with 0"),
        ([bytes(24)] * 3, "Activation announces 2 buffers and comes with 3"),
        ([bytes(24), bytes(23)], "Activation, buffer 1: 23 bytes instead of 24"),
        ([bytes(25), bytes(24)], "Activation, buffer 0: 25 bytes instead of 24"),
    ],
)
def test_buffers_must_be_those_announced(buffers: list[bytes], reason: str) -> None:
    message = activation(2, (3, 4))
    packed = pack(message, [bytes(24)] * 2)
    with pytest.raises(ProtocolError, match=reason):
        unpack(packed, buffers)
    with pytest.raises(ProtocolError, match=reason):
        pack(message, buffers)


def test_a_message_without_tensors_has_no_buffers() -> None:
    with pytest.raises(ProtocolError, match="Stop announces 0 buffers and comes with 1"):
        unpack(pack(Stop("done")), [b""])


def test_a_buffer_is_measured_in_bytes_whatever_its_items_are() -> None:
    message = activation(1, (3, 4))
    wide = memoryview(bytearray(24)).cast("H")
    assert unpack(pack(message, [wide]), [wide]) == message


@pytest.mark.parametrize("spec", [["float31", [0], "fp32"], ["float32", [0, 2**62, 2**62], "int8"]])
def test_a_tensor_that_cannot_be_is_refused(spec: list[object]) -> None:
    with pytest.raises(ProtocolError, match=r"Gradient, buffer 0: (dtype 'float31'|shape .* is no shape)"):
        unpack(header("Gradient", 1, 1, [[0, spec]], 0.0), [b""])


def test_the_content_of_a_blob_part_is_as_long_as_it_says() -> None:
    part = BlobPart(HASH, 2**40, 3)
    assert unpack(pack(part, [b"abc"]), [b"abc"]) == part
    with pytest.raises(ProtocolError, match="BlobPart, buffer 0: 4 bytes instead of 3"):
        unpack(pack(part, [b"abc"]), [b"abcd"])


def test_a_long_or_odd_reason_is_cut_rather_than_not_sent() -> None:
    arrived = unpack(pack(RoundAbort(RoundId(1), "no vote from \udcff" + "peer, " * 1000)))
    assert isinstance(arrived, RoundAbort)
    assert arrived.reason.startswith("no vote from ?peer, peer, ")
    assert len(arrived.reason) == 300


@pytest.mark.parametrize(
    "message",
    [
        StepReport(1, MicrobatchId(1), 1, 0, 1, 0.0, 0.0, 0.0, 0.0, math.nan, ()),
        StepReport(1, MicrobatchId(1), 1, 0, 1, 0.0, 0.0, 0.0, 0.0, 1.0, (("acc", math.inf),)),
        BlobRequest("not a hash", 0, 1),
        RoundReady(RoundId(1), NodeId("a"), ((SegmentId(1), b"short"),)),
        LeaseGrant(1, LeaseId(1), False, MicrobatchId(1), (1,) * 2000),
        PlanOrder(1, 1, 0, None, (NodeId("x" * 300),) * 1000, (), ()),
    ],
)
def test_a_message_that_would_be_refused_is_not_sent(message) -> None:
    with pytest.raises(ProtocolError, match="cannot be sent"):
        pack(message)


def test_a_name_that_is_no_text_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="Hello cannot be sent"):
        pack(Hello("0.1", Node(NodeId("\ud800"), 1.0, 1.0, 1.0, 1.0)))


def test_a_dropped_batch_says_why() -> None:
    message = DroppedMicrobatch(4, MicrobatchId(9), "the loss of batch 9 was not finite")
    assert unpack(pack(message)) == message


def test_every_message_has_a_number_to_drop_it_by() -> None:
    without = {"Welcome", "Refused", "Stop", "BlobRequest", "BlobPart", "ProbeOrder", "ProbeReport"}
    for each in get_args(Message):
        kind = get_origin(each) or each
        numbers = {"build_id", "round_id", "plan_id"} & {field.name for field in fields(kind)}
        assert bool(numbers) is (kind.__name__ not in without), kind


def test_a_reason_repeats_no_more_than_a_line_of_what_arrived() -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack(header("N" * 60_000, 1))
    assert len(str(caught.value)) < 300
