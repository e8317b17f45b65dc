"""A host builds the stage it is ordered to: slower on an emulated device, in bf16 where the PC can."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ravnest.codec import describe, encode_tensor
from ravnest.config import CompileMode, WireFormat
from ravnest.engine.schedule import StageSchedule
from ravnest.engine.train_config import TrainConfig, write_train_config
from ravnest.ids import HUB, LeaseId, MicrobatchId, NodeId, RoundId
from ravnest.model.blueprint.blueprint_json import write_blueprint
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import Captured, capture
from ravnest.model.stage.profile import count_flops, measure
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.model.state.state_dict import to_safetensors
from ravnest.peer import capabilities
from ravnest.peer.compute_protocol import Build, Delivered, ProviderLimits, StageBuilt
from ravnest.peer.stage_builder import StageBuilder, StageTools
from ravnest.peer.stage_host import RunningStage, StageHost
from ravnest.plan.types import Stage
from ravnest.protocol.averaging import RoundOpen
from ravnest.protocol.messages import Message
from ravnest.protocol.placement import PlanOrder, Source, StageParts
from ravnest.protocol.tensors import Buffer
from ravnest.protocol.training import FieldParts, LeaseGrant, StepReport
from ravnest.transfer.blobs import name_blob
from tests.support.timed_world import plain_settings

WIDTH, NUM_SAMPLES = 64, 8
LAYER_FLOPS = 2 * NUM_SAMPLES * WIDTH * WIDTH
NODES = (NodeId("root"), NodeId("leaf"))


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture_wide()


def capture_wide() -> Captured:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    return capture(model, batch_of(0), lambda out, batch: F.mse_loss(out, batch["y"]), name="layers")


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(NUM_SAMPLES, WIDTH, generator=generator) for name in "xy"}


class Pair:
    """Two hosts of one cluster, one after the other, each with a clock that only waiting moves."""

    def __init__(self, captured: Captured, accumulate: int = 1, recompute: bool = False, **options) -> None:
        self.captured = captured
        self.waits: dict[NodeId, list[float]] = {node: [] for node in NODES}
        self.hosts: dict[NodeId, StageHost] = {}
        self.reports: list[StepReport] = []
        num_positions = captured.blueprint.num_positions
        bounds = [0, num_positions // 2, num_positions]
        device = options.pop("device", "cpu")
        limits = ProviderLimits(1e9, device=device, emulated_flops_per_second=options.pop("rate", None))
        training = TrainConfig(
            plain_settings(captured), NUM_SAMPLES, precision=options.pop("precision", "fp32")
        )
        for index, node in enumerate(NODES):
            start, stop = bounds[index : index + 2]
            blueprint = slice_blueprint(captured.blueprint, start, stop)
            state = {entry.name: captured.state[entry.name].detach() for entry in blueprint.state}
            names = frozenset(state)
            content = write_train_config(training, names) + b"\n" + write_blueprint(blueprint)
            weights = to_safetensors(state, blueprint)
            parts = StageParts(1, 0, name_blob(content), (Source(HUB, name_blob(weights)),))
            stage = Stage(node, start, stop, 4, recompute, WireFormat.FP32, WireFormat.FP32)
            order = PlanOrder(1, 1, 0, stage, NODES, (), (), accumulate)
            waits = self.waits[node]
            clock = partial(sum, waits)
            host = StageHost(StageBuilder(limits, clock, waits.append, **options), clock)
            assert host.handle(Build(order, parts, content, (weights,))) == [StageBuilt(1)]
            self.hosts[node] = host

    def train(self, num_batches: int) -> None:
        grant = LeaseGrant(1, LeaseId(0), False, MicrobatchId(0), (NUM_SAMPLES,) * num_batches)
        self.deliver(NODES[0], grant)
        for number in range(num_batches):
            for node, name in zip(NODES, "xy", strict=True):
                tensor = batch_of(number)[name]
                fields = FieldParts(1, MicrobatchId(number), ((name, describe(tensor, WireFormat.FP32)),))
                self.deliver(node, fields, (encode_tensor(tensor, WireFormat.FP32),))
        while any(self.work(node) for node in NODES):
            pass

    def work(self, node: NodeId) -> bool:
        work = self.hosts[node].next_work()
        for outgoing in work or ():
            if outgoing.to != HUB:
                self.deliver(outgoing.to, outgoing.message, outgoing.buffers, node)
            elif isinstance(outgoing.message, StepReport):
                self.reports.append(outgoing.message)
        return work is not None

    def deliver(self, node: NodeId, message: Message, buffers: Sequence[Buffer] = (), sender=HUB) -> None:
        self.hosts[node].handle(Delivered(message, buffers, sender))

    def versions(self) -> list[tuple[int, int]]:
        workers = [host.stage.worker for host in self.hosts.values()]
        return [(worker.stage.version, worker.schedule.version) for worker in workers]


def test_the_flops_of_a_stage_are_those_of_its_positions(captured: Captured) -> None:
    whole = captured.blueprint
    profile = measure(whole, NUM_SAMPLES)
    middle = whole.num_positions // 2
    for start, stop in ((0, middle), (middle, whole.num_positions)):
        forward, inputs, weights = count_flops(slice_blueprint(whole, start, stop), NUM_SAMPLES)
        assert forward == sum(profile.forward_flops[start:stop])
        assert inputs + weights == sum(profile.backward_flops[start:stop])
        assert inputs == (0.0 if start == 0 else 2 * LAYER_FLOPS)  # the data needs no gradient


def test_an_emulated_device_takes_its_time_for_each_piece(captured: Captured) -> None:
    pair = Pair(captured, rate=float(LAYER_FLOPS))
    pair.train(1)
    # Two layers each: forward, then backward; the gradient leaves after the part towards the inputs.
    assert pair.waits[NODES[0]] == pytest.approx([2.0, 3.0])  # all towards the weights
    assert pair.waits[NODES[1]] == pytest.approx([2.0, 2.0, 2.0])
    leaf, root = pair.reports
    assert (leaf.forward_seconds, leaf.backward_seconds) == pytest.approx((2.0, 4.0))
    assert (root.forward_seconds, root.backward_seconds) == pytest.approx((2.0, 3.0))


def test_a_short_backward_is_not_split_and_recomputing_costs_a_forward(captured: Captured) -> None:
    pair = Pair(captured, rate=1e4 * LAYER_FLOPS)
    pair.train(1)
    assert pair.waits[NODES[1]] == pytest.approx([2e-4, 4e-4])
    pair = Pair(captured, rate=float(LAYER_FLOPS), recompute=True)
    pair.train(1)
    assert pair.waits[NODES[0]] == pytest.approx([2.0, 5.0])
    assert pair.waits[NODES[1]] == pytest.approx([2.0, 6.0])


def test_a_real_device_never_waits(captured: Captured) -> None:
    pair = Pair(captured)
    pair.train(2)
    assert pair.waits == {node: [] for node in NODES}


def test_a_stage_computes_on_the_device_its_provider_lends(captured: Captured) -> None:
    device, seen = "cpu:0", {"moved": set(), "rebuild": set(), "time": set()}

    class Moves(TorchFunctionMode):
        """Notes where tensors are moved to."""

        def __torch_function__(self, function, types, given=(), options=None):
            if function is torch.Tensor.to:
                seen["moved"] |= {str(each) for each in given[1:] if isinstance(each, str | torch.device)}
            return function(*given, **(options or {}))

    def note_rebuild(blueprint: object, where: str, **options: object) -> object:
        seen["rebuild"].add(where)
        return build_stage_program(blueprint, where, **options)

    def note_time(program: object, *_: object) -> float:
        seen["time"].add(str(program.setting.device))
        return 1.0

    tools = StageTools(build_program=note_rebuild, time_batch=note_time)
    pair = Pair(captured, device=device, tools=tools)
    with Moves():
        pair.train(2)  # fields, activations and gradients arrive
    builder = StageBuilder(ProviderLimits(1e9, device=device), Ticking(1.0), tools=tools)
    builder.measure_speed(write_piece(captured, 0, 1))
    assert seen == {"moved": {device}, "rebuild": {device}, "time": {device}}


def write_piece(captured: Captured, start: int, stop: int) -> bytes:
    training = TrainConfig(plain_settings(captured), NUM_SAMPLES)
    piece = slice_blueprint(captured.blueprint, start, stop)
    return (
        write_train_config(training, frozenset(entry.name for entry in piece.state))
        + b"\n"
        + write_blueprint(piece)
    )


class Ticking:
    """A clock by which everything between two looks at it takes the same time."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def test_the_speed_of_a_pc_is_that_of_a_piece_forward_and_backward(captured: Captured) -> None:
    blueprint = captured.blueprint
    for start in range(blueprint.num_positions):
        flops = sum(count_flops(slice_blueprint(blueprint, start, start + 1), NUM_SAMPLES))
        builder = StageBuilder(ProviderLimits(1e9), Ticking(0.01))
        speed = builder.measure_speed(write_piece(captured, start, start + 1))
        assert speed == (pytest.approx(flops / 0.01) if flops else None)
    whole = StageBuilder(ProviderLimits(1e9), Ticking(0.01)).measure_speed(
        write_piece(captured, 0, blueprint.num_positions)
    )
    assert whole == pytest.approx(sum(count_flops(blueprint, NUM_SAMPLES)) / 0.01)


def test_a_probe_goes_back_to_all_that_a_stage_trains_and_to_what_came(
    captured: Captured, monkeypatch
) -> None:
    wanted: list[int] = []
    grad = torch.autograd.grad

    def note(ends: object, sources: list[torch.Tensor], *rest: object, **options: object) -> object:
        wanted.append(len(sources))
        return grad(ends, sources, *rest, **options)

    middle = slice_blueprint(captured.blueprint, 2, 4)
    num_trained = sum(entry.is_trainable for entry in middle.state)
    assert num_trained >= 2
    monkeypatch.setattr(torch.autograd, "grad", note)
    StageBuilder(ProviderLimits(1e9), Ticking(1.0)).measure_speed(write_piece(captured, 2, 4))
    assert wanted[-2:] == [num_trained + len(middle.train.inputs)] * 2  # to warm up, and the one that counts


def test_a_probe_ends_although_its_clock_stands_still(captured: Captured) -> None:
    assert StageBuilder(ProviderLimits(1e9), lambda: 0.0).measure_speed(write_piece(captured, 0, 1)) > 0


def test_a_piece_that_is_too_much_for_a_usual_pc_is_measured_on_fewer_samples(captured: Captured) -> None:
    seen: list[int] = []

    def note(program: object, num_samples: int, clock: object) -> float:
        seen.append(num_samples)
        return num_samples / NUM_SAMPLES

    flops = sum(count_flops(captured.blueprint, NUM_SAMPLES))
    for times, num_samples in ((1.0, NUM_SAMPLES), (4.0, NUM_SAMPLES // 4), (1e6, 1)):
        tools = StageTools(time_batch=note, usual_cpu_flops_per_second=flops / 0.2 / times)
        speed = StageBuilder(ProviderLimits(1e9), lambda: 0.0, tools=tools).measure_speed(
            write_piece(captured, 0, captured.blueprint.num_positions)
        )
        assert seen[-1] == num_samples
        assert speed == pytest.approx(flops)


@pytest.mark.parametrize("limits", [ProviderLimits(1000.0), ProviderLimits(1e9, flops_per_batch=10.0)])
def test_a_probe_that_this_pc_will_not_run_says_nothing(
    captured: Captured, limits: ProviderLimits, caplog
) -> None:
    caplog.set_level(logging.INFO)
    assert StageBuilder(limits, lambda: 0.0).measure_speed(write_piece(captured, 0, 1)) is None
    assert StageBuilder(ProviderLimits(1e9), lambda: 0.0).measure_speed(b"no training\nno blueprint") is None
    assert "is not measured by a piece of the model" in caplog.text


def test_whatever_a_piece_consists_of_it_can_be_run_on_numbers_made_up() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(11, 8), nn.BatchNorm1d(8)
            self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.drop(self.norm(self.table(x))))

    batch = {"x": torch.randint(11, (NUM_SAMPLES,)), "y": torch.randint(5, (NUM_SAMPLES,))}
    captured = capture(Small(), batch, lambda out, batch: F.cross_entropy(out, batch["y"]), name="small")
    for start in range(captured.blueprint.num_positions):
        piece = slice_blueprint(captured.blueprint, start, start + 1)
        speed = StageBuilder(ProviderLimits(1e9), Ticking(0.01)).measure_speed(
            write_piece(captured, start, start + 1)
        )
        assert (speed is not None) is (sum(count_flops(piece, NUM_SAMPLES)) > 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Busy:
    """Stands for a worker and an averager that always have work, or as often as told."""

    is_blocking, is_open = False, True
    generation = None  # nobody asks for a text
    schedule = StageSchedule(window=1)  # nothing waits, and there is no lease ahead

    def __init__(self, clock: Clock, seconds: float, num_pieces: float = float("inf")) -> None:
        self.clock, self.seconds, self.num_pieces, self.spent = clock, seconds, num_pieces, 0.0

    def next_work(self):
        if self.num_pieces <= 0:
            return None
        self.num_pieces -= 1
        return self._work()

    def _work(self):
        self.clock.now += self.seconds
        self.spent += self.seconds
        yield from ()

    def flush(self):
        return None


class BusyAverager(Busy):
    def next_work(self):
        found = super().next_work()
        return None if found is None else list(found)


@pytest.mark.parametrize(("training", "averaging"), [(0.5, 0.001), (0.001, 0.5), (0.01, 0.01)])
def test_neither_training_nor_averaging_starves_the_other(training: float, averaging: float) -> None:
    clock = Clock()
    worker, averager = Busy(clock, training), BusyAverager(clock, averaging)
    stage = RunningStage(worker, averager, clock)
    while clock.now < 100.0:
        for _ in stage.next_work():
            pass
    assert averager.spent == pytest.approx(worker.spent / 2, abs=1.0)
    worker.num_pieces, before = 0, clock.now  # waits for other stages
    for _ in range(100):
        stage.next_work()
    assert clock.now == pytest.approx(before + 100 * averaging)
    averager.num_pieces, averager.is_blocking = 3, True
    worker.num_pieces = 5
    assert [stage.next_work() is not None for _ in range(4)] == [True] * 3 + [False]


def test_what_is_left_over_is_applied_before_the_last_round_and_before_a_snapshot(captured: Captured) -> None:
    pair = Pair(captured, accumulate=3)
    pair.train(4)
    assert pair.versions() == [(1, 1)] * 2
    for number, is_blocking in enumerate([False, True], 1):
        open_round = RoundOpen(1, RoundId(number), 10.0, is_blocking, False, ())
        pair.deliver(NODES[number - 1], open_round)
    assert pair.versions() == [(1, 1)] * 2  # training goes on after these
    pair = Pair(captured, accumulate=3)
    pair.train(4)
    pair.deliver(NODES[0], RoundOpen(1, RoundId(1), 10.0, True, True, ()))
    assert pair.versions() == [(2, 2), (1, 1)]
    before = pair.hosts[NODES[1]].stage.worker.stage.snapshot().state
    assert pair.hosts[NODES[1]].save(is_final=False).version == 1
    assert pair.hosts[NODES[1]].save().version == 2
    after = pair.hosts[NODES[1]].stage.worker.stage.snapshot().state
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert pair.hosts[NODES[1]].save().version == 2
    assert pair.versions() == [(2, 2)] * 2


def test_without_bf16_a_stage_computes_in_fp32_and_says_so_once(captured: Captured, caplog) -> None:
    asked: list[str] = []

    def probe(device: str) -> bool:
        asked.append(device)
        return False

    with caplog.at_level(logging.WARNING, "ravnest.peer.stage_builder"):
        pair = Pair(captured, precision="bf16", probe=probe)
    assert asked == ["cpu", "cpu"]  # once in each of two peers
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "this PC cannot compute in bf16, so its stage computes in fp32"
    ] * 2
    plain = Pair(captured, probe=probe)
    assert len(asked) == 2  # fp32 needs no probe
    pair.train(2)
    plain.train(2)
    assert [report.loss for report in pair.reports] == [report.loss for report in plain.reports]


BF16_PROGRAM = """
from ravnest.peer.capabilities import can_run_bf16
from tests.stages.test_host import Pair, capture_wide

assert can_run_bf16("cpu")
whole = capture_wide()
mixed, plain = Pair(whole, precision="bf16", probe=lambda device: True), Pair(whole)
for pair in (mixed, plain):
    pair.train(3)
losses = [[r.loss for r in pair.reports if r.loss is not None] for pair in (mixed, plain)]
print(*losses[0], *losses[1])
state = mixed.hosts["leaf"].stage.worker.stage.snapshot().state
print(*{str(tensor.dtype) for tensor in state.values()})
"""


def test_in_bf16_the_loss_is_almost_the_same_and_weights_stay_in_fp32() -> None:
    """In a child process: oneDNN reads the instructions it may use once, before the first product."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", BF16_PROGRAM]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    losses, dtypes = child.stdout.splitlines()
    found = [float(loss) for loss in losses.split()]
    assert found[:3] != found[3:]
    assert found[:3] == pytest.approx(found[3:], rel=0.02)
    assert dtypes == "torch.float32"


@pytest.mark.parametrize(
    ("program", "is_able"),
    [
        ("raise SystemExit(0)", True),
        ("raise SystemExit(1)", False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", False),
        ("input()", False),
    ],
)
def test_the_probe_survives_what_bf16_does_to_its_child(program: str, is_able: bool) -> None:
    assert capabilities.can_run_bf16("cpu", program) is is_able


@pytest.mark.parametrize(
    ("act", "is_able"),
    [
        (lambda: True, True),
        (lambda: False, False),
        (lambda: 1 / 0, False),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), False),
        (lambda: threading.Event().wait(), False),
    ],
    ids=["right", "wrong", "raises", "dies", "hangs"],
)
def test_a_probe_in_a_copy_of_the_process_survives_it_too(act, is_able: bool) -> None:
    assert capabilities.try_forked(act, timeout_seconds=5.0) is is_able


def test_a_probe_that_hangs_is_a_no() -> None:
    program = "import threading; threading.Event().wait()"
    assert capabilities.can_run_bf16("cpu", program, timeout_seconds=0.5) is False


@pytest.mark.parametrize(
    ("precision", "best", "autocast"),
    [
        ("fp32", "bf16", None),
        ("auto", "bf16", torch.bfloat16),
        ("auto", "tf32", None),
        ("auto", "fp32", None),
    ],
)
def test_a_stage_computes_in_the_precision_that_is_best_here(
    captured: Captured, precision: str, best: str, autocast: torch.dtype | None
) -> None:
    seen = []

    def note(blueprint: object, where: str, **options: object) -> object:
        seen.append(options["autocast"])
        return build_stage_program(blueprint, where)

    training = TrainConfig(plain_settings(captured), NUM_SAMPLES, precision=precision)
    piece = slice_blueprint(captured.blueprint, 0, 1)
    parts = write_train_config(training, frozenset(entry.name for entry in piece.state))
    tools = StageTools(build_program=note, time_batch=lambda *_: 1.0)
    builder = StageBuilder(ProviderLimits(1e9), lambda: 0.0, choose=lambda device: best, tools=tools)
    builder.measure_speed(parts + b"\n" + write_blueprint(piece))
    assert seen == [autocast]


@pytest.mark.parametrize(
    ("mode", "device", "is_compiled"),
    [("auto", "cpu", False), ("auto", "cuda:1", True), ("on", "cpu", True), ("off", "cuda", False)],
)
def test_stages_are_compiled_on_gpus_unless_told_otherwise(mode: str, device: str, is_compiled: bool) -> None:
    assert CompileMode(mode).applies_to(device) is is_compiled
