"""Simulates a swarm for some hours: from its nodes and their changes to a report of plain values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ravnest.config import RESERVE, PlanConfig
from ravnest.hub.coordinator.events import JobGiven, JobSettings
from ravnest.hub.coordinator.planner import SEARCH_PLANNER
from ravnest.plan.types import ModelProfile, Swarm
from ravnest.sim.churn import AnyChange
from ravnest.sim.world import HUB_SPEEDS, World, WorldParts

SIMULATION_SCHEMA = "ravnest.simulation/1"
PARTS = WorldParts(SEARCH_PLANNER)


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """What is simulated: the job, for how long, and when the hub restarts."""

    hours: float = 1.0
    seed: int = 0
    batch_size: int = 512  # samples of an update
    num_updates: int = 100_000  # of the job, most of which lie beyond what is simulated
    num_validation: int = 0
    evaluate_updates: int = 0
    checkpoint_seconds: float | None = None
    restarts: tuple[float, ...] = ()  # seconds after which the hub dies and comes back
    away_seconds: float = HUB_SPEEDS.away_seconds  # for so long


def make_job(profile: ModelProfile, config: PlanConfig, wanted: SimulationSettings) -> JobGiven:
    """Return the job of a simulation."""
    settings = JobSettings(
        num_samples=wanted.num_updates * wanted.batch_size,
        num_validation=wanted.num_validation,
        batch_size=wanted.batch_size,
        epochs=1,
        rates=(1.0,),
        seed=wanted.seed,
        evaluate_every=0,
        evaluate_updates=wanted.evaluate_updates,
        checkpoint_every=wanted.checkpoint_seconds,
        settle_seconds=10.0,
        reserve_seconds=RESERVE.seconds if wanted.restarts else 0.0,  # without a restart it changes nothing
    )
    return JobGiven(profile, config, settings, now=0.0)


def run_simulation(
    job: JobGiven,
    swarm: Swarm,
    changes: Sequence[AnyChange],
    wanted: SimulationSettings,
    parts: WorldParts = PARTS,
    watch: Callable[[World], object] = lambda _: None,
) -> World:
    """Let a swarm train for some hours; return the world as it is then. `watch` sees it every minute."""
    speeds = replace(parts.hub_speeds, away_seconds=wanted.away_seconds)
    parts = replace(parts, keeps_log=bool(wanted.restarts), hub_speeds=speeds)
    world = World(job, swarm, parts, wanted.seed)
    for change in changes:
        if change.seconds <= 3600.0 * wanted.hours:
            world.plan_change(change)
    for seconds in wanted.restarts:
        world.timeline.at(seconds, world.restart_hub)
    for minute in range(1, int(60 * wanted.hours) + 1):
        world.run(60.0 * minute)
        watch(world)
    world.run(3600.0 * wanted.hours)
    if parts.has_laws:
        world.laws.check_all(world.hub)
    return world


def simulation_report(world: World, swarm: Swarm, wanted: SimulationSettings) -> dict[str, object]:
    """Return what was found as plain values, the same for the same seed."""
    job = world.job
    plan = {
        "clusters": len(world.hub.clusters),
        "stages": sum(len(cluster.nodes) for cluster in world.hub.clusters),
        "averaging": str(world.hub.placement.sharing.averaging),
    }
    facts = {
        "model": job.profile.name,
        "nodes": len(swarm.nodes),
        "hours": wanted.hours,
        "seed": wanted.seed,
        "batch_size": wanted.batch_size,
        "hub_bytes_per_second": job.config.hub_bytes_per_second,
    }
    return {"schema": SIMULATION_SCHEMA, "settings": facts, "plan": plan, **world.recorder.report()}
