"""What members are told of a plan, and the parts that stages are made of."""

from dataclasses import replace

import pytest
from support.hub_scene import HALVES, HubScene
from support.hub_world import blob

from ravnest.hub.coordinator.events import MakeParts, PartsMade
from ravnest.protocol.placement import PlanOrder, RingOrder

CLUSTERS = ("ab", HALVES), ("cd", HALVES)


@pytest.fixture
def scene():
    """Two clusters that train; s and t are spares. All know their part of the plan."""
    scene = HubScene("abcdst", *CLUSTERS)
    list(scene.placement.announce(scene.adopt(*CLUSTERS), {}))
    return scene


def announced(scene, change, extras=None, givers=""):
    """The kind of order that each member gets, and whom it is to meet."""
    slices = scene.placement.announce(change, extras or {}, lambda name: name in givers)
    sends = [send for each in slices for send in each]
    assert len({send.to for send in sends}) == len(sends)
    return {x.to: (type(x.message), {each.node for each in x.message.contacts}) for x in sends}


def test_who_has_no_other_part_than_before_is_told_nothing(scene):
    assert announced(scene, scene.adopt(*CLUSTERS)) == {}


def test_who_is_to_meet_somebody_else_is_told_of_it(scene):
    told = announced(scene, scene.adopt(*CLUSTERS), extras={"a": {"s"}, "s": {"a"}})
    assert told == {"a": (RingOrder, {"b", "c", "s"}), "s": (PlanOrder, {"a"})}


def test_who_has_no_stage_any_more_is_a_spare_and_holds_nothing(scene):
    scene.lose("a")
    told = announced(scene, scene.adopt(CLUSTERS[1]))
    assert told == {"b": (PlanOrder, set()), "c": (RingOrder, {"d"}), "d": (RingOrder, {"c"})}
    assert scene.membership.find("b").held is None


def test_but_who_gives_what_it_holds_or_leaves_keeps_it_for_now(scene):
    scene.lose("a")
    change = scene.adopt(CLUSTERS[1])
    assert announced(scene, change, givers="b")["b"] == (RingOrder, set())
    assert scene.membership.find("b").held is not None
    assert [send.to for send in scene.placement.retire(lambda name: name == "b")] == []
    assert [send.to for send in scene.placement.retire(lambda _: False)] == ["b"]
    assert scene.membership.find("b").held is None


def test_who_leaves_keeps_what_it_holds_until_it_is_let_go(scene):
    scene.lose("a")
    scene.membership.begin_leave("b", "Ctrl-C", 10.0)
    change = scene.adopt(CLUSTERS[1])
    assert announced(scene, change)["b"] == (RingOrder, set())
    assert scene.placement.retire(lambda _: False) == []
    assert scene.membership.find("b").held is not None


def test_a_plan_is_asked_for_of_those_who_are_here_and_stay(scene):
    scene.membership.mark_all_missing(10.0)
    for name in "abcst":
        scene.membership.come_back(name, ())
    scene.membership.begin_leave("s", "Ctrl-C", 10.0)
    scene.membership.remove("a")
    asked = scene.placement.ask_for_plan()
    assert [node.name for node in asked.nodes] == ["b", "c", "t"]
    assert [node.name for node in asked.gone] == ["a", "d"], "who has a stage in the plan there is"


def test_clusters_keep_their_state_but_not_their_letter(scene):
    second = scene.placement.clusters[1]
    scene.lose("a")
    change = scene.adopt(CLUSTERS[1])
    assert scene.placement.clusters == (second,)
    assert (second.name, second.cluster_id, change.built) == ("A", "B1", ())


def test_a_cluster_that_stands_still_is_built_anew_although_it_is_the_same(scene):
    scene.placement.mark_broken(scene.placement.clusters[0])
    (built,) = scene.adopt(*CLUSTERS).built
    assert (built.nodes, built.cluster_id) == (("a", "b"), f"A{scene.build_id}")


def parts(weights):
    return PartsMade(0, 3, blob("blueprint"), blob(weights), (), (), 0.0)


def test_parts_are_made_once_and_anew_for_whom_the_newest_weights_are_needed(scene):
    placement, order = scene.placement, [MakeParts(0, 3, has_weights=False)]
    assert placement.find_parts(0, 3) == order
    assert placement.find_parts(0, 3) == []
    assert placement.add_parts(parts("first")) is None
    assert placement.add_parts(parts("first")) == "nobody asked for the parts of positions 0 to 3"
    assert placement.find_parts(0, 3, is_newest=True) == parts("first")
    placement.mark_parts_stale()
    assert placement.find_parts(0, 3) == parts("first")
    assert placement.find_parts(0, 3, is_newest=True) == order
    placement.add_parts(parts("second"))
    assert placement.find_parts(0, 3, is_newest=True) == parts("second")


def test_parts_without_weights_are_made_again_for_whom_they_are_needed(scene):
    placement, bare = scene.placement, replace(parts("first"), weights=None)
    placement.find_parts(0, 3)
    placement.add_parts(bare)
    assert placement.find_parts(0, 3) == bare
    assert placement.find_parts(0, 3, has_weights=True) == [MakeParts(0, 3, has_weights=True)]
    placement.add_parts(parts("second"))
    assert placement.find_parts(0, 3, has_weights=True) == placement.find_parts(0, 3) == parts("second")


def test_parts_that_were_asked_for_before_a_checkpoint_are_older_than_it(scene):
    placement, order = scene.placement, [MakeParts(0, 3, has_weights=False)]
    assert placement.find_parts(0, 3, is_newest=True) == order
    placement.mark_parts_stale()
    placement.add_parts(parts("first"))
    assert placement.find_parts(0, 3) == parts("first")
    assert placement.find_parts(0, 3, is_newest=True) == order
    placement.add_parts(parts("second"))
    assert placement.find_parts(0, 3, is_newest=True) == parts("second")
