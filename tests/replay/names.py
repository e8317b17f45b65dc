"""How the words of the recordings are called in today's code, and what is replayed.

Recordings keep for ever the words of the day on which they were made. A rename in the code is one line in one
of the tables below; no recording changes. A record that moves to another module changes nothing here, for
records are found from the two unions by their type hints.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ravnest.config import Mean, WireFormat
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Action, Event, Received
from ravnest.hub.monitors.monitors import MonitoredCoordinator, Watch
from ravnest.protocol.training import StepReport

# Every table reads: recorded name -> present name.
CLASSES: dict[str, str] = {
    # e.g. "Dismiss": "Evict"
}
# Fields are found by the recorded name of their class.
FIELDS: dict[tuple[str, str], str] = {
    # e.g. ("LeaseGrant", "first_batch"): "first_microbatch"
    ("Notify", "news"): "notice",
}
# Values of enums are found by the recorded name of their enum.
VALUES: dict[tuple[str, str], str] = {
    # e.g. ("Fact", "speed"): "compute_speed"
}
# Phrases in sentences that people read: reasons of refusals and of notices.
SENTENCES: dict[str, str] = {
    # e.g. "batch ": "microbatch "
}
# Fields that only today's code has, by the recorded name of their class and their present name. They are
# built with this value, and have to have it in every order.
ADDED: dict[tuple[str, str], Any] = {
    # e.g. ("Send", "is_urgent"): False
    ("Stage", "activations"): WireFormat.BF16,  # as in the config of every recorded job
    ("Stage", "gradients"): WireFormat.BF16,
    ("Stage", "predicts"): True,
    ("Evaluated", "num_updates"): 0,
    ("JobSettings", "mean"): Mean.PLAIN,  # robust rounds are younger than the recordings
    ("RoundOpen", "weights"): (),
    ("RoundOpen", "resting"): (),
    ("RoundOpen", "hidden"): (),
    ("RoundReady", "parts"): (),
    ("RoundReady", "sights"): (),
    ("RoundAbort", "is_lie"): False,
    ("RoundEnded", "unlike"): (),
}

# Recorded fields whose order means nothing: the hub's own differs from process to process, for it is that of
# a set of names. They are recorded and compared in the order of their texts.
UNORDERED: set[tuple[str, str]] = {("PlanOrder", "contacts"), ("RingOrder", "contacts")}


@dataclass(frozen=True, slots=True)
class Names:
    """The tables, read in both directions; a name that is in none of them is the same in both."""

    classes: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[tuple[str, str], str] = field(default_factory=dict)
    values: Mapping[tuple[str, str], str] = field(default_factory=dict)
    sentences: Mapping[str, str] = field(default_factory=dict)
    added: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    unordered: Collection[tuple[str, str]] = ()

    def present_class(self, recorded: str) -> str:
        """Return how the code calls a recorded class."""
        return self.classes.get(recorded, recorded)

    def recorded_class(self, present: str) -> str:
        """Return how recordings call a class of the code."""
        return next((old for old, new in self.classes.items() if new == present), present)

    def present_field(self, recorded_class: str, recorded: str) -> str:
        """Return how the code calls a recorded field."""
        return self.fields.get((recorded_class, recorded), recorded)

    def recorded_field(self, recorded_class: str, present: str) -> str:
        """Return how recordings call a field of the code."""
        found = (x for (owner, x), new in self.fields.items() if (owner, new) == (recorded_class, present))
        return next(found, present)

    def present_value(self, recorded_class: str, recorded: Any) -> Any:
        """Return the value that a recorded value of an enum has in the code."""
        return self.values.get((recorded_class, recorded), recorded)

    def recorded_value(self, recorded_class: str, present: Any) -> Any:
        """Return the value that an enum's value has in recordings."""
        found = (x for (owner, x), new in self.values.items() if (owner, new) == (recorded_class, present))
        return next(found, present)

    def recorded_text(self, present: str) -> str:
        """Return a text of the code in the words of the recordings."""
        for old, new in self.sentences.items():
            present = present.replace(new, old)
        return present


NAMES = Names(CLASSES, FIELDS, VALUES, SENTENCES, ADDED, UNORDERED)
EVENTS, ORDERS = Event, Action


def is_in_log(hub: Coordinator, event: Any) -> bool:
    """Return whether an event is logged unless it is refused; reports of stages never are."""
    is_report = isinstance(event, Received) and isinstance(event.message, StepReport)
    return not is_report and hub.concerns(event)


class Replayed:
    """What is replayed, behind the few calls that a replay makes; the first event gives the job."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._made: MonitoredCoordinator | None = None

    @property
    def _monitored(self) -> MonitoredCoordinator:
        assert self._made is not None, "the first event gives the job"
        return self._made

    def begin(self, event: Any) -> None:
        """Make the coordinator of a job, once."""
        if self._made is None:
            self._made = MonitoredCoordinator(Coordinator(event), watch=self._watch)

    @property
    def due(self) -> float | None:
        """When the next tick is needed."""
        return self._monitored.due

    def concerns(self, event: Any) -> bool:
        """Return whether an event is logged unless it is refused."""
        return is_in_log(self._monitored.hub, event)

    def apply(self, event: Any) -> tuple[Any, ...]:
        """Take an event; return the orders."""
        return self._monitored.apply(event)

    def replay(self, event: Any) -> tuple[Any, ...]:
        """Take an event of the log; no monitor sees it."""
        self.begin(event)
        return self._monitored.hub.apply(event)

    def find_missing(self, key: str, build_id: int) -> str | None:
        """Return under what name somebody with this key is waited for, if it has the stage of this build."""
        return self._monitored.hub.find_missing(key, build_id)
