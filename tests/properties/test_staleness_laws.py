"""Laws of the staleness controller: it never leaves the bounds, whatever it observes."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ravnest.engine.staleness import StageTimes, StalenessController, StalenessPolicy, window_needed

seconds = st.floats(0.001, 10.0)
stages = st.lists(st.builds(StageTimes, seconds, seconds, seconds), min_size=1, max_size=12)
policies = st.builds(
    StalenessPolicy,
    planned_updates=st.integers(1, 20_000),
    accumulate_min=st.integers(1, 4),
    accumulate_max=st.integers(4, 32),
    window_max=st.integers(1, 40),
    max_lag=st.none() | st.integers(0, 9),
)
observations = st.lists(
    st.tuples(st.integers(1, 200), st.integers(0, 12), st.floats(0, 1)), min_size=1, max_size=40
)


@given(policies, stages, observations)
def test_decisions_stay_within_the_bounds(policy, times, seen):
    control, num_updates = StalenessController(policy), 0
    for step, lag, idle_share in seen:
        num_updates += step
        control.observe(lag)
        decision = control.decide(num_updates, times, idle_share)
        limit = policy.lag_bound(num_updates)
        assert policy.accumulate_min <= decision.accumulate <= policy.accumulate_max
        assert 1 <= decision.window <= policy.window_max
        assert limit <= max(1, math.ceil(num_updates**0.25))
        if decision.synchronous:
            assert decision.window <= decision.accumulate
        else:
            assert math.ceil((decision.window - 1) / decision.accumulate) <= limit
            assert decision.window >= min(2, window_needed(times), policy.window_max)


@given(policies, stages, st.integers(0, 20_000))
def test_throttles_only_when_accumulation_is_at_its_limit(policy, times, num_updates):
    decision = StalenessController(policy).decide(num_updates, times)
    if not decision.synchronous and decision.window < min(window_needed(times), policy.window_max):
        assert decision.accumulate == policy.accumulate_max


@given(st.integers(1, 20_000), st.integers(0, 20_000))
def test_bound_never_falls_as_training_goes_on(planned, num_updates):
    policy = StalenessPolicy(planned_updates=planned)
    assert 1 <= policy.lag_bound(num_updates) <= policy.lag_bound(num_updates + 1)
