"""Leases: which samples are trained when, and the book that counts each of them once.

The order of an epoch is a keyed permutation that any machine computes for any index, so only numbers travel.
A cluster leases an interval of that order, as long as it asks for. A completion counts only while that
numbered lease is open and belongs to that cluster. Open leases outlive a restart of the hub, because peers
train on without it.
"""

import hashlib
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self, TypedDict

import numpy as np
from numpy.typing import NDArray

from ravnest.ids import LeaseId, MicrobatchId

_NUM_TURNS = 8


def permute(indices: NDArray[np.int64], num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Map each index in [0, num_samples) to its sample: a bijection, fixed for ever by seed and epoch."""
    # A Feistel network on the grid rows x columns >= num_samples; indices that fall outside go through again.
    rows = math.isqrt(num_samples - 1) + 1
    columns = -(-num_samples // rows)
    keys = [_turn_key(seed, epoch, turn) for turn in range(_NUM_TURNS)]
    result = _shuffle_grid(indices.astype(np.uint64), rows, columns, keys)
    outside = np.flatnonzero(result >= num_samples)
    while outside.size:
        result[outside] = _shuffle_grid(result[outside], rows, columns, keys)
        outside = outside[result[outside] >= num_samples]
    return result.astype(np.int64)


def permute_windows(indices: NDArray[np.int64], window: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Map each index to a sample of its window of so many: a stream can be read as training goes."""
    numbers, result = indices // window, np.empty_like(indices)
    for number in np.unique(numbers):
        inside = numbers == number
        turn = (epoch << 32) + int(number)  # each window has an order of its own
        result[inside] = number * window + permute(indices[inside] - number * window, window, seed, turn)
    return result


def _shuffle_grid(
    cells: NDArray[np.uint64], rows: int, columns: int, keys: list[np.uint64]
) -> NDArray[np.uint64]:
    moving, fixed = np.divmod(cells, np.uint64(columns))
    size, other_size = np.uint64(rows), np.uint64(columns)
    for key in keys:
        moving = (moving + _mix(fixed ^ key) % size) % size
        moving, fixed, size, other_size = fixed, moving, other_size, size
    return moving * other_size + fixed  # an even number of turns: rows first again


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter 64-bit numbers (the finaliser of splitmix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _turn_key(seed: int, epoch: int, turn: int) -> np.uint64:
    name = f"ravnest order {seed} {epoch} {turn}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little"))


@dataclass(frozen=True, slots=True)
class Lease:
    """One attempt of a cluster at the places [start, stop) of an epoch; the number is never used again."""

    number: LeaseId
    epoch: int
    start: int
    stop: int
    cluster_id: str

    @property
    def num_samples(self) -> int:
        """How many samples it is about."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class OpenLease:
    """Microbatches that a cluster trains; without a lease of the book it evaluates them."""

    number: LeaseId
    cluster_id: str
    lease: Lease | None
    first_microbatch: MicrobatchId
    num_samples: tuple[int, ...]
    dropped: set[MicrobatchId] = field(default_factory=set)
    first_sample: int = 0  # of an evaluation

    @property
    def microbatches(self) -> range:
        """The numbers of its microbatches."""
        return range(self.first_microbatch, self.first_microbatch + len(self.num_samples))


def cut_batches(num_samples: int, batch_size: int, microbatches: int) -> tuple[int, ...]:
    """Return the sizes of the microbatches of so many samples, batch after batch, as equal as possible."""
    sizes: list[int] = []
    for start in range(0, num_samples, batch_size):
        size = min(batch_size, num_samples - start)
        count = min(microbatches, size)  # those of a short last batch still hold a sample each
        sizes += [size // count + (index < size % count) for index in range(count)]
    return tuple(sizes)


_MOST_CLOSED = 5_000  # leases that were closed last: of older ones nobody says anything any more


class OpenLeases:
    """The leases under way; no number of a lease or a microbatch is used again."""

    def __init__(self) -> None:
        self._next_number = self.num_microbatches = 0  # granted so far
        self.clear()

    def clear(self) -> None:
        """Forget all leases."""
        self._leases: dict[LeaseId, OpenLease] = {}
        self._by_cluster: dict[str, dict[LeaseId, OpenLease]] = {}  # that are begun
        self._ahead: dict[str, dict[LeaseId, OpenLease]] = {}  # that are not
        self.num_ahead = 0  # samples in those
        self._closed: deque[LeaseId] = deque(maxlen=_MOST_CLOSED)
        self._forget_at = 2 * _MOST_CLOSED
        self.sated: set[str] = set()  # clusters that had enough when they last got or lost a lease

    @property
    def all(self) -> tuple[OpenLease, ...]:
        """All leases, oldest first."""
        return tuple(self._leases.values())

    @property
    def begun(self) -> tuple[OpenLease, ...]:
        """The leases that are begun, as far as is known here; oldest first."""
        return tuple(x for x in self._leases.values() if x.number not in self._ahead.get(x.cluster_id, ()))

    def open(
        self,
        cluster_id: str,
        lease: Lease | None,
        num_samples: tuple[int, ...],
        first_sample: int = 0,
        *,
        is_ahead: bool = False,
    ) -> OpenLease:
        """Open a lease of so many samples in each microbatch; one that is ahead is begun later."""
        first, number = MicrobatchId(self.num_microbatches), LeaseId(self._next_number)
        opened = OpenLease(number, cluster_id, lease, first, num_samples, first_sample=first_sample)
        self.num_microbatches += len(num_samples)
        self._next_number += 1
        self._leases[number] = opened
        (self._ahead if is_ahead else self._by_cluster).setdefault(cluster_id, {})[number] = opened
        self.num_ahead += sum(num_samples) if is_ahead else 0
        return opened

    def begin_next(self, cluster_id: str) -> OpenLease | None:
        """Begin the oldest lease that a cluster has ahead, if it has one."""
        lease = next(iter(self._ahead.get(cluster_id, {}).values()), None)
        if lease is not None:
            self._drop_ahead(lease)
            self._by_cluster.setdefault(cluster_id, {})[lease.number] = lease
        return lease

    def _drop_ahead(self, lease: OpenLease) -> bool:
        ahead = self._ahead.get(lease.cluster_id, {})
        if ahead.pop(lease.number, None) is None:
            return False
        self.num_ahead -= sum(lease.num_samples)
        if not ahead:
            del self._ahead[lease.cluster_id]
        return True

    def reserve(self) -> tuple[LeaseId, MicrobatchId]:
        """Return the numbers of a lease with one microbatch that is not counted here."""
        numbers = LeaseId(self._next_number), MicrobatchId(self.num_microbatches)
        self._next_number, self.num_microbatches = self._next_number + 1, self.num_microbatches + 1
        return numbers

    def close(self, lease: OpenLease) -> None:
        """Forget a lease."""
        del self._leases[lease.number]
        self._closed.append(lease.number)
        self.sated.discard(lease.cluster_id)
        if self._drop_ahead(lease):
            return
        of_cluster = self._by_cluster[lease.cluster_id]
        del of_cluster[lease.number]
        if not of_cluster:
            del self._by_cluster[lease.cluster_id]

    def drop_closed(self, leases: list[OpenLease]) -> list[OpenLease]:
        """Return leases without those that were closed long ago, now and then: an epoch may have millions."""
        if len(leases) < self._forget_at:
            return leases
        closed = set(self._closed)
        left = [each for each in leases if each.number in self._leases or each.number in closed]
        self._forget_at = 2 * max(_MOST_CLOSED, len(left))
        return left

    def find(self, number: LeaseId) -> OpenLease | None:
        """Return the lease of this number."""
        return self._leases.get(number)

    def of(self, cluster_id: str) -> tuple[OpenLease, ...]:
        """Return the leases that a cluster has begun."""
        return tuple(self._by_cluster.get(cluster_id, {}).values())

    def ahead_of(self, cluster_id: str) -> tuple[OpenLease, ...]:
        """Return the leases that a cluster has ahead."""
        return tuple(self._ahead.get(cluster_id, {}).values())

    def has(self, cluster_id: str) -> bool:
        """Return whether a cluster has begun a lease."""
        return cluster_id in self._by_cluster


class LeaseState(TypedDict):
    """A LeaseBook as plain data, for checkpoints and the hub's log."""

    num_samples: int
    num_epochs: int
    seed: int
    next_number: int
    next_epoch: int
    next_place: int
    open: list[tuple[int, int, int, int, str]]
    requeued: list[tuple[int, int, int]]
    counted: list[tuple[int, int]]


class LeaseBook:
    """Leases the samples of all epochs in order, `num_total` at most, and counts each exactly once.

    The order is shuffled as a whole, or within windows of so many samples.
    """

    def __init__(
        self, num_samples: int, num_epochs: int, seed: int = 0, num_total: int = 0, window: int = 0
    ) -> None:
        assert num_samples >= 1
        self._num_samples = num_samples
        self._num_epochs = num_epochs
        self._num_total = num_total or num_samples * num_epochs
        self._seed, self._window = seed, window
        self._next_number = 0
        self._next_epoch = 0
        self._next_place = 0
        self._open: dict[LeaseId, Lease] = {}
        self._requeued: deque[tuple[int, int, int]] = deque()  # epoch, start, stop
        self._counted: dict[int, int] = {}  # samples, only of epochs begun and not finished

    @property
    def is_finished(self) -> bool:
        """Whether every sample of every epoch was counted."""
        return not self._num_fresh and not self._open and not self._requeued

    @property
    def open_leases(self) -> tuple[Lease, ...]:
        """Leases that are neither completed nor given back, oldest first."""
        return tuple(self._open.values())

    @property
    def upcoming(self) -> tuple[int, int] | None:
        """The epoch of the next lease, and how many samples it can have at most; None: nothing is left."""
        if self._requeued:
            epoch, start, stop = self._requeued[0]
            return epoch, stop - start
        if self._num_fresh:
            return self._next_epoch, min(self._num_samples - self._next_place, self._num_fresh)
        return None

    @property
    def has_fresh_next(self) -> bool:
        """Whether the next lease is of samples that nobody had before."""
        return bool(self._num_fresh) and not self._requeued

    @property
    def num_before(self) -> int:
        """How many samples of the job come before those of the next lease."""
        epoch, start = self._requeued[0][:2] if self._requeued else (self._next_epoch, self._next_place)
        return epoch * self._num_samples + start

    @property
    def _num_fresh(self) -> int:
        """How many samples of the job were never leased."""
        return max(0, self._num_total - self._next_epoch * self._num_samples - self._next_place)

    def epoch_size(self, epoch: int) -> int:
        """Return how many samples an epoch has: the last one may end early."""
        return max(0, min(self._num_samples, self._num_total - epoch * self._num_samples))

    @property
    def num_begun(self) -> int:
        """How many epochs are leased to their end, or begun."""
        return self._next_epoch + (self._next_place > 0)

    def num_counted(self, epoch: int) -> int:
        """Return how many samples of `epoch` were counted so far."""
        if epoch in self._counted:
            return self._counted[epoch]
        # Without an entry an epoch is either finished or has not begun.
        return self.epoch_size(epoch) if epoch < self.num_begun else 0

    @property
    def under_way(self) -> set[int]:
        """The epochs that are begun and not counted whole."""
        return set(self._counted)

    def lease(self, cluster_id: str, num_samples: int) -> Lease | None:
        """Lease a cluster the next samples, at most so many; None: all are leased or counted."""
        assert num_samples >= 1
        if self._requeued:
            epoch, start, end = self._requeued.popleft()
            stop = min(start + num_samples, end)
            if stop < end:
                self._requeued.appendleft((epoch, stop, end))
        elif self._num_fresh:
            epoch, start, stop = self._next_fresh(min(num_samples, self._num_fresh))
        else:
            return None
        lease = Lease(LeaseId(self._next_number), epoch, start, stop, cluster_id)
        self._next_number += 1
        self._open[lease.number] = lease
        return lease

    def complete(self, number: LeaseId, cluster_id: str) -> str | None:
        """Count the samples of an open lease; return why not, if refused."""
        lease = self._open.get(number)
        if lease is None:
            return f"lease {number} is not open: it was counted or given back before"
        if lease.cluster_id != cluster_id:
            return f"lease {number} is held by {lease.cluster_id}, not by {cluster_id}"
        del self._open[number]
        counted = self._counted.pop(lease.epoch) + lease.num_samples
        if counted < self.epoch_size(lease.epoch):
            self._counted[lease.epoch] = counted
        return None

    def release(self, cluster_id: str) -> tuple[Lease, ...]:
        """Put the open samples of `cluster_id` back, to be leased first; return its closed leases."""
        closed = tuple(lease for lease in self._open.values() if lease.cluster_id == cluster_id)
        self.put_back(closed)
        return closed

    def put_back(self, leases: Iterable[Lease]) -> None:
        """Put the samples of open leases back, to be leased first."""
        closed = [self._open.pop(lease.number) for lease in leases]
        given_back = [(lease.epoch, lease.start, lease.stop) for lease in closed]
        self._requeued = deque(join_intervals([*given_back, *self._requeued]))

    def uncount(self, leases: Iterable[Lease]) -> int:
        """Put counted samples back, of epochs that are over too; return how many."""
        undone = [*leases]
        for lease in undone:
            self._counted[lease.epoch] = self.num_counted(lease.epoch) - lease.num_samples
        given_back = [(lease.epoch, lease.start, lease.stop) for lease in undone]
        self._requeued = deque(join_intervals([*given_back, *self._requeued]))
        return sum(lease.num_samples for lease in undone)

    def samples(self, lease: Lease) -> NDArray[np.int64]:
        """Return the sample indices of a lease in training order."""
        indices = np.arange(lease.start, lease.stop, dtype=np.int64)
        if self._window:
            return permute_windows(indices, self._window, self._seed, lease.epoch)
        return permute(indices, self._num_samples, self._seed, lease.epoch)

    def state(self) -> LeaseState:
        """Return everything as plain data; its size does not grow with the samples counted."""
        counted = dict(self._counted)
        if self._next_place:  # an epoch that ended early is not over for a longer job
            counted.setdefault(self._next_epoch, self._next_place)
        return LeaseState(
            num_samples=self._num_samples,
            num_epochs=self._num_epochs,
            seed=self._seed,
            next_number=self._next_number,
            next_epoch=self._next_epoch,
            next_place=self._next_place,
            open=[(x.number, x.epoch, x.start, x.stop, x.cluster_id) for x in self._open.values()],
            requeued=list(self._requeued),
            counted=list(counted.items()),
        )

    @classmethod
    def restore(cls, state: LeaseState, num_total: int = 0, window: int = 0) -> Self:
        """Return the book of `state`; open leases stay open, so their completion still counts."""
        book = cls(state["num_samples"], state["num_epochs"], state["seed"], num_total, window)
        book._next_number = state["next_number"]
        book._next_epoch = state["next_epoch"]
        book._next_place = state["next_place"]
        for number, epoch, start, stop, cluster_id in state["open"]:
            book._open[LeaseId(number)] = Lease(LeaseId(number), epoch, start, stop, cluster_id)
        book._requeued.extend((epoch, start, stop) for epoch, start, stop in state["requeued"])
        counted = ((epoch, count) for epoch, count in state["counted"] if count < book.epoch_size(epoch))
        book._counted.update(counted)
        return book

    def _next_fresh(self, num_samples: int) -> tuple[int, int, int]:
        epoch, start = self._next_epoch, self._next_place
        if start == 0:
            self._counted[epoch] = 0
        stop = min(start + num_samples, self._num_samples)
        self._next_epoch, self._next_place = (epoch, stop) if stop < self._num_samples else (epoch + 1, 0)
        return epoch, start, stop


def join_intervals(intervals: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return disjoint intervals (epoch, start, stop) in order, neighbours as one."""
    joined: list[tuple[int, int, int]] = []
    for epoch, start, stop in sorted(intervals):
        if joined and joined[-1][0] == epoch and joined[-1][2] == start:
            joined[-1] = (epoch, joined[-1][1], stop)
        else:
            joined.append((epoch, start, stop))
    return joined


def find_position(leases: LeaseState) -> int:
    """Return the first place of the first epoch that is not counted, of which all before are."""
    begun = [(epoch, start) for _, epoch, start, _, _ in leases["open"]]
    begun += [(epoch, start) for epoch, start, _ in leases["requeued"]]
    epoch, place = min([*begun, (leases["next_epoch"], leases["next_place"])])
    return place if epoch == 0 else leases["num_samples"]


def lengthen(leases: LeaseState, num_samples: int) -> LeaseState:
    """Return the books of a stream, which has one epoch, for another number of samples in it."""
    found, before = leases.copy(), leases["num_samples"]
    found["num_samples"] = num_samples
    if leases["next_epoch"]:  # all was leased: now there is more
        found["next_epoch"], found["next_place"] = 0, before
        found["counted"] = leases["counted"] or [(0, before)]
    return found


@dataclass(frozen=True, slots=True)
class LedgerState:
    """The state of the books when a checkpoint was made; leases under way are given back."""

    num_counted: int
    num_reported: int
    num_updates: int
    num_evaluated: int  # passes over the data after which it was evaluated
    leases: LeaseState
