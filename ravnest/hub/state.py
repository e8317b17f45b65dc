"""The hub's decisions: events in, orders out. Its state is the replay of its log of events.

A job's life: collect members until a plan exists, train and average, then a last round, a last evaluation,
and the weights of one cluster are kept; a job that is stopped ends in the same way, only earlier. Whoever
dies takes its cluster out; when nobody is left who knows what was trained, it begins again. A late or foreign
message is refused and changes nothing. Driven by hub.server, which logs events before it obeys, and by sim.
"""

from typing import assert_never

from ravnest.hub.events import (
    Abandon,
    BatchDropped,
    ClusterDissolved,
    ClusterStarted,
    Collected,
    EpochDone,
    Evaluated,
    Event,
    Finish,
    JobGiven,
    Joined,
    Left,
    Order,
    PartsMade,
    PeerJoined,
    PeerLeft,
    Phase,
    Received,
    Send,
    Stopped,
    Stopping,
    Tell,
    Tick,
    WorkLost,
)
from ravnest.hub.forming import Forming
from ravnest.hub.keeping import Keeping
from ravnest.hub.members import ClusterState, Members, is_sensible
from ravnest.hub.microbatches import lease_batches
from ravnest.hub.planning import PlanMade, Probed
from ravnest.hub.probing import take_probe
from ravnest.hub.rounds import Ended, Rounds
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
    StageParts,
    StepReport,
    Stop,
)

_STOP_SECONDS = 30.0  # for what is under way when the job is stopped
_Ordered = list[Order] | str  # orders, or why the event is refused
_OfStages = StageParts | LeaseDone | StepReport | DroppedBatch
_OfMembers = Leave | RoundReady | RoundAbort | RoundQuery | _OfStages


class Hub:
    """Feed it every event, in order; carry out what it returns, in order."""

    def __init__(self) -> None:
        self._now = 0.0
        self._phase = Phase.COLLECTING
        self._job: JobGiven | None = None
        self._members = Members()
        self._rounds = Rounds()
        self._books: Training | None = None  # from the job on
        self._forming = Forming()
        self._keeping = Keeping()
        self._stop_by: float | None = None  # once it is stopped
        self._history: list[EpochDone | Evaluated] = []

    @property
    def phase(self) -> Phase:
        """How far the job is."""
        return self._phase

    @property
    def now(self) -> float:
        """The time of the last event; a program that goes on after a restart counts on from it."""
        return self._now

    @property
    def clusters(self) -> tuple[ClusterState, ...]:
        """The clusters that get ready or train."""
        return self._members.clusters

    @property
    def books(self) -> Training | None:
        """What is counted so far, once there is a job."""
        return self._books

    @property
    def due(self) -> float | None:
        """When the next Tick is needed, if nothing else happens."""
        if self._phase is Phase.COLLECTING:
            return self._forming.due(self._job.settings, self._members) if self._job else None
        times = (self._rounds.due, self._stop_by if self._phase is Phase.TRAINING else None)
        return min((time for time in times if time is not None), default=None)

    def concerns(self, event: Event) -> bool:
        """Return whether an event may change something; the log needs no others, telemetry may."""
        if not isinstance(event, Received):
            return True
        if isinstance(event.message, StepReport):
            cluster = self._members.cluster_of(event.sender)
            return cluster is not None and event.sender == cluster.leaf
        return isinstance(event.message, _OfMembers)

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

    @property
    def _training(self) -> Training:
        assert self._books is not None, "nobody has a stage before there is a job"
        return self._books

    def _take(self, event: Event) -> _Ordered:  # noqa: C901 - one short case for each
        match event:
            case JobGiven():
                return self._begin(event)
            case PeerJoined():
                return self._join(event)
            case PeerLeft():
                return self._leave(event.node, event.reason)
            case Received(sender, message):
                assert isinstance(message, _OfMembers)
                return self._receive(sender, message)
            case PlanMade():
                return self._adopt(event)
            case PartsMade():
                return self._members.take_parts(event)
            case Probed():
                return take_probe(self._members, event)
            case Collected():
                return self._finish(event.number)
            case Tick():
                ended = self._rounds.expire(event.now)
                return self._end_round(ended) if ended else []
            case Stopped():
                return self._stop(event.reason)
            case _:
                assert_never(event)

    def _begin(self, job: JobGiven) -> _Ordered:
        if self._job:
            return f"the hub has a job already: {self._job.profile.name}"
        self._job, self._books = job, Training(job.settings)
        return []

    def _receive(self, sender: NodeId, message: _OfMembers) -> _Ordered:
        if sender not in self._members:
            return f"{type(message).__name__} from {sender}, who is no member"
        match message:
            case Leave():
                return self._leave(sender, message.reason)
            case RoundReady() | RoundAbort():
                ended = self._rounds.receive(sender, message, self._now)
                return self._end_round(ended) if isinstance(ended, Ended) else ended.reason if ended else []
            case RoundQuery():
                answer = self._rounds.answer(sender, message)
                return answer.reason if isinstance(answer, Refusal) else [answer]
            case StageParts() | LeaseDone() | StepReport() | DroppedBatch():
                return self._hear_stage(sender, message)
            case _:
                assert_never(message)

    def _hear_stage(self, sender: NodeId, message: _OfStages) -> _Ordered:
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
            return [Tell(self._training.trained), *self._tell_results(done)]
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
        if self._keeping.awaits(sender, cluster):
            if parts.version <= cluster.version < self._training.version(cluster):
                return f"{sender} says again what it began with"
            return [*self._keeping.take(sender, parts)]
        ready = self._members.take_ready(sender, parts)
        if isinstance(ready, str):
            return ready
        return [Tell(ClusterStarted(ready.name, ready.nodes))] if ready.is_running else []

    def _join(self, event: PeerJoined) -> _Ordered:
        name = event.node.name
        if not is_sensible(event.node):
            return f"{name} cannot join: no machine is like {event.node}"
        gone = self._leave(name, "it came back as new") if name in self._members else []
        assert isinstance(gone, list)
        sends = self._members.join(event)
        self._forming.note_change(self._now)
        if self._phase is Phase.FINISHED:
            sends = [Send(name, Stop("the job is done"))]
        return [*gone, Tell(Joined(name)), *sends]

    def _leave(self, name: NodeId, reason: str) -> _Ordered:
        if name not in self._members:
            return f"{name} is no member, so it cannot leave"
        cluster, sends = self._members.leave(name)
        self._forming.note_change(self._now)
        ended = self._rounds.leave(name, reason, self._now)
        orders: list[Order] = [Tell(Left(name, reason))]
        if self._phase is Phase.FINISHED:
            return orders
        orders += [*sends, *(self._end_round(ended) if ended else [])]
        orders += self._give_up(cluster, f"{name}: {reason}") if cluster else []
        is_empty = self._job is not None and self._phase is Phase.COLLECTING and not len(self._members)
        return [*orders, *(self._forming.tell_shortage() if is_empty else [])]

    def _give_up(self, cluster: ClusterState, reason: str) -> list[Order]:
        given_back, lost = self._training.release(cluster)
        orders: list[Order] = [Tell(ClusterDissolved(cluster.name, reason, given_back, lost))]
        self._keeping.lose(cluster)
        is_new = not self._training.num_counted
        if any(is_new or self._training.knows(each) for each in self._members.running):
            return orders
        return orders + self._start_over()

    def _start_over(self) -> list[Order]:
        """Go back to collecting, with the first weights and all who are here; or end, if it is stopped."""
        orders: list[Order] = []
        for name in (name for cluster in self._members.clusters for name in cluster.nodes):
            ended = self._rounds.leave(name, "training begins again", self._now)
            orders += self._end_round(ended) if ended else []
        orders += self._members.dissolve(self._members.clusters)
        lost = self._training.restart()
        self._rounds.restart()
        self._phase, self._history = Phase.COLLECTING, []
        if self._stop_by is None:
            return orders + ([Tell(WorkLost(lost))] if lost else [])
        self._phase = Phase.FINISHED
        orders += [Send(name, Stop("the job was stopped")) for name in self._members]
        return [*orders, Abandon("the job was stopped when no cluster had anything to keep")]

    def _stop(self, reason: str) -> _Ordered:
        """End as if all was trained, as soon as what is under way is; at once if nobody trains yet."""
        if self._job is None or self._phase is Phase.FINISHED or self._stop_by is not None:
            return f"there is no job to stop ({reason}), or it ends already"
        self._stop_by = self._now + _STOP_SECONDS
        told = Tell(Stopping(reason))
        if not self._members.running:
            return [told, *self._start_over()]
        self._training.stop()
        return [told]

    def _end_round(self, ended: Ended) -> list[Order]:
        if ended.told.is_committed:
            took_part = {send.to for send in ended.sends}
            clusters = (each for each in self._members.running if each.root in took_part)
            self._training.note_averaged(clusters, ended.told.round_id)
        return [*ended.sends, Tell(ended.told)]

    def _advance(self) -> list[Order]:
        """Go on as far as nobody has to be waited for."""
        orders: list[Order] = []
        if self._job is None:
            return orders
        if self._phase is Phase.COLLECTING:
            orders += self._forming.ask(self._job, self._members, self._now)
        if self._phase is Phase.TRAINING:
            orders += self._train(self._job)
        if self._phase is Phase.AVERAGING:
            orders += self._average(self._job)
        if self._phase is Phase.EVALUATING:
            orders += self._evaluate()
        if self._phase is Phase.KEEPING and not self._keeping.is_under_way:
            orders += self._keeping.start(self._training.most_trained(self._members.running))
        return orders

    def _adopt(self, made: PlanMade) -> _Ordered:
        """Follow a plan, unless somebody came or went while it was made: another one is on its way then."""
        if self._phase is not Phase.COLLECTING or not self._forming.take(made):
            return f"plan {made.epoch} comes too late: others are here now"
        assert self._job is not None
        told = self._forming.tell_shortage(made.shortage)
        if made.plan is None:
            return [*told]
        formed = self._members.adopt(made.plan, made.microbatches, self._job)
        self._phase = Phase.TRAINING
        count = formed.microbatches
        self._training.restart(count, lease_batches(self._job, made.plan, count))
        return [Tell(formed), *self._members.announce()]

    def _train(self, job: JobGiven) -> list[Order]:
        if self._stop_by is not None and self._now >= self._stop_by:
            self._training.give_up_leases()
        orders: list[Order] = [*self._training.fill(self._members)]
        if self._training.is_finished:
            self._phase = Phase.AVERAGING
        elif self._stop_by is None:
            orders += self._rounds.open_due(self._members, self._training, job, self._now)
        return orders

    def _average(self, job: JobGiven) -> list[Order]:
        orders = self._rounds.open_last(self._members, self._training, job, self._now)
        if self._rounds.due is not None:
            return [*orders]
        self._training.start_evaluation()
        self._phase = Phase.EVALUATING
        return []

    def _evaluate(self) -> list[Order]:
        orders: list[Order] = [*self._training.fill(self._members)]
        if self._training.is_finished:
            self._phase = Phase.KEEPING
        return orders

    def _finish(self, number: int) -> _Ordered:
        if not self._keeping.has_asked_for(number) or self._phase is not Phase.KEEPING:
            return f"nobody asked to collect number {number}"
        self._phase = Phase.FINISHED
        stops: list[Order] = [Send(name, Stop("the job is done")) for name in self._members]
        return [*stops, Finish(self._keeping.parts, tuple(self._history))]
