"""How far things are: what a cluster is at work on, what it knows, what an evaluation has found.

The records that hub.training keeps its books in.
"""

from dataclasses import dataclass, field

from ravnest.engine.sampler import Lease, LeaseState
from ravnest.protocol import BatchId, LeaseId, Metrics, RoundId, StepReport

_NONE = RoundId(0)  # before the first round
_MOST_METRICS = 256  # more names than these are somebody's who makes them up


@dataclass(frozen=True, slots=True)
class OpenLease:
    """Microbatches a cluster is at work on; without a lease of the book it evaluates."""

    number: LeaseId
    holder: str
    lease: Lease | None
    first_batch: BatchId
    num_samples: tuple[int, ...]
    ended: set[BatchId] = field(default_factory=set)  # dropped, or evaluated

    @property
    def batches(self) -> range:
        """The numbers of its microbatches."""
        return range(self.first_batch, self.first_batch + len(self.num_samples))


@dataclass(frozen=True, slots=True)
class Awaited:
    """A microbatch whose loss the leaf has not told yet."""

    holder: str
    epoch: int
    num_samples: int


@dataclass(slots=True)
class Means:
    """Means weighted by samples; what was no number does not count."""

    sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, report: StepReport, num_samples: int) -> None:
        """Take what a leaf says of a microbatch of so many samples."""
        for name, value in (("loss", report.loss), *report.metrics[:_MOST_METRICS]):
            if name not in self.sums and len(self.sums) > _MOST_METRICS:
                continue
            total, weight = self.sums.get(name, (0.0, 0))
            if value is not None:
                total, weight = total + value * num_samples, weight + num_samples
            self.sums[name] = (total, weight)

    def read(self) -> tuple[float | None, Metrics]:
        """Return the mean loss, and the means of the metrics."""
        means = {name: total / weight if weight else None for name, (total, weight) in self.sums.items()}
        return means.pop("loss", None), tuple(means.items())


@dataclass(slots=True)
class Evaluation:
    """One way through the validation samples, by one cluster."""

    epoch: int  # passes done
    is_last: bool = False
    holder: str = ""
    next_sample: int = 0
    num_samples: int = 0
    means: Means = field(default_factory=Means)


@dataclass(slots=True)
class Progress:
    """How far a cluster is, to tell it rates ahead of its updates."""

    version: int
    position: int = 0  # batches that all clusters had trained when it came to that version
    rates: dict[int, float] = field(default_factory=dict)  # by the update they hold from, as it was told
    num_trained: int = 0  # samples
    num_alone: int = 0  # of them since the last round
    num_known: int = 0  # samples of all clusters that its weights have learned from
    base: RoundId | None = _NONE  # the round whose average it began from; None: it has no such average


@dataclass(frozen=True, slots=True)
class Books:
    """What was trained when a checkpoint was made; leases under way are given back."""

    num_counted: int
    num_reported: int
    num_updates: int
    num_evaluated: int  # passes over the data after which it was evaluated
    leases: LeaseState
