"""`ravnest status`: where a run stands, read from its folder."""

import click

from ravnest.cli.files import to_json


@click.command()
@click.argument("folder", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.status/2).")
def status(folder: str | None, as_json: bool) -> None:
    """Show where the run in FOLDER stands; the newest under runs/ if left out."""
    from rich.console import Console

    from ravnest.hub.service.event_log import read_status
    from ravnest.requester.run_folder import find_run, read_hub_file
    from ravnest.views.live import show_status, status_to_dict

    place = find_run(folder)
    is_running = read_hub_file(place).process is not None
    found = read_status(place)
    if as_json:
        document = {**status_to_dict(found), "folder": str(place), "is_running": is_running}
        click.echo(to_json(document))
    else:
        Console(markup=False, highlight=False, emoji=False).print(show_status(found))
        if not is_running and found.phase != "finished":
            click.echo("no hub is at work on it now", err=True)
