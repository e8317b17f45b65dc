"""`ravnest status`: where a run stands, read from its folder."""

from pathlib import Path

import click

from ravnest.commands.files import to_json


@click.command()
@click.argument("folder", required=False)
@click.option("--watch", is_flag=True, help="Show it again whenever something happens, until the run ends.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON (ravnest.status/1), one line each if watched."
)
def status(folder: str | None, watch: bool, as_json: bool) -> None:
    """Show where the run in FOLDER stands; the newest under runs/ if left out."""
    from ravnest.job.folder import find_run

    place = find_run(folder)
    if watch:
        _follow(place, as_json)
    else:
        _show(place, as_json)


def _show(place: Path, as_json: bool, *, is_line: bool = False) -> bool:
    """Print where it stands; return whether a hub is at work on it."""
    import json

    from rich.console import Console

    from ravnest.hub.store import read_status
    from ravnest.job.folder import read_hub_file
    from ravnest.showing.live import show_status, status_to_dict

    is_running = read_hub_file(place).process is not None
    found = read_status(place)
    if as_json:
        document = {**status_to_dict(found), "folder": str(place), "is_running": is_running}
        click.echo(json.dumps(document, sort_keys=True) if is_line else to_json(document))
    else:
        Console(markup=False, highlight=False, emoji=False).print(show_status(found))
        if not is_running and found.phase != "finished":
            click.echo("no hub is at work on it now", err=True)
    return is_running


def _follow(place: Path, as_json: bool) -> None:
    """Show it whenever the log has grown; nobody tells, so the file is looked at now and then."""
    import time

    from ravnest.errors import ConfigError

    shown = -1.0
    while True:
        logs = [file for file in place.glob("hub.sqlite*") if file.is_file()]
        if not logs:
            raise ConfigError(f"{place} has no log to watch yet")
        changed = max(file.stat().st_mtime for file in logs)
        if changed != shown:
            shown = changed
            if not as_json:
                click.clear()
            if not _show(place, as_json, is_line=True):
                return
        time.sleep(0.5)  # noqa: TID251 - a file of another process is watched, and nothing wakes us
