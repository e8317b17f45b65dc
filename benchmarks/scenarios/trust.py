"""What becomes of a liar among four clusters, what its lie costs the others, and what the safeguards cost.

Lies are told by scripted peers to the real hub, on virtual time. So no second of theirs depends on this
machine. Each lie is told with several seeds of the lots, and compared with an honest run of the same seed.
What safeguards cost is measured with real programs (`benchmarks/trust_overhead.py`).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import say, table
from benchmarks.trust_overhead import (
    find_missed,
    measure_clusters,
    measure_pipeline,
    report_overhead,
    try_overhead,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "SECURITY.md"
BEGIN, END = "<!-- lies: written by benchmarks.run trust -->", "<!-- end of lies -->"
NUM_TURNS = 5
HEAD = ("one of four", "sent away", "honest named", "false result", "seconds lost", "by what, or why not")
METHOD = """The hub with four clusters of one scripted peer each, of which one lies; 960 samples, a round
after three batches of each cluster, {count} seeds of the lots. *Sent away*: for good / as one that does
nothing, of {count} runs. *Seconds lost*: median and largest, in virtual time, against {seconds:.0f} s
without a lie.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a run be a part of the whole, which takes a quarter of an hour; a part writes no page."""
    parser.add_argument("--part", choices=("lies", "clusters", "pipeline"), help="trust: only this")


def run(quick: bool, arguments: argparse.Namespace) -> tuple[dict[str, object], str, list[str]]:
    if quick:
        figures, _, missed = _tell_lies(1)
        return figures | {"overhead": try_overhead()}, "", missed
    if arguments.part is None:
        figures, lies, missed = _tell_lies(5)
        overhead = measure_clusters(NUM_TURNS) | measure_pipeline(NUM_TURNS)
        report = f"## What lies cost\n\n{lies}\n\n## What it costs to believe nobody\n\n"
        report += report_overhead(overhead, NUM_TURNS)
        return figures | {"overhead": overhead}, report, missed + find_missed(overhead)
    if arguments.part == "lies":
        figures, _, missed = _tell_lies(5)
        return figures, "", missed
    overhead = (measure_clusters if arguments.part == "clusters" else measure_pipeline)(NUM_TURNS)
    return {"overhead": overhead}, "", find_missed(overhead)


def _tell_lies(num_seeds: int) -> tuple[dict[str, object], str, list[str]]:
    """Return what came of each lie; with several seeds and nothing missed SECURITY.md has it, too."""
    sys.path.insert(0, str(ROOT / "tests"))
    from attacks.lies import LIES
    from support.attack_world import HONEST, LIAR, AttackWorld, outcome_of, tell

    seeds = range(num_seeds)
    honest = [outcome_of(AttackWorld(seed).run()) for seed in seeds]
    figures: dict[str, object] = {"honest_seconds": median(each.seconds for each in honest)}
    missed = [f"without a lie {each.left} left" for each in honest if each.left or not each.is_finished]
    rows: list[Sequence[object]] = []
    for lie in LIES:
        found: list[Any] = [tell(lie, seed) for seed in seeds]
        lost = [each.seconds - before.seconds for each, before in zip(found, honest, strict=True)]
        banned = sum(LIAR in each.evicted for each in found)
        idle = sum(LIAR in each.left for each in found) - banned
        named = sum(bool(set(each.left) & set(HONEST)) for each in found)
        false = sum(each.is_false or not each.is_finished for each in found)
        figures[lie.name] = {"banned": banned, "idle": idle, "named": named, "false": false, "lost": lost}
        rows.append(
            (lie.name, f"{banned} / {idle}", named, false, f"{median(lost):.0f} ({max(lost):.0f})", lie.why)
        )
        say(f"{lie.name}: {figures[lie.name]}")
        missed += [f"{lie.name}: the result is false, or there is none"] * bool(false)
        missed += [f"{lie.name}: an honest one is named"] * bool(named)
        missed += [f"{lie.name}: the liar stays"] * (
            lie.is_caught and not lie.is_drawn and banned < len(found)
        )
    seconds = median(each.seconds for each in honest)
    report = METHOD.format(count=len(seeds), seconds=seconds) + "\n" + table(HEAD, rows)
    if num_seeds > 1 and not missed:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n\n{report}\n\n{END}{after}", encoding="utf-8")
    return figures, report, missed
