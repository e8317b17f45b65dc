"""What commands share: the parts they work with, files in, files and tables out, options of plans, views.

`program.main(args, obj=CommandParts(...))` runs a command with other parts than the usual ones. Where a file
cannot be read or written, a sentence says so. A training shows a live panel, plain lines or nothing. With
`--config FILE` the options that the command line leaves out come from a TOML table, by their long names. A
table that names another command is for that one: one file may serve a hub and those who join it.
"""

import contextlib
import functools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from ravnest.config import TIMEOUTS, PlanConfig, Timeouts, parse_plan_table, read_plan_config
from ravnest.disk import read_bounded
from ravnest.errors import ConfigError
from ravnest.foreign import Document, parse_table, quote

if TYPE_CHECKING:  # each of them loads more than most commands need
    from rich.console import RenderableType

    from ravnest.hub.coordinator.notices import Notice
    from ravnest.hub.service.server import HubParts
    from ravnest.hub.service.status import StatusTracker
    from ravnest.peer.compute_process import StartChild
    from ravnest.peer.machine import Machine
    from ravnest.plan.types import Plan
    from ravnest.requester.result import Result


_NEVER = {"config", "help"}


def find_options(command: click.Command, document: Document) -> dict[str, Any]:
    """Return the options in the table of a command's name, by the names of their parameters."""
    name = command.name or ""
    table = document.values.get(name)
    if table is None:
        return {}
    if not isinstance(table, dict):
        document.refuse((name,), f"is {quote(table)}, not a table; write [{name}]")
    known = {_key_of(each): each for each in command.params if not getattr(each, "hidden", False)}
    known = {key: each for key, each in known.items() if key not in _NEVER}
    plain = {key: key.replace("_", "-") for key in table}
    document.refuse_unknown((name,), [*known, *(key for key in plain if plain[key] in known)])
    return {
        _name_of(known[plain[key]]): _read_value(known[plain[key]], value, document, (name, key))
        for key, value in table.items()
    }


def _key_of(parameter: click.Parameter) -> str:
    """Return how a file names it: `hub-upload`, or of an argument what the usage calls it."""
    if isinstance(parameter, click.Argument):
        return {"place": "job"}.get(_name_of(parameter), _name_of(parameter))
    return max(parameter.opts, key=len).lstrip("-")


def _name_of(parameter: click.Parameter) -> str:
    assert parameter.name is not None
    return parameter.name


def _read_value(parameter: click.Parameter, value: object, document: Document, place: tuple[str, str]) -> Any:
    is_flag = bool(getattr(parameter, "is_flag", False))
    alone = getattr(parameter, "flag_value", None)  # what an option means that may come without a value
    is_switch = not is_flag and isinstance(alone, str)
    if isinstance(value, bool) != is_flag and not (is_switch and value is True):
        document.refuse(place, f"is {quote(value)}; write {'true or false' if is_flag else 'its value'}")
    if value is True and is_switch:
        return alone
    many = value if isinstance(value, list) else [value]
    is_many = getattr(parameter, "multiple", False)
    is_plain = all(isinstance(each, str | int | float) for each in many)
    if not is_plain or (isinstance(value, list) and not is_many):
        document.refuse(
            place, f"is {quote(value)}; write a text or a number{', or a list' if is_many else ''}"
        )
    return [str(each) for each in many] if is_many else value


def read_text(name: str, max_bytes: int) -> str:
    """Return what a file or a pipe holds, or raise the sentence that says why it cannot be read."""
    try:
        return read_bounded(name, max_bytes, is_plain=False).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not text (byte {error.start} is no UTF-8); give a TOML or JSON file"
        ) from None


def write_text(option: str, name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"{option} {name} cannot be written: {error.strerror}"
        raise ConfigError(f"{reason}; give a file in a folder that exists and is yours") from None


def to_json(document: Mapping[str, object]) -> str:
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False)


def print_parts(show: Callable[[int], Iterable["RenderableType"]]) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    for part in show(console.width):
        console.print(part)


@dataclass(frozen=True, slots=True)
class CommandParts:
    """The parts that commands are built of; None is the usual one, loaded when it is needed."""

    timeouts: Timeouts = TIMEOUTS
    max_file_bytes: int = 1 << 29  # of a file to read; a million nodes take half of it
    hub: "HubParts | None" = None
    machine: "Machine | None" = None
    make_transport: Callable[..., Any] | None = None
    start_compute: "StartChild | None" = None
    form_plan: "Callable[..., Plan] | None" = None

    @property
    def hub_parts(self) -> "HubParts":
        """The parts of a hub."""
        from ravnest.hub.service.server import HubParts

        return HubParts(timeouts=self.timeouts) if self.hub is None else self.hub


def find_parts() -> CommandParts:
    """Return the parts that the running command was given."""
    context = click.get_current_context(silent=True)
    found = None if context is None else context.find_object(CommandParts)
    return CommandParts() if found is None else found


@dataclass(frozen=True, slots=True)
class View:
    """The callbacks of a hub that show its notices and its status."""

    answers: TextIO
    tell: "Callable[[Notice], None] | None" = None
    look: "Callable[[StatusTracker], None] | None" = None


class _StderrLines(logging.StreamHandler[TextIO]):
    """Writes to what stderr is at that moment: a live panel has its own, above which lines stay."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@contextlib.contextmanager
def _logging_to_stderr(verbose: bool) -> Iterator[None]:
    """Show warnings, or all that the program says of itself; the log of a run gets more than that."""
    lines, root = _StderrLines(), logging.getLogger()
    lines.setLevel(logging.DEBUG if verbose else logging.WARNING)
    levels = {"ravnest": logging.DEBUG, "ravnest.net": logging.DEBUG}
    if not verbose:
        levels = {"ravnest": logging.INFO, "ravnest.net": logging.WARNING}  # each link is a line
    before = {name: logging.getLogger(name).level for name in levels}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    root.addHandler(lines)
    try:
        yield
    finally:
        root.removeHandler(lines)
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def choose_view(quiet: bool, verbose: bool = False) -> Iterator[View]:
    """Give a panel on a terminal, plain lines elsewhere; stdout carries only the answer."""
    answers = sys.stdout
    # What the user's code prints is not our answer.
    with contextlib.redirect_stdout(sys.stderr), _logging_to_stderr(verbose):
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
    from ravnest.requester.run_folder import BEST, BEST_ADAPTER, MODEL, find_result

    best, best_file = result.best, None
    if file is not None:
        is_folder, best_name = file.name == MODEL, BEST_ADAPTER if result.is_adapted else BEST
        best_file = find_result(file.with_name(best_name)) if is_folder else None
        file = find_result(file)
        click.echo(f"{'adapter' if result.is_adapted else 'weights'} written to {file}", err=True)
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


@dataclass(frozen=True, slots=True)
class PlanWishes:
    """What the command line says of the plan."""

    config_file: str | None
    settings: tuple[str, ...]
    clusters: int | None
    favour: str | None

    def read(self, base: PlanConfig | None = None) -> PlanConfig:
        """Return the settings of the file with those of the command line above them; others as in `base`."""
        values: dict[str, object] = {}
        if self.config_file is not None:
            content = read_text(self.config_file, find_parts().max_file_bytes)
            table = parse_plan_table(content, self.config_file)
            if table is None and not has_options(click.get_current_context(silent=True)):
                told = f"note: {self.config_file} has no [plan] table; every setting has its default"
                click.echo(told, err=True)
            values = table or {}
        read_plan_config(values, f"{self.config_file}, table [plan]")
        given = self._read_settings()
        read_plan_config(given, "--set")
        named = {"clusters": self.clusters, "favour": self.favour}
        for name, value in named.items():
            if value is not None:
                given[name] = str(value)
                read_plan_config({name: str(value)}, f"--{name}")
        return read_plan_config({**values, **given}, "--set", base)

    def _read_settings(self) -> dict[str, str]:
        given: dict[str, str] = {}
        for setting in self.settings:
            key, sign, value = setting.partition("=")
            if not sign or not key.strip():
                raise click.UsageError(f"--set {setting!r} is not a setting; write KEY=VALUE like max_lag=4.")
            given[key.strip()] = value.strip()
        return given


def plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which gets them as `wishes`."""

    @functools.wraps(command)
    def with_wishes(
        *args: Any,
        config_file: str | None,
        settings: tuple[str, ...],
        clusters: int | None,
        favour: str | None,
        **others: Any,
    ) -> None:
        command(*args, wishes=PlanWishes(config_file, settings, clusters, favour), **others)

    for option in (
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help=_SET),
        click.option(
            "--config", "config_file", metavar="FILE", is_eager=True, callback=_take_options, help=_CONFIG
        ),
        click.option("--favour", type=click.Choice(["quality", "speed"]), help=_FAVOUR),
        click.option("--clusters", type=int, metavar="N", help=_CLUSTERS),
    ):
        with_wishes = option(with_wishes)
    return with_wishes


def options_file(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--config` to a command that makes no plan: its table has the options that are not given."""
    option = click.option(
        "--config", metavar="FILE", is_eager=True, expose_value=False, callback=_take_options, help=_OPTIONS
    )
    return option(command)


def _take_options(context: click.Context, _: click.Parameter, file: str | None) -> str | None:
    """Read the options that the command line leaves out, before any other option is looked at."""
    if file is not None and not context.resilient_parsing and context.command.name != _SETTINGS:
        document = parse_table(read_text(file, find_parts().max_file_bytes), file)
        context.default_map = find_options(context.command, document)
    return file


def has_options(context: click.Context | None) -> bool:
    """Return whether a file gave options to the running command."""
    return context is not None and bool(context.default_map)


def dashboard_options(is_usual: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of the page to a command, which gets `dashboard`: a place, or yes or no."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_dashboard(*args: Any, page_at: str | None, no_page: bool, **others: Any) -> None:
            if no_page and page_at is not None:
                raise click.UsageError("Give either --dashboard or --no-dashboard, one of the two.")
            here = page_at == _THIS_PC or (page_at is None and is_usual and not no_page)
            command(*args, dashboard=here or page_at or False, **others)

        place = click.option(
            "--dashboard",
            "page_at",
            is_flag=False,
            flag_value=_THIS_PC,
            metavar="[HOST:PORT]",
            help=_PAGE if is_usual else f"Serve a page of the run. {_PAGE}",
        )
        with_dashboard = place(with_dashboard)
        return click.option("--no-dashboard", "no_page", is_flag=True, help="Serve no page.")(with_dashboard)

    return add


_THIS_PC = "this PC"
_PAGE = "Where the page of the run is served; only on this PC if left out."
_SET = "One setting of the planner, above the file. Repeatable."
_SETTINGS = "plan"  # the table of settings has the name of the command that plans
_CONFIG = "TOML file: settings in a table [plan], options of this command in one with its name."
_OPTIONS = "TOML file with options in a table with the command's name; the command line is stronger."
_FAVOUR = "What more clusters may cost: hardly any quality (the default), or a little for speed."
_CLUSTERS = "At most N copies of the model side by side, whatever that costs in quality; 0: as many as pay."
