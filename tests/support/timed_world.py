"""A cluster of workers on a virtual clock: emulated devices, links with delay, one queue per node."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.config import PeerTimeouts
from ravnest.engine.optimizers import Group, OptimizerSettings, Sgd
from ravnest.engine.schedule import StageSchedule
from ravnest.engine.stage import StageEngine
from ravnest.engine.staleness import StalenessPolicy
from ravnest.ids import HUB, NodeId
from ravnest.model.blueprint.program import Blueprint
from ravnest.model.capture.capture import Captured, capture
from ravnest.peer.pacing import Device
from ravnest.peer.worker import Worker
from ravnest.protocol import messages
from ravnest.protocol.messages import Message
from ravnest.protocol.placement import StagePosition
from ravnest.protocol.training import Pace, StepReport
from ravnest.transfer.outbox import Outgoing
from tests.support.worker_world import ClusterWorld

NUM_SAMPLES = 2
EVERY_REPORT = PeerTimeouts(report_every_seconds=0.0)  # the hub hears of every microbatch


@dataclass
class TimedWorld(ClusterWorld):
    """Stages that take given seconds for a batch: forward, towards the inputs, towards the weights."""

    seconds: Sequence[tuple[float, float, float]] = ()
    delay_seconds: float = 0.0
    timeouts: PeerTimeouts = EVERY_REPORT
    policy: StalenessPolicy | None = None
    reports: dict[NodeId, list[StepReport]] = field(default_factory=dict)  # of every batch
    paces: list[Pace] = field(default_factory=list)  # as the second stage got them
    at_root: list[StepReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now: dict[NodeId, float] = {}
        self.work: dict[NodeId, list[tuple[float, float]]] = {}
        self.ended: dict[NodeId, list[float]] = {}  # when batches were done
        self._idle: set[NodeId] = set()
        self._sender: NodeId | None = None
        super().__post_init__()

    def make_worker(
        self, position: StagePosition, blueprint: Blueprint, stage: StageEngine, schedule: StageSchedule
    ) -> Worker:
        """Return a worker with a clock of its own, which its device moves."""
        node = position.node
        self.now[node], self.work[node], self.reports[node], self.ended[node] = 0.0, [], [], []

        def wait(seconds: float) -> None:
            self.now[node] += seconds

        per_sample = [part / NUM_SAMPLES for part in self.seconds[position.index]]
        device = Device(lambda: self.now[node], wait, *per_sample)
        rate = self.settings.learning_rate
        return Worker(position, blueprint, stage, schedule, rate, device, self.policy, self.timeouts)

    def post(self, outgoing: Outgoing) -> None:
        """Send a message: it arrives after the delay, with its sender."""
        buffers = tuple(bytearray(buffer) for buffer in outgoing.buffers)
        message = messages.unpack(messages.pack(outgoing.message, buffers), buffers)
        if outgoing.to == HUB:
            self.at_hub.append(message)
            if isinstance(message, StepReport) and self._sender is not None:
                self.reports[self._sender].append(message)
                self.ended[self._sender].append(self.now[self._sender])
            return
        self._count(outgoing.to, message)
        sent_at = 0.0 if self._sender is None else self.now[self._sender] + self.delay_seconds
        self.queues[outgoing.to].append((sent_at, (message, buffers, self._sender or HUB)))

    def run(self) -> None:
        """Always let the node work that can work first, until nothing is left to do."""
        while True:
            ready = {node: at for node in self.nodes if (at := self._ready_at(node)) is not None}
            if not ready:
                return
            node = min(ready, key=lambda node: ready[node])
            self.now[node] = ready[node]
            self.turn(node)

    def turn(self, node: NodeId) -> bool:
        """Deliver what has arrived at a node and let it work once."""
        queue, started = self.queues[node], self.now[node]
        for arrived in [entry for entry in queue if entry[0] <= started]:
            queue.remove(arrived)
            self.deliver(node, *arrived[1])
        work = self.stages[node].next_work()
        self._sender = node
        for outgoing in work or ():
            self.post(outgoing)
        self._sender = None
        self.work[node].append((started, self.now[node]))
        (self._idle.add if work is None else self._idle.discard)(node)
        return work is not None

    def busy_share(self, node: NodeId, start: float, stop: float) -> float:
        """Return the share of a time in which a node worked."""
        return sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in self.work[node]) / (
            stop - start
        )

    def _ready_at(self, node: NodeId) -> float | None:
        if node not in self._idle:
            return self.now[node]
        arrivals = [at for at, _ in self.queues[node]]
        return max(self.now[node], min(arrivals)) if arrivals else None

    def _count(self, to: NodeId, message: Message) -> None:
        if isinstance(message, Pace) and to == self.nodes[1]:
            self.paces.append(message)
        if isinstance(message, StepReport):
            self.at_root.append(message)


def capture_layers(num_layers: int) -> Captured:
    """Return a model of equal, tiny layers."""
    torch.manual_seed(0)
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return capture(nn.Sequential(*layers), layer_batch(0), _loss, name="layers")


def layer_batch(seed: int) -> dict[str, Tensor]:
    """Return a batch for that model."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(NUM_SAMPLES, 4, generator=generator)}


def plain_settings(captured: Captured) -> OptimizerSettings:
    """Return descent for all parameters."""
    names = tuple(entry.name for entry in captured.blueprint.state if entry.is_trainable)
    return OptimizerSettings((Group(names, Sgd()),), learning_rate=0.01)


def _loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(out, batch["x"])
