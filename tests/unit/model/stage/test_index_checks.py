"""Indices of the data are checked before an operation meets them, where the device would not survive it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.model.capture.capture import capture
from ravnest.model.stage.program_graph import Setting, find_checks
from ravnest.model.stage.stage_program import StageProgram

CHECKED = Setting(checks_indices=True)


class Tokens(nn.Module):
    """Embeddings of tokens and places, and a table that data chooses from in several ways."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(50, 8), nn.Embedding(12, 8), nn.Linear(8, 50)
        self.register_buffer("table", torch.arange(20.0).reshape(5, 4))

    def forward(self, ids, choice):
        places = self.places(torch.arange(ids.shape[1]))
        out = self.head(self.tokens(ids) + places)
        chosen = self.table[choice] + self.table.index_select(0, choice.abs() % 5)
        return out, chosen


def loss(out, batch):
    logits, chosen = out
    shifted = F.cross_entropy(logits[:, :-1].reshape(-1, 50), batch["labels"][:, 1:].reshape(-1))
    picked = logits.log_softmax(-1).gather(-1, batch["labels"].clamp(min=0)[..., None])
    best = logits.argmax(-1, keepdim=True)  # computed with weights: never out of range
    return shifted - 0.01 * picked.mean() + 0.01 * logits.gather(-1, best).mean() + 0 * chosen.mean()


def batch():
    ids = torch.arange(48).reshape(4, 12) % 50
    labels = ids.clone()
    labels[:, 9:] = -100
    return {"ids": ids, "labels": labels, "choice": torch.tensor([0, 4, -5, 2])}


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(0)
    return capture(Tokens(), batch(), loss)


def run(captured, fields, setting, training=True):
    program = StageProgram(captured.blueprint, setting)
    return program.forward(captured.state, {}, fields, training=training).results["loss"]


@pytest.mark.parametrize("training", [True, False])
def test_good_indices_pass(captured, training):
    assert torch.equal(run(captured, batch(), CHECKED, training), run(captured, batch(), Setting(), training))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("name", "place", "value", "reason"),
    [
        ("ids", (1, 3), 50, "Index 50 is out of bounds"),
        ("ids", (1, 3), -1, "Index -1 is out of bounds"),
        ("labels", (2, 4), 50, "Target 50 is out of bounds"),
        ("labels", (2, 4), -3, "Target -3 is out of bounds"),
        ("labels", (2, 0), 77, "Index 77 is out of bounds"),  # the loss does not see it, the gather does
        ("choice", (1,), 5, "Index 5 is out of bounds"),
        ("choice", (1,), -6, "Index -6 is out of bounds"),
    ],
)
def test_a_bad_one_is_refused_as_a_cpu_would(captured, name, place, value, reason, training):
    fields = batch()
    fields[name][place] = value
    with pytest.raises(IndexError, match=reason):
        run(captured, fields, CHECKED, training)
    with pytest.raises((IndexError, RuntimeError)):
        run(captured, fields, Setting(), training)


def test_what_is_not_of_the_data_is_not_checked(captured):
    program = captured.blueprint.train
    checked = [check.index for checks in find_checks(program).values() for check in checks]
    assert len(checked) == 5  # two tables, tokens, the loss, one gather
    argmax = next(op.outs[0] for op in program.ops if op.name.startswith("aten.argmax"))
    arange = next(op.outs[0] for op in program.ops if op.name.startswith("aten.arange"))
    assert not {argmax, arange} & set(checked)
