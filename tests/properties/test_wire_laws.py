"""Laws of the wire: every message arrives as it was sent; junk is a ProtocolError and nothing else."""

import types
from dataclasses import fields, is_dataclass
from random import Random
from typing import Annotated, Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.config import WireFormat
from ravnest.errors import ProtocolError
from ravnest.protocol.averaging import Digest, Factor, Length, PartStep, ShareCount, Sum, Weight
from ravnest.protocol.membership import Fact, Port, Rate, Span
from ravnest.protocol.messages import MOST_HEADER_BYTES, WIRE_VERSION, Message, announced, pack, unpack
from ravnest.protocol.placement import BlobHash, BlobPart, Ticket
from ravnest.protocol.tensors import ITEM_BYTES, TensorSpec
from ravnest.protocol.training import Count, NormSquare

KINDS = {(get_origin(kind) or kind).__name__: get_origin(kind) or kind for kind in get_args(Message)}
JUNK = [None, True, -1, 2**63, 2**64 - 1, 0.5, float("nan"), float("inf"), "", "x" * 400, b"", b"x" * 40]
JUNK += [[], [[]], [1] * 2000, ["x", "y"], {}, {"epoch": 1}, msgspec.msgpack.Ext(5, b"x")]

# What people can read; a reason is made so before it is sent, all other text must be.
texts = st.text(st.characters(categories=["L", "M", "N", "P", "S"]) | st.just(" "), max_size=300)
scalars = {
    int: st.integers(0, 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: texts,
    type(None): st.none(),
    NormSquare: st.floats(0, 1e60),
    WireFormat: st.sampled_from(WireFormat),
    Fact: st.sampled_from(Fact),
    Rate: st.floats(0, 1e30, exclude_min=True),
    Span: st.floats(0, 1e6),
    BlobHash: st.text("0123456789abcdef", min_size=64, max_size=64),
    Digest: st.binary(min_size=16, max_size=16),
    Count: st.integers(1, 2**20),
    ShareCount: st.integers(0, 2**20),
    Port: st.integers(0, 65535),
    Ticket: st.binary(max_size=16),
    Weight: st.floats(0, 1e15, exclude_min=True),
    Length: st.floats(0, 1e30),
    Sum: st.floats(-1e60, 1e60),
    Factor: st.floats(0, 1),
    PartStep: st.sampled_from(PartStep),
}
specs = st.builds(
    TensorSpec,
    st.sampled_from(list(ITEM_BYTES)),
    st.lists(st.integers(0, 4), max_size=8).map(tuple),
    st.sampled_from(WireFormat),
)


def bounded_values(hint: Any, bounds: msgspec.Meta) -> st.SearchStrategy:
    """Return all whole numbers, short bytes or short tuples, within bounds."""
    if hint is int:
        return st.integers(bounds.ge or 0, bounds.le)
    if hint is bytes:
        return st.binary(min_size=bounds.min_length or 0, max_size=min(40, bounds.max_length or 40))
    item, _ = get_args(hint)
    return st.lists(values_of(item), min_size=bounds.min_length or 0, max_size=4).map(tuple)


def values_of(hint: Any) -> st.SearchStrategy:
    """Return all values a field of this type may have."""
    if hint in scalars:
        return scalars[hint]
    if hint is TensorSpec or isinstance(hint, TypeVar):
        return specs
    if isinstance(hint, NewType):
        return values_of(hint.__supertype__)
    if get_origin(hint) is Annotated:
        return bounded_values(*get_args(hint))
    if is_dataclass(hint):
        return records_of(hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of(map(values_of, inner))
    assert origin is tuple, f"no values are known for {hint}"
    if inner[-1] is ...:
        return st.lists(values_of(inner[0]), max_size=4).map(tuple)
    return st.tuples(*map(values_of, inner))


def records_of(kind: type) -> st.SearchStrategy:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: values_of(hint) for name, hint in hints.items()})


def buffers_of(message: Message) -> list[bytes]:
    return [bytes(spec.num_bytes) for spec in announced(message)]


def specs_in(value: Any) -> list[TensorSpec]:
    """Return every TensorSpec in a record, in order."""
    if isinstance(value, TensorSpec):
        return [value]
    inner = [getattr(value, x.name) for x in fields(value)] if is_dataclass(value) else value
    return [spec for each in inner for spec in specs_in(each)] if isinstance(inner, list | tuple) else []


def receive(header: bytes, buffers: list[bytes]) -> Message | None:
    """Unpack as a program would; what is taken must be a message that can be sent on as it is."""
    try:
        message = unpack(header, buffers)
    except ProtocolError:
        return None
    assert type(message) in KINDS.values()
    assert unpack(pack(message, buffers), buffers) == message
    return message


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_arrives_as_it_was_sent(kind: str) -> None:
    @settings(max_examples=30)
    @given(records_of(KINDS[kind]))
    def arrives(message: Message) -> None:
        buffers = buffers_of(message)
        assert isinstance(message, BlobPart) or [*announced(message)] == specs_in(message)
        header = pack(message, buffers)
        assert len(header) <= MOST_HEADER_BYTES
        arrived = unpack(memoryview(header), buffers)
        assert arrived == message
        assert repr(arrived) == repr(message)  # the same types all the way down, tuples and all

    arrives()


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_with_something_missing_or_too_much_is_refused(kind: str) -> None:
    @settings(max_examples=10)
    @given(records_of(KINDS[kind]), st.data())
    def refused(message: Message, data: st.DataObject) -> None:
        buffers = buffers_of(message)
        header = pack(message, buffers)
        items = msgspec.msgpack.decode(header[1:])
        assert len(items) == 1 + len(fields(message))
        place = data.draw(st.integers(1, len(items) - 1))
        for wrong in (items[:place] + items[place + 1 :], [*items, 0], items[1:], dict(enumerate(items))):
            assert receive(header[:1] + msgspec.msgpack.encode(wrong), buffers) is None
        cut = data.draw(st.integers(0, len(header) - 1))
        assert receive(header[:cut], buffers) is None
        assert receive(header + b"\x00", buffers) is None
        assert receive(bytes([WIRE_VERSION + 1]) + header[1:], buffers) is None
        assert receive(header, [*buffers, b""]) is None

    refused()


def spoil(value: Any, random: Random) -> Any:
    """Change one thing somewhere in a decoded header."""
    if isinstance(value, list) and value and random.random() < 0.8:
        place = random.randrange(len(value))
        return [*value[:place], spoil(value[place], random), *value[place + 1 :]]
    if isinstance(value, list) and random.random() < 0.5:
        return value * random.choice([0, 2, 300])
    return random.choice(JUNK)


def flip(header: bytes, random: Random) -> bytes:
    """Change some bytes, drop some, repeat some."""
    data = bytearray(header)
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(data))
        match random.randrange(4):
            case 0:
                data[place] = random.randrange(256)
            case 1:
                data[place] ^= 1 << random.randrange(8)
            case 2:
                del data[place : place + random.randint(1, 3)]
            case 3:
                data[place:place] = random.randbytes(random.randint(1, 5))
        if not data:
            break
    return bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_spoilt_headers_are_messages_or_refused(kind: str) -> None:
    @settings(max_examples=10)
    @given(records_of(KINDS[kind]), st.integers(0, 2**32))
    def survives(message: Message, seed: int) -> None:
        random, buffers = Random(seed), buffers_of(message)
        header = pack(message, buffers)
        items = msgspec.msgpack.decode(header[1:])
        for _ in range(12):
            receive(flip(header, random), buffers)
            receive(header[:1] + msgspec.msgpack.encode(spoil(items, random)), buffers)

    survives()


def test_junk_is_refused() -> None:
    random = Random(7)
    names = [name.encode() for name in KINDS]
    for _ in range(4000):
        junk = random.randbytes(random.randint(0, 60))
        receive(junk, [])
        assert receive(bytes([WIRE_VERSION]) + junk, []) is None
        name = random.choice(names)
        start = bytes([WIRE_VERSION, 0x90 | random.randrange(16), 0xA0 | len(name)]) + name
        receive(start + junk, [])
