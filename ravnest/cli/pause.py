"""`ravnest pause`, `resume` and `finish`: take this PC back from `ravnest join`, for a while or for good."""

import sys
from typing import TYPE_CHECKING

import click

from ravnest.cli.files import to_json
from ravnest.errors import ConfigError, RavnestError

if TYPE_CHECKING:
    import psutil  # type: ignore[import-untyped]

_ALL = click.option(
    "--all", "is_all", is_flag=True, help="All that you lend from this PC, without a question."
)
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.lending/1).")


@click.command()
@click.argument("name", required=False)
@_ALL
@_AS_JSON
def pause(name: str | None, is_all: bool, as_json: bool) -> None:
    """Take this PC back for a while: what is lent from it as NAME, or the only one that is lent.

    Of several it shows the list and asks; --all means all of them, those of other runs too.
    Work is handed over, nothing is lost; `ravnest resume` lends it again. Ends with 1 if nothing is lent.
    """
    _tell("pause", name, is_all, as_json)


@click.command()
@click.argument("name", required=False)
@_ALL
@_AS_JSON
def resume(name: str | None, is_all: bool, as_json: bool) -> None:
    """Lend this PC again after `ravnest pause`: as NAME, or the only one that is lent.

    Of several it shows the list and asks; --all means all of them. Ends with 1 if no
    `ravnest join` waits for that.
    """
    _tell("resume", name, is_all, as_json)


@click.command()
@click.argument("name", required=False)
@_ALL
@_AS_JSON
def finish(name: str | None, is_all: bool, as_json: bool) -> None:
    """Take this PC back for good, as one Ctrl-C would: what is lent as NAME, or the only one that is lent.

    Of several it shows the list and asks; --all means all of them, those of other runs too.
    Work is handed over, nothing is lost. Ends with 1 if nothing is lent.
    """
    _tell("finish", name, is_all, as_json)


def _tell(word: str, name: str | None, is_all: bool, as_json: bool) -> None:
    import signal

    import psutil

    from ravnest.cli.lending_loop import PAUSE, RESUME, find_running

    number = {"pause": PAUSE, "resume": RESUME, "finish": signal.SIGTERM}[word]
    if number is None:
        raise RavnestError(
            f"this system cannot {word} a program that runs; Ctrl-C ends it, and join it again"
        )
    running = find_running()
    chosen = [(known, process) for known, process in running if name in (None, known)]
    if not chosen:
        others = ", ".join(sorted({known for known, _ in running}))
        here = f"it is lent as {others}" if others else "see that `ravnest join` runs, and as the same user"
        raise RavnestError(f"nothing is lent from this PC{f' as {name}' if name else ''}; {here}")
    if name is None and not is_all and len(chosen) > 1:
        _ask(word, chosen)
    told = []
    for known, process in chosen:
        try:
            process.send_signal(number)
            told.append({"name": known, "process": process.pid})
        except psutil.NoSuchProcess:
            click.echo(f"{known} (process {process.pid}) has just ended", err=True)
    if as_json:
        click.echo(to_json({"schema": "ravnest.lending/1", "told": word, "peers": told}))
    else:
        for peer in told:
            click.echo(f"{peer['name']} (process {peer['process']}) was told to {word}", err=True)


def _ask(word: str, chosen: "list[tuple[str, psutil.Process]]") -> None:
    """Show who would be told; go on only if that is what the user wants."""
    lent = ", ".join(f"{known} (process {process.pid})" for known, process in chosen)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        told = f"{len(chosen)} programs lend from this PC: {lent}"
        raise ConfigError(f"{told}; say which one: ravnest {word} NAME, or all: ravnest {word} --all")
    click.echo(f"this PC is lent as {lent}", err=True)
    if not click.confirm(f"{word} all of them?", err=True):
        raise click.Abort
