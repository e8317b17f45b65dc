"""A small GPT that learns to write Python, from the sources of the standard library: nothing to download.

ravnest inspect examples/tiny_gpt/model.py:job
"""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import ravnest as rv

NUM_BYTES = 256  # a token is a byte


class Block(nn.Module):
    """Attention to the bytes before, then a layer for each byte."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))

    def attend(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return self.mix(seen.transpose(1, 2).flatten(2))


class TinyGpt(nn.Module):
    """Bytes in, scores of the next byte out; the head is the embedding again (tied weights)."""

    def __init__(self, length: int, width: int = 128, num_heads: int = 4, num_blocks: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_BYTES, width)
        self.places = nn.Embedding(length, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.places(places))
        return self.head(self.norm(self.blocks(x)))


class PythonSources(Dataset[dict[str, Tensor]]):
    """The top folder of the standard library, cut into pieces of `length` bytes."""

    def __init__(self, length: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        self.length = length
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.length
        piece = self.text[start : start + self.length + 1].long()
        return {"ids": piece[:-1], "y": piece[1:]}


LENGTH = 128

torch.manual_seed(0)
job = rv.Job(
    TinyGpt(LENGTH),
    PythonSources(LENGTH),
    batch_size=16,
    loss=lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["y"].flatten()),
)
