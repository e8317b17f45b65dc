"""The facts a plan is made from and the plan itself: frozen records, no behaviour beyond look-ups and sums.

A model is a line of positions. A stage is an interval of the line, a segment an interval that no cluster
cuts, a ring the owners of one segment. Everything that plans, predicts, draws or repairs speaks in these.
"""

from dataclasses import dataclass, replace

from ravnest.config import WireFormat
from ravnest.ids import NodeId

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Node:
    """A volunteer's machine as the planner sees it; memory and rates are what Ravnest may use."""

    name: NodeId
    memory_bytes: float
    flops_per_second: float
    upload_bytes_per_second: float
    download_bytes_per_second: float
    latency_seconds: float = 0.01  # one way, to the exchange of its region
    region: str = ""
    is_reachable: bool = True  # others can dial it; two unreachable neighbours go through the hub
    uptime_seconds: float = 2 * DAY_SECONDS  # mean time between deaths


@dataclass(frozen=True, slots=True)
class Swarm:
    """All nodes that have joined, and the one-way seconds between regions that were measured."""

    nodes: tuple[Node, ...]
    region_latency: tuple[tuple[str, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The line in numbers, per batch: one entry per position, and one crossing per cut between them.

    `crossing_bytes[k]` crosses a cut before position k (fp32 size); entry 0 is the input batch, the last
    entry the labels. `matrix_bytes` is the part of the parameters that Muon treats as matrices,
    `frozen_bytes` the part that is not trained, as it is stored; `restored_bytes` is the most that one
    operation has of it in full. Empty: none, and no buffers.
    """

    name: str
    samples_per_batch: int
    parameter_bytes: tuple[float, ...]
    matrix_bytes: tuple[float, ...]
    forward_flops: tuple[float, ...]
    backward_flops: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    crossing_bytes: tuple[float, ...]
    frozen_bytes: tuple[float, ...] = ()
    buffer_bytes: tuple[float, ...] = ()
    restored_bytes: tuple[float, ...] = ()

    @property
    def num_positions(self) -> int:
        """Length of the line."""
        return len(self.parameter_bytes)

    @property
    def trained_bytes(self) -> tuple[float, ...]:
        """The parameters that are trained, at each position."""
        if not self.frozen_bytes:
            return self.parameter_bytes
        pairs = zip(self.parameter_bytes, self.frozen_bytes, strict=True)
        return tuple(size - frozen for size, frozen in pairs)

    @property
    def fixed_bytes(self) -> tuple[float, ...]:
        """Frozen parameters and buffers, at each position: a stage has them once."""
        nothing = (0.0,) * self.num_positions
        pairs = zip(self.frozen_bytes or nothing, self.buffer_bytes or nothing, strict=True)
        return tuple(frozen + buffers for frozen, buffers in pairs)

    def resize_batch(self, samples: int) -> "ModelProfile":
        """Return it with batches of so many samples: parameters stay, all else goes with the batch."""
        if samples == self.samples_per_batch:
            return self
        factor = samples / self.samples_per_batch
        return replace(
            self,
            samples_per_batch=samples,
            forward_flops=tuple(factor * each for each in self.forward_flops),
            backward_flops=tuple(factor * each for each in self.backward_flops),
            saved_bytes=tuple(factor * each for each in self.saved_bytes),
            crossing_bytes=tuple(factor * each for each in self.crossing_bytes),
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """The interval [start, stop) of the line one node hosts; at most `window` batches in flight."""

    node: NodeId
    start: int
    stop: int
    window: int = 1
    recompute: bool = False
    activations: WireFormat = WireFormat.BF16  # how it sends forward
    gradients: WireFormat = WireFormat.BF16  # how it sends back
    predicts: bool = True  # has memory for the weights that are expected when a gradient comes back


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that together hold exactly one copy of the model, in pipeline order."""

    stages: tuple[Stage, ...]
    accumulate: int = 1  # batches per update

    def owner(self, position: int) -> NodeId:
        """Return the node that hosts `position`."""
        for stage in self.stages:
            if stage.start <= position < stage.stop:
                return stage.node
        raise LookupError(f"no stage hosts position {position}")


@dataclass(frozen=True, slots=True)
class Ring:
    """The owners of the segment [start, stop), one per cluster, in travelling order."""

    start: int
    stop: int
    owners: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Backup:
    """A spare that keeps a snapshot of a node's stage, ready to take it over."""

    spare: NodeId
    node: NodeId


@dataclass(frozen=True, slots=True)
class Plan:
    """Which node does what, with a number; the same facts and seed give the same plan."""

    plan_id: int
    seed: int
    clusters: tuple[Cluster, ...]
    rings: tuple[Ring, ...]
    spares: tuple[NodeId, ...]
    backups: tuple[Backup, ...] = ()


def cluster_name(index: int) -> str:
    """Return the letters a person calls a cluster by: A, B, ... Z, AA, AB, ..."""
    name = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, 26)
        name = chr(ord("A") + letter) + name
    return name
