"""Holds the programs to what a provider lends: cores, memory of the PC; and where compiled code is kept.

What is lent of a GPU is held by torch, in capabilities.
"""

import math
import os
import re
import sys
import tempfile
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from ravnest.errors import ConfigError
from ravnest.units import show_bytes, show_value

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
