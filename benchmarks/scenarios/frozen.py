"""A stage of a frozen base with adapters, its matrices in fp32, bf16, int8 and int4: memory, time and error.

Two microbatches go forward before the first goes back, as in a pipeline. On a GPU (`--device cuda`) layers
are those of a Llama with 7 billion parameters, computed in bf16.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import in_fresh_process, say, table
from ravnest.config import FrozenFormat

Figures = dict[str, Any]

FORMATS = ("fp32", "bf16", "int8", "int4")
NUM_STEPS, NUM_IN_FLIGHT, RANK = 5, 2, 16
THRESHOLD = 524288
MOST_OVER_PLAN = 0.15
_METHOD = f"""Layers of a Llama (7 frozen matrices with adapters of rank {RANK} each), normal weights.
{NUM_IN_FLIGHT} microbatches are in flight. `state` is what a peer fetches and holds, `peak` the most memory
of {NUM_STEPS} steps above an empty program, `planned` what a plan counts. A step is forward and backward of
all in flight: the median, the smallest and the largest (on a CPU in CPU seconds of one thread). `error` is
that of the quantised matrices, root mean square over root mean square. On a CPU memory was measured in a run
of its own, with MALLOC_MMAP_THRESHOLD_={THRESHOLD}, so that what is freed is free."""


@dataclass(frozen=True)
class Shape:
    """The size of the stage."""

    num_layers: int
    width: int
    inner: int
    num_rows: int  # of a microbatch: samples times tokens


SHAPES = {
    "quick": Shape(2, 128, 256, 32),
    "cpu": Shape(4, 1024, 2816, 256),
    "cuda": Shape(8, 4096, 11_008, 2048),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let it run on a GPU."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda")


def run(quick: bool, options: argparse.Namespace) -> tuple[Figures, str, list[str]]:
    if quick:
        rows = [_measure(form, "cpu", "quick") for form in ("fp32", "int4")]
        assert rows[1]["state_bytes"] < 0.5 * rows[0]["state_bytes"], rows
        assert 0.08 < rows[1]["error"] < 0.09, rows
        return {"formats": rows}, "", []
    rows = []
    for form in FORMATS:
        rows.append(_measure_twice(form, options.device))
        say(str(rows[-1]))
    over = {row["format"]: row["peak_bytes"] / row["planned_bytes"] - 1 for row in rows}
    missed = [
        f"{form} takes {more:.0%} more than planned" for form, more in over.items() if more > MOST_OVER_PLAN
    ]
    return {"device": options.device, "formats": rows}, _report(options.device, rows), missed


def _measure_twice(form: str, device: str) -> Figures:
    """Return the times of one run and the memory of another."""
    timed, _ = in_fresh_process(_measure, form, device, device)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(THRESHOLD)
    try:
        held, _ = in_fresh_process(_measure, form, device, device)
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
    return {**timed, "peak_bytes": held["peak_bytes"]}


def _measure(form: str, device: str, size: str) -> Figures:
    import torch

    from ravnest.model.stage.profile import measure

    shape = SHAPES[size]
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    autocast = torch.bfloat16 if device == "cuda" else None
    _step(
        *_build(SHAPES["quick"], form, device)[:2], SHAPES["quick"], device, autocast
    )  # loads what torch loads
    before = _memory(device, is_peak=False)
    blueprint, state, error = _build(shape, form, device)
    profile = measure(blueprint, shape.num_rows, is_cast=autocast is not None)
    _forget_peak(device)
    seconds, clock = [], time.perf_counter if device == "cuda" else time.process_time
    for _ in range(NUM_STEPS + 1):
        started = clock()
        _step(blueprint, state, shape, device, autocast)
        seconds.append(clock() - started)
    trained = sum(profile.trained_bytes)
    held = sum(profile.fixed_bytes) + NUM_IN_FLIGHT * sum(profile.saved_bytes) + 2 * trained
    return {
        "format": form,
        "state_bytes": sum(entry.size_bytes for entry in blueprint.state),
        "peak_bytes": _memory(device, is_peak=True) - before,
        "planned_bytes": round(held + max(profile.restored_bytes, default=0)),
        "step_seconds": [min(seconds[1:]), statistics.median(seconds[1:]), max(seconds[1:])],
        "error": error,
    }


def _build(shape: Shape, form: str, device: str) -> tuple[Any, dict[str, Any], float]:
    """Return the stage's blueprint, its state as a peer holds it, and the error of its matrices."""
    import torch

    from ravnest.model.blueprint.frozen_storage import choose_storage
    from ravnest.model.capture.capture import capture
    from ravnest.model.state.state_source import LayeredSource, MemorySource, read_tensor
    from ravnest.model.state.stored_source import StorageError, StoredSource

    model, told = _make_model(shape), list[StorageError]()
    batch = {"x": torch.randn(2, shape.width), "y": torch.randn(2, shape.width)}
    captured = capture(model, batch, lambda out, given: ((out - given["y"]) ** 2).mean(), self_test=False)
    blueprint = choose_storage(captured.blueprint, FrozenFormat(form))
    plain = MemorySource(captured.state)
    source = LayeredSource(StoredSource(plain, blueprint.state, told.extend), plain)
    state = {entry.name: read_tensor(source, entry.name).to(device) for entry in blueprint.state}
    return blueprint, state, max((error.overall for error in told), default=0.0)


def _make_model(shape: Shape) -> Any:
    import torch.nn.functional as F
    from torch import Tensor, nn

    class Adapted(nn.Module):
        def __init__(self, num_in: int, num_out: int) -> None:
            super().__init__()
            self.base = nn.Linear(num_in, num_out, bias=False).requires_grad_(False)
            nn.init.normal_(self.base.weight, std=num_in**-0.5)
            self.down, self.up = nn.Linear(num_in, RANK, bias=False), nn.Linear(RANK, num_out, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width, inner = shape.width, shape.inner
            self.query, self.key, self.value, self.join = (Adapted(width, width) for _ in range(4))
            self.gate, self.up, self.down = (
                Adapted(width, inner),
                Adapted(width, inner),
                Adapted(inner, width),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.join(self.query(x) * self.key(x).sigmoid() + self.value(x))
            return x + self.down(F.silu(self.gate(x)) * self.up(x))

    return nn.Sequential(*(Layer() for _ in range(shape.num_layers)))


def _step(blueprint: Any, state: dict[str, Any], shape: Shape, device: str, autocast: Any) -> None:
    """Go forward with all that is in flight, then back."""
    import torch

    from ravnest.model.stage.stage_program import build_stage_program

    program = _PROGRAMS.setdefault(id(blueprint), build_stage_program(blueprint, device, autocast=autocast))
    weights = [state[x.name].requires_grad_() for x in blueprint.state if x.is_trainable]
    batch = {name: torch.zeros(shape.num_rows, shape.width, device=device) for name in ("x", "y")}
    losses = [program.forward(state, {}, batch, key=(0, n)).results["loss"] for n in range(NUM_IN_FLIGHT)]
    for loss in losses:
        torch.autograd.grad(loss, weights)
    if device == "cuda":
        torch.cuda.synchronize()


_PROGRAMS: dict[int, Any] = {}


def _forget_peak(device: str) -> None:
    import gc

    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _memory(device: str, *, is_peak: bool) -> int:
    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated() if is_peak else torch.cuda.memory_allocated()
    name = "VmHWM" if is_peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _report(device: str, rows: list[Figures]) -> str:
    cells = [
        (
            row["format"],
            *(f"{row[name] / 1e6:.0f}" for name in ("state_bytes", "peak_bytes", "planned_bytes")),
            "{1:.3f} ({0:.3f} to {2:.3f})".format(*row["step_seconds"]),
            f"{row['error']:.2%}",
        )
        for row in rows
    ]
    head = ("frozen", "state MB", "peak MB", "planned MB", "seconds a step", "error")
    return f"{_METHOD}\n\nOn {device}, {SHAPES[device]}:\n\n{table(head, cells)}"
