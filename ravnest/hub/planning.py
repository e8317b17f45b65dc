"""A plan that is asked for and made beside the hub: it takes seconds, in which the hub must answer others."""

from dataclasses import dataclass

from ravnest.plan.types import Node, Plan


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
