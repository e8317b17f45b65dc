"""Built-in ModelProfiles, computed from the dimensions of well-known models.

The one idea: describe each position for one sample as a `_Part`, then multiply by the batch. All
tensors are fp32. A position keeps for its backward what autograd saves, its own input included, its
output not (that is the next position's input); attention is flash-style, so no T x T matrix is kept,
and there is no dropout. `ravnest plan` uses these; real models will be measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ravnest.errors import ConfigError
from ravnest.plan.types import ModelProfile

_FLOAT_BYTES = 4
_ID_BYTES = 8  # token ids and labels travel as int64
_ID_FLOATS = _ID_BYTES // _FLOAT_BYTES
_LARGEST_BATCH = 1_000_000


def builtin_profile(name: str, samples_per_batch: int | None = None) -> ModelProfile:
    """Return the profile of a well-known model; parameters do not depend on the batch, all else does.

    A head tied to the embedding is counted at both ends of the line, for both ends hold a copy.
    """
    model = _MODELS.get(name)
    if model is None:
        known = ", ".join(BUILTIN_NAMES)
        raise ConfigError(f"unknown model {name!r}; choose one of {known}, or give a profile file")
    samples = model.samples if samples_per_batch is None else samples_per_batch
    if not 1 <= samples <= _LARGEST_BATCH:
        raise ConfigError(f"samples per batch {samples}: choose between 1 and {_LARGEST_BATCH}")
    parts = tuple(model.parts())
    forward = tuple(float(samples * part.forward) for part in parts)
    crossing = (model.input_bytes, *(part.out * _FLOAT_BYTES for part in parts[:-1]))
    return ModelProfile(
        name=name,
        samples_per_batch=samples,
        parameter_bytes=tuple(float(_FLOAT_BYTES * (p.matrices + p.others)) for p in parts),
        matrix_bytes=tuple(float(_FLOAT_BYTES * part.matrices) for part in parts),
        forward_flops=forward,
        backward_flops=tuple(2 * work for work in forward),
        saved_bytes=tuple(float(samples * _FLOAT_BYTES * part.saved) for part in parts),
        crossing_bytes=tuple(float(samples * size) for size in (*crossing, model.label_bytes)),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One position for one sample: parameters, multiply-adds as FLOPs, floats saved and sent on."""

    matrices: int  # parameters in hidden 2-D matrices or convolution filters
    others: int  # embeddings, output head, norms, biases
    forward: int
    saved: int
    out: int = 0  # unused at the head, which sends nothing on


@dataclass(frozen=True, slots=True)
class _Transformer:
    """Blocks of attention and MLP on a residual stream of `width` floats per token."""

    samples: int
    tokens: int
    vocabulary: int
    width: int
    blocks: int
    heads: int
    feed_forward: int
    other_embeddings: int = 0  # rows for position and token type
    norm_vectors: int = 2  # scale and shift; an RMS norm has a scale only
    has_bias: bool = True
    is_gated: bool = False  # three MLP matrices (SwiGLU) instead of two
    is_masked: bool = False  # BERT: normed embeddings, and a hidden layer with GELU in the head

    @property
    def input_bytes(self) -> int:
        return self.tokens * _ID_BYTES

    @property
    def label_bytes(self) -> int:
        return self.tokens * _ID_BYTES

    @property
    def _norm(self) -> int:
        return self.norm_vectors * self.width

    def parts(self) -> Iterator[_Part]:
        yield self._embedding()
        for _ in range(self.blocks):
            yield self._attention()
            yield self._mlp()
        yield self._head()

    def _embedding(self) -> _Part:
        # Saved: the ids and, if normed, the norm's input, mean and deviation.
        rows = self.vocabulary + self.other_embeddings
        norm = self._norm if self.is_masked else 0
        saved = _ID_FLOATS + (self.width + self.norm_vectors if self.is_masked else 0)
        stream = self.tokens * self.width
        return _Part(0, rows * self.width + norm, stream, self.tokens * saved, stream)

    def _attention(self) -> _Part:
        # Saved per token: residual, normed residual, q, k, v, output (each a width), one log-sum
        # per head, and the norm's statistics. A post-norm block keeps as much.
        matrices = 4 * self.width**2
        biases = 4 * self.width * self.has_bias
        scores = 4 * self.tokens**2 * self.width  # q k^T and weights times v, uncut by a causal mask
        saved = 6 * self.width + self.heads + self.norm_vectors
        return self._hidden(matrices, biases + self._norm, scores, saved)

    def _mlp(self) -> _Part:
        # Saved per token: residual, normed residual, norm statistics, and of the hidden layer the
        # input and output of the activation; a gate adds the other factor and the product.
        matrices = (2 + self.is_gated) * self.width * self.feed_forward
        biases = (self.feed_forward + self.width) * self.has_bias
        saved = 2 * self.width + self.norm_vectors + (2 + 2 * self.is_gated) * self.feed_forward
        return self._hidden(matrices, biases + self._norm, 0, saved)

    def _hidden(self, matrices: int, others: int, extra_flops: int, saved: int) -> _Part:
        forward = 2 * matrices * self.tokens + extra_flops
        return _Part(matrices, others, forward, saved * self.tokens, self.tokens * self.width)

    def _head(self) -> _Part:
        # Saved per token: residual and normed residual, log-probabilities, norm statistics, label;
        # BERT's hidden layer adds the input and output of its GELU.
        hidden = self.width**2 if self.is_masked else 0
        biases = self.width + self.vocabulary if self.is_masked else 0
        decoder = self.vocabulary * self.width
        widths = 4 if self.is_masked else 2
        saved = widths * self.width + self.vocabulary + self.norm_vectors + _ID_FLOATS
        forward = 2 * (hidden + decoder) * self.tokens
        return _Part(hidden, decoder + self._norm + biases, forward, saved * self.tokens)


@dataclass(frozen=True, slots=True)
class _ResNet:
    """Bottleneck blocks (He et al. 2015) with the stride in the 3 x 3 convolution."""

    samples: int
    pixels: int
    blocks: tuple[int, ...]
    classes: int

    @property
    def input_bytes(self) -> int:
        return 3 * self.pixels**2 * _FLOAT_BYTES

    @property
    def label_bytes(self) -> int:
        return _ID_BYTES

    def parts(self) -> Iterator[_Part]:
        side = self.pixels // 4
        yield self._stem(side)
        channels = 64
        for level, num_blocks in enumerate(self.blocks):
            for index in range(num_blocks):
                stride = 2 if level and not index else 1
                yield _bottleneck(channels, 64 << level, side, side // stride)
                channels, side = 4 * (64 << level), side // stride
        yield self._head(channels, side)

    def _stem(self, side: int) -> _Part:
        # Saved: image, convolution output, its ReLU, and the pooling's int64 indices.
        filters = 7 * 7 * 3 * 64
        area = (2 * side) ** 2
        saved = 3 * self.pixels**2 + 2 * 64 * area + _ID_FLOATS * 64 * side**2
        return _Part(filters, 2 * 64, 2 * filters * area, saved, 64 * side**2)

    def _head(self, channels: int, side: int) -> _Part:
        # Saved: the last feature map, its mean, log-probabilities, the label.
        weights = channels * self.classes
        saved = channels * side**2 + channels + self.classes + _ID_FLOATS
        return _Part(0, weights + self.classes, 2 * weights, saved)


def _bottleneck(channels: int, width: int, side: int, out_side: int) -> _Part:
    # Saved: the input, per convolution its output (for the norm), and the two inner ReLUs.
    out = 4 * width
    shortcut = channels * out if channels != out else 0
    reduce, conv, expand = channels * width, 9 * width**2, width * out
    norms = 2 * (width + width + out + (out if shortcut else 0))
    area, out_area = side**2, out_side**2
    forward = 2 * (reduce * area + (conv + expand + shortcut) * out_area)
    saved = (channels + 2 * width) * area + (2 * width + out * (2 if shortcut else 1)) * out_area
    return _Part(reduce + conv + expand + shortcut, norms, forward, saved, out * out_area)


_MODELS: dict[str, _Transformer | _ResNet] = {
    "gpt2": _Transformer(8, 1024, 50257, 768, 12, 12, 3072, other_embeddings=1024),
    "gpt2-xl": _Transformer(1, 1024, 50257, 1600, 48, 25, 6400, other_embeddings=1024),
    "llama-7b": _Transformer(
        1, 2048, 32000, 4096, 32, 32, 11008, norm_vectors=1, has_bias=False, is_gated=True
    ),
    "resnet50": _ResNet(32, 224, (3, 4, 6, 3), 1000),
    "bert-base": _Transformer(16, 512, 30522, 768, 12, 12, 3072, other_embeddings=514, is_masked=True),
}
BUILTIN_NAMES = tuple(_MODELS)
