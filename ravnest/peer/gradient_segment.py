"""One segment of an exact update, as a member sums it: the mean gradient over all samples of the batch.

Each member weighs the mean gradient of its share by its samples. One number for each parameter comes after
the gradients: above zero if somebody has a gradient of it. So all members leave out the same parameters.
Statistics that a forward writes come last and travel exactly: those of all shares together are less noisy.
Sums are encoded again at each hop, the mean once, and all members read the same bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ravnest.codec import decode_tensor, encode_tensor
from ravnest.config import WireFormat
from ravnest.engine.norms import find_norms
from ravnest.engine.stage import SummedGradient
from ravnest.model.state.state_dict import Layout
from ravnest.peer.segment_state import EncodedChunk, find_largest
from ravnest.protocol.tensors import Buffer, TensorSpec

_LARGEST = 1e30  # of a gradient: sums over many samples stay finite
_NO_SAMPLES = 1e-30  # the weight of a share without samples, so that a mean exists where nobody has any


class GradientSegment:
    """The share of one stage: `layout` is of the trained parameters of the segment.

    `statistics` is of what a forward writes, and `state` has it.
    """

    @torch.no_grad()
    def __init__(
        self,
        layout: Layout,
        summed: SummedGradient,
        wire_format: WireFormat,
        device: str,
        statistics: Layout | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._layout, self._wire_format, self._device = layout, wire_format, device
        self._statistics = statistics or Layout(layout.start, layout.stop, ())
        self._num_gradients, self._num_exact = layout.size, self._statistics.size
        self._vector = torch.zeros(layout.size + len(layout.entries) + self._num_exact, device=device)
        gradients, presence, written = self._split(self._vector)
        self._statistics.gather(state or {}, written)
        for number, (name, view) in enumerate(layout.views(gradients).items()):
            if name in summed.sums:
                view.copy_(summed.sums[name])
                presence[number] = 1.0
        if summed.num_samples:
            gradients.div_(summed.divisor)
        self._is_finite = find_largest(gradients) <= _LARGEST
        if not self._is_finite:
            gradients.zero_()
            presence.zero_()
        self._num_samples = summed.num_samples

    @property
    def is_finite(self) -> bool:
        """Whether the share counts: microbatches were finite, but their sum may not be."""
        return self._is_finite

    @property
    def weight(self) -> float:
        """How much the share counts: its samples."""
        return float(self._num_samples) if self._num_samples and self._is_finite else _NO_SAMPLES

    def _split(self, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rest = vector[self._num_gradients :]
        stop = len(rest) - self._num_exact
        return vector[: self._num_gradients], rest[:stop], rest[stop:]

    @property
    def edges(self) -> tuple[int, ...]:
        """Where the vector changes its kind: gradients, whether there are any, statistics."""
        return self._num_gradients, len(self._vector) - self._num_exact, len(self._vector)

    def fault(self, where: slice, value: EncodedChunk, weight: float, num_shares: int) -> str | None:
        """Return why no honest member sends this chunk, if so."""
        return value.judge(self._spec(where))[1]

    def begin(self, where: slice, weight: float) -> EncodedChunk:
        """Return the own share, encoded."""
        return self._encode(where, self._vector[where] * weight)

    def add(self, where: slice, value: EncodedChunk, weight: float) -> EncodedChunk:
        """Return the sum with the own share, encoded again."""
        return self._encode(where, self._sum(where, value, weight))

    def finish(self, where: slice, value: EncodedChunk, weight: float, total: float) -> EncodedChunk:
        """Return the mean, encoded once for all."""
        return self._encode(where, self._sum(where, value, weight).div_(total))

    def keep(self, value: EncodedChunk) -> EncodedChunk:
        """Return the mean without its tensor."""
        return replace(value, items=None)

    def content(self, value: EncodedChunk) -> Buffer:
        """Return the bytes of a mean."""
        return value.buffer

    def _sum(self, where: slice, value: EncodedChunk, weight: float) -> Tensor:
        assert value.items is not None
        return value.items.add_(self._vector[where], alpha=weight)

    def _spec(self, where: slice) -> TensorSpec:
        is_exact = where.start >= self.edges[1]  # a rounded variance may be below zero
        wire_format = WireFormat.FP32 if is_exact else self._wire_format
        return TensorSpec("float32", (where.stop - where.start,), wire_format)

    def _encode(self, where: slice, items: Tensor) -> EncodedChunk:
        spec = self._spec(where)
        buffer, is_same = encode_tensor(items, spec.wire_format), spec.wire_format is WireFormat.FP32
        return EncodedChunk(spec, buffer, items if is_same else decode_tensor(buffer, spec, self._device))

    @torch.no_grad()
    def read(self, pieces: Sequence[EncodedChunk]) -> dict[str, Tensor]:
        """Return the mean gradients of a round by name, but for those that no member may apply.

        A parameter stays as it is in all clusters, however they are cut, if nobody has a gradient of it or
        its norm is not finite.
        """
        gradients, presence, _ = self._split(self._decode(pieces))
        found = self._layout.views(gradients)
        norms = find_norms(list(found.values()))
        pairs = zip(found.items(), norms, presence.tolist(), strict=True)
        return {name: view for (name, view), norm, has in pairs if has > 0 and math.isfinite(norm)}

    @torch.no_grad()
    def read_statistics(self, pieces: Sequence[EncodedChunk]) -> dict[str, Tensor]:
        """Return how far the mean statistics of a round are from the own ones, by name."""
        (*_, mean), (*_, own) = self._split(self._decode(pieces)), self._split(self._vector)
        return self._statistics.views(mean - own)

    def _decode(self, pieces: Sequence[EncodedChunk]) -> Tensor:
        decoded = (decode_tensor(piece.buffer, piece.spec, self._device) for piece in pieces)
        return torch.cat((self._vector[:0], *decoded))
