"""Tiny configurations and batches for the architectures in the auto mappings of transformers.

One set of shrinking rules by the names of the options serves nearly all of them; what a family needs beside
is data (`SPECIAL`). Lists by layer are cut so that every kind of layer that a family has stays in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
NUM_SAMPLES, LENGTH, VOCABULARY, IMAGE = 4, 16, 128, 32


@dataclass(frozen=True, slots=True)
class Architecture:
    """A class of transformers with its kind of configuration; `mappings` are those that name it."""

    class_name: str
    model_type: str
    mappings: tuple[str, ...]

    @property
    def key(self) -> str:
        """What names it in results and on the command line."""
        return f"{self.model_type}/{self.class_name}"


def list_architectures() -> list[Architecture]:
    """Return every architecture of the four mappings, once."""
    from transformers.models.auto import modeling_auto

    found: dict[tuple[str, str], list[str]] = {}
    for mapping, name in MAPPINGS.items():
        for model_type, classes in getattr(modeling_auto, name).items():
            for class_name in (classes,) if isinstance(classes, str) else classes:
                found.setdefault((class_name, model_type), []).append(mapping)
    return [Architecture(*names, tuple(mappings)) for names, mappings in found.items()]


# Options by the end of their name, the longest first, and what they become; a function gets the default.
def _at_most(number: int) -> Any:
    return lambda default: min(default, number)


_WIDTH, _HEAD = 32, 8
RULES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": _WIDTH,
    "d_model": _WIDTH,
    "n_embd": _WIDTH,
    "emb_dim": _WIDTH,
    "embedding_size": _WIDTH,
    "embedding_dim": _WIDTH,
    "intermediate_size": 64,
    "intermediate_dim": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "d_ff": 64,
    "d_inner": 64,
    "dff": 64,
    "dim_ff": 64,
    "hidden_dim": 64,
    "n_inner": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "kv_n_heads": 2,
    "rotary_dim": 4,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": _HEAD,
    "mamba_head_dim": _HEAD,
    "num_codebooks": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "head_dim": _HEAD,
    "global_head_dim": _HEAD,
    "dim_head": _HEAD,
    "d_kv": _HEAD,
    "d_head": _HEAD,
    "kv_channels": _HEAD,
    "qk_rope_head_dim": _HEAD,
    "qk_nope_head_dim": _HEAD,
    "qk_head_dim": 2 * _HEAD,
    "v_head_dim": _HEAD,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "kv_lora_rank": 16,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "max_seq_len": 64,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
    "expert_capacity": 64,
    "first_k_dense_replace": 1,
    "sliding_window": 8,
    "image_size": IMAGE,
    "patch_size": _at_most(8),
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": _HEAD,
    "linear_value_head_dim": _HEAD,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
    "num_nextn_predict_layers": 0,
    "laurel_rank": 8,
    "num_mel_bins": 16,
    "max_window_layers": 1,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_global": _WIDTH,
    "audio_hidden_size": _WIDTH,
    "num_latents": 8,
    "d_latents": _WIDTH,
    "num_self_attends_per_block": 1,
    "num_self_attention_heads": 4,
    "num_cross_attention_heads": 1,
    "num_kv_heads": 4,
    "src_vocab_size": VOCABULARY,
    "tgt_vocab_size": VOCABULARY,
    "decoder_vocab_size": VOCABULARY,
    "entity_vocab_size": VOCABULARY,
    "entity_emb_size": _WIDTH,
    "word_embed_proj_dim": _WIDTH,
    "lru_width": _WIDTH,
    "num_layers_per_stack": 1,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": _HEAD,
    "sliding_window_size": 8,
    "attention_window_size": 8,
    "num_attention_heads_per_layer": 4,
    "expert_ffn_hidden_size": 64,
    "dense_intermediate_size": 64,
    "num_encoder_layers": 2,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "conf_num_hidden_layers": 1,
    "speech_encoder_layers": 1,
    "t2u_encoder_layers": 1,
    "t2u_decoder_layers": 1,
    "num_landmarks": 4,
    "segment_means_seq_len": LENGTH,
    "num_global_tokens": 4,
    "context_length": 64,
    "hc_sinkhorn_iters": 3,
    "prompt_length": 4,
    "prompt_mid_dim": 16,
    "attention_head_size": _HEAD,
    "feed_forward_size": 64,
    "ngram_vocab_size_base": 1000,
    "ple_embed_dim": _WIDTH,
    "depth": 2,
    "depths": 1,
    "stage_numb_of_layers": 1,
    "stage_num_blocks": 1,
    "n_attn_blocks": 1,
    "block_sizes": 1,
    "num_block_repeats": 1,
}
_LAYER_LISTS = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "block_types",
    "attention_types",
    "indexer_types",
    "layer_rope_theta",
    "activation_sparsity_pattern",
)
_STAGE_LISTS = (
    "depths",
    "depth",
    "num_block_repeats",
    "stage_numb_of_layers",
    "stage_num_blocks",
    "n_attn_blocks",
    "block_sizes",
)
_LAYER_SIZES = ("intermediate_size", "num_attention_heads_per_layer")
_TOKENS = ("_token_id", "_token_index", "_index")


def shrink(default: Mapping[str, Any], num_layers: int = 2) -> dict[str, Any]:
    """Return the options that a tiny model has instead of these, those of its parts included."""
    found: dict[str, Any] = {}
    num_heads, num_shared = (default.get(f"num_{name}_heads") for name in ("attention", "key_value"))
    if isinstance(num_shared, int):
        found["num_key_value_heads"] = 4 if num_shared == num_heads else 2
    for name, value in default.items():
        if isinstance(value, dict):
            part = shrink(value, num_layers)
            if part and "model_type" in value:
                found[name] = {"model_type": value["model_type"], **part}
        elif name in _LAYER_LISTS and isinstance(value, list | tuple):
            found[name] = _few(list(value), num_layers)
        elif isinstance(value, list | tuple) and name in (*_STAGE_LISTS, *_LAYER_SIZES):
            found[name] = [RULES[name]] * (len(value) if name in _STAGE_LISTS else num_layers)
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif name.endswith(_TOKENS) and value >= VOCABULARY:
            found[name] = VOCABULARY - 1 - len([each for each in found if each.endswith(_TOKENS)])
        elif name in RULES and value > 0:
            rule = RULES[name]
            found[name] = rule(value) if callable(rule) else rule
    return found


def _few(layers: list[Any], number: int) -> list[Any]:
    """Return so many layers, each kind at least once if they suffice, in the order of the model."""
    places = sorted({layers.index(kind) for kind in layers})[:number]
    rest = (place for place in range(len(layers)) if place not in places)
    while len(places) < min(number, len(layers)):
        places.append(next(rest))
    return [layers[place] for place in sorted(places)]


_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": _HEAD,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}

# What families need beside the rules: options by kind of configuration.
SPECIAL: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "donut-swin": {"image_size": 64, "window_size": 2},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
    },
    "efficientnet": {"hidden_dim": 2560, "depth_coefficient": 1.0},
    "encoder-decoder": {"decoder_start_token_id": 1, "pad_token_id": 0},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "hunyuan_v1_dense": {"head_dim": _HEAD},
    "hunyuan_v1_moe": {"head_dim": _HEAD},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 4,
    },
    "levit": {"image_size": 64, "patch_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"moe_layers": [0, 1], "num_experts_per_tok": 1},
    "llama4_text": {"moe_layers": [0, 1], "num_experts_per_tok": 1},
    "longt5": {"decoder_start_token_id": 0},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "mobilebert": {
        "embedding_size": 16,
        "intra_bottleneck_size": 16,
        "true_hidden_size": 16,
        "num_feedforward_networks": 1,
    },
    "ministral": {"head_dim": _HEAD},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "perceiver": {"max_position_embeddings": LENGTH},
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [8, 24],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "attn_layers": ["local", "lsh"],
        "num_buckets": 2,
        "max_position_embeddings": LENGTH,
    },
    "siglip2": {"vision_config": {"num_patches": 16}},
    "switch_transformers": {"decoder_start_token_id": 0},
    "textnet": {"image_size": [64, 64]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
# Options of one class where another of the same kind has others.
OF_CLASS: dict[str, dict[str, Any]] = {"ReformerModelWithLMHead": {"is_decoder": True}}


def make_config(architecture: Architecture) -> Any:
    """Return a tiny configuration."""
    import transformers

    kind = getattr(transformers, architecture.class_name).config_class
    special = dict(SPECIAL.get(architecture.model_type, {}))
    num_layers = special.pop("num_layers_kept", 2)
    options = shrink(kind(**special.pop("base", {})).to_dict(), num_layers)
    config = kind(**_merge(options, special | OF_CLASS.get(architecture.class_name, {})))
    config.use_cache = False
    return config


def _merge(one: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for name, value in other.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), dict)
        merged[name] = _merge(merged[name], value) if both else value
    return {name: value for name, value in merged.items() if value is not ...}


def make_batch(architecture: Architecture, config: Any) -> dict[str, Any]:
    """Return a batch that the architecture trains on."""
    import torch

    torch.manual_seed(1)
    if architecture.mappings == ("image",) and architecture.model_type not in ("imagegpt", "siglip2"):
        size = getattr(config, "image_size", IMAGE)
        size = size if isinstance(size, int) else size[0]
        channels = getattr(config, "num_channels", 3)
        labels = torch.tensor([0, 1, 1, 0])
        return {"pixel_values": torch.randn(NUM_SAMPLES, channels, size, size), "labels": labels}
    if architecture.model_type == "siglip2":
        return {
            "pixel_values": torch.randn(NUM_SAMPLES, 16, 192),
            "pixel_attention_mask": torch.ones(NUM_SAMPLES, 16, dtype=torch.int64),
            "spatial_shapes": torch.full((NUM_SAMPLES, 2), 4),
            "labels": torch.tensor([0, 1, 1, 0]),
        }
    if architecture.model_type == "imagegpt":
        return {
            "input_ids": torch.randint(8, 100, (NUM_SAMPLES, LENGTH)),
            "labels": torch.tensor([0, 1, 1, 0]),
        }
    ids, others = (torch.randint(8, 100, (NUM_SAMPLES, LENGTH)) for _ in range(2))
    batch = {"input_ids": ids, "labels": ids.clone() if "causal" in architecture.mappings else others}
    if architecture.model_type == "git":
        batch["pixel_values"] = torch.randn(NUM_SAMPLES, 3, IMAGE, IMAGE)
    if architecture.model_type.startswith("musicgen"):
        batch["labels"] = others.unsqueeze(-1)  # one codebook
    return batch
