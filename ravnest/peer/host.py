"""What the compute thread owns: the stage of the current plan with its worker and its averager.

Orders and messages go in, parcels come out; it is built anew for every plan. Nothing in it waits. Driven by
peer.agent, which gives it one thread.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ravnest.engine.schedule import StageSchedule
from ravnest.engine.stage import Snapshot, Stage
from ravnest.engine.training import read_training
from ravnest.errors import UnsafeBlueprint
from ravnest.exchange import Parcel
from ravnest.model.flat import Layout, from_safetensors, to_safetensors
from ravnest.model.preflight import preflight
from ravnest.model.reading import read_blueprint
from ravnest.model.rebuild import rebuild
from ravnest.net.transport import Buffer
from ravnest.peer.averager import Averager
from ravnest.peer.worker import Incoming, Place, Worker, find_roles
from ravnest.protocol import (
    Message,
    PlanOrder,
    Refusal,
    RingPart,
    RoundAbort,
    RoundCommit,
    RoundOpen,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the provider lends: memory for tensors, work for one batch, and the device for both."""

    memory_bytes: float
    flops_per_batch: float = 1e15
    device: str = "cpu"


class Host:
    """Hosts one stage; `clock` tells seconds."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._worker: Worker | None = None
        self._averager: Averager | None = None
        self._num_averaged = self._num_offered = 0

    @property
    def deadline(self) -> float | None:
        """When `tick` is due, if nothing else happens before."""
        return None if self._averager is None else self._averager.deadline

    def build(self, order: PlanOrder, parts: bytes, weights: bytes) -> None:
        """Make the stage of this order ready, or raise with the reason why this PC will not run it."""
        training_text, _, blueprint_text = parts.partition(b"\n")
        training, blueprint = read_training(training_text), read_blueprint(blueprint_text)
        stage = order.stage
        assert stage is not None
        if (blueprint.start, blueprint.stop) != (stage.start, stage.stop):
            raise UnsafeBlueprint(
                f"the blueprint is of positions {blueprint.start} to {blueprint.stop}, "
                f"the plan has {stage.start} to {stage.stop} here"
            )
        limits = self._limits
        preflight(
            blueprint,
            training.batch_size,
            max_bytes=limits.memory_bytes,
            max_flops=limits.flops_per_batch,
        )
        state = {
            name: tensor.to(self._limits.device)
            for name, tensor in from_safetensors(weights, blueprint).items()
        }
        program = rebuild(blueprint, self._limits.device, recompute=stage.recompute)
        self._blueprint = blueprint
        self._stage = Stage(
            program, Snapshot(0, state, {}), find_roles(blueprint), training.optimizer, not stage.recompute
        )
        formats = (training.activations, training.gradients)
        place = Place(order.epoch, order.seed, stage.node, order.pipeline, *formats)
        schedule = StageSchedule(stage.window, order.accumulate)
        rate = training.optimizer.learning_rate
        self._worker = Worker(place, blueprint, self._stage, schedule, rate, self._clock)
        self._averager = Averager(stage.node, order.rings, Layout.of(blueprint), self._stage, self._clock)
        self._num_averaged = self._num_offered = 0

    def clear(self) -> None:
        """Forget the stage: the plan has none for this node."""
        self._worker = self._averager = None

    def receive(self, message: Message, buffers: Sequence[Buffer]) -> Iterable[Parcel] | Refusal:
        """Take a message for the stage; return what to send at once."""
        if self._worker is None or self._averager is None:
            return Refusal(f"{type(message).__name__} came, but no stage is hosted here")
        if isinstance(message, RoundOpen):
            return self._open_round(message)
        if isinstance(message, RingPart | RoundCommit | RoundAbort):
            found = self._averager.receive(message, buffers)
            if isinstance(message, RoundCommit) and not isinstance(found, Refusal):
                self._num_averaged = self._num_offered
            return found
        if isinstance(message, Incoming):
            return self._worker.receive(message, buffers) or ()
        return Refusal(f"{type(message).__name__} is not for a stage")

    def _open_round(self, order: RoundOpen) -> Iterable[Parcel]:
        """Weigh what this stage has by its samples since the last round, and one, so that a mean exists."""
        assert self._worker is not None
        assert self._averager is not None
        self._num_offered = self._worker.num_trained
        return self._averager.open(order, 1.0 + self._num_offered - self._num_averaged)

    def next_work(self) -> Iterator[Parcel] | None:
        """Return the next piece of work; None when there is nothing to do."""
        if self._worker is None or self._averager is None or self._averager.is_blocking:
            return None
        return self._worker.next_work()

    def tick(self, now: float) -> Iterable[Parcel]:
        """Let an open round notice its deadline."""
        return () if self._averager is None else self._averager.tick(now)

    def save(self) -> tuple[int, bytes]:
        """Return the version of the stage and its state as safetensors."""
        assert self._worker is not None
        snapshot = self._stage.snapshot()
        return snapshot.version, to_safetensors(snapshot.state, self._blueprint)
