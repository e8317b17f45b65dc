"""Spot checks: some losses that clusters report are computed again by others, and the liar gets a strike.

A microbatch that begins right after a blocking round sees the average that all clusters have, and nothing
newer; who says that it saw something else gets a strike. Two other clusters run it again on the average they
keep; until they have, no round takes that away. Two that agree are right against one. At two strikes a node
goes. Newcomers are checked after every round, others now and then. At the end who has counted much that no
check has confirmed finds a loss on the last average, with two others. Of two clusters nobody can tell which
is right; people are told. Clusters of several peers are not checked, nor in training beside a round.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.events import Action, LossClaimed, LossRechecked, Notify, Send, SendFields
from ravnest.hub.coordinator.leases import OpenLease
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.notices import Contradicted
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.ids import MicrobatchId, NodeId, RoundId
from ravnest.protocol.training import LeaseGrant, Recheck

FALSE_LOSSES = "the losses that it reports are not those that others find with the same weights and samples"
MOST_LOSS_STRIKES = 2
_CHECKERS = 2
_PROBATION = 3  # checks that a newcomer passes before it is checked less often
_TRIES = 3  # of a cluster to find a loss at the end
_MUCH = 0.05  # of the samples of a job
_ONE_IN = 8  # claims of others: there is one for each cluster and round
_RELATIVE, _OF_LARGEST = 0.1, 0.02  # difference of two losses that other hardware and formats may make


@dataclass(slots=True)
class _Check:
    accused: ClusterState
    anchor_round: RoundId
    claimed: float | None  # the loss it reported; None: it is asked like the others
    asked: dict[MicrobatchId, ClusterState]
    deadline: float
    losses: dict[str, float | None] = field(default_factory=dict)  # by cluster_id

    @property
    def clusters(self) -> tuple[ClusterState, ...]:
        """All clusters without which it comes to nothing."""
        return (self.accused, *self.asked.values())


class SpotChecks:
    """Feed it claims and what others found; it returns what to do, and counts strikes by node."""

    def __init__(self, placement: Placement, ledger: Ledger, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._placement, self._ledger, self._timeouts = placement, ledger, timeouts
        self._open: list[_Check] = []
        self._num_passed: Counter[NodeId] = Counter()
        self.strikes: Counter[NodeId] = Counter()
        self._largest = 0.0  # loss that was found again
        self._told: set[frozenset[NodeId]] = set()  # pairs of nodes that contradict each other
        self._is_random = False  # samples are others each time they are read: nothing can be found again
        self._num_asked: Counter[str] = Counter()  # at the end, by cluster_id
        self._unproven: list[NodeId] = []
        self._closed: set[str] = set()  # clusters of which nobody can tell: their work is done again, once

    def awaits(self, cluster: ClusterState, microbatch: MicrobatchId) -> bool:
        """Return whether a cluster was asked to run this microbatch again."""
        return any(check.asked.get(microbatch) is cluster for check in self._open)

    def is_waiting(self, now: float) -> bool:
        """Return whether clusters that are all still here find losses again, and have time left."""
        running = {each.cluster_id for each in self._placement.running} if self._open else set()
        return any(
            now < check.deadline and all(each.cluster_id in running for each in check.clusters)
            for check in self._open
        )

    @property
    def due(self) -> float | None:
        """When nobody waits for the oldest check any more."""
        return min((check.deadline for check in self._open), default=None)

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
        lease = self._ledger.find_training(claimed.microbatch)
        if lease is None or lease.cluster_id != cluster.cluster_id:
            return f"microbatch {claimed.microbatch} of cluster {cluster.name} is not under way"
        self.expire(claimed.now, claimed.anchor_round)
        is_new = self._num_passed[cluster.root] < _PROBATION
        if not self._can_check or (not is_new and self._ledger.draws.choose(range(_ONE_IN))):
            return []
        holders = self._holders(claimed.anchor_round)
        check = self._begin(cluster, claimed.anchor_round, claimed.loss, claimed.now)
        return self._ask(check, [each for each in holders if each is not cluster], lease, claimed.microbatch)

    def close(self, now: float) -> list[Action]:
        """At the end, have clusters find a loss on the last average that have counted much unchecked."""
        self.expire(now)
        running = self._placement.running
        anchor_round = self._ledger.progress.anchor_round(running)
        if not self._can_check or self._placement.is_exact or not anchor_round:
            return []
        holders, actions = self._holders(anchor_round), list[Action]()
        much = _MUCH * self._ledger.settings.num_total
        for cluster in filter(_is_alone, running):
            lease, others = self._ledger.last_counted(cluster.root), [x for x in holders if x is not cluster]
            is_asked = cluster.cluster_id in self._closed or any(x.accused is cluster for x in self._open)
            if is_asked or len(others) < _CHECKERS or self._ledger.num_unconfirmed(cluster.root) <= much:
                continue
            self._num_asked[cluster.cluster_id] += 1
            is_asked_out = self._num_asked[cluster.cluster_id] > _TRIES
            if lease is None or is_asked_out or len(others) == len(holders):
                self._unproven.append(cluster.root)
                self._closed.add(cluster.cluster_id)
                continue
            check = self._begin(cluster, anchor_round, None, now)
            actions += self._ask(check, others, lease, lease.first_microbatch)
        return actions

    @property
    def _can_check(self) -> bool:
        return not self._is_random and self._timeouts.check_seconds > 0

    def _holders(self, anchor_round: RoundId) -> list[ClusterState]:
        """Return the clusters that can find a loss on the average of a round."""
        progress = self._ledger.progress
        return [x for x in self._placement.running if _is_alone(x) and progress.holds(x, anchor_round)]

    def expire(self, now: float, anchor_round: RoundId | None = None) -> None:
        """Forget checks that nobody waits for, or that are of an average before this one."""
        if not self._open:
            return
        running = {each.cluster_id for each in self._placement.running}
        self._open = [
            check
            for check in self._open
            if now < check.deadline
            and anchor_round in (None, check.anchor_round)
            and all(each.cluster_id in running for each in check.clusters)
        ]

    def _begin(
        self, cluster: ClusterState, anchor_round: RoundId, claimed: float | None, now: float
    ) -> _Check:
        return _Check(cluster, anchor_round, claimed, {}, now + self._timeouts.check_seconds)

    def _ask(
        self, check: _Check, others: list[ClusterState], lease: OpenLease, microbatch: MicrobatchId
    ) -> list[Action]:
        samples, actions = self._ledger.samples_of(lease, microbatch), list[Action]()
        recheck = Recheck(check.anchor_round, microbatch)
        asked = self._ledger.draws.shuffle(others)[:_CHECKERS]
        for other in asked if check.claimed is not None else [check.accused, *asked]:
            number, again = self._ledger.reserve_numbers()
            check.asked[again] = other
            grant = LeaseGrant(other.build_id, number, True, again, (len(samples),), recheck)
            consumers = self._placement.fields(other, is_evaluation=False)
            facts = (other.build_id, number, False, again, (samples,), consumers)
            actions += [Send(other.root, grant), SendFields(*facts, checks=microbatch)]
        if check.asked:
            self._open.append(check)
        return actions

    def conclude(self, found: LossRechecked) -> list[Action] | str:
        """Record what a cluster found; with the last answer, say who lied."""
        check = next((each for each in self._open if found.microbatch in each.asked), None)
        cluster = None if check is None else check.asked[found.microbatch]
        if check is None or cluster is None or found.cluster_id not in ("", cluster.cluster_id):
            return f"nobody asked about microbatch {found.microbatch}"
        self._is_random |= not found.cluster_id
        check.losses[cluster.cluster_id] = found.loss
        if len(check.losses) < len(check.asked):
            return []
        self._open.remove(check)
        return [] if self._is_random else self._judge(check)

    def _judge(self, check: _Check) -> list[Action]:
        accused, claimed = check.accused, check.claimed
        losses = {each: loss for each, loss in check.losses.items() if each != accused.cluster_id}
        claimed = check.losses.get(accused.cluster_id) if claimed is None else claimed
        clusters = [each for each in check.clusters if each.cluster_id in losses]
        found = [(x, loss) for x in clusters if (loss := losses[x.cluster_id]) is not None]
        if self._placement.find_cluster(accused.cluster_id) is None or claimed is None or not found:
            return []
        self._largest = max(self._largest, *(min(abs(loss), abs(claimed)) for _, loss in found))
        alike = [(x, self._is_alike(loss, claimed)) for x, loss in found]
        if all(is_alike for _, is_alike in alike):
            self._num_passed.update({accused.root: 1})
            if len(found) == _CHECKERS and not self.strikes[accused.root]:
                self._ledger.confirm(accused.root)
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

    def pop_unproven(self) -> list[NodeId]:
        """Return the roots that could not show at the end that they train, once."""
        unproven, self._unproven = self._unproven, []
        return unproven

    def pop_liars(self) -> list[NodeId]:
        """Return the nodes that have too many strikes, once."""
        liars = [node for node, count in self.strikes.items() if count >= MOST_LOSS_STRIKES]
        for node in liars:
            self.forget(node)
        return liars


def _is_alone(cluster: ClusterState) -> bool:
    return len(cluster.nodes) == 1
