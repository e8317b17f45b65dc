"""Checkpoints: one cluster's state is collected from its nodes, now and then, and at the end as the result.

If that cluster breaks, another one is asked, or the checkpoint waits for the next time.
"""

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.events import CheckpointPart, Collect, Send
from ravnest.hub.coordinator.leases import LedgerState
from ravnest.hub.coordinator.notices import Evaluated
from ravnest.hub.coordinator.placement import ClusterState
from ravnest.hub.coordinator.snapshots import SnapshotDesk, SnapshotPurpose
from ravnest.ids import NodeId
from ravnest.protocol.placement import SnapshotMade

_PAUSE = 10  # times what a checkpoint takes lies between two: a slow way home is not kept busy by them


class CheckpointCollector:
    """Numbered attempts to collect one cluster's state."""

    def __init__(self, desk: SnapshotDesk, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._desk, self._timeouts = desk, timeouts
        self._keeper: ClusterState | None = None
        self._kept: dict[NodeId, SnapshotMade] = {}
        self._books: LedgerState | None = None  # of what is under way
        self._is_result = False  # that, and no checkpoint
        self._evaluated: Evaluated | None = None  # its state, if it was just evaluated
        self._results: dict[int, Collect] = {}  # that were ordered, by attempt
        self._every = 0.0
        self._started_at = 0.0
        self._next_at: float | None = None
        self._attempt = 0

    @property
    def silence(self) -> str:
        """What is wrong with a node that did not answer in time."""
        return f"did not answer within {self._timeouts.snapshot_seconds:.0f} s"

    @property
    def is_under_way(self) -> bool:
        """Whether a cluster was asked and has not died since."""
        return self._keeper is not None

    @property
    def has_result_under_way(self) -> bool:
        """Whether that is for the result."""
        return self.is_under_way and self._is_result

    @property
    def parts(self) -> tuple[CheckpointPart, ...]:
        """What all nodes of the cluster answered, in the order of the line."""
        assert self._keeper is not None
        stages = self._keeper.cluster.stages
        refs = (self._kept[stage.node].weights for stage in stages)
        return tuple(
            CheckpointPart(x.start, x.stop, x.node, ref) for x, ref in zip(stages, refs, strict=True)
        )

    @property
    def answer_by(self) -> float | None:
        """When those who have not answered are waited for no longer, if there are any."""
        if self._keeper is None or self._is_complete:
            return None
        return self._started_at + self._timeouts.snapshot_seconds

    def find_silent(self, now: float) -> tuple[NodeId, ...]:
        """Return who has not answered in time."""
        if self._keeper is None or self.answer_by is None or now < self.answer_by:
            return ()
        return tuple(name for name in self._keeper.nodes if name not in self._kept)

    def due(self, every: float | None) -> float | None:
        """Return when the next checkpoint is to be made, or the one under way given up, if there are any."""
        return self.answer_by if every is None or self.is_under_way else self._next_at

    def is_time(self, every: float | None, now: float) -> bool:
        """Return whether to make one; the first comes a whole period after training began."""
        if every is None or self.is_under_way:
            return False
        self._every = every
        if self._next_at is None:
            self._next_at = now + every
        return now >= self._next_at

    def expire(self, now: float) -> str | None:
        """Give up a checkpoint that somebody does not answer for; return who does not."""
        silent = self.find_silent(now)
        if not silent or self._is_result:
            return None
        self.end(now)
        return f"{' and '.join(silent)} {self.silence}"

    def postpone(self, now: float) -> None:
        """Make no checkpoint this time."""
        self._next_at = now + self._every

    @property
    def held(self) -> str:
        """The id of the cluster that is to train nothing until its state, which was evaluated, is written."""
        is_held = self._keeper is not None and self._evaluated is not None and not self._is_complete
        return self._keeper.cluster_id if self._keeper is not None and is_held else ""

    def start(
        self,
        cluster: ClusterState,
        now: float,
        books: LedgerState,
        *,
        is_result: bool = False,
        evaluated: Evaluated | None = None,
    ) -> list[Send]:
        """Ask every node of a cluster for its state."""
        self._keeper, self._kept, self._books, self._is_result = cluster, {}, books, is_result
        self._evaluated = evaluated
        self._desk.withdraw(SnapshotPurpose.CHECKPOINT)
        self._started_at, self._attempt = now, self._desk.new_number()
        facts = (SnapshotPurpose.CHECKPOINT, self._attempt)
        return [self._desk.ask(*facts, name, cluster.build_id, is_result) for name in cluster.nodes]

    def drop(self, cluster: ClusterState) -> None:
        """Collect no longer from a cluster that changes."""
        if self._keeper is cluster:
            self._keeper = None
            self._desk.withdraw(SnapshotPurpose.CHECKPOINT)

    def add_snapshot(self, sender: NodeId, made: SnapshotMade) -> list[Collect]:
        """Record a node's answer; with the last one, have all of them fetched."""
        self._kept[sender] = made
        if not self._is_complete:
            return []
        assert self._books is not None
        order = Collect(self._attempt, self.parts, self._books, self._is_result, self._evaluated)
        if self._is_result:
            self._results[self._attempt] = order
        return [order]

    def find_result(self, number: int) -> Collect | None:
        """Return the order that collected the result, also if its cluster is gone by now."""
        return self._results.get(number)

    def has_asked_for(self, number: int) -> bool:
        """Return whether this is the Collect whose end is awaited."""
        return self._is_complete and number == self._attempt

    def end(self, now: float) -> tuple[LedgerState, float]:
        """End a checkpoint, kept or not; return what was trained then, and the seconds it took."""
        assert self._books is not None
        seconds = now - self._started_at
        self._keeper, self._next_at = None, now + max(self._every, _PAUSE * seconds)
        self._desk.withdraw(SnapshotPurpose.CHECKPOINT)
        return self._books, seconds

    @property
    def _is_complete(self) -> bool:
        return self._keeper is not None and len(self._kept) == len(self._keeper.nodes)
