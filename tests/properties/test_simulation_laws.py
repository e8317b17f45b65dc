"""Laws of whole swarms: whoever comes and goes, and whenever the hub restarts, books balance.

Two seeds here; RAVNEST_SEEDS=100 at night.
"""

import os
import random

import pytest
from support.sim_world import play, small_job, small_swarm

from ravnest.sim.churn import made_up_changes

SEEDS = int(os.environ.get("RAVNEST_SEEDS", "2"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_law_is_broken(seed):
    draw = random.Random(seed)
    swarm = small_swarm(draw.randint(4, 20), draw.choice([150.0, 250.0, 1000.0]), uptime_seconds=300.0)
    changes = made_up_changes(swarm, seed, 0.1, draw.choice([0.5, 1.0, 3.0]))
    job = small_job(num_validation=draw.choice([0, 40]), checkpoint_every=draw.choice([None, 60.0]))
    restarts = tuple(sorted(draw.uniform(30.0, 300.0) for _ in range(draw.randint(0, 2))))
    world = play(swarm, changes, job=job, restarts=restarts, seed=seed)
    assert world.laws.num_checks > 20
