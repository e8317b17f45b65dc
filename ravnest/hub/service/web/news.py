"""Notices as news: a number, a topic, a tone, and whom they are about. Pure."""

from ravnest.hub.coordinator.notice_texts import show_notice
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
    WorkUndone,
)
from ravnest.web.updates import NumberedNews

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
        WorkUndone,
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


class NewsList(NumberedNews):
    """The last notices, numbered from 1."""

    def add(self, notice: Notice, at: float | None) -> None:
        """Add a notice, but for progress, which curves show, and the link with its token."""
        if not isinstance(notice, Trained | DashboardOpened):
            facts = (type(notice).__name__, _topic(notice), _tone(notice), show_notice(notice))
            self.append(*facts, at, _names(notice))

    def say(self, kind: str, tone: str, text: str, at: float | None) -> None:
        """Add a sentence about the whole run."""
        self.append(kind, "training", tone, text, at)


def _topic(notice: Notice) -> str:
    return next((topic for topic, kinds in _TOPICS.items() if isinstance(notice, kinds)), "training")


def _tone(notice: Notice) -> str:
    if isinstance(notice, RoundEnded):
        return "plain" if notice.is_committed and not notice.unlike else "warning"
    return next((tone for tone, kinds in _TONES.items() if isinstance(notice, kinds)), "plain")


def _names(notice: Notice) -> tuple[str, ...]:
    match notice:
        case Measured(node):
            return (node.name,)
        case WorkUndone(node):
            return (node,)
        case Joined() | Left() | Leaving() | Missing() | Returned() | SpeedChanged() | MicrobatchDropped():
            return (notice.node,)
        case ClusterStarted(_, nodes):
            return tuple(nodes)
        case Recovered(_, _, sources):
            return tuple(sources)
        case WentWrong(_, suspect):
            return (suspect,)
    return ()
