"""A stage's state as one vector and as a file: order, copies, casts, and refusals that name the tensor."""

import json
import tracemalloc
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from ravnest.errors import WeightsError
from ravnest.model.blueprint.program import BUFFER, CONSTANT, PARAMETER, Blueprint, Program, StateEntry
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import Captured, capture
from ravnest.model.state.state_dict import (
    Layout,
    merge_stages,
    read_finite_snapshot,
    read_snapshot,
    to_safetensors,
    to_snapshot,
)

NOTHING = Program({}, (), (), (), (), (), ())


def blueprint(*state: StateEntry, num_positions: int = 3, aliases: dict[str, str] | None = None) -> Blueprint:
    cuts = ((0, 0),) * (num_positions + 1)
    pairs = tuple((aliases or {}).items())
    return Blueprint("toy", num_positions, 0, num_positions, cuts, state, pairs, NOTHING, NOTHING)


def stage(whole: Blueprint, start: int, stop: int) -> Blueprint:
    here = tuple(e for e in whole.state if any(start <= place < stop for place in e.positions))
    return replace(whole, start=start, stop=stop, state=here)


def parameter(name: str, shape: tuple[int, ...], *positions: int, dtype: str = "float32") -> StateEntry:
    return StateEntry(name, PARAMETER, dtype, shape, positions, is_trainable=True)


WHOLE = blueprint(
    parameter("head", (3, 2), 2, dtype="bfloat16"),
    parameter("embedding", (4, 2), 0, 2),
    StateEntry("norm.mean", BUFFER, "float32", (2,), (1,), is_written=True),
    StateEntry("norm.count", BUFFER, "int64", (), (1,), is_written=True),
    StateEntry("scale", BUFFER, "float32", (2,), (1,)),
    StateEntry("mask", CONSTANT, "bool", (2, 2), (1,)),
    parameter("norm.weight", (2,), 1),
    aliases={"decoder": "embedding"},
)


def tensors(whole: Blueprint) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        entry.name: torch.randint(-9, 9, entry.shape, generator=generator).to(getattr(torch, entry.dtype))
        for entry in whole.state
    }


def test_the_vector_is_ordered_by_home_and_leaves_out_what_is_not_averaged() -> None:
    layout = Layout.of(WHOLE)
    places = [(entry.name, entry.offset, entry.position) for entry in layout.entries]
    assert places == [("embedding", 0, 0), ("norm.mean", 8, 1), ("norm.weight", 10, 1), ("head", 12, 2)]
    assert layout.size == 18


def test_a_tied_weight_is_in_the_vector_of_its_home_alone() -> None:
    assert next(entry.name for entry in Layout.of(stage(WHOLE, 0, 2)).entries) == "embedding"
    assert [entry.name for entry in Layout.of(stage(WHOLE, 2, 3)).entries] == ["head"]


def test_an_interval_of_positions_is_an_interval_of_the_vector() -> None:
    layout = Layout.of(WHOLE)
    assert layout.interval(0, 1) == slice(0, 8)
    assert layout.interval(1, 3) == slice(8, 18)
    assert layout.interval(2, 2) == slice(12, 12)
    later = Layout.of(stage(WHOLE, 1, 3))
    assert later.interval(1, 2) == slice(0, 4)
    with pytest.raises(AssertionError):
        later.interval(0, 2)


def test_a_segment_has_views_of_its_own() -> None:
    layout, state = Layout.of(WHOLE), tensors(WHOLE)
    part = layout.gather(state)[layout.interval(1, 3)]
    views = layout.segment(1, 3).views(part)
    assert list(views) == ["norm.mean", "norm.weight", "head"]
    assert torch.equal(views["head"], state["head"].float())
    views["head"].zero_()
    assert not part[4:].any()


def test_gathering_copies_into_a_new_vector_or_a_given_one() -> None:
    layout, state = Layout.of(WHOLE), tensors(WHOLE)
    leaf = state["embedding"] = nn.Parameter(state["embedding"])
    before = leaf.detach().clone()
    vector = layout.gather(state)
    assert vector.dtype == torch.float32
    assert not vector.requires_grad
    again = torch.zeros(layout.size)
    assert layout.gather(state, out=again) is again
    assert torch.equal(again, vector)
    before = leaf.detach().clone()
    vector += 1
    assert torch.equal(leaf, before)


def test_a_tensor_of_another_shape_is_never_stretched() -> None:
    layout, state = Layout.of(WHOLE), tensors(WHOLE)
    state["norm.weight"] = torch.zeros(1)
    with pytest.raises(AssertionError, match=r"norm\.weight"):
        layout.gather(state)
    with pytest.raises(AssertionError, match="18 items"):
        layout.views(torch.zeros(17))


def test_a_stage_without_parameters_has_an_empty_vector() -> None:
    layout = Layout.of(blueprint())
    assert layout.gather({}).shape == (0,)
    assert layout.views(torch.zeros(0)) == {}


def test_a_file_holds_the_original_names_and_comes_back_bit_for_bit() -> None:
    state = tensors(WHOLE)
    data = to_safetensors({**state, "other": torch.zeros(3)}, WHOLE)
    assert load(data).keys() == state.keys()
    back, slots = read_snapshot(data, WHOLE.state)
    assert not slots
    assert list(back) == [entry.name for entry in WHOLE.state]
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert all(back[name].dtype == state[name].dtype for name in state)
    back["embedding"].zero_()


def test_buffers_that_share_memory_and_turned_parameters_can_be_written() -> None:
    table = torch.arange(8.0)
    whole = blueprint(
        StateEntry("one", CONSTANT, "float32", (8,), (0,)),
        StateEntry("other", CONSTANT, "float32", (4,), (0,)),
        parameter("turned", (4, 2), 0),
    )
    state = {"one": table, "other": table[2:6], "turned": torch.arange(8.0).view(2, 4).t()}
    back, _ = read_snapshot(to_safetensors(state, whole), whole.state)
    assert all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, "lack 'scale', float32 [2]"),
        ({"scale": torch.zeros(3)}, "'scale' should be float32 [2], is float32 [3]"),
        ({"scale": torch.zeros(2).half()}, "'scale' should be float32 [2], is float16 [2]"),
    ],
)
def test_the_state_of_another_model_is_not_written(change: dict[str, Tensor | None], message: str) -> None:
    given = {**tensors(WHOLE), **change}
    with pytest.raises(WeightsError) as caught:
        to_safetensors({name: tensor for name, tensor in given.items() if tensor is not None}, WHOLE)
    assert message in str(caught.value)


def with_header(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry_header(**change: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **change}}


def test_a_sound_file_with_a_note_is_taken() -> None:
    data = with_header({"__metadata__": {"note": "x" * 100_000}, **entry_header()}, b"\0" * 8)
    assert not read_snapshot(data, [parameter("w", (2,), 0)])[0]["w"].any()


def test_a_header_made_to_fill_the_memory_is_not_read() -> None:
    data = with_header(b'{"w":[' + b"[]," * 100_000 + b"0]}")
    tracemalloc.start()
    with pytest.raises(match="is no safetensors file"):
        read_snapshot(data, [parameter("w", (2,), 0)])
    assert tracemalloc.get_traced_memory()[1] < 500_000, "the header itself has 300,000 bytes"
    tracemalloc.stop()


def moments(*names: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {f"exp_avg/{name}": torch.randn(2, generator=generator) for name in names} | {
        f"step/{name}": torch.tensor(4.0) for name in names
    }


def test_a_snapshot_of_another_cut_is_read_by_name_with_the_state_of_its_optimizer() -> None:
    state = tensors(WHOLE)
    data = to_snapshot(state, moments("scale", "norm.weight"))
    wanted = [entry for entry in WHOLE.state if entry.name in ("scale", "head")]
    for given in (data, bytearray(data), memoryview(data)):
        found, slots = read_snapshot(given, wanted)
        assert found.keys() == {"scale", "head"}
        assert all(torch.equal(found[name], state[name]) for name in found)
        assert found["head"].dtype == torch.bfloat16
        assert slots.keys() == {"exp_avg/scale", "step/scale"}
        assert torch.equal(slots["exp_avg/scale"], moments("scale")["exp_avg/scale"])
        found["scale"].zero_()  # it belongs to whoever reads it
    assert read_snapshot(data, [parameter("elsewhere", (2,), 0)]) == ({}, {})
    assert read_snapshot(to_snapshot({}, {}), wanted) == ({}, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": torch.zeros(3)}, "'w' should be float32 [2], is float32 [3]"),
        ({"w": torch.zeros(2).half()}, "is float16 [2]"),
        (
            {"optimizer/exp_avg/w": torch.zeros(1)},
            "'optimizer/exp_avg/w' should be float32 [2], is float32 [1]",
        ),
        ({"optimizer/exp_avg/w": torch.zeros(2).double()}, "is float64 [2]"),
        ({"optimizer/step/w": torch.zeros(2)}, "should be float32 [], is float32 [2]"),
        ({"optimizer/step/w": torch.tensor(-1.0)}, "which no count is"),
        ({"optimizer/step/w": torch.tensor(float("nan"))}, "which no count is"),
    ],
)
def test_what_is_used_of_a_snapshot_must_be_as_the_model_says(
    change: dict[str, Tensor], message: str
) -> None:
    data = save({"w": torch.zeros(2), **change})
    with pytest.raises(WeightsError) as caught:
        read_snapshot(data, [parameter("w", (2,), 0)])
    assert message in str(caught.value)
    assert read_snapshot(data, [parameter("other", (2,), 0)]) == ({}, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 64,
        (2**63).to_bytes(8, "little") + b"{}",
        with_header(b"{" + b" " * (9 << 20) + b"}"),
        with_header(b"[" * 60_000),
        with_header(b'{"w":' + b"[" * 60_000),
        with_header(b'{"w"'),
        with_header(b"[]"),
        with_header(entry_header(shape=[2**62, 2**62])),
        with_header(entry_header(shape=[2**40], data_offsets=[0, 2**42])),
        with_header(entry_header(), b"1234567"),
        with_header(entry_header(), b"123456789"),
        with_header(entry_header(data_offsets=[4, 12]), b"x" * 11),
        with_header(entry_header(data_offsets=[4, 12]), b"x" * 12),
        with_header(entry_header(data_offsets=[8, 0]), b"x" * 8),
        with_header(entry_header(data_offsets=[-8, 0]), b"x" * 8),
        with_header(entry_header(data_offsets=[0, 4]), b"x" * 8),
        with_header(entry_header(dtype="F4"), b"x" * 8),
        with_header(entry_header(dtype=7), b"x" * 8),
        with_header(entry_header(note="x"), b"x" * 8),
        with_header({"w": "F32"}, b"x" * 8),
        with_header({"w" * 1001: entry_header()["w"]}, b"x" * 8),
        with_header({"v": entry_header()["w"], **entry_header()}, b"x" * 8),
    ],
)
def test_a_damaged_or_lying_snapshot_is_refused(data: bytes) -> None:
    with pytest.raises(WeightsError):
        read_snapshot(data, [parameter("w", (2,), 0)])


def test_a_dtype_that_no_model_here_has_is_named() -> None:
    data = save({"w": torch.zeros(2), "v": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(WeightsError, match="'v' has dtype 'C64', none of F64, F32"):
        read_snapshot(data, [parameter("w", (2,), 0)])


def test_what_training_changes_must_be_finite_and_what_is_large_is_finite() -> None:
    entries = [parameter("w", (2,), 0, dtype="float16"), StateEntry("mask", CONSTANT, "float32", (1,), (0,))]
    low = torch.tensor([float("-inf")])
    state = {"w": torch.full((2,), 6e4).half(), "mask": low}  # the norm of these overflows
    slots = {"exp_avg/w": torch.zeros(2).half(), "exp_avg/elsewhere": low}
    found, kept = read_finite_snapshot(to_snapshot(state, slots), entries)
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["mask"], low)
    assert kept.keys() == {"exp_avg/w"}
    spoiled = torch.tensor([0.0, float("nan")]).half()
    for content in (to_snapshot({"w": spoiled}, {}), to_snapshot(state, {"exp_avg/w": spoiled})):
        with pytest.raises(WeightsError, match="w' of a snapshot is not finite"):
            read_finite_snapshot(content, entries)


def test_bools_of_a_snapshot_are_zeros_and_ones() -> None:
    entry = StateEntry("mask", CONSTANT, "bool", (3,), (0,))
    header = {"mask": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}}
    found, _ = read_snapshot(with_header(header, b"\0\1\7"), [entry])
    assert found["mask"].view(torch.uint8).tolist() == [0, 1, 1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)


TIED = blueprint(
    parameter("embedding.weight", (4, 2), 0, 2),
    parameter("norm.weight", (2,), 1),
    parameter("norm.bias", (2,), 1),
    StateEntry("norm.running_mean", BUFFER, "float32", (2,), (1,), is_written=True),
    StateEntry("norm.running_var", BUFFER, "float32", (2,), (1,), is_written=True),
    StateEntry("norm.num_batches_tracked", BUFFER, "int64", (), (1,), is_written=True),
    StateEntry("mask", CONSTANT, "bool", (2,), (1,)),
    aliases={"head.weight": "embedding.weight"},
)


def parts_of(model: nn.Module) -> list[dict[str, Tensor]]:
    state = {**model.state_dict(), "mask": model.mask}
    return [{e.name: state[e.name].clone() for e in stage(TIED, k, k + 1).state} for k in range(3)]


def test_merged_stages_load_strictly_into_the_owners_model() -> None:
    model, fresh = Tied(), Tied()
    parts = parts_of(model)
    parts[2]["embedding.weight"] += 1  # a copy that lags behind its home
    merged = merge_stages(parts, TIED)
    fresh.load_state_dict(merged, strict=True)
    assert torch.equal(fresh.head.weight, model.head.weight)
    assert merged["head.weight"] is merged["embedding.weight"]


def test_a_missing_or_foreign_stage_is_named() -> None:
    parts = parts_of(Tied())
    with pytest.raises(match=r"lack 'norm\.weight', float32 \[2\]"):
        merge_stages([parts[0], parts[2]], TIED)
    with pytest.raises(match="hold 'stranger'"):
        merge_stages([*parts, {"stranger": torch.zeros(1)}], TIED)
    parts[1]["norm.bias"] = torch.zeros(3)
    with pytest.raises(match=r"'norm\.bias' should be float32 \[2\], is float32 \[3\]"):
        merge_stages(parts, TIED)


class Small(Tied):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids)) * self.mask)


@pytest.fixture(scope="module")
def captured() -> Captured:
    batch = (torch.randint(4, (6,)), torch.randint(4, (6,)))
    return capture(Small(), batch, nn.functional.cross_entropy, self_test=False)


def test_the_stages_that_the_line_cuts_make_the_captured_model(captured: Captured) -> None:
    fresh = Small()
    whole, num = captured.blueprint, captured.blueprint.num_positions
    assert num >= 3
    cut = [slice_blueprint(whole, k, k + 1) for k in range(num)]
    vectors = [Layout.of(part).gather(captured.state) for part in cut]
    assert torch.equal(torch.cat(vectors), Layout.of(whole).gather(captured.state))
    assert Layout.of(whole).size == 8 + 4 * 2
    files = [read_snapshot(to_safetensors(captured.state, part), part.state)[0] for part in cut]
    fresh.load_state_dict(merge_stages(files, whole), strict=True)
    assert all(
        torch.equal(fresh.state_dict()[name], captured.state[name])
        for name in captured.state
        if name != "mask"
    )


def test_a_snapshot_is_a_safetensors_file_whatever_is_in_it() -> None:
    state = {
        "weight": torch.arange(6.0).reshape(2, 3).t(),  # not in the order of its memory
        "half": torch.ones(3, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "count": torch.tensor(7),
        "none": torch.empty(0, 4),
    }
    slots = {"exp_avg/weight": torch.full((3, 2), 0.5), "step/weight": torch.tensor(3.0)}
    data = to_snapshot(state, slots)
    found = load(data)
    expected = state | {f"optimizer/{key}": value for key, value in slots.items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("weight", "slot"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_moments_may_be_narrower_or_wider_than_their_weights(weight: str, slot: str) -> None:
    entries = (parameter("w", (2,), 0, dtype=weight),)
    state = {"w": torch.ones(2, dtype=getattr(torch, weight))}
    data = to_snapshot(state, {"exp_avg/w": torch.ones(2, dtype=getattr(torch, slot))})
    _, slots = read_finite_snapshot(data, entries)
    assert slots["exp_avg/w"].dtype is getattr(torch, slot)
