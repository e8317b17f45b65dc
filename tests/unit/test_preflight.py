"""What a blueprint would take is known before anything runs, and too much is refused without taking it."""

import resource
from dataclasses import replace

import pytest

from ravnest.errors import UnsafeBlueprint
from ravnest.model.blueprint import (
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
)
from ravnest.model.preflight import Footprint, preflight
from tests.support.sample_blueprints import perceptron

MANY_BYTES, MANY_FLOPS = 64e6, 1e9
Made = tuple[str, dict[str, Argument], list[tuple[int, ...]]]  # operator, arguments, shapes of its results


def fly(blueprint: Blueprint, batch_size: int = 3) -> Footprint:
    return preflight(blueprint, batch_size, max_bytes=MANY_BYTES, max_flops=MANY_FLOPS)


def with_ops(*made: Made) -> Blueprint:
    """Return the perceptron with operations before its first; results are numbered from 100."""
    blueprint = perceptron()
    values = dict(blueprint.train.values)
    ops, number = [], 100
    for name, arguments, shapes in made:
        outs = [ValueId(number + index) for index in range(len(shapes))]
        values |= {out: TensorType("float32", shape) for out, shape in zip(outs, shapes, strict=True)}
        ops.append(Op(f"aten.{name}", tuple(arguments.items()), tuple(outs), 50))
        number += len(shapes)
    train = replace(blueprint.train, values=values, ops=(*ops, *blueprint.train.ops))
    return replace(blueprint, train=train)


def ref(number: int) -> Ref:
    return Ref(ValueId(number))


def test_a_fair_blueprint_passes_and_its_needs_are_known() -> None:
    found = fly(perceptron(), batch_size=10)
    assert found.state_bytes == 4 * (8 * 4 + 8 + 3 * 8) + 8
    assert found.forward_flops == 2 * 10 * (8 * 4 + 3 * 8)
    assert found.activation_bytes >= 4 * 10 * (8 + 8 + 8 + 3)


def test_needs_grow_with_the_batch() -> None:
    assert fly(perceptron(), 20).activation_bytes > 1.9 * fly(perceptron(), 10).activation_bytes


def doubling(times: int) -> list[Made]:
    chain: list[Made] = [("zeros.default", {"size": (8,)}, [(8,)])]
    for step in range(times):
        twice = (ref(100 + step), ref(100 + step))
        chain.append(("cat.default", {"tensors": twice}, [(8 << (step + 1),)]))
    return chain


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


def test_state_larger_than_allowed_is_refused() -> None:
    blueprint = perceptron()
    huge = replace(blueprint.state[0], shape=(1 << 30, 4))
    with pytest.raises(UnsafeBlueprint, match="the state takes"):
        fly(replace(blueprint, state=(huge, *blueprint.state[1:])))


LSTM_STATE = (
    ("weight_ih", (32, 4)),
    ("weight_hh", (32, 8)),
    ("bias_ih", (32,)),
    ("bias_hh", (32,)),
)


def recurrent(**changes: object) -> Blueprint:
    """Return one LSTM layer over (batch, 5, 4) with a state of 8; `changes` alter its arguments or shapes."""
    shapes = dict(LSTM_STATE) | {k: v for k, v in changes.items() if k in dict(LSTM_STATE)}
    first_state = changes.get("hx_shape", (1, Size(1), 8))
    values = {ValueId(number): TensorType("float32", shape) for number, shape in enumerate(shapes.values())}
    values |= {
        ValueId(4): TensorType("float32", (Size(1), 5, 4)),
        ValueId(5): TensorType("float32", first_state),
    }
    values |= {ValueId(6): TensorType("float32", (Size(1), 5, 8)), ValueId(7): TensorType("float32", ())}
    arguments: dict[str, Argument] = {
        "input": ref(4),
        "hx": (ref(5), ref(5)),
        "params": tuple(ref(number) for number in range(4)),
        "has_biases": True,
        "num_layers": 1,
        "dropout": 0.0,
        "train": True,
        "bidirectional": False,
        "batch_first": True,
    } | {k: v for k, v in changes.items() if k not in shapes and k != "hx_shape"}
    program = Program(
        values=values,
        inputs=(),
        fields=((ValueId(4), "x"),),
        state=tuple((ValueId(number), name) for number, name in enumerate(shapes)),
        ops=(
            Op("aten.zeros.default", (("size", tuple(first_state)),), (ValueId(5),), 0),
            Op("aten.lstm.input", tuple(arguments.items()), (ValueId(6), None, None), 1),
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
    ],
)
def test_a_recurrent_layer_with_wrong_shapes_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UnsafeBlueprint, match=r"aten\.lstm\.input"):
        fly(recurrent(**changes))
