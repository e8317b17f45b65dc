"""`--config FILE`: options of a command from its table, weaker than the command line, or refused."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from ravnest.cli.common import dashboard_options, options_file, plan_options
from ravnest.cli.main import program


@click.command("lend")
@click.argument("token", required=False)
@click.option("--memory")
@click.option("--nodes", type=int, default=1)
@click.option("--hours", multiple=True)
@click.option("--outbound-only", is_flag=True)
@click.option("--secret-door", hidden=True)
@options_file
def lend(**given: object) -> None:
    click.echo(repr(given))


@click.command("serve")
@click.argument("place")
@plan_options
@dashboard_options(is_usual=False)
def serve(place: str, wishes: object, dashboard: object) -> None:
    wishes.read()  # type: ignore[attr-defined]
    click.echo(f"{place} {dashboard}")


def run(command: click.Command, tmp_path: Path, text: str, *words: str) -> Result:
    file = tmp_path / "options.toml"
    file.write_text(text)
    group = click.Group("program", commands=[command])
    return CliRunner().invoke(group, [command.name or "", *words, "--config", str(file)])


FILE = """
[lend]
token = "rvn1_abc"
memory = "4 GB"
hours = ["22:00-07:00", "12:00-13:00"]
outbound_only = true
nodes = 3
[other]
anything = 1
"""


def test_options_of_the_table_are_taken_and_the_command_line_is_stronger(tmp_path: Path) -> None:
    given = {
        "token": "rvn1_abc",
        "memory": "4 GB",
        "nodes": 3,
        "hours": ("22:00-07:00", "12:00-13:00"),
        "outbound_only": True,
        "secret_door": None,
    }
    assert eval(run(lend, tmp_path, FILE).stdout) == given
    words = ("--memory", "2 GB", "--hours", "08:00-09:00", "rvn1_xyz")
    stronger = {**given, "memory": "2 GB", "hours": ("08:00-09:00",), "token": "rvn1_xyz"}
    assert eval(run(lend, tmp_path, FILE, *words).stdout) == stronger


def test_a_file_without_the_table_changes_nothing(tmp_path: Path) -> None:
    assert "'memory': None" in run(lend, tmp_path, "[other]\nmemory = 1\n").stdout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[lend]\nmemroy = "4 GB"', "lend: key 'memroy' = '4 GB' is unknown; did you mean 'memory'"),
        ('[lend]\nsecret-door = "1"', "key 'secret-door' = '1' is unknown"),
        ('[lend]\nconfig = "x"', "key 'config' = 'x' is unknown"),
        ("[lend]\nmemory = true", "write its value"),
        ("[lend]\noutbound-only = 1", "write true or false"),
        ("[lend]\nmemory = [1, 2]", "write a text or a number"),
        ("[lend]\nhours = [[1]]", "write a text or a number, or a list"),
        ("lend = 3", "is 3, not a table; write [lend]"),
    ],
)
def test_what_cannot_be_an_option_is_refused_with_its_place(tmp_path: Path, text: str, sentence: str) -> None:
    result = run(lend, tmp_path, text)
    assert sentence in str(result.exception)


def test_a_number_that_is_none_is_refused_as_on_the_command_line(tmp_path: Path) -> None:
    result = run(lend, tmp_path, '[lend]\nnodes = "three"')
    assert result.exit_code == 2
    assert "'three' is not a valid integer" in result.stderr


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("dashboard = true", "True"),
        ('dashboard = "0.0.0.0:80"', "0.0.0.0:80"),
        ("no-dashboard = true", "False"),
    ],
)
def test_an_option_with_or_without_a_value(tmp_path: Path, line: str, shown: str) -> None:
    result = run(serve, tmp_path, f'[serve]\njob = "a.py:job"\n{line}')
    assert result.stdout.strip() == f"a.py:job {shown}"


def test_the_job_is_called_so_and_settings_of_the_plan_stay_apart(tmp_path: Path) -> None:
    result = run(serve, tmp_path, '[serve]\njob = "a.py:job"\n[plan]\nmax_lag = 3')
    assert (result.stdout.strip(), result.stderr) == ("a.py:job False", "")
    silent = run(serve, tmp_path, '[serve]\njob = "a.py:job"')
    assert silent.stderr == "", "a file for options alone lacks nothing"


def test_the_table_of_settings_is_no_table_of_options(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("[plan]\nmax_lag = 3\n")
    words = ["plan", "--population", "lan:2", "--model", "gpt2", "--config", str(file), "--json"]
    result = CliRunner().invoke(program, words)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("name", ["hub", "train", "finetune", "join"])
def test_the_commands_that_have_it(name: str) -> None:
    names = [option for each in program.commands[name].params for option in each.opts]
    assert "--config" in names
