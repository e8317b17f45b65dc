"""Where the places of a text lie in the values of a program, and how operations are written for new places.

A row of text has a place for each token. Most operations of a language model treat places one by one: the
same program works for a few new places if sizes follow, and if what belongs to all places (tables, masks) is
taken at the new ones. A rule per operator says so. An operator without a rule may mix places, and is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ravnest.model.blueprint.aliasing import has_effect
from ravnest.model.blueprint.program import Argument, Op, Ref, Size, TensorType, ValueId, refs_of

_NO_LIMIT = 2**62
_MATRIX = 2  # dimensions


class MixedPlacesError(Exception):
    """An operation cannot be written for new places alone; says why. Caught where programs are made."""


@dataclass(frozen=True, slots=True)
class PlaceAxis:
    """The dimension that has a place for each token. A merged one has all rows, end to end."""

    dim: int
    is_merged: bool = False

    @property
    def own_dim(self) -> int:
        """The dimension of the places once rows have one of their own."""
        return self.dim + self.is_merged


@dataclass(slots=True)
class PlacedOp:
    """One operation about to be written: which values have places, and how whole ones are taken at those."""

    op: Op
    values: Mapping[ValueId, TensorType]
    axes: Mapping[ValueId, PlaceAxis]
    length: int
    take: Callable[[ValueId, int], ValueId]  # a whole value, at new places along a dimension

    def refuse(self, why: str) -> MixedPlacesError:
        """Return why it cannot be written."""
        return MixedPlacesError(f"{self.op.name} {why}")

    def shape(self, value: ValueId) -> tuple[int | Size, ...]:
        """Return the sizes of a value."""
        return self.values[value].shape

    def argument(self, name: str, usual: Argument = None) -> Argument:
        """Return what is given for a parameter."""
        return dict(self.op.arguments).get(name, usual)

    def value(self, name: str) -> ValueId:
        """Return the value given for a parameter."""
        found = self.argument(name)
        if not isinstance(found, Ref):
            raise self.refuse(f"has no value for {name}")
        return found.value

    def only(self, name: str) -> tuple[ValueId, PlaceAxis]:
        """Return the one argument that has places; all others must have none."""
        found = self.value(name)
        others = [value for key, each in self.op.arguments if key != name for value in refs_of(each)]
        if found not in self.axes or any(value in self.axes for value in others):
            raise self.refuse("has places where none are expected")
        return found, self.axes[found]

    def dims(self, name: str, ndim: int, usual: Argument = None) -> tuple[int, ...]:
        """Return dimensions counted from the front; none given, or an empty list, stands for all."""
        given = self.argument(name, usual)
        listed = given if isinstance(given, tuple) else () if given is None else (given,)
        found = tuple(each % ndim for each in listed if isinstance(each, int))
        return found or tuple(range(ndim))


Rule = Callable[[PlacedOp], tuple[Op, PlaceAxis]]


def find_axis(kind: TensorType, length: int) -> PlaceAxis | None:
    """Return where the places of a value that crosses lie, by its sizes; None: it crosses whole."""
    shape = kind.shape
    if shape and shape[0] == Size(length):
        return PlaceAxis(0, True)
    if not shape or shape[0] != Size(1):
        return None
    found = [dim for dim, size in enumerate(shape) if size == length]
    is_plain = found[:1] == [1] and found[1:2] != [2]  # of two that follow each other, one may be heads
    return PlaceAxis(found[0]) if is_plain or len(found) == 1 or shape[1:] == (length, length) else None


def write_op(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    """Return an operation as it is for new places, and where the places of its results lie."""
    if has_effect(placed.op):
        raise placed.refuse("changes a tensor in place")
    rule = _RULES.get(placed.op.name) or _RULES.get(placed.op.name.split(".")[1])
    if rule is None:
        raise placed.refuse("may mix places")
    return rule(placed)


def replace_values(op: Op, other: Mapping[ValueId, ValueId]) -> Op:
    """Return an operation that reads other values."""

    def change(argument: Argument) -> Argument:
        if isinstance(argument, tuple):
            return tuple(map(change, argument))
        return Ref(other.get(argument.value, argument.value)) if isinstance(argument, Ref) else argument

    return replace(op, arguments=tuple((name, change(argument)) for name, argument in op.arguments))


def replace_arguments(op: Op, **given: Argument) -> Op:
    """Return an operation with some arguments replaced, or added."""
    return replace(op, arguments=tuple({**dict(op.arguments), **given}.items()))


def _pointwise(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    """Sizes are aligned at the end; what is whole is taken at the new places where it has all."""
    out = placed.op.outs[0]
    assert out is not None
    ndim = len(placed.shape(out))
    axis = _common_axis(placed, ndim)
    taken = {}
    for value in placed.op.refs():
        dim = axis.dim - (ndim - len(placed.shape(value)))
        if value in placed.axes or dim < 0 or placed.shape(value)[dim] == 1:
            continue
        if axis.is_merged or placed.shape(value)[dim] != placed.length:
            raise placed.refuse("needs a value that has no places")
        taken[value] = placed.take(value, dim)
    return replace_values(placed.op, taken), axis


def _common_axis(placed: PlacedOp, ndim: int) -> PlaceAxis:
    found = {
        replace(placed.axes[value], dim=placed.axes[value].dim + ndim - len(placed.shape(value)))
        for value in placed.op.refs()
        if value in placed.axes
    }
    if len(found) != 1:
        raise placed.refuse("compares places with each other")
    return found.pop()


def _over(name: str, usual: Argument = None) -> Rule:
    """Work along other dimensions than that of the places; those may be gone afterwards."""

    def rule(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
        value, axis = placed.only("self")
        ndim, out = len(placed.shape(value)), next(out for out in placed.op.outs if out is not None)
        dims = placed.dims(name, ndim, usual)
        if axis.dim in dims:
            raise placed.refuse("works along the places")
        num_gone = sum(dim < axis.dim for dim in dims) if len(placed.shape(out)) < ndim else 0
        return placed.op, replace(axis, dim=axis.dim - num_gone)

    return rule


def _normalise(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    value, axis = placed.only("input")
    sizes = placed.argument("normalized_shape")
    if not isinstance(sizes, tuple) or axis.dim >= len(placed.shape(value)) - len(sizes):
        raise placed.refuse("works along the places")
    return placed.op, axis


def _multiply(name: str) -> Rule:
    """A matrix for each place: the last dimension is summed over."""

    def rule(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
        value, axis = placed.only(name)
        if axis.dim == len(placed.shape(value)) - 1:
            raise placed.refuse("works along the places")
        others = [each for each in placed.op.refs() if each != value]
        if any(len(placed.shape(each)) > _MATRIX for each in others):
            raise placed.refuse("multiplies by more than a matrix")
        bias = placed.argument("self") if name == "mat1" else None
        if isinstance(bias, Ref) and len(placed.shape(bias.value)) > 1 and placed.shape(bias.value)[0] != 1:
            raise placed.refuse("adds a value that has no places")
        return placed.op, axis

    return rule


def _look_up(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    return placed.op, placed.only("indices")[1]


def _look_up_rows(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    """`table[tokens]`, where the table is whole."""
    given = placed.argument("indices")
    if not isinstance(given, tuple) or len(given) != 1 or placed.value("self") in placed.axes:
        raise placed.refuse("may mix places")
    return placed.op, placed.axes[next(refs_of(given))]


def _keep(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    """The first argument decides; its dimensions stay, more may come at the end."""
    if placed.value("self") not in placed.axes:
        raise placed.refuse("has places where none are expected")
    return placed.op, placed.axes[placed.value("self")]


def _reshape(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    value, axis = placed.only("self")
    out = placed.op.outs[0]
    assert out is not None
    shape, before = placed.shape(out), _count_before(placed, placed.shape(value), axis)
    for dim in range(len(shape)):
        for is_merged in (False, True):
            found = PlaceAxis(dim, is_merged)
            wanted = Size(placed.length) if is_merged else placed.length
            if shape[dim] == wanted and _count_before(placed, shape, found) == before:
                sizes = tuple(-1 if at == dim else size for at, size in enumerate(shape))
                arguments: tuple[tuple[str, Argument], ...] = (("self", Ref(value)), ("shape", sizes))
                return replace(placed.op, name="aten.reshape.default", arguments=arguments), found
    raise placed.refuse("mixes places with other dimensions")


def _count_before(placed: PlacedOp, shape: Sequence[int | Size], axis: PlaceAxis) -> tuple[int, int]:
    """Return how many numbers lie before a place, as a factor and a power of the rows."""
    factor, power = 1, int(axis.is_merged)
    for size in shape[: axis.dim]:
        if isinstance(size, Size):
            if size.fixed:
                raise placed.refuse("has sizes that grow otherwise than with the rows")
            factor, power = factor * size.per_sample, power + 1
        else:
            factor *= size
    return factor, power


def _permute(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    value, axis = placed.only("self")
    order = placed.dims("dims", len(placed.shape(value)))
    return placed.op, replace(axis, dim=order.index(axis.dim))


def _transpose(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    value, axis = placed.only("self")
    ndim = len(placed.shape(value))
    names = ("axis0", "axis1") if ".swapaxes." in placed.op.name else ("dim0", "dim1")
    (one,), (two,) = placed.dims(names[0], ndim, 0), placed.dims(names[1], ndim, ndim - 1)
    return placed.op, replace(axis, dim={one: two, two: one}.get(axis.dim, axis.dim))


def _unsqueeze(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    value, axis = placed.only("self")
    (dim,) = placed.dims("dim", len(placed.shape(value)) + 1)
    return placed.op, replace(axis, dim=axis.dim + (dim <= axis.dim))


def _squeeze(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    value, axis = placed.only("self")
    dims = placed.dims("dim", len(placed.shape(value)))
    if axis.dim in dims:
        raise placed.refuse("works along the places")
    return placed.op, replace(
        axis, dim=axis.dim - sum(d < axis.dim and placed.shape(value)[d] == 1 for d in dims)
    )


def _expand(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    value, axis = placed.only("self")
    sizes = placed.argument("size")
    assert isinstance(sizes, tuple)
    dim = axis.dim + len(sizes) - len(placed.shape(value))
    kept = tuple(-1 if at == dim else size for at, size in enumerate(sizes))
    return replace_arguments(placed.op, size=kept), replace(axis, dim=dim)


def _slice(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    value, axis = placed.only("self")
    (dim,) = placed.dims("dim", len(placed.shape(value)), 0)
    if dim != axis.dim:
        return placed.op, axis
    start, end, step = placed.argument("start"), placed.argument("end"), placed.argument("step", 1)
    is_all = isinstance(end, int) and (end >= _NO_LIMIT or (end == placed.length and not axis.is_merged))
    if start not in (None, 0) or step != 1 or not (end is None or is_all):
        raise placed.refuse("leaves out places")
    return replace_arguments(placed.op, end=None), axis


def _join(placed: PlacedOp) -> tuple[Op, PlaceAxis]:
    out, is_new = placed.op.outs[0], ".stack." in placed.op.name
    assert out is not None
    joined = [value for value in placed.op.refs() if placed.shape(value) != (0,)]
    if len(joined) == 1 and not is_new:  # to a cache of the model's own, which is empty
        arguments = (("self", Ref(joined[0])),)
        return replace(placed.op, name="aten.alias.default", arguments=arguments), placed.axes[joined[0]]
    ndim = len(placed.shape(out))
    axis = _common_axis(placed, ndim - is_new)
    (dim,) = placed.dims("dim", ndim, 0)
    if not is_new and dim == axis.dim:
        raise placed.refuse("works along the places")
    taken = {}
    for value in placed.op.refs():
        if value not in placed.axes:
            if axis.is_merged or placed.shape(value)[axis.dim] != placed.length:
                raise placed.refuse("needs a value that has no places")
            taken[value] = placed.take(value, axis.dim)
    return replace_values(placed.op, taken), replace(axis, dim=axis.dim + (is_new and dim <= axis.dim))


def _name_all(names: str, rule: Rule) -> Iterator[tuple[str, Rule]]:
    return ((name, rule) for name in names.split())


_RULES: Mapping[str, Rule] = dict(
    (
        *_name_all(
            "add sub rsub mul div floor_divide pow fmod remainder neg abs sign square sqrt rsqrt "
            "reciprocal exp expm1 log log1p log2 sin cos tan tanh sigmoid silu gelu relu relu6 leaky_relu "
            "elu celu selu mish softplus softshrink hardtanh hardsigmoid hardswish log_sigmoid threshold "
            "erf clamp clamp_min clamp_max maximum minimum where masked_fill eq ne lt le gt ge "
            "logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not __and__ __or__ isnan "
            "isinf isfinite nan_to_num floor ceil round trunc to _to_copy contiguous clone detach alias "
            "lift_fresh_copy dropout zeros_like ones_like full_like lerp addcmul addcdiv atan2",
            _pointwise,
        ),
        *_name_all(
            "softmax log_softmax _softmax _log_softmax mean sum var std var_mean amax amin any all",
            _over("dim"),
        ),
        *_name_all("max min argmax argmin logsumexp prod cumsum cumprod linalg_vector_norm", _over("dim")),
        *_name_all("topk sort argsort glu", _over("dim", -1)),
        *_name_all("split split_with_sizes chunk unbind select", _over("dim", 0)),
        *_name_all("narrow repeat_interleave", _over("dim")),
        *_name_all("layer_norm rms_norm", _normalise),
        ("linear", _multiply("input")),
        ("addmm", _multiply("mat1")),
        *_name_all("mm matmul", _multiply("self")),
        ("embedding", _look_up),
        ("index", _look_up_rows),
        *_name_all("one_hot type_as aten.to.other", _keep),
        *_name_all("reshape view flatten unflatten", _reshape),
        ("permute", _permute),
        *_name_all("transpose swapaxes", _transpose),
        ("unsqueeze", _unsqueeze),
        ("squeeze", _squeeze),
        *_name_all("expand broadcast_to", _expand),
        ("slice", _slice),
        *_name_all("cat stack", _join),
    )
)
