"""All messages between programs, and their bytes; the other modules of this folder hold them by subject.

A message names the facts it belongs to by number (plan, build, round, lease, microbatch), so a late one is
dropped by number. Times are spans: no two programs share a clock. A header is a byte of wire version and an
array: the message's name, then its fields. Beside it travels one buffer for each TensorSpec in it, in order.
What arrives is refused unless it is exactly that, within bounds: only ProtocolError leaves this module. Types
say which buffers a message announces, so a new message needs no line below.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from ravnest.config import WireFormat
from ravnest.errors import ProtocolError, WireVersionError
from ravnest.protocol.averaging import AnchorPart, DirectPart, RingPart, RoundMessage, TiedMessage
from ravnest.protocol.generation import GenerationMessage
from ravnest.protocol.membership import MembershipMessage, ProbeOrder, ProbeReport
from ravnest.protocol.placement import BlobPart, BlobRequest, PlacementMessage
from ravnest.protocol.tensors import Buffer, TensorSpec
from ravnest.protocol.training import LearningRate, Pace, TrainingMessage
from ravnest.units import UNPLAIN_LETTERS, show_plainly


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a state machine did not take a message; logged and shown, never sent."""

    reason: str


SetupMessage = PlacementMessage | BlobRequest | BlobPart | ProbeOrder | ProbeReport
TensorMessage = (
    RingPart[TensorSpec] | DirectPart[TensorSpec] | AnchorPart[TensorSpec] | TiedMessage[TensorSpec]
)
Message = (
    MembershipMessage
    | SetupMessage
    | TrainingMessage
    | Pace
    | LearningRate
    | RoundMessage
    | TensorMessage
    | GenerationMessage
)


WIRE_VERSION = 8
MOST_HEADER_BYTES = 64 * 1024

_LONGEST_TEXT = 300
_PLAIN_TEXT = rf"\A[^{UNPLAIN_LETTERS}]*\Z"  # people read these texts
_LARGEST_FLOAT = float.fromhex("0x1.fffffffffffffp+1023")
# What holds for a field unless its type in protocol says otherwise.
_BOUNDS: Mapping[object, Meta] = {
    int: Meta(ge=0, le=2**63 - 1),
    float: Meta(ge=-_LARGEST_FLOAT, le=_LARGEST_FLOAT),  # NaN is not within any bounds
    str: Meta(max_length=_LONGEST_TEXT, pattern=_PLAIN_TEXT),
    tuple: Meta(max_length=1024),
}


def pack(message: Message, buffers: Sequence[Buffer] = ()) -> bytes:
    """Return the header to send before these buffers; a reason becomes one line, cut if it is too long."""
    name = type(message).__name__
    try:
        record = msgspec.convert(_with_plain_reason(message), _records()[name], from_attributes=True)
        header = bytes([WIRE_VERSION]) + msgspec.msgpack.encode(record)
    except (msgspec.MsgspecError, ValueError) as problem:
        raise ProtocolError(f"{name} cannot be sent: {problem!s:.200}") from None
    if len(header) > MOST_HEADER_BYTES:
        raise ProtocolError(f"{name} cannot be sent: its header has {len(header)} bytes")
    _check_buffers(message, buffers)
    return header


def unpack(header: Buffer, buffers: Sequence[Buffer] = ()) -> Message:
    """Return the message of a header that arrived with these buffers."""
    data = memoryview(header)
    if not 2 <= data.nbytes <= MOST_HEADER_BYTES:
        raise ProtocolError(f"a header of {data.nbytes} bytes; it must have 2 to {MOST_HEADER_BYTES}")
    if data[0] != WIRE_VERSION:
        raise WireVersionError(
            f"wire version {data[0]} where {WIRE_VERSION} is spoken: update the older program"
        )
    try:
        record = _decoder().decode(data[1:])
    except (msgspec.MsgspecError, ValueError) as problem:  # ValueError: text that is not UTF-8
        raise ProtocolError(f"a header that is no message: {show_plainly(str(problem)[:200])}") from None
    kind = _kinds()[type(record).__name__]
    message: Message = msgspec.convert(record, kind, from_attributes=True)
    _check_buffers(message, buffers)
    return message


def announced(message: Message) -> tuple[TensorSpec, ...]:
    """Return what the buffers beside a message hold, one after the other."""
    if isinstance(message, BlobPart):
        return (TensorSpec("uint8", (message.size_bytes,), WireFormat.FP32),)
    found = _tensor_fields()[type(message).__name__]
    if found is None:
        return ()
    name, is_list = found
    value = getattr(message, name)
    return tuple(spec for _, spec in value) if is_list else (value,)


@cache
def _tensor_fields() -> dict[str, tuple[str, bool] | None]:
    """Return by the name of a message which field has tensors, and whether it is a list of named ones."""
    return {name: _find_tensors(get_origin(kind) or kind) for name, kind in _kinds().items()}


def _find_tensors(kind: type) -> tuple[str, bool] | None:
    for name, hint in get_type_hints(kind).items():
        item = get_args(hint)[0] if get_origin(hint) is tuple else None
        if _is_tensor(hint):
            return name, False
        if get_origin(item) is tuple and _is_tensor(get_args(item)[-1]):
            return name, True
    return None


def _is_tensor(hint: object) -> bool:
    return hint is TensorSpec or isinstance(hint, TypeVar)


def _check_buffers(message: Message, buffers: Sequence[Buffer]) -> None:
    name, specs = type(message).__name__, announced(message)
    if len(buffers) != len(specs):
        raise ProtocolError(f"{name} announces {len(specs)} buffers and comes with {len(buffers)}")
    for index, (spec, buffer) in enumerate(zip(specs, buffers, strict=True)):
        if spec.fault is not None:
            raise ProtocolError(f"{name}, buffer {index}: {spec.fault}")
        num_bytes = memoryview(buffer).nbytes
        if num_bytes != spec.num_bytes:
            raise ProtocolError(f"{name}, buffer {index}: {num_bytes} bytes instead of {spec.num_bytes}")


def _with_plain_reason(message: Message) -> Message:
    """Change a reason rather than fail to say that something failed."""
    reason = getattr(message, "reason", None)
    if reason is None:
        return message
    shown: Any = show_plainly(reason.encode(errors="replace").decode())[:_LONGEST_TEXT]
    return replace(message, reason=shown)


@cache
def _kinds() -> dict[str, Any]:
    """Return the messages by name."""
    return {(get_origin(kind) or kind).__name__: kind for kind in get_args(Message)}


@cache
def _records() -> dict[str, type[msgspec.Struct]]:
    """Return the messages by name as msgpack has them: tagged arrays."""
    return {name: bounded_record(get_origin(kind) or kind, tag=name) for name, kind in _kinds().items()}


@cache
def _decoder() -> msgspec.msgpack.Decoder[msgspec.Struct]:
    return msgspec.msgpack.Decoder(Union[tuple(_records().values())])  # noqa: UP007


def bounded_record(kind: type, tag: str | None = None) -> type[msgspec.Struct]:
    """Return a frozen dataclass as msgpack has it: an array, tagged if it has a tag, each field bounded."""
    hints = get_type_hints(kind, include_extras=True)
    slots = [(name, _bounded(hint)) for name, hint in hints.items()]
    return msgspec.defstruct(
        kind.__name__, slots, tag=tag, frozen=True, array_like=True, forbid_unknown_fields=True
    )


def _bounded(hint: Any, *own: Meta) -> Any:
    """Return the type of a field with its bounds, its own or those of all, and with arrays for records."""
    if isinstance(hint, NewType):
        return _bounded(hint.__supertype__, *own)
    if isinstance(hint, TypeVar):  # RingPart's and tied weights': they travel as tensors
        return _bounded(TensorSpec)
    if is_dataclass(hint):
        return bounded_record(hint)  # type: ignore[arg-type]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _bounded(*inner)
    if origin in (Union, types.UnionType):
        return Union[tuple(map(_bounded, inner))]  # noqa: UP007
    if origin is tuple and inner[-1] is not ...:
        return tuple[tuple(map(_bounded, inner))]  # type: ignore[misc]
    bounds = own or (_BOUNDS.get(origin or hint),)
    plain = tuple[_bounded(inner[0]), ...] if origin is tuple else hint  # type: ignore[misc]
    return plain if bounds == (None,) else Annotated[(plain, *bounds)]
