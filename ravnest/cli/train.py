"""`ravnest train` and `ravnest hub`: train a job with peers on this PC, or with others at an open hub."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ravnest.cli.common import (
    PlanWishes,
    View,
    choose_view,
    dashboard_options,
    find_parts,
    plan_options,
    report,
)
from ravnest.errors import ConfigError

if TYPE_CHECKING:
    from ravnest.requester.callbacks import Callback
    from ravnest.requester.job import Job
    from ravnest.requester.result import Result


@dataclass(frozen=True, slots=True)
class RunWishes:
    """What the command line says of a run: where its files go, its plan, what it shows, who follows it."""

    folder: str | None
    out: str | None
    resume: bool
    plan: PlanWishes
    quiet: bool
    as_json: bool
    schema: str
    dashboard: bool | str = False  # where, or whether there is one on this PC
    verbose: bool = False
    callbacks: "tuple[Callback, ...]" = ()


@dataclass(frozen=True, slots=True)
class HubPlace:
    """Where a hub listens and which nodes it waits for, as the command line says."""

    listen: str
    public: tuple[str, ...]
    nodes: int
    num_local: int
    upload: str | None = None  # what the hub's line can send, as text
    store: str = ""  # where its log and its checkpoints are, beside its folder
    blobs: str = ""

    def __post_init__(self) -> None:
        for option, number in (("--nodes", self.nodes), ("--local", self.num_local)):
            if number < 0:
                raise ConfigError(f"{option} {number} is less than none; choose 0 or more")


@click.command()
@click.argument("place", metavar="FILE.py:JOB")
@click.option("--nodes", type=int, default=4, show_default=True, metavar="N", help="Peers on this PC.")
@click.option("--folder", metavar="DIR", help="For log and weights; a new one under runs/ if left out.")
@click.option("--out", metavar="FILE", help="Write the trained weights into this safetensors file.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in the folder.")
@plan_options
@dashboard_options(is_usual=False)
@click.option("--quiet", is_flag=True, help="Say only what went wrong.")
@click.option("--verbose", is_flag=True, help="Say what the program does, too; also in its log file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.train/1).")
def train(  # noqa: PLR0913 - click passes one argument per option
    place: str,
    nodes: int,
    folder: str | None,
    out: str | None,
    resume: bool,
    wishes: PlanWishes,
    dashboard: bool | str,
    quiet: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Train a job with peers on this PC, each a program of its own.

    The weights go to a new folder under runs/, if neither --folder nor --out says where. Ctrl-C ends it early
    and keeps what was trained; twice, it ends at once.

    \b
    ravnest train examples/digits/model.py:job --nodes 3 --out digits.safetensors
    """
    if resume and folder is None:
        raise ConfigError("--resume needs the --folder that the training was started with")
    run = RunWishes(folder, out, resume, wishes, quiet, as_json, "ravnest.train/1", dashboard, verbose)
    result, file = train_here(lambda: _load(place), nodes, run)
    report(result, file, run.schema, as_json)


def _load(place: str) -> "Job":
    from ravnest.requester.job_file import load_job

    return load_job(place)


def train_here(make_job: "Callable[[], Job]", nodes: int, run: RunWishes) -> "tuple[Result, Path]":
    """Train a job with so many peers on this PC; return the result and the file it went to."""
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} is less than one peer; choose 1 or more")
    from ravnest.requester.result import check_place
    from ravnest.requester.run_folder import fresh_run
    from ravnest.requester.session import LOCAL_PLAN, local

    plan = run.plan.read(LOCAL_PLAN)
    place_out = run.out or run.folder
    file = None if place_out is None else check_place(place_out, may_exist=run.resume)
    with choose_view(run.quiet, run.verbose) as view:
        job = make_job()
        where = None if run.folder is None else Path(run.folder)
        if file is None:
            where = fresh_run(job.name or "job", date.today())  # noqa: DTZ011 - people's own
            file = check_place(where)
            click.echo(f"log, checkpoints and weights go to {where}", err=True)
        parts = find_parts().hub_parts
        opening = local(
            nodes,
            folder=where,
            plan=plan,
            tell=view.tell,
            look=view.look,
            dashboard=run.dashboard,
            parts=parts,
        )
        with opening as swarm:
            going_on = "auto" if run.resume else None
            result = swarm.fit(job, out=file, callbacks=run.callbacks, resume=going_on)
    return result, file


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
    "--store", default="", metavar="URL", help="Log in PostgreSQL: postgresql://USER@HOST/DATABASE."
)
@click.option("--blobs", default="", metavar="URL", help="Checkpoints in a bucket, too: s3://BUCKET/PREFIX.")
@click.option(
    "--hub-upload", metavar="RATE", help="What this PC can send, like '40 Mbit/s': plans then spare its line."
)
@plan_options
@dashboard_options(is_usual=True)
@click.option("--quiet", is_flag=True, help="Say only how to join, and what went wrong.")
@click.option("--verbose", is_flag=True, help="Say what the program does, too; also in its log file.")
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
    store: str,
    blobs: str,
    hub_upload: str | None,
    wishes: PlanWishes,
    dashboard: bool | str,
    quiet: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Open a hub for a job; others join with the line it prints. Then it trains and saves the weights.

    Ctrl-C, or `ravnest stop`, ends the training early and keeps what was trained; twice, it ends at once.
    With --store and --blobs, a PC that has the same hub.json goes on with --resume; a hub that this takes the
    run from ends with 9.

    \b
    ravnest hub model.py:job --nodes 3
    ravnest hub model.py:job --public hub.example.org:7700 --local 1
    """
    run = RunWishes(folder, out, resume, wishes, quiet, as_json, _SCHEMA, dashboard, verbose)
    where = HubPlace(listen, public, nodes, num_local, hub_upload, store, blobs)
    result, file = serve_hub(lambda: _load(place), where, run)
    report(result, file, _SCHEMA, as_json)


def serve_hub(make_job: "Callable[[], Job]", place: HubPlace, run: RunWishes) -> "tuple[Result, Path]":
    """Train a job with the peers that join; return the result and the file it went to."""
    from ravnest.config import read_plan_config
    from ravnest.hub.coordinator.notices import HubListens, Notice
    from ravnest.requester.local_peers import share_memory
    from ravnest.requester.result import check_place
    from ravnest.requester.run_folder import MODEL, check_unfinished, free_run
    from ravnest.requester.session import SWARM_PLAN, Hub

    upload = {} if place.upload is None else {"hub_bytes_per_second": place.upload}
    plan = run.plan.read(read_plan_config(upload, "--hub-upload", SWARM_PLAN))
    file = None if run.out is None else check_place(run.out, may_exist=run.resume)
    if run.folder and not run.resume:
        check_unfinished(Path(run.folder))
    with choose_view(run.quiet, run.verbose) as view:
        job = make_job()
        where = Path(run.folder) if run.folder else free_run(job.name or "job")
        opening = Hub(
            place.listen,
            public=place.public,
            folder=where,
            plan=plan,
            peers=share_memory(place.num_local) if place.num_local else (),
            tell=view.tell,
            look=view.look,
            dashboard=run.dashboard,
            store=place.store,
            blobs=place.blobs,
            parts=find_parts().hub_parts,
        )
        with opening as opened:

            def invite(notice: Notice) -> None:
                if isinstance(notice, HubListens):  # not before
                    found = {"invitation": opened.invitation, "folder": str(where)}
                    found |= {"dashboard": opened.dashboard} if opened.dashboard else {}
                    _invite(found, place.nodes, run.schema, view if run.as_json else None)

            going_on = "auto" if run.resume else None
            followers = [invite, *run.callbacks]
            result = opened.fit(job, nodes=place.nodes, out=file, callbacks=followers, resume=going_on)
    return result, file or where / MODEL


def _invite(found: dict[str, str], nodes: int, schema: str, view: View | None) -> None:
    click.echo(f"the hub is open, its folder is {found['folder']}; others join with", err=True)
    click.echo(f"\n  ravnest join {found['invitation']}\n", err=True)
    enough = f"{nodes} nodes are here" if nodes > 1 else "enough nodes are here"
    click.echo(f"training begins when {enough}", err=True)
    if view is not None:
        click.echo(
            json.dumps({"schema": schema, "event": "open", **found}, sort_keys=True), file=view.answers
        )
