"""A log in PostgreSQL and checkpoints in a bucket, both real servers: fences, outages, and hubs that move."""

import asyncio
import contextlib
import json
import random
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psycopg
import pytest
import torch

import ravnest as rv
from benchmarks.joining import Peers
from ravnest.config import TIMEOUTS, StoreTimeouts
from ravnest.errors import ConfigError, FencedOff, StoreAway
from ravnest.hub.coordinator.events import Tick
from ravnest.hub.coordinator.notices import EpochDone, LogGoesOn, LogWaits
from ravnest.hub.service.event_log import write_event
from ravnest.hub.service.postgres_address import PostgresAddress
from ravnest.hub.service.postgres_log import PostgresLog, PostgresPlace
from ravnest.requester.bucket import Bucket
from ravnest.requester.run_folder import read_hub_file
from ravnest.requester.run_stores import SharedStores
from tests.support.faults import NUM_SAMPLES
from tests.support.hub_program import Ended, Fault, HubProgram, kill_itself, stop_itself
from tests.support.hub_world import job
from tests.support.store_servers import PostgresServer, kill_postgres
from tests.support.stores_world import QUICK, open_log

pytestmark = pytest.mark.needs_postgres
_SOCKET = ".s.PGSQL.5432"


async def until_written(log: PostgresLog) -> None:
    """Return when all that was appended is in the log."""
    done = asyncio.Event()
    log.after_written(done.set)
    await done.wait()


# Fences.


@dataclass(frozen=True)
class Writer:
    """A hub that writes ticks which name it."""

    log: PostgresLog
    task: asyncio.Task[None]
    acted: list[float]

    def append(self, number: float) -> None:
        self.log.append(Tick(number))
        self.log.after_written(lambda: self.acted.append(number))


class History:
    """What two or more hubs, and the server, did to one log; all that they append is another number."""

    def __init__(self, server: PostgresServer, name: str) -> None:
        self.server, self.name = server, name
        self.writers: list[Writer] = []
        self.seen: list[float] = []  # when a hub was opened the last time
        self.number = 0.0

    async def open(self) -> None:
        log = open_log(self.server, self.name)
        known = [event.now for event in log.events()]
        assert set(self.acted) <= set(known), "what was acted upon is in the log"
        assert known[: len(self.seen)] == self.seen, "what was there stays"
        self.seen = known
        self.writers.append(Writer(log, asyncio.create_task(log.write(lambda _: None)), []))

    async def append(self) -> None:
        for writer in self.writers:  # the fenced ones, too
            self.number += 1.0
            writer.append(self.number)

    async def wait(self) -> None:
        if self.writers:
            await until_written(self.writers[-1].log)

    async def kill(self) -> None:
        self.server.kill()
        self.server.start()

    @property
    def acted(self) -> list[float]:
        return [each for writer in self.writers for each in writer.acted]


@pytest.mark.parametrize("seed", range(3))
def test_a_log_of_several_hubs_is_that_of_one_writer_after_the_other(
    server: PostgresServer, seed: int
) -> None:
    """Whoever is fenced off gets nothing in, and does nothing of what it appended since."""
    drawn = random.Random(seed)

    async def main() -> None:
        history = History(server, f"law {seed}")
        steps = [history.open, history.append, history.append, history.wait]
        for _ in range(10):
            for step in drawn.choices(steps, k=4):
                await step()
            if drawn.random() < 0.2:
                await history.kill()
        await history.open()
        *fenced, last = history.writers
        await history.append()
        for writer in fenced:
            with pytest.raises(FencedOff, match=r"another hub has taken this run over \(.*, process \d+\)"):
                await writer.task
        await history.wait()
        found = [event.now for event in last.log.events()]
        assert found == history.seen + last.acted, "the last hub alone wrote since, in its order"
        assert sorted(set(found)) == sorted(found), "nothing is in it twice"
        assert set(history.acted) <= set(found)
        last.task.cancel()

    asyncio.run(main())


def test_a_group_whose_answer_was_lost_is_in_the_log_once(server: PostgresServer) -> None:
    async def main() -> None:
        log, told, acted = open_log(server, "once"), [], []
        heard = asyncio.Event()

        def hear(notice: object) -> None:
            told.append(notice)
            heard.set()

        writing = asyncio.create_task(log.write(hear))
        log.append(Tick(1.0))
        await until_written(log)
        # What a hub sends just before the server dies, and the server writes without saying so.
        with psycopg.connect(server.address) as connection:
            connection.execute(
                "INSERT INTO ravnest_events SELECT hub, run, 2, fence, %s, %s FROM ravnest_hubs "
                "WHERE hub = 'once'",
                write_event(Tick(2.0)),
            )
        server.kill()
        log.append(Tick(2.0))
        log.after_written(lambda: acted.append(2.0))
        log.append(Tick(3.0))
        log.after_written(lambda: acted.append(3.0))
        await heard.wait()
        assert isinstance(told[0], LogWaits)
        assert acted == []
        server.start()
        await until_written(log)
        assert isinstance(told[1], LogGoesOn)
        assert [event.now for event in log.events()] == [1.0, 2.0, 3.0]
        assert acted == [2.0, 3.0]
        writing.cancel()

    asyncio.run(main())


def test_a_hub_waits_for_a_server_no_longer_than_it_may_and_says_what_to_do(server: PostgresServer) -> None:
    async def main() -> None:
        log = open_log(server, "patience", StoreTimeouts(pause_seconds=0.05, patience_seconds=0.2))
        server.kill()
        log.append(Tick(1.0))
        with pytest.raises(
            ConfigError, match=r"could not be reached for .* start the hub again with --resume"
        ):
            await log.write(lambda _: None)

    try:
        asyncio.run(main())
    finally:
        server.start()


def test_a_log_that_was_set_back_is_not_written_on(server: PostgresServer) -> None:
    """A standby that lacked the last events, or a backup: what follows from them was done already."""

    async def main() -> None:
        log = open_log(server, "set back")
        writing = asyncio.create_task(log.write(lambda _: None))
        log.append(Tick(1.0))
        log.append(Tick(2.0))
        await until_written(log)
        with psycopg.connect(server.address) as connection:
            connection.execute("DELETE FROM ravnest_events WHERE hub = 'set back' AND number = 2")
        server.kill()
        server.start()
        log.append(Tick(3.0))
        with pytest.raises(
            ConfigError, match=r"has 1 events, and had 2: .* start the hub again with --resume"
        ):
            await writing
        assert [event.now for event in log.events()] == [1.0]

    asyncio.run(main())


def test_a_hub_that_goes_on_waits_for_a_server_that_starts_after_it(server: PostgresServer) -> None:
    fence = open_log(server, "start").fence
    server.kill()
    with ThreadPoolExecutor(1) as beside:
        opening = beside.submit(open_log, server, "start", StoreTimeouts(pause_seconds=0.05))
        server.start()
        assert opening.result().fence == fence + 1


def test_a_log_of_another_ravnest_is_refused_before_its_hub_is_fenced_off(server: PostgresServer) -> None:
    log = open_log(server, "old")
    with psycopg.connect(server.address) as connection:
        connection.execute("UPDATE ravnest_hubs SET schema = 3 WHERE hub = 'old'")
    with pytest.raises(ConfigError, match="its log is of version 3, this ravnest reads version"):
        open_log(server, "old")
    log.check()


def test_a_run_is_not_begun_beside_a_hub_at_work_and_an_older_one_is_kept(server: PostgresServer) -> None:
    async def main() -> None:
        log = open_log(server, "two")
        writing = asyncio.create_task(log.write(lambda _: None))
        log.append(Tick(1.0))
        await until_written(log)
        other = PostgresLog(PostgresAddress(server.address), "two", QUICK)
        with pytest.raises(ConfigError, match=r"is at work .* take its run over with --resume"):
            other.open(takes_over=False)
        writing.cancel()
        await asyncio.wait([writing])
        place = PostgresPlace(PostgresAddress(server.address), "two", QUICK)
        before = place.identify()
        log = open_log(server, "two")
        log.begin(with_checkpoints=False)
        assert (list(log.events()), place.identify() == before) == ([], False)
        with place.read(0) as events:
            assert list(events) == []

    asyncio.run(main())


class StandsBetween:
    """Passes on what a hub and PostgreSQL say; after these words of the hub, only the answers."""

    def __init__(self, server: PostgresServer, folder: Path, until: bytes) -> None:
        self.address = f"postgresql://ravnest@/postgres?host={folder}"
        self.has_stopped = asyncio.Event()
        self._there, self._here = server.folder / _SOCKET, folder / _SOCKET
        self._until = until
        self._passing: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_unix_server(self._meet, self._here)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()
        for each in self._passing:
            each.cancel()
        await asyncio.wait(self._passing)

    async def _meet(self, hub: asyncio.StreamReader, to_hub: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_unix_connection(self._there)
        stops = asyncio.Event()
        ways = [self._pass_on(hub, to_server, stops, self._until), self._pass_on(server, to_hub, stops)]
        self._passing += [asyncio.create_task(each) for each in ways]

    async def _pass_on(
        self, one: asyncio.StreamReader, other: asyncio.StreamWriter, stops: asyncio.Event, until: bytes = b""
    ) -> None:
        with contextlib.closing(other):
            while piece := await one.read(1 << 16):
                other.write(piece)
                if until and until in piece:
                    stops.set()
                    await asyncio.get_running_loop().create_future()
                if stops.is_set():
                    self.has_stopped.set()  # the server has answered those words


def test_a_hub_that_stands_still_while_it_looks_at_its_log_keeps_no_other_out(
    server: PostgresServer,
) -> None:
    """A PC that sleeps, or a network that fails, right after the hub has come back to its server."""

    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:  # names of sockets are short
            async with StandsBetween(server, Path(folder), b"FOR UPDATE") as between:
                log = PostgresLog(PostgresAddress(between.address), "stands", QUICK)
                await asyncio.to_thread(log.open, takes_over=True)
                writing = asyncio.create_task(log.write(lambda _: None))
                await between.has_stopped.wait()
                quick = StoreTimeouts(pause_seconds=0.05, start_seconds=0.1, answer_seconds=2.0)
                other = await asyncio.to_thread(open_log, server, "stands", quick)
                assert other.fence == log.fence + 1
                writing.cancel()
                await asyncio.wait([writing])

    asyncio.run(main())


def test_a_lock_that_stays_is_no_wait_without_end(server: PostgresServer) -> None:
    quick = StoreTimeouts(pause_seconds=0.05, start_seconds=0.1, patience_seconds=0.1, answer_seconds=0.5)
    log = open_log(server, "locked", quick)
    with psycopg.connect(server.address) as other:
        other.execute("LOCK ravnest_hubs IN ACCESS EXCLUSIVE MODE")
        for ask in (log.check, lambda: log.register(1, "ab"), lambda: open_log(server, "locked", quick)):
            with pytest.raises(StoreAway, match="statement timeout; start PostgreSQL, or see what it says"):
                ask()
    log.check()


def test_a_result_waits_for_a_server_that_is_away(server: PostgresServer) -> None:
    log = open_log(server, "result")
    server.kill()
    with ThreadPoolExecutor(1) as beside:
        asking = beside.submit(log.check)
        server.start()
        asking.result()


def test_a_log_that_cannot_be_read_now_is_not_begun_anew(server: PostgresServer, tmp_path: Path) -> None:
    log, place = open_log(server, "away"), PostgresPlace(PostgresAddress(server.address), "away", QUICK)
    stores = SharedStores(tmp_path, log, place, None, resumes=True)
    assert stores.find_past(job(), TIMEOUTS.hub) is None, "it has no event"
    server.kill()
    try:
        with pytest.raises(StoreAway, match="start PostgreSQL"):
            stores.find_past(job(), TIMEOUTS.hub)
    finally:
        server.start()


@pytest.mark.parametrize(
    "given", ["postgresql://ana:s3cret@127.0.0.1:1/runs", "postgresql://ana:s3cret@/x?host=/no"]
)
def test_a_server_that_is_not_there_is_named_without_its_password(given: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used: .*; start PostgreSQL") as refused:
        PostgresLog(PostgresAddress(given), "nobody", QUICK).open(takes_over=True)
    assert "s3cret" not in str(refused.value)


# Whole programs.


def test_a_store_that_was_never_found_is_not_remembered(tmp_path: Path) -> None:
    """Or a run in the folder could not be gone on with, nor be shown."""
    job = rv.Job(torch.nn.Linear(2, 1), [], batch_size=4, loss=lambda out, y: out.mean())
    with rv.Hub("127.0.0.1:0", folder=tmp_path, store="postgresql://ana@127.0.0.1:1/typo") as hub:
        with pytest.raises(ConfigError, match="cannot be used"):
            hub.fit(job)
        assert read_hub_file(tmp_path).store == ""


@dataclass(frozen=True)
class TakeOver:
    """What another machine does when it believes that this hub is dead."""

    address: str
    hub: str

    def __call__(self, _: Path) -> None:
        PostgresLog(PostgresAddress(self.address), self.hub, QUICK).open(takes_over=True)


@dataclass(frozen=True)
class KillPostgres:
    """A power cut of the server, and maybe of the hub."""

    folder: Path
    with_hub: bool = False

    def __call__(self, folder: Path) -> None:
        kill_postgres(self.folder)
        if self.with_hub:
            kill_itself(folder)


def test_hubs_and_postgresql_die_and_the_run_goes_on_on_other_machines(
    server: PostgresServer, bucket: str, tmp_path: Path
) -> None:
    """Each machine has its own disk: what moves is hub.json."""
    shared = ("--store", server.address, "--blobs", f"{bucket}/trained")
    first = HubProgram(tmp_path, tmp_path / "a", 1)
    peers = Peers(first.invite(), tmp_path, flops_per_second=2e9, memory_bytes=600e6)
    hub = read_hub_file(tmp_path / "a").log_name

    def machine(name: str) -> HubProgram:
        (tmp_path / name).mkdir(exist_ok=True)
        shutil.copy(tmp_path / "a/hub.json", tmp_path / name / "hub.json")
        return HubProgram(tmp_path, tmp_path / name, 1, door=first.door)

    try:
        peers.start("node")
        with server.coming_back():
            fenced = first.run(*shared, fault=Fault(EpochDone, TakeOver(server.address, hub), count=2))
            killed = machine("b").run(
                *shared,
                "--resume",
                fault=Fault(EpochDone, KillPostgres(server.folder)),
                beside=[Fault(EpochDone, kill_itself, count=3)],
            )
            both = machine("c").run(
                *shared,
                "--resume",
                fault=Fault(EpochDone, KillPostgres(server.folder, with_hub=True), count=2),
            )
            ended = first.run("--resume", fault=Fault(EpochDone, stop_itself, count=2))
        assert peers.end("node") == 0
    finally:
        peers.close()
    runs = [fenced, killed, both, ended]
    assert [each.code for each in runs] == [9, -9, -9, 0], "".join(each.said for each in runs)
    assert "error: another hub has taken this run over" in fenced.said.splitlines()[-1]
    assert re.search(r"the log cannot be written: .*; the hub waits for it", killed.said)
    assert "the log is written again, after" in killed.said
    for again in runs[1:]:
        assert "node is back, with what it had" in again.said
    check_books(runs)
    there = Bucket(f"{bucket}/trained", TIMEOUTS.store)
    assert there.find("result-000005") == ["best.safetensors", "model.safetensors"]
    assert (tmp_path / "a/model.safetensors").is_file()
    assert there.find("checkpoints")


def check_books(runs: list[Ended]) -> None:
    """Every epoch has all samples, once."""
    done = json.loads(runs[-1].answers.splitlines()[-1])
    epochs = {int(each["epoch"]): each for each in done["history"] if "num_samples" in each}
    assert sorted(epochs) == list(range(1, len(epochs) + 1))
    assert {each["num_samples"] for each in epochs.values()} == {NUM_SAMPLES}
    assert len(epochs) >= 5
    told = [epoch for each in runs for epoch in re.findall(r"^epoch (\d+): ", each.said, re.M)]
    assert len(told) == len(set(told)), "no epoch is told twice"
