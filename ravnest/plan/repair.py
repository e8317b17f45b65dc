"""One node joined, left or slowed down: the smallest change of the plan, and the reason as a sentence.

Ways to repair one cluster are each judged by the cost model; the other clusters stay as they are and are
judged once. Those that bring almost as much as the best are good enough, and the one that moves the fewest
parameters is chosen. What a way brings is measured against giving the cluster up, so that one cluster counts
as much in a large swarm as in a small one.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ravnest.config import SEARCH_BUDGET, PlanConfig, SearchBudget
from ravnest.errors import PlanError
from ravnest.ids import NodeId
from ravnest.plan.assembly import assemble_plan, build_clusters, stage_bytes
from ravnest.plan.cost import NodeTable, Rows, timing
from ravnest.plan.forecast import cluster_rows, forecast, shared_rate
from ravnest.plan.formation import cut_clusters, form_cluster, form_plan
from ravnest.plan.line import Bools, Floats, LineCost
from ravnest.plan.types import Cluster, ModelProfile, Plan, Swarm, cluster_name
from ravnest.units import show_bytes

_MOST_SUBSTITUTES = 16
_LEAST_UPLOAD = 0.01  # of the hub's line, that a cluster more may use
_MOST_NAMES = 3  # of a sentence


@dataclass(frozen=True, slots=True)
class RepairOption:
    """One thing that could be done: the cluster as it would be (None: dissolved) and what that brings."""

    cluster: Cluster | None
    action: str  # "bob takes over stage 2 of cluster A"
    noun: str  # "re-cutting": what is said to gain or not to gain
    samples_per_second: float  # of the whole swarm
    moved_bytes: float = 0.0


class Judgement(NamedTuple):
    """What the cost model says of some clusters."""

    seconds: Floats  # per batch
    hub_bytes: Floats  # of a batch
    fits: Bools


class ClusterEvaluator:
    """Judges clusters beside the clusters of a plan that stay, with the facts of now."""

    def __init__(
        self, profile: ModelProfile, swarm: Swarm, config: PlanConfig, others: tuple[Cluster, ...]
    ) -> None:
        self.profile, self.swarm, self.config, self.others = profile, swarm, config, others
        self.index = {node.name: k for k, node in enumerate(swarm.nodes)}
        self.nodes = NodeTable.of(swarm, config)
        self.line = LineCost(profile, config, is_averaged=len(others) > 0)
        self._others = self.judge(self.line, others)

    @property
    def others_fit(self) -> Bools:
        """Which of the other clusters fit memory and the time of a round."""
        return self._others.fits

    def judge(self, line: LineCost, clusters: Sequence[Cluster]) -> "Judgement":
        """Return how fast clusters are, and whether they fit memory and the time of a round."""
        if not clusters:
            return Judgement(np.zeros(0), np.zeros(0), np.zeros(0, bool))
        rows = cluster_rows(tuple(clusters), self.index)
        times = timing(line, self.nodes, rows)
        exists = np.arange(rows.nodes.shape[1]) < rows.lengths[:, None]
        volume = line.round_bytes(rows.cuts[:, 1:], rows.cuts[:, :-1])
        fits = times.memory <= self.nodes.memory[rows.nodes]
        fits &= (
            volume <= line.config.max_round_seconds * (line.round_share * self.nodes.both_ways)[rows.nodes]
        )
        return Judgement(times.seconds, times.hub_bytes, np.asarray((fits | ~exists).all(axis=1)))

    def rate_with(self, cluster: Cluster) -> float:
        """Return the samples per second of the others and this cluster."""
        both = zip(self._others, self.judge(self.line, [cluster]), strict=True)
        seconds, hub_bytes, _ = (np.concatenate(pair) for pair in both)
        return shared_rate(self.line, seconds, hub_bytes)

    def rate_without(self) -> float:
        """Return the samples per second of the others alone."""
        line = LineCost(self.profile, self.config, is_averaged=len(self.others) > 1)
        seconds, hub_bytes, _ = self.judge(line, self.others)
        return shared_rate(line, seconds, hub_bytes)

    def fastest(self, clusters: Sequence[Cluster]) -> Cluster | None:
        """Return the fastest of the clusters that fit, the first of equals."""
        seconds, _, fits = self.judge(self.line, clusters)
        return clusters[int(np.where(fits, seconds, np.inf).argmin())] if fits.any() else None

    def build(self, names: Sequence[NodeId], cuts: Sequence[Sequence[int]]) -> list[Cluster]:
        """Return the clusters of these nodes, in pipeline order, for each of several lists of cuts."""
        order = tuple(self.index[name] for name in reversed(names))
        places = np.array([list(reversed(each)) for each in cuts], np.int64)
        return build_clusters(self.line, self.nodes, self.swarm, [order] * len(cuts), places)

    def gather(self, seed: int, budget: SearchBudget) -> Cluster | None:
        """Return one more cluster, of the nodes that the others leave, if they can hold the model."""
        used = {name for each in self.others for name in hosts_of(each)}
        free = tuple(node for node in self.swarm.nodes if node.name not in used)
        swarm = replace(self.swarm, nodes=free)
        return form_cluster(self.profile, swarm, self._config_beside(), seed, self.line.is_averaged, budget)

    def _config_beside(self) -> PlanConfig:
        """Return the settings of one more cluster: the hub's line is what the others leave of it."""
        upload = self.config.hub_bytes_per_second
        if not upload or not self.others:
            return self.config
        asked = float((self._others.hub_bytes / self._others.seconds).sum())
        return replace(self.config, hub_bytes_per_second=max(_LEAST_UPLOAD * upload, upload - asked))


class RepairOptions:
    """The ways to mend the cluster in which `name` hosts a stage."""

    def __init__(
        self, plan: Plan, name: NodeId, profile: ModelProfile, swarm: Swarm, config: PlanConfig
    ) -> None:
        self.number = next(k for k, each in enumerate(plan.clusters) if name in hosts_of(each))
        self.cluster = plan.clusters[self.number]
        self.names = hosts_of(self.cluster)
        self.evaluator = ClusterEvaluator(
            profile, swarm, config, plan.clusters[: self.number] + plan.clusters[self.number + 1 :]
        )
        self._at = self.names.index(name)
        self._lost = self.cluster.stages[self._at]
        self._title = f"cluster {cluster_name(self.number)}"
        self._place = f"stage {self._at + 1} of {self._title}"
        self._plan = plan
        self._holdings = Holdings(plan, profile)

    def keep(self) -> RepairOption | None:
        """Leave everything as it is."""
        return self._way(self.cluster, f"it keeps {self._place}", "staying")

    def tune(self) -> RepairOption | None:
        """Leave the cuts, but set windows and recomputing for the facts of now."""
        (tuned,) = self.evaluator.build(self.names, [_cuts(self.cluster)])
        change = "other windows or recomputing"
        return self._way(tuned, f"it keeps {self._place} with {change}", change)

    def substitute(self) -> list[RepairOption]:
        """Let one spare host exactly the lost stage: the backup, or one of the fastest that fit."""
        ways = []
        backup = next((each.spare for each in self._plan.backups if each.node == self._lost.node), None)
        for spare in self._able_spares(backup):
            stages = list(self.cluster.stages)
            stages[self._at] = replace(self._lost, node=spare)
            # Windows set anew are mostly better, but may need more memory than those the stage had.
            anew = self.evaluator.build([stage.node for stage in stages], [_cuts(self.cluster)])
            best = self.evaluator.fastest([*anew, replace(self.cluster, stages=tuple(stages))])
            title = "its backup" if spare == backup else "spare"
            ways.append(self._way(best, f"{title} {spare} takes over {self._place}", f"spare {spare}"))
        return [way for way in ways if way]

    def absorb(self) -> RepairOption | None:
        """Let the neighbours share the lost stage: only the cut between them moves."""
        names = [name for name in self.names if name != self._lost.node]
        if not names:
            return None
        cuts = _cuts(self.cluster)
        before, after = cuts[: self._at], cuts[self._at + 2 :]
        first = self._lost.start if after else self._lost.stop  # an end of the line has one neighbour
        last = self._lost.stop if before else self._lost.start
        choices = [[*before, cut, *after] for cut in range(first, last + 1)]
        best = self.evaluator.fastest(self.evaluator.build(names, choices))
        if best is None:
            return None
        old = {stage.node: stage.stop - stage.start for stage in self.cluster.stages}
        takers = [new.node for new in best.stages if new.stop - new.start > old[new.node]]
        verb = "takes over" if len(takers) == 1 else "share"
        return self._way(best, f"{show_names(takers)} {verb} {self._place}", "dropping it")

    def cut_anew(self, names: Sequence[NodeId]) -> RepairOption | None:
        """Cut the line anew over these nodes of the cluster, in their order."""
        if not names:
            return None
        evaluator = self.evaluator
        swarm = replace(
            evaluator.swarm, nodes=tuple(evaluator.swarm.nodes[evaluator.index[name]] for name in names)
        )
        order = tuple(reversed(range(len(names))))
        made = cut_clusters(evaluator.profile, swarm, evaluator.config, (order,), evaluator.line.is_averaged)
        action = f"{self._title} is cut anew over {show_names(names)}"
        return self._way(made[0], action, "re-cutting") if made else None

    def dissolve(self) -> RepairOption:
        """Give the cluster up; its nodes become spares."""
        left = [name for name in self.names if name in self.evaluator.index]
        action = f"{self._title} is dissolved"
        if left:
            become = "becomes a spare" if len(left) == 1 else "become spares"
            action += f", {show_names(left)} {become}"
        return RepairOption(None, action, "dissolving its cluster", self.evaluator.rate_without())

    def gather(self, seed: int, budget: SearchBudget) -> RepairOption | None:
        """Form one new cluster of the spares, the nodes of this cluster among them."""
        made = self.evaluator.gather(seed, budget)
        action = f"{self._title} is dissolved, {show_forming(made)} a new one" if made else ""
        return self._way(made, action, "a new cluster")

    def _able_spares(self, backup: NodeId | None) -> list[NodeId]:
        """Return spares with memory for the lost stage: the backup first, then the fastest in its place."""
        evaluator, hosts = self.evaluator, {node for each in self._plan.clusters for node in hosts_of(each)}
        need = stage_bytes(evaluator.line, self._lost, self.cluster)
        able = [n for n in evaluator.swarm.nodes if n.name not in hosts and n.memory_bytes >= need]
        if not able:
            return []
        order = [evaluator.index.get(name, 0) for name in reversed(self.names)]
        table = np.tile(np.array(order, np.int64), (len(able), 1))
        table[:, len(order) - 1 - self._at] = [evaluator.index[node.name] for node in able]
        cuts = np.tile(np.array(_cuts(self.cluster)[::-1], np.int64), (len(able), 1))
        rows = Rows(table, np.full(len(able), len(order), np.int64), cuts)
        seconds = timing(evaluator.line, evaluator.nodes, rows).seconds
        ranking = sorted(
            zip((node.name != backup for node in able), seconds, (n.name for n in able), strict=True)
        )
        return [name for _, _, name in ranking[:_MOST_SUBSTITUTES]]

    def _way(self, cluster: Cluster | None, action: str, noun: str) -> RepairOption | None:
        if cluster is None or not self.evaluator.judge(self.evaluator.line, [cluster]).fits.all():
            return None
        moved = self._holdings.missing_bytes([cluster], gone=set(self.names).difference(hosts_of(cluster)))
        return RepairOption(cluster, action, noun, self.evaluator.rate_with(cluster), moved)


def show_names(names: Sequence[NodeId]) -> str:
    """Return names as a sentence lists them: "ana, bob and 3 more"."""
    if len(names) > _MOST_NAMES + 1:
        return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def show_forming(*clusters: Cluster) -> str:
    """Return the start of a sentence on new clusters: "ana and bob form"."""
    names = [name for cluster in clusters for name in hosts_of(cluster)]
    return f"{show_names(names)} {'forms' if len(names) == 1 else 'form'}"


class Holdings:
    """Whose parameters a node has at a plan: its stage's, and a backup those of a node that is gone."""

    def __init__(self, plan: Plan, profile: ModelProfile) -> None:
        stages = [stage for cluster in plan.clusters for stage in cluster.stages]
        self._hosted = {stage.node: range(stage.start, stage.stop) for stage in stages}
        self._duty = {backup.spare: backup.node for backup in plan.backups}
        self._parameter_bytes = profile.parameter_bytes

    def missing_bytes(self, clusters: Sequence[Cluster], gone: Container[NodeId]) -> float:
        """Return the parameters that nodes of these clusters host and do not have yet."""
        return math.fsum(
            self._parameter_bytes[position]
            for cluster in clusters
            for stage in cluster.stages
            for position in range(stage.start, stage.stop)
            if position not in self._hosted.get(stage.node, ())
            and position not in self._backed_up(stage.node, gone)
        )

    def _backed_up(self, spare: NodeId, gone: Container[NodeId]) -> Sequence[int]:
        node = self._duty.get(spare)
        return self._hosted[node] if node is not None and node in gone else ()


def _cuts(cluster: Cluster) -> list[int]:
    return [0, *(stage.stop for stage in cluster.stages)]


def hosts_of(cluster: Cluster) -> list[NodeId]:
    """Return the nodes of a cluster in pipeline order."""
    return [stage.node for stage in cluster.stages]


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
    building: Container[NodeId] = (),
) -> Repair:
    """Take in a node: as a spare, or in a new cluster if the spares can now form one that pays.

    It takes no place in a cluster that is still being built, whose roots are given: what has been fetched
    for it would be of less use, and it would begin to train later.
    """
    repair = _PlanRepair(plan, profile, swarm, config, f"{name} joined", swarm, budget)
    if not plan.clusters:
        return repair.start_over()
    cluster = _worthwhile_cluster(plan, profile, swarm, config, budget)
    if cluster is None:
        after = repair.assemble(plan.clusters)
        if name in repair.hosts:
            return repair.finish(after, "it hosts a stage already")
        larger = _enlarge(repair, name, building)
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

    @property
    def facts(self) -> tuple[Plan, ModelProfile, Swarm, PlanConfig]:
        """What is repaired, and what that is judged by."""
        return self._plan, self._profile, self._swarm, self._config

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


def _enlarge(repair: "_PlanRepair", name: NodeId, building: Container[NodeId]) -> Repair | None:
    """Find the cluster that gains most by one more node, if that is worth moving parameters for."""
    plan, profile, swarm, config = repair.facts
    clusters = forecast(plan, profile, swarm, config).clusters
    roomy = [k for k, cluster in enumerate(plan.clusters) if len(cluster.stages) < config.max_stages]
    roomy = [k for k in roomy if plan.clusters[k].stages[0].node not in building]
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
