"""What the requester's side remembers of a training."""

from types import SimpleNamespace

import pytest
import torch

from ravnest.codec import decode_tensor
from ravnest.hub.coordinator.notices import EpochDone, Evaluated
from ravnest.requester.job import Job
from ravnest.requester.owner import JobOwner


def note(*told):
    owner = JobOwner(None, SimpleNamespace(state={}, blueprint=SimpleNamespace(state=())), None, None)
    for news in told:
        owner.record(news)
    return [
        (report["epoch"], "val_loss" in report, report.get("loss", report.get("val_loss")))
        for report in owner.history
    ]


def trained(epoch, loss):
    return EpochDone(epoch, 10, 0, loss)


def evaluated(epoch, loss):
    return Evaluated(epoch, "A", 10, loss, ())


def test_epochs_and_evaluations_are_kept_in_the_order_they_were_told():
    told = note(trained(1, 5.0), trained(2, 4.0), evaluated(1, 4.5), trained(3, 3.0), evaluated(2, 3.5))
    assert told == [(1, False, 5.0), (2, False, 4.0), (1, True, 4.5), (3, False, 3.0), (2, True, 3.5)]


def test_what_is_trained_again_is_told_once():
    told = note(
        trained(1, 5.0),
        evaluated(1, 4.5),
        trained(2, 4.0),
        evaluated(2, 9.0),
        trained(2, 3.9),
        evaluated(2, 3.5),
    )
    assert told == [(1, False, 5.0), (1, True, 4.5), (2, False, 3.9), (2, True, 3.5)]


def test_evaluations_within_an_epoch_are_all_kept_and_one_that_comes_again_once():
    def step(number, loss):
        return Evaluated((number - 1) // 4, "A", 10, loss, (), number)

    told = [step(2, 5.0), step(4, 4.0), trained(1, 4.5), step(6, 3.0), step(8, 2.0)]
    expected = [(0, True, 5.0), (0, True, 4.0), (1, False, 4.5), (1, True, 3.0), (1, True, 2.0)]
    assert note(*told) == expected
    again = note(*told, step(6, 2.9))
    assert again == [*expected[:3], (1, True, 2.9)]


class Pictures(torch.nn.Module):
    def forward(self, image):
        return image.float().mean((1, 2, 3)) / 255


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_images_travel_in_one_byte_for_each_number(dtype):
    image = torch.randint(0, 256, (6, 3, 16, 16)).to(dtype)
    data = [{"image": image[row], "y": float(row)} for row in range(6)]
    job = Job(Pictures(), data, batch_size=2, loss=lambda out, batch: (out - batch["y"]).mean())
    captured = SimpleNamespace(state={}, blueprint=SimpleNamespace(state=()))
    owner = JobOwner(job, captured, None, None)
    groups = [(3, 0), (5,)]
    found = list(owner.read_fields(False, groups, ["image"]))
    for (specs, buffers), group in zip(found, groups, strict=True):
        (_, spec), (content,) = specs[0], buffers
        assert content.nbytes == len(group) * 3 * 16 * 16
        assert spec.dtype == "uint8"
        assert torch.equal(decode_tensor(content, spec).to(dtype), image[list(group)])
