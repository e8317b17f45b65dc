"""Callbacks: any function of a notice may follow a training.

Callbacks run in the hub's event loop, so they should be quick. A callback that fails is removed with a
warning: a broken log is no reason to lose a training.
"""

import csv
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

from ravnest.config import TIMEOUTS, ProgramTimeouts
from ravnest.errors import ConfigError
from ravnest.hub.coordinator.notice_texts import show_notice as show
from ravnest.hub.coordinator.notices import (
    EpochDone,
    Evaluated,
    Joined,
    Left,
    Notice,
    PlanFormed,
    Repaired,
    Resumed,
    SampledText,
    Trained,
    Waiting,
)
from ravnest.units import show_count

logger = logging.getLogger(__name__)

Callback = Callable[[Notice], None]


def _clock() -> float:
    return time.perf_counter()  # noqa: TID251 - people like to see when, and do not read faster


class StopTraining(Exception):  # noqa: N818 - what it does, not that it is an error
    """A callback raises it to end the training early, as Ctrl-C would: what was trained is kept."""


class Callbacks:
    """Passes notices on, and adds how many of the expected nodes are still missing."""

    def __init__(
        self, callbacks: Sequence[Callback], num_awaited: int, stop: Callable[[str], None] = lambda _: None
    ) -> None:
        self._callbacks: list[tuple[Callable[[Any], object], Any]] = [(each, object) for each in callbacks]
        self._stop = stop  # the training, with the reason
        self._num_missing: int | None = num_awaited or None

    def add(self, callback: Callable[[Any], object], kinds: type | UnionType = object) -> None:
        """Add a callback for notices of these kinds."""
        self._callbacks.append((callback, kinds))

    def __call__(self, news: Notice) -> None:
        """Pass a notice to all callbacks."""
        self._pass_on(news)
        match news:
            case Joined() | Left() if self._num_missing is not None:
                self._num_missing -= 1 if isinstance(news, Joined) else -1
                if self._num_missing > 0:
                    self._pass_on(Waiting(f"{self._num_missing} more of the awaited nodes have to join"))
            case PlanFormed():
                self._num_missing = None
            case Resumed() if news.num_peers:  # who is known comes back, or is not waited for long
                self._num_missing = None

    def _pass_on(self, news: Notice) -> None:
        for callback, kinds in tuple(self._callbacks):
            if not isinstance(news, kinds):
                continue
            name = getattr(callback, "__name__", type(callback).__name__)
            try:
                callback(news)
            except StopTraining as wish:
                self._stop(str(wish) or f"the callback {name} wants it")
            except Exception as error:
                self._callbacks.remove((callback, kinds))
                logger.warning("the callback %s failed and is left out from now on: %r", name, error)


class LagNote:
    """Says once what a pipeline may cost an optimizer that is not one of ours."""

    def __init__(self, optimizer: object) -> None:
        self._is_told = isinstance(optimizer, str)  # the recipes bear late gradients

    def __call__(self, news: Notice) -> None:
        """Look at a plan."""
        if self._is_told or not isinstance(news, PlanFormed | Repaired):
            return
        if all(len(each.stages) == 1 for each in news.plan.clusters):
            return
        self._is_told = True
        logger.warning(
            "note: gradients of early stages come some updates late. The default recipe bears that; with an "
            "optimizer of your own the loss may end higher. max_lag=1 makes them less late, and max_stages=1 "
            "keeps a model that fits one PC on one PC (--set, or in PlanConfig)"
        )


class Narrator:
    """Writes each notice to stderr as one line; progress only now and then."""

    def __init__(
        self, timeouts: ProgramTimeouts = TIMEOUTS.program, clock: Callable[[], float] = _clock
    ) -> None:
        self._pause_seconds, self._clock = timeouts.progress_every_seconds, clock
        self._said_at = 0.0

    def __call__(self, news: Notice) -> None:
        """Write the line."""
        now = self._clock()
        if isinstance(news, Trained) and now < self._said_at + self._pause_seconds:
            return
        self._said_at = now
        sys.stderr.write(show(news) + "\n")


class _Numbers:
    """Finds the numbers in notices, and how many samples were trained before."""

    def __init__(self) -> None:
        self.num_samples = 0

    def read(self, news: Notice) -> Iterator[tuple[int, str, float]]:
        """Yield (samples trained, name, value)."""
        found: dict[str, float | None] = {}
        match news:
            case Trained():
                self.num_samples, found = news.num_samples, {"loss": news.loss}
            case EpochDone():
                found = {"epoch_loss": news.loss}
            case Evaluated():
                found = {"val_loss": news.loss, **{f"val_{name}": value for name, value in news.metrics}}
        for name, value in found.items():
            if value is not None:
                yield self.num_samples, name, value


class EarlyStopping:
    """Ends a training whose validation no longer improves; the best weights are kept (`result.best`).

    `patience` evaluations may pass without an improvement of more than `min_delta`. `metric` is "loss" or the
    name of one of the job's metrics; `higher_is_better` is for accuracies and the like.
    """

    def __init__(
        self,
        patience: int = 3,
        *,
        min_delta: float = 0.0,
        metric: str = "loss",
        higher_is_better: bool = False,
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigError(f"patience is {patience!r}; give a whole number of evaluations, 1 or more")
        if not min_delta >= 0:
            raise ConfigError(f"min_delta is {min_delta!r}; give a number, 0 or more")
        self._patience, self._min_delta = patience, min_delta
        self._metric, self._sign = metric.removeprefix("val_"), -1.0 if higher_is_better else 1.0
        self._best: float | None = None
        self._num_worse = 0

    def __call__(self, news: Notice) -> None:
        """Look at an evaluation; raise StopTraining when enough of them were no better."""
        if not isinstance(news, Evaluated):
            return
        found = {"loss": news.loss, **dict(news.metrics)}
        if self._metric not in found:
            problem = f"there is no metric {self._metric!r} in the validation"
            raise ConfigError(f"{problem}; it has {', '.join(found)}")
        value = found[self._metric]
        if value is not None and (self._best is None or self._sign * (self._best - value) > self._min_delta):
            self._best, self._num_worse = value, 0
            return
        self._num_worse += 1
        if self._num_worse >= self._patience:
            best = "none" if self._best is None else f"{self._best:.4g}"
            count = show_count(self._num_worse, "evaluation")
            reason = f"nothing was better than {best} ({self._metric}) in {count}"
            raise StopTraining(reason)


class CsvLog:
    """Writes every number of a training into a CSV file: seconds,num_samples,name,value; and its texts."""

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = _clock) -> None:
        self._numbers = _Numbers()
        self._clock, self._start = clock, clock()
        self._path = Path(path)
        try:
            with self._path.open("x", encoding="utf-8", newline="") as file:
                csv.writer(file).writerow(("seconds", "num_samples", "name", "value"))
        except OSError as error:
            fix = "give a new file in a folder that exists and is yours"
            raise ConfigError(f"{path} cannot be written: {error.strerror}; {fix}") from None

    def __call__(self, news: Notice) -> None:
        """Write the numbers or the text of a notice at once."""
        seconds = self._clock() - self._start
        found: list[tuple[object, ...]] = [
            (f"{seconds:.3f}", *numbers) for numbers in self._numbers.read(news)
        ]
        if isinstance(news, SampledText):
            found.append((f"{seconds:.3f}", self._numbers.num_samples, f"text:{news.prompt}", news.text))
        if found:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows(found)


class TensorBoard:
    """Writes every number and text of a training where `tensorboard --logdir FOLDER` shows it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._numbers = _Numbers()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "TensorBoard is not installed; pip install tensorboard, or use CsvLog"
            ) from None
        self._writer: Any = SummaryWriter(str(folder))

    def __call__(self, news: Notice) -> None:
        """Write the numbers or the text of a notice at once."""
        for num_samples, name, value in self._numbers.read(news):
            self._writer.add_scalar(name, value, num_samples)
        if isinstance(news, SampledText):
            self._writer.add_text(news.prompt, news.text, self._numbers.num_samples)
        self._writer.flush()
