"""The monitors of a hub together: telemetry and events go in, conclusions come out.

Monitors keep soft state: it is in no log, and a hub that goes on begins with new ones. A conclusion is an
event like any other, so the coordinator that replays its log needs no monitor. Monitors read the coordinator
and never change it.
"""

from collections import deque

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import (
    Action,
    CalmChanged,
    ClusterHeard,
    ClusterSilent,
    ClusterSlowed,
    Conclusion,
    Event,
    LossAlarm,
    NoiseMeasured,
    Notify,
    PeerJoined,
    PeerLeft,
    PlanMade,
    Received,
    Restarted,
    SpeedMeasured,
    Stopped,
    Tick,
    TrainingReported,
)
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    ClusterDissolved,
    ClusterStarted,
    EpochDone,
    Left,
    WentWrong,
)
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.hub.coordinator.placement import ClusterState
from ravnest.hub.monitors.liveness import LivenessMonitor
from ravnest.hub.monitors.loss_guard import LossGuard
from ravnest.hub.monitors.noise import NoiseMonitor
from ravnest.hub.monitors.report_sums import ReportSums
from ravnest.hub.monitors.throughput import PaceMonitor, ThroughputMonitor
from ravnest.ids import NodeId
from ravnest.protocol.averaging import RoundAbort, RoundReady
from ravnest.protocol.membership import Leave
from ravnest.protocol.placement import StageMissing, StageReady
from ravnest.protocol.training import DroppedMicrobatch, LeaseDone, StepReport

_AT_WORK = (JobPhase.TRAINING, JobPhase.EVALUATING)
# These may begin or end a cluster or a round: the books are brought up to date before them.
_TURNS_OF_PEERS = (Leave, StageReady, StageMissing, RoundReady, RoundAbort)
_SIGNS_OF_LIFE = (StageReady, StageMissing, LeaseDone, DroppedMicrobatch)


class Monitors:
    """Feed it every report and, after it is applied, every event; then ask for conclusions."""

    def __init__(self, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._speeds, self._paces = ThroughputMonitor(timeouts), PaceMonitor(timeouts)
        self._guard = LossGuard()
        self._noise = NoiseMonitor()
        self._liveness = LivenessMonitor(timeouts)
        self._sums = ReportSums()
        self._found: deque[Conclusion] = deque()
        self._num_starts = 0
        self._has_told_alarm = False
        self._is_stale = True  # the coordinator has changed since clusters were last looked at

    def due(self, hub: Coordinator) -> float | None:
        """Return when to conclude again, if nothing else happens."""
        return self._liveness.due if hub.phase in _AT_WORK else None

    def record(self, hub: Coordinator, sender: NodeId, report: StepReport, now: float) -> str | None:
        """Take a report of a stage; return why it does not count."""
        if sender not in hub.membership:
            return f"StepReport from {sender}, who is no member"
        cluster, build_id = hub.placement.cluster_of(sender), hub.placement.build_id(sender)
        if cluster is None:
            return f"StepReport from {sender}, who has no stage"
        if report.build_id != build_id:
            return f"StepReport of plan {report.build_id} from {sender}, who follows {build_id}"
        self._follow(hub.ledger)
        if sender == cluster.leaf:
            is_training = self._sums.record(hub.ledger, cluster, report)
            if isinstance(is_training, str):
                return is_training
            if is_training:
                self._guard.note_loss(cluster.cluster_id, cluster.name, report.loss)
                self._tell_alarm(now)
                self._note_pace(hub, cluster, report, now)
            else:
                self._paces.pause(cluster.cluster_id)
                self._end_evaluation(hub.ledger, cluster, report, now)
        self._note_noise(hub, cluster, sender, report, now)
        times = self._speeds.note(sender, report, now)
        if times is not None:
            self._found.appendleft(SpeedMeasured(sender, times, now))
        self._liveness.hear(cluster.cluster_id, now)
        if hub.has_asked(cluster.cluster_id):
            self._found.append(ClusterHeard(cluster.cluster_id, now))
        return None

    def _note_pace(self, hub: Coordinator, cluster: ClusterState, report: StepReport, now: float) -> None:
        """Compare a cluster with itself, unless something else keeps it from work."""
        if hub.stands_still or not hub.ledger.is_busy(cluster):
            self._paces.pause(cluster.cluster_id)
            return
        times = self._paces.note(cluster.cluster_id, report, now)
        if times is not None:
            self._found.append(ClusterSlowed(cluster.cluster_id, times, now))

    def _note_noise(
        self, hub: Coordinator, cluster: ClusterState, sender: NodeId, report: StepReport, now: float
    ) -> None:
        if report.noise is None:
            return
        facts = (cluster.cluster_id, cluster.nodes, sender, report.noise)
        noise = self._noise.note(*facts, hub.ledger.settings.length)
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
            case Received() | PeerJoined() | PeerLeft() | PlanMade() | Restarted() | Stopped() | Tick():
                return self._sums.pass_on(event.now)
        return None

    def observe(self, hub: Coordinator, event: Event, actions: tuple[Action, ...]) -> None:
        """Take an event that the coordinator has applied, and what it wants done."""
        self._follow(hub.ledger)
        self._is_stale = True
        for action in actions:
            if isinstance(action, Notify):
                self._observe_notice(hub, action)
        if isinstance(event, Received) and isinstance(event.message, _SIGNS_OF_LIFE):
            cluster = hub.placement.cluster_of(event.sender)
            if cluster is not None:
                self._liveness.hear(cluster.cluster_id, event.now)
                if isinstance(event.message, DroppedMicrobatch):
                    self._guard.note_dropped(cluster.cluster_id, event.sender, event.message.reason)
                    self._tell_alarm(event.now)
                    self._end_evaluation(hub.ledger, cluster, event.message, event.now)

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
        """Look at all clusters, but not after every report."""
        if hub.phase not in _AT_WORK:
            return None
        if hub.stands_still:
            for cluster in hub.placement.running:
                self._liveness.hear(cluster.cluster_id, now)
        elif not self._is_stale and (self._liveness.due is None or now < self._liveness.due):
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
        self._has_told_alarm = False

    def _observe_notice(self, hub: Coordinator, told: Notify) -> None:
        match told.news:
            case Left(node):
                self._speeds.forget(node)
            case WentWrong():
                self._go_back()
            case EpochDone():
                self._sums.forget_epochs(hub.ledger)
            case ClusterStarted() | ClusterBroken() | ClusterDissolved():
                running = [each.cluster_id for each in hub.placement.running]
                self._guard.forget_others(running)
                self._paces.forget_others(running)
                self._noise.forget_others(running)

    def _tell_alarm(self, now: float) -> None:
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
