"""Plans made by hand, without a search: clusters of given sizes on a line of given length."""

from dataclasses import dataclass
from itertools import pairwise

from ravnest.config import PlanConfig
from ravnest.ids import NodeId
from ravnest.plan.assembly import assemble_plan
from ravnest.plan.forecast import Forecast, forecast
from ravnest.plan.types import Cluster, ModelProfile, Node, Plan, Stage, Swarm


@dataclass(frozen=True)
class Sample:
    plan: Plan
    predicted: Forecast
    profile: ModelProfile
    swarm: Swarm
    config: PlanConfig

    @property
    def facts(self):
        return self.plan, self.predicted, self.profile, self.swarm


def sample(*sizes, spares=0, positions=40, config=None, names=None, **node_facts):
    """Return clusters with `sizes` stages each; every node has the given facts."""
    config = config or PlanConfig()
    profile = profile_of(positions)
    number = sum(sizes) + spares
    names = names or [f"pc-{k:03}" for k in range(number)]
    upload = node_facts.pop("upload", 1e7)
    nodes = [
        Node(NodeId(name), 8e9, 1e12 * (1 + k % 3), upload, 2 * upload, **node_facts)
        for k, name in enumerate(names)
    ]
    swarm = Swarm(tuple(nodes))
    waiting = iter(nodes)
    formats = config.activation_formats[0], config.gradient_formats[0]
    clusters = []
    for k, size in enumerate(sizes):
        inner = [min(positions - 1, max(1, round(positions * j / size) + (k % 2))) for j in range(1, size)]
        cuts = [0, *inner, positions]
        stages = [
            Stage(next(waiting).name, start, stop, 2 * (size - j) - 1, False, *formats)
            for j, (start, stop) in enumerate(pairwise(cuts))
        ]
        clusters.append(Cluster(tuple(stages), accumulate=size))
    plan = assemble_plan(tuple(clusters), profile, swarm, config, seed=7, plan_id=3)
    return Sample(plan, forecast(plan, profile, swarm, config), profile, swarm, config)


def profile_of(positions):
    return ModelProfile(
        name="sample-model",
        samples_per_batch=4,
        parameter_bytes=(2e7,) * positions,
        matrix_bytes=(1e7,) * positions,
        forward_flops=(1e10,) * positions,
        backward_flops=(2e10,) * positions,
        saved_bytes=(1e6,) * positions,
        crossing_bytes=(1e4, *(4e6,) * (positions - 1), 1e4),
    )
