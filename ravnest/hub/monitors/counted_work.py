"""Counted work: what each cluster has counted, and how far the best of the others is beyond what is foreseen.

That changes for all of them with every second, and who is the best with it. So all are compared, but in
arrays: for hundreds of clusters it costs as much as for ten.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

import numpy as np

from ravnest.hub.coordinator.placement import ClusterState


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
    """The ClusterWork of each cluster, by cluster_id."""

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
