"""The command as a person meets it: what it prints where, and one sentence per mistake."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import fields
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.sample_plans import sample

from ravnest.cli.common import CommandParts
from ravnest.cli.main import program
from ravnest.config import PlanConfig
from ravnest.views.plan_text import show_plan

ROOT = Path(__file__).parents[3]
NODE = """
[[node]]
name = "{name}"
memory = "{memory}"
compute = "20 TFLOP/s"
up = "200 Mbit/s"
down = "200 Mbit/s"
"""
PROFILE = """
name = "four-layers"
samples_per_batch = 64
input = "200 kB"
labels = 512
"""
POSITION = """
[[position]]
parameters = "100 MB"
forward = "50 GFLOP"
saved = "10 MB"
"""
PROFILE += 3 * (POSITION + 'crossing = "100 kB"') + POSITION
DEFAULTS = {  # as people write them
    "max_round_seconds": "10 min",
    "max_relayed_round_seconds": "60 min",
    "speed_ratio": "4",
    "relay_bytes_per_second": "20 Mbit/s",
    "overhead_bytes": "500 MB",
    "recover_seconds": "30 s",
    "microbatch_seconds": "2 ms",
}
SMALL = ("--nodes", "pcs.toml", "--model", "small.toml")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    nodes_file("pcs.toml", count=4, memory="2 GB")
    write("small.toml", PROFILE)
    return tmp_path


def plan(*args, parts=None):
    return CliRunner().invoke(program, ["plan", *args], obj=parts)


def write(name, content):
    Path(name).write_text(content)
    return name


def nodes_file(name="nodes.toml", count=3, memory="12 GB"):
    return write(name, "".join(NODE.format(name=f"pc-{k}", memory=memory) for k in range(count)))


def refused(code, *args, stdout="", parts=None):
    """Return the message of a refusal: one line on stderr, nothing else."""
    result = plan(*args, parts=parts)
    assert result.exit_code == code, result.output
    assert result.stdout == stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error: ", "Error: "))]
    assert len(lines) == 1
    assert "Traceback" not in result.stderr
    return lines[0].partition(": ")[2]


# ---- answers


def test_table_shows_who_does_what_within_80_columns():
    result = plan("--nodes", nodes_file(), "--model", "gpt2")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    for word in ("Cluster A", "positions", "memory", "compute", "send", "receive", "busy", "limit", "pc-"):
        assert word in result.stdout
    for label in ("predicted ", "staleness ", "round ", "bottleneck ", "spares ", "backups ", "advice "):
        assert f"\n{label}" in result.stdout
    assert result.stderr == "planning gpt2 on 3 nodes, seed 0\n"
    assert "\x1b" not in result.output


def test_long_and_strange_names_cost_only_the_name_column():
    strange = ["[red]" + "x" * 50, "日本語 " * 8 + "end", "[/]"]
    write("nodes.toml", "".join(NODE.format(name=name, memory="5 GB") for name in strange))
    result = plan("--nodes", "nodes.toml", "--model", "gpt2")
    assert result.exit_code == 0
    head = next(line for line in result.stdout.splitlines() if " receive " in line)
    assert head.split()[-1] == "limit"
    assert "[red]" in result.stdout
    assert result.stdout.count(" GB ") >= 2


def test_json_alone_on_stdout_and_the_same_every_time():
    first, second = plan(*SMALL, "--seed", "3", "--json"), plan(*SMALL, "--seed", "3", "--json")
    assert first.stdout_bytes == second.stdout_bytes
    report = json.loads(first.stdout)
    assert report["schema"] == "ravnest.plan/2"
    assert report["seed"] == 3
    assert list(report) == sorted(report)
    covered = [[(s["start"], s["stop"]) for s in c["stages"]] for c in report["clusters"]]
    assert all(stages[0][0] == 0 and stages[-1][1] == report["model"]["positions"] for stages in covered)
    made_up = ("--population", "lan:4", "--model", "small.toml", "--json")
    assert plan(*made_up, "--seed", "4").stdout != plan(*made_up, "--seed", "3").stdout


def test_settings_come_from_file_and_then_from_flags():
    write("swarm.toml", '[plan]\nmax_lag = 5\noptimizer = "sgd"\n[hub]\nport = 1\n')
    args = ("--config", "swarm.toml", "--set", "max_lag=7", "--set", "overhead_bytes=1 GB", "--json")
    config = json.loads(plan(*SMALL, *args).stdout)["config"]
    assert (config["max_lag"], config["optimizer"], config["overhead_bytes"]) == (7, "sgd", 1e9)
    assert config["activations"] == PlanConfig().activations


def test_a_config_without_its_table_is_noted():
    write("other.toml", "[hub]\nport = 1\n")
    result = plan(*SMALL, "--config", "other.toml")
    assert result.exit_code == 0
    assert "note: other.toml has no [plan] table" in result.stderr


def test_batch_and_profile_files():
    built_in = plan("--nodes", nodes_file(count=1), "--model", "resnet50", "--batch", "2", "--json")
    assert json.loads(built_in.stdout)["model"]["samples_per_batch"] == 2
    assert json.loads(plan(*SMALL, "--json").stdout)["model"]["name"] == "four-layers"


def test_picture_is_written_and_said_on_stderr():
    result = plan(*SMALL, "--svg", "plan.svg", "--json")
    assert json.loads(result.stdout)
    assert "picture written to plan.svg" in result.stderr
    assert ET.parse("plan.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("width", [80, 140])
def test_large_plans_are_summed_up(width):
    def shown(one):
        console = Console(file=StringIO(), width=width)
        for part in show_plan(one.plan, one.predicted, one.profile, ("advice",), width):
            console.print(part)
        return console.file.getvalue()

    large, small = shown(sample(*[2] * 15, spares=30)), shown(sample(*[2] * 12))
    assert "slowest node" in large
    assert "and 3 more clusters of " in large
    assert "and 22 more" in large  # spares
    assert " busy" not in large
    assert max(map(len, large.splitlines())) <= width
    assert "Cluster L" in small
    assert "more cluster" not in small


def test_one_node_is_a_swarm_too():
    result = plan("--nodes", nodes_file(count=1, memory="80 GB"))
    assert result.exit_code == 0
    assert "on 1 node\n" in result.stdout


# ---- mistakes


def test_a_missing_file_a_folder_and_junk(folder):
    (folder / "junk.toml").write_bytes(b"\x7fELF\x00\xff\xfe")
    (folder / "sub").mkdir()
    for option in ("--nodes", "--model", "--config"):
        others = () if option == "--nodes" else SMALL[:2]
        assert refused(3, option, "no.toml", *others) == "no.toml does not exist; check its name and folder"
        assert "junk.toml is not text" in refused(3, option, "junk.toml", *others)
        assert "empty.toml is empty" in refused(3, option, write("empty.toml", " \n"), *others)
        broken = refused(3, option, write("broken.toml", "a b c"), *others)
        assert "broken.toml is not valid TOML" in broken
        assert "line 1" in broken
    assert refused(3, "--nodes", "sub") == "sub is a folder; give a file inside it"


def test_a_file_of_someone_else(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert refused(3, "--nodes", "a.toml") == "a.toml may not be read by this user; change its permissions"


def test_an_endless_file_is_not_read_to_its_end():
    parts = CommandParts(max_file_bytes=1 << 20)
    assert "larger than 1.05 MB" in refused(3, "--nodes", "/dev/zero", parts=parts)


def test_bad_nodes_name_file_key_and_value():
    good = NODE.format(name="ana", memory="12 GB")
    unknown = refused(3, "--nodes", write("n.toml", good + 'memroy = "3 GB"\n'))
    assert all(part in unknown for part in ("n.toml", '"ana"', "memroy", "3 GB", "did you mean 'memory'"))
    negative = refused(3, "--nodes", write("n.toml", NODE.format(name="ana", memory="-4 GB")))
    assert all(part in negative for part in ("n.toml", "memory", "-4 GB"))
    twice = refused(3, "--nodes", write("n.toml", good + good))
    assert all(part in twice for part in ("n.toml", "name", "'ana'", "node 2"))


def test_too_little_memory_says_how_much_is_short():
    message = refused(6, "--nodes", nodes_file(count=2, memory="3 GB"))
    assert "gpt2-xl needs" in message
    assert "2 nodes offer 6 GB; add 1 node with >= " in message
    assert "1 node offers 3 GB" in refused(6, "--nodes", nodes_file(count=1, memory="3 GB"))


def test_bad_values_of_flags():
    assert "'mars:3' is not a population" in refused(3, "--population", "mars:3")
    assert "--seed -1 is negative" in refused(3, "--nodes", nodes_file(), "--seed", "-1")
    assert "-4: choose between" in refused(3, *SMALL[:2], "--batch", "-4")
    unknown = refused(3, "--population", "lan:6", "--model", "gpt9")
    assert all(part in unknown for part in ("'gpt9'", "gpt2-xl", "profile file"))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("max_lag=-1", "key 'max_lag' is '-1', outside 1 to 64; write a believable number like 2"),
        ("max_lag=1.5", "whole number"),
        ("max_lag=nan", "outside 1 to 64"),
        ("optimizer=adamx", "choose one of sgd"),
        ("predict_weights=maybe", "write true or false"),
        ("lag=3", "key 'lag' = '3' is unknown; did you mean 'max_lag'"),
    ],
)
def test_bad_settings_name_key_and_value(setting, says):
    flag = refused(3, *SMALL, "--set", setting)
    assert flag.startswith("--set: ")
    assert says in flag
    key, value = setting.split("=")
    file = refused(3, *SMALL, "--config", write("c.toml", f'[plan]\n{key} = "{value}"\n'))
    assert file.startswith("c.toml, table [plan]: ")
    assert says in file


def test_a_plan_key_that_is_no_table():
    assert "c.toml: key 'plan' is 3" in refused(3, *SMALL, "--config", write("c.toml", "plan = 3\n"))


def test_wrong_usage_is_two():
    assert "either --nodes" in refused(2)
    assert "either --nodes" in refused(2, *SMALL, "--population", "lan:4")
    assert "not a setting" in refused(2, *SMALL, "--set", "max_lag")
    assert "'x' is not a valid integer" in refused(2, *SMALL, "--seed", "x")
    message = refused(2, "--population", "lan:6", "--model", write("model.toml", PROFILE), "--batch", "3")
    assert "set samples_per_batch in model.toml" in message


def test_a_picture_that_cannot_be_written_leaves_stdout_empty(folder):
    message = refused(3, *SMALL, "--svg", "no/folder/x.svg")
    assert message.startswith("--svg no/folder/x.svg cannot be written: No such file")
    assert "Is a directory" in refused(3, *SMALL, "--svg", str(folder))


def test_ctrl_c_ends_with_130():
    def interrupt(*_args):
        raise KeyboardInterrupt

    result = plan(*SMALL, parts=CommandParts(form_plan=interrupt))
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith("stopped\n")


# ---- as a program


def run(*args, **env):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, *args]
    return subprocess.run(command, capture_output=True, env=environment, check=False)


def test_module_prints_json_and_nothing_else_on_stdout():
    done = run("-m", "ravnest", "plan", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == "ravnest.plan/2"
    assert done.stdout == plan(*SMALL, "--json").stdout_bytes
    assert done.stderr == b"planning four-layers on 4 nodes, seed 0\n"


def test_help_is_quick_and_a_plan_needs_no_torch():
    code = (
        "import sys; from ravnest.cli.main import program; program(sys.argv[1:], standalone_mode=False);"
        "print(sorted(sys.modules.keys() & {'torch', 'numpy', 'rich'}))"
    )
    helped = run("-c", code, "--help")
    assert b"plan" in helped.stdout
    assert helped.stdout.endswith(b"[]\n"), helped
    asked = run("-c", code, "inspect", "--help")
    assert b"FILE.py:JOB" in asked.stdout
    assert asked.stdout.endswith(b"[]\n"), asked
    planned = run("-c", code, "plan", *SMALL)
    assert planned.stdout.splitlines()[-1] == b"['numpy', 'rich']"


def test_names_that_the_terminal_cannot_show_do_not_stop_it():
    Path("nodes.toml").write_text(NODE.format(name="jürgen-日", memory="80 GB"), encoding="utf-8")
    done = run("-m", "ravnest", "plan", "--nodes", "nodes.toml", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert b"j\\xfcrgen" in done.stdout


def test_version_and_bare_command():
    assert "ravnest" in CliRunner().invoke(program, ["--version"]).stdout
    bare = CliRunner().invoke(program, [])
    assert bare.exit_code == 2
    assert "plan" in bare.output


# ---- the page about it


def test_docs_mention_every_setting_and_key():
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    for field in fields(PlanConfig):
        default = DEFAULTS.get(field.name, str(field.default).lower())
        assert f"| `{field.name}` | {default}" in page, f"{field.name} = {default}"
    report = json.loads(plan(*SMALL, "--json").stdout)
    keys = set(report) | set(report["clusters"][0]) | set(report["clusters"][0]["stages"][0])
    keys |= (
        set(report["predicted"]) | set(report["model"]) | set(report["bottleneck"]) | {"segment", "owners"}
    )
    assert {key for key in keys if f"`{key}`" not in page} == set()
    assert "docs/plan.svg" in page


def test_a_model_name_too_long_for_a_file_is_an_unknown_model():
    result = plan("--population", "lan:2", "--model", "x" * 300)
    assert result.exit_code == 3
    assert "gpt2-xl" in result.stderr


def test_a_full_disk_is_one_sentence():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ravnest", "plan", *SMALL, "--json"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
    assert result.returncode == 1
    assert "No space left" in result.stderr
    assert "Traceback" not in result.stderr
