"""One stage between its neighbours: it collects what a batch needs, runs it, and addresses what comes out.

The whole of it belongs to the compute thread: messages go in, a piece of work yields parcels, each as soon as
it is ready, so the gradient of the inputs leaves before that of the weights is computed. What
to do next is decided by engine.schedule. Driven by peer.agent, which moves the parcels.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from torch import Tensor

from ravnest.codec import decode, describe, encode
from ravnest.config import WireFormat
from ravnest.engine.schedule import StageSchedule, Task, Work
from ravnest.engine.stage import Dropped, Passed, Roles, Stage
from ravnest.errors import ProtocolError
from ravnest.exchange import HUB, Parcel
from ravnest.model.blueprint import Blueprint, Program, ValueId
from ravnest.net.transport import Buffer
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
    TensorSpec,
)

Incoming = LeaseGrant | FieldParts | Activation | Gradient | DroppedBatch | Pace | LearningRate


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stage stands: its plan, its neighbours in the cluster, how numbers travel from it."""

    epoch: int
    seed: int
    node: NodeId
    pipeline: tuple[NodeId, ...]
    activations: WireFormat = WireFormat.FP32
    gradients: WireFormat = WireFormat.FP32

    @property
    def index(self) -> int:
        """Its number in the cluster, from the root."""
        return self.pipeline.index(self.node)

    @property
    def before(self) -> NodeId | None:
        """The neighbour towards the root."""
        return self.pipeline[self.index - 1] if self.index else None

    @property
    def after(self) -> NodeId | None:
        """The neighbour towards the leaf."""
        return self.pipeline[self.index + 1] if self.index + 1 < len(self.pipeline) else None


def find_roles(blueprint: Blueprint) -> Roles:
    """Return which state of a stage is trained, written, shared, and which inputs want gradients."""
    program = blueprint.train
    return Roles(
        trainable=frozenset(entry.name for entry in blueprint.state if entry.is_trainable),
        written=frozenset(entry.name for entry in blueprint.state if entry.is_written),
        shared=frozenset(blueprint.shared),
        inputs=frozenset(value for value in program.inputs if program.values[value].has_gradient),
    )


@dataclass(slots=True)
class _Arriving:
    """What has come of a batch so far."""

    fields: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[ValueId, Tensor] | None = None
    num_samples: int = 0
    is_evaluation: bool | None = None  # unknown until the lease or the activation says so


@dataclass(slots=True)
class _Lease:
    number: LeaseId
    open: set[BatchId]
    num_samples: int = 0


class Worker:
    """Trains one stage of one plan; `clock` tells seconds, for reports only."""

    def __init__(
        self,
        place: Place,
        blueprint: Blueprint,
        stage: Stage,
        schedule: StageSchedule,
        learning_rate: float,
        clock: Callable[[], float],
    ) -> None:
        self._place = place
        self._blueprint = blueprint
        self._stage = stage
        self._schedule = schedule
        self._rates: dict[int, float] = {0: learning_rate}
        self._clock = clock
        self._arriving: dict[BatchId, _Arriving] = {}
        self._ready: dict[BatchId, _Arriving] = {}
        self._evaluations: deque[BatchId] = deque()
        self._gradients: dict[BatchId, dict[ValueId, Tensor]] = {}
        self._num_samples: dict[BatchId, int] = {}
        self._forward_seconds: dict[BatchId, float] = {}
        self._leases: dict[BatchId, _Lease] = {}
        self._losses: dict[BatchId, tuple[float | None, Metrics]] = {}
        self._num_trained = 0
        self._waiting: list[Parcel] = []  # to be sent before any work

    def receive(self, message: Incoming, buffers: Sequence[Buffer] = ()) -> Refusal | None:
        """Take a message; return why not, if it is late or repeated. ProtocolError means a wrong peer."""
        if message.epoch != self._place.epoch:
            return Refusal(f"{type(message).__name__} of plan {message.epoch}, not {self._place.epoch}")
        match message:
            case LeaseGrant():
                return self._start_lease(message)
            case FieldParts():
                arriving = self._arriving.setdefault(message.batch, _Arriving())
                names = [name for name, _ in message.fields]
                arriving.fields |= dict(zip(names, _decode(message.fields, buffers), strict=True))
                return self._admit(message.batch)
            case Activation():
                return self._take_activation(message, buffers)
            case Gradient():
                return self._take_gradient(message, buffers)
            case DroppedBatch():
                self._forget(message.batch)
                self._waiting.extend(self._finish(message.batch, 0))
                return None
            case Pace():
                self._schedule.resize(message.window, message.accumulate, message.is_synchronous)
                return None
            case LearningRate():
                self._rates[message.update] = message.rate
                return None
        assert_never(message)

    def next_work(self) -> Iterator[Parcel] | None:
        """Return the next piece of work, done as it is iterated over; None when nothing is runnable."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            return iter(waiting)
        task = self._schedule.next()
        if task is None:
            return self._evaluate(self._evaluations.popleft()) if self._evaluations else None
        return self._forward(task.batch) if task.work is Work.FORWARD else self._backward(task)

    @property
    def stage(self) -> Stage:
        """The stage it trains."""
        return self._stage

    @property
    def num_trained(self) -> int:
        """Samples that went through a backward here."""
        return self._num_trained

    def _start_lease(self, grant: LeaseGrant) -> Refusal | None:
        if self._place.before is not None:
            return Refusal(f"lease {grant.lease} came to stage {self._place.index}; leases go to the root")
        batches = [BatchId(grant.first_batch + index) for index in range(len(grant.num_samples))]
        lease = _Lease(grant.lease, set(batches))
        for batch, num_samples in zip(batches, grant.num_samples, strict=True):
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
        ids = [ValueId(value) for value, _ in message.values]
        arriving.inputs = dict(zip(ids, _decode(message.values, buffers), strict=True))
        arriving.num_samples, arriving.is_evaluation = message.num_samples, message.is_evaluation
        return self._admit(message.batch)

    def _take_gradient(self, message: Gradient, buffers: Sequence[Buffer]) -> Refusal | None:
        if reason := self._schedule.offer_gradient(message.batch):
            return Refusal(reason)
        ids = [ValueId(value) for value, _ in message.values]
        self._gradients[message.batch] = dict(zip(ids, _decode(message.values, buffers), strict=True))
        return None

    def _admit(self, batch: BatchId) -> Refusal | None:
        """Hand a batch to the schedule as soon as all of it is here."""
        arriving = self._arriving[batch]
        if arriving.is_evaluation is None:
            return None
        program = self._program(arriving.is_evaluation)
        if arriving.inputs is None or any(name not in arriving.fields for _, name in program.fields):
            return None
        del self._arriving[batch]
        if arriving.is_evaluation:
            self._evaluations.append(batch)
        elif reason := self._schedule.offer_input(batch):
            return Refusal(reason)
        self._ready[batch] = arriving
        return None

    def _program(self, is_evaluation: bool) -> Program:
        return self._blueprint.evaluate if is_evaluation else self._blueprint.train

    def _forward(self, batch: BatchId) -> Iterator[Parcel]:
        ready, started = self._ready.pop(batch), self._clock()
        assert ready.inputs is not None
        passed = self._stage.forward(batch, ready.inputs, ready.fields, key=(self._place.seed, batch))
        if isinstance(passed, Dropped):
            yield from self._drop(passed)
            return
        self._num_samples[batch] = ready.num_samples
        self._forward_seconds[batch] = self._clock() - started
        if self._place.after is not None:
            yield self._pass_on(batch, ready, passed)
            return
        self._losses[batch] = _read_results(passed)
        self._gradients[batch] = {}
        self._schedule.offer_gradient(batch)

    def _backward(self, task: Task) -> Iterator[Parcel]:
        batch, started = task.batch, self._clock()
        gradients = self._stage.backward_inputs(batch, self._gradients.pop(batch))
        dropped = gradients if isinstance(gradients, Dropped) else None
        if not isinstance(gradients, Dropped):
            if self._place.before is not None:
                values = [(ValueId(value), gradient) for value, gradient in gradients.items()]
                specs, buffers = _encode(values, self._place.gradients)
                yield Parcel(self._place.before, Gradient(self._place.epoch, batch, specs), buffers)
            dropped = self._stage.backward_weights(batch)
        if task.is_update:
            self._stage.update(self._rate())
        if dropped is not None:
            yield from self._drop(dropped)
            return
        self._num_trained += self._num_samples[batch]
        yield self._report(batch, task.lag, self._clock() - started)
        yield from self._finish(batch, self._num_samples.pop(batch))

    def _rate(self) -> float:
        """Return the learning rate of the update about to be made."""
        due = max(update for update in self._rates if update <= self._stage.version)
        self._rates = {update: rate for update, rate in self._rates.items() if update >= due}
        return self._rates[due]

    def _evaluate(self, batch: BatchId) -> Iterator[Parcel]:
        ready = self._ready.pop(batch)
        assert ready.inputs is not None
        passed = self._stage.evaluate(ready.inputs, ready.fields)
        if self._place.after is not None:
            yield self._pass_on(batch, ready, passed)
            return
        loss, metrics = _read_results(passed)
        epoch, version = self._place.epoch, self._stage.version
        report = StepReport(epoch, batch, version, 0, ready.num_samples, 0.0, 0.0, 0.0, 0.0, loss, metrics)
        yield Parcel(HUB, report)

    def _pass_on(self, batch: BatchId, ready: _Arriving, passed: Passed) -> Parcel:
        assert self._place.after is not None
        values = [(ValueId(value), tensor) for value, tensor in passed.outputs.items()]
        specs, buffers = _encode(values, self._place.activations)
        is_evaluation = bool(ready.is_evaluation)
        message = Activation(self._place.epoch, batch, is_evaluation, ready.num_samples, specs)
        return Parcel(self._place.after, message, buffers)

    def _report(self, batch: BatchId, lag: int, backward_seconds: float) -> Parcel:
        loss, metrics = self._losses.pop(batch, (None, ()))
        report = StepReport(
            epoch=self._place.epoch,
            batch=batch,
            version=self._stage.version,
            lag=lag,
            num_samples=self._num_samples[batch],
            forward_seconds=self._forward_seconds.pop(batch),
            backward_seconds=backward_seconds,
            link_seconds=0.0,
            idle_share=0.0,
            loss=loss,
            metrics=metrics,
        )
        return Parcel(HUB, report)

    def _finish(self, batch: BatchId, num_samples: int) -> Iterator[Parcel]:
        """Count a batch in its lease; the root reports the lease when nothing of it is open."""
        lease = self._leases.pop(batch, None)
        if lease is None:
            return
        lease.open.discard(batch)
        lease.num_samples += num_samples
        if not lease.open:
            yield Parcel(HUB, LeaseDone(self._place.epoch, lease.number, lease.num_samples, None, ()))

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
        for known in (self._arriving, self._ready, self._gradients, self._num_samples, self._losses):
            known.pop(batch, None)
        self._forward_seconds.pop(batch, None)


def _encode(
    values: Sequence[tuple[ValueId, Tensor]], wire_format: WireFormat
) -> tuple[tuple[tuple[int, TensorSpec], ...], tuple[memoryview, ...]]:
    specs = tuple((int(value), describe(tensor, wire_format)) for value, tensor in values)
    return specs, tuple(encode(tensor, wire_format) for _, tensor in values)


def _decode(specs: Sequence[tuple[object, TensorSpec]], buffers: Sequence[Buffer]) -> list[Tensor]:
    if len(specs) != len(buffers):
        raise ProtocolError(f"{len(buffers)} tensors came with a message that announces {len(specs)}")
    return [decode(buffer, spec) for (_, spec), buffer in zip(specs, buffers, strict=True)]


def _read_results(passed: Passed) -> tuple[float | None, Metrics]:
    results: Mapping[str, float] = {name: float(value) for name, value in passed.results.items()}
    return results["loss"], tuple((name, value) for name, value in results.items() if name != "loss")
