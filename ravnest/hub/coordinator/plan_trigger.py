"""When a plan or a repair is asked for, and whether what comes fits who is here. Driven by hub.state.

Whoever is not measured yet is waited for.
"""

import math

from ravnest.hub.coordinator.events import JobGiven, JobSettings, MakeParts, MakePlan, Notify, PlanMade, Send
from ravnest.hub.coordinator.membership import Membership
from ravnest.hub.coordinator.notices import Waiting
from ravnest.hub.coordinator.probes import order_probes, probe_due

_AGAIN_SECONDS = 5.0  # of quiet before another plan than the first: nobody says how many are left
_JOIN_SECONDS = 2.0  # of quiet before those who came are used: they seldom come alone
_NOBODY = "nobody is here; training begins when enough nodes have joined"


class PlanTrigger:
    """Asks once for each set of members: as soon as all who are expected came, or when it is quiet."""

    def __init__(self) -> None:
        self._changed_at = 0.0  # when somebody last came or went
        self._was_asked = False  # for a plan of these members
        self._plan_id = 0  # of the plan that is being made
        self._shortage = ""  # as people were told
        self._had_plan = False

    def note_change(self, now: float) -> None:
        """Somebody came or went."""
        self._changed_at, self._was_asked = now, False

    def due(self, settings: JobSettings, members: Membership) -> float | None:
        """Return when to look again, if nothing else happens."""
        if members.guessing:
            return probe_due(members)
        if not len(members) or self._was_asked or members.missing:
            return None
        longest = _AGAIN_SECONDS if self._had_plan else math.inf
        return self._changed_at + min(settings.settle_seconds, longest)

    def ask(
        self, job: JobGiven, members: Membership, now: float
    ) -> list[MakePlan | MakeParts | Send | Notify]:
        """Return the orders to measure who is new, and to plan if it is time for that."""
        orders: list[MakePlan | MakeParts | Send | Notify] = [*order_probes(members, job.profile, now)]
        due = self.due(job.settings, members)
        is_enough = not self._had_plan and len(members) >= job.settings.expected_nodes > 0
        if members.guessing or due is None or not (now >= due or is_enough):
            return orders
        asked = members.ask_for_plan()
        self._was_asked, self._plan_id = True, asked.plan_id
        return [*orders, asked]

    def mending_due(self, members: Membership, is_urgent: bool) -> float | None:
        """Return when to ask for a repair, if nothing else happens."""
        if members.guessing and not is_urgent:
            return probe_due(members)
        return None if self._was_asked else self._changed_at + (0.0 if is_urgent else _JOIN_SECONDS)

    def mend(
        self, job: JobGiven, members: Membership, now: float, is_urgent: bool
    ) -> list[MakePlan | MakeParts | Send | Notify]:
        """Return the orders to measure who is new, and to repair the plan if it is time for that."""
        orders: list[MakePlan | MakeParts | Send | Notify] = [*order_probes(members, job.profile, now)]
        due = None if members.guessing and not is_urgent else self.mending_due(members, is_urgent)
        if due is None or now < due:
            return orders
        asked = members.ask_for_plan()
        self._was_asked, self._plan_id = True, asked.plan_id
        return [*orders, asked]

    def take(self, made: PlanMade) -> bool:
        """Return whether a plan, or a shortage, is of those who are here."""
        self._had_plan |= self.fits(made) and made.plan is not None
        return self.fits(made)

    def fits(self, made: PlanMade) -> bool:
        """Return whether nobody came, went or changed since a plan was asked for."""
        return self._was_asked and made.plan_id == self._plan_id

    def tell_shortage(self, shortage: str = _NOBODY) -> list[Notify]:
        """Say once why there is no plan."""
        told, self._shortage = self._shortage, shortage
        return [Notify(Waiting(shortage))] if shortage not in ("", told) else []
