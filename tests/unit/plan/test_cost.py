"""The cost of one small pipeline, reckoned by hand.

Two positions, 10 MB and 20 MB of parameters, on two nodes; what crosses between them is 8 MB of fp32.
"""

from dataclasses import replace

import numpy as np
import pytest
from support.plan_world import BY_HAND, MB, TWO_POSITIONS, node, swarm_of

from ravnest.config import (
    Averaging,
    Recompute,
    WireChoice,
)
from ravnest.plan.cost import NodeTable, Rows, StageCosts, timing
from ravnest.plan.line import LineCost

FIRST = node(
    "first", 1000, 100, upload_bytes_per_second=4e6, download_bytes_per_second=5e6, latency_seconds=0.1
)
LAST = node("last", 1000, 50, upload_bytes_per_second=8e6, download_bytes_per_second=2e6, latency_seconds=0.2)


def cost(is_averaged=False, **changes):
    return LineCost(TWO_POSITIONS, replace(BY_HAND, **changes), is_averaged)


def times(line, first=FIRST, last=LAST, **columns):
    swarm = replace(swarm_of(last, first), region_latency=(("eu", "us", 0.05),))
    rows = Rows(np.array([[0, 1]]), np.array([2]), np.array([[2, 1, 0]]), **columns)
    return timing(line, NodeTable.of(swarm, line.config), rows)


def test_time_of_each_stage_by_its_parts():
    told = times(cost(activations=WireChoice.BF16, gradients=WireChoice.INT8))
    int8 = 8 * (1 + 4 / 256) / 4  # MB of gradient
    # depth 0 is the last stage
    np.testing.assert_allclose(told.compute, [[6e9 / 50e9, 3e9 / 100e9]])
    np.testing.assert_allclose(told.send, [[int8 / 8, 4 / 4]])
    np.testing.assert_allclose(told.receive, [[(4 + 2) / 2, (1 + int8) / 5]])
    np.testing.assert_allclose(told.relay, [[0, 0]])
    travel = 4 / min(4, 2) + int8 / min(8, 5) + 2 * (0.1 + 0.2)
    np.testing.assert_allclose(told.cycle, [[0.12, 0.12 + 0.03 + travel]])
    assert told.window.tolist() == [[1, 3]]
    np.testing.assert_allclose(told.seconds, [3.0 * (1 + 2 * 30 / 1e12)])


def test_a_narrow_window_waits_for_the_way_back():
    told = times(
        cost(), window=np.array([[1, 1]]), recompute=np.array([[False, True]]), accumulate=np.array([1])
    )
    np.testing.assert_allclose(told.compute[0, 1], 4e9 / 100e9)
    np.testing.assert_allclose(told.seconds, told.cycle[:, 1])


def test_two_hidden_nodes_need_the_hub():
    line = cost(relay_bytes_per_second=1e6, gradients=WireChoice.INT8)
    told = times(line, replace(FIRST, is_reachable=False), replace(LAST, is_reachable=False))
    int8 = 8 * (1 + 4 / 256) / 4
    np.testing.assert_allclose(told.relay, [[0, 4.0]])
    np.testing.assert_allclose(told.cycle[0, 1], 0.15 + 4 + int8 + 0.6)
    assert times(line, replace(FIRST, is_reachable=False)).relay.max() == 0


def test_regions_add_their_latency():
    near, far = (
        times(cost(), replace(FIRST, region=region), replace(LAST, region="eu")) for region in ("eu", "us")
    )
    assert far.cycle[0, 1] - near.cycle[0, 1] == pytest.approx(2 * 0.05)


def test_averaging_takes_its_share_of_the_links():
    alone, shared = times(cost()), times(cost(is_averaged=True))
    np.testing.assert_allclose(shared.send, alone.send / 0.8)
    blocking = times(cost(is_averaged=True, averaging=Averaging.BLOCKING))
    np.testing.assert_allclose(blocking.send, alone.send)


def test_deaths_cost_time():
    risky = times(cost(), replace(FIRST, uptime_seconds=300.0))
    np.testing.assert_allclose(risky.seconds, 3.0 * 1.1)


def test_stage_costs_agree_with_timing_and_mark_what_does_not_fit():
    line = cost()
    nodes = NodeTable.of(swarm_of(LAST, FIRST), line.config)
    seconds = StageCosts(line, nodes)
    told = times(line)
    assert seconds.at(0)[0, 0, 1] == pytest.approx(told.stage[0, 0], rel=1e-6)
    assert seconds.at(1)[1, 0, 0] == pytest.approx(told.stage[0, 1], rel=1e-6)
    assert np.isinf(seconds.at(0)[0, 1, 1])  # there is no such interval
    small = NodeTable.of(swarm_of(replace(FIRST, memory_bytes=96 * MB)), line.config)
    assert np.isinf(StageCosts(line, small).at(1)[0, 0, 0])  # needs 96.25 MB, see above
    assert np.isfinite(StageCosts(line, small).at(0)[0, 0, 0])


def test_recomputing_is_chosen_only_where_it_must_be():
    line = cost(recompute=Recompute.AUTO)
    roomy = NodeTable.of(swarm_of(FIRST), line.config)
    # Keeping needs 96.25 MB, recomputing 93.1 MB.
    tight = NodeTable.of(
        swarm_of(replace(FIRST, memory_bytes=94 * MB, upload_bytes_per_second=1e12)), line.config
    )
    assert StageCosts(line, roomy).at(1)[0, 0, 0] == pytest.approx(1.0)
    assert not timing(line, roomy, Rows(np.array([[0]]), np.array([1]), np.array([[1, 0]]))).recompute.any()
    assert np.isfinite(StageCosts(line, tight).at(1)[0, 0, 0])


def test_a_stage_too_large_for_a_round_does_not_fit():
    # int4: 2 x 10 MB x 0.12890625 = 2.58 MB at 20 % of 4 MB/s = 3.2 s
    nodes = NodeTable.of(swarm_of(FIRST), BY_HAND)
    assert np.isfinite(StageCosts(cost(is_averaged=True, max_round_seconds=3.3), nodes).at(1)[0, 0, 0])
    assert np.isinf(StageCosts(cost(is_averaged=True, max_round_seconds=3.1), nodes).at(1)[0, 0, 0])
