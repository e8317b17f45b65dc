"""Which losses are means over samples, sums, or of a whole batch: found by running them on parts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.model.capture.batch_loss import BatchLoss, find_summed_metrics, judge_loss
from ravnest.model.capture.model_with_loss import ModelWithLoss, name_fields

SIZES = (3, 4, 7, 16, 64)


def judge(model, batch, loss):
    """Return the verdict; the module and torch's generator are as they were."""
    fields = name_fields(batch, None)
    whole = ModelWithLoss(model, fields, loss, {}, is_tuple=not isinstance(batch, dict), inputs=None)
    before, state = torch.get_rng_state(), {name: each.clone() for name, each in model.state_dict().items()}
    verdict = judge_loss(whole, fields)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(state[name], each) for name, each in model.state_dict().items())
    assert model.training
    return verdict


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def rows(num_samples, width=8):
    return torch.randn(num_samples, width)


class Towers(nn.Module):
    """Two encoders, as in CLIP."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)


def contrastive(out, _):
    image, text = out
    scores = 5 * image @ text.T
    target = torch.arange(len(image))
    return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


@pytest.mark.parametrize("num_samples", [2, *SIZES])
def test_a_contrastive_loss_needs_the_whole_batch(num_samples):
    batch = {"image": rows(num_samples), "text": rows(num_samples)}
    assert judge(Towers(), batch, contrastive) is BatchLoss.WHOLE


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: (out.mean(0) - y.float().mean()).square().mean(),
        lambda out, y: 1 - out.std(0).mean(),
        lambda out, y: F.cross_entropy(out, y) + (5 * out).softmax(-1).mean(0).square().sum(),
    ],
    ids=["moments", "variance", "load balance"],
)
def test_statistics_over_the_batch_need_the_whole_batch(loss):
    assert judge(nn.Linear(8, 4), (rows(16), torch.arange(16) % 4), loss) is BatchLoss.WHOLE


@pytest.mark.parametrize("num_samples", [1, 2, *SIZES])
@pytest.mark.parametrize("loss", [F.cross_entropy, lambda out, y: (out[:, 0] - y).square().mean()])
def test_a_mean_over_samples_may_be_cut(num_samples, loss):
    batch = (rows(num_samples), torch.arange(num_samples) % 4)
    assert judge(nn.Linear(8, 4), batch, loss) is BatchLoss.MEAN


@pytest.mark.parametrize("num_samples", [2, *SIZES])
def test_a_sum_over_samples_is_known_as_one(num_samples):
    batch = (rows(num_samples), rows(num_samples, 4))
    assert judge(nn.Linear(8, 4), batch, nn.MSELoss(reduction="sum")) is BatchLoss.SUM


def test_statistics_of_batch_norm_and_dropout_are_no_matter_of_the_loss():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    assert judge(model, (rows(16), torch.arange(16) % 4), F.cross_entropy) is BatchLoss.MEAN


@pytest.mark.parametrize("num_samples", SIZES)
def test_a_mean_over_tokens_is_cut_with_a_note(num_samples):
    ids = torch.randint(0, 50, (num_samples, 12))
    lengths = torch.linspace(12, 1, num_samples).long()[:, None]
    labels = torch.where(torch.arange(12) < lengths, ids, -100)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    verdict = judge(model, {"ids": ids, "labels": labels}, token_loss)
    assert verdict is BatchLoss.WEIGHTED
    assert verdict.is_cuttable
    assert "no padding" in verdict.note


def token_loss(out, batch):
    return F.cross_entropy(5 * out.flatten(0, 1), batch["labels"].flatten())


def test_class_weights_are_cut_with_a_note():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2, 2.0]))
    batch = (rows(16), torch.randint(0, 4, (16,)))
    assert judge(nn.Linear(8, 4), batch, loss) is BatchLoss.WEIGHTED


class Denoiser(nn.Module):
    """Draws noise for each sample, in evaluation too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        noise, time = torch.randn_like(x), torch.rand(x.shape[0], 1)
        other = torch.empty(x.shape[0] * 2, 4).normal_().view(x.shape[0], 8)
        return (self.layer(x + time * noise + other) - noise).square().mean()


@pytest.mark.parametrize("num_samples", SIZES)
def test_random_numbers_are_the_same_for_a_sample_in_every_part(num_samples):
    assert judge(Denoiser(), {"x": rows(num_samples)}, lambda out, _: out) is BatchLoss.MEAN


def test_samples_that_are_mixed_need_the_whole_batch():
    class Mixed(nn.Linear):
        def forward(self, x):
            return super().forward(x + x[torch.randperm(x.shape[0])])

    assert judge(Mixed(8, 4), (rows(16), torch.arange(16) % 4), F.cross_entropy) is BatchLoss.WHOLE


def test_metrics_that_are_sums_are_found():
    """A number of hits, averaged over microbatches, is no number of anything."""
    metrics = {
        "hits": lambda out, y: (out.argmax(-1) == y).sum(),
        "accuracy": lambda out, y: (out.argmax(-1) == y).float().mean(),
        "rmse": lambda out, y: F.mse_loss(out[:, 0], y.float()).sqrt(),
    }
    fields = name_fields((rows(10), torch.randint(0, 2, (10,))), None)
    whole = ModelWithLoss(nn.Linear(8, 2), fields, F.cross_entropy, metrics, is_tuple=True, inputs=None)
    assert find_summed_metrics(whole, fields) == ("hits",)
    assert not find_summed_metrics(whole, {name: field[:1] for name, field in fields.items()})
