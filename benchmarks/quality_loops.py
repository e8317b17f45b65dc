"""Plain loops of the quality benchmark: one process trains a task as anyone would write it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from benchmarks.quality_jobs import Loop, Made, Rows, Task

if TYPE_CHECKING:
    from ravnest.engine.optimizers import OptimizerSettings
    from ravnest.requester.lr_schedules import Schedule

PLAIN = Loop()  # what people write: AdamW 1e-3
RECIPE = Loop(None, kind="recipe")
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True, slots=True)
class Trained:
    """The model, what it has on the validation data, and how long the loop took."""

    model: nn.Module
    scores: dict[str, float]
    num_updates: int
    seconds: float


def count_updates(task: Task, made: Made) -> int:
    """Return the updates of the whole job."""
    return task.epochs * -(-num_rows(made.train) // task.batch_size)


def num_rows(rows: Rows) -> int:
    """Return how many samples there are."""
    return len(next(iter(rows.values())))


def train_loop(task: Task, made: Made, loop: Loop, seed: int, share: float = 1.0) -> Trained:
    """Train for a share of the job's updates, with the schedule contracted and the rate of the whole job."""
    total = count_updates(task, made)
    num_updates = max(1, round(share * total))
    model, step = made.model.train(), _make_step(task, made, loop, total, num_updates)
    torch.manual_seed(1_000_003 + seed)  # of dropout and of the order
    started = time.perf_counter()
    for update, batch in zip(range(num_updates), draw_batches(task, made), strict=False):
        made.loss(model(*(batch[name] for name in made.inputs)), batch).backward()
        step(update)
    seconds = time.perf_counter() - started
    return Trained(model, evaluate(task, made), num_updates, seconds)


@torch.no_grad()
def evaluate(task: Task, made: Made) -> dict[str, float]:
    """Return the means over the validation data, batch by batch."""
    model, size, count = made.model.eval(), task.batch_size, num_rows(made.validation)
    sums: dict[str, float] = {}
    for first in range(0, count, size):
        batch = {name: rows[first : first + size] for name, rows in made.validation.items()}
        out = model(*(batch[name] for name in made.inputs))
        for name, score in (("loss", made.loss), *made.metrics):
            sums[name] = sums.get(name, 0.0) + float(score(out, batch)) * num_rows(batch)
    return {name: total / count for name, total in sums.items()}


def grid() -> list[Loop]:
    """Return the loops that a tuned one is chosen from."""
    return [Loop(rate, is_cosine) for rate in RATES for is_cosine in (False, True)]


def find_own_loop(task: Task) -> Loop:
    """Return what the swarm is asked to train with, as a plain loop."""
    return task.own or RECIPE


def make_optimizer(task: Task, made: Made) -> torch.optim.Optimizer | None:
    """Return the optimizer that the task's user brings, if any."""
    own = task.own
    if own is None:
        return None
    assert own.rate is not None
    kind = torch.optim.Adam if own.kind == "Adam" else torch.optim.AdamW
    return kind(made.model.parameters(), lr=own.rate)


def find_settings(task: Task, made: Made, num_updates: int) -> tuple["OptimizerSettings", "Schedule"]:
    """Return the optimizer and the schedule of a task's job, with nothing late that would be predicted."""
    import ravnest as rv

    batch = {name: rows[:8] for name, rows in made.train.items()}
    job = rv.Job(
        made.model,
        batch,
        batch_size=8,
        loss=made.loss,
        inputs=list(made.inputs),
        optimizer=make_optimizer(task, made),
    )
    return replace(job.settings(job.capture(), num_updates), has_prediction=False), job.rates


def draw_batches(task: Task, made: Made) -> Iterator[Rows]:
    """Return batches in an order that is drawn anew for each epoch, without an end."""
    count = num_rows(made.train)
    while True:
        order = torch.randperm(count)
        for first in range(0, count, task.batch_size):
            chosen = order[first : first + task.batch_size]
            yield {name: rows[chosen] for name, rows in made.train.items()}


class _Step:
    """One update from the gradients that a backward left."""

    def __init__(self, optimizer: torch.optim.Optimizer, loop: Loop, num_updates: int) -> None:
        from ravnest.requester.lr_schedules import constant, cosine

        self._optimizer, self._num_updates = optimizer, num_updates
        self._schedule = cosine(warmup=0.05, final=0.0) if loop.is_cosine else constant()
        self._rate = loop.rate

    def __call__(self, update: int) -> None:
        assert self._rate is not None
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * self._schedule.factor(update, self._num_updates)
        self._optimizer.step()
        self._optimizer.zero_grad()


class _RecipeStep:
    """One update of the default recipe, with nothing late."""

    def __init__(self, task: Task, made: Made, total: int, num_updates: int) -> None:
        from ravnest.engine.optimizers import Optimizer

        self._parameters = {k: v for k, v in made.model.named_parameters() if v.requires_grad}
        settings, self._schedule = find_settings(replace(task, own=None), made, total)
        self._optimizer = Optimizer(settings, dict(self._parameters))
        self._num_updates, self._rate = num_updates, settings.learning_rate

    @torch.no_grad()
    def __call__(self, update: int) -> None:
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None
            gradients[name], parameter.grad = parameter.grad, None
        rate = self._rate * self._schedule.factor(update, self._num_updates)
        self._optimizer.step(self._parameters, gradients, rate)


def _make_step(task: Task, made: Made, loop: Loop, total: int, num_updates: int) -> _Step | _RecipeStep:
    if loop.kind == "recipe":
        return _RecipeStep(task, made, total, num_updates)
    assert loop.rate is not None
    kind = torch.optim.Adam if loop.kind == "Adam" else torch.optim.AdamW
    return _Step(kind(made.model.parameters(), lr=loop.rate), loop, num_updates)
