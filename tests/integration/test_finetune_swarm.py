"""Fine-tuning with real peers: an adapter and a tokenizer come back, and checkpoints without the base."""

from pathlib import Path

import pytest

import ravnest as rv
from ravnest.model.state.shards import open_weights
from tests.support.tiny_llama import sums, write_tiny_llama

pytest.importorskip("peft")


def test_peers_train_an_adapter_of_a_folder(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny", num_layers=1)
    settings = {"rank": 2, "batch_size": 8, "max_steps": 6, "learning_rate": 1e-2}
    out = tmp_path / "run"
    result = rv.finetune(folder, sums(40), nodes=2, out=out, **settings)
    assert result.metrics["val_loss"] > 0
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        file.name for file in out.iterdir()
    }
    trained = {tensor.name: tensor.type.shape for tensor in open_weights(out / "adapter_model.safetensors")}
    assert trained["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == (2, 16)
    saved = [tensor.name for place in out.glob("checkpoints/*/part-*") for tensor in open_weights(place)]
    assert any(".lora_" in name for name in saved)
    assert not any(name.endswith(("base_layer.weight", "embed_tokens.weight")) for name in saved)
