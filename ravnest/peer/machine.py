"""What this PC has: its memory, and how fast it multiplies matrices. Asked by the command `ravnest join`."""

import time

import psutil  # type: ignore[import-untyped]
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_SIDE = 512
_MOST_SECONDS = 0.2


def warm_up() -> None:
    """Load what looking at the first stage would load, while no neighbour waits for a sign of life."""
    FakeTensorMode()


def free_memory_bytes() -> float:
    """Return the memory that programs could still take without swapping."""
    return float(psutil.virtual_memory().available)


def measure_flops_per_second() -> float:
    """Return the best rate of a small matrix product within a moment."""
    matrix = torch.ones(_SIDE, _SIDE)
    best, ends_at = 0.0, time.perf_counter() + _MOST_SECONDS  # noqa: TID251 - a probe reads the clock
    while True:
        start = time.perf_counter()  # noqa: TID251 - as above
        matrix @ matrix
        now = time.perf_counter()  # noqa: TID251 - as above
        best = max(best, 2 * _SIDE**3 / max(now - start, 1e-9))
        if now > ends_at:
            return best
