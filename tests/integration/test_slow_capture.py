"""A hub answers its peers while it captures: it listens first, and its event loop stays free."""

import asyncio
import threading
from random import SystemRandom

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ravnest as rv
from ravnest.errors import RavnestError
from ravnest.hub.coordinator.notices import CaptureStep, HubListens, ModelCaptured, Notice
from ravnest.net.identity import Token, greet, new_keys, peer_of
from ravnest.net.transport import LinkUp, PublicKey
from ravnest.net.zeromq import ZeroMqTransport
from tests.support.small_swarm import PLAN, joining


class Slow(nn.Module):
    """A model that runs when it is let; until then its capture stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.moments = {"begun": threading.Event(), "let": threading.Event()}

    def forward(self, x: Tensor) -> Tensor:
        self.moments["begun"].set()
        self.moments["let"].wait()
        return self.inner(x)


def make_job(model: nn.Module) -> rv.Job:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    data = {"x": x, "y": x[:, :4].argmax(-1)}
    return rv.Job(model, data, batch_size=16, loss=lambda out, batch: F.cross_entropy(out, batch["y"]))


async def visit(token: Token, num_visits: int) -> None:
    """Dial the hub as peers do, one after the other; each must be let in."""
    for _ in range(num_visits):
        keys = new_keys()
        async with ZeroMqTransport(keys, SystemRandom(), "tcp://127.0.0.1:*") as transport:
            transport.allow([PublicKey(token.hub_key)])
            greeting = greet(token, keys.public)
            transport.dial(peer_of(PublicKey(token.hub_key)), token.addresses, greeting)
            while not isinstance(await transport.receive(), LinkUp):
                pass


def test_a_hub_lets_peers_in_while_it_captures_and_trains_with_them_after() -> None:
    model, told = Slow(), []
    with rv.Hub("127.0.0.1:*", plan=PLAN, tell=told.append) as hub, joining(hub.token, ()):

        def visit_and_let() -> None:
            try:
                model.moments["begun"].wait()
                asyncio.run(visit(hub.token, 2))
                visited.append(ModelCaptured not in map(type, told))
            finally:
                model.moments["let"].set()

        visited: list[bool] = []
        visitor = threading.Thread(target=visit_and_let)
        visitor.start()
        result = hub.fit(make_job(model), nodes=1)
        visitor.join()
    assert result.history
    assert visited == [True], "both were let in before the model was captured"
    kinds = [type(news) for news in told]
    assert kinds.index(HubListens) < kinds.index(CaptureStep) < kinds.index(ModelCaptured)


def test_a_model_that_fails_to_be_captured_ends_the_hub_with_its_reason() -> None:
    told: list[Notice] = []
    model = nn.Linear(16, 4)
    nn.init.constant_(model.weight, float("nan"))
    with rv.Hub("127.0.0.1:*", plan=PLAN, tell=told.append) as hub, pytest.raises(RavnestError, match="NaN"):
        hub.fit(make_job(model), nodes=1)
    assert isinstance(told[0], HubListens)


def test_peers_of_a_hubs_own_wait_for_it_as_long_as_it_lives() -> None:
    model, told = Slow(), []
    with rv.local(2, tell=told.append) as hub:

        def release() -> None:
            model.moments["begun"].wait()
            model.moments["let"].set()

        releaser = threading.Thread(target=release)
        releaser.start()
        assert hub.fit(make_job(model)).history
        releaser.join()
