"""Our side of a comparison: what peer.averager does with a round, without training beside it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.shapes import Floats, Outgoing, Shape
from ravnest.averaging.ring import RingPosition, RingReduce, choose_chunk_size, choose_least_chunk
from ravnest.averaging.round import Round, RoundPhase
from ravnest.codec import decode_tensor
from ravnest.config import WireFormat
from ravnest.engine.optimizers import OptimizerSettings
from ravnest.engine.train_config import TrainConfig
from ravnest.ids import NodeId, RoundId, SegmentId
from ravnest.model.state.state_dict import FlatEntry, Layout
from ravnest.peer.segments import EncodedChunk, SegmentState
from ravnest.protocol.averaging import RingPart, RoundCommit, RoundReady
from ravnest.protocol.messages import Refusal, pack, unpack


class MultiRing:
    """All rings of a node at once."""

    def __init__(
        self, node: NodeId, shape: Shape, vector: Floats, wire_format: WireFormat, slowest: float
    ) -> None:
        training = TrainConfig(OptimizerSettings((), 0.0), 1, deltas=wire_format)
        first, weight = shape.stages[node][1].start, shape.weights[node]
        self._id = RoundId(1)
        least = choose_least_chunk(slowest, wire_format)
        self._successors: dict[SegmentId, NodeId] = {}
        rings: dict[SegmentId, RingReduce[Any]] = {}
        for number, ring in enumerate(shape.rings):
            if node not in ring.owners:
                continue
            segment, place, count = SegmentId(number), ring.owners.index(node), len(ring.owners)
            low, high = (
                (position - first) * shape.items_per_position for position in (ring.start, ring.stop)
            )
            layout = Layout(ring.start, ring.stop, (FlatEntry("w", (high - low,), "float32", 0, ring.start),))
            anchored = SegmentState(layout, (), training, "cpu", {"w": torch.zeros(high - low)})
            fault = anchored.open({"w": torch.from_numpy(vector[low:high])}, {}, weight)
            assert fault is None, fault
            seat = RingPosition(self._id, segment, place, count)
            rings[segment] = RingReduce(seat, anchored, weight, choose_chunk_size(high - low, count, least))
            self._successors[segment] = ring.owners[(place + 1) % count]
        self._round: Round[Any] = Round(self._id, node, rings, deadline=float("inf"))

    @property
    def done(self) -> bool:
        return self._round.phase is RoundPhase.READY

    @property
    def result(self) -> Floats:
        self._round.conclude(RoundCommit(self._id))
        averages = self._round.pop_averages()
        assert averages is not None
        chunks = [chunk for pieces in averages.values() for chunk in pieces]
        found: Floats = torch.cat([decode_tensor(chunk.buffer, chunk.spec) for chunk in chunks]).numpy()
        return found

    def start(self) -> Iterable[Outgoing]:
        return self._address(self._round.start())

    def receive(self, header: bytes, buffer: memoryview) -> Iterable[Outgoing]:
        part: Any = unpack(header, (buffer,))
        value = EncodedChunk(part.value, buffer, decode_tensor(buffer, part.value))
        found = self._round.receive(replace(part, value=value))
        assert not isinstance(found, Refusal), found
        return self._address(found)

    def _address(self, messages: Iterable[Any]) -> Iterator[Outgoing]:
        for part in messages:
            if isinstance(part, RingPart):
                chunk: EncodedChunk = part.value
                header = pack(replace(part, value=chunk.spec), (chunk.buffer,))
                yield self._successors[part.segment], header, memoryview(chunk.buffer)
            else:
                assert isinstance(part, RoundReady), part
