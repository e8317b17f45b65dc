"""Peers that are about to join: the hub dials them back, to find out whether others can.

A provider does not know what its router lets in, so its own word is only an upper bound. Who answers has to
prove the peer's key: another machine at the same private address does not count.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from ravnest.config import NetTimeouts
from ravnest.hub.coordinator.notices import NotDialled, Notice
from ravnest.ids import NodeId
from ravnest.net.endpoint import any_answers
from ravnest.net.transport import PeerId, PublicKey, Transport
from ravnest.protocol.membership import Hello

_MOST_AT_ONCE = 256  # that are dialled back: each takes three sockets for each address, for a name six


class Newcomers:
    """Calls `join` with what a peer says, once it is known whether it can be dialled."""

    def __init__(
        self,
        transport: Transport,
        find_peer: Callable[[NodeId], PeerId | None],
        start: Callable[[Coroutine[Any, Any, None]], object],
        join: Callable[[Hello, str], None],
        tell: Callable[[Notice], None],
        timeouts: NetTimeouts,
    ) -> None:
        self._transport, self._seconds = transport, timeouts.dial_seconds
        self._find_peer = find_peer  # that goes by a name, if it is still here
        self._start, self._join, self._tell = start, join, tell
        self._room = asyncio.Semaphore(_MOST_AT_ONCE)
        self._awaited: dict[PeerId, Hello] = {}

    def dial_back(self, peer: PeerId, hello: Hello, key: str) -> None:
        """Find out whether the peer can be dialled; then it joins, unless it was forgotten."""
        is_dialled = peer in self._awaited  # it has gone and come again: it is dialled anew after that
        self._awaited[peer] = hello
        if not is_dialled:
            self._start(self._find(peer, PublicKey(key.encode())))

    async def _find(self, peer: PeerId, key: PublicKey) -> None:
        """Dial a peer where it last said it listens: coming and going takes no more room than staying."""
        is_last = is_reachable = False
        while not is_last:
            hello = self._awaited[peer]
            is_reachable = hello.node.is_reachable and await self._answers(peer, key, hello)
            is_last = self._awaited[peer] is hello
        is_here = self._is_awaited(peer, hello)
        del self._awaited[peer]
        if not is_here:
            return
        if hello.node.is_reachable and not is_reachable:
            self._tell(NotDialled(hello.node.name))
        self._join(replace(hello, node=replace(hello.node, is_reachable=is_reachable)), key.decode())

    def _is_awaited(self, peer: PeerId, hello: Hello) -> bool:
        return self._awaited[peer] is hello and self._find_peer(hello.node.name) == peer

    async def _answers(self, peer: PeerId, key: PublicKey, hello: Hello) -> bool:
        """Return whether the owner of a key answers at one of its addresses; who has gone is not dialled.

        No takes as long as silence: a peer does not learn which ports of the hub's network are open.
        """
        async with self._room:
            if not self._is_awaited(peer, hello):
                return False
            try:
                async with asyncio.timeout(self._seconds):
                    if await any_answers(self._transport.answers(key, each) for each in hello.addresses):
                        return True
                    await asyncio.get_running_loop().create_future()
            except TimeoutError:
                pass  # a router that drops what it does not let in says nothing
        return False
