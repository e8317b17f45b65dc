"""What a peer gets from the hub: blobs, and how long they take, which tells how far and how fast the link is.

Driven by peer.agent.
"""

import asyncio
from collections.abc import Callable

from ravnest.blobs import BlobRef, ProbeOrder, ProbeReport
from ravnest.exchange import HUB, Blobs, LinkTimes, Parcel
from ravnest.peer.compute import Probe
from ravnest.protocol import Refusal

Post = Callable[[Parcel], None]


async def fetch(ref: BlobRef, blobs: Blobs, post: Post) -> bytes | Refusal:
    """Return a blob of the hub's, or why there is none."""
    arrived: asyncio.Future[bytes | Refusal] = asyncio.get_running_loop().create_future()
    for parcel in blobs.want(ref, HUB, arrived.set_result, keep=False):
        post(parcel)
    return await arrived


async def answer_probe(order: ProbeOrder, blobs: Blobs, post: Post) -> Probe | ProbeReport:
    """Measure what the hub wants to know of the link; return that, with the stage to run if there is one."""
    loop = asyncio.get_running_loop()
    report = ProbeReport()
    if order.times_link:
        timed: asyncio.Future[LinkTimes] = loop.create_future()
        post(blobs.time(HUB, loop.time, timed.set_result))
        link = await timed
        report = ProbeReport(None, link.bytes_per_second, link.latency_seconds)
    content = None if order.blueprint is None else await fetch(order.blueprint, blobs, post)
    return Probe(report, content) if isinstance(content, bytes) else report
