"""A hub under load, pure: equal simulated peers in clusters of eight, a planner that groups them by hand."""

import time
from dataclasses import dataclass, replace

import numpy as np

from ravnest.config import Averaging, PlanConfig
from ravnest.hub.coordinator.events import JobGiven, JobSettings, MakePlan, PlanMade
from ravnest.ids import NodeId
from ravnest.plan.assembly import assemble_plan, build_clusters
from ravnest.plan.cost import NodeTable
from ravnest.plan.line import LineCost
from ravnest.plan.sharing import Sharing
from ravnest.plan.types import Cluster, ModelProfile, Node, Plan, Swarm
from ravnest.sim.world import World, WorldParts

CLUSTER_SIZE = 8
SPARE_SHARE = 0.1
_POSITIONS = 24
_SPEED = 1e12
_MICROBATCH_SECONDS = 0.4
CONFIG = PlanConfig(averaging=Averaging.OVERLAPPED, overhead_bytes=0.0)


def make_profile() -> ModelProfile:
    """Return a line of equal positions: a stage of an eighth takes its time for a microbatch."""
    work = _SPEED * _MICROBATCH_SECONDS * CLUSTER_SIZE / _POSITIONS / 3
    same = (1.0,) * _POSITIONS
    return ModelProfile(
        name="even",
        samples_per_batch=8,
        parameter_bytes=tuple(1e6 * each for each in same),
        matrix_bytes=tuple(0.0 * each for each in same),
        forward_flops=tuple(work * each for each in same),
        backward_flops=tuple(2 * work * each for each in same),
        saved_bytes=tuple(1e5 * each for each in same),
        crossing_bytes=(1e4,) * (_POSITIONS + 1),
    )


def make_node(number: int) -> Node:
    return Node(NodeId(f"peer-{number:05}"), 8e9, _SPEED, 1e8, 1e8, 0.005)


@dataclass
class GroupPlanner:
    """Groups nodes by eight, in order; a node that is gone is replaced by a spare."""

    cluster_size: int = CLUSTER_SIZE
    spare_share: float = SPARE_SHARE

    def make_plan(self, job: JobGiven, asked: MakePlan, now: float) -> PlanMade:
        swarm, microbatches = Swarm(asked.nodes), 8
        plan = self._repair(job, asked, asked.repairs) if asked.repairs else self._form(job, asked)
        sharing = Sharing(Averaging.OVERLAPPED, False, len(plan.clusters))
        assert {node.name for node in swarm.nodes} >= {s.node for c in plan.clusters for s in c.stages}
        reason = "a spare takes over" if asked.repairs else ""
        return PlanMade(asked.plan_id, plan, microbatches, "", now, reason, sharing)

    def _form(self, job: JobGiven, asked: MakePlan) -> Plan:
        nodes, size = asked.nodes, self.cluster_size
        num_clusters = max(1, int(len(nodes) * (1 - self.spare_share)) // size)
        orders = [[*reversed(range(k * size, (k + 1) * size))] for k in range(num_clusters)]
        edges = [round(k * _POSITIONS / size) for k in range(size + 1)]
        profile = job.profile.resize_batch(-(-job.settings.batch_size // 8))
        line, swarm = LineCost(profile, job.config, is_averaged=num_clusters > 1), Swarm(nodes)
        cuts = np.array([[*reversed(edges)]] * num_clusters)
        table = NodeTable.of(swarm, job.config)
        clusters = build_clusters(line, table, swarm, orders, cuts)
        clusters = [replace(each, accumulate=8) for each in clusters]
        return assemble_plan(tuple(clusters), job.profile, swarm, job.config, 0, asked.plan_id)

    def _repair(self, job: JobGiven, asked: MakePlan, plan: Plan) -> Plan:
        here = {node.name for node in asked.nodes}
        used = {stage.node for cluster in plan.clusters for stage in cluster.stages}
        free = (node.name for node in asked.nodes if node.name not in used)
        changed = dict(zip(sorted(used - here), free, strict=False))
        left = {name for name in used if name in here or name in changed}
        clusters = tuple(
            Cluster(
                tuple(replace(stage, node=changed.get(stage.node, stage.node)) for stage in each.stages),
                each.accumulate,
            )
            if any(stage.node in changed for stage in each.stages)
            else each
            for each in plan.clusters
            if all(stage.node in left for stage in each.stages)
        )
        return assemble_plan(clusters, job.profile, Swarm(asked.nodes), job.config, 0, asked.plan_id)


def make_world(
    num_peers: int, planner: GroupPlanner | None = None, has_laws: bool = False, is_measured: bool = False
) -> World:
    """Return a hub with so many peers that will join in the first seconds, and be measured if need be."""
    swarm = Swarm(tuple(make_node(number) for number in range(num_peers)))
    settings = JobSettings(
        num_samples=10**8,
        num_validation=0,
        batch_size=64,
        epochs=1,
        rates=(1.0,),
        is_whole_batch=True,
        settle_seconds=1.0,
        average_every=10,
    )
    parts = WorldParts(
        planner or GroupPlanner(), time.process_time, is_measured=is_measured, has_laws=has_laws
    )
    world = World(JobGiven(make_profile(), CONFIG, settings, 0.0), swarm, parts)
    for number, node in enumerate(swarm.nodes):
        world.timeline.at(5.0 * number / num_peers, world.join, node.name)
    return world


def take_costs(world: World) -> dict[str, tuple[int, float]]:
    """Return the events since the last time, by kind: how many, and CPU seconds each."""
    found = {name: (times, seconds / times) for name, (times, seconds) in world.cost.by_event.items()}
    world.cost.by_event.clear()
    return found
