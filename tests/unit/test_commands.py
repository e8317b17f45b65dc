"""`ravnest train` and `join` before anything starts: a mistake costs a sentence, not a training."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from ravnest.cli import program


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(program, list(arguments))
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("model.pt", "ends in .safetensors"),
        ("no/such/folder/model.safetensors", "give a folder that exists"),
        ("there.safetensors", "exists already"),
    ],
)
def test_a_place_for_the_weights_is_checked_before_training(
    out: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
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
    ],
)
def test_a_token_that_is_none_is_told_so(arguments: tuple[str, ...], reason: str) -> None:
    code, said = run(*arguments)
    assert (code, reason in said) == (3, True), said
