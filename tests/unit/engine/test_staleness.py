"""The staleness controller: the numbers of the research page, feedback and caps."""

import pytest

from ravnest.engine.staleness import (
    StageTimes,
    StalenessController,
    StalenessPolicy,
    gradient_weight,
    window_needed,
)

EIGHT = (StageTimes(0.1, 0.2),) * 8


def controller(**changes):
    settings = {"planned_updates": 4800, "synchronous_share": 0.0, "queues": 1.0, "spare_batches": 0}
    settings |= changes
    return StalenessController(StalenessPolicy(**settings))


@pytest.mark.parametrize(
    ("num_updates", "bound", "accumulate"),
    [(0, 1, 7), (255, 1, 7), (256, 2, 4), (1295, 2, 4), (1296, 3, 3), (4095, 3, 3), (4096, 4, 2)],
)
def test_eight_equal_stages(num_updates, bound, accumulate):
    decision = controller().decide(num_updates, EIGHT)
    assert (decision.accumulate, decision.window, decision.synchronous) == (accumulate, 8, False)
    assert StalenessPolicy(planned_updates=4800).lag_bound(num_updates) == bound


def test_long_runs_allow_twice_the_lag():
    assert StalenessPolicy(planned_updates=5000).lag_bound(1296) == 3
    assert StalenessPolicy(planned_updates=5001).lag_bound(1296) == 6
    assert StalenessPolicy(planned_updates=5001, growth=0.5).lag_bound(1296) == 3
    assert StalenessPolicy(planned_updates=5001, max_lag=2).lag_bound(1296) == 2


@pytest.mark.parametrize(
    ("stages", "window"),
    [
        ((StageTimes(0.0, 0.0),) * 3, 3),
        ((StageTimes(1, 2),), 1),
        ((StageTimes(0.1, 0.2),) * 7, 7),
        ((StageTimes(1, 2), StageTimes(0.5, 1)), 2),
        ((StageTimes(1, 2, 3), StageTimes(1, 2, 0)), 3),
        ((StageTimes(1, 2, 0.1), StageTimes(1, 2, 0)), 3),
    ],
)
def test_window_needed(stages, window):
    assert window_needed(stages) == window


def test_window_is_throttled_only_where_accumulation_cannot_rise():
    decision = controller(accumulate_max=3).decide(0, EIGHT)
    assert (decision.accumulate, decision.window) == (3, 4)  # 3 * 1 + 1
    decision = controller(window_max=5).decide(0, EIGHT)
    assert (decision.accumulate, decision.window) == (4, 5)  # more per update would not help
    decision = controller(accumulate_min=16).decide(0, EIGHT)
    assert (decision.accumulate, decision.window) == (16, 8)


def test_synchronous_start():
    policy = StalenessPolicy(planned_updates=1000, queues=1.0, spare_batches=0)
    first = StalenessController(policy).decide(49, EIGHT)
    assert (first.synchronous, first.window, first.accumulate) == (True, 7, 7)
    assert not StalenessController(policy).decide(50, EIGHT).synchronous
    assert StalenessPolicy(planned_updates=100_000).synchronous_updates == 200
    assert StalenessPolicy(planned_updates=10).synchronous_updates == 0


def test_no_lag_allowed_is_synchronous_for_ever():
    assert controller(max_lag=0).decide(4000, EIGHT).synchronous


def test_feedback_lowers_the_window_when_lag_is_above_the_bound():
    control = controller()
    windows = []
    for num_updates in range(0, 1000, 50):
        for _ in range(100):
            control.observe(5)
        decision = control.decide(num_updates, EIGHT)
        windows.append(decision.window)
    assert windows[:8] == [8, 7, 6, 5, 4, 3, 2, 2]
    assert windows[-1] == 2


def test_feedback_waits_fifty_updates_and_for_observations():
    control = controller()
    assert control.decide(50, EIGHT, idle_share=1.0).window == 8  # nothing observed
    control.observe(9)
    assert control.decide(49, EIGHT).window == 8
    assert control.decide(50, EIGHT).window == 7
    control.observe(9)
    assert control.decide(99, EIGHT).window == 7
    assert control.decide(100, EIGHT).window == 6


def test_feedback_raises_the_window_of_an_idle_stage_up_to_the_hard_bound():
    control = controller(accumulate_min=9)  # hard bound 9 * 1 + 1
    windows = []
    for num_updates in range(50, 251, 50):
        control.observe(0)
        windows.append(control.decide(num_updates, EIGHT, idle_share=0.06).window)
    assert windows == [9, 10, 10, 10, 10]
    control.observe(0)
    assert control.decide(251, EIGHT, idle_share=0.9).window == 10
    control = controller(accumulate_min=9)
    control.observe(0)
    assert control.decide(50, EIGHT, idle_share=0.05).window == 8


def test_lag_at_the_bound_is_not_too_much_for_a_stage_that_idles():
    control = controller(accumulate_min=9)
    control.observe(1)
    assert control.decide(50, EIGHT, idle_share=0.9).window == 9
    control.observe(2)
    assert control.decide(100, EIGHT, idle_share=0.9).window == 8


def test_batches_may_queue_where_there_is_more_than_one_stage():
    control = controller(accumulate_min=20, queues=1.5, spare_batches=2)
    assert control.decide(0, EIGHT).window == 14  # 1.5 * 8 + 2
    assert control.decide(0, EIGHT[:1]).window == 1
    assert control.decide(0, (StageTimes(1, 2, 3), StageTimes(1, 2, 0))).window == 7  # 1.5 * 3 = 4.5


def test_without_times_the_window_is_the_planned_one_within_the_bound():
    assert controller(accumulate_min=5, accumulate_max=5, window_max=11).decide(0, ()).window == 6
    assert controller(accumulate_min=5, accumulate_max=5, window_max=11).decide(256, ()).window == 11
    assert controller(accumulate_min=5, accumulate_max=5, window_max=4).decide(0, ()).window == 4


def test_a_run_of_unknown_length_starts_ahead_and_with_the_bound_of_a_short_one():
    policy = StalenessPolicy(planned_updates=0)
    assert not policy.is_synchronous(0)
    assert [policy.lag_bound(updates) for updates in (0, 255, 256)] == [1, 1, 2]


def test_p99_ignores_one_in_a_hundred():
    control = controller()
    for lag in [0] * 99 + [50]:
        control.observe(lag)
    assert control.decide(50, EIGHT).window == 8
    for lag in [0] * 98 + [50, 50]:
        control.observe(lag)
    assert control.decide(100, EIGHT).window == 7


def test_lag_during_the_synchronous_start_is_no_feedback():
    control = controller(planned_updates=2000, synchronous_share=0.05)
    control.observe(9)
    assert control.decide(99, EIGHT).synchronous
    assert control.decide(160, EIGHT).window == 8


def test_throttled_window_rises_at_once_when_the_bound_does():
    control = controller(accumulate_max=2)
    assert control.decide(255, EIGHT).window == 3
    control.observe(0)
    assert control.decide(255, EIGHT, idle_share=0.5).window == 3
    assert control.decide(256, EIGHT).window == 5


def test_one_stage_needs_one_batch():
    control = controller()
    control.observe(9)
    assert control.decide(50, EIGHT[:1]).window == 1


def test_straggler_weight():
    assert [gradient_weight(lag, 2) for lag in (0, 4, 5, 8)] == [1.0, 1.0, 0.4, 0.25]
