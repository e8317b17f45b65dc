"""The hub's life with scripted peers: what it orders, whom it refuses, and that its books balance."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from support.hub_world import HubWorld, Trouble, blob, check_replay, job
from support.plan_world import even_model, node
from support.watched_world import WatchedWorld

from ravnest.config import Averaging
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import (
    Abandon,
    CheckpointAsked,
    Collect,
    Collected,
    Finish,
    MakeParts,
    Notify,
    PartsMade,
    PauseAsked,
    PeerJoined,
    PeerLeft,
    Received,
    Send,
    SendFields,
    Stopped,
    Tick,
)
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import (
    Checkpointed,
    CheckpointIsResult,
    ClusterBroken,
    ClusterDissolved,
    ClusterStarted,
    EpochDone,
    Evaluated,
    FromCheckpoint,
    Joined,
    Left,
    MicrobatchDropped,
    NotCheckpointed,
    NotEvaluated,
    PlanFormed,
    Recovered,
    Repaired,
    RoundEnded,
    Stopping,
    Waiting,
    WorkLost,
)
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.hub.coordinator.planner import lease_batches
from ravnest.ids import HUB
from ravnest.plan.profiles import builtin_profile
from ravnest.plan.types import Cluster, Plan, Stage
from ravnest.protocol import messages
from ravnest.protocol.averaging import RoundAbort, RoundCommit, RoundOpen, RoundQuery, RoundReady
from ravnest.protocol.membership import Leave, Stop
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import (
    Contact,
    PlanOrder,
    RingOrder,
    SnapshotMade,
    SnapshotOrder,
    StageMissing,
    StageParts,
    StageReady,
)
from ravnest.protocol.training import (
    Activation,
    DroppedMicrobatch,
    LearningRate,
    LeaseDone,
    LeaseGrant,
    Pace,
    StepReport,
)


def one_cluster(**changes):
    world = HubWorld(job(**changes))
    world.join(*"abc")
    return world


def two_clusters(trouble=None, **changes):
    """Three stages and two."""
    world = HubWorld(job(**changes), trouble)
    world.join(*"abcde", memory_mb=300.0)
    return world


def sent(world, kind, to=None):
    orders = [order for answer in world.answers for order in answer if isinstance(order, Send)]
    return [x.message for x in orders if isinstance(x.message, kind) and to in (None, x.to)]


def orders_of(world, kind):
    return [order for answer in world.answers for order in answer if isinstance(order, kind)]


def cluster(world, name):
    return next(each for each in world.hub.clusters if each.name == name)


def finishes(world):
    world.run()
    assert world.is_finished, world.news
    assert world.finish is not None
    check_replay(world)
    return world


# A run without trouble.


def test_one_cluster_of_three_stages_finishes_and_its_books_balance():
    world = finishes(one_cluster())
    assert [news.epoch for news in world.told(EpochDone)] == [1, 2]
    assert [(news.epoch, news.num_samples) for news in world.told(Evaluated)] == [(1, 23), (2, 23)]
    assert world.refusals == []
    assert [(part.start, part.stop) for part in world.finish.parts] == [(0, 2), (2, 4), (4, 6)]
    assert all(part.weights == blob(part.node, 1) for part in world.finish.parts)
    assert world.finish.history == tuple(x for x in world.news if isinstance(x, EpochDone | Evaluated))
    assert {order.to for order in world.answers[-1] if isinstance(order, Send)} == set("abc")
    assert all(isinstance(x.message, Stop) for x in world.answers[-1] if isinstance(x, Send))
    assert sent(world, RoundOpen) == []


def test_members_are_told_their_stage_their_neighbours_and_their_rings():
    world = finishes(two_clusters())
    plan = world.told(PlanFormed)[0].plan
    assert [len(each.stages) for each in plan.clusters] == [3, 2]
    for each in plan.clusters:
        names = tuple(stage.node for stage in each.stages)
        for stage in each.stages:
            (order,) = sent(world, PlanOrder, stage.node)
            assert (order.build_id, order.stage, order.pipeline) == (1, stage, names)
            assert [ring for _, ring in order.rings] == [r for r in plan.rings if stage.node in r.owners]
            assert all(plan.rings[segment] == ring for segment, ring in order.rings)
            mates = {*names, *(name for _, ring in order.rings for name in ring.owners)} - {stage.node}
            assert set(order.contacts) == {Contact(x, f"key of {x}", (f"tcp://{x}",)) for x in mates}


def test_parts_are_made_once_for_each_interval_and_delivered_to_every_stage_of_it():
    world = finishes(two_clusters())
    plan = world.told(PlanFormed)[0].plan
    stages = {(stage.start, stage.stop) for each in plan.clusters for stage in each.stages}
    segments = {(ring.start, ring.stop) for ring in plan.rings}
    made = [(order.start, order.stop, order.has_weights) for order in orders_of(world, MakeParts)]
    assert sorted(made) == sorted((*each, each in segments) for each in stages | segments)
    given = Counter()
    for stage in (stage for each in plan.clusters for stage in each.stages):
        (parts,) = sent(world, StageParts, stage.node)
        bare = StageParts(1, 0, blob((stage.start, stage.stop)), (), is_kept=False, anchor_round=0)
        assert replace(parts, sources=()) == bare
        rings = [ring for ring in plan.rings if stage.node in ring.owners]
        weights = [blob(("hub", ring.start, ring.stop)) for ring in rings]
        assert [(source.node, source.weights) for source in parts.sources] == [(HUB, x) for x in weights]
        for ring, source in zip(rings, parts.sources, strict=True):
            assert set(source.others) <= {*ring.owners} - {stage.node}
            given[ring] += not source.others
    assert given == dict.fromkeys(plan.rings, 1), "each segment leaves the hub once"


def test_a_lease_names_batches_and_their_samples_travel_to_who_consumes_them():
    world = finishes(one_cluster())
    root, leaf = world.told(ClusterStarted)[0].nodes[::2]
    grants, fields = sent(world, LeaseGrant, root), orders_of(world, SendFields)
    assert [grant.lease for grant in grants] == [each.lease for each in fields]
    for grant, each in zip(grants, fields, strict=True):
        assert tuple(map(len, each.samples)) == grant.num_samples
        assert (grant.first_microbatch, grant.is_evaluation) == (each.first_microbatch, each.is_evaluation)
        assert [name for name, _ in each.consumers] == [root, leaf]
    evaluated = [index for each in fields[-3:] for batch in each.samples for index in batch]
    assert evaluated == list(range(23))
    assert grants[0].num_samples == (4, 4)


def test_a_lone_cluster_evaluates_an_epoch_before_it_begins_the_next():
    world = one_cluster()
    world.run_until(lambda: world.told(Evaluated))
    assert len(world.ledger) == 50
    assert {epoch for epoch, _ in world.ledger} == {0}
    evaluated = world.told(Evaluated)[0]
    assert evaluated.metrics == (("acc", 0.5),)
    sizes = [4, 4, 4, 4, 4, 3]
    expected = sum(batch * size for batch, size in enumerate(sizes, start=13)) / 23
    assert evaluated.loss == pytest.approx(expected)


def test_evaluation_only_at_the_end_or_never():
    assert [x.epoch for x in finishes(one_cluster(evaluate_every=0)).told(Evaluated)] == [2]
    assert [x.epoch for x in finishes(one_cluster(evaluate_every=2, epochs=5)).told(Evaluated)] == [2, 4, 5]
    assert finishes(one_cluster(num_validation=0)).told(Evaluated) == []


@pytest.mark.parametrize("every", [1, 3, 5])
def test_a_lone_cluster_is_evaluated_after_exactly_so_many_updates(every):
    world = one_cluster(evaluate_updates=every)
    marks, trained = [], []

    def look():
        told = world.told(Evaluated)
        if len(told) > len(marks):
            marks.append(told[-1].num_updates)
            trained.append(len(world.ledger))
        return world.is_finished

    world.run_until(look)
    finishes(world)
    settings = world.hub.ledger.settings
    expected = [*range(every, settings.num_batches, every), settings.num_batches]
    assert marks == expected
    assert trained == [settings.samples_of(mark) for mark in marks]
    told = [news for news in world.news if isinstance(news, Evaluated | EpochDone)]
    places = [(news.epoch, getattr(news, "num_updates", 0)) for news in told]
    assert places == sorted(places)


def test_two_clusters_average_as_they_train_and_once_more_at_the_end():
    world = finishes(two_clusters(epochs=4))
    rounds = world.told(RoundEnded)
    assert len(rounds) > 2
    assert all(ended.is_committed for ended in rounds)
    assert [ended.is_final for ended in rounds] == [False] * (len(rounds) - 1) + [True]
    opened = sent(world, RoundOpen, "a")
    assert [each.is_blocking for each in opened] == [ended.is_final for ended in rounds]
    assert all(each.left_out == () and each.deadline_seconds >= 10 for each in opened)
    assert len(sent(world, RoundCommit)) == 5 * len(rounds)


def test_blocking_rounds_when_the_config_says_so_and_their_distance_from_the_forecast():
    given = job(average_every=None, epochs=8)
    given = replace(given, config=replace(given.config, averaging=Averaging.BLOCKING))
    world = HubWorld(given)
    world.join(*"abcde", memory_mb=300.0)
    finishes(world)
    opened = sent(world, RoundOpen, "a")
    assert all(each.is_blocking for each in opened)
    num_batches = 8 * 13 / 2
    assert 2 <= len(opened) <= num_batches / 8 + 1


@pytest.mark.parametrize("seconds", [math.inf, -3.0])
def test_rounds_on_links_that_training_fills_are_rare_and_have_a_deadline(seconds):
    world = two_clusters(average_every=None)
    world.run_until(lambda: world.told(PlanFormed))
    world.hub.placement._outline = replace(world.hub.placement.outline, round_seconds=seconds)
    world.run()
    assert world.is_finished
    assert [each.deadline_seconds for each in sent(world, RoundOpen, "a")] == [600.0]


# Learning rates.


def test_a_constant_rate_is_told_once_to_each_stage():
    world = finishes(one_cluster())
    assert world.rates == {"a": 1, "b": 1, "c": 1}
    assert sent(world, LearningRate, "a") == [LearningRate(1, 0, 0.1)]


@pytest.mark.parametrize(("memory_mb", "nodes", "microbatches"), [(1000.0, "a", 1), (150.0, "abc", 4)])
def test_rates_are_told_ahead_of_their_updates(memory_mb, nodes, microbatches):
    rates = tuple(0.1 / (1 + batch) for batch in range(24))
    world = HubWorld(job(rates=rates, num_samples=192, batch_size=16, evaluate_every=0))
    world.join(*nodes, memory_mb=memory_mb)
    world.run_until(lambda: world.told(PlanFormed))
    assert world.told(PlanFormed)[0].microbatches == microbatches
    finishes(world)
    told = {message.update: message.rate for message in sent(world, LearningRate, "a")}
    assert [told[update] for update in range(24)] == list(rates)
    assert len(told) == len(sent(world, LearningRate, "a"))


def test_rates_reach_their_end_although_every_epoch_ends_with_a_short_batch():
    rates = tuple(float(batch) for batch in range(1, 41))
    world = finishes(one_cluster(rates=rates, num_samples=50, batch_size=16, epochs=10, microbatches=4))
    told = {message.update: message.rate for message in sent(world, LearningRate, "a")}
    (updates,) = world.updates.values()  # fewer than batches: those of 2 samples make half an update each
    assert len(updates) == 35
    for update in range(35):
        rate = told[max(each for each in told if each <= update)]
        assert rate == pytest.approx(1 + update * 40 / 35, abs=4)


def test_few_rates_are_spread_over_the_run():
    settings = job(num_samples=10, epochs=2, rates=(3.0, 2.0, 1.0)).settings
    assert [settings.rate(batch) for batch in range(8)] == [3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]


# Microbatches.


def test_a_batch_travels_as_microbatches_and_makes_one_update():
    world = finishes(one_cluster(num_samples=160, batch_size=16))
    formed = world.told(PlanFormed)[0]
    assert (formed.batch_size, formed.microbatches) == (16, 4)
    (plan_order,) = sent(world, PlanOrder, "a")
    assert plan_order.accumulate == 4
    (updates,) = world.updates.values()
    assert list(updates.values()) == [[4, 4, 4, 4]] * 20
    assert show_notice(formed).endswith(
        f"; 16 samples per update in 4 microbatches; {formed.samples_per_second:.3g} samples/s predicted"
    )
    toy = replace(formed, samples_per_second=1_999.0)  # 4 samples in the 2 ms that a stage takes at least
    assert show_notice(toy).endswith("; at most 1,999 samples/s predicted")


def test_all_clusters_cut_a_batch_alike():
    world = finishes(two_clusters(num_samples=480, batch_size=24))
    formed = world.told(PlanFormed)[0]
    assert [len(each.stages) for each in formed.plan.clusters] == [3, 2]
    assert {each.accumulate for each in formed.plan.clusters} == {formed.microbatches}
    assert formed.microbatches > 1
    assert len(world.updates) == 2
    for updates in world.updates.values():
        assert all(sum(sizes) == 24 and len(sizes) == formed.microbatches for sizes in updates.values())


@pytest.mark.parametrize(("asked", "sizes"), [(4, [4, 4, 4, 4]), (100, [1] * 16), (1, [16])])
def test_a_job_may_say_how_many_microbatches(asked, sizes):
    world = finishes(one_cluster(num_samples=160, batch_size=16, microbatches=asked))
    (updates,) = world.updates.values()
    assert list(updates.values()) == [sizes] * 20


@pytest.mark.parametrize(("batch_size", "least"), [(1, 1), (3, 3), (4, 4), (7, 7), (8, 4), (11, 5), (12, 4)])
def test_microbatches_keep_four_samples_where_a_batch_has_so_many(batch_size, least):
    world = finishes(one_cluster(num_samples=5 * batch_size, batch_size=batch_size))
    (updates,) = world.updates.values()
    assert all(min(sizes) == least for sizes in updates.values())


def test_windows_are_narrowed_where_a_batch_cannot_be_cut_so_often():
    world = finishes(one_cluster(batch_size=4))
    (cluster,) = world.told(PlanFormed)[0].plan.clusters
    assert [stage.window for stage in cluster.stages] == [3, 3, 1]  # two updates of lag, as allowed


def test_a_batch_too_large_for_the_memory_is_cut_until_it_fits():
    given = job(num_samples=160, batch_size=16, expected_nodes=3)
    given = replace(given, profile=even_model(6, saved_mb=10.0))  # of 10 samples
    world = HubWorld(given)
    world.join(*"abc")
    world.run(until=0.0)
    assert world.told(PlanFormed)[0].microbatches == 4


def test_a_lease_lists_no_more_microbatches_than_a_message_may():
    given = job(num_samples=4096, batch_size=512, chunk_batches=8, microbatches=300)
    world = HubWorld(given, make_node=partial(node, gflops=1e5))  # so fast that a lease may be large
    world.join(*"abc")
    world.run_until(lambda: sent(world, LeaseGrant))
    assert {len(grant.num_samples) for grant in sent(world, LeaseGrant)} == {600}
    longest = LeaseGrant(2**40, 2**40, True, 2**60, (2**40,) * 1024)
    assert len(messages.pack(longest)) <= messages.MOST_HEADER_BYTES


@pytest.mark.parametrize(
    ("input_bytes", "window", "microbatches", "expected"),
    [
        (100, 1, 1, 8),  # small samples: as many as one asks for
        (1e6, 1, 4, 1),  # large ones: as few as keep the root busy
        (1e6, 7, 4, 4),
        (1e6, 400, 1, 8),
        (100, 1, 200, 5),  # what a message may list
    ],
)
def test_a_lease_is_as_short_as_keeps_the_root_busy(input_bytes, window, microbatches, expected):
    given = job(batch_size=512, chunk_batches=8)
    profile = given.profile.resize_batch(512)
    inputs = (float(input_bytes), *profile.crossing_bytes[1:])
    given = replace(given, profile=replace(profile, crossing_bytes=inputs))
    plan = Plan(1, 0, (Cluster((Stage("a", 0, 6, window),), microbatches),), (), ())
    assert lease_batches(given, plan, microbatches) == expected


def test_the_profile_of_a_smaller_batch_is_that_of_the_model_with_it():
    assert builtin_profile("gpt2", 8).resize_batch(2) == builtin_profile("gpt2", 2)


def test_rounds_are_so_many_whole_batches_apart():
    settings = {"num_samples": 192, "batch_size": 16, "average_every": 4, "epochs": 4, "chunk_batches": 1}
    one, many = (finishes(two_clusters(**settings, microbatches=each)) for each in (1, 4))
    assert len(one.told(RoundEnded)) == len(many.told(RoundEnded)) > 3


# Coming together.


def test_too_few_nodes_wait_and_are_told_what_is_short():
    world = HubWorld()
    world.join("a", "b", memory_mb=50.0)
    world.run()
    (waiting,) = world.told(Waiting)
    assert waiting.reason.startswith("even needs 184 MB in one cluster; 2 nodes offer 100 MB; add 1 node")
    assert world.hub.phase is JobPhase.COLLECTING
    world.join("c", memory_mb=150.0)
    finishes(world)


def test_the_plan_is_formed_when_nobody_came_for_a_while():
    world = HubWorld()
    for moment, name in enumerate("abc"):
        world.join(name, at=4.0 * moment)
    world.run(until=12.9)
    assert world.told(PlanFormed) == []
    world.run(until=13.1)
    assert len(world.told(PlanFormed)) == 1


def test_the_plan_is_formed_at_once_when_all_who_are_expected_came():
    world = HubWorld(job(expected_nodes=3))
    world.join(*"abc")
    world.run(until=0.0)
    assert world.told(PlanFormed)[0].samples_per_second > 0


def test_who_comes_later_is_a_spare():
    world = one_cluster()
    world.run_until(lambda: world.told(EpochDone))
    world.join("late")
    finishes(world)
    (repaired,) = world.told(Repaired)
    assert repaired.reason.startswith("late joined: it is a spare and backs up a;")
    contact = Contact("a", "key of a", ("tcp://a",))
    first, second = sent(world, PlanOrder, "late")
    assert first == PlanOrder(1, 1, 0, None, (), (), ())
    assert second == PlanOrder(2, 1, 0, None, (), (), (contact,))
    assert len(sent(world, StageParts)) == 3, "nobody else is disturbed"
    (met,) = sent(world, RingOrder)
    assert (met.plan_id, met.rings) == (1, ())
    assert "late" in {each.node for each in met.contacts}


# Deaths.


def test_a_death_while_forming_makes_a_new_plan_of_the_others():
    world = one_cluster()
    world.join("d")
    world.run_until(lambda: world.told(PlanFormed))
    world.feed(PeerLeft(world.hub.clusters[0].root, "gone", world.now))
    finishes(world)
    (formed,), (repaired,) = world.told(PlanFormed), world.told(Repaired)
    assert repaired.plan.plan_id > formed.plan.plan_id
    assert world.told(WorkLost) == []
    assert world.told(Recovered) == [], "it had not begun"


def test_the_other_cluster_trains_what_a_dead_one_had():
    world = two_clusters()
    world.run_until(lambda: len(world.ledger) > 20)
    dead, *healthy = cluster(world, "A").nodes
    world.kill(dead)
    finishes(world)
    (broken,) = world.told(ClusterBroken)
    assert broken.cluster == "A"
    assert broken.reason == f"{dead}: silent"
    assert broken.num_given_back > 0
    assert world.told(WorkLost) == []
    for name in healthy:  # they have room for its stage
        orders = sent(world, PlanOrder, name)
        assert [order.build_id for order in orders] == [1, 2]
        assert orders[1].pipeline == tuple(healthy)
    (recovered,) = world.told(Recovered)
    assert recovered.cluster == "A"
    assert recovered.sources, "somebody gave what the dead one had"
    assert set(recovered.sources) <= {*"abcde"} - {dead}


def test_a_dissolved_cluster_states_what_only_it_knew():
    world = two_clusters(average_every=1000)
    world.run_until(lambda: len(world.ledger) > 20)
    root, middle, _ = cluster(world, "A").nodes
    world.kill(root)
    world.kill(middle)  # one node cannot go on alone
    finishes(world)
    assert 0 < world.told(ClusterDissolved)[0].num_lost < 50


def test_a_death_in_a_round_aborts_it_for_all_and_three_clusters_become_two():
    world = HubWorld(job(epochs=4), Trouble(detect_seconds=0.1))
    world.join(*"abcdefgh", memory_mb=260.0)
    world.run_until(lambda: world.open_round is not None)
    clusters = world.hub.clusters
    world.kill(clusters[0].leaf)
    finishes(world)
    first, *others = world.told(RoundEnded)
    assert not first.is_committed
    assert first.reason == f"{clusters[0].leaf}: silent"
    assert {x.round_id for x in sent(world, RoundAbort)} == {1}
    num_nodes = sum(len(each.nodes) for each in clusters)
    assert len(sent(world, RoundAbort)) == num_nodes - 1  # all but the dead one
    assert all(ended.is_committed for ended in others)
    later = [x for x in sent(world, RoundOpen) if x.round_id > 1]
    assert not any(clusters[0].leaf in x.left_out for x in later), "it is in no ring"
    assert later[-1].left_out == ()


@pytest.mark.parametrize("phase", [JobPhase.AVERAGING, JobPhase.EVALUATING, JobPhase.KEEPING])
def test_a_death_at_the_end_leaves_the_rest_to_another_cluster(phase):
    world = two_clusters(Trouble(detect_seconds=0.1))
    world.run_until(lambda: world.hub.phase is phase)
    evaluating = {lease.cluster_id for lease in world.open_leases}
    kept = sent(world, SnapshotOrder)
    busy = next(
        each
        for each in world.hub.clusters
        if each.cluster_id in evaluating
        or sent(world, SnapshotOrder, each.root)
        or phase is JobPhase.AVERAGING
    )
    world.kill(busy.leaf)
    finishes(world)
    assert world.told(Evaluated)[-1].num_samples == 23
    assert {part.node for part in world.finish.parts}.isdisjoint(busy.nodes)
    assert bool(kept) == (phase is JobPhase.KEEPING)
    assert world.told(RoundEnded)[-1].is_committed == (phase is not JobPhase.AVERAGING)


def test_a_death_after_the_snapshot_and_before_it_is_collected():
    world = two_clusters(Trouble(latency=1.0, detect_seconds=0.0))
    world.run_until(lambda: orders_of(world, Collect))
    world.kill(orders_of(world, Collect)[0].parts[0].node)
    finishes(world)
    assert all(order.is_result for order in orders_of(world, Collect))


def test_a_result_on_disk_counts_although_its_cluster_died_meanwhile():
    world = two_clusters()
    world.is_collecting = False
    world.run_until(lambda: orders_of(world, Collect))
    first = orders_of(world, Collect)[0]
    world.feed(PeerLeft(first.parts[0].node, "gone", world.now))
    world.run_until(lambda: len(orders_of(world, Collect)) == 2)
    world.feed(Collected(1, world.now))
    finishes(world)
    assert world.finish.parts == first.parts
    (refusal,) = world.feed(Collected(2, world.now))
    assert refusal.reason == "nobody asked to collect number 2"


def test_a_result_on_disk_counts_although_everybody_has_left():
    world = two_clusters()
    world.is_collecting = False
    world.run_until(lambda: orders_of(world, Collect))
    for name in [*world.known]:
        world.feed(PeerLeft(name, "gone", world.now))
    assert world.hub.phase is JobPhase.COLLECTING
    world.feed(Collected(1, world.now))
    assert world.is_finished
    assert world.finish.parts == orders_of(world, Collect)[0].parts


def test_peers_are_told_the_end_when_the_result_is_on_disk_and_not_before():
    world = two_clusters()
    world.is_collecting = False
    world.run_until(lambda: orders_of(world, Collect))
    world.run(until=world.now + 60.0)
    assert world.hub.phase is JobPhase.KEEPING
    assert [order for order in orders_of(world, Send) if isinstance(order.message, Stop)] == []
    stops = [each.to for each in world.feed(Collected(1, world.now)) if isinstance(each, Send)]
    assert set(stops) == world.known


def test_when_the_last_cluster_dies_training_begins_again_with_who_is_left():
    world = HubWorld()
    world.join(*"abc", memory_mb=100.0)
    world.run_until(lambda: world.told(EpochDone))
    world.kill("a")
    world.kill("b")
    world.run()
    (lost,) = world.told(WorkLost)
    assert lost.num_samples >= 50
    assert world.hub.phase is JobPhase.COLLECTING
    assert world.open_leases == ()
    world.join("z", memory_mb=150.0)
    finishes(world)
    assert [news.epoch for news in world.finish.history if isinstance(news, EpochDone)] == [1, 2]


def test_training_that_began_again_ends_with_a_last_round_of_its_own():
    world = two_clusters(Trouble(detect_seconds=0.1), average_every=1000, num_validation=100)
    world.run_until(lambda: world.hub.phase is JobPhase.EVALUATING)
    for each in world.hub.clusters:
        world.kill(each.root)
    world.join("x", "y", memory_mb=250.0)
    finishes(world)
    assert len(world.told(WorkLost)) == 1
    assert [(ended.is_final, ended.is_committed) for ended in world.told(RoundEnded)] == [(True, True)] * 2


def test_work_is_lost_when_only_a_cluster_that_has_trained_nothing_is_left():
    world = two_clusters(average_every=1000)
    world.run_until(lambda: world.told(PlanFormed))
    started, other = cluster(world, "A"), cluster(world, "B")
    world.muted = {other.leaf}
    world.run_until(lambda: len(world.ledger) > 10)
    world.muted = set()
    world.say(other.leaf, StageReady(1))
    world.run_until(lambda: len(world.told(ClusterStarted)) == 2)
    for name in started.nodes:
        world.feed(PeerLeft(name, "gone", world.now))
    world.run_until(lambda: world.told(Repaired))
    assert len(world.told(WorkLost)) == 1
    world.join(started.root, memory_mb=250.0)
    finishes(world)


def test_a_polite_leave_and_a_return_under_the_same_name():
    world = two_clusters()
    world.run_until(lambda: len(world.ledger) > 10)
    world.feed(Received("a", Leave(1, "Ctrl-C"), world.now))
    assert world.told(Left)[-1] == Left("a", "Ctrl-C")
    world.known.discard("a")
    world.join("a", "b", memory_mb=250.0)  # b was never noticed to be gone
    finishes(world)
    assert world.told(Left)[-1] == Left("b", "it came back as new")
    assert [news.node for news in world.told(Joined)] == [*"abcde", "a", "b"]


def test_a_finished_hub_sends_newcomers_home():
    world = finishes(one_cluster())
    orders = world.hub.apply(PeerJoined(node("late"), "key", (), world.now))
    assert orders == (Notify(Joined("late")), Send("late", Stop("the job is done")))
    assert world.hub.apply(PeerLeft("a", "done", world.now)) == (Notify(Left("a", "done")),)


# Rounds that do not come to an end by themselves.


def test_a_silent_member_ends_the_round_at_its_deadline_and_training_goes_on():
    world = two_clusters(Trouble(silent=1.0))
    finishes(world)
    ended = world.told(RoundEnded)
    assert not any(each.is_committed for each in ended)
    assert ended[0].reason.startswith("no vote before the deadline from ")
    assert [each.is_final for each in ended][-3:] == [True] * 3
    assert sum(each.is_final for each in ended) == 3


def test_a_member_that_gives_up_aborts_the_round():
    world = finishes(two_clusters(Trouble(gives_up=1.0)))
    assert {ended.reason[3:] for ended in world.told(RoundEnded)} == {"no room"}


def test_a_member_may_ask_what_became_of_a_round():
    world = finishes(two_clusters())
    answer = world.hub.apply(Received("a", RoundQuery(1, "a"), world.now))
    assert answer == (Send("a", RoundCommit(1)),)
    (refusal,) = world.hub.apply(Received("a", RoundQuery(99, "a"), world.now))
    assert "round 99" in refusal.reason


def test_a_cluster_that_gets_nowhere_in_the_last_evaluation_leaves_it_out_and_is_kept():
    world = HubWorld(job(epochs=1, num_validation=400))
    world.join(*"abc")
    world.run_until(lambda: len(world.ledger) > 10)
    world.stop()
    world.run_until(lambda: world.hub.phase is JobPhase.EVALUATING)
    for name in "abc":
        world.slow(name, 1e6)
    world.run()
    assert world.told(NotEvaluated)
    assert world.abandoned is None
    assert world.finish is not None


# Reports of epochs.


def two_of_unlike_pace(**changes):
    """Two clusters, of which one becomes so slow that the other ends an epoch before it."""
    world = two_clusters(average_every=1000, **changes)
    world.run_until(lambda: len(world.hub.clusters) == 2 and len(world.ledger) > 10)
    world.slow(world.hub.clusters[1].leaf, 30.0)
    return world


def epochs_told(world, kind):
    return [news.epoch for news in world.told(kind)]


def test_epochs_are_told_in_order_although_a_later_one_is_over_first():
    world = finishes(two_of_unlike_pace(num_validation=0, epochs=8))
    over = [epoch for epoch in range(8) if epoch in {key for key, _ in world.ledger}]
    assert epochs_told(world, EpochDone) == [each + 1 for each in over] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [news.epoch for news in world.finish.history] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_an_evaluation_is_told_after_its_epoch_and_all_before_it():
    world = finishes(two_of_unlike_pace(epochs=8))
    told = [news for news in world.news if isinstance(news, EpochDone | Evaluated)]
    for number, news in enumerate(told):
        over = {each.epoch for each in told[:number] if isinstance(each, EpochDone)}
        assert set(range(1, news.epoch + isinstance(news, Evaluated))) <= over
    assert told[-1] == world.told(Evaluated)[-1]
    assert told[-1].epoch == 8


def test_an_epoch_that_waits_for_an_earlier_one_is_told_when_a_stopped_job_ends():
    world = two_of_unlike_pace(num_validation=0, epochs=8)
    slow = world.hub.clusters[1]
    world.muted = {slow.root}
    world.run_until(lambda: max((epoch for epoch, _ in world.ledger), default=0) >= 3)
    assert epochs_told(world, EpochDone) == []
    world.stop()
    finishes(world)
    told = epochs_told(world, EpochDone)
    assert told == sorted(told)
    assert 3 in told
    assert 1 not in told


def test_a_checkpoint_between_two_epochs_loses_no_report():
    world = two_of_unlike_pace(num_validation=0, epochs=8)
    world.muted = {world.hub.clusters[1].root}
    world.run_until(lambda: max((epoch for epoch, _ in world.ledger), default=0) >= 3)
    again = HubWorld(replace(world.given, books=world.hub.ledger.books))
    again.join(*"abc")
    finishes(again)
    assert epochs_told(again, EpochDone) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert None in [news.loss for news in again.told(EpochDone)]


def test_what_was_evaluated_is_kept_before_it_is_trained_on_if_it_is_the_best():
    world = one_cluster(epochs=4, checkpoint_every=1e6)
    losses = iter([3.0, 1.0, 2.0, 0.5])
    scale = {}  # of the evaluation under way, by the epochs before it

    def loss(_):
        epoch = len(world.told(Evaluated))
        if epoch not in scale:
            scale[epoch] = next(losses)
        return scale[epoch]

    world.loss = loss
    finishes(world)
    kept = [order for order in orders_of(world, Collect) if not order.is_result]
    assert [(each.evaluated.epoch, each.evaluated.loss) for each in kept] == [(1, 3.0), (2, 1.0)]
    assert len(world.told(Checkpointed)) == 2
    for order in kept:
        number = next(index for index, each in enumerate(world.answers) if order in each)
        asked = next(
            index
            for index, each in enumerate(world.answers)
            if any(isinstance(x, Send) and x.message == SnapshotOrder(1, order.number, False) for x in each)
        )
        granted = [
            x
            for each in world.answers[asked:number]
            for x in each
            if isinstance(x, Send) and isinstance(x.message, LeaseGrant)
        ]
        assert asked < number
        assert granted == []


def test_a_cluster_that_writes_nothing_of_what_was_evaluated_trains_on():
    world = one_cluster(epochs=3, checkpoint_every=1e6)
    world.run_until(lambda: world.told(Evaluated))
    (leaf,) = {cluster.leaf for cluster in world.hub.clusters}
    world.muted = {leaf}
    world.run(until=world.now + 5.0)
    assert world.open_leases == ()
    world.run_until(lambda: world.told(NotCheckpointed))
    assert world.open_leases
    assert world.now < 200.0
    world.muted = set()


def test_a_checkpoint_is_made_when_somebody_asks_for_one():
    world = one_cluster(epochs=6, checkpoint_every=None)
    world.run_until(lambda: world.hub.ledger.num_counted > 0)
    num_told = len(world.news)
    asked = world.feed(CheckpointAsked(world.now))
    assert [type(each.message) for each in asked if isinstance(each, Send)].count(SnapshotOrder) == 3
    again = world.feed(CheckpointAsked(world.now))
    assert [each.notice for each in again if isinstance(each, Notify)] == [
        NotCheckpointed("one is under way already")
    ]
    world.run_until(lambda: any(isinstance(each, Checkpointed) for each in world.news[num_told:]))
    world.run()
    assert world.is_finished
    late = world.feed(CheckpointAsked(world.now))
    assert "nothing is trained now" in late[0].notice.reason


@pytest.mark.parametrize("ending", ["go on", "stop", "restart"])
def test_a_pause_lets_nodes_finish_and_wait_until_it_ends(ending):
    world = WatchedWorld(job(epochs=6))
    world.join(*"abcde", memory_mb=250.0)
    world.run_until(lambda: world.hub.ledger.num_counted > 0)
    world.feed(PauseAsked(True, world.now))
    world.run()  # nothing is due any more, not even a look for silent nodes
    counted = world.hub.ledger.num_counted
    assert counted < world.given.settings.num_total
    world.now += 600.0
    world.feed(Tick(world.now))
    assert (world.hub.ledger.num_counted, len(world.hub.clusters)) == (counted, 2)
    assert (world.document().is_paused, world.document().training.eta_seconds) == (True, None)
    match ending:
        case "go on":
            world.feed(PauseAsked(False, world.now))
        case "stop":
            world.feed(Stopped("enough", world.now))
        case "restart":
            world.restart()
    world.run()
    assert world.is_finished
    assert (world.hub.ledger.num_counted == world.given.settings.num_total) is (ending != "stop")


def test_nobody_trains_and_no_checkpoint_is_made():
    world = one_cluster(epochs=6)
    world.run_until(lambda: world.hub.ledger.num_counted > 0)
    world.feed(PeerLeft(world.hub.clusters[0].nodes[0], "it was unplugged", world.now))
    (told,) = [each.notice for each in world.feed(CheckpointAsked(world.now)) if isinstance(each, Notify)]
    assert "no cluster trains" in told.reason


def test_without_checkpoints_nothing_is_kept_of_an_evaluation():
    world = finishes(one_cluster(epochs=3))
    assert all(order.is_result for order in orders_of(world, Collect))


# Stopping.


def test_a_stopped_job_keeps_what_was_trained():
    world = two_clusters(epochs=10)
    world.run_until(lambda: len(world.ledger) > 60)
    assert world.stop("Ctrl-C") == (Notify(Stopping("Ctrl-C")),)
    open_leases = world.open_leases
    finishes(world)
    assert 60 < len(world.ledger) < 500
    assert len(world.ledger) > 60 + sum(sum(lease.num_samples) for lease in open_leases) / 2
    assert world.told(RoundEnded)[-1].is_final
    assert world.told(RoundEnded)[-1].is_committed
    evaluated = world.told(Evaluated)[-1]
    assert (evaluated.epoch, evaluated.num_samples) == (2, 23)
    assert world.finish.history[-1] == evaluated
    assert world.abandoned is None
    assert show_notice(Stopping("Ctrl-C")) == "the job is stopped (Ctrl-C); what was trained is kept"


def test_what_is_not_done_after_a_while_is_given_up():
    world = two_clusters(epochs=10, average_every=1000)
    world.run_until(lambda: len(world.ledger) > 20)
    world.muted = {each.root for each in world.hub.clusters}
    world.stop()
    stopped = world.now
    assert world.hub.due == stopped + 30.0
    world.run_until(lambda: not world.open_leases)
    assert world.now == stopped + 30.0
    world.muted, num_counted = set(), len(world.ledger)
    assert num_counted < 50
    finishes(world)
    assert len(world.ledger) == num_counted


def test_the_last_evaluation_of_a_stopped_job_is_done_again_by_another_cluster():
    world = two_clusters(Trouble(detect_seconds=0.1), epochs=10)
    world.run_until(lambda: len(world.ledger) > 20)
    world.stop()
    world.run_until(lambda: world.hub.phase is JobPhase.EVALUATING)
    holder = world.open_leases[0].cluster_id
    world.kill(next(each.leaf for each in world.hub.clusters if each.cluster_id == holder))
    finishes(world)
    assert [news.num_samples for news in world.told(Evaluated)] == [23]


def test_an_evaluation_under_way_is_given_up_with_the_rest():
    world = one_cluster(epochs=10, num_validation=400)
    world.run_until(lambda: any(lease.lease is None for lease in world.open_leases))
    world.muted = {world.hub.clusters[0].leaf}
    world.stop()
    world.run_until(lambda: world.hub.phase is JobPhase.EVALUATING)
    world.muted = set()
    finishes(world)
    assert [news.num_samples for news in world.told(Evaluated)] == [400]


def test_an_evaluation_not_yet_begun_is_not_waited_for():
    world = one_cluster(epochs=10)
    world.run_until(lambda: len(world.ledger) == 48)  # the rest of the epoch is under way
    world.stop()
    before = world.now
    finishes(world)
    assert world.now < before + 30
    assert [news.epoch for news in world.told(Evaluated)] == [1]


@pytest.mark.parametrize("until", [Joined, PlanFormed])
def test_a_job_stopped_before_anybody_trains_has_nothing_to_keep(until):
    world = one_cluster()
    world.run_until(lambda: len(world.told(until)) == {Joined: 3, PlanFormed: 1}[until])
    orders = world.stop()
    told = "the job was stopped when there was nothing to keep, no checkpoint either"
    assert orders[-1] == Abandon(told)
    assert {order.to for order in orders if isinstance(order, Send) and isinstance(order.message, Stop)} == {
        *"abc"
    }
    assert world.is_finished
    assert world.hub.due is None
    check_replay(world)


def test_when_the_last_cluster_dies_a_stopped_job_does_not_begin_again():
    world = one_cluster()
    world.run_until(lambda: len(world.ledger) > 10)
    world.stop()
    world.kill("a")
    world.run()
    assert world.abandoned is not None
    assert world.told(WorkLost) == []
    assert world.hub.phase is JobPhase.FINISHED


def test_a_job_stopped_when_nobody_is_left_ends_with_its_last_checkpoint():
    world = one_cluster(checkpoint_every=1.0, epochs=10)
    world.run_until(lambda: world.told(Checkpointed))
    for name in "abc":
        world.kill(name)
    world.run()
    assert world.hub.phase is JobPhase.COLLECTING
    world.stop("Ctrl-C")
    assert world.is_finished
    assert (world.abandoned, world.finish) == (None, Finish((), ()))
    saved = sum(world.saved.values())
    assert world.news[-1] == CheckpointIsResult(saved, 500)
    assert "the last checkpoint is the result" in show_notice(world.news[-1])
    check_replay(world)


def test_a_job_whose_last_peers_do_not_come_back_after_a_stop_ends_with_its_last_checkpoint():
    world = one_cluster(checkpoint_every=1.0, epochs=10)
    world.run_until(lambda: world.told(Checkpointed))
    world.stop("Ctrl-C")
    for name in "abc":
        world.kill(name)
    world.run()
    assert world.finish == Finish((), ())
    assert len(world.told(CheckpointIsResult)) == 1


def test_a_hub_that_has_a_checkpoint_of_all_that_is_to_be_trained_ends_without_peers():
    world = two_clusters()
    world.is_collecting = False
    world.run_until(lambda: orders_of(world, Collect))
    world.books = orders_of(world, Collect)[0].books  # written, and then the hub was killed
    for name in [*world.peers]:
        world.peers[name].is_alive = False
    world.restart()
    world.run()
    assert world.finish == Finish((), ())
    assert world.news[-1] == CheckpointIsResult(100, 100)
    assert "the run is finished" in show_notice(world.news[-1])


def test_a_stopped_job_goes_on_from_its_result_with_more_epochs():
    world = two_clusters(epochs=3)
    world.run_until(lambda: len(world.ledger) > 60)
    world.stop("Ctrl-C")
    finishes(world)
    (result,) = orders_of(world, Collect)
    assert result.books.num_counted == len(world.ledger)
    assert result.books.num_evaluated == 1  # epoch 2 was evaluated before its end, and is so again
    books = replace(result.books, leases=result.books.leases | {"num_epochs": 5})
    again = HubWorld(replace(job(epochs=5), books=books))
    assert again.ledger == world.ledger
    assert again.news == [FromCheckpoint(len(world.ledger))]
    again.join(*"abc")
    again.run()
    assert (again.is_finished, len(again.ledger)) == (True, 250)
    assert [news.epoch for news in again.told(Evaluated)] == [2, 3, 4, 5]


@pytest.mark.parametrize("phase", [JobPhase.AVERAGING, JobPhase.EVALUATING, JobPhase.KEEPING])
def test_a_job_that_ends_anyway_may_be_stopped_and_then_does_not_begin_again(phase):
    world = two_clusters(Trouble(latency=0.5))
    world.run_until(lambda: world.hub.phase is phase)
    world.stop()
    finishes(world)
    assert len(world.ledger) == 100


def test_a_job_is_stopped_once_and_not_after_its_end():
    world = one_cluster()
    world.run_until(lambda: len(world.ledger) > 10)
    world.stop("first")
    (refusal,) = world.stop("second")
    assert "second" in refusal.reason
    finishes(world)
    assert isinstance(world.stop()[0], Refusal)
    assert isinstance(Coordinator(world.given).apply(Stopped("early", 0.0))[0], Refusal)


# Drops, copies, and what is refused.


def test_dropped_batches_are_told_and_not_counted_as_trained():
    world = finishes(two_clusters(Trouble(dropped=0.3, seed=3)))
    assert world.told(MicrobatchDropped)[0].reason == "not a number"
    assert 0 < sum(news.num_dropped for news in world.told(EpochDone)) < 100
    assert min(news.num_samples for news in world.told(Evaluated)) < 23


def test_second_copies_change_nothing():
    calm, doubled = finishes(two_clusters()), finishes(two_clusters(Trouble(twice=1.0)))
    assert len(doubled.refusals) > 20
    assert doubled.told(EpochDone)[-1] == calm.told(EpochDone)[-1]
    assert doubled.finish == calm.finish


def test_a_late_ready_is_not_taken_for_the_snapshot():
    world = one_cluster()
    world.run_until(lambda: world.hub.phase is JobPhase.KEEPING)
    (refusal,) = world.feed(Received("b", StageReady(1), world.now))
    assert refusal.reason == "b has no stage to get ready"
    (refusal,) = world.feed(Received("b", SnapshotMade(1, 77, 0, blob("b")), world.now))
    assert refusal.reason == "nobody asked b for snapshot 77"


def report(batch, epoch=1):
    return StepReport(epoch, batch, 1, 0, 4, 0.1, 0.1, 0.0, 0.0, 1.0, ())


@pytest.mark.parametrize(
    ("who", "message", "reason"),
    [
        ("ghost", LeaseDone(1, 0, 8), "LeaseDone from ghost, who is no member"),
        ("root", LeaseDone(9, 0, 8), "LeaseDone of plan 9 from b, who follows 1"),
        ("leaf", LeaseDone(1, 0, 8), "lease 0 is reported by c, who is not the root"),
        ("root", LeaseDone(1, 0, 9), "lease 0 has 8 samples, not 9"),
        ("root", LeaseDone(1, 77, 8), "lease 77 is not open for cluster A"),
        ("spare", LeaseDone(1, 0, 8), "LeaseDone from spare, who has no stage"),
        ("leaf", report(77), "microbatch 77 of cluster A is not awaited"),
        ("leaf", DroppedMicrobatch(1, 77, "?"), "microbatch 77 of cluster A is not under way"),
        ("leaf", StageReady(1), "c has no stage to get ready"),
        ("leaf", StageMissing(1, "b", "?"), "c has no stage to get ready"),
        ("leaf", RoundReady(1, "c"), "RoundReady of round 1, which is not open"),
        ("root", RoundAbort(1, "?"), "RoundAbort of round 1, which is not open"),
    ],
)
def test_late_and_foreign_messages_are_refused(who, message, reason):
    world = one_cluster()
    world.run_until(lambda: world.told(ClusterStarted))
    world.join("spare")
    world.run(until=world.now)
    sender = {"root": "b", "leaf": "c"}.get(who, who)
    assert [each.root for each in world.hub.clusters] == ["b"]
    assert world.feed(Received(sender, message, world.now + 3)) == (Refusal(reason),)
    finishes(world)


def test_a_cluster_speaks_only_for_itself():
    world = two_clusters()
    world.run_until(lambda: len(world.told(ClusterStarted)) == 2)
    one, other = (cluster(world, name) for name in "AB")
    lease = next(lease for lease in world.open_leases if lease.cluster_id == one.cluster_id)
    for sender, message in [
        (other.root, LeaseDone(1, lease.number, 8)),
        (other.leaf, report(lease.first_microbatch)),
        (other.leaf, DroppedMicrobatch(1, lease.first_microbatch, "?")),
    ]:
        (refusal,) = world.feed(Received(sender, message, world.now))
        assert "of cluster B is not" in refusal.reason or "not open for cluster B" in refusal.reason
    finishes(world)


def test_a_vote_for_another():
    world = two_clusters()
    world.run_until(lambda: world.open_round is not None)
    (refusal,) = world.feed(Received("a", RoundReady(world.open_round, "b"), world.now))
    assert refusal.reason == "a votes for b"


def test_what_the_hubs_own_side_may_not_repeat():
    world = one_cluster()
    world.run_until(lambda: world.told(ClusterStarted))
    senseless = node("n", gflops=0.0)
    made = PartsMade(0, 2, blob("x"), blob("y"), (), (), world.now)
    for event, reason in [
        (world.given, "the hub has a job already: even"),
        (made, "nobody asked for the parts of positions 0 to 2"),
        (Collected(0, world.now), "nobody asked to collect number 0"),
        (PeerJoined(senseless, "key", (), world.now), f"n cannot join: no machine is like {senseless}"),
        (PeerLeft("ghost", "?", world.now), "ghost is no member, so it cannot leave"),
    ]:
        assert world.feed(event) == (Refusal(reason),)
    finishes(world)


def test_what_is_for_others_and_of_no_member_needs_no_log():
    world = one_cluster()
    world.run_until(lambda: world.told(ClusterStarted))
    others = [("a", Activation(1, 0, False, 1, ())), ("a", Pace(1, 0, 1, 1, False))]
    for sender, message in [("ghost", report(0)), ("c", report(0)), *others]:
        event = Received(sender, message, world.now + 50)
        assert not world.hub.concerns(event)
        assert world.hub.apply(event) == ()


def test_time_does_not_go_back_and_what_is_refused_does_not_move_it():
    hub = HubWorld().hub
    hub.apply(PeerJoined(node("a", 50.0), "key", (), 10.0))
    hub.apply(PeerJoined(node("b", 50.0), "key", (), 3.0))
    assert hub.due == 15.0
    assert hub.apply(Received("ghost", Leave(0, "?"), 1e6)) != ()
    hub.apply(PeerJoined(node("c", 50.0), "key", (), 11.0))
    assert hub.due == 16.0
