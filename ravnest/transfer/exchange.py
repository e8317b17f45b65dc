"""What the hub and a peer do alike with content: fetch it, serve it, and time links with it."""

import asyncio
from collections.abc import Callable, Sequence

from ravnest.ids import NodeId
from ravnest.protocol.blobs import BlobPart, BlobRef, BlobRequest
from ravnest.protocol.membership import Refused
from ravnest.protocol.messages import Refusal
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.blobs import Blobs, serve_piece
from ravnest.transfer.link_probe import LinkProbe, LinkTimes, ballast, name_ballast
from ravnest.transfer.outbox import Outgoing

ContentMessage = BlobRequest | BlobPart | Refused
_SAME_TIME = 0.9  # of what a timer waited has passed by a clock that went on meanwhile


class Exchange:
    """Passes the blobs of one program on and gets it others; `post` sends a message."""

    def __init__(self, blobs: Blobs, post: Callable[[Outgoing], None]) -> None:
        self.blobs = blobs
        self.post = post
        self._probe = LinkProbe()

    def receive(self, sender: NodeId, message: ContentMessage, buffers: Sequence[Buffer]) -> Refusal | None:
        """Answer a message about content, or return why it is not for this program."""
        match message:
            case BlobRequest() if message.blob == name_ballast().blob:
                self.post(serve_piece(sender, message, ballast()))
            case BlobRequest():
                self.post(self.blobs.serve(sender, message))
            case BlobPart():
                return self._take_piece(sender, message, buffers[0])
            case Refused():
                self.blobs.refuse(sender, message.reason, message.blob)
        return None

    def _take_piece(self, sender: NodeId, piece: BlobPart, buffer: Buffer) -> Refusal | None:
        requests = self._probe.receive(sender, piece)
        found = self.blobs.take(sender, piece, buffer) if requests is None else requests
        if isinstance(found, Refusal):
            return found
        for request in found:
            self.post(request)
        return None

    async def fetch(
        self,
        ref: BlobRef,
        source: NodeId,
        *,
        quiet_seconds: float | None,
        clock: Callable[[], float] | None = None,
    ) -> Buffer | Refusal:
        """Return a blob that a node is asked for, or why it never came.

        A node that sends nothing of it for `quiet_seconds` is given up; None waits for as long as it takes.
        By a `clock` that stands still nobody is quiet.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[Buffer | Refusal] = loop.create_future()
        done, clock = arrived.set_result, clock or loop.time
        try:
            for request in self.blobs.want(ref, source, done, keep=False):
                self.post(request)
            num_come, since = 0, clock()
            while not (await asyncio.wait([arrived], timeout=quiet_seconds))[0]:
                is_quiet = self.blobs.num_come(ref) == num_come
                if is_quiet and quiet_seconds is not None and clock() - since > _SAME_TIME * quiet_seconds:
                    return Refusal(f"{source} has sent nothing of it for {quiet_seconds:.0f} s")
                num_come, since = self.blobs.num_come(ref), clock()
            return arrived.result()
        finally:
            self.blobs.forget(ref, done)

    def time_link(
        self, source: NodeId, clock: Callable[[], float], done: Callable[[LinkTimes], None]
    ) -> None:
        """Find out how fast a node sends; `done` gets it, if the node answers."""
        self.post(self._probe.start(source, clock, done))
