"""A peer carries out orders to fetch: the parts of its stage, a backup, and what it is probed with.

A newer order of a kind ends what is fetched for an older one.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from ravnest.config import TIMEOUTS, PeerTimeouts
from ravnest.errors import LinkError
from ravnest.ids import HUB, NodeId
from ravnest.peer.blob_store import BlobStore
from ravnest.peer.compute_protocol import Build, Probe, ToCompute
from ravnest.protocol.blobs import BlobRef
from ravnest.protocol.membership import Complaint, ProbeOrder, ProbeReport
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import (
    BackupKept,
    BackupOrder,
    FetchProgress,
    PlanOrder,
    Source,
    StageMissing,
    StageParts,
)
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.blobs import Blobs
from ravnest.transfer.download import TransferProgress
from ravnest.transfer.exchange import ContentMessage, Exchange, LinkTimes
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
        self._quiet_seconds, self._report_seconds = (
            timeouts.quiet_download_seconds,
            timeouts.report_every_seconds,
        )
        self.store = BlobStore()
        self.blobs = Blobs(self.store)
        self._exchange = Exchange(self.blobs, post, self._write, self._accuse)
        self._passed_on: set[BlobRef] = set()  # what stages were made of
        self._build_id = 0  # of the newest
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
        refs = {source.weights for source in wanted}
        for old in self._passed_on - refs:
            self.blobs.drop(old)
        self._passed_on, self._build_id = refs, parts.build_id
        missing: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._demand(source)) for source in wanted]
                await self._report_progress(parts, dict(zip(tasks, wanted, strict=True)))
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

    async def _report_progress(
        self, parts: StageParts, wanted: Mapping[asyncio.Task[Buffer], Source]
    ) -> None:
        """Say now and then how much is there, until all is."""
        clock, size = asyncio.get_running_loop().time, sum(x.weights.size_bytes for x in wanted.values())
        progress = TransferProgress("fetching stage weights", size)
        while (await asyncio.wait(wanted, timeout=self._report_seconds))[1]:
            come = (
                x.weights.size_bytes if task.done() else self._exchange.num_come(x.weights)
                for task, x in wanted.items()
            )
            num_bytes = sum(come)
            logger.info("%s", progress.describe(num_bytes, clock()))
            self._post(Outgoing(HUB, FetchProgress(parts.build_id, num_bytes, size)))

    def _accuse(self, node: NodeId, reason: str) -> None:
        """Tell the hub of a node that sends wrong content; what it sent comes from others."""
        if node != HUB:
            self._post(Outgoing(HUB, Complaint(self._build_id, node, reason)))

    async def _demand(self, source: Source) -> Buffer:
        others = [node for node in source.others if node in self._known()]
        content = await self._fetch(source.weights, source.node, others, passes_on=True)
        if isinstance(content, Refusal):
            raise _Missing(source.node, content.reason)
        return content

    async def _fetch(
        self, ref: BlobRef, source: NodeId = HUB, others: Sequence[NodeId] = (), *, passes_on: bool = False
    ) -> Buffer | Refusal:
        """Return a blob; the others are asked first, and the source when none of them gives it."""
        if source not in self._known() and not others and ref not in self.blobs:
            return Refusal(f"blob {ref.blob[:12]} is not here, and {source} cannot be asked for it")
        asked, reserve = (others, [source]) if others else ([source], [])
        return await self._exchange.fetch(
            ref,
            asked,
            quiet_seconds=self._quiet_seconds,
            reserve=reserve,
            can_wait=bool(others),
            passes_on=passes_on,
        )

    async def _write(self, work: Callable[..., Any], *given: Any) -> Any:
        """Hash, copy and write in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, work, *given)

    async def _get_backup(self, order: BackupOrder) -> None:
        content = await self._fetch(order.source.weights, order.source.node)
        if isinstance(content, Refusal):
            logger.debug("backup %d is not kept: %s", order.number, content.reason)
        else:
            await self._write(self.store.keep_backup, content)
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
