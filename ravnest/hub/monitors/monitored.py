"""A coordinator with its monitors: what the service, the simulator and the tests drive.

Events go to the coordinator, reports to the monitors, and every conclusion of a monitor to the coordinator as
an event. `log` gets each event that changed something, before its actions are returned; `watch` gets each
event and each report, with its actions. Nothing here does I/O.
"""

from collections.abc import Callable

from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Action, Event, Received, Tick
from ravnest.hub.monitors.monitors import Monitors
from ravnest.protocol.messages import Refusal
from ravnest.protocol.training import StepReport

Log = Callable[[Event], None]
Watch = Callable[[Event, tuple[Action, ...]], None]


def apply_logged(hub: Coordinator, event: Event, log: Log | None) -> tuple[Action, ...]:
    """Let the coordinator decide; unless it refuses the event, that is in the log when this returns."""
    is_heard = hub.concerns(event)
    actions = hub.apply(event)
    if log is not None and is_heard and not (actions and isinstance(actions[0], Refusal)):
        log(event)
    return actions


class MonitoredCoordinator:
    """Feed it every event and every message of a peer, in order; carry out what it returns, in order."""

    def __init__(
        self,
        hub: Coordinator,
        log: Log | None = None,
        watch: Watch | None = None,
        monitors: Monitors | None = None,
    ) -> None:
        self.hub = hub
        self._log, self._watch = log, watch
        self._monitors = Monitors(hub.timeouts) if monitors is None else monitors

    @property
    def due(self) -> float | None:
        """When the next Tick is needed, if nothing else happens."""
        times = (self.hub.due, self._monitors.due(self.hub))
        return min((time for time in times if time is not None), default=None)

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Take an event or a report; return what is to be done, or a Refusal alone if it changes nothing."""
        if isinstance(event, Received) and isinstance(event.message, StepReport):
            return self._record(event, event.message)
        if isinstance(event, Tick) and (self.hub.due is None or event.now < self.hub.due):
            return self._conclude(event.now)  # it is due for the monitors only, and no event
        sums = self._monitors.prepare(self.hub, event)
        actions = [] if sums is None else [*self._decide(sums)]
        decided = self._decide(event)
        if not decided or not isinstance(decided[0], Refusal):
            self._monitors.observe(self.hub, event, decided)
            return (*actions, *decided, *self._conclude(event.now))
        return (*actions, *self._conclude(event.now)) or decided

    def _record(self, event: Received, report: StepReport) -> tuple[Action, ...]:
        if self.hub.placement.cluster_of(event.sender) is None:
            self._show(event, ())
            return ()
        reason = self._monitors.record(self.hub, event.sender, report, event.now)
        if reason is not None:
            refused = (Refusal(reason),)
            self._show(event, refused)
            return refused
        self._show(event, ())
        return self._conclude(event.now)

    def _conclude(self, now: float) -> tuple[Action, ...]:
        actions: list[Action] = []
        while (conclusion := self._monitors.conclude(self.hub, now)) is not None:
            decided = self._decide(conclusion)
            self._monitors.observe(self.hub, conclusion, decided)
            actions += (each for each in decided if not isinstance(each, Refusal))
        return tuple(actions)

    def _decide(self, event: Event) -> tuple[Action, ...]:
        actions = apply_logged(self.hub, event, self._log)
        self._show(event, actions)
        return actions

    def _show(self, event: Event, actions: tuple[Action, ...]) -> None:
        if self._watch is not None:
            self._watch(event, actions)
