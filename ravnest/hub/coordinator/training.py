"""Training: the duties of the hub while clusters train.

It grants leases, orders backups, opens rounds, begins checkpoints and asks for repaired plans, each when it
is due. When all is trained, or a stopped job has finished what was under way, the last round comes.
"""

import math
from collections.abc import Sequence

from ravnest.hub.coordinator.checkpoints import CheckpointCollector
from ravnest.hub.coordinator.events import Action, JobGiven, Notify, Send
from ravnest.hub.coordinator.ledger import Ledger
from ravnest.hub.coordinator.lifecycle import Lifecycle
from ravnest.hub.coordinator.notices import Evaluated, NotCheckpointed
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.hub.coordinator.plan_trigger import PlanTrigger
from ravnest.hub.coordinator.recovery import Recovery
from ravnest.hub.coordinator.rounds import Rounds


class Training:
    """What is to be done after every event in the phase TRAINING."""

    def __init__(
        self,
        job: JobGiven,
        placement: Placement,
        ledger: Ledger,
        checkpoints: CheckpointCollector,
        recovery: Recovery,
        rounds: Rounds,
        plan_trigger: PlanTrigger,
        life: Lifecycle,
    ) -> None:
        self._settings = job.settings
        self._placement, self._ledger, self._checkpoints = placement, ledger, checkpoints
        self._recovery, self._rounds, self._plan_trigger, self._life = recovery, rounds, plan_trigger, life
        self.is_calm = True  # as the monitors say
        self._best_loss = math.inf  # of all evaluations

    def find_due(self, now: float) -> list[float | None]:
        """Return when the next duties are due."""
        life = self._life
        return [
            life.stop_by,
            life.end_by,
            self._checkpoints.due(self._checkpoint_every),
            self._plan_trigger.repair_due(self._recovery.is_urgent) if self._may_repair(now) else None,
            self._recovery.backups.due if life.stop_by is None else None,
        ]

    def wants_round(self, num_updates: int, now: float) -> bool:
        """Return whether a round would be opened if clusters had made so many updates."""
        if self._life.phase is not JobPhase.TRAINING or self._life.stop_by is not None:
            return False
        return self._rounds.is_due(num_updates, now) and not self._recovery.is_urgent

    def advance(self, now: float) -> list[Action]:
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
        if life.phase is not JobPhase.TRAINING:
            return actions
        if not self._placement.is_exact:
            actions += life.report(self._ledger.end_exact(self._placement.running))
        actions += self._ledger.fill(self._placement, self._checkpoints.held)
        if self._ledger.is_finished and self._placement.running and life.may_end(now):
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
        if not has_no_rings:
            actions += self._rounds.open_due(now)
        silence = self._checkpoints.expire(now)
        if silence:
            actions += [Notify(NotCheckpointed(silence)), *self._ledger.fill(self._placement)]
        if self._checkpoints.is_time(self._checkpoint_every, now):
            actions += self._begin_checkpoint(now)
        return actions

    def keep_best(self, cluster: ClusterState, results: Sequence[Evaluated], now: float) -> list[Send]:
        """Begin a checkpoint of what a cluster has just evaluated, before it trains on, if it is the best."""
        if self._life.phase is not JobPhase.TRAINING or self._checkpoint_every is None:
            return []
        sends: list[Send] = []
        for result in results:
            if result.loss is not None and result.loss < self._best_loss:
                self._best_loss = result.loss
                sends += self._checkpoints.start(cluster, now, self._ledger.books, evaluated=result)
        return sends

    def _begin_checkpoint(self, now: float) -> list[Send]:
        """Begin a checkpoint, if what is trained is worth keeping."""
        if not self.is_calm:
            self._checkpoints.postpone(now)
            return []
        keeper = self._ledger.progress.most_trained(self._placement.running)
        return self._checkpoints.start(keeper, now, self._ledger.books)
