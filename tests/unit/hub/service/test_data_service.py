"""What the hub fetches from peers that answer, that answer slowly, and that do not answer at all."""

import asyncio
import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ravnest.config import HubTimeouts, WireFormat
from ravnest.errors import GuardError
from ravnest.hub.coordinator.events import (
    CheckpointPart,
    Collect,
    Collected,
    LossRechecked,
    MakeParts,
    SendFields,
    WithdrawCollect,
)
from ravnest.hub.coordinator.leases import LedgerState
from ravnest.hub.service.data_service import DataService, Fields, Parts
from ravnest.ids import LeaseId, MicrobatchId, NodeId
from ravnest.net.memory import run_virtual
from ravnest.protocol.tensors import TensorSpec
from ravnest.transfer.blobs import Blobs
from ravnest.transfer.exchange import Exchange

PEER = NodeId("peer")
CONTENT = bytes(range(256)) * (3 << 12)  # three pieces
BOOKS = LedgerState(0, 0, 0, 0, {})

SHORT = HubTimeouts(quiet_upload_seconds=40.0)


def collect(
    seconds_per_piece: float | None,
    is_result: bool,
    fault: str = "",
    times: int = 1,
    withdrawn: int = 0,
) -> tuple[list, list]:
    """Have a peer's state fetched; return what the hub is told, and whom it loses."""
    there = Blobs()
    ref = there.keep(CONTENT)
    applied: list[Collected] = []
    lost: list[tuple[NodeId, str]] = []

    async def in_background(work, *arguments):
        return work(*arguments)

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def answer(request) -> None:
            piece = there.serve(PEER, request.message)
            exchange.receive(PEER, piece.message, piece.buffers)

        def post(request) -> None:
            if seconds_per_piece is not None:
                loop.call_later(seconds_per_piece, answer, request)

        exchange = Exchange(Blobs(), post, in_background)
        owner = SimpleNamespace(keep=lambda *_: "", keep_result=lambda *_: "", find_fault=lambda *_: fault)
        around = (applied.append, in_background, lambda *who: lost.append(who), loop.time, bool, SHORT)
        service = DataService(owner, exchange, *around)
        async with asyncio.timeout(1000):
            for _ in range(times):
                await service.carry_out(WithdrawCollect(withdrawn))
                await service.carry_out(Collect(7, (CheckpointPart(0, 6, PEER, ref),), BOOKS, is_result))

    run_virtual(main())
    return [(each.number, each.fault) for each in applied], lost


@pytest.mark.parametrize("seconds_per_piece", [0.0, 30.0])
def test_what_comes_in_time_is_collected(seconds_per_piece: float) -> None:
    assert collect(seconds_per_piece, False) == collect(seconds_per_piece, True) == ([(7, "")], [])


def test_a_checkpoint_whose_peer_sends_nothing_has_failed() -> None:
    told = "peer has sent nothing of it for 40 s"
    assert collect(None, False) == ([(7, told)], [])


def test_who_does_not_send_the_result_goes_so_that_another_cluster_is_asked() -> None:
    told = "its weights cannot be had: peer has sent nothing of it for 40 s"
    assert collect(None, True) == ([], [(PEER, told)])


def test_what_is_no_state_of_the_stage_is_neither_a_checkpoint_nor_the_result() -> None:
    fault = "'w' is not finite"
    assert collect(0.0, False, fault) == ([(7, f"peer: {fault}")], [])
    assert collect(0.0, True, fault) == ([], [(PEER, f"its weights cannot be had: peer: {fault}")])


def test_a_checkpoint_that_is_withdrawn_is_not_written() -> None:
    ((number, fault),), lost = collect(0.0, False, withdrawn=7)
    assert (number, lost) == (7, [])
    assert "went back" in fault


def test_a_result_that_is_refused_again_and_again_ends_the_job() -> None:
    """Else all is trained again for ever, and comes to the same."""
    fault = "'w' is not finite"
    assert len(collect(0.0, True, fault, times=2)[1]) == 2
    with pytest.raises(GuardError, match="there is no result: peer: 'w' is not finite, 3 times"):
        collect(0.0, True, fault, times=3)


def test_the_fields_of_all_stages_come_of_one_reading() -> None:
    """A dataset that masks at random would else send inputs of one mask and labels of another."""
    sent, applied, reads = [], [], itertools.count()

    def read_fields(is_evaluation: bool, microbatches, names: tuple[str, ...]) -> Iterator[Fields]:
        for _ in microbatches:
            content = b"%d" % next(reads)
            spec = TensorSpec("uint8", (len(content),), WireFormat.FP32)
            yield tuple((name, spec) for name in names), tuple(memoryview(content) for _ in names)

    async def in_background(work, *arguments):
        return work(*arguments)

    async def main() -> None:
        around = (applied.append, in_background, bool, lambda: 0.0, bool)
        supply = DataService(
            SimpleNamespace(read_fields=read_fields), Exchange(Blobs(), sent.append), *around
        )
        consumers = ((NodeId("root"), ("x", "mask")), (NodeId("leaf"), ("mask", "y")))
        await supply.carry_out(SendFields(1, LeaseId(0), False, MicrobatchId(5), ((1, 2), (3, 4)), consumers))
        again = SendFields(1, LeaseId(1), False, MicrobatchId(7), ((1, 2),), consumers, MicrobatchId(5))
        await supply.carry_out(again)  # it is masked in another way now, and checks nothing

    run_virtual(main())
    assert applied == [LossRechecked("", MicrobatchId(7), None, 0.0)]
    facts = [
        (x.to, x.message.microbatch, [name for name, _ in x.message.fields], [bytes(y) for y in x.buffers])
        for x in sent
    ]
    assert facts == [
        ("root", 5, ["x", "mask"], [b"0", b"0"]),
        ("leaf", 5, ["mask", "y"], [b"0", b"0"]),
        ("root", 6, ["x", "mask"], [b"1", b"1"]),
        ("leaf", 6, ["mask", "y"], [b"1", b"1"]),
    ]


def test_weights_of_stages_that_are_no_more_are_not_kept() -> None:
    blobs, refs, needed = Blobs(), [], {(0, 2), (2, 6)}
    versions = iter(range(100))

    def make_parts(start: int, stop: int) -> Parts:
        weights = b"%d to %d, %d" % (start, stop, next(versions))
        return Parts(b"blueprint", lambda: [weights], (), ())

    async def in_background(work, *arguments):
        return work(*arguments)

    async def main() -> None:
        around = (refs.append, in_background, bool, lambda: 0.0, needed.__contains__)
        supply = DataService(SimpleNamespace(make_parts=make_parts), Exchange(blobs, bool), *around)
        for _ in range(3):
            await supply.carry_out(MakeParts(0, 2))
        await supply.carry_out(MakeParts(2, 6))
        assert [made.weights in blobs for made in refs] == [False, True, True, True]
        needed.remove((0, 2))
        needed.add((0, 3))
        await supply.carry_out(MakeParts(0, 3))
        assert [made.weights in blobs for made in refs] == [False, False, False, True, True]
        assert refs[0].blueprint in blobs

    run_virtual(main())
