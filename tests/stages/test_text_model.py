"""Which captured models write text, what a stage does for a word, and sentences for those that do not."""

import asyncio
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.codec import decode_tensor, describe, encode_tensor
from ravnest.config import FrozenFormat, WireFormat
from ravnest.errors import ConfigError, ProtocolError, UnsafeBlueprint
from ravnest.ids import NodeId
from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
from ravnest.model.blueprint.frozen_storage import choose_storage
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import capture
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.model.stage.stage_texts import NewPlaces
from ravnest.model.stage.text_model import find_text_model, make_generation_program
from ravnest.model.state.quantisation import dequantise, quantise
from ravnest.peer.pacing import Device
from ravnest.peer.stage_generation import StageGeneration, choose_words
from ravnest.plan.types import Stage
from ravnest.protocol.generation import GenerationEnd, GenerationFault, GenerationStep, GenerationValues
from ravnest.protocol.placement import StagePosition
from ravnest.requester.generation import Sampling
from ravnest.requester.live_texts import find_writer
from ravnest.requester.text_codec import TextCodec
from tests.support.text_line import TextLine

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, NUM_WORDS = 8, 11


class Writer(nn.Module):
    """Each place sees those before it, or all; `kind` is what else it takes."""

    def __init__(self, is_causal: bool = True, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(NUM_WORDS, 12), nn.Embedding(LENGTH, 12)
        self.mix, self.head = nn.Linear(12, 36), nn.Linear(12, NUM_WORDS)
        self.is_causal, self.kind = is_causal, kind

    def forward(self, ids, extra=None):
        x = self.words(ids) + self.places.weight
        q, k, v = self.mix(x).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal).squeeze(1)
        x = x + extra.unsqueeze(-1) if self.kind == "extra" else x
        out = self.head(x)
        return out.mean(1) if self.kind == "class" else (out, ids) if self.kind == "tuple" else out


def make(is_causal=True, kind=""):
    rows = torch.randint(NUM_WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"ids": rows, "y": rows.roll(-1, 1)}
    if kind == "extra":
        batch["extra"] = torch.rand(4, LENGTH)

    def loss(out, batch):
        out = out[0] if isinstance(out, tuple) else out
        return (
            F.cross_entropy(out, batch["y"][:, 0])
            if kind == "class"
            else F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())
        )

    model = Writer(is_causal, kind).eval()
    return model, capture(model, batch, loss)


def write_with(model, captured):
    return find_writer(captured, model, lambda _: TextCodec(list, str))


@pytest.mark.parametrize("kind", ["", "tuple"])
def test_a_language_model_is_known_by_its_logits(kind):
    model, captured = make(kind=kind)
    found = write_with(model, captured).model
    assert (found.token_field, found.length, found.num_words) == ("ids", LENGTH, NUM_WORDS)
    assert read_blueprint(write_blueprint(captured.blueprint)) == captured.blueprint
    assert captured.blueprint.train.logits is None
    tokens = torch.randint(NUM_WORDS, (2, LENGTH))
    alone = model(tokens)
    alone = alone[0] if kind else alone
    values, count = {}, captured.blueprint.num_positions
    for start, stop in ((0, 2), (2, count)):
        stage = slice_blueprint(captured.blueprint, start, stop)
        assert (stage.evaluate.logits is None) == (stop < count), "only the last stage has them"
        program = make_generation_program(stage.evaluate)
        assert "y" not in dict(map(reversed, program.fields)), "a text has no labels"
        with torch.no_grad():
            passed = build_stage_program(stage).forward_text(captured.state, values, {"ids": tokens})
        values = passed.outputs
    torch.testing.assert_close(passed.results["logits"], alone)


@pytest.mark.parametrize(
    ("is_causal", "kind", "told"),
    [
        (True, "class", r"gives no logits of \(rows, places, words\)"),
        (True, "extra", r"needs the field 'extra' beside the tokens"),
        (False, "", r"looks at what comes after a token"),
    ],
)
def test_a_model_that_is_none_is_told_in_a_sentence(is_causal, kind, told):
    with pytest.raises(ConfigError, match=f"this job writes no text: .*{told}"):
        write_with(*make(is_causal, kind))


def test_foreign_logits_are_checked():
    _, captured = make()
    program = captured.blueprint.evaluate
    for value in (999_999, program.fields[0][0]):
        strange = replace(captured.blueprint, evaluate=replace(program, logits=value))
        with pytest.raises(UnsafeBlueprint, match="logits"):
            read_blueprint(write_blueprint(strange))
    assert find_text_model(captured.blueprint).length == LENGTH


def test_a_leaf_names_the_likeliest_words_and_equal_ones_by_number():
    said = torch.tensor([[[0.0, 3.0, 1.0, 3.0], [9.0, 0.0, 0.0, 0.0]]])
    (row,) = choose_words(said, [1], 3)
    assert (row.words, row.logits) == ((1, 3, 2), (3.0, 3.0, 1.0))
    assert choose_words(said, [2], 3)[0].words[0] == 0
    assert choose_words(said, [0], 3) == "a row has no token"
    assert (
        choose_words(said * float("nan"), [1], 3)
        == "what the model says of the next word is no finite number"
    )


def make_step(number, step, first, ends):
    fields = torch.zeros(len(ends), LENGTH, dtype=torch.uint8)
    spec = describe(fields, WireFormat.FP32)
    about = (1, number, step, LENGTH, first, tuple(ends), 4)
    return GenerationStep(*about, (("ids", spec),)), [encode_tensor(fields, WireFormat.FP32)]


def make_values(stage, number, step, shape):
    value = torch.zeros(shape)
    found = GenerationValues(1, number, step, ((stage.evaluate.inputs[0], describe(value, WireFormat.FP32)),))
    return found, [encode_tensor(value, WireFormat.FP32)]


def test_a_stage_refuses_values_that_fit_no_step_and_names_who_sent_them():
    _, captured = make()
    stage = slice_blueprint(captured.blueprint, 2, captured.blueprint.num_positions)
    assert len(stage.evaluate.inputs) == 1
    rest = stage.evaluate.values[stage.evaluate.inputs[0]].shape[2:]
    position = StagePosition(1, 0, Stage(NodeId("b"), 2, stage.num_positions), (NodeId("a"), NodeId("b")))
    found = StageGeneration(position, stage, None, Device(lambda: 0.0))
    assert found.receive_step(*make_step(1, 0, 0, [3])) is None
    assert (
        "not the stage before" in found.receive_values(*make_values(stage, 1, 0, (1, 3, *rest)), "c").reason
    )
    with pytest.raises(ProtocolError, match="not its own"):
        found.receive_values(*make_values(stage, 1, 0, (1, 4, *rest)), "a")
    # Values may come before their step: then it is not the hub that is at fault.
    assert found.receive_values(*make_values(stage, 2, 0, (1, 9, *rest)), "a") is None
    complaint, fault = found.receive_step(*make_step(2, 0, 0, [3]))
    assert (complaint.message.node, type(fault.message)) == ("a", GenerationFault)
    assert found.receive_values(*make_values(stage, 3, 1, (1, 1, *rest)), "a") is None
    assert "without those before" in found.receive_step(*make_step(3, 1, 3, [4]))[1].message.reason
    assert found.next_work() is None
    assert found.receive_step(*make_step(4, 0, 0, [3])) is None
    assert found.receive_values(*make_values(stage, 4, 0, (1, 3, *rest)), "a") is None
    assert found.next_work() is not None
    assert "was here before" in found.receive_step(*make_step(4, 0, 0, [3])).reason
    (told,) = found.receive_step(*make_step(5, 0, 3, [3]))
    assert told.message.reason == "a step has no place in its rows"
    found.end(GenerationEnd(1, 4))
    for number in range(100, 140):
        found.receive_values(*make_values(stage, number, 0, (1, 3, *rest)), "a")
    assert found.num_held <= 16, "a neighbour cannot fill this PC's memory"


class OneStage:
    """A stage with all weights, as the engine shows it to texts."""

    def __init__(self, captured) -> None:
        self.program = build_stage_program(captured.blueprint)
        self._state = {name: tensor.detach() for name, tensor in captured.state.items()}

    def generate(self, number, inputs, fields, run):
        with torch.no_grad():
            return run(self._state, inputs, fields)


def test_texts_that_find_no_room_for_a_cache_are_written_all_the_same():
    _, captured = make()
    position = StagePosition(1, 0, Stage(NodeId("a"), 0, captured.blueprint.num_positions), (NodeId("a"),))
    one_text = 2 * LENGTH * 12 * 4  # keys and values of one row
    stages = {
        most: StageGeneration(position, captured.blueprint, OneStage(captured), Device(lambda: 0.0), most)
        for most in (0, one_text)
    }

    def write(stage, number, count=3):
        said = []
        for step in range(count):
            assert stage.receive_step(*make_step(number, step, 2 + step if step else 0, [3 + step])) is None
            (answer,) = stage.next_work()
            said.append(answer.message.rows)
        return said

    texts = [write(stage, number) for stage in stages.values() for number in (1, 2)]
    assert [stage.num_cached for stage in stages.values()] == [0, 1]
    for other in texts[1:]:
        for one, two in zip(texts[0], other, strict=True):
            assert one[0].words == two[0].words
            assert one[0].logits == pytest.approx(two[0].logits, abs=1e-5)
    roomy = stages[one_text]
    roomy.end(GenerationEnd(1, 1))
    assert write(roomy, 3)[0] == texts[2][0]
    assert roomy.num_cached == 1, "what was forgotten makes room"


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
def test_adapters_on_a_base_in_four_bits_write_what_the_dequantised_model_writes():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(2)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "initializer_range": 0.2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    words = {"vocab_size": 80, "bos_token_id": None, "eos_token_id": None}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads, **words))
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora).eval()
    rows = torch.randint(80, (4, 12))
    captured = capture(model, {"input_ids": rows, "labels": rows.clone()}, self_test=False)
    blueprint = choose_storage(captured.blueprint, FrozenFormat.INT4)
    stored = {entry.name: entry for entry in blueprint.state if entry.storage is not FrozenFormat.FP32}
    assert FrozenFormat.INT4 in {entry.storage for entry in stored.values()}
    state, own = dict(captured.state), dict(model.named_parameters())
    for name, entry in stored.items():
        is_bf16 = entry.storage is FrozenFormat.BF16
        state[name] = (
            state[name].detach().bfloat16() if is_bf16 else quantise(state[name].detach(), entry.storage)
        )
        exact = (
            dequantise(state[name], entry.storage, entry.shape, torch.float32) if not is_bf16 else state[name]
        )
        own[name].data.copy_(exact)
    stages = [slice_blueprint(blueprint, *each) for each in ((0, 5), (5, 9), (9, blueprint.num_positions))]
    line = TextLine(stages, state, 12)

    async def next_words(rows):
        specs, asked = rows.make_fields(("input_ids",)), rows.asked
        fields = {"input_ids": decode_tensor(specs[1][0], specs[0][0][1]).long()}
        logits = line.run(fields, NewPlaces(len(asked.ends), asked.first, max(asked.ends)))
        return choose_words(logits, [end - asked.first for end in asked.ends], rows.num_choices)

    async def write():
        writer = find_writer(replace(captured, blueprint=blueprint), model, lambda _: TextCodec(list, str))
        pieces = writer.write(next_words, [[3, 9, 4], [7]], Sampling(max_tokens=8))
        return [piece async for piece in pieces]

    found = asyncio.run(write())
    assert not line.reasons, "with caches"
    for row, prompt in enumerate(([3, 9, 4], [7])):
        with torch.no_grad():
            alone = model.generate(
                input_ids=torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0
            )
        assert [token for number, token in found if number == row] == alone[0, len(prompt) :].tolist()
