"""The hub's weights go by interval: of which a stage is made, and from whom its node gets them."""

from dataclasses import replace

import pytest
from support.plan_world import node

from ravnest.hub.coordinator.events import PeerJoined
from ravnest.hub.coordinator.membership import Membership
from ravnest.hub.coordinator.sources import Deliveries
from ravnest.plan.types import Ring, Stage


def made(names="abcde", hidden=""):
    """Rings of a, b and c are of three segments; d and e are spares."""
    membership = Membership()
    for name in names:
        facts = replace(node(name), is_reachable=name not in hidden)
        membership.join(PeerJoined(facts, f"key of {name}", (), 0.0))
    deliveries = Deliveries(membership)
    rings = [Ring(start, stop, ("a", "b", "c")) for start, stop in ((0, 2), (2, 3), (3, 6))]
    deliveries.begin(rings, [])
    return deliveries


def cut(shares):
    return [(share.start, share.stop) for share in shares]


def test_a_node_with_the_same_stage_again_gets_the_same_intervals():
    deliveries = made()
    deliveries.withdraw({"b"})
    assert cut(deliveries.divide("b", 0, 6, {0, 1, 6})) == [(0, 2), (2, 3), (3, 6)]


def test_what_others_have_comes_before_what_is_new_and_new_ends_at_a_cut():
    deliveries = made()
    assert cut(deliveries.divide("d", 1, 6, {0, 6})) == [(1, 2), (2, 3), (3, 6)]
    assert cut(deliveries.divide("e", 0, 5, {4})) == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_what_a_node_has_in_part_comes_before_what_others_have():
    deliveries = made()
    deliveries.divide("d", 0, 3, ())  # of (0, 2) and (2, 3)
    deliveries.withdraw({"d"})
    deliveries.clear()
    deliveries.begin([Ring(0, 6, ("a", "b", "c"))], [])
    deliveries.divide("d", 0, 4, ())
    deliveries.withdraw({"d", "a", "b", "c"})
    deliveries.divide("a", 0, 6, ())
    assert cut(deliveries.divide("d", 0, 6, ())) == [(0, 4), (4, 6)]


def test_nobody_waits_for_a_node_that_waits_for_it():
    deliveries = made()
    before = deliveries.begin([Ring(0, 6, ("a", "b", "c"))], [])
    assert [before[name][0].before for name in "abc"] == [(), ("a",), ("a", "b")]
    deliveries.withdraw({"b"})
    (share,) = deliveries.divide("b", 0, 6, ())
    assert share.before == ("a",), "c gets it from b"
    deliveries.withdraw({"a"})
    (share,) = deliveries.divide("a", 0, 6, ())
    assert share.before == (), "all others get it from a"


def test_who_passes_on_to_few_is_asked_and_who_has_gone_is_not():
    deliveries = made()
    (share,) = deliveries.divide("d", 3, 6, ())
    assert share.before == ("c", "b")
    deliveries.forget("c")
    (share,) = deliveries.divide("e", 3, 6, ())
    assert "c" not in share.before


@pytest.mark.parametrize(("hidden", "before"), [("de", ("c", "b")), ("abcde", ())])
def test_two_that_cannot_dial_each_other_do_not_meet(hidden, before):
    (share,) = made(hidden=hidden).divide("d", 3, 6, ())
    assert share.before == before


def test_a_cluster_that_is_alone_gets_its_stages():
    deliveries = made()
    shares = deliveries.begin([], [Stage("a", 0, 4), Stage("b", 4, 6)])
    assert {name: cut(each) for name, each in shares.items()} == {"a": [(0, 4)], "b": [(4, 6)]}
    deliveries.withdraw({"a", "b"})
    assert cut(deliveries.divide("a", 0, 6, ())) == [(0, 4), (4, 6)]
