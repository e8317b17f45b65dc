"""Adapters trained through two stages are those of a plain peft loop, and load in peft with its logits."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.line_of_stages import Line
from support.tiny_llama import sums, write_tiny_llama
from torch import nn

from ravnest.cli.main import program
from ravnest.errors import ConfigError, WeightsError
from ravnest.model.state.state_source import LayeredSource, MemorySource, SourceTensors, read_tensor
from ravnest.requester.finetuning.finetune import make_finetuning, token_loss
from ravnest.requester.finetuning.merging import merge_adapter
from ravnest.requester.first_weights import find_first_weights
from ravnest.requester.result import Result
from ravnest.requester.run_folder import find_result

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NUM_STEPS, RATE, BATCH = 4, 1e-2, 4
SETTINGS = {"rank": 4, "batch_size": BATCH, "learning_rate": RATE, "max_length": 32, "val_share": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def packed(folder):
    """A job of packed rows, captured, with the first weights of its files."""
    given = make_finetuning(folder, sums(40), {**SETTINGS, "pack": True})
    captured = given.job.capture()
    return given, captured, find_first_weights(given.job, captured, None)


@pytest.fixture(scope="module")
def plain(folder, packed):
    """A loop of peft in one process over the same batches; returns the model and its losses."""
    given, _, _ = packed
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    first = {name: tensor for name, tensor in given.job.model.state_dict().items() if "lora_" in name}
    assert not model.load_state_dict(first, strict=False).unexpected_keys
    model.train()
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], RATE, weight_decay=0)
    losses = []
    for batch in batches(given):
        taken = {key: batch[key] for key in ("input_ids", "position_ids")}
        loss = token_loss(model(**taken, use_cache=False), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.eval(), losses


@pytest.fixture(scope="module")
def trained(packed):
    """The same through two stages; returns the result and its losses."""
    given, captured, first = packed
    state = {entry.name: read_tensor(first, entry.name) for entry in captured.blueprint.state}
    line = Line(
        replace(captured, state=state), [captured.blueprint.num_positions // 2], given.job.settings(captured)
    )
    losses = [line.step(number, batch, RATE).item() for number, batch in enumerate(batches(given))]
    changed = {name: tensor for name, tensor in line.state().items() if "lora_" in name}
    found = SourceTensors(LayeredSource(MemorySource(changed), first))
    return Result(given.job.model, captured.blueprint, found), losses


def batches(given):
    samples = given.job.samples
    assert len(samples) >= BATCH
    return [samples.batch([(number + row) % len(samples) for row in range(BATCH)]) for number in range(4)]


def logits(model, folder):
    rows = make_finetuning(folder, sums(3), {**SETTINGS, "val_share": 0.0}).tables[0]
    with torch.no_grad():
        return model.eval()(input_ids=torch.from_numpy(rows.input_ids)).logits


def test_two_stages_learn_what_a_peft_loop_learns(packed, plain, trained):
    (model, losses), (result, apart) = plain, trained
    assert apart == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]
    for name, truth in model.state_dict().items():
        if "lora_" in name:
            torch.testing.assert_close(result.state[name], truth, rtol=1e-4, atol=1e-6)


def test_a_base_that_lacks_a_tensor_is_not_drawn_by_chance(folder, packed, tmp_path):
    _, captured, _ = packed
    short = shutil.copytree(folder, tmp_path / "short")
    tensors = load_file(short / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, short / "model.safetensors", {"format": "pt"})
    job = make_finetuning(short, sums(40), {**SETTINGS, "pack": True}).job
    told = r"lacks 1 tensor of the model \(model.layers.1.mlp.up_proj.weight\).*; give the whole"
    with pytest.raises(WeightsError, match=told):
        find_first_weights(job, captured, None)


def test_nothing_but_adapters_is_trained_or_in_memory(packed):
    given, captured, _ = packed
    for entry in captured.blueprint.state:
        is_adapter = ".lora_" in entry.name
        assert entry.is_trainable is is_adapter
        assert captured.state[entry.name].is_meta is not (is_adapter or entry.kind != "parameter")
    assert not given.job.model.get_base_model().lm_head.weight.requires_grad


def test_the_adapter_loads_in_peft_with_the_same_logits(folder, plain, trained, tmp_path):
    place = trained[0].save_pretrained(tmp_path / "adapter")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in place.iterdir()}
    config = json.loads((place / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    assert (place / "adapter_model.safetensors").stat().st_size < 40_000, "no base is in it"
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base, place)
    torch.testing.assert_close(logits(loaded, folder), logits(plain[0], folder), rtol=1e-4, atol=1e-5)
    assert find_result(place / "model.safetensors") == place


@pytest.mark.parametrize("most", [2_000_000_000, 4_000])
def test_a_merged_model_needs_no_peft_and_has_the_same_logits(folder, plain, trained, tmp_path, most):
    adapter = trained[0].save_pretrained(tmp_path / "adapter")
    merged = merge_adapter(folder, adapter, tmp_path / "merged", max_shard_bytes=most)
    assert (merged / "model.safetensors").exists() is (most > 1e6)
    model = transformers.AutoModelForCausalLM.from_pretrained(merged)
    transformers.AutoTokenizer.from_pretrained(merged)
    torch.testing.assert_close(logits(model, folder), logits(plain[0], folder), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"has files in it"):
        merge_adapter(folder, adapter, merged)


def test_what_cannot_be_merged_is_said(folder, trained, tmp_path):
    adapter = trained[0].save_pretrained(tmp_path / "adapter")
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    with pytest.raises(ConfigError, match=r"no plain LoRA \(use_dora\)"):
        merge_adapter(folder, adapter, tmp_path / "merged")
    config.write_text("{")
    with pytest.raises(ConfigError, match=r"adapter_config.json"):
        merge_adapter(folder, adapter, tmp_path / "merged")
    with pytest.raises(ConfigError, match=r"is no folder"):
        merge_adapter(folder, tmp_path / "none", tmp_path / "merged")


def test_packed_rows_have_the_loss_of_the_same_rows_apart(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for pack in (False, True):
        table = make_finetuning(folder, sums(12), {**SETTINGS, "pack": pack}).tables[0]
        batch = {name: torch.from_numpy(column) for name, column in table.fields.items()}
        taken = {key: batch[key] for key in ("input_ids", "position_ids") if key in batch}
        found.append(token_loss(model(**taken, use_cache=False), batch).item())
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_loss_of_a_batch_is_the_mean_of_its_parts(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    rows = [*sums(6), {"prompt": "a", "completion": "a much longer answer"}, {"text": "some text"}]
    table = make_finetuning(folder, rows, SETTINGS).tables[0]
    batch = {name: torch.from_numpy(column) for name, column in table.fields.items()}

    def loss_of(part):
        own = {name: column[part] for name, column in batch.items()}
        return token_loss(model(input_ids=own["input_ids"]), own).item()

    parts = [loss_of(slice(start, start + 2)) for start in range(0, 8, 2)]
    assert loss_of(slice(None)) == pytest.approx(sum(parts) / 4, rel=1e-5)
    own = nn.functional.cross_entropy(
        model(input_ids=batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten()
    )
    assert loss_of(slice(None)) == pytest.approx(own.item(), rel=1e-5), "over all data it is torch's own mean"


def test_updates_may_be_counted_in_place_of_epochs(folder):
    job = make_finetuning(folder, sums(10), {**SETTINGS, "max_steps": 7}).job
    assert (job.max_steps, len(job.samples)) == (7, 10)


def test_what_a_job_can_be_told_a_finetuning_can_be_told(folder):
    settings = {"evaluate_every": 2, "ema": 0.99, "precision": "bf16", "weight_decay": 0.1}
    job = make_finetuning(folder, sums(10), {**SETTINGS, **settings}).job
    assert (job.evaluate_every, job.ema, job.precision) == (2, 0.99, "bf16")
    assert [group["weight_decay"] for group in job.optimizer.param_groups] == [0.1]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rnak": 4}, r"finetune has no setting 'rnak'; did you mean rank"),
        ({"rank": 0}, r"rank is 0; give 1 to 4096"),
        ({"alpha": -1}, r"alpha is -1"),
        ({"dropout": 1.0}, r"dropout is 1.0"),
        ({"targets": []}, r"targets is \[\]"),
        ({"targets": ["no_such_layer"]}, r"cannot be put at \['no_such_layer'\]; linear layers are .*q_proj"),
        ({"max_length": 65}, r"max_length is 65, but the model has 64 positions"),
        ({"max_length": 1}, r"max_length is 1; give tokens"),
        ({"val_share": 1.0}, r"val_share is 1.0"),
        ({"learning_rate": 0}, r"learning_rate is 0"),
        ({"weight_decay": -1}, r"weight_decay is -1"),
        ({"base": "int3"}, r"base is 'int3'; give fp32, bf16, int8, int4"),
        ({"epochs": 0}, r"epochs is 0"),
        ({"max_steps": 0}, r"max_steps is 0"),
        ({"evaluate_every": 0}, r"evaluate_every is 0; give a whole number of updates"),
        ({"ema": 1}, r"ema is 1; give a number between 0 and 1"),
        ({"precision": "fp8"}, r"precision is 'fp8'; give auto, fp32 or bf16"),
        ({"schedule": "step"}, r"schedule is 'step'; give cosine, linear, constant"),
        ({"columns": {"text": "nope"}}, r"record 1 of the data has no text|columns"),
    ],
)
def test_settings_that_make_no_sense_are_refused(folder, settings, told):
    rows = [{"text": "some text"}] if "columns" not in settings else [{"body": "some text"}]
    with pytest.raises(ConfigError, match=told):
        _ = make_finetuning(folder, rows, settings).job


def test_a_tokenizer_with_more_words_than_the_model_is_refused(folder, tmp_path):
    place = copy_folder(folder, tmp_path / "model")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "vocab_size": 10}))
    with pytest.raises(ConfigError, match=r"its tokenizer gives token \d+, and the model has 10 words"):
        _ = make_finetuning(place, [{"text": "some text"}], {}).job


def test_rows_of_a_model_without_positions_are_not_packed(folder, tmp_path):
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)
    place = copy_folder(folder, tmp_path / "mamba")
    transformers.MambaForCausalLM(config).save_pretrained(place)
    with pytest.raises(ConfigError, match=r"texts in one row of .* would see each other; leave pack out"):
        _ = make_finetuning(place, [{"text": "some text"}], {"pack": True, "targets": ["in_proj"]}).job


def copy_folder(folder, place):
    place.mkdir()
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


def test_data_without_anything_to_learn_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"the data has nothing to learn from"):
        _ = make_finetuning(folder, [{"text": ""}], {}).job
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(ConfigError, match=r"the data \(.*none\.jsonl\) has nothing to learn from"):
        _ = make_finetuning(folder, tmp_path / "none.jsonl", {}).job


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda place: (place / "config.json").unlink(), r"has no config.json; give a folder with"),
        (lambda place: (place / "config.json").write_text("{"), r"config.json is of no model"),
        (lambda place: (place / "config.json").write_text('{"model_type": "zork"}'), r"is of no model"),
        (lambda place: (place / "model.safetensors").unlink(), r"has no weights to begin with"),
        (
            lambda place: (place / "model.safetensors").rename(place / "pytorch_model.bin"),
            r"its weights are pickled, which is never loaded",
        ),
        (
            lambda place: [(place / f"tokenizer{end}.json").unlink() for end in ("", "_config")],
            r"has no tokenizer that can be read",
        ),
        (
            lambda place: (place / "config.json").write_text(
                json.dumps(
                    {
                        **json.loads((place / "config.json").read_text()),
                        "quantization_config": {"quant_method": "gptq", "bits": 4},
                    }
                )
            ),
            r"are quantised already; give the original",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path, folder, change, told):
    place = copy_folder(folder, tmp_path / "model")
    change(place)
    with pytest.raises(ConfigError, match=told):
        _ = make_finetuning(place, [{"text": "some text"}], {}).source


@pytest.mark.parametrize("name", ["no/such/folder/here", "acme/not-in-the-cache"])
def test_a_model_that_is_not_here_is_refused(name):
    with pytest.raises(ConfigError, match=r"does not exist|nor in the local cache; fetch it first"):
        _ = make_finetuning(name, [{"text": "some text"}], {}).source


def test_a_dry_run_says_what_it_will_take_and_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny_llama(tmp_path / "tiny", num_layers=1)
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(40)))
    asked = ["tiny", "--data", "sums.jsonl", "--dry-run", "--population", "home:3", "--epochs", "2", "--json"]
    done = CliRunner().invoke(program, ["finetune", *asked])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    cost = found["finetune"]
    assert (found["schema"], cost["rows"], cost["updates"]) == ("ravnest.finetune/1", 76, 6)
    assert cost["seconds"] == pytest.approx(76 / found["predicted"]["samples_per_second"])
    assert 0 < cost["adapter_bytes"] < cost["first_delivery_bytes"]
    assert cost["first_delivery_seconds"] == pytest.approx(cost["first_delivery_bytes"] / 5e6)
    assert not (tmp_path / "runs").exists()


def test_stopping_early_needs_rows_to_validate_with(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(4)))
    asked = [str(folder), "--data", "few.jsonl", "--local", "1", "--early-stop", "2"]
    done = CliRunner().invoke(program, ["finetune", *asked])
    assert done.exit_code == 3
    assert "--early-stop needs rows to validate with; give --val-data or --val-share" in done.output


def test_a_base_in_bf16_stays_so_unless_the_requester_says_otherwise(folder, tmp_path):
    narrow = write_tiny_llama(tmp_path / "narrow", num_layers=1, is_bf16=True)
    for place, settings, frozen in (
        (folder, {}, None),
        (narrow, {}, "bf16"),
        (narrow, {"base": "int4"}, "int4"),
    ):
        assert make_finetuning(place, sums(4), settings).job.frozen == frozen
