"""Files of Hugging Face become weights by the names and in the form that transformers gives them."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_llama import make_tokenizer, sums

from ravnest.errors import ConfigError, WeightsError
from ravnest.model.blueprint.program import StateEntry
from ravnest.model.state.shards import open_weights
from ravnest.model.state.state_source import FileSource, read_pieces, read_tensor
from ravnest.requester.converted_weights import ConvertedSource, convert_weights
from ravnest.requester.finetuning.base_model import LoraSettings, build_adapted, build_empty, open_base
from ravnest.requester.finetuning.finetune import make_finetuning
from ravnest.requester.finetuning.merging import merge_adapter
from ravnest.requester.first_weights import find_first_weights
from ravnest.requester.generation import load_writer

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2}


def make_config(family):
    match family:
        case "llama":
            return transformers.LlamaConfig(**SIZES)
        case "gpt_neox":  # its head has another name in files
            return transformers.GPTNeoXConfig(**SIZES)
        case "mixtral":  # its experts are files' tensors each, and one of the model
            return transformers.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=3)
        case "deepseek":  # and one of its layers has the names of experts, but none
            narrow = {"moe_intermediate_size": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
            heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "n_group": 1, "topk_group": 1}
            own = {"n_routed_experts": 3, "n_shared_experts": 1, "first_k_dense_replace": 1}
            return transformers.DeepseekV3Config(**SIZES, num_experts_per_tok=2, **narrow, **heads, **own)
        case _:
            return transformers.MambaConfig(vocab_size=48, hidden_size=16, num_hidden_layers=2, state_size=4)


@pytest.fixture
def write(tmp_path):
    def write_family(family):
        folder = tmp_path / family
        with torch.random.fork_rng():
            torch.manual_seed(3)
            transformers.AutoModelForCausalLM.from_config(make_config(family)).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        return folder

    return write_family


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "mixtral", "deepseek"])
def test_weights_are_those_that_transformers_would_load(write, family):
    folder = write(family)
    files, base = FileSource(open_weights(folder)), open_base(folder)
    source = convert_weights(files, build_empty(folder, base.config))
    assert isinstance(source, ConvertedSource) is (family != "llama")
    truth = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert set(source.types) == set(truth)
    for name, tensor in truth.items():
        assert torch.equal(read_tensor(source, name), tensor), name
        assert b"".join(map(bytes, read_pieces(source, name))) == tensor.numpy().tobytes()
    same = convert_weights(source, build_adapted(base, LoraSettings(rank=2), 0))
    assert {name: same.types[name] for name in truth} == source.types  # what is named as today stays


def test_a_job_begins_with_the_head_of_the_files_and_not_with_one_by_chance(write):
    folder = write("gpt_neox")
    job = make_finetuning(folder, sums(24), {"rank": 2, "max_length": 24, "batch_size": 4}).job
    state = dict(job.model.named_parameters())
    entries = tuple(
        StateEntry(name, "parameter", "float32", tuple(each.shape), (0,), each.requires_grad)
        for name, each in state.items()
    )
    captured = SimpleNamespace(state=state, blueprint=SimpleNamespace(state=entries, aliases=()))
    first = find_first_weights(job, captured, None)
    truth = load_file(folder / "model.safetensors")["embed_out.weight"]
    assert torch.equal(read_tensor(first, "base_model.model.lm_head.weight"), truth)


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral"])
def test_what_writes_text_has_them_too(write, family):
    folder = write(family)
    truth = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in load_writer(folder).model.state_dict().items():
        assert torch.equal(tensor, truth[name]), name


def test_experts_that_are_not_all_there_are_refused(write):
    folder = write("mixtral")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    odd = next(name for name in tensors if "experts" in name)
    save_file({**tensors, odd: torch.zeros(3, 3)}, file, {"format": "pt"})
    empty = build_empty(folder, open_base(folder).config)
    with pytest.raises(WeightsError, match=r"cannot be made of .*; fetch the model's files again"):
        convert_weights(FileSource(open_weights(folder)), empty)


@pytest.mark.parametrize("family", ["mixtral", "deepseek", "mamba"])
def test_adapters_lie_beside_linear_layers_alone(write, family):
    model = build_adapted(open_base(write(family)), LoraSettings(rank=2), 0)
    adapted = {name.split(".lora_")[0] for name, _ in model.named_parameters() if "lora_" in name}
    assert adapted
    for name in adapted:
        module = model.get_submodule(name)
        assert isinstance(module.get_base_layer(), torch.nn.Linear)
        assert not name.endswith("out_proj")  # of Mamba: its kernel takes the weight, not the layer


def test_targets_that_are_experts_are_refused_with_what_may_be_named(write):
    with pytest.raises(ConfigError, match=r"experts that are one tensor .*; leave targets out"):
        build_adapted(open_base(write("mixtral")), LoraSettings(targets=["w1", "w2", "w3"]), 0)


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral"])
def test_an_adapter_is_merged_into_files_of_other_names(write, tmp_path, family):
    folder = write(family)
    names = build_adapted(open_base(folder), LoraSettings(rank=2), 0).peft_config["default"].target_modules
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    targets = [*names, "lm_head"]  # which files of GPT-NeoX name otherwise
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merged = merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged")
    truth = adapted.merge_and_unload()
    found = transformers.AutoModelForCausalLM.from_pretrained(merged)
    for name, tensor in truth.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor)
