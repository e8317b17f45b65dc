"""The codec: what is not copied, what is kept exactly, what is refused, and how blocks lie in a buffer."""

import math
import struct

import pytest
import torch

from ravnest.codec import (
    ErrorFeedback,
    decode_tensor,
    describe,
    encode_tensor,
    encoded_bytes,
    narrow_integers,
    pack_tensor,
    unpack_tensor,
    widen_integers,
)
from ravnest.config import DELTA_FORMATS, WireFormat
from ravnest.errors import ProtocolError
from ravnest.protocol.tensors import ITEM_BYTES, TensorSpec, find_channels

BLOCKS = [WireFormat.INT8, WireFormat.INT4]
KEY = (1, 2)  # of whatever is drawn


def even(wire_format: WireFormat) -> float:
    """Return a number that is exact when it is the largest of its block."""
    coarse = dict.fromkeys((WireFormat.INT8, WireFormat.INT4_CHANNELS), 127.0)
    return {WireFormat.INT4: 7.0, WireFormat.INT4_STOCHASTIC: 7.0, **coarse}.get(wire_format, 1.0)


def pass_over(tensor: torch.Tensor, wire_format: WireFormat) -> torch.Tensor:
    return decode_tensor(encode_tensor(tensor, wire_format, KEY), describe(tensor, wire_format))


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_fp32_sends_every_type_as_it_is(dtype: str) -> None:
    raw = torch.arange(48, dtype=torch.uint8) % 2 if dtype == "bool" else torch.arange(48, dtype=torch.uint8)
    tensor = raw.view(getattr(torch, dtype)).view(2, -1)
    arrived = pass_over(tensor, WireFormat.FP32)
    assert arrived.dtype == tensor.dtype
    assert arrived.shape == tensor.shape
    assert arrived.view(torch.uint8).equal(tensor.view(torch.uint8))


@pytest.mark.parametrize("wire_format", WireFormat)
def test_whole_numbers_are_exact_in_every_format(wire_format: WireFormat) -> None:
    tensor = torch.tensor([[2**62 + 1, -5], [0, 7]])
    assert pass_over(tensor, wire_format).equal(tensor)
    assert pass_over(tensor > 0, wire_format).equal(tensor > 0)


@pytest.mark.parametrize(
    ("dtype", "wire_format"), [(torch.float32, WireFormat.FP32), (torch.bfloat16, WireFormat.BF16)]
)
def test_what_needs_no_conversion_is_not_copied(dtype: torch.dtype, wire_format: WireFormat) -> None:
    tensor = torch.ones(4, 5, dtype=dtype, requires_grad=True)
    buffer = encode_tensor(tensor, wire_format)
    arrived = decode_tensor(buffer, describe(tensor, wire_format))
    assert arrived.data_ptr() == tensor.data_ptr()
    assert not arrived.requires_grad


def test_a_buffer_that_may_not_be_written_is_copied() -> None:
    sent = bytes(encode_tensor(torch.ones(3), WireFormat.FP32))
    arrived = decode_tensor(sent, TensorSpec("float32", (3,), WireFormat.FP32))
    arrived.zero_()
    assert decode_tensor(sent, TensorSpec("float32", (3,), WireFormat.FP32)).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("wire_format", WireFormat)
def test_a_buffer_that_lies_askew_is_read_all_the_same(wire_format: WireFormat) -> None:
    tensor = torch.tensor([127.0, -64.0, 1.0])
    askew = memoryview(bytearray(b"x" + bytes(encode_tensor(tensor, wire_format, KEY))))[1:]
    arrived = decode_tensor(askew, describe(tensor, wire_format))
    assert arrived.data_ptr() % 4 == 0
    assert arrived.equal(pass_over(tensor, wire_format))


@pytest.mark.parametrize("wire_format", WireFormat)
@pytest.mark.parametrize(
    "shape",
    [(), (0,), (3, 0, 2), (99, 99, 0), (1,), (255,), (256,), (257,), (2, 3, 129), (3, 33, 5), (9, 4, 3, 3)],
)
def test_any_shape_arrives_as_it_was(wire_format: WireFormat, shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, -even(wire_format))
    assert pass_over(tensor, wire_format).equal(tensor)
    sent = encode_tensor(tensor, wire_format, KEY)
    assert sent.nbytes == encoded_bytes(torch.float32, shape, wire_format)


@pytest.mark.parametrize("wire_format", WireFormat)
def test_a_strided_view_arrives_like_its_copy(wire_format: WireFormat) -> None:
    base = torch.linspace(-1, 1, 1200).view(30, 40)
    deep = torch.linspace(-1, 1, 2400).view(3, 20, 40)
    flat = (base.t(), base[:, ::3], base[3, ::2], base[:1].expand(20, 40))
    for view in (*flat, deep.transpose(0, 2), deep[:, :, ::3], deep[:, None, :, :20].transpose(1, 3)):
        assert pass_over(view, wire_format).equal(pass_over(view.clone(), wire_format))


@pytest.mark.parametrize("wire_format", WireFormat)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_float_types_come_back_as_themselves(wire_format: WireFormat, dtype: torch.dtype) -> None:
    tensor = torch.linspace(-2, 2, 600, dtype=dtype)
    arrived = pass_over(tensor, wire_format)
    assert arrived.dtype == dtype
    assert (arrived - tensor).abs().max() <= (2 / 6.9 if "stochastic" in wire_format else 2 / 13)


def test_an_int8_buffer_is_scales_then_codes() -> None:
    tensor = torch.zeros(257)
    tensor[0], tensor[1], tensor[256] = 127.0, -3.4, -254.0
    assert bytes(encode_tensor(tensor, WireFormat.INT8)) == struct.pack(
        "<2f256bb", 1, 2, 127, -3, *[0] * 254, -127
    )


def test_an_int4_byte_is_a_number_of_the_first_half_below_one_of_the_second() -> None:
    tensor = torch.tensor([7.0, -7.0, 0.0, 1.0, -1.0])  # halves of three and two
    assert bytes(encode_tensor(tensor, WireFormat.INT4)) == struct.pack("<f3b", 1, 16 + 15, -16 + 1, 8)


@pytest.mark.parametrize("wire_format", [*BLOCKS, WireFormat.BF16, WireFormat.FP16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_becomes_a_number(wire_format: WireFormat, value: float) -> None:
    tensor = torch.full((700,), even(wire_format))
    tensor[300] = value
    arrived = pass_over(tensor, wire_format)
    assert not arrived[300].isfinite()
    assert arrived[:256].equal(tensor[:256])
    assert arrived[512:].equal(tensor[512:])
    if wire_format in BLOCKS:
        assert not arrived[256:512].isfinite().any()


def test_odd_nans_do_not_slip_through_the_bits_of_a_scale() -> None:
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7F8000FF, -1], dtype=torch.int32).view(torch.float32)
    for wire_format in (*BLOCKS, WireFormat.INT4_STOCHASTIC):
        for nan in odd:
            assert not pass_over(torch.stack((nan, torch.tensor(1.0))), wire_format).isfinite().any()


def test_a_number_too_large_for_fp16_is_infinite_not_zero() -> None:
    assert pass_over(torch.tensor([1e6, 1.0]), WireFormat.FP16).tolist() == [math.inf, 1.0]


@pytest.mark.parametrize("wire_format", WireFormat)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_buffer_of_another_size_is_refused(wire_format: WireFormat, change: int) -> None:
    spec = TensorSpec("float32", (3, 7), wire_format)
    with pytest.raises(
        ProtocolError, match=rf"shape \(3, 7\) has {spec.num_bytes} bytes as {wire_format}, not"
    ):
        decode_tensor(bytes(spec.num_bytes + change), spec)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec("complex64", (1,), WireFormat.FP32), "dtype 'complex64' is none of"),
        (TensorSpec("float32", (-1, -1), WireFormat.FP32), "is no shape"),
        (TensorSpec("float32", (0, 2**62, 2**62), WireFormat.INT8), "is no shape"),
        (TensorSpec("float32", (2**45,), WireFormat.INT4), "is no shape"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(spec: TensorSpec, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode_tensor(bytes(4), spec)


def test_a_truth_value_that_is_neither_is_refused() -> None:
    with pytest.raises(ProtocolError, match="neither 0 nor 1"):
        decode_tensor(b"\x00\x01\x02", TensorSpec("bool", (3,), WireFormat.FP32))


@pytest.mark.parametrize("wire_format", WireFormat)
def test_sizes_agree_with_what_the_planner_counts(wire_format: WireFormat) -> None:
    shape = (40, 1000, 256)
    counted = wire_format.ratio * 4 * math.prod(shape)
    means = 4 * 256 if wire_format is WireFormat.INT4_CHANNELS else 0
    assert encoded_bytes(torch.float32, shape, wire_format) == counted + means


def test_a_stochastic_buffer_is_short_scales_then_codes() -> None:
    tensor = torch.zeros(33)
    tensor[0], tensor[16], tensor[32] = 7.0, -14.0, 3.5
    halves = [8 + 3.5, *[8.0] * 15]  # drawn: up or down
    for low in (math.floor(halves[0]), math.ceil(halves[0])):
        wanted = struct.pack("<2H16bB", 0x4000, 0x3F00, low - 7 * 16, *[8] * 15, 15)
        assert wanted in {bytes(encode_tensor(tensor, WireFormat.INT4_STOCHASTIC, (k,))) for k in range(40)}


def test_a_buffer_by_channels_is_means_then_scales_then_codes() -> None:
    tensor = torch.zeros(1, 64, 2)
    tensor[:, ::2], tensor[:, 1::2] = 7.0, -7.0
    tensor[..., 1] = 2 * tensor[..., 1] + 100
    low = [(15 if row % 2 == 0 else 1) + 16 * (7 if row % 2 == 0 else -7) for row in range(16)]
    codes = [code for code in low for _ in range(2)] * 2
    assert bytes(encode_tensor(tensor, WireFormat.INT4_CHANNELS)) == struct.pack(
        "<2f4H64b", 0.0, 100.0, *(0x3F80, 0x4000) * 2, *codes
    )


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((2, 32, 5), 2),
        ((1, 64, 5), 2),
        ((1, 63, 5), None),  # too few positions
        ((4, 3, 8, 8), 1),
        ((4, 8, 8, 3), 3),
        ((4, 8, 8, 8), 1),
        ((4, 3, 8, 16), None),  # an image, or heads of attention
        ((64, 64), None),
        ((64,), None),
        ((2, 3, 8, 8, 8), None),
    ],
)
def test_a_shape_tells_where_the_channels_are(shape: tuple[int, ...], axis: int | None) -> None:
    assert find_channels(shape) == axis
    spec = TensorSpec("float32", shape, WireFormat.INT4_CHANNELS)
    assert spec.packing is (WireFormat.INT8 if axis is None else WireFormat.INT4_CHANNELS)
    if axis is None:
        tensor = torch.randn(shape)
        int8 = encode_tensor(tensor, WireFormat.INT8)
        assert bytes(encode_tensor(tensor, WireFormat.INT4_CHANNELS)) == bytes(int8)
        assert decode_tensor(int8, spec).equal(pass_over(tensor, WireFormat.INT8))


@pytest.mark.parametrize("shape", [(2, 70, 6), (5, 6, 7, 7), (5, 7, 7, 6)])
def test_a_channel_keeps_its_offset_and_one_large_channel_costs_the_others_nothing(shape) -> None:
    axis = find_channels(shape)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).movedim(axis, -1)
    tensor[..., 0] = tensor[..., 0] * 1000 - 5000
    tensor[..., 1] += 1e6
    tensor = tensor.movedim(-1, axis)
    arrived = pass_over(tensor, WireFormat.INT4_CHANNELS)
    assert arrived.is_contiguous()
    lost = (arrived - tensor).movedim(axis, -1).flatten(0, -2).abs().amax(0)
    assert (lost[2:] < 0.5).all()
    assert lost[1] < 0.6
    assert lost[0] < 500


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_in_blocks_of_four_bits(value: float) -> None:
    tensor = torch.full((2, 64, 3), 7.0)
    tensor[1, 40, 1] = value
    arrived = pass_over(tensor, WireFormat.INT4_CHANNELS)
    assert not arrived[..., 1].isfinite().any()
    assert arrived[..., ::2].equal(tensor[..., ::2])
    flat = tensor.view(-1)
    arrived = pass_over(flat, WireFormat.INT4_STOCHASTIC)
    block = (64 + 40) * 3 // 32 * 32
    assert not arrived[block : block + 32].isfinite().any()
    assert arrived[:block].equal(flat[:block])
    assert arrived[block + 32 :].equal(flat[block + 32 :])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a law of a GPU")
@pytest.mark.parametrize("wire_format", WireFormat)
@pytest.mark.parametrize("shape", [(4, 100, 48), (5, 24, 9, 9), (1000,)])
def test_a_gpu_packs_as_a_cpu_does(wire_format: WireFormat, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    spec, there = describe(tensor, wire_format), pack_tensor(tensor.cuda(), wire_format, KEY)
    assert there.is_cuda
    arrived = unpack_tensor(there, spec)
    assert arrived.is_cuda
    if wire_format is WireFormat.INT4_STOCHASTIC:  # devices draw differently
        assert (arrived.cpu() - tensor).abs().max() <= tensor.abs().max() / 6.9
        return
    torch.testing.assert_close(arrived.cpu(), pass_over(tensor, wire_format), rtol=0, atol=1e-5)
    assert decode_tensor(there.cpu().numpy().data, spec).equal(arrived.cpu())


def test_chance_needs_a_key() -> None:
    with pytest.raises(ValueError, match="needs a key"):
        encode_tensor(torch.ones(3), WireFormat.INT4_STOCHASTIC)


WHOLE = slice(0, 2)


def send(
    feedback: ErrorFeedback, tensor: torch.Tensor, where: slice = WHOLE, unit: float = 1.0
) -> torch.Tensor:
    owed = tensor.clone()
    feedback.add_owed(where, owed)
    return feedback.encode(where, owed, unit).decoded


def test_what_one_round_lost_comes_with_the_next() -> None:
    feedback = ErrorFeedback(WireFormat.INT4, 2)
    delta = torch.tensor([7.0, 0.4])
    assert send(feedback, delta).tolist() == [7.0, 0.0]
    feedback.commit()
    assert send(feedback, delta).tolist() == [7.0, 1.0]  # 0.4 and 0.4 are owed


def test_what_is_owed_belongs_to_items_however_they_are_sliced() -> None:
    feedback = ErrorFeedback(WireFormat.INT4, 4)
    for where in (slice(0, 2), slice(2, 4)):
        send(feedback, torch.tensor([7.0, 0.25 + where.start / 8]), where)
    feedback.commit()
    owed = torch.zeros(5)
    feedback.add_owed(slice(0, 5), owed, factor=2.0)  # beyond the vector nothing is owed
    assert owed.tolist() == [0.0, 0.5, 0.0, 1.0, 0.0]


def test_what_a_mean_lost_is_owed_by_all_its_samples() -> None:
    feedback = ErrorFeedback(WireFormat.INT4, 2)
    send(feedback, torch.tensor([7.0, 0.25]), unit=8.0)
    feedback.commit()
    assert send(feedback, torch.tensor([7.0, 0.0])).tolist() == [7.0, 2.0]


def test_a_round_that_never_happened_leaves_what_is_owed() -> None:
    feedback = ErrorFeedback(WireFormat.INT4, 2)
    delta = torch.tensor([7.0, 0.4])
    send(feedback, delta)
    feedback.commit()
    for _ in range(3):
        assert send(feedback, delta).tolist() == [7.0, 1.0]
        feedback.abort()
    assert send(feedback, delta).tolist() == [7.0, 1.0]


def test_the_sender_knows_what_the_others_will_read() -> None:
    tensor = torch.linspace(-1, 1, 300)
    for wire_format in DELTA_FORMATS:
        result = ErrorFeedback(wire_format, 300).encode(slice(0, 300), tensor.clone())
        assert result.decoded.equal(decode_tensor(result.buffer, describe(tensor, wire_format)))


@pytest.mark.parametrize("wire_format", BLOCKS)
def test_each_block_is_rounded_by_itself_however_long_the_tensor(wire_format: WireFormat) -> None:
    length, cut = 256 * 2500 + 5, 256 * 2049
    tensor = torch.sin(torch.arange(length)) * torch.arange(1, length + 1)
    arrived = pass_over(tensor, wire_format)
    assert arrived[:256].equal(pass_over(tensor[:256], wire_format))
    assert arrived[cut:].equal(pass_over(tensor[cut:], wire_format))
    assert ((arrived - tensor).abs() <= tensor[-256:].abs().max() / 12).all()


@pytest.mark.parametrize("wire_format", BLOCKS)
def test_the_smallest_numbers_round_like_any_others(wire_format: WireFormat) -> None:
    tiny = 2.0**-126
    tensor = torch.tensor([0.0, 3 * tiny, 0.75 * tiny, -0.25 * tiny, 2.0**-149])
    assert pass_over(tensor, wire_format).tolist() == [0.0, 3 * tiny, tiny, 0.0, 0.0]
    assert bytes(encode_tensor(torch.zeros(2), wire_format))[:4] == struct.pack("<f", tiny)


@pytest.mark.parametrize("wire_format", [WireFormat.BF16, WireFormat.FP16])
def test_halves_keep_what_is_owed_too(wire_format: WireFormat) -> None:
    feedback = ErrorFeedback(wire_format, 2)
    delta = torch.tensor([1 + 0.4 * 2**-7, 1 + 0.4 * 2**-10])
    total = torch.zeros(2)
    for _ in range(10):
        total += send(feedback, delta)
        feedback.commit()
    assert not send(ErrorFeedback(wire_format, 2), delta).equal(delta)
    assert (total / 10 - delta).abs().max() < 2**-11


def test_fp32_owes_nothing_and_sends_the_tensor_itself() -> None:
    feedback = ErrorFeedback(WireFormat.FP32, 2)
    delta = torch.tensor([1 + 2.0**-23, 1e-40])
    result = feedback.encode(WHOLE, delta)
    assert result.decoded is delta
    feedback.commit()
    assert send(feedback, delta).equal(delta)


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([0, 255], "uint8"),
        ([-100, 127], "int8"),
        ([-1, 128], "int16"),
        ([0, 50_256], "uint16"),
        ([-1, 50_256], "int32"),
        ([0, 2**31], "int64"),
        ([], "int64"),
    ],
)
def test_whole_numbers_travel_in_the_smallest_type_that_holds_them(numbers: list[int], dtype: str) -> None:
    given = torch.tensor(numbers, dtype=torch.int64)
    narrow = narrow_integers(given)
    spec = describe(narrow, WireFormat.FP32)
    assert (spec.dtype, spec.fault) == (dtype, None)
    arrived = widen_integers(decode_tensor(encode_tensor(narrow, WireFormat.FP32), spec), "int64")
    assert arrived.dtype is torch.int64
    assert torch.equal(arrived, given)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32, torch.int8])
def test_what_is_small_or_no_whole_number_stays_as_it_is(dtype: torch.dtype) -> None:
    given = torch.tensor([0, 1, 1], dtype=dtype)
    assert narrow_integers(given) is given
    for wide in ("int64", "float32"):
        found = widen_integers(given, wide)
        is_whole = dtype in (torch.uint8, torch.int8) and wide == "int64"
        assert found.dtype is (torch.int64 if is_whole else dtype)
