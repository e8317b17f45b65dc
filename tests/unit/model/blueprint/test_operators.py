"""The allow-list against the installed torch: schemas, and the facts that schemas hide."""

import random
import re

import pytest
import torch

from ravnest.model.blueprint.operators import Parameter, operators

FORBIDDEN = re.compile(
    r"from_file|as_strided|set_|resize|storage|_out$|\.out$|backward|sparse|quantize|item|_local_scalar|nonzero"
    r"|unique|masked_select|empty|save|load|print|debug|record_stream|pin_memory|data_ptr|requires_grad|_foreach"
)
TYPES = {
    *("Tensor", "int", "float", "bool", "Scalar", "ScalarType", "MemoryFormat", "str"),
    *("Device", "Layout", "Generator"),
}
STRINGS = {"approximate", "mode", "rounding_mode", "padding", "indexing", "equation"}
SHAPES = [(), (1,), (4,), (1, 1), (2, 2), (4, 4), (1, 4, 1), (2, 4, 4), (1, 4, 2, 2), (1, 1, 1, 1, 1)]
# Recurrent kernels do not check their weights' shapes: wrong ones end the process.
CRASHING = ("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")


def overload(name):
    _, packet, kind = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), kind)


def test_schemas_are_those_of_torch():
    assert len(operators()) > 300
    assert [o.schema for o in operators().values()] == [str(overload(n)._schema) for n in operators()]


def test_parameters_are_parsed_as_torch_parses_them():
    for name, operator in operators().items():
        real = overload(name)._schema
        for parameter, argument in zip(operator.parameters, real.arguments, strict=True):
            assert parameter.name == argument.name
            assert parameter.has_default == argument.has_default_value(), name
            assert parameter.is_keyword == argument.kwarg_only, name
            if argument.alias_info is not None:
                assert {parameter.alias} == argument.alias_info.before_set, name
                assert parameter.is_written == argument.alias_info.is_write
        is_list = str(real.returns[0].type) == "List[Tensor]"
        assert operator.num_returns == (None if is_list else len(real.returns))
        assert len(operator.return_aliases) == len(real.returns)


def test_parameters_of_every_shape():
    found = operators()
    assert found["aten.index.Tensor"].parameters[1] == Parameter(
        "indices", "Tensor", is_list=True, is_item_optional=True
    )
    assert found["aten.conv2d.default"].parameters[3] == Parameter(
        "stride", "int", is_list=True, length=2, has_default=True
    )
    assert found["aten.sum.dim_IntList"].parameters[1] == Parameter(
        "dim", "int", is_list=True, is_optional=True
    )
    assert found["aten.split.Tensor"].parameters[0] == Parameter("self", "Tensor", alias="a")
    assert found["aten.add_.Tensor"].parameters[0] == Parameter("self", "Tensor", alias="a", is_written=True)
    assert found["aten.linear.default"].parameters[2] == Parameter(
        "bias", "Tensor", is_optional=True, has_default=True
    )


def test_nothing_forbidden_is_on_the_list():
    assert [name for name in operators() if FORBIDDEN.search(name)] == []
    assert FORBIDDEN.search("aten.from_file.default")
    for operator in operators().values():
        assert {parameter.type for parameter in operator.parameters} <= TYPES
        assert "out" not in {parameter.name for parameter in operator.parameters}
        assert {p.name for p in operator.parameters if p.type == "str"} <= STRINGS


def test_random_operators_are_those_torch_marks():
    marked = {n for n in operators() if torch.Tag.nondeterministic_seeded in overload(n).tags}
    random_ones = {name for name, operator in operators().items() if operator.is_random}
    assert marked <= random_ones
    # torch does not mark composites that call a random kernel somewhere inside.
    assert {name.split(".")[1] for name in random_ones - marked} <= UNMARKED


UNMARKED = {"scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten.dropout.default", (0.5, False)),
        ("aten.feature_dropout.default", (0.5, False)),
        ("aten.alpha_dropout.default", (0.5, False)),
        ("aten.feature_alpha_dropout.default", (0.5, False)),
        ("aten.type_as.default", (torch.zeros(1),)),
    ],
)
def test_results_that_are_the_argument_itself(name, arguments):
    tensor = torch.ones(2, 2)
    assert overload(name)(tensor, *arguments).data_ptr() == tensor.data_ptr()
    assert operators()[name].return_aliases == ("a",)
    assert operators()[name].parameters[0].alias == "a"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten.broadcast_tensors.default", {}),
        ("aten.meshgrid.default", {}),
        ("aten.meshgrid.indexing", {"indexing": "ij"}),
        ("aten.einsum.default", {"equation": "i->i"}),
    ],
)
def test_results_that_view_a_listed_tensor(name, arguments):
    tensor = torch.ones(4)
    made = overload(name)(tensors=[tensor], **arguments)
    assert next(tensors_in(made)).data_ptr() == tensor.data_ptr()
    assert operators()[name].return_aliases == ("a",)
    assert [p.name for p in operators()[name].parameters if p.alias] == ["tensors"]


@pytest.mark.parametrize(("name", "flag"), [("batch_norm", "training"), ("instance_norm", "use_input_stats")])
def test_running_statistics_are_written(name, flag):
    statistics = {"running_mean": torch.zeros(3), "running_var": torch.ones(3)}
    rest = {"momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False, flag: True}
    overload(f"aten.{name}.default")(torch.rand(4, 3, 5), None, None, **statistics, **rest)
    assert statistics["running_mean"].sum() > 0
    written = {p.name for p in operators()[f"aten.{name}.default"].parameters if p.is_written}
    assert written == set(statistics)


def test_no_other_operator_shares_or_writes_memory():
    """Call every operator with small random arguments; what it shares or writes must be on the list."""
    rng, ran = random.Random(0), set()
    for name, operator in operators().items():
        if name in CRASHING:
            continue
        allowed = {p.name for p in operator.parameters if p.alias}
        written = {p.name for p in operator.parameters if p.is_written}
        for _ in range(6):
            given = guess_arguments(operator, rng)
            before = [(key, x, x._version) for key, value in given.items() for x in tensors_in(value)]
            try:
                made = {x.untyped_storage().data_ptr() for x in tensors_in(overload(name)(**given))}
            except (RuntimeError, IndexError, ValueError, NotImplementedError, UserWarning):
                continue
            ran.add(name)
            for key, x, version in before:
                assert x.untyped_storage().data_ptr() not in made or key in allowed, (name, key)
                assert x._version == version or key in written, (name, key)
    assert len(ran) > 200


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def guess_arguments(operator, rng):
    shape = rng.choice(SHAPES)
    dtype = rng.choice([torch.float32, torch.float32, torch.float32, torch.int64, torch.bool])
    wanted = [p for p in operator.parameters if not p.has_default or rng.random() < 0.4]
    return {p.name: guess(p, shape, dtype, rng) for p in wanted}


def guess(parameter, shape, dtype, rng):
    if parameter.is_optional and rng.random() < 0.6:
        return None
    if parameter.type == "Tensor":
        made = [torch.ones(shape, dtype=dtype) for _ in range(rng.choice([1, 2]) if parameter.is_list else 1)]
        return made if parameter.is_list else made[0]
    if parameter.is_list:
        count = parameter.length or rng.randint(0, 3)
        return rng.choice([[rng.choice([0, 1, 1, 2])] * count, list(range(count)), list(shape)])
    words = {"equation": "...->...", "mode": "constant", "rounding_mode": "floor", "approximate": "none"}
    words |= {"padding": "same", "indexing": "ij"}
    return {
        "int": rng.choice([0, 0, 1, 1, -1, 2]),
        "float": rng.choice([0.0, 0.5, 1.0]),
        "bool": rng.random() < 0.5,
        "Scalar": rng.choice([0, 1, 0.0, 1.0]),
        "ScalarType": dtype,
        "MemoryFormat": torch.preserve_format,
        "Device": torch.device("cpu"),
        "Layout": torch.strided,
        "Generator": None,
        "str": words.get(parameter.name),
    }[parameter.type]
