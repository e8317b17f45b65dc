"""Tied weights, held by several stages of a cluster: every copy makes the same steps in the same order.

The first stage that holds a weight is its home. After an update the home asks the others for their gradients,
adds them up and numbers the step that all copies make. Meanwhile gradients are gathered for the next step, so
no stage waits. Rounds concern the home; their change is a step too. After a rebuild the first step sends the
weights themselves. Senders are stages of the same build; the caller sees to it.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, Self, TypeVar

from ravnest.errors import ProtocolError
from ravnest.ids import NodeId
from ravnest.protocol.averaging import TiedCall, TiedGradient, TiedHolder, TiedMessage, TiedStep
from ravnest.protocol.messages import Refusal

_MOST_EARLY = 16  # steps that came before those due: a home makes no update without us, only rounds' changes

Stamp = tuple[tuple[NodeId, int], ...]  # steps made, by home


class Summable(Protocol):
    """What can be gathered: a number, an array, a tensor."""

    def __add__(self, other: Self, /) -> Self: ...
    def __truediv__(self, divisor: int, /) -> Self: ...


_V = TypeVar("_V", bound=Summable)
Addressed = list[tuple[NodeId, TiedMessage[_V]]]  # to this node itself: a step to be made here


class TiedOrder(Generic[_V]):
    """One stage's side: `uses` are the positions of the line that use each of its tied weights."""

    def __init__(
        self,
        build_id: int,
        node: NodeId,
        pipeline: tuple[NodeId, ...],
        interval: tuple[int, int],
        uses: Mapping[str, tuple[int, ...]],
        is_rebuilt: bool = False,
    ) -> None:
        self._build_id = build_id
        self._node = node
        self._others = tuple(other for other in pipeline if other != node)
        self._holders: dict[NodeId, tuple[int, int]] = {node: interval}
        self._uses = uses
        self.homes = frozenset(name for name, positions in uses.items() if _is_in(positions[0], interval))
        self._unknown = set(uses) - self.homes if is_rebuilt else set()  # until their homes tell
        self._gathered: dict[str, tuple[_V, int]] = {}
        # As a home.
        self._number = 0  # steps made
        self._num_calls = 0
        self._rate = 0.0
        # Gradients came since the last call; the next must leave nothing behind.
        self._is_due = self._is_closing = False
        self._open: dict[NodeId, Mapping[str, _V]] | None = None  # what each has given to the call under way
        self._changes: list[Mapping[str, _V]] = []  # until all holders are known
        # As a follower, by home.
        self._answered: dict[NodeId, int] = {}
        self._made: dict[NodeId, int] = {}
        self._early: dict[NodeId, dict[int, TiedStep[_V]]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether this stage knows all its weights, and may use them."""
        return not self._unknown

    @property
    def is_settled(self) -> bool:
        """Whether the weights of this home have had every update and change that it knows of."""
        return self.is_ready and not self._is_due and self._open is None and not self._changes

    @property
    def stamp(self) -> Stamp:
        """The steps made here as a home: a copy that makes them all has the same weights."""
        return ((self._node, self._number),) if self.homes else ()

    def has_seen(self, stamp: Stamp) -> bool:
        """Return whether all these steps were made here, as far as they concern this stage."""
        return all(self._made.get(home, number) >= number for home, number in stamp)

    def hello(self) -> Addressed[_V]:
        """Tell all others that this stage is ready."""
        start, stop = self._holders[self._node]
        return [(other, TiedHolder(self._build_id, start, stop, False)) for other in self._others]

    def offer(self, rate: float, gradients: Mapping[str, _V], is_closing: bool = False) -> Addressed[_V]:
        """Gather the mean gradients of an update; a home calls for those of the others."""
        for name, gradient in gradients.items():
            total, count = self._gathered.get(name, (None, 0))
            self._gathered[name] = (gradient if total is None else total + gradient, count + 1)
        if self.homes:
            self._rate, self._is_due, self._is_closing = rate, True, self._is_closing or is_closing
        return self._call()

    def change(self, changes: Mapping[str, _V]) -> Addressed[_V]:
        """Add what a round changed in the weights whose home this is."""
        if changes:
            self._changes.append(changes)
        return self._pass_changes()

    def receive_holder(self, sender: NodeId, message: TiedHolder) -> Addressed[_V] | Refusal:
        """Learn the positions of another holder, and answer with this stage's own."""
        interval = (message.start, message.stop)
        if not self._uses:
            return Refusal("this stage holds no tied weight")
        if self._holders.get(sender, interval) != interval:
            raise ProtocolError(f"{sender} holds {self._holders[sender]}, and now {interval}")
        self._holders[sender] = interval
        if any(_is_in(positions[0], interval) for positions in self._uses.values()):
            self._made.setdefault(sender, 0)
        start, stop = self._holders[self._node]
        answer = TiedHolder(self._build_id, start, stop, True)
        answers: Addressed[_V] = [] if message.is_answer else [(sender, answer)]
        return [*answers, *self._pass_changes(), *self._call()]

    def _followers(self) -> dict[NodeId, tuple[str, ...]] | None:
        """Return the holders of each weight whose home this is, leaf first; None: not all are known."""
        holders = sorted(self._holders.items(), key=lambda item: item[1], reverse=True)
        found: dict[NodeId, tuple[str, ...]] = {}
        missing = {(name, position) for name in self.homes for position in self._uses[name]}
        for holder, interval in holders:
            held = {(name, position) for name, position in missing if _is_in(position, interval)}
            missing -= held
            if held and holder != self._node:
                found[holder] = tuple(sorted({name for name, _ in held}))
        return None if missing else found

    def _call(self) -> Addressed[_V]:
        followers = self._followers()
        if not self._is_due or self._open is not None or followers is None:
            return []
        self._num_calls += 1
        self._open = {self._node: self._pop_gathered(self.homes)}
        is_closing, self._is_due, self._is_closing = self._is_closing, False, False
        return [
            (follower, TiedCall(self._build_id, self._num_calls, names, is_closing))
            for follower, names in followers.items()
        ]

    def _pop_gathered(self, names: Sequence[str] | frozenset[str]) -> dict[str, _V]:
        taken = {name: self._gathered.pop(name) for name in sorted(names) if name in self._gathered}
        return {name: total if count == 1 else total / count for name, (total, count) in taken.items()}

    def receive_call(self, sender: NodeId, call: TiedCall) -> Addressed[_V] | Refusal:
        """Answer a home with the mean gradients since its last call."""
        if call.number <= self._answered.get(sender, 0):
            return Refusal(f"call {call.number} of {sender} was answered before")
        self._check(sender, call.names)
        self._answered[sender] = call.number
        values = tuple(self._pop_gathered(call.names).items())
        return [(sender, TiedGradient(self._build_id, call.number, values))]

    def receive_gradient(self, sender: NodeId, message: TiedGradient[_V]) -> Addressed[_V] | Refusal:
        """As a home, collect what was called for; with all of it, make the step."""
        followers = self._followers()
        if self._open is None or followers is None or message.number != self._num_calls:
            return Refusal(f"{sender} answers call {message.number}, which is not open")
        if sender not in followers or sender in self._open:
            return Refusal(f"{sender} has answered call {message.number}, or was not called")
        values = dict(message.values)
        if not values.keys() <= set(followers[sender]):
            raise ProtocolError(
                f"{sender} sends gradients of {sorted(values)}, which it does not hold with us"
            )
        self._open[sender] = values
        if any(follower not in self._open for follower in followers):
            return []
        # Leaf first, home last: the order in which one process adds up the gradients of a tied weight.
        given, self._open = [self._open[holder] for holder in (*followers, self._node)], None
        totals: dict[str, _V] = {}
        for gradients in given:
            for name, value in gradients.items():
                totals[name] = totals[name] + value if name in totals else value
        return [*self._make(followers, self._rate, totals), *self._call()]

    def _pass_changes(self) -> Addressed[_V]:
        followers = self._followers()
        if followers is None:
            return []
        changes, self._changes = self._changes, []
        return [step for change in changes for step in self._make(followers, None, change)]

    def _make(
        self, followers: Mapping[NodeId, tuple[str, ...]], rate: float | None, values: Mapping[str, _V]
    ) -> Addressed[_V]:
        """Number the next step, for this stage and all that follow."""
        self._number += 1
        made: Addressed[_V] = []
        for holder, names in ((self._node, tuple(self.homes)), *followers.items()):
            shared = tuple((key, value) for key, value in values.items() if self._weight(key) in names)
            made.append((holder, TiedStep(self._build_id, self._number, rate, shared)))
        return made

    def receive_step(self, sender: NodeId, step: TiedStep[_V]) -> Addressed[_V] | Refusal:
        """Make a step of a home, and those behind it that came early; addressed to this node itself."""
        made = self._made.setdefault(sender, 0)
        early = self._early.setdefault(sender, {})
        if step.number <= made or step.number in early:
            return Refusal(f"step {step.number} of {sender} came before")
        if step.number > made + _MOST_EARLY:
            raise ProtocolError(f"{sender} makes step {step.number}, too far ahead of {made} made here")
        self._check(sender, [name for name, _ in step.values])
        early[step.number] = step
        due: Addressed[_V] = []
        while self._made[sender] + 1 in early:
            self._made[sender] += 1
            due_now = early.pop(self._made[sender])
            due.append((self._node, due_now))
            self._unknown -= {name for name, _ in due_now.values}
        return due

    def _check(self, sender: NodeId, names: Sequence[str]) -> None:
        for key in names:
            if self._weight(key) in self.homes or self._weight(key) not in self._uses:
                raise ProtocolError(f"{sender} calls {key[:80]!r} its own, which this stage does not share")

    def _weight(self, key: str) -> str:
        """Return the weight that a value concerns: itself, or its optimizer's state by "SLOT/NAME"."""
        return key if key in self._uses else key.partition("/")[2]


def _is_in(position: int, interval: tuple[int, int]) -> bool:
    return interval[0] <= position < interval[1]
