"""Where to cut: the optimal contiguous split of the line over ordered nodes, many clusters at once.

Dynamic programme from the end of the line: reach[k, cut] is the smallest possible slowest stage when the
last k nodes hold everything after `cut`. Exact, and vectorised over clusters because the search asks for
thousands of them. Orders run from the end of the line to its front, as depth does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ravnest.errors import ConfigError
from ravnest.plan.cost import Bools, Floats, Floats32, Ints, LineCost, NodeTable, Rows, StageCosts, timing
from ravnest.plan.types import ModelProfile


@dataclass(frozen=True, slots=True)
class Splits:
    """The answers for a batch of clusters; `cuts[c, k:k+2]` bounds the stage of depth k from above."""

    seconds: Floats  # per batch, inf when the nodes cannot hold the model
    cuts: Ints  # [cluster, depth]: cuts[:, 0] is the end of the line, then down to 0
    slowest: Ints  # depth of the stage that limits each cluster


class Splitter:
    """Splits one line over the nodes of one table; with `keep` it remembers the stage costs."""

    def __init__(self, line: LineCost, nodes: NodeTable, keep: bool = True) -> None:
        self.line = line
        self.nodes = nodes
        self._costs = StageCosts(line, nodes) if keep else None
        self._seconds: list[Floats32] = []
        busiest = np.maximum(line.send_after, line.send_before) / line.config.relay_bytes_per_second
        self._relay = busiest.astype(np.float32)
        self.relay_floor = float(busiest[1:-1].min(initial=np.inf))  # fastest batch through the hub

    def stage_seconds(self, depth: int) -> Floats32:
        """Seconds per batch of every stage at this depth, [node, start, stop]."""
        assert self._costs is not None, "made with keep"
        while len(self._seconds) <= depth:
            self._seconds.append(self._costs.at(len(self._seconds)))
        return self._seconds[depth]

    def solve(self, orders: Sequence[Sequence[int]]) -> Splits:
        """Return the best cuts of each cluster, its nodes given from the end of the line to its front."""
        lengths = np.array([len(order) for order in orders], np.int64)
        ranking = np.argsort(-lengths, kind="stable")  # long clusters first: active ones are a prefix
        width = int(lengths.max(initial=0))
        table = np.zeros((len(orders), width), np.int64)
        for row, k in enumerate(ranking):
            table[row, : lengths[k]] = orders[k]
        sorted_lengths = lengths[ranking]
        splits = self._solve_sorted(table, sorted_lengths)
        back = np.argsort(ranking, kind="stable")
        return Splits(splits.seconds[back], splits.cuts[back], splits.slowest[back])

    def _solve_sorted(self, table: Ints, lengths: Ints) -> Splits:
        num_clusters, width = table.shape
        num_cuts = self.line.num_positions + 1
        relay = self._relay_seconds(table)
        reach = np.full((num_clusters, num_cuts), np.inf, np.float32)
        reach[:, -1] = 0.0
        stages: list[Floats32] = []
        for k in range(width):
            active = int(np.searchsorted(-lengths, -k))  # rows with more than k nodes
            stage = self._stage(k, table[:active, k])
            behind = np.maximum(reach[:active], relay[:active, k])
            np.maximum(stage, behind[:, None, :], out=stage)
            stages.append(stage)
            stage.min(axis=2, out=reach[:active])
        return self._trace(table, lengths, stages, np.isfinite(reach[:, 0]))

    def _stage(self, depth: int, nodes: Ints) -> Floats32:
        if self._costs is None:
            return StageCosts(self.line, self.nodes.take(nodes)).at(depth)
        return self.stage_seconds(depth)[nodes]

    def _relay_seconds(self, table: Ints) -> Floats32:
        """Seconds the hub needs per batch at each cut between two neighbours that cannot be dialled."""
        hidden = ~self.nodes.reachable[table]
        needs_relay = np.zeros(table.shape, bool)
        needs_relay[:, 1:] = hidden[:, 1:] & hidden[:, :-1]
        return needs_relay[:, :, None] * self._relay

    def _trace(self, table: Ints, lengths: Ints, stages: list[Floats32], fits: Bools) -> Splits:
        cuts = np.zeros((len(table), table.shape[1] + 1), np.int64)
        for k in range(table.shape[1] - 1, -1, -1):
            active = len(stages[k])
            cuts[:active, k] = stages[k][np.arange(active), cuts[:active, k + 1]].argmin(axis=1)
        times = timing(self.line, self.nodes, Rows(table, lengths, cuts))
        seconds = np.where(fits, times.seconds, np.inf)
        return Splits(seconds, cuts, times.stage.argmax(axis=1))


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
