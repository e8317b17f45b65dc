"""One liar of four, and of two, as real programs: the result is what the honest trained, or there is none."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.lying_peer import LIAR, POISON, LyingPeer
from support.small_swarm import PLAN, joining
from torch import nn

import ravnest as rv
from ravnest.config import Averaging
from ravnest.errors import GuardError
from ravnest.hub.coordinator.notices import Left, ResultKept, RoundEnded
from ravnest.net.identity import read_token

HERE, MEMORY_BYTES, EPOCHS = "127.0.0.1:0", 8_000_000, 6
BLOCKING = replace(PLAN, averaging=Averaging.BLOCKING)


def make_data(num_samples, seed):
    inputs = torch.randn(num_samples, 16, generator=torch.Generator().manual_seed(seed))
    return {"x": inputs, "y": inputs[:, :4].argmax(-1)}


def make_job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    return rv.Job(
        model,
        make_data(1024, 1),
        val_data=make_data(256, 2),
        batch_size=16,
        epochs=EPOCHS,
        average_every=8,
        optimizer="adamw",
        learning_rate=1e-3,
        loss=lambda out, batch: F.cross_entropy(out, batch["y"]),
    )


def measure(result):
    """The validation loss of a result, found here."""
    model, data = result.model, make_data(256, 2)
    result.load_into(model)
    with torch.no_grad():
        return float(F.cross_entropy(model(data["x"]), data["y"]))


def train(tmp_path, mode, num_honest=3):
    """Train with one liar; return the result, if there is one, and what people were told."""
    told = []
    lent = ("--memory", f"{MEMORY_BYTES} B", "--listen", HERE)
    with (
        rv.Hub(HERE, folder=tmp_path / "run", plan=BLOCKING, tell=told.append) as hub,
        LyingPeer(mode, hub.invitation, MEMORY_BYTES),
        joining(read_token(hub.invitation), *[lent] * num_honest),
    ):
        result = hub.fit(make_job(), nodes=num_honest + 1)
    return result, told


@pytest.mark.parametrize("mode", ["own", "losses", "checker", "state", "sketch", "lazy"])
def test_one_liar_of_four_does_not_own_the_result(tmp_path, mode):
    result, told = train(tmp_path, mode)
    left = {news.node for news in told if isinstance(news, Left)}
    assert left <= {LIAR}, "no honest one is named"
    assert measure(result) < 0.75, "as good as without a liar: 0.45 to 0.6"
    assert all(not torch.allclose(each, torch.full_like(each, POISON)) for each in result.state.values())
    if mode not in ("state", "sketch"):  # these lie only when they are asked
        assert left == {LIAR}
    (kept,) = [news for news in told if isinstance(news, ResultKept)]
    assert kept.num_agreeing >= 2
    assert any(isinstance(news, RoundEnded) and news.is_committed for news in told)


@pytest.mark.parametrize("mode", ["state"])
def test_one_liar_of_two_is_contradicted_and_no_wrong_result_is_kept(tmp_path, mode):
    result, ended = None, ""
    try:
        result, _ = train(tmp_path, mode, num_honest=1)
    except GuardError as error:
        ended = str(error)
    if result is None:
        assert "contradict each other" in ended
        assert not (tmp_path / "run" / "model.safetensors").exists()
    else:
        loss = measure(result)
        assert math.isfinite(loss)
        assert loss < 0.75, "the honest one was drawn"
