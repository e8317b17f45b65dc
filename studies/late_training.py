"""Whole trainings of the small GPT with a given lag, to compare with the same training without."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from ravnest.config import OptimizerKind
from ravnest.engine.recipe import choose_rate, make_settings
from ravnest.model.stage.profile import find_matrices
from ravnest.requester.lr_schedules import cosine, factors
from studies.late_stages import (
    Fields,
    LateStages,
    Rules,
    captured_gpt,
    draw_batches,
    link_ticks_for,
    make_stages,
    validation_batch,
    windows_of,
)

BATCH_SIZE = 16


@dataclass(frozen=True, slots=True)
class Training:
    """One training; `lag` counts the microbatches that the first stage is late."""

    num_updates: int
    lag: int = 0
    seed: int = 0
    num_stages: int = 4
    recipe: OptimizerKind = OptimizerKind.MUON
    has_prediction: bool = True
    accumulate: int = 1
    bound: int | None = None


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of it: the validation loss, the training losses, the lag in updates, what stood idle."""

    loss: float
    losses: tuple[float, ...]
    root_lag: float
    idle_share: float


@cache
def train(training: Training) -> Trained:
    """Train with the recipe's own rate for this length, on the batches of this seed."""
    asked, whole = training, captured_gpt().blueprint
    shapes = {entry.name: entry.shape for entry in whole.state if entry.is_trainable}
    rate = choose_rate(asked.recipe, asked.num_updates)
    settings = make_settings(asked.recipe, rate, shapes, find_matrices(whole), asked.num_updates)
    settings = replace(settings, has_prediction=settings.has_prediction and asked.has_prediction)
    scale = factors(cosine(warmup=0.05), asked.num_updates)
    rules = Rules(
        windows_of(asked.num_stages, asked.lag),
        asked.accumulate,
        bound=asked.bound,
        link_ticks=link_ticks_for(asked.num_stages, asked.lag),
    )
    line = LateStages(make_stages(asked.seed, asked.num_stages, settings), rules)
    batches = draw_batches(asked.num_updates, BATCH_SIZE, asked.seed)
    parts = [part for batch in batches for part in _cut(batch, asked.accumulate)]
    seen = line.train(parts, lambda update: rate * scale[update])
    return Trained(line.evaluate(validation_batch()), tuple(seen.losses), seen.root_lag, seen.idle_share)


def _cut(batch: Fields, num_parts: int) -> list[Fields]:
    pieces = {name: rows.chunk(num_parts) for name, rows in batch.items()}
    return [{name: rows[place] for name, rows in pieces.items()} for place in range(num_parts)]


def penalty(training: Training) -> float:
    """Return how much the loss is over that of the same training without lag, as a share."""
    alone = replace(training, lag=0, num_stages=1, accumulate=1, bound=None)
    return train(training).loss / train(alone).loss - 1


def tolerated(points: Sequence[tuple[float, float]], limit: float) -> float:
    """Return the lag up to which the penalty stays within a limit, between points of (lag, penalty).

    Beyond the last point nothing is known: then it is the last lag.
    """
    for (lag, cost), (next_lag, next_cost) in pairwise(sorted(points)):
        if next_cost > limit:
            return lag + (next_lag - lag) * (limit - cost) / (next_cost - cost)
    return max(lag for lag, _ in points)


def cost_at(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the penalty at a lag between points of (lag, penalty)."""
    pairs = pairwise(sorted(points))
    (lag, cost), (next_lag, next_cost) = next(pair for pair in pairs if at <= pair[1][0])
    return cost + (next_cost - cost) * (at - lag) / (next_lag - lag)
