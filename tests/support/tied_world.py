"""Clusters of hosts in one process, and the hub's side of their rounds; a seed decides what happens when.

Messages of one kind between two nodes arrive in order, all others in any.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor

from ravnest.codec import describe, encode_tensor
from ravnest.config import WireFormat
from ravnest.engine.optimizers import OptimizerSettings
from ravnest.engine.train_config import TrainConfig, write_train_config
from ravnest.ids import HUB, LeaseId, MicrobatchId, NodeId, RoundId, SegmentId
from ravnest.model.blueprint.blueprint_json import write_blueprint
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import Captured
from ravnest.model.state.state_dict import to_safetensors
from ravnest.net.transport import Service
from ravnest.peer.compute_protocol import Build, ProviderLimits, StageBuilt
from ravnest.peer.stage_builder import StageBuilder
from ravnest.peer.stage_host import StageHost
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Cluster, Node, Stage
from ravnest.protocol import messages
from ravnest.protocol.averaging import RoundCommit, RoundOpen, RoundReady
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.placement import PlanOrder, Source, StageParts, StageReady
from ravnest.protocol.training import FieldParts, LeaseDone, LeaseGrant, StepReport
from ravnest.transfer.blobs import name_blob
from ravnest.transfer.outbox import Outgoing

EPOCH = 3
PLAN = 7
FP32 = (WireFormat.FP32, WireFormat.FP32)


class TiedWorld:
    """Each cluster is given by its cuts; node "c1.0" is the root of cluster 1."""

    def __init__(
        self,
        captured: Captured,
        settings: OptimizerSettings,
        cuts: Sequence[Sequence[int]],
        window: int = 1,
        accumulate: int = 1,
        seed: int = 0,
        is_averaging_slow: bool = False,
        **averaging,
    ) -> None:
        self.captured = captured
        self.random = random.Random(seed)
        self.is_averaging_slow = is_averaging_slow  # then it arrives when nothing else is left to do
        self.at_hub: list[tuple[NodeId, Message]] = []
        self.last_committed = RoundId(0)
        self.before: Callable[[NodeId, Message], None] = lambda *_: None
        self.queues: dict[tuple, deque] = {}
        self.build_id, self.plan = EPOCH, PLAN
        self.window, self.accumulate = window, accumulate
        self.hosts: dict[NodeId, StageHost] = {}
        self.training = TrainConfig(settings, batch_size=4, **averaging)
        self.arrange(cuts)
        for name in self.random.sample(sorted(self.stages), len(self.stages)):
            self.build(name)
            self.run(num_steps=self.random.randrange(4))

    def arrange(self, cuts: Sequence[Sequence[int]]) -> None:
        """Plan these clusters; nobody is told."""
        num_positions = self.captured.blueprint.num_positions
        clusters = tuple(
            Cluster(
                tuple(
                    Stage(NodeId(f"c{number}.{place}"), start, stop, self.window, False, *FP32)
                    for place, (start, stop) in enumerate(pairwise([0, *given, num_positions]))
                ),
                self.accumulate,
            )
            for number, given in enumerate(cuts)
        )
        self.clusters = [tuple(stage.node for stage in cluster.stages) for cluster in clusters]
        self.stages = {stage.node: stage for cluster in clusters for stage in cluster.stages}
        nodes = {name: Node(name, 1e9, 1e9, 1e9, 1e9) for name in self.stages}
        self.rings = tuple((SegmentId(k), ring) for k, ring in enumerate(form_rings(clusters, nodes)))
        limits = ProviderLimits(1e9)
        self.hosts = {
            name: self.hosts.get(name) or StageHost(StageBuilder(limits, lambda: 0.0), lambda: 0.0)
            for name in nodes
        }

    def blueprint(self, name: NodeId):
        stage = self.stages[name]
        return slice_blueprint(self.captured.blueprint, stage.start, stage.stop)

    def order(self, name: NodeId) -> PlanOrder:
        """Return a node's part of the plan."""
        pipeline = next(cluster for cluster in self.clusters if name in cluster)
        own = self.rings_of(name)
        return PlanOrder(self.build_id, self.plan, 0, self.stages[name], pipeline, own, (), self.accumulate)

    def rings_of(self, name: NodeId):
        return tuple(pair for pair in self.rings if name in pair[1].owners)

    def build(self, name: NodeId, *given, **options):
        """Have a stage built, without sources from what was captured; return what the hub is told."""
        (built,) = self.hosts[name].handle(Build(*self.parts(name, *given, **options)))
        return StageReady(built.build_id) if isinstance(built, StageBuilt) else built.message

    def parts(
        self,
        name: NodeId,
        version: int = 0,
        sources: Sequence[tuple[NodeId, bytes]] | None = None,
        keeps: bool = False,
        base: int | None = 0,
    ):
        """Return what a stage is built from."""
        blueprint = self.blueprint(name)
        trained = frozenset(entry.name for entry in blueprint.state if entry.is_trainable)
        content = write_train_config(self.training, trained) + b"\n" + write_blueprint(blueprint)
        if sources is None:
            sources = [(HUB, to_safetensors(self.captured.state, blueprint))]
        named = tuple(Source(node, name_blob(given)) for node, given in sources)
        parts = StageParts(self.build_id, version, name_blob(content), named, keeps, base)
        return self.order(name), parts, content, tuple(given for _, given in sources)

    def lease(self, batches: Sequence[dict[str, Tensor]], first: int, cluster: int = 0, is_evaluation=False):
        """Grant a lease to a cluster and send its stages the fields they consume."""
        sizes = tuple(len(next(iter(batch.values()))) for batch in batches)
        root, *_ = self.clusters[cluster]
        grant = LeaseGrant(self.build_id, LeaseId(first), is_evaluation, MicrobatchId(first), sizes)
        self.post(HUB, Outgoing(root, grant))
        for number, batch in enumerate(batches, first):
            for name in self.clusters[cluster]:
                blueprint = self.blueprint(name)
                program = blueprint.evaluate if is_evaluation else blueprint.train
                names = [field for _, field in program.fields]
                specs = tuple((field, describe(batch[field], WireFormat.FP32)) for field in names)
                buffers = tuple(encode_tensor(batch[field], WireFormat.FP32) for field in names)
                if names:
                    self.post(
                        HUB, Outgoing(name, FieldParts(self.build_id, MicrobatchId(number), specs), buffers)
                    )

    def open_round(
        self,
        number: int,
        is_blocking: bool,
        left_out: tuple[NodeId, ...] = (),
        base: int | None = None,
        anchors: Sequence[NodeId] = (),
        least_chunk: int = 0,
    ) -> None:
        """Open a round of changes since `base`, else since the last that committed."""
        self.members = [name for name in self.hosts if name not in left_out]
        base = RoundId(self.last_committed if base is None else base)
        for name in self.members:
            facts = (self.build_id, RoundId(number), 1e9, is_blocking, is_blocking, left_out)
            order = RoundOpen(*facts, base, name in anchors, least_chunk)
            self.post(HUB, Outgoing(name, order))

    def post(self, sender: NodeId, outgoing: Outgoing) -> None:
        """Send a message as the network would: as a header and bytes."""
        buffers = tuple(bytearray(buffer) for buffer in outgoing.buffers)
        message = messages.unpack(messages.pack(outgoing.message, buffers), buffers)
        if outgoing.to != HUB:
            queue = self.queues.setdefault((sender, outgoing.to, outgoing.service), deque())
            queue.append((message, buffers))
            return
        self.at_hub.append((sender, message))
        if isinstance(message, RoundReady):
            votes = sum(
                isinstance(each, RoundReady) and each.round_id == message.round_id for _, each in self.at_hub
            )
            if votes == len(self.members):
                self.last_committed = message.round_id
                for name in self.members:
                    self.post(HUB, Outgoing(name, RoundCommit(message.round_id)))

    def run(self, num_steps: float = float("inf")) -> None:
        """Deliver and work in random order until nothing is left to do."""
        while num_steps > 0:
            num_steps -= 1
            waiting = [key for key, queue in self.queues.items() if queue]
            soon = [key for key in waiting if not self.is_averaging_slow or key[2] is not Service.AVERAGING]
            if soon and self.random.random() < 0.7:
                self.deliver(self.random.choice(soon))
            elif not any(self.work(name) for name in self.random.sample(sorted(self.hosts), len(self.hosts))):
                if not waiting:
                    return
                self.deliver(self.random.choice(soon or waiting))

    def deliver(self, key: tuple) -> None:
        sender, name, _ = key
        message, buffers = self.queues[key].popleft()
        self.before(name, message)
        stage = self.hosts[name].stage
        answer = () if stage is None else stage.receive(message, buffers, sender)
        for outgoing in () if isinstance(answer, Refusal) else answer:
            self.post(name, outgoing)

    def work(self, name: NodeId) -> bool:
        work = self.hosts[name].next_work()
        for outgoing in work or ():
            self.post(name, outgoing)
        return work is not None

    def losses(self) -> list[float]:
        """Return the losses that leaves reported, by batch."""
        reports = [each for _, each in self.at_hub if isinstance(each, StepReport) and each.loss is not None]
        return [report.loss for report in sorted(reports, key=lambda report: report.microbatch)]

    def num_trained(self) -> int:
        return sum(each.num_samples for _, each in self.at_hub if isinstance(each, LeaseDone))

    def copies(self, tied: str, cluster: int = 0) -> list[Tensor]:
        """Return the copies of a tied weight, home first."""
        states = [self.hosts[name].stage.worker.stage.snapshot().state for name in self.clusters[cluster]]
        return [state[tied] for state in states if tied in state]

    def state(self, cluster: int = 0) -> dict[str, Tensor]:
        """Return the whole state of a cluster."""
        whole: dict[str, Tensor] = {}
        for name in self.clusters[cluster]:
            whole |= self.hosts[name].stage.worker.stage.snapshot().state
        return whole
