"""What a model writes: token by token what transformers would have written, and sentences where it cannot."""

import json

import pytest
import torch
from click.testing import CliRunner
from support.tiny_llama import write_tiny_llama

from ravnest.cli.main import program
from ravnest.errors import ConfigError, WeightsError
from ravnest.requester.generation import Sampling, generate, load_writer

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
PROMPT = "3 and 4? "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory, folder):
    place = tmp_path_factory.mktemp("models") / "gpt2"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64, eos_token_id=2
    )
    torch.manual_seed(3)
    transformers.GPT2LMHeadModel(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(7)
    place = tmp_path_factory.mktemp("adapters") / "one"
    peft.get_peft_model(base, config).save_pretrained(place)
    return place


def greedy(folder, adapter=None, count=12):
    """Return what transformers writes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    out = model.eval().generate(input_ids=ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_it_writes_what_transformers_writes_token_for_token(kind, folder, gpt2):
    place = folder if kind == "llama" else gpt2
    pieces = list(generate(place, PROMPT, max_tokens=12))
    assert "".join(pieces) == greedy(place)
    assert len(pieces) > 1


def test_an_adapter_changes_what_is_written_and_names_its_base(folder, adapter):
    wanted = greedy(folder, adapter)
    assert wanted != greedy(folder)
    assert "".join(generate(folder, PROMPT, adapter=adapter, max_tokens=12)) == wanted
    assert "".join(generate(adapter, PROMPT, max_tokens=12)) == wanted


def test_weights_of_a_result_take_the_place_of_the_folders(folder, tmp_path):
    other = write_tiny_llama(tmp_path / "other", is_bf16=True)
    file = other / "model.safetensors"
    writer = load_writer(folder, weights=file)
    assert {parameter.dtype for parameter in writer.model.parameters()} == {torch.bfloat16}
    deeper = write_tiny_llama(tmp_path / "deeper", num_layers=1)
    with pytest.raises(WeightsError, match=r"does not fit .* 'model.layers.1.* is missing"):
        load_writer(folder, weights=deeper)


def test_what_is_drawn_depends_on_the_seed_alone(folder):
    def draw(seed):
        return "".join(generate(folder, PROMPT, max_tokens=20, temperature=1.0, top_p=0.9, seed=seed))

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_top_p_leaves_out_what_is_unlikely():
    logits = torch.tensor([3.0, 2.0, -1.0, -9.0])
    generator = torch.Generator().manual_seed(0)
    drawn = {Sampling(temperature=1.0, top_p=0.9).choose(logits, generator) for _ in range(200)}
    assert drawn == {0, 1}
    assert {Sampling(temperature=1.0, top_p=0.01).choose(logits, generator) for _ in range(20)} == {0}


def test_a_chat_goes_through_the_template(folder):
    assert list(generate(folder, "hi", is_chat=True, max_tokens=4))


def test_what_cannot_be_is_said(folder, adapter, tmp_path):
    with pytest.raises(ConfigError, match=r"takes .* and 10 B of memory are free here; close programs"):
        load_writer(folder, free_bytes=10)
    with pytest.raises(ConfigError, match=r"the prompt has 71 tokens, and the model takes 64 in all"):
        list(generate(folder, "x" * 71))
    with pytest.raises(ConfigError, match=r"give an adapter or weights, not both"):
        generate(folder, PROMPT, adapter=adapter, weights=folder)
    with pytest.raises(ConfigError, match=r"is no adapter; give a folder with adapter_config.json"):
        generate(folder, PROMPT, adapter=tmp_path)
    with pytest.raises(ConfigError, match=r"generate has no setting 'max_token'; there are max_tokens"):
        generate(folder, PROMPT, max_token=3)
    for settings in ({"top_p": 0}, {"temperature": -1}, {"max_tokens": 0}, {"seed": -1}):
        with pytest.raises(ConfigError, match=rf"{next(iter(settings))} is"):
            generate(folder, PROMPT, **settings)
    for content in ("[]", "[" * 40_000, '{"base_model_name_or_path": 3}'):
        (tmp_path / "adapter_config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"adapter_config.json cannot be used: "):
            generate(tmp_path, PROMPT)
        done = CliRunner().invoke(program, ["generate", str(tmp_path), "--prompt", PROMPT])
        assert done.exit_code == 3, done.output


def test_the_command_streams_text_and_tells_the_pace(folder):
    asked = ["generate", str(folder), "--prompt", PROMPT, "--max-tokens", "12"]
    done = CliRunner().invoke(program, asked)
    assert done.exit_code == 0, done.output
    assert done.stdout == greedy(folder) + "\n"
    assert "tokens/s" in done.stderr
    found = json.loads(CliRunner().invoke(program, [*asked, "--json"]).stdout)
    assert (found["text"], found["tokens"]) == (greedy(folder), len(greedy(folder)))
    wrong = CliRunner().invoke(program, ["generate", "no/such/folder", "--prompt", "a"])
    assert (wrong.exit_code, "Traceback" in wrong.output) == (3, False)
