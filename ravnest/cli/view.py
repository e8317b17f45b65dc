"""What a command that trains shows and answers: a live panel, plain lines or nothing; then the result."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from ravnest.hub.coordinator.notices import Notice
    from ravnest.hub.service.status import StatusTracker
    from ravnest.requester.result import Result


@dataclass(frozen=True, slots=True)
class View:
    """The callbacks of a hub that show its notices and its status."""

    answers: TextIO
    tell: "Callable[[Notice], None] | None" = None
    look: "Callable[[StatusTracker], None] | None" = None


@contextlib.contextmanager
def choose_view(quiet: bool) -> Iterator[View]:
    """Give a panel on a terminal, plain lines elsewhere; stdout carries only the answer."""
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is not our answer
        if quiet:
            yield View(answers, lambda _: None)
        elif sys.stderr.isatty():
            from ravnest.views.live import LiveView

            with LiveView() as live:
                yield View(answers, live.tell, live.look)
        else:
            yield View(answers)


def report(result: "Result", file: Path | None, schema: str, as_json: bool) -> None:
    """Print how a training went."""
    from ravnest.requester.run_folder import BEST, MODEL

    best, best_file = result.best, None
    if file is not None:
        click.echo(f"weights written to {file}", err=True)
        best_file = file.with_name(BEST) if file.name == MODEL else None
    if best is not None:
        where = f", in {best_file}" if best_file else ""
        click.echo(f"best after epoch {best.epoch}: validation loss {best.loss:g}{where}", err=True)
    if as_json:
        found: dict[str, object] = {"metrics": result.metrics, "history": list(result.history)}
        if best is not None:
            place = None if best_file is None else str(best_file)
            found["best"] = {"epoch": best.epoch, "loss": best.loss, "model": place}
        model = None if file is None else str(file)
        click.echo(json.dumps({"schema": schema, "event": "done", "model": model, **found}, sort_keys=True))
        return
    for name, value in result.metrics.items():
        click.echo(f"{name} {value:g}")
