"""The compute side of a peer: one stage, built, at work and held for the next plan.

StageHost handles each item that crosses the border from the agent. RunningStage is the stage at work: it has
the only dispatcher for messages to a stage, and lets training and averaging take turns.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ravnest.engine.weight_versions import Snapshot
from ravnest.errors import ProtocolError
from ravnest.ids import HUB, NodeId, RoundId
from ravnest.model.state.sketch import sketch_tensors
from ravnest.model.state.state_dict import snapshot_pieces
from ravnest.peer.averager import Averager
from ravnest.peer.compute_protocol import (
    Build,
    Delivered,
    FromCompute,
    HubLink,
    Probe,
    SnapshotWritten,
    StageBuilt,
    ToCompute,
    WrittenBlob,
    name_file,
)
from ravnest.peer.lease_reserve import RootReserve
from ravnest.peer.stage_builder import HeldStage, StageBuilder
from ravnest.peer.worker import Worker
from ravnest.protocol.averaging import (
    AnchorPart,
    AnchorQuery,
    DirectPart,
    RingPart,
    RoundAbort,
    RoundCall,
    RoundCheck,
    RoundCommit,
    RoundOpen,
    TiedCall,
    TiedGradient,
    TiedHolder,
    TiedStep,
)
from ravnest.protocol.generation import GenerationEnd, GenerationStep, GenerationValues
from ravnest.protocol.membership import Complaint
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.placement import (
    PlanOrder,
    RingOrder,
    SketchMade,
    SketchOrder,
    SnapshotOrder,
    StageMissing,
)
from ravnest.protocol.tensors import Buffer
from ravnest.protocol.training import (
    Activation,
    DroppedMicrobatch,
    FieldParts,
    Gradient,
    LearningRate,
    LeaseBegin,
    LeaseGrant,
    Pace,
    StepReport,
)
from ravnest.transfer.blobs import hash_pieces, name_hashes, name_pieces
from ravnest.transfer.outbox import Outgoing

logger = logging.getLogger(__name__)

_AVERAGING_SHARE = 0.5  # of the time that training takes, while both have work

StageAnswer = Iterable[Outgoing] | Refusal


class RunningStage:
    """A stage at work: training and averaging take turns; `clock` tells seconds."""

    def __init__(self, worker: Worker, averager: Averager, clock: Callable[[], float]) -> None:
        self.worker, self.averager = worker, averager
        worker.find_average = self._find_average
        self._clock = clock
        self._late_round: RoundOpen | None = None  # it begins when all that was trained can be in it
        self._training_seconds = self._averaging_seconds = 0.0  # while a round is open
        self._was_text = False  # the last piece of work
        self._reserve = RootReserve()

    def receive(  # noqa: C901, PLR0912 - one short case for each message
        self, message: Message, buffers: Sequence[Buffer], sender: NodeId
    ) -> StageAnswer:
        """Pass a message to its handler; return what to send at once. ProtocolError means a wrong sender."""
        worker, averager, tied = self.worker, self.averager, self.worker.tied
        match message:
            case LeaseGrant(is_ahead=True):
                return self._reserve.add(message) or ()
            case LeaseGrant():
                return worker.start_lease(message) or ()
            case LeaseBegin():
                found = self._reserve.pop(message.lease)
                return (found if isinstance(found, Refusal) else worker.start_lease(found)) or ()
            case FieldParts():
                return worker.receive_fields(message, buffers) or ()
            case Activation():
                return worker.receive_activation(message, buffers) or ()
            case Gradient():
                return worker.receive_gradient(message, buffers) or ()
            case DroppedMicrobatch():
                worker.drop_microbatch(message)
            case LearningRate():
                worker.set_rate(message)
            case Pace():
                return worker.timekeeper.follow_pace(message, sender) or ()
            case StepReport():
                return worker.timekeeper.record_report(message, sender) or ()
            case SketchOrder():
                return [Outgoing(HUB, self._sketch(message))]
            case GenerationStep():
                return worker.begin_texts().receive_step(message, buffers) or ()
            case GenerationValues():
                return worker.begin_texts().receive_values(message, buffers, sender) or ()
            case GenerationEnd():
                worker.begin_texts().end(message)
            case RoundOpen():
                return self._open_round(message)
            case RoundCommit():
                return self._commit_round(message)
            case RoundAbort():
                return self._abort_round(message)
            case RoundCall():
                return averager.receive_call(message)
            case RoundCheck():
                return averager.receive_check(message)
            case RingPart() | DirectPart():
                return averager.receive_part(message, buffers[0], sender)
            case AnchorQuery():
                return averager.receive_query(message, sender)
            case AnchorPart():
                return averager.receive_anchor(message, buffers[0], sender)
            case TiedHolder() | TiedCall() | TiedGradient() | TiedStep() if tied.is_empty:
                return Refusal("this stage holds no tied weight")
            case TiedHolder():
                return self._then_open_round(tied.receive_holder(message, sender))
            case TiedCall():
                return self._then_open_round(worker.answer_tied_call(message, sender))
            case TiedGradient():
                return self._then_open_round(tied.receive_gradient(message, buffers, sender))
            case TiedStep():
                return self._then_open_round(tied.receive_step(message, buffers, sender))
            case _:
                return Refusal(f"{type(message).__name__} is not for a stage")
        return ()

    def _open_round(self, order: RoundOpen) -> Iterable[Outgoing]:
        """Begin a round, as soon as all that was trained can be in it."""
        if order.is_final:
            self.worker.close_update()
        if order.is_blocking and not (self._reserve.has_lost_hub and not order.sums_gradients):
            # All that was trained must be in the average: tied weights may wait for other stages. And a
            # microbatch that begins after it shall see the average, and nothing newer: so it can be checked.
            is_ready = self.worker.tied.is_settled and (order.sums_gradients or not self.worker.is_midway)
            self._late_round = None if is_ready else order
            if self._late_round is not None:
                return ()
        self._training_seconds = self._averaging_seconds = 0.0
        outgoing = self.averager.open(order)
        if self._reserve.has_lost_hub:
            self.averager.train_beside()
        return outgoing

    def _commit_round(self, commit: RoundCommit) -> StageAnswer:
        was_blocking = self.averager.is_blocking and not self.worker.is_exact
        answer = self.averager.receive_outcome(commit)
        if was_blocking and self.averager.anchor_state.anchor_round == commit.round_id:
            self.worker.begin_average(commit.round_id)
        return answer

    def _find_average(self, round_id: RoundId) -> Mapping[str, Tensor] | None:
        before = self.averager.anchor_state
        return before.anchors if before.anchor_round == round_id else None

    def _abort_round(self, abort: RoundAbort) -> StageAnswer:
        if self._late_round is not None and abort.round_id == self._late_round.round_id:
            self._late_round = None
            return ()
        return self.averager.receive_outcome(abort)

    def _then_open_round(self, answer: list[Outgoing] | Refusal) -> StageAnswer:
        """Open the round that waits for tied weights, after a message about them."""
        if isinstance(answer, Refusal) or self._late_round is None:
            return answer
        return [*answer, *self._open_round(self._late_round)]

    def follow_hub(self, *, is_lost: bool) -> None:
        """Train on without the hub, or with it again: a round that is open then does not hold training up."""
        self._reserve.follow_hub(is_lost=is_lost)
        if is_lost:
            self.averager.train_beside()

    def rearrange(self, order: RingOrder) -> list[Outgoing]:
        """Train on, and average in other rings."""
        self._late_round = None
        if order.is_exact:
            self._reserve.clear()  # a gradient round needs the hub
        return self.averager.rearrange(order)

    def next_work(self) -> Iterator[Outgoing] | None:
        """Return the next piece of work; None when there is nothing to do.

        A step of a generation comes first, since somebody waits for the word. Then training has its turn.
        """
        texts = self.worker.generation
        if texts is None:
            return self._train_or_average()
        text = None if self._was_text else texts.next_work()
        self._was_text = text is not None
        return text or self._train_or_average() or texts.next_work()

    def _train_or_average(self) -> Iterator[Outgoing] | None:
        """Return the next piece of work for training or for a round.

        Chunks of a round come first, until they have had their share of the time: one that waits keeps the
        whole ring waiting, and training may have work without end.
        """
        late = self._late_round
        if late is not None and self.worker.is_midway:
            return self.worker.next_work(may_forward=False)
        if late is not None and self.worker.tied.is_settled:
            self._late_round = None
            return iter(self._open_round(late))
        is_blocked = self.averager.is_blocking or late is not None
        is_first = self._averaging_seconds <= _AVERAGING_SHARE * self._training_seconds
        averaging = self._average() if is_first or is_blocked else None
        if averaging is not None:
            return averaging
        schedule = self.worker.schedule
        if schedule.next_input is None and (ahead := self._reserve.pop_next(is_idle=schedule.is_empty)):
            self.worker.start_lease(ahead)
        work = self.worker.flush() if is_blocked else self.worker.next_work()
        if work is None:
            return self._average()
        return self._timed(work) if self.averager.is_open else work

    def _average(self) -> Iterator[Outgoing] | None:
        """Do a chunk's work for a round, if there is any."""
        began = self._clock()
        outgoing = self.averager.next_work()
        self._averaging_seconds += self._clock() - began
        return None if outgoing is None else iter(outgoing)

    def _timed(self, work: Iterator[Outgoing]) -> Iterator[Outgoing]:
        began = self._clock()
        yield from work
        self._training_seconds += self._clock() - began

    def hold(self) -> HeldStage:
        """End training; return what another plan can go on with."""
        self.worker.close_update()
        return HeldStage(self.worker.stage.snapshot(copies=False), self.averager.anchor_state)

    def save(self, is_final: bool) -> Snapshot | None:
        """Return the state of the stage; None while tied weights wait for other stages.

        After a final snapshot nothing is trained, so what is summed up is applied first.
        """
        if is_final:
            self.worker.close_update()
        # Training may never let all of them settle at once, and the next snapshot has what this one lacks.
        tied = self.worker.tied
        is_time = tied.is_settled if is_final else tied.is_ready
        # Exact updates are the same in all stages, and so must their snapshots be.
        return self.worker.stage.snapshot(copies=self.worker.is_exact) if is_time else None

    def save_average(self, anchor_round: RoundId) -> Snapshot | None:
        """Return the state with the average of a round in place of the live weights; None: it has another.

        The average is copied: the next round changes it.
        """
        before = self.averager.anchor_state
        if before.anchor_round != anchor_round:
            return None
        live = self.worker.stage.snapshot(copies=False)
        kept = {
            name: before.anchors[name].to(tensor.dtype, copy=True) if name in before.anchors else tensor
            for name, tensor in live.state.items()
        }
        return replace(live, state=kept)

    def _sketch(self, order: SketchOrder) -> SketchMade:
        """Say which weights this stage has, of each of its segments."""
        before, live = self.averager.anchor_state, self.worker.stage.state
        is_live = order.anchor_round is None
        rows = []
        for segment in (
            self.averager.segments.values() if is_live or before.anchor_round == order.anchor_round else ()
        ):
            anchors = segment.anchors
            tensors = {name: live[name] for name in anchors} if is_live else anchors
            place = segment.trained
            rows.append((place.start, place.stop, sketch_tensors(tensors, anchors, order.key)))
        return SketchMade(order.build_id, order.number, tuple(rows))


@dataclass(frozen=True, slots=True)
class SavedStage:
    """A snapshot that is still to be written.

    It is no copy, which a PC may have no memory for, but where updates are exact. Training may change it
    while it is written; then its parts are some updates apart, as stages are anyway.
    """

    order: SnapshotOrder
    snapshot: Snapshot
    anchor_round: RoundId | None = None  # the round whose average it has


def write_snapshot(folder: str | None, saved: SavedStage) -> SnapshotWritten:
    """Write a snapshot down, for the agent to serve."""
    state, optimizer = saved.snapshot.state, saved.snapshot.optimizer
    blob = write_blob(folder, lambda: snapshot_pieces(state, optimizer))
    return SnapshotWritten(saved.order, saved.snapshot.version, blob, saved.anchor_round)


def write_blob(folder: str | None, make: Callable[[], Iterable[Buffer]]) -> WrittenBlob:
    """Write content to a file named by its hash, piece by piece; where that fails, return it in memory."""
    try:
        path = name_file(folder, "unfinished")
        try:
            with path.open("wb") as file:
                ref, hashes = name_pieces(make(), file.write)
            path.replace(path.with_name(ref.blob))
        except OSError:
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        content = b"".join(make())
        hashes = hash_pieces(content)
        return WrittenBlob(name_hashes(hashes, len(content)), hashes, content, str(error))
    return WrittenBlob(ref, hashes)


class StageHost:
    """Hosts one stage at a time, as the builder makes it; `clock` tells seconds."""

    def __init__(self, builder: StageBuilder, clock: Callable[[], float]) -> None:
        self._builder, self._clock = builder, clock
        self._stage: RunningStage | None = None
        self._held: HeldStage | None = None  # of the stage before, until the next is built
        self._frozen: frozenset[str] = frozenset()  # names, of the stage that was built last
        self._snapshot_orders: list[SnapshotOrder] = []  # until the stage can be saved
        self._has_lost_hub = False  # since the plan before

    @property
    def stage(self) -> RunningStage | None:
        """The stage at work here."""
        return self._stage

    @property
    def held(self) -> HeldStage | None:
        """What is held of a stage that ended."""
        return self._held

    @property
    def deadline(self) -> float | None:
        """When `tick` is due, if nothing else happens before."""
        return None if self._stage is None else self._stage.averager.deadline

    def handle(self, item: ToCompute) -> Iterable[FromCompute | SavedStage]:
        """Do what an item asks for; return what to send, and snapshots to write."""
        match item:
            case Delivered():
                return self._deliver(item)
            case PlanOrder():
                self._end_stage(item)
                return ()
            case RingOrder():
                return () if self._stage is None else self._stage.rearrange(item)
            case Build():
                return [self._build(item)]
            case Probe():
                speed = self._builder.measure_speed(item.blueprint)
                return [Outgoing(HUB, replace(item.report, flops_per_second=speed))]
            case SnapshotOrder():
                self._snapshot_orders.append(item)
                return self._save_if_ordered()
            case HubLink():
                self._follow_hub(is_lost=not item.is_up)
                return ()

    def _deliver(self, item: Delivered) -> Iterable[FromCompute | SavedStage]:
        kind = type(item.message).__name__
        if self._stage is None:
            logger.debug("%s came, but no stage is hosted here", kind)
            return ()
        try:
            answer = self._stage.receive(item.message, item.buffers, item.sender)
        except ProtocolError as error:
            build_id = self._stage.worker.position.build_id
            return [Outgoing(HUB, Complaint(build_id, item.sender, str(error)))]
        if isinstance(answer, Refusal):
            logger.debug("%s from %s: %s", kind, item.sender, answer.reason)
            return ()
        return [*answer, *self._save_if_ordered()]

    def _follow_hub(self, *, is_lost: bool) -> None:
        self._has_lost_hub = is_lost
        if self._stage is not None:
            self._stage.follow_hub(is_lost=is_lost)

    def _end_stage(self, order: PlanOrder) -> None:
        """End the stage; hold its state, unless the new plan has no stage for this node."""
        self._has_lost_hub = False
        if order.stage is None:
            self._held = None
        elif self._stage is not None:
            self._held = self._stage.hold()
        self._stage = None
        self._snapshot_orders = []

    def _build(self, item: Build) -> FromCompute:
        built = self._builder.build(item, self._held)
        if isinstance(built, StageMissing):
            return Outgoing(HUB, built)
        self._stage, self._held = RunningStage(*built, self._clock), None
        self._stage.follow_hub(is_lost=self._has_lost_hub)
        self._frozen = built[0].frozen
        return StageBuilt(item.parts.build_id)

    def _save_if_ordered(self) -> list[SavedStage]:
        """Save the stage if the hub has asked for it and no tied weight waits."""
        orders = self._snapshot_orders
        if not orders:
            return []
        snapshot = self.save(is_final=any(order.is_final for order in orders))
        if snapshot is None:
            return []
        self._snapshot_orders = []
        return [self._saved(order, snapshot) for order in orders]

    def _saved(self, order: SnapshotOrder, live: Snapshot) -> SavedStage:
        """Return what an order asks for: the average of its round if that is here, else the live weights.

        Nothing is made of a final snapshot but the result. Whoever gave the frozen weights has them.
        """
        wanted = order.anchor_round
        average = None if wanted is None or self._stage is None else self._stage.save_average(wanted)
        found = live if average is None else average
        if order.is_final:
            kept = {name: tensor for name, tensor in found.state.items() if name not in self._frozen}
            found = replace(found, state=kept)
        return SavedStage(order, found, None if average is None else wanted)

    def save(self, is_final: bool = True) -> Snapshot | None:
        """Return the state of the stage, or of the held one; None while tied weights wait, or without any."""
        if self._stage is not None:
            return self._stage.save(is_final)
        return None if self._held is None else self._held.snapshot

    def next_work(self) -> Iterator[Outgoing] | None:
        """Return the next piece of work; None when there is nothing to do."""
        return None if self._stage is None else self._stage.next_work()

    def tick(self, now: float) -> Iterable[Outgoing]:
        """Tell an open round the time, for its deadline."""
        return () if self._stage is None else self._stage.averager.tick(now)
