"""Laws of the flat vector: nothing is lost or doubled, wherever a cluster cuts; junk is never weights."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ravnest.errors import WeightsError
from ravnest.model.blueprint.program import BUFFER, CONSTANT, PARAMETER, Blueprint, Program, StateEntry
from ravnest.model.state.state_dict import Layout, merge_stages, read_snapshot, to_safetensors

NOTHING = Program({}, (), (), (), (), (), ())
NUM_POSITIONS = 6
BITS = {2: torch.int16, 4: torch.int32}
DTYPES = st.sampled_from(["float32", "bfloat16", "float16"])


@st.composite
def blueprints(draw: st.DrawFn) -> Blueprint:
    state = []
    for number in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from([PARAMETER, PARAMETER, BUFFER, CONSTANT]))
        dtype = draw(DTYPES if kind == PARAMETER else DTYPES | st.sampled_from(["int64", "bool"]))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        positions = draw(st.sets(st.integers(0, NUM_POSITIONS - 1), min_size=1, max_size=3))
        is_written = kind == BUFFER and draw(st.booleans())
        where = tuple(sorted(positions))
        state.append(StateEntry(f"t{number}", kind, dtype, shape, where, kind == PARAMETER, is_written))
    cuts = ((0, 0),) * (NUM_POSITIONS + 1)
    return Blueprint("toy", NUM_POSITIONS, 0, NUM_POSITIONS, cuts, tuple(state), (), NOTHING, NOTHING)


CUTS = st.sets(st.integers(1, NUM_POSITIONS - 1)).map(lambda cuts: [0, *sorted(cuts), NUM_POSITIONS])


def tensors(blueprint: Blueprint, seed: int) -> dict[str, Tensor]:
    """Finite numbers of every size: random bits, where they are numbers."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for entry in blueprint.state:
        dtype = getattr(torch, entry.dtype)
        if dtype.is_floating_point:
            integer = BITS[dtype.itemsize]
            limits = torch.iinfo(integer)
            bits = torch.randint(limits.min, limits.max, entry.shape, generator=generator, dtype=integer)
            state[entry.name] = bits.view(dtype).nan_to_num(0, 1, -1)
        else:
            state[entry.name] = torch.randint(0, 2, entry.shape, generator=generator).to(dtype)
    return state


def stages(whole: Blueprint, cuts: list[int]) -> list[Blueprint]:
    return [
        replace(
            whole,
            start=start,
            stop=stop,
            state=tuple(e for e in whole.state if any(start <= place < stop for place in e.positions)),
        )
        for start, stop in itertools.pairwise(cuts)
    ]


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@settings(max_examples=100)
@given(blueprints(), st.integers(0, 99))
def test_gathered_tensors_are_found_again_bit_for_bit(blueprint: Blueprint, seed: int) -> None:
    layout, state = Layout.of(blueprint), tensors(blueprint, seed)
    views = layout.views(layout.gather(state))
    assert list(views) == [entry.name for entry in layout.entries]
    assert all(same(view.to(state[name].dtype), state[name]) for name, view in views.items())


@settings(max_examples=100)
@given(blueprints())
def test_views_are_the_vector_itself_item_by_item(blueprint: Blueprint) -> None:
    layout = Layout.of(blueprint)
    vector = torch.arange(layout.size, dtype=torch.float32)
    views = layout.views(vector)
    assert [int(item) for view in views.values() for item in view.flatten()] == list(range(layout.size))
    for view in views.values():
        view += 1
    assert torch.equal(vector, torch.arange(layout.size) + 1.0)


@settings(max_examples=100)
@given(blueprints(), CUTS)
def test_adjacent_segments_tile_the_vector(blueprint: Blueprint, cuts: list[int]) -> None:
    layout = Layout.of(blueprint)
    vector = torch.arange(layout.size, dtype=torch.float32)
    segments = list(itertools.pairwise(cuts))
    assert torch.equal(torch.cat([vector[layout.interval(*segment)] for segment in segments]), vector)
    whole, parts = layout.views(vector), {}
    for segment in segments:
        parts.update(layout.segment(*segment).views(vector[layout.interval(*segment)]))
    assert list(parts) == list(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


@settings(max_examples=100)
@given(blueprints(), CUTS, st.integers(0, 99))
def test_the_stages_of_any_cut_make_the_models_vector(whole: Blueprint, cuts: list[int], seed: int) -> None:
    state = tensors(whole, seed)
    layouts = [Layout.of(stage) for stage in stages(whole, cuts)]
    joined = torch.cat([layout.gather(state) for layout in layouts])
    assert torch.equal(joined, Layout.of(whole).gather(state))
    for layout in layouts:
        assert all(layout.start <= entry.position < layout.stop for entry in layout.entries)


@settings(max_examples=100)
@given(blueprints(), CUTS, st.integers(0, 99))
def test_a_file_per_stage_makes_the_whole_again(whole: Blueprint, cuts: list[int], seed: int) -> None:
    state = tensors(whole, seed)
    parts = [read_snapshot(to_safetensors(state, part), part.state)[0] for part in stages(whole, cuts)]
    merged = merge_stages(parts, whole)
    assert merged.keys() == {entry.name for entry in whole.state if entry.kind != CONSTANT}
    assert all(same(merged[name], state[name]) for name in merged)


WEIGHT = StateEntry("w", PARAMETER, "float32", (2, 2), (0,), is_trainable=True)
ONE = Blueprint("one", 1, 0, 1, ((0, 0), (0, 0)), (WEIGHT,), (), NOTHING, NOTHING)
SOUND = to_safetensors({"w": torch.ones(2, 2)}, ONE)


@given(st.binary(max_size=200) | st.binary(max_size=64).map(lambda tail: SOUND[:8] + tail))
def test_junk_is_refused(junk: bytes) -> None:
    with pytest.raises(WeightsError):
        read_snapshot(junk, [WEIGHT])


@given(st.integers(0, len(SOUND) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_changes_one_number_or_one_name(place: int, value: int) -> None:
    data = bytearray(SOUND)
    data[place] = value
    try:
        found, _ = read_snapshot(data, [WEIGHT])
    except WeightsError:
        return
    for tensor in found.values():
        assert tensor.shape == (2, 2)
        assert (tensor != 1).sum() <= 1


@given(st.integers(0, len(SOUND) - 1))
def test_a_truncated_file_is_refused(length: int) -> None:
    with pytest.raises(WeightsError):
        read_snapshot(SOUND[:length], [WEIGHT])
