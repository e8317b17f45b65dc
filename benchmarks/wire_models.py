"""Models of the wire benchmark, as stages in a row, and the text they learn: Python's standard library.

Two read bytes (a GPT; a Llama with RMSNorm, SwiGLU and rotary positions). One is a convolutional net that
sees the text as pages of lines and columns and guesses the bytes that are hidden from it.
"""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_STAGES = 8
_NUM_BYTES, _HIDDEN = 256, 256  # the last is no byte: it hides one
_LINE, _SIDE, _HIDDEN_SHARE = 64, 32, 0.4  # columns of a page, of a sample; how much of it is hidden
_MOST_BYTES = 24_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """How large a model is and what an update sees."""

    kind: str
    num_blocks: int
    width: int
    batch_size: int
    length: int
    rate: float  # of AdamW


SIZES = {
    "gpt": Size("gpt", 16, 640, 32, 512, 6e-4),  # 79 M parameters
    "llama": Size("llama", 16, 384, 32, 512, 1e-3),  # 28 M
    "conv": Size("conv", 16, 288, 32, _SIDE * _SIDE, 1e-3),  # 24 M
}


def shrink(size: Size) -> Size:
    """Return a tiny model of the same kind."""
    return replace(size, num_blocks=NUM_STAGES, width=32, batch_size=4, length=min(size.length, 64))


Batch = tuple[Tensor, Tensor, Tensor]  # what the model sees, what it should say, and where that counts


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on and to validate with, of different files, as text and as pages of lines."""

    text: dict[str, Tensor]
    pages: dict[str, Tensor]

    def draw(self, size: Size, part: str, generator: torch.Generator) -> Batch:
        """Return one batch."""
        if size.kind == "conv":
            return self._draw_pages(size, part, generator)
        text = self.text[part]
        starts = torch.randint(len(text) - size.length - 1, (size.batch_size, 1), generator=generator)
        places = (starts + torch.arange(size.length + 1)).to(text.device)
        found = text[places].long()
        return found[:, :-1], found[:, 1:], torch.ones_like(found[:, 1:], dtype=torch.bool)

    def _draw_pages(self, size: Size, part: str, generator: torch.Generator) -> Batch:
        page, side = self.pages[part], torch.arange(_SIDE)
        shape = (size.batch_size, 1, 1)
        rows = torch.randint(len(page) - _SIDE, shape, generator=generator) + side[:, None]
        columns = torch.randint(_LINE - _SIDE + 1, shape, generator=generator) + side
        is_hidden = torch.rand(size.batch_size, _SIDE, _SIDE, generator=generator) < _HIDDEN_SHARE
        found = page[rows.to(page.device), columns.to(page.device)].long()
        is_hidden = is_hidden.to(page.device)
        return found.masked_fill(is_hidden, _HIDDEN), found, is_hidden


def read_corpus(device: str, most_bytes: int = _MOST_BYTES) -> Corpus:
    """Read the sources of this Python; every tenth file validates."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    parts: dict[str, list[bytes]] = {"train": [], "validation": []}
    num_read = 0
    for number, path in enumerate(files):
        content = path.read_bytes()
        parts["validation" if number % 10 == 0 else "train"].append(content)
        num_read += len(content)
        if num_read > most_bytes:
            break
    text, pages = {}, {}
    for part, contents in parts.items():
        whole = b"".join(contents)
        lines = b"".join(line[:_LINE].ljust(_LINE) for line in whole.splitlines() if line)
        text[part] = torch.frombuffer(bytearray(whole), dtype=torch.uint8).to(device)
        pages[part] = torch.frombuffer(bytearray(lines), dtype=torch.uint8).view(-1, _LINE).to(device)
    return Corpus(text, pages)


def build_stages(size: Size, seed: int) -> nn.ModuleList:
    """Return the model: so many stages, each with as many blocks."""
    torch.manual_seed(seed)
    make, first, last = _PARTS[size.kind](size)
    blocks = [make() for _ in range(size.num_blocks)]
    share = size.num_blocks // NUM_STAGES
    stages = [nn.Sequential(*blocks[k * share : (k + 1) * share]) for k in range(NUM_STAGES)]
    stages[0].insert(0, first)
    stages[-1].append(last)
    scale = (2 * size.num_blocks) ** -0.5
    for name, parameter in nn.ModuleList(stages).named_parameters():
        if size.kind != "conv" and parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02 * (scale if name.endswith("out.weight") else 1.0))
    return nn.ModuleList(stages)


def find_loss(logits: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    """Return the mean cross entropy of what counts; the classes come last."""
    losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    chosen = counts.flatten()
    return (losses * chosen).sum() / chosen.sum()


class _Attention(nn.Module):
    def __init__(self, width: int, length: int, is_rotary: bool) -> None:
        super().__init__()
        self.num_heads = max(1, width // 64)
        self.qkv = nn.Linear(width, 3 * width, bias=not is_rotary)
        self.out = nn.Linear(width, width, bias=not is_rotary)
        self.is_rotary = is_rotary
        half = width // self.num_heads // 2
        angles = torch.outer(torch.arange(length), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("turn", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        if self.is_rotary:
            query, key = self._rotate(query), self._rotate(key)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(batch, length, width))

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.turn.to(x.dtype)
        one, other = x.chunk(2, -1)
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


class _Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.wide(x)))


class _SwiGlu(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = -(-8 * width // 3 // 16) * 16
        self.gate, self.wide = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x)) * self.wide(x))


class _Residual(nn.Module):
    """Adds to its input what its parts make of it, one after the other."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return x


class _Embedding(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_NUM_BYTES, width)
        self.places = nn.Parameter(torch.zeros(length, width)) if length else None

    def forward(self, x: Tensor) -> Tensor:
        found = self.embed(x)
        return found if self.places is None else found + self.places


class _PageEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_NUM_BYTES + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).permute(0, 3, 1, 2)  # lies in memory as convolutions like it best


class _PageHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(width), nn.Conv2d(width, _NUM_BYTES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(x))).permute(0, 2, 3, 1)


class _Head(nn.Module):
    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.head = norm, nn.Linear(width, _NUM_BYTES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


_Parts = tuple[Callable[[], nn.Module], nn.Module, nn.Module]


def _gpt(size: Size) -> _Parts:
    width = size.width

    def block() -> nn.Module:
        attention = nn.Sequential(nn.LayerNorm(width), _Attention(width, size.length, is_rotary=False))
        return _Residual(attention, nn.Sequential(nn.LayerNorm(width), _Mlp(width)))

    return block, _Embedding(width, size.length), _Head(nn.LayerNorm(width), width)


def _llama(size: Size) -> _Parts:
    width = size.width

    def block() -> nn.Module:
        attention = nn.Sequential(nn.RMSNorm(width), _Attention(width, size.length, is_rotary=True))
        return _Residual(attention, nn.Sequential(nn.RMSNorm(width), _SwiGlu(width)))

    return block, _Embedding(width, 0), _Head(nn.RMSNorm(width), width)


def _conv(size: Size) -> _Parts:
    width = size.width

    def half() -> list[nn.Module]:
        return [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)]

    def block() -> nn.Module:
        parts = nn.Sequential(*half(), *half())
        nn.init.zeros_(parts[-1].weight)
        return _Residual(parts)

    return block, _PageEmbedding(width), _PageHead(width)


_PARTS: dict[str, Callable[[Size], _Parts]] = {"gpt": _gpt, "llama": _llama, "conv": _conv}
