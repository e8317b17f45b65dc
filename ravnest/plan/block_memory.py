"""What a stage holds that computes its activations again, block by block.

Blocks end where less crosses than around it. A microbatch in flight holds what crosses between them, and a
backward the insides of one. The number of blocks is the one that holds least;
model/blueprint/recompute_blocks cuts so.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ravnest.plan.range_maximum import RangeMaximum

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_NEIGHBOURS = 4  # cuts to either side that none of a block's ends crosses more than
_ROUNDING = 1e-6


class BlockMemory:
    """The blocks of a line: `saved` bytes by position, and `crossing` bytes by cut."""

    def __init__(self, saved: _Floats, crossing: _Floats) -> None:
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

    def within(self, start: _Ints, stop: _Ints) -> "StageBlocks":
        """Return the blocks of stages [start, stop)."""
        after = np.minimum(start + 1, stop)
        num_ends = np.maximum(0, self._ends[stop] - self._ends[after])
        crossing = self._crossing[stop] - self._crossing[after]
        saved = np.maximum(0.0, self._saved[stop] - self._saved[start])
        largest = np.minimum(saved, self._largest.find(start, stop))
        return StageBlocks(num_ends, crossing / np.maximum(num_ends, 1), saved, largest)


@dataclass(frozen=True, slots=True)
class StageBlocks:
    """The blocks that stages could be cut into."""

    num_ends: _Ints  # of blocks, inside each stage
    crossing: _Floats  # bytes of a batch at one end, in the mean
    saved: _Floats  # bytes of a batch in the whole stage
    largest: _Floats  # bytes of a batch in the largest of its smallest blocks

    def held(self, window: _Ints) -> _Floats:
        """Return the bytes that each stage holds with its window full, beside its inputs."""
        crossing = window * self.crossing  # of all in flight, at one end of a block
        best = np.rint(np.sqrt(self.saved / np.maximum(crossing, 1.0)))
        count = np.clip(best, 1, self.num_ends + 1)
        insides = np.maximum(self.saved / count, self.largest)
        return np.asarray(np.minimum(self.saved, crossing * (count - 1) + insides))
