"""When a PC is lent: hours of the day by its own clock, and on battery if its provider says so."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ravnest.errors import ConfigError
from ravnest.units import show_value

DAY_MINUTES = 24 * 60
_SPAN = re.compile(r"\s*(\d{1,2}):(\d\d)\s*-\s*(\d{1,2}):(\d\d)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Hours:
    """Minutes after midnight, the last not included; a stop before the start is on the next day."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{show_minute(self.start)} to {show_minute(self.stop)}"

    def __contains__(self, minute: int) -> bool:
        if self.start < self.stop:
            return self.start <= minute < self.stop
        return minute >= self.start or minute < self.stop


def read_hours(text: str) -> Hours:
    """Return a span that a provider gives."""
    match = _SPAN.fullmatch(text)
    hours = [int(part) for part in match.groups()] if match else []
    if not match or max(hours[1], hours[3]) > 59 or hours[0] > 23 or hours[2] * 60 + hours[3] > DAY_MINUTES:
        raise ConfigError(f"--hours {show_value(text)} is no span of the day; write it like 22:00-07:00")
    found = Hours(hours[0] * 60 + hours[1], hours[2] * 60 + hours[3])
    if found.start == found.stop:
        raise ConfigError(f"--hours {show_value(text)} is empty; for the whole day leave it out")
    return found


def show_minute(minute: int) -> str:
    """Return a minute of the day as clocks show it."""
    return f"{minute // 60:02}:{minute % 60:02}"


def show_hours(hours: Sequence[Hours]) -> str:
    """Return spans as a person reads them."""
    return " and ".join(f"from {each}" for each in hours)


def may_run(minute: int, hours: Sequence[Hours], is_on_battery: bool) -> str | None:
    """Return why a PC is not lent at this minute of its day; None if it is."""
    if hours and not any(minute in each for each in hours):
        return f"it is only lent {show_hours(hours)}"
    return "it runs on battery" if is_on_battery else None


def next_start(minute: int, hours: Sequence[Hours]) -> int:
    """Return the minute of the day at which a PC is lent next."""
    assert hours
    return min((each.start for each in hours), key=lambda start: (start - minute) % DAY_MINUTES)
