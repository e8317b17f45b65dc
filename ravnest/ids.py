"""Names of things that travel: nodes, microbatches, leases, rounds, segments."""

from typing import NewType

NodeId = NewType("NodeId", str)

RoundId = NewType("RoundId", int)
SegmentId = NewType("SegmentId", int)

HUB = NodeId("hub")

MicrobatchId = NewType("MicrobatchId", int)
LeaseId = NewType("LeaseId", int)
