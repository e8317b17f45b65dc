"""Small simulated swarms for tests: a model of six equal positions, quick plans, real decisions."""

from dataclasses import replace

from support.hub_world import MANY_CLUSTERS, QUICK_PLANNER
from support.plan_world import even_model, node, swarm_of

from ravnest.hub.coordinator.events import JobGiven, JobSettings
from ravnest.sim.churn import Change, ChangeKind
from ravnest.sim.run import PARTS, SimulationSettings, run_simulation

PARTS_FOR_TESTS = replace(PARTS, planner=QUICK_PLANNER)


def small_job(**changes):
    settings = {
        "is_whole_batch": True,
        "num_samples": 60_000,
        "num_validation": 0,
        "batch_size": 40,
        "epochs": 1,
        "rates": (0.1,),
        "average_every": 20,
        "settle_seconds": 5.0,
    }
    return JobGiven(even_model(6), MANY_CLUSTERS, JobSettings(**(settings | changes)), 0.0)


def small_swarm(count=9, memory_mb=250.0, **facts):
    names = [chr(ord("a") + index) for index in range(count)]
    return swarm_of(*(node(name, memory_mb, gflops=10.0, **facts) for name in names))


def joins(swarm):
    return tuple(Change(0.1 * k, each.name, ChangeKind.JOIN) for k, each in enumerate(swarm.nodes))


def play(swarm, changes, hours=0.1, parts=PARTS_FOR_TESTS, job=None, **settings):
    """Let a small swarm train; return its world."""
    given = job or small_job()
    return run_simulation(given, swarm, changes, SimulationSettings(hours=hours, **settings), parts)
