"""Training on emulated devices: one small block per stage, and a timed wait for the rest of its time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from benchmarks.models import build, find_cuts, make_job
from benchmarks.swarm import LinkSpeed, Record, Setting, train

MICROBATCH_SECONDS = 0.04  # of the slowest stage
MICROBATCHES_PER_STAGE = 4  # in a batch: a lag of one update then leaves room for slow links
_SAMPLES = 512  # in a microbatch: 256 KB cross a cut


def name_model(num_stages: int) -> str:
    """Return the name of the model with a block for each stage."""
    return f"thin-128x{num_stages}-b{_SAMPLES}"


def emulate(
    shares: Sequence[float],
    link: LinkSpeed | None,
    num_updates: int,
    *,
    num_microbatches: int | None = None,
    counts_bytes: bool = False,
    num_spares: int = 0,
    is_fenced: bool = True,
    watch: Callable[[dict[Any, int], Record], None] | None = None,
) -> tuple[Record, float]:
    """Train over stages that take these shares of the slowest's time; return its seconds per sample too."""
    job, setting, seconds = lay_out(shares, num_updates, num_microbatches, num_spares)
    setting = replace(setting, link=link, counts_bytes=counts_bytes, is_fenced=is_fenced)
    return train(job, setting, watch=watch), seconds


def lay_out(
    shares: Sequence[float], num_updates: int, num_microbatches: int | None = None, num_spares: int = 0
) -> tuple[Any, Setting, float]:
    """Return a job, the emulated devices it is spread over, and the slowest's seconds per sample."""
    from ravnest.model.blueprint.slicing import slice_blueprint
    from ravnest.model.stage.profile import count_flops, measure

    num_microbatches = num_microbatches or MICROBATCHES_PER_STAGE * len(shares)
    name = name_model(len(shares))
    made, job = build(name), make_job(name, num_microbatches, num_updates)
    blueprint = job.capture().blueprint
    cuts = find_cuts(made, measure(blueprint, _SAMPLES), range(1, len(shares)))
    edges = [0, *cuts, blueprint.num_positions]
    work = [sum(count_flops(slice_blueprint(blueprint, *edge), _SAMPLES)) for edge in pairwise(edges)]
    speeds = [flops / (MICROBATCH_SECONDS * share) for flops, share in zip(work, shares, strict=True)]
    setting = Setting(
        speeds + [1e9] * num_spares,
        cuts,
        is_emulated=True,
    )
    slowest = max(flops / speed for flops, speed in zip(work, speeds, strict=True))
    return job, setting, slowest / _SAMPLES
