"""Segments between all cuts, one owner per cluster; narrow formats only where links set the pace."""

from dataclasses import replace

import pytest
from support.plan_world import SIMPLE, even_model, node, swarm_of

from ravnest.config import AUTO_ACTIVATIONS, AUTO_GRADIENTS, OptimizerKind, PlanConfig, WireChoice, WireFormat
from ravnest.errors import ConfigError
from ravnest.plan.assembly import form_rings, travelling_order
from ravnest.plan.formation import cut_clusters
from ravnest.plan.types import Cluster, Ring, Stage

AUTO = replace(SIMPLE, activations=WireChoice.AUTO, gradients=WireChoice.AUTO)
MODEL = even_model(num_positions=9, parameter_mb=20, crossing_mb=10)


def cluster(*stages):
    return Cluster(tuple(Stage(*stage) for stage in stages))


def names(*members):
    return travelling_order(members)


def hidden(name, region=""):
    return node(name, is_reachable=False, region=region)


def test_one_cluster_has_nobody_to_average_with():
    assert form_rings((), {}) == ()
    assert form_rings((cluster(("a", 0, 5)),), {"a": node("a")}) == ()


def test_every_cut_of_any_cluster_ends_a_segment():
    clusters = (
        cluster(("a", 0, 2), ("b", 2, 6)),
        cluster(("c", 0, 3), ("d", 3, 5), ("e", 5, 6)),
    )
    rings = form_rings(clusters, {name: node(name) for name in "abcde"})
    assert rings == (
        Ring(0, 2, ("a", "c")),
        Ring(2, 3, ("b", "c")),
        Ring(3, 5, ("b", "d")),
        Ring(5, 6, ("b", "e")),
    )


def test_equal_cuts_give_as_many_rings_as_stages():
    clusters = tuple(cluster((f"{k}x", 0, 4), (f"{k}y", 4, 6)) for k in range(3))
    nodes = {stage.node: node(stage.node) for each in clusters for stage in each.stages}
    rings = form_rings(clusters, nodes)
    assert [(ring.start, ring.stop) for ring in rings] == [(0, 4), (4, 6)]
    assert rings[1].owners == ("0y", "1y", "2y")


def test_regions_stand_together():
    members = (node("d", region="eu"), node("a", region="us"), node("c", region="us"), node("b", region="eu"))
    assert travelling_order(members) == ("b", "d", "a", "c")


def test_nodes_nobody_can_dial_are_spread_between_the_others():
    order = names(hidden("x"), hidden("y"), node("a"), node("b"), node("c"))
    around = [name in "xy" for name in order]
    assert not any(one and other for one, other in zip(around, around[1:] + around[:1], strict=True))
    assert sorted(order) == ["a", "b", "c", "x", "y"]


def test_as_many_hidden_as_visible_alternate():
    assert names(hidden("x"), hidden("y"), node("a"), node("b")) == ("a", "x", "b", "y")


def test_more_hidden_than_visible_share_the_hub_evenly():
    assert names(hidden("x"), hidden("y"), hidden("z"), node("a"), node("b")) == ("a", "x", "b", "y", "z")
    assert names(hidden("y"), hidden("x")) == ("x", "y")


def cut(*nodes, config=AUTO, model=MODEL):
    """Return the cluster of nodes given in pipeline order."""
    swarm = swarm_of(*nodes)
    (made,) = cut_clusters(model, swarm, config, (tuple(reversed(range(len(nodes)))),), is_averaged=False)
    return made


def test_only_links_that_set_the_pace_are_narrow():
    lame = node("b", upload_bytes_per_second=1e7)  # 2.5 MB forward and 1.4 MB back take 0.4 s, compute 0.09 s
    stages = cut(node("a"), lame, node("c"), node("d")).stages
    assert [stage.activations for stage in stages[:3]] == ["bf16", "int8", "bf16"]
    assert [stage.gradients for stage in stages[1:]] == ["int4-stochastic", "bf16", "bf16"]


def test_fast_links_carry_the_widest_format():
    stages = cut(node("a"), node("b"), node("c")).stages
    assert {stage.activations for stage in stages} == {AUTO_ACTIVATIONS[0]} == {WireFormat.BF16}
    assert {stage.gradients for stage in stages} == {AUTO_GRADIENTS[0]} == {WireFormat.BF16}


def test_a_format_that_is_asked_for_is_used_on_all_links():
    config = replace(SIMPLE, activations=WireChoice.INT4, gradients=WireChoice.INT4)
    stages = cut(node("a"), node("b"), config=config).stages
    assert [(stage.activations, stage.gradients) for stage in stages] == [
        (WireFormat.INT4_CHANNELS, WireFormat.INT4_STOCHASTIC)
    ] * 2


@pytest.mark.parametrize("wrong", [WireFormat.INT4_STOCHASTIC, WireFormat.INT4_CHANNELS])
def test_formats_of_the_other_direction_are_refused(wrong):
    key = "activations" if wrong is WireFormat.INT4_STOCHASTIC else "gradients"
    with pytest.raises(ConfigError, match=key):
        PlanConfig(**{key: wrong})


def test_stages_predict_and_lag_where_memory_allows():
    config = replace(AUTO, optimizer=OptimizerKind.MUON, predict_weights=True, saves_memory=True, max_lag=2)
    model = even_model(num_positions=9, parameter_mb=20)
    # Three positions: 60 MB each of weights, gradient, an old version, two of the optimizer, and prediction.
    tight, roomy = (
        cut(*(node(name, memory) for name in "abc"), config=config, model=model) for memory in (330, 1000)
    )
    assert [stage.predicts for stage in roomy.stages] == [True] * 3
    assert [stage.predicts for stage in tight.stages[:2]] == [False] * 2
    lags = [-(-(made.stages[0].window - 1) // made.accumulate) for made in (tight, roomy)]
    assert lags == [1, 2]
