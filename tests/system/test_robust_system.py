"""Robust rounds on virtual time: hub and peers as they ship, with real torch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from ravnest.config import Averaging, WireFormat
from ravnest.hub.coordinator.notices import EpochDone, Left, RoundEnded
from ravnest.ids import NodeId
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Cluster, ModelProfile, Plan, Stage, Swarm
from ravnest.protocol.averaging import (
    DirectPart,
    PartStep,
    RingPart,
    RoundCall,
    RoundCheck,
    RoundChecked,
    RoundCommit,
    RoundOpen,
    RoundPledge,
    RoundReady,
)
from ravnest.protocol.messages import Message
from tests.support.effort import IS_THOROUGH
from tests.support.system_world import PLAN, Ended, Pc, World, make_job

FP32 = {"activations": WireFormat.FP32, "gradients": WireFormat.FP32}
NUM_SAMPLES = 480


def form_four(profile: ModelProfile, swarm: Swarm, _: object, seed: int, epoch: int = 0) -> Plan:
    """Return one cluster of two stages and three of one; or less, of who is here."""
    length, names = profile.num_positions, [node.name for node in swarm.nodes]
    clusters = []
    if len(names) > 4:
        root, leaf = names.pop(0), names.pop(0)
        cut = length // 2
        clusters.append(Cluster((Stage(root, 0, cut, 2, **FP32), Stage(leaf, cut, length, **FP32))))
    clusters += [Cluster((Stage(name, 0, length),)) for name in names]
    nodes = {node.name: node for node in swarm.nodes}
    return Plan(epoch, seed, tuple(clusters), form_rings(tuple(clusters), nodes), ())


def run_world(
    averaging: Averaging = Averaging.BLOCKING, leaving=None, deltas=WireFormat.FP32, hidden=(), **options
) -> Ended:
    given = {"num_samples": NUM_SAMPLES, "epochs": 1, "average_every": 2, "validates": False, **options}
    job = make_job("tiny", **{"mean": "auto", **given})
    plan = replace(PLAN, averaging=averaging, deltas=deltas)
    more = {} if leaving is None else {"leaving": leaving}
    pcs = [Pc(1e6, 0.01, is_hidden=k in hidden) for k in range(5)]
    world = World(job, pcs, plan=plan, form_plan=form_four, **more)
    ended = world.run()
    assert ended.result is not None
    for news in ended.of(RoundEnded):
        held = {key: found for key, found in world.anchors.held.items() if key[0] == news.round_id}
        assert news.is_committed or held == {}
        assert all(len(set(found.values())) == 1 for found in held.values())
    return ended


class Post:
    """Remembers which messages went from whom to whom."""

    def __init__(self) -> None:
        self.sent: list[tuple[NodeId, NodeId, Message]] = []

    def leaving(self, world: World, sender: NodeId, to: NodeId, message: Message) -> Sequence[float]:
        self.sent.append((sender, to, message))
        return (0.0,)

    def of(self, kind: type) -> list[Message]:
        return [message for _, _, message in self.sent if isinstance(message, kind)]


@pytest.mark.parametrize("averaging", [Averaging.BLOCKING, Averaging.OVERLAPPED])
@pytest.mark.parametrize("deltas", [WireFormat.FP32, WireFormat.INT4])
def test_four_clusters_average_robustly(averaging: Averaging, deltas: WireFormat) -> None:
    post = Post()
    ended = run_world(averaging, post.leaving, deltas)
    rounds = ended.of(RoundEnded)
    assert len(rounds) > 3
    assert all(news.is_committed and not news.unlike for news in rounds)
    assert not post.of(RingPart)
    for kind in (RoundPledge, RoundCall, DirectPart, RoundReady, RoundCheck, RoundChecked):
        assert post.of(kind), kind
    (done,) = ended.of(EpochDone)
    assert done.num_samples == NUM_SAMPLES
    assert all(opened.weights for opened in post.of(RoundOpen))


def test_members_are_told_whom_nobody_can_dial() -> None:
    post = Post()
    ended = run_world(leaving=post.leaving, hidden={1})
    assert all(news.is_committed for news in ended.of(RoundEnded))
    assert {opened.hidden for opened in post.of(RoundOpen)} == {("node2",), ()}, "only who meets it in a ring"


def test_a_plain_mean_is_made_in_rings() -> None:
    post = Post()
    run_world(leaving=post.leaving, mean="plain")
    assert post.of(RingPart)
    assert not post.of(DirectPart)


def test_what_robust_rounds_train_is_as_good() -> None:
    losses = {mean: run_world(mean=mean, epochs=2).losses[-1] for mean in ("plain", "robust")}
    assert losses["robust"] <= 1.1 * losses["plain"]


def is_part(step: PartStep, message: Message) -> bool:
    return isinstance(message, DirectPart) and message.step is step


def is_kind(kind: type, message: Message) -> bool:
    return isinstance(message, kind)


STEPS = {
    "before it hears of the round": (partial(is_kind, RoundOpen), True),
    "before its pledge": (partial(is_kind, RoundPledge), False),
    "before it is called": (partial(is_kind, RoundCall), True),
    "before its first contribution": (partial(is_part, PartStep.CONTRIBUTION), False),
    "before its first finished part": (partial(is_part, PartStep.FINISHED), False),
    "before its vote": (partial(is_kind, RoundReady), False),
    "before it hears of a check": (partial(is_kind, RoundCheck), True),
    "before what a checker waits for": (partial(is_part, PartStep.CHECK), False),
    "before what it checked": (partial(is_kind, RoundChecked), False),
    "before it hears of the commit": (partial(is_kind, RoundCommit), True),
}
FIRST = 2
# Each step has one kind of death, in turn; `make fuzz` tries both.
DEATHS = [
    pytest.param(step, is_silent, id=f"{step}, {'power cut' if is_silent else 'kill'}")
    for number, step in enumerate(STEPS)
    for is_silent in (False, True)
    if is_silent == bool(number % 2) or IS_THOROUGH
]


@pytest.mark.parametrize(("step", "is_silent"), DEATHS)
def test_a_member_that_dies_at_any_step_costs_its_cluster_and_the_others_go_on(
    step: str, is_silent: bool
) -> None:
    matches, strikes_receiver = STEPS[step]
    victims: list[NodeId] = []

    def leaving(world: World, sender: NodeId, to: NodeId, message: Message) -> Sequence[float]:
        if not victims and getattr(message, "round_id", 0) >= FIRST and matches(message):
            victims.append(to if strikes_receiver else sender)
            world.kill(victims[0], is_silent=is_silent)
        return (0.0,)

    averaging = Averaging.BLOCKING if len(step) % 2 else Averaging.OVERLAPPED
    ended = run_world(averaging, leaving)
    assert [news.node for news in ended.of(Left)] == victims
    assert not any(news.unlike for news in ended.of(RoundEnded))
    assert ended.of(RoundEnded)[-1].is_committed
    (done,) = ended.of(EpochDone)
    assert (done.num_samples, done.num_dropped) == (NUM_SAMPLES, 0)
