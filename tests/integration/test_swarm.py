"""A hub and peers as real programs on this PC: they train, average, lose a member, refuse strangers."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from random import SystemRandom

import pytest
import torch
import torch.nn.functional as F
from support.hub_world import job as plain_job
from torch import Tensor, nn

import ravnest as rv
from ravnest.config import Averaging
from ravnest.errors import PlanError, RavnestError
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    ClusterStarted,
    EpochDone,
    Evaluated,
    Notice,
    PlanFormed,
    RoundEnded,
    Stopping,
    Trained,
)
from ravnest.hub.service.server import Server
from ravnest.net.identity import SECRET_BYTES, Token, new_keys, write_token
from ravnest.net.zeromq import ZeroMqTransport
from ravnest.requester.local_peers import Hardware
from ravnest.requester.result import Result
from ravnest.requester.session import LOCAL_PLAN, Hub, local
from tests.support.forked import fork
from tests.support.small_swarm import ENDLESS, check_books, stop_run

WIDTH, NUM_CLASSES, NUM_TRAIN, NUM_VALIDATION = 128, 4, 768, 200
# Memory is what the model needs, and no more; and there are as many clusters as there can be.
PLAN = replace(LOCAL_PLAN, overhead_bytes=0.0, clusters=99, averaging=Averaging.OVERLAPPED)
SPEED = 1e9
SMALL = Hardware(1.3e6, SPEED)  # the model does not fit into one of these
LARGE = Hardware(2.3e6, SPEED)
LEAST_EPOCHS = 4


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "create_subprocess_exec", fork)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    inner = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), *inner, nn.Linear(WIDTH, NUM_CLASSES))


def make_data(num_samples: int, seed: int) -> dict[str, Tensor]:
    """Return points around one centre per class, near enough to each other to be told apart only mostly."""
    centres = torch.randn(NUM_CLASSES, 16, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    return {"x": centres[labels] + 1.2 * torch.randn(num_samples, 16, generator=generator), "y": labels}


def is_right(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (out.argmax(-1) == batch["y"]).float().mean()


def make_job(**options: object) -> rv.Job:
    given = {"epochs": 2, "average_every": 8, "learning_rate": 3e-3, "optimizer": "adamw", **options}
    given |= {"schedule": rv.constant()} if given["epochs"] == ENDLESS else {}
    return rv.Job(
        make_model(),
        make_data(NUM_TRAIN, 1),
        val_data=make_data(NUM_VALIDATION, 2),
        batch_size=16,
        loss=lambda out, batch: F.cross_entropy(out, batch["y"]),
        metrics={"acc": is_right},
        **given,
    )


def check_losses(told: list[Notice], epochs: int | None = None) -> None:
    """Every epoch counts each sample once, and the loss falls."""
    check_books(told, epochs, NUM_TRAIN)
    done = [news for news in told if isinstance(news, EpochDone)]
    assert done[-1].loss < 0.7 * done[0].loss
    evaluated = [news for news in told if isinstance(news, Evaluated)]
    assert {news.num_samples for news in evaluated} == {NUM_VALIDATION}
    assert epochs is None or [news.epoch for news in evaluated] == [epoch + 1 for epoch in range(epochs)]


def check_result(result: Result) -> None:
    """What the swarm says of the trained model is what it does here."""
    model = make_model()
    result.load_into(model)
    batch = make_data(NUM_VALIDATION, 2)
    with torch.no_grad():
        out = model.eval()(batch["x"])
    assert result.metrics["val_acc"] == pytest.approx(float(is_right(out, batch)), abs=1e-6)
    assert result.metrics["val_loss"] == pytest.approx(float(F.cross_entropy(out, batch["y"])), rel=1e-4)
    assert result.metrics["val_acc"] > 0.8


def sizes(told: list[Notice]) -> list[int]:
    """Return the lengths of the clusters of the first plan."""
    plan = next(news.plan for news in told if isinstance(news, PlanFormed))
    return sorted(len(cluster.stages) for cluster in plan.clusters)


def has_learned(told: list[Notice]) -> bool:
    """Return whether as many epochs are done as the model needs."""
    return sum(isinstance(news, EpochDone) for news in told) >= LEAST_EPOCHS


def test_three_stages_train_a_model_that_none_of_them_could_hold() -> None:
    told: list[Notice] = []
    plan = replace(PLAN, microbatch_seconds=0.0)  # else two are as fast as three, with a model this small
    with local([SMALL] * 3, plan=plan, tell=told.append) as swarm:
        result = swarm.fit(make_job())
    assert sizes(told) == [3]
    check_losses(told, epochs=2)
    check_result(result)


def test_two_clusters_of_unlike_cuts_average_and_agree() -> None:
    told: list[Notice] = []

    def tell(news: Notice) -> None:
        told.append(news)
        committed = [each for each in told if isinstance(each, RoundEnded) and each.is_committed]
        if len(committed) >= 2 and has_learned(told) and isinstance(news, Trained) and not stopped:
            stopped.append(None)
            stop_run()

    stopped: list[None] = []
    with local([SMALL] * 3 + [LARGE] * 2, plan=PLAN, tell=tell) as swarm:
        result = swarm.fit(make_job(epochs=ENDLESS))
    assert len(sizes(told)) > 1
    assert sizes(told)[-1] > 1
    check_losses(told)
    check_result(result)
    rounds = [news for news in told if isinstance(news, RoundEnded)]
    assert rounds[-1].is_final


def test_a_peer_killed_in_the_middle_costs_its_cluster_not_the_job() -> None:
    told: list[Notice] = []
    victims: list[str] = []
    num_at_end: list[int] = []  # of the news: first when its cluster broke, then when the run is stopped

    def kill_one(news: Notice) -> None:
        told.append(news)
        if isinstance(news, RoundEnded) and not victims:
            victims.append(next(news.nodes[-1] for news in told if isinstance(news, ClusterStarted)))
            os.kill(swarm.processes[victims[0]], signal.SIGKILL)
        elif isinstance(news, ClusterBroken) and victims and victims[0] in news.reason and not num_at_end:
            num_at_end.append(len(told))
        elif isinstance(news, Trained) and len(num_at_end) == 1 and has_learned(told[num_at_end[0] :]):
            num_at_end.append(len(told))
            stop_run()

    swarm: Hub = local([LARGE] * 4, plan=PLAN, tell=kill_one)
    with swarm:
        result = swarm.fit(make_job(epochs=ENDLESS))
    assert len(sizes(told)) > 1
    check_losses(told)
    check_result(result)


def test_a_model_too_large_for_all_of_them_is_said_so() -> None:
    with local([SMALL], plan=PLAN, tell=lambda _: None) as swarm, pytest.raises(PlanError, match="needs"):
        swarm.fit(make_job())


def test_a_hub_with_peers_of_its_own_does_not_begin_without_one_that_has_ended() -> None:
    broken = replace(LARGE, device="nosuch")
    with (
        local([LARGE, LARGE, broken], plan=PLAN, tell=lambda _: None) as swarm,
        pytest.raises(RavnestError, match="node3 has ended before training began; see what it said"),
    ):
        swarm.fit(make_job())


def test_a_callback_or_the_hub_itself_ends_a_training_and_what_was_trained_is_kept() -> None:
    told: list[Notice] = []

    def stop_soon(news: Notice) -> None:
        told.append(news)
        if isinstance(news, Evaluated):
            raise rv.StopTraining("it is good enough")

    def stop_by_hub(news: Notice) -> None:
        if isinstance(news, Evaluated):
            threading.Thread(target=swarm.stop, args=["said by another thread"]).start()

    with local([Hardware(6e6, SPEED)], plan=PLAN, tell=lambda _: None) as swarm:
        result = swarm.fit(make_job(epochs=ENDLESS), callbacks=[stop_soon])
        assert [news.reason for news in told if isinstance(news, Stopping)] == ["it is good enough"]
        assert result.metrics["epoch"] >= 1
        assert result.best is not None
        again: list[Notice] = []
        swarm.fit(make_job(epochs=ENDLESS), callbacks=[again.append, stop_by_hub])
    assert [news.reason for news in again if isinstance(news, Stopping)] == ["said by another thread"]


class Tied(nn.Module):
    """Its first weight is used again near its end, as the embedding of a language model is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, *inner, self.last = make_model()
        self.inner, self.last = nn.Sequential(*inner), nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + F.linear(self.inner(self.first(x)), self.first.weight.T))


@pytest.mark.parametrize("has_validation", [True, False])
def test_a_weight_tied_across_two_stages_is_trained_in_both(has_validation: bool) -> None:
    told: list[Notice] = []
    torch.manual_seed(0)
    start = Tied()
    job = rv.Job(
        start,
        make_data(NUM_TRAIN, 1),
        val_data=make_data(NUM_VALIDATION, 2) if has_validation else None,
        batch_size=16,
        loss=lambda out, batch: F.cross_entropy(out, batch["y"]),
        epochs=3,
        learning_rate=3e-3,
        optimizer="adamw",
    )
    with local([LARGE] * 2, plan=PLAN, tell=told.append) as swarm:
        result = swarm.fit(job)
    assert sizes(told) == [2]
    model, batch = Tied(), make_data(NUM_VALIDATION, 2)
    result.load_into(model)
    with torch.no_grad():
        out = model.eval()(batch["x"])
    if has_validation:
        assert result.metrics["val_loss"] == pytest.approx(float(F.cross_entropy(out, batch["y"])), rel=1e-4)
    assert float(is_right(out, batch)) > 0.8
    assert (model.first.weight - start.first.weight).norm() > 0.1 * start.first.weight.norm()


def join(token: str, patience: str = "60 s") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ravnest", "join", "--memory", "1 GB", "--flops", "1 GFLOP/s"]
    return subprocess.run([*command, "--patience", patience, token], capture_output=True, text=True)


def test_a_wrong_secret_is_refused_with_a_sentence() -> None:
    async def knock() -> subprocess.CompletedProcess[str]:
        keys = new_keys()
        secret, hub = os.urandom(SECRET_BYTES), Coordinator(plain_job())
        server = Server(Token((), keys.public, secret), tell=lambda _: None, hub=hub)
        listen = "tcp://127.0.0.1:*"
        async with ZeroMqTransport(keys, SystemRandom(), listen, admit=server.admit) as transport:
            token = Token((transport.address,), keys.public, os.urandom(SECRET_BYTES))
            return await asyncio.to_thread(join, write_token(token))

    ended = asyncio.run(knock())
    assert ended.returncode == 5, ended.stderr
    assert "its token is not for this hub" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_hub_that_is_not_there_is_told_after_the_patience() -> None:
    token = Token(("tcp://127.0.0.1:9",), new_keys().public, os.urandom(SECRET_BYTES))
    ended = join(write_token(token), patience="5 s")  # it has tried the address well before
    assert ended.returncode == 4, ended.stderr
    assert "the hub at tcp://127.0.0.1:9 cannot be reached: nobody answers" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_token_with_a_typing_error_is_a_bad_value() -> None:
    ended = join("rvn1_abcdefgh")
    assert ended.returncode == 3
    assert "token" in ended.stderr
