"""`ravnest hub` and `ravnest join` as people start them, each in its own terminal; `status` and `stop`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file

RAVNEST = [sys.executable, "-m", "ravnest"]
JOB = """
import torch, torch.nn.functional as F, ravnest as rv
torch.manual_seed(0)
print("what a user's file prints is no answer")
x = torch.randn(512, 8)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
def make(epochs):
    data = {"x": x, "y": (x.sum(1) > 0).long()}
    return rv.Job(model, data, val_data=data, batch_size=32, epochs=epochs, name="sums", average_every=4,
                  loss=lambda out, batch: F.cross_entropy(out, batch["y"]))
short, long = make(20), make(100_000)
"""


@contextmanager
def started(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the command; make sure that it is gone afterwards."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*RAVNEST, *arguments], cwd=folder, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def swarm(job: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[subprocess.Popen[str]]]]:
    """A hub that waits for two peers, and the two, who have its invitation."""
    (folder / "job.py").write_text(JOB)
    options = ("--listen", "127.0.0.1:0", "--nodes", "2", "--folder", "run", "--json")
    with started("hub", f"job.py:{job}", *options, folder=folder) as hub:
        opened = json.loads(hub.stdout.readline())
        assert opened["schema"] == "ravnest.hub/1"
        assert opened["folder"] == "run"
        assert opened["dashboard"].startswith("http://127.0.0.1:")
        lent = ("--memory", "2 GB", "--flops", "1 GFLOP/s", "--listen", "127.0.0.1:0", "--patience", "600 s")
        join = ("join", opened["invitation"], *lent)
        with started(*join, folder=folder) as one, started(*join, folder=folder) as other:
            yield hub, [one, other]


def ask(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RAVNEST, *arguments], cwd=folder, capture_output=True, text=True)


def wait_for(words: str, hub: subprocess.Popen[str]) -> str:
    """Read what it says until then, and return it."""
    said: list[str] = []
    while words not in (line := hub.stderr.readline()):
        said.append(line)
        assert line, f"the hub ended before it said {words!r}: {said}"
    return "".join(said)


def test_a_run_that_is_stopped_keeps_what_was_trained(tmp_path: Path) -> None:
    with swarm("long", tmp_path) as (hub, peers):
        before = wait_for("epoch 2:", hub)
        assert "what a user's file prints" in before
        status = json.loads(ask("status", "run", "--json", folder=tmp_path).stdout)
        assert (status["phase"], status["is_running"]) == ("training", True)
        assert "hosting" in {member["phase"] for member in status["members"]}  # the other may not yet
        doctor = ask("doctor", ask("token", "run", folder=tmp_path).stdout.strip(), folder=tmp_path)
        assert (doctor.returncode, "accepts the token" in doctor.stdout) == (0, True), doctor.stdout
        assert ask("stop", "run", folder=tmp_path).returncode == 0
        out, said = hub.communicate()
        assert hub.returncode == 0, said
        assert [peer.wait() for peer in peers] == [0, 0]
    assert "what was trained is kept" in said
    (line,) = out.splitlines()
    done = json.loads(line)
    assert done["event"] == "done"
    assert 2 <= done["metrics"]["epoch"] < 100_000
    assert done["metrics"]["val_loss"] > 0
    assert load_file(tmp_path / done["model"])["0.weight"].shape == (32, 8)
    assert (tmp_path / "run/hub.json").stat().st_mode & 0o077 == 0
    status = json.loads(ask("status", "run", "--json", folder=tmp_path).stdout)
    assert (status["schema"], status["phase"]) == ("ravnest.status/2", "finished")
    assert (status["is_running"], status["num_samples"] >= 2 * 512) == (False, True)
    ended = ask("stop", "run", folder=tmp_path)
    assert (ended.returncode, "no hub is at work in run" in ended.stderr) == (1, True)


def test_ctrl_c_before_anyone_came_ends_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    options = ("--listen", "127.0.0.1:0", "--folder", "run")
    with started("hub", "job.py:short", *options, folder=tmp_path) as hub:
        wait_for("ravnest join rvn1_", hub)
        first = ask("token", "run", folder=tmp_path).stdout
        os.kill(hub.pid, signal.SIGINT)
        out, said = hub.communicate()
    assert hub.returncode in (1, 130), said  # it may have been capturing still
    assert (out, "Traceback" in said) == ("", False)
    assert first.startswith("rvn1_")


def test_a_training_without_a_folder_leaves_its_model_under_runs_also_when_it_is_stopped(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    with started("train", "job.py:long", "--nodes", "1", "--json", folder=tmp_path) as training:
        wait_for("epoch 2:", training)
        os.kill(training.pid, signal.SIGINT)
        out, said = training.communicate()
    assert training.returncode == 0, said
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("sums-20")
    assert f"weights written to runs/{folder.name}/model.safetensors" in said
    done = json.loads(out)
    assert done["model"] == f"runs/{folder.name}/model.safetensors"
    assert load_file(tmp_path / done["model"])["0.weight"].shape == (32, 8)


def test_a_guest_is_invited_kicked_and_its_token_withdrawn_by_commands(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    options = ("--listen", "127.0.0.1:0", "--nodes", "2", "--folder", "run", "--json")
    lent = ("--memory", "2 GB", "--flops", "1 GFLOP/s", "--listen", "127.0.0.1:0", "--patience", "600 s")
    with started("hub", "job.py:long", *options, folder=tmp_path) as hub:
        own = json.loads(hub.stdout.readline())["invitation"]
        token = ask("invite", "anna", "run", "--days", "1", "--nodes", "1", folder=tmp_path).stdout.strip()
        again = ask("invite", "anna", "run", folder=tmp_path)
        assert (again.returncode, "'anna' has an invitation" in again.stderr) == (3, True), again.stderr
        guest = started("join", token, *lent, "--name", "laptop", folder=tmp_path)
        with started("join", own, *lent, "--name", "mine", folder=tmp_path), guest as laptop:
            wait_for("epoch 1:", hub)
            unknown = ask("kick", "nobody", "run", folder=tmp_path)
            assert (unknown.returncode, "there are: laptop, mine" in unknown.stderr) == (3, True), (
                unknown.stderr
            )
            assert ask("kick", "laptop", "run", folder=tmp_path).returncode == 0
            wait_for("laptop left: the requester sent it away", hub)
            _, said = laptop.communicate()
            assert (laptop.returncode, "the requester sent it away" in said) == (5, True), said
            assert ask("revoke", "anna", "run", folder=tmp_path).returncode == 0
            with started("join", token, *lent, folder=tmp_path) as late:
                _, said = late.communicate()
                assert (late.returncode, "its invitation was withdrawn" in said) == (5, True), said
            shown = ask("guests", "run", folder=tmp_path).stdout.splitlines()
            assert [line.split()[:2] for line in shown] == [["everybody", "no"], ["anna", "withdrawn"]]
            assert ask("stop", "run", folder=tmp_path).returncode == 0
            _, said = hub.communicate()
            assert hub.returncode == 0, said
