"""Lease checks: a lease counts when its leaf has reported every microbatch, and not before it can be trained.

A root's word that a lease is done waits until the reports of all its microbatches are here, or their drops:
root and leaf have links of their own, and tell a hub that was away again what it may not have heard. And it
waits while its cluster has counted more than it can have trained. That is some times what the plan foresees
of it, and as much more or less as the best of the others does. So what a provider states of its PC is an
upper bound. A cluster alone is not compared with anybody. What was trained while a link was down may come
at once.

An event touches the clusters that it may matter for, and only their leases are looked at again.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from heapq import merge
from math import inf

import numpy as np

from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Received
from ravnest.hub.coordinator.leases import OpenLease
from ravnest.hub.coordinator.placement import ClusterState
from ravnest.ids import LeaseId
from ravnest.protocol.training import LeaseBegin, LeaseDone, LeaseGrant

_TIMES = 5.0  # what is foreseen, as far as others reach that: plans err, and some state less than they have
_LEAST_OTHERS = 2  # that are slower than foreseen, before a third is thought to be
_LEAST_WAIT = 0.01  # seconds until the next look
_BURST = 4  # leases that may come at once: messages may have been held up
_AWAY_TIMES = 1.5  # what is foreseen of the time in which a cluster did not hear the hub

Reported = Callable[[LeaseId], Collection[int]]


@dataclass(frozen=True, slots=True, order=True)
class _Held:
    """What a root said of a lease, as the so manieth."""

    place: int
    event: Received = field(compare=False)
    number: LeaseId = field(compare=False)
    cluster_id: str = field(compare=False)


@dataclass(slots=True)
class ClusterWork:
    """What one cluster has counted, since it was granted a lease of so many samples."""

    began_at: float
    filled_at: float
    num_first: int
    allowed: float  # samples that it can have trained and has not counted, at `filled_at`
    num_samples: int = 0
    idle_since: float | None = None  # while it has no lease; that time says nothing of its speed


class CountedWork:
    """The ClusterWork of each cluster, by cluster_id, and how far the best is beyond what is foreseen.

    That changes for all of them with every second, and who is the best with it. So all are compared, but in
    arrays: for hundreds of clusters it costs as much as for ten.
    """

    def __init__(self) -> None:
        self._work: dict[str, ClusterWork] = {}
        self._running: tuple[ClusterState, ...] | None = None  # that the arrays are of; None: of none
        self._places: dict[str, int] = {}  # in the arrays
        self._speeds = self._began_at = self._idle_since = self._num_samples = np.zeros(0)

    def find(self, cluster_id: str) -> ClusterWork | None:
        """Return the work of a cluster that was granted a lease."""
        return self._work.get(cluster_id)

    def begin(self, cluster_id: str, work: ClusterWork) -> None:
        """Begin to count for a cluster, once."""
        if cluster_id not in self._work:
            self._work[cluster_id] = work
            self._enter(cluster_id, work)

    def add(self, cluster_id: str, num_samples: int) -> None:
        """Count samples of a cluster."""
        work = self._work[cluster_id]
        work.num_samples += num_samples
        self._enter(cluster_id, work)

    def pause(self, cluster_id: str, now: float) -> None:
        """Stop the clock of a cluster that has nothing to train."""
        work = self._work.get(cluster_id)
        if work is not None and work.idle_since is None:
            work.idle_since = now
            self._enter(cluster_id, work)

    def resume(self, cluster_id: str, now: float) -> None:
        """Let the clock of a cluster go on."""
        work = self._work.get(cluster_id)
        if work is not None and work.idle_since is not None:
            work.began_at += now - work.idle_since
            work.idle_since = None
            self._enter(cluster_id, work)

    def forget_others(self, cluster_ids: Collection[str]) -> None:
        """Forget all clusters but these."""
        self._work = {each: work for each, work in self._work.items() if each in cluster_ids}
        self._running = None

    def find_best(
        self, running: tuple[ClusterState, ...], besides: ClusterState, now: float
    ) -> tuple[int, float]:
        """Return of how many others the ratio is known by now, and the best of them, or 0."""
        if running is not self._running:  # a plan changes what is foreseen, too
            self._compare(running)
        foreseen = self._speeds * (np.minimum(now, self._idle_since) - self._began_at)
        is_known = foreseen > 0
        place = self._places.get(besides.cluster_id)
        if place is not None:
            is_known[place] = False
        ratios = self._num_samples[is_known] / foreseen[is_known]
        return len(ratios), float(ratios.max(initial=0.0))

    def _compare(self, running: tuple[ClusterState, ...]) -> None:
        self._running, foreseen = running, [each for each in running if each.samples_per_second > 0]
        self._places = {each.cluster_id: place for place, each in enumerate(foreseen)}
        self._speeds = np.array([each.samples_per_second for each in foreseen], float)
        self._began_at, self._idle_since = np.full((2, len(foreseen)), inf)
        self._num_samples = np.zeros(len(foreseen))
        for cluster_id, work in self._work.items():
            self._enter(cluster_id, work)

    def _enter(self, cluster_id: str, work: ClusterWork) -> None:
        place = self._places.get(cluster_id)
        if place is not None:
            self._began_at[place] = work.began_at
            self._idle_since[place] = inf if work.idle_since is None else work.idle_since
            self._num_samples[place] = work.num_samples + work.num_first


@dataclass(slots=True)
class LeaseChecks:
    """Holds what roots say until it can be true; `reported` tells the microbatches that leaves reported."""

    reported: Reported
    _held: dict[str, dict[LeaseId, _Held]] = field(default_factory=dict)  # by cluster_id
    _num_held: int = 0  # so far
    _work: CountedWork = field(default_factory=CountedWork)
    _touched: set[str] = field(default_factory=set)  # something was said of these since they were looked at
    _late: dict[str, float] = field(default_factory=dict)  # when the next lease of these may count

    @property
    def due(self) -> float | None:
        """When to look again, if nothing is reported."""
        return min(self._late.values(), default=None)

    def touch(self, cluster_id: str) -> None:
        """Look again at the leases of a cluster of which something is said."""
        if cluster_id in self._held:
            self._touched.add(cluster_id)

    def touch_all(self) -> None:
        """Look again at all leases: clusters may have begun or ended."""
        self._touched.update(self._held)

    def record_outage(self, cluster: ClusterState, seconds: float) -> None:
        """Let a cluster that was not heard for so long count at once what it can have trained meanwhile."""
        work = self._work.find(cluster.cluster_id)
        if work is not None:
            work.allowed += _AWAY_TIMES * cluster.samples_per_second * seconds
            self.touch(cluster.cluster_id)

    def record_grant(self, cluster: ClusterState | None, grant: LeaseGrant | LeaseBegin, now: float) -> None:
        """Record when a cluster got its first lease, and that it has work again."""
        if cluster is None:
            return
        if isinstance(grant, LeaseGrant):
            num_samples = sum(grant.num_samples)
            begun = ClusterWork(now, now, num_samples, float(_BURST * num_samples))
            self._work.begin(cluster.cluster_id, begun)
        self._work.resume(cluster.cluster_id, now)

    def record_idle(self, cluster: ClusterState, now: float) -> None:
        """Record that a cluster has nothing to train, as in a pause."""
        self._work.pause(cluster.cluster_id, now)

    def hold(self, hub: Coordinator, event: Received, done: LeaseDone) -> bool:
        """Hold what a root says, if it is of an open lease of its cluster and cannot count yet."""
        lease = hub.ledger.find_open(done.lease)
        cluster = hub.placement.cluster_of(event.sender)
        if lease is None or cluster is None or lease.cluster_id != cluster.cluster_id:
            return False
        is_possible = done.num_samples <= sum(lease.num_samples)
        is_due = event.sender == cluster.root and done.build_id == cluster.build_id and is_possible
        if not is_due:
            return False
        held = self._held.setdefault(lease.cluster_id, {})
        self._num_held += 1
        held.setdefault(done.lease, _Held(self._num_held, event, done.lease, lease.cluster_id))  # once
        self._touched.add(lease.cluster_id)
        return True

    def release(self, hub: Coordinator, now: float) -> Received | None:
        """Return what may count now, the oldest first; what is behind one that is too early waits, too."""
        self._touched.update(each for each, due in self._late.items() if due <= now)
        if not self._touched:
            return None
        for cluster_id in self._touched:
            self._late.pop(cluster_id, None)
        for held in [*merge(*(self._held[each].values() for each in self._touched if each in self._held))]:
            lease, cluster = hub.ledger.find_open(held.number), hub.placement.cluster_of(held.event.sender)
            if lease is None or cluster is None or cluster.cluster_id != lease.cluster_id:
                self._forget(held)  # it was given back
            elif cluster.cluster_id in self._late or not self._is_reported(lease):
                continue
            elif self._has_time(hub, cluster, lease, now):
                self._forget(held)
                return held.event
        self._touched.clear()
        return None

    def _forget(self, held: _Held) -> None:
        of_cluster = self._held[held.cluster_id]
        del of_cluster[held.number]
        if not of_cluster:
            del self._held[held.cluster_id]

    def forget_others(self, cluster_ids: Collection[str]) -> None:
        """Forget all clusters but these."""
        self._work.forget_others(cluster_ids)

    def _is_reported(self, lease: OpenLease) -> bool:
        reported, num_microbatches = self.reported(lease.number), len(lease.num_samples)
        if len(reported) + len(lease.dropped) < num_microbatches:
            return False
        return len({*reported, *lease.dropped}) >= num_microbatches

    def _has_time(self, hub: Coordinator, cluster: ClusterState, lease: OpenLease, now: float) -> bool:
        """Return whether a cluster can have trained a lease by now, and count it then; else say when."""
        num_samples, work = sum(lease.num_samples), self._work.find(cluster.cluster_id)
        if work is None:
            return True
        rate = self._find_limit(hub, cluster, now)
        if rate is not None:
            most = max(_BURST * num_samples, work.allowed)
            gained = rate * max(0.0, now - work.filled_at)
            work.allowed, work.filled_at = min(most, work.allowed + gained), now
            if work.allowed < num_samples:
                self._late[cluster.cluster_id] = now + max(_LEAST_WAIT, (num_samples - work.allowed) / rate)
                return False
            work.allowed -= num_samples
        work.filled_at = now
        self._work.add(cluster.cluster_id, num_samples)
        return True

    def _find_limit(self, hub: Coordinator, cluster: ClusterState, now: float) -> float | None:
        """Return the samples per second beyond which a cluster is not believed; None: nobody knows."""
        running = hub.placement.running
        has_others = len(running) > 1 or (bool(running) and running[0] is not cluster)
        if not has_others or cluster.samples_per_second <= 0:
            return None
        num_known, best = self._work.find_best(running, cluster, now)
        least = 0.0 if num_known >= _LEAST_OTHERS else 1.0
        return _TIMES * max(least, best) * cluster.samples_per_second or None
