"""Finds clusters that report nothing, nodes and clusters that are slow, and a hub that is cut off.

A cluster that trains may be silent for a minute, or for the time of twenty batches. One that is built gets
the time of ten downloads of a stage. A node's speed is compared with its own since its stage was built, and
with that of others: a busy PC that several nodes share slows all of them, and no plan could help. A cluster
that is slow although its nodes compute as ever may have a slow link.
"""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.events import ClusterSilent, JobSettings
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.ids import NodeId

_BATCHES = 20.0  # a busy cluster may be silent for as long as these take
_FETCHES = 10.0  # downloads of a stage: so much more silence is allowed while it is built
_LEAST_TOGETHER, _TIMES_AS_MANY = 3, 3  # all but a few: so many, and so many times as many as the others


class LivenessMonitor:
    """Knows when each cluster was last heard of.

    A running one counts as heard during a blocking round, in which all clusters stand still.
    """

    def __init__(self, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._timeouts = timeouts
        self._heard_at: dict[str, float] = {}  # of clusters that have something to do, by cluster_id
        self._others: dict[str, float] = {}  # when others were heard of, since the last look at all
        self._patience: dict[str, float] = {}  # seconds, of those that are not asked yet
        self._running_patience = timeouts.silent_work_seconds
        # When each was to be asked, as of some time ago; signs since then move it further away.
        self._queue: list[tuple[float, str]] = []

    @property
    def due(self) -> float | None:
        """When the first cluster has been silent for too long, if nothing is heard of it."""
        while self._queue:
            time, cluster_id = self._queue[0]
            if cluster_id not in self._patience:
                heapq.heappop(self._queue)
                continue
            now_due = self._heard_at[cluster_id] + self._patience[cluster_id]
            if now_due == time:
                return time
            heapq.heapreplace(self._queue, (now_due, cluster_id))
        return None

    def is_quiet(self, now: float) -> bool:
        """Return whether surely nobody has been silent for too long."""
        return not self._queue or now < self._queue[0][0]

    def record_sign(self, cluster_id: str, now: float) -> None:
        """Record that a cluster does something."""
        (self._heard_at if cluster_id in self._heard_at else self._others)[cluster_id] = now

    def follow(
        self,
        clusters: Iterable[ClusterState],
        is_busy: Callable[[ClusterState], bool],
        has_asked: Callable[[str], bool],
        now: float,
    ) -> None:
        """Follow clusters that run and have got a lease, or have done one: whether they have work now."""
        for cluster in clusters:
            cluster_id = cluster.cluster_id
            if not is_busy(cluster):
                self._heard_at.pop(cluster_id, None)
                self._patience.pop(cluster_id, None)
            elif cluster_id not in self._patience and not has_asked(cluster_id):
                heard_at = self._heard_at.setdefault(cluster_id, self._others.get(cluster_id, now))
                self._patience[cluster_id] = self._running_patience
                heapq.heappush(self._queue, (heard_at + self._running_patience, cluster_id))
        self._others.clear()

    def find_silent(
        self,
        placement: Placement,
        is_busy: Callable[[ClusterState], bool],
        has_asked: Callable[[str], bool],
        settings: JobSettings,
        now: float,
    ) -> ClusterSilent | None:
        """Return a cluster that is silent for too long; one that is built is given the time again."""
        rate = placement.outline.samples_per_second / max(1, len(placement.clusters))
        batch_seconds = settings.batch_size / max(rate, 1e-9)
        self._running_patience = max(self._timeouts.silent_work_seconds, _BATCHES * batch_seconds)
        training = {each.cluster_id: each for each in placement.running if is_busy(each)}
        building = {
            each.cluster_id: each for each in placement.clusters if each.unready and not each.is_broken
        }
        at_work = training | building
        heard_at = self._others | self._heard_at
        self._heard_at = {cluster_id: heard_at.get(cluster_id, now) for cluster_id in at_work}
        self._others.clear()
        self._patience = {
            cluster_id: self._find_patience(cluster, placement, settings.most_snapshot_bytes)
            for cluster_id, cluster in at_work.items()
            if not has_asked(cluster_id)
        }
        times = {each: self._heard_at[each] + seconds for each, seconds in self._patience.items()}
        self._queue = sorted((due, each) for each, due in times.items())
        cluster_id = next((each for each, due in times.items() if now >= due), None)
        if cluster_id is None:
            return None
        found = ClusterSilent(cluster_id, self._heard_at[cluster_id], now)
        if cluster_id in building:
            self._heard_at[cluster_id] = now  # perhaps no node is to blame
        return found

    def _find_patience(self, cluster: ClusterState, placement: Placement, most_bytes: int) -> float:
        if not cluster.unready:
            return self._running_patience
        found = (placement.membership.find(name) for name in cluster.nodes)
        slowest = min((each.node.download_bytes_per_second for each in found if each), default=1.0)
        return self._timeouts.silent_build_seconds + _FETCHES * most_bytes / slowest


@dataclass(frozen=True, slots=True)
class Absence:
    """A node whose link is lost, and until when it is waited for."""

    reason: str
    since: float
    back_by: float
    has_more_time: bool = False  # than one that was lost alone


class OutageMonitor:
    """Feed it every link that is lost or comes back; ask it at `due` which nodes are gone.

    A node whose link is lost has a moment to come back. If nobody at all is heard, the fault is probably the
    hub's: it is cut off, and waits long for all. If all but a few were lost together, they have as long as
    after a restart of the hub, also when some are back. Times are of the program's clock, which goes on while
    the hub is cut off.
    """

    def __init__(self, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._timeouts = timeouts
        self._absent: dict[NodeId, Absence] = {}
        self._lost_at: dict[NodeId, float] = {}  # the last time, of those that are back, too
        self.is_cut_off = False  # nobody is heard, and all are waited for
        self._settled_by = 0.0  # until then links that are lost again belong to the last outage

    @property
    def absent(self) -> Collection[NodeId]:
        """The nodes that are waited for."""
        return self._absent.keys()

    @property
    def due(self) -> float | None:
        """When to ask next which nodes are gone, if nothing else happens."""
        return min((absence.back_by for absence in self._absent.values()), default=None)

    def record_loss(self, node: NodeId, reason: str, now: float) -> None:
        """Wait a moment for a node whose link is lost, or longer just after the hub was cut off."""
        back_by = max(now + self._timeouts.grace_seconds, self._settled_by)
        self._absent[node] = Absence(reason, now, back_by)
        self._lost_at[node] = now

    def record_return(self, node: NodeId, now: float) -> float:
        """Wait no longer for a node, and return how long it was away; others will find the hub soon, too."""
        absence = self._absent.pop(node, None)
        self._end_cut_off(now, self._timeouts.return_seconds)
        return now - absence.since if absence is not None else 0.0

    def record_arrival(self, now: float) -> None:
        """Record that a newcomer is heard; if only one node is missing, it was hardly the hub's line."""
        is_one = len(self._absent) == 1
        self._end_cut_off(now, self._timeouts.grace_seconds if is_one else self._timeouts.return_seconds)

    def record_stop(self, now: float) -> None:
        """Record that the job is to end: missing nodes are not waited for as long."""
        self._end_cut_off(now, self._timeouts.return_seconds)

    def forget(self, node: NodeId) -> None:
        """Wait no longer for a node that has gone."""
        self._absent.pop(node, None)
        self._lost_at.pop(node, None)
        self.is_cut_off &= bool(self._absent)

    def find_gone(self, here: Collection[NodeId], can_wait: bool, now: float) -> list[tuple[NodeId, Absence]]:
        """Return the nodes that are waited for no longer; `can_wait` says that they have what was trained."""
        late = [node for node, absence in self._absent.items() if now >= absence.back_by]
        if late and can_wait and not here and not self.is_cut_off:
            self._wait(self._absent, now + self._timeouts.cut_off_seconds)
            self.is_cut_off = True
            return []
        if can_wait:
            fallen = [node for node in late if self._fell_with_most(node, here)]
            for node in fallen:
                self._wait([node], self._absent[node].since + self._timeouts.return_seconds)
            late = [node for node in late if node not in fallen]
        gone = [(node, self._absent[node]) for node in late]
        for node in late:
            self.forget(node)
        return gone

    def _fell_with_most(self, node: NodeId, here: Collection[NodeId]) -> bool:
        """Return whether a node was lost together with all others, or all but a few; some may be back."""
        absence = self._absent[node]
        if absence.has_more_time:
            return False
        times = self._lost_at.items()
        together = {x for x, at in times if abs(at - absence.since) <= self._timeouts.together_seconds}
        others = [other for other in here if other not in together]
        return len(together) >= (max(_LEAST_TOGETHER, _TIMES_AS_MANY * len(others)) if others else 2)

    def _wait(self, nodes: Collection[NodeId], back_by: float) -> None:
        for node in tuple(nodes):
            self._absent[node] = replace(self._absent[node], back_by=back_by, has_more_time=True)

    def _end_cut_off(self, now: float, seconds: float) -> None:
        if self.is_cut_off:
            self._settled_by = now + seconds
            self._wait(self._absent, self._settled_by)
            self.is_cut_off = False


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
    known: float | None = None  # how many times as fast it was at the last reading, as others compare

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
        self._known: list[float] = []  # of all that are known, in order

    def forget(self, name: str) -> None:
        """Forget a node that has left, or a cluster."""
        if (speed := self._speeds.pop(name, None)) is not None:
            self._withdraw(speed)

    def _withdraw(self, speed: _Speed) -> None:
        """Compare others with it no longer."""
        if speed.known is not None:
            del self._known[bisect_left(self._known, speed.known)]
            speed.known = None

    def record(self, name: str, build_id: int, seconds: float, num_samples: int, now: float) -> float | None:
        """Add the time of some work; return how many times as fast it is now, if it has been so for long."""
        if num_samples < 1 or not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
            return None  # an evaluation, or nonsense
        speed = self._speeds.get(name)
        if speed is None or speed.build_id != build_id:
            self.forget(name)
            speed = self._speeds[name] = _Speed(build_id, now)
        if not speed.add(seconds, num_samples, now, self._timeouts.speed_reading_seconds):
            return None
        self._withdraw(speed)
        own = speed.times
        if own is None:
            return None
        times = own / (_middle(self._known) if self._known else 1.0)
        insort(self._known, own)
        speed.known = own
        if 1 / _OTHER_TIMES < times < _OTHER_TIMES:
            speed.other_since = None
            return None
        since = speed.other_since = now if speed.other_since is None else speed.other_since
        if now < since + self._timeouts.speed_change_seconds:
            return None
        self.forget(name)  # the new speed is the usual one
        return times


def _middle(ordered: list[float]) -> float:
    """Return the median of numbers that are in order."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class PaceMonitor:
    """Reads how much time passes between the microbatches that clusters complete."""

    def __init__(self, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._speeds = ThroughputMonitor(timeouts)
        self._heard_at: dict[str, float] = {}  # by cluster_id, of those at work

    def record(self, cluster_id: str, build_id: int, num_samples: int, now: float) -> float | None:
        """Add a microbatch; return how many times as fast a cluster is that is slow for long."""
        before = self._heard_at.get(cluster_id)
        self._heard_at[cluster_id] = now
        if before is None:
            return None
        times = self._speeds.record(cluster_id, build_id, now - before, num_samples, now)
        return times if times is not None and times < 1 else None

    def pause(self, cluster_id: str) -> None:
        """Leave out the time until the next report: the cluster does something else, or nothing."""
        self._heard_at.pop(cluster_id, None)

    def forget_others(self, cluster_ids: Collection[str]) -> None:
        """Forget all clusters but these."""
        for cluster_id in [each for each in self._heard_at if each not in cluster_ids]:
            self.pause(cluster_id)
            self._speeds.forget(cluster_id)
