"""RunRecorder: what happened in a run so far, as curves, news, rounds and the pulse of each stage. Pure.

It is shown every happening of a hub, or of a log that is replayed, and does a few additions for each. A log
has no telemetry: then losses come from the notices of progress, and stages have no pulse.
"""

import math
from collections import deque
from dataclasses import dataclass

from ravnest.hub.coordinator.events import Abandon, Action, Event, Finish, JobGiven, Notify, Received
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import (
    BestIsResult,
    CaptureStep,
    Checkpointed,
    CheckpointIsResult,
    ClusterBroken,
    ClusterDissolved,
    ClusterStarted,
    ClusterSuspected,
    Contradicted,
    CutOff,
    DashboardOpened,
    Evaluated,
    HubListens,
    Joined,
    Leaving,
    Left,
    LogGoesOn,
    LogWaits,
    Measured,
    MicrobatchDropped,
    Missing,
    ModelCaptured,
    NoiseFound,
    NotCheckpointed,
    NotDialled,
    Notice,
    PlanFormed,
    Recovered,
    Repaired,
    ResultKept,
    ResultRefused,
    Returned,
    RoundEnded,
    SampledText,
    SamplesDropped,
    SpeedChanged,
    Stopping,
    Trained,
    Waiting,
    WentWrong,
    WorkLost,
    WorkUndone,
)
from ravnest.hub.service.status import StatusTracker
from ravnest.hub.service.web.documents import DepartureDocument, RoundDocument, TextDocument
from ravnest.ids import LeaseId, NodeId
from ravnest.protocol.training import StepReport
from ravnest.web.updates import NumberedNews, RunCurve

_TOPICS: dict[str, tuple[type, ...]] = {
    "members": (Joined, NotDialled, Left, Leaving, Missing, Returned, Measured, SpeedChanged, CutOff),
    "plan": (
        PlanFormed,
        Repaired,
        ClusterStarted,
        ClusterBroken,
        ClusterDissolved,
        Recovered,
        Waiting,
        NoiseFound,
    ),
    "rounds": (RoundEnded,),
    "checkpoints": (
        Checkpointed,
        NotCheckpointed,
        CheckpointIsResult,
        ResultKept,
        BestIsResult,
        ResultRefused,
    ),
    "hub": (HubListens, CaptureStep, ModelCaptured, LogWaits, LogGoesOn),
}
_TONES: dict[str, tuple[type, ...]] = {
    "good": (Joined, Returned, LogGoesOn, ClusterStarted, Recovered, Evaluated, PlanFormed),
    "bad": (
        Left,
        Missing,
        CutOff,
        LogWaits,
        ClusterBroken,
        ClusterDissolved,
        WentWrong,
        ClusterSuspected,
        WorkUndone,
        WorkLost,
        ResultRefused,
        Contradicted,
    ),
    "warning": (
        Leaving,
        SpeedChanged,
        Waiting,
        Repaired,
        MicrobatchDropped,
        SamplesDropped,
        NotCheckpointed,
        BestIsResult,
    ),
}


class NewsList(NumberedNews):
    """The last notices, numbered from 1."""

    def add(self, notice: Notice, at: float | None) -> None:
        """Add a notice, but for progress, which curves show, and the link with its token."""
        if not isinstance(notice, Trained | DashboardOpened):
            facts = (type(notice).__name__, _topic(notice), _tone(notice), show_notice(notice))
            self.append(*facts, at, _names(notice))

    def say(self, kind: str, tone: str, text: str, at: float | None) -> None:
        """Add a sentence about the whole run."""
        self.append(kind, "training", tone, text, at)


def _topic(notice: Notice) -> str:
    return next((topic for topic, kinds in _TOPICS.items() if isinstance(notice, kinds)), "training")


def _tone(notice: Notice) -> str:
    if isinstance(notice, RoundEnded):
        return "plain" if notice.is_committed and not notice.unlike else "warning"
    return next((tone for tone, kinds in _TONES.items() if isinstance(notice, kinds)), "plain")


def _names(notice: Notice) -> tuple[str, ...]:
    match notice:
        case Measured(node):
            return (node.name,)
        case WorkUndone(node):
            return (node,)
        case Joined() | Left() | Leaving() | Missing() | Returned() | SpeedChanged() | MicrobatchDropped():
            return (notice.node,)
        case ClusterStarted(_, nodes):
            return tuple(nodes)
        case Recovered(_, _, sources):
            return tuple(sources)
        case WentWrong(_, suspect):
            return (suspect,)
    return ()


_POINT_EVERY = 0.5  # seconds of the hub's time, at least
_RATE_OVER = 20.0  # seconds that a rate is a mean over
_MOST_CURVES, _MOST_LETTERS = 40, 60  # peers name metrics
_MOST_ROUNDS, _MOST_GONE = 100, 50
_NEW_WEIGHT = 0.2  # of a report, in the mean of the last ones
_MOST_TEXTS, _MOST_TEXT_LETTERS = 12, 2_000
_FIRST = ("loss", "learning_rate", "samples_per_second", "predicted_samples_per_second", "lag")


@dataclass(slots=True)
class Pulse:
    """What a stage reported lately."""

    build_id: int
    busy: float
    lag: float
    forward_seconds: float
    backward_seconds: float
    link_seconds: float


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    weight: int = 0


class RunRecorder:
    """Show it every happening with the tracker that has seen it, and every notice."""

    def __init__(self, number: int = 1) -> None:
        self.number = number  # of the run, in this program
        self.tracker: StatusTracker | None = None
        self.job: JobGiven | None = None
        self.now = self.started_at = 0.0
        self.news = NewsList()
        self.curves: dict[str, RunCurve] = {name: RunCurve() for name in _FIRST}
        self.pulses: dict[NodeId, Pulse] = {}
        self.joined_at: dict[NodeId, float] = {}
        self.missing: set[NodeId] = set()  # whose links are lost at this moment
        self.departures: deque[DepartureDocument] = deque(maxlen=_MOST_GONE)
        self.rounds: deque[RoundDocument] = deque(maxlen=_MOST_ROUNDS)
        self.texts: deque[TextDocument] = deque(maxlen=_MOST_TEXTS)
        self.num_rounds = {True: 0, False: 0}  # by whether they committed
        self.samples_redone = self.microbatches_dropped = 0
        self.cluster_rates: dict[str, float] = {}  # measured, by cluster_id
        self.learning_rate: float | None = None
        self.is_stopping = False
        self.preparing = ""
        self._reported: dict[LeaseId, int] = {}  # samples of leases that are not done
        self._sums: dict[str, _Mean] = {}  # since the last point
        self._trained: dict[str, int] = {}  # samples by cluster_id, since the first report
        self._marks: deque[tuple[float, int, dict[str, int]]] = deque()
        self._has_reports = False
        self._pointed_at = -math.inf

    def observe(self, tracker: StatusTracker, event: Event, actions: tuple[Action, ...]) -> None:
        """Take an event that was applied, or a report; notices of its actions are heard apart."""
        self.tracker, self.now = tracker, max(self.now, event.now)
        if isinstance(event, Received):
            if isinstance(event.message, StepReport) and not actions:
                self._take_report(tracker, event.sender, event.message)
        elif isinstance(event, JobGiven):
            self.job, self.started_at, self.preparing = event, event.now, ""
        for action in actions:
            match action:
                case Finish():
                    self.news.say("Finish", "good", "the job is done, and its weights are here", self.now)
                case Abandon(reason):
                    self.news.say("Abandon", "bad", reason, self.now)

    def replay(self, tracker: StatusTracker, event: Event, actions: tuple[Action, ...]) -> None:
        """Take an event of a log, with the notices that followed."""
        self.observe(tracker, event, actions)
        for action in actions:
            if isinstance(action, Notify):
                self.observe_notice(action.notice)

    def observe_notice(self, notice: Notice) -> None:  # noqa: C901, PLR0912 - one short case for each
        """Take a notice."""
        self.news.add(notice, None if self.job is None else self.now)
        match notice:
            case Trained(num_samples, _, _, loss):
                self._take_progress(num_samples, loss)
            case CaptureStep(_, step):
                self.preparing = f"capturing the model: {step}"
            case ModelCaptured():
                self.preparing = ""
            case Waiting(reason):
                self.preparing = reason
            case Joined(node):
                self.joined_at[node] = self.now
            case Missing(node):
                self.missing.add(node)
            case Returned(node):
                self.missing.discard(node)
            case Left(node, reason):
                self._forget(node, reason)
            case Evaluated():
                self._take_evaluation(notice)
            case RoundEnded():
                self._take_round(notice)
            case SampledText(epoch, prompt, text):
                shown = (prompt[:_MOST_TEXT_LETTERS], text[:_MOST_TEXT_LETTERS])
                self.texts.append(TextDocument(self.now, epoch, *shown))
            case ClusterBroken(_, _, num_given_back) | ClusterDissolved(_, _, num_given_back):
                self.samples_redone += num_given_back
            case WorkLost(num_samples) | WorkUndone(_, num_samples):
                self.samples_redone += num_samples
            case MicrobatchDropped():
                self.microbatches_dropped += 1
            case Stopping():
                self.is_stopping = True

    def _take_report(self, tracker: StatusTracker, sender: NodeId, report: StepReport) -> None:
        hub = tracker.hub
        cluster, lease = hub.placement.cluster_of(sender), hub.ledger.find_training(report.microbatch)
        if cluster is None or lease is None:
            return
        self._take_pulse(sender, report)
        if sender != cluster.leaf:
            return
        self._has_reports = True
        self._reported[lease.number] = self._reported.get(lease.number, 0) + report.num_samples
        known = self._trained.get(cluster.cluster_id, 0)
        self._trained[cluster.cluster_id] = known + report.num_samples
        for name, value in (("loss", report.loss), *report.metrics):
            if value is not None:
                mean = self._sums.setdefault(name, _Mean())
                mean.total, mean.weight = (
                    mean.total + value * report.num_samples,
                    mean.weight + report.num_samples,
                )
        if self.now >= self._pointed_at + _POINT_EVERY:
            self._make_point(tracker)

    def _take_pulse(self, sender: NodeId, report: StepReport) -> None:
        busy, lag = 1.0 - min(1.0, max(0.0, report.idle_share)), float(report.lag)
        pulse = self.pulses.get(sender)
        if pulse is None or pulse.build_id != report.build_id:
            seconds = (report.forward_seconds, report.backward_seconds, report.link_seconds)
            self.pulses[sender] = Pulse(report.build_id, busy, lag, *seconds)
            return
        pulse.busy += _NEW_WEIGHT * (busy - pulse.busy)
        pulse.lag += _NEW_WEIGHT * (lag - pulse.lag)
        pulse.forward_seconds, pulse.backward_seconds = report.forward_seconds, report.backward_seconds
        pulse.link_seconds = report.link_seconds

    def _make_point(self, tracker: StatusTracker) -> None:
        """Turn what leaves reported since the last point into one more of each curve."""
        ledger = tracker.hub.ledger
        open_leases = {lease.number for lease in ledger.open_leases}
        self._reported = {lease: count for lease, count in self._reported.items() if lease in open_leases}
        num_samples = ledger.num_counted + sum(self._reported.values())
        for name, mean in self._sums.items():
            if mean.weight:
                self._add(
                    "loss" if name == "loss" else f"train {name}", num_samples, mean.total / mean.weight
                )
        self._sums = {}
        lags = [pulse.lag for pulse in self.pulses.values()]
        if lags:
            self._add("lag", num_samples, max(lags))
        self._add_rates(tracker, num_samples)

    def _take_progress(self, num_samples: int, loss: float | None) -> None:
        """Take how far the job is; where no stage reports, this is all there is."""
        if self._has_reports or self.tracker is None:
            self._has_reports = False
            return
        if loss is not None:
            self._add("loss", num_samples, loss)
        if self.now >= self._pointed_at + _POINT_EVERY:
            self._add_rates(self.tracker, num_samples)

    def _add_rates(self, tracker: StatusTracker, num_samples: int) -> None:
        self._pointed_at, placement = self.now, tracker.hub.placement
        self._marks.append((self.now, num_samples, dict(self._trained)))
        while len(self._marks) > 2 and self._marks[1][0] <= self.now - _RATE_OVER:
            self._marks.popleft()
        since, before, by_cluster = self._marks[0]
        seconds = self.now - since
        if seconds > 0.0:
            rate = max(0.0, (num_samples - before) / seconds)
            self._add("samples_per_second", num_samples, rate)
            known = {each.cluster_id for each in placement.clusters}
            self._trained = {each: count for each, count in self._trained.items() if each in known}
            self.cluster_rates = {
                each: (count - by_cluster.get(each, 0)) / seconds for each, count in self._trained.items()
            }
        if placement.clusters:
            self._add("predicted_samples_per_second", num_samples, placement.outline.samples_per_second)
        if self.job is not None:
            settings = self.job.settings
            self.learning_rate = settings.rate(settings.position(num_samples)) * placement.rate_times
            self._add("learning_rate", num_samples, self.learning_rate)

    def _take_evaluation(self, notice: Evaluated) -> None:
        num_samples = 0 if self.tracker is None else self.tracker.hub.ledger.num_counted
        for name, value in (("loss", notice.loss), *notice.metrics):
            if value is not None:
                self._add(f"validation {name}", num_samples, value)

    def _take_round(self, notice: RoundEnded) -> None:
        self.num_rounds[notice.is_committed] += 1
        facts = (notice.is_committed, notice.seconds, notice.reason, notice.left_out)
        self.rounds.append(RoundDocument(notice.round_id, self.now, *facts))

    def _forget(self, node: NodeId, reason: str) -> None:
        self.missing.discard(node)
        self.pulses.pop(node, None)
        self.joined_at.pop(node, None)
        self.departures.append(DepartureDocument(node, self.now, reason[:500]))

    def _add(self, name: str, num_samples: int, value: float) -> None:
        name = name[:_MOST_LETTERS]
        if name not in self.curves and len(self.curves) < _MOST_CURVES:
            self.curves[name] = RunCurve()
        if name in self.curves and math.isfinite(value):
            self.curves[name].add(self.now, num_samples, value)
