"""`ravnest train` and `ravnest hub`: train a job with peers on this PC, or with others at an open hub."""

import json
from datetime import date
from pathlib import Path

import click

from ravnest.cli.common import PlanWishes, View, choose_view, find_parts, plan_options, report
from ravnest.errors import ConfigError


@click.command()
@click.argument("place", metavar="FILE.py:JOB")
@click.option("--nodes", type=int, default=4, show_default=True, metavar="N", help="Peers on this PC.")
@click.option("--folder", metavar="DIR", help="For log and weights; a new one under runs/ if left out.")
@click.option("--out", metavar="FILE", help="Write the trained weights into this safetensors file.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in the folder.")
@plan_options
@click.option("--quiet", is_flag=True, help="Say only what went wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.train/1).")
def train(
    place: str,
    nodes: int,
    folder: str | None,
    out: str | None,
    resume: bool,
    wishes: PlanWishes,
    quiet: bool,
    as_json: bool,
) -> None:
    """Train a job with peers on this PC, each a program of its own.

    The weights go to a new folder under runs/, if neither --folder nor --out says where. Ctrl-C ends it early
    and keeps what was trained; twice, it ends at once.

    \b
    ravnest train examples/digits/model.py:job --nodes 3 --out digits.safetensors
    """
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} is less than one peer; choose 1 or more")
    if resume and folder is None:
        raise ConfigError("--resume needs the --folder that the training was started with")
    from ravnest.requester.job_file import load_job
    from ravnest.requester.result import check_place
    from ravnest.requester.run_folder import fresh_run
    from ravnest.requester.session import LOCAL_PLAN, local

    plan = wishes.read(LOCAL_PLAN)
    place_out = out or folder
    file = None if place_out is None else check_place(place_out, may_exist=resume)
    with choose_view(quiet) as view:
        job = load_job(place)
        where = None if folder is None else Path(folder)
        if file is None:
            where = fresh_run(job.name or "job", date.today())  # noqa: DTZ011 - people's own
            file = check_place(where)
            click.echo(f"log, checkpoints and weights go to {where}", err=True)
        parts = find_parts().hub_parts
        with local(nodes, folder=where, plan=plan, tell=view.tell, look=view.look, parts=parts) as swarm:
            result = swarm.fit(job, out=file, resume="auto" if resume else None)
    report(result, file, "ravnest.train/1", as_json)


_SCHEMA = "ravnest.hub/1"


@click.command()
@click.argument("place", metavar="FILE.py:JOB")
@click.option("--listen", default="0.0.0.0:7700", show_default=True, metavar="HOST:PORT", help="Where.")
@click.option("--public", multiple=True, metavar="HOST:PORT", help="Where others reach it from outside.")
@click.option("--nodes", type=int, default=0, metavar="N", help="Begin with N nodes; 0: when they will do.")
@click.option("--local", "num_local", type=int, default=0, metavar="N", help="Also start N peers here.")
@click.option("--folder", metavar="DIR", help="For identity, log and result; runs/NAME if left out.")
@click.option("--out", metavar="FILE", help="Weights; model.safetensors in the folder if left out.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in the folder.")
@click.option(
    "--hub-upload", metavar="RATE", help="What this PC can send, like '40 Mbit/s': plans then spare its line."
)
@plan_options
@click.option("--quiet", is_flag=True, help="Say only how to join, and what went wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines (ravnest.hub/1): open, then done.")
def hub(  # noqa: PLR0913 - click passes one argument per option
    place: str,
    listen: str,
    public: tuple[str, ...],
    nodes: int,
    num_local: int,
    folder: str | None,
    out: str | None,
    resume: bool,
    hub_upload: str | None,
    wishes: PlanWishes,
    quiet: bool,
    as_json: bool,
) -> None:
    """Open a hub for a job; others join with the line it prints. Then it trains and saves the weights.

    Ctrl-C, or `ravnest stop`, ends the training early and keeps what was trained; twice, it ends at once.

    \b
    ravnest hub model.py:job --nodes 3
    ravnest hub model.py:job --public hub.example.org:7700 --local 1
    """
    for option, number in (("--nodes", nodes), ("--local", num_local)):
        if number < 0:
            raise ConfigError(f"{option} {number} is less than none; choose 0 or more")
    from ravnest.config import read_plan_config
    from ravnest.hub.coordinator.notices import HubListens, Notice
    from ravnest.requester.job_file import load_job
    from ravnest.requester.local_peers import share_memory
    from ravnest.requester.result import check_place
    from ravnest.requester.run_folder import MODEL, check_unfinished, free_run
    from ravnest.requester.session import SWARM_PLAN, Hub

    upload = {} if hub_upload is None else {"hub_bytes_per_second": hub_upload}
    plan = wishes.read(read_plan_config(upload, "--hub-upload", SWARM_PLAN))
    file = None if out is None else check_place(out, may_exist=resume)
    if folder and not resume:
        check_unfinished(Path(folder))
    with choose_view(quiet) as view:
        job = load_job(place)
        where = Path(folder) if folder else free_run(job.name or "job")
        peers = share_memory(num_local) if num_local else ()
        opening = Hub(
            listen,
            public=public,
            folder=where,
            plan=plan,
            peers=peers,
            tell=view.tell,
            look=view.look,
            parts=find_parts().hub_parts,
        )
        with opening as opened:

            def invite(news: Notice) -> None:
                if isinstance(news, HubListens):  # not before
                    _invite(opened.invitation, where, view if as_json else None)

            going_on = "auto" if resume else None
            result = opened.fit(job, nodes=nodes, out=file, callbacks=[invite], resume=going_on)
    report(result, file or where / MODEL, _SCHEMA, as_json)


def _invite(invitation: str, folder: Path, view: View | None) -> None:
    click.echo(f"the hub is open, its folder is {folder}; others join with", err=True)
    click.echo(f"\n  ravnest join {invitation}\n", err=True)
    if view is not None:
        found = {"schema": _SCHEMA, "event": "open", "invitation": invitation, "folder": str(folder)}
        click.echo(json.dumps(found, sort_keys=True), file=view.answers)
