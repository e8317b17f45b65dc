"""Loss guard: finds training that goes wrong, by a loss that leaps and stays up or by dropped microbatches.

It compares the median of each cluster's losses with the best median so far, so one hard microbatch is no
alarm. An alarm has to be beyond doubt; training heals small troubles by itself. Of three clusters and more,
the best is by the median over clusters, and one of which most others do not share the trouble is unlike them:
that is no alarm for all, and what it says keeps nobody from a checkpoint.

The first loss after a blocking round is of weights that all members have: others can find it again. What
stages say of their gradients adds up to the job's noise scale.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from statistics import median, pstdev

from ravnest.hub.coordinator.events import LossClaimed
from ravnest.ids import NodeId, RoundId
from ravnest.plan.sharing import TrainingLength
from ravnest.protocol.training import GradientNoise, StepReport

_WINDOW = 32  # microbatches of a cluster
_STORM = 0.5  # of them dropped
_FEW = 3  # clusters: of fewer, none is unlike the others
_DEVIATIONS, _OF_BEST, _OF_FALL = 10.0, 0.5, 0.25  # above the best median: all of them are passed in a leap

_CLEARLY = 1.5  # times as large
_MOST_TIMES = 16.0  # as large, or as small, as the guess


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong, and where it was seen first."""

    reason: str
    suspect: str  # a node that drops microbatches, or a cluster whose loss leaps


@dataclass(frozen=True, slots=True)
class Unlike:
    """A cluster that goes wrong alone, and how."""

    cluster_id: str
    reason: str


@dataclass(slots=True)
class _Record:
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    middle: float | None = None  # the median, once there are enough losses
    is_dropped: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    droppers: Counter[NodeId] = field(default_factory=Counter)

    @property
    def is_known(self) -> bool:
        """Whether enough was seen to compare others with it."""
        return self.middle is not None or len(self.is_dropped) >= _WINDOW // 2


class LossGuard:
    """Keeps the last losses of each cluster, by cluster_id; the best median is that of all clusters."""

    def __init__(self) -> None:
        self._first: float | None = None  # median
        self._best, self._spread = 0.0, 0.0  # the lowest median, and how far losses were from their mean then
        self.go_back()

    def go_back(self) -> None:
        """Forget what went wrong, because training goes back; keep the best median."""
        self._records: defaultdict[str, _Record] = defaultdict(_Record)
        self._uneasy: set[str] = set()  # clusters that are half way to an alarm
        self.alarm: Alarm | None = None
        self.unlike: deque[Unlike] = deque()  # to be taken by who acts on them

    @property
    def is_calm(self) -> bool:
        """Whether the present weights are worth a checkpoint: no cluster is half way to an alarm.

        One of many that is, alone, says nothing of the others' weights.
        """
        return self.alarm is None and not any(not self._is_alone(each) for each in self._uneasy)

    def forget_others(self, cluster_ids: Collection[str]) -> None:
        """Forget all clusters but these: the losses of one that is no more would never change."""
        for cluster_id in self._records.keys() - set(cluster_ids):
            del self._records[cluster_id]
        self._uneasy &= self._records.keys()

    def record_loss(self, cluster_id: str, cluster: str, loss: float | None) -> None:
        """Add the loss of a microbatch that a leaf reports."""
        if loss is None:
            return
        record = self._records[cluster_id]
        record.losses.append(loss)
        record.is_dropped.append(False)
        if len(record.losses) == _WINDOW:
            middle = record.middle = median(record.losses)
            found = [each.middle for each in self._records.values() if each.middle is not None]
            typical = median(found) if len(found) >= _FEW else middle
            if self._first is None or min(typical, middle) < self._best:
                self._improve(typical, pstdev(record.losses))
            elif self._is_high(middle, 1.0):
                told = f"the loss of cluster {cluster} is {middle:.3g}, and was {self._best:.3g}"
                self._sound(cluster_id, told, f"cluster {cluster}")
        self._judge(cluster_id)

    def _improve(self, middle: float, spread: float) -> None:
        if self._first is not None and middle >= self._best:
            return  # one cluster alone is better than all others: no measure for them
        self._first = middle if self._first is None else self._first
        self._best, self._spread = middle, spread
        for each in self._records:  # they are further from the best now
            self._judge(each)

    def _sound(self, cluster_id: str, reason: str, suspect: str) -> None:
        """Alarm, or tell that a cluster is unlike the others; of that one, what was seen begins anew."""
        self._judge(cluster_id)
        if not self._is_alone(cluster_id):
            self.alarm = self.alarm or Alarm(reason, suspect)
            return
        self.unlike.append(Unlike(cluster_id, reason))
        del self._records[cluster_id]
        self._uneasy.discard(cluster_id)

    def _is_alone(self, cluster_id: str) -> bool:
        """Return whether most of the other clusters, two at least, do not share a cluster's trouble."""
        others = [each for each, record in self._records.items() if each != cluster_id and record.is_known]
        return len(others) >= _FEW - 1 and 2 * len(self._uneasy.intersection(others)) < len(others)

    def record_dropped(self, cluster_id: str, node: NodeId, reason: str) -> None:
        """Add a microbatch that a node dropped because it failed, or its values were no finite numbers."""
        record = self._records[cluster_id]
        record.is_dropped.append(True)
        record.droppers[node] += 1
        num_dropped = sum(record.is_dropped)
        if len(record.is_dropped) == _WINDOW and num_dropped > _STORM * _WINDOW:
            suspect = max(record.droppers, key=lambda name: record.droppers[name])
            told = f"{num_dropped} of the last {_WINDOW} microbatches were dropped (last: {reason})"
            self._sound(cluster_id, told, suspect)
        self._judge(cluster_id)

    def _judge(self, cluster_id: str) -> None:
        record = self._records[cluster_id]
        is_dropping = sum(record.is_dropped) >= _STORM * _WINDOW / 2
        if is_dropping or self._is_high(record.middle, 0.5):
            self._uneasy.add(cluster_id)
        else:
            self._uneasy.discard(cluster_id)

    def _is_high(self, middle: float | None, share: float) -> bool:
        if self._first is None or middle is None:
            return False
        leap = max(
            _DEVIATIONS * self._spread, _OF_BEST * abs(self._best), _OF_FALL * (self._first - self._best)
        )
        return middle > self._best + share * leap


class FirstLosses:
    """Finds the first losses after blocking rounds; `forget_all` when training begins anew."""

    def __init__(self) -> None:
        self._averaged: dict[str, RoundId] = {}  # of clusters that have reported nothing since this round
        self._parted: set[str] = set()  # clusters that did not hear the hub for a while since the last round

    def forget_all(self) -> None:
        """Await none."""
        self._averaged = {}

    def forget_others(self, cluster_ids: Collection[str]) -> None:
        """Forget all clusters but these."""
        self._averaged = {each: last for each, last in self._averaged.items() if each in cluster_ids}

    def part(self, cluster_id: str) -> None:
        """Await none of a cluster that does not hear the hub: it may train on beside a round."""
        self._averaged.pop(cluster_id, None)
        self._parted.add(cluster_id)

    def end_round(self, round_id: RoundId, members: Iterable[str]) -> None:
        """Await one of each of these clusters, which have the average of a round that has ended."""
        self._averaged |= dict.fromkeys((each for each in members if each not in self._parted), round_id)
        self._parted.clear()

    def claim(self, cluster_id: str, report: StepReport, now: float) -> LossClaimed | None:
        """Return the claim that others can check, if this report is the first after a round."""
        round_id = self._averaged.pop(cluster_id, None)
        if round_id is None:
            return None
        is_average = report.anchor_round == round_id
        if is_average and report.loss is None:
            return None
        return LossClaimed(cluster_id, report.microbatch, round_id, report.loss if is_average else None, now)


class NoiseMonitor:
    """Adds up what stages say of their gradients; `record` returns a noise scale that is worth telling.

    That of a cluster is known when each of its stages has reported. That of the job is the median over
    clusters, no further from the guess than a factor. It grows while a job learns.
    """

    def __init__(self) -> None:
        self._found: dict[str, dict[NodeId, GradientNoise]] = {}  # by cluster
        self._told = 0.0

    def record(
        self,
        cluster_id: str,
        nodes: Collection[NodeId],
        sender: NodeId,
        noise: GradientNoise,
        length: TrainingLength,
    ) -> float | None:
        """Record a stage's report; return the noise scale if it is new or clearly larger."""
        self._found.setdefault(cluster_id, {})[sender] = noise
        if any(node not in self._found[cluster_id] for node in nodes):
            return None
        guess = length.noise_scale
        middle = median(_scale(each.values()) for each in self._found.values())
        scale = min(max(middle, guess / _MOST_TIMES), guess * _MOST_TIMES)
        if scale < _CLEARLY * self._told:
            return None
        self._told = scale
        return scale

    def forget_others(self, cluster_ids: Collection[str]) -> None:
        """Forget clusters that are no more."""
        self._found = {each: found for each, found in self._found.items() if each in cluster_ids}


def _scale(stages: Collection[GradientNoise]) -> float:
    variance = max(0.0, sum(each.variance for each in stages))
    signal = sum(each.signal for each in stages)
    return variance / signal if signal > 0.0 else float("inf")
