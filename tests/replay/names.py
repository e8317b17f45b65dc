"""How the words of the recordings are called in today's code, and what is replayed.

Recordings keep for ever the words of the day on which they were made. A rename in the code is one line in one
of the tables below; no recording changes. A record that moves to another module changes nothing here, for
records are found from the two unions by their type hints.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Action, ClusterHeard, Event, Received
from ravnest.hub.monitors.monitored import MonitoredCoordinator, Watch
from ravnest.hub.monitors.monitors import Monitors
from ravnest.protocol.training import StepReport

# Every table reads: recorded name -> present name.
CLASSES: dict[str, str] = {
    "Tell": "Notify",
    "Dismiss": "Evict",
    "KeptPart": "CheckpointPart",
    "DroppedBatch": "DroppedMicrobatch",
    "BatchDropped": "MicrobatchDropped",
    "Books": "LedgerState",
    "Optimizer": "OptimizerKind",
    "Phase": "JobPhase",
}
_OF_BUILDS = """
    Activation Complaint DroppedBatch FieldParts Gradient Hello LearningRate LeaseDone LeaseGrant Leave Pace
    PlanOrder RingOrder RoundOpen SendFields SnapshotMade SnapshotOrder StageMissing StageParts StageReady
    StepReport
""".split()  # noqa: SIM905
# Fields are found by the recorded name of their class.
FIELDS: dict[tuple[str, str], str] = {
    **{(name, "epoch"): "build_id" for name in _OF_BUILDS},
    **{(name, "epoch"): "plan_id" for name in ("Plan", "MakePlan", "PlanMade")},
    **{(name, "plan"): "plan_id" for name in ("PlanOrder", "RingOrder", "BackupOrder", "BackupKept")},
    **{(name, "plan"): "plan_id" for name in ("AnchorQuery", "AnchorPart")},
    **{(name, "batch"): "microbatch" for name in ("Activation", "BatchDropped", "DroppedBatch")},
    **{(name, "batch"): "microbatch" for name in ("FieldParts", "Gradient", "StepReport")},
    **{(name, "first_batch"): "first_microbatch" for name in ("LeaseGrant", "SendFields")},
    **{(name, "base"): "anchor_round" for name in ("RoundOpen", "StageParts", "AnchorQuery", "AnchorPart")},
    ("StageParts", "keeps"): "is_kept",
}
# Values of enums are found by the recorded name of their enum.
VALUES: dict[tuple[str, str], str] = {
    # e.g. ("Fact", "speed"): "compute_speed"
}
# Phrases in sentences that people read: reasons of refusals and of notices.
SENTENCES: dict[str, str] = {
    "batch ": "microbatch ",
    "batches were dropped": "microbatches were dropped",
    "DroppedBatch": "DroppedMicrobatch",
}
# Fields that only today's code has, by the recorded name of their class and their present name. They are
# built with this value, and have to have it in every order.
ADDED: dict[tuple[str, str], Any] = {
    # e.g. ("Send", "is_urgent"): False
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


class Replayed:
    """What is replayed, behind the few calls that a replay makes; the first event gives the job.

    Recordings have reports of stages as events, from the day when the log had them too. They go to the
    monitors, as in the service, and what comes of the conclusions is what came of the report. Recorded hubs
    that went on from their log had all they had heard; so a replay keeps its monitors over a restart.
    """

    def __init__(self, watch: Watch, monitors: Monitors) -> None:
        self._watch, self._monitors = watch, monitors
        self._made: MonitoredCoordinator | None = None

    @property
    def _monitored(self) -> MonitoredCoordinator:
        assert self._made is not None, "the first event gives the job"
        return self._made

    @property
    def _hub(self) -> Coordinator:
        return self._monitored.hub

    def _begin(self, event: Any) -> None:
        if self._made is None:
            hub = Coordinator(event)
            self._made = MonitoredCoordinator(hub, watch=self._watch, monitors=self._monitors)

    @property
    def due(self) -> float | None:
        """When the next tick is needed."""
        return self._monitored.due

    def concerns(self, event: Any) -> bool:
        """Return whether an event may change something: only then was it logged, unless it was refused."""
        if self._made is None:
            return True
        if isinstance(event, Received) and isinstance(event.message, StepReport):
            return self._hub.placement.cluster_of(event.sender) is not None
        return self._hub.concerns(event)

    def apply(self, event: Any) -> tuple[Any, ...]:
        """Take an event; return the orders."""
        self._begin(event)
        orders = self._monitored.apply(event)
        is_report = isinstance(event, Received) and isinstance(event.message, StepReport)
        if not is_report or orders:
            return orders
        return self._monitored.apply(ClusterHeard("none", event.now))  # the duties of the moment, as it was

    def replay(self, event: Any) -> tuple[Any, ...]:
        """Take an event of the log; no monitor sees it."""
        self._begin(event)
        return self._hub.apply(event)

    def find_missing(self, key: str, epoch: int) -> str | None:
        """Return under what name somebody with this key is waited for, if it has the stage of this epoch."""
        return self._hub.find_missing(key, epoch)
