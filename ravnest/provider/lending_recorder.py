"""What a lent PC does and did, from what passes its agent's two borders: compute, and the network.

A LendingRecorder is shown each item between agent and compute, each link event and the size of each message.
It does a few additions for each; `now` and the day are arguments. WatchedCompute and MeteredTransport are put
around the agent's own, so that the agent knows nothing of a page.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ravnest.ids import HUB
from ravnest.net.transport import (
    Delivery,
    LinkDown,
    LinkUp,
    PeerId,
    PublicKey,
    Service,
    Transport,
    TransportEvent,
)
from ravnest.peer.compute_protocol import (
    Build,
    Compute,
    ComputeFailed,
    ComputeSetup,
    FromCompute,
    StageBuilt,
    ToCompute,
)
from ravnest.protocol.placement import PlanOrder
from ravnest.protocol.tensors import Buffer
from ravnest.protocol.training import StepReport
from ravnest.provider.lending_documents import (
    LENDING_SCHEMA,
    HostedProgram,
    HostedStage,
    HostedWork,
    LendingDocument,
    LendingFacts,
    LendingPhase,
    LentDay,
    LentTerms,
    MachineUse,
    TrafficDocument,
)
from ravnest.transfer.outbox import Outgoing
from ravnest.web.updates import NumberedNews, RunCurve

_CURVES = ("sent", "received", "cores", "memory")
_MOST_DAYS, _MOST_NEWS = 14, 400
_RATE_OVER = 5.0  # seconds that a rate is a mean over
_NEW_WEIGHT = 0.2  # of a report, in the mean of the last ones


class LendingRecorder:
    """Show it what passes; ask it for a document."""

    def __init__(self, terms: LentTerms, now: float, wall_offset: float) -> None:
        self.terms, self.started_at, self._wall_offset = terms, now, wall_offset
        self.news = NumberedNews(_MOST_NEWS)
        self.curves = {name: RunCurve() for name in _CURVES}
        self.use: MachineUse | None = None
        self.sent_bytes = self.received_bytes = 0
        self.program: HostedProgram | None = None  # of the stage, once it was looked at
        self.program_fault = ""
        self.blueprint: bytes | None = None  # of the stage, until it was looked at
        self._weights_bytes: float | None = None
        self._order: PlanOrder | None = None
        self._is_built = self._is_connected = self._takes_part = False
        self._busy: float | None = None
        self._lag: float | None = None
        self._last: StepReport | None = None
        self._num_microbatches = self._num_samples = 0
        self._days: deque[LentDay] = deque(maxlen=_MOST_DAYS)
        self._marks: deque[tuple[float, int, int]] = deque([(now, 0, 0)])
        self._counted = (now, 0, 0, 0)  # time, bytes and samples that a day has got

    # What passes.

    def begin_part(self) -> None:
        """The agent begins to take part."""
        self._takes_part = True

    def end_part(self) -> None:
        """It has left; it may begin again."""
        self._takes_part = self._is_connected = False
        self._forget_stage()
        self._order = None

    def connect(self) -> None:
        """The hub is reached."""
        self._is_connected = True

    def disconnect(self) -> None:
        """The hub is lost; what is here goes on."""
        self._is_connected = False

    def take_order(self, item: ToCompute) -> None:
        """Take what the agent passes to compute."""
        match item:
            case PlanOrder():
                self._order = item
                self._forget_stage()
            case Build(_, _, blueprint, contents):  # which is let go: it holds all weights
                self.blueprint = blueprint
                self._weights_bytes = float(sum(memoryview(each).nbytes for each in contents))

    def take_answer(self, item: FromCompute) -> None:
        """Take what compute passes to the agent."""
        match item:
            case Outgoing(to, StepReport() as report) if to == HUB:
                self._take_report(report)
            case StageBuilt(build_id):
                self._is_built = self._order is not None and self._order.build_id == build_id
            case ComputeFailed():
                self._is_built = False

    def _take_report(self, report: StepReport) -> None:
        busy = 1.0 - min(1.0, max(0.0, report.idle_share))
        self._busy = busy if self._busy is None else self._busy + _NEW_WEIGHT * (busy - self._busy)
        lag = float(report.lag)
        self._lag = lag if self._lag is None else self._lag + _NEW_WEIGHT * (lag - self._lag)
        self._last = report
        self._num_microbatches += 1
        self._num_samples += report.num_samples

    def describe_stage(self, described: bytes, program: HostedProgram | None, fault: str) -> None:
        """Take what a blueprint says, or why it says nothing, unless another came meanwhile."""
        if self.blueprint is described:
            self.blueprint, self.program, self.program_fault = None, program, fault

    def _forget_stage(self) -> None:
        self.blueprint = self.program = self._weights_bytes = None
        self.program_fault, self._is_built = "", False
        self._busy = self._lag = self._last = None

    # What is looked at now and then.

    def sample(self, use: MachineUse, now: float, day: str) -> None:
        """Take what the PC does at this moment: one more point of each curve, and of the day."""
        self.use = use
        self.count_day(now, day)
        sent, received = self._rates(now)
        values = {"sent": sent, "received": received, "cores": use.cores, "memory": use.memory_bytes}
        for name, value in values.items():
            if value is not None:
                self.curves[name].add(now, 0, value)

    def count_day(self, now: float, day: str) -> None:
        """Give a day what came since the last time."""
        since, sent, received, samples = self._counted
        known = self._days[-1] if self._days and self._days[-1].day == day else LentDay(day, 0, 0, 0.0, 0)
        if self._days and self._days[-1].day == day:
            self._days.pop()
        self._days.append(
            LentDay(
                day,
                known.sent_bytes + self.sent_bytes - sent,
                known.received_bytes + self.received_bytes - received,
                known.lent_seconds + (now - since if self._takes_part else 0.0),
                known.num_samples + self._num_samples - samples,
            )
        )
        self._counted = (now, self.sent_bytes, self.received_bytes, self._num_samples)

    def _rates(self, now: float) -> tuple[float, float]:
        self._marks.append((now, self.sent_bytes, self.received_bytes))
        while len(self._marks) > 2 and self._marks[1][0] <= now - _RATE_OVER:
            self._marks.popleft()
        since, sent, received = self._marks[0]
        seconds = max(now - since, 1e-3)
        return (self.sent_bytes - sent) / seconds, (self.received_bytes - received) / seconds

    # What is shown.

    def make_document(
        self, facts: LendingFacts, now: float, day: str, is_live: bool = True
    ) -> LendingDocument:
        """Return how this PC is lent."""
        self.count_day(now, day)
        sent, received = self._rates(now)
        last = self._last
        phase = self._find_phase(facts) if is_live else LendingPhase.ENDED
        is_going = is_live and not facts.is_ending
        return LendingDocument(
            schema=LENDING_SCHEMA,
            number=1,
            phase=phase,
            reason=facts.leaving or facts.waits_for,
            goes_on=facts.goes_on,
            is_live=is_live,
            is_connected=self._is_connected,
            can_pause=is_going and not facts.is_paused,
            can_resume=is_going and facts.is_paused,
            can_finish=is_going,
            now=now,
            started_at=self.started_at,
            wall_offset=self._wall_offset,
            terms=self.terms,
            stage=self._show_stage(),
            work=HostedWork(
                self._num_microbatches,
                self._num_samples,
                self._busy,
                self._lag,
                None if last is None else last.forward_seconds,
                None if last is None else last.backward_seconds,
            ),
            use=self.use,
            traffic=TrafficDocument(sent, received, self.sent_bytes, self.received_bytes),
            days=tuple(self._days),
        )

    def _find_phase(self, facts: LendingFacts) -> LendingPhase:
        if facts.leaving:
            return LendingPhase.LEAVING
        if facts.is_ending:
            return LendingPhase.ENDED
        if facts.waits_for:
            return LendingPhase.WAITING
        if self._order is None:
            return LendingPhase.JOINING
        if self._order.stage is None:
            return LendingPhase.SPARE
        return LendingPhase.HOSTING if self._is_built else LendingPhase.BUILDING

    def _show_stage(self) -> HostedStage | None:
        order = self._order
        if order is None or order.stage is None:
            return None
        stage = order.stage
        return HostedStage(
            start=stage.start,
            stop=stage.stop,
            pipeline=order.pipeline,
            place=order.pipeline.index(stage.node) if stage.node in order.pipeline else 0,
            window=stage.window,
            activations=str(stage.activations),
            gradients=str(stage.gradients),
            is_built=self._is_built,
            weights_bytes=self._weights_bytes,
            program=self.program,
            fault=self.program_fault,
        )


class WatchedCompute:
    """A Compute whose items are recorded as they pass."""

    def __init__(self, inner: Compute, recorder: LendingRecorder) -> None:
        self._inner, self._recorder = inner, recorder

    def put(self, item: ToCompute) -> None:
        """Pass an item to compute."""
        self._recorder.take_order(item)
        self._inner.put(item)

    async def run(self, setup: ComputeSetup, deliver: Callable[[FromCompute], None]) -> None:
        """Run compute until it is closed."""

        def record(item: FromCompute) -> None:
            self._recorder.take_answer(item)
            deliver(item)

        await self._inner.run(setup, record)

    def close(self) -> None:
        """End `run` after the piece of work under way."""
        self._inner.close()


class MeteredTransport:
    """A Transport whose bytes are counted, and whose link to the hub is watched."""

    def __init__(self, inner: Transport, hub: PeerId, recorder: LendingRecorder) -> None:
        self._inner, self._hub, self._recorder = inner, hub, recorder

    @property
    def peer(self) -> PeerId:
        """The id of this program."""
        return self._inner.peer

    async def send(self, to: PeerId, service: Service, header: bytes, buffers: Sequence[Buffer] = ()) -> None:
        """Hand over a message, and count it when it is taken."""
        num_bytes = len(header) + sum(memoryview(each).nbytes for each in buffers)
        await self._inner.send(to, service, header, buffers)
        self._recorder.sent_bytes += num_bytes

    async def receive(self) -> TransportEvent:
        """Return what happened next."""
        event = await self._inner.receive()
        match event:
            case Delivery(_, _, header, buffers):
                self._recorder.received_bytes += len(header) + sum(each.nbytes for each in buffers)
            case LinkUp(peer) if peer == self._hub:
                self._recorder.connect()
            case LinkDown(peer) if peer == self._hub:
                self._recorder.disconnect()
        return event

    def allow(self, keys: Iterable[PublicKey]) -> None:
        """Accept these keys and no others."""
        self._inner.allow(keys)

    def dial(self, peer: PeerId, addresses: Sequence[str], greeting: bytes = b"") -> None:
        """Connect to an allowed peer."""
        self._inner.dial(peer, addresses, greeting)

    def redial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Look once for another way to a connected peer."""
        self._inner.redial(peer, addresses)

    def drop(self, peer: PeerId, reason: str) -> None:
        """End the link to a peer."""
        self._inner.drop(peer, reason)

    def connected(self) -> frozenset[PeerId]:
        """Return the peers whose link is up."""
        return self._inner.connected()

    async def answers(self, key: PublicKey, address: str) -> bool:
        """Return whether the owner of a key listens at an address."""
        return await self._inner.answers(key, address)
