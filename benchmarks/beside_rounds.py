"""Training while clusters average all the time, against training that never averages, on a real swarm."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks import swarm as swarms
from benchmarks.measure import spread
from ravnest.config import PlanConfig
from ravnest.hub.coordinator.planner import FormPlan
from ravnest.plan.assembly import assemble_plan, build_clusters
from ravnest.plan.cost import NodeTable
from ravnest.plan.line import LineCost
from ravnest.plan.types import ModelProfile, Plan, Swarm

TRAINED, TRAINED_CUTS, MICROBATCH_SECONDS = "thin-1024x6-b16", ((3,), (2, 4)), 0.1  # 25 MB in six blocks
SLOW_LINK = (6.25e6, 0.005)  # bytes per second and seconds one way, between any two peers


def compare(num_turns: int) -> dict[str, Any]:
    """Compare the rate with rounds and without, in turn."""
    rates: dict[str, list[float]] = {"with": [], "without": []}
    num_rounds, seconds = [], []
    for _ in range(num_turns):
        for name, every in (("with", 2), ("without", 10**6)):
            record = _train(every)
            rates[name].append(_rate(record))
            ended = [news for _, news in record.news if type(news).__name__ == "RoundEnded"]
            if name == "with":
                num_rounds.append(sum(news.is_committed for news in ended))
                seconds += [news.seconds for news in ended if news.is_committed and not news.is_final]
    shares = [one / other for one, other in zip(rates["with"], rates["without"], strict=True)]
    return {
        **{f"{name}_samples_per_second": spread(each) for name, each in rates.items()},
        "share": spread(shares),
        "num_rounds": min(num_rounds),
        "round_seconds": spread(seconds),
    }


def _train(average_every: int) -> Any:
    """Train on emulated devices, so that stages take no CPU from each other or from averaging."""
    from benchmarks.models import build, find_cuts, make_job
    from ravnest.model.blueprint.slicing import slice_blueprint
    from ravnest.model.stage.profile import count_flops, measure

    made = build(TRAINED)
    job = replace(make_job(TRAINED, 8, num_updates=36), average_every=average_every)
    blueprint = job.capture().blueprint
    profile = measure(blueprint, made.microbatch_size)
    cuts = [find_cuts(made, profile, inner) for inner in TRAINED_CUTS]
    speeds = []
    for inner in cuts:
        edges = [0, *inner, blueprint.num_positions]
        for edge in pairwise(edges):
            work = sum(count_flops(slice_blueprint(blueprint, *edge), made.microbatch_size))
            speeds.append(work / MICROBATCH_SECONDS)
    setting = swarms.Setting(speeds, (), is_emulated=True, link=swarms.LinkSpeed(*SLOW_LINK))
    return swarms.train(job, setting, form=partial(_clusters, cuts))


def _clusters(cuts: Sequence[Sequence[int]], record: swarms.Record, setting: swarms.Setting) -> FormPlan:
    """Form these clusters of the peers in the order of their names."""

    def form(profile: ModelProfile, swarm: Swarm, config: PlanConfig, seed: int, plan_id: int) -> Plan:
        peers = sorted(swarm.nodes, key=lambda node: node.name)
        assert setting.link is not None
        swarm = Swarm(tuple(swarms.place_behind(node, setting.link) for node in peers))
        line, longest, first = LineCost(profile, config, is_averaged=True), max(map(len, cuts)) + 2, 0
        orders, rows = [], np.zeros((len(cuts), longest), np.int64)
        for row, inner in enumerate(cuts):
            orders.append(list(reversed(range(first, first + len(inner) + 1))))
            first += len(inner) + 1
            edges = [profile.num_positions, *reversed(inner), 0]
            rows[row, : len(edges)] = edges
        clusters = build_clusters(line, NodeTable.of(swarm, config), swarm, orders, rows)
        record.profile, record.config = profile, config
        return assemble_plan(tuple(clusters), profile, swarm, config, seed, plan_id)

    return form


def _rate(record: Any) -> float:
    """Return the samples per second of all clusters after the start and before the first is done."""
    times = sorted(record.leaf_times)
    first, last = int(0.25 * len(times)), int(0.85 * len(times))
    return sum(size for _, size in times[first + 1 : last + 1]) / (times[last][0] - times[first][0])
