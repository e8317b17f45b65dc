"""The commands about a run, by its folder: how it stands, what it said, its end, and who may join it.

`ravnest status`, `logs`, `dashboard`, `checkpoint`, `stop`, `token`, `invite`, `guests`, `revoke` and `kick`.
"""

import json
import re
import threading
from datetime import UTC, datetime
from pathlib import Path

import click

from ravnest.cli.common import find_parts, to_json
from ravnest.errors import ConfigError, RavnestError
from ravnest.units import show_plainly


@click.command()
@click.argument("folder", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.status/2).")
def status(folder: str | None, as_json: bool) -> None:
    """Show where the run in FOLDER stands; the newest under runs/ if left out."""
    from rich.console import Console

    from ravnest.hub.service.event_log import read_status
    from ravnest.requester.run_folder import find_run, read_hub_file
    from ravnest.requester.run_stores import find_log
    from ravnest.views.live import show_status, status_to_dict

    place = find_run(folder)
    is_running = read_hub_file(place).process is not None
    found = read_status(find_log(place))
    if as_json:
        document = {
            **status_to_dict(found, has_hub=is_running),
            "folder": str(place),
            "is_running": is_running,
        }
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
    from ravnest.hub.service.web.dashboard import LogDashboard, LogFollower
    from ravnest.hub.service.web.documents import API_SCHEMA
    from ravnest.net.identity import read_address
    from ravnest.requester.run_folder import find_run, read_hub_file
    from ravnest.requester.run_stores import find_log

    place, timeouts = find_run(folder), find_parts().timeouts

    def follow(found: Path) -> LogFollower:
        log = find_log(found)  # a folder that holds no run is refused now
        return LogFollower(log, lambda: read_hub_file(found).process is not None, timeouts)

    follower, others = follow(place), {other: follow(Path(other)) for other in beside}
    where = read_address(at, is_own=True) if at else ""
    with LogDashboard(follower, where, timeouts, others) as opened:
        if as_json:
            click.echo(to_json({"schema": API_SCHEMA, "folder": str(place), "link": opened.link}))
        else:
            click.echo(f"{place} is shown until Ctrl-C at", err=True)
            click.echo(opened.link)
        threading.Event().wait()


@click.command()
@click.argument("folder", required=False)
@click.option("--follow", "-f", is_flag=True, help="Print on while the hub is at work; Ctrl-C ends it.")
@click.option(
    "--lines", "-n", type=int, metavar="N", help="Only the last N lines; all that is kept if left out."
)
@click.option("--find", "words", metavar="WORDS", help="Only lines with these words.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each line (ravnest.logs/1).")
def logs(folder: str | None, follow: bool, lines: int | None, words: str | None, as_json: bool) -> None:
    """Print the log of the run in FOLDER; the newest under runs/ if left out.

    It has every notice and what the program itself says; more of that with `ravnest hub --verbose`. The files
    are hub.log and those before it, 12 MB at most. The lines of a peer are on its own terminal.
    """
    from ravnest.requester.run_folder import find_run, read_hub_file
    from ravnest.requester.run_log import LogReader

    if lines is not None and lines < 0:
        raise ConfigError(f"--lines {lines} is less than none; give 0 or more")
    place = find_run(folder)
    reader = LogReader(place)
    is_running = read_hub_file(place).process is not None

    def show(found: list[str]) -> None:
        for line in found:
            if words is None or words.lower() in line.lower():
                click.echo(_to_json(line) if as_json else show_plainly(line))

    known = [line for line in reader.read_all() if words is None or words.lower() in line.lower()]
    show(known if lines is None else known[max(0, len(known) - lines) :])
    pause = threading.Event()  # never set
    while follow and is_running:
        pause.wait(find_parts().timeouts.program.log_look_seconds)
        is_running = read_hub_file(place).process is not None  # before the last look, not after
        show(reader.read_new())


_LINE = re.compile(r"(?P<at>\S+ \S+) (?P<level>[A-Z]+) +(?P<source>\S+): (?P<text>.*)")


def _to_json(line: str) -> str:
    found = _LINE.fullmatch(line)
    parts = {"text": line} if found is None else found.groupdict()
    return json.dumps({"schema": "ravnest.logs/1", **parts}, sort_keys=True)


@click.command()
@click.argument("name")
@click.argument("folder", required=False)
@click.option("--days", type=float, metavar="N", help="The token ends after so many days; never if left out.")
@click.option("--nodes", type=int, metavar="N", help="At most so many PCs at a time; any number if left out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.invite/1).")
def invite(name: str, folder: str | None, days: float | None, nodes: int | None, as_json: bool) -> None:
    """Print a token for the guest NAME of the run in FOLDER, the newest under runs/ if left out.

    The guest joins with it as with the hub's own token. You can withdraw it alone: ravnest revoke NAME.
    """
    from ravnest.requester.run_folder import GuestFile, find_run, invite_guest, read_hub_file

    place = find_run(folder)
    token = invite_guest(GuestFile(place), read_hub_file(place), name, days, nodes)
    if as_json:
        click.echo(to_json({"schema": "ravnest.invite/1", "name": name, "invitation": token}))
    else:
        click.echo(token)


@click.command()
@click.argument("folder", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.guests/1).")
def guests(folder: str | None, as_json: bool) -> None:
    """List whom the run in FOLDER has invited, until when and with how many nodes."""
    import msgspec

    from ravnest.requester.run_folder import GuestFile, find_run, read_hub_file

    place = find_run(folder)
    read_hub_file(place)
    found = GuestFile(place).read().invitations
    if as_json:
        click.echo(to_json({"schema": "ravnest.guests/1", "guests": msgspec.to_builtins(found)}))
        return
    for each in found:
        end = (
            "no end"
            if each.ends_at is None
            else f"until {datetime.fromtimestamp(each.ends_at, UTC):%Y-%m-%d %H:%M} UTC"
        )
        room = "any number of nodes" if each.max_nodes is None else f"{each.max_nodes} nodes"
        state = "withdrawn" if each.is_revoked else f"{end}, {room}"
        faults = f", {len(each.strikes)} faults, the last: {each.strikes[-1]}" if each.strikes else ""
        click.echo(f"{each.name:20} {state}{faults}")


@click.command()
@click.argument("name")
@click.argument("folder", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.revoke/1).")
def revoke(name: str, folder: str | None, as_json: bool) -> None:
    """Withdraw the token of the guest NAME; its nodes leave, the others train on.

    "everybody" is the name of the hub's own token. Without a hub at work it is withdrawn for the next one.
    """
    from ravnest.requester.hub_channel import RevokeRequest, ask_hub
    from ravnest.requester.run_folder import GuestFile, find_run, read_hub_file

    place = find_run(folder)
    file = read_hub_file(place)
    if file.process is not None and file.channel_port:
        list(ask_hub(place, RevokeRequest(name)))
    else:
        GuestFile(place).change(lambda known: known.revoke(name))
    if as_json:
        click.echo(to_json({"schema": "ravnest.revoke/1", "folder": str(place), "name": name}))
    else:
        click.echo(f"the invitation of {name} in {place} is withdrawn", err=True)


@click.command()
@click.argument("node")
@click.argument("folder", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.kick/1).")
def kick(node: str, folder: str | None, as_json: bool) -> None:
    """Send NODE away from the run in FOLDER; it may not come back with the same key.

    Its provider can join again with a new one: to prevent that, withdraw the invitation.
    """
    from ravnest.requester.hub_channel import KickRequest, ask_hub
    from ravnest.requester.run_folder import find_run

    place = find_run(folder)
    list(ask_hub(place, KickRequest(node)))
    if as_json:
        click.echo(to_json({"schema": "ravnest.kick/1", "folder": str(place), "node": node}))
    else:
        click.echo(f"{node} is sent away from {place}", err=True)
