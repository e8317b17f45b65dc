"""What a hub keeps on disk: what comes back is what was put, and what is damaged, foreign or shut is told."""

import shutil
import sqlite3
import threading
from dataclasses import asdict, is_dataclass, replace
from enum import Enum

import msgspec
import pytest
from replay.neutral import find_records
from support.hub_world import HubWorld, Trouble, blob, freeze, job

from ravnest.errors import ConfigError
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Event, Received, Stopped, Tick
from ravnest.hub.coordinator.notices import Joined, PlanFormed, RoundEnded
from ravnest.hub.coordinator.phases import ClusterPhase, JobPhase, NodePhase
from ravnest.hub.monitors.monitors import apply_logged
from ravnest.hub.service.event_log import (
    LOG_SCHEMA,
    EventLog,
    read_event,
    read_status,
    read_watch,
    write_event,
)
from ravnest.hub.service.status import ClusterStatus, MemberStatus, Status, StatusTracker
from ravnest.protocol.membership import Leave
from ravnest.protocol.placement import SnapshotMade
from ravnest.protocol.training import LeaseDone


def log_of(folder):
    with EventLog(folder) as store:
        return list(store.events())


def trained_world(**changes):
    world = HubWorld(job(**changes))
    world.join(*"abcde", memory_mb=250.0)
    return world.run()


# The log.


def test_events_come_back_in_order_as_they_were(tmp_path):
    world = trained_world()
    with EventLog(tmp_path / "a new" / "folder") as store:
        for event in world.log:
            store.append(event)
        assert list(store.events()) == world.log
    assert log_of(tmp_path / "a new" / "folder") == world.log


def test_only_what_changes_something_is_logged_and_the_replayed_hub_goes_on_alike(tmp_path):
    world = trained_world()
    hub = Coordinator(world.given)
    with EventLog(tmp_path) as store:
        for event, orders in zip(world.log, world.answers, strict=True):
            assert apply_logged(hub, event, store.append) == orders
        refused = apply_logged(hub, Received("ghost", Leave(0, "?"), 1e6), store.append)
        assert len(refused) == 1
        assert apply_logged(hub, Received("a", LeaseDone(9, 9, 9), 1e6), store.append) != ()
        assert list(store.events()) == world.log
    again = read_watch(tmp_path).hub
    assert again.now == hub.now == world.now
    assert (again.phase, again.due) == (JobPhase.FINISHED, None)
    event = Stopped("late", 1e6)
    assert again.apply(event) == hub.apply(event)


def test_an_event_outlives_the_process_that_logged_it(tmp_path):
    with EventLog(tmp_path / "running") as store:
        for number in range(100):
            store.append(Tick(float(number)))
        shutil.copytree(tmp_path / "running", tmp_path / "killed")  # what a kill -9 leaves
    assert log_of(tmp_path / "killed") == [Tick(float(number)) for number in range(100)]


@pytest.mark.parametrize("num_lost", [1, 100, 5000])
def test_an_event_that_was_half_written_never_happened(tmp_path, num_lost):
    with EventLog(tmp_path / "running") as store:
        store.append(replace(job(), now=0.0))
        for number in range(1, 100):
            store.append(Tick(float(number)))
        shutil.copytree(tmp_path / "running", tmp_path / "cut")
    rest = tmp_path / "cut" / "hub.sqlite-wal"
    rest.write_bytes(rest.read_bytes()[:-num_lost])
    (tmp_path / "cut" / "hub.sqlite-shm").unlink()
    kept = log_of(tmp_path / "cut")
    assert kept[1:] == [Tick(float(number)) for number in range(1, len(kept))]
    assert 90 < len(kept) < 100
    assert read_status(tmp_path / "cut").now == len(kept) - 1


def test_to_append_never_moves_the_journal_into_the_log_and_a_thread_does(tmp_path):
    jobs = []
    with EventLog(tmp_path, in_background=jobs.append) as store:
        before = (tmp_path / "hub.sqlite").stat().st_size
        for number in range(2_500):
            store.append(Tick(float(number)))
        assert (len(jobs), (tmp_path / "hub.sqlite").stat().st_size) == (2, before)
        worker = threading.Thread(target=jobs[-1])
        worker.start()
        worker.join()
        assert (tmp_path / "hub.sqlite").stat().st_size > before
        store.append(Tick(2_500.0))
    assert log_of(tmp_path) == [Tick(float(number)) for number in range(2_501)]


def test_a_message_is_logged_as_it_travelled():
    event = Received("a", SnapshotMade(1, 2, 3, blob("y")), 3.0)
    kind, body = write_event(event)
    assert read_event(kind, body) == event
    assert kind == "Received"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("Tick", b""),
        ("Tick", msgspec.msgpack.encode({"now": "soon"})),
        ("Received", msgspec.msgpack.encode(("a", b"junk", 1.0))),
        ("Received", msgspec.msgpack.encode(("a", "junk", 1.0))),
        ("Popen", msgspec.msgpack.encode({"args": "ls"})),
    ],
)
def test_a_damaged_event_is_named(tmp_path, kind, body):
    with EventLog(tmp_path) as store:
        store.append(Tick(1.0))
        store._database.execute("INSERT INTO events (kind, body) VALUES (?, ?)", (kind, body))
        with pytest.raises(ConfigError, match="event 2 of its log is damaged"):
            list(store.events())


# Folders that are no good.


def refusal(folder, **options):
    with pytest.raises(ConfigError) as caught:
        EventLog(folder, **options).open()
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_a_second_hub_in_the_same_folder_is_refused_and_readers_are_not(tmp_path):
    with EventLog(tmp_path) as store:
        store.append(Tick(1.0))
        assert "another hub is running there" in refusal(tmp_path)
        with EventLog(tmp_path, is_read_only=True) as reader:
            store.append(Tick(2.0))
            assert list(reader.events()) == [Tick(1.0), Tick(2.0)]
            with pytest.raises(ConfigError, match="cannot be written"):
                reader.append(Tick(3.0))
    assert log_of(tmp_path) == [Tick(1.0), Tick(2.0)]


def test_a_store_that_could_not_be_opened_leaves_no_lock(tmp_path):
    (tmp_path / "hub.sqlite").write_text("no database, but long enough to be looked at" * 50)
    assert "hub.sqlite is damaged or of another program" in refusal(tmp_path)
    (tmp_path / "hub.sqlite").unlink()
    assert log_of(tmp_path) == []


def test_a_log_of_another_version_says_which_ravnest_reads_it(tmp_path):
    log_of(tmp_path)
    with sqlite3.connect(tmp_path / "hub.sqlite") as database:
        database.execute(f"PRAGMA user_version = {LOG_SCHEMA + 1}")
    database.close()
    for is_read_only in (False, True):
        text = refusal(tmp_path, is_read_only=is_read_only)
        assert f"is of version {LOG_SCHEMA + 1}, this ravnest reads version {LOG_SCHEMA}" in text


def test_a_database_of_another_program_is_left_alone(tmp_path):
    with sqlite3.connect(tmp_path / "hub.sqlite") as database:
        database.execute("CREATE TABLE recipes (name TEXT)")
    database.close()
    assert "of another program" in refusal(tmp_path)
    assert "of another program" in refusal(tmp_path, is_read_only=True)


def test_a_folder_that_is_a_file_or_is_not_there(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "it cannot be written" in refusal(tmp_path / "file")
    assert "there is no log of a hub" in refusal(tmp_path / "nothing", is_read_only=True)
    assert not (tmp_path / "nothing").exists()


def test_a_full_disk_is_told_and_what_was_logged_stays(tmp_path):
    with EventLog(tmp_path) as store:
        store.append(Tick(0.0))
        (pages,) = store._database.execute("PRAGMA page_count").fetchone()
        store._database.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(ConfigError, match="the disk is full; make room and start the hub again"):
            store.append(Stopped("why" * 10_000, 1.0))
    assert log_of(tmp_path) == [Tick(0.0)]


def test_a_log_on_a_disk_that_turned_read_only(tmp_path):
    with EventLog(tmp_path) as store:
        store._database.execute("PRAGMA query_only = 1")
        with pytest.raises(ConfigError, match="it cannot be written; choose another folder"):
            store.append(Tick(0.0))


# A folder that somebody else made.


def crafted_state(trap):
    """A saved state of earlier versions: their loader called whatever function it names."""
    table = [
        ("object", ["ravnest.hub.service.status:StatusTracker", ["hub", [1]]]),
        ("object", ["ravnest.hub.coordinator.coordinator:Coordinator", ["apply", [2]]]),
        ("method", [[3], "system"]),
        ("object", ["os", ["command", f"touch {trap}"]]),
    ]
    return msgspec.msgpack.encode(([0], table))


def test_nothing_but_events_is_read_from_a_folder(tmp_path):
    folder, trap = tmp_path / "run", tmp_path / "trap"
    world = trained_world()
    with EventLog(folder) as store:
        for event in world.log:
            store.append(event)
    expected = read_status(folder)
    with sqlite3.connect(folder / "hub.sqlite") as database:
        database.execute("CREATE TABLE states (id INTEGER PRIMARY KEY, number INTEGER, seal TEXT, body BLOB)")
        row = (0, len(world.log), "seal", crafted_state(trap))
        database.execute("INSERT INTO states VALUES (?, ?, ?, ?)", row)
    database.close()
    assert read_status(folder) == expected
    assert freeze(read_watch(folder).hub) == freeze(world.hub)
    assert not trap.exists()


def test_the_log_is_read_without_running_or_importing_what_it_names(tmp_path):
    """Every class that a log may name is a record of events; none is looked up by a name in the file."""
    records = find_records(Event)
    assert records
    for record in records.values():
        assert record.__module__.partition(".")[0] == "ravnest"
        assert is_dataclass(record) or issubclass(record, Enum | dict)
    with EventLog(tmp_path) as store:
        bodies = [{"args": "ls"}, ["ls"], ("a", b"ls", 1.0)]
        for kind in ("subprocess:Popen", "os:system", "Path", "Coordinator", "__class__", ""):
            for body in bodies:
                with pytest.raises(ValueError, match="no event is called"):
                    read_event(kind, msgspec.msgpack.encode(body))
        assert list(store.events()) == []


# Status.


def watched(world, folder):
    """Log a world's history; return what somebody saw beside the hub, and what its folder says."""
    hub = Coordinator(world.given)
    watch = StatusTracker(hub)
    with EventLog(folder) as store:
        for event in world.log:
            watch.observe(event, apply_logged(hub, event, store.append))
        return watch, read_status(folder)  # while the hub is still at it


def test_the_status_of_a_run_from_its_folder_is_what_was_seen_live(tmp_path):
    world = trained_world(num_samples=64, epochs=3)
    watch, status = watched(world, tmp_path)
    assert status == watch.status()
    assert status == read_status(tmp_path)
    assert status.phase is JobPhase.FINISHED
    assert (status.job, status.epoch, status.num_samples, status.num_total) == ("even", 3, 192, 192)
    assert status.num_updates == 48
    assert (status.validation_epoch, set(status.validation)) == (3, {"loss", "acc"})
    assert status.rounds_committed > 1
    assert status.rounds_aborted == 0
    assert status.recent[-1].text == "the job is done, and its weights are here"
    assert [said.now for said in status.recent] == sorted(said.now for said in status.recent)
    assert len(status.recent) == 20
    assert not any("of the training" in said.text for said in status.recent)


def test_rounds_that_did_not_happen_are_counted_apart(tmp_path):
    world = HubWorld(job(), Trouble(gives_up=1.0))
    world.join(*"abcde", memory_mb=250.0)
    _, status = watched(world.run(), tmp_path)
    assert (status.rounds_committed, status.rounds_aborted) == (0, len(world.told(RoundEnded)))


def test_who_does_what(tmp_path):
    world = HubWorld(job())
    world.join(*"abcde", memory_mb=250.0)
    world.run_until(lambda: len(world.told(Joined)) == 5)
    _, status = watched(world, tmp_path / "1")
    assert status.members == tuple(MemberStatus(name, NodePhase.SPARE) for name in "abcde")
    assert (status.phase, status.clusters, status.loss) == (JobPhase.COLLECTING, (), None)
    world.run_until(lambda: world.told(PlanFormed))
    world.join("late", memory_mb=1.0)  # too little for any stage
    world.run(until=world.now)
    _, status = watched(world, tmp_path / "2")
    assert {member.phase for member in status.members} == {"building", "spare"}
    world.run_until(lambda: len(world.ledger) > 20)
    world.kill("a")
    world.run_until(lambda: "a" not in world.known)
    _, status = watched(world, tmp_path / "3")
    cluster = next(each for each in world.hub.clusters if each.is_running)
    assert ClusterStatus(cluster.name, cluster.nodes, ClusterPhase.RUNNING) in status.clusters
    root, spare = (next(x for x in status.members if x.name == name) for name in (cluster.root, "late"))
    assert (root.phase, root.cluster, root.stage) == ("hosting", cluster.name, 0)
    assert (spare.phase, spare.cluster, spare.stage) == ("spare", None, None)
    assert "a" not in {member.name for member in status.members}
    assert any("stands still" in said.text for said in status.recent)
    assert status.loss is not None


def test_the_rate_is_of_the_last_minute(tmp_path):
    world = HubWorld(job(num_samples=4000, epochs=1, num_validation=0))
    world.join(*"abc")
    world.run_until(lambda: world.now > 200)
    watch, status = watched(world, tmp_path)
    assert status.samples_per_second == pytest.approx(4 / 0.3, rel=0.05)
    assert watch.status(now=status.now + 30).samples_per_second == pytest.approx(2 / 0.3, rel=0.1)
    assert watch.status(now=status.now + 90).samples_per_second < 0.2
    assert len(watch._marks) < 63


def test_a_stopped_job_and_an_empty_folder(tmp_path):
    world = HubWorld(job())
    world.stop("Ctrl-C")
    _, status = watched(world, tmp_path / "stopped")
    assert [said.text for said in status.recent] == [
        "the job is stopped (Ctrl-C); what was trained is kept",
        "the job was stopped when there was nothing to keep, no checkpoint either",
    ]
    log_of(tmp_path / "empty")
    status = read_status(tmp_path / "empty")
    assert (status.phase, status.job, status.epoch, status.num_total) == (JobPhase.COLLECTING, "", 0, 0)
    with pytest.raises(ConfigError, match="there is no log of a hub"):
        read_status(tmp_path / "nothing")


def test_a_status_becomes_json_and_back(tmp_path):
    _, status = watched(trained_world(), tmp_path)
    assert msgspec.json.decode(msgspec.json.encode(status), type=Status) == status
    assert asdict(status)["phase"] == "finished"
