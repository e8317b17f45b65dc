"""`ravnest train`: train a job with peers on this PC."""

import contextlib
import json
import os
import sys
from pathlib import Path

import click

from ravnest.errors import ConfigError


def _check_out(file: Path) -> None:
    """Refuse a place for the weights before anything is trained, not after."""
    if file.suffix != ".safetensors":
        raise ConfigError(f"--out {file} would hold safetensors; give a name that ends in .safetensors")
    if file.exists():
        raise ConfigError(f"--out {file} exists already; give another name, or move it away")
    if not os.access(file.parent, os.W_OK):
        raise ConfigError(f"--out {file} cannot be written; give a folder that exists and is yours")


@click.command()
@click.argument("place", metavar="FILE.py:JOB")
@click.option("--nodes", type=int, default=4, show_default=True, metavar="N", help="Peers on this PC.")
@click.option("--out", metavar="FILE", help="Write the trained weights into this safetensors file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.train/1).")
def train(place: str, nodes: int, out: str | None, as_json: bool) -> None:
    """Train a job with peers on this PC, each a program of its own.

    \b
    ravnest train examples/digits/model.py:job --nodes 3 --out digits.safetensors
    """
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} is less than one peer; choose 1 or more")
    if out is not None:
        _check_out(Path(out))
    from ravnest.job.loading import load_job
    from ravnest.job.swarm import local

    with contextlib.redirect_stdout(sys.stderr):  # what the user's file prints is not our answer
        job = load_job(place)
        with local(nodes) as swarm:
            result = swarm.fit(job)
    if out is not None:
        result.export(out)
        click.echo(f"weights written to {out}", err=True)
    if as_json:
        found = {"schema": "ravnest.train/1", "metrics": result.metrics, "history": list(result.history)}
        click.echo(json.dumps(found, indent=2, sort_keys=True))
    else:
        for name, value in result.metrics.items():
            click.echo(f"{name} {value:g}")
