"""How many samples fit beside stages, reckoned by hand: samples of 0.25 MB, with labels of 0.5 MB."""

from dataclasses import replace

import pytest
from support.plan_world import BY_HAND, MB, TWO_POSITIONS, node

from ravnest.ids import NodeId
from ravnest.plan.assembly import UNBOUNDED, sample_rooms, stage_bytes
from ravnest.plan.line import LineCost
from ravnest.plan.types import Cluster, Stage

LINE = LineCost(TWO_POSITIONS, BY_HAND, is_averaged=False)
PAIR = Cluster((Stage(NodeId("a"), 0, 1, 3, False), Stage(NodeId("b"), 1, 2, 1, False)), 1)
ALONE = Cluster((Stage(NodeId("a"), 0, 2, 1, False),), 1)


def rooms(cluster, *free_mb, line=LINE):
    nodes = {
        stage.node: node(stage.node, stage_bytes(line, stage, cluster) / MB + free)
        for stage, free in zip(cluster.stages, free_mb, strict=True)
    }
    return sample_rooms([cluster], line, nodes)[0]


def test_what_is_free_and_what_is_counted_as_leased_holds_samples():
    # Four windows of three batches of 1 MB are counted at the root: 48 samples.
    assert rooms(PAIR, 0.01, 0.01) == (48, 0)
    assert rooms(PAIR, 1.05 * 10 + 0.01, 1.05 * 6 + 0.01) == (48 + 40, 8), "the leaf may consume both"
    assert rooms(ALONE, 1.05 * 3 + 0.01) == ((4 + 3) * 4 // 3,), "whoever is alone has both"


def test_less_than_nothing_is_free_where_a_node_lends_less_than_was_planned():
    assert rooms(PAIR, -100.0, -100.0) == (0, 0)


def test_samples_of_no_bytes_fit_everywhere():
    profile = replace(TWO_POSITIONS, crossing_bytes=(0.0, 8 * MB, 0.0))
    assert rooms(PAIR, 0.0, 0.0, line=LineCost(profile, BY_HAND, is_averaged=False)) == (UNBOUNDED,) * 2


@pytest.mark.parametrize("window", [1, 3])
def test_what_may_wait_and_the_stage_fit_into_what_is_lent(window):
    root = replace(PAIR.stages[0], window=window)
    pair = replace(PAIR, stages=(root, PAIR.stages[1]))
    for free_mb in (0.0, 5.0, 64.0):
        first, last = rooms(pair, free_mb, free_mb)
        leased = 1.05 * LINE.leased_bytes(window)
        assert -1 <= free_mb * MB + leased - 1.05 * first * MB / 4 < MB
        assert -1 <= free_mb * MB - 1.05 * last * 3 * MB / 4 < MB
