"""Checkpoints in a bucket, a real server: which of them count, and what a hub on another PC finds there."""

from pathlib import Path

import pytest

from ravnest.config import TIMEOUTS
from ravnest.errors import BucketError, ConfigError, FencedOff
from ravnest.hub.service.postgres_log import PostgresLog
from ravnest.requester.bucket import Bucket
from ravnest.requester.checkpoint_mirror import CheckpointMirror
from ravnest.requester.checkpoint_store import CheckpointError, Checkpoints
from tests.support.saved_run import books_of, check_content, parts_of
from tests.support.store_servers import PostgresServer
from tests.support.stores_world import open_log

pytestmark = pytest.mark.needs_postgres
KEY = b"k" * 32


def test_checkpoints_come_back_from_the_bucket_but_none_of_a_hub_that_was_fenced_off(
    server: PostgresServer, bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = Bucket(f"{bucket}/moved", TIMEOUTS.store)

    def mirrored(folder: str, log: PostgresLog) -> Checkpoints:
        mirror = CheckpointMirror(there, log)
        mirror.bring_back(tmp_path / folder, KEY)
        return Checkpoints(tmp_path / folder, 2, key=KEY, mirror=mirror)

    log = open_log(server, "moved")
    first = mirrored("a", log)
    for number, score in ((1, 0.1), (2, 0.5), (3, 0.4)):
        first.write(number, parts_of(number), books_of(number), score)
    first.write(4, parts_of(4), books_of(4))
    names = {name.partition("/")[0] for name in there.find("checkpoints")}
    assert names == {"000001-1", "000003-1", "000004-1"}, "the best and the newest two"

    second = mirrored("b", open_log(server, "moved"))
    check_content(second.find(), 4)
    check_content(second.find_best(), 1)
    assert sorted(each.name for each in (tmp_path / "b/checkpoints").iterdir()) == ["000001", "000004"]

    with pytest.raises(
        CheckpointError, match=r"is on this PC, but not in s3://.*: another hub has taken this run over"
    ):
        first.write(5, parts_of(5), books_of(5))
    with pytest.raises(FencedOff):
        CheckpointMirror(there, log).send_result(tmp_path / "model.safetensors")
    second.write(5, parts_of(5), books_of(5), 0.9)

    third = mirrored("a", open_log(server, "moved"))
    assert "checkpoint 000005 of this PC does not count any more; it is set aside" in caplog.text
    check_content(third.find(), 5)
    third.write(6, parts_of(6), books_of(6))
    names = {name.partition("/")[0] for name in there.find("checkpoints")}
    assert names == {"000001-1", "000005-2", "000006-3"}, "what does not count is removed"


def test_what_was_changed_in_a_bucket_is_passed_over(
    server: PostgresServer, bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = Bucket(f"{bucket}/changed", TIMEOUTS.store)
    kept = Checkpoints(tmp_path / "a", key=KEY, mirror=CheckpointMirror(there, open_log(server, "changed")))
    for number in (1, 2, 3):
        kept.write(number, parts_of(number), books_of(number))
    other = tmp_path / "other"
    other.write_bytes((tmp_path / "a/checkpoints/000001/part-0.safetensors").read_bytes())
    there.send(other, "checkpoints/000003-1/part-0.safetensors")
    # Of another run with this key: signed, whole, of the same number, but not what was registered.
    Checkpoints(tmp_path / "c", key=KEY).write(2, parts_of(2), books_of(2), 0.7)
    there.send(tmp_path / "c/checkpoints/000002/manifest.json", "checkpoints/000002-1/manifest.json")
    CheckpointMirror(there, open_log(server, "changed")).bring_back(tmp_path / "b", KEY)
    check_content(Checkpoints(tmp_path / "b", key=KEY).find(), 1)
    assert "checkpoint 000002 in s3://runs/changed is passed over" in caplog.text


def mirror_of(server: PostgresServer, bucket: str, name: str) -> CheckpointMirror:
    """A hub opens the run of this name, on whatever PC."""
    return CheckpointMirror(Bucket(f"{bucket}/{name}", TIMEOUTS.store), open_log(server, name))


def test_checkpoints_of_a_pc_that_count_stay_whatever_became_of_the_bucket(
    server: PostgresServer, bucket: str, tmp_path: Path
) -> None:
    kept = Checkpoints(tmp_path, key=KEY, mirror=mirror_of(server, bucket, "emptied"))
    kept.write(1, parts_of(1), books_of(1))
    kept.write(2, parts_of(2), books_of(2))
    there = Bucket(f"{bucket}/emptied", TIMEOUTS.store)
    there.remove([f"checkpoints/{name}" for name in there.find("checkpoints")])
    (tmp_path / "checkpoints/mine").mkdir()
    (tmp_path / "checkpoints/7").mkdir()
    mirror_of(server, bucket, "emptied").bring_back(tmp_path, KEY)
    check_content(kept.find(), 2)
    assert not (tmp_path / "earlier-1").exists()


def test_a_run_does_not_go_on_from_less_because_the_bucket_is_away_for_a_moment(
    server: PostgresServer, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Checkpoints(tmp_path / "a", key=KEY, mirror=mirror_of(server, bucket, "away"))
    kept.write(1, parts_of(1), books_of(1))
    with monkeypatch.context() as changed:
        changed.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        mirror = mirror_of(server, bucket, "away")
        with pytest.raises(ConfigError, match=r"Could not connect .* start the hub again with --resume"):
            mirror.bring_back(tmp_path / "b", KEY)
        mirror.bring_back(tmp_path / "a", KEY)
    check_content(kept.find(), 1)
    mirror_of(server, bucket, "away").bring_back(tmp_path / "b", KEY)
    check_content(Checkpoints(tmp_path / "b", key=KEY).find(), 1)


def test_a_checkpoint_that_was_damaged_here_comes_from_the_bucket_again(
    server: PostgresServer, bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Checkpoints(tmp_path, key=KEY, mirror=mirror_of(server, bucket, "healed"))
    kept.write(1, parts_of(1), books_of(1))
    kept.write(2, parts_of(2), books_of(2))
    (tmp_path / "checkpoints/000002/part-1.safetensors").write_bytes(b"")
    mirror_of(server, bucket, "healed").bring_back(tmp_path, KEY)
    check_content(kept.find(), 2)
    assert "checkpoint 000002 of this PC is damaged; it is set aside" in caplog.text


def test_a_run_that_gets_a_bucket_later_keeps_the_checkpoints_that_it_had(
    server: PostgresServer, bucket: str, tmp_path: Path
) -> None:
    open_log(server, "later")
    Checkpoints(tmp_path, key=KEY).write(1, parts_of(1), books_of(1), 0.1)
    mirror = mirror_of(server, bucket, "later")
    mirror.bring_back(tmp_path, KEY)
    kept = Checkpoints(tmp_path, key=KEY, mirror=mirror)
    check_content(kept.find(), 1)
    kept.write(2, parts_of(2), books_of(2), 0.2)
    mirror_of(server, bucket, "later").bring_back(tmp_path, KEY)
    check_content(kept.find(), 2)
    check_content(kept.find_best(), 1)


def test_a_number_whose_checkpoint_is_lost_is_written_and_registered_anew(
    server: PostgresServer, bucket: str, tmp_path: Path
) -> None:
    kept = Checkpoints(tmp_path / "a", key=KEY, mirror=mirror_of(server, bucket, "anew"))
    kept.write(1, parts_of(1), books_of(1))
    kept.write(2, parts_of(3), books_of(2))
    there = Bucket(f"{bucket}/anew", TIMEOUTS.store)
    other = tmp_path / "a/checkpoints/000001/part-0.safetensors"
    there.send(other, "checkpoints/000002-1/part-0.safetensors")
    mirror = mirror_of(server, bucket, "anew")
    mirror.bring_back(tmp_path / "b", KEY)
    kept = Checkpoints(tmp_path / "b", key=KEY, mirror=mirror)
    check_content(kept.find(), 1)
    kept.write(kept.next_number, parts_of(2), books_of(2))
    mirror_of(server, bucket, "anew").bring_back(tmp_path / "c", KEY)
    check_content(Checkpoints(tmp_path / "c", key=KEY).find(), 2)


def test_a_new_training_keeps_what_the_bucket_has_of_the_one_before(
    server: PostgresServer, bucket: str, tmp_path: Path
) -> None:
    """Who forgets --resume on another PC loses nothing."""
    kept = Checkpoints(tmp_path / "a", key=KEY, mirror=mirror_of(server, bucket, "forgotten"))
    kept.write(1, parts_of(1), books_of(1))
    log = open_log(server, "forgotten")
    log.begin(with_checkpoints=False)
    there = Bucket(f"{bucket}/forgotten", TIMEOUTS.store)
    kept = Checkpoints(tmp_path / "b", 1, key=KEY, mirror=CheckpointMirror(there, log))
    for number in (0, 1):
        kept.write(number, parts_of(number), books_of(number))
    assert {name.partition("/")[0] for name in there.find("checkpoints")} == {"000001-1", "000001-2"}


def test_a_hub_that_is_fenced_off_while_it_tidies_removes_nothing(
    server: PostgresServer, bucket: str, tmp_path: Path
) -> None:
    """The other hub begins a log that goes on from the checkpoint which the first has just registered."""
    log, there = open_log(server, "tidies"), Bucket(f"{bucket}/tidies", TIMEOUTS.store)

    class Overtaken:
        """A register of a hub that another one overtakes as soon as a checkpoint is in it."""

        fence = log.fence
        check, unregister = log.check, log.unregister
        checkpoints, earlier_checkpoints = log.checkpoints, log.earlier_checkpoints

        def register(self, number: int, manifest: str) -> None:
            log.register(number, manifest)
            open_log(server, "tidies").begin(with_checkpoints=True)

    kept = Checkpoints(tmp_path, key=KEY, mirror=CheckpointMirror(there, Overtaken()))
    with pytest.raises(CheckpointError, match="another hub has taken this run over"):
        kept.write(1, parts_of(1), books_of(1))
    assert {name.partition("/")[0] for name in there.find("checkpoints")} == {"000001-1"}


@pytest.mark.parametrize(
    ("file", "sent"),
    [
        (
            "model.safetensors",
            {
                *("model.safetensors", "config.json", "best/adapter_model.safetensors"),
                *("best-00001-of-00002.safetensors", "best.safetensors.index.json", "ema.safetensors"),
                *("ema/adapter_model.safetensors", "ema/adapter_config.json"),
            },
        ),
        ("mine.safetensors", {"mine.safetensors", "mine-00001-of-00002.safetensors"}),
    ],
)
def test_the_result_goes_to_the_bucket_and_nothing_else_that_lies_beside_it(
    server: PostgresServer, bucket: str, tmp_path: Path, file: str, sent: set[str]
) -> None:
    foreign = {"other.safetensors", "cloud-config.json", "best/notes.txt", "hub.json"}
    for name in sent | foreign:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    mirror_of(server, bucket, file).send_result(tmp_path / file)
    assert set(Bucket(f"{bucket}/{file}", TIMEOUTS.store).find("result-000001")) == sent


def test_what_a_bucket_refuses_is_a_sentence_without_a_key(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="s3://nowhere/x: 404"):
        Bucket("s3://nowhere/x", TIMEOUTS.store).check()
    here = Bucket(f"{bucket}/large", TIMEOUTS.store)
    here.send(Path(__file__), "file")
    with pytest.raises(BucketError, match=r"is .* too large"):
        here.read("file", 10)
    for server in ("http://ana:s3cret@127.0.0.1:1", "127.0.0.1:1"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", server)
        with pytest.raises(ConfigError, match="write s3://BUCKET/PREFIX") as refused:
            Bucket("s3://runs/x", TIMEOUTS.store).check()
        assert "s3cret" not in str(refused.value)
