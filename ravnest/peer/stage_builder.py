"""How a stage is built: checked, given its state, and measured on this PC.

Its state comes from what this PC holds of the stage before and from snapshots of others, by name. Every
source is checked: its tensors must be finite and as the blueprint says. A source that cannot be used is
named to the hub, which knows others.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ravnest.config import TIMEOUTS, PeerTimeouts, WeightFormat
from ravnest.disk import release_pages
from ravnest.engine.moments import SMALL_ITEMS
from ravnest.engine.schedule import StageSchedule
from ravnest.engine.stage import Roles, StageEngine
from ravnest.engine.train_config import TrainConfig, read_train_config
from ravnest.engine.weight_versions import Snapshot
from ravnest.errors import UnsafeBlueprint, WeightsError
from ravnest.ids import HUB, NodeId
from ravnest.model.blueprint.blueprint_json import read_blueprint
from ravnest.model.blueprint.program import Blueprint, StateEntry
from ravnest.model.stage.compiled_stage import StageCompiler, StageToCompile
from ravnest.model.stage.dry_run import Footprint, dry_run
from ravnest.model.stage.profile import count_flops
from ravnest.model.stage.stage_program import StageProgram, build_stage_program
from ravnest.model.state.state_dict import Layout, order_entries, read_finite_snapshot, type_of
from ravnest.peer.averager import AnchorState, Averager, refuse_exact
from ravnest.peer.capabilities import BestPrecision, can_run_bf16, choose_precision, time_batch, use_tf32
from ravnest.peer.compile_process import compile_apart
from ravnest.peer.compute_protocol import Build, ProviderLimits
from ravnest.peer.pacing import Device, make_policy
from ravnest.peer.worker import Worker
from ravnest.protocol.placement import StageMissing, StageParts
from ravnest.protocol.tensors import Buffer

logger = logging.getLogger(__name__)

# The plan knows better what is alive at once; the look before the first run adds up all that is ever made.
_PREFLIGHT_TIMES = 4
# Sending the gradient before the rest of a backward costs 0.1 ms per weight: it may take a fiftieth of it.
_SPLIT_SECONDS = 50 * 1e-4
_READ_BYTES = 16 << 20  # at once, of a snapshot
_PROBE_SECONDS = 0.2  # for one run of a probe, on a usual PC


def make_stage_compiler(stage: StageToCompile) -> StageCompiler:
    """Return what has a stage compiled beside the training."""
    return StageCompiler(stage, compile_apart, logger.warning, logger.info)


@dataclass(frozen=True, slots=True)
class StageTools:
    """What a stage is checked, built and timed with."""

    dry_run: Callable[..., Footprint] = dry_run
    count_flops: Callable[[Blueprint, int], tuple[float, float, float]] = count_flops
    build_program: Callable[..., StageProgram] = build_stage_program
    time_batch: Callable[[StageProgram, int, Callable[[], float]], float] = time_batch
    make_compiler: Callable[[StageToCompile], StageCompiler] = make_stage_compiler
    usual_cpu_flops_per_second: float = 5e10  # of one core
    usual_other_flops_per_second: float = 1e13  # of a GPU

    def usual_flops_per_second(self, device: str) -> float:
        """Return the speed of a usual device of this kind."""
        return self.usual_cpu_flops_per_second if device == "cpu" else self.usual_other_flops_per_second


STAGE_TOOLS = StageTools()


@dataclass(frozen=True, slots=True)
class HeldStage:
    """What is left of a stage when its plan has ended: enough to go on under another."""

    snapshot: Snapshot
    anchor_state: AnchorState


def assemble_stage(
    blueprint: Blueprint,
    parts: StageParts,
    contents: Sequence[Buffer],
    held: HeldStage | None,
    node: NodeId,
    device: str,
) -> tuple[Snapshot, AnchorState] | StageMissing:
    """Return the state that a stage of `node` begins with, or the source that does not have what it lacks.

    `contents` are those of the sources in `parts`.
    """
    state: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    anchor_state = AnchorState(parts.anchor_round)
    if parts.is_kept and held is not None:
        state, optimizer = _select_held(held.snapshot, blueprint)
        averaged = {entry.name for entry in Layout.of(blueprint).entries}
        if averaged <= state.keys() and averaged <= held.anchor_state.anchors.keys():
            anchor_state = held.anchor_state
    suspects = [node] if parts.is_kept and held is None else []  # they gave nothing
    for source, content in zip(parts.sources, contents, strict=True):
        missing = [entry for entry in blueprint.state if entry.name not in state]
        if not missing:
            break
        found: dict[str, Tensor] = {}
        try:
            for some in _group(missing):
                tensors, slots = read_finite_snapshot(content, some)
                found |= {name: tensor.to(device) for name, tensor in tensors.items()}
                optimizer |= {key: tensor.to(device) for key, tensor in slots.items()}
                release_pages(content)  # it stays here for others, and the stage has copies
        except WeightsError as error:
            if source.node == HUB:
                raise
            return StageMissing(parts.build_id, source.node, str(error))
        state |= found
        suspects += [] if found else [source.node]
    names = [entry.name for entry in blueprint.state if entry.name not in state]
    if names:
        told = f"no source of the stage has {names[0]!r}, nor {len(names) - 1} more of its tensors"
        suspects += [source.node for source in parts.sources] or [node]
        if HUB in suspects:
            raise WeightsError(told)  # the hub has all of a stage, or nobody has
        return StageMissing(parts.build_id, suspects[0], told)
    state = {entry.name: state[entry.name] for entry in order_entries(blueprint.state)}
    return Snapshot(parts.version, state, optimizer), anchor_state


def _group(entries: Sequence[StateEntry]) -> Iterator[list[StateEntry]]:
    """Yield the entries in groups, so that little of a file is in memory beside the stage."""
    group: list[StateEntry] = []
    for entry in entries:
        group.append(entry)
        if sum(each.size_bytes for each in group) >= _READ_BYTES:
            yield group
            group = []
    if group:
        yield group


def _select_held(held: Snapshot, blueprint: Blueprint) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the held tensors that the blueprint has too, with their optimizer state."""
    state = {}
    for entry in blueprint.state:
        tensor = held.state.get(entry.name)
        if tensor is not None and type_of(tensor) == entry.stored:
            state[entry.name] = tensor
    slots = {key: tensor for key, tensor in held.optimizer.items() if key.partition("/")[2] in state}
    return state, slots


def find_roles(
    blueprint: Blueprint, castable: frozenset[str] = frozenset(), *, is_narrow: bool = False
) -> Roles:
    """Return which state of a stage is trained, written, shared, and which inputs want gradients.

    `castable` parameters are used in bf16 alone; `is_narrow`: forwards see bf16 of all that are not small.
    """
    program = blueprint.train
    wide = {entry.name for entry in blueprint.state if entry.is_trainable and entry.dtype == "float32"}
    large = {entry.name for entry in blueprint.state if entry.size_bytes >= 4 * SMALL_ITEMS}
    return Roles(
        trainable=frozenset(entry.name for entry in blueprint.state if entry.is_trainable),
        written=frozenset(entry.name for entry in blueprint.state if entry.is_written),
        shared=frozenset(blueprint.shared),
        inputs=frozenset(value for value in program.inputs if program.values[value].has_gradient),
        narrow=frozenset(wide & large) if is_narrow else frozenset(),
        casts=frozenset(wide & castable),
    )


def _read_parts(parts: bytes) -> tuple[TrainConfig, Blueprint]:
    training, _, blueprint = parts.partition(b"\n")
    return read_train_config(training), read_blueprint(blueprint)


class StageBuilder:
    """Builds stages within `limits`; `clock` tells seconds, `wait` lets some pass.

    `probe` says if a device has bf16, `choose` which precision is best on it.
    """

    def __init__(
        self,
        limits: ProviderLimits,
        clock: Callable[[], float],
        wait: Callable[[float], object] | None = None,
        *,
        probe: Callable[[str], bool] = can_run_bf16,
        choose: Callable[[str], BestPrecision] = choose_precision,
        tools: StageTools = STAGE_TOOLS,
        timeouts: PeerTimeouts = TIMEOUTS.peer,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._wait = wait or threading.Event().wait  # never set: waiting for it costs no work
        self._probe, self._choose, self._tools, self._timeouts = probe, choose, tools, timeouts
        self._has_bf16: bool | None = None  # not probed yet
        self._best: BestPrecision | None = None  # not chosen yet

    def build(self, item: Build, held: HeldStage | None) -> tuple[Worker, Averager] | StageMissing:
        """Return a stage that is ready to train, or the source that cannot be used.

        Raise with the reason why this PC will not run the stage.
        """
        order, parts, limits = item.order, item.parts, self._limits
        training, blueprint = _read_parts(item.blueprint)
        stage = order.stage
        assert stage is not None
        if (blueprint.start, blueprint.stop) != (stage.start, stage.stop):
            raise UnsafeBlueprint(
                f"the blueprint is of positions {blueprint.start} to {blueprint.stop}, "
                f"the plan has {stage.start} to {stage.stop} here"
            )
        footprint = self._check_size(blueprint, -(-training.batch_size // order.accumulate))
        assembled = assemble_stage(blueprint, parts, item.contents, held, stage.node, limits.device)
        if isinstance(assembled, StageMissing):
            return assembled
        snapshot, anchor_state = assembled
        compiles = limits.compile_mode.applies_to(limits.device)
        autocast = self._autocast(training)
        program = self._tools.build_program(
            blueprint,
            limits.device,
            autocast=autocast,
            recompute=stage.recompute,
            window=stage.window,
            make_compiler=self._tools.make_compiler if compiles else None,
        )
        speed = limits.emulated_flops_per_second or self._tools.usual_flops_per_second(limits.device)
        backward_seconds = 2 * footprint.forward_flops / speed
        num_weights = sum(entry.is_trainable for entry in blueprint.state)
        is_split = not stage.recompute and backward_seconds > num_weights * _SPLIT_SECONDS
        # As the planner counts them. Without lag, and where updates are exact, forwards see all bits.
        has_narrow = training.optimizer.versions is WeightFormat.BF16 or autocast is not None
        is_late = stage.window > 1 and not order.is_exact and training.max_lag != 0
        roles = find_roles(blueprint, program.castable, is_narrow=has_narrow and is_late)
        defers = limits.device.startswith("cuda")
        settings = training.optimizer
        settings = replace(settings, has_prediction=settings.has_prediction and stage.predicts)
        engine = StageEngine(program, snapshot, roles, settings, is_split, defers)
        schedule = StageSchedule(
            stage.window, order.accumulate, version=parts.version, is_exact=order.is_exact
        )
        device = self._device(blueprint, training.batch_size, is_split, stage.recompute)
        rate = training.optimizer.learning_rate
        num_updates = training.planned_updates // order.num_clusters
        policy = make_policy(num_updates, training.max_lag, stage, order.accumulate)
        worker = Worker(order.position, blueprint, engine, schedule, rate, device, policy, self._timeouts)
        if reason := refuse_exact(order, worker.tied):
            return StageMissing(parts.build_id, stage.node, reason)
        averager = Averager(order, blueprint, worker, training, self._clock, anchor_state, self._timeouts)
        return worker, averager

    def _check_size(self, blueprint: Blueprint, num_samples: int) -> Footprint:
        """Return what a stage takes, if that is within the limits."""
        return self._tools.dry_run(
            blueprint,
            num_samples,
            max_bytes=_PREFLIGHT_TIMES * self._limits.memory_bytes,
            max_flops=self._limits.flops_per_batch,
        )

    def measure_speed(self, parts: bytes) -> float | None:
        """Return the FLOP/s that this PC reaches with a stage, built like any other; None if it cannot."""
        limits = self._limits
        try:
            training, blueprint = _read_parts(parts)
            flops = sum(self._tools.count_flops(blueprint, training.batch_size))
            rate = self._tools.usual_flops_per_second(limits.device)
            share = min(1.0, _PROBE_SECONDS * rate / max(flops, 1.0))
            num_samples = max(1, int(training.batch_size * share))
            self._check_size(blueprint, num_samples)
            program = self._tools.build_program(blueprint, limits.device, autocast=self._autocast(training))
            seconds = self._tools.time_batch(program, num_samples, self._clock)
        except (UnsafeBlueprint, RuntimeError) as error:  # torch raises the latter for what it cannot run
            logger.info("the speed of this PC is not measured by a piece of the model: %s", error)
            return None
        flops *= num_samples / training.batch_size
        return flops / max(seconds, 1e-6) if flops else None

    def _autocast(self, training: TrainConfig) -> torch.dtype | None:
        """Return the type that the stage computes in, if this PC can."""
        if training.precision == "fp32":
            use_tf32(False)
            return None
        if training.precision == "auto":
            self._best = self._best or self._choose(self._limits.device)
            use_tf32(self._best == "tf32")
            return torch.bfloat16 if self._best == "bf16" else None
        if self._has_bf16 is None:
            self._has_bf16 = self._probe(self._limits.device)
            if not self._has_bf16:
                logger.warning(
                    "this PC cannot compute in bf16, so its stage computes in fp32: as exact, but slower; "
                    "on some CPUs it helps to set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 and join again"
                )
        return torch.bfloat16 if self._has_bf16 else None

    def _device(self, blueprint: Blueprint, batch_size: int, is_split: bool, recompute: bool) -> Device:
        """Return the device of the stage, slowed down if it is an emulated one."""
        if self._limits.emulated_flops_per_second is None:
            return Device(self._clock, self._wait, name=self._limits.device)
        forward, inputs, weights = self._tools.count_flops(blueprint, batch_size)
        if inputs and not is_split:
            inputs, weights = inputs + weights, 0.0
        again = forward if recompute else 0.0  # before the first part of the backward that does something
        inputs, weights = (inputs + again, weights) if inputs else (0.0, weights + again)
        per_sample = 1 / (self._limits.emulated_flops_per_second * batch_size)
        seconds = (forward * per_sample, inputs * per_sample, weights * per_sample)
        return Device(self._clock, self._wait, *seconds, self._limits.device)
