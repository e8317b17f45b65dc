"""The hub's planner: it answers a MakePlan with a plan, a repaired plan, or what is short.

A planner also cuts batches. A batch is what one update sees; it travels as microbatches, so that the pipeline
stays full. All clusters use the same number of microbatches, as many as their windows and the lag bound need.
The server runs the planner in a thread and takes it as an argument.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

from ravnest.config import SEARCH_BUDGET, PlanConfig, SearchBudget
from ravnest.errors import PlanError
from ravnest.hub.coordinator.events import JobGiven, MakePlan, PlanMade
from ravnest.ids import NodeId
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


class Planner(Protocol):
    """Answers a MakePlan. It is pure: the same facts give the same plan."""

    def make_plan(self, job: JobGiven, asked: MakePlan, now: float) -> PlanMade:
        """Return a first plan, a repaired one, or the shortage that prevents one."""


class FormPlan(Protocol):
    """Forms a first plan, or raises PlanError."""

    def __call__(
        self, profile: ModelProfile, swarm: Swarm, config: PlanConfig, seed: int, plan_id: int, /
    ) -> Plan:
        """Return a plan with this number."""


@dataclass(frozen=True, slots=True)
class SearchPlanner:
    """The planner that ships: it searches for first plans, and repairs the plan that is followed."""

    budget: SearchBudget = SEARCH_BUDGET
    form: FormPlan | None = None  # forms first plans in place of the search

    def make_plan(self, job: JobGiven, asked: MakePlan, now: float) -> PlanMade:
        """Plan, choose the microbatches that its windows need, and plan with these; or say what is short."""
        if not asked.nodes:  # they are still to be measured, or to come back
            return PlanMade(asked.plan_id, None, 1, "", now)
        if asked.repairs is not None:
            return self._repair(job, asked, asked.repairs, now)
        settings = job.settings

        def form(count: int) -> tuple[Plan, int]:
            return self._form(job, asked, count), count

        try:
            if settings.microbatches:
                plan, count = form(min(settings.microbatches, settings.batch_size, MOST_OF_LEASE))
            else:
                plan, count = _choose(form, _most(job, asked))
        except PlanError as shortage:
            return PlanMade(asked.plan_id, None, 1, str(shortage), now)
        return PlanMade(asked.plan_id, _accumulate(plan, count, job.config.max_lag), count, "", now)

    def _form(self, job: JobGiven, asked: MakePlan, count: int) -> Plan:
        profile, config = profile_microbatch(job, count), configure_microbatch(job, count)
        swarm, seed = Swarm(asked.nodes), job.settings.seed
        if self.form is not None:
            return self.form(profile, swarm, config, seed, asked.plan_id)
        return form_plan(profile, swarm, config, seed, asked.plan_id, self.budget)

    def _repair(self, job: JobGiven, asked: MakePlan, plan: Plan, now: float) -> PlanMade:
        """Repair the plan node by node: first those that left, then the changed ones, then new ones."""
        profile = profile_microbatch(job, asked.microbatches)
        config = configure_microbatch(job, asked.microbatches)
        here = [*asked.gone, *asked.nodes]
        reasons: list[str] = []
        for node in asked.gone:
            before = Swarm(tuple(here))
            here.remove(node)
            repair = node_left(plan, node.name, profile, Swarm(tuple(here)), config, before, self.budget)
            plan, reasons = repair.plan, [*reasons, repair.reason]
        for known in asked.changed:
            before = Swarm(tuple(known if node.name == known.name else node for node in here))
            repair = node_slowed(plan, known.name, profile, Swarm(tuple(here)), config, before, self.budget)
            plan, reasons = repair.plan, [*reasons, repair.reason]
        for node in asked.nodes:
            if node.name not in _nodes_of(plan):
                repair = node_joined(plan, node.name, profile, Swarm(tuple(here)), config, self.budget)
                plan, reasons = repair.plan, [*reasons, repair.reason]
        if not plan.clusters:
            return PlanMade(
                asked.plan_id, None, asked.microbatches, "", now
            )  # a first plan says what is short
        repaired = _accumulate(replace(plan, plan_id=asked.plan_id), asked.microbatches, job.config.max_lag)
        return PlanMade(asked.plan_id, repaired, asked.microbatches, "", now, "; ".join(reasons))


SEARCH_PLANNER = SearchPlanner()


def _nodes_of(plan: Plan) -> set[NodeId]:
    return {*plan.spares, *(stage.node for each in plan.clusters for stage in each.stages)}


def _most(job: JobGiven, asked: MakePlan) -> int:
    """Return the largest number of microbatches that a batch may be cut into."""
    flops = sum(job.profile.forward_flops) + sum(job.profile.backward_flops)
    fastest = max(node.flops_per_second for node in asked.nodes)
    worth = ceil(_LEAST_SECONDS * fastest * job.profile.samples_per_batch / flops) if flops else 1
    least = max(job.settings.least_samples, worth)
    return min(max(1, job.settings.batch_size // least), MOST_OF_LEASE)


def _choose(form: Callable[[int], tuple[Plan, int]], most: int) -> tuple[Plan, int]:
    """Plan, then plan again with as many microbatches as keep the lag small with these windows."""
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
