"""Spot checks: some losses that clusters report are computed again by others, and the liar gets a strike.

A microbatch that begins right after a blocking round sees the average that all clusters have, and nothing
newer; who says that it saw something else gets a strike. Its loss is a function of that average, its samples
and keyed randomness. So up to two other clusters run it again on the average they keep, and say its loss. Two
that agree are right against one. At two strikes a node goes. Newcomers are checked after every round, others
now and then. Of two clusters nobody can tell which is right; people are told. Clusters of several peers are
not checked, nor those that train while a round runs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ravnest.hub.coordinator.events import Action, LossClaimed, LossRechecked, Notify, Send, SendFields
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.notices import Contradicted
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.ids import MicrobatchId, NodeId
from ravnest.protocol.training import LeaseGrant, Recheck

FALSE_LOSSES = "the losses that it reports are not those that others find with the same weights and samples"
MOST_LOSS_STRIKES = 2
_CHECKERS = 2
_PROBATION = 3  # checks that a newcomer passes before it is checked less often
_ONE_IN = 8  # claims of others: there is one for each cluster and round
_RELATIVE, _OF_LARGEST = 0.1, 0.02  # difference of two losses that other hardware and formats may make


@dataclass(slots=True)
class _Check:
    claim: LossClaimed
    asked: dict[MicrobatchId, ClusterState]
    losses: dict[str, float | None] = field(default_factory=dict)  # by cluster_id


class SpotChecks:
    """Feed it claims and what others found; it returns what to do, and counts strikes by node."""

    def __init__(self, placement: Placement, ledger: Ledger) -> None:
        self._placement, self._ledger = placement, ledger
        self._open: list[_Check] = []
        self._num_passed: Counter[NodeId] = Counter()
        self.strikes: Counter[NodeId] = Counter()
        self._largest = 0.0  # loss that was found again
        self._told: set[frozenset[NodeId]] = set()  # pairs of nodes that contradict each other

    def awaits(self, cluster: ClusterState, microbatch: MicrobatchId) -> bool:
        """Return whether a cluster was asked to run this microbatch again."""
        return any(check.asked.get(microbatch) is cluster for check in self._open)

    def forget(self, node: NodeId) -> None:
        """Forget a node that has gone."""
        self.strikes.pop(node, None)
        self._num_passed.pop(node, None)

    def claim(self, claimed: LossClaimed) -> list[Action] | str:
        """Have a loss found again by others, if the lot or the newness of its cluster says so."""
        cluster = self._placement.find_cluster(claimed.cluster_id)
        if cluster is None or not cluster.is_running or not _is_alone(cluster):
            return f"a loss of cluster {claimed.cluster_id}, which is no more"
        if claimed.loss is None:
            self._strike([cluster])
            return []
        samples = self._ledger.find_samples(cluster, claimed.microbatch)
        if samples is None:
            return f"microbatch {claimed.microbatch} of cluster {cluster.name} is not under way"
        self._open = [x for x in self._open if x.claim.anchor_round == claimed.anchor_round]
        is_new = self._num_passed[cluster.root] < _PROBATION
        if not is_new and self._ledger.draws.choose(range(_ONE_IN)):
            return []
        return self._ask(cluster, claimed, samples)

    def _ask(self, cluster: ClusterState, claimed: LossClaimed, samples: tuple[int, ...]) -> list[Action]:
        alone = [each for each in self._placement.running if each is not cluster and _is_alone(each)]
        others = [x for x in alone if self._ledger.progress.holds(x, claimed.anchor_round)]
        check, actions = _Check(claimed, {}), list[Action]()
        recheck = Recheck(claimed.anchor_round, claimed.microbatch)
        for other in self._ledger.draws.shuffle(others)[:_CHECKERS]:
            lease, microbatch = self._ledger.reserve_numbers()
            check.asked[microbatch] = other
            grant = LeaseGrant(other.build_id, lease, True, microbatch, (len(samples),), recheck)
            consumers = self._placement.fields(other, is_evaluation=False)
            facts = (other.build_id, lease, False, microbatch, (samples,), consumers)
            actions += [Send(other.root, grant), SendFields(*facts, checks=claimed.microbatch)]
        if check.asked:
            self._open.append(check)
        return actions

    def conclude(self, found: LossRechecked) -> list[Action] | str:
        """Record what a cluster found; with the last answer, say who lied."""
        cluster = self._placement.find_cluster(found.cluster_id)
        check = next((x for x in self._open if x.asked.get(found.microbatch) is cluster), None)
        if cluster is None or check is None:
            return f"nobody asked about microbatch {found.microbatch}"
        check.losses[cluster.cluster_id] = found.loss
        if len(check.losses) < len(check.asked):
            return []
        self._open.remove(check)
        return self._judge(check)

    def _judge(self, check: _Check) -> list[Action]:
        accused = self._placement.find_cluster(check.claim.cluster_id)
        found = [(x, loss) for x in check.asked.values() if (loss := check.losses[x.cluster_id]) is not None]
        claimed = check.claim.loss
        if accused is None or claimed is None or not found:
            return []
        self._largest = max(self._largest, *(min(abs(loss), abs(claimed)) for _, loss in found))
        alike = [(x, self._is_alike(loss, claimed)) for x, loss in found]
        if all(is_alike for _, is_alike in alike):
            self._num_passed.update({accused.root: 1})
            return []
        if len(found) < _CHECKERS:
            has_third = len(self._placement.running) > 2
            return [] if has_third else self._contradict(accused, found[0][0])
        if any(is_alike for _, is_alike in alike):  # the one that is like nobody
            self._strike([x for x, is_alike in alike if not is_alike])
        elif self._is_alike(found[0][1], found[1][1]):
            self._strike([accused])
        return []

    def _strike(self, clusters: Sequence[ClusterState]) -> None:
        self.strikes.update(each.root for each in clusters)

    def _contradict(self, one: ClusterState, other: ClusterState) -> list[Action]:
        pair = frozenset((one.root, other.root))
        if pair in self._told:
            return []
        self._told.add(pair)
        return [Notify(Contradicted(one.name, other.name))]

    def _is_alike(self, one: float, other: float) -> bool:
        return abs(one - other) <= _RELATIVE * max(abs(one), abs(other)) + _OF_LARGEST * self._largest

    def pop_liars(self) -> list[NodeId]:
        """Return the nodes that have too many strikes, once."""
        liars = [node for node, count in self.strikes.items() if count >= MOST_LOSS_STRIKES]
        for node in liars:
            self.forget(node)
        return liars


def _is_alone(cluster: ClusterState) -> bool:
    return len(cluster.nodes) == 1
