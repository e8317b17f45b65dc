"""Headers of safetensors files: where their tensors begin."""

from ravnest.model.state.safetensors_header import read_tensors, write_header
from ravnest.protocol.placement import PIECE_BYTES
from ravnest.protocol.tensors import StoredType

SMALL, LARGE = StoredType("uint8", (100,)), StoredType("uint8", (64, PIECE_BYTES))


def test_tensors_of_a_large_file_begin_where_a_piece_does_whatever_follows_them() -> None:
    for more in (0, 1, 500):
        header = write_header({"frozen": LARGE, **{f"other {number}": SMALL for number in range(more)}})
        assert len(header) == PIECE_BYTES
    assert len(write_header({"small": SMALL})) < 100


def test_a_padded_header_is_read() -> None:
    found = read_tensors(write_header({"frozen": LARGE}) + bytes(LARGE.size_bytes))
    assert [(tensor.name, tensor.type) for tensor in found] == [("frozen", LARGE)]
