"""A shorter line for the search: keep the cuts worth considering, merge the positions between them.

Captured models have thousands of positions; good cuts are few. The line is divided into stretches of about
equal work and parameters, and in each the cut with the fewest crossing bytes is kept.
"""

from itertools import pairwise

import numpy as np

from ravnest.plan.types import ModelProfile

FINE_POSITIONS = 256  # of the line the final cuts are chosen on
_SEARCH_POSITIONS = 32


def shorten_line(profile: ModelProfile, num_positions: int = 0) -> ModelProfile:
    """Return the line to search on; its cuts are among the fine ones, so what fits it fits the fine line."""
    return coarsen_to(coarsen_to(profile, FINE_POSITIONS), max(num_positions, _SEARCH_POSITIONS))


def choose_cuts(profile: ModelProfile, num_positions: int) -> tuple[int, ...]:
    """Return the cuts, both ends included, of a line of at most `num_positions`."""
    length = profile.num_positions
    if length <= num_positions:
        return tuple(range(length + 1))
    work = np.asarray(profile.forward_flops) + np.asarray(profile.backward_flops)
    weight = work / max(work.sum(), 1.0)
    weight += np.asarray(profile.parameter_bytes) / max(sum(profile.parameter_bytes), 1.0)
    reached = np.cumsum(weight) / weight.sum()  # share of the line before the cut after each position
    # A cut at the end of a stretch belongs to it; rounding must not push it into the next one.
    stretch = np.ceil(reached * num_positions - 1e-9).astype(int)
    inner = []
    for number in np.unique(stretch[:-1]):
        inside = np.flatnonzero(stretch[:-1] == number) + 1
        crossing = np.asarray(profile.crossing_bytes)[inside]
        inner.append(int(inside[len(inside) - 1 - crossing[::-1].argmin()]))
    return (0, *inner[: num_positions - 1], length)


def coarsen_to(profile: ModelProfile, num_positions: int) -> ModelProfile:
    """Return the profile on a line of at most `num_positions`."""
    return coarsen(profile, choose_cuts(profile, num_positions))


def coarsen(profile: ModelProfile, cuts: tuple[int, ...]) -> ModelProfile:
    """Return the profile of the line that can only be cut at `cuts`."""

    def merge(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(float(sum(values[start:stop])) for start, stop in pairwise(cuts))

    return ModelProfile(
        name=profile.name,
        samples_per_batch=profile.samples_per_batch,
        parameter_bytes=merge(profile.parameter_bytes),
        matrix_bytes=merge(profile.matrix_bytes),
        forward_flops=merge(profile.forward_flops),
        backward_flops=merge(profile.backward_flops),
        saved_bytes=merge(profile.saved_bytes),
        crossing_bytes=tuple(profile.crossing_bytes[cut] for cut in cuts),
        frozen_bytes=merge(profile.frozen_bytes) if profile.frozen_bytes else (),
        buffer_bytes=merge(profile.buffer_bytes) if profile.buffer_bytes else (),
        restored_bytes=tuple(max(profile.restored_bytes[start:stop]) for start, stop in pairwise(cuts))
        if profile.restored_bytes
        else (),
    )
