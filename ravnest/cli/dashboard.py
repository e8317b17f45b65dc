"""`ravnest dashboard`: show the run in a folder as a page, from its log, whether it has ended or not."""

import threading
from pathlib import Path

import click

from ravnest.cli.common import find_parts, to_json


@click.command()
@click.argument("folder", required=False)
@click.argument("beside", metavar="[OTHER]...", nargs=-1)
@click.option("--at", default="", metavar="HOST:PORT", help="Where; only on this PC if left out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.dashboard/1).")
def dashboard(folder: str | None, beside: tuple[str, ...], at: str, as_json: bool) -> None:
    """Show the run in FOLDER in a browser, read-only; the newest under runs/ if left out.

    The curves of OTHER runs are shown beside its own. It reads the log, and reads on while a hub writes it.
    Ctrl-C ends it. A hub at work has a page of its own, which shows more: how busy stages are, what crosses
    between them.
    """
    from ravnest.hub.service.web.documents import API_SCHEMA
    from ravnest.hub.service.web.log_dashboard import LogDashboard, LogFollower
    from ravnest.net.identity import read_address
    from ravnest.requester.run_folder import find_run, read_hub_file

    place, timeouts = find_run(folder), find_parts().timeouts

    def follow(found: Path) -> LogFollower:
        read_hub_file(found)  # a folder that holds no run is refused now
        return LogFollower(found, lambda: read_hub_file(found).process is not None, timeouts)

    follower, others = follow(place), {other: follow(Path(other)) for other in beside}
    where = read_address(at, is_door=True) if at else ""
    with LogDashboard(follower, where, timeouts, others) as opened:
        if as_json:
            click.echo(to_json({"schema": API_SCHEMA, "folder": str(place), "link": opened.link}))
        else:
            click.echo(f"{place} is shown until Ctrl-C at", err=True)
            click.echo(opened.link)
        threading.Event().wait()
