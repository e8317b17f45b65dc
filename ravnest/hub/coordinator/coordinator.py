"""The hub's decisions: events in, actions out. Its state is the replay of its log of events.

A job's life is a JobPhase: nodes are collected until a plan exists; clusters train and average; then come a
last round, a last evaluation, and one cluster's weights are kept. A stopped job ends in the same way, only
earlier. Nodes that come or go change the plan (recovery). When nobody has what was trained, the job begins
again from its last checkpoint. A late or foreign message is refused with a reason and changes nothing.
"""

from dataclasses import replace
from typing import assert_never

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.checkpoints import CheckpointCollector
from ravnest.hub.coordinator.events import (
    Action,
    CalmChanged,
    CheckpointAsked,
    ClusterHeard,
    ClusterSilent,
    ClusterSlowed,
    ClusterUnlike,
    Collected,
    Conclusion,
    EvaluationReported,
    Event,
    JobGiven,
    LossAlarm,
    LossClaimed,
    LossRechecked,
    NoiseMeasured,
    Notify,
    PartsMade,
    PauseAsked,
    PeerJoined,
    PeerLeft,
    PeerReturned,
    PlanMade,
    Probed,
    Received,
    Restarted,
    SamplesInspected,
    Send,
    SendFields,
    SpeedMeasured,
    Stopped,
    TextsSampled,
    Tick,
    TrainingReported,
)
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.lifecycle import UNLIKE, Departures, Duties, Lifecycle
from ravnest.hub.coordinator.membership import Membership, is_sensible
from ravnest.hub.coordinator.notices import (
    ClusterSuspected,
    Joined,
    MicrobatchDropped,
    NoiseFound,
    Returned,
    SpeedChanged,
)
from ravnest.hub.coordinator.phases import JobPhase, NodePhase
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.hub.coordinator.planner import LinkChecks, PlanTrigger
from ravnest.hub.coordinator.progress import Drops
from ravnest.hub.coordinator.recovery import Recovery
from ravnest.hub.coordinator.rounds import Rounds
from ravnest.hub.coordinator.snapshots import Inquiries, SnapshotDesk, SnapshotPurpose
from ravnest.hub.coordinator.spot_checks import FALSE_LOSSES, SpotChecks
from ravnest.ids import NodeId
from ravnest.protocol.averaging import RoundAbort, RoundChecked, RoundPledge, RoundQuery, RoundReady
from ravnest.protocol.membership import Leave, Stop
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import BackupKept, SketchMade, SnapshotMade, StageMissing, StageReady
from ravnest.protocol.training import DroppedMicrobatch, LeaseDone
from ravnest.units import show_bytes

_OfRounds = RoundPledge | RoundReady | RoundChecked | RoundAbort | RoundQuery
_IN_PASSING = Tick | TrainingReported | LeaseDone  # they change no plan
_OfStages = StageReady | StageMissing | LeaseDone | DroppedMicrobatch
_OfMembers = Leave | BackupKept | SnapshotMade | SketchMade | _OfRounds | _OfStages
_Result = list[Action] | str  # actions, or why the event is refused


class Coordinator:
    """Feed it every event, in order; carry out the actions it returns, in order."""

    def __init__(self, job: JobGiven, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._job, self.timeouts = job, timeouts
        self.now = 0.0  # of the last event; a hub that goes on after a restart counts on from it
        self.ledger = Ledger(job.settings)
        self.ledger.restart(job.books)
        self.drops = Drops()
        self.membership = Membership()
        self.placement = Placement(job, self.membership)
        self._desk = SnapshotDesk()
        self._checkpoints = CheckpointCollector(self._desk, timeouts)
        self._recovery = Recovery(job, self.placement, self.ledger, self._checkpoints, self._desk, timeouts)
        self._rounds = Rounds(job, self.placement, self.ledger, timeouts)
        self._plan_trigger = PlanTrigger(job, self.placement, timeouts)
        self._inquiries = Inquiries(self.placement, self._desk)
        self._link_checks = LinkChecks(self.placement, self._plan_trigger.reset)
        shared = (self.placement, self.ledger, self._checkpoints, self._recovery, self._rounds)
        self._life = Lifecycle(job, *shared, self._plan_trigger, timeouts)
        self._departures = Departures(self._life)
        self.spot_checks = SpotChecks(self.placement, self.ledger, timeouts)
        self._duties = Duties(job.settings, self._departures, self._inquiries, self.spot_checks)

    @property
    def clusters(self) -> tuple[ClusterState, ...]:
        """The clusters of the plan."""
        return self.placement.clusters

    @property
    def phase(self) -> JobPhase:
        """Where the job is in its life."""
        return self._life.phase

    @property
    def has_begun(self) -> bool:
        """Whether the job was given."""
        return self._life.has_begun

    @property
    def shortage(self) -> str:
        """Why nobody trains, as people were told; nothing if there is a plan, or no reason yet."""
        return self._plan_trigger.shortage if self.phase is JobPhase.COLLECTING else ""

    @property
    def can_wait_for_all(self) -> bool:
        """Whether members are worth a long wait: they have what was trained, and the job is not stopped."""
        return bool(self.placement.clusters) and self._life.is_under_way

    @property
    def is_calm(self) -> bool:
        """Whether the present weights are worth a checkpoint, as the monitors say."""
        return self._duties.policy.is_calm

    @property
    def due(self) -> float | None:
        """When the next Tick is needed, if nothing else happens."""
        return self._duties.due(self.now)

    def must_wait(self, event: Event) -> bool:
        """Return whether an event must wait, for Ticks in which members are told of a large plan."""
        return self._recovery.is_rolling_out and not isinstance(getattr(event, "message", event), _IN_PASSING)

    def is_at(self, job: JobGiven) -> bool:
        """Return whether this very job is under way, whatever nodes are expected for it."""
        if not self._life.is_under_way:
            return False
        is_same = job.settings.are_of_the_job_of(self._job.settings)
        return is_same and self._job.profile == job.profile and self._job.config == job.config

    def find_missing(self, key: str, build_id: int) -> NodeId | None:
        """Return the name of the missing member with this key, if it has the state it is to have."""
        found = (each for each in self.membership.missing if each.key == key)
        return next((x.node.name for x in found if x.held is None or x.build_id == build_id), None)

    def find_others(self, key: str) -> set[NodeId]:
        """Return the names of all members with another key."""
        return {member.node.name for member in self.membership.members if member.key != key}

    @property
    def blocks_in_rounds(self) -> bool:
        """Whether clusters stand still in rounds, and begin from the average after each."""
        return self._rounds.stands_still and not self.placement.is_exact

    @property
    def stands_still(self) -> bool:
        """Whether clusters wait for a blocking round, which has a deadline of its own."""
        return self._rounds.holds_clusters

    def has_asked(self, cluster_id: str) -> bool:
        """Return whether a silent cluster was asked what is wrong."""
        return self._inquiries.has_asked(cluster_id)

    def wants_round(self, num_updates: int, now: float) -> bool:
        """Return whether a round would be opened if clusters had made so many updates."""
        return self._duties.wants_round(num_updates, now)

    def ends_round(self, name: NodeId) -> bool:
        """Return whether the open round ends with the vote of this node."""
        return self._rounds.awaits_only(name)

    def concerns(self, event: Event) -> bool:
        """Return whether an event may change something; the log needs no others, telemetry may."""
        if not isinstance(event, Received):
            return True
        return isinstance(event.message, _OfMembers)

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Apply an event; return what is to be done, or a Refusal alone if it changes nothing."""
        if not self.concerns(event):
            return ()
        before, self.now = self.now, max(self.now, event.now)
        result = self._dispatch(event)
        if isinstance(result, str):
            self.now = before
            return (Refusal(result),)
        if isinstance(event, TrainingReported) and not self.wants_round(self.ledger.num_updates, self.now):
            return ()  # it says how far clusters are, and nothing follows from that
        actions = [
            self.drops.replace_faulty(action) if isinstance(action, SendFields) else action
            for action in (*result, *self._duties.advance(self.now))
        ]
        return tuple(x for x in actions if not isinstance(x, Send) or x.to in self.membership)

    def _dispatch(self, event: Event) -> _Result:  # noqa: C901, PLR0912 - one short case for each
        match event:
            case JobGiven():
                return self._life.begin()
            case Restarted():
                return self._life.restart(event, self.now)
            case PeerJoined():
                return self._join(event)
            case PeerReturned():
                return self._come_back(event)
            case PeerLeft():
                return self._departures.remove(event.node, event.reason, self.now, event.since)
            case Received(sender, message):
                return self._receive(sender, message)
            case PlanMade():
                return self._life.adopt(event, self.now)
            case PartsMade():
                return self._recovery.add_parts(event)
            case Probed():
                return self._link_checks.end_probe(event, self.now)
            case Collected():
                return self._end_collection(event)
            case SamplesInspected():
                return self.drops.conclude(event)
            case Stopped():
                return self._life.stop(event.reason, self.now)
            case PauseAsked(is_paused):
                return self._life.pause(is_paused)
            case CheckpointAsked():
                return self._duties.make_checkpoint(self.now)
            case TextsSampled():
                return [Notify(text) for text in event.texts]
            case Tick():
                return self._life.end_round(self._rounds.expire(event.now))
            case _:
                return self._conclude(event)

    def _receive(self, sender: NodeId, message: object) -> _Result:  # noqa: C901, PLR0912 - one short case for each
        """Refuse a message that is late or foreign; hand the others to their one handler."""
        name = type(message).__name__
        if sender not in self.membership:
            return f"{name} from {sender}, who is no member"
        match message:
            case Leave():
                return self._departures.leave(sender, message, self.now)
            case RoundPledge() | RoundReady() | RoundChecked() | RoundAbort():
                ended = self._rounds.receive(sender, message, self.now)
                if isinstance(ended, list):
                    return [*ended]
                return ended.reason if isinstance(ended, Refusal) else self._life.end_round(ended)
            case RoundQuery():
                answer = self._rounds.answer(sender, message)
                return answer.reason if isinstance(answer, Refusal) else [answer]
            case BackupKept():
                return self._recovery.backups.record(sender, message, self.now) or []
            case SnapshotMade() if message.weights.size_bytes > self._job.settings.most_snapshot_bytes:
                told = f"no stage has a snapshot of {show_bytes(message.weights.size_bytes)}"
                return self._departures.leave(sender, Leave(message.build_id, told), self.now)
            case StageMissing() if self._recovery.misses_all(sender):
                told = f"it can use nothing that others give it: {message.reason}"
                return self._departures.leave(sender, Leave(message.build_id, told), self.now)
            case (
                SketchMade()
                | SnapshotMade()
                | StageReady()
                | StageMissing()
                | LeaseDone()
                | DroppedMicrobatch()
            ):
                own = self.placement.build_id(sender)
                if message.build_id != own:
                    return f"{name} of plan {message.build_id} from {sender}, who follows {own}"
                if isinstance(message, SnapshotMade):
                    return self._add_snapshot(sender, message)
                if isinstance(message, SketchMade):
                    added = self._checkpoints.add_sketch(sender, message, self.now)
                    return added if isinstance(added, str) else [*added]
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
                if self.placement.has_untried:
                    self._plan_trigger.reset(self.now)
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

    def _come_back(self, event: PeerReturned) -> _Result:
        member = self.membership.find(event.node)
        if member is None or member.phase is not NodePhase.MISSING:
            return f"nobody waits for {event.node}"
        self.membership.come_back(event.node, event.addresses)
        self._plan_trigger.reset(self.now)
        # An update that some clusters made and others did not would never be noticed.
        outcomes = self._rounds.repeat(event.node) if self.placement.is_exact else []
        return [Notify(Returned(event.node)), *outcomes]

    def _join(self, event: PeerJoined) -> _Result:
        name = event.node.name
        if not is_sensible(event.node):
            return f"{name} cannot join: no machine is like {event.node}"
        gone: list[Action] = []
        if name in self.membership:
            left = self._departures.remove(name, "it came back as new", self.now)
            assert isinstance(left, list)
            gone = [action for action in left if not isinstance(action, Send) or action.to != name]
        self.membership.join(event)
        self.spot_checks.forget(name)
        sends = self.placement.add_spare(name)
        self._plan_trigger.reset(self.now)
        if self.phase is JobPhase.FINISHED:
            sends = [Send(name, Stop("the job is done"))]
        return [*gone, Notify(Joined(name)), *sends]

    def _end_collection(self, collected: Collected) -> _Result:
        """Go on when something is on disk, or is not what most clusters hold; send those away that lied."""
        ordered = self._checkpoints.find_ordered(collected.number)
        ended = self._life.end_collection(collected, self.now)
        if isinstance(ended, str):
            return ended
        if ordered is not None and ordered.evaluated is not None and not collected.fault:
            self._duties.policy.kept_loss = ordered.evaluated.loss
        return [*ended, *self._departures.evict_convicted(collected.verdict.unlike, UNLIKE, self.now)]

    # Messages of stages.

    def _add_snapshot(self, sender: NodeId, made: SnapshotMade) -> _Result:
        purpose = self._desk.answer(sender, made)
        match purpose:
            case SnapshotPurpose.CHECKPOINT:
                return [*self._checkpoints.add_snapshot(sender, made, self.now)]
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
        results = self.ledger.record_done(cluster, done)
        if isinstance(results, str):
            return results
        return [Notify(self.ledger.trained), *self._life.report(results)]

    def _record_dropped(self, sender: NodeId, cluster: ClusterState, dropped: DroppedMicrobatch) -> _Result:
        lease = self.ledger.record_dropped(cluster, dropped)
        if isinstance(lease, str):
            return lease
        samples, is_evaluation = self.ledger.samples_of(lease, dropped.microbatch), lease.lease is None
        facts = (dropped.microbatch, sender, dropped.reason, samples, is_evaluation)
        return self.drops.record(MicrobatchDropped(*facts))

    # Conclusions of monitors.

    def _conclude(self, event: Conclusion) -> _Result:  # noqa: C901, PLR0912 - one short case for each
        match event:
            case TrainingReported():
                self.ledger.record(event)
            case EvaluationReported():
                return self._record_evaluation(event)
            case LossClaimed():
                return self._judge_losses(self.spot_checks.claim(event))
            case LossRechecked():
                return self._judge_losses(self.spot_checks.conclude(event))
            case SpeedMeasured():
                return self._record_speed(event)
            case ClusterSlowed():
                return self._link_checks.order(event)
            case NoiseMeasured():
                return self._record_noise(event)
            case LossAlarm():
                self._life.alarm = event
            case ClusterUnlike():
                return self._suspect(event)
            case CalmChanged():
                self._duties.policy.is_calm = event.is_calm
            case ClusterSilent():
                return self._inquire(event)
            case ClusterHeard():
                self._inquiries.cancel(event.cluster_id)
            case _:
                assert_never(event)
        return []

    def _suspect(self, unlike: ClusterUnlike) -> _Result:
        """Leave a cluster out of rounds that goes wrong alone; if it does so again and again, it goes."""
        cluster = self.placement.find_cluster(unlike.cluster_id)
        if cluster is None:
            return f"the cluster {unlike.cluster_id}, which is unlike the others, is no more"
        num_rounds = self._rounds.suspect(cluster, unlike.reason)
        return [Notify(ClusterSuspected(cluster.name, unlike.reason, num_rounds))]

    def _record_evaluation(self, reported: EvaluationReported) -> _Result:
        cluster = self.placement.find_cluster(reported.cluster_id)
        if cluster is None:
            return f"lease {reported.lease} was evaluated by a cluster that is no more"
        results = self.ledger.record_evaluation(cluster, reported)
        if isinstance(results, str):
            return results
        return [*self._life.report(results), *self._duties.keep_best(cluster, results, self.now)]

    def _judge_losses(self, found: _Result) -> _Result:
        """Send nodes away whose losses two others have found to be false, time and again."""
        if isinstance(found, str):
            return found
        return [
            *found,
            *self._departures.evict_convicted(self.spot_checks.pop_liars(), FALSE_LOSSES, self.now),
        ]

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

    def _record_noise(self, measured: NoiseMeasured) -> list[Action]:
        """Plan with the noise scale that gradients have; it may let spares form a cluster."""
        is_first = self.placement.noise is None
        may_add_clusters = self.placement.record_noise(measured.noise)
        if may_add_clusters:
            self._plan_trigger.reset(self.now)
        elif not is_first:
            return []
        return [Notify(NoiseFound(measured.noise, may_add_clusters))]

    def _inquire(self, silent: ClusterSilent) -> _Result:
        """Ask a silent cluster that runs; evict the nodes for which one that is built waits."""
        cluster = self.placement.find_cluster(silent.cluster_id)
        if cluster is None:
            return f"the silent cluster {silent.cluster_id} is no more"
        if not cluster.unready:
            return [*self._inquiries.ask(cluster, 2 * silent.now - silent.since)]  # as long again
        return self._departures.evict_idle(self._recovery.find_lazy(cluster), self.now)
