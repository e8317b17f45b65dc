"""The hub's decisions: events in, orders out. Its state is the replay of its log of events.

A job's life: collect members until a plan exists, train and average, then a last round, a last evaluation,
and the weights of one cluster are kept; a job that is stopped ends in the same way, only earlier. Who comes
or goes while it trains changes the plan (hub.mending); when nobody is left who has what was trained, it
begins again, from its last checkpoint if there is one. A late or foreign message is refused and changes
nothing. Driven by hub.server, which logs events before it obeys, and by sim.
"""

from typing import assert_never

from ravnest.config import Averaging
from ravnest.hub.crew import Crew, Ordered
from ravnest.hub.events import (
    Collected,
    Dismiss,
    Event,
    Finish,
    JobGiven,
    Order,
    PartsMade,
    PeerJoined,
    PeerLeft,
    PeerReturned,
    Phase,
    Received,
    Restarted,
    Send,
    Stopped,
    Tell,
    Tick,
)
from ravnest.hub.hearing import OfStages
from ravnest.hub.keeping import SILENT
from ravnest.hub.members import ClusterState
from ravnest.hub.news import NotCheckpointed, Repaired, Stopping
from ravnest.hub.planning import PlanMade, Probed
from ravnest.hub.probing import take_probe
from ravnest.hub.rounds import Ended
from ravnest.hub.stalls import IDLE
from ravnest.hub.training import Training
from ravnest.plan.types import NodeId
from ravnest.protocol import (
    DroppedBatch,
    LeaseDone,
    Leave,
    Refusal,
    RoundAbort,
    RoundQuery,
    RoundReady,
    StepReport,
    Stop,
)
from ravnest.staging import BackupKept, SnapshotMade, StageMissing, StageReady
from ravnest.units import show_bytes

_STOP_SECONDS = 30.0  # for what is under way when the job is stopped
_END_SECONDS = 30.0  # for clusters that stand still when all is trained: they know what others do not
_OfMembers = Leave | BackupKept | RoundReady | RoundAbort | RoundQuery | OfStages


class Hub(Crew):
    """Feed it every event, in order; carry out what it returns, in order."""

    @property
    def clusters(self) -> tuple[ClusterState, ...]:
        """The clusters that get ready or train."""
        return self._members.clusters

    @property
    def due(self) -> float | None:
        """When the next Tick is needed, if nothing else happens."""
        if self._job is None:
            return None
        times = [self._mending.due(self.now)]
        if self.phase is Phase.COLLECTING:
            times.append(self._forming.due(self._job.settings, self._members))
        elif self.phase is not Phase.FINISHED:
            times.append(self._rounds.due)
        if self.phase is Phase.KEEPING:
            times.append(self._keeping.answer_by)
        elif self.phase in (Phase.TRAINING, Phase.EVALUATING):
            times.append(self._hearing.stalls.due)
        if self.phase is Phase.TRAINING:
            times += [
                self._stop_by,
                self._end_by,
                self._keeping.due(self._checkpoint_every),
                self._mending_due,
            ]
            times += [self._mending.backing.due if self._stop_by is None else None]
        return min((time for time in times if time is not None), default=None)

    @property
    def _mending_due(self) -> float | None:
        if not self._can_mend or self._mending.is_waiting(self._training, self.now):
            return None
        return self._forming.mending_due(self._members, self._mending.is_urgent)

    @property
    def _checkpoint_every(self) -> float | None:
        is_wanted = self._stop_by is None and self._members.running
        return self._training.settings.checkpoint_every if is_wanted else None

    def concerns(self, event: Event) -> bool:
        """Return whether an event may change something; the log needs no others, telemetry may."""
        if not isinstance(event, Received):
            return True
        if isinstance(event.message, StepReport):
            return self._members.cluster_of(event.sender) is not None
        return isinstance(event.message, _OfMembers)

    def apply(self, event: Event) -> tuple[Order, ...]:
        """Take an event; return what is to be done, or a Refusal alone if it changes nothing."""
        if not self.concerns(event):
            return ()
        before, self.now = self.now, max(self.now, event.now)
        taken = self._take(event)
        if isinstance(taken, str):
            self.now = before
            return (Refusal(taken),)
        orders = [*taken, *self._advance()]
        return tuple(order for order in orders if not isinstance(order, Send) or order.to in self._members)

    def _take(self, event: Event) -> Ordered:  # noqa: C901, PLR0912 - one short case for each
        match event:
            case JobGiven():
                return self._begin(event)
            case Restarted():
                return self._restart(event)
            case PeerReturned():
                return self._take_back(event)
            case PeerJoined():
                return self._join(event)
            case PeerLeft():
                return self._leave(event.node, event.reason, event.since)
            case Received(sender, message):
                assert isinstance(message, _OfMembers)
                return self._receive(sender, message)
            case PlanMade():
                return self._adopt(event)
            case PartsMade():
                return self._mending.take_parts(event)
            case Probed():
                return take_probe(self._members, event)
            case Collected():
                return self._take_collected(event)
            case Tick():
                ended = self._rounds.expire(event.now)
                return self._end_round(ended) if ended else []
            case Stopped():
                return self._stop(event.reason)
            case _:
                assert_never(event)

    def _begin(self, job: JobGiven) -> Ordered:
        if self._job:
            return f"the hub has a job already: {self._job.profile.name}"
        self._job, self.books, self._mending.saved = job, Training(job.settings), job.books
        self.books.restart(job.books)
        return []

    def _receive(self, sender: NodeId, message: _OfMembers) -> Ordered:
        if sender not in self._members:
            return f"{type(message).__name__} from {sender}, who is no member"
        match message:
            case Leave():
                return self._part(sender, message)
            case RoundReady() | RoundAbort():
                ended = self._rounds.receive(sender, message, self.now)
                return self._end_round(ended) if isinstance(ended, Ended) else ended.reason if ended else []
            case RoundQuery():
                answer = self._rounds.answer(sender, message)
                return answer.reason if isinstance(answer, Refusal) else [answer]
            case BackupKept():
                reason = self._mending.backing.note_kept(sender, message, self.now)
                return [] if reason is None else reason
            case SnapshotMade(epoch) if (
                message.weights.size_bytes > self._training.settings.most_snapshot_bytes
            ):
                size = show_bytes(message.weights.size_bytes)
                return self._part(sender, Leave(epoch, f"no stage has a snapshot of {size}"))
            case StageMissing(epoch) if self._mending.misses_all(sender):
                return self._part(
                    sender, Leave(epoch, f"it can use nothing that others give it: {message.reason}")
                )
            case StageReady() | StageMissing() | SnapshotMade() | LeaseDone() | StepReport() | DroppedBatch():
                return self._hearing.hear(sender, message, self._training, self.now)
            case _:
                assert_never(message)

    def _stop(self, reason: str) -> Ordered:
        """End as if all was trained, as soon as what is under way is; at once if nobody trains yet."""
        if self._job is None or self.phase is Phase.FINISHED or self._stop_by is not None:
            return f"there is no job to stop ({reason}), or it ends already"
        self._stop_by = self.now + _STOP_SECONDS
        told = Tell(Stopping(reason))
        if not self._members.clusters or not (self._members.running or self._training.num_counted):
            return [told, *self._start_over()]
        self._training.stop()
        return [told]

    def _advance(self) -> list[Order]:
        """Go on as far as nobody has to be waited for."""
        orders: list[Order] = []
        if self._job is None:
            return orders
        if self.phase is Phase.COLLECTING:
            orders += self._forming.ask(self._job, self._members, self.now)
        is_at_work = self.phase in (Phase.TRAINING, Phase.EVALUATING)
        idle, stuck = self._hearing.stalls.find_idle(self.now) if is_at_work else ([], [])
        for name, reason, word in self._find_parting(idle):
            left = self._leave(name, reason)
            assert isinstance(left, list)
            orders += [*left, Dismiss(name, word)]
        orders += self._rebuild(stuck)
        if self.phase is Phase.TRAINING:
            orders += self._train(self._job)
        if self.phase is Phase.AVERAGING:
            orders += self._average(self._job)
        if self.phase is Phase.EVALUATING:
            orders += self._training.fill(self._members)
            self.phase = Phase.KEEPING if self._training.is_finished else self.phase
        if self.phase is Phase.KEEPING and not self._keeping.has_result_under_way:
            orders += self._keeping.start(self._training.most_trained(self._members.running), self.now)
        if self.phase in (Phase.TRAINING, Phase.EVALUATING):  # whoever has work by now
            orders += self._ask_silent(self._job)
        return orders

    def _find_parting(self, idle: list[NodeId]) -> list[tuple[NodeId, str, str]]:
        """Return who goes now, why, and what it is told."""
        silent = self._keeping.find_silent(self.now) if self.phase is Phase.KEEPING else ()
        return [
            *((name, reason, "goodbye") for name, reason in self._mending.let_go(self.now)),
            *((name, f"it {SILENT}", "goodbye") for name in silent),
            *((name, IDLE, f"{IDLE}; start it again") for name in idle),
        ]

    def _rebuild(self, stuck: list[ClusterState]) -> list[Order]:
        """Give work back, and build anew, where all answer and nothing moves."""
        orders: list[Order] = []
        for cluster in (each for each in stuck if each in self._members.running):
            self._forming.note_change(self.now)
            why = "it has work, and nothing moves"
            lost = self._mending.lose(cluster, why, self._training, self.now) if self._can_mend else None
            orders += self._give_up(cluster, why) if lost is None else lost
        return orders

    def _ask_silent(self, job: JobGiven) -> list[Send]:
        if self._rounds.due is not None and job.config.averaging is Averaging.BLOCKING:
            for cluster in self._members.running:  # which stand still for it, until its own deadline
                self._hearing.stalls.hear(cluster, self.now)
        rate = self._members.outlook.samples_per_second / max(1, len(self._members.clusters))
        return self._hearing.stalls.ask(self._training.is_busy, job.settings, rate, self.now)

    def _adopt(self, made: PlanMade) -> Ordered:
        """Follow a plan, unless somebody came or went while it was made: another one is on its way then."""
        if self.phase not in (Phase.COLLECTING, Phase.TRAINING) or not self._forming.take(made):
            return f"plan {made.epoch} comes too late: others are here now"
        assert self._job is not None
        told: list[Order] = [*self._forming.tell_shortage(made.shortage)]
        if self.phase is Phase.COLLECTING:
            self.phase = Phase.TRAINING if made.plan else Phase.COLLECTING
            return [*told, *(self._mending.form(self._job, made, self._training) if made.plan else [])]
        if made.plan is None:
            return [*told, *self._start_over()]
        return told if self._mending.hold(made, self._training, self.now) else told + self._follow(made)

    def _follow(self, made: PlanMade) -> list[Order]:
        """Go on with a repaired plan."""
        assert self._job is not None
        assert made.plan is not None
        told: list[Order] = []
        if made.plan.rings != self._members.rings:
            ended = self._rounds.cancel("the rings are others now", self.now)
            told += self._end_round(ended) if ended else []
        told += [Tell(Repaired(made.plan, made.reason))] if made.reason else []
        followed = self._mending.repair(self._job, made, self._training)
        return told + (self._start_over() if followed is None else followed)

    def _train(self, job: JobGiven) -> list[Order]:
        if self._stop_by is not None and self.now >= self._stop_by:
            if not self._members.running:
                return self._start_over()
            self._training.give_up_leases()
        if self._guard.alarm is not None and self._stop_by is None:
            return self._roll_back(self._guard.alarm)
        held = self._mending.let_follow(self._training, self._forming.fits, self.now)
        orders = self._follow(held) if held is not None else []
        if self.phase is not Phase.TRAINING:
            return orders
        orders += self._training.fill(self._members)
        if self._training.is_finished and self._members.running and self._may_end():
            self.phase = Phase.AVERAGING
            self._mending.forget_held()
        elif self._stop_by is None:
            orders += self._mending.backing.order(self._training.known, self.now)
            if not self._mending.is_urgent:  # else the rings are soon others
                orders += self._rounds.open_due(self._members, self._training, job, self.now)
            silence = self._keeping.expire(self.now)
            orders += [Tell(NotCheckpointed(silence))] if silence else []
            if self._keeping.is_time(self._checkpoint_every, self.now):
                orders += self._keep()
        if self._can_mend and not self._mending.is_waiting(self._training, self.now):
            orders += self._forming.mend(job, self._members, self.now, self._mending.is_urgent)
        return orders

    def _may_end(self) -> bool:
        """Return whether all clusters can take part in the last round, or were waited for long enough."""
        if self._stop_by is not None or all(each.is_running for each in self._members.clusters):
            return True
        self._end_by = self.now + _END_SECONDS if self._end_by is None else self._end_by
        return self.now >= self._end_by

    def _keep(self) -> list[Send]:
        """Begin a checkpoint, of what is worth keeping."""
        self._guard.forget_others([cluster.holder for cluster in self._members.running])
        if not self._guard.is_calm:
            self._keeping.postpone(self.now)
            return []
        keeper = self._training.most_trained(self._members.running)
        return self._keeping.start(keeper, self.now, self._training.books)

    def _average(self, job: JobGiven) -> list[Order]:
        orders = self._rounds.open_last(self._members, self._training, job, self.now)
        if self._rounds.due is not None:
            return [*orders]
        self._training.start_evaluation()
        self.phase = Phase.EVALUATING
        return []

    def _take_collected(self, collected: Collected) -> Ordered:
        """Go on when something is kept: a checkpoint, or the result."""
        if not self._keeping.has_asked_for(collected.number):
            return f"nobody asked to collect number {collected.number}"
        if self.phase is not Phase.KEEPING:
            self._num_alarms = 0 if not collected.fault else self._num_alarms
            return self._mending.take_checkpoint(collected, self.now)
        self.phase = Phase.FINISHED
        stops: list[Order] = [Send(name, Stop("the job is done")) for name in self._members]
        return [*stops, Finish(self._keeping.parts, tuple(self._training.history))]
