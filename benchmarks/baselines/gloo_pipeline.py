"""GPipe and 1F1B of torch.distributed.pipelining over gloo: one process per stage, one thread each.

The same blocks, the same cuts, the same batch per update and number of microbatches, the same optimizer. The
data is made in the processes that need it, so nothing but activations and gradients travels.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

SCHEDULES = ("gpipe", "1f1b")


def samples_per_second(
    model: str,
    cuts: Sequence[int],
    num_microbatches: int,
    num_updates: int,
    num_warm_up: int = 2,
    seconds: Sequence[float] = (),
) -> dict[str, float]:
    """Return the rate of each schedule; `model` is one that `benchmarks.models.build` knows.

    With `seconds` each stage is an emulated device that needs so long for a microbatch.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    numbers = ",".join(map(str, cuts))
    program = (sys.executable, "-m", "benchmarks.baselines.gloo_pipeline")
    counts = [*map(str, (num_microbatches, num_updates, num_warm_up))]
    waits = list(seconds) or [0.0] * (len(cuts) + 1)
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    num_stages = len(cuts) + 1
    programs = [
        subprocess.Popen(
            [*program, str(stage), str(waits[stage]), model, numbers, *counts],
            env=environment,
            stdout=subprocess.PIPE if stage == num_stages - 1 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for stage in range(num_stages)
    ]
    try:
        printed, _ = programs[-1].communicate(timeout=300)
        if any(program.wait(timeout=60) for program in programs):
            raise RuntimeError("a process of the gloo pipeline failed; run it by hand to see why")
    finally:
        for program in programs:
            program.kill()
    return dict(zip(SCHEDULES, map(float, printed.split()), strict=True))


def main(stage: int, seconds: float, model: str, cuts: Sequence[int], counts: Sequence[int]) -> None:
    """Run one stage through all schedules; the last one prints the rates."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    from benchmarks.models import build

    num_microbatches, num_updates, num_warm_up = counts
    torch.set_num_threads(1)
    num_stages = len(cuts) + 1
    dist.init_process_group("gloo", rank=stage, world_size=num_stages)
    made = build(model)
    edges = [0, *cuts, len(made.blocks)]
    blocks = made.blocks[edges[stage] : edges[stage + 1]]
    if seconds:
        blocks = torch.nn.Sequential(blocks, _make_slow(seconds))
    size = num_microbatches * made.microbatch_size
    inputs, targets = made.data(size)
    is_first, is_last = stage == 0, stage == num_stages - 1
    rates = []
    for kind in (ScheduleGPipe, Schedule1F1B):
        optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-4, foreach=True)
        pipeline = PipelineStage(blocks, stage, num_stages, torch.device("cpu"))
        schedule = kind(pipeline, num_microbatches, loss_fn=made.loss)
        for update in range(num_warm_up + num_updates):
            if update == num_warm_up:
                dist.barrier()
                started = time.perf_counter()
            optimizer.zero_grad()
            if is_first:
                schedule.step(inputs, **({"target": targets} if is_last else {}))
            else:
                schedule.step(**({"target": targets, "losses": []} if is_last else {}))
            optimizer.step()
        dist.barrier()
        rates.append(num_updates * size / (time.perf_counter() - started))
    if is_last:
        print(*rates)
    dist.destroy_process_group()


def _make_slow(seconds: float) -> Any:
    """Return a layer that lets time pass: a third of it forward, the rest backward."""
    import torch

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, values: torch.Tensor) -> torch.Tensor:
            time.sleep(seconds / 3)
            return values.view_as(values)

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(2 * seconds / 3)
            return gradient

    class Slow(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return Wait.apply(values)

    return Slow()


if __name__ == "__main__":
    _, which, wait, name, places, *given = sys.argv
    main(int(which), float(wait), name, [int(cut) for cut in places.split(",") if cut], [*map(int, given)])
