"""Clusters of one stage, exactly and in one process: each trains its share of every batch, rounds average.

Nothing is late and nothing fails, so what is left is what sharing itself costs. With one cluster it is the
plain loop of the quality benchmark.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.quality_jobs import TASKS, Made, Rows, Task
from benchmarks.quality_loops import count_updates, draw_batches, evaluate, find_settings, num_rows
from ravnest.engine.norms import NoiseMeter, find_norms
from ravnest.engine.optimizers import Optimizer
from ravnest.hub.monitors.loss_guard import NoiseMonitor
from ravnest.ids import NodeId
from ravnest.plan.sharing import TrainingLength, adam_rate_times

Tensors = dict[str, Tensor]
_NODE = NodeId("node")


@dataclass(frozen=True, slots=True)
class Way:
    """How clusters share a job: rounds after `often` updates in the first share of the job, then `seldom`."""

    clusters: int = 1
    often: int = 5
    share: float = 0.0
    seldom: int = 5
    averages_moments: bool = False
    bits: int = 0  # of a number of a delta, with what was rounded off added to the next one; 0: all
    rate: str = "given"  # or "rule": as the product sets it for an Adam of the requester's
    summed: float = 0.0  # share of the job in which gradients of all shares are summed for every update

    def is_time(self, update: int, num_updates: int, since: int) -> bool:
        """Return whether a round comes after this update, so many updates after the last one."""
        is_early = update < self.share * num_updates
        return since >= (self.often if is_early else self.seldom) or update == num_updates - 1


@dataclass(frozen=True, slots=True)
class Shared:
    """What came of it."""

    scores: dict[str, float]
    num_rounds: int
    noise: list[float]  # as it was told while it grew, in samples
    rate_times: float  # at the end


def train_shares(task_name: str, seed: int, way: Way) -> Shared:
    """Train a task in so many clusters at once, by turns."""
    task = TASKS[task_name]
    made = task.make(seed)
    num_updates = count_updates(task, made)
    settings, schedule = find_settings(task, made, num_updates)
    state = _state(made.model)
    clusters = [
        _Cluster({k: value.clone() for k, value in state.items()}, Optimizer(settings, _only(made, state)))
        for _ in range(way.clusters)
    ]
    rate, noise = settings.learning_rate, _Noise(task, num_updates, way)
    average = _Average(clusters, way)
    torch.manual_seed(1_000_003 + seed)  # of dropout and of the order, as in plain loops
    num_rounds = since = 0
    for update, batch in zip(range(num_updates), draw_batches(task, made), strict=False):
        now = rate * schedule.factor(update, num_updates) * noise.rate_times
        shares = _cut(batch, way.clusters)
        if update < way.summed * num_updates:
            gradients = clusters[0].sum_gradients(made, shares)
            for cluster in clusters:
                cluster.step(made, gradients, now)
            average.begin()
            continue
        for index, (cluster, share) in enumerate(zip(clusters, shares, strict=False)):
            cluster.update(made, share, now, noise if index == 0 and way.clusters > 1 else None)
        since += 1
        if way.clusters > 1 and way.is_time(update, num_updates, since):
            average()
            num_rounds, since = num_rounds + 1, 0
    clusters[0].put_into(made.model)
    return Shared(evaluate(task, made), num_rounds, noise.told, noise.rate_times)


def _cut(batch: Rows, num_shares: int) -> list[Rows]:
    """Return equal shares of a batch; of a small one, fewer."""
    size = num_rows(batch)
    edges = [size * index // num_shares for index in range(num_shares + 1)]
    return [
        {name: rows[first:last] for name, rows in batch.items()}
        for first, last in pairwise(edges)
        if first < last
    ]


def _state(model: nn.Module) -> Tensors:
    """Return copies of all weights and statistics."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _only(made: Made, state: Tensors) -> Tensors:
    return {name: state[name] for name, value in made.model.named_parameters() if value.requires_grad}


class _Noise:
    """Measures the noise scale as stages do and tells it as the hub does; Adam's rate may follow it."""

    def __init__(self, task: Task, num_updates: int, way: Way) -> None:
        self._meter, self._monitor, self._way = NoiseMeter(), NoiseMonitor(), way
        self._length = TrainingLength(task.batch_size, num_updates)
        self.told: list[float] = []

    @property
    def rate_times(self) -> float:
        if self._way.rate != "rule" or not self.told:
            return 1.0
        return adam_rate_times(replace(self._length, noise=self.told[-1]), self._way.clusters)

    def add(self, gradients: list[Tensor], num_samples: int) -> None:
        self._meter.add_microbatch(find_norms(gradients), num_samples, 1.0)

    def end_update(self, gradients: list[Tensor]) -> None:
        self._meter.end_update(find_norms(gradients) if self._meter.wants_batch else None)
        if self._meter.noise is not None:
            found = self._monitor.record("A1", [_NODE], _NODE, self._meter.noise, self._length)
            self.told += [] if found is None else [found]


@dataclass(slots=True)
class _Cluster:
    """The weights and statistics of one cluster, and its optimizer."""

    state: Tensors
    optimizer: Optimizer

    def put_into(self, model: nn.Module) -> None:
        model.load_state_dict(self.state)

    def update(self, made: Made, rows: Rows, rate: float, noise: _Noise | None) -> None:
        """Make one update of a share; in two pieces where the noise is measured."""
        self.put_into(made.model.train())
        parts = _cut(rows, 1 if noise is None else 2)
        found = [_find_gradients(made, part) for part in parts]
        total = _mean(found, parts)
        if noise is not None:
            for each, part in zip(found, parts, strict=True):
                noise.add(each, num_rows(part))
            noise.end_update(total)
        self.step(made, total, rate)

    def sum_gradients(self, made: Made, shares: list[Rows]) -> list[Tensor]:
        """Return the gradients of a batch as clusters sum them: each normalises with its share alone."""
        found, statistics = [], []
        for share in shares:
            self.put_into(made.model.train())
            found.append(_find_gradients(made, share))
            statistics.append([value.clone() for value in made.model.buffers()])
        for value, *each in zip(made.model.buffers(), *statistics, strict=True):
            if value.is_floating_point():
                value.copy_(_mean([[one] for one in each], shares)[0])
        return _mean(found, shares)

    @torch.no_grad()
    def step(self, made: Made, gradients: list[Tensor], rate: float) -> None:
        """Keep the statistics that the model has now, and update the weights."""
        self.state |= {name: value.clone() for name, value in made.model.named_buffers()}
        names = [name for name, value in made.model.named_parameters() if value.requires_grad]
        weights = {name: self.state[name] for name in names}
        self.optimizer.step(weights, dict(zip(names, gradients, strict=True)), rate)


def _find_gradients(made: Made, rows: Rows) -> list[Tensor]:
    loss = made.loss(made.model(*(rows[name] for name in made.inputs)), rows)
    return list(torch.autograd.grad(loss, [each for each in made.model.parameters() if each.requires_grad]))


def _mean(found: list[list[Tensor]], parts: list[Rows]) -> list[Tensor]:
    """Return the mean of what parts have, by their samples."""
    sizes = [num_rows(part) for part in parts]
    total = [torch.zeros_like(each) for each in found[0]]
    for each, size in zip(found, sizes, strict=True):
        torch._foreach_add_(total, each, alpha=size / sum(sizes))
    return total


class _Average:
    """A round: the mean of what clusters have, by their changes since the last one."""

    def __init__(self, clusters: list[_Cluster], way: Way) -> None:
        self._clusters, self._way = clusters, way
        self._rest: list[Tensors] = [{} for _ in clusters]
        self.begin()

    def begin(self) -> None:
        """Begin from what all clusters have now."""
        self._anchor = {name: value.clone() for name, value in self._clusters[0].state.items()}

    @torch.no_grad()
    def __call__(self) -> None:
        states = [each.state for each in self._clusters]
        for name, before in self._anchor.items():
            if not before.is_floating_point():
                continue
            changes = [self._round(index, name, state[name] - before) for index, state in enumerate(states)]
            before += torch.stack(changes).mean(0)
            for state in states:
                state[name].copy_(before)
        if self._way.averages_moments:
            found = [
                each.optimizer.moments({name: each.state[name] for name in each.optimizer.names})
                for each in self._clusters
            ]
            for name in found[0]:
                mean = torch.stack([each[name].float() for each in found]).mean(0)
                for each in found:
                    each[name].copy_(mean)

    def _round(self, index: int, name: str, change: Tensor) -> Tensor:
        """Return a change in few bits: one scale for 256 numbers, what is rounded off waits for the next."""
        if not self._way.bits:
            return change
        change = change + self._rest[index].get(name, 0.0)
        flat = change.flatten()
        rows = nn.functional.pad(flat, (0, -len(flat) % 256)).view(-1, 256)
        most = 2 ** (self._way.bits - 1) - 1
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / most
        rounded = ((rows / scale).round() * scale).flatten()[: len(flat)].view_as(change)
        self._rest[index][name] = change - rounded
        return rounded
