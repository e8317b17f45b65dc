"""A peer's event loop and a hub played by hand, on virtual time: fetching, leaving, a hub that is away."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from ravnest.config import TIMEOUTS
from ravnest.errors import LinkError, NotAdmitted, UnsafeBlueprint
from ravnest.ids import HUB, LeaseId, MicrobatchId, NodeId, RoundId, SegmentId
from ravnest.net.identity import Token, new_keys
from ravnest.net.memory import MemoryNetwork, MemoryTransport, run_virtual
from ravnest.net.transport import Delivery, Service
from ravnest.net.transport import TransportLimits as LinkLimits
from ravnest.peer.agent import Agent, Offer
from ravnest.peer.compute_protocol import (
    Build,
    ComputeFailed,
    ComputeSetup,
    Delivered,
    FromCompute,
    HubLink,
    ProviderLimits,
    SnapshotWritten,
    StageBuilt,
    ToCompute,
    WrittenBlob,
)
from ravnest.plan.types import Node, Ring, Stage
from ravnest.protocol import messages
from ravnest.protocol.averaging import RoundCommit
from ravnest.protocol.membership import Complaint, Hello, Leave, Recounted, Refused, Stop, Welcome
from ravnest.protocol.messages import Message
from ravnest.protocol.placement import (
    BackupKept,
    BackupOrder,
    BlobPart,
    BlobRequest,
    Contact,
    FetchProgress,
    PlanOrder,
    RingOrder,
    SnapshotMade,
    SnapshotOrder,
    Source,
    StageMissing,
    StageParts,
    StageReady,
)
from ravnest.protocol.tensors import TensorSpec
from ravnest.protocol.training import Activation, DroppedMicrobatch, LeaseDone, LeaseGrant, StepReport
from ravnest.transfer.blobs import Blob, Blobs, hash_pieces, name_blob
from ravnest.transfer.outbox import Outgoing
from tests.support.inline import InlineExecutor

ME, OTHER = NodeId("me"), NodeId("other")
BLUEPRINT, WEIGHTS, MINE = b"blueprint", b"weights" * 400_000, b"mine"
STAGE = Stage(ME, 0, 4, 1)
REPORT = StepReport(1, MicrobatchId(0), 0, 0, 1, 0.0, 0.0, 0.0, 0.0, 0.5, ())


class Noted:
    """Stands for the compute thread, and remembers what it is told."""

    def __init__(self) -> None:
        self.items: list[ToCompute] = []
        self.closed = asyncio.Event()

    def put(self, item: ToCompute) -> None:
        self.items.append(item)

    async def run(self, setup: ComputeSetup, deliver: Callable[[FromCompute], None]) -> None:
        self.setup, self.deliver = setup, deliver
        await self.closed.wait()

    def close(self) -> None:
        self.closed.set()

    def of(self, kind: type) -> list:
        return [item for item in self.items if isinstance(item, kind)]


class Scene:
    """A hub and another peer, played by hand, and the agent between them."""

    def __init__(self) -> None:
        self.network, self.random = MemoryNetwork(), Random(1)
        self.keys = {name: new_keys() for name in (HUB, ME, OTHER)}
        self.nodes: dict[NodeId, MemoryTransport] = {}
        self.blobs = {HUB: Blobs(), OTHER: Blobs()}
        self.compute = Noted()
        self.stack = AsyncExitStack()

    async def open(self, name: NodeId) -> MemoryTransport:
        node = MemoryTransport(self.network, self.keys[name], self.random, name, admit=lambda *_: None)
        node.allow(keys.public for keys in self.keys.values())
        self.nodes[name] = await self.stack.enter_async_context(node)
        return node

    async def say(self, message: Message, sender: NodeId = HUB, buffers: tuple = ()) -> None:
        header = messages.pack(message, buffers)
        await self.nodes[sender].send(self.keys[ME].peer, Service.CONTROL, header, buffers)

    async def hear(self, kind: type, receiver: NodeId = HUB):
        """Return the next message of a kind; requests for blobs are answered meanwhile."""
        async with asyncio.timeout(100):
            while True:
                event = await self.nodes[receiver].receive()
                if not isinstance(event, Delivery):
                    continue
                message = messages.unpack(event.header, event.buffers)
                if isinstance(message, kind):
                    return message
                if isinstance(message, BlobRequest):
                    answer = self.blobs[receiver].serve(ME, message)
                    await self.say(answer.message, receiver, answer.buffers)

    async def answer(self, asked: dict[NodeId, BlobRequest]) -> None:
        """Answer requests that were heard before."""
        for node, request in asked.items():
            answer = self.blobs[node].serve(ME, request)
            await self.say(answer.message, node, answer.buffers)

    async def settle(self, seconds: float = 1.0) -> None:
        """Let the other answer what it is asked for a while."""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(self.hear(Stop, OTHER), self.hear(Stop, HUB))
        except TimeoutError:
            pass

    def save(self, content: bytes, number: int = 1) -> None:
        """Let compute say that it has written a snapshot."""
        blob = WrittenBlob(name_blob(content), hash_pieces(content), content, "no disk")
        self.compute.deliver(SnapshotWritten(SnapshotOrder(1, number), 5, blob))

    async def has(self, content: bytes) -> bool:
        """Return whether the agent serves some content."""
        await self.say(BlobRequest(name_blob(content).blob, 0, len(content)), OTHER)
        answer = await self.hear(BlobPart | Refused, OTHER)
        return isinstance(answer, BlobPart)

    def order(self, epoch: int, **change) -> PlanOrder:
        contact = Contact(OTHER, self.keys[OTHER].public.decode(), (OTHER,))
        given = {"stage": STAGE, "pipeline": (ME,), "rings": (), "contacts": (contact,), **change}
        return PlanOrder(epoch, epoch, 0, **given)

    def parts(self, epoch: int, *sources: tuple[NodeId, bytes]) -> StageParts:
        named = tuple(Source(node, name_blob(content)) for node, content in sources)
        return StageParts(epoch, 5, self.blobs[HUB].keep(BLUEPRINT), named)


def play(
    script: Callable[[Scene, Agent, "asyncio.Task[str]"], Awaitable[None]], limits: LinkLimits | None = None
) -> str | BaseException:
    """Let an agent join, then what the script says; return how it ended."""

    async def main() -> str | BaseException:
        scene = Scene()
        async with scene.stack:
            await scene.open(HUB)
            await scene.open(OTHER)
            keys = scene.keys
            transport = await scene.stack.enter_async_context(
                MemoryTransport(scene.network, keys[ME], Random(2), ME, limits)
            )
            node = Node(ME, 1e9, 1e9, 1e9, 1e9)
            token = Token((HUB,), keys[HUB].public, bytes(16))
            offer = Offer(node, ProviderLimits(1e9), (ME,), patience_seconds=1000.0)
            agent = Agent(token, keys[ME], offer, scene.compute, transport, InlineExecutor())
            running = asyncio.create_task(agent.run())
            assert (await scene.hear(Hello)).build_id == 0
            await scene.say(Welcome(ME))
            await scene.say(scene.order(1))
            await script(scene, agent, running)
            if not running.done():
                await scene.say(Stop("over"))
            (ended,) = await asyncio.gather(running, return_exceptions=True)
            return ended

    return run_virtual(main())


def test_all_that_a_stage_is_made_of_is_fetched_at_once_from_whoever_has_it() -> None:
    async def script(scene: Scene, agent: Agent, _) -> None:
        scene.save(MINE)
        scene.blobs[OTHER].keep(WEIGHTS)
        scene.blobs[HUB].keep(b"from the hub")
        sources = ((OTHER, WEIGHTS), (ME, MINE), (HUB, b"from the hub"))
        await scene.say(scene.parts(1, *sources))
        asked = {OTHER: await scene.hear(BlobRequest, OTHER)}  # before the hub has answered anything
        asked[HUB] = await scene.hear(BlobRequest)
        assert not scene.compute.of(Build)
        await scene.say(scene.parts(1, *sources))  # the same order again: nothing is asked twice
        await scene.answer(asked)
        await scene.settle()
        (build,) = scene.compute.of(Build)
        assert (build.blueprint, build.contents) == (BLUEPRINT, (WEIGHTS, MINE, b"from the hub"))
        assert build.parts.version == 5

    assert play(script) == "over"


def test_what_was_on_its_way_for_a_build_that_ends_is_of_use_in_the_next() -> None:
    """The cluster lost another node: this one has the same stage again, under a new number."""

    async def script(scene: Scene, *_) -> None:
        await scene.say(scene.parts(1, (OTHER, b"four")))
        asked = {OTHER: await scene.hear(BlobRequest, OTHER)}
        await scene.say(scene.order(2))
        await scene.settle()
        await scene.say(scene.parts(2, (OTHER, b"four")))
        await scene.settle()  # who asks again is refused
        scene.blobs[OTHER].keep(b"four")
        await scene.answer(asked)
        await scene.settle()
        (build,) = scene.compute.of(Build)
        assert (build.order.build_id, build.parts.build_id, build.contents) == (2, 2, (b"four",))

    assert play(script) == "over"


def test_what_has_come_for_a_build_that_ends_is_not_built() -> None:
    async def script(scene: Scene, *_) -> None:
        scene.blobs[OTHER].keep(b"four")
        await scene.say(scene.parts(1, (OTHER, b"four")))
        asked = {OTHER: await scene.hear(BlobRequest, OTHER)}
        await scene.say(scene.order(2))
        await scene.answer(asked)
        await scene.settle()
        assert not scene.compute.of(Build)
        assert await scene.has(b"four")

    assert play(script) == "over"


@pytest.mark.parametrize("fault", ["absent", "damaged", "unknown", "not here"])
def test_a_source_that_gives_nothing_is_named_and_the_peer_stays(fault: str) -> None:
    async def script(scene: Scene, *_) -> None:
        sources = {"unknown": (NodeId("who"), b"x"), "not here": (ME, b"x")}
        source = sources.get(fault, (OTHER, b"four"))
        await scene.say(scene.parts(1, source, (OTHER, b"of another, that never comes")))
        if fault in ("absent", "damaged"):
            request = await scene.hear(BlobRequest, OTHER)
            while request.blob != name_blob(b"four").blob:
                request = await scene.hear(BlobRequest, OTHER)
            if fault == "absent":
                await scene.say(Refused("it is gone", request.blob), OTHER)
            else:
                await scene.say(BlobPart(request.blob, 0, 4), OTHER, (b"evil",))
        missing = await scene.hear(StageMissing)
        assert (missing.build_id, missing.node) == (1, source[0])
        scene.blobs[OTHER].keep(b"good")
        await scene.say(scene.parts(1, (OTHER, b"good")))
        await scene.settle()
        assert [build.contents for build in scene.compute.of(Build)] == [(b"good",)]

    assert play(script) == "over"


@pytest.mark.parametrize("fault", ["", "absent", "damaged"])
def test_others_that_have_the_same_are_asked_before_the_hub(fault: str) -> None:
    content = bytes(3 << 20)

    async def script(scene: Scene, *_) -> None:
        ref = scene.blobs[HUB].keep(content)
        if fault == "damaged":
            scene.blobs[OTHER].pass_on(ref, Blob(b"x" * len(content), hash_pieces(content)))
        elif not fault:
            scene.blobs[OTHER].keep(content)
        parts = StageParts(1, 5, scene.blobs[HUB].keep(BLUEPRINT), (Source(HUB, ref, (OTHER,)),))
        await scene.say(parts)
        accused = asyncio.create_task(scene.hear(Complaint)) if fault == "damaged" else None
        if accused is None:
            await scene.settle(2.0)
        else:
            serving = asyncio.create_task(scene.hear(Stop, OTHER))
            assert (await accused).node == OTHER
            await scene.settle(1.0)
            serving.cancel()
        assert [build.contents for build in scene.compute.of(Build)] == [(content,)]
        assert await scene.has(content[: 1 << 20]) is False
        await scene.say(BlobRequest(ref.blob, 0, 5), OTHER)
        assert isinstance(await scene.hear(BlobPart | Refused, OTHER), BlobPart), "it passes them on"

    assert play(script) == "over"


def test_the_hub_hears_how_far_a_fetch_is() -> None:
    async def script(scene: Scene, *_) -> None:
        ref = scene.blobs[OTHER].keep(bytes(3 << 20))
        await scene.say(StageParts(1, 5, scene.blobs[HUB].keep(BLUEPRINT), (Source(OTHER, ref),)))
        for message in (BlobRequest(ref.blob, 3 << 20, 96), BlobRequest(ref.blob, 1 << 20, 1 << 20)):
            await scene.hear(BlobRequest, OTHER)
            answer = scene.blobs[OTHER].serve(ME, message)
            await scene.say(answer.message, OTHER, answer.buffers)
        size = len(BLUEPRINT) + ref.size_bytes
        assert await scene.hear(FetchProgress) == FetchProgress(1, len(BLUEPRINT) + (1 << 20), size)

    assert play(script) == "over"


def test_a_hub_that_does_not_give_the_blueprint_is_left() -> None:
    async def script(scene: Scene, _, running) -> None:
        parts = scene.parts(1)
        scene.blobs[HUB] = Blobs()
        await scene.say(parts)
        leave = await scene.hear(Leave)
        assert not leave.can_hand_over
        await asyncio.wait([running])

    ended = play(script)
    assert isinstance(ended, LinkError)
    assert "the stage cannot be fetched: hub says" in str(ended)


def test_a_hub_that_does_not_let_a_peer_in_again_is_left() -> None:
    async def script(scene: Scene, _, running) -> None:
        await scene.say(Refused("from another peer"), OTHER)
        await asyncio.sleep(0.5)
        assert not running.done()
        await scene.say(Refused("it came back with another version"))
        await asyncio.wait([running])

    ended = play(script)
    assert isinstance(ended, NotAdmitted)
    assert "another version" in str(ended)


def test_a_newer_plan_ends_what_is_fetched_and_what_comes_late_of_it_is_refused() -> None:
    async def script(scene: Scene, agent: Agent, _) -> None:
        await scene.say(scene.parts(1, (OTHER, b"late")))
        request = await scene.hear(BlobRequest, OTHER)
        await scene.settle(0.5)
        await scene.say(scene.order(2))
        await asyncio.sleep(0.1)
        await scene.say(BlobPart(request.blob, 0, 4), OTHER, (b"late",))
        await scene.say(scene.parts(1, (HUB, b"old")))  # of the plan before
        await scene.settle()
        assert not scene.compute.of(Build)
        assert [order.build_id for order in scene.compute.of(PlanOrder)] == [1, 2]
        scene.blobs[OTHER].keep(b"late")
        await scene.say(scene.parts(2, (OTHER, b"late")))
        await scene.settle()
        assert [build.order.build_id for build in scene.compute.of(Build)] == [2]

    assert play(script) == "over"


def test_other_rings_cut_no_link_and_a_stage_under_way_is_built_for_them() -> None:
    rings = ((SegmentId(4), Ring(0, 4, (ME, OTHER))),)

    async def script(scene: Scene, agent: Agent, _) -> None:
        await asyncio.sleep(1.0)
        await scene.say(scene.parts(1, (OTHER, b"late")))
        await scene.hear(BlobRequest, OTHER)
        link = agent._transport._neighbours[scene.keys[OTHER].peer].connection
        assert link is not None
        order = scene.order(1)
        await scene.say(RingOrder(1, 8, rings, order.contacts))
        await scene.say(RingOrder(1, 7, (), order.contacts))  # of older rings: only its contacts count
        scene.blobs[OTHER].keep(b"late")
        await asyncio.sleep(0.5)
        await scene.say(BlobPart(name_blob(b"late").blob, 0, 4), OTHER, (b"late",))
        await scene.settle()
        assert agent._transport._neighbours[scene.keys[OTHER].peer].connection is link
        (build,) = scene.compute.of(Build)
        assert (build.order.build_id, build.order.plan_id, build.order.rings) == (1, 8, rings)
        assert [order.plan_id for order in scene.compute.of(RingOrder)] == [8]
        await scene.say(RingOrder(1, 9, (), ()))
        await asyncio.sleep(0.5)
        assert scene.keys[OTHER].peer not in agent._transport._neighbours

    assert play(script) == "over"


def test_a_source_that_goes_silent_is_named() -> None:
    async def script(scene: Scene, _agent: Agent, _) -> None:
        await asyncio.sleep(1.0)
        await scene.say(scene.parts(1, (OTHER, b"late")))
        await scene.hear(BlobRequest, OTHER)
        missing = await scene.hear(StageMissing)
        assert missing == StageMissing(1, OTHER, f"{OTHER} has sent nothing of it for 30 s")

    assert play(script) == "over"


def test_who_leaves_goes_on_until_the_hub_lets_it_go() -> None:
    async def script(scene: Scene, agent: Agent, running) -> None:
        await asyncio.sleep(0.1)
        agent.leave("its provider takes it back")
        leave = await scene.hear(Leave)
        assert leave == Leave(1, "its provider takes it back", can_hand_over=True)
        await asyncio.sleep(TIMEOUTS.peer.handover.total_seconds / 2)
        await scene.say(scene.order(2))
        await scene.say(SnapshotOrder(2, 1))
        await asyncio.sleep(0.5)
        assert scene.compute.of(SnapshotOrder) == [SnapshotOrder(2, 1)]
        assert not running.done()

    assert play(script) == "its provider takes it back"


@pytest.mark.parametrize("again", [False, True])
def test_who_leaves_waits_ten_seconds_at_most_and_not_when_told_twice(again: bool) -> None:
    async def script(scene: Scene, agent: Agent, running) -> None:
        began = asyncio.get_running_loop().time()
        agent.leave("back")
        await scene.hear(Leave)
        if again:
            agent.leave("back")
        await asyncio.wait([running])
        seconds = asyncio.get_running_loop().time() - began
        assert (
            seconds < 1.0
            if again
            else TIMEOUTS.peer.handover.total_seconds <= seconds < TIMEOUTS.peer.handover.total_seconds + 1
        )

    assert play(script) == "back"


def test_messages_wait_for_a_hub_that_comes_back() -> None:
    async def script(scene: Scene, *_) -> None:
        scene.network.partition([scene.keys[HUB].peer])
        await asyncio.sleep(5.0)
        for number in range(3):
            scene.compute.deliver(Outgoing(HUB, LeaseDone(1, LeaseId(number), 4)))
        for _ in range(3000):
            scene.compute.deliver(Outgoing(HUB, REPORT))
        scene.compute.deliver(StageBuilt(1))
        await asyncio.sleep(10.0)
        scene.network.partition()
        done = [(await scene.hear(LeaseDone)).lease for _ in range(3)]
        assert done == [0, 1, 2]
        await scene.hear(StageReady)

    assert play(script) == "over"


def test_more_than_a_link_holds_waits_for_the_hub_longer_than_a_link_would() -> None:
    async def script(scene: Scene, _, running) -> None:
        scene.network.partition([scene.keys[HUB].peer])
        await asyncio.sleep(5.0)
        for number in range(100):
            scene.compute.deliver(Outgoing(HUB, DroppedMicrobatch(1, MicrobatchId(number), "x" * 290)))
        await asyncio.sleep(300.0)
        assert not running.done()
        scene.network.partition()
        for number in range(100):
            assert (await scene.hear(DroppedMicrobatch)).microbatch == number

    assert play(script, LinkLimits(credit_bytes=(10_000,) * 5)) == "over"


def test_a_hub_that_comes_back_as_another_hears_what_is_held_and_nothing_old() -> None:
    async def script(scene: Scene, *_) -> None:
        scene.compute.deliver(StageBuilt(1))
        await scene.hear(StageReady)
        await scene.nodes[HUB].__aexit__()
        await asyncio.sleep(5.0)
        for _ in range(100):  # more than a link holds
            scene.compute.deliver(Outgoing(HUB, Complaint(1, OTHER, "x" * 290)))
        await asyncio.sleep(5.0)
        await scene.open(HUB)
        first = await scene.hear(object)
        assert isinstance(first, Hello)
        assert first.build_id == 1
        await scene.say(Welcome(ME))
        assert isinstance(await scene.hear(object), Recounted)
        scene.compute.deliver(Outgoing(HUB, LeaseDone(1, LeaseId(8), 4)))
        assert (await scene.hear(object)).lease == 8

    assert play(script, LinkLimits(credit_bytes=(10_000,) * 5)) == "over"


def test_a_hub_that_was_started_anew_hears_what_counts_and_the_stage_goes_on_without_it_until_then() -> None:
    async def script(scene: Scene, *_) -> None:
        await scene.say(PlanOrder(1, 1, 0, STAGE, (ME,), (), ()))
        await asyncio.sleep(1.0)
        scene.compute.deliver(Outgoing(HUB, LeaseDone(1, LeaseId(7), 4)))
        assert (await scene.hear(LeaseDone)).lease == 7
        await scene.nodes[HUB].__aexit__()
        await asyncio.sleep(5.0)
        assert scene.compute.of(HubLink) == [HubLink(is_up=False)]
        for number in range(1000):
            scene.compute.deliver(Outgoing(HUB, replace(REPORT, microbatch=MicrobatchId(number))))
        scene.compute.deliver(Outgoing(HUB, LeaseDone(1, LeaseId(8), 4)))
        scene.compute.deliver(Outgoing(HUB, LeaseDone(9, LeaseId(9), 4)))
        await scene.open(HUB)
        assert isinstance(await scene.hear(object), Hello)
        await scene.say(Welcome(ME))
        assert (await scene.hear(object)).lease == 7, "it may have died before it wrote that down"
        assert [(await scene.hear(object)).microbatch for _ in range(1000)] == [*range(1000)]
        assert (await scene.hear(object)).lease == 8
        assert isinstance(await scene.hear(object), Recounted)
        assert len(scene.compute.of(HubLink)) == 1, "only its plan ends what goes on without it"
        await scene.say(PlanOrder(2, 2, 0, STAGE, (ME,), (), ()))
        scene.compute.deliver(StageBuilt(2))
        assert isinstance(await scene.hear(object), StageReady), "of a build before nothing is said again"

    assert play(script) == "over"


def test_a_hub_that_was_cut_off_is_there_again_for_the_stage() -> None:
    async def script(scene: Scene, *_) -> None:
        scene.network.partition([scene.keys[HUB].peer])
        await asyncio.sleep(5.0)
        scene.compute.deliver(Outgoing(HUB, LeaseDone(1, LeaseId(7), 4)))
        scene.network.partition()
        assert (await scene.hear(LeaseDone)).lease == 7
        assert scene.compute.of(HubLink) == [HubLink(is_up=False), HubLink(is_up=True)]
        scene.compute.deliver(StageBuilt(1))
        assert isinstance(await scene.hear(object), StageReady), "once"

    assert play(script) == "over"


def test_a_neighbour_that_is_lost_takes_nobody_with_it() -> None:
    async def script(scene: Scene, agent: Agent, running) -> None:
        await scene.say(scene.order(2))
        await asyncio.sleep(1.0)
        await scene.nodes[OTHER].__aexit__()
        spec = ((0, TensorSpec("uint8", (60 << 20,), "fp32")),)
        for number in range(3):  # more than there is credit for
            message = Activation(2, MicrobatchId(number), False, 4, spec)
            scene.compute.deliver(Outgoing(OTHER, message, (memoryview(bytes(60 << 20)),)))
        await asyncio.sleep(200.0)
        assert not running.done()

    assert play(script) == "over"


def test_a_spare_keeps_one_backup_and_serves_it() -> None:
    async def script(scene: Scene, agent: Agent, _) -> None:
        await scene.say(scene.order(2, stage=None, pipeline=()))
        for number, content in ((1, b"first"), (2, b"second")):
            source = Source(OTHER, scene.blobs[OTHER].keep(content))
            await scene.say(BackupOrder(2, number, source))
            await scene.settle(0.5) if number == 1 else None
        serving = asyncio.create_task(scene.settle(0.5))
        kept = await scene.hear(BackupKept)
        assert kept == BackupKept(2, 2)
        await serving
        assert await scene.has(b"second")
        assert not await scene.has(b"first")
        lost = Source(OTHER, name_blob(b"nobody has this"))
        await scene.say(BackupOrder(2, 3, lost))
        await scene.settle()
        assert await scene.has(b"second")

    assert play(script) == "over"


def test_a_snapshot_of_compute_is_served_and_announced_and_a_failure_ends_the_peer() -> None:
    async def script(scene: Scene, _, running) -> None:
        scene.save(MINE, number=3)
        made = await scene.hear(SnapshotMade)
        assert made == SnapshotMade(1, 3, 5, name_blob(MINE))
        assert await scene.has(MINE)
        name = name_blob(b"in a file")
        (Path(scene.compute.setup.folder) / name.blob).write_bytes(b"in a file")
        scene.compute.deliver(
            SnapshotWritten(SnapshotOrder(1, 4), 6, WrittenBlob(name, hash_pieces(b"in a file")))
        )
        assert (await scene.hear(SnapshotMade)).weights == name
        assert await scene.has(b"in a file")
        gone = WrittenBlob(name_blob(b"gone"), hash_pieces(b"gone"))
        scene.compute.deliver(SnapshotWritten(SnapshotOrder(1, 5), 6, gone))  # says nothing
        scene.compute.deliver(ComputeFailed.of(UnsafeBlueprint("it wants too much")))
        assert (await scene.hear(Leave | SnapshotMade)).reason == "it wants too much"
        await asyncio.wait([running])

    ended = play(script)
    assert isinstance(ended, UnsafeBlueprint)
    assert ended.exit_code == UnsafeBlueprint.exit_code


def test_what_is_for_the_stage_crosses_to_compute_and_what_is_late_or_foreign_does_not() -> None:
    activation = Activation(2, MicrobatchId(0), False, 4, ())

    async def script(scene: Scene, *_) -> None:
        await scene.say(scene.order(2, pipeline=(ME, OTHER)))
        grant = LeaseGrant(2, LeaseId(1), False, MicrobatchId(0), (4,))
        await scene.say(grant)
        await scene.settle(0.5)
        for refused in (
            grant,
            PlanOrder(3, 3, 0, None, (), (), ()),
            Stop("says a peer"),
            RoundCommit(RoundId(1)),
        ):
            await scene.say(refused, OTHER)  # only the hub says that
        await scene.say(replace(grant, build_id=1))
        await scene.say(replace(activation, build_id=1), OTHER)
        await scene.say(activation, HUB)  # no stage of the cluster
        await scene.say(activation, OTHER)
        await scene.settle(0.5)
        arrived = [(item.message, item.sender) for item in scene.compute.of(Delivered)]
        assert arrived == [(grant, HUB), (activation, OTHER)]
        assert [order.build_id for order in scene.compute.of(PlanOrder)] == [1, 2]

    assert play(script) == "over"
