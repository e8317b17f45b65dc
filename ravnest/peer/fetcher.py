"""A peer carries out orders to fetch: the parts of its stage, a backup, and what it is probed with.

A newer order of a kind ends what is fetched for an older one.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any

from ravnest.config import TIMEOUTS, PeerTimeouts
from ravnest.errors import LinkError
from ravnest.ids import HUB, NodeId
from ravnest.peer.blob_store import BlobStore
from ravnest.peer.compute_protocol import Build, Probe, ToCompute
from ravnest.protocol.blobs import BlobRef
from ravnest.protocol.membership import ProbeOrder, ProbeReport
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import BackupKept, BackupOrder, PlanOrder, Source, StageMissing, StageParts
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.blobs import Blobs
from ravnest.transfer.exchange import ContentMessage, Exchange
from ravnest.transfer.link_probe import LinkTimes
from ravnest.transfer.outbox import Outgoing

logger = logging.getLogger(__name__)


class _Missing(Exception):  # noqa: N818 - what happened, not that it is an error
    """A source gives nothing; it ends what is fetched beside it."""


class Fetcher:
    """Fetches what orders name. `known` are the nodes that can be asked; `put` uses what has come.

    `writer` has one thread, for files.
    """

    def __init__(
        self,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        known: Callable[[], Collection[NodeId]],
        post: Callable[[Outgoing], None],
        put: Callable[[ToCompute], None],
        fail: Callable[[LinkError], None],
        writer: Executor,
        timeouts: PeerTimeouts = TIMEOUTS.peer,
    ) -> None:
        self._quiet_seconds = timeouts.quiet_download_seconds
        self.store = BlobStore()
        self.blobs = Blobs(self.store)
        self._exchange = Exchange(self.blobs, post)
        self._writer = writer  # of one thread: what is kept last was ordered last
        self._start, self._known, self._post, self._put, self._fail = start, known, post, put, fail
        self._tasks: dict[type, asyncio.Task[None]] = {}  # by the kind of order

    def follow(
        self, message: StageParts | BackupOrder | ProbeOrder, plan: Callable[[], PlanOrder | None]
    ) -> None:
        """Fetch what an order names, and no longer what the last of its kind did; `plan` is the newest."""
        if isinstance(message, ProbeOrder):
            self._start(self._probe(message))
            return
        self.forget(type(message))
        if isinstance(message, StageParts):
            work = self._get_stage(message, plan)
        else:
            work = self._get_backup(message)
        self._tasks[type(message)] = self._start(work)

    def forget(self, kind: type) -> None:
        """Fetch nothing more for an order of this kind."""
        if task := self._tasks.pop(kind, None):
            task.cancel()

    def receive(self, sender: NodeId, message: ContentMessage, buffers: Sequence[Buffer]) -> Refusal | None:
        """Answer a message about content, or return why it is not for this peer."""
        return self._exchange.receive(sender, message, buffers)

    async def _get_stage(self, parts: StageParts, plan: Callable[[], PlanOrder | None]) -> None:
        """Fetch all that a stage is made of at once, and have it built."""
        wanted = (Source(HUB, parts.blueprint), *parts.sources)
        missing: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._demand(source)) for source in wanted]
        except* _Missing as found:
            missing += found.exceptions
        if not missing:
            blueprint, *contents = (task.result() for task in tasks)
            order = plan()
            assert order is not None
            self._put(Build(order, parts, bytes(blueprint), tuple(contents)))
            return
        node, reason = missing[0].args
        if node == HUB:
            self._fail(LinkError(f"the stage cannot be fetched: {reason}"))
        else:
            self._post(Outgoing(HUB, StageMissing(parts.build_id, node, reason)))

    async def _demand(self, source: Source) -> Buffer:
        content = await self._fetch(source.weights, source.node)
        if isinstance(content, Refusal):
            raise _Missing(source.node, content.reason)
        return content

    async def _fetch(self, ref: BlobRef, source: NodeId = HUB) -> Buffer | Refusal:
        if source not in self._known() and ref not in self.blobs:
            return Refusal(f"blob {ref.blob[:12]} is not here, and {source} cannot be asked for it")
        quiet_seconds = None if source == HUB else self._quiet_seconds  # a lost hub is noticed elsewhere
        return await self._exchange.fetch(ref, source, quiet_seconds=quiet_seconds)

    async def _get_backup(self, order: BackupOrder) -> None:
        content = await self._fetch(order.source.weights, order.source.node)
        if isinstance(content, Refusal):
            logger.debug("backup %d is not kept: %s", order.number, content.reason)
        else:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._writer, self.store.keep_backup, content)
            self._post(Outgoing(HUB, BackupKept(order.plan_id, order.number)))

    async def _probe(self, order: ProbeOrder) -> None:
        """Measure what the hub wants to know of the link, and have run what it wants run."""
        loop = asyncio.get_running_loop()
        report = ProbeReport()
        if order.times_link:
            timed: asyncio.Future[LinkTimes] = loop.create_future()
            self._exchange.time_link(HUB, loop.time, timed.set_result)
            link = await timed
            report = ProbeReport(None, link.bytes_per_second, link.latency_seconds)
        content = None if order.blueprint is None else await self._fetch(order.blueprint)
        if content is None or isinstance(content, Refusal):
            self._post(Outgoing(HUB, report))
        else:
            self._put(Probe(report, bytes(content)))
