"""A program that speaks to a hub or a peer over real sockets and says whatever a test wants."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import SystemRandom
from typing import Any, TypeVar

from ravnest.ids import NodeId
from ravnest.net.identity import KeyPair, Token, greet, new_keys, peer_of
from ravnest.net.transport import Delivery, PeerId, PublicKey, Service, TransportEvent
from ravnest.net.zeromq import ZeroMqTransport
from ravnest.plan.types import Node
from ravnest.protocol import messages
from ravnest.protocol.membership import PROTOCOL_VERSION, Hello
from ravnest.protocol.messages import Message
from ravnest.protocol.tensors import Buffer

Kind = TypeVar("Kind")


def make_node(name: str, **facts: Any) -> Node:
    given = {"memory_bytes": 1.4e6, "flops_per_second": 1e9, "latency_seconds": 1e-4, **facts}
    return Node(NodeId(name), upload_bytes_per_second=1e9, download_bytes_per_second=1e9, **given)


class Stranger:
    """Somebody the token's secret lets in."""

    def __init__(self, token: Token, keys: KeyPair, transport: ZeroMqTransport) -> None:
        self.keys = keys
        self.transport = transport
        self.hub = peer_of(PublicKey(token.hub_key))
        self._token = token

    def dial(self) -> None:
        self.transport.allow([PublicKey(self._token.hub_key)])
        greeting = greet(self._token, self.keys.public)
        self.transport.dial(self.hub, self._token.addresses, greeting)

    async def join(self, name: str, **said: Any) -> None:
        self.dial()
        await self.say_hello(name, **said)

    async def say_hello(
        self, name: str, *, version: str = PROTOCOL_VERSION, addresses: Sequence[str] = (), **facts: Any
    ) -> None:
        await self.send(Hello(version, make_node(name, **facts), tuple(addresses)))

    async def send(self, message: Message, buffers: Sequence[Buffer] = (), to: PeerId | None = None) -> None:
        await self.send_raw(messages.pack(message, buffers), buffers, to)

    async def send_raw(self, header: bytes, buffers: Sequence[Buffer] = (), to: PeerId | None = None) -> None:
        await self.transport.send(to or self.hub, Service.CONTROL, header, buffers)

    async def next_event(self, kind: type[Kind], seconds: float = 100.0) -> Kind:
        async with asyncio.timeout(seconds):
            while True:
                event: TransportEvent = await self.transport.receive()
                if isinstance(event, kind):
                    return event

    async def hear(self, kind: type[Kind]) -> Kind:
        """Return the next message of a kind."""
        while True:
            delivery = await self.next_event(Delivery)
            message = messages.unpack(delivery.header, delivery.buffers)
            if isinstance(message, kind):
                return message


@asynccontextmanager
async def stranger(token: Token, listen: str | None = None) -> AsyncIterator[Stranger]:
    keys = new_keys()
    async with ZeroMqTransport(keys, SystemRandom(), listen) as transport:
        yield Stranger(token, keys, transport)
