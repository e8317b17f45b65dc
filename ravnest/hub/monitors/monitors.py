"""The monitors of a hub together, and a coordinator with its monitors, as the service and the tests drive it.

Monitors keep soft state: it is in no log, and a hub that goes on begins with new ones. They read the
coordinator and never change it: a conclusion is an event like any other, so a coordinator that replays its
log needs no monitor. What leaves report of microbatches is summed until the ledger needs it, each under the
lease that granted it; what a hub had not passed on is missing in the mean loss of its epoch. Nothing here
does I/O.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.evaluations import Means, find_made_up
from ravnest.hub.coordinator.events import (
    Action,
    CalmChanged,
    CheckpointAsked,
    ClusterHeard,
    ClusterSilent,
    ClusterSlowed,
    ClusterUnlike,
    ClusterVersion,
    Conclusion,
    EvaluationReported,
    Event,
    LossAlarm,
    LossRechecked,
    NoiseMeasured,
    Notify,
    PauseAsked,
    PeerJoined,
    PeerLeft,
    PlanMade,
    Received,
    Restarted,
    Send,
    SpeedMeasured,
    Stopped,
    Tick,
    TrainingReported,
)
from ravnest.hub.coordinator.leases import OpenLease
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    ClusterDissolved,
    ClusterStarted,
    EpochDone,
    Left,
    RoundEnded,
    Trained,
    WentWrong,
    WorkUndone,
)
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.hub.coordinator.placement import ClusterState
from ravnest.hub.monitors.lease_checks import LeaseChecks
from ravnest.hub.monitors.liveness import LivenessMonitor, PaceMonitor, ThroughputMonitor
from ravnest.hub.monitors.loss_guard import FirstLosses, LossGuard, NoiseMonitor
from ravnest.ids import LeaseId, MicrobatchId, NodeId
from ravnest.protocol.averaging import RoundAbort, RoundChecked, RoundReady
from ravnest.protocol.membership import Leave
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import BackupKept, FetchProgress, SnapshotMade, StageMissing, StageReady
from ravnest.protocol.training import DroppedMicrobatch, LeaseBegin, LeaseDone, LeaseGrant, StepReport

_NO_LOSS: float | None = None


@dataclass(slots=True)
class _ClusterSums:
    """What a cluster has reported since its version was last passed on."""

    version: int
    num_reported: int = 0  # of all clusters, when it came to that version
    num_updates: int = 0


@dataclass(slots=True)
class _EvaluationSums:
    num_samples: int = 0
    means: Means = field(default_factory=Means)


class ReportSums:
    """Sums for one ledger; they begin anew when training does."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._num_reported, self._loss = 0, _NO_LOSS
        self._means: dict[int, Means] = {}  # by epoch
        self.has_news = False  # since the last time they were passed on
        self.num_updates = 0  # of all clusters, since then
        self._clusters: dict[str, _ClusterSums] = {}
        self._evaluations: dict[LeaseId, _EvaluationSums] = {}
        self._reported: dict[LeaseId, set[MicrobatchId]] = {}

    def begin(self, ledger: Ledger) -> None:
        """Go on from the books, because a hub or its training begins anew."""
        self._reset()
        self._num_reported = ledger.num_reported
        self._means = {epoch: Means(dict(means.sums)) for epoch, means in ledger.means.items()}

    def record(self, ledger: Ledger, cluster: ClusterState, report: StepReport) -> bool | str:
        """Add a report of a leaf; return whether it is of training, or why it does not count."""
        microbatch = report.microbatch
        if report.version > ledger.num_granted + 1:  # an update is of a microbatch at least
            return f"cluster {cluster.name} cannot have made {report.version} updates"
        lease = ledger.find_awaited(microbatch)
        if lease is not None and self._is_awaited(lease, cluster, microbatch):
            self._add_training(ledger, cluster, lease, report)
            return True
        lease = ledger.find_evaluation(cluster, microbatch)
        if lease is None or not self._is_awaited(lease, cluster, microbatch):
            return f"microbatch {microbatch} of cluster {cluster.name} is not awaited"
        self._add_evaluation(lease, report)
        return False

    def _is_awaited(self, lease: OpenLease, cluster: ClusterState, microbatch: MicrobatchId) -> bool:
        is_new = microbatch not in lease.dropped and microbatch not in self._reported.get(lease.number, ())
        return is_new and lease.cluster_id == cluster.cluster_id

    def _add_training(
        self, ledger: Ledger, cluster: ClusterState, lease: OpenLease, report: StepReport
    ) -> None:
        assert lease.lease is not None
        num_samples = self._mark(lease, report.microbatch)
        self.has_news, self._loss = True, report.loss
        self._num_reported += num_samples
        sums = self._clusters.get(cluster.cluster_id)
        if sums is None:
            sums = self._clusters[cluster.cluster_id] = _ClusterSums(ledger.progress.version(cluster))
        if report.version > sums.version:
            num_updates = report.version - sums.version
            sums.num_updates += num_updates
            self.num_updates += num_updates
            sums.version, sums.num_reported = report.version, self._num_reported
        _add(self._means.setdefault(lease.lease.epoch, Means()), report, num_samples)

    def _add_evaluation(self, lease: OpenLease, report: StepReport) -> None:
        num_samples = self._mark(lease, report.microbatch)
        sums = self._evaluations.setdefault(lease.number, _EvaluationSums())
        sums.num_samples += num_samples
        _add(sums.means, report, num_samples)

    def _mark(self, lease: OpenLease, microbatch: MicrobatchId) -> int:
        self._reported.setdefault(lease.number, set()).add(microbatch)
        return lease.num_samples[microbatch - lease.first_microbatch]

    def undo(self, num_samples: int) -> None:
        """Take samples back that are trained again."""
        self._num_reported, self.has_news = max(0, self._num_reported - num_samples), True

    def pass_on(self, now: float, cluster_id: str | None = None) -> TrainingReported:
        """Return the totals, with the new versions of all clusters or of one of them."""
        chosen = list(self._clusters) if cluster_id is None else [cluster_id]
        found = {each: self._clusters.pop(each) for each in chosen if each in self._clusters}
        self.num_updates -= sum(sums.num_updates for sums in found.values())
        self.has_news = bool(self._clusters)
        versions = (ClusterVersion(each, sums.version, sums.num_reported) for each, sums in found.items())
        totals = tuple(
            (epoch, (name, *total))
            for epoch, means in self._means.items()
            for name, total in means.sums.items()
        )
        return TrainingReported(self._num_reported, self._loss, totals, tuple(versions), now)

    def end_evaluation(self, lease: OpenLease, now: float) -> EvaluationReported | None:
        """Return the sums of an evaluation lease of which every microbatch is reported or dropped."""
        num_ended = len(self._reported.get(lease.number, set()) | lease.dropped)
        if num_ended < len(lease.num_samples):
            return None
        sums = self._evaluations.pop(lease.number, _EvaluationSums())
        self._reported.pop(lease.number, None)
        totals = tuple((name, *total) for name, total in sums.means.sums.items())
        return EvaluationReported(lease.cluster_id, lease.number, sums.num_samples, totals, now)

    def reported(self, number: LeaseId) -> set[MicrobatchId]:
        """Return the microbatches of a lease that its leaf has reported."""
        return self._reported.get(number, set())

    def forget_lease(self, number: LeaseId) -> None:
        """Forget what was reported of a lease that is done: nothing more of it counts."""
        self._reported.pop(number, None)

    def forget_epochs(self, ledger: Ledger) -> None:
        """Forget epochs that are over, and leases of which nothing is awaited any more."""
        self._means = {epoch: means for epoch, means in self._means.items() if ledger.is_under_way(epoch)}
        awaited = ledger.awaited_leases
        self._reported = {each: found for each, found in self._reported.items() if each in awaited}
        self._evaluations = {each: found for each, found in self._evaluations.items() if each in awaited}


def _add(means: Means, report: StepReport, num_samples: int) -> None:
    for name, value in (("loss", report.loss), *report.metrics):
        means.add((name, 0.0, 0) if value is None else (name, value * num_samples, num_samples))


def _find_cluster(hub: Coordinator, sender: NodeId, report: StepReport) -> ClusterState | str:
    """Return the cluster that a report is of, or why it is none of a stage of this job."""
    if sender not in hub.membership:
        return f"StepReport from {sender}, who is no member"
    cluster, build_id = hub.placement.cluster_of(sender), hub.placement.build_id(sender)
    if cluster is None:
        return f"StepReport from {sender}, who has no stage"
    if report.build_id != build_id:
        return f"StepReport of plan {report.build_id} from {sender}, who follows {build_id}"
    made_up = find_made_up(report.metrics, hub.ledger.settings.metrics)
    return cluster if made_up is None else f"StepReport from {sender} does not count: {made_up}"


_AT_WORK = (JobPhase.TRAINING, JobPhase.EVALUATING)
# These may begin or end a cluster or a round: the books are brought up to date before them.
_TURNS_OF_PEERS = (Leave, StageReady, StageMissing, RoundReady, RoundChecked, RoundAbort)
# These change no cluster; at most they close a lease, or grant some.
_EVERYDAY = (LeaseDone, RoundReady, SnapshotMade, BackupKept, TrainingReported)
_SIGNS_OF_LIFE = (StageReady, StageMissing, LeaseDone, DroppedMicrobatch)


class Monitors:
    """Feed it every report and, after it is applied, every event; then ask for conclusions."""

    def __init__(self, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._speeds, self._paces = ThroughputMonitor(timeouts), PaceMonitor(timeouts)
        self._guard = LossGuard()
        self._noise = NoiseMonitor()
        self._liveness = LivenessMonitor(timeouts)
        self._sums = ReportSums()
        self._leases = LeaseChecks(self._sums.reported)
        self._first_losses = FirstLosses()
        self._found: deque[Conclusion] = deque()
        self._fetched: dict[NodeId, FetchProgress] = {}  # the last of each node that builds
        self._num_starts = 0
        self._has_told_alarm = False
        self._is_stale = True  # clusters may have begun or ended since all were looked at
        self._is_touched = False  # something happened since then that touched a few of them
        self._touched: dict[str, ClusterState] = {}  # which

    def due(self, hub: Coordinator) -> float | None:
        """Return when to conclude again, if nothing else happens."""
        times = (self._liveness.due if hub.phase in _AT_WORK else None, self._leases.due)
        return min((time for time in times if time is not None), default=None)

    def hold(self, hub: Coordinator, event: Event) -> bool:
        """Hold a lease that is said to be done, until that is reported and can be true."""
        match event:
            case Received(_, LeaseDone() as done):
                self._follow(hub.ledger)
                return self._leases.hold(hub, event, done)
        return False

    def release(self, hub: Coordinator, now: float) -> Received | None:
        """Return a lease that was held and counts now; apply it before the next is asked for."""
        return self._leases.release(hub, now)

    def record(self, hub: Coordinator, sender: NodeId, report: StepReport, now: float) -> str | None:
        """Record a report of a stage; return why it does not count."""
        cluster = _find_cluster(hub, sender, report)
        if isinstance(cluster, str):
            return cluster
        self._follow(hub.ledger)
        if sender == cluster.leaf:
            is_training = self._sums.record(hub.ledger, cluster, report)
            if isinstance(is_training, str):
                if not hub.spot_checks.awaits(cluster, report.microbatch):
                    return is_training
                loss = report.loss if report.anchor_round is not None else None
                self._found.append(LossRechecked(cluster.cluster_id, report.microbatch, loss, now))
                return None
            if is_training:
                self._leases.touch(cluster.cluster_id)
                self._guard.record_loss(cluster.cluster_id, cluster.name, report.loss)
                self._notify_alarm(now)
                self._record_pace(hub, cluster, report, now)
                claimed = self._first_losses.claim(cluster.cluster_id, report, now)
                self._found.extend(() if claimed is None else (claimed,))
            else:
                self._paces.pause(cluster.cluster_id)
                self._end_evaluation(hub.ledger, cluster, report, now)
        self._record_noise(hub, cluster, sender, report, now)
        seconds = report.forward_seconds + report.backward_seconds
        times = self._speeds.record(sender, report.build_id, seconds, report.num_samples, now)
        if times is not None:
            self._found.appendleft(SpeedMeasured(sender, times, now))
        self._liveness.record_sign(cluster.cluster_id, now)
        if hub.has_asked(cluster.cluster_id):
            self._found.append(ClusterHeard(cluster.cluster_id, now))
        return None

    def record_loss(self, hub: Coordinator, node: NodeId) -> None:
        """Record that a node does not hear the hub: it may train beside a round that others wait for."""
        cluster = hub.placement.cluster_of(node)
        if cluster is not None:
            self._first_losses.part(cluster.cluster_id)

    def record_return(self, hub: Coordinator, node: NodeId, seconds: float) -> None:
        """Record that a node hears the hub again after so long: it has trained what it had ahead."""
        cluster = hub.placement.cluster_of(node)
        if cluster is not None and node == cluster.root:
            self._leases.record_outage(cluster, min(seconds, hub.ledger.settings.reserve_seconds))

    def record_fetch(self, hub: Coordinator, sender: NodeId, progress: FetchProgress, now: float) -> None:
        """Record what a node has fetched of its stage: while it gets more, its cluster does something."""
        cluster = hub.placement.cluster_of(sender)
        if cluster is None or progress.build_id != cluster.build_id or sender not in cluster.unready:
            return
        before = self._fetched.get(sender)
        self._fetched[sender] = progress
        if before is None or before.build_id != progress.build_id or before.num_bytes < progress.num_bytes:
            self._liveness.record_sign(cluster.cluster_id, now)
            if hub.has_asked(cluster.cluster_id):
                self._found.append(ClusterHeard(cluster.cluster_id, now))

    def _record_pace(self, hub: Coordinator, cluster: ClusterState, report: StepReport, now: float) -> None:
        """Compare a cluster with itself, unless something else keeps it from work."""
        if hub.stands_still or not hub.ledger.is_busy(cluster):
            self._paces.pause(cluster.cluster_id)
            return
        times = self._paces.record(cluster.cluster_id, report.build_id, report.num_samples, now)
        if times is not None:
            self._found.append(ClusterSlowed(cluster.cluster_id, times, now))

    def _record_noise(
        self, hub: Coordinator, cluster: ClusterState, sender: NodeId, report: StepReport, now: float
    ) -> None:
        if report.noise is None:
            return
        facts = (cluster.cluster_id, cluster.nodes, sender, report.noise)
        noise = self._noise.record(*facts, hub.ledger.settings.length)
        if noise is not None:
            self._found.append(NoiseMeasured(noise, now))

    def prepare(self, hub: Coordinator, event: Event) -> TrainingReported | None:
        """Return what the books need before an event, if there is anything."""
        if not self._sums.has_news:
            return None
        self._follow(hub.ledger)
        match event:
            case Received(sender, LeaseDone(lease=lease)):
                cluster = hub.placement.cluster_of(sender)
                if cluster is None or sender != cluster.root:
                    return None
                chosen = None if hub.ledger.ends_epoch(lease) else cluster.cluster_id
                return self._sums.pass_on(event.now, chosen)
            case Received(sender, RoundReady()) if not hub.ends_round(sender):
                return None
            case Received(_, message) if not isinstance(message, _TURNS_OF_PEERS):
                return None
            case Received() | PeerJoined() | PeerLeft() | PlanMade() | Restarted():
                return self._sums.pass_on(event.now)
            case Stopped() | CheckpointAsked() | PauseAsked() | Tick():
                return self._sums.pass_on(event.now)
        return None

    def observe(self, hub: Coordinator, event: Event, actions: tuple[Action, ...]) -> None:
        """Observe an event that the coordinator has applied, and what it wants done."""
        self._follow(hub.ledger)
        self._touch(hub, event, actions)
        for action in actions:
            match action:
                case Notify():
                    self._observe_notice(hub, action)
                case Send(root, LeaseGrant(is_evaluation=False) | LeaseBegin() as grant):
                    self._leases.record_grant(hub.placement.cluster_of(root), grant, event.now)
        if isinstance(event, Received) and isinstance(event.message, _SIGNS_OF_LIFE):
            cluster = hub.placement.cluster_of(event.sender)
            if cluster is not None:
                self._liveness.record_sign(cluster.cluster_id, event.now)
                if isinstance(event.message, LeaseDone):
                    self._sums.forget_lease(event.message.lease)
                if not hub.ledger.is_training(cluster):
                    self._leases.record_idle(cluster, event.now)
                if isinstance(event.message, DroppedMicrobatch):
                    self._leases.touch(cluster.cluster_id)
                    self._guard.record_dropped(cluster.cluster_id, event.sender, event.message.reason)
                    self._notify_alarm(event.now)
                    self._end_evaluation(hub.ledger, cluster, event.message, event.now)

    def _touch(self, hub: Coordinator, event: Event, actions: tuple[Action, ...]) -> None:
        """Note which clusters may have work now, or none any more: all of them, but after everyday events."""
        message = event.message if isinstance(event, Received) else event
        told = (action.notice for action in actions if isinstance(action, Notify))
        is_everyday = isinstance(message, _EVERYDAY) and all(
            isinstance(x, Trained | RoundEnded) for x in told
        )
        if not is_everyday or hub.placement.is_exact:
            self._is_stale = True
            self._leases.touch_all()
        self._is_touched = True
        if self._is_stale:
            return
        names = [x.to for x in actions if isinstance(x, Send) and isinstance(x.message, LeaseGrant)]
        names += [event.sender] if isinstance(event, Received) else []
        for cluster in map(hub.placement.cluster_of, names):
            if cluster is not None and cluster.is_running:
                self._touched[cluster.cluster_id] = cluster

    def conclude(self, hub: Coordinator, now: float) -> Conclusion | None:
        """Return the next conclusion, to be applied before the next is asked for; None: there is no more."""
        if self._found:
            return self._found.popleft()
        if hub.is_calm != self._guard.is_calm:
            return CalmChanged(self._guard.is_calm, now)
        if hub.wants_round(hub.ledger.num_updates + self._sums.num_updates, now):
            return self._sums.pass_on(now)
        return self._find_silent(hub, hub.ledger, now)

    def _find_silent(self, hub: Coordinator, ledger: Ledger, now: float) -> ClusterSilent | None:
        """Look at all clusters, but not after everyday events: then at those with other leases."""
        if hub.phase not in _AT_WORK:
            self._is_stale |= self._is_touched
            return None
        if self._is_touched and not self._is_stale:
            self._liveness.follow(self._touched.values(), ledger.is_busy, hub.has_asked, now)
        self._touched.clear()
        self._is_touched = False
        if hub.stands_still:
            for cluster in hub.placement.running:
                self._liveness.record_sign(cluster.cluster_id, now)
        elif not self._is_stale and self._liveness.is_quiet(now):
            return None
        found = self._liveness.find_silent(hub.placement, ledger.is_busy, hub.has_asked, ledger.settings, now)
        self._is_stale = False
        return found

    def _follow(self, ledger: Ledger) -> None:
        """Begin anew when training does."""
        if ledger.num_starts != self._num_starts:
            self._num_starts = ledger.num_starts
            self._sums.begin(ledger)
            self._go_back()

    def _go_back(self) -> None:
        self._guard.go_back()
        self._first_losses.forget_all()
        self._has_told_alarm = False

    def _observe_notice(self, hub: Coordinator, told: Notify) -> None:
        match told.notice:
            case Left(node):
                self._speeds.forget(node)
            case WorkUndone(_, num_samples):
                self._sums.undo(num_samples)
            case WentWrong():
                self._go_back()
            case EpochDone():
                self._sums.forget_epochs(hub.ledger)
            case ClusterStarted() | ClusterBroken() | ClusterDissolved():
                running = [each.cluster_id for each in hub.placement.running]
                self._guard.forget_others(running)
                self._paces.forget_others(running)
                self._noise.forget_others(running)
                self._leases.forget_others(running)
                self._first_losses.forget_others(running)
            case RoundEnded(round_id, is_committed):
                awaits = is_committed and hub.blocks_in_rounds
                alone = [each for each in hub.placement.running if len(each.nodes) == 1] if awaits else []
                members = [x.cluster_id for x in alone if hub.ledger.progress.holds(x, round_id)]
                self._first_losses.end_round(round_id, members)

    def _notify_alarm(self, now: float) -> None:
        while self._guard.unlike:
            found = self._guard.unlike.popleft()
            self._found.append(ClusterUnlike(found.cluster_id, found.reason, now))
        alarm = self._guard.alarm
        if alarm is not None and not self._has_told_alarm:
            self._has_told_alarm = True
            self._found.append(LossAlarm(alarm.reason, alarm.suspect, now))

    def _end_evaluation(
        self, ledger: Ledger, cluster: ClusterState, message: StepReport | DroppedMicrobatch, now: float
    ) -> None:
        lease = ledger.find_evaluation(cluster, message.microbatch)
        ended = self._sums.end_evaluation(lease, now) if lease is not None else None
        if ended is not None:
            self._found.append(ended)


Log = Callable[[Event], None]
Watch = Callable[[Event, tuple[Action, ...]], None]


def apply_logged(hub: Coordinator, event: Event, log: Log | None) -> tuple[Action, ...]:
    """Let the coordinator decide; unless it refuses the event, that is in the log when this returns."""
    is_heard = hub.concerns(event)
    actions = hub.apply(event)
    if log is not None and is_heard and not (actions and isinstance(actions[0], Refusal)):
        log(event)
    return actions


class MonitoredCoordinator:
    """Feed it every event and every message of a peer, in order; carry out what it returns, in order.

    `log` gets each event that changed something, before its actions are returned; `watch` gets each event
    and each report, with its actions.
    """

    def __init__(
        self,
        hub: Coordinator,
        log: Log | None = None,
        watch: Watch | None = None,
        monitors: Monitors | None = None,
    ) -> None:
        self.hub = hub
        self._log, self._watch = log, watch
        self._monitors = Monitors(hub.timeouts) if monitors is None else monitors

    @property
    def due(self) -> float | None:
        """When the next Tick is needed, if nothing else happens."""
        times = (self.hub.due, self._monitors.due(self.hub))
        return min((time for time in times if time is not None), default=None)

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Apply an event or record a report; return what to do, or a Refusal if it changes nothing."""
        if isinstance(event, Received) and isinstance(event.message, StepReport):
            return self._record(event, event.message)
        if isinstance(event, Received) and isinstance(event.message, FetchProgress):
            self._monitors.record_fetch(self.hub, event.sender, event.message, event.now)
            self._show(event, ())
            return self._conclude(event.now)
        if isinstance(event, Tick) and (self.hub.due is None or event.now < self.hub.due):
            return self._conclude(event.now)  # it is due for the monitors only, and no event
        if self._monitors.hold(self.hub, event):
            return self._conclude(event.now)
        actions, refusal = self._take(event)
        return (*actions, *self._conclude(event.now)) or refusal

    def _take(self, event: Event) -> tuple[list[Action], tuple[Action, ...]]:
        """Bring the books up to date and let the coordinator decide; return what to do, or why not."""
        sums = self._monitors.prepare(self.hub, event)
        actions = [] if sums is None else [*self._decide(sums)]
        actions += self._roll_out(event)
        decided = self._decide(event)
        if decided and isinstance(decided[0], Refusal):
            return actions, decided
        self._monitors.observe(self.hub, event, decided)
        return [*actions, *decided], ()

    def _record(self, event: Received, report: StepReport) -> tuple[Action, ...]:
        if self.hub.placement.cluster_of(event.sender) is None:
            self._show(event, ())
            return ()
        reason = self._monitors.record(self.hub, event.sender, report, event.now)
        refused = () if reason is None else (Refusal(reason),)
        self._show(event, refused)
        return refused or self._conclude(event.now)

    def record_loss(self, node: NodeId) -> None:
        """Record that the link to a node is lost; the log needs it not: it changes only what is concluded."""
        self._monitors.record_loss(self.hub, node)

    def record_return(self, node: NodeId, seconds: float) -> None:
        """Record that a link is there again after so long."""
        self._monitors.record_return(self.hub, node, seconds)

    def _conclude(self, now: float) -> tuple[Action, ...]:
        actions: list[Action] = []
        while (held := self._monitors.release(self.hub, now)) is not None:
            actions += self._take(replace(held, now=now))[0]
        while (conclusion := self._monitors.conclude(self.hub, now)) is not None:
            actions += self._roll_out(conclusion)
            decided = self._decide(conclusion)
            self._monitors.observe(self.hub, conclusion, decided)
            actions += (each for each in decided if not isinstance(each, Refusal))
        return tuple(actions)

    def _roll_out(self, event: Event) -> list[Action]:
        """Tell members the rest of a plan, if an event has to wait for that."""
        told: list[Action] = []
        while self.hub.must_wait(event):
            told += self._decide(Tick(event.now))
        return told

    def _decide(self, event: Event) -> tuple[Action, ...]:
        actions = apply_logged(self.hub, event, self._log)
        self._show(event, actions)
        return actions

    def _show(self, event: Event, actions: tuple[Action, ...]) -> None:
        if self._watch is not None:
            self._watch(event, actions)
