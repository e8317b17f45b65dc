"""Small blueprints written by hand: a two-layer perceptron with dropout, whole or one stage of it."""

from ravnest.model.blueprint.program import (
    BUFFER,
    PARAMETER,
    Blueprint,
    Op,
    Program,
    Ref,
    Size,
    StateEntry,
    TensorType,
    ValueId,
)

BATCH = Size(1)
STATE = (
    StateEntry("body.0.weight", PARAMETER, "float32", (8, 4), (0,), is_trainable=True),
    StateEntry("body.0.bias", PARAMETER, "float32", (8,), (0,), is_trainable=True),
    StateEntry("head.weight", PARAMETER, "float32", (3, 8), (1,), is_trainable=True),
    StateEntry("seen", BUFFER, "int64", (), (1,), is_written=True),
)
ROWS = {
    0: TensorType("float32", (8, 4), True),
    1: TensorType("float32", (8,), True),
    2: TensorType("float32", (3, 8), True),
    3: TensorType("int64", ()),
    4: TensorType("float32", (BATCH, 4)),
    5: TensorType("int64", (BATCH,)),
    6: TensorType("float32", (BATCH, 8), True),
    7: TensorType("float32", (BATCH, 8), True),
    8: TensorType("float32", (BATCH, 8), True),
    9: TensorType("int64", ()),
    10: TensorType("float32", (BATCH, 3), True),
    11: TensorType("float32", (), True),
}


def ref(number: int) -> Ref:
    return Ref(ValueId(number))


def make(name: str, number: int, out: int | None, **arguments) -> Op:
    outs = (None if out is None else ValueId(out),)
    return Op(f"aten.{name}", tuple(arguments.items()), outs, number)


def perceptron_program(is_training: bool) -> Program:
    """Linear, relu, dropout; count the batch; linear, cross entropy."""
    ops = (
        make("linear.default", 0, 6, input=ref(4), weight=ref(0), bias=ref(1)),
        make("relu.default", 1, 7, self=ref(6)),
        make("dropout.default", 2, 8, input=ref(7), p=0.1, train=is_training),
        make("add_.Tensor", 3, 9, self=ref(3), other=1),
        make("linear.default", 4, 10, input=ref(8), weight=ref(2)),
        make("cross_entropy_loss.default", 5, 11, self=ref(10), target=ref(5), reduction=1),
    )
    return Program(
        values={ValueId(number): kind for number, kind in ROWS.items()},
        inputs=(),
        fields=((ValueId(4), "x"), (ValueId(5), "y")),
        state=tuple((ValueId(number), entry.name) for number, entry in enumerate(STATE)),
        ops=ops,
        outputs=(),
        results=(("loss", ValueId(11)),),
    )


def perceptron() -> Blueprint:
    """The whole line of two positions."""
    return Blueprint(
        name="perceptron",
        num_positions=2,
        start=0,
        stop=2,
        cuts=((0, 0), (3, 3), (6, 6)),
        state=STATE,
        aliases=(("output.weight", "head.weight"),),
        train=perceptron_program(True),
        evaluate=perceptron_program(False),
    )


def middle_stage() -> Blueprint:
    """One activation of a longer line: a value comes in, one goes out, and the input passes through too."""
    program = Program(
        values={ValueId(number): ROWS[number] for number in (6, 7)},
        inputs=(ValueId(6),),
        fields=(),
        state=(),
        ops=(make("relu.default", 1, 7, self=ref(6)),),
        outputs=(ValueId(6), ValueId(7)),
        results=(),
    )
    return Blueprint("middle", 3, 1, 2, ((0, 0), (1, 1)), (), (), program, program)


def long_perceptron(num_layers: int) -> Blueprint:
    """A line of one position with many layers of the same weight, to measure how long reading takes."""
    values = {ValueId(number): ROWS[number] for number in (0, 1)}
    values[ValueId(2)] = TensorType("float32", (BATCH, 8), True)
    ops = []
    for index in range(num_layers):
        number = 3 + 2 * index
        values[ValueId(number)] = values[ValueId(number + 1)] = ROWS[6]
        weight = {"weight": ref(0), "bias": ref(1)}
        ops.append(make("linear.default", 2 * index, number, input=ref(number - 1), **weight))
        shape = (BATCH, 8)
        ops.append(make("view.default", 2 * index + 1, number + 1, self=ref(number), size=shape))
    last = 3 + 2 * num_layers
    values[ValueId(last)] = ROWS[11]
    ops.append(make("mean.default", 2 * num_layers, last, self=ref(last - 1), dtype="float32"))
    program = Program(
        values=values,
        inputs=(),
        fields=((ValueId(2), "x"),),
        state=((ValueId(0), "body.0.weight"), (ValueId(1), "body.0.bias")),
        ops=tuple(ops),
        outputs=(),
        results=(("loss", ValueId(last)),),
    )
    count = len(ops)
    return Blueprint("long", 1, 0, 1, ((0, 0), (count, count)), STATE[:2], (), program, program)
