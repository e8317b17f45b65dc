"""What a peer gets from others: blobs, and how long they take, which tells how far and how fast a link is.

A newer order of a kind ends what is fetched for an older one. Driven by peer.agent.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Executor
from typing import Any

from ravnest.errors import LinkError
from ravnest.ids import HUB, NodeId
from ravnest.peer.blob_store import BlobStore
from ravnest.peer.compute_protocol import Build, Probe, ToCompute
from ravnest.protocol.blobs import BlobRef
from ravnest.protocol.membership import ProbeOrder, ProbeReport
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import BackupKept, BackupOrder, PlanOrder, Source, StageMissing, StageParts
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.blobs import Blobs, LinkTimes, Outgoing

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 30.0  # after which who sends nothing is given up


class _Missing(Exception):  # noqa: N818 - what happened, not that it is an error
    """A source gives nothing; it ends what is fetched beside it."""


class Fetcher:
    """Carries out orders to get something; `known` are who can be asked, what comes is `put` to be used."""

    def __init__(
        self,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        known: Callable[[], Collection[NodeId]],
        post: Callable[[Outgoing], None],
        put: Callable[[ToCompute], None],
        fail: Callable[[LinkError], None],
        writer: Executor,
    ) -> None:
        self.store = BlobStore()
        self.blobs = Blobs(self.store)
        self._writer = writer  # of one thread: what is kept last was ordered last
        self._start, self._known, self._post, self._put, self._fail = start, known, post, put, fail
        self._tasks: dict[type, asyncio.Task[None]] = {}  # by the kind of order

    def follow(
        self, message: StageParts | BackupOrder | ProbeOrder, plan: Callable[[], PlanOrder | None]
    ) -> None:
        """Get what an order is about, and no longer what the last of its kind was; `plan` is the newest."""
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
        """Get nothing more for an order of this kind."""
        if task := self._tasks.pop(kind, None):
            task.cancel()

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

    async def _fetch(self, ref: BlobRef, source: NodeId = HUB) -> bytes | Refusal:
        if source not in self._known() and ref not in self.blobs:
            return Refusal(f"blob {ref.blob[:12]} is not here, and {source} cannot be asked for it")
        arrived: asyncio.Future[bytes | Refusal] = asyncio.get_running_loop().create_future()
        try:
            for request in self.blobs.want(ref, source, arrived.set_result, keep=False):
                self._post(request)
            num_come = 0
            while not (await asyncio.wait([arrived], timeout=_QUIET_SECONDS))[0]:
                if source != HUB and self.blobs.num_come(ref) == num_come:  # the hub has patience of its own
                    return Refusal(f"{source} has sent nothing of it for {_QUIET_SECONDS:.0f} s")
                num_come = self.blobs.num_come(ref)
            return arrived.result()
        finally:
            self.blobs.forget(ref, arrived.set_result)

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
            self._post(self.blobs.time(HUB, loop.time, timed.set_result))
            link = await timed
            report = ProbeReport(None, link.bytes_per_second, link.latency_seconds)
        content = None if order.blueprint is None else await self._fetch(order.blueprint)
        if isinstance(content, bytes):
            self._put(Probe(report, content))
        else:
            self._post(Outgoing(HUB, report))
