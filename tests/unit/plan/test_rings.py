"""Segments between all cuts, one owner per cluster, and an order that keeps hidden nodes apart."""

from support.plan_world import node

from ravnest.plan.assembly import form_rings, travelling_order
from ravnest.plan.types import Cluster, Ring, Stage


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
