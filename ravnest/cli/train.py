"""`ravnest train`: train a job with peers on this PC."""

from datetime import date
from pathlib import Path

import click

from ravnest.cli.parts import find_parts
from ravnest.cli.plan_options import PlanWishes, plan_options
from ravnest.cli.view import choose_view, report
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
