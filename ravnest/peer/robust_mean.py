"""The robust mean of contributions to one chunk: no single one moves it further than the others differ.

Changes are compared by sample: each is scaled to the mean weight, as if all had trained alike. A contribution
counts by the factor that the hub gave it. Of every number, what lies beyond the others by more than a slack
is pulled back to there, on both sides; then comes the plain weighted mean. The slack is what contributions
typically differ by in this chunk: without it, what only one cluster's samples teach would be lost.

Two PCs must get the same bits of the same contributions. So sums over a chunk are rounded coarsely, and all
else is done number by number, on the CPU.
"""

import math
from collections.abc import Sequence

import torch
from blake3 import blake3
from torch import Tensor

from ravnest.averaging.direct import Judged
from ravnest.protocol.tensors import BLOCK_ITEMS

_SLACK = (
    1.5  # times the typical difference: with 1, eight clusters lose half a percent of loss; see decision 38
)
_LIARS = 5  # one of so many clusters may lie, and one of four
INT4_LARGEST = 7.0  # code
_TINY = 1e-30
_MOST_PASSES = 64  # over the rows, before sorting is faster
_BITS = 8  # of the slack: sums differ in their last bits between PCs


def count_trimmed(num_rows: int) -> int:
    """Return how many contributions on each side are pulled back."""
    return max(1, num_rows // _LIARS) if num_rows > 2 else 0


def find_mean(rows: Sequence[Tensor], weights: Sequence[float], factors: Sequence[float]) -> Tensor:
    """Return the robust weighted mean of rows; those with factor 0 are left out."""
    used = [k for k, factor in enumerate(factors) if factor > 0.0]
    assert used, "all contributions are left out"
    shares = _find_shares([weights[k] for k in used])
    scaled = [rows[k] * (factors[k] / share) for k, share in zip(used, shares, strict=True)]
    found = torch.zeros_like(rows[0])
    for row, share in zip(_pull_back(scaled), shares, strict=True):
        found += row * (share * share / len(used))
    return found


def judge_rows(rows: Sequence[Tensor], weights: Sequence[float], factors: Sequence[float]) -> list[Judged]:
    """Return what is seen of each row beside the robust mean of all others, for each sample."""
    shares = _find_shares(weights)
    scaled = [row / share for row, share in zip(rows, shares, strict=True)]
    limited = _pull_back([row * factor for row, factor in zip(scaled, factors, strict=True)])
    squares = [share * share if factor else 0.0 for share, factor in zip(shares, factors, strict=True)]
    total = torch.zeros_like(rows[0])
    for row, square in zip(limited, squares, strict=True):
        total += row * square
    found = []
    for row, own, square in zip(scaled, limited, squares, strict=True):
        others = (total - own * square) / max(sum(squares) - square, _TINY)
        gap, along, length = find_square(row - others), _find_product(row, others), find_square(row)
        found.append(Judged(gap, along, length, len(row)))
    return found


def find_square(items: Tensor) -> float:
    """Return the squared length in double precision, ten times as fast as `square().sum()` of doubles."""
    return _find_product(items, items)


def _find_product(one: Tensor, two: Tensor) -> float:
    return float(torch.dot(one.double(), two.double()))


def _find_shares(weights: Sequence[float]) -> list[float]:
    """Return weights in units of their mean."""
    mean = math.fsum(weights) / len(weights)
    return [weight / mean for weight in weights]


def dither(items: Tensor, key: bytes) -> Tensor:
    """Return numbers that int4 rounds right on average: each moved by up to half a step, drawn from a key.

    The largest of a block stay as they are, or its step would be another.
    """
    num_items = len(items)
    drawn = torch.frombuffer(bytearray(blake3(key).digest(num_items)), dtype=torch.uint8)
    shift = drawn.to(torch.float32).add_(0.5).div_(256.0).sub_(0.5)
    blocks = torch.nn.functional.pad(items, (0, -num_items % BLOCK_ITEMS)).view(-1, BLOCK_ITEMS)
    largest = blocks.abs().amax(1).repeat_interleave(BLOCK_ITEMS)[:num_items]
    moved = items + shift * (largest / INT4_LARGEST)
    moved = torch.minimum(torch.maximum(moved, -largest), largest)
    return torch.where(items.abs() == largest, items, moved)


def _pull_back(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    num_trimmed = count_trimmed(len(rows))
    if not num_trimmed:
        return rows
    low, high = _find_bounds(rows, num_trimmed)
    middle = (low + high) * 0.5
    squares = sorted(find_square(row - middle) for row in rows)
    typical = squares[(len(rows) - 1) // 2] / max(1, len(low))
    slack = _round_coarsely(_SLACK * math.sqrt(typical))
    low, high = low - slack, high + slack
    return [torch.minimum(torch.maximum(row, low), high) for row in rows]


def _find_bounds(rows: Sequence[Tensor], num_trimmed: int) -> tuple[Tensor, Tensor]:
    """Return of each number the smallest and the largest, but for so many on each side."""
    if len(rows) * num_trimmed > _MOST_PASSES:
        stacked = torch.stack(list(rows))
        ordered = stacked.sort(0).values
        return ordered[num_trimmed], ordered[len(rows) - 1 - num_trimmed]
    lows, highs = list(rows[:1]), list(rows[:1])
    for row in rows[1:]:
        low = high = row
        for k, kept in enumerate(lows):
            lows[k], low = torch.minimum(kept, low), torch.maximum(kept, low)
        for k, kept in enumerate(highs):
            highs[k], high = torch.maximum(kept, high), torch.minimum(kept, high)
        lows, highs = [*lows, low][: num_trimmed + 1], [*highs, high][: num_trimmed + 1]
    return lows[num_trimmed], highs[num_trimmed]


def _round_coarsely(value: float) -> float:
    if not math.isfinite(value) or value == 0.0:
        return 0.0
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.floor(mantissa * 2**_BITS), exponent - _BITS)
