"""Rounds: when the next one comes, which clusters take part, and what becomes of it.

The hub counts the votes of all members. It commits when all have voted with the same hashes, else it aborts.
The event of the last vote is in the log before a member is told: a hub that restarts decides the same again.
A cluster that held a round up stays away from the next ones, twice as many each time in a row. A period is
what lies between two regular rounds; a round that was held up is tried again within it.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ravnest.averaging.ring import choose_least_chunk
from ravnest.config import TIMEOUTS, Averaging, HubTimeouts
from ravnest.hub.coordinator.events import JobGiven, Send
from ravnest.hub.coordinator.ledger import Ledger, weigh_cluster
from ravnest.hub.coordinator.notices import RoundEnded
from ravnest.hub.coordinator.phases import ClusterPhase
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.hub.coordinator.robust_rounds import (
    Dispute,
    RobustDecision,
    RobustRoster,
    Suspicions,
    compare_clusters,
)
from ravnest.ids import NodeId, RoundId, SegmentId
from ravnest.plan.sharing import LEAST_UPDATES
from ravnest.plan.types import Ring
from ravnest.protocol.averaging import (
    RoundAbort,
    RoundChecked,
    RoundCommit,
    RoundOpen,
    RoundOutcome,
    RoundPledge,
    RoundQuery,
    RoundReady,
)
from ravnest.protocol.messages import Refusal

_MOST_ROUNDS = 8  # a cluster stays away from, however often it held up the others


@dataclass(frozen=True, slots=True)
class _Lateness:
    """How often in a row a cluster was late, and the period in which it is asked again."""

    num_times: int
    back_in: int


_NEVER = _Lateness(0, 0)


class ExclusionBackoff:
    """Knows clusters by their cluster_ids, which are never used again."""

    def __init__(self) -> None:
        self._period = 0
        self._late: dict[str, _Lateness] = {}

    def begin_period(self) -> None:
        """Begin the period of the next regular round."""
        self._period += 1

    def present(self, running: Sequence[ClusterState]) -> tuple[ClusterState, ...]:
        """Return the clusters that a round of this period is of."""
        return tuple(x for x in running if self._late.get(x.cluster_id, _NEVER).back_in <= self._period)

    def exclude(self, cluster: ClusterState) -> int:
        """Leave a cluster out; return of how many rounds: twice as many each time in a row."""
        num_times = self._late.get(cluster.cluster_id, _NEVER).num_times + 1
        num_rounds = min(1 << (num_times - 1), _MOST_ROUNDS)
        self._late[cluster.cluster_id] = _Lateness(num_times, self._period + num_rounds)
        return num_rounds

    def forgive(self, clusters: Iterable[ClusterState]) -> None:
        """Forget what clusters were blamed for that have made a round together."""
        for cluster in clusters:
            self._late.pop(cluster.cluster_id, None)


def judge(suspects: Mapping[str, str | None]) -> frozenset[str]:
    """Return the clusters to blame. `suspects` has the cluster that each one waited for, or None.

    A cluster that is cut off blames others as they blame it. So a cluster that is blamed itself is believed
    only when no other is heard. When none blames another, all that gave up share the blame.
    """
    blamed = {suspect for suspect in suspects.values() if suspect is not None}
    believed = {
        who for who in blamed if any(suspects[x] == who and x not in blamed - {who} for x in suspects)
    }
    return frozenset(believed or blamed or suspects)


class RoundDecision:
    """The hub's side: it counts votes and decides once. Votes come from members, each in its own name."""

    def __init__(self, round_id: RoundId, members: tuple[NodeId, ...]) -> None:
        assert members, "a round needs members"
        self._round_id = round_id
        self._missing = dict.fromkeys(members)  # in the order of the plan, for stable reasons
        self._hashes: dict[SegmentId, dict[bytes, list[NodeId]]] = {}
        self._outcome: RoundOutcome | None = None
        self._suspects: tuple[NodeId, ...] = ()

    @property
    def outcome(self) -> RoundOutcome | None:
        """What was decided; nobody may hear of it before the event that decided is in the log."""
        return self._outcome

    @property
    def missing(self) -> set[NodeId]:
        """The members that have not voted."""
        return set(self._missing)

    def awaits_only(self, name: NodeId) -> bool:
        """Return whether this member alone has not voted."""
        return len(self._missing) == 1 and name in self._missing

    @property
    def suspects(self) -> tuple[NodeId, ...]:
        """The members that prevented a commit, as far as votes tell: silent, or with another mean."""
        return self._suspects

    def vote(self, ready: RoundReady) -> None:
        """Count a vote, a second copy of it once; the last one missing decides."""
        if ready.member in self._missing:
            del self._missing[ready.member]
            for segment, digest in ready.hashes:
                self._hashes.setdefault(segment, {}).setdefault(digest, []).append(ready.member)
        if self._missing:
            return
        unlike = {segment: found for segment, found in self._hashes.items() if len(found) > 1}
        self._decide(self._refuse(unlike) if unlike else RoundCommit(self._round_id))

    def give_up(self, member: NodeId, reason: str, suspect: NodeId | None = None) -> None:
        """Abort because a member died or gave up."""
        self._decide(RoundAbort(self._round_id, f"{member}: {reason}", suspect))

    def expire(self) -> None:
        """Abort because not all have voted in time."""
        self._suspects = tuple(self._missing)
        silent = ", ".join(self._missing)
        self._decide(RoundAbort(self._round_id, f"no vote before the deadline from {silent}"))

    def _refuse(self, unlike: dict[SegmentId, dict[bytes, list[NodeId]]]) -> RoundAbort:
        """Abort because owners of a segment hold different averages; the fewer are suspected, or all."""
        suspects: dict[NodeId, None] = {}
        for found in unlike.values():
            groups = sorted(found.values(), key=len)
            is_even = len(groups[-1]) == len(groups[-2])
            suspects |= dict.fromkeys(name for group in groups[: None if is_even else -1] for name in group)
        self._suspects = tuple(suspects)
        segment, found = next(iter(unlike.items()))
        shown = "; ".join(f"{', '.join(names)}: {digest.hex()[:8]}" for digest, names in found.items())
        more = f", as in {len(unlike) - 1} more" if len(unlike) > 1 else ""
        reason = f"the owners of segment {segment} hold different averages ({shown}){more}"
        return RoundAbort(self._round_id, reason)

    def _decide(self, outcome: RoundOutcome) -> None:
        assert self._outcome is None, f"round {self._round_id} is decided already: {self._outcome}"
        self._outcome = outcome


_PATIENCE = 1.25  # the hub waits longer for votes than members try
_MOST_TIMES = 4  # as long as foreseen, after rounds that were too short for all
_LAST_TRIES = 3  # at the last round, before the result is one cluster's alone
_FEW_ROUNDS = 2  # a cluster that would stay away from more makes no exact update with the others
_REMEMBERED = 16  # rounds whose outcome a member may still ask for


def _absent_by_owner(absent: Collection[NodeId], rings: Iterable[Ring]) -> dict[NodeId, tuple[NodeId, ...]]:
    """Return who is absent from the rings of each owner: a message has no room for all of a swarm."""
    found: dict[NodeId, tuple[NodeId, ...]] = {}
    away = frozenset(absent)
    for ring in rings:
        if gone := tuple(owner for owner in ring.owners if owner in away):
            found |= {owner: (*found.get(owner, ()), *gone) for owner in ring.owners}
    return {owner: tuple(dict.fromkeys(names)) for owner, names in found.items()}


@dataclass(frozen=True, slots=True)
class Ended:
    """What people are told of a round, and what its members are told."""

    told: RoundEnded
    sends: tuple[Send, ...]
    sums_gradients: bool = False


class Rounds:
    """Chooses when the next round comes and its clusters, opens it, collects votes, tells the outcome."""

    def __init__(
        self, job: JobGiven, placement: Placement, ledger: Ledger, timeouts: HubTimeouts = TIMEOUTS.hub
    ) -> None:
        self._timeouts = timeouts
        self._config, self._settings = job.config, job.settings
        self._placement, self._ledger = placement, ledger
        self._num_opened = 0
        self._decision: RoundDecision | RobustDecision | None = None
        self._roster: RobustRoster | None = None  # of the last round, if it is robust
        self._suspicions = Suspicions()
        self._liars: dict[NodeId, str] = {}
        self._clusters: tuple[ClusterState, ...] = ()  # of the last round
        self._by_node: dict[NodeId, ClusterState] = {}  # of them
        self._left_out: tuple[str, ...] = ()  # of it, although they train
        self._given_up: dict[NodeId, RoundAbort] = {}  # members that will not vote any more
        self._opened_at = self._members_by = self._deadline = 0.0
        self._is_final = self._sums_gradients = self._is_blocking = False  # of the last round
        self._outcomes: deque[RoundOutcome] = deque(maxlen=_REMEMBERED)
        self.restart()

    def restart(self) -> None:
        """Count from nothing: training begins, or begins again."""
        self._backoff = ExclusionBackoff()
        self._stuck: list[ClusterState] = []
        self._num_tries = 0  # at the last round
        self._is_due_again = False  # the last one was aborted, and may commit without the clusters to blame
        self._num_late = 0  # rounds in a row that somebody could not end in time
        self._seconds = 0.0  # that a round takes, as measured
        self._num_updates = 0  # of all clusters, when a round was last due
        self._due_at: float | None = None  # when that was, or training began

    @property
    def stands_still(self) -> bool:
        """Whether clusters wait while they average their weights."""
        return self._placement.sharing.averaging is Averaging.BLOCKING

    @property
    def holds_clusters(self) -> bool:
        """Whether clusters wait for an open round now, which has a deadline of its own."""
        return self.stands_still and self._decision is not None

    @property
    def due(self) -> float | None:
        """When the open round expires; None when no round is open."""
        return self._deadline if self._decision else None

    def awaits_only(self, name: NodeId) -> bool:
        """Return whether the open round ends with the vote of this node."""
        return self._decision is not None and self._decision.awaits_only(name)

    def open_due(self, now: float) -> list[Send]:
        """Order a round if the clusters have trained enough for it, or may try the last one again."""
        running = self._placement.running
        if self._placement.is_exact:
            return self._open_exact(now)
        if self._decision or len(running) < 2:
            return []
        is_again, self._is_due_again = self._is_due_again, False
        if not is_again or len(self._backoff.present(running)) < 2:
            if not self._is_time(now):
                return []
            self._backoff.begin_period()
        self._num_updates, self._due_at = self._ledger.num_updates, now
        clusters = self._backoff.present(running)
        return self._open(clusters, now) if len(clusters) > 1 else []

    def open_last(self, now: float) -> list[Send]:
        """Order the last round, if it is still to be tried: first with all, then without the late ones.

        Clusters that sum gradients have the same weights already.
        """
        running = self._placement.running
        if self._placement.is_exact or self._decision or len(running) < 2 or self._num_tries == _LAST_TRIES:
            return []
        self._num_tries += 1
        clusters = self._backoff.present(running)
        if self._num_tries == 1 or len(clusters) < 2:
            clusters = running
        return self._open(clusters, now, is_final=True)

    def expect_last(self) -> None:
        """Have another last round: there is more to train."""
        self._num_tries = 0

    def _open_exact(self, now: float) -> list[Send]:
        """Order the gradient round of the batch that is next; its members begin when they have trained it."""
        placement, batch = self._placement, self._ledger.exact.first
        is_building = any(each.phase is ClusterPhase.BUILDING for each in placement.clusters)
        if self._decision or batch is None or is_building:
            return []
        sends = self._open(placement.running, now, sums_gradients=True)
        shares = {name: batch.num_microbatches(each) for each in placement.running for name in each.nodes}
        return [
            Send(each.to, replace(each.message, rate=batch.rate, num_microbatches=shares[each.to]))
            if isinstance(each.message, RoundOpen)
            else each
            for each in sends
        ]

    def receive(
        self, sender: NodeId, message: RoundReady | RoundAbort | RoundPledge | RoundChecked, now: float
    ) -> Ended | list[Send] | Refusal | None:
        """Count a vote, or record a member that gives up; all are heard before one is blamed.

        Before and after the vote, members of a robust round pledge and check.
        """
        if self._decision is None or message.round_id != self._num_opened:
            return Refusal(f"{type(message).__name__} of round {message.round_id}, which is not open")
        if self._find(sender) is None:
            return Refusal(f"{sender} is no member of round {message.round_id}")
        if isinstance(message, RoundAbort):
            if not self._given_up:
                self._deadline = min(self._deadline, now + self._timeouts.round_verdict_seconds)
            self._given_up.setdefault(sender, message)
        elif message.member != sender:
            return Refusal(f"{sender} votes for {message.member}")
        else:
            sends = self._take_step(self._decision, message)
            if self._decision.outcome is not None:
                return self._settle(now, self._cluster_ids(self._decision.suspects))
            if sends or not self._given_up:
                return sends
        # All members were heard, but for those that would not be believed; or the reason is not time.
        unheard = self._cluster_ids(self._decision.missing - self._given_up.keys())
        is_heard = now < self._members_by or unheard <= set(self._suspects(most_hops=1).values())
        return self._give_up(now) if is_heard else None

    def _take_step(
        self, decision: RoundDecision | RobustDecision, message: RoundReady | RoundPledge | RoundChecked
    ) -> list[Send] | Refusal | None:
        if isinstance(decision, RobustDecision):
            sends = decision.receive(message)
            return Refusal(sends) if isinstance(sends, str) else sends
        if not isinstance(message, RoundReady):
            return Refusal(f"{type(message).__name__} of round {message.round_id}, which is not robust")
        decision.vote(message)
        return None

    def leave(self, name: NodeId, reason: str, now: float) -> Ended | None:
        """Abort the open round if this node takes part in it; others may try again at once."""
        if self._decision is None or self._find(name) is None:
            return None
        self._decision.give_up(name, reason)
        return self._settle(now)

    def cancel(self, reason: str, now: float) -> Ended | None:
        """Abort the open round: its rings are no more."""
        if self._decision is None:
            return None
        self._decision.give_up(self._clusters[0].root, reason)
        return self._settle(now)

    def expire(self, now: float) -> Ended | None:
        """Abort the open round at its deadline."""
        if self._decision is None or now < self._deadline:
            return None
        if self._given_up:
            return self._give_up(now)
        self._decision.expire()
        return self._settle(now, self._cluster_ids(self._decision.suspects))

    def answer(self, sender: NodeId, query: RoundQuery) -> Send | Refusal:
        """Tell a member what became of a round."""
        for outcome in self._outcomes:
            if outcome.round_id == query.round_id:
                return Send(sender, outcome)
        return Refusal(f"{sender} asks for round {query.round_id}, whose outcome is not known")

    def repeat(self, name: NodeId) -> list[Send]:
        """Tell a member that was away all outcomes: others may have heard one that it has not."""
        return [Send(name, outcome) for outcome in self._outcomes]

    def is_due(self, num_updates: int, now: float) -> bool:
        """Return whether a round would be due, on average, if clusters had made so many updates."""
        if self._decision or self._due_at is None or len(self._placement.running) < 2:
            return False
        if self._placement.is_exact:
            return False  # a gradient round follows the batch before it, not the number of updates
        num_batches = (num_updates - self._num_updates) / len(self._placement.running)
        if self._settings.average_every is not None:
            return num_batches >= self._settings.average_every
        seconds = self._seconds or self._foreseen
        least = LEAST_UPDATES
        if self.stands_still:  # as the plan foresaw: what clusters lose depends on it, seconds do not
            least = max(LEAST_UPDATES, self._placement.sharing.updates_between)
        return num_batches >= least and now >= self._due_at + seconds

    def _is_time(self, now: float) -> bool:
        """Return whether clusters have trained enough, on average, and the last round would be over."""
        self._due_at = now if self._due_at is None else self._due_at
        return self.is_due(self._ledger.num_updates, now)

    def _open(
        self,
        clusters: tuple[ClusterState, ...],
        now: float,
        is_final: bool = False,
        sums_gradients: bool = False,
    ) -> list[Send]:
        assert self._decision is None, "one round at a time"
        placement, ledger, config = self._placement, self._ledger, self._config
        expected = max(self._seconds, self._foreseen)
        seconds = (self._timeouts.round_seconds + 4 * expected) * min(2**self._num_late, _MOST_TIMES)
        # A gradient round waits until its batch is trained; a cluster that hangs is found by its silence.
        seconds = self._most_seconds if sums_gradients else min(seconds, self._most_seconds)
        self._num_opened += 1
        self._opened_at, self._members_by, self._deadline = now, now + seconds, now + _PATIENCE * seconds
        self._is_final, self._clusters, self._sums_gradients = is_final, clusters, sums_gradients
        self._by_node = {name: cluster for cluster in clusters for name in cluster.nodes}
        present = set(clusters)
        self._left_out = tuple(each.name for each in placement.running if each not in present)
        names = dict.fromkeys(name for cluster in clusters for name in cluster.nodes)
        round_id = RoundId(self._num_opened)
        self._roster = None if sums_gradients else self._find_roster(clusters)
        robust = None if self._roster is None else RobustDecision(round_id, self._roster)
        self._decision = robust or RoundDecision(round_id, tuple(names))
        is_blocking = self._is_blocking = is_final or self.stands_still
        absent, anchor_round = placement.absent(names), ledger.progress.anchor_round(clusters)
        # Without a common average the weights of the most trained cluster are the anchor.
        first = ledger.progress.most_trained(clusters) if anchor_round is None else None
        anchor_round = round_id if anchor_round is None else anchor_round
        wire_format = config.exact_gradients if sums_gradients else config.deltas
        least = choose_least_chunk(placement.slowest_link(names), wire_format)
        away = _absent_by_owner(absent, placement.rings)
        sends = placement.introduce(absent)
        for cluster in clusters:
            opened = RoundOpen(cluster.build_id, round_id, seconds, is_blocking, is_final, (), anchor_round)
            opened = replace(opened, is_anchor=cluster is first and not sums_gradients, least_chunk=least)
            opened = replace(opened, sums_gradients=sums_gradients)
            told = ((name, replace(opened, left_out=away.get(name, ()))) for name in cluster.nodes)
            sends += [Send(name, self._weigh(each, name)) for name, each in told]
        return sends

    def _find_roster(self, clusters: tuple[ClusterState, ...]) -> RobustRoster | None:
        """Return who takes part in a robust round, with weights from the books; None: it is a plain one."""
        if not self._settings.mean.is_robust(len(self._placement.running), len(clusters)):
            return None
        names = {name for cluster in clusters for name in cluster.nodes}
        rings = {
            SegmentId(number): tuple(owner for owner in ring.owners if owner in names)
            for number, ring in enumerate(self._placement.rings)
        }
        share = len(self._placement.clusters) if self._placement.sharing.is_split else 1
        samples, resting = self._settings.batch_size / share, self._suspicions.resting
        members = self._placement.membership
        return RobustRoster(
            {each.cluster_id: each.nodes for each in clusters},
            rings,
            {each.cluster_id: weigh_cluster(self._ledger, each, samples) for each in clusters},
            resting=frozenset(x for each in clusters if each.cluster_id in resting for x in each.nodes),
            hidden=frozenset(x for x in names if x in members and not members[x].node.is_reachable),
        )

    def _weigh(self, opened: RoundOpen, name: NodeId) -> RoundOpen:
        """Tell a member of a robust round of those that it shares a segment with: all would not fit."""
        roster = self._roster
        if roster is None:
            return opened
        partners = roster.partners(name)
        weights = tuple((x, roster.weights[roster.cluster_of(x)]) for x in partners)
        resting, hidden = (
            tuple(sorted(each.intersection(partners))) for each in (roster.resting, roster.hidden)
        )
        return replace(opened, weights=weights, resting=resting, hidden=hidden)

    def _suspects(self, most_hops: int) -> dict[str, str | None]:
        """Return the cluster that each one waited for that gave up; None where it waited for a later hop."""
        found: dict[str, str | None] = {}
        for name, abort in self._given_up.items():
            suspect = self._find(abort.suspect) if abort.hops <= most_hops else None
            cluster = self._find(name)
            assert cluster is not None
            if suspect is not None or cluster.cluster_id not in found:
                found[cluster.cluster_id] = suspect.cluster_id if suspect else None
        return found

    def _give_up(self, now: float) -> Ended:
        assert self._decision is not None
        if isinstance(self._decision, RobustDecision):
            return self._give_up_robust(self._decision, now)
        sender, abort = next(iter(self._given_up.items()))
        self._decision.give_up(sender, abort.reason, abort.suspect)
        hops = (each.hops for each in self._given_up.values() if each.suspect is not None)
        return self._settle(now, judge(self._suspects(min(hops, default=1))))

    def _give_up_robust(self, decision: RobustDecision, now: float) -> Ended:
        """Abort a robust round: for a contradiction nobody is left out until it is clear who lies."""
        sender, abort = next(iter(self._given_up.items()))
        decision.give_up(sender, abort.reason, abort.suspect)
        lies = [(name, x) for name, x in self._given_up.items() if x.is_lie and self._find(x.suspect)]
        for name, each in lies:
            assert each.suspect is not None
            pair = (name, each.suspect) if each.hops == 1 else (each.suspect, name)
            decision.disputes.append(Dispute(*pair, each.reason))
        if lies:
            return self._settle(now)
        if decision.awaits_pledges:
            silent = self._cluster_ids(decision.missing - self._given_up.keys())
            return self._settle(now, silent or self._cluster_ids(decision.missing))
        hops = (each.hops for each in self._given_up.values() if each.suspect is not None)
        return self._settle(now, judge(self._suspects(min(hops, default=1))))

    def _judge_robust(self, decision: RobustDecision) -> dict[str, str]:
        """Record what a robust round showed; return the clusters that were unlike all others, and why."""
        assert self._roster is not None
        liars = self._suspicions.record_disputes(decision.disputes, self._roster) | decision.liars
        outliers: dict[str, str] = {}
        # Beside training, a change has in it how far a cluster was from the others before: no measure.
        if isinstance(decision.outcome, RoundCommit) and self._is_blocking:
            likeness = compare_clusters(decision.sights, self._roster)
            outliers = self._suspicions.record_likeness(likeness)
        for cluster_id, reason in outliers.items():
            nodes = self._roster.clusters[cluster_id]
            if self._suspicions.mark(cluster_id) and len(nodes) == 1:
                liars[nodes[0]] = reason
        self._liars |= liars
        return outliers | {self._roster.cluster_of(name): reason for name, reason in liars.items()}

    def _settle(self, now: float, blamed: Collection[str] = ()) -> Ended:
        """End the round; after an abort the clusters that are not to blame may try again at once."""
        assert self._decision is not None
        outcome = self._decision.outcome
        assert outcome is not None, "a round ends with its decision"
        unlike = self._judge_robust(self._decision) if isinstance(self._decision, RobustDecision) else {}
        self._decision, self._given_up = None, {}
        self._outcomes.append(outcome)
        seconds, is_committed = now - self._opened_at, isinstance(outcome, RoundCommit)
        self._is_due_again = not is_committed
        if is_committed:
            self._backoff.forgive(self._clusters)
            self._num_late = 0
            if not self._sums_gradients:  # which wait for their batch
                self._seconds = (self._seconds + seconds) / 2 if self._seconds else seconds
            self._num_tries = _LAST_TRIES if self._is_final else 0
        elif now >= self._members_by:
            self._num_late += 1
        late = [each for each in self._clusters if each.cluster_id in {*blamed, *unlike}]
        excluded = [(each, self._backoff.exclude(each)) for each in late]
        told = RoundEnded(
            outcome.round_id,
            is_committed,
            self._is_final,
            "" if isinstance(outcome, RoundCommit) else outcome.reason,
            seconds,
            self._left_out,
            () if self._sums_gradients else tuple((each.name, rounds) for each, rounds in excluded),
            tuple((x.name, unlike[x.cluster_id]) for x in self._clusters if x.cluster_id in unlike),
        )
        sends = tuple(Send(name, outcome) for each in self._clusters for name in each.nodes)
        if self._sums_gradients:
            self._stuck += [each for each, rounds in excluded if rounds > _FEW_ROUNDS]
        return Ended(told, sends, self._sums_gradients)

    def pop_stuck(self) -> list[ClusterState]:
        """Return the clusters that held up one gradient round after the other, once."""
        stuck, self._stuck = self._stuck, []
        return stuck

    def suspect(self, cluster: ClusterState, reason: str) -> int:
        """Leave a cluster out that is unlike the others; return of how many rounds."""
        if self._suspicions.mark(cluster.cluster_id) and len(cluster.nodes) == 1:
            self._liars[cluster.root] = reason
        return self._backoff.exclude(cluster)

    def pop_liars(self) -> list[tuple[NodeId, str]]:
        """Return the nodes that robust rounds found to lie, and why, once."""
        liars, self._liars = self._liars, {}
        return [*liars.items()]

    @property
    def _foreseen(self) -> float:
        """The seconds a round takes; where training leaves nothing of a link, no number foresees them."""
        seconds, most = self._placement.outline.round_seconds, self._most_seconds
        return seconds if 0 <= seconds < most else most

    @property
    def _most_seconds(self) -> float:
        """What a round may take: longer where the plan says so, as with few owners that can be dialled."""
        seconds, config = self._placement.outline.round_seconds, self._config
        most = config.max_relayed_round_seconds
        is_long = config.max_round_seconds < seconds <= _MOST_TIMES * most
        return max(most, _PATIENCE * seconds) if is_long else config.max_round_seconds

    def _cluster_ids(self, names: Collection[NodeId]) -> frozenset[str]:
        found = (self._by_node.get(name) for name in names)
        return frozenset(each.cluster_id for each in found if each is not None)

    def _find(self, name: NodeId | None) -> ClusterState | None:
        return self._by_node.get(name) if name is not None else None
