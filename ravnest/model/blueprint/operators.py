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


ALLOWED_SCHEMAS = """\
# elementwise arithmetic
aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor
aten::add.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor
aten::sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor
aten::sub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor
aten::rsub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor
aten::rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor
aten::mul.Tensor(Tensor self, Tensor other) -> Tensor
aten::mul.Scalar(Tensor self, Scalar other) -> Tensor
aten::div.Tensor(Tensor self, Tensor other) -> Tensor
aten::div.Scalar(Tensor self, Scalar other) -> Tensor
aten::div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor
aten::div.Scalar_mode(Tensor self, Scalar other, *, str? rounding_mode) -> Tensor
aten::floor_divide(Tensor self, Tensor other) -> Tensor
aten::floor_divide.Scalar(Tensor self, Scalar other) -> Tensor
aten::remainder.Tensor(Tensor self, Tensor other) -> Tensor
aten::remainder.Scalar(Tensor self, Scalar other) -> Tensor
aten::fmod.Tensor(Tensor self, Tensor other) -> Tensor
aten::fmod.Scalar(Tensor self, Scalar other) -> Tensor
aten::pow.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor
aten::pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor
aten::pow.Scalar(Scalar self, Tensor exponent) -> Tensor
aten::neg(Tensor self) -> Tensor
aten::abs(Tensor self) -> Tensor
aten::exp(Tensor self) -> Tensor
aten::expm1(Tensor self) -> Tensor
aten::log(Tensor self) -> Tensor
aten::log1p(Tensor self) -> Tensor
aten::log2(Tensor self) -> Tensor
aten::sqrt(Tensor self) -> Tensor
aten::rsqrt(Tensor self) -> Tensor
aten::reciprocal(Tensor self) -> Tensor
aten::square(Tensor self) -> Tensor
aten::sin(Tensor self) -> Tensor
aten::cos(Tensor self) -> Tensor
aten::tan(Tensor self) -> Tensor
aten::atan2(Tensor self, Tensor other) -> Tensor
aten::tanh(Tensor self) -> Tensor
aten::sigmoid(Tensor self) -> Tensor
aten::erf(Tensor self) -> Tensor
aten::floor(Tensor self) -> Tensor
aten::ceil(Tensor self) -> Tensor
aten::round(Tensor self) -> Tensor
aten::trunc(Tensor self) -> Tensor
aten::sign(Tensor self) -> Tensor
aten::maximum(Tensor self, Tensor other) -> Tensor
aten::minimum(Tensor self, Tensor other) -> Tensor
aten::max.other(Tensor self, Tensor other) -> Tensor
aten::min.other(Tensor self, Tensor other) -> Tensor
aten::clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor
aten::clamp.Tensor(Tensor self, Tensor? min=None, Tensor? max=None) -> Tensor
aten::clamp_min(Tensor self, Scalar min) -> Tensor
aten::clamp_max(Tensor self, Scalar max) -> Tensor
aten::where.self(Tensor condition, Tensor self, Tensor other) -> Tensor
aten::where.ScalarSelf(Tensor condition, Scalar self, Tensor other) -> Tensor
aten::where.ScalarOther(Tensor condition, Tensor self, Scalar other) -> Tensor
aten::where.Scalar(Tensor condition, Scalar self, Scalar other) -> Tensor
aten::lerp.Scalar(Tensor self, Tensor end, Scalar weight) -> Tensor
aten::lerp.Tensor(Tensor self, Tensor end, Tensor weight) -> Tensor
aten::addcmul(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor
aten::addcdiv(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor
aten::nan_to_num(Tensor self, float? nan=None, float? posinf=None, float? neginf=None) -> Tensor
aten::masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor
aten::masked_fill.Tensor(Tensor self, Tensor mask, Tensor value) -> Tensor
# written in place
aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)
aten::add_.Scalar(Tensor(a!) self, Scalar other, Scalar alpha=1) -> Tensor(a!)
aten::sub_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)
aten::sub_.Scalar(Tensor(a!) self, Scalar other, Scalar alpha=1) -> Tensor(a!)
aten::mul_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)
aten::mul_.Scalar(Tensor(a!) self, Scalar other) -> Tensor(a!)
aten::div_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)
aten::div_.Scalar(Tensor(a!) self, Scalar other) -> Tensor(a!)
aten::clamp_(Tensor(a!) self, Scalar? min=None, Scalar? max=None) -> Tensor(a!)
aten::clamp_min_(Tensor(a!) self, Scalar min) -> Tensor(a!)
aten::sigmoid_(Tensor(a!) self) -> Tensor(a!)
aten::tanh_(Tensor(a!) self) -> Tensor(a!)
aten::relu_(Tensor(a!) self) -> Tensor(a!)
aten::relu6_(Tensor(a!) self) -> Tensor(a!)
aten::leaky_relu_(Tensor(a!) self, Scalar negative_slope=0.01) -> Tensor(a!)
aten::elu_(Tensor(a!) self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor(a!)
aten::silu_(Tensor(a!) self) -> Tensor(a!)
aten::hardtanh_(Tensor(a!) self, Scalar min_val=-1, Scalar max_val=1) -> Tensor(a!)
aten::hardswish_(Tensor(a!) self) -> Tensor(a!)
aten::masked_fill_.Scalar(Tensor(a!) self, Tensor mask, Scalar value) -> Tensor(a!)
aten::exp_(Tensor(a!) self) -> Tensor(a!)
aten::copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)
aten::fill_.Scalar(Tensor(a!) self, Scalar value) -> Tensor(a!)
aten::fill_.Tensor(Tensor(a!) self, Tensor value) -> Tensor(a!)
aten::zero_(Tensor(a!) self) -> Tensor(a!)
aten::index_put_(Tensor(a!) self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor(a!)
aten::lerp_.Scalar(Tensor(a!) self, Tensor end, Scalar weight) -> Tensor(a!)
# comparisons and logic
aten::eq.Tensor(Tensor self, Tensor other) -> Tensor
aten::eq.Scalar(Tensor self, Scalar other) -> Tensor
aten::ne.Tensor(Tensor self, Tensor other) -> Tensor
aten::ne.Scalar(Tensor self, Scalar other) -> Tensor
aten::lt.Tensor(Tensor self, Tensor other) -> Tensor
aten::lt.Scalar(Tensor self, Scalar other) -> Tensor
aten::le.Tensor(Tensor self, Tensor other) -> Tensor
aten::le.Scalar(Tensor self, Scalar other) -> Tensor
aten::gt.Tensor(Tensor self, Tensor other) -> Tensor
aten::gt.Scalar(Tensor self, Scalar other) -> Tensor
aten::ge.Tensor(Tensor self, Tensor other) -> Tensor
aten::ge.Scalar(Tensor self, Scalar other) -> Tensor
aten::isnan(Tensor self) -> Tensor
aten::isinf(Tensor self) -> Tensor
aten::isfinite(Tensor self) -> Tensor
aten::logical_and(Tensor self, Tensor other) -> Tensor
aten::logical_or(Tensor self, Tensor other) -> Tensor
aten::logical_not(Tensor self) -> Tensor
aten::bitwise_and.Tensor(Tensor self, Tensor other) -> Tensor
aten::bitwise_or.Tensor(Tensor self, Tensor other) -> Tensor
aten::bitwise_not(Tensor self) -> Tensor
aten::__and__.Tensor(Tensor self, Tensor other) -> Tensor
aten::__or__.Tensor(Tensor self, Tensor other) -> Tensor
# reductions
aten::sum(Tensor self, *, ScalarType? dtype=None) -> Tensor
aten::sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor
aten::mean(Tensor self, *, ScalarType? dtype=None) -> Tensor
aten::mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor
aten::prod(Tensor self, *, ScalarType? dtype=None) -> Tensor
aten::prod.dim_int(Tensor self, int dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor
aten::amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor
aten::amin(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor
aten::max(Tensor self) -> Tensor
aten::max.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)
aten::min(Tensor self) -> Tensor
aten::min.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)
aten::argmax(Tensor self, int? dim=None, bool keepdim=False) -> Tensor
aten::argmin(Tensor self, int? dim=None, bool keepdim=False) -> Tensor
aten::any(Tensor self) -> Tensor
aten::any.dim(Tensor self, int dim, bool keepdim=False) -> Tensor
aten::all(Tensor self) -> Tensor
aten::all.dim(Tensor self, int dim, bool keepdim=False) -> Tensor
aten::cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor
aten::cumprod(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor
aten::logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor
aten::var(Tensor self, bool unbiased=True) -> Tensor
aten::var.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor
aten::std(Tensor self, bool unbiased=True) -> Tensor
aten::std.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor
aten::var_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> (Tensor, Tensor)
aten::linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor
aten::topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, Tensor indices)
aten::sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)
aten::argsort(Tensor self, int dim=-1, bool descending=False) -> Tensor
aten::softmax.int(Tensor self, int dim, ScalarType? dtype=None) -> Tensor
aten::log_softmax.int(Tensor self, int dim, ScalarType? dtype=None) -> Tensor
aten::_softmax(Tensor self, int dim, bool half_to_float) -> Tensor
aten::_log_softmax(Tensor self, int dim, bool half_to_float) -> Tensor
# shapes and indexing
aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)
aten::reshape(Tensor(a) self, SymInt[] shape) -> Tensor(a)
aten::flatten.using_ints(Tensor(a) self, int start_dim=0, int end_dim=-1) -> Tensor(a)
aten::unflatten.int(Tensor(a) self, int dim, SymInt[] sizes) -> Tensor(a)
aten::permute(Tensor(a) self, int[] dims) -> Tensor(a)
aten::transpose.int(Tensor(a) self, int dim0, int dim1) -> Tensor(a)
aten::t(Tensor(a) self) -> Tensor(a)
aten::mT(Tensor(a) self) -> Tensor(a)
aten::numpy_T(Tensor(a) self) -> Tensor(a)
aten::unsqueeze(Tensor(a) self, int dim) -> Tensor(a)
aten::squeeze(Tensor(a) self) -> Tensor(a)
aten::squeeze.dim(Tensor(a) self, int dim) -> Tensor(a)
aten::squeeze.dims(Tensor(a) self, int[] dim) -> Tensor(a)
aten::expand(Tensor(a) self, SymInt[] size, *, bool implicit=False) -> Tensor(a)
aten::expand_as(Tensor(a) self, Tensor other) -> Tensor(a)
aten::repeat(Tensor self, SymInt[] repeats) -> Tensor
aten::repeat_interleave.self_int(Tensor self, SymInt repeats, int? dim=None, *, SymInt? output_size=None) -> Tensor
aten::tile(Tensor self, SymInt[] dims) -> Tensor
aten::cat(Tensor[] tensors, int dim=0) -> Tensor
aten::stack(Tensor[] tensors, int dim=0) -> Tensor
aten::split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0) -> Tensor(a)[]
aten::split_with_sizes(Tensor(a -> *) self, SymInt[] split_sizes, int dim=0) -> Tensor(a)[]
aten::chunk(Tensor(a -> *) self, int chunks, int dim=0) -> Tensor(a)[]
aten::unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]
aten::select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)
aten::slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor(a)
aten::narrow(Tensor(a) self, int dim, SymInt start, SymInt length) -> Tensor(a)
aten::index.Tensor(Tensor self, Tensor?[] indices) -> Tensor
aten::index_select(Tensor self, int dim, Tensor index) -> Tensor
aten::gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor
aten::scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor
aten::scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor
aten::scatter_add(Tensor self, int dim, Tensor index, Tensor src) -> Tensor
aten::index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor
aten::index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor
aten::take_along_dim(Tensor self, Tensor indices, int? dim=None) -> Tensor
aten::flip(Tensor self, int[] dims) -> Tensor
aten::roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor
aten::tril(Tensor self, SymInt diagonal=0) -> Tensor
aten::triu(Tensor self, SymInt diagonal=0) -> Tensor
aten::diagonal(Tensor(a) self, int offset=0, int dim1=0, int dim2=1) -> Tensor(a)
aten::movedim.int(Tensor(a) self, int source, int destination) -> Tensor(a)
aten::movedim.intlist(Tensor(a) self, int[] source, int[] destination) -> Tensor(a)
aten::swapaxes(Tensor(a) self, int axis0, int axis1) -> Tensor(a)
aten::contiguous(Tensor(a) self, *, MemoryFormat memory_format=0) -> Tensor(a)
aten::clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor
aten::detach(Tensor(a) self) -> Tensor(a)
aten::alias(Tensor(a) self) -> Tensor(a)
aten::to.dtype(Tensor(a) self, ScalarType dtype, bool non_blocking=False, bool copy=False, MemoryFormat? memory_format=None) -> Tensor(a)
aten::to.dtype_layout(Tensor(a) self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, bool non_blocking=False, bool copy=False, MemoryFormat? memory_format=None) -> Tensor(a)
aten::to.device(Tensor(a) self, Device device, ScalarType dtype, bool non_blocking=False, bool copy=False, MemoryFormat? memory_format=None) -> Tensor(a)
aten::to.other(Tensor(a) self, Tensor other, bool non_blocking=False, bool copy=False, MemoryFormat? memory_format=None) -> Tensor(a)
aten::_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, bool non_blocking=False, MemoryFormat? memory_format=None) -> Tensor
aten::type_as(Tensor self, Tensor other) -> Tensor
aten::pad(Tensor self, SymInt[] pad, str mode="constant", float? value=None) -> Tensor
aten::constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor
aten::reflection_pad1d(Tensor self, SymInt[2] padding) -> Tensor
aten::reflection_pad2d(Tensor self, SymInt[4] padding) -> Tensor
aten::replication_pad1d(Tensor self, SymInt[2] padding) -> Tensor
aten::replication_pad2d(Tensor self, SymInt[4] padding) -> Tensor
aten::broadcast_to(Tensor(a) self, SymInt[] size) -> Tensor(a)
aten::broadcast_tensors(Tensor[] tensors) -> Tensor[]
aten::meshgrid(Tensor[] tensors) -> Tensor[]
aten::meshgrid.indexing(Tensor[] tensors, *, str indexing) -> Tensor[]
aten::view_as(Tensor(a) self, Tensor other) -> Tensor(a)
aten::reshape_as(Tensor(a) self, Tensor other) -> Tensor(a)
aten::unfold(Tensor(a) self, int dimension, int size, int step) -> Tensor(a)
aten::im2col(Tensor self, int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride) -> Tensor
aten::pixel_shuffle(Tensor self, int upscale_factor) -> Tensor
aten::pixel_unshuffle(Tensor self, int downscale_factor) -> Tensor
aten::lift_fresh(Tensor(a) self) -> Tensor(a)
aten::lift_fresh_copy(Tensor self) -> Tensor
# creation
aten::arange(Scalar end, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::arange.start(Scalar start, Scalar end, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::arange.start_step(Scalar start, Scalar end, Scalar step=1, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::zeros(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::ones(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::zeros_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor
aten::ones_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor
aten::full_like(Tensor self, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor
aten::new_zeros(Tensor self, SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::new_ones(Tensor self, SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::new_full(Tensor self, SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::scalar_tensor(Scalar s, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::linspace(Scalar start, Scalar end, int steps, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::eye(SymInt n, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::eye.m(SymInt n, SymInt m, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::one_hot(Tensor self, int num_classes=-1) -> Tensor
# random numbers
aten::dropout(Tensor input, float p, bool train) -> Tensor
aten::dropout_(Tensor(a!) self, float p, bool train) -> Tensor(a!)
aten::feature_dropout(Tensor input, float p, bool train) -> Tensor
aten::alpha_dropout(Tensor input, float p, bool train) -> Tensor
aten::feature_alpha_dropout(Tensor input, float p, bool train) -> Tensor
aten::bernoulli(Tensor self, *, Generator? generator=None) -> Tensor
aten::bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor
aten::bernoulli_.float(Tensor(a!) self, float p=0.5, *, Generator? generator=None) -> Tensor(a!)
aten::uniform_(Tensor(a!) self, float from=0., float to=1., *, Generator? generator=None) -> Tensor(a!)
aten::normal_(Tensor(a!) self, float mean=0., float std=1., *, Generator? generator=None) -> Tensor(a!)
aten::exponential_(Tensor(a!) self, float lambd=1., *, Generator? generator=None) -> Tensor(a!)
aten::rand(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::rand_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor
aten::randn(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::randn_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor
aten::randint(SymInt high, SymInt[] size, *, ScalarType? dtype=4, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::randint.low(SymInt low, SymInt high, SymInt[] size, *, ScalarType? dtype=4, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
aten::randperm(SymInt n, *, ScalarType? dtype=4, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
# layers
aten::linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor
aten::matmul(Tensor self, Tensor other) -> Tensor
aten::mm(Tensor self, Tensor mat2) -> Tensor
aten::bmm(Tensor self, Tensor mat2) -> Tensor
aten::addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor
aten::baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor
aten::einsum(str equation, Tensor[] tensors, *, int[]? path=None) -> Tensor
aten::bilinear(Tensor input1, Tensor input2, Tensor weight, Tensor? bias=None) -> Tensor
aten::mv(Tensor self, Tensor vec) -> Tensor
aten::dot(Tensor self, Tensor tensor) -> Tensor
aten::outer(Tensor self, Tensor vec2) -> Tensor
aten::conv1d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[1] stride=[1], SymInt[1] padding=[0], SymInt[1] dilation=[1], SymInt groups=1) -> Tensor
aten::conv1d.padding(Tensor input, Tensor weight, Tensor? bias=None, SymInt[1] stride=[1], str padding="valid", SymInt[1] dilation=[1], SymInt groups=1) -> Tensor
aten::conv2d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=[1, 1], SymInt[2] padding=[0, 0], SymInt[2] dilation=[1, 1], SymInt groups=1) -> Tensor
aten::conv2d.padding(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=[1, 1], str padding="valid", SymInt[2] dilation=[1, 1], SymInt groups=1) -> Tensor
aten::conv3d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[3] stride=[1, 1, 1], SymInt[3] padding=[0, 0, 0], SymInt[3] dilation=[1, 1, 1], SymInt groups=1) -> Tensor
aten::conv3d.padding(Tensor input, Tensor weight, Tensor? bias=None, SymInt[3] stride=[1, 1, 1], str padding="valid", SymInt[3] dilation=[1, 1, 1], SymInt groups=1) -> Tensor
aten::conv_transpose1d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[1] stride=[1], SymInt[1] padding=[0], SymInt[1] output_padding=[0], SymInt groups=1, SymInt[1] dilation=[1]) -> Tensor
aten::conv_transpose2d.input(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=[1, 1], SymInt[2] padding=[0, 0], SymInt[2] output_padding=[0, 0], SymInt groups=1, SymInt[2] dilation=[1, 1]) -> Tensor
aten::conv_transpose3d.input(Tensor input, Tensor weight, Tensor? bias=None, SymInt[3] stride=[1, 1, 1], SymInt[3] padding=[0, 0, 0], SymInt[3] output_padding=[0, 0, 0], SymInt groups=1, SymInt[3] dilation=[1, 1, 1]) -> Tensor
aten::embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False) -> Tensor
aten::layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1.0000000000000001e-05, bool cudnn_enable=True) -> Tensor
aten::rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor
aten::group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1.0000000000000001e-05, bool cudnn_enabled=True) -> Tensor
aten::instance_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool use_input_stats, float momentum, float eps, bool cudnn_enabled) -> Tensor
aten::batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool training, float momentum, float eps, bool cudnn_enabled) -> Tensor
aten::relu(Tensor self) -> Tensor
aten::relu6(Tensor self) -> Tensor
aten::gelu(Tensor self, *, str approximate="none") -> Tensor
aten::leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor
aten::elu(Tensor self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor
aten::selu(Tensor self) -> Tensor
aten::celu(Tensor self, Scalar alpha=1.) -> Tensor
aten::silu(Tensor self) -> Tensor
aten::mish(Tensor self) -> Tensor
aten::hardswish(Tensor self) -> Tensor
aten::hardsigmoid(Tensor self) -> Tensor
aten::hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor
aten::prelu(Tensor self, Tensor weight) -> Tensor
aten::glu(Tensor self, int dim=-1) -> Tensor
aten::softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor
aten::log_sigmoid(Tensor self) -> Tensor
aten::softshrink(Tensor self, Scalar lambd=0.5) -> Tensor
aten::hardshrink(Tensor self, Scalar lambd=0.5) -> Tensor
aten::threshold(Tensor self, Scalar threshold, Scalar value) -> Tensor
aten::max_pool1d(Tensor self, int[1] kernel_size, int[1] stride=[], int[1] padding=[0], int[1] dilation=[1], bool ceil_mode=False) -> Tensor
aten::max_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool ceil_mode=False) -> Tensor
aten::max_pool3d(Tensor self, int[3] kernel_size, int[3] stride=[], int[3] padding=0, int[3] dilation=1, bool ceil_mode=False) -> Tensor
aten::max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool ceil_mode=False) -> (Tensor, Tensor)
aten::avg_pool1d(Tensor self, int[1] kernel_size, int[1] stride=[], int[1] padding=[0], bool ceil_mode=False, bool count_include_pad=True) -> Tensor
aten::avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool ceil_mode=False, bool count_include_pad=True, int? divisor_override=None) -> Tensor
aten::avg_pool3d(Tensor self, int[3] kernel_size, int[3] stride=[], int[3] padding=0, bool ceil_mode=False, bool count_include_pad=True, int? divisor_override=None) -> Tensor
aten::adaptive_avg_pool1d(Tensor self, int[1] output_size) -> Tensor
aten::adaptive_avg_pool2d(Tensor self, SymInt[2] output_size) -> Tensor
aten::adaptive_avg_pool3d(Tensor self, SymInt[3] output_size) -> Tensor
aten::adaptive_max_pool2d(Tensor self, int[2] output_size) -> (Tensor, Tensor)
aten::upsample_nearest1d.vec(Tensor input, SymInt[]? output_size, float[]? scale_factors) -> Tensor
aten::upsample_nearest2d.vec(Tensor input, SymInt[]? output_size, float[]? scale_factors) -> Tensor
aten::upsample_bilinear2d.vec(Tensor input, SymInt[]? output_size, bool align_corners, float[]? scale_factors) -> Tensor
aten::upsample_bicubic2d.vec(Tensor input, SymInt[]? output_size, bool align_corners, float[]? scale_factors) -> Tensor
aten::grid_sampler(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool align_corners) -> Tensor
aten::scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor
aten::_weight_norm(Tensor v, Tensor g, int dim=0) -> Tensor
aten::lstm.input(Tensor input, Tensor[] hx, Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first) -> (Tensor, Tensor, Tensor)
aten::gru.input(Tensor input, Tensor hx, Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first) -> (Tensor, Tensor)
aten::rnn_tanh.input(Tensor input, Tensor hx, Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first) -> (Tensor, Tensor)
aten::rnn_relu.input(Tensor input, Tensor hx, Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first) -> (Tensor, Tensor)
# losses
aten::cross_entropy_loss(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, SymInt ignore_index=-100, float label_smoothing=0.) -> Tensor
aten::nll_loss(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, SymInt ignore_index=-100) -> Tensor
aten::nll_loss_nd(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, SymInt ignore_index=-100) -> Tensor
aten::mse_loss(Tensor self, Tensor target, int reduction=1) -> Tensor
aten::l1_loss(Tensor self, Tensor target, int reduction=1) -> Tensor
aten::smooth_l1_loss(Tensor self, Tensor target, int reduction=1, float beta=1.) -> Tensor
aten::huber_loss(Tensor self, Tensor target, int reduction=1, float delta=1.) -> Tensor
aten::binary_cross_entropy(Tensor self, Tensor target, Tensor? weight=None, int reduction=1) -> Tensor
aten::binary_cross_entropy_with_logits(Tensor self, Tensor target, Tensor? weight=None, Tensor? pos_weight=None, int reduction=1) -> Tensor
aten::kl_div(Tensor self, Tensor target, int reduction=1, *, bool log_target=False) -> Tensor
aten::cosine_similarity(Tensor x1, Tensor x2, int dim=1, float eps=1e-08) -> Tensor
aten::pairwise_distance(Tensor x1, Tensor x2, float p=2., float eps=9.9999999999999995e-07, bool keepdim=False) -> Tensor
aten::cosine_embedding_loss(Tensor input1, Tensor input2, Tensor target, float margin=0., int reduction=1) -> Tensor
aten::margin_ranking_loss(Tensor input1, Tensor input2, Tensor target, float margin=0., int reduction=1) -> Tensor
aten::triplet_margin_loss(Tensor anchor, Tensor positive, Tensor negative, float margin=1., float p=2., float eps=9.9999999999999995e-07, bool swap=False, int reduction=1) -> Tensor
aten::poisson_nll_loss(Tensor input, Tensor target, bool log_input, bool full, float eps, int reduction) -> Tensor
"""  # noqa: E501 - the text must equal torch's own
