"""A node that has become slow: seen when it lasts, believed when the others are as they were."""

import pytest

from ravnest.hub.monitors.liveness import PaceMonitor, ThroughputMonitor

START = 40  # when all is as usual


def work(seconds, build_id=1, num_samples=10):
    """So many samples, each of so many seconds, of a build."""
    return build_id, seconds * num_samples, num_samples


def tell(speeds, name, seconds, times, build_id=1):
    """Let a stage report every second; the first verdict and when it came, or None."""
    for now in times:
        verdict = speeds.record(name, *work(seconds, build_id), float(now))
        if verdict is not None:
            return now, verdict
    return None


def usual(*names):
    """All of them have worked for a while, a second for each sample."""
    speeds = ThroughputMonitor()
    for name in names:
        assert tell(speeds, name, 1.0, range(START)) is None
    return speeds


def test_who_is_slow_for_long_is_seen_and_by_how_much():
    when, times = tell(usual("a"), "a", 3.0, range(START, START + 100))
    assert times == pytest.approx(1 / 3)
    assert START + 20 <= when <= START + 32  # twenty seconds, and two readings


def test_who_is_slow_in_lumps_is_seen_too():
    """A busy PC stops a program for a moment now and then: most batches take as long as ever."""
    speeds, verdicts = usual("a"), []
    for index in range(2000):
        verdict = speeds.record("a", *work(40.0 if index % 10 == 0 else 1.0), START + 0.1 * index)
        verdicts += [verdict] if verdict is not None else []
    assert verdicts == [pytest.approx(1 / 4.9, rel=0.2)]


def test_who_is_fast_again_is_seen_too_against_what_is_usual_by_then():
    speeds = usual("a")
    when, _ = tell(speeds, "a", 3.0, range(START, START + 100))
    assert tell(speeds, "a", 3.0, range(when, when + 60)) is None, "it is known by now"
    _, times = tell(speeds, "a", 1.0, range(when + 60, when + 160))
    assert times == pytest.approx(3.0)


@pytest.mark.parametrize("seconds", [1.4, 0.7])
def test_a_little_slower_or_faster_is_nothing(seconds):
    assert tell(usual("a"), "a", seconds, range(START, START + 200)) is None


def test_a_moment_is_nothing_however_often():
    speeds = usual("a")
    for start in range(START, START + 400, 30):
        assert tell(speeds, "a", 5.0, range(start, start + 6)) is None
        assert tell(speeds, "a", 1.0, range(start + 6, start + 30)) is None


def test_what_slows_all_of_them_is_nobodys_fault():
    speeds = usual("a", "b", "c")
    for now in range(START, START + 100):
        for name in "abc":
            assert speeds.record(name, *work(4.0), float(now)) is None


def test_one_among_others_that_are_as_usual_is_seen():
    speeds = usual("a", "b", "c")
    verdicts = {}
    for now in range(START, START + 60):
        for name, seconds in (("a", 1.0), ("b", 4.0), ("c", 1.0)):
            found = speeds.record(name, *work(seconds), float(now))
            verdicts |= {name: found} if found is not None else {}
    assert verdicts == {"b": pytest.approx(1 / 4)}


def test_another_stage_begins_anew():
    speeds = usual("a")
    assert tell(speeds, "a", 5.0, range(START, START + 200), build_id=2) is None


def test_who_went_and_came_back_begins_anew():
    speeds = usual("a")
    speeds.forget("a")
    assert tell(speeds, "a", 5.0, range(START, START + 200)) is None


def test_a_cold_start_is_not_what_is_usual():
    speeds = ThroughputMonitor()
    assert tell(speeds, "a", 30.0, range(5)) is None
    assert tell(speeds, "a", 1.0, range(5, 200)) is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, 5e-324, float("nan"), float("inf"), 1e9])
def test_nonsense_says_nothing(seconds):
    speeds = usual("a")
    assert tell(speeds, "a", seconds, range(START, START + 100)) is None
    assert tell(speeds, "a", 1.0, range(START + 100, START + 200)) is None
    assert speeds.record("a", *work(1.0, num_samples=0), 300.0) is None


def step(paces, every, times, cluster_id="A1"):
    """Let a leaf report every so many seconds; the first verdict and when it came, or None."""
    start, stop = times
    now = start
    while now < stop:
        verdict = paces.record(cluster_id, 1, 10, now)
        if verdict is not None:
            return now, verdict
        now += every
    return None


def test_a_cluster_that_completes_less_for_long_is_seen_although_its_nodes_compute_as_ever():
    paces = PaceMonitor()
    assert step(paces, 0.5, (0.0, 60.0)) is None
    when, times = step(paces, 2.0, (60.0, 200.0))
    assert times == pytest.approx(1 / 4, rel=0.2)
    assert 80.0 <= when <= 95.0


def test_a_cluster_that_completes_more_is_nothing():
    paces = PaceMonitor()
    assert step(paces, 2.0, (0.0, 60.0)) is None
    assert step(paces, 0.5, (60.0, 200.0)) is None


def test_time_in_which_a_cluster_did_something_else_does_not_count():
    paces = PaceMonitor()
    for start in range(0, 400, 10):
        assert step(paces, 0.5, (float(start), start + 3.0)) is None
        paces.pause("A1")


def test_a_cluster_that_is_no_more_is_forgotten():
    paces = PaceMonitor()
    assert step(paces, 0.5, (0.0, 60.0)) is None
    paces.forget_others(["B1"])
    assert step(paces, 2.0, (60.0, 200.0)) is None
