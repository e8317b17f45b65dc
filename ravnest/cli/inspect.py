"""`ravnest inspect`: what a model becomes."""

import contextlib
import sys
import time
from typing import TYPE_CHECKING

import click

from ravnest.cli.common import print_parts, to_json, write_text
from ravnest.errors import ConfigError

if TYPE_CHECKING:
    from ravnest.views.inspection import Inspection

_USUAL_STAGES = 3


@click.command()
@click.argument("place", metavar="FILE.py:JOB")
@click.option("--cut", "num_stages", type=int, metavar="N", help="Equal stages to cut into; 3 if left out.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.inspect/1) instead of tables."
)
@click.option("--profile", "profile_file", metavar="FILE", help="Also write a profile for `plan --model`.")
def inspect(place: str, num_stages: int | None, as_json: bool, profile_file: str | None) -> None:
    """Show what a model becomes: its line, a cut, what providers run. Starts nothing, sends nothing.

    FILE.py is your own file, which is run; JOB is a ravnest.Job in it or a function that returns one, and may
    be left out if there is only one.

    \b
    ravnest inspect examples/tiny_gpt/model.py:job --cut 4
    ravnest inspect model.py --profile model.json
    ravnest plan --population home:20 --model model.json
    """
    if num_stages is not None and num_stages < 1:
        raise ConfigError(f"--cut {num_stages} is less than one stage; choose 1 or more")
    if profile_file is not None and not profile_file.endswith(".json"):
        raise ConfigError(f"--profile {profile_file} would hold JSON; give a name that ends in .json")
    from ravnest.views.inspection import inspection_to_dict, named_profile, show_inspection

    found = _inspect(place, num_stages)
    if profile_file is not None:
        write_text("--profile", profile_file, to_json(named_profile(found)) + "\n")
        click.echo(f"profile written to {profile_file}", err=True)
    if as_json:
        click.echo(to_json(inspection_to_dict(found)))
    else:
        print_parts(lambda width: show_inspection(found, width))


def _inspect(place: str, num_stages: int | None) -> "Inspection":
    click.echo(f"running {place}", err=True)
    from ravnest.model.stage.profile import measure
    from ravnest.requester.job_file import load_job
    from ravnest.requester.users_code import users_code
    from ravnest.views.inspection import inspect_model

    with contextlib.redirect_stdout(sys.stderr):  # what the user's file prints is not our answer
        job = load_job(place)
        with users_code(place):
            job.first_batch()
        click.echo(f"capturing {job.name}", err=True)
        start = time.perf_counter()  # noqa: TID251 - a program may tell how long it took
        captured = job.capture(lambda step: click.echo(f"  {step}", err=True))
    profile = measure(captured.blueprint, captured.batch_size)
    seconds = time.perf_counter() - start  # noqa: TID251 - as above
    click.echo(f"captured and measured in {seconds:.1f} s", err=True)
    if num_stages is None:
        num_stages = min(_USUAL_STAGES, profile.num_positions)
    return inspect_model(captured.blueprint, profile, captured.notes, num_stages)
