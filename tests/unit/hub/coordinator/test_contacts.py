"""Whom members are told of, and how a large swarm is told of a plan."""

from dataclasses import replace

from support.hub_world import job
from support.plan_world import node

from ravnest.config import Mean
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import MakePlan, Notify, PeerJoined, PeerLeft, PlanMade, Send, Tick
from ravnest.hub.coordinator.membership import Membership
from ravnest.hub.coordinator.notices import Left
from ravnest.hub.coordinator.placement import SLICE, Contacts
from ravnest.hub.monitors.monitors import MonitoredCoordinator
from ravnest.plan.assembly import form_rings
from ravnest.plan.sharing import ALONE
from ravnest.plan.types import Cluster, Plan, Ring, Stage
from ravnest.protocol.placement import PlanOrder

RING = Ring(0, 6, tuple("abcdefghi"))


def contacts_of(ring, *, meets_all=False):
    membership = Membership()
    for name in ring.owners:
        membership.join(PeerJoined(node(name), f"key of {name}", (), 0.0))
    contacts = Contacts(membership)
    contacts.follow((ring,), meets_all)
    return contacts


def told(contacts, name):
    return "".join(each.node for each in contacts.find(name))


def test_a_node_is_told_of_those_next_to_it_in_a_ring_or_of_all_that_a_robust_round_has():
    assert told(contacts_of(RING), "e") == "cdfg"
    assert told(contacts_of(RING), "a") == "bchi"
    assert told(contacts_of(RING, meets_all=True), "e") == "abcdfghi"
    assert told(contacts_of(Ring(0, 6, tuple("abcde"))), "a") == "bcde"


def test_a_round_introduces_neighbours_that_were_not_told_of_each_other_once():
    contacts = contacts_of(RING)
    assert contacts.introduce("b") == ()  # a and c know each other
    assert contacts.introduce("def") == ("c", "g")
    assert (told(contacts, "c"), told(contacts, "g")) == ("abdeg", "cefhi".replace("c", "") + "c")
    assert contacts.introduce("def") == ()
    assert contacts_of(RING, meets_all=True).introduce("def") == ()


def test_contacts_of_one_plan_are_not_those_of_the_next():
    contacts = contacts_of(RING)
    contacts.introduce("def")
    contacts.follow((RING,), False)
    assert told(contacts, "c") == "abde"


def large_hub():
    """A hub with a plan for more members than are told at once; what it decided, and its log."""
    given, log = job(settle_seconds=1.0, mean=Mean.PLAIN), []
    hub = Coordinator(given)
    monitored = MonitoredCoordinator(hub, log.append)
    monitored.apply(given)
    names = [f"n{number:04}" for number in range(SLICE + 6)]
    for name in names:
        monitored.apply(PeerJoined(node(name), f"key of {name}", (), 1.0))
    (asked,) = (each for each in monitored.apply(Tick(2.5)) if isinstance(each, MakePlan))
    clusters = tuple(Cluster((Stage(name, 0, 6),)) for name in names)
    rings = form_rings(clusters, {each.name: each for each in asked.nodes})
    made = PlanMade(asked.plan_id, Plan(asked.plan_id, 0, clusters, rings, ()), 1, "", 3.0)
    return monitored, log, monitored.apply(replace(made, sharing=replace(ALONE, num_clusters=len(names))))


def ordered(actions):
    return [each.to for each in actions if isinstance(each, Send) and isinstance(each.message, PlanOrder)]


def test_a_large_swarm_is_told_of_a_plan_in_several_events_and_a_departure_waits_for_them():
    monitored, log, first = large_hub()
    assert (ordered(first), monitored.due) == ([], 3.0)
    count = len(log)
    actions = monitored.apply(PeerLeft("n0007", "its link is lost", 3.5))
    assert len(ordered(actions)) == len(set(ordered(actions))) == SLICE + 6
    (left,) = (
        k for k, each in enumerate(actions) if isinstance(each, Notify) and isinstance(each.notice, Left)
    )
    assert all(k < left for k, each in enumerate(actions) if isinstance(each, Send) and each.to == "n0007")
    assert [type(each) for each in log[count:-1]] == [Tick] * (len(log) - count - 1)
    assert isinstance(log[-1], PeerLeft)
    assert not monitored.hub.must_wait(log[-1])


def test_what_is_told_in_slices_is_told_again_by_a_replay():
    monitored, log, found = large_hub()
    actions = [*found]
    while monitored.due == 3.0:
        some = monitored.apply(Tick(3.0))
        assert len(ordered(some)) <= SLICE + 8
        actions += some
    hub = Coordinator(log[0])
    again = [action for event in log for action in hub.apply(event)]
    assert ordered(again) == ordered(actions)
    assert len(ordered(actions)) == SLICE + 6
