"""Every example of examples/ in a swarm on this PC against a plain loop in one process, update for update.

`--only NAME` runs some of them. `--out FILE` keeps each run as a line of JSON and skips what is there;
`--report FILE` writes the report of such a file.
"""

import argparse
import json
import math
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gallery_runs import GALLERY, Example, GalleryRun, Record, Scorer, load_example, make_run
from benchmarks.measure import say, table

NODES, NUM_REPEATS = 3, 3
MOST_WORSE = 0.01  # of the plain loop's loss, or a point of a share
_WRITTEN_LATER = (
    "The time above is that of writing this page. The runs were made before; their CPU seconds are below."
)
_TRAINED_QUICKLY = "bert"  # of Hugging Face, padded, in two stages


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a run be a part of the whole."""
    group = parser.add_argument_group("gallery")
    group.add_argument("--only", nargs="+", choices=list(GALLERY), metavar="NAME", help="only these")
    group.add_argument("--nodes", type=int, default=NODES, metavar="N")
    group.add_argument("--repeats", type=int, default=NUM_REPEATS, metavar="N")
    group.add_argument("--out", type=Path, metavar="FILE", help="one line of JSON per run; no report")
    group.add_argument("--report", type=Path, metavar="FILE", help="write the report of such a file")


def run(quick: bool, options: argparse.Namespace) -> tuple[dict[str, Any], str, list[str]]:
    chosen = [GALLERY[name] for name in options.only or GALLERY]
    if quick:
        return _check(chosen), "", []
    records = _read(options.report or options.out)
    if not options.report:
        done = [record["run"] for record in records]
        runs = [
            GalleryRun(example.name, seed, nodes)
            for seed in range(options.repeats)
            for example in chosen
            for nodes in ((0, 1, options.nodes) if example.has_recipe else (0, options.nodes))
        ]
        records += [_make(each, options.out) for each in runs if asdict(each) not in done]
    figures, report, missed = _compare(chosen, records)
    if options.report:
        report = f"{_WRITTEN_LATER}\n\n{report}"
    return figures, "" if options.only or options.out else report, missed


def _read(file: Path | None) -> list[Record]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []


def _make(each: GalleryRun, file: Path | None) -> Record:
    """Run in a process of its own, so that examples do not meet."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        record = pool.submit(make_run, each).result()
    score = GALLERY[each.example].score
    how = f"{each.nodes} nodes" if each.nodes else record["loop"]
    say(f"{each.example}, seed {each.seed}, {how}: {score} {record['scores'][score]:.4f}")
    if file is not None:
        with file.open("a") as out:
            out.write(json.dumps(record) + "\n")
    return record


def _check(chosen: list[Example]) -> dict[str, Any]:
    """Train one tiny example, whose result loads into its model; capture and evaluate the others."""
    names = [example.name for example in chosen]
    trained = _TRAINED_QUICKLY if _TRAINED_QUICKLY in names else names[0]
    for name in names:
        if name != trained:
            job = load_example(name, is_tiny=True)
            job.capture()
            assert math.isfinite(Scorer(job).evaluate()["loss"]), name
    record = make_run(GalleryRun(trained, 0, nodes=2, is_tiny=True))
    loss = record["scores"]["loss"]
    assert loss != record["first"]["loss"], f"{trained} did not train"
    assert math.isclose(loss, record["reported"]["loss"], rel_tol=1e-3), record
    return {"captured": len(names), "trained": trained, "loss": loss}


def _compare(chosen: list[Example], records: list[Record]) -> tuple[dict[str, Any], str, list[str]]:
    figures: dict[str, Any] = {}
    rows, missed = [], []
    for example in chosen:
        own = [record for record in records if record["run"]["example"] == example.name]
        loops, alone, swarms = (
            [record for record in own if min(record["run"]["nodes"], 2) == kind] for kind in range(3)
        )
        if not loops or not swarms:
            missed.append(f"{example.name}: not measured yet")
            continue
        plain, swarm = (_median(example, found) for found in (loops, swarms))
        worse = (swarm - plain) / plain if example.score == "loss" else plain - swarm
        unit = "%" if example.score == "loss" else "points"
        figures[example.name] = {
            "score": example.score,
            "plain": round(plain, 4),
            "swarm": round(swarm, 4),
            "worse": round(worse, 4),
        }
        if alone:  # how much of it is the recipe, and how much the swarm
            recipe = _median(example, alone)
            lost = (swarm - recipe) / recipe if example.score == "loss" else recipe - swarm
            figures[example.name] |= {"one_node": round(recipe, 4), "swarm_worse": round(lost, 4)}
        if worse > MOST_WORSE:
            missed.append(f"{example.name}: {100 * worse:.1f} {unit} worse than the plain loop")
        rows.append(
            (
                f"[{example.name}](../../examples/{example.name}/model.py)",
                f"{loops[0]['parameters']:,}",
                f"{loops[0]['updates']:,}",
                f"{example.score} {swarm:.4f}",
                _show_range(example, swarms),
                f"{_median(example, alone):.4f}" if alone else "",
                f"{plain:.4f}",
                _show_range(example, loops),
                f"{-100 * worse:+.1f} {unit}",
                loops[0]["loop"],
                "; ".join(sorted({"+".join(map(str, each["stages"])) for each in swarms})),
                f"{statistics.median(each['cpu_seconds'] for each in swarms):.0f}",
                f"{statistics.median(each['cpu_seconds'] for each in loops):.0f}",
            )
        )
    return figures, _write(rows, records), missed


def _median(example: Example, records: list[Record]) -> float:
    return statistics.median(record["scores"][example.score] for record in records)


def _show_range(example: Example, records: list[Record]) -> str:
    values = [record["scores"][example.score] for record in records]
    return f"{min(values):.4f} to {max(values):.4f}"


def _write(rows: list[tuple[str, ...]], records: list[Record]) -> str:
    count = max((record["run"]["seed"] for record in records), default=-1) + 1
    nodes = max((record["run"]["nodes"] for record in records), default=0)
    head = (
        "example",
        "trained parameters",
        "updates",
        f"swarm of {nodes}",
        "from to",
        "one node, same recipe",
        "plain loop",
        "from to",
        "swarm better by",
        "its optimizer",
        "stages",
        "CPU s, swarm",
        "CPU s, loop",
    )
    times = f"medians of {count} runs with different orders of the samples, and their range"
    times = times if count > 1 else "one run of each"
    method = f"""Each example of the gallery at full size, as `rv.local(nodes={nodes})` trains it, against a
plain loop in one process: the same data, the same number of updates. The loop has the job's own optimizer and
schedule, or AdamW 1e-3 without a schedule where the job brings none. Numbers are of the validation data:
{times}. The weights that the swarm
returns are loaded with `load_state_dict` and evaluated as those of the loop are. "Better by" counts per cent
of a loss, or points of a share that is right; a target is missed at more than 1 % or 1 point worse. Stages:
`2+1` is a cluster of two stages and one of one. The CPU seconds of a swarm include the start of its programs
and the capture of the model.

AdamW 1e-3 is what most people write first; it is not tuned. Where a job brings no optimizer, swarms have the
default recipe and its schedule, so a difference is of recipe and swarm together. One node with the same
recipe, where it was run, tells them apart. [The quality report](quality.md) compares with tuned loops."""
    return f"{method}\n\n{table(head, rows)}"
