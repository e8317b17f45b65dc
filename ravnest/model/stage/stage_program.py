"""From a blueprint to a callable stage, on this PC's device, with nothing but the allowed operators.

Parameters are arguments of every call, so an older version of the weights can still run backward after an
update. Names in the generated code are ours; no text of a blueprint becomes code. An allowed
kernel may still crash on hostile sizes, and ends the peer with it.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ravnest.config import FrozenFormat
from ravnest.errors import ProtocolError, UnsafeBlueprint
from ravnest.model.blueprint.aliasing import Storages, find_origins
from ravnest.model.blueprint.operators import Parameter, draws, operators
from ravnest.model.blueprint.program import (
    FLOATING,
    Argument,
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
from ravnest.model.blueprint.recompute_blocks import find_blocks
from ravnest.model.stage.compiled_stage import CompiledBackward, StageCompiler, StageToCompile, TracedStage
from ravnest.model.stage.frozen_values import FrozenMemory, FrozenValues, note_value, restore, saves_recipes
from ravnest.model.stage.index_checks import check_index, find_checks
from ravnest.model.stage.narrow_weights import find_castable, widen
from ravnest.model.stage.run_again import run_again_in_backward
from ravnest.model.stage.text_model import make_generation_program

State = Mapping[str, torch.Tensor]
MicrobatchKey = tuple[int, int]  # seed, batch number: with the operation's number they seed its randomness
MakeCompiler = Callable[[StageToCompile], StageCompiler]
_Values = Mapping[ValueId, torch.Tensor]
_Tensors = tuple[torch.Tensor, ...]
_Passed = tuple[_Tensors, _Tensors]
_EMBEDDING = "aten.embedding.default"


@dataclass(frozen=True, slots=True)
class StageOutputs:
    """What a stage made of one batch: values for the next stage; loss and metrics in the last one.

    A compiled stage brings its `backward`; of any other, autograd has it.
    """

    outputs: dict[ValueId, torch.Tensor]
    results: dict[str, torch.Tensor]
    backward: CompiledBackward | None = None


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


class StageProgram:
    """A stage that runs, compiled if `make_compiler` is given. Built by `build_stage_program`.

    Weights may come in bf16 instead of fp32.
    """

    def __init__(
        self, blueprint: Blueprint, setting: Setting, make_compiler: MakeCompiler | None = None
    ) -> None:
        self.blueprint = blueprint
        self.setting = setting
        entries = {entry.name: entry for entry in blueprint.state}
        self._train = _Runner(blueprint.train, entries, setting)
        if make_compiler is not None:
            stage = StageToCompile(blueprint, setting.device, setting.autocast, self._train.trace)
            self._train.compiler = make_compiler(stage)
        self._evaluate = _Runner(blueprint.evaluate, entries, setting)
        self._generate: _Runner | None = None  # made for the first text

    @property
    def castable(self) -> frozenset[str]:
        """Weights of which the training program only ever uses a cast to bf16, in mixed precision."""
        if self.setting.autocast is not torch.bfloat16:
            return frozenset()
        found = find_castable(self.blueprint.train)
        return frozenset(name for value, name in self.blueprint.train.state if value in found)

    def trace(self, arguments: Sequence[torch.Tensor]) -> TracedStage:
        """Return the training program as a function of its state, fields and inputs, in this order."""
        return self._train.trace(arguments)

    def forward(
        self,
        state: State,
        inputs: Mapping[ValueId, torch.Tensor],
        fields: Mapping[str, torch.Tensor],
        *,
        training: bool = True,
        key: MicrobatchKey | None = None,
    ) -> StageOutputs:
        """Run one batch. Without a key, random operations draw from torch's generator as the module would."""
        runner = self._train if training else self._evaluate
        return runner.run(state, inputs, fields, key)

    def forward_text(self, state: State, inputs: _Values, fields: State) -> StageOutputs:
        """Run rows of tokens as in evaluation; the last stage gives logits instead of loss and metrics."""
        if self._generate is None:
            entries = {entry.name: entry for entry in self.blueprint.state}
            self._generate = _Runner(make_generation_program(self.blueprint.evaluate), entries, self.setting)
        return self._generate.run(state, inputs, fields, None)


def build_stage_program(
    blueprint: Blueprint,
    device: str | torch.device = "cpu",
    *,
    autocast: torch.dtype | None = None,
    recompute: bool = False,
    window: int = 4,
    make_compiler: MakeCompiler | None = None,
) -> StageProgram:
    """Make a stage callable, and compiled where a compiler is given and activations are kept.

    `window` microbatches may be in flight.
    """
    place = torch.device(device)
    has_stored = any(entry.storage is not FrozenFormat.FP32 for entry in blueprint.state)
    make_compiler = None if recompute or has_stored else make_compiler
    checks_indices = place.type != "cpu" or make_compiler is not None
    setting = Setting(place, autocast, recompute, checks_indices, window)
    return StageProgram(blueprint, setting, make_compiler)


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


def check_batch(program: Program, inputs: Mapping[ValueId, torch.Tensor], fields: State) -> int:
    """Return the batch size that everything which arrived agrees on, or say what does not fit."""
    arrived = [(f"value {value}", value, inputs.get(value)) for value in program.inputs]
    arrived += [(f"field {name!r}", value, fields.get(name)) for value, name in program.fields]
    batch_size = 0
    for what, value, tensor in arrived:
        expected = program.values[value]
        if tensor is None:
            raise ProtocolError(f"{what} is missing from the batch")
        batch_size = batch_size or _batch_size(expected, tensor)
        shape = expected.shape_at(batch_size)
        if tuple(tensor.shape) != shape or tensor.dtype is not getattr(torch, expected.dtype):
            raise ProtocolError(
                f"{what} is {tensor.dtype} {tuple(tensor.shape)}, but {expected.dtype} {shape} is expected"
            )
    return batch_size


def _batch_size(expected: TensorType, tensor: torch.Tensor) -> int:
    for size, actual in zip(expected.shape, tensor.shape, strict=False):
        if isinstance(size, Size) and size.per_sample > 0:
            return (actual - size.fixed) // size.per_sample
    return 0


class _Runner:
    """One program of a stage, as a graph that torch turns into plain Python."""

    def __init__(
        self,
        program: Program,
        entries: Mapping[str, StateEntry],
        setting: Setting,
    ) -> None:
        self._program = program
        self._setting = setting
        self._frozen = frozen = FrozenValues(program, entries)
        storages = Storages(program)
        self._written = [value for value, _ in program.state if storages.is_written(value)]
        self._graph = _Graph(frozen, setting)
        self._check = _Builder(frozen, Setting()).build_checks() if setting.checks_indices else None
        self._draws = [op.number for op in program.ops if draws(op.name, dict(op.arguments))]
        self.compiler: StageCompiler | None = None
        blocks = find_blocks(program, setting.window) if setting.recompute else []
        self._blocks = [_Graph(FrozenValues(block.program, entries), setting) for block in blocks]

    def run(self, state: State, inputs: _Values, fields: State, key: MicrobatchKey | None) -> StageOutputs:
        program, setting = self._program, self._setting
        num_samples = check_batch(program, inputs, fields)
        kept = {value: state[name] for value, name in program.state}
        arrived = [fields[name] for _, name in program.fields] + [inputs[value] for value in program.inputs]
        if self._check is not None:
            whole = (tensor for tensor in arrived[len(program.fields) :] if not tensor.is_floating_point())
            self._check(*(tensor.cpu() for tensor in (*arrived[: len(program.fields)], *whole)))
        arrived = [_move(tensor, setting.device) for tensor in arrived]
        if self.compiler is not None and torch.is_grad_enabled() and key is not None:
            passed = self._run_compiled(self.compiler, [*kept.values(), *arrived], key, num_samples)
            if passed is not None:
                return passed
        if setting.recompute and torch.is_grad_enabled():
            with setting.cast():
                outputs, results = self._run_in_blocks(kept, arrived, key)
        else:
            outputs, results = self._graph.run(kept, arrived, key)
        return self._name(self._widen(outputs), results)

    def _widen(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Undo autocast: a value may come out narrower than declared, but travels as declared."""
        pairs = zip(self._program.outputs, outputs, strict=True)
        return tuple(output.to(getattr(torch, self._program.values[value].dtype)) for value, output in pairs)

    def _name(self, outputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> StageOutputs:
        names = (name for name, _ in self._program.results)
        sent = dict(zip(self._program.outputs, outputs, strict=True))
        return StageOutputs(sent, dict(zip(names, results, strict=True)))

    def _run_compiled(
        self, compiler: StageCompiler, arguments: list[torch.Tensor], key: MicrobatchKey, num_samples: int
    ) -> StageOutputs | None:
        """Run the compiled stage; None where it is not compiled, or not yet."""
        parts = compiler.find(num_samples, arguments)
        if parts is None:
            return None
        if self._draws:  # masks are other ones than those of an uncompiled stage, but the same for one key
            _seed(key, self._draws[0], self._setting.device)
        places = {value: place for place, (value, _) in enumerate(self._program.state)}
        written = [arguments[places[value]] for value in self._written]
        num_shown = parts.layout.num_shown
        try:
            with torch.no_grad():
                found = list(parts.forward(list(arguments)))
        except Exception as error:  # compiled code may raise anything
            compiler.give_up(error)
            return None
        shown = found[:num_shown]
        buffers = shown[len(shown) - len(written) :] if written else []
        with torch.no_grad():
            for before, after in zip(written, buffers, strict=True):
                before.copy_(after)
        outputs = shown[: len(self._program.outputs)]
        results = shown[len(outputs) : len(shown) - len(buffers)]
        sent = dict(zip(map(int, self._program.outputs), outputs, strict=True))
        named = self._name(outputs, results)
        loss = named.results.get("loss")
        backward = CompiledBackward(parts, found[num_shown:], sent, loss, compiler.give_up)
        return replace(named, backward=backward)

    def trace(self, arguments: Sequence[torch.Tensor]) -> TracedStage:
        """Return the stage as a function without effects: changed buffers are copied, and returned."""
        program, setting = self._program, self._setting
        graph = _Builder(self._frozen, setting, is_keyed=False).build().forward
        places = {value: place for place, (value, _) in enumerate(program.state)}
        written = [places[value] for value in self._written]

        def run(*given: torch.Tensor) -> tuple[_Tensors, _Tensors, _Tensors]:
            tensors = list(given)
            for place in written:
                tensors[place] = tensors[place].clone()
            with setting.cast():
                outputs, results = graph(*tensors)
            return self._widen(outputs), results, tuple(tensors[place] for place in written)

        names = [name for name, _ in program.results]
        first = len(arguments) - len(program.inputs)
        inputs = [(first + place, value) for place, value in enumerate(program.inputs)]
        weights = [(places[value], name) for value, name in program.state]
        return TracedStage(
            run,
            tuple(program.outputs),
            names.index("loss") if "loss" in names else None,
            tuple((place, value) for place, value in inputs if arguments[place].requires_grad),
            tuple((place, name) for place, name in weights if arguments[place].requires_grad),
        )

    def _run_in_blocks(
        self, kept: dict[ValueId, torch.Tensor], arrived: list[torch.Tensor], key: MicrobatchKey | None
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Keep only what crosses between blocks; backward runs each block again before its own."""
        program = self._program
        given = [*(value for value, _ in program.fields), *program.inputs]
        values = {**kept, **dict(zip(given, arrived, strict=True))}
        for block in self._blocks:
            state = {value: kept[value] for value, _ in block.program.state}
            passed = self._run_twice(block, state, [values[value] for value in block.program.inputs], key)
            values.update(zip(block.program.outputs, passed, strict=True))
        results = tuple(values[value] for _, value in program.results)
        return tuple(values[value] for value in program.outputs), results

    def _run_twice(
        self,
        block: "_Graph",
        kept: dict[ValueId, torch.Tensor],
        arrived: list[torch.Tensor],
        key: MicrobatchKey | None,
    ) -> tuple[torch.Tensor, ...]:
        """Keep only what arrived; backward runs a block again, on the buffers as they were before."""
        before = {value: kept[value].clone() for value in self._written if value in kept}
        watched = [tensor for value, tensor in kept.items() if value not in before] + arrived
        versions = [tensor._version for tensor in watched]
        is_again = False

        def run(*arrived: torch.Tensor) -> tuple[torch.Tensor, ...]:
            nonlocal is_again
            if is_again and [tensor._version for tensor in watched] != versions:
                raise RuntimeError("a tensor was changed in place between the forward and its backward")
            state = (
                {**kept, **{value: tensor.clone() for value, tensor in before.items()}} if is_again else kept
            )
            is_again = True
            return block.run(state, arrived, key)[0]

        return run_again_in_backward(run, arrived, keeps_random=key is None)


class _Graph:
    """A program, or a block of one, as a function of state, what arrived and a key."""

    def __init__(self, frozen: FrozenValues, setting: Setting) -> None:
        self.program = frozen.program
        self._frozen, self._setting = frozen, setting
        # Not the module itself: while another thread traces, calling a module is a traced call.
        self._call: Callable[..., _Passed] = _Builder(frozen, setting).build().forward
        self._remakers: dict[ValueId, _Graph] = {}

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
            self._remakers[value] = _Graph(alone, self._setting)
        remaker = self._remakers[value]
        state = {known: kept[known] for known, _ in remaker.program.state}
        return remaker.run(state, (), None)[0][0]


class _Builder:
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
                self._graph.call_function(_seed, (key, op.number, self._setting.device))
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
        batch_size = self._batch_size()
        if argument not in self._sizes:
            grown = self._graph.call_function(operator.mul, (batch_size, argument.per_sample))
            self._sizes[argument] = self._graph.call_function(operator.add, (grown, argument.fixed))
        return self._sizes[argument]

    def _batch_size(self) -> fx.Node:
        one = Size(1)
        if one in self._sizes:
            return self._sizes[one]
        for value in (*(value for value, _ in self._program.fields), *self._program.inputs):
            for dim, size in enumerate(self._program.values[value].shape if value in self._nodes else ()):
                if isinstance(size, Size) and size.per_sample > 0 and size.fixed == 0:
                    whole = self._graph.call_method("size", (self._nodes[value], dim))
                    count = self._graph.call_function(operator.floordiv, (whole, size.per_sample))
                    self._sizes[one] = count
                    return count
        raise UnsafeBlueprint(
            "an operation needs the batch size, but nothing that arrives at the stage has it"
        )


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a tensor to the device; a GPU fetches it from pinned memory while the program goes on."""
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor if tensor.device == device else tensor.to(device)


def _run_at_precision(
    target: OpOverload, device_type: str, dtype: torch.dtype | None, *arguments: Any, **keywords: Any
) -> Any:
    with torch.autocast(device_type, dtype, enabled=dtype is not None):
        return target(*arguments, **keywords)


def _seed(key: MicrobatchKey | None, number: int, device: torch.device) -> None:
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
