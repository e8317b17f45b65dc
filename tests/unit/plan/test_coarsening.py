"""Shorter lines keep the cheap cuts, the ends and every sum."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from support.plan_world import MB, even_model

from ravnest.plan.coarsening import FINE_POSITIONS, choose_cuts, coarsen, coarsen_to, shorten_line

SUMS = ("parameter_bytes", "matrix_bytes", "forward_flops", "backward_flops", "saved_bytes")


def test_a_short_line_keeps_every_cut():
    assert choose_cuts(even_model(6), 6) == (0, 1, 2, 3, 4, 5, 6)
    assert coarsen_to(even_model(6), 100) == even_model(6)


def test_equal_positions_are_merged_evenly():
    assert choose_cuts(even_model(12), 4) == (0, 3, 6, 9, 12)
    assert choose_cuts(even_model(70), 7) == tuple(range(0, 71, 10))
    assert choose_cuts(even_model(12), 1) == (0, 12)


def test_the_cheapest_cut_of_each_stretch_is_kept():
    crossing = [1.0] * 21
    for cheap in (3, 8, 10, 13):
        crossing[cheap] = 0.1
    profile = replace(even_model(20), crossing_bytes=tuple(crossing))
    assert choose_cuts(profile, 5) == (0, 3, 8, 10, 13, 20)


def test_stretches_follow_work_and_parameters_not_the_number_of_positions():
    sizes = (*[1.0] * 20, *[10.0] * 20)
    profile = replace(even_model(40), parameter_bytes=sizes, forward_flops=sizes, backward_flops=sizes)
    cuts = choose_cuts(profile, 11)
    assert len([cut for cut in cuts if 0 < cut <= 20]) == 1
    assert len(cuts) == 12


def test_a_heavy_end_leaves_cuts_on_the_other_side():
    sizes = (1e9, *[1.0] * 30)
    for heavy in (sizes, sizes[::-1]):
        profile = replace(even_model(31), parameter_bytes=heavy, forward_flops=heavy, backward_flops=heavy)
        assert len(choose_cuts(profile, 4)) == 3


def test_merging_keeps_sums_and_the_crossings_of_the_cuts():
    profile = replace(even_model(6), crossing_bytes=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    short = coarsen(profile, (0, 1, 4, 6))
    assert short.num_positions == 3
    assert short.crossing_bytes == (0.0, 1.0, 4.0, 6.0)
    assert short.parameter_bytes == (10 * MB, 30 * MB, 20 * MB)
    for name in SUMS:
        assert sum(getattr(short, name)) == pytest.approx(sum(getattr(profile, name)))


@pytest.mark.parametrize("length", [40, 300, 1000])
def test_cuts_to_search_on_are_fine_cuts(length):
    random = np.random.default_rng(length)
    weights, crossing = random.integers(1, 1000, length), random.integers(1, 1000, length + 1)
    profile = replace(
        even_model(length),
        parameter_bytes=tuple(map(float, weights)),
        crossing_bytes=tuple(map(float, crossing)),
    )
    # Parameters before a cut name the cut, as every weight is a positive whole number.
    short, fine = shorten_line(profile, 50), coarsen_to(profile, FINE_POSITIONS)
    assert short.num_positions <= 50
    assert shorten_line(profile).num_positions <= 32
    assert set(accumulate(short.parameter_bytes)) <= set(accumulate(fine.parameter_bytes))
