"""Half an hour in which peers come and go all the time: nothing gets stuck, no memory grows, the loss falls.

`--quick` is the same for three minutes, or longer on a PC that is too busy to learn enough in them. Two peers
are spared, so that their memory is seen from end to end.
"""

import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.joining import Peers
from benchmarks.measure import held_by_peer, memory_of, say, spread, table
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    ClusterDissolved,
    EpochDone,
    Joined,
    Left,
    Notice,
    Recovered,
    RoundEnded,
    Trained,
    WorkLost,
)

Figures = dict[str, Any]

FULL_SECONDS, QUICK_SECONDS = 1800.0, 180.0
NUM_PEERS, NUM_SPARED = 8, 2
FAULT_SECONDS = 20.0
STUCK_SECONDS, GROWTH, NUM_WINDOWS = 60.0, 0.05, 6
LEARNED = 0.1  # of the first loss: below it nothing has to be learned any more
FAULTS = {signal.SIGKILL: 3, signal.SIGSTOP: 1, signal.SIGINT: 1}  # how often each of them
NUM_SAMPLES, WIDTH = 4096, 128
LEAST_SAMPLES = 6 * NUM_SAMPLES  # to be trained before it ends: in less the loss hardly falls
FLOPS_PER_SECOND, MEMORY_BYTES = 4e7, 2.3e6  # a microbatch takes a stage of three about 0.15 s
_SAMPLE_SECONDS = 2.0


@dataclass
class Seen:
    """What was seen of the run; times are seconds since training began."""

    samples: list[tuple[float, int]] = field(default_factory=list)  # counted so far
    losses: list[tuple[float, float]] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    news: list[Notice] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)  # to peers
    cpu_seconds: float = 0.0


def run(quick: bool) -> tuple[Figures, str, list[str]]:
    seconds = QUICK_SECONDS if quick else FULL_SECONDS
    seen = soak(seconds)
    seconds = max(seconds, seen.samples[-1][0])
    figures = summarise(seen, seconds)
    for name, value in figures.items():
        say(f"{name}: {value}")
    return figures, _report(figures), judge(seen, seconds)


def soak(seconds: float) -> Seen:
    """Train for so long while peers come and go; return what was seen."""
    import ravnest as rv
    from ravnest.config import Averaging
    from ravnest.requester.session import LOCAL_PLAN

    seen, ended = Seen(), threading.Event()
    plan = replace(LOCAL_PLAN, overhead_bytes=0.0, max_stages=4, clusters=99, averaging=Averaging.OVERLAPPED)
    chaos = _Chaos(seen, seconds, ended)
    with (
        tempfile.TemporaryDirectory() as folder,
        rv.Hub("127.0.0.1:0", plan=plan, tell=chaos.hear, folder=Path(folder) / "run") as hub,
    ):
        device = {"flops_per_second": FLOPS_PER_SECOND, "memory_bytes": MEMORY_BYTES}
        chaos.peers = peers = Peers(hub.invitation, Path(folder), **device)
        acting = threading.Thread(target=chaos.run, daemon=True)
        try:
            for _ in range(NUM_PEERS):
                chaos.start_one()
            acting.start()
            hub.fit(_make_job(rv), nodes=NUM_PEERS)
        finally:
            ended.set()
            acting.join()
            peers.close()
    return seen


def _make_job(rv: Any) -> Any:
    """Return a job without end: a network learns what a fixed one answers, and slowly."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 16)
    with torch.no_grad():
        answers = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 4))(inputs)
    inner = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), *inner, nn.Linear(WIDTH, 4))
    return rv.Job(
        model,
        {"x": inputs, "y": 3 * answers},
        batch_size=64,
        microbatches=2,
        epochs=10_000,
        loss=lambda out, batch: F.mse_loss(out, batch["y"]),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-5),
        inputs=["x"],
        average_every=16,
        checkpoint_every="20 s",
    )


class _Chaos:
    """Looks every few seconds, does something to somebody every 20 s, and ends the job."""

    def __init__(self, seen: Seen, seconds: float, ended: threading.Event) -> None:
        self._seen = seen
        self._seconds = seconds
        self._ended = ended
        self._random = random.Random(0)
        self._num_started = 0
        self._frozen: str | None = None
        self._began_at: float | None = None
        self._num_samples, self._loss = 0, 0.0
        self.peers: Peers | None = None

    def hear(self, news: Notice) -> None:
        """Note what the hub says."""
        if isinstance(news, Trained):
            self._began_at = self._began_at or time.monotonic()
            self._num_samples = news.num_samples
            if news.loss is not None:
                self._seen.losses.append((time.monotonic() - self._began_at, news.loss))
            return
        self._seen.news.append(news)
        if not isinstance(news, RoundEnded | EpochDone):
            say(f"{self._now():7.1f} {show_notice(news)}")

    def start_one(self) -> None:
        """Start a peer with a name that nobody had."""
        assert self.peers is not None
        self.peers.start(f"node{self._num_started}")
        self._num_started += 1

    def run(self) -> None:
        """Act until it is time to end."""
        next_at = FAULT_SECONDS
        while not self._ended.wait(_SAMPLE_SECONDS):
            now = self._now()
            if self._began_at is None:
                continue
            self._look(now)
            if now >= self._seconds and self._num_samples >= LEAST_SAMPLES:
                os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: what was trained is kept
                return
            if now >= next_at:
                next_at += FAULT_SECONDS
                self._act()

    def _now(self) -> float:
        return 0.0 if self._began_at is None else time.monotonic() - self._began_at

    def _look(self, now: float) -> None:
        assert self.peers is not None
        self._seen.samples.append((now, self._num_samples))
        alive = self.peers.alive
        watched = {f"node{number}": alive.get(f"node{number}") for number in range(NUM_SPARED)}
        for name, pid in {"hub": os.getpid(), **watched}.items():
            if pid is not None:
                size = memory_of(pid)["VmRSS"] if name == "hub" else held_by_peer(pid)
                self._seen.memory.setdefault(name, []).append((now, size))
        peers = [psutil.Process(pid) for pid in alive.values()]
        computing = [child for peer in peers for child in peer.children()]
        times = [each.cpu_times() for each in (psutil.Process(), *peers, *computing)]
        self._seen.cpu_seconds = sum(each.user + each.system for each in times)

    def _act(self) -> None:
        assert self.peers is not None
        alive = [name for name in self.peers.alive if int(name.removeprefix("node")) >= NUM_SPARED]
        if self._frozen is not None:
            self.peers.send(self._frozen, signal.SIGCONT)
            what, who = "thawed", self._frozen
            self._frozen = None
        elif len(alive) + NUM_SPARED < NUM_PEERS:
            self.start_one()
            what, who = "started", f"node{self._num_started - 1}"
        else:
            who = self._random.choice(alive)
            number = self._random.choices(list(FAULTS), list(FAULTS.values()))[0]
            self.peers.send(who, number)
            self._frozen = who if number is signal.SIGSTOP else None
            what = number.name
        self._seen.done[what] += 1
        say(f"{self._now():7.1f} {what}: {who}")


def judge(seen: Seen, seconds: float) -> list[str]:
    """Return what was not as it should be."""
    missed = []
    stuck = find_stuck(seen.samples, STUCK_SECONDS)
    if stuck is not None:
        missed.append(f"nothing was trained for {STUCK_SECONDS:g} s from second {stuck:.0f} on")
    for name, sizes in seen.memory.items():
        growth = find_growth(sizes, seconds)
        if growth > GROWTH:
            missed.append(f"the memory of {name} grew by {growth:.1%}, more than {GROWTH:.0%}")
    means = window_means(seen.losses, NUM_WINDOWS)
    # Once all is learned, a constant rate makes the loss go up and down.
    floor = LEARNED * means[0] if means else 0.0
    if any(after >= max(before, floor) for before, after in pairwise(means)):
        missed.append(f"the loss did not fall throughout: {means}")
    counted = [news for news in seen.news if isinstance(news, EpochDone)]
    if any((news.num_samples, news.num_dropped) != (NUM_SAMPLES, 0) for news in counted):
        missed.append("an epoch did not count every sample once")
    if len({news.epoch for news in counted}) != len(counted) and not _of(seen, WorkLost):
        missed.append("an epoch was counted twice")
    return missed


def find_stuck(samples: Sequence[tuple[float, int]], longest: float) -> float | None:
    """Return when a time of that length began in which the count did not grow, if there was one."""
    since, most = samples[0] if samples else (0.0, 0)
    for at, count in samples:
        if count > most:
            since, most = at, count
        elif count < most:  # it began again from a checkpoint
            most = count
        if at - since > longest:
            return since
    return None


def find_growth(sizes: Sequence[tuple[float, int]], seconds: float) -> float:
    """Return by what share the last quarter is above the second; the first is for warming up."""
    quarters = [[size for at, size in sizes if int(4 * at / seconds) == number] for number in (1, 3)]
    if not all(quarters):
        return 0.0
    second, last = map(statistics.median, quarters)
    return last / second - 1


def window_means(values: Sequence[tuple[float, float]], num_windows: int) -> list[float]:
    """Return the means of windows of equally many values, whenever those came."""
    edges = [number * len(values) // num_windows for number in range(num_windows + 1)]
    windows = [[value for _, value in values[first:last]] for first, last in pairwise(edges)]
    return [float(f"{statistics.mean(window):.4g}") for window in windows if window]


def summarise(seen: Seen, seconds: float) -> Figures:
    """Return the run in numbers."""
    recovered = [news.seconds for news in _of(seen, Recovered)]
    rounds = Counter(news.is_committed for news in _of(seen, RoundEnded))
    again = sum(news.num_given_back for news in _of(seen, ClusterBroken, ClusterDissolved))
    return {
        "seconds": seconds,
        "done to peers": dict(seen.done),
        "joined": len(_of(seen, Joined)),
        "left": len(_of(seen, Left)),
        "recovered": len(recovered),
        "recovery seconds": spread(recovered) if recovered else {},
        "clusters dissolved": len(_of(seen, ClusterDissolved)),
        "begun again": len(_of(seen, WorkLost)),
        "rounds committed": rounds[True],
        "rounds aborted": rounds[False],
        "samples trained": seen.samples[-1][1] if seen.samples else 0,
        "samples trained again": again,
        "epochs": len(_of(seen, EpochDone)),
        "memory growth": {name: round(find_growth(of, seconds), 4) for name, of in seen.memory.items()},
        "memory MB": {name: round(of[-1][1] / 1e6) for name, of in seen.memory.items()},
        "loss": window_means(seen.losses, NUM_WINDOWS),
        "CPU seconds of who lived at the end": round(seen.cpu_seconds, 1),
    }


def _of(seen: Seen, *kinds: type) -> list[Any]:
    return [news for news in seen.news if isinstance(news, kinds)]


def _report(figures: Figures) -> str:
    return _METHOD.format(
        peers=NUM_PEERS,
        pause=FAULT_SECONDS,
        spared=NUM_SPARED,
        windows=NUM_WINDOWS,
        rows=table(["what", "found"], list(figures.items())),
    )


_METHOD = """\
{peers} peers on this PC with emulated devices. Every {pause:g} s one of them is killed, frozen or taken back,
or another one joins, so that about {peers} are alive; {spared} are spared. Memory is the median resident
size of the last quarter over that of the second. The loss is its mean over {windows} equal parts of the work.

{rows}
"""
