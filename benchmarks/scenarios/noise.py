"""How much of the rate survives wrong measurements of bandwidth, and what repairs recover."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.measure import say, spread, table
from ravnest.config import PlanConfig
from ravnest.plan.assembly import assemble_plan
from ravnest.plan.forecast import forecast
from ravnest.plan.formation import cut_clusters, form_plan
from ravnest.plan.populations import population
from ravnest.plan.profiles import builtin_profile
from ravnest.plan.repair import node_slowed
from ravnest.plan.types import ModelProfile, Plan, Swarm

PAGE = Path(__file__).parents[2] / "docs" / "sensitivity.md"


def run(quick: bool) -> tuple[dict[str, object], str, list[str]]:
    profile = builtin_profile("gpt2-xl")
    figures: dict[str, object] = {}
    rows = []
    nodes, count = (50, 2) if quick else (200, 10)
    for ratio in (1.0, 4.0):
        config = PlanConfig(speed_ratio=ratio)
        for noise in (0.1, 0.3, 0.5):
            shares = [_shares(profile, config, noise, nodes, seed) for seed in range(count)]
            columns = {name: spread([share[name] for share in shares]) for name in shares[0]}
            figures[f"speed_ratio_{ratio:g}_noise_{noise:g}"] = columns
            cells = [f"{c['median']:.2f} ({c['min']:.2f}-{c['max']:.2f})" for c in columns.values()]
            rows.append([f"{noise:.0%}", f"{ratio:g}", *cells])
            say(f"noise {noise:.0%}, speed ratio {ratio:g}: {cells}")
    head = ["error of bandwidth", "speed_ratio", "plan as made", "re-cut", "repaired", "re-planned"]
    report = _METHOD.format(nodes=nodes, count=count) + table(head, rows)
    if not quick:
        PAGE.write_text(f"# What wrong measurements cost\n\n{report}\n\n{_READING}")
    missed = [] if all(_is_ordered(columns) for columns in figures.values()) else ["re-planning lost rate"]
    return figures, report, missed


def _shares(
    profile: ModelProfile, config: PlanConfig, noise: float, nodes: int, seed: int
) -> dict[str, float]:
    """Plan with measured bandwidths, run with true ones; shares of the best plan."""
    truth = population(f"home:{nodes}", seed)
    measured = _disturb(truth, noise, seed)
    plan = form_plan(profile, measured, config)
    place = {node.name: k for k, node in enumerate(truth.nodes)}
    orders = tuple(tuple(place[s.node] for s in reversed(cluster.stages)) for cluster in plan.clusters)
    clusters = cut_clusters(profile, truth, config, orders, is_averaged=len(orders) > 1)
    recut = assemble_plan(clusters, profile, truth, config, seed=0, plan_id=2)
    plans = {
        "as_made": plan,
        "recut": recut,
        "repaired": _repair(plan, profile, truth, config),
        "replanned": form_plan(profile, truth, config),
    }
    rates = {name: _rate(each, profile, truth, config) for name, each in plans.items()}
    rates["recut"] = max(rates["recut"], rates["as_made"])  # nobody applies cuts that are worse
    best = max(rates.values())  # the search is not exact: a lucky mistake can win
    return {name: rate / best for name, rate in rates.items()}


def _repair(plan: Plan, profile: ModelProfile, truth: Swarm, config: PlanConfig) -> Plan:
    """Tell the planner, cluster by cluster, that the stage which limits it is slower than thought; twice."""
    for _ in range(2):
        for number in range(len(plan.clusters)):
            if number < len(plan.clusters):
                stages = forecast(plan, profile, truth, config).clusters[number].stages
                slowest = max(stages, key=lambda s: max(s.compute_seconds, s.send_seconds, s.receive_seconds))
                plan = node_slowed(plan, slowest.stage.node, profile, truth, config).plan
    return plan


def _disturb(swarm: Swarm, noise: float, seed: int) -> Swarm:
    rng = np.random.default_rng([seed, 7])
    factors = np.exp(noise * rng.standard_normal((len(swarm.nodes), 2)))
    nodes = tuple(
        replace(
            node,
            upload_bytes_per_second=node.upload_bytes_per_second * up,
            download_bytes_per_second=node.download_bytes_per_second * down,
        )
        for node, (up, down) in zip(swarm.nodes, factors.tolist(), strict=True)
    )
    return replace(swarm, nodes=nodes)


def _rate(plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig) -> float:
    return forecast(plan, profile, swarm, config).samples_per_second


def _is_ordered(columns: object) -> bool:
    assert isinstance(columns, dict)
    return bool(columns["as_made"]["median"] <= columns["recut"]["median"] * 1.02)


_METHOD = """{nodes} home PCs, GPT-2 XL, {count} swarms. The planner sees bandwidths multiplied by exp(error
x normal noise); the plan then runs on the true ones. Figures are shares of the most samples
per second that any of the plans makes: median (smallest-largest). *Re-cut* keeps every
cluster's nodes and order and only moves the cuts; *repaired* reports the slowest stage of each
cluster to plan repair, twice; *re-planned* starts from scratch with the truth. This page is
written by `python -m benchmarks.run noise`.

"""
_READING = """Reading: a re-cut alone recovers little for a transformer, because every cut crosses the same
bytes: a slow link is cured by another place or another node, which is what repair and
re-planning do. So probe links several times before planning, measure them again during
training, repair first (it moves one stage), and plan anew when the gain pays for moving the
parameters. The speed ratio between clusters matters: when all clusters must run equally fast,
one wrong link holds back everybody.
"""
