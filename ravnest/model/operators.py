"""The allow-list: the operations a blueprint may name, each with what its parameters accept.

The one idea: start from nothing and admit reviewed operations one by one, by the exact schema torch has for
them. Left out are files, raw storage and strides, uninitialised memory, and sizes that depend on the data.
What schemas do not say is added here: results that may be an argument's own memory, running statistics that
are written, random numbers that are drawn.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from ravnest.model.schemas import ALLOWED_SCHEMAS


@dataclass(frozen=True, slots=True)
class Parameter:
    """What one argument of an operator accepts; `type` is the schema's, with "int" for SymInt.

    `length` is that of a list of fixed length, `alias` the letter of the memory it shares with a result.
    """

    name: str
    type: str
    is_list: bool = False
    length: int | None = None
    is_optional: bool = False
    is_item_optional: bool = False
    has_default: bool = False
    is_keyword: bool = False
    alias: str = ""
    is_written: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """One allowed operation; `num_returns` is None when it returns a list of tensors."""

    name: str
    schema: str
    parameters: tuple[Parameter, ...]
    num_returns: int | None
    return_aliases: tuple[str, ...]
    is_random: bool


@cache
def operators() -> Mapping[str, Operator]:
    """Return every allowed operator by its name, like "aten.add.Tensor"."""
    schemas = (line for line in ALLOWED_SCHEMAS.splitlines() if not line.startswith("#"))
    parsed = (_complete(_parse(schema)) for schema in schemas)
    return MappingProxyType({operator.name: operator for operator in parsed})


def draws(name: str, given: Mapping[str, object]) -> bool:
    """Return whether an operator called like this really draws random numbers."""
    if not operators()[name].is_random or given.get("train") is False:
        return False
    shares = [given[share] for share in ("p", "dropout_p", "dropout") if share in given]
    is_drawing_by_default = not name.startswith(("aten.scaled_dot", "aten.lstm", "aten.gru", "aten.rnn"))
    return any(share != 0.0 for share in shares) or (is_drawing_by_default and not shares)


# Results that may be the argument's own memory although the schema does not say so (found by calling them).
_HIDDEN_ALIASES = {
    "aten.alpha_dropout.default": "input",
    "aten.broadcast_tensors.default": "tensors",
    "aten.dropout.default": "input",
    "aten.einsum.default": "tensors",
    "aten.feature_alpha_dropout.default": "input",
    "aten.feature_dropout.default": "input",
    "aten.meshgrid.default": "tensors",
    "aten.meshgrid.indexing": "tensors",
    "aten.type_as.default": "self",
}

# Running statistics that training changes although the schema does not say so.
_HIDDEN_WRITES = {
    "aten.batch_norm.default": ("running_mean", "running_var"),
    "aten.instance_norm.default": ("running_mean", "running_var"),
}

_RANDOM = re.compile(
    r"aten\.(\w*dropout_?|bernoulli_?|uniform_|normal_|exponential_|rand(n|int|perm)?(_like)?"
    r"|scaled_dot_product_attention|lstm|gru|rnn_tanh|rnn_relu)\.\w+"
)
_SCHEMA = re.compile(
    r"aten::(?P<name>\w+)(?:\.(?P<overload>\w+))?\((?P<parameters>.*)\) -> (\((?P<several>.+)\)|(?P<one>.+))"
)
_TYPE = (
    r"(?P<type>[A-Za-z]+)(?:\((?P<alias>[a-z])(?P<write>!)?(?: -> \*)?\))?(?P<inner>\?)?"
    r"(?:(?P<list>\[(?P<length>\d*)\])(?P<outer>\?)?)?"
)
_PARAMETER = re.compile(
    r"(?P<star>\*)(?:, |$)|" + _TYPE + r" (?P<name>\w+)(?P<default>=(?:\[[^\]]*\]|\"[^\"]*\"|[^,]+))?(?:, |$)"
)
_RETURN = re.compile(_TYPE + r"(?: \w+)?(?:, |$)")


def _parse(schema: str) -> Operator:
    match = _SCHEMA.fullmatch(schema)
    assert match, schema
    name = f"aten.{match['name']}.{match['overload'] or 'default'}"
    returns = _matches(_RETURN, match["several"] or match["one"])
    assert all(part["type"] == "Tensor" for part in returns), schema
    return Operator(
        name=name,
        schema=schema,
        parameters=_parse_parameters(match["parameters"]),
        num_returns=None if returns[0]["list"] else len(returns),
        return_aliases=tuple(part["alias"] or "" for part in returns),
        is_random=_RANDOM.fullmatch(name) is not None,
    )


def _parse_parameters(text: str) -> tuple[Parameter, ...]:
    parts = _matches(_PARAMETER, text)
    stars = [index for index, part in enumerate(parts) if part["star"]]
    first_keyword = stars[0] if stars else len(parts)
    return tuple(
        _parameter(part, is_keyword=index > first_keyword)
        for index, part in enumerate(parts)
        if not part["star"]
    )


def _parameter(part: re.Match[str], is_keyword: bool) -> Parameter:
    is_list = part["list"] is not None
    return Parameter(
        name=part["name"],
        type="int" if part["type"] == "SymInt" else part["type"],
        is_list=is_list,
        # In a schema, a length of 1 only says that a bare number will do: `int[1] dim` takes several.
        length=int(part["length"]) if part["length"] not in (None, "", "1") else None,
        is_optional=bool(part["outer"] if is_list else part["inner"]),
        is_item_optional=is_list and bool(part["inner"]),
        has_default=part["default"] is not None,
        is_keyword=is_keyword,
        alias=part["alias"] or "",
        is_written=part["write"] is not None,
    )


def _matches(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Return matches that together cover the text without a gap."""
    found, position = [], 0
    while position < len(text):
        match = pattern.match(text, position)
        assert match, text
        found.append(match)
        position = match.end()
    return found


def _complete(operator: Operator) -> Operator:
    """Return the operator with the facts its schema hides."""
    shared = _HIDDEN_ALIASES.get(operator.name)
    written = _HIDDEN_WRITES.get(operator.name, ())
    parameters = tuple(
        replace(
            parameter,
            alias="a" if parameter.name == shared else parameter.alias,
            is_written=parameter.is_written or parameter.name in written,
        )
        for parameter in operator.parameters
    )
    return_aliases = ("a",) if shared else operator.return_aliases
    return replace(operator, parameters=parameters, return_aliases=return_aliases)
