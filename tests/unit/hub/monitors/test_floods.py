"""Floods: honest bursts pass, steady floods do not, and one peer's flood is not another's."""

from hypothesis import given
from hypothesis import strategies as st

from ravnest.hub.monitors.floods import Allowance, FloodGuard, Spending

SMALL = {Spending.ARRIVED: Allowance(10, 2.0), Spending.IN_VAIN: Allowance(3, 1.0)}


def test_a_burst_passes_and_one_more_does_not() -> None:
    guard = FloodGuard(SMALL)
    assert [guard.record("a", Spending.IN_VAIN, 5.0) for _ in range(3)] == [None] * 3
    assert guard.record("a", Spending.IN_VAIN, 5.0) == "it keeps sending what nobody awaits"
    assert guard.record("b", Spending.IN_VAIN, 5.0) is None
    assert guard.record("a", Spending.ARRIVED, 5.0) is None


def test_what_is_slower_than_the_rate_goes_on_for_ever() -> None:
    guard = FloodGuard(SMALL)
    assert not any(guard.record("a", Spending.ARRIVED, number / 2.0) for number in range(1_000))


def test_who_comes_again_begins_anew() -> None:
    guard = FloodGuard(SMALL)
    while guard.record("a", Spending.IN_VAIN, 1.0) is None:
        pass
    guard.forget("a")
    assert guard.record("a", Spending.IN_VAIN, 1.0) is None


@given(st.lists(st.floats(0, 3), max_size=60))
def test_nobody_sends_more_than_the_burst_and_the_rate_allow(pauses: list[float]) -> None:
    guard, allowance, now, num_passed = FloodGuard(SMALL), SMALL[Spending.ARRIVED], 0.0, 0
    for pause in pauses:
        now += pause
        num_passed += guard.record("a", Spending.ARRIVED, now) is None
    assert num_passed <= allowance.burst + allowance.per_second * now + 1e-6
