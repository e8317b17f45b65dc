"""What sharing a batch costs by itself: clusters in one process, averaged often, seldom or often at first.

Nothing is late and nothing fails here. `--out FILE` keeps each training as a line of JSON and skips what is
there; `--given FILE ...` writes the report of such files and trains nothing.
"""

import json
import math
import multiprocessing
import os
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.measure import say, table

if TYPE_CHECKING:
    from benchmarks.cluster_loops import Way

Figures = dict[str, Any]
JOBS, OWN_JOBS = ("gpt-200", "gpt-1000", "regression", "diffusion"), ("mlp-adamw", "gpt-adamw")
NORM_JOBS, NUM_SEEDS = ("digits-adam-mse", "digits-cnn", "resnet"), 4


def add_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("averaging")
    group.add_argument("--jobs", nargs="+", metavar="JOB", help="only these, by name")
    group.add_argument("--ways", nargs="+", metavar="WAY", help="only these, by name")
    group.add_argument("--seeds", type=int, default=NUM_SEEDS, help="how many, from 0")
    group.add_argument("--parallel", type=int, default=os.cpu_count() or 1, help="trainings side by side")
    group.add_argument("--seconds", type=float, default=math.inf, help="begin no training after so many")
    group.add_argument("--out", type=Path, metavar="FILE", help="one line of JSON per training")
    group.add_argument("--given", type=Path, nargs="+", metavar="FILE", help="write the report of these")


def find_ways() -> dict[str, "Way"]:
    """Return the ways of sharing that are compared; two rows of a kind make about as many rounds."""
    from benchmarks.cluster_loops import Way

    four = {
        "every 5": Way(4),
        "every 2 in the first quarter, then 10": Way(4, 2, 0.25, 10),
        "every update in the first tenth, then 9": Way(4, 1, 0.1, 9),
        "every 20": Way(4, seldom=20),
        "every 8 in the first fifth, then 32": Way(4, 8, 0.2, 32),
        "every update in the first tenth, then 20": Way(4, 1, 0.1, 20),
        "every update in the first 40 %, then 5": Way(4, 1, 0.4, 5),
        "every update": Way(4, seldom=1),
        "summed in the first quarter, then every 5": Way(4, summed=0.25),
        "summed in the first quarter, then every 20": Way(4, seldom=20, summed=0.25),
        "every 5, moments too": Way(4, averages_moments=True),
        "every 10, moments too": Way(4, seldom=10, averages_moments=True),
        "every 20, moments too": Way(4, seldom=20, averages_moments=True),
        "every 5, deltas of 4 bits": Way(4, bits=4),
        "every 5, deltas of 2 bits": Way(4, bits=2),
    }
    return {"one process": Way(), **four}


def find_rates() -> dict[str, "Way"]:
    """Return the ways that are compared for an optimizer of the requester's."""
    from benchmarks.cluster_loops import Way

    both = {
        f"{count} clusters, {rate}": Way(count, rate=rate) for count in (2, 4) for rate in ("given", "rule")
    }
    return {"one process": Way(), **both}


def find_sums() -> dict[str, "Way"]:
    """Return the ways that are compared for models with BatchNorm: all sum gradients."""
    from benchmarks.cluster_loops import Way

    return {"one process": Way(), **{f"{count} shares": Way(count, summed=1.0) for count in (2, 4)}}


def _ways_of(job: str) -> dict[str, "Way"]:
    return find_rates() if job in OWN_JOBS else find_sums() if job in NORM_JOBS else find_ways()


def run(quick: bool, options: Namespace) -> tuple[Figures, str, list[str]]:
    if quick:
        return _check(), "", []
    if options.given:
        return _report([record for file in options.given for record in _read(file)])
    jobs = options.jobs or (*JOBS, *OWN_JOBS, *NORM_JOBS)
    asked = [(job, name, seed) for seed in range(options.seeds) for job in jobs for name in _ways_of(job)]
    asked = [each for each in asked if not options.ways or each[1] in options.ways]
    records = _read(options.out) if options.out else []
    made = {(each["job"], each["way"], each["seed"]) for each in records}
    until = time.monotonic() + options.seconds
    with ProcessPoolExecutor(options.parallel, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(_train, *each, until) for each in asked if each not in made]
        for done in as_completed(waiting):
            record = done.result()
            if record is None:
                continue
            records.append(record)
            say(f"{record['job']}, {record['way']}, seed {record['seed']}: {record['score']:.4f}")
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    return _report(records)


def _read(file: Path) -> list[Figures]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _train(job: str, name: str, seed: int, until: float) -> Figures | None:
    import torch

    from benchmarks.cluster_loops import train_shares
    from benchmarks.quality_jobs import TASKS

    if time.monotonic() > until:
        return None
    torch.set_num_threads(1)
    way = _ways_of(job)[name]
    shared = train_shares(job, seed, way)
    head = {"job": job, "way": name, "seed": seed, "score": shared.scores[TASKS[job].score]}
    facts = {"rounds": shared.num_rounds, "noise": shared.noise, "rate_times": shared.rate_times}
    return {**head, **facts, "loss": shared.scores["loss"], "asked": asdict(way)}


def _report(records: list[Figures]) -> tuple[Figures, str, list[str]]:
    """Return medians over seeds; nothing is judged."""
    found: defaultdict[str, defaultdict[str, list[Figures]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        found[record["job"]][record["way"]].append(record)
    figures: Figures = {}
    text = _METHOD
    for job, ways in sorted(found.items()):
        alone = [each["loss"] for each in ways.get("one process", ())]
        figures[job] = {name: _numbers(each, alone) for name, each in ways.items()}
        rows = [[name, *numbers.values()] for name, numbers in figures[job].items()]
        head = ["", "loss", "smallest-largest", "over one process", "score", "rounds", "noise, last told"]
        text += f"\n## {job}\n\n{table([*head, 'rate', 'runs'], rows)}\n"
    return figures, text, []


def _numbers(records: list[Figures], alone: list[float]) -> Figures:
    losses = [each["loss"] for each in records]
    noise = [each["noise"][-1] for each in records if each["noise"]]
    return {
        "loss": f"{median(losses):.4f}",
        "spread": f"{min(losses):.4f}-{max(losses):.4f}",
        "over": f"{median(losses) / median(alone) - 1:+.1%}" if alone else "-",
        "score": f"{median(each['score'] for each in records):.4f}",
        "rounds": median(each["rounds"] for each in records),
        "noise": f"{median(noise):.3g}" if noise else "-",
        "rate": f"{median(each['rate_times'] for each in records):.2f}",
        "runs": len(records),
    }


def _check() -> Figures:
    """One cluster is the plain loop; two that average after every update learn as well."""
    from benchmarks.cluster_loops import Way, train_shares
    from benchmarks.quality_jobs import TASKS
    from benchmarks.quality_loops import RECIPE, train_loop

    task = TASKS["readme-mlp"]
    plain = train_loop(task, task.make(0), RECIPE, 0).scores
    alone = train_shares(task.name, 0, Way())
    assert math.isclose(alone.scores["loss"], plain["loss"], rel_tol=1e-3), (alone.scores, plain)
    summed = train_shares(task.name, 0, Way(4, summed=1.0))
    assert math.isclose(summed.scores["loss"], plain["loss"], rel_tol=1e-2), (summed.scores, plain)
    shared = train_shares(task.name, 0, Way(2, seldom=1))
    assert shared.num_rounds > 1
    assert shared.noise
    assert shared.scores["accuracy"] > 0.9
    return {"plain": plain, "one": alone.scores, "two": shared.scores}


_METHOD = """\
Jobs of the quality benchmark in clusters of one stage that share each batch, all in one process: nothing is
late, nothing fails, rounds are blocking means of weights and statistics. *Summed* sums the gradients of each
batch, as in exact mode; with BatchNorm each share is normalised by itself, and running statistics are means.
*Moments* averages first moments too. Deltas in few bits have one scale for 256 numbers, and what is rounded
off is added to the next one. *Rule* is the rate of an Adam of the user's as the product sets it by the noise
scale (docs/quality.md), and *rate* its factor at the end. Losses are medians over seeds, on the validation
data.
"""
