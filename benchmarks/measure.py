"""Small things every scenario needs: CPU seconds, a peak of memory, a spread, a Markdown table."""

import contextlib
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")


def say(text: str) -> None:
    """Report progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def cpu_seconds(work: Callable[[], T]) -> tuple[T, float]:
    """Return what the work returns and the CPU seconds of this process it took."""
    started = time.process_time()
    result = work()
    return result, time.process_time() - started


def in_fresh_process(work: Callable[..., T], *arguments: object) -> tuple[T, float]:
    """Run the work in a process of its own; return its result and that process's peak memory in bytes."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_with_peak, (work, arguments))


def _with_peak(work: Callable[..., T], arguments: Sequence[object]) -> tuple[T, float]:
    result = work(*arguments)
    return result, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def memory_of(pid: int | str) -> dict[str, int]:
    """Return memory figures of a process in bytes: VmHWM, the peak, and VmRSS, what it has now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.partition(":") for line in lines)
    return {key: 1024 * int(value.split()[0]) for key, _, value in pairs if key in ("VmHWM", "VmRSS")}


def peak_of_peer(pid: int) -> int:
    """Return the peaks of an agent and its compute, which are at different times: their sum is a bound."""
    children = psutil.Process(pid).children()
    return sum(memory_of(each)["VmHWM"] for each in (pid, *(child.pid for child in children)))


def peak_since_look(pid: int) -> int:
    """Return what an agent and its compute took at most since the last look, and begin anew.

    Looks that follow each other closely give the peak of both together.
    """
    found = peak_of_peer(pid)
    for each in (pid, *(child.pid for child in psutil.Process(pid).children())):
        with contextlib.suppress(OSError):  # a system that does not allow it: then it is a bound
            Path(f"/proc/{each}/clear_refs").write_text("5")
    return found


def held_by_peer(pid: int) -> int:
    """Return what an agent and its compute have in memory now."""
    children = psutil.Process(pid).children()
    return sum(memory_of(each)["VmRSS"] for each in (pid, *(child.pid for child in children)))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return smallest, median and largest, to four significant digits."""
    chosen = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: float(f"{value:.4g}") for name, value in chosen.items()}


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
