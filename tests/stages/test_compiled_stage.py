"""A compiled stage trains as an uncompiled one does; where compiling fails, training goes on without it."""

import os
import py_compile
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ravnest.config import TIMEOUTS
from ravnest.engine.optimizers import Group, OptimizerSettings, Sgd
from ravnest.engine.stage import DroppedWork, Roles, StageEngine
from ravnest.engine.weight_versions import Snapshot
from ravnest.errors import RavnestError
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import capture
from ravnest.model.stage.compiled_stage import CompiledParts, StageCompiler
from ravnest.model.stage.joint_graph import cut_stage, examples_of
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.peer.compile_process import CompileProcess, compile_apart, keep_code, load_part
from ravnest.peer.compile_program import run_once
from ravnest.peer.machine import keep_compiled
from ravnest.peer.stage_builder import find_roles

WIDTH, LENGTH, NUM_TOKENS = 16, 8, 40


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        parts = self.attend(self.first(x)).reshape(x.shape[0], LENGTH, 3, 2, WIDTH // 2)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.join(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


class Tiny(nn.Module):
    """Tokens, two blocks, logits."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Pictures(nn.Module):
    """Running statistics that a forward writes, and operations in place."""

    def __init__(self):
        super().__init__()
        self.filters, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, NUM_TOKENS)

    def forward(self, pixels):
        return self.head(F.relu(self.norm(self.filters(pixels)), inplace=True).mean((2, 3)))


def batch(num_samples=4, seed=0):
    ids = torch.randint(NUM_TOKENS, (num_samples, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def loss_of(logits, fields):
    return F.cross_entropy(logits.flatten(0, -2), fields["labels"].flatten())


@cache
def captured_tokens(dropout=0.0):
    torch.manual_seed(0)
    return capture(Tiny(dropout), batch(), loss_of)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, NUM_TOKENS)

    def forward(self, pixels):
        return self.second(torch.tanh(self.first(pixels)))


def uncompiled(graph, _):
    """A compiler that leaves the parts as they are."""
    return graph


def at_once(work):
    work()


def compiler(compile_part=uncompiled, in_background=at_once, warn=pytest.fail):
    """A compiler in this process: `in_background` says when, `compile_part` what it makes of a graph."""

    def boxed(graph):
        run = compile_part(graph, examples_of(graph))
        return lambda given: run(*given)

    def compile_stage(stage, arguments):
        found, mode = [], FakeTensorMode()
        examples = [mode.from_tensor(tensor) for tensor in arguments]

        def work():
            cut = cut_stage(stage.trace(arguments), mode, examples)
            graphs = (cut.forward, cut.inputs, cut.weights)
            found.append(CompiledParts(*(graph and boxed(graph) for graph in graphs), cut.layout))

        in_background(work)
        return lambda: found[0] if found else None

    return partial(StageCompiler, compile_stage=compile_stage, warn=warn)


class Line:
    """The stages of one model, each compiled or not."""

    def __init__(self, captured, cuts=(), make_compiler=None, compiles=(True, True)):
        blueprint = captured.blueprint
        ends = [blueprint.start, *cuts, blueprint.stop]
        self.parts = [slice_blueprint(blueprint, low, high) for low, high in pairwise(ends)]
        self.stages = []
        for part, is_compiled in zip(self.parts, compiles, strict=False):
            names = tuple(entry.name for entry in part.state if entry.is_trainable)
            settings = OptimizerSettings((Group(names, Sgd()),), 0.1)
            state = {entry.name: captured.state[entry.name].detach().clone() for entry in part.state}
            program = build_stage_program(part, make_compiler=make_compiler if is_compiled else None)
            self.stages.append(StageEngine(program, Snapshot(0, state, {}), find_roles(part), settings))

    def train(self, number, fields, updates=True):
        """Train one microbatch; return its loss, the first gradient that went back, and all sums."""
        values, results, back = {}, {}, []
        for part, stage in zip(self.parts, self.stages, strict=True):
            inputs = {value: values[value] for value in part.train.inputs}
            own = {name: fields[name] for _, name in part.train.fields}
            passed = stage.forward(number, inputs, own, key=(7, number))
            assert not isinstance(passed, DroppedWork), passed
            values |= passed.outputs
            results |= passed.results
        gradients, sums = {}, {}
        for stage in reversed(self.stages):
            gradients = stage.backward_inputs(number, gradients)
            assert not isinstance(gradients, DroppedWork), gradients
            back.append({value: tensor.clone() for value, tensor in gradients.items()})
            assert stage.backward_weights(number) is None
            sums |= {name: tensor.clone() for name, tensor in stage.summed.sums.items()}
        for stage in self.stages if updates else ():
            stage.update(0.1)
        return float(results["loss"]), back, sums


def assert_close(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], **tolerance)


def middle(captured):
    return (captured.blueprint.start + captured.blueprint.stop) // 2


@pytest.mark.parametrize("is_cut", [True, False])
def test_parts_train_as_the_whole_stage_does(is_cut):
    captured, graphs = captured_tokens(), []
    cuts = (middle(captured),) if is_cut else ()
    keep = compiler(lambda graph, _: graphs.append(graph) or graph)
    plain, other = Line(captured, cuts), Line(captured, cuts, keep)
    for number in range(2):
        expected, found = plain.train(number, batch(seed=number)), other.train(number, batch(seed=number))
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        for one, two in zip(expected[1], found[1], strict=True):
            assert_close(one, two, rtol=1e-4, atol=1e-6)
        assert_close(expected[2], found[2], rtol=1e-4, atol=1e-6)
    for one, two in zip(plain.stages, other.stages, strict=True):
        assert_close(one.state, two.state, rtol=1e-4, atol=1e-6)
    products = [[op for op in graph.graph.nodes if "mm" in str(op.target)] for graph in graphs]
    assert all(products), "a part does the work of another"
    # A first stage has nobody to send gradients to: its backward is one part.
    assert len(graphs) == (2 + 3 if is_cut else 2)
    assert not [
        op
        for graph in graphs
        for op in graph.graph.nodes
        if getattr(op.target, "_schema", None) and op.target._schema.is_mutable
    ]


def test_gradients_of_inputs_leave_before_those_of_weights_are_computed():
    captured, order = captured_tokens(), []

    def compile_part(graph, _):
        number = len(order)
        order.append(None)
        return lambda *given: order.append(number) or graph(*given)

    line = Line(captured, (middle(captured),), compiler(compile_part), compiles=(False, True))
    line.train(0, batch())
    assert order == [None, None, None, 0, 1, 2]


@pytest.fixture
def own_folder(monkeypatch, tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    keep_compiled(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return Path(environment["TORCHINDUCTOR_CACHE_DIR"])


@pytest.mark.timeout(600)  # a C++ compiler at work, on a busy PC
@pytest.mark.filterwarnings("ignore")
def test_what_a_process_of_its_own_compiles_trains_as_the_whole_stage_does(own_folder):
    begun, news = [], []

    def compile_and_wait(stage, arguments):
        begun.append(compile_apart(stage, arguments))
        if isinstance(begun[-1], CompileProcess):
            begun[-1].wait()
        return begun[-1]

    make = partial(StageCompiler, compile_stage=compile_and_wait, warn=pytest.fail, tell=news.append)
    torch.manual_seed(0)
    fields = {"pixels": torch.randn(4, 4), "labels": torch.arange(4)}
    captured = capture(Plain(), fields, loss_of)
    for _ in range(2):
        plain, other = Line(captured, (1,)), Line(captured, (1,), make, compiles=(False, True))
        for number in range(2):
            expected, found = plain.train(number, fields), other.train(number, fields)
            assert found[0] == pytest.approx(expected[0], rel=1e-5)
            assert_close(expected[2], found[2], rtol=1e-4, atol=1e-6)
    assert len(begun) == 2
    assert isinstance(begun[0], CompileProcess)
    assert not isinstance(begun[1], CompileProcess)  # what was compiled once is loaded
    assert news == ["the stage is compiled now, for microbatches of 4 samples"] * 2
    parts = [file for file in own_folder.glob("*.py") if len(file.stem) == 64]
    assert len(parts) == 3  # forward, gradients of inputs, gradients of weights
    for file in parts:
        load_part(file.stem, own_folder)
        file.write_bytes(file.read_bytes() + b"\n")
        with pytest.raises(RavnestError, match="is not what its name says"):
            load_part(file.stem, own_folder)


def test_code_is_loaded_as_it_was_hashed_whatever_lies_beside_it(tmp_path) -> None:
    name = keep_code("def call(given):\n    return 'right'\n", tmp_path)
    file = tmp_path / f"{name}.py"
    good = file.read_bytes()
    file.write_bytes(good.replace(b"right", b"wrong"))
    py_compile.compile(str(file))  # as if it had been loaded before
    stamp = file.stat()
    file.write_bytes(good)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert load_part(name, tmp_path)([]) == "right"


def test_a_process_that_dies_is_named_and_training_goes_on(own_folder):
    begun, told = [], []

    def compile_and_die(stage, arguments):
        begun.append(compile_apart(stage, arguments, replace(TIMEOUTS.peer, compile_seconds=0.0)))
        begun[-1].wait()
        return begun[-1]

    make = partial(StageCompiler, compile_stage=compile_and_die, warn=told.append)
    plain, other = Line(captured_tokens()), Line(captured_tokens(), make_compiler=make)
    for number in range(2):
        assert other.train(number, batch())[0] == plain.train(number, batch())[0]
    assert told == [
        "the stage cannot be compiled here, so it runs uncompiled: as exact, but slower "
        "(RavnestError: the compiler ended without an answer)"
    ]
    assert not list(own_folder.glob("*.json"))


@pytest.mark.parametrize("is_first", [True, False])
def test_parts_run_with_zeros_like_what_they_will_be_given(is_first):
    captured, found = captured_tokens(), []
    blueprint, cut = captured.blueprint, middle(captured)
    ends = (blueprint.start, cut) if is_first else (cut, blueprint.stop)
    part = slice_blueprint(blueprint, *ends)

    def compile_stage(stage, arguments):
        mode = FakeTensorMode()
        parts = cut_stage(stage.trace(arguments), mode, [mode.from_tensor(each) for each in arguments])
        graphs = (parts.forward, parts.inputs, parts.weights)
        boxed = (graph and (lambda given, run=graph: run(*given)) for graph in graphs)
        found.append(CompiledParts(*boxed, parts.layout))
        given = [[] if graph is None else examples_of(graph) for graph in graphs]
        found.append([[torch.empty_like(each, device="cpu") for each in some] for some in given])
        return lambda: None

    make = partial(StageCompiler, compile_stage=compile_stage, warn=pytest.fail)
    whole = Line(captured, (cut,), make, compiles=(is_first, not is_first))
    whole.train(0, batch())
    gradients = run_once(*found)
    trained = [entry.shape for entry in part.state if entry.is_trainable]
    assert sorted(tuple(each.shape) for each in gradients) == sorted(trained)


def test_running_statistics_are_those_of_the_whole_stage():
    torch.manual_seed(0)
    fields = {"pixels": torch.randn(4, 3, 6, 6), "labels": torch.arange(4)}
    captured = capture(Pictures(), fields, loss_of)
    plain, other = Line(captured), Line(captured, make_compiler=compiler())
    for number in range(2):
        expected, found = plain.train(number, fields), other.train(number, fields)
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert_close(expected[2], found[2], rtol=1e-4, atol=1e-6)
    assert_close(plain.stages[0].state, other.stages[0].state, rtol=1e-4, atol=1e-6)


def test_masks_are_those_of_the_key():
    captured = captured_tokens(dropout=0.5)
    losses = []
    for number in (1, 2, 1):
        line = Line(captured, make_compiler=compiler())
        torch.manual_seed(number * 10 + len(losses))
        losses.append(line.train(number, batch(), updates=False)[0])
    assert losses[0] == losses[2]
    assert losses[0] != losses[1]


def test_a_compiler_that_fails_is_named_once_and_training_goes_on():
    def refuse(graph, examples):
        raise NotImplementedError("no C++ compiler was found\nand more")

    captured, told = captured_tokens(), []
    plain, other = Line(captured), Line(captured, make_compiler=compiler(refuse, warn=told.append))
    for number in range(2):
        assert other.train(number, batch())[0] == plain.train(number, batch())[0]
    assert told == [
        "the stage cannot be compiled here, so it runs uncompiled: as exact, but slower "
        "(NotImplementedError: no C++ compiler was found)"
    ]


@pytest.mark.parametrize("bad", [0, 1])
def test_code_that_fails_when_it_runs_is_used_no_more(bad):
    def compile_part(graph, examples):
        number = len(made)
        made.append(graph)

        def run(*given):
            if number == bad:
                raise RuntimeError("the kernel was not launched")
            return graph(*given)

        return run

    made, told = [], []
    captured = captured_tokens()
    program = build_stage_program(captured.blueprint, make_compiler=compiler(compile_part, warn=told.append))
    names = tuple(entry.name for entry in captured.blueprint.state if entry.is_trainable)
    settings = OptimizerSettings((Group(names, Sgd()),), 0.1)
    state = {name: tensor.detach().clone() for name, tensor in captured.state.items()}
    stage = StageEngine(program, Snapshot(0, state, {}), find_roles(captured.blueprint), settings)
    fields, dropped = batch(), []
    for number in range(2):
        assert not isinstance(stage.forward(number, {}, fields, key=(1, number)), DroppedWork)
        assert stage.backward_inputs(number, {}) == {}
        dropped.append(stage.backward_weights(number))
    assert dropped[1] is None
    assert len(told) == 1
    assert (dropped[0] is None) == (bad == 0)  # a forward is done again at once, a backward is given up


def test_the_usual_size_is_compiled_and_a_rare_one_is_not():
    sizes = []

    def compile_part(graph, examples):
        sizes.append(next(tensor.shape[0] for tensor in examples if tensor.dtype is torch.int64))
        return graph

    line = Line(captured_tokens(), make_compiler=compiler(compile_part))
    for number, size in enumerate((4, 4, 3, 4, 2)):
        line.train(number, batch(size))
    assert set(sizes) == {4}
    for number, size in enumerate((3, 3, 3, 2, 2, 2, 2), 10):
        line.train(number, batch(size))
    assert set(sizes) == {4, 3}


def test_training_goes_on_while_the_stage_is_compiled():
    waiting = []
    line = Line(captured_tokens(), make_compiler=compiler(in_background=waiting.append))
    for number in range(3):
        line.train(number, batch())
    assert len(waiting) == 1
    waiting.pop()()
    plain = Line(captured_tokens())
    for number in range(3):
        plain.train(number, batch())
    assert line.train(3, batch())[0] == pytest.approx(plain.train(3, batch())[0], rel=1e-5)


def test_an_index_out_of_range_is_dropped_before_compiled_code_meets_it():
    captured = captured_tokens()
    line = Line(captured, make_compiler=compiler())
    line.train(0, batch())
    fields = batch()
    fields["ids"][1, 2] = NUM_TOKENS
    dropped = line.stages[0].forward(1, {}, fields, key=(7, 1))
    assert isinstance(dropped, DroppedWork)
    assert dropped.reason == f"IndexError: Index {NUM_TOKENS} is out of bounds"


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_narrow_weights_train_as_in_the_whole_stage(autocast):
    captured, graphs = captured_tokens(), []
    blueprint, losses, sums = captured.blueprint, [], []
    names = tuple(entry.name for entry in blueprint.state if entry.is_trainable)
    settings = OptimizerSettings((Group(names, Sgd()),), 0.1)
    keep = compiler(lambda graph, _: graphs.append(graph) or graph)
    for make_compiler in (None, keep):
        program = build_stage_program(blueprint, autocast=autocast, make_compiler=make_compiler)
        roles = find_roles(blueprint, program.castable)
        roles = replace(roles, narrow=frozenset(names))
        state = {name: tensor.detach().clone() for name, tensor in captured.state.items()}
        stage = StageEngine(program, Snapshot(0, state, {}), roles, settings)
        losses.append(float(stage.forward(0, {}, batch(), key=(1, 0)).results["loss"]))
        assert stage.backward_inputs(0, {}) == {}
        assert stage.backward_weights(0) is None
        sums.append({name: tensor.float() for name, tensor in stage.summed.sums.items()})
    assert len(graphs) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert_close(sums[0], sums[1], rtol=5e-2, atol=5e-3)


def test_a_stage_that_is_frozen_is_compiled_as_a_forward_alone():
    captured, graphs = captured_tokens(), []
    part = slice_blueprint(captured.blueprint, captured.blueprint.start, middle(captured))
    keep = compiler(lambda graph, _: graphs.append(graph) or graph)
    found = []
    for make_compiler in (None, keep):
        program = build_stage_program(part, make_compiler=make_compiler)
        state = {entry.name: captured.state[entry.name].detach() for entry in part.state}
        stage = StageEngine(program, Snapshot(0, state, {}), Roles(frozenset()), OptimizerSettings((), 0.1))
        fields = {name: batch()[name] for _, name in part.train.fields}
        passed = stage.forward(0, {}, fields, key=(1, 0))
        found.append(passed.outputs)
        gradients = {value: torch.ones_like(tensor) for value, tensor in passed.outputs.items()}
        assert stage.backward_inputs(0, gradients) == {}
        assert stage.backward_weights(0) is None
    assert len(graphs) == 1
    assert_close(*found)


def test_weights_of_another_type_are_compiled_anew():
    captured, told = captured_tokens(), []
    program = build_stage_program(
        captured.blueprint, make_compiler=compiler(lambda graph, _: told.append(graph) or graph)
    )
    wide = {name: tensor.detach().clone() for name, tensor in captured.state.items()}
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in wide.items()}
    for number, state in enumerate((wide, *(narrow,) * 4)):
        leaves = {name: tensor.requires_grad_() for name, tensor in state.items()}
        program.forward(leaves, {}, batch(), key=(1, number))
    assert len(told) == 4  # forward and backward, twice
