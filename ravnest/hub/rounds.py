"""When clusters average, and what becomes of each round: the coordinator's side, one round at a time.

The decision itself is averaging.round's. An event is in the hub's log before its orders leave, so a decision
is on disk when the vote that made it is: replaying the log decides the same. Driven by hub.state.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace

from ravnest.averaging.ring import choose_least_chunk
from ravnest.averaging.round import RoundDecision
from ravnest.config import Averaging, PlanConfig
from ravnest.hub.attendance import Attendance, judge
from ravnest.hub.events import JobGiven, Send
from ravnest.hub.members import ClusterState, Members
from ravnest.hub.news import RoundEnded
from ravnest.hub.training import Training
from ravnest.plan.types import NodeId
from ravnest.protocol import (
    Refusal,
    RoundAbort,
    RoundCommit,
    RoundId,
    RoundOpen,
    RoundOutcome,
    RoundQuery,
    RoundReady,
)

_LEAST_BATCHES = 5  # per cluster between rounds, where the time they take decides
_LEAST_SECONDS = 10.0  # a member gets, and four times what a round takes
_PATIENCE = 1.25  # the hub waits longer for votes than members try
_HEARING_SECONDS = 5.0  # within which all whose deadline it is say whom they waited for
_MOST_TIMES = 4  # as long as foreseen, after rounds that were too short for all
_LAST_TRIES = 3  # at the last round, before the result is one cluster's alone
_REMEMBERED = 16  # rounds whose outcome a member may still ask for


@dataclass(frozen=True, slots=True)
class Ended:
    """What people are told of a round, and what all who took part are."""

    told: RoundEnded
    sends: tuple[Send, ...]


class Rounds:
    """Says when the next round comes and of whom, opens it, collects votes, tells the outcome."""

    def __init__(self) -> None:
        self._num_opened = 0
        self._decision: RoundDecision | None = None
        self._clusters: tuple[ClusterState, ...] = ()  # of the last round
        self._left_out: tuple[str, ...] = ()  # of it, although they train
        self._given_up: dict[NodeId, RoundAbort] = {}  # who will not vote any more, while others are heard
        self._opened_at = self._members_by = self._deadline = 0.0
        self._is_final = False
        self._outcomes: deque[RoundOutcome] = deque(maxlen=_REMEMBERED)
        self.restart()

    def restart(self) -> None:
        """Count from nothing: training begins, or begins again."""
        self._attendance = Attendance()
        self._num_tries = 0  # at the last round
        self._is_due_again = False  # the last one was aborted, and may commit without who was to blame
        self._num_late = 0  # rounds in a row that somebody could not end in time
        self._seconds = 0.0  # that a round takes, as measured
        self._num_updates = 0  # of all clusters, when a round was last due
        self._due_at: float | None = None  # when that was, or training began

    @property
    def due(self) -> float | None:
        """When the open round expires; None when no round is open."""
        return self._deadline if self._decision else None

    def open_due(self, members: Members, training: Training, job: JobGiven, now: float) -> list[Send]:
        """Order a round if the clusters have trained enough for it, or may try the last one again."""
        running = members.running
        if self._decision or len(running) < 2:
            return []
        is_again, self._is_due_again = self._is_due_again, False
        if not is_again or len(self._attendance.present(running)) < 2:
            if not self._is_time(members, training, job, now):
                return []
            self._attendance.begin_period()
        self._num_updates, self._due_at = training.num_updates, now
        clusters = self._attendance.present(running)
        return self._open(clusters, members, training, job.config, now) if len(clusters) > 1 else []

    def open_last(self, members: Members, training: Training, job: JobGiven, now: float) -> list[Send]:
        """Order the last round, if it is still to be tried: first of all, then without who held it up."""
        if self._decision or len(members.running) < 2 or self._num_tries == _LAST_TRIES:
            return []
        self._num_tries += 1
        clusters = self._attendance.present(members.running)
        if self._num_tries == 1 or len(clusters) < 2:
            clusters = members.running
        return self._open(clusters, members, training, job.config, now, is_final=True)

    def receive(self, sender: NodeId, message: RoundReady | RoundAbort, now: float) -> Ended | Refusal | None:
        """Take a vote, or a member that gives up; at the deadline all are heard before somebody is blamed."""
        if self._decision is None or message.round_id != self._num_opened:
            return Refusal(f"{type(message).__name__} of round {message.round_id}, which is not open")
        if self._find(sender) is None:
            return Refusal(f"{sender} is no member of round {message.round_id}")
        if isinstance(message, RoundAbort):
            if not self._given_up:
                self._deadline = min(self._deadline, now + _HEARING_SECONDS)
            self._given_up.setdefault(sender, message)
        elif message.member != sender:
            return Refusal(f"{sender} votes for {message.member}")
        else:
            outcome = self._decision.vote(message)
            if isinstance(outcome, Refusal):
                return outcome
            if outcome is not None:
                return self._settle(now, self._holders(self._decision.suspects))
        # All have spoken, but for those who would not be believed; or it is about something else than time.
        unheard = self._holders(self._decision.missing - self._given_up.keys())
        is_heard = now < self._members_by or unheard <= set(self._suspects(most_hops=1).values())
        return self._give_up(now) if self._given_up and is_heard else None

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
        self._decision.expire(now)
        return self._settle(now, self._holders(self._decision.suspects))

    def answer(self, sender: NodeId, query: RoundQuery) -> Send | Refusal:
        """Tell a member what became of a round."""
        for outcome in self._outcomes:
            if outcome.round_id == query.round_id:
                return Send(sender, outcome)
        return Refusal(f"{sender} asks for round {query.round_id}, whose outcome is not known")

    def _is_time(self, members: Members, training: Training, job: JobGiven, now: float) -> bool:
        """Return whether clusters have trained enough, on average, and the last round would be over."""
        since = self._due_at = now if self._due_at is None else self._due_at
        num_batches = (training.num_updates - self._num_updates) / len(members.running)
        if job.settings.average_every is not None:
            return num_batches >= job.settings.average_every
        seconds = self._seconds or _foreseen(members, job.config)
        share = job.config.averaging_share if job.config.averaging is Averaging.BLOCKING else 1.0
        return num_batches >= _LEAST_BATCHES and now >= since + seconds / share

    def _open(
        self,
        clusters: tuple[ClusterState, ...],
        members: Members,
        training: Training,
        config: PlanConfig,
        now: float,
        is_final: bool = False,
    ) -> list[Send]:
        assert self._decision is None, "one round at a time"
        expected = max(self._seconds, _foreseen(members, config))
        seconds = (_LEAST_SECONDS + 4 * expected) * min(2**self._num_late, _MOST_TIMES)
        seconds = min(seconds, config.max_round_seconds)
        self._num_opened += 1
        self._opened_at, self._members_by, self._deadline = now, now + seconds, now + _PATIENCE * seconds
        self._is_final, self._clusters = is_final, clusters
        self._left_out = tuple(each.name for each in members.running if each not in clusters)
        names = tuple(name for cluster in clusters for name in cluster.nodes)
        round_id = RoundId(self._num_opened)
        self._decision = RoundDecision(round_id, names, self._deadline)
        is_blocking = is_final or config.averaging is Averaging.BLOCKING
        absent, base = members.absent(names), training.base(clusters)
        first = training.most_trained(clusters) if base is None else None  # whose weights are the anchor
        base = round_id if base is None else base
        least = choose_least_chunk(members.slowest_link(names), config.deltas)
        sends = []
        for cluster in clusters:
            opened = RoundOpen(cluster.epoch, round_id, seconds, is_blocking, is_final, absent, base)
            opened = replace(opened, is_anchor=cluster is first, least_chunk=least)
            sends += [Send(name, opened) for name in cluster.nodes]
        return sends

    def _suspects(self, most_hops: int) -> dict[str, str | None]:
        """Whom the clusters of those who gave up waited for; who waits for a later hop knows of nobody."""
        found: dict[str, str | None] = {}
        for name, abort in self._given_up.items():
            suspect = self._find(abort.suspect) if abort.hops <= most_hops else None
            cluster = self._find(name)
            assert cluster is not None
            if suspect is not None or cluster.holder not in found:
                found[cluster.holder] = suspect.holder if suspect else None
        return found

    def _give_up(self, now: float) -> Ended:
        assert self._decision is not None
        sender, abort = next(iter(self._given_up.items()))
        self._decision.give_up(sender, abort.reason, abort.suspect)
        hops = (each.hops for each in self._given_up.values() if each.suspect is not None)
        return self._settle(now, judge(self._suspects(min(hops, default=1))))

    def _settle(self, now: float, blamed: Collection[str] = ()) -> Ended:
        """End the round; after an abort those who are not to blame may try again at once."""
        assert self._decision is not None
        outcome = self._decision.logged()
        self._decision, self._given_up = None, {}
        self._outcomes.append(outcome)
        seconds, is_committed = now - self._opened_at, isinstance(outcome, RoundCommit)
        self._is_due_again = not is_committed
        if is_committed:
            self._attendance.note_committed(self._clusters)
            self._num_late = 0
            self._seconds = (self._seconds + seconds) / 2 if self._seconds else seconds
            self._num_tries = _LAST_TRIES if self._is_final else 0
        elif now >= self._members_by:
            self._num_late += 1
        attendance, late = self._attendance, [each for each in self._clusters if each.holder in blamed]
        told = RoundEnded(
            outcome.round_id,
            is_committed,
            self._is_final,
            "" if isinstance(outcome, RoundCommit) else outcome.reason,
            seconds,
            self._left_out,
            tuple((each.name, attendance.note_late(each)) for each in late),
        )
        return Ended(told, tuple(Send(name, outcome) for each in self._clusters for name in each.nodes))

    def _holders(self, names: Collection[NodeId]) -> frozenset[str]:
        return frozenset(each.holder for each in self._clusters if not set(names).isdisjoint(each.nodes))

    def _find(self, name: NodeId | None) -> ClusterState | None:
        return next((each for each in self._clusters if name in each.nodes), None)


def _foreseen(members: Members, config: PlanConfig) -> float:
    """Return the seconds a round takes; where training leaves nothing of a link, no number foresees them."""
    seconds = members.outlook.round_seconds
    return seconds if 0 <= seconds < config.max_round_seconds else config.max_round_seconds
