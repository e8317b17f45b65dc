"""`ravnest invite`, `guests`, `revoke` and `kick`: tokens for single guests, and how they end."""

from datetime import UTC, datetime

import click

from ravnest.cli.common import to_json


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
