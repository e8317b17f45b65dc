"""Who is still to be measured is found without a look at all members."""

from dataclasses import replace
from random import Random

import pytest
from support.plan_world import node

from ravnest.hub.coordinator.events import PeerJoined
from ravnest.hub.coordinator.membership import Member, Membership
from ravnest.hub.coordinator.phases import NodePhase
from ravnest.protocol.membership import Fact

SECONDS = 20.0  # that every probe has


def find_unmeasured(membership):
    return [member for member in membership.members if member.guessed]


def check(membership, now):
    """Compare what is found with a look at all."""
    unmeasured = find_unmeasured(membership)
    dues = [member.probe_by for member in unmeasured if member.probe_by is not None]
    assert membership.is_measuring == bool(unmeasured)
    assert membership.probe_due == min(dues, default=None)
    expected = [x for x in unmeasured if x.probe_by is None or now >= x.probe_by]
    assert list(membership.list_to_probe(now)) == expected, "in the order of joining"


def join(membership, name, now, guessed=(Fact.SPEED,)):
    return membership.join(PeerJoined(node(name), f"key of {name}", (), now, guessed))


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_probes_is_that_of_their_deadlines_whoever_comes_and_goes(seed):
    random, membership, now = Random(seed), Membership(), 0.0
    for number in range(300):
        now += random.choice((0.0, 0.5, 3.0))
        names = [*membership]
        chosen = membership[random.choice(names)] if names else None
        action = random.choice(("join", "join", "probe", "probe", "end", "remove", "away", "back"))
        if action == "join" or chosen is None:
            join(membership, f"n{number}", now, random.choice(((), (Fact.SPEED,))))
        elif action == "probe" and chosen.guessed and chosen.probe_by is None:
            membership.update(replace(chosen, probe_by=now + SECONDS))  # not in the order of joining
        elif action == "end" and chosen.guessed:
            membership.end_probe(chosen.node.name, chosen.node)
        elif action == "remove":
            membership.remove(chosen.node.name)
        elif action == "away" and not membership.missing:
            membership.mark_all_missing(now + 60.0)
        elif action == "back" and chosen.resumes is not None:
            membership.come_back(chosen.node.name, ())
        check(membership, now)


class Watched(Member):
    """Counts how often its deadline is read."""

    num_looks = 0

    def __getattribute__(self, name):
        Watched.num_looks += name == "probe_by"
        return object.__getattribute__(self, name)


def test_an_event_looks_at_no_member_whose_probe_is_under_way():
    membership = Membership()
    for number in range(1000):
        facts = (f"key {number}", (), NodePhase.PROBING, number, 0, (Fact.SPEED,), SECONDS)
        membership.update(Watched(node(f"n{number}"), *facts))
    Watched.num_looks = 0
    assert membership.is_measuring
    assert membership.probe_due == SECONDS
    assert membership.list_to_probe(1.0) == ()
    assert Watched.num_looks == 2, "those of the first one"
