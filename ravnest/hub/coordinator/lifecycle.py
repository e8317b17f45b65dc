"""The life of a job: its phase, the plans it follows, and how it ends or begins again.

A job ends when all is trained and one cluster's weights are kept, when it is stopped, or when its loss goes
wrong too often. It begins again from the last checkpoint when no node has what was trained.
"""

from collections.abc import Sequence
from itertools import takewhile

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.checkpoints import CheckpointCollector
from ravnest.hub.coordinator.events import (
    Abandon,
    Action,
    Collected,
    Finish,
    JobGiven,
    LossAlarm,
    Notify,
    PlanMade,
    Restarted,
    Send,
)
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.notices import (
    CheckpointIsResult,
    EpochDone,
    Evaluated,
    FromCheckpoint,
    Repaired,
    Resumed,
    Stopping,
    WentWrong,
    WorkLost,
)
from ravnest.hub.coordinator.phases import JOB_TRANSITIONS, JobPhase, follow
from ravnest.hub.coordinator.placement import Placement
from ravnest.hub.coordinator.plan_trigger import PlanTrigger
from ravnest.hub.coordinator.recovery import Recovery
from ravnest.hub.coordinator.rounds import Ended, Rounds
from ravnest.protocol.membership import Stop

_MOST_ALARMS = 3
_Result = list[Action] | str  # actions, or why the event is refused


class EpochReports:
    """Lets reports out in the order of epochs: clusters may end a later one first, and its report waits."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.restart()

    def restart(self) -> None:
        """Begin from the books; of an epoch that was over there before an earlier one no loss is known."""
        ledger, under_way = self._ledger, self._ledger.epochs_under_way
        later = range(min(under_way, default=ledger.num_begun), ledger.num_begun)
        size = ledger.settings.num_samples
        over = [EpochDone(epoch + 1, size, 0, None) for epoch in later if epoch not in under_way]
        self._waiting: list[EpochDone | Evaluated] = [*over]

    def add(self, reports: Sequence[EpochDone | Evaluated], is_end: bool) -> list[EpochDone | Evaluated]:
        """Return the reports whose turn it is; at the end, when no more epochs are over, all."""
        given = sorted([*self._waiting, *reports], key=lambda x: (x.epoch, isinstance(x, Evaluated)))
        ready = given if is_end else [*takewhile(self._is_next, given)]
        self._waiting = given[len(ready) :]
        return ready

    def _is_next(self, report: EpochDone | Evaluated) -> bool:
        num_before = report.epoch - isinstance(report, EpochDone)
        return min(self._ledger.epochs_under_way, default=num_before) >= num_before


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
        self._placement, self._membership = placement, placement.membership
        self._ledger, self._checkpoints, self._recovery = ledger, checkpoints, recovery
        self._rounds, self._plan_trigger = rounds, plan_trigger
        self._reports = EpochReports(ledger)
        self.phase = JobPhase.COLLECTING
        self.has_begun = False
        self.stop_by: float | None = None  # once it is stopped
        self.end_by: float | None = None  # once all is trained, and a cluster stands still
        self.alarm: LossAlarm | None = None  # until training goes back
        self._num_alarms = 0  # since a checkpoint that is past the last of them
        self._alarmed_at = 0  # samples that were trained at the alarm that came furthest

    @property
    def can_repair(self) -> bool:
        """Whether clusters are repaired: until the end, or until a cluster has what is to be kept."""
        return self.phase is JobPhase.TRAINING and (self.stop_by is None or not self._placement.running)

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
        return self._tell_checkpoint()

    def _tell_checkpoint(self) -> list[Action]:
        saved = self._recovery.saved
        return [Notify(FromCheckpoint(saved.num_counted))] if saved is not None else []

    def restart(self, event: Restarted, now: float) -> _Result:
        """Go on after the hub was away, with what its nodes still have."""
        if not self.has_begun or self.phase is JobPhase.FINISHED:
            return "there is nothing to go on with"
        ended = self._rounds.cancel("the hub was away", now)
        actions: list[Action] = [Notify(Resumed(self._ledger.num_counted, len(self._membership)))]
        actions += self.end_round(ended)
        self._recovery.forget_held()
        self.end_by = None
        actions += self._recovery.restart(event.books, now)
        self._rounds.restart()
        self._plan_trigger.reset(now)
        self.enter(JobPhase.TRAINING if self._placement.clusters else JobPhase.COLLECTING)
        return actions

    def end_round(self, ended: Ended | None) -> list[Action]:
        """Tell the outcome of a round, if it has one, and note which clusters now know the same."""
        if ended is None:
            return []
        if not ended.told.is_committed:
            return [*ended.sends, Notify(ended.told)]
        took_part = {send.to for send in ended.sends}
        clusters = [each for each in self._placement.running if each.root in took_part]
        if ended.sums_gradients:  # one for every batch, so people are told of those that fail
            done = self._ledger.note_summed(clusters)
            return [*ended.sends, Notify(self._ledger.trained), *self.report(done)]
        self._ledger.progress.record_agreement(clusters, ended.told.round_id)
        return [*ended.sends, Notify(ended.told)]

    def adopt(self, made: PlanMade, now: float) -> _Result:
        """Follow a plan, unless members changed while it was made: another one is on its way then."""
        if self.phase not in (JobPhase.COLLECTING, JobPhase.TRAINING) or not self._plan_trigger.accept(made):
            return f"plan {made.plan_id} comes too late: others are here now"
        told: list[Action] = [*self._plan_trigger.notify_shortage(made.shortage)]
        if self.phase is JobPhase.COLLECTING:
            self.enter(JobPhase.TRAINING if made.plan else JobPhase.COLLECTING)
            return [*told, *(self._recovery.form(made) if made.plan else [])]
        if made.plan is None:
            return [*told, *self.start_over(now)]
        return told if self._recovery.hold(made, now) else told + self.repair(made, now)

    def repair(self, made: PlanMade, now: float) -> list[Action]:
        """Go on with a repaired plan."""
        assert made.plan is not None
        told: list[Action] = []
        if made.plan.rings != self._placement.rings or self._placement.is_exact:
            told += self.end_round(self._rounds.cancel("the rings are others now", now))
        told += [Notify(Repaired(made.plan, made.reason))] if made.reason else []
        followed = self._recovery.repair(made)
        return told + (self.start_over(now) if followed is None else followed)

    def may_end(self, now: float) -> bool:
        """Return whether all clusters can take part in the last round, or were waited for long enough."""
        if self.stop_by is not None or len(self._placement.running) == len(self._placement.clusters):
            return True
        self.end_by = now + self._timeouts.end_seconds if self.end_by is None else self.end_by
        return now >= self.end_by

    def stop(self, reason: str, now: float) -> _Result:
        """End as if all was trained, as soon as what is under way is; at once if nobody trains yet."""
        if not self.is_under_way:
            return f"there is no job to stop ({reason}), or it ends already"
        self.stop_by = now + self._timeouts.stop_seconds
        told = Notify(Stopping(reason))
        if not self._placement.clusters or not (self._placement.running or self._ledger.num_counted):
            return [told, *self.start_over(now)]
        self._ledger.stop()
        return [told]

    def roll_back(self, alarm: LossAlarm, now: float) -> list[Action]:
        """Go back to the last checkpoint, if there is one; too often in a row is the end."""
        self._num_alarms += 1
        self._alarmed_at = max(self._alarmed_at, self._ledger.num_counted)
        self.alarm = None
        has_checkpoint = self._recovery.saved is not None
        told = Notify(WentWrong(alarm.reason, alarm.suspect, has_checkpoint))
        if self._num_alarms <= _MOST_ALARMS:
            return [told, *(self.start_over(now) if has_checkpoint else [])]
        self._ledger.stop()
        self._ledger.give_up_leases()
        self.enter(JobPhase.FINISHED)
        stops = [Send(name, Stop("the job was ended by its guard")) for name in self._membership]
        told_why = f"{alarm.reason}, seen first at {alarm.suspect}, for the {self._num_alarms}th time"
        advice = "lower the learning rate, or look at the data; the last good checkpoint is kept"
        return [told, *stops, Abandon(f"training is ended: {told_why}; {advice}", is_guarded=True)]

    def start_over(self, now: float) -> list[Action]:
        """Go back to collecting, with what the hub has and all members; or end with that, if it is enough."""
        actions = self.end_round(self._rounds.cancel("training begins again", now))
        for cluster in self._placement.clusters:
            self._checkpoints.drop(cluster)
        actions += self._placement.dissolve(self._placement.clusters)
        lost = self._ledger.restart(self._recovery.saved)
        self._reports.restart()
        self._recovery.forget_held()
        self.end_by = None
        self._rounds.restart()
        self.alarm = None
        self._plan_trigger.reset(now)
        if self.stop_by is None and not self._ledger.is_finished:
            self.enter(JobPhase.COLLECTING)
            actions += [Notify(WorkLost(lost)), *self._tell_checkpoint()] if lost else []
            return actions if len(self._membership) else [*actions, *self._plan_trigger.notify_shortage()]
        self.enter(JobPhase.FINISHED)
        actions += [Send(name, Stop("the job was stopped")) for name in self._membership]
        if self._recovery.saved is None:
            return [
                *actions,
                Abandon("the job was stopped when there was nothing to keep, no checkpoint either"),
            ]
        trained = self._ledger.trained
        return [*actions, Notify(CheckpointIsResult(trained.num_samples, trained.num_total)), Finish((), ())]

    def report(self, reports: Sequence[EpochDone | Evaluated]) -> list[Action]:
        """Tell of epochs and evaluations that are over, in order."""
        ready = self._reports.add(reports, is_end=self.phase is JobPhase.EVALUATING)
        self._ledger.history += ready
        return [Notify(each) for each in ready]

    def end_collection(self, collected: Collected, now: float) -> _Result:
        """Go on when something is on disk: a checkpoint, or the result, whoever has left meanwhile."""
        result = self._checkpoints.find_result(collected.number)
        if result is not None and self.phase is not JobPhase.FINISHED:
            if self.phase is not JobPhase.KEEPING:  # nobody was left, and training began again
                self._ledger.restart(result.books)
            self.enter(JobPhase.FINISHED)
            stops: list[Action] = [Send(name, Stop("the job is done")) for name in self._membership]
            return [*stops, Finish(result.parts, tuple(self._ledger.history))]
        if result is not None or not self._checkpoints.has_asked_for(collected.number):
            return f"nobody asked to collect number {collected.number}"
        kept = self._recovery.end_checkpoint(collected, now)
        saved = self._recovery.saved
        if not collected.fault and saved is not None and saved.num_counted > self._alarmed_at:
            self._num_alarms = 0  # a checkpoint before that place says nothing of what comes there
        return kept
