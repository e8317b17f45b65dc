"""What the dashboard costs a training: three open tabs and none, in turn, within one run."""

import argparse
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.emulation import lay_out
from benchmarks.measure import say, spread, table
from benchmarks.swarm import Record, train

Figures = dict[str, Any]

NUM_TABS = 3
SLOWER_TARGET = 0.01  # of the rate, and of a core
STAGES = (1.0,) * 4
NUM_PAIRS, TURN_SECONDS, WARM_UP_SECONDS = 5, 12.0, 5.0
ENDLESS = 100_000  # updates; the run is stopped


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--browser", action="store_true", help="three tabs of Chromium, not three streams")


@dataclass(frozen=True, slots=True)
class Turn:
    """Some seconds of a run."""

    seconds: float
    cpu_seconds: float  # of the hub's process
    num_samples: int

    @property
    def samples_per_second(self) -> float:
        return self.num_samples / self.seconds

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
    assert all(turn.num_samples > 0 for found in turns.values() for turn in found), "nothing was trained"
    figures = _figures(turns, given.browser)
    if quick:
        return figures, "", []
    return figures, _report(figures), _missed(figures)


def _missed(figures: Figures) -> list[str]:
    """Judge the rate where the pairs agree that there is a loss, and the hub's CPU in any case."""
    ratio, extra = figures["rate_ratio"], figures["extra_cpu_share"]["median"]
    missed = []
    if ratio["median"] < 1.0 - SLOWER_TARGET and ratio["max"] < 1.0:
        missed.append(f"three tabs cost {1.0 - ratio['median']:.1%} of the rate")
    if extra > SLOWER_TARGET:
        missed.append(f"three tabs cost {extra:.1%} of a core in the hub")
    return missed


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
        "extra_cpu_share": spread(
            [1e-6 * (x.cpu_microseconds - y.cpu_microseconds) * y.samples_per_second for x, y in pairs]
        ),
        "rate_ratio": spread([one.samples_per_second / other.samples_per_second for one, other in pairs]),
        "cpu_ratio": spread([one.cpu_microseconds / other.cpu_microseconds for one, other in pairs]),
    }


def _name(has_tabs: bool) -> str:
    return "three tabs" if has_tabs else "no tab"


def _take_turn(record: Record, seconds: float) -> Turn:
    before, cpu, started = _count_samples(record), time.process_time(), time.perf_counter()
    _pass_time(seconds)
    took, used = time.perf_counter() - started, time.process_time() - cpu
    return Turn(took, used, _count_samples(record) - before)


def _count_samples(record: Record) -> int:
    return sum(size for _, size in record.leaf_times)


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
        return f"{found['median']:g} ({found['min']:g}-{found['max']:g})"

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
        tabs=figures["tabs"], rows=table(["what", *names, "three tabs / none"], rows), seconds=TURN_SECONDS
    )


_METHOD = """\
The pipeline of `benchmarks.run pipeline` with four equal emulated stages on this PC: real peers, and a hub
with its dashboard in this process. Within one run, turns of {seconds:g} s without a page and with three open
tabs follow each other, in five pairs whose order changes; ratios are within a pair. The tabs ({tabs}) are in
a process of their own. The hub's CPU is that of its whole process, the web's thread and this measurement
included. Median (smallest-largest). Where some pairs are slower with tabs and some faster, no loss was seen:
other programs on this PC move the rate more than tabs do.

{rows}
"""
