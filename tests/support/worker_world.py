"""A cluster of stages in one process: messages go through the wire format, in an order a seed decides."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ravnest.codec import describe, encode_tensor, narrow_integers
from ravnest.config import WireFormat
from ravnest.engine.optimizers import OptimizerSettings
from ravnest.engine.schedule import StageSchedule
from ravnest.engine.stage import StageEngine
from ravnest.engine.train_config import TrainConfig
from ravnest.engine.weight_versions import Snapshot
from ravnest.ids import HUB, LeaseId, MicrobatchId, NodeId
from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
from ravnest.model.blueprint.program import Blueprint
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import Captured
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.peer.averager import AnchorState, Averager
from ravnest.peer.pacing import Device
from ravnest.peer.stage_builder import find_roles
from ravnest.peer.stage_host import RunningStage, StageAnswer
from ravnest.peer.worker import Worker
from ravnest.plan.types import Stage
from ravnest.protocol import messages
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.placement import PlanOrder, StagePosition
from ravnest.protocol.tensors import Buffer
from ravnest.protocol.training import FieldParts, LeaseDone, LeaseGrant, StepReport
from ravnest.transfer.outbox import Outgoing


@dataclass
class ClusterWorld:
    """Stages that train one captured model, cut at `cuts`, and the hub's side of it; no averaging."""

    captured: Captured
    cuts: Sequence[int]
    settings: OptimizerSettings
    window: int = 1
    accumulate: int = 1
    synchronous: bool = False
    seed: int = 0
    wire_format: WireFormat = WireFormat.FP32
    gradients: WireFormat | None = None  # if they travel in a format of their own
    at_hub: list[Message] = field(default_factory=list)
    engine: type[StageEngine] = StageEngine
    recomputes: bool = False

    def __post_init__(self) -> None:
        whole = self.captured.blueprint
        bounds = [0, *self.cuts, whole.num_positions]
        self.nodes = tuple(NodeId(f"node{index}") for index in range(len(bounds) - 1))
        self.queues: dict[NodeId, deque] = {node: deque() for node in self.nodes}
        self.workers: dict[NodeId, Worker] = {}
        self.stages: dict[NodeId, RunningStage] = {}
        self.blueprints: dict[NodeId, Blueprint] = {}
        for index, node in enumerate(self.nodes):
            blueprint = read_blueprint(
                write_blueprint(slice_blueprint(whole, bounds[index], bounds[index + 1]))
            )
            state = {
                entry.name: self.captured.state[entry.name].detach().clone() for entry in blueprint.state
            }
            program = build_stage_program(blueprint, recompute=self.recomputes, window=self.window)
            stage = self.engine(
                program, Snapshot(0, state, {}), find_roles(blueprint), self.settings, not self.recomputes
            )
            formats = (self.wire_format, self.gradients or self.wire_format)
            planned = Stage(node, bounds[index], bounds[index + 1], self.window, self.recomputes, *formats)
            order = PlanOrder(1, 1, self.seed, planned, self.nodes, (), ())
            schedule = StageSchedule(self.window, self.accumulate, self.synchronous)
            worker = self.workers[node] = self.make_worker(order.position, blueprint, stage, schedule)
            self.blueprints[node] = blueprint
            training = TrainConfig(self.settings, batch_size=4)
            facts = (order, blueprint, worker, training, lambda: 0.0, AnchorState(None))
            self.stages[node] = RunningStage(worker, Averager(*facts), lambda: 0.0)
        self._random = random.Random(self.seed)

    def make_worker(
        self, position: StagePosition, blueprint: Blueprint, stage: StageEngine, schedule: StageSchedule
    ) -> Worker:
        """Return a worker for which no time passes."""
        rate = self.settings.learning_rate
        return Worker(position, blueprint, stage, schedule, rate, Device(lambda: 0.0))

    def lease(
        self,
        batches: Sequence[dict[str, Tensor]],
        first: int = 0,
        is_evaluation: bool = False,
        is_ahead: bool = False,
    ) -> None:
        """Grant a lease of these batches and send every stage the fields it consumes."""
        sizes = tuple(len(next(iter(batch.values()))) for batch in batches)
        grant = LeaseGrant(1, LeaseId(first), is_evaluation, MicrobatchId(first), sizes, is_ahead=is_ahead)
        self.post(Outgoing(self.nodes[0], grant))
        for number, batch in enumerate(batches, first):
            for node, blueprint in self.blueprints.items():
                program = blueprint.evaluate if is_evaluation else blueprint.train
                names = [name for _, name in program.fields]
                if names:
                    chosen = {name: narrow_integers(batch[name]) for name in names}  # as the owner does
                    specs = tuple((name, describe(chosen[name], WireFormat.FP32)) for name in names)
                    buffers = tuple(encode_tensor(chosen[name], WireFormat.FP32) for name in names)
                    self.post(Outgoing(node, FieldParts(1, MicrobatchId(number), specs), buffers))

    def post(self, outgoing: Outgoing) -> None:
        """Send a message as the network would: as a header and bytes."""
        buffers = tuple(bytearray(buffer) for buffer in outgoing.buffers)
        message = messages.unpack(messages.pack(outgoing.message, buffers), buffers)
        if outgoing.to == HUB:
            self.at_hub.append(message)
        else:
            self.queues[outgoing.to].append((message, buffers))

    def deliver(
        self, node: NodeId, message: Message, buffers: Sequence[Buffer] = (), sender: NodeId = HUB
    ) -> StageAnswer:
        """Pass a message to a stage; return what it answers."""
        answer = self.stages[node].receive(message, buffers, sender)
        for outgoing in () if isinstance(answer, Refusal) else answer:
            self.post(outgoing)
        return answer

    def run(self) -> None:
        """Let workers work in random order until nothing is left to do."""
        while True:
            order = self._random.sample(self.nodes, len(self.nodes))
            if sum(self.turn(node) for node in order) == 0:
                return

    def turn(self, node: NodeId) -> bool:
        """Deliver what waits for a node and let it work once."""
        queue = self.queues[node]
        is_busy = bool(queue)
        while queue:
            self.deliver(node, *queue.popleft())
        work = self.stages[node].next_work()
        for outgoing in work or ():
            self.post(outgoing)
        return is_busy or work is not None

    def losses(self) -> list[float]:
        """Return the losses the leaf reported, by batch."""
        reports = [m for m in self.at_hub if isinstance(m, StepReport) and m.loss is not None]
        return [report.loss for report in sorted(reports, key=lambda report: report.microbatch)]

    def leases_done(self) -> list[LeaseDone]:
        return [message for message in self.at_hub if isinstance(message, LeaseDone)]

    def state(self) -> dict[str, Tensor]:
        """Return the whole state, stage by stage."""
        whole: dict[str, Tensor] = {}
        for worker in self.workers.values():
            whole |= worker.stage.snapshot().state
        return whole


def batches_of(make: object, count: int, num_samples: int = 4) -> list[dict[str, Tensor]]:
    """Return different batches of an entry of the zoo."""
    return [dict(make(num_samples, torch.Generator().manual_seed(seed))) for seed in range(count)]
