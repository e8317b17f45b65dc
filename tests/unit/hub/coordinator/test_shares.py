"""Clusters share each batch: shares by speed, leases of shares, and how many clusters there are."""

from collections import Counter
from dataclasses import replace

import pytest
from support.hub_world import MANY_CLUSTERS, QUICK_PLANNER, HubWorld, check_replay, job
from support.plan_world import SIMPLE, even_model, node

from ravnest.config import Averaging, Favour
from ravnest.hub.coordinator.events import JobGiven, JobSettings, MakePlan, NoiseMeasured, Send
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import NoiseFound, PlanFormed, RateChanged, Repaired
from ravnest.hub.coordinator.planner import SEARCH_PLANNER
from ravnest.hub.coordinator.progress import divide_batch
from ravnest.protocol.training import LearningRate, LeaseGrant


@pytest.mark.parametrize(
    ("rates", "shares"),
    [
        ((1.0,), (64,)),
        ((1.0, 1.0, 1.0), (22, 21, 21)),
        ((3.0, 1.0), (48, 16)),
        ((1e9, 1.0, 1.0), (62, 1, 1)),
        ((0.0, 0.0), (32, 32)),
    ],
)
def test_a_batch_is_divided_by_speed_and_nobody_gets_nothing(rates, shares):
    assert divide_batch(64, rates) == shares


def test_no_share_is_empty_even_of_the_smallest_batch():
    assert divide_batch(2, (1.0, 1.0, 1.0)) == (1, 1, 1)


def shared_job(**changes):
    given = job(**({"is_whole_batch": False, "batch_size": 8, "num_samples": 96} | changes))
    return replace(given, config=replace(MANY_CLUSTERS, averaging=Averaging.BLOCKING))


def grants(world):
    sends = (x.message for _, actions in world.happened for x in actions if isinstance(x, Send))
    return [x for x in sends if isinstance(x, LeaseGrant) and not x.is_evaluation]


def test_two_clusters_train_their_share_of_each_batch():
    world = HubWorld(shared_job(microbatches=1, average_every=1))
    world.join(*"abcdef", memory_mb=250.0)
    world.run()
    assert len(world.hub.clusters) == 2
    sizes = Counter(size for grant in grants(world) for size in grant.num_samples)
    assert sizes[4] > 30  # of 48 if both trained all the time; whoever starts first has a batch for itself
    assert set(sizes) <= {4, 8}
    assert set(world.ledger.values()) == {1}
    assert len(world.ledger) == 2 * 96


def plan_of(num_updates, names="abcd", config=SIMPLE, noise=None, settings=None, **facts):
    given = JobGiven(even_model(6), config, replace(settings_of(num_updates), **(settings or {})), 0.0)
    nodes = tuple(node(name, **facts) for name in names)
    return SEARCH_PLANNER.make_plan(given, MakePlan(1, nodes, noise=noise), 0.0)


def settings_of(num_updates):
    return JobSettings(
        num_samples=8 * num_updates,
        num_validation=0,
        batch_size=8,
        epochs=1,
        rates=(0.1,),
        average_every=None,
    )


SLOW = {"upload_bytes_per_second": 2e6, "download_bytes_per_second": 2e6}


def test_a_short_job_gets_one_cluster_and_says_why():
    made = plan_of(100, **SLOW)
    assert len(made.plan.clusters) == 1
    assert "clusters would" in made.reason
    assert "using 1 cluster" in made.reason


def test_noisy_gradients_give_clusters_while_a_sample_keeps_nine_tenths_of_its_effect():
    made = plan_of(100_000, noise=3e3, **SLOW)
    assert len(made.plan.clusters) > 1
    assert made.sharing.efficiency >= 0.9
    assert made.sharing.is_split


def test_before_that_a_long_job_has_one_cluster_that_measures_them_and_hears_what_speed_would_do():
    config = replace(SIMPLE, max_stages=1, averaging=Averaging.BLOCKING)
    short, long = (plan_of(number, config=config, gflops=1) for number in (300, 4_000))
    assert (len(short.plan.clusters), short.microbatches) == (1, 1)
    assert (len(long.plan.clusters), long.microbatches) == (1, 2)
    assert "; --favour speed would use 3 clusters, 3 times as fast with 8" in long.reason
    quick = plan_of(300, config=replace(config, favour=Favour.SPEED), gflops=1)
    assert len(quick.plan.clusters) == 3
    assert "--favour" not in quick.reason


LAN = {"upload_bytes_per_second": 1e11, "download_bytes_per_second": 1e11}


def test_fast_links_sum_gradients_however_short_the_job():
    made = plan_of(50, config=replace(SIMPLE, max_stages=1), **LAN)
    assert made.sharing.averaging is Averaging.EXACT
    assert made.microbatches == 1


def test_batch_norms_keep_whole_batches_unless_shares_are_large():
    config = replace(SIMPLE, max_stages=1)
    norms = {"has_statistics": True, "least_samples": 64}
    small, large = (
        plan_of(50, config=config, settings=norms | {"batch_size": size, "num_samples": 50 * size}, **LAN)
        for size in (64, 512)
    )
    assert len(small.plan.clusters) == 1
    assert "as batch norms would see 16 samples of a batch; using 1 cluster" in small.reason
    assert large.sharing.averaging is Averaging.EXACT
    assert len(large.plan.clusters) == 4


def test_the_requester_may_say_how_many_and_speed_allows_more():
    assert len(plan_of(100, config=replace(SIMPLE, clusters=3, max_stages=1), **SLOW).plan.clusters) == 3
    few, more = (
        plan_of(3_000, config=replace(SIMPLE, favour=each, max_stages=1), **SLOW).sharing for each in Favour
    )
    assert few.efficiency >= 0.9
    assert more.efficiency >= 0.8
    assert more.num_clusters >= few.num_clusters


def test_exact_is_refused_where_it_cannot_be():
    settings = JobSettings(
        num_samples=80, num_validation=0, batch_size=8, epochs=1, rates=(0.1,), is_whole_batch=True
    )
    config = replace(SIMPLE, averaging=Averaging.EXACT)
    given = JobGiven(even_model(6), config, settings, 0.0)
    made = SEARCH_PLANNER.make_plan(given, MakePlan(1, tuple(map(node, "abc"))), 0.0)
    assert made.plan is None
    assert "this loss needs whole batches" in made.shortage


def test_people_are_told_how_clusters_share_a_batch():
    world = HubWorld(shared_job(), planner=QUICK_PLANNER)
    world.join(*"abcdef", memory_mb=250.0)
    world.run_until(lambda: any(isinstance(each, PlanFormed) for each in world.news))
    told = next(show_notice(each) for each in world.news if isinstance(each, PlanFormed))
    assert "2 clusters share each batch of 8 and average every 3 updates" in told


# --- what is measured of gradients changes how many clusters pay


def noisy_world(noise, **changes):
    """A world whose plan has one cluster and spares, in which somebody measures a noise scale."""
    given = job(is_whole_batch=False, batch_size=8, num_samples=800, average_every=None, **changes)
    config = replace(SIMPLE, max_stages=3)  # the others are spares
    world = HubWorld(replace(given, config=config), make_node=lambda *a, **k: node(*a, **(k | SLOW)))
    world.join(*"abcdef", memory_mb=250.0)
    world.run_until(lambda: len(world.hub.placement.running) == 1)
    assert world.hub.placement.sharing.num_clusters == 1
    world.feed(NoiseMeasured(noise, world.now))
    return world


def test_spares_form_a_cluster_when_gradients_turn_out_noisy():
    world = noisy_world(1e5)
    told = [show_notice(news) for news in world.told(NoiseFound)]
    assert told == ["the noise scale of the gradients is 100,000 samples: more clusters may pay now"]
    world.run()
    assert len(world.hub.clusters) == 2
    assert any("spares form 1 more" in news.reason for news in world.told(Repaired))
    assert set(world.ledger.values()) == {1}
    check_replay(world)


def test_a_noise_scale_that_has_grown_since_is_tried_again():
    world = noisy_world(40.0)
    world.run_until(lambda: world.told(Repaired))
    assert "no other cluster pays" in world.told(Repaired)[0].reason
    world.feed(NoiseMeasured(1e5, world.now))
    world.run()
    assert len(world.hub.clusters) == 2


def test_noise_at_which_no_other_cluster_pays_changes_nothing():
    world = noisy_world(12.0)
    world.run()
    assert len(world.hub.clusters) == 1
    assert not world.told(Repaired)
    check_replay(world)


@pytest.mark.parametrize(("has_own_adam", "times"), [(True, 2.0**0.5), (False, 1.0)])
def test_an_adam_of_the_requesters_gets_a_higher_rate_in_two_clusters(has_own_adam, times):
    world = HubWorld(shared_job(microbatches=1, average_every=1, epochs=8, has_own_adam=has_own_adam))
    world.join(*"abcdef", memory_mb=250.0)
    world.run_until(lambda: len(world.hub.placement.running) == 2)
    world.feed(NoiseMeasured(1e6, world.now))
    start = len(world.happened)
    world.run()
    sends = (x.message for _, actions in world.happened[start:] for x in actions if isinstance(x, Send))
    rates = {x.rate for x in sends if isinstance(x, LearningRate)}
    assert max(rates, default=0.1) == pytest.approx(0.1 * times, rel=1e-3)
    told = [show_notice(news) for news in world.told(RateChanged)]
    why = "2 clusters share each batch, and a share is noisier than its batch"
    first = [f"the learning rate of your Adam is 1.41 times the one you gave: {why}"]
    assert told[:1] == (first if has_own_adam else [])
    check_replay(world)


def test_people_are_told_when_the_rate_is_the_one_they_gave_again():
    world = HubWorld(shared_job(microbatches=1, average_every=1, epochs=8, has_own_adam=True))
    world.join(*"abcdef", memory_mb=250.0)
    world.run_until(lambda: len(world.hub.placement.running) == 2)
    world.feed(NoiseMeasured(1e6, world.now))
    for name in "abc":  # three nodes are one cluster
        world.kill(name)
    world.run()
    assert [news.times == 1.0 for news in world.told(RateChanged)] == [False, True]
    assert show_notice(world.told(RateChanged)[-1]) == "your Adam has the learning rate that you gave again"


@pytest.mark.parametrize(
    ("averaging", "least", "microbatches"),
    [(Averaging.BLOCKING, 1, 2), (Averaging.BLOCKING, 16, 1), (Averaging.EXACT, 1, 1)],
)
def test_shares_of_an_adam_are_cut_in_two_so_that_their_noise_is_measured(averaging, least, microbatches):
    config = replace(SIMPLE, clusters=2, max_stages=1, averaging=averaging)
    settings = JobSettings(
        num_samples=800, num_validation=0, batch_size=8, epochs=1, rates=(0.1,), least_samples=least
    )
    plans = [
        SEARCH_PLANNER.make_plan(
            JobGiven(even_model(6), config, replace(settings, has_own_adam=has_own_adam), 0.0),
            MakePlan(1, (node("a", **SLOW), node("b", **SLOW))),
            0.0,
        )
        for has_own_adam in (True, False)
    ]
    assert all(len(made.plan.clusters) == 2 for made in plans)
    assert [made.microbatches for made in plans] == [microbatches, 1]
