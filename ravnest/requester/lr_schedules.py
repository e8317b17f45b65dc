"""Learning-rate schedules as pure numbers: one factor of the learning rate for each update.

Only numbers travel. A schedule function of the requester runs on the requester's PC alone, and so does a
scheduler of torch, over a stand-in for its optimizer.
"""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat

from ravnest.errors import ConfigError
from ravnest.units import show_value


@dataclass(frozen=True, slots=True)
class Curve:
    """Up in a straight line, then down to `final` at the last update; beyond the end it stays there.

    `warmup` is a number of updates or, below 1, a share of the run; it takes at most half of the run.
    """

    warmup: float = 0
    final: float = 0.1
    is_cosine: bool = False

    def __post_init__(self) -> None:
        for name, value, most in (("warmup", self.warmup, 1e12), ("final", self.final, 1.0)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= most:
                raise ConfigError(f"{name} is {show_value(value)}; give a number from 0 to {most:g}")

    def factor(self, update: int, total_updates: int) -> float:
        """Return 1 / warmup at update 0 (or 1 without warm-up), 1 after the warm-up, `final` at the end."""
        given = self.warmup * total_updates if self.warmup < 1 else self.warmup
        warmup = math.floor(min(given, total_updates / 2))
        if update < warmup:
            return (update + 1) / warmup
        peak = max(warmup - 1, 0)
        progress = min((update - peak) / max(total_updates - 1 - peak, 1), 1.0)
        left = (1.0 + math.cos(math.pi * progress)) / 2 if self.is_cosine else 1.0 - progress
        return self.final + (1.0 - self.final) * left


@dataclass(frozen=True, slots=True)
class OwnSchedule:
    """A function of the requester: from the update, counted from 0, to the factor."""

    function: Callable[[int], Any]

    def factor(self, update: int, total_updates: int) -> float:
        """Return what the function says, if that is a number to train with."""
        answer = self.function(update)
        number = float(answer) if isinstance(answer, SupportsFloat) else math.nan
        if not 0 <= number < math.inf:
            fix = "return a factor of the learning rate, 0 or more"
            raise ConfigError(f"schedule returned {show_value(answer)} for update {update}; {fix}")
        return number


class TorchScheduler(Protocol):
    """What we need of torch's: it changes the rates of its optimizer's groups at each step."""

    optimizer: Any

    def step(self) -> None:
        """Go to the next update."""


@dataclass(frozen=True, slots=True)
class TorchSchedule:
    """The rates that a scheduler of torch gives; `num_updates` lie between two of its steps."""

    scheduler: TorchScheduler
    num_updates: int = 1
    _known: list[float] = field(default_factory=list, repr=False)

    def factor(self, update: int, total_updates: int) -> float:
        """Return the rate in that of the optimizer before it was scheduled."""
        step = update // self.num_updates
        if step >= len(self._known):
            last = -(-max(total_updates, update + 1) // self.num_updates)
            self._known[:] = _run_scheduler(self.scheduler, last)
        return self._known[step]


def per_epoch(scheduler: object) -> TorchSchedule:
    """Return a scheduler of torch that makes one step after each epoch."""
    _refuse_unknown_scheduler(scheduler)
    return TorchSchedule(scheduler, num_updates=0)  # type: ignore[arg-type]


def per_update(scheduler: object) -> TorchSchedule:
    """Return a scheduler of torch that makes one step after each update."""
    _refuse_unknown_scheduler(scheduler)
    return TorchSchedule(scheduler)  # type: ignore[arg-type]


Schedule = Curve | OwnSchedule | TorchSchedule


def cosine(warmup: float = 0, final: float = 0.1) -> Curve:
    """Go down along half a cosine wave, slowly at both ends."""
    return Curve(warmup, final, is_cosine=True)


def linear(warmup: float = 0, final: float = 0.1) -> Curve:
    """Go down in a straight line."""
    return Curve(warmup, final)


def constant(warmup: float = 0) -> Curve:
    """Stay at the learning rate after the warm-up."""
    return Curve(warmup, final=1.0)


def is_torch_scheduler(given: object) -> bool:
    """Return whether a schedule follows an optimizer of torch."""
    has_parts = all(hasattr(given, name) for name in ("optimizer", "step", "state_dict"))
    return isinstance(given, TorchSchedule) or (has_parts and not isinstance(given, type))


def read_schedule(given: object, batches_per_epoch: int = 1) -> Schedule:
    """Return the schedule a job was given: one of the above, torch's, or a function of the update."""
    if isinstance(given, TorchSchedule):
        found = given if given.num_updates else TorchSchedule(given.scheduler, batches_per_epoch)
        found.factor(0, 1)
        return found
    if is_torch_scheduler(given):
        _refuse_unknown_scheduler(given)
        raise ConfigError(  # a StepLR of ten epochs that steps after every update trains nothing
            f"schedule is a {type(given).__name__}, which does not say how often it steps; give "
            "rv.per_epoch(scheduler) if your loop calls scheduler.step() after each epoch, or "
            "rv.per_update(scheduler) if after each batch"
        )
    if isinstance(given, Curve | OwnSchedule):
        return given
    if isinstance(given, type) or not callable(given):
        what = show_value(given) if isinstance(given, str | int | float) else type(given).__name__
        fix = "give rv.cosine(), rv.linear(), rv.constant() or a function from the update to a factor"
        raise ConfigError(f"schedule is {what}; {fix}")
    own = OwnSchedule(given)
    own.factor(0, 1)  # a mistake is told now, not when everything has been sent
    return own


def _refuse_unknown_scheduler(scheduler: object) -> None:
    name = type(scheduler).__name__
    if not is_torch_scheduler(scheduler) or isinstance(scheduler, TorchSchedule):
        raise ConfigError(f"schedule is {name}; give one of torch.optim.lr_scheduler")
    if name == "ReduceLROnPlateau":
        raise ConfigError(
            "ReduceLROnPlateau waits for losses, which are known later here; give rv.cosine() or another one"
        )
    if getattr(scheduler, "cycle_momentum", False):
        raise ConfigError(f"{name} changes momenta too; make it with cycle_momentum=False")


def _run_scheduler(scheduler: TorchScheduler, num_steps: int) -> list[float]:
    """Return the factor before each step, from a copy that changes nothing of the requester's."""
    from torch import optim, zeros

    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [zeros(())]}
        for group in scheduler.optimizer.param_groups
    ]
    firsts = [float(group.get("initial_lr", group["lr"])) for group in groups]
    if not all(first > 0 for first in firsts):
        raise ConfigError(f"the learning rate before the schedule is {min(firsts):g}; give one above 0")
    stand_in = optim.SGD(groups, lr=1.0)
    running = _with_optimizer(scheduler, stand_in)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer steps before the scheduler
        for step in range(num_steps):
            factors = [float(x["lr"]) / first for x, first in zip(stand_in.param_groups, firsts, strict=True)]
            if any(not math.isclose(factor, factors[0], rel_tol=1e-6) for factor in factors):
                problem = f"the schedule gives groups different factors at step {step}"
                raise ConfigError(f"{problem}; give all groups the same one")
            found.append(factors[0])
            _make_step(running, step, num_steps)
    return found


def _make_step(scheduler: TorchScheduler, step: int, num_steps: int) -> None:
    try:
        scheduler.step()
    except Exception as error:  # a OneCycleLR raises after its last step, one of the requester's anything
        problem = f"{type(scheduler).__name__} fails at step {step + 1} of {num_steps}"
        raise ConfigError(f"{problem} ({error}); make it for the {num_steps} steps of the job") from None


def _with_optimizer(scheduler: Any, optimizer: Any) -> Any:
    """Return a copy of a scheduler, and of those it is made of, that changes this optimizer."""
    copied = copy.copy(scheduler)
    copied.optimizer = optimizer
    if hasattr(copied, "_schedulers"):
        copied._schedulers = [_with_optimizer(each, optimizer) for each in copied._schedulers]
    return copied


_MOST_FACTORS = 1 << 16  # of a longer run they are told for several updates at a time


def factors(schedule: Schedule, total_updates: int) -> tuple[float, ...]:
    """Return the factor of every update of a run, or of many spread evenly: what travels for a schedule."""
    count = min(total_updates, _MOST_FACTORS)
    updates = (index * total_updates // count for index in range(count))
    return tuple(schedule.factor(update, total_updates) for update in updates)
