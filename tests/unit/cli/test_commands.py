"""Commands before anything starts: a mistake costs a sentence, not a training. And those that only answer."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from ravnest.cli.common import CommandParts
from ravnest.cli.main import program
from ravnest.config import ProgramTimeouts, Timeouts
from ravnest.net.identity import Token, new_keys, write_token
from ravnest.requester.run_folder import new_hub_file, open_run, read_hub_file, write_hub_file
from tests.support.hostile_compute import start_hostile

JOB = """
import torch, torch.nn.functional as F, ravnest as rv
data = {"x": torch.randn(20, 8), "y": torch.randint(0, 2, (20,))}
def make(loss=lambda out, batch: F.cross_entropy(out, batch["y"]), **more):
    return rv.Job(torch.nn.Linear(8, 2), data, loss=loss, **{"batch_size": 4, **more})
good = make()
def short(): return make(batch_size=64)
def not_scalar(): return make(loss=lambda out, batch: F.cross_entropy(out, batch["y"], reduction="none"))
def odd_optimizer():
    model = torch.nn.Linear(8, 2)
    return rv.Job(model, data, optimizer=torch.optim.Rprop(model.parameters()))
def broken(): raise RuntimeError("no such data")
"""

GOOD_TOKEN = write_token(Token(("tcp://127.0.0.1:9",), new_keys().public, bytes(16)))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(program, list(arguments))
    assert "Traceback" not in done.output
    return done.exit_code, done.stderr


def answer(*arguments: str) -> str:
    done = CliRunner().invoke(program, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("model.pt", "ends in .safetensors"),
        ("no/such/folder/model.safetensors", "give a folder that exists"),
        ("there.safetensors", "exists already"),
    ],
)
def test_a_place_for_the_weights_is_checked_before_training(out: str, reason: str) -> None:
    Path("there.safetensors").write_bytes(b"precious")
    code, said = run("train", "nosuch.py:job", "--out", out)
    assert (code, reason in said) == (3, True), said
    assert Path("there.safetensors").read_bytes() == b"precious"


def test_no_peers_is_no_swarm() -> None:
    code, said = run("train", "nosuch.py:job", "--nodes", "0")
    assert (code, "choose 1 or more" in said) == (3, True), said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("join", "hello"), "instead of 'rvn1_'"),
        (("join", "rvn1_abc"), "truncated"),
        (("join", GOOD_TOKEN, "--memory", "10"), "'10' has no unit and would be bytes; give something like"),
        (("join", GOOD_TOKEN, "--gpu-memory", "1e9 "), "has no unit and would be bytes"),
    ],
)
def test_a_token_or_a_size_that_is_none_is_told_so(arguments: tuple[str, ...], reason: str) -> None:
    code, said = run(*arguments)
    assert (code, reason in said) == (3, True), said


HUB = ("--listen", "127.0.0.1:0", "--folder", "run")


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ("short", "the train data has 20 samples, fewer than batch_size 64; give more data or a smaller"),
        ("not_scalar", "loss"),
        ("odd_optimizer", "optimizer Rprop is not supported; choose one of"),
        ("broken", "job.py:"),
        ("missing", "job.py has no 'missing'"),
    ],
)
def test_what_is_wrong_with_a_job_is_said_by_the_hub_too(job: str, reason: str) -> None:
    code, said = run("hub", f"job.py:{job}", *HUB)
    assert (code, reason in said) == (3, True), said


def test_a_port_that_is_taken_is_told_before_anything_is_captured() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, said = run("hub", "job.py:good", "--listen", f"127.0.0.1:{port}")
    assert (code, f"cannot listen at 127.0.0.1:{port}" in said) == (3, True), said


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--listen", "nowhere"), "is no address"),
        (("--public", "hub.example.org"), "is no address"),
        (("--hub-upload", "fast"), "--hub-upload"),
        (("--nodes", "-1"), "choose 0 or more"),
        (("--local", "-1"), "choose 0 or more"),
        (("--folder", "job.py"), "the folder job.py cannot be written"),
        (("--out", "model.pt"), "ends in .safetensors"),
    ],
)
def test_a_hub_refuses_what_it_cannot_use(options: tuple[str, ...], reason: str) -> None:
    code, said = run("hub", "job.py:good", *options)
    assert (code, reason in said) == (3, True), said


@pytest.mark.parametrize("nodes", ["1", "17"])
def test_a_demo_has_some_nodes(nodes: str) -> None:
    code, said = run("demo", "--nodes", nodes)
    assert (code, "choose from 2 to 16" in said) == (3, True), said


def test_without_scikit_learn_the_other_demo_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    code, said = run("demo")
    assert (code, "ravnest demo --text" in said) == (3, True), said


def make_run(folder: str) -> str:
    """Return the invitation of a hub that once ran in a folder."""
    file = msgspec.structs.replace(open_run(Path(folder)), addresses=("tcp://192.0.2.7:7700",))
    write_hub_file(Path(folder), file)
    return file.invitation


def test_a_token_is_printed_from_a_folder_and_explained_without_its_secret() -> None:
    invitation = make_run("runs/one")
    assert answer("token").strip() == answer("token", "runs/one").strip() == invitation
    assert json.loads(answer("token", "--json"))["invitation"] == invitation
    told = json.loads(answer("token", invitation, "--json"))
    assert (told["schema"], told["addresses"]) == ("ravnest.token/1", ["tcp://192.0.2.7:7700"])
    assert told["hub"] == read_hub_file(Path("runs/one")).keys.peer
    explained = answer("token", invitation)
    assert "tcp://192.0.2.7:7700" in explained
    for secret in (read_hub_file(Path("runs/one")).secret.hex(), invitation):
        assert secret not in explained


@pytest.mark.parametrize("command", ["token", "status", "stop"])
def test_a_folder_without_a_run_is_told(command: str) -> None:
    code, said = run(command)
    assert (code, "there is no run under runs/" in said) == (3, True), said
    code, said = run(command, "elsewhere")
    assert (code, "elsewhere holds no run" in said) == (3, True), said


def test_a_hub_that_has_ended_cannot_be_stopped() -> None:
    make_run("runs/one")
    code, said = run("stop")
    assert (code, "no hub is at work in runs/one" in said) == (1, True), said


def test_a_process_that_only_has_the_hubs_number_is_left_alone() -> None:
    file = msgspec.structs.replace(new_hub_file(), pid=os.getpid(), started_at=1.0)
    Path("run").mkdir()
    write_hub_file(Path("run"), file)
    code, said = run("stop", "run")
    assert (code, "no hub is at work" in said) == (1, True), said


def test_status_of_a_run_that_never_began_is_told() -> None:
    make_run("run")
    code, said = run("status", "run")
    assert (code, "no log of a hub" in said) == (3, True), said


def test_the_doctor_finds_this_pc_able_and_a_hub_that_is_not_there() -> None:
    parts = CommandParts(
        Timeouts(program=ProgramTimeouts(doctor_seconds=0.2)), start_compute=start_hostile("hang")
    )
    done = CliRunner().invoke(program, ["doctor", "--json"], obj=parts)
    found = json.loads(done.stdout)
    assert found["schema"] == "ravnest.doctor/1"
    assert {finding["verdict"] for finding in found["findings"]} <= {"ok", "warn"}
    fences = [each["what"] for each in found["findings"] if "fence" in each["what"]]
    assert len(fences) == 8
    nobody = new_hub_file().token
    token = write_token(type(nobody)(("tcp://127.0.0.1:9",), nobody.hub_key, nobody.secret))
    done = CliRunner().invoke(program, ["doctor", token], obj=parts)
    assert (done.exit_code, "fail  the hub cannot be reached" in done.stdout) == (1, True), done.output
    assert "-> is the hub running" in done.stdout
    damaged = CliRunner().invoke(program, ["doctor", "rvn1_abc"], obj=parts)
    assert (damaged.exit_code, "fail  the token is truncated" in damaged.stdout) == (1, True), damaged.output


def test_env_is_for_bug_reports_and_names_nobody() -> None:
    found = json.loads(answer("env", "--json"))
    assert found["schema"] == "ravnest.env/1"
    assert {"torch", "python", "memory", "device"} <= found.keys()
    assert socket.gethostname() not in [str(value) for value in found.values()]
    assert "torch " in answer("env")


def test_help_of_every_command_needs_no_torch() -> None:
    names = sorted(program.commands)
    assert {"demo", "hub", "status", "stop", "token", "doctor", "env"} <= set(names)
    check = (
        "import sys\nfrom click.testing import CliRunner\nfrom ravnest.cli.main import program\n"
        f"for name in {names!r}:\n    done = CliRunner().invoke(program, [name, '--help'])\n"
        "    assert done.exit_code == 0 and '--json' in done.output or name in ('join',), name\n"
        "assert not {'torch', 'numpy', 'starlette', 'uvicorn', 'prometheus_client'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_wrong_option_of_join_is_told_before_torch_is_loaded() -> None:
    token = write_token(Token(("tcp://127.0.0.1:9",), new_keys().public, bytes(16)))
    check = (
        "import sys\nfrom click.testing import CliRunner\nfrom ravnest.cli.main import program\n"
        f"done = CliRunner().invoke(program, ['join', {token!r}, '--patience', 'long'])\n"
        "assert \"'long' is not a number\" in done.stderr, done.output\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize(
    ("words", "kind"),
    [(["train"], "file"), (["status"], "file"), (["train", "--config"], "file"), (["join"], None)],
)
def test_the_shell_offers_files_where_files_are_asked_for(words: list[str], kind: str | None) -> None:
    found = ShellComplete(program, {}, "ravnest", "_RAVNEST_COMPLETE").get_completions(words, "a")
    assert [each.type for each in found] == ([kind] if kind else [])
