"""A run that was stopped, has ended or was killed at its very end goes on from its folder, or is done."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from benchmarks.joining import Peers
from ravnest.hub.coordinator.events import Collect, Finish
from ravnest.hub.coordinator.notices import Checkpointed, EpochDone, Waiting
from tests.support.faults import NUM_SAMPLES
from tests.support.hub_program import Ended, Fault, HubProgram, kill_itself, stop_itself

FLOPS_PER_SECOND, MEMORY_BYTES = 2e9, 600e6


@contextmanager
def joined(hub: HubProgram, place: Path) -> Iterator[Peers]:
    """One peer that looks for the hub until it is there."""
    peers = Peers(hub.invite(), place, flops_per_second=FLOPS_PER_SECOND, memory_bytes=MEMORY_BYTES)
    try:
        peers.start("node")
        yield peers
    finally:
        peers.close()


def read_done(ended: Ended) -> dict[str, Any]:
    """What the hub answered in the end, after all went well."""
    assert ended.code == 0, ended.said
    done: dict[str, Any] = json.loads(ended.answers.splitlines()[-1])
    assert done["event"] == "done"
    return done


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def is_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(other[name].equal(tensor) for name, tensor in one.items())


def test_a_stopped_run_goes_on_with_another_number_of_epochs_and_a_finished_one_is_done(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    hub = HubProgram(tmp_path, folder, 1, checkpoint_every=None)
    with joined(hub, tmp_path) as peers:
        stopped = read_done(hub.run(fault=Fault(EpochDone, stop_itself, count=2)))
        assert peers.end("node") == 0
    before, epoch = weights(folder), int(stopped["metrics"]["epoch"])

    fewer = HubProgram(tmp_path, folder, 1, epochs=1, checkpoint_every=None).run("--resume")
    assert fewer.code == 3
    assert "and the job has 1 epochs; set epochs=" in fewer.said

    hub = HubProgram(tmp_path, folder, 1, epochs=epoch + 2, checkpoint_every=None)
    with joined(hub, tmp_path) as peers:
        ended = hub.run("--resume")
        done = read_done(ended)
        assert peers.end("node") == 0
    assert (
        f"it goes on with {epoch + 2} epochs, no longer 10000; from here the learning rate is of"
        in ended.said
    )
    trained = re.search(r"training goes on from the checkpoint of (\d+) samples", ended.said)
    assert trained is not None
    assert 2 * NUM_SAMPLES <= int(trained[1]) <= epoch * NUM_SAMPLES
    told = [int(found) for found in re.findall(r"^epoch (\d+): ", ended.said, re.M)]
    assert set(told) == set(range(int(trained[1]) // NUM_SAMPLES + 1, epoch + 3))
    epochs = [int(each["epoch"]) for each in done["history"] if "num_samples" in each]
    assert sorted(epochs) == list(range(1, epoch + 3))
    after = weights(folder)
    assert not is_same(before, after)

    (folder / "model.safetensors").unlink()
    again = hub.run("--resume")
    assert read_done(again) == done
    assert f"the run is finished: all {(epoch + 2) * NUM_SAMPLES} samples are trained" in again.said
    assert is_same(after, weights(folder))

    anew = hub.run()
    assert (anew.code, anew.answers) == (3, "")
    assert (
        "holds a finished run; give another folder or move it away, or go on with it: --resume" in anew.said
    )
    assert is_same(after, weights(folder))


def test_a_hub_killed_as_its_result_is_written_ends_with_its_peers_or_with_what_it_wrote(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    hub = HubProgram(tmp_path, folder, 1, epochs=2, checkpoint_every=None)
    with joined(hub, tmp_path) as peers:
        killed = hub.run(fault=Fault(Collect, kill_itself))
        assert (killed.code, (folder / "model.safetensors").exists()) == (-9, False)
        assert peers.alive, "nobody is sent home before the result is on disk"
        killed = hub.run("--resume", fault=Fault(Finish, kill_itself))
        assert killed.code == -9
        assert "node is back, with what it had" in killed.said
        written = weights(folder)
    ended = hub.run("--resume")
    assert read_done(ended)["metrics"]["epoch"] == 2
    assert f"the run is finished: all {2 * NUM_SAMPLES} samples are trained" in ended.said
    assert is_same(written, weights(folder))


def test_a_run_stopped_when_nobody_is_left_ends_with_its_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    hub = HubProgram(tmp_path, folder, 1)
    with joined(hub, tmp_path):
        killed = hub.run(fault=Fault(Checkpointed, kill_itself, after=EpochDone))
        assert killed.code == -9
    ended = hub.run("--resume", fault=Fault(Waiting, stop_itself))
    done = read_done(ended)
    assert "nobody is left to ask: the last checkpoint is the result, " in ended.said
    assert done["metrics"]["epoch"] >= 1
    assert weights(folder)
