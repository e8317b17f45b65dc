"""What clusters, stages and rounds cost in loss: real swarms that share each batch, against one process.

`--out FILE` keeps each training as a line of JSON as it ends and skips what is there; `--given FILE ...`
writes the report of such files and trains nothing.
"""

import json
import math
import multiprocessing
import os
import sysconfig
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
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
_MICROBATCHES = 2  # of a batch in one stage: fewer would say nothing of the noise scale


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

    @property
    def cores(self) -> float:
        """How many cores a training keeps busy, about: clusters and stages wait for each other."""
        each = 0.5 if self.stages == 1 else 0.25
        return 1.0 if not self.clusters else 0.5 + each * self.clusters * self.stages


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--updates", type=int, default=NUM_UPDATES, help="of every training")
    parser.add_argument("--out", help="a file for a line of JSON per training; those in it are not run again")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no training after so long")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="to keep busy")
    parser.add_argument("--cells", nargs="+", metavar="NAME", help='only these, like "4 x 1, exact"')
    parser.add_argument("--given", nargs="+", metavar="FILE", help="write the report of these files")


def run(quick: bool, options: Namespace) -> tuple[Figures, str, list[str]]:
    if quick:
        return _check(), "", []
    if options.given:
        return _conclude(_read(options.given, options.updates), options.updates)
    chosen = [cell for cell in _cells() if not options.cells or cell.name in options.cells]
    found = _read([options.out] if options.out else [], options.updates)
    asked = [cell for cell in chosen if cell.name not in found]
    for cell, result in _train_all(asked, options):
        say(f"{cell.name}: {result}")
        found[cell.name] = result
        if options.out:
            with Path(options.out).open("a") as file:
                file.write(json.dumps({"updates": options.updates, "cell": cell.name, **result}) + "\n")
    return _conclude(found, options.updates)


def _train_all(cells: list[Cell], options: Namespace) -> Iterable[tuple[Cell, Figures]]:
    """Train side by side where there are cores for it, one by one elsewhere; give each as it ends."""
    until = time.monotonic() + 60 * options.minutes
    left, running = list(cells), dict[Future[Figures], Cell]()
    with ProcessPoolExecutor(options.cores, multiprocessing.get_context("spawn"), _set_up) as pool:
        while left or running:
            free = options.cores - sum(each.cores for each in running.values())
            fitting = [each for each in left if each.cores <= free or not running]
            if fitting and time.monotonic() < until:
                left.remove(fitting[0])
                running[pool.submit(_measure, fitting[0], options.updates)] = fitting[0]
                continue
            left = left if time.monotonic() < until else []
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()


def _set_up() -> None:
    """One thread for each program: the model is small and the programs many."""
    import torch

    torch.set_num_threads(1)


def _cells() -> list[Cell]:
    """Return all trainings, those that tell most first, and long ones before short ones."""
    loops = [Cell(0, 1, 0, times) for times in (1.0, *SHORTER)]
    often, seldom = UPDATES_BETWEEN
    exact = [Cell(clusters, 1, 0) for clusters in (4, 8, 2)]
    one_stage = [Cell(clusters, 1, every) for every in (often, seldom) for clusters in (4, 2, 8)]
    more_stages = [Cell(clusters, 4, every) for every in (often, seldom) for clusters in (4, 2, 8)]
    alone = [Cell(1, stages, 0) for stages in (4, 1)]
    return [
        *exact[:2],
        *loops,
        *one_stage[:3],
        *alone,
        *more_stages[:2],
        *exact[2:],
        *one_stage[3:],
        *more_stages[2:],
    ]


def _read(files: Iterable[str], num_updates: int) -> dict[str, Figures]:
    """Return the trainings that earlier calls have kept."""
    lines = [line for file in files if Path(file).exists() for line in Path(file).read_text().splitlines()]
    results = [json.loads(line) for line in lines]
    return {each.pop("cell"): each for each in results if each.pop("updates") == num_updates}


def _measure(cell: Cell, num_updates: int) -> Figures:
    started = time.monotonic()
    is_loop = not cell.clusters
    found = (
        {"loss": _short(_alone(round(cell.times * num_updates)))} if is_loop else _swarm(cell, num_updates)
    )
    return {**found, "seconds": round(time.monotonic() - started), "machine": f"{os.cpu_count()} cores"}


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
            "foreseen": _short(_foresee(cell, num_updates, [None])),
            "foreseen_measured": _foresee_measured(cell, num_updates, result, 4),
            "foreseen_early": _foresee_measured(cell, num_updates, result, 1),
        }
    missed = [f"{cell.name} was not measured" for cell in _cells() if cell.name not in found]
    missed += [text for cell in _cells() if cell.name in rows for text in _judge(cell, rows[cell.name])]
    figures = {"one_process": {f"{times:g}": loss for times, loss in sorted(curve.items())}, "swarms": rows}
    return figures, _report(figures, num_updates), missed


def _judge(cell: Cell, row: Figures) -> list[str]:
    """Return what a training misses; the speed-up is asked for where the noise allows it."""
    missed, often = [], UPDATES_BETWEEN[0]
    expected = row["foreseen_measured"] or row["foreseen"]
    if cell.every in (0, often) and row["over_one_process"] > TARGET:
        missed.append(f"{cell.name}: the loss is {row['over_one_process']:+.1%} over one process")
    if cell.clusters == 4 and cell.every == often and row["speed_up"] < LEAST_SPEED_UP * 4 <= 4 * expected:
        missed.append(f"{cell.name}: the speed-up is {row['speed_up']} of 4")
    return missed


def _foresee_measured(cell: Cell, num_updates: int, result: Figures, num_quarters: int) -> float | None:
    """Return the efficiency that follows from the noise scale that stages measured in the first quarters."""
    found = result.get("noise_quarters", [])[:num_quarters]
    return _short(_foresee(cell, num_updates, found)) if found else None


def _foresee(cell: Cell, num_updates: int, noises: Sequence[float | None]) -> float:
    """Return the planner's efficiency, the mean over parts of the run with these noise scales."""
    from ravnest.config import Averaging
    from ravnest.plan.sharing import TrainingLength, efficiency

    how = Averaging.BLOCKING if cell.every else Averaging.EXACT
    length = TrainingLength(BATCH_SIZE, num_updates)
    lengths = [replace(length, noise=noise) for noise in noises]
    return sum(efficiency(each, cell.clusters, how, True, cell.every) for each in lengths) / len(lengths)


def _check() -> Figures:
    """Run a short one: two clusters of two stages share batches and learn, and a round is committed."""
    found = _swarm(Cell(2, 2, 5), num_updates=20)
    assert found["loss"] < math.log(256)
    assert found["rounds"] >= 1
    return found


def _job(num_updates: int, average_every: int | str = "auto", microbatches: int | str = "auto") -> Any:
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
        microbatches=microbatches,
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
    every = "auto" if cell.clusters == 1 or is_exact else cell.every
    job = _job(num_updates, every, _MICROBATCHES if cell.stages == 1 else "auto")
    cuts = _equal_cuts(job, cell.stages)
    setting = Setting([3e10] * (cell.clusters * cell.stages), cuts=cuts, num_clusters=cell.clusters)
    plan = replace(LOCAL_PLAN, overhead_bytes=0.0, deltas=WireFormat.FP32, clusters=99)
    plan = replace(plan, averaging=Averaging.EXACT if is_exact else Averaging.BLOCKING)
    record = train(job, setting, plan)
    ended = [news for _, news in record.news if isinstance(news, RoundEnded)]
    noise = [report.noise for _, _, report in record.reports if report.noise is not None]
    quarters = [noise[len(noise) * k // 4 : len(noise) * (k + 1) // 4] for k in range(4)]
    told = [news.noise for _, news in record.news if isinstance(news, NoiseFound)]
    return {
        "loss": _short(record.metrics["val_loss"]),
        "rounds": sum(news.is_committed for news in ended),
        "lost_rounds": sum(not news.is_committed for news in ended),
        "microbatches": record.cluster.accumulate,
        "lag": _short(_mean([report.lag for _, _, report in record.reports])),
        "noise_quarters": [_short(_scale(each)) for each in quarters] if len(noise) >= 4 else [],
        "noise_told": [_short(each) for each in told],
    }


def _equal_cuts(job: Any, stages: int) -> list[int]:
    """Return the positions that give every stage the same work."""
    import numpy as np

    from ravnest.model.stage.profile import measure

    profile = measure(job.capture().blueprint, BATCH_SIZE)
    work = np.cumsum(np.add(profile.forward_flops, profile.backward_flops))
    return [int(np.searchsorted(work, work[-1] * part / stages)) + 1 for part in range(1, stages)]


def _scale(noise: Sequence[Any]) -> float:
    """Return the noise scale that these reports of stages add up to."""
    return float(sum(each.variance for each in noise) / max(sum(each.signal for each in noise), 1e-30))


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
            " ".join(f"{each:.3g}" for each in found.get("noise_quarters", ())) or "-",
            found["foreseen"],
            found["foreseen_measured"] or "-",
            found["foreseen_early"] or "-",
            found["rounds"],
            found["lost_rounds"],
            found["microbatches"],
            found["lag"],
            found.get("seconds", "-"),
        ]
        for name, found in figures["swarms"].items()
    ]
    head = ["clusters x stages", "loss", "over one process", "e", "speed-up"]
    head += ["noise scale by quarters", "e, first guess", "e, noise measured", "e, first quarter's noise"]
    head += ["rounds", "lost"]
    offs = [f"{_off(figures['swarms'].values(), name)} {told}" for name, told in _FORESEEN.items()]
    machines = sorted({found["machine"] for found in figures["swarms"].values() if "machine" in found})
    curve = ", ".join(f"{times} x {loss}" for times, loss in figures["one_process"].items())
    return _METHOD.format(
        grid=table([*head, "microbatches", "mean lag", "seconds"], rows),
        curve=curve,
        num_updates=num_updates,
        offs=", ".join(offs),
        machines=", ".join(machines) or "this one",
    )


_FORESEEN = {
    "foreseen": "with the first guess",
    "foreseen_measured": "with the noise that was measured",
    "foreseen_early": "with that of the first quarter",
}


def _off(rows: Iterable[Figures], name: str) -> str:
    """Return how far foreseen e of clusters that average is from measured e, as a median."""
    pairs = [(row[name], row["efficiency"]) for row in rows if row["rounds"] and row[name]]
    return f"{median(abs(x - y) for x, y in pairs):.2f}" if pairs else "-"


_METHOD = f"""\
A GPT of four blocks, width 64, on the sources of Python's standard library, {LENGTH} bytes at a time; every
tenth file is held out. Real peers and a hub on one PC, the default recipe, rate {RATE:g} with a cosine. All
make {{num_updates}} updates of {BATCH_SIZE} samples; clusters share each batch and stand still while they
average (`blocking`), every 5 or every 60 updates, or sum the gradients of every batch (`exact`). One process
makes the same updates of the same batches with nothing late. One seed. Trained on: {{machines}}.

e is how many updates one process needs for the same loss, over those made; read off its losses after other
numbers of updates ({{curve}}). The speed-up is e times the clusters: what C times the samples per second are
worth. The noise scale is in samples, as stages measured it in each quarter of the run. The planner's formula
(docs/quality.md) gives e from its first guess, from the noise that was measured, as the mean over quarters,
and from that of the first quarter alone. Sums, and shares that average every 5 updates, are to be within
{TARGET:.0%} of one process. Of clusters that average, foreseen e is off by (median): {{offs}}.

{{grid}}
"""
