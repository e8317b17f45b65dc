"""The hub's decisions: events in, actions out. Its state is the replay of its log of events.

A job's life is a JobPhase: nodes are collected until a plan exists; clusters train and average; then come a
last round, a last evaluation, and one cluster's weights are kept. A stopped job ends in the same way, only
earlier. Nodes that come or go change the plan (recovery). When nobody has what was trained, the job begins
again from its last checkpoint. A late or foreign message is refused with a reason and changes nothing.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from ravnest.config import TIMEOUTS, Averaging, HubTimeouts
from ravnest.hub.coordinator.checkpoints import CheckpointCollector
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
from ravnest.hub.coordinator.membership import Membership, is_sensible
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
from ravnest.hub.coordinator.phases import JOB_TRANSITIONS, JobPhase, NodePhase, follow
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.hub.coordinator.plan_trigger import PlanTrigger
from ravnest.hub.coordinator.probes import end_probe
from ravnest.hub.coordinator.recovery import Recovery
from ravnest.hub.coordinator.rounds import Ended, Rounds
from ravnest.hub.coordinator.snapshots import SnapshotDesk, SnapshotPurpose
from ravnest.ids import NodeId
from ravnest.protocol.averaging import RoundAbort, RoundQuery, RoundReady
from ravnest.protocol.membership import Leave, Stop
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import BackupKept, SnapshotMade, StageMissing, StageReady
from ravnest.protocol.training import DroppedMicrobatch, LeaseDone
from ravnest.units import show_bytes

_MOST_ALARMS = 3
_START_AGAIN = f"{IDLE}; start it again"

_OfRounds = RoundReady | RoundAbort | RoundQuery
_OfStages = StageReady | StageMissing | LeaseDone | DroppedMicrobatch
_OfMembers = Leave | BackupKept | SnapshotMade | _OfRounds | _OfStages
_Result = list[Action] | str  # actions, or why the event is refused


class Coordinator:
    """Feed it every event, in order; carry out the actions it returns, in order."""

    def __init__(self, job: JobGiven, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._job, self.timeouts = job, timeouts
        self.now = 0.0  # of the last event; a hub that goes on after a restart counts on from it
        self.phase = JobPhase.COLLECTING
        self.has_begun = False
        self.ledger = Ledger(job.settings)
        self.ledger.restart(job.books)
        self.membership = Membership()
        self.placement = Placement(job, self.membership)
        self._desk = SnapshotDesk()
        self._checkpoints = CheckpointCollector(self._desk, timeouts)
        self._recovery = Recovery(job, self.placement, self.ledger, self._checkpoints, self._desk, timeouts)
        self._rounds = Rounds(job, self.placement, self.ledger, timeouts)
        self._plan_trigger = PlanTrigger(job, self.placement, timeouts)
        self._stop_by: float | None = None  # once it is stopped
        self._end_by: float | None = None  # once all is trained, and a cluster stands still
        self._alarm: LossAlarm | None = None  # until training goes back
        self.is_calm = True  # as the monitors say
        self._inquiries = Inquiries(self.placement, self._desk)
        self._num_alarms = 0  # since the last checkpoint

    @property
    def clusters(self) -> tuple[ClusterState, ...]:
        """The clusters of the plan."""
        return self.placement.clusters

    @property
    def due(self) -> float | None:
        """When the next Tick is needed, if nothing else happens."""
        times = [self._recovery.due(self.now)]
        if self.phase is JobPhase.COLLECTING:
            times.append(self._plan_trigger.plan_due)
        elif self.phase is not JobPhase.FINISHED:
            times.append(self._rounds.due)
        if self.phase is JobPhase.KEEPING:
            times.append(self._checkpoints.answer_by)
        elif self.phase in (JobPhase.TRAINING, JobPhase.EVALUATING):
            times.append(self._inquiries.due)
        if self.phase is JobPhase.TRAINING:
            times += [self._stop_by, self._end_by]
            times += [self._checkpoints.due(self._checkpoint_every), self._repair_due]
            times += [self._recovery.backups.due if self._stop_by is None else None]
        return min((time for time in times if time is not None), default=None)

    @property
    def _repair_due(self) -> float | None:
        if not self._can_repair or self._recovery.can_wait(self.now):
            return None
        return self._plan_trigger.repair_due(self._recovery.is_urgent)

    @property
    def _checkpoint_every(self) -> float | None:
        is_wanted = self._stop_by is None and self.placement.running
        return self._job.settings.checkpoint_every if is_wanted else None

    @property
    def _can_repair(self) -> bool:
        """Whether clusters are repaired: until the end, or until a cluster has what is to be kept."""
        return self.phase is JobPhase.TRAINING and (self._stop_by is None or not self.placement.running)

    def is_at(self, job: JobGiven) -> bool:
        """Return whether this very job is under way, whatever nodes are expected for it."""
        if not self.has_begun or self.phase is JobPhase.FINISHED or self._stop_by is not None:
            return False
        same = {"expected_nodes": 0, "settle_seconds": 0.0}
        mine, other = replace(self._job.settings, **same), replace(job.settings, **same)  # type: ignore[arg-type]
        return mine == other and self._job.profile == job.profile and self._job.config == job.config

    def find_missing(self, key: str, build_id: int) -> NodeId | None:
        """Return the name of the missing member with this key, if it has the state it is to have."""
        found = (each for each in self.membership.missing if each.key == key)
        return next((x.node.name for x in found if x.held is None or x.build_id == build_id), None)

    def find_others(self, key: str) -> set[NodeId]:
        """Return the names of all members with another key."""
        return {member.node.name for member in self.membership.members if member.key != key}

    @property
    def stands_still(self) -> bool:
        """Whether clusters wait for a blocking round, which has a deadline of its own."""
        return self._job.config.averaging is Averaging.BLOCKING and self._rounds.due is not None

    def has_asked(self, cluster_id: str) -> bool:
        """Return whether a silent cluster was asked what is wrong."""
        return self._inquiries.has_asked(cluster_id)

    def ends_round(self, name: NodeId) -> bool:
        """Return whether the open round ends with the vote of this node."""
        return self._rounds.awaits_only(name)

    def wants_round(self, num_updates: int, now: float) -> bool:
        """Return whether a round would be opened if clusters had made so many updates."""
        if self.phase is not JobPhase.TRAINING or self._stop_by is not None:
            return False
        return self._rounds.is_due(num_updates, now) and not self._recovery.is_urgent

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
        result = self._dispatch(event)
        if isinstance(result, str):
            self.now = before
            return (Refusal(result),)
        if isinstance(event, TrainingReported) and not self.wants_round(self.ledger.num_updates, self.now):
            return ()  # it says how far clusters are, and nothing follows from that
        actions = [*result, *self._advance()]
        return tuple(x for x in actions if not isinstance(x, Send) or x.to in self.membership)

    def _dispatch(self, event: Event) -> _Result:  # noqa: C901, PLR0912 - one short case for each
        match event:
            case JobGiven():
                return self._begin()
            case Restarted():
                return self._restart(event)
            case PeerJoined():
                return self._join(event)
            case PeerReturned():
                return self._come_back(event)
            case PeerLeft():
                return self._remove(event.node, event.reason, event.since)
            case Received(sender, message):
                return self._receive(sender, message)
            case PlanMade():
                return self._adopt(event)
            case PartsMade():
                return self._recovery.add_parts(event)
            case Probed():
                return end_probe(self.membership, event)
            case Collected():
                return self._end_collection(event)
            case Stopped():
                return self._stop(event.reason)
            case Tick():
                return self._end_round(self._rounds.expire(event.now))
            case _:
                return self._conclude(event)

    def _receive(self, sender: NodeId, message: object) -> _Result:  # noqa: C901 - one short case for each
        """Refuse a message that is late or foreign; hand the others to their one handler."""
        name = type(message).__name__
        if sender not in self.membership:
            return f"{name} from {sender}, who is no member"
        match message:
            case Leave():
                return self._leave(sender, message)
            case RoundReady() | RoundAbort():
                ended = self._rounds.receive(sender, message, self.now)
                return ended.reason if isinstance(ended, Refusal) else self._end_round(ended)
            case RoundQuery():
                answer = self._rounds.answer(sender, message)
                return answer.reason if isinstance(answer, Refusal) else [answer]
            case BackupKept():
                reason = self._recovery.backups.record(sender, message, self.now)
                return [] if reason is None else reason
            case SnapshotMade() if message.weights.size_bytes > self._job.settings.most_snapshot_bytes:
                size = show_bytes(message.weights.size_bytes)
                return self._leave(sender, Leave(message.build_id, f"no stage has a snapshot of {size}"))
            case StageMissing() if self._recovery.misses_all(sender):
                told = f"it can use nothing that others give it: {message.reason}"
                return self._leave(sender, Leave(message.build_id, told))
            case SnapshotMade() | StageReady() | StageMissing() | LeaseDone() | DroppedMicrobatch():
                own = self.placement.build_id(sender)
                if message.build_id != own:
                    return f"{name} of plan {message.build_id} from {sender}, who follows {own}"
                if isinstance(message, SnapshotMade):
                    return self._add_snapshot(sender, message)
                return self._receive_from_stage(sender, message)
            case _:
                raise AssertionError(f"{name} concerns nobody here")

    def _receive_from_stage(self, sender: NodeId, message: _OfStages) -> _Result:
        cluster = self.placement.cluster_of(sender)
        if cluster is None:
            return f"{type(message).__name__} from {sender}, who has no stage"
        match message:
            case StageReady():
                result = self._recovery.mark_ready(sender, self.now)
            case StageMissing():
                result = self._drop_source(sender, cluster, message)
            case LeaseDone():
                result = self._complete_lease(sender, cluster, message)
            case DroppedMicrobatch():
                result = self._record_dropped(sender, cluster, message)
            case _:
                assert_never(message)
        if not isinstance(result, str):
            self._inquiries.cancel(cluster.cluster_id)
        return result

    # Members come and go.

    def _begin(self) -> _Result:
        if self.has_begun:
            return f"the hub has a job already: {self._job.profile.name}"
        self.has_begun = True
        return []

    def _restart(self, event: Restarted) -> _Result:
        if not self.has_begun or self.phase is JobPhase.FINISHED:
            return "there is nothing to go on with"
        ended = self._rounds.cancel("the hub was away", self.now)
        actions: list[Action] = [Notify(Resumed(self.ledger.num_counted, len(self.membership)))]
        actions += self._end_round(ended)
        self._recovery.forget_held()
        self._end_by = None
        actions += self._recovery.restart(event.books, self.now)
        self._rounds.restart()
        self._plan_trigger.reset(self.now)
        self._enter(JobPhase.TRAINING if self.placement.clusters else JobPhase.COLLECTING)
        return actions

    def _come_back(self, event: PeerReturned) -> _Result:
        member = self.membership.find(event.node)
        if member is None or member.phase is not NodePhase.MISSING:
            return f"nobody waits for {event.node}"
        self.membership.come_back(event.node, event.addresses)
        self._plan_trigger.reset(self.now)
        return [Notify(Returned(event.node))]

    def _join(self, event: PeerJoined) -> _Result:
        name = event.node.name
        if not is_sensible(event.node):
            return f"{name} cannot join: no machine is like {event.node}"
        gone = self._remove(name, "it came back as new") if name in self.membership else []
        assert isinstance(gone, list)
        gone = [action for action in gone if not isinstance(action, Send) or action.to != name]
        self.membership.join(event)
        sends = self.placement.add_spare(name)
        self._plan_trigger.reset(self.now)
        if self.phase is JobPhase.FINISHED:
            sends = [Send(name, Stop("the job is done"))]
        return [*gone, Notify(Joined(name)), *sends]

    def _leave(self, name: NodeId, leave: Leave) -> _Result:
        """Let a node go: at once, or when others have what it has."""
        if leave.can_hand_over and self._can_repair and self._recovery.needs(name):
            self._plan_trigger.reset(self.now)
            return self._recovery.begin_leave(name, leave.reason, self.now)
        gone = self._remove(name, leave.reason)
        return gone if isinstance(gone, str) else [*gone, Evict(name, "goodbye")]

    def _remove(self, name: NodeId, reason: str, since: float | None = None) -> _Result:
        """Forget a node; its cluster stands still, or ends where nothing is repaired any more."""
        if name not in self.membership:
            return f"{name} is no member, so it cannot leave"
        self.membership.remove(name)
        cluster, ended = self.placement.cluster_of(name), self._rounds.leave(name, reason, self.now)
        self._recovery.forget(name)
        self._plan_trigger.reset(self.now)
        actions: list[Action] = [Notify(Left(name, reason))]
        if self.phase is JobPhase.FINISHED:
            return actions
        actions += self._end_round(ended)
        if cluster is not None:
            actions += self._lose_stage(cluster, f"{name}: {reason}", self.now if since is None else since)
        is_empty = self.has_begun and self.phase is JobPhase.COLLECTING and not len(self.membership)
        return [*actions, *(self._plan_trigger.notify_shortage() if is_empty else [])]

    def _lose_stage(self, cluster: ClusterState, reason: str, since: float) -> list[Action]:
        if self._can_repair:
            return self._recovery.mark_broken(cluster, reason, since)
        return self._dissolve(cluster, reason)

    def _dissolve(self, cluster: ClusterState, reason: str) -> list[Action]:
        given_back, lost = self.ledger.release(cluster)
        actions: list[Action] = [*self.placement.dissolve([cluster])]
        actions.append(Notify(ClusterDissolved(cluster.name, reason, given_back, lost)))
        self._checkpoints.drop(cluster)
        is_new = not self.ledger.num_counted
        if any(is_new or self.ledger.knows(each) for each in self.placement.running):
            return actions
        return actions + self._start_over()

    # Messages of stages.

    def _add_snapshot(self, sender: NodeId, made: SnapshotMade) -> _Result:
        purpose = self._desk.answer(sender, made)
        match purpose:
            case SnapshotPurpose.CHECKPOINT:
                return [*self._checkpoints.add_snapshot(sender, made)]
            case SnapshotPurpose.SOURCE:
                return self._recovery.add_source(sender, made)
            case SnapshotPurpose.BACKUP:
                return [*self._recovery.backups.forward(sender, made)]
            case SnapshotPurpose.LIVENESS:
                self._inquiries.record_answer(made.number)
                return []
            case None:
                return f"nobody asked {sender} for snapshot {made.number}"
            case _:
                assert_never(purpose)

    def _drop_source(self, sender: NodeId, cluster: ClusterState, missing: StageMissing) -> _Result:
        """Look for another source of what a stage lacks."""
        if sender not in cluster.unready:
            return f"{sender} has no stage to get ready"
        reason = self._recovery.drop_source(sender, missing)
        if reason is not None:
            return reason
        self._plan_trigger.reset(self.now)
        told = f"{sender} cannot get what {missing.node} has: {missing.reason}"
        return self._recovery.mark_broken(cluster, told, self.now)

    def _complete_lease(self, sender: NodeId, cluster: ClusterState, done: LeaseDone) -> _Result:
        if sender != cluster.root:
            return f"lease {done.lease} is reported by {sender}, who is not the root"
        results = self.ledger.take_done(cluster, done)
        if isinstance(results, str):
            return results
        return [Notify(self.ledger.trained), *self._record_results(results)]

    def _record_dropped(self, sender: NodeId, cluster: ClusterState, dropped: DroppedMicrobatch) -> _Result:
        reason = self.ledger.record_dropped(cluster, dropped)
        if reason is not None:
            return reason
        return [Notify(MicrobatchDropped(dropped.microbatch, sender, dropped.reason))]

    def _record_results(self, results: list[EpochDone] | list[Evaluated]) -> list[Action]:
        self.ledger.history += results
        return [Notify(result) for result in results]

    def _end_round(self, ended: Ended | None) -> list[Action]:
        if ended is None:
            return []
        if ended.told.is_committed:
            took_part = {send.to for send in ended.sends}
            clusters = (each for each in self.placement.running if each.root in took_part)
            self.ledger.note_averaged(clusters, ended.told.round_id)
        return [*ended.sends, Notify(ended.told)]

    # Conclusions of monitors.

    def _conclude(self, event: Conclusion) -> _Result:
        match event:
            case TrainingReported():
                self.ledger.record(event)
            case EvaluationReported():
                return self._record_evaluation(event)
            case SpeedMeasured():
                return self._record_speed(event)
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

    def _record_evaluation(self, reported: EvaluationReported) -> _Result:
        cluster = self.placement.find_cluster(reported.cluster_id)
        if cluster is None:
            return f"lease {reported.lease} was evaluated by a cluster that is no more"
        results = self.ledger.record_evaluation(cluster, reported)
        return results if isinstance(results, str) else self._record_results(results)

    def _record_speed(self, measured: SpeedMeasured) -> list[Action]:
        """Plan with the speed that a node has by now."""
        member = self.membership.find(measured.node)
        if member is None:
            return []
        node = replace(member.node, flops_per_second=member.node.flops_per_second * measured.times)
        if not is_sensible(node):  # such a speed would overflow the planner
            return []
        self.membership.update(replace(member, node=node))
        self._plan_trigger.reset(self.now)
        return [Notify(SpeedChanged(measured.node, measured.times))]

    def _inquire(self, silent: ClusterSilent) -> _Result:
        """Ask a silent cluster that runs; evict the nodes for which one that is built waits."""
        cluster = self.placement.find_cluster(silent.cluster_id)
        if cluster is None:
            return f"the silent cluster {silent.cluster_id} is no more"
        if not cluster.unready:
            return [*self._inquiries.ask(cluster, 2 * silent.now - silent.since)]  # as long again
        return self._evict((name, IDLE, _START_AGAIN) for name in self._recovery.find_lazy(cluster))

    # Plans.

    def _adopt(self, made: PlanMade) -> _Result:
        """Follow a plan, unless members changed while it was made: another one is on its way then."""
        if self.phase not in (JobPhase.COLLECTING, JobPhase.TRAINING) or not self._plan_trigger.accept(made):
            return f"plan {made.plan_id} comes too late: others are here now"
        told: list[Action] = [*self._plan_trigger.notify_shortage(made.shortage)]
        if self.phase is JobPhase.COLLECTING:
            self._enter(JobPhase.TRAINING if made.plan else JobPhase.COLLECTING)
            return [*told, *(self._recovery.form(made) if made.plan else [])]
        if made.plan is None:
            return [*told, *self._start_over()]
        return told if self._recovery.hold(made, self.now) else told + self._follow(made)

    def _follow(self, made: PlanMade) -> list[Action]:
        """Go on with a repaired plan."""
        assert made.plan is not None
        told: list[Action] = []
        if made.plan.rings != self.placement.rings:
            told += self._end_round(self._rounds.cancel("the rings are others now", self.now))
        told += [Notify(Repaired(made.plan, made.reason))] if made.reason else []
        followed = self._recovery.repair(made)
        return told + (self._start_over() if followed is None else followed)

    # The job goes on.

    def _enter(self, phase: JobPhase) -> None:
        self.phase = follow(JOB_TRANSITIONS, self.phase, phase)

    def _advance(self) -> list[Action]:
        """Go on as far as nobody has to be waited for; a duty may bring the job into its next phase."""
        if not self.has_begun:
            return []
        at_work = (JobPhase.TRAINING, JobPhase.EVALUATING)
        duties = (
            ((JobPhase.COLLECTING,), self._ask_for_plan),
            (tuple(JobPhase), self._evict_gone),
            ((JobPhase.TRAINING,), self._train),
            ((JobPhase.AVERAGING,), self._average),
            ((JobPhase.EVALUATING,), self._evaluate),
            ((JobPhase.KEEPING,), self._collect_result),
            (at_work, self._retain_inquiries),
        )
        actions: list[Action] = []
        for phases, duty in duties:
            if self.phase in phases:
                actions += duty()
        return actions

    def _ask_for_plan(self) -> list[Action]:
        return [*self._plan_trigger.ask_for_plan(self.now)]

    def _evict_gone(self) -> list[Action]:
        """Send nodes away that have left, do not answer or do nothing; rebuild clusters that are stuck."""
        is_at_work = self.phase in (JobPhase.TRAINING, JobPhase.EVALUATING)
        idle, stuck = self._inquiries.conclude(self.now) if is_at_work else ([], [])
        silent = self._checkpoints.find_silent(self.now) if self.phase is JobPhase.KEEPING else ()
        gone = [
            *((name, reason, "goodbye") for name, reason in self._recovery.find_gone(self.now)),
            *((name, f"it {self._checkpoints.silence}", "goodbye") for name in silent),
            *((name, IDLE, _START_AGAIN) for name in idle),
        ]
        actions = self._evict(gone)
        for cluster in (each for each in stuck if each in self.placement.running):
            self._plan_trigger.reset(self.now)
            actions += self._lose_stage(cluster, "it has work, and nothing moves", self.now)
        return actions

    def _evict(self, gone: Iterable[tuple[NodeId, str, str]]) -> list[Action]:
        """Remove nodes: each with the reason that others read, and what itself is told."""
        actions: list[Action] = []
        for name, reason, word in gone:
            left = self._remove(name, reason)
            assert isinstance(left, list)
            actions += [*left, Evict(name, word)]
        return actions

    def _train(self) -> list[Action]:
        """Grant leases; average, back up and keep what is trained; repair the plan; see when it is enough."""
        if self._stop_by is not None and self.now >= self._stop_by:
            if not self.placement.running:
                return self._start_over()
            self.ledger.give_up_leases()
        if self._alarm is not None and self._stop_by is None:
            return self._roll_back(self._alarm)
        held = self._recovery.release_held(self._plan_trigger.fits, self.now)
        actions = self._follow(held) if held is not None else []
        if self.phase is not JobPhase.TRAINING:
            return actions
        actions += self.ledger.fill(self.placement)
        if self.ledger.is_finished and self.placement.running and self._may_end():
            self._enter(JobPhase.AVERAGING)
            self._recovery.forget_held()
        elif self._stop_by is None:
            actions += self._keep_safe()
        if self._can_repair and not self._recovery.can_wait(self.now):
            actions += self._plan_trigger.ask_for_repair(self.now, self._recovery.is_urgent)
        return actions

    def _keep_safe(self) -> list[Action]:
        """Order backups, open a round, expire and begin checkpoints, as each is due."""
        actions: list[Action] = [*self._recovery.backups.order(self.ledger.samples_seen, self.now)]
        if not self._recovery.is_urgent:  # else the rings are soon others
            actions += self._rounds.open_due(self.now)
        silence = self._checkpoints.expire(self.now)
        actions += [Notify(NotCheckpointed(silence))] if silence else []
        if self._checkpoints.is_time(self._checkpoint_every, self.now):
            actions += self._begin_checkpoint()
        return actions

    def _begin_checkpoint(self) -> list[Send]:
        """Begin a checkpoint, if what is trained is worth keeping."""
        if not self.is_calm:
            self._checkpoints.postpone(self.now)
            return []
        keeper = self.ledger.most_trained(self.placement.running)
        return self._checkpoints.start(keeper, self.now, self.ledger.books)

    def _may_end(self) -> bool:
        """Return whether all clusters can take part in the last round, or were waited for long enough."""
        if self._stop_by is not None or len(self.placement.running) == len(self.placement.clusters):
            return True
        self._end_by = self.now + self.timeouts.end_seconds if self._end_by is None else self._end_by
        return self.now >= self._end_by

    def _average(self) -> list[Action]:
        actions = self._rounds.open_last(self.now)
        if self._rounds.due is not None:
            return [*actions]
        self.ledger.start_evaluation()
        self._enter(JobPhase.EVALUATING)
        return []

    def _evaluate(self) -> list[Action]:
        actions: list[Action] = [*self.ledger.fill(self.placement)]
        if self.ledger.is_finished:
            self._enter(JobPhase.KEEPING)
        return actions

    def _collect_result(self) -> list[Action]:
        if self._checkpoints.has_result_under_way:
            return []
        return [*self._checkpoints.start(self.ledger.most_trained(self.placement.running), self.now)]

    def _retain_inquiries(self) -> list[Action]:
        """End the inquiries of clusters that have nothing to do, or stand still for a round."""
        if self.stands_still:
            for cluster in self.placement.running:
                self._inquiries.cancel(cluster.cluster_id)
        self._inquiries.retain(self.ledger.is_busy)
        return []

    # The job ends, or begins again.

    def _stop(self, reason: str) -> _Result:
        """End as if all was trained, as soon as what is under way is; at once if nobody trains yet."""
        if not self.has_begun or self.phase is JobPhase.FINISHED or self._stop_by is not None:
            return f"there is no job to stop ({reason}), or it ends already"
        self._stop_by = self.now + self.timeouts.stop_seconds
        told = Notify(Stopping(reason))
        if not self.placement.clusters or not (self.placement.running or self.ledger.num_counted):
            return [told, *self._start_over()]
        self.ledger.stop()
        return [told]

    def _roll_back(self, alarm: LossAlarm) -> list[Action]:
        """Go back to the last checkpoint, if there is one; too often in a row is the end."""
        self._num_alarms += 1
        self._alarm = None
        has_checkpoint = self._recovery.saved is not None
        told = Notify(WentWrong(alarm.reason, alarm.suspect, has_checkpoint))
        if self._num_alarms <= _MOST_ALARMS:
            return [told, *(self._start_over() if has_checkpoint else [])]
        self.ledger.stop()
        self.ledger.give_up_leases()
        self._enter(JobPhase.FINISHED)
        stops = [Send(name, Stop("the job was ended by its guard")) for name in self.membership]
        told_why = f"{alarm.reason}, seen first at {alarm.suspect}, for the {self._num_alarms}th time"
        advice = "lower the learning rate, or look at the data; the last good checkpoint is kept"
        return [told, *stops, Abandon(f"training is ended: {told_why}; {advice}", is_guarded=True)]

    def _start_over(self) -> list[Action]:
        """Go back to collecting, with what the hub has and all members; or end, if the job is stopped."""
        actions = self._end_round(self._rounds.cancel("training begins again", self.now))
        for cluster in self.placement.clusters:
            self._checkpoints.drop(cluster)
        actions += self.placement.dissolve(self.placement.clusters)
        lost = self.ledger.restart(self._recovery.saved)
        self._recovery.forget_held()
        self._end_by = None
        self._rounds.restart()
        self._alarm = None
        self._plan_trigger.reset(self.now)
        if self._stop_by is None:
            self._enter(JobPhase.COLLECTING)
            return actions + ([Notify(WorkLost(lost))] if lost else [])
        self._enter(JobPhase.FINISHED)
        actions += [Send(name, Stop("the job was stopped")) for name in self.membership]
        return [*actions, Abandon("the job was stopped when no cluster had anything to keep")]

    def _end_collection(self, collected: Collected) -> _Result:
        """Go on when something is on disk: a checkpoint, or the result."""
        if not self._checkpoints.has_asked_for(collected.number):
            return f"nobody asked to collect number {collected.number}"
        if self.phase is not JobPhase.KEEPING:
            self._num_alarms = 0 if not collected.fault else self._num_alarms
            return self._recovery.end_checkpoint(collected, self.now)
        self._enter(JobPhase.FINISHED)
        stops: list[Action] = [Send(name, Stop("the job is done")) for name in self.membership]
        return [*stops, Finish(self._checkpoints.parts, tuple(self.ledger.history))]
