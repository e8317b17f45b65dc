"""This PC, without torch: its memory, battery and allocator; and how programs are held to what is lent of it.

What is lent of a GPU is held by torch, in capabilities.
"""

import contextlib
import ctypes
import math
import mmap
import os
import re
import sys
import tempfile
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from ravnest.errors import ConfigError
from ravnest.units import show_bytes, show_value

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # as malloc.h of glibc numbers them
_LARGE_BYTES = 3 << 19  # at half a megabyte tensors of one trained 30 % slower, at this as fast as ever
_KEPT_BYTES = 1 << 25  # of smaller ones: at glibc's 128 KB the same pages come and go with every batch
_LEAST_KEPT_BYTES = 1 << 22  # of a small stage: giving back less costs more than it brings
_KEPT_SHARE = 0.05  # the plan adds as much to what its stage needs, and nothing for what is kept beyond that
_FADING = 0.01  # of what was needed before, with each piece of work that needs less
_NUM_ARENAS = 2  # of the event loop, and of all threads beside it: each keeps freed memory of its own
_FAST_BINS = 1
# Aligned tensors leave splinters of 32 to 96 bytes beside them. glibc caches these instead of joining them to
# what is freed, so no hole is large enough for the next tensor of the same size.
JOIN_SPLINTERS = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}  # read when a process starts


def return_freed_memory(lent_bytes: float) -> None:
    """Have large tensors given back to the system when they are freed, so that a peer takes what is planned.

    By itself the allocator of glibc keeps them once it has seen some, up to half as much again, and smaller
    ones for every thread. What it keeps now at the end of a heap, and between tensors, HoleWatch looks at.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system, another allocator
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_TRIM_THRESHOLD, kept_bytes(lent_bytes))
        library.mallopt(_FAST_BINS, 0)
    keep_few_arenas()


def kept_bytes(lent_bytes: float, used_bytes: float = float("inf")) -> int:
    """Return how much freed memory may be kept: a twentieth of what is used, but for small stages."""
    share = max(_LEAST_KEPT_BYTES, _KEPT_SHARE * used_bytes)
    return int(min(_KEPT_BYTES, _KEPT_SHARE * lent_bytes, share))


def keep_few_arenas() -> None:
    """Have all threads to come share their freed memory: each would keep some of its own."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, _NUM_ARENAS)


def trim_freed_memory() -> None:
    """Give the system back what was freed so far, by a build or a snapshot."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(slots=True)
class HoleWatch:
    """Tells when a program may have so much freed memory between what it uses that it should be given back.

    The allocator gives back by itself what is freed at the end of a heap, never what is in the middle. Holes
    that lie within what was needed before cost nothing, and the next tensors fill them: they stay.
    """

    lent_bytes: float
    own_bytes: float  # of the program itself, before it had a stage
    needed_bytes: float = 0.0  # the most that was left when freed memory had been given back

    def look(self, taken_bytes: float) -> bool:
        """Return whether to give back now; what is left then is to be recorded."""
        self.needed_bytes -= _FADING * max(0.0, self.needed_bytes - taken_bytes)
        return taken_bytes > self.needed_bytes + kept_bytes(self.lent_bytes, taken_bytes - self.own_bytes)

    def record(self, left_bytes: float) -> None:
        """Record what is left when freed memory was given back."""
        self.needed_bytes = max(self.needed_bytes, left_bytes)


def own_memory_bytes() -> float:
    """Return what this program has in memory of its own, without files; nothing where that is not known."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return 0.0
    return float(int(resident) - int(shared)) * mmap.PAGESIZE


def taken_memory_bytes() -> float:
    """Return what this program takes of the PC's memory now."""
    return float(psutil.Process().memory_info().rss)


def memory_of_process(process_id: int | None) -> float:
    """Return what another program takes; nothing if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return 0.0 if process_id is None else float(psutil.Process(process_id).memory_info().rss)
    return 0.0


def has_battery() -> bool:
    """Return whether this PC is known to have a battery."""
    return _find_battery() is not None


def is_on_battery() -> bool:
    """Return whether this PC has a battery and lives on it now."""
    battery = _find_battery()
    return battery is not None and battery.power_plugged is False


def _find_battery() -> Any:
    try:
        return psutil.sensors_battery()
    except (AttributeError, OSError):  # a system that cannot tell
        return None


@dataclass(frozen=True, slots=True)
class Machine:
    """What a program asks of a PC, and what it tells it; the defaults are about this PC."""

    has_battery: Callable[[], bool] = has_battery
    is_on_battery: Callable[[], bool] = is_on_battery
    taken_memory_bytes: Callable[[], float] = taken_memory_bytes
    return_freed_memory: Callable[[float], None] = return_freed_memory
    release_memory: Callable[[], None] = lambda: None  # while this PC is not lent


THIS_PC = Machine()


_SHARE = re.compile(r"\s*(\d{1,4}(?:\.\d{1,6})?)\s*(%?)\s*", re.ASCII)
_NICENESS = 10  # others go first; with more, the PC's own work could make it miss a sign of life
_MOST_LOOKS = 3  # at too much memory in a row: a moment of it is no reason to go


def count_cores() -> int:
    """Return how many cores this program may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def read_cores(text: str, num_cores: int) -> int:
    """Return the whole cores in '50 %' of those here, or in '2'; part of a core counts as one."""
    match = _SHARE.fullmatch(text)
    number = float(match[1]) if match else 0.0
    cores = number / 100 * num_cores if match and match[2] else number
    if not 0 < cores <= num_cores:
        raise ConfigError(
            f"--cpu {show_value(text)} is no part of this PC's {num_cores} cores; "
            f"give a share like '50 %' or a number of cores like '1'"
        )
    return math.ceil(cores - 1e-9)


def limit_cpu(text: str) -> str:
    """Keep this program to some cores, behind all other programs; return in words what came of it."""
    num_cores = read_cores(text, count_cores())
    if sys.platform != "linux":
        return f"{num_cores} threads (this system does not keep them to some cores)"
    known = sorted(os.sched_getaffinity(0))
    first = os.getpid() % len(known)  # two peers on one PC seldom get the same ones
    cores = (known[first:] + known[:first])[:num_cores]
    for thread in Path("/proc/self/task").iterdir():  # those to come inherit it from the one that makes them
        os.sched_setaffinity(int(thread.name), cores)
        os.setpriority(os.PRIO_PROCESS, int(thread.name), _NICENESS)
    return f"{num_cores} of {len(known)} cores, behind all other programs"


@dataclass(slots=True)
class MemoryWatch:
    """Looks at what the program takes of the PC's memory; too much, a few times in a row, is too much."""

    lent_bytes: float
    own_bytes: float  # of the program itself
    num_over: int = 0
    must_leave: bool = False  # it was too much for too long; that stays so

    def look(self, taken_bytes: float) -> str | None:
        """Return what is wrong with what is taken now."""
        if taken_bytes <= self.lent_bytes + self.own_bytes:
            self.num_over = 0
            return None
        self.num_over += 1
        self.must_leave |= self.num_over >= _MOST_LOOKS
        allowed = f"{show_bytes(self.lent_bytes)} it lends and {show_bytes(self.own_bytes)} for the program"
        return f"it takes {show_bytes(taken_bytes)} of memory, more than the {allowed}"


def keep_compiled(environment: MutableMapping[str, str]) -> None:
    """Let torch keep what it compiles in this user's own folder; this program itself starts no compilers.

    torch runs what it finds there, so it must not be a folder that others can write to. torch itself sets
    these variables to one below /tmp, and a program that starts peers passes them on: nobody's wish.
    """
    caches = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = make_own_folder(caches / "ravnest" / "compiled")
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    environment["TRITON_CACHE_DIR"] = str(folder / "triton")
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # another process compiles, on the cores lent


def make_own_folder(folder: Path) -> Path:
    """Return the folder, made for this user alone; another, for this run, if others may write there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        is_own = os.name != "posix" or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    except OSError:
        is_own = False
    return folder if is_own else Path(tempfile.mkdtemp(prefix="ravnest-compiled-"))
