"""`ravnest join`: lend this PC to a swarm."""

import logging
from typing import TYPE_CHECKING

import click

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
