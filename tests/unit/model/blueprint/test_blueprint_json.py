"""Blueprint bytes: what reads, and one sentence for each way in which a stranger's file is refused."""

import json
from dataclasses import replace

import pytest

from ravnest.errors import UnsafeBlueprint
from ravnest.model.blueprint.blueprint_json import MOST_BYTES, MOST_OPS, read_blueprint, write_blueprint
from ravnest.model.blueprint.program import Op, ValueId
from tests.support.sample_blueprints import long_perceptron, middle_stage, perceptron, ref

GOOD = write_blueprint(perceptron())
MIDDLE = write_blueprint(middle_stage())


def refusal(data):
    with pytest.raises(UnsafeBlueprint) as caught:
        read_blueprint(data)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 400
    return message


def changed(path, value, good=GOOD):
    document = json.loads(good)
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(document).encode()


def with_op(name, arguments, outs=(6,)):
    """The perceptron with its first operation of training replaced."""
    return changed(("train", "ops", 0), [name, arguments, list(outs), 0])


@pytest.mark.parametrize(
    "blueprint", [perceptron(), middle_stage(), long_perceptron(3)], ids=lambda b: b.name
)
def test_what_is_written_reads_back(blueprint):
    data = write_blueprint(blueprint)
    assert read_blueprint(data) == blueprint
    assert write_blueprint(read_blueprint(data)) == data


def test_the_order_of_values_does_not_change_the_bytes():
    blueprint = perceptron()
    values = dict(reversed(blueprint.train.values.items()))
    assert write_blueprint(replace(blueprint, train=replace(blueprint.train, values=values))) == GOOD


def test_precision_is_kept():
    blueprint = perceptron()
    ops = tuple(replace(op, precision="bfloat16") for op in blueprint.train.ops)
    blueprint = replace(blueprint, train=replace(blueprint.train, ops=ops))
    assert read_blueprint(write_blueprint(blueprint)) == blueprint


GIVEN = {"input": 4, "weight": 0, "bias": 1}
NOT_ALLOWED = "is not on the list of allowed operations"


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "torch.ops.aten.linear.default",
        "aten.from_file.default",
        "aten.as_strided.default",
        "aten.set_.source_Storage",
        "aten.empty.memory_format",
        "aten.linear.default.__class__.__base__.__subclasses__",
        "aten.__class__.__init__",
        "aten::linear",
        "quantized.linear_prepack",
        "",
    ],
)
def test_only_listed_operations(name):
    assert NOT_ALLOWED in refusal(with_op(name, GIVEN))


@pytest.mark.parametrize("name", [7, None, ["aten.linear.default"]])
def test_the_name_of_an_operation_is_text(name):
    assert f"train.ops[0].name is {name!r}; expected str" in refusal(with_op(name, GIVEN))


def test_the_message_names_program_number_and_operation():
    message = refusal(changed(("evaluate", "ops", 2, 0), "aten.from_file.default"))
    assert message == f"evaluate: operation 2 'aten.from_file.default' {NOT_ALLOWED}"


@pytest.mark.parametrize(
    ("path", "value", "fragment"),
    [
        (("format",), "ravnest.blueprint/2", "reads 'ravnest.blueprint/1'"),
        (("format",), [], "the format is []"),
        (("name",), "x\x1bc\x07", "name is 'x\\x1bc\\x07'; only letters"),
        (("name",), 3, "name is 3; only letters"),
        (("num_positions",), 0, "num_positions is 0"),
        (("num_positions",), 10**6, "num_positions is 1000000"),
        (("stop",), 3, "stop is 3"),
        (("start",), 2, "start is 2"),
        (("start",), True, "start is True"),
        (("cuts",), [[0, 0], [6, 6]], "cuts has 2 entries"),
        (("cuts",), [[0, 0], [7, 3], [6, 6]], "they must ascend"),
        (("cuts",), [[0, 0], [3, 3], [6, 5]], "from (0, 0) to (6, 6)"),
        (("cuts", 1), [3], "cuts[1] is [3]; expected array of length 2"),
        (("state", 0, 0), "x.__class__.__init__", "state[0].name is 'x.__class__.__init__'"),
        (("state", 0, 0), 'x");__import__("os").system("id")#', "state[0].name is "),
        (("state", 0, 0), "a..b", "state[0].name is "),
        (("state", 0, 0), "a" * 257, "state[0].name is "),
        (("state", 0, 0), "head.weight", "state has 'head.weight' twice"),
        (("state", 0, 1), "hook", "state[0].kind is 'hook'; choose one of"),
        (("state", 0, 2), "object", "state[0].dtype is 'object'; choose one of"),
        (("state", 0, 3), [-1, 4], "state[0].shape[0] is -1; expected int >= 0"),
        (("state", 0, 3), [1] * 17, "17 dimensions"),
        (("state", 0, 3), [2**24, 2**24], "more than 70368744177664 bytes"),
        (("state", 0, 3), [9, 4], "differs in dtype or shape from 'body.0.weight'"),
        (("state", 0, 4), [2], "a position of state"),
        (("state", 0, 4), [], "one at least"),
        (("state", 0, 4), [1, 0], "must be ascending"),
        (("state", 0, 5), 1, "state[0].is_trainable is 1; write true or false"),
        (("state", 3, 5), True, "only floating parameters are trainable"),
        (("state", 0, 1), "buffer", "is a buffer of float32; only floating parameters are trainable"),
        (("state", 0), ["x"], "state[0] is ['x']; expected array of at least length 7, got 1"),
        (("aliases", 0, 1), "nowhere", "does not lead from a new name to a state entry"),
        (("aliases", 0, 0), "seen", "does not lead from a new name"),
        (("aliases", 0, 0), "import os", "aliases[0][0] is 'import os'; only letters"),
        (("aliases",), [["a", "seen"], ["a", "seen"]], "aliases has 'a' twice"),
        (("train",), [], "train is []; expected object"),
        (("train", "values", 4), [4, "float32", [{"batch": [-1, 9]}, 4], False], "sizes are not negative"),
        (("train", "values", 4), [4, "float32", [{"batch": [1, -2]}, 4], False], "sizes are not negative"),
        (("train", "values", 4), [4, "float32", [{"batch": [2**47, 0]}], False], "bytes per sample"),
        (("train", "values", 4), [4, "float32", [1] * 17, False], "17 dimensions"),
        (("train", "values", 5, 3), True, "value 5: it is of int64 and cannot have a gradient"),
        (("train", "values", 5, 0), 4, "value 4 is described twice"),
        (
            ("train", "values", 5, 0),
            2**31,
            "train.values[5].number is 2147483648; expected int <= 2147483647",
        ),
        (("train", "values", 5, 0), 77, "value 5 is not among 'values'"),
        (("train", "fields", 0, 1), "a.b", "train.fields[0][1] is 'a.b'; only letters"),
        (("train", "fields", 1, 1), "x", "fields has 'x' twice"),
        (("train", "fields", 0, 0), 0, "value 0 is defined twice"),
        (("train", "state", 0, 1), "nowhere", "'nowhere', which is not in the state"),
        (("train", "state", 0, 1), ["seen"], "train.state[0][1] is ['seen']; expected str"),
        (("train", "state", 0), [0, "body.0.bias"], "differs in dtype or shape"),
        (("train", "inputs"), [6], "value 6 is defined twice"),
        (("train", "outputs"), [8], "the last stage has outputs"),
        (("train", "outputs"), [99], "value 99 in outputs is never defined"),
        (("train", "outputs"), [8, 8], "outputs has 8 twice"),
        (("train", "results"), [], "no result named 'loss'"),
        (("train", "results", 0, 1), 10, "the loss is a float32 of 2 dimensions"),
        (("train", "results", 0, 1), 9, "the loss is a int64 of 0 dimensions"),
        (("train", "results"), [["loss", 11], ["loss", 11]], "results has 'loss' twice"),
        (("train", "results"), [["__class__", 11]], "train.results[0][0] is '__class__'; only letters"),
        (("train", "ops", 1, 2), [6], "value 6 is defined twice"),
        (("train", "ops", 1, 2), [True], "train.ops[1].outs[0] is True; expected int | null"),
        (("train", "ops", 1, 2), [-1], "train.ops[1].outs[0] is -1; expected int >= 0"),
        (("train", "ops", 1, 2), [7, 12], "there are 2 results; it must have 1"),
        (("train", "ops", 1, 2), 7, "train.ops[1].outs is 7; expected array"),
        (("train", "ops", 3, 2), [None], "value 9 is described but nothing makes it"),
        (("train", "ops", 1, 3), -1, "train.ops[1].number is -1; expected int >= 0"),
        (("train", "ops", 1, 3), 1.0, "train.ops[1].number is 1.0; expected int, got float"),
        (("train", "ops", 1), ["aten.relu.default"], "expected array of at least length 4, got 1"),
        (("train", "ops", 1), {}, "train.ops[1] is {}; expected array, got object"),
        (
            ("train", "ops", 1),
            ["aten.relu.default", {"self": 6}, [7], 1, "int8"],
            "train.ops[1].precision is 'int8'; choose one of",
        ),
        (
            ("train", "ops", 1),
            ["aten.relu.default", {"self": 6}, [7], 1, ""],
            "train.ops[1].precision is ''; choose one of",
        ),
        (("train", "ops"), [[]] * (MOST_OPS + 1), "train.ops has 50001 entries; at most 50000"),
    ],
)
def test_every_part_is_checked(path, value, fragment):
    assert fragment in refusal(changed(path, value))


@pytest.mark.parametrize("path", [(), ("train",), ("evaluate",)])
def test_keys_must_be_the_known_ones(path):
    document = json.loads(GOOD)
    place = document
    for step in path:
        place = place[step]
    for key in list(place):
        kept = place.pop(key)
        assert f"{key} is missing" in refusal(json.dumps(document).encode())
        place[key] = kept
    place["hooks"] = "import os"
    assert "hooks = 'import os' is unknown" in refusal(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("path", "value", "fragment"),
    [
        (("train", "results"), [["loss", 7]], "a stage before the last has results"),
        (("start",), 0, "cuts has 2 entries"),
        (("evaluate", "outputs"), [], ""),
    ],
)
def test_a_middle_stage_only_passes_on(path, value, fragment):
    data = changed(path, value, MIDDLE)
    if fragment:
        assert fragment in refusal(data)
    else:
        assert read_blueprint(data).evaluate.outputs == ()


def test_the_first_stage_receives_nothing():
    stage = replace(middle_stage(), num_positions=2, start=0, stop=1)
    assert "the first stage has inputs" in refusal(write_blueprint(stage))


@pytest.mark.parametrize(
    ("data", "fragment"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        ("{}".encode("utf-16"), "is not JSON"),
        (b"\xef\xbb\xbf{}", "is not JSON"),
        (b"[", "brackets do not match"),
        (b"7", "the blueprint holds 7, not an object"),
        (b"null", "the blueprint holds None, not an object"),
        (b"[" * 200_000 + b"]" * 200_000, "nested more than 12 deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested more than 12 deep"),
        (b'["]",' * 90_000 + b"1" + b',"["]' * 90_000, "is nested more than 12 deep"),
        (b" " * (MOST_BYTES + 1), "16777217 bytes"),
        (b"[" + b"[]," * 2**20 + b"1]", "brackets; at most"),
        (b"9" * 100_000, "is not JSON (Exceeds the limit"),
        (b"-" + b"9" * 5_000, "is not JSON (Exceeds the limit"),
        (b"NaN", "is not JSON (the number NaN is not finite)"),
        (b"[-Infinity]", "is not JSON (the number -Infinity is not finite)"),
        (b'{"a": 1, "a": 2}', "key 'a' = 2 is set twice"),
        (b'{"\\ud800": 1}', "holds half a character"),
    ],
    ids=range(18),
)
def test_hostile_bytes(data, fragment):
    assert fragment in refusal(data)


@pytest.mark.parametrize("text", ["1e400", "-1e999999999", "1" * 400 + ".5"])
def test_numbers_that_overflow_to_infinity(text):
    data = GOOD.replace(b'"p":0.1', f'"p":{text}'.encode())
    assert data != GOOD
    assert f"the number {text[:20]} is not finite" in refusal(data)


def test_a_message_quotes_little_of_a_long_text():
    message = refusal(changed(("format",), ["x" * 50] * 6))
    assert message.count("x") < 70


def test_a_key_twice_in_an_operation():
    assert "key 'p' = 0.2 is set twice" in refusal(GOOD.replace(b'"p":0.1', b'"p":0.1,"p":0.2'))


@pytest.mark.parametrize("count", [0, 1025])
def test_an_operation_that_returns_a_list(count):
    data = with_op("aten.split.Tensor", {"self": 4, "split_size": 1}, [None] * count)
    assert f"there are {count} results; it must have 1 to 1024" in refusal(data)


def test_a_list_of_results_is_read():
    split = Op("aten.split.Tensor", (("self", ref(6)), ("split_size", 4)), (ValueId(7), None, None), 1)
    stage = middle_stage()
    program = replace(stage.train, ops=(split,))
    stage = replace(stage, train=program)
    assert read_blueprint(write_blueprint(stage)) == stage


def test_two_thousand_operations_read_back():
    blueprint = long_perceptron(1_000)
    assert len(blueprint.train.ops) == 2_001
    assert read_blueprint(write_blueprint(blueprint)) == blueprint
