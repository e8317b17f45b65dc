"""The model's line in numbers: what an interval of it holds, computes and sends, whoever hosts it.

`LineCost` knows the model and the configuration, `StageMemory` what stages hold, `BlockMemory` what those
hold that compute their activations again. `depth` counts the stages after this one. Where the planner may
choose, costs are those of the leanest choice: the narrowest formats, no prediction, a lag of one update.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ravnest.config import OptimizerKind, PlanConfig, WeightFormat, WireFormat
from ravnest.plan.types import ModelProfile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Copies of the parameters that averaging keeps: the anchor that changes are measured from, the change a round
# works on, the mean as it came; and in bf16 what rounding owes, and would owe if the round commits.
_AVERAGING_COPIES = {
    each: 2.0 + each.ratio + (0.0 if each is WireFormat.FP32 else 2 * 0.5) for each in WireFormat
}
ALLOCATED = 1.05  # what allocators and the buffers of kernels add to the tensors, measured 2 to 13 %
RESERVED_PER_HOP = (2, 4, 8)  # batches in flight that memory is reserved for; more where latency is long
_DEPTH_STEPS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256])
_LEASED = 4  # windows of samples at a root: two leases that are begun; those ahead take what is left
_NEIGHBOURS = 4  # cuts to either side that none of a block's ends crosses more than
_ROUNDING = 1e-6


class RangeMaximum:
    """Knows the largest of 1, 2, 4 ... numbers from each on; two of these cover an interval."""

    def __init__(self, numbers: Floats) -> None:
        self._largest = [numbers]
        while (step := 2 ** (len(self._largest) - 1)) * 2 <= len(numbers):
            below = self._largest[-1]
            self._largest.append(np.maximum(below[:-step], below[step:]))

    def find(self, start: Ints, stop: Ints) -> Floats:
        """Return the largest number of each interval [start, stop); 0 of an empty one."""
        start, stop = np.broadcast_arrays(start, stop)
        found = np.zeros(start.shape)
        length = stop - start
        for power, table in enumerate(self._largest):
            fits = (length >= 2**power) & (length < 2 ** (power + 1))
            low, high = start[fits], stop[fits] - 2**power
            found[fits] = np.maximum(table[low], table[high])
        return found


@dataclass(frozen=True, slots=True)
class StageBlocks:
    """The blocks that stages could be cut into."""

    num_ends: Ints  # of blocks, inside each stage
    crossing: Floats  # bytes of a batch at one end, in the mean
    saved: Floats  # bytes of a batch in the whole stage
    largest: Floats  # bytes of a batch in the largest of its smallest blocks

    def held(self, window: Ints) -> Floats:
        """Return the bytes that each stage holds with its window full, beside its inputs."""
        crossing = window * self.crossing  # of all in flight, at one end of a block
        best = np.rint(np.sqrt(self.saved / np.maximum(crossing, 1.0)))
        count = np.clip(best, 1, self.num_ends + 1)
        insides = np.maximum(self.saved / count, self.largest)
        return np.asarray(np.minimum(self.saved, crossing * (count - 1) + insides))


class BlockMemory:
    """The blocks of a line: `saved` bytes by position, and `crossing` bytes by cut.

    Blocks end where less crosses than around it. A microbatch in flight holds what crosses between them, and
    a backward the insides of one. The number of blocks is the one that holds least; model/recompute_blocks
    cuts so.
    """

    def __init__(self, saved: Floats, crossing: Floats) -> None:
        length = len(saved)
        padded = np.pad(crossing[1:length], _NEIGHBOURS, constant_values=np.inf)
        shifted = [padded[shift : shift + length - 1] for shift in range(2 * _NEIGHBOURS + 1)]
        is_end = np.zeros(length + 1, bool)
        is_end[1:length] = crossing[1:length] <= np.min(shifted, axis=0) * (1 + _ROUNDING)
        self._ends = np.concatenate([[0], np.cumsum(is_end)])  # before each cut
        self._crossing = np.concatenate([[0.0], np.cumsum(np.where(is_end, crossing, 0.0))])
        self._saved = np.concatenate([[0.0], np.cumsum(saved)])
        block = np.cumsum(is_end[:-1])
        self._largest = RangeMaximum(np.bincount(block, saved, minlength=1)[block])

    def within(self, start: Ints, stop: Ints) -> StageBlocks:
        """Return the blocks of stages [start, stop)."""
        after = np.minimum(start + 1, stop)
        num_ends = np.maximum(0, self._ends[stop] - self._ends[after])
        crossing = self._crossing[stop] - self._crossing[after]
        saved = np.maximum(0.0, self._saved[stop] - self._saved[start])
        largest = np.minimum(saved, self._largest.find(start, stop))
        return StageBlocks(num_ends, crossing / np.maximum(num_ends, 1), saved, largest)


@dataclass(frozen=True)
class LineCost:
    """The model's line under one configuration; `is_averaged` when there is more than one cluster."""

    profile: ModelProfile
    config: PlanConfig
    is_averaged: bool

    @property
    def num_positions(self) -> int:
        """Length of the line."""
        return self.profile.num_positions

    def window(self, depth: Ints) -> Ints:
        """Batches a stage of this depth may have in flight: enough for every hop behind it and back."""
        return np.minimum(self.config.max_window, self.config.in_flight_per_hop * depth + 1)

    def reserved(self, depth: Ints, per_hop: int = RESERVED_PER_HOP[0]) -> Ints:
        """Batches in flight that a stage of this depth surely has memory for; it may get room for more."""
        step = _DEPTH_STEPS[np.searchsorted(_DEPTH_STEPS, depth)]
        return np.asarray(np.minimum(self.window(depth), per_hop * step + 1))

    def versions(self, window: Ints, accumulate: Ints | None = None) -> Ints:
        """Old weight versions a stage may have to keep for batches in flight; as few as are allowed."""
        if accumulate is None:
            return np.minimum(1 if self.config.saves_memory else self.config.max_lag, window - 1)
        return np.asarray(-(-(window - 1) // accumulate))

    def memory(
        self,
        start: Ints,
        stop: Ints,
        window: Ints,
        versions: Ints,
        recompute: bool,
        predicts: Bools | None = None,
        held_bytes: Floats | None = None,
    ) -> Floats:
        """Resident bytes of the stage [start, stop) with its window full.

        A stage that recomputes holds its inputs as they travelled, `held_bytes` each.
        """
        return StageMemory(self, start, stop, predicts, held_bytes).needed(window, versions, recompute)

    def late_copies(self, versions: Ints, predicts: Bools) -> Floats:
        """Copies of the trained parameters for a gradient, and for the weights that forwards see.

        Where gradients are late, forwards see narrow weights, the newest ones too, with narrow gradients.
        Without lag, a cast to bf16 takes what its narrow gradient saves.
        """
        is_late, config = versions > 0, self.config
        if WeightFormat.BF16 in (config.versions, config.precision):
            return np.where(is_late, 0.5 + 0.5 * (versions + 1.0), 1.0)
        is_predicted = predicts & (config.optimizer is OptimizerKind.MUON) & config.predict_weights
        return np.asarray(1.0 + versions + (is_predicted & is_late))

    @cached_property
    def link_share(self) -> float:
        """The part of each link that activations and gradients may use."""
        overlaps = self.is_averaged and self.config.averaging.overlaps
        return 1.0 - self.config.averaging_share if overlaps else 1.0

    def round_bytes(self, start: Ints, stop: Ints) -> Floats:
        """Bytes the owner of [start, stop) sends, and receives, in a round among many clusters."""
        if not self.is_averaged:
            return np.zeros(np.broadcast_shapes(start.shape, stop.shape))
        return np.asarray(2.0 * self.config.deltas.ratio * (self.trained[stop] - self.trained[start]))

    @property
    def round_share(self) -> float:
        """The part of each link that a round surely has."""
        return self.config.averaging_share if self.config.averaging.overlaps else 1.0

    @cached_property
    def parameters(self) -> Floats:
        """Cumulative parameter bytes, one entry per cut."""
        return _cumulative(self.profile.parameter_bytes)

    @cached_property
    def trained(self) -> Floats:
        """Cumulative bytes of the parameters that are trained."""
        return _cumulative(self.profile.trained_bytes)

    @cached_property
    def flops(self) -> Floats:
        """Cumulative forward and backward FLOPs of a batch."""
        return _cumulative(self.profile.forward_flops) + _cumulative(self.profile.backward_flops)

    @cached_property
    def forward_flops(self) -> Floats:
        """Cumulative forward FLOPs of a batch: what recomputing adds."""
        return _cumulative(self.profile.forward_flops)

    @cached_property
    def send_before(self) -> Floats:
        """Bytes of gradients a stage that starts here sends to the stage before it."""
        return self.inner * self.backward_ratio

    @cached_property
    def send_after(self) -> Floats:
        """Bytes of activations a stage that stops here sends to the stage after it."""
        return self.inner * self.forward_ratio

    @cached_property
    def receive_before(self) -> Floats:
        """Bytes of activations (or input data) a stage that starts here receives."""
        return self.send_after + self.data_before

    @cached_property
    def receive_after(self) -> Floats:
        """Bytes of gradients (or labels) a stage that stops here receives."""
        return self.send_before + self.data_after

    @cached_property
    def forward_ratio(self) -> float:
        """Bytes on the wire per byte of activations, in the narrowest format."""
        return min(each.ratio for each in self.config.activation_formats)

    @cached_property
    def backward_ratio(self) -> float:
        """Bytes on the wire per byte of gradients, in the narrowest format."""
        return min(each.ratio for each in self.config.gradient_formats)

    @cached_property
    def inner(self) -> Floats:
        """Bytes that cross each cut between two stages, uncompressed; none at the ends."""
        return np.concatenate([[0.0], self.crossing[1:-1], [0.0]])

    @cached_property
    def data_before(self) -> Floats:
        """Bytes of samples a stage that starts here receives."""
        return np.concatenate([self.crossing[:1], np.zeros(self.num_positions)])

    @cached_property
    def data_after(self) -> Floats:
        """Bytes of labels a stage that stops here receives."""
        return np.concatenate([np.zeros(self.num_positions), self.crossing[-1:]])

    @cached_property
    def crossing(self) -> Floats:
        """Bytes that cross each cut, uncompressed."""
        return np.asarray(self.profile.crossing_bytes, float)

    def leased_bytes(self, window: int) -> float:
        """Return the bytes of samples that a root of this window has leased."""
        return float(window * _LEASED * self.crossing[0])

    @property
    def sample_bytes(self) -> float:
        """Bytes of a batch that the hub sends to each cluster."""
        return float(self.crossing[0] + self.crossing[-1])

    @cached_property
    def saved(self) -> Floats:
        """Cumulative bytes a batch leaves behind for its backward."""
        return _cumulative(self.profile.saved_bytes)

    @cached_property
    def blocks(self) -> BlockMemory:
        """What stages hold that compute their activations again."""
        return BlockMemory(np.asarray(self.profile.saved_bytes, float), self.crossing)

    @cached_property
    def restored(self) -> RangeMaximum | None:
        """The most that one operation of a stage has in full of matrices that are stored in fewer bits."""
        restored = self.profile.restored_bytes
        return RangeMaximum(np.asarray(restored, float)) if restored else None

    @cached_property
    def resident(self) -> Floats:
        """Cumulative bytes that a stage has whatever its window: weights, optimizer state, copies for rounds.

        Frozen parameters and buffers count once. Gradients count twice where an update is a sum: what a batch
        adds to it is looked at first.
        """
        optimizer, (first, square) = self.config.optimizer, self.config.states.ratios
        copies = 1.0 + self.config.accumulates + self.config.keeps_ema
        copies += _AVERAGING_COPIES[self.config.deltas] if self.is_averaged else 0.0
        copies += first if optimizer.has_moment else 0.0
        is_muon = optimizer is OptimizerKind.MUON
        squared = self.trained - _cumulative(self.profile.matrix_bytes) if is_muon else self.trained
        squares = square * squared if optimizer.has_squares else 0.0
        return np.asarray(_cumulative(self.profile.fixed_bytes) + copies * self.trained + squares)


class StageMemory:
    """Resident bytes of stages [start, stop): what does not depend on the window is worked out once."""

    def __init__(
        self,
        line: LineCost,
        start: Ints,
        stop: Ints,
        predicts: Bools | None = None,
        held_bytes: Floats | None = None,
    ) -> None:
        self._line, self._cut = line, (start, stop)
        self._predicts = np.array(not line.config.saves_memory) if predicts is None else predicts
        self._trained = line.trained[stop] - line.trained[start]
        self._resident = line.resident[stop] - line.resident[start]
        self._saved = line.saved[stop] - line.saved[start]
        self._arrived = line.receive_before[start] if held_bytes is None else held_bytes
        self._leased = np.where(start == 0, line.leased_bytes(1), 0.0)
        self._restored = 0.0 if line.restored is None else line.restored.find(start, stop)
        self._blocks: StageBlocks | None = None

    def needed(self, window: Ints, versions: Ints, recompute: bool) -> Floats:
        """Return the bytes of each stage with its window full, if it recomputes or not."""
        held = self._arrived + self._leased if recompute else self._saved + self._leased
        held = window * held
        if recompute:
            if self._blocks is None:
                self._blocks = self._line.blocks.within(*self._cut)
            held += self._blocks.held(window)
        late = self._line.late_copies(versions, self._predicts)
        needed = self._resident + late * self._trained + held + self._restored
        return np.asarray(ALLOCATED * needed + self._line.config.overhead_bytes)


def _cumulative(values: tuple[float, ...]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])
