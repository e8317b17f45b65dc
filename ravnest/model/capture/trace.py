"""From a program as torch.export writes it to ours: allowed operators on numbered values.

Sizes become numbers that grow with the batch. Operators that are not on the list are written with those that
are (`decompose`), or refused with the user's line. What nothing needs is dropped.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.export.graph_signature import InputKind
from torch.utils._sympy import functions as size_functions

from ravnest.errors import CaptureError
from ravnest.model.blueprint.aliasing import Storages, has_effect, writes
from ravnest.model.blueprint.operators import operators
from ravnest.model.blueprint.program import (
    BUFFER,
    CONSTANT,
    FLOATING,
    PARAMETER,
    Argument,
    Op,
    Program,
    Ratio,
    Ref,
    Size,
    TensorType,
    ValueId,
)
from ravnest.model.capture.capture_errors import BY_SIZE, NO_BATCH_SIZE, refuse_node
from ravnest.model.capture.decompose import decompose, without_write, writes_by_mask
from ravnest.model.capture.sample_length import Lengths
from ravnest.protocol.tensors import ITEM_BYTES


def symbols_of(size: object) -> set[object]:
    """Return the symbols a size consists of; none if it is a plain number."""
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt | torch.SymFloat) else set()


def number_of(size: object, lengths: Lengths) -> int | float | Size | Ratio | None:
    """Return a size as a number that may grow with the batch, or nothing if it does so in another way."""
    if isinstance(size, int | float):
        return size
    assert isinstance(size, torch.SymInt | torch.SymFloat)
    expression = size.node.expr.xreplace(lengths)
    if isinstance(expression, size_functions.FloatTrueDiv | size_functions.IntTrueDiv):
        over, under = (_size(part) for part in expression.args)
        return Ratio(over, under) if over and under else None
    found = _size(expression)
    if found is None:
        return None
    if isinstance(size, torch.SymFloat):
        return Ratio(found, Size(0, 1))
    return found if found.per_sample else found.fixed


def _size(expression: sympy.Expr) -> Size | None:
    """Return a x batch + b, if that is what the expression says."""
    if isinstance(expression, size_functions.ToFloat):
        (expression,) = expression.args
    symbols = sorted(expression.free_symbols, key=str)
    if len(symbols) > 1 or not all(expression.is_polynomial(symbol) for symbol in symbols):
        return None
    slope = sympy.diff(expression, symbols[0]) if symbols else sympy.Integer(0)
    rest = expression - slope * symbols[0] if symbols else expression
    slope, rest = sympy.expand(slope), sympy.expand(rest)
    if not (slope.is_number and rest.is_number and slope == int(slope) and rest == int(rest)):
        return None
    return Size(int(slope), int(rest))


# Uninitialised memory would show a provider's own; zeros serve the same programs.
_INSTEAD = {
    "aten.detach_.default": "aten.detach.default",  # what it returns is used from there on
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
    # A view needs the strides it was traced with; what crosses a cut arrives without them.
    "aten.view.default": "aten.reshape.default",
    "aten.view_as.default": "aten.reshape_as.default",
}
_RENAMED = {("aten.reshape.default", "size"): "shape"}
_SET_BY_STAGE = ("device", "layout", "pin_memory", "generator")
_CHECKS = ("_assert", "sym_constrain_range", "_functional_assert", "_functional_sym_constrain_range")
_NO_GRADIENT = frozenset(
    f"aten.{name}.default"
    for name in ("detach", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
)


@dataclass(frozen=True, slots=True)
class Traced:
    """A program, the tensors behind its state, each with its kind, and the nodes behind its operations."""

    program: Program
    state: dict[str, tuple[str, torch.Tensor]]
    nodes: Mapping[int, fx.Node]


def trace(
    exported: torch.export.ExportedProgram,
    fields: Sequence[str],
    wanted: Sequence[Sequence[str | None]],
    state_name: Callable[[str], str],
    mode: str,
    lengths: Lengths | None = None,
) -> list[Traced]:
    """Turn an exported program with these fields into ours, one for each of the names wanted of its results.

    `state_name` names its state; constants that only stand in the code are named after the mode. `lengths`
    says what the symbols of rows stand for (`sample_length`). A result without a name is left out.
    """
    tracer = _Tracer(exported, state_name, mode, {} if lengths is None else lengths)
    tracer.read_inputs(fields)
    ends = tracer.read_graph(exported.graph_module, {})
    return [
        Traced(_finish(tracer, _name_results(names, ends)), dict(tracer.tensors), tracer.nodes)
        for names in wanted
    ]


def _name_results(names: Sequence[str | None], ends: Sequence[Argument]) -> tuple[tuple[str, ValueId], ...]:
    assert len(ends) == len(names)
    named = []
    for name, end in zip(names, ends, strict=True):
        if name is None:
            continue
        if not isinstance(end, Ref):
            raise CaptureError(
                f"{name!r} is {end!r} whatever the batch holds; return a tensor that is computed from it"
            )
        named.append((name, end.value))
    return tuple(named)


@dataclass
class _Tracer:
    exported: torch.export.ExportedProgram
    state_name: Callable[[str], str]
    mode: str
    lengths: Lengths
    values: dict[ValueId, TensorType] = field(default_factory=dict)
    fields: list[tuple[ValueId, str]] = field(default_factory=list)
    state: dict[str, ValueId] = field(default_factory=dict)
    tensors: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    nodes: dict[int, fx.Node] = field(default_factory=dict)
    known: dict[fx.Node, object] = field(default_factory=dict)
    batch_symbols: set[object] = field(default_factory=set)
    numbers: dict[object, int | float | Size | Ratio | None] = field(default_factory=dict)

    def read_inputs(self, fields: Sequence[str]) -> None:
        """Give every parameter, buffer, constant and batch field its value."""
        nodes = {node.name: node for node in self.exported.graph.nodes if node.op == "placeholder"}
        names = iter(fields)
        for spec in self.exported.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                self.batch_symbols |= symbols_of(node.meta["val"].shape[0])
                value = self._new(node.meta["val"], node)
                self.fields.append((value, next(names)))
                self.known[node] = Ref(value)
            elif spec.target is not None:
                self.known[node] = Ref(self._state(spec.target, spec.kind, bool(spec.persistent), node))

    def _state(self, target: str, kind: InputKind, is_persistent: bool, node: fx.Node) -> ValueId:
        if kind is InputKind.PARAMETER:
            tensor, ours = self.exported.state_dict[target], PARAMETER
        elif kind is InputKind.BUFFER and is_persistent:
            tensor, ours = self.exported.state_dict[target], BUFFER
        elif kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            constant = self.exported.constants[target]
            assert isinstance(constant, torch.Tensor)
            tensor, ours = constant, CONSTANT
        else:
            raise refuse_node(node, f"it uses {target}, which is no tensor", "keep only tensors in the model")
        name = self.state_name(target)
        if kind is InputKind.CONSTANT_TENSOR:
            name = f"{self.mode}.{name}"
        if name not in self.state:
            self.state[name] = self._new(tensor, node)
            self.tensors[name] = (ours, tensor)
        return self.state[name]

    def read_graph(
        self, graph: fx.GraphModule, given: dict[fx.Node, object], precision: str = ""
    ) -> list[Argument]:
        """Append the operations of a graph; return what it returns."""
        self.known.update(given)
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                self.known[node] = getattr(graph, str(node.target))
            elif node.op == "call_function":
                self._read_call(node, precision)
            elif node.op == "output":
                return [self._argument(end, node) for end in _flat(node.args)]
        raise AssertionError("a graph without an output")

    def _read_call(self, node: fx.Node, precision: str) -> None:
        target, value = node.target, node.meta.get("val")
        if isinstance(target, HigherOrderOperator):
            self._read_region(node, target, precision)
        elif target is operator.getitem:
            whole, index = node.args
            assert isinstance(whole, fx.Node)
            self.known[node] = self._find(whole)[index]  # type: ignore[index]
        elif isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
            self.known[node] = value
        elif isinstance(target, OpOverload) and target.__name__.startswith("_assert_scalar"):
            self._check_sizes(node)
        elif isinstance(target, OpOverload) and not target.__name__.startswith(_CHECKS):
            self._read_op(node, target, precision)

    def _check_sizes(self, node: fx.Node) -> None:
        """Refuse a condition on the batch size that does not hold for all of many sizes."""
        asserted = node.args[0]
        value = asserted.meta.get("val") if isinstance(asserted, fx.Node) else None
        if not isinstance(value, torch.SymBool):
            return
        condition = value.node.expr.xreplace(self.lengths)
        symbols = list(condition.free_symbols)
        if len(symbols) == 1 and symbols[0] in self.batch_symbols:
            sizes = (*range(2, 130), *(2**power for power in range(8, 15)))
            if not all(condition.subs(symbols[0], size) == sympy.true for size in sizes):
                raise refuse_node(node, *BY_SIZE)

    def _read_op(self, node: fx.Node, target: OpOverload, precision: str) -> None:
        name = _INSTEAD.get(str(target), str(target))
        if name not in operators() or writes_by_mask(node):
            self._read_other(node, target, precision)
            return
        made = node.meta["val"]
        is_many = operators()[name].num_returns != 1
        outs = tuple(self._new(part, node) for part in (made if is_many else [made]))
        arguments = self._arguments(node, name)
        self.nodes[len(self.ops)] = node
        self.ops.append(Op(name, arguments, outs, len(self.ops), precision))
        self.known[node] = [Ref(out) for out in outs] if is_many else Ref(outs[0])

    def _read_other(self, node: fx.Node, target: OpOverload, precision: str) -> None:
        """Write an operator that is not on the list with those that are, or refuse it."""
        plain = without_write(target)
        if plain is not None and plain in operators() and not writes_by_mask(node):
            self._read_write(node, plain, precision)
            return
        refusal = refuse_node(node, *_why_not(str(target)))
        try:
            found = decompose(node)
        except Exception:  # whatever torch says to a rule that does not fit
            raise refusal from None
        if found is None:
            raise refusal
        graph, tensors = found
        places = [place for place in graph.graph.nodes if place.op == "placeholder"]
        given = {place: self.known[tensor] for place, tensor in zip(places, tensors, strict=True)}
        try:
            ends = self.read_graph(graph, given, precision)
        except CaptureError:
            raise refusal from None
        self.known[node] = ends if isinstance(node.meta["val"], list | tuple) else ends[0]

    def _read_write(self, node: fx.Node, name: str, precision: str) -> None:
        """Write an operator that changes its first argument as one that does not, and a copy."""
        made = self._new(node.meta["val"], node)
        arguments = self._arguments(node, name)
        self.nodes[len(self.ops)] = node
        self.ops.append(Op(name, arguments, (made,), len(self.ops), precision))
        out = self._new(node.meta["val"], node)
        copied = (("self", dict(arguments)["self"]), ("src", Ref(made)))
        self.nodes[len(self.ops)] = node
        self.ops.append(Op("aten.copy_.default", copied, (out,), len(self.ops), precision))
        self.known[node] = Ref(out)

    def _arguments(self, node: fx.Node, name: str) -> tuple[tuple[str, Argument], ...]:
        assert isinstance(node.target, OpOverload)
        given = zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False)
        accepted = {parameter.name for parameter in operators()[name].parameters} - {*_SET_BY_STAGE}
        named = ((_RENAMED.get((name, key), key), value) for key, value in (*given, *node.kwargs.items()))
        return tuple((key, self._argument(value, node)) for key, value in named if key in accepted)

    def _read_region(self, node: fx.Node, target: HigherOrderOperator, precision: str) -> None:
        """Inline a region: detach what it is given if it has no gradient, note the precision of autocast."""
        if target.__name__ == "wrap_with_set_grad_enabled":
            has_gradient, inner, *given = node.args
        elif target.__name__ == "wrap_with_autocast":
            _, dtype, is_enabled, _, inner, *given = node.args
            precision = str(dtype).removeprefix("torch.") if is_enabled else "full"
            has_gradient = True
        else:
            raise refuse_node(
                node,
                f"it uses {target.__name__}, which runs code of its own",
                _PLAIN_OPERATIONS,
            )
        assert isinstance(inner, fx.Node)
        graph = self.known[inner]
        assert isinstance(graph, fx.GraphModule)
        inputs = [place for place in graph.graph.nodes if place.op == "placeholder"]
        values = [self.known[value] if isinstance(value, fx.Node) else value for value in given]
        handed = values if has_gradient else [self._detached(value) for value in values]
        ends = self.read_graph(graph, dict(zip(inputs, handed, strict=True)), precision)
        # A region that returns what it was given returns it with its gradient.
        given_back = {after: before for before, after in zip(values, handed, strict=True) if before != after}
        self.known[node] = [given_back.get(end, end) for end in ends]

    def _detached(self, value: object) -> object:
        if not isinstance(value, Ref) or self.values[value.value].dtype not in FLOATING:
            return value
        out = ValueId(len(self.values))
        self.values[out] = self.values[value.value]
        self.ops.append(Op("aten.detach.default", (("self", value),), (out,), len(self.ops)))
        return Ref(out)

    def _new(self, made: object, node: fx.Node) -> ValueId:
        if not isinstance(made, torch.Tensor):
            raise refuse_node(node, f"it makes {type(made).__name__}, no tensor", "return tensors only")
        dtype = str(made.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise refuse_node(node, f"it uses {dtype} numbers", f"use one of {', '.join(ITEM_BYTES)}")
        shape = []
        for size in made.shape:
            number = self._number(size)
            if not isinstance(number, int | Size) or self._unknown(size):
                raise refuse_node(
                    node,
                    f"the size {size} of a tensor is not a multiple of the batch size",
                    "keep each sample's sizes fixed (pad to one length; mask instead of selecting)",
                )
            shape.append(number)
        value = ValueId(len(self.values))
        self.values[value] = TensorType(dtype, tuple(shape))
        return value

    def _number(self, size: object) -> int | float | Size | Ratio | None:
        """Return a size as a number; few sizes are different, and each takes long."""
        if isinstance(size, int | float):
            return size
        assert isinstance(size, torch.SymInt | torch.SymFloat)
        key = type(size), size.node.expr
        if key not in self.numbers:
            self.numbers[key] = number_of(size, self.lengths)
        return self.numbers[key]

    def _unknown(self, size: object) -> set[object]:
        return symbols_of(size) - self.batch_symbols - self.lengths.keys()

    def _find(self, node: fx.Node) -> object:
        if node not in self.known:
            name = getattr(node.target, "__name__", node.target)
            raise refuse_node(node, f"it uses {name}, which is no operator", _PLAIN_OPERATIONS)
        return self.known[node]

    def _argument(self, value: object, node: fx.Node) -> Argument:
        if isinstance(value, fx.Node):
            value = self._find(value)
        match value:
            case None | bool() | int() | float() | str() | Ref():
                return value
            case list() | tuple():
                return tuple(self._argument(part, node) for part in value)
            case torch.dtype() | torch.memory_format():
                return str(value).removeprefix("torch.")
            case torch.SymInt() | torch.SymFloat() if self._unknown(value):
                raise refuse_node(node, *_READS_VALUES)
            case torch.SymInt() | torch.SymFloat():
                number = self._number(value)
                if number is not None:
                    return number
        raise refuse_node(
            node,
            "it is called with a number that is not a multiple of the batch size",
            "use sizes as they are, or divide and multiply them only",
        )


_PLAIN_OPERATIONS = "write it with plain tensor operations (torch.where instead of torch.cond, no torch.vmap)"
_READS_VALUES = (
    "the code reads a number out of a tensor",
    "keep values in tensors: torch.where or a mask instead of .item(), nonzero() or x[mask]",
)


def _why_not(name: str) -> tuple[str, str]:
    if any(
        word in name for word in ("item", "_local_scalar", "nonzero", "masked_select", "unique", "index_put")
    ):
        return _READS_VALUES
    return (
        f"it uses the operator {name}, which is not on the list of operators that providers run",
        "write it with other operators (docs/models.md lists those allowed), or ask for it to be added",
    )


def _flat(value: object) -> Iterable[object]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _finish(tracer: _Tracer, results: tuple[tuple[str, ValueId], ...]) -> Program:
    """Drop what nothing needs and note which values carry a gradient."""
    needed = {value for _, value in results}
    kept: list[Op] = []
    for op in reversed(tracer.ops):
        if any(out in needed for out in op.outs) or has_effect(op):
            kept.append(op)
            needed.update(op.refs())
    kept.reverse()
    ops = tuple(replace(op, outs=_used_outs(op, needed)) for op in kept)
    needed.update(out for op in ops for out in op.outs if out is not None)
    program = Program(
        values={value: kind for value, kind in tracer.values.items() if value in needed},
        inputs=(),
        fields=tuple(pair for pair in tracer.fields if pair[0] in needed),
        state=tuple((value, name) for name, value in tracer.state.items() if value in needed),
        ops=ops,
        outputs=(),
        results=results,
    )
    _check_fields(program, tracer)
    carried = _gradients(program, tracer)
    values = {
        value: replace(kind, has_gradient=value in carried and kind.dtype in FLOATING)
        for value, kind in program.values.items()
    }
    return replace(program, values=values)


def _check_fields(program: Program, tracer: _Tracer) -> None:
    sized = next((op for op in program.ops if op.needs_batch_size), None)
    if sized is not None and not program.fields:
        raise refuse_node(
            tracer.nodes[sized.number],
            *NO_BATCH_SIZE,
        )
    storages = Storages(program)
    fields = {storages.root(value): name for value, name in program.fields}
    for op in program.ops:
        for value in writes(op):
            if storages.root(value) in fields:
                raise refuse_node(
                    tracer.nodes[op.number],
                    f"it changes the field {fields[storages.root(value)]!r} of the batch in place",
                    "work on a copy: x = x.clone()",
                )


def _used_outs(op: Op, needed: set[ValueId]) -> tuple[ValueId | None, ...]:
    if len(op.outs) == 1:
        return op.outs
    return tuple(out if out in needed else None for out in op.outs)


def _gradients(program: Program, tracer: _Tracer) -> set[ValueId]:
    """Find the values that follow from trained parameters in a differentiable way."""
    storages = Storages(program)
    carried = {value for value, name in program.state if tracer.tensors[name][1].requires_grad}
    sharing: dict[ValueId, set[ValueId]] = defaultdict(set)
    for value in program.values:
        sharing[storages.root(value)].add(value)
    for op in program.ops:
        if op.name not in _NO_GRADIENT and any(value in carried for value in op.refs()):
            carried.update(out for out in op.outs if out is not None)
            for value in writes(op):  # running statistics share no memory with a result and stay without
                if any(out is not None and storages.root(out) == storages.root(value) for out in op.outs):
                    carried |= sharing[storages.root(value)]
    return carried
