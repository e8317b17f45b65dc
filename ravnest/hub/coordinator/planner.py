"""How a batch travels: as microbatches, so that a pipeline is full although an update sees one batch.

A batch is what one update sees, as in a single process. It is cut into equally many pieces in all clusters,
as many as keep the lag bound with the windows that keep everyone busy. hub.server has
plans made where that delays nobody.
"""

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from ravnest.config import PlanConfig
from ravnest.errors import PlanError
from ravnest.hub.coordinator.events import JobGiven, MakePlan, PlanMade
from ravnest.plan.formation import form_plan
from ravnest.plan.profiles import resize_batch
from ravnest.plan.repair import node_joined, node_left, node_slowed
from ravnest.plan.types import ModelProfile, Plan, Swarm

MOST_OF_LEASE = 1024  # microbatches: what one message may list
_LEAST_SECONDS = 3e-3  # of a microbatch, for the whole model on the fastest node: less is all overhead
_USUAL_LAG = 0.75  # updates, where a batch can be cut so finely: a whole one costs 1 % of loss, this half
_LEASE_BYTES = 1 << 20  # of samples: larger leases save few messages, and their root keeps them all
_TRIES = 3  # smaller microbatches widen windows, and those ask for more of them


def cut_batches(num_samples: int, batch_size: int, microbatches: int) -> tuple[int, ...]:
    """Return the sizes of the microbatches of so many samples, batch after batch, as equal as possible."""
    sizes: list[int] = []
    for start in range(0, num_samples, batch_size):
        size = min(batch_size, num_samples - start)
        count = min(microbatches, size)  # those of a short last batch still hold a sample each
        sizes += [size // count + (index < size % count) for index in range(count)]
    return tuple(sizes)


def lease_batches(job: JobGiven, plan: Plan, microbatches: int) -> int:
    """Return the batches of a lease: twice those in flight, so that no root runs out; more of small ones."""
    widest = max(cluster.stages[0].window for cluster in plan.clusters)
    batch_bytes = resize_batch(job.profile, job.settings.batch_size).crossing_bytes[0]
    wanted = max(ceil(2 * widest / microbatches), int(_LEASE_BYTES // max(batch_bytes, 1.0)))
    return min(job.settings.chunk_batches, wanted, max(1, MOST_OF_LEASE // microbatches))


def profile_microbatch(job: JobGiven, microbatches: int) -> ModelProfile:
    """Return the profile of a job whose batches travel in so many pieces."""
    return resize_batch(job.profile, -(-job.settings.batch_size // microbatches))


def configure_microbatch(job: JobGiven, microbatches: int) -> PlanConfig:
    """Return what the planner assumes when batches travel in so many pieces."""
    return replace(job.config, accumulates=microbatches > 1)


def make_plan(job: JobGiven, asked: MakePlan, now: float) -> PlanMade:
    """Plan, choose the microbatches that its windows ask for, and plan with these; or say what is short."""
    if not asked.nodes:  # they are still to be measured, or to come back
        return PlanMade(asked.plan_id, None, 1, "", now)
    if asked.repairs is not None:
        return _repair(job, asked, asked.repairs, now)
    settings, swarm = job.settings, Swarm(asked.nodes)

    def form(count: int) -> tuple[Plan, int]:
        profile, config = profile_microbatch(job, count), configure_microbatch(job, count)
        return form_plan(profile, swarm, config, settings.seed, asked.plan_id), count

    try:
        if settings.microbatches:
            plan, count = form(min(settings.microbatches, settings.batch_size, MOST_OF_LEASE))
        else:
            plan, count = _choose(form, _most(job, asked))
    except PlanError as shortage:
        return PlanMade(asked.plan_id, None, 1, str(shortage), now)
    return PlanMade(asked.plan_id, _accumulate(plan, count, job.config.max_lag), count, "", now)


def _repair(job: JobGiven, asked: MakePlan, plan: Plan, now: float) -> PlanMade:
    """Let one after the other go, change, then come; batches travel as before."""
    profile = profile_microbatch(job, asked.microbatches)
    config = configure_microbatch(job, asked.microbatches)
    here = [*asked.gone, *asked.nodes]
    reasons: list[str] = []
    for node in asked.gone:
        before = Swarm(tuple(here))
        here.remove(node)
        repair = node_left(plan, node.name, profile, Swarm(tuple(here)), config, before)
        plan, reasons = repair.plan, [*reasons, repair.reason]
    for known in asked.changed:
        before = Swarm(tuple(known if node.name == known.name else node for node in here))
        repair = node_slowed(plan, known.name, profile, Swarm(tuple(here)), config, before)
        plan, reasons = repair.plan, [*reasons, repair.reason]
    for node in asked.nodes:
        if node.name not in (*plan.spares, *(stage.node for each in plan.clusters for stage in each.stages)):
            repair = node_joined(plan, node.name, profile, Swarm(tuple(here)), config)
            plan, reasons = repair.plan, [*reasons, repair.reason]
    if not plan.clusters:
        return PlanMade(asked.plan_id, None, asked.microbatches, "", now)  # what is short a first plan says
    mended = _accumulate(replace(plan, plan_id=asked.plan_id), asked.microbatches, job.config.max_lag)
    return PlanMade(asked.plan_id, mended, asked.microbatches, "", now, "; ".join(reasons))


def _most(job: JobGiven, asked: MakePlan) -> int:
    """Return into how many microbatches a batch may be cut."""
    flops = sum(job.profile.forward_flops) + sum(job.profile.backward_flops)
    fastest = max(node.flops_per_second for node in asked.nodes)
    worth = ceil(_LEAST_SECONDS * fastest * job.profile.samples_per_batch / flops) if flops else 1
    least = max(job.settings.least_samples, worth)
    return min(max(1, job.settings.batch_size // least), MOST_OF_LEASE)


def _choose(form: Callable[[int], tuple[Plan, int]], most: int) -> tuple[Plan, int]:
    """Plan, and again in as many microbatches as keep lag small with the windows it has."""
    try:
        plan, count = form(1)
    except PlanError:
        if most == 1:
            raise
        plan, count = form(most)  # what is short is perhaps the memory for whole batches
    for _ in range(_TRIES):
        widest = max(cluster.stages[0].window for cluster in plan.clusters)
        asked = min(most, ceil((widest - 1) / _USUAL_LAG))
        if asked <= count:
            break
        plan, count = form(asked)
    return plan, count


def _accumulate(plan: Plan, count: int, max_lag: int) -> Plan:
    """Let every cluster make an update of so many microbatches, with windows that keep the lag bound."""
    widest = count * max_lag + 1
    clusters = []
    for cluster in plan.clusters:
        stages = (replace(stage, window=min(stage.window, widest)) for stage in cluster.stages)
        clusters.append(replace(cluster, stages=tuple(stages), accumulate=count))
    return replace(plan, clusters=tuple(clusters))
