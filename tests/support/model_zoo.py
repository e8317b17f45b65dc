"""Small models of ten families, modules that are easy to cut wrongly, and modules that must be refused.

Every entry is made from a seed: two calls give the same weights and the same batch. Hugging Face models get a
dict of their keyword inputs and return their own loss; ours get a dict or a pair and bring a loss.
"""

import functools
import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NUM_SAMPLES = 4
NUM_TOKENS = 16
VOCABULARY = 61
NUM_CLASSES = 5
FEATURES = 8

Batch = dict[str, Any] | tuple[Any, ...]
Judge = Callable[[Any, Any], Tensor]
MakeBatch = Callable[[int, torch.Generator], Batch]


@dataclass(frozen=True)
class Sample:
    """A model with a batch, and how to judge what it returns."""

    name: str
    model: nn.Module
    batch: Batch
    loss: Judge | None = None
    metrics: Mapping[str, Judge] = field(default_factory=dict)

    def run(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of a model of this kind, as the user's own training script would."""
        if isinstance(batch, dict):
            out, truth = model(**self._inputs(model, batch)), batch
        else:
            out, truth = model(*batch[:-1]), batch[-1]
        loss = out.loss if self.loss is None else self.loss(out, truth)
        return loss, {name: metric(out, truth) for name, metric in self.metrics.items()}

    def _inputs(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        known = inspect.signature(model.forward).parameters
        return {name: value for name, value in batch.items() if name in known}


@dataclass(frozen=True)
class Entry:
    """How to make a sample: the model, any number of batches, the loss and the metrics."""

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: MakeBatch
    loss: Judge | None = None
    metrics: Mapping[str, Judge] = field(default_factory=dict)

    def batch(self, num_samples: int = NUM_SAMPLES, seed: int = 0) -> Batch:
        return self.make_batch(num_samples, torch.Generator().manual_seed(seed))

    def model(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_model()

    def sample(self, num_samples: int = NUM_SAMPLES, seed: int = 0) -> Sample:
        return Sample(self.name, self.model(seed), self.batch(num_samples, seed), self.loss, self.metrics)


def copy_of(batch: Batch) -> Batch:
    """Return the batch with its own tensors: a model may write to them."""
    if isinstance(batch, dict):
        return {name: tensor.clone() for name, tensor in batch.items()}
    return tuple(tensor.clone() for tensor in batch)


def fields_of(batch: Batch) -> dict[str, Tensor]:
    """Return the parts of a batch by the names a blueprint gives them."""
    return dict(batch) if isinstance(batch, dict) else dict(zip(("x", "y"), batch, strict=True))


# --- batches, losses, metrics


def draw_tokens(num_samples: int, generator: torch.Generator, length: int = NUM_TOKENS) -> Tensor:
    return torch.randint(2, VOCABULARY, (num_samples, length), generator=generator)


def draw_classes(num_samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)


def draw_images(num_samples: int, generator: torch.Generator, side: int = 16) -> Tensor:
    return torch.randn(num_samples, 3, side, side, generator=generator)


def draw_mask(num_samples: int, length: int = NUM_TOKENS) -> Tensor:
    """Return an attention mask: every second sample is one to three tokens shorter."""
    lengths = torch.tensor([length - (1 + k % 3 if k % 2 else 0) for k in range(num_samples)])
    return (torch.arange(length) < lengths[:, None]).long()


def token_batch(num_samples: int, generator: torch.Generator) -> Batch:
    tokens = draw_tokens(num_samples, generator, NUM_TOKENS + 1)
    return {"ids": tokens[:, :-1].clone(), "y": tokens[:, 1:].clone()}


def text_class_batch(num_samples: int, generator: torch.Generator) -> Batch:
    return {"ids": draw_tokens(num_samples, generator), "y": draw_classes(num_samples, generator)}


def image_batch(num_samples: int, generator: torch.Generator) -> Batch:
    return {"x": draw_images(num_samples, generator), "y": draw_classes(num_samples, generator)}


def image_pair(num_samples: int, generator: torch.Generator) -> Batch:
    return draw_images(num_samples, generator, side=32), draw_classes(num_samples, generator)


def pixel_class_batch(num_samples: int, generator: torch.Generator) -> Batch:
    truth = torch.randint(0, NUM_CLASSES, (num_samples, 16, 16), generator=generator)
    return {"x": draw_images(num_samples, generator), "y": truth}


def feature_batch(num_samples: int, generator: torch.Generator) -> Batch:
    shape = (num_samples, FEATURES)
    return {"x": torch.randn(shape, generator=generator), "y": torch.randn(shape, generator=generator)}


def class_loss(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(out, batch["y"])


def class_accuracy(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return (out.argmax(-1) == batch["y"]).float().mean()


def pair_accuracy(out: Tensor, truth: Tensor) -> Tensor:
    return (out.argmax(-1) == truth).float().mean()


def token_loss(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())


def square_loss(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.mse_loss(out, batch["y"])


def auxiliary_loss(out: Tensor | tuple[Tensor, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    if isinstance(out, tuple):
        return F.cross_entropy(out[0], batch["y"]) + 0.4 * F.cross_entropy(out[1], batch["y"])
    return F.cross_entropy(out, batch["y"])


# --- our own GPT


class CausalAttention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        num_samples, length, width = x.shape
        heads = self.project_in(x).view(num_samples, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return self.drop(self.project_out(mixed.transpose(1, 2).reshape(num_samples, length, width)))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = CausalAttention(width, num_heads, dropout)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.feed(self.norm_feed(x))


class OwnGPT(nn.Module):
    """A GPT whose head is its token embedding."""

    def __init__(self, width: int = 32, num_blocks: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(NUM_TOKENS, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# --- our own image models


class Bottleneck(nn.Module):
    """As in torchvision: every ReLU and the residual sum are in place."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        wide = 4 * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, wide, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or channels != wide:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide)
            )

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.shortcut is None else self.shortcut(x)
        x = self.relu(self.norm1(self.conv1(x)))
        x = self.relu(self.norm2(self.conv2(x)))
        x = self.norm3(self.conv3(x))
        x += skip
        return self.relu(x)


class ResNet(nn.Module):
    def __init__(self, width: int = 8, depths: tuple[int, ...] = (1, 2, 1)) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks, channels = [], width
        for level, depth in enumerate(depths):
            for number in range(depth):
                stride = 2 if level and not number else 1
                blocks.append(Bottleneck(channels, width << level, stride))
                channels = 4 * (width << level)
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.pool(self.relu(self.norm(self.conv(x)))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class ConvNormRelu(nn.Sequential):
    def __init__(self, channels: int, width: int, kernel: int = 3) -> None:
        super().__init__(
            nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )


class Mixed(nn.Module):
    """Four branches side by side, concatenated."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        part = width // 4
        self.short = ConvNormRelu(channels, part, 1)
        self.middle = nn.Sequential(ConvNormRelu(channels, part, 1), ConvNormRelu(part, part))
        self.long = nn.Sequential(ConvNormRelu(channels, part, 1), ConvNormRelu(part, part, 5))
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNormRelu(channels, part, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.short(x), self.middle(x), self.long(x), self.pooled(x)], 1)


class Inception(nn.Module):
    """Its auxiliary head exists in training only: the two programs differ."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNormRelu(3, 8)
        self.lower = Mixed(8, 16)
        self.pool = nn.MaxPool2d(2)
        self.upper = Mixed(16, 16)
        self.drop = nn.Dropout(0.3)
        self.auxiliary = nn.Linear(16, NUM_CLASSES)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.lower(self.stem(x))
        early = self.auxiliary(F.adaptive_avg_pool2d(x, 1).flatten(1)) if self.training else None
        x = self.upper(self.pool(x))
        out = self.head(self.drop(F.adaptive_avg_pool2d(x, 1).flatten(1)))
        return out if early is None else (out, early)


class UNet(nn.Module):
    """Three long skips; whole channels are dropped."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout2d(0.2)
        self.down1 = ConvNormRelu(3, width)
        self.down2 = ConvNormRelu(width, 2 * width)
        self.down3 = ConvNormRelu(2 * width, 4 * width)
        self.bottom = ConvNormRelu(4 * width, 4 * width)
        self.grow3 = nn.ConvTranspose2d(4 * width, 4 * width, 2, 2)
        self.up3 = ConvNormRelu(8 * width, 2 * width)
        self.grow2 = nn.ConvTranspose2d(2 * width, 2 * width, 2, 2)
        self.up2 = ConvNormRelu(4 * width, width)
        self.grow1 = nn.ConvTranspose2d(width, width, 2, 2)
        self.up1 = ConvNormRelu(2 * width, width)
        self.head = nn.Conv2d(width, NUM_CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down1(x)
        middle = self.down2(self.pool(high))
        low = self.down3(self.pool(middle))
        x = self.drop(self.bottom(self.pool(low)))
        x = self.up3(torch.cat([self.grow3(x), low], 1))
        x = self.up2(torch.cat([self.grow2(x), middle], 1))
        x = self.up1(torch.cat([self.grow1(x), high], 1))
        return self.head(x)


class TextLSTM(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.both_ways = nn.LSTM(width, width, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.drop = nn.Dropout(0.2)
        self.summary = nn.LSTM(2 * width, width, batch_first=True)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.both_ways(self.tokens(ids))
        _, (last, _) = self.summary(self.drop(x))
        return self.head(torch.tanh(self.hidden(last[-1])))


# --- Hugging Face


@functools.cache
def _transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def gpt2() -> nn.Module:
    library = _transformers()
    config = library.GPT2Config(
        vocab_size=VOCABULARY, n_positions=NUM_TOKENS, n_embd=32, n_layer=2, n_head=4, use_cache=False
    )
    return library.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    library = _transformers()
    config = library.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.1,
        use_cache=False,
    )
    return library.LlamaForCausalLM(config)


def bert() -> nn.Module:
    library = _transformers()
    config = library.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=NUM_TOKENS,
    )
    return library.BertForMaskedLM(config)


def vit() -> nn.Module:
    library = _transformers()
    config = library.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=NUM_CLASSES,
    )
    return library.ViTForImageClassification(config)


def t5() -> nn.Module:
    library = _transformers()
    config = library.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return library.T5ForConditionalGeneration(config)


def causal_batch(num_samples: int, generator: torch.Generator) -> Batch:
    tokens = draw_tokens(num_samples, generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded_batch(num_samples: int, generator: torch.Generator) -> Batch:
    tokens, mask = draw_tokens(num_samples, generator), draw_mask(num_samples)
    labels = draw_tokens(num_samples, generator).masked_fill(mask == 0, -100)
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def translation_batch(num_samples: int, generator: torch.Generator) -> Batch:
    batch = padded_batch(num_samples, generator)
    assert isinstance(batch, dict)
    return {**batch, "labels": draw_tokens(num_samples, generator, NUM_TOKENS - 4)}


def pixel_batch(num_samples: int, generator: torch.Generator) -> Batch:
    return {
        "pixel_values": draw_images(num_samples, generator),
        "labels": draw_classes(num_samples, generator),
    }


def label_accuracy(out: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return (out.logits.argmax(-1) == batch["labels"]).float().mean()


FAMILIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("own_gpt", OwnGPT, token_batch, token_loss, {"accuracy": class_accuracy}),
        Entry("gpt2", gpt2, causal_batch),
        Entry("llama", llama, padded_batch),
        Entry("bert", bert, padded_batch),
        Entry("vit", vit, pixel_batch, metrics={"accuracy": label_accuracy}),
        Entry("resnet", ResNet, image_pair, F.cross_entropy, {"accuracy": pair_accuracy}),
        Entry("t5", t5, translation_batch),
        Entry("unet", UNet, pixel_class_batch, class_loss),
        Entry("lstm", TextLSTM, text_class_batch, class_loss, {"accuracy": class_accuracy}),
        Entry("inception", Inception, image_batch, auxiliary_loss),
    )
}


# --- easy to cut wrongly


class TwoLayers(nn.Module):
    """What most of the small modules below are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Frozen(TwoLayers):
    """A frozen weight between trained ones, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(FEATURES, FEATURES)
        self.first.requires_grad_(requires_grad=False)
        self.third.weight.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(super().forward(x))


class SharedNorm(nn.Module):
    """One BatchNorm used twice: its statistics move twice per step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.middle = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.middle(self.norm(x))))


class MovingMean(TwoLayers):
    """A buffer updated in place without a gradient, then used."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.second(x - self.mean)


class SliceAssignment(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.narrow = nn.Linear(FEATURES, FEATURES // 2)
        self.last = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        x = self.first(x)
        out[:, : FEATURES // 2] = self.narrow(x)
        out[:, FEATURES // 2 :] = x[:, : FEATURES // 2]
        return self.last(out)


class InPlaceOnSkip(nn.Module):
    """A view taken before a write sees the write; a skip taken before a copy does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.branch = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        front = x[:, :4]
        branch = self.branch(x)
        copied = x.clone()
        window = copied.view(-1, 2, FEATURES // 2)
        copied.mul_(2)
        return self.last(branch) + window.reshape(-1, FEATURES) + F.pad(front, (0, 4))


class WeightNorm(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(self.first)


class WithoutGradient(TwoLayers):
    """The same layer once with and once without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.second(x)
        return self.second(self.first(x)) + target


class RandomPath(TwoLayers):
    """Stochastic depth with a mask drawn by torch.rand."""

    def forward(self, x: Tensor) -> Tensor:
        path = self.first(x)
        if self.training:
            kept = torch.rand(path.shape[0], 1, device=path.device) > 0.3
            path = path * kept.to(path.dtype) / 0.7
        return self.second(x + path)


class DropPath(TwoLayers):
    """Stochastic depth as timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        path = self.first(x)
        if self.training:
            path = path * path.new_empty((path.shape[0], 1)).bernoulli_(0.7).div_(0.7)
        return self.second(x + path)


class HalfLayer(nn.Module):
    """A layer whose weights are bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.scale = nn.Parameter(torch.ones(FEATURES, dtype=torch.bfloat16))
        self.last = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        # No matrix product in bfloat16: some hosts have no such kernel.
        return self.last((self.first(x).bfloat16() * self.scale).relu().float())


class FullPrecisionRegion(TwoLayers):
    """Stays in float32 whatever autocast surrounds it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.first(x.float())
        return self.second(x)


class HiddenAlias(TwoLayers):
    """Neither `type_as` nor a dropout of nothing makes a new tensor here: the write goes to the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(FEATURES, FEATURES)
        self.fourth = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        step = self.third(self.second(x))
        same = F.dropout(skip.type_as(x), 0.0, self.training)
        same += step
        return self.fourth(same) + skip


class SharedNoise(TwoLayers):
    """The same random numbers in two layers; they need nothing but the batch, yet must be drawn once."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x) if self.training else torch.ones_like(x)
        return self.second(torch.relu(self.first(x + noise))) * noise


class TwoMasks(TwoLayers):
    """Two dropouts of the same tensor: were their masks equal, nothing would be left of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        dropped = F.dropout(x, 0.5, self.training) - F.dropout(x, 0.5, self.training)
        return self.second(dropped)


class WrittenThroughView(TwoLayers):
    """A row of a buffer is overwritten early and read late."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("queue", torch.zeros(4, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            self.queue[0].copy_(x.detach().mean(0))
        return self.third(self.second(x)) + self.queue.sum(0)


class FollowsWeights(TwoLayers):
    """A buffer that follows the weight of another layer."""

    slow: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("slow", torch.zeros(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            with torch.no_grad():
                self.slow.mul_(0.9).add_(self.second.weight, alpha=0.1)
        return self.third(self.second(x) + F.linear(x, self.slow))


class Checkpointed(TwoLayers):
    """The user's own gradient checkpoint, with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self._inner, x, use_reentrant=False))

    def _inner(self, x: Tensor) -> Tensor:
        return self.drop(torch.relu(self.first(x)))


PITFALLS: dict[str, Entry] = {
    kind.__name__: Entry(kind.__name__, kind, feature_batch, square_loss)
    for kind in (
        Frozen,
        SharedNorm,
        MovingMean,
        SliceAssignment,
        InPlaceOnSkip,
        WeightNorm,
        WithoutGradient,
        RandomPath,
        DropPath,
        HalfLayer,
        FullPrecisionRegion,
        HiddenAlias,
        SharedNoise,
        TwoMasks,
        WrittenThroughView,
        FollowsWeights,
        Checkpointed,
    )
}


class WritesInput(TwoLayers):
    """Changes a field of the batch in place, and uses it in two layers after that."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, :2].mul_(0.5)  # refused
        return self.second(torch.relu(self.first(x)) + x) + x


WRITES_INPUT = Entry("WritesInput", WritesInput, feature_batch, square_loss)


# --- to be refused; a line that must be named ends with "# refused"


class RoundStraightThrough(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class StraightThrough(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(RoundStraightThrough.apply(self.first(x)))  # refused


class PythonLayerDrop(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training and random.random() < 0.5:  # refused
            return x
        return self.second(x)


class ReassignedBuffer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.step = self.step + 1  # refused
        return self.second(self.first(x)) * (1 + 0.1 * self.step)


class DataDependentBranch(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:  # refused
            return self.second(x)
        return x


class ReadsANumber(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * x.abs().max().item()  # refused


class ThroughNumpy(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        shift = torch.from_numpy(x.detach().numpy().copy())  # refused
        return self.second(self.first(x) + shift)


class FixedBatch(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).view(4, 2, FEATURES // 2)  # refused
        return self.second(x.flatten(1))


class UnlistedOperator(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        singular = torch.linalg.svdvals(self.first(x))  # refused
        return self.second(x) * singular.sum()


def loss_per_sample(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return (out - batch["y"]).square().mean(1)


def batch_with_a_list(num_samples: int, generator: torch.Generator) -> Batch:
    batch = feature_batch(num_samples, generator)
    assert isinstance(batch, dict)
    return {**batch, "names": ["sample"] * num_samples}


REFUSED: dict[str, Entry] = {
    kind.__name__: Entry(kind.__name__, kind, feature_batch, square_loss)
    for kind in (
        StraightThrough,
        PythonLayerDrop,
        ReassignedBuffer,
        DataDependentBranch,
        ReadsANumber,
        ThroughNumpy,
        FixedBatch,
        UnlistedOperator,
    )
} | {
    "LossPerSample": Entry("LossPerSample", TwoLayers, feature_batch, loss_per_sample),
    "FieldNotATensor": Entry("FieldNotATensor", TwoLayers, batch_with_a_list, square_loss),
}
