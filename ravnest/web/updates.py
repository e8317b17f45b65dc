"""Updates of a page: where things stand, and the news and points it has not got. Pure.

Whoever records cuts off what is new, once. A replica in the web's thread puts the pieces together again for
pages that open later. So no two threads share a list. A curve has a bounded length, whatever a run's: a full
one halves itself, and readers get it anew.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

_MOST_NEWS = 2_000
_MOST_LETTERS = 2_000  # of a sentence: a plan of 200 nodes names them all
MOST_POINTS = 1024
Point = tuple[float, int, float]  # seconds of the hub's time, samples trained, value


@dataclass(frozen=True, slots=True)
class CurvePart:
    """The points of a curve from number `first` on; a reader has what came before if generations agree."""

    generation: int
    first: int
    points: tuple[Point, ...]


class RunCurve:
    """Takes points in the order of time."""

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most_points = most_points
        self._points: list[Point] = []
        self._unfinished: list[Point] = []  # fewer than a point stands for
        self.generation = 0

    def __len__(self) -> int:
        return len(self._points)

    def add(self, seconds: float, num_samples: int, value: float) -> None:
        """Add a point."""
        self._unfinished.append((seconds, num_samples, value))
        if len(self._unfinished) < 2**self.generation:
            return
        self._points.append(_mean(self._unfinished))
        self._unfinished = []
        if len(self._points) >= self._most_points:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [_mean([*pair]) for pair in pairs]
            self.generation += 1

    def after(self, generation: int, number: int) -> CurvePart:
        """Return what a reader lacks that has so many points of this generation."""
        first = number if generation == self.generation and number <= len(self._points) else 0
        return CurvePart(self.generation, first, tuple(self._points[first:]))


def _mean(points: list[Point]) -> Point:
    """Return the mean value, where the last of the points is."""
    seconds, num_samples, _ = points[-1]
    return seconds, num_samples, sum(point[2] for point in points) / len(points)


@dataclass(frozen=True, slots=True)
class NewsDocument:
    """A notice as people read it."""

    number: int
    at: float | None  # None: before the job began
    kind: str
    topic: str  # members, plan, training, rounds, checkpoints, hub
    tone: str  # good, plain, warning, bad
    text: str
    names: tuple[str, ...]  # nodes it is about


class Numbered(Protocol):
    """Where things stand, of the run with a number."""

    @property
    def number(self) -> int:
        """The number of the run, in this program."""


_Run = TypeVar("_Run", bound=Numbered)


@dataclass(frozen=True, slots=True)
class PageUpdate(Generic[_Run]):
    """What a page that follows is sent."""

    run: _Run
    is_whole: bool  # what the page had before is to be forgotten
    news: tuple[NewsDocument, ...]
    curves: dict[str, CurvePart]


class NumberedNews:
    """The last sentences, numbered from 1."""

    def __init__(self, most_news: int = _MOST_NEWS) -> None:
        self._news: deque[NewsDocument] = deque(maxlen=most_news)
        self.num_added = 0

    def append(
        self,
        kind: str,
        topic: str,
        tone: str,
        text: str,
        at: float | None,
        names: tuple[str, ...] = (),
    ) -> None:
        """Add a sentence."""
        self.num_added += 1
        shown = text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"
        self._news.append(NewsDocument(self.num_added, at, kind, topic, tone, shown, names))

    def after(self, number: int) -> tuple[NewsDocument, ...]:
        """Return all that came after this number, as far as it is still here."""
        return tuple(islice(self._news, max(0, len(self._news) - (self.num_added - number)), None))

    def __iter__(self) -> Iterator[NewsDocument]:
        return iter(self._news)


class GrowthCutter:
    """Cuts off what news and curves have that was not cut off before."""

    def __init__(self) -> None:
        self._num_news = 0
        self._points: dict[str, tuple[int, int]] = {}  # generation and number of points, by curve

    def cut(self, run: _Run, news: NumberedNews, curves: Mapping[str, RunCurve]) -> PageUpdate[_Run]:
        """Return where things stand, and what is new."""
        is_first = not self._num_news and not self._points
        new = {name: curve.after(*self._points.get(name, (0, 0))) for name, curve in curves.items()}
        new = {name: part for name, part in new.items() if part.points}
        self._points |= {name: (part.generation, part.first + len(part.points)) for name, part in new.items()}
        found = PageUpdate(run, is_first, news.after(self._num_news), new)
        self._num_news = news.num_added
        return found


class PageReplica(Generic[_Run]):
    """All that is known, as the web's thread knows it; put all updates into it, in order."""

    def __init__(self) -> None:
        self.run: _Run | None = None
        self.news: deque[NewsDocument] = deque(maxlen=_MOST_NEWS)
        self._curves: dict[str, tuple[int, list[Point]]] = {}

    def apply(self, update: PageUpdate[_Run]) -> None:
        """Take an update."""
        if update.is_whole or (self.run is not None and self.run.number != update.run.number):
            self.news.clear()
            self._curves = {}
        self.run = update.run
        self.news.extend(update.news)
        for name, part in update.curves.items():
            generation, points = self._curves.get(name, (part.generation, []))
            kept = points[: part.first] if generation == part.generation else []
            self._curves[name] = (part.generation, [*kept, *part.points][-MOST_POINTS:])

    @property
    def curves(self) -> dict[str, CurvePart]:
        """All curves from their beginning."""
        return {name: CurvePart(found[0], 0, tuple(found[1])) for name, found in self._curves.items()}

    def whole(self) -> PageUpdate[_Run] | None:
        """Return all that is known, for a page that has nothing; None before the first update."""
        if self.run is None:
            return None
        return PageUpdate(self.run, True, tuple(self.news), self.curves)

    def end(self) -> None:
        """Record that what was followed is no longer at work."""
