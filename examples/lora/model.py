"""LoRA with peft: a small Llama that knows Python code learns English; its base stays as it is.

ravnest train examples/lora/model.py:job --nodes 3
"""

import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import ravnest as rv

LENGTH = 64


def cut(text: str, count: int, seed: int = 0) -> dict[str, Tensor]:
    """Return pieces of a text, byte by byte."""
    corpus = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    starts = torch.randint(len(corpus) - LENGTH, (count, 1), generator=torch.Generator().manual_seed(seed))
    pieces = corpus[starts + torch.arange(LENGTH)].long()
    return {"input_ids": pieces, "labels": pieces}


def make_base(tiny: bool) -> LlamaForCausalLM:
    """Return a Llama that was trained on code for a minute; you would write from_pretrained(...) here."""
    width, depth = (16, 2) if tiny else (64, 4)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code = cut("".join(file.read_text("utf-8") for file in files), 16 * (2 if tiny else 300))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for ids in code["input_ids"].split(16):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def job(tiny: bool = False) -> rv.Job:
    """Return the job: the manual of Python, of which every tenth chapter is for validation."""
    chapters = [text for _, text in sorted(topics.items())]
    english = "".join(text for number, text in enumerate(chapters) if number % 10)
    lora = LoraConfig(r=2 if tiny else 8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return rv.Job(
        get_peft_model(make_base(tiny), lora),
        cut(english, 64 if tiny else 16 * 300),
        val_data=cut("".join(chapters[::10]), 32 if tiny else 512),
        batch_size=16,
        name="lora",
    )
