"""Laws of the border between agent and compute: damaged frames are a ProtocolError and nothing else."""

from random import Random

import msgspec
import pytest

from ravnest.errors import ProtocolError
from ravnest.peer.compute_frames import Frame, FrameReader, pack_item, unpack_order, unpack_report
from tests.support.mutations import damage_bytes, damage_tree
from tests.unit.peer.test_compute_frames import ORDERS, REPORTS, write

MOST_BYTES = 1 << 16
SIDES = [(ORDERS, unpack_order), (REPORTS, unpack_report)]


def read(data: bytes, unpack) -> int:
    """Read a stream to its end, or to what is wrong with it; return how many items were in it."""
    reader, view, count = FrameReader(MOST_BYTES), memoryview(data), 0
    try:
        while view:
            taken = min(len(view), len(reader.room))
            assert taken > 0
            reader.room[:taken] = view[:taken]
            found = reader.receive(taken)
            view = view[taken:]
            if found is not None:
                unpack(found.with_files([b""] * min(found.num_files, 2)))
                count += 1
    except ProtocolError:
        return count
    return count


@pytest.mark.parametrize(("items", "unpack"), SIDES, ids=["orders", "reports"])
def test_damaged_streams_are_refused_with_a_sentence(items, unpack) -> None:
    rng = Random(5)
    sound = [write(pack_item(item)) for item in items]
    for _ in range(5_000):
        read(damage_bytes(rng, b"".join(rng.choices(sound, k=3))), unpack)
    assert read(b"".join(sound), unpack) == len(items)


@pytest.mark.parametrize(("items", "unpack"), SIDES, ids=["orders", "reports"])
def test_damaged_heads_are_refused_with_a_sentence(items, unpack) -> None:
    """The frame is whole, and its record is not: other types, other values, another shape."""
    rng = Random(6)
    refused = 0
    for _ in range(5_000):
        frame = pack_item(rng.choice(items))
        tree = damage_tree(rng, msgspec.msgpack.decode(frame.head))
        try:
            head = msgspec.msgpack.encode(tree)
        except (OverflowError, msgspec.MsgspecError):
            continue
        buffers = frame.buffers if rng.random() < 0.8 else frame.buffers[:-1]
        try:
            unpack(Frame(head, buffers))
        except ProtocolError:
            refused += 1
    assert refused > 1_000
