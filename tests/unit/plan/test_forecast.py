"""The forecast against a cluster at work: real schedules on a virtual clock."""

from pathlib import Path

import pytest
from support.pipeline_world import PipelineWorld

from ravnest.config import PlanConfig
from ravnest.plan.cost import LineCost, NodeTable, timing
from ravnest.plan.files import read_swarm
from ravnest.plan.forecast import cluster_rows, forecast
from ravnest.plan.formation import form_plan
from ravnest.plan.populations import population
from ravnest.plan.profiles import builtin_profile

EXAMPLE = Path(__file__).parents[3] / "examples" / "swarm.toml"
CONFIG = PlanConfig(recover_seconds=0.0)


def swarm_named(name):
    return read_swarm(EXAMPLE.read_text(), "swarm.toml") if name == "example" else population(name, 4)


@pytest.mark.parametrize(
    ("model", "swarm"),
    [("gpt2-xl", "example"), ("gpt2-xl", "home:40"), ("gpt2-xl", "campus:20"), ("llama-7b", "lan:60")],
)
def test_a_cluster_runs_as_fast_as_forecast_and_no_staler(model, swarm):
    profile, swarm = builtin_profile(model), swarm_named(swarm)
    plan = form_plan(profile, swarm, CONFIG)
    line = LineCost(profile, CONFIG, is_averaged=len(plan.clusters) > 1)
    index = {node.name: k for k, node in enumerate(swarm.nodes)}
    times = timing(line, NodeTable.of(swarm, CONFIG), cluster_rows(plan.clusters, index))
    predicted = forecast(plan, profile, swarm, CONFIG)
    for cluster, period, expected in zip(plan.clusters, times.seconds, predicted.clusters, strict=True):
        world = PipelineWorld(cluster, line, swarm)
        assert world.run(num_batches=20 * len(cluster.stages) + 40) == pytest.approx(period, rel=0.1)
        assert max(world.lags) <= expected.lag
