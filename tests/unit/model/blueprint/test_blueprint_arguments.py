"""Arguments follow the schema of their operator: each kind reads back, and everything else is refused."""

import json
import math
from dataclasses import replace

import pytest

from ravnest.errors import UnsafeBlueprint
from ravnest.model.blueprint.blueprint_json import MOST_LIST_ITEMS, read_blueprint, write_blueprint
from ravnest.model.blueprint.program import Ratio, Size
from tests.support.sample_blueprints import make, perceptron, ref

LINEAR = "aten.linear.default"
GIVEN = {"input": 4, "weight": 0, "bias": 1}


def refusal(data):
    with pytest.raises(UnsafeBlueprint) as caught:
        read_blueprint(data)
    assert str(caught.value).isprintable()
    return str(caught.value)


def with_first(op):
    """The perceptron with one operation before its first, whose result nobody uses."""
    blueprint = perceptron()
    train = replace(blueprint.train, ops=(op, *blueprint.train.ops))
    return write_blueprint(replace(blueprint, train=train, cuts=((0, 0), (4, 3), (7, 6))))


def with_arguments(data, arguments):
    document = json.loads(data)
    document["train"]["ops"][0][1] = arguments
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("zeros.default", {"size": (Size(2, -1), 3), "dtype": "bool", "device": None}),
        ("mul.Scalar", {"self": ref(4), "other": Ratio(Size(0, 1), Size(1, 0))}),
        ("mul.Tensor", {"self": ref(4), "other": Size(1)}),
        ("mul.Tensor", {"self": ref(4), "other": True}),
        ("masked_fill.Scalar", {"self": ref(4), "mask": ref(5), "value": -math.inf}),
        ("full_like.default", {"self": ref(4), "fill_value": math.nan}),
        ("slice.Tensor", {"self": ref(4), "dim": 1, "start": None, "end": 2**63 - 1}),
        ("index.Tensor", {"self": ref(4), "indices": (None, ref(5))}),
        ("cat.default", {"tensors": (ref(4), ref(4)), "dim": -1}),
        ("gelu.default", {"self": ref(4), "approximate": "tanh"}),
        ("einsum.default", {"equation": "b...i, ij -> b...j", "tensors": (ref(4), ref(0))}),
        ("max_pool2d.default", {"self": ref(4), "kernel_size": (2, 2), "stride": ()}),
        ("to.device", {"self": ref(4), "dtype": "float16"}),
        ("contiguous.default", {"self": ref(4), "memory_format": "channels_last"}),
    ],
)
def test_each_kind_of_argument_reads_back(op, arguments):
    read = read_blueprint(with_first(make(op, 9, None, **arguments)))
    assert dict(read.train.ops[0].arguments) == arguments


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({**GIVEN, "out": 0}, "takes no argument 'out'"),
        ({**GIVEN, "x\n\x1bc": 0}, "takes no argument 'x\\n\\x1bc'"),
        ({"input": 4}, "the argument 'weight' is missing"),
        (
            {**GIVEN, "weight": "__import__"},
            "argument 'weight': '__import__' is not the number of an earlier",
        ),
        ({**GIVEN, "weight": 10}, "10 is not the number of an earlier value"),
        ({**GIVEN, "weight": 99}, "99 is not the number of an earlier value"),
        ({**GIVEN, "weight": True}, "True is not the number"),
        ({**GIVEN, "weight": 0.0}, "0.0 is not the number"),
        ({**GIVEN, "weight": [0]}, "[0] is not the number"),
        ({**GIVEN, "weight": None}, "None is not the number"),
        ({**GIVEN, "weight": {"py/object": "os.system"}}, "is not the number"),
        ({**GIVEN, "weight": {"number": 1, "v": 2}}, "is not the number"),
        ({**GIVEN, "weight": {"number": "os"}}, "'os'"),
    ],
)
def test_wiring_of_an_operation(arguments, fragment):
    message = refusal(with_arguments(write_blueprint(perceptron()), arguments))
    assert message.startswith(f"train: operation 0 {LINEAR!r}: ")
    assert fragment in message


@pytest.mark.parametrize("arguments", [[4, 0, 1], None])
def test_arguments_have_names(arguments):
    message = refusal(with_arguments(write_blueprint(perceptron()), arguments))
    assert f"train.ops[0].arguments is {arguments!r}; expected object" in message


@pytest.mark.parametrize(
    ("op", "arguments", "fragment"),
    [
        ("zeros.default", {"size": [10**15]}, "a size is 1000000000000000"),
        ("zeros.default", {"size": [2**63 + 5]}, "a size is 9223372036854775813"),
        ("zeros.default", {"size": [1] * (MOST_LIST_ITEMS + 1)}, "there are 4097 items"),
        ("zeros.default", {"size": 4}, "must be a list"),
        ("zeros.default", {"size": [True]}, "a size is True"),
        ("zeros.default", {"size": [1.0]}, "a size is 1.0"),
        ("zeros.default", {"size": [[1]]}, "a size is [1]"),
        ("zeros.default", {"size": [{"batch": [1]}]}, "must be a list of 2"),
        ("zeros.default", {"size": [{"batch": [1, 2**60]}]}, "a number is 1152921504606846976"),
        ("zeros.default", {"size": [{"batch": [1, 0], "eval": 1}]}, "has the key 'batch' alone"),
        ("zeros.default", {"size": [{"ratio": [1, 0, 1, 0]}]}, "has the key 'batch' alone"),
        ("zeros.default", {"size": [1], "device": "cuda"}, "must be left out; the stage sets it"),
        ("zeros.default", {"size": [1], "layout": "sparse"}, "must be left out"),
        ("zeros.default", {"size": [1], "pin_memory": True}, "must be left out"),
        ("zeros.default", {"size": [1], "dtype": "complex64"}, "the dtype is 'complex64'"),
        ("zeros.default", {"size": [1], "dtype": 6}, "the dtype is 6"),
        ("bernoulli.default", {"self": 4, "generator": 1}, "argument 'generator': 1 must be left out"),
        ("gelu.default", {"self": 4, "approximate": "/etc/passwd"}, "must be one of 'none', 'tanh'"),
        ("gelu.default", {"self": 4, "approximate": ["none"]}, "must be one of 'none', 'tanh'"),
        ("einsum.default", {"equation": "__import__('os')", "tensors": [4]}, "is not an equation"),
        ("einsum.default", {"equation": "i" * 129, "tensors": [4]}, "is not an equation"),
        ("einsum.default", {"equation": "i->i->i", "tensors": [4]}, "is not an equation"),
        ("einsum.default", {"equation": 3, "tensors": [4]}, "is not an equation"),
        ("cat.default", {"tensors": [4, None]}, "None is not the number"),
        ("cat.default", {"tensors": [4, {"number": 1}]}, "is not the number"),
        ("relu_.default", {"self": {"number": 1}}, "is not the number"),
        ("add.Scalar", {"self": 4, "other": "1"}, "a size is '1'"),
        ("add.Scalar", {"self": 4, "other": {"ratio": [1, 0, 0, 0]}}, "divides by zero"),
        ("add.Scalar", {"self": 4, "other": {"ratio": [1, 0, -1, 9]}}, "divides by zero or less"),
        ("add.Scalar", {"self": 4, "other": None}, "a size is None"),
        ("dropout.default", {"input": 4, "p": True, "train": True}, "a size is True"),
        ("dropout.default", {"input": 4, "p": 0.5, "train": 1}, "the flag is 1"),
        ("contiguous.default", {"self": 4, "memory_format": "x"}, "the memory format is 'x'"),
        ("max_pool2d.default", {"self": 4, "kernel_size": [1, 2, 3]}, "there are 3 items; it takes 2"),
    ],
)
def test_arguments_follow_the_schema(op, arguments, fragment):
    assert fragment in refusal(with_arguments(with_first(make(op, 9, None)), arguments))
