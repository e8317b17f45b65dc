"""What the dashboard costs a training: three open tabs and none, in turn, within one run."""

import argparse
import contextlib
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.emulation import lay_out
from benchmarks.measure import say, spread, table
from benchmarks.swarm import Record, train

Figures = dict[str, Any]

NUM_TABS = 3
SLOWER_TARGET = 0.01  # of the rate, and of a core
STAGES = (1.0,) * 4
NUM_PAIRS, TURN_SECONDS, WARM_UP_SECONDS = 20, 5.0, 5.0
CONFIDENCE = 0.95
ENDLESS = 100_000  # updates; the run is stopped


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--browser", action="store_true", help="three tabs of Chromium, not three streams")


@dataclass(frozen=True, slots=True)
class Turn:
    """Some seconds of a run."""

    seconds: float
    cpu_seconds: float  # of the hub's process
    num_samples: int
    samples_per_second: float  # from the first microbatch in it to the last, so that none is cut in two

    @property
    def cpu_microseconds(self) -> float:
        """Of the hub, per sample."""
        return 1e6 * self.cpu_seconds / max(1, self.num_samples)


def run(quick: bool, given: argparse.Namespace) -> tuple[Figures, str, list[str]]:
    num_pairs, seconds = (1, 1.5) if quick else (NUM_PAIRS, TURN_SECONDS)
    turns: dict[bool, list[Turn]] = {False: [], True: []}

    def follow(hub: Any, record: Record) -> None:
        try:
            _wait_for_samples(record)
            _pass_time(0.0 if quick else WARM_UP_SECONDS)
            for number in range(num_pairs):
                for has_tabs in (False, True) if number % 2 == 0 else (True, False):  # drift cancels
                    with _open_tabs(hub.dashboard, given.browser) if has_tabs else contextlib.nullcontext():
                        turn = _take_turn(record, seconds)
                    turns[has_tabs].append(turn)
                    say(
                        f"{'three tabs' if has_tabs else 'no tab'}: {turn.samples_per_second:.0f} samples/s, "
                        f"{turn.cpu_microseconds:.1f} us of the hub per sample"
                    )
        finally:
            hub.stop()

    job, setting, _ = lay_out(STAGES[:2] if quick else STAGES, ENDLESS)
    train(job, setting, follow=follow)
    assert len(turns[True]) == len(turns[False]) == num_pairs
    figures = _figures(turns, given.browser)
    if quick:
        return figures, "", []
    return figures, _report(figures), _missed(figures)


def _missed(figures: Figures) -> list[str]:
    """Judge the rate and the hub's CPU by their intervals; one that has the limit in it settles nothing."""
    ratio, extra = figures["rate_ratio"], figures["extra_cpu_share"]
    found = (
        _judge("of the rate", 1.0 - ratio["high"], 1.0 - ratio["low"]),
        _judge("of a core in the hub", extra["low"], extra["high"]),
    )
    return [reason for reason in found if reason]


def _judge(what: str, low: float, high: float) -> str:
    if high < SLOWER_TARGET:
        return ""
    cost = f"three tabs cost {low:.1%} to {high:.1%} {what}"
    return f"{cost}, at most {SLOWER_TARGET:.0%} asked" if low >= SLOWER_TARGET else f"not settled: {cost}"


def median_with_interval(values: Sequence[float]) -> dict[str, float]:
    """Return the median and where it lies with 95 % confidence, whatever the values' distribution is.

    Few values give no such interval: then it goes from the smallest to the largest.
    """
    ordered, skipped = sorted(values), 0
    below = [math.comb(len(values), k) / 2 ** len(values) for k in range(len(values))]
    while sum(below[: skipped + 1]) <= (1 - CONFIDENCE) / 2:
        skipped += 1
    skipped = max(0, skipped - 1)
    found = {
        "low": ordered[skipped],
        "median": statistics.median(values),
        "high": ordered[len(values) - 1 - skipped],
    }
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _figures(turns: dict[bool, list[Turn]], is_browser: bool) -> Figures:
    pairs = list(zip(turns[True], turns[False], strict=True))
    return {
        "tabs": "Chromium" if is_browser else "streams",
        "samples_per_second": {
            _name(key): spread([x.samples_per_second for x in turns[key]]) for key in turns
        },
        "hub_cpu_us_per_sample": {
            _name(key): spread([x.cpu_microseconds for x in turns[key]]) for key in turns
        },
        "hub_cpu_share": {
            _name(key): spread([x.cpu_seconds / x.seconds for x in turns[key]]) for key in turns
        },
        "extra_cpu_share": median_with_interval(
            [1e-6 * (x.cpu_microseconds - y.cpu_microseconds) * y.samples_per_second for x, y in pairs]
        ),
        "rate_ratio": median_with_interval(
            [one.samples_per_second / other.samples_per_second for one, other in pairs]
        ),
        "cpu_ratio": median_with_interval(
            [one.cpu_microseconds / other.cpu_microseconds for one, other in pairs]
        ),
    }


def _name(has_tabs: bool) -> str:
    return "three tabs" if has_tabs else "no tab"


def _take_turn(record: Record, seconds: float) -> Turn:
    before, cpu, started = len(record.reports), time.process_time(), time.perf_counter()
    _pass_time(seconds)
    took, used = time.perf_counter() - started, time.process_time() - cpu
    passed = [(at, each.num_samples) for at, _, each in record.reports[before:] if each.loss is not None]
    assert len(passed) > 1, "nothing was trained"
    num_samples = sum(size for _, size in passed)
    return Turn(took, used, num_samples, (num_samples - passed[0][1]) / (passed[-1][0] - passed[0][0]))


def _wait_for_samples(record: Record) -> None:
    while not record.leaf_times:
        _pass_time(0.1)


def _pass_time(seconds: float) -> None:
    threading.Event().wait(seconds)


@contextlib.contextmanager
def _open_tabs(link: str, is_browser: bool) -> Iterator[None]:
    words = [sys.executable, "-m", "benchmarks.open_pages", link, str(NUM_TABS)]
    words += ["--browser"] if is_browser else []
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as pages:
        assert pages.stdout is not None
        assert pages.stdout.read(1) == b".", "the pages did not open"
        yield
        pages.communicate()


def _report(figures: Figures) -> str:
    def show(found: dict[str, float]) -> str:
        low, high = (found[name] for name in (("low", "high") if "low" in found else ("min", "max")))
        return f"{found['median']:g} ({low:g} to {high:g})"

    names = ("no tab", "three tabs")
    rows = [
        [
            "samples/s",
            *(show(figures["samples_per_second"][name]) for name in names),
            show(figures["rate_ratio"]),
        ],
        [
            "CPU of the hub, us per sample",
            *(show(figures["hub_cpu_us_per_sample"][name]) for name in names),
            show(figures["cpu_ratio"]),
        ],
        ["CPU of the hub, of a core", *(show(figures["hub_cpu_share"][name]) for name in names), ""],
        ["more CPU of the hub at the same rate, of a core", "", show(figures["extra_cpu_share"]), ""],
    ]
    return _METHOD.format(
        tabs=figures["tabs"],
        rows=table(["what", *names, "three tabs / none"], rows),
        seconds=TURN_SECONDS,
        pairs=NUM_PAIRS,
    )


_METHOD = """\
The pipeline of `benchmarks.run pipeline` with four equal emulated stages on this PC: real peers, and a hub
with its dashboard in this process. Within one run, turns of {seconds:g} s without a page and with three open
tabs follow each other, in {pairs} pairs whose order changes; ratios and differences are within a pair. The
tabs ({tabs}) are in a process of their own. The hub's CPU is that of its whole process, the web's thread and
this measurement included. Figures of turns: median (smallest to largest). Ratios and differences: median
(its 95 % interval). A target is met if the whole interval is within it, and missed if all of it is beyond.

{rows}
"""
