"""`ravnest pause`, `resume` and `finish`: take this PC back from `ravnest join`, for a while or for good."""

import click

from ravnest.cli.files import to_json
from ravnest.errors import RavnestError

_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.lending/1).")


@click.command()
@click.argument("name", required=False)
@_AS_JSON
def pause(name: str | None, as_json: bool) -> None:
    """Take this PC back for a while: all that is lent from it, or only NAME.

    Its work is handed over, nothing is lost; `ravnest resume` lends it again. Ends with 1 if nothing is lent.
    """
    _tell("pause", name, as_json)


@click.command()
@click.argument("name", required=False)
@_AS_JSON
def resume(name: str | None, as_json: bool) -> None:
    """Lend this PC again after `ravnest pause`: all that was lent from it, or only NAME.

    Ends with 1 if no `ravnest join` waits for that.
    """
    _tell("resume", name, as_json)


@click.command()
@click.argument("name", required=False)
@_AS_JSON
def finish(name: str | None, as_json: bool) -> None:
    """Take this PC back for good, as one Ctrl-C would: all that is lent from it, or only NAME.

    Its work is handed over, nothing is lost. Ends with 1 if nothing is lent.
    """
    _tell("finish", name, as_json)


def _tell(word: str, name: str | None, as_json: bool) -> None:
    import signal

    import psutil  # type: ignore[import-untyped]

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
