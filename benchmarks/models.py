"""Models of equal blocks that can be cut anywhere: as modules and as jobs, and where the cuts lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.plan.types import ModelProfile


@dataclass(frozen=True)
class Made:
    """Blocks in a row, the size of a microbatch, its data."""

    blocks: nn.Sequential
    width: int
    microbatch_size: int

    def data(self, num_samples: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, the same ones always."""
        generator = torch.Generator().manual_seed(1)
        return (
            torch.randn(num_samples, self.width, generator=generator),
            torch.randn(num_samples, generator=generator),
        )

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error of one number per sample."""
        return F.mse_loss(output.mean(-1), target)


def build(name: str) -> Made:
    """Return the model of a name like `mlp-256x8-b256`: width, number of blocks, samples in a microbatch."""
    kind, shape, batch = name.split("-")
    width, num_blocks = (int(part) for part in shape.split("x"))
    block = {"mlp": _mlp, "thin": _thin}[kind]
    torch.manual_seed(0)
    return Made(nn.Sequential(*(block(width) for _ in range(num_blocks))), width, int(batch[1:]))


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


def _thin(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def make_job(name: str, num_microbatches: int, num_updates: int, num_batches_kept: int = 8) -> Any:
    """Return the job of a model: so many microbatches make a batch, every update is one batch."""
    import ravnest as rv

    made = build(name)
    batch_size = num_microbatches * made.microbatch_size
    kept = min(num_updates, num_batches_kept)
    inputs, targets = made.data(kept * batch_size)
    return rv.Job(
        made.blocks,
        {"x": inputs, "y": targets},
        batch_size=batch_size,
        microbatches=num_microbatches,
        epochs=-(-num_updates // kept),
        loss=lambda out, batch: made.loss(out, batch["y"]),
        optimizer=torch.optim.AdamW(made.blocks.parameters(), lr=1e-4),
    )


def find_cuts(made: Made, profile: ModelProfile, cuts: Sequence[int]) -> list[int]:
    """Return the positions of the line that lie before these blocks."""
    sizes = [sum(tensor.nbytes for tensor in block.parameters()) for block in made.blocks]
    wanted = np.concatenate([[0.0], np.cumsum(sizes)])[list(cuts)]
    line = np.concatenate([[0.0], np.cumsum(profile.parameter_bytes)])
    # The last position that needs no parameter of the next block: the cut follows the activation.
    return [int(position) for position in np.searchsorted(line, wanted + 0.5) - 1]
