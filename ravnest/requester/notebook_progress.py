"""The progress of a training below the cell of a notebook that runs it: one small page that is drawn again.

`find_notebook` knows whether a notebook runs this program. What is shown is made from a Status and the last
notices; text that nodes bring is escaped. Nothing of IPython is loaded where none is.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, Self

from ravnest.config import TIMEOUTS, ProgramTimeouts
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import DashboardOpened, Notice, Trained
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.hub.service.status import MemberStatus, Status, StatusTracker
from ravnest.units import show_seconds

_NUM_SAID = 6
_MOST_NODES = 24  # rows; of more, the first
_CELL = 'style="text-align:left;padding:0 1em 0 0"'


def show_page(status: Status | None, said: tuple[str, ...] = (), link: str = "") -> str:
    """Return how far a training is as HTML: a bar, its numbers, its nodes and what was said last."""
    parts = [] if status is None else [_show_bar(status), *_show_nodes(status.members)]
    parts += [f'<div style="opacity:.75">{escape(line)}</div>' for line in said[-_NUM_SAID:]]
    if link:
        parts.append(f'<div><a href="{escape(link)}" target="_blank">watch it as a page</a></div>')
    return f'<div style="font-size:90%;line-height:1.5">{"".join(parts)}</div>'


def _show_bar(status: Status) -> str:
    done = min(max(status.num_samples, 0), status.num_total) / status.num_total if status.num_total else 0.0
    bar = f'<progress value="{done:.4f}" max="1" style="width:20em;vertical-align:middle"></progress>'
    return f"<div>{bar} {escape(' · '.join(_find_facts(status, done)))}</div>"


def _find_facts(status: Status, done: float) -> Iterator[str]:
    yield f"{done:.0%}"
    yield str(status.phase)
    if status.epoch:
        yield f"epoch {status.epoch}"
    if status.loss is not None:
        yield f"loss {status.loss:.4g}"
    for name, value in status.validation.items():
        if value is not None:
            yield f"val {name} {value:.4g}"
    if status.phase is JobPhase.TRAINING and status.samples_per_second > 0:
        yield f"{status.samples_per_second:,.0f} samples/s"
        left = (status.num_total - status.num_samples) / status.samples_per_second
        yield f"{show_seconds(max(left, 0.0))} left"


def _show_nodes(members: tuple[MemberStatus, ...]) -> Iterator[str]:
    if not members:
        return
    order = sorted(members, key=lambda each: (each.cluster is None, each.cluster or "", each.stage or 0))
    rows: list[tuple[str, str, str, str]] = [
        (
            each.cluster or "",
            "" if each.stage is None else str(each.stage),
            each.name,
            each.fetching or each.phase,
        )
        for each in order[:_MOST_NODES]
    ]
    if len(order) > _MOST_NODES:
        rows.append(("", "", f"and {len(order) - _MOST_NODES} more", ""))
    head = "".join(f"<th {_CELL}>{name}</th>" for name in ("cluster", "stage", "node", "phase"))
    yield f'<table style="margin:.3em 0;border:0"><tr>{head}</tr>'
    for row in rows:
        yield f"<tr>{''.join(f'<td {_CELL}>{escape(word)}</td>' for word in row)}</tr>"
    yield "</table>"


def _clock() -> float:
    return time.perf_counter()  # noqa: TID251 - how often people are shown something


class NotebookProgress:
    """A callback that draws notices and the status as HTML; each training gets a place of its own."""

    def __init__(
        self,
        open_place: Callable[[], Callable[[str], None]],
        timeouts: ProgramTimeouts = TIMEOUTS.program,
        clock: Callable[[], float] = _clock,
    ) -> None:
        self._open_place, self._clock = open_place, clock
        self._draw: Callable[[str], None] = lambda _: None
        self._pause_seconds = timeouts.redraw_seconds
        self._drawn_at = float("-inf")
        self._said: deque[str] = deque(maxlen=_NUM_SAID)
        self._watch: StatusTracker | None = None
        self._link = ""

    def __call__(self, notice: Notice) -> None:
        """Show what is said; how far it is, the bar shows."""
        if isinstance(notice, DashboardOpened):
            self._link = notice.link
        elif not isinstance(notice, Trained):
            self._said.append(show_notice(notice))
        self._show()

    def look(self, watch: StatusTracker) -> None:
        """Show where the run stands, unless it was shown a moment ago."""
        self._watch = watch
        self._show()

    def __enter__(self) -> Self:
        self._draw = self._open_place()
        self._watch, self._drawn_at, self._link = None, float("-inf"), ""
        self._said.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._show(is_last=True)

    def _show(self, is_last: bool = False) -> None:
        now = self._clock()
        if is_last or now >= self._drawn_at + self._pause_seconds:
            self._drawn_at = now
            status = None if self._watch is None else self._watch.status()
            self._draw(show_page(status, tuple(self._said), self._link))


class _OutputOfCell:
    """The place below the running cell; drawn by the same id, it is replaced."""

    def __init__(self, display: Any, as_html: Any) -> None:
        self._display, self._as_html = display, as_html
        self._handle: Any = None

    def __call__(self, page: str) -> None:
        if self._handle is None:
            self._handle = self._display(self._as_html(page), display_id=True)
        else:
            self._handle.update(self._as_html(page))


def find_notebook(timeouts: ProgramTimeouts = TIMEOUTS.program) -> NotebookProgress | None:
    """Return the progress for the notebook that runs this program; None in any other place."""
    found = sys.modules.get("IPython")
    shell = None if found is None else found.get_ipython()
    if shell is None or "IPKernelApp" not in shell.config:
        return None
    from IPython.display import HTML, display

    return NotebookProgress(lambda: _OutputOfCell(display, HTML), timeouts)
