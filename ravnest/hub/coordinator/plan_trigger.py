"""When a plan or a repair is asked for, and whether the answer fits the members that are here by then.

Members that are not measured yet are waited for.
"""

import math

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.events import JobGiven, MakeParts, MakePlan, Notify, PlanMade, Send
from ravnest.hub.coordinator.notices import Waiting
from ravnest.hub.coordinator.placement import Placement
from ravnest.hub.coordinator.probes import order_probes, probe_due

NOBODY = "nobody is here; training goes on when enough nodes have joined: `ravnest token` says how"
_Asked = list[MakePlan | MakeParts | Send | Notify]


class PlanTrigger:
    """Asks once for each set of members: when all expected ones are here, or when it is quiet."""

    def __init__(self, job: JobGiven, placement: Placement, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._job, self._timeouts = job, timeouts
        self._placement, self._membership = placement, placement.membership
        self._changed_at = 0.0  # when a member last came, went or changed
        self._was_asked = False  # for a plan of these members
        self._plan_id = 0  # of the plan that is being made
        self.shortage = ""  # as people were told
        self._had_plan = False

    def reset(self, now: float) -> None:
        """A member came, went or changed: another plan is needed."""
        self._changed_at, self._was_asked = now, False

    @property
    def plan_due(self) -> float | None:
        """When to look again for a plan, if nothing else happens."""
        if self._membership.unmeasured:
            return probe_due(self._membership)
        if not len(self._membership) or self._was_asked or self._membership.missing:
            return None
        longest = self._timeouts.replan_seconds if self._had_plan else math.inf
        return self._changed_at + min(self._job.settings.settle_seconds, longest)

    def ask_for_plan(self, now: float) -> _Asked:
        """Have newcomers measured, and a plan formed if it is time for that."""
        actions: _Asked = [*order_probes(self._placement, self._job.profile, now, self._timeouts)]
        due, expected = self.plan_due, self._job.settings.expected_nodes
        is_enough = not self._had_plan and len(self._membership) >= expected > 0
        if self._membership.unmeasured or due is None or not (now >= due or is_enough):
            return actions
        return [*actions, self._ask()]

    def repair_due(self, is_urgent: bool) -> float | None:
        """Return when to ask for a repair, if nothing else happens."""
        if self._membership.unmeasured and not is_urgent:
            return probe_due(self._membership)
        quiet_seconds = 0.0 if is_urgent else self._timeouts.join_seconds
        return None if self._was_asked else self._changed_at + quiet_seconds

    def ask_for_repair(self, now: float, is_urgent: bool) -> _Asked:
        """Have newcomers measured, and the plan repaired if it is time for that."""
        actions: _Asked = [*order_probes(self._placement, self._job.profile, now, self._timeouts)]
        must_wait = bool(self._membership.unmeasured) and not is_urgent
        due = None if must_wait else self.repair_due(is_urgent)
        return actions if due is None or now < due else [*actions, self._ask()]

    def _ask(self) -> MakePlan:
        asked = self._placement.ask_for_plan()
        self._was_asked, self._plan_id = True, asked.plan_id
        return asked

    def accept(self, made: PlanMade) -> bool:
        """Return whether a plan, or a shortage, is of the members that are here."""
        self._had_plan |= self.fits(made) and made.plan is not None
        return self.fits(made)

    def fits(self, made: PlanMade) -> bool:
        """Return whether no member came, went or changed since a plan was asked for."""
        return self._was_asked and made.plan_id == self._plan_id

    def notify_shortage(self, shortage: str = NOBODY) -> list[Notify]:
        """Say once why there is no plan."""
        told, self.shortage = self.shortage, shortage
        return [Notify(Waiting(shortage))] if shortage not in ("", told) else []
