"""An outbox: nobody waits for a slow receiver, and what is for one that is away waits, or is dropped."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any

import pytest

from ravnest.config import RESERVE
from ravnest.errors import LinkError
from ravnest.ids import HUB, MicrobatchId, NodeId
from ravnest.net.memory import run_virtual
from ravnest.net.transport import PeerId, Service
from ravnest.protocol import messages
from ravnest.protocol.membership import Stop
from ravnest.protocol.messages import Message
from ravnest.protocol.training import DroppedMicrobatch, StepReport
from ravnest.transfer.outbox import Outbox, Outgoing

NEAR, FAR = NodeId("near"), NodeId("far")
REPORT = StepReport(1, MicrobatchId(0), 0, 0, 1, 0.0, 0.0, 0.0, 0.0, 0.5, ())


class Wires:
    """Plays the transport: a peer's wire may be closed for a while, or torn."""

    def __init__(self) -> None:
        self.peers = {name: PeerId(f"key of {name}") for name in (NEAR, FAR, HUB)}
        self.closed: dict[PeerId, asyncio.Event] = {}
        self.torn: set[PeerId] = set()
        self.sent: list[tuple[PeerId, Message]] = []
        self.failed: list[tuple[PeerId, str]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.outbox = Outbox(self, self.start, self.peers.get, self.fail)  # type: ignore[arg-type]

    async def send(self, peer: PeerId, service: Service, header: bytes, buffers: Sequence = ()) -> None:
        if peer in self.closed:
            await self.closed[peer].wait()
        if peer in self.torn:
            raise LinkError("the wire is torn")
        self.sent.append((peer, messages.unpack(header, buffers)))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    def fail(self, peer: PeerId, error: LinkError) -> None:
        self.failed.append((peer, str(error)))

    def close(self, name: NodeId) -> asyncio.Event:
        event = self.closed[self.peers[name]] = asyncio.Event()
        return event

    def post(self, to: NodeId, *texts: str) -> None:
        for text in texts:
            self.outbox.post(Outgoing(to, Stop(text)))

    def texts(self, to: NodeId) -> list[str]:
        return [message.reason for peer, message in self.sent if peer == self.peers[to]]


async def settle() -> None:
    """Let all run that can: on a virtual loop time moves only when nothing else does."""
    await asyncio.sleep(1.0)


def play(script: Callable[[Wires], Awaitable[None]]) -> None:
    async def main() -> None:
        wires = Wires()
        await script(wires)
        for task in wires.tasks:
            task.cancel()
        ended = await asyncio.gather(*wires.tasks, return_exceptions=True)
        assert all(each is None or isinstance(each, asyncio.CancelledError) for each in ended)

    run_virtual(main())


def test_a_slow_receiver_delays_no_other() -> None:
    async def script(wires: Wires) -> None:
        opened = wires.close(FAR)
        wires.post(FAR, "one", "two")
        wires.post(NEAR, "three")
        await settle()
        assert (wires.texts(FAR), wires.texts(NEAR)) == ([], ["three"])
        assert (wires.outbox.num_waiting(FAR), wires.outbox.num_waiting(NEAR)) == (1, 0)
        opened.set()
        await settle()
        assert wires.texts(FAR) == ["one", "two"]
        assert len(wires.tasks) == 2

    play(script)


def test_what_is_for_nobody_is_dropped_when_posted_and_when_it_is_due() -> None:
    async def script(wires: Wires) -> None:
        wires.post(NodeId("nobody"), "one")
        assert not wires.outbox.receivers
        wires.post(NEAR, "two")
        del wires.peers[NEAR]
        await settle()
        assert not wires.sent
        assert not wires.failed

    play(script)


@pytest.mark.parametrize("is_new", [False, True])
def test_what_is_for_a_receiver_that_is_away_waits_unless_another_comes_back(is_new: bool) -> None:
    async def script(wires: Wires) -> None:
        wires.outbox.pause(HUB)
        wires.post(HUB, "one", "two")
        wires.post(NEAR, "three")
        await settle()
        assert [peer for peer, _ in wires.sent] == [wires.peers[NEAR]]
        wires.outbox.resume(HUB, is_new=is_new)
        wires.post(HUB, "four")
        await settle()
        assert wires.texts(HUB) == (["four"] if is_new else ["one", "two", "four"])

    play(script)


@pytest.mark.parametrize("is_new", [False, True])
def test_what_a_receiver_did_not_get_before_it_was_away_is_tried_again(is_new: bool) -> None:
    async def script(wires: Wires) -> None:
        opened = wires.close(HUB)
        wires.post(HUB, "one", "two")
        await settle()
        wires.outbox.pause(HUB)
        wires.torn.add(wires.peers[HUB])
        opened.set()
        await settle()
        assert not wires.failed
        wires.torn.clear()
        wires.outbox.resume(HUB, is_new=is_new)
        await settle()
        assert wires.texts(HUB) == ([] if is_new else ["one", "two"])

    play(script)


def test_a_receiver_that_is_there_and_takes_nothing_is_told_of_and_the_next_message_is_tried() -> None:
    async def script(wires: Wires) -> None:
        wires.torn.add(wires.peers[NEAR])
        wires.post(NEAR, "one")
        await settle()
        assert wires.failed == [(wires.peers[NEAR], "the wire is torn")]
        wires.torn.clear()
        wires.post(NEAR, "two")
        await settle()
        assert wires.texts(NEAR) == ["two"]

    play(script)


@pytest.mark.parametrize("state", ["idle", "sending", "away"])
def test_nothing_is_left_of_a_receiver_that_is_forgotten(state: str) -> None:
    async def script(wires: Wires) -> None:
        opened = wires.close(NEAR) if state == "sending" else asyncio.Event()
        if state == "away":
            wires.outbox.pause(NEAR)
        wires.post(NEAR, "one", "two")
        await settle()
        wires.outbox.forget(NEAR)
        wires.outbox.forget(NEAR)
        wires.closed.clear()
        wires.post(NEAR, "three")
        opened.set()
        await settle()
        before = {"idle": ["one", "two"], "sending": [], "away": []}[state]
        under_way = ["one"] if state == "sending" else []
        assert sorted(wires.texts(NEAR)) == sorted([*before, *under_way, "three"])
        wires.outbox.forget(NEAR)
        await settle()
        assert not wires.outbox.receivers
        assert len(wires.tasks) == 2
        assert all(task.done() for task in wires.tasks)

    play(script)


def test_only_so_many_reports_wait_and_nothing_else_is_left_out() -> None:
    async def script(wires: Wires) -> None:
        wires.outbox.pause(HUB)
        most = 3 * RESERVE.most_microbatches
        for _ in range(most + 200):
            wires.outbox.post(Outgoing(HUB, REPORT))
        for number in range(1200):
            wires.outbox.post(Outgoing(HUB, DroppedMicrobatch(1, MicrobatchId(number), "")))
        wires.outbox.post(Outgoing(HUB, REPORT))
        assert wires.outbox.num_waiting(HUB) == most + 1200
        wires.outbox.resume(HUB, is_new=False)
        await settle()
        kinds = [type(message) for _, message in wires.sent]
        assert (kinds.count(StepReport), kinds.count(DroppedMicrobatch)) == (most, 1200)

    play(script)


def test_however_many_receivers_there_are_few_messages_leave_in_one_turn_of_the_loop() -> None:
    async def script(wires: Wires) -> None:
        names = [NodeId(f"peer {number}") for number in range(200)]
        wires.peers |= {name: PeerId(name) for name in names}
        for name in names:
            wires.post(name, "one", "two")
        counts = [0]
        while counts[-1] < 400:
            await asyncio.sleep(0)
            counts.append(len(wires.sent))
        assert max(after - before for before, after in pairwise(counts)) <= 32
        assert all(wires.texts(name) == ["one", "two"] for name in names)

    play(script)
