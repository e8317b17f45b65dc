"""Faults of a made-up internet: cables of hub and peers are cut, the hub and peers die, programs freeze.

Hub and peers are real programs, each in a network namespace, so this needs root. A history of single faults
comes first, then one of random faults. No healthy peer may end, no sample may be trained again that was not
in flight at a fault, and counted progress may not stand still while enough peers are there.
"""

import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.joining import PRELOADED, Peers
from benchmarks.measure import say, table
from benchmarks.namespaces import Namespaces, Rate, enter, may_be_used
from ravnest.hub.coordinator.events import Action, Event, Notify, SendFields
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import ClusterBroken, ClusterDissolved, Trained, WorkLost

Figures = dict[str, Any]

NUM_PEERS = 6
NUM_SAMPLES, WIDTH = 2048, 128
FLOPS_PER_SECOND, MEMORY_BYTES = 1.5e8, 503.5e6  # the program's own, and a little more than half the model
LINK = Rate(12.5e6, 12.5e6)
PORT = 7700
STILL_SECONDS = 15.0  # counted progress may stand still for so long, while enough peers are there
PAUSE_SECONDS, QUICK_PAUSE_SECONDS = 15.0, 8.0  # between two faults
HISTORY_SECONDS = 720.0
RESUME_SECONDS = 5.0  # a hub that was killed is started again after this
JOB = "from benchmarks.scenarios.faults import make_job\njob = make_job()\n"


@dataclass(frozen=True)
class Fault:
    """Something done to a swarm, and for how long counted progress cannot grow because of it."""

    what: str
    at: float
    in_flight: int  # samples that were leased and not counted
    hub_away_seconds: float = 0.0


@dataclass
class Seen:
    """What was seen of a run; times are of one clock of all programs."""

    progress: list[tuple[float, int]] = field(default_factory=list)  # counted so far
    faults: list[Fault] = field(default_factory=list)
    given_back: list[tuple[float, int]] = field(default_factory=list)  # samples that are trained again
    ended: list[str] = field(default_factory=list)  # healthy peers that ended
    codes: Counter[str] = field(default_factory=Counter)  # of hub and peers at the end


def run(quick: bool) -> tuple[Figures, str, list[str]]:
    if not may_be_used():
        return {}, "", ["namespaces cannot be made here: run this as root"]
    seen = {"single faults": play(quick_faults if quick else single_faults)}
    if not quick:
        seen["random faults"] = play(random_faults)
    figures = {name: summarise(each) for name, each in seen.items()}
    missed = [f"{name}: {sentence}" for name, each in seen.items() for sentence in judge(each)]
    rows = [[name, *each.values()] for name, each in figures.items()]
    return figures, _METHOD + table(["history", *next(iter(figures.values()))], rows), missed


def make_job() -> Any:
    """Return a job without end that two of these peers can hold."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import ravnest as rv

    torch.manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 16)
    inner = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return rv.Job(
        nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), *inner, nn.Linear(WIDTH, 4)),
        {"x": inputs, "y": inputs[:, :4].argmax(-1)},
        batch_size=32,
        microbatches=2,
        epochs=10_000,
        loss=lambda out, batch: F.cross_entropy(out, batch["y"]),
        optimizer="adamw",
        learning_rate=3e-5,  # it shall not know all by heart
        schedule=rv.constant(),
        inputs=["x"],
        average_every=16,
        checkpoint_every="10 s",
    )


class World:
    """The programs, their cables, and what the hub writes down."""

    def __init__(self, spaces: Namespaces, folder: Path) -> None:
        self.spaces, self.folder = spaces, folder
        self.seen = Seen()
        self._read, self._granted, self._counted = 0, 0, 0
        self._frozen: set[str] = set()
        self._num_started = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        (folder / "job.py").write_text(JOB)
        self._address = f"{spaces.address('hub')}:{PORT}"
        self.peers = Peers(
            self._invite(), folder, flops_per_second=FLOPS_PER_SECOND, memory_bytes=MEMORY_BYTES
        )
        self.homes: dict[str, str] = {}  # of peers: whose cable they have

    def _invite(self) -> str:
        from ravnest.requester.run_folder import open_run

        found = open_run(self.folder / "run")
        return msgspec.structs.replace(found, addresses=(f"tcp://{self._address}",)).invitation

    def start_hub(self, *options: str) -> None:
        """Start the hub, or start it again."""
        place = ("--listen", self._address, "--nodes", str(NUM_PEERS), "--folder", str(self.folder / "run"))
        words = ("hub", f"{self.folder / 'job.py'}:job", *place, "--json", *options)
        given = (words, str(self.folder / "hub.txt"), str(self.folder / "seen.txt"), self.spaces.path("hub"))
        self._hub = self._context.Process(target=_run_hub, args=given, daemon=True)
        self._hub.start()

    def start_peer(self, home: str) -> None:
        """Start a peer that nobody had, at a cable that is free."""
        name = f"n{self._num_started}"
        self._num_started += 1
        self.homes[name] = home
        self.peers.start(name, space=self.spaces.path(home), door=f"{self.spaces.address(home)}:0")

    def kill_hub(self) -> None:
        """End the hub without a word."""
        assert self._hub.pid is not None
        os.kill(self._hub.pid, signal.SIGKILL)
        self._hub.join()

    def watch(self, seconds: float) -> None:
        """Let time pass, and look."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.25)
            self._look()

    def wait_for(self, num_samples: int) -> None:
        """Let so many more samples be counted."""
        wanted = self._counted + num_samples
        while self._counted < wanted:
            self.watch(0.5)

    def _look(self) -> None:
        path = self.folder / "seen.txt"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for line in (each for each in lines[self._read :] if each.endswith("\n")):
            self._read += 1
            at, granted, counted, again, told = json.loads(line)
            self._granted, self._counted = self._granted + granted, counted
            self.seen.progress.append((at, counted))
            if again:
                self._granted -= again
                self.seen.given_back.append((at, again))
            if told:
                say(f"{at:9.2f} {told}")
        alive = self.peers.alive
        for name in [name for name in self.homes if name not in alive]:
            del self.homes[name]
            self.seen.ended.append(f"{name}: {(self.peers.said(name).splitlines() or [''])[-1]}")

    def note(self, what: str, hub_away_seconds: float = 0.0) -> None:
        """Remember a fault."""
        self._look()
        in_flight = max(0, self._granted - self._counted)
        self.seen.faults.append(Fault(what, time.monotonic(), in_flight, hub_away_seconds))
        say(f"{time.monotonic():9.2f} --- {what}")

    def cut(self, home: str, seconds: float) -> None:
        """Pull a cable for a while."""
        self.note(f"the cable of {home} is cut for {seconds:g} s", seconds if home == "hub" else 0.0)
        self.spaces.cut(home)
        self.watch(seconds)
        self.spaces.heal(home)

    def part(self, seconds: float) -> None:
        """Let half of the peers not see the other half for a while."""
        homes = sorted(self.homes.values())
        pairs = [(one, other) for one in homes[::2] for other in homes[1::2]]
        self.note(f"half of the peers cannot see the others for {seconds:g} s")
        for one, other in pairs:
            self.spaces.part(one, other)
        self.watch(seconds)
        for one, other in pairs:
            self.spaces.rejoin(one, other)

    def restart_hub(self) -> None:
        """Kill the hub, and start it again a little later."""
        self.note("the hub is killed", RESUME_SECONDS + STILL_SECONDS)  # to capture the model takes a while
        self.kill_hub()
        self.watch(RESUME_SECONDS)
        self.start_hub("--resume")

    def replace_peer(self, chosen: random.Random) -> None:
        """Kill a peer, and start another one at its place a little later."""
        name = chosen.choice(sorted(self.homes))
        self.note(f"{name} is killed")
        home = self.homes.pop(name)
        self.peers.send(name, signal.SIGKILL)
        self.watch(RESUME_SECONDS)
        self.start_peer(home)

    def freeze(self, chosen: random.Random, seconds: float) -> None:
        """Stop a peer's program for a while."""
        name = chosen.choice(sorted(self.homes))
        self.note(f"{name} is frozen for {seconds:g} s")
        self.peers.send(name, signal.SIGSTOP)
        self.watch(seconds)
        self.peers.send(name, signal.SIGCONT)

    def end(self) -> None:
        """Stop the job as Ctrl-C does, and see how all end."""
        self._look()
        assert self._hub.pid is not None
        healthy = list(self.homes)
        os.kill(self._hub.pid, signal.SIGINT)
        self._hub.join(120.0)
        self.seen.codes[f"hub {self._hub.exitcode}"] += 1
        for name in healthy:
            self.seen.codes[f"peer {self.peers.end(name)}"] += 1

    def close(self) -> None:
        """End what is left."""
        self.peers.close()
        self._hub.kill()
        self._hub.join()


def play(history: Callable[[World], None]) -> Seen:
    """Let a swarm train while a history of faults happens to it."""
    homes = [f"p{number}" for number in range(NUM_PEERS)]
    with tempfile.TemporaryDirectory() as folder, Namespaces(dict.fromkeys(["hub", *homes], LINK)) as spaces:
        world = World(spaces, Path(folder))
        world.start_hub()
        try:
            for home in homes:
                world.start_peer(home)
            world.wait_for(NUM_SAMPLES)
            history(world)
            world.wait_for(NUM_SAMPLES)
            world.end()
        finally:
            world.close()
        return world.seen


def quick_faults(world: World) -> None:
    world.cut("hub", 8.0)
    world.watch(QUICK_PAUSE_SECONDS)
    world.part(6.0)
    world.watch(QUICK_PAUSE_SECONDS)
    world.restart_hub()
    world.watch(QUICK_PAUSE_SECONDS)


def single_faults(world: World) -> None:
    for seconds in (10.0, 60.0):
        world.part(seconds)
        world.watch(PAUSE_SECONDS)
    for seconds in (8.0, 30.0, 120.0):
        world.cut("hub", seconds)
        world.watch(PAUSE_SECONDS)
    for _ in range(3):
        world.restart_hub()
        world.watch(2 * PAUSE_SECONDS)


def random_faults(world: World) -> None:
    chosen = random.Random(0)
    until = time.monotonic() + HISTORY_SECONDS
    deeds: list[Callable[[], None]] = [
        lambda: world.replace_peer(chosen),
        lambda: world.replace_peer(chosen),
        lambda: world.freeze(chosen, chosen.choice((1.0, 3.0, 10.0))),
        lambda: world.cut(chosen.choice(sorted(world.homes.values())), chosen.choice((2.0, 10.0))),
        lambda: world.cut("hub", chosen.choice((3.0, 8.0, 20.0))),
        lambda: world.part(chosen.choice((3.0, 10.0))),
        world.restart_hub,
    ]
    while time.monotonic() < until:
        chosen.choice(deeds)()
        world.watch(PAUSE_SECONDS)


def _run_hub(words: Sequence[str], said: str, seen: str, space: str) -> None:
    with open(said, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    enter(space)
    from ravnest.cli.common import CommandParts
    from ravnest.cli.main import program
    from ravnest.hub.service.server import HubParts

    counted = 0

    def watch(event: Event, orders: tuple[Action, ...]) -> None:
        nonlocal counted
        leases = [each for each in orders if isinstance(each, SendFields) and not each.is_evaluation]
        granted = sum(len(samples) for lease in leases for samples in lease.samples)
        news = [each.notice for each in orders if isinstance(each, Notify)]
        again = sum(
            each.num_given_back for each in news if isinstance(each, ClusterBroken | ClusterDissolved)
        )
        again += sum(each.num_samples for each in news if isinstance(each, WorkLost))
        counted = next((each.num_samples for each in news if isinstance(each, Trained)), counted)
        told = "; ".join(show_notice(each) for each in news if not isinstance(each, Trained))
        if granted or again or told or news:
            line = json.dumps([time.monotonic(), granted, counted, again, told])
            with open(seen, "a") as lines:
                lines.write(line + "\n")

    program(words, prog_name="ravnest", obj=CommandParts(hub=HubParts(watch=watch)))


def summarise(seen: Seen) -> Figures:
    return {
        "faults": len(seen.faults),
        "samples counted": seen.progress[-1][1],
        "samples trained again": sum(count for _, count in seen.given_back),
        "longest without progress (s)": round(max((each for _, each in find_still(seen)), default=0.0), 1),
        "healthy peers that ended": len(seen.ended),
        "exit codes": dict(seen.codes),
    }


def find_still(seen: Seen) -> list[tuple[float, float]]:
    """Return when the count stood still, and for how many seconds in which the hub was there."""
    most, grown = 0, []  # training has begun when something is counted
    for at, count in seen.progress:
        if count != most:
            most = count
            grown.append(at)
    found = []
    for before, after in pairwise(grown):
        away = sum(
            max(0.0, min(after, fault.at + fault.hub_away_seconds) - max(before, fault.at))
            for fault in seen.faults
        )
        found.append((before, after - before - away))
    return found


def judge(seen: Seen) -> list[str]:
    """Return what was not as it should be."""
    missed = [f"a healthy peer ended: {each}" for each in seen.ended]
    missed += [
        f"nothing was counted for {seconds:.0f} s from {at:.0f} on"
        for at, seconds in find_still(seen)
        if seconds > STILL_SECONDS
    ]
    for fault, later in pairwise([*seen.faults, Fault("the end", float("inf"), 0)]):
        again = sum(count for at, count in seen.given_back if fault.at <= at < later.at)
        if again > fault.in_flight:
            missed.append(f"{again} samples were trained again, {fault.in_flight} in flight: {fault.what}")
    missed += [f"ended with exit code {code}" for code in seen.codes if not code.endswith(" 0")]
    return missed


_METHOD = f"""\
Hub and {NUM_PEERS} peers are programs in network namespaces with links of 100 Mbit/s. Faults come one by one.
A sample is in flight if it is leased and not counted. Times in which the hub's cable is out, or its program
is not there, do not count as standing still.

"""
