"""From a blueprint to a callable stage, on this PC's device, with nothing but the allowed operators.

Parameters are arguments of every call, so an older version of the weights can still run backward after an
update. `program_graph` makes the function; this is what a stage does with it: mixed precision, blocks that
are computed again, compiled parts, texts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ravnest.config import FrozenFormat
from ravnest.errors import ProtocolError
from ravnest.model.blueprint.aliasing import Storages
from ravnest.model.blueprint.operators import draws
from ravnest.model.blueprint.program import (
    Blueprint,
    Program,
    Size,
    StateEntry,
    TensorType,
    ValueId,
)
from ravnest.model.stage.compiled_stage import CompiledBackward, StageCompiler, StageToCompile, TracedStage
from ravnest.model.stage.frozen_values import FrozenValues
from ravnest.model.stage.narrow_weights import find_castable
from ravnest.model.stage.program_graph import (
    GraphBuilder,
    MicrobatchKey,
    ProgramGraph,
    Setting,
    move_tensor,
    seed_generator,
)
from ravnest.model.stage.recompute import find_blocks, run_again_in_backward
from ravnest.model.stage.text_model import make_generation_program

State = Mapping[str, torch.Tensor]
MakeCompiler = Callable[[StageToCompile], StageCompiler]
_Values = Mapping[ValueId, torch.Tensor]
_Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class StageOutputs:
    """What a stage made of one batch: values for the next stage; loss and metrics in the last one.

    A compiled stage brings its `backward`; of any other, autograd has it.
    """

    outputs: dict[ValueId, torch.Tensor]
    results: dict[str, torch.Tensor]
    backward: CompiledBackward | None = None


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
        self._graph = ProgramGraph(frozen, setting)
        self._check = GraphBuilder(frozen, Setting()).build_checks() if setting.checks_indices else None
        self._draws = [op.number for op in program.ops if draws(op.name, dict(op.arguments))]
        self.compiler: StageCompiler | None = None
        blocks = find_blocks(program, setting.window) if setting.recompute else []
        self._blocks = [ProgramGraph(FrozenValues(block.program, entries), setting) for block in blocks]

    def run(self, state: State, inputs: _Values, fields: State, key: MicrobatchKey | None) -> StageOutputs:
        program, setting = self._program, self._setting
        num_samples = check_batch(program, inputs, fields)
        kept = {value: state[name] for value, name in program.state}
        arrived = [fields[name] for _, name in program.fields] + [inputs[value] for value in program.inputs]
        if self._check is not None:
            whole = (tensor for tensor in arrived[len(program.fields) :] if not tensor.is_floating_point())
            self._check(*(tensor.cpu() for tensor in (*arrived[: len(program.fields)], *whole)))
        arrived = [move_tensor(tensor, setting.device) for tensor in arrived]
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
            seed_generator(key, self._draws[0], self._setting.device)
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
        graph = GraphBuilder(self._frozen, setting, is_keyed=False).build().forward
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
        block: ProgramGraph,
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
