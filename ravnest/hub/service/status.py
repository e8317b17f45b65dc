"""What happens in a hub, for any number of readers, and where its run stands, as one record.

A reader of the stream sees each event and each report of a stage (telemetry, which is in no log) with the
actions that followed. A web page follows an async iterator: one that reads too slowly loses the oldest
happenings, and never delays the hub. A StatusTracker sees the same beside a hub at work and beside one that
is replayed from its log.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import (
    Abandon,
    Action,
    Event,
    Finish,
    JobGiven,
    Notify,
    Received,
    TextsSampled,
)
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import Evaluated, Joined, Left, Notice, RoundEnded, SampledText, Trained
from ravnest.hub.coordinator.phases import ClusterPhase, JobPhase, NodePhase
from ravnest.hub.coordinator.progress import DroppedSamples
from ravnest.ids import NodeId
from ravnest.protocol.membership import Leave
from ravnest.protocol.messages import Message
from ravnest.protocol.placement import FetchProgress, StageReady
from ravnest.protocol.training import StepReport
from ravnest.transfer.exchange import TransferProgress

Reader = Callable[[Event, tuple[Action, ...]], None]
_MOST_WAITING = 1_000  # happenings that a slow reader may still get


@dataclass(frozen=True, slots=True)
class Happening:
    """An event or a report, and what the coordinator wants done because of it."""

    event: Event
    actions: tuple[Action, ...]


class HubStream:
    """One writer, the service; readers come and go."""

    def __init__(self) -> None:
        self._readers: dict[int, Reader] = {}
        self._next_reader = 0

    def publish(self, event: Event, actions: tuple[Action, ...]) -> None:
        """Show a happening to all readers."""
        for reader in tuple(self._readers.values()):
            reader(event, actions)

    def subscribe(self, reader: Reader) -> Callable[[], None]:
        """Call a reader at every happening from now on; return what ends that."""
        number, self._next_reader = self._next_reader, self._next_reader + 1
        self._readers[number] = reader

        def unsubscribe() -> None:
            self._readers.pop(number, None)

        return unsubscribe

    async def follow(self, most_waiting: int = _MOST_WAITING) -> AsyncIterator[Happening]:
        """Yield every happening from the first step of the iterator on, as fast as it is read."""
        waiting: asyncio.Queue[Happening] = asyncio.Queue(most_waiting)

        def put(event: Event, actions: tuple[Action, ...]) -> None:
            if waiting.full():
                waiting.get_nowait()
            waiting.put_nowait(Happening(event, actions))

        unsubscribe = self.subscribe(put)
        try:
            while True:
                yield await waiting.get()
        finally:
            unsubscribe()


_RECENT = 20  # sentences
_NEW_WEIGHT = 0.2  # of a report, in the mean of the last ones
_RATE_SECONDS = 60.0  # that the rate is a mean over


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A peer and where it is in its life."""

    name: NodeId
    phase: NodePhase
    cluster: str | None = None
    stage: int | None = None  # from the root, which is 0
    fetching: str = ""  # how far it is with the weights of its stage
    busy: float | None = None  # share of the time, lately; only beside a hub at work


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A cluster of the plan and where it is in its life."""

    name: str
    nodes: tuple[NodeId, ...]
    phase: ClusterPhase

    @property
    def is_running(self) -> bool:
        """Whether it trains."""
        return self.phase in (ClusterPhase.RUNNING, ClusterPhase.DRAINING)


@dataclass(frozen=True, slots=True)
class Said:
    """A notice as people read it, and when it came, in seconds of the hub's own time."""

    now: float
    text: str


@dataclass(frozen=True, slots=True)
class Status:
    """Where a run stands; plain data, ready to become JSON. Losses are None until one is known."""

    now: float  # of the hub, which stands still while no hub runs
    phase: JobPhase
    job: str
    members: tuple[MemberStatus, ...]
    clusters: tuple[ClusterStatus, ...]
    num_samples: int  # trained for good, over all epochs
    num_total: int  # in the whole job
    epoch: int  # the pass under way, from 1; 0 without a job
    num_updates: int  # of all clusters together
    samples_per_second: float  # over the last minute of the hub's time
    loss: float | None
    validation_epoch: int | None
    validation: dict[str, float | None]
    rounds_committed: int
    rounds_aborted: int
    round_seconds: float | None  # of the last
    left_out: tuple[str, ...]  # clusters, of the last
    recent: tuple[Said, ...]
    dropped: tuple[DroppedSamples, ...] = ()
    efficiency: float = 1.0  # the training effect of a sample, in that of one process, as foreseen
    noise_scale: float | None = None  # of the gradients, in samples, once measured
    texts: tuple[SampledText, ...] = ()  # after the prompts of the job, at the last evaluation
    predicted_samples_per_second: float | None = None  # by the plan in force
    eta_seconds: float | None = None  # at the rate of the last minute
    is_paused: bool = False  # the requester lets nothing more be trained for now


NO_JOB = Status(0.0, JobPhase.COLLECTING, "", (), (), 0, 0, 0, 0, 0.0, None, None, {}, 0, 0, None, (), ())


class StatusTracker:
    """Show it every event with its actions, after the coordinator has applied it."""

    def __init__(self, hub: Coordinator) -> None:
        self.hub = hub
        self._job = ""
        self._members: dict[NodeId, None] = {}
        self._fetches: dict[NodeId, TransferProgress] = {}  # by the node whose stage is on its way
        self._busy: dict[NodeId, float] = {}  # share of the time, a mean of the last reports
        self._evaluated: Evaluated | None = None
        self._texts: tuple[SampledText, ...] = ()
        self._num_rounds = {True: 0, False: 0}  # by whether they committed
        self._round: RoundEnded | None = None
        self._recent: deque[Said] = deque(maxlen=_RECENT)
        self._marks: deque[tuple[float, int]] = deque()  # samples reported by then, a second apart or more

    def observe(self, event: Event, actions: tuple[Action, ...]) -> None:
        """Record an event, or a report of a stage, which changes nothing here."""
        if isinstance(event, JobGiven) and not self._job:
            self._job = event.profile.name
        if isinstance(event, TextsSampled):
            self._texts = event.texts
        if isinstance(event, Received):
            if isinstance(event.message, StepReport):
                self._observe_work(event.sender, event.message)
            else:
                self._observe_fetch(event.sender, event.message, event.now)
        for action in actions:
            match action:
                case Notify(notice):
                    self._observe_notice(notice)
                case Finish():
                    self._say("the job is done, and its weights are here")
                case Abandon(reason):
                    self._say(reason)
        self._mark()

    def status(self, now: float | None = None) -> Status:
        """Return where the run stands, at this time of the hub or at its last event."""
        now = self.hub.now if now is None else now
        ledger, evaluated = self.hub.ledger, self._evaluated
        trained, rate, placement = ledger.trained, self._rate(now), self.hub.placement
        is_paused = self.hub.phase is JobPhase.TRAINING and ledger.is_paused
        is_training = self.hub.phase is JobPhase.TRAINING and rate > 0.0 and not is_paused
        return Status(
            now=now,
            phase=self.hub.phase,
            job=self._job,
            members=tuple(self._member(name) for name in self._members),
            clusters=tuple(ClusterStatus(x.name, x.nodes, x.phase) for x in self.hub.clusters),
            num_samples=trained.num_samples,
            num_total=trained.num_total,
            epoch=trained.epoch,
            num_updates=ledger.num_updates,
            samples_per_second=rate,
            loss=trained.loss,
            validation_epoch=evaluated.epoch if evaluated else None,
            validation={"loss": evaluated.loss, **dict(evaluated.metrics)} if evaluated else {},
            rounds_committed=self._num_rounds[True],
            rounds_aborted=self._num_rounds[False],
            round_seconds=self._round.seconds if self._round else None,
            left_out=self._round.left_out if self._round else (),
            recent=tuple(self._recent),
            dropped=self.hub.drops.found,
            efficiency=placement.sharing.efficiency,
            noise_scale=placement.noise,
            texts=self._texts,
            predicted_samples_per_second=placement.outline.samples_per_second if placement.clusters else None,
            eta_seconds=(trained.num_total - trained.num_samples) / rate if is_training else None,
            is_paused=is_paused,
        )

    def _observe_work(self, sender: NodeId, report: StepReport) -> None:
        busy = 1.0 - min(1.0, max(0.0, report.idle_share))
        known = self._busy.get(sender, busy)
        self._busy[sender] = known + _NEW_WEIGHT * (busy - known)

    def _observe_fetch(self, sender: NodeId, message: Message, now: float) -> None:
        if isinstance(message, FetchProgress):
            found = self._fetches.get(sender)
            if found is None or found.size_bytes != message.size_bytes:
                found = self._fetches[sender] = TransferProgress("fetching", message.size_bytes)
            found.describe(message.num_bytes, now)
        elif isinstance(message, StageReady | Leave):
            self._fetches.pop(sender, None)

    def _observe_notice(self, notice: Notice) -> None:
        if not isinstance(notice, Trained | SampledText):  # too many for a list of the recent ones
            self._say(show_notice(notice))
        match notice:
            case Joined(node):
                self._members[node] = None
            case Left(node):
                self._members.pop(node, None)
                self._fetches.pop(node, None)
                self._busy.pop(node, None)
            case Evaluated():
                self._evaluated = notice
            case RoundEnded():
                self._num_rounds[notice.is_committed] += 1
                self._round = notice

    def _say(self, text: str) -> None:
        self._recent.append(Said(self.hub.now, text))

    def _mark(self) -> None:
        ledger, now = self.hub.ledger, self.hub.now
        if self.hub.phase is JobPhase.COLLECTING:
            self._marks.clear()  # training begins anew
        elif not self._marks or now >= self._marks[-1][0] + 1.0:
            self._marks.append((now, ledger.num_reported))
            while len(self._marks) > 1 and self._marks[1][0] <= now - _RATE_SECONDS:
                self._marks.popleft()

    def _rate(self, now: float) -> float:
        if not self._marks:
            return 0.0
        old = [mark for mark in self._marks if mark[0] <= now - _RATE_SECONDS]
        since, reported = old[-1] if old else self._marks[0]
        return (self.hub.ledger.num_reported - reported) / (now - since) if now > since else 0.0

    def _member(self, name: NodeId) -> MemberStatus:
        member, cluster = self.hub.membership.find(name), self.hub.placement.cluster_of(name)
        phase = NodePhase.MISSING if member is None else member.phase
        if cluster is None:
            return MemberStatus(name, phase)
        fetch = self._fetches.get(name) if name in cluster.unready else None
        told = fetch.told if fetch is not None else ""
        busy = self._busy.get(name) if cluster.is_running else None
        return MemberStatus(name, phase, cluster.name, cluster.nodes.index(name), told, busy)
