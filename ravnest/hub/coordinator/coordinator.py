"""Who comes and goes, and what that means for what is trained: the first half of hub.state.

While clusters train they are mended; at the end another one takes over; and when nobody is left who has what
was trained it begins again, from the last checkpoint if there is one.
"""

from dataclasses import replace
from typing import assert_never

from ravnest.config import Averaging
from ravnest.hub.coordinator.checkpoints import SILENT, CheckpointCollector
from ravnest.hub.coordinator.events import (
    Abandon,
    Action,
    CalmChanged,
    ClusterHeard,
    ClusterSilent,
    Collected,
    Conclusion,
    EvaluationReported,
    Event,
    Evict,
    Finish,
    JobGiven,
    JobPhase,
    LossAlarm,
    Notify,
    PartsMade,
    PeerJoined,
    PeerLeft,
    PeerReturned,
    PlanMade,
    Probed,
    Received,
    Restarted,
    Send,
    SpeedMeasured,
    Stopped,
    Tick,
    TrainingReported,
)
from ravnest.hub.coordinator.inquiries import IDLE, Inquiries
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.membership import ClusterState, Membership, is_sensible
from ravnest.hub.coordinator.notices import (
    ClusterDissolved,
    EpochDone,
    Evaluated,
    Joined,
    Left,
    MicrobatchDropped,
    NotCheckpointed,
    Repaired,
    Resumed,
    Returned,
    SpeedChanged,
    Stopping,
    WentWrong,
    WorkLost,
)
from ravnest.hub.coordinator.plan_trigger import PlanTrigger
from ravnest.hub.coordinator.probes import take_probe
from ravnest.hub.coordinator.recovery import Recovery
from ravnest.hub.coordinator.rounds import Ended, Rounds
from ravnest.ids import NodeId
from ravnest.protocol.averaging import RoundAbort, RoundQuery, RoundReady
from ravnest.protocol.membership import Leave, Stop
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import BackupKept, SnapshotMade, StageMissing, StageReady
from ravnest.protocol.training import DroppedMicrobatch, LeaseDone
from ravnest.units import show_bytes

_MOST_ALARMS = 3
Actions = list[Action] | str  # orders, or why the event is refused


class Crew:
    """Everything the hub remembers, and what it does when somebody comes, goes or comes back."""

    def __init__(self) -> None:
        self.now = 0.0  # of the last event; a program that goes on after a restart counts on from it
        self.phase = JobPhase.COLLECTING
        self._job: JobGiven | None = None
        self._members = Membership()
        self._rounds = Rounds()
        self.books: Ledger | None = None  # from the job on
        self._forming = PlanTrigger()
        self._keeping = CheckpointCollector()
        self._mending = Recovery(self._members, self._keeping)
        self._stop_by: float | None = None  # once it is stopped
        self._end_by: float | None = None  # once all is trained, and a cluster stands still
        self._alarm: LossAlarm | None = None  # until training goes back
        self.is_calm = True  # as the monitors say
        self._inquiries = Inquiries(self._members, self._keeping.number)
        self._hearing = StageMessages(
            self._members, self._keeping, self._mending, self._forming, self._inquiries
        )
        self._num_alarms = 0  # since the last checkpoint

    @property
    def _can_mend(self) -> bool:
        """Whether clusters are repaired: until the end, or until somebody has what is to be kept."""
        return self.phase is JobPhase.TRAINING and (self._stop_by is None or not self._members.running)

    @property
    def _training(self) -> Ledger:
        assert self.books is not None, "nobody has a stage before there is a job"
        return self.books

    def is_at(self, job: JobGiven) -> bool:
        """Return whether this very job is under way, whoever is expected to do it."""
        if self._job is None or self.phase is JobPhase.FINISHED or self._stop_by is not None:
            return False
        same = {"expected_nodes": 0, "settle_seconds": 0.0}
        mine, other = replace(self._job.settings, **same), replace(job.settings, **same)  # type: ignore[arg-type]
        return mine == other and self._job.profile == job.profile and self._job.config == job.config

    def find_missing(self, key: str, build_id: int) -> NodeId | None:
        """Return under what name somebody with this key is waited for, if it has the state it is to have."""
        found = (each for each in self._members.missing if each.key == key)
        return next((x.node.name for x in found if x.held is None or x.build_id == build_id), None)

    def find_parting(self, name: NodeId) -> str:
        """Return whether somebody is missing or leaving, in one word."""
        member = self._members.find(name)
        if member is None or member.back_by is not None:
            return "missing"
        return "leaving" if member.leaves_by is not None else ""

    def needs_parts(self, interval: tuple[int, int]) -> bool:
        """Return whether the weights of an interval are worth keeping, for somebody may ask for them."""
        return self._members.needs_parts(interval)

    def find_others(self, key: str) -> set[NodeId]:
        """Return the names of all members with another key."""
        return {name for name in self._members if (x := self._members.find(name)) and x.key != key}

    def _restart(self, event: Restarted) -> Actions:
        if self._job is None or self.phase is JobPhase.FINISHED:
            return "there is nothing to go on with"
        ended = self._rounds.cancel("the hub was away", self.now)
        orders: list[Action] = [Notify(Resumed(self._training.num_counted, len(self._members)))]
        orders += self._end_round(ended) if ended else []
        self._mending.forget_held()
        self._end_by = None
        orders += self._mending.restart(event.books, self._training, self.now)
        self._rounds.restart()
        self._forming.note_change(self.now)
        self.phase = JobPhase.TRAINING if self._members.clusters else JobPhase.COLLECTING
        return orders

    def _take_back(self, event: PeerReturned) -> Actions:
        member = self._members.find(event.node)
        if member is None or member.back_by is None:
            return f"nobody waits for {event.node}"
        self._members.replace(replace(member, back_by=None, addresses=event.addresses))
        self._forming.note_change(self.now)
        return [Notify(Returned(event.node))]

    def _join(self, event: PeerJoined) -> Actions:
        name = event.node.name
        if not is_sensible(event.node):
            return f"{name} cannot join: no machine is like {event.node}"
        gone = self._leave(name, "it came back as new") if name in self._members else []
        assert isinstance(gone, list)
        gone = [order for order in gone if not isinstance(order, Send) or order.to != name]
        sends = self._members.join(event)
        self._forming.note_change(self.now)
        if self.phase is JobPhase.FINISHED:
            sends = [Send(name, Stop("the job is done"))]
        return [*gone, Notify(Joined(name)), *sends]

    def _part(self, name: NodeId, leave: Leave) -> Actions:
        """Let somebody go: at once, or when others have what it has."""
        if leave.can_hand_over and self._can_mend and self._mending.needs(name):
            self._forming.note_change(self.now)
            return self._mending.part(name, leave.reason, self.now)
        gone = self._leave(name, leave.reason)
        return gone if isinstance(gone, str) else [*gone, Evict(name, "goodbye")]

    def _leave(self, name: NodeId, reason: str, since: float | None = None) -> Actions:
        if name not in self._members:
            return f"{name} is no member, so it cannot leave"
        cluster, ended = self._members.leave(name), self._rounds.leave(name, reason, self.now)
        self._mending.forget(name)
        self._forming.note_change(self.now)
        orders: list[Action] = [Notify(Left(name, reason))]
        if self.phase is JobPhase.FINISHED:
            return orders
        orders += self._end_round(ended) if ended else []
        if cluster is not None and self._can_mend:
            since = self.now if since is None else since
            orders += self._mending.lose(cluster, f"{name}: {reason}", self._training, since)
        elif cluster is not None:
            orders += self._give_up(cluster, f"{name}: {reason}")
        is_empty = self._job is not None and self.phase is JobPhase.COLLECTING and not len(self._members)
        return [*orders, *(self._forming.tell_shortage() if is_empty else [])]

    def _give_up(self, cluster: ClusterState, reason: str) -> list[Action]:
        given_back, lost = self._training.release(cluster)
        orders: list[Action] = [*self._members.dissolve([cluster])]
        orders.append(Notify(ClusterDissolved(cluster.name, reason, given_back, lost)))
        self._keeping.lose(cluster)
        is_new = not self._training.num_counted
        if any(is_new or self._training.knows(each) for each in self._members.running):
            return orders
        return orders + self._start_over()

    def _roll_back(self, alarm: LossAlarm) -> list[Action]:
        """Go back to the last checkpoint, if there is one; too often in a row is the end."""
        self._num_alarms += 1
        self._alarm = None
        has_checkpoint = self._mending.saved is not None
        told = Notify(WentWrong(alarm.reason, alarm.suspect, has_checkpoint))
        if self._num_alarms <= _MOST_ALARMS:
            return [told, *(self._start_over() if has_checkpoint else [])]
        self._training.stop()
        self._training.give_up_leases()
        self.phase = JobPhase.FINISHED
        stops = [Send(name, Stop("the job was ended by its guard")) for name in self._members]
        told_why = f"{alarm.reason}, seen first at {alarm.suspect}, for the {self._num_alarms}th time"
        advice = "lower the learning rate, or look at the data; the last good checkpoint is kept"
        return [told, *stops, Abandon(f"training is ended: {told_why}; {advice}", is_guarded=True)]

    def _start_over(self) -> list[Action]:
        """Go back to collecting, with what the hub has and all who are here; or end, if it is stopped."""
        ended = self._rounds.cancel("training begins again", self.now)
        orders: list[Action] = self._end_round(ended) if ended else []
        for cluster in self._members.clusters:
            self._keeping.lose(cluster)
        orders += self._members.dissolve(self._members.clusters)
        lost = self._training.restart(self._mending.saved)
        self._mending.forget_held()
        self._end_by = None
        self._rounds.restart()
        self._alarm = None
        self._forming.note_change(self.now)
        self.phase = JobPhase.COLLECTING
        if self._stop_by is None:
            return orders + ([Notify(WorkLost(lost))] if lost else [])
        self.phase = JobPhase.FINISHED
        orders += [Send(name, Stop("the job was stopped")) for name in self._members]
        return [*orders, Abandon("the job was stopped when no cluster had anything to keep")]

    def _end_round(self, ended: Ended) -> list[Action]:
        if ended.told.is_committed:
            took_part = {send.to for send in ended.sends}
            clusters = (each for each in self._members.running if each.root in took_part)
            self._training.note_averaged(clusters, ended.told.round_id)
        return [*ended.sends, Notify(ended.told)]


_OfCluster = StageReady | StageMissing | LeaseDone | DroppedMicrobatch
OfStages = _OfCluster | SnapshotMade
_StageActions = list[Action] | str  # orders, or why the message is refused


class StageMessages:
    """Passes on what a stage says to who waits for it."""

    def __init__(
        self,
        members: Membership,
        keeping: CheckpointCollector,
        mending: Recovery,
        forming: PlanTrigger,
        inquiries: Inquiries,
    ) -> None:
        self._members, self._keeping = members, keeping
        self._mending, self._forming, self._inquiries = mending, forming, inquiries

    def hear(self, sender: NodeId, message: OfStages, training: Ledger, now: float) -> _StageActions:
        """Take what a member says of its stage, or of the one it had."""
        cluster, name = self._members.cluster_of(sender), type(message).__name__
        if message.build_id != self._members.build_id(sender):
            own = self._members.build_id(sender)
            return f"{name} of plan {message.build_id} from {sender}, who follows {own}"
        if isinstance(message, SnapshotMade):
            if self._inquiries.receive(sender, message):
                return []
            if self._keeping.awaits(sender, message):
                return [*self._keeping.take(sender, message)]
            return self._mending.take_snapshot(sender, message)
        if cluster is None:
            return f"{name} from {sender}, who has no stage"
        ordered = self._take(sender, cluster, message, training, now)
        if not isinstance(ordered, str):
            self._inquiries.cancel(cluster.cluster_id)
        return ordered

    def _take(
        self, sender: NodeId, cluster: ClusterState, message: _OfCluster, training: Ledger, now: float
    ) -> _StageActions:
        match message:
            case StageReady():
                return self._mending.take_ready(sender, now)
            case StageMissing():
                return self._take_missing(sender, cluster, message, training, now)
            case LeaseDone():
                return self._take_done(sender, cluster, message, training)
            case DroppedMicrobatch():
                return self._take_dropped(sender, cluster, message, training)
            case _:
                assert_never(message)

    def note_speed(self, measured: SpeedMeasured) -> list[Action]:
        """Plan with the speed that a node has by now, if that is another than it was."""
        times, member = measured.times, self._members.find(measured.node)
        if member is None:
            return []
        node = replace(member.node, flops_per_second=member.node.flops_per_second * times)
        if not is_sensible(node):  # it would overflow the planner
            return []
        self._members.replace(replace(member, node=node))
        self._forming.note_change(measured.now)
        return [Notify(SpeedChanged(measured.node, times))]

    def record_evaluation(self, reported: EvaluationReported, training: Ledger) -> _StageActions:
        """Record an evaluation lease that is over."""
        cluster = self._members.find_cluster(reported.cluster_id)
        if cluster is None:
            return f"lease {reported.lease} was evaluated by a cluster that is no more"
        results = training.record_evaluation(cluster, reported)
        return results if isinstance(results, str) else _notify_results(results, training)

    def _take_dropped(
        self, sender: NodeId, cluster: ClusterState, dropped: DroppedMicrobatch, training: Ledger
    ) -> _StageActions:
        reason = training.record_dropped(cluster, dropped)
        if reason is not None:
            return reason
        return [Notify(MicrobatchDropped(dropped.microbatch, sender, dropped.reason))]

    def _take_done(
        self, sender: NodeId, cluster: ClusterState, done: LeaseDone, training: Ledger
    ) -> _StageActions:
        if sender != cluster.root:
            return f"lease {done.lease} is reported by {sender}, who is not the root"
        results = training.take_done(cluster, done)
        return (
            results
            if isinstance(results, str)
            else [Notify(training.trained), *_notify_results(results, training)]
        )

    def _take_missing(
        self, sender: NodeId, cluster: ClusterState, missing: StageMissing, training: Ledger, now: float
    ) -> _StageActions:
        """Look for somebody else who has what a stage lacks."""
        if sender not in cluster.unready:
            return f"{sender} has no stage to get ready"
        reason = self._mending.take_missing(sender, missing)
        if reason is not None:
            return reason
        self._forming.note_change(now)
        told = f"{sender} cannot get what {missing.node} has: {missing.reason}"
        return self._mending.lose(cluster, told, training, now)


def _notify_results(results: list[EpochDone] | list[Evaluated], training: Ledger) -> list[Action]:
    training.history += results
    return [Notify(result) for result in results]


_STOP_SECONDS = 30.0  # for what is under way when the job is stopped
_END_SECONDS = 30.0  # for clusters that stand still when all is trained: they know what others do not
_OfMembers = Leave | BackupKept | RoundReady | RoundAbort | RoundQuery | OfStages


class Coordinator(Crew):
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
        if self.phase is JobPhase.COLLECTING:
            times.append(self._forming.due(self._job.settings, self._members))
        elif self.phase is not JobPhase.FINISHED:
            times.append(self._rounds.due)
        if self.phase is JobPhase.KEEPING:
            times.append(self._keeping.answer_by)
        elif self.phase in (JobPhase.TRAINING, JobPhase.EVALUATING):
            times.append(self._inquiries.due)
        if self.phase is JobPhase.TRAINING:
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
        return isinstance(event.message, _OfMembers)

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Take an event; return what is to be done, or a Refusal alone if it changes nothing."""
        if not self.concerns(event):
            return ()
        before, self.now = self.now, max(self.now, event.now)
        taken = self._take(event)
        if isinstance(taken, str):
            self.now = before
            return (Refusal(taken),)
        if isinstance(event, TrainingReported) and not self.wants_round(self._training.num_updates, self.now):
            return ()  # it says how far clusters are, and nothing follows from that
        orders = [*taken, *self._advance()]
        return tuple(order for order in orders if not isinstance(order, Send) or order.to in self._members)

    def _take(self, event: Event) -> Actions:  # noqa: C901, PLR0912 - one short case for each
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
                return self._take_conclusion(event)

    def _take_conclusion(self, event: Conclusion) -> Actions:
        match event:
            case TrainingReported():
                self._training.record(event)
            case EvaluationReported():
                return self._hearing.record_evaluation(event, self._training)
            case SpeedMeasured():
                return self._hearing.note_speed(event)
            case LossAlarm():
                self._alarm = event
            case CalmChanged():
                self.is_calm = event.is_calm
            case ClusterSilent():
                return self._inquire(event)
            case ClusterHeard():
                self._inquiries.cancel(event.cluster_id)
            case _:
                assert_never(event)
        return []

    def _inquire(self, silent: ClusterSilent) -> Actions:
        """Ask a silent cluster that runs; evict the nodes for which one that is built waits."""
        cluster = self._members.find_cluster(silent.cluster_id)
        if cluster is None:
            return f"the silent cluster {silent.cluster_id} is no more"
        if not cluster.unready:
            return [*self._inquiries.ask(cluster, 2 * silent.now - silent.since)]  # as long again
        orders: list[Action] = []
        for name in self._mending.find_lazy(cluster):
            left = self._leave(name, IDLE)
            assert isinstance(left, list)
            orders += [*left, Evict(name, f"{IDLE}; start it again")]
        return orders

    def _begin(self, job: JobGiven) -> Actions:
        if self._job:
            return f"the hub has a job already: {self._job.profile.name}"
        self._job, self.books, self._mending.saved = job, Ledger(job.settings), job.books
        self.books.restart(job.books)
        return []

    def _receive(self, sender: NodeId, message: _OfMembers) -> Actions:
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
            case SnapshotMade(build_id) if (
                message.weights.size_bytes > self._training.settings.most_snapshot_bytes
            ):
                size = show_bytes(message.weights.size_bytes)
                return self._part(sender, Leave(build_id, f"no stage has a snapshot of {size}"))
            case StageMissing(build_id) if self._mending.misses_all(sender):
                return self._part(
                    sender, Leave(build_id, f"it can use nothing that others give it: {message.reason}")
                )
            case StageReady() | StageMissing() | SnapshotMade() | LeaseDone() | DroppedMicrobatch():
                return self._hearing.hear(sender, message, self._training, self.now)
            case _:
                assert_never(message)

    def _stop(self, reason: str) -> Actions:
        """End as if all was trained, as soon as what is under way is; at once if nobody trains yet."""
        if self._job is None or self.phase is JobPhase.FINISHED or self._stop_by is not None:
            return f"there is no job to stop ({reason}), or it ends already"
        self._stop_by = self.now + _STOP_SECONDS
        told = Notify(Stopping(reason))
        if not self._members.clusters or not (self._members.running or self._training.num_counted):
            return [told, *self._start_over()]
        self._training.stop()
        return [told]

    def _advance(self) -> list[Action]:
        """Go on as far as nobody has to be waited for."""
        orders: list[Action] = []
        if self._job is None:
            return orders
        if self.phase is JobPhase.COLLECTING:
            orders += self._forming.ask(self._job, self._members, self.now)
        is_at_work = self.phase in (JobPhase.TRAINING, JobPhase.EVALUATING)
        idle, stuck = self._inquiries.conclude(self.now) if is_at_work else ([], [])
        for name, reason, word in self._find_parting(idle):
            left = self._leave(name, reason)
            assert isinstance(left, list)
            orders += [*left, Evict(name, word)]
        orders += self._rebuild(stuck)
        if self.phase is JobPhase.TRAINING:
            orders += self._train(self._job)
        if self.phase is JobPhase.AVERAGING:
            orders += self._average(self._job)
        if self.phase is JobPhase.EVALUATING:
            orders += self._training.fill(self._members)
            self.phase = JobPhase.KEEPING if self._training.is_finished else self.phase
        if self.phase is JobPhase.KEEPING and not self._keeping.has_result_under_way:
            orders += self._keeping.start(self._training.most_trained(self._members.running), self.now)
        if self.phase in (JobPhase.TRAINING, JobPhase.EVALUATING):  # whoever has work by now
            self._retain_inquiries()
        return orders

    def _find_parting(self, idle: list[NodeId]) -> list[tuple[NodeId, str, str]]:
        """Return who goes now, why, and what it is told."""
        silent = self._keeping.find_silent(self.now) if self.phase is JobPhase.KEEPING else ()
        return [
            *((name, reason, "goodbye") for name, reason in self._mending.let_go(self.now)),
            *((name, f"it {SILENT}", "goodbye") for name in silent),
            *((name, IDLE, f"{IDLE}; start it again") for name in idle),
        ]

    def _rebuild(self, stuck: list[ClusterState]) -> list[Action]:
        """Give work back, and build anew, where all answer and nothing moves."""
        orders: list[Action] = []
        for cluster in (each for each in stuck if each in self._members.running):
            self._forming.note_change(self.now)
            why = "it has work, and nothing moves"
            lost = self._mending.lose(cluster, why, self._training, self.now) if self._can_mend else None
            orders += self._give_up(cluster, why) if lost is None else lost
        return orders

    def _retain_inquiries(self) -> None:
        if self.stands_still:
            for cluster in self._members.running:
                self._inquiries.cancel(cluster.cluster_id)
        self._inquiries.retain(self._training.is_busy)

    @property
    def stands_still(self) -> bool:
        """Whether clusters wait for a blocking round, which has a deadline of its own."""
        is_blocking = self._job is not None and self._job.config.averaging is Averaging.BLOCKING
        return is_blocking and self._rounds.due is not None

    @property
    def members(self) -> Membership:
        """Nodes and clusters, for readers."""
        return self._members

    def has_asked(self, cluster_id: str) -> bool:
        """Return whether a silent cluster was asked what is wrong."""
        return self._inquiries.has_asked(cluster_id)

    def ends_round(self, name: NodeId) -> bool:
        """Return whether the open round ends with the vote of this node."""
        return self._rounds.awaits_only(name)

    def wants_round(self, num_updates: int, now: float) -> bool:
        """Return whether a round would be opened if clusters had made so many updates."""
        if self.phase is not JobPhase.TRAINING or self._stop_by is not None or self._job is None:
            return False
        is_due = self._rounds.is_due(self._members, num_updates, self._job, now)
        return is_due and not self._mending.is_urgent

    def _adopt(self, made: PlanMade) -> Actions:
        """Follow a plan, unless somebody came or went while it was made: another one is on its way then."""
        if self.phase not in (JobPhase.COLLECTING, JobPhase.TRAINING) or not self._forming.take(made):
            return f"plan {made.plan_id} comes too late: others are here now"
        assert self._job is not None
        told: list[Action] = [*self._forming.tell_shortage(made.shortage)]
        if self.phase is JobPhase.COLLECTING:
            self.phase = JobPhase.TRAINING if made.plan else JobPhase.COLLECTING
            return [*told, *(self._mending.form(self._job, made, self._training) if made.plan else [])]
        if made.plan is None:
            return [*told, *self._start_over()]
        return told if self._mending.hold(made, self._training, self.now) else told + self._follow(made)

    def _follow(self, made: PlanMade) -> list[Action]:
        """Go on with a repaired plan."""
        assert self._job is not None
        assert made.plan is not None
        told: list[Action] = []
        if made.plan.rings != self._members.rings:
            ended = self._rounds.cancel("the rings are others now", self.now)
            told += self._end_round(ended) if ended else []
        told += [Notify(Repaired(made.plan, made.reason))] if made.reason else []
        followed = self._mending.repair(self._job, made, self._training)
        return told + (self._start_over() if followed is None else followed)

    def _train(self, job: JobGiven) -> list[Action]:
        if self._stop_by is not None and self.now >= self._stop_by:
            if not self._members.running:
                return self._start_over()
            self._training.give_up_leases()
        if self._alarm is not None and self._stop_by is None:
            return self._roll_back(self._alarm)
        held = self._mending.let_follow(self._training, self._forming.fits, self.now)
        orders = self._follow(held) if held is not None else []
        if self.phase is not JobPhase.TRAINING:
            return orders
        orders += self._training.fill(self._members)
        if self._training.is_finished and self._members.running and self._may_end():
            self.phase = JobPhase.AVERAGING
            self._mending.forget_held()
        elif self._stop_by is None:
            orders += self._mending.backing.order(self._training.samples_seen, self.now)
            if not self._mending.is_urgent:  # else the rings are soon others
                orders += self._rounds.open_due(self._members, self._training, job, self.now)
            silence = self._keeping.expire(self.now)
            orders += [Notify(NotCheckpointed(silence))] if silence else []
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
        if not self.is_calm:
            self._keeping.postpone(self.now)
            return []
        keeper = self._training.most_trained(self._members.running)
        return self._keeping.start(keeper, self.now, self._training.books)

    def _average(self, job: JobGiven) -> list[Action]:
        orders = self._rounds.open_last(self._members, self._training, job, self.now)
        if self._rounds.due is not None:
            return [*orders]
        self._training.start_evaluation()
        self.phase = JobPhase.EVALUATING
        return []

    def _take_collected(self, collected: Collected) -> Actions:
        """Go on when something is kept: a checkpoint, or the result."""
        if not self._keeping.has_asked_for(collected.number):
            return f"nobody asked to collect number {collected.number}"
        if self.phase is not JobPhase.KEEPING:
            self._num_alarms = 0 if not collected.fault else self._num_alarms
            return self._mending.take_checkpoint(collected, self.now)
        self.phase = JobPhase.FINISHED
        stops: list[Action] = [Send(name, Stop("the job is done")) for name in self._members]
        return [*stops, Finish(self._keeping.parts, tuple(self._training.history))]
