"""When clusters average, and what becomes of each round: the coordinator's side, one round at a time.

The decision itself is averaging.round's. An event is in the hub's log before its orders leave, so a decision
is on disk when the vote that made it is: replaying the log decides the same. Driven by hub.state.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil

from ravnest.averaging.round import RoundDecision
from ravnest.config import Averaging, PlanConfig
from ravnest.hub.events import JobGiven, RoundEnded, Send
from ravnest.hub.members import Members
from ravnest.plan.forecast import Forecast
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

_LEAST_BATCHES = 8  # between rounds, where the forecast decides
_LEAST_SECONDS = 10.0  # a member gets, and four times what the plan foresees
_PATIENCE = 1.25  # the hub waits longer for votes than members try
_LAST_TRIES = 3  # at the last round, before the result is one cluster's alone
_REMEMBERED = 16  # rounds whose outcome a member may still ask for


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of a round, to be sent to all who took part."""

    told: RoundEnded
    sends: tuple[Send, ...]


class Rounds:
    """Counts towards the next round, opens it, collects votes, tells the outcome."""

    def __init__(self) -> None:
        self._num_opened = 0
        self._decision: RoundDecision | None = None
        self._members: tuple[NodeId, ...] = ()
        self._deadline = 0.0
        self._is_final = False
        self._num_tries = 0  # at the last round
        self._outcomes: deque[RoundOutcome] = deque(maxlen=_REMEMBERED)
        self._num_batches = 0  # whole ones, trained by all clusters since a round was opened

    @property
    def is_open(self) -> bool:
        """Whether a round is undecided."""
        return self._decision is not None

    @property
    def deadline(self) -> float | None:
        """When the open round expires."""
        return self._deadline if self._decision else None

    def count(self, num_batches: int) -> None:
        """Note batches that some cluster trained."""
        self._num_batches += num_batches

    def is_due(self, members: Members, job: JobGiven) -> bool:
        """Return whether the clusters have trained enough, on average, for the next round."""
        num_clusters = len(members.running)
        if self.is_open or num_clusters < 2:
            return False
        return self._num_batches >= num_clusters * _batches_between(members, job)

    def is_last_due(self, members: Members) -> bool:
        """Return whether the last round is still to be tried."""
        return len(members.running) > 1 and self._num_tries < _LAST_TRIES

    def restart(self) -> None:
        """Count from nothing: training begins again."""
        self._num_tries = self._num_batches = 0

    def open(self, members: Members, config: PlanConfig, is_final: bool, now: float) -> list[Send]:
        """Order a round of all clusters that train."""
        assert self._decision is None, "one round at a time"
        seconds = min(_LEAST_SECONDS + 4 * _foreseen(members.outlook, config), config.max_round_seconds)
        self._num_opened += 1
        self._num_batches = 0
        self._deadline = now + _PATIENCE * seconds
        self._is_final = is_final
        self._num_tries = self._num_tries + 1 if is_final else 0
        self._members = tuple(name for cluster in members.running for name in cluster.nodes)
        round_id = RoundId(self._num_opened)
        self._decision = RoundDecision(round_id, self._members, self._deadline)
        is_blocking = is_final or config.averaging is Averaging.BLOCKING
        epoch = members.running[0].epoch
        message = RoundOpen(epoch, round_id, seconds, is_blocking, is_final, members.left_out)
        return [Send(name, message) for name in self._members]

    def receive(self, sender: NodeId, message: RoundReady | RoundAbort) -> Ended | Refusal | None:
        """Take a vote, or a member that gives up."""
        if self._decision is None or message.round_id != self._num_opened:
            return Refusal(f"{type(message).__name__} of round {message.round_id}, which is not open")
        if isinstance(message, RoundAbort):
            return self._settle(self._decision.give_up(sender, message.reason))
        if message.member != sender:
            return Refusal(f"{sender} votes for {message.member}")
        return self._settle(self._decision.vote(message))

    def leave(self, name: NodeId, reason: str) -> Ended | None:
        """Abort the open round if this node takes part in it."""
        if self._decision is None or name not in self._members:
            return None
        ended = self._settle(self._decision.give_up(name, reason))
        assert not isinstance(ended, Refusal)
        return ended

    def expire(self, now: float) -> Ended | None:
        """Abort the open round at its deadline."""
        if self._decision is None:
            return None
        ended = self._settle(self._decision.expire(now))
        assert not isinstance(ended, Refusal)
        return ended

    def answer(self, sender: NodeId, query: RoundQuery) -> Send | Refusal:
        """Tell a member what became of a round."""
        for outcome in self._outcomes:
            if outcome.round_id == query.round_id:
                return Send(sender, outcome)
        return Refusal(f"{sender} asks for round {query.round_id}, whose outcome is not known")

    def _settle(self, outcome: RoundOutcome | Refusal | None) -> Ended | Refusal | None:
        if outcome is None or isinstance(outcome, Refusal):
            return outcome
        assert self._decision is not None
        self._decision.logged()
        self._decision = None
        self._outcomes.append(outcome)
        is_committed = isinstance(outcome, RoundCommit)
        if is_committed and self._is_final:
            self._num_tries = _LAST_TRIES
        reason = "" if isinstance(outcome, RoundCommit) else outcome.reason
        told = RoundEnded(outcome.round_id, is_committed, self._is_final, reason)
        return Ended(told, tuple(Send(name, outcome) for name in self._members))


def _batches_between(members: Members, job: JobGiven) -> int:
    """Return the batches per cluster between rounds, so that these take their share of links or time."""
    if job.settings.average_every is not None:
        return job.settings.average_every
    periods = [cluster.period_seconds for cluster in members.outlook.clusters]  # of microbatches
    period = sum(periods) / len(periods)
    seconds = _foreseen(members.outlook, job.config) / job.config.averaging_share
    return max(_LEAST_BATCHES, ceil(seconds / (members.microbatches * period)))


def _foreseen(outlook: Forecast, config: PlanConfig) -> float:
    """Return the seconds a round takes; where training leaves nothing of a link, no number foresees them."""
    seconds = outlook.round_seconds
    return seconds if 0 <= seconds < config.max_round_seconds else config.max_round_seconds
