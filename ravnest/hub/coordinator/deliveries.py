"""Deliveries: which nodes get which intervals of the hub's weights, and who passes them on to whom.

Each interval is content with a name of its own. A stage is made of those that its node has already, be it in
part, then of those that others get, and of new ones only where there are none. So the hub sends each byte
about once, also when the plan changes meanwhile. Nobody waits for a node that waits for it.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ravnest.hub.coordinator.membership import Membership
from ravnest.hub.coordinator.phases import NodePhase
from ravnest.ids import NodeId
from ravnest.plan.types import Node, Ring, Stage

Interval = tuple[int, int]

_MOST_BEFORE = 2  # nodes that pass weights on to the same one: one may be slow


@dataclass(frozen=True, slots=True)
class Share:
    """An interval of a stage whose weights come from the hub, and the nodes that get them before."""

    start: int
    stop: int
    before: tuple[NodeId, ...] = ()


class Deliveries:
    """Every node that gets weights from the hub is here, until it gets others."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._before: dict[Interval, dict[NodeId, tuple[NodeId, ...]]] = {}  # by receiver
        self._had: dict[NodeId, set[Interval]] = {}  # by nodes whose stages are no more; it is still there
        self._num_after: Counter[NodeId] = Counter()  # that get something from a node

    @property
    def intervals(self) -> Collection[Interval]:
        """All intervals that somebody gets, or has."""
        return self._before.keys()

    def clear(self) -> None:
        """Begin with other weights: what nodes have is of no use any more."""
        self._before, self._had, self._num_after = {}, {}, Counter()

    def begin(self, rings: Iterable[Ring], stages: Iterable[Stage]) -> dict[NodeId, tuple[Share, ...]]:
        """Divide first weights among all owners of rings; each gets a segment from those before it.

        Nodes that all others can dial come first, then those that send fastest: the first of them gets it
        from the hub, and as few others as can be. A cluster that is alone has no rings, and gets its stages.
        """
        self.clear()
        found: dict[NodeId, tuple[Share, ...]] = {}
        for ring in rings:
            owners = [self._membership[name].node for name in ring.owners]
            turns = sorted(owners, key=_rank_sender)
            num_reachable = sum(node.is_reachable for node in turns)  # they come first, and meet all
            interval = ring.start, ring.stop
            receivers = self._before.setdefault(interval, {})
            num_after: Counter[NodeId] = Counter()
            for turn, node in enumerate(turns):
                last = turn if node.is_reachable else min(turn, num_reachable)
                before = tuple(x.name for x in turns[max(0, last - _MOST_BEFORE) : last])
                receivers[node.name] = before
                for name in before:
                    num_after[name] += 1
                found[node.name] = (*found.get(node.name, ()), Share(*interval, before))
            self._num_after.update(num_after)
        for stage in stages:
            if stage.node not in found:
                found[stage.node] = (self._add(stage.node, (stage.start, stage.stop), ()),)
        return found

    def withdraw(self, names: Collection[NodeId]) -> None:
        """Give these nodes nothing more; what they have got of it stays with them."""
        for interval, receivers in list(self._before.items()):
            for name in names & receivers.keys():
                self._num_after.subtract(receivers.pop(name))
                self._had.setdefault(name, set()).add(interval)
            if not receivers:
                del self._before[interval]

    def forget(self, name: NodeId) -> None:
        """Forget a node that has gone, and what it has."""
        self.withdraw({name})
        self._had.pop(name, None)

    def divide(self, name: NodeId, start: int, stop: int, cuts: Collection[int]) -> tuple[Share, ...]:
        """Return of which intervals a node gets these positions, and from whom; new ones end at the cuts."""
        had = {each for each in self._had.get(name, ()) if start <= each[0] and each[1] <= stop}
        known = had | {each for each in self._before if start <= each[0] and each[1] <= stop}
        shares, position = [], start
        while position < stop:
            here = [each for each in known if each[0] == position]
            if here:
                interval = max(here, key=lambda x: (x in had, len(self._before.get(x, ())), x[1]))
            else:
                edges = (*(each[0] for each in known), *cuts, stop)
                interval = (position, min(edge for edge in edges if edge > position))
            shares.append(self._add(name, interval, self._find_before(name, interval)))
            position = interval[1]
        return tuple(shares)

    def _add(self, name: NodeId, interval: Interval, before: tuple[NodeId, ...]) -> Share:
        self._before.setdefault(interval, {})[name] = before
        self._num_after.update(before)
        return Share(*interval, before)

    def _find_before(self, name: NodeId, interval: Interval) -> tuple[NodeId, ...]:
        """Return who passes an interval on: who has all of it, and passes it to few others."""
        receivers, node = self._before.get(interval, {}), self._membership[name].node
        able = [
            member
            for member in map(self._membership.find, receivers)
            if member is not None
            and _meet(member.node, node)
            and not _waits_for(receivers, member.node.name, name)
        ]
        able.sort(
            key=lambda x: (
                self._num_after[x.node.name],
                x.phase is not NodePhase.HOSTING,
                -x.node.upload_bytes_per_second,
            )
        )
        return tuple(member.node.name for member in able[:_MOST_BEFORE])


def _rank_sender(node: Node) -> tuple[bool, float, NodeId]:
    return not node.is_reachable, -node.upload_bytes_per_second, node.name


def _meet(one: Node, other: Node) -> bool:
    return one.is_reachable or other.is_reachable


def _waits_for(before: dict[NodeId, tuple[NodeId, ...]], name: NodeId, other: NodeId) -> bool:
    """Return whether a node gets something from another, be it through others."""
    seen, left = {name}, [name]
    while left:
        for each in before.get(left.pop(), ()):
            if each == other:
                return True
            if each not in seen:
                seen.add(each)
                left.append(each)
    return False
