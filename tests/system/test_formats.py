"""Stages that send in formats of their own, each way: the swarm trains as with bf16 and sends fewer bytes."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from ravnest.config import WireFormat
from ravnest.errors import PlanError
from ravnest.ids import NodeId
from ravnest.plan.types import Cluster, ModelProfile, Plan, Stage, Swarm
from ravnest.protocol.messages import Message
from ravnest.protocol.training import Activation, Gradient
from tests.support.system_world import PLAN, Ended, Pc, World, make_job

NUM_SAMPLES, NUM_EPOCHS = 192, 4
FORWARD = (WireFormat.INT4_CHANNELS, WireFormat.INT8, WireFormat.BF16)  # of root, middle and leaf
BACK = (WireFormat.BF16, WireFormat.INT4_STOCHASTIC, WireFormat.INT8)  # nobody is before the root


@dataclass
class Line:
    """One cluster of three stages; counts the bytes that cross its cuts, and in which format they do."""

    forward: tuple[WireFormat, ...]
    back: tuple[WireFormat, ...]
    sent_bytes: Counter[str] = field(default_factory=Counter)
    formats: dict[tuple[str, NodeId], set[WireFormat]] = field(default_factory=dict)
    nodes: tuple[NodeId, ...] = ()

    def form(self, profile: ModelProfile, swarm: Swarm, _: object, seed: int, plan_id: int = 0) -> Plan:
        if len(swarm.nodes) < len(self.forward):
            raise PlanError("not all are here")
        length = profile.num_positions
        bounds = (0, length // 3, 2 * length // 3, length)
        self.nodes = tuple(node.name for node in swarm.nodes)
        stages = [
            Stage(name, start, stop, 2, False, forward, back)
            for name, start, stop, forward, back in zip(
                self.nodes, bounds[:-1], bounds[1:], self.forward, self.back, strict=True
            )
        ]
        return Plan(plan_id, seed, (Cluster(tuple(stages)),), (), ())

    def watch(self, world: World, sender: NodeId, to: NodeId, message: Message) -> tuple[float, ...]:
        if isinstance(message, Activation | Gradient):
            kind = type(message).__name__
            for _, spec in message.values:
                self.sent_bytes[kind] += spec.num_bytes
                self.formats.setdefault((kind, sender), set()).add(spec.wire_format)
        return (0.0,)

    def run(self) -> Ended:
        job = make_job("cnn", num_samples=NUM_SAMPLES, epochs=NUM_EPOCHS)
        plan = replace(PLAN, clusters=1)
        return World(job, [Pc(1e6, 1.0)] * 3, plan=plan, leaving=self.watch, form_plan=self.form).run()


@pytest.fixture(scope="module")
def usual() -> tuple[Line, Ended]:
    line = Line((WireFormat.BF16,) * 3, (WireFormat.BF16,) * 3)
    return line, line.run()


def test_each_stage_sends_by_its_own_order_and_learns_as_with_bf16(usual: tuple[Line, Ended]) -> None:
    line = Line(FORWARD, BACK)
    ended, (usual_line, other) = line.run(), usual
    root, middle, leaf = line.nodes
    assert line.formats == {
        ("Activation", root): {WireFormat.INT4_CHANNELS},
        ("Activation", middle): {WireFormat.INT8},
        ("Gradient", middle): {WireFormat.INT4_STOCHASTIC},
        ("Gradient", leaf): {WireFormat.INT8},
    }
    assert len(ended.counts) == NUM_SAMPLES
    assert set(ended.counts.values()) == {NUM_EPOCHS}
    assert ended.validation[-1] < 0.8 * ended.validation[0]
    assert ended.validation[-1] == pytest.approx(other.validation[-1], rel=0.1)
    for kind in ("Activation", "Gradient"):  # the cuts are not of equal size, so bounds of both formats
        share = line.sent_bytes[kind] / usual_line.sent_bytes[kind]
        assert 4.5 / 16 <= share <= 8.2 / 16


def test_the_same_seed_gives_the_same_bits_with_chance_too() -> None:
    runs = [Line(FORWARD, BACK).run() for _ in range(2)]
    assert len(runs[0].losses) == NUM_EPOCHS
    assert runs[0].losses == runs[1].losses
    assert runs[0].validation == runs[1].validation
