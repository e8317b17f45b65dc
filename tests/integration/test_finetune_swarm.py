"""Fine-tuning with real peers: an adapter and a tokenizer come back, and checkpoints without the base."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import ravnest as rv
from ravnest.model.state.shards import open_weights
from tests.support.tiny_llama import sums, write_tiny_llama

pytest.importorskip("peft")


def test_peers_train_an_adapter_of_a_folder(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny", num_layers=1)
    settings = {"rank": 2, "batch_size": 8, "max_steps": 6, "learning_rate": 1e-2}
    settings |= {"evaluate_every": 3, "ema": 0.9}
    out, heard = tmp_path / "run", []
    result = rv.finetune(folder, sums(40), nodes=2, out=out, callbacks=[heard.append], **settings)
    assert result.metrics["val_loss"] > 0
    assert len([each for each in heard if isinstance(each, rv.notices.Evaluated)]) == 2
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        file.name for file in out.iterdir()
    }
    trained = {tensor.name: tensor.type.shape for tensor in open_weights(out / "adapter_model.safetensors")}
    assert trained["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == (2, 16)
    (last, mean) = (load_file(out / each / "adapter_model.safetensors") for each in (".", "ema"))
    assert mean.keys() == last.keys()
    assert any((mean[name] != last[name]).any() for name in last), "a mean over time is another adapter"
    saved = [tensor.name for place in out.glob("checkpoints/*/part-*") for tensor in open_weights(place)]
    assert any(".lora_" in name for name in saved)
    assert not any(name.endswith(("base_layer.weight", "embed_tokens.weight")) for name in saved)


def test_it_ends_when_no_evaluation_is_better(tmp_path: Path) -> None:
    folder, data, out = write_tiny_llama(tmp_path / "tiny", num_layers=1), tmp_path / "sums.jsonl", "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums(40)))
    learns_nothing = ["--max-steps", "500", "--learning-rate", "1e-30", "--evaluate-every", "2"]
    asked = [
        "--local",
        "1",
        "--rank",
        "2",
        "--batch-size",
        "8",
        "--out",
        str(tmp_path / out),
        *learns_nothing,
    ]
    command = [sys.executable, "-m", "ravnest", "finetune", str(folder), "--data", str(data), *asked]
    done = subprocess.run([*command, "--early-stop", "1"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "in 1 evaluation" in done.stderr
    assert (tmp_path / out / "best" / "adapter_model.safetensors").exists()
