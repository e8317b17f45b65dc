"""Evaluations: when the model is evaluated, and the means over the validation samples.

That is after every so many epochs, or updates, and in the end. A mark is where an evaluation belongs: one
that others have passed meanwhile is left out.
"""

from dataclasses import dataclass, field

from ravnest.hub.coordinator.events import JobSettings, MetricSum
from ravnest.protocol.training import Metrics

MOST_METRICS = 256  # where the names of the job are not known
_MOST_SHOWN = 40  # letters of a name that a peer gave


def find_made_up(metrics: Metrics, names: tuple[str, ...] | None) -> str | None:
    """Return why reported metrics do not count: each has one of the job's names, if known, and comes once."""
    if not metrics:
        return None
    found: set[str] = set()
    for name, _ in metrics:
        if name == "loss" or (names is not None and name not in names):
            return f"it has {name[:_MOST_SHOWN]!r}, which is no metric of the job"
        if name in found:
            return f"it has the metric {name[:_MOST_SHOWN]!r} twice"
        found.add(name)
    return None if len(found) <= MOST_METRICS or names is not None else f"it has {len(found)} metrics"


@dataclass(slots=True)
class Means:
    """Means weighted by samples; values that are no finite numbers do not count."""

    sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, added: MetricSum) -> None:
        """Add a sum over samples."""
        name, more, num_samples = added
        if name in self.sums or len(self.sums) <= MOST_METRICS:
            total, weight = self.sums.get(name, (0.0, 0))
            self.sums[name] = (total + more, weight + num_samples)

    def read(self) -> tuple[float | None, Metrics]:
        """Return the mean loss, and the means of the metrics."""
        means = {name: total / weight if weight else None for name, (total, weight) in self.sums.items()}
        return means.pop("loss", None), tuple(means.items())


@dataclass(slots=True)
class Evaluation:
    """One pass over the validation samples, by one cluster."""

    epoch: int  # passes over the training samples before it
    is_last: bool = False
    cluster_id: str = ""
    next_sample: int = 0
    num_samples: int = 0
    means: Means = field(default_factory=Means)
    num_updates: int = 0  # of the job before it, where it is evaluated by updates

    @property
    def mark(self) -> int:
        """The update, or the epoch, that it comes after."""
        return self.num_updates or self.epoch

    def begin_again(self) -> "Evaluation":
        """Return the same evaluation, of which nothing is done."""
        return Evaluation(self.epoch, self.is_last, num_updates=self.num_updates)


class EvaluationSchedule:
    """Says which evaluation is due; `num_before` samples of the job come before the next lease."""

    def __init__(self, settings: JobSettings) -> None:
        self._settings, self._updates = settings, settings.evaluate_updates

    def find_due(self, last_mark: int, upcoming_epoch: int, num_before: int) -> Evaluation | None:
        """Return the evaluation after this mark, if training has come to it."""
        if not self._settings.num_validation:
            return None
        if self._updates:
            mark = self._count_updates(num_before) // self._updates * self._updates
            is_due = last_mark < mark < self._settings.num_batches
            epoch = self._settings.samples_of(mark) // self._settings.num_samples
            return Evaluation(epoch, num_updates=mark) if is_due else None
        epoch = last_mark + self._settings.evaluate_every
        is_due = self._settings.evaluate_every > 0 and upcoming_epoch >= epoch < self._settings.epochs
        return Evaluation(epoch) if is_due else None

    def make_last(self, num_counted: int) -> Evaluation | None:
        """Return the evaluation of the last weights, if there are validation samples."""
        if not self._settings.num_validation:
            return None
        passes = -(-num_counted // self._settings.num_samples)
        updates = self._count_updates(num_counted) if self._updates else 0
        return Evaluation(passes, is_last=True, num_updates=updates)

    def is_time_for(self, evaluation: Evaluation, upcoming_epoch: int, num_before: int) -> bool:
        """Return whether all samples before an evaluation are leased."""
        if evaluation.is_last:
            return True
        if self._updates:
            return num_before >= self._settings.samples_of(evaluation.num_updates)
        return upcoming_epoch >= evaluation.epoch

    def is_trained(self, evaluation: Evaluation, num_of_epoch: int, num_counted: int) -> bool:
        """Return whether all that comes before it is counted: of its epoch so many are, so many in all."""
        if evaluation.is_last:
            return True
        if self._updates:
            return num_counted >= self._settings.samples_of(evaluation.num_updates)
        return num_of_epoch == self._settings.epoch_size(evaluation.epoch - 1)

    def limit(self, num_samples: int, num_before: int) -> int:
        """Return how many samples a lease may have, so that it ends at the next mark."""
        if not self._updates or not self._settings.num_validation:
            return num_samples
        following = (self._count_updates(num_before) // self._updates + 1) * self._updates
        return max(1, min(num_samples, self._settings.samples_of(following) - num_before))

    def next_place(self, last_mark: int, num_before: int) -> int:
        """Return the samples of the job before the next evaluation, or before its end."""
        settings = self._settings
        if not settings.num_validation:
            return settings.num_total
        if self._updates:
            following = (self._count_updates(num_before) // self._updates + 1) * self._updates
            return min(settings.num_total, settings.samples_of(following))
        if not settings.evaluate_every:
            return settings.num_total
        return min(settings.num_total, (last_mark + settings.evaluate_every) * settings.num_samples)

    def is_at_mark(self, num_before: int, last_mark: int) -> bool:
        """Return whether no batch is to be granted before an evaluation by updates."""
        return bool(self._updates) and self.find_due(last_mark, 0, num_before) is not None

    def last_mark(self, mark: int, num_counted: int) -> int:
        """Return the last mark that is not evaluated again when training goes on from so many samples."""
        if self._updates:  # a mark of another job, by epochs maybe, means nothing
            return self._count_updates(num_counted) // self._updates * self._updates
        # A stopped job was evaluated within an epoch: that one is evaluated again when it is over.
        return min(mark, num_counted // self._settings.num_samples)

    def _count_updates(self, num_samples: int) -> int:
        """Return the whole batches among so many samples from the first of the job on."""
        epochs, more = divmod(num_samples, self._settings.num_samples)
        return epochs * self._settings.batches_per_epoch + more // self._settings.batch_size
