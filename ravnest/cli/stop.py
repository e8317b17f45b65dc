"""`ravnest stop`: end a run early, as Ctrl-C at its hub would."""

import click

from ravnest.cli.files import to_json
from ravnest.errors import RavnestError


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
