"""A member's side of a robust round, as a state machine that does no I/O.

Every segment is cut in parts, at most one per owner, and parts in chunks. A member encodes its contribution
once and pledges it. When the hub calls, chunks go straight to the owner of their part. The owner checks each
against the pledge, makes the robust mean of all and sends it to all. Then a member votes. Before the hub
commits, it has some chunks made again by other members, of the same contributions. What ends a round is the
same as in `averaging.round`: a member that has voted may not give up by itself. A pledge is the root of a
HashTree over the chunks.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from blake3 import blake3

from ravnest.averaging.ring import cut_parts
from ravnest.averaging.round import MemberRound, RoundPhase
from ravnest.ids import HUB, NodeId, RoundId, SegmentId
from ravnest.protocol.averaging import (
    DirectPart,
    PartStep,
    Pledge,
    PledgeTerms,
    RoundAbort,
    RoundCall,
    RoundCheck,
    RoundChecked,
    RoundPledge,
    RoundQuery,
    RoundReady,
    Sight,
)
from ravnest.protocol.messages import Refusal

_DIGEST_BYTES = 16
_NOTHING = bytes(_DIGEST_BYTES)  # fills a tree up


def digest_content(content: Any) -> bytes:
    """Return the digest of a chunk's bytes: a leaf."""
    return blake3(b"leaf").update(content).digest(_DIGEST_BYTES)


class HashTree:
    """The tree over leaves in this order: one root for many chunks, and a short path for each.

    Digests are the leaves of a tree of pairs. Its depth follows from their number, and which side of each
    pair a leaf is on follows from its place, so one root has room for one content of each chunk.
    """

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self._levels = [[*leaves, *[_NOTHING] * (2 ** _depth(len(leaves)) - len(leaves))]]
        while len(self._levels[-1]) > 1:
            below = self._levels[-1]
            self._levels.append([_join(below[k], below[k + 1]) for k in range(0, len(below), 2)])

    @property
    def root(self) -> bytes:
        """The hash that stands for all leaves."""
        return self._levels[-1][0]

    def find_path(self, place: int) -> tuple[bytes, ...]:
        """Return what one needs beside a leaf to come to the root."""
        return tuple(level[(place >> depth) ^ 1] for depth, level in enumerate(self._levels[:-1]))


def follow_path(leaf: bytes, place: int, count: int, path: Sequence[bytes]) -> tuple[bytes, Sequence[bytes]]:
    """Return the root that a leaf at this place of so many leads to, and what is left of the path."""
    depth = _depth(count)
    for beside in path[:depth]:
        leaf = _join(beside, leaf) if place % 2 else _join(leaf, beside)
        place //= 2
    return (leaf if len(path) >= depth else b""), path[depth:]


def _depth(count: int) -> int:
    return max(count - 1, 0).bit_length()


def _join(left: bytes, right: bytes) -> bytes:
    return blake3(b"pair" + left + right).digest(_DIGEST_BYTES)


_V = TypeVar("_V", bound=Sized)
_Key = tuple[SegmentId, int, int]  # part, chunk
_TINY = 1e-24  # what squares of nothing may add up to
_ROUNDING = 1.001  # by which a sum of squares may differ between two PCs
_MOST_HASHES = 1000  # of parts in a vote; with more, only segments are compared
_Addressed = tuple[NodeId, Any]


class Row(NamedTuple, Generic[_V]):
    """One contribution to a chunk: how much it counts, and how much of it."""

    value: _V
    weight: float
    factor: float


class Judged(NamedTuple):
    """A contribution beside the mean of the others: squared distance, product with that mean, own square."""

    distance: float
    along: float
    square: float
    num_items: int


class RobustReducer(Protocol[_V]):
    """What a member does to chunks. Two members that combine the same rows must get the same bytes."""

    @property
    def edges(self) -> tuple[int, ...]:
        """Where no chunk may reach across, in rising order; the last is the length of the vector."""

    def contribute(self, where: slice) -> _V:
        """Return the own contribution, encoded; asked for once in a round."""

    def examine(self, where: slice, value: _V) -> tuple[float, str | None]:
        """Return the squared length of the weights' change in it, and why nobody honest sends it, if so."""

    def combine(self, where: slice, rows: Sequence[Row[_V]]) -> _V:
        """Return the robust mean, encoded."""

    def judge(self, where: slice, rows: Sequence[Row[_V]]) -> Sequence[Judged]:
        """Return what is seen of each contribution, for each sample of it; statistics count nothing."""

    def keep(self, value: _V) -> _V:
        """Return a mean as it is kept until the round ends."""

    def content(self, value: _V) -> Any:
        """Return the bytes of a chunk."""


def find_owners(
    members: Sequence[NodeId], resting: Collection[NodeId], hidden: Collection[NodeId]
) -> tuple[NodeId, ...]:
    """Return which members own parts: no resting one, and none that nobody can dial, if others are left.

    So members that nobody can dial send each other nothing, and the hub's line carries nothing for them.
    """
    at_work = tuple(x for x in members if x not in resting) or tuple(members)
    return tuple(x for x in at_work if x not in hidden) or at_work


def place_parts(
    round_id: RoundId, segment: SegmentId, owners: Sequence[NodeId], num_parts: int
) -> tuple[NodeId, ...]:
    """Return the owner of each part. Short segments have others in each round: so all see contributions."""
    first = round_id + segment
    places = ((first + part * len(owners) // num_parts) % len(owners) for part in range(num_parts))
    return tuple(owners[place] for place in places)


@dataclass(frozen=True)
class SharedSegment(Generic[_V]):
    """A segment of a robust round: who brings something, who of them owns no part, how much each counts."""

    round_id: RoundId
    segment: SegmentId
    reducer: RobustReducer[_V]
    members: tuple[NodeId, ...]
    weights: Mapping[NodeId, float]
    chunk_size: int
    resting: frozenset[NodeId] = frozenset()
    hidden: frozenset[NodeId] = frozenset()  # nobody can dial them

    @cached_property
    def slices(self) -> dict[tuple[int, int], slice]:
        """What each chunk of each part is, in the order of the vector."""
        edges = self.reducer.edges
        num_parts = max(1, min(len(self._owners), -(-edges[-1] // self.chunk_size)))
        return cut_parts(edges, num_parts, self.chunk_size)

    @cached_property
    def _owners(self) -> tuple[NodeId, ...]:
        return find_owners(self.members, self.resting, self.hidden)

    @cached_property
    def parts(self) -> dict[NodeId, int]:
        """The part that each owner has, if it has one."""
        num_parts = 1 + max((part for part, _ in self.slices), default=0)
        placed = place_parts(self.round_id, self.segment, self._owners, num_parts)
        return {owner: part for part, owner in enumerate(placed)}

    @cached_property
    def owner_of(self) -> dict[int, NodeId]:
        """Who has a part."""
        return {part: owner for owner, part in self.parts.items()}

    @cached_property
    def _chunks(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for part, chunk in self.slices:
            found.setdefault(part, []).append(chunk)
        return found

    def chunks_of(self, part: int | None) -> list[int]:
        """Return the chunks of a part, in order; of no part there are none."""
        return [] if part is None else self._chunks.get(part, [])


class DirectRound(MemberRound[_V]):
    """Messages go to the member or to the hub that they are addressed to."""

    def __init__(
        self,
        round_id: RoundId,
        member: NodeId,
        segments: Mapping[SegmentId, SharedSegment[_V]],
        deadline: float,
    ) -> None:
        super().__init__(round_id, member, deadline)
        self._segments = dict(sorted(segments.items()))
        self._keys: dict[_Key, slice] = {
            (number, *key): where
            for number, each in self._segments.items()
            for key, where in each.slices.items()
        }
        self._own: dict[_Key, _V] = {}
        self._leaves: dict[_Key, bytes] = {}
        self._trees: dict[tuple[SegmentId, NodeId], tuple[HashTree, tuple[bytes, ...]]] = {}
        self._terms: dict[NodeId, PledgeTerms] = {}
        self._limits: dict[NodeId, float] = {}
        self._is_called = False
        self._early: dict[tuple[_Key, PartStep, NodeId], DirectPart[_V]] = {}
        self._rows: dict[_Key, dict[NodeId, _V]] = defaultdict(dict)  # of chunks that are not finished
        self._squares: dict[NodeId, float] = defaultdict(float)  # of what came from each contributor
        self._finished: dict[_Key, _V] = {}
        self._digests: dict[_Key, bytes] = {}
        self._finished_squares: dict[NodeId, float] = defaultdict(float)  # of what each owner finished
        self._seen: dict[NodeId, Judged] = {}
        self._checks: dict[_Key, dict[NodeId, PledgeTerms]] = {}

    def start(self) -> Iterator[tuple[_Addressed, ...]]:
        """Encode one chunk after the other; then pledge them all."""
        squares: dict[NodeId, float] = defaultdict(float)
        for key, where in self._keys.items():
            if not self._is_running():
                return
            shared = self._segments[key[0]]
            value = self._own[key] = shared.reducer.contribute(where)
            self._leaves[key] = digest_content(shared.reducer.content(value))
            square, fault = shared.reducer.examine(where, value)
            if fault is not None:
                yield self._give_up_for(f"segment {key[0]}: {fault}", self._member)
                return
            squares[shared.owner_of[key[1]]] += square
            yield ()
        pledges = tuple(
            Pledge(owner, self._grow_trees(owner), math.sqrt(squares[owner])) for owner in self._partners()
        )
        yield ((HUB, RoundPledge(self._round_id, self._member, pledges)),)

    def call(self, called: RoundCall) -> Iterator[tuple[_Addressed, ...]]:
        """Send the contributions that were pledged, a chunk at a time; owners next to this member first."""
        if self._is_called or called.round_id != self._round_id or self._phase is not RoundPhase.RUNNING:
            return
        self._is_called = True
        self._terms = {each.member: each for each in called.terms}
        self._limits = dict(called.limits)
        early, self._early = self._early, {}
        for key in sorted(self._keys, key=self._turn):
            if not self._is_running():
                return
            owner = self._segments[key[0]].owner_of[key[1]]
            if owner == self._member:
                yield self._add_row(key, self._member, self._own[key])
            else:
                yield ((owner, self._contribution(key, owner, PartStep.CONTRIBUTION)),)
        for (_, _, sender), part in early.items():
            answer = self.receive(sender, part)
            yield () if isinstance(answer, Refusal) else answer
        yield self._settle()

    def receive(self, sender: NodeId, part: DirectPart[_V]) -> tuple[_Addressed, ...] | Refusal:
        """Accept a chunk of another member; return what to send."""
        key = (part.segment, part.part, part.chunk)
        reason = self._reason_against(sender, part, key)
        if reason is not None:
            return Refusal(reason)
        if part.step is PartStep.CHECK:
            return self._receive_check(sender, part, key)
        if self._phase is not RoundPhase.RUNNING:
            return Refusal(f"round {part.round_id} is {self._phase} here: it takes no more parts")
        if not self._is_called:
            self._early[key, part.step, sender] = part
            return ()
        if part.step is PartStep.FINISHED:
            return self._receive_finished(sender, part, key)
        terms = self._terms.get(sender)
        if terms is None or not self._is_pledged(part, key, terms, *self._place(sender, part.segment)):
            return self._give_up_for(f"what {sender} sent is not what it pledged", sender)
        return self._add_row(key, sender, part.value)

    def _add_row(self, key: _Key, sender: NodeId, value: _V) -> tuple[_Addressed, ...]:
        """As the owner, add a contribution; with all of them, finish the chunk."""
        shared, where = self._segments[key[0]], self._keys[key]
        square, fault = shared.reducer.examine(where, value)
        if fault is not None:
            return self._give_up_for(f"segment {key[0]}: {fault}", sender)
        self._squares[sender] += square
        terms = self._terms.get(sender)
        if terms is None or self._squares[sender] > (_ROUNDING * terms.norm) ** 2 + _TINY:
            return self._give_up_for(f"what {sender} sent is longer than it pledged", sender)
        self._rows[key][sender] = value
        if len(self._rows[key]) < len(shared.members):
            return ()
        rows = self._ordered(shared, self._rows.pop(key), self._terms)
        mean = shared.reducer.combine(where, rows)
        for member, judged in zip(shared.members, shared.reducer.judge(where, rows), strict=True):
            seen = self._seen.get(member, Judged(0.0, 0.0, 0.0, 0))
            sums = (seen.distance + judged.distance, seen.along + judged.along, seen.square + judged.square)
            self._seen[member] = Judged(*sums, seen.num_items + judged.num_items)
        self._keep(key, mean)
        message = DirectPart(self._round_id, *key, PartStep.FINISHED, (), mean)
        others = tuple((member, message) for member in shared.members if member != self._member)
        return (*others, *self._settle())

    def _ordered(
        self, shared: SharedSegment[_V], rows: Mapping[NodeId, _V], terms: Mapping[NodeId, PledgeTerms]
    ) -> list[Row[_V]]:
        return [Row(rows[x], shared.weights[x], terms[x].factor) for x in shared.members]

    def _receive_finished(self, sender: NodeId, part: DirectPart[_V], key: _Key) -> tuple[_Addressed, ...]:
        reducer = self._segments[key[0]].reducer
        square, fault = reducer.examine(self._keys[key], part.value)
        if fault is not None:
            return self._give_up_for(f"segment {key[0]}: {fault}", sender, hops=2)
        self._finished_squares[sender] += square
        if self._finished_squares[sender] > self._limits.get(sender, 0.0) ** 2 + _TINY:
            return self._give_up_for(
                f"{sender} finished a longer change than anybody brought", sender, hops=2
            )
        self._keep(key, part.value)
        return self._settle()

    def _keep(self, key: _Key, mean: _V) -> None:
        reducer = self._segments[key[0]].reducer
        self._digests[key] = digest_content(reducer.content(mean))
        self._finished[key] = reducer.keep(mean)

    # Checks.

    def check(self, order: RoundCheck) -> tuple[_Addressed, ...] | Refusal:
        """Send the checker this member's contribution to a chunk again; the checker waits for all of them."""
        if order.round_id != self._round_id or self._phase is not RoundPhase.READY:
            return Refusal(f"a check of round {order.round_id}, which is not voted for here")
        shared = self._segments.get(order.segment)
        if shared is None or order.owner not in shared.members:
            return Refusal(f"a check of segment {order.segment}, which this member does not share")
        part = shared.parts.get(order.owner)
        chunks = shared.chunks_of(part)
        if part is None or not chunks:
            is_checker = order.checker == self._member
            return self._checked(order.segment, order.owner, is_same=True) if is_checker else ()
        key = (order.segment, part, chunks[order.ticket % len(chunks)])
        if order.checker != self._member:
            return ((order.checker, self._contribution(key, order.owner, PartStep.CHECK)),)
        if key in self._checks:
            return Refusal(f"chunk {key} is being checked already")
        self._checks[key] = {each.member: each for each in order.terms}
        self._rows[key] = {self._member: self._own[key]}
        answers: list[_Addressed] = []
        for early in [each for each in self._early if each[:2] == (key, PartStep.CHECK)]:
            answer = self._receive_check(early[2], self._early.pop(early), key)
            answers += () if isinstance(answer, Refusal) else answer
        return tuple(answers)

    def _receive_check(
        self, sender: NodeId, part: DirectPart[_V], key: _Key
    ) -> tuple[_Addressed, ...] | Refusal:
        terms = self._checks.get(key)
        if terms is None:
            self._early[key, part.step, sender] = part
            return ()
        if sender in self._rows[key]:
            return Refusal(f"chunk {key} of {sender} came before")
        shared, where = self._segments[key[0]], self._keys[key]
        own = terms.get(sender)
        is_pledged = own is not None and self._is_pledged(part, key, own, own.place, own.count)
        if not is_pledged or shared.reducer.examine(where, part.value)[1] is not None:
            return self._end_check(key, is_same=False, suspect=sender)
        self._rows[key][sender] = part.value
        if len(self._rows[key]) < len(shared.members):
            return ()
        again = shared.reducer.combine(where, self._ordered(shared, self._rows[key], terms))
        return self._end_check(key, digest_content(shared.reducer.content(again)) == self._digests[key])

    def expire(self, now: float) -> RoundAbort | RoundQuery | None:
        """As any member; a checker that waits in vain names the silent one, or it would be blamed itself."""
        if now < self._deadline or self._phase is not RoundPhase.READY or not self._checks:
            return super().expire(now)
        late = Counter(
            x for k in self._checks for x in self._segments[k[0]].members if x not in self._rows[k]
        )
        suspect = min(late, key=lambda each: (-late[each], each))
        self._checks.clear()  # from now on it asks what became of the round
        told = f"{self._member} could not check at the deadline; it waits for {suspect} most"
        return RoundAbort(self._round_id, told, suspect)

    def _end_check(self, key: _Key, is_same: bool, suspect: NodeId | None = None) -> tuple[_Addressed, ...]:
        del self._checks[key], self._rows[key]
        return self._checked(key[0], self._segments[key[0]].owner_of[key[1]], is_same, suspect)

    def _checked(
        self, segment: SegmentId, owner: NodeId, is_same: bool, suspect: NodeId | None = None
    ) -> tuple[_Addressed, ...]:
        return ((HUB, RoundChecked(self._round_id, self._member, segment, owner, is_same, suspect)),)

    # Pledges.

    def _partners(self) -> list[NodeId]:
        """Return all owners that this member sends something to, itself too."""
        return list(dict.fromkeys(x for each in self._segments.values() for x in each.members))

    def _shared_with(self, other: NodeId) -> list[SegmentId]:
        return [number for number, each in self._segments.items() if other in each.members]

    def _place(self, other: NodeId, segment: SegmentId) -> tuple[int, int]:
        shared = self._shared_with(other)
        return shared.index(segment), len(shared)

    def _part_leaves(self, segment: SegmentId, owner: NodeId) -> list[bytes]:
        part = self._segments[segment].parts.get(owner)
        return [self._leaves[segment, part or 0, k] for k in self._segments[segment].chunks_of(part)]

    def _grow_trees(self, owner: NodeId) -> bytes:
        """Hash all that goes to an owner: a tree for its part of each segment, and one of their roots."""
        shared = self._shared_with(owner)
        trees = {segment: HashTree(self._part_leaves(segment, owner)) for segment in shared}
        above = HashTree([tree.root for tree in trees.values()])
        for place, (segment, tree) in enumerate(trees.items()):
            self._trees[segment, owner] = (tree, above.find_path(place))
        return above.root

    def _contribution(self, key: _Key, owner: NodeId, step: PartStep) -> DirectPart[_V]:
        tree, above = self._trees[key[0], owner]
        return DirectPart(self._round_id, *key, step, tree.find_path(key[2]) + above, self._own[key])

    def _is_pledged(
        self, part: DirectPart[_V], key: _Key, terms: PledgeTerms, place: int, count: int
    ) -> bool:
        shared = self._segments[key[0]]
        leaf = digest_content(shared.reducer.content(part.value))
        num_chunks = len(shared.chunks_of(part.part))
        root, rest = follow_path(leaf, part.chunk, num_chunks, part.path)
        root, rest = follow_path(root, place, count, rest)
        return root == terms.root and not rest

    # The end.

    def _collect(self) -> dict[SegmentId, tuple[_V, ...]]:
        return {
            number: tuple(self._finished[number, *key] for key in each.slices)
            for number, each in self._segments.items()
        }

    def _find_late(self) -> tuple[str, NodeId | None, int]:
        """A contributor is late, else an owner, who may wait for another."""
        missing: dict[tuple[int, NodeId], int] = defaultdict(int)
        for key in self._keys if self._is_called else ():
            shared = self._segments[key[0]]
            owner = shared.owner_of[key[1]]
            if key in self._finished:
                continue
            late = [x for x in shared.members if x not in self._rows[key]] if owner == self._member else []
            for who in late:
                missing[1, who] += 1
            if owner != self._member:
                missing[2, owner] += 1
        told = f"{self._member} had not finished at the deadline"
        if not missing:
            return f"{told}; not all have pledged", None, 1
        hops, suspect = min(missing, key=lambda each: (each[0], -missing[each], each[1]))
        return f"{told}; it waits for {suspect} most", suspect, hops

    def _give_up_for(self, reason: str, suspect: NodeId, hops: int = 1) -> tuple[_Addressed, ...]:
        abort = self.give_up(reason, suspect, hops, is_lie=suspect != self._member)
        return () if abort is None else ((HUB, abort),)

    def _is_running(self) -> bool:
        return self._phase is RoundPhase.RUNNING

    def _settle(self) -> tuple[_Addressed, ...]:
        """Vote when all parts are here."""
        if self._phase is not RoundPhase.RUNNING or len(self._finished) < len(self._keys):
            return ()
        self._enter(RoundPhase.READY)
        parts = tuple(
            (number, tuple(self._part_digest(each, part) for part in sorted(each.owner_of)))
            for number, each in self._segments.items()
        )
        hashes = tuple((number, HashTree(digests).root) for number, digests in parts)
        sights = tuple(Sight(member, *judged) for member, judged in self._seen.items())
        shown = parts if sum(len(digests) for _, digests in parts) <= _MOST_HASHES else ()
        return ((HUB, RoundReady(self._round_id, self._member, hashes, shown, sights)),)

    def _part_digest(self, shared: SharedSegment[_V], part: int) -> bytes:
        return HashTree([self._digests[shared.segment, part, k] for k in shared.chunks_of(part)]).root

    def _free(self) -> None:
        for each in (self._own, self._early, self._rows, self._finished, self._checks):
            each.clear()

    def _turn(self, key: _Key) -> tuple[int, int, SegmentId]:
        members = self._segments[key[0]].members
        owner = members.index(self._segments[key[0]].owner_of[key[1]])
        return key[2], (owner - members.index(self._member)) % len(members), key[0]

    def _reason_against(self, sender: NodeId, part: DirectPart[_V], key: _Key) -> str | None:
        name = f"segment {part.segment} part {part.part} chunk {part.chunk} ({part.step}) of {sender}"
        if part.round_id != self._round_id:
            return f"{name} is of round {part.round_id}, not of {self._round_id}, which runs here"
        if key not in self._keys or sender == self._member:
            return f"{name} is no part of this round"
        shared, owner = self._segments[part.segment], self._segments[part.segment].owner_of[part.part]
        is_finished = part.step is PartStep.FINISHED
        if sender not in shared.members or (is_finished and sender != owner):
            return f"{name} is not for its sender to say"
        if part.step is PartStep.CONTRIBUTION and owner != self._member:
            return f"{name} belongs to {owner}"
        is_here = key in self._finished if is_finished else sender in self._rows.get(key, ())
        is_late = part.step is PartStep.CONTRIBUTION and key in self._finished
        if is_here or is_late or (key, part.step, sender) in self._early:
            return f"{name} came before"
        where = self._keys[key]
        if len(part.value) != where.stop - where.start:
            return f"{name} has {len(part.value)} elements instead of {where.stop - where.start}"
        return None
