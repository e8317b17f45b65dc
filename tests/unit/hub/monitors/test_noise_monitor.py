"""The noise scale of a job: stages add up, one cluster's word counts little, and it is told when it grows."""

import pytest

from ravnest.hub.monitors.loss_guard import NoiseMonitor
from ravnest.plan.sharing import TrainingLength
from ravnest.protocol.training import GradientNoise

JOB = TrainingLength(batch_size=64, num_updates=300)  # its guess is 64 samples


def test_it_is_known_when_every_stage_has_reported_and_stages_add_up():
    monitor = NoiseMonitor()
    assert monitor.record("A1", ("a", "b"), "a", GradientNoise(300.0, 1.0), JOB) is None
    assert monitor.record("A1", ("a", "b"), "b", GradientNoise(100.0, 3.0), JOB) == pytest.approx(100.0)


def test_it_is_told_again_only_when_it_is_clearly_larger():
    monitor = NoiseMonitor()
    told = [monitor.record("A1", ("a",), "a", GradientNoise(each, 1.0), JOB) for each in (50, 70, 40, 80)]
    assert told == [50.0, None, None, 80.0]


def test_what_one_of_three_clusters_says_does_not_move_it():
    monitor = NoiseMonitor()
    for name in "bc":
        monitor.record(name, (name,), name, GradientNoise(60.0, 1.0), JOB)
    assert monitor.record("a", ("a",), "a", GradientNoise(1e30, 1.0), JOB) is None


@pytest.mark.parametrize(
    ("noise", "told"),
    [
        (GradientNoise(1e30, 1e-30), 16 * 64.0),
        (GradientNoise(5.0, -1.0), 16 * 64.0),  # no gradient at all is left in the noise
        (GradientNoise(-5.0, 1.0), 64.0 / 16),
    ],
)
def test_absurd_reports_are_believed_only_within_reason(noise, told):
    assert NoiseMonitor().record("a", ("a",), "a", noise, JOB) == told


def test_clusters_that_are_no_more_do_not_count():
    monitor = NoiseMonitor()
    monitor.record("a", ("a",), "a", GradientNoise(60.0, 1.0), JOB)
    monitor.forget_others(["b"])
    assert monitor.record("b", ("b",), "b", GradientNoise(600.0, 1.0), JOB) == 600.0
