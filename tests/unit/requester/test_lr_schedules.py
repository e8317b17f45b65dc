"""Schedules are numbers: up in a straight line, at most 1, down to the last update, and no code in them."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravnest.errors import ConfigError
from ravnest.requester.lr_schedules import (
    Curve,
    constant,
    cosine,
    factors,
    linear,
    per_epoch,
    per_update,
    read_schedule,
)

curves = st.builds(
    Curve,
    warmup=st.one_of(st.integers(0, 300), st.floats(0, 0.999)),
    final=st.floats(0, 1),
    is_cosine=st.booleans(),
)


@given(curves, st.integers(1, 400))
def test_laws_of_every_curve(curve, total):
    run = factors(curve, total)
    assert len(run) == total
    assert all(0 <= factor <= 1 for factor in run)
    peak = run.index(max(run))
    assert run[peak] == pytest.approx(1)
    assert peak < max(total / 2, 1)
    assert all(before <= after for before, after in pairwise(run[: peak + 1]))
    assert all(before >= after - 1e-12 for before, after in pairwise(run[peak:]))
    assert run[0] == pytest.approx(1 / (peak + 1))
    if total > 2:
        assert run[-1] == pytest.approx(curve.final)
    assert curve.factor(total + 5, total) == pytest.approx(curve.final if total > 1 else curve.factor(5, 1))


def test_known_numbers():
    assert factors(linear(warmup=2, final=0), 6) == pytest.approx([0.5, 1, 0.75, 0.5, 0.25, 0])
    assert factors(constant(warmup=4), 8) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    assert factors(cosine(final=0), 5) == pytest.approx(
        [(1 + math.cos(math.pi * k / 4)) / 2 for k in range(5)]
    )
    assert factors(cosine(warmup=0.25), 8) == pytest.approx(factors(cosine(warmup=2), 8))
    assert factors(cosine(), 3)[-1] == pytest.approx(0.1)


def test_a_warm_up_longer_than_the_run_is_cut_to_half_of_it():
    assert factors(linear(warmup=1000, final=0), 6) == pytest.approx([1 / 3, 2 / 3, 1, 2 / 3, 1 / 3, 0])


def test_a_function_of_the_requesters_own():
    schedule = read_schedule(lambda update: torch.tensor(0.5) ** update)
    assert factors(schedule, 3) == (1.0, 0.5, 0.25)
    assert read_schedule(cosine()) == cosine()


@pytest.mark.parametrize("answer", [None, "0.5", -0.1, math.nan, math.inf, [1, 2]])
def test_a_function_must_return_factors(answer):
    with pytest.raises(ConfigError, match="for update 0; return a factor of the learning rate"):
        read_schedule(lambda _: answer)
    late = read_schedule(lambda update: answer if update == 7 else 1.0)
    with pytest.raises(ConfigError, match="for update 7"):
        factors(late, 10)


@pytest.mark.parametrize("given", ["cosine", 0.1, Curve, {"warmup": 3}])
def test_what_is_no_schedule(given):
    with pytest.raises(ConfigError, match=r"schedule is .*; give rv\.cosine\(\)"):
        read_schedule(given)


def test_a_schedule_that_was_not_called():
    with pytest.raises(ConfigError, match="schedule returned Curve"):
        read_schedule(cosine)


def test_bad_numbers_are_told_at_once():
    for warmup in (-1, math.nan, math.inf, "50", None, True):
        with pytest.raises(ConfigError, match="warmup is"):
            cosine(warmup=warmup)
    for final in (-0.1, 1.5, math.nan, "0"):
        with pytest.raises(ConfigError, match=r"final is .*; give a number from 0 to 1$"):
            linear(final=final)


TORCH = torch.optim.lr_scheduler
SCHEDULERS = {
    "steps": lambda optimizer: TORCH.StepLR(optimizer, 5, 0.5),
    "warm-up from nothing": lambda optimizer: TORCH.LambdaLR(optimizer, lambda step: min(step / 8, 1.0)),
    "cosine": lambda optimizer: TORCH.CosineAnnealingLR(optimizer, 30),
    "one cycle": lambda optimizer: TORCH.OneCycleLR(optimizer, 0.5, total_steps=41, cycle_momentum=False),
    "one after the other": lambda optimizer: TORCH.SequentialLR(
        optimizer,
        [TORCH.LinearLR(optimizer, 0.1, total_iters=10), TORCH.ExponentialLR(optimizer, 0.9)],
        milestones=[10],
    ),
    "both": lambda optimizer: TORCH.ChainedScheduler(
        [TORCH.LinearLR(optimizer, 0.5, total_iters=4), TORCH.StepLR(optimizer, 7)]
    ),
}


def two_groups():
    weights = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    return torch.optim.SGD([{"params": weights[:1], "lr": 0.2}, {"params": weights[1:], "lr": 0.1}])


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_gives_the_rates_that_it_would_give(name, every):
    reference = two_groups()
    stepped = SCHEDULERS[name](reference)
    given = SCHEDULERS[name](ours := two_groups())
    base = reference.param_groups[0]["initial_lr"]
    before = [group["lr"] for group in ours.param_groups]
    schedule = read_schedule(per_update(given) if every == 1 else per_epoch(given), every)
    for update in range(40):
        now = reference.param_groups[0]["lr"]
        assert base * schedule.factor(update, 40) == pytest.approx(now, abs=1e-9), update
        reference.step()
        if (update + 1) % every == 0:
            stepped.step()
    assert [group["lr"] for group in ours.param_groups] == before


def test_a_scheduler_that_does_not_say_how_often_it_steps_is_refused():
    """One of epochs, stepped after every update, takes the rate to nothing before anything is learned."""
    scheduler = TORCH.StepLR(two_groups(), 2, 0.3)
    assert read_schedule(per_epoch(scheduler), 100).factor(199, 400) == 1
    assert read_schedule(per_update(scheduler), 100).factor(199, 400) < 1e-50
    with pytest.raises(ConfigError, match=r"a StepLR, .* rv.per_epoch\(scheduler\) if .* rv.per_update\(sch"):
        read_schedule(scheduler, 100)


def test_a_scheduler_that_ends_before_the_job_is_told_with_its_number_of_steps():
    optimizer = two_groups()
    short = TORCH.OneCycleLR(optimizer, 0.1, total_steps=7, cycle_momentum=False)
    assert len(factors(read_schedule(per_update(short)), 7)) == 7
    with pytest.raises(ConfigError, match=r"OneCycleLR fails at step 8 of 21 .* the 21 steps of the job"):
        factors(read_schedule(per_update(short)), 21)


def test_schedulers_that_are_more_than_one_factor_are_refused():
    optimizer = two_groups()
    apart = TORCH.LambdaLR(optimizer, [lambda _: 1.0, lambda step: 0.5**step])
    with pytest.raises(ConfigError, match="groups different factors at step 1; give all groups the same"):
        factors(read_schedule(per_update(apart)), 3)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau waits for losses"):
        read_schedule(TORCH.ReduceLROnPlateau(optimizer))
    momentum = torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1, momentum=0.9)
    with pytest.raises(
        ConfigError, match="OneCycleLR changes momenta too; make it with cycle_momentum=False"
    ):
        read_schedule(TORCH.OneCycleLR(momentum, 0.1, total_steps=9))
    with pytest.raises(ConfigError, match="schedule is int; give one of torch"):
        per_epoch(3)
