"""`ravnest inspect` as a person meets it: answers on stdout, one sentence per mistake, the user's lines."""

import itertools
import json
import os
import random
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from ravnest.cli.main import program
from ravnest.errors import ConfigError
from ravnest.model.blueprint.operators import operators
from ravnest.model.blueprint.program import Blueprint, Op, Program, Ref, StateEntry, TensorType, ValueId
from ravnest.plan.files import read_profile
from ravnest.plan.split import best_cuts
from ravnest.plan.types import ModelProfile
from ravnest.protocol.tensors import ITEM_BYTES
from ravnest.views.inspection import inspect_model, show_inspection

ROOT = Path(__file__).parents[2]
TINY_GPT = ROOT / "examples" / "tiny_gpt" / "model.py"

FILE = """
import sizes  # of the same folder
import torch
import torch.nn.functional as F
from torch import nn
import ravnest as rv

print("a line of the user's own")


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        if x.sum() > 0:  # refused
            return self.layer(x)
        return -self.layer(x)


class Broken:
    def __len__(self):
        return 9

    def __getitem__(self, index):
        raise KeyError("pixels")  # fails


def loss(out, batch):
    return F.cross_entropy(out, batch["y"])


data = {"x": torch.randn(8, 3), "y": torch.zeros(8, dtype=torch.long)}
model = nn.Sequential(nn.Linear(3, sizes.WIDTH), nn.ReLU(), nn.Linear(sizes.WIDTH, 2))
good = rv.Job(model, data, batch_size=4, loss=loss, name="good one")
twin = good
cannot = rv.Job(Branch(), data, loss=loss)
unreadable = rv.Job(model, Broken())
number = 3


def make(batch_size=2):
    return rv.Job(model, data, batch_size=batch_size, loss=loss)


def needs(batch_size):
    return good


def wrong():
    return 3


def fails():
    return rv.Job(model, data, batch_size=0)  # refused job
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    write("sizes.py", "WIDTH = 16\n")
    write("model.py", FILE)
    yield tmp_path
    for name in ("sizes", "model", "job_file_model"):
        if name not in before:
            sys.modules.pop(name, None)


def write(name, content):
    Path(name).write_text(content)
    return name


def inspect(*args):
    return CliRunner().invoke(program, ["inspect", *map(str, args)])


def refused(*args):
    """Return the message of a refusal: on stderr, from `error:` on; stdout stays empty."""
    result = inspect(*args)
    assert result.exit_code == 3, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert str(ROOT / "ravnest") not in result.stderr
    return f"\n{result.stderr}".partition("\nerror: ")[2]


def line_of(mark):
    return next(number for number, line in enumerate(FILE.splitlines(), 1) if mark in line)


# ---- answers


def test_the_example_in_tables_and_json():
    tables = inspect(TINY_GPT)
    assert tables.exit_code == 0, tables.output
    lines = tables.stdout.splitlines()
    assert lines[0] == "TinyGpt"
    assert lines[1] == "842,496 parameters (3.37 MB), 28 positions, 78 operations, 16 samples per batch"
    assert max(map(len, lines)) <= 80
    assert "Cut into 3 equal stages" in lines
    assert "tokens.weight is held by stages 1 and 3, which keep it equal" in tables.stdout
    assert "run these 14 operators and nothing else; no Python code, no file or" in tables.stdout
    assert "- losses: cross_entropy_loss 1" in tables.stdout
    assert re.search(r"^ 3 +1 blocks\.0\.qkv +198 kB +336 MFLOP", tables.stdout, re.MULTILINE)
    page = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")
    words = [line for line in lines if line.startswith(("shared", "providers", "            "))]
    assert len(words) > 8
    assert all(line.rstrip() in page for line in words)
    assert "capturing TinyGpt\n" in tables.stderr
    assert re.search(r"captured and measured in \d+\.\d s\n", tables.stderr)


def test_json_says_it_all_and_its_profile_can_be_planned():
    result = inspect("model.py:good", "--json", "--cut", "2", "--profile", "good.json")
    assert result.exit_code == 0, result.output
    assert "a line of the user's own" in result.stderr
    assert "profile written to good.json" in result.stderr
    report = json.loads(result.stdout)
    assert report["schema"] == "ravnest.inspect/1"
    assert (report["model"], report["batch_size"], report["positions"]) == ("good one", 4, 2)
    assert (report["parameters"], report["parameter_bytes"]) == (98, 392)
    assert report["operators"] == {
        "aten.cross_entropy_loss.default": 1,
        "aten.linear.default": 2,
        "aten.relu.default": 1,
    }
    assert report["notes"] == []
    first, last = report["stages"]
    assert (first["start"], first["stop"], last["start"], last["stop"]) == (0, 1, 1, 2)
    assert first["parameter_bytes"] == 4 * (3 * 16 + 16)
    assert first["state_bytes"] == 4 * first["parameter_bytes"]
    assert first["send_bytes"] == 4 * 16 * 4
    assert first["receive_bytes"] == 4 * 3 * 4
    assert last["receive_bytes"] == first["send_bytes"] + 4 * 8  # and the labels
    assert (first["fields"], last["fields"], last["send_bytes"]) == (["x"], ["y"], 0)
    assert first["work_share"] + last["work_share"] == pytest.approx(1)
    assert all(stage["shared"] == [] and stage["blueprint_bytes"] > 100 for stage in report["stages"])
    text = Path("good.json").read_text()
    assert json.loads(text) == report["profile"]
    assert read_profile(text, "good.json").saved_bytes[0] == first["saved_bytes"]
    planned = CliRunner().invoke(program, ["plan", "--population", "lan:2", "--model", "good.json", "--json"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["model"]["name"] == "good one"


def test_a_function_may_make_the_job():
    result = inspect("model.py:make", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["model"] == "Sequential"
    assert len(report["stages"]) == 2  # the line is too short for three
    assert report["batch_size"] == 2


def test_empty_weights_are_inspected_and_noted():
    write(
        "large.py",
        "import torch, ravnest as rv\nfrom torch import nn\n"
        "with rv.empty_weights():\n    model = nn.Sequential(*(nn.Linear(9000, 9000) for _ in range(40)))\n"
        "job = rv.Job(model, {'x': torch.zeros(2, 9000)}, batch_size=2, loss=lambda out, _: out.mean())\n",
    )
    result = inspect("large.py", "--cut", "7")
    assert result.exit_code == 0, result.output
    assert "3,240,360,000 parameters (13 GB)" in result.stdout
    assert "was not compared" in result.stdout
    assert "of JSON for each stage" in result.stdout
    assert re.search(r"^ *3[89] x \* +324 MB", result.stdout, re.MULTILINE)
    assert len(result.stdout.splitlines()) < 40


# ---- mistakes


def test_files_that_are_none(folder):
    assert refused("no.py:job").startswith("no.py does not exist; give a Python file")
    (folder / "sub.py").mkdir()
    assert refused("sub.py").startswith("sub.py is a folder")
    assert "write FILE.py:NAME" in refused("model:good")
    (folder / "junk.py").write_bytes(b"\x7fELF\x00\xff")
    assert refused("junk.py").startswith("junk.py is not Python: ")
    assert (
        refused(write("typo.py", "x = 1\ndef f(:\n")) == "typo.py:2 is not Python: invalid syntax: def f(:\n"
    )


def test_a_file_that_fails_shows_its_own_lines():
    write("fails.py", "def inner():\n    return 1 / 0\n\n\njob = inner()\n")
    assert refused("fails.py").splitlines() == [
        "fails.py:2 failed: ZeroDivisionError: division by zero",
        "  fails.py:5 in <module>: job = inner()",
        "  fails.py:2 in inner: return 1 / 0",
    ]
    assert "No module named 'not_there'; install it" in refused(write("lacks.py", "import not_there\n"))
    ended = refused(write("ends.py", "import argparse\nargparse.ArgumentParser().parse_args(['--x'])\n"))
    assert ended.startswith("ends.py:2 ended the program (2); keep what runs a program under `if __name__")
    assert "fails" not in sys.modules


def test_jobs_that_are_none():
    assert refused("model.py:nope").startswith("model.py has no 'nope'; it has the jobs good, twin, cannot")
    assert refused("model.py").startswith("model.py has 4 jobs, so say which: model.py:good, model.py:twin")
    assert refused("model.py:number").startswith("model.py:number is 3, not a Job or a function of one")
    assert refused("model.py:Broken").startswith("model.py:Broken is the class Broken, not a Job")
    assert refused("model.py:needs") == "model.py:needs needs batch_size; give every argument a default\n"
    assert refused("model.py:wrong").startswith("model.py:wrong returned 3, not a Job")
    assert "has no Job; add job = ravnest.Job(...) to it" in refused(write("empty.py", ""))


def test_a_job_that_is_refused_names_the_users_line():
    line = line_of("# refused job")
    assert refused("model.py:fails").startswith(f"model.py:{line}: batch_size is 0; give a whole number")


def test_data_that_fails_names_the_users_line():
    line = line_of("# fails")
    assert refused("model.py:unreadable").startswith(f"model.py:{line} failed: KeyError: 'pixels'\n")


def test_a_model_that_cannot_be_captured_names_the_users_line():
    message = refused("model.py:cannot")
    assert f"model.py:{line_of('# refused')} cannot be captured: " in message
    assert "torch.where" in message


def test_cuts_that_are_none():
    assert refused("model.py:good", "--cut", "0") == "--cut 0 is less than one stage; choose 1 or more\n"
    assert "--cut -2 is less" in refused("model.py:good", "--cut", "-2")
    message = refused("model.py:good", "--cut", "999")
    assert message == "cannot cut into 999 stages; choose 1 to 2, for good one has that many positions\n"


def test_profiles_that_cannot_be_written():
    assert "--profile a.toml would hold JSON" in refused("model.py:good", "--profile", "a.toml")
    message = refused("model.py:good", "--profile", "no/such/a.json")
    assert message.startswith("--profile no/such/a.json cannot be written: No such file")


# ---- as a program


def test_as_a_program_stdout_is_one_object():
    command = [sys.executable, "-m", "ravnest", "inspect", "model.py:good", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "good one"
    assert done.stderr.splitlines()[0] == b"running model.py:good"


# ---- without torch: where to cut, and what a long line looks like


def make_profile(flops, crossing):
    return ModelProfile("m", 1, flops, flops, flops, flops, flops, crossing)


def test_cuts_balance_the_work_and_then_send_little():
    draw = random.Random(3)
    for _ in range(200):
        length = draw.randint(1, 8)
        count = draw.randint(1, length)
        flops = tuple(float(draw.choice([0, 0, 1, 2, 5, 9])) for _ in range(length))
        crossing = tuple(float(draw.randint(1, 9)) for _ in range(length + 1))

        def busiest(cuts, flops=flops):
            return max(sum(flops[start:stop]) for start, stop in itertools.pairwise(cuts))

        choices = [(0, *inner, length) for inner in itertools.combinations(range(1, length), count - 1)]
        least = min(map(busiest, choices))
        sent = {cuts: sum(crossing[cut] for cut in cuts[1:-1]) for cuts in choices}
        found = best_cuts(make_profile(flops, crossing), count)
        assert busiest(found) <= 1.15 * least
        assert sent[found] == min(sent[cuts] for cuts in choices if busiest(cuts) <= 1.15 * least)


def test_no_more_stages_than_positions():
    for count in (0, 3):
        with pytest.raises(ConfigError, match=r"choose 1 to 2, for m has that many positions"):
            best_cuts(make_profile((1.0, 1.0), (1.0,) * 3), count)


def line_blueprint(num_positions):
    """Return a line of distinct layers, each one linear."""
    kind = TensorType("float32", (4, 4))
    values = {ValueId(k): kind for k in range(2 * num_positions + 1)}
    state = tuple(
        StateEntry(f"encoder.layer_{k}.weight", "parameter", "float32", (4, 4), (k,), is_trainable=True)
        for k in range(num_positions)
    )
    ops = tuple(
        Op(
            "aten.mul.Tensor",
            (("self", Ref(ValueId(num_positions + k))), ("other", Ref(ValueId(k)))),
            (ValueId(num_positions + k + 1),),
            k,
        )
        for k in range(num_positions)
    )
    names = tuple((ValueId(k), entry.name) for k, entry in enumerate(state))
    start = (ValueId(num_positions), "x")
    whole = Program(values, (), (start,), names, ops, (), (("loss", ValueId(2 * num_positions)),))
    cuts = tuple((k, k) for k in range(num_positions + 1))
    return Blueprint("line", num_positions, 0, num_positions, cuts, state, (), whole, whole)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_long_line_of_unlike_positions_is_cut_to_the_heaviest(width):
    length = 100
    flops = tuple(float(k) for k in range(1, length + 1))
    profile = make_profile(flops, (64.0,) * (length + 1))
    found = inspect_model(line_blueprint(length), profile, ("a note",), 12)
    console = Console(file=StringIO(), width=width)
    for part in show_inspection(found, width):
        console.print(part)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert any("ayer_99" in line for line in lines)
    assert not any("ayer_3 " in line for line in lines)
    assert any(line.startswith("and 68 lighter positions") for line in lines)
    assert len(lines) < 90


# ---- the pages about it


def test_the_page_mentions_every_key():
    page = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")
    report = json.loads(inspect("model.py:make", "--json").stdout)
    keys = set(report) | set(report["stages"][0])
    assert {key for key in keys if f"`{key}`" not in page} == set()


def test_the_page_lists_the_allowed_operators_and_no_others():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    listed = re.findall(r"`([^`]+)`", page.partition("## Allowed operators")[2].partition("\n## ")[0])
    short = [name.removeprefix("aten.").removesuffix(".default") for name in operators()]
    assert sorted(listed) == sorted(short)
    assert f"{len(short)} operators" in page
    assert all(f"{dtype}" in page for dtype in ITEM_BYTES)
