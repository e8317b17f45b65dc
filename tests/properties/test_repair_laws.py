"""Laws of repair over random histories: the plan stays lawful, and only what must change does."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_world import FIRST_ANSWERS, check_laws, configs, nodes, profiles, swarms

from ravnest.errors import PlanError
from ravnest.plan.assembly import assemble_plan
from ravnest.plan.forecast import forecast
from ravnest.plan.formation import form_plan
from ravnest.plan.repair import moved_bytes, node_joined, node_left, node_slowed
from ravnest.plan.types import Plan

PARTS = ("memory_bytes", "flops_per_second", "upload_bytes_per_second", "download_bytes_per_second")

MEMORY = (1e8, 2e9)


@st.composite
def events(draw):
    kind = draw(st.sampled_from(["join", "leave", "leave", "slow", "slow"]))
    if kind == "join":
        return kind, draw(nodes("guest", memory=MEMORY))
    who = draw(st.booleans()), draw(st.integers(0, 1000))
    part, factor = draw(st.sampled_from(PARTS)), draw(st.sampled_from([0.9, 0.5, 0.05]))
    return kind, (who, part, factor)


# Models that few nodes can hold alone, so that clusters have several stages.
models = profiles(least_parameters=1e7)
first_swarms = swarms(most=8, memory=MEMORY)
histories = st.lists(events(), min_size=1, max_size=5)


def first_plan(profile, swarm, config):
    try:
        return form_plan(profile, swarm, config, seed=3, budget=FIRST_ANSWERS)
    except PlanError:
        return assemble_plan((), profile, swarm, config, seed=3, plan_id=1)


def steps(profile, swarm, config, history):
    """Yield kind, name, facts of now, plan before and repair of each event."""
    plan = first_plan(profile, swarm, config)
    for number, (kind, detail) in enumerate(history):
        before = swarm
        if kind == "join":
            name = f"guest{number}"
            swarm = replace(swarm, nodes=(*swarm.nodes, replace(detail, name=name)))
            repair = node_joined(plan, name, profile, swarm, config, FIRST_ANSWERS)
        elif not swarm.nodes:
            continue
        else:
            name, swarm = strike(kind, detail, plan, swarm)
            mend = node_left if kind == "leave" else node_slowed
            repair = mend(plan, name, profile, swarm, config, before, FIRST_ANSWERS)
        yield kind, name, swarm, plan, repair
        plan = repair.plan


def strike(kind, detail, plan, swarm):
    """Return the name of the node that leaves or slows down, and the facts afterwards."""
    (hits_host, who), part, factor = detail
    hosts = [stage.node for each in plan.clusters for stage in each.stages]
    names = hosts if hosts and hits_host else [each.name for each in swarm.nodes]
    name = names[who % len(names)]
    slower = [
        replace(each, **{part: getattr(each, part) * factor}) if each.name == name else each
        for each in swarm.nodes
        if kind == "slow" or each.name != name
    ]
    return name, replace(swarm, nodes=tuple(slower))


def stage_of(plan: Plan, name):
    found = [stage for each in plan.clusters for stage in each.stages if stage.node == name]
    return found[0] if found else None


def rate(plan, profile, swarm, config):
    return forecast(plan, profile, swarm, config).samples_per_second


@given(models, first_swarms, configs, histories)
@settings(max_examples=100)
def test_every_step_keeps_the_laws_and_moves_only_what_it_must(profile, swarm, config, history):
    told = list(steps(profile, swarm, config, history))
    for kind, name, now, plan, repair in told:
        check_laws(repair.plan, profile, now, config)
        check_untouched(name, plan, repair)
        check_moves(kind, name, plan, repair, profile)
        check_rate(kind, name, plan, repair, (profile, now, config))


@given(models, first_swarms, configs, histories)
@settings(max_examples=15)
def test_the_same_history_gives_the_same_plans(profile, swarm, config, history):
    once, again = ([step[4] for step in steps(profile, swarm, config, history)] for _ in range(2))
    assert once == again


def check_untouched(name, plan, repair):
    assert repair.plan is plan or repair.plan.plan_id == plan.plan_id + 1
    assert repair.plan.seed == plan.seed
    others = [each for each in plan.clusters if all(stage.node != name for stage in each.stages)]
    kept = [each for each in repair.plan.clusters if each in others]
    if " takes a place in cluster " in repair.reason:
        assert len(kept) == len(others) - 1
        assert len(repair.plan.clusters) == len(plan.clusters)
    else:
        assert kept == others
    assert repair.reason.startswith(f"{name} ")


def check_moves(kind, name, plan, repair, profile):
    stage = stage_of(plan, name)
    assert repair.moved_bytes == moved_bytes(plan, repair.plan, profile)
    if kind != "join" and stage is None:
        assert repair.moved_bytes == 0
        assert repair.plan.clusters == plan.clusters
    elif "its backup" in repair.reason or "it keeps" in repair.reason:
        assert repair.moved_bytes == 0
    elif " takes over " in repair.reason or " share stage" in repair.reason:
        assert len(repair.plan.clusters) == len(plan.clusters)
        assert repair.moved_bytes == pytest.approx(sum(profile.parameter_bytes[stage.start : stage.stop]))


def check_rate(kind, name, plan, repair, facts):
    """The reason tells the forecast, and giving the cluster up would not have been better."""
    after = rate(repair.plan, *facts)
    shown = f"{after:.3g}" if after < 999.5 else f"{after:.0f}"
    assert f" {shown} samples/s" in repair.reason or "no cluster is possible" in repair.reason
    gone = kind != "join" and stage_of(plan, name) is not None
    others = tuple(
        each for each in plan.clusters if not gone or all(stage.node != name for stage in each.stages)
    )
    rest = assemble_plan(others, *facts, seed=3, plan_id=1)
    assert after >= rate(rest, *facts) * (1 - 1e-12)
