"""Where to cut: the cuts worth considering, and the best ones for nodes in a given order.

Captured models have thousands of positions; good cuts are few. `shorten_line` merges the positions between
them. `Splitter` is a dynamic programme from the end of the line: reach[k, cut] is the smallest possible
slowest stage when the last k nodes hold everything after `cut`. It is exact, and vectorised over clusters
because the search asks for thousands of them. Orders run from the end of the line to its front, as depth
does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ravnest.errors import ConfigError
from ravnest.plan.cost import Floats32, NodeTable, Rows, StageCosts, timing
from ravnest.plan.line import RESERVED_PER_HOP, Bools, Floats, Ints, LineCost
from ravnest.plan.types import ModelProfile

NodeOrder = tuple[int, ...]  # the nodes of a cluster, from the end of the line to its front

FINE_POSITIONS = 256  # of the line the final cuts are chosen on
_SEARCH_POSITIONS = 32  # at least, of the line the search works on
_CHUNK_BYTES = 16e6  # of the tables that are worked on at once: what a processor's cache holds


@dataclass(frozen=True, slots=True)
class Splits:
    """The answers for a batch of clusters; `cuts[c, k:k+2]` bounds the stage of depth k from above."""

    seconds: Floats  # per batch, inf when the nodes cannot hold the model
    cuts: Ints  # [cluster, depth]: cuts[:, 0] is the end of the line, then down to 0
    slowest: Ints  # depth of the stage that limits each cluster
    is_starved: Bools  # windows too narrow for lack of memory set its pace
    hub_bytes: Floats  # of a batch, that the hub sends for each cluster

    @classmethod
    def join(cls, parts: "Sequence[Splits]") -> "Splits":
        """Return the answers of several batches as those of one."""
        width = max(part.cuts.shape[1] for part in parts)
        cuts = [np.pad(part.cuts, ((0, 0), (0, width - part.cuts.shape[1]))) for part in parts]
        names = [each.name for each in fields(cls) if each.name != "cuts"]
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return cls(cuts=np.concatenate(cuts), **columns)

    def take(self, places: Ints) -> "Splits":
        """Return the answers for some of the clusters."""
        return Splits(*(getattr(self, each.name)[places] for each in fields(self)))

    def put(self, place: int, other: "Splits", number: int) -> None:
        """Replace the answer for one cluster by another one."""
        for each in fields(self):
            column, new = getattr(self, each.name), getattr(other, each.name)[number]
            column[place] = new[: column.shape[1]] if column.ndim > 1 else new


class Splitter:
    """Splits one line over the nodes of one table; with `keep` it remembers the stage costs."""

    def __init__(self, line: LineCost, nodes: NodeTable, keep: bool = True) -> None:
        self.line = line
        self.nodes = nodes
        self._costs = StageCosts(line, nodes) if keep else None
        busiest = np.maximum(line.send_after, line.send_before) / line.config.relay_bytes_per_second
        self.relay_seconds = busiest.astype(np.float32)

    def stage_seconds(self, depth: int) -> Floats32:
        """Seconds per batch of every stage at this depth, [node, length - 1, start]."""
        assert self._costs is not None, "made with keep"
        return self._costs.at(depth)

    def solve(self, orders: Sequence[Sequence[int]]) -> Splits:
        """Return the best cuts of each cluster, its nodes given from the end of the line to its front.

        Clusters whose batches would wait for room in a window are cut again, with more memory for windows.
        """
        lengths = np.array([len(order) for order in orders], np.int64)
        ranking = np.argsort(-lengths, kind="stable")  # long clusters first: active ones are a prefix
        table = np.zeros((len(orders), int(lengths.max(initial=0))), np.int64)
        for row, k in enumerate(ranking):
            table[row, : lengths[k]] = orders[k]
        lengths = lengths[ranking]
        best = self._solve_sorted(table, lengths, RESERVED_PER_HOP[0])
        for per_hop in RESERVED_PER_HOP[1:]:
            starved = np.flatnonzero(np.isfinite(best.seconds) & best.is_starved)
            if not len(starved):
                break
            again = self._solve_sorted(table[starved], lengths[starved], per_hop)
            better = again.seconds < best.seconds[starved]
            for each in fields(Splits):
                getattr(best, each.name)[starved[better]] = getattr(again, each.name)[better]
        back = np.argsort(ranking, kind="stable")
        return best.take(back)

    def _solve_sorted(self, table: Ints, lengths: Ints, per_hop: int) -> Splits:
        cuts, fits = np.zeros((len(table), table.shape[1] + 1), np.int64), np.zeros(len(table), bool)
        first = 0
        while first < len(table):
            size = int(lengths[first])
            rows = slice(first, first + self._chunk(size))
            cuts[rows, : size + 1], fits[rows] = self._cut(table[rows, :size], lengths[rows], per_hop)
            first = rows.stop
        times = timing(self.line, self.nodes, Rows(table, lengths, cuts))
        pace = times.stage.max(axis=1, initial=0.0) * (1.0 + times.deaths)
        seconds = np.where(fits, times.seconds, np.inf)
        is_starved = times.seconds > 1.01 * pace
        return Splits(seconds, cuts, times.stage.argmax(axis=1), is_starved, times.hub_bytes)

    def _chunk(self, size: int) -> int:
        """Return how many clusters of so many nodes are cut at once."""
        length = self.line.num_positions
        band = length if self._costs is None else self._costs.at(0).shape[1]
        return max(1, int(_CHUNK_BYTES / (4 * length * band * max(size, 1))))

    def _cut(self, table: Ints, lengths: Ints, per_hop: int) -> tuple[Ints, Bools]:
        num_clusters, width = table.shape
        length = self.line.num_positions
        hidden = ~self.nodes.reachable[table]
        reach = np.full((num_clusters, length + 1), np.inf, np.float32)
        reach[:, -1] = 0.0
        stages: list[Floats32] = []
        for k in range(width):
            active = int(np.searchsorted(-lengths, -k))  # rows with more than k nodes
            stage = self._stage(k, table[:active, k], per_hop)
            ahead = np.full((active, length + stage.shape[1]), np.inf, np.float32)
            ahead[:, : length + 1] = reach[:active]
            if k:  # between two neighbours that cannot be dialled, the hub sets a pace of its own
                relayed = hidden[:active, k] & hidden[:active, k - 1]
                ahead[:, : length + 1] = np.maximum(reach[:active], relayed[:, None] * self.relay_seconds)
            # [cluster, length - 1, start]: the reach at the stop of each interval
            behind = _windows(ahead[:, 1:], length)
            np.maximum(stage, behind, out=stage)
            stages.append(stage)
            stage.min(axis=1, out=reach[:active, :-1])
            reach[:active, -1] = np.inf
        return self._trace(table, stages), np.isfinite(reach[:, 0])

    def _stage(self, depth: int, nodes: Ints, per_hop: int) -> Floats32:
        if self._costs is None:
            return StageCosts(self.line, self.nodes.take(nodes)).at(depth, per_hop)
        return self._costs.at(depth, per_hop)[nodes]

    def _trace(self, table: Ints, stages: list[Floats32]) -> Ints:
        length = self.line.num_positions
        cuts = np.zeros((len(table), table.shape[1] + 1), np.int64)
        for k in range(table.shape[1] - 1, -1, -1):
            active = len(stages[k])
            start = np.minimum(cuts[:active, k + 1], length - 1)
            longer = stages[k][np.arange(active), :, start].argmin(axis=1)
            cuts[:active, k] = np.minimum(start + 1 + longer, length)
        return cuts


def _windows(rows: Floats32, length: int) -> Floats32:
    """Return all windows of each row, [row, start, length], as a view."""
    shape = (rows.shape[0], rows.shape[1] - length + 1, length)
    along, across = rows.strides
    return as_strided(rows, shape, (along, across, across), writeable=False)


def shorten_line(profile: ModelProfile, num_positions: int = 0) -> ModelProfile:
    """Return the line to search on; its cuts are among the fine ones, so what fits it fits the fine line."""
    return coarsen_to(coarsen_to(profile, FINE_POSITIONS), max(num_positions, _SEARCH_POSITIONS))


def choose_cuts(profile: ModelProfile, num_positions: int) -> tuple[int, ...]:
    """Return the cuts, both ends included, of a line of at most `num_positions`.

    The line is divided into stretches of about equal work and parameters; in each, the cut that the fewest
    bytes cross is kept.
    """
    length = profile.num_positions
    if length <= num_positions:
        return tuple(range(length + 1))
    work = np.asarray(profile.forward_flops) + np.asarray(profile.backward_flops)
    weight = work / max(work.sum(), 1.0)
    weight += np.asarray(profile.parameter_bytes) / max(sum(profile.parameter_bytes), 1.0)
    reached = np.cumsum(weight) / weight.sum()  # share of the line before the cut after each position
    # A cut at the end of a stretch belongs to it; rounding must not push it into the next one.
    stretch = np.ceil(reached * num_positions - 1e-9).astype(int)
    inner = []
    for number in np.unique(stretch[:-1]):
        inside = np.flatnonzero(stretch[:-1] == number) + 1
        crossing = np.asarray(profile.crossing_bytes)[inside]
        inner.append(int(inside[len(inside) - 1 - crossing[::-1].argmin()]))
    return (0, *inner[: num_positions - 1], length)


def coarsen_to(profile: ModelProfile, num_positions: int) -> ModelProfile:
    """Return the profile on a line of at most `num_positions`."""
    return coarsen(profile, choose_cuts(profile, num_positions))


def coarsen(profile: ModelProfile, cuts: tuple[int, ...]) -> ModelProfile:
    """Return the profile of the line that can only be cut at `cuts`."""

    def merge(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(float(sum(values[start:stop])) for start, stop in pairwise(cuts))

    return ModelProfile(
        name=profile.name,
        samples_per_batch=profile.samples_per_batch,
        parameter_bytes=merge(profile.parameter_bytes),
        matrix_bytes=merge(profile.matrix_bytes),
        forward_flops=merge(profile.forward_flops),
        backward_flops=merge(profile.backward_flops),
        saved_bytes=merge(profile.saved_bytes),
        crossing_bytes=tuple(profile.crossing_bytes[cut] for cut in cuts),
        frozen_bytes=merge(profile.frozen_bytes) if profile.frozen_bytes else (),
        buffer_bytes=merge(profile.buffer_bytes) if profile.buffer_bytes else (),
        restored_bytes=tuple(max(profile.restored_bytes[start:stop]) for start, stop in pairwise(cuts))
        if profile.restored_bytes
        else (),
    )


_EQUAL_WORK = 1.15  # links are slower than PCs: a little more work beats several times the bytes


def best_cuts(profile: ModelProfile, num_stages: int) -> tuple[int, ...]:
    """Return the cuts, both ends included, for equal nodes: as little work as can be for the busiest stage.

    Among cuts within 15 % of that, those that the fewest bytes cross.
    """
    if not 1 <= num_stages <= profile.num_positions:
        most = f"1 to {profile.num_positions}, for {profile.name} has that many positions"
        raise ConfigError(f"cannot cut into {num_stages} stages; choose {most}")
    flops = np.add(profile.forward_flops, profile.backward_flops)
    total = np.concatenate([[0.0], np.cumsum(flops)])
    work = np.where(np.tri(len(total), dtype=bool), np.inf, total - total[:, None])  # [start, stop]
    nowhere = np.where(np.arange(len(total)) == 0, 0.0, np.inf)  # no stage yet: all of the line is left
    busiest, sent, origins = nowhere, nowhere, []
    for _ in range(num_stages):
        busiest = np.maximum(busiest[:, None], work).min(axis=0)
    crossing = np.asarray(profile.crossing_bytes, float)[:, None]
    allowed = np.where(np.isfinite(work) & (work <= _EQUAL_WORK * busiest[-1]), crossing, np.inf)
    for _ in range(num_stages):
        choice = sent[:, None] + allowed
        origins.append(choice.argmin(axis=0))
        sent = choice.min(axis=0)
    cuts = [profile.num_positions]
    for origin in reversed(origins):
        cuts.append(int(origin[cuts[-1]]))
    return tuple(reversed(cuts))
