"""Links on virtual time: each end sends and receives at its own rate, and one thing after the other.

What crosses begins to arrive one latency after it began to leave. Two nodes that nobody can dial meet at the
hub, whose upload all of them share with samples and weights. Training has a share of each link; weights and
snapshots go beside it, as bulk has its own place in a real link. Small messages take the latency alone. When
a link changes, what waits at it already goes on as it began.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ravnest.config import PlanConfig
from ravnest.ids import HUB, NodeId
from ravnest.plan.types import Node, Swarm
from ravnest.sim.timeline import Timeline

_HUB_LATENCY = 0.01  # one way, from the exchange of any region
Arrived = Callable[..., object]


class Pipe:
    """One direction of a link: it serves one thing after the other at a fixed rate."""

    __slots__ = ("free_at", "num_bytes", "rate")

    def __init__(self, bytes_per_second: float) -> None:
        self.rate = bytes_per_second
        self.free_at = self.num_bytes = 0.0

    def serve(self, now: float, size: float) -> float:
        """Return when something is through that comes now."""
        self.free_at = max(self.free_at, now) + size / self.rate
        self.num_bytes += size
        return self.free_at


class _Ends:
    """What a node sends and receives: training by the share that rounds leave it, and bulk."""

    __slots__ = ("bulk_down", "bulk_up", "down", "up")

    def __init__(self, node: Node) -> None:
        upload, download = node.upload_bytes_per_second, node.download_bytes_per_second
        self.up, self.down = Pipe(upload), Pipe(download)
        self.bulk_up, self.bulk_down = Pipe(upload), Pipe(download)

    def follow(self, node: Node) -> None:
        """Carry from now on what the link of a node does."""
        self.up.rate = self.bulk_up.rate = node.upload_bytes_per_second
        self.down.rate = self.bulk_down.rate = node.download_bytes_per_second


class Lines:
    """All links of a swarm; `nodes` are the machines as they are, whatever the planner believes of them."""

    def __init__(self, timeline: Timeline, swarm: Swarm, config: PlanConfig) -> None:
        self._timeline, self._config = timeline, config
        self._first = {node.name: node for node in swarm.nodes}
        self._nodes = dict(self._first)
        self._between = {frozenset(pair[:2]): pair[2] for pair in swarm.region_latency}
        self._ends: dict[NodeId, _Ends] = {}
        self._relays: dict[tuple[NodeId, NodeId], Pipe] = {}
        upload = config.hub_bytes_per_second or float("inf")
        self.hub_data, self.hub_bulk, self.hub_relay = Pipe(upload), Pipe(upload), Pipe(upload)
        self.link_share = 1.0  # of each link that training has

    def node(self, name: NodeId) -> Node:
        """Return the machine of this name, as it is."""
        return self._nodes[name]

    def change(self, name: NodeId, times: float) -> None:
        """Let a link carry so many times what it did at first, both ways."""
        first = self._first[name]
        upload, download = first.upload_bytes_per_second, first.download_bytes_per_second
        self._nodes[name] = replace(
            first, upload_bytes_per_second=times * upload, download_bytes_per_second=times * download
        )
        if name in self._ends:
            self._ends[name].follow(self._nodes[name])

    def restart(self, name: NodeId) -> None:
        """Forget what was on its way at a node that starts anew."""
        self._ends.pop(name, None)

    def latency(self, one: NodeId, other: NodeId) -> float:
        """Return the seconds that a small message takes between two nodes, or between one and the hub."""
        if HUB in (one, other):
            node = self._nodes[other if one == HUB else one]
            return node.latency_seconds + _HUB_LATENCY
        first, second = self._nodes[one], self._nodes[other]
        between = 0.0
        if self._between and first.region != second.region:
            between = self._between.get(frozenset((first.region, second.region)), 0.0)
        return first.latency_seconds + second.latency_seconds + between

    def is_relayed(self, one: NodeId, other: NodeId) -> bool:
        """Return whether only the hub connects two nodes."""
        if HUB in (one, other):
            return False
        return not (self._nodes[one].is_reachable or self._nodes[other].is_reachable)

    def send(
        self, one: NodeId, other: NodeId, size: float, then: Arrived, *facts: Any, is_bulk: bool = False
    ) -> float:
        """Send so many bytes; when the last one has arrived, the action happens. Return when it has left."""
        timeline = self._timeline
        pipe, share = self._upload(one, is_bulk), 1.0 if is_bulk or one == HUB else self.link_share
        begins, latency = max(pipe.free_at, timeline.now), self.latency(one, other)
        left = pipe.serve(timeline.now, size / share)
        way = (other, size, share, is_bulk, then, facts)
        if self.is_relayed(one, other):
            timeline.at(begins + latency / 2, self._relay, (one, other), left, latency / 2, way)
        elif other == HUB:
            timeline.at(left + latency, then, *facts)
        else:
            timeline.at(begins + latency, self._arrive, left + latency, way)
        return left

    def _relay(self, pair: tuple[NodeId, NodeId], left: float, latency: float, way: Any) -> None:
        now, size = self._timeline.now, way[1]
        pipe = self._relays.get(pair)
        if pipe is None:
            pipe = self._relays[pair] = Pipe(self._config.relay_bytes_per_second)
        begins = max(pipe.free_at, self.hub_relay.free_at, now)
        through = max(pipe.serve(now, size), self.hub_relay.serve(now, size), left + latency)
        self._timeline.at(begins + latency, self._arrive, through + latency, way)

    def _arrive(self, last_at: float, way: Any) -> None:
        other, size, share, is_bulk, then, facts = way
        ends = self._find(other)
        pipe = ends.bulk_down if is_bulk else ends.down
        self._timeline.at(max(pipe.serve(self._timeline.now, size / share), last_at), then, *facts)

    def _upload(self, name: NodeId, is_bulk: bool) -> Pipe:
        if name == HUB:
            return self.hub_bulk if is_bulk else self.hub_data
        ends = self._find(name)
        return ends.bulk_up if is_bulk else ends.up

    def _find(self, name: NodeId) -> _Ends:
        ends = self._ends.get(name)
        if ends is None:
            ends = self._ends[name] = _Ends(self._nodes[name])
        return ends
