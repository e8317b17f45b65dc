"""One liar of four in a whole swarm on virtual time: what it brings to rounds is not what it trained."""

from dataclasses import replace

import pytest
import torch

from ravnest.config import Averaging
from ravnest.hub.coordinator.notices import Left, RoundEnded, WentWrong
from ravnest.ids import NodeId
from ravnest.peer.compute_protocol import Delivered
from ravnest.peer.stage_host import StageHost
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Cluster, ModelProfile, Plan, Stage, Swarm
from ravnest.protocol.averaging import RoundOpen
from tests.support.system_world import PLAN, Ended, Pc, World, make_job

LIAR = NodeId("node2")
NUM_SAMPLES = 960


def form_singles(profile: ModelProfile, swarm: Swarm, _: object, seed: int, epoch: int = 0) -> Plan:
    """Return a cluster of one node for each."""
    nodes = {node.name: node for node in swarm.nodes}
    clusters = tuple(Cluster((Stage(name, 0, profile.num_positions),)) for name in nodes)
    return Plan(epoch, seed, clusters, form_rings(clusters, nodes), ())


def train(change=None, mean: str = "auto") -> Ended:
    """Train with four clusters; `change` makes of the liar's change what it brings to a round."""

    opened: list[RoundOpen] = []  # rounds in which it has not lied yet

    def lie(name: NodeId, item, host: StageHost) -> None:
        """Change what it trained as a round begins; that waits for a microbatch between its two passes."""
        if change is None or name != LIAR or host.stage is None:
            return
        if isinstance(item, Delivered) and isinstance(item.message, RoundOpen):
            opened.append(item.message)
        stage = host.stage
        if opened and not stage.worker.is_midway:
            opened.clear()
            for segment in stage.averager.segments.values():
                state = stage.worker.stage.state
                changes = {key: state[key] - anchor for key, anchor in segment.anchors.items()}
                stage.worker.stage.add({key: change(each) - each for key, each in changes.items()})

    job = make_job("mlp", num_samples=NUM_SAMPLES, epochs=1, average_every=1, mean=mean)
    plan = replace(PLAN, averaging=Averaging.BLOCKING)
    world = World(job, [Pc(1e6, 0.1)] * 4, plan=plan, form_plan=form_singles, before=lie)
    ended = world.run()
    assert ended.result is not None
    return ended


@pytest.fixture(scope="module")
def honest() -> Ended:
    ended = train()
    assert not ended.of(Left)
    assert not any(news.unlike for news in ended.of(RoundEnded))
    return ended


LIES = {
    "flips": lambda change: -change,
    "flips three times": lambda change: -3.0 * change,
    "a hundred times": lambda change: 100.0 * change,
    "0.1234": lambda change: torch.full_like(change, 0.1234),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", LIES)
def test_a_liar_of_four_does_not_spoil_the_model_and_goes(honest: Ended, name: str) -> None:
    ended = train(LIES[name])
    assert ended.validation[-1] <= 1.15 * honest.validation[-1]
    assert not ended.of(WentWrong), "nobody goes back for it"
    assert {news.node for news in ended.of(Left)} <= {LIAR}
    assert [news.node for news in ended.of(Left)] == [LIAR]
    (left,) = ended.of(Left)
    assert "it lies" in left.reason


@pytest.mark.timeout(120)
def test_the_same_liar_ruins_a_plain_mean(honest: Ended) -> None:
    ended = train(LIES["flips three times"], mean="plain")
    assert not ended.validation[-1] <= 1.15 * honest.validation[-1]
