"""What a blueprint would take is known before anything runs, and too much is refused without taking it."""

import resource
from collections.abc import Mapping
from dataclasses import replace

import pytest

from ravnest.errors import UnsafeBlueprint
from ravnest.model.blueprint.aliasing import Storages
from ravnest.model.blueprint.program import (
    PARAMETER,
    Argument,
    Blueprint,
    Op,
    Program,
    Ratio,
    Ref,
    Size,
    StateEntry,
    TensorType,
    ValueId,
)
from ravnest.model.stage.dry_run import Footprint, dry_run
from ravnest.model.stage.op_costs import KernelLimits
from tests.support.sample_blueprints import perceptron

MANY_BYTES, MANY_FLOPS = 64e6, 1e9
# Operator, arguments, shapes of its results; None for a result that nobody reads.
Made = tuple[str, dict[str, Argument], list[tuple[int, ...] | None]]


def fly(blueprint: Blueprint, batch_size: int = 3, **kernels: int) -> Footprint:
    limits = KernelLimits(**kernels)
    return dry_run(blueprint, batch_size, max_bytes=MANY_BYTES, max_flops=MANY_FLOPS, kernels=limits)


def with_ops(*made: Made, dtypes: Mapping[int, str] = {}, which: str = "train") -> Blueprint:
    """Return the perceptron with operations before its first; results are numbered from 100."""
    blueprint = perceptron()
    program = getattr(blueprint, which)
    values = dict(program.values)
    ops, number = [], 100
    for name, arguments, shapes in made:
        outs: list[ValueId | None] = []
        for shape in shapes:
            outs.append(None if shape is None else ValueId(number))
            if shape is not None:
                values[ValueId(number)] = TensorType(dtypes.get(number, "float32"), shape)
            number += 1
        ops.append(Op(f"aten.{name}", tuple(arguments.items()), tuple(outs), 50))
    return replace(blueprint, **{which: replace(program, values=values, ops=(*ops, *program.ops))})


def ref(number: int) -> Ref:
    return Ref(ValueId(number))


def test_a_fair_blueprint_passes_and_its_needs_are_known() -> None:
    found = fly(perceptron(), batch_size=10)
    assert found.state_bytes == 4 * (8 * 4 + 8 + 3 * 8) + 8
    assert found.forward_flops == 2 * 10 * (8 * 4 + 3 * 8)
    parameter_bytes, hidden_bytes = 4 * (8 * 4 + 8 + 3 * 8), 4 * 10 * (8 + 8 + 8 + 3)
    assert found.activation_bytes >= hidden_bytes + parameter_bytes  # every parameter gets a gradient


def test_needs_grow_with_the_batch() -> None:
    assert fly(perceptron(), 20).activation_bytes > 1.9 * fly(perceptron(), 10).activation_bytes


def doubling(times: int) -> list[Made]:
    chain: list[Made] = [("zeros.default", {"size": (8,)}, [(8,)])]
    for step in range(times):
        twice = (ref(100 + step), ref(100 + step))
        chain.append(("cat.default", {"tensors": twice}, [(8 << (step + 1),)]))
    return chain


def zeros(*shape: int) -> Made:
    return ("zeros.default", {"size": shape}, [shape])


def expand(number: int, *shape: int) -> Made:
    return ("expand.default", {"self": ref(number), "size": shape}, [shape])


def reduce(number: int, name: str = "amax") -> Made:
    return (f"{name}.default", {"self": ref(number)}, [()])


def cut(name: str, **arguments: Argument) -> list[Made]:
    return [zeros(1 << 22), (name, {"self": ref(100), **arguments}, [(1,), (1,)])]


SQUARE = (1, 1, 4096, 4096)


def attend(mask: Made) -> list[Made]:
    """Return attention with a mask that is one number for all."""
    tensors = {"query": ref(100), "key": ref(100), "value": ref(100), "attn_mask": ref(102)}
    column = (1, 1, 4096, 1)
    return [
        zeros(*column),
        mask,
        expand(101, *SQUARE),
        ("scaled_dot_product_attention.default", tensors, [column]),
    ]


TRAINED_NUMBER: Made = ("select.int", {"self": ref(1), "dim": 0, "index": 0}, [()])
HUGE, LARGE = (1 << 40, 8), (1 << 21, 8)  # of the second, 64 MB hold all but one element per row
POOL: dict[str, Argument] = {"self": ref(101), "kernel_size": (2000, 2000), "stride": (1, 1)}


def multiplying(times: int) -> list[Made]:
    chain: list[Made] = [("ones.default", {"size": (1024, 1024)}, [(1024, 1024)])]
    return chain + [("mm.default", {"self": ref(100), "mat2": ref(100)}, [(1024, 1024)])] * times


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ([("zeros.default", {"size": (1 << 20, 1 << 20)}, [(1 << 20, 1 << 20)])], "over 64 MB"),
        (doubling(40), "over 64 MB"),
        (multiplying(4), "FLOPs"),
        ([("zeros.default", {"size": (4, 4)}, [(4, 5)])], "though it is said to be"),
        ([("mm.default", {"self": ref(0), "mat2": ref(0)}, [(8, 8)])], "torch refuses it"),
        ([("arange.default", {"end": 1 << 40}, [(1 << 40,)])], "over 64 MB"),
        ([("repeat.default", {"self": ref(1), "repeats": (1 << 40,)}, [(8 << 40,)])], "over 64 MB"),
        (
            [
                ("zeros.default", {"size": (1 << 22,)}, [(1 << 22,)]),
                ("split.Tensor", {"self": ref(100), "split_size": 1}, [(1,), (1,)]),
            ],
            "results, not 2",
        ),
        (
            [
                ("zeros.default", {"size": (1 << 22,)}, [(1 << 22,)]),
                ("unbind.int", {"self": ref(100)}, [(), ()]),
            ],
            "results, not 2",
        ),
        ([("split.Tensor", {"self": ref(1), "split_size": 0}, [(8,)])], "cannot cut"),
        ([("split.Tensor", {"self": ref(4), "split_size": 4, "dim": Size(1)}, [(3, 4)])], "cannot cut"),
        ([("unbind.int", {"self": 7}, [()])], "cannot cut"),
        (cut("chunk.default", chunks=1 << 22), "results, not 2"),
        (cut("split_with_sizes.default", split_sizes=(1,) * 4096), "results, not 2"),
        ([("meshgrid.default", {"tensors": (ref(1),) * 60}, [(8,)])], "results, not 1"),
        ([("meshgrid.default", {"tensors": (ref(1),) * 250}, [None] * 250)], "at most 64"),
        ([("view.default", {"self": ref(1), "size": (8, *[1] * 999)}, [(8,)])], "at most 64"),
        ([("broadcast_tensors.default", {"tensors": (ref(1),) * 4096}, [(8,)])], "results, not 1"),
        # Expanded views have no memory of their own, but who reads them works through all of them.
        ([zeros(1), expand(100, 1 << 43), reduce(101, "sum")], "elements"),
        ([expand(1, *HUGE), reduce(100)], "elements"),
        ([expand(1, *LARGE), reduce(100)], "over 64 MB"),
        (attend(TRAINED_NUMBER), "over 64 MB"),
        (
            [
                zeros(1),
                expand(100, 1, 1, 4000, 4000),
                ("avg_pool2d.default", POOL, [(1, 1, 2001, 2001)]),
            ],
            "elements",
        ),
        (
            [("add.Tensor", {"self": ref(1), "other": Ratio(Size(1), Size(1, -3))}, [(8,)])],
            "torch refuses it",
        ),
        (
            [
                ("zeros.default", {"size": (4096,)}, [(4096,)]),
                # The result is small, but what einsum makes on the way is not.
                ("einsum.default", {"equation": "a,b->", "tensors": (ref(100), ref(100))}, [()]),
                ("outer.default", {"self": ref(100), "vec2": ref(100)}, [(4096, 4096)]),
            ],
            "over 64 MB",
        ),
    ],
)
def test_what_takes_too_much_or_lies_is_refused_without_taking_it(made: list[Made], reason: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UnsafeBlueprint, match=reason):
        fly(with_ops(*made))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000, (
        "memory above the cap, in kB"
    )


@pytest.mark.parametrize("made", [[zeros(8), expand(100, *LARGE), reduce(101)], attend(zeros())])
def test_without_a_gradient_the_same_passes(made: list[Made]) -> None:
    fly(with_ops(*made))


def test_evaluation_has_no_backward() -> None:
    fly(with_ops(expand(1, *LARGE), reduce(100), which="evaluate"))
    with pytest.raises(UnsafeBlueprint, match="elements"):
        fly(with_ops(zeros(8), expand(100, *HUGE), reduce(101), which="evaluate"))


def test_gradients_that_wait_for_each_other_are_counted_together() -> None:
    views = [expand(1, 1 << 17, 8)] * 20  # 4 MB each
    fly(with_ops(*(op for number in range(20) for op in (views[0], reduce(100 + 2 * number)))))
    with pytest.raises(UnsafeBlueprint, match="over 64 MB"):
        fly(with_ops(*views, *(reduce(100 + number) for number in range(20))))


def test_memory_that_something_trained_is_written_into_has_a_gradient_under_any_name() -> None:
    write: Made = ("copy_.default", {"self": ref(100), "src": ref(1)}, [(8,)])
    with pytest.raises(UnsafeBlueprint, match="over 64 MB"):
        fly(with_ops(zeros(8), write, expand(100, *LARGE), reduce(102)))


def test_what_leaves_the_stage_counts_as_if_it_were_dense() -> None:
    blueprint = with_ops(zeros(1), expand(100, 1 << 40))
    for ends in ({"outputs": (ValueId(101),)}, {"results": (("metric", ValueId(101)),)}):
        with pytest.raises(UnsafeBlueprint, match="over 64 MB"):
            fly(replace(blueprint, train=replace(blueprint.train, **ends)))


DIVISIONS = {
    "div": ("Scalar_mode", "Tensor_mode"),
    "floor_divide": ("Scalar", "default"),
    "remainder": ("Scalar", "Tensor"),
    "fmod": ("Scalar", "Tensor"),
}


@pytest.mark.parametrize("other", [0, -1, True, False, ref(5), Size(0, -1), Size(-1, 3)])
@pytest.mark.parametrize("name", DIVISIONS)
def test_whole_numbers_are_divided_by_safe_numbers_only(name: str, other: Argument) -> None:
    def divide(under: Argument) -> Blueprint:
        arguments: dict[str, Argument] = {"self": ref(5), "other": under}
        mode: dict[str, Argument] = {"rounding_mode": "floor"} if name == "div" else {}
        overload = DIVISIONS[name][isinstance(under, Ref)]
        return with_ops((f"{name}.{overload}", arguments | mode, [(3,)]), dtypes={100: "int64"})

    fly(divide(3))
    fly(divide(Size(1)))
    with pytest.raises(UnsafeBlueprint, match="whole numbers"):
        fly(divide(other))


def test_real_numbers_are_divided_by_anything() -> None:
    # It has no derivative, which matters only to who asks for it.
    fly(with_ops(("floor_divide.default", {"self": ref(1), "other": ref(1)}, [(8,)])))
    fly(with_ops(("remainder.Scalar", {"self": ref(5), "other": -1.0}, [(3,)])))
    true_division: dict[str, Argument] = {"self": ref(5), "other": ref(5), "rounding_mode": None}
    fly(with_ops(("div.Tensor_mode", true_division, [(3,)])))


def scaling(*factors: float) -> list[Made]:
    return [("mul.Scalar", {"self": ref(1), "other": factor}, [(8,)]) for factor in factors]


def test_looking_through_different_operations_is_bounded() -> None:
    fly(with_ops(*scaling(*[2.0] * 100)), tried=400)
    with pytest.raises(UnsafeBlueprint, match="too many different operations"):
        fly(with_ops(*scaling(*range(100))), tried=400)


def test_the_number_of_kernels_is_bounded() -> None:
    with pytest.raises(UnsafeBlueprint, match="more than 100 kernels"):
        fly(with_ops(*scaling(*[2.0] * 100)), per_batch=100)
    with pytest.raises(UnsafeBlueprint, match="more than 10 kernels"):
        fly(with_ops(("broadcast_tensors.default", {"tensors": (ref(1),) * 20}, [(8,)] * 20)), per_op=10)


@pytest.mark.parametrize("shape", [(0, 1 << 48, 1 << 48), (Size(1 << 45), Size(1 << 45)), (Size(1, -5),)])
def test_given_shapes_that_torch_cannot_even_name_are_refused(shape: tuple[int | Size, ...]) -> None:
    blueprint = perceptron()
    values = dict(blueprint.train.values) | {ValueId(4): TensorType("float32", shape)}
    with pytest.raises(UnsafeBlueprint, match="does not fit"):
        fly(replace(blueprint, train=replace(blueprint.train, values=values)))


def test_a_long_chain_of_shared_memory_stays_short_to_follow() -> None:
    made = [zeros(8)] * 1000
    for number in range(1000):
        tensors = (ref(1), ref(100 + number))
        made.append(("einsum.default", {"equation": "a,a->a", "tensors": tensors}, [(8,)]))
    parents = Storages(with_ops(*made).train)._parent
    value, depth = ValueId(1), 0
    while parents.get(value, value) != value:
        value, depth = parents[value], depth + 1
    assert depth < 30


def test_state_larger_than_allowed_is_refused() -> None:
    blueprint = perceptron()
    huge = replace(blueprint.state[0], shape=(1 << 30, 4))
    with pytest.raises(UnsafeBlueprint, match="the state takes"):
        fly(replace(blueprint, state=(huge, *blueprint.state[1:])))


def recurrent(name: str = "lstm", num_steps: int = 5, **changes: object) -> Blueprint:
    """Return one layer over (batch, steps, 4) with a state of 8; `changes` alter its arguments or shapes."""
    num_rows = {"lstm": 32, "gru": 24, "rnn_tanh": 8}[name]
    fair = {
        "weight_ih": (num_rows, 4),
        "weight_hh": (num_rows, 8),
        "bias_ih": (num_rows,),
        "bias_hh": (num_rows,),
    }
    shapes = fair | {k: v for k, v in changes.items() if k in fair}
    first_state = changes.get("hx_shape", (1, Size(1), 8))
    values = {ValueId(number): TensorType("float32", shape) for number, shape in enumerate(shapes.values())}
    values |= {
        ValueId(4): TensorType("float32", (Size(1), num_steps, 4)),
        ValueId(5): TensorType("float32", first_state),
    }
    values |= {
        ValueId(6): TensorType("float32", (Size(1), num_steps, 8)),
        ValueId(7): TensorType("float32", ()),
    }
    arguments: dict[str, Argument] = {
        "input": ref(4),
        "hx": (ref(5), ref(5)) if name == "lstm" else ref(5),
        "params": tuple(ref(number) for number in range(4)),
        "has_biases": True,
        "num_layers": 1,
        "dropout": 0.0,
        "train": True,
        "bidirectional": False,
        "batch_first": True,
    } | {k: v for k, v in changes.items() if k not in shapes and k != "hx_shape"}
    outs = (ValueId(6), *[None] * (2 if name == "lstm" else 1))
    program = Program(
        values=values,
        inputs=(),
        fields=((ValueId(4), "x"),),
        state=tuple((ValueId(number), name) for number, name in enumerate(shapes)),
        ops=(
            Op("aten.zeros.default", (("size", tuple(first_state)),), (ValueId(5),), 0),
            Op(f"aten.{name}.input", tuple(arguments.items()), outs, 1),
            Op("aten.mean.default", (("self", ref(6)),), (ValueId(7),), 2),
        ),
        outputs=(),
        results=(("loss", ValueId(7)),),
    )
    state = tuple(
        StateEntry(name, PARAMETER, "float32", shape, (0,), is_trainable=True)
        for name, shape in shapes.items()
    )
    return Blueprint("lstm", 1, 0, 1, ((0, 0), (3, 3)), state, (), program, program)


def test_a_fair_recurrent_layer_passes() -> None:
    assert fly(recurrent()).forward_flops == 2 * 3 * 5 * (32 * 4 + 32 * 8)


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
def test_a_long_sequence_is_not_unrolled_but_counted(name: str) -> None:
    short, long = fly(recurrent(name), per_op=300), fly(recurrent(name, num_steps=4000), per_op=300)
    assert long.forward_flops == 800 * short.forward_flops
    assert 800 * short.activation_bytes > long.activation_bytes > 4 * 3 * 4000 * (4 + 8)
    with pytest.raises(UnsafeBlueprint, match=r"over 64 MB|kernels"):
        fly(recurrent(name, num_steps=400_000), per_op=300)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_ih": (32, 5)},
        {"weight_hh": (8, 32)},
        {"bias_ih": (31,)},
        {"num_layers": 2},
        {"num_layers": 0},
        {"num_layers": 1 << 40},
        {"bidirectional": True},
        {"has_biases": False},
        {"batch_first": False},
        {"hx_shape": (1, Size(1), 9)},
        {"hx_shape": (2, Size(1), 8)},
        {"hx": (ref(5),)},
        {"params": (ref(0), ref(1))},
        {"input": 7},
        {"hx": (7, ref(5))},
        {"num_layers": Size(1)},
    ],
)
def test_a_recurrent_layer_with_wrong_shapes_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UnsafeBlueprint, match=r"aten\.lstm\.input"):
        fly(recurrent(**changes))
