"""The same training in one process, as anyone would write it, to compare a swarm with.

The same batches in the same order, one update per batch, the same learning rates and the same optimizer rule,
which equals torch.optim when nothing is late.
"""

import copy
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ravnest.config import OptimizerKind as Recipe
from ravnest.engine.optimizers import Optimizer
from ravnest.engine.recipe import make_settings
from ravnest.hub.coordinator.leases import permute
from ravnest.model.blueprint import Blueprint
from ravnest.model.profile import find_matrices
from ravnest.protocol.messages import Refusal
from ravnest.requester.dataset import Samples
from ravnest.requester.job import Job
from ravnest.requester.lr_schedules import factors

_TRIES = 5


@dataclass(frozen=True, slots=True)
class PlainLoop:
    """How it went."""

    metrics: dict[str, float]
    samples_per_second: float


def train_plain_loop(job: Job, blueprint: Blueprint) -> PlainLoop:
    """Train a copy of the model whose only input is the field x, and evaluate it."""
    assert isinstance(job.optimizer, Recipe)
    model = copy.deepcopy(job.model).train()
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    num_samples = len(job.samples)
    num_batches = job.epochs * -(-num_samples // job.batch_size)
    matrices = find_matrices(blueprint)
    settings = make_settings(job.optimizer, job.find_rate(num_batches), shapes, matrices, num_batches)
    optimizer, rates = Optimizer(settings, parameters), iter(factors(job.rates, num_batches))
    torch.set_num_threads(_best_threads(job, model))
    start = time.perf_counter()  # noqa: TID251 - this is the measurement
    for epoch in range(job.epochs):
        order = permute(np.arange(num_samples), num_samples, job.seed, epoch)
        for first in range(0, num_samples, job.batch_size):
            loss = _score(job, model, job.samples.batch(order[first : first + job.batch_size]))["loss"]
            found = torch.autograd.grad(loss, list(parameters.values()))
            gradients = dict(zip(parameters, found, strict=True))
            updated = optimizer.step(parameters, gradients, settings.learning_rate * next(rates))
            assert not isinstance(updated, Refusal), updated
    seconds = time.perf_counter() - start  # noqa: TID251 - as above
    assert job.val_samples is not None
    return PlainLoop(_evaluate(job, model, job.val_samples), job.epochs * num_samples / seconds)


def _best_threads(job: Job, model: torch.nn.Module) -> int:
    """Return whether one thread or all are faster: for a small model on a busy PC it is one."""
    batch, times = job.samples.batch(range(job.batch_size)), {}
    for num_threads in {1, torch.get_num_threads()}:
        torch.set_num_threads(num_threads)
        for is_measured in (False, True):
            start = time.perf_counter()  # noqa: TID251 - as above
            for _ in range(_TRIES if is_measured else 1):
                torch.autograd.grad(_score(job, model, batch)["loss"], list(model.parameters()))
            times[num_threads] = time.perf_counter() - start  # noqa: TID251 - as above
    return min(times, key=lambda count: times[count])


def _score(job: Job, model: torch.nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    assert job.loss is not None
    out = model(batch["x"])
    return {"loss": job.loss(out, batch), **{name: of(out, batch) for name, of in job.metrics.items()}}


@torch.no_grad()
def _evaluate(job: Job, model: torch.nn.Module, samples: Samples) -> dict[str, float]:
    """Return the means over the validation samples, weighted by the size of batches."""
    model.eval()
    sums: dict[str, float] = {}
    for first in range(0, len(samples), job.batch_size):
        numbers = range(first, min(first + job.batch_size, len(samples)))
        for name, value in _score(job, model, samples.batch(numbers)).items():
            sums[name] = sums.get(name, 0.0) + float(value) * len(numbers)
    return {f"val_{name}": total / len(samples) for name, total in sums.items()}
