"""Pages that follow something: each has a short queue, and one that reads too slowly gets the whole anew.

All of it runs in the web's event loop. While a page is open, an update is asked for at most every half
second, and less often if making one takes long.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec

from ravnest.config import ProgramTimeouts
from ravnest.web.updates import PageReplica, PageUpdate

MOST_PAGES = 32
_MOST_WAITING = 4  # updates for one page
_SHARE = 0.01  # of its maker's time that updates may take
_ENCODER = msgspec.json.Encoder()


_Replica = TypeVar("_Replica", bound=PageReplica[Any])


class Pages(Generic[_Replica]):
    """Knows what is shown, as a replica, and the pages that follow it."""

    def __init__(
        self, replica: _Replica, ask: Callable[[bool], Awaitable[bool]], timeouts: ProgramTimeouts
    ) -> None:
        self.replica = replica
        self._ask, self._timeouts = ask, timeouts
        self._queues: dict[int, asyncio.Queue[bytes | None]] = {}
        self._num_pages = 0
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._is_over = False

    @property
    def is_full(self) -> bool:
        """Whether no more pages are served."""
        return len(self._queues) >= MOST_PAGES

    def receive(self, update: PageUpdate[Any] | None, seconds: float = 0.0) -> None:
        """Take an update that was made in so many seconds, and show it to all pages; None: nothing is new."""
        if update is not None and not self._is_over:
            self.replica.apply(update)
            self._show(_encode(update))
        self._arrived.set()
        self._arrived = asyncio.Event()
        if self._queues and self._timer is None and not self._is_over:
            pause = choose_pause(seconds, self._timeouts)
            self._timer = asyncio.get_running_loop().call_later(pause, self._ask_again)

    def end(self) -> None:
        """Say to all pages that nothing more comes: what they follow has ended."""
        self._is_over = True
        self.replica.end()
        if self._timer is not None:
            self._timer.cancel()
        for queue in self._queues.values():
            _put(queue, None)

    async def fresh(self) -> _Replica:
        """Return how things are now, or as they were last known if no answer comes soon."""
        arrived = self._arrived
        if await self._ask(True):
            try:
                async with asyncio.timeout(self._timeouts.page_answer_seconds):
                    await arrived.wait()
            except TimeoutError:
                pass
        return self.replica

    async def follow(self) -> AsyncIterator[bytes]:
        """Yield server-sent events: the whole, then what is new, and a comment when nothing is."""
        await self.fresh()
        number, self._num_pages = self._num_pages, self._num_pages + 1
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_WAITING)
        self._queues[number] = queue
        try:
            yield self._whole()
            await self._ask(False)
            while not self._is_over:
                try:
                    async with asyncio.timeout(self._timeouts.page_keepalive_seconds):
                        found = await queue.get()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                yield self._whole() if found is None else found
            yield self._whole()  # as it ended
        finally:
            del self._queues[number]

    def _ask_again(self) -> None:
        self._timer = None
        if self._queues:
            self._asking = asyncio.ensure_future(self._ask_once())

    async def _ask_once(self) -> None:
        await self._ask(False)

    def _whole(self) -> bytes:
        whole = self.replica.whole()
        return b": nothing yet\n\n" if whole is None else _encode(whole)

    def _show(self, event: bytes) -> None:
        for queue in self._queues.values():
            _put(queue, event)


def choose_pause(seconds: float, timeouts: ProgramTimeouts) -> float:
    """Return how long to wait after an update that took so many seconds."""
    return max(timeouts.page_every_seconds, seconds / _SHARE)


def _put(queue: "asyncio.Queue[bytes | None]", event: bytes | None) -> None:
    """Let a page that is behind begin anew: None is the whole."""
    if queue.full():
        while not queue.empty():
            queue.get_nowait()
        event = None
    queue.put_nowait(event)


def _encode(update: PageUpdate[Any]) -> bytes:
    return b"data: " + _ENCODER.encode(update) + b"\n\n"
