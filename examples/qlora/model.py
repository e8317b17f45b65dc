"""QLoRA: a small Llama whose own weights are held in four bits learns to say what a function is for.

ravnest train examples/qlora/model.py:job --nodes 3
"""

import ast
import sysconfig
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import ravnest as rv

LENGTH = 96
Sample = dict[str, list[int]]


def read_functions() -> list[tuple[str, str]]:
    """Return the heads of the standard library's functions, each with the first line of its docstring."""
    found = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text and isinstance(node, ast.FunctionDef):
                head = f"def {node.name}({', '.join(each.arg for each in node.args.args)}): "
                found.append((head, text.splitlines()[0] + "\n"))
    return found


def make_sample(head: str, answer: str) -> Sample:
    """Return bytes as tokens; the head is read, and only the answer is learned."""
    prompt, reply = list(head.encode())[: LENGTH // 2], list(answer.encode())
    ids = (prompt + reply)[:LENGTH]
    labels = ([-100] * len(prompt) + reply)[:LENGTH]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


def make_base(tiny: bool, samples: list[Sample]) -> LlamaForCausalLM:
    """Return a Llama that has seen heads of functions; you would write from_pretrained(...) here."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,  # smaller matrices are not worth four bits
        intermediate_size=384,
        num_hidden_layers=1 if tiny else 4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    heads = [sample["input_ids"][:32] for sample in samples if len(sample["input_ids"]) >= 32]
    for first in range(0, 32 if tiny else 16 * 150, 16):
        ids = torch.tensor([heads[k % len(heads)] for k in range(first, first + 16)])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def job(tiny: bool = False) -> rv.Job:
    """Return the job; every tenth function is for validation."""
    samples = [make_sample(*each) for each in read_functions()]
    train: list[Any] = [sample for number, sample in enumerate(samples) if number % 10]
    lora = LoraConfig(r=2 if tiny else 8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return rv.Job(
        get_peft_model(make_base(tiny, train), lora),
        train[:64] if tiny else train,
        val_data=samples[:320:10] if tiny else samples[::10],
        batch_size=16,
        epochs=1 if tiny else 2,
        max_length=LENGTH,  # of heads and answers that are shorter
        frozen="int4",  # how the base is sent and held; its adapters are trained as ever
        name="qlora",
    )
