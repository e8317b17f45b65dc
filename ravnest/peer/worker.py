"""Trains one stage: collects what a microbatch needs, runs it, addresses what comes out.

A piece of work yields messages, each as soon as it is ready: the gradient of the inputs leaves before that of
the weights is computed. engine.schedule decides what is next. All of it belongs to the compute thread.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ravnest.codec import check_buffer, decode_tensor, describe, encode_tensor, widen_integers
from ravnest.config import TIMEOUTS, PeerTimeouts, WireFormat
from ravnest.engine.schedule import StageSchedule, Task, Work
from ravnest.engine.stage import DroppedWork, PassedOn, StageEngine, Updated
from ravnest.engine.staleness import StalenessPolicy
from ravnest.engine.weight_versions import MakeAgain
from ravnest.errors import ProtocolError, RavnestError
from ravnest.ids import HUB, LeaseId, MicrobatchId, NodeId, RoundId
from ravnest.model.blueprint.program import Blueprint, Program, ValueId
from ravnest.peer.pacing import Device, Timekeeper
from ravnest.peer.stage_generation import StageGeneration
from ravnest.peer.tied_weights import TiedWeights
from ravnest.protocol.averaging import TiedCall
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import StagePosition
from ravnest.protocol.tensors import FLOAT_BYTES, Buffer, TensorSpec
from ravnest.protocol.training import (
    Activation,
    DroppedMicrobatch,
    FieldParts,
    Gradient,
    LearningRate,
    LeaseDone,
    LeaseGrant,
    Metrics,
    Recheck,
    StepReport,
)
from ravnest.transfer.outbox import Outgoing

logger = logging.getLogger(__name__)

_REFUSALS_PER_LINE = 100  # of updates, in the log
FindAverage = Callable[[RoundId], Mapping[str, Tensor] | None]


@dataclass(frozen=True, slots=True)
class _Travelled:
    """A value as it came: it is decoded when it is needed, and takes less memory until then."""

    buffer: Buffer
    spec: TensorSpec
    device: str

    def decode(self) -> Tensor:
        return decode_tensor(self.buffer, self.spec, self.device)

    @property
    def is_narrow(self) -> bool:
        """Whether the tensor is larger than what came."""
        return self.spec.dtype in FLOAT_BYTES and self.spec.packing is not WireFormat.FP32


@dataclass(slots=True)
class _Arriving:
    """The parts of a microbatch that have arrived."""

    fields: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[ValueId, _Travelled] | None = None
    num_samples: int = 0
    is_evaluation: bool | None = None  # unknown until the lease or the activation says so
    recheck: Recheck | None = None

    def decode_inputs(self) -> dict[ValueId, Tensor]:
        """Return the inputs, all of which are here."""
        assert self.inputs is not None
        return {value: each.decode() for value, each in self.inputs.items()}

    def find_again(self) -> dict[ValueId, MakeAgain]:
        """Return how inputs are made again that take more memory than what came."""
        assert self.inputs is not None
        return {value: each.decode for value, each in self.inputs.items() if each.is_narrow}


@dataclass(slots=True)
class _Running:
    """A microbatch between its forward and its backward."""

    num_samples: int
    forward_seconds: float
    passed: PassedOn | None = None  # of the last stage, until its results are read
    loss: float | None = None
    metrics: Metrics = ()
    anchor_round: RoundId | None = None  # its forward saw this average, and nothing newer


@dataclass(slots=True)
class _Lease:
    number: LeaseId
    open: set[MicrobatchId]
    num_samples: int = 0


class Worker:
    """Trains one stage of one plan at the root's pace, within `policy`; without one, as it was built."""

    def __init__(
        self,
        position: StagePosition,
        blueprint: Blueprint,
        stage: StageEngine,
        schedule: StageSchedule,
        learning_rate: float,
        device: Device,
        policy: StalenessPolicy | None = None,
        timeouts: PeerTimeouts = TIMEOUTS.peer,
    ) -> None:
        self.position = position
        self._before, self._after = position.before, position.after
        self._is_alone = position.before is None and position.after is None
        self._blueprint = blueprint
        programs = (blueprint.train, blueprint.evaluate)
        self._field_dtypes = {
            name: each.values[value].dtype for each in programs for value, name in each.fields
        }
        self._stage = stage
        self.schedule = schedule
        self._rates: dict[int, float] = {0: learning_rate}
        self.device = device
        self._clock = device.clock
        self.timekeeper = Timekeeper(position, schedule, device.clock, policy, timeouts)
        self._arriving: dict[MicrobatchId, _Arriving] = {}
        self._ready: dict[MicrobatchId, _Arriving] = {}
        self._evaluations: deque[MicrobatchId] = deque()
        self._rechecks: deque[MicrobatchId] = deque()
        self._average: tuple[RoundId, int] | None = None  # the weights' own since a version
        self.find_average: FindAverage = lambda _: None  # the weights of a round's average, if they are here
        self._gradients: dict[MicrobatchId, dict[ValueId, Tensor]] = {}
        self._running: dict[MicrobatchId, _Running] = {}
        self._leases: dict[MicrobatchId, _Lease] = {}
        self.num_trained = self._num_refused = 0  # samples that went through a backward here; updates
        self.generation: StageGeneration | None = None  # from the first text on
        self.tied = TiedWeights(position, blueprint, stage)
        self._unsent: list[Outgoing] = self.tied.hello()  # to be sent before any work

    @property
    def is_midway(self) -> bool:
        """Whether a cluster of this stage alone has a microbatch between its forward and its backward."""
        return self._is_alone and bool(self._running)

    def begin_average(self, round_id: RoundId) -> None:
        """Record that the weights are the average of a round, until the next update."""
        self._average = (round_id, self._stage.version) if self._is_alone else None

    def next_work(self, may_forward: bool = True) -> Iterator[Outgoing] | None:
        """Return the next piece of work, done as it is iterated over; None when nothing is runnable."""
        if self._unsent or self._rechecks:
            return self.flush() if self._unsent else self._recheck(self._rechecks.popleft())
        may_forward = may_forward and self.tied.may_forward(self.schedule.is_lockstep) and self._is_in_turn
        task = self.schedule.next(may_forward)
        self.timekeeper.record_idle(task is None and not self._evaluations)
        if task is None:
            return self._next_evaluation() if self._evaluations else None
        return self._forward(task.microbatch) if task.work is Work.FORWARD else self._backward(task)

    @property
    def _is_in_turn(self) -> bool:
        """Whether no earlier microbatch is to come: fields of the next share may arrive before these."""
        following = self.schedule.next_input
        if not self.schedule.is_exact or following is None:
            return True
        trained = (number for number, each in self._arriving.items() if each.is_evaluation is False)
        return all(following < number for number in trained)

    def begin_texts(self) -> StageGeneration:
        """Return the stage's part in texts, made for the first one."""
        if self.generation is None:
            self.generation = StageGeneration(self.position, self._blueprint, self._stage, self.device)
        return self.generation

    def flush(self) -> Iterator[Outgoing] | None:
        """Return messages that leave whether there is work or not."""
        unsent, self._unsent = self._unsent, []
        return iter(unsent) if unsent else None

    @property
    def stage(self) -> StageEngine:
        """The stage it trains."""
        return self._stage

    def close_update(self) -> None:
        """Apply the gradients summed up so far, if no microbatch is in flight."""
        if self.schedule.is_empty and self.schedule.close_update():
            self._update(is_closing=True)

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters of the stage that nothing changes."""
        return frozenset(entry.name for entry in self._blueprint.state if entry.is_frozen)

    @property
    def is_exact(self) -> bool:
        """Whether updates wait for gradient rounds."""
        return self.schedule.is_exact

    @property
    def is_update_complete(self) -> bool:
        """Whether the share of an exact update is trained, and waits for the shares of other clusters."""
        return self.schedule.is_complete

    def set_exact(self, is_exact: bool) -> None:
        """Make updates wait for gradient rounds, or no more: then one that waits is made of the own share."""
        if is_exact == self.is_exact:
            return
        if self.is_update_complete:
            self.make_update(None, self._rate())
        self.close_update()
        self.schedule.set_exact(is_exact)
        self._stage.forget_prediction()

    def expect_update(self, rate: float, num_microbatches: int | None) -> None:
        """Learn the rate of the exact update under way, and how many microbatches the share has."""
        self._rates[self._stage.version] = rate
        self.schedule.expect(num_microbatches)

    def make_update(self, gradients: Mapping[str, Tensor] | None, rate: float) -> None:
        """Make the exact update that waits, with this mean gradient, or with that of the own share."""
        self.schedule.end_exact()
        stage = self._stage
        self._record(stage.update(rate) if gradients is None else stage.update_with(gradients, rate))

    def start_lease(self, grant: LeaseGrant) -> Refusal | None:
        """As the root, expect the microbatches of a lease."""
        if self._before is not None:
            return Refusal(f"lease {grant.lease} came to stage {self.position.index}; leases go to the root")
        microbatches = [
            MicrobatchId(grant.first_microbatch + index) for index in range(len(grant.num_samples))
        ]
        lease = _Lease(grant.lease, set(microbatches))
        for microbatch, num_samples in zip(microbatches, grant.num_samples, strict=True):
            if not grant.is_evaluation:
                self._leases[microbatch] = lease
            arriving = self._arriving.setdefault(microbatch, _Arriving())
            arriving.inputs, arriving.num_samples = {}, num_samples
            arriving.is_evaluation, arriving.recheck = grant.is_evaluation, grant.recheck
            if refusal := self._admit(microbatch):
                return refusal
        return None

    def receive_fields(self, message: FieldParts, buffers: Sequence[Buffer]) -> Refusal | None:
        """Add the fields of a microbatch."""
        arriving = self._arriving.setdefault(message.microbatch, _Arriving())
        found = _decode_fields(message.fields, buffers)
        arriving.fields |= {
            name: widen_integers(field, self._field_dtypes[name]) if name in self._field_dtypes else field
            for name, field in found.items()
        }
        return self._admit(message.microbatch)

    def receive_activation(self, message: Activation, buffers: Sequence[Buffer]) -> Refusal | None:
        """Add the inputs of a microbatch; a repeated one is refused."""
        arriving = self._arriving.setdefault(message.microbatch, _Arriving())
        if arriving.inputs is not None:
            return Refusal(f"microbatch {message.microbatch} has arrived before: the second copy is dropped")
        program = self._blueprint.program(message.is_evaluation)
        found = _check_values(message, buffers, program, message.num_samples, self.device.name)
        if found.keys() != set(program.inputs):
            raise ProtocolError(
                f"microbatch {message.microbatch} comes with values {sorted(found)}, not those awaited"
            )
        arriving.inputs = found
        arriving.num_samples, arriving.is_evaluation = message.num_samples, message.is_evaluation
        self.tied.need(message.after)
        self._stage.squares_before = message.norm_square
        return self._admit(message.microbatch)

    def receive_gradient(self, message: Gradient, buffers: Sequence[Buffer]) -> Refusal | None:
        """Offer the schedule the backward of a microbatch."""
        running, program = self._running.get(message.microbatch), self._blueprint.train
        if running is None:
            return Refusal(f"microbatch {message.microbatch} is not in flight here: its gradient is dropped")
        found = {
            value: each.decode()
            for value, each in _check_values(
                message, buffers, program, running.num_samples, self.device.name
            ).items()
        }
        if reason := self.schedule.offer_gradient(message.microbatch):
            return Refusal(reason)
        self.timekeeper.record_return(message.microbatch, running.num_samples)
        self._stage.squares_after = message.norm_square
        self._gradients[message.microbatch] = found
        return None

    def drop_microbatch(self, message: DroppedMicrobatch) -> None:
        """Forget a microbatch that another stage has dropped."""
        self._forget(message.microbatch, message.is_evaluation)
        self._unsent.extend(self._finish(message.microbatch, 0))

    def set_rate(self, message: LearningRate) -> None:
        """Use a learning rate from an update on."""
        self._rates[message.update] = message.rate

    def answer_tied_call(self, call: TiedCall, sender: NodeId) -> list[Outgoing] | Refusal:
        """Give the home its gradients; when it closes an update, this stage does too."""
        if call.is_closing:
            self.close_update()
        return self.tied.receive_call(call, sender)

    def _admit(self, microbatch: MicrobatchId) -> Refusal | None:
        """Hand a microbatch to the schedule as soon as all of it is here."""
        arriving = self._arriving[microbatch]
        if arriving.is_evaluation is None:
            return None
        program = self._blueprint.program(arriving.is_evaluation and arriving.recheck is None)
        if arriving.inputs is None or any(name not in arriving.fields for _, name in program.fields):
            return None
        del self._arriving[microbatch]
        if arriving.recheck is not None:
            self._rechecks.append(microbatch)
        elif arriving.is_evaluation:
            self._evaluations.append(microbatch)
        elif reason := self.schedule.offer_input(microbatch):
            return Refusal(reason)
        self._ready[microbatch] = arriving
        return None

    def _forward(self, microbatch: MicrobatchId) -> Iterator[Outgoing]:
        ready = self._ready.pop(microbatch)
        inputs, started = ready.decode_inputs(), self._clock()
        again = ready.find_again() if self.position.stage.recompute else None
        key = (self.position.seed, microbatch)
        passed = self._stage.forward(microbatch, inputs, ready.fields, key=key, again=again)
        del inputs
        self.device.stretch(started, self.device.forward_seconds * ready.num_samples)
        if isinstance(passed, DroppedWork):
            yield from self._drop(passed)
            return
        running = self._running[microbatch] = _Running(ready.num_samples, self._clock() - started)
        if self._average is not None and self._average[1] == self._stage.version:
            running.anchor_round = self._average[0]
        if self._after is not None:
            outgoing = self._pass_on(microbatch, ready, passed)
            self.timekeeper.record_sent(microbatch)
            yield outgoing
            return
        running.passed = passed
        self._gradients[microbatch] = {}
        self.schedule.offer_gradient(microbatch)

    def _backward(self, task: Task) -> Iterator[Outgoing]:
        microbatch, started, device = task.microbatch, self._clock(), self.device
        running = self._running[microbatch]
        gradients = self._stage.backward_inputs(microbatch, self._gradients.pop(microbatch))
        device.stretch(started, device.inputs_seconds * running.num_samples)
        dropped = gradients if isinstance(gradients, DroppedWork) else None
        if not isinstance(gradients, DroppedWork):
            if self._before is not None:
                values = [(ValueId(value), gradient) for value, gradient in gradients.items()]
                specs, buffers = _encode_values(
                    values, self.position.stage.gradients, (self.position.seed, microbatch)
                )
                squares = self._stage.norm_square + self._stage.squares_after
                back = Gradient(self.position.build_id, microbatch, specs, squares)
                yield Outgoing(self._before, back, buffers)
            halfway = self._clock()
            weight = self.timekeeper.weight(task.lag)
            rate = self._rate() if task.is_update else None
            dropped = self._stage.backward_weights(microbatch, weight, running.num_samples, rate)
            device.stretch(halfway, device.weights_seconds * running.num_samples)
        if running.passed is not None and dropped is None:
            # The device has nothing to do now: a look costs no wait, as one after the forward would.
            running.loss, running.metrics = _read_results(running.passed)
        if task.is_update:
            self._update()
        if dropped is not None:
            yield from self._drop(dropped)
            return
        self.num_trained += running.num_samples
        yield from self._report(task, self._running.pop(microbatch), self._clock() - started)
        yield from self._finish(microbatch, running.num_samples)
        if task.is_update:
            yield from self.timekeeper.end_update()

    def _update(self, is_closing: bool = False) -> None:
        rate = self._rate()
        self._unsent += self.tied.offer(rate, is_closing)
        self._record(self._stage.update(rate))

    def _record(self, updated: Updated) -> None:
        if updated.refusal is None:
            return
        if self._num_refused % _REFUSALS_PER_LINE == 0:
            text = "stage %d leaves update %d out: %s; %d updates were left out before"
            facts = (self.position.index + 1, updated.version, updated.refusal, self._num_refused)
            logger.warning(text, *facts)
        self._num_refused += 1

    def _rate(self) -> float:
        """Return the learning rate of the update about to be made."""
        due = max(update for update in self._rates if update <= self._stage.version)
        self._rates = {update: rate for update, rate in self._rates.items() if update >= due}
        return self._rates[due]

    def _next_evaluation(self) -> Iterator[Outgoing] | None:
        """Evaluate once all microbatches before are in the weights, of tied weights in all stages."""
        if self.schedule.is_exact and (self.schedule.num_accumulated or self.schedule.is_complete):
            return self.flush()
        self.close_update()
        if self._unsent or not self.tied.may_forward(waits=True):
            return self.flush()
        return self._evaluate(self._evaluations.popleft())

    def _evaluate(self, microbatch: MicrobatchId) -> Iterator[Outgoing]:
        ready = self._ready.pop(microbatch)
        inputs, started = ready.decode_inputs(), self._clock()
        passed = self._stage.evaluate(microbatch, inputs, ready.fields)
        self.device.stretch(started, self.device.forward_seconds * ready.num_samples)
        if isinstance(passed, DroppedWork):
            yield from self._drop(passed)
            return
        if self._after is not None:
            yield self._pass_on(microbatch, ready, passed)
            return
        facts = (self.position.build_id, microbatch, self._stage.version, 0, ready.num_samples)
        yield Outgoing(HUB, StepReport(*facts, 0.0, 0.0, 0.0, 0.0, *_read_results(passed)))

    def _recheck(self, microbatch: MicrobatchId) -> Iterator[Outgoing]:
        """Say which loss a microbatch of another cluster has on an average that both have."""
        ready = self._ready.pop(microbatch)
        assert ready.recheck is not None
        loss, key = None, (self.position.seed, ready.recheck.microbatch)
        average = self.find_average(ready.recheck.anchor_round) if self._is_alone else None
        if average is not None:
            inputs, started = ready.decode_inputs(), self._clock()
            passed = self._stage.rerun(microbatch, inputs, ready.fields, key, average)
            self.device.stretch(started, self.device.forward_seconds * ready.num_samples)
            loss = None if isinstance(passed, DroppedWork) else _read_results(passed)[0]
        anchor_round = None if loss is None else ready.recheck.anchor_round
        facts = (self.position.build_id, microbatch, self._stage.version, 0, ready.num_samples)
        yield Outgoing(HUB, StepReport(*facts, 0.0, 0.0, 0.0, 0.0, loss, (), None, anchor_round))

    def _pass_on(self, microbatch: MicrobatchId, ready: _Arriving, passed: PassedOn) -> Outgoing:
        assert self._after is not None
        values = [(ValueId(value), tensor) for value, tensor in passed.outputs.items()]
        key = (self.position.seed, microbatch)
        specs, buffers = _encode_values(values, self.position.stage.activations, key)
        is_evaluation = bool(ready.is_evaluation)
        stamp = self.tied.stamp(is_evaluation or self.schedule.is_lockstep)
        build_id, squares = self.position.build_id, self._stage.norm_square + self._stage.squares_before
        message = Activation(build_id, microbatch, is_evaluation, ready.num_samples, specs, stamp, squares)
        return Outgoing(self._after, message, buffers)

    def _report(self, task: Task, running: _Running, backward_seconds: float) -> Iterator[Outgoing]:
        report = StepReport(
            build_id=self.position.build_id,
            microbatch=task.microbatch,
            version=self._stage.version,
            lag=task.lag,
            num_samples=running.num_samples,
            forward_seconds=running.forward_seconds,
            backward_seconds=backward_seconds,
            link_seconds=0.0,
            idle_share=0.0,
            loss=running.loss,
            metrics=running.metrics,
            noise=self._stage.noise if task.is_update else None,
            anchor_round=running.anchor_round,
        )
        return self.timekeeper.send(report)

    def _finish(self, microbatch: MicrobatchId, num_samples: int) -> Iterator[Outgoing]:
        """Count a microbatch in its lease; the root reports the lease when nothing of it is open."""
        lease = self._leases.pop(microbatch, None)
        if lease is None:
            return
        lease.open.discard(microbatch)
        lease.num_samples += num_samples
        if not lease.open:
            yield Outgoing(HUB, LeaseDone(self.position.build_id, lease.number, lease.num_samples))

    def _drop(self, dropped: DroppedWork) -> Iterator[Outgoing]:
        """Tell everyone that a microbatch is lost, and go on."""
        is_evaluation, reason = dropped.where == "evaluation", f"{dropped.where}: {dropped.reason}"
        message = DroppedMicrobatch(self.position.build_id, dropped.microbatch, reason, is_evaluation)
        for node in (HUB, *(node for node in self.position.pipeline if node != self.position.node)):
            yield Outgoing(node, message)
        self._forget(dropped.microbatch, is_evaluation)
        yield from self._finish(dropped.microbatch, 0)
        if dropped.has_lost_device:
            problem = f"the device of this PC has stopped working ({dropped.reason})"
            raise RavnestError(f"{problem}; start ravnest join again")

    def _forget(self, microbatch: MicrobatchId, is_evaluation: bool) -> None:
        if not is_evaluation:
            self.schedule.forget(microbatch)
        self._stage.forget(microbatch)
        self.timekeeper.forget(microbatch)
        for known in (self._arriving, self._ready, self._gradients, self._running):
            known.pop(microbatch, None)


def _encode_values(
    values: Sequence[tuple[ValueId, Tensor]], wire_format: WireFormat, key: tuple[int, int]
) -> tuple[tuple[tuple[int, TensorSpec], ...], tuple[memoryview, ...]]:
    """Return what announces values and the bytes beside it; with the value, the key seeds its rounding."""
    specs = tuple((int(value), describe(tensor, wire_format)) for value, tensor in values)
    return specs, tuple(encode_tensor(tensor, wire_format, (*key, value)) for value, tensor in values)


def _decode_fields(specs: Sequence[tuple[str, TensorSpec]], buffers: Sequence[Buffer]) -> dict[str, Tensor]:
    """Return the fields that came with a message; the program checks them before a GPU gets them."""
    return {name: decode_tensor(buffer, spec) for (name, spec), buffer in zip(specs, buffers, strict=True)}


def _check_values(
    message: Activation | Gradient, buffers: Sequence[Buffer], program: Program, num_samples: int, device: str
) -> dict[ValueId, _Travelled]:
    """Return the values that a neighbour sends, or refuse what the program does not have so."""
    found = {}
    for (number, spec), buffer in zip(message.values, buffers, strict=True):
        kind = program.values.get(value := ValueId(number))
        if kind is None or (spec.dtype, spec.shape) != (kind.dtype, kind.shape_at(num_samples)):
            raise ProtocolError(
                f"value {number} of microbatch {message.microbatch} is {spec.dtype} {spec.shape}, not its own"
            )
        check_buffer(buffer, spec)
        # Whole numbers may be indices: the program checks them before a GPU gets them.
        found[value] = _Travelled(buffer, spec, device if spec.dtype in FLOAT_BYTES else "cpu")
        if spec.dtype == "bool":
            found[value].decode()  # it may be refused, and its sender named
    return found


def _read_results(passed: PassedOn) -> tuple[float | None, Metrics]:
    """Return the loss and the metrics of the last stage; one that is no finite number is None."""
    results: Mapping[str, float] = {name: float(value) for name, value in passed.results.items()}
    known = {name: value if math.isfinite(value) else None for name, value in results.items()}
    return known["loss"], tuple((name, value) for name, value in known.items() if name != "loss")
