"""Texts with caches: new places alone give what whole rows give, or the stage says why it takes those."""

from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.model.blueprint.cached_program import make_cached_program
from ravnest.model.blueprint.place_axes import PlaceAxis, find_axis
from ravnest.model.blueprint.program import Size, TensorType
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import capture
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.model.stage.stage_texts import NewPlaces, StageTexts, TextCache, write_for_new_places
from tests.support.text_line import TextLine

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(120),  # capture of a Hugging Face model
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
LENGTH, NUM_WORDS, WIDTH = 12, 17, 8


class Block(nn.Module):
    """One attention whose places see what `sees` says, and what else `extra` does with the places."""

    def __init__(self, sees: str, extra: str) -> None:
        super().__init__()
        self.mix, self.sees, self.extra = nn.Linear(WIDTH, 3 * WIDTH), sees, extra
        self.norm = nn.LayerNorm(WIDTH)
        bias = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
        self.register_buffer("bias", bias if sees == "bias" else torch.ones(LENGTH, LENGTH, dtype=torch.bool))

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).view(x.shape[0], LENGTH, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mask = None if self.sees == "causal" else self.bias
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.sees == "causal")
        x = x + y.transpose(1, 2).reshape(x.shape)
        if self.extra == "sum":
            x = x + x.cumsum(1)
        if self.extra == "flat":
            x = x.reshape(-1, WIDTH).tanh().reshape(x.shape)
        return x


class Writer(nn.Module):
    def __init__(self, sees="causal", extra="") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.places = nn.Embedding(NUM_WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(sees, extra) for _ in range(2)])
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_rows(num_rows):
    return torch.randint(NUM_WORDS, (num_rows, LENGTH), generator=torch.Generator().manual_seed(3))


@cache
def capture_writer(sees="causal", extra=""):
    rows = make_rows(4)
    model = Writer(sees, extra).eval()
    find_loss = lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())  # noqa: E731
    return model, capture(model, {"ids": rows, "y": rows.roll(-1, 1)}, find_loss), "ids"


@cache
def capture_known(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    words = {"vocab_size": NUM_WORDS, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=2, n_positions=LENGTH, **words)
        model = transformers.GPT2LMHeadModel(config).eval()
    else:
        shape = {"hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads, **words)).eval()
    rows = make_rows(4)
    batch = {"input_ids": rows, "labels": rows.clone(), "attention_mask": torch.ones_like(rows)}
    return model, capture(model, batch, self_test=False), "input_ids"


def run_stages(captured, field, cuts):
    """Yield new places of a text and their logits, step by step."""
    line = TextLine(
        [slice_blueprint(captured.blueprint, *each) for each in pairwise(cuts)], captured.state, LENGTH
    )
    rows = make_rows(2)
    for first, end in STEPS:
        places = NewPlaces(2, first, end)
        yield places, line.run({field: rows, "attention_mask": torch.ones_like(rows)}, places)
        assert not line.reasons
        assert all(each.covered == end for each in line.caches)


STEPS = ((0, 5), (5, 6), (6, 7), (5, 9), (9, LENGTH))  # rows of several lengths have some places run again


@pytest.mark.parametrize("kind", ["gpt2", "llama", "own", "bias", "flat"])
def test_new_places_give_what_whole_rows_give_wherever_the_line_is_cut(kind):
    own = {"own": ("causal",), "bias": ("bias",), "flat": ("causal", "flat")}
    model, captured, field = capture_writer(*own[kind]) if kind in own else capture_known(kind)
    with torch.no_grad():
        alone = model(make_rows(2))
    alone = getattr(alone, "logits", alone)
    count = captured.blueprint.num_positions
    for cuts in [(0, count), *((0, cut, count) for cut in range(1, count)), (0, 2, count // 2 + 1, count)]:
        for places, logits in run_stages(captured, field, cuts):
            torch.testing.assert_close(logits, alone[:, places.first : places.end], rtol=1e-4, atol=1e-4)


def test_a_step_takes_the_work_of_its_new_places():
    _, captured, _ = capture_known("llama")
    program = write_for_new_places(captured.blueprint, LENGTH)
    assert len(program.slots) == 4, "keys and values of two attentions"
    assert program.cache_bytes(3) == 3 * LENGTH * 4 * WIDTH * 4, "rows, places, slots, numbers, bytes"
    # Tables of sines and the mask of all places are made once for a text.
    made = {op.name.split(".")[1] for op in program.tables.ops}
    assert {"cos", "sin", "arange"} <= made
    assert not {"cos", "sin", "arange"} & {op.name.split(".")[1] for op in program.program.ops}
    grown = [op for op in program.program.ops if op.name == "aten.reshape.default"]
    assert grown
    assert all(LENGTH not in dict(op.arguments)["shape"] for op in grown)


@pytest.mark.parametrize(
    ("sees", "extra", "told"),
    [
        ("causal", "sum", "aten.cumsum.default works along the places"),
        ("bool", "", "new places alone give other numbers than whole rows"),  # its mask hides nothing
    ],
)
def test_a_stage_that_mixes_places_says_so_and_takes_whole_rows(sees, extra, told):
    model, captured, field = capture_writer(sees, extra)
    text = StageTexts(build_stage_program(captured.blueprint), LENGTH)
    state = {name: tensor.detach() for name, tensor in captured.state.items()}
    rows = make_rows(2)
    with torch.no_grad():
        for first, end in ((0, 4), (4, 5)):
            passed = text.run(state, {}, {field: rows}, NewPlaces(2, first, end), TextCache())
            torch.testing.assert_close(passed.results["logits"], model(rows)[:, first:end])
    assert told in text.reason
    assert text.cache_bytes(2) == 0
    assert captured.blueprint.num_positions > 1


def test_rows_that_lie_end_to_end_have_their_places_found():
    length = 6
    kinds = {
        (Size(length), 4): PlaceAxis(0, True),
        (Size(1), length, 4): PlaceAxis(1),
        (Size(1), 2, length, 4): PlaceAxis(2),
        (Size(1), length, length): PlaceAxis(1),
        (Size(1), length, 2, length): PlaceAxis(1),
        (Size(1), 1, length, length): None,  # a mask, or heads as wide as rows are long: two could be it
        (Size(1), length, length, 4): None,
        (Size(1), 4): None,
        (): None,
    }
    for shape, axis in kinds.items():
        kind = TensorType("float32", shape)
        assert find_axis(kind, length) == axis
        if axis is not None:
            places, whole = NewPlaces(3, 2, 5), torch.zeros(kind.shape_at(3))
            assert places.take(whole, axis).shape == places.shape(kind, axis)
            places.take(whole, axis).fill_(1.0)  # a view
            assert int(whole.sum()) == whole.numel() // length * 3


def test_rows_of_one_place_have_no_caches():
    _, captured, _ = capture_writer()
    assert make_cached_program(captured.blueprint.evaluate, 1, {"ids"}, ()) == "rows have one place"
