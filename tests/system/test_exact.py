"""Exact mode in the whole system, on virtual time: clusters of unlike cuts and speeds equal one process."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import ravnest as rv
from ravnest.config import Averaging
from ravnest.hub.coordinator.leases import permute
from ravnest.hub.coordinator.notices import EpochDone, RoundEnded
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Cluster, ModelProfile, Plan, Stage, Swarm
from tests.support.system_world import (
    NUM_VALIDATION,
    PLAN,
    Ended,
    Pc,
    World,
    cross_entropy,
    make_mlp,
    make_points,
)

EXACT = replace(PLAN, averaging=Averaging.EXACT)
NUM_SAMPLES, BATCH, EPOCHS, SEED = 320, 16, 2, 5
SIX = (Pc(900e3, 1.0), Pc(900e3, 2.0), Pc(900e3, 1.0), Pc(900e3, 3.0), Pc(900e3, 1.0), Pc(900e3, 1.0))


def form_unlike(profile: ModelProfile, swarm: Swarm, _: object, seed: int, plan_id: int = 0) -> Plan:
    """Return clusters of one, two and three stages, as long as there are nodes; the rest are spares."""
    length, names = profile.num_positions, [node.name for node in swarm.nodes]
    clusters = []
    for cuts in ((), (length // 2,), (length // 3, 2 * length // 3)):
        bounds = (0, *cuts, length)
        if len(names) > len(cuts):
            nodes = [names.pop(0) for _ in range(len(bounds) - 1)]
            clusters.append(
                Cluster(tuple(Stage(*each) for each in zip(nodes, bounds, bounds[1:], strict=False)))
            )
    nodes = {node.name: node for node in swarm.nodes}
    return Plan(plan_id, seed, tuple(clusters), form_rings(tuple(clusters), nodes), tuple(names))


def make_exact_job(optimizer: str = "adamw") -> rv.Job:
    model = make_mlp(2, dropout=0.0)
    options = {"batch_size": BATCH, "epochs": EPOCHS, "loss": cross_entropy, "seed": SEED}
    rates = {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}
    data, validation = make_points(NUM_SAMPLES, 1), make_points(NUM_VALIDATION, 2)
    return rv.Job(model, data, val_data=validation, **rates, **options)


@cache
def train_alone() -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights of one process, and the mean loss of each epoch."""
    model, data = make_mlp(2, dropout=0.0), make_points(NUM_SAMPLES, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(EPOCHS):
        order = torch.from_numpy(permute(torch.arange(NUM_SAMPLES).numpy(), NUM_SAMPLES, SEED, epoch))
        total = 0.0
        for samples in order.split(BATCH):
            optimizer.zero_grad()
            loss = cross_entropy(model(data["x"][samples]), {"y": data["y"][samples]})
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(samples)
        losses.append(total / NUM_SAMPLES)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, losses


def check_books(ended: Ended) -> None:
    """Every sample was trained once in each epoch."""
    counted = sorted((news.epoch, news.num_samples, news.num_dropped) for news in ended.of(EpochDone))
    assert counted == [(epoch + 1, NUM_SAMPLES, 0) for epoch in range(EPOCHS)]
    assert ended.counts == dict.fromkeys(range(NUM_SAMPLES), EPOCHS)


def test_three_clusters_of_unlike_cuts_and_speeds_are_one_process() -> None:
    ended = World(make_exact_job(), SIX, plan=EXACT, form_plan=form_unlike).run()
    assert [len(cluster.stages) for cluster in ended.plan.clusters] == [1, 2, 3]
    assert ended.of(RoundEnded) == []
    check_books(ended)
    weights, losses = train_alone()
    assert ended.losses == pytest.approx(losses, rel=1e-5)
    assert ended.result is not None
    for name, tensor in weights.items():
        torch.testing.assert_close(ended.result.state[name], tensor, rtol=1e-5, atol=1e-5)
