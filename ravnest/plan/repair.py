"""One node joined, left or slowed down: the smallest change of the plan, and the reason as a sentence.

Among the ways to go on, those that bring almost as much as the best are good enough, and the one that moves
the fewest parameters is chosen. What a way brings is measured against giving the cluster up, so that one
cluster counts as much in a large swarm as in a small one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ravnest.config import SEARCH_BUDGET, PlanConfig, SearchBudget
from ravnest.errors import PlanError
from ravnest.ids import NodeId
from ravnest.plan.assembly import assemble_plan
from ravnest.plan.forecast import forecast
from ravnest.plan.formation import form_plan
from ravnest.plan.repair_options import (
    ClusterEvaluator,
    Holdings,
    RepairOption,
    RepairOptions,
    hosts_of,
    show_forming,
)
from ravnest.plan.types import Cluster, ModelProfile, Plan, Swarm, cluster_name
from ravnest.units import show_bytes

_GOOD_ENOUGH = 0.9  # of what the best way brings
_WORTH_A_CHANGE = 0.1  # of what a cluster brings: below it a slow node is left alone
_WORTH_A_PLACE = 0.2  # of what a cluster brings; below it a new node is a spare and no cluster stops
_MOST_ENLARGED = 2  # clusters that are tried with one node more, the slowest
_WORTH_A_CLUSTER = 0.01  # of the swarm's rate, or half a usual cluster where that is less


@dataclass(frozen=True, slots=True)
class Repair:
    """The plan to go on with (the same one when nothing changes), why, and the parameters that travel."""

    plan: Plan
    reason: str
    moved_bytes: float


def moved_bytes(before: Plan, after: Plan, profile: ModelProfile) -> float:
    """Return the parameters that nodes host now and did not before; a backup has those it takes over."""
    gone = _hosts(before) - _hosts(after)
    return Holdings(before, profile).missing_bytes(after.clusters, gone)


def node_left(
    plan: Plan,
    name: NodeId,
    profile: ModelProfile,
    swarm: Swarm,
    config: PlanConfig,
    before: Swarm | None = None,
    budget: SearchBudget = SEARCH_BUDGET,
) -> Repair:
    """Go on without a node; `swarm` no longer has it, `before` still does, for the old rate in the reason."""
    repair = _PlanRepair(plan, profile, swarm, config, f"{name} left", before, budget)
    if name not in repair.hosts:
        after = repair.assemble(plan.clusters)
        return repair.finish(after, _spare_left(plan, after, name))
    options = RepairOptions(plan, name, profile, swarm, config)
    return repair.choose(options, _ways_without(options, name))


def node_joined(
    plan: Plan,
    name: NodeId,
    profile: ModelProfile,
    swarm: Swarm,
    config: PlanConfig,
    budget: SearchBudget = SEARCH_BUDGET,
) -> Repair:
    """Take in a node: as a spare, or in a new cluster if the spares can now form one that pays."""
    repair = _PlanRepair(plan, profile, swarm, config, f"{name} joined", swarm, budget)
    if not plan.clusters:
        return repair.start_over()
    cluster = _worthwhile_cluster(plan, profile, swarm, config, budget)
    if cluster is None:
        after = repair.assemble(plan.clusters)
        if name in repair.hosts:
            return repair.finish(after, "it hosts a stage already")
        larger = _enlarge(repair, plan, name, profile, swarm, config)
        if larger is not None:
            return larger
        duty = _duty(after, name)
        return repair.finish(after, f"it is a spare and backs up {duty}" if duty else "it is a spare")
    action = f"{show_forming(cluster)} cluster {cluster_name(len(plan.clusters))}"
    return repair.finish(repair.assemble((*plan.clusters, cluster)), action)


def node_slowed(
    plan: Plan,
    name: NodeId,
    profile: ModelProfile,
    swarm: Swarm,
    config: PlanConfig,
    before: Swarm | None = None,
    budget: SearchBudget = SEARCH_BUDGET,
) -> Repair:
    """Go on with a node that is slower, smaller or faster than planned; `before` has its old facts."""
    is_faster = before is not None and _speed(before, name) < _speed(swarm, name)
    event = f"{name} {'is faster now' if is_faster else 'slowed down'}"
    repair = _PlanRepair(plan, profile, swarm, config, event, before, budget)
    if name not in repair.hosts:
        after = repair.assemble(plan.clusters)
        return repair.finish(after, _spare_slowed(plan, after, name))
    options = RepairOptions(plan, name, profile, swarm, config)
    same = [options.tune(), options.cut_anew(options.names)]
    ways = [way for way in same if way] + _ways_without(options, name)
    keep = options.keep()
    if keep is not None:
        given_up = options.dissolve()
        best = max([*ways, given_up], key=_rate)
        gain = _rate(best) - _rate(keep)
        worth = _rate(keep) - _rate(given_up)
        keep = replace(keep, action=f"{keep.action}, {_gain_text(best, gain, worth)}")
        ways = [keep, *ways] if gain >= _WORTH_A_CHANGE * worth else [keep]
    return repair.choose(options, ways)


class _PlanRepair:
    """What every repair ends with: the new plan, and the sentence that says what it does."""

    def __init__(
        self,
        plan: Plan,
        profile: ModelProfile,
        swarm: Swarm,
        config: PlanConfig,
        event: str,
        before: Swarm | None,
        budget: SearchBudget,
    ) -> None:
        self.hosts = _hosts(plan)
        self._plan, self._profile, self._swarm, self._config = plan, profile, swarm, config
        self._event = event
        self._before = before
        self._budget = budget

    def choose(self, options: RepairOptions, ways: Sequence[RepairOption]) -> Repair:
        """Choose among the ways; without any, among giving the cluster up and a new one of the spares."""
        others = options.evaluator.others
        if not ways:
            if not others:
                return self.start_over()
            gathered = options.gather(self._plan.seed, self._budget)
            ways = [gathered] if gathered else []
        chosen = _choose([*ways, options.dissolve()])
        repaired = (chosen.cluster,) if chosen.cluster else ()
        clusters = others[: options.number] + repaired + others[options.number :]
        return self.finish(self.assemble(clusters), chosen.action)

    def start_over(self) -> Repair:
        """Form a first plan, or say what is short."""
        plan = self._plan
        lead = "cluster A is dissolved, " if plan.clusters else ""
        try:
            facts = self._profile, self._swarm, self._config
            after = form_plan(*facts, plan.seed, plan.plan_id + 1, self._budget)
        except PlanError as shortage:
            after = self.assemble(())
            return Repair(after, f"{self._event}: {lead}no cluster is possible; {shortage}", 0.0)
        count = len(after.clusters)
        what = f"{show_forming(*after.clusters)} {'a new one' if lead else 'the first cluster'}"
        if count > 1:
            what = f"{show_forming(*after.clusters)} {count} new clusters"
        return self.finish(after, lead + what)

    def assemble(self, clusters: tuple[Cluster, ...]) -> Plan:
        """Return the plan of these clusters: the next one, or the same one if nothing is different."""
        plan = self._plan
        after = assemble_plan(
            clusters, self._profile, self._swarm, self._config, plan.seed, plan.plan_id + 1, plan.backups
        )
        return plan if replace(after, plan_id=plan.plan_id) == plan else after

    def finish(self, after: Plan, action: str) -> Repair:
        """Return the repair with its reason."""
        moved = moved_bytes(self._plan, after, self._profile)
        moves = f"{show_bytes(moved)} move" if moved else "nothing moves"
        now = self._rate(after, self._swarm)
        if self._before is not None:
            then = self._rate(self._plan, self._before)
            now = f"{then} -> {now}" if then != now else f"still {now}"
        return Repair(after, f"{self._event}: {action}; {moves}, {now} samples/s", moved)

    def _rate(self, plan: Plan, swarm: Swarm) -> str:
        rate = forecast(plan, self._profile, swarm, self._config).samples_per_second
        return f"{rate:.3g}" if rate < 999.5 else f"{rate:.0f}"


def _ways_without(options: RepairOptions, name: NodeId) -> list[RepairOption]:
    """Return the ways to go on without one node of a cluster."""
    rest = options.absorb() or options.cut_anew([other for other in options.names if other != name])
    return options.substitute() + ([rest] if rest else [])


def _choose(ways: Sequence[RepairOption]) -> RepairOption:
    """Return the way that moves least among the good ones; the last way gives the cluster up."""
    best, given_up = max(map(_rate, ways)), _rate(ways[-1])
    enough = given_up + _GOOD_ENOUGH * (best - given_up)
    good = [way for way in ways if _rate(way) >= enough]
    return min(good, key=lambda way: (way.moved_bytes, -_rate(way), way.action))


def _enlarge(
    repair: "_PlanRepair", plan: Plan, name: NodeId, profile: ModelProfile, swarm: Swarm, config: PlanConfig
) -> Repair | None:
    """Find the cluster that gains most by one more node, if that is worth moving parameters for."""
    clusters = forecast(plan, profile, swarm, config).clusters
    roomy = [k for k, cluster in enumerate(plan.clusters) if len(cluster.stages) < config.max_stages]
    slowest = sorted(roomy, key=lambda number: clusters[number].samples_per_second)
    best: tuple[float, tuple[Cluster, ...], int] | None = None
    for number in slowest[:_MOST_ENLARGED]:
        options = RepairOptions(plan, hosts_of(plan.clusters[number])[0], profile, swarm, config)
        names, keep = options.names, options.keep()
        given_up = _rate(options.dissolve())
        places = sorted({0, len(names) // 2, len(names)})  # others differ little
        ways = [options.cut_anew([*names[:at], name, *names[at:]]) for at in places]
        way = max((way for way in ways if way), key=_rate, default=None)
        if way is None or way.cluster is None or keep is None:
            continue
        gain, worth = _rate(way) - _rate(keep), _rate(keep) - given_up
        # A cluster that slows others down is worth less than nothing: a loss is no gain even then.
        if gain > max(0.0, _WORTH_A_PLACE * worth) and (best is None or gain > best[0]):
            best = gain, (*plan.clusters[:number], way.cluster, *plan.clusters[number + 1 :]), number
    if best is None:
        return None
    action = f"it takes a place in cluster {cluster_name(best[2])}, which is cut anew"
    return repair.finish(repair.assemble(best[1]), action)


def _worthwhile_cluster(
    plan: Plan, profile: ModelProfile, swarm: Swarm, config: PlanConfig, budget: SearchBudget
) -> Cluster | None:
    """Return a cluster of spares that raises the rate enough to be formed."""
    if config.clusters and len(plan.clusters) >= config.clusters:
        return None
    evaluator = ClusterEvaluator(profile, swarm, config, plan.clusters)
    if len(plan.clusters) == 1 and not evaluator.others_fit.all():
        return None  # a lone cluster keeps no copies for averaging, and may have no room for them
    cluster = evaluator.gather(plan.seed, budget)
    if cluster is None:
        return None
    now = evaluator.rate_without()
    least = min(_WORTH_A_CLUSTER, 0.5 / len(plan.clusters)) * now
    return cluster if evaluator.rate_with(cluster) - now > least else None


def _hosts(plan: Plan) -> set[NodeId]:
    return {name for cluster in plan.clusters for name in hosts_of(cluster)}


def _speed(swarm: Swarm, name: NodeId) -> float:
    return next(node.flops_per_second for node in swarm.nodes if node.name == name)


def _rate(way: RepairOption) -> float:
    return way.samples_per_second


def _gain_text(best: RepairOption, gain: float, worth: float) -> str:
    if gain <= 0.0:
        return "no change would gain anything"
    return (
        f"{best.noun} would gain {100 * gain / worth:.0f} %" if worth > 0 else f"{best.noun} would be faster"
    )


def _duty(plan: Plan, spare: NodeId) -> NodeId | None:
    return next((backup.node for backup in plan.backups if backup.spare == spare), None)


def _spare_left(before: Plan, after: Plan, name: NodeId) -> str:
    duty = _duty(before, name)
    if name not in before.spares:
        return "it was not in the plan"
    if duty is None:
        return "it was a spare"
    heir = next((backup.spare for backup in after.backups if backup.node == duty), None)
    return f"it was a spare, {f'{heir} backs up' if heir else 'nobody can back up'} {duty} now"


def _spare_slowed(before: Plan, after: Plan, name: NodeId) -> str:
    old, new = _duty(before, name), _duty(after, name)
    if new is not None:
        return f"it is a spare and backs up {new}"
    return f"it is a spare and too small to back up {old}" if old else "it is a spare"
