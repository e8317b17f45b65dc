"""What leaves a peer: one queue for each receiver, so that a slow one delays no other.

Parcels for a hub that is away wait for it. One that comes back as another knows nothing of what they are
about, so they are dropped. A neighbour that is away is noticed by whoever keeps the links.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ravnest.errors import LinkError
from ravnest.ids import HUB, NodeId
from ravnest.net.transport import PeerId, Transport
from ravnest.protocol import wire
from ravnest.protocol.training import StepReport
from ravnest.transfer.blobs import Outgoing

logger = logging.getLogger(__name__)

_MOST_REPORTS = 1000  # that wait for the hub; what comes after them says nothing that must be known


class Outbox:
    """The parcels of one peer; `peers` are those it knows, `fail` is told when the hub takes none."""

    def __init__(
        self,
        transport: Transport,
        start: Callable[[Coroutine[Any, Any, None]], object],
        peers: Callable[[], Mapping[NodeId, PeerId]],
        fail: Callable[[LinkError], None],
    ) -> None:
        self._transport = transport
        self._start = start
        self._peers = peers
        self._fail = fail
        self._queues: dict[NodeId, asyncio.Queue[tuple[int, Outgoing]]] = {}
        self._session = 0  # of the hub
        self._has_hub = asyncio.Event()

    def post(self, parcel: Outgoing) -> None:
        """Queue a parcel for its receiver."""
        if parcel.to not in self._queues:
            self._queues[parcel.to] = asyncio.Queue()
            self._start(self._send_all(self._queues[parcel.to]))
        queue = self._queues[parcel.to]
        if not isinstance(parcel.message, StepReport) or queue.qsize() < _MOST_REPORTS:
            queue.put_nowait((self._session, parcel))

    def find_hub(self, is_new: bool) -> None:
        """Send what waits for the hub, unless it has forgotten what that was about."""
        self._session += is_new
        self._has_hub.set()

    def miss_hub(self) -> None:
        """Let what is for the hub wait."""
        self._has_hub.clear()

    async def _send_all(self, queue: asyncio.Queue[tuple[int, Outgoing]]) -> None:
        while True:
            session, parcel = await queue.get()
            while not await self._try(session, parcel):
                pass

    async def _try(self, session: int, parcel: Outgoing) -> bool:
        """Send a parcel, or drop it; return whether that is done."""
        if parcel.to == HUB:
            await self._has_hub.wait()
            if session != self._session:
                return True
        peer = self._peers().get(parcel.to)
        if peer is None:  # of an older plan
            return True
        try:
            header = wire.pack(parcel.message, parcel.buffers)
            await self._transport.send(peer, parcel.service, header, parcel.buffers)
        except LinkError as error:
            if parcel.to == HUB and not self._has_hub.is_set():
                return False
            if parcel.to == HUB:
                self._fail(error)
            logger.debug("a %s is lost: %s", type(parcel.message).__name__, error)
        return True
