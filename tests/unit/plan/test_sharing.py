"""How clusters share a job: what a sample still teaches, and which way is chosen."""

from dataclasses import replace

import pytest
from support.plan_world import SIMPLE, even_model, node

from ravnest.config import Averaging, Favour
from ravnest.plan.assembly import assemble_plan
from ravnest.plan.sharing import (
    Sharing,
    TrainingLength,
    adam_rate_times,
    efficiency,
    share_job,
    show_sharing,
)
from ravnest.plan.types import Cluster, Stage, Swarm


def length(num_updates, **facts):
    return TrainingLength(64, num_updates, **facts)


# Whole batches: the table of research on small models, C = 4 and 2.
@pytest.mark.parametrize(
    ("num_updates", "four", "two"), [(168, 0.27, 0.53), (1_000, 0.35, 0.62), (10_000, 0.66, 0.86)]
)
def test_whole_batches_have_the_effect_that_was_measured(num_updates, four, two):
    found = [efficiency(length(num_updates), count, Averaging.BLOCKING, False, 15) for count in (4, 2, 1)]
    assert found == pytest.approx([four, two, 1.0], abs=0.011)


# Shares: a GPT of 3,000 updates (reports/convergence.md), e measured as the mean over one and four stages.
@pytest.mark.parametrize(
    ("count", "apart", "measured"),
    [(2, 5, 0.92), (4, 5, 0.78), (8, 5, 0.65), (4, 60, 0.64), (8, 60, 0.47)],
)
def test_shares_are_foreseen_as_measured_or_more_carefully(count, apart, measured):
    found = efficiency(length(3_000), count, Averaging.BLOCKING, True, apart)
    assert measured - 0.21 < found < measured + 0.08


def test_in_jobs_that_are_not_very_long_no_clusters_average_shares_until_the_noise_is_measured():
    least = Favour.QUALITY.least_efficiency
    for updates in (100, 3_000, 10_000):
        assert efficiency(length(updates), 2, Averaging.BLOCKING, True, 5) < least
    assert efficiency(length(100_000), 2, Averaging.BLOCKING, True, 5) >= least
    assert efficiency(length(3_000, noise=300), 2, Averaging.BLOCKING, True, 5) >= least
    assert efficiency(length(3_000, noise=1e3), 4, Averaging.BLOCKING, True, 5) >= least


@pytest.mark.parametrize("averaging", [Averaging.EXACT, Averaging.BLOCKING])
def test_small_shares_of_a_batch_norm_cost_effect_however_clusters_agree(averaging):
    with_norm, without = (
        [
            efficiency(replace(length(10), batch_size=size, has_statistics=has), 4, averaging, True, 5)
            for size in (64, 256)
        ]
        for has in (True, False)
    )
    assert with_norm[0] == pytest.approx(without[0] / 2)
    assert with_norm[1] == without[1]


def test_summed_gradients_cost_nothing():
    assert efficiency(length(10), 8, Averaging.EXACT, True, 1) == 1.0


def test_a_measured_noise_scale_replaces_the_guess():
    quiet, noisy = (length(1_000, noise=noise) for noise in (10.0, 1e5))
    found = [efficiency(each, 4, Averaging.BLOCKING, False, 5) for each in (quiet, noisy)]
    assert found[0] < 0.4
    assert found[1] > 0.95


def alone(*names):
    """Clusters of one stage each, and their nodes."""
    return tuple(Cluster((Stage(name, 0, 6, 1),)) for name in names)


def shared(num_updates, config=SIMPLE, can_sum=True, names="abcd", model=None, **facts):
    profile, swarm = model or even_model(6), Swarm(tuple(node(name, **facts) for name in names))
    plan = assemble_plan(alone(*names), profile, swarm, config, seed=0, plan_id=1)
    return share_job(plan, profile, swarm, config, length(num_updates), can_sum)


def test_one_cluster_shares_nothing():
    found = shared(100, names="a")
    assert (found.num_clusters, found.efficiency) == (1, 1.0)
    assert found.goodput == found.samples_per_second > 0


def test_fast_links_sum_gradients():
    found = shared(100, upload_bytes_per_second=1e12, download_bytes_per_second=1e12)
    assert found.averaging is Averaging.EXACT
    assert found.is_split
    assert found.efficiency == 1.0


def test_slow_links_average_seldom_and_pay_for_it():
    fast = shared(3_000, can_sum=False)
    slow = shared(3_000, can_sum=False, upload_bytes_per_second=1e6, download_bytes_per_second=1e6)
    assert slow.updates_between > fast.updates_between >= 5
    assert slow.efficiency < fast.efficiency


def test_what_pauses_cost_is_in_the_rate():
    blocking, beside = (
        shared(100_000, config=replace(SIMPLE, averaging=each), can_sum=False)
        for each in (Averaging.BLOCKING, Averaging.OVERLAPPED)
    )
    assert blocking.averaging is Averaging.BLOCKING
    assert beside.averaging is Averaging.OVERLAPPED
    assert blocking.efficiency > beside.efficiency


def test_of_ways_that_are_good_enough_the_fastest_is_chosen_and_speed_allows_more():
    links = {"upload_bytes_per_second": 2e7, "download_bytes_per_second": 2e7}
    good = shared(8_000, **links)
    assert good.efficiency >= 0.9
    quick = shared(8_000, config=replace(SIMPLE, favour=Favour.SPEED), **links)
    assert quick.goodput >= good.goodput * 0.95


def test_sentences_say_what_it_costs():
    exact = Sharing(Averaging.EXACT, True, 3, 1, 1.0, 10.0)
    assert (
        show_sharing(exact, 64)
        == "3 clusters share each batch of 64 and sum its gradients, as one process would"
    )
    late = Sharing(Averaging.BLOCKING, True, 4, 5, 0.921, 10.0)
    assert "4 clusters share each batch of 64 and average every 5 updates" in show_sharing(late, 64)
    assert "92 %" in show_sharing(late, 64)


@pytest.mark.parametrize(("noise", "times"), [(None, 1.0), (0.0, 1.0), (64.0, 2.5**0.5), (1e9, 2.0)])
def test_adams_rate_follows_the_noise_that_was_measured(noise, times):
    job = TrainingLength(batch_size=64, num_updates=1000, noise=noise)
    assert adam_rate_times(job, 4) == pytest.approx(times, rel=1e-3)
    assert adam_rate_times(job, 1) == 1.0
