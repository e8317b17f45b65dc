"""A program as a function: a torch.fx graph of allowed operators, run on this PC's device.

State, what arrived and a key are arguments of every call. Names in the generated code are ours; no text of a
blueprint becomes code. An allowed kernel may still crash on hostile sizes, and ends the peer with it. Numbers
of the data that are used as an index are checked before a GPU meets them: it would stop for good.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ravnest.config import FrozenFormat
from ravnest.errors import UnknownBatchSize, UnsafeBlueprint
from ravnest.model.blueprint.aliasing import Storages, find_origins
from ravnest.model.blueprint.operators import Parameter, draws, operators
from ravnest.model.blueprint.program import FLOATING, Argument, Op, Program, Ratio, Ref, Size, ValueId
from ravnest.model.stage.frozen_values import FrozenMemory, FrozenValues, note_value, restore, saves_recipes
from ravnest.model.stage.narrow_weights import find_castable, widen

_IGNORED = -100  # as torch's losses have it if nothing else is said


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """An index must be in [first, stop), or be the number that a loss ignores."""

    index: ValueId
    first: int
    stop: int
    ignored: int | None
    what: str


def find_checks(program: Program) -> dict[int, list[IndexCheck]]:
    """Return what to check before operations, by their place in the program.

    Only what is computed from the batch alone is checked: no weights, so that nothing waits for a long queue.
    """
    of_data = {value for value, _ in program.fields}
    of_data |= {value for value in program.inputs if program.values[value].dtype not in FLOATING}
    with_weights = {value for value, _ in program.state}
    with_weights |= set(program.inputs) - of_data
    found: dict[int, list[IndexCheck]] = {}
    for place, op in enumerate(program.ops):
        refs = set(op.refs())
        outs = {out for out in op.outs if out is not None}
        if refs & with_weights:
            with_weights |= outs
        elif refs & of_data:
            of_data |= outs
        checks = [check for check in _checks_of(op, program) if check.index in of_data - with_weights]
        if checks:
            found[place] = checks
    return found


def check_index(index: torch.Tensor, first: int, stop: int, ignored: int | None, what: str) -> None:
    """Raise IndexError as a CPU would."""
    if index.is_floating_point() or index.dtype is torch.bool:  # shares of classes; a mask
        return
    is_wrong = (index < first) | (index >= stop)
    if ignored is not None:
        is_wrong &= index != ignored
    if bool(is_wrong.any()):
        raise IndexError(f"{what} {int(index[is_wrong][0])} is out of bounds")


def _checks_of(op: Op, program: Program) -> Iterator[IndexCheck]:
    given, name = dict(op.arguments), op.name.split(".")[1]
    source = given.get("weight" if name == "embedding" else "self")
    if not isinstance(source, Ref):
        return
    shape = program.values[source.value].shape
    ignored: Argument = None
    is_signed, what = False, "Index"
    indices: list[tuple[Argument, Argument]]
    match name:
        case "embedding":
            indices = [(0, given.get("indices"))]
        case "cross_entropy_loss" | "nll_loss" | "nll_loss_nd":
            ignored = given.get("ignore_index", _IGNORED)
            what = "Target"
            indices = [(1 if len(shape) > 1 else 0, given.get("target"))]
        case "gather" | "index_select" | "scatter" | "scatter_add" | "take_along_dim":
            indices = [(given.get("dim"), given.get("index", given.get("indices")))]
        case "index" | "index_put" | "index_put_":
            is_signed = True
            listed = given.get("indices")
            indices = list(enumerate(listed if isinstance(listed, tuple) else ()))
        case _:
            return
    for at, index in indices:
        if not isinstance(index, Ref) or not isinstance(at, int) or not -len(shape) <= at < len(shape):
            continue
        size = shape[at]
        if isinstance(size, int) and isinstance(ignored, int | None):
            yield IndexCheck(index.value, -size if is_signed else 0, size, ignored, what)


MicrobatchKey = tuple[int, int]  # seed, batch number: with the operation's number they seed its randomness
_Tensors = tuple[torch.Tensor, ...]
_Passed = tuple[_Tensors, _Tensors]
_EMBEDDING = "aten.embedding.default"


@dataclass(frozen=True, slots=True)
class Setting:
    """How a stage runs here: device, mixed precision, activations computed again, indices checked.

    Blocks are cut for `window` microbatches in flight.
    """

    device: torch.device = torch.device("cpu")  # noqa: RUF009 - a device is a value
    autocast: torch.dtype | None = None
    recompute: bool = False
    checks_indices: bool = False  # before operations meet them; a CPU's do that themselves
    window: int = 4

    def cast(self) -> AbstractContextManager[Any]:
        """Return the context of its mixed precision."""
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)


def resolve(name: str) -> OpOverload:
    """Return torch's operator for an allowed name, if this torch has it with the schema we know."""
    if name not in operators():
        raise UnsafeBlueprint(f"operator {name:.60} is not on the list of allowed operators")
    _, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(found, OpOverload) or str(found._schema) != operators()[name].schema:
        raise UnsafeBlueprint(
            f"torch {torch.__version__} has no {name} with the schema {operators()[name].schema}; "
            "install the torch version of this Ravnest"
        )
    return found


def convert(
    argument: Argument, parameter: Parameter, convert_value: Callable[[Ref | Size | Ratio], Any]
) -> Any:
    """Return an argument as torch takes it; `convert_value` says what a value or a size stands for."""
    if isinstance(argument, Ref | Size | Ratio):
        return convert_value(argument)
    if isinstance(argument, tuple):
        return [convert(part, parameter, convert_value) for part in argument]
    if isinstance(argument, str) and parameter.type in ("ScalarType", "MemoryFormat"):
        return getattr(torch, argument)
    return argument


def bind(
    op: Op, device: torch.device, convert_value: Callable[[Ref | Size | Ratio], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments for an operation; tensors are made on the device given."""
    given = dict(op.arguments)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    has_gap = False
    for parameter in operators()[op.name].parameters:
        if parameter.type == "Device":
            value: Any = device
        elif parameter.name in given:
            value = convert(given[parameter.name], parameter, convert_value)
        else:
            has_gap = True
            continue
        if has_gap or parameter.is_keyword:
            keywords[parameter.name] = value
        else:
            positional.append(value)
    return tuple(positional), keywords


class ProgramGraph:
    """A program, or a block of one, as a function of state, what arrived and a key."""

    def __init__(self, frozen: FrozenValues, setting: Setting) -> None:
        self.program = frozen.program
        self._frozen, self._setting = frozen, setting
        # Not the module itself: while another thread traces, calling a module is a traced call.
        self._call: Callable[..., _Passed] = GraphBuilder(frozen, setting).build().forward
        self._remakers: dict[ValueId, ProgramGraph] = {}

    def run(
        self, kept: Mapping[ValueId, torch.Tensor], arrived: Sequence[torch.Tensor], key: MicrobatchKey | None
    ) -> _Passed:
        """Run it in mixed precision; for its backward, frozen values and wide weights are made again."""
        frozen, memory = self._frozen, None
        saving: AbstractContextManager[None] = nullcontext()
        if torch.is_grad_enabled():
            values = self.program.values
            is_narrow = any(
                tensor.dtype is torch.bfloat16 and tensor.requires_grad and values[value].dtype == "float32"
                for value, tensor in kept.items()
            )
            memory = (
                FrozenMemory(kept, partial(self._remake, kept)) if frozen.stored or frozen.large else None
            )
            saving = saves_recipes(memory, is_narrow=is_narrow) if memory or is_narrow else nullcontext()
        with self._setting.cast(), saving:
            return self._call(*kept.values(), *arrived, key, memory)

    def _remake(self, kept: Mapping[ValueId, torch.Tensor], value: ValueId) -> torch.Tensor:
        if value not in self._remakers:
            alone = FrozenValues(self._frozen.cut_out(value), self._frozen.entries)
            self._remakers[value] = ProgramGraph(alone, self._setting)
        remaker = self._remakers[value]
        state = {known: kept[known] for known, _ in remaker.program.state}
        return remaker.run(state, (), None)[0][0]


class GraphBuilder:
    """Writes a program down as a torch.fx graph."""

    def __init__(self, frozen: FrozenValues, setting: Setting, *, is_keyed: bool = True) -> None:
        self._frozen = frozen
        self._program = program = frozen.program
        self._setting = setting
        self._is_keyed = is_keyed
        self._memory: fx.Node | None = None
        self._graph = fx.Graph()
        self._nodes: dict[ValueId, fx.Node] = {}
        self._sizes: dict[Size, fx.Node] = {}
        storages = Storages(program)
        self._castable = find_castable(program) if setting.autocast is torch.bfloat16 else frozenset()
        self._may_be_narrow = {
            value
            for value, _ in program.state
            if program.values[value].dtype == "float32"
            and value not in self._castable
            and value not in frozen.stored
            and not storages.is_written(value)
        }

    def build(self) -> fx.GraphModule:
        """Return the graph as a module without parameters: state, fields, inputs and a key are arguments."""
        program = self._program
        given = [
            *(value for value, _ in program.state),
            *(value for value, _ in program.fields),
            *program.inputs,
        ]
        for value in given:
            self._nodes[value] = self._graph.placeholder(f"v{value}")
        key = self._graph.placeholder("key") if self._is_keyed else None
        self._memory = self._graph.placeholder("memory") if self._is_keyed else None
        for op in program.ops:
            if key is not None and draws(op.name, dict(op.arguments)):
                self._graph.call_function(seed_generator, (key, op.number, self._setting.device))
            self._add(op)
        outputs = tuple(self._nodes[value] for value in program.outputs)
        results = tuple(self._nodes[value] for _, value in program.results)
        self._graph.output((outputs, results))
        return fx.GraphModule(torch.nn.Module(), self._graph)

    def build_checks(self) -> Callable[..., None] | None:
        """Return what checks the indices in fields and in inputs of whole numbers; None without any."""
        program, checks = self._program, find_checks(self._program)
        if not checks:
            return None
        given = [value for value, _ in program.fields]
        given += [value for value in program.inputs if program.values[value].dtype not in FLOATING]
        for value in given:
            self._nodes[value] = self._graph.placeholder(f"v{value}")
        needed = find_origins(program, [check.index for some in checks.values() for check in some])
        for place, op in enumerate(program.ops):
            for check in checks.get(place, ()):
                facts = (check.first, check.stop, check.ignored, check.what)
                self._graph.call_function(check_index, (self._nodes[check.index], *facts))
            if place in needed:
                self._add(op)
        self._graph.output(None)
        run: Callable[..., None] = fx.GraphModule(torch.nn.Module(), self._graph).forward
        return run

    def _add(self, op: Op) -> None:
        target = resolve(op.name)
        if op.needs_batch_size and Size(1) not in self._sizes:
            self._sizes[Size(1)] = self._batch_size(op)
        widens = op.name == _EMBEDDING and self._looks_up_narrow(op)
        convert_value = self._convert_as_stored if widens else self._convert_value
        positional, keywords = bind(op, self._setting.device, convert_value)
        if op.precision and (op.precision != "full" or self._setting.autocast is not None):
            dtype = None if op.precision == "full" else getattr(torch, op.precision)
            positional = (target, self._setting.device.type, dtype, *positional)
            node = self._graph.call_function(_run_at_precision, positional, keywords)
        else:
            node = self._graph.call_function(target, positional, keywords)
        if operators()[op.name].num_returns == 1:
            assert op.outs[0] is not None
            if widens:
                wide = getattr(torch, self._program.values[op.outs[0]].dtype)
                node = self._graph.call_function(widen, (node, wide))
            self._nodes[op.outs[0]] = node
        else:
            for index, out in enumerate(op.outs):
                if out is not None:
                    self._nodes[out] = self._graph.call_function(operator.getitem, (node, index))
        if self._memory is not None:
            for out in (out for out in op.outs if out in self._frozen.large):
                self._graph.call_function(note_value, (self._memory, self._nodes[out], int(out)))

    def _looks_up_narrow(self, op: Op) -> bool:
        """Return whether rows of a stored table are looked up: only they are widened then, not the table."""
        stored = [self._frozen.stored.get(value) for value in op.refs()]
        return any(entry is not None and entry.storage is FrozenFormat.BF16 for entry in stored)

    def _convert_as_stored(self, argument: Ref | Size | Ratio) -> fx.Node:
        return self._nodes[argument.value] if isinstance(argument, Ref) else self._convert_value(argument)

    def _convert_value(self, argument: Ref | Size | Ratio) -> fx.Node:
        if isinstance(argument, Ref):
            stored = self._frozen.stored.get(argument.value)
            if stored is not None:  # for each operation anew, so that it is gone after it
                is_cast = argument.value in self._castable
                dtype = torch.bfloat16 if is_cast else getattr(torch, stored.dtype)
                node, form = self._nodes[argument.value], str(stored.storage)
                return self._graph.call_function(restore, (self._memory, node, form, stored.shape, dtype))
            if argument.value in self._may_be_narrow:  # widened once, where it is first used
                self._may_be_narrow.remove(argument.value)
                given = (self._nodes[argument.value], torch.float32)
                self._nodes[argument.value] = self._graph.call_function(widen, given)
            return self._nodes[argument.value]
        if isinstance(argument, Ratio):
            over, under = self._convert_value(argument.over), self._convert_value(argument.under)
            return self._graph.call_function(operator.truediv, (over, under))
        if argument not in self._sizes:
            grown = self._graph.call_function(operator.mul, (self._sizes[Size(1)], argument.per_sample))
            self._sizes[argument] = self._graph.call_function(operator.add, (grown, argument.fixed))
        return self._sizes[argument]

    def _batch_size(self, op: Op) -> fx.Node:
        for value in (*(value for value, _ in self._program.fields), *self._program.inputs):
            for dim, size in enumerate(self._program.values[value].shape if value in self._nodes else ()):
                if isinstance(size, Size) and size.per_sample > 0 and size.fixed == 0:
                    whole = self._graph.call_method("size", (self._nodes[value], dim))
                    return self._graph.call_function(operator.floordiv, (whole, size.per_sample))
        raise UnknownBatchSize(op.name, op.number)


def move_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a tensor to the device; a GPU fetches it from pinned memory while the program goes on."""
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor if tensor.device == device else tensor.to(device)


def _run_at_precision(
    target: OpOverload, device_type: str, dtype: torch.dtype | None, *arguments: Any, **keywords: Any
) -> Any:
    with torch.autocast(device_type, dtype, enabled=dtype is not None):
        return target(*arguments, **keywords)


def seed_generator(key: MicrobatchKey | None, number: int, device: torch.device) -> None:
    """Seed the device's generator from the run, the batch and the operation, whatever the cut."""
    if key is None:
        return
    seed = _mix(_mix(_mix(key[0]) ^ key[1]) ^ number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _mix(number: int) -> int:
    """Return 63 well-mixed bits of a number (splitmix64)."""
    mask = (1 << 64) - 1
    number = (number + 0x9E3779B97F4A7C15) & mask
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
    return (number ^ (number >> 31)) >> 1
