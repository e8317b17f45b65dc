"""What is found out beside the hub, in seconds in which it must answer others: a plan, how fast a peer is."""

from dataclasses import dataclass

from ravnest.plan.types import Node, NodeId, Plan


@dataclass(frozen=True, slots=True)
class MakePlan:
    """An order: form a plan of this number with these nodes, or repair one; then say PlanMade."""

    epoch: int
    nodes: tuple[Node, ...]
    repairs: Plan | None = None
    gone: tuple[Node, ...] = ()  # who is in that plan, and no longer here
    changed: tuple[Node, ...] = ()  # who is another than that plan knows, as it knows them
    microbatches: int = 0  # of it


@dataclass(frozen=True, slots=True)
class PlanMade:
    """What a MakePlan asked for, or what these nodes are short of."""

    epoch: int
    plan: Plan | None
    microbatches: int
    shortage: str
    now: float
    reason: str = ""  # what a repair does


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found of a peer; None is what it did not find."""

    node: NodeId
    flops_per_second: float | None
    upload_bytes_per_second: float | None
    download_bytes_per_second: float | None
    latency_seconds: float | None
    now: float
