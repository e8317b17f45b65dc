"""Laws of the codec: bounded rounding, the same bytes again, honest sizes, nothing lost over many rounds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ravnest.codec import ErrorFeedback, decode_tensor, describe, encode_tensor
from ravnest.config import WireFormat
from ravnest.errors import ProtocolError
from ravnest.protocol.tensors import BLOCK_ITEMS, FLOAT_BYTES, ITEM_BYTES, TensorSpec

LARGEST_CODE = {WireFormat.INT8: 127, WireFormat.INT4: 7}
block_formats = st.sampled_from(list(LARGEST_CODE))
formats = st.sampled_from(list(WireFormat))
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)
lengths = st.integers(1, 3 * BLOCK_ITEMS)
seeds = st.integers(0, 2**32)


@st.composite
def tensors(draw) -> torch.Tensor:
    """Either any few values, or many whose size differs from block to block by all that float32 has."""
    if draw(st.booleans()):
        finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
        return torch.from_numpy(np.array(draw(hnp.arrays(np.float32, draw(shapes), elements=finite))))
    length, generator = draw(lengths), np.random.default_rng(draw(seeds))
    values = generator.normal(size=length) * 10.0 ** draw(st.integers(-44, 37))
    values[generator.random(length) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = 0.0
    return torch.from_numpy(values.astype(np.float32))


def scales_in(buffer: memoryview, num_items: int) -> torch.Tensor:
    """Return the scale of each item."""
    num_blocks = -(-num_items // BLOCK_ITEMS)
    scales = torch.frombuffer(bytearray(buffer[: 4 * num_blocks]), dtype=torch.float32)
    return scales.repeat_interleave(BLOCK_ITEMS)[:num_items]


@given(tensors(), block_formats)
def test_a_block_rounds_each_item_by_at_most_half_a_scale(tensor, wire_format):
    if tensor.numel() == 0:
        return
    buffer = encode_tensor(tensor, wire_format)
    items, scales = tensor.reshape(-1).double(), scales_in(buffer, tensor.numel()).double()
    arrived = decode_tensor(buffer, describe(tensor, wire_format)).reshape(-1).double()
    assert ((arrived - items).abs() <= scales * 0.5001).all()
    for low in range(0, len(items), BLOCK_ITEMS):
        largest = items[low : low + BLOCK_ITEMS].abs().max()
        assert scales[low] <= max(largest / LARGEST_CODE[wire_format], 2.0**-126)
        assert arrived[low : low + BLOCK_ITEMS].abs().max() <= largest + 2.0**-127


@given(tensors(), formats)
def test_encoding_what_was_decoded_gives_the_same_bytes(tensor, wire_format):
    buffer = encode_tensor(tensor, wire_format)
    again = encode_tensor(decode_tensor(bytes(buffer), describe(tensor, wire_format)), wire_format)
    assert bytes(again) == bytes(buffer)


@given(tensors(), st.sampled_from([WireFormat.BF16, WireFormat.FP16]))
def test_halves_round_to_the_nearest(tensor, wire_format):
    half = {WireFormat.BF16: torch.bfloat16, WireFormat.FP16: torch.float16}[wire_format]
    arrived = decode_tensor(encode_tensor(tensor, wire_format), describe(tensor, wire_format))
    assert arrived.equal(tensor.to(half).float())


@given(shapes, formats, st.sampled_from(list(ITEM_BYTES)), seeds)
def test_any_bytes_of_the_right_number_are_a_tensor_and_no_others(shape, wire_format, dtype, seed):
    spec = TensorSpec(dtype, shape, wire_format)
    junk = np.random.default_rng(seed).bytes(spec.num_bytes + 1)
    if dtype == "bool":
        junk = bytes(byte & 1 for byte in junk)
    arrived = decode_tensor(junk[:-1], spec)
    assert tuple(arrived.shape) == shape
    assert str(arrived.dtype) == f"torch.{dtype}"
    if dtype not in FLOAT_BYTES or wire_format is WireFormat.FP32:
        assert bytes(encode_tensor(arrived, wire_format)) == junk[:-1]
    for wrong in (junk, junk[: spec.num_bytes - 1] if spec.num_bytes else b"xx"):
        with pytest.raises(ProtocolError):
            decode_tensor(wrong, spec)


def send(feedback: ErrorFeedback, delta: torch.Tensor) -> torch.Tensor:
    """Return what arrives of a vector that is encoded in two slices."""
    parts = []
    for where in (slice(0, len(delta) // 2), slice(len(delta) // 2, len(delta))):
        owed = delta[where].clone()
        feedback.add_owed(where, owed)
        parts.append(feedback.encode(where, owed).decoded)
    return torch.cat(parts)


@given(block_formats, lengths, st.integers(1, 30), seeds)
def test_over_many_rounds_nothing_is_lost(wire_format, length, num_rounds, seed):
    generator = torch.Generator().manual_seed(seed)
    feedback, largest_code = ErrorFeedback(wire_format, length), LARGEST_CODE[wire_format]
    drift = torch.randn(length, generator=generator) * 0.01  # far below the rounding of one round
    wanted, arrived = torch.zeros(length).double(), torch.zeros(length).double()
    largest = 0.0
    for _ in range(num_rounds):
        delta = torch.randn(length, generator=generator) * 0.3 + drift
        decoded = send(feedback, delta)
        feedback.commit()
        largest = max(largest, delta.abs().max().item())
        wanted, arrived = wanted + delta.double(), arrived + decoded.double()
    # What is owed: half a scale of the largest item with its own debt; plus what bf16 rounds off the debt.
    owed = largest / (2 * largest_code - 1.02)
    assert (wanted - arrived).abs().max() <= owed * (1.01 + num_rounds * 2.0**-9)


@settings(max_examples=10)
@given(block_formats, lengths, seeds)
def test_a_small_steady_delta_arrives_in_the_end(wire_format, length, seed):
    delta = torch.rand(length, generator=torch.Generator().manual_seed(seed)) * 1e-3
    delta[0] = 1.0  # sets the scale so that all else rounds to zero in one round
    feedback = ErrorFeedback(wire_format, length)
    total = torch.zeros(length)
    for _ in range(200):
        total += send(feedback, delta)
        feedback.commit()
    scale = 1 / LARGEST_CODE[wire_format]
    assert (total / 200 - delta).abs().max() <= scale / 200 + 2.0**-9 * scale
