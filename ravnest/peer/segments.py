"""One segment as a member of a round averages it: its change since the anchor, or an exact gradient.

The anchor is the last average, alike in every owner; changes since then go around the ring. Each hop adds its
share and encodes again; the member adds its rounding error to its share in the next round. The mean is
encoded once, and all owners read the same bytes. Statistics that a forward writes travel exactly: a rounded
variance may be below zero. To be trimmed, contributions travel side by side, exactly.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ravnest.averaging.direct import Judged, Row, digest_content
from ravnest.codec import ErrorFeedback, decode_tensor, encode_tensor
from ravnest.config import WireFormat
from ravnest.engine.norms import find_norms
from ravnest.engine.stage import SummedGradient
from ravnest.engine.train_config import TrainConfig
from ravnest.errors import ProtocolError
from ravnest.model.state.state_dict import FlatEntry, Layout
from ravnest.peer.robust_mean import dither, find_mean, find_square, judge_rows
from ravnest.protocol.tensors import Buffer, TensorSpec

_RANGE = 1e3  # times the largest weight or own change: further away no honest mean is
_PIECE_ITEMS = 1 << 18
_LEAST_TRIMMED = 4  # owners: of fewer too little would be left


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A piece of a vector as it travels, and as all receivers read it; read again once it is kept.

    One of several contributions side by side has a row for each, and its weight at the end of the row.
    """

    spec: TensorSpec
    buffer: Buffer
    items: Tensor | None

    def __len__(self) -> int:
        return self.spec.shape[0] if len(self.spec.shape) == 1 else self.spec.shape[1] - 1

    def judge(self, wanted: TensorSpec) -> tuple[float, str | None]:
        """Return its largest absolute value, and why no honest member sends it, if so."""
        assert self.items is not None
        if self.spec != wanted:
            came = f"{self.spec.wire_format} {self.spec.shape}"
            return 0.0, f"a part came as {came}, not as {wanted.wire_format} {wanted.shape}"
        largest = find_largest(self.items.flatten())
        return largest, None if math.isfinite(largest) else "what came is not finite"


class SegmentState:
    """A segment of one stage; `state` is what training begins with, `written` what a forward writes.

    `outer` is the outer momentum to go on with.
    """

    def __init__(
        self,
        layout: Layout,
        written: Collection[str],
        training: TrainConfig,
        device: str,
        state: Mapping[str, Tensor],
        outer: Mapping[str, Tensor] | None = None,
    ) -> None:
        trained = [entry for entry in layout.entries if entry.name not in written]
        self._layout = _arrange(layout, [*trained, *(e for e in layout.entries if e.name in written)])
        self._moments = _arrange(layout, ())
        self._trained = _arrange(layout, trained)
        self._num_trained = self._trained.size
        self._num_state = self._layout.size
        self._rule, self._wire_format, self._device = training.averaging, training.deltas, device
        self.reset(state)
        if outer and len(self._outer):
            self._trained.gather(outer, self._outer)
        self._coming: Tensor | None = None  # another owner's anchor, as far as it came
        self._num_came = 0
        self._vector: Tensor | None = None  # the change and the momenta, while a round is open
        self._num_owners = 0
        self._weight = self._last_weight = 0.0
        self._last_norm = math.inf  # of the last mean, for clipping
        self._clip = 1.0
        self._limit = math.inf

    def reset(self, state: Mapping[str, Tensor]) -> None:
        """Make this state the anchor, as if training began with it."""
        self._anchor = self._layout.gather(state).to(self._device)
        self._outer = torch.zeros(self._num_trained if self._rule.outer_momentum else 0, device=self._device)
        self._feedback = ErrorFeedback(self._wire_format, self._num_trained, self._device)

    @property
    def anchors(self) -> dict[str, Tensor]:
        """The anchor by name."""
        return self._layout.views(self._anchor)

    @property
    def outer(self) -> dict[str, Tensor]:
        """The outer momentum by name, if there is one."""
        return self._trained.views(self._outer) if len(self._outer) else {}

    @torch.no_grad()
    def open(
        self, state: Mapping[str, Tensor], moments: Mapping[str, Tensor], weight: float, num_owners: int = 2
    ) -> str | None:
        """Copy the state of this member; return why it is no contribution, if so."""
        self._num_owners = num_owners
        entries = [entry for entry in self._layout.entries if entry.name in moments]
        self._moments = _arrange(self._layout, entries)
        vector = torch.empty(self._num_state + self._moments.size, device=self._device)
        change, self._vector, self._weight = vector[: self._num_state], vector, weight
        self._layout.gather(state, change).sub_(self._anchor)
        self._moments.gather(moments, vector[self._num_state :])
        largest, trained = find_largest(vector), slice(self._num_trained)
        if not math.isfinite(largest):
            return "its own weights or momenta are not finite"
        if self._num_trained < len(vector):
            largest = find_largest(change[trained])
        self._limit = _RANGE * (1.0 + max(largest, find_largest(self._anchor[trained])))
        if self._rule.clip is not None:
            norm = float(change[trained].norm())
            self._clip = min(1.0, self._rule.clip * self._last_norm / norm) if norm else 1.0
        return None

    @property
    def trained(self) -> Layout:
        """The trained parameters alone."""
        return self._trained

    @property
    def statistics(self) -> Layout:
        """What a forward writes, alone."""
        return _arrange(self._layout, self._layout.entries[len(self._trained.entries) :])

    @property
    def num_items(self) -> int:
        """Weights and statistics in it."""
        return self._num_state

    @property
    def edges(self) -> tuple[int, ...]:
        """Where the vector changes its kind: weights, statistics, momenta."""
        assert self._vector is not None
        return self._num_trained, self._num_state, len(self._vector)

    def _spec(self, where: slice) -> TensorSpec:
        is_exact = self._num_trained <= where.start < self._num_state
        wire_format = WireFormat.FP32 if is_exact else self._wire_format
        return TensorSpec("float32", (where.stop - where.start,), wire_format)

    def fault(self, where: slice, value: EncodedChunk, weight: float, num_shares: int) -> str | None:
        """Return why no honest member sends this chunk, if so."""
        assert value.items is not None
        items, has_rows = value.items, num_shares > 0 and self._is_trimmed
        largest, reason = value.judge(self._rows_spec(where, num_shares) if has_rows else self._spec(where))
        if reason is not None:
            return reason
        weight = weight if num_shares and not has_rows else 1.0
        largest = find_largest(items[:, :-1].flatten()) if has_rows else largest
        if where.start < self._num_trained and largest > self._limit * weight:
            change = largest / weight if weight else math.inf
            return f"a mean change of {change:.3g} came, where at most {self._limit:.3g} is in range"
        return None

    def begin(self, where: slice, weight: float) -> EncodedChunk:
        """Return the own share, encoded."""
        if self._is_trimmed:
            return self._side_by_side(where, weight, ())
        return self._encode(where, self._add_share(where, None, weight))

    def add(self, where: slice, value: EncodedChunk, weight: float) -> EncodedChunk:
        """Return the sum with the own share, encoded again."""
        assert value.items is not None
        if self._is_trimmed:
            return self._side_by_side(where, weight, (value.items,))
        return self._encode(where, self._add_share(where, value.items, weight))

    def finish(self, where: slice, value: EncodedChunk, weight: float, total: float) -> EncodedChunk:
        """Return the mean, encoded once for all."""
        assert value.items is not None
        if self._is_trimmed:
            rows = self._side_by_side(where, weight, (value.items,)).items
            assert rows is not None
            mean = _trimmed_mean(rows).mul_(total)
            self._add_owed(where, mean)
        else:
            mean = self._add_share(where, value.items, weight)
        return self._encode(where, mean.div_(total), total)

    @property
    def _is_trimmed(self) -> bool:
        return self._rule.is_trimmed and self._num_owners >= _LEAST_TRIMMED

    def _rows_spec(self, where: slice, num_rows: int) -> TensorSpec:
        return TensorSpec("float32", (num_rows, where.stop - where.start + 1), WireFormat.FP32)

    def _side_by_side(self, where: slice, weight: float, rows: tuple[Tensor, ...]) -> EncodedChunk:
        """Return the contributions so far with the own one below them."""
        assert self._vector is not None
        own = self._vector[where] * (self._clip if where.start < self._num_trained else 1.0)
        own = torch.cat((own, own.new_tensor([weight]))).unsqueeze(0)
        found = torch.cat((*rows, own))
        return EncodedChunk(self._rows_spec(where, len(found)), encode_tensor(found, WireFormat.FP32), found)

    def keep(self, value: EncodedChunk) -> EncodedChunk:
        """Return the mean without its tensor; its bytes are fewer."""
        return replace(value, items=None)

    def content(self, value: EncodedChunk) -> Buffer:
        """Return the bytes of a mean."""
        return value.buffer

    def _add_share(self, where: slice, items: Tensor | None, weight: float) -> Tensor:
        """Return the own share, or add it to `items` in place: no other code reads that memory."""
        assert self._vector is not None
        factor = weight * self._clip if where.start < self._num_trained else weight
        own = self._vector[where]
        found = own * factor if items is None else items.add_(own, alpha=factor)
        self._add_owed(where, found)
        return found

    def _add_owed(self, where: slice, items: Tensor) -> None:
        # Of samples that are fewer now, no more may be owed than they bring.
        self._feedback.add_owed(where, items, min(1.0, self._weight / (self._last_weight or 1.0)))

    def _encode(self, where: slice, items: Tensor, unit: float = 1.0) -> EncodedChunk:
        spec = self._spec(where)
        if spec.wire_format is WireFormat.FP32:
            return EncodedChunk(spec, encode_tensor(items, WireFormat.FP32), items)
        found = self._feedback.encode(where, items, unit)
        return EncodedChunk(spec, found.buffer, found.decoded)

    # In a robust round.

    @torch.no_grad()
    def contribute(self, where: slice) -> EncodedChunk:
        """Return the own change of a robust round, encoded once; what that rounds off is owed."""
        assert self._vector is not None
        items = self._vector[where].clone()
        share = min(1.0, self._weight / (self._last_weight or 1.0)) / self._weight
        self._feedback.add_owed(where, items, share)
        return replace(self._encode(where, items, self._weight), items=None)

    @torch.no_grad()
    def examine(self, where: slice, value: EncodedChunk) -> tuple[float, str | None]:
        """Return the squared length of the weights' change in it, and why nobody honest sends it, if so."""
        if value.spec != self._spec(where):
            return 0.0, replace(value, items=torch.zeros(0)).judge(self._spec(where))[1]
        items = decode_tensor(value.buffer, value.spec)
        fault = self.fault(where, replace(value, items=items), 1.0, 0)
        if fault is not None or where.start >= self._num_trained:
            return 0.0, fault
        return find_square(items), None

    @torch.no_grad()
    def combine(self, where: slice, rows: Sequence[Row[EncodedChunk]]) -> EncodedChunk:
        """Return the robust mean, encoded: of the same rows the same bytes, on any PC."""
        spec = self._spec(where)
        mean = find_mean(*_read_rows(rows))
        if spec.wire_format is WireFormat.INT4:
            mean = dither(mean, b"".join(digest_content(row.value.buffer) for row in rows))
        return EncodedChunk(spec, encode_tensor(mean, spec.wire_format), None)

    @torch.no_grad()
    def judge(self, where: slice, rows: Sequence[Row[EncodedChunk]]) -> list[Judged]:
        """Return what is seen of each contribution; of statistics nothing."""
        if where.start >= self._num_trained:
            return [Judged(0.0, 0.0, 0.0, 0) for _ in rows]
        return judge_rows(*_read_rows(rows))

    @torch.no_grad()
    def commit(
        self,
        pieces: Sequence[EncodedChunk],
        strength: float,
        state: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        is_blocking: bool,
    ) -> dict[str, Tensor]:
        """Move the anchor and the momenta; return what is to be added to the live state.

        In a blocking round nothing was trained meanwhile, and the state becomes the anchor.
        """
        assert self._vector is not None
        stops = accumulate((len(piece) for piece in pieces), initial=0)
        squares = 0.0
        for low, piece in zip(stops, pieces, strict=False):
            where = slice(low, low + len(piece))
            mean, change = decode_tensor(piece.buffer, piece.spec, self._device), self._vector[where]
            change.neg_().add_(mean).mul_(strength)
            if where.start < self._num_state:
                change.add_(self._move(where, mean))
            if self._rule.clip is not None and where.start < self._num_trained:
                squares += float(mean.square().sum())
        self._last_norm, self._last_weight = math.sqrt(squares) or math.inf, self._weight
        for name, change in self._moments.views(self._vector[self._num_state :]).items():
            moments[name].add_(change)
        changes = self._layout.views(self._vector[: self._num_state])
        anchors = self._layout.views(self._anchor)
        for number, (name, change) in enumerate(changes.items()):
            is_statistic = self._layout.entries[number].offset >= self._num_trained
            if is_blocking:
                torch.sub(anchors[name], state[name], out=change)
            elif is_statistic:
                # They keep what they learned since the copy, and stay between what they are and the average.
                gap = anchors[name] - state[name]
                change.clamp_(gap.clamp(max=0.0), gap.clamp(min=0.0))
        self._feedback.commit()
        self._vector = None
        return {name: change.to(state[name].dtype) for name, change in changes.items()}

    def _move(self, where: slice, mean: Tensor) -> Tensor | float:
        """Move the anchor; return how much further it went than the mean."""
        anchor = self._anchor[where]
        if where.start >= len(self._outer):
            rate = self._rule.outer_rate if where.start < self._num_trained else 1.0
            anchor.add_(mean, alpha=rate)
            return mean * (rate - 1.0) if rate != 1.0 else 0.0
        momentum = self._outer[where].mul_(self._rule.outer_momentum).add_(mean)
        step = torch.add(mean, momentum, alpha=self._rule.outer_momentum).mul_(self._rule.outer_rate)
        anchor.add_(step)
        return step.sub_(mean)

    def abort(self) -> None:
        """Forget the round, if one is open: anchor and what is owed stay as they were."""
        self._feedback.abort()
        self._vector = self._coming = None
        self._num_came = 0

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Return the anchor, and the outer momentum after it, for an owner that missed a round."""
        for tensor, start in ((self._anchor, 0), (self._outer, self._num_state)):
            for low in range(0, len(tensor), _PIECE_ITEMS):
                yield start + low, tensor[low : low + _PIECE_ITEMS]

    def receive(self, offset: int, items: Tensor) -> None:
        """Add a piece of another owner's anchor; they come in order."""
        if self._coming is None:
            self._coming = torch.empty(self._num_state + len(self._outer), device=self._device)
        if offset != self._num_came or offset + len(items) > len(self._coming):
            raise ProtocolError(f"items {offset} to {offset + len(items)} of an anchor are not the next ones")
        if not math.isfinite(find_largest(items)):
            raise ProtocolError(f"items {offset} to {offset + len(items)} of an anchor are not finite")
        self._coming[offset : offset + len(items)] = items
        self._num_came += len(items)

    @property
    def is_complete(self) -> bool:
        """Whether all of another owner's anchor has come."""
        return self._num_came == self._num_state + len(self._outer)

    def adopt(self) -> None:
        """Make what came the anchor; an empty segment needs nothing."""
        if self._coming is not None:
            self._anchor, self._outer = self._coming[: self._num_state], self._coming[self._num_state :]
        self._coming, self._num_came = None, 0


def _read_rows(rows: Sequence[Row[EncodedChunk]]) -> tuple[list[Tensor], list[float], list[float]]:
    tensors = [decode_tensor(row.value.buffer, row.value.spec) for row in rows]
    return tensors, [row.weight for row in rows], [row.factor for row in rows]


def _arrange(layout: Layout, entries: Sequence[FlatEntry]) -> Layout:
    """Return a layout of these tensors in this order."""
    offsets = accumulate((entry.size for entry in entries), initial=0)
    placed = (replace(entry, offset=offset) for entry, offset in zip(entries, offsets, strict=False))
    return Layout(layout.start, layout.stop, tuple(placed))


def _trimmed_mean(rows: Tensor) -> Tensor:
    """Return the weighted mean of each column without its smallest and its largest item."""
    items, weights = rows[:, :-1], rows[:, -1:].repeat(1, rows.shape[1] - 1)
    for dropped in (items.argmin(0, keepdim=True), items.argmax(0, keepdim=True)):
        weights.scatter_(0, dropped, 0.0)
    return (items * weights).sum(0).div_(weights.sum(0))


def find_largest(items: Tensor) -> float:
    """Return the largest absolute value; NaN if one is in it."""
    if not len(items):
        return 0.0
    low, high = items.aminmax()
    return float(torch.maximum(-low, high))


_LARGEST = 1e30  # of a gradient: sums over many samples stay finite
_NO_SAMPLES = 1e-30  # the weight of a share without samples, so that a mean exists where nobody has any


class GradientSegment:
    """The share of one stage in an exact update: the mean gradient over all samples of the batch.

    Each member weighs the mean gradient of its share by its samples. One number for each parameter comes
    after the gradients: above zero if somebody has a gradient of it. So all members leave out the same
    parameters. `layout` is of the trained parameters of the segment. `statistics` is of what a forward
    writes, and `state` has it.
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
