"""Blueprints read back unchanged; whatever else the bytes are, they are refused with UnsafeBlueprint."""

import json
import math
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.errors import UnsafeBlueprint
from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
from ravnest.model.blueprint.operators import operators
from ravnest.model.blueprint.program import (
    FLOATING,
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
from ravnest.protocol.tensors import ITEM_BYTES
from tests.support.sample_blueprints import middle_stage, perceptron

LIMIT = 2**48
WHOLE = st.integers(-LIMIT, LIMIT)
NAMES = st.from_regex(r"[a-z0-9][A-Za-z0-9_]{0,6}(\.[a-z0-9][A-Za-z0-9_]{0,6}){0,2}", fullmatch=True)
DTYPES = st.sampled_from(sorted(ITEM_BYTES))
SIZES = st.builds(Size, WHOLE, WHOLE)
RATIOS = st.builds(Ratio, SIZES, st.builds(Size, st.integers(0, 9), st.integers(1, 9)))
FLOATS = st.floats(allow_nan=False) | st.just(math.nan)
SHAPES = st.lists(st.integers(0, 40) | st.builds(Size, st.integers(1, 9), st.integers(0, 9)), max_size=4)
PLAIN = {
    "int": WHOLE | SIZES | st.sampled_from([2**63 - 1, -(2**63)]),
    "float": FLOATS | WHOLE | RATIOS,
    "Scalar": FLOATS | WHOLE | st.booleans() | SIZES | RATIOS,
    "bool": st.booleans(),
    "ScalarType": DTYPES,
    "MemoryFormat": st.sampled_from(["contiguous_format", "preserve_format", "channels_last"]),
    **dict.fromkeys(["Device", "Layout", "Generator"], st.none()),
}
WORDS = {"equation": "bi,ij->bj", "mode": "reflect", "rounding_mode": "floor", "approximate": "tanh"}
WORDS |= {"padding": "same", "indexing": "ij"}


@st.composite
def arguments(draw, parameter, defined):
    if parameter.is_optional and draw(st.booleans()):
        return None
    if parameter.name == "pin_memory":
        return None
    if parameter.type == "str":
        one = st.just(WORDS[parameter.name])
    elif parameter.type == "Tensor":
        one = st.sampled_from(defined).map(Ref)
        if not (parameter.is_list or parameter.alias or parameter.is_written):
            one |= PLAIN["Scalar"]
        if parameter.is_item_optional:
            one |= st.none()
    else:
        one = PLAIN[parameter.type]
    if not parameter.is_list:
        return draw(one)
    return tuple(draw(st.lists(one, min_size=parameter.length or 0, max_size=parameter.length or 3)))


@st.composite
def programs(draw, state, is_last):
    ids = iter(draw(st.lists(st.integers(0, 2**31 - 1), min_size=40, max_size=40, unique=True)))
    values = {}

    def new(dtype=None, shape=None):
        value = ValueId(next(ids))
        dtype = dtype or draw(DTYPES)
        shape = tuple(draw(SHAPES)) if shape is None else shape
        values[value] = TensorType(dtype, shape, dtype in FLOATING and draw(st.booleans()))
        return value

    inputs = () if is_last else (new(),)
    fields = tuple((new(), name) for name in draw(st.sampled_from([("x",), ("x", "y"), ("input_ids", "x1")])))
    held = tuple((new(entry.dtype, entry.shape), entry.name) for entry in state)
    ops = []
    for number in range(draw(st.integers(1, 4))):
        operator = operators()[draw(st.sampled_from(sorted(operators())))]
        defined = sorted(values)
        wanted = [p for p in operator.parameters if not p.has_default or draw(st.booleans())]
        chosen = tuple((p.name, draw(arguments(p, defined))) for p in wanted)
        outs = tuple(draw(st.sampled_from([None, new])) for _ in range(operator.num_returns or 2))
        precision = draw(st.sampled_from(["", "full", "bfloat16", "float16"]))
        ops.append(Op(operator.name, chosen, tuple(out and out() for out in outs), number, precision))
    loss = (("loss", new("float32", ())),) if is_last else ()
    if is_last:
        ops.append(Op("aten.sum.default", (("self", Ref(fields[0][0])),), (loss[0][1],), 9))
    outputs = (
        () if is_last else tuple(draw(st.lists(st.sampled_from(sorted(values)), max_size=3, unique=True)))
    )
    return Program(values, inputs, fields, held, tuple(ops), outputs, loss)


@st.composite
def blueprints(draw):
    is_last = draw(st.booleans())
    num_positions = draw(st.integers(3, 9))
    start, stop = (0, num_positions) if is_last else (1, draw(st.integers(2, num_positions - 1)))
    names = draw(st.lists(NAMES, max_size=4, unique=True))
    state = tuple(draw(entries(name, num_positions)) for name in names[1:])
    aliases = ((names[0], names[-1]),) if len(names) > 1 else ()
    train, evaluate = draw(programs(state, is_last)), draw(programs(state, is_last))
    inner = sorted(draw(st.integers(0, len(train.ops))) for _ in range(stop - start - 1))
    other = sorted(draw(st.integers(0, len(evaluate.ops))) for _ in range(stop - start - 1))
    cuts = ((0, 0), *zip(inner, other, strict=True), (len(train.ops), len(evaluate.ops)))
    name = draw(st.sampled_from(["", "GPT-2 (124M)", "Größe", "a/b.c"]))
    return Blueprint(name, num_positions, start, stop, cuts, state, aliases, train, evaluate)


@st.composite
def entries(draw, name, num_positions):
    kind, dtype = draw(st.sampled_from(["parameter", "buffer", "constant"])), draw(DTYPES)
    shape = tuple(draw(st.lists(st.integers(0, 99), max_size=3)))
    positions = tuple(sorted(draw(st.sets(st.integers(0, num_positions - 1), min_size=1))))
    is_trainable = kind == "parameter" and dtype in FLOATING and draw(st.booleans())
    return StateEntry(name, kind, dtype, shape, positions, is_trainable, draw(st.booleans()))


@given(blueprints())
def test_what_is_written_reads_back_unchanged(blueprint):
    data = write_blueprint(blueprint)
    again = read_blueprint(data)
    assert again == blueprint
    assert write_blueprint(again) == data


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_junk_is_refused(data):
    with pytest.raises(UnsafeBlueprint):
        read_blueprint(data)


SAMPLES = [write_blueprint(perceptron()), write_blueprint(middle_stage())]


def outcome(data):
    """Whether it was read; what is read must be stable, and what is refused fit for a log."""
    try:
        blueprint = read_blueprint(data)
    except UnsafeBlueprint as problem:
        message = str(problem)
        assert message.isprintable()
        assert len(message) < 400
        return False
    assert read_blueprint(write_blueprint(blueprint)) == blueprint
    return True


def flipped(good, rng):
    data = bytearray(good)
    for _ in range(rng.randint(1, 8)):
        # Half of them are bytes that occur in blueprints, to get past the JSON parser more often.
        data[rng.randrange(len(data))] = rng.choice([rng.randrange(256), rng.choice(good)])
    return bytes(data)


def test_flipped_bytes_are_read_or_refused():
    rng = random.Random(0)
    read = sum(outcome(flipped(good, rng)) for good in SAMPLES for _ in range(2_000))
    assert 0 < read < 400


def test_changed_digits_are_read_or_refused():
    """Still JSON, so that it is the reader of blueprints that must notice."""
    rng, read = random.Random(2), 0
    for good in SAMPLES:
        digits = [index for index, byte in enumerate(good) if byte in b"0123456789"]
        for _ in range(600):
            data = bytearray(good)
            for index in rng.sample(digits, rng.randint(1, 3)):
                data[index] = rng.choice(b"123456789")
            read += outcome(bytes(data))
    assert 50 < read < 1_000


def test_a_truncated_blueprint_is_refused():
    for good in SAMPLES:
        assert not any(outcome(good[:end]) for end in range(len(good)))


ADVERSARIAL = [
    *("-1", "2147483648", "9223372036854775807", "-9223372036854775809", "1e400", "-1e400", "0.1", "-0.0"),
    *("null", "[]", "{}", "true", "false", '""', '"nan"', '"__class__"', '"\\ud800"', '"\\u0000"'),
    *("[[[[1]]]]", '{"batch":[1,0]}', '{"batch":[281474976710656,1]}', '{"ratio":[1,0,0,0]}'),
    *('{"number":1}', "9" * 5_000, "1" * 400 + ".0", '"' + "x" * 5_000 + '"', "[" + "0," * 5_000 + "0]"),
]


def slots(value):
    """Yield every (container, key) of a document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in pairs:
        yield value, key
        yield from slots(part)


def test_adversarial_literals_in_every_slot_are_read_or_refused():
    rng = random.Random(1)
    for good in SAMPLES:
        document = json.loads(good)
        for place, key in list(slots(document)):
            kept, place[key] = place[key], "SLOT"
            text = json.dumps(document)
            place[key] = kept
            for literal in rng.sample(ADVERSARIAL, 8):
                outcome(text.replace('"SLOT"', literal, 1).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"[" + b"[]," * 690_000 + b"1]",
        b"[" + b"1.5," * 500_000 + b"1]",
        b'["' + b"x" * 2_000_000 + b'"]',
        b'{"' + b"\\u0041" * 330_000 + b'":1}',
        b"[" * 1_000_000 + b"]" * 1_000_000,
        b'["]",' * 400_000,
    ],
    ids=["lists", "floats", "text", "escapes", "deep", "hidden depth"],
)
def test_two_megabytes_of_malice_need_little_memory(data):
    tracemalloc.start()
    try:
        assert not outcome(data)
        assert tracemalloc.get_traced_memory()[1] < 40 * len(data)
    finally:
        tracemalloc.stop()
