"""What cannot become a blueprint is refused when it is captured, with the line, the reason and a way out."""

import linecache
import re
import resource
from dataclasses import dataclass

import pytest
import torch
from support import model_zoo
from support.model_zoo import FAMILIES, REFUSED, WRITES_INPUT, Sample, copy_of
from support.stage_runner import Subject, subject
from torch import Tensor, nn

from ravnest.errors import CaptureError
from ravnest.model.capture import Captured, capture, empty_weights

PLACE = re.compile(r"model_zoo\.py:(\d+)")


@dataclass(frozen=True)
class Refusal:
    """What a message has to say: words of the reason, words of the fix, and whether a line can be named."""

    reason: str
    fix: str
    has_place: bool = True


REFUSALS = {
    "StraightThrough": Refusal("autograd.function|gradient|backward", "detach|torch operation|operations"),
    "PythonLayerDrop": Refusal("random", r"torch\.rand|torch|dropout"),
    "ReassignedBuffer": Refusal("step|buffer", r"in place|in-place|copy_|add_"),
    "DataDependentBranch": Refusal("depend|branch|if|value", r"torch\.where|where"),
    "ReadsANumber": Refusal(r"item|number|python", "tensor"),
    "ThroughNumpy": Refusal("numpy", "torch"),
    "FixedBatch": Refusal("batch", r"-1|shape|flatten"),
    "UnlistedOperator": Refusal("linalg_svd|svd", "allow|instead|replace|other|list"),
    "LossPerSample": Refusal("loss", "scalar|mean|sum|one number", has_place=False),
    "FieldNotATensor": Refusal("names", "tensor", has_place=False),
}


def capture_sample(sample: Sample) -> Captured:
    return capture(sample.model, sample.batch, sample.loss, dict(sample.metrics) or None)


def assert_names_the_line(message: str) -> None:
    place = PLACE.search(message)
    assert place is not None, message
    line = linecache.getline(model_zoo.__file__, int(place.group(1)))
    assert line.rstrip().endswith("# refused"), (message, line)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_place_reason_and_fix(name):
    expected = REFUSALS[name]
    with pytest.raises(CaptureError) as caught:
        capture_sample(REFUSED[name].sample())
    message = str(caught.value)
    assert re.search(expected.reason, message, re.IGNORECASE), message
    assert re.search(expected.fix, message, re.IGNORECASE), message
    if expected.has_place:
        assert_names_the_line(message)


def test_a_write_to_the_batch_is_refused_or_right():
    """The other stages get the batch as it was: a write must not be lost between two of them."""
    sample = WRITES_INPUT.sample()
    batch = copy_of(sample.batch)
    try:
        model = Subject(sample, capture(sample.model, batch, sample.loss))
    except CaptureError as error:
        assert_names_the_line(str(error))
    else:
        alone = model.alone().step(sample.batch)
        for cuts in ([], *([cut] for cut in range(1, model.num_positions))):
            assert model.compare(model.apart(cuts).step(sample.batch), alone).gradient <= 1e-5
    assert torch.equal(batch["x"], sample.batch["x"]), "capture changed the user's batch"


def test_every_refused_entry_has_an_expectation():
    assert REFUSALS.keys() == REFUSED.keys()


@pytest.mark.parametrize("family", ["own_gpt", "llama", "resnet"])
def test_empty_weights_give_the_same_blueprint(family):
    entry = FAMILIES[family]
    with empty_weights():
        model = entry.make_model()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} <= {"cpu"}
    captured = capture(model, entry.batch(), entry.loss, dict(entry.metrics) or None)
    real = subject(family).captured
    assert captured.blueprint == real.blueprint
    assert captured.state.keys() == real.state.keys()
    parameters = [entry.name for entry in captured.blueprint.state if entry.kind == "parameter"]
    assert {captured.state[name].device.type for name in parameters} == {"meta"}


class HugeModel(nn.Module):
    """Sixteen GiB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(16)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_model_larger_than_this_pc_is_not_materialised():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with empty_weights():
        model = HugeModel()
    batch = torch.ones(2, 16384), torch.ones(2, 16384)
    captured = capture(model, batch, nn.functional.mse_loss)
    assert captured.blueprint.num_positions >= 16
    grown_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kilobytes < 1024 * 1024


@pytest.mark.parametrize("family", ["llama", "resnet"])
def test_buffers_without_values_are_refused(family):
    entry = FAMILIES[family]
    with torch.device("meta"):
        model = entry.make_model()
    with pytest.raises(CaptureError, match="empty_weights"):
        capture(model, entry.batch(), entry.loss, dict(entry.metrics) or None)


def test_the_model_is_left_as_it_was():
    sample = FAMILIES["resnet"].sample()
    sample.model.eval()
    before = {name: tensor.clone() for name, tensor in sample.model.state_dict().items()}
    generator = torch.get_rng_state()
    captured = capture_sample(sample)
    assert not sample.model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in sample.model.state_dict().items())
    assert all(parameter.grad is None for parameter in sample.model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    assert captured.state["head.weight"] is sample.model.head.weight or (
        captured.state["head.weight"].data_ptr() == sample.model.head.weight.data_ptr()
    )
