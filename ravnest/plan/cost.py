"""What a stage costs on a node: compute and traffic of every interval of the line, on every node.

The one cost model behind the planner, the forecast and repair. `NodeTable` has the nodes as arrays;
`StageCosts` joins it with the line for all stages there could be, and `timing` for given clusters. `depth`
counts the stages after this one.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from ravnest.config import PlanConfig, Recompute
from ravnest.plan.line import RESERVED_PER_HOP, Bools, Floats, Ints, LineCost, StageMemory
from ravnest.plan.types import Swarm

Floats32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class NodeTable:
    """The nodes of a swarm as arrays, in the swarm's order."""

    memory: Floats
    flops: Floats
    upload: Floats
    download: Floats
    latency: Floats
    region: Ints
    reachable: Bools
    risk: Floats
    region_latency: Floats

    @classmethod
    def of(cls, swarm: Swarm, config: PlanConfig) -> Self:
        """Return the table of a swarm; risk is the share of time lost to this node's deaths."""
        nodes = swarm.nodes
        regions = sorted({node.region for node in nodes})
        index = {region: k for k, region in enumerate(regions)}
        between = np.zeros((len(regions), len(regions)))
        for one, other, seconds in swarm.region_latency:
            if one in index and other in index:
                between[index[one], index[other]] = between[index[other], index[one]] = seconds
        return cls(
            memory=np.array([node.memory_bytes for node in nodes], float),
            flops=np.array([node.flops_per_second for node in nodes], float),
            upload=np.array([node.upload_bytes_per_second for node in nodes], float),
            download=np.array([node.download_bytes_per_second for node in nodes], float),
            latency=np.array([node.latency_seconds for node in nodes], float),
            region=np.array([index[node.region] for node in nodes], np.int64),
            reachable=np.array([node.is_reachable for node in nodes], bool),
            risk=np.array([config.recover_seconds / node.uptime_seconds for node in nodes], float),
            region_latency=between,
        )

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def both_ways(self) -> Floats:
        """Bytes per second that each node can send and receive at once."""
        return np.minimum(self.upload, self.download)

    def take(self, index: Ints) -> "NodeTable":
        """Return the table of some of the nodes."""
        columns = {name: column[index] for name, column in vars(self).items() if name != "region_latency"}
        return replace(self, **columns)

    def hop_seconds(self, one: Ints, other: Ints) -> Floats:
        """One-way seconds between nodes, elementwise."""
        between: Floats = self.region_latency[self.region[one], self.region[other]]
        return self.latency[one] + self.latency[other] + between


class StageCosts:
    """Seconds per batch of every interval of a line on every node, for any depth.

    Arrays are [node, length - 1, start]: no longer intervals than the largest node could hold.
    """

    def __init__(self, line: LineCost, nodes: NodeTable) -> None:
        self._line = line
        self._memory = nodes.memory[:, None, None]
        self._bands: dict[int, Floats32] = {}  # by window
        self._windows: dict[tuple[int, int], int] = {}  # by depth and windows reserved per hop
        start, stop = self._intervals(line.num_positions)
        self._start, self._stop = start, stop = self._intervals(self._longest(nodes, start, stop))
        self._needs = StageMemory(line, start, stop)
        link = self._link_seconds(nodes)
        round_seconds = line.round_bytes(start, stop) / (line.round_share * nodes.both_ways)[:, None, None]
        link[
            (start + self._lengths > line.num_positions) | (round_seconds > line.config.max_round_seconds)
        ] = np.inf
        slowness = _narrow(1.0 / nodes.flops)[:, None, None]
        work = line.flops[stop] - line.flops[start]
        again = line.forward_flops[stop] - line.forward_flops[start]
        least = np.maximum(link, np.float32(line.config.microbatch_seconds))
        self._keeping = np.maximum(least, _narrow(work) * slowness)
        self._recomputing = np.maximum(least, _narrow(work + again) * slowness)

    def at(self, depth: int, per_hop: int = RESERVED_PER_HOP[0]) -> Floats32:
        """Return seconds per batch [node, length - 1, start]; infinite where the interval does not fit."""
        line, mode = self._line, self._line.config.recompute
        if (depth, per_hop) not in self._windows:
            self._windows[depth, per_hop] = int(line.reserved(np.array(depth), per_hop))
        reserved = self._windows[depth, per_hop]
        if reserved in self._bands:
            return self._bands[reserved]
        window = np.array(reserved)
        versions = line.versions(window)
        nothing = np.float32(np.inf)
        seconds = np.full_like(self._keeping, nothing) if mode is Recompute.NEVER else None
        if seconds is None:
            fits = self._needs.needed(window, versions, recompute=True) <= self._memory
            seconds = np.where(fits, self._recomputing, nothing)
        if mode is not Recompute.ALWAYS:  # keeping activations is never slower, so it comes first
            fits = self._needs.needed(window, versions, recompute=False) <= self._memory
            np.copyto(seconds, self._keeping, where=fits)
        self._bands[reserved] = seconds
        return seconds

    @property
    def _lengths(self) -> Ints:
        return np.arange(1, len(self._stop) + 1)[:, None]

    def _intervals(self, longest: int) -> tuple[Ints, Ints]:
        """Return starts and stops [length - 1, start]; stops beyond the end are the end."""
        length = self._line.num_positions
        start = np.arange(length)[None, :] + np.zeros((longest, 1), np.int64)
        return start, np.minimum(start + np.arange(1, longest + 1)[:, None], length)

    def _longest(self, nodes: NodeTable, start: Ints, stop: Ints) -> int:
        """Return the longest interval that the largest node could hold as a last stage."""
        line, nothing = self._line, np.array(0)
        need = np.minimum.reduce(
            [line.memory(start, stop, nothing + 1, nothing, recompute=again) for again in (False, True)]
        )
        is_inside = start + np.arange(1, len(start) + 1)[:, None] <= line.num_positions
        fits = (is_inside & (need <= nodes.memory.max(initial=0.0))).any(axis=1)
        return int(np.flatnonzero(fits).max(initial=0)) + 1

    def _link_seconds(self, nodes: NodeTable) -> Floats32:
        line, start, stop = self._line, self._start, self._stop
        send = line.send_before[start] + line.send_after[stop]
        receive = line.receive_before[start] + line.receive_after[stop]
        upload, download = (line.link_share * rate[:, None, None] for rate in (nodes.upload, nodes.download))
        sending, receiving = _narrow(send) / _narrow(upload), _narrow(receive) / _narrow(download)
        np.maximum(sending, receiving, out=sending)
        return sending


def _narrow(values: Floats) -> Floats32:
    return values.astype(np.float32)


_SHORTEST_PERIOD = 1e-9  # of a model that costs nothing
_STARVED = 1.5  # times longer that batches are under way where a window is narrower than it should be
_QUEUES, _LEAST_QUEUES = 2.0, 1.5  # batches in flight over those under way; fewer starve a cluster


@dataclass(frozen=True, slots=True)
class Rows:
    """Clusters as arrays [cluster, depth]: depth 0 is the last stage, `cuts` has one column more.

    Where windows are not given, they are as wide as the cycle asks for and memory allows, and a stage
    recomputes when it does not fit otherwise. Formats are bytes on the wire per byte of fp32.
    """

    nodes: Ints
    lengths: Ints
    cuts: Ints
    window: Ints | None = None
    recompute: Bools | None = None
    accumulate: Ints | None = None  # [cluster]
    forward: Floats | None = None  # how each stage sends forward; the narrowest if not given
    backward: Floats | None = None
    predicts: Bools | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """What a batch costs in each stage, [cluster, depth]; zero where a cluster has no such stage."""

    compute: Floats
    send: Floats
    receive: Floats
    relay: Floats  # through the hub, between this stage and the one after it
    cycle: Floats  # from this stage's forward to its backward, nothing waiting
    memory: Floats
    window: Ints
    recompute: Bools
    hub_bytes: Floats  # [cluster] of a batch, that the hub sends: samples, and what it passes on
    deaths: Floats  # [cluster] time lost to deaths, per time that is not
    seconds: Floats  # [cluster] between two batches, deaths included
    is_narrow: Bools  # [cluster] memory makes a window narrower than it should be

    @property
    def stage(self) -> Floats:
        """Seconds per batch of each stage alone."""
        return np.asarray(np.maximum.reduce([self.compute, self.send, self.receive, self.relay]))


def timing(line: LineCost, nodes: NodeTable, rows: Rows) -> Timing:
    """Return what each stage of some clusters costs, and how fast each cluster runs."""
    table = rows.nodes
    exists = np.arange(table.shape[1]) < rows.lengths[:, None]
    traffic = _Traffic(line, nodes, rows)
    send, receive, relay, travel = traffic.send, traffic.receive, traffic.relay, traffic.travel
    for column in (send, receive, relay, travel):
        column[~exists] = 0.0
    stages = _Stages(line, nodes, rows, exists, np.maximum.reduce([send, receive, relay]), travel)
    window, recompute, queues = stages.choose()
    compute, memory = stages.compute(recompute), stages.memory(window, recompute)
    cycle = np.cumsum(compute + travel, axis=1)
    waiting = np.where(exists, queues * cycle / window, 0.0)
    slowest = np.maximum.reduce([compute, send, receive, relay, waiting])
    deaths = np.where(exists, nodes.risk[table], 0.0).sum(axis=1)
    seconds = slowest.max(axis=1, initial=_SHORTEST_PERIOD) * (1.0 + deaths)
    is_narrow = np.asarray((exists & (queues > 1.0)).any(axis=1))
    hub = traffic.hub
    return Timing(
        compute, send, receive, relay, cycle, memory, window, recompute, hub, deaths, seconds, is_narrow
    )


class _Stages:
    """Window, recomputing and memory of each stage of some clusters."""

    def __init__(
        self, line: LineCost, nodes: NodeTable, rows: Rows, exists: Bools, link: Floats, travel: Floats
    ) -> None:
        self._line, self._rows, self._exists = line, rows, exists
        self._link, self._travel = link, travel
        self._fits: dict[bool, Ints] = {}
        self._leasts: dict[bool, Floats] = {}
        start, stop = rows.cuts[:, 1:], rows.cuts[:, :-1]
        self._room = nodes.memory[rows.nodes]
        self._speed = nodes.flops[rows.nodes]
        self._work = line.flops[stop] - line.flops[start]
        self._again = line.forward_flops[stop] - line.forward_flops[start]
        held = held_ratio(line, rows) * line.inner[start] + line.data_before[start]
        self._needs = StageMemory(line, start, stop, rows.predicts, held)
        depth = np.arange(rows.nodes.shape[1])
        self._widest, self._reserved = (
            np.broadcast_to(each, rows.nodes.shape) for each in (line.window(depth), line.reserved(depth))
        )

    def compute(self, recompute: Bools) -> Floats:
        """Return the seconds each stage computes for a batch."""
        seconds = (self._work + recompute * self._again) / self._speed
        return np.where(self._exists, np.maximum(seconds, self._line.config.microbatch_seconds), 0.0)

    def memory(self, window: Ints, recompute: Bools) -> Floats:
        """Return the resident bytes of each stage."""
        accumulate = None if self._rows.accumulate is None else self._rows.accumulate[:, None]
        versions = self._line.versions(window, accumulate)
        needed = self._needs.needed(window, versions, recompute=False)
        if recompute.any():
            needed = np.where(recompute, self._needs.needed(window, versions, recompute=True), needed)
        return np.where(self._exists, needed, 0.0)

    def choose(self) -> tuple[Ints, Bools, Floats]:
        """Return window and recomputing of each stage, those that are given or the best ones.

        Also by how much batches that queue lengthen a cycle: a plan should have no window that memory makes
        too narrow.
        """
        window, recompute = self._rows.window, self._rows.recompute
        if recompute is None:
            recompute = self._choose_recompute(self._reserved if window is None else window)
        if window is not None:
            return window, recompute, np.ones(window.shape)
        recompute = self._free_memory(recompute)
        enough, _ = self._enough(recompute)
        least, _ = self._enough(recompute, _LEAST_QUEUES)
        fits = np.where(recompute, self._fitting(again=True), self._fitting(again=False))
        window = np.where(self._exists, np.minimum(enough, np.maximum(self._reserved, fits)), self._widest)
        is_too_wide = self.memory(window, recompute) > self._room
        window = np.where(is_too_wide, np.minimum(window, self._reserved), window)
        # No stage has more batches under way than those before it.
        window = np.minimum.accumulate(window[:, ::-1], axis=1)[:, ::-1]
        return window, recompute, np.where(window < least, _STARVED, 1.0)

    def _choose_recompute(self, window: Ints) -> Bools:
        mode = self._line.config.recompute
        if mode is not Recompute.AUTO:
            return np.full(window.shape, mode is Recompute.ALWAYS)
        if self._rows.window is None and self._rows.accumulate is None:
            return np.asarray(self._exists & (self._least(again=False) > self._room))
        accumulate = None if self._rows.accumulate is None else self._rows.accumulate[:, None]
        versions = self._line.versions(window, accumulate)
        return self._exists & (self._needs.needed(window, versions, recompute=False) > self._room)

    def _free_memory(self, recompute: Bools) -> Bools:
        """Let stages recompute that need the memory for their window and have the time."""
        if self._line.config.recompute is not Recompute.AUTO:
            return recompute
        enough, pace = self._enough(recompute)
        is_in_time = self.compute(np.ones(recompute.shape, bool)) <= pace[:, None]
        return recompute | ((self._fitting(again=False) < enough) & is_in_time)

    def _enough(self, recompute: Bools, queues: float = _QUEUES) -> tuple[Ints, Floats]:
        """Return the window each stage needs so that nothing waits, and the pace of each cluster.

        It holds the batches that are under way when nothing waits, and as many more: where several stages are
        almost equally slow, batches queue before each of them.
        """
        compute = self.compute(recompute)
        pace = np.maximum(compute, self._link).max(axis=1, initial=_SHORTEST_PERIOD)
        cycle = np.cumsum(compute + self._travel, axis=1)
        enough = np.ceil(queues * cycle / pace[:, None]).astype(np.int64) + 2
        return np.where(self._widest > 1, np.minimum(self._widest, enough), 1), pace

    def _least(self, again: bool) -> Floats:
        """Return the memory of each stage with the window that is reserved."""
        if again not in self._leasts:
            versions = self._line.versions(self._reserved)
            self._leasts[again] = self._needs.needed(self._reserved, versions, again)
        return self._leasts[again]

    def _fitting(self, again: bool) -> Ints:
        """Return the widest window that memory has room for, at most the widest useful one."""
        if again in self._fits:
            return self._fits[again]
        # Block by block, each batch more takes less than the one before: this is at most too careful.
        least = self._least(again)
        more = self._needs.needed(self._reserved + 1, self._line.versions(self._reserved), again)
        each = np.maximum(more - least, 1e-9)
        fits = self._reserved + np.floor((self._room - least) / each * (1 - 1e-9))
        self._fits[again] = np.clip(fits, 0, self._widest).astype(np.int64)
        return self._fits[again]


def held_ratio(line: LineCost, rows: Rows) -> Floats:
    """Return how the inputs of each stage travelled."""
    ratio = np.full(rows.nodes.shape, line.forward_ratio)
    if rows.forward is not None:
        ratio[:, :-1] = rows.forward[:, 1:]
    return ratio


class _Traffic:
    """Seconds per batch of each stage's links, and those between it and the stage after it."""

    def __init__(self, line: LineCost, nodes: NodeTable, rows: Rows) -> None:
        start, stop = rows.cuts[:, 1:], rows.cuts[:, :-1]
        upload = line.link_share * nodes.upload[rows.nodes]
        download = line.link_share * nodes.download[rows.nodes]
        forward = np.full(rows.nodes.shape, line.forward_ratio) if rows.forward is None else rows.forward
        backward = np.full(rows.nodes.shape, line.backward_ratio) if rows.backward is None else rows.backward
        # What crosses the cut before and after each stage, each way.
        after, back_before = forward * line.inner[stop], backward * line.inner[start]
        before, back_after = np.zeros(rows.nodes.shape), np.zeros(rows.nodes.shape)
        before[:, :-1], back_after[:, 1:] = after[:, 1:], back_before[:, :-1]
        self.send = (back_before + after) / upload
        self.receive = (before + line.data_before[start] + back_after + line.data_after[stop]) / download
        self.relay, self.travel = np.zeros(rows.nodes.shape), np.zeros(rows.nodes.shape)
        there, back = after[:, 1:], back_before[:, :-1]
        ahead, behind = rows.nodes[:, :-1], rows.nodes[:, 1:]
        hidden = ~(nodes.reachable[ahead] | nodes.reachable[behind])
        self.relay[:, 1:] = hidden * np.maximum(there, back) / line.config.relay_bytes_per_second
        hidden &= np.arange(1, rows.nodes.shape[1]) < rows.lengths[:, None]
        relayed = hidden * (there + back)
        self.hub = line.sample_bytes + relayed.sum(axis=1)
        relayed /= line.config.relay_bytes_per_second
        direct = there / np.minimum(upload[:, 1:], download[:, :-1])
        direct += back / np.minimum(upload[:, :-1], download[:, 1:])
        self.travel[:, 1:] = np.maximum(direct, relayed) + 2.0 * nodes.hop_seconds(ahead, behind)
