"""Whose state a stage is built of: clusters are changed by hand, and the orders to build are looked at."""

from dataclasses import replace

import pytest
from support.hub_scene import HALVES, HubScene
from support.hub_world import blob
from support.plan_world import node

from ravnest.hub.coordinator.membership import HeldState
from ravnest.ids import HUB


def backed_up(scene, known, spare="t"):
    scene.sources.add_backup(spare, HeldState(0, 3, "A1"), blob(f"backup of {spare}"), known)


@pytest.fixture
def scene():
    """Cluster A of a and b has lost a, whose place s is to take; cluster B of c and d trains on."""
    scene = HubScene("abcdst", ("ab", HALVES), ("cd", HALVES))
    scene.lose("a")
    return scene


AFTER = ("sb", HALVES), ("cd", HALVES)


@pytest.mark.parametrize(
    ("trained", "backup", "kept", "giver"),
    [
        (100, None, -1, "c"),
        (91, None, 100, "c"),
        (89, None, 100, HUB),
        (89, 91, 100, "t"),
        (91, 100, 100, "c"),
        (89, 89, 100, HUB),
        (50, 100, 90, "t"),
        (50, 100, -1, "t"),
        (100, 50, 50, "c"),
        (0, None, -1, "c"),
        (0, None, 0, "c"),
    ],
)
def test_who_is_not_a_tenth_behind_the_best_gives_a_cluster_before_a_backup_before_the_hub(
    scene, trained, backup, kept, giver
):
    if backup is not None:
        backed_up(scene, backup)
    (origin,) = scene.change(*AFTER, known={"c": trained}, kept=kept)
    assert scene.sources.needs_hub == (giver == HUB)
    assert scene.build() == {"s": [giver], "b": []}
    assert (origin.cluster_id, origin.is_whole) == ("A1", False)


def test_of_those_that_train_the_one_that_knows_most_gives():
    scene = HubScene("abcdefs", ("ab", HALVES), ("cd", HALVES), ("ef", HALVES))
    scene.lose("a")
    scene.change(("sb", HALVES), ("cd", HALVES), ("ef", HALVES), known={"c": 10, "e": 11})
    assert scene.build() == {"s": ["e"], "b": []}


def test_who_was_in_the_same_cluster_gives_before_one_that_knows_more():
    scene = HubScene("abcds", ("ab", HALVES), ("cd", HALVES))
    thirds = (0, 2), (2, 4), (4, 6)
    (origin,) = scene.change(("sab", thirds), ("cd", HALVES), known={"c": 100}, kept=100)
    assert scene.build() == {"s": ["a"], "a": ["b"], "b": []}
    assert (origin.cluster_id, origin.is_whole) == ("A1", False)


def test_a_cluster_of_newcomers_begins_where_the_best_one_is():
    scene = HubScene("abst", ("ab", HALVES))
    (origin,) = scene.change(("ab", HALVES), ("st", HALVES), known={"a": 7}, kept=0)
    assert scene.build() == {"s": ["a"], "t": ["b"]}
    assert (origin.cluster_id, origin.is_whole) == ("A1", False)


@pytest.mark.parametrize(("cut", "holder"), [(2, "A1"), (1, "B1")])
def test_a_cluster_is_the_one_that_most_of_it_was_in(cut, holder):
    scene = HubScene("abcd", ("ab", HALVES), ("cd", HALVES))
    scene.lose("b")
    scene.lose("d")
    (origin,) = scene.change(("ac", ((0, cut), (cut, 6))), kept=3)
    assert (origin.cluster_id, origin.is_whole) == (holder, False)


def test_a_cluster_that_only_stood_still_keeps_all_it_has():
    scene = HubScene("ab", ("ab", HALVES))
    scene.placement.mark_broken(scene.placement.clusters[0])
    (origin,) = scene.change(("ab", HALVES), kept=5)
    assert (origin.cluster_id, origin.is_whole) == ("A1", True)
    assert scene.ask() == {}
    orders = scene.order()
    assert {name: (parts.is_kept, parts.sources, parts.anchor_round) for name, parts in orders.items()} == {
        "a": (True, (), None),
        "b": (True, (), None),
    }


def test_who_does_not_give_what_it_holds_is_asked_no_more_until_it_holds_something_else(scene):
    scene.change(*AFTER, known={"c": 100}, kept=10)
    scene.sources.mark_useless("c", "a")
    scene.placement.mark_broken(scene.placement.clusters[0])
    scene.change(*AFTER, known={"c": 100}, kept=10)
    assert scene.build() == {"s": [HUB], "b": []}
    scene.change(("sb", HALVES), ("c", ((0, 6),)), kept=10)
    scene.placement.mark_ready("c")
    scene.change(("tb", HALVES), ("c", ((0, 6),)), known={"c": 100}, kept=10)
    assert scene.build() == {"t": ["c"], "b": []}


def test_a_backup_that_cannot_be_used_is_not_used_again(scene):
    backed_up(scene, 100)
    scene.change(*AFTER, known={"c": 50}, kept=95)
    assert scene.build() == {"s": ["t"], "b": []}
    scene.sources.mark_useless("t", "a")
    scene.placement.mark_broken(scene.placement.clusters[0])
    scene.change(*AFTER, known={"c": 50}, kept=95)
    assert scene.build() == {"s": [HUB], "b": []}


def test_a_backup_is_there_already_and_only_of_who_is_still_here(scene):
    backed_up(scene, 100)
    scene.change(*AFTER, kept=50)
    assert scene.ask() == {}
    (source,) = scene.order()["s"].sources
    assert (source.node, source.weights) == ("t", blob("backup of t"))
    scene.membership.remove("t")
    scene.placement.mark_broken(scene.placement.clusters[0])
    scene.change(*AFTER, kept=50)
    assert scene.build()["s"] == [HUB]


def test_who_keeps_a_backup_and_holds_a_stage_is_asked_for_what_it_holds(scene):
    backed_up(scene, 1, spare="c")
    scene.change(*AFTER, known={"c": 100})
    assert scene.ask() == {1: "c"}


def test_a_backup_of_who_holds_less_now_is_no_source():
    scene = HubScene("abstu", ("ab", HALVES))
    backed_up(scene, 100, spare="s")
    scene.lose("a")
    change = scene.adopt(("sb", HALVES))  # its backup takes the place
    scene.sources.begin(change, lambda _: 0, 90)
    assert scene.build() == {"s": ["s"], "b": []}
    scene.build_all(change)
    thirds = ("stb", ((0, 1), (1, 3), (3, 6)))
    change = scene.adopt(thirds)  # t joined: cut anew
    scene.sources.begin(change, lambda _: 0, 90)
    scene.build()
    scene.build_all(change)
    scene.lose("t")
    scene.change(("sub", thirds[1]), kept=100)
    assert scene.build()["u"] == [HUB], "s has the first position only"


def test_stages_of_a_cluster_that_broke_meanwhile_are_not_built(scene):
    scene.change(*AFTER, known={"c": 100})
    asked = scene.ask()
    scene.placement.mark_broken(scene.placement.clusters[0])
    assert scene.order() == {}
    for number, name in asked.items():
        scene.answer(name, number)
    assert scene.order() == {}
    assert scene.membership.find("b").held == HeldState(3, 6, "A1")


def test_a_stage_is_built_when_all_it_needs_is_there_and_once(scene):
    scene.change(*AFTER, known={"c": 100})
    (number,) = scene.ask()
    assert list(scene.order()) == ["b"]
    assert not scene.answer("d", number), "it was asked of another"
    assert scene.answer("c", number)
    assert list(scene.order()) == ["s"]
    assert scene.order() == {}
    assert not scene.answer("c", number)


def test_who_gives_is_needed_until_all_it_gives_to_are_built(scene):
    scene.change(*AFTER, known={"c": 100})
    assert scene.sources.is_source("c")
    assert not scene.sources.is_source("d")
    assert scene.sources.pairs == {"c": {"s"}, "s": {"c"}}
    cluster = scene.placement.clusters[0]
    assert scene.sources.givers(cluster) == ("c",)
    assert scene.sources.givers(scene.placement.clusters[1]) == ()
    scene.placement.mark_ready("b")
    assert scene.sources.is_source("c")
    scene.placement.mark_ready("s")
    assert not scene.sources.is_source("c")


def test_what_a_node_does_not_host_any_more_it_no_longer_holds():
    scene = HubScene("abcd", ("ab", HALVES), ("cd", HALVES))
    scene.lose("b")
    scene.change(("ca", ((0, 1), (1, 6))))
    scene.build()
    assert scene.membership.find("a").held == HeldState(1, 3, "A1")
    assert scene.membership.find("c").held == HeldState(0, 1, "B1")


def first_sources(scene, *clusters):
    """Who gets which segment from whom, by node: a first plan."""
    change = scene.adopt(*clusters)
    scene.sources.begin_first(change)
    return {name: parts.sources for name, parts in scene.order().items()}


def test_first_weights_leave_the_hub_once_and_go_from_node_to_node():
    """Clusters that are cut otherwise get the segments of which their stages are made."""
    scene = HubScene("abcdefgh")
    fast = node("f", upload_bytes_per_second=1e10)
    scene.membership.update(replace(scene.membership["f"], node=fast))
    found = first_sources(scene, ("ab", HALVES), ("cd", ((0, 2), (2, 6))), ("ef", HALVES), ("gh", HALVES))
    weights = {each: blob(("weights", *each)) for each in ((0, 2), (2, 3), (3, 6))}
    assert [source.weights for source in found["a"]] == [weights[0, 2], weights[2, 3]]
    assert [source.weights for source in found["d"]] == [weights[2, 3], weights[3, 6]]
    assert all(source.node == HUB for sources in found.values() for source in sources)
    others = {(name, x.weights): x.others for name, sources in found.items() for x in sources}
    assert [others[name, weights[0, 2]] for name in "aceg"] == [(), ("a",), ("a", "c"), ("c", "e")]
    assert [others[name, weights[3, 6]] for name in "fbdh"] == [(), ("f",), ("f", "b"), ("b", "d")]
    assert [others[name, weights[2, 3]] for name in "adeg"] == [(), ("a",), ("a", "d"), ("d", "e")]


def test_first_weights_do_not_go_through_the_hub_between_two_that_cannot_be_dialled():
    scene = HubScene("abc")
    for name in "ab":
        hidden = replace(scene.membership[name].node, is_reachable=False)
        scene.membership.update(replace(scene.membership[name], node=hidden))
    found = first_sources(scene, *((name, ((0, 6),)) for name in "abc"))
    assert [found[name][0].others for name in "abc"] == [("c",), ("c",), ()]


def test_a_lone_cluster_gets_its_first_weights_by_stage():
    scene = HubScene("ab")
    found = first_sources(scene, ("ab", HALVES))
    assert [[(x.weights, x.others) for x in found[name]] for name in "ab"] == [
        [(blob(("weights", *each)), ())] for each in HALVES
    ]
