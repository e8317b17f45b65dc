"""The model that a swarm returns against that of one process: fourteen small jobs, real programs.

`--out FILE` keeps each run as a line of JSON and skips what is there; `--report FILE ...` writes the report
of such files and runs nothing. `--tune` prints plain loops over a grid, from which each task names the best.
"""

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.quality_report import make_report, show_tuning, write_pictures
from benchmarks.quality_runs import RUN_SECONDS, Run, plain_runs, read_records, run_all

Figures = dict[str, Any]
NODES, NUM_SEEDS = (1, 2, 4, 8), 3
_WIDE_MARGIN = 0.15  # of accuracy; a quick run of one seed says no more


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a run be a part of the whole."""
    group = parser.add_argument_group("quality")
    group.add_argument("--jobs", nargs="+", metavar="JOB", help="only these, by name")
    group.add_argument("--nodes", nargs="+", type=int, default=NODES, metavar="N")
    group.add_argument("--seeds", type=int, default=NUM_SEEDS, metavar="N", help="how many, from 0")
    group.add_argument(
        "--clusters", nargs="+", type=int, default=[0], metavar="N", help="force; 0: as planned"
    )
    group.add_argument(
        "--averaging", default="", help="overlapped, blocking or exact, where a plan may choose"
    )
    group.add_argument("--microbatches", type=int, default=0, metavar="N", help="of a batch; 0: as planned")
    group.add_argument("--emulate", type=float, default=0.0, metavar="FLOPS", help="nodes as slow as this")
    group.add_argument("--parallel", type=int, default=1, metavar="N", help="runs side by side")
    group.add_argument("--seconds", type=float, default=math.inf, help="begin no run after so many")
    group.add_argument(
        "--limit", type=float, default=RUN_SECONDS, help="seconds after which a run has failed"
    )
    group.add_argument("--no-plain", action="store_true", help="swarms only")
    group.add_argument("--no-swarm", action="store_true", help="plain loops only")
    group.add_argument("--out", type=Path, metavar="FILE", help="one line of JSON per run")
    group.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="write the report of these")
    group.add_argument("--tune", action="store_true", help="print plain loops over a grid")


def run(quick: bool, options: argparse.Namespace) -> tuple[Figures, str, list[str]]:
    from benchmarks.quality_jobs import TASKS

    if quick:
        return _check(), "", []
    tasks = options.jobs or list(TASKS)
    unknown = [name for name in tasks if name not in TASKS]
    if unknown:
        raise SystemExit(f"there is no job {unknown[0]}; choose from {', '.join(TASKS)}")
    if options.report:
        records = read_records(options.report)
        write_pictures(records)
        return make_report(records)
    runs = _tuning_runs(tasks, options) if options.tune else _choose_runs(tasks, options)
    records = run_all(runs, options.parallel, options.out, options.seconds, options.limit)
    if options.tune:
        return show_tuning(records)
    figures, text, missed = make_report(records)
    if options.out:  # it may be a part of the whole
        return figures, "", missed
    write_pictures(records)
    return figures, text, missed


def _choose_runs(tasks: list[str], options: argparse.Namespace) -> list[Run]:
    swarms = [
        Run(
            task,
            seed,
            nodes=nodes,
            clusters=clusters,
            averaging=options.averaging,
            emulated=options.emulate,
            microbatches=options.microbatches,
        )
        for task in tasks
        for nodes in options.nodes
        for clusters in options.clusters
        for seed in range(options.seeds)
        if clusters <= nodes
    ]
    loops = [] if options.no_plain else plain_runs(tasks, options.seeds)
    return loops + ([] if options.no_swarm else swarms)


def _tuning_runs(tasks: list[str], options: argparse.Namespace) -> list[Run]:
    from benchmarks.quality_loops import grid

    numbers = range(len(grid()))
    return [Run(task, seed, str(k)) for task in tasks for k in numbers for seed in range(options.seeds)]


def _check() -> Figures:
    """Run one job in one process and in a swarm of two: it learns, and about as much."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [Run("readme-mlp", 0, "plain"), Run("readme-mlp", 0, nodes=2)]
        loop, swarm = run_all(runs, 1, Path(folder, "runs.jsonl"), math.inf)
        assert len(read_records([Path(folder, "runs.jsonl")])) == len(runs)
    for record in (loop, swarm):
        assert "error" not in record, record["error"]
        assert all(math.isfinite(value) for value in record["scores"].values())
    found = {"plain": loop["scores"]["accuracy"], "swarm": swarm["scores"]["accuracy"]}
    assert found["plain"] > 0.9
    assert found["swarm"] > found["plain"] - _WIDE_MARGIN
    assert make_report([loop, swarm])[1]
    return found
