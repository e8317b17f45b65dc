"""A model of your own: any torch.nn.Module, data, a loss. Start from this file.

ravnest inspect examples/own_model/model.py:job
ravnest train examples/own_model/model.py:job --nodes 3
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ravnest as rv


class Block(nn.Module):
    """A residual block: what it adds passes through a wider layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Net(nn.Module):
    """Some blocks between an entry and a head."""

    def __init__(
        self, num_features: int = 32, width: int = 128, num_blocks: int = 4, num_classes: int = 5
    ) -> None:
        super().__init__()
        self.entry = nn.Linear(num_features, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.blocks(self.entry(x))))


# Random numbers stand in for your data. What is to be learned: which of the first five is the largest.
torch.manual_seed(0)
x = torch.randn(4096, 32)
data = {"x": x, "y": x[:, :5].argmax(-1)}

job = rv.Job(
    Net(),
    {name: rows[:3584] for name, rows in data.items()},
    val_data={name: rows[3584:] for name, rows in data.items()},
    batch_size=64,
    epochs=3,
    loss=lambda out, batch: F.cross_entropy(out, batch["y"]),
    metrics={"accuracy": lambda out, batch: (out.argmax(-1) == batch["y"]).float().mean()},
)
