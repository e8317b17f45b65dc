"""What an agent asks of its PC, without torch: memory that is taken, the battery, the allocator."""

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # as malloc.h of glibc numbers them
_LARGE_BYTES = 3 << 19  # at half a megabyte tensors of one trained 30 % slower, at this as fast as ever
_KEPT_BYTES = 1 << 25  # of smaller ones: at glibc's 128 KB the same pages come and go with every batch
_KEPT_SHARE = 0.05
_NUM_ARENAS = 2  # of the event loop, and of all threads beside it: each keeps freed memory of its own
_FAST_BINS = 1
# Aligned tensors leave splinters of 32 to 96 bytes beside them. glibc caches these instead of joining them to
# what is freed, so no hole is large enough for the next tensor of the same size.
JOIN_SPLINTERS = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}  # read when a process starts


def return_freed_memory(lent_bytes: float) -> None:
    """Have large tensors given back to the system when they are freed, so that a peer takes what is planned.

    By itself the allocator of glibc keeps them once it has seen some, up to half as much again, and smaller
    ones for every thread. A twentieth of what is lent may be kept: the plan counts that.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system, another allocator
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_TRIM_THRESHOLD, kept_bytes(lent_bytes))
        library.mallopt(_FAST_BINS, 0)
    keep_few_arenas()


def kept_bytes(lent_bytes: float) -> int:
    """Return how much freed memory the allocator may keep."""
    return int(min(_KEPT_BYTES, _KEPT_SHARE * lent_bytes))


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

    The allocator gives back by itself what is freed at the end of a heap, never what is in the middle.
    """

    kept_bytes: float
    least_bytes: float = float("inf")  # that the program had since it last gave back what was freed

    def look(self, taken_bytes: float) -> bool:
        """Return whether to give back now; then look again at what is left."""
        if taken_bytes > self.least_bytes + self.kept_bytes:
            self.least_bytes = float("inf")
            return True
        self.least_bytes = min(self.least_bytes, taken_bytes)
        return False


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
