"""The noise scale: what is measured of gradients with a known mean and a known variance."""

import numpy as np
import pytest

from ravnest.engine.norms import NoiseMeter


def measure(sizes, num_updates, deviation, mean=1.0, num_weights=50, weight=1.0):
    """Feed a meter gradients of samples around `mean`, in microbatches of these sizes."""
    random, meter = np.random.default_rng(0), NoiseMeter()
    for _ in range(num_updates):
        parts = [mean + deviation * random.standard_normal((size, num_weights)) for size in sizes]
        for part in parts:
            first, second = np.split(part.mean(0), [20])
            meter.add_microbatch([np.linalg.norm(first), np.linalg.norm(second)], len(part), weight)
        whole = np.concatenate(parts).mean(0)
        meter.end_update([np.linalg.norm(whole)] if meter.wants_batch else None)
    return meter.noise


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (8, 8), (3, 5, 1)])
def test_variance_and_signal_are_those_of_the_samples(sizes):
    noise = measure(sizes, 400, deviation=2.0)
    assert noise.variance == pytest.approx(50 * 4.0, rel=0.1)
    assert noise.signal == pytest.approx(50.0, rel=0.2)


def test_equal_gradients_have_no_noise():
    noise = measure((4, 4), 30, deviation=0.0)
    assert noise.variance == pytest.approx(0.0, abs=1e-9)
    assert noise.signal == pytest.approx(50.0)


def test_nothing_is_told_before_enough_is_measured():
    assert measure((4, 4), 19, 1.0) is None
    assert measure((4, 4), 20, 1.0) is not None


def test_a_lone_microbatch_says_nothing_of_noise():
    assert measure((16,), 200, 1.0) is None


def test_an_update_whose_microbatches_weigh_unequally_does_not_count():
    assert measure((4, 4), 200, 1.0, weight=0.5) is None


def test_the_mean_follows_training():
    random, meter = np.random.default_rng(1), NoiseMeter()
    for update in range(2000):
        deviation = 1.0 if update < 1000 else 3.0
        parts = [1.0 + deviation * random.standard_normal((4, 50)).mean(0) for _ in range(4)]
        for part in parts:
            meter.add_microbatch([np.linalg.norm(part)], 4, 1.0)
        meter.end_update([np.linalg.norm(np.mean(parts, 0))] if meter.wants_batch else None)
    assert meter.noise.variance == pytest.approx(50 * 9.0, rel=0.15)
