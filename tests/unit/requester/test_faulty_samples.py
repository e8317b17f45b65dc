"""Which sample of a microbatch is at fault, as the requester's side finds out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.model.capture.capture import capture, empty_weights
from ravnest.requester.faulty_samples import SampleInspector
from ravnest.requester.job import Job
from ravnest.requester.prepare import prepare
from ravnest.requester.session import LOCAL_PLAN


class Classifier(nn.Module):
    """An embedding, a batch norm, and four classes."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, ids, scale):
        return self.head(self.norm(self.embedding(ids).mean(1) * scale[:, None]))


def batch(num_samples=6):
    return {
        "ids": torch.arange(num_samples * 3).reshape(num_samples, 3) % 10,
        "scale": torch.ones(num_samples),
        "y": torch.arange(num_samples) % 4,
    }


def loss(out, batch):
    return F.cross_entropy(out, batch["y"])


def captured(model):
    return capture(model, batch(), loss, self_test=False)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("y", 5, "IndexError: Target 5 is out of bounds"),
        ("ids", 10, "IndexError: index out of range in self"),
        ("scale", float("nan"), "'scale' has a number that is NaN"),
        ("scale", float("inf"), "its loss is nan"),
    ],
)
def test_each_sample_at_fault_is_found_with_the_reason(name, value, reason):
    model = Classifier()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    fields = batch()
    fields[name][2] = fields[name][4] = value
    found = SampleInspector(captured(model)).inspect(fields)
    assert found == {2: reason, 4: reason}
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_good_samples_are_not_at_fault():
    inspector = SampleInspector(captured(Classifier()))
    assert inspector.inspect(batch()) == {}
    assert inspector.inspect(batch(1)) == {}


def test_a_model_that_cannot_run_here_still_sees_what_is_no_number():
    with empty_weights():
        model = Classifier()
    fields = batch()
    fields["y"][2], fields["scale"][3] = 5, float("nan")
    assert SampleInspector(captured(model)).inspect(fields) == {3: "'scale' has a number that is NaN"}


def test_the_owner_names_samples_by_their_numbers():
    rows = batch(40)
    rows["y"][31] = 5
    job = Job(Classifier(), rows, val_data=batch(9), loss=loss, batch_size=8)
    owner = prepare(job, LOCAL_PLAN, 1, 1.0).owner
    assert owner.find_faulty(False, (4, 31, 17)) == ((31, "IndexError: Target 5 is out of bounds"),)
    assert owner.find_faulty(True, (4, 5)) == ()
