"""The commands that run something: `join`, for who lends a PC, and `train`, for who brings a model.

Like cli, it imports what is heavy inside the command that needs it.
"""

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ravnest.errors import ConfigError
from ravnest.units import Dimension, parse_quantity

if TYPE_CHECKING:
    from ravnest.net.identity import Token
    from ravnest.peer.agent import Offer

_LONGEST_NAME = 40
_LONGEST_BATCH_SECONDS = 600.0  # a stage that would need longer for one batch is not run here


@click.command()
@click.argument("token")
@click.option("--name", metavar="NAME", help="What others call this PC; its host name if left out.")
@click.option("--memory", metavar="SIZE", help="Memory to lend, like '4 GB'; half of what is free now.")
@click.option("--flops", metavar="RATE", help="Speed to claim, like '50 GFLOP/s'; measured if left out.")
@click.option("--bandwidth", metavar="RATE", default="50 Mbit/s", show_default=True, help="Up and down.")
@click.option("--latency", metavar="TIME", default="10 ms", show_default=True, help="To others, one way.")
@click.option("--listen", metavar="ADDRESS", help="Where others dial this PC, like tcp://127.0.0.1:7701.")
@click.option("--patience", metavar="TIME", default="60 s", show_default=True, help="Without the hub.")
@click.option("--quiet", is_flag=True, help="Say only what went wrong.")
def join(  # noqa: PLR0913 - click passes one argument per option
    token: str,
    name: str | None,
    memory: str | None,
    flops: str | None,
    bandwidth: str,
    latency: str,
    listen: str | None,
    patience: str,
    quiet: bool,
) -> None:
    """Lend this PC to the swarm that TOKEN invites to, until its job is done.

    Ends with 4 if the hub cannot be reached, with 5 if it refuses the token.
    """
    from ravnest.net.identity import read_token

    invitation = read_token(token)
    rates = (
        parse_quantity(bandwidth, Dimension.BYTES_PER_SECOND),
        parse_quantity(latency, Dimension.SECONDS),
        parse_quantity(patience, Dimension.SECONDS),
    )
    memory_bytes = None if memory is None else parse_quantity(memory, Dimension.BYTES)
    speed = None if flops is None else parse_quantity(flops, Dimension.FLOPS_PER_SECOND)
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, format="%(message)s")
    logging.getLogger("ravnest.net").setLevel(logging.WARNING)
    offer = _make_offer(name, memory_bytes, speed, rates, listen)
    _warm_up()
    reason = _take_part(invitation, offer, listen)
    if not quiet:
        click.echo(f"ended: {reason}", err=True)


def _make_offer(
    name: str | None,
    memory_bytes: float | None,
    flops_per_second: float | None,
    rates: tuple[float, float, float],
    listen: str | None,
) -> "Offer":
    import platform

    from ravnest.peer import machine
    from ravnest.peer.agent import Offer
    from ravnest.peer.host import Limits
    from ravnest.plan.types import Node, NodeId

    bandwidth, latency, patience = rates
    memory = machine.free_memory_bytes() / 2 if memory_bytes is None else memory_bytes
    node = Node(
        name=NodeId((name or platform.node() or "peer")[:_LONGEST_NAME]),
        memory_bytes=memory,
        flops_per_second=flops_per_second or machine.measure_flops_per_second(),
        upload_bytes_per_second=bandwidth,
        download_bytes_per_second=bandwidth,
        latency_seconds=latency,
        is_reachable=listen is not None,
    )
    limits = Limits(memory, flops_per_batch=_LONGEST_BATCH_SECONDS * node.flops_per_second)
    return Offer(node, limits, (), patience)


def _warm_up() -> None:
    from ravnest.peer.machine import warm_up

    warm_up()


def _take_part(token: "Token", offer: "Offer", listen: str | None) -> str:
    import asyncio
    import random
    from dataclasses import replace

    from ravnest.net.identity import new_keys
    from ravnest.net.zeromq import ZeroMqTransport
    from ravnest.peer.agent import Agent

    async def run() -> str:
        keys = new_keys()
        pauses = random.SystemRandom()
        async with ZeroMqTransport(keys, pauses, listen) as transport:
            addresses = (transport.address,) if listen is not None else ()
            return await Agent(token, keys, replace(offer, addresses=addresses)).run(transport)

    return asyncio.run(run())


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
