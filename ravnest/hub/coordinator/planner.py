"""Planning in the hub: when a plan is asked for, how it is made, and whether it still fits the members.

SearchPlanner answers a MakePlan with a plan, a repaired plan, or what is short. It also says how batches are
cut: a batch is what one update sees; it travels as microbatches, so that the pipeline stays full. The server
runs the planner in a thread and takes it as an argument. PlanTrigger asks for plans. Members are measured
first, for facts that their provider has not stated: they run a piece of the real model and time their link. A
plan waits for that, but not for long. The links of a cluster that has become slow are measured again.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, isfinite
from typing import Any, Protocol

from ravnest.config import (
    SEARCH_BUDGET,
    TIMEOUTS,
    Averaging,
    Favour,
    HubTimeouts,
    Mean,
    PlanConfig,
    SearchBudget,
)
from ravnest.errors import PlanError
from ravnest.hub.coordinator.events import (
    Action,
    ClusterSlowed,
    JobGiven,
    JobSettings,
    MakeParts,
    MakePlan,
    Notify,
    PartsMade,
    PlanMade,
    Probed,
    Send,
)
from ravnest.hub.coordinator.membership import Member, Membership
from ravnest.hub.coordinator.notices import Measured, Waiting
from ravnest.hub.coordinator.placement import Placement
from ravnest.ids import NodeId
from ravnest.plan.formation import form_plan
from ravnest.plan.repair import Repair, node_joined, node_left, node_slowed
from ravnest.plan.sharing import LEAST_UPDATES, LONG_JOB, Sharing, TrainingLength, efficiency, share_job
from ravnest.plan.types import ModelProfile, Node, Plan, Swarm
from ravnest.protocol.membership import Fact, ProbeOrder
from ravnest.units import show_count

MOST_OF_LEASE = 1024  # microbatches: what one message may list
_LEAST_SECONDS = 3e-3  # of a microbatch, for the whole model on the fastest node: less is all overhead
_USUAL_LAG = 0.75  # updates, where a batch can be cut so finely: a whole one costs 1 % of loss, this half
_LEASE_BYTES = 1 << 20  # of samples: larger leases save few messages, and their root keeps them all
_FEW_CLUSTERS = 4  # so many are all tried
_GAIN = 1.05  # a plan with more clusters must be so much better
_SHORT_TIMES = 4  # fewer samples for statistics, where memory is short
_TRIES = 3  # smaller microbatches widen windows, and those ask for more of them


def lease_batches(job: JobGiven, plan: Plan, microbatches: int) -> int:
    """Return the batches of a lease: twice those in flight, so that no root runs out; more of small ones."""
    widest = max(cluster.stages[0].window for cluster in plan.clusters)
    batch_bytes = job.profile.resize_batch(job.settings.batch_size).crossing_bytes[0]
    wanted = max(ceil(2 * widest / microbatches), int(_LEASE_BYTES // max(batch_bytes, 1.0)))
    return min(job.settings.chunk_batches, wanted, max(1, MOST_OF_LEASE // microbatches))


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
        best = fastest = None
        is_held_back = False  # by what sharing costs, as far as that is known
        for number in (*_fewer_clusters(job, asked, most), 0):
            try:
                each = quick._candidate(job, asked, number) if number else most
            except PlanError:
                continue  # a search that is this limited may find nothing
            least, bearable = job.config.favour.least_efficiency, Favour.SPEED.least_efficiency
            if best is None or (each.sharing.efficiency >= least and each.pays_over(best)):
                best = each
            is_held_back |= each.sharing.efficiency < least and each.pays_over(best)
            if fastest is None or (each.sharing.efficiency >= bearable and each.pays_over(fastest)):
                fastest = each
        assert best is not None, "the last one is there"
        assert fastest is not None, "as this one"
        if len(best.plan.clusters) == count:
            return most
        with suppress(PlanError):
            best = self._candidate(job, asked, len(best.plan.clusters))
            if is_held_back and _could_measure(best, job.settings):
                best = self._measuring(job, asked)
        return replace(best, reason=_explain(best, most, job) + _offer_speed(best, fastest))

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
                plan, count = _choose(
                    form, *(_most(job, asked, expected, is_short) for is_short in (False, True))
                )
            if len(plan.clusters) == expected.num_clusters or not is_split:
                break
            expected = replace(expected, num_clusters=len(plan.clusters))
        if is_exact and (reason := _why_not_exact(plan, settings)):
            raise PlanError(reason)
        # Clusters of several stages would stand still while a batch passes through them.
        is_flat = count == 1 and all(len(each.stages) == 1 for each in plan.clusters)
        can_sum = is_flat and not length.is_whole_batch and length.average_every is None
        can_sum = can_sum and job.settings.mean is not Mean.ROBUST  # a sum of gradients believes everybody
        found = _share_candidate(job, asked, plan, count, expected, can_sum)
        if _says_too_little(found, settings):
            found = _share_candidate(job, asked, *form(2), expected, can_sum=False)
        return found

    def _measuring(self, job: JobGiven, asked: MakePlan) -> "_Candidate":
        """Return a plan of one cluster whose batches say how noisy they are; others may join it then."""
        expected = Sharing(is_split=True)
        return _share_candidate(
            job, asked, self._form(job, asked, 2, expected, 1), 2, expected, can_sum=False
        )

    def _form(self, job: JobGiven, asked: MakePlan, count: int, sharing: Sharing, num_clusters: int) -> Plan:
        profile = job.profile_microbatch(count, sharing)
        config = replace(job.configure_microbatch(count, sharing), clusters=num_clusters)
        swarm, seed = Swarm(asked.nodes), job.settings.seed
        if self.form is not None:
            return self.form(profile, swarm, config, seed, asked.plan_id)
        return form_plan(profile, swarm, config, seed, asked.plan_id, self.budget)

    def _repair(self, job: JobGiven, asked: MakePlan, plan: Plan, now: float) -> PlanMade:
        """Repair the plan node by node: first those that left, then the changed ones, then new ones."""
        sharing = asked.sharing
        profile = job.profile_microbatch(asked.microbatches, sharing)
        config = job.configure_microbatch(asked.microbatches, sharing)
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
            is_new = node.name not in _nodes_of(plan)
            if is_new or node.name in asked.untried:
                repair = self._join(job, asked, plan, node.name, Swarm(tuple(here)))
                if is_new or repair.plan.clusters != plan.clusters:
                    plan, reasons = repair.plan, [*reasons, repair.reason]
        if asked.tries_spares:
            plan, reason = self._try_spares(job, asked, plan, Swarm(tuple(here)))
            reasons.append(reason)
        if not plan.clusters:  # a first plan says what is short
            return PlanMade(asked.plan_id, None, asked.microbatches, "", now)
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
        """Add a node to a plan; it helps to form another cluster only where that costs little quality."""
        profile = job.profile_microbatch(asked.microbatches, asked.sharing)
        config = job.configure_microbatch(asked.microbatches, asked.sharing)
        free = node_joined(plan, name, profile, swarm, config, self.budget, asked.building)
        if len(free.plan.clusters) <= max(1, len(plan.clusters)):
            return free
        before, after = (self._share(job, asked, each, swarm) for each in (plan, free.plan))
        pays = after.efficiency >= config.favour.least_efficiency and after.goodput > _GAIN * before.goodput
        if pays or config.clusters >= len(free.plan.clusters):
            return free
        limited = replace(config, clusters=len(plan.clusters))
        return node_joined(plan, name, profile, swarm, limited, self.budget, asked.building)

    def _share(self, job: JobGiven, asked: MakePlan, plan: Plan, swarm: Swarm) -> Sharing:
        """Return how the clusters of a repaired plan share the job; those that sum gradients go on so."""
        expected = replace(asked.sharing, num_clusters=max(1, len(plan.clusters)))
        profile = job.profile_microbatch(asked.microbatches, expected)
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

    def pays_over(self, other: "_Candidate") -> bool:
        """Return whether this one is clearly better, by samples per second and what they teach."""
        return self.sharing.goodput > _GAIN * other.sharing.goodput


def _share_candidate(
    job: JobGiven, asked: MakePlan, plan: Plan, count: int, expected: Sharing, can_sum: bool
) -> _Candidate:
    """Return a plan with the best way for its clusters to share the job."""
    profile, config = job.profile_microbatch(count, expected), replace(job.config, accumulates=count > 1)
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


def _could_measure(found: _Candidate, settings: JobSettings) -> bool:
    """Return whether a long job's lone cluster could measure the noise, and as it is planned does not."""
    is_open = found.microbatches == 1 and not settings.microbatches and not settings.is_whole_batch
    is_long = settings.num_batches >= LONG_JOB and settings.batch_size >= 2 * settings.least_samples
    return is_open and is_long and found.sharing.num_clusters == 1


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
        length, least = job.settings.length, job.config.favour.least_efficiency
        is_norm = could.is_split and length.statistics_effect(could.num_clusters) < least
        seen = f", as batch norms would see {length.batch_size // could.num_clusters} samples of a batch"
        why = seen if is_norm else f" in {num_updates} updates"
        return f"{could.num_clusters} clusters would have {effect}{why}; {used}"
    share = could.goodput / max(chosen.sharing.goodput, 1e-30)
    if share < 1.0:
        return f"{could.num_clusters} clusters would be slower, with {100 * share:.0f} % of the speed; {used}"
    return f"{could.num_clusters} clusters would gain {100 * (share - 1):.0f} %, too little; {used}"


def _offer_speed(chosen: _Candidate, fastest: _Candidate) -> str:
    """Say how much faster a plan would be that costs a little quality; empty if none is."""
    faster, now = fastest.sharing, chosen.sharing
    times = faster.samples_per_second / max(now.samples_per_second, 1e-30)
    if faster.num_clusters <= now.num_clusters or times < _GAIN:
        return ""
    costs = f"{times:.2g} times as fast with {100 * faster.efficiency:.0f} % of the effect"
    return f"; --favour speed would use {faster.num_clusters} clusters, {costs}"


def _most(job: JobGiven, asked: MakePlan, sharing: Sharing, is_short: bool = False) -> int:
    """Return the largest number of microbatches that a batch, or a share of it, may be cut into.

    Where memory `is_short`, statistics are taken of fewer samples than is good.
    """
    flops = sum(job.profile.forward_flops) + sum(job.profile.backward_flops)
    fastest = max(node.flops_per_second for node in asked.nodes)
    worth = ceil(_LEAST_SECONDS * fastest * job.profile.samples_per_batch / flops) if flops else 1
    is_tight = is_short and job.settings.has_statistics
    least = max(job.settings.least_samples // (_SHORT_TIMES if is_tight else 1), worth)
    num_shares = sharing.num_clusters if sharing.is_split else 1
    return min(max(1, job.settings.batch_size // (least * num_shares)), MOST_OF_LEASE)


def _choose(form: Callable[[int], tuple[Plan, int]], most: int, most_if_short: int) -> tuple[Plan, int]:
    """Plan, then plan again with as many microbatches as keep the lag small with these windows."""
    try:
        plan, count = form(1)
    except PlanError:
        if most_if_short == 1:
            raise
        plan, count = form(most_if_short)  # what is short is perhaps the memory for whole batches
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


_TIMES_AS_SLOW = 3.0  # a link must be, to be believed: training takes its part of it
_SO = "so what it says of itself counts"
# No machine is slower or faster; a report that says so has measured something else.
_SPEEDS, _RATES, _LATENCIES = (1e6, 1e16), (1e3, 1e11), (0.0, 10.0)


def order_probes(
    placement: Placement, profile: ModelProfile, now: float, timeouts: HubTimeouts
) -> list[MakeParts | Send | Notify]:
    """Order a probe of each unmeasured member, once; believe one that does not answer in time."""
    orders: list[MakeParts | Send | Notify] = []
    for member in placement.membership.list_to_probe(now):
        if member.probe_by is None:
            orders += _order_probe(placement, profile, member, now + timeouts.probe_seconds)
        else:
            placement.membership.end_probe(member.node.name, member.node)
            told = f"was not measured within {timeouts.probe_seconds:.0f} s, {_SO}"
            orders.append(Notify(Measured(member.node, told)))
    return orders


def _order_probe(
    placement: Placement, profile: ModelProfile, member: Member, probe_by: float
) -> list[MakeParts] | list[Send]:
    """Order a probe as soon as the parts of the busiest position are there, if these are needed."""
    blueprint = None
    if Fact.SPEED in member.guessed:
        busiest = max(range(profile.num_positions), key=lambda position: profile.forward_flops[position])
        made = placement.find_parts(busiest, busiest + 1)
        if not isinstance(made, PartsMade):
            return made
        blueprint = made.blueprint
    placement.membership.update(replace(member, probe_by=probe_by))
    times_link = member.guessed != (Fact.SPEED,)
    return [Send(member.node.name, ProbeOrder(blueprint, times_link))]


def end_probe(membership: Membership, probed: Probed) -> list[Action] | str:
    """Believe what was measured, within reason; return why not, if nobody asked or it is nonsense."""
    member = membership.find(probed.node)
    if member is None or member.probe_by is None:
        return f"nobody asked how fast {probed.node} is, or it came too late"
    found = {
        Fact.SPEED: {"flops_per_second": (probed.flops_per_second, _SPEEDS)},
        Fact.BANDWIDTH: {
            "upload_bytes_per_second": (probed.upload_bytes_per_second, _RATES),
            "download_bytes_per_second": (probed.download_bytes_per_second, _RATES),
        },
        Fact.LATENCY: {"latency_seconds": (probed.latency_seconds, _LATENCIES)},
    }
    facts = {name: fact for each in member.guessed for name, fact in found[each].items()}
    values: dict[str, Any] = {name: value for name, (value, _) in facts.items() if value is not None}
    if not all(isfinite(x) and (x > 0 or facts[name][1][0] == 0 == x) for name, x in values.items()):
        return f"no machine is like what was measured of {probed.node}: {values}"
    bounded = {name: min(max(value, facts[name][1][0]), facts[name][1][1]) for name, value in values.items()}
    node = replace(member.node, **bounded)
    membership.end_probe(probed.node, node)
    fault = "" if len(values) == len(facts) else f"could not measure all, {_SO}"
    return [Notify(Measured(node, fault))]


class LinkChecks:
    """Orders probes of the links of slow clusters; a check ends when all nodes of its cluster have answered.

    `replan` is told when the facts of a node have changed.
    """

    def __init__(self, placement: Placement, replan: Callable[[float], None]) -> None:
        self._placement, self._membership, self._replan = placement, placement.membership, replan
        self._awaited: dict[NodeId, str] = {}  # the cluster_id, by node
        self._found: dict[str, list[Node]] = {}  # by cluster_id: nodes as their links are now

    def order(self, slowed: ClusterSlowed) -> list[Action] | str:
        """Order probes of all links of a cluster; a check of it that is under way begins anew."""
        cluster = self._placement.find_cluster(slowed.cluster_id)
        if cluster is None or not cluster.is_running or len(cluster.nodes) < 2:
            return f"no microbatch crosses a link of the slow cluster {slowed.cluster_id}"
        self._awaited |= dict.fromkeys(cluster.nodes, cluster.cluster_id)
        self._found[cluster.cluster_id] = []
        return [Send(name, ProbeOrder(None, times_link=True)) for name in cluster.nodes]

    def end_probe(self, probed: Probed, now: float) -> list[Action] | str:
        """Plan with what was measured of a newcomer, or of the links of a cluster that is slow."""
        if probed.node not in self._awaited:
            return end_probe(self._membership, probed)
        changed = self._record(probed)
        for node in changed:
            self._membership.update(replace(self._membership[node.name], node=node))
            self._replan(now)
        return [Notify(Measured(node, "has a slower link than before")) for node in changed]

    def _record(self, probed: Probed) -> list[Node]:
        """Record an answer; with the last one, return the nodes whose links are slower than the plan knows.

        If all of them are, it is rather the line of the hub, which measures.
        """
        cluster_id = self._awaited.pop(probed.node)
        member, found = self._membership.find(probed.node), self._found[cluster_id]
        if member is not None:
            found.append(_with_links(member.node, probed))
        if cluster_id in self._awaited.values():
            return []
        del self._found[cluster_id]
        here = [node for node in found if node.name in self._membership]
        slow = [node for node in here if node != self._membership[node.name].node]
        return slow if len(slow) < len(found) else []


def _with_links(node: Node, probed: Probed) -> Node:
    """Return a node with the rates of its link that are much slower than they were."""
    changes = {}
    for fact in ("upload_bytes_per_second", "download_bytes_per_second"):
        rate = getattr(probed, fact)
        if rate is not None and _RATES[0] <= rate < getattr(node, fact) / _TIMES_AS_SLOW:
            changes[fact] = rate
    return replace(node, **changes)


NOBODY = "nobody is here; training goes on when enough nodes have joined: `ravnest token` says how"
_Asked = list[MakePlan | MakeParts | Send | Notify]


class PlanTrigger:
    """Asks once for each set of members: when all expected ones are here, or when it is quiet."""

    def __init__(self, job: JobGiven, placement: Placement, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._job, self._timeouts = job, timeouts
        self._placement, self._membership = placement, placement.membership
        self._changed_at = 0.0  # when a member last came, went or changed
        self._was_asked = False  # for a plan of these members
        self._plan_id = 0  # of the plan that is being made
        self.shortage = ""  # as people were told
        self._had_plan = False

    def reset(self, now: float) -> None:
        """A member came, went or changed: another plan is needed."""
        self._changed_at, self._was_asked = now, False

    @property
    def plan_due(self) -> float | None:
        """When to look again for a plan, if nothing else happens."""
        if self._membership.is_measuring:
            return self._membership.probe_due
        if not len(self._membership) or self._was_asked or self._membership.missing:
            return None
        longest = self._timeouts.replan_seconds if self._had_plan else math.inf
        return self._changed_at + min(self._job.settings.settle_seconds, longest)

    def ask_for_plan(self, now: float) -> _Asked:
        """Order probes of newcomers, and ask for a plan if it is time for that."""
        actions: _Asked = [*order_probes(self._placement, self._job.profile, now, self._timeouts)]
        due, expected = self.plan_due, self._job.settings.expected_nodes
        is_enough = not self._had_plan and len(self._membership) >= expected > 0
        if self._membership.is_measuring or due is None or not (now >= due or is_enough):
            return actions
        return [*actions, self._ask()]

    def repair_due(self, is_urgent: bool) -> float | None:
        """Return when to ask for a repair, if nothing else happens."""
        if self._membership.is_measuring and not is_urgent:
            return self._membership.probe_due
        quiet_seconds = 0.0 if is_urgent else self._timeouts.join_seconds
        return None if self._was_asked else self._changed_at + quiet_seconds

    def ask_for_repair(self, now: float, is_urgent: bool) -> _Asked:
        """Order probes of newcomers, and ask for a repair if it is time for that."""
        actions: _Asked = [*order_probes(self._placement, self._job.profile, now, self._timeouts)]
        must_wait = self._membership.is_measuring and not is_urgent
        due = None if must_wait else self.repair_due(is_urgent)
        return actions if due is None or now < due else [*actions, self._ask()]

    def _ask(self) -> MakePlan:
        asked = self._placement.ask_for_plan()
        self._was_asked, self._plan_id = True, asked.plan_id
        return asked

    def accept(self, made: PlanMade) -> bool:
        """Return whether a plan, or a shortage, is of the members that are here."""
        self._had_plan |= self.fits(made) and made.plan is not None
        return self.fits(made)

    def fits(self, made: PlanMade) -> bool:
        """Return whether no member came, went or changed since a plan was asked for."""
        return self._was_asked and made.plan_id == self._plan_id

    def notify_shortage(self, shortage: str = NOBODY) -> list[Notify]:
        """Say once why there is no plan."""
        told, self.shortage = self.shortage, shortage
        return [Notify(Waiting(shortage))] if shortage not in ("", told) else []
