"""A hub is killed, its disk fills up or may not be written: it says so, and goes on from its folder."""

import asyncio
import json
import re
import sys
import time
from pathlib import Path
from random import SystemRandom
from unittest.mock import Mock

import pytest

import ravnest as rv
from benchmarks.joining import Peers
from ravnest.errors import ConfigError
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Event, JobGiven, PlanMade, Received, Restarted
from ravnest.hub.coordinator.notices import Checkpointed, EpochDone, NotCheckpointed
from ravnest.hub.service.event_log import EventLog
from ravnest.hub.service.server import Server
from ravnest.net.identity import Token, new_keys
from ravnest.net.zeromq import ZeroMqTransport
from ravnest.protocol.averaging import RoundReady
from ravnest.protocol.training import LeaseDone
from tests.support.as_root import fill, let_write, small_disk
from tests.support.faults import (
    FLOPS_PER_SECOND,
    NUM_SAMPLES,
    Step,
    Story,
    check,
    is_news,
    make_job,
    swarm,
)
from tests.support.hub_program import Fault, HubProgram, kill_itself, stop_itself
from tests.support.hub_world import job
from tests.support.memory_store import MemoryStore

HERE = "tcp://127.0.0.1:*"
MEMORY_BYTES = 3.5e6  # a little more than half the model
NUM_PEERS = 4  # two clusters of two


@pytest.mark.needs_root
def test_a_hub_is_killed_in_a_round_and_later_its_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", "16m") as folder:
        hub = HubProgram(tmp_path, folder, NUM_PEERS)
        peers = Peers(hub.invite(), tmp_path, flops_per_second=FLOPS_PER_SECOND, memory_bytes=MEMORY_BYTES)
        try:
            for number in range(NUM_PEERS):
                peers.start(f"node{number}")
            killed = hub.run(fault=Fault(RoundReady, kill_itself, after=EpochDone))
            filled = hub.run("--resume", fault=Fault(EpochDone, fill))
            assert len(peers.alive) == NUM_PEERS  # they wait for a hub that says it can go on
            (folder / "full").unlink()
            ended = hub.run("--resume", fault=Fault(EpochDone, stop_itself, count=2))
        finally:
            peers.close()
        said = [killed.said, filled.said, ended.said]
        sys.stderr.write("--- started again\n".join(said))
        assert [killed.code, filled.code, ended.code] == [-9, 3, 0]
        full = filled.said.splitlines()[-1]
        assert full.startswith(f"error: {folder}: the disk is full; make room and start the hub again")
        assert "Traceback" not in filled.said
        for text in (filled.said, ended.said):
            back = re.findall(r"^(\w+) is back, with what it had", text, re.M)
            assert set(back) == {f"node{number}" for number in range(NUM_PEERS)}
            assert len(re.findall(r"trains again after \d", text)) >= 2
        epochs = re.findall(r"^epoch (\d+): (\d+) samples, loss ([\d.]+)", "".join(said), re.M)
        assert {int(count) for _, count, _ in epochs} == {NUM_SAMPLES}
        assert len({epoch for epoch, _, _ in epochs}) == len(epochs) >= 4
        done = json.loads(ended.answers.splitlines()[-1])
        assert done["metrics"]["val_loss"] < 0.5 * float(epochs[0][-1])
        assert (folder / "model.safetensors").is_file()


def test_peers_train_what_they_have_while_the_hub_is_dead_and_it_counts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    hub = HubProgram(tmp_path, folder, 2, evaluate_every=10_000)
    device = {"flops_per_second": FLOPS_PER_SECOND, "memory_bytes": 2 * MEMORY_BYTES}
    peers = Peers(hub.invite(), tmp_path, **device)
    try:
        for name in ("node0", "node1"):
            peers.start(name)
        killed = hub.run(fault=Fault(LeaseDone, kill_itself, count=4))
        deadline = time.monotonic() + 120.0
        while not any("are trained without the hub" in peers.said(name) for name in peers.alive):
            assert time.monotonic() < deadline, [peers.said(name) for name in peers.alive]
            time.sleep(0.05)  # for another program's words
        ended = hub.run("--resume", fault=Fault(EpochDone, stop_itself, count=2))
    finally:
        peers.close()
    sys.stderr.write(f"{killed.said}--- started again\n{ended.said}")
    assert [killed.code, ended.code] == [-9, 0]
    with EventLog(folder, is_read_only=True) as log:
        events = [*log.events()]
    assert isinstance(events[0], JobGiven)
    back = next(number for number, event in enumerate(events) if isinstance(event, Restarted))
    books = Coordinator(events[0])
    for event in events[:back]:
        books.apply(event)
    ahead = {lease.number for lease in books.ledger.leases_ahead}
    planned = next(n for n, event in enumerate(events) if n > back and isinstance(event, PlanMade))
    said = [event.message for event in events[back:planned] if isinstance(event, Received)]
    counted = {message.lease for message in said if isinstance(message, LeaseDone)}
    assert counted & ahead, "begun and done while there was no hub"
    epochs = re.findall(r"^epoch (\d+): (\d+) samples", killed.said + ended.said, re.M)
    assert {int(count) for _, count in epochs} == {NUM_SAMPLES}
    assert len({epoch for epoch, _ in epochs}) == len(epochs) >= 2


@pytest.mark.needs_root
def test_a_disk_that_takes_no_checkpoints_does_not_end_the_run(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        story = Story(
            [
                Step(is_news(Checkpointed), lambda _: fill(disk)),
                Step(is_news(NotCheckpointed), lambda _: (disk / "full").unlink()),
                Step(is_news(Checkpointed), lambda _: let_write(disk, is_allowed=False)),
                Step(is_news(NotCheckpointed), lambda _: let_write(disk, is_allowed=True)),
                Step(is_news(Checkpointed), lambda _: None),
            ]
        )
        with swarm(story, tmp_path, 3) as hub:
            result = hub.fit(make_job(), nodes=3, out=disk)
        assert check(story, result) < 0.5 * story.of(EpochDone)[0].loss
        reasons = [news.reason for news in story.of(NotCheckpointed)]
        assert "is full; make room" in reasons[0]
        assert any("cannot be written (Read-only file system)" in reason for reason in reasons)
        assert (disk / "model.safetensors").is_file()


@pytest.mark.needs_root
def test_a_folder_that_may_not_be_written_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        with rv.Hub("127.0.0.1:0", folder=disk / "begun"):
            pass
        let_write(disk, is_allowed=False)
        for folder in (disk / "new", disk / "begun"):
            told = f"the folder {folder} cannot be written: Read-only file system; give a folder"
            with pytest.raises(ConfigError, match=re.escape(told)), rv.Hub("127.0.0.1:0", folder=folder):
                pass
        with rv.Hub("127.0.0.1:0") as hub:
            for out in (disk, disk / "new", disk / "model.safetensors"):
                with pytest.raises(ConfigError, match="cannot be written; give a folder that exists and is"):
                    hub.fit(make_job(), out=out)


@pytest.mark.parametrize("num_logged", [0, 1])
def test_a_hub_whose_log_takes_no_more_ends_with_the_reason_whatever_it_was_at(num_logged: int) -> None:
    def check(_: Event) -> None:
        if len(store.kept) == num_logged:
            raise ConfigError("the disk is full")

    store = MemoryStore(check)

    async def main() -> None:
        keys = new_keys()
        given = job()
        server = Server(Token((), keys.public, bytes(16)), print, store=store, hub=Coordinator(given))
        async with ZeroMqTransport(keys, SystemRandom(), HERE, admit=server.admit) as transport:
            asyncio.get_running_loop().call_later(0.0, server.stop, "a callback, from which nobody hears")
            async with asyncio.timeout(120):
                await server.run(transport, Mock(), given)

    with pytest.raises(ConfigError, match="the disk is full"):
        asyncio.run(main())
    assert len(store.kept) == num_logged
