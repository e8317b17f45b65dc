"""What cannot become a blueprint is refused when it is captured, with the line, the reason and a way out."""

import linecache
import random
import re
import resource
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from random import random as draw
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import model_zoo
from support.model_zoo import FAMILIES, REFUSED, WRITES_INPUT, Sample, copy_of
from support.stage_runner import Subject, subject
from torch import Tensor, nn

from ravnest.errors import CaptureError
from ravnest.model.capture.capture import Captured, capture, empty_weights

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


# --- mistakes that would train something else, or that the user should be told in plain words


class Head(nn.Module):
    """Six features, three classes; what happens in between is the function's."""

    def __init__(self, change: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: x) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        self.change = change
        self.register_buffer("seen", torch.zeros(6))
        self.count = 0
        self.kept: list[Tensor] = []
        self.plain = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self, self.first(x)))


def class_batch(num_samples: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    truth = torch.randint(0, 3, (num_samples,), generator=generator)
    return {"x": torch.randn(num_samples, 6, generator=generator), "y": truth}


def class_loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out, batch["y"])


def refusal(model: nn.Module, batch: Any = None, loss: Any = class_loss, **options: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(model, class_batch() if batch is None else batch, loss, **options)
    message = str(caught.value)
    assert not re.search(r"\bs\d+\b", message), message
    return message


def with_hook(attach: Callable[[nn.Parameter], object]) -> nn.Module:
    model = Head()
    attach(model.first.weight)
    return model


def with_other_weight() -> nn.Module:
    model = Head()
    model.first.weight = nn.Parameter(torch.zeros(6, 6))
    model.extra = nn.Linear(6, 6, bias=False)
    model.extra.weight = nn.Parameter(model.first.weight.data)
    model.change = lambda module, x: module.extra(x)
    return model


def with_detached_buffer() -> nn.Module:
    model = Head(lambda module, x: x @ module.copy)
    model.register_buffer("copy", model.first.weight.detach())
    return model


def compiled(is_part: bool) -> nn.Module:
    model = Head()
    with warnings.catch_warnings(action="ignore"):  # torch uses what it calls deprecated
        if not is_part:
            return torch.compile(model)
        model.first.compile()
    return model


def count(module: nn.Module, x: Tensor) -> Tensor:
    module.count += 1
    return x * 100 if module.count > 10 else x


def keep(module: nn.Module, x: Tensor) -> Tensor:
    module.kept.append(x.detach())
    return x + module.kept[0].mean(0) * len(module.kept)


def replace_buffer(module: nn.Module, x: Tensor) -> Tensor:
    module._buffers["seen"] = module.seen + 1
    return x


def replace_data(module: nn.Module, x: Tensor) -> Tensor:
    module.seen.data = module.seen.data + 1
    return x


def write_plain(module: nn.Module, x: Tensor) -> Tensor:
    module.plain.add_(1)
    return x + module.plain


def train_itself(module: nn.Module, x: Tensor) -> Tensor:
    x.sum().backward()
    return x


def hook_result(module: nn.Module, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-100, 100))
    return x


def skip_rarely(draw_one: Callable[[], float]) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda module, x: x * 2 if draw_one() < 1e-9 else x


OWN_GENERATOR, OWN_NUMPY = random.Random(1), np.random.default_rng(1)

SILENT = {
    "a batch of one": (lambda: Head(lambda _, x: x * 2 if x.shape[0] == 1 else x), "batch of one"),
    "a batch above one": (lambda: Head(lambda _, x: x - x.mean(0) if x.shape[0] > 1 else x), "batch of one"),
    "the batch size": (
        lambda: Head(lambda _, x: x * 2 if x.shape[0] > 1000 else x),
        "differently by batch size",
    ),
    "a square of the batch": (lambda: Head(lambda _, x: x + (x @ x.T).flatten().mean()), r"size batch\*\*2"),
    "the batch size as len": (lambda: Head(lambda _, x: x.view(len(x), 2, 3).flatten(1)), r"or as len\(x\)"),
    "a gradient hook": (
        lambda: with_hook(lambda weight: weight.register_hook(lambda gradient: gradient.clamp(-100, 100))),
        "'first.weight' has a hook",
    ),
    "a hook after gradients": (
        lambda: with_hook(lambda weight: weight.register_post_accumulate_grad_hook(lambda _: None)),
        "'first.weight' has a hook",
    ),
    "a hook in forward": (lambda: Head(hook_result), r"refusals\.py:\d+ .* hook"),
    "a counter": (lambda: Head(count), r"refusals\.py:\d+ .* number self\.count changes"),
    "a memory": (lambda: Head(keep), "keeps data between batches"),
    "a replaced buffer": (lambda: Head(replace_buffer), "buffer 'seen' is replaced"),
    "replaced data": (lambda: Head(replace_data), "buffer 'seen' is replaced"),
    "a tensor that is no buffer": (lambda: Head(write_plain), r"'plain' is changed .*register_buffer"),
    "its own backward": (lambda: Head(train_itself), r"refusals\.py:\d+ .* trains itself"),
    "random by another name": (lambda: Head(skip_rarely(draw)), "random numbers outside torch"),
    "its own generator": (lambda: Head(skip_rarely(OWN_GENERATOR.random)), "random numbers outside torch"),
    "numpy's generator": (lambda: Head(skip_rarely(OWN_NUMPY.random)), "random numbers outside torch"),
    "random.gauss": (
        lambda: Head(skip_rarely(lambda: 9 + random.gauss(0, 1))),
        "random numbers outside torch",
    ),
    "two parameters in one memory": (with_other_weight, r"'extra\.weight'.* in one memory.*clone"),
    "a compiled model": (lambda: compiled(is_part=False), "compiled by torch.compile; give the module"),
    "a part compiled in place": (
        lambda: compiled(is_part=True),
        "compiled by torch.compile; give the module",
    ),
    "weights in float16": (lambda: Head().half(), r"'first\.weight' is float16, .* model\.float\(\)"),
    "a buffer in a parameter's memory": (with_detached_buffer, "'copy'.* in one memory"),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_would_train_something_else_is_refused(name):
    make_model, reason = SILENT[name]
    message = refusal(make_model())
    assert re.search(reason, message), message


def test_a_tied_weight_and_idempotent_attributes_are_fine():
    def note_size(module: nn.Module, x: Tensor) -> Tensor:
        module.count = 5
        return x

    model = Head(note_size)
    model.last = nn.Linear(6, 6)
    model.last.weight = model.first.weight
    captured = capture(model, class_batch(), class_loss)
    assert captured.blueprint.aliases == (("last.weight", "first.weight"),)
    assert model.count == 0


def batch_with(**fields: Tensor) -> dict[str, Tensor]:
    return class_batch() | fields


def layers(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


def embedding(**options: Any) -> nn.Module:
    return layers(nn.Embedding(5, 4, **options), nn.Flatten(), nn.Linear(24, 3))


def filled(value: float) -> nn.Module:
    model = Head()
    nn.init.constant_(model.last.weight, value)
    return model


FAILING = {
    "labels out of range": (
        Head,
        batch_with(y=torch.full((8,), 3)),
        "IndexError: Target 3 is out of bounds;",
    ),
    "int32 labels": (Head, batch_with(y=torch.ones(8, dtype=torch.int32)), "RuntimeError: .*Int"),
    "double model": (lambda: Head().double(), class_batch(), "RuntimeError: .*Double"),
    "embedding index": (embedding, batch_with(x=torch.full((8, 6), 7)), "IndexError: index out of range"),
    "BatchNorm of one": (
        lambda: layers(nn.Linear(6, 3), nn.BatchNorm1d(3)),
        class_batch(1),
        "ValueError: Expected more than 1",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_model_that_fails_by_itself_is_told_so(name):
    make_model, batch, reason = FAILING[name]
    message = refusal(make_model(), batch)
    assert re.search(r"the model itself fails on the first batch: " + reason, message), message
    assert "correct the data or the loss" in message


def test_a_failing_line_is_named():
    message = refusal(Head(), loss=lambda out, batch: F.binary_cross_entropy(out[:, 0] + 9, out[:, 1]))
    assert re.match(r"\S+test_capture_refusals\.py:\d+: the model itself fails", message), message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(value):
    message = refusal(filled(value))
    assert re.search(
        r"the loss is (NaN|infinite) on the first batch; .*first bad one: last\.weight", message
    ), message


def test_sparse_gradients_are_refused():
    message = refusal(embedding(sparse=True), batch_with(x=torch.ones(8, 6, dtype=torch.long)))
    assert "'0.weight' is sparse" in message
    assert "without sparse=True" in message


class OnlyKeywords(Head):
    def forward(self, **fields: Tensor) -> Tensor:
        return super().forward(fields["x"])


def accuracy(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (out.argmax(-1) == batch["y"]).float().mean()


PLAIN_WORDS = {
    "the loss returned a tuple; return the loss alone, the rest as metrics": lambda: refusal(
        Head(), loss=lambda out, batch: (class_loss(out, batch), {})
    ),
    "the loss is a Python number; return the tensor, without .item()": lambda: refusal(
        Head(), loss=lambda out, batch: class_loss(out, batch).item()
    ),
    "the loss is not one number but a tensor of batch x 3": lambda: refusal(
        Head(), loss=lambda out, batch: out.exp()
    ),
    "the loss is the class CrossEntropyLoss; make one: CrossEntropyLoss()": lambda: refusal(
        Head(), loss=nn.CrossEntropyLoss
    ),
    "field 'names' of a batch is a list": lambda: refusal(Head(), class_batch() | {"names": ["a"] * 8}),
    "dataset.remove_columns(['names'])": lambda: refusal(Head(), class_batch() | {"names": ["a"] * 8}),
    "forward takes only **kwargs; name the fields with inputs=": lambda: refusal(OnlyKeywords()),
    "rename the key 'conv-1' of the ModuleDict: letters, digits and _": lambda: refusal(
        with_names(nn.ModuleDict({"conv-1": nn.Linear(6, 6)}))
    ),
    "rename the metric 'top-1': letters, digits and _": lambda: refusal(Head(), metrics={"top-1": accuracy}),
    "rename the field 'my x': letters, digits and _": lambda: refusal(
        Head(), {"my x": class_batch()["x"], "y": class_batch()["y"]}
    ),
    "run the model once on a batch before making the Job": lambda: refusal(layers(nn.LazyLinear(3))),
    "give the nn.Module itself": lambda: refusal(torch.jit.script(layers(nn.Linear(6, 3)))),
}


def with_names(modules: nn.ModuleDict) -> nn.Module:
    model = Head(lambda module, x: module.parts["conv-1"](x))
    model.parts = modules
    return model


@pytest.mark.parametrize("words", PLAIN_WORDS)
def test_a_common_mistake_is_told_in_plain_words(words):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit and of lazy modules, about themselves
        assert words in PLAIN_WORDS[words]()


def test_fields_reach_keyword_arguments_by_name():
    assert capture(OnlyKeywords(), class_batch(), class_loss, inputs=["x"]).blueprint.num_positions >= 1


def test_empty_weights_keep_ties():
    class Tied(Head):
        def __init__(self) -> None:
            super().__init__(lambda module, x: module.extra(x))
            weight = nn.Parameter(torch.zeros(6, 6))
            self.extra = nn.Linear(6, 6)
            self.first.weight = weight
            self.extra.weight = weight

    with empty_weights():
        model = Tied()
    assert model.first.weight is model.extra.weight
    assert capture(model, class_batch(), class_loss).blueprint.aliases == (("extra.weight", "first.weight"),)
