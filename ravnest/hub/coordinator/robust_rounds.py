"""The hub's side of a robust round: pledges, the call, votes, checks; and who is to blame.

A step ends when all members have taken it. Contributions of a cluster that are much longer than those of the
others are made shorter, or left out. When all have voted alike the hub draws one chunk of each owner and one
who makes it again. The draw follows from all pledges together, so no member foresees it, and a hub that
replays its log draws the same.

Two that contradict each other cannot be told apart by one round. A cluster that contradicts two others is the
liar; until then the owner or checker of the pair owns no part and checks nothing, so it cannot accuse again.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from statistics import median

from blake3 import blake3

from ravnest.averaging.direct import find_owners, place_parts
from ravnest.hub.coordinator.events import Send
from ravnest.ids import NodeId, RoundId, SegmentId
from ravnest.protocol.averaging import (
    Pledge,
    PledgeTerms,
    RoundAbort,
    RoundCall,
    RoundCheck,
    RoundChecked,
    RoundCommit,
    RoundOutcome,
    RoundPledge,
    RoundReady,
    Sight,
)

_CLIP = 3.0  # times the median length of all clusters, by sample: what is longer is made shorter
_LEFT_OUT = 30.0  # times: what is longer is left out
_LIMIT = 3.0 * _CLIP  # a finished part is no longer; rounding makes it longer
_MOST_LENGTH = 1e30  # that a message can tell
_LIARS = 5  # one of so many clusters may lie, and one of four
_MOST_MARKS = 3  # rounds in which a cluster was unlike all others
_TICKETS = 2**20
_TINY = 1e-24

_MemberMessage = RoundPledge | RoundReady | RoundChecked


class _Step(StrEnum):
    PLEDGES = "pledge"
    VOTES = "vote"
    CHECKS = "check"


class _Draw:
    """Numbers that follow from a key, for ever the same."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def below(self, stop: int) -> int:
        """Return the next number from 0 to below `stop`, each as likely as the others."""
        self._count += 1
        drawn = blake3(self._key).update(self._count.to_bytes(8)).digest(16)
        return int.from_bytes(drawn) % stop


@dataclass(frozen=True)
class RobustRoster:
    """Who takes part in a robust round: nodes by cluster, owners by segment, and how much clusters count."""

    clusters: Mapping[str, tuple[NodeId, ...]]
    rings: Mapping[SegmentId, tuple[NodeId, ...]]
    weights: Mapping[str, float]
    resting: frozenset[NodeId] = frozenset()  # they own no part
    hidden: frozenset[NodeId] = frozenset()  # nobody can dial them: they own parts where no other does

    def owners_of_parts(self, segment: SegmentId) -> tuple[NodeId, ...]:
        """Return which members of a segment own parts of it."""
        return find_owners(self.rings[segment], self.resting, self.hidden)

    def cluster_of(self, node: NodeId) -> str:
        """Return the cluster of a member."""
        return self._clusters_by_node[node]

    def shared(self, one: NodeId, other: NodeId) -> list[SegmentId]:
        """Return the segments that two members share, in order."""
        others = self._segments_by_node.get(other, {})
        return sorted(number for number in self._segments_by_node.get(one, {}) if number in others)

    def partners(self, node: NodeId) -> list[NodeId]:
        """Return all that a member shares a segment with, itself too."""
        segments = self._segments_by_node.get(node, {})
        return list(dict.fromkeys(x for number in segments for x in self.rings[number]))

    @cached_property
    def _clusters_by_node(self) -> dict[NodeId, str]:
        return {node: each for each, nodes in self.clusters.items() for node in nodes}

    @cached_property
    def _segments_by_node(self) -> dict[NodeId, dict[SegmentId, None]]:
        found: dict[NodeId, dict[SegmentId, None]] = {}
        for number, owners in self.rings.items():
            for owner in owners:
                found.setdefault(owner, {})[number] = None
        return found


@dataclass(frozen=True, slots=True)
class Dispute:
    """An owner and another member contradict each other."""

    owner: NodeId
    other: NodeId
    reason: str


class RobustDecision:
    """Collects what members say, each in its own name, and decides once."""

    def __init__(self, round_id: RoundId, roster: RobustRoster) -> None:
        self._round_id, self._roster = round_id, roster
        self._members = tuple(name for nodes in roster.clusters.values() for name in nodes)
        self._step, self._missing = _Step.PLEDGES, dict.fromkeys(self._members)
        self._pledges: dict[NodeId, dict[NodeId, Pledge]] = {}
        self._factors: dict[tuple[str, NodeId], float] = {}
        self._votes: dict[NodeId, RoundReady] = {}
        self._checks: dict[tuple[SegmentId, NodeId], list[NodeId]] = {}  # who checked an owner so far
        self._draw = _Draw(b"")
        self._outcome: RoundOutcome | None = None
        self.suspects: tuple[NodeId, ...] = ()
        self.disputes: list[Dispute] = []
        self.liars: dict[NodeId, str] = {}
        self.too_long: set[str] = set()  # clusters whose contribution was left out

    @property
    def outcome(self) -> RoundOutcome | None:
        """What was decided; nobody may hear of it before the event that decided is in the log."""
        return self._outcome

    @property
    def missing(self) -> set[NodeId]:
        """The members that have not taken the step under way."""
        return set(self._missing)

    def awaits_only(self, name: NodeId) -> bool:
        """Return whether this member alone has not said what its step asks for."""
        return self.missing == {name}

    @property
    def awaits_pledges(self) -> bool:
        """Whether not all have pledged."""
        return self._step is _Step.PLEDGES

    @property
    def awaits_votes(self) -> bool:
        """Whether not all have voted."""
        return self._step is not _Step.CHECKS

    def receive(self, message: _MemberMessage) -> list[Send] | str:
        """Record what a member says; return what to send, or why it is refused."""
        match message:
            case RoundPledge():
                return self._record_pledge(message)
            case RoundReady():
                return self._record_vote(message)
            case RoundChecked():
                return self._record_check(message)

    # Pledges.

    def _record_pledge(self, pledge: RoundPledge) -> list[Send] | str:
        if self._step is not _Step.PLEDGES or pledge.member not in self._missing:
            return f"{pledge.member} has pledged, or is not to"
        owners = [each.owner for each in pledge.pledges]
        if sorted(owners) != sorted(self._roster.partners(pledge.member)):
            return f"{pledge.member} does not pledge what it owes to each owner"
        self._pledges[pledge.member] = {each.owner: each for each in pledge.pledges}
        del self._missing[pledge.member]
        return [] if self._missing else self._call()

    def _call(self) -> list[Send]:
        roots = (self._pledges[x][y].root for x in self._members for y in sorted(self._pledges[x]))
        self._draw = _Draw(b"".join(roots))  # no member knows them all
        limits = {owner: self._compare_lengths(owner) for owner in self._members}
        self._step, self._missing = _Step.VOTES, dict.fromkeys(self._members)
        sends = []
        for name in self._members:
            partners = self._roster.partners(name)
            terms = tuple(self._terms(x, name) for x in partners)
            told = tuple((owner, limits[owner]) for owner in partners)
            sends.append(Send(name, RoundCall(self._round_id, terms, told)))
        return sends

    def _compare_lengths(self, owner: NodeId) -> float:
        """Choose how much of each cluster counts in an owner's parts; return how long these may become."""
        roster = self._roster
        mean_weight = sum(roster.weights.values()) / len(roster.weights)
        lengths = {}
        for cluster, nodes in roster.clusters.items():
            pledged = (self._pledges[x].get(owner) for x in nodes)
            square = sum(each.norm**2 for each in pledged if each is not None)
            lengths[cluster] = square**0.5 * mean_weight / roster.weights[cluster]
        found = [length for length in lengths.values() if length > 0.0]
        middle = median(found) if found else 0.0
        for cluster, length in lengths.items():
            is_left_out = length > _LEFT_OUT * middle
            factor = min(1.0, _CLIP * middle / length) if length else 1.0
            self._factors[cluster, owner] = 0.0 if is_left_out else factor
            self.too_long |= {cluster} if is_left_out else set()
        share = sum(weight**2 for weight in roster.weights.values())
        return min(_MOST_LENGTH, _LIMIT * middle * share / (mean_weight * sum(roster.weights.values())))

    def _terms(self, member: NodeId, owner: NodeId, segment: SegmentId | None = None) -> PledgeTerms:
        pledge = self._pledges[member][owner]
        factor = self._factors[self._roster.cluster_of(member), owner]
        if segment is None:
            return PledgeTerms(member, pledge.root, pledge.norm, factor)
        shared = self._roster.shared(member, owner)
        return PledgeTerms(member, pledge.root, pledge.norm, factor, shared.index(segment), len(shared))

    # Votes.

    def _record_vote(self, ready: RoundReady) -> list[Send] | str:
        if self._step is not _Step.VOTES or ready.member not in self._missing:
            return f"{ready.member} has voted, or is not to"
        self._votes[ready.member] = ready
        del self._missing[ready.member]
        if self._missing:
            return []
        reason = self._find_unlike()
        if reason is not None:
            self._decide(RoundAbort(self._round_id, reason))
            return []
        return self._draw_checks()

    def _find_unlike(self) -> str | None:
        """Compare the votes; of a segment in which they differ, name who contradicts the owner of a part."""
        unlike: set[SegmentId] = set()
        for segment, owners in self._roster.rings.items():
            hashes = {dict(self._votes[name].hashes).get(segment) for name in owners}
            unlike |= {segment} if len(hashes) > 1 else set()
        if not unlike:
            return None
        suspects: dict[NodeId, None] = {}
        for segment in sorted(unlike):
            found = self._compare_parts(segment)
            self.disputes += found
            if not found:  # a vote without parts: the fewer are suspected
                suspects |= dict.fromkeys(self._find_fewer(segment))
        self.suspects = tuple(suspects)
        told = sorted({x for each in self.disputes for x in (each.owner, each.other)} | set(suspects))
        return f"the owners of segment {min(unlike)} hold different averages ({', '.join(told)} contradict)"

    def _compare_parts(self, segment: SegmentId) -> list[Dispute]:
        owners = self._roster.rings[segment]
        parts = {name: dict(self._votes[name].parts).get(segment, ()) for name in owners}
        num_parts = {len(each) for each in parts.values()}
        if len(num_parts) != 1 or num_parts == {0}:
            return []
        found = []
        working = self._roster.owners_of_parts(segment)
        placed = place_parts(self._round_id, segment, working, num_parts.pop())
        for part, owner in enumerate(placed):
            others = [x for x in owners if parts[x][part] != parts[owner][part]]
            found += [Dispute(owner, x, "it has another average than its owner") for x in others]
        return found

    def _find_fewer(self, segment: SegmentId) -> list[NodeId]:
        by_hash: dict[object, list[NodeId]] = {}
        for name in self._roster.rings[segment]:
            by_hash.setdefault(dict(self._votes[name].hashes).get(segment), []).append(name)
        groups = sorted(by_hash.values(), key=len)
        is_even = len(groups[-1]) == len(groups[-2])
        return [name for group in groups[: None if is_even else -1] for name in group]

    # Checks.

    def _draw_checks(self) -> list[Send]:
        self._step, self._missing = _Step.CHECKS, {}
        sends = []
        owned: dict[NodeId, list[SegmentId]] = {}
        for segment in sorted(self._roster.rings):
            for owner in self._roster.owners_of_parts(segment):
                owned.setdefault(owner, []).append(segment)
        for owner in (x for x in self._members if x in owned):
            sends += self._order_check(owned[owner][self._draw.below(len(owned[owner]))], owner)
        self._commit_when_checked()
        return sends

    def _order_check(self, segment: SegmentId, owner: NodeId) -> list[Send]:
        """Have a member that has not checked this owner make a chunk of it again, if there is one."""
        before = self._checks.setdefault((segment, owner), [])
        members = self._roster.rings[segment]
        left = [x for x in members if x != owner and x not in before]
        if not left:
            return []
        left = [x for x in left if x not in self._roster.resting] or left  # others might accuse again
        left = [x for x in left if x not in self._roster.hidden] or left  # whom all can send to
        checker = left[self._draw.below(len(left))]
        ticket = self._draw.below(_TICKETS)
        before.append(checker)
        self._missing[checker] = None
        order = RoundCheck(self._round_id, segment, owner, ticket, checker)
        terms = tuple(self._terms(x, owner, segment) for x in members)
        told = RoundCheck(self._round_id, segment, owner, ticket, checker, terms)
        return [Send(x, told if x == checker else order) for x in members]

    def _record_check(self, checked: RoundChecked) -> list[Send] | str:
        key = (checked.segment, checked.owner)
        checkers = self._checks.get(key)
        if self._step is not _Step.CHECKS or not checkers or checkers[-1] != checked.member:
            return f"{checked.member} is not to check {checked.owner}"
        if checked.suspect is not None and checked.suspect in self._roster.rings[checked.segment]:
            self.disputes.append(Dispute(checked.member, checked.suspect, "it did not send what it pledged"))
            told = f"{checked.member} and {checked.suspect} contradict each other about what was sent"
            self._decide(RoundAbort(self._round_id, told))
            return []
        sends: list[Send] = []
        if checked.is_same and len(checkers) > 1:
            self.liars[checkers[0]] = f"it called a right part of {checked.owner} wrong"
        elif not checked.is_same and len(checkers) > 1:
            self.liars[checked.owner] = f"it finished a part wrong, as {' and '.join(checkers)} found"
            told = f"{checked.owner} {self.liars[checked.owner]}"
            self._decide(RoundAbort(self._round_id, told, checked.owner))
            return []
        elif not checked.is_same:
            sends = self._order_check(*key)
            if not sends:
                told = f"{checked.member} and {checked.owner} contradict each other"
                self.disputes.append(
                    Dispute(checked.owner, checked.member, "a part is not what it should be")
                )
                self._decide(RoundAbort(self._round_id, told))
                return []
        self._checks[key] = checkers if sends else []
        open_checks = {each[-1] for each in self._checks.values() if each}
        self._missing = dict.fromkeys(x for x in self._members if x in open_checks)
        self._commit_when_checked()
        return sends

    def _commit_when_checked(self) -> None:
        if not self._missing:
            self._decide(RoundCommit(self._round_id))

    # The end.

    @property
    def sights(self) -> dict[NodeId, tuple[Sight, ...]]:
        """What owners saw of contributions, by owner."""
        return {name: vote.sights for name, vote in self._votes.items()}

    def give_up(self, member: NodeId, reason: str, suspect: NodeId | None = None) -> None:
        """Abort because a member died or gave up."""
        self._decide(RoundAbort(self._round_id, f"{member}: {reason}", suspect))

    def expire(self) -> None:
        """Abort because not all have taken a step in time."""
        self.suspects = tuple(self._missing)
        silent = ", ".join(self._missing)
        self._decide(RoundAbort(self._round_id, f"no {self._step} before the deadline from {silent}"))

    def _decide(self, outcome: RoundOutcome) -> None:
        assert self._outcome is None, f"round {self._round_id} is decided already: {self._outcome}"
        self._outcome = outcome


@dataclass(frozen=True, slots=True)
class Likeness:
    """How a cluster's change of one round compares with those of the others, by sample."""

    distance: float  # from the mean of the others, in what is typical of them
    cosine: float  # with that mean
    gap: float  # by how much the typical cosine of the others is above it


class Suspicions:
    """What clusters did in robust rounds: whom they contradicted, and how unlike the others they were.

    One round says little: small batches now and then make an honest change that is far off. So a cluster is
    unlike the others if it is by the median of its last rounds.
    """

    def __init__(self) -> None:
        self._opponents: dict[str, set[str]] = {}
        self._likeness: dict[str, deque[Likeness]] = {}
        self._marks: dict[str, int] = {}
        self.resting: set[str] = set()  # they own no part: an owner can accuse, others cannot

    def record_disputes(self, disputes: Sequence[Dispute], roster: RobustRoster) -> dict[NodeId, str]:
        """Record who contradicts whom; return who contradicts more others than can lie, and why."""
        for each in disputes:
            owner, other = roster.cluster_of(each.owner), roster.cluster_of(each.other)
            self._opponents.setdefault(owner, set()).add(other)
            self._opponents.setdefault(other, set()).add(owner)
        present = {x: len(found) for x, found in self._opponents.items() if x in roster.clusters}
        most = max(present.values(), default=0)
        worst = [cluster for cluster, count in present.items() if count == most]
        if most <= max(1, len(roster.clusters) // _LIARS) or len(worst) > 1:
            self.resting |= {roster.cluster_of(each.owner) for each in disputes}
            return {}
        named = [x for each in disputes for x in (each.owner, each.other) if roster.cluster_of(x) in worst]
        return {max(named, key=named.count): f"it contradicts {most} other clusters"} if named else {}

    def record_likeness(self, found: Mapping[str, Likeness]) -> dict[str, str]:
        """Record how alike clusters were in a round; return who is unlike all others, and how."""
        unlike: dict[str, str] = {}
        for cluster, likeness in found.items():
            recent = self._likeness.setdefault(cluster, deque(maxlen=_WINDOW))
            recent.append(likeness)
            if len(recent) < _LEAST_ROUNDS:
                continue
            distance = median(each.distance for each in recent)
            cosine, gap = median(each.cosine for each in recent), median(each.gap for each in recent)
            if distance > _FAR:
                unlike[cluster] = f"its change is {distance:.0f} times as far from the others as they are"
            elif cosine < _AGAINST and gap > _GAP:
                unlike[cluster] = "its change goes against that of all others"
        return unlike

    def mark(self, cluster: str) -> bool:
        """Record that a cluster was found to be unlike all others; return whether that is often enough."""
        self._marks[cluster] = self._marks.get(cluster, 0) + 1
        return self._marks[cluster] >= _MOST_MARKS


_WINDOW, _LEAST_ROUNDS = 8, 5  # rounds of a cluster that are judged together
_FAR = 10.0  # times the typical distance
_AGAINST, _GAP = -0.15, 0.3
_LEAST_WITNESSES = 3  # clusters that may own parts: of three, no single one decides the median
_LEAST_ITEMS = 100  # that an owner's word is of; of fewer, chance alone makes any change unlike others


def compare_clusters(sights: Mapping[NodeId, Sequence[Sight]], roster: RobustRoster) -> dict[str, Likeness]:
    """Return how alike each cluster's change is to those of the others, where no single owner decides it."""
    far: dict[str, list[float]] = {each: [] for each in roster.clusters}
    cosines: dict[str, list[float]] = {each: [] for each in roster.clusters}
    for own, owners in roster.clusters.items():
        seen = _sum_sights((sights.get(name, ()) for name in owners), roster)
        for cluster in roster.clusters:
            is_seen = cluster in seen and cluster != own and len(seen) > 2
            if is_seen and seen[cluster][-1] >= _LEAST_ITEMS:
                others = [seen[x] for x in seen if x != cluster]
                far[cluster].append(_distance(seen[cluster], others))
                cosines[cluster].append(_cosine(seen[cluster]))
    # Of a short segment another one owns the part in each round, and the median of rounds is judged.
    least = min(_LEAST_WITNESSES, len(roster.clusters) - 1)
    witnesses = {roster.cluster_of(x) for each in roster.rings for x in roster.owners_of_parts(each)}
    judged = {each for each in cosines if len(witnesses - {each}) >= least}
    middle = {each: median(found) for each, found in cosines.items() if found and each in judged}
    mean_weight = sum(roster.weights.values()) / len(roster.weights)
    found: dict[str, Likeness] = {}
    for cluster, cosine in middle.items():
        share = min(1.0, roster.weights[cluster] / mean_weight)  # of fewer samples, more is chance
        along = [value for each, value in middle.items() if each != cluster]
        gap = median(along) - cosine if along else 0.0
        found[cluster] = Likeness(median(far[cluster]) * share**0.5, cosine, gap)
    return found


def _sum_sights(found: Iterable[Sequence[Sight]], roster: RobustRoster) -> dict[str, tuple[float, ...]]:
    """Add up what the owners of a cluster saw of each: distance, product, square, others' square, number."""
    members = {name for nodes in roster.clusters.values() for name in nodes}
    sums: dict[str, tuple[float, ...]] = {}
    for sight in (each for sights in found for each in sights if each.member in members):
        # From distance, product and square follows the square of what it was compared with.
        compared = max(0.0, sight.distance - sight.square + 2.0 * sight.along)
        before = sums.get(roster.cluster_of(sight.member), (0.0,) * 5)
        added = (sight.distance, sight.along, sight.square, compared, sight.num_items)
        sums[roster.cluster_of(sight.member)] = tuple(a + b for a, b in zip(before, added, strict=True))
    return sums


def _distance(seen: tuple[float, ...], others: Sequence[tuple[float, ...]]) -> float:
    typical = median(max(0.0, each[0]) for each in others)
    return (max(0.0, seen[0]) / max(typical, _TINY)) ** 0.5 if typical > 0.0 else 0.0


def _cosine(seen: tuple[float, ...]) -> float:
    _, along, square, compared, _ = seen
    length = (max(0.0, square) * compared) ** 0.5
    return along / length if length > _TINY else 0.0
