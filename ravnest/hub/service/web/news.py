"""Notices as news: a number, a topic, a tone, and whom they are about. Pure."""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from ravnest.hub.coordinator.notices import (
    BestIsResult,
    CaptureStep,
    Checkpointed,
    CheckpointIsResult,
    ClusterBroken,
    ClusterDissolved,
    ClusterStarted,
    ClusterSuspected,
    Contradicted,
    CutOff,
    DashboardOpened,
    Evaluated,
    HubListens,
    Joined,
    Leaving,
    Left,
    Measured,
    MicrobatchDropped,
    Missing,
    ModelCaptured,
    NoiseFound,
    NotCheckpointed,
    Notice,
    PlanFormed,
    Recovered,
    Repaired,
    ResultKept,
    ResultRefused,
    Returned,
    RoundEnded,
    SamplesDropped,
    SpeedChanged,
    Trained,
    Waiting,
    WentWrong,
    WorkLost,
    show_notice,
)
from ravnest.hub.service.web.documents import NewsDocument

_MOST_NEWS = 2_000
_MOST_LETTERS = 2_000  # of a sentence: a plan of 200 nodes names them all
_TOPICS: dict[str, tuple[type, ...]] = {
    "members": (Joined, Left, Leaving, Missing, Returned, Measured, SpeedChanged, CutOff),
    "plan": (
        PlanFormed,
        Repaired,
        ClusterStarted,
        ClusterBroken,
        ClusterDissolved,
        Recovered,
        Waiting,
        NoiseFound,
    ),
    "rounds": (RoundEnded,),
    "checkpoints": (
        Checkpointed,
        NotCheckpointed,
        CheckpointIsResult,
        ResultKept,
        BestIsResult,
        ResultRefused,
    ),
    "hub": (HubListens, CaptureStep, ModelCaptured),
}
_TONES: dict[str, tuple[type, ...]] = {
    "good": (Joined, Returned, ClusterStarted, Recovered, Evaluated, PlanFormed),
    "bad": (
        Left,
        Missing,
        CutOff,
        ClusterBroken,
        ClusterDissolved,
        WentWrong,
        ClusterSuspected,
        WorkLost,
        ResultRefused,
        Contradicted,
    ),
    "warning": (
        Leaving,
        SpeedChanged,
        Waiting,
        Repaired,
        MicrobatchDropped,
        SamplesDropped,
        NotCheckpointed,
        BestIsResult,
    ),
}


class NewsList:
    """The last notices, numbered from 1."""

    def __init__(self) -> None:
        self._news: deque[NewsDocument] = deque(maxlen=_MOST_NEWS)
        self.num_added = 0

    def add(self, notice: Notice, at: float | None) -> None:
        """Add a notice, but for progress, which curves show, and the link with its token."""
        if not isinstance(notice, Trained | DashboardOpened):
            names = _names(notice)
            self._append(type(notice).__name__, _topic(notice), _tone(notice), show_notice(notice), names, at)

    def say(self, kind: str, tone: str, text: str, at: float | None) -> None:
        """Add a sentence about the whole run."""
        self._append(kind, "training", tone, text, (), at)

    def after(self, number: int) -> tuple[NewsDocument, ...]:
        """Return all that came after this number, as far as it is still here."""
        return tuple(islice(self._news, max(0, len(self._news) - (self.num_added - number)), None))

    def __iter__(self) -> Iterator[NewsDocument]:
        return iter(self._news)

    def _append(
        self, kind: str, topic: str, tone: str, text: str, names: tuple[str, ...], at: float | None
    ) -> None:
        self.num_added += 1
        shown = text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"
        self._news.append(NewsDocument(self.num_added, at, kind, topic, tone, shown, names))


def _topic(notice: Notice) -> str:
    return next((topic for topic, kinds in _TOPICS.items() if isinstance(notice, kinds)), "training")


def _tone(notice: Notice) -> str:
    if isinstance(notice, RoundEnded):
        return "plain" if notice.is_committed else "warning"
    return next((tone for tone, kinds in _TONES.items() if isinstance(notice, kinds)), "plain")


def _names(notice: Notice) -> tuple[str, ...]:
    match notice:
        case Measured(node):
            return (node.name,)
        case Joined() | Left() | Leaving() | Missing() | Returned() | SpeedChanged() | MicrobatchDropped():
            return (notice.node,)
        case ClusterStarted(_, nodes):
            return tuple(nodes)
        case Recovered(_, _, sources):
            return tuple(sources)
        case WentWrong(_, suspect):
            return (suspect,)
    return ()
