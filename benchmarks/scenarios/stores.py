"""A log in SQLite and in PostgreSQL: what an event costs, and how long a run stands when servers die."""

import asyncio
import gc
import json
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.joining import Peers
from benchmarks.measure import say, spread, table
from ravnest.config import TIMEOUTS
from ravnest.hub.coordinator.events import Action, Event, Notify, Received
from ravnest.hub.coordinator.notices import EpochDone, Resumed, Trained, WorkLost
from ravnest.hub.service.event_log import EventLog
from ravnest.hub.service.postgres_address import PostgresAddress
from ravnest.hub.service.postgres_log import PostgresLog
from ravnest.ids import LeaseId, NodeId
from ravnest.protocol.training import LeaseDone

Figures = dict[str, Any]

REPEATS = 5
NUM_EVENTS, PER_TURN = 5_000, 4  # of the event loop: a hub at work has one event in most turns, at times more
NUM_ALONE = 200  # events that wait for each other
NUM_DEATHS = 3  # of each kind
MOST_CPU = (
    1e-3  # seconds of a core for an event in PostgreSQL: a hub with 1,000 peers has 440 events a second
)
MOST_AWAY_SECONDS = 60.0
_FSYNC = ("-c", "fsync=on")  # as it is installed


def run(quick: bool) -> tuple[Figures, str, list[str]]:
    from tests.support.store_servers import bucket_server, postgres

    with tempfile.TemporaryDirectory() as place, postgres(_FSYNC) as server:
        repeats = 1 if quick else REPEATS
        appended = [_append(Path(place, str(each)), server.address, each) for each in range(repeats)]
        say(json.dumps(appended))
        costs = {
            name: {key: spread([turn[name][key] for turn in appended]) for key in appended[0][name]}
            for name in appended[0]
        }
        if quick:
            return {"costs": costs}, "", []
        with bucket_server() as environment:
            os.environ.update(environment)
            died = _let_die(Path(place), server)
    figures = {"costs": costs, "deaths": died}
    return figures, _report(figures), _missed(figures)


def _append(folder: Path, address: str, number: int) -> Figures:
    """Append to both, one after the other, in turns that begin with another one."""
    folder.mkdir()

    def sqlite() -> Figures:
        with EventLog(folder) as log:
            return asyncio.run(_measure(log))

    def postgres() -> Figures:
        log = PostgresLog(PostgresAddress(address), f"costs {number}", TIMEOUTS.store)
        log.open(takes_over=True)
        return asyncio.run(_measure(log))

    works: list[tuple[str, Callable[[], Figures]]] = [("SQLite", sqlite), ("PostgreSQL", postgres)]
    return {name: work() for name, work in works[:: 1 if number % 2 else -1]}


async def _measure(log: Any) -> Figures:
    event = Received(NodeId("ana"), LeaseDone(4, LeaseId(7), 32), 1.0)
    writing = asyncio.create_task(log.write(lambda _: None))
    waits: list[float] = []
    await _until_written(log, event)
    gc.collect()
    cpu, longest = time.process_time(), 0.0
    for _ in range(NUM_EVENTS // PER_TURN):
        for _ in range(PER_TURN):
            began_at = time.perf_counter()
            log.append(event)
            log.after_written(lambda at=began_at: waits.append(time.perf_counter() - at))
            longest = max(longest, time.perf_counter() - began_at)
        await log.wait_for_room()
        await asyncio.sleep(0)
    await _until_written(log, event)
    cpu = time.process_time() - cpu
    alone, alone_cpu = [], time.process_time()
    for _ in range(NUM_ALONE):
        began_at = time.perf_counter()
        await _until_written(log, event)
        alone.append(time.perf_counter() - began_at)
    alone_cpu = time.process_time() - alone_cpu
    writing.cancel()
    await asyncio.wait([writing])
    return {
        "cpu_us_per_event": 1e6 * cpu / NUM_EVENTS,
        "alone_cpu_us_per_event": 1e6 * alone_cpu / NUM_ALONE,
        "alone_ms_median": 1e3 * statistics.median(alone),
        "alone_ms_p99": 1e3 * statistics.quantiles(alone, n=100)[-1],
        "busy_ms_median": 1e3 * statistics.median(waits),
        "busy_ms_p99": 1e3 * statistics.quantiles(waits, n=100)[-1],
        "loop_held_ms_most": 1e3 * longest,
    }


async def _until_written(log: Any, event: Event) -> None:
    done = asyncio.Event()
    log.append(event)
    log.after_written(done.set)
    await done.wait()


@dataclass(frozen=True)
class Recorder:
    """Writes down, in the hub's process, when what was trained."""

    path: Path

    def listen(self, _: Path) -> Callable[[Event, tuple[Action, ...]], None]:
        file = self.path.open("a", buffering=1)

        def hear(_: Event, orders: tuple[Action, ...]) -> None:
            for order in orders:
                if isinstance(order, Notify) and isinstance(order.notice, Trained | Resumed | WorkLost):
                    notice = order.notice
                    file.write(f"{time.time()} {type(notice).__name__} {notice.num_samples}\n")

        return hear


@dataclass(frozen=True)
class Death:
    """Kills the server, the hub, or both, and writes down when."""

    path: Path
    server: Path | None
    with_hub: bool

    def __call__(self, folder: Path) -> None:
        from tests.support.hub_program import kill_itself
        from tests.support.store_servers import kill_postgres

        name = "both" if self.server and self.with_hub else "the hub" if self.with_hub else "PostgreSQL"
        with self.path.open("a") as file:
            file.write(f"{time.time()} {name} 0\n")
        if self.server is not None:
            kill_postgres(self.server)
        if self.with_hub:
            kill_itself(folder)


def _let_die(place: Path, server: Any) -> Figures:
    from tests.support.hub_program import Ended, Fault, HubProgram, stop_itself
    from tests.support.store_servers import BUCKET

    record = place / "record.txt"
    recorder = Recorder(record)
    first = HubProgram(place, place / "pc-0", 1)
    shared = ("--store", server.address, "--blobs", f"s3://{BUCKET}/benchmark")
    peers = Peers(first.invite(), place, flops_per_second=2e9, memory_bytes=600e6)
    runs: list[Ended] = []

    def on_another_pc(fault: Fault, *beside: Fault) -> None:
        folder = place / f"pc-{len(runs)}"
        if runs:
            folder.mkdir()
            shutil.copy(place / "pc-0" / "hub.json", folder)
        program = HubProgram(place, folder, 1, door=first.door)
        options = [*shared, *(["--resume"] if runs else [])]
        runs.append(program.run(*options, fault=fault, beside=[recorder, *beside]))
        say(f"run {len(runs)} ended with {runs[-1].code}")

    try:
        peers.start("node")
        with server.coming_back():
            for _ in range(NUM_DEATHS):
                on_another_pc(Fault(EpochDone, Death(record, None, with_hub=True), count=2))
            outages = [
                Fault(EpochDone, Death(record, server.folder, with_hub=False), count=count)
                for count in range(2, 2 * NUM_DEATHS + 1, 2)
            ]
            both = Death(record, server.folder, with_hub=True)
            on_another_pc(Fault(EpochDone, both, count=2 * NUM_DEATHS + 2), *outages)
            for _ in range(NUM_DEATHS - 1):
                on_another_pc(Fault(EpochDone, both, count=2))
            on_another_pc(Fault(EpochDone, stop_itself, count=2))
        assert peers.end("node") == 0, "the peer outlived all of it"
    finally:
        peers.close()
    return _read(record, runs)


def _read(record: Path, runs: list[Any]) -> Figures:
    from tests.support.faults import NUM_SAMPLES

    lines = [line.split(" ", 1) for line in record.read_text().splitlines()]
    seen = [(float(at), *rest.rsplit(" ", 1)) for at, rest in lines]
    found: dict[str, list[Figures]] = {}
    for index, (at, name, _) in enumerate(seen):
        if name in ("the hub", "PostgreSQL", "both"):
            before = max((int(x) for _, what, x in seen[:index] if what == "Trained"), default=0)
            after = [(t, what, int(x)) for t, what, x in seen[index + 1 :]]
            resumed = before
            if name != "PostgreSQL":
                resumed = next(x for _, what, x in after if what == "Resumed")
            back_at = next(t for t, what, _ in after if what == "Trained")
            again = max(0, before - resumed)
            found.setdefault(name, []).append({"seconds": back_at - at, "trained_again": again})
    done = json.loads(runs[-1].answers.splitlines()[-1])
    reported = [each for each in done["history"] if "num_samples" in each]
    epochs = {int(each["epoch"]): each["num_samples"] for each in reported}
    told = re.findall(r"^epoch (\d+): ", "".join(each.said for each in runs), re.MULTILINE)
    is_whole = sorted(epochs) == list(range(1, len(epochs) + 1)) and len(reported) == len(epochs)
    is_balanced = is_whole and set(epochs.values()) == {NUM_SAMPLES}
    return {
        "by_cause": {
            name: {
                "seconds": spread([each["seconds"] for each in turns]),
                "trained_again": spread([each["trained_again"] for each in turns]),
            }
            for name, turns in found.items()
        },
        "exit_codes": [each.code for each in runs],
        "epochs": len(epochs),
        "books_balance": is_balanced and len(told) == len(set(told)),
    }


def _missed(figures: Figures) -> list[str]:
    cpu = figures["costs"]["PostgreSQL"]["alone_cpu_us_per_event"]["median"]
    missed = [] if cpu < 1e6 * MOST_CPU else [f"an event in PostgreSQL takes {cpu:.0f} us of a core"]
    died = figures["deaths"]
    for name, found in died["by_cause"].items():
        if found["seconds"]["max"] > MOST_AWAY_SECONDS:
            missed.append(f"after the death of {name} training stood for {found['seconds']['max']:.0f} s")
    if died["exit_codes"] != [-9] * (2 * NUM_DEATHS) + [0]:
        missed.append(f"hubs ended with {died['exit_codes']}")
    return missed + ([] if died["books_balance"] else ["the books do not balance"])


def _report(figures: Figures) -> str:
    names = {
        "cpu_us_per_event": f"as many events as go, {PER_TURN} a turn of the loop: CPU of the hub (us each)",
        "busy_ms_median": "the same, until an event is written (ms), median",
        "busy_ms_p99": "the same, 99 of 100",
        "alone_cpu_us_per_event": "events that wait for each other: CPU of the hub (us each)",
        "alone_ms_median": "the same, until an event is written (ms), median",
        "alone_ms_p99": "the same, 99 of 100",
        "loop_held_ms_most": "longest that `append` held the event loop (ms)",
    }
    costs = figures["costs"]
    rows = [
        [text, *(_show(costs[store][key]) for store in ("SQLite", "PostgreSQL"))]
        for key, text in names.items()
    ]
    died = figures["deaths"]
    deaths = [
        [name, _show(found["seconds"]), _show(found["trained_again"])]
        for name, found in died["by_cause"].items()
    ]
    balance = "yes" if died["books_balance"] else "no"
    return f"""
## An event

{NUM_EVENTS} events of one kind (`LeaseDone`), {REPEATS} turns of both stores one after the other. PostgreSQL
runs on the same PC, over a socket, with `fsync` on: its time until an event is written has a disk in it,
SQLite's has none. Median, smallest and largest of the turns.

{table(["", "SQLite", "PostgreSQL"], rows)}

## Deaths

One peer trains a small job in epochs of 1,024 samples, with a log in PostgreSQL and a checkpoint in a bucket
(moto's server) every second. At the end of an epoch the hub is killed with `kill -9`, then PostgreSQL with
all its processes, then both at once. PostgreSQL is started again at once, the hub with `--resume` in an empty
folder that has only its `hub.json`. Python and torch are loaded already. The time is that until the next
lease is counted; where the hub died, the capture of the model is in it. {NUM_DEATHS} of each kind, in one
run of {died["epochs"]} epochs. The hub dies in the event that counts the last lease of an epoch, before that
is in the log; nobody has heard of it then, so that lease is counted when it is trained again.

{table(["killed", "seconds until training goes on", "counted samples that are trained again"], deaths)}

Books balance: {balance} (every epoch in the result's history has 1,024 samples, and none was told twice).
Exit codes: {died["exit_codes"]}.
"""


def _show(found: dict[str, float]) -> str:
    return f"{found['median']:.3g} ({found['min']:.3g} to {found['max']:.3g})"
