"""Learning-rate schedules as pure numbers: one factor of the learning rate for each update.

Only numbers travel. A schedule function of the requester runs on the requester's PC alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsFloat

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


Schedule = Curve | OwnSchedule


def cosine(warmup: float = 0, final: float = 0.1) -> Curve:
    """Go down along half a cosine wave, slowly at both ends."""
    return Curve(warmup, final, is_cosine=True)


def linear(warmup: float = 0, final: float = 0.1) -> Curve:
    """Go down in a straight line."""
    return Curve(warmup, final)


def constant(warmup: float = 0) -> Curve:
    """Stay at the learning rate after the warm-up."""
    return Curve(warmup, final=1.0)


def read_schedule(given: object) -> Schedule:
    """Return the schedule a job was given: one of the above, or a function of the update."""
    if isinstance(given, Curve | OwnSchedule):
        return given
    if isinstance(given, type) or not callable(given):
        what = show_value(given) if isinstance(given, str | int | float) else type(given).__name__
        fix = "give rv.cosine(), rv.linear(), rv.constant() or a function from the update to a factor"
        raise ConfigError(f"schedule is {what}; {fix}")
    own = OwnSchedule(given)
    own.factor(0, 1)  # a mistake is told now, not when everything has been sent
    return own


_MOST_FACTORS = 1 << 16  # of a longer run they are told for several updates at a time


def factors(schedule: Schedule, total_updates: int) -> tuple[float, ...]:
    """Return the factor of every update of a run, or of many spread evenly: what travels for a schedule."""
    count = min(total_updates, _MOST_FACTORS)
    updates = (index * total_updates // count for index in range(count))
    return tuple(schedule.factor(update, total_updates) for update in updates)
