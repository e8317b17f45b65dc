"""The border between agent and compute as bytes: what crosses it becomes a frame, and a frame is checked.

A frame is a prefix, the sizes of its buffers, a head and the buffers. The head is a msgpack record; a message
in it is packed as on the wire, so `protocol.messages` bounds it and its buffers. A buffer that is a file
crosses as a descriptor beside the frame. Neither side believes the other: only ProtocolError leaves this
module. It is pure; `compute_channel` moves the bytes.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union

import msgspec
from msgspec import Meta

from ravnest.config import PeerTimeouts
from ravnest.errors import ProtocolError
from ravnest.ids import NodeId
from ravnest.peer.compute_protocol import (
    Build,
    ComputeFailed,
    ComputeSetup,
    Delivered,
    FromCompute,
    HubLink,
    Probe,
    SnapshotWritten,
    StageBuilt,
    ToCompute,
    WrittenBlob,
)
from ravnest.protocol import messages
from ravnest.protocol.averaging import (
    AnchorPart,
    AnchorQuery,
    DirectPart,
    RingPart,
    RoundAbort,
    RoundChecked,
    RoundPledge,
    RoundQuery,
    RoundReady,
    TiedCall,
    TiedGradient,
    TiedHolder,
    TiedStep,
)
from ravnest.protocol.generation import GenerationAnswer, GenerationFault, GenerationValues
from ravnest.protocol.membership import Complaint, ProbeReport
from ravnest.protocol.messages import MOST_HEADER_BYTES, bounded_record
from ravnest.protocol.placement import (
    PlanOrder,
    RingOrder,
    SketchMade,
    SnapshotMade,
    SnapshotOrder,
    StageMissing,
    StageParts,
)
from ravnest.protocol.tensors import Buffer
from ravnest.protocol.training import Activation, DroppedMicrobatch, Gradient, LeaseDone, Pace, StepReport
from ravnest.transfer.outbox import Outgoing

MOST_HEAD_BYTES = 1 << 18
MOST_BUFFERS = 1100  # a stage may have 1024 sources
MOST_FILES = 200  # the system takes no more descriptors at once
_PREFIX = struct.Struct("<IHH")  # bytes of the head, buffers, files among them
_SIZE = struct.Struct("<Q")
_FILE_BIT = 1 << 63
_LONGEST_REMARK = 2000

# What a stage may have sent; all else is said by the agent itself.
_OfCompute = (
    Activation
    | Gradient
    | DroppedMicrobatch
    | LeaseDone
    | Pace
    | StepReport
    | StageMissing
    | SketchMade
    | ProbeReport
    | Complaint
    | RoundPledge
    | RoundReady
    | RoundChecked
    | RoundAbort
    | RoundQuery
    | RingPart  # type: ignore[type-arg]
    | DirectPart  # type: ignore[type-arg]
    | AnchorQuery
    | AnchorPart  # type: ignore[type-arg]
    | TiedHolder
    | TiedCall
    | TiedGradient  # type: ignore[type-arg]
    | TiedStep  # type: ignore[type-arg]
    | GenerationValues
    | GenerationAnswer
    | GenerationFault
)
_Order = PlanOrder | RingOrder | SnapshotOrder


@dataclass(frozen=True, slots=True)
class SurveyOrder:
    """Asks what this PC has; `device` is the one asked for. Without a number of threads torch chooses it."""

    device: str
    num_threads: int = 0
    gpu_memory_bytes: float | None = None  # to lend, if its provider says so
    measures_speed: bool = True


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What it has: the device to compute on, what of its memory to lend, and its speed if that was asked."""

    device: str
    memory_bytes: float
    flops_per_second: float | None


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Compute closes the rest of its fences, and takes from then on what others sent."""

    setup: ComputeSetup
    timeouts: PeerTimeouts
    log_level: Annotated[int, Meta(ge=0, le=100)] = 30


@dataclass(frozen=True, slots=True)
class StatusQuery:
    """Asks compute for a sign of life, between two pieces of work."""

    number: int


@dataclass(frozen=True, slots=True)
class Alive:
    """That sign."""

    number: int


@dataclass(frozen=True, slots=True)
class Remark:
    """A line for the agent's log."""

    level: Annotated[int, Meta(ge=0, le=100)]
    text: Annotated[str, Meta(max_length=_LONGEST_REMARK)]


@dataclass(frozen=True, slots=True)
class FencesClosed:
    """Which fences compute has around it, and in words which it has not."""

    held: Annotated[tuple[str, ...], Meta(max_length=32)]
    missing: Annotated[tuple[str, ...], Meta(max_length=32)]


ControlOrder = SurveyOrder | StartOrder | StatusQuery
ControlReport = Surveyed | Alive | Remark | FencesClosed
BorderItem = ToCompute | FromCompute | ControlOrder | ControlReport


@dataclass(frozen=True, slots=True)
class Frame:
    """What crosses at once: a head, and the buffers that belong to it."""

    head: bytes
    buffers: tuple[Buffer, ...] = ()


_Header = Annotated[bytes, Meta(max_length=MOST_HEADER_BYTES)]
_Name = Annotated[str, Meta(max_length=300)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A record in a head."""


class _Ordered(_Head, frozen=True, tag="Ordered"):
    header: _Header


class _Delivered(_Head, frozen=True, tag="Delivered"):
    header: _Header
    sender: _Name


class _Build(_Head, frozen=True, tag="Build"):
    order: _Header
    parts: _Header


class _Probe(_Head, frozen=True, tag="Probe"):
    report: _Header


class _Outgoing(_Head, frozen=True, tag="Outgoing"):
    header: _Header
    to: _Name


class _SnapshotWritten(_Head, frozen=True, tag="SnapshotWritten"):
    order: _Header
    made: _Header
    fault: Annotated[str, Meta(max_length=_LONGEST_REMARK)]
    has_content: bool


class _StageBuilt(_Head, frozen=True, tag="StageBuilt"):
    build_id: _Number


class _ComputeFailed(_Head, frozen=True, tag="ComputeFailed"):
    kind: _Name
    reason: Annotated[str, Meta(max_length=_LONGEST_REMARK)]


_PLAIN: dict[str, Any] = {
    kind.__name__: kind
    for kind in (HubLink, SurveyOrder, StartOrder, StatusQuery, Surveyed, Alive, Remark, FencesClosed)
}
_RECORDS = {name: bounded_record(kind, tag=name) for name, kind in _PLAIN.items()}
_TO_COMPUTE = msgspec.msgpack.Decoder(
    Union[  # noqa: UP007
        _Ordered,
        _Delivered,
        _Build,
        _Probe,
        _RECORDS["HubLink"],
        _RECORDS["SurveyOrder"],
        _RECORDS["StartOrder"],
        _RECORDS["StatusQuery"],
    ]
)
_FROM_COMPUTE = msgspec.msgpack.Decoder(
    Union[  # noqa: UP007
        _Outgoing,
        _SnapshotWritten,
        _StageBuilt,
        _ComputeFailed,
        _RECORDS["Surveyed"],
        _RECORDS["Alive"],
        _RECORDS["Remark"],
        _RECORDS["FencesClosed"],
    ]
)


def pack_item(item: BorderItem) -> Frame:
    """Return an item as the frame in which it crosses."""
    match item:
        case PlanOrder() | RingOrder() | SnapshotOrder():
            return _frame(_Ordered(messages.pack(item)))
        case Delivered(message, buffers, sender):
            return _frame(_Delivered(messages.pack(message, buffers), sender), buffers)
        case Build(order, parts, blueprint, contents):
            head = _Build(messages.pack(order), messages.pack(parts))
            return _frame(head, (blueprint, *contents))
        case Probe(report, blueprint):
            return _frame(_Probe(messages.pack(report)), (blueprint,))
        case Outgoing(to, message, buffers):
            return _frame(_Outgoing(messages.pack(message, buffers), to), buffers)
        case SnapshotWritten(order, version, blob, anchor_round):
            made = SnapshotMade(order.build_id, order.number, version, blob.ref, anchor_round)
            inside = () if blob.content is None else (blob.content,)
            heads = messages.pack(order), messages.pack(made)
            written = _SnapshotWritten(*heads, _make_plain(blob.fault), has_content=bool(inside))
            return _frame(written, (blob.hashes, *inside))
        case StageBuilt(build_id):
            return _frame(_StageBuilt(build_id))
        case ComputeFailed(kind, reason):
            return _frame(_ComputeFailed(kind, _make_plain(reason)))
        case Remark(level, text):
            return _pack_plain(Remark(level, _make_plain(text)))
        case _:
            return _pack_plain(item)


def _pack_plain(item: HubLink | ControlOrder | ControlReport) -> Frame:
    try:
        return _frame(msgspec.convert(item, _RECORDS[type(item).__name__], from_attributes=True))
    except (msgspec.MsgspecError, ValueError) as problem:
        raise ProtocolError(f"{type(item).__name__} cannot cross: {problem!s:.200}") from None


def _make_plain(text: str) -> str:
    """Return a text that can cross: a library may say anything, and at any length."""
    return text.encode(errors="replace").decode()[:_LONGEST_REMARK]


def _frame(head: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> Frame:
    return Frame(msgspec.msgpack.encode(head), tuple(buffers))


def unpack_order(frame: Frame) -> ToCompute | ControlOrder:
    """Return what a frame asks compute for."""
    head, buffers = _decode(_TO_COMPUTE, frame), frame.buffers
    match head:
        case _Ordered(header):
            order_found: PlanOrder | RingOrder | SnapshotOrder = _unpack(header, (), _Order)
            return order_found
        case _Delivered(header, sender):
            return Delivered(messages.unpack(header, buffers), buffers, NodeId(sender))
        case _Build(order, parts):
            if not buffers:
                raise ProtocolError("a Build comes without a blueprint")
            found = _unpack(order, (), PlanOrder), _unpack(parts, (), StageParts)
            return Build(*found, bytes(buffers[0]), buffers[1:])
        case _Probe(report):
            (blueprint,) = _expect(buffers, 1, "Probe")
            return Probe(_unpack(report, (), ProbeReport), bytes(blueprint))
        case _:
            asked: HubLink | ControlOrder = _to_plain(head, frame)
            return asked


def unpack_report(frame: Frame) -> FromCompute | ControlReport:
    """Return what a frame of compute says; it may say only what a stage may."""
    head, buffers = _decode(_FROM_COMPUTE, frame), frame.buffers
    match head:
        case _Outgoing(header, to):
            message = _unpack(header, buffers, _OfCompute)
            return Outgoing(NodeId(to), message, tuple(memoryview(each) for each in buffers))
        case _SnapshotWritten(order, made, fault, has_content):
            hashes, *content = _expect(buffers, 1 + has_content, "SnapshotWritten")
            ordered, written = _unpack(order, (), SnapshotOrder), _unpack(made, (), SnapshotMade)
            inside = bytes(content[0]) if content else None
            blob = WrittenBlob(written.weights, bytes(hashes), inside, fault)
            return SnapshotWritten(ordered, written.version, blob, written.anchor_round)
        case _StageBuilt(build_id):
            return StageBuilt(build_id)
        case _ComputeFailed(kind, reason):
            return ComputeFailed(kind, reason)
        case _:
            said: ControlReport = _to_plain(head, frame)
            return said


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", frame: Frame) -> Any:
    try:
        return decoder.decode(frame.head)
    except (msgspec.MsgspecError, ValueError) as problem:  # ValueError: text that is not UTF-8
        raise ProtocolError(f"a frame that is nothing known: {problem!s:.200}") from None


def _to_plain(head: Any, frame: Frame) -> Any:
    _expect(frame.buffers, 0, type(head).__name__)
    return msgspec.convert(head, _PLAIN[type(head).__name__], from_attributes=True)


def _unpack(header: bytes, buffers: Sequence[Buffer], kinds: Any) -> Any:
    message: Any = messages.unpack(header, buffers)
    if not isinstance(message, kinds):
        raise ProtocolError(f"a {type(message).__name__} does not cross this way")
    return message


def _expect(buffers: Sequence[Buffer], count: int, name: str) -> Sequence[Buffer]:
    if len(buffers) != count:
        raise ProtocolError(f"a {name} comes with {len(buffers)} buffers instead of {count}")
    return buffers


def write_prefix(frame: Frame, files: frozenset[int] = frozenset()) -> bytes:
    """Return what goes before the head; `files` are the buffers that cross as descriptors."""
    if len(frame.head) > MOST_HEAD_BYTES or len(frame.buffers) > MOST_BUFFERS or len(files) > MOST_FILES:
        told = f"{len(frame.head)} bytes, {len(frame.buffers)} buffers and {len(files)} files"
        raise ProtocolError(f"a frame with {told} is too large to cross")
    sizes = (
        memoryview(buffer).nbytes | (_FILE_BIT if index in files else 0)
        for index, buffer in enumerate(frame.buffers)
    )
    counts = _PREFIX.pack(len(frame.head), len(frame.buffers), len(files))
    return counts + b"".join(map(_SIZE.pack, sizes))


@dataclass(frozen=True, slots=True)
class IncomingFrame:
    """A frame that has come; `sizes` of files are None for buffers that came as bytes."""

    head: bytes
    buffers: tuple[Buffer, ...]  # empty where a file belongs
    sizes: tuple[int | None, ...]

    @property
    def num_files(self) -> int:
        """How many descriptors belong to it."""
        return sum(size is not None for size in self.sizes)

    def with_files(self, files: Sequence[Buffer]) -> Frame:
        """Return the whole frame, with the content of its files in their places."""
        if len(files) != self.num_files:
            raise ProtocolError(f"a frame comes with {len(files)} files instead of {self.num_files}")
        left = iter(files)
        whole = tuple(
            buffer if size is None else next(left)
            for buffer, size in zip(self.buffers, self.sizes, strict=True)
        )
        return Frame(self.head, whole)


class FrameReader:
    """Cuts a stream into frames: put bytes where `room` says, tell how many, and take what is complete.

    `most_bytes` bounds what the buffers of one frame may take in memory.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._counts: tuple[int, int, int] | None = None
        self._sizes: tuple[int | None, ...] | None = None
        self._parts: list[bytearray] = []  # the head, and the buffers
        self._begin(_PREFIX.size)

    @property
    def room(self) -> memoryview:
        """Where the next bytes of the stream belong; never empty."""
        return self._views[0]

    @property
    def is_between(self) -> bool:
        """Whether the stream may end here."""
        return self._counts is None and self._num_come == 0

    def receive(self, num_bytes: int) -> IncomingFrame | None:
        """Record that so many bytes were put there; return the frame that they complete."""
        self._num_come += num_bytes
        self._views[0] = self._views[0][num_bytes:]
        while self._views and not self._views[0]:
            del self._views[0]
        return None if self._views else self._go_on()

    def _begin(self, *sizes: int) -> None:
        self._parts = [bytearray(size) for size in sizes]
        self._views = [memoryview(part) for part in self._parts if part]
        self._num_come = 0

    def _go_on(self) -> IncomingFrame | None:
        if self._counts is None:
            self._read_counts()
            if self._views:
                return None
        if self._sizes is None:
            self._read_sizes()
            if self._views:
                return None
        assert self._sizes is not None
        head, *buffers = self._parts
        found = IncomingFrame(bytes(head), tuple(map(memoryview, buffers)), self._files)
        self._counts, self._sizes = None, None
        self._begin(_PREFIX.size)
        return found

    def _read_counts(self) -> None:
        num_head, num_buffers, num_files = self._counts = _PREFIX.unpack(self._parts[0])
        if not 1 <= num_head <= MOST_HEAD_BYTES or num_buffers > MOST_BUFFERS or num_files > MOST_FILES:
            told = f"{num_head} bytes, {num_buffers} buffers and {num_files} files"
            raise ProtocolError(f"a frame with a head of {told}")
        self._begin(num_buffers * _SIZE.size)

    def _read_sizes(self) -> None:
        assert self._counts is not None
        num_head, _, num_files = self._counts
        stated = [size for (size,) in _SIZE.iter_unpack(self._parts[0])]
        self._files = tuple(size & ~_FILE_BIT if size & _FILE_BIT else None for size in stated)
        inside = [0 if size & _FILE_BIT else size for size in stated]
        if sum(size is not None for size in self._files) != num_files:
            raise ProtocolError(f"a frame does not have the {num_files} files that it announces")
        if sum(inside) > self.most_bytes:
            raise ProtocolError(f"a frame of {sum(inside)} bytes; at most {self.most_bytes} are taken")
        self._sizes = self._files
        self._begin(num_head, *inside)
