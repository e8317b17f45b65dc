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
    scene.members.announce(scene.adopt(*CLUSTERS), {})
    return scene


def announced(scene, change, extras=None, givers=""):
    """The kind of order that each member gets, and whom it is to meet."""
    sends = scene.members.announce(change, extras or {}, lambda name: name in givers)
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
    assert scene.members.find("b").held is None


def test_but_who_gives_what_it_holds_or_leaves_keeps_it_for_now(scene):
    scene.lose("a")
    change = scene.adopt(CLUSTERS[1])
    assert announced(scene, change, givers="b")["b"] == (RingOrder, set())
    assert scene.members.find("b").held is not None
    assert [send.to for send in scene.members.retire(lambda name: name == "b")] == []
    leaver = replace(scene.members.find("b"), leaves_by=10.0)
    scene.members.replace(leaver)
    assert announced(scene, change)["b"] == (RingOrder, set())
    assert scene.members.retire(lambda _: False) == [], "it is let go"
    scene.members.replace(replace(leaver, leaves_by=None))
    assert [send.to for send in scene.members.retire(lambda _: False)] == ["b"]
    assert scene.members.find("b").held is None


def test_a_plan_is_asked_for_of_those_who_are_here_and_stay(scene):
    members = scene.members
    members.replace(replace(members.find("s"), leaves_by=10.0))
    members.replace(replace(members.find("d"), back_by=10.0))
    members.leave("a")
    asked = members.ask_for_plan()
    assert [node.name for node in asked.nodes] == ["b", "c", "t"]
    assert [node.name for node in asked.gone] == ["a", "d"], "who has a stage in the plan there is"


def test_clusters_keep_their_state_but_not_their_letter(scene):
    second = scene.members.clusters[1]
    scene.lose("a")
    change = scene.adopt(CLUSTERS[1])
    assert scene.members.clusters == (second,)
    assert (second.name, second.cluster_id, change.built) == ("A", "B1", ())


def test_a_cluster_that_stands_still_is_built_anew_although_it_is_the_same(scene):
    scene.members.clusters[0].is_broken = True
    (built,) = scene.adopt(*CLUSTERS).built
    assert (built.nodes, built.cluster_id) == (("a", "b"), f"A{scene.build_id}")


def parts(weights):
    return PartsMade(0, 3, blob("blueprint"), blob(weights), (), (), 0.0)


def test_parts_are_made_once_and_anew_for_whom_the_newest_weights_are_needed(scene):
    members, order = scene.members, [MakeParts(0, 3)]
    assert members.find_parts(0, 3) == order
    assert members.find_parts(0, 3) == []
    assert members.take_parts(parts("first")) is None
    assert members.take_parts(parts("first")) == "nobody asked for the parts of positions 0 to 3"
    assert members.find_parts(0, 3, is_newest=True) == parts("first")
    members.note_checkpoint()
    assert members.find_parts(0, 3) == parts("first")
    assert members.find_parts(0, 3, is_newest=True) == order
    members.take_parts(parts("second"))
    assert members.find_parts(0, 3, is_newest=True) == parts("second")


def test_parts_that_were_asked_for_before_a_checkpoint_are_older_than_it(scene):
    members, order = scene.members, [MakeParts(0, 3)]
    assert members.find_parts(0, 3, is_newest=True) == order
    members.note_checkpoint()
    members.take_parts(parts("first"))
    assert members.find_parts(0, 3) == parts("first")
    assert members.find_parts(0, 3, is_newest=True) == order
    members.take_parts(parts("second"))
    assert members.find_parts(0, 3, is_newest=True) == parts("second")
