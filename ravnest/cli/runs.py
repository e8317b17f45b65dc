"""`ravnest status`, `stop` and `token`: read from a run's folder where it stands; end it; invite others."""

import click

from ravnest.cli.common import to_json
from ravnest.errors import RavnestError


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
        known = status_to_dict(found) | ({} if is_running else {"eta_seconds": None})  # nothing goes on
        document = {**known, "folder": str(place), "is_running": is_running}
        click.echo(to_json(document))
    else:
        Console(markup=False, highlight=False, emoji=False).print(show_status(found, has_hub=is_running))
        if not is_running and found.phase != "finished":
            click.echo("no hub is at work on it now; start the hub again with --resume to go on", err=True)


@click.command()
@click.argument("folder", required=False)
@click.option("--now", is_flag=True, help="End at once and lose what was trained.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.stop/1).")
def stop(folder: str | None, now: bool, as_json: bool) -> None:
    """End the run in FOLDER and keep what was trained; the newest under runs/ if left out.

    The hub finishes what is under way, averages, evaluates and writes the weights. Ends with 1 if no hub is
    at work there.
    """
    import signal

    from ravnest.requester.run_folder import find_run, read_hub_file

    place = find_run(folder)
    process = read_hub_file(place).process
    if process is None:
        raise RavnestError(f"no hub is at work in {place}: it has ended, or its PC was restarted")
    if now:
        process.terminate()
    else:
        process.send_signal(signal.SIGINT)
    if as_json:
        click.echo(to_json({"schema": "ravnest.stop/1", "folder": str(place), "process": process.pid}))
    else:
        click.echo(f"the hub in {place} (process {process.pid}) was told to stop", err=True)


@click.command()
@click.argument("folder", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.checkpoint/1).")
def checkpoint(folder: str | None, as_json: bool) -> None:
    """Have the hub in FOLDER write what was trained down now; the newest under runs/ if left out.

    The hub says when it is on disk. Ends with 1 if no hub is at work there.
    """
    from ravnest.requester.hub_channel import CheckpointRequest, ask_hub
    from ravnest.requester.run_folder import find_run

    place = find_run(folder)
    list(ask_hub(place, CheckpointRequest()))
    if as_json:
        click.echo(to_json({"schema": "ravnest.checkpoint/1", "folder": str(place)}))
    else:
        click.echo(f"the hub in {place} was told to write a checkpoint", err=True)


_PREFIX = "rvn1_"


@click.command()
@click.argument("given", metavar="[FOLDER | TOKEN]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.token/1).")
def token(given: str | None, as_json: bool) -> None:
    """Print the invitation of the hub in FOLDER (the newest under runs/), or explain what TOKEN says.

    Whoever has the invitation can join; it is only printed from a folder of your own.
    """
    from ravnest.net.identity import peer_of, read_token
    from ravnest.net.transport import PublicKey
    from ravnest.requester.run_folder import find_run, read_hub_file

    is_token = given is not None and given.lower().startswith(_PREFIX)
    if is_token:
        assert given is not None
        found, invitation = read_token(given), None
    else:
        file = read_hub_file(find_run(given))
        found, invitation = file.token, file.invitation
    hub = peer_of(PublicKey(found.hub_key))
    if as_json:
        document = {"schema": "ravnest.token/1", "hub": hub, "addresses": list(found.addresses)}
        click.echo(to_json(document if invitation is None else {**document, "invitation": invitation}))
    elif invitation is not None:
        click.echo(invitation)
    else:
        click.echo(f"hub        {hub}")
        for address in found.addresses:
            click.echo(f"address    {address}")
        click.echo("secret     in the token, not shown: whoever has the token can join")
