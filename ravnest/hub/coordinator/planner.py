"""The hub's planner: it answers a MakePlan with a plan, a repaired plan, or what is short.

A planner also says how batches are cut. A batch is what one update sees; it travels as microbatches, so that
the pipeline stays full. All clusters use the same number of microbatches, as many as their windows and the
lag bound need. The server runs the planner in a thread and takes it as an argument.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

from ravnest.config import SEARCH_BUDGET, Averaging, PlanConfig, SearchBudget
from ravnest.errors import PlanError
from ravnest.hub.coordinator.events import JobGiven, JobSettings, MakePlan, PlanMade
from ravnest.ids import NodeId
from ravnest.plan.formation import form_plan
from ravnest.plan.repair import Repair, node_joined, node_left, node_slowed
from ravnest.plan.sharing import LEAST_UPDATES, Sharing, TrainingLength, efficiency, share_job
from ravnest.plan.types import ModelProfile, Plan, Swarm
from ravnest.units import show_count

MOST_OF_LEASE = 1024  # microbatches: what one message may list
_LEAST_SECONDS = 3e-3  # of a microbatch, for the whole model on the fastest node: less is all overhead
_USUAL_LAG = 0.75  # updates, where a batch can be cut so finely: a whole one costs 1 % of loss, this half
_LEASE_BYTES = 1 << 20  # of samples: larger leases save few messages, and their root keeps them all
_FEW_CLUSTERS = 4  # so many are all tried
_GAIN = 1.05  # a plan with more clusters must be so much better
_TRIES = 3  # smaller microbatches widen windows, and those ask for more of them


def lease_batches(job: JobGiven, plan: Plan, microbatches: int) -> int:
    """Return the batches of a lease: twice those in flight, so that no root runs out; more of small ones."""
    widest = max(cluster.stages[0].window for cluster in plan.clusters)
    batch_bytes = job.profile.resize_batch(job.settings.batch_size).crossing_bytes[0]
    wanted = max(ceil(2 * widest / microbatches), int(_LEASE_BYTES // max(batch_bytes, 1.0)))
    return min(job.settings.chunk_batches, wanted, max(1, MOST_OF_LEASE // microbatches))


def profile_microbatch(job: JobGiven, microbatches: int, sharing: Sharing) -> ModelProfile:
    """Return the profile of a job whose batches, or shares of a batch, travel in so many pieces."""
    num_shares = sharing.num_clusters if sharing.is_split else 1
    return job.profile.resize_batch(-(-job.settings.batch_size // (microbatches * num_shares)))


def configure_microbatch(job: JobGiven, microbatches: int, sharing: Sharing) -> PlanConfig:
    """Return what the planner assumes when batches travel in so many pieces."""
    return replace(job.config, accumulates=microbatches > 1, averaging=sharing.averaging)


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
        try:
            best = self._choose_sharing(job, asked)
        except PlanError as shortage:
            return PlanMade(asked.plan_id, None, 1, str(shortage), now)
        plan = _accumulate(best.plan, best.microbatches, job.config.max_lag)
        return PlanMade(asked.plan_id, plan, best.microbatches, "", now, best.reason, best.sharing)

    def _choose_sharing(self, job: JobGiven, asked: MakePlan) -> "_Candidate":
        """Return the plan that trains most per second, in samples of one process.

        A plan with more clusters must be clearly better than one with fewer, and may not cost much quality,
        unless the requester says how many there are to be.
        """
        most = self._candidate(job, asked, job.config.clusters)
        count = len(most.plan.clusters)
        if count == 1 or job.config.clusters:
            return most
        quick = replace(self, budget=replace(self.budget, clusters=self.budget.quick_clusters // 4))
        best = None
        for number in (*_fewer_clusters(job, asked, most), 0):
            try:
                each = quick._candidate(job, asked, number) if number else most
            except PlanError:
                continue  # a search that is this limited may find nothing
            is_good = each.sharing.efficiency >= job.config.favour.least_efficiency
            if best is None or (is_good and each.sharing.goodput > _GAIN * best.sharing.goodput):
                best = each
        assert best is not None, "the last one is there"
        if len(best.plan.clusters) == count:
            return most
        with suppress(PlanError):
            best = self._candidate(job, asked, len(best.plan.clusters))
        return replace(best, reason=_explain(best, most, job))

    def _candidate(self, job: JobGiven, asked: MakePlan, num_clusters: int) -> "_Candidate":
        """Return the best plan of so many clusters at most; 0: as many as there can be."""
        settings, length = job.settings, _length(job, asked)
        is_split, is_exact = not length.is_whole_batch, job.config.averaging is Averaging.EXACT
        # How many clusters there will be decides how large a microbatch is, and that decides how many.
        expected = Sharing(is_split=is_split, num_clusters=num_clusters or 1)

        def form(count: int) -> tuple[Plan, int]:
            return self._form(job, asked, count, expected, num_clusters), count

        for _ in range(_TRIES):
            if is_exact:
                plan, count = form(1)  # a stage does not know how many a smaller share would have
            elif settings.microbatches:
                plan, count = form(min(settings.microbatches, settings.batch_size, MOST_OF_LEASE))
            else:
                plan, count = _choose(form, _most(job, asked, expected))
            if len(plan.clusters) == expected.num_clusters or not is_split:
                break
            expected = replace(expected, num_clusters=len(plan.clusters))
        if is_exact and (reason := _why_not_exact(plan, settings)):
            raise PlanError(reason)
        # Clusters of several stages would stand still while a batch passes through them.
        is_flat = count == 1 and all(len(each.stages) == 1 for each in plan.clusters)
        can_sum = is_flat and not length.is_whole_batch and length.average_every is None
        found = _share_candidate(job, asked, plan, count, expected, can_sum)
        if _says_too_little(found, settings):
            found = _share_candidate(job, asked, *form(2), expected, can_sum=False)
        return found

    def _form(self, job: JobGiven, asked: MakePlan, count: int, sharing: Sharing, num_clusters: int) -> Plan:
        profile = profile_microbatch(job, count, sharing)
        config = replace(configure_microbatch(job, count, sharing), clusters=num_clusters)
        swarm, seed = Swarm(asked.nodes), job.settings.seed
        if self.form is not None:
            return self.form(profile, swarm, config, seed, asked.plan_id)
        return form_plan(profile, swarm, config, seed, asked.plan_id, self.budget)

    def _repair(self, job: JobGiven, asked: MakePlan, plan: Plan, now: float) -> PlanMade:
        """Repair the plan node by node: first those that left, then the changed ones, then new ones."""
        sharing = asked.sharing
        profile = profile_microbatch(job, asked.microbatches, sharing)
        config = configure_microbatch(job, asked.microbatches, sharing)
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
                repair = self._join(job, asked, plan, node.name, Swarm(tuple(here)))
                plan, reasons = repair.plan, [*reasons, repair.reason]
        if asked.tries_spares:
            plan, reason = self._try_spares(job, asked, plan, Swarm(tuple(here)))
            reasons.append(reason)
        if not plan.clusters:
            return PlanMade(
                asked.plan_id, None, asked.microbatches, "", now
            )  # a first plan says what is short
        repaired = _accumulate(replace(plan, plan_id=asked.plan_id), asked.microbatches, job.config.max_lag)
        shared = self._share(job, asked, repaired, Swarm(asked.nodes))
        return PlanMade(asked.plan_id, repaired, asked.microbatches, "", now, "; ".join(reasons), shared)

    def _try_spares(self, job: JobGiven, asked: MakePlan, plan: Plan, swarm: Swarm) -> tuple[Plan, str]:
        """Form clusters of spares as long as another one pays at the noise scale that was measured."""
        before = len(plan.clusters)
        while plan.clusters and plan.spares:
            joined = self._join(job, asked, plan, plan.spares[0], swarm).plan
            if len(joined.clusters) == len(plan.clusters):
                break
            plan = joined
        added = len(plan.clusters) - before
        what = f"spares form {added} more" if added else "no other cluster pays"
        return plan, f"the noise scale is {asked.noise or 0.0:.3g} samples: {what}"

    def _join(self, job: JobGiven, asked: MakePlan, plan: Plan, name: NodeId, swarm: Swarm) -> Repair:
        """Take in a node; it helps to form another cluster only where that costs little quality."""
        profile = profile_microbatch(job, asked.microbatches, asked.sharing)
        config = configure_microbatch(job, asked.microbatches, asked.sharing)
        free = node_joined(plan, name, profile, swarm, config, self.budget)
        if len(free.plan.clusters) <= max(1, len(plan.clusters)):
            return free
        before, after = (self._share(job, asked, each, swarm) for each in (plan, free.plan))
        pays = after.efficiency >= config.favour.least_efficiency and after.goodput > _GAIN * before.goodput
        if pays or config.clusters >= len(free.plan.clusters):
            return free
        limited = replace(config, clusters=len(plan.clusters))
        return node_joined(plan, name, profile, swarm, limited, self.budget)

    def _share(self, job: JobGiven, asked: MakePlan, plan: Plan, swarm: Swarm) -> Sharing:
        """Return how the clusters of a repaired plan share the job; those that sum gradients go on so."""
        expected = replace(asked.sharing, num_clusters=max(1, len(plan.clusters)))
        profile = profile_microbatch(job, asked.microbatches, expected)
        config = replace(job.config, accumulates=asked.microbatches > 1)
        was_exact = asked.sharing.averaging is Averaging.EXACT and asked.sharing.num_clusters > 1
        if was_exact:
            config = replace(config, averaging=Averaging.EXACT)
        elif config.averaging is Averaging.EXACT:  # a cluster that trains alone does not begin to wait
            config = replace(config, averaging=Averaging.BLOCKING)
        return share_job(plan, profile, swarm, config, _length(job, asked))


SEARCH_PLANNER = SearchPlanner()


def _nodes_of(plan: Plan) -> set[NodeId]:
    return {*plan.spares, *(stage.node for each in plan.clusters for stage in each.stages)}


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A plan, the microbatches of an update, and how its clusters share the job."""

    plan: Plan
    microbatches: int
    sharing: Sharing
    reason: str = ""


def _share_candidate(
    job: JobGiven, asked: MakePlan, plan: Plan, count: int, expected: Sharing, can_sum: bool
) -> _Candidate:
    """Return a plan with the best way for its clusters to share the job."""
    profile, config = profile_microbatch(job, count, expected), replace(job.config, accumulates=count > 1)
    sharing = share_job(plan, profile, Swarm(asked.nodes), config, _length(job, asked), can_sum)
    return _Candidate(plan, count, sharing)


def _says_too_little(found: _Candidate, settings: JobSettings) -> bool:
    """Return whether the noise has to be measured for the requester's Adam, and whole shares say nothing.

    They are cut in two then, unless a batch norm needs them whole.
    """
    sharing, smallest = found.sharing, 2 * settings.least_samples * found.sharing.num_clusters
    is_shared = sharing.num_clusters > 1 and sharing.is_split and sharing.averaging is not Averaging.EXACT
    is_open = found.microbatches == 1 and not settings.microbatches
    return settings.has_own_adam and is_shared and is_open and settings.batch_size >= smallest


def _why_not_exact(plan: Plan, settings: JobSettings) -> str:
    """Say why clusters cannot sum gradients although the requester wants it; empty if they can."""
    other = "choose another averaging, or let the planner choose (averaging=auto)"
    if settings.is_whole_batch:
        return f"averaging=exact cuts batches into shares, but this loss needs whole batches; {other}"
    if settings.has_tied_weights and any(len(each.stages) > 1 for each in plan.clusters):
        return f"averaging=exact cannot be used where stages of one cluster share a weight; {other}"
    return ""


def _length(job: JobGiven, asked: MakePlan) -> TrainingLength:
    """Return what the quality of a shared training depends on, with the noise scale as far as it is known."""
    return replace(job.settings.length, noise=asked.noise)


def _fewer_clusters(job: JobGiven, asked: MakePlan, most: _Candidate) -> list[int]:
    """Return the numbers of clusters that are worth a try, below the most there can be."""
    count, sharing, length = len(most.plan.clusters), most.sharing, _length(job, asked)
    least, apart = job.config.favour.least_efficiency, max(LEAST_UPDATES, sharing.updates_between)
    good = [
        number
        for number in range(2, count)
        if efficiency(length, number, Averaging.BLOCKING, sharing.is_split, apart) >= least
    ]
    return sorted({1, *range(2, min(count, _FEW_CLUSTERS + 1)), *good[-1:]})


def _explain(chosen: _Candidate, most: _Candidate, job: JobGiven) -> str:
    """Say why a plan has fewer clusters than there could be."""
    could, num_updates = most.sharing, job.settings.length.num_updates
    count = len(chosen.plan.clusters)
    idle = len(chosen.plan.spares)
    used = f"using {show_count(count, 'cluster')}" + (f" and {show_count(idle, 'spare')}" if idle else "")
    if could.efficiency < job.config.favour.least_efficiency:
        effect = f"about {100 * could.efficiency:.0f} % of the training effect of one process"
        return f"{could.num_clusters} clusters would have {effect} in {num_updates} updates; {used}"
    share = could.goodput / max(chosen.sharing.goodput, 1e-30)
    if share < 1.0:
        return f"{could.num_clusters} clusters would be slower, with {100 * share:.0f} % of the speed; {used}"
    return f"{could.num_clusters} clusters would gain {100 * (share - 1):.0f} %, too little; {used}"


def _most(job: JobGiven, asked: MakePlan, sharing: Sharing) -> int:
    """Return the largest number of microbatches that a batch, or a share of it, may be cut into."""
    flops = sum(job.profile.forward_flops) + sum(job.profile.backward_flops)
    fastest = max(node.flops_per_second for node in asked.nodes)
    worth = ceil(_LEAST_SECONDS * fastest * job.profile.samples_per_batch / flops) if flops else 1
    least = max(job.settings.least_samples, worth)
    num_shares = sharing.num_clusters if sharing.is_split else 1
    return min(max(1, job.settings.batch_size // (least * num_shares)), MOST_OF_LEASE)


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
    """Let every cluster make an update of so many microbatches, with windows that keep the lag bound.

    A cluster has no more lag than it was planned with: its stages have no memory for older weights.
    """
    clusters = []
    for cluster in plan.clusters:
        planned = ceil((cluster.stages[0].window - 1) / cluster.accumulate)
        widest = count * min(max_lag, max(1, planned)) + 1
        stages = (replace(stage, window=min(stage.window, widest)) for stage in cluster.stages)
        clusters.append(replace(cluster, stages=tuple(stages), accumulate=count))
    return replace(plan, clusters=tuple(clusters))
