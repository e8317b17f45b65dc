"""What two endpoints say to each other on one connection: the first frame of each multipart message.

A service is a stream of messages; a message is a stream of bytes, header first. Only a chunk carries more
frames: the pieces of the message, none of which reaches over the end of a buffer.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from ravnest.errors import ProtocolError
from ravnest.net.transport import Service
from ravnest.protocol.tensors import Buffer

FRAME_VERSION = 2
GREETING_BYTES = 4096

Natural = Annotated[int, Meta(ge=0, lt=2**62)]
Moment = Annotated[int, Meta(gt=-(2**62), lt=2**62)]  # microseconds of a clock that only its owner knows
Frames = list[Buffer]


class StreamPosition(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How far a service's stream has come: whole messages, bytes of the next, messages the program took."""

    service: Service
    sequence: Natural
    offset: Natural
    consumed: Natural


StreamPositions = Annotated[tuple[StreamPosition, ...], Meta(max_length=len(Service))]


class Greeting(msgspec.Struct, array_like=True, tag=0, frozen=True, forbid_unknown_fields=True):
    """The first frame each way. A `session` ends when its owner forgets all; `known` is the receiver's."""

    version: int
    session: Natural
    known: Natural
    positions: StreamPositions
    greeting: Annotated[bytes, Meta(max_length=GREETING_BYTES)]


class Chunk(msgspec.Struct, array_like=True, tag=1, frozen=True, forbid_unknown_fields=True):
    """A piece of a message; at offset 0 `sizes` says what is to come: the header, then each buffer.

    `positions` and `behind` are an Ack that goes along.
    """

    service: Service
    sequence: Natural
    offset: Natural
    sizes: tuple[Natural, ...]
    sent_at: Moment = 0
    positions: StreamPositions = ()
    behind: Moment = 0


class Ack(msgspec.Struct, array_like=True, tag=2, frozen=True, forbid_unknown_fields=True):
    """What arrived and what was taken since the last one; how long the newest chunk took, by two clocks."""

    positions: StreamPositions
    behind: Moment = 0


class Ping(msgspec.Struct, array_like=True, tag=3, frozen=True, forbid_unknown_fields=True):
    """Still here."""


class Bye(msgspec.Struct, array_like=True, tag=4, frozen=True, forbid_unknown_fields=True):
    """The sender ends this connection."""

    reason: Annotated[str, Meta(max_length=500)]


Head = Greeting | Chunk | Ack | Ping | Bye

encode_frame = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Head)


def decode_frame(frames: Sequence[memoryview]) -> Head:
    """Read the first frame; only a chunk may have more."""
    try:
        head: Head = _decoder.decode(frames[0])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ProtocolError(f"unreadable frame: {error}") from None
    if len(frames) > 1 and not isinstance(head, Chunk):
        raise ProtocolError(f"{type(head).__name__} came with {len(frames) - 1} frames it should not have")
    return head
