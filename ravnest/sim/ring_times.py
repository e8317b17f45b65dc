"""How long a round takes its members: the model of the forecast, with the nodes that really take part.

A node sends and receives 2 (n-1)/n of its segments, over what training leaves of its link. A ring is done
when its slowest owner is, and a chunk has been around it twice. What only the hub connects shares its line.
"""

from collections.abc import Callable, Collection, Mapping

import numpy as np

from ravnest.config import PlanConfig
from ravnest.ids import NodeId, SegmentId
from ravnest.plan.line import LineCost
from ravnest.plan.types import Ring
from ravnest.sim.lines import Lines

LeftOver = Callable[[NodeId], float]  # the bytes per second that a round has of a node's link


def member_seconds(
    rings: Mapping[SegmentId, Ring],
    members: Collection[NodeId],
    line: LineCost,
    lines: Lines,
    left_over: LeftOver,
    ratio: float,
) -> dict[NodeId, float]:
    """Return after how many seconds each member has all its averages; `ratio` is bytes per byte of fp32."""
    rates: dict[NodeId, float] = {}
    volumes: dict[NodeId, float] = dict.fromkeys(members, 0.0)
    owners, sizes = {}, {}
    for segment, ring in rings.items():
        present = [name for name in ring.owners if name in volumes]
        if len(present) > 1:
            owners[segment] = present
            trained = float(line.trained[ring.stop] - line.trained[ring.start])
            sizes[segment] = 2.0 * (len(present) - 1) / len(present) * ratio * trained
            for name in present:
                volumes[name] += sizes[segment]
    for name in volumes:
        rates[name] = left_over(name)
    relayed = {segment: _relayed_bytes(owners[segment], sizes[segment], lines) for segment in owners}
    through_hub = _hub_seconds(sum(total for total, _ in relayed.values()), line.config)
    seconds: dict[NodeId, float] = dict.fromkeys(members, 0.0)
    for segment, present in owners.items():
        moving = max(volumes[name] / rates[name] for name in present)
        total, most = relayed[segment]
        if total:
            moving = max(moving, most / line.config.relay_bytes_per_second, through_hub)
        hops = sum(lines.latency(*pair) for pair in _neighbours(present))
        done = moving + 2.0 * hops * (len(present) - 1) / len(present)
        for name in present:
            seconds[name] = max(seconds[name], done)
    return seconds


def _neighbours(owners: list[NodeId]) -> list[tuple[NodeId, NodeId]]:
    return [*zip(owners, owners[1:] + owners[:1], strict=True)]


def _relayed_bytes(owners: list[NodeId], size: float, lines: Lines) -> tuple[float, float]:
    """Return what a ring sends through the hub, and the most that one pair does."""
    count = sum(lines.is_relayed(*pair) for pair in _neighbours(owners))
    return count * size, size if count else 0.0


def _hub_seconds(total: float, config: PlanConfig) -> float:
    return total / config.hub_bytes_per_second if config.hub_bytes_per_second else 0.0


def training_left_over(lines: Lines, used: Mapping[NodeId, tuple[float, float]], overlaps: bool) -> LeftOver:
    """Return what rounds have of each link: all of it, or what training, which uses these shares, leaves."""

    def find(name: NodeId) -> float:
        node = lines.node(name)
        upload, download = node.upload_bytes_per_second, node.download_bytes_per_second
        if overlaps:
            sent, received = used.get(name, (0.0, 0.0))
            upload, download = upload * max(0.01, 1.0 - sent), download * max(0.01, 1.0 - received)
        return float(np.minimum(upload, download))

    return find
