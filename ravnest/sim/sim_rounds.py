"""Rounds on virtual time: members enter, average for as long as the model of rings says, and vote.

A round begins when all its members are in. Who has not ended when the hub's deadline comes gives it up. A
gradient round begins when all its members have trained their share of the batch.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from ravnest.config import Averaging, PlanConfig
from ravnest.ids import NodeId, RoundId, SegmentId
from ravnest.plan.forecast import Forecast
from ravnest.plan.line import LineCost
from ravnest.plan.types import Ring
from ravnest.protocol.averaging import RoundAbort, RoundOpen, RoundReady
from ravnest.protocol.messages import Message
from ravnest.sim.lines import Lines
from ravnest.sim.ring_times import member_seconds, training_left_over
from ravnest.sim.sim_peer import SimPeer
from ravnest.sim.timeline import Timeline

Say = Callable[[SimPeer, Message], object]


@dataclass(slots=True)
class PlanFacts:
    """The costs of the plan in force, as rounds and pipelines need them."""

    line: LineCost
    outlook: Forecast
    averaging: Averaging
    used: dict[NodeId, tuple[float, float]] = field(default_factory=dict)  # of links, by training: up, down

    @classmethod
    def of(cls, line: LineCost, outlook: Forecast, averaging: Averaging) -> "PlanFacts":
        """Return the facts of a plan: what training uses of the links of each node."""
        used = {
            stage.stage.node: (
                line.link_share * stage.send_seconds / cluster.period_seconds,
                line.link_share * stage.receive_seconds / cluster.period_seconds,
            )
            for cluster in outlook.clusters
            for stage in cluster.stages
        }
        return cls(line, outlook, averaging, used)


@dataclass(slots=True)
class _OpenRound:
    opened: RoundOpen
    expected: set[NodeId]
    members: dict[NodeId, SimPeer] = field(default_factory=dict)
    voted: set[NodeId] = field(default_factory=set)
    has_begun: bool = False


class SimRounds:
    """The round that is open, if there is one; the hub never has two."""

    def __init__(self, timeline: Timeline, lines: Lines, config: PlanConfig, say: Say) -> None:
        self._timeline, self._lines, self._config, self._say = timeline, lines, config, say
        self._open: _OpenRound | None = None

    def expect(self, opened: RoundOpen, members: set[NodeId]) -> None:
        """Record which members the hub asked."""
        self._open = _OpenRound(opened, members)

    def enter(self, peer: SimPeer, opened: RoundOpen, facts: PlanFacts) -> None:
        """Let a member in; with the last one the round begins."""
        current = self._open
        if current is None or current.opened.round_id != opened.round_id:
            return
        if not current.members:
            self._timeline.after(opened.deadline_seconds, self._expire, current)
        current.members[peer.name] = peer
        if current.members.keys() >= current.expected and not current.has_begun:
            current.has_begun = True
            self._begin(current, facts)

    def _begin(self, current: _OpenRound, facts: PlanFacts) -> None:
        rings: dict[SegmentId, Ring] = {}
        for peer in current.members.values():
            rings |= peer.rings
        sums, config = current.opened.sums_gradients, self._config
        overlaps = not current.opened.is_blocking and not sums
        ratio = config.exact_gradients.ratio if sums else config.deltas.ratio
        left_over = training_left_over(self._lines, facts.used, overlaps)
        names = tuple(current.members)
        seconds = member_seconds(rings, names, facts.line, self._lines, left_over, ratio)
        for name in names:
            self._timeline.after(seconds[name], self._vote, current, current.members[name])

    def _vote(self, current: _OpenRound, peer: SimPeer) -> None:
        if current is not self._open or not peer.is_alive:
            return
        current.voted.add(peer.name)
        round_id = current.opened.round_id
        hashes = tuple((segment, _digest(round_id, segment)) for segment in peer.rings)
        self._say(peer, RoundReady(round_id, peer.name, hashes))

    def _expire(self, current: _OpenRound) -> None:
        if current is not self._open:
            return
        late = current.expected - current.members.keys()
        suspect = min(late, default=None)
        for name, peer in current.members.items():
            if name not in current.voted and peer.is_alive:
                self._say(peer, RoundAbort(current.opened.round_id, "no average in time", suspect))

    def end(self, round_id: RoundId) -> None:
        """Forget a round that is over."""
        if self._open is not None and self._open.opened.round_id == round_id:
            self._open = None


def _digest(round_id: RoundId, segment: SegmentId) -> bytes:
    return hashlib.blake2b(f"{round_id} {segment}".encode(), digest_size=16).digest()
