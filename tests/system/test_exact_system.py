"""Exact mode in the whole system, on virtual time: clusters of unlike cuts and speeds equal one process."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor

import ravnest as rv
from ravnest.config import Averaging
from ravnest.hub.coordinator.leases import permute
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    ClusterStarted,
    EpochDone,
    Notice,
    RoundEnded,
    Trained,
    WorkLost,
)
from ravnest.ids import NodeId
from ravnest.protocol.averaging import RingPart, RoundCommit, RoundOpen, RoundReady
from ravnest.protocol.messages import Message
from ravnest.protocol.training import Activation, FieldParts, Gradient, LeaseDone, LeaseGrant
from tests.support.effort import pick
from tests.support.exact_updates import Update, Updates, form_unlike
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


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    # Its steps are in proportion to gradients, so that rounding stays rounding; it has a state, too.
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9),
}


@cache
def make_exact_job(optimizer: str) -> rv.Job:
    model = make_mlp(2, dropout=0.0)
    options = {"batch_size": BATCH, "epochs": EPOCHS, "loss": cross_entropy, "seed": SEED}
    data, validation = make_points(NUM_SAMPLES, 1), make_points(NUM_VALIDATION, 2)
    return rv.Job(model, data, val_data=validation, optimizer=OPTIMIZERS[optimizer](model), **options)


def train_alone(updates: Iterable[Update], kind: str) -> dict[str, Tensor]:
    """Return the weights of one process that makes these updates."""
    model, data = make_mlp(2, dropout=0.0), make_points(NUM_SAMPLES, 1)
    optimizer = OPTIMIZERS[kind](model)
    for update in updates:
        samples = torch.tensor(update.samples)
        optimizer.param_groups[0]["lr"] = update.rate
        optimizer.zero_grad()
        cross_entropy(model(data["x"][samples]), {"y": data["y"][samples]}).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def plain_updates(rate: float) -> list[Update]:
    """Return the updates of a plain loop over the data."""
    found = []
    for epoch in range(EPOCHS):
        order = permute(torch.arange(NUM_SAMPLES).numpy(), NUM_SAMPLES, SEED, epoch)
        found += [Update(tuple(map(int, each)), rate) for each in torch.from_numpy(order).split(BATCH)]
    return found


@dataclass
class Told:
    """A run, and the updates that were made in it."""

    ended: Ended
    updates: Updates
    optimizer: str

    def check(self) -> None:
        """Every sample is counted, and in an update, once in each epoch; the weights are those updates."""
        counted = [(news.epoch, news.num_samples, news.num_dropped) for news in self.ended.of(EpochDone)]
        assert sorted(counted) == [(epoch + 1, NUM_SAMPLES, 0) for epoch in range(EPOCHS)]
        assert self.updates.counts == dict.fromkeys(range(NUM_SAMPLES), EPOCHS)
        assert self.ended.result is not None
        for name, tensor in train_alone(self.updates.made, self.optimizer).items():
            torch.testing.assert_close(self.ended.result.state[name], tensor, rtol=1e-5, atol=1e-5)


def run(pcs: Sequence[Pc] = SIX, optimizer: str = "momentum", **options) -> Told:
    world = World(make_exact_job(optimizer), pcs, plan=EXACT, form_plan=form_unlike, **options)
    world.ledger = updates = Updates()
    return Told(world.run(), updates, optimizer)


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 1e-2), ("momentum", 5e-2)])
def test_three_clusters_of_unlike_cuts_and_speeds_are_one_process(optimizer: str, rate: float) -> None:
    told = run(optimizer=optimizer)
    assert [len(cluster.stages) for cluster in told.ended.plan.clusters] == [1, 2, 3]
    assert told.ended.of(RoundEnded) == []
    told.check()
    made, plain = told.updates.made, plain_updates(rate)
    assert [(sorted(each.samples), each.rate) for each in made] == [
        (sorted(each.samples), each.rate) for each in plain
    ]


Matches = Callable[[Message], bool]
MOMENTS: dict[str, Matches] = {
    "share": lambda message: isinstance(message, LeaseGrant) and not message.is_evaluation,
    "fields": lambda message: isinstance(message, FieldParts),
    "activation": lambda message: isinstance(message, Activation) and not message.is_evaluation,
    "gradient": lambda message: isinstance(message, Gradient),
    "share done": lambda message: isinstance(message, LeaseDone),
    "round": lambda message: isinstance(message, RoundOpen),
    "ring": lambda message: isinstance(message, RingPart),
    "vote": lambda message: isinstance(message, RoundReady),
    "commit": lambda message: isinstance(message, RoundCommit),
}


@pytest.mark.parametrize(("moment", "num_spares"), [(each, n % 2) for n, each in enumerate(MOMENTS)])
def test_a_death_inside_a_batch_loses_nothing(moment: str, num_spares: int) -> None:
    random = Random(f"{moment} {num_spares}")
    num_left, kills_receiver = random.randint(5, 40), random.random() < 0.5
    victims: list[NodeId] = []

    def leaving(world: World, sender: NodeId, to: NodeId, message: Message) -> Sequence[float]:
        nonlocal num_left
        if MOMENTS[moment](message):
            num_left -= 1
            victim = to if sender == "hub" or (kills_receiver and to != "hub") else sender
            if num_left <= 0 and not victims and victim in world.alive:
                victims.append(victim)
                world.kill(victim, is_silent=random.random() < 0.3)
        return (0.0,)

    told = run((*SIX, *[Pc(900e3)] * num_spares), leaving=leaving, limit_seconds=300)
    assert len(victims) == 1
    assert told.ended.of(WorkLost) == []
    assert told.ended.of(ClusterBroken)
    told.check()


def test_a_newcomer_trains_with_the_others_at_the_same_update() -> None:
    joined: list[float] = []

    def hear(world: World, news: Notice) -> None:
        if isinstance(news, Trained) and news.num_samples > 5 * BATCH and not joined:
            joined.append(world.now)
            for _ in range(2):
                world.join(Pc(900e3))

    told = run(hear=hear)
    started = [at for at, news in told.ended.told if isinstance(news, ClusterStarted)]
    assert max(started) > joined[0]
    assert told.updates.is_exact
    told.check()


@pytest.mark.parametrize("seconds", [1.0, 8.0])
def test_a_hub_whose_line_is_cut_inside_a_batch_goes_on_with_it(seconds: float) -> None:
    cut: list[float] = []

    def hear(world: World, news: Notice) -> None:
        if isinstance(news, Trained) and news.num_samples > 5 * BATCH and not cut:
            cut.append(world.now)
            world.isolate(NodeId("hub"), seconds)

    told = run(hear=hear)
    assert told.ended.seconds > cut[0] + seconds
    assert told.ended.of(WorkLost) == told.ended.of(ClusterBroken) == []
    told.check()


@pytest.mark.parametrize("seed", range(pick(2, 20)))
def test_whoever_dies_and_comes_every_sample_is_in_one_update(seed: int) -> None:
    random = Random(seed)
    num_deaths, begun = 2, []

    def act(world: World, deed: str) -> None:
        nonlocal num_deaths
        name = random.choice(world.alive)
        if deed == "join":
            world.join(Pc(900e3, random.choice((1.0, 2.0))))
        elif deed == "outage":
            world.isolate(name, random.uniform(0.2, 2.0))
        elif num_deaths:
            num_deaths -= 1
            world.kill(name, is_silent=deed == "power cut")

    def hear(world: World, news: Notice) -> None:
        if isinstance(news, ClusterStarted) and not begun:
            begun.append(world.now)
            for _ in range(5):
                deed = random.choice(("kill", "power cut", "join", "outage"))
                asyncio.get_running_loop().call_later(random.uniform(0.0, 6.0), act, world, deed)

    told = run(hear=hear, seed=seed, limit_seconds=300)
    counted = [(news.epoch, news.num_samples, news.num_dropped) for news in told.ended.of(EpochDone)]
    assert sorted(counted) == [(epoch + 1, NUM_SAMPLES, 0) for epoch in range(EPOCHS)]
    if told.updates.is_exact:
        told.check()
