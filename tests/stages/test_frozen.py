"""Frozen matrices in few bits: stages compute as with the dequantised weights, and save none of them."""

import json
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.config import FrozenFormat
from ravnest.errors import UnsafeBlueprint, WeightsError
from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
from ravnest.model.blueprint.frozen_storage import choose_storage
from ravnest.model.blueprint.program import Blueprint
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import Captured, capture
from ravnest.model.stage.dry_run import dry_run
from ravnest.model.stage.profile import measure
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.model.state.quantisation import dequantise
from ravnest.model.state.state_dict import read_snapshot, to_snapshot
from ravnest.model.state.state_source import LayeredSource, MemorySource, write_pieces
from ravnest.model.state.stored_source import StorageError, StoredSource

NUM_TOKENS, WIDTH, LENGTH = 90, 64, 136
QUANTISED = [f"layers.{n}.{name}.weight" for n in range(2) for name in ("query", "up")] + ["shared.weight"]

pytestmark = pytest.mark.usefixtures("one_thread")


class Layer(nn.Module):
    """Frozen projections with adapters, around a shared frozen one."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared = shared
        self.query, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 100, bias=False)
        self.one, self.two = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 100, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, decay: Tensor) -> Tensor:
        query = self.query(self.norm(x))
        x = x + (query @ x.transpose(1, 2) * decay) @ x / LENGTH
        hidden = F.gelu(self.up(x) + self.two(self.one(x)))
        return x + self.shared(hidden)


class Tiny(nn.Module):
    """A language model whose head is tied to its embedding; all but adapters and norms is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.shared = nn.Linear(100, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer(self.shared) for _ in range(2))
        self.register_buffer("slope", torch.tensor(0.1))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(part in name for part in ("one", "two", "norm")))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(LENGTH)
        decay = torch.exp(-self.slope * (places[:, None] - places).abs())
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, decay)
        return x @ self.embedding.weight.T


def batch_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(NUM_TOKENS, (2, LENGTH + 1), generator=generator)
    return {"tokens": drawn[:, :-1], "next": drawn[:, 1:]}


def loss_of(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch["next"].flatten())


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return capture(Tiny(), batch_of(0), loss_of, name="tiny")


def store(captured: Captured, form: FrozenFormat) -> tuple[Blueprint, dict[str, Tensor]]:
    """Return the model's blueprint and state as peers get them."""
    blueprint = choose_storage(captured.blueprint, form)
    plain = MemorySource(captured.state)
    source = LayeredSource(StoredSource(plain, blueprint.state), plain)
    content = b"".join(write_pieces(source, [entry.name for entry in blueprint.state]))
    state, _ = read_snapshot(content, blueprint.state)
    return read_blueprint(write_blueprint(blueprint)), state


def restore_all(blueprint: Blueprint, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state as an unchanged model would have it."""
    plain = {}
    for entry in blueprint.state:
        tensor, dtype = state[entry.name], getattr(torch, entry.dtype)
        is_quantised = entry.storage in (FrozenFormat.INT8, FrozenFormat.INT4)
        full = dequantise(tensor, entry.storage, entry.shape, dtype) if is_quantised else tensor.to(dtype)
        plain[entry.name] = full
    return plain


def train(blueprint: Blueprint, state: dict[str, Tensor], cuts: list[int], **options):
    """Return the loss and all gradients of one batch through stages."""
    trained = {x.name for x in blueprint.state if x.is_trainable}
    state = {name: tensor.detach().requires_grad_(name in trained) for name, tensor in state.items()}
    values: dict[int, Tensor] = {}
    for start, stop in zip([0, *cuts], [*cuts, blueprint.num_positions], strict=True):
        stage = slice_blueprint(blueprint, start, stop)
        program = build_stage_program(stage, **options)
        given = {value: values[value] for value in stage.train.inputs}
        passed = program.forward(state, given, batch_of(1), key=(1, 2))
        values |= passed.outputs
    loss = passed.results["loss"]
    names = sorted(trained)
    found = torch.autograd.grad(loss, [state[name] for name in names])
    return loss.detach(), dict(zip(names, found, strict=True))


def test_products_are_quantised_tables_and_heads_are_bf16_and_the_rest_is_as_given(captured):
    stored = {x.name: x.storage for x in choose_storage(captured.blueprint, FrozenFormat.INT4).state}
    assert sorted(name for name, form in stored.items() if form is FrozenFormat.INT4) == sorted(QUANTISED)
    assert [name for name, form in stored.items() if form is FrozenFormat.BF16] == ["embedding.weight"]
    assert choose_storage(captured.blueprint, FrozenFormat.FP32) is captured.blueprint


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_stages_give_the_bits_of_a_model_with_the_dequantised_weights(captured, form, recompute, autocast):
    blueprint, state = store(captured, FrozenFormat(form))
    plain = restore_all(blueprint, state)
    assert not torch.equal(plain["shared.weight"], captured.state["shared.weight"])
    options = {"recompute": recompute, "autocast": autocast}
    cuts = [captured.blueprint.num_positions // 2]
    loss, gradients = train(blueprint, state, cuts, **options)
    expected_loss, expected = train(captured.blueprint, plain, cuts, **options)
    assert torch.equal(loss, expected_loss)
    assert [name for name in expected if not torch.equal(gradients[name], expected[name])] == []


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_no_frozen_value_is_saved_for_the_backward(captured, autocast):
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    large = {(LENGTH, LENGTH), *(tuple(captured.state[name].shape) for name in QUANTISED)}
    large |= {shape[::-1] for shape in large}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        train(captured.blueprint, captured.state, [], autocast=autocast)
        assert large.intersection(saved)
        saved.clear()
        train(*store(captured, FrozenFormat.INT4), [], autocast=autocast)
    assert saved
    assert not large.intersection(saved)


def test_the_error_is_told_once_all_is_read_and_ranges_are_those_of_the_whole(captured):
    told: list[Sequence[StorageError]] = []
    blueprint = choose_storage(captured.blueprint, FrozenFormat.INT4)
    source = StoredSource(MemorySource(captured.state), blueprint.state, told.append)
    for name, kind in source.types.items():
        assert not told
        whole = bytes(source.read(name))
        assert len(whole) == kind.size_bytes
        parts = [bytes(source.read(name, start, start + 77)) for start in range(0, len(whole), 77)]
        assert b"".join(parts) == whole
    ((narrow, int4),) = told
    assert (narrow.form, narrow.num_tensors, int4.form) == ("bf16", 1, "int4")
    assert narrow.overall < 0.002
    assert 0.05 < int4.overall < int4.largest < 0.12
    assert int4.largest_name in QUANTISED
    assert "5 frozen matrices as int4: relative error 7." in str(int4)


def test_weights_that_are_not_finite_are_refused_by_name(captured):
    blueprint = choose_storage(captured.blueprint, FrozenFormat.INT4)
    broken = captured.state["shared.weight"].detach().clone()
    broken[3, 4] = torch.nan
    source = StoredSource(MemorySource({**captured.state, "shared.weight": broken}), blueprint.state)
    with pytest.raises(WeightsError, match=r"'shared\.weight' cannot be stored as int4: .* set frozen=fp32"):
        source.read("shared.weight")


def test_blocks_of_another_number_or_type_are_refused(captured):
    blueprint, state = store(captured, FrozenFormat.INT4)
    good = to_snapshot(state, {})
    assert read_snapshot(good, blueprint.state)[0].keys() == state.keys()
    blocks = state["shared.weight"]
    for bad in (
        blocks[:-1],
        blocks[:, :-1],
        blocks.view(torch.int8),
        restore_all(blueprint, state)["shared.weight"],
    ):
        with pytest.raises(WeightsError, match=r"'shared\.weight' should be uint8 \[100, 34\], is"):
            read_snapshot(to_snapshot({**state, "shared.weight": bad}, {}), blueprint.state)
    with pytest.raises(WeightsError, match="should be bfloat16"):
        read_snapshot(
            to_snapshot({**state, "embedding.weight": captured.state["embedding.weight"]}, {}),
            blueprint.state,
        )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"storage": "int2"}, "int2"),
        ({"storage": "fp32"}, "fp32"),
        ({"storage": 4}, "storage|int"),
        ({"storage": "int4", "is_trainable": True}, "only parameters that nothing changes"),
        ({"storage": "int4", "is_written": True}, "only parameters that nothing changes"),
        ({"storage": "int4", "kind": "buffer"}, "only parameters that nothing changes"),
        ({"storage": "int4", "dtype": "int64"}, "int64, which is not stored as int4"),
        ({"storage": "bf16", "dtype": "float16"}, "float16, which is not stored as bf16"),
    ],
)
def test_a_blueprint_with_another_storage_is_refused(captured, change, reason):
    names = ("name", "kind", "dtype", "shape", "positions", "is_trainable", "is_written", "storage")
    document = json.loads(write_blueprint(choose_storage(captured.blueprint, FrozenFormat.INT4)))
    (row,) = (row for row in document["state"] if row[0] == "shared.weight")
    assert row[-1] == "int4"
    for key, value in change.items():
        row[names.index(key)] = value
    with pytest.raises(UnsafeBlueprint, match=reason):
        read_blueprint(json.dumps(document).encode())


def test_a_plan_counts_frozen_matrices_as_they_are_stored(captured):
    given, stored = (
        measure(choose_storage(captured.blueprint, form), 2)
        for form in (FrozenFormat.FP32, FrozenFormat.INT4)
    )
    assert given.trained_bytes == stored.trained_bytes
    assert given.saved_bytes == stored.saved_bytes
    assert given.restored_bytes == ()
    up = 4 * 100 * WIDTH
    assert max(stored.restored_bytes) == up == 4 * captured.state["shared.weight"].numel()
    entries = {x.name: x for x in choose_storage(captured.blueprint, FrozenFormat.INT4).state}
    assert entries["shared.weight"].size_bytes == 100 * 34
    assert entries["embedding.weight"].size_bytes == 2 * NUM_TOKENS * WIDTH
    ratio = sum(stored.frozen_bytes) / sum(given.frozen_bytes)
    assert 0.2 < ratio < 0.4


def test_a_stage_without_room_for_one_matrix_in_full_is_refused(captured):
    stage = slice_blueprint(choose_storage(captured.blueprint, FrozenFormat.INT4), 3, 5)
    need = dry_run(stage, 1, max_bytes=1e9, max_flops=1e12)
    assert need.state_bytes > sum(x.size_bytes for x in stage.state)
    with pytest.raises(UnsafeBlueprint, match="the state takes"):
        dry_run(stage, 1, max_bytes=need.state_bytes - 1, max_flops=1e12)
