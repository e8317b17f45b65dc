"""When simulated nodes come and go and links change, and one sentence for each mistake in a trace."""

from math import log
from statistics import fmean, pstdev

import pytest
from support.plan_world import node, swarm_of

from ravnest.errors import ConfigError
from ravnest.sim.churn import ChangeKind, LinkChange, made_up_changes, made_up_link_changes, read_trace

SWARM = swarm_of(*(node(name, uptime_seconds=3600.0) for name in "abcd"))


def test_made_up_changes_are_those_of_the_seed_and_alternate():
    found = made_up_changes(SWARM, 1, hours=10.0, times=1.0)
    assert found == made_up_changes(SWARM, 1, hours=10.0, times=1.0)
    assert found != made_up_changes(SWARM, 2, hours=10.0, times=1.0)
    for name in "abcd":
        kinds = [change.kind for change in found if change.node == name]
        assert all(kind is ChangeKind.JOIN for kind in kinds[::2])
        assert all(kind is not ChangeKind.JOIN for kind in kinds[1::2])
    assert len(made_up_changes(SWARM, 1, hours=10.0, times=0.0)) == 4
    assert len(made_up_changes(SWARM, 1, hours=10.0, times=4.0)) > len(found)


def test_a_trace_is_read_in_any_order():
    found = read_trace("# who\n5.5, b, kill\n\n0,a,join # first\n1,b,join\n", "t.csv", SWARM)
    assert [(x.seconds, x.node, x.kind.value) for x in found] == [
        (0.0, "a", "join"),
        (1.0, "b", "join"),
        (5.5, "b", "kill"),
    ]


def test_made_up_links_change_every_ten_minutes_by_the_noise_that_was_asked():
    found = made_up_link_changes(SWARM, 1, hours=100.0, spread=0.5)
    assert found == made_up_link_changes(SWARM, 1, hours=100.0, spread=0.5)
    assert found != made_up_link_changes(SWARM, 2, hours=100.0, spread=0.5)
    assert len(found) / 4 / 600 == pytest.approx(1.0, rel=0.1)
    noise = [log(change.times) for change in found]
    assert fmean(noise) == pytest.approx(0.0, abs=0.05)
    assert pstdev(noise) == pytest.approx(0.5, rel=0.05)
    assert made_up_link_changes(SWARM, 1, hours=100.0, spread=0.0) == ()


def test_a_trace_changes_links_too():
    found = read_trace("7,a,link,0.25\n3,b,link, 2", "t.csv", SWARM)
    assert found == (LinkChange(3.0, "b", 2.0), LinkChange(7.0, "a", 0.25))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("1,a", "t.csv, line 1: '1,a' is no change; write SECONDS,NODE,join|leave|kill or SECONDS,NODE,link"),
        ("1,a,link", "is no change; write join, leave or kill"),
        ("1,a,kill,2", "is no change; write SECONDS,NODE,join|leave|kill or SECONDS,NODE,link,TIMES"),
        ("1,a,link,0", "'0' is no change of a link; write from 0.001 to 1000 times"),
        ("1,a,link,fast", "'fast' is no change of a link"),
        ("x,a,join", "'x' is no time"),
        ("nan,a,join", "'nan' is no time"),
        ("1,z,join", "no node is called 'z'"),
        ("1,a,dance", "'dance' is no change; write join, leave or kill"),
    ],
)
def test_a_mistake_in_a_trace_is_a_sentence(line, told):
    with pytest.raises(ConfigError, match=r"t\.csv, line 1") as error:
        read_trace(line, "t.csv", SWARM)
    assert told in str(error.value)
