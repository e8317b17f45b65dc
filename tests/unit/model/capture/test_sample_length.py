"""Rows of tokens are shortened for the self-test of a large model, and faults are found all the same."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.errors import CaptureError
from ravnest.model.capture.capture import Captured, capture
from ravnest.model.capture.sample_length import SHORT, find_rows, is_costly
from ravnest.model.stage.stage_program import build_stage_program

LENGTH = 1024
VOCABULARY = 500_000  # the embedding is what makes it costly: it takes parameters but no time
Change = Callable[["Tokens", Tensor], Tensor]


class Tokens(nn.Module):
    """A small causal model over tokens; `change` is what a user may have put in its middle."""

    def __init__(self, change: Change = lambda _, x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(VOCABULARY, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11)
        self.change = change
        self.lengths: set[int] = set()  # of rows that it was run on, not exported with, nor without memory
        self.register_buffer("table", torch.randn(LENGTH, 8))
        self.kept: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        if type(ids) is Tensor and not torch.compiler.is_exporting():
            self.lengths.add(ids.shape[1])
        x = self.words(ids)
        x = torch.cumsum(self.mix(x), 1) / 10
        return self.out(torch.tanh(self.change(self, x)))


def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())


def make_batch(length: int = LENGTH) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (4, length), generator=draw)
    return {"ids": ids, "labels": torch.randint(0, 11, (4, length), generator=draw)}


def run_whole(captured: Captured, batch: dict[str, Tensor]) -> float:
    program = build_stage_program(captured.blueprint)
    return program.forward(captured.state, {}, batch, training=True).results["loss"].item()


def assert_captured(model: Tokens) -> Captured:
    captured = capture(model, batch := make_batch(), loss)
    torch.testing.assert_close(run_whole(captured, batch), loss(model(batch["ids"]), batch).item())
    return captured


def test_a_large_model_is_tested_on_short_rows_and_captured_for_whole_ones():
    seen: set[int] = set()
    model = Tokens(lambda module, x: seen.update(module.lengths) or x)
    assert is_costly(sum(each.numel() for each in model.parameters()), make_batch())
    captured = capture(model, make_batch(), loss)
    assert seen == {SHORT}
    (value, _), *_ = captured.blueprint.train.fields
    assert captured.blueprint.train.values[value].shape[1] == LENGTH
    assert_captured(Tokens())


LENGTHS = {
    "another branch for long rows": (lambda _, x: x * 2 if x.shape[1] > 512 else x, 513),
    "a table of one length": (lambda module, x: x + module.table, LENGTH),
    "a number out of the length": (lambda _, x: x / x.shape[1] ** 0.5, LENGTH),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_self_test_takes_rows_as_short_as_the_model_allows(name):
    change, shortest = LENGTHS[name]
    seen: list[int] = []

    def note(module: Tokens, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            seen.append(int(x.shape[1]))
        return change(module, x)

    assert_captured(Tokens(note))
    assert shortest in seen


def test_a_model_that_refuses_short_rows_is_tested_on_whole_ones():
    def refuse(_: Tokens, x: Tensor) -> Tensor:
        if x.shape[1] < LENGTH:
            raise ValueError("rows of 1024, please")
        return x

    assert_captured(Tokens(refuse))


def remember(module: Tokens, x: Tensor) -> Tensor:
    module.kept.append(x.detach())
    return x + module.kept[0].mean() * len(module.kept)


def with_hook(attach: Callable[[Tokens], object]) -> Tokens:
    model = Tokens()
    attach(model)
    return model


FAULTS = {
    "a memory": lambda: Tokens(remember),
    "a batch of one": lambda: Tokens(lambda _, x: x * 2 if x.shape[0] == 1 else x),
    "no gradient for a batch of one": lambda: Tokens(lambda _, x: x.detach() if x.shape[0] == 1 else x),
    "samples compared": lambda: Tokens(lambda _, x: x - x.mean(0) if x.shape[0] > 1 else x),
    "a gradient hook": lambda: with_hook(lambda model: model.mix.weight.register_hook(lambda g: g * 2)),
    "a backward hook": lambda: with_hook(
        lambda model: model.mix.register_full_backward_hook(lambda _, given, __: (given[0] * 2,))
    ),
    "a number that is not finite": lambda: with_hook(
        lambda model: nn.init.constant_(model.out.weight, float("nan"))
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found_on_short_rows_too(name):
    with pytest.raises(CaptureError):
        capture(FAULTS[name](), make_batch(), loss)


@pytest.mark.parametrize(("field", "value"), [("ids", VOCABULARY), ("labels", 11)])
def test_a_token_out_of_range_is_found_wherever_it_stands(field, value):
    batch = make_batch()
    batch[field][3, 777] = value
    with pytest.raises(CaptureError, match=r"out of (range|bounds)"):
        capture(Tokens(), batch, loss)


def test_short_rows_keep_the_extremes_and_the_share_of_padding():
    batch = make_batch()
    batch["labels"][1, 600:] = -100
    batch["ids"][2, 5] = 4_321
    rows = find_rows(batch)
    assert rows is not None
    short = rows.take(batch, SHORT)
    assert {name: tuple(each.shape) for name, each in short.items()} == dict.fromkeys(batch, (4, SHORT))
    assert short["ids"].max() == 4_321
    assert 0.25 <= float((short["labels"][1] == -100).double().mean()) <= 0.6
    assert find_rows({"x": torch.randn(4, 99)}) is None
    assert find_rows({"ids": batch["ids"], "labels": batch["labels"][:, 1:]}) is None
