"""Frames between agent and compute: what crosses arrives as it was; what no stage may say is refused."""

from dataclasses import replace

import pytest

from ravnest.config import CompileMode, PeerTimeouts, WireFormat
from ravnest.errors import ProtocolError
from ravnest.ids import HUB, LeaseId, MicrobatchId, NodeId, RoundId
from ravnest.peer.compute_frames import (
    MOST_BUFFERS,
    Alive,
    FencesClosed,
    Frame,
    FrameReader,
    Remark,
    StartOrder,
    StatusQuery,
    Surveyed,
    SurveyOrder,
    pack_item,
    unpack_order,
    unpack_report,
    write_prefix,
)
from ravnest.peer.compute_protocol import (
    Build,
    ComputeFailed,
    ComputeSetup,
    Delivered,
    Probe,
    ProviderLimits,
    SnapshotWritten,
    StageBuilt,
    WrittenBlob,
)
from ravnest.plan.types import Stage
from ravnest.protocol.membership import Hello, Leave, ProbeReport, Stop
from ravnest.protocol.placement import (
    BlobPart,
    BlobRef,
    PlanOrder,
    RingOrder,
    SnapshotMade,
    SnapshotOrder,
    Source,
    StageParts,
)
from ravnest.protocol.tensors import TensorSpec
from ravnest.protocol.training import Activation, LeaseDone, LeaseGrant
from ravnest.transfer.outbox import Outgoing

ME, OTHER = NodeId("me"), NodeId("other")
REF = BlobRef("ab" * 32, 12)
PLAN = PlanOrder(1, 1, 0, Stage(ME, 0, 4, 1), (ME,), (), ())
PARTS = StageParts(1, 5, REF, (Source(HUB, REF),))
SPEC = TensorSpec("float32", (2, 3), WireFormat.FP32)
ACTIVATION = Activation(1, MicrobatchId(3), False, 2, ((0, SPEC),))
TENSOR = memoryview(bytes(range(24)))
ORDERS = [
    PLAN,
    RingOrder(1, 2, (), ()),
    SnapshotOrder(1, 7),
    Build(PLAN, PARTS, b"blueprint", (memoryview(b"x" * 100), memoryview(b""))),
    Probe(ProbeReport(None, 1e6, 0.01), b"little blueprint"),
    Delivered(LeaseGrant(1, LeaseId(1), False, MicrobatchId(0), (4, 2)), (), HUB),
    Delivered(ACTIVATION, (TENSOR,), OTHER),
    SurveyOrder("auto", 2, 1e9, False),
    StartOrder(
        ComputeSetup(ProviderLimits(1e9, 1e12, "cuda:1", 2e9, CompileMode.ON), "/x" * 400), PeerTimeouts(), 20
    ),
    StatusQuery(9),
]
REPORTS = [
    Outgoing(OTHER, ACTIVATION, (TENSOR,)),
    Outgoing(HUB, LeaseDone(1, LeaseId(0), 4)),
    StageBuilt(4),
    SnapshotWritten(SnapshotOrder(1, 7), 12, WrittenBlob(REF, b"h" * 32)),
    SnapshotWritten(
        SnapshotOrder(1, 8), 13, WrittenBlob(REF, b"h" * 32, b"content here", "the disk is full"), RoundId(4)
    ),
    ComputeFailed("UnsafeBlueprint", "it wants too much"),
    Surveyed("cpu", 1e9, None),
    Alive(3),
    Remark(30, "a stage is slow"),
    FencesClosed(("no network",), ("files (no Landlock here)",)),
]


def read_all(data: bytes, piece: int = 1 << 20, most_bytes: int = 1 << 20) -> list[Frame]:
    """Return the frames of a stream that comes in pieces."""
    reader, found = FrameReader(most_bytes), []
    view = memoryview(data)
    while view:
        taken = min(piece, len(view), len(reader.room))
        reader.room[:taken] = view[:taken]
        frame = reader.receive(taken)
        view = view[taken:]
        if frame is not None:
            found.append(frame.with_files(()))
    assert reader.is_between
    return found


def write(frame: Frame) -> bytes:
    return write_prefix(frame) + frame.head + b"".join(frame.buffers)


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_what_crosses_arrives_as_it_was(piece: int) -> None:
    for items, unpack in ((ORDERS, unpack_order), (REPORTS, unpack_report)):
        data = b"".join(write(pack_item(item)) for item in items)
        found = [unpack(frame) for frame in read_all(data, piece)]
        assert [plain(each) for each in found] == [plain(each) for each in items]


def plain(item: object) -> object:
    """Return an item with bytes for all buffers."""
    match item:
        case Delivered() | Outgoing():
            return replace(item, buffers=tuple(map(bytes, item.buffers)))
        case Build():
            return replace(item, contents=tuple(map(bytes, item.contents)))
        case _:
            return item


@pytest.mark.parametrize(
    "message", [Hello("0.1", None), Leave(1, "bye"), Stop("over"), SnapshotMade(1, 1, 1, REF), PLAN], ids=repr
)
def test_a_stage_may_not_speak_for_the_agent(message: object) -> None:
    from ravnest.plan.types import Node

    if isinstance(message, Hello):
        message = replace(message, node=Node(ME, 1e9, 1e9, 1e9, 1e9))
    with pytest.raises(ProtocolError, match="does not cross this way"):
        unpack_report(pack_item(Outgoing(HUB, message)))


def test_a_stage_may_not_serve_content() -> None:
    part = Outgoing(HUB, BlobPart("ab" * 32, 0, 3), (memoryview(b"abc"),))
    with pytest.raises(ProtocolError, match="does not cross this way"):
        unpack_report(pack_item(part))


def test_orders_are_no_reports_and_reports_no_orders() -> None:
    for item in ORDERS:
        with pytest.raises(ProtocolError):
            unpack_report(pack_item(item))
    for item in REPORTS:
        with pytest.raises(ProtocolError):
            unpack_order(pack_item(item))


def test_buffers_that_are_not_announced_are_refused() -> None:
    frame = pack_item(Outgoing(OTHER, ACTIVATION, (TENSOR,)))
    for buffers in ((), (TENSOR[:-1],), (TENSOR, TENSOR)):
        with pytest.raises(ProtocolError, match="buffer"):
            unpack_report(Frame(frame.head, buffers))
    for item in (Alive(1), Remark(30, "x"), SnapshotWritten(SnapshotOrder(1, 7), 1, WrittenBlob(REF, b""))):
        with pytest.raises(ProtocolError, match="buffers instead of"):
            unpack_report(Frame(pack_item(item).head, (b"x",) * 3))


def test_a_frame_that_is_too_large_is_refused_before_it_is_there() -> None:
    frame = pack_item(Outgoing(OTHER, ACTIVATION, (TENSOR,)))
    with pytest.raises(ProtocolError, match="at most 23 are taken"):
        read_all(write(frame), most_bytes=23)
    with pytest.raises(ProtocolError, match="too large to cross"):
        write_prefix(Frame(b"x", (b"",) * (MOST_BUFFERS + 1)))
    with pytest.raises(ProtocolError, match="a frame with a head of"):
        read_all(b"\xff" * 8)


@pytest.mark.parametrize(("said", "told"), [("x" * 9000, "x" * 2000), ("no \udcff", "no ?")])
def test_a_remark_and_a_reason_are_changed_rather_than_lost(said: str, told: str) -> None:
    for item in (Remark(30, said), ComputeFailed("RavnestError", said)):
        found = unpack_report(pack_item(item))
        assert getattr(found, "text", "") + getattr(found, "reason", "") == told
