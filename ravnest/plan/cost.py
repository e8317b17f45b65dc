"""What a stage costs: memory, compute and traffic of every interval of the line, on every node.

The one cost model behind the planner, the forecast and repair. `LineCost` knows the model and the
configuration, `NodeTable` the nodes as arrays; `StageCosts` joins the two for all stages there could be, and
`timing` for given clusters. Intervals are indexed [start, stop]; `depth` counts the stages after this one.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from ravnest.config import OptimizerKind, PlanConfig, Recompute, WeightFormat, WireFormat
from ravnest.plan.block_memory import BlockMemory
from ravnest.plan.types import ModelProfile, Swarm

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats32 = npt.NDArray[np.float32]

# Copies of the parameters that averaging keeps: the anchor that changes are measured from, the change a round
# works on, the mean as it came; and in bf16 what rounding owes, and would owe if the round commits.
_AVERAGING_COPIES = {
    each: 2.0 + each.ratio + (0.0 if each is WireFormat.FP32 else 2 * 0.5) for each in WireFormat
}
_SLACK = 1.05  # what allocators and the buffers of kernels add to the tensors, measured 2 to 13 %
_LEASED = 4  # windows of samples that lie ready at a root: a lease is two, and the next one is there already
_HAS_NO_MOMENT = (OptimizerKind.SGD,)
_HAS_NO_SQUARES = (OptimizerKind.SGD, OptimizerKind.MOMENTUM)


@dataclass(frozen=True)
class LineCost:
    """The model's line under one configuration; `is_averaged` when there is more than one cluster."""

    profile: ModelProfile
    config: PlanConfig
    is_averaged: bool

    @property
    def num_positions(self) -> int:
        """Length of the line."""
        return self.profile.num_positions

    def window(self, depth: Ints) -> Ints:
        """Batches a stage of this depth may have in flight: enough for every hop behind it and back."""
        return np.minimum(self.config.max_window, self.config.in_flight_per_hop * depth + 1)

    def versions(self, window: Ints, accumulate: Ints | None = None) -> Ints:
        """Old weight versions a stage may have to keep for batches in flight; at most the lag allowed."""
        if accumulate is None:
            return np.minimum(self.config.max_lag, window - 1)
        return np.asarray(-(-(window - 1) // accumulate))

    def memory(self, start: Ints, stop: Ints, window: Ints, versions: Ints, recompute: bool) -> Floats:
        """Resident bytes of the stage [start, stop) with its window full."""
        trained = self.trained[stop] - self.trained[start]
        resident = self.resident[stop] - self.resident[start] + self._late_copies(versions) * trained
        if recompute:
            held = self.blocks.held(start, stop, window) + window * self.crossing[start]
        else:
            held = window * (self.saved[stop] - self.saved[start])
        leased = np.where(start == 0, _LEASED * window * self.crossing[0], 0.0)
        return np.asarray(_SLACK * (resident + held + leased) + self.config.overhead_bytes)

    def _late_copies(self, versions: Ints) -> Floats:
        """Copies of the trained parameters for a gradient, and for the weights that forwards see.

        Where gradients are late, forwards see narrow weights, the newest ones too, with narrow gradients.
        Without lag, a cast to bf16 takes what its narrow gradient saves.
        """
        is_late, config = versions > 0, self.config
        if WeightFormat.BF16 in (config.versions, config.precision):
            return np.where(is_late, 0.5 + 0.5 * (versions + 1.0), 1.0)
        is_predicted = config.optimizer is OptimizerKind.MUON and config.predict_weights
        return np.asarray(1.0 + versions + (is_predicted & is_late))

    @cached_property
    def link_share(self) -> float:
        """The part of each link that activations and gradients may use."""
        overlaps = self.is_averaged and self.config.averaging.overlaps
        return 1.0 - self.config.averaging_share if overlaps else 1.0

    def round_bytes(self, start: Ints, stop: Ints) -> Floats:
        """Bytes the owner of [start, stop) sends, and receives, in a round among many clusters."""
        if not self.is_averaged:
            return np.zeros(np.broadcast_shapes(start.shape, stop.shape))
        return np.asarray(2.0 * self.config.deltas.ratio * (self.trained[stop] - self.trained[start]))

    def round_rate(self, nodes: "NodeTable") -> Floats:
        """Bytes per second each node surely has for a round."""
        share = self.config.averaging_share if self.config.averaging.overlaps else 1.0
        return share * np.minimum(nodes.upload, nodes.download)

    @cached_property
    def parameters(self) -> Floats:
        """Cumulative parameter bytes, one entry per cut."""
        return _cumulative(self.profile.parameter_bytes)

    @cached_property
    def trained(self) -> Floats:
        """Cumulative bytes of the parameters that are trained."""
        return _cumulative(self.profile.trained_bytes)

    @cached_property
    def flops(self) -> Floats:
        """Cumulative forward and backward FLOPs of a batch."""
        return _cumulative(self.profile.forward_flops) + _cumulative(self.profile.backward_flops)

    @cached_property
    def forward_flops(self) -> Floats:
        """Cumulative forward FLOPs of a batch: what recomputing adds."""
        return _cumulative(self.profile.forward_flops)

    @cached_property
    def send_before(self) -> Floats:
        """Bytes of gradients a stage that starts here sends to the stage before it."""
        return self._crossing(self.config.gradients, first=0.0)

    @cached_property
    def send_after(self) -> Floats:
        """Bytes of activations a stage that stops here sends to the stage after it."""
        return self._crossing(self.config.activations, last=0.0)

    @cached_property
    def receive_before(self) -> Floats:
        """Bytes of activations (or input data) a stage that starts here receives."""
        return self._crossing(self.config.activations, first=self.profile.crossing_bytes[0])

    @cached_property
    def receive_after(self) -> Floats:
        """Bytes of gradients (or labels) a stage that stops here receives."""
        return self._crossing(self.config.gradients, last=self.profile.crossing_bytes[-1])

    @cached_property
    def crossing(self) -> Floats:
        """Bytes that cross each cut, uncompressed."""
        return np.asarray(self.profile.crossing_bytes, float)

    @cached_property
    def saved(self) -> Floats:
        """Cumulative bytes a batch leaves behind for its backward."""
        return _cumulative(self.profile.saved_bytes)

    @cached_property
    def blocks(self) -> BlockMemory:
        """What stages hold that compute their activations again."""
        return BlockMemory(np.asarray(self.profile.saved_bytes, float), self.crossing)

    @cached_property
    def resident(self) -> Floats:
        """Cumulative bytes that a stage has whatever its window: weights, optimizer state, copies for rounds.

        Frozen parameters and buffers count once. Gradients count twice where an update is a sum: what a batch
        adds to it is looked at first.
        """
        optimizer, (first, square) = self.config.optimizer, self.config.states.ratios
        copies = 1.0 + self.config.accumulates
        copies += _AVERAGING_COPIES[self.config.deltas] if self.is_averaged else 0.0
        copies += first if optimizer not in _HAS_NO_MOMENT else 0.0
        is_muon = optimizer is OptimizerKind.MUON
        squared = self.trained - _cumulative(self.profile.matrix_bytes) if is_muon else self.trained
        squares = square * squared if optimizer not in _HAS_NO_SQUARES else 0.0
        return np.asarray(_cumulative(self.profile.fixed_bytes) + copies * self.trained + squares)

    def _crossing(self, wire: WireFormat, first: float = 0.0, last: float = 0.0) -> Floats:
        crossing = self.crossing * wire.ratio
        crossing[0], crossing[-1] = first, last
        return crossing


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

    def take(self, index: Ints) -> "NodeTable":
        """Return the table of some of the nodes."""
        columns = {name: column[index] for name, column in vars(self).items() if name != "region_latency"}
        return replace(self, **columns)

    def hop_seconds(self, one: Ints, other: Ints) -> Floats:
        """One-way seconds between nodes, elementwise."""
        between: Floats = self.region_latency[self.region[one], self.region[other]]
        return self.latency[one] + self.latency[other] + between


class StageCosts:
    """Seconds per batch of every interval of a line on every node, for any depth."""

    def __init__(self, line: LineCost, nodes: NodeTable) -> None:
        self._line = line
        self._memory = nodes.memory[:, None, None]
        cut = np.arange(line.num_positions + 1)
        self._intervals = start, stop = cut[:, None], cut[None, :]
        link = self._link_seconds(nodes)
        round_seconds = line.round_bytes(start, stop) / line.round_rate(nodes)[:, None, None]
        link[(start >= stop) | (round_seconds > line.config.max_round_seconds)] = np.inf
        slowness = _narrow(1.0 / nodes.flops)[:, None, None]
        work = line.flops[stop] - line.flops[start]
        again = line.forward_flops[stop] - line.forward_flops[start]
        least = np.maximum(link, np.float32(line.config.microbatch_seconds))
        self._keeping = np.maximum(least, _narrow(work) * slowness)
        self._recomputing = np.maximum(least, _narrow(work + again) * slowness)

    def at(self, depth: int) -> Floats32:
        """Return seconds per batch [node, start, stop]; infinite where the interval does not fit."""
        line, mode = self._line, self._line.config.recompute
        window = line.window(np.array(depth))
        versions = line.versions(window)
        nothing = np.float32(np.inf)
        seconds = np.full_like(self._keeping, nothing) if mode is Recompute.NEVER else None
        if seconds is None:
            fits = line.memory(*self._intervals, window, versions, recompute=True) <= self._memory
            seconds = np.where(fits, self._recomputing, nothing)
        if mode is not Recompute.ALWAYS:  # keeping activations is never slower, so it comes first
            fits = line.memory(*self._intervals, window, versions, recompute=False) <= self._memory
            np.copyto(seconds, self._keeping, where=fits)
        return seconds

    def _link_seconds(self, nodes: NodeTable) -> Floats32:
        line = self._line
        send = line.send_before[:, None] + line.send_after[None, :]
        receive = line.receive_before[:, None] + line.receive_after[None, :]
        upload, download = (line.link_share * rate[:, None, None] for rate in (nodes.upload, nodes.download))
        sending, receiving = _narrow(send) / _narrow(upload), _narrow(receive) / _narrow(download)
        np.maximum(sending, receiving, out=sending)
        return sending


def _narrow(values: Floats) -> Floats32:
    return values.astype(np.float32)


def _cumulative(values: tuple[float, ...]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])


_SHORTEST_PERIOD = 1e-9  # of a model that costs nothing


@dataclass(frozen=True, slots=True)
class Rows:
    """Clusters as arrays [cluster, depth]: depth 0 is the last stage, `cuts` has one column more.

    Where windows or recomputing are not given, windows are as wide as the depth asks for, and a stage
    recomputes when it does not fit otherwise.
    """

    nodes: Ints
    lengths: Ints
    cuts: Ints
    window: Ints | None = None
    recompute: Bools | None = None
    accumulate: Ints | None = None  # [cluster]


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
    deaths: Floats  # [cluster] time lost to deaths, per time that is not
    seconds: Floats  # [cluster] between two batches, deaths included

    @property
    def stage(self) -> Floats:
        """Seconds per batch of each stage alone."""
        return np.asarray(np.maximum.reduce([self.compute, self.send, self.receive, self.relay]))


def timing(line: LineCost, nodes: NodeTable, rows: Rows) -> Timing:
    """Return what each stage of some clusters costs, and how fast each cluster runs."""
    table = rows.nodes
    exists = np.arange(table.shape[1]) < rows.lengths[:, None]
    start, stop = rows.cuts[:, 1:], rows.cuts[:, :-1]
    window, recompute, memory = _memory(line, nodes, rows)
    again = recompute * (line.forward_flops[stop] - line.forward_flops[start])
    compute = (line.flops[stop] - line.flops[start] + again) / nodes.flops[table]
    compute = np.maximum(compute, line.config.microbatch_seconds)
    upload, download = line.link_share * nodes.upload[table], line.link_share * nodes.download[table]
    send = (line.send_before[start] + line.send_after[stop]) / upload
    receive = (line.receive_before[start] + line.receive_after[stop]) / download
    relay, travel = _links(line, nodes, rows, upload, download)
    for column in (compute, send, receive, relay, travel, memory):
        column[~exists] = 0.0
    cycle = np.cumsum(compute + travel, axis=1)
    slowest = np.maximum.reduce([compute, send, receive, relay, np.where(exists, cycle / window, 0.0)])
    deaths = np.where(exists, nodes.risk[table], 0.0).sum(axis=1)
    seconds = slowest.max(axis=1, initial=_SHORTEST_PERIOD) * (1.0 + deaths)
    return Timing(compute, send, receive, relay, cycle, memory, window, recompute, deaths, seconds)


def _memory(line: LineCost, nodes: NodeTable, rows: Rows) -> tuple[Ints, Bools, Floats]:
    """Return window, recompute and resident bytes of each stage."""
    start, stop = rows.cuts[:, 1:], rows.cuts[:, :-1]
    window = rows.window
    if window is None:
        window = np.broadcast_to(line.window(np.arange(rows.nodes.shape[1])), rows.nodes.shape)
    accumulate = None if rows.accumulate is None else rows.accumulate[:, None]
    versions = line.versions(window, accumulate)
    keep = line.memory(start, stop, window, versions, recompute=False)
    save = line.memory(start, stop, window, versions, recompute=True)
    recompute = rows.recompute
    if recompute is None:
        recompute = keep > nodes.memory[rows.nodes]
        if line.config.recompute is not Recompute.AUTO:
            recompute = np.full(keep.shape, line.config.recompute is Recompute.ALWAYS)
    return window, recompute, np.where(recompute, save, keep)


def _links(
    line: LineCost, nodes: NodeTable, rows: Rows, upload: Floats, download: Floats
) -> tuple[Floats, Floats]:
    """Return relay seconds and there-and-back seconds of the link from each stage to the one after it."""
    relay, travel = np.zeros(rows.nodes.shape), np.zeros(rows.nodes.shape)
    ahead, behind, cut = rows.nodes[:, :-1], rows.nodes[:, 1:], rows.cuts[:, 1:-1]
    forward, backward = line.send_after[cut], line.send_before[cut]
    hidden = ~(nodes.reachable[ahead] | nodes.reachable[behind])
    relay[:, 1:] = hidden * np.maximum(forward, backward) / line.config.relay_bytes_per_second
    there = np.minimum(upload[:, 1:], download[:, :-1])
    back = np.minimum(upload[:, :-1], download[:, 1:])
    relayed = hidden * (forward + backward) / line.config.relay_bytes_per_second
    direct = forward / there + backward / back
    travel[:, 1:] = np.maximum(direct, relayed) + 2.0 * nodes.hop_seconds(ahead, behind)
    return relay, travel
