"""The best of many clusters is found as a look at all of them would find it."""

from random import Random

import pytest

from ravnest.hub.coordinator.placement import ClusterState
from ravnest.hub.monitors.lease_checks import ClusterWork, CountedWork


def make_cluster(number, speed=1.0):
    return ClusterState(f"c{number}", 1, None, set(), f"c{number}", samples_per_second=speed)


def look_at_all(work, running, besides, now):
    known = []
    for each in running:
        found = work.find(each.cluster_id)
        if found is None:
            continue
        until = now if found.idle_since is None else found.idle_since
        foreseen = each.samples_per_second * (until - found.began_at)
        if each is not besides and foreseen > 0:
            known.append((found.num_samples + found.num_first) / foreseen)
    return len(known), max([0.0, *known])


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_look_at_all_finds(seed):
    random, work, now = Random(seed), CountedWork(), 0.0
    every = [make_cluster(number, random.choice((0.0, 0.3, 1.0, 7.0))) for number in range(9)]
    running = tuple(every)
    for _ in range(600):
        now += random.choice((0.0, 0.01, 1.0, 30.0))
        chosen = random.choice(every)
        action = random.choice(("begin", "add", "add", "add", "look", "pause", "resume", "plan", "forget"))
        if action == "begin":
            work.begin(chosen.cluster_id, ClusterWork(now, now, random.randrange(1, 9), 0.0))
        elif action == "add" and work.find(chosen.cluster_id) is not None:
            work.add(chosen.cluster_id, random.randrange(1, 50))
        elif action == "plan" and random.random() < 0.3:
            chosen.samples_per_second = random.choice((0.0, 0.5, 2.0))
            running = tuple(random.sample(every, random.randrange(10)))
        elif action == "forget" and random.random() < 0.2:
            work.forget_others([each.cluster_id for each in random.sample(every, 7)])
        elif action == "pause":
            work.pause(chosen.cluster_id, now)
        elif action == "resume":
            work.resume(chosen.cluster_id, now)
        besides = random.choice(every)
        assert work.find_best(running, besides, now) == look_at_all(work, running, besides, now)


class Counting(tuple):
    """Counts how often its clusters are gone through."""

    num_passes = 0

    def __iter__(self):
        Counting.num_passes += 1
        return super().__iter__()


def test_clusters_are_gone_through_once_for_a_plan_and_not_for_each_lease():
    work, running = CountedWork(), Counting(make_cluster(number) for number in range(50))
    for turn in range(1, 9):
        for each in running[:]:
            work.begin(each.cluster_id, ClusterWork(0.0, 0.0, 8, 0.0))
            work.find_best(running, each, 4.0 * turn)
            work.add(each.cluster_id, 8)
    assert Counting.num_passes == 1
