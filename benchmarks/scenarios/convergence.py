"""What clusters, stages and rounds cost in loss: real swarms that share each batch, against one process."""

import json
import math
import os
import sysconfig
import time
from argparse import ArgumentParser, Namespace
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measure import say, table
from benchmarks.swarm import Setting, train

Figures = dict[str, Any]

UPDATES_BETWEEN = (5, 60)
NUM_UPDATES, BATCH_SIZE, LENGTH = 3000, 32, 32
SHORTER = (
    0.4,
    0.6,
    0.8,
    1.25,
)  # runs of one process of so many times the updates: the curve losses are read off
NUM_VALIDATION = 1024
RATE = 8e-3
TARGET, LEAST_SPEED_UP = 0.01, 0.8
_CORES_EACH = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """One training: clusters of so many stages, and updates between rounds (0: exact); no cluster: a loop."""

    clusters: int
    stages: int
    every: int
    times: float = 1.0  # as many updates

    @property
    def name(self) -> str:
        if not self.clusters:
            return f"one process x {self.times:g}"
        how = "one cluster" if self.clusters == 1 else f"every {self.every}" if self.every else "exact"
        return f"{self.clusters} x {self.stages}, {how}"


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--updates", type=int, default=NUM_UPDATES, help="of every training")
    parser.add_argument("--out", help="a file for a line of JSON per training; those in it are not run again")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no training after so long")


def run(quick: bool, options: Namespace) -> tuple[Figures, str, list[str]]:
    if quick:
        return _check(), "", []
    kept = Path(options.out) if options.out else None
    found = _read(kept, options.updates)
    until = time.monotonic() + 60 * options.minutes
    # Trainings do not hear of each other: side by side where there are cores for it, one by one elsewhere.
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) // _CORES_EACH)) as pool:
        asked = [cell for cell in _cells() if cell.name not in found]
        waiting = {pool.submit(_measure, cell, options.updates, until): cell for cell in asked}
        for done in as_completed(waiting):
            cell, result = waiting[done], done.result()
            if result is None:
                continue
            say(f"{cell.name}: {result}")
            found[cell.name] = result
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps({"updates": options.updates, "cell": cell.name, **result}) + "\n")
    return _conclude(found, options.updates)


def _cells() -> list[Cell]:
    """Return all trainings, those that tell most first."""
    loops = [Cell(0, 1, 0, times) for times in (1.0, *SHORTER)]
    often, seldom = UPDATES_BETWEEN
    one_stage = [Cell(clusters, 1, every) for every in (often, seldom) for clusters in (4, 2, 8)]
    exact = [Cell(clusters, 1, 0) for clusters in (4, 2, 8)]
    more_stages = [Cell(clusters, 4, often) for clusters in (4, 2, 8)]
    alone = [Cell(1, stages, 0) for stages in (4, 1)]
    return [
        *loops,
        *one_stage[:3],
        exact[0],
        more_stages[0],
        alone[0],
        *one_stage[3:],
        *more_stages[1:],
        *exact[1:],
        alone[1],
    ]


def _read(kept: Path | None, num_updates: int) -> dict[str, Figures]:
    """Return the trainings that an earlier call has kept."""
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    results = [json.loads(line) for line in lines]
    return {each.pop("cell"): each for each in results if each.pop("updates") == num_updates}


def _measure(cell: Cell, num_updates: int, until: float) -> Figures | None:
    if time.monotonic() > until:
        return None
    if not cell.clusters:
        return {"loss": _short(_alone(round(cell.times * num_updates)))}
    return _swarm(cell, num_updates)


def _conclude(found: dict[str, Figures], num_updates: int) -> tuple[Figures, str, list[str]]:
    curve = {
        times: found[name]["loss"]
        for times in (1.0, *SHORTER)
        if (name := Cell(0, 1, 0, times).name) in found
    }
    if 1.0 not in curve:
        return {"trainings": found}, "", ["one process was not measured"]
    rows: Figures = {}
    for cell in _cells():
        if not cell.clusters or cell.name not in found:
            continue
        result = found[cell.name]
        share = _times_to(curve, result["loss"]) if len(curve) > 1 else math.nan
        rows[cell.name] = {
            **result,
            "over_one_process": _short(result["loss"] / curve[1.0] - 1),
            "efficiency": _short(share),
            "speed_up": _short(share * cell.clusters),
        }
    missed = [f"{cell.name} was not measured" for cell in _cells() if cell.name not in found]
    for cell in _cells():
        row = rows.get(cell.name)
        if row is None:
            continue
        is_close = row["over_one_process"] <= TARGET
        if cell.every in (0, UPDATES_BETWEEN[0]) and not is_close:
            missed.append(f"{cell.name}: the loss is {row['over_one_process']:+.1%} over one process")
        if cell.clusters == 4 and cell.every == UPDATES_BETWEEN[0] and row["speed_up"] < LEAST_SPEED_UP * 4:
            missed.append(f"{cell.name}: the speed-up is {row['speed_up']} of 4")
    figures = {"one_process": {f"{times:g}": loss for times, loss in sorted(curve.items())}, "swarms": rows}
    return figures, _report(figures, num_updates), missed


def _check() -> Figures:
    """Run a short one: two clusters of two stages share batches and learn, and a round is committed."""
    found = _swarm(Cell(2, 2, 5), num_updates=20)
    assert found["loss"] < math.log(256)
    assert found["rounds"] >= 1
    return found


def _job(num_updates: int, average_every: int | str = "auto") -> Any:
    """Return the training of a small GPT, one update per batch, each sample once."""
    import torch
    import torch.nn.functional as F

    import ravnest as rv
    from ravnest.cli.demo_jobs import Gpt
    from ravnest.requester.lr_schedules import cosine

    torch.manual_seed(0)
    return rv.Job(
        Gpt(),
        _draw_pieces(BATCH_SIZE * num_updates, is_held_out=False),
        batch_size=BATCH_SIZE,
        val_data=_draw_pieces(NUM_VALIDATION, is_held_out=True),
        loss=lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["y"].flatten()),
        learning_rate=RATE,
        schedule=cosine(warmup=0.05),
        average_every=average_every,
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


def _alone(num_updates: int) -> float:
    """Return the validation loss of the same recipe in one process, with nothing late."""
    from ravnest.cli.demo_jobs import train_plain_loop

    job = _job(num_updates)
    return train_plain_loop(job, job.capture().blueprint).metrics["val_loss"]


def _swarm(cell: Cell, num_updates: int) -> Figures:
    """Train the same batches in a swarm, which shares each of them."""
    from ravnest.config import Averaging, WireFormat
    from ravnest.hub.coordinator.notices import NoiseFound, RoundEnded
    from ravnest.requester.session import LOCAL_PLAN

    is_exact = cell.clusters > 1 and not cell.every
    job = _job(num_updates, "auto" if cell.clusters == 1 or is_exact else cell.every)
    cuts = _equal_cuts(job, cell.stages)
    setting = Setting([3e10] * (cell.clusters * cell.stages), cuts=cuts, num_clusters=cell.clusters)
    plan = replace(LOCAL_PLAN, overhead_bytes=0.0, deltas=WireFormat.FP32, clusters=99)
    plan = replace(plan, averaging=Averaging.EXACT if is_exact else Averaging.BLOCKING)
    record = train(job, setting, plan)
    ended = [news for _, news in record.news if isinstance(news, RoundEnded)]
    noise = [report.noise for _, _, report in record.reports if report.noise is not None]
    scale = sum(each.variance for each in noise) / max(sum(each.signal for each in noise), 1e-30)
    told = [news.noise for _, news in record.news if isinstance(news, NoiseFound)]
    return {
        "loss": _short(record.metrics["val_loss"]),
        "rounds": sum(news.is_committed for news in ended),
        "lost_rounds": sum(not news.is_committed for news in ended),
        "microbatches": record.cluster.accumulate,
        "lag": _short(_mean([report.lag for _, _, report in record.reports])),
        "noise_scale": _short(scale) if noise else None,  # the mean over the run, of stages that report most
        "noise_told": [_short(each) for each in told],
    }


def _equal_cuts(job: Any, stages: int) -> list[int]:
    """Return the positions that give every stage the same work."""
    import numpy as np

    from ravnest.model.stage.profile import measure

    profile = measure(job.capture().blueprint, BATCH_SIZE)
    work = np.cumsum(np.add(profile.forward_flops, profile.backward_flops))
    return [int(np.searchsorted(work, work[-1] * part / stages)) + 1 for part in range(1, stages)]


def _times_to(curve: dict[float, float], loss: float) -> float:
    """Return after how many times the updates one process has this loss, also beyond those measured."""
    points = sorted((math.log(times), value) for times, value in curve.items())
    pairs = list(pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if loss >= pair[1][1]), pairs[-1])
    return math.exp(x0 + (loss - y0) * (x1 - x0) / (y1 - y0))


def _mean(values: list[int]) -> float:
    return sum(values) / max(len(values), 1)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _report(figures: Figures, num_updates: int) -> str:
    rows = [
        [
            name,
            found["loss"],
            f"{found['over_one_process']:+.1%}",
            found["efficiency"],
            found["speed_up"],
            found["noise_scale"] or "-",
            found["rounds"],
            found["lost_rounds"],
            found["microbatches"],
            found["lag"],
        ]
        for name, found in figures["swarms"].items()
    ]
    head = ["clusters x stages", "loss", "over one process", "e", "speed-up", "noise scale", "rounds", "lost"]
    curve = ", ".join(f"{times} x {loss}" for times, loss in figures["one_process"].items())
    return _METHOD.format(
        grid=table([*head, "microbatches", "mean lag"], rows), curve=curve, num_updates=num_updates
    )


_METHOD = f"""\
A GPT of four blocks, width 64, on the sources of Python's standard library, {LENGTH} bytes at a time; every
tenth file is held out. Real peers and a hub on one PC, the default recipe, rate {RATE:g} with a cosine. All
make {{num_updates}} updates of {BATCH_SIZE} samples; clusters share each batch and stand still while they
average (`blocking`), every 5 or every 60 updates, or sum the gradients of every batch (`exact`). One process
makes the same updates of the same batches with nothing late. One seed.

e is how many updates one process needs for the same loss, over those made; read off its losses after other
numbers of updates ({{curve}}). The speed-up is e times the clusters: what C times the samples per second are
worth. The noise scale is in samples, as stages measured it; a batch of one microbatch says nothing of it.

{{grid}}
"""
