"""Laws of whole swarms: whoever comes and goes, whose link changes, whenever the hub restarts, books balance.

Two small swarms here; `make swarms SEEDS=100 NODES=1000` tries large ones, as `make fuzz` does at night.
"""

import os
import random

import pytest
from support.sim_world import play, small_job, small_swarm

from ravnest.config import PlanConfig
from ravnest.plan.populations import population
from ravnest.plan.profiles import builtin_profile
from ravnest.sim.churn import made_up_changes, made_up_link_changes
from ravnest.sim.run import PARTS, SimulationSettings, make_job

SEEDS = int(os.environ.get("RAVNEST_SEEDS", "2"))
NODES = int(os.environ.get("RAVNEST_NODES", "0"))  # home PCs in a swarm; 0: a few quick nodes
_HOURS = 0.5  # of home PCs


@pytest.mark.timeout(3600 if NODES else 60)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_law_is_broken(seed):
    world = _play_home(seed) if NODES else _play_small(seed)
    assert world.laws.num_checks > 20


def _play_small(seed):
    draw = random.Random(seed)
    swarm = small_swarm(draw.randint(4, 20), draw.choice([150.0, 250.0, 1000.0]), uptime_seconds=300.0)
    changes = made_up_changes(swarm, seed, 0.1, draw.choice([0.5, 1.0, 3.0]))
    job = small_job(num_validation=draw.choice([0, 40]), checkpoint_every=draw.choice([None, 60.0]))
    restarts = tuple(sorted(draw.uniform(30.0, 300.0) for _ in range(draw.randint(0, 2))))
    links = made_up_link_changes(swarm, seed, 0.1, 2.0)
    return play(swarm, (*changes, *links), job=job, restarts=restarts, seed=seed)


def _play_home(seed):
    """Half an hour of gpt2-xl; nodes go four times as often as they say, and the hub restarts."""
    swarm = population(f"home:{NODES}", seed)
    restart = random.Random(seed).uniform(600.0, 3600.0 * _HOURS)
    wanted = SimulationSettings(_HOURS, seed, checkpoint_seconds=300.0, restarts=(restart,))
    job = make_job(builtin_profile("gpt2-xl"), PlanConfig(hub_bytes_per_second=1e9), wanted)
    links = made_up_link_changes(swarm, seed, _HOURS, 0.5)
    changes = (*made_up_changes(swarm, seed, _HOURS, 4.0), *links)
    return play(swarm, changes, _HOURS, PARTS, job, seed=seed, restarts=wanted.restarts)
