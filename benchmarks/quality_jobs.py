"""The jobs of the quality benchmark: small trainings as people write them, on data that is on every PC.

A task makes model, data and loss from a seed. It also names the plain loop that was tuned for it once, by
`python -m benchmarks.run quality --tune`.
"""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rows = dict[str, Tensor]
Score = Callable[[Tensor, Rows], Tensor]


@dataclass(frozen=True, slots=True)
class Loop:
    """A plain loop: torch.optim's AdamW (or Adam), or the default recipe, and what becomes of its rate."""

    rate: float | None = 1e-3  # None: the recipe's own
    is_cosine: bool = False
    kind: str = "AdamW"  # of torch.optim, or "recipe"

    def __str__(self) -> str:
        rate = "" if self.rate is None else f" {self.rate:g}"
        return f"{self.kind}{rate}{' cosine' if self.is_cosine else ''}"


@dataclass(frozen=True, slots=True)
class Made:
    """What a user would have at hand: a new model, its data and functions of (output, batch)."""

    model: nn.Module
    train: Rows
    validation: Rows
    loss: Score
    inputs: tuple[str, ...] = ("x",)
    metrics: tuple[tuple[str, Score], ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """A job of the benchmark. `score` is what it is judged by; `own` is the optimizer its user brings."""

    name: str
    make: Callable[[int], Made]
    batch_size: int
    epochs: int
    score: str  # "loss" or "accuracy"
    tuned: Loop
    own: Loop | None = None


# ---- data


@cache
def _digits(num_train: int) -> tuple[Rows, Rows]:
    from sklearn import datasets

    found = datasets.load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], torch.tensor(found.target)[order]
    train = {"x": images[:num_train], "y": labels[:num_train]}
    return train, {"x": images[num_train:], "y": labels[num_train:]}


@cache
def _corpus(is_english: bool, is_held_out: bool) -> Tensor:
    """Return bytes: sources of the standard library, or what its manual and licence say in English."""
    if is_english:
        from pydoc_data import topics

        folder = Path(sysconfig.get_paths()["stdlib"])
        texts = [text for _, text in sorted(topics.topics.items())]
        texts += [file.read_text() for file in sorted(folder.glob("LICENSE*"))]
        pieces = [text.encode() for text in texts]
    else:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        pieces = [file.read_bytes() for file in files]
    chosen = b"".join(piece for k, piece in enumerate(pieces) if (k % 10 == 0) == is_held_out)
    return torch.frombuffer(bytearray(chosen), dtype=torch.uint8)


_LENGTH = 32


def _text(count: int, *, is_english: bool = False, is_held_out: bool = False) -> Rows:
    corpus = _corpus(is_english, is_held_out)
    generator = torch.Generator().manual_seed(int(is_held_out))
    starts = torch.randint(len(corpus) - _LENGTH, (count, 1), generator=generator)
    pieces = corpus[starts + torch.arange(_LENGTH + 1)].long()
    return {"x": pieces[:, :-1].contiguous(), "y": pieces[:, 1:].contiguous()}


# ---- losses


def _cross_entropy(out: Tensor, batch: Rows) -> Tensor:
    return F.cross_entropy(out, batch["y"])


def _accuracy(out: Tensor, batch: Rows) -> Tensor:
    return (out.argmax(-1) == batch["y"]).float().mean()


def _text_loss(out: Tensor, batch: Rows) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())


def _squares_of_classes(out: Tensor, batch: Rows) -> Tensor:
    return F.mse_loss(out.softmax(-1), F.one_hot(batch["y"], 10).float())


_ACCURACY = (("accuracy", _accuracy),)


# ---- models


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, is_causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.is_causal)
        x = x + self.dropout(self.mix(seen.transpose(1, 2).flatten(2)))
        added: Tensor = self.dropout(self.narrow(F.gelu(self.wide(self.norm2(x)))))
        return x + added


class _ByteGpt(nn.Module):
    def __init__(self, width: int = 48, num_blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(_LENGTH, width)
        self.blocks = nn.Sequential(*(_Attention(width, 4, is_causal=True) for _ in range(num_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        out: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))
        return out


class _Encoder(nn.Module):
    """Looks at an image as rows (like BERT at words, with dropout) or as patches (like ViT)."""

    def __init__(self, patch: tuple[int, int], width: int, num_blocks: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, patch, stride=patch)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + 64 // (patch[0] * patch[1]), width))
        blocks = (_Attention(width, 4, is_causal=False, dropout=dropout) for _ in range(num_blocks))
        self.blocks, self.norm, self.head = nn.Sequential(*blocks), nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.embed(x).flatten(2).transpose(1, 2)
        words = torch.cat([self.first.expand(x.shape[0], -1, -1), pieces], dim=1) + self.places
        out: Tensor = self.head(self.norm(self.blocks(words)[:, 0]))
        return out


class _Residual(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(num_inputs, num_outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(num_outputs),
            nn.ReLU(),
            nn.Conv2d(num_outputs, num_outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(num_outputs),
        )
        self.outer = nn.Sequential(
            nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False), nn.BatchNorm2d(num_outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.outer(x))


class _Denoiser(nn.Module):
    """Says which noise is in an image; `t` is how much there is."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.image, self.time = nn.Linear(64, width), nn.Linear(16, width)
        self.layers = nn.Sequential(
            *(part for _ in range(3) for part in (nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()))
        )
        self.out = nn.Linear(width, 64)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        waves = t[:, None] * 3.0 * torch.arange(1, 9, device=t.device)
        known = self.image(x) + self.time(torch.cat([waves.sin(), waves.cos()], dim=1))
        out: Tensor = self.out(known + self.layers(known))
        return out


class _TwoViews(nn.Module):
    """Two encoders whose vectors of the same digit should agree."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.upper, self.lower = (
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, width))
            for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, upper: Tensor, lower: Tensor) -> Tensor:
        first, second = F.normalize(self.upper(upper), dim=-1), F.normalize(self.lower(lower), dim=-1)
        return self.scale.exp() * first @ second.T


# ---- tasks


def _readme_mlp(seed: int) -> Made:
    x = torch.randn(4096, 20, generator=torch.Generator().manual_seed(0))
    rows = {"x": x, "y": (x[:, :10].sum(1) > x[:, 10:].sum(1)).long()}
    train, rest = ({name: part[chosen] for name, part in rows.items()} for chosen in _halves(3584))
    torch.manual_seed(seed)
    layers = (nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    return Made(nn.Sequential(*layers), train, rest, _cross_entropy, metrics=_ACCURACY)


def _halves(count: int) -> tuple[slice, slice]:
    return slice(count), slice(count, None)


def _cnn() -> nn.Module:
    """Convolutions with dropout and BatchNorm for the digits, as the first version of Ravnest trained."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.BatchNorm2d(16)),
        nn.MaxPool2d(2),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.BatchNorm2d(32)),
        *(nn.Flatten(), nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.4), nn.BatchNorm1d(256)),
        nn.Linear(256, 10),
    )


def _cnn_squares(seed: int) -> Made:
    torch.manual_seed(seed)
    return Made(_cnn(), *_digits(1078), _squares_of_classes, metrics=_ACCURACY)


def _cnn_entropy(seed: int) -> Made:
    torch.manual_seed(seed)
    return Made(_cnn(), *_digits(1078), _cross_entropy, metrics=_ACCURACY)


def _resnet(seed: int) -> Made:
    torch.manual_seed(seed)
    layers = (_Residual(1, 16, 1), _Residual(16, 32, 2), _Residual(32, 32, 1))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return Made(model, *_digits(1437), _cross_entropy, metrics=_ACCURACY)


def _bert(seed: int) -> Made:
    torch.manual_seed(seed)
    return Made(_Encoder((1, 8), 32, 2, 0.1), *_digits(1437), _cross_entropy, metrics=_ACCURACY)


def _vit(seed: int) -> Made:
    torch.manual_seed(seed)
    return Made(_Encoder((2, 2), 32, 2, 0.0), *_digits(1437), _cross_entropy, metrics=_ACCURACY)


def _gpt(num_updates: int) -> Callable[[int], Made]:
    def make(seed: int) -> Made:
        torch.manual_seed(seed)
        train, held_out = _text(8 * num_updates), _text(1024, is_held_out=True)
        return Made(_ByteGpt(), train, held_out, _text_loss)

    return make


def _fine_tune(seed: int) -> Made:
    held_out = _text(1024, is_english=True, is_held_out=True)
    model = _ByteGpt()
    model.load_state_dict(_pretrained())
    torch.manual_seed(seed)
    order = torch.randperm(800)
    train = {name: rows[order] for name, rows in _text(800, is_english=True).items()}
    return Made(model, train, held_out, _text_loss)


@cache
def _pretrained() -> dict[str, Tensor]:
    """Return weights that know code: a plain loop of 600 updates."""
    from benchmarks.quality_loops import train_loop

    torch.manual_seed(1000)
    made = Made(_ByteGpt(), _text(16 * 600), _text(64, is_held_out=True), _text_loss)
    task = Task("code", lambda _: made, 16, 1, "loss", Loop(3e-3, is_cosine=True))
    return dict(train_loop(task, made, task.tuned, seed=0).model.state_dict())


def _diffusion(seed: int) -> Made:
    train, rest = _digits(1437)
    torch.manual_seed(seed)
    return Made(_Denoiser(), _noisy(train["x"], 7, 0), _noisy(rest["x"], 8, 1), _noise_loss, ("x", "t"))


def _noisy(images: Tensor, times: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    clean = (2 * images.flatten(1) - 1).repeat(times, 1)
    t = torch.rand(len(clean), generator=generator)
    noise = torch.randn(clean.shape, generator=generator)
    angle = (t * torch.pi / 2)[:, None]
    return {"x": angle.cos() * clean + angle.sin() * noise, "t": t, "noise": noise}


def _noise_loss(out: Tensor, batch: Rows) -> Tensor:
    return F.mse_loss(out, batch["noise"])


def _regression(seed: int) -> Made:
    x = torch.rand(3072, 10, generator=torch.Generator().manual_seed(0))
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    noise = torch.randn(len(x), generator=torch.Generator().manual_seed(1))
    rows = {"x": 2 * x - 1, "y": ((y + noise - y.mean()) / y.std())[:, None]}
    train, rest = ({name: part[chosen] for name, part in rows.items()} for chosen in _halves(2048))
    torch.manual_seed(seed)
    layers = (nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    return Made(nn.Sequential(*layers), train, rest, lambda out, batch: F.mse_loss(out, batch["y"]))


def _contrastive(seed: int) -> Made:
    torch.manual_seed(seed)
    train, rest = (_two_views(rows["x"]) for rows in _digits(1152))
    rest = {name: rows[:640] for name, rows in rest.items()}  # whole batches, whose losses can be compared
    return Made(
        _TwoViews(), train, rest, _agreement, ("upper", "lower"), metrics=(("accuracy", _pairs_found),)
    )


def _two_views(images: Tensor) -> Rows:
    return {"upper": images[..., :4, :].flatten(1), "lower": images[..., 4:, :].flatten(1)}


def _agreement(out: Tensor, _: Rows) -> Tensor:
    pairs = torch.arange(out.shape[0], device=out.device)
    return (F.cross_entropy(out, pairs) + F.cross_entropy(out.T, pairs)) / 2


def _pairs_found(out: Tensor, _: Rows) -> Tensor:
    return (out.argmax(-1) == torch.arange(out.shape[0], device=out.device)).float().mean()


_ADAM = Loop(kind="Adam")  # a job that brings its own optimizer is compared with that
_ADAMW, _FASTER_ADAMW = Loop(), Loop(3e-3)
TASKS = {
    task.name: task
    for task in (
        Task("readme-mlp", _readme_mlp, 64, 3, "accuracy", Loop(1e-2, is_cosine=True)),
        Task("digits-adam-mse", _cnn_squares, 64, 20, "accuracy", _ADAM, own=_ADAM),
        Task("digits-cnn", _cnn_entropy, 64, 20, "accuracy", Loop(1e-2, is_cosine=True)),
        Task("resnet", _resnet, 32, 3, "accuracy", Loop(1e-2, is_cosine=True)),
        Task("bert-rows", _bert, 32, 8, "accuracy", Loop(3e-3)),
        Task("vit", _vit, 32, 8, "accuracy", Loop(3e-3, is_cosine=True)),
        Task("gpt-200", _gpt(200), 8, 1, "loss", Loop(1e-2)),
        Task("gpt-1000", _gpt(1000), 8, 1, "loss", Loop(1e-2, is_cosine=True)),
        Task("fine-tune", _fine_tune, 8, 1, "loss", Loop(3e-3)),
        Task("diffusion", _diffusion, 64, 4, "loss", Loop(3e-3, is_cosine=True)),
        Task("regression", _regression, 32, 10, "loss", Loop(3e-2, is_cosine=True)),
        Task("contrastive", _contrastive, 64, 10, "accuracy", Loop(3e-3)),
        Task("mlp-adamw", _readme_mlp, 64, 3, "accuracy", _ADAMW, own=_ADAMW),
        Task("gpt-adamw", _gpt(200), 8, 1, "loss", _FASTER_ADAMW, own=_FASTER_ADAMW),
    )
}
