"""A model's line in numbers: torch's own FLOP counter and autograd's own savings are the reference."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from ravnest.model.blueprint.operators import operators
from ravnest.model.blueprint.program import (
    FLOATING,
    PARAMETER,
    Argument,
    Blueprint,
    Op,
    Program,
    Ref,
    Size,
    StateEntry,
    TensorType,
    ValueId,
    refs_of,
)
from ravnest.model.capture.capture import Captured, capture
from ravnest.model.stage.op_costs import UNCOUNTED_BY_TORCH, Trial
from ravnest.model.stage.profile import find_matrices, has_channels, measure


class Sketch:
    """A blueprint drawn by hand: state, fields and operations, one position after the other."""

    def __init__(self) -> None:
        self.values: dict[ValueId, TensorType] = {}
        self.state: list[tuple[ValueId, StateEntry]] = []
        self.fields: list[tuple[ValueId, str]] = []
        self.ops: list[Op] = []
        self.cuts = [0]

    def value(self, dtype: str, shape: tuple[int | Size, ...], has_gradient: bool) -> Ref:
        value = ValueId(len(self.values))
        self.values[value] = TensorType(dtype, shape, has_gradient)
        return Ref(value)

    def field(self, name: str, *shape: int, dtype: str = "float32") -> Ref:
        ref = self.value(dtype, (Size(1), *shape), False)
        self.fields.append((ref.value, name))
        return ref

    def weight(
        self, name: str, *shape: int, positions: Sequence[int] = (0,), is_trainable: bool = True
    ) -> Ref:
        ref = self.value("float32", shape, is_trainable)
        entry = StateEntry(name, PARAMETER, "float32", shape, tuple(positions), is_trainable)
        self.state.append((ref.value, entry))
        return ref

    def op(
        self,
        name: str,
        *given: Argument,
        shape: Sequence[int | Size] = (Size(1), 8),
        dtype: str = "float32",
        num_unused: int = 0,
    ) -> Ref:
        names = [parameter.name for parameter in operators()[name].parameters]
        needs = any(self.values[value].has_gradient for value in refs_of(given))
        out = self.value(dtype, tuple(shape), needs and dtype in FLOATING)
        arguments = tuple(zip(names, given, strict=False))
        self.ops.append(Op(name, arguments, (out.value, *[None] * num_unused), len(self.ops)))
        return out

    def cut(self) -> None:
        self.cuts.append(len(self.ops))

    def blueprint(self, loss: Ref) -> Blueprint:
        self.cut()
        state = tuple((value, entry.name) for value, entry in self.state)
        results = (("loss", loss.value),)
        program = Program(self.values, (), tuple(self.fields), state, tuple(self.ops), (), results)
        num_positions = len(self.cuts) - 1
        cuts = tuple((cut, cut) for cut in self.cuts)
        entries = tuple(entry for _, entry in self.state)
        return Blueprint("toy", num_positions, 0, num_positions, cuts, entries, (), program, program)


LINEAR, RELU, MUL, SUM = "aten.linear.default", "aten.relu.default", "aten.mul.Tensor", "aten.sum.default"


def two_layers() -> Blueprint:
    sketch = Sketch()
    x = sketch.field("x", 4)
    hidden = sketch.op(RELU, sketch.op(LINEAR, x, sketch.weight("one", 8, 4), sketch.weight("bias", 8)))
    sketch.cut()
    turned = sketch.op("aten.view.default", hidden, (Size(1), 8))
    out = sketch.op(LINEAR, turned, sketch.weight("two", 8, 8, positions=(1,)))
    label = sketch.field("y", 8)
    return sketch.blueprint(sketch.op(SUM, sketch.op("aten.sub.Tensor", out, label), shape=()))


def test_each_position_has_its_own_numbers() -> None:
    profile = measure(two_layers(), 5)
    assert (profile.name, profile.samples_per_batch) == ("toy", 5)
    assert profile.parameter_bytes == (4 * (8 * 4 + 8), 4 * 8 * 8)
    assert profile.forward_flops == (2 * 5 * 4 * 8, 2 * 5 * 8 * 8)
    assert profile.backward_flops == (2 * 5 * 4 * 8, 2 * 2 * 5 * 8 * 8)  # the input needs no gradient
    assert profile.crossing_bytes == (4 * 5 * 4, 4 * 5 * 8, 4 * 5 * 8)


def test_memory_saved_twice_is_counted_where_it_is_saved_first() -> None:
    # The linear saves x, the ReLU its result; the second linear saves the same memory, seen through a view.
    assert measure(two_layers(), 5).saved_bytes == (4 * 5 * 4 + 4 * 5 * 8, 0)


def test_only_a_whole_line_is_measured() -> None:
    blueprint = two_layers()
    part = Blueprint("part", 3, 0, 2, *(getattr(blueprint, name) for name in Blueprint.__slots__[4:]))
    with pytest.raises(AssertionError, match="whole line"):
        measure(part, 5)


def test_a_tied_weight_counts_at_both_ends_and_embedding_and_head_are_no_matrices() -> None:
    sketch = Sketch()
    ids = sketch.field("ids", 3, dtype="int64")
    table = sketch.weight("table", 10, 8, positions=(0, 2))
    hidden = sketch.op("aten.embedding.default", table, ids, shape=(Size(1), 3, 8))
    places = sketch.op("aten.embedding.default", sketch.weight("places", 10, 8), ids, shape=(Size(1), 3, 8))
    hidden = sketch.op("aten.add.Tensor", hidden, places, shape=(Size(1), 3, 8))
    sketch.cut()
    inner = sketch.weight("inner", 8, 8, positions=(1,))
    frozen = sketch.weight("frozen", 8, 8, positions=(1,), is_trainable=False)
    filters = sketch.weight("row", 1, 8, positions=(1,))
    for weight in (inner, frozen, filters):
        hidden = sketch.op(MUL, hidden, sketch.op(LINEAR, hidden, weight, shape=(Size(1), 3, 8)))
    sketch.cut()
    blueprint = sketch.blueprint(sketch.op(LINEAR, hidden, table, shape=(Size(1), 3, 10)))
    profile = measure(blueprint, 1)
    assert profile.parameter_bytes == (640, 256 + 256 + 32, 320)
    assert (profile.frozen_bytes, profile.buffer_bytes) == ((0, 256, 0), ())
    assert profile.matrix_bytes == (0, 256, 0)
    assert find_matrices(blueprint) == {"inner"}
    assert find_matrices(two_layers()) == {"one"}


def test_a_head_with_one_output_is_the_head_and_the_layer_before_it_is_a_matrix() -> None:
    sketch = Sketch()
    hidden = sketch.field("x", 4)
    for name, size in (("first", 4), ("second", 8)):
        hidden = sketch.op(LINEAR, hidden, sketch.weight(name, 8, size), shape=(Size(1), 8))
    out = sketch.op(LINEAR, hidden, sketch.weight("head", 1, 8), shape=(Size(1), 1))
    assert find_matrices(sketch.blueprint(out)) == {"first", "second"}


def test_what_crosses_counts_as_float32_and_whole_numbers_as_they_are() -> None:
    sketch = Sketch()
    x, mask = sketch.field("x", 8, dtype="bfloat16"), sketch.field("mask", 8, dtype="bool")
    weight = sketch.weight("w", 8)
    half = sketch.op("aten.to.dtype", sketch.op(MUL, x, weight), "bfloat16", dtype="bfloat16")
    ids = sketch.op("aten.argmax.default", half, 1, shape=(Size(1),), dtype="int64")
    sketch.cut()
    chosen = sketch.op("aten.where.self", mask, half, x, dtype="bfloat16")
    sketch.op("aten.index_select.default", chosen, 1, ids, dtype="bfloat16")
    sketch.cut()
    label = sketch.field("y", 1, dtype="int64")
    loss = sketch.op("aten.gather.default", chosen, 1, label, shape=(Size(1), 1), dtype="bfloat16")
    crossing = measure(sketch.blueprint(loss), 10).crossing_bytes
    # The mask is of the batch too, though the first position does not use it.
    assert crossing == (10 * 8 * 4 + 10 * 8, 10 * 8 * 4 + 10 * 8, 10 * 8 * 4, 10 * 8)


def test_a_field_that_both_ends_use_is_input() -> None:
    sketch = Sketch()
    x = sketch.field("x", 8)
    hidden = sketch.op(MUL, x, sketch.weight("w", 8))
    sketch.cut()
    profile = measure(sketch.blueprint(sketch.op("aten.sub.Tensor", hidden, x)), 2)
    assert profile.crossing_bytes == (64, 64, 0)


def test_the_callers_gradient_mode_does_not_matter() -> None:
    with torch.no_grad():
        assert sum(measure(two_layers(), 5).backward_flops) > 0


def test_an_operation_on_one_value_is_not_taken_for_one_on_two() -> None:
    sketch = Sketch()
    value = sketch.op(MUL, sketch.field("x", 8), sketch.weight("w", 8))
    other = sketch.op(MUL, sketch.field("y", 8), sketch.weight("v", 8))
    both = sketch.op(MUL, value, value)
    sketch.cut()
    profile = measure(sketch.blueprint(sketch.op(MUL, other, both)), 1)
    assert profile.saved_bytes == (3 * 32, 2 * 32)


def test_literals_that_compare_equal_are_not_the_same() -> None:
    sketch = Sketch()
    ids = sketch.field("ids", 8, dtype="int64")
    whole = sketch.op("aten.mul.Scalar", ids, 2, dtype="int64")
    real = sketch.op("aten.mul.Scalar", ids, 2.0)
    weight = sketch.weight("w", 8)
    sketch.op(MUL, whole, weight)
    sketch.cut()
    profile = measure(sketch.blueprint(sketch.op(MUL, real, weight)), 1)
    assert profile.saved_bytes == (8 * 8, 8 * 4)


def test_a_change_in_place_keeps_the_memory_and_its_gradient() -> None:
    sketch = Sketch()
    weight = sketch.weight("w", 8, 8)
    hidden = sketch.op(LINEAR, sketch.field("x", 8), weight)
    changed = sketch.op("aten.relu_.default", hidden)
    sketch.cut()
    profile = measure(sketch.blueprint(sketch.op(LINEAR, changed, weight)), 2)
    assert profile.saved_bytes == (64 + 64, 0)
    assert profile.backward_flops[1] == 2 * profile.forward_flops[1]


def test_without_trained_parameters_nothing_is_saved() -> None:
    sketch = Sketch()
    x = sketch.field("x", 8)
    frozen = sketch.op(RELU, sketch.op(LINEAR, x, sketch.weight("w", 8, 8, is_trainable=False)))
    profile = measure(sketch.blueprint(frozen), 2)
    assert profile.forward_flops == (2 * 2 * 8 * 8,)
    assert (profile.backward_flops, profile.saved_bytes) == ((0,), (0,))


def test_a_deep_model_is_tried_once_per_kind_of_operation() -> None:
    trials = []

    class Counting(Trial):
        def __init__(self, op: Op, *rest: object) -> None:
            trials.append(op.name)
            super().__init__(op, *rest)

    sketch = Sketch()
    hidden = sketch.field("x", 8)
    for number in range(500):
        weight = sketch.weight(f"w{number}", 8, 8, positions=(number,))
        hidden = sketch.op(RELU, sketch.op(LINEAR, hidden, weight))
        sketch.cut()
    profile = measure(sketch.blueprint(sketch.op(SUM, hidden, shape=())), 2, Counting)
    assert trials == [LINEAR, RELU, LINEAR, SUM]
    assert profile.saved_bytes == (2 * 64, *[64] * 499, 0)
    assert set(profile.forward_flops[:-1]) == {2 * 2 * 8 * 8}


def test_a_fused_recurrent_layer_is_counted_by_its_weights() -> None:
    sketch = Sketch()
    x, state, cell = sketch.field("x", 6, 8), sketch.weight("h", 1, 3, 8), sketch.weight("c", 1, 3, 8)
    weights = (sketch.weight("ih", 32, 8), sketch.weight("hh", 32, 8))
    settings = (False, 1, 0.0, True, False, True)
    shape = (Size(1), 6, 8)
    out = sketch.op("aten.lstm.input", x, (state, cell), weights, *settings, shape=shape, num_unused=2)
    profile = measure(sketch.blueprint(out), 3)
    assert profile.forward_flops == (2 * (3 * 6) * 2 * 32 * 8,)
    assert profile.backward_flops == (2 * profile.forward_flops[0],)
    assert profile.saved_bytes[0] > 16 * 8 * 3 * 6 * 4


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.attention(self.norms[0](x)).view(batch, tokens, 3, self.num_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + functional.dropout(
            self.down(functional.gelu(self.up(self.norms[1](x)))), 0.1, self.training
        )


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.Sequential(Block(16, 2), Block(16, 2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(ids)))).flatten(0, 1)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.layers = nn.Sequential(*first, nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def loss(out: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(out, labels.flatten())


@pytest.fixture(scope="module", params=[Gpt, Convolutions])
def example(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[Tensor, Tensor], Captured]:
    model, ids = request.param(), torch.randint(50, (2, 4, 12))
    batch = (ids[0], ids[1]) if isinstance(model, Gpt) else (torch.randn(4, 3, 17, 17), ids[1, :, 0])
    return model, batch, capture(model, batch, loss, self_test=False)


def count() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=UNCOUNTED_BY_TORCH)


def test_flops_and_savings_are_those_of_the_module_itself(example: tuple) -> None:
    model, (x, labels), capture = example
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), count() as forward:
        result = loss(model(x), labels)
    with count() as backward:
        result.backward()
    profile = measure(capture.blueprint, 4)
    assert sum(profile.forward_flops) == forward.get_total_flops()
    assert sum(profile.backward_flops) == backward.get_total_flops()
    saved = sum(storage.nbytes() for name, storage in kept.items() if name not in own)
    assert sum(profile.saved_bytes) == pytest.approx(saved, rel=0.01)


def test_the_profile_grows_with_the_batch_but_the_parameters_do_not(example: tuple) -> None:
    small, large = (measure(example[2].blueprint, size) for size in (2, 6))
    assert small.parameter_bytes == large.parameter_bytes
    assert [3 * flops for flops in small.forward_flops] == list(large.forward_flops)
    assert [3 * flops for flops in small.backward_flops] == list(large.backward_flops)
    assert [3 * size for size in small.crossing_bytes] == list(large.crossing_bytes)
    assert sum(large.saved_bytes) == pytest.approx(3 * sum(small.saved_bytes), rel=0.01)


def test_attention_is_counted_as_torch_counts_it_on_other_devices() -> None:
    query, key = torch.Size((2, 3, 5, 8)), torch.Size((2, 3, 7, 8))
    forward = torch.utils.flop_counter.sdpa_flop_count(query, key, key)
    backward = torch.utils.flop_counter.sdpa_backward_flop_count(query, query, key, key)
    counted = {packet.__name__: formula for packet, formula in UNCOUNTED_BY_TORCH.items()}
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert counted[name](query, key, key, 0.0) == forward
    assert counted[f"{name}_backward"](query, query, key, key, 0.0) == backward


def test_what_is_not_trained_is_told_apart() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 8, bias=False).to(torch.bfloat16).requires_grad_(requires_grad=False)
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.base(x.to(torch.bfloat16)).float()).sum()

    captured = capture(Normed(), {"x": torch.randn(4, 8)}, lambda out, batch: out, self_test=False)
    profile = measure(captured.blueprint, 4)
    assert sum(profile.frozen_bytes) == 2 * 8 * 8  # as it is stored
    assert sum(profile.trained_bytes) == 4 * (8 + 8)
    assert sum(profile.buffer_bytes) == 4 * (8 + 8) + 8  # the mean, the variance, the number of batches


def test_what_is_trained_in_16_bits_counts_as_wide_as_its_sums_and_moments() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False).to(torch.bfloat16).requires_grad_(requires_grad=False)
            self.second = nn.Linear(8, 8, bias=False).to(torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x.to(torch.bfloat16))).float().sum()

    captured = capture(Narrow(), {"x": torch.randn(4, 8)}, lambda out, batch: out, self_test=False)
    profile = measure(captured.blueprint, 4)
    assert sum(profile.frozen_bytes) == 2 * 8 * 8
    assert sum(profile.trained_bytes) == 4 * 8 * 8


class Pooled(nn.Module):
    """Tokens, channels last, until a mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


@pytest.mark.parametrize(
    ("model", "shape", "is_known"),
    [
        (Pooled(), (32, 8), True),
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), (8,), False),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten()), (3, 9, 9), True),
        (nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 3), nn.Flatten()), (3, 99), False),
    ],
)
def test_a_blueprint_tells_whether_what_crosses_has_channels(
    model: nn.Module, shape: tuple[int, ...], is_known: bool
) -> None:
    batch = {"x": torch.randn(4, *shape), "y": torch.zeros(4)}
    found = capture(model, batch, lambda out, batch: out.square().mean(), inputs=["x"], self_test=False)
    assert has_channels(found.blueprint, 4) is is_known
