"""Exact mode with real programs: three unlike clusters train as one process, whoever is killed."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ravnest as rv
from ravnest.config import Averaging
from ravnest.hub.coordinator.leases import permute
from ravnest.hub.coordinator.notices import ClusterBroken, EpochDone, Notice, PlanFormed, Trained, WorkLost
from ravnest.hub.coordinator.planner import SearchPlanner
from ravnest.hub.service.server import HubParts
from ravnest.requester.local_peers import Hardware
from ravnest.requester.result import Result
from ravnest.requester.session import LOCAL_PLAN, Hub, local
from tests.support.exact_updates import Update, Updates, form_unlike
from tests.support.forked import fork

NUM_SAMPLES, BATCH, EPOCHS, SEED, RATE = 320, 16, 2, 3, 5e-2
PLAN = replace(LOCAL_PLAN, overhead_bytes=0.0, averaging=Averaging.EXACT)
SIX = [Hardware(50e6, speed) for speed in (1e9, 2e9, 1e9, 3e9, 1e9, 1e9)]


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "create_subprocess_exec", fork)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    inner = [layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), *inner, nn.Linear(32, 4))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return one whose steps are in proportion to gradients: rounding stays rounding. It has a state, too."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def make_data() -> dict[str, Tensor]:
    inputs = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return {"x": inputs, "y": inputs[:, :4].argmax(-1)}


def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out, batch["y"])


def train(tell: Callable[[Hub, Notice], None]) -> tuple[Result, Updates]:
    """Train in a swarm; return what came of it, and the updates that were made."""
    model, updates = make_model(), Updates()
    given = {"batch_size": BATCH, "epochs": EPOCHS, "seed": SEED, "schedule": rv.constant()}
    job = rv.Job(model, make_data(), loss=loss, optimizer=make_optimizer(model), **given)
    parts = HubParts(SearchPlanner(form=form_unlike), watch=updates.note)
    swarm: Hub = local(SIX, plan=PLAN, tell=lambda news: tell(swarm, news), parts=parts)
    with swarm:
        return swarm.fit(job), updates


def check(result: Result, updates: list[Update]) -> None:
    """The result has the weights of one process that makes these updates."""
    model, data = make_model(), make_data()
    optimizer = make_optimizer(model)
    for update in updates:
        samples = torch.tensor(update.samples)
        optimizer.param_groups[0]["lr"] = update.rate
        optimizer.zero_grad()
        loss(model(data["x"][samples]), {"y": data["y"][samples]}).backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(result.state[name], tensor, rtol=1e-5, atol=1e-5)


def test_forty_updates_of_three_unlike_clusters_are_those_of_one_process() -> None:
    told: list[Notice] = []
    result, updates = train(lambda _, news: told.append(news))
    plan = next(news.plan for news in told if isinstance(news, PlanFormed))
    assert [len(cluster.stages) for cluster in plan.clusters] == [1, 2, 3]
    plain = []
    for epoch in range(EPOCHS):
        order = permute(torch.arange(NUM_SAMPLES).numpy(), NUM_SAMPLES, SEED, epoch)
        plain += [Update(tuple(map(int, each)), RATE) for each in torch.from_numpy(order).split(BATCH)]
    assert len(plain) == 40
    check(result, plain)
    assert [sorted(each.samples) for each in updates.made] == [sorted(each.samples) for each in plain]


def test_a_peer_killed_inside_a_batch_loses_nothing() -> None:
    told: list[Notice] = []
    killed: list[str] = []

    def tell(swarm: Hub, news: Notice) -> None:
        told.append(news)
        if isinstance(news, Trained) and news.num_samples >= 7 * BATCH and not killed:
            plan = next(each.plan for each in told if isinstance(each, PlanFormed))
            killed.append(plan.clusters[1].stages[1].node)
            os.kill(swarm.processes[killed[0]], signal.SIGKILL)

    result, updates = train(tell)
    assert killed
    assert any(isinstance(news, ClusterBroken) and killed[0] in news.reason for news in told)
    assert not any(isinstance(news, WorkLost) for news in told)
    assert [news.epoch for news in told if isinstance(news, EpochDone)] == [1, 2]
    assert updates.is_exact
    assert updates.counts == dict.fromkeys(range(NUM_SAMPLES), EPOCHS)
    check(result, updates.made)
