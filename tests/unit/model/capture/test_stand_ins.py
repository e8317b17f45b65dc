"""A model without values is compared with its module through stand-ins that take next to no memory."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.errors import CaptureError
from ravnest.model.capture.capture import capture, empty_weights
from ravnest.model.capture.verify import StandIns

Change = Callable[[Tensor], Tensor]


class Blocks(nn.Module):
    """Tokens, blocks, and a head tied to the embedding; `change` acts where it is not exported."""

    def __init__(self, change: Change = lambda x: x, num_words: int = 50) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, num_words, bias=False)
        self.head.weight = self.words.weight
        self.change = change

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + torch.tanh(block(norm(x)))
        if not torch.compiler.is_exporting():
            x = self.change(x)
        return self.head(x)


def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())


def make_batch(length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 50, (4, length), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "labels": ids.clone()}


def make(change: Change, num_words: int) -> Blocks:
    with empty_weights():
        return Blocks(change, num_words)


SIZES = {"small": (50, 8), "costly": (300_000, 1024)}  # of the vocabulary, and of rows


@pytest.mark.parametrize("size", SIZES)
def test_a_model_without_values_is_compared_and_stays_without(size):
    num_words, length = SIZES[size]
    model = make(lambda x: x, num_words)
    (note,) = capture(model, make_batch(length), loss).notes
    assert "compared with the module once" in note
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.words.weight


FAULTS: dict[str, Change] = {
    "another result": lambda x: x * 1.1,
    "another gradient": lambda x: x.detach() + 1.5 * (x - x.detach()),
    "no gradient": lambda x: x.detach(),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_computes_something_else_is_refused(fault, size):
    num_words, length = SIZES[size]
    with pytest.raises(CaptureError, match="not the same as the module"):
        capture(make(FAULTS[fault], num_words), make_batch(length), loss)


def test_a_module_that_cannot_run_with_stand_ins_is_told_not_to_be_compared():
    def refuse(_: Tensor) -> Tensor:
        raise ValueError("not with these weights")

    (note,) = capture(make(refuse, 50), make_batch(8), loss).notes
    assert "was not compared" in note


def test_stand_ins_take_no_more_than_the_largest_tensor_and_its_gains():
    with empty_weights():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    stand_ins = StandIns(model)
    with stand_ins.standing_in():
        made = list(model.parameters())
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in made}
        assert not any(each.is_meta for each in made)
    assert sum(storages.values()) <= 4 * (64 * 64 + 64)
    assert all(each.is_meta for each in model.parameters())
