"""The two borders of an agent, watched: what passes to and from compute, and what crosses the network.

Both are put around the real ones, so that the agent knows nothing of a page.
"""

from collections.abc import Callable, Iterable, Sequence

from ravnest.net.transport import (
    Delivery,
    LinkDown,
    LinkUp,
    PeerId,
    PublicKey,
    Service,
    Transport,
    TransportEvent,
)
from ravnest.peer.compute_protocol import Compute, ComputeSetup, FromCompute, ToCompute
from ravnest.protocol.tensors import Buffer
from ravnest.provider.lending_recorder import LendingRecorder


class WatchedCompute:
    """A Compute whose items are recorded as they pass."""

    def __init__(self, inner: Compute, recorder: LendingRecorder) -> None:
        self._inner, self._recorder = inner, recorder

    def put(self, item: ToCompute) -> None:
        """Pass an item to compute."""
        self._recorder.take_order(item)
        self._inner.put(item)

    async def run(self, setup: ComputeSetup, deliver: Callable[[FromCompute], None]) -> None:
        """Run compute until it is closed."""

        def record(item: FromCompute) -> None:
            self._recorder.take_answer(item)
            deliver(item)

        await self._inner.run(setup, record)

    def close(self) -> None:
        """End `run` after the piece of work under way."""
        self._inner.close()


class MeteredTransport:
    """A Transport whose bytes are counted, and whose link to the hub is watched."""

    def __init__(self, inner: Transport, hub: PeerId, recorder: LendingRecorder) -> None:
        self._inner, self._hub, self._recorder = inner, hub, recorder

    @property
    def peer(self) -> PeerId:
        """The id of this program."""
        return self._inner.peer

    async def send(self, to: PeerId, service: Service, header: bytes, buffers: Sequence[Buffer] = ()) -> None:
        """Hand over a message, and count it when it is taken."""
        num_bytes = len(header) + sum(memoryview(each).nbytes for each in buffers)
        await self._inner.send(to, service, header, buffers)
        self._recorder.sent_bytes += num_bytes

    async def receive(self) -> TransportEvent:
        """Return what happened next."""
        event = await self._inner.receive()
        match event:
            case Delivery(_, _, header, buffers):
                self._recorder.received_bytes += len(header) + sum(each.nbytes for each in buffers)
            case LinkUp(peer) if peer == self._hub:
                self._recorder.connect()
            case LinkDown(peer) if peer == self._hub:
                self._recorder.disconnect()
        return event

    def allow(self, keys: Iterable[PublicKey]) -> None:
        """Accept these keys and no others."""
        self._inner.allow(keys)

    def dial(self, peer: PeerId, addresses: Sequence[str], greeting: bytes = b"") -> None:
        """Connect to an allowed peer."""
        self._inner.dial(peer, addresses, greeting)

    def redial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Look once for another way to a connected peer."""
        self._inner.redial(peer, addresses)

    def drop(self, peer: PeerId, reason: str) -> None:
        """End the link to a peer."""
        self._inner.drop(peer, reason)

    def connected(self) -> frozenset[PeerId]:
        """Return the peers whose link is up."""
        return self._inner.connected()
