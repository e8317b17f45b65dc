"""The run as the web's thread knows it. The recorder stays with the hub, which cuts off what is new. Pure.

So the hub makes each piece of news once, whatever the number of pages, and no two threads share a list.
"""

from collections import deque
from dataclasses import replace

from ravnest.hub.service.web.curves import MOST_POINTS, CurvePart, Point
from ravnest.hub.service.web.documents import NewsDocument, RunDocument, UpdateDocument
from ravnest.hub.service.web.recorder import RunRecorder
from ravnest.hub.service.web.snapshot import HubFacts, make_document

_MOST_NEWS = 2_000


class UpdateCutter:
    """Cuts off what a recorder has that was not cut off before."""

    def __init__(self, recorder: RunRecorder) -> None:
        self.recorder = recorder
        self._num_news = 0
        self._points: dict[str, tuple[int, int]] = {}  # generation and number of points, by curve

    def cut(self, facts: HubFacts) -> UpdateDocument:
        """Return where the run stands, and what is new."""
        is_first = not self._num_news and not self._points
        news, curves = self.recorder.news.after(self._num_news), self.recorder.curves_after(self._points)
        self._num_news = self.recorder.news.num_added
        self._points |= {
            name: (part.generation, part.first + len(part.points)) for name, part in curves.items()
        }
        run = make_document(self.recorder, facts)
        return UpdateDocument(run, is_first, news, curves)


class RunReplica:
    """Put all updates into it, in order."""

    def __init__(self) -> None:
        self.run: RunDocument | None = None
        self.news: deque[NewsDocument] = deque(maxlen=_MOST_NEWS)
        self._curves: dict[str, tuple[int, list[Point]]] = {}

    def apply(self, update: UpdateDocument) -> None:
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

    def whole(self) -> UpdateDocument | None:
        """Return all that is known, for a page that has nothing; None before the first update."""
        if self.run is None:
            return None
        return UpdateDocument(self.run, True, tuple(self.news), self.curves)

    def end(self) -> None:
        """Record that the hub is no longer at work."""
        if self.run is not None:
            self.run = replace(self.run, is_live=False, can_stop=False, can_invite=False)
