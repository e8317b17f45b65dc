"""The life of a job: its phase, its plans, its duties while it trains, how nodes leave it and how it ends.

A job ends when all is trained and one cluster's weights are kept, when it is stopped, or when its loss goes
wrong too often. It begins again from the last checkpoint when no node has what was trained. The cluster of a
node that has gone stands still until it is repaired. Near the end nothing is repaired any more; then the
cluster ends.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.checkpoints import CheckpointCollector, CheckpointPolicy
from ravnest.hub.coordinator.events import (
    Abandon,
    Action,
    Collected,
    Evict,
    Finish,
    JobGiven,
    JobSettings,
    LossAlarm,
    Notify,
    PlanMade,
    Restarted,
    Send,
)
from ravnest.hub.coordinator.ledger import EpochReports, Ledger
from ravnest.hub.coordinator.notices import (
    BestIsResult,
    CheckpointIsResult,
    ClusterDissolved,
    EpochDone,
    Evaluated,
    FromCheckpoint,
    Left,
    NotCheckpointed,
    NotEvaluated,
    PauseChanged,
    Repaired,
    ResultKept,
    ResultRefused,
    Resumed,
    Stopping,
    WentWrong,
    WorkLost,
    WorkUndone,
)
from ravnest.hub.coordinator.phases import JOB_TRANSITIONS, JobPhase, follow
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.hub.coordinator.planner import PlanTrigger, order_probes
from ravnest.hub.coordinator.progress import RateNews
from ravnest.hub.coordinator.recovery import Recovery
from ravnest.hub.coordinator.rounds import Ended, Rounds
from ravnest.hub.coordinator.snapshots import IDLE, Inquiries
from ravnest.hub.coordinator.spot_checks import SpotChecks
from ravnest.ids import NodeId
from ravnest.protocol.membership import Leave, Stop

UNLIKE = "the weights that it gives are not those that most clusters hold after the same round"
_MOST_ALARMS = 3
_Result = list[Action] | str  # actions, or why the event is refused


class Lifecycle:
    """Changes the phase of a job; nothing else does."""

    def __init__(
        self,
        job: JobGiven,
        placement: Placement,
        ledger: Ledger,
        checkpoints: CheckpointCollector,
        recovery: Recovery,
        rounds: Rounds,
        plan_trigger: PlanTrigger,
        timeouts: HubTimeouts = TIMEOUTS.hub,
    ) -> None:
        self._job, self._timeouts = job, timeouts
        self.placement, self._membership = placement, placement.membership
        self.ledger, self.checkpoints, self.recovery = ledger, checkpoints, recovery
        self.rounds, self.plan_trigger = rounds, plan_trigger
        self._reports = EpochReports(ledger)
        self.phase = JobPhase.COLLECTING
        self.has_begun = False
        self.stop_by: float | None = None  # once it is stopped
        self.end_by: float | None = None  # once all is trained, and a cluster stands still
        self.alarm: LossAlarm | None = None  # until training goes back
        self.rate_news = RateNews(placement)
        self._num_alarms = 0  # since a checkpoint that is past the last of them
        self._alarmed_at = 0  # samples that were trained at the alarm that came furthest

    @property
    def can_repair(self) -> bool:
        """Whether clusters are repaired: until the end, or until a cluster has what is to be kept."""
        return self.phase is JobPhase.TRAINING and (self.stop_by is None or not self.placement.running)

    @property
    def is_at_work(self) -> bool:
        """Whether clusters have leases."""
        return self.phase in (JobPhase.TRAINING, JobPhase.EVALUATING)

    @property
    def is_under_way(self) -> bool:
        """Whether the job has begun and does not end yet."""
        return self.has_begun and self.phase is not JobPhase.FINISHED and self.stop_by is None

    def enter(self, phase: JobPhase) -> None:
        """Change the phase, by an allowed transition."""
        self.phase = follow(JOB_TRANSITIONS, self.phase, phase)

    def begin(self) -> _Result:
        """Begin the job, once."""
        if self.has_begun:
            return f"the hub has a job already: {self._job.profile.name}"
        self.has_begun = True
        return self._notify_checkpoint()

    def _notify_checkpoint(self) -> list[Action]:
        return [Notify(FromCheckpoint(saved.num_counted))] if (saved := self.recovery.saved) else []

    def restart(self, event: Restarted, now: float) -> _Result:
        """Go on after the hub was away, with what its nodes still have."""
        if not self.has_begun or self.phase is JobPhase.FINISHED:
            return "there is nothing to go on with"
        ended = self.rounds.cancel("the hub was away", now)
        actions: list[Action] = [Notify(Resumed(self.ledger.num_counted, len(self._membership)))]
        actions += self.end_round(ended)
        self.recovery.forget_held()
        self.end_by, self.ledger.is_paused = None, False  # who starts a hub again wants it to train
        actions += self.recovery.restart(event.books, now)
        self.rounds.restart()
        self.plan_trigger.reset(now)
        self.enter(JobPhase.TRAINING if self.placement.clusters else JobPhase.COLLECTING)
        return actions

    def end_round(self, ended: Ended | None) -> list[Action]:
        """Tell the outcome of a round, if it has one, and note which clusters now know the same."""
        if ended is None:
            return []
        if not ended.told.is_committed:
            return [*ended.sends, Notify(ended.told)]
        took_part = {send.to for send in ended.sends}
        clusters = [each for each in self.placement.running if each.root in took_part]
        if ended.sums_gradients:  # one for every batch, so people are told of those that fail
            done = self.ledger.record_summed(clusters)
            return [*ended.sends, Notify(self.ledger.trained), *self.report(done)]
        self.ledger.progress.record_agreement(clusters, ended.told.round_id)
        self.ledger.average_books = self.ledger.books
        return [*ended.sends, Notify(ended.told)]

    def adopt(self, made: PlanMade, now: float) -> _Result:
        """Follow a plan, unless members changed while it was made: another one is on its way then."""
        if self.phase not in (JobPhase.COLLECTING, JobPhase.TRAINING) or not self.plan_trigger.accept(made):
            return f"plan {made.plan_id} comes too late: others are here now"
        told: list[Action] = [*self.plan_trigger.notify_shortage(made.shortage)]
        if self.phase is JobPhase.COLLECTING:
            self.enter(JobPhase.TRAINING if made.plan else JobPhase.COLLECTING)
            return [*told, *(self.recovery.form(made) if made.plan else [])]
        if made.plan is None:
            return [*told, *self.start_over(now)]
        return told if self.recovery.hold(made, now) else told + self.repair(made, now)

    def repair(self, made: PlanMade, now: float) -> list[Action]:
        """Go on with a repaired plan."""
        assert made.plan is not None
        told: list[Action] = []
        if made.plan.rings != self.placement.rings or self.placement.is_exact:
            told += self.end_round(self.rounds.cancel("the rings are others now", now))
        told += [Notify(Repaired(made.plan, made.reason))] if made.reason else []
        followed = self.recovery.repair(made)
        return told + (self.start_over(now) if followed is None else followed)

    def measure(self, now: float) -> Sequence[Action]:
        """Order probes of newcomers that nobody measured before."""
        return order_probes(self.placement, self._job.profile, now, self._timeouts)

    def may_end(self, now: float) -> bool:
        """Return whether all is trained, and all clusters are there for the last round or waited for."""
        if not (self.ledger.is_finished and self.placement.running):
            self.end_by = None
            return False
        if self.stop_by is not None or len(self.placement.running) == len(self.placement.clusters):
            return True
        self.end_by = now + self._timeouts.end_seconds if self.end_by is None else self.end_by
        return now >= self.end_by

    def stop(self, reason: str, now: float) -> _Result:
        """End as if all was trained, as soon as what is under way is; at once if nobody trains yet."""
        if not self.is_under_way:
            return f"there is no job to stop ({reason}), or it ends already"
        self.stop_by = now + self._timeouts.stop_seconds
        told = Notify(Stopping(reason))
        if not self.placement.clusters or not (self.placement.running or self.ledger.num_counted):
            return [told, *self.start_over(now)]
        self.ledger.stop()
        return [told]

    def pause(self, is_paused: bool) -> _Result:
        """Lease nothing more until training goes on; nodes finish what they have, and stay."""
        if not self.is_under_way or self.ledger.is_paused is is_paused:
            return "there is no training to pause" if is_paused else "no training is paused"
        self.ledger.is_paused = is_paused
        return [Notify(PauseChanged(is_paused))]

    def roll_back(self, alarm: LossAlarm, now: float) -> list[Action]:
        """Go back to the last checkpoint, if there is one; too often in a row is the end."""
        self._num_alarms += 1
        self._alarmed_at = max(self._alarmed_at, self.ledger.num_counted)
        self.alarm = None
        has_checkpoint = self.recovery.saved is not None
        told = Notify(WentWrong(alarm.reason, alarm.suspect, has_checkpoint))
        if self._num_alarms <= _MOST_ALARMS:
            return [told, *(self.start_over(now, has_gone_wrong=True) if has_checkpoint else [])]
        self.ledger.stop()
        self.ledger.give_up_leases()
        self.enter(JobPhase.FINISHED)
        stops = [Send(name, Stop("the job was ended by its guard")) for name in self._membership]
        told_why = f"{alarm.reason}, seen first at {alarm.suspect}, for the {self._num_alarms}th time"
        advice = "lower the learning rate, or look at the data; the last good checkpoint is kept"
        return [told, *stops, Abandon(f"training is ended: {told_why}; {advice}", is_guarded=True)]

    def start_over(self, now: float, *, has_gone_wrong: bool = False) -> list[Action]:
        """Go back to collecting, with what the hub has and all members; or end with that, if it is enough."""
        actions = self.end_round(self.rounds.cancel("training begins again", now))
        for cluster in self.placement.clusters:
            self.checkpoints.drop(cluster)
        actions += self.checkpoints.begin_again(has_gone_wrong=has_gone_wrong)
        actions += self.placement.dissolve(self.placement.clusters)
        had_undone = self.ledger.has_undone  # a checkpoint may count what was undone since
        lost = self.ledger.restart(self.recovery.saved)
        self._reports.restart()
        self.recovery.forget_held()
        self.end_by = None
        self.rounds.restart()
        self.alarm = None
        self.plan_trigger.reset(now)
        if self.stop_by is None and not self.ledger.is_finished:
            self.enter(JobPhase.COLLECTING)
            actions += [Notify(WorkLost(lost))] if lost > 0 else []
            actions += self._notify_checkpoint() if lost or had_undone else []
            return actions if len(self._membership) else [*actions, *self.plan_trigger.notify_shortage()]
        self.enter(JobPhase.FINISHED)
        actions += [Send(name, Stop("the job was stopped")) for name in self._membership]
        if self.recovery.saved is None:
            told = "the job was stopped when there was nothing to keep, no checkpoint either"
            return [*actions, Abandon(told)]
        trained = self.ledger.trained
        return [*actions, Notify(CheckpointIsResult(trained.num_samples, trained.num_total)), Finish((), ())]

    def report(self, reports: Sequence[EpochDone | Evaluated]) -> list[Action]:
        """Tell of epochs and evaluations that are over, in order."""
        ready = self._reports.add(reports, is_end=self.phase is JobPhase.EVALUATING)
        self.ledger.history += ready
        return [Notify(each) for each in ready]

    def end_collection(self, collected: Collected, now: float) -> _Result:
        """Go on when something is on disk: a checkpoint, or the result, also if nodes have left meanwhile."""
        ordered = self.checkpoints.find_ordered(collected.number)
        if ordered is None or self.phase is JobPhase.FINISHED:
            return f"nobody asked to collect number {collected.number}"
        if ordered.is_result and collected.fault:
            return self._refuse_result(collected)
        if ordered.is_result:
            if self.phase is not JobPhase.KEEPING:  # nobody was left, and training began again
                self.ledger.restart(ordered.books)
            self.enter(JobPhase.FINISHED)
            stops: list[Action] = [Send(name, Stop("the job is done")) for name in self._membership]
            told = Notify(ResultKept(collected.verdict.num_agreeing))
            return [told, *stops, Finish(ordered.parts, tuple(self.ledger.history))]
        is_outdated = self.checkpoints.is_outdated(collected.number)
        kept = self.recovery.end_checkpoint(collected, now)
        if not collected.fault and ordered.books.num_counted > self._alarmed_at:
            self._num_alarms = 0  # a checkpoint before that place says nothing of what comes there
        # Stages are made of what is on disk, so the books have to be those of it.
        return [*kept, *self.start_over(now)] if is_outdated and not collected.fault else kept

    def hand_in_best(self) -> list[Action]:
        """End with the best checkpoint: clusters agree that the last weights are far worse."""
        self.enter(JobPhase.FINISHED)
        stops = [Send(name, Stop("the job is done")) for name in self._membership]
        return [Notify(BestIsResult()), *stops, Finish((), tuple(self.ledger.history), is_best=True)]

    def _refuse_result(self, collected: Collected) -> list[Action]:
        """Ask another cluster for the result; end without one, if clusters contradict each other for good."""
        self.checkpoints.withdraw_result(collected.number)
        told: list[Action] = [Notify(ResultRefused(collected.fault))]
        if not collected.verdict.disputed:
            return told
        self.enter(JobPhase.FINISHED)
        stops = [Send(name, Stop("clusters contradict each other")) for name in self._membership]
        advice = "ask one more provider to join and go on with --resume: a third cluster shows which is right"
        return [*told, *stops, Abandon(f"there is no result: {collected.fault}; {advice}", is_guarded=True)]


class Departures:
    """Removes nodes, and gives their clusters up or has them repaired."""

    def __init__(self, life: Lifecycle) -> None:
        self.life = self._life = life
        self._placement, self._membership = life.placement, life.placement.membership
        self._ledger, self._checkpoints, self._recovery = life.ledger, life.checkpoints, life.recovery
        self._rounds, self._plan_trigger = life.rounds, life.plan_trigger
        self._num_stuck: Counter[tuple[NodeId, ...]] = Counter()

    def leave(self, name: NodeId, leave: Leave, now: float) -> _Result:
        """Remove a node that wants to leave: at once, or when others have what it has."""
        if leave.can_hand_over and self._life.can_repair and self._recovery.needs(name):
            self._plan_trigger.reset(now)
            return self._recovery.begin_leave(name, leave.reason, now)
        gone = self.remove(name, leave.reason, now)
        return gone if isinstance(gone, str) else [*gone, Evict(name, "goodbye")]

    def remove(self, name: NodeId, reason: str, now: float, since: float | None = None) -> _Result:
        """Forget a node; its cluster stands still, or ends where nothing is repaired any more."""
        if name not in self._membership:
            return f"{name} is no member, so it cannot leave"
        self._membership.remove(name)
        cluster, ended = self._placement.cluster_of(name), self._rounds.leave(name, reason, now)
        self._recovery.forget(name)
        self._plan_trigger.reset(now)
        actions: list[Action] = [Notify(Left(name, reason))]
        if self._life.phase is JobPhase.FINISHED:
            return actions
        actions += self._life.end_round(ended)
        if cluster is not None:
            actions += self._give_up_stage(cluster, f"{name}: {reason}", now, now if since is None else since)
        is_collecting = self._life.has_begun and self._life.phase is JobPhase.COLLECTING
        is_empty = is_collecting and not len(self._membership)
        return [*actions, *(self._plan_trigger.notify_shortage() if is_empty else [])]

    def evict(
        self, gone: Iterable[tuple[NodeId, str, str]], now: float, *, is_fault: bool = False
    ) -> list[Action]:
        """Remove nodes, with a reason and what they are told; what one at fault counted is trained again."""
        actions: list[Action] = []
        for name, reason, told in gone:
            actions += self.undo(name) if is_fault else []
            left = self.remove(name, reason, now)
            if not isinstance(left, str):  # else it went by itself, before it was found idle
                actions += [*left, Evict(name, told, is_fault)]
        return actions

    def evict_convicted(self, names: Iterable[NodeId], reason: str, now: float) -> list[Action]:
        """Remove nodes for good that others found to lie; what counted on their word is trained again.

        One that got its average from another cluster may be deceived itself: it may come again.
        """
        actions: list[Action] = []
        for name in names:
            cluster = self._placement.cluster_of(name)
            is_fault = cluster is None or reason != UNLIKE or not self._ledger.progress.is_fed(cluster)
            actions += [] if is_fault else self.undo(name)
            actions += self.evict([(name, reason, reason)], now, is_fault=is_fault)
        return actions

    def undo(self, name: NodeId) -> list[Notify]:
        """Have trained again what counts on the word of a node's cluster alone, while there is training."""
        if self._life.phase not in (JobPhase.TRAINING, JobPhase.AVERAGING):
            return []
        cluster = self._placement.cluster_of(name)
        num_undone = self._ledger.undo(name) + (0 if cluster is None else self._ledger.undo(cluster.root))
        return [Notify(WorkUndone(name, num_undone))] if num_undone else []

    def evict_idle(self, names: Iterable[NodeId], now: float) -> list[Action]:
        """Remove nodes that do no work; a provider may start them again."""
        return self.evict(((name, IDLE, f"{IDLE}; start it again") for name in names), now)

    def evict_liars(self, liars: Iterable[tuple[NodeId, str]], now: float) -> list[Action]:
        """Remove nodes for good that rounds found to lie."""
        gone = [(name, f"it lies: {reason}", f"it is sent away: {reason}") for name, reason in liars]
        return self.evict(gone, now, is_fault=True)

    def evict_gone(self, now: float) -> list[Action]:
        """Remove nodes that nobody needs any more, that did not come back or that do not answer."""
        is_keeping = self._life.phase is JobPhase.KEEPING
        silent = self._checkpoints.find_silent(now) if is_keeping else ()
        gone = [*self._recovery.find_gone(now), *((x, f"it {self._checkpoints.silence}") for x in silent)]
        return self.evict(((name, reason, "goodbye") for name, reason in gone), now)

    def rebuild(self, stuck: Iterable[ClusterState], now: float) -> list[Action]:
        """Build clusters anew in which all nodes answer and nothing moves; a node alone has one more chance.

        In the last evaluation nothing is built: the cluster whose weights are to be kept leaves it out.
        """
        actions: list[Action] = []
        for cluster in (each for each in stuck if each in self._placement.running):
            others = (each for each in self._placement.running if each is not cluster)
            is_last = not any(map(self._ledger.progress.knows, others))
            if self._life.phase is JobPhase.EVALUATING and is_last:
                self._ledger.skip_evaluation()
                actions.append(Notify(NotEvaluated(cluster.name)))
                continue
            self._plan_trigger.reset(now)
            # Exact shares count together: whoever others blame may have done its own.
            has_worked = self._placement.is_exact or self._ledger.progress.has_trained(cluster)
            self._num_stuck[cluster.nodes] += 1 if has_worked else 2
            if len(cluster.nodes) == 1 and self._num_stuck[cluster.nodes] > 1:
                actions += self.evict_idle(cluster.nodes, now)
                continue
            actions += self._give_up_stage(cluster, "it has work, and nothing moves", now, now)
        return actions

    def _give_up_stage(self, cluster: ClusterState, reason: str, now: float, since: float) -> list[Action]:
        if self._life.can_repair:
            return self._recovery.mark_broken(cluster, reason, since)
        given_back, lost = self._ledger.release(cluster)
        actions: list[Action] = [*self._placement.dissolve([cluster])]
        actions.append(Notify(ClusterDissolved(cluster.name, reason, given_back, lost)))
        self._checkpoints.drop(cluster)
        is_new = not self._ledger.num_counted
        if any(is_new or self._ledger.progress.knows(each) for each in self._placement.running):
            return actions
        return actions + self._life.start_over(now)


class Duties:
    """What is to be done after every event, as far as nobody has to be waited for."""

    def __init__(
        self, settings: JobSettings, departures: Departures, inquiries: Inquiries, spot_checks: SpotChecks
    ) -> None:
        self._settings, self._departures, self._inquiries = settings, departures, inquiries
        self._life, self._spot_checks = (life := departures.life), spot_checks
        self._placement, self._ledger, self._checkpoints = life.placement, life.ledger, life.checkpoints
        self._recovery, self._rounds, self._plan_trigger = life.recovery, life.rounds, life.plan_trigger
        self.policy = CheckpointPolicy(life.placement, life.ledger, life.checkpoints)

    def due(self, now: float) -> float | None:
        """Return when something is to be done, if nothing else happens."""
        life, phase = self._life, self._life.phase
        times = [self._recovery.due(now)]
        if phase is JobPhase.COLLECTING:
            times.append(self._plan_trigger.plan_due)
        elif phase is not JobPhase.FINISHED:
            times.append(self._rounds.due)
        if phase is JobPhase.KEEPING:
            times.append(self._checkpoints.answer_by)
        elif life.is_at_work:
            times.append(self._inquiries.due)
        if phase in (JobPhase.TRAINING, JobPhase.AVERAGING):
            times.append(self._spot_checks.due)
        if phase is JobPhase.TRAINING:
            times += [life.stop_by, life.end_by]
            if life.stop_by is None:
                times += [self._checkpoints.due(self._checkpoint_every), self._recovery.backups.due]
            if self._may_repair(now):
                times.append(self._plan_trigger.repair_due(self._recovery.is_urgent))
        return min((time for time in times if time is not None), default=None)

    def wants_round(self, num_updates: int, now: float) -> bool:
        """Return whether a round would be opened if clusters had made so many updates."""
        if self._life.phase is not JobPhase.TRAINING or self._life.stop_by is not None:
            return False
        is_held = self._recovery.is_urgent or self._spot_checks.is_waiting(now)
        return self._rounds.is_due(num_updates, now) and not is_held

    def advance(self, now: float) -> list[Action]:
        """Do what is due in this phase; a duty may bring the job into its next one."""
        if not self._life.has_begun:
            return []
        life, actions = self._life, self._recovery.roll_out()
        if self._recovery.is_rolling_out:
            return actions
        duties: tuple[tuple[tuple[JobPhase, ...], Callable[[float], Sequence[Action]]], ...] = (
            ((JobPhase.COLLECTING,), self._plan_trigger.ask_for_plan),
            (tuple(JobPhase), self._evict),
            ((JobPhase.TRAINING,), self._train),
            ((JobPhase.AVERAGING,), self._average),
            ((JobPhase.EVALUATING,), self._evaluate),
            ((JobPhase.KEEPING,), self._collect_result),
            ((JobPhase.TRAINING, JobPhase.EVALUATING), self._retain_inquiries),
            ((JobPhase.COLLECTING,), life.measure),  # perhaps training has just begun again
        )
        self._spot_checks.expire(now)
        for phases, duty in duties:
            if life.phase in phases:
                actions += duty(now)
        return actions

    def _evict(self, now: float) -> list[Action]:
        """Send nodes away that have left, do not answer or do nothing; rebuild clusters that are stuck."""
        idle, stuck = self._inquiries.conclude(now) if self._life.is_at_work else ([], [])
        actions = self._departures.evict_gone(now)
        actions += self._departures.evict_idle(idle, now)
        actions += self._departures.evict_liars(self._rounds.pop_liars(), now)
        return actions + self._departures.rebuild([*stuck, *self._rounds.pop_stuck()], now)

    def _train(self, now: float) -> list[Action]:
        """Grant leases; average, back up and keep what is trained; repair the plan; see when it is enough."""
        life = self._life
        if life.stop_by is not None and now >= life.stop_by:
            if not self._placement.running:
                return life.start_over(now)
            self._ledger.give_up_leases()
        if life.alarm is not None and life.stop_by is None:
            return life.roll_back(life.alarm, now)
        held = self._recovery.release_held(self._plan_trigger.fits, now)
        actions = life.repair(held, now) if held is not None else []
        if life.phase is not JobPhase.TRAINING or self._recovery.is_rolling_out:
            return actions
        if not self._placement.is_exact:
            actions += life.report(self._ledger.end_exact(self._placement.running))
        actions += life.rate_news.tell()
        actions += self._ledger.fill(self._placement, self._checkpoints.held)
        if life.may_end(now):
            life.enter(JobPhase.AVERAGING)
            self._recovery.forget_held()
        elif life.stop_by is None:
            actions += self._keep_safe(now)
        elif self._placement.is_exact:  # what is under way needs its gradient rounds
            actions += self._rounds.open_due(now)
        if self._may_repair(now):
            actions += self._plan_trigger.ask_for_repair(now, self._recovery.is_urgent)
        return actions

    def _may_repair(self, now: float) -> bool:
        return self._life.can_repair and not self._recovery.can_wait(now)

    @property
    def _checkpoint_every(self) -> float | None:
        is_wanted = self._life.stop_by is None and self._placement.running
        return self._settings.checkpoint_every if is_wanted else None

    def _keep_safe(self, now: float) -> list[Action]:
        """Order backups, open a round, expire and begin checkpoints, as each is due."""
        actions: list[Action] = [*self._recovery.backups.order(self._ledger.progress.samples_seen, now)]
        # Else the rings are soon others. A cluster that drains needs its gradient rounds to finish.
        has_no_rings = self._placement.has_broken if self._placement.is_exact else self._recovery.is_urgent
        # The next round takes the average away on which others are finding losses again.
        if not has_no_rings and not self._spot_checks.is_waiting(now):
            actions += self._rounds.open_due(now)
        actions += self._checkpoints.order(now)
        fault = self._checkpoints.expire(now)
        if fault is not None:
            actions += [Notify(NotCheckpointed(fault))] if fault else []
            actions += self._ledger.fill(self._placement)
        is_time = self._checkpoints.is_time(self._checkpoint_every, now)
        if is_time or self._recovery.wants_last():
            actions += self.policy.begin_checkpoint(now, can_wait=is_time)
        return actions

    def keep_best(self, cluster: ClusterState, results: Sequence[Evaluated], now: float) -> list[Send]:
        """Begin a checkpoint after an evaluation that is the best so far; record what it says of the end."""
        if self._life.phase is JobPhase.EVALUATING:
            self.policy.record_last(cluster, results)
        if self._life.phase is not JobPhase.TRAINING or self._checkpoint_every is None:
            return []
        return self.policy.keep_best(cluster, results, now)

    def make_checkpoint(self, now: float) -> list[Action]:
        """Begin a checkpoint that somebody asked for, or say why not."""
        is_training = self._life.phase is JobPhase.TRAINING and self._life.stop_by is None
        reason = self._checkpoints.refuse(is_training, bool(self._placement.running), self.policy.is_calm)
        return [Notify(NotCheckpointed(reason))] if reason else [*self.policy.begin_checkpoint(now)]

    def _average(self, now: float) -> list[Action]:
        """Average for the last time; then clusters show that they train, or their work is done again."""
        if not self._ledger.is_finished:
            self._rounds.expect_last()
            self._life.enter(JobPhase.TRAINING)
            return self._train(now)
        actions: list[Action] = [*self._rounds.open_last(now)]
        if self._rounds.due is not None:
            return actions
        if self._life.stop_by is None:
            actions += self._spot_checks.close(now)
            undone = [x for each in self._spot_checks.pop_unproven() for x in self._departures.undo(each)]
            if undone:
                return [*actions, *undone, *self._average(now)]
        if self._spot_checks.is_waiting(now):
            return actions
        self.policy.start_last_evaluation()
        self._life.enter(JobPhase.EVALUATING)
        return actions

    def _evaluate(self, _: float) -> list[Action]:
        actions: list[Action] = [*self._life.report(()), *self._ledger.fill(self._placement)]
        if not self._ledger.is_finished:
            return actions
        if self.policy.wants_opinion:
            self._ledger.start_evaluation(but=self.policy.asked)
            return [*actions, *self._ledger.fill(self._placement)]
        if self.policy.is_worse_than_best:
            return [*actions, *self._life.hand_in_best()]
        self._life.enter(JobPhase.KEEPING)
        return actions

    def _collect_result(self, now: float) -> Sequence[Action]:
        if self._checkpoints.has_result_under_way:
            return self._checkpoints.order(now)
        return self.policy.collect_result(now)

    def _retain_inquiries(self, _: float) -> list[Action]:
        """End the inquiries of clusters that have nothing to do, or stand still for a round."""
        if self._rounds.holds_clusters:
            for cluster in self._placement.running:
                self._inquiries.cancel(cluster.cluster_id)
        self._inquiries.retain(self._ledger.is_busy)
        return []
