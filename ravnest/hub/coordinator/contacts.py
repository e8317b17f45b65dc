"""Contacts: whom each member is told of: its cluster, its rings, and whom it gives state to or gets it from.

In a robust round each owner of a segment sends to all others. Else a node needs those next to it in its
rings, and some more, so that a few may be absent: a list of all would grow with the swarm, and all dial all.
A round in which two are neighbours that were not told of each other introduces them.
"""

from collections.abc import Collection, Mapping, Sequence

from ravnest.hub.coordinator.membership import Membership
from ravnest.ids import NodeId, SegmentId
from ravnest.plan.types import Ring
from ravnest.protocol.placement import Contact, Rings

Extras = Mapping[NodeId, Collection[NodeId]]  # contacts of a node beside its cluster and its rings

_NEAR = 2  # owners before and after it that a node knows in a ring, if no round needs all


class Contacts:
    """Who is told of whom, and how they are reached."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._rings: tuple[Ring, ...] = ()
        self._rings_of: dict[NodeId, Rings] = {}  # by owner
        self._turns_of: dict[NodeId, tuple[int, ...]] = {}  # by owner: its place in each of them
        self._meets_all = True  # in its rings
        self._extras: Extras = {}  # as members were told last
        self._introduced: dict[NodeId, set[NodeId]] = {}  # contacts that rounds have needed since
        self._contact_of: dict[NodeId, Contact] = {}  # of those that others were told of
        # While many are told: how members are reached, and owners by rings. None: members may be others.
        self._told: dict[NodeId, Contact] | None = None
        self._owners_of: dict[tuple[SegmentId, ...], tuple[Contact, ...]] = {}

    def rings(self, name: NodeId) -> Rings:
        """Return the rings that a node is an owner of, with their numbers."""
        return self._rings_of.get(name, ())

    def follow(self, rings: tuple[Ring, ...], meets_all: bool) -> None:
        """Follow the rings of a plan; with `meets_all` a node may send to every owner in its rings."""
        self._rings, self._meets_all, self._introduced = rings, meets_all, {}
        self._rings_of, self._turns_of = {}, {}
        for index, ring in enumerate(rings):
            numbered = (SegmentId(index), ring)
            for turn, owner in enumerate(ring.owners):
                self._rings_of[owner] = (*self._rings_of.get(owner, ()), numbered)
                self._turns_of[owner] = (*self._turns_of.get(owner, ()), turn)
        here = self._membership
        self._contact_of = {each: made for each, made in self._contact_of.items() if each in here}

    def begin(self, extras: Extras) -> None:
        """Begin to tell many, while nobody comes or goes."""
        self._extras, self._introduced, self._owners_of = extras, {}, {}
        self._told = {name: self._contact(name) for name in self._membership}

    def end(self) -> None:
        """All are told."""
        self._told, self._owners_of = None, {}

    def find(
        self, name: NodeId, nodes: tuple[NodeId, ...] = (), *, has_extras: bool = True
    ) -> tuple[Contact, ...]:
        """Return whom a node is told of: those of its cluster, its extras, and of its rings."""
        extras = sorted(self._extras.get(name, ())) if has_extras else ()
        near = dict.fromkeys((*nodes, *extras))
        found = [self._contact(each) for each in near if each != name and each in self._membership]
        near[name] = None
        found += [each for each in self._owners(name) if each.node not in near]
        return tuple(found)

    def introduce(self, absent: Collection[NodeId]) -> tuple[NodeId, ...]:
        """Record who will be neighbours in a round without these; return those that do not know of it."""
        if self._meets_all:
            return ()
        away, new = frozenset(absent), dict[NodeId, None]()
        for ring in self._rings:
            turns = [turn for turn, owner in enumerate(ring.owners) if owner not in away]
            for before, turn in zip([*turns[-1:], *turns], turns, strict=False):
                distance = (turn - before) % len(ring.owners)
                if min(distance, len(ring.owners) - distance) <= _NEAR:
                    continue
                for one, other in ((before, turn), (turn, before)):
                    known = self._introduced.setdefault(ring.owners[one], set())
                    if ring.owners[other] not in known:
                        known.add(ring.owners[other])
                        new[ring.owners[one]] = None
        return tuple(new)

    def _owners(self, name: NodeId) -> Sequence[Contact]:
        """Return how the owners of a node's rings are reached that it may send to."""
        rings = self.rings(name)
        if not self._meets_all:
            near: dict[NodeId, None] = {}
            for (_, ring), turn in zip(rings, self._turns_of.get(name, ()), strict=True):
                near |= dict.fromkeys(_neighbours(ring.owners, turn))
            near |= dict.fromkeys(sorted(self._introduced.get(name, ())))
            return [self._contact(each) for each in near if each in self._membership]
        numbers = tuple(number for number, _ in rings)
        if numbers in self._owners_of:  # many nodes are in the same
            return self._owners_of[numbers]
        owners = dict.fromkeys(owner for _, ring in rings for owner in ring.owners)
        found = tuple(self._contact(each) for each in owners if each in self._membership)
        if self._told is not None:
            self._owners_of[numbers] = found
        return found

    def _contact(self, name: NodeId) -> Contact:
        """Return how a member is reached; many are told the same."""
        if self._told is not None:
            return self._told[name]
        member, found = self._membership[name], self._contact_of.get(name)
        if found is None or found.key != member.key or found.addresses != member.addresses:
            found = self._contact_of[name] = Contact(name, member.key, member.addresses)
        return found


def _neighbours(owners: tuple[NodeId, ...], turn: int) -> tuple[NodeId, ...]:
    """Return the owners next to one in a ring, in the order of the ring; in a small one these are all."""
    if len(owners) <= 2 * _NEAR + 1:
        return owners
    around = ((turn + step) % len(owners) for step in range(-_NEAR, _NEAR + 1))
    return tuple(owners[each] for each in sorted(around))
