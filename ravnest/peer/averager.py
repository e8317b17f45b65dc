"""Takes part in rounds: averages the segments of one stage with their other owners.

The anchor is the last average, alike in every owner. A member that missed rounds, or was just built, asks the
owner before it in each ring for the anchor. That owner may have to ask another first, or may not know of the
asker's plan yet.
"""

import logging
from collections import ChainMap, Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor

from ravnest.averaging.direct import DirectRound, SharedSegment
from ravnest.averaging.ring import Reducer, RingPosition, RingReduce, choose_chunk_size
from ravnest.averaging.round import Round, RoundPhase
from ravnest.codec import decode_tensor, describe, encode_tensor
from ravnest.config import TIMEOUTS, PeerTimeouts, WireFormat
from ravnest.engine.train_config import TrainConfig
from ravnest.errors import ProtocolError
from ravnest.ids import HUB, NodeId, RoundId, SegmentId
from ravnest.model.blueprint.program import Blueprint
from ravnest.model.state.state_dict import Layout
from ravnest.peer.segments import EncodedChunk, GradientSegment, SegmentState
from ravnest.peer.tied_weights import TiedWeights
from ravnest.peer.worker import Worker
from ravnest.plan.types import Ring
from ravnest.protocol.averaging import (
    AnchorPart,
    AnchorQuery,
    DirectPart,
    RingPart,
    RoundAbort,
    RoundCall,
    RoundCheck,
    RoundOpen,
    RoundOutcome,
)
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import PlanOrder, RingOrder, StageMissing
from ravnest.protocol.tensors import Buffer, TensorSpec
from ravnest.transfer.outbox import Outgoing

logger = logging.getLogger(__name__)

_MOST_REQUESTS = 4096  # for anchors that wait
_LATE_STRENGTH = 0.5  # of an average that is a whole round late: full strength is unstable
_EARLY_TIMES = 8  # the numbers of a stage: what an honest neighbour may send before the order for a round

_Part = RingPart[TensorSpec] | DirectPart[TensorSpec]
_Arrived = tuple[_Part, Buffer, NodeId]


@dataclass(frozen=True, slots=True)
class AnchorState:
    """The round whose average the anchors are, these and outer momenta by name, samples trained since.

    Without an anchor_round no other owner has these anchors, and others must be asked for.
    """

    anchor_round: RoundId | None
    anchors: Mapping[str, Tensor] = field(default_factory=dict)
    outer: Mapping[str, Tensor] = field(default_factory=dict)
    num_samples: int = 0


class AnchorRequests:
    """The members that wait for the anchor of a segment, of this plan or of newer ones."""

    def __init__(self) -> None:
        self._queries: dict[tuple[NodeId, SegmentId], AnchorQuery] = {}

    def add(self, sender: NodeId, query: AnchorQuery) -> None:
        """Remember a query, unless more wait than any stage has segments."""
        if len(self._queries) < _MOST_REQUESTS:
            self._queries[sender, query.segment] = query

    def pop_all(self) -> list[tuple[NodeId, AnchorQuery]]:
        """Return all, and forget them."""
        queries, self._queries = self._queries, {}
        return [(sender, query) for (sender, _), query in queries.items()]

    def answer(
        self, plan_id: int, anchor_round: RoundId | None, segments: Mapping[SegmentId, SegmentState]
    ) -> list[Outgoing]:
        """Send the anchors of `anchor_round` to members that wait; others ask anew."""
        outgoing: list[Outgoing] = []
        for (sender, segment), query in [*self._queries.items()]:
            if query.plan_id != plan_id or anchor_round is None or query.anchor_round > anchor_round:
                continue
            del self._queries[sender, segment]
            for offset, items in segments[segment].pieces() if query.anchor_round == anchor_round else ():
                part = AnchorPart(plan_id, segment, anchor_round, offset, describe(items, WireFormat.FP32))
                outgoing.append(Outgoing(sender, part, (encode_tensor(items, WireFormat.FP32),)))
        return outgoing


class _EarlyParts:
    """Parts of rounds whose order has not come; no sender takes the room of others."""

    def __init__(self) -> None:
        self._parts: list[_Arrived] = []
        self._num_items = Counter[NodeId]()  # by sender

    def add(self, arrived: _Arrived, most_items: int) -> bool:
        """Keep a part; return whether there was room for it."""
        part, _, sender = arrived
        num_items = self._num_items[sender] + prod(part.value.shape)
        if num_items > most_items:
            return False
        self._num_items[sender] = num_items
        self._parts.append(arrived)
        return True

    def pop(self, round_id: RoundId) -> deque[_Arrived]:
        """Return the parts of a round, and forget those of rounds before it."""
        found = deque(each for each in self._parts if each[0].round_id == round_id)
        self._parts = [each for each in self._parts if each[0].round_id > round_id]
        self._num_items.clear()
        for part, _, sender in self._parts:
            self._num_items[sender] += prod(part.value.shape)
        return found


class Averager:
    """Takes part in one round at a time; `clock` tells seconds, `anchor_state` is where it begins."""

    def __init__(
        self,
        order: PlanOrder,
        blueprint: Blueprint,
        worker: Worker,
        training: TrainConfig,
        clock: Callable[[], float],
        anchor_state: AnchorState,
        timeouts: PeerTimeouts = TIMEOUTS.peer,
    ) -> None:
        self._timeouts = timeouts
        self._node, self._build_id, self._device = order.position.node, order.build_id, worker.device.name
        self._worker, self._stage = worker, worker.stage
        self._clock = clock
        self._training, self._layout = training, Layout.of(blueprint)
        self._written = frozenset(entry.name for entry in blueprint.state if entry.is_written)
        self._follow(order, anchor_state)
        # A tied weight's copies must make the same steps: their momenta stay as they are.
        alone = frozenset(entry.name for entry in blueprint.state if len(entry.positions) == 1)
        self._moving = alone if training.averaging.momentum else frozenset[str]()
        self._anchor_round = anchor_state.anchor_round
        self._round_id = RoundId(0)
        self._order: RoundOpen | None = None  # of the round under way
        self._due = 0.0  # when `tick` has something to do for it
        # Of it, once the anchors are of its anchor_round, or the share of the batch is trained.
        self._round: Round[EncodedChunk] | DirectRound[EncodedChunk] | None = None
        self._gradients: dict[SegmentId, GradientSegment] = {}  # of the round, if it sums them
        self._starts: Iterator[Any] = iter(())
        self._before: dict[SegmentId, NodeId] = {}
        self._after: dict[SegmentId, NodeId] = {}
        self._arrived: deque[_Arrived] = deque()
        self._early = _EarlyParts()
        self._requests = AnchorRequests()
        # Samples trained when a round opened: the last that committed, the latest.
        self._num_averaged = self._num_offered = -anchor_state.num_samples

    def _follow(self, order: PlanOrder | RingOrder, anchor_state: AnchorState) -> None:
        """Average these segments from the anchors there were; without any, from the stage's own state."""
        self._plan_id, self._rings = order.plan_id, dict(order.rings)
        state = {**self._stage.state, **anchor_state.anchors}
        given = (self._written, self._training, self._device, state, anchor_state.outer)
        self.segments = {
            segment: SegmentState(self._layout.segment(ring.start, ring.stop), *given)
            for segment, ring in self._rings.items()
        }
        self._most_early = _EARLY_TIMES * sum(each.num_items + 1 for each in self.segments.values())

    @property
    def anchor_state(self) -> AnchorState:
        """The anchors that this stage would go on with, in another plan or in other rings."""
        if self._anchor_round is None:
            return AnchorState(None)
        segments = self.segments.values()
        anchors = ChainMap(*(each.anchors for each in segments))
        outer = ChainMap(*(each.outer for each in segments))
        return AnchorState(self._anchor_round, anchors, outer, self._worker.num_trained - self._num_averaged)

    def rearrange(self, order: RingOrder) -> list[Outgoing]:
        """Average in other rings from now on; a round that is open in the old ones never happened here."""
        if order.plan_id <= self._plan_id:  # a second copy
            return []
        self._end()
        before = self.anchor_state
        self._follow(order, before)
        if reason := refuse_exact(order, self._worker.tied):
            return [Outgoing(HUB, StageMissing(self._build_id, self._node, reason))]
        self._worker.set_exact(order.is_exact)
        if any(name not in before.anchors for each in self.segments.values() for name in each.anchors):
            self._anchor_round = None  # it was in no ring
        answers = [self.receive_query(query, sender) for sender, query in self._requests.pop_all()]
        return [message for answer in answers if not isinstance(answer, Refusal) for message in answer]

    @property
    def is_open(self) -> bool:
        """Whether a round is under way."""
        return self._order is not None

    @property
    def is_blocking(self) -> bool:
        """Whether a round is under way during which nothing may be trained."""
        if self._order is not None and self._order.sums_gradients:
            return self._round is not None  # before, this stage trains its share
        return self._order is not None and self._order.is_blocking

    def train_beside(self) -> None:
        """Let training go on beside the round under way: nobody says now how it ends."""
        if self._order is not None and not self._order.sums_gradients:
            self._order = replace(self._order, is_blocking=False)

    @property
    def deadline(self) -> float | None:
        """When `tick` is due next."""
        return self._due if self._order is not None else None

    def open(self, order: RoundOpen) -> list[Outgoing]:
        """Begin a round; a member that missed its anchor_round asks for that first."""
        if order.round_id <= self._round_id:  # a second copy
            return []
        self._end()
        self._before, self._after = {}, {}
        for segment, ring in self._rings.items():
            owners = _present(ring, order)
            if self._node not in owners:
                return []
            index = owners.index(self._node)
            self._before[segment] = owners[index - 1]
            self._after[segment] = owners[(index + 1) % len(owners)]
        self._order, self._round_id = order, order.round_id
        self._due = self._clock() + order.deadline_seconds
        self._arrived = self._early.pop(order.round_id)
        if order.sums_gradients:
            return self._await_gradients(order)
        if order.is_anchor:
            for each in self.segments.values():
                each.reset(self._stage.state)
        if order.is_anchor or order.anchor_round == self._anchor_round or not self._find_missing():
            self._anchor_round = order.anchor_round
            return [*self._begin(order), *self._answer_all()]
        return [
            Outgoing(self._before[segment], AnchorQuery(self._plan_id, segment, order.anchor_round))
            for segment in self._find_missing()
        ]

    def _await_gradients(self, order: RoundOpen) -> list[Outgoing]:
        """Begin as soon as this stage has trained its share of the batch; next_work sees to it."""
        if self._worker.is_exact:
            self._worker.expect_update(order.rate, order.num_microbatches)
            return []
        self._end()
        reason = f"{self._node} makes its updates alone"
        return [Outgoing(HUB, RoundAbort(order.round_id, reason, self._node))]

    def _find_missing(self) -> list[SegmentId]:
        """Return the segments of which the anchor of another owner has not come whole."""
        return [segment for segment, each in self.segments.items() if not each.is_complete]

    def _begin(self, order: RoundOpen) -> list[Outgoing]:
        """Copy what this stage has and start all rings, weighted by the samples since the last average."""
        self._num_offered = self._worker.num_trained
        weight = 1.0 + self._num_offered - self._num_averaged  # and one, so that a mean exists
        weight = dict(order.weights).get(self._node, weight)  # a robust round goes by the hub's books
        state, moments = self._stage.state, self._moments()
        faults = []
        for segment, ring in self._rings.items():
            fault = self.segments[segment].open(state, moments, weight, len(_present(ring, order)))
            faults += [] if fault is None else [f"segment {segment}: {fault}"]
        if order.weights:
            self._round = self._make_robust(order)
        else:
            self._round = self._make_round(order, {x: (each, weight) for x, each in self.segments.items()})
        if faults:
            abort = self._round.give_up(faults[0], self._node)
            return [*([] if abort is None else [Outgoing(HUB, abort)]), *self._settle()]
        self._starts = self._round.start()
        return []

    def _begin_gradients(self, order: RoundOpen) -> list[Outgoing]:
        """Copy the gradient of this stage's share of the batch and start all rings, by its samples."""
        given = self._stage.summed, self._training.exact_gradients, self._device
        state = self._stage.state
        self._gradients = {
            segment: GradientSegment(each.trained, *given, each.statistics, state)
            for segment, each in self.segments.items()
        }
        if not all(each.is_finite for each in self._gradients.values()):
            logger.warning(
                "round %d: the share of this stage is not finite and does not count", order.round_id
            )
        self._round = self._make_round(order, {x: (each, each.weight) for x, each in self._gradients.items()})
        self._starts = self._round.start()
        return []

    def _make_round(
        self, order: RoundOpen, reducers: Mapping[SegmentId, tuple[Reducer[EncodedChunk], float]]
    ) -> Round[EncodedChunk]:
        """Return a round that begins: what this stage brings to each ring, and by which weight."""
        members: dict[SegmentId, RingReduce[EncodedChunk]] = {}
        for segment, (reducer, weight) in reducers.items():
            owners = _present(self._rings[segment], order)
            place = RingPosition(order.round_id, segment, owners.index(self._node), len(owners))
            chunk_size = choose_chunk_size(reducer.edges[-1], len(owners), order.least_chunk)
            members[segment] = RingReduce(place, reducer, weight, chunk_size)
        return Round(order.round_id, self._node, members, self._due, self._before)

    def _make_robust(self, order: RoundOpen) -> DirectRound[EncodedChunk]:
        """Return a robust round that begins: contributions go straight to the owners of parts."""
        weights, shared = dict(order.weights), {}
        for segment, state in self.segments.items():
            owners = tuple(x for x in _present(self._rings[segment], order) if x in weights)
            size = choose_chunk_size(state.edges[-1], len(owners), order.least_chunk)
            apart = (frozenset(order.resting), frozenset(order.hidden))
            facts = (order.round_id, segment, state, owners, weights, size)
            shared[segment] = SharedSegment(*facts, *apart)
        return DirectRound(order.round_id, self._node, shared, self._due)

    def _moments(self) -> dict[str, Tensor]:
        if not self._moving:
            return {}
        return {name: moment for name, moment in self._stage.moments.items() if name in self._moving}

    def receive_outcome(self, outcome: RoundOutcome) -> list[Outgoing] | Refusal:
        """Commit or abort the round that is open."""
        order = self._order
        if order is None or outcome.round_id != order.round_id:
            return Refusal(f"{type(outcome).__name__} of round {outcome.round_id}, which is not open here")
        if self._round is None:  # the anchors have not come
            if isinstance(outcome, RoundAbort):
                self._end()
            return []
        return self._round.conclude(outcome) or self._settle()

    def receive_call(self, call: RoundCall) -> list[Outgoing] | Refusal:
        """Begin to send contributions: all members of a robust round have pledged theirs."""
        if not isinstance(self._round, DirectRound) or call.round_id != self._round_id:
            return Refusal(f"a call of round {call.round_id}, which is not open here")
        self._starts = self._round.call(call)
        return []

    def receive_check(self, check: RoundCheck) -> list[Outgoing] | Refusal:
        """Send a contribution again, or make a chunk again that another has finished."""
        if not isinstance(self._round, DirectRound):
            return Refusal(f"a check of round {check.round_id}, which is not open here")
        found = self._round.check(check)
        return found if isinstance(found, Refusal) else [self._address(each) for each in found]

    def receive_part(self, part: _Part, buffer: Buffer, sender: NodeId) -> list[Outgoing] | Refusal:
        """Queue a chunk of the open round, or of a later one whose order has not come yet."""
        shape = part.value.shape  # of some numbers, or of rows of them with a weight at the end of each
        is_row = len(shape) in (1, 2) and shape[0] >= 1 and shape[-1] >= len(shape)
        if part.value.dtype != "float32" or not is_row:
            raise ProtocolError(f"a part of a round that is {part.value.dtype} {shape}")
        if part.round_id > self._round_id:  # a neighbour was told of the round first
            if not self._early.add((part, buffer, sender), self._most_early):
                return Refusal(f"{sender} sends more of round {part.round_id} than a round has")
        elif self._order is None or part.round_id != self._round_id:
            return Refusal(f"a ring part of round {part.round_id}, which is not open here")
        else:
            self._arrived.append((part, buffer, sender))
        return []

    def next_work(self) -> list[Outgoing] | None:
        """Do one chunk's work; None when there is none to do."""
        if self._round is None:
            order = self._order
            if order is None or not order.sums_gradients or not self._worker.is_update_complete:
                return None
            return self._begin_gradients(order)
        for started in self._starts:
            messages = started if isinstance(self._round, DirectRound) else (started,)
            return [*map(self._address, messages), *self._settle()]
        if not self._arrived:
            return None
        part, buffer, sender = self._arrived.popleft()
        found = self._receive(self._round, part, buffer, sender)
        if isinstance(found, Refusal):
            logger.debug("round %d: %s", part.round_id, found.reason)
            return []
        return [*map(self._address, found), *self._settle()]

    def _receive(
        self,
        under_way: Round[EncodedChunk] | DirectRound[EncodedChunk],
        part: _Part,
        buffer: Buffer,
        sender: NodeId,
    ) -> Sequence[Any] | Refusal:
        """Pass a chunk to the round, if it is of its kind."""
        if isinstance(under_way, DirectRound):
            if isinstance(part, RingPart):
                return Refusal(f"a part of a ring from {sender} in a robust round")
            return under_way.receive(sender, _with_value(part, EncodedChunk(part.value, buffer, None)))
        if isinstance(part, DirectPart) or sender != self._before.get(part.segment):
            return Refusal(f"a part of {sender}, which is not before this stage")
        items = decode_tensor(buffer, part.value, self._device)
        return under_way.receive(_with_value(part, EncodedChunk(part.value, buffer, items)))

    def tick(self, now: float) -> list[Outgoing]:
        """Give up at the deadline, or ask what became of the round."""
        if self._order is None or now < self._due:
            return []
        self._due = now + self._timeouts.ask_again_seconds
        if self._round is None:
            suspect, reason = self._node, "its share of the batch is not trained yet"
            if not self._order.sums_gradients:
                suspect = self._before[self._find_missing()[0]]
                reason = f"{suspect} has not sent its last average"
            self._end()
            return [Outgoing(HUB, RoundAbort(self._round_id, reason, suspect))]
        expired = self._round.expire(now)
        return [*self._settle(), *([] if expired is None else [Outgoing(HUB, expired)])]

    def _settle(self) -> list[Outgoing]:
        """End a round that is decided; merge its averages, and share changes of tied weights."""
        assert self._round is not None
        assert self._order is not None
        if self._round.phase not in (RoundPhase.COMMITTED, RoundPhase.ABORTED):
            return []
        averages = self._round.pop_averages()
        if averages is None:
            self._end()
            return []
        if self._order.sums_gradients:
            return self._update(averages)
        state, moments = self._stage.state, self._moments()
        strength, is_blocking = self._strength(), self._order.is_blocking
        changes: dict[str, Tensor] = {}
        for segment, pieces in averages.items():
            changes |= self.segments[segment].commit(pieces, strength, state, moments, is_blocking)
        self._anchor_round, self._num_averaged = self._round_id, self._num_offered
        self._end()
        own, outgoing = self._worker.tied.commit(changes)
        self._stage.add(own)
        return [*outgoing, *self._answer_all()]

    def _update(self, averages: Mapping[SegmentId, Sequence[EncodedChunk]]) -> list[Outgoing]:
        """Make the update that a gradient round was for; a cluster alone is in no ring."""
        gradients: dict[str, Tensor] = {}
        changes: dict[str, Tensor] = {}
        for segment, pieces in averages.items():
            gradients |= self._gradients[segment].read(pieces)
            changes |= self._gradients[segment].read_statistics(pieces)
        assert self._order is not None
        rate = self._order.rate
        self._end()
        self._worker.make_update(gradients if self._rings else None, rate)
        self._stage.add({name: change.to(self._stage.state[name].dtype) for name, change in changes.items()})
        return []

    def _strength(self) -> float:
        """Return how far to go towards the average: less, the more was trained since the copy."""
        assert self._order is not None
        meanwhile = self._worker.num_trained - self._num_offered
        if self._order.is_blocking or not meanwhile:
            return 1.0
        between = self._num_offered - self._num_averaged
        return 1.0 - (1.0 - _LATE_STRENGTH) * min(1.0, meanwhile / max(between, 1))

    def _end(self) -> None:
        """Forget the round under way; what it has not committed never happened."""
        self._order = self._round = None
        self._gradients = {}
        self._starts = iter(())
        self._arrived.clear()
        for anchored in self.segments.values():
            anchored.abort()

    def receive_query(self, query: AnchorQuery, sender: NodeId) -> list[Outgoing] | Refusal:
        """Send an owner that missed a round its average, once this member has it and knows of the plan."""
        ring = self._rings.get(query.segment)
        if query.plan_id < self._plan_id:
            return Refusal(
                f"{sender} asks for an anchor of plan {query.plan_id}, here is plan {self._plan_id}"
            )
        if query.plan_id == self._plan_id and (ring is None or sender not in ring.owners):
            return Refusal(
                f"{sender} asks for segment {query.segment}, which it does not share with this stage"
            )
        self._requests.add(sender, query)
        return self._answer_all()

    def _answer_all(self) -> list[Outgoing]:
        return self._requests.answer(self._plan_id, self._anchor_round, self.segments)

    def receive_anchor(
        self, part: AnchorPart[TensorSpec], buffer: Buffer, sender: NodeId
    ) -> list[Outgoing] | Refusal:
        """Add a piece of the anchor that this member has asked for; with all of them, begin the round."""
        order = self._order
        is_awaited = order is not None and self._round is None and part.anchor_round == order.anchor_round
        if order is None or order.sums_gradients or not is_awaited or part.plan_id != self._plan_id:
            return Refusal(f"an anchor of round {part.anchor_round}, which is not awaited here")
        if part.segment not in self.segments or sender != self._before[part.segment]:
            return Refusal(f"an anchor of segment {part.segment} from {sender}, which was not asked for it")
        if part.value.dtype != "float32" or len(part.value.shape) != 1:
            raise ProtocolError(f"a part of an anchor of {part.value.dtype} {part.value.shape}")
        self.segments[part.segment].receive(part.offset, decode_tensor(buffer, part.value, self._device))
        if self._find_missing():
            return []
        for each in self.segments.values():
            each.adopt()
        self._anchor_round = order.anchor_round
        return [*self._begin(order), *self._answer_all()]

    def _address(self, found: Any) -> Outgoing:
        """Address what a round says: robust ones name the receiver, in a ring it is the next owner."""
        to, message = found if isinstance(found, tuple) else (HUB, found)
        if not isinstance(message, RingPart | DirectPart):
            return Outgoing(to, message)
        chunk: EncodedChunk = message.value
        receiver = self._after[message.segment] if isinstance(message, RingPart) else to
        return Outgoing(receiver, replace(message, value=chunk.spec), (memoryview(chunk.buffer),))


def refuse_exact(order: PlanOrder | RingOrder, tied: TiedWeights) -> str | None:
    """Return why a stage cannot make exact updates, if the order asks for them."""
    if not order.is_exact or tied.is_empty:
        return None
    return "exact updates are not made here: the stage shares a weight with another stage of its cluster"


def _present(ring: Ring, order: RoundOpen) -> list[NodeId]:
    """Return the owners that take part in a round."""
    return [owner for owner in ring.owners if owner not in order.left_out]


def _with_value(part: Any, value: Any) -> Any:
    return replace(part, value=value)
