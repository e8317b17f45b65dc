"""Laws of the codec: bounded rounding, the same bytes again, honest sizes, nothing lost over many rounds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ravnest.codec import ErrorFeedback, decode_tensor, describe, encode_tensor
from ravnest.config import DELTA_FORMATS, WireFormat
from ravnest.errors import ProtocolError
from ravnest.protocol.tensors import BLOCK_ITEMS, FLOAT_BYTES, ITEM_BYTES, SHORT_BLOCK_ITEMS, TensorSpec

LARGEST_CODE = {WireFormat.INT8: 127, WireFormat.INT4: 7}
block_formats = st.sampled_from(list(LARGEST_CODE))
formats = st.sampled_from(list(WireFormat))
same_formats = st.sampled_from(DELTA_FORMATS)  # what is averaged is encoded again and again
KEY = (1, 2)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)
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


@given(tensors(), same_formats)
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
        assert bytes(encode_tensor(arrived, wire_format, KEY)) == junk[:-1]
    for wrong in (junk, junk[: spec.num_bytes - 1] if spec.num_bytes else b"xx"):
        with pytest.raises(ProtocolError):
            decode_tensor(wrong, spec)


@st.composite
def crossings(draw) -> torch.Tensor:
    """A tensor with channels, each of its own size and offset."""
    first, positions, num_channels = (
        draw(st.integers(1, 4)),
        draw(st.integers(64, 150)),
        draw(st.integers(1, 9)),
    )
    generator = torch.Generator().manual_seed(draw(seeds))
    size = 10.0 ** draw(st.integers(-20, 20))
    values = torch.randn(first, positions, num_channels, generator=generator)
    values *= size * torch.exp(3 * torch.randn(num_channels, generator=generator))
    return values + size * 10 * torch.randn(num_channels, generator=generator)


@given(crossings())
def test_channels_round_each_item_by_at_most_half_a_step_of_their_block(tensor):
    arrived = decode_tensor(
        encode_tensor(tensor, WireFormat.INT4_CHANNELS), describe(tensor, WireFormat.INT4_CHANNELS)
    )
    items, found = (each.flatten(0, 1).double() for each in (tensor, arrived))
    means = tensor.flatten(0, 1).mean(0).double()
    for block, other in zip(items.split(SHORT_BLOCK_ITEMS), found.split(SHORT_BLOCK_ITEMS), strict=True):
        widest = (block - means).abs().amax(0)
        # A scale is rounded up to 8 bits, and the mean has the rounding of a float32.
        allowed = widest / 7 * (1 + 2.0**-7) * 0.501 + block.abs().amax(0) * 2.0**-20
        assert ((other - block).abs() <= allowed).all()


@given(tensors(), seeds)
def test_chance_moves_an_item_by_less_than_a_step_and_the_same_key_draws_the_same(tensor, seed):
    sent = encode_tensor(tensor, WireFormat.INT4_STOCHASTIC, (seed, 1))
    assert bytes(sent) == bytes(encode_tensor(tensor.clone(), WireFormat.INT4_STOCHASTIC, (seed, 1)))
    items = tensor.reshape(-1).double()
    arrived = decode_tensor(sent, describe(tensor, WireFormat.INT4_STOCHASTIC)).reshape(-1).double()
    for block, other in zip(items.split(SHORT_BLOCK_ITEMS), arrived.split(SHORT_BLOCK_ITEMS), strict=True):
        if len(block):
            step = max(float(block.abs().max()) / 7, 2.0**-126) * (1 + 2.0**-6)
            assert (other - block).abs().max() <= step
            assert other[block == 0].abs().sum() == 0


@settings(max_examples=5)
@given(seeds)
def test_chance_is_right_on_average(seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(50, 32, generator=generator) * 1e-6 * torch.rand(50, 32, generator=generator)
    spec, num_keys = describe(tensor, WireFormat.INT4_STOCHASTIC), 2000
    lost = torch.zeros(50, 32, dtype=torch.float64)
    for number in range(num_keys):
        lost += (
            decode_tensor(encode_tensor(tensor, WireFormat.INT4_STOCHASTIC, (seed, number)), spec) - tensor
        )
    steps = tensor.abs().amax(1, keepdim=True) / 7
    error = lost / num_keys / steps  # at most 1/2 a step of spread in one message
    assert error.abs().max() <= 6 * 0.5 / num_keys**0.5
    assert abs(float(error.mean())) <= 6 * 0.5 / (num_keys * tensor.numel()) ** 0.5 + 2.0**-16


def test_messages_with_other_keys_draw_otherwise():
    tensor = torch.linspace(-1, 1, 4096)
    sent = {bytes(encode_tensor(tensor, WireFormat.INT4_STOCHASTIC, (1, number))) for number in range(50)}
    assert len(sent) == 50


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
