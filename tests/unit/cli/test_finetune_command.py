"""`ravnest finetune` before it does anything: options, and what is wrong with them."""

import pytest
from click.testing import CliRunner

from ravnest.cli.main import program


def run(*arguments):
    done = CliRunner().invoke(program, ["finetune", *arguments])
    assert "Traceback" not in done.output
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["model"], 2, "Missing option '--data'"),
        (["model", "--data", "a.jsonl", "--columns", "question"], 3, "write prompt=question"),
        (["model", "--data", "a.jsonl", "--resume"], 3, "--resume needs the --out"),
        (["model", "--data", "a.jsonl", "--rank", "many"], 2, "'many' is not a valid integer"),
        (["model", "--data", "a.jsonl", "--local", "1", "--out", "x", "--rank", "0"], 3, "rank is 0"),
        (["model", "--data", "a.jsonl", "--early-stop", "0"], 2, "0 is not in the range x>=1"),
        (["model", "--data", "a.jsonl", "--local", "1", "--out", "x", "--ema", "half"], 2, "'half' is not"),
        (["no/such/model", "--data", "a.jsonl", "--local", "2"], 3, "no/such/model does not exist"),
        (["model", "--data", "a.jsonl", "--local", "-2", "--listen", "x"], 3, "--local -2 is less than none"),
    ],
)
def test_mistakes_cost_a_sentence(arguments, code, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, output = run(*arguments)
    assert (found, told in output) == (code, True), output


def test_its_help_has_an_example_and_every_setting():
    code, output = run("--help")
    assert code == 0
    words = ("--dry-run", "--pack", "--rank", "--base", "--merge", "chats.jsonl", "--evaluate-every")
    for word in (*words, "--early-stop", "--weight-decay", "--ema", "--precision"):
        assert word in output
