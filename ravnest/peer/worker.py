"""One stage between its neighbours: it collects what a batch needs, runs it, and addresses what comes out.

The whole of it belongs to the compute thread: messages go in, a piece of work yields parcels, each as soon as
it is ready, so the gradient of the inputs leaves before that of the weights is computed. What
to do next is decided by engine.schedule. Driven by peer.agent, which moves the parcels.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from torch import Tensor

from ravnest.engine.schedule import StageSchedule, Task, Work
from ravnest.engine.stage import Dropped, Passed, Stage
from ravnest.engine.staleness import StalenessPolicy
from ravnest.errors import ProtocolError
from ravnest.exchange import HUB, Parcel
from ravnest.model.blueprint import Blueprint, ValueId
from ravnest.net.transport import Buffer
from ravnest.peer.pacing import Device, Timekeeper
from ravnest.peer.place import Place, decode_fields, decode_values, encode_values, read_results
from ravnest.peer.tied import TiedWeights
from ravnest.plan.types import NodeId
from ravnest.protocol import (
    Activation,
    BatchId,
    DroppedBatch,
    FieldParts,
    Gradient,
    LearningRate,
    LeaseDone,
    LeaseGrant,
    LeaseId,
    Metrics,
    Pace,
    Refusal,
    StepReport,
)

logger = logging.getLogger(__name__)

Incoming = LeaseGrant | FieldParts | Activation | Gradient | DroppedBatch | Pace | LearningRate | StepReport
_REFUSALS_PER_LINE = 100  # of updates, in the log


@dataclass(slots=True)
class _Arriving:
    """What has come of a batch so far."""

    fields: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[ValueId, Tensor] | None = None
    num_samples: int = 0
    is_evaluation: bool | None = None  # unknown until the lease or the activation says so


@dataclass(slots=True)
class _Running:
    """What is known of a batch between its forward and its backward."""

    num_samples: int
    forward_seconds: float
    loss: float | None = None
    metrics: Metrics = ()


@dataclass(slots=True)
class _Lease:
    number: LeaseId
    open: set[BatchId]
    num_samples: int = 0


class Worker:
    """Trains one stage of one plan, as far ahead as its root says, within `policy`; None: as it was built."""

    def __init__(
        self,
        place: Place,
        blueprint: Blueprint,
        stage: Stage,
        schedule: StageSchedule,
        learning_rate: float,
        device: Device,
        policy: StalenessPolicy | None = None,
    ) -> None:
        self._place = place
        self._blueprint = blueprint
        self._stage = stage
        self._schedule = schedule
        self._rates: dict[int, float] = {0: learning_rate}
        self._device = device
        self._clock = device.clock
        self._time = Timekeeper(place, schedule, device.clock, policy)
        self._arriving: dict[BatchId, _Arriving] = {}
        self._ready: dict[BatchId, _Arriving] = {}
        self._evaluations: deque[BatchId] = deque()
        self._gradients: dict[BatchId, dict[ValueId, Tensor]] = {}
        self._running: dict[BatchId, _Running] = {}
        self._leases: dict[BatchId, _Lease] = {}
        self._num_trained = self._num_refused = 0
        self.tied = TiedWeights(place, blueprint, stage)
        self._waiting: list[Parcel] = self.tied.hello()  # to be sent before any work

    def receive(
        self, message: Incoming, buffers: Sequence[Buffer] = (), sender: NodeId | None = None
    ) -> Refusal | None:
        """Take a message; return why not, if it is late or repeated. ProtocolError means a wrong peer."""
        if message.epoch != self._place.epoch:
            return Refusal(f"{type(message).__name__} of plan {message.epoch}, not {self._place.epoch}")
        match message:
            case LeaseGrant():
                return self._start_lease(message)
            case FieldParts():
                arriving = self._arriving.setdefault(message.batch, _Arriving())
                arriving.fields |= decode_fields(message.fields, buffers, self._place.device)
                return self._admit(message.batch)
            case Activation():
                return self._take_activation(message, buffers)
            case Gradient():
                return self._take_gradient(message, buffers)
            case DroppedBatch():
                self._forget(message.batch)
                self._waiting.extend(self._finish(message.batch, 0))
                return None
            case Pace() | StepReport():
                return self._time.receive(message, sender)
            case LearningRate():
                self._rates[message.update] = message.rate
                return None
        assert_never(message)

    def next_work(self) -> Iterator[Parcel] | None:
        """Return the next piece of work, done as it is iterated over; None when nothing is runnable."""
        if self._waiting:
            return self.flush()
        task = self._schedule.next(self.tied.may_forward(self._schedule.is_lockstep))
        self._time.note_idle(task is None and not self._evaluations)
        if task is None:
            return self._next_evaluation() if self._evaluations else None
        return self._forward(task.batch) if task.work is Work.FORWARD else self._backward(task)

    def flush(self) -> Iterator[Parcel] | None:
        """Return what is to be sent whether there is work or not."""
        waiting, self._waiting = self._waiting, []
        return iter(waiting) if waiting else None

    @property
    def stage(self) -> Stage:
        """The stage it trains."""
        return self._stage

    @property
    def num_trained(self) -> int:
        """Samples that went through a backward here."""
        return self._num_trained

    def close_update(self) -> None:
        """Apply what is summed up, if no batch is in flight."""
        if self._schedule.is_empty and self._schedule.close_update():
            self._update(closes=True)

    def _start_lease(self, grant: LeaseGrant) -> Refusal | None:
        if self._place.before is not None:
            return Refusal(f"lease {grant.lease} came to stage {self._place.index}; leases go to the root")
        batches = [BatchId(grant.first_batch + index) for index in range(len(grant.num_samples))]
        lease = _Lease(grant.lease, set(batches))
        for batch, num_samples in zip(batches, grant.num_samples, strict=True):
            if not grant.is_evaluation:
                self._leases[batch] = lease
            arriving = self._arriving.setdefault(batch, _Arriving())
            arriving.inputs, arriving.num_samples = {}, num_samples
            arriving.is_evaluation = grant.is_evaluation
            if refusal := self._admit(batch):
                return refusal
        return None

    def _take_activation(self, message: Activation, buffers: Sequence[Buffer]) -> Refusal | None:
        arriving = self._arriving.setdefault(message.batch, _Arriving())
        if arriving.inputs is not None:
            return Refusal(f"batch {message.batch} has arrived before: the second copy is dropped")
        program = self._blueprint.program(message.is_evaluation)
        found = decode_values(message, buffers, program, message.num_samples, self._place.device)
        if found.keys() != set(program.inputs):
            raise ProtocolError(f"batch {message.batch} comes with values {sorted(found)}, not those awaited")
        arriving.inputs = found
        arriving.num_samples, arriving.is_evaluation = message.num_samples, message.is_evaluation
        self.tied.need(message.after)
        return self._admit(message.batch)

    def _take_gradient(self, message: Gradient, buffers: Sequence[Buffer]) -> Refusal | None:
        running, program = self._running.get(message.batch), self._blueprint.train
        if running is None:
            return Refusal(f"batch {message.batch} is not in flight here: its gradient is dropped")
        found = decode_values(message, buffers, program, running.num_samples, self._place.device)
        if reason := self._schedule.offer_gradient(message.batch):
            return Refusal(reason)
        self._time.note_back(message.batch, running.num_samples)
        self._gradients[message.batch] = found
        return None

    def _admit(self, batch: BatchId) -> Refusal | None:
        """Hand a batch to the schedule as soon as all of it is here."""
        arriving = self._arriving[batch]
        if arriving.is_evaluation is None:
            return None
        program = self._blueprint.program(arriving.is_evaluation)
        if arriving.inputs is None or any(name not in arriving.fields for _, name in program.fields):
            return None
        del self._arriving[batch]
        if arriving.is_evaluation:
            self._evaluations.append(batch)
        elif reason := self._schedule.offer_input(batch):
            return Refusal(reason)
        self._ready[batch] = arriving
        return None

    def _forward(self, batch: BatchId) -> Iterator[Parcel]:
        ready, started = self._ready.pop(batch), self._clock()
        assert ready.inputs is not None
        passed = self._stage.forward(batch, ready.inputs, ready.fields, key=(self._place.seed, batch))
        self._device.stretch(started, self._device.forward_seconds * ready.num_samples)
        if isinstance(passed, Dropped):
            yield from self._drop(passed)
            return
        running = self._running[batch] = _Running(ready.num_samples, self._clock() - started)
        if self._place.after is not None:
            parcel = self._pass_on(batch, ready, passed)
            self._time.note_sent(batch)
            yield parcel
            return
        running.loss, running.metrics = read_results(passed)
        self._gradients[batch] = {}
        self._schedule.offer_gradient(batch)

    def _backward(self, task: Task) -> Iterator[Parcel]:
        batch, started, device = task.batch, self._clock(), self._device
        running = self._running[batch]
        gradients = self._stage.backward_inputs(batch, self._gradients.pop(batch))
        device.stretch(started, device.inputs_seconds * running.num_samples)
        dropped = gradients if isinstance(gradients, Dropped) else None
        if not isinstance(gradients, Dropped):
            if self._place.before is not None:
                values = [(ValueId(value), gradient) for value, gradient in gradients.items()]
                specs, buffers = encode_values(values, self._place.gradients)
                yield Parcel(self._place.before, Gradient(self._place.epoch, batch, specs), buffers)
            halfway = self._clock()
            weight = self._time.weight(task.lag)
            dropped = self._stage.backward_weights(batch, weight, running.num_samples)
            device.stretch(halfway, device.weights_seconds * running.num_samples)
        if task.is_update:
            self._update()
        if dropped is not None:
            yield from self._drop(dropped)
            return
        self._num_trained += running.num_samples
        yield from self._report(task, self._running.pop(batch), self._clock() - started)
        yield from self._finish(batch, running.num_samples)
        if task.is_update:
            yield from self._time.end_update()

    def _update(self, closes: bool = False) -> None:
        rate = self._rate()
        self._waiting += self.tied.offer(rate, closes)
        updated = self._stage.update(rate)
        if updated.refusal is None:
            return
        if self._num_refused % _REFUSALS_PER_LINE == 0:
            text = "stage %d leaves update %d out: %s; %d updates were left out before"
            place, why = self._place.index + 1, updated.refusal
            logger.warning(text, place, updated.version, why, self._num_refused)
        self._num_refused += 1

    def _rate(self) -> float:
        """Return the learning rate of the update about to be made."""
        due = max(update for update in self._rates if update <= self._stage.version)
        self._rates = {update: rate for update, rate in self._rates.items() if update >= due}
        return self._rates[due]

    def _next_evaluation(self) -> Iterator[Parcel] | None:
        """Evaluate what all batches before have made, of tied weights in all stages."""
        self.close_update()
        if self._waiting or not self.tied.may_forward(waits=True):
            return self.flush()
        return self._evaluate(self._evaluations.popleft())

    def _evaluate(self, batch: BatchId) -> Iterator[Parcel]:
        ready, started = self._ready.pop(batch), self._clock()
        assert ready.inputs is not None
        passed = self._stage.evaluate(ready.inputs, ready.fields)
        self._device.stretch(started, self._device.forward_seconds * ready.num_samples)
        if self._place.after is not None:
            yield self._pass_on(batch, ready, passed)
            return
        loss, metrics = read_results(passed)
        epoch, version = self._place.epoch, self._stage.version
        report = StepReport(epoch, batch, version, 0, ready.num_samples, 0.0, 0.0, 0.0, 0.0, loss, metrics)
        yield Parcel(HUB, report)

    def _pass_on(self, batch: BatchId, ready: _Arriving, passed: Passed) -> Parcel:
        assert self._place.after is not None
        values = [(ValueId(value), tensor) for value, tensor in passed.outputs.items()]
        specs, buffers = encode_values(values, self._place.activations)
        is_evaluation = bool(ready.is_evaluation)
        stamp = self.tied.stamp(is_evaluation or self._schedule.is_lockstep)
        message = Activation(self._place.epoch, batch, is_evaluation, ready.num_samples, specs, stamp)
        return Parcel(self._place.after, message, buffers)

    def _report(self, task: Task, running: _Running, backward_seconds: float) -> Iterator[Parcel]:
        report = StepReport(
            epoch=self._place.epoch,
            batch=task.batch,
            version=self._stage.version,
            lag=task.lag,
            num_samples=running.num_samples,
            forward_seconds=running.forward_seconds,
            backward_seconds=backward_seconds,
            link_seconds=0.0,
            idle_share=0.0,
            loss=running.loss,
            metrics=running.metrics,
        )
        return self._time.send(report)

    def _finish(self, batch: BatchId, num_samples: int) -> Iterator[Parcel]:
        """Count a batch in its lease; the root reports the lease when nothing of it is open."""
        lease = self._leases.pop(batch, None)
        if lease is None:
            return
        lease.open.discard(batch)
        lease.num_samples += num_samples
        if not lease.open:
            yield Parcel(HUB, LeaseDone(self._place.epoch, lease.number, lease.num_samples))

    def _drop(self, dropped: Dropped) -> Iterator[Parcel]:
        """Tell everyone that a batch is lost, and go on."""
        message = DroppedBatch(self._place.epoch, dropped.batch, f"{dropped.where}: {dropped.reason}")
        for node in (HUB, *(node for node in self._place.pipeline if node != self._place.node)):
            yield Parcel(node, message)
        self._forget(dropped.batch)
        yield from self._finish(dropped.batch, 0)

    def _forget(self, batch: BatchId) -> None:
        self._schedule.forget(batch)
        self._stage.forget(batch)
        self._time.forget(batch)
        for known in (self._arriving, self._ready, self._gradients, self._running):
            known.pop(batch, None)
