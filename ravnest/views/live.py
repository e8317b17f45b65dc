"""The status of a run for people: a panel in the terminal, and the same as plain data.

The panel is drawn again when something happens, at most a few times a second; it has no timer of its own.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ravnest.config import TIMEOUTS, ProgramTimeouts
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import DashboardOpened, Notice
from ravnest.hub.coordinator.phases import ClusterPhase, JobPhase, NodePhase
from ravnest.hub.service.status import Status, StatusTracker
from ravnest.units import show_count, show_seconds

STATUS_SCHEMA = "ravnest.status/2"
_NUM_SAID = 6
_MOST_LETTERS = 100  # of a text that the model writes
_MOST_NODES = 24  # rows; of more, the first
_BAR_WIDTH = 14
_STYLES = {
    NodePhase.HOSTING: "green",
    NodePhase.BUILDING: "yellow",
    NodePhase.PROBING: "yellow",
    NodePhase.SPARE: "cyan",
}


def show_status(status: Status, has_hub: bool = True) -> RenderableType:
    """Return the panel: progress, speed, nodes, last notices; without a hub, how the run ended."""
    parts: list[RenderableType] = [_show_progress(status, has_hub)]
    if status.members:
        parts.append(_show_nodes(status))
    parts += [Text(f"    text  {each.prompt!r} {_shorten(each.text)!r}") for each in status.texts]
    said = [
        Text(f"{_show_age(status.now - each.now, has_hub):>8}  {each.text}")
        for each in status.recent[-_NUM_SAID:]
    ]
    counts = f"{show_count(len(status.clusters), 'cluster')}, {show_count(len(status.members), 'node')}"
    return Panel(Group(*parts, *said), title=Text(f"ravnest  {status.job or 'no job yet'}  {counts}"))


def _shorten(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def status_to_dict(status: Status, *, has_hub: bool = True) -> dict[str, object]:
    """Return the status as versioned data; without a hub there is no time left."""
    known = {name: _plain(value) for name, value in asdict(status).items()}
    return {"schema": STATUS_SCHEMA, **known} | ({} if has_hub else {"eta_seconds": None})


def _plain(value: object) -> object:
    """Return a value as JSON has it: a number that is not finite is unknown."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _show_progress(status: Status, has_hub: bool) -> RenderableType:
    done = (
        min(max(status.num_samples, 0), status.num_total) / status.num_total if status.num_total > 0 else 0.0
    )
    is_interrupted = not has_hub and status.phase is not JobPhase.FINISHED
    phase = "interrupted" if is_interrupted else "paused" if status.is_paused else str(status.phase)
    facts = [phase, f"epoch {status.epoch}", f"{done:.0%}"]
    if status.loss is not None:
        facts.append(f"loss {status.loss:.4g}")
    facts += [f"val {name} {value:.4g}" for name, value in status.validation.items() if value is not None]
    if status.phase is JobPhase.TRAINING and has_hub:
        facts.append(_show_rate(status))
    if status.eta_seconds is not None and has_hub:
        facts.append(f"{show_seconds(status.eta_seconds)} left")
    bar = Table.grid(expand=True)  # which ends its line, as a bar alone does not
    bar.add_row(ProgressBar(total=1.0, completed=done))
    more = _show_averaging(status)
    return Group(bar, Text("  ".join(facts)), *([Text("  ".join(more), style="dim")] if more else []))


def _show_averaging(status: Status) -> list[str]:
    """Return what is known of rounds, and of what a sample is worth."""
    facts: list[str] = []
    if status.rounds_committed or status.rounds_aborted:
        took = "" if status.round_seconds is None else f", the last in {show_seconds(status.round_seconds)}"
        facts.append(f"rounds {status.rounds_committed} committed, {status.rounds_aborted} aborted{took}")
    if len(status.clusters) > 1:
        facts.append(f"a sample has {status.efficiency:.0%} of its effect in one process")
    if status.noise_scale is not None:
        facts.append(f"noise scale {status.noise_scale:.3g} samples")
    if status.left_out:
        facts.append(f"without {', '.join(status.left_out)}")
    if status.dropped:
        facts.append(f"{sum(len(each.samples) for each in status.dropped)} samples dropped")
    return facts


def _show_rate(status: Status) -> str:
    rate = f"{status.samples_per_second:,.0f} samples/s"
    predicted = status.predicted_samples_per_second
    return rate if predicted is None else f"{rate} ({predicted:,.0f} predicted)"


def _show_nodes(status: Status) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("cluster", "stage", "node", "phase", "busy", ""):
        table.add_column(name, no_wrap=True)
    order = sorted(
        status.members, key=lambda each: (each.cluster is None, each.cluster or "", each.stage or 0)
    )
    phases = {each.name: each.phase for each in status.clusters}
    for member in order[:_MOST_NODES]:
        stage = "" if member.stage is None else str(member.stage)
        phase = Text(member.fetching or member.phase, style=_STYLES.get(member.phase, ""))
        row = [
            _show_cluster(member.cluster, phases),
            stage,
            Text(member.name),
            phase,
            *_show_busy(member.busy),
        ]
        table.add_row(*row)
    if len(order) > _MOST_NODES:
        table.add_row("", "", f"and {len(order) - _MOST_NODES} more", "")
    return table


def _show_cluster(name: str | None, phases: Mapping[str, ClusterPhase]) -> str:
    """Return the name of a cluster; with its phase, if it does not simply train."""
    phase = phases.get(name or "", ClusterPhase.RUNNING)
    return (name or "") if phase is ClusterPhase.RUNNING else f"{name} {phase}"


def _show_busy(busy: float | None) -> tuple[RenderableType, str]:
    if busy is None:
        return "", ""
    return ProgressBar(total=1.0, completed=busy, width=_BAR_WIDTH), f"{busy:.0%}"


def _show_age(seconds: float, has_hub: bool) -> str:
    if seconds < 1:
        return "now" if has_hub else "at the end"
    shown = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{shown} {'ago' if has_hub else 'before'}"


def _clock() -> float:
    return time.perf_counter()  # noqa: TID251 - how often people are shown something


class LiveView:
    """A panel at the foot of the terminal from the first event on; printed lines stay above it."""

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = _clock,
        timeouts: ProgramTimeouts = TIMEOUTS.program,
    ) -> None:
        self._pause_seconds = timeouts.redraw_seconds
        self._console = console or Console(stderr=True, no_color="NO_COLOR" in os.environ, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._clock = clock
        self._drawn_at = float("-inf")
        self._watch: StatusTracker | None = None
        self._said: deque[str] = deque(maxlen=_NUM_SAID)  # before there is a job

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._draw(self._watch)
        self._live.stop()

    def tell(self, notice: Notice) -> None:
        """Print where the dashboard is; the panel shows all else, from the capture of the model on."""
        if isinstance(notice, DashboardOpened):
            self._console.print(Text(show_notice(notice), overflow="fold"))
        elif self._watch is None:
            self._said.append(show_notice(notice))
            self._show(Panel(Group(*map(Text, self._said)), title=Text("ravnest  getting ready")))

    def look(self, watch: StatusTracker) -> None:
        """Draw the status, unless it was drawn a moment ago."""
        self._watch, now = watch, self._clock()
        if now >= self._drawn_at + self._pause_seconds:
            self._drawn_at = now
            self._draw(watch)

    def _draw(self, watch: StatusTracker) -> None:
        self._show(show_status(watch.status()))

    def _show(self, picture: RenderableType) -> None:
        self._live.update(picture)
        self._live.start()  # does nothing the second time
        self._live.refresh()
