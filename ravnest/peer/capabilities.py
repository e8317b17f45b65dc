"""What torch knows of this PC: devices, their memory, how fast they multiply matrices, if in bf16."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from math import inf
from typing import Literal

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ravnest.errors import ConfigError
from ravnest.model.blueprint.program import TensorType
from ravnest.model.stage.stage_program import StageProgram
from ravnest.units import show_bytes

BestPrecision = Literal["bf16", "tf32", "fp32"]

_SIDES = {"cpu": 512}  # of the matrices; of anything else eight times as long
_SHARES = {"cpu": 0.5, "cuda": 0.8}  # of what is free, to lend: on a GPU seldom anything else runs
_MOST_SECONDS = 0.2
_BF16_PROGRAM = """
import sys, torch
matrix = torch.ones(64, 64, dtype=torch.bfloat16, device=sys.argv[1])
sys.exit(0 if (matrix @ matrix).sum().item() == 64.0**3 else 1)
"""


def warm_up() -> None:
    """Load what looking at the first stage would load, while no neighbour waits for a sign of life."""
    FakeTensorMode()


def choose_device(asked: str) -> str:
    """Return the device to compute on: the one asked for if this PC has it, or the fastest it has."""
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = [f"cuda:{number}" for number in range(num_cuda)]
    known += ["mps"] if torch.backends.mps.is_available() else []
    known += ["cpu"]
    device = {"auto": known[0], "cuda": "cuda:0"}.get(asked, asked)
    if device not in known:
        raise ConfigError(f"--device {asked} is not here: torch sees {', '.join(known)} on this PC")
    return device


def lent_memory_bytes(device: str) -> float:
    """Return the share to lend of the memory that programs could still take on a device."""
    kind = torch.device(device).type
    is_cuda = kind == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if is_cuda else psutil.virtual_memory().available
    return float(free) * _SHARES.get(kind, 0.5)


def check_gpu_memory(device: str, size_bytes: float) -> None:
    """Raise the sentence that says why so much of a device's memory cannot be lent."""
    if torch.device(device).type != "cuda":
        raise ConfigError(
            f"--gpu-memory has no meaning on {device}, which computes in the PC's own memory; give --memory"
        )
    total = torch.cuda.mem_get_info(device)[1]
    if not 0 < size_bytes <= total:
        raise ConfigError(
            f"--gpu-memory {show_bytes(size_bytes)} is no part of the {show_bytes(total)} that {device} has; "
            "give a size like '4 GB'"
        )


def limit_gpu_memory(device: str, size_bytes: float) -> None:
    """Have torch refuse to take more of a GPU than is lent."""
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, size_bytes / total), device)


def measure_flops_per_second(device: str = "cpu") -> float:
    """Return the best rate of a matrix product within a moment, in the precision best here."""
    is_half = choose_precision(device) == "bf16"
    return _measure(device, torch.bfloat16 if is_half else torch.float32, _MOST_SECONDS)


def choose_precision(device: str) -> BestPrecision:
    """Return in what a device computes best, after a quick try; its matrix products are of TF32 from then on.

    A GPU that only emulates bf16 is slower with it. A CPU computes in fp32: its bf16 may be far slower.
    """
    if torch.device(device).type != "cuda":
        return "fp32"
    use_tf32(True)
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return "tf32"
    halves, wholes = (_measure(device, dtype, _MOST_SECONDS / 4) for dtype in (torch.bfloat16, torch.float32))
    return "bf16" if halves > wholes else "tf32"


def use_tf32(is_used: bool) -> None:
    """Let GPUs round the factors of fp32 matrix products to TF32, or no more."""
    torch.set_float32_matmul_precision("high" if is_used else "highest")


def _measure(device: str, dtype: torch.dtype, most_seconds: float) -> float:
    side, where = _SIDES.get(device, 4096), torch.device(device)
    matrix = torch.ones(side, side, dtype=dtype, device=where)
    matrix @ matrix  # loads what is needed for the first
    synchronise(where)
    best, ends_at = 0.0, time.perf_counter() + most_seconds  # noqa: TID251 - a probe reads the clock
    while True:
        start = time.perf_counter()  # noqa: TID251 - as above
        matrix @ matrix
        synchronise(where)
        now = time.perf_counter()  # noqa: TID251 - as above
        best = max(best, 2 * side**3 / max(now - start, 1e-9))
        if now > ends_at:
            return best


def can_run_bf16_forked(device: str) -> bool:
    """Return the same, tried in a copy of this process: where it may start no program."""

    def multiply() -> bool:
        torch.set_num_threads(1)  # the copy has none of the others
        matrix = torch.ones(64, 64, dtype=torch.bfloat16, device=torch.device(device))
        return bool((matrix @ matrix).sum().item() == 64.0**3)

    return try_forked(multiply)


def try_forked(act: Callable[[], bool], timeout_seconds: float = 60.0) -> bool:
    """Return what comes of something in a copy of this process; if it dies or hangs there, no."""
    come, gone = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other threads are not copied
        child = os.fork()
    if not child:
        is_right = False
        with contextlib.suppress(Exception):
            is_right = act()
        os._exit(0 if is_right else 1)
    os.close(gone)
    select.select([come], [], [], timeout_seconds)  # it is readable when the copy has ended
    os.close(come)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == 0


def can_run_bf16(device: str, program: str = _BF16_PROGRAM, timeout_seconds: float = 60.0) -> bool:
    """Return whether a device multiplies bf16 matrices; tried in a process, for on some CPUs it kills it."""
    command = [sys.executable, "-c", program, device]
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=timeout_seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


_MOST_TRIAL_SECONDS = 0.5
_MOST_RUNS = 10
_LARGEST = 0.1  # of the numbers made up: sums of them stay finite


def time_batch(program: StageProgram, num_samples: int, clock: Callable[[], float]) -> float:
    """Return the seconds of the fastest of a few batches; the first one, which warms up, does not count."""
    blueprint, device = program.blueprint, program.setting.device
    train, is_trained = blueprint.train, {entry.name: entry.is_trainable for entry in blueprint.state}
    values = train.values
    stored = {entry.name: entry.stored for entry in blueprint.state}
    kinds = {name: TensorType(stored[name].dtype, stored[name].shape) for _, name in train.state}
    state = {
        name: _make_up(kind, num_samples, device).requires_grad_(is_trained[name])
        for name, kind in kinds.items()
    }
    inputs = {
        value: _make_up(values[value], num_samples, device).requires_grad_(values[value].has_gradient)
        for value in train.inputs
    }
    fields = {name: _make_up(values[value], num_samples, device) for value, name in train.fields}
    wanted = [tensor for tensor in (*state.values(), *inputs.values()) if tensor.requires_grad]

    def run() -> float:
        started = clock()
        with torch.enable_grad():
            passed = program.forward(state, inputs, fields, training=True, key=(0, 0))
        loss = passed.results.get("loss")
        ends = [tensor for tensor in (*passed.outputs.values(), loss) if tensor is not None]
        ends = [tensor for tensor in ends if tensor.requires_grad]
        if ends and wanted:
            torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)
        synchronise(device)
        return clock() - started

    run()
    best, ends_at, num_runs = inf, clock() + _MOST_TRIAL_SECONDS, 0
    while not num_runs or (clock() < ends_at and num_runs < _MOST_RUNS):
        best, num_runs = min(best, run()), num_runs + 1
    return best


def synchronise(device: torch.device) -> None:
    """Wait until a device has done what it was given: it works beside the program."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _make_up(kind: TensorType, num_samples: int, device: torch.device) -> Tensor:
    """Return small fractions, and zeros for what is none: they are an index into anything."""
    dtype, shape = getattr(torch, kind.dtype), kind.shape_at(num_samples)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.rand(shape, dtype=dtype, device=device).mul_(_LARGEST)
