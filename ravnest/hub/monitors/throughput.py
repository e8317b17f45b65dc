"""Throughput: finds nodes that have been slower, or faster, than the plan knows for long; and clusters.

A node is compared with itself since its stage was built, and with the other nodes: a busy PC that several
nodes share slows all of them, and no plan could help. Clusters are compared alike. A cluster that is slow
although its nodes compute as ever may have a slow link.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import fmean, median

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.ids import NodeId
from ravnest.protocol.training import StepReport

_OTHER_TIMES = 1.5  # as slow, or as fast
_COLD, _USUAL, _RECENT = 1, 3, 2  # readings: the first, which says little; the usual ones; the last ones
_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 86_400.0  # of a report that is believed


@dataclass(slots=True)
class _Speed:
    """Seconds per sample of one stage."""

    build_id: int
    since: float  # when the present reading began
    seconds: float = 0.0
    num_samples: int = 0
    first: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    other_since: float | None = None  # when it ceased to be as usual

    def add(self, seconds: float, num_samples: int, now: float, reading_seconds: float) -> bool:
        """Add the time of some work; return whether a reading is complete.

        A reading is a mean: a busy PC slows some microbatches down, in lumps.
        """
        self.seconds, self.num_samples = self.seconds + seconds, self.num_samples + num_samples
        if now < self.since + reading_seconds:
            return False
        reading = self.seconds / self.num_samples
        self.since, self.seconds, self.num_samples = now, 0.0, 0
        if len(self.first) < _COLD + _USUAL:
            self.first.append(reading)
        else:
            self.recent.append(reading)
        return True

    @property
    def times(self) -> float | None:
        """How many times as fast as usual it is, once there are enough readings."""
        is_known = len(self.recent) == _RECENT
        return median(self.first[_COLD:]) / fmean(self.recent) if is_known else None


class ThroughputMonitor:
    """Reads the seconds that stages report of their work."""

    def __init__(self, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._timeouts = timeouts
        self._speeds: dict[str, _Speed] = {}

    def forget(self, name: str) -> None:
        """Forget a node that has left, or a cluster."""
        self._speeds.pop(name, None)

    def note(self, name: NodeId, report: StepReport, now: float) -> float | None:
        """Add a report; return how many times as fast its node is now, if it has been so for long."""
        seconds = report.forward_seconds + report.backward_seconds
        return self.note_work(name, report.build_id, seconds, report.num_samples, now)

    def note_work(
        self, name: str, build_id: int, seconds: float, num_samples: int, now: float
    ) -> float | None:
        """Add the time of some work."""
        if num_samples < 1 or not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
            return None  # an evaluation, or nonsense
        speed = self._speeds.get(name)
        if speed is None or speed.build_id != build_id:
            speed = self._speeds[name] = _Speed(build_id, now)
        is_complete = speed.add(seconds, num_samples, now, self._timeouts.speed_reading_seconds)
        if not is_complete or speed.times is None:
            return None
        others = [x.times for other, x in self._speeds.items() if other != name and x.times is not None]
        times = speed.times / (median(others) if others else 1.0)
        if 1 / _OTHER_TIMES < times < _OTHER_TIMES:
            speed.other_since = None
            return None
        since = speed.other_since = now if speed.other_since is None else speed.other_since
        if now < since + self._timeouts.speed_change_seconds:
            return None
        del self._speeds[name]  # the new speed is the usual one
        return times


class PaceMonitor:
    """Reads how much time passes between the microbatches that clusters complete."""

    def __init__(self, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._speeds = ThroughputMonitor(timeouts)
        self._heard_at: dict[str, float] = {}  # by cluster_id, of those at work

    def note(self, cluster_id: str, report: StepReport, now: float) -> float | None:
        """Add a report of a leaf; return how many times as fast a cluster is that is slow for long."""
        before = self._heard_at.get(cluster_id)
        self._heard_at[cluster_id] = now
        if before is None:
            return None
        times = self._speeds.note_work(cluster_id, report.build_id, now - before, report.num_samples, now)
        return times if times is not None and times < 1 else None

    def pause(self, cluster_id: str) -> None:
        """Let the time until the next report not count: the cluster does something else, or nothing."""
        self._heard_at.pop(cluster_id, None)

    def forget_others(self, cluster_ids: Collection[str]) -> None:
        """Forget all clusters but these."""
        for cluster_id in [each for each in self._heard_at if each not in cluster_ids]:
            self.pause(cluster_id)
            self._speeds.forget(cluster_id)
