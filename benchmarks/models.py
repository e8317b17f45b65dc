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


def make_job(
    name: str, num_microbatches: int, num_updates: int, num_batches_kept: int = 8, *, is_frozen: bool = False
) -> Any:
    """Return the job of a model: so many microbatches make a batch, every update is one batch.

    `is_frozen`: matrices are not trained, only what is beside them.
    """
    import ravnest as rv

    made = build(name)
    for parameter in made.blocks.parameters():
        parameter.requires_grad_(parameter.dim() == 1 or not is_frozen)
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
        optimizer=torch.optim.AdamW((p for p in made.blocks.parameters() if p.requires_grad), lr=1e-4),
    )


def find_cuts(made: Made, profile: ModelProfile, cuts: Sequence[int]) -> list[int]:
    """Return the positions of the line that lie before these blocks."""
    sizes = [sum(tensor.nbytes for tensor in block.parameters()) for block in made.blocks]
    wanted = np.concatenate([[0.0], np.cumsum(sizes)])[list(cuts)]
    line = np.concatenate([[0.0], np.cumsum(profile.parameter_bytes)])
    # The last position that needs no parameter of the next block: the cut follows the activation.
    return [int(position) for position in np.searchsorted(line, wanted + 0.5) - 1]


@dataclass(frozen=True)
class GptShape:
    """The size of a GPT; the head shares the weights of the embedding if it `is_tied`."""

    num_blocks: int
    num_heads: int
    width: int
    length: int = 1024
    num_tokens: int = 50304
    is_tied: bool = True

    @property
    def num_parameters(self) -> int:
        """All weights and biases."""
        inner = self.num_blocks * (12 * self.width**2 + 13 * self.width)
        tables = (self.num_tokens * (1 if self.is_tied else 2) + self.length) * self.width
        return inner + tables + 2 * self.width


GPTS = {
    "tiny": GptShape(2, 2, 32, length=16, num_tokens=64),
    "small": GptShape(12, 12, 768),
    "medium": GptShape(24, 16, 1024),
}


class Gpt(nn.Module):
    """GPT-2 in plain torch, without dropout."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.num_tokens, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(_GptBlock(shape) for _ in range(shape.num_blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.num_tokens, bias=False)
        self.apply(_initialise)
        if shape.is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _GptBlock(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        width = shape.width
        self.num_heads = shape.num_heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        num_samples, length, width = x.shape
        query, key, value = self.attend(self.before(x)).split(width, 2)
        shape = (num_samples, length, self.num_heads, width // self.num_heads)
        heads = (part.view(shape).transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(num_samples, length, width))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_tokens(shape: "GptShape | LlamaShape", num_samples: int) -> dict[str, Tensor]:
    """Return tokens and the ones after them, the same ones always."""
    size = (num_samples, shape.length + 1)
    found = torch.randint(shape.num_tokens, size, generator=torch.Generator().manual_seed(1))
    return {"ids": found[:, :-1].contiguous(), "labels": found[:, 1:].contiguous()}


@dataclass(frozen=True)
class LlamaShape:
    """The size of a Llama, and how many of its last blocks are trained."""

    num_blocks: int
    num_heads: int
    width: int
    inner: int
    length: int = 512
    num_tokens: int = 32_000
    num_trained: int = 2
    rank: int = 0  # of adapters on all linear layers of blocks; then nothing else is trained


LLAMAS = {
    "llama-tiny": LlamaShape(4, 2, 16, 32, length=16, num_tokens=64, num_trained=1),
    "llama7b": LlamaShape(32, 32, 4096, 11_008),
    "qlora-tiny": LlamaShape(4, 2, 64, 128, length=16, num_tokens=64, num_trained=0, rank=2),
    "qlora7b": LlamaShape(32, 32, 4096, 11_008, num_trained=0, rank=16),
}


class RepeatedLinear(nn.Linear):
    """A linear layer that begins with one random row, repeated: billions of random numbers take minutes."""

    def reset_parameters(self) -> None:
        """Fill the weights."""
        _repeat_row(self.weight)


class RepeatedEmbedding(nn.Embedding):
    """A table that begins with one random row, repeated."""

    def reset_parameters(self) -> None:
        """Fill the table."""
        _repeat_row(self.weight)


@torch.no_grad()
def _repeat_row(weight: Tensor) -> None:
    row = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(1))
    weight.copy_((row * 0.02).expand_as(weight))


class Adapted(RepeatedLinear):
    """A linear layer with two thin matrices beside it (LoRA), which stay in fp32."""

    def __init__(self, num_in: int, num_out: int, rank: int) -> None:
        super().__init__(num_in, num_out, bias=False)
        self.down, self.up = nn.Parameter(torch.empty(rank, num_in)), nn.Parameter(torch.empty(num_out, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin as the layer alone would be."""
        super().reset_parameters()
        if hasattr(self, "down"):
            nn.init.normal_(self.down, std=0.02)
            nn.init.zeros_(self.up)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer gives, and twice what the thin matrices do."""
        thin = F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))
        return F.linear(x, self.weight) + 2 * thin


class Llama(nn.Module):
    """Llama in plain torch: RMS norms, rotary positions, gated MLPs; in bf16 throughout."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.tokens = RepeatedEmbedding(shape.num_tokens, shape.width)
        self.blocks = nn.ModuleList(_LlamaBlock(shape) for _ in range(shape.num_blocks))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = RepeatedLinear(shape.width, shape.num_tokens, bias=False)
        for name, parameter in self.named_parameters():
            is_thin = shape.rank > 0 and name.rpartition(".")[2] in ("down", "up")
            parameter.requires_grad_(is_thin)
            if not is_thin:
                parameter.data = parameter.data.to(torch.bfloat16)
        for block in self.blocks[len(self.blocks) - shape.num_trained :]:
            for parameter in block.parameters():
                parameter.requires_grad_()

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits."""
        length, width = ids.shape[1], self.blocks[0].head_width
        steps = torch.arange(0, width, 2, device=ids.device) / width
        angles = torch.outer(torch.arange(length, device=ids.device).float(), 10_000.0**-steps)
        turn = torch.cat([angles, angles], -1)
        cosine, sine = turn.cos().to(torch.bfloat16), turn.sin().to(torch.bfloat16)
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _LlamaBlock(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width = shape.width
        self.num_heads, self.head_width = shape.num_heads, width // shape.num_heads
        self.before, self.between = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)

        def linear(num_in: int, num_out: int) -> nn.Module:
            if shape.rank:
                return Adapted(num_in, num_out, shape.rank)
            return RepeatedLinear(num_in, num_out, bias=False)

        self.query, self.key, self.value, self.join = (linear(width, width) for _ in range(4))
        self.gate, self.wide = linear(width, shape.inner), linear(width, shape.inner)
        self.narrow = linear(shape.inner, width)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        num_samples, length, width = x.shape
        shape, inner = (num_samples, length, self.num_heads, self.head_width), self.before(x)
        query, key, value = (
            part(inner).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            _rotate(query, cosine, sine), _rotate(key, cosine, sine), value, is_causal=True
        )
        x = x + self.join(mixed.transpose(1, 2).reshape(num_samples, length, width))
        inner = self.between(x)
        return x + self.narrow(F.silu(self.gate(inner)) * self.wide(inner))


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine
