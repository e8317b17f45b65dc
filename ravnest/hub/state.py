"""The hub's decisions: events in, orders out. Its state is the replay of its log of events.

A job's life: collect members until a plan exists, train and average, then a last round, a last evaluation,
and the weights of one cluster are kept. Whoever dies takes its cluster out; when nobody is left who knows
what was trained, it begins again. A late or foreign message is refused and changes nothing.
Driven by hub.server, which logs an event before it applies it, and by sim.
"""

from typing import assert_never

from ravnest.errors import PlanError
from ravnest.hub.events import (
    BatchDropped,
    ClusterDissolved,
    ClusterStarted,
    Collect,
    Collected,
    EpochDone,
    Evaluated,
    Event,
    Finish,
    JobGiven,
    Joined,
    KeptPart,
    Left,
    Order,
    PartsMade,
    PeerJoined,
    PeerLeft,
    Phase,
    Received,
    Send,
    Tell,
    Tick,
    Waiting,
    WorkLost,
)
from ravnest.hub.members import ClusterState, Members, is_sensible
from ravnest.hub.rounds import Ended, Rounds
from ravnest.hub.training import OpenLease, Training
from ravnest.plan.types import NodeId
from ravnest.protocol import (
    DroppedBatch,
    Heartbeat,
    LeaseDone,
    Leave,
    Message,
    Refusal,
    RoundAbort,
    RoundQuery,
    RoundReady,
    SnapshotOrder,
    StageParts,
    StepReport,
    Stop,
)

_FINAL_TRIES = 3  # at the last round, before the result is one cluster's alone
_Ordered = list[Order] | str  # orders, or why the event is refused


class Hub:
    """Feed it every event, in order; carry out what it returns, in order."""

    def __init__(self) -> None:
        self._now = 0.0
        self._phase = Phase.COLLECTING
        self._job: JobGiven | None = None
        self._members = Members()
        self._rounds = Rounds()
        self._books: Training | None = None  # from the job on
        self._changed_at = 0.0  # when somebody last came or went
        self._was_tried = False  # to form a plan of these members
        self._shortage = ""
        self._num_tries = 0  # of the last round
        self._keeper: ClusterState | None = None
        self._kept: dict[NodeId, StageParts] = {}
        self._snapshot = 0
        self._history: list[EpochDone | Evaluated] = []

    @property
    def phase(self) -> Phase:
        """How far the job is."""
        return self._phase

    @property
    def clusters(self) -> tuple[ClusterState, ...]:
        """The clusters that get ready or train."""
        return self._members.clusters

    @property
    def open_leases(self) -> tuple[OpenLease, ...]:
        """What clusters are at work on."""
        return self._books.open_leases if self._books else ()

    @property
    def due(self) -> float | None:
        """When the next Tick is needed, if nothing else happens."""
        if self._phase is Phase.COLLECTING and self._job and len(self._members) and not self._was_tried:
            return self._changed_at + self._job.settings.settle_seconds
        return self._rounds.deadline

    def concerns(self, event: Event) -> bool:
        """Return whether an event may change something; the log needs no others, telemetry may."""
        if not isinstance(event, Received):
            return True
        if isinstance(event.message, StepReport):
            cluster = self._members.cluster_of(event.sender)
            return cluster is not None and event.sender == cluster.leaf
        return not isinstance(event.message, Heartbeat)

    def apply(self, event: Event) -> tuple[Order, ...]:
        """Take an event; return what is to be done, or a Refusal alone if it changes nothing."""
        if not self.concerns(event):
            return ()
        before, self._now = self._now, max(self._now, event.now)
        taken = self._take(event)
        if isinstance(taken, str):
            self._now = before
            return (Refusal(taken),)
        orders = [*taken, *self._advance()]
        return tuple(order for order in orders if not isinstance(order, Send) or order.to in self._members)

    def tick(self, now: float) -> tuple[Order, ...]:
        """Let time pass."""
        return self.apply(Tick(now))

    @property
    def _training(self) -> Training:
        assert self._books is not None, "nobody has a stage before there is a job"
        return self._books

    def _take(self, event: Event) -> _Ordered:
        match event:
            case JobGiven():
                if self._job:
                    return f"the hub has a job already: {self._job.profile.name}"
                self._job, self._books = event, Training(event.settings)
                return []
            case PeerJoined():
                return self._join(event)
            case PeerLeft():
                return self._leave(event.node, event.reason)
            case Received():
                return self._receive(event.sender, event.message)
            case PartsMade():
                delivered = self._members.take_parts(event)
                return delivered if isinstance(delivered, str) else list(delivered)
            case Collected():
                return self._finish(event.number)
            case Tick():
                ended = self._rounds.expire(event.now)
                return self._end_round(ended) if ended else []
            case _:
                assert_never(event)

    def _receive(self, sender: NodeId, message: Message) -> _Ordered:
        if sender not in self._members:
            return f"{type(message).__name__} from {sender}, who is no member"
        match message:
            case Leave():
                return self._leave(sender, message.reason)
            case RoundReady() | RoundAbort():
                ended = self._rounds.receive(sender, message)
                return self._end_round(ended) if isinstance(ended, Ended) else ended.reason if ended else []
            case RoundQuery():
                answer = self._rounds.answer(sender, message)
                return answer.reason if isinstance(answer, Refusal) else [answer]
            case StageParts() | LeaseDone() | StepReport() | DroppedBatch():
                return self._hear_stage(sender, message)
            case _:
                return f"{type(message).__name__} from {sender}: nobody sends that to the hub"

    def _hear_stage(
        self, sender: NodeId, message: StageParts | LeaseDone | StepReport | DroppedBatch
    ) -> _Ordered:
        cluster, name = self._members.cluster_of(sender), type(message).__name__
        if message.epoch != self._members.epoch(sender):
            return f"{name} of plan {message.epoch} from {sender}, who follows {self._members.epoch(sender)}"
        if cluster is None:
            return f"{name} from {sender}, who has no stage"
        if isinstance(message, StageParts):
            return self._take_parts(sender, cluster, message)
        if isinstance(message, LeaseDone):
            if sender != cluster.root:
                return f"lease {message.lease} is reported by {sender}, who is not the root"
            done = self._training.take_done(cluster, message)
            if isinstance(done, str):
                return done
            num_batches, news = done
            self._rounds.count(num_batches)
            return self._tell_results(news)
        if isinstance(message, StepReport):
            results = self._training.take_report(cluster, message)
            return results if isinstance(results, str) else self._tell_results(results)
        results = self._training.take_dropped(cluster, message)
        if isinstance(results, str):
            return results
        return [Tell(BatchDropped(message.batch, sender, message.reason)), *self._tell_results(results)]

    def _tell_results(self, results: list[EpochDone] | list[Evaluated]) -> list[Order]:
        self._history += results
        return [Tell(result) for result in results]

    def _take_parts(self, sender: NodeId, cluster: ClusterState, parts: StageParts) -> _Ordered:
        if self._keeper is cluster and sender not in self._kept:
            if parts.version <= cluster.version < self._training.version(cluster):
                return f"{sender} says again what it began with"
            self._kept[sender] = parts
            return [Collect(self._snapshot, self._kept_parts())] if self._is_kept else []
        ready = self._members.take_ready(sender, parts)
        if isinstance(ready, str):
            return ready
        return [Tell(ClusterStarted(ready.name, ready.nodes))] if ready.is_running else []

    @property
    def _is_kept(self) -> bool:
        return self._keeper is not None and len(self._kept) == len(self._keeper.nodes)

    def _kept_parts(self) -> tuple[KeptPart, ...]:
        assert self._keeper is not None
        stages = self._keeper.cluster.stages
        return tuple(KeptPart(each.start, each.stop, each.node, self._kept[each.node]) for each in stages)

    def _join(self, event: PeerJoined) -> _Ordered:
        name = event.node.name
        if not is_sensible(event.node):
            return f"{name} cannot join: no machine is like {event.node}"
        gone = self._leave(name, "it came back as new") if name in self._members else []
        assert isinstance(gone, list)
        sends = self._members.join(event.node, event.key, event.addresses)
        self._changed_at, self._was_tried = self._now, False
        if self._phase is Phase.FINISHED:
            sends = [Send(name, Stop("the job is done"))]
        return [*gone, Tell(Joined(name)), *sends]

    def _leave(self, name: NodeId, reason: str) -> _Ordered:
        if name not in self._members:
            return f"{name} is no member, so it cannot leave"
        cluster, sends = self._members.leave(name)
        self._changed_at, self._was_tried = self._now, False
        ended = self._rounds.leave(name, reason)
        orders: list[Order] = [Tell(Left(name, reason))]
        if self._phase is Phase.FINISHED:
            return orders
        orders += [*sends, *(self._end_round(ended) if ended else [])]
        return orders + (self._give_up(cluster, f"{name}: {reason}") if cluster else [])

    def _give_up(self, cluster: ClusterState, reason: str) -> list[Order]:
        given_back, lost = self._training.release(cluster)
        orders: list[Order] = [Tell(ClusterDissolved(cluster.name, reason, given_back, lost))]
        if self._keeper is cluster:
            self._keeper = None
        is_new = not self._training.num_counted
        if any(is_new or self._training.knows(each) for each in self._members.running):
            return orders
        return orders + self._start_over()

    def _start_over(self) -> list[Order]:
        """Go back to collecting: with the first weights, and with all who are here."""
        orders: list[Order] = []
        for name in (name for cluster in self._members.clusters for name in cluster.nodes):
            ended = self._rounds.leave(name, "training begins again")
            orders += self._end_round(ended) if ended else []
        orders += self._members.dissolve(self._members.clusters)
        lost = self._training.restart()
        if lost:
            orders.append(Tell(WorkLost(lost)))
        self._phase, self._num_tries, self._history = Phase.COLLECTING, 0, []
        return orders

    def _end_round(self, ended: Ended) -> list[Order]:
        if ended.told.is_committed:
            took_part = {send.to for send in ended.sends}
            self._training.note_averaged(each for each in self._members.running if each.root in took_part)
            self._num_tries = _FINAL_TRIES if ended.told.is_final else 0
        return [*ended.sends, Tell(ended.told)]

    def _advance(self) -> list[Order]:
        """Go on as far as nobody has to be waited for."""
        orders: list[Order] = []
        if self._job is None:
            return orders
        if self._phase is Phase.COLLECTING:
            orders += self._form(self._job)
        if self._phase is Phase.TRAINING:
            orders += self._train(self._job)
        if self._phase is Phase.AVERAGING:
            orders += self._average(self._job)
        if self._phase is Phase.EVALUATING:
            orders += self._evaluate()
        if self._phase is Phase.KEEPING and self._keeper is None:
            orders += self._keep()
        return orders

    def _form(self, job: JobGiven) -> list[Order]:
        settings, num_members = job.settings, len(self._members)
        is_settled = self._now >= self._changed_at + settings.settle_seconds
        is_enough = num_members >= settings.expected_nodes > 0
        if not num_members or self._was_tried or not (is_settled or is_enough):
            return []
        self._was_tried = True
        try:
            formed = self._members.form(job.profile, job.config, settings.seed)
        except PlanError as shortage:
            told, self._shortage = self._shortage, str(shortage)
            return [Tell(Waiting(self._shortage))] if told != self._shortage else []
        self._phase, self._shortage = Phase.TRAINING, ""
        return [Tell(formed), *self._members.announce()]

    def _train(self, job: JobGiven) -> list[Order]:
        orders: list[Order] = [*self._training.fill(self._members)]
        if not self._training.is_finished:
            if self._rounds.is_due(self._members, job):
                orders += self._rounds.open(self._members, job.config, is_final=False, now=self._now)
        else:
            self._phase = Phase.AVERAGING
        return orders

    def _average(self, job: JobGiven) -> list[Order]:
        if self._rounds.is_open:
            return []
        if len(self._members.running) > 1 and self._num_tries < _FINAL_TRIES:
            self._num_tries += 1
            return [*self._rounds.open(self._members, job.config, is_final=True, now=self._now)]
        self._training.start_evaluation()
        self._phase = Phase.EVALUATING
        return []

    def _evaluate(self) -> list[Order]:
        orders: list[Order] = [*self._training.fill(self._members)]
        if self._training.is_finished:
            self._phase = Phase.KEEPING
        return orders

    def _keep(self) -> list[Order]:
        self._keeper = self._training.most_trained(self._members.running)
        self._kept = {}
        self._snapshot += 1
        order = SnapshotOrder(self._keeper.epoch, self._snapshot)
        return [Send(name, order) for name in self._keeper.nodes]

    def _finish(self, number: int) -> _Ordered:
        is_awaited = self._is_kept and number == self._snapshot and self._phase is Phase.KEEPING
        if not is_awaited:
            return f"nobody asked to collect number {number}"
        self._phase = Phase.FINISHED
        stops: list[Order] = [Send(name, Stop("the job is done")) for name in self._members]
        return [*stops, Finish(self._kept_parts(), tuple(self._history))]
