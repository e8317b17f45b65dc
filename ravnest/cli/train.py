"""`ravnest train`: train a job with peers on this PC."""

import click

from ravnest.cli.parts import find_parts
from ravnest.cli.view import choose_view, report
from ravnest.errors import ConfigError


@click.command()
@click.argument("place", metavar="FILE.py:JOB")
@click.option("--nodes", type=int, default=4, show_default=True, metavar="N", help="Peers on this PC.")
@click.option("--folder", metavar="DIR", help="Keep log and weights here, for `ravnest status`.")
@click.option("--out", metavar="FILE", help="Write the trained weights into this safetensors file.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in the folder.")
@click.option("--quiet", is_flag=True, help="Say only what went wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.train/1).")
def train(
    place: str, nodes: int, folder: str | None, out: str | None, resume: bool, quiet: bool, as_json: bool
) -> None:
    """Train a job with peers on this PC, each a program of its own.

    Ctrl-C ends it early and keeps what was trained; twice, it ends at once.

    \b
    ravnest train examples/digits/model.py:job --nodes 3 --out digits.safetensors
    """
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} is less than one peer; choose 1 or more")
    if resume and folder is None:
        raise ConfigError("--resume needs the --folder that the training was started with")
    from ravnest.requester.job_file import load_job
    from ravnest.requester.result import check_place
    from ravnest.requester.session import local

    place_out = out or folder
    file = None if place_out is None else check_place(place_out)
    with choose_view(quiet) as view:
        job = load_job(place)
        with local(
            nodes, folder=folder, tell=view.tell, look=view.look, parts=find_parts().hub_parts
        ) as swarm:
            result = swarm.fit(job, out=file, resume="auto" if resume else None)
    report(result, file, "ravnest.train/1", as_json)
