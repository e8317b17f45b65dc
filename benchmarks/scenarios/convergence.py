"""What clusters and stages cost in loss: real swarms against synchronous training in one process."""

import math
import os
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measure import say, table
from benchmarks.swarm import Setting, train

Figures = dict[str, Any]

NUM_CLUSTERS, NUM_STAGES = (1, 2, 4), (1, 2, 4)
NUM_UPDATES, BATCH_SIZE, LENGTH = 1600, 16, 32
NUM_VALIDATION = 1024
RATE = 8e-3
TARGET = 0.025
_CORES_EACH = 5
FORMATS = ("bf16", "int8", "int4")
DOCS = Path(__file__).parents[2] / "docs"


def run(quick: bool) -> tuple[Figures, str, list[str]]:
    if quick:
        return _check(), "", []
    # Trainings do not hear of each other: side by side where there are cores for it, one by one elsewhere.
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) // _CORES_EACH)) as pool:
        cells = [(clusters, stages) for clusters in reversed(NUM_CLUSTERS) for stages in NUM_STAGES]
        swarms = {cell: pool.submit(_swarm, *cell) for cell in cells}
        longest = [pool.submit(_alone, BATCH_SIZE, times * NUM_UPDATES) for times in NUM_CLUSTERS[1:]]
        waiting = {
            clusters: pool.submit(_alone, clusters * BATCH_SIZE, NUM_UPDATES) for clusters in NUM_CLUSTERS
        }
        coded = {name: pool.submit(_swarm, 2, 1, NUM_UPDATES, name) for name in FORMATS}
        alone = {clusters: each.result() for clusters, each in waiting.items()}
        longer = {
            1: alone[1],
            **dict(zip(NUM_CLUSTERS[1:], (each.result() for each in longest), strict=True)),
        }
        grid = {cell: swarms[cell].result() for cell in sorted(swarms)}
        formats = {
            "fp32": grid[2, 1]["loss"],
            **{name: each.result()["loss"] for name, each in coded.items()},
        }
    for (clusters, stages), found in grid.items():
        found["over_synchronous"] = _short(found["loss"] / alone[clusters] - 1)
        found["speed_up"] = _short(_updates_to(longer, found["loss"]) / NUM_UPDATES)
        say(f"{clusters} clusters of {stages} stages: {found}")
    figures: Figures = {
        "synchronous": {str(clusters): _short(loss) for clusters, loss in alone.items()},
        "one_cluster_longer": {str(times): _short(loss) for times, loss in longer.items()},
        "swarms": {f"{clusters} x {stages}": found for (clusters, stages), found in grid.items()},
        "formats": formats,
    }
    missed = [
        f"{name}: the loss is {found['over_synchronous']:.1%} over synchronous training, not {TARGET:.1%}"
        for name, found in figures["swarms"].items()
        if found["over_synchronous"] > TARGET
    ]
    DOCS.joinpath("convergence.svg").write_text(_draw(alone, grid))
    return figures, _report(figures), missed


def _check() -> Figures:
    """Run a short one: two clusters of two stages learn, and a round is committed."""
    found = _swarm(2, 2, num_updates=20)
    assert found["loss"] < math.log(256)
    assert found["rounds"] >= 1
    return found


def _job(batch_size: int, num_updates: int) -> Any:
    """Return the training of a small GPT, one update per batch, each sample once."""
    import torch
    import torch.nn.functional as F

    import ravnest as rv
    from ravnest.cli.demo_jobs import Gpt
    from ravnest.requester.lr_schedules import cosine

    torch.manual_seed(0)
    return rv.Job(
        Gpt(),
        _draw_pieces(batch_size * num_updates, is_held_out=False),
        batch_size=batch_size,
        val_data=_draw_pieces(NUM_VALIDATION, is_held_out=True),
        loss=lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["y"].flatten()),
        learning_rate=RATE,
        schedule=cosine(warmup=0.05),
    )


def _draw_pieces(count: int, *, is_held_out: bool) -> dict[str, Any]:
    """Return pieces of the standard library's sources; every tenth file is held out."""
    import torch

    files = enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    text = b"".join(file.read_bytes() for index, file in files if (index % 10 == 0) == is_held_out)
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.randint(
        len(corpus) - LENGTH, (count, 1), generator=torch.Generator().manual_seed(int(is_held_out))
    )
    pieces = corpus[starts + torch.arange(LENGTH + 1)].long()
    return {"x": pieces[:, :-1].contiguous(), "y": pieces[:, 1:].contiguous()}


def _alone(batch_size: int, num_updates: int) -> float:
    """Return the validation loss of the same recipe in one process, with nothing late."""
    from ravnest.cli.demo_jobs import train_plain_loop

    job = _job(batch_size, num_updates)
    loss = train_plain_loop(job, job.capture().blueprint).metrics["val_loss"]
    say(f"one process, batches of {batch_size}, {num_updates} updates: {loss:.4f}")
    return loss


def _swarm(clusters: int, stages: int, num_updates: int = NUM_UPDATES, deltas: str = "fp32") -> Figures:
    """Train with the default settings of one PC; each cluster makes `num_updates` of BATCH_SIZE samples."""
    from ravnest.config import Averaging, WireFormat
    from ravnest.hub.coordinator.notices import RoundEnded
    from ravnest.requester.session import LOCAL_PLAN

    job = _job(BATCH_SIZE, clusters * num_updates)
    setting = Setting([3e10] * (clusters * stages), cuts=_equal_cuts(job, stages), num_clusters=clusters)
    plan = replace(LOCAL_PLAN, overhead_bytes=0.0, deltas=WireFormat(deltas), clusters=99)
    plan = replace(plan, averaging=Averaging.OVERLAPPED)
    record = train(job, setting, plan)
    ended = [news for _, news in record.news if isinstance(news, RoundEnded)]
    return {
        "loss": _short(record.metrics["val_loss"]),
        "rounds": sum(news.is_committed for news in ended),
        "lost_rounds": sum(not news.is_committed for news in ended),
        "microbatches": record.cluster.accumulate,
        "lag": _short(_mean([report.lag for _, _, report in record.reports])),
    }


def _equal_cuts(job: Any, stages: int) -> list[int]:
    """Return the positions that give every stage the same work."""
    import numpy as np

    from ravnest.model.profile import measure

    profile = measure(job.capture().blueprint, BATCH_SIZE)
    work = np.cumsum(np.add(profile.forward_flops, profile.backward_flops))
    return [int(np.searchsorted(work, work[-1] * part / stages)) + 1 for part in range(1, stages)]


def _updates_to(longer: dict[int, float], loss: float) -> float:
    """Return after how many updates one cluster alone has this loss, between and beyond those measured."""
    points = sorted((math.log(times * NUM_UPDATES), value) for times, value in longer.items())
    pairs = list(pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if loss >= pair[1][1]), pairs[-1])
    return math.exp(x0 + (loss - y0) * (x1 - x0) / (y1 - y0))


def _mean(values: list[int]) -> float:
    return sum(values) / max(len(values), 1)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _draw(alone: dict[int, float], grid: dict[tuple[int, int], Figures]) -> str:
    """Return a picture: loss over synchronous training, a group of bars for each number of clusters."""
    from ravnest.views.plan_picture import draw_box, draw_label, draw_path

    wide, high, top = 60.0, 200.0, 0.04
    parts = [draw_label(10, 20, "validation loss over synchronous training at equal samples", "head")]
    for share in (0.0, 0.01, 0.02, TARGET, 0.03, 0.04):
        y = 40 + high * (1 - share / top)
        parts += [
            draw_path(f"M50 {y:.1f}H{70 + 4 * wide * len(alone)}", "target" if share == TARGET else "line")
        ]
        parts += [draw_label(8, y + 4, f"{share:.1%}")]
    for group, clusters in enumerate(alone):
        for place, stages in enumerate(NUM_STAGES):
            share = grid[clusters, stages]["over_synchronous"]
            size = high * min(max(share, 0.0), top) / top
            x = 70 + group * 4 * wide + place * wide
            parts.append(draw_box(x, 40 + high - size, wide - 12, size, f"bar{place}"))
            parts.append(draw_label(x, 34 + high - size, f"{share:+.1%}"))
            parts.append(draw_label(x, 256, f"P = {stages}"))
        parts.append(
            draw_label(70 + group * 4 * wide + wide, 276, f"{clusters} cluster{'s' * (clusters > 1)}")
        )
    style = (
        "text{font:12px sans-serif;fill:#333}.head{font-weight:bold}.line{stroke:#ddd}.target{stroke:#c33}"
        ".bar0{fill:#9ecae1}.bar1{fill:#4292c6}.bar2{fill:#08519c}"
    )
    size = f'width="{90 + 4 * wide * len(alone):.0f}" height="290"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _report(figures: Figures) -> str:
    rows = [
        [
            name,
            found["loss"],
            figures["synchronous"][name.split()[0]],
            f"{found['over_synchronous']:+.1%}",
            found["speed_up"],
            found["rounds"],
            found["lost_rounds"],
            found["microbatches"],
            found["lag"],
        ]
        for name, found in figures["swarms"].items()
    ]
    head = [
        "clusters x stages",
        "loss",
        "synchronous",
        "over it",
        "speed-up",
        "rounds",
        "lost",
        "microbatches",
    ]
    longer = ", ".join(f"{times} x {loss}" for times, loss in figures["one_cluster_longer"].items())
    return _METHOD.format(
        grid=table([*head, "mean lag"], rows),
        longer=longer,
        formats=table(["deltas", "loss"], [[name, loss] for name, loss in figures["formats"].items()]),
    )


_METHOD = f"""\
A GPT of four blocks, width 64, on the sources of Python's standard library, {LENGTH} bytes at a time; every
tenth file is held out. Real peers and a hub on this PC, the default recipe and settings, rate {RATE:g} with
a cosine. Every cluster makes {NUM_UPDATES} updates of {BATCH_SIZE} samples, each sample once. Synchronous is
one process that makes as many updates of batches as large as those of all clusters together: data parallel
without lag. One seed; what is late depends on the machine, which all peers share. So does the loss: with 800
updates and four clusters on two shared cores, where a round takes four times as long, it was 5.3 % over it.

The speed-up is how many updates one process with batches of {BATCH_SIZE} needs for the same loss, over
{NUM_UPDATES}, read off a line through its losses after 1, 2 and 4 times as many ({{longer}}).

{{grid}}

![loss over synchronous training](../../docs/convergence.svg)

What travels in a round, two clusters of one stage:

{{formats}}
"""
