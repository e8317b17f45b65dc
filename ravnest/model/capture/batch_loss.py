"""What the loss of a batch has to do with the losses of its parts: decided by running both, on a real batch.

A batch may be cut into microbatches where its loss is the mean of theirs. A contrastive loss is not, nor is a
sum. The module runs as in evaluation, so dropout is off and a batch norm uses what it has learned. Random
numbers that it draws anyway are those of the whole batch, sample by sample.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ravnest.model.capture.model_with_loss import ModelWithLoss
from ravnest.model.capture.sample_length import count_work
from ravnest.model.capture.verify import as_it_was

_NUM_PARTS = 4
_MOST_SAMPLES = 32
_MOST_WORK = 2e9  # parameters times tokens, over all samples: half a second on a slow PC
_SEED = 20_262
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}  # of float32 on a CPU
_COARSE_ROUNDING = 2e-2  # of half precision
_GPU_TIMES = 10.0  # as coarse: its kernels differ by batch size


class BatchLoss(StrEnum):
    """What the loss of a batch is."""

    MEAN = "mean"  # of the losses of its samples
    WEIGHTED = "weighted"  # mean of them in which some samples count more: by their tokens, or by their class
    SUM = "sum"  # of the losses of its parts
    WHOLE = "whole"  # of no part: samples are compared with each other

    @property
    def is_cuttable(self) -> bool:
        """Whether a batch may travel as microbatches."""
        return self in (BatchLoss.MEAN, BatchLoss.WEIGHTED)

    @property
    def note(self) -> str:
        """What the requester should read, if anything."""
        return _NOTES[self]


_NOTES = {
    BatchLoss.MEAN: "",
    BatchLoss.WEIGHTED: (
        "some samples count more than others in the loss (by tokens that are no padding, or by class); of a "
        "batch that is cut, each microbatch counts by its samples; microbatches=1 keeps the mean of all"
    ),
    BatchLoss.SUM: (
        "the loss is a sum over the batch, so a batch is not cut into microbatches; "
        "return the mean (loss.mean(), reduction='mean') to let more PCs share a batch"
    ),
    BatchLoss.WHOLE: (
        "the loss needs the whole batch (that of a batch is not the mean of its parts), as contrastive "
        "losses do, so a batch is not cut into microbatches"
    ),
}


def judge_loss(whole: ModelWithLoss, fields: Mapping[str, Tensor]) -> BatchLoss:
    """Return what the loss of this batch is; the module is left as it was."""
    num_samples = min(len(next(iter(fields.values()))), _count_affordable(whole, fields))
    if num_samples < 2:
        return BatchLoss.MEAN
    bounds = [index * num_samples // _NUM_PARTS for index in range(_NUM_PARTS + 1)]
    parts = [list(range(*pair)) for pair in pairwise(bounds) if pair[0] < pair[1]]
    with torch.random.fork_rng(), as_it_was(whole), torch.no_grad():
        whole.eval()
        losses = _Losses(whole, {name: each[:num_samples] for name, each in fields.items()}, parts)
        return _judge(losses, parts, _find_tolerance(whole))


def find_summed_metrics(whole: ModelWithLoss, fields: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the metrics that are sums over the samples: a mean over microbatches says nothing of them."""
    num_samples = min(len(next(iter(fields.values()))), _count_affordable(whole, fields))
    if num_samples < 2 or not whole.metrics:
        return ()
    parts = (slice(0, num_samples // 2), slice(num_samples // 2, num_samples), slice(0, num_samples))
    with torch.random.fork_rng(), as_it_was(whole), torch.no_grad(), warnings.catch_warnings(action="ignore"):
        whole.eval()
        try:
            found = [whole(*(each[part] for each in fields.values())) for part in parts]
        except Exception:  # whatever the user's code raises for a part, which it does not for a batch
            return ()
        one, other, both = ({name: float(each[name]) for name in whole.metrics} for each in found)
    return tuple(
        name
        for name, total in both.items()
        if total and abs(one[name] + other[name] - total) < abs(total) / 1e3
    )


def _judge(losses: "_Losses", parts: Sequence[Sequence[int]], tolerance: float) -> BatchLoss:
    everything = tuple(range(len(parts)))
    halves = everything[: len(parts) // 2], everything[len(parts) // 2 :]
    loss = losses.of(everything)
    if loss is None:
        return BatchLoss.MEAN  # no number to compare with
    of_halves = [losses.of(half) for half in halves]
    if None in of_halves:
        return BatchLoss.WHOLE
    one, other = (float(each or 0.0) for each in of_halves)
    tolerance *= max(abs(loss), abs(one), abs(other))
    sizes = [sum(len(parts[part]) for part in half) for half in halves]
    if abs(loss - (one * sizes[0] + other * sizes[1]) / sum(sizes)) <= tolerance:
        return BatchLoss.MEAN
    if abs(loss - (one + other)) <= tolerance:
        return BatchLoss.SUM
    return BatchLoss.WEIGHTED if _is_weighted_mean(losses, everything, tolerance) else BatchLoss.WHOLE


def _is_weighted_mean(losses: "_Losses", everything: tuple[int, ...], tolerance: float) -> bool:
    """Return whether there are weights of the parts that give the loss of every union of parts."""
    alone = [losses.of((part,)) for part in everything]
    unions = [union for size in range(2, len(everything) + 1) for union in combinations(everything, size)]
    found = {union: losses.of(union) for union in unions}
    if len(everything) < 3 or None in alone or None in found.values():
        return False  # two parts would always do
    # Each union says: its parts differ from its loss, weighted, by nothing in sum. The weights add up to one.
    rows = [
        [float(alone[part] or 0.0) - float(loss or 0.0) if part in union else 0.0 for part in everything]
        for union, loss in found.items()
    ]
    system = torch.tensor([*rows, [1.0] * len(everything)], dtype=torch.float64)
    system[:-1] /= max(float(system[:-1].abs().max()), 1e-300)
    wanted = torch.zeros(len(system), 1, dtype=torch.float64)
    wanted[-1] = 1.0
    weights = torch.linalg.lstsq(system, wanted).solution[:, 0].clamp(min=0.0)
    for row, union in zip(rows, unions, strict=True):
        share = sum(float(weights[part]) for part in union)
        gap = sum(float(weights[part]) * row[part] for part in union)
        if share <= 0.0 or abs(gap / share) > 2 * tolerance:
            return False
    return True


class _Losses:
    """The losses of unions of parts, each found once; None: it fails, or is no finite number."""

    def __init__(
        self, whole: ModelWithLoss, fields: Mapping[str, Tensor], parts: Sequence[Sequence[int]]
    ) -> None:
        self._whole, self._fields, self._parts = whole, fields, parts
        self._draws = _Draws(len(next(iter(fields.values()))))
        self._found: dict[tuple[int, ...], float | None] = {}

    def of(self, union: tuple[int, ...]) -> float | None:
        """Return the loss of the samples of these parts."""
        if union not in self._found:
            self._found[union] = self._run([sample for part in union for sample in self._parts[part]])
        return self._found[union]

    def _run(self, samples: Sequence[int]) -> float | None:
        torch.manual_seed(_SEED)
        device = next(iter(self._fields.values())).device
        rows = torch.tensor(samples, device=device)
        try:
            with self._draws.of(rows), warnings.catch_warnings(action="ignore"):
                loss = float(self._whole(*(each[rows] for each in self._fields.values()))["loss"])
        except Exception:  # whatever the user's code raises for a part, which it does not for a batch
            return None
        return loss if abs(loss) < float("inf") else None


@dataclass
class _Draws:
    """What random operations gave for the whole batch; parts get the rows of their samples."""

    num_samples: int
    values: list[Tensor] = field(default_factory=list)

    def of(self, rows: Tensor) -> "_SameDraws":
        """Return the mode in which these samples run; the first is the whole batch."""
        return _SameDraws(self, rows)


class _SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, draws: _Draws, rows: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._rows = draws, rows
        self._is_first = not draws.values
        self._number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; where it draws, put in what the whole batch drew for these samples."""
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(out, Tensor):
            return out
        if self._is_first:
            self._draws.values.append(out.detach().clone())
            return out
        drawn = self._draws.values[self._number] if self._number < len(self._draws.values) else out
        self._number += 1
        if drawn.shape != out.shape:
            by_sample = drawn.reshape(self._draws.num_samples, -1)  # some draw several rows for each
            drawn = by_sample[self._rows].reshape(out.shape)
        return out.copy_(drawn)


def _count_affordable(whole: ModelWithLoss, fields: Mapping[str, Tensor]) -> int:
    """Return how many samples the check may run: all of a small model, a few of a large one."""
    work = count_work(sum(parameter.numel() for parameter in whole.parameters()), fields)
    return min(_MOST_SAMPLES, max(_NUM_PARTS, int(_MOST_WORK / work)))


def _find_tolerance(whole: ModelWithLoss) -> float:
    """Return how far rounding may go, as a share of the loss."""
    tensors = [parameter for parameter in whole.parameters() if parameter.is_floating_point()]
    coarsest = max((_ROUNDING.get(each.dtype, _COARSE_ROUNDING) for each in tensors), default=1e-4)
    is_on_gpu = any(each.device.type != "cpu" for each in tensors)
    return coarsest * (_GPU_TIMES if is_on_gpu and coarsest < _COARSE_ROUNDING else 1.0)
