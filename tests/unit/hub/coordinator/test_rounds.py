"""When rounds come, of whom, and who is left out: the hub's side, with scripted members."""

from dataclasses import replace

import pytest
from support import plan_world
from support.hub_world import HubWorld, Trouble, check_replay, job

from ravnest.config import Averaging, Mean
from ravnest.hub.coordinator.events import Received, Send
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import PlanFormed, RoundEnded
from ravnest.hub.coordinator.planner import SearchPlanner
from ravnest.hub.coordinator.rounds import judge
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Cluster, Plan, Stage
from ravnest.protocol.averaging import RoundAbort, RoundCommit, RoundOpen
from ravnest.protocol.placement import StageParts


def plan_alone(_, swarm, config, seed, epoch):
    clusters = tuple(Cluster((Stage(each.name, 0, 6),)) for each in swarm.nodes)
    return Plan(epoch, seed, clusters, form_rings(clusters, {each.name: each for each in swarm.nodes}), ())


PLANNER = SearchPlanner(form=plan_alone)


def long_job(**changes):
    settings = {"num_samples": 4000, "num_validation": 0, "epochs": 1, "average_every": 2}
    return job(**(settings | {"chunk_batches": 1, "microbatches": 1} | changes))


def clusters_of(num_clusters, *, given=None, trouble=None, make_node=plan_world.node, **changes):
    """A world that has just begun to train with so many clusters of one node each."""
    world = HubWorld(given or long_job(**changes), trouble, PLANNER, make_node)
    world.join(*"abcdefgh"[:num_clusters], memory_mb=1000.0)
    world.run_until(lambda: sum(each.is_running for each in world.hub.clusters) == num_clusters)
    return world


def opened(world):
    """The rounds so far: number, who was asked, what they were told."""
    found = {}
    for order in (order for answer in world.answers for order in answer):
        if isinstance(order, Send) and isinstance(order.message, RoundOpen):
            _, names = found.setdefault(order.message.round_id, (order.message, []))
            names.append(order.to)
    return [(message, "".join(sorted(names))) for message, names in found.values()]


def attending(world, num_rounds=None):
    return [names for _, names in opened(world)][:num_rounds]


def outcomes(world):
    return [ended.is_committed for ended in world.told(RoundEnded)]


def blamed(world):
    return [each for ended in world.told(RoundEnded) for each in ended.blamed]


def late(*names):
    """Members that are late by themselves: the others wait in vain, and say for whom."""

    def vote(world, name, order):
        present = [each for each in names if each in world.known and each not in order.left_out]
        if not present:
            return 0.7, world.ready(name, order.round_id)
        if name in present:
            return None
        reason = f"{name} had not finished its rings at the deadline"
        seconds = order.deadline_seconds + 0.5 * "abcdefgh".index(name)  # its thread was busy
        return seconds, RoundAbort(order.round_id, reason, present[0])

    return vote


def script(world, vote):
    world.vote = lambda name, order: vote(world, name, order)


def run_rounds(world, num_rounds):
    return world.run_until(lambda: len(world.told(RoundEnded)) >= num_rounds)


# Left out, and back.


def test_who_held_up_a_round_is_left_out_of_the_next_try_at_once_and_asked_again_after_it():
    world = clusters_of(3)
    script(world, late("b"))
    run_rounds(world, 1)
    aborted_at = world.now
    run_rounds(world, 2)
    script(world, world.__class__.usual_vote)
    run_rounds(world, 3)
    assert attending(world, 3) == ["abc", "ac", "abc"]
    assert outcomes(world) == [False, True, True]
    assert blamed(world) == [(cluster_of(world, "b").name, 1)]
    again = next(event for event, answer in zip(world.log, world.answers, strict=True) if opens(answer, 2))
    assert again.now == aborted_at
    seconds = opened(world)[0][0].deadline_seconds
    assert world.told(RoundEnded)[0].seconds == pytest.approx(seconds + 1.0)  # c is heard; b needs not be
    (second, _) = opened(world)[1]
    assert second.left_out == ("b",)
    assert world.told(RoundEnded)[1].left_out == (cluster_of(world, "b").name,)
    assert world.told(RoundEnded)[2].left_out == ()
    check_replay(world)


def plan_pairs(_, swarm, config, seed, epoch):
    """Clusters of two nodes each, all cut in the middle."""
    names = [each.name for each in swarm.nodes]
    pairs = zip(names[::2], names[1::2], strict=True)
    clusters = tuple(Cluster((Stage(root, 0, 3), Stage(leaf, 3, 6))) for root, leaf in pairs)
    return Plan(epoch, seed, clusters, form_rings(clusters, {each.name: each for each in swarm.nodes}), ())


def pairs_of(mean):
    """A world in which four pairs have just begun to train; nobody can dial the first one."""
    given = long_job()
    given = replace(given, settings=replace(given.settings, mean=mean))

    def hide(name, memory_mb=1000.0, **facts):
        return plan_world.node(name, memory_mb, is_reachable=name not in "ab", **facts)

    world = HubWorld(given, None, SearchPlanner(form=plan_pairs), hide)
    world.join(*"abcdefgh")
    world.run_until(lambda: sum(each.is_running for each in world.hub.clusters) == 4)
    return world


def orders_of(world, round_id):
    sends = (each for answer in world.answers for each in answer if isinstance(each, Send))
    orders = ((each.to, each.message) for each in sends if isinstance(each.message, RoundOpen))
    return {name: order for name, order in orders if order.round_id == round_id}


# A message has room for 1,024 names; in a large swarm more nodes may be left out, or hidden.


def test_a_member_is_told_who_is_left_out_of_its_own_rings():
    world = pairs_of(Mean.PLAIN)
    script(world, late("c"))
    run_rounds(world, 2)
    told = {name: order.left_out for name, order in orders_of(world, 2).items()}
    assert told == {**dict.fromkeys("aeg", ("c",)), **dict.fromkeys("bfh", ("d",))}


def test_a_member_is_told_who_of_its_own_rings_cannot_be_dialled():
    world = pairs_of(Mean.ROBUST)
    world.run_until(lambda: world.open_round is not None)
    told = {name: order.hidden for name, order in orders_of(world, 1).items()}
    assert told == {**dict.fromkeys("aceg", ("a",)), **dict.fromkeys("bdfh", ("b",))}


def test_of_those_who_wait_for_each_other_the_one_behind_the_cut_link_is_believed():
    """In a ring a to e the link from b to c is cut: c misses what comes first, d what c would pass on."""
    world = clusters_of(5)
    waits = {"c": ("b", 2, 2.0), "d": ("c", 3, 0.5), "e": ("d", 4, 1.0), "a": (None, 1, 1.5)}

    def vote(world, name, order):
        if order.round_id > 1 or name == "b":
            return 0.5, world.ready(name, order.round_id)
        suspect, hops, pause = waits[name]
        return order.deadline_seconds + pause, RoundAbort(order.round_id, "late", suspect, hops)

    script(world, vote)
    run_rounds(world, 2)
    assert attending(world, 2) == ["abcde", "acde"]
    assert blamed(world) == [(cluster_of(world, "b").name, 1)]


def test_a_round_is_cut_for_the_slowest_link_of_those_who_take_part():
    links = {"a": (4e6, 9e6), "b": (9e6, 2e6), "c": (1e6, 1e6)}

    def with_links(name, memory_mb):
        upload, download = links[name]
        rates = {"upload_bytes_per_second": upload, "download_bytes_per_second": download}
        return plan_world.node(name, memory_mb, **rates)

    world = clusters_of(3, make_node=with_links)
    script(world, late("c"))
    run_rounds(world, 2)
    bytes_per_item = 4 * world.given.config.deltas.ratio
    found = [order.least_chunk * bytes_per_item for order, _ in opened(world)[:2]]
    assert found == pytest.approx([2e4, 4e4], rel=0.01)


def cluster_of(world, name):
    return next(each for each in world.hub.clusters if name in each.nodes)


def opens(answer, round_id):
    messages = [order.message for order in answer if isinstance(order, Send)]
    return any(isinstance(each, RoundOpen) and each.round_id == round_id for each in messages)


def test_late_again_and_again_it_is_left_out_for_longer_but_never_for_good():
    world = clusters_of(3, num_samples=12000)
    script(world, late("b"))
    run_rounds(world, 37)
    asked = ["b" in names for names in attending(world)]
    absences = [len(part) for part in "".join(".x"[each] for each in asked).split("x")[1:]]
    assert absences[:6] == [1, 2, 4, 8, 8, 8]
    assert [number for _, number in blamed(world)] == [1, 2, 4, 8, 8, 8][: len(blamed(world))]
    assert all(each is not is_asked for each, is_asked in zip(outcomes(world), asked, strict=False))
    script(world, world.__class__.usual_vote)
    num_before = len(attending(world))
    world.run_until(lambda: any("b" in names for names in attending(world)[num_before:]))
    assert len(attending(world)) <= num_before + 9
    run_rounds(world, len(attending(world)))
    assert outcomes(world)[-1]
    script(world, late("b"))
    num_told = len(blamed(world))
    world.run_until(lambda: len(blamed(world)) > num_told)
    assert blamed(world)[-1][1] == 1  # what it was blamed for before is forgotten


@pytest.mark.parametrize("averaging", [Averaging.OVERLAPPED, Averaging.BLOCKING])
def test_two_clusters_that_never_agree_try_ever_less_often(averaging):
    given = long_job(num_samples=3200)
    world = clusters_of(2, given=replace(given, config=replace(given.config, averaging=averaging)))
    script(world, lambda _, name, order: (0.1, RoundAbort(order.round_id, "cut", name)))
    world.run()
    assert world.is_finished
    regular = [order for order, _ in opened(world) if not order.is_final]
    num_periods = 800 // 2 // 2
    assert num_periods / 8 - 2 <= len(regular) <= num_periods / 8 + 6
    assert [order.is_final for order, _ in opened(world)][-3:] == [True] * 3
    check_replay(world)


def test_one_that_says_nothing_is_not_waited_for_for_ever():
    world = clusters_of(3)

    def vote(world, name, order):
        if name == "c":
            return None
        if name == "b" or "c" in order.left_out:
            return 0.7, world.ready(name, order.round_id)
        return order.deadline_seconds, RoundAbort(order.round_id, "late", "b")

    script(world, vote)
    run_rounds(world, 1)
    seconds = opened(world)[0][0].deadline_seconds
    assert world.told(RoundEnded)[0].seconds == pytest.approx(1.25 * seconds)
    assert blamed(world) == [("B", 1)]  # nobody said anything else


def foresee(world, seconds):
    """Have the plan say how long a round takes."""
    world.hub.placement._outline = replace(world.hub.placement.outline, round_seconds=seconds)


def test_a_hearing_is_short_although_rounds_are_long():
    world = clusters_of(2)
    foresee(world, 30.0)
    script(
        world,
        lambda _, name, order: (
            (order.deadline_seconds, RoundAbort(order.round_id, "late")) if name == "a" else None
        ),
    )
    run_rounds(world, 1)
    assert opened(world)[0][0].deadline_seconds == 130.0
    assert world.told(RoundEnded)[0].seconds == pytest.approx(135.0)


@pytest.mark.parametrize(("foreseen", "deadline"), [(900.0, 3600.0), (6000.0, 7500.0), (1e6, 600.0)])
def test_a_round_may_take_as_long_as_the_plan_says(foreseen, deadline):
    world = clusters_of(2)
    foresee(world, foreseen)
    script(world, lambda world, name, order: (0.7, world.ready(name, order.round_id)))
    run_rounds(world, 1)
    assert opened(world)[0][0].deadline_seconds == deadline


def test_who_is_cut_off_blames_others_and_is_not_believed():
    world = clusters_of(4)
    waits = {"a": None, "b": "a", "c": "b", "d": None}  # b is cut off: c waits for it, and it for a

    def vote(world, name, order):
        if "b" in order.left_out:
            return 0.7, world.ready(name, order.round_id)
        return order.deadline_seconds, RoundAbort(order.round_id, "late", waits[name])

    script(world, vote)
    run_rounds(world, 2)
    assert attending(world, 2) == ["abcd", "acd"]


@pytest.mark.parametrize(
    ("suspects", "guilty"),
    [
        ({"B": "A"}, "A"),
        ({"B": "A", "C": None}, "A"),
        ({"A": "D", "B": "A"}, "A"),
        ({"A": "B", "B": "A"}, "AB"),
        ({"A": "B", "B": "A", "C": "A"}, "A"),
        ({"A": "B", "B": "A", "C": None}, "AB"),
        ({"A": "A", "B": "A"}, "A"),
        ({"A": "C", "B": "D"}, "CD"),
        ({"A": None, "B": None}, "AB"),
    ],
)
def test_whom_to_blame(suspects, guilty):
    assert judge(suspects) == set(guilty)


def test_what_a_member_sees_before_its_deadline_needs_no_hearing():
    world = clusters_of(3)
    script(
        world,
        lambda world, name, order: (
            (0.2, RoundAbort(order.round_id, "not a number", "c"))
            if name == "a" and "c" not in order.left_out
            else (0.7, world.ready(name, order.round_id))
        ),
    )
    run_rounds(world, 2)
    assert attending(world, 2) == ["abc", "ab"]
    first = next(event for event, answer in zip(world.log, world.answers, strict=True) if opens(answer, 2))
    assert isinstance(first, Received)
    assert first.message == RoundAbort(1, "not a number", "c")
    orders = [order for answer in world.answers for order in answer if isinstance(order, Send)]
    told = {order.to: order.message for order in orders if isinstance(order.message, RoundAbort)}
    assert told == dict.fromkeys("abc", RoundAbort(1, "a: not a number", "c"))


def test_the_silent_are_left_out_at_the_hubs_deadline():
    world = clusters_of(3)
    script(
        world,
        lambda world, name, order: (
            None if name == "c" and not order.left_out else (0.7, world.ready(name, order.round_id))
        ),
    )
    run_rounds(world, 2)
    assert attending(world, 2) == ["abc", "ab"]
    assert world.told(RoundEnded)[0].reason == "no vote before the deadline from c"


def test_those_left_when_one_dies_in_a_round_try_again_at_once():
    world = clusters_of(3, trouble=Trouble(detect_seconds=0.1))
    world.run_until(lambda: world.open_round)
    world.kill("b")
    run_rounds(world, 2)
    assert attending(world, 2) == ["abc", "ac"]
    assert outcomes(world) == [False, True]
    assert blamed(world) == []


def test_one_that_dies_while_it_is_heard_is_not_blamed():
    world = clusters_of(4, trouble=Trouble(detect_seconds=0.1))
    script(world, late("b"))
    world.run_until(lambda: isinstance(getattr(world.log[-1], "message", None), RoundAbort))
    assert world.told(RoundEnded) == []
    world.kill("b")
    run_rounds(world, 2)
    assert attending(world, 2) == ["abcd", "acd"]
    assert blamed(world) == []


def test_a_deadline_grows_when_nobody_keeps_it_and_only_so_far():
    world = clusters_of(2, num_samples=8000)
    script(world, lambda *_: None)
    run_rounds(world, 5)
    seconds = [order.deadline_seconds for order, _ in opened(world)][:5]
    assert seconds == pytest.approx([seconds[0] * each for each in (1, 2, 4, 4, 4)])
    script(world, world.__class__.usual_vote)
    run_rounds(world, 7)
    assert opened(world)[-1][0].deadline_seconds == pytest.approx(seconds[0], rel=0.5)


# What is averaged.


def test_owners_that_hold_different_averages_are_named_and_the_fewer_left_out():
    world = clusters_of(3)
    script(
        world,
        lambda world, name, order: (
            0.7,
            world.ready(name, order.round_id, is_wrong=name == "b" and order.round_id == 1),
        ),
    )
    run_rounds(world, 3)
    assert attending(world, 3) == ["abc", "ac", "abc"]
    assert outcomes(world) == [False, True, True]
    reason = world.told(RoundEnded)[0].reason
    assert reason.startswith("the owners of segment 0 hold different averages (")
    for name in "abc":
        assert name in reason.partition("(")[2]
    assert {message.round_id for message in sent_commits(world)} == {2, 3}


def sent_commits(world):
    orders = [order for answer in world.answers for order in answer if isinstance(order, Send)]
    return [order.message for order in orders if isinstance(order.message, RoundCommit)]


def test_two_that_differ_are_both_named_and_neither_is_believed():
    world = clusters_of(2)
    script(world, lambda world, name, order: (0.7, world.ready(name, order.round_id, is_wrong=name == "b")))
    run_rounds(world, 1)
    assert outcomes(world) == [False]
    assert [name for name, _ in blamed(world)] == ["A", "B"]


def test_changes_are_since_the_newest_average_that_somebody_has():
    world = clusters_of(3, trouble=Trouble(detect_seconds=0.1))
    run_rounds(world, 1)
    script(world, late("c"))
    run_rounds(world, 3)
    assert attending(world, 3) == ["abc", "abc", "ab"]
    script(world, world.__class__.usual_vote)
    run_rounds(world, 4)
    assert [order.anchor_round for order, _ in opened(world)][:4] == [0, 1, 1, 3]
    world.kill("a")  # with an average that b and c have too
    world.run_until(lambda: attending(world)[-1] == "bc")
    committed = [news.round_id for news in world.told(RoundEnded) if news.is_committed]
    assert opened(world)[-1][0].anchor_round == committed[-1]


def test_an_average_that_died_with_who_had_it_is_no_base():
    world = clusters_of(4, trouble=Trouble(detect_seconds=0.1))
    run_rounds(world, 1)
    script(world, late("c", "d"))
    run_rounds(world, 4)  # of all, without c, without d
    assert attending(world, 4) == ["abcd", "abcd", "abd", "ab"]
    assert outcomes(world) == [True, False, False, True]
    script(world, world.__class__.usual_vote)
    world.kill("a")
    world.kill("b")
    world.run_until(lambda: attending(world)[-1] == "cd")
    assert opened(world)[-1][0].anchor_round == 1


def test_a_new_plan_begins_from_the_first_weights():
    world = clusters_of(2, trouble=Trouble(detect_seconds=0.1))
    run_rounds(world, 2)
    world.kill("a")
    world.kill("b")
    world.run_until(lambda: not world.hub.clusters)
    world.join("x", "y", memory_mb=1000.0)
    num_before = len(opened(world))
    run_rounds(world, num_before + 1)
    order, names = opened(world)[num_before]
    assert (order.anchor_round, names) == (0, "xy")


def test_the_result_is_of_a_cluster_that_was_in_the_last_average():
    world = clusters_of(3, num_samples=160)
    script(world, late("a"))
    world.run()
    assert world.is_finished
    assert attending(world)[-2:] == ["abc", "bc"]  # all are asked once more at the end
    assert outcomes(world)[-2:] == [False, True]
    assert {part.node for part in world.finish.parts} < {"b", "c"}


def test_at_the_end_all_are_asked_once_more_however_late_they_were():
    world = clusters_of(3)
    script(world, late("b"))
    world.run_until(lambda: ("B", 4) in blamed(world))
    script(world, world.__class__.usual_vote)
    world.stop()
    world.run_until(lambda: opened(world)[-1][0].is_final)
    assert attending(world)[-2:] == ["ac", "abc"]


# When they come.


def distances(world):
    """Updates of all clusters between the openings of rounds."""
    found, num_updates = [], 0
    for event, answer in world.happened:
        if isinstance(event, Received) and hasattr(event.message, "lag"):
            num_updates += 1
        if any(isinstance(each, Send) and isinstance(each.message, RoundOpen) for each in answer):
            found.append(num_updates)
    return [after - before for before, after in zip([0, *found], found, strict=False)]


@pytest.mark.parametrize("average_every", [1, 3, 8])
def test_so_many_batches_of_each_cluster_lie_between_rounds_whatever_a_lease_holds(average_every):
    world = clusters_of(2, average_every=average_every, chunk_batches=8)
    run_rounds(world, 6)
    # Two clusters report each 0.3 s, and a round takes 0.7 s.
    least = {4, 5, 6} if average_every == 1 else {2 * average_every}
    assert set(distances(world)[1:6]) <= least


def test_as_often_as_they_fit_but_not_for_less_than_five_batches():
    world = clusters_of(2, average_every=None)
    run_rounds(world, 4)
    assert distances(world)[:4] == [10] * 4
    script(world, lambda world, name, order: (6.0, world.ready(name, order.round_id)))
    run_rounds(world, 12)
    assert set(distances(world)[8:]) <= {38, 40, 42}  # 6 s at 0.3 s a batch, two clusters


def test_the_forecast_says_when_the_first_may_come():
    world = HubWorld(long_job(average_every=None), planner=PLANNER)
    world.join(*"ab", memory_mb=1000.0)
    world.run_until(lambda: world.told(PlanFormed))
    foresee(world, 12.0)
    world.run_until(lambda: all(each.is_running for each in world.hub.clusters))
    started_at = world.now
    world.run_until(lambda: world.open_round)
    assert 12.0 <= world.now - started_at <= 12.5
    assert opened(world)[0][0].deadline_seconds == 10.0 + 4 * 12.0


@pytest.mark.parametrize("updates_between", [5, 12])
def test_blocking_rounds_come_as_often_as_the_plan_foresaw(updates_between):
    given = long_job(average_every=None)
    config = replace(given.config, averaging=Averaging.BLOCKING, averaging_share=0.001)
    world = clusters_of(2, given=replace(given, config=config))
    world.hub.placement.sharing = replace(world.hub.placement.sharing, updates_between=updates_between)
    run_rounds(world, 1)
    before = world.hub.ledger.num_updates
    world.run_until(lambda: world.open_round)
    assert updates_between <= (world.hub.ledger.num_updates - before) / 2 < updates_between + 2


def test_what_people_are_told():
    assert show_notice(RoundEnded(3, True, False, "", 1.25)) == "round 3 committed in 1.25 s"
    assert show_notice(RoundEnded(3, True, True, "", 1.25, ("C",))) == "round 3 without C committed in 1.25 s"
    assert show_notice(RoundEnded(3, False, False, "b: died", 1.0)) == "round 3 aborted: b: died"
    late = RoundEnded(3, False, False, "b: late", 1.0, ("C",), (("B", 1), ("D", 4)))
    told = "round 3 without C aborted: b: late; B is left out of the next 1; D is left out of the next 4"
    assert show_notice(late) == told


def test_a_late_suspicion_of_another_round_or_a_stranger_changes_nothing():
    world = clusters_of(3)
    run_rounds(world, 1)
    for sender, message in (("a", RoundAbort(1, "late", "b")), ("a", RoundAbort(9, "late", "b"))):
        (refusal,) = world.feed(Received(sender, message, world.now))
        assert "which is not open" in refusal.reason
    assert blamed(world) == []
    world.join("z", memory_mb=1000.0)
    world.run_until(lambda: "z" in world.peers and world.open_round)
    (refusal,) = world.feed(Received("z", RoundAbort(world.open_round, "late", "b"), world.now))
    assert "z is no member of round 2" in refusal.reason
    world.feed(Received("a", RoundAbort(2, "late", "z"), world.now))  # whoever that is
    assert [name for name, _ in blamed(world)] == [cluster_of(world, "a").name]
    assert not isinstance(world.answers[-1][0], StageParts)
