"""The content of a peer: it fetches what orders name, keeps snapshots, and serves both to others.

Orders name the parts of a stage, a backup, or what the peer is probed with. A newer order of a kind ends what
is fetched for an older one. The peer keeps the newest snapshots that it made itself, and one backup for
others, in files of a temporary folder that are read without a copy. Where the disk takes none they stay in
memory. Threads that only write put them there; the event loop reads them.
"""

import asyncio
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from ravnest.config import TIMEOUTS, PeerTimeouts
from ravnest.disk import FileMap
from ravnest.errors import LinkError
from ravnest.ids import HUB, NodeId
from ravnest.peer.compute_protocol import Build, Probe, ToCompute, WrittenBlob, name_file
from ravnest.peer.machine import trim_freed_memory
from ravnest.protocol.membership import Complaint, ProbeOrder, ProbeReport
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import (
    PIECE_BYTES,
    BackupKept,
    BackupOrder,
    BlobRef,
    FetchProgress,
    PlanOrder,
    Source,
    StageMissing,
    StageParts,
)
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.blobs import Blob, Blobs, hash_pieces, name_hashes
from ravnest.transfer.exchange import ContentMessage, Exchange, TransferProgress
from ravnest.transfer.link_probe import LinkTimes
from ravnest.transfer.outbox import Outgoing

logger = logging.getLogger(__name__)

_NUM_OWN = 3  # snapshots of its own


class BlobStore:
    """Blobs by hash. As a context manager it has a folder, below `parent`; otherwise it has only memory."""

    def __init__(self, parent: str | None = None) -> None:
        self._parent = parent
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._has_warned = False
        self._own: dict[str, Blob] = {}  # oldest first
        self._backup: dict[str, Blob] = {}

    def __enter__(self) -> Self:
        with suppress(OSError):  # said when something is to be kept
            self._folder = tempfile.TemporaryDirectory(
                prefix="ravnest-", dir=self._parent, ignore_cleanup_errors=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._own, self._backup = {}, {}
        if self._folder is not None:
            self._folder.cleanup()

    def get(self, blob: str) -> Blob | None:
        """Return a blob that is here."""
        return self._own.get(blob) or self._backup.get(blob)

    def __contains__(self, blob: object) -> bool:
        return blob in self._own or blob in self._backup

    def values(self) -> tuple[Blob, ...]:
        """Return all blobs that are here."""
        return (*self._own.values(), *self._backup.values())

    def __setitem__(self, blob: str, found: Blob) -> None:
        """Keep a snapshot made here, and drop the fourth before it."""
        self._add(blob, self._own[blob] if blob in self._own else self._write(blob, found))

    def adopt(self, written: WrittenBlob) -> bool:
        """Keep a snapshot that compute has written; return whether it is here."""
        if (known := self._own.get(written.ref.blob)) is not None:
            # The same weights again. Their file may have lost its name when they came first.
            with suppress(OSError):
                name_file(self.folder, written.ref.blob).unlink(missing_ok=True)
            self._add(written.ref.blob, known)
            return True
        content: Buffer | None = written.content
        if content is not None:
            self._warn(written.fault)
        else:
            try:
                content = self._map(written.ref.blob, written.ref.size_bytes)
            except (OSError, ValueError) as error:
                logger.warning("the snapshot %s is lost: %s", written.ref.blob[:12], error)
                return False
        self._add(written.ref.blob, Blob(content, written.hashes))
        return True

    def _add(self, blob: str, found: Blob) -> None:
        if blob in self._own:
            del self._own[blob]  # it is the newest again
        self._own[blob] = found
        for old in [*self._own][:-_NUM_OWN]:
            del self._own[old]
            self._remove(old)

    def keep_backup(self, content: Buffer) -> None:
        """Keep the snapshot of another peer instead of the one before; large ones are in a file already."""
        hashes = hash_pieces(content)
        blob = name_hashes(hashes, len(content)).blob
        found = self.get(blob) or Blob(content, hashes)
        is_large = len(content) > PIECE_BYTES
        before, self._backup = self._backup, {blob: found if is_large else self._write(blob, found)}
        for old in before:
            self._remove(old)

    def _write(self, blob: str, found: Blob) -> Blob:
        try:
            name_file(self.folder, blob).write_bytes(found.content)
            return Blob(self._map(blob, len(found.content)), found.hashes)
        except (OSError, ValueError) as error:  # ValueError: what is empty cannot be mapped
            self._warn(error)
            self._remove(blob)
            return found

    @property
    def folder(self) -> str | None:
        """Where its files are, if it has any."""
        return None if self._folder is None else self._folder.name

    def _map(self, blob: str, size_bytes: int) -> Buffer:
        """Return a file's content. Where it can its name goes now, so that a killed peer leaves no file.

        Compute may have put anything there: only a plain file of that size is taken, and no link to another.
        """
        path = name_file(self.folder, blob)
        with open(path, "rb", opener=_open_itself) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_size != size_bytes:
                raise ValueError("it is no plain file of the size that was said")
            mapped = memoryview(FileMap.of(file.fileno()))
        with suppress(OSError):
            path.unlink()
        return mapped

    def _warn(self, error: Exception | str) -> None:
        if not self._has_warned:
            logger.warning("snapshots stay in memory, for the disk does not take them: %s", error)
        self._has_warned = True

    def _remove(self, blob: str) -> None:
        """Remove a file that is not needed; pieces of it on their way stay as they are."""
        if self._folder is not None and blob not in self:
            with suppress(OSError):
                Path(self._folder.name, blob).unlink(missing_ok=True)


def _open_itself(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


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
        folder: str | None = None,
    ) -> None:
        self._quiet_seconds, self._report_seconds = (
            timeouts.quiet_download_seconds,
            timeouts.report_every_seconds,
        )
        self.store = BlobStore(folder)
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
        if isinstance(message, StageParts):
            # What both orders name goes on arriving, and others go on getting it from here.
            before = self._tasks.get(StageParts)
            task = self._tasks[StageParts] = self._start(self._get_stage(message, plan, before))
            if before is not None:
                task.add_done_callback(lambda _: before.cancel())
            return
        self.forget(type(message))
        self._tasks[type(message)] = self._start(self._get_backup(message))

    def forget(self, kind: type) -> None:
        """Fetch nothing more for an order of this kind."""
        if task := self._tasks.pop(kind, None):
            task.cancel()

    def receive(self, sender: NodeId, message: ContentMessage, buffers: Sequence[Buffer]) -> Refusal | None:
        """Answer a message about content, or return why it is not for this peer."""
        return self._exchange.receive(sender, message, buffers)

    async def _get_stage(
        self,
        parts: StageParts,
        plan: Callable[[], PlanOrder | None],
        before: asyncio.Task[None] | None = None,
    ) -> None:
        """Fetch all that a stage is made of at once, and have it built; end what was fetched `before`."""
        wanted = (Source(HUB, parts.blueprint), *parts.sources)
        refs = {source.weights for source in wanted}
        for old in self._passed_on - refs:
            self.blobs.drop(old)
        self._exchange.forget_cut({ref.blob for ref in refs})
        self._passed_on, self._build_id = refs, parts.build_id
        missing: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._demand(source)) for source in wanted]
                if before is not None:  # those begin first, and so take over what they want of it
                    before.cancel()
                await self._report_progress(parts, dict(zip(tasks, wanted, strict=True)))
        except* _Missing as found:
            missing += found.exceptions
        order = plan()
        if order is None or order.build_id != parts.build_id:
            return  # it was fetched for a build that is no more
        if not missing:
            blueprint, *contents = (task.result() for task in tasks)
            self._put(Build(order, parts, bytes(blueprint), tuple(contents)))
            trim_freed_memory()  # of the pieces that came
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
