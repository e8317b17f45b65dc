"""Notices when training goes wrong: a loss that leaps and stays up, or microbatches that are no numbers.

It looks at the median of each cluster's losses, so one hard microbatch is no alarm, and at who dropped
the others. What is asked of an alarm is that nobody would doubt it; small troubles training heals by itself.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median, pstdev

from ravnest.ids import NodeId

_WINDOW = 32  # microbatches of a cluster
_STORM = 0.5  # of them dropped
_DEVIATIONS, _OF_BEST, _OF_FALL = 10.0, 0.5, 0.25  # above the best median: all of them are passed in a leap


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong, and where it was seen first."""

    reason: str
    suspect: str  # a node that drops microbatches, or a cluster whose loss leaps


@dataclass(slots=True)
class _Record:
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    is_dropped: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    droppers: Counter[NodeId] = field(default_factory=Counter)


class LossGuard:
    """Clusters by their cluster_ids; what was best is the best of all of them."""

    def __init__(self) -> None:
        self._first: float | None = None  # median
        self._best, self._spread = 0.0, 0.0  # the lowest median, and how far losses were from their mean then
        self.go_back()

    def go_back(self) -> None:
        """Forget what went wrong, when training goes back, and not how good it was."""
        self._records: defaultdict[str, _Record] = defaultdict(_Record)
        self.alarm: Alarm | None = None

    @property
    def is_calm(self) -> bool:
        """Whether what is trained now is worth keeping: no cluster is half way to an alarm."""
        return self.alarm is None and all(
            not self._is_high(record.losses, 0.5) and sum(record.is_dropped) < _STORM * _WINDOW / 2
            for record in self._records.values()
        )

    def forget_others(self, cluster_ids: Collection[str]) -> None:
        """Look no longer at clusters that are no more: their losses would stay as they were."""
        for cluster_id in self._records.keys() - set(cluster_ids):
            del self._records[cluster_id]

    def note_loss(self, cluster_id: str, cluster: str, loss: float | None) -> None:
        """Take what a leaf says of a microbatch."""
        if loss is None:
            return
        record = self._records[cluster_id]
        record.losses.append(loss)
        record.is_dropped.append(False)
        if len(record.losses) < _WINDOW:
            return
        middle = median(record.losses)
        if self._first is None or middle < self._best:
            self._first = middle if self._first is None else self._first
            self._best, self._spread = middle, pstdev(record.losses)
        elif self._is_high(record.losses, 1.0):
            told = f"the loss of cluster {cluster} is {middle:.3g}, and was {self._best:.3g}"
            self.alarm = self.alarm or Alarm(told, f"cluster {cluster}")

    def note_dropped(self, cluster_id: str, node: NodeId) -> None:
        """Take note of a microbatch that was no number in a node's stage."""
        record = self._records[cluster_id]
        record.is_dropped.append(True)
        record.droppers[node] += 1
        num_dropped = sum(record.is_dropped)
        if len(record.is_dropped) == _WINDOW and num_dropped > _STORM * _WINDOW:
            suspect = max(record.droppers, key=lambda name: record.droppers[name])
            told = f"{num_dropped} of the last {_WINDOW} microbatches were dropped"
            self.alarm = self.alarm or Alarm(told, suspect)

    def _is_high(self, losses: Sequence[float], share: float) -> bool:
        if self._first is None or len(losses) < _WINDOW:
            return False
        leap = max(
            _DEVIATIONS * self._spread, _OF_BEST * abs(self._best), _OF_FALL * (self._first - self._best)
        )
        return median(losses) > self._best + share * leap
