"""The life of `ravnest join`: it takes part while this PC may be lent, and waits while it may not.

It is lent at hours of the day by its own clock, and on battery if its provider says so. The provider controls
it by signals: SIGINT and SIGTERM end it, SIGUSR1 pauses, SIGUSR2 resumes. A file tells other commands which
process to signal.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from ravnest.config import TIMEOUTS, ProgramTimeouts
from ravnest.disk import read_bytes, write_whole
from ravnest.errors import ComputeLost, ConfigError
from ravnest.foreign import parse_json
from ravnest.units import show_value

if TYPE_CHECKING:
    import psutil  # type: ignore[import-untyped]

    from ravnest.peer.agent import Agent
    from ravnest.peer.machine import Machine, MemoryWatch
    from ravnest.provider.lending_documents import LendingFacts


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


logger = logging.getLogger(__name__)

_SIGNAL_EXIT = 128
_GUARD_EXIT, _LOST_EXIT = 7, 4
_TAKEN_BACK = "its provider takes it back"
_MOST_BYTES = 1 << 12
# Not every system has them.
PAUSE, RESUME = getattr(signal, "SIGUSR1", None), getattr(signal, "SIGUSR2", None)


def _minute() -> int:
    now = time.localtime()
    return now.tm_hour * 60 + now.tm_min


@dataclass(frozen=True, slots=True)
class Terms:
    """When a PC is lent, and how much of its memory; `hours` may be none, which is always."""

    name: str
    hours: tuple[Hours, ...]
    runs_on_battery: bool
    memory: "MemoryWatch | None"  # none where something else holds the limit
    hub: "psutil.Process | None" = None  # that it ends with, if it is one of this PC

    @property
    def has_lost_hub(self) -> bool:
        """Whether the process of the hub has ended."""
        if self.hub is None:
            return False
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            return not self.hub.is_running() or self.hub.status() == psutil.STATUS_ZOMBIE
        return True


class _Registration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file of a running `ravnest join` says."""

    name: Annotated[str, Meta(max_length=256)]
    started_at: float


class Lending:
    """One `ravnest join` from start to end, with what its provider wants meanwhile."""

    def __init__(
        self,
        terms: Terms,
        machine: "Machine | None" = None,
        minute: Callable[[], int] = _minute,
        timeouts: ProgramTimeouts = TIMEOUTS.program,
    ) -> None:
        from ravnest.peer.machine import THIS_PC

        self._terms = terms
        self._machine, self._minute = machine or THIS_PC, minute
        self._look_seconds = timeouts.lending_look_seconds
        self._ended_by = 0  # the signal
        self._is_paused = False
        self._leaving: str | None = None  # why
        self._has_lost_compute = False  # the last time
        self._said: str | None = None  # why it waits
        self._agent: Agent | None = None
        self._before: dict[int, Any] = {}  # what signals did

    async def run(self, take_part: Callable[[], Awaitable[str]]) -> tuple[int, str]:
        """Take part, again and again if it may not always; return the exit code and why it ended."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        with self._catching_signals(), registered(self._terms.name):
            while True:
                await self._wait()
                reason = _TAKEN_BACK if self._ended_by else await self._take_part(take_part)
                if self._ended_by:
                    return _SIGNAL_EXIT + self._ended_by, reason
                if self._terms.has_lost_hub:
                    return _LOST_EXIT, reason
                if self._has_lost_compute:
                    continue
                if self._leaving is None:
                    return 0, reason
                if self._terms.memory is not None and self._terms.memory.must_leave:
                    return _GUARD_EXIT, reason

    async def _take_part(self, take_part: Callable[[], Awaitable[str]]) -> str:
        """Take part once; if compute is lost, the hub was told and there is a next time."""
        self._has_lost_compute = False
        try:
            return await take_part()
        except ComputeLost as error:
            self._has_lost_compute = True
            logger.warning("%s; the hub is told, and it joins again", error)
            return str(error)

    def pause(self) -> None:
        """Have it leave and wait, as `ravnest pause` does; any thread may call it."""
        self._is_paused = True
        self._loop.call_soon_threadsafe(self._act_on_signal)

    def resume(self) -> None:
        """Have it join again, as `ravnest resume` does; any thread may call it."""
        self._is_paused = False
        self._loop.call_soon_threadsafe(self._act_on_signal)

    def finish(self) -> None:
        """Have it leave and end, as `ravnest finish` does; any thread may call it."""
        self._ended_by = self._ended_by or signal.SIGTERM
        self._loop.call_soon_threadsafe(self._act_on_signal)

    @property
    def facts(self) -> "LendingFacts":
        """What a page shows of it."""
        from ravnest.provider.lending_documents import LendingFacts

        is_here = self._agent is not None
        return LendingFacts(
            is_paused=self._is_paused,
            waits_for="" if is_here else self._said or "",
            goes_on=self._when() if self._said and not is_here else "",
            leaving=(self._leaving or "") if is_here else "",
            is_ending=bool(self._ended_by),
        )

    async def attend(self, agent: "Agent") -> str:
        """Run an agent to its end, and have it leave when this PC may no longer be lent."""
        self._agent = agent
        self._timer = self._loop.call_later(self._look_seconds, self._look)
        try:
            return await agent.run()
        finally:
            self._agent = None
            self._timer.cancel()

    def _look(self) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(self._look_seconds, self._look)
        reason = self._find_reason() or self._watch_memory()
        if reason is not None and self._leaving is None and self._agent is not None:
            self._leaving = reason
            more = "; Ctrl-C again ends at once" if self._ended_by else ""
            logger.info("leaving: the hub is told, the others go on (%s)%s", reason, more)
            self._agent.leave(reason)

    def _find_reason(self) -> str | None:
        """Return why this PC is not lent now."""
        if self._ended_by:
            return _TAKEN_BACK
        if self._terms.has_lost_hub:
            return "the hub that started it has ended"
        if self._is_paused:
            return "its provider paused it"
        return may_run(self._minute(), self._terms.hours, self._is_held_by_battery())

    def _is_held_by_battery(self) -> bool:
        return not self._terms.runs_on_battery and self._machine.is_on_battery()

    def _watch_memory(self) -> str | None:
        memory = self._terms.memory
        problem = None if memory is None else memory.look(self._machine.taken_memory_bytes())
        if memory is not None and memory.num_over == 1:
            logger.warning("%s; it leaves if that stays so", problem)
        return problem if memory is not None and memory.must_leave else None

    async def _wait(self) -> None:
        """Return when this PC may be lent, or never again."""
        self._said = self._leaving = None
        while (
            not self._ended_by
            and not self._terms.has_lost_hub
            and (reason := self._find_reason()) is not None
        ):
            if reason != self._said:
                logger.info("waits: %s; it joins %s, Ctrl-C ends it", reason, self._when())
                self._machine.release_memory()
            self._said = reason
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_seconds):
                    await self._changed.wait()
        self._said = None

    def _when(self) -> str:
        if self._is_paused:
            return f"after: ravnest resume {self._terms.name}"
        if may_run(self._minute(), self._terms.hours, False):
            return f"at {show_minute(next_start(self._minute(), self._terms.hours))}"
        return "when it is plugged in"

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, PAUSE, RESUME)
        self._before = {
            each: signal.signal(each, self._receive_signal) for each in numbers if each is not None
        }
        try:
            yield
        finally:
            for number, action in self._before.items():
                signal.signal(number, action)

    def _receive_signal(self, number: int, _: FrameType | None) -> None:
        if number in (PAUSE, RESUME):
            self._is_paused = number == PAUSE
        else:
            self._ended_by = number
            signal.signal(number, self._before[number])  # the second one ends it at once
        self._loop.call_soon_threadsafe(self._act_on_signal)

    def _act_on_signal(self) -> None:
        self._changed.set()
        if self._agent is not None:
            self._look()


@contextlib.contextmanager
def registered(name: str) -> Iterator[None]:
    """Have this process found by `find_running` while the context is open."""
    import psutil

    file = _folder() / f"{os.getpid()}.json"
    find_running()  # and forget processes that are no more
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = msgspec.json.encode(_Registration(name, psutil.Process().create_time()))
        write_whole(file, whole)  # a reader of half a file would remove it
    except OSError as error:
        logger.warning("ravnest pause will not find it: %s cannot be written: %s", file, error.strerror)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def find_running() -> list[tuple[str, "psutil.Process"]]:
    """Return what this user lends from this PC now, by name; what dead processes left behind is removed."""
    from ravnest.requester.run_folder import find_process

    found = []
    for file in sorted(_folder().glob("*.json")):
        process = None
        try:
            content = read_bytes(file, _MOST_BYTES)
            registered = parse_json(content, str(file), _MOST_BYTES).read_as(_Registration)
            process = find_process(int(file.stem), registered.started_at)
        except OSError:
            continue  # no file of ours, or another one that starts now was quicker to remove it
        except (ConfigError, ValueError):
            pass  # it is damaged
        if process is not None:
            found.append((registered.name, process))
            continue
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
    return found


def _folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "ravnest" / "peers"
