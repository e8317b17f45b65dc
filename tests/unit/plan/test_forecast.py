"""The forecast against a cluster at work: real schedules on a virtual clock."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.lone_cluster import train_alone
from support.plan_world import SIMPLE, even_model, node, swarm_of

from ravnest.config import Averaging, Mean, PlanConfig, WireFormat
from ravnest.plan.assembly import assemble_plan
from ravnest.plan.cost import NodeTable, timing
from ravnest.plan.files import read_swarm
from ravnest.plan.forecast import cluster_rows, forecast, outline
from ravnest.plan.formation import cut_clusters, form_plan
from ravnest.plan.line import LineCost
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
    drawn = outline(plan, profile, swarm, CONFIG)
    assert drawn.cluster_rates == tuple(each.samples_per_second for each in predicted.clusters)
    assert (drawn.samples_per_second, drawn.round_seconds) == (
        predicted.samples_per_second,
        predicted.round_seconds,
    )
    for cluster, period, expected in zip(plan.clusters, times.seconds, predicted.clusters, strict=True):
        trained = train_alone(cluster, line, swarm, num_batches=min(400, 20 * len(cluster.stages) + 40))
        assert trained.period_seconds == pytest.approx(period, rel=0.1)
        assert trained.most_lag <= expected.lag


def hub_world(upload):
    """Two nodes that nobody can dial, one cluster; the hub sends so many bytes per second."""
    model = even_model(num_positions=4, crossing_mb=1)
    config = replace(SIMPLE, hub_bytes_per_second=upload, relay_bytes_per_second=1e9)
    swarm = swarm_of(*(node(name, is_reachable=False) for name in "ab"))
    (cluster,) = cut_clusters(model, swarm, config, ((0, 1),), is_averaged=False)
    plan = assemble_plan((cluster,), model, swarm, config, seed=0, plan_id=1)
    return forecast(plan, model, swarm, config)


def test_a_hub_whose_line_is_too_slow_sets_the_pace():
    free, fast, slow = hub_world(0.0), hub_world(1e9), hub_world(10e6)
    assert free.hub is None
    assert fast.samples_per_second == free.samples_per_second
    # Each batch of ten samples: 1 MB of samples, 1 MB of labels, 0.5 MB of bf16 each way.
    assert slow.samples_per_second == pytest.approx(10 * 10 / 3)
    assert slow.hub.busy_share == pytest.approx(free.samples_per_second / slow.samples_per_second)
    assert slow.hub.first_weights_seconds == pytest.approx(4.0)
    assert fast.hub.relay_bytes_per_second == pytest.approx(fast.samples_per_second / 10 * 1e6)


def test_rounds_through_the_relay_share_the_hubs_line():
    model = even_model(num_positions=4, parameter_mb=100)
    swarm = swarm_of(*(node(name, is_reachable=False) for name in "abcd"))
    found = []
    for upload in (0.0, 1e6):
        config = replace(
            SIMPLE, hub_bytes_per_second=upload, relay_bytes_per_second=1e6, max_round_seconds=1e9
        )
        clusters = cut_clusters(model, swarm, config, ((0, 1), (2, 3)), is_averaged=True)
        plan = assemble_plan(clusters, model, swarm, config, seed=0, plan_id=1)
        found.append(forecast(plan, model, swarm, config).round_seconds)
    num_pairs = 2 * len(plan.rings)
    assert found[1] == pytest.approx(num_pairs * found[0], rel=0.01)  # not the slowest pair but all of them


def rounds_of_four(mean, num_hidden):
    """Four nodes hold 400 MB each, one segment; hub and nodes send 10 MB/s, nothing is encoded."""
    model = even_model(num_positions=4, parameter_mb=100)
    link = {"upload_bytes_per_second": 10e6, "download_bytes_per_second": 10e6}
    swarm = swarm_of(
        *(node(name, 8000, is_reachable=k >= num_hidden, **link) for k, name in enumerate("abcd"))
    )
    config = replace(
        SIMPLE, hub_bytes_per_second=10e6, max_round_seconds=1e9, deltas=WireFormat.FP32, mean=mean
    )
    config = replace(config, averaging=Averaging.BLOCKING, relay_bytes_per_second=1e9)
    clusters = cut_clusters(model, swarm, config, tuple((k,) for k in range(4)), is_averaged=True)
    plan = assemble_plan(clusters, model, swarm, config, seed=0, plan_id=1)
    found = forecast(plan, model, swarm, config)
    return found.round_seconds, found.hub.round_bytes


def test_robust_rounds_need_the_hub_only_where_no_owner_can_be_dialled():
    along_ring, through_hub = rounds_of_four(Mean.PLAIN, num_hidden=3)
    assert through_hub == pytest.approx(2 * 1.5 * 400e6)  # two pairs of hidden neighbours, 1.5 times each
    assert along_ring == pytest.approx(120.0, rel=0.01)
    straight, through_hub = rounds_of_four(Mean.AUTO, num_hidden=3)
    assert through_hub == 0.0
    # The one that can be dialled gets 400 MB of three others and sends them as much.
    assert straight == pytest.approx(120.0, rel=0.01)
    half_hidden, through_hub = rounds_of_four(Mean.AUTO, num_hidden=2)
    assert through_hub == 0.0
    # Each of the two: half of what three others bring, and the other's half.
    assert half_hidden == pytest.approx(80.0, rel=0.01)
    for num_hidden in (0, 4):
        found = [rounds_of_four(mean, num_hidden) for mean in (Mean.AUTO, Mean.PLAIN)]
        assert found[0] == pytest.approx(found[1])
