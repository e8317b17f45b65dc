"""What this PC has: its memory, how fast it multiplies matrices, whether in bf16. Asked by `ravnest join`."""

import subprocess
import sys
import time

import psutil  # type: ignore[import-untyped]
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_SIDE = 512
_MOST_SECONDS = 0.2
_BF16_SECONDS = 60.0  # most of them to load torch
_BF16_PROGRAM = """
import sys, torch
matrix = torch.ones(64, 64, dtype=torch.bfloat16, device=sys.argv[1])
sys.exit(0 if (matrix @ matrix).sum().item() == 64.0**3 else 1)
"""


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


def can_run_bf16(device: str) -> bool:
    """Return whether a device multiplies bf16 matrices; tried in a process, for on some CPUs it kills it."""
    command = [sys.executable, "-c", _BF16_PROGRAM, device]
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_BF16_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
