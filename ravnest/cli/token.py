"""`ravnest token`: the invitation of a hub, or what an invitation says."""

import click

from ravnest.cli.files import to_json

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
