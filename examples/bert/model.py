"""BERT tells which package a function of the standard library is from; functions differ in length.

ravnest train examples/bert/model.py:job --nodes 3
"""

import ast
import re
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

import ravnest as rv

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")
NUM_WORDS, MAX_LENGTH = 4096, 48


def read_functions(package: str) -> list[str]:
    """Return the source of every function of a package."""
    found = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"], package).glob("*.py")):
        text = file.read_text("utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return found


def to_sample(source: str, label: int) -> dict[str, Any]:
    """Return words by number: as many as there are. Ravnest pads them, the mask says where they end."""
    words = re.findall(r"\w+|[^\w\s]", source)[:MAX_LENGTH]
    ids = [zlib.crc32(word.encode()) % NUM_WORDS for word in words]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": label}


def job(tiny: bool = False) -> rv.Job:
    """Return the job; a BERT that gets labels returns its loss itself."""
    samples = [to_sample(text, label) for label, name in enumerate(PACKAGES) for text in read_functions(name)]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    samples = [samples[number] for number in order][: 80 if tiny else None]
    num_val = len(samples) // 5
    width, depth = (16, 2) if tiny else (64, 3)
    config = BertConfig(
        vocab_size=NUM_WORDS,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=MAX_LENGTH,
        num_labels=len(PACKAGES),
    )
    torch.manual_seed(0)
    return rv.Job(
        BertForSequenceClassification(config),
        samples[num_val:],
        val_data=samples[:num_val],
        batch_size=16 if tiny else 32,
        epochs=1 if tiny else 6,
        metrics={"accuracy": lambda out, batch: (out.logits.argmax(-1) == batch["labels"]).float().mean()},
        name="bert",
    )
