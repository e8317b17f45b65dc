"""How far a stage is from the last average, and who waits to hear of that average from it.

A member that missed rounds, or was just built, asks the owner before it in each ring. Whoever is asked may
have to ask another first, or may not have heard of the asker's plan yet.
"""

import logging
from collections import ChainMap, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor

from ravnest.averaging.ring import RingPosition, RingReduce, choose_chunk_size
from ravnest.averaging.round import Round, RoundPhase
from ravnest.codec import decode_tensor, describe, encode_tensor
from ravnest.config import TIMEOUTS, PeerTimeouts, WireFormat
from ravnest.engine.train_config import TrainConfig
from ravnest.errors import ProtocolError
from ravnest.ids import HUB, NodeId, RoundId, SegmentId
from ravnest.model.blueprint import Blueprint
from ravnest.model.state_dict import Layout
from ravnest.peer.segment_state import EncodedChunk, SegmentState
from ravnest.peer.stage_position import StagePosition
from ravnest.peer.worker import Worker
from ravnest.protocol.averaging import AnchorPart, AnchorQuery, RingPart, RoundAbort, RoundCommit, RoundOpen
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import PlanOrder, RingOrder
from ravnest.protocol.tensors import Buffer, TensorSpec
from ravnest.transfer.outbox import Outgoing

_MOST_ASKED = 4096


@dataclass(frozen=True, slots=True)
class AnchorState:
    """The round whose average the anchors are, these and outer momenta by name, samples trained since.

    Without a anchor_round the anchors are nobody's, and others must be asked for.
    """

    anchor_round: RoundId | None
    anchors: Mapping[str, Tensor] = field(default_factory=dict)
    outer: Mapping[str, Tensor] = field(default_factory=dict)
    num_samples: int = 0


class AnchorRequests:
    """Who waits for the anchor of which segment, of this plan or of newer ones."""

    def __init__(self) -> None:
        self._queries: dict[tuple[NodeId, SegmentId], AnchorQuery] = {}

    def add(self, sender: NodeId, query: AnchorQuery) -> None:
        """Remember a query; one who asks for more than any stage has is not heard."""
        if len(self._queries) < _MOST_ASKED:
            self._queries[sender, query.segment] = query

    def take(self) -> list[tuple[NodeId, AnchorQuery]]:
        """Return all, and forget them."""
        queries, self._queries = self._queries, {}
        return [(sender, query) for (sender, _), query in queries.items()]

    def answer(
        self, plan_id: int, anchor_round: RoundId | None, segments: Mapping[SegmentId, SegmentState]
    ) -> list[Outgoing]:
        """Send the anchors of `anchor_round` to who waits for them; who wants older ones will ask anew."""
        parcels: list[Outgoing] = []
        for (sender, segment), query in [*self._queries.items()]:
            if query.plan_id != plan_id or anchor_round is None or query.anchor_round > anchor_round:
                continue
            del self._queries[sender, segment]
            for offset, items in segments[segment].pieces() if query.anchor_round == anchor_round else ():
                part = AnchorPart(plan_id, segment, anchor_round, offset, describe(items, WireFormat.FP32))
                parcels.append(Outgoing(sender, part, (encode_tensor(items, WireFormat.FP32),)))
        return parcels


logger = logging.getLogger(__name__)

_LATE_STRENGTH = 0.5  # of an average that is a whole round late: full strength is unstable
_EARLY_TIMES = 8  # the numbers of a stage: what honest neighbours may send before this one hears of a round

AveragingMessage = RingPart[TensorSpec] | RoundCommit | RoundAbort | AnchorQuery | AnchorPart[TensorSpec]
_Arrived = tuple[RingPart[TensorSpec], Buffer, NodeId | None]


class Averager:
    """Takes part in one round at a time; `clock` tells seconds, `standing` what there was before."""

    def __init__(
        self,
        place: StagePosition,
        order: PlanOrder,
        blueprint: Blueprint,
        worker: Worker,
        training: TrainConfig,
        clock: Callable[[], float],
        standing: AnchorState,
        timeouts: PeerTimeouts = TIMEOUTS.peer,
    ) -> None:
        self._timeouts = timeouts
        self._place = place
        self._worker, self._stage = worker, worker.stage
        self._clock = clock
        self._training, self._layout = training, Layout.of(blueprint)
        self._written = frozenset(entry.name for entry in blueprint.state if entry.is_written)
        self._follow(order, standing)
        # A tied weight's copies must make the same steps: their momenta stay as they are.
        alone = frozenset(entry.name for entry in blueprint.state if len(entry.positions) == 1)
        self._moving = alone if training.averaging.momentum else frozenset[str]()
        self._anchor_round = standing.anchor_round
        self._round_id = RoundId(0)
        self._order: RoundOpen | None = None  # of the round under way
        self._round: Round[EncodedChunk] | None = (
            None  # of it, once the anchors are those of its anchor_round
        )
        self._starts: Iterator[Any] = iter(())
        self._before: dict[SegmentId, NodeId] = {}
        self._after: dict[SegmentId, NodeId] = {}
        self._arrived: deque[_Arrived] = deque()
        self._early: list[_Arrived] = []
        self._askers = AnchorRequests()
        # Samples trained when a round opened: the last that committed, the latest.
        self._num_averaged = self._num_offered = -standing.num_samples

    def _follow(self, order: PlanOrder | RingOrder, standing: AnchorState) -> None:
        """Have these segments, with the anchors there were; without any, what the stage has is it."""
        self._plan_id, self._rings = order.plan_id, dict(order.rings)
        state = {**self._stage.state, **standing.anchors}
        given = (self._written, self._training, self._place.device, state, standing.outer)
        self._segments = {
            segment: SegmentState(self._layout.segment(ring.start, ring.stop), *given)
            for segment, ring in self._rings.items()
        }
        self._most_early = _EARLY_TIMES * sum(each.num_items + 1 for each in self._segments.values())

    @property
    def standing(self) -> AnchorState:
        """What this stage would go on with, elsewhere or in other rings."""
        if self._anchor_round is None:
            return AnchorState(None)
        segments = self._segments.values()
        anchors = ChainMap(*(each.anchors for each in segments))
        outer = ChainMap(*(each.outer for each in segments))
        return AnchorState(self._anchor_round, anchors, outer, self._worker.num_trained - self._num_averaged)

    def rearrange(self, order: RingOrder) -> list[Outgoing]:
        """Average in other rings from now on; a round that is open in the old ones never happened here."""
        if order.plan_id <= self._plan_id:  # a second copy
            return []
        self._end()
        before = self.standing
        self._follow(order, before)
        if any(name not in before.anchors for each in self._segments.values() for name in each.anchors):
            self._anchor_round = None  # it was in no ring
        found = [self._answer(query, sender) for sender, query in self._askers.take()]
        return [parcel for each in found if not isinstance(each, Refusal) for parcel in each]

    @property
    def is_open(self) -> bool:
        """Whether a round is under way."""
        return self._order is not None

    @property
    def is_blocking(self) -> bool:
        """Whether a round is under way during which nothing may be trained."""
        return self._order is not None and self._order.is_blocking

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
            owners = [owner for owner in ring.owners if owner not in order.left_out]
            if self._place.node not in owners:
                return []
            place = owners.index(self._place.node)
            self._before[segment] = owners[place - 1]
            self._after[segment] = owners[(place + 1) % len(owners)]
        self._order, self._round_id = order, order.round_id
        self._due = self._clock() + order.deadline_seconds
        self._arrived = deque(each for each in self._early if each[0].round_id == order.round_id)
        self._early = [each for each in self._early if each[0].round_id > order.round_id]
        if order.is_anchor:
            for each in self._segments.values():
                each.reset(self._stage.state)
        if order.is_anchor or order.anchor_round == self._anchor_round or not self._find_missing():
            self._anchor_round = order.anchor_round
            return [*self._begin(order), *self._answer_all()]
        return [
            Outgoing(self._before[segment], AnchorQuery(self._plan_id, segment, order.anchor_round))
            for segment in self._find_missing()
        ]

    def _find_missing(self) -> list[SegmentId]:
        """Return the segments of which the anchor of another owner has not come whole."""
        return [segment for segment, each in self._segments.items() if not each.is_complete]

    def _begin(self, order: RoundOpen) -> list[Outgoing]:
        """Copy what this stage has and start all rings, weighted by the samples since the last average."""
        self._num_offered = self._worker.num_trained
        weight = 1.0 + self._num_offered - self._num_averaged  # and one, so that a mean exists
        state, moments = self._stage.state, self._moments()
        members: dict[SegmentId, RingReduce[EncodedChunk]] = {}
        faults = []
        for segment, ring in self._rings.items():
            owners = [owner for owner in ring.owners if owner not in order.left_out]
            anchored = self._segments[segment]
            fault = anchored.open(state, moments, weight, len(owners))
            faults += [] if fault is None else [f"segment {segment}: {fault}"]
            seat = RingPosition(order.round_id, segment, owners.index(self._place.node), len(owners))
            chunk_size = choose_chunk_size(anchored.edges[-1], len(owners), order.least_chunk)
            members[segment] = RingReduce(seat, anchored, weight, chunk_size)
        self._round = Round(order.round_id, self._place.node, members, self._due, self._before)
        if faults:
            abort = self._round.give_up(faults[0], self._place.node)
            return [*([] if abort is None else [Outgoing(HUB, abort)]), *self._settle()]
        self._starts = self._round.start()
        return []

    def _moments(self) -> dict[str, Tensor]:
        if not self._moving:
            return {}
        return {name: moment for name, moment in self._stage.moments.items() if name in self._moving}

    def receive(
        self, message: AveragingMessage, buffers: Sequence[Buffer] = (), sender: NodeId | None = None
    ) -> list[Outgoing] | Refusal:
        """Take what concerns a round; return what to send at once."""
        if isinstance(message, AnchorQuery):
            return self._answer(message, sender)
        if isinstance(message, AnchorPart):
            return self._take_anchor(message, buffers[0], sender)
        if isinstance(message, RingPart):
            return self._queue(message, buffers[0], sender)
        order = self._order
        if order is None or message.round_id != order.round_id:
            return Refusal(f"{type(message).__name__} of round {message.round_id}, which is not open here")
        if self._round is None:  # the anchors have not come
            if isinstance(message, RoundAbort):
                self._end()
            return []
        found = self._round.receive(message)
        return found if isinstance(found, Refusal) else self._settle()

    def _queue(
        self, part: RingPart[TensorSpec], buffer: Buffer, sender: NodeId | None
    ) -> list[Outgoing] | Refusal:
        if part.value.dtype != "float32" or len(part.value.shape) not in (1, 2):
            raise ProtocolError(f"a ring part of {part.value.dtype} {part.value.shape}")
        if part.round_id > self._round_id:  # a neighbour heard of the round first
            held = sum(prod(each.value.shape) for each, _, _ in self._early)
            if held + prod(part.value.shape) > self._most_early:
                return Refusal(f"{sender} sends more of round {part.round_id} than a round has")
            self._early.append((part, buffer, sender))
        elif self._order is None or part.round_id != self._round_id:
            return Refusal(f"a ring part of round {part.round_id}, which is not open here")
        else:
            self._arrived.append((part, buffer, sender))
        return []

    def next_work(self) -> list[Outgoing] | None:
        """Do one chunk's work; None when there is none to do."""
        if self._round is None:
            return None
        for said in self._starts:
            return [self._address(said), *self._settle()]
        if not self._arrived:
            return None
        part, buffer, sender = self._arrived.popleft()
        if sender is not None and sender != self._before.get(part.segment):
            logger.debug("round %d: a ring part of %s, which is not before this stage", part.round_id, sender)
            return []
        items = decode_tensor(buffer, part.value, self._place.device)
        found = self._round.receive(_with_value(part, EncodedChunk(part.value, buffer, items)))
        if isinstance(found, Refusal):
            logger.debug("round %d: %s", part.round_id, found.reason)
            return []
        return [*map(self._address, found), *self._settle()]

    def tick(self, now: float) -> list[Outgoing]:
        """Give up at the deadline, or ask what became of the round."""
        if self._order is None or now < self._due:
            return []
        self._due = now + self._timeouts.ask_again_seconds
        if self._round is None:
            suspect = self._before[self._find_missing()[0]]
            abort = RoundAbort(self._round_id, f"{suspect} has not sent its last average", suspect)
            self._end()
            return [Outgoing(HUB, abort)]
        said = self._round.expire(now)
        return [*self._settle(), *([] if said is None else [Outgoing(HUB, said)])]

    def _settle(self) -> list[Outgoing]:
        """End a round that is decided; merge what a commit agreed on, and tell who shares a weight of it."""
        assert self._round is not None
        assert self._order is not None
        if self._round.phase not in (RoundPhase.COMMITTED, RoundPhase.ABORTED):
            return []
        averages = self._round.take_averages()
        if averages is None:
            self._end()
            return []
        state, moments = self._stage.state, self._moments()
        strength, is_blocking = self._strength(), self._order.is_blocking
        changes: dict[str, Tensor] = {}
        for segment, pieces in averages.items():
            changes |= self._segments[segment].commit(pieces, strength, state, moments, is_blocking)
        self._anchor_round, self._num_averaged = self._round_id, self._num_offered
        self._end()
        own, parcels = self._worker.tied.commit(changes)
        self._stage.add(own)
        return [*parcels, *self._answer_all()]

    def _strength(self) -> float:
        """Return how much of the way to the average is gone: less, the more was trained since the copy."""
        assert self._order is not None
        meanwhile = self._worker.num_trained - self._num_offered
        if self._order.is_blocking or not meanwhile:
            return 1.0
        between = self._num_offered - self._num_averaged
        return 1.0 - (1.0 - _LATE_STRENGTH) * min(1.0, meanwhile / max(between, 1))

    def _end(self) -> None:
        """Forget the round under way; what it has not committed never happened."""
        self._order = self._round = None
        self._starts = iter(())
        self._arrived.clear()
        for anchored in self._segments.values():
            anchored.abort()

    def _answer(self, query: AnchorQuery, sender: NodeId | None) -> list[Outgoing] | Refusal:
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
        assert sender is not None
        self._askers.add(sender, query)
        return self._answer_all()

    def _answer_all(self) -> list[Outgoing]:
        return self._askers.answer(self._plan_id, self._anchor_round, self._segments)

    def _take_anchor(
        self, part: AnchorPart[TensorSpec], buffer: Buffer, sender: NodeId | None
    ) -> list[Outgoing] | Refusal:
        order = self._order
        is_awaited = order is not None and self._round is None and part.anchor_round == order.anchor_round
        if order is None or not is_awaited or part.plan_id != self._plan_id:
            return Refusal(f"an anchor of round {part.anchor_round}, which is not awaited here")
        if part.segment not in self._segments or sender != self._before[part.segment]:
            return Refusal(f"an anchor of segment {part.segment} from {sender}, who was not asked for it")
        if part.value.dtype != "float32" or len(part.value.shape) != 1:
            raise ProtocolError(f"a part of an anchor of {part.value.dtype} {part.value.shape}")
        self._segments[part.segment].take(part.offset, decode_tensor(buffer, part.value, self._place.device))
        if self._find_missing():
            return []
        for each in self._segments.values():
            each.adopt()
        self._anchor_round = order.anchor_round
        return [*self._begin(order), *self._answer_all()]

    def _address(self, message: Any) -> Outgoing:
        if not isinstance(message, RingPart):
            return Outgoing(HUB, message)
        chunk: EncodedChunk = message.value
        return Outgoing(
            self._after[message.segment], _with_value(message, chunk.spec), (memoryview(chunk.buffer),)
        )


def _with_value(part: RingPart[Any], value: Any) -> RingPart[Any]:
    return replace(part, value=value)
