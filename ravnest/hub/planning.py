"""What is found out beside the hub, in seconds in which it must answer others: a plan, how fast a peer is."""

from dataclasses import dataclass

from ravnest.plan.types import Node, NodeId, Plan


@dataclass(frozen=True, slots=True)
class MakePlan:
    """An order: form a plan of this number with these nodes, then say PlanMade."""

    epoch: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class PlanMade:
    """What a MakePlan asked for, or what these nodes are short of."""

    epoch: int
    plan: Plan | None
    microbatches: int
    shortage: str
    now: float


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found of a peer; None is what it did not find."""

    node: NodeId
    flops_per_second: float | None
    upload_bytes_per_second: float | None
    download_bytes_per_second: float | None
    latency_seconds: float | None
    now: float


@dataclass(frozen=True, slots=True)
class Measured:
    """For people: what is believed of a peer's speed and links; the fault is why that was not measured."""

    node: Node
    fault: str = ""
