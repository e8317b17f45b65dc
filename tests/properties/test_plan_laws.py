"""Laws of a plan: it tiles, it fits, it is the same again, and it does what the forecast says."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_world import (
    FIRST_ANSWERS,
    check_laws,
    configs,
    even_model,
    node,
    profiles,
    slow_forecast,
    slow_memory,
    swarm_of,
    swarms,
)

from ravnest.config import SEARCH_BUDGET
from ravnest.errors import PlanError
from ravnest.ids import NodeId
from ravnest.plan.forecast import forecast
from ravnest.plan.formation import form_plan
from ravnest.plan.types import Node
from ravnest.units import Dimension, parse_quantity


def try_plan(profile, swarm, config, seed=0, budget=SEARCH_BUDGET):
    try:
        return form_plan(profile, swarm, config, seed, budget=budget)
    except PlanError as error:
        return str(error)


@given(profiles(), swarms(most=7, memory=(1e8, 2e9)), configs, st.integers(0, 9))
@settings(max_examples=12)
def test_every_plan_obeys_the_laws(profile, swarm, config, seed):
    plan = try_plan(profile, swarm, config, seed)
    if not isinstance(plan, str):
        check_laws(plan, profile, swarm, config)
        assert (plan.plan_id, plan.seed) == (1, seed)


@given(profiles(), swarms() | swarms(memory=(5e7, 6e8)), configs)
@settings(max_examples=60)
def test_first_answers_obey_the_laws_and_the_forecast_equals_plain_loops(profile, swarm, config):
    plan = try_plan(profile, swarm, config, budget=FIRST_ANSWERS)
    if isinstance(plan, str):
        return
    check_laws(plan, profile, swarm, config)
    told = forecast(plan, profile, swarm, config)
    parts, periods, rate = slow_forecast(plan, profile, swarm, config)
    assert [each.period_seconds for each in told.clusters] == pytest.approx(periods, rel=1e-9)
    assert told.samples_per_second == pytest.approx(rate, rel=1e-9)
    for made, each, slow in zip(plan.clusters, told.clusters, parts, strict=True):
        for stage, times in zip(each.stages, slow, strict=True):
            memory = slow_memory(stage.stage, made, profile, config, len(plan.clusters) > 1)
            assert stage.memory_bytes == pytest.approx(memory, rel=1e-9)
            told_times = (stage.compute_seconds, stage.send_seconds, stage.receive_seconds)
            assert told_times == pytest.approx(times, rel=1e-9)


@given(profiles(), swarms(most=5), configs, st.integers(0, 9))
@settings(max_examples=6)
def test_same_input_same_plan_whatever_was_planned_between(profile, swarm, config, seed):
    first = try_plan(profile, swarm, config, seed)
    try_plan(even_model(), swarm_of(node("other"), node("another")), config, seed + 1)
    again = try_plan(
        profile, replace(swarm, nodes=tuple(replace(each) for each in swarm.nodes)), config, seed
    )
    assert again == first


@given(profiles(), swarms(most=4), configs)
@settings(max_examples=30)
def test_a_shortage_asks_for_what_helps(profile, swarm, config):
    tight = replace(swarm, nodes=tuple(replace(each, memory_bytes=6e7) for each in swarm.nodes))
    told = try_plan(profile, tight, config, budget=FIRST_ANSWERS)
    if not isinstance(told, str):
        return
    assert profile.name in told
    asked = re.search(r"add 1 node with >= ([\d.e+]+ \w+)", told)
    if asked is None:
        assert f"at most {config.max_stages} stages" in told
        return
    assert f"{len(tight.nodes)} node" in told
    size = parse_quantity(asked[1], Dimension.BYTES)
    guest = Node(NodeId("guest"), size, 1e12, 1e7, 1e7)
    enough = replace(tight, nodes=(*tight.nodes, guest))
    check_laws(form_plan(profile, enough, config, budget=FIRST_ANSWERS), profile, enough, config)
