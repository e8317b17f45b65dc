"""The bytes of a robust round beside those of a plain one: the same vectors, in one process.

Members and hub are those that ship, messages are packed as they travel, with their headers. Bytes of pledges,
calls, votes and checks count; the hub is a member like any other.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.multi_ring import MultiRing
from benchmarks.shapes import Shape
from ravnest.averaging.direct import DirectRound, SharedSegment
from ravnest.averaging.ring import choose_chunk_size, choose_least_chunk
from ravnest.codec import decode_tensor
from ravnest.config import WireFormat
from ravnest.engine.optimizers import OptimizerSettings
from ravnest.engine.train_config import TrainConfig
from ravnest.hub.coordinator.robust_rounds import RobustDecision, RobustRoster
from ravnest.ids import HUB, NodeId, RoundId, SegmentId
from ravnest.model.state.state_dict import FlatEntry, Layout
from ravnest.peer.segments import EncodedChunk, SegmentState
from ravnest.protocol.averaging import DirectPart, RoundCall, RoundCheck, RoundCommit
from ravnest.protocol.messages import Refusal, pack

_ROUND = RoundId(1)


def compare_bytes(shape: Shape, wire_format: WireFormat, slowest: float) -> dict[str, float]:
    """Return the megabytes of a plain and of a robust round, and their ratio."""
    plain, robust = _run_plain(shape, wire_format, slowest), _run_robust(shape, wire_format, slowest)
    return {"plain_mb": plain / 1e6, "robust_mb": robust / 1e6, "times": robust / plain}


def _run_plain(shape: Shape, wire_format: WireFormat, slowest: float) -> int:
    members = {
        node: MultiRing(node, shape, shape.vector(node), wire_format, slowest) for node in shape.stages
    }
    waiting = deque(each for member in members.values() for each in member.start())
    num_bytes = 0
    while waiting:
        to, header, buffer = waiting.popleft()
        num_bytes += len(header) + buffer.nbytes
        waiting += members[to].receive(header, memoryview(bytearray(buffer)))
    assert all(member.done for member in members.values())
    return num_bytes


def _run_robust(shape: Shape, wire_format: WireFormat, slowest: float) -> int:
    clusters = {f"{k}": tuple(stage.node for stage in x.stages) for k, x in enumerate(shape.clusters)}
    rings = {SegmentId(number): ring.owners for number, ring in enumerate(shape.rings)}
    roster = RobustRoster(
        clusters, rings, {name: shape.weights[nodes[0]] for name, nodes in clusters.items()}
    )
    hub = RobustDecision(_ROUND, roster)
    members = {node: _member(node, shape, wire_format, slowest) for node in shape.stages}
    waiting: deque[tuple[NodeId, NodeId, Any]] = deque()
    num_bytes = 0

    def post(sender: NodeId, found: Iterable[tuple[NodeId, Any]]) -> None:
        waiting.extend((sender, to, message) for to, message in found)

    for node, member in members.items():
        for found in member.start():
            post(node, found)
    while waiting:
        sender, to, message = waiting.popleft()
        num_bytes += _count(message)
        if to == HUB:
            sends = hub.receive(message)
            assert not isinstance(sends, str), sends
            post(HUB, [(each.to, each.message) for each in sends])
        elif isinstance(message, RoundCall):
            for found in members[to].call(message):
                post(to, found)
        else:
            answer = (
                members[to].check(message)
                if isinstance(message, RoundCheck)
                else members[to].receive(sender, message)
            )
            assert not isinstance(answer, Refusal), answer
            post(to, answer)
    assert isinstance(hub.outcome, RoundCommit), hub.outcome
    _check(members, shape)
    return num_bytes


def _member(node: NodeId, shape: Shape, wire_format: WireFormat, slowest: float) -> DirectRound[EncodedChunk]:
    training = TrainConfig(OptimizerSettings((), 0.0), 1, deltas=wire_format)
    first, vector = shape.stages[node][1].start, shape.vector(node)
    least, shared = choose_least_chunk(slowest, wire_format), {}
    for number, ring in enumerate(shape.rings):
        if node not in ring.owners:
            continue
        segment, count = SegmentId(number), len(ring.owners)
        low, high = ((position - first) * shape.items_per_position for position in (ring.start, ring.stop))
        layout = Layout(ring.start, ring.stop, (FlatEntry("w", (high - low,), "float32", 0, ring.start),))
        state = SegmentState(layout, (), training, "cpu", {"w": torch.zeros(high - low)})
        fault = state.open({"w": torch.from_numpy(vector[low:high])}, {}, shape.weights[node])
        assert fault is None, fault
        weights = {owner: shape.weights[owner] for owner in ring.owners}
        size = choose_chunk_size(high - low, count, least)
        shared[segment] = SharedSegment(_ROUND, segment, state, ring.owners, weights, size)
    return DirectRound(_ROUND, node, shared, deadline=float("inf"))


def _count(message: Any) -> int:
    if not isinstance(message, DirectPart):
        return len(pack(message))
    chunk: EncodedChunk = message.value
    return len(pack(replace(message, value=chunk.spec), (chunk.buffer,))) + memoryview(chunk.buffer).nbytes


def _check(members: dict[NodeId, DirectRound[EncodedChunk]], shape: Shape) -> None:
    """All end with the mean, within what rounding takes: vectors of clusters differ by their weight only."""
    for node, member in members.items():
        member.conclude(RoundCommit(_ROUND))
        averages = member.pop_averages()
        assert averages is not None
        chunks = [chunk for pieces in averages.values() for chunk in pieces]
        found = torch.cat([decode_tensor(chunk.buffer, chunk.spec) for chunk in chunks]).numpy()
        fault = shape.fault(node, found, tolerance=0.5)
        assert fault is None, fault
