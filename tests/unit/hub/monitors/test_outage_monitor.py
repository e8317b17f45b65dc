"""Who is gone, and when it is rather the hub that is away."""

import pytest

from ravnest.hub.monitors.liveness import OutageMonitor


def lost(names, at=0.0):
    """A monitor, and all these nodes lost within a second of each other."""
    monitor = OutageMonitor()
    for number, name in enumerate(names):
        monitor.record_loss(name, "nothing heard", at + number / len(names))
    return monitor


def gone(monitor, here="", now=None, can_wait=True):
    """Who is gone at the time it is due, or later."""
    now = monitor.due if now is None else now
    return "".join(name for name, _ in monitor.find_gone([*here], can_wait, now))


@pytest.mark.parametrize(
    ("names", "here"), [("a", "b"), ("a", "bcdef"), ("ab", "c"), ("abc", "def"), ("abc", "de")]
)
def test_who_is_lost_while_others_are_heard_has_a_moment(names, here):
    monitor = lost(names)
    assert monitor.due == 3.0
    assert gone(monitor, here, 2.99) == ""
    assert gone(monitor, here) == "a"
    assert gone(monitor, here, 4.0) == names[1:]
    assert monitor.due is None
    assert not monitor.is_cut_off


@pytest.mark.parametrize("names", ["a", "ab", "abcdef"])
def test_when_nobody_is_heard_all_are_waited_for_long(names):
    monitor = lost(names)
    assert gone(monitor) == ""
    assert monitor.is_cut_off
    assert monitor.due == 603.0
    assert gone(monitor, now=602.9) == ""
    assert gone(monitor) == names
    assert not monitor.is_cut_off
    assert monitor.due is None


def test_as_soon_as_one_is_back_the_others_have_less_time():
    monitor = lost("abc")
    gone(monitor)
    monitor.record_return("b", 100.0)
    assert not monitor.is_cut_off
    assert monitor.due == 120.0
    assert gone(monitor, "b", 119.9) == ""
    monitor.record_return("c", 119.9)
    assert monitor.due == 120.0, "the next return gives no more"
    assert gone(monitor, "bc") == "a"


def test_who_is_lost_again_just_after_it_came_back_has_as_long_as_the_others():
    monitor = lost("abc")
    gone(monitor)
    for name in "abc":
        monitor.record_return(name, 100.0)
    monitor.record_loss("a", "the connection was closed", 101.0)
    assert monitor.due == 120.0
    monitor.record_return("a", 110.0)
    monitor.record_loss("a", "the connection was closed", 118.0)
    assert monitor.due == 121.0
    assert gone(monitor, "bc") == "a"


@pytest.mark.parametrize(("names", "seconds"), [("a", 3.0), ("ab", 20.0), ("abcd", 20.0)])
def test_a_newcomer_shows_that_the_line_is_up_and_one_that_was_alone_is_given_up_soon(names, seconds):
    monitor = lost(names)
    gone(monitor)
    monitor.record_arrival(200.0)
    assert not monitor.is_cut_off
    assert monitor.due == 200.0 + seconds
    assert gone(monitor, "n") == names


def test_a_line_that_goes_down_again_is_waited_for_again():
    monitor = lost("abc")
    gone(monitor)
    monitor.record_return("b", 100.0)
    monitor.record_loss("b", "nothing heard", 101.0)
    assert gone(monitor) == ""
    assert monitor.is_cut_off
    assert monitor.due == 720.0
    for name in "abc":
        monitor.record_return(name, 110.0)
    assert monitor.due is None


@pytest.mark.parametrize(("names", "here"), [("abc", "d"), ("abcdef", "gh")])
def test_all_but_a_few_that_were_lost_together_have_as_long_as_after_a_restart(names, here):
    monitor = lost(names)
    assert gone(monitor, here, 4.0) == ""
    assert not monitor.is_cut_off
    assert monitor.due == 20.0
    monitor.record_return("b", 10.0)
    assert gone(monitor, here + "b", 21.0) == names.replace("b", "")


@pytest.mark.parametrize("names", ["ab", "abcdef"])
def test_the_last_of_those_that_were_lost_together_has_as_long_when_the_others_are_back(names):
    monitor = lost(names)
    for name in names[1:]:
        monitor.record_return(name, 2.5)
    assert gone(monitor, names[1:]) == ""
    assert monitor.due == 20.0
    assert gone(monitor, names[1:]) == "a"


def test_those_that_were_lost_one_after_the_other_have_no_more_time():
    monitor = OutageMonitor()
    for seconds, name in enumerate("abc"):
        monitor.record_loss(name, "nothing heard", 1.5 * seconds)
    assert gone(monitor, "d") == "a"
    assert gone(monitor, "d") == "b"


def test_nothing_is_waited_for_that_nobody_has():
    monitor = lost("abc")
    assert gone(monitor, can_wait=False) == "a"
    assert not monitor.is_cut_off


def test_a_job_that_is_stopped_waits_less():
    monitor = lost("ab")
    gone(monitor)
    monitor.record_stop(50.0)
    assert monitor.due == 70.0
    assert gone(monitor, can_wait=False) == "ab"


def test_who_is_forgotten_is_not_waited_for():
    monitor = lost("ab")
    gone(monitor)
    monitor.forget("a")
    assert monitor.is_cut_off
    monitor.forget("b")
    assert not monitor.is_cut_off
    assert monitor.due is None
