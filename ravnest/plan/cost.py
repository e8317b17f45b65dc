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

from ravnest.config import Averaging, Optimizer, PlanConfig, Recompute, WireFormat
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
_STATE_COPIES = {
    Optimizer.SGD: 0.0,
    Optimizer.MOMENTUM: 1.0,
    Optimizer.ADAM: 2.0,
    Optimizer.ADAMW: 2.0,
    Optimizer.NADAM: 2.0,
}


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
        parameters = self.parameters[stop] - self.parameters[start]
        resident = self._copies(versions) * parameters + self.state_bytes[stop] - self.state_bytes[start]
        held = (1 if recompute else window) * (self.saved[stop] - self.saved[start])
        inputs = window * self.crossing[start] if recompute else 0.0
        leased = np.where(start == 0, _LEASED * window * self.crossing[0], 0.0)
        return np.asarray(_SLACK * (resident + held + inputs + leased) + self.config.overhead_bytes)

    def _copies(self, versions: Ints) -> Floats:
        """Copies of the parameters beyond optimizer state: weights, gradients, versions, averaging.

        Gradients twice where an update is a sum: what a batch adds to it is looked at first.
        """
        is_predicted = self.config.optimizer is Optimizer.MUON and self.config.predict_weights
        averaging = _AVERAGING_COPIES[self.config.deltas] if self.is_averaged else 0.0
        return np.asarray(
            2.0 + self.config.accumulates + averaging + versions + (is_predicted & (versions > 0))
        )

    @cached_property
    def link_share(self) -> float:
        """The part of each link that activations and gradients may use."""
        overlaps = self.is_averaged and self.config.averaging is Averaging.OVERLAPPED
        return 1.0 - self.config.averaging_share if overlaps else 1.0

    def round_bytes(self, start: Ints, stop: Ints) -> Floats:
        """Bytes the owner of [start, stop) sends, and receives, in a round among many clusters."""
        if not self.is_averaged:
            return np.zeros(np.broadcast_shapes(start.shape, stop.shape))
        return np.asarray(2.0 * self.config.deltas.ratio * (self.parameters[stop] - self.parameters[start]))

    def round_rate(self, nodes: "NodeTable") -> Floats:
        """Bytes per second each node surely has for a round."""
        share = self.config.averaging_share if self.config.averaging is Averaging.OVERLAPPED else 1.0
        return share * np.minimum(nodes.upload, nodes.download)

    @cached_property
    def parameters(self) -> Floats:
        """Cumulative parameter bytes, one entry per cut."""
        return _cumulative(self.profile.parameter_bytes)

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
    def state_bytes(self) -> Floats:
        """Cumulative bytes of optimizer state."""
        if self.config.optimizer is Optimizer.MUON:
            return 2.0 * self.parameters - _cumulative(self.profile.matrix_bytes)
        return _STATE_COPIES[self.config.optimizer] * self.parameters

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
        self._keeping = np.maximum(link, _narrow(work) * slowness)
        self._recomputing = np.maximum(link, _narrow(work + again) * slowness)

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
