"""Membership: nodes join, are measured, leave and go missing; each has a NodePhase.

Membership knows nothing of plans. Placement says which node hosts which stage, and moves nodes between
SPARE, BUILDING and HOSTING.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from ravnest.hub.coordinator.events import PeerJoined
from ravnest.hub.coordinator.phases import NODE_TRANSITIONS, NodePhase, follow
from ravnest.ids import NodeId
from ravnest.plan.types import Node
from ravnest.protocol.membership import Fact

# Wider than any machine is; the planner divides and multiplies these, and what overflows ends the hub.
_FACTS = {
    "memory_bytes": (0.0, 1e18),
    "flops_per_second": (1.0, 1e21),
    "upload_bytes_per_second": (1.0, 1e15),
    "download_bytes_per_second": (1.0, 1e15),
    "latency_seconds": (0.0, 1e3),
    "uptime_seconds": (1.0, 1e12),
}


@dataclass(frozen=True, slots=True)
class HeldState:
    """State that a node has: of these positions, as a cluster had them."""

    start: int
    stop: int
    cluster_id: str


@dataclass(frozen=True, slots=True)
class Member:
    """A peer that has joined, and the build it was told to follow."""

    node: Node
    key: str
    addresses: tuple[str, ...]
    phase: NodePhase
    number: int = 0  # in the order of joining
    build_id: int = 0
    guessed: tuple[Fact, ...] = ()  # facts of the node that are still to be measured
    probe_by: float | None = None  # the deadline of its probe, once it is ordered
    held: HeldState | None = None
    leaves_by: float | None = None  # the deadline of its handover, once it is leaving
    leaves_for: str = ""
    back_by: float | None = None  # the deadline of its return, while it is missing
    resumes: NodePhase | None = None  # the phase it was in, while it is missing

    @property
    def present_phase(self) -> NodePhase:
        """Its phase, or the one it will resume when it is back."""
        return self.phase if self.resumes is None else self.resumes

    @property
    def is_leaving(self) -> bool:
        """Whether it wants to go, missing or not."""
        return self.present_phase is NodePhase.LEAVING


def is_sensible(node: Node) -> bool:
    """Return whether a plan can be made with what a peer says of its machine."""
    return all(least <= getattr(node, fact) <= most for fact, (least, most) in _FACTS.items())


class Membership:
    """The members by name, in the order of joining, with an index by phase."""

    def __init__(self) -> None:
        self._members: dict[NodeId, Member] = {}
        self._by_phase: dict[NodePhase, set[NodeId]] = {phase: set() for phase in NodePhase}
        self._unasked: dict[NodeId, None] = {}  # to be measured, no probe is ordered yet
        self._probed: dict[NodeId, None] = {}  # probes are ordered, the oldest first
        self._num_joined = 0

    def __contains__(self, name: NodeId) -> bool:
        return name in self._members

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._members)

    def __getitem__(self, name: NodeId) -> Member:
        return self._members[name]

    @property
    def members(self) -> tuple[Member, ...]:
        """All members in the order of joining."""
        return tuple(self._members.values())

    def find(self, name: NodeId) -> Member | None:
        """Return the member of a name, if there is one."""
        return self._members.get(name)

    def in_phase(self, *phases: NodePhase) -> tuple[Member, ...]:
        """Return the members in a phase, or in one of several, in the order of joining."""
        found = [self._members[name] for phase in phases for name in self._by_phase[phase]]
        if not found:  # as nearly always of those that leave or are missing
            return ()
        return tuple(sorted(found, key=lambda member: member.number))

    @property
    def leaving(self) -> tuple[Member, ...]:
        """Members that go as soon as nobody needs them; missing ones are waited for first."""
        return self.in_phase(NodePhase.LEAVING)

    @property
    def missing(self) -> tuple[Member, ...]:
        """Members that a restarted hub waits for."""
        return self.in_phase(NodePhase.MISSING)

    @property
    def is_measuring(self) -> bool:
        """Whether facts of a member are still to be measured, of a missing one too."""
        return bool(self._unasked or self._probed)

    @property
    def probe_due(self) -> float | None:
        """When the first probe is given up: all have as long, so it is the one that was ordered first."""
        return next((self._members[name].probe_by for name in self._probed), None)

    def list_to_probe(self, now: float) -> tuple[Member, ...]:
        """Return members whose probe is to be ordered or is given up by now, in the order of joining."""
        due = self.probe_due
        if not self._unasked and (due is None or now < due):
            return ()
        probed = (self._members[name] for name in self._probed)
        overdue = takewhile(lambda member: member.probe_by is not None and now >= member.probe_by, probed)
        found = (*(self._members[name] for name in self._unasked), *overdue)
        return tuple(sorted(found, key=lambda member: member.number))

    def join(self, event: PeerJoined) -> Member:
        """Add a peer; facts that its provider only guessed are measured first."""
        phase = NodePhase.PROBING if event.guessed else NodePhase.SPARE
        self._num_joined += 1
        facts = (event.node, event.key, event.addresses, phase, self._num_joined)
        member = Member(*facts, guessed=event.guessed)
        self.update(member)
        return member

    def remove(self, name: NodeId) -> None:
        """Forget a peer."""
        self._by_phase[self._members.pop(name).phase].discard(name)
        self._unasked.pop(name, None)
        self._probed.pop(name, None)

    def update(self, member: Member) -> None:
        """Store other facts about a member; its phase changes by `move` alone."""
        name = member.node.name
        before = self._members.get(name)
        if before is not None and before.phase is not member.phase:
            self._by_phase[before.phase].discard(name)
        self._members[name] = member
        self._by_phase[member.phase].add(name)
        if member.guessed or (before is not None and before.guessed):
            self._index_probe(name, member)

    def _index_probe(self, name: NodeId, member: Member) -> None:
        index = self._unasked if member.probe_by is None else self._probed
        for each in (self._unasked, self._probed):
            if each is not index or not member.guessed:
                each.pop(name, None)
        if member.guessed:
            index.setdefault(name)

    def move(self, name: NodeId, phase: NodePhase) -> None:
        """Move a member to a phase; a missing one will resume in it."""
        member = self._members[name]
        after = follow(NODE_TRANSITIONS, member.present_phase, phase)
        is_missing = member.phase is NodePhase.MISSING
        self.update(replace(member, resumes=after) if is_missing else replace(member, phase=after))

    def begin_build(self, name: NodeId, build_id: int) -> None:
        """Move a member to BUILDING: it follows this build from now on."""
        member = self._members[name]
        after = follow(NODE_TRANSITIONS, member.present_phase, NodePhase.BUILDING)
        facts: dict[str, Any] = {"resumes" if member.phase is NodePhase.MISSING else "phase": after}
        self.update(replace(member, build_id=build_id, **facts))

    def end_probe(self, name: NodeId, node: Node) -> None:
        """Plan with these facts about a member from now on: they are measured, or believed."""
        self.update(replace(self._members[name], node=node, guessed=(), probe_by=None))
        self.move(name, NodePhase.SPARE)

    def begin_leave(self, name: NodeId, reason: str, leaves_by: float) -> None:
        """Begin the leave of a member: it stays until nothing is lost by it, or until a deadline."""
        self.update(replace(self._members[name], leaves_by=leaves_by, leaves_for=reason))
        self.move(name, NodePhase.LEAVING)

    def mark_all_missing(self, back_by: float) -> None:
        """Wait for all members, after the hub was away; probes that were under way are ordered anew."""
        for member in self.members:
            resumes, phase = member.present_phase, NodePhase.MISSING
            self.update(replace(member, back_by=back_by, probe_by=None, phase=phase, resumes=resumes))

    def come_back(self, name: NodeId, addresses: tuple[str, ...]) -> None:
        """Return a missing member to the phase it was in."""
        member = self._members[name]
        phase = follow(NODE_TRANSITIONS, member.phase, member.present_phase)
        self.update(replace(member, back_by=None, addresses=addresses, phase=phase, resumes=None))
