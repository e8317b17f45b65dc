"""What a simulation finds, minute by minute and in all: rates, staleness, rounds, lost work, the hub's load.

Everything here is of virtual time and the same for the same seed. What the CPU took is kept apart.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from statistics import fmean, median

from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Action, Event, Notify, Received, Send
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    ClusterDissolved,
    ClusterStarted,
    Notice,
    PlanFormed,
    Recovered,
    RoundEnded,
    Trained,
    WorkLost,
)
from ravnest.protocol import messages
from ravnest.protocol.averaging import RoundOpen
from ravnest.protocol.messages import Message
from ravnest.protocol.placement import PlanOrder, RingOrder
from ravnest.protocol.training import StepReport

MINUTE = 60.0
_SAMPLED = 64  # of messages of a kind, one is packed to know its size
_ALWAYS = (PlanOrder, RingOrder, RoundOpen)  # their size grows with the swarm


@dataclass(slots=True)
class MinuteSeen:
    """One minute."""

    minute: int
    samples: int = 0
    samples_per_second: float = 0.0
    members: int = 0
    clusters: int = 0  # that train, at its end
    mean_lag: float = 0.0  # updates that a root's microbatches were late
    most_lag: int = 0
    events: int = 0  # applied by the coordinator; reports are none
    reports: int = 0
    messages_in: int = 0
    messages_out: int = 0
    control_bytes: int = 0  # of messages to and from the hub
    sample_bytes: int = 0
    weight_bytes: int = 0
    relay_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """A round that ended."""

    at: float
    seconds: float
    is_committed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RecoverySeen:
    """A cluster that trains again after it stood still."""

    at: float
    cluster: str
    seconds: float


@dataclass(slots=True)
class Recorder:
    """Shown every event with its actions; `end` closes a minute."""

    hub: Coordinator
    spans: list[MinuteSeen] = field(default_factory=list)
    rounds: list[RoundSeen] = field(default_factory=list)
    recoveries: list[RecoverySeen] = field(default_factory=list)
    notices: Counter[str] = field(default_factory=Counter)
    foreseen: float = 0.0  # samples per second of the first plan
    first_trained_at: float | None = None
    given_back: int = 0  # samples that are trained again
    lost: int = 0  # samples whose training is in no weights any more
    num_samples: int = 0
    largest_order: int = 0
    _span: MinuteSeen = field(default_factory=lambda: MinuteSeen(0))
    _lags: Counter[int] = field(default_factory=Counter)
    _counts: Counter[str] = field(default_factory=Counter)
    _sizes: dict[str, tuple[int, int]] = field(default_factory=dict)  # bytes and number that were packed
    _lines: tuple[int, int, int] = (0, 0, 0)

    def observe(self, event: Event, actions: tuple[Action, ...], now: float) -> None:
        """Count an event, or a report, and what follows from it."""
        span = self._span
        if isinstance(event, Received):
            span.messages_in += 1
            span.control_bytes += self._size(event.message)
            if isinstance(event.message, StepReport):
                span.reports += 1
                cluster = self.hub.placement.cluster_of(event.sender)
                if cluster is not None and cluster.root == event.sender:
                    self._lags[event.message.lag] += 1
            else:
                span.events += 1
        else:
            span.events += 1
        for action in actions:
            if isinstance(action, Send):
                span.messages_out += 1
                span.control_bytes += self._size(action.message)
            elif isinstance(action, Notify):
                self._hear(action.notice, now)

    def _hear(self, notice: Notice, now: float) -> None:
        self.notices[type(notice).__name__] += 1
        match notice:
            case Trained(num_samples):
                self._span.samples += num_samples - self.num_samples
                self.num_samples = num_samples
            case PlanFormed():
                self.foreseen = self.foreseen or notice.samples_per_second
            case ClusterStarted():
                self.first_trained_at = now if self.first_trained_at is None else self.first_trained_at
            case RoundEnded():
                seen = RoundSeen(_round(now), _round(notice.seconds), notice.is_committed, notice.reason)
                self.rounds.append(seen)
            case Recovered():
                self.recoveries.append(RecoverySeen(_round(now), notice.cluster, _round(notice.seconds)))
            case ClusterBroken():
                self.given_back += notice.num_given_back
            case ClusterDissolved():
                self.given_back += notice.num_given_back
                self.lost += notice.num_lost
            case WorkLost():
                self.lost += notice.num_samples

    def end_span(self, lines: tuple[float, float, float]) -> None:
        """Close a minute; `lines` is what the hub's line has carried so far: samples, weights, relay."""
        span, whole = self._span, tuple(int(each) for each in lines)
        span.samples_per_second = _round(span.samples / MINUTE)
        span.members, span.clusters = len(self.hub.membership), len(self.hub.placement.running)
        if self._lags:
            span.mean_lag = _round(sum(lag * times for lag, times in self._lags.items()) / self._lags.total())
            span.most_lag = max(self._lags)
        span.sample_bytes, span.weight_bytes, span.relay_bytes = (
            after - before for after, before in zip(whole, self._lines, strict=True)
        )
        self._lines = (whole[0], whole[1], whole[2])
        self.spans.append(span)
        self._span, self._lags = MinuteSeen(span.minute + 1), Counter()

    def _size(self, message: Message) -> int:
        """Return the bytes of a message: those of its kind in the mean, or its own where kinds differ."""
        name = type(message).__name__
        count = self._counts[name]
        self._counts[name] += 1
        total, packed = self._sizes.get(name, (0, 0))
        if isinstance(message, _ALWAYS) or count % _SAMPLED == 0:
            size = len(messages.pack(message))
            self._sizes[name] = (total + size, packed + 1)
            if isinstance(message, PlanOrder):
                self.largest_order = max(self.largest_order, size)
            return size
        return total // packed

    def report(self) -> dict[str, object]:
        """Return everything as plain values."""
        busy = [span for span in self.spans if span.samples]
        seconds = [each.seconds for each in self.recoveries]
        committed = [each.seconds for each in self.rounds if each.is_committed]
        totals = {
            "samples": self.num_samples,
            "samples_per_second": _round(self.num_samples / max(1.0, MINUTE * len(self.spans))),
            "steady_samples_per_second": _round(_median([span.samples_per_second for span in busy])),
            "foreseen_samples_per_second": _round(self.foreseen),
            "first_trained_at": None if self.first_trained_at is None else _round(self.first_trained_at),
            "mean_lag": _round(fmean([span.mean_lag for span in busy])) if busy else 0.0,
            "most_lag": max((span.most_lag for span in busy), default=0),
            "rounds_committed": len(committed),
            "rounds_lost": len(self.rounds) - len(committed),
            "round_seconds": _round(_median(committed)),
            "recoveries": len(seconds),
            "recovery_seconds": _round(_median(seconds)),
            "longest_recovery_seconds": max(seconds, default=0.0),
            "samples_trained_again": self.given_back,
            "samples_lost": self.lost,
            "events": sum(span.events for span in self.spans),
            "reports": sum(span.reports for span in self.spans),
            "messages_in": sum(span.messages_in for span in self.spans),
            "messages_out": sum(span.messages_out for span in self.spans),
            "largest_plan_order_bytes": self.largest_order,
        }
        return {
            "totals": totals,
            "notices": dict(sorted(self.notices.items())),
            "minutes": [asdict(span) for span in self.spans],
            "rounds": [asdict(each) for each in self.rounds],
            "recovered": [asdict(each) for each in self.recoveries],
        }


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0


def _round(value: float) -> float:
    return float(f"{value:.6g}")
