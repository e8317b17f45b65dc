"""What stages of one small model hold, reckoned by hand.

Two positions, 10 MB and 20 MB of parameters, in two stages; what crosses between them is 8 MB of fp32.
"""

from dataclasses import replace

import numpy as np
import pytest
from support.plan_world import BY_HAND, MB, TWO_POSITIONS

from ravnest.config import (
    OptimizerKind,
    StateFormat,
    WeightFormat,
    WireFormat,
)
from ravnest.plan.line import LineCost


def cost(is_averaged=False, **changes):
    return LineCost(TWO_POSITIONS, replace(BY_HAND, **changes), is_averaged)


def memory(line, window=3, versions=2, recompute=False):
    arrays = (np.array(value) for value in (0, 1, window, versions))
    return float(line.memory(*arrays, recompute)) / MB


def test_memory_of_a_stage_by_its_parts():
    # 10 MB x (weights, gradient, 2 versions, prediction) + muon 4 x 2 + 6 x 1 + 3 x 3 MB saved,
    # 4 x 3 MB of samples that lie ready, a twentieth more than that, and 7 MB
    assert memory(cost()) == pytest.approx(1.05 * (50 + 14 + 9 + 12) + 7)
    assert memory(cost(predict_weights=False)) == pytest.approx(1.05 * (40 + 14 + 9 + 12) + 7)
    assert memory(cost(), window=1, versions=0) == pytest.approx(1.05 * (20 + 14 + 3 + 4) + 7)
    assert memory(cost(), recompute=True) == pytest.approx(1.05 * (50 + 14 + 3 + 3 * 1 + 12) + 7)


def test_a_stage_that_recomputes_holds_what_crosses_between_blocks_and_one_block():
    sizes = (1 * MB,) * 16
    narrow = [MB / 10 if k % 2 == 0 else MB for k in range(17)]  # two positions are a block
    profile = replace(
        TWO_POSITIONS,
        parameter_bytes=(0.0,) * 16,
        matrix_bytes=(0.0,) * 16,
        forward_flops=sizes,
        backward_flops=sizes,
        saved_bytes=sizes,
        crossing_bytes=tuple(narrow),
    )
    line = LineCost(profile, replace(BY_HAND, overhead_bytes=0.0), False)
    start, stop, window = np.array(2), np.array(14), np.array(5)
    # 12 MB are saved, each end of a block holds 5 x 0.1 MB: sqrt(12 / 0.5) = 5 blocks with 4 ends between
    found = float(line.memory(start, stop, window, np.array(0), True)) / MB / 1.05
    assert found == pytest.approx(4 * 0.5 + 12 / 5 + 5 * 0.1 / 2)  # inputs lie as they travelled
    assert float(line.memory(start, stop, window, np.array(0), False)) / MB / 1.05 == pytest.approx(60)
    many = float(line.memory(start, stop, np.array(1000), np.array(0), True)) / MB / 1.05
    assert many == pytest.approx(12 + 1000 * 0.1 / 2)  # one block


def test_only_the_root_keeps_samples():
    arrays = [np.array(value) for value in (1, 2, 3, 2)]
    without = replace(TWO_POSITIONS, crossing_bytes=(0.0, *TWO_POSITIONS.crossing_bytes[1:]))
    assert cost().memory(*arrays, False) == LineCost(without, BY_HAND, False).memory(*arrays, False)


@pytest.mark.parametrize(
    ("optimizer", "copies"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2), ("nadam", 2)]
)
def test_optimizer_state(optimizer, copies):
    assert memory(cost(optimizer=OptimizerKind(optimizer))) == pytest.approx(
        1.05 * ((4 + copies) * 10 + 9 + 12) + 7
    )


@pytest.mark.parametrize(("wire", "copies"), [("fp32", 3.0), ("bf16", 3.5), ("int8", 3.254), ("int4", 3.129)])
def test_averaging_keeps_copies(wire, copies):
    alone = memory(cost())
    found = memory(cost(is_averaged=True, deltas=WireFormat(wire)))
    assert found == pytest.approx(alone + 1.05 * copies * 10, rel=1e-3)


def test_weights_seen_in_bf16_are_half_as_wide():
    # 10 MB x (weights, half a gradient, 2 old versions and the newest as halves)
    narrow = 1.05 * (10 + 5 + 15 + 14 + 9 + 12) + 7
    assert memory(cost(versions=WeightFormat.BF16)) == pytest.approx(narrow)
    assert memory(cost(precision=WeightFormat.BF16)) == pytest.approx(narrow)
    without_lag = memory(cost(versions=WeightFormat.BF16), window=1, versions=0)
    assert without_lag == memory(cost(), window=1, versions=0)


@pytest.mark.parametrize(
    ("states", "muon", "adamw"), [("bf16", 5 + 4, 5 + 10), ("int8", 2.5098 + 2, 2.5098 + 5)]
)
def test_narrow_optimizer_states(states, muon, adamw):
    for optimizer, found in (("muon", muon), ("adamw", adamw)):
        line = cost(states=StateFormat(states), optimizer=OptimizerKind(optimizer), predict_weights=False)
        assert memory(line) == pytest.approx(1.05 * (40 + found + 9 + 12) + 7, rel=1e-4)


def test_fourteen_bytes_for_a_trained_parameter():
    matrices = replace(TWO_POSITIONS, matrix_bytes=TWO_POSITIONS.parameter_bytes, saved_bytes=(0.0, 0.0))
    config = replace(BY_HAND, versions=WeightFormat.BF16, states=StateFormat.BF16, overhead_bytes=0.0)
    without_samples = replace(matrices, crossing_bytes=(0.0, 8 * MB, 0.0))
    found = memory(LineCost(without_samples, config, False)) / 1.05
    assert 4 * found / 10 == pytest.approx(14.0)  # of four bytes each


def test_frozen_parameters_and_buffers_count_once():
    profile = replace(TWO_POSITIONS, frozen_bytes=(4 * MB, 20 * MB), buffer_bytes=(1 * MB, 2 * MB))
    line = LineCost(profile, BY_HAND, is_averaged=True)
    averaging = 2 + 0.5 * (1 + 4 / 128) / 4 + 1
    assert memory(line) == pytest.approx(1.05 * (5 * 6 + averaging * 6 + 6 + 5 + 9 + 12) + 7, rel=1e-3)
    start, stop = np.array(0), np.array(2)
    assert line.round_bytes(start, stop) == pytest.approx(2 * WireFormat.INT4.ratio * 6 * MB)


def test_of_stored_matrices_a_stage_has_the_largest_of_its_own_in_full():
    profile = replace(TWO_POSITIONS, frozen_bytes=(4 * MB, 20 * MB))
    stored = replace(profile, restored_bytes=(2 * MB, 3 * MB))
    given = [(0, 1, 2 * MB), (1, 2, 3 * MB), (0, 2, 3 * MB)]
    for start, stop, most in given:
        arrays = [np.array(value) for value in (start, stop, 3, 2)]
        before, found = (float(LineCost(x, BY_HAND, True).memory(*arrays, False)) for x in (profile, stored))
        assert found - before == pytest.approx(1.05 * most)
    line = LineCost(stored, BY_HAND, True)
    trained = np.array([6 * MB, 0.0])  # what is frozen is in no round
    assert line.round_bytes(np.array([0, 1]), np.array([1, 2])) == pytest.approx(
        2 * BY_HAND.deltas.ratio * trained
    )


def test_windows_and_versions():
    line = cost(max_window=6)
    assert line.window(np.arange(5)).tolist() == [1, 3, 5, 6, 6]
    assert line.versions(np.array([1, 2, 5])).tolist() == [0, 1, 2]
    assert line.versions(np.array([1, 3, 5]), np.array(3)).tolist() == [0, 1, 2]
