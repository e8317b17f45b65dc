"""A peer on virtual time: it follows the hub's orders as a real one does, and computes nothing.

It fetches what its stage is built of, hands samples to its cluster, makes snapshots of the right size, keeps
backups and takes part in rounds. What it says to the hub goes through its world.
"""

import hashlib
from dataclasses import dataclass
from typing import Protocol

from ravnest.config import TIMEOUTS
from ravnest.ids import HUB, LeaseId, NodeId, RoundId, SegmentId
from ravnest.plan.types import Ring
from ravnest.protocol.averaging import RoundAbort, RoundCommit, RoundOpen
from ravnest.protocol.membership import Leave, ProbeOrder, Stop
from ravnest.protocol.messages import Message
from ravnest.protocol.placement import (
    BackupKept,
    BackupOrder,
    BlobRef,
    FetchProgress,
    PlanOrder,
    RingOrder,
    SketchMade,
    SketchOrder,
    SnapshotMade,
    SnapshotOrder,
    StageMissing,
    StageParts,
    StageReady,
)
from ravnest.protocol.training import DroppedMicrobatch, LeaseBegin, LeaseDone, LeaseGrant, StepReport
from ravnest.sim.timeline import Timeline
from ravnest.sim.transfers import Fetch, Transfers

_REPORTED_EVERY = TIMEOUTS.peer.report_every_seconds


def made_up_hash(*facts: object) -> str:
    """Return a hash that only these facts have."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=32).hexdigest()


@dataclass(frozen=True, slots=True)
class PeerSpeeds:
    """What a peer's own work takes, in seconds."""

    build_seconds: float = 0.4  # a stage of what is here
    snapshot_seconds: float = 0.3
    probe_seconds: float = 2.0


PEER_SPEEDS = PeerSpeeds()


class PeerWorld(Protocol):
    """What a peer needs of the world around it."""

    timeline: Timeline
    transfers: Transfers
    speeds: PeerSpeeds

    def say(self, peer: "SimPeer", message: Message) -> None:
        """Send a message to the hub."""

    def report_probe(self, peer: "SimPeer", order: ProbeOrder) -> None:
        """Let the hub know how fast a peer and its link are."""

    def snapshot_bytes(self, start: int, stop: int) -> int:
        """Return the size of what a node has of an interval of the line."""

    def end_pipeline(self, name: NodeId) -> None:
        """Stop the cluster that a node has a stage in."""

    def train(self, peer: "SimPeer", grant: LeaseGrant) -> None:
        """Let the cluster of a root train or evaluate a lease."""

    def enter_round(self, peer: "SimPeer", opened: RoundOpen) -> None:
        """Let a peer take part in a round."""

    def end_round(self, peer: "SimPeer", round_id: RoundId, is_committed: bool) -> None:
        """Let a peer go on after a round."""


class SimPeer:
    """One run of a peer's program, from its join to its end."""

    def __init__(self, name: NodeId, world: PeerWorld) -> None:
        self.name, self._world = name, world
        self.is_alive = True
        self.is_leaving = False
        self.order: PlanOrder | None = None
        self.version = 0  # of its stage, when it was built
        self.held: frozenset[int] = frozenset()  # positions whose state it has
        self.rings: dict[SegmentId, Ring] = {}
        self.kept: dict[str, frozenset[int]] = {}  # snapshots that it serves, by hash
        self._fetch: Fetch | None = None
        self._grants: dict[LeaseId, LeaseGrant] = {}
        self._ahead: dict[LeaseId, LeaseGrant] = {}  # whose samples may be here, and which nobody has begun
        self._filled: set[LeaseId] = set()  # of them, those whose samples are here
        self.has_lost_hub = False  # since the plan before
        self.has_link = True
        self.unheard: list[Message] = []  # what it would have said of its work meanwhile

    @property
    def build_id(self) -> int:
        """The build that it follows; 0 before the first."""
        return self.order.build_id if self.order is not None else 0

    def end(self) -> None:
        """Stop at once: power is cut, or the hub sent it away."""
        self.is_alive = False
        self._world.end_pipeline(self.name)

    def leave(self) -> None:
        """Ask to go, and hand over what others need."""
        self.is_leaving = True
        self._world.say(self, Leave(self.build_id, "its provider wants it back", can_hand_over=True))

    def receive(self, message: Message) -> None:  # noqa: C901, PLR0912 - one short case for each
        """Follow an order of the hub, unless it is late."""
        if not self.is_alive:
            return
        if isinstance(message, PlanOrder):
            self._follow(message)
            return
        if getattr(message, "build_id", None) not in (None, self.build_id):
            return
        match message:
            case RingOrder():
                self.rings = dict(message.rings)
            case StageParts():
                self._fetch_stage(message)
            case SnapshotOrder():
                self._world.timeline.after(self._world.speeds.snapshot_seconds, self._make_snapshot, message)
            case SketchOrder():
                self._world.timeline.after(self._world.speeds.snapshot_seconds, self._make_sketch, message)
            case BackupOrder():
                self._keep_backup(message)
            case LeaseGrant():
                (self._ahead if message.is_ahead else self._grants)[message.lease] = message
            case LeaseBegin():
                self._begin_ahead(message.lease)
            case ProbeOrder():
                self._world.report_probe(self, message)
            case RoundOpen():
                self._world.enter_round(self, message)
            case RoundCommit():
                self._world.end_round(self, message.round_id, True)
            case RoundAbort():
                self._world.end_round(self, message.round_id, False)
            case Stop():
                self.end()

    def take_samples(self, lease: LeaseId) -> None:
        """Begin a lease whose samples are here."""
        grant = self._grants.pop(lease, None)
        if lease in self._ahead:
            self._filled.add(lease)
        if self.is_alive and grant is not None and grant.build_id == self.build_id:
            self._world.train(self, grant)

    def _begin_ahead(self, lease: LeaseId) -> None:
        """Begin a lease that came ahead, as soon as its samples are here."""
        grant = self._ahead.pop(lease, None)
        if grant is None:
            return
        self._grants[lease] = grant
        if lease in self._filled:
            self._filled.discard(lease)
            self.take_samples(lease)

    def begin_next(self) -> None:
        """Without the hub, begin the next lease that came ahead; its cluster has nothing else to begin."""
        lease = next((each for each in self._ahead if each in self._filled), None)
        if self.has_lost_hub and lease is not None:
            self._begin_ahead(lease)

    def lose_hub(self) -> None:
        """Train what is here."""
        self.has_lost_hub, self.has_link = True, False
        self.begin_next()

    def keep_unheard(self, message: Message) -> None:
        """Keep what a lost hub has to hear later."""
        if isinstance(message, LeaseDone | StepReport | DroppedMicrobatch):
            self.unheard.append(message)

    def find_hub(self) -> list[Message]:
        """Return what another hub is to hear; the leases that are here are still begun without it."""
        self.has_link, unheard, self.unheard = True, self.unheard, []
        return unheard

    def _follow(self, order: PlanOrder) -> None:
        if order.build_id <= self.build_id:
            return
        self._world.end_pipeline(self.name)
        if self._fetch is not None and order.stage is None:
            self._world.transfers.cancel(self._fetch)
        self.order, self.rings, self._fetch = order, dict(order.rings), None
        self.has_lost_hub = False
        for waiting in (self._grants, self._ahead, self._filled):
            waiting.clear()
        if order.stage is None:
            self.held = frozenset()

    def _fetch_stage(self, parts: StageParts) -> None:
        missed = StageMissing(parts.build_id, NodeId(""), "it does not answer")

        def miss(node: NodeId) -> None:
            if self.is_alive and self.build_id == parts.build_id:
                self._world.say(self, StageMissing(parts.build_id, node, missed.reason))

        def done() -> None:
            self._world.timeline.after(self._world.speeds.build_seconds, self._build, parts)

        self._fetch = self._world.transfers.fetch(self.name, parts.sources, done, miss)
        self._world.timeline.after(_REPORTED_EVERY, self._report_fetch, self._fetch, parts.build_id)

    def _report_fetch(self, fetch: Fetch, build_id: int) -> None:
        if not self.is_alive or fetch is not self._fetch or fetch.is_over or not fetch.num_open:
            return
        self._world.say(self, FetchProgress(build_id, int(fetch.num_bytes), int(fetch.size_bytes)))
        self._world.timeline.after(_REPORTED_EVERY, self._report_fetch, fetch, build_id)

    def _build(self, parts: StageParts) -> None:
        if not self.is_alive or self.order is None or self.build_id != parts.build_id:
            return
        assert self.order.stage is not None
        self.held = frozenset(range(self.order.stage.start, self.order.stage.stop))
        self.version = parts.version
        self._world.say(self, StageReady(parts.build_id))

    def _make_snapshot(self, order: SnapshotOrder) -> None:
        if not self.is_alive or self.build_id != order.build_id or not self.held:
            return
        start, stop = min(self.held), max(self.held) + 1
        blob = made_up_hash(self.name, order.number)
        self.kept[blob] = self.held
        weights = BlobRef(blob, self._world.snapshot_bytes(start, stop))
        made = SnapshotMade(order.build_id, order.number, self.version, weights, order.anchor_round)
        self._world.say(self, made)

    def _make_sketch(self, order: SketchOrder) -> None:
        """Say what it holds; nobody lies in here, so any bytes will do."""
        if self.is_alive and self.build_id == order.build_id and self.held:
            row = (min(self.held), max(self.held) + 1, bytes(32))
            self._world.say(self, SketchMade(order.build_id, order.number, (row,)))

    def _keep_backup(self, order: BackupOrder) -> None:
        def done() -> None:
            if self.is_alive:
                self._world.say(self, BackupKept(order.plan_id, order.number))

        if order.source.node != HUB:
            self._world.transfers.fetch(self.name, (order.source,), done)
