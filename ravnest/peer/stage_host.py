"""What a stage is built from: what this PC holds of the one before, and snapshots of others, by name.

Nothing here believes a source: what is used of it must be what the blueprint says, and finite. One that
cannot be used is named to the hub, which knows others.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ravnest.config import TIMEOUTS, PeerTimeouts
from ravnest.engine.schedule import StageSchedule
from ravnest.engine.stage import StageEngine
from ravnest.engine.train_config import TrainConfig, read_train_config
from ravnest.engine.weight_versions import Snapshot
from ravnest.errors import UnsafeBlueprint, WeightsError
from ravnest.ids import HUB, NodeId
from ravnest.model.blueprint import Blueprint
from ravnest.model.blueprint_json import read_blueprint
from ravnest.model.dry_run import Footprint, dry_run
from ravnest.model.profile import count_flops
from ravnest.model.stage_program import StageProgram, build_stage_program
from ravnest.model.state_dict import Layout, read_finite_snapshot
from ravnest.peer.averager import AnchorState, Averager
from ravnest.peer.capabilities import can_run_bf16, time_batch
from ravnest.peer.pacing import Device, make_policy
from ravnest.peer.stage_position import StagePosition, find_roles
from ravnest.peer.worker import Incoming, Worker
from ravnest.protocol.averaging import AnchorPart, AnchorQuery, RingPart, RoundAbort, RoundCommit, RoundOpen
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.placement import PlanOrder, RingOrder, StageMissing, StageParts, StageReady
from ravnest.protocol.tensors import Buffer, TensorSpec
from ravnest.protocol.tied import TiedCall, TiedGradient, TiedHolder, TiedStep
from ravnest.transfer.outbox import Outgoing


@dataclass(frozen=True, slots=True)
class HeldStage:
    """What is left of a stage whose plan has ended: enough to go on with under another."""

    snapshot: Snapshot
    standing: AnchorState


def assemble_stage(
    blueprint: Blueprint, parts: StageParts, contents: Sequence[Buffer], held: HeldStage | None, device: str
) -> tuple[Snapshot, AnchorState] | StageMissing:
    """Return what a stage begins with; contents are those of the order's sources."""
    state: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    standing = AnchorState(parts.anchor_round)
    if parts.is_kept and held is not None:
        state, optimizer = _keep(held.snapshot, blueprint)
        averaged = {entry.name for entry in Layout.of(blueprint).entries}
        if averaged <= state.keys() and averaged <= held.standing.anchors.keys():
            standing = held.standing
    for source, content in zip(parts.sources, contents, strict=True):
        missing = [entry for entry in blueprint.state if entry.name not in state]
        if not missing:
            break
        try:
            found, slots = read_finite_snapshot(content, missing)
        except WeightsError as error:
            if source.node == HUB:
                raise
            return StageMissing(parts.build_id, source.node, str(error))
        state |= {name: tensor.to(device) for name, tensor in found.items()}
        optimizer |= {key: tensor.to(device) for key, tensor in slots.items()}
    lacks = [entry.name for entry in blueprint.state if entry.name not in state]
    if lacks:
        raise WeightsError(
            f"no source of the stage has {lacks[0]!r}, nor {len(lacks) - 1} more of its tensors"
        )
    return Snapshot(parts.version, state, optimizer), standing


def _keep(held: Snapshot, blueprint: Blueprint) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what is held of a stage, with the optimizer's state."""
    state = {}
    for entry in blueprint.state:
        tensor, kind = held.state.get(entry.name), (entry.shape, f"torch.{entry.dtype}")
        if tensor is not None and (tuple(tensor.shape), str(tensor.dtype)) == kind:
            state[entry.name] = tensor
    slots = {key: tensor for key, tensor in held.optimizer.items() if key.partition("/")[2] in state}
    return state, slots


logger = logging.getLogger(__name__)

# The plan knows better what is alive at once; the look before the first run adds up all that is ever made.
_PREFLIGHT_TIMES = 4
# Sending the gradient before the rest of a backward costs 0.1 ms per weight: it may take a fiftieth of it.
_SPLIT_SECONDS = 50 * 1e-4
_AVERAGING_SHARE = 0.5  # of the time that training takes, while both have work
_PROBE_SECONDS = 0.2  # for one run of a probe, on a usual PC


@dataclass(frozen=True, slots=True)
class ProviderLimits:
    """What the provider lends: memory for tensors, work for one batch, and the device for both.

    With `emulated_flops_per_second` the device behaves like one that is so slow, and waits the rest.
    """

    memory_bytes: float
    flops_per_batch: float = 1e15
    device: str = "cpu"
    emulated_flops_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class StageTools:
    """What a stage is checked, built and timed with."""

    dry_run: Callable[..., Footprint] = dry_run
    count_flops: Callable[[Blueprint, int], tuple[float, float, float]] = count_flops
    build_program: Callable[..., StageProgram] = build_stage_program
    time_batch: Callable[[StageProgram, int, Callable[[], float]], float] = time_batch
    usual_cpu_flops_per_second: float = 5e10  # of one core
    usual_other_flops_per_second: float = 1e13  # of a GPU

    def usual_flops_per_second(self, device: str) -> float:
        """Return the speed of a usual device of this kind."""
        return self.usual_cpu_flops_per_second if device == "cpu" else self.usual_other_flops_per_second


STAGE_TOOLS = StageTools()


def _read_parts(parts: bytes) -> tuple[TrainConfig, Blueprint]:
    training, _, blueprint = parts.partition(b"\n")
    return read_train_config(training), read_blueprint(blueprint)


class StageHost:
    """Hosts one stage; `clock` tells seconds, `wait` lets some pass, `probe` says if a device has bf16."""

    def __init__(
        self,
        limits: ProviderLimits,
        clock: Callable[[], float],
        wait: Callable[[float], object] | None = None,
        probe: Callable[[str], bool] = can_run_bf16,
        tools: StageTools = STAGE_TOOLS,
        timeouts: PeerTimeouts = TIMEOUTS.peer,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._wait = wait or threading.Event().wait  # nobody sets it: it costs no work to wait for
        self._probe = probe
        self._tools, self._timeouts = tools, timeouts
        self._has_bf16: bool | None = None  # not probed yet
        self._worker: Worker | None = None
        self._averager: Averager | None = None
        self._held: HeldStage | None = None  # of the stage before, until the next is built
        self._late_round: RoundOpen | None = None  # it begins when tied weights are settled
        self._training_seconds = self._averaging_seconds = 0.0  # while a round is open

    @property
    def deadline(self) -> float | None:
        """When `tick` is due, if nothing else happens before."""
        return None if self._averager is None else self._averager.deadline

    def build(
        self, order: PlanOrder, parts: StageParts, blueprint_content: bytes, contents: Sequence[Buffer]
    ) -> StageReady | StageMissing:
        """Make the stage of this order ready; contents are those of the sources.

        Return which source cannot be used, or raise with the reason why this PC will not run the stage.
        """
        training, blueprint = _read_parts(blueprint_content)
        stage = order.stage
        assert stage is not None
        if (blueprint.start, blueprint.stop) != (stage.start, stage.stop):
            raise UnsafeBlueprint(
                f"the blueprint is of positions {blueprint.start} to {blueprint.stop}, "
                f"the plan has {stage.start} to {stage.stop} here"
            )
        limits = self._limits
        footprint = self._tools.dry_run(
            blueprint,
            -(-training.batch_size // order.accumulate),
            max_bytes=_PREFLIGHT_TIMES * limits.memory_bytes,
            max_flops=limits.flops_per_batch,
        )
        begun = assemble_stage(blueprint, parts, contents, self._held, limits.device)
        if isinstance(begun, StageMissing):
            return begun
        snapshot, standing = begun
        program = self._tools.build_program(
            blueprint, limits.device, autocast=self._autocast(training), recompute=stage.recompute
        )
        rate = limits.emulated_flops_per_second or self._tools.usual_flops_per_second(limits.device)
        backward_seconds = 2 * footprint.forward_flops / rate
        num_weights = sum(entry.is_trainable for entry in blueprint.state)
        is_split = not stage.recompute and backward_seconds > num_weights * _SPLIT_SECONDS
        running = StageEngine(program, snapshot, find_roles(blueprint), training.optimizer, is_split)
        formats = (training.activations, training.gradients)
        place = StagePosition(order.build_id, order.seed, stage.node, order.pipeline, *formats, limits.device)
        schedule = StageSchedule(stage.window, order.accumulate, version=parts.version)
        device = self._device(blueprint, training.batch_size, is_split, stage.recompute)
        rate, policy = training.optimizer.learning_rate, make_policy(training, order)
        self._worker = Worker(place, blueprint, running, schedule, rate, device, policy, self._timeouts)
        self._averager = Averager(
            place, order, blueprint, self._worker, training, self._clock, standing, self._timeouts
        )
        self._held = self._late_round = None
        return StageReady(parts.build_id)

    def measure_speed(self, parts: bytes) -> float | None:
        """Return the FLOP/s that this PC reaches with a stage, built like any other; None if it cannot."""
        limits = self._limits
        try:
            training, blueprint = _read_parts(parts)
            flops = sum(self._tools.count_flops(blueprint, training.batch_size))
            rate = self._tools.usual_flops_per_second(limits.device)
            share = min(1.0, _PROBE_SECONDS * rate / max(flops, 1.0))
            num_samples = max(1, int(training.batch_size * share))
            self._tools.dry_run(
                blueprint,
                num_samples,
                max_bytes=_PREFLIGHT_TIMES * limits.memory_bytes,
                max_flops=limits.flops_per_batch,
            )
            program = self._tools.build_program(blueprint, limits.device, autocast=self._autocast(training))
            seconds = self._tools.time_batch(program, num_samples, self._clock)
        except (UnsafeBlueprint, RuntimeError) as error:  # torch says what it cannot run by the latter
            logger.info("the speed of this PC is not measured by a piece of the model: %s", error)
            return None
        flops *= num_samples / training.batch_size
        return flops / max(seconds, 1e-6) if flops else None

    def _autocast(self, training: TrainConfig) -> torch.dtype | None:
        """Return what the stage computes in, as far as this PC can."""
        if training.precision == "fp32":
            return None
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
            return Device(self._clock, self._wait)
        forward, inputs, weights = self._tools.count_flops(blueprint, batch_size)
        if inputs and not is_split:
            inputs, weights = inputs + weights, 0.0
        again = forward if recompute else 0.0  # before the first part of the backward that does something
        inputs, weights = (inputs + again, weights) if inputs else (0.0, weights + again)
        per_sample = 1 / (self._limits.emulated_flops_per_second * batch_size)
        return Device(
            self._clock, self._wait, forward * per_sample, inputs * per_sample, weights * per_sample
        )

    def follow(self, order: PlanOrder) -> None:
        """End the stage; hold what it has, unless the plan has none for this node."""
        if order.stage is None:
            self._held = None
        elif self._worker is not None and self._averager is not None:
            self._worker.close_update()
            self._held = HeldStage(self._worker.stage.snapshot(copies=False), self._averager.standing)
        self._worker = self._averager = self._late_round = None

    def rearrange(self, order: RingOrder) -> list[Outgoing]:
        """Train on, and average in other rings."""
        self._late_round = None
        return [] if self._averager is None else self._averager.rearrange(order)

    def receive(
        self, message: Message, buffers: Sequence[Buffer], sender: NodeId | None = None
    ) -> Iterable[Outgoing] | Refusal:
        """Take a message for the stage; return what to send at once."""
        if self._worker is None or self._averager is None:
            return Refusal(f"{type(message).__name__} came, but no stage is hosted here")
        if isinstance(message, RoundOpen):
            return self._open_round(message)
        late = self._late_round
        if isinstance(message, RoundAbort) and late is not None and message.round_id == late.round_id:
            self._late_round = None
            return ()
        if isinstance(message, TiedHolder | TiedCall | TiedGradient | TiedStep):
            return self._share(message, buffers, sender)
        if isinstance(message, RingPart | RoundCommit | RoundAbort | AnchorQuery | AnchorPart):
            return self._averager.receive(message, buffers, sender)
        if isinstance(message, Incoming):
            return self._worker.receive(message, buffers, sender) or ()
        return Refusal(f"{type(message).__name__} is not for a stage")

    def _open_round(self, order: RoundOpen) -> Iterable[Outgoing]:
        """Begin a round, as soon as all that was trained can be in it."""
        assert self._worker is not None
        assert self._averager is not None
        if order.is_final:
            self._worker.close_update()
        if order.is_blocking:
            # All that was trained must be in the average: tied weights may wait for other stages.
            self._late_round = None if self._worker.tied.is_settled else order
            if self._late_round is not None:
                return ()
        self._training_seconds = self._averaging_seconds = 0.0
        return self._averager.open(order)

    def _share(
        self,
        message: TiedHolder | TiedCall | TiedGradient[TensorSpec] | TiedStep[TensorSpec],
        buffers: Sequence[Buffer],
        sender: NodeId | None,
    ) -> Iterable[Outgoing] | Refusal:
        """Take what another stage says of a tied weight; a round may have waited for it."""
        assert self._worker is not None
        if isinstance(message, TiedCall) and message.is_closing:
            self._worker.close_update()
        found = self._worker.tied.receive(message, buffers, sender)
        if isinstance(found, Refusal) or self._late_round is None:
            return found
        return [*found, *self._open_round(self._late_round)]

    def next_work(self) -> Iterator[Outgoing] | None:
        """Return the next piece of work; None when there is nothing to do.

        Chunks of a round come first, until they have had their share of the time: one that waits keeps the
        whole ring waiting, and training may have work without end.
        """
        if self._worker is None or self._averager is None:
            return None
        is_blocked = self._averager.is_blocking or self._late_round is not None
        is_first = self._averaging_seconds <= _AVERAGING_SHARE * self._training_seconds
        averaging = self._average() if is_first or is_blocked else None
        if averaging is not None:
            return averaging
        work = self._worker.flush() if is_blocked else self._worker.next_work()
        if work is None:
            return self._average()
        return self._timed(work) if self._averager.is_open else work

    def _average(self) -> Iterator[Outgoing] | None:
        """Do a chunk's work for a round, if there is any."""
        assert self._averager is not None
        began = self._clock()
        parcels = self._averager.next_work()
        self._averaging_seconds += self._clock() - began
        return None if parcels is None else iter(parcels)

    def _timed(self, work: Iterator[Outgoing]) -> Iterator[Outgoing]:
        began = self._clock()
        yield from work
        self._training_seconds += self._clock() - began

    def tick(self, now: float) -> Iterable[Outgoing]:
        """Let an open round notice its deadline."""
        return () if self._averager is None else self._averager.tick(now)

    def save(self, is_final: bool = True) -> Snapshot | None:
        """Return the stage, or what is held of one; None while tied weights wait, or where there is none.

        It is no copy, which a PC may have no memory for: while somebody writes it down training may change
        it, so that parts of it are some updates apart, as stages are anyway. After the final one nothing is
        trained: what is summed up is applied first.
        """
        if self._worker is None:
            return None if self._held is None else self._held.snapshot
        if is_final:
            self._worker.close_update()
        # Training may never let all of them settle at once, and the next snapshot has what this one lacks.
        tied = self._worker.tied
        is_time = tied.is_settled if is_final else tied.is_ready
        return self._worker.stage.snapshot(copies=False) if is_time else None
