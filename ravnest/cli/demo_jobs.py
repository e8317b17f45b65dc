"""What `ravnest demo` trains on emulated PCs, and the same in one process, to compare with.

The data is on every PC. No node can hold the model alone, and two can: five nodes always form a cluster of
three and one of two. Their speeds are unequal and emulated: each node waits as long as a PC of that speed
would compute. The plain loop trains as anyone would write it: the same batches in the same order, one update
per batch, the same rates and the same optimizer rule, which equals torch.optim when nothing is late.
"""

import copy
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.config import OptimizerKind as Recipe
from ravnest.engine.optimizers import Optimizer
from ravnest.engine.recipe import make_settings
from ravnest.errors import ConfigError
from ravnest.hub.coordinator.leases import permute
from ravnest.model.blueprint.program import Blueprint
from ravnest.model.stage.profile import find_matrices
from ravnest.protocol.messages import Refusal
from ravnest.requester.dataset import Samples
from ravnest.requester.job import Job
from ravnest.requester.local_peers import Hardware
from ravnest.requester.lr_schedules import cosine, factors

_NUM_BYTES = 256  # a token is a byte
_LENGTH = 64
_NUM_TRAIN = {"digits": 1500, "text": 4800}
_SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))
_NUM_PIECES = 5120  # of text, the last of them for validation


@dataclass(frozen=True, slots=True)
class Demo:
    """A job, its description, its nodes, and the prompt that a trained text model continues."""

    job: Job
    what: str
    nodes: tuple[Hardware, ...]
    prompt: str | None = None


def _accuracy(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (out.argmax(-1) == batch["y"]).float().mean()


def _nodes(megabytes: tuple[float, ...], gigaflops: tuple[float, ...]) -> tuple[Hardware, ...]:
    return tuple(
        Hardware(1e6 * memory, emulated_flops_per_second=1e9 * speed)
        for memory, speed in zip(megabytes, gigaflops, strict=True)
    )


def _split(inputs: Tensor, targets: Tensor, num_train: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return train and validation data, in an order that is no order."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    train, rest = order[:num_train], order[num_train:]
    return {"x": inputs[train], "y": targets[train]}, {"x": inputs[rest], "y": targets[rest]}


def _shift(images: Tensor) -> Tensor:
    """Return the images, and each of them moved by a pixel: more to learn from, and the same digits."""
    wide = F.pad(images, (1, 1, 1, 1))
    return torch.cat([wide[..., 1 + down : 9 + down, 1 + right : 9 + right] for down, right in _SHIFTS])


def _convolution(num_inputs: int, num_outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(num_inputs, num_outputs, 3, padding=1), nn.GroupNorm(4, num_outputs), nn.ReLU()


def digits() -> Demo:
    """Return the demo on handwritten digits that come with scikit-learn."""
    try:
        from sklearn import datasets  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        fix = "pip install scikit-learn, or run: ravnest demo --text"
        raise ConfigError(f"the digits come with scikit-learn, which is not installed; {fix}") from None
    found = datasets.load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    train, validation = _split(images, torch.tensor(found.target), _NUM_TRAIN["digits"])
    train = {"x": _shift(train["x"]), "y": train["y"].repeat(len(_SHIFTS))}
    torch.manual_seed(0)
    model = nn.Sequential(
        *(*_convolution(1, 32), nn.MaxPool2d(2)),
        *(*_convolution(32, 64), nn.MaxPool2d(2)),
        *(layer for _ in range(5) for layer in _convolution(64, 64)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    job = Job(
        model,
        train,
        val_data=validation,
        batch_size=32,
        epochs=2,
        loss=lambda out, batch: F.cross_entropy(out, batch["y"]),
        metrics={"accuracy": _accuracy},
        average_every=32,
        checkpoint_every="5 s",
        microbatches=4,  # so that five programs on two cores keep up with the PCs they stand for
        name="digits",
    )
    nodes = _nodes((4.95, 5.05, 5.0, 5.15, 4.9), (0.7, 0.6, 0.5, 1.0, 0.7))
    return Demo(job, f"digits, {len(found.target):,} real images of 8 x 8 pixels, most also shifted", nodes)


def text() -> Demo:
    """Return the demo on the sources of Python's standard library, byte by byte."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    content = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    starts = torch.linspace(0, len(content) - _LENGTH - 1, _NUM_PIECES).long()
    pieces = content[starts[:, None] + torch.arange(_LENGTH + 1)].long()
    train, validation = _split(pieces[:, :-1], pieces[:, 1:], _NUM_TRAIN["text"])
    torch.manual_seed(0)
    job = Job(
        Gpt(),
        train,
        val_data=validation,
        batch_size=16,
        loss=lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["y"].flatten()),
        metrics={"accuracy": _accuracy},
        schedule=cosine(warmup=0.05),
        average_every=16,
        checkpoint_every="5 s",
        microbatches=4,
        name="text",
    )
    nodes = _nodes((8.65, 8.8, 8.9, 9.05, 8.45), (6.0, 5.0, 4.0, 8.0, 6.0))
    return Demo(job, f"{_NUM_PIECES:,} pieces of the standard library", nodes, prompt="def ")


class Block(nn.Module):
    """Attention to the bytes before, then a layer for each byte."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next block sees."""
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        added: Tensor = self.narrow(F.gelu(self.wide(self.norm2(x))))
        return x + added


class Gpt(nn.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self, width: int = 64, num_heads: int = 4, num_blocks: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(_NUM_BYTES, width), nn.Embedding(_LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _NUM_BYTES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores at every place."""
        places = torch.arange(ids.shape[1], device=ids.device)
        out: Tensor = self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places))))
        return out


@torch.no_grad()
def continue_text(model: nn.Module, prompt: str, num_bytes: int = 160) -> str:
    """Let a model go on with a text."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([list(prompt.encode())])
    for _ in range(num_bytes):
        scores = model.eval()(ids[:, -_LENGTH:])[:, -1] / 0.7
        ids = torch.cat([ids, torch.multinomial(scores.softmax(-1), 1, generator=generator)], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


_TRIES = 5


@dataclass(frozen=True, slots=True)
class PlainLoop:
    """How it went."""

    metrics: dict[str, float]
    samples_per_second: float


def train_plain_loop(job: Job, blueprint: Blueprint) -> PlainLoop:
    """Train a copy of the model whose only input is the field x, and evaluate it."""
    assert isinstance(job.optimizer, Recipe)
    model = copy.deepcopy(job.model).train()
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    num_samples = len(job.samples)
    num_batches = job.epochs * -(-num_samples // job.batch_size)
    matrices = find_matrices(blueprint)
    settings = make_settings(job.optimizer, job.find_rate(num_batches), shapes, matrices, num_batches)
    optimizer, rates = Optimizer(settings, parameters), iter(factors(job.rates, num_batches))
    torch.set_num_threads(_best_threads(job, model))
    start = time.perf_counter()  # noqa: TID251 - this is the measurement
    for epoch in range(job.epochs):
        order = permute(np.arange(num_samples), num_samples, job.seed, epoch)
        for first in range(0, num_samples, job.batch_size):
            loss = _score(job, model, job.samples.batch(order[first : first + job.batch_size]))["loss"]
            found = torch.autograd.grad(loss, list(parameters.values()))
            gradients = dict(zip(parameters, found, strict=True))
            updated = optimizer.step(parameters, gradients, settings.learning_rate * next(rates))
            assert not isinstance(updated, Refusal), updated
    seconds = time.perf_counter() - start  # noqa: TID251 - as above
    assert job.val_samples is not None
    return PlainLoop(_evaluate(job, model, job.val_samples), job.epochs * num_samples / seconds)


def _best_threads(job: Job, model: torch.nn.Module) -> int:
    """Return whether one thread or all are faster: for a small model on a busy PC it is one."""
    batch, times = job.samples.batch(range(job.batch_size)), {}
    for num_threads in {1, torch.get_num_threads()}:
        torch.set_num_threads(num_threads)
        for is_measured in (False, True):
            start = time.perf_counter()  # noqa: TID251 - as above
            for _ in range(_TRIES if is_measured else 1):
                torch.autograd.grad(_score(job, model, batch)["loss"], list(model.parameters()))
            times[num_threads] = time.perf_counter() - start  # noqa: TID251 - as above
    return min(times, key=lambda count: times[count])


def _score(job: Job, model: torch.nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    assert job.loss is not None
    out = model(batch["x"])
    return {
        "loss": job.loss(out, batch),
        **{name: of(out, batch) for name, of in (job.metrics or {}).items()},
    }


@torch.no_grad()
def _evaluate(job: Job, model: torch.nn.Module, samples: Samples) -> dict[str, float]:
    """Return the means over the validation samples, weighted by the size of batches."""
    model.eval()
    sums: dict[str, float] = {}
    for first in range(0, len(samples), job.batch_size):
        numbers = range(first, min(first + job.batch_size, len(samples)))
        for name, value in _score(job, model, samples.batch(numbers)).items():
            sums[name] = sums.get(name, 0.0) + float(value) * len(numbers)
    return {f"val_{name}": total / len(samples) for name, total in sums.items()}
