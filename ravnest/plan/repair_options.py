"""Ways to repair one cluster when a node of it is gone or slow, each judged by the cost model.

The other clusters stay as they are, so they are judged once and a way costs one cluster. A way says what it
does as half a sentence; `repair` chooses.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ravnest.config import PlanConfig, SearchBudget
from ravnest.ids import NodeId
from ravnest.plan.assembly import build_clusters, stage_bytes
from ravnest.plan.cost import Bools, Floats, LineCost, NodeTable, Rows, timing
from ravnest.plan.forecast import cluster_rows, hold_back
from ravnest.plan.formation import cut_clusters, form_cluster
from ravnest.plan.types import Cluster, ModelProfile, Plan, Swarm, cluster_name

_MOST_SUBSTITUTES = 16
_MOST_NAMES = 3  # of a sentence


@dataclass(frozen=True, slots=True)
class RepairOption:
    """One thing that could be done: the cluster as it would be (None: dissolved) and what that brings."""

    cluster: Cluster | None
    action: str  # "bob takes over stage 2 of cluster A"
    noun: str  # "re-cutting": what is said to gain or not to gain
    samples_per_second: float  # of the whole swarm
    moved_bytes: float = 0.0


class ClusterEvaluator:
    """Judges clusters beside the clusters of a plan that stay, with the facts of now."""

    def __init__(
        self, profile: ModelProfile, swarm: Swarm, config: PlanConfig, others: tuple[Cluster, ...]
    ) -> None:
        self.profile, self.swarm, self.config, self.others = profile, swarm, config, others
        self.index = {node.name: k for k, node in enumerate(swarm.nodes)}
        self.nodes = NodeTable.of(swarm, config)
        self.line = LineCost(profile, config, is_averaged=len(others) > 0)
        self._seconds, self.others_fit = self.judge(self.line, others)

    def judge(self, line: LineCost, clusters: Sequence[Cluster]) -> tuple[Floats, Bools]:
        """Return the seconds per batch of clusters, and which of them fit memory and the time of a round."""
        if not clusters:
            return np.zeros(0), np.zeros(0, bool)
        rows = cluster_rows(tuple(clusters), self.index)
        times = timing(line, self.nodes, rows)
        exists = np.arange(rows.nodes.shape[1]) < rows.lengths[:, None]
        volume = line.round_bytes(rows.cuts[:, 1:], rows.cuts[:, :-1])
        fits = times.memory <= self.nodes.memory[rows.nodes]
        fits &= volume <= line.config.max_round_seconds * line.round_rate(self.nodes)[rows.nodes]
        return times.seconds, np.asarray((fits | ~exists).all(axis=1))

    def rate_with(self, cluster: Cluster) -> float:
        """Return the samples per second of the others and this cluster."""
        seconds, _ = self.judge(self.line, [cluster])
        return float(hold_back(self.line, np.concatenate([self._seconds, seconds]))[1].sum())

    def rate_without(self) -> float:
        """Return the samples per second of the others alone."""
        line = LineCost(self.profile, self.config, is_averaged=len(self.others) > 1)
        return float(hold_back(line, self.judge(line, self.others)[0])[1].sum())

    def fastest(self, clusters: Sequence[Cluster]) -> Cluster | None:
        """Return the fastest of the clusters that fit, the first of equals."""
        seconds, fits = self.judge(self.line, clusters)
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
        return form_cluster(self.profile, swarm, self.config, seed, self.line.is_averaged, budget)


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
        if cluster is None or not self.evaluator.judge(self.evaluator.line, [cluster])[1].all():
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
