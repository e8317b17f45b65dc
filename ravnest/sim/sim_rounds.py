"""Rounds on virtual time: members enter, average for as long as the model of rings says, and vote.

A round begins when all its members are in. Who has not ended when the hub's deadline comes gives it up. A
gradient round begins when all its members have trained their share of the batch.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from ravnest.config import Averaging, PlanConfig
from ravnest.ids import NodeId, RoundId, SegmentId
from ravnest.plan.forecast import Forecast
from ravnest.plan.line import LineCost
from ravnest.plan.types import Ring
from ravnest.protocol.averaging import RoundAbort, RoundOpen, RoundReady
from ravnest.protocol.messages import Message
from ravnest.sim.lines import Lines
from ravnest.sim.sim_peer import SimPeer
from ravnest.sim.timeline import Timeline

LeftOver = Callable[[NodeId], float]  # the bytes per second that a round has of a node's link


def member_seconds(
    rings: Mapping[SegmentId, Ring],
    members: Collection[NodeId],
    line: LineCost,
    lines: Lines,
    left_over: LeftOver,
    ratio: float,
) -> dict[NodeId, float]:
    """Return after how many seconds each member has all its averages; `ratio` is bytes per byte of fp32."""
    rates: dict[NodeId, float] = {}
    volumes: dict[NodeId, float] = dict.fromkeys(members, 0.0)
    owners, sizes = {}, {}
    for segment, ring in rings.items():
        present = [name for name in ring.owners if name in volumes]
        if len(present) > 1:
            owners[segment] = present
            trained = float(line.trained[ring.stop] - line.trained[ring.start])
            sizes[segment] = 2.0 * (len(present) - 1) / len(present) * ratio * trained
            for name in present:
                volumes[name] += sizes[segment]
    for name in volumes:
        rates[name] = left_over(name)
    relayed = {segment: _relayed_bytes(owners[segment], sizes[segment], lines) for segment in owners}
    through_hub = _hub_seconds(sum(total for total, _ in relayed.values()), line.config)
    seconds: dict[NodeId, float] = dict.fromkeys(members, 0.0)
    for segment, present in owners.items():
        moving = max(volumes[name] / rates[name] for name in present)
        total, most = relayed[segment]
        if total:
            moving = max(moving, most / line.config.relay_bytes_per_second, through_hub)
        hops = sum(lines.latency(*pair) for pair in _neighbours(present))
        done = moving + 2.0 * hops * (len(present) - 1) / len(present)
        for name in present:
            seconds[name] = max(seconds[name], done)
    return seconds


def _neighbours(owners: list[NodeId]) -> list[tuple[NodeId, NodeId]]:
    return [*zip(owners, owners[1:] + owners[:1], strict=True)]


def _relayed_bytes(owners: list[NodeId], size: float, lines: Lines) -> tuple[float, float]:
    """Return what a ring sends through the hub, and the most that one pair does."""
    count = sum(lines.is_relayed(*pair) for pair in _neighbours(owners))
    return count * size, size if count else 0.0


def _hub_seconds(total: float, config: PlanConfig) -> float:
    return total / config.hub_bytes_per_second if config.hub_bytes_per_second else 0.0


def training_left_over(lines: Lines, used: Mapping[NodeId, tuple[float, float]], overlaps: bool) -> LeftOver:
    """Return what rounds have of each link: all of it, or what training, which uses these shares, leaves."""

    def find(name: NodeId) -> float:
        node = lines.node(name)
        upload, download = node.upload_bytes_per_second, node.download_bytes_per_second
        if overlaps:
            sent, received = used.get(name, (0.0, 0.0))
            upload, download = upload * max(0.01, 1.0 - sent), download * max(0.01, 1.0 - received)
        return float(np.minimum(upload, download))

    return find


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
